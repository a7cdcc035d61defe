"""A model to be tuned on some devices: which candidates there are, their steps, and what a compiler says of one."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from torch_shard._common.caller import caller
from torch_shard._common.types import Device, PyTree
from torch_shard._cost import Chip, Preview, chip_of
from torch_shard._loss import flatten_batch
from torch_shard._plans import experts_of
from torch_shard._scan import LayerOptions
from torch_shard._sharding import ResolvedPlan, axes_of, make_mesh, memory_of
from torch_shard._train import TrainStep
from torch_shard._tune.cache import Measured, describe_entries
from torch_shard._tune.candidates import Candidate, Estimate, Facts, estimate, facts_of, families, variants
from torch_shard._tune.tuning import GIB

ROOM = 0.5
"""With memory by arithmetic below this part of the limit there is no reason to compute again."""

ONE_BY_ONE = 32
"""More layers than these take too long to compile one by one."""

MOST = 40
"""So many candidates are looked at, the fastest by arithmetic of those that may fit."""


class Task:
    """A model to be tuned, and the devices.

    Args:
        make: `make_train_step` of model, loss and optimizer; it takes the options.
        model: The model.
        batch: As `tune` takes it.
        devices: In the order of their numbers.
        options: That the user gave.
    """

    def __init__(
        self,
        make: Callable[..., TrainStep],
        model: nn.Module,
        batch: PyTree,
        *,
        devices: Sequence[Device],
        options: Mapping[str, Any],
    ) -> None:
        self._make, self.model, self.batch, self.devices, self.options = make, model, batch, devices, options
        self.chip: Chip = chip_of(devices[0])
        self.limit: int | None = memory_of(devices[0])
        self.pruned = dict[str, str]()
        self._plans = dict[object, tuple[dict[str, Any], ResolvedPlan, ResolvedPlan]]()
        found = list(self._find_candidates())
        self._refuse_if_none(found)
        step = self.step(found[0])
        self._ready = {found[0]: step.previewing(batch)}
        self.facts: Facts = facts_of(step)
        self.estimates: dict[Candidate, Estimate] = self._estimate(found)
        self._refuse_if_none(self.estimates)

    def options_of(self, candidate: Candidate) -> dict[str, Any]:
        """Keyword arguments of `make_train_step`."""
        return {**self._plans[candidate.family][0], **candidate.how, **self.options}

    def prepare(self, candidate: Candidate) -> Callable[[], Measured]:
        """Capture a step; the rest compiles it, and may run in another thread."""
        rest = self._ready.pop(candidate, None) or self.step(candidate).previewing(self.batch)
        return lambda: self._measured(rest())

    def about(self) -> dict[str, object]:
        """What all that is found depends on, beside the candidate and versions."""
        return {
            "program": self.facts.fingerprint,
            "model": describe_entries(self.model),
            "options": dict(self.options),
            "devices": [getattr(self.devices[0], "device_kind", ""), *self.devices],
        }

    def _find_candidates(self) -> Iterator[Candidate]:
        """What divides, the default first."""
        leaves, _ = flatten_batch(self.batch)
        has_spec = self.options.get("batch_spec") is not None
        rows = [] if has_spec else sorted({np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)})
        has_experts = any(map(experts_of, self.model.modules()))
        loops, auto = self._loops()
        for family in families(len(self.devices), has_experts=has_experts, has_spec=has_spec):
            try:
                self._plans[family.family] = self._resolve(family, rows)
            except (ValueError, NotImplementedError) as error:
                self.pruned[str(family)] = " ".join(str(error).split())[:200]
            else:
                yield from variants(family, loops, auto_is_loop=auto, fixed=self.options)

    def _resolve(self, family: Candidate, rows: Sequence[int]) -> tuple[dict[str, Any], ResolvedPlan, ResolvedPlan]:
        """Options of a mesh and a recipe, and how they split parameters and the optimizer's state."""
        shards = family.data_shards * self.options.get("accumulate_steps", 1)
        if uneven := [num for num in rows if num % shards]:
            raise ValueError(f"{uneven[0]} rows do not divide over {shards} shards")
        mesh = make_mesh(self.devices, topology=None, **family.sizes)
        made = family.options(self.model, mesh)
        split = [made[name].resolve(self.model, mesh) for name in ("plan", "optimizer_plan") if name in made]
        axes = {axis for entry in split[0].entries.values() for axis in axes_of(entry.sharding.spec)}
        if "model" in family.sizes and "model" not in axes:
            raise ValueError("nothing divides over model, and its devices would all do the same")
        return made, split[0], split[-1]

    def _loops(self) -> tuple[Sequence[bool], bool]:
        """Whether layers may run in loops, and whether they do if nobody says it."""
        groups = LayerOptions(scan="auto", remat="block").groups(self.model)
        num = sum(len(group.members) for group in groups if group.refused is None)
        auto = num > 0 and LayerOptions().decided(self.model, self.devices[0].platform).scan is not False
        if not num or "scan_layers" in self.options:
            return [num > 0 and self.options.get("scan_layers") is not False], auto
        return [auto] if auto and num > ONE_BY_ONE else [auto, not auto], auto

    def step(self, candidate: Candidate) -> TrainStep:
        """The step of a candidate."""
        return self._make(**self.options_of(candidate))

    def _estimate(self, candidates: Sequence[Candidate]) -> dict[Candidate, Estimate]:
        """Those that may fit by arithmetic, the default first; what saves memory is for those that may need it."""
        limit, found = self.limit or math.inf, dict[Candidate, Estimate]()
        least = dict[object, float]()
        for candidate in candidates:
            own = estimate(candidate, *self._plans[candidate.family][1:], self.facts, chip=self.chip)
            needed = least.setdefault(candidate.family, own.memory)
            if own.state > limit:
                state = f"parameters and moments alone need {own.state / GIB:.2f} of {limit / GIB:.2f} GiB"
                self.pruned[str(candidate)] = state
            elif candidate.remat == candidates[0].remat or needed > ROOM * limit:
                found[candidate] = own
        if any(own.memory <= ROOM * limit for candidate, own in found.items() if not candidate.offload):
            found = {candidate: own for candidate, own in found.items() if not candidate.offload}

        def slowness(candidate: Candidate) -> tuple[bool, float]:
            own = found[candidate]
            return candidate != candidates[0], own.seconds * max(1.0, own.memory / limit) ** 2

        return {candidate: found[candidate] for candidate in sorted(found, key=slowness)[:MOST]}

    def _refuse_if_none(self, left: Sequence[Candidate] | Mapping[Candidate, Estimate]) -> None:
        if not left:
            reasons = [f"{what}: {why}" for what, why in list(self.pruned.items())[:8]]
            raise ValueError(
                "\n  ".join([f"{caller()}: nothing is left to choose from:", *reasons])
                + "\nTake a number of rows that the devices divide, more devices, or an optimizer that keeps less."
            )

    def _measured(self, preview: Preview) -> Measured:
        """What the compiler says, in seconds."""
        if preview.compiled is None:
            return Measured(memory=preview.memory.peak, refused=preview.refused)
        chip = self.chip
        compute = max(preview.flops / chip.flops, preview.memory_bytes / chip.bandwidth)
        exposed = preview.collective_bytes / chip.link
        if chip.clock is not None and preview.exposed is not None:
            compute, exposed = preview.cycles / chip.clock, preview.exposed / chip.clock
        return Measured(preview.memory.peak, compute, exposed, preview.collective_bytes, preview.cycles)
