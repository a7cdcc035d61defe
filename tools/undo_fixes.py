"""Undo mended faults one by one, and see whether the tests find them: `python tools/undo_fixes.py [commit ...]`.

What each commit of `FIXES` mended is taken back in a clone of HEAD: what it changed in `torch_shard/`, or, where lines
near by have changed since, the line of `EDITS`. Tests run there until one fails: those that the commit changed, or
that `EDITS` names, then those of the packages that it touched, then `tests/system`. `--near` runs the first of these
alone, `--slow` the slow part of them in place of the default part. A row is printed as soon as it is known.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
FIXES = {
    "a3cb5cb": "a bias of attention whose dtype PyTorch refuses was accepted",
    "d5f3c32": "loops stacked gradients in float32 that were computed in bfloat16",
    "8aae894": "drop path made a new tensor at each capture, and Swin was refused",
    "0d4e3d3": "tokens in pieces ended in JAX's TypeError within experts",
    "43d7cf9": "products of einsum lost the split of heads and rows",
    "6a0829e": "a collective beside a loop was counted in each iteration",
    "07210b7": "rows and the sequence could be split over the same axis",
    "7f63dbf": "generation gave the cache by a name that decoders do not know",
    "fc54ff0": "numbers on the left of an operator were frozen",
    "9e24fc9": "a tensor was not equal to itself after a write to what it is a view of",
    "80ff62f": "a process that an error ends waited for thirty seconds",
    "436bec3": "modules that a loss makes in each call were a change at its second call",
    "0e6dd21": "what a DTensor style takes whole and wants whole was split",
    "15c3aa0": "fmod, and so rolls of integers, were wrong",
    "52f5261": "a topology changed the environment",
    "98f2e70": "an exported optimizer had empty states of parameters without gradients",
    "079108e": "zeros of both signs were one number of a program",
    "13d6bd6": "a batch in float64 was refused",
    "53fd1de": "the record of the last batch before a failure was not written",
    "307b769": "a program that XLA's partitioner breaks ended in its own words",
    "0bdef26": "adapted functions were kept forever",
    "04bdc39": "microbatches did not go on from the buffers of the one before",
    "bf5f98c": "Ctrl-C cut a save in two",
    "a263166": "numbers that are put into a state were no arrays",
}
"""Commits, and what was wrong before each."""


class Edit(NamedTuple):
    """A mended line, as it is now and with the fault."""

    path: str
    right: str
    wrong: str
    tests: tuple[str, ...] = ()


EDITS = {
    "a3cb5cb": Edit(
        "_lowering/ops/attention.py",
        "is_taken = mask.dtype in (torch.bool, torch.float32, q.dtype)",
        "is_taken = mask.dtype is torch.bool or mask.is_floating_point()",
    ),
    "8aae894": Edit(
        "_capture/libraries.py",
        "if found is None or share != 1 - module.drop_prob or found.dtype != dtype:",
        "if True:",
    ),
    "0d4e3d3": Edit("_lowering/ops/experts.py", "    x, ids, weights = whole((x, ids, weights))\n", ""),
    "6a0829e": Edit("_cost/exposed.py", "self.run(called, clock.around.union(clock.ends))", "self.run(called)"),
    "436bec3": Edit("_capture/function_mode.py", "            self._made.add(module)\n", ""),
    "80ff62f": Edit("_hosts/session.py", "has_caught = peers.told and not peers.dying", "has_caught = peers.told"),
    "0e6dd21": Edit(
        "_plans/dtensor_styles.py",
        "stays = layout is None or (layout == desired and layout.is_replicate())",
        "stays = layout is None",
    ),
    "98f2e70": Edit(
        "_optim/from_torch.py",
        "            if tensors:\n                states[place] = tensors",
        "            states[place] = tensors",
    ),
    "43d7cf9": Edit(
        "_capture/simplify.py",
        "for num_dims in range(2, len(shape) + 1):",
        "for num_dims in range(len(shape) - 2, len(shape) - 1):",
    ),
    "fc54ff0": Edit(
        "_lowering/number_inputs.py",
        "_EITHER = (_scalar_rule(0, of=1), _scalar_rule(1))",
        "_EITHER = (_scalar_rule(1),)",
        ("tests/loss/test_answers.py",),
    ),
    "079108e": Edit(
        "_lowering/number_inputs.py",
        "if repr(other.numbers[place]) != repr(number)",
        "if other.numbers[place] != number",
        ("tests/loss/test_answers.py",),
    ),
    "13d6bd6": Edit(
        "_device/placement.py", "host_array(array, rounds=True)", "host_array(array)", ("tests/loss/test_batch.py",)
    ),
    "53fd1de": Edit(
        "_fit/loop.py",
        "            self._flush_if_possible()",
        "            self.reports.close()",
        ("tests/system/test_hosts_data.py",),
    ),
    "307b769": Edit(
        "_cost/fitting.py", 'if "[hlo verifier]" not in str(error):', "if True:", ("tests/cost/test_fitting.py",)
    ),
    "0bdef26": Edit(
        "_interop/torch_function.py", "    def _differentiable(", "    @functools.cache\n    def _differentiable("
    ),
    "9e24fc9": Edit(
        "_capture/data_dependence.py",
        "        if a is not b:\n            first",
        "        if True:\n            first",
    ),
    "04bdc39": Edit("_loss/answers.py", "goes_on=self.num > 1", "goes_on=False", ("tests/loss/test_answers.py",)),
    "bf5f98c": Edit("_io/checkpointer.py", "with uninterrupted():", "if True:"),
    "a263166": Edit(
        "_state/state.py", "        state = as_arrays(state, self.structs)\n", "", ("tests/state/test_state_checks.py",)
    ),
}
"""Faults whose commits can no longer be taken back as they are."""


def run(*command: str, cwd: pathlib.Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return its end, with its output as text."""
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, **options)


