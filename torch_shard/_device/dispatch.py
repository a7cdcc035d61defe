"""The device type `jax`: which operators PyTorch may call on its tensors, and how each runs on arrays.

Importing this module registers the device.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._C import _acc as acc  # pyright: ignore[reportAttributeAccessIssue]
from torch._decomp import decomposition_table
from torch.utils import _pytree as torch_pytree
from torch.utils import backend_registration

from torch_shard._common.dtypes import jax_dtype, torch_dtype
from torch_shard._common.overrides import OPERATORS
from torch_shard._common.random import next_key
from torch_shard._common.types import Operator, PyTree
from torch_shard._device.backend import FALLBACK, KERNELS, DeviceModule, register_autocast, same_accelerator
from torch_shard._device.tensor import JaxTensor, Storage, ViewStorage, to_array, wrap_array
from torch_shard._lowering import (
    RANDOM,
    STORAGE_KWARGS,
    conform,
    exact_integers,
    find_lowering,
    import_torchax,
    refuse_generator,
)

aten = torch.ops.aten

logger = logging.getLogger(__name__)


@functools.cache
def runner(func: Operator) -> Callable[..., PyTree]:
    """Find how to run an operator: as a special case, as one that writes, as a view, or by its lowering alone."""
    if (special := _SPECIAL.get(func) or OPERATORS.get(func)) is not None:
        return special
    if func._can_decompose():  # in torch.inference_mode nothing above has taken it apart
        return func.decompose
    aliases = [a.alias_info for a in func._schema.arguments]
    if any(info is not None and info.is_write for info in aliases):
        return lambda *args, **kwargs: _write(func, args, kwargs)
    if aliases and aliases[0] is not None:
        return lambda *args, **kwargs: _view(func, args, kwargs)
    return lambda *args, **kwargs: _wrap(_run(func, args, kwargs))


def _run(func: Operator, args: Sequence[PyTree], kwargs: dict) -> PyTree:
    """The operator on arrays; PyTorch's decomposition where there is no lowering."""
    lowering = find_lowering(func)
    if lowering is None:
        return _decompose(func, args, kwargs)
    refuse_generator(func, kwargs)
    options = {name: _operand(value) for name, value in kwargs.items() if name not in STORAGE_KWARGS}
    arrays = [_operand(arg) for arg in args]
    key = (next_key(),) if func in RANDOM else ()
    try:
        fake = result_of(func, args, kwargs)
        exact = exact_integers(func, fake)
        return _kept(conform(func, fake, lowering(*key, *map(exact, arrays), **options)), args)
    except NotImplementedError:
        if func in RANDOM:
            raise
        return torch_pytree.tree_map_only(torch.Tensor, to_array, _on_host(func, args, kwargs))


def _kept(results: PyTree, args: Sequence[PyTree]) -> PyTree:
    """Results as arrays of their own, where one may be an operand whose memory a training step takes back."""
    for arg in torch_pytree.tree_leaves(args):
        if isinstance(arg, JaxTensor) and arg._storage.root.source is not None:
            results = jax.tree.map(arg._storage.keep, results)
    return results


def _operand(value: PyTree) -> PyTree:
    """An argument of an operator as its lowering takes it."""
    if isinstance(value, JaxTensor):
        return value.jax()
    if isinstance(value, (list, tuple)):
        return [_operand(v) for v in value]
    if isinstance(value, torch.dtype):
        return torch_dtype(jax_dtype(value))
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:  # torch lets CPU scalars meet tensors of any device
            return to_array(value)
        raise RuntimeError(
            f"A CPU tensor of shape {tuple(value.shape)} meets a tensor on the jax device. "
            "Move it first: tensor.to('jax')."
        )
    return value


