"""`torch-shard demo`: train a small GPT on a mesh, and prove that the numbers are torch's.

Letters of the model: B batch, T position, D width, H head, K width of a head, V vocabulary.
"""

import dataclasses
import functools
import itertools
import json
import math
import shutil
import sysconfig
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional as F

import torch_shard as ts
from torch_shard._common.printed import replacing
from torch_shard._common.specs import describe_mesh
from torch_shard._fit import METRICS, read_metrics
from torch_shard._inspect import compare_with_torch
from torch_shard._train import Difference

CHECKPOINTS, SETTINGS, SUMMARY, WEIGHTS = "checkpoints", "demo.json", "summary.json", "model.safetensors"
BATCH_SIZE, CONTEXT = 16, 64

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

# The text: the sources of Python's standard library, which every machine has.

# Tests are not typical code, and the last two are tables and one long string.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
INDENT = "    "
# One token per printable ASCII character, and a tab for one level of indentation: Python sources have few of their own.
VOCABULARY = "\n\t" + "".join(map(chr, range(32, 127)))

_TOKEN_OF_BYTE = np.full(256, VOCABULARY.index("?"), np.uint8)
_TOKEN_OF_BYTE[np.frombuffer(VOCABULARY.encode(), np.uint8)] = np.arange(len(VOCABULARY))


def encode(text: str) -> np.ndarray:
    r"""Turn text into tokens, uint8 (T,); characters beyond ASCII become question marks.

    Example:
        >>> decode(encode("if x:\n    y"))
        'if x:\n    y'
    """
    narrow = text.replace("\t", INDENT).replace(INDENT, "\t").encode("ascii", "replace")
    return _TOKEN_OF_BYTE[np.frombuffer(narrow, np.uint8)]


def decode(tokens: np.ndarray) -> str:
    """Turn tokens, (T,), into text."""
    return "".join(VOCABULARY[token] for token in tokens.tolist()).replace("\t", INDENT)


@dataclass(frozen=True)
class Corpus:
    """Tokens of the standard library, uint8: files to learn from, one after the other, and other files."""

    train: np.ndarray
    validation: np.ndarray
    num_files: int

    @property
    def unigram_entropy(self) -> float:
        """Entropy of single tokens, in nats: the best loss of a model that ignores context."""
        counts = np.bincount(self.validation, minlength=len(VOCABULARY))
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())


