"""A captured layer as one opaque operator in the graph of the whole, its backward pass as another."""

import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.fx import Node

from torch_shard._capture import Captured, read_by
from torch_shard._common.fx import depending_on, outputs_of
from torch_shard._scan.siblings import Bundle, Refused, Restart, Siblings

Origin = Literal["buffer", "outside", "constant", "cotangent"]
"""The origin of an input of a region."""


@dataclasses.dataclass(eq=False)
class Region:
    """One captured layer, forward and backward.

    Attributes:
        group: Whose layer it is.
        number: Of the call that it was captured from.
        graph: `(*buffers, *other tensors, *cotangents) -> (*results, *gradients, *new buffers)`, functional.
        inputs: For each input of the graph, where it comes from, and its number among those.
        constants: Tensors that the layer makes of Python's numbers.
        num_results: How many results the layer has; new values of buffers that it assigned are
            among them, and what it left behind.
        gradients: For each gradient, the number of the input that it belongs to, cotangents not counted.
        rules: What the backward passes of its `autograd.Function`s read from outside.
        num_draws: How many random operators it has.
        differentiable: Which results require a gradient.
        used: Of these, which have a cotangent: the loss depends on them.
        made: The tensors of the call that it was captured from, by their numbers in the record; until it is released.
        remat: Whether the user's own checkpoint computes it again in the backward pass.
    """

    group: Siblings
    number: int
    graph: Captured[int]
    inputs: list[tuple[Origin, int]]
    constants: list[torch.Tensor]
    num_results: int
    gradients: list[int]
    rules: dict[type[torch.autograd.Function], tuple[Hashable, ...]]
    num_draws: int
    differentiable: list[bool]
    used: tuple[bool, ...]
    remat: bool = False
    made: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> list[tuple[Origin, int]]:
        """The inputs that are not cotangents."""
        return [(kind, number) for kind, number in self.inputs if kind != "cotangent"]

    @property
    def fakes(self) -> list[torch.Tensor]:
        """Fakes of the outputs of the graph."""
        return [node.meta["val"] for node in outputs_of(self.graph.module.graph)]

    @property
    def results(self) -> list[Node]:
        """What the forward pass gives: results, and new values of buffers written in place."""
        outputs = outputs_of(self.graph.module.graph)
        return outputs[: self.num_results] + outputs[self.graph.num_outputs :]

    def reached(self, present: Iterable[bool]) -> list[bool]:
        """Tell of each gradient whether it depends on cotangents, of which some are absent."""
        graph = self.graph.module.graph
        nodes = zip(graph.find_nodes(op="placeholder"), self.inputs, strict=True)
        cotangents = [node for node, (kind, _) in nodes if kind == "cotangent"]
        chosen = depending_on(itertools.compress(cotangents, present))
        return [node in chosen for node in outputs_of(graph)[self.num_results : self.graph.num_outputs]]


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer.

    Attributes:
        region: Which it is.
        path: Of the module.
        place: Where its random numbers begin.
        arguments: For each tensor of the region, which argument of the operator it is, or a member of which bundle.
        bundles: Which arguments are bundles.
        number: Which call of its group it is.
        note: Takes the reason if the capture is to start again.
        used: Which results the loss was seen to depend on, of those with a gradient; None before the backward pass.
    """

    region: Region
    path: str
    place: int
    arguments: Sequence[tuple[int, int | None]]
    bundles: Mapping[int, Bundle]
    number: int
    note: Callable[[Restart], None]
    used: tuple[bool, ...] | None = None

    @functools.cached_property
    def gradients(self) -> dict[int, dict[int | None, int]]:
        """For each argument with a gradient, the numbers of the region's that it is made of, by member."""
        found: dict[int, dict[int | None, int]] = {}
        for number, position in enumerate(self.region.gradients):
            argument, member = self.arguments[position]
            found.setdefault(argument, {})[member] = number
        return found

    def cotangents(self, given: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, bool]]:
        """Cotangents that the region has, and whether each was given; zeros if not.

        That may be: in one of several backward passes, or as it was not known yet what the loss depends on.
        """
        results = list(itertools.compress(zip(given, self.region.fakes, strict=False), self.region.differentiable))
        seen = tuple(grad is not None for grad, _ in results)
        self.used = seen if self.used is None else tuple(map(operator.or_, seen, self.used))
        chosen = itertools.compress(results, self.region.used)
        return [
            (torch.zeros(fake.shape, dtype=fake.dtype, device="cpu"), False) if grad is None else (grad, True)
            for grad, fake in chosen
        ]


