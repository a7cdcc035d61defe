"""JAX from torch code and torch from JAX code: `call_jax`, `torch_view`, and their kin.

In a capture, a call into JAX is one opaque torch operator with its own derivative: its shapes come from a trace by JAX,
its meaning from the function itself. One that has effects, such as printing, stays, used or not.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from torch.fx import has_side_effect

from torch_shard import _device  # noqa: F401  (registers the device)
from torch_shard._axes import into_shares, sum_shares, tracked_axes, vary
from torch_shard._bridge import to_array, wrap_array
from torch_shard._closure import MoreInputs, Reader
from torch_shard._convert import adopt_torch_nodes
from torch_shard._fakes import is_fake
from torch_shard._function import TorchFunction
from torch_shard._keys import next_key, noting_draws, wrap_seed
from torch_shard._mesh import check_mesh
from torch_shard._ops import captured_dtype, jax_dtype, lowers
from torch_shard._watch import ModuleFlags, add_modules, as_captured, current_watch, unwatched

FlatJaxFn = Callable[..., list[jax.Array]]

_HANDLES = itertools.count()
_FUNCTIONS: dict[int, tuple[FlatJaxFn, list[jax.ShapeDtypeStruct]]] = {}
"""What each opaque operator of a captured graph calls, and the shapes and dtypes that it returns."""


@torch.library.custom_op("torch_shard::call", mutates_args=())
def _call_op(handle: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise NotImplementedError("only captured, never run")


@_call_op.register_fake
def _call_shapes(handle: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(o.shape, dtype=captured_dtype(o.dtype), device="cpu") for o in _FUNCTIONS[handle][1]]


@torch.library.custom_op("torch_shard::call_for_effect", mutates_args=())
def _effect_op(handle: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise NotImplementedError("only captured, never run")


_effect_op.register_fake(_call_shapes)
has_side_effect(torch.ops.torch_shard.call_for_effect.default)  # dead code to nobody


@torch.library.custom_op("torch_shard::draw_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _draw_seed(like: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("only captured, never run")


@_draw_seed.register_fake
def _seed_shape(like: torch.Tensor) -> torch.Tensor:
    return torch.empty((2,), dtype=torch.uint32, device="cpu")


@lowers(torch.ops.torch_shard.call.default, torch.ops.torch_shard.call_for_effect.default)
def _lower_call(handle: int, arrays: list[jax.Array]) -> list[jax.Array]:
    return _FUNCTIONS[handle][0](*arrays)


@lowers(torch.ops.torch_shard.draw_seed.default, random=True)
def _lower_draw_seed(key: jax.Array | None, like: jax.Array) -> jax.Array:
    return jnp.zeros(2, jnp.uint32) if key is None else jax.random.key_data(key)  # None: nothing draws from it


class _Opaque(torch.autograd.Function):
    """A JAX function of arrays as a torch function; its backward is `jax.vjp` of it, opaque in turn."""

    @staticmethod
    def forward(ctx: Any, fn: FlatJaxFn, run: Callable, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.fn, ctx.run = fn, run
        ctx.save_for_backward(*tensors)
        outputs = tuple(run(fn, *tensors))
        ctx.mark_non_differentiable(*(o for o in outputs if not _is_inexact(o)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        wanted = tuple(needed and _is_inexact(t) for t, needed in zip(tensors, ctx.needs_input_grad[2:], strict=True))
        given = tuple(c is not None and _is_inexact(c) for c in cotangents)
        chosen = [c for c, is_given in zip(cotangents, given, strict=True) if is_given]
        grads = iter(_Opaque.apply(_vjp_of(ctx.fn, wanted, given), ctx.run, *tensors, *chosen))
        return None, None, *(next(grads) if want else None for want in wanted)


def _vjp_of(fn: FlatJaxFn, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> FlatJaxFn:
    def vjp(*inputs: jax.Array) -> list[jax.Array]:
        primals, cotangents = inputs[: len(wanted)], inputs[len(wanted) :]

        def of_wanted(*chosen: jax.Array) -> list[jax.Array]:
            values = iter(chosen)
            outputs = fn(*(next(values) if w else p for p, w in zip(primals, wanted, strict=True)))
            return [o for o, is_given in zip(outputs, given, strict=True) if is_given]

        chosen = [p for p, want in zip(primals, wanted, strict=True) if want]
        outputs, pull = jax.vjp(of_wanted, *chosen)
        sums = [sum_shares(c.astype(o.dtype), o) for c, o in zip(cotangents, outputs, strict=True)]
        return [into_shares(grad, primal) for grad, primal in zip(pull(sums), chosen, strict=True)]

    return vjp


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _run_now(fn: FlatJaxFn, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [wrap_array(a) for a in fn(*map(to_array, tensors))]


def _run_captured(fn: FlatJaxFn, *tensors: torch.Tensor) -> list[torch.Tensor]:
    shapes = [jax.ShapeDtypeStruct(tuple(t.shape), jax_dtype(t.dtype)) for t in tensors]
    handle = next(_HANDLES)
    with unwatched(), noting_draws(handle):
        traced, results = _trace(fn, shapes)
    _FUNCTIONS[handle] = fn, results
    effects = [effect for effect in traced.effects if type(effect).__name__ != "NamedAxisEffect"]  # as JAX itself
    op = torch.ops.torch_shard.call_for_effect if effects else torch.ops.torch_shard.call
    return op(handle, list(tensors))


def _trace(fn: FlatJaxFn, shapes: list[jax.ShapeDtypeStruct]) -> Any:
    """What `fn` does and returns for arrays like these; what they vary over is not known before the graph is lowered."""
    try:
        return jax.make_jaxpr(fn, return_shape=True)(*shapes)
    except (TypeError, ValueError):
        axes = tracked_axes()
        if not axes:
            raise
        with contextlib.suppress(TypeError, ValueError):  # a loop may want what it carries to vary from the start
            return jax.make_jaxpr(lambda *a: fn(*(vary(x, axes) for x in a)), return_shape=True)(*shapes)
        raise


def call_pure(pure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, random: bool) -> Any:
    """Call a JAX function `(key, *args, **kwargs)` from torch code, eager or captured.

    Tensors become arrays and results tensors; torch's autograd sees through it. `random` says whether the function
    may need its key; in a capture the key is drawn by an operator of its own, so that the derivative draws the same.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    leaves = [wrap_array(to_array(leaf)) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    for leaf in leaves:
        if isinstance(leaf, jax.sharding.NamedSharding):
            check_mesh(leaf.mesh, caller="call_jax")
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    captured = current_watch() is not None or any(map(is_fake, tensors))
    closure: list[torch.Tensor] = []
    modules: list[ModuleFlags] = []
    token = object()
    key = next_key() if random and not captured else None
    out: list[Any] = []

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        given = iter(arrays)
        values = [next(given) if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, values)
        seed = next(given) if random and captured else None
        reader = Reader(closure, list(given), token)
        with reader.active() if captured else contextlib.nullcontext():
            result = pure(key if seed is None else wrap_seed(seed), *args, **kwargs)
        modules.extend(reader.modules)
        out_leaves, out_tree = jax.tree.flatten(result)
        found = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in out_leaves]
        out[:] = [out_tree, [_ARRAY if f else o for o, f in zip(out_leaves, found, strict=True)]]
        return [_without_float0(leaf) for leaf, f in zip(out_leaves, found, strict=True) if f]

    if random and captured:
        tensors.append(torch.ops.torch_shard.draw_seed(tensors[0] if tensors else torch.zeros(())))
    results = iter(_run_with_closure(flat, tensors, closure) if captured else _apply(flat, _run_now, tensors))
    for flags in modules:
        add_modules(flags)
    return jax.tree.unflatten(out[0], [next(results) if o is _ARRAY else o for o in out[1]])


