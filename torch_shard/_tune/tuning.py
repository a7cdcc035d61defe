"""What tuning has found: a table, the best choice as options, and files of it."""

# PyTorch and JAX annotate some of their functions in part; what JSON holds is anything.
# pyright: reportUnknownMemberType=false

import collections
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jax.sharding import PartitionSpec
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from torch_shard._common.caller import caller, public
from torch_shard._common.files import replacing
from torch_shard._common.printed import InNotebooks, printed
from torch_shard._common.types import Device
from torch_shard._common.validate import check_file
from torch_shard._common.wrappers import check_module
from torch_shard._sharding import make_mesh
from torch_shard._tune.arithmetic import Estimate
from torch_shard._tune.cache import FORMAT, Measured, describe_entries, digest, versions
from torch_shard._tune.candidates import RECIPES, Candidate
from torch_shard._tune.chips import GIB

MARGIN = 1.05
"""Budgets are this much more than what was found."""

_SHOWN = 16


@dataclasses.dataclass(frozen=True)
class Pruned:
    """A candidate that was not compiled.

    Attributes:
        what: In words.
        why: With numbers.
        kind: What such reasons have in common.
    """

    what: str
    why: str
    kind: str


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """One candidate that was compiled, or was read from a file.

    Attributes:
        options: Keyword arguments of `make_train_step`.
        budgets: Keyword arguments of `Preview.assert_at_most`: what was found, and five percent.
        candidate: In words: mesh, recipe, and how layers run.
        found: What the compiler says; None of one that was read from a file.
        estimate: What arithmetic says; None of one that was read from a file.
        measured: Seconds of a step on the devices, if it ran there.
    """

    options: Mapping[str, Any]
    budgets: Mapping[str, float]
    candidate: Candidate
    found: Measured | None = None
    estimate: Estimate | None = None
    measured: float | None = None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tuning(InNotebooks):
    """Findings of `tune`; printed, a table.

    Attributes:
        choices: That were compiled and fit, the fastest first.
        too_large: That were compiled and do not fit.
        pruned: That were not compiled, each with its reason.
        notes: What else there is to say: an interruption, estimates that are no more than that.
        where: Topology or devices.
        fixed: Options that the user gave.
        model: The model.

    Example:
        >>> import optax, torch, torch_shard as ts
        >>> found = ts.tune(
        ...     torch.nn.Linear(64, 32), lambda model, batch: model(batch).square().mean(), optax.adam(0.1),
        ...     torch.empty(2, 64, device="meta"), devices=ts.make_mesh(batch=2).devices.flat[:2], minutes=1,
        ... )
        >>> len(found.choices) > 0, sorted(found.best.budgets)
        (True, ['collective_bytes', 'memory'])
    """

    choices: tuple[Choice, ...]
    too_large: tuple[Choice, ...]
    pruned: tuple[Pruned, ...]
    notes: tuple[str, ...]
    where: str
    fixed: Mapping[str, Any]
    model: nn.Module

    @property
    def best(self) -> Choice:
        """The fastest choice: by the clock where steps were measured, else by what the compiler says."""
        return self.choices[0]

    @public
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the best choice as JSON, which `load_tuned` reads.

        Args:
            path: Of the file; it is written whole or not at all.

        Raises:
            TypeError: An option that was given to `tune` cannot be written.
        """
        file, best = check_file("path", path), self.best
        text = json.dumps(
            {
                "format": FORMAT,
                "versions": versions(),
                "where": self.where,
                "model": digest(describe_entries(self.model)),
                "axes": best.candidate.sizes,
                "recipe": best.candidate.recipe,
                "how": {name: getattr(best.candidate, name) for name in _HOW},
                "fixed": {name: _encode(name, value) for name, value in self.fixed.items()},
                "budgets": dict(best.budgets),
            },
            indent=1,
        )
        with replacing(file) as partial:
            partial.write_text(text + "\n")
        return file

    def __rich__(self) -> Group:
        counts = collections.Counter(pruned.kind for pruned in self.pruned)
        shown = Table(title="Not compiled", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for column in ("candidate", "why"):
            shown.add_column(column, overflow="fold")
        examples: dict[str, Pruned] = {}
        for pruned in self.pruned:
            examples.setdefault(pruned.kind, pruned)
        for kind, number in counts.most_common():
            more = f" and {number - 1} more alike" if number > 1 else ""
            shown.add_row(Text(examples[kind].what + more), Text(examples[kind].why))
        parts = [self._table(), *([shown] if counts else [])]
        return Group(*parts, *(Text(note) for note in self.notes))

    def __str__(self) -> str:
        return printed(self, 170)

    def __repr__(self) -> str:
        return f"Tuning({self.where}, best=({self.best.candidate}))"

    def _table(self) -> Table:
        table = Table(title=f"Tuned for {self.where}", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        words = ("mesh", "plan", "remat", "layers")
        measured = any(choice.measured is not None for choice in self.choices)
        numbers = ("microbatches", "GiB left", "compute ms", "exposed ms", "time ms")
        last = ("wire GiB, textbook", "flags", "why not")
        columns = ("", *words, *numbers, *(("measured ms",) if measured else ()), *last)
        for column in columns:
            table.add_column(column, justify="right" if column in (*numbers, "measured ms") else "left")
        front = self._front()
        for choice in [*self.choices, *self.too_large][: 2 * _SHOWN]:
            table.add_row(*self._row(choice, choice in front, measured))
        table.caption = "* none is both faster and smaller"
        return table

    def _row(self, choice: Choice, is_front: bool, measured: bool) -> list[str]:
        found, candidate, best = choice.found, choice.candidate, self.best
        if found is None or best.found is None:
            return []
        about = "~" * bool(found.scaled)
        left = "-" if found.limit is None or not found.memory else f"{about}{(found.limit - found.memory) / GIB:.2f}"
        times = [found.compute, found.exposed, found.seconds]
        shown = [f"{about}{seconds * 1e3:.4g}" if found.seconds else "-" for seconds in times]
        waits = found.exposed_by_axis
        axes = [f"{axis} {seconds * 1e3:.3g}" for axis, seconds in waits.items() if seconds > 0.005 * found.seconds]
        shown[1] += f" ({'; '.join(axes)})" if axes else ""
        clock = [] if not measured else ["-" if choice.measured is None else f"{choice.measured * 1e3:.4g}"]
        wire = choice.estimate.wire if choice.estimate is not None else {}
        return [
            "*" * is_front,
            candidate.mesh_text,
            candidate.recipe,
            str(candidate.remat),
            _layers(found),
            str(candidate.accumulate_steps),
            left,
            *shown,
            *clock,
            ", ".join(f"{axis} {size / GIB:.2f}" for axis, size in wire.items()),
            ", ".join(f"{_FLAGS.get(name, name)}" for name in found.flags) or "-",
            self._why(choice),
        ]

    def _why(self, choice: Choice) -> str:
        found, best = choice.found, self.best
        if choice is best or found is None or best.found is None:
            return "the best"
        if not found.fits:
            return f"needs {found.memory / GIB:.2f} GiB of {(found.limit or 0) / GIB:.2f}"
        if choice.measured is not None and best.measured is not None:
            return f"{choice.measured / best.measured:.2f} x the best, measured"
        return f"{found.seconds / best.found.seconds:.2f} x the best" if best.found.seconds else ""

    def _front(self) -> Sequence[Choice]:
        """Those of which none is both faster and smaller."""
        known = [(choice, choice.found) for choice in self.choices if choice.found is not None]
        return [
            choice
            for choice, found in known
            if not any(other.seconds < found.seconds and other.memory < found.memory for _, other in known)
        ]


_HOW = ("remat", "scan_layers", "accumulate_steps")

_FLAGS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "whole collectives"}
"""Options of compilers, in words."""


def _layers(found: Measured) -> str:
    """How layers run, and how many of them were compiled."""
    way = "loop" if found.loops else "one by one"
    return f"{way}, {found.scaled}" if found.scaled else way


def budgets_of(found: Measured) -> dict[str, float]:
    """What a test may hold a choice to."""
    budgets = {"memory": found.memory, "collective_bytes": found.received}
    if found.cycles:
        budgets["cycles"] = found.cycles
    return {name: float(int(value * MARGIN)) for name, value in budgets.items()}


@public
def load_tuned(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    devices: Sequence[Device] | None = None,
    topology: str | None = None,
) -> Choice:
    """Read the choice that `found.save(path)` wrote.

    Args:
        path: Of the file.
        model: The model that was tuned, on any device: its plan is made anew.
        devices: Where the mesh is laid out; by default all that JAX sees.
        topology: Or the name of accelerators that this machine need not have.

    Returns:
        A choice: `choice.options` are keyword arguments of `make_train_step`, `choice.budgets` of
        `preview.assert_at_most`.

    Raises:
        ValueError: It is not such a file, is damaged, or is of another model; or there are too few devices.

    Example:
        >>> import optax, tempfile, torch, torch_shard as ts
        >>> def loss_fn(model, batch):
        ...     return model(batch).square().mean()
        >>> model, batch = torch.nn.Linear(64, 32), torch.empty(2, 64, device="meta")
        >>> two = ts.make_mesh(batch=2).devices.flat[:2]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     found = ts.tune(model, loss_fn, optax.sgd(0.1), batch, devices=two, minutes=1)
        ...     path = found.save(f"{directory}/tuned.json")
        ...     choice = ts.load_tuned(path, model, devices=two)
        >>> step = ts.make_train_step(model, loss_fn, optax.sgd(0.1), **choice.options)
        >>> step.preview(batch).assert_at_most(**choice.budgets)
    """
    file, model = check_file("path", path), check_module("model", model)
    try:
        found: Any = json.loads(file.read_text())
        axes = tuple((str(name), int(size)) for name, size in found["axes"].items())
        candidate = Candidate(axes, found["recipe"], **found["how"])
        fixed = {str(name): _decode(value) for name, value in found["fixed"].items()}
        budgets = {str(name): float(value) for name, value in found["budgets"].items()}
        known = found["format"] == FORMAT and candidate.recipe in RECIPES
        own, where = found["model"], found["where"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{caller()}: {file} is not what Tuning.save wrote, or is damaged: {error!r}.") from error
    if not known:
        raise ValueError(f"{caller()}: {file} is of another version of torch_shard. Tune again.")
    if own != digest(describe_entries(model)):
        raise ValueError(
            f"{caller()}: {file} is of a model with other names, shapes or dtypes than {type(model).__name__} has here "
            f"(it was tuned for {where}). Give that model, or tune this one."
        )
    mesh = make_mesh(devices, topology=topology, **candidate.sizes)
    return Choice({**candidate.options(model, mesh), **fixed}, budgets, candidate)


def _encode(name: str, value: object) -> object:
    """What JSON can hold of an option.

    Raises:
        TypeError: Nothing.
    """
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, PartitionSpec):
        return {"spec": [list(part) if isinstance(part, tuple) else part for part in value]}
    if isinstance(value, Mapping):
        return {"by name": {str(key): _encode(name, part) for key, part in value.items()}}
    if isinstance(value, list | tuple):
        return [_encode(name, part) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{caller()}: the option {name}={value!r} cannot be written to a file. Give it to make_train_step.")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    (kind, held), *_ = value.items()
    if kind == "dtype":
        return getattr(torch, held)
    if kind == "spec":
        return PartitionSpec(*(tuple(part) if isinstance(part, list) else part for part in held))
    return {name: _decode(part) for name, part in held.items()}