def read_corpus() -> Corpus:
    """Read the standard library of the running Python."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if SKIPPED.isdisjoint(f.relative_to(root).parts))
    parts: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for file in files:
        # By a checksum of its name a file is on the same side on every machine, whatever the other files.
        held_out = zlib.crc32(file.relative_to(root).as_posix().encode()) % 10 == 0
        parts[held_out].append(encode(file.read_text("utf-8", errors="replace")))
    if not (parts[True] and parts[False]):
        raise FileNotFoundError(f"The demo reads Python's standard library, but {root} holds no .py files.")
    return Corpus(np.concatenate(parts[False]), np.concatenate(parts[True]), len(files))


def draw_batch(tokens: np.ndarray, *, batch_size: int, context: int, seed: tuple[int, ...]) -> list[torch.Tensor]:
    """Draw windows at random, the same of one seed: inputs and targets, one position on, both int64 (B, T)."""
    starts = np.random.default_rng(seed).integers(len(tokens) - context, size=batch_size)
    windows = torch.from_numpy(np.stack([tokens[i : i + context + 1] for i in starts]).astype(np.int64))
    return [windows[:, :-1].contiguous(), windows[:, 1:].contiguous()]


# The model: plain torch, which knows nothing of torch_shard.


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the stream and added to it.

    The key projection has no bias: it would add the same number to all scores of a query, which softmax
    ignores. Its gradient is zero, and what rounding leaves of it Adam would blow up to full-sized steps.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return the stream, (B, T, D), after this block."""
        x_BTD = x_BTD + self.drop(self.attend(self.ln_1(x_BTD)))
        return x_BTD + self.drop(self.down(F.gelu(self.up(self.ln_2(x_BTD)))))

    def attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Causal attention of (B, T, D) over itself."""
        q_BHTK, k_BHTK, v_BHTK = (
            project(x_BTD).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        dropout = self.dropout if self.training else 0.0
        out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.o(out_BHTK.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Predict the next token from those before it."""

    def __init__(
        self, vocab_size: int, context: int, width: int, *, num_layers: int, num_heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self._init(width, num_layers)

    def _init(self, width: int, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.startswith("blocks") and parameter.ndim == 2:
                # Each block adds to the stream twice; so scaled, the stream's variance does not grow with depth.
                adds = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, std=width**-0.5 / (math.sqrt(2 * num_layers) if adds else 1))
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.15)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits of the next token at every position, (B, T, V)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.drop(self.tokens(tokens_BT) + self.positions(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.ln(x_BTD))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy, in nats per token, of a batch of windows: inputs and targets, both int64 (B, T)."""
    inputs_BT, targets_BT = batch
    return F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())


@torch.no_grad()
def generate(model: nn.Module, prompt: str, num_tokens: int, *, seed: int) -> str:
    """Continue a prompt, token by token; likely ones are preferred."""
    generator = torch.Generator().manual_seed(seed)
    tokens_T = torch.from_numpy(encode(prompt).astype(np.int64))
    for _ in range(num_tokens):
        logits_V = model(tokens_T[None, -CONTEXT:])[0, -1] / 0.7
        drawn = torch.multinomial(logits_V.softmax(dim=0), 1, generator=generator)
        tokens_T = torch.cat([tokens_T, drawn])
    return decode(tokens_T.numpy())


# The run.


@dataclass(frozen=True)
class Settings:
    """What a run depends on.

    Attributes:
        steps: Number of training steps.
        seed: Of initial weights, batches, dropout and samples.
        mesh: Sizes of its axes; None to choose by the devices.
        num_layers: Blocks of the model.
        num_eval_batches: Batches per validation, always the same ones.
    """

    steps: int
    seed: int = 0
    mesh: Mapping[str, int] | None = None
    num_layers: int = 6
    num_eval_batches: int = 16

    def make_model(self, dropout: float = 0.0) -> GPT:
        """The model with the initial weights of the seed."""
        torch.manual_seed(self.seed)
        return GPT(len(VOCABULARY), CONTEXT, 128, num_layers=self.num_layers, num_heads=4, dropout=dropout)

    def choose_mesh(self) -> Mesh:
        """The mesh that was asked for, or one of all devices, with two along `model` where that is possible."""
        num_model = 1 if jax.device_count() % 2 else 2
        sizes = self.mesh or {"batch": jax.device_count() // num_model, "model": num_model}
        return ts.make_mesh(None, topology=None, **sizes)

    def make_optimizer(self) -> optax.GradientTransformation:
        """AdamW with a clipped gradient, warm-up and cosine decay."""
        peak, warmup = 5e-3, min(40, self.steps // 4)
        # Not from 0, with which the first step would do nothing.
        schedule = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, self.steps, peak / 20)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.1))


def begin(settings: Settings, out: Path, *, resume: bool, overwrite: bool = False) -> bool:
    """Make the folder ready for a run, or refuse it, and tell whether it holds checkpoints to go on with."""
    path, checkpoints, asked = out / SETTINGS, out / CHECKPOINTS, dataclasses.asdict(settings)
    goes_on = resume and checkpoints.exists()
    if checkpoints.exists() and not path.exists():
        raise ValueError(f"{checkpoints} is not of a demo. Choose another folder.")
    if checkpoints.exists() and not (resume or overwrite):
        raise ValueError(
            f"{checkpoints} has those of an earlier run. --resume goes on with them, --overwrite deletes them; or "
            "choose another folder."
        )
    if goes_on:
        try:
            began = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read ({error}). Begin anew with --overwrite.") from error
        if others := [
            f"{name} {began.get(name)}, not {value}" for name, value in asked.items() if began.get(name) != value
        ]:
            raise ValueError(f"the run in {out} has {', '.join(others)}. Resume it with the same options.")
    else:
        shutil.rmtree(checkpoints, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(asked), encoding="utf-8")
    return goes_on


class Run:
    """One training run: its text, model, mesh and compiled step."""

    def __init__(self, settings: Settings, out: Path) -> None:
        self.settings, self.out, self.corpus, self.mesh = settings, out, read_corpus(), settings.choose_mesh()
        num_parts = self.mesh.shape["batch"]
        self.batch_size = -(-BATCH_SIZE // num_parts) * num_parts
        self.model = settings.make_model(dropout=0.05)
        self.step = ts.make_train_step(self.model, loss_fn, settings.make_optimizer(), mesh=self.mesh, plan=PLAN)
        self.state = self.step.init(seed=settings.seed)
        sizes = {"batch_size": self.batch_size, "context": CONTEXT}
        # Validation batches are the same ones in every run, whatever its seed.
        evaluated = range(settings.num_eval_batches)
        self.validation = [draw_batch(self.corpus.validation, seed=(0, number), **sizes) for number in evaluated]

    def batch(self, step: int) -> list[torch.Tensor]:
        """Draw the training batch of a step, counted from 0."""
        seed = (self.settings.seed, step)
        return draw_batch(self.corpus.train, seed=seed, batch_size=self.batch_size, context=CONTEXT)

    def train(self, console: Console) -> Table:
        """Train to the end, from the newest checkpoint if there is one, and say how it went."""
        evaluate = self.step.evaluation()
        before = np.mean([float(evaluate(self.state, batch)["loss"]) for batch in self.validation])
        with ts.Checkpointer(self.out / CHECKPOINTS, keep=2, every=50) as checkpointer:
            self.state = ts.fit(
                self.step,
                self.state,
                lambda position: map(self.batch, itertools.count(position)),
                steps=self.settings.steps,
                eval_loader=self.validation,
                eval_every=100,
                eval_step=evaluate,
                checkpointer=checkpointer,
                log=self.out,
                prove_steps=1,
                progress=console,
            )
        records = read_metrics(self.out / METRICS)
        last = [record["loss"] for record in records if record["kind"] == "train"][-20:]
        speeds = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
        after = [record["loss"] for record in records if record["kind"] == "eval"][-1]
        table = Table(show_header=False, box=None)
        table.add_row("validation loss", f"{before:.3f} before, {after:.3f} after, in nats per token")
        table.add_row("unigram entropy", f"{self.corpus.unigram_entropy:.3f}, the best without context")
        table.add_row("training loss", f"{np.mean(last):.3f}, mean of the last {len(last)} steps")
        table.add_row("speed", f"{np.median(speeds) if speeds else 0:,.0f} tokens/s, median")
        return table


# The proof.

ADAMW: dict[str, Any] = {"weight_decay": 0.1, "eps": 1e-5}
"""Adam divides a gradient by its own size. With the usual eps of 1e-8, entries whose gradient is hardly more than
rounding take full steps in directions that rounding decides; this is well above rounding, on both sides."""

# float32 rounds to 6e-8, and the two sides sum in different orders. Over seeds and meshes the loss was at most 2.4e-7
# apart and a parameter 5.3e-5 (what is left of Adam's division); the mistakes that were tried (no weight decay,
# second beta 0.999, learning rate off by 1 %) give at least 4.8e-5 and 1.5e-3.
TOLERANCES = {"loss": 1e-5, "parameter": 5e-4}


def prove(run: Run, num_steps: int = 10) -> dict[str, Difference]:
    """Train on a batch without dropout, on the mesh and by eager torch: the largest difference of each kind."""
    optimizer = optax.adamw(1e-3, b1=0.9, b2=0.99, **ADAMW)
    in_torch = functools.partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.99), **ADAMW)
    how: Any = {"mesh": run.mesh, "plan": PLAN, "optimizer": optimizer, "torch_optimizer": in_torch}
    found = compare_with_torch(run.settings.make_model(), loss_fn, run.batch(0), steps=num_steps, **how)
    return {kind: next(row for row in found.rows if row.kind == kind) for kind in TOLERANCES}


# What its user sees.


def run_demo(run: Run, console: Console) -> bool:
    """Train, show what happens, write the files, and tell whether the proof holds."""
    start = time.perf_counter()
    _show_start(run, console)
    table = run.train(console)
    model = run.step.export(run.state).eval()
    with replacing(run.out / WEIGHTS) as partial:
        save_model(model, str(partial))
    sample = generate(model, "def ", 300, seed=run.settings.seed)
    console.print(Panel(Syntax(sample, "python", word_wrap=True), title="What the trained model writes after 'def '"))
    with console.status("proving"):
        proof = prove(run)
    holds = all(row.worst <= TOLERANCES[kind] for kind, row in proof.items())  # NaN is not
    summary = {
        "settings": {**dataclasses.asdict(run.settings), "mesh": dict(run.mesh.shape), "batch_size": run.batch_size},
        "unigram_entropy": run.corpus.unigram_entropy,
        "proof": {kind: dataclasses.asdict(row) for kind, row in proof.items()} | {"holds": holds},
    }
    with replacing(run.out / SUMMARY) as partial:
        partial.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    table.add_row("time", f"{time.perf_counter() - start:.0f} s")
    table.add_row("written", ", ".join(str(run.out / name) for name in (METRICS, SUMMARY, WEIGHTS, CHECKPOINTS)))
    console.print(table, highlight=False)
    colour, verdict = ("green", "The proof holds") if holds else ("red", "The proof fails")
    console.print(
        f"[bold {colour}]{verdict}[/]: ten steps of AdamW without dropout, on the mesh and in eager torch on the CPU.\n"
        "Largest relative difference, max |a - b| / max |b| over a tensor:",
        *(f"\n  {kind:10} {row.worst:.1e} (at most {TOLERANCES[kind]:.0e}), {row.name}" for kind, row in proof.items()),
        highlight=False,
    )
    return holds


def _show_start(run: Run, console: Console) -> None:
    corpus, device = run.corpus, jax.devices()[0]
    num_params = sum(p.numel() for p in run.model.parameters())
    console.print(
        f"[bold]Text[/]   {corpus.num_files} files of Python's standard library: {len(corpus.train):,} tokens to learn "
        f"from, {len(corpus.validation):,} in other files to validate\n"
        f"[bold]Model[/]  GPT in plain torch: {run.settings.num_layers} layers, {num_params:,} parameters\n"
        f"[bold]Mesh[/]   {describe_mesh(run.mesh)} on {run.mesh.size} of {jax.device_count()} "
        f"{device.platform.upper()} devices; {run.batch_size} windows of {CONTEXT} tokens per step\n",
        highlight=False,
    )
    named = run.model.named_parameters(remove_duplicate=False)
    shown = {name: p for name, p in named if not name.startswith("blocks.") or name.startswith("blocks.0.")}
    table = PLAN.resolve(shown, run.mesh).__rich__()
    table.caption = f"of {run.settings.num_layers} blocks, which are split alike, the first"
    console.print(table)
    for layer in ("up", "down"):
        console.print(f"blocks.0.{layer}.weight")
        jax.debug.visualize_array_sharding(run.state.params[f"blocks.0.{layer}.weight"])
