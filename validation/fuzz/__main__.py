"""`python -m validation.fuzz --seeds 0:1000`: random programs, each against eager torch; `--minimise SEED`; `--xla`."""

import collections
import os
import sys

from validation.fuzz.judge import judge_seed
from validation.judging import judge_all, parser, seeds_of


def main() -> int:
    """Run what the command line asks for; 0 if there is nothing to mend."""
    options = parser("validation.fuzz", __doc__)
    options.add_argument("--minimise", type=int, metavar="SEED", help="shrink the case of a seed, and print it")
    options.add_argument(
        "--xla", type=int, metavar="NUM", help="judge XLA's partitioner alone, on so many drawn layouts"
    )
    options.add_argument("--only", default="", help="of context,expert,stage: programs that have one of them")
    args = options.parse_args()
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

    wanted = set(args.only.split(",")) - {""}
    given = (seed for seed in seeds_of(args) if not wanted or parallelisms(draw(seed)) & wanted)
    return judge_all(judge_seed, given, args)


if __name__ == "__main__":
    sys.exit(main())
