"""Previews of a few candidates within a time, the default first, and their order by what the compiler says."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from torch import nn

from torch_shard._common.caller import caller
from torch_shard._common.specs import axes_of
from torch_shard._common.types import Device, PyTree
from torch_shard._cost import Chip, Preview, chip_of
from torch_shard._loss import flatten_batch
from torch_shard._plans import experts_of
from torch_shard._scan import LayerOptions
from torch_shard._sharding import ResolvedPlan, ShardingPlan, make_mesh, memory_of
from torch_shard._state import TrainState
from torch_shard._train import TrainStep
from torch_shard._tune.cache import Cache, Measured, describe_entries, digest
from torch_shard._tune.candidates import Candidate, other_layouts
from torch_shard._tune.tuning import GIB

logger = logging.getLogger(__name__)

MOST = 8
"""So many candidates are compiled."""

ONE_BY_ONE = 32
"""More layers than these take too long to compile one by one."""


class Search:
    """A search under way.

    Args:
        make: `make_train_step` of model, loss and optimizer; it takes the options.
        model: The model.
        batch: As `tune` takes it.
        devices: In the order of their numbers.
        options: That the user gave.
        directory: Of what is known; None for none.
        deadline: By `time.monotonic`; no preview begins after it, but that of the default.

    Attributes:
        measured: What the compiler says of each candidate that it was asked about.
        not_reached: Candidates for which there was no time.
        pruned: What was left out, in words, with the reason.
    """

    def __init__(
        self,
        make: Callable[..., TrainStep],
        model: nn.Module,
        batch: PyTree,
        *,
        devices: Sequence[Device],
        options: Mapping[str, Any],
        directory: Path | None = None,
        deadline: float = math.inf,
    ) -> None:
        self._make = make
        self.model = model
        self.batch = batch
        self.devices = devices
        self.options = options
        self.deadline = deadline
        self.chip: Chip = chip_of(devices[0])
        self.limit: int | None = memory_of(devices[0])
        self._cache: Cache | None = None
        self._directory = directory
        self._structs: TrainState | None = None

        self.measured: dict[Candidate, Measured] = {}
        self.not_reached: list[Candidate] = []
        self.pruned: dict[str, str] = {}
        self.interrupted = False

        self.num_layers, loops_by_default = self._layers()
        remat = options.get("remat", "none")
        scan_layers = options.get("scan_layers", "auto")
        # What is computed again are whole layers, which then run in loops.
        in_loops = scan_layers is True or (scan_layers == "auto" and (loops_by_default or remat != "none"))
        self.default = Candidate(
            (("batch", len(devices)),), "fsdp", remat, scan_layers, in_loops=in_loops and self.num_layers > 0
        )

    def run(self) -> None:
        """Preview the candidates until the time is over, or the user interrupts."""
        try:
            for candidate in self._candidates():
                if len(self.measured) == MOST:
                    break
                if self.measured and time.monotonic() > self.deadline:
                    self.not_reached.append(candidate)
                    continue
                options = self._options_if_possible(candidate)
                if options is not None:
                    self.measured[candidate] = self.measure(candidate, options)
        except KeyboardInterrupt:
            if not self.measured:
                raise
            self.interrupted = True

        if not self.measured:
            reasons = [f"{what}: {why}" for what, why in list(self.pruned.items())[:8]]
            raise ValueError(
                "\n  ".join([f"{caller()}: nothing is left to choose from:", *reasons])
                + "\nTake a number of rows that the devices divide, more devices, or an optimizer that keeps less."
            )

    def ranking(self) -> list[Candidate]:
        """What was compiled, the fastest first, and what does not fit last."""
        return sorted(self.measured, key=lambda candidate: (not self.fits(candidate), self.measured[candidate].seconds))

    def fits(self, candidate: Candidate) -> bool:
        """Whether it was compiled, and has room."""
        measured = self.measured.get(candidate)
        if measured is None or measured.refused:
            return False
        return self.limit is None or measured.memory <= self.limit

    def options_of(self, candidate: Candidate) -> dict[str, Any]:
        """Keyword arguments of `make_train_step`."""
        mesh = make_mesh(self.devices, topology=None, **candidate.sizes)
        return {**candidate.options(self.model, mesh), **self.options}

    def step(self, candidate: Candidate) -> TrainStep:
        """The step of a candidate."""
        return self._make(**self.options_of(candidate))

    def _layers(self) -> tuple[int, bool]:
        """How many layers may run in loops, and whether they do if nobody says it."""
        groups = LayerOptions(scan="auto", remat="block").groups(self.model)
        num_layers = sum(len(group.members) for group in groups if group.refused is None)
        decided = LayerOptions().decided(self.model, self.devices[0].platform)
        return num_layers, num_layers > 0 and decided.scan is not False

    def _candidates(self) -> Iterator[Candidate]:
        """The default; with less and less memory until it fits; then other layouts, whose layers run as that's do."""
        how = self.default
        for how in self._with_less_memory():
            yield how
            if self.fits(how):
                break

        has_experts = any(map(experts_of, self.model.modules()))
        has_spec = self.options.get("batch_spec") is not None
        layouts = list(other_layouts(len(self.devices), has_experts=has_experts, has_spec=has_spec))
        for layout in layouts[:3]:
            yield dataclasses.replace(how, axes=layout.axes, recipe=layout.recipe)
        may_change_loops = "scan_layers" not in self.options and 0 < self.num_layers <= ONE_BY_ONE
        if may_change_loops and how.remat == "none":
            yield dataclasses.replace(how, scan_layers=not how.in_loops, in_loops=not how.in_loops)
        for layout in layouts[3:]:
            yield dataclasses.replace(how, axes=layout.axes, recipe=layout.recipe)

    def _with_less_memory(self) -> Iterator[Candidate]:
        yield self.default
        if not self.num_layers:
            return
        recomputing = self.default
        if "remat" not in self.options:
            in_loops = self.options.get("scan_layers") is not False
            for remat in ("dots", "block"):
                recomputing = dataclasses.replace(self.default, remat=remat, in_loops=in_loops)
                yield recomputing
        if "offload" not in self.options:
            yield dataclasses.replace(recomputing, offload=True)

    def _options_if_possible(self, candidate: Candidate) -> dict[str, Any] | None:
        """The options of a candidate; None, with the reason in `pruned`, for what nobody needs to compile."""
        try:
            self._check_rows(candidate)
            options = self.options_of(candidate)
            self._check_layout(candidate, options)
        except (ValueError, NotImplementedError) as error:
            self.pruned[str(candidate)] = " ".join(str(error).split())[:200]
            return None
        return options

    def _check_rows(self, candidate: Candidate) -> None:
        if self.options.get("batch_spec") is not None:
            return
        leaves, _ = flatten_batch(self.batch)
        shards = candidate.data_shards * self.options.get("accumulate_steps", 1)
        for num_rows in sorted({np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)}):
            if num_rows % shards:
                raise ValueError(f"{num_rows} rows do not divide over {shards} shards")

    def _check_layout(self, candidate: Candidate, options: Mapping[str, Any]) -> None:
        mesh = options["mesh"]
        plan: ResolvedPlan = options["plan"].resolve(self.model, mesh)
        split_axes = {axis for entry in plan.entries.values() for axis in axes_of(entry.sharding.spec)}
        if "model" in candidate.sizes and "model" not in split_axes:
            raise ValueError("nothing divides over model, and its devices would all do the same")

        if self.limit is None:
            return
        state: float = _local_bytes(plan, plan.entries)
        if not candidate.offload:
            if self._structs is None:
                self._structs = self._make(**options).structs
            moments_per_byte = _bytes(self._structs.opt_state) / max(_bytes(self._structs.params), 1)
            optimizer_plan: ShardingPlan = options.get("optimizer_plan", options["plan"])
            state += moments_per_byte * _local_bytes(optimizer_plan.resolve(self.model, mesh), self._structs.params)
        if state > self.limit:
            raise ValueError(
                f"parameters and moments alone need {state / GIB:.2f} of {self.limit / GIB:.2f} GiB",
            )

    def measure(self, candidate: Candidate, options: Mapping[str, Any] | None = None) -> Measured:
        """What the cache knows of a candidate, or the compiler says.

        Args:
            candidate: Any, of the search or not.
            options: Its options, where they have been made.
        """
        try:
            step = self._make(**(self.options_of(candidate) if options is None else options))
            if self._cache is None:
                self._cache = Cache(self._directory, self._about(step))
            known = self._cache.read(candidate)
            if known is not None:
                return known

            logger.info(
                "tune: compiling %s; %d compiled, %d s left",
                candidate,
                len(self.measured),
                self.deadline - time.monotonic(),
            )
            start = time.monotonic()
            measured = self._of_preview(step.preview(self.batch))
            measured = dataclasses.replace(measured, took=time.monotonic() - start)
            self._cache.write(candidate, measured)
        except Exception as error:
            is_of_model = not isinstance(error, ValueError | NotImplementedError | TypeError)
            if candidate == self.default and is_of_model:
                raise
            measured = Measured(refused=f"refused: {' '.join(str(error).split())[:200]}")
        logger.info("tune: %s: %s", candidate, measured.refused or f"{measured.seconds * 1e3:.3g} ms")
        return measured

    def _about(self, step: TrainStep) -> dict[str, object]:
        """What all that is measured depends on, beside the candidate and versions."""
        about: dict[str, object] = {
            "model": describe_entries(self.model),
            "options": dict(self.options),
            "devices": [getattr(self.devices[0], "device_kind", ""), *self.devices],
        }
        if self._directory is not None:
            step.lower(step.structs, self.batch)
            program = step.programs[-1].loss
            graphs = [program.program.graph.module.graph]
            if program.rolled is not None:
                graphs += [call.region.graph.module.graph for call in program.rolled.calls.values()]
            values = [[node.meta.get("val") for node in graph.nodes] for graph in graphs]
            about["program"] = digest(str([step.structs.opt_state, graphs, values]))
        return about

    def _of_preview(self, preview: Preview) -> Measured:
        """What the compiler says, in seconds."""
        if preview.compiled is None:
            return Measured(memory=preview.memory.peak, refused=preview.refused)
        chip = self.chip
        compute = max(preview.flops / chip.flops, preview.memory_bytes / chip.bandwidth)
        exposed = preview.collective_bytes / chip.link
        if chip.clock is not None and preview.exposed is not None:
            compute = preview.cycles / chip.clock
            exposed = preview.exposed / chip.clock
        return Measured(preview.memory.peak, compute, exposed, preview.collective_bytes, preview.cycles)


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _local_bytes(plan: ResolvedPlan, names: Iterable[str]) -> int:
    """Of what one device holds of these entries, a tie once."""
    entries = [plan.entries[name] for name in names if plan.entries[name].tied_to is None]
    return sum(entry.count_bytes(entry.local_shape) or 0 for entry in entries)
