"""Whether another process of this host still runs, as Linux tells: a process that is killed is missed at once."""

import hashlib
import os
from pathlib import Path

import numpy as np


def identity() -> np.ndarray:
    """Where numbers of processes are counted, in two words, and this one's number and beginning, uint32 (4,).

    Zeros where Linux does not say.
    """
    try:
        counted = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
        began = _began(os.getpid())
    except OSError:
        return np.zeros(4, np.uint32)
    words = np.frombuffer(hashlib.blake2b(counted.encode(), digest_size=8).digest(), np.uint32)
    return np.array([*words, os.getpid(), began or 0], np.uint32)


class Neighbours:
    """The other processes of a job on one host.

    Attributes:
        rank: Of this process.
        num: Of all processes of the job.
    """

    def __init__(self, identities: np.ndarray, rank: int) -> None:
        self.rank, self.num, own = rank, len(identities), identities[rank]
        here = (identities[:, :2] == own[:2]).all(1) & own[:2].any()
        self._known = {
            other: (int(pid), int(began))
            for other, (pid, began) in enumerate(identities[:, 2:])
            if here[other] and other != rank
        }

    def gone(self) -> list[int]:
        """Those that do not run any more."""
        return [rank for rank, (pid, began) in self._known.items() if _is_gone(pid, began)]


def _is_gone(pid: int, began: int) -> bool:
    try:
        return _began(pid) != began
    except OSError:  # it may not be looked at
        return False


def _began(pid: int) -> int | None:
    """When a process began, in ticks of this machine; None where there is none, or only its status is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19]) & 0xFFFFFFFF
