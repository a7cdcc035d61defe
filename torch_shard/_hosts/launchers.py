"""What launchers put into the environment of a process: how many there are, which one this is, where they meet.

Each reader knows one launcher and reads a mapping, nothing else. Launchers are started by launchers (torchrun by srun,
mpirun in an allocation of SLURM): the readers come innermost first.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping

from torch_shard._common.caller import caller

Environment = Mapping[str, str]
LOOPBACK = "127.0.0.1"

# Ports above those that Linux gives to outgoing connections, as JAX's own detection has them.
FIRST_PORT, NUM_PORTS = 61440, 4096

# From here on the steps of SLURM are its own: batch scripts, the shells of salloc, external ones.
FIRST_STEP_OF_SLURM = 0xFFFFFFF0

HOW = "give ts.initialize coordinator_address=, num_processes= and process_id= (num_processes=1 for a run of its own)"


@dataclasses.dataclass(frozen=True)
class Found:
    """What a launcher says of a process.

    Attributes:
        launcher: Its name, as users know it.
        says: The variables that were read, with their values.
        num_processes: Of the job; None where the environment does not say, and JAX asks the launcher itself.
        process_id: From 0; None as for `num_processes`.
        coordinator: `host:port` of process 0; None where nothing says where it runs.
        local: Which this process is among those of the job on its host, and how many these are.
        by_jax: JAX detects this launcher, and rightly.
    """

    launcher: str
    says: str
    num_processes: int | None
    process_id: int | None
    coordinator: str | None = None
    local: tuple[int, int] | None = None
    by_jax: bool = False

    @property
    def is_on_one_host(self) -> bool:
        """All processes of the job are on this host."""
        return self.local is not None and self.local[1] == self.num_processes


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


def refuse_separate(found: list[Found]) -> None:
    """Refuse jobs that an outer launcher has started several times, each for itself."""
    for inner, outer in ((found[0], outer) for outer in found[1:]):
        same = (inner.num_processes, inner.process_id) == (outer.num_processes, outer.process_id)
        same = same and outer.local in (None, inner.local)
        if inner.is_on_one_host and (outer.num_processes or 1) > 1 and not same:
            raise ValueError(
                f"{caller()}: the whole job is on this host ({inner.launcher}: {inner.says}), but this is one of "
                f"{outer.num_processes} processes ({outer.launcher}: {outer.says}): so many jobs that know nothing of "
                f"each other. Let one job reach over all of them (torchrun: --nnodes, --rdzv-endpoint), or {HOW}."
            )


def meeting_point(env: Environment, host: str | None, *job: object) -> str | None:
    """Say where the processes of a job meet: all find the same port, those of another job or life another.

    Args:
        env: `JAX_COORDINATOR_PORT` there decides.
        host: Of process 0, if it is known.
        *job: What is the same in all processes of the job, and different in others.
    """
    if host is None:
        return None
    port = env.get("JAX_COORDINATOR_PORT") or FIRST_PORT + zlib.crc32(repr(job).encode()) % NUM_PORTS
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def number(env: Environment, name: str) -> int:
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


def says(env: Environment, *names: str) -> str:
    """Write variables with their values, those that are set."""
    return ", ".join(f"{name}={','.join(env[name].split())}" for name in names if name in env)


def _ranks(env: Environment, rank: str, size: str) -> tuple[int, int] | None:
    """Which process this is, and of how many, by the variables of these names; None where both are missing."""
    missing = [name for name in (rank, size) if name not in env]
    if len(missing) == 2:
        return None
    if missing:
        raise ValueError(f"{caller()}: found {says(env, rank, size)}, but {missing[0]} is missing. Set both, or {HOW}.")
    found = number(env, rank), number(env, size)
    if found[0] >= found[1]:
        raise ValueError(f"{caller()}: {rank} must be less than {size}, found {says(env, rank, size)}. Or {HOW}.")
    return found


def _local(env: Environment, *pairs: tuple[str, str]) -> tuple[int, int] | None:
    """The same among the processes of this host, by the first pair of variables that is there."""
    there = [pair for pair in pairs if all(name in env for name in pair)]
    return _ranks(env, *there[0]) if there else None


def _torchrun(env: Environment) -> Found | None:
    names = ("RANK", "WORLD_SIZE")
    if (ranks := _ranks(env, *names)) is None:
        return None
    local = _local(env, ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    one_host = local is not None and local[1] == ranks[1]
    # The agent of each host counts its own failures, not those that others tell it of: over several hosts the counts
    # differ. There all processes have ended before one starts again, so that the port is free.
    life = env.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else ""
    # MASTER_PORT itself is taken: the agent keeps its store there.
    job = (env.get("MASTER_PORT"), env.get("TORCHELASTIC_RUN_ID"), life)
    host = LOOPBACK if one_host else env.get("MASTER_ADDR")
    return Found(
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in env else "RANK and WORLD_SIZE",
        says=says(env, *names, "LOCAL_WORLD_SIZE", "MASTER_ADDR"),
        process_id=ranks[0],
        num_processes=ranks[1],
        coordinator=meeting_point(env, host, "torchrun", *job),
        local=local,
    )


def _open_mpi(env: Environment) -> Found | None:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if (ranks := _ranks(env, *names)) is None:
        return None
    local = _local(env, ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    uri, space = env.get("OMPI_MCA_orte_hnp_uri", ""), env.get("PMIX_NAMESPACE", "")
    # Where mpirun runs: process 0 is there, unless it was told otherwise.
    at = re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri) or re.match(r"prterun-(.+)-\d+@", space)
    mpirun = next(filter(None, at.groups())) if at else None
    return Found(
        launcher="Open MPI",
        says=says(env, *names, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        process_id=ranks[0],
        num_processes=ranks[1],
        coordinator=meeting_point(env, _mpi_host(env, local, ranks[1]) or mpirun, uri, space),
        local=local,
    )


def _pmi(env: Environment) -> Found | None:
    """MPICH, Intel MPI and others that start processes by Hydra."""
    names = ("PMI_RANK", "PMI_SIZE")
    by_srun = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")  # as srun --mpi=pmi2: SLURM says more
    if (ranks := _ranks(env, *names)) is None or [env.get(name) for name in by_srun] == [env[name] for name in names]:
        return None
    local = _local(env, ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"))
    return Found(
        launcher="MPI (PMI)",
        says=says(env, *names, "MPI_LOCALNRANKS"),
        process_id=ranks[0],
        num_processes=ranks[1],
        coordinator=meeting_point(env, _mpi_host(env, local, ranks[1]), "pmi", env.get("PMI_JOBID")),
        local=local,
    )


def _mpi_host(env: Environment, local: tuple[int, int] | None, num_processes: int) -> str | None:
    if local is not None and local[1] == num_processes:
        return LOOPBACK
    return first_host(env["SLURM_JOB_NODELIST"]) if "SLURM_JOB_NODELIST" in env else None


def _slurm(env: Environment) -> Found | None:
    # SLURM_NTASKS also stands in batch scripts and in shells: only what srun has started is a task of several.
    if any(name not in env for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST")):
        return None
    step = env.get("SLURM_STEP_ID", "0")
    if step.isdecimal() and int(step) >= FIRST_STEP_OF_SLURM:
        return None
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    if (ranks := _ranks(env, *names)) is None:
        return None
    tasks = _slurm_tasks_here(env)
    local = (number(env, "SLURM_LOCALID"), tasks) if tasks and "SLURM_LOCALID" in env else None
    host = LOOPBACK if tasks == ranks[1] else first_host(env["SLURM_STEP_NODELIST"])
    return Found(
        launcher="SLURM",
        says=says(env, *names, "SLURM_STEP_NODELIST"),
        process_id=ranks[0],
        num_processes=ranks[1],
        coordinator=meeting_point(env, host, "slurm", env["SLURM_JOB_ID"], step, env.get("SLURM_RESTART_COUNT")),
        local=local,
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
    names = ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
    ranks = _ranks({"SKYPILOT_NUM_NODES": str(len(hosts)), **env}, *names)
    if ranks is None or ranks[1] != len(hosts):
        raise ValueError(
            f"{caller()}: SKYPILOT_NODE_IPS must have an address for each node, found {len(hosts)} and "
            f"{says(env, *names)}. Set them alike, or {HOW}."
        )
    return Found(
        launcher="SkyPilot",
        says=says(env, *names, "SKYPILOT_NODE_IPS"),
        process_id=ranks[0],
        num_processes=ranks[1],
        coordinator=meeting_point(env, LOOPBACK if ranks[1] == 1 else hosts[0], env.get("SKYPILOT_TASK_ID")),
        local=(0, 1),
    )


def _cloud_tpu(env: Environment) -> Found | None:
    """TPU pods: JAX's own detection is right, and asks the metadata server where the environment says nothing."""
    name = "TPU_PROCESS_ADDRESSES" if "TPU_PROCESS_ADDRESSES" in env else "TPU_WORKER_HOSTNAMES"
    if name not in env:
        # Set by JAX as it is imported on a machine with TPUs.
        if env.get("TPU_ML_PLATFORM") != "JAX" or "TPU_SKIP_MDS_QUERY" in env:
            return None
        says_so = says(env, "TPU_ML_PLATFORM")
        return Found(launcher="Cloud TPU", says=says_so, num_processes=None, process_id=None, by_jax=True)
    hosts = len(env[name].split(","))
    slices, slice_id = (number({other: default, **env}, other) for other, default in _SLICES.items())
    alone = {"TPU_WORKER_ID": "0"} if hosts == 1 else {}  # which libtpu leaves out where it compiles for others' chips
    known = {"the number of hosts": str(hosts), **alone, **env}
    worker, _ = _ranks(known, "TPU_WORKER_ID", "the number of hosts") or (0, 1)
    return Found(
        launcher="Cloud TPU",
        says=says(env, "TPU_WORKER_ID", name, *_SLICES),
        process_id=worker + slice_id * hosts,
        num_processes=hosts * slices,
        by_jax=True,
    )


_SLICES = {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"}


def _kubernetes(env: Environment) -> Found | None:
    """Indexed jobs and JobSets: JAX asks the API how many there are, if the package `kubernetes` is installed."""
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    index = number(env, "JOB_COMPLETION_INDEX")
    says_so = says(env, "JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST")
    return Found(launcher="Kubernetes", says=says_so, num_processes=None, process_id=index, by_jax=True)


def _pmix(env: Environment) -> Found | None:
    """A rank without a number of all: an error where no other launcher is there."""
    if "PMIX_RANK" in env:
        raise ValueError(
            f"{caller()}: a launcher has started this process as one of several ({says(env, 'PMIX_RANK')}), and does "
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
