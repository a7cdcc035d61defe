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
    name: str | None = None
    for key in path:
        if isinstance(key, jax.tree_util.DictKey) and key.key in params:
            name = str(key.key)

    # Adafactor keeps rows and columns under a parameter's name too, which are no moments.
    if name is None or params[name].shape != leaf.shape:
        return None
    return name


def is_narrow(leaf: Any) -> bool:
    """Tell whether an array or a struct is in bfloat16."""
    return leaf.dtype == jnp.bfloat16


def init_narrow(init: Callable[[Any], PyTree], params: Any) -> PyTree:
    """What `init` makes of parameters by name, with moments in bfloat16.

    Moments begin as constants. What begins as a copy of a parameter stays as it is (averages, `z` of schedule-free
    optimizers): in 16 bits it would lose what a small step adds.
    """
    traced, structs = jax.make_jaxpr(init, return_shape=True)(params)

    # Only the trace tells a copy from a constant: at step 0 a parameter may be zeros as well.
    copies = set(traced.jaxpr.invars)
    for eqn in traced.jaxpr.eqns:
        if any(isinstance(variable, Var) and variable in copies for variable in eqn.invars):
            copies.update(eqn.outvars)

    copy_flags = [isinstance(variable, Var) and variable in copies for variable in traced.jaxpr.outvars]
    is_copy = jax.tree.unflatten(jax.tree.structure(structs), copy_flags)

    def narrow(path: tuple[Any, ...], leaf: Any, is_copy: bool) -> Any:
        if is_copy or leaf.dtype not in (jnp.float32, jnp.float16):
            return leaf
        if parameter_of(path, leaf, params) is None:
            return leaf
        return leaf.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(narrow, init(params), is_copy)


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

    def narrow(leaf: Any, stored: Any) -> Any:
        return leaf.astype(stored.dtype) if is_narrow(stored) else leaf

    return jax.tree.map(narrow, opt_state, like)


def widened(opt_state: PyTree) -> PyTree:
    """The state as an update computes with it: in float32 what is kept in bfloat16."""

    def widen(leaf: Any) -> Any:
        return leaf.astype(jnp.float32) if is_narrow(leaf) else leaf

    return jax.tree.map(widen, opt_state)


def narrowed(opt_state: PyTree, like: PyTree, key: jax.Array) -> PyTree:
    """The state as it is kept, where `like` is in bfloat16: up or down at random, so that the mean is exact.

    Args:
        opt_state: After an update.
        like: As it is kept.
        key: Of the step. Each leaf draws by its place and name, each element by its index in torch's shape: alike on
            all meshes, stacked or not.
    """

    def seed_of(place: str) -> jax.Array:
        # crc32, as Python's hash of a string differs between processes and would round otherwise in each.
        place_key = jax.random.fold_in(key, np.uint32(zlib.crc32(place.encode())))
        return jax.random.bits(place_key, (2,), jnp.uint32)

    def rounded(array: jax.Array, stored: Any, places: list[str], form: Kept | None = None) -> jax.Array:
        if not is_narrow(stored) or is_narrow(array):
            return array

        is_stack = len(places) > 1
        shape = array.shape[is_stack:] if form is None else form.shape
        seeds = jnp.stack([seed_of(place) for place in places])
        bits = jax.vmap(functools.partial(_bits, shape))(seeds) if is_stack else _bits(shape, seeds[0])

        # Bits are drawn by an index in torch's shape, and only then moved to where the elements are stored.
        if form is not None:
            bits = form.store(bits, is_stack=is_stack)
        return _rounded(array, bits)

    def rounded_node(path: tuple[Any, ...], node: PyTree, stored: PyTree) -> PyTree:
        place = jax.tree_util.keystr(path)
        if not isinstance(node, Stacks):
            return rounded(node, stored, [place])

        def rounded_group(names: tuple[str, ...], array: PyTree, stored: PyTree) -> PyTree:
            form = node.forms.get(names[0])

            def rounded_leaf(below: tuple[Any, ...], array: jax.Array, stored: Any) -> jax.Array:
                suffix = jax.tree_util.keystr(below)
                places = [f"{place} {name}{suffix}" for name in names]
                return rounded(array, stored, places, form)

            return jax.tree_util.tree_map_with_path(rounded_leaf, array, stored)

        return Stacks(node.layout, map(rounded_group, node.layout.groups, node.arrays, stored.arrays))

    def is_stacks(node: object) -> bool:
        return isinstance(node, Stacks)

    return jax.tree_util.tree_map_with_path(rounded_node, opt_state, like, is_leaf=is_stacks)


def _bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """16 bits for each element, from its index by SplitMix: XLA computes them in place, unlike those of threefry."""
    strides = np.cumprod([1, *shape[:0:-1]], dtype=np.uint32)[::-1]
    factors = (seed[0] | 1) * strides  # odd, so that different indices stay different modulo 2**32

    x = jnp.broadcast_to(seed[1], shape)
    for dim in range(len(shape)):
        x = x + jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * factors[dim]

    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * np.uint32(factor)
    return x >> 16


def _rounded(x: jax.Array, bits: jax.Array) -> jax.Array:
    """The upper half of float32, after a carry from bits that are added to the lower half."""
    words = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + bits
    near = jax.lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), jnp.bfloat16)

    # A carry past the mantissa of a NaN would make a number of it.
    return jnp.where(jnp.isfinite(x), near, x.astype(jnp.bfloat16))
