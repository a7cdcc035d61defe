"""One capture of a loss: its graph, and what it has seen of the world around it."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import numpy as np
import torch

from torch_shard._capture import Guard, HostInputs, ModuleFlags
from torch_shard._loss.answers import Answers, HostValues, outline_of_loss
from torch_shard._loss.joint import LossShape
from torch_shard._lowering import GraphOutline
from torch_shard._scan import CapturedLayers


class CapturedLoss:
    """One capture of a loss, of which there may be several programs.

    Args:
        captured: The graph, its loops, and the groups of layers.
        model: The model.
        reads: What was read besides it.
        look_again: Captures it once more, and refuses it if it is another one.

    Attributes:
        answers: What came out of Python's questions.
        made_buffers: Buffers that forward registers, of constants: name, value, and whether a `state_dict` has it.
        others: Modules that ran without being part of the model (a teacher), with their training flags.
    """

    def __init__(
        self,
        captured: CapturedLayers[LossShape],
        model: torch.nn.Module,
        reads: Guard,
        look_again: "Callable[[CapturedLoss, HostInputs], None]",
    ) -> None:
        self.program, self.rolled, self.groups = captured
        self.answers = Answers(self.program.graph)
        self.made_buffers = self.program.graph.changed.made_buffers()
        self.effects = self.program.graph.effects
        self._reads = reads
        self._look_again = look_again

        # A reference that is dead by now was to a scaffold of the capture.
        of_model = {None, *model.modules()}
        self.others = ModuleFlags((ref, flag) for ref, flag in self.program.graph.modules if ref() not in of_model)

        modules = dict(cast(Iterable[tuple[str, torch.nn.Module]], model.named_modules()))
        for ref, _ in self.others:
            module = ref()
            if module is not None:
                modules[f"{type(module).__name__} ({id(module)})"] = module
        self._attributes = Guard.of_modules(modules.items(), model, self.effects.unread_places)

    @functools.cached_property
    def outline(self) -> GraphOutline:
        """The graph without its numbers."""
        return outline_of_loss(self.program.graph, self.rolled.calls if self.rolled else {}, self.others)

    def difference(self, other: "CapturedLoss") -> str | None:
        """The name of a value that was another one when another capture read it."""
        return self._reads.difference(other._reads) or self._attributes.difference(other._attributes)

    def reads_beside(self, other: "CapturedLoss") -> Guard | None:
        """What another capture has read, where that is not the same."""
        return None if self._reads.difference(other._reads) is None else other._reads

    def look_again(self, values: HostValues) -> None:
        """Capture it once more, and refuse it if it is another one now."""
        self._look_again(self, values.of(0))

        # A count of calls has gone on since the first capture, and was seen to be harmless.
        self._reads.renew()
        self._attributes.renew()

    @property
    def asks_for_types(self) -> bool:
        """Tell whether the user's own code names `type`, which nothing notes."""
        return self._reads.names("type")

    def is_same(self, other: "CapturedLoss") -> bool:
        """Tell whether another capture is the same program, after which the same is done."""
        return self.outline.is_same(other.outline) and self.effects.agreed(other.effects) is not None

    def take_effects(self, other: "CapturedLoss") -> None:
        """Do after a step what another capture says of the same: it may know better which numbers are old ones."""
        agreed = self.effects.agreed(other.effects)
        assert agreed is not None
        self.effects = agreed

    def outdated(self) -> str | None:
        """Say what has changed since the capture, of all that the signature does not tell; None if nothing has."""
        if not self.others.hold():
            return "a module beside the model was switched between train() and eval()"

        name = self.effects.outdated()
        if name is not None:
            return f"{name}, where it keeps a number of each step, was taken away or made anew"

        name = self._attributes.changed()
        if name is not None:
            return f"the attribute {name} has another value"

        name = self._reads.changed()
        return None if name is None else f"{name}, which the loss reads, has another value"

    @property
    def outside(self) -> Iterator[tuple[str, torch.Tensor | np.ndarray]]:
        """Tensors that it closes over or has asked values of, and NumPy arrays that were read, with their names."""
        leaves = itertools.chain(self._attributes.leaves, self._reads.leaves)
        names = {id(value): name for name, value in leaves if isinstance(value, torch.Tensor)}

        graph = self.program.graph
        tensors: list[torch.Tensor] = []
        for tensor, is_given in zip(graph.closure, self.answers.are_given, strict=False):
            if not is_given:
                tensors.append(tensor)
        for source in graph.host.sources.values() if graph.host else ():
            if isinstance(source, torch.Tensor):
                tensors.append(source)

        for tensor in tensors:
            yield names.get(id(tensor), "a tensor"), tensor
        yield from self._reads.arrays
