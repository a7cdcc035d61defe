"""The rules that a transformers model has for its parameters and modules: which counts for a name, what it asks for.

Read from transformers 5.23: `distributed/tensor_parallel.py`, `expert_parallel.py` and `fsdp.py`.
"""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn

_WRAPPERS = re.compile(
    r"(?<![^.])(?:base_layer|original_module|modules_to_save\.[^.]+|_orig_mod|_checkpoint_wrapped_module)\."
)
"""What peft, torch.compile and checkpointing put between a module's name and its parameters'."""


@dataclass(frozen=True)
class Rule:
    """What a plan of transformers says of a name.

    Attributes:
        style: By name.
        key: The plan's.
    """

    style: str
    key: str


class Rules:
    """One plan of a model, or of the models in a wrapper."""

    def __init__(self, plans: Mapping[str, Mapping[str, str]]) -> None:
        self.plans = plans

    @classmethod
    def of(cls, model: nn.Module, kind: str) -> "Rules":
        """Those of the outermost modules that have some.

        Args:
            model: A `PreTrainedModel`, or a module that holds some.
            kind: `"tp_plan"`, `"ep_plan"` or `"fsdp_plan"`.
        """
        plans: dict[str, Mapping[str, str]] = {}
        for name, module in model.named_modules():
            if not any(is_within(name, owner) for owner in plans) and (plan := _plan_of(module, kind)):
                plans[name] = plan
        return cls(plans)

    def __bool__(self) -> bool:
        return bool(self.plans)

    @property
    def all(self) -> list[Rule]:
        """The rules, whatever they match."""
        return [Rule(style, key) for plan in self.plans.values() for key, style in plan.items()]

    def of_module(self, name: str) -> Rule | None:
        """The rule of a module."""
        return next(self._of(name, slice(1)), None)

    def of_parameter(self, name: str) -> Rule | None:
        """The rule of a parameter or else of its module, as transformers looks it up."""
        return next(self._of(name, slice(2)), None)

    def above(self, name: str) -> Rule | None:
        """The rule of the closest module that holds a parameter."""
        return next(self._of(name, slice(1, None)), None)

    def holds(self, key: str) -> bool:
        """Tell whether a key of another plan is one of this plan's, or below one."""
        return any(is_within(key, owner) for plan in self.plans.values() for owner in plan)

    def _of(self, name: str, which: slice) -> Iterator[Rule]:
        """The rules of what a name says, and of the modules around it, in the words of the plan that speaks of it.

        As transformers looks for it (`replace_layer_number_by_wildcard`), `*` stands for the numbers of layers; of two
        numbers next to each other, its expression replaces the first alone.
        """
        owner = next((owner for owner in self.plans if is_within(name, owner)), None)
        if owner is None:
            return
        own = _WRAPPERS.sub("", name[len(owner) :].removeprefix(".") + ".").removesuffix(".")
        parts, plan = re.sub(r"\.\d+(\.|$)", r".*\1", own).split("."), self.plans[owner]
        keys = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        yield from (Rule(plan[key], key) for key in keys[which] if key in plan)


def is_within(name: str, module: str) -> bool:
    """Tell whether a name is that of a module, or of something in it; the model itself has none."""
    return not module or name == module or name.startswith(f"{module}.")


def _plan_of(module: nn.Module, kind: str) -> Mapping[str, str]:
    """Its own: a wrapper that passes attributes on to what it holds has none."""
    if not (hasattr(type(module), kind) or kind in vars(module)):
        return {}
    plan = cast(object, getattr(module, kind))
    return cast(Mapping[str, str], plan) if isinstance(plan, Mapping) else {}


@dataclass(frozen=True)
class Style:
    """One of `transformers.distributed.parallel_utils.ALL_PARALLEL_STYLES`.

    Attributes:
        dim: That it splits, from the end if it is negative; None where it splits none.
        pieces: Of that dim, each of which is split by itself: 2 where gate and up are one parameter.
        skips: The parameters that it leaves whole: "bias", those of that name; "vectors", those of one dim.
        note: What is made of its work on activations and gradients.
    """

    dim: int | None = None
    pieces: int = 1
    skips: str = ""
    note: str = ""

    def dim_of(self, parameter: str, num_dims: int) -> int | None:
        """The dim of a parameter that it splits, from 0."""
        skipped = (self.skips == "bias" and parameter == "bias") or (self.skips == "vectors" and num_dims == 1)
        if self.dim is None or skipped or num_dims == 0:
            return None
        dim = max(num_dims + self.dim, 0) if self.dim < 0 else self.dim  # of a vector, its only one
        return dim if dim < num_dims else None


_COLUMN, _ROW = Style(-2), Style(-1, skips="bias")
_PARTIAL = "nothing to do: no gradient is one device's part"
_OUTPUT = "nothing to do: no output is one device's part"

STYLES = {
    "colwise": _COLUMN,
    "colwise_gather_output": _COLUMN,
    "colwise_rep": _COLUMN,
    "rowwise": _ROW,
    "rowwise_split_input": _ROW,
    "rowwise_rep": _ROW,
    "packed_colwise": Style(-2, pieces=2),
    "packed_rowwise": Style(-1, pieces=2, skips="vectors"),
    "embedding_rowwise": Style(0),
    "embedding_colwise": Style(1),
    "grouped_gemm": Style(0),
    "moe_tp_experts": Style(note="its parameters have rules of their own"),
    "ep_dispatch_experts": Style(note="its parameters have rules of their own"),
    "local_params": Style(note="its parameters have rules of their own"),
    "replicate": Style(note="whole"),
    "sequence_parallel": Style(note="what it takes and returns is split along the sequence"),
    "replicated_with_grad_allreduce": Style(note=_PARTIAL),
    "mla_kv_a_proj": Style(note=_PARTIAL),
    "all_reduce": Style(note=_OUTPUT),
    "moe_identity_expert": Style(note=_OUTPUT),
}
"""By name; `colwise_rep` and `rowwise_rep` are older names."""

FSDP_STYLES = {
    "free_full_weight": "free_full_weight",
    "keep_full_weight": "keep_full_weight, stored alike: XLA decides for how long it is gathered",
}
"""What is said of an entry that is split for storage alone."""
