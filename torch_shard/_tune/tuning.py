"""What tuning has found: a table, the best choice as options, and files of it."""

# PyTorch and JAX annotate some of their functions in part; what JSON holds is anything.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

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
from torch_shard._common.printed import InNotebooks, printed, replacing
from torch_shard._common.types import Device
from torch_shard._common.validate import check_file, check_module
from torch_shard._sharding import make_mesh
from torch_shard._tune.cache import Measured, describe_entries, digest
from torch_shard._tune.candidates import RECIPES, Candidate

GIB = 2**30

MARGIN = 1.05
"""Budgets are this much more than what was found."""


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """One candidate, or what was read from a file.

    Attributes:
        options: Keyword arguments of `make_train_step`.
        budgets: Keyword arguments of `Preview.assert_at_most`: what was found, and five percent.
        candidate: In words: mesh, recipe, and how layers run.
        found: What the compiler says; None where this was read from a file.
        measured: Seconds of a step on the devices, if it ran there.
    """

    options: Mapping[str, Any]
    budgets: Mapping[str, float]
    candidate: Candidate
    found: Measured | None = None
    measured: float | None = None

    @property
    def seconds(self) -> float:
        """Of a step, as the compiler says; 0 where it was not asked."""
        return 0.0 if self.found is None else self.found.seconds

    @property
    def memory(self) -> float:
        """Bytes of one device, by the same."""
        return 0.0 if self.found is None else self.found.memory


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tuning(InNotebooks):
    """Findings of `tune`; printed, a table.

    Attributes:
        choices: What was compiled, the best first, and what does not fit last.
        pruned: What was left out, in words, with the reason.
        notes: What else there is to say: what there was no time for, an interruption.
        where: Topology or devices.
        limit: Bytes of one device; None if that is not known.
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
    pruned: Mapping[str, str]
    notes: tuple[str, ...]
    where: str
    limit: int | None
    fixed: Mapping[str, Any]
    model: nn.Module

    @property
    def best(self) -> Choice:
        """The choice to take: by the clock where steps were measured, else by the compiler."""
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
                "where": self.where,
                "model": digest(describe_entries(self.model)),
                "candidate": dataclasses.asdict(best.candidate),
                "fixed": dict(self.fixed),
                "budgets": dict(best.budgets),
            },
            indent=1,
            default=_encode,
        )
        with replacing(file) as partial:
            partial.write_text(text + "\n")
        return file

    def __rich__(self) -> Group:
        left_out = [f"Left out: {what}: {why}" for what, why in self.pruned.items()]
        return Group(self._table(), *map(Text, (*left_out, *self.notes)))

    def __str__(self) -> str:
        return printed(self, 170)

    def __repr__(self) -> str:
        return f"Tuning({self.where}, best=({self.best.candidate}))"

    def _table(self) -> Table:
        table = Table(title=f"Tuned for {self.where}", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for column in ("candidate", "GiB left", "compute ms", "exposed ms", "time ms", "measured ms", "why not"):
            table.add_column(column)
        for choice in self.choices:
            table.add_row(*self._row(choice))
        return table

    def _row(self, choice: Choice) -> list[str]:
        found = choice.found or Measured()
        times = [found.compute, found.exposed, choice.seconds, choice.measured or 0.0]
        compute, exposed, seconds, measured = (f"{time * 1e3:.4g}" if time else "-" for time in times)
        left = "-" if self.limit is None else f"{(self.limit - choice.memory) / GIB:.2f}"
        return [str(choice.candidate), left, compute, exposed, seconds, measured, self._why(choice)]

    def _why(self, choice: Choice) -> str:
        best = self.best
        if choice is best:
            return "the best"
        if self.limit is not None and choice.memory > self.limit:
            return f"needs {choice.memory / GIB:.2f} of {self.limit / GIB:.2f} GiB"
        if choice.found and choice.found.refused:
            return choice.found.refused
        if bool(choice.measured) != bool(best.measured):
            return ""
        return f"{(choice.measured or choice.seconds) / (best.measured or best.seconds):.2f} x the best"


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
        found: Any = json.loads(file.read_text(), object_hook=_decode)
        axes = tuple((str(name), int(size)) for name, size in found["candidate"].pop("axes"))
        candidate = Candidate(axes, **found["candidate"])
        fixed = dict(found["fixed"])
        budgets = {str(name): float(value) for name, value in found["budgets"].items()}
        own, where, _ = found["model"], found["where"], RECIPES[candidate.recipe]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{caller()}: {file} is not what Tuning.save wrote, or is damaged: {error!r}.") from error
    if own != digest(describe_entries(model)):
        raise ValueError(
            f"{caller()}: {file} is of a model with other names, shapes or dtypes than {type(model).__name__} has here "
            f"(it was tuned for {where}). Give that model, or tune this one."
        )
    mesh = make_mesh(devices, topology=topology, **candidate.sizes)
    return Choice({**candidate.options(model, mesh), **fixed}, budgets, candidate)


def _encode(value: object) -> object:
    """What JSON can hold of an option that is not of its own kinds."""
    if isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if isinstance(value, PartitionSpec):
        return {"PartitionSpec": list(value)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{caller()}: the option {value!r} cannot be written to a file. Give it to make_train_step.")


def _decode(held: dict[str, Any]) -> Any:
    match held:
        case {"torch.dtype": name}:
            return getattr(torch, name)
        case {"PartitionSpec": parts}:
            return PartitionSpec(*(tuple(part) if isinstance(part, list) else part for part in parts))
        case _:
            return held