def _decompose(func: Operator, args: Sequence[PyTree], kwargs: dict) -> PyTree:
    if func._opname.startswith("_foreach_"):  # PyTorch's kernel for any device goes through the lists
        result = func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        return torch_pytree.tree_map_only(torch.Tensor, to_array, result)
    rule = decomposition_table.get(func)
    result = rule(*args, **kwargs) if rule is not None else func.decompose(*args, **kwargs)
    if result is NotImplemented:
        result = _on_host(func, args, kwargs)
    return torch_pytree.tree_map_only(torch.Tensor, to_array, result)


_RUNS_ON_HOST = "%s has no lowering to JAX: it runs on the CPU, and its operands are copied there and back."


def _on_host(func: Operator, args: Sequence[PyTree], kwargs: dict) -> PyTree:
    """The operator by PyTorch's own CPU kernel; in a backward pass, an error instead would end the process."""
    logger.warning(_RUNS_ON_HOST, func)

    def to_cpu(value: PyTree) -> PyTree:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value.cpu_copy() if isinstance(value, JaxTensor) else value

    args, kwargs = torch_pytree.tree_map(to_cpu, (args, kwargs))
    return func(*args, **kwargs)


def _wrap(tree: PyTree) -> PyTree:
    """Arrays of an operator's result as tensors."""
    if isinstance(tree, jax.Array):
        return wrap_array(tree)
    return [_wrap(t) for t in tree] if isinstance(tree, (list, tuple)) else tree


def _view(func: Operator, args: Sequence[PyTree], kwargs: dict) -> PyTree:
    """A view operator: the result shares the storage of its base."""
    base = args[0]._storage
    if func is aten.detach.default or func is aten.alias.default:
        # A gradient that is a view may become `.grad` as it is, to which PyTorch adds in place.
        is_gradient = isinstance(base, ViewStorage) and torch._C._current_graph_task_id() >= 0
        return wrap_array(base.keep(base.read())) if is_gradient else JaxTensor(base)
    lowering, strided = find_lowering(func), view_of(func, base.strided, args[1:], kwargs)
    if strided is None and lowering is None:
        return _wrap(_run(func, args, kwargs))

    def nth(index: int | None) -> Callable[[PyTree], PyTree] | None:
        def view(value: PyTree) -> PyTree:
            assert lowering is not None
            result = lowering(value, *args[1:], **kwargs)
            return result if index is None else result[index]

        return view if lowering is not None else None

    if isinstance(strided, (list, tuple)):
        return [JaxTensor(ViewStorage(base, nth(i), part)) for i, part in enumerate(strided)]
    return JaxTensor(ViewStorage(base, nth(None), strided))


def _write(func: Operator, args: Sequence[PyTree], kwargs: dict) -> PyTree:
    """An operator that writes in place or to `out=`: run its functional form, then write."""
    values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
        name = func.overloadpacket.__name__
        raise NotImplementedError(
            f"{name}() would give a tensor on the jax device another shape in place. Use a new tensor instead, as "
            f"x = x.{name.removesuffix('_')}(...)."
        )
    functional = _functional(func)
    if functional is None:
        return _write_on_host(func, values, written)
    _refuse_wide_number(values, written)
    options = {k: v for k, v in kwargs.items() if k not in written}
    outs = [a.name for a in func._schema.arguments if a.is_out]
    if outs and "dtype" in (a.name for a in functional._schema.arguments):  # a sum is that of numbers of this dtype
        options["dtype"] = options.get("dtype") or values[outs[0]].dtype
    if torch.Tag.pointwise in func.tags:
        _refuse_lossy(result_of(functional, args, options), values[written[0]])
    result = _run(functional, args, options)
    results = result if isinstance(result, (list, tuple)) and len(written) > 1 else [result]
    for name, value in zip(written, results, strict=True):
        if name in outs:
            _refuse_other_shape(func, values[name], value)
        _store(values[name], value)
    return _written(func, values, written)


