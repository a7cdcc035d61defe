"""`python -m validation.lives --seeds 0:500`: random lives of runs, each beside the same life in eager torch."""

import argparse
import collections
import multiprocessing
import os
import sys
import time

from validation.lives.life import begin, judged


def main() -> int:
    """Live what the command line asks for; 0 if there is nothing to mend."""
    parser = argparse.ArgumentParser(prog="python -m validation.lives", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first:last, the last not included")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--verbose", action="store_true", help="print refusals too")
    args = parser.parse_args()
    first, _, last = args.seeds.partition(":")
    counts: collections.Counter[str] = collections.Counter()
    start = time.time()
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.jobs, begin, maxtasksperchild=40) as pool:  # what a process has compiled stays in memory
        for seed, verdict in pool.imap_unordered(judged, range(int(first), int(last or int(first) + 1))):
            counts[verdict.kind] += 1
            if not verdict.is_fine or (args.verbose and verdict.kind == "refused"):
                print(f"{seed}: {verdict}", flush=True)
    table = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    print(f"{counts.total()} lives in {time.time() - start:.0f} s: {table}")
    return int(any(kind not in ("right", "refused") for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
