"""Refusals, by name, of what cannot be initialised as torch would have done it."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from torch_shard._lowering import missing_lowerings
from torch_shard._materialize.construct import Construction, Init, initialiser_of, meta_attributes
from torch_shard._materialize.slices import Slice, is_constant
from torch_shard._sharding import shared_storage

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
