"""The fakes that a capture runs on, and what stands in it for other tensors.

With `trace`, the only module that imports PyTorch's semi-public tracing API.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from torch_shard._capture.constants import Constants, in_eager_torch, note_literal
from torch_shard._capture.data_dependence import DEVICE_OF, DataDependence
from torch_shard._capture.function_mode import CaptureMode, current_mode
from torch_shard._capture.guards import ModuleFlags
from torch_shard._capture.provenance import current_user_line
from torch_shard._common.fx import tensors_in
from torch_shard._common.types import Operator, PyTree

aten = torch.ops.aten

_LOCK = threading.RLock()  # PyTorch's tracer keeps global state

_MODES: list["_Fakes"] = []  # of the captures under way, which may nest

_KNOWN = WeakIdKeyDictionary()  # values of fakes that captures have left as buffers

_OF_PARAMETERS: list[torch.Tensor] = []  # fakes of the captures under way that stand for parameters

_LEFT = WeakIdKeyDictionary()  # what tensors that are not of the capture under way mean in it


def is_fake(value: object) -> bool:
    """Tell whether `value` stands for a tensor of a capture under way."""
    return isinstance(value, FakeTensor)


class _Fakes(FakeTensorMode):
    """The fakes of a capture. Once it is over, one that was left behind is the value that it stands for, if it has one.

    So what a capture has put into a cache, wherever that is, serves eager torch and later captures.
    """

    default_dtype: torch.dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self in _MODES or func is DEVICE_OF:
            check_one_dtype(func, args)
            _check_default_dtype()
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        args, kwargs = torch_pytree.tree_map_only(torch.Tensor, _revive_once, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextlib.contextmanager
def fakes(explain: bool) -> Iterator[tuple[FakeTensorMode, CaptureMode]]:
    """The fakes of one capture, and what stands for other tensors."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy, which takes as long as torch itself

    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)
    mode = _Fakes(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)
    mode.default_dtype = torch.get_default_dtype()
    part = functools.partial
    capture_mode = CaptureMode(
        part(_is_of_capture, mode),
        part(_make_standin, mode),
        revive,
        _set_data,
        explain=explain,
    )
    with _LOCK, _disable_current_modes(), torch.enable_grad(), capture_mode.innermost():
        _MODES.append(mode)
        try:
            yield mode, capture_mode
        finally:
            _MODES.remove(mode)
            if not _MODES:
                _LEFT.clear()
                _let_parameters_go()


