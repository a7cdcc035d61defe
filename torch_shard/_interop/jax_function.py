"""A JAX function of arrays as one operator of PyTorch: opaque to it, and with a derivative of its own.

In a capture its shapes come from a trace by JAX, its meaning from the function itself. One that has effects, such as
printing, stays, used or not.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from torch.fx import has_side_effect
from torch.utils._python_dispatch import _disable_current_modes

from torch_shard._capture import ModuleFlags, as_captured, current_mode, is_literal, outside_capture
from torch_shard._common.axes import into_shares, sum_shares, tracked_axes, vary, vjp_of_chosen
from torch_shard._common.dtypes import captured_dtype, jax_dtype
from torch_shard._common.fx import args_of
from torch_shard._common.overrides import captured_op, rewrites
from torch_shard._common.patching import having
from torch_shard._device import to_array, wrap_array
from torch_shard._lowering import Own, Program, RowSplit, lowers

FlatJaxFn = Callable[..., list[jax.Array]]

Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor in a capture."""

_HANDLES = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class _Called:
    """A function that an opaque operator of a captured graph calls, its trace, and the shapes and dtypes it returns."""

    fn: FlatJaxFn
    traced: ClosedJaxpr
    results: list[Like]

    def __repr__(self) -> str:
        """What it computes, equal for a function that is made anew on each call."""
        return f"{re.sub(' at 0x[0-9a-f]+', '', str(self.traced.jaxpr))} {[*map(_told, self.traced.consts)]}"


class KnownFunction:
    """A JAX function of arrays whose results are known without a trace; one object for all calls that are alike.

    Calls of it in repeated layers are then one program, and it may differ with the mesh that it is lowered for.

    Args:
        fn: The function.
        results: Shapes and dtypes of what it returns.
        own: The function of the user's that it is; None for a derivative.
        operator: The operator that it is the lowering of, as a function of tensors: captured in its place.
        precision: Of the products in it and in its derivatives, as `jax.default_matmul_precision` has it.
    """

    def __init__(
        self,
        fn: FlatJaxFn,
        results: list[Like],
        own: Own | None = None,
        operator: Callable[..., list[torch.Tensor]] | None = None,
        *,
        precision: str | None = None,
    ) -> None:
        self.fn, self.results, self.own, self.operator, self.precision = fn, results, own, operator, precision
        self.handle = next(_HANDLES)
        _FUNCTIONS[self.handle] = self
        # A cache of its own: one of the class would keep every function forever.
        self.vjp = functools.cache(self._vjp)

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        with precision_of(self.precision):
            return self.fn(*arrays)

    def _vjp(self, wanted: tuple[bool, ...], given: tuple[bool, ...], likes: tuple[Like, ...]) -> "KnownFunction":
        """`(*primals, *cotangents of the given outputs) -> gradients of the wanted primals`, which are like these."""
        vjp = _vjp_of(self.fn, wanted, given)
        return KnownFunction(vjp, [*itertools.compress(likes, wanted)], precision=self.precision)


def precision_of(name: str | None) -> contextlib.AbstractContextManager[object]:
    """The scope of a precision of products; None leaves it as it is."""
    return contextlib.nullcontext() if name is None else jax.default_matmul_precision(name)


def _told(constant: Any) -> object:
    """Large constants, and random keys, are told apart by object."""
    is_traced = isinstance(constant, Tracer)
    if is_traced or np.size(constant) > _LARGEST or jax.numpy.issubdtype(constant.dtype, jax.dtypes.extended):
        return id(constant)
    return np.asarray(constant).tobytes()


_LARGEST = 1 << 20

_FUNCTIONS: weakref.WeakValueDictionary[int, "_Called | KnownFunction"] = weakref.WeakValueDictionary()
"""By the number in the graph; each is held by the capture under way, and then by the nodes of the graph."""


def _call_shapes(handle, *_):
    return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in _FUNCTIONS[handle].results]


for _name in ("call", "call_for_effect"):
    captured_op(f"torch_shard::{_name}", "(SymInt handle, Tensor[] tensors) -> Tensor[]")(_call_shapes)

has_side_effect(torch.ops.torch_shard.call_for_effect.default)  # dead code to nobody


