"""Models with repeated layers that do more than compute: they write, remember, sample, hook, or leave values behind."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.tables.cases import BATCH
from tests.tables.layers import WIDTH, Block, Stack, _Rule, _Scaled


class InPlace(Block):
    """Writes to what it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += super().forward(x.clone())
        return x


class Viewing(Block):
    """Returns a view of what it was given, which the model writes to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1, 2, WIDTH // 2).view(x.shape) if x.ndim != 2 else x.view(x.shape)


class Remembering(Block):
    """Leaves a tensor behind in an attribute, for the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = x.square().mean()
        return super().forward(x)


class Sampling(Stack):
    """A tensor that blocks leave in a list of the model's own."""

    class Layer(Block):
        def __init__(self, seen: list[torch.Tensor]) -> None:
            super().__init__()
            self.leave = seen.append

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.leave(x.abs().mean())
            return super().forward(x)

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        super().__init__(lambda: self.Layer(self.seen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        return super().forward(x) * sum(self.seen)


class HandingOver(Stack):
    """The first block leaves what the others read, by a dict that all of them are given."""

    class Layer(Block):
        def forward(self, x: torch.Tensor, shared: dict[str, torch.Tensor]) -> torch.Tensor:
            first = shared.setdefault("first", self.norm(x))
            return super().forward(x) + first.sin() * self.norm(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, shared = self.start(x), {}
        for block in self.blocks:
            x = block(x, shared)
        return x + shared["first"]


class WithConstants(Block):
    """Tensors made of Python's numbers, one of them of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        empty = torch.tensor([])
        gates = torch.tensor([0.5, 1.5])
        return super().forward(torch.cat([empty, x * gates.repeat(WIDTH // 2)], -1))


class WritingAfter(Sampling):
    """What a block left is overwritten outside, also through a view, before and after it is read."""

    class Layer(Block):
        def __init__(self, seen: list[torch.Tensor]) -> None:
            super().__init__()
            self.leave = seen.append

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.leave(x.detach().abs())
            return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        y = Stack.forward(self, x)
        for i, left in enumerate(self.seen):
            y = y + left
            left[:, 0].mul_(i)
            y = y * left.cos()
        return y


class Listing(Stack):
    """Blocks are given a list to which they append, and return it."""

    class Layer(Block):
        def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            seen.append(x.tanh())
            if len(seen) > 1:
                seen[0] = seen[0] * 0.5
            return super().forward(x), seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        x, returned = self.start(x), None
        for block in self.blocks:
            x, returned = block(x, seen)
        assert returned is seen
        return x + sum(seen)


class LeavingRules(Stack):
    """Blocks leave what has a derivative of their own: the same values, other gradients."""

    class Layer(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            self.size = _Rule.apply(x.square().mean(), self.backward_scale)
            return x

    def __init__(self) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            block.backward_scale = float(i)  # pyright: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * sum(block.size for block in self.blocks)  # pyright: ignore


class Recorded(Stack):
    """Records go in and come out, and a rule of autograd, which is no function of torch, takes what is in them."""

    @dataclasses.dataclass
    class Record:
        x: torch.Tensor

    class Layer(Block):
        def forward(self, given: Any) -> Any:
            return Recorded.Record(super().forward(_Scaled.apply(given.x, 0.5)))  # pyright: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = _Scaled.apply(block(self.Record(x)).x, 0.5)  # pyright: ignore
        return x


class Hooking(Block):
    """A hook on the graph of autograd."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda grads: tuple(self.scale * g for g in grads))
        return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # in full precision, for autocast has ended then
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class Casting(Stack):
    """Autocast around the blocks is not around their backward pass."""

    class Layer(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + _Product.apply(torch.tanh(_Product.apply(x, self.up.weight)), self.down.weight)  # pyright: ignore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return x


class Adding(Stack):
    """A sum that begins with another shape and dtype, and factors of all shapes."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(WIDTH,), (1,), (BATCH, 1), ()]
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = self.start(x), torch.zeros((), dtype=torch.int32)
        for block, factor in zip(self.blocks, self.factors, strict=True):
            x = block(x) * factor
            total = total + x
        return total


class _Late(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * _Late.scale


class ReadingLate(Block):
    """A rule of autograd that reads in the backward pass what the loss has set after the forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Late.apply(x))  # pyright: ignore


def scaled_late(model: nn.Module, batch: Any) -> torch.Tensor:
    _Late.scale = 1.0
    loss = F.mse_loss(model(batch[0]), batch[1])
    _Late.scale = 0.5
    return loss


class Observed(Stack):
    """Hooks within the blocks, and around them, change results and collect them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, args, out: self.seen.append(out) or 0.5 * out)
            block.down.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
            block.register_forward_hook(lambda module, args, out: self.seen.append(out.cos()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        return super().forward(x) + sum(t.mean() for t in self.seen)


_TABLES: dict[nn.Module, torch.Tensor] = {}


class Keeping(Block):
    """A table for each layer, made when it is first needed and kept for later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self not in _TABLES:
            _TABLES[self] = torch.arange(WIDTH).float().sin()
        return super().forward(x) + _TABLES[self]


def _weight_normed() -> nn.Module:
    block = Block()
    nn.utils.parametrizations.weight_norm(block.up)
    return block


class Branching(Stack):
    """Blocks have a second result, and leave a third; the loss depends on some of them."""

    class Layer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, left: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            left.append(self.side(x).cos())
            return super().forward(x), self.side(x).sin()

    def __init__(self, *, second: Sequence[int] = (), third: Sequence[int] = (), detached: Sequence[int] = ()) -> None:
        super().__init__(depth=6)
        self.second, self.third, self.detached = second, third, detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y, left = self.start(x), x, []
        for i, block in enumerate(self.blocks):
            x, side = block(x, left)
            x = x.detach() if i in self.detached else x
            y = y + side if i in self.second else y
        return x + y + sum(left[i] for i in self.third)
