"""The hand-written rivals for TPUs compute what the hub's models do in eager torch: in float32, kernels interpreted."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding

from benchmarks import tpu_cases
from benchmarks.handwritten import Rival
from benchmarks.tpu_gpt import Gpt
from benchmarks.tpu_llama import Llama
from benchmarks.tpu_mixtral import Mixtral
from benchmarks.tpu_resnet import ResNet
from tests.tables.cases import make_mesh

TURNED = (1, 0)
Names = dict[str, tuple[str, tuple[int, ...] | None]]
"""Of the hub for each of ours, and how its dims are turned; layers are `{}`."""

ATTENTION: Names = {f"h.{n}": (f"model.layers.{{}}.self_attn.{n}_proj.weight", TURNED) for n in "qkvo"} | {
    "h.ln1": ("model.layers.{}.input_layernorm.weight", None),
    "h.ln2": ("model.layers.{}.post_attention_layernorm.weight", None),
    "ln": ("model.norm.weight", None),
    "tok": ("model.embed_tokens.weight", None),
    "head": ("lm_head.weight", TURNED),
}
LLAMA: Names = ATTENTION | {
    f"h.{n}": (f"model.layers.{{}}.mlp.{n}_proj.weight", TURNED) for n in ("gate", "up", "down")
}
MIXTRAL: Names = ATTENTION | {
    "h.gate": ("model.layers.{}.mlp.gate.weight", TURNED),
    "h.up": ("model.layers.{}.mlp.experts.gate_up_proj", (0, 2, 1)),
    "h.down": ("model.layers.{}.mlp.experts.down_proj", (0, 2, 1)),
}


def gpt_names() -> Names:
    found: Names = {"tok": ("transformer.wte.weight", None), "pos": ("transformer.wpe.weight", None)}
    layers = {"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    modules = {f"h.{n}": f"transformer.h.{{}}.{m}" for n, m in (layers | {"ln1": "ln_1", "ln2": "ln_2"}).items()}
    for ours, module in (modules | {"ln": "transformer.ln_f"}).items():
        found |= {ours: (f"{module}.weight", None), f"{ours}.bias": (f"{module}.bias", None)}
    return found


def resnet_names(sizes: ResNet) -> Names:
    modules = {"stem": "resnet.embedder.embedder"}
    for stage, depth in enumerate(sizes.depths):
        for layer in range(depth):
            path = f"resnet.encoder.stages.{stage}.layers.{layer}"
            modules |= {f"{stage}.{layer}.{n}": f"{path}.layer.{i}" for i, n in enumerate(("in", "mid", "out"))}
            modules |= {f"{stage}.{layer}.skip": f"{path}.shortcut"} if layer == 0 else {}
    found: Names = {"head": ("classifier.1.weight", TURNED), "head.bias": ("classifier.1.bias", None)}
    for ours, module in modules.items():
        found |= {ours: (f"{module}.convolution.weight", (2, 3, 1, 0))}
        parts = {"scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
        found |= {f"{ours}.{n}": (f"{module}.normalization.{theirs}", None) for n, theirs in parts.items()}
    return found


def held(names: Names, values: dict[str, torch.Tensor], wanted: Any) -> dict[str, np.ndarray]:
    """Values of the hub as the rival holds them."""

    def one(name: str, turn: tuple[int, ...] | None) -> np.ndarray:
        array = values[name].detach().numpy().copy()  # forward writes to buffers
        return array if turn is None else array.transpose(turn)

    found = {}
    for ours in wanted:
        name, turn = names[ours]
        if "{}" in name:
            found[ours] = np.stack([one(name.format(i), turn) for i in range(wanted[ours].shape[0])])
        else:
            found[ours] = one(name, turn)
    return found


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (4, 128))


SMALL = {
    "layers": 2,
    "width": 512,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "vocab": 64,
    "interpret": True,
    "dtype": jnp.float32,
}
CASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: (Llama(**SMALL), tpu_cases.hf_llama, LLAMA, tokens()),
    "mixtral": lambda: (Mixtral(**SMALL), tpu_cases.hf_mixtral, MIXTRAL, tokens()),
    "gpt": lambda: (
        Gpt(layers=2, width=128, heads=2, vocab=64, length=128, interpret=True, dtype=jnp.float32),
        tpu_cases.hf_gpt,
        gpt_names(),
        tokens(),
    ),
    "resnet": lambda: (
        small := ResNet(16, (32, 64), (2, 2), 10, jnp.float32),
        tpu_cases.hf_resnet,
        resnet_names(small),
        (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))),
    ),
}


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[1:])])
def test_a_rival_computes_what_the_model_computes(name: str) -> None:
    torch.manual_seed(0)
    sizes, make, names, batch = CASES[name]()
    on_meta = make(sizes)
    model = type(on_meta)(on_meta.config)  # with values
    loss_fn = tpu_cases.class_loss if name == "resnet" else tpu_cases.next_token_loss
    mesh = make_mesh((2, 2)) if name in ("llama", "mixtral") else make_mesh((4, 1))
    rival: Rival = sizes.rival(mesh)
    start = sizes.start
    params, buffers = (held(names, model.state_dict(), part) for part in (start.params, start.buffers))
    loss = loss_fn(model, batch)
    loss.backward()
    wanted = held(names, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, start.params)
    arrays = tuple(t.numpy() for t in (batch if isinstance(batch, tuple) else (batch.int(),)))
    arrays = (arrays[0].transpose(0, 2, 3, 1), *arrays[1:]) if name == "resnet" else arrays
    placed = jax.device_put(params, {n: NamedSharding(mesh, start.specs[n]) for n in params})
    value_and_grad = jax.jit(jax.value_and_grad(rival.loss, has_aux=True))
    (value, kept), grads = value_and_grad(placed, buffers, arrays)
    assert float(value) == pytest.approx(loss.item(), rel=1e-5)
    for entry, grad in wanted.items():
        error = np.linalg.norm(grads[entry] - grad) / np.linalg.norm(grad)
        assert error < 1e-4, (entry, error)  # sums in another order
    for entry, buffer in held(names, model.state_dict(), start.buffers).items():
        np.testing.assert_allclose(kept[entry], buffer, rtol=1e-4, atol=1e-5, err_msg=entry)


@pytest.mark.slow
def test_a_stream_that_is_split_over_time_is_scattered_and_gathered() -> None:
    """Under TPU's compiler: attention and MLP gather what they take, once, and scatter what they give."""
    case = tpu_cases.find("llama block", quick=True)
    modules = {module.path: module for module in case.step().preview(case.batch).modules}
    layers = {path.removeprefix("model.layers.*."): m for path, m in modules.items() if "layers.*." in path}
    config: Any = case.model().config
    stream = math.prod(case.batch.shape) * config.hidden_size * 2 / 4  # bytes of a device's rows, in bfloat16
    times = config.num_hidden_layers * 2  # forward, and again in the backward pass
    for name in ("self_attn", "mlp"):
        assert layers[name].received["all-gather"] == stream * 3 / 4 * times
    assert not any(module.collectives.get("all-to-all") for module in layers.values())
    assert not any(layers[name].collectives.get("all-reduce") for name in ("self_attn.o_proj", "mlp.down_proj"))
