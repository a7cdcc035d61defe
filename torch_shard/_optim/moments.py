"""Moments kept in bfloat16: which leaves of an optimizer's state they are, and how they are rounded at random."""

# optax has no stubs. JAX annotates its functions in part, and says nothing of what `jax.tree.map` gives to a function.
# pyright: reportMissingTypeStubs=false
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Var

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._sharding import Kept, Stacks


def parameter_of(path: tuple[Any, ...], leaf: Any, params: Mapping[str, Any]) -> str | None:
    """The parameter under whose name, and in whose shape, a leaf of an optimizer's state is kept."""
    names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in params]
    return names[-1] if names and params[names[-1]].shape == leaf.shape else None


def is_narrow(leaf: Any) -> bool:
    """Tell whether an array or a struct is in bfloat16."""
    return leaf.dtype == jnp.bfloat16


def init_narrow(init: Callable[[Any], PyTree], params: Any) -> PyTree:
    """What `init` makes of parameters by name, with moments in bfloat16.

    Moments begin as constants. What begins as a copy of a parameter stays as it is (averages, `z` of schedule-free
    optimizers): in 16 bits it would lose what a small step adds.
    """
    traced, structs = jax.make_jaxpr(init, return_shape=True)(params)
    copies = set(traced.jaxpr.invars)
    for eqn in traced.jaxpr.eqns:
        copies.update(eqn.outvars if any(isinstance(var, Var) and var in copies for var in eqn.invars) else ())
    outs = traced.jaxpr.outvars
    is_copy = jax.tree.unflatten(jax.tree.structure(structs), [isinstance(v, Var) and v in copies for v in outs])

    def first(path: tuple[Any, ...], leaf: Any, is_copy: bool) -> Any:
        fits = leaf.dtype in (jnp.float32, jnp.float16) and parameter_of(path, leaf, params)
        return leaf.astype(jnp.bfloat16) if fits and not is_copy else leaf

    return jax.tree_util.tree_map_with_path(first, init(params), is_copy)


def check_moments(opt_state: PyTree) -> None:
    """Refuse an optimizer without moments, and one whose state is no moments."""
    if any(map(_is_lbfgs, jax.tree.leaves(opt_state, is_leaf=_is_lbfgs))):
        raise NotImplementedError(
            f"{caller()}: moment_dtype is for moments, and optax.lbfgs keeps parameters and gradients to take their "
            "differences, which 16 bits lose. Leave out moment_dtype."
        )
    if not any(map(is_narrow, jax.tree.leaves(opt_state))):
        raise ValueError(
            f"{caller()}: moment_dtype is for moments in the shape of their parameter, of at most 32 bits, and this "
            "optimizer keeps none. Leave out moment_dtype."
        )


def _is_lbfgs(node: object) -> bool:
    return isinstance(node, optax.ScaleByLBFGSState)


def narrow_like(opt_state: PyTree, like: PyTree) -> PyTree:
    """A state from elsewhere: to the nearest, where `like` is in bfloat16."""
    return jax.tree.map(lambda leaf, own: leaf.astype(own.dtype) if is_narrow(own) else leaf, opt_state, like)


def widened(opt_state: PyTree) -> PyTree:
    """The state as an update computes with it: in float32 what is kept in bfloat16."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if is_narrow(leaf) else leaf, opt_state)


def narrowed(opt_state: PyTree, like: PyTree, key: jax.Array) -> PyTree:
    """The state as it is kept, where `like` is in bfloat16: up or down at random, so that the mean is exact.

    Args:
        opt_state: After an update.
        like: As it is kept.
        key: Of the step. Each leaf draws by its place and name, each element by its index in torch's shape: alike on
            all meshes, stacked or not.
    """

    def rounded(array: jax.Array, own: Any, places: list[str], form: Kept | None = None) -> jax.Array:
        if not is_narrow(own) or is_narrow(array):
            return array
        is_stack = len(places) > 1
        shape = array.shape[is_stack:] if form is None else form.shape
        keys = (jax.random.fold_in(key, np.uint32(zlib.crc32(place.encode()))) for place in places)
        seeds = jnp.stack([jax.random.bits(own_key, (2,), jnp.uint32) for own_key in keys])
        bits = jax.vmap(functools.partial(_bits, shape))(seeds) if is_stack else _bits(shape, seeds[0])
        return _rounded(array, bits if form is None else form.store(bits, is_stack=is_stack))

    def of_node(path: tuple[Any, ...], node: PyTree, own: PyTree) -> PyTree:
        place = jax.tree_util.keystr(path)
        if not isinstance(node, Stacks):
            return rounded(node, own, [place])

        def of_group(names: tuple[str, ...], array: PyTree, own: PyTree) -> PyTree:
            def leaf(below: tuple[Any, ...], array: jax.Array, own: Any) -> jax.Array:
                places = [f"{place} {name}{jax.tree_util.keystr(below)}" for name in names]
                return rounded(array, own, places, node.forms.get(names[0]))

            return jax.tree_util.tree_map_with_path(leaf, array, own)

        return Stacks(node.layout, map(of_group, node.layout.groups, node.arrays, own.arrays))

    return jax.tree_util.tree_map_with_path(of_node, opt_state, like, is_leaf=lambda node: isinstance(node, Stacks))


def _bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """16 bits for each element, from its index by SplitMix: XLA computes them in place, unlike those of threefry."""
    factors = (seed[0] | 1) * np.cumprod([1, *shape[:0:-1]], dtype=np.uint32)[::-1]
    at = (jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * factors[dim] for dim in range(len(shape)))
    x = sum(at, jnp.broadcast_to(seed[1], shape))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * np.uint32(factor)
    return x >> 16


def _rounded(x: jax.Array, bits: jax.Array) -> jax.Array:
    """The upper half of float32, after a carry from bits that are added to the lower half."""
    words = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + bits
    near = jax.lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), near, x.astype(jnp.bfloat16))
