"""Steps from files: another process runs them without XLA, and computes the same bits; what does not fit is refused."""

import json
import os
import pickle
import re
import tempfile
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.processes import run_alone, run_processes
from tests.tables.cases import WHOLE, make_mesh, squared_error

# Both processes run this; `options` is what differs.
STEP = """
import math
import jax, optax, torch
from torch import nn
import torch_shard as ts
from jax.sharding import PartitionSpec as P

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
batch = (torch.randn(8, 8), torch.randn(8, 4))
def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
mesh = ts.make_mesh(batch=1, model=1, devices=jax.devices()[:1])
plan = ts.ShardingPlan({"0.weight": P("model"), "3.weight": P(None, "model")}, default=P())
step = ts.make_train_step(model, loss_fn, optax.sgd(1e-2), mesh=mesh, plan=plan, **options)
def losses():
    state, found = step.init(seed=0), []
    for _ in range(3):
        state, metrics = step(state, batch, skip_grad_norm=math.inf)
        found.append(float(metrics["loss"]).hex())
    return found
"""

RUN = """
import collections, json
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[2])  # where all that is compiled can be seen
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
found = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: found.update([event.rpartition("/")[2]]))
options = {"compiled": sys.argv[1]}
STEP
print(json.dumps([losses(), found]))
""".replace("STEP", STEP)


def test_another_process_starts_without_xla_and_computes_the_same_bits(tmp_path: Path) -> None:
    names: dict[str, Any] = {"options": {}}
    exec(STEP, names)
    file, cache = tmp_path / "made" / "here" / "step.zip", tmp_path / "cache"
    shapes = tuple(torch.empty_like(leaf, device="meta") for leaf in names["batch"])
    names["step"].save_compiled(file, shapes, skip_grad_norm=float("inf"))
    assert [path.name for path in file.parent.iterdir()] == ["step.zip"]
    end = run_alone(RUN, file, cache, timeout_s=300)
    assert end.status == 0, end.output
    losses, events = json.loads(end.output.splitlines()[-1])
    assert losses == names["losses"]()
    compiled = {path.name.partition("-")[0] for path in cache.iterdir()}
    assert "jit_train_step" not in compiled
    assert events["cache_hits"] == 1
    assert events["compile_requests_use_cache"] == 1 + events["cache_misses"] == 1 + len(compiled)


def make(kind: Callable[..., Any] = nn.Tanh, **options: Any) -> Any:
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Sequential(nn.Linear(8, 4), kind())
    options = {"mesh": make_mesh((1, 1)), "plan": WHOLE, "loss_fn": squared_error, "lr": 0.1, **options}
    return ts.make_train_step(model, options.pop("loss_fn"), optax.sgd(options.pop("lr")), **options)


BATCH = (torch.ones(8, 8), torch.ones(8, 4))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "step.zip"
    make().save_compiled(file, BATCH)
    return file


def changed(file: Path, to: Path, parts: Callable[[dict[str, bytes]], dict[str, bytes]], how: int = 0) -> Path:
    """A file of other parts."""
    with zipfile.ZipFile(file) as there:
        found = parts({name: there.read(name) for name in there.namelist()})
    with zipfile.ZipFile(to, "w", how) as written:
        for name, data in found.items():
            written.writestr(name, data)
    return to


def with_entry(parts: dict[str, bytes], *, name: str | None = None, data: bytes | None = None) -> dict[str, bytes]:
    facts, (own, entry) = parts["facts.json"], next(item for item in parts.items() if item[0] != "facts.json")
    return {"facts.json": facts, name or own: entry if data is None else data}


OF_THE_PLACE = {
    "the version of jax": "0.10.1",
    "the version of jaxlib": "0.10.1",
    "the version of torch_shard": "0.0.9",
    "the compiler of the devices": "PJRT C API TFRT TPU v5 lite",  # of libtpu
    "the devices": "4 of TPU v5 lite (tpu)",
    "XLA's flags": "['--xla_cpu_enable_fast_math=true']",
}


