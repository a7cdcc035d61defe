"""The training run: a mesh, a plan, the compiled steps, and what was measured on the way."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.progress import Progress

import torch_shard as ts
from torch_shard._demo.model import GPT, generate, loss_fn
from torch_shard._demo.text import VOCABULARY, Corpus, decode, draw_batch, encode

NUM_SIMULATED = 8
PLAN = ts.ShardingPlan(
    {
        # Column-parallel: each device computes some heads, and some hidden units of the MLP, with their biases.
        **{f"blocks.*.{layer}.weight": P("model") for layer in ("q", "k", "v", "up")},
        **{f"blocks.*.{layer}.bias": P("model") for layer in ("q", "v", "up")},
        # Row-parallel: each device multiplies what it computed, and the products are summed over `model`.
        **{f"blocks.*.{layer}.weight": P(None, "model") for layer in ("o", "down")},
    },
    default=P(),
)


@dataclass(frozen=True)
class Settings:
    """What a run depends on.

    Attributes:
        steps: Number of training steps.
        out: Folder for what the run writes.
        seed: Of initial weights, batches, dropout and samples.
        axis_sizes: Of the mesh; None to choose by the devices.
        batch_size: Windows per step, rounded up to a multiple of the mesh axis `batch`.
        context: Tokens per window.
        num_layers: Blocks of the model.
        dropout: Probability.
        peak_lr: Highest learning rate.
        eval_every: Steps from one validation to the next.
        num_eval_batches: Batches per validation, always the same ones.
    """

    steps: int
    out: Path
    seed: int = 0
    axis_sizes: Mapping[str, int] | None = None
    batch_size: int = 16
    context: int = 64
    num_layers: int = 6
    dropout: float = 0.05
    peak_lr: float = 5e-3
    eval_every: int = 100
    num_eval_batches: int = 16

    @property
    def model_arguments(self) -> dict[str, int]:
        """What `GPT` is made with, but for dropout."""
        sizes = {"width": 128, "num_layers": self.num_layers, "num_heads": 4}
        return {"vocab_size": len(VOCABULARY), "context": self.context, **sizes}


def simulate_devices() -> None:
    """Let JAX's CPU backend show eight devices, unless the user chose a number.

    The number is read when that backend starts; where JAX sees accelerators it computes on those, whatever the number.
    """
    by_flag = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if jax.config.values["jax_num_cpu_devices"] == -1 and not by_flag:
        jax.config.update("jax_num_cpu_devices", NUM_SIMULATED)


def choose_mesh(axis_sizes: Mapping[str, int] | None) -> Mesh:
    """Make the mesh that was asked for, or one of all devices, with two along `model` where that is possible."""
    if axis_sizes is None:
        num_devices = jax.device_count()
        num_model = 1 if num_devices % 2 else 2
        axis_sizes = {"batch": num_devices // num_model, "model": num_model}
    return ts.make_mesh(None, **axis_sizes)


@dataclass
class History:
    """What was measured, step by step.

    Attributes:
        train: One record per step: step, loss, grad_norm, tokens_per_s (not of step 1, which compiles).
        validation: One record per validation: step, validation_loss.
        compile_s: Seconds until the first step and the first validation had run.
    """

    train: list[dict[str, float]] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    compile_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Median over the steps after the first; 0 if there is none."""
        speeds = [record["tokens_per_s"] for record in self.train if "tokens_per_s" in record]
        return float(np.median(speeds)) if speeds else 0.0

    @property
    def train_loss(self) -> float:
        """Mean of the last 20 steps."""
        return float(np.mean([record["loss"] for record in self.train[-20:]]))


