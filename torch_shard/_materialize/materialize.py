"""Sharded initialization: each tensor of a module is computed on its shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn
from torch.fx import Node

from torch_shard._common.caller import public
from torch_shard._common.convert import host_array, to_host
from torch_shard._common.dtypes import has_x64, jax_dtype
from torch_shard._common.fx import sources_of
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call, check_kind, check_seed, unwrapped
from torch_shard._device import put, refuse_wide, wrap_array
from torch_shard._entries import TensorPlaces, holdings, refuse_hooks
from torch_shard._lowering import compiler_options, matmul_precision, operation
from torch_shard._materialize.construct import (
    Construction,
    Init,
    check_init,
    construct,
    construct_again,
    refuse_mixed,
    refuse_unusable,
    refuse_unwritten,
    refuse_views,
)
from torch_shard._materialize.slices import FUSED, Fill, Slice, call_in_torch, cut, fills_of, host_value, is_constant
from torch_shard._sharding import ShardingPlan, check_mesh, check_plan


@public
def materialize(
    model: nn.Module | Callable[[], nn.Module],
    mesh: Mesh,
    plan: ShardingPlan,
    *,
    seed: int = 0,
    init: Init | None = None,
) -> nn.Module:
    """Make a module whose tensors are born on their shards: none of them exists whole on a device or on the host.

    Args:
        model: What makes the module, a callable without arguments: it runs once, on tensors without memory, and all
            that it computes counts, however it does. Or a module made under `torch.device("meta")`, which does not
            say how its values come about: `init` does. Entries that have values already are placed as they are.
        mesh: The devices, with Auto axes.
        plan: Which entry is split how; checked as a whole before anything is computed.
        seed: Of the random numbers, from 0 to 2**32 - 1. Those of an entry depend on the seed and on its name alone:
            they are the same on every mesh, whatever else the module holds. They follow JAX's streams, not torch's
            generators.
        init: For a module on the meta device: the name of a method, called on each submodule that has it
            (`"reset_parameters"`, if the initialisers of torch's own layers are all that it needs), or a function,
            called on each submodule as by `Module.apply`; children first. As in their constructors, layers have run
            their own `reset_parameters` before.

    Returns:
        The module, on the jax device: the one that the callable made, or the one given, changed in place. Ties,
        `requires_grad` and non-persistent buffers are as torch has them. Tensors that are plain attributes are on the
        CPU.

    Raises:
        TypeError: `model` is neither, or the callable returns something else than a module; or an entry needs 64 bits
            that JAX has switched off.
        ValueError: The plan does not fit; a module on the meta device comes without `init`, or with the name of a
            method that none of its modules has; or an entry is left unwritten (`torch.empty`).
        OverflowError: An integer entry does not fit 32 bits.
        NotImplementedError: Construction depends on the values of tensors, uses an operator without a lowering, or
            registers hooks on parameters.

    Notes:
        An entry is one compiled program, shared by all entries that are made alike: compile time does not grow with
        depth. What is computed without random numbers (position tables, masks), other than one number everywhere, is
        computed by eager torch, one tensor at a time on the host, and so is what torch gives to the bit. Products and
        decompositions (`orthogonal_`, spectral norms) are computed whole on each device.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = ts.make_mesh(batch=1, model=1)
        >>> plan = ts.ShardingPlan({"weight": P("model")}, default=P())
        >>> ts.materialize(lambda: torch.nn.Linear(4, 2), mesh, plan).weight.device
        device(type='jax', index=0)
    """
    check_mesh(mesh)
    check_plan(plan)
    seed = check_seed(seed)
    if isinstance(model, nn.Module):
        hint = "It names a method of submodules, or is called on each of them."
        check_kind("init", init, str | Callable | None, hint=hint)
        if callable(init):
            check_call("init", init, "module", hint=hint)
        _fill_in(unwrapped(model), mesh, plan, seed=seed, init=init)
        return model
    if not callable(model):
        raise TypeError(f"materialize: model must be a module or a callable, got {type(model).__name__}.")
    check_call("model", model, hint="Bind what it needs: lambda: Model(config).")
    if init is not None:
        raise TypeError("materialize: init= is for modules on the meta device; a constructor initialises by itself.")
    construction = construct(model)
    refuse_hooks(construction.module)
    shardings = plan.resolve(construction.module, mesh)
    refuse_wide({name: construction.tensors[name] for name in construction.entries})
    initialiser = _Initialiser(construction, mesh, seed, dict(shardings))
    initialiser.check(construction.tensors)
    made = [(tensor, initialiser.make(name)) for name, tensor in construction.tensors.items()]
    TensorPlaces(construction.module).replace(made)
    return construction.module


def _fill_in(model: nn.Module, mesh: Mesh, plan: ShardingPlan, *, seed: int, init: Init | None) -> None:
    """Initialise what is on the meta device, place the rest."""
    refuse_hooks(model)
    shardings = plan.resolve(model, mesh)
    held = holdings(model).all
    refuse_wide(held)
    names = [name for name, tensor in held.items() if tensor.device.type == "meta"]
    refuse_views({name: held[name] for name in names})
    initialiser = None
    if names:
        init = check_init(model, names, init)
        initialiser = _Initialiser(construct_again(model, names, init), mesh, seed, dict(shardings))
        initialiser.check(names, is_module=True)
    places = TensorPlaces(model)
    for name in [name for name in held if name not in names]:
        tensor = held.pop(name)
        places.replace([(tensor, wrap_array(put(tensor.detach(), shardings[name])))])
    if initialiser is not None:
        places.replace([(held[name], initialiser.make(name)) for name in names])


class _Initialiser:
    """Makes the tensors of a construction, one by one."""

    def __init__(
        self, construction: Construction, mesh: Mesh, seed: int, shardings: Mapping[str, NamedSharding]
    ) -> None:
        self._construction, self._shardings = construction, shardings
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._key = jax.random.key(seed, impl=FUSED)
        graph = construction.graph.module
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._values = dict(zip(placeholders, construction.graph.closure, strict=True))
        self._slices = dict(zip(construction.tensors, cut(graph), strict=True))
        self._options = compiler_options([graph], mesh)
        self._programs: dict[object, Callable[..., jax.Array]] = {}
        self._hashes = [_hash(name) for name in construction.tensors]

    def check(self, names: Collection[str], *, is_module: bool = False) -> None:
        """Refuse what cannot be made, before anything is."""
        wanted = {name: self._slices[name] for name in names}
        refuse_unusable(self._construction, wanted)
        if is_module:
            refuse_mixed(self._slices, set(self._slices) - set(names))
        else:
            refuse_views({name: self._construction.tensors[name] for name in self._construction.entries})
        unwritten = [
            name for name, graph_slice in wanted.items() if graph_slice.unwritten and self._shows_unwritten(graph_slice)
        ]
        refuse_unwritten(unwritten, type(self._construction.module).__name__, is_module)

    def make(self, name: str) -> torch.Tensor:
        """A tensor on its shards; one that is a plain attribute on the CPU."""
        graph_slice = self._slices[name]
        sharding = self._shardings.get(name, self._replicated)
        if not graph_slice.nodes:
            value = self._values[graph_slice.output].detach()
        elif graph_slice.streams or (graph_slice.is_fill and self._is_narrow(graph_slice)):
            value = self._compiled(graph_slice, sharding)(*self._arguments(graph_slice)).block_until_ready()
        else:
            value = host_value(graph_slice, self._inputs(graph_slice))
        if name in self._shardings:
            try:
                return wrap_array(put(value, sharding))
            except OverflowError as error:
                raise OverflowError(f"materialize: {name}: {error}") from error
        return to_host(value) if isinstance(value, jax.Array) else value.clone()

    def _is_narrow(self, graph_slice: Slice) -> bool:
        """Tell whether any number of its dtype is one of JAX's; others come from the host, which refuses the rest."""
        return graph_slice.output.meta["val"].dtype not in (torch.int64, torch.uint64) or has_x64()

    def _inputs(self, graph_slice: Slice) -> list[torch.Tensor]:
        return [self._values[node].detach().cpu() for node in graph_slice.inputs]

    def _arguments(self, graph_slice: Slice) -> tuple[jax.Array, np.ndarray, list[np.ndarray]]:
        hashes = np.array([self._hashes[stream] for stream in graph_slice.streams], np.uint32).reshape(-1, 2)
        return self._key, hashes, [host_array(value) for value in self._inputs(graph_slice)]

    def _compiled(self, graph_slice: Slice, sharding: NamedSharding) -> Callable[..., jax.Array]:
        if (graph_slice, sharding) not in self._programs:
            jitted = jax.jit(_lowered(graph_slice), out_shardings=sharding, compiler_options=self._options)
            self._programs[graph_slice, sharding] = jitted
        return self._programs[graph_slice, sharding]

    def _shows_unwritten(self, graph_slice: Slice) -> bool:
        """Tell whether what happens to lie in unwritten memory is to be seen in the tensor."""
        if not graph_slice.streams:
            one, other = (host_value(graph_slice, self._inputs(graph_slice), fills) for fills in fills_of(graph_slice))
            return not torch.equal(one, other)
        runs = [_lowered(graph_slice, fills) for fills in fills_of(graph_slice)]
        if (graph_slice, None) not in self._programs:
            self._programs[graph_slice, None] = jax.jit(lambda *arguments: _differ(*(run(*arguments) for run in runs)))
        return bool(self._programs[graph_slice, None](*self._arguments(graph_slice)))


def _hash(name: str) -> np.ndarray:
    """Two words, so that no two of many names have the same."""
    return np.frombuffer(hashlib.blake2s(name.encode(), digest_size=8).digest(), "<u4")


def _differ(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.any(one != other)


def _lowered(graph_slice: Slice, fills: Mapping[Node, Fill] | None = None) -> Callable[..., jax.Array]:
    """The JAX function `(key, hashes of the names whose streams it draws from, inputs) -> tensor`."""
    fills = fills or {}
    steps = {
        node: (sources_of(node), operation(node))
        for node in graph_slice.nodes
        if node not in fills and not is_constant(node)
    }

    def values(key: jax.Array, hashes: jax.Array, inputs: Sequence[jax.Array]) -> jax.Array:
        folded = jax.vmap(lambda words: jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1]))(hashes)

        def call(node: Node, value_of: Callable[[Node], PyTree]) -> PyTree:
            if node in fills:
                fake = node.meta["val"]
                return jnp.full(fake.shape, fills[node], jax_dtype(fake.dtype))
            if node not in steps:
                return jnp.asarray(host_array(call_in_torch({}, node, value_of)))
            sources, operate = steps[node]
            stream, place = graph_slice.draws.get(node, (None, None))
            return operate(None if stream is None else folded[stream], place, list(map(value_of, sources)))

        with matmul_precision():
            return graph_slice.run(inputs, call)

    return values
