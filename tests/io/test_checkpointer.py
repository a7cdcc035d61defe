"""Checkpoints: under the model's names, back to the bit, onto any mesh, by one writer."""

import re
import threading

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.processes import Family, run_processes
from tests.tables.checkpointed import WIDTH, Model, assert_same, by_name, make_step, train
from torch_shard._io.integrity import seal

OTHER_PLAN = ts.ShardingPlan({"blocks.*.up.*": P("batch"), "blocks.1.down.weight": P("model")}, default=P())


def test_resumes_to_the_bit(saved, step):
    directory, values, losses = saved
    state = ts.Checkpointer(directory).restore(step)
    assert_same(by_name(state), values)
    assert state.unsaved == ("scale",)
    assert jax.tree.map(lambda array: array.sharding, state) == step.shardings
    assert train(step, state, range(4, 7))[1] == losses


def test_save_leaves_the_state_to_be_donated(step, tmp_path):
    """What is written is the state at the call of `save`, though later steps reuse its memory while it is written."""
    state = step.init(seed=0)
    with ts.Checkpointer(tmp_path / "run", keep=None) as checkpointer:
        wanted = {}
        for number in range(6):
            state, _ = train(step, state, [number])
            wanted[number + 1] = by_name(state)
            checkpointer.save(state)
        checkpointer.wait()
        for number, values in wanted.items():
            assert_same(by_name(checkpointer.restore(step, step=number)), values)


@pytest.mark.parametrize(
    "options", [{"mesh": (1, 2)}, {"scan_layers": False, "plan": OTHER_PLAN, "mesh": (2, 4)}], ids=str
)
def test_restores_onto_another_mesh_and_plan(saved, options):
    other = make_step(**options)
    state = ts.Checkpointer(saved[0]).restore(other)
    assert_same(by_name(state), saved[1])
    assert jax.tree.map(lambda array: array.sharding, state) == other.shardings
    # float32 sums in another order, after steps of Adam that divide by the size of small gradients
    np.testing.assert_allclose(train(other, state, range(4, 7))[1], saved[2], rtol=1e-3)


def test_unrolled_layers_restore_into_a_loop(tmp_path, step):
    unrolled = make_step(scan_layers=False)
    state, _ = train(unrolled, unrolled.init(seed=0), range(2))
    with ts.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
        restored = checkpointer.restore(step)
    assert_same(by_name(restored), by_name(state))
    assert jax.tree.structure(restored) == jax.tree.structure(step.shardings)


def test_restores_into_a_model_without_values(saved):
    with torch.device("meta"):
        model = Model()
    state = ts.Checkpointer(saved[0]).restore(make_step(model=model))
    assert_same(by_name(state), saved[1])


def test_what_is_written_to_the_model_before_it_is_restored_is_no_error(saved):
    model = Model()
    step = make_step(model=model)
    for tensor in model.state_dict().values():
        tensor.zero_()
    assert train(step, ts.Checkpointer(saved[0]).restore(step), range(4, 7))[1] == saved[2]


def test_another_optimizer_takes_the_parameters_alone(saved):
    other = make_step(optimizer=optax.sgd(0.1, momentum=0.9))
    checkpointer = ts.Checkpointer(saved[0])
    with pytest.raises(ValueError, match="does not fit the model and the optimizer") as refused:
        checkpointer.restore(other)
    message = str(refused.value)
    places = re.findall(r"^  (\S+)(?: of \d\d entries)?: (missing|in) ", message, re.M)
    assert places == [
        ("opt_state[0].trace", "missing"),
        *((place, "in") for place in ("opt_state[0].count", "opt_state[0].mu", "opt_state[0].nu")),
    ]
    assert "params_only=True" in message
    state = checkpointer.restore(other, params_only=True, seed=1)
    for name, value in state.tensors.items():
        np.testing.assert_array_equal(value, saved[1][name], err_msg=name)
    assert (int(state.step), int(state.num_batches)) == (0, 0)
    fresh = other.init(seed=1)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(fresh.key))


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (lambda: Model(num_layers=5), ["blocks.4.up.weight: missing in the checkpoint"]),
        (lambda: Model().double(), ["first.weight", "need 64 bits", "jax_enable_x64"]),
        (lambda: Model().bfloat16(), ["norm.running_mean: float32 (8,) in the checkpoint, must be bfloat16 (8,)"]),
        (lambda: nn.Linear(WIDTH, 3), ["weight: missing in the checkpoint", "first.weight: in the checkpoint"]),
    ],
)
def test_checkpoint_of_another_model_is_refused(saved, model, wanted):
    plan = ts.ShardingPlan({}, default=P())
    with pytest.raises((ValueError, TypeError)) as refused:
        ts.Checkpointer(saved[0]).restore(make_step(model=model(), plan=plan))
    for part in wanted:
        assert part in str(refused.value)


