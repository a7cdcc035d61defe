"""Proves the rows, each in a process, and writes a section: `python -m validation.proofs.report --write`."""

import json
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

from validation.zoo.report import arguments, note, read, run

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent.parent / "docs" / "proof.md"

STEPS = 3
Cells = Mapping[str, Mapping[str, Any]]


def outcome(row: Any, plans: list[str]) -> dict[str, Any]:
    """Prove a row under these plans, and say what came out of each."""
    import torch

    import torch_shard as ts

    torch.manual_seed(0)
    try:
        found = ts.prove(*row(), plans=plans, steps=STEPS)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return {plan: {"holds": False, "refused": said} for plan in plans}
    return {proof.plan: _cell(proof) for proof in found.rows}


def _cell(proof: Any) -> dict[str, Any]:
    if proof.refused:
        return {"holds": False, "refused": proof.refused[:300]}
    worst = proof.worst()
    return {"holds": proof.holds, "worst": worst.worst, "of": f"{worst.kind} {worst.name}", "dtype": proof.dtype}


def work(names: list[str], out: pathlib.Path) -> None:
    """Prove rows one after the other; each is noted before it starts and when it is done."""
    import jax
    import torch

    torch.set_num_threads(1)  # as many threads as cores wait for each other where others work too
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    from torch_shard._inspect.prove import USUAL
    from validation.proofs.rows import TABLE

    for name in names:
        before = read(RESULTS).get(name, {}).get("cells", {})
        note(out, name, {"cells": before, "said": "the process ended"})
        start = time.perf_counter()
        missing = [plan for plan in USUAL if plan not in before]
        cells = {**before, **outcome(TABLE[name], missing)} if missing else before
        note(out, name, {"cells": {plan: cells[plan] for plan in USUAL}})
        sys.stdout.write(f"{name}: {time.perf_counter() - start:.0f} s {_worst(cells)}\n")
        sys.stdout.flush()


def _worst(cells: Cells) -> str:
    return ", ".join(f"{plan} {_shown(cell)}" for plan, cell in cells.items())


def _shown(cell: Mapping[str, Any]) -> str:
    """A cell of the page: what is in float64 has a star."""
    if cell.get("refused"):
        return "–"
    size = f"{cell['worst']:.0e}".replace("e-0", "e-") + "\\*" * (cell["dtype"].startswith("float64"))
    return size if cell["holds"] else f"**{size}**"


HEAD = """Models of transformers, diffusers and timm as they are installed, made small, with random weights, under
every usual plan on eight simulated devices. A cell is the largest difference of anything from eager torch on the CPU:
loss, outputs, every gradient, and every parameter and buffer after each of three steps of AdamW, relative to the
largest entry of the value. It holds up to 1e-5 in float32. A star: rounding hid more, and both sides were repeated in
float64, where 1e-10 is allowed (1e-5 still, if the model computes its norms in float32). Bold does not hold; a dash
does not fit the model.

{counts} The models with experts, and the {shown} others with the largest differences:

{rows}

{link}, with the reason where a plan does not fit. `python -m validation.proofs.report --write` makes this table.
"""

SHOWN = 8
"""Models without experts in the table of the page."""

APART = """
DiT embeds times up to 1,000 as sines in float32, which differ by 3e-5 between the libraries, whatever the mesh: that,
and not a layout, is what its cells show.
"""


def page(found: Mapping[str, Any]) -> str:
    """The section of the documentation; all rows go into a file beside it."""
    from docs.pages import beside, table
    from torch_shard._inspect.prove import USUAL
    from validation.proofs.rows import TABLE

    known = {name: found[name]["cells"] for name in TABLE if found.get(name, {}).get("cells")}
    fitting = [cell for row in known.values() for cell in row.values() if not cell.get("refused")]
    held = sum(cell["holds"] for cell in fitting)
    others = sorted((name for name in known if TABLE[name].group != "experts"), key=lambda name: -_largest(known[name]))
    shown = [name for name in known if TABLE[name].group == "experts"] + others[:SHOWN]
    rows = [(name, *(_shown(known[name][plan]) if plan in known[name] else "" for plan in USUAL)) for name in shown]
    whole = [(name, *(_whole(row[plan]) if plan in row else "" for plan in USUAL)) for name, row in known.items()]
    section = HEAD.format(
        counts=f"{len(known)} models, {len(fitting)} cells that fit: {held} hold, {len(fitting) - held} do not.",
        shown=min(SHOWN, len(others)),
        rows=table(("", *USUAL), rows),
        link=beside(PAGE, "proofs", ("model", *USUAL), whole),
    )
    return section + (APART if len(fitting) > held else "")


def _largest(cells: Cells) -> float:
    """Of float32, as differences in float64 are of another size; what does not hold comes first."""
    if not all(cell["holds"] for cell in cells.values() if not cell.get("refused")):
        return float("inf")
    return max((c["worst"] for c in cells.values() if not c.get("refused") and c["dtype"] == "float32"), default=0.0)


def _whole(cell: Mapping[str, Any]) -> str:
    """A cell of the file: why a plan does not fit, in place of a dash."""
    return cell["refused"].partition(". ")[0] if cell.get("refused") else _shown(cell)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--again", action="store_true", help="also the cells that are known")
    options = parser.parse_args()
    if options.work is not None:
        work(options.names, options.work)
        os._exit(0)  # some packages leave threads behind
    from torch_shard._inspect.prove import USUAL
    from validation.proofs.rows import TABLE

    names = [n for n in TABLE if not options.names or any(part in n for part in options.names)]
    kept = read(RESULTS)
    if not options.again:
        names = [n for n in names if set(kept.get(n, {}).get("cells", {})) < set(USUAL)]
    else:
        RESULTS.write_text(json.dumps({n: of for n, of in kept.items() if n not in names}, indent=1))
    if not options.no_run:
        _prove(names)
    if options.write:
        from docs.pages import put

        put(PAGE, "proofs", page(read(RESULTS)))


def _prove(names: list[str]) -> None:
    """Each row in turn, so that what is known of it is kept until it is known anew."""
    for name in names:
        out = RESULTS.with_name(f".{name}.json")
        found = run([name], out, "validation.proofs.report")
        out.unlink(missing_ok=True)
        note(RESULTS, name, found.get(name, {"cells": {}}))


if __name__ == "__main__":
    main()
