"""Weights from files onto their shards: what eager torch loads, read slice by slice, and all that is refused."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from safetensors.torch import save_file
from torch import nn

import torch_shard as ts
from tests.oracles.processes import run_processes
from tests.tables.cases import CASE, WHOLE, make_mesh
from torch_shard._io import formats as _tensor_files
from torch_shard._io import load as _weights

GPT, TIED, BUFFERS = CASE["gpt"], CASE["tied"], CASE["buffers"]
LINEAR = ts.ShardingPlan({"weight": P("batch", "model")}, default=P())


def build(make: Any, device: str = "meta") -> nn.Module:
    with torch.device(device):
        return make()


def unique(model: nn.Module) -> dict[str, torch.Tensor]:
    """A state_dict without the further names of ties, as safetensors want it."""
    saved = model.state_dict()
    return {n: t for n, t in saved.items() if n in dict(model.named_parameters()) or n in dict(model.named_buffers())}


def linear_file(folder: pathlib.Path, **tensors: torch.Tensor) -> pathlib.Path:
    torch.manual_seed(0)
    save_file({"weight": torch.randn(8, 4), "bias": torch.randn(8), **tensors}, folder / "model.safetensors")
    return folder / "model.safetensors"


LOADERS = {
    "safetensors": (ts.load_safetensors, lambda tensors, path: save_file(tensors, path.with_suffix(".safetensors"))),
    "torch": (ts.load_torch, lambda tensors, path: torch.save(tensors, path.with_suffix(".pt"))),
}


@pytest.mark.parametrize(
    ("kind", "sizes", "device"), [("safetensors", (4, 2), "meta"), ("torch", (1, 1), "cpu"), ("torch", (2, 4), "jax")]
)
def test_a_module_is_filled_as_eager_torch_fills_it(
    kind: str, sizes: tuple[int, int], device: str, tmp_path: pathlib.Path
) -> None:
    load, save = LOADERS[kind]
    trained, model, mesh = GPT.model(), build(GPT.model, "cpu" if device == "jax" else device), make_mesh(sizes)
    model = model.to("jax") if device == "jax" else model
    save(unique(trained), tmp_path / "weights")
    resolved = GPT.plan.resolve(trained, mesh)
    assert load(tmp_path, model, mesh, GPT.plan) is model
    for name, wanted in trained.state_dict().items():
        array = model.state_dict()[name].jax()
        assert array.sharding == resolved[name]
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted.numpy()[shard.index])
    assert model.head.weight is model.tokens.weight


def test_flags_and_passing_buffers_stay(tmp_path: pathlib.Path) -> None:
    path = linear_file(tmp_path)
    model = nn.Linear(4, 8)
    model.weight.requires_grad_(False)
    model.register_buffer("passing", torch.arange(3.0), persistent=False)
    ts.load_safetensors(path, model, make_mesh((4, 2)), LINEAR)
    assert isinstance(model.weight, nn.Parameter)
    assert (model.weight.requires_grad, model.bias.requires_grad) == (False, True)
    assert "passing" not in model.state_dict()
    assert model.passing.device.type == "jax"
    assert model.passing.tolist() == [0, 1, 2]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_names_give_tensors_of_every_dtype(kind: str, dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    load, save = LOADERS[kind]
    wanted = (torch.randn(8, 6) * 10).abs().to(dtype)
    tensors = {"x": wanted, "scalar": wanted[0, 0].clone(), "empty": wanted[:0].clone(), "odd": wanted[0, :3].clone()}
    save(tensors, tmp_path / "weights")
    found = load(tmp_path, tensors, make_mesh((4, 2)), ts.ShardingPlan({"x": P("batch", "model")}, default=P()))
    assert list(found) == list(tensors)
    for name, tensor in found.items():
        held = tensors[name].int() if dtype is torch.int64 else tensors[name]  # as JAX has 64-bit integers
        assert torch.equal(as_bytes(tensor.cpu()), as_bytes(held)), name
        assert tensor.shape == held.shape


def test_the_oldest_format_of_torch_and_a_mapping_load_too(tmp_path: pathlib.Path) -> None:
    weights = nn.Linear(4, 8).state_dict()
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for source in (tmp_path / "old.pt", str(tmp_path), weights):
        found = ts.load_torch(source, weights, make_mesh((4, 2)), LINEAR)
        assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in weights.items())


def test_floats_take_the_dtype_that_is_asked_for(tmp_path: pathlib.Path) -> None:
    trained = BUFFERS.model()
    model = build(BUFFERS.model)
    save_file(unique(trained), tmp_path / "model.safetensors")
    ts.load_safetensors(tmp_path, model, make_mesh((4, 2)), WHOLE, dtype=torch.bfloat16)
    for name, wanted in trained.state_dict().items():
        found = model.state_dict()[name].cpu()
        assert torch.equal(found, wanted.bfloat16() if wanted.is_floating_point() else wanted.to(found.dtype)), name


def test_a_checkpoint_in_bfloat16_is_no_float32_model_unless_asked(tmp_path: pathlib.Path) -> None:
    save_file({n: t.bfloat16() for n, t in nn.Linear(4, 8).state_dict().items()}, tmp_path / "model.safetensors")
    structs = {"weight": jax.ShapeDtypeStruct((8, 4), jnp.float32), "bias": jax.ShapeDtypeStruct((8,), jnp.bfloat16)}
    with pytest.raises(
        ValueError,
        match=r"weight \(8, 4\) torch.bfloat16: the model has weight as torch.float32. Read it as dtype=torch.float32",
    ):
        ts.load_safetensors(tmp_path, structs, make_mesh((4, 2)), WHOLE)
    found = ts.load_safetensors(tmp_path, structs, make_mesh((4, 2)), WHOLE, dtype=torch.float32)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    structs["bias"] = jax.ShapeDtypeStruct((8,), jnp.float8_e4m3b11fnuz)
    with pytest.raises(ValueError, match=r"bias: float8_e4m3b11fnuz is no dtype of torch. Read it as"):
        ts.load_safetensors(tmp_path, structs, make_mesh((4, 2)), WHOLE)
    ts.load_safetensors(tmp_path, structs, make_mesh((4, 2)), WHOLE, dtype=torch.float32)


def test_sixty_four_bits(tmp_path: pathlib.Path) -> None:
    tensors = {"wide": torch.ones(2, dtype=torch.float64), "large": torch.tensor([2**40])}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"wide \(2,\) torch.float64: torch.float64 needs 64 bits"):
        ts.load_safetensors(tmp_path, tensors, make_mesh((4, 2)), WHOLE)
    with pytest.raises(ValueError, match=r"large: An int64 array .*1099511627776.* do not fit int32"):
        ts.load_safetensors(tmp_path, tensors, make_mesh((4, 2)), WHOLE, dtype=torch.float32)


# What is read, and how much of it.


class Recording:
    """A file that notes which bytes are asked for."""

    def __init__(self, file: Any) -> None:
        self.shown, self.stored, self._file = file.shown, file.stored, file
        self.read: dict[str, int] = {}

    def tensor(self, name: str) -> Any:
        return _Watched(self, name, self._file.tensor(name))


class _Watched:
    def __init__(self, log: Recording, name: str, tensor: torch.Tensor) -> None:
        self.log, self.name, self.whole = log, name, tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.whole[index]
        self.log.read[self.name] = self.log.read.get(self.name, 0) + part.nbytes
        return part


@pytest.mark.parametrize("spec", [P(), P(None, "model"), P("model", "batch"), P(("batch", "model"))], ids=str)
def test_every_byte_is_read_once_whatever_the_spec(
    spec: P, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[Recording] = []

    def opened(path: pathlib.Path) -> Any:
        logs.append(Recording(open_file(path)))
        return logs[-1]

    open_file = _weights.open_safetensors
    monkeypatch.setattr(_weights, "open_safetensors", opened)
    monkeypatch.setattr(_tensor_files, "RUN_BYTES", 100)  # so that a part is read in several runs
    wanted = torch.randn(16, 24)
    save_file({"x": wanted}, tmp_path / "model.safetensors")
    found = ts.load_safetensors(tmp_path, {"x": wanted}, make_mesh((4, 2)), ts.ShardingPlan({"x": spec}))
    assert logs[0].read == {"x": wanted.nbytes}
    assert torch.equal(found["x"].cpu(), wanted)


@pytest.mark.parametrize("kind", LOADERS)
def test_no_more_than_a_run_of_the_file_is_mapped(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel's own count of what this process has mapped of the file."""
    load, save = LOADERS[kind]
    run = 2**20
    monkeypatch.setattr(_tensor_files, "RUN_BYTES", run)
    tensors = {f"x{i}": torch.ones(512, 512) for i in range(2)}  # 1 MiB each
    save({**tensors, "large": torch.ones(4096, 512)}, tmp_path / "weights")  # 8 MiB
    peak, read_runs = 0, _tensor_files.read_runs

    def watching(*args: Any) -> Any:
        nonlocal peak
        for rows, values in read_runs(*args):
            yield rows, values
            peak = max(peak, resident(tmp_path))

    monkeypatch.setattr(_tensor_files, "read_runs", watching)
    structs = {n: jax.ShapeDtypeStruct(t.shape, jnp.float32) for n, t in tensors.items()}
    structs["large"] = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    load(
        tmp_path, structs, make_mesh((4, 2)), ts.ShardingPlan({"large": P(None, "model")}, default=P("batch", "model"))
    )
    # Of a run's rows a shard has half the columns; the kernel maps up to 64 KiB around each page, or the large page of
    # which it is a part. A file is mapped anew after so much was read: what is alive meanwhile makes it two, and the
    # run before it three.
    assert run // 2 <= peak <= 4 * run + 2**17