def test_keeps_the_newest(saved, step, tmp_path):
    assert ts.Checkpointer(saved[0]).steps() == [2, 3, 4]
    state = ts.Checkpointer(saved[0]).restore(step, step=2)
    with ts.Checkpointer(tmp_path, keep=1, asynchronous=False) as checkpointer:
        assert checkpointer.save(state)
        assert not checkpointer.save(state)
        checkpointer.save(train(step, state, [2])[0])
        assert checkpointer.steps() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".unfinished", "step_00000003"]
    assert not list((tmp_path / ".unfinished").iterdir())


def test_one_directory_has_one_writer(tmp_path, step):
    state = step.init(seed=0)
    with ts.Checkpointer(tmp_path) as first:
        first.save(state)
        second = ts.Checkpointer(tmp_path)
        with pytest.raises(BlockingIOError, match="another process or Checkpointer is saving to"):
            second.save(train(step, state, [0])[0])
        first.wait()
        assert second.steps() == [0]
    assert int(second.restore(step).step) == 0


def test_another_process_that_writes_is_refused(tmp_path, step):
    """As a kill leaves no lock behind, the directory is free again when that process has ended."""
    program = """
checkpointer = ts.Checkpointer(sys.argv[1])
checkpointer.claim()
print("claimed", flush=True)
import time
time.sleep(60)
"""
    with ts.Checkpointer(tmp_path) as checkpointer:
        with Family(program, 1, tmp_path) as other:
            other.wait([0], 30, until="claimed\n")
            with pytest.raises(BlockingIOError, match="Give each run a directory of its own"):
                checkpointer.save(step.init(seed=0))
        assert checkpointer.save(step.init(seed=0))


def test_failed_save_leaves_the_others_and_is_told(copied, step, monkeypatch):
    state = ts.Checkpointer(copied).restore(step)

    def fail(directory):
        raise OSError(28, "No space left on device")

    with ts.Checkpointer(copied) as checkpointer:
        state, _ = train(step, state, [4])
        monkeypatch.setattr("torch_shard._io.checkpointer.seal", fail)
        checkpointer.save(state)
        with pytest.raises(RuntimeError, match=r"could not be written to .*No space left on device.*that of step 4\."):
            checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]
        monkeypatch.undo()
        assert checkpointer.save(state)
    assert ts.Checkpointer(copied).steps() == [3, 4, 5]


