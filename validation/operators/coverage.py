"""The table of operator coverage: PyTorch's own samples of every operator, captured, lowered and jitted.

`python -m validation.operators.coverage` runs them all and prints the operators that are not right; `--write` makes the
table `docs/tables/operators.csv`, and the section of `docs/proof.md` that links to it.
Workers are processes, so that a crash or a hang costs one operator.
"""

import argparse
import collections
import csv
import json
import pathlib
import queue
import re
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

from docs.pages import beside, put
from docs.pages import table as table_of

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "proof.md"
TABLE = PAGE.parent / "tables" / "operators.csv"
COLUMNS = ("op", "forward", "gradient", "reason")
TIMEOUT_S = 240.0
OPS_PER_WORKER = 60
WORST_FIRST = ("wrong", "error", "refused", "random", "right", "dynamic")


def all_ops() -> dict[str, Any]:
    """The operators of the installed PyTorch, by their full names."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def work(names: list[str], num_samples: int) -> None:
    """Check operators and print one line of JSON for each."""
    warnings.simplefilter("ignore")
    import jax

    from validation.operators.samples import outcomes_of

    # The samples are small and differ in shape: compiling them would take longer than running them.
    jax.config.update("jax_disable_most_optimizations", True)
    ops = all_ops()
    print(json.dumps({"ready": True}), flush=True)
    for name in names:
        found = [(where, kind, o.status, o.reason) for where, kind, o in outcomes_of(ops[name], num_samples)]
        print(json.dumps({"op": name, "found": found}), flush=True)
        jax.clear_caches()


def run_all(names: list[str], num_samples: int, jobs: int) -> dict[str, list]:
    """What every operator gave, by workers that are replaced when one dies or hangs."""
    chunks: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for start in range(0, len(names), OPS_PER_WORKER):
        chunks.put(names[start : start + OPS_PER_WORKER])
    results: dict[str, list] = {}

    def drain() -> None:
        while not chunks.empty():
            rest = chunks.get()
            while rest:
                rest = _run_chunk(rest, num_samples, results)

    threads = [threading.Thread(target=drain) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _run_chunk(names: list[str], num_samples: int, results: dict[str, list]) -> list[str]:
    """Run one worker; return the operators that it did not come to."""
    command = [sys.executable, "-m", "validation.operators.coverage", "--worker", "--samples", str(num_samples)]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(names))
    worker.stdin.close()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: [lines.put(line) for line in [*worker.stdout, ""]], daemon=True).start()
    pending = list(names)
    while pending:
        try:
            line = lines.get(timeout=TIMEOUT_S)
            message = json.loads(line) if line.startswith("{") else None
        except queue.Empty:
            message = None
        if message is None:
            results[pending[0]] = [("", "forward", "error", f"the worker hung or died ({worker.poll()})")]
            pending.pop(0)
            break
        if "op" in message:
            results[message["op"]] = message["found"]
            pending.remove(message["op"])
    worker.kill()
    return pending


def summary(found: list[list[str]], kind: str) -> tuple[str, str]:
    """The status of one kind of check over all its samples, and the reason for it."""
    of_kind = [(_status(status, reason), reason) for _, k, status, reason in found if k == kind]
    judged = [(status, reason) for status, reason in of_kind if status != "skipped"]
    if not judged:
        return "none", of_kind[0][1] if of_kind else ""
    statuses = {status for status, _ in judged}
    worst = next(s for s in WORST_FIRST if s in statuses)
    num_dynamic = sum(status == "dynamic" for status, _ in judged)
    if worst in ("right", "random"):
        return worst, f"values decide in {num_dynamic} of {len(judged)} samples" if num_dynamic else ""
    if worst == "dynamic":
        return worst, "its shape, or a Python number, depends on values"
    reasons = collections.Counter(reason for status, reason in judged if status == worst)
    count = sum(reasons.values())
    return worst, "; ".join(list(reasons)[:2]) + (f" ({count} of {len(judged)} samples)" if count < len(judged) else "")


def _status(status: str, reason: str) -> str:
    by_nature = "Here the shape of a result depends" in reason or "Here Python needs the value" in reason
    return "dynamic" if status == "refused" and by_nature else status


def rows(results: dict[str, list]) -> list[tuple[str, str, str, str]]:
    """`(op, forward, gradient, reason)` of every operator."""
    table = []
    for name in sorted(results):
        (forward, why), (gradient, why_gradient) = (summary(results[name], kind) for kind in ("forward", "gradient"))
        reason = why if why and why == why_gradient else "; ".join(filter(None, (why, why_gradient)))
        table.append((name, forward, gradient, re.sub(r"\s+", " ", reason.replace("|", "/"))))
    return table


def committed() -> list[tuple[str, str, str, str]]:
    """The rows of the table in the repository."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [(op, forward, gradient, reason) for op, forward, gradient, reason in csv.reader(file)][1:]