def resident(folder: pathlib.Path) -> int:
    """Bytes of the files in a folder that are mapped and in memory."""
    found, ours = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0] and not line.split(" ")[0].endswith(":"):
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_processes_read_what_their_own_devices_hold(tmp_path: pathlib.Path) -> None:
    path = linear_file(tmp_path)
    run_processes(
        f"""
        from torch_shard._io import formats as _tensor_files
        from jax.sharding import PartitionSpec as P
        read, read_runs = [], _tensor_files.read_runs
        def watching(file, name, part):
            read.append((name, part))
            return read_runs(file, name, part)
        patch = pytest.MonkeyPatch()
        patch.setattr(_tensor_files, "read_runs", watching)
        mesh = ts.make_mesh(batch=4)
        plan = ts.ShardingPlan({{"weight": P("batch")}}, default=P())
        with torch.device("meta"):
            model = torch.nn.Linear(4, 8)
        ts.load_safetensors({str(path)!r}, model, mesh, plan)
        patch.undo()
        rows = [part[0] for name, part in read if name == "weight"]
        assert sorted(rows) == [(4 * rank, 4 * rank + 2), (4 * rank + 2, 4 * rank + 4)], rows
        out = {str(tmp_path)!r} + "/again.safetensors"
        ts.export_safetensors(model, out)
        from safetensors.torch import load_file
        wanted, found = load_file({str(path)!r}), load_file(out)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        with pytest.raises(NotADirectoryError):
            ts.export_safetensors(model, out + "/below/a/file.safetensors")
        """,
        2,
    )


