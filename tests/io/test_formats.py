"""Files that are missing, damaged or something else: one clear error each, that names the file, and nothing loaded."""

import io
import json
import os
import pathlib
import pickle
from typing import Any

import pytest
import torch
from jax.sharding import PartitionSpec as P
from safetensors.torch import save_file
from torch import nn

import torch_shard as ts
from tests.tables.cases import make_mesh

WEIGHTS = {"weight": torch.arange(32.0).view(8, 4), "bias": torch.ones(8)}


def load(path: Any, load: Any = ts.load_safetensors) -> Any:
    model = nn.Linear(4, 8, device="meta")
    try:
        return load(path, model, make_mesh((4, 2)), ts.ShardingPlan({}, default=P()))
    except Exception:
        assert {p.device.type for p in model.parameters()} == {"meta"}
        raise


def whole() -> bytes:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer)
    return buffer.getvalue()


def safetensors_bytes(folder: pathlib.Path) -> bytes:
    save_file(WEIGHTS, folder / "whole.safetensors")
    return (folder / "whole.safetensors").read_bytes()


DAMAGE = {
    "an absurd length": lambda b: (2**62).to_bytes(8, "little") + b[8:],
    "a length beyond the end": lambda b: (2**20).to_bytes(8, "little") + b[8:],
    "truncated data": lambda b: b[:-8],
    "a truncated header": lambda b: b[:40],
    "a header that is no JSON": lambda b: b[:8] + b"x" * 40 + b[48:],
    "offsets that overlap": lambda b: b.replace(b'"data_offsets":[0,32]', b'"data_offsets":[4,36]'),
    "a dtype of another size": lambda b: b.replace(b'"F32"', b'"F64"', 1),
    "nothing": lambda b: b"",
    "seven bytes": lambda b: b[:7],
}


def test_damaged_safetensors(tmp_path: pathlib.Path) -> None:
    path, before = tmp_path / "bad.safetensors", safetensors_bytes(tmp_path)
    for damage, flawed in DAMAGE.items():
        path.write_bytes(flawed(before))
        assert path.read_bytes() != before, damage
        words = r"bad.safetensors is damaged, or no safetensors file: .*the file has \d+ bytes"
        with pytest.raises(ValueError, match=words):
            load(path)