@pytest.mark.parametrize("name", OF_THE_PLACE)
def test_a_file_from_another_place_is_refused_when_the_step_is_made(name: str, saved: Path, tmp_path: Path) -> None:
    def parts(found: dict[str, bytes]) -> dict[str, bytes]:
        facts = json.loads(found["facts.json"])
        assert name in facts["facts"]
        facts["facts"][name] = OF_THE_PLACE[name]
        return {**found, "facts.json": json.dumps(facts).encode()}

    file = changed(saved, tmp_path / "other.zip", parts)
    words = rf"^make_train_step: compiled='.*other.zip' must be of this very step, but differs in {name} \(file: "
    with pytest.raises(
        ValueError, match=words + re.escape(OF_THE_PLACE[name]) + r", here: .*\)\. Make and call .*save"
    ):
        make(compiled=file)


TWO_AXES = {"mesh": ts.make_mesh(batch=1, devices=jax.devices()[:1])}
OF_THE_STEP: dict[str, tuple[dict[str, Any], str]] = {
    "mesh": (TWO_AXES, r"the mesh \(file: \(batch=1, model=1\), here: \(batch=1\)\)"),
    "devices": (
        {"mesh": make_mesh((2, 1))},
        r"the mesh .*; the order of the mesh's devices .*; the devices \(file: 1 of",
    ),
    "model": ({"model": nn.Linear(8, 5)}, r"the shape of weight \(file: None, here: \(5, 8\) torch.float32\)"),
    "plan": (
        {"plan": ts.ShardingPlan({"0.weight": P("model")}, default=P())},
        r"the spec of 0.weight \(file: P\(.*\), h",
    ),
    "option": (
        {"clip_grad_norm": 1.0, "accumulate_steps": 2},
        r"accumulate_steps= \(file: 1, here: 2\); clip_grad_norm=",
    ),
}


@pytest.mark.parametrize("kind", OF_THE_STEP)
def test_a_file_of_another_step_is_refused_when_the_step_is_made(kind: str, saved: Path) -> None:
    options, words = OF_THE_STEP[kind]
    with pytest.raises(ValueError, match=f"^make_train_step: .* but differs in {words}"):
        make(compiled=saved, **options)


def twice(model: nn.Module, batch: Any) -> torch.Tensor:
    return 2 * squared_error(model, batch)


def test_a_file_of_another_program_is_refused_before_it_is_compiled(saved: Path) -> None:
    events: list[str] = []

    def note(event: str, **_: object) -> None:
        events.append(event)

    def refused(words: str, batch: Any = BATCH, *, call: dict[str, Any] | None = None, **options: Any) -> None:
        step, state = make(compiled=saved, **options), make(**options).init(seed=0)
        jax.monitoring.register_event_listener(note)
        try:
            with pytest.raises(ValueError, match=f"(?s)^make_train_step: .* but differs in {words}"):
                step(state, batch, **call or {})
        finally:
            jax.monitoring.unregister_event_listener(note)
        assert "/jax/compilation_cache/compile_requests_use_cache" not in events

    larger = (torch.ones(16, 8), torch.ones(16, 4))
    refused(r"the shape of batch\[0\] \(file: \(8, 8\) float32, here: \(16, 8\) float32\)", larger)
    named = {"x": BATCH[0], "y": BATCH[1]}
    refused("the structure of the batch", named, loss_fn=lambda model, b: twice(model, (b["x"], b["y"])))
    refused(r"skip_grad_norm \(file: None, here: 1.0\)", call={"skip_grad_norm": 1.0})
    refused(r"train\(\) or eval\(\) of the modules", model=nn.Sequential(nn.Linear(8, 4), nn.Tanh()).eval())
    rates = r"file: .*-1.000000e-01.*, here: .*-2.000000e-01.*optimizer/mul\)"
    refused(rf"line \d+ of the program \({rates}\), and so in the loss, the optimizer", lr=0.2)
    refused(r"line \d+ of the program \(file: .*, here: .*\), and so in the loss", loss_fn=twice)
    refused(r"line \d+ of the program \(file: .*tanh.*, here: ", kind=nn.Sigmoid)


