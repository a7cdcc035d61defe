"""Environments as launchers give them to a process, and what is to be found in each."""

import dataclasses

# What a shell, a batch script, and a task that srun has started see of SLURM.
ALLOCATION = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gnode[10,20]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
TASK = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gnode[10,20]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
INTERACTIVE = {**TASK, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_PROCID": "0"}  # LaunchParameters=use_interactive_step
SHELL_OF_SRUN = {**TASK, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "worker-0.example",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TORCHRUN_ALONE = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN_HOSTS = {**TORCHRUN, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1489829889",
    "OMPI_MCA_orte_hnp_uri": "1489829888.0;tcp://10.96.0.1,10.148.0.1:55551;tcp6://[fd00::2]:51127",
}
OPEN_MPI_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
IPV6 = {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d::2]:43370"}
OPEN_MPI_5 = {name: value for name, value in OPEN_MPI_HOSTS.items() if "MCA" not in name} | {
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-login-1-4711@1",
}

MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "8", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
MPICH_HOSTS = {**MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}

SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-01-01-00-00-00-000000_cluster_2",
}

TPU = {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3", "TPU_SKIP_MDS_QUERY": "true"}
TPU_SLICES = {**TPU, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "t-0"}
TPU_VM = {"TPU_ML_PLATFORM": "JAX"}

JOBSET = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}

PLAIN = {"JAX_COORDINATOR_ADDRESS": "10.0.0.7:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
MAXTEXT = {"JAX_COORDINATOR_IP": "10.0.0.7", "JAX_COORDINATOR_PORT": "1234", "NNODES": "2", "NODE_RANK": "1"}


@dataclasses.dataclass(frozen=True)
class Row:
    """An environment, and what is to be found in it.

    Attributes:
        name: Of the row.
        env: The variables.
        launcher: Its name; None for one process.
        process: Number of this process, and of all; None where JAX asks for them.
        host: Of the coordinator, with its port where that is given; None where JAX finds it.
        devices: Of the 8 GPUs that this process sees, those that are its own; None for all.
    """

    name: str
    env: dict[str, str]
    launcher: str | None = None
    process: tuple[int | None, int | None] | None = None
    host: str | None = None
    devices: tuple[int, ...] | None = None


HERE = "127.0.0.1"
FIRST_HALF, SECOND_HALF = (0, 1, 2, 3), (4, 5, 6, 7)

ROWS = [
    Row("nothing", {}),
    Row("allocation", ALLOCATION),
    Row("batch script", BATCH),
    Row("interactive step", INTERACTIVE),
    Row("shell of srun", SHELL_OF_SRUN, "SLURM", (0, 1), HERE),
    Row("pod of a notebook", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
    Row("machine without TPUs", {"TPU_SKIP_MDS_QUERY": "1"}),
    Row("other people's variables", {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "LOCAL_RANK": "0"}),
    Row("SLURM", TASK, "SLURM", (3, 4), "gnode10", SECOND_HALF),
    Row("SLURM, one node", {**TASK, "SLURM_STEP_TASKS_PER_NODE": "4"}, "SLURM", (3, 4), HERE, (2, 3)),
    Row(
        "SLURM, another number on each node",
        {**TASK, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
        "SLURM",
        (3, 4),
        "gnode10",
    ),
    Row("SLURM, no list of tasks", {**TASK, "SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM", (3, 4), "gnode10"),
    Row("SLURM, part of a job", {**TASK, "SLURM_NTASKS": "16"}, "SLURM", (3, 4), "gnode10", SECOND_HALF),
    Row(
        "SLURM, ranges",
        {**TASK, "SLURM_STEP_NODELIST": "r[1-2]n[007-9]-ib,x"},
        "SLURM",
        (3, 4),
        "r1n007-ib",
        SECOND_HALF,
    ),
    Row("SLURM, bound", {**TASK, "SLURM_GPUS_ON_NODE": "16"}, "SLURM", (3, 4), "gnode10"),
    Row("SLURM, bound by task", {**TASK, "SLURM_GPUS_PER_TASK": "a100:8"}, "SLURM", (3, 4), "gnode10"),
    Row("srun --mpi=pmi2", {**TASK, "PMI_RANK": "3", "PMI_SIZE": "4"}, "SLURM", (3, 4), "gnode10", SECOND_HALF),
    Row("torchrun", TORCHRUN, "torchrun", (1, 2), HERE, SECOND_HALF),
    Row("torchrun, hosts", TORCHRUN_HOSTS, "torchrun", (5, 8), "worker-0.example", (2, 3)),
    Row("torchrun, IPv6", {**TORCHRUN_HOSTS, "MASTER_ADDR": "fd00::2"}, "torchrun", (5, 8), "[fd00::2]", (2, 3)),
    Row("torchrun, port", {**TORCHRUN, "JAX_COORDINATOR_PORT": "99"}, "torchrun", (1, 2), f"{HERE}:99", SECOND_HALF),
    Row("torchrun in srun", {**TASK, **TORCHRUN_HOSTS}, "torchrun", (5, 8), "worker-0.example", (2, 3)),
    Row("torchrun in a shell", {**SHELL_OF_SRUN, **TORCHRUN}, "torchrun", (1, 2), HERE, SECOND_HALF),
    Row("torchrun, one process", TORCHRUN_ALONE, "torchrun", (0, 1), HERE),
    Row(
        "torch.distributed by hand",
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"},
        "RANK and WORLD_SIZE",
        (1, 2),
        "10.0.0.7",
    ),
    Row("Open MPI", OPEN_MPI, "Open MPI", (1, 2), HERE, SECOND_HALF),
    Row("Open MPI, hosts", OPEN_MPI_HOSTS, "Open MPI", (1, 2), "10.96.0.1"),
    Row("Open MPI, IPv6", OPEN_MPI_HOSTS | IPV6, "Open MPI", (1, 2), "[fe80::b9b:ac5d:9cf0:b858]"),
    Row("Open MPI 5", OPEN_MPI_5, "Open MPI", (1, 2), "login-1"),
    Row("Open MPI in SLURM", {**ALLOCATION, **OPEN_MPI_HOSTS}, "Open MPI", (1, 2), "gnode10"),
    Row("MPICH", MPICH, "MPI (PMI)", (1, 2), HERE, SECOND_HALF),
    Row(
        "MPICH with an address",
        {**MPICH_HOSTS, "JAX_COORDINATOR_ADDRESS": "10.0.0.7:1234"},
        "MPI (PMI)",
        (1, 2),
        "10.0.0.7:1234",
    ),
    Row("SkyPilot", SKYPILOT, "SkyPilot", (1, 2), "10.0.0.7"),
    Row("TPU of GKE", TPU, "Cloud TPU", (3, 4)),
    Row("TPU of GKE, slices", TPU_SLICES, "Cloud TPU", (7, 8)),
    Row("TPU, compiled for alone", {"TPU_WORKER_HOSTNAMES": "localhost"}, "Cloud TPU", (0, 1)),
    Row("TPU of GKE, one host", {**TPU, "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "t-0"}, "Cloud TPU", (0, 1)),
    Row("TPU VM", TPU_VM, "Cloud TPU", (None, None)),
    Row("JobSet", JOBSET, "Kubernetes", (1, None)),
    Row(
        "JobSet with an address",
        {**JOBSET, "JAX_COORDINATOR_ADDRESS": "job-0-0.job:1234", "JAX_NUM_PROCESSES": "4"},
        "Kubernetes",
        (1, 4),
        "job-0-0.job:1234",
    ),
    Row("plain", PLAIN, "variables of JAX", (1, 2), "10.0.0.7:1234"),
    Row(
        "plain, on this host",
        {**PLAIN, "JAX_COORDINATOR_ADDRESS": "localhost:1234"},
        "variables of JAX",
        (1, 2),
        "localhost:1234",
        SECOND_HALF,
    ),
    Row("plain, one process", {"JAX_NUM_PROCESSES": "1"}, "variables of JAX", (0, 1)),
    Row("plain, one process of many", {**TORCHRUN, "JAX_NUM_PROCESSES": "1"}, "variables of JAX", (0, 1)),
    Row("plain in SLURM", {**TASK, **PLAIN}, "variables of JAX", (1, 2), "10.0.0.7:1234"),
    Row(
        "plain numbers in SLURM",
        {**TASK, "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"},
        "SLURM",
        (3, 4),
        "gnode10",
        SECOND_HALF,
    ),
    Row(
        "an address in SLURM",
        {**TASK, "JAX_COORDINATOR_ADDRESS": "10.0.0.7:1234"},
        "SLURM",
        (3, 4),
        "10.0.0.7:1234",
        SECOND_HALF,
    ),
    Row("numbers on a TPU", {**TPU, "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}, "Cloud TPU", (3, 4)),
    Row("MaxText", MAXTEXT, "variables of JAX", (1, 2), "10.0.0.7:1234"),
]

REFUSED = [
    ("half of torchrun", {"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "found WORLD_SIZE=2, but RANK is missing"),
    ("no number", {**TORCHRUN, "RANK": "first"}, "RANK must be a whole number, found RANK='first'"),
    ("too large", {**TORCHRUN, "RANK": "2"}, "RANK must be less than WORLD_SIZE, found RANK=2, WORLD_SIZE=2"),
    ("no address", {"RANK": "1", "WORLD_SIZE": "2"}, "nothing says where process 0 runs"),
    ("MPICH, hosts", MPICH_HOSTS, r"one of 2 processes \(MPI \(PMI\): PMI_RANK=1, PMI_SIZE=2.*coordinator_address="),
    ("only PMIx", {"PMIX_RANK": "1"}, r"one of several \(PMIX_RANK=1\), and does not say of how many"),
    (
        "half of SkyPilot",
        {**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.7"},
        "SKYPILOT_NODE_IPS must have an address for each",
    ),
    ("no worker", {"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is missing"),
    ("half of plain", {"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_COORDINATOR_ADDRESS=a:1, which does not say how many"),
    (
        "two thirds of plain",
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"},
        "JAX_NUM_PROCESSES=2, which does not say which of them this is",
    ),
    (
        "no port",
        {**PLAIN, "JAX_COORDINATOR_ADDRESS": "a"},
        "the coordinator's address must be host:port, found .*ADDRESS=a,",
    ),
    ("numbered from 1", {**PLAIN, "JAX_PROCESS_ID": "2"}, "numbered from 0.*JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=2"),
    ("plain without address", {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "nothing says where"),
    (
        "other number",
        {**TASK, "JAX_NUM_PROCESSES": "8"},
        "JAX_NUM_PROCESSES=8 contradicts SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4",
    ),
    ("other process", {**TASK, "JAX_PROCESS_ID": "0"}, "JAX_PROCESS_ID=0 contradicts SLURM_PROCID=3"),
    (
        "torchrun for each task",
        {**TASK, **TORCHRUN},
        r"whole job is on this host \(torchrun: RANK=1.*one of 4 processes \(SLURM: SLURM_PROCID=3.*--nnodes",
    ),
    (
        "torchrun of one for each task",
        {**TASK, **TORCHRUN_ALONE},
        "jobs that know nothing of each other",
    ),
    ("torchrun for each node of SkyPilot", {**SKYPILOT, **TORCHRUN}, "one of 2 processes .SkyPilot: "),
    ("plain for each task", {**TASK, **PLAIN, "JAX_COORDINATOR_ADDRESS": "localhost:1"}, "know nothing of each other"),
]