def _refuse_lossy(result: PyTree, target: PyTree) -> None:
    """Refuse to write what has another kind of numbers, as torch does."""
    if not isinstance(result, torch.Tensor) or not isinstance(target, torch.Tensor):
        return
    if not torch.can_cast(result.dtype, target.dtype):
        torch.empty(0, dtype=target.dtype).add_(torch.empty(0, dtype=result.dtype))


def _refuse_wide_number(values: dict[str, PyTree], written: list[str]) -> None:
    """Refuse a number of more than 32 bits for an int64 tensor that the device holds in 32."""
    target = values[written[0]]
    if not isinstance(target, JaxTensor) or target.dtype is not torch.int64 or jax.config.values["jax_enable_x64"]:
        return
    for value in values.values():
        if type(value) is int and not -(2**31) <= value < 2**31:
            raise OverflowError(
                f"{value} does not fit the 32 bits in which JAX holds an int64 tensor. "
                "jax.config.update('jax_enable_x64', True) at the start of the program keeps 64."
            )


def _refuse_other_shape(func: Operator, target: Any, value: Any) -> None:
    """Refuse an `out=` that torch would resize."""
    if isinstance(target, torch.Tensor) and target.shape != value.shape:
        raise NotImplementedError(
            f"{func._opname}(out=) would give a tensor on the jax device another shape: out has shape "
            f"{tuple(target.shape)}, the result {tuple(value.shape)}. Give an out of that shape, or use the result."
        )


def _written(func: Operator, values: dict[str, PyTree], written: list[str]) -> PyTree:
    """Result of an operator that writes: what it wrote to, or nothing."""
    if not func._schema.returns:
        return None
    returned = [values[name] for name in written[: len(func._schema.returns)]]  # rrelu_ writes its noise, too
    return returned[0] if len(returned) == 1 else tuple(returned)


def _store(target: PyTree, value: PyTree) -> None:
    """Write to a tensor, or to each of a list (the operators named foreach)."""
    if isinstance(target, (list, tuple)):
        for t, v in zip(target, value, strict=True):
            _store(t, v)
    else:
        target._storage.write(value[0] if isinstance(value, (list, tuple)) else value)


def _write_on_host(func: Operator, values: dict[str, PyTree], written: list[str]) -> PyTree:
    """An operator that only writes, by PyTorch's own CPU kernel."""
    logger.warning(_RUNS_ON_HOST, func)
    hosts = torch_pytree.tree_map_only(JaxTensor, JaxTensor.cpu_copy, values)
    func(**hosts)
    for name in written:
        _store(values[name], torch_pytree.tree_map(to_array, hosts[name]))
    return _written(func, values, written)


_FUNCTIONAL = {aten.normal_.default: aten.normal_functional.default, aten.bernoulli_.float: aten.bernoulli.p}


def _functional(func: Operator) -> Operator | None:
    """The overload that returns what `func` writes, if there is one."""
    if func in _FUNCTIONAL:
        return _FUNCTIONAL[func]
    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"))
    inputs = [a.name for a in func._schema.arguments if not a.is_out]
    for overload in (func._overloadname, *packet.overloads()):
        found = getattr(packet, overload) if overload in packet.overloads() else None
        if found and not found._schema.is_mutable and [a.name for a in found._schema.arguments] == inputs:
            return found
    return None


def _empty(size: Iterable[int], *_: object, dtype: torch.dtype | None = None, **__: object) -> JaxTensor:
    return JaxTensor(Storage(jax.ShapeDtypeStruct(tuple(size), jax_dtype(dtype or torch.get_default_dtype()))))


def _empty_like(
    x: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None, **kwargs: object
) -> torch.Tensor:
    if device is not None and torch.device(device).type != "jax":
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=device)
    return _empty(x.shape, dtype=dtype or x.dtype)


