"""Which branches are checks: every way to write one is tried."""

import linecache
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from torch_shard._capture.checks import leads_only_to_raise

LOGGER = logging.getLogger("quiet")
ANOTHER = logging.getLogger("another")


class Asked:
    """Stands for a tensor: says what `leads_only_to_raise` says, or remembers that it cannot."""

    answer: bool | None = None

    def __bool__(self) -> bool:
        self.answer = leads_only_to_raise(sys._getframe(1))
        return bool(self.answer)

    def all(self) -> "Asked":
        return self

    any = all

    def __lt__(self, other: Any) -> "Asked":
        return self


def plain(*lines: str) -> Callable[[Any], None]:
    """A function with asserts as Python compiles them; pytest rewrites those of this file."""
    text, name = "\n    ".join(["def check(x):", *lines]), f"<{lines}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    found: dict[str, Any] = {}
    exec(compile(text, name, "exec"), found)
    return found["check"]


def rewritten_assert(x: Any) -> None:
    assert x, f"message {x!r}"


def rewritten_assert_of_call(x: Any) -> None:
    assert x.all()


def rewritten_assert_not(x: Any) -> None:
    assert not x.all()


def rewritten_assert_and(x: Any) -> None:
    also = True
    assert also and x.all() and x < 3  # noqa: PT018  (this shape is what is tested)


def raise_if(x: Any) -> None:
    if x:
        raise ValueError("bad")


def raise_if_not(x: Any) -> None:
    if not x:
        detail = "long" if x is None else "short"
        raise ValueError(f"bad {detail}")


def raise_if_explicit(x: Any) -> None:
    if bool(x):
        raise ValueError("bad")


def raise_in_else(x: Any) -> int:
    if x:
        return 1
    else:
        raise ValueError("bad")


def raise_in_with(x: Any) -> None:
    with pytest.MonkeyPatch.context():
        if x:
            raise ValueError("bad")


def raise_if_last(x: Any) -> None:
    also = True
    if also and not x.all():
        raise ValueError("bad")


def raise_if_either(x: Any) -> None:
    if x or x.all():
        raise ValueError("bad")


def raise_unless_both(x: Any) -> None:
    if not (x and x.all()):
        raise ValueError("bad")


def raise_if_chosen(x: Any, which: bool = True) -> None:
    if x if which else 0:
        raise ValueError("bad")


def raise_if_named(x: Any) -> None:
    if bad := x.all():
        raise ValueError(f"bad {bad!r}")


def raise_in_elif(x: Any) -> int:
    if x is None:
        return 1
    elif x:
        raise ValueError("bad")
    return 2


def raise_afterwards(x: Any) -> int:
    if x:
        return 1
    raise ValueError("bad")


def raise_in_handler(x: Any) -> None:
    try:
        raise KeyError
    except KeyError:
        if x:
            raise ValueError("bad") from None


def warn_if(x: Any) -> None:
    if x:
        warnings.warn(f"bad {x!r}", stacklevel=2)


def warn_unless(x: Any) -> None:
    if not x:
        logging.getLogger(__name__).error("bad")


def warn_in_else(x: Any) -> None:
    if x:
        pass
    else:
        print("bad")  # noqa: T201
        LOGGER.warning("bad")


def warn_or_raise(x: Any) -> None:
    if x:
        raise ValueError("bad")
    else:
        print("good")  # noqa: T201


def branch_that_is_settled(x: Any, kind: str = "float32") -> int:
    if x and kind == "float16":
        return 1
    return 2


def branch_that_is_settled_by_or(x: Any, kind: str = "float32") -> int:
    if x or kind == "float32":
        return 1
    return 2


def branch_that_is_open(x: Any, kind: str = "float16") -> int:
    if x and kind == "float16":
        return 1
    return 2


def either(x: Any) -> None:
    also = True
    assert x or also


class Written(list[Any]):
    def __setitem__(self, where: Any, value: Any) -> None: ...


def write_where(x: Any) -> None:
    if x.any():
        Written()[x] = float("-inf")
        Written()[x] = -1


def write_elsewhere(x: Any, y: Any = 0) -> None:
    if x.any():
        Written()[y] = 1


def write_all(x: Any) -> None:
    if x.all():
        Written()[x] = 1


