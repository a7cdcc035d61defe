"""`python -m validation.fuzz --seeds 0:1000`: random programs, each against eager torch; `--minimise SEED`; `--xla`."""

import argparse
import collections
import os
import sys
import time

from validation.fuzz.workers import Judges


def main() -> int:
    """Run what the command line asks for; 0 if there is nothing to mend."""
    parser = argparse.ArgumentParser(prog="python -m validation.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="first:last, the last not included; or one number")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--minimise", type=int, metavar="SEED", help="shrink the case of a seed, and print it")
    parser.add_argument(
        "--xla", type=int, metavar="NUM", help="judge XLA's partitioner alone, on so many drawn layouts"
    )
    parser.add_argument("--only", default="", help="of context,expert,stage: programs that have one of them")
    parser.add_argument("--verbose", action="store_true", help="print refusals too")
    args = parser.parse_args()
    if args.minimise is not None:
        from validation.fuzz.minimise import minimise
        from validation.fuzz.programs import draw

        print(minimise(draw(args.minimise)))
        return 0
    if args.xla is not None:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        import conftest  # noqa: F401  (eight devices)
        from validation.fuzz.xla import sweep

        wrong: collections.Counter[str] = collections.Counter()
        for program, fault in sweep(args.xla):
            wrong[program] += 1
            print(f"{program}: {fault}", flush=True)
        print(f"Wrong of {args.xla} layouts each: {dict(wrong)}")
        return int(any("products, in steps" in program for program in wrong))
    from validation.fuzz.programs import draw, parallelisms

    first, _, last = args.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    given = (seed for seed in seeds if not args.only or parallelisms(draw(seed)) & set(args.only.split(",")))
    counts: collections.Counter[str] = collections.Counter()
    start = time.time()
    with Judges(args.jobs) as judges:
        for seed, verdict in judges.verdicts(given):
            counts[verdict.kind] += 1
            if not verdict.is_fine or (args.verbose and verdict.kind == "refused"):
                print(f"{seed}: {verdict}", flush=True)
    table = ", ".join(f"{num} {kind}" for kind, num in counts.most_common())
    print(f"{counts.total()} programs in {time.time() - start:.0f} s: {table}")
    return int(any(kind not in ("right", "refused") for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