def test_a_file_of_another_key_is_refused(saved: Path, tmp_path: Path) -> None:
    """Such as one compiled with other settings of JAX: they are in its key."""
    file = changed(saved, tmp_path / "other.zip", lambda parts: with_entry(parts, name="jit_train_step-0123-cache"))
    step = make(compiled=file)
    state = step.init(seed=0)
    with pytest.raises(ValueError, match="differs in what JAX or XLA is set to, or its program is damaged"):
        step(state, BATCH)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


def test_what_is_pickled_in_a_file_is_not_executed(saved: Path, tmp_path: Path) -> None:
    data = pickle.dumps(Bomb())
    (tmp_path / "pickle.zip").write_bytes(data)
    with pytest.raises(
        ValueError, match=r"must be a whole file of step.save_compiled, but .*BadZipFile.*Save the step ag"
    ):
        make(compiled=tmp_path / "pickle.zip")
    changed(saved, tmp_path / "facts.zip", lambda parts: {**parts, "facts.json": data})
    with pytest.raises(ValueError, match=r"must be a whole file of step.save_compiled, but"):
        make(compiled=tmp_path / "facts.zip")
    changed(saved, tmp_path / "entry.zip", lambda parts: with_entry(parts, data=data))
    step = make(compiled=tmp_path / "entry.zip")
    state = step.init(seed=0)
    with (
        pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"),
        pytest.raises(ValueError, match="its program is damaged"),
    ):
        step(state, BATCH)