def _apply(flat: FlatJaxFn, run: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return _Opaque.apply(flat, run, *tensors) if needs_grad else run(flat, *tensors)


def _run_with_closure(flat: FlatJaxFn, tensors: list[torch.Tensor], closure: list[torch.Tensor]) -> Any:
    """In a capture: what torch functions below `flat` close over becomes further arguments, as it is met."""
    while True:
        try:
            return _apply(flat, _run_captured, [*map(as_captured, tensors), *map(as_captured, closure)])
        except MoreInputs as request:
            closure.extend(request.tensors)


_ARRAY = object()


def _without_float0(array: Any) -> Any:
    """JAX's gradients of integers have dtype float0; torch has none, zeros of an integer say the same."""
    return jnp.zeros(array.shape, jnp.int32) if array.dtype == jax.dtypes.float0 else jnp.asarray(array)


def call_jax(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a JAX function with torch tensors.

    Args:
        fn: A JAX function of pytrees of arrays, an optax transformation's `update` for example.
        *args: Pytrees of tensors and of anything else that `fn` takes. CPU tensors are moved to the jax device.
        **kwargs: Likewise.

    Returns:
        What `fn` returns, its arrays as jax-device tensors. Gradients flow through, by `jax.vjp`.

    Example:
        >>> import torch, jax.numpy as jnp, torch_shard as ts
        >>> ts.call_jax(jnp.add, torch.ones(2), torch.ones(2)).tolist()
        [2.0, 2.0]
    """
    return call_pure(lambda key, *args, **kwargs: fn(*args, **kwargs), args, kwargs, random=False)


def call_torch(fn: Callable[..., Any], *args: Any, key: jax.Array | None = None, **kwargs: Any) -> Any:
    """Call a torch callable with JAX arrays: `jax_view(fn)(*args, key=key, **kwargs)`."""
    return jax_view(fn)(*args, key=key, **kwargs)


def torch_view(value: Any) -> Any:
    """JAX as torch sees it: arrays of a pytree as jax-device tensors, no copy; a JAX function as a torch function."""
    if callable(value) and not isinstance(value, jax.Array):
        return lambda *args, **kwargs: call_jax(value, *args, **kwargs)
    return jax.tree.map(lambda leaf: wrap_array(leaf) if isinstance(leaf, jax.Array) else leaf, value)


def jax_view(value: Any) -> Any:
    """Torch as JAX sees it: tensors of a pytree as arrays; a torch callable as a JAX function.

    jax-device tensors give their array, no copy; CPU tensors are copied. The JAX function takes the keyword argument
    `key`, which it needs if the callable draws random numbers; its derivative is PyTorch's own.
    """
    if isinstance(value, torch.Tensor) or not callable(value):
        adopt_torch_nodes(value)
        return jax.tree.map(lambda leaf: to_array(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)
    return value if isinstance(value, _JaxView) else _JaxView(value)


class _JaxView:
    """A torch callable as a JAX function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._pure = pure_of(fn)
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, key: jax.Array | None = None, **kwargs: Any) -> Any:
        return self._pure(key, *args, **kwargs)


def pure_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The JAX function `(key, *args, **kwargs)` of a torch callable or of an adapted function."""
    return fn._torch_shard_pure if is_adapted(fn) else TorchFunction(fn)  # pyright: ignore[reportFunctionMemberAccess]


def is_adapted(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is a JAX transform of a torch callable already."""
    return hasattr(fn, "_torch_shard_pure")


def apply_jax(tensor: torch.Tensor, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(array of tensor, *args, **kwargs)` as tensors."""
    return call_jax(fn, tensor, *args, **kwargs)


def apply_jax_(tensor: torch.Tensor, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace the data of `tensor` by what `fn` makes of it; shape and dtype stay."""
    with torch.no_grad():
        result = call_jax(fn, tensor.detach(), *args, **kwargs)
    if result.shape != tensor.shape or result.dtype != tensor.dtype:
        raise ValueError(
            f"apply_jax_ keeps shape and dtype: the tensor is {tuple(tensor.shape)} {tensor.dtype}, the function "
            f"returned {tuple(result.shape)} {result.dtype}. Use apply_jax."
        )
    tensor.data.copy_(result)
    return tensor


def shard_(tensor: torch.Tensor, sharding: jax.sharding.Sharding) -> torch.Tensor:
    """Lay the tensor out as `sharding` says, in place, and return it; inside `jax_jit` it is a constraint."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        check_mesh(sharding.mesh, caller="shard_")
    return apply_jax_(tensor, _with_sharding, sharding)


def _with_sharding(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(array, Tracer):
        return jax.lax.with_sharding_constraint(array, sharding)
    return jax.device_put(array, sharding)


def _jax(tensor: torch.Tensor) -> jax.Array:
    """The array of a jax-device tensor."""
    where = "in a captured function: use apply_jax" if is_fake(tensor) else "on the CPU: move it with .to('jax')"
    raise TypeError(f"jax() gives the array of a jax-device tensor; this tensor is {where}.")


def _add_methods() -> None:
    """`x.apply_jax(f)` and `x.shard_(s)` also work inside captured functions, where x is one of torch's own fakes."""
    for name, method in {
        "apply_jax": apply_jax,
        "apply_jax_": apply_jax_,
        "shard_": shard_,
        "jax": _jax,
    }.items():
        setattr(torch.Tensor, name, method)


_add_methods()
