"""Modules under construction: a constructor, or initialisers alone, run on the fakes of a capture."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from torch_shard._capture import Captured, capture, is_fake
from torch_shard._common.patching import patched
from torch_shard._lowering import keeps_whole
from torch_shard._sharding import OF_EVERY_MODULE, TensorPlaces, holdings, with_values

Init = str | Callable[[nn.Module], None]

_CONTAINERS = (list, tuple, dict)


@dataclasses.dataclass(frozen=True)
class Construction:
    """A module whose tensors are fakes, and the graph that computes them.

    Attributes:
        module: As its constructor left it.
        tensors: What the graph computes, by name: the entries of the module, then tensors that are plain attributes.
        num_entries: How many of these are entries.
        graph: Without inputs but those that the constructor reached by itself.
    """

    module: nn.Module
    tensors: dict[str, torch.Tensor]
    num_entries: int
    graph: Captured[Any]

    @property
    def entries(self) -> list[str]:
        """Names of parameters and buffers, a tie by its first."""
        return list(self.tensors)[: self.num_entries]


def construct(make: Callable[[], Any]) -> Construction:
    """Run a constructor on fakes."""

    def run() -> Any:
        module = make()
        if not isinstance(module, nn.Module):
            raise TypeError(f"materialize: the callable must return a torch.nn.Module, got {type(module).__name__}.")
        entries = holdings(module).all
        others = {path: tensor for path, tensor in _attributes(module) if is_fake(tensor)}
        tensors = {**entries, **others}
        values = [t.detach() if t.device.type != "meta" else torch.zeros(()) for t in tensors.values()]
        return values, (module, tensors, len(entries))

    with _lazy_refused(), patched(nn.Module, "_apply", _on_fakes):
        graph = capture(run, [], keep=_keep, restore=False)
    module, tensors, num_entries = graph.aux
    return Construction(module, tensors, num_entries, graph)


def _on_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Module.to` and its kin on fakes, which cannot be swapped as PyTorch would: a tracer holds them."""

    def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if not all(map(is_fake, own)):
            return original(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        for param in filter(lambda p: p is not None, module._parameters.values()):
            with torch.no_grad():
                applied = fn(param)  # pyright: ignore[reportArgumentType]
            if applied is not param:
                param.data = applied  # pyright: ignore[reportOptionalMemberAccess]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fn(buffer)
        return module

    return apply


@contextlib.contextmanager
def _lazy_refused() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "Creating a new Tensor subclass Uninitialized" not in str(error):
            raise
        raise NotImplementedError(
            "materialize: the constructor makes lazy modules, which get their shapes in their first call. Make them "
            "under torch.device('meta') and call the module once, then pass it: materialize(module, mesh, plan); or "
            "name the shapes (nn.Linear for nn.LazyLinear)."
        ) from error


def _keep(op: torch._ops.OperatorBase, has_core_rule: bool) -> bool:
    """PyTorch's rule for `linspace` is not to the bit what its kernel gives."""
    return op is torch.ops.aten.linspace.default or keeps_whole(op, has_core_rule)


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are plain attributes of modules, or in lists and dicts that are."""
    entries = {id(t) for t in holdings(module).all.values()}
    for path, m in module.named_modules():
        for name, value in vars(m).items():
            if name not in OF_EVERY_MODULE and name not in ("_parameters", "_buffers"):
                found = _tensors_in(value, f"{path}.{name}" if path else name)
                yield from ((where, tensor) for where, tensor in found if id(tensor) not in entries)


def _tensors_in(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, _CONTAINERS):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(item, f"{path}[{key!r}]")


def meta_attributes(module: nn.Module) -> list[str]:
    """Plain attributes that are tensors without values."""
    return [path for path, tensor in _attributes(module) if tensor.device.type == "meta"]


def initialiser_of(module: nn.Module, name: str) -> Callable[[], Any] | None:
    """The method of this name that a module has; torch's `MultiheadAttention` and `Transformer` underscore theirs."""
    found = getattr(module, name, None)
    if found is None and name == "reset_parameters":
        found = getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _initialise(module: nn.Module, names: Iterable[str], init: Init) -> None:
    """Run `reset_parameters` of the modules that hold these entries, as their constructors did, and then `init`."""
    held = holdings(module).all
    wanted = {id(held[name]) for name in names}
    children_first: dict[nn.Module, None] = {}
    module.apply(children_first.setdefault)
    for m in children_first:
        reset = initialiser_of(m, "reset_parameters")
        if reset is not None and any(id(t) in wanted for t in (*m.parameters(), *m.buffers())):
            reset()
    if callable(init):
        module.apply(init)
    elif init != "reset_parameters":
        for m in children_first:
            if (method := initialiser_of(m, init)) is not None:
                method()


def construct_again(model: nn.Module, names: list[str], init: Init) -> Construction:
    """Record what the initialisers of a module would write into it, on fakes; the module itself stays as it is."""
    held = holdings(model).all
    copy = with_values(model, {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in held.items()})
    metas = holdings(copy).all

    def make() -> nn.Module:
        TensorPlaces(copy).replace([(t, torch.empty(t.shape, dtype=t.dtype)) for t in metas.values()])
        _initialise(copy, names, init)
        return copy

    return construct(make)
