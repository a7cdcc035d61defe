"""The kernels of attention, interpreted on the CPU, against eager torch; and which program has them."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import step_of
from torch_shard._lowering.ops.attention_kernels import Kernel, splash
from torch_shard._lowering.ops.attention_masks import Seen

LENGTH = 150  # padded to two blocks
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}  # float32 sums of a hundred terms in another order


def segments(kind: str) -> tuple[torch.Tensor, ...]:
    """Numbers of queries and keys; of padding, the first queries of the second row see nothing."""
    keys = torch.ones(2, LENGTH, dtype=torch.int32)
    if kind == "padding":
        keys[0, 100:], keys[1, :20] = 0, 0
        return torch.ones_like(keys), keys
    if kind == "nothing":
        keys[0] = 0
        return torch.ones_like(keys), keys
    keys[:, 70:] = 2
    return keys, keys


def assert_runs_once_and_is(
    given: Sequence[torch.Tensor], seen: Seen, grad: torch.Tensor, wanted: list[torch.Tensor], **about: Any
) -> None:
    """The output and the gradients of q, k, v and sinks; the two passes are three kernels, interpreted."""
    segments = tuple(jnp.asarray(numbers.numpy()) for numbers in seen.segments)

    def run(grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *sinks: jax.Array) -> list[jax.Array]:
        kernel = splash(q, k, v, segments, **about, interpret=True)
        out, log_total = kernel.forward(q, k, v, sinks)
        return [out, *kernel.backward(grad, (q, k, v, out, log_total), sinks)]

    arrays = [jnp.asarray(x.numpy()) for x in (grad, *given)]
    with jax.default_matmul_precision("highest"), jax.checking_leaks():
        assert str(jax.make_jaxpr(run)(*arrays)).count("= pallas_call[") == 3
        out, *gradients = run(*arrays)
    np.testing.assert_allclose(out, wanted[0].detach(), **CLOSE)
    for found, gradient in zip(gradients, wanted[1:], strict=True):
        np.testing.assert_allclose(found, gradient, rtol=2e-4, atol=1e-4)  # sums over heads and queries


BANDS = {"all": (None, None), "causal": (None, 0), "window": (39, 0), "both sides": (30, 20)}


@pytest.mark.parametrize(
    ("name", "kind", "cap", "has_sinks"),
    [
        ("all", "padding", 0.0, False),
        ("all", "nothing", 0.0, False),
        ("both sides", "padding", 0.0, False),
        ("causal", "documents", 0.0, False),
        ("causal", "", 3.0, False),
        ("window", "", 0.0, True),
    ],
)
def test_splash_equals_eager_torch(name: str, kind: str, cap: float, has_sinks: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, LENGTH, 128) for heads in (2, 1, 1))
    given = [q, k, v, *([2 * torch.randn(2)] if has_sinks else [])]
    weights, seen = torch.randn(2, 2, LENGTH, 128), Seen(*BANDS[name], segments(kind) if kind else ())
    leaves = [x.clone().requires_grad_() for x in given]
    many = [x.repeat_interleave(2, 1) for x in leaves[1:3]]
    scores = leaves[0] @ many[0].mT * 0.1
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~seen.mask(LENGTH, LENGTH), -torch.inf)
    sinks = [sink[:, None, None].expand(2, 2, LENGTH, 1) for sink in leaves[3:]]
    shares = torch.ops.aten._safe_softmax(torch.cat([scores, *sinks], -1), -1)  # zeros of a query that sees nothing
    wanted = shares[..., :LENGTH] @ many[1]
    gradients = torch.autograd.grad((wanted * weights).sum(), leaves)

    about: Any = {"scale": 0.1, "band": BANDS[name], "cap": cap}
    assert_runs_once_and_is(given, seen, weights, [wanted, *gradients], **about)


def written(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.mT) @ v


@pytest.mark.parametrize(("keeps_total", "runs"), [(True, 1), (False, 2)])
def test_only_a_kernel_that_keeps_something_else_runs_twice(keeps_total: bool, runs: int) -> None:
    """Kernels in plain JAX, whose derivatives keep an empty array too, as cuDNN's does."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        scores = q @ k.mT
        total = jax.nn.logsumexp(scores, -1)
        out = jnp.exp(scores - total[..., None]) @ v
        return out, (q, k, v, jnp.zeros(0), total if keeps_total else (total, scores), out)

    def backward(saved: Any, grad: jax.Array) -> Any:
        q, k, v, _, kept, out = saved
        total, scores = (kept, q @ k.mT) if keeps_total else kept
        weights = jnp.exp(scores - total[..., None])
        grads = weights * (grad @ v.mT - (grad * out).sum(-1, keepdims=True))
        return grads @ k, grads.mT @ q, weights.mT @ grad

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    kernel = Kernel(lambda _, *qkv: attend(*qkv), (), lambda q, k, v: (q, k, v), lambda out: out)

    def run(grad: jax.Array, *qkv: jax.Array) -> list[jax.Array]:
        out, log_total = kernel.forward(*qkv)
        return [out, *kernel.backward(grad, (*qkv, out, log_total))]

    given = jax.random.normal(jax.random.key(0), (4, 2, 3, 5, 8))
    assert str(jax.make_jaxpr(run)(*given)).count("= reduce_max[") == runs
    out, pull = jax.vjp(written, *given[1:])
    for found, wanted in zip(run(*given), (out, *pull(given[0])), strict=True):
        np.testing.assert_allclose(found, wanted, **CLOSE)


