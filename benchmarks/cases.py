"""The cases of several sections: a torch model, its batch, its plan and its hand-written rival."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import handwritten_models as by_hand
from benchmarks import models
from benchmarks.handwritten import Rival
from benchmarks.models import Batch
from benchmarks.pieces import BACKWARD_BY_HAND, BEST_AUTODIFF


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: For the table.
        model: Fresh, with its initial values.
        loss_fn: In torch.
        batch: On the CPU.
        specs: Tensor parallel over the mesh axis `model`.
        rival: By hand in JAX, as is good practice.
        harder: Further ways to write the rival, which may be faster.
        target: Of a step over the rival's.
    """

    name: str
    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    batch: Batch
    specs: dict[str, Any]
    rival: Rival
    harder: dict[str, Rival]
    target: float


def mlp(quick: bool) -> Case:
    """The tutorial's MLP."""
    sizes, rows = ((784, 256, 256, 256, 10), 64) if quick else ((784, 1024, 1024, 1024, 10), 256)
    batch = models.class_batch(rows, sizes[0])
    harder = {"weights (in, out)": by_hand.mlp(in_out=True)}
    rival = by_hand.mlp(in_out=False)  # on the CPU much the faster of the two
    return Case("MLP", models.mlp(sizes), models.class_loss, batch, models.MLP_SPECS, rival, harder, 1.0)


def gpt(quick: bool, fused: bool = False) -> Case:
    """A GPT of 6 layers, 256 wide."""
    layers, width, length, rows = (2, 64, 32, 8) if quick else (6, 256, 128, 8)
    vocab, heads = 512, 8
    model = models.GPT(layers, width, heads, vocab, length, fused)
    harder = {
        "unrolled": by_hand.gpt(heads, scan=False),
        "best autodiff": by_hand.gpt(heads, BEST_AUTODIFF, scan=False, in_out=False),
        "backward by hand": by_hand.gpt(heads, BACKWARD_BY_HAND, scan=False, in_out=False),
    }
    batch, specs = models.token_batch(rows, length, vocab), models.FUSED_SPECS if fused else models.GPT_SPECS
    return Case("GPT", model, models.token_loss, batch, specs, by_hand.gpt(heads), harder, 0.9)


def llama(quick: bool) -> Case:
    """A Llama of 4 layers with grouped-query attention."""
    layers, width, hidden, length, rows = (2, 64, 128, 32, 8) if quick else (4, 256, 704, 128, 8)
    vocab, heads, kv_heads = 512, 8, 2
    model = models.Llama(layers, width, heads, kv_heads, hidden, vocab)
    harder = {
        "unrolled": by_hand.llama(heads, kv_heads, scan=False),
        "unrolled, weights (out, in)": by_hand.llama(heads, kv_heads, scan=False, in_out=False),
    }
    batch, rival = models.token_batch(rows, length, vocab), by_hand.llama(heads, kv_heads)
    return Case("Llama", model, models.token_loss, batch, models.LLAMA_SPECS, rival, harder, 0.9)


def resnet(quick: bool) -> Case:
    """A ResNet-18 of half width on pictures of 32 x 32."""
    widths = (8, 16) if quick else (32, 64, 128, 256)
    model, batch = models.ResNet(widths), models.class_batch(16, 3, 32, 32)
    return Case("ResNet", model, models.class_loss, batch, models.RESNET_SPECS, by_hand.resnet(), {}, 1.0)


ALL = (mlp, gpt, resnet, llama)
