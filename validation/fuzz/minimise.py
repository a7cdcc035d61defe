"""A smaller case with the same kind of verdict: parts are left out, one at a time, for as long as that goes."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from validation.fuzz.judge import judge
from validation.fuzz.programs import Case
from validation.judging import Judges


def minimise(case: Case) -> Case:
    """The smallest case that is found with the kind of verdict that this one has; it is judged in processes."""
    with Judges(judge, 1) as judges:

        def kind_of(case: Case) -> str:
            return next(iter(judges.verdicts([case])))[1].kind

        wanted = kind_of(case)
        while (smaller := next((c for c in _smaller(case) if kind_of(c) == wanted), None)) is not None:
            case = smaller
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """The case without one of its parts, the largest parts first."""
    for name in case.blocks if len(case.blocks) > 1 else ():
        kept = {n: value for n, value in case.blocks.items() if n != name}
        own = f"blocks.{name}"
        parts = {what: _without(getattr(case, what), own) for what in ("rules", "activations", "stored")}
        yield dataclasses.replace(case, blocks=kept, **parts)
    if case.pipeline is not None:
        yield dataclasses.replace(case, pipeline=None)
    if case.recipe is not None:
        yield dataclasses.replace(case, recipe=None)
    for what in ("stored", "activations", "options", "rules"):
        given = getattr(case, what)
        if len(given) > 3:  # by halves first
            names = list(given)
            for half in (names[: len(names) // 2], names[len(names) // 2 :]):
                yield dataclasses.replace(case, **{what: {n: given[n] for n in half}})
        for name in given:
            yield dataclasses.replace(case, **{what: {n: value for n, value in given.items() if n != name}})
    if case.batch_spec is not None and "batch" in dict(case.mesh):
        yield dataclasses.replace(case, batch_spec=None)
    for name, spec in case.rules.items():
        for fewer in _fewer(spec):
            yield dataclasses.replace(case, rules={**case.rules, name: fewer})


def _without(given: Mapping[str, Any], own: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != own and not name.startswith(own + ".")}


def _fewer(spec: P) -> Iterator[P]:
    """The spec without one of its axes."""
    for dim, part in enumerate(spec):
        axes = part if isinstance(part, tuple) else (part,) if part else ()
        for axis in axes:
            left = tuple(a for a in axes if a != axis)
            yield P(*(left[0] if len(left) == 1 else left or None if i == dim else p for i, p in enumerate(spec)))
