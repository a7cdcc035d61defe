"""JAX from torch code and torch from JAX code: `call_jax`, `torch_view`, and their kin."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer

from torch_shard._capture import ActiveRegions, ModuleFlags, current_mode, is_fake
from torch_shard._common.caller import caller, error_prefix, public
from torch_shard._common.convert import Rest, adopt_torch_nodes, flatten, take_out
from torch_shard._common.random import NeedsKey, next_key, wrap_seed
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_kind, named
from torch_shard._device import (
    register_device,
    to_array,
    wrap_array,
)
from torch_shard._interop.jax_function import CLOSURE, Reader, draw_seed, run_flat
from torch_shard._interop.torch_function import TorchFunction
from torch_shard._lowering import capture_settings
from torch_shard._sharding import check_mesh


def call_pure(
    pure: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *, random: bool
) -> PyTree:
    """Call a JAX function `(key, *args, **kwargs)` from torch code, eager or captured.

    Tensors become arrays and results tensors; torch's autograd sees through it. `random` says whether the function
    may need its key; in a capture the key is drawn by an operator of its own, so that the derivative draws the same.
    """
    is_eager = current_mode() is None
    if random and not (is_eager and pure in _DRAWING):
        try:
            return _call(pure, args, kwargs, random=False, lasts=True)
        except NeedsKey:
            if is_eager:
                _DRAWING.add(pure)
    return _call(pure, args, kwargs, random=random, lasts=random)


_DRAWING: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
"""Functions that were found to need a key."""


class _CallSite:
    """Tensors that torch functions below a call into JAX close over: further arguments of it, with gradients.

    Attributes:
        token: The programs below the call belong to it.
        closure: The tensors, in the order in which they were met.
        flags: Modules that ran, with their training flags.
    """

    def __init__(self, settings: object = None) -> None:
        self.token, self.settings = object(), settings
        self.closure: list[torch.Tensor] = []
        self.flags: list[ModuleFlags] = []

    def fits(self, settings: object) -> bool:
        """Tell whether the programs that belong to it mean the same now."""
        return self.settings == settings and all(flags.hold() for flags in self.flags)


_SITES: weakref.WeakKeyDictionary[Callable[..., object], list[_CallSite]] = weakref.WeakKeyDictionary()


def _site_of(pure: Callable[..., PyTree]) -> _CallSite:
    """The call site of a function that is called again and again, so that its programs are kept."""
    sites, settings = _SITES.setdefault(pure, []), capture_settings()
    found = next((site for site in sites if site.fits(settings)), None)
    if found is None:
        found = _CallSite(settings)
        sites.append(found)
    return found


@error_prefix("call_jax")
def _call(
    pure: Callable[..., PyTree], args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *, random: bool, lasts: bool
) -> PyTree:
    leaves, tree = flatten((args, kwargs))
    leaves = [wrap_array(to_array(leaf)) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    for leaf in leaves:
        if isinstance(leaf, jax.sharding.NamedSharding):
            check_mesh(leaf.mesh)
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    captured = current_mode() is not None or any(map(is_fake, tensors))
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    site = _CallSite() if captured else _site_of(pure) if lasts and needs_grad else None
    autocast = ActiveRegions.here()  # JAX also traces when the region is over, for derivatives
    key = next_key() if random and not captured else None
    out: list[Rest] = []
    views: list[bool] = []

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        given = iter(arrays)
        values = [next(given) if tensor else _anew(leaf) for leaf, tensor in zip(leaves, is_tensor, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, values)
        seed = next(given) if random and captured else None
        with contextlib.ExitStack() as stack:
            reader = None
            if site is not None:
                reader = stack.enter_context(Reader(site.closure, list(given), site.token).active())
                stack.enter_context(autocast.entered())
                if views if out else _JaxView.exist:
                    stack.enter_context(_RETRACED(next(_RUNS)))
            result = pure(key if seed is None else wrap_seed(seed), *args, **kwargs)
        if site is not None and reader is not None:
            site.flags.extend(flags for flags in reader.modules if flags not in site.flags)
            views.extend([True] * reader.has_views)
        found, rest = take_out(result, jax.Array, np.ndarray)
        out[:] = [rest]
        return list(map(_without_float0, found))

    if random and captured:
        tensors.append(draw_seed(tensors))
    closure = [] if site is None else site.closure
    results = run_flat(flat, tensors, closure, captured=captured)
    capture_mode = current_mode()
    if captured and site is not None and capture_mode is not None:
        for flags in site.flags:
            capture_mode.add_modules(flags)
    return out[0].filled(results)


_RUNS = itertools.count()

_RETRACED = jax.make_user_context()
"""A part of the keys of JAX's caches. JAX keeps the trace of a loop's body by the body's identity, with the values of
all that the body closes over: those of another call, where the body is a view of a torch callable."""


def _anew(value: object) -> object:
    """A view of a torch callable as a function that JAX has not seen."""
    return functools.partial(_JaxView.__call__, value) if isinstance(value, _JaxView) else value


def _without_float0(array: jax.Array | np.ndarray) -> jax.Array:
    """JAX's gradients of integers have dtype float0; torch has none, zeros of an integer say the same."""
    return jnp.zeros(array.shape, jnp.int32) if array.dtype == jax.dtypes.float0 else jnp.asarray(array)