CALLS: "weakref.WeakValueDictionary[int, Call]" = weakref.WeakValueDictionary()
"""The calls in captures, by their numbers in the graphs."""

torch.library.define("torch_shard::layer", "(int call, Tensor[] tensors) -> Tensor[]")

torch.library.define("torch_shard::layer_backward", "(int call, Tensor token, Tensor[] grads) -> Tensor[]")


# They are only captured, never run.


@torch.library.register_fake("torch_shard::layer")
def _layer_shapes(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*(_like(node.meta["val"]) for node in CALLS[call].region.results), torch.empty(0, device="cpu")]


@torch.library.register_fake("torch_shard::layer_backward")
def _gradient_shapes(call: int, token: torch.Tensor, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    found, region = CALLS[call], CALLS[call].region
    fakes = region.fakes[region.num_results : region.graph.num_outputs]
    return [
        torch.empty((), device="cpu") if argument in found.bundles else _like(fakes[numbers[None]])
        for argument, numbers in found.gradients.items()
    ]


LAYER, LAYER_BACKWARD = torch.ops.torch_shard.layer.default, torch.ops.torch_shard.layer_backward.default


def _like(fake: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")


class RegionFunction(torch.autograd.Function):
    """`apply(number of the call, *tensors) -> results`, in the trace of the whole."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call = CALLS[number]
        region = call.region
        *outputs, ctx.token = torch.ops.torch_shard.layer(number, list(tensors))  # the backward pass needs this call
        ctx.number = number
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *(tensors[i] for i in _kept(call))
        )  # for autograd's check that nobody writes to them in between
        constant = [not d for d in region.differentiable]
        ctx.mark_non_differentiable(*itertools.compress(outputs, constant), *outputs[len(constant) :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call = CALLS[ctx.number]
        assert ctx.saved_tensors is not None
        if torch.is_grad_enabled():
            call.note(Refused(None, "the loss takes a derivative of its gradient"))
            known = dict(zip(_kept(call), _no_gradients(ctx.saved_tensors), strict=True))
            return None, *(known.get(argument) for argument in range(len(ctx.needs_input_grad) - 1))
        for function, then in call.region.rules.items():
            if read_by(function.backward) != then:
                why = f"{function.__name__}.backward reads a value that changes after the layer has run"
                call.note(Refused(call.region.group, why))
        chosen = call.cotangents(cotangents)
        found = torch.ops.torch_shard.layer_backward(ctx.number, ctx.token, [c for c, _ in chosen])
        grads = dict(zip(call.gradients, found, strict=True))
        if not all(given for _, given in chosen):  # autograd has no gradient where no path leads, rather than zeros
            reached = call.region.reached(given for _, given in chosen)
            grads = {i: g for i, g in grads.items() if any(reached[n] for n in call.gradients[i].values())}
        return None, *(grads.get(argument) for argument in range(len(ctx.needs_input_grad) - 1))


class UnknownResults(torch.autograd.Function):
    """`apply(fakes, *tensors) -> results` like these fakes, in a capture that starts again: no value matters.

    They depend on the tensors, so that autograd finds a way from the one to the other.
    """

    @staticmethod
    def forward(ctx: Any, fakes: list[torch.Tensor], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = tuple(map(_like, fakes))
        ctx.save_for_backward(*tensors)
        pairs = zip(outputs, fakes, strict=True)
        ctx.mark_non_differentiable(*(output for output, fake in pairs if not fake.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_no_gradients(ctx.saved_tensors)


def _kept(call: Call) -> list[int]:
    """The arguments of a call that autograd saves."""
    kinds = zip(call.arguments, call.region.tensors, strict=True)
    return list(dict.fromkeys(argument for (argument, _), (kind, _) in kinds if kind != "buffer"))


def _no_gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Zeros, of which there are derivatives again."""
    return [tensor * 0 if tensor.requires_grad else None for tensor in tensors]
