"""Undo mended faults one by one, and see whether the tests find them: `python tools/undo_fixes.py [commit ...]`.

Each commit of FIXES mended a fault. What it changed in `torch_shard/` is taken back in a clone of HEAD, and tests run
there until one fails: the files of tests that the commit changed, then those of the packages that it touched, then
`tests/system`. `--near` runs the first of these alone, `--slow` the slow part of them in place of the default part. A
row is printed as soon as it is known.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
FIXES = {
    "6143385": "steps on several simulated devices read programs back from the compile cache",
    "a3cb5cb": "a bias of attention whose dtype PyTorch refuses was accepted",
    "d5f3c32": "loops stacked gradients in float32 that were computed in bfloat16",
    "d609f70": "the search for a plan compiled first what does not fit",
    "8aae894": "drop path made a new tensor at each capture, and Swin was refused",
    "0d4e3d3": "tokens in pieces ended in JAX's TypeError within experts",
    "66c7a8c": "layers that cannot be a pipeline were not refused as such",
    "ace87de": "layers that make one dim of rows and sequence lost their split",
    "43d7cf9": "products of einsum lost the split of heads and rows",
    "6a0829e": "a collective beside a loop was counted in each iteration",
    "155c7ec": "experts and tied matrices within pipelines",
    "b8220ee": "heads that do not divide over two axes",
    "07210b7": "rows and the sequence could be split over the same axis",
    "567a740": "arithmetic of causal kernels was counted twice",
    "c93b577": "outputs of make_apply were gathered",
    "845567e": "LSTM under compute_dtype rounded its states",
    "7f63dbf": "generation gave the cache by a name that decoders do not know",
    "fc54ff0": "numbers on the left of an operator were frozen",
    "9e24fc9": "a tensor was not equal to itself after a write to what it is a view of",
    "35b0ead": "what fakes stood for was kept alive",
    "80ff62f": "a process that an error ends waited for thirty seconds",
    "12844e2": "torch-shard run left processes behind",
    "0e6dd21": "what a DTensor style takes whole and wants whole was split",
    "15c3aa0": "fmod, and so rolls of integers, were wrong",
    "52f5261": "a topology changed the environment",
    "d211df1": "bags whose indices the devices do not divide were wrong",
    "f654f02": "large values went over the channel in large jobs",
    "3a3e4b2": "the best of what is scaled was not compiled whole",
}
"""Commits, and what was wrong before each."""


def run(*command: str, cwd: pathlib.Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return its end, with its output as text."""
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, **options)


def undo(clone: pathlib.Path, commit: str) -> list[list[str]]:
    """Take back what a commit changed in the package.

    Returns:
        Paths of tests, the nearest first: what it changed, the packages that it touched, the whole system.

    Raises:
        RuntimeError: It can no longer be taken back.
    """
    run("git", "reset", "--hard", "-q", cwd=clone)
    changes = run("git", "diff", "--binary", f"{commit}~", commit, "--", "torch_shard", cwd=clone).stdout
    done = run("git", "apply", "-R", "--3way", cwd=clone, input=changes)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    changed = run("git", "diff", "--name-only", f"{commit}~", commit, "--", "tests", cwd=clone).stdout.split()
    rooms = dict.fromkeys(re.findall(r"^diff .* b/torch_shard/_?(\w+)", changes, re.MULTILINE))
    near = [path for path in changed if pathlib.Path(path).name.startswith("test_")]
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
    parser.add_argument("--near", action="store_true", help="run only the files of tests that the commit changed")
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
