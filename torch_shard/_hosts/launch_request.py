"""What a user asks for, by arguments or by JAX's own variables, completed by what launchers say."""

import dataclasses
import re

from torch_shard._common.caller import caller
from torch_shard._common.validate import is_integer
from torch_shard._hosts.launchers import (
    HOW,
    LOOPBACK,
    Environment,
    Found,
    number,
    read_launchers,
    refuse_separate,
    says,
)

_HOSTS_HERE = ("localhost", LOOPBACK, "[::1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What was asked for; None is left to the launcher.

    Attributes:
        coordinator: `host:port` of process 0.
        num_processes: Of the job.
        process_id: Of this process, from 0.
        says: The arguments or variables, with their values.
        by_arguments: Some of it by arguments, which decide.
    """

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    says: str
    by_arguments: bool = False

    def __post_init__(self) -> None:
        fault = None
        if self.num_processes is not None and (self.process_id or 0) >= self.num_processes:
            fault = "processes are numbered from 0: the number of one must be less than the number of all"
        if self.coordinator is not None and not re.fullmatch(r".+:\d+", str(self.coordinator)):
            fault = "the coordinator's address must be host:port"
        if self.num_processes is not None and not (is_integer(self.num_processes) and self.num_processes >= 1):
            fault = "the number of processes must be a positive integer"
        if self.process_id is not None and not (is_integer(self.process_id) and self.process_id >= 0):
            fault = "the number of a process must be an integer of at least 0"
        if fault:
            raise ValueError(f"{caller()}: {fault}, found {self.says}.")

    @property
    def is_whole(self) -> bool:
        """No launcher is needed to say how many there are, and which this is."""
        return self.num_processes == 1 or None not in (self.num_processes, self.process_id)

    def or_else(self, other: "LaunchRequest") -> "LaunchRequest":
        """Take from another what this one leaves open; a run of its own leaves nothing open."""
        if self.num_processes == 1:
            return self
        return LaunchRequest(
            coordinator=other.coordinator if self.coordinator is None else self.coordinator,
            num_processes=other.num_processes if self.num_processes is None else self.num_processes,
            process_id=other.process_id if self.process_id is None else self.process_id,
            says=", ".join(filter(None, (self.says, other.says))),
            by_arguments=self.by_arguments,
        )


def of_variables(env: Environment) -> LaunchRequest:
    """Read JAX's own variables, and those of MaxText, which has others for the same."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    coordinator = env.get(names[0])
    if coordinator is None and "JAX_COORDINATOR_IP" in env and "JAX_COORDINATOR_PORT" in env:
        coordinator = f"{env['JAX_COORDINATOR_IP']}:{env['JAX_COORDINATOR_PORT']}"
        # Names that others use too: of JAX only beside the address.
        maxtext = ("JAX_COORDINATOR_IP", "NNODES", "NODE_RANK")
        names = tuple(own if own in env else other for own, other in zip(names, maxtext, strict=True))
    count, index = (number(env, name) if name in env else None for name in names[1:])
    return LaunchRequest(coordinator=coordinator, num_processes=count, process_id=index, says=says(env, *names))


def find(env: Environment, asked: LaunchRequest) -> Found | None:
    """Find how this process was started: by what was asked for, else by the innermost launcher."""
    found, faults = read_launchers(env)
    if asked.is_whole:
        found.insert(0, _as_found(asked, found))
    if not found and faults:
        raise faults[0]
    if not found and asked.says:
        open_ = "which of them this is" if asked.num_processes else "how many processes there are"
        raise ValueError(f"{caller()}: found {asked.says}, which does not say {open_}. Or {HOW}.")
    if not found:
        return None
    if not asked.by_arguments and asked.num_processes != 1:
        refuse_separate(found)
    return _completed(found[0], asked)


def _as_found(asked: LaunchRequest, found: list[Found]) -> Found:
    """What was asked for, like the word of a launcher; a launcher that says the same may say more."""
    count, index = asked.num_processes or 1, asked.process_id or 0
    launcher = "arguments" if asked.by_arguments else "variables of JAX"
    here = (asked.coordinator or "").rpartition(":")[0] in _HOSTS_HERE
    own = Found(launcher, asked.says, count, index, asked.coordinator, (index, count) if here else None)
    return next((one for one in found if (one.num_processes, one.process_id) == (count, index)), own)


def _completed(found: Found, asked: LaunchRequest) -> Found:
    both = ((asked.num_processes, found.num_processes), (asked.process_id, found.process_id))
    if any(None not in pair and pair[0] != pair[1] for pair in both):
        raise ValueError(f"{caller()}: {asked.says} contradicts {found.says} ({found.launcher}). Or {HOW}.")
    count, index = (one if one is not None else other for one, other in both)
    coordinator = asked.coordinator or found.coordinator
    by_jax = found.by_jax and None in (count, index, coordinator)
    if not by_jax and coordinator is None and count != 1:
        raise ValueError(
            f"{caller()}: this is one of {count} processes ({found.launcher}: {found.says}), and nothing says where "
            "process 0 runs. Give coordinator_address= (or JAX_COORDINATOR_ADDRESS): its host and a free port "
            "there, as in node001:62464."
        )
    return dataclasses.replace(found, num_processes=count, process_id=index, coordinator=coordinator, by_jax=by_jax)
