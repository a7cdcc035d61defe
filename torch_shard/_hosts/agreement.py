"""Facts that must be the same in all processes, compared before they can do harm."""

import hashlib
from collections.abc import Callable, Mapping

import jax

from torch_shard._common.caller import caller
from torch_shard._hosts.processes import exchange

MOST = 8
"""Differences that an error names."""


class ProcessMismatchError(ValueError):
    """Processes of a job differ where they must be alike."""


def compare(subject: str, facts: Mapping[str, object], *, advice: Callable[[str], str] = lambda name: "") -> None:
    """Raise in every process if a fact differs between any two.

    Args:
        subject: What they are about.
        facts: By name; those that only some processes have, as parts of an array, are compared among these. What is
            shown in errors is `str`, and bytes are digests, which are not shown.
        advice: What to do, by the name of the first fact that differs.
    """
    if jax.process_count() == 1:
        return
    given = {name: fact if isinstance(fact, bytes) else str(fact) for name, fact in facts.items()}
    whole = digest(repr(list(given.items())).encode())
    if len(set(exchange(lambda: whole, subject))) == 1:
        return
    tables = exchange(lambda: given, subject)
    names = dict.fromkeys(name for table in tables for name in table)
    faults = {name: fault for name in names if (fault := _fault(name, tables)) is not None}
    if faults:
        shown = [*list(faults.values())[:MOST], *([f"and {len(faults) - MOST} more"] if len(faults) > MOST else [])]
        raise ProcessMismatchError(f"{caller()}: {'; '.join(shown)}. {advice(next(iter(faults)))}".strip())


def digest(data: "bytes | memoryview") -> bytes:
    """What stands for bytes: equal bytes have equal ones, and others have others."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _fault(name: str, tables: list[dict[str, str | bytes]]) -> str | None:
    """Say between which processes a fact differs, of those that have it."""
    having = [(process, table[name]) for process, table in enumerate(tables) if name in table]
    (first, wanted), *others = having
    for process, found in others:
        if found != wanted:
            values = "" if isinstance(found, bytes) or isinstance(wanted, bytes) else f" ({wanted} and {found})"
            return f"{name} differs between process {first} and {process}{values}"
    return None