class Block(torch.nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = (torch.nn.Linear(n, m, bias=False) for n, m in ((512, 512), (512, 512), (512, 512)))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 128)).transpose(1, 2)
        k, v = self.kv(x)[..., : 2 * 128 * self.heads].unflatten(-1, (2, self.heads, 128)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return x + self.o(out.transpose(1, 2).flatten(2))


class Model(torch.nn.Module):
    """Layers with so many heads of keys and values each."""

    def __init__(self, heads: Sequence[int] = (2, 2), is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.layers = torch.nn.ModuleList(Block(num) for num in heads)

    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        mask = keys[:, None, None, :]
        if self.is_causal:
            mask = torch.ones(len(keys[0]), len(keys[0]), dtype=torch.bool).tril() & mask
        for layer in self.layers:
            x = layer(x, mask)
        return x


def lowered(model: nn.Module, length: int = 640, **options: Any) -> jax.stages.Lowered:
    step = step_of(
        model.to("meta"),
        lambda model, batch: model(*batch).square().mean(),
        mesh=ts.make_mesh(topology="v5e:2x2", batch=2, model=2),
        **options,
    )
    batch = torch.empty(4, length, 512, device="meta"), torch.empty(4, length, dtype=torch.bool, device="meta")
    return step.lower(step.structs, batch)


def test_a_step_for_tpus_has_the_kernel_on_each_device() -> None:
    """For each layer forward, backward by keys and backward by queries: rows and heads of one device of four."""
    text = lowered(Model(heads=(2, 1)), compute_dtype=torch.bfloat16).compile().as_text() or ""
    calls = [line for line in text.splitlines() if "tpu_custom_call" in line and "splash" in line]
    assert len(calls) == 2 * 3
    assert all("bf16[2,2,640,128]" in line for line in calls)
    assert ",640,640]" not in "".join(line for line in text.splitlines() if "f32[" in line)


def test_in_loops_the_kernel_runs_forward_once() -> None:
    """XLA does not see that two loops compute the same, so that what forward made is handed on."""
    text = lowered(Model(heads=(2, 2, 2)), compute_dtype=torch.bfloat16, scan_layers=True).as_text()
    assert text.count("stablehlo.while") == 2
    assert text.count('kernel_name = "splash_mha_fwd') == 1  # a function of the text, which all layers call
    assert text.count('kernel_name = "splash_mha_d') == 2


@pytest.mark.parametrize("length", [640, 577])
def test_attention_to_all_keys_has_the_kernel(length: int) -> None:
    text = lowered(Model(is_causal=False), length, compute_dtype=torch.bfloat16).as_text()
    assert text.count("@tpu_custom_call") == 3  # forward, and both of the backward pass; of both layers
    assert not any(f"{length}x{length}x{dtype}" in text for dtype in ("f32", "bf16"))


def test_float32_keeps_its_own_precision() -> None:
    assert "tpu_custom_call" not in lowered(Model()).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cap", "band", "heads", "width"),
    [(50.0, (511, 0), (2, 1), 256), (0.0, (127, 0), (8, 1), 64)],
    ids=["as Gemma 2", "as GPT-OSS, with sinks"],
)
def test_soft_caps_and_sinks_are_compiled_by_mosaic(cap: float, band: Any, heads: Any, width: int) -> None:
    """Without the models, whose steps are lowered to these kernels in `test_attention_written.py`."""

    def run(grad: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, sinks: tuple[jax.Array, ...]) -> Any:
        kernel = splash(q, k, v, (), scale=0.1, band=band, cap=cap)
        out, log_total = kernel.forward(q, k, v, sinks)
        return out, kernel.backward(grad, (q, k, v, out, log_total), sinks)

    mesh = ts.make_mesh(topology="v5e:2x2", batch=4)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    q, k = (jax.ShapeDtypeStruct((1, num, 1024, width), jnp.bfloat16) for num in heads)
    sinks = () if cap else (jax.ShapeDtypeStruct(heads[:1], jnp.float32),)
    text = jax.jit(mapped).lower(q, q, k, k, sinks).compile().as_text() or ""
    assert text.count("tpu_custom_call") == 3
    assert not re.search(r"\[\d+,\d+,1024,1024\]", text)
