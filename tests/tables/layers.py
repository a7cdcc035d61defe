"""Models with repeated layers, and which loops they are: `(iterations, layers in each)`, forward then backward."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tables.cases import BATCH, Case, regression

WIDTH, DEPTH = 8, 4
FORTH_AND_BACK = ((DEPTH, 1), (DEPTH, 1))


class Block(nn.Module):
    """Residual MLP; everything that a test varies is an option."""

    def __init__(self, scale: float = 1.0, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = DEPTH) -> None:
        super().__init__()
        self.start, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.up(x)))


class Counting(Block):
    """Assigns a buffer anew, and writes to another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        return super().forward(x) - self.mean


class Attending(nn.Module):
    """Takes a mask, positions and a memory; returns more than it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, *, memory: Any, mask: torch.Tensor, cache: None = None) -> dict[str, Any]:
        keys = x if memory is None else memory[0]
        scores = self.q(x) @ self.k(keys).transpose(-1, -2) + mask
        weights = scores.softmax(-1)
        return {"x": x + weights @ self.v(keys), "weights": weights, "memory": memory, "cache": cache}


class Transformer(nn.Module):
    """Two groups: an encoder, and a decoder that reads what the encoder gives; a learned bias for both."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(5, 5))
        self.encoder, self.decoder = (nn.ModuleList(Attending() for _ in range(DEPTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.bias + torch.triu(torch.full((5, 5), -1e9), 1)
        memory = self.start(x)
        y = memory.flip(1)
        for layer in self.encoder:
            memory = layer(memory, memory=None, mask=mask)["x"]
        for layer in self.decoder:
            y = layer(y, memory=(memory,), mask=mask)["x"]
        return y


class Collecting(Stack):
    """All results count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, seen = self.start(x), []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return torch.stack(seen).mean(0) + seen[1]


class Skipping(Stack):
    """The second half reads what the first half gave, last first; layers have factors of their own between them."""

    def __init__(self) -> None:
        super().__init__(depth=2 * DEPTH)
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2 * DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, seen = self.start(x), []
        for i, (block, factor) in enumerate(zip(self.blocks, self.factors, strict=True)):
            x = block(x) * factor
            if i < DEPTH:
                seen.append(x)
            else:
                x = x + seen.pop()
        return x


class Twice(Stack):
    """Every block has two turns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class Passing(nn.Module):
    """The first layer makes what the others are given, as T5 does with its bias."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            bias = self.table.sigmoid() if bias is None else bias
            return x + torch.tanh(self.lin(x) * bias), bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(DEPTH + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale * 2, None  # not the derivative: a rule that only PyTorch knows


class WithRule(Block):
    """A derivative of its own, with a number that only the rule reads."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.backward_scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Scaled.apply(x, 0.5)) + _Rule.apply(x, self.backward_scale)  # pyright: ignore


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale, None


class Checkpointed(Stack):
    """The user's own checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


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

    def __init__(self) -> None:
        super().__init__(self.Layer)

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

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        x, returned = self.start(x), None
        for block in self.blocks:
            x, returned = block(x, seen)
        assert returned is seen
        return x + sum(seen)


class Differing(Stack):
    """The loss depends on another result of the last block than of those before it."""

    class Layer(Block):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = super().forward(x)
            return x, (x * self.norm.weight).square().mean()

    def __init__(self) -> None:
        super().__init__(self.Layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, sizes = self.start(x), []
        for block in self.blocks:
            x, size = block(x)
            sizes.append(size)
        return x * sum(sizes[:-1])


class LeavingRules(Stack):
    """Blocks leave what has a derivative of their own: the same values, other gradients."""

    class Layer(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            self.size = _Rule.apply(x.square().mean(), self.backward_scale)
            return x

    def __init__(self) -> None:
        super().__init__(self.Layer)
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

    def __init__(self) -> None:
        super().__init__(self.Layer)

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

    def __init__(self) -> None:
        super().__init__(self.Layer)

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


_SIZES: list[torch.Tensor] = []
_TABLES: dict[int, torch.Tensor] = {}


class LeavingGlobally(Block):
    """To a list of the file, which the loss clears."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _SIZES.append(x.square().mean())
        return super().forward(x)


def with_global_sizes(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = F.mse_loss(model(batch[0]), batch[1]) + sum(_SIZES)
    _SIZES.clear()
    return loss


class Keeping(Block):
    """A table for each layer, made when it is first needed and kept for later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if id(self) not in _TABLES:
            _TABLES[id(self)] = torch.arange(WIDTH).float().sin()
        return super().forward(x) + _TABLES[id(self)]


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
        super().__init__(self.Layer, depth=6)
        self.second, self.third, self.detached = second, third, detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y, left = self.start(x), x, []
        for i, block in enumerate(self.blocks):
            x, side = block(x, left)
            x = x.detach() if i in self.detached else x
            y = y + side if i in self.second else y
        return x + y + sum(left[i] for i in self.third)


def _varied(change: Callable[[Stack], Any], **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Stack(**options)
        change(model)
        return model

    return build


def _alternating(model: Stack) -> None:
    for i, block in enumerate(model.blocks):
        block.scale = (1.0, 0.5)[i % 2]


def _frozen(model: Stack) -> None:
    for p in model.blocks[2].parameters():
        p.requires_grad_(False)


def penalty(model: nn.Module, batch: Any) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return F.mse_loss(y, batch[1]) + grad.square().mean()


def with_sizes(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1]) + sum(block.size for block in model.blocks)


@dataclasses.dataclass(frozen=True)
class Layered:
    """A case, the loops that it becomes, and what `step.report()` says of layers that are none."""

    case: Case
    loops: tuple[tuple[int, int], ...] = FORTH_AND_BACK
    says: str = ""


def _case(
    name: str, build: Callable[[], nn.Module], *loops: tuple[int, int], says: str = "", **options: Any
) -> Layered:
    shape = options.pop("shape", (WIDTH,))
    out = options.pop("out", WIDTH)
    rules = options.pop("rules", {})
    batch = options.pop("batch", regression(*shape, out=out))
    case = Case(name, build, batch, rules, **options)
    return Layered(case, loops or (() if says else FORTH_AND_BACK), says)


def _sequences() -> Any:
    return torch.randn(BATCH, 5, WIDTH), torch.randn(BATCH, 5, WIDTH)


MEGATRON = {"blocks.*.up.weight": P("model"), "blocks.*.up.bias": P("model"), "blocks.*.down.weight": P(None, "model")}
ONE_APART = {f"blocks.{i}.up.weight": P("model") for i in (0, 1, 2, 4, 5, 6)}

LAYERED = [
    _case("chain", Stack, rules=MEGATRON),
    _case("sequential", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(DEPTH)))),
    _case("batch norm", lambda: Stack(NormBlock)),
    _case("batch norm, eval", lambda: Stack(NormBlock), train=False),
    _case("buffers", lambda: Stack(Counting)),
    # The gradients of what several layers read are summed from the second layer on.
    _case("two groups", Transformer, (DEPTH, 1), (DEPTH, 1), (DEPTH - 1, 1), (DEPTH, 1), batch=_sequences),
    _case("collected", Collecting, (DEPTH, 1), (DEPTH - 1, 1)),
    _case("twice", Twice, *[(DEPTH, 1)] * 4),
    _case("alternating", _varied(_alternating, depth=6), (3, 2), (3, 2)),
    _case("a rule of autograd", lambda: Stack(WithRule)),
    _case("passed on", Passing, (DEPTH, 1), (DEPTH - 1, 1)),
    _case("checkpoint", lambda: Checkpointed(False)),
    _case("reentrant checkpoint", lambda: Checkpointed(True), (DEPTH, 1), (DEPTH, 2)),  # each computed again first
    _case("skips", Skipping, (DEPTH + 1, 1), (DEPTH - 1, 1), (DEPTH, 1), (DEPTH, 1)),
    _case("frozen", _varied(_frozen, depth=6), says="blocks.2"),
    _case("split otherwise", lambda: Stack(depth=7), says="blocks.3", rules=ONE_APART),
    _case("in place", lambda: Stack(InPlace), says="blocks.0: "),
    _case("a view", lambda: Stack(Viewing), says="a view"),
    _case("an attribute", lambda: Stack(Remembering), loss_fn=with_sizes),
    _case("a list", Sampling),
    _case("handed over", HandingOver, (DEPTH - 1, 1), (DEPTH - 1, 1)),
    _case("a second result of one", lambda: Branching(second=[2]), (2, 1), (3, 1), (3, 1), (2, 1)),
    _case("a second result of the last", lambda: Branching(second=[5]), (5, 1), (5, 1)),
    _case("a second result of the first", lambda: Branching(second=[0]), (5, 1), (5, 1)),
    _case("left behind by one", lambda: Branching(third=[2]), (2, 1), (3, 1), (3, 1), (2, 1)),
    _case("left behind by two", lambda: Branching(third=[1, 4]), (2, 3), (2, 3)),
    _case("only a second result", lambda: Branching(second=[1, 4], detached=[2, 5]), says="layers next to it"),
    _case("given a list", Listing, says="layers next to it are other programs"),
    _case("a rule that reads late", lambda: Stack(ReadingLate), says="_Late.backward reads", loss_fn=scaled_late),
    _case("a list of the file", lambda: Stack(LeavingGlobally), loss_fn=with_global_sizes),
    _case("kept tables", lambda: Stack(Keeping)),
    _case("forward hooks", Observed),
    _case("parametrized", lambda: Stack(_weight_normed)),
    _case("constants", lambda: Stack(WithConstants)),
    _case("written afterwards", WritingAfter),
    _case("results of the last", Differing, (DEPTH - 1, 1), (DEPTH - 1, 1)),
    _case("rules left behind", LeavingRules, says="are other programs"),
    _case("records and rules", Recorded),
    _case("hooks on the graph", lambda: Stack(Hooking), says="grad_fn"),
    _case("shapes between", Adding, says="do not take its result"),
    _case("autocast", Casting),
    _case("second derivative", Stack, says="derivative of its gradient", loss_fn=penalty),
]
