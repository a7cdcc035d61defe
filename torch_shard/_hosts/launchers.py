"""How this process was started: by what was asked for, else by what launchers put into its environment.

Each reader knows one launcher and reads a mapping, nothing else. Launchers are started by launchers (torchrun by srun,
mpirun in an allocation of SLURM): the readers come innermost first.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping

from torch_shard._common.caller import caller
from torch_shard._common.validate import is_integer

Environment = Mapping[str, str]
LOOPBACK = "127.0.0.1"

# Ports above those that Linux gives to outgoing connections, as JAX's own detection has them.
FIRST_PORT, NUM_PORTS = 61440, 4096

# From here on the steps of SLURM are its own: batch scripts, the shells of salloc, external ones.
FIRST_STEP_OF_SLURM = 0xFFFFFFF0

HOW = "give ts.initialize coordinator_address=, num_processes= and process_id= (num_processes=1 for a run of its own)"


@dataclasses.dataclass(frozen=True)
class Found:
    """What a launcher says of a process, or a user asks for.

    Attributes:
        launcher: Its name, as users know it.
        says: The variables or arguments that were read, with their values.
        num_processes: Of the job; None where nothing says so, and JAX asks the launcher itself.
        process_id: From 0; None as for `num_processes`.
        coordinator: `host:port` of process 0; None where nothing says where it runs.
        local: Which this process is among those of the job on its host, and how many these are.
        by_jax: JAX detects this launcher, and rightly.
    """

    launcher: str
    says: str
    num_processes: int | None = None
    process_id: int | None = None
    coordinator: str | None = None
    local: tuple[int, int] | None = None
    by_jax: bool = False

    def or_else(self, other: "Found") -> "Found":
        """Take from another where they meet, how many they are and which this is, as far as this one leaves it open."""
        names = ("num_processes", "process_id", "coordinator")
        return dataclasses.replace(
            self, **{name: getattr(other, name) for name in names if getattr(self, name) is None}
        )


def of_arguments(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Found:
    """What a user asks for in a call."""
    given = {"coordinator_address": coordinator, "num_processes": num_processes, "process_id": process_id}
    shown = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    return _checked(Found("arguments", shown, num_processes, process_id, coordinator))


def of_variables(env: Environment) -> Found:
    """Read JAX's own variables, and those of MaxText, which has others for the same."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    coordinator = env.get(names[0])
    if coordinator is None and "JAX_COORDINATOR_IP" in env and "JAX_COORDINATOR_PORT" in env:
        coordinator = f"{env['JAX_COORDINATOR_IP']}:{env['JAX_COORDINATOR_PORT']}"
        # Names that others use too: of JAX only beside the address.
        maxtext = ("JAX_COORDINATOR_IP", "NNODES", "NODE_RANK")
        names = tuple(own if own in env else other for own, other in zip(names, maxtext, strict=True))
    count, index = (_number(env, name) if name in env else None for name in names[1:])
    return _checked(Found("variables of JAX", _says(env, *names), count, index, coordinator))


def with_variables(asked: Found, env: Environment) -> Found:
    """Complete arguments by JAX's variables; a run of its own leaves nothing open."""
    if asked.num_processes == 1:
        return asked
    variables = of_variables(env)
    launcher = variables.launcher if asked.num_processes is None else asked.launcher
    says = ", ".join(filter(None, (asked.says, variables.says)))
    return _checked(dataclasses.replace(asked.or_else(variables), launcher=launcher, says=says))


def _checked(asked: Found) -> Found:
    count, index, fault = asked.num_processes, asked.process_id, None
    if count is not None and (index or 0) >= count:
        fault = "processes are numbered from 0: the number of one must be less than the number of all"
    if asked.coordinator is not None and not re.fullmatch(r".+:\d+", str(asked.coordinator)):
        fault = "the coordinator's address must be host:port"
    if count is not None and not (is_integer(count) and count >= 1):
        fault = "the number of processes must be a positive integer"
    if index is not None and not (is_integer(index) and index >= 0):
        fault = "the number of a process must be an integer of at least 0"
    if fault:
        raise ValueError(f"{caller()}: {fault}, found {asked.says}.")
    return asked


