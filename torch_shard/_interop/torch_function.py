"""A torch callable as a JAX function, whose derivative is PyTorch's own at every order.

The callable is captured for the shapes that it meets and lowered; its derivative rule is another torch callable,
`torch.autograd.grad` of the first, captured and lowered in turn. What it reaches by itself (a closed-over module's
parameters) is read anew by whoever traces: see `Closure`.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import numpy as np
import torch

from torch_shard._capture import (
    ActiveRegions,
    Captured,
    Reads,
    Spec,
    TensorFn,
    current_mode,
    is_literal,
    repeating,
)
from torch_shard._common.axes import into_shares, manual_axes, map_together, sum_shares, vary_like, vjp_of_chosen
from torch_shard._common.caller import caller
from torch_shard._common.convert import Rest, Static, adopt_torch_nodes, take_out
from torch_shard._common.dtypes import captured_dtype
from torch_shard._common.random import Key, NeedsKey
from torch_shard._common.types import PyTree
from torch_shard._interop.jax_function import CLOSURE, Reader
from torch_shard._lowering import Program, capture_settings
from torch_shard._sharding import refuse_explicit


class FlatFunction:
    """A callable of tensors to tensors, with its captured programs."""

    def __init__(
        self, fn: TensorFn[Any], what: str, bound: tuple[torch.Tensor, ...] = (), *, is_derived: bool = False
    ) -> None:
        self.fn, self.what, self._is_bound, self._is_derived = fn, what, frozenset(map(id, bound)), is_derived
        self._programs: dict[object, list[Program[Any]]] = {}
        self._needs_grad: set[tuple[bool, ...]] = set()
        self._fresh: set[int] = set()
        self._bound: dict[object, FlatFunction] = {}
        # Caches of its own: one of the class would keep every callable, and its programs, forever.
        self.differentiable = functools.cache(functools.partial(_with_torch_derivative, self))
        self.vjp = functools.cache(self._vjp)

    def _current(
        self, arrays: Sequence[jax.Array], needs_grad: tuple[bool, ...]
    ) -> tuple[tuple[Spec, ...], list[Program], Program | None]:
        specs = tuple(
            Spec(tuple(a.shape), captured_dtype(a.dtype), grad) for a, grad in zip(arrays, needs_grad, strict=True)
        )
        token = CLOSURE.token
        programs = self._programs.setdefault((specs, token or capture_settings()), [])
        return specs, programs, next((p for p in programs if (p.fits_axes() if token else p.is_current())), None)

    def with_closure(self, arrays: list[jax.Array]) -> tuple["FlatFunction", list[jax.Array]]:
        """The function and arrays to run: called from a capture, closed-over tensors are arguments with a gradient."""
        if CLOSURE.token is None:
            return self, arrays
        program = self.program(arrays, (False,) * len(arrays))
        closure = tuple(t for t in program.graph.closure if not is_literal(t))  # each capture has literals of its own
        values = CLOSURE.values(closure)
        if not closure:
            return self, arrays
        key = (CLOSURE.token, tuple(map(id, closure)))
        return self._bound.setdefault(key, self._bind(closure)), [*arrays, *values]

    def _bind(self, closure: tuple[torch.Tensor, ...]) -> "FlatFunction":
        def bound(*inputs: torch.Tensor) -> Any:
            capture_mode = current_mode()
            assert capture_mode is not None
            with capture_mode.binding(closure, inputs[-len(closure) :]):
                return self.fn(*inputs[: -len(closure)])

        return FlatFunction(bound, self.what, closure)

    def aux(self, arrays: Sequence[jax.Array]) -> Any:
        """Results besides tensors that the callable returned when it was captured for arrays like these."""
        choices = ((False,) * len(arrays), *(n for n in self._needs_grad))
        found = (self._current(arrays, needs_grad)[2] for needs_grad in choices)
        return next(program for program in found if program is not None).graph.aux

    def program(self, arrays: Sequence[jax.Array], needs_grad: tuple[bool, ...]) -> Program[Any]:
        """The program for arrays like these."""
        specs, programs, found = self._current(arrays, needs_grad)
        self._needs_grad.add(needs_grad)
        if found is None:
            found = self._captured(specs)
            self._fresh.add(id(found))
            self._refuse_writes(found.graph)
            self._refuse_unseen(found.graph)
            programs.append(found)
        return found

    def _captured(self, specs: tuple[Spec, ...]) -> Program[Any]:
        if CLOSURE.token is not None or current_mode() is not None:  # the capture around it sees what is read
            with torch.inference_mode(False):  # a derivative may be taken of it
                return Program(self.fn, specs, self.what)
        reads = Reads(self.fn, restore=False)
        with torch.inference_mode(False), reads.seen():
            program = Program(self.fn, specs, self.what, looks=not self._is_derived and not manual_axes())
        return program.reading(reads.guard())

    def _refuse_writes(self, graph: Captured[Any]) -> None:
        if graph.graded:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in graph.graded)
            raise NotImplementedError(
                f"{self.what} leaves gradients in .grad of tensors that it closes over, of shapes {shapes}, where a "
                "compiled function cannot put them. Use torch.autograd.grad within it, or jax_value_and_grad, and "
                "return the gradients."
            )
        if graph.written:
            raise NotImplementedError(
                f"{self.what} writes in place to argument tensor {graph.written[0]} (in the order of the flattened "
                "arguments), and a compiled function cannot change its caller's arrays. Write to a clone "
                "(x = x.clone(); of buffers {name: b.clone() for name, b in buffers.items()}) and return it."
            )

    def _refuse_unseen(self, graph: Captured[Any]) -> None:
        """Refuse what would be a constant to the derivative."""
        unseen = [tuple(tensor.shape) for tensor in graph.closure if id(tensor) in self._is_bound]
        if unseen:
            raise NotImplementedError(
                f"{self.what} closes over a tensor of shape {unseen[0]} and gives it to PyTorch where a capture cannot "
                "follow its gradient, such as a transform of torch.func. Pass it as an argument, or give on "
                "x.view_as(x)."
            )

    def run(self, key: Key, arrays: Sequence[jax.Array], needs_grad: tuple[bool, ...]) -> list[jax.Array]:
        """Outputs of the callable on these arrays."""
        program = self.program(arrays, needs_grad)
        if program.random and key is None:
            raise NeedsKey(f"{self.what} draws random numbers: pass it a key (key=jax.random.key(seed)).")
        if id(program) in self._fresh:  # this is the call for which it was captured
            self._fresh.discard(id(program))
        elif not CLOSURE.traces:
            program.look_again()
        split = None if manual_axes() else CLOSURE.split
        return program.run(key, *arrays, *CLOSURE.read(program), split=split)

    def apply(self, key: Key, *arrays: jax.Array) -> list[jax.Array]:
        """The callable as a JAX function."""
        refuse_explicit(arrays, self.what)
        no_grad = (False,) * len(arrays)
        closure = _Tensors(self.program(arrays, no_grad).graph.closure)
        values = CLOSURE.values(closure)
        refuse_explicit(values, self.what)
        return self.differentiable(no_grad, closure, ActiveRegions.here())(key, *arrays, *values)

    def _vjp(self, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> "FlatFunction":
        """`(*primals, *cotangents of the given outputs) -> gradients of the wanted primals`."""

        def gradients(*inputs: torch.Tensor) -> Any:
            again, cotangents = any(t.requires_grad for t in inputs), inputs[len(wanted) :]
            primals = [
                p.detach().requires_grad_() if want and not p.requires_grad else p
                for p, want in zip(inputs, wanted, strict=False)
            ]
            with repeating():
                results = self.fn(*primals)[0]
            outputs, leaves = itertools.compress(results, given), [*itertools.compress(primals, wanted)]
            pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
            if not pairs:
                return [torch.zeros_like(leaf) for leaf in leaves], None
            outs, cots = zip(*pairs, strict=True)
            grads = torch.autograd.grad(
                outs, leaves, cots, create_graph=again, allow_unused=True, materialize_grads=True
            )
            return grads, None

        return FlatFunction(gradients, f"the derivative of {self.what}", is_derived=True)


def _with_torch_derivative(
    function: FlatFunction, needs_grad: tuple[bool, ...], closure: "_Tensors", autocast: ActiveRegions
) -> Callable[..., list[jax.Array]]:
    """The JAX function `(key, *arrays, *values of the closure) -> list of arrays`.

    The values are arguments since JAX may trace derivatives when nobody reads them any more, and only once.

    Args:
        function: The callable.
        needs_grad: On which inputs it sees `requires_grad`.
        closure: The tensors that it reaches by itself.
        autocast: The regions that it runs in; JAX may trace derivatives when they are over.
    """
    num_arrays = len(needs_grad)

    def run(key: Key, *inputs: jax.Array) -> list[jax.Array]:
        arrays = inputs[:num_arrays]
        with autocast.entered(), Reader(closure, inputs[num_arrays:], partial=True).active():
            outputs = function.run(key, arrays, needs_grad)
        return map_together(outputs, arrays) if any(needs_grad) else outputs

    call = jax.custom_vjp(run)
    pushed = jax.custom_jvp(run)

    def forward(key: Any, *primals: Any) -> Any:
        inputs = [p.value for p in primals]
        perturbed = tuple(
            p.perturbed and jax.numpy.issubdtype(p.value.dtype, jax.numpy.inexact) for p in primals[:num_arrays]
        )
        key = None if key is None else key.value
        # Not `run`: a derivative around this one would then differentiate the lowered operators, not the callable.
        outputs = function.differentiable(perturbed, closure, autocast)(key, *inputs)
        return outputs, (key, inputs[:num_arrays], inputs[num_arrays:], Static((perturbed, CLOSURE.token)))

    def backward(saved: Any, cotangents: list[Any]) -> Any:
        key, arrays, values, about = saved
        wanted, token = about.value
        given = tuple(_is_given(c) for c in cotangents)
        # In JAX the gradient of a complex number is the conjugate of what it is in torch.
        chosen = [into_shares(jax.numpy.conj(c)) for c in itertools.compress(cotangents, given)]
        if not chosen or not any(wanted):
            return (None,) * (1 + len(arrays) + len(values))
        with autocast.entered(), Reader(closure, values, token, partial=True).active():
            shares = iter(function.vjp(wanted, given).apply(key, *arrays, *chosen))
        grads = (
            sum_shares(jax.numpy.conj(next(shares)), a) if w else None for a, w in zip(arrays, wanted, strict=True)
        )
        return None, *grads, *(None for _ in values)

    def push(primals: Any, tangents: Any) -> Any:
        """By the derivative of the backward pass, which is linear in its cotangents, and so PyTorch's own too."""
        key, arrays, values = primals[0], primals[1 : 1 + num_arrays], primals[1 + num_arrays :]
        results = either(*primals)
        wanted, given = (
            tuple(jax.numpy.issubdtype(a.dtype, jax.numpy.inexact) for a in of) for of in (arrays, results)
        )
        pull = vjp_of_chosen(lambda *arrays: either(key, *arrays, *values), arrays, wanted, given)[1]
        zeros = [vary_like(jax.numpy.zeros_like(o), o) for o in itertools.compress(results, given)]
        (moved,) = jax.vjp(pull, zeros)[1](tuple(itertools.compress(tangents[1 : 1 + num_arrays], wanted)))
        found = iter(moved)
        none = (np.zeros(o.shape, jax.dtypes.float0) for o in results)
        return results, [next(found) if g else zero for g, zero in zip(given, none, strict=True)]

    def either(key: Key, *inputs: jax.Array) -> list[jax.Array]:
        """In reverse mode; in forward mode where JAX is in that."""
        if any(map(_is_pushed, inputs)):
            return pushed(key, *inputs)
        try:
            return call(key, *inputs)
        except NotImplementedError as error:  # of an eager jax.shard_map, within which nothing is differentiated
            if "symbolic_zeros support with shard_map" not in str(error):
                raise
            return run(key, *inputs)

    call.defvjp(forward, backward, symbolic_zeros=True)
    pushed.defjvp(push)
    return either