class Run:
    """One training run: its model, mesh, plan and compiled steps.

    Args:
        settings: Of the run.
        corpus: Text to learn.

    Raises:
        ValueError: The mesh does not fit the devices, or the plan the mesh.
    """

    def __init__(self, settings: Settings, corpus: Corpus) -> None:
        self.settings, self.corpus, self.history = settings, corpus, History()
        self.mesh = choose_mesh(settings.axis_sizes)
        num_parts = self.mesh.shape["batch"]
        self.batch_size = -(-settings.batch_size // num_parts) * num_parts
        torch.manual_seed(settings.seed)
        self.model = GPT(**settings.model_arguments, dropout=settings.dropout)
        self.plan = PLAN.resolve(self.model, self.mesh)
        self.step = ts.make_train_step(self.model, loss_fn, make_optimizer(settings), mesh=self.mesh, plan=PLAN)
        self.evaluate = ts.make_eval_step(self.model, loss_fn, mesh=self.mesh, plan=PLAN)
        self.state = self.step.init(seed=settings.seed)

    def batch(self, step: int) -> list[torch.Tensor]:
        """Draw the training batch of a step, counted from 0."""
        seed = (self.settings.seed, step)
        return draw_batch(self.corpus.train, batch_size=self.batch_size, context=self.settings.context, seed=seed)

    def validation_batches(self) -> list[list[torch.Tensor]]:
        """Draw the validation batches: the same ones in every run, whatever its seed."""
        return draw_validation(self.corpus, self.settings, self.batch_size)

    def train(self, progress: Progress) -> None:
        """Train to the end, with a bar that shows loss and tokens per second."""
        task = progress.add_task("compiling", total=self.settings.steps, numbers="")
        start = time.perf_counter()
        self._validate(0)
        for step in range(1, self.settings.steps + 1):
            record = self._train_one(step)
            if step == 1:
                self.history.compile_s = time.perf_counter() - start
            if step % self.settings.eval_every == 0 or step == self.settings.steps:
                self._validate(step)
            seen = self.history.validation[-1]["validation_loss"]
            numbers = f"loss {record['loss']:.3f}  validation {seen:.3f}  {record.get('tokens_per_s', 0):,.0f} tokens/s"
            progress.update(task, advance=1, description="training", numbers=numbers)

    def _train_one(self, step: int) -> dict[str, float]:
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch(step - 1))
        record = {"step": step, "loss": float(metrics["loss"]), "grad_norm": float(metrics["grad_norm"])}
        if step > 1:
            record["tokens_per_s"] = self.batch_size * self.settings.context / (time.perf_counter() - start)
        self.history.train.append(record)
        return record

    def _validate(self, step: int) -> None:
        losses = [float(self.evaluate(self.state, batch)["loss"]) for batch in self.validation_batches()]
        self.history.validation.append({"step": step, "validation_loss": float(np.mean(losses))})

    def export(self) -> GPT:
        """The trained model, in plain torch on the CPU."""
        return self.step.export(self.state).eval()  # pyright: ignore


def draw_validation(corpus: Corpus, settings: Settings, batch_size: int) -> list[list[torch.Tensor]]:
    """Draw the batches of every validation."""
    sizes: dict[str, Any] = {"batch_size": batch_size, "context": settings.context}
    return [draw_batch(corpus.validation, seed=(0, i), **sizes) for i in range(settings.num_eval_batches)]


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW with a clipped gradient, warm-up and cosine decay."""
    warmup = min(40, settings.steps // 4)
    schedule = optax.warmup_cosine_decay_schedule(
        # Not from 0, with which the first step would do nothing.
        settings.peak_lr / (warmup + 1), settings.peak_lr, warmup, settings.steps, settings.peak_lr / 20
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.1))


def write_text(model: GPT, prompt: str, num_tokens: int, *, seed: int) -> str:
    """Let a trained model continue a prompt."""
    num_threads = torch.get_num_threads()
    # Every operation is on one row: threads would only wait for each other.
    torch.set_num_threads(1)
    try:
        return decode(generate(model, encode(prompt), num_tokens, temperature=0.7, seed=seed))
    finally:
        torch.set_num_threads(num_threads)