def find(env: Environment, asked: Found) -> Found | None:
    """Find how this process was started: by what was asked for, else by the innermost launcher."""
    found, faults = read_launchers(env)
    index, count = 0 if asked.num_processes == 1 else asked.process_id, asked.num_processes
    if index is not None and count is not None:  # a launcher that says the same may say more
        is_here = (asked.coordinator or "").rpartition(":")[0] in ("localhost", LOOPBACK, "[::1]")
        own = dataclasses.replace(asked, process_id=index, local=(index, count) if is_here else None)
        found.insert(0, next((one for one in found if (one.process_id, one.num_processes) == (index, count)), own))
    if not found and faults:
        raise faults[0]
    if not found and asked.says:
        open_ = "which of them this is" if asked.num_processes else "how many processes there are"
        raise ValueError(f"{caller()}: found {asked.says}, which does not say {open_}. Or {HOW}.")
    if not found:
        return None
    if asked.launcher != "arguments" and count != 1:
        _refuse_separate(found)
    return _completed(found[0], asked)


def _completed(found: Found, asked: Found) -> Found:
    both = ((asked.num_processes, found.num_processes), (asked.process_id, found.process_id))
    if any(None not in pair and pair[0] != pair[1] for pair in both):
        raise ValueError(f"{caller()}: {asked.says} contradicts {found.says} ({found.launcher}). Or {HOW}.")
    whole = dataclasses.replace(found, coordinator=asked.coordinator or found.coordinator).or_else(asked)
    by_jax = found.by_jax and None in (whole.num_processes, whole.process_id, whole.coordinator)
    if not by_jax and whole.coordinator is None and whole.num_processes != 1:
        raise ValueError(
            f"{caller()}: this is one of {whole.num_processes} processes ({found.launcher}: {found.says}), and nothing "
            "says where process 0 runs. Give coordinator_address= (or JAX_COORDINATOR_ADDRESS): its host and a free "
            "port there, as in node001:62464."
        )
    return dataclasses.replace(whole, by_jax=by_jax)


def read_launchers(env: Environment) -> tuple[list[Found], list[ValueError]]:
    """Read what launchers say, innermost first, and the errors of what some say by halves."""
    found: list[Found] = []
    faults: list[ValueError] = []
    for read in _READERS:
        try:
            one = read(env)
        except ValueError as fault:
            faults.append(fault)
        else:
            found += [one] if one else []
    return found, faults


def _refuse_separate(found: list[Found]) -> None:
    """Refuse jobs that an outer launcher has started several times, each for itself."""
    for inner, outer in ((found[0], outer) for outer in found[1:]):
        is_on_one_host = inner.local is not None and inner.local[1] == inner.num_processes
        same = (inner.num_processes, inner.process_id) == (outer.num_processes, outer.process_id)
        same = same and outer.local in (None, inner.local)
        if is_on_one_host and (outer.num_processes or 1) > 1 and not same:
            raise ValueError(
                f"{caller()}: the whole job is on this host ({inner.launcher}: {inner.says}), but this is one of "
                f"{outer.num_processes} processes ({outer.launcher}: {outer.says}): so many jobs that know nothing of "
                f"each other. Let one job reach over all of them (torchrun: --nnodes, --rdzv-endpoint), or {HOW}."
            )


def _meeting_point(env: Environment, host: str, *job: object) -> str:
    """Where the processes of a job meet: all find the same port, those of another job or life another."""
    port = env.get("JAX_COORDINATOR_PORT") or FIRST_PORT + zlib.crc32(repr(job).encode()) % NUM_PORTS
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _number(env: Environment, name: str) -> int:
    """Read a variable that is a number."""
    if not env[name].strip().isdecimal():
        raise ValueError(f"{caller()}: {name} must be a whole number, found {name}={env[name]!r}. Set it, or {HOW}.")
    return int(env[name])


def first_host(nodes: str) -> str:
    """Give the first host of a list as SLURM writes it.

    Example:
        >>> first_host("node[007-010,12],login1")
        'node007'
    """
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]