def rehearse(fn: Callable[[], Any]) -> tuple[Any, ModuleFlags]:
    """Run `fn` within a capture on fakes of what it closes over, as `capture` would, but write no graph.

    Returns:
        What `fn` returned, and the modules that ran.
    """
    values = DataDependence(lambda tensor: None, lambda: None, lambda: None)
    with fakes(False) as (mode, capture_mode), enable_python_dispatcher(), mode, capture_mode.seeing(), values:
        return fn(), capture_mode.modules()


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Run on the fakes of the capture under way and write no graph: its outcome is not wanted any more."""
    with disable_proxy_modes_tracing(), no_python_dispatcher():
        yield


def unknown_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like one of the capture under way that it has not met yet: it belongs to the capture around."""
    with _disable_current_modes(), _MODES[-2]:
        return empty_like(tensor)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():  # as it really is
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def node_of(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that made a tensor of the trace under way."""
    return None if get_proxy_mode() is None else node_in(tracer(), tensor)


def node_in(tracer: Any, tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that made a tensor of a trace."""
    slot: Any = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def tracer() -> Any:
    """The tracer under way; its `root` holds the constants of the trace."""
    mode: Any = get_proxy_mode()
    return mode.tracer


def _is_of_capture(mode: FakeTensorMode, tensor: torch.Tensor) -> bool:
    """Fakes, what torch.func wraps them in, and meta tensors that are the tracer's own bookkeeping."""
    if isinstance(tensor, FakeTensor):
        return tensor.fake_mode is mode
    return is_functorch_wrapped_tensor(tensor) or (tensor.device.type == "meta" and tensor not in _LEFT)


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`: from now on `tensor` is another name of `value`; earlier views of it are not.

    An input of the capture, or what it closes over, is written instead, so that its new value comes out or is refused.
    """
    node: torch.fx.Node | None = node_of(tensor)
    mode: Any = get_proxy_mode()
    if node is None or _is_input(node):
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise NotImplementedError(
                f"{current_user_line()}\n.data of an input, a parameter or a tensor from outside, "
                f"{tuple(tensor.shape)} {tensor.dtype}, is set to {tuple(value.shape)} {value.dtype}, but a "
                "compiled program keeps shapes and dtypes."
            )
        tensor.data.copy_(value)
        return
    alias = value.detach()
    torch.Tensor.data.__set__(tensor, alias)  # pyright: ignore[reportAttributeAccessIssue]
    set_proxy_slot(tensor, mode.tracer, get_proxy_slot(alias, mode.tracer))


def _is_input(node: torch.fx.Node | None) -> bool:
    """Tell whether a node is an input of the capture, or a plain alias of one."""
    while node is not None and node.target in (aten.detach.default, aten.alias.default):
        node = node.all_input_nodes[0]
    return node is not None and node.op != "call_function"


def leave(tensor: torch.Tensor, value: Callable[[], torch.Tensor], *, repeats: torch.Tensor | None = None) -> None:
    """Say what a tensor means in the capture under way: most often, a fake of a capture within it that is over.

    Args:
        tensor: The tensor.
        value: Gives the tensor of the capture under way.
        repeats: Of a fake of a rehearsal, the fake of the capture that it repeats.
    """
    _LEFT[tensor] = value
    if repeats is not None and repeats is not tensor:
        # An attribute: a table would hold what leads back to its own key, and with it all that both captures closed
        # over.
        vars(tensor)["_same_as"] = repeats


class StaleTensor(NotImplementedError):
    """A tensor comes back that an earlier capture left behind, and that depends on its inputs."""

    def __init__(self, tensor: torch.Tensor, line: str) -> None:
        super().__init__(
            f"{line}\nHere a tensor comes back that an earlier capture left behind, in a cache, a "
            "global or a container: it never had a value. Keep such tensors in buffers, or fill the cache "
            "(functools.lru_cache and its like) by calling the model once in eager torch before it is compiled."
        )
        self.tensor, self.line = tensor, line


def revive(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a fake that an earlier capture left in a cache, if it depends on no input of that capture."""
    if (value := _LEFT.get(tensor)) is not None:
        return revive(value())
    if not isinstance(tensor, FakeTensor) or tensor.fake_mode in _MODES:
        return tensor
    if (original := original_of(tensor)) is not None:
        return revive(original)
    value = constant_of(tensor)
    if value is None:
        raise StaleTensor(tensor, current_user_line())
    note_literal(value)
    return value


def _revive_once(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a fake that an earlier capture left behind: the same tensor each time, as it may be written."""
    value = revive(tensor)
    if value is not tensor:
        remember(tensor, value)
    return value


def remember(fake: torch.Tensor, value: torch.Tensor) -> None:
    """Keep the value of a fake for when its capture is over."""
    _KNOWN[fake] = value


def constant_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Tensor that a fake of an earlier capture stood for, if it is known."""
    if (known := _KNOWN.get(tensor)) is not None:
        return known
    fake: Any = vars(tensor).get("_same_as", tensor)
    earlier: Any = getattr(getattr(fake, "fake_mode", None), "tracer", None)
    slot: Any = None if earlier is None else get_proxy_slot(fake, earlier, None)  # pyright: ignore
    if earlier is None or slot is None:
        return None
    node: torch.fx.Node = slot.proxy.node
    with in_eager_torch():
        return Constants(node.graph, earlier.root).value(node)


def _make_standin(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake on the CPU like a tensor: made at once and not by an operator, as a model has many tensors."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch._C._DisableFuncTorch():  # as it really is
        options: Any = {"dtype": tensor.dtype, "requires_grad": tensor.requires_grad, "device": "meta"}
        if isinstance(tensor, FakeTensor):  # of a capture around this one: strides are the program's own
            meta = torch.empty_strided(tensor.shape, tensor.stride(), **options)
        else:
            meta = torch.empty(tensor.shape, **options)
        fake = FakeTensor(mode, meta, torch.device("cpu"))
    vars(fake)["_original"] = tensor  # an attribute, as in `leave`
    if isinstance(tensor, torch.nn.Parameter):
        _OF_PARAMETERS.append(fake)
    return fake


def _let_parameters_go() -> None:
    """Let fakes hold no parameters once all captures are over.

    Fakes of repeated layers are in cycles through PyTorch's graph of autograd, which Python's garbage collector does
    not see: each model would stay in memory for as long as the process.
    """
    for fake in _OF_PARAMETERS:
        vars(fake).pop("_original", None)
    _OF_PARAMETERS.clear()


def original_of(fake: torch.Tensor) -> torch.Tensor | None:
    """The closed-over tensor that a fake stood for."""
    return vars(fake).get("_original")


_PRODUCTS = frozenset(
    {aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.linear.default}
    | {aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.convolution.default}
)


def _check_default_dtype() -> None:
    """Refuse another default dtype than that of the function around: the graph is replayed, and lowered, with one."""
    if _MODES and (now := torch.get_default_dtype()) is not (first := _MODES[0].default_dtype):
        raise NotImplementedError(
            f"{current_user_line()}\nHere the default dtype is {now}, and where the captured function began it was "
            f"{first}. A graph of operators has one for all: leave torch.set_default_dtype out of it, and give tensors "
            "their dtype, as in torch.full(..., dtype=...)."
        )


def check_one_dtype(func: Operator, args: PyTree) -> None:
    """Refuse a product that eager torch refuses.

    Raises:
        RuntimeError: As torch raises one, with the user's line.
    """
    if func not in _PRODUCTS:
        return
    dtypes = list(dict.fromkeys(str(arg.dtype) for arg in args if isinstance(arg, torch.Tensor)))
    if len(dtypes) > 1:
        raise RuntimeError(
            f"{current_user_line()}\n{func} must be given tensors of one dtype, as in eager torch; found "
            f"{' and '.join(dtypes)}. Cast one of them, as in x.to(weight.dtype), or let compute_dtype= or "
            "torch.autocast do it."
        )


def outline(fn: Callable[[], Any]) -> tuple[Any, str]:
    """What a torch function would give in the capture under way, on fakes of its own; no graph is written.

    Returns:
        What it returned, and why only PyTorch itself can run it: what it does besides that; empty if nothing.
    """
    needs_grad = torch.is_grad_enabled()

    def run() -> tuple[Any, str]:
        with torch.set_grad_enabled(needs_grad):
            result = fn()
        capture_mode = current_mode()
        assert capture_mode is not None
        given = [fake for fake, _ in capture_mode.standins()]
        results = tensors_in(result)
        if any(fake._version for fake in given):
            return (result, "writes in place to a tensor that it is given or reaches")
        memory = {fake.untyped_storage()._cdata for fake in given}
        if not all(map(capture_mode.is_of_capture, results)) or any(
            r.untyped_storage()._cdata in memory for r in results
        ):
            return (result, "returns a tensor that it is given, or a view of one")
        return (result, "")

    outcome, flags = rehearse(run)
    around = current_mode()
    if around is not None:
        around.add_modules(flags)  # the capture depends on those that ran
    return outcome
