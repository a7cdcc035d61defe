"""Weights from shards to files: what torch, transformers and the safetensors library read back."""

import copy
import dataclasses
import json
import pathlib
from typing import Any

import peft
import pytest
import torch
from jax.sharding import PartitionSpec as P
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import torch_shard as ts
from tests.io.test_formats import equal
from tests.oracles.steps import step_of
from tests.tables.cases import CASE, WHOLE, make_mesh
from tests.tables.hf_models import HF_MODELS
from torch_shard._io import export as _tensor_writer

GPT, BUFFERS = CASE["gpt"], CASE["buffers"]
LLAMA, GPT2 = ({model.name: model for model in HF_MODELS}[name] for name in ("Llama", "GPT2"))


def trained(model: nn.Module, batch: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """A step and its state after one step."""
    step = step_of(model, **options)
    state, _ = step(step.init(seed=0), batch)
    return step, state


def repeated() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
    return nn.Sequential(nn.Linear(4, 8), *blocks, nn.Linear(8, 2))


def test_a_trained_state_is_what_step_export_gives(tmp_path: pathlib.Path) -> None:
    plan = ts.ShardingPlan({"*.0.weight": P("model", "batch")}, default=P())
    step, state = trained(repeated(), torch.randn(8, 4), plan=plan)
    assert any(len(group) > 1 for group in state.params.layout.groups)
    path = ts.export_safetensors(state, tmp_path)
    assert path == tmp_path / "model.safetensors"
    assert equal(load_file(path), step.export(state).state_dict())
    plain = repeated()
    plain.load_state_dict(load_file(path))
    again = ts.load_safetensors(path, repeated(), make_mesh((2, 4)), plan)
    assert equal(load_file(path), {n: t.cpu() for n, t in again.state_dict().items()})


def test_buffers_that_a_state_dict_lacks_are_not_written(tmp_path: pathlib.Path) -> None:
    step, state = trained(BUFFERS.model(), torch.randn(8, 8))
    assert "scale" in state.buffers
    ts.export_safetensors(state, tmp_path)
    assert equal(load_file(tmp_path / "model.safetensors"), step.export(state).state_dict())


@pytest.mark.parametrize(
    ("model", "dtype", "max_shard_bytes"),
    [(LLAMA, torch.bfloat16, 20_000), (GPT2, torch.float32, 10**9)],
    ids=["Llama, several files", "GPT2, one file"],
)
def test_transformers_reads_a_tied_model(model: Any, dtype: torch.dtype, max_shard_bytes: int, tmp_path: Any) -> None:
    tied = dataclasses.replace(model, fields={**model.fields, "tie_word_embeddings": True}).build("sdpa").to(dtype)
    tied.config.save_pretrained(tmp_path)
    path = ts.export_safetensors(tied, tmp_path, max_shard_bytes=max_shard_bytes)
    assert path.name.endswith(".index.json") is (max_shard_bytes < 10**9)
    found, info = type(tied).from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert not any(info[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert equal(found.state_dict(), tied.state_dict())
    with torch.device("meta"):
        bare = type(tied)(tied.config).to(dtype)
    loaded = ts.load_safetensors(tmp_path, bare, make_mesh((4, 2)), WHOLE)
    assert equal({n: t.cpu() for n, t in loaded.state_dict().items()}, tied.state_dict())
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_what_transformers_saved_loads_and_comes_back(tmp_path: pathlib.Path) -> None:
    model: Any = LLAMA.build("sdpa")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    with torch.device("meta"):
        bare = type(model)(model.config)
    ts.load_safetensors(tmp_path / "theirs", bare, make_mesh((4, 2)), ts.ShardingPlan(LLAMA.rules, default=P()))
    ts.export_safetensors(bare, tmp_path / "ours")
    assert equal(load_file(tmp_path / "ours" / "model.safetensors"), model.state_dict())


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_modules_and_mappings_on_any_device_with_a_tie_once(device: str, tmp_path: pathlib.Path) -> None:
    model = GPT.model()
    wanted = {n: t.clone() for n, t in model.state_dict().items() if n != "head.weight"}
    model = model.to(device)
    ts.export_safetensors(model, tmp_path / "deep" / "a.safetensors", metadata={"epoch": "3"})
    assert equal(load_file(tmp_path / "deep" / "a.safetensors"), wanted)
    with safe_open(tmp_path / "deep" / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "epoch": "3"}
    ts.export_safetensors({n: t for n, t in model.state_dict().items() if n in wanted}, tmp_path / "b.safetensors")
    assert equal(load_file(tmp_path / "b.safetensors"), wanted)
    ts.export_torch(model, tmp_path / "c.pt")
    assert equal(torch.load(tmp_path / "c.pt", weights_only=True), wanted)


def test_a_tie_of_a_state_dict_is_written_under_its_first_name(tmp_path: pathlib.Path) -> None:
    weight = torch.randn(4, 2)
    ts.export_safetensors({"z": weight, "a": weight, "part": weight[:2]}, tmp_path)
    assert equal(load_file(tmp_path / "model.safetensors"), {"z": weight, "part": weight[:2]})


DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.bool, torch.uint8, torch.int16, torch.complex64]


def test_every_dtype_and_shape_is_read_by_the_library(tmp_path: pathlib.Path) -> None:
    tensors = {f"x{i}": (torch.randn(3, 5) * 4).abs().to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "turned": torch.randn(4, 3).T,
        "f": torch.ones(1),
    }
    ts.export_safetensors(tensors, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert found[name].contiguous().reshape(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
        )


def many(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((10,), value) for name in "abcde"}


def read(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    structs = many(0.0)
    found = ts.load_safetensors(folder, structs, make_mesh((4, 2)), WHOLE)
    return {name: tensor.cpu() for name, tensor in found.items()}


def test_several_files_have_an_index_as_hugging_face_has_it(tmp_path: pathlib.Path) -> None:
    path = ts.export_safetensors(many(1.0), tmp_path, max_shard_bytes=100)
    assert json.loads(path.read_text()) == {
        "metadata": {"total_size": 200},
        "weight_map": {
            "a": "model-00001-of-00003.safetensors",
            "b": "model-00001-of-00003.safetensors",
            "c": "model-00002-of-00003.safetensors",
            "d": "model-00002-of-00003.safetensors",
            "e": "model-00003-of-00003.safetensors",
        },
    }
    assert equal(read(tmp_path), many(1.0))


@pytest.mark.parametrize(("before", "after"), [(100, 80), (100, 10**6), (10**6, 100)])
def test_an_export_takes_the_place_of_an_older_one(before: int, after: int, tmp_path: pathlib.Path) -> None:
    ts.export_safetensors(many(1.0), tmp_path, max_shard_bytes=before)
    path = ts.export_safetensors(many(2.0), tmp_path, max_shard_bytes=after)
    assert equal(read(tmp_path), many(2.0))
    index = json.loads(path.read_text())["weight_map"].values() if path.suffix == ".json" else ()
    assert {p.name for p in tmp_path.iterdir()} == {path.name, *index}  # nothing is left over


@pytest.mark.parametrize(("before", "after", "tensors"), [(100, 100, 3), (100, 10**6, 1), (10**6, 100, 4)])
def test_an_export_that_fails_leaves_the_older_one(
    before: int, after: int, tensors: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ts.export_safetensors(many(1.0), tmp_path, max_shard_bytes=before)
    files = sorted(tmp_path.iterdir())
    write, left = _tensor_writer._write, tensors

    def full(out: Any, stored: Any, values: Any, metadata: Any) -> None:
        def counted() -> Any:
            nonlocal left
            for value in values:
                if left == 0:
                    raise OSError(28, "No space left on device")
                left -= 1
                yield value

        write(out, stored, counted(), metadata)

    monkeypatch.setattr(_tensor_writer, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        ts.export_safetensors(many(2.0), tmp_path, max_shard_bytes=after)
    assert sorted(tmp_path.iterdir()) == files
    assert equal(read(tmp_path), many(1.0))


@pytest.mark.parametrize("before", [100, 10**6])
@pytest.mark.parametrize(("after", "renames"), [(100, 0), (100, 1), (100, 3), (100, 4), (10**6, 0)])
def test_an_export_that_dies_between_its_renames_leaves_one_that_is_whole(
    before: int, after: int, renames: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ts.export_safetensors(many(1.0), tmp_path, max_shard_bytes=before)
    replace, left = pathlib.Path.replace, renames

    def dying(path: pathlib.Path, target: pathlib.Path) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(pathlib.Path, "replace", dying)
    needed = 4 if after == 100 else 1  # three files and the index
    if renames < needed:
        with pytest.raises(KeyboardInterrupt):
            ts.export_safetensors(many(2.0), tmp_path, max_shard_bytes=after)
    else:
        ts.export_safetensors(many(2.0), tmp_path, max_shard_bytes=after)
    assert equal(read(tmp_path), many(1.0 if renames < needed else 2.0))


def test_names_of_adapters_are_told(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    ts.export_safetensors({"q.weight": torch.ones(2)}, tmp_path)
    assert not caplog.text
    ts.export_safetensors({"q.weight": torch.ones(2), "q.lora_A.default.weight": torch.ones(2)}, tmp_path)
    assert "the names are those of peft around the model (q.lora_A.default.weight): ts.load_safetensors" in caplog.text
    assert "model.save_pretrained(path)" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft's
def test_a_state_with_adapters_is_told_from_weights_that_from_pretrained_reads(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the warning names is what transformers and peft read."""
    base: Any = LLAMA.build("sdpa")
    wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    ids = torch.randint(0, 32, (8, 6))
    step = step_of(wrapped, lambda model, ids: model(input_ids=ids, labels=ids).loss)
    state, _ = step(step.init(seed=0), ids)
    state, _ = step(state, ids)  # the second factor begins as zeros, and so did the first gradient of the other

    def file(name: str, what: Any) -> pathlib.Path:
        caplog.clear()
        return ts.export_safetensors(what, tmp_path / name)

    path = file("state", state)
    assert "(base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight)" in caplog.text
    again = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    assert not again.load_state_dict(load_file(path), strict=False).unexpected_keys

    trained_model: Any = step.export(state)
    merged = trained_model.merge_and_unload()
    path = file("merged", merged)
    assert not caplog.text
    base.config.save_pretrained(path.parent)
    read = type(base).from_pretrained(path.parent).eval()
    wrapped.save_pretrained(str(tmp_path / "adapter"))
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted = step.export(state).eval()(input_ids=ids).logits
        torch.testing.assert_close(adapted(input_ids=ids).logits, wanted)
        torch.testing.assert_close(read(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-5)  # merged in float32