def _says(env: Environment, *names: str) -> str:
    """Write variables with their values, those that are set."""
    return ", ".join(f"{name}={','.join(env[name].split())}" for name in names if name in env)


def _ranks(env: Environment, rank: str, size: str, *, or_none: bool = False) -> tuple[int, int] | None:
    """Which process this is, and of how many, by the variables of these names; None where both are missing.

    With `or_none` also where one is.
    """
    missing = [name for name in (rank, size) if name not in env]
    if len(missing) == 2 or (missing and or_none):
        return None
    if missing:
        raise ValueError(
            f"{caller()}: found {_says(env, rank, size)}, but {missing[0]} is missing. Set both, or {HOW}."
        )
    index, count = _number(env, rank), _number(env, size)
    if index >= count:
        raise ValueError(f"{caller()}: {rank} must be less than {size}, found {_says(env, rank, size)}. Or {HOW}.")
    return index, count


def _of_ranks(
    env: Environment,
    launcher: str,
    names: tuple[str, str],
    *,
    local: tuple[int, int] | None,
    host: str | None,
    job: tuple[object, ...],
) -> Found | None:
    """What a launcher says that numbers its processes by two variables; None where both are missing.

    Args:
        env: The variables.
        launcher: Its name.
        names: Of the variables with the number of this process, and of all.
        local: The same numbers among the processes of this host.
        host: Of process 0, where that is another one.
        job: What is the same in all processes of the job, and different in others.
    """
    if (ranks := _ranks(env, *names)) is None:
        return None
    host = LOOPBACK if local is not None and local[1] == ranks[1] else host
    return Found(
        launcher=launcher,
        says=_says(env, *names),
        process_id=ranks[0],
        num_processes=ranks[1],
        coordinator=host and _meeting_point(env, host, launcher, *job),
        local=local,
    )


