"""Runs the zoo row by row, each in a process, and writes a section: `python -m validation.zoo.report --write`."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import warnings
from typing import Any

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / "results.json", HERE.parent.parent / "docs" / "proof.md"

STEPS, MESHES = 3, ((1, 1), (4, 2))
LIMIT_S = 300  # for a row, so that one that hangs ends


def outcome(row: Any) -> dict[str, Any]:
    """Train a row on each mesh beside eager torch, and say what came out."""
    import jax

    from tests.oracles.eager import assert_follows, eager_trajectory

    try:
        row = row.split()
        trajectory = eager_trajectory(row, STEPS)
    except Exception as error:
        return {"result": "eager torch fails", "said": _said(error)}
    seconds: list[float] = []
    for sizes in MESHES:
        try:
            with jax.enable_x64(row.wide):
                assert_follows(row, row.model(), trajectory, sizes, seconds=seconds)
        except AssertionError as error:
            return {"result": "wrong", "mesh": sizes, "said": _said(error)}
        except Exception as error:
            kind = "refused" if _is_ours(error) else "crashed"
            return {"result": kind, "mesh": sizes, "error": type(error).__name__, "said": _said(error)}
    return {"result": "right", "first_step_s": [round(s, 1) for s in seconds[::STEPS]]}


def _said(error: BaseException) -> str:
    return "\n".join(line for line in str(error).splitlines() if line.strip())[:2000]


def _is_ours(error: BaseException) -> bool:
    """Tell whether an error was raised by this package itself."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and "torch_shard" in frame.tb_frame.f_code.co_filename


def work(names: list[str], out: pathlib.Path) -> None:
    """Run rows one after the other; each is noted before it starts and when it is done."""
    import jax
    import torch

    torch.set_num_threads(1)  # as many threads as cores wait for each other where others work too
    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    from validation.zoo.table import NAMED

    for name in names:
        note(out, name, {"result": "the process ended"})
        missing = NAMED[name].missing
        start = time.perf_counter()
        found = {"result": "skipped", "said": missing} if missing else outcome(NAMED[name])
        found["total_s"] = round(time.perf_counter() - start, 1)
        note(out, name, found)
        sys.stdout.write(f"{name}: {found['result']} {found.get('first_step_s', '')} {found['total_s']}\n")


def read(out: pathlib.Path) -> dict[str, Any]:
    return json.loads(out.read_text()) if out.exists() else {}


def note(out: pathlib.Path, name: str, found: dict[str, Any]) -> None:
    text = json.dumps({**read(out), name: found}, indent=1)
    part = out.with_suffix(".part")
    part.write_text(text)
    part.replace(out)


def run(names: list[str], out: pathlib.Path, module: str = "validation.zoo.report") -> dict[str, Any]:
    """Run rows in a process that is started again where a row ends it."""
    left = list(names)
    while left:
        known = read(out)
        for name in left:
            known.pop(name, None)
        out.write_text(json.dumps(known, indent=1))
        child = subprocess.Popen([sys.executable, "-m", module, "--work", str(out), *left])
        _wait(child, out, left)
        done = read(out)
        left = [name for name in left if name not in done]
    return read(out)


def _wait(child: subprocess.Popen[bytes], out: pathlib.Path, names: list[str]) -> None:
    last, since = 0, time.monotonic()
    while child.poll() is None:
        time.sleep(0.5)
        done = sum(name in read(out) for name in names)
        if done != last:
            last, since = done, time.monotonic()
        if time.monotonic() - since > LIMIT_S:
            child.kill()
            child.wait()


HEAD = """Models and losses of packages that were not written for this one, each with its own code as it is installed,
made small and without any download. Each was trained for three steps on one device and on a `(4, 2)` mesh beside
eager torch on the CPU: the loss, every gradient, and every parameter and buffer after each step had to agree.

{counts}

{packages}

What is refused, and the line that is why:

{refused}

{link}, with seconds until the first step. `pip install -e '.[zoo]'` installs the packages, `pytest validation/zoo`
runs the rows, and `python -m validation.zoo.report --write` makes this table. Rows were measured one by one while the
package changed; those that were not measured are not shown.
"""


COLUMNS = ("package", "model or loss", "result", "first step, s, on (1, 1) and (4, 2)")


def page(found: dict[str, Any]) -> str:
    """The section of the documentation; all rows go into a file beside it."""
    from docs.pages import beside, table
    from validation.zoo.rows import PACKAGES
    from validation.zoo.table import NAMED

    known = {name: found[name] for name in NAMED if name in found}
    results = [of["result"] for of in known.values()]
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in dict.fromkeys(sorted(results, key=_rank)))
    packages: dict[str, list[bool]] = {}
    for name, of in known.items():
        packages.setdefault(PACKAGES[NAMED[name].package], []).append(of["result"] == "right")
    lines = {name: _line(PACKAGES[NAMED[name].package], NAMED[name], of) for name, of in known.items()}
    return HEAD.format(
        counts=f"{len(known)} models and losses of {len(packages)} packages: {counts}.",
        packages=", ".join(f"{package} {sum(right)} of {len(right)}" for package, right in packages.items()) + ".",
        refused=table(COLUMNS[:3], [lines[name][:3] for name, of in known.items() if of["result"] != "right"]),
        link=beside(PAGE, "zoo", COLUMNS, list(lines.values())),
    )


def _rank(result: str) -> int:
    return ["right", "refused"].index(result) if result in ("right", "refused") else 2


def _line(package: str, row: Any, of: dict[str, Any]) -> tuple[str, ...]:
    result = of["result"] + (" (in float64)" if row.wide and of["result"] == "right" else "")
    if of["result"] == "refused":
        lines = of["said"].splitlines()
        source = lines[0].rpartition(": ")[2] if lines[0].startswith("File") else lines[0]
        result = f"refused: `{source.strip().replace('|', chr(92) + '|')}`"
    seconds = ", ".join(f"{s:.0f}" if s >= 1 else "<1" for s in of.get("first_step_s", []))
    return package, row.name, result, seconds


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What every page that is made row by row takes."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("names", nargs="*", help="parts of the names of rows; all without any")
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write the page of the documentation")
    parser.add_argument("--no-run", action="store_true", help="take the results as they are")
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="where the results go as JSON")
    parser.add_argument("--again", action="store_true", help="leave out the rows whose result is right")
    options = parser.parse_args()
    if options.work is not None:
        work(options.names, options.work)
        os._exit(0)  # some packages leave threads behind
    from validation.zoo.table import NAMED

    names = [n for n in NAMED if not options.names or any(part in n for part in options.names)]
    if options.again:
        names = [n for n in names if read(options.out).get(n, {}).get("result") != "right"]
    if not options.no_run:
        run(names, options.out)
    if options.write:
        from docs.pages import put

        put(PAGE, "zoo", page(read(options.out)))


if __name__ == "__main__":
    main()
