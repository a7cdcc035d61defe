"""`python -m validation.lives --seeds 0:500`: random lives of runs, each beside the same life in eager torch."""

import sys

from validation.judging import judge_all, parser, seeds_of
from validation.lives.life import judge


def main() -> int:
    """Live what the command line asks for; 0 if there is nothing to mend."""
    args = parser("validation.lives", __doc__).parse_args()
    return judge_all(judge, seeds_of(args), args)


if __name__ == "__main__":
    sys.exit(main())
