"""The command line: `torch-shard demo`, `preview`, `prove`, `tune`, `inspect`, `tutorials`."""

import contextlib
import logging
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Train unmodified torch modules on JAX meshes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
NUM_SIMULATED = 8
PREVIEWED = {"batch": 2, "model": 2}
"""Sizes of the mesh of a preview where nobody says others."""

TUTORIALS = (Path(__file__).parent / "_tutorials", Path(__file__).parents[1] / "tutorials")
"""Within a wheel; beside the package in a checkout."""

REPORTED = ("torch", "jax", "jaxlib", "torchax", "optax", "numpy")
"""Packages whose versions a report of a bug needs, besides JAX's plugins for accelerators."""


def main() -> None:
    """Run the command line."""
    app(prog_name="torch-shard")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions of all that a bug may depend on, and exit.")
    ] = False,
    devices: Annotated[
        bool,
        typer.Option("--devices", help="Show these and the devices that JAX finds (takes seconds), and exit."),
    ] = False,
) -> None:
    """Train unmodified torch modules on JAX meshes."""
    if version or devices:
        _show_versions()
        if devices:
            typer.echo(f"devices: {_find_devices()}")
        raise typer.Exit


def _show_versions() -> None:
    """Say which versions are installed, as their metadata have it: none of them is imported."""
    import importlib.metadata
    import platform

    typer.echo(f"torch-shard {importlib.metadata.version('torch_shard')}")
    typer.echo(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    plugins = sorted({entry.dist.name for entry in importlib.metadata.entry_points(group="jax_plugins") if entry.dist})
    for name in (*REPORTED, *plugins):
        try:
            typer.echo(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            typer.echo(f"{name} is not installed")


def _find_devices() -> str:
    from collections import Counter

    import jax

    try:
        found = Counter((device.platform, device.device_kind) for device in jax.devices())
    except RuntimeError as error:  # JAX was told to use a platform that is not there
        return str(error)
    kinds = (f"{number} x {kind}" + f" ({platform})" * (kind != platform) for (platform, kind), number in found.items())
    return ", ".join(kinds)


@contextlib.contextmanager
def _as_usage(hint: str | None = None) -> Iterator[None]:
    """Show what is raised within as an error of what was given."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=hint) from error


def _check_target(target: str) -> None:
    """Answer for a Python file that is not there before torch and JAX are imported, which takes seconds."""
    if target.endswith(".py"):
        _check_path(Path(target), "TARGET")


def _check_path(path: Path, hint: str) -> None:
    """The same for any file or directory."""
    if not path.exists():
        raise typer.BadParameter(f"there is no file {path}.", param_hint=hint)


def _begin(num_devices: int | None = None) -> None:
    """Make the jax device known, and let the CPU simulate so many devices."""
    from torch_shard._common.simulated import simulate_devices
    from torch_shard._interop import register

    if num_devices is not None:
        simulate_devices(num_devices)
    register()


@app.command()
def demo(
    *,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Sizes of the mesh axes, as in batch=4,model=2. By default all devices. "
            "To simulate more than 8 on the CPU, set JAX_NUM_CPU_DEVICES."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps: 700, or 60 with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model for less time, with the same proof.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for metrics, weights and checkpoints.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of weights, batches, dropout and samples.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the run in that folder was cut off, to the bit.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the checkpoints of an earlier run in that folder.")
    ] = False,
) -> None:
    """Train a small GPT on the sources of Python's standard library, and prove that the numbers are torch's.

    On eight simulated CPU devices, or on the accelerators that JAX sees. Exits with 1 if the proof fails. Ctrl-C and
    SIGTERM save it before they end it; then, or after a crash, --resume goes on.
    """
    axis_sizes = None if mesh is None else _read_sizes(mesh, ("batch", "model"))
    # Not at the top: JAX and torch are for those who ask for a demo.
    from torch_shard._common.simulated import simulate_devices
    from torch_shard._demo import Run, Settings, begin, run_demo

    sizes = {"num_layers": 2, "num_eval_batches": 4} if quick else {}
    settings = Settings(steps or (60 if quick else 700), seed, axis_sizes, **sizes)
    simulate_devices(NUM_SIMULATED)
    console = _console(132)
    try:
        if not begin(settings, out, resume=resume, overwrite=overwrite) and resume:
            console.print(f"Nothing to resume in {out}: a new run begins.")
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {out}: {error.strerror}.", param_hint="--out") from error
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--resume" if resume else "--out") from error
    with _as_usage("--mesh"):
        run = Run(settings, out)
    try:
        holds = run_demo(run, console)
    except (KeyboardInterrupt, SystemExit) as leaving:  # the latter for SIGTERM
        console.print("Stopped, and saved. The same command with --resume goes on.")
        raise typer.Exit(getattr(leaving, "code", 130)) from None
    if not holds:
        raise typer.Exit(1)


def _read_sizes(mesh: str, axes: Collection[str] = ()) -> dict[str, int]:
    """Sizes by name, of what `--mesh` is given: of any axes, or of these."""
    pairs = [re.fullmatch(r"\s*(\w+)\s*=\s*([1-9]\d*)\s*", part) for part in mesh.split(",")]
    sizes = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if len(sizes) < len(pairs) or (axes and set(sizes) != set(axes)):
        wanted = f"a positive size for each of the axes {' and '.join(axes)}" if axes else "sizes of axes"
        raise typer.BadParameter(f"expected {wanted}, as in batch=4,model=2; got {mesh!r}.", param_hint="--mesh")
    return sizes


def _console(width: int) -> Any:
    """Rich's console, to a pipe in lines of this width: tables that are folded to rich's 80 are hard to read."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


@app.command()
def preview(
    target: Annotated[
        str,
        typer.Argument(
            help="A Python file with model, loss_fn, batch, plan and optimizer; module:function, which takes a mesh "
            "and returns a step and a batch; or llama-3-8b, llama-3-70b, llama-3-405b."
        ),
    ],
    topology: Annotated[
        str | None, typer.Option(help="Accelerators that this machine need not have, as in v5e:16x16 or h100:8.")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Sizes of the mesh axes. By default those of the file's own mesh, or batch=2,model=2."),
    ] = None,
    remat: Annotated[
        str | None, typer.Option(help="What the backward pass computes again: none, dots, block, or bytes per device.")
    ] = None,
) -> None:
    """Compile a training step and show what it would take: memory, collectives, arithmetic, by module.

    Nothing is placed on a device, and nothing runs: without --topology the CPU simulates the devices of the mesh. Exits
    with 1 if the program does not fit.
    """
    sizes = None if mesh is None else _read_sizes(mesh)
    if remat not in (None, "none", "dots", "block") and not (remat.isdecimal() and int(remat)):
        raise typer.BadParameter(f"none, dots, block or bytes per device, got {remat!r}.", param_hint="--remat")
    _check_target(target)

    from jax.sharding import Mesh

    from torch_shard._inspect import find_step
    from torch_shard._sharding import make_mesh, within_topology

    def choose_mesh(of_file: Mesh | None) -> Mesh:
        if sizes is None and of_file is not None:
            return of_file
        with _as_usage("--topology" if topology else "--mesh"):
            return make_mesh(None, topology=topology, **(sizes or PREVIEWED))

    wanted: Any = int(remat) if remat and remat.isdecimal() else remat
    # A file's own mesh may be larger than that of --mesh; where none is asked for, the file's is taken.
    _begin(None if topology else max(NUM_SIMULATED, math.prod((sizes or PREVIEWED).values())))
    try:
        with within_topology(topology):
            step, batch = find_step(target, choose_mesh, wanted)
        found = step.preview(batch)
    except (ValueError, TypeError, RuntimeError) as error:
        where = "" if topology else " (On devices that the CPU simulates; --topology v5e:2x2 compiles for TPUs.)"
        raise typer.BadParameter(f"{error}{where}", param_hint="TARGET") from error
    _console(132).print(found)
    if found.limit is not None and not found.fits():
        raise typer.Exit(1)


@app.command()
def prove(
    target: Annotated[
        str,
        typer.Argument(
            help="A Python file with model, loss_fn and batch; or one of llama-tiny, gemma3-tiny, mixtral-tiny and "
            "qwen3-moe-tiny."
        ),
    ],
    plans: Annotated[
        str | None, typer.Option(help="Of the usual layouts, as in dp,fsdp,fsdp_tp. By default all of them.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Sizes of the mesh axes for all. By default each layout has a mesh of its own.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps of AdamW to take.")] = 3,
) -> None:
    """Train a model under each of the usual plans, and compare all numbers with eager torch.

    On eight simulated CPU devices, or on the accelerators that JAX sees. Exits with 1 if a number differs.
    """
    sizes = None if mesh is None else _read_sizes(mesh)
    _check_target(target)

    from torch_shard._inspect import find_proved
    from torch_shard._inspect import prove as proved
    from torch_shard._sharding import make_mesh

    _begin(NUM_SIMULATED)
    with _as_usage():
        meshes = None if sizes is None else make_mesh(None, topology=None, **sizes)
        names = None if plans is None else [name.strip() for name in plans.split(",")]
        found = proved(*find_proved(target), meshes=meshes, plans=names, steps=steps)
    _console(140).print(found)
    if not found.holds:
        raise typer.Exit(1)


@app.command()
def tune(
    *,
    file: Annotated[
        Path,
        typer.Argument(
            help="A Python file with model, loss_fn, batch and optimizer; with options, if there is one, a dict of "
            "keyword arguments of make_train_step."
        ),
    ],
    topology: Annotated[
        str | None, typer.Option(help="Accelerators that this machine need not have, as in v5e:16x16 or h100:8.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="For the search.")] = 10,
    cache: Annotated[Path | None, typer.Option(help="A directory that notes what was compiled.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the best choice as JSON, for ts.load_tuned.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run the best three and the default here.")] = False,
) -> None:
    """Find the mesh, the plan and the options with which a step takes the least time and fits.

    Ctrl-C shows the best so far.
    """
    _check_path(file, "FILE")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("torch_shard._tune").setLevel(logging.INFO)
    from torch_shard._inspect import read_file
    from torch_shard._tune import tune as find

    _begin()
    with _as_usage():
        given = read_file(file, ("model", "loss_fn", "optimizer", "batch"))
        parts = [given[name] for name in ("model", "loss_fn", "optimizer", "batch")]
        how: Any = {"topology": topology, "minutes": minutes, "cache": cache, "measure": measure}
        found = find(*parts, **how, **given.get("options", {}))
    _console(170).print(found)
    if save is not None:
        with _as_usage():
            found.save(save)
        typer.echo(f"written: {save}")


@app.command()
def replay(
    target: Annotated[
        str,
        typer.Argument(
            help="A Python file with model, loss_fn, batch, plan and optimizer; or module:function, which takes a mesh "
            "and returns a step and a batch: of the run's structure."
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="The checkpoints of a run with fit(on_bad_step='explain').")],
    mesh: Annotated[str, typer.Option(help="Sizes of the mesh axes.")] = "batch=1",
) -> None:
    """Repeat the step that ended a run, and name where it stopped being finite: module, operator, line.

    Exits with 1 if the step is finite here.
    """
    sizes = _read_sizes(mesh)
    _check_target(target)
    _check_path(directory, "DIRECTORY")

    from torch_shard._inspect import find_nan, find_step, read_bad_batch
    from torch_shard._io import Checkpointer
    from torch_shard._sharding import make_mesh
    from torch_shard._train import TrainStep

    _begin()
    with _as_usage():
        step, like = find_step(target, lambda of_file: make_mesh(None, topology=None, **sizes))
        if not isinstance(step, TrainStep):
            raise ValueError("its step does not train.")
        batch = read_bad_batch(directory, like)
        found = find_nan(step, Checkpointer(directory).restore(step), batch)
    typer.echo(found)
    if not found:
        raise typer.Exit(1)


@app.command()
def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a directory of them, of which the newest is shown.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it, and say whether it is whole.")] = False,
) -> None:
    """Show what a checkpoint holds: names, shapes, how they were split, bytes.

    Exits with 1 if --verify finds damage.
    """
    _check_path(checkpoint, "CHECKPOINT")
    from torch_shard._io import find_checkpoint, find_damage, inventory

    _begin()
    with _as_usage("CHECKPOINT"):
        path = find_checkpoint(checkpoint)
        shown = inventory(path)
    _console(200).print(shown)
    if verify:
        damage = find_damage(path)
        typer.echo("damaged: " + "; ".join(damage) if damage else "whole: every file has its checksum")
        raise typer.Exit(1 if damage else 0)


@app.command()
def tutorials() -> None:
    """List the tutorials: what each is about, and its file, a script for `python` and, by jupytext, a notebook."""
    folder = next((folder for folder in TUTORIALS if folder.is_dir()), None)
    for path in sorted(folder.glob("*.py")) if folder else ():
        lines = path.read_text(encoding="utf-8").splitlines()
        headline = next((line.removeprefix("# # ") for line in lines if line.startswith("# # ")), "")
        typer.echo(f"{headline}: python {path}")


if __name__ == "__main__":
    main()