def test_the_length_of_an_absurd_header_is_said(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little"))
    with pytest.raises(ValueError, match=rf"the file has 8 bytes, and its first eight ask for a header of {2**62}\)"):
        load(path)


def test_truncated_torch_files_and_garbage(tmp_path: pathlib.Path) -> None:
    for content in (b"", whole()[:40], whole()[:1000], b"hello world, this is no pickle"):
        (tmp_path / "bad.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad.pt (is damaged, or no file of torch.save|holds more than tensors)"):
            load(tmp_path / "bad.pt", ts.load_torch)


class Evil:
    """Makes a directory when it is unpickled by a reader that runs what it is told."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("write", ["zip", "legacy", "pickle"])
def test_a_pickle_that_runs_code_does_not(write: str, tmp_path: pathlib.Path) -> None:
    content, path = {"weight": Evil(tmp_path / "harm"), "bias": torch.ones(8)}, tmp_path / "evil.pt"
    if write == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=write == "zip")
    named = "is pickled in another way" if write == "pickle" else r"names posix\.mkdir"
    with pytest.raises(ValueError, match=rf"evil.pt holds more than tensors .*: it {named}.* may run code"):
        load(path, ts.load_torch)
    assert not (tmp_path / "harm").exists()


def test_a_whole_module_is_refused_with_what_to_do(tmp_path: pathlib.Path) -> None:
    torch.save(nn.Linear(4, 8), tmp_path / "module.pt")
    with pytest.raises(ValueError, match=r"module.pt holds more.*Linear.*torch.save\(model.state_dict\(\), path\)"):
        load(tmp_path / "module.pt", ts.load_torch)


def test_a_nested_checkpoint_says_what_it_has(tmp_path: pathlib.Path) -> None:
    torch.save({"epoch": 3, "model": WEIGHTS, "optimizer": {"state": {}}}, tmp_path / "all.pt")
    with pytest.raises(ValueError, match=r"'epoch': int, 'model': dict of 2 entries, .*perhaps \['model'\] in place"):
        load(tmp_path / "all.pt", ts.load_torch)
    found = load(torch.load(tmp_path / "all.pt", weights_only=True)["model"], ts.load_torch)
    assert torch.equal(found.weight.cpu(), WEIGHTS["weight"])
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list.pt must hold tensors by name, and nothing else. It holds list"):
        load(tmp_path / "list.pt", ts.load_torch)


def test_sparse_tensors_are_listed(tmp_path: pathlib.Path) -> None:
    torch.save({**WEIGHTS, "weight": WEIGHTS["weight"].to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(
        ValueError, match=r"sparse.pt must hold plain CPU tensors, but has weight \(cpu, torch.sparse_coo"
    ):
        load(tmp_path / "sparse.pt", ts.load_torch)


# Directories and indices, of both kinds.
KINDS = {
    "safetensors": (ts.load_safetensors, save_file, "model-{}.safetensors", "model.safetensors.index.json"),
    "torch": (ts.load_torch, torch.save, "pytorch_model-{}.bin", "pytorch_model.bin.index.json"),
}


def many_files(kind: str, folder: pathlib.Path) -> dict[str, str]:
    """A file for each tensor; returns the map of their index."""
    _, save, file, index = KINDS[kind]
    found = {name: file.format(number) for number, name in enumerate(WEIGHTS)}
    for name, tensor in WEIGHTS.items():
        save({name: tensor.clone()}, folder / found[name])
    write_index(folder / index, found)
    return found


def write_index(path: pathlib.Path, weight_map: Any) -> None:
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("kind", KINDS)
def test_many_files_by_their_index_or_directory(kind: str, tmp_path: pathlib.Path) -> None:
    many_files(kind, tmp_path)
    for path in (tmp_path, tmp_path / KINDS[kind][3]):
        model = load(path, KINDS[kind][0])
        assert all(torch.equal(p.cpu(), WEIGHTS[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_an_index(kind: str, tmp_path: pathlib.Path) -> None:
    (loads, save, _, index), found = KINDS[kind], many_files(kind, tmp_path)
    lost, kept = found["bias"], found["weight"]
    write_index(tmp_path / index, {**found, "bias": kept})
    with pytest.raises(ValueError, match=rf"bias: {index} says that it is in {kept}, which lacks it"):
        load(tmp_path, loads)
    write_index(tmp_path / index, found)
    save({n: t.clone() for n, t in WEIGHTS.items()}, tmp_path / kept)
    with pytest.raises(ValueError, match=rf"bias: it is in ({kept} and in {lost}|{lost} and in {kept})"):
        load(tmp_path, loads)
    (tmp_path / lost).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{index} names {lost}, which .* lacks"):
        load(tmp_path, loads)
    for weight_map in ({"weight": "../" + kept}, {"weight": "/etc/passwd"}, {"weight": 3}):
        write_index(tmp_path / index, weight_map)
        with pytest.raises(ValueError, match=rf"{index} names .*; an index names files beside it"):
            load(tmp_path, loads)
    for text in ("{", "[]", '{"weight_map": 3}', "{}"):
        (tmp_path / index).write_text(text)
        with pytest.raises(ValueError, match=rf'{index} is no index: it must be JSON with a "weight_map"'):
            load(tmp_path, loads)


@pytest.mark.parametrize("kind", KINDS)
def test_paths_without_a_file_or_with_too_many(kind: str, tmp_path: pathlib.Path) -> None:
    loads, save, file, index = KINDS[kind]
    with pytest.raises(FileNotFoundError, match=r"holds no .*index.json or "):
        load(tmp_path, loads)
    for number in (1, 2):
        save(WEIGHTS, tmp_path / file.format(number))
    with pytest.raises(ValueError, match=rf"holds {file.format(1)}, {file.format(2)}, and nothing says which"):
        load(tmp_path, loads)
    save(WEIGHTS, tmp_path / index.removesuffix(".index.json"))
    load(tmp_path, loads)  # the usual name says which
    write_index(tmp_path / index, {"weight": file.format(1)})
    with pytest.raises(ValueError, match=r"nothing says which is meant. Give the path of one file"):
        load(tmp_path, loads)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_without_their_index_are_no_whole(kind: str, tmp_path: pathlib.Path) -> None:
    loads, save, file, index = KINDS[kind]
    save({n: t.clone() for n, t in WEIGHTS.items()}, tmp_path / file.format("00001-of-00002"))
    with pytest.raises(FileNotFoundError, match=rf"00001-of-00002.*parts of several, but not their index {index}"):
        load(tmp_path, loads)


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    same = all(torch.equal(found[n], t.cpu()) and found[n].dtype == t.dtype for n, t in wanted.items())
    return found.keys() == wanted.keys() and same
