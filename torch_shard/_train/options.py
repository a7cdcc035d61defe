"""The options of a step, as one value: `make_train_step` and `make_eval_step` say what each means."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar, cast, get_args

import jax
import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._capture import Precision
from torch_shard._common.autocast_policy import MixedPrecision
from torch_shard._common.caller import caller
from torch_shard._common.validate import check_count, check_kind, is_integer
from torch_shard._device import BatchLayout
from torch_shard._entries import Holdings
from torch_shard._optim import check_average, check_clipping, clipped
from torch_shard._scan import REMAT, LayerOptions, Remat, ScanLayers
from torch_shard._sharding import Padded, ResolvedPlan, ShardingPlan, check_mesh, check_plan, make_matcher, spec_in_use

T = TypeVar("T")
Offload = Literal["optimizer", "activations"]
"""What may lie in the host's memory while a device does not need it."""


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _in_use(plan: ResolvedPlan, name: str, rows: Sequence[str]) -> PartitionSpec | None:
    """How an entry is split where it is used, where that has to be said.

    Kernels of convolutions and matrices of experts are taken whole, or by expert, and gathered for it. Unless it is
    told, XLA gathers those of all layers of a loop in each iteration, and then takes one.
    """
    found, own = spec_in_use(plan[name], rows), plan[name].spec
    is_split = len(plan.entries[name].shape) > 2 and any(own)
    return own if found is None and is_split else found


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Every option of a step, checked when it is made."""

    mesh: Mesh
    plan: ShardingPlan
    optimizer_plan: ShardingPlan | None = None
    trainable: str | Sequence[str] | None = None
    batch_spec: PartitionSpec | Mapping[str, PartitionSpec] | None = None
    local_batches: bool = False
    compute_dtype: torch.dtype | None = None
    mixed_precision: MixedPrecision | None = None
    scan_layers: ScanLayers = "auto"
    remat: Remat | int = "none"
    offload: Offload | Sequence[Offload] | None = None
    accumulate_steps: int = 1
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    ema: float | None = None
    moment_dtype: torch.dtype | None = None
    watch: str | Sequence[str] | None = None
    split_activations: bool = True
    look_again: bool = True
    compile_cache: str | os.PathLike[str] | None = None
    compiled: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_mesh(self.mesh)
        check_plan(self.plan)
        check_kind("optimizer_plan", self.optimizer_plan, ShardingPlan | None)
        check_kind("batch_spec", self.batch_spec, PartitionSpec | Mapping | None)
        check_kind("local_batches", self.local_batches, bool)
        self._check_dtypes()
        self._check_layers()
        self._check_offload()
        if self.mixed_precision not in (None, *get_args(MixedPrecision)):
            raise ValueError(
                f'{caller()}: mixed_precision must be "autocast" or "params", got {self.mixed_precision!r}. The dtype '
                "is compute_dtype=."
            )
        if self.mixed_precision is not None and self.compute_dtype is None:
            object.__setattr__(self, "compute_dtype", torch.bfloat16)
        check_count("accumulate_steps", self.accumulate_steps)
        check_clipping(self.clip_grad_norm, self.clip_grad_value)
        check_average(self.ema)
        check_kind("split_activations", self.split_activations, bool)
        check_kind("look_again", self.look_again, bool)
        if isinstance(self.batch_spec, Mapping) and (self.accumulate_steps > 1 or self.local_batches):
            raise NotImplementedError(
                f"{caller()}: batch_spec by name is for batches that are taken at once and whole: leave out "
                "accumulate_steps and local_batches, or pad the leaves so that each divides."
            )

    def _check_dtypes(self) -> None:
        if self.compute_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"{caller()}: compute_dtype must be torch.bfloat16 or None, got {self.compute_dtype}. (float16 would "
                "need a scaled loss; for another precision throughout, convert the model itself: model.double().)"
            )

        if self.moment_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"{caller()}: moment_dtype must be torch.bfloat16 or None, got {self.moment_dtype}. (It has the range "
                "of float32; squares of gradients are lost in others.)"
            )

    def _check_layers(self) -> None:
        if not isinstance(self.scan_layers, bool) and self.scan_layers != "auto":
            raise ValueError(f'{caller()}: scan_layers must be True, False or "auto", got {self.scan_layers!r}.')
        if self.scan_layers is False and self.plan.pipeline is not None:
            raise ValueError(
                f"{caller()}: scan_layers=False, and the plan has a pipeline, whose layers are a loop on each stage. "
                "Leave scan_layers out, or use a plan without pipeline."
            )
        if self.remat not in REMAT and not (is_integer(self.remat) and int(self.remat) > 0):
            choices = ", ".join(map(repr, REMAT))
            raise ValueError(f"{caller()}: remat must be {choices} or a number of bytes, got {self.remat!r}.")
        if self.compiled is not None and self.remat not in REMAT:
            raise ValueError(
                f"{caller()}: with compiled=, remat must be a word, as nothing is compiled to choose it by bytes. "
                "step.report() of the step that was saved says which."
            )

    def _check_offload(self) -> None:
        found, choices = self.offloaded, get_args(Offload)
        if unknown := [what for what in found if what not in choices]:
            raise ValueError(
                f'{caller()}: offload must be "optimizer", "activations" or both, ("optimizer", "activations"), got '
                f"{unknown[0]!r}."
            )
        if "optimizer" in found and self.moment_dtype is not None:
            raise NotImplementedError(
                f'{caller()}: offload="optimizer" is not there for moments in 16 bits. Use one of the two: '
                "moment_dtype=None, or offload=None."
            )
        if "activations" in found and self.plan.pipeline is not None:
            raise NotImplementedError(
                f'{caller()}: offload="activations" is not there for a pipeline, whose stages hold the inputs of '
                'microbatches. Use offload="optimizer", remat="block", or a plan without pipeline.'
            )
        object.__setattr__(self, "offload", tuple(sorted(set(found))))  # however it was said

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What lies in the host's memory."""
        given: object = self.offload
        if given is None:
            return ()
        return tuple(cast(Sequence[str], given)) if _is_list(given) else (cast(str, given),)

    @property
    def precision(self) -> Precision:
        """What the loss is computed in."""
        return Precision(self.compute_dtype, self.mixed_precision or "params")

    def clip(self, grads: T, norm: jax.Array) -> T:
        """Gradients as the optimizer is given them."""
        return clipped(grads, norm, max_norm=self.clip_grad_norm, max_value=self.clip_grad_value)

    @property
    def label(self) -> str:
        """What `trainable` says, as one text; empty without it."""
        return ", ".join(self._globs("trainable", "netD.**"))

    @property
    def watched(self) -> list[str]:
        """The modules of `watch`."""
        return self._globs("watch", "layers.*")

    def _globs(self, option: str, example: str) -> list[str]:
        given: object = getattr(self, option)
        if given is None:
            return []
        given = [given] if isinstance(given, str) else given
        globs = [glob for glob in cast(list[object], given) if isinstance(glob, str)] if _is_list(given) else []
        if not globs or len(globs) < len(cast(list[object], given)):
            raise TypeError(
                f'{caller()}: {option} must be a name or a glob, such as "{example}", or a list of these, got '
                f"{getattr(self, option)!r}."
            )
        return globs

    def trained(self, held: Holdings) -> frozenset[str] | None:
        """Find the parameters that the step trains; None if these are all that require gradients.

        Raises:
            ValueError: A glob of `trainable` finds none.
        """
        if self.trainable is None:
            return None
        found: set[str] = set()
        for glob in self._globs("trainable", "netD.**"):
            if not (own := set(filter(make_matcher(glob), held.trainable))):
                frozen = [name for name in held.frozen if make_matcher(glob)(name)]
                why = f"{', '.join(frozen[:4])} does not require gradients" if frozen else "none has such a name"
                raise ValueError(
                    f"{caller()}: trainable={glob!r} finds no trainable parameter: {why}. There are "
                    f"{', '.join(list(held.trainable)[:8])}{', ...' * (len(held.trainable) > 8)}. As in a plan, * "
                    "stands for one part of a name, and ** for any number of them."
                )
            found |= own
        return frozenset(found)

    def batch_layout(self) -> BatchLayout:
        """Give the placement of the leaves of a batch."""
        return BatchLayout(self.mesh, self.batch_spec, self.plan.context, rows=self.plan.rows)

    def layers(self, plan: ResolvedPlan, moments: ResolvedPlan, names: list[str]) -> LayerOptions:
        """Give what concerns repeated layers, for a model with entries of these names."""
        both = [(name, *(found.entries[name] for found in (plan, moments))) for name in names]
        specs = [(name, PartitionSpec(*own.padded_spec, *moment.padded_spec)) for name, own, moment in both]
        cuts = tuple((name, kept.cut) for name, kept in plan.kept.items() if kept.cut is not None)
        rows = self.batch_layout().data_axes
        padded = {name for name, kept in plan.kept.items() if isinstance(kept.form, Padded)}
        used = ((name, _in_use(plan, name, rows)) for name in names if name not in padded)
        uses = tuple((name, spec) for name, spec in used if spec is not None)
        # layers differ where any of the two does
        return LayerOptions(self.scan_layers, self.remat, "activations" in self.offloaded, tuple(specs), cuts, uses)

    def for_evaluation(self) -> "StepOptions":
        """The same for a step without a backward pass, which takes a batch as it comes."""
        return dataclasses.replace(
            self,
            optimizer_plan=None,
            trainable=None,
            remat="none",
            offload=None,
            accumulate_steps=1,
            clip_grad_norm=None,
            clip_grad_value=None,
            ema=None,
            moment_dtype=None,
            watch=None,
            compiled=None,
        )
