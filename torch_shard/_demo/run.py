"""The training run: a mesh, a plan, the compiled steps, and what was measured on the way."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console

import torch_shard as ts
from torch_shard._common.files import replacing
from torch_shard._demo.model import GPT, generate, loss_fn
from torch_shard._demo.text import VOCABULARY, Corpus, decode, draw_batch, encode
from torch_shard._fit import METRICS, read_metrics

NUM_SIMULATED = 8
CHECKPOINTS, SETTINGS = "checkpoints", "demo.json"
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
    """All that a run depends on.

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
        save_every: Steps from one checkpoint to the next.
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
    save_every: int = 50
    num_eval_batches: int = 16

    @property
    def model_arguments(self) -> dict[str, int]:
        """Arguments of `GPT`, but for dropout."""
        sizes = {"width": 128, "num_layers": self.num_layers, "num_heads": 4}
        return {"vocab_size": len(VOCABULARY), "context": self.context, **sizes}


def prepare(settings: Settings, *, resume: bool, overwrite: bool = False) -> bool:
    """Make the folder ready for a run: as it was left, or as new.

    Args:
        settings: Of the run; written down beside its checkpoints.
        resume: Whether to go on with what the folder holds.
        overwrite: Whether to delete the checkpoints of an earlier run.

    Returns:
        Whether there is anything to go on with.

    Raises:
        ValueError: What it holds is of a run with other settings, or of no demo.
    """
    path, checkpoints = settings.out / SETTINGS, settings.out / CHECKPOINTS
    asked = {**dataclasses.asdict(settings), "out": None}
    if checkpoints.exists() and not path.exists():
        raise ValueError(f"{checkpoints} is not of a demo. Choose another folder.")
    if not resume and not overwrite and checkpoints.exists():
        raise ValueError(
            f"{checkpoints} has those of an earlier run. --resume goes on with them, --overwrite deletes them; or "
            "choose another folder."
        )
    if not resume:
        shutil.rmtree(checkpoints, ignore_errors=True)
    elif checkpoints.exists():
        try:
            began = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read ({error}). Begin anew without --resume.") from error
        if differing := [
            f"{name} {began.get(name)}, not {asked[name]}" for name in asked if asked[name] != began.get(name)
        ]:
            raise ValueError(f"the run in {settings.out} has {', '.join(differing)}. Resume it with the same options.")
        return True
    with replacing(path) as partial:
        partial.write_text(json.dumps(asked), encoding="utf-8")
    return False


def choose_mesh(axis_sizes: Mapping[str, int] | None) -> Mesh:
    """Make the mesh that was asked for, or one of all devices, with two along `model` where that is possible."""
    if axis_sizes is None:
        num_devices = jax.device_count()
        num_model = 1 if num_devices % 2 else 2
        axis_sizes = {"batch": num_devices // num_model, "model": num_model}
    return ts.make_mesh(None, topology=None, **axis_sizes)


@dataclass(frozen=True)
class History:
    """Measurements of a run.

    Attributes:
        train: One record per step, as `fit` writes them: batch, loss, grad_norm, tokens_per_s.
        validation: One record per validation: batch, loss; the first is of the model before training.
    """

    train: list[dict[str, float]]
    validation: list[dict[str, float]]

    @property
    def tokens_per_s(self) -> float:
        """Median over the steps; 0 if it was never measured."""
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
        self.settings, self.corpus = settings, corpus
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

    def train(self, console: Console) -> History:
        """Train to the end, from the newest checkpoint if there is one, with a bar that shows loss and speed."""
        out = self.settings.out
        before = float(np.mean([float(self.evaluate(self.state, b)["loss"]) for b in self.validation_batches()]))

        def batches(position: int) -> Iterator[list[torch.Tensor]]:
            return map(self.batch, itertools.count(position))

        with ts.Checkpointer(out / CHECKPOINTS, keep=2, every=self.settings.save_every) as checkpointer:
            self.state = ts.fit(
                self.step,
                self.state,
                batches,
                steps=self.settings.steps,
                eval_loader=self.validation_batches(),
                eval_every=self.settings.eval_every,
                eval_step=self.evaluate,
                checkpointer=checkpointer,
                log=out,
                prove_steps=1,
                progress=console,
            )
        records = read_metrics(out / METRICS)
        return History(
            train=[record for record in records if record["kind"] == "train"],
            validation=[{"batch": 0, "loss": before}, *(r for r in records if r["kind"] == "eval")],
        )

    def export(self) -> GPT:
        """The trained model, in plain torch on the CPU."""
        return self.step.export(self.state).eval()  # pyright: ignore


def draw_validation(corpus: Corpus, settings: Settings, batch_size: int) -> list[list[torch.Tensor]]:
    """Draw the batches of every validation."""
    sizes: dict[str, int] = {"batch_size": batch_size, "context": settings.context}
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
