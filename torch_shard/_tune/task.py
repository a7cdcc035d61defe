"""A model to be tuned on some devices: what is judged, compiled and said of it."""

# JAX, PyTorch and optax annotate some of their functions in part.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import torch
from jax.sharding import Mesh
from torch import nn

from torch_shard._capture import Precision
from torch_shard._common.caller import caller
from torch_shard._common.types import Device, PyTree
from torch_shard._cost import Preview
from torch_shard._loss import flatten_batch
from torch_shard._plans import experts_of, layers_of
from torch_shard._sharding import LossFn, holdings, make_mesh, memory_of
from torch_shard._train import make_train_step
from torch_shard._tune.arithmetic import Estimate, Model, estimate
from torch_shard._tune.cache import Cache, Measured, describe_batch, describe_entries, extrapolated, versions
from torch_shard._tune.candidates import MICROBATCHES, Candidate
from torch_shard._tune.chips import GIB, Chip, chip_of, compute_seconds, exposed_seconds
from torch_shard._tune.facts import Facts, alike_layers, facts_by_layers, facts_of
from torch_shard._tune.layers import Repeats, Shorter, find_repeats, shorten
from torch_shard._tune.products import PASSES
from torch_shard._tune.prune import Pruning
from torch_shard._tune.search import Search
from torch_shard._tune.tuning import Choice, Pruned, Tuning, budgets_of

logger = logging.getLogger(__name__)

SIZES = (2, 3)
"""So many iterations of the loops of a model are compiled, where the others follow."""

MANY = 13
"""Fewer iterations are compiled whole in the time that two programs with `SIZES` take."""

ESTIMATES = (
    "These devices' compiler counts no cycles: compute is the larger of flops over the peak and memory traffic over "
    "the bandwidth, and everything that is received counts as exposed. Memory and bytes received are the compiler's."
)