def _is_pushed(array: Any) -> bool:
    """Tell whether JAX pushes a tangent forward along with an array, which only the class of its tracers says."""
    # Where JAX makes a gradient of a jvp that it transposes, the tangent is such a tracer.
    is_pulled = type(getattr(array, "tangent", None)).__name__ == "JaxprTracer"
    return type(array).__name__ == "JVPTracer" and not is_pulled


class _Tensors(tuple[torch.Tensor, ...]):
    """Tensors that are equal if they are the same ones."""

    def __hash__(self) -> int:
        return hash(tuple(map(id, self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tensors) and [*map(id, self)] == [*map(id, other)]


def _is_given(cotangent: Any) -> bool:
    return not isinstance(cotangent, jax.custom_derivatives.SymbolicZero) and cotangent.dtype != jax.dtypes.float0


class TorchFunction:
    """A torch callable of pytrees as the JAX function `(key, *args, **kwargs) -> pytree`."""

    def __init__(self, fn: Callable[..., PyTree]) -> None:
        self.fn = fn
        self.what = _name_of(fn)
        self._flat: dict[object, FlatFunction] = {}

    def __call__(self, key: Key, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if isinstance(self.fn, torch.nn.Module):
            _refuse_parameters(self.fn, args)
        arrays, rest = take_out((args, kwargs), jax.Array, np.ndarray, _LikeArray)
        arrays = [jax.numpy.asarray(array) if isinstance(array, np.ndarray) else array for array in arrays]
        function, arrays = self._flat_function(rest).with_closure(arrays)
        outputs = function.apply(key, *arrays)
        return function.aux(arrays).filled(outputs)

    def _flat_function(self, rest: Rest) -> FlatFunction:
        def flat(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], Rest]:
            args, kwargs = rest.filled(tensors)
            out = self.fn(*args, **kwargs)
            adopt_torch_nodes(out)
            return take_out(out, torch.Tensor)

        signature = rest.structure, Static(rest.leaves)
        return self._flat.setdefault(signature, FlatFunction(flat, self.what))


@runtime_checkable
class _LikeArray(Protocol):
    """What JAX takes for an array."""

    def __jax_array__(self) -> jax.Array: ...


def _refuse_parameters(module: torch.nn.Module, args: tuple[PyTree, ...]) -> None:
    """Answer the call of those who know `apply(params, x)`, of Flax for example."""
    if not (args and isinstance(args[0], Mapping)):
        return
    first = cast(Mapping[object, object], args[0])
    parameters = {name for name, _ in module.named_parameters()}
    if first and parameters >= first.keys() - {name for name, _ in module.named_buffers()} != set():
        name = type(module).__name__
        raise TypeError(
            f"{caller()}: the first argument is a dict of parameters of {name}, and {name} is called as in torch, with "
            "the parameters that it has. For a function of them write "
            "lambda params, *args: torch.func.functional_call(net, params, args) in place of net."
        )


def _name_of(fn: Callable[..., object]) -> str:
    if isinstance(fn, torch.nn.Module):
        return type(fn).__name__
    return f"{getattr(fn, '__qualname__', type(fn).__name__)}()"