def _parameter(source: torch.Tensor) -> torch.Tensor | None:
    """The parameter that is moving to the device, if it is one."""
    if not isinstance(source, torch.nn.Parameter):
        return None
    if source._backward_hooks or getattr(source, "_post_accumulate_grad_hooks", None):
        raise NotImplementedError(
            f"A parameter of shape {tuple(source.shape)} has gradient hooks, which would be lost as it moves to the "
            "jax device. Move the model first, then register its hooks."
        )
    return source


def _cast(array: jax.Array, dtype: torch.dtype | None) -> jax.Array:
    """An array in another dtype, as a compiled function casts it."""
    cast = find_lowering(aten._to_copy.default)
    assert cast is not None
    return cast(array, dtype=dtype)


def _own_array(tensor: torch.Tensor) -> jax.Array:
    """The array of a tensor, as one that no training step takes back."""
    array = to_array(tensor)
    return tensor._storage.keep(array) if isinstance(tensor, JaxTensor) else array


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, JaxTensor):
        return target.copy_(source.cpu_copy())  # pyright: ignore[reportAttributeAccessIssue]
    array = _cast(_own_array(source), target.dtype)
    if not isinstance(source, JaxTensor) and source.ndim and target._storage.is_written:
        array = jax.device_put(jnp.broadcast_to(array, target.shape), target.sharding)  # as load_state_dict expects
    target._storage.write(array)
    target._moved_from = _parameter(source)
    return target


def _to_copy(
    x: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None, **_: object
) -> torch.Tensor:
    on_jax = torch.device(device).type == "jax" if device is not None else isinstance(x, JaxTensor)
    if not on_jax:
        host = x.cpu_copy() if isinstance(x, JaxTensor) else x
        return host.to(device=device, dtype=dtype or host.dtype)
    result = wrap_array(_cast(_own_array(x), dtype))
    result._moved_from = _parameter(x)
    return result


def _rrelu(
    x: torch.Tensor, noise: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: object
) -> torch.Tensor:
    """It writes to `noise` and returns something else, as no other operator does."""
    if not training:
        return torch.where(x < 0, x * ((lower + upper) / 2), x)
    noise.copy_(torch.where(x < 0, torch.empty_like(x).uniform_(lower, upper), 1))
    return x * noise


def _batch_norm_in_eval(*args: PyTree) -> PyTree:
    """PyTorch says of meta tensors that statistics are saved, as on GPUs, and on the CPU none are."""
    lowering = find_lowering(aten._native_batch_norm_legit_no_training.default)
    assert lowering is not None
    return _wrap(list(lowering(*map(_operand, args))))


def _batch_norm_in_train(
    x: JaxTensor, weight: PyTree, bias: PyTree, mean: JaxTensor, var: JaxTensor, *options: Any
) -> PyTree:
    """PyTorch's functional form returns the new statistics, which this one writes."""
    lowering = find_lowering(aten._native_batch_norm_legit_functional.default)
    assert lowering is not None
    *results, new_mean, new_var = lowering(*map(_operand, (x, weight, bias, mean, var)), *options)
    mean._storage.write(new_mean)
    var._storage.write(new_var)
    return _wrap(results)


def _multilabel_margin_loss(x: JaxTensor, target: JaxTensor, reduction: int) -> PyTree:
    """PyTorch's decomposition counts what stands behind the first -1, which its kernels do not."""
    func = aten.multilabel_margin_loss_forward.default
    results = _on_host(func, [x, target.cpu_copy().long(), reduction], {})
    return _wrap([to_array(result) for result in results])


def _determinant(func: Operator, x: torch.Tensor) -> PyTree:
    """PyTorch's gradient takes its factors for those of the transpose if the matrix is contiguous, as lowerings do."""
    return _wrap(_run(func, [x if x.is_contiguous() or x.is_complex() else x.mT], {}))