class Task:
    """A model to be tuned, and the devices.

    Args:
        model: As `tune` takes it, as the next three.
        loss_fn: See there.
        optimizer: See there.
        batch: See there.
        devices: In the order of their numbers.
        options: That the user gave.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation | torch.optim.Optimizer,
        batch: PyTree,
        *,
        devices: Sequence[Device],
        options: Mapping[str, Any],
    ) -> None:
        self.model, self.loss_fn, self.optimizer, self.batch = model, loss_fn, optimizer, batch
        self.devices, self.options = devices, options
        self.chip: Chip = chip_of(devices[0])
        self._meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}
        self._shorter: dict[int, Shorter] = {}
        self.repeats: Repeats | None = self._find_repeats()
        self.facts: Facts = self._find_facts()
        self._num_moments, self._optimizer = self._optimizer_state()

    def _find_repeats(self) -> Repeats | None:
        mesh = self.mesh(Candidate((("batch", len(self.devices)),), "replicated"))
        found = find_repeats(self.model, self.loss_fn, self.batch, self._precision(), mesh=mesh)
        return found if found is not None and found.num > SIZES[-1] else None

    def _find_facts(self) -> Facts:
        given = self.model, self.loss_fn, self.batch, self._precision()
        if self.repeats is not None:
            try:
                shorter = [self._shorten(num) for num in (1, 2)]
                return facts_by_layers(*given, shorter=shorter, num=self.repeats.num)
            except Exception as error:  # a model that cannot run with fewer layers: it is taken whole
                logger.info("tune: with fewer layers the loss cannot be captured: %s", error)
                self.repeats = None
        return facts_of(*given, alike=alike_layers(self.model))

    def _shorten(self, num: int) -> Shorter:
        """A copy of the model with so many iterations of its loops."""
        assert self.repeats is not None
        if num not in self._shorter:
            self._shorter[num] = shorten(self.model, self.optimizer, self.repeats, num)
        return self._shorter[num]

    def mesh(self, candidate: Candidate) -> Mesh:
        """The mesh of a candidate."""
        if candidate.axes not in self._meshes:
            self._meshes[candidate.axes] = make_mesh(self.devices, topology=None, **candidate.sizes)
        return self._meshes[candidate.axes]

    def options_of(self, candidate: Candidate) -> dict[str, Any]:
        """Keyword arguments of `make_train_step`."""
        return {**candidate.options(self.model, self.mesh(candidate)), **self.options}

    def prune(self) -> Pruning:
        """Judge all candidates by arithmetic."""
        leaves, _ = flatten_batch(self.batch)
        rows = tuple(dict.fromkeys(np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)))
        return Pruning(
            self._known(),
            self.chip,
            memory_of(self.devices[0]),
            self.mesh,
            has_experts=any(experts_of(layer) for _, layer in layers_of(self.model)),
            microbatches=(1,) if self._has_batch_norm() else MICROBATCHES,
            rows=() if self.options.get("batch_spec") is not None else rows,
            fixed=self.options,
        )

    def estimate(self, candidate: Candidate) -> Estimate:
        """What arithmetic says of one candidate."""
        mesh = self.mesh(candidate)
        made = candidate.options(self.model, mesh)
        plans = [made[name].resolve(self.model, mesh) for name in ("plan", "optimizer_plan") if name in made]
        return estimate(self._known(), candidate, plans[0], plans[-1], chip=self.chip)

    def _known(self) -> Model:
        itemsize = 4 if self.options.get("compute_dtype") is None else 2
        trainable = frozenset(holdings(self.model).trainable)
        return Model(self.facts, self.model, self._num_moments, itemsize, trainable, self.repeats)

    def about(self) -> dict[str, object]:
        """What all that is found depends on, beside the candidate."""
        return {
            "program": self.facts.fingerprint,
            "model": describe_entries(self.model),
            "batch": describe_batch(self.batch),
            "optimizer": self._optimizer,
            "options": {name: repr(value) for name, value in self.options.items()},
            "devices": (len(self.devices), str(getattr(self.devices[0], "device_kind", "")), self._coordinates()),
            "versions": versions(),
        }

    def prepare(self, candidate: Candidate) -> Callable[[], Measured]:
        """Capture a step, or two with a few layers of it where many run one by one; the rest compiles them.

        A loop takes as long to compile however often it runs.
        """
        is_long = self.repeats is not None and self.repeats.num >= MANY
        return (self.prepare_scaled if is_long and candidate.scan_layers is False else self.prepare_whole)(candidate)

    def prepare_scaled(self, candidate: Candidate) -> Callable[[], Measured]:
        """Capture two steps with a few layers; the rest compiles both, and says what the whole takes."""
        assert self.repeats is not None
        num = self.repeats.num
        short, long = (self._prepared(candidate, self._shorten(size), size / num) for size in SIZES)
        return lambda: extrapolated(short(), long(), SIZES, num)

    def prepare_whole(self, candidate: Candidate) -> Callable[[], Measured]:
        """Capture a step; the rest compiles it."""
        whole = Shorter(self.model, self.optimizer, {}, frozenset())
        return self._prepared(candidate, whole, 1.0)

    def _prepared(self, candidate: Candidate, model: Shorter, share: float) -> Callable[[], Measured]:
        """The same of a model with this share of the layers."""
        options = {**candidate.options(model.module, self.mesh(candidate)), **self.options}
        step = make_train_step(model.module, self.loss_fn, model.optimizer, **options)
        rest, program = step.previewing(self.batch), step.programs[-1]
        flags = {name: str(value) for name, value in (program.loss.compiler_options(step.mesh) or {}).items()}
        attention = share * self.facts.attention * (PASSES + (candidate.remat == "block")) / len(self.devices)

        def measured() -> Measured:
            found = self._measured(candidate, rest(), attention)
            return dataclasses.replace(found, flags=flags, loops=bool(program.loops))

        return measured

    def search(self, pruning: Pruning, cache: Cache, deadline: float) -> Search:
        """A search among what pruning has left.

        Args:
            pruning: Of this task.
            cache: Of what is known.
            deadline: By `time.monotonic`.
        """
        return Search(self.prepare, pruning.estimates, cache, deadline, self.prepare_whole)

    def tuning(self, search: Search, pruning: Pruning, where: str, minutes: float) -> Tuning:
        """What was found.

        Raises:
            ValueError: Nothing fits, or nothing was compiled in time.
        """
        if search.best is None:
            raise ValueError(_nothing_fits(search, minutes))
        found = search.found
        ordered = sorted(found, key=lambda c: (found[c].seconds, found[c].memory, str(c)))
        choices = {candidate: self._choice(candidate, search) for candidate in ordered}
        pruned = [*pruning.pruned, *(Pruned(str(c), why, "not compiled") for c, why in search.passed.items())]
        left = {c: made for c, made in search.estimates.items() if c not in found and c not in search.passed}
        late = [f"no time was left; about {made.seconds * 1e3:.3g} ms by arithmetic" for made in left.values()]
        pruned += [Pruned(str(c), why, "late") for c, why in zip(left, late, strict=True)]
        return Tuning(
            choices=tuple(choice for choice in choices.values() if choice.found and choice.found.fits),
            too_large=tuple(choice for choice in choices.values() if choice.found and not choice.found.fits),
            pruned=tuple(pruned),
            notes=tuple(self._notes(search)),
            where=where,
            fixed=self.options,
            model=self.model,
        )

    def _choice(self, candidate: Candidate, search: Search) -> Choice:
        found = search.found[candidate]
        return Choice(self.options_of(candidate), budgets_of(found), candidate, found, search.estimates[candidate])

    def _notes(self, search: Search) -> list[str]:
        notes = ["Interrupted: this is the best so far."] if search.interrupted else []
        notes += [ESTIMATES] if not self.chip.has_cycles else []
        if any(found.scaled for found in search.found.values()):
            notes.append(
                "Times and memory with ~ are scaled from programs with as many layers as is said, of which the others "
                "are proved to be repetitions. Before you rely on one, see step.preview of the whole."
            )
        if self._has_batch_norm() and "accumulate_steps" not in self.options:
            notes.append("Batch norm: microbatches would change its statistics, and were not considered.")
        return notes

    def _measured(self, candidate: Candidate, preview: Preview, attention: float) -> Measured:
        axes = sum(size > 1 for size in candidate.sizes.values())
        found = Measured(memory=preview.memory.peak, limit=preview.limit)
        if preview.compiled is None:
            return dataclasses.replace(found, refused=preview.refused)
        clock = self.chip.clock or 1.0
        return dataclasses.replace(
            found,
            exposed_by_axis={axis: cycles / clock for axis, cycles in preview.exposed_by_axis.items()},
            compute=compute_seconds(preview, self.chip, attention),
            exposed=exposed_seconds(preview, self.chip, axes),
            received=preview.collective_bytes,
            cycles=preview.cycles,
            collectives=preview.collectives,
        )

    def _precision(self) -> Precision:
        return Precision(self.options.get("compute_dtype"), self.options.get("mixed_precision", "autocast"))

    def _optimizer_state(self) -> tuple[float, str]:
        """Bytes of the optimizer's state for each byte of parameters, and what it is."""
        candidate = Candidate((("batch", len(self.devices)),), "replicated")
        given = {name: value for name, value in self.options.items() if name not in ("scan_layers", "remat")}
        options = {
            **candidate.options(self.model, self.mesh(candidate)),
            **given,
            "scan_layers": False,
            "remat": "none",
        }
        structs = make_train_step(self.model, self.loss_fn, self.optimizer, **options).structs
        leaves: list[Any] = jax.tree.leaves(structs.opt_state)
        held, own = (
            sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in found)
            for found in (leaves, jax.tree.leaves(structs.params))
        )
        kind = getattr(getattr(self.optimizer, "update", None), "__qualname__", type(self.optimizer).__qualname__)
        return held / max(own, 1), f"{kind} {structs.opt_state}"

    def _has_batch_norm(self) -> bool:
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules())  # pyright: ignore

    def _coordinates(self) -> object:
        return [getattr(device, "coords", None) for device in self.devices]


def _nothing_fits(search: Search, minutes: float) -> str:
    sizes = {candidate: found for candidate, found in search.found.items() if found.memory}
    if not sizes:
        return (
            f"{caller()}: minutes={minutes:g} were too few for one compilation: {len(search.passed)} are under way, "
            "and none has ended. Give more minutes; with cache=, what ends later is noted there."
        )
    least = min(sizes, key=lambda candidate: sizes[candidate].memory)
    found, parts = sizes[least], search.estimates[least].memory
    limit = (found.limit or 0) / GIB
    return (
        f"{caller()}: none of the {len(sizes)} candidates that were compiled fits into {limit:.2f} GiB. The smallest "
        f"is {least}, with {found.memory / GIB:.2f} GiB; by arithmetic, in GiB: {parts}. Take more devices, a smaller "
        "batch, or compute_dtype=torch.bfloat16."
    )
