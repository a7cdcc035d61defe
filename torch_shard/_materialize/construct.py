"""Modules under construction: a constructor, or initialisers alone, run on the fakes of a capture."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_shard._capture import Captured, capture, is_fake
from torch_shard._common.patching import patched
from torch_shard._entries import OF_EVERY_MODULE, TensorPlaces, holdings, shared_storage, with_values
from torch_shard._lowering import keeps_whole, missing_lowerings
from torch_shard._materialize.slices import Slice, is_constant

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


# Refusals, by name, of what cannot be initialised as torch would have done it.


_CONSTRUCTOR = (
    "Pass the constructor instead of the module, which runs all of it: materialize(lambda: {}(...), mesh, plan)"
)


def refuse(faults: Mapping[str, str], what: str, remedy: str) -> None:
    """Raise an error that lists faults by name, if there are any."""
    if faults:
        lines = "\n".join(f"  {name}: {fault}" for name, fault in faults.items())
        raise ValueError(f"materialize: {what}\n\n{lines}\n\n{remedy}")


def refuse_views(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse entries that share memory without being one tensor."""
    if (names := shared_storage(tensors)) is not None:
        raise NotImplementedError(
            f"materialize: {names[0]} and {names[1]} share memory: one is a view of the other, or both are views of "
            "one tensor. On a mesh each has its own. Register a .clone() as one of them, or make the view in forward."
        )


def refuse_unusable(construction: Construction, slices: Mapping[str, Slice]) -> None:
    """Refuse tensors without values, and those that JAX has no operators for."""
    metas = {name: "on the meta device" for name in slices if construction.tensors[name].device.type == "meta"}
    refuse(
        metas,
        "the callable returns tensors without values.",
        "Leave torch.device('meta') out of it, as nothing is computed before it is on its shards; or pass the module, "
        "and say init=.",
    )
    missing = [
        f"  {name}: {node.target}"
        for name, graph_slice in slices.items()
        for node in (
            missing_lowerings(n for n in graph_slice.nodes if not is_constant(n)) if graph_slice.streams else ()
        )
    ]
    if missing:
        raise NotImplementedError(
            "materialize: these are computed by operators without a lowering to JAX.\n\n"
            + "\n".join(missing)
            + "\n\nWrite the initialiser with other torch operators, or build the model on the CPU and place(model, "
            "mesh, plan)."
        )


def check_init(model: nn.Module, names: list[str], init: Init | None) -> Init:
    """Refuse a module on the meta device of which it is not said how its values come about.

    Returns:
        `init`.

    Raises:
        ValueError: `init` is missing or names a method that no submodule has; or a tensor that is neither a parameter
            nor a buffer has no values, which no initialiser gives.
    """
    kind = type(model).__name__
    if init is None:
        raise ValueError(
            f"materialize: a module on the meta device does not say how its values come about.\n\n"
            f"  {kind}: {len(names)} entries without values ({', '.join(names[:3])}{', ...' * (len(names) > 3)})\n\n"
            f'{_CONSTRUCTOR.format(kind)}; or say init="reset_parameters", if these initialisers of its layers are '
            "all that it needs; or init=function of a module."
        )
    if isinstance(init, str) and not any(initialiser_of(m, init) for m in model.modules()):
        raise ValueError(
            f'materialize: init="{init}" must name a method of the module or of one in it, and {kind} has none of '
            'that name. Say init="reset_parameters" for the initialisers of torch\'s own layers, or init=function of '
            "a module."
        )
    refuse(
        dict.fromkeys(meta_attributes(model), "a tensor on the meta device that is neither a parameter nor a buffer"),
        "no initialiser gives these values.",
        f"{_CONSTRUCTOR.format(kind)}.",
    )
    return init


def refuse_unwritten(names: Iterable[str], kind: str, is_module: bool) -> None:
    """Refuse entries whose memory nobody has written."""
    remedy = (
        f"{_CONSTRUCTOR.format(kind)}; or say how to initialise these, init=function of a module; or load their values."
        if is_module
        else "Initialise them in the constructor (torch.nn.init, or torch.zeros for torch.empty)."
    )
    what = "no initialiser writes these." if is_module else "the constructor leaves these unwritten."
    refuse(dict.fromkeys(names, "memory that was never written"), what, remedy)


def refuse_mixed(slices: Mapping[str, Slice], valued: set[str]) -> None:
    """Refuse entries that come from the same random numbers as entries that have values already."""
    order = list(slices)
    groups = [{name, *(order[number] for number in graph_slice.streams)} for name, graph_slice in slices.items()]
    mixed = {n for group in groups if group & valued and group - valued for n in group - valued}
    refuse(
        dict.fromkeys(sorted(mixed), "computed from the same random numbers as an entry that has values"),
        "entries without values belong together with entries that have some.",
        "Load all of them, or none.",
    )