def undo(clone: pathlib.Path, commit: str) -> list[list[str]]:
    """Take back what a commit mended in the package.

    Returns:
        Paths of tests, the nearest first: what it changed, the packages that it touched, the whole system.

    Raises:
        RuntimeError: It can no longer be taken back.
    """
    run("git", "reset", "--hard", "-q", cwd=clone)
    near = run("git", "diff", "--name-only", f"{commit}~", commit, "--", "tests", cwd=clone).stdout.split()
    if edit := EDITS.get(commit):
        path = clone / "torch_shard" / edit.path
        if path.read_text().count(edit.right) != 1:
            raise RuntimeError(f"{commit}: {edit.path} has no such line: {edit.right}")
        path.write_text(path.read_text().replace(edit.right, edit.wrong))
        near = [*edit.tests, *near]
    else:
        changes = run("git", "diff", "--binary", f"{commit}~", commit, "--", "torch_shard", cwd=clone).stdout
        if (done := run("git", "apply", "-R", "--3way", cwd=clone, input=changes)).returncode:
            raise RuntimeError(f"{commit}: {done.stderr.strip()}")
    changed = run("git", "diff", "HEAD", "--name-only", "--", "torch_shard", cwd=clone).stdout
    rooms = dict.fromkeys(re.findall(r"^torch_shard/_?(\w+)", changed, re.MULTILINE))
    near = [path for path in near if pathlib.Path(path).name.startswith("test_")]
    places = [near, [f"tests/{room}" for room in rooms], ["tests/system"]]
    return [[path for path in paths if (clone / path).exists()] for paths in places]


def first_failure(clone: pathlib.Path, paths: list[str], *, slow: bool) -> str | None:
    """Run tests until one fails, and return its name."""
    options = ["-m", "slow"] if slow else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, *paths]
    done = run(*command, cwd=clone, env={**os.environ, "PYTHONPATH": str(clone)})
    found = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 5) and not found:
        return done.stdout[-300:]
    return found and found[1]


def main() -> int:
    """Print a row for each commit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commits", nargs="*", default=list(FIXES))
    parser.add_argument("--slow", action="store_true", help="run the slow part of the tests")
    parser.add_argument("--near", action="store_true", help="run only the nearest files of tests")
    args = parser.parse_args()
    num_found = 0
    with tempfile.TemporaryDirectory() as folder:
        clone = pathlib.Path(folder) / "clone"
        run("git", "clone", "-q", str(ROOT), str(clone), cwd=ROOT)
        for commit in args.commits:
            places = undo(clone, commit)[: 1 if args.near else None]
            failures = (first_failure(clone, paths, slow=args.slow) for paths in places if paths)
            found = next(filter(None, failures), None)
            num_found += bool(found)
            print(f"| {commit} | {FIXES.get(commit, '')} | {found or 'not found'} |", flush=True)
    print(f"{num_found} of {len(args.commits)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
