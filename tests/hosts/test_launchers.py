"""What is found in the environments of launchers."""

import pytest

from tests.tables.launchers import OPEN_MPI, PLAIN, REFUSED, ROWS, SKYPILOT, TASK, TORCHRUN, TORCHRUN_HOSTS
from torch_shard._hosts.initialize import share_devices
from torch_shard._hosts.launchers import find, of_arguments, with_variables


def look(env):
    return find(env, with_variables(of_arguments(None, None, None), env))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_launchers_are_found(row):
    found = look(row.env)
    assert (found and found.launcher) == row.launcher
    if found is not None:
        assert (found.process_id, found.num_processes) == row.process
        if row.host is None:
            assert found.by_jax or found.num_processes == 1
        else:
            assert not found.by_jax
            host, port = found.coordinator.rsplit(":", 1)
            assert row.host in (host, found.coordinator)
            assert 0 < int(port) < 65536
        assert share_devices(row.env, found.local, 8) == row.devices


@pytest.mark.parametrize(("env", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_variables_that_do_not_fit_together_are_refused(env, words):
    with pytest.raises(ValueError, match=words) as refusal:
        look(env)
    assert "num_processes=1 for a run of its own" in str(refusal.value) or "JAX_" in str(refusal.value)


def port(env):
    return int(look(env).coordinator.rsplit(":", 1)[1])


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        (TORCHRUN, {"RANK": "0", "LOCAL_RANK": "0"}),
        (TORCHRUN_HOSTS, {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}),
        (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}),
        (TASK, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}),
        (SKYPILOT, {"SKYPILOT_NODE_RANK": "0"}),
    ],
    ids=["torchrun", "torchrun, hosts", "Open MPI", "SLURM", "SkyPilot"],
)
def test_all_processes_of_a_job_meet_at_one_place(env, rank):
    """Agents of torchrun count the restarts of their own host: over several hosts the counts differ."""
    assert look(env).coordinator == look(env | rank).coordinator


@pytest.mark.parametrize(
    ("env", "other"),
    [
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (TORCHRUN, {"MASTER_PORT": "29501"}),
        (OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "1489829952.0;tcp://10.96.0.1:55551"}),
        (TASK, {"SLURM_JOB_ID": "200506"}),
        (TASK, {"SLURM_STEP_ID": "1"}),
        (TASK, {"SLURM_RESTART_COUNT": "1"}),
        (SKYPILOT, {"SKYPILOT_TASK_ID": "another"}),
    ],
)
def test_other_jobs_and_other_lives_meet_elsewhere(env, other):
    assert port(env) != port(env | other)


def test_the_port_of_torchrun_is_left_to_its_agent():
    assert port(TORCHRUN) != int(TORCHRUN["MASTER_PORT"])


@pytest.mark.parametrize(
    ("env", "local", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, (1, 2), (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, (1, 2), (1,)),
        ({"CUDA_VISIBLE_DEVICES": "3"}, (1, 2), None),  # bound by the launcher
        ({"CUDA_VISIBLE_DEVICES": ""}, (1, 2), None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, (1, 2), None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, (1, 2), None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, (1, 2), (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, (1, 2), None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "1"}, (1, 2), (1,)),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, (0, 2), (0,)),
        ({}, (0, 1), None),
        ({}, None, None),
        ({}, (7, 8), (7,)),
    ],
)
def test_processes_of_a_host_divide_its_devices(env, local, devices):
    assert share_devices(env, local, 8) == devices


def test_devices_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"the 3 processes of this host .* found 8\. .* local_device_ids="):
        share_devices({}, (0, 3), 8)


def test_arguments_decide():
    whole = with_variables(of_arguments("a:1", 2, 1), TASK)
    found = find(TASK, whole)
    assert (found.coordinator, found.num_processes, found.process_id, found.local) == ("a:1", 2, 1, None)
    alone = find({**TASK, **PLAIN}, with_variables(of_arguments(None, 1, None), PLAIN))
    assert (alone.num_processes, alone.process_id) == (1, 0)
    with pytest.raises(ValueError, match=r"num_processes=4 contradicts RANK=1, WORLD_SIZE=2"):
        find(TORCHRUN, of_arguments(None, 4, None))
