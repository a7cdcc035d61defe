"""Refusals, by name, of what cannot be initialised as torch would have done it."""

import dis
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_shard._lowering import missing_lowerings_of
from torch_shard._materialize.construct import Construction, Init, blank, initialise, meta_attributes
from torch_shard._materialize.slices import Slice, is_constant
from torch_shard._sharding import entry_of

_CONSTRUCTOR = (
    "Pass the constructor instead of the module, which runs all of it: materialize(lambda: {}(...), mesh, plan)"
)

_OWN_INITIALISERS = ("_init_weights", "init_weights", "_initialize_weights", "initialize_weights", "weight_init")

_RESETS = ("reset_parameters", "_reset_parameters")


def refuse(faults: Mapping[str, str], what: str, remedy: str) -> None:
    """Raise an error that lists faults by name, if there are any.

    Raises:
        ValueError: There are.
    """
    if faults:
        lines = "\n".join(f"  {name}: {fault}" for name, fault in faults.items())
        raise ValueError(f"materialize: {what}\n\n{lines}\n\n{remedy}")


def refuse_views(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse entries that share memory without being one tensor.

    Raises:
        NotImplementedError: Two do.
    """
    seen: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel() and tensor.device.type in ("cpu", "meta"):
            first = seen.setdefault(tensor.untyped_storage()._cdata, name)
            if first != name:
                raise NotImplementedError(
                    f"materialize: {first} and {name} share memory: one is a view of the other, or both are views of "
                    "one tensor. On a mesh each has its own. Register a .clone() as one of them, or make the view in "
                    "forward."
                )


def refuse_unusable(construction: Construction, slices: Mapping[str, Slice]) -> None:
    """Refuse tensors without values, and those that JAX has no operators for.

    Raises:
        ValueError: A tensor is on the meta device.
        NotImplementedError: An operator has no lowering.
    """
    metas = {name: "on the meta device" for name in slices if construction.tensors[name].device.type == "meta"}
    refuse(
        metas,
        "the callable returns tensors without values.",
        "Leave torch.device('meta') out of it, as nothing is computed before it is on its shards; or pass the module.",
    )
    missing = [
        f"  {name}: {node.target}"
        for name, graph_slice in slices.items()
        for node in (
            missing_lowerings_of(n for n in graph_slice.nodes if not is_constant(n)) if graph_slice.streams else ()
        )
    ]
    if missing:
        raise NotImplementedError(
            "materialize: these are computed by operators without a lowering to JAX.\n\n"
            + "\n".join(missing)
            + "\n\nWrite the initialiser with other torch operators, or build the model on the CPU and place(model, "
            "mesh, plan)."
        )


def check_reborn(model: nn.Module, names: list[str], init: Init | None) -> None:
    """Refuse a module whose entries got other values from its constructor than initialisers alone would give.

    Raises:
        ValueError: All such entries are listed.
    """
    remedy = f"{_CONSTRUCTOR.format(type(model).__name__)}; or say how to initialise, init=function of a module."
    refuse(
        dict.fromkeys(meta_attributes(model), "a tensor on the meta device that is neither a parameter nor a buffer"),
        "no initialiser gives these values.",
        remedy,
    )
    if init is None:
        faults = {type(m).__name__: found for m in model.modules() for found in _own_initialisers(type(m))}
        refuse(faults, "modules have initialisers of their own, which reset_parameters does not run.", remedy)
    known = {init.__code__} if isinstance(init, types.FunctionType | types.MethodType) else set()
    faults = {
        type(m).__name__: f"{where} may write through .data, which leaves no trace in the module"
        for m in model.modules()
        for where in _data_writers(type(m), known)
    }
    refuse(faults, "it cannot be told whether the constructor initialised entries in a way of its own.", remedy)
    copy = blank(model)
    writes = initialise(copy, names, init)
    found = {name: entry_of(model, name)._version for name in names}
    faults = {
        name: f"{found[name]} writes in place by the constructor, {total} by reset_parameters{' and init' * bool(init)}"
        for name, (own, total) in writes.items()
        if (found[name] > total if total > own else found[name] != own)
    }
    refuse(faults, "the constructor initialised these in another way than reset_parameters does.", remedy)
    own = {name for name, (own, total) in writes.items() if own and own == total}
    refuse(
        dict(_replaced(model, own)),
        "it cannot be told whether the constructor initialised these in a way of its own.",
        remedy,
    )


def _is_of_torch(module_name: str | None) -> bool:
    return (module_name or "").split(".")[0] == "torch"


def _own_initialisers(kind: type) -> Iterator[str]:
    for name in _OWN_INITIALISERS:
        if callable(getattr(kind, name, None)):
            yield f"{name}() exists; say init=, or pass the constructor"
            return


def _data_writers(kind: type, known: set[types.CodeType]) -> Iterator[str]:
    """Functions that a constructor may call, as far as its code names them, and that write in place to `.data`.

    What it calls by other ways (of another object, out of a container) is not found.
    """
    for function in _constructors(kind, known):
        names = set(_names(function.__code__))
        if "data" in names and any(name.endswith("_") and not name.endswith("__") for name in names):
            yield f"{function.__qualname__}()"


def _replaced(model: nn.Module, names: set[str]) -> Iterator[tuple[str, str]]:
    """Entries of submodules in whose places a constructor may have put others, with as many writes."""
    paths = {name: name.rpartition(".") for name in sorted(names)}
    for path, module in model.named_modules():
        for function in _constructors(type(module), set()):
            stored = set(_stored(function.__code__))
            for name, (owner, _, leaf) in paths.items():
                if owner != path and f"{owner}.".startswith(f"{path}." if path else "") and leaf in stored:
                    yield name, f"{function.__qualname__}() puts another tensor in the place of some {leaf}"


def _loads_self(step: dis.Instruction, code: types.CodeType) -> bool:
    loaded = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return step.opname.startswith("LOAD_FAST") and loaded in code.co_varnames[:1]


def _stored(code: types.CodeType) -> Iterator[str]:
    """Names of attributes that code assigns to others than its first argument; `weight` where it gives one."""
    for found in _codes(code):
        steps = itertools.pairwise(dis.get_instructions(found))
        yield from (step.argval for last, step in steps if step.opname == "STORE_ATTR" and not _loads_self(last, found))
        keywords = [name for names in found.co_consts if isinstance(names, tuple) for name in names]
        yield from ["weight"] * ("_weight" in keywords)


def _constructors(kind: type, seen: set[types.CodeType]) -> Iterator[types.FunctionType]:
    """The functions that a constructor may call, as far as its code names them, itself included."""
    for owner in kind.__mro__:
        if "__init__" in vars(owner) and not _is_of_torch(owner.__module__):
            yield from _reached(owner.__init__, kind, seen)


def _reached(function: Any, kind: type, seen: set[types.CodeType]) -> Iterator[types.FunctionType]:
    code = getattr(function, "__code__", None)
    if code is None or code in seen or _is_of_torch(getattr(function, "__module__", "")):
        return
    seen.add(code)
    yield function
    for name in set(_names(code)) - set(_RESETS):
        found = getattr(kind, name, None) or function.__globals__.get(name)
        if isinstance(found, types.FunctionType):
            yield from _reached(found, kind, seen)


def _names(code: types.CodeType) -> Iterator[str]:
    for found in _codes(code):
        yield from found.co_names


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def refuse_unwritten(names: Iterable[str], kind: str, is_module: bool) -> None:
    """Refuse entries whose memory nobody has written.

    Raises:
        ValueError: There are some.
    """
    remedy = (
        f"{_CONSTRUCTOR.format(kind)}; or say how to initialise these, init=function of a module; or load their values."
        if is_module
        else "Initialise them in the constructor (torch.nn.init, or torch.zeros for torch.empty)."
    )
    what = "no initialiser writes these." if is_module else "the constructor leaves these unwritten."
    refuse(dict.fromkeys(names, "memory that was never written"), what, remedy)


def refuse_mixed(slices: Mapping[str, Slice], valued: set[str]) -> None:
    """Refuse entries that come from the same random numbers as entries that have values already.

    Raises:
        ValueError: There are some.
    """
    order = list(slices)
    groups = [{name, *(order[number] for number in graph_slice.streams)} for name, graph_slice in slices.items()]
    mixed = {n for group in groups if group & valued and group - valued for n in group - valued}
    refuse(
        dict.fromkeys(sorted(mixed), "computed from the same random numbers as an entry that has values"),
        "entries without values belong together with entries that have some.",
        "Load all of them, or none.",
    )