def test_a_damaged_file_is_refused(saved: Path, tmp_path: Path) -> None:
    whole, file = saved.read_bytes(), tmp_path / "damaged.zip"
    damages = [whole[:length] for length in range(0, len(whole), len(whole) // 7)]
    damages += [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (100, len(whole) // 2, len(whole) - 300)
    ]
    for damage in damages:
        file.write_bytes(damage)
        with pytest.raises(ValueError, match=r"compiled='.*damaged.zip' must be a whole file of step.save_compiled"):
            make(compiled=file)
    for missing in ("facts.json", "-cache"):
        changed(saved, file, lambda parts, end=missing: {n: d for n, d in parts.items() if not n.endswith(end)})
        with pytest.raises(ValueError, match=r"must be a whole file of step.save_compiled"):
            make(compiled=file)
    changed(saved, file, lambda parts: {**parts, "zeros": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="ValueError: its parts are compressed"):
        make(compiled=file)
    with pytest.raises(ValueError, match="FileNotFoundError"):
        make(compiled=tmp_path / "none.zip")


def test_an_entry_stays_in_its_directory(saved: Path, tmp_path: Path) -> None:
    name = f"../{uuid.uuid4().hex}-cache"
    step = make(compiled=changed(saved, tmp_path / "up.zip", lambda parts: with_entry(parts, name=name)))
    state = step.init(seed=0)
    with pytest.raises(ValueError, match="differs in what JAX or XLA is set to"):
        step(state, BATCH)
    assert not (Path(tempfile.gettempdir()) / Path(name).name).exists()


def test_a_step_that_has_run_is_saved_too_and_goes_on(tmp_path: Path) -> None:
    step = make()
    state, wanted = step(step.init(seed=0), BATCH)
    step.save_compiled(tmp_path / "step.zip", BATCH)
    step(state, BATCH)
    again = make(compiled=tmp_path / "step.zip")
    assert float(again(again.init(seed=0), BATCH)[1]["loss"]).hex() == float(wanted["loss"]).hex()


def test_other_steps_start_from_files_and_those_that_they_make_do_not(saved: Path, tmp_path: Path) -> None:
    step = make(compiled=saved)
    state = step.init(seed=0)
    step.prove(state, BATCH).raise_if_different()
    evaluate, file = step.evaluation(), tmp_path / "evaluation.zip"
    wanted = evaluate(state, BATCH)["loss"]
    evaluate.save_compiled(file, BATCH)
    options: dict[str, Any] = {"mesh": step.mesh, "plan": WHOLE}
    again = ts.make_eval_step(step.model, squared_error, compiled=file, **options)
    assert float(again(state, BATCH)["loss"]) == float(wanted)
    with pytest.raises(ValueError, match=r"differs in made by \(file: make_eval_step, here: make_train_step\)"):
        make(compiled=file)
    apply = ts.make_apply(step.model, **options)
    apply.save_compiled(file, BATCH[0])
    outputs = ts.make_apply(step.model, compiled=file, **options)(BATCH[0])
    assert jnp.array_equal(outputs, apply(BATCH[0]))


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    step = make(mesh=make_mesh((4, 2)))
    with pytest.raises(
        NotImplementedError, match=r"save_compiled: JAX must keep the program .* of several CPU devices"
    ):
        step.save_compiled(tmp_path / "step.zip", BATCH)
    with pytest.raises(IsADirectoryError, match="save_compiled: path must be a file, but"):
        make().save_compiled(tmp_path, BATCH)
    assert not list(tmp_path.iterdir())


def test_a_budget_of_bytes_is_not_for_files(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"with compiled=, remat must be a word.*step.report\(\)"):
        make(compiled=saved, remat=1 << 20)


@pytest.mark.slow
def test_a_step_is_saved_for_tpus_under_a_key_that_is_found_again(tmp_path: Path) -> None:
    """JAX reads it back where there are TPUs: here it says that it has found it, and cannot load it."""
    mesh, meta = ts.make_mesh(topology="v5e:2x2", batch=2, model=2), [torch.empty(8, 8, device="meta")] * 2

    def on_tpus(**options: Any) -> Any:
        with torch.device("meta"):
            model = nn.Linear(8, 8)
        plan = ts.ShardingPlan({"weight": P("model", "batch")}, default=P())
        return make(model=model, mesh=mesh, plan=plan, **options)

    on_tpus().save_compiled(tmp_path / "step.zip", meta)
    step = on_tpus(compiled=tmp_path / "step.zip")
    program, normal, arrays = step._wanted(step.structs, meta)
    with (
        pytest.warns(UserWarning, match="DeserializeLoadedExecutable"),
        pytest.raises(ValueError, match="its program is damaged"),
    ):
        step._saved.take(program.lower(normal, arrays), mesh)


ON_TWO = """
import os
from unittest import mock
import jaxlib.xla_client
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from torch_shard._train.programs import CompileCache

path = os.path.join("PATH", str(rank), "step.zip")
mesh, x = ts.make_mesh(batch=4), torch.ones(8, 4)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
def apply(**options):
    return ts.make_apply(model, mesh=mesh, plan=ts.ShardingPlan({}, default=P()), **options)
made = CompileCache.__init__
def used(self, *args):
    made(self, *args)
    self._is_off = False
unknown = mock.Mock(side_effect=jax.errors.JaxRuntimeError)  # of CPUs it is another one in each process
with (mock.patch.object(CompileCache, "__init__", used),
      mock.patch.object(jaxlib.xla_client, "get_topology_for_devices", unknown)):
    apply().save_compiled(path, x)
    multihost_utils.sync_global_devices("written")
    found = apply(compiled=path.replace("/1/", "/0/"))(x)
assert os.path.exists(path) == (rank == 0)
for one, other in zip(found.addressable_shards, apply()(x).addressable_shards):
    assert (one.data == other.data).all()
"""


@pytest.mark.slow
def test_of_several_processes_the_first_one_writes_and_all_start(tmp_path: Path) -> None:
    """On CPUs as if programs of several were kept: this one has no collectives, whose order they lose."""
    run_processes(ON_TWO.replace("PATH", str(tmp_path)), 2)