def words(tree):
    """The arrays of a pytree; of random keys, their words."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]


def large(params):
    return {name: "large" if value.ndim > 1 else "small" for name, value in params.items()}


def large_only(params):
    return {name: value.ndim > 1 for name, value in params.items()}


def test_states_of_all_kinds_of_optimizers_resume_to_the_bit(tmp_path):
    """Not only arrays stand under the names: masked parts have none, sm3 has lists, one has a random key."""

    def optimizer():
        parts = optax.multi_transform({"large": optax.sm3(1e-2), "small": optax.sgd(0.1, momentum=0.9)}, large)
        return optax.chain(parts, optax.masked(optax.noisy_sgd(1e-2, key=0), large_only))

    first, second = make_step(optimizer=optimizer()), make_step(optimizer=optimizer(), scan_layers=False)
    state, _ = train(first, first.init(seed=0), range(2))
    with ts.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
        unrolled = checkpointer.restore(second)
        restored = checkpointer.restore(first)
    jax.tree.map(np.testing.assert_array_equal, words(restored.opt_state), words(state.opt_state))
    assert jax.tree.structure(unrolled) == jax.tree.structure(second.shardings)
    assert train(first, restored, range(2, 4))[1] == train(first, state, range(2, 4))[1]


def test_one_checkpointer_serves_several_threads(step, tmp_path):
    state = step.init(seed=0)
    with ts.Checkpointer(tmp_path) as checkpointer:
        thread = threading.Thread(target=checkpointer.claim)
        thread.start()
        thread.join()
        assert checkpointer.save(state)
    ts.Checkpointer(tmp_path).claim()


def test_processes_save_together_and_one_restores_it(tmp_path, step):
    """Two processes with two devices each write one checkpoint; each finds a damaged one, and both take the older."""
    run_processes(
        f"""
        import numpy as np
        from pathlib import Path
        from tests.tables import checkpointed as t

        directory = Path({str(tmp_path)!r})
        step = t.make_step(mesh=(2, 2))
        state, _ = t.train(step, step.init(seed=3), range(2))
        with ts.Checkpointer(directory / "run") as checkpointer:
            assert checkpointer.save(state)
            state, _ = t.train(step, state, range(2, 3))
            assert checkpointer.save(state)
            checkpointer.wait()
            assert checkpointer.steps() == [2, 3]
            if rank == 0:
                files = [file for file in checkpointer.path(3).rglob("*") if file.is_file()]
                t.flip_a_bit(max(files, key=lambda file: file.stat().st_size))
            jax.experimental.multihost_utils.sync_global_devices("damaged")
            restored = checkpointer.restore(step)
            assert int(restored.step) == 2
            _, losses = t.train(step, restored, range(2, 5))
        (directory / f"losses{{rank}}").write_text(repr(losses))
        """,
        2,
    )
    state = ts.Checkpointer(tmp_path / "run").restore(step)
    assert int(state.step) == 2
    first, second = ((tmp_path / f"losses{rank}").read_text() for rank in (0, 1))
    assert first == second
    # float32 sums in another order
    np.testing.assert_allclose(train(step, state, range(2, 5))[1], eval(first), rtol=1e-3)


class Hollow(nn.Module):
    """Entries without elements among others, some of them in repeated layers."""

    def __init__(self):
        super().__init__()
        self.layer, self.empty = nn.Linear(4, 2), nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("none", torch.zeros(3, 0))
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        for layer in self.layers:
            layer.register_parameter("extra", nn.Parameter(torch.zeros(2, 0)))

    def forward(self, x):
        h = self.layer(x)
        for layer in self.layers:
            h = layer(h) + layer.extra.sum(1)
        return h + self.empty.sum() + self.none.sum()


def test_entries_without_elements(tmp_path):
    hollow = make_step(model=Hollow(), plan=ts.ShardingPlan({"empty": P("model")}, default=P()))
    state = hollow.init(seed=0)
    for _ in range(2):
        state, _ = hollow(state, torch.ones(8, 4))
    with ts.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(state)
        restored, params_only = checkpointer.restore(hollow), checkpointer.restore(hollow, params_only=True)
    assert_same(by_name(restored), by_name(state))
    assert restored.params["empty"].sharding == state.params["empty"].sharding
    assert params_only.params["empty"].shape == (0, 4)
    assert_same(by_name(hollow(restored, torch.ones(8, 4))[0]), by_name(hollow(state, torch.ones(8, 4))[0]))
    state = checkpointer.restore(hollow)
    wanted = hollow.export(state).state_dict()
    mesh, plan = ts.make_mesh(batch=2), ts.ShardingPlan({}, default=P())
    found = ts.load_safetensors(ts.export_safetensors(state, tmp_path / "weights"), Hollow(), mesh, plan)
    again = ts.load_torch(ts.export_torch(state, tmp_path / "weights.pt"), Hollow(), mesh, plan)
    for model in (found, again):
        held = ts.gather(model).state_dict()
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", False), ("jax_enable_x64", True)],
)
def test_other_settings_of_random_numbers_are_refused(saved, step, setting, value):
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        with pytest.raises(ValueError, match="under other settings of JAX") as refused:
            ts.Checkpointer(saved[0]).restore(step)
        if setting == "jax_threefry_partitionable":
            ts.Checkpointer(saved[0]).restore(step, params_only=True)
    finally:
        jax.config.update(setting, before)
    message = str(refused.value)
    assert f"{setting}: {before!r} in the checkpoint, {value!r} here" in message
    assert f"Set at the start of the program: jax.config.update({setting!r}, {before!r})." in message
    assert "params_only=True, which begins anew" in message


def test_a_checkpoint_of_another_format_is_refused(copied, step):
    head = copied / "step_00000004" / "state.json"
    head.write_text(head.read_text().replace('"format": 2', '"format": 1'))
    seal(head.parent)
    with pytest.raises(ValueError, match=r"not a checkpoint of this version of torch_shard: .*format 1, must be 2"):
        ts.Checkpointer(copied).restore(step, step=4)