def write_what_is_computed(x: Any) -> None:
    if x.any():
        Written()[x] = abs(1)


def warn_by_function(x: Any) -> None:
    def rank_zero_warn(message: str) -> None: ...

    if x:
        rank_zero_warn("bad")


CHECKS = [
    (write_where, True),
    (warn_by_function, False),
    (branch_that_is_settled, True),
    (branch_that_is_settled_by_or, False),
    (plain("assert x, 'message'"), True),
    (warn_if, False),
    (warn_unless, True),
    (warn_in_else, True),
    (warn_or_raise, False),
    (plain("assert not x.all()"), False),
    (plain("assert x < x < x"), True),
    (plain("assert (x.all()", "    and x)"), True),
    (plain("also = False", "assert also or x"), True),
    (rewritten_assert, True),
    (rewritten_assert_of_call, True),
    (rewritten_assert_not, False),
    (rewritten_assert_and, True),
    (raise_if, False),
    (raise_if_not, True),
    (raise_if_explicit, False),
    (raise_in_else, True),
    (raise_in_with, False),
    (raise_if_last, True),
    (raise_if_either, False),
    (raise_unless_both, True),
    (raise_if_chosen, False),
    (raise_if_named, False),
    (raise_in_elif, False),
    (raise_afterwards, True),
    (raise_in_handler, False),
    (either, False),
]


@pytest.mark.parametrize(
    ("check", "passes"),
    CHECKS,
    ids=[f.__code__.co_filename if f.__name__ == "check" else f.__name__ for f, _ in CHECKS],
)
def test_checks_pass(check: Any, passes: bool) -> None:
    asked = Asked()
    check(asked)  # and does not raise
    assert asked.answer is passes


def branch(x: Any) -> int:
    if x:
        return 1
    return 2


def caught(x: Any) -> int:
    try:
        if x:
            raise ValueError("bad")
    except ValueError:
        return 1
    return 2


def sometimes(x: Any, also: bool = False) -> None:
    if x:  # noqa: SIM102  (this shape is what is tested)
        if also:
            raise ValueError("bad")


def loop(x: Any) -> None:
    while x:
        return


def value(x: Any) -> bool:
    return bool(x)


def both(x: Any) -> None:
    if x and x:
        raise ValueError("bad")


def inner(x: Any) -> None:
    if 1 if x else 0:
        raise ValueError("bad")


def kept(x: Any) -> None:
    if bad := bool(x):
        raise ValueError(f"bad {bad}")


def contained(x: Any) -> None:
    if 3 in [x]:
        raise ValueError("bad")


def finally_left(x: Any) -> int:
    try:
        if x:
            raise ValueError("bad")
    finally:
        return 2  # noqa: B012  (this shape is what is tested)


def without_source(x: Any) -> None:
    exec(compile("if x: raise ValueError", "a file that is not there", "exec"), {"x": x})


def warn_and_change(x: Any) -> int:
    if x:
        LOGGER.warning("bad")
        return 1
    return 2


def warn_or_change(x: Any) -> int:
    found = 1
    if x:
        LOGGER.warning("bad")
    else:
        found = 2
    return found


def log_of_another(x: Any) -> None:
    if x:
        ANOTHER.error("this may do anything")


def warn_of_what_it_keeps(x: Any) -> object:
    kept = None
    if x:
        print(kept := "bad")  # noqa: T201
    return kept


DECISIONS = [
    warn_and_change,
    warn_or_change,
    log_of_another,
    warn_of_what_it_keeps,
    branch,
    caught,
    sometimes,
    loop,
    value,
    both,
]
DECISIONS += [
    branch_that_is_open,
    write_elsewhere,
    write_all,
    write_what_is_computed,
    inner,
    kept,
    contained,
    finally_left,
    without_source,
]


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda f: f.__name__)
def test_decisions_do_not(decision: Any) -> None:
    asked = Asked()
    decision(asked)
    assert asked.answer is None


def test_a_file_that_has_changed_says_nothing() -> None:
    check, asked = plain("if x:", "    raise KeyError"), Asked()
    text = ["\n", *linecache.getlines(check.__code__.co_filename)]
    linecache.cache[check.__code__.co_filename] = 1, None, text, check.__code__.co_filename
    check(asked)
    assert asked.answer is None
