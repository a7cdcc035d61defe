"""Autograd in a capture: what stands for closed-over tensors in it, which Python it runs, and of which modules it is.

`autograd.Function`, the transforms of `torch.func` and a backward pass take tensors without a torch function that a
`CaptureMode` could see. What is closed over they would take as it is: a constant, without the gradient that it has
around the capture.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch import eager_transforms, utils, vmap
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torch_shard._capture.fakes import is_fake, tracer
from torch_shard._capture.function_mode import annotated, as_captured, current_mode
from torch_shard._capture.provenance import calls_seen, current_user_line
from torch_shard._common.patching import Owner, patched


def nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Node]:
    """The nodes of the autograd graph, each once."""
    seen: set[Node] = set()
    todo = [tensor.grad_fn for tensor in tensors]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [after for after, _ in node.next_functions]
            yield node


def user_leaves(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor] | None:
    """The leaves of a backward pass that runs Python of the user's, which may call autograd or write to `.grad` itself.

    None if it runs no such Python.
    """
    nodes = list(nodes_behind(tensors))
    python = [node for node in nodes if isinstance(node, BackwardCFunction)]
    if all(type(node).__module__.startswith("torch_shard.") for node in python):
        return None

    variables = [getattr(node, "variable", None) for node in nodes]
    return [leaf for leaf in variables if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def standins_given() -> Iterator[None]:
    """Let them see what stands for their arguments in the capture, and in those within it."""
    with contextlib.ExitStack() as stack:
        for owner, name in _takers():
            stack.enter_context(patched(owner, name, _on_standins))
        stack.enter_context(patched(torch.autograd, "_engine_run_backward", _seen))
        yield


def _takers() -> Iterator[tuple[Owner, str]]:
    """Where functions stand that take tensors so: owner and name."""
    yield torch.autograd.function, "custom_function_call"  # an `autograd.Function` within a transform
    yield vmap, "_add_batch_dim"
    yield eager_transforms, "_wrap_for_grad"
    if hasattr(utils, "unwrap_if_dead"):  # each tensor that an `autograd.Function` is applied to, by whatever name
        yield utils, "unwrap_if_dead"
        return
    yield torch.autograd.Function, "apply"
    for module in cast(list[object], list(sys.modules.values())):  # what was taken from the class before
        if isinstance(module, types.ModuleType):
            yield from ((module, name) for name, value in list(vars(module).items()) if _is_apply(value))


def _is_apply(value: object) -> bool:
    if type(value) is not types.BuiltinMethodType:
        return False
    return isinstance(value.__self__, torch.autograd.function.FunctionMeta)


def _on_standins(original: Any) -> Any:
    def convert(value: object) -> object:
        return as_captured(value) if isinstance(value, torch.Tensor) else value

    def call(function: Callable[..., Any], args: Iterable[object], kwargs: dict[str, object]) -> Any:
        return function(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})

    if isinstance(original, types.ClassMethodDescriptorType):
        return classmethod(lambda cls, *args, **kwargs: call(original.__get__(None, cls), args, kwargs))
    return lambda *args, **kwargs: call(original, args, kwargs)


def _seen(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the mode see the Python that a backward pass runs, though the call of autograd itself is being handled."""

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        nodes = [*nodes_behind(outputs)]
        _refuse_unseen(nodes)
        if get_proxy_mode() is not None:
            annotate_backward(nodes, tracer().graph)
        with current_mode() or contextlib.nullcontext(), calls_seen(True):
            return run_backward(outputs, *args, **kwargs)

    return run


def _refuse_unseen(nodes: list[Node]) -> None:
    """Refuse a gradient for a tensor that nothing stands for: its path would be missing from that of its stand-in."""
    for node in nodes:
        for after, _ in node.next_functions:
            leaf = getattr(after, "variable", None)
            if isinstance(leaf, torch.Tensor) and not is_fake(leaf) and not is_functorch_wrapped_tensor(leaf):
                raise NotImplementedError(
                    f"{current_user_line()}\nHere is a gradient for a tensor of shape {tuple(leaf.shape)} that went "
                    f"into the autograd.Function {node.name().removesuffix('Backward')} as it is, by an `apply` that "
                    "was taken from the class before, as in `self.f = F.apply`; it would be lost. Call F.apply(...) "
                    "itself, or take it as a global of a module: `f = F.apply`."
                )


Notes = Mapping[str, str]


def annotate_backward(functions: Iterable[Node], graph: Graph) -> None:
    """Let a backward pass note on its nodes where the forward nodes stand that they belong to.

    Autograd numbers the operators of the forward pass; nodes have the number, and so has its own graph.
    """
    forward = {n.meta.get("seq_nr"): n.meta["custom"] for n in reversed(graph.nodes) if n.meta.get("custom")}
    for function in functions:
        if (notes := forward.get(function._sequence_nr())) is not None:
            before, after = _hooks(_of_backward(notes))
            function.register_prehook(before)
            function.register_hook(after)


def _of_backward(notes: Notes) -> dict[str, str]:
    where = {"where": f"{notes['where']} (in its backward)"} if "where" in notes else {}
    return {**notes, **where, "pass": "backward"}


def _hooks(notes: dict[str, str]) -> tuple[Callable[..., None], Callable[..., None]]:
    """What is to be called before and after a backward function."""
    scopes: list[contextlib.AbstractContextManager[None]] = []

    def before(*grads: object) -> None:
        scopes.append(annotated(**notes))
        scopes[-1].__enter__()

    def after(*grads: object) -> None:
        if scopes:
            scopes.pop().__exit__(None, None, None)

    return before, after
