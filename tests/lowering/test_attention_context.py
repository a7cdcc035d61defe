"""Attention over a sequence that is split, on eight devices, against the same attention on one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import torch_shard as ts
from torch_shard._cost.total import costs_of
from torch_shard._lowering.ops import attention_balance, attention_context, attention_kernels
from torch_shard._lowering.ops.attention_blocks import in_blocks, in_blocks_backward
from torch_shard._lowering.ops.attention_context import on_mesh
from torch_shard._lowering.ops.attention_kernels import _splash_kernel, kernel_on_mesh
from torch_shard._lowering.ops.dropout import KeptWeights
from torch_shard._lowering.rows import RowSplit
from torch_shard._sharding.context import ContextMode

BATCH, LENGTH, WIDTH = 2, 32, 8


@dataclasses.dataclass(frozen=True)
class Case:
    mode: ContextMode
    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"batch": 2, "context": 2, "model": 2})
    heads: tuple[int, int] = (8, 4)
    band: tuple[int | None, int | None] = (None, 0)
    padded: bool = False
    sinks: bool = False
    cap: float = 0
    dropout: float = 0
    keys: int = 1
    """So many times as many keys as queries."""


ONE_AXIS = {"context": 8}
CASES = {
    "gather, window, padding, one head of keys": Case("gather", heads=(8, 1), band=(5, 0), padded=True),
    "gather, dropout, sinks, cap": Case("gather", dropout=0.4, sinks=True, cap=2.0, padded=True),
    "heads, padding": Case("heads", padded=True),
    "heads, dropout, sinks, cap": Case("heads", dropout=0.4, sinks=True, cap=2.0, band=(9, 3)),
    "ring, causal, padding, sinks, dropout, three": Case(
        "ring", sizes={"context": 4, "batch": 2}, padded=True, sinks=True, dropout=0.4
    ),
    "ring, window, eight": Case("ring", sizes=ONE_AXIS, band=(5, 0)),
    "ring, padding, all keys": Case("ring", band=(None, None), padded=True),
    "ring, causal, more keys": Case("ring", padded=True, sinks=True, dropout=0.4, keys=2),
    "ring, window, more keys": Case("ring", sizes=ONE_AXIS, band=(5, 3), keys=2),
    "gather, causal, more keys": Case("gather", padded=True, keys=2),
    "ring, dropout, sinks, cap": Case("ring", dropout=0.4, sinks=True, cap=2.0, padded=True, band=(9, 3)),
}


def given(case: Case, dtype: Any = np.float64, length: int = LENGTH, width: int = WIDTH) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    of_queries, of_keys = ((heads, length * times) for heads, times in zip(case.heads, (1, case.keys), strict=True))
    q, k, v, grad = (
        draw.normal(size=(BATCH, *of, width)).astype(dtype) for of in (of_queries, of_keys, of_keys, of_queries)
    )
    sinks = (draw.normal(size=case.heads[0]).astype(dtype),) if case.sinks else ()
    keys = np.ones((BATCH, length * case.keys), np.int32)
    keys[0, length // 2 :], keys[1, :3] = 0, 0  # the first queries of the second row see nothing
    segments = (np.ones((BATCH, length), np.int32), keys) if case.padded else ()
    return {"grad": grad, "qkv": (q, k, v), "segments": segments, "sinks": sinks, "seed": (np.array([3, 5], np.int32),)}


def on_devices(case: Case) -> Callable[..., Any]:
    sizes: dict[str, Any] = {**case.sizes}
    mesh = ts.make_mesh(**sizes)
    rows = RowSplit(
        mesh, tuple(axis for axis in ("batch",) if axis in case.sizes), context=ts.Context("context", case.mode)
    )
    about = {"scale": 0.3, "band": case.band, "cap": case.cap}

    def run(grad: Any, qkv: tuple[Any, Any, Any], segments: Any, sinks: Any, seed: Any) -> Any:
        attention = on_mesh(qkv, segments, sinks, about, case.dropout, rows)
        assert attention is not None
        out, total = attention.forward(*qkv, segments, sinks, seed if case.dropout else ())
        saved = (*qkv, out, total)
        return out, attention.backward(grad, saved, segments, sinks, seed if case.dropout else ())

    return run


def on_one(case: Case) -> Callable[..., Any]:
    def run(grad: Any, qkv: tuple[Any, Any, Any], segments: Any, sinks: Any, seed: Any) -> Any:
        kept = KeptWeights(qkv[0], qkv[1], seed[0], case.dropout) if case.dropout else None
        about: dict[str, Any] = {"scale": 0.3, "band": case.band, "cap": case.cap, "kept": kept, "sinks": sinks}
        out, total = in_blocks(*qkv, segments, **about)
        return out, in_blocks_backward(grad, (*qkv, out, total), segments, **about)

    return run


@pytest.mark.parametrize("name", CASES)
def test_equals_attention_on_one_device(name: str) -> None:
    case = CASES[name]
    with jax.enable_x64(True):
        found, wanted = (jax.jit(make(case))(**given(case)) for make in (on_devices, on_one))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)  # float64 sums in another order


KERNELS: dict[str, tuple[Case, int]] = {
    "gather, balanced": (Case("gather", heads=(8, 2), padded=True), 512),
    "ring, balanced": (Case("ring", sizes={"context": 2, "model": 2}, heads=(4, 2), padded=True, sinks=True), 512),
    "ring, cap, all keys": (Case("ring", heads=(4, 2), band=(None, None), cap=2.0), 256),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_of_tpus_takes_a_part_of_the_queries(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case, length = KERNELS[name]
    monkeypatch.setattr(attention_balance, "CHUNK", 128)
    monkeypatch.setattr(attention_balance, "FEWEST", 512)
    monkeypatch.setattr(attention_kernels, "LONG", 256)
    monkeypatch.setattr(attention_context, "kernel_on_mesh", functools.partial(kernel_on_mesh, interpret=True))
    arrays = jax.tree.map(jnp.asarray, given(case, np.float32, length=length, width=128))
    arrays |= {name: jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays[name]) for name in ("qkv", "grad")}
    text = jax.jit(on_devices(case)).lower(**arrays).as_text()
    assert "splash" in text
    assert "collective_permute" in text
    found, wanted = (jax.jit(make(case))(**arrays) for make in (on_devices, on_one))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        error = jnp.abs(one.astype(jnp.float32) - other.astype(jnp.float32)).max() / jnp.abs(other).max()
        assert error < 3e-2  # both compute in bfloat16, of which a step is 2 ** -8, and round in other places


@pytest.mark.parametrize("num", [2, 3])
def test_devices_compute_as_many_blocks(num: int) -> None:
    kernel: Any = _splash_kernel((1024 * num, 1024 * num), 1, (None, 0), 0, num_shards=num, balanced=True)
    for info in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info):
        counts = [int(part.sum()) for part in np.split(np.asarray(info.block_mask) > 0, num, axis=1)]
        assert counts == [2 * num + 1] * num


def test_a_balanced_ring_computes_what_its_mask_leaves() -> None:
    def flops(band: tuple[int | None, int | None]) -> float:
        case = Case("ring", sizes={"context": 4}, band=band)
        forward = jax.jit(lambda **arrays: on_devices(case)(**arrays)[0])  # in both passes, products may be shared
        compiled = forward.lower(**given(case, np.float32, length=256)).compile()
        return sum(cost.flops for cost in costs_of(compiled.as_text() or ""))

    assert flops((None, 0)) / flops((None, None)) == (2 * 4 + 1) / (4 * 4)  # of four pairs of chunks in each round


def test_no_device_of_a_ring_has_all_keys() -> None:
    case = Case("ring", sizes=ONE_AXIS)
    text = jax.jit(on_devices(case)).lower(**given(case, np.float32)).compile().as_text() or ""
    assert "collective-permute" in text
    assert "all-gather" not in text
