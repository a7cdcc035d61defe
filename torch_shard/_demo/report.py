"""The demo as its user sees it: train, show, write, prove."""

import dataclasses
import time

import jax
import torch
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from torch_shard._demo import proof as proving
from torch_shard._demo.files import save_json, save_weights
from torch_shard._demo.model import GPT
from torch_shard._demo.proof import Proof, prove
from torch_shard._demo.run import CHECKPOINTS, PLAN, History, Run, write_text
from torch_shard._fit import METRICS, write_report
from torch_shard._inspect import visualize_sharding
from torch_shard._sharding import describe_mesh

SUMMARY = "summary.json"
WRITTEN = ("report.html", METRICS, SUMMARY, "model.safetensors", CHECKPOINTS)


def run_demo(run: Run, console: Console) -> bool:
    """Train, show what happens, write the files, and prove the numbers.

    Args:
        run: Ready to train; its folder exists.
        console: To print on.

    Returns:
        Whether the proof holds.
    """
    start = time.perf_counter()
    _show_start(run, console)
    history = run.train(console)
    model, out = run.export(), run.settings.out
    save_weights(model, run.settings.model_arguments, out / "model.safetensors")
    sample = write_text(model, "def ", 300, seed=run.settings.seed)
    console.print(Panel(Syntax(sample, "python", word_wrap=True), title="What the trained model writes after 'def '"))
    with console.status("proving"):
        proof = _prove(run)
    save_json(_summary(run, proof, sample), out / SUMMARY)
    write_report(out)
    _show_end(run, history, proof, seconds=time.perf_counter() - start, console=console)
    return proof.holds


def _show_start(run: Run, console: Console) -> None:
    corpus, device = run.corpus, jax.devices()[0]
    num_params = sum(p.numel() for p in run.model.parameters())
    console.print(
        f"[bold]Text[/]   {corpus.num_files} files of Python's standard library: {len(corpus.train):,} tokens to learn "
        f"from, {len(corpus.validation):,} in other files to validate\n"
        f"[bold]Model[/]  GPT in plain torch: {run.settings.num_layers} layers, {num_params:,} parameters\n"
        f"[bold]Mesh[/]   {describe_mesh(run.mesh)} on {run.mesh.size} of {jax.device_count()} "
        f"{device.platform.upper()} devices; {run.batch_size} windows of {run.settings.context} tokens per step\n",
        highlight=False,
    )
    console.print(_plan_table(run))
    params = run.state.params
    drawn = [visualize_sharding(params[name], name=name) for name in ("blocks.0.up.weight", "blocks.0.down.weight")]
    console.print(Columns(drawn, padding=(1, 4)))


def _plan_table(run: Run) -> Table:
    """The plan's table without the blocks that are split as the first one is."""
    entries = dict(run.model.named_parameters(remove_duplicate=False))
    shown = {n: p for n, p in entries.items() if not n.startswith("blocks.") or n.startswith("blocks.0.")}
    table, whole = PLAN.resolve(shown, run.mesh).__rich__(), run.plan
    table.caption = (
        f"all {run.settings.num_layers} blocks are split alike; in all {_megabytes(whole.num_bytes)}, "
        f"per device {_megabytes(whole.num_bytes_per_device)}, replicated {whole.fraction_replicated:.1%}"
    )
    return table


def _megabytes(num_bytes: int | None) -> str:
    return f"{(num_bytes or 0) / 1e6:.2f} MB"


def _prove(run: Run) -> Proof:
    torch.manual_seed(run.settings.seed)
    model = GPT(**run.settings.model_arguments)
    return prove(model, [run.batch(step) for step in range(proving.NUM_STEPS)], mesh=run.mesh, plan=PLAN)


def _summary(run: Run, proof: Proof, sample: str) -> dict[str, object]:
    settings = dataclasses.asdict(run.settings) | {"out": str(run.settings.out), "axis_sizes": dict(run.mesh.shape)}
    head = {**settings, "batch_size": run.batch_size, "unigram_entropy": run.corpus.unigram_entropy}
    return {"settings": head, "sample": sample, "proof": {**dataclasses.asdict(proof), "holds": proof.holds}}


def _show_end(run: Run, history: History, proof: Proof, *, seconds: float, console: Console) -> None:
    first, last = history.validation[0]["loss"], history.validation[-1]["loss"]
    table = Table(show_header=False, box=None)
    table.add_row("validation loss", f"{first:.3f} before, {last:.3f} after, in nats per token")
    table.add_row("unigram entropy", f"{run.corpus.unigram_entropy:.3f}, the best without context")
    table.add_row("training loss", f"{history.train_loss:.3f}, mean of the last {min(20, len(history.train))} steps")
    table.add_row("speed", f"{history.tokens_per_s:,.0f} tokens/s, median")
    table.add_row("time", f"{seconds:.0f} s")
    table.add_row("written", ", ".join(str(run.settings.out / name) for name in WRITTEN))
    console.print(table, highlight=False)
    colour, verdict = ("green", "The proof holds") if proof.holds else ("red", "The proof fails")
    console.print(
        f"[bold {colour}]{verdict}[/]: {len(proof.losses)} steps of AdamW without dropout, on the mesh and in eager "
        "torch on the CPU.\nLargest relative difference, max |a - b| / max |b| over a tensor:\n"
        f"  loss       {proof.loss_difference:.1e}  (at most {proving.LOSS_TOLERANCE:.0e})\n"
        f"  parameter  {proof.param_difference:.1e}  (at most {proving.PARAM_TOLERANCE:.0e}), {proof.worst_param}",
        highlight=False,
    )