# Names: what stands for what.


def test_rename_by_a_dict_and_by_a_function(tmp_path: pathlib.Path) -> None:
    wanted = nn.Linear(4, 8).state_dict()
    save_file({f"module.{n}": t for n, t in wanted.items()} | {"seen": torch.ones(1)}, tmp_path / "model.safetensors")
    by_dict = {"module.weight": "weight", "module.bias": "bias", "seen": None}
    for rename in (by_dict, lambda name: None if name == "seen" else name.removeprefix("module.")):
        found = ts.load_safetensors(tmp_path, wanted, make_mesh((4, 2)), LINEAR, rename=rename)
        assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in wanted.items())


def test_all_that_does_not_fit_is_said_at_once_and_nothing_moves(tmp_path: pathlib.Path) -> None:
    save_file(
        {"wieght": torch.ones(8, 4), "extra": torch.ones(1), "other": torch.ones(3)}, tmp_path / "model.safetensors"
    )
    model = nn.Linear(4, 8)
    model.register_buffer("other", torch.ones(4))
    with pytest.raises(ValueError, match="cannot be loaded as asked; nothing was") as caught:
        ts.load_safetensors(
            *(tmp_path, model, make_mesh((4, 2)), ts.ShardingPlan({"bias": P("modle")}, default=P())),
            rename={"gone": "x"},
            allow_missing="nothing.*",
        )
    for part in (
        "wieght (8, 4) torch.float32: the model has no such name. The closest name without a partner is weight.",
        "extra (1,) torch.float32: the model has no such name.",
        "weight (8, 4) torch.float32: the file lacks it. The closest name without a partner is wieght.",
        "bias (8,) torch.float32: the file lacks it",
        "rename= maps names of the file",
        "other (3,) torch.float32: the model has other in shape (4,).",
        "rename has 'gone', which is no name of the file.",
        "allow_missing has 'nothing.*', which matches nothing.",
        "bias (8,): P('modle') names an axis that the mesh lacks. Did you mean 'model'?",
    ):
        assert part in str(caught.value)
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}


def test_two_names_that_become_one_are_refused(tmp_path: pathlib.Path) -> None:
    path = linear_file(tmp_path, old=torch.ones(8, 4))
    with pytest.raises(ValueError, match=r"(old and weight|weight and old) would both become weight"):
        ts.load_safetensors(path, nn.Linear(4, 8), make_mesh((4, 2)), LINEAR, rename={"old": "weight"})