@public
def call_jax(fn: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Call a JAX function with torch tensors.

    Args:
        fn: A JAX function of pytrees of arrays, an optax transformation's `update` for example.
        *args: Pytrees of tensors, on the CPU or the jax device, and of anything else that `fn` takes.
        **kwargs: Pytrees that `fn` takes by name, treated as those by position are.

    Returns:
        What `fn` returns, its arrays as tensors: on the CPU if all tensors that it was given are, else on the jax
        device. Gradients flow through, by `jax.vjp`.

    Example:
        >>> import torch, jax.numpy as jnp, torch_shard as ts
        >>> ts.call_jax(jnp.add, torch.ones(2), torch.ones(2)).tolist()
        [2.0, 2.0]
    """
    found = call_pure(lambda key, /, *args, **kwargs: fn(*args, **kwargs), args, kwargs, random=False)
    tensors, _ = take_out((args, kwargs), torch.Tensor)
    if current_mode() is not None or not tensors or any(is_fake(t) or t.device.type != "cpu" for t in tensors):
        return found
    return jax.tree.map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, found)


@public
def call_torch(fn: Callable[..., PyTree], /, *args: PyTree, key: jax.Array | None = None, **kwargs: PyTree) -> PyTree:
    """Call a torch callable with JAX arrays: `jax_view(fn)(*args, key=key, **kwargs)`.

    Args:
        fn: A torch callable of pytrees of tensors, a module for example.
        *args: Pytrees of arrays and of anything else that `fn` takes.
        key: A random key, which is needed where `fn` draws random numbers.
        **kwargs: Pytrees that `fn` takes by name.

    Returns:
        What `fn` returns, its tensors as arrays. It can be traced, compiled and differentiated by JAX; the derivative
        is PyTorch's own.

    Example:
        >>> import jax.numpy as jnp, torch, torch_shard as ts
        >>> ts.call_torch(torch.nn.functional.relu, jnp.array([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """
    return _view_of(fn).run(*args, key=key, **kwargs)


@public
def torch_view(value: PyTree) -> PyTree:
    """JAX as torch sees it: arrays of a pytree as jax-device tensors, no copy; a JAX function as a torch function.

    Args:
        value: A pytree, of which arrays change and anything else stays; or a JAX function.

    Returns:
        The pytree with tensors on the jax device in place of arrays; or a torch function that calls the JAX function
        as `call_jax` does.

    Example:
        >>> import jax.numpy as jnp, torch, torch_shard as ts
        >>> ts.torch_view(jnp.ones(2)).device, ts.torch_view(jnp.sin)(torch.zeros(2)).tolist()
        (device(type='jax', index=0), [0.0, 0.0])
    """
    if callable(value) and not isinstance(value, jax.Array):
        return lambda *args, **kwargs: call_jax(value, *args, **kwargs)
    leaves, tree = flatten(value)
    return jax.tree.unflatten(tree, [wrap_array(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])


@public
def jax_view(value: PyTree) -> PyTree:
    """Torch as JAX sees it: tensors of a pytree as arrays; a torch callable as a JAX function.

    jax-device tensors give their array, no copy; CPU tensors are copied. The JAX function takes the keyword argument
    `key`, which it needs if the callable draws random numbers; its derivative is PyTorch's own.

    Args:
        value: A tensor, a pytree of which tensors change and anything else stays, or a torch callable.

    Returns:
        An array, the pytree with arrays in place of tensors, or a JAX function.

    Example:
        >>> import jax, jax.numpy as jnp, torch, torch_shard as ts
        >>> jax.jit(ts.jax_view(torch.nn.functional.relu))(jnp.array([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """
    if isinstance(value, torch.Tensor) or not callable(value):
        adopt_torch_nodes(value)
        with named("value"):
            return jax.tree.map(lambda leaf: to_array(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)
    return _view_of(value)


class _JaxView:
    """A torch callable as a JAX function."""

    exist: ClassVar[bool] = False

    def __init__(self, fn: Callable[..., PyTree]) -> None:
        _JaxView.exist = True
        self._pure = pure_of(fn)
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn)

    @error_prefix("jax_view")
    def __call__(self, *args: PyTree, key: jax.Array | None = None, **kwargs: PyTree) -> PyTree:
        return self.run(*args, key=key, **kwargs)

    def run(self, *args: PyTree, key: jax.Array | None = None, **kwargs: PyTree) -> PyTree:
        """Call it; errors begin with the name of the public function around this one."""
        _check_key(key)
        for reader in CLOSURE.readers:
            reader.has_views = True
        return self._pure(key, *args, **kwargs)


def _view_of(fn: Callable[..., PyTree]) -> _JaxView:
    return fn if isinstance(fn, _JaxView) else _JaxView(fn)


def _check_key(key: object) -> None:
    """Refuse what is no random key of JAX."""
    is_key = isinstance(key, jax.Array) and (
        jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or (key.dtype == jnp.uint32 and key.ndim == 1)
    )
    if key is not None and not is_key:
        raise TypeError(f"{caller()}: key must be a random key of JAX, jax.random.key(seed), got {key!r:.99}.")


def pure_of(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The JAX function `(key, *args, **kwargs)` of a torch callable or of an adapted function."""
    if not callable(fn):
        raise TypeError(f"{caller()}: expected a torch callable, such as a function or a module, got {fn!r}.")
    return fn._torch_shard_pure if is_adapted(fn) else TorchFunction(fn)  # pyright: ignore[reportFunctionMemberAccess]


def is_adapted(fn: Callable[..., object]) -> bool:
    """Tell whether `fn` is a JAX transform of a torch callable already."""
    return hasattr(fn, "_torch_shard_pure")


def apply_jax(tensor: torch.Tensor, fn: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
    """`fn(array of tensor, *args, **kwargs)` as tensors."""
    return call_jax(fn, tensor, *args, **kwargs)


def apply_jax_(tensor: torch.Tensor, fn: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> torch.Tensor:
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


@public
def shard_(tensor: torch.Tensor, sharding: jax.sharding.Sharding) -> torch.Tensor:
    """Lay the tensor out as `sharding` says, in place, and return it; inside `jax_jit` it is a constraint."""
    check_kind("sharding", sharding, jax.sharding.Sharding, hint="Give NamedSharding(mesh, P('batch')).")
    if isinstance(sharding, jax.sharding.NamedSharding):
        check_mesh(sharding.mesh)
    return apply_jax_(tensor, _with_sharding, sharding)


def _with_sharding(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(array, Tracer):
        return jax.lax.with_sharding_constraint(array, sharding)
    return jax.device_put(array, sharding)


def _jax(tensor: torch.Tensor) -> jax.Array:
    """The array of a jax-device tensor."""
    where = "in a captured function: use apply_jax" if is_fake(tensor) else "on the CPU: move it with .to('jax')"
    raise TypeError(f"jax() gives the array of a jax-device tensor; this tensor is {where}.")


@functools.cache
def register() -> None:
    """Make the device `jax` known to torch and give tensors their methods: all that importing this package changes.

    `x.apply_jax(f)` and `x.shard_(s)` also work inside captured functions, where x is one of torch's own fakes.
    """
    register_device()
    for name, method in {
        "apply_jax": apply_jax,
        "apply_jax_": apply_jax_,
        "shard_": shard_,
        "jax": _jax,
    }.items():
        setattr(torch.Tensor, name, method)
