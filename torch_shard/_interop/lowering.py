"""`lowering`: what an operator that a user has registered with `torch.library` means in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from torch._library.custom_ops import OPDEFS
from torch.utils import _pytree as torch_pytree

from torch_shard._capture import as_captured
from torch_shard._common.caller import caller, error_prefix, public
from torch_shard._common.overrides import FUNCTIONS, in_transform, replace_in
from torch_shard._common.types import Operator, PyTree
from torch_shard._common.validate import check_kind
from torch_shard._interop.jax_function import CLOSURE, run_known
from torch_shard._interop.kernels import Calls, Kernel, Split, described
from torch_shard._lowering import LOWERINGS, ON_MESH, RANDOM, Own, RowSplit, find_lowering, is_own


@public
def lowering(
    operator: Callable[..., Any],
    *,
    in_specs: PyTree = None,
    out_specs: PyTree = None,
    mesh: Mesh | None = None,
    check_vma: bool = True,
    matmul_precision: str | None = None,
) -> Callable[[Callable[..., PyTree]], Kernel]:
    """Give an operator of your own, registered with `torch.library`, its meaning in JAX; a decorator.

    The decorated function takes arrays where the operator takes tensors, in the order of its schema (arguments that
    the schema has by keyword alone, by keyword), and returns arrays of the shapes and dtypes that the operator's fake
    rule says. An operator that draws random numbers says so by its tags (`torch.Tag.nondeterministic_seeded`); the
    function then takes a random key before all else. Gradients are those of `torch.library.register_autograd`, whose
    formula may call other operators with a lowering; of an operator without a formula they are `jax.vjp`'s of the
    function, at every order.

    Args:
        operator: `torch.ops.mylib.op`, one overload of it, or what `torch.library.custom_op` has returned.
        in_specs: How arrays are split over the mesh, for functions that the compiler cannot split, as Pallas kernels:
            a `PartitionSpec` for all, or a tuple with one, or a pytree of them, for each argument (None for what is not
            a tensor). The function then gets one device's part of them.
        out_specs: How the results lie: a spec for all, or a pytree of them.
        mesh: The devices, by default those of the step; without a mesh the function gets whole arrays.
        check_vma: As in `jax.shard_map`; Pallas kernels may need False, with which a result that differs between
            devices where `out_specs` says that it does not is silently that of one device.
        matmul_precision: Of the products in the function and its derivatives, as `jax.default_matmul_precision` has it;
            by default torch's (`torch.set_float32_matmul_precision`). Pallas kernels for TPUs may need "default".

    Returns:
        A decorator, which returns a `Kernel`: the function, with `remove()`.

    Raises:
        TypeError: `operator` is not an operator.
        ValueError: It has several overloads, a lowering already, writes to its arguments, or is a composite of others.

    Example:
        >>> import jax.numpy as jnp, torch, torch_shard as ts
        >>> @torch.library.custom_op("example::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> _ = twice.register_fake(torch.empty_like)
        >>> kernel = ts.lowering(twice)(lambda x: 2 * x)
        >>> ts.jax_value_and_grad(lambda x: twice(x).sum())(torch.ones(2))[1].tolist()
        [2.0, 2.0]
        >>> kernel.remove()
    """
    op = _operator(operator)
    split = Split(in_specs, out_specs, mesh, check_vma, matmul_precision)
    split.check()
    _check_operator(op)

    @error_prefix("lowering")
    def register(fn: Callable[..., PyTree]) -> Kernel:
        check_kind("fn", fn, Callable, hint="Decorate a function of arrays.")
        return Kernel(fn, op.name().removesuffix(".default"), op, _Lowered(op, fn, split).put)

    return register


def _operator(operator: object) -> Operator:
    """The overload that is meant."""
    found = getattr(operator, "_opoverload", operator)  # of what custom_op returns
    if isinstance(found, torch._ops.OpOverload):
        return found
    if not isinstance(found, torch._ops.OpOverloadPacket):
        raise TypeError(
            f"{caller()}: operator must be an operator of torch.library, as torch.ops.mylib.op, got {operator!r:.99}. "
            "To put a JAX function in the place of another function, use torch_shard.override."
        )
    names = found.overloads()
    if len(names) != 1:
        overloads = ", ".join(f"torch.ops.{found!s}.{name}" for name in names)
        raise ValueError(f"{caller()}: {found} has {len(names)} overloads. Say which: {overloads}.")
    return getattr(found, names[0])


def _check_operator(op: Operator) -> None:
    name = op.name().removesuffix(".default")
    if not is_own(op) and find_lowering(op) is not None:
        raise ValueError(
            f"{caller()}: {name} has a lowering, torch_shard's. To run a function of yours in the place of the torch "
            "function that calls it, use torch_shard.override, as override(torch.nn.functional.gelu)."
        )
    if _has_kernel(op, "CompositeImplicitAutograd"):
        raise ValueError(
            f"{caller()}: {name} is a composite (CompositeImplicitAutograd): PyTorch runs what its kernel is written "
            f"in, and no program has it. Give its kernel another dispatch key, or use override(torch.ops.{op})."
        )
    if "split" in _by_keyword(op):
        raise ValueError(
            f"{caller()}: {name} has an argument split by keyword alone, by which a lowering learns how a step splits "
            "its batch. Give it another name, or let it be given by position."
        )
    if op._schema.is_mutable or any(a.alias_info is not None for a in (*op._schema.arguments, *op._schema.returns)):
        raise ValueError(
            f"{caller()}: {name} writes to its arguments, or returns a view of one: {op._schema}. Register one that "
            "returns new tensors."
        )


def _by_keyword(op: Operator) -> list[str]:
    return [a.name for a in op._schema.arguments if a.kwarg_only]


class _Lowered:
    """The lowering of an operator, and the operator as captures call it."""

    def __init__(self, op: Operator, fn: Callable[..., PyTree], split: Split) -> None:
        name = op.name().removesuffix(".default")
        self.op, self.fn, self.split = op, fn, split
        self._is_random = torch.Tag.nondeterministic_seeded in op.tags
        self.own = Own(name, described(fn), f"the fake rule of {name} (torch.library.register_fake) says")
        self._calls = Calls(self._run, self.own, split.matmul_precision)

    def put(self) -> Callable[[], None]:
        """Put it into the tables; returns what takes it away."""
        packet = self.op.overloadpacket
        functions = replace_in(FUNCTIONS, {self.op: self.captured, packet: _by_overload(packet)})
        lowering = replace_in(LOWERINGS, {self.op: self})
        if self._is_random:
            RANDOM.add(self.op)
        ON_MESH.add(self.op)

        def take_away() -> None:
            functions()
            lowering()
            RANDOM.discard(self.op)
            ON_MESH.discard(self.op)

        return take_away

    def __call__(self, *args: PyTree, split: RowSplit | None = None, **kwargs: PyTree) -> PyTree:
        num_keys = int(self._is_random)
        with CLOSURE.within(split):
            return self._run(self._values(args[num_keys:], kwargs), *args[:num_keys])

    def _values(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> list[PyTree]:
        """All arguments, in the order of the schema: the dispatcher leaves out those that are defaults."""
        arguments = self.op._schema.arguments
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        values = (given.get(a.name, a.default_value) for a in arguments)
        return [
            list(value) if isinstance(value, list) else value for value in values
        ]  # graphs have a list of their own

    def _named(self, values: Sequence[PyTree]) -> tuple[Sequence[PyTree], dict[str, PyTree]]:
        """The values of all arguments, those by position and those by keyword."""
        count = len(values) - len(_by_keyword(self.op))
        return values[:count], dict(zip(_by_keyword(self.op), values[count:], strict=True))

    def _run(self, values: Sequence[PyTree], *key: jax.Array) -> PyTree:
        def run(*values: PyTree) -> PyTree:
            args, kwargs = self._named(values)
            return self.fn(*key, *args, **kwargs)

        return self.split.run(run, values, f"{self.own.fn}, the lowering of {self.own.name},")

    def captured(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The operator in a capture: with JAX's derivative if it has none of its own."""
        tensors = [t for t in torch_pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        needs_grad = torch.is_grad_enabled() and any(as_captured(t).requires_grad for t in tensors)
        if not needs_grad or _has_derivative(self.op) or in_transform():
            return self.op(*args, **kwargs)
        if self._is_random:
            raise NotImplementedError(
                f"{self.own.name} draws random numbers, and a derivative by JAX would draw others. Give it a formula, "
                "torch.library.register_autograd, which saves what was drawn."
            )
        known, tensors = self._calls.of(self._values(args, kwargs), (), operator=self._operate)
        found = run_known(known, tensors)
        returns = self.op._schema.returns
        return found[0] if len(returns) == 1 and str(returns[0].type) == "Tensor" else found

    def _operate(self, *values: PyTree) -> PyTree:
        args, kwargs = self._named(values)
        return self.op(*args, **kwargs)


def _by_overload(packet: Any) -> Callable[..., PyTree]:
    """The operators of a packet as captures call them: the overload that the arguments choose."""

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
        overload: Any = getattr(packet, name or "default")
        run: Callable[..., PyTree] = FUNCTIONS.get(overload) or overload
        return run(*args, **kwargs)

    return call


def _has_derivative(operator: Operator) -> bool:
    """Tell whether an operator has a formula for its gradients, by `torch.library.register_autograd` or its kernel."""
    definition = OPDEFS.get(operator.name().removesuffix(".default"))
    if definition is not None and definition._opoverload is operator:  # which has a kernel that raises, if not
        return definition._backward_fn is not None
    return _has_kernel(operator, "Autograd", "AutogradCPU")


def _has_kernel(operator: Operator, *keys: str) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in keys)