def _torchrun(env: Environment) -> Found | None:
    # The agent of each host counts its own failures, not those that others tell it of: over several hosts the counts
    # differ. There all processes have ended before one starts again, so that the port is free.
    is_on_one_host = env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE")
    life = env.get("TORCHELASTIC_RESTART_COUNT", "0") if is_on_one_host else ""
    return _of_ranks(
        env,
        "torchrun" if "TORCHELASTIC_RUN_ID" in env else "RANK and WORLD_SIZE",
        ("RANK", "WORLD_SIZE"),
        local=_ranks(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE", or_none=True),
        host=env.get("MASTER_ADDR"),
        job=(env.get("MASTER_PORT"), env.get("TORCHELASTIC_RUN_ID"), life),  # the agent keeps its store at that port
    )


def _open_mpi(env: Environment) -> Found | None:
    uri, space = env.get("OMPI_MCA_orte_hnp_uri", ""), env.get("PMIX_NAMESPACE", "")
    # Where mpirun runs: process 0 is there, unless it was told otherwise.
    at = re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri) or re.match(r"prterun-(.+)-\d+@", space)
    mpirun = next(filter(None, at.groups())) if at else None
    return _of_ranks(
        env,
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        local=_ranks(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", or_none=True),
        host=_first_of_slurm(env) or mpirun,
        job=(uri, space),
    )


def _pmi(env: Environment) -> Found | None:
    """MPICH, Intel MPI and others that start processes by Hydra."""
    names = ("PMI_RANK", "PMI_SIZE")
    by_srun = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")  # as srun --mpi=pmi2: SLURM says more
    if names[0] in env and [env.get(name) for name in by_srun] == [env.get(name) for name in names]:
        return None
    intel, others = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    return _of_ranks(
        env,
        "MPI (PMI)",
        names,
        local=_ranks(env, *intel, or_none=True) or _ranks(env, *others, or_none=True),
        host=_first_of_slurm(env),
        job=(env.get("PMI_JOBID"),),
    )


def _first_of_slurm(env: Environment) -> str | None:
    return first_host(env["SLURM_JOB_NODELIST"]) if "SLURM_JOB_NODELIST" in env else None


def _slurm(env: Environment) -> Found | None:
    # SLURM_NTASKS also stands in batch scripts and in shells: only what srun has started is a task of several.
    if any(name not in env for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST")):
        return None
    step = env.get("SLURM_STEP_ID", "0")
    if step.isdecimal() and int(step) >= FIRST_STEP_OF_SLURM:
        return None
    tasks = _slurm_tasks_here(env)
    return _of_ranks(
        env,
        "SLURM",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"),
        local=(_number(env, "SLURM_LOCALID"), tasks) if tasks and "SLURM_LOCALID" in env else None,
        host=first_host(env["SLURM_STEP_NODELIST"]),
        job=(env["SLURM_JOB_ID"], step, env.get("SLURM_RESTART_COUNT")),
    )


def _slurm_tasks_here(env: Environment) -> int | None:
    """The number of tasks on this node, from a list such as `4(x2),3`."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, times in parts for _ in range(int(times or 1))]
    node = int(env["SLURM_NODEID"]) if env.get("SLURM_NODEID", "").isdecimal() else None
    if node is not None and node < len(tasks):
        return tasks[node]
    return tasks[0] if len(set(tasks)) == 1 else None


def _skypilot(env: Environment) -> Found | None:
    if "SKYPILOT_NODE_RANK" not in env or "SKYPILOT_NODE_IPS" not in env:
        return None
    hosts = env["SKYPILOT_NODE_IPS"].split()
    found = _of_ranks(
        {"SKYPILOT_NUM_NODES": str(len(hosts)), **env},
        "SkyPilot",
        ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        local=(0, 1),
        host=hosts[0] if hosts else None,
        job=(env.get("SKYPILOT_TASK_ID"),),
    )
    if found is None or found.num_processes != len(hosts):
        raise ValueError(
            f"{caller()}: SKYPILOT_NODE_IPS must have an address for each node, found {len(hosts)} and "
            f"{_says(env, 'SKYPILOT_NODE_RANK', 'SKYPILOT_NUM_NODES')}. Set them alike, or {HOW}."
        )
    return found


def _cloud_tpu(env: Environment) -> Found | None:
    """TPU pods: JAX's own detection is right, and asks the metadata server where the environment says nothing."""
    name = "TPU_PROCESS_ADDRESSES" if "TPU_PROCESS_ADDRESSES" in env else "TPU_WORKER_HOSTNAMES"
    if name not in env:
        # Set by JAX as it is imported on a machine with TPUs.
        if env.get("TPU_ML_PLATFORM") != "JAX" or "TPU_SKIP_MDS_QUERY" in env:
            return None
        return Found("Cloud TPU", _says(env, "TPU_ML_PLATFORM"), by_jax=True)
    hosts = len(env[name].split(","))
    slices, slice_id = (_number({other: default, **env}, other) for other, default in _SLICES.items())
    alone = {"TPU_WORKER_ID": "0"} if hosts == 1 else {}  # which libtpu leaves out where it compiles for others' chips
    known = {"the number of hosts": str(hosts), **alone, **env}
    worker, _ = _ranks(known, "TPU_WORKER_ID", "the number of hosts") or (0, 1)
    return Found(
        launcher="Cloud TPU",
        says=_says(env, "TPU_WORKER_ID", name, *_SLICES),
        process_id=worker + slice_id * hosts,
        num_processes=hosts * slices,
        by_jax=True,
    )


_SLICES = {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"}


def _kubernetes(env: Environment) -> Found | None:
    """Indexed jobs and JobSets: JAX asks the API how many there are, if the package `kubernetes` is installed."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    says = _says(env, "JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST")
    return Found("Kubernetes", says, process_id=_number(env, "JOB_COMPLETION_INDEX"), by_jax=True)


def _pmix(env: Environment) -> Found | None:
    """A rank without a number of all: an error where no other launcher is there."""
    if "PMIX_RANK" in env:
        raise ValueError(
            f"{caller()}: a launcher has started this process as one of several ({_says(env, 'PMIX_RANK')}), and does "
            f"not say of how many: {HOW}."
        )
    return None


_READERS: tuple[Callable[[Environment], Found | None], ...] = (
    _torchrun,
    _open_mpi,
    _pmi,
    _slurm,
    _skypilot,
    _cloud_tpu,
    _kubernetes,
    _pmix,
)