_SPECIAL: dict[Operator, Callable] = {
    aten.rrelu_with_noise.default: _rrelu,
    # PyTorch's own decomposition gives None, too.
    aten.batch_norm.default: lambda *args: aten.native_batch_norm.default(*args[:8])[0],
    aten._native_batch_norm_legit_no_training.default: _batch_norm_in_eval,
    aten._native_batch_norm_legit.default: _batch_norm_in_train,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    aten.empty.memory_format: _empty,
    aten.empty_strided.default: _empty,
    aten.empty_like.default: _empty_like,
    aten.copy_.default: _copy_,
    aten._to_copy.default: _to_copy,
    **{op: functools.partial(_determinant, op) for op in (aten._linalg_det.default, aten._linalg_slogdet.default)},
    aten._local_scalar_dense.default: lambda x: x.jax().item(),
    aten.set_data.default: lambda x, value: setattr(x, "data", value),
}


def register_device() -> None:
    """Give torch the device type `jax`. torchax registers one on import: ours takes its place."""
    JaxTensor.run_operator = staticmethod(runner)
    with same_accelerator():
        import_torchax()
    del torch.jax  # pyright: ignore[reportAttributeAccessIssue]
    module: Any = DeviceModule()  # a module to torch, by its functions
    torch._register_device_module("jax", module)
    acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
    FALLBACK.fallback(lambda func, *args, **kwargs: runner(func)(*args, **kwargs), "PrivateUse1")
    for op in _FACTORIES:
        KERNELS.impl(op, lambda *args, op=op, **kwargs: _wrap(_run(op, args, kwargs)), "PrivateUse1")
    register_autocast()
    torch.Tensor.is_jax = property(lambda self: self.device.type == "jax")  # pyright: ignore  (torch.compile reads it)
    KERNELS.impl(aten.copy_.default, _copy_, "PrivateUse1")  # torch.tensor(..., device="jax") gets no further


# PyTorch builds these by resizing an empty tensor, which an array cannot do.
_FACTORIES = (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.randperm.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
)


# What PyTorch says of the result of an eager operator: shape and dtype, by running it on meta tensors.


_KEPT = 4096


def result_of(func: Operator, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
    """Meta tensors like the results of an operator; None where PyTorch cannot tell them from shapes and dtypes."""
    try:
        return _result(func, _outline(args), tuple(kwargs), _outline(kwargs.values()), torch.get_default_dtype())
    except TypeError:  # an argument that cannot be hashed
        return None


@functools.lru_cache(maxsize=_KEPT)
def _result(func: Operator, args: Any, names: tuple[str, ...], values: Any, default: torch.dtype) -> PyTree:
    try:
        return func(*map(_on_meta, args), **dict(zip(names, map(_on_meta, values), strict=True)))
    except Exception:  # it has no such kernel, or its result depends on values
        return None


def view_of(func: Operator, base: torch.Tensor, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
    """The result of a view operator on a meta tensor; None where elements are not those of its base, in its places."""
    try:
        found = func(base, *args, **kwargs)
    except Exception:  # torch cannot view these strides so, and an array can be reshaped always
        return None
    views = found if isinstance(found, (list, tuple)) else [found]
    return found if all(v.dtype == base.dtype and not (v.is_conj() or v.is_neg()) for v in views) else None


def _outline(values: Any) -> Any:
    """For each value, its kind and what matters: 1, 1.0 and True are equal, and promote differently."""
    return tuple(
        (JaxTensor, value._storage.shape, value._storage.dtype)
        if isinstance(value, JaxTensor)
        else (torch.Tensor, value.shape, value.dtype)
        if isinstance(value, torch.Tensor)
        else (list, _outline(value))
        if isinstance(value, (list, tuple))
        else (type(value), value)
        for value in values
    )


def _on_meta(outline: Any) -> Any:
    kind, value, *dtype = outline
    if dtype:
        found = torch_dtype(dtype[0]) if kind is JaxTensor else dtype[0]
        return torch.empty(value, dtype=found, device="meta")
    if kind is list:
        return list(map(_on_meta, value))
    return torch.device("meta") if kind is torch.device else value