@pytest.mark.parametrize("allowed", [True, "head.*", ["head.weight", "head.b*"]], ids=str)
def test_what_may_be_missing_keeps_what_it_has(allowed: Any, tmp_path: pathlib.Path) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 2)})

    trained = make()
    weights = {n: t for n, t in trained.state_dict().items() if n.startswith("body.")}
    save_file(weights | {"other.bias": torch.ones(1)}, tmp_path / "model.safetensors")
    mesh, free = make_mesh((4, 2)), {"allow_missing": allowed, "allow_unused": "other.*"}
    model, bare = make(), build(make)
    kept = model.head.weight.detach().clone()
    ts.load_safetensors(tmp_path, model, mesh, WHOLE, **free)
    assert torch.equal(model.head.weight.cpu(), kept)
    assert torch.equal(model.body.weight.cpu(), weights["body.weight"])
    ts.load_safetensors(tmp_path, bare, mesh, WHOLE, **free)
    assert {n: p.device.type for n, p in bare.named_parameters()} == {
        "body.weight": "jax", "body.bias": "jax", "head.weight": "meta", "head.bias": "meta",
    }  # fmt: skip
    found = ts.load_safetensors(tmp_path, build(make).state_dict(), mesh, WHOLE, **free)
    assert list(found) == ["body.weight", "body.bias"]


# Ties.


@pytest.mark.parametrize("names", [["again"], ["again", "extra", "encode"]], ids=str)
def test_a_tie_comes_under_any_of_its_names(names: list[str], tmp_path: pathlib.Path) -> None:
    trained, model = TIED.model(), build(TIED.model)
    saved = trained.state_dict()
    dropped = {"encode", "again", "extra"}.difference(names)
    kept = {n: t.clone() for n, t in saved.items() if n.split(".")[0] not in dropped}
    save_file(kept, tmp_path / "model.safetensors")
    ts.load_safetensors(tmp_path, model, make_mesh((4, 2)), TIED.plan)
    assert model.again.weight is model.encode.weight
    for name, wanted in saved.items():
        assert torch.equal(model.state_dict()[name].cpu(), wanted)


def test_names_of_a_tie_that_differ_are_refused(tmp_path: pathlib.Path) -> None:
    saved = {n: t.clone() for n, t in TIED.model().state_dict().items()}
    del saved["extra"]
    saved["again.weight"].view(torch.int32)[-1, -1] ^= 1  # the last bit of the last number
    save_file(saved, tmp_path / "model.safetensors")
    model, mesh = build(TIED.model), make_mesh((4, 2))
    with pytest.raises(ValueError, match=r"again.weight and encode.weight are one tensor .* but differ in the file"):
        ts.load_safetensors(tmp_path, model, mesh, TIED.plan)
    assert model.encode.weight.device.type == "meta"
    ts.load_safetensors(tmp_path, model, mesh, TIED.plan, rename={"encode.weight": None})
    assert torch.equal(model.encode.weight.cpu(), saved["again.weight"])


def test_a_file_of_torch_is_no_damaged_one(tmp_path: pathlib.Path) -> None:
    path = ts.export_torch(nn.Linear(4, 8), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"is no safetensors file, but one of torch.save. Read it by load_torch"):
        ts.load_safetensors(path, nn.Linear(4, 8), make_mesh((4, 2)), LINEAR)


def test_hooks_are_not_lost(tmp_path: pathlib.Path) -> None:
    model = nn.Linear(4, 8)
    model.weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(NotImplementedError, match=r"load_safetensors: weight have hooks"):
        ts.load_safetensors(linear_file(tmp_path), model, make_mesh((4, 2)), LINEAR)
    with pytest.raises(NotImplementedError, match=r"place: weight have hooks"):
        ts.place(model, make_mesh((4, 2)), LINEAR)
    assert model.weight.device.type == "cpu"


def test_modules_that_change_what_they_load_are_refused(tmp_path: pathlib.Path) -> None:
    """Torch's own hooks rename what older versions wrote, and are no harm."""
    scaled = nn.Linear(2, 2, bias=False)
    path = ts.export_safetensors(scaled, tmp_path)
    scaled.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: state[prefix + "weight"].mul_(2))
    with pytest.raises(NotImplementedError, match="Linear have hooks that change a state_dict before it is loaded"):
        ts.load_safetensors(path, scaled, make_mesh((1, 1)), WHOLE)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    ts.load_safetensors(ts.export_safetensors(normed, tmp_path), normed, make_mesh((1, 1)), WHOLE)