def totals(table: list[tuple[str, str, str, str]]) -> list[tuple[str, ...]]:
    """Counts of each status over all operators, nn.functional, and those with a static output shape."""
    static = [row for row in table if "dynamic" not in row[1:3]]
    groups = {
        "all": table,
        "nn.functional": [row for row in table if row[0].startswith("nn.functional")],
        "static shape": static,
    }
    lines = []
    for (name, group), (column, kind) in ((g, k) for g in groups.items() for k in ((1, "forward"), (2, "gradient"))):
        count = collections.Counter(row[column] for row in group)
        good, judged = count["right"] + count["random"], len(group) - count["none"]
        share = f"{100 * good / max(judged, 1):.1f} %"
        numbers = [str(count[s]) for s in ("right", "random", "refused", "dynamic", "wrong", "error", "none")]
        lines.append((f"{name}, {kind}", *numbers, share))
    return lines


def section(rows_of_all: list[tuple[str, str, str, str]], num_samples: int) -> str:
    """The section of the page; all rows go into the table beside it."""
    import torch

    head = (
        "PyTorch's own operator samples (`op_db`), captured, lowered and jitted, against eager torch on the CPU: the\n"
        "forward pass (float32, integers and booleans, also in place and with `out=`) and the gradient of a weighted\n"
        "sum of the outputs. Made by `python -m validation.operators.coverage --write`\n"
        f"(torch {torch.__version__.split('+')[0]}, up to {num_samples} samples an operator).\n\n"
        "right: equal to eager torch on every sample. random: shape, dtype and support are compared. refused: at\n"
        "least one sample raises NotImplementedError by name. dynamic: the output's shape, or a number that Python\n"
        "needs, depends on values, which is refused by nature. none: not applicable (no derivative, no sample that\n"
        "eager torch runs on dense CPU tensors, or 64-bit values, which JAX has switched off).\n\n"
    )
    columns = ("", "right", "random", "refused", "dynamic", "wrong", "error", "none", "right of judged")
    link = beside(PAGE, "operators", COLUMNS, rows_of_all)
    refused = ", ".join(f"`{op}`" for op, *found, _ in rows_of_all if "refused" in found)
    return f"{head}{table_of(columns, totals(rows_of_all))}\n\n{link}. Refused, in one sample or more: {refused}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="", help="a regular expression that names must match")
    parser.add_argument("--samples", type=int, default=6, help="samples of each operator")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--write", action="store_true", help="write the table and the page; with --ops, their rows")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.load(sys.stdin), options.samples)
        return
    start = time.monotonic()
    names = [name for name in all_ops() if re.search(options.ops, name)]
    table = rows(run_all(names, options.samples, options.jobs))
    for row in table:
        if {"wrong", "error", "refused"} & set(row[1:3]):
            print(" | ".join(row))
    for line in totals(table):
        print(" | ".join(line))
    print(f"{time.monotonic() - start:.0f} s")
    if options.write:
        others = [row for row in committed() if row[0] not in names] if options.ops else []
        put(PAGE, "operators", section(sorted([*others, *table]), options.samples))


if __name__ == "__main__":
    main()
