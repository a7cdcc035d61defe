"""The hand-written rivals for TPUs compute what the hub's models do in eager torch: in float32, kernels interpreted."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding

import torch_shard as ts
from benchmarks import tpu_cases
from benchmarks.handwritten import Rival
from benchmarks.tpu_context import LongLlama
from benchmarks.tpu_gpt import Gpt
from benchmarks.tpu_gpt_oss import GptOss
from benchmarks.tpu_llama import Llama
from benchmarks.tpu_mixtral import Mixtral
from benchmarks.tpu_qwen import Qwen
from benchmarks.tpu_resnet import ResNet
from benchmarks.tpu_vit import Vit
from tests.tables.cases import make_mesh

TURNED = (1, 0)
Turn = tuple[int, ...] | Callable[[np.ndarray], np.ndarray] | None
Names = dict[str, tuple[str, Turn]]
"""Of the hub for each of ours, and how its dims are turned, or its values are; layers are `{}`."""

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


def halves(interleaved: np.ndarray) -> np.ndarray:
    """Gate and up, which are every other feature, one behind the other."""
    return np.concatenate((interleaved[..., ::2], interleaved[..., 1::2]), -1)


def vit_names(sizes: Vit) -> Names:
    first = "vit.embeddings"
    found: Names = {
        "patch": (f"{first}.patch_embeddings.projection.weight", lambda kernel: kernel.reshape(len(kernel), -1).T),
        "patch.bias": (f"{first}.patch_embeddings.projection.bias", None),
        "cls": (f"{first}.cls_token", np.ravel),
        "pos": (f"{first}.position_embeddings", lambda positions: positions[0]),
    }
    modules = {"head": "classifier", "ln": "vit.layernorm"}
    own = {n: f"attention.{n}_proj" for n in "qkvo"} | {"up": "mlp.fc1", "down": "mlp.fc2"}
    for layer in range(sizes.layers):
        norms = {"ln1": "layernorm_before", "ln2": "layernorm_after"}
        modules |= {f"h.{layer}.{n}": f"vit.layers.{layer}.{theirs}" for n, theirs in (own | norms).items()}
    for ours, module in modules.items():
        turn = None if "ln" in ours else TURNED
        found |= {ours: (f"{module}.weight", turn), f"{ours}.bias": (f"{module}.bias", None)}
    return found


def qwen_names(sizes: Qwen) -> Names:
    """Layers are entries of their own."""
    layer = {n.removeprefix("h."): of for n, of in MIXTRAL.items() if n.startswith("h.")}
    layer |= {f"{n}_norm": (f"model.layers.{{}}.self_attn.{n}_norm.weight", None) for n in "qk"}
    return _of_layers(sizes, layer)


def gpt_oss_names(sizes: GptOss) -> Names:
    layer = {n.removeprefix("h."): of for n, of in MIXTRAL.items() if n.startswith("h.")}
    path, mlp = "model.layers.{}.self_attn", "model.layers.{}.mlp"
    layer |= {f"{n}.bias": (f"{path}.{n}_proj.bias", None) for n in "qkvo"} | {"sinks": (f"{path}.sinks", None)}
    layer |= {"gate": (f"{mlp}.router.weight", TURNED), "gate.bias": (f"{mlp}.router.bias", None)}
    layer |= {"up": (f"{mlp}.experts.gate_up_proj", halves), "up.bias": (f"{mlp}.experts.gate_up_proj_bias", halves)}
    layer |= {n: (f"{mlp}.experts.{m}", None) for n, m in {"down": "down_proj", "down.bias": "down_proj_bias"}.items()}
    return _of_layers(sizes, layer)


def _of_layers(sizes: Qwen, layer: Names) -> Names:
    found = {n: of for n, of in ATTENTION.items() if not n.startswith("h.")}
    for i in range(sizes.layers):
        found |= {f"h.{i}.{n}": (theirs.format(i), turn) for n, (theirs, turn) in layer.items()}
    return found


def held(names: Names, values: dict[str, torch.Tensor], wanted: Any) -> dict[str, np.ndarray]:
    """Values of the hub as the rival holds them."""

    def one(name: str, turn: Turn) -> np.ndarray:
        array = values[name].detach().numpy().copy()  # forward writes to buffers
        return turn(array) if callable(turn) else array if turn is None else array.transpose(turn)

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
SMALL_VIT = {
    "layers": 2,
    "width": 256,
    "hidden": 64,
    "heads": 2,
    "image": 48,
    "patch": 16,
    "classes": 8,
    "interpret": True,
    "dtype": jnp.float32,
}


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 48, 48), torch.randint(0, 8, (4,))


CASES: dict[str, Callable[[], Any]] = {
    "llama": lambda: (Llama(**SMALL), tpu_cases.hf_llama, LLAMA, tokens()),
    "llama long": lambda: (
        LongLlama(**SMALL, length=512),
        tpu_cases.hf_llama,
        LLAMA,
        torch.randint(0, 64, (2, 512)),
    ),
    "mixtral": lambda: (Mixtral(**SMALL), tpu_cases.hf_mixtral, MIXTRAL, tokens()),
    "gpt": lambda: (
        Gpt(layers=2, width=128, heads=2, vocab=64, length=128, interpret=True, dtype=jnp.float32),
        tpu_cases.hf_gpt,
        gpt_names(),
        tokens(),
    ),
    "qwen": lambda: (
        small := Qwen(**SMALL, head=128, experts=8, chosen=2),
        tpu_cases.hf_qwen,
        qwen_names(small),
        tokens(),
    ),
    "gpt-oss": lambda: (
        small := GptOss(**SMALL, head=128, experts=8, chosen=2, window=32),
        tpu_cases.hf_gpt_oss,
        gpt_oss_names(small),
        tokens(),
    ),
    "vit": lambda: (small := Vit(**SMALL_VIT), tpu_cases.hf_vit, vit_names(small), images()),
    "vit, kernel": lambda: (small := Vit(**SMALL_VIT, kernel=True), tpu_cases.hf_vit, vit_names(small), images()),
    "resnet": lambda: (
        small := ResNet(16, (32, 64), (2, 2), 10, jnp.float32),
        tpu_cases.hf_resnet,
        resnet_names(small),
        (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rival_computes_what_the_model_computes(name: str) -> None:
    torch.manual_seed(0)
    sizes, make, names, batch = CASES[name]()
    on_meta = make(sizes)
    model = type(on_meta)(on_meta.config)  # with values
    for entry, p in model.named_parameters():
        if entry.endswith("bias"):
            torch.nn.init.normal_(p, std=0.02)  # zeros would hide what they do
    loss_fn = tpu_cases.class_loss if isinstance(batch, tuple) else tpu_cases.next_token_loss
    mesh = make_mesh((4, 1)) if name in ("gpt", "resnet") else make_mesh((2, 2))
    mesh = ts.make_mesh(batch=2, context=2, devices=jax.devices()[:4]) if name == "llama long" else mesh
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
    least = 1e-4 * max(np.linalg.norm(grad) for grad in wanted.values())  # of keys' biases all is rounding
    for entry, grad in wanted.items():
        error = np.linalg.norm(grads[entry] - grad) / max(np.linalg.norm(grad), least)
        assert error < 1e-4, (entry, error)  # sums in another order
    for entry, buffer in held(names, model.state_dict(), start.buffers).items():
        np.testing.assert_allclose(kept[entry], buffer, rtol=1e-4, atol=1e-5, err_msg=entry)
