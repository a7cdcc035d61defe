"""Pruning by arithmetic: which candidates are worth compiling, and of the others why not, with numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._scan import FEW, LayerOptions
from torch_shard._sharding import ResolvedPlan, axes_of
from torch_shard._tune.arithmetic import Estimate, Model, estimate, find_rows_fault
from torch_shard._tune.candidates import Candidate, families, variants
from torch_shard._tune.chips import GIB, Chip
from torch_shard._tune.tuning import Pruned

SURE = 1.5
"""Memory by arithmetic this many times the limit is too much, whatever the compiler would make of it."""

ROOM = 0.5
"""With memory by arithmetic below this part of the limit there is no reason to compute again, nor for microbatches."""

SLOW = 2.0
"""A candidate this many times as long as the best, by arithmetic, is not compiled."""

ONE_BY_ONE = 32
"""More layers than these take too long to compile one by one; where a few do not say what all of them take, `FEW`."""


class Pruning:
    """All candidates, judged.

    Args:
        model: With its facts.
        chip: The devices.
        limit: Bytes of one; None if that is not known.
        mesh_of: Makes the mesh of a candidate.
        has_experts: Whether the model has experts in one tensor.
        microbatches: Numbers to choose from.
        rows: Of the leaves of a batch.
        fixed: Options that the user gave.

    Raises:
        ValueError: The batch divides over no mesh, or the model fits nowhere.
    """

    def __init__(
        self,
        model: Model,
        chip: Chip,
        limit: int | None,
        mesh_of: Callable[[Candidate], Mesh],
        *,
        has_experts: bool,
        microbatches: Sequence[int],
        rows: Sequence[int],
        fixed: Mapping[str, Any],
    ) -> None:
        self.facts, self.pruned = model.facts, list[Pruned]()
        self.estimates: dict[Candidate, Estimate] = {}
        self._model, self._chip, self._limit, self._mesh_of = model, chip, limit, mesh_of
        self._rows, self._fixed, self._microbatches = rows, fixed, microbatches
        self._seen: dict[object, Candidate] = {}
        self._too_large: dict[Candidate, Estimate] = {}
        mesh = mesh_of(Candidate((("batch", -1),), "replicated"))
        num, platform = mesh.size, mesh.devices.flat[0].platform
        self._auto_is_loop = LayerOptions().decided(model.module, platform).scan is not False
        asked = list(families(num, has_experts=has_experts, fixed=fixed))
        for family in asked:
            self._judge(family)
        self._refuse_if_none(asked)
        self._drop_slow()

    def _judge(self, family: Candidate) -> None:
        if fault := find_rows_fault(family, self._rows):
            return self._prune(family, fault, "rows")
        mesh = self._mesh_of(family)
        try:
            options = family.options(self._model.module, mesh)
            plan = options["plan"].resolve(self._model.module, mesh)
            further = options.get("optimizer_plan")
            moments = plan if further is None else further.resolve(self._model.module, mesh)
        except (ValueError, NotImplementedError) as error:
            return self._prune(family, " ".join(str(error).split())[:200], "refused")
        if "model" in mesh.shape and not any("model" in axes_of(e.padded_spec) for e in plan.entries.values()):
            return self._prune(family, "nothing divides over model, and its devices would all do the same", "model")
        if (same := self._seen.setdefault(_look(family, plan, moments), family)) is not family:
            return self._prune(family, f"splits all entries as {same.recipe} does", "same")
        self._judge_variants(family, plan, moments)

    def _judge_variants(self, family: Candidate, plan: ResolvedPlan, moments: ResolvedPlan) -> None:
        numbers = [self._fixed.get("accumulate_steps", 1)] if "accumulate_steps" in self._fixed else self._microbatches
        layers, found = self._model.facts.layers, dict[Candidate, Estimate]()
        for candidate in variants(
            family,
            layers=layers,
            auto_is_loop=self._auto_is_loop,
            most=FEW if self._model.repeats is None else ONE_BY_ONE,
            microbatches=numbers,
            fixed=self._fixed,
        ):
            if fault := find_rows_fault(candidate, self._rows):
                self._prune(candidate, fault, "rows")
                continue
            made = found[candidate] = estimate(self._model, candidate, plan, moments, chip=self._chip)
            if why := self._needless(candidate, found):
                self._prune(candidate, *why)
            elif why := self._too_much(made):
                self._too_large[candidate] = made
                self._prune(candidate, why, "memory")
            else:
                self.estimates[candidate] = made

    def _needless(self, candidate: Candidate, found: Mapping[Candidate, Estimate]) -> tuple[str, str] | None:
        """Why there is no reason to save memory, if there is none; the first candidates save least."""
        if self._limit is None:
            saves = (candidate.remat != "none" and "remat" not in self._fixed) or (
                candidate.accumulate_steps > 1 and "accumulate_steps" not in self._fixed
            )
            return ("the memory of these devices is not known, and none is saved", "no limit") if saves else None
        for other, made in found.items():
            alike = (other.scan_layers is False) == (candidate.scan_layers is False)
            less = (other.remat, other.accumulate_steps) != (candidate.remat, candidate.accumulate_steps)
            lighter = other.accumulate_steps <= candidate.accumulate_steps and (
                other.remat == candidate.remat or other.remat == "none"
            )
            if alike and less and lighter and made.memory.total < ROOM * self._limit:
                needs = f"needs about {made.memory.total / GIB:.2f} of {self._limit / GIB:.2f} GiB"
                return f"the same with remat={other.remat}, {other.accumulate_steps} microbatches {needs}", "room"
        return None

    def _too_much(self, made: Estimate) -> str:
        if self._limit is None:
            return ""
        limit = f"of {self._limit / GIB:.2f} GiB"
        if made.memory.state > self._limit:
            return f"parameters and moments alone need {made.memory.state / GIB:.2f} {limit}"
        if made.memory.total > SURE * self._limit:
            return f"needs about {made.memory.total / GIB:.2f} {limit}: {made.memory}"
        return ""

    def _prune(self, candidate: Candidate, why: str, kind: str) -> None:
        self.pruned.append(Pruned(str(candidate), why, kind))

    def _refuse_if_none(self, asked: Sequence[Candidate]) -> None:
        if self.estimates:
            return
        if self._too_large and self._limit is not None:
            least = min(self._too_large, key=lambda candidate: self._too_large[candidate].memory.total)
            parts, shards = self._too_large[least].memory, self._mesh_of(least).size
            more = -(-shards * parts.total // self._limit)
            raise ValueError(
                f"{caller()}: the model fits nowhere. The smallest of {len(self._too_large)} candidates is {least}: it "
                f"needs {parts.total / GIB:.2f} of {self._limit / GIB:.2f} GiB on each of {shards} devices, in GiB: "
                f"{parts}. About {more:.0f} such devices would hold it; so may a smaller batch, or an optimizer that "
                "keeps less."
            )
        if uneven := [family for family in asked if find_rows_fault(family, self._rows)]:
            shards = ", ".join(map(str, sorted({family.data_shards for family in uneven})))
            raise ValueError(
                f"{caller()}: the batch divides over no mesh: its leaves have {', '.join(map(str, self._rows))} rows, "
                f"the meshes of these devices split rows over {shards}, and nothing else is left: the model does not "
                "divide over the others. Choose a number of rows that one of these divides."
            )
        reasons = "\n".join(f"  {pruned.what}: {pruned.why}" for pruned in self.pruned[:8])
        raise ValueError(f"{caller()}: no candidate is left:\n\n{reasons}")

    def _drop_slow(self) -> None:
        best = min(made.seconds for made in self.estimates.values())
        for candidate, made in list(self.estimates.items()):
            if made.seconds > SLOW * best:
                del self.estimates[candidate]
                times = f"about {made.seconds * 1e3:.3g} ms by arithmetic, {made.seconds / best:.1f} x the least"
                self._prune(candidate, times, "slow")


def _look(family: Candidate, plan: ResolvedPlan, moments: ResolvedPlan) -> object:
    """Alike for families that make the same program; axes of one device split nothing."""
    sizes = {name: size for name, size in family.axes if size > 1}
    entries = [entry for found in (plan, moments) for entry in found.entries.values()]
    specs = [[[axis for axis in axes_of((part,)) if axis in sizes] for part in entry.padded_spec] for entry in entries]
    return str((sizes, specs, plan.activations))