@captured_op("torch_shard::draw_seed", "(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
def _seed_shape(*_):
    return torch.empty((2,), dtype=torch.uint32, device="cpu")


@lowers(torch.ops.torch_shard.call.default, torch.ops.torch_shard.call_for_effect.default, on_mesh=True)
def _lower_call(handle: int, arrays: list[jax.Array], *, split: RowSplit | None = None) -> list[jax.Array]:
    called = _FUNCTIONS[handle]
    with CLOSURE.within(split):
        return called(*arrays) if isinstance(called, KnownFunction) else called.fn(*arrays)


@rewrites(torch.ops.torch_shard.call.default, torch.ops.torch_shard.call_for_effect.default)
def _hold_function(node: torch.fx.Node) -> None:
    """Let the node hold what it calls: a program may be lowered again long after its capture."""
    node.meta["called"] = _FUNCTIONS[args_of(node)[0]]


@lowers(torch.ops.torch_shard.draw_seed.default, random=True)
def _lower_draw_seed(key: jax.Array, like: jax.Array) -> jax.Array:
    return jax.random.key_data(key)


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
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = tuple(needed and _is_inexact(t) for t, needed in zip(tensors, ctx.needs_input_grad[2:], strict=True))
        given = tuple(c is not None and _is_inexact(c) for c in cotangents)
        known = isinstance(ctx.fn, KnownFunction)
        vjp = ctx.fn.vjp(wanted, given, tuple(map(like, tensors))) if known else _vjp_of(ctx.fn, wanted, given)
        grads = iter(_Opaque.apply(vjp, ctx.run, *tensors, *itertools.compress(cotangents, given)))
        return None, None, *(next(grads) if want else None for want in wanted)


def _vjp_of(fn: FlatJaxFn, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> FlatJaxFn:
    def vjp(*inputs: jax.Array) -> list[jax.Array]:
        primals, cotangents = inputs[: len(wanted)], inputs[len(wanted) :]
        chosen = itertools.compress(primals, wanted)
        outputs, pull = vjp_of_chosen(fn, primals, wanted, given)
        # In JAX the gradient of a complex number is the conjugate of what it is in torch.
        sums = [sum_shares(jax.numpy.conj(c).astype(o.dtype), o) for c, o in zip(cotangents, outputs, strict=True)]
        return [into_shares(jax.numpy.conj(grad), primal) for grad, primal in zip(pull(sums), chosen, strict=True)]

    return vjp


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _run_now(fn: FlatJaxFn, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [wrap_array(a) for a in fn(*map(to_array, tensors))]


def _hold(value: object) -> None:
    """Keep alive what an operator names by number, until the graph of the capture under way is complete."""
    capture_mode = current_mode()
    if capture_mode is not None:
        capture_mode.held.append(value)


def _run_captured(fn: FlatJaxFn, *tensors: torch.Tensor) -> list[torch.Tensor]:
    shapes = [jax.ShapeDtypeStruct(tuple(t.shape), jax_dtype(t.dtype)) for t in tensors]
    handle = next(_HANDLES)
    with outside_capture():
        traced, results = _trace(fn, shapes)
    called = _Called(fn, traced, [(tuple(r.shape), captured_dtype(r.dtype)) for r in results])
    _FUNCTIONS[handle] = called
    _hold(called)
    effects = [effect for effect in traced.effects if type(effect).__name__ != "NamedAxisEffect"]  # as JAX itself
    op = torch.ops.torch_shard.call_for_effect if effects else torch.ops.torch_shard.call
    return op(handle, list(tensors))


def _run_known(fn: KnownFunction, *tensors: torch.Tensor) -> list[torch.Tensor]:
    if fn.operator is not None:
        return fn.operator(*tensors)
    _hold(fn)
    return torch.ops.torch_shard.call(fn.handle, list(tensors))


def like(tensor: torch.Tensor) -> Like:
    """Shape and dtype of a tensor."""
    return tuple(tensor.shape), tensor.dtype


def _trace(fn: FlatJaxFn, shapes: list[jax.ShapeDtypeStruct]) -> Any:
    """Trace `fn` for arrays like these; what they vary over is known when the graph is lowered."""
    try:
        return jax.make_jaxpr(fn, return_shape=True)(*shapes)
    except (TypeError, ValueError):
        axes = tracked_axes()
        if not axes:
            raise
        with contextlib.suppress(TypeError, ValueError):  # a loop may want what it carries to vary from the start
            return jax.make_jaxpr(lambda *a: fn(*(vary(x, axes) for x in a)), return_shape=True)(*shapes)
        raise


def _apply(
    flat: FlatJaxFn, run: Callable[..., list[torch.Tensor]], tensors: list[torch.Tensor]
) -> Sequence[torch.Tensor]:
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return _Opaque.apply(flat, run, *tensors) if needs_grad else run(flat, *tensors)


def run_known(fn: KnownFunction, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """In a capture: the results of a function that is the same object for all calls that are alike."""
    return _apply(fn, _run_known, [*map(as_captured, tensors)])


def run_flat(
    flat: FlatJaxFn, tensors: list[torch.Tensor], closure: list[torch.Tensor], *, captured: bool
) -> Sequence[torch.Tensor]:
    """The results of a JAX function; what torch functions below it close over becomes further arguments, as it is met.

    Args:
        flat: The function.
        tensors: Its arguments.
        closure: Further ones, to which those that are met are added.
        captured: Whether the tensors are those of a capture, without values.
    """
    run, prepare = (_run_captured, as_captured) if captured else (_run_now, _moved)
    while True:
        try:
            return _apply(flat, run, [*map(prepare, tensors), *map(prepare, closure)])
        except MoreInputs as request:
            closure.extend(request.tensors)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """Moved by PyTorch, which brings gradients back to where their tensors are."""
    return tensor.to("jax") if tensor.requires_grad else tensor


def draw_seed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In a capture: two fresh words of key data, as a tensor."""
    return torch.ops.torch_shard.draw_seed(tensors[0] if tensors else torch.zeros(()))


# Tensors that a callable reaches by itself: who traces it reads them anew, as inputs of the trace.


class Closure(threading.local):
    """Readers of tensors that a callable reaches by itself: inside `jax.jit` they must be inputs, not constants."""

    def __init__(self) -> None:
        self.readers: list[Reader] = []
        self.split: RowSplit | None = None
        """How the rows of the batch lie in the step that calls into JAX."""

    def within(self, split: RowSplit | None) -> contextlib.AbstractContextManager[None]:
        """Let what a step calls know how rows lie: a function of the user's cannot hand it on."""
        return having(self, split=split)

    @property
    def token(self) -> object:
        """The call from a capture into JAX that is being traced, or None."""
        return self.readers[-1].token if self.readers else None

    @property
    def traces(self) -> bool:
        """Whether a trace is under way whose programs will run without Python."""
        return self.token is not None or any(not reader.is_partial for reader in self.readers)

    def read(self, program: Program[Any]) -> list[jax.Array]:
        """The current values of the tensors that a captured callable closes over."""
        if self.readers:
            self.readers[-1].modules.append(program.graph.modules)
            self.readers[-1].programs.append(program)
        return self.values(program.graph.closure)

    def values(self, tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
        """The current values of these tensors: inputs of the trace under way, if there is one."""
        return self.readers[-1].values(tensors) if self.readers else [_read(t) for t in tensors]

    def held(self) -> tuple[tuple[torch.Tensor, ...], list[jax.Array]]:
        """All tensors that are inputs of the trace under way, and their values in it."""
        return self.readers[-1].held() if self.readers else ((), [])


CLOSURE = Closure()


class MoreInputs(Exception):
    """A trace met tensors that have to become inputs of the program."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


class Reader:
    """Reads closed-over tensors from the inputs of a trace, and notes what the trace depends on.

    Args:
        tensors: The closed-over tensors.
        values: Their values in the trace.
        token: Of a call from a capture into JAX. Such a call is traced several times, also when the capture is over
            and its modules hold other tensors again: the programs of the first time serve every time.
        partial: Whether the reader around this one has the other tensors.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        values: Sequence[jax.Array],
        token: object = None,
        *,
        partial: bool = False,
    ) -> None:
        self.token = CLOSURE.token if token is None else token
        self._tensors = tuple(tensors)
        self._values = {id(t): v for t, v in zip(tensors, values, strict=True)}
        self.is_partial, self._around = partial, CLOSURE.readers[-1:]
        of = self._around[0] if partial and self._around else None
        self.modules: list[ModuleFlags] = of.modules if of else []
        self.programs: list[Program[Any]] = of.programs if of else []
        self.has_views = False
        """True once a view of a torch callable ran, for which JAX must not reuse a trace."""

    def held(self) -> tuple[tuple[torch.Tensor, ...], list[jax.Array]]:
        """The tensors that it reads, and their values."""
        return self._tensors, [self._values[id(t)] for t in self._tensors]

    def values(self, tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
        """The inputs that stand for these tensors."""
        missing = [t for t in tensors if id(t) not in self._values and not is_literal(t)]
        if missing and not self.is_partial:
            raise MoreInputs(missing)
        others = self._around[0].values(missing) if self._around else map(_read, missing)
        known = self._values | dict(zip(map(id, missing), others, strict=True))
        return [known[id(t)] if id(t) in known else _read_literal(t) for t in tensors]

    @contextlib.contextmanager
    def active(self) -> Iterator["Reader"]:
        """Read for the traces within."""
        CLOSURE.readers.append(self)
        try:
            yield self
        finally:
            CLOSURE.readers.pop()


def _read(tensor: torch.Tensor) -> jax.Array:
    return to_array(tensor, rounds=True)


def _read_literal(tensor: torch.Tensor) -> jax.Array:
    with _disable_current_modes():  # of a capture around this one, to which the tensor has no value
        return _read(tensor)
