"""Which module each node of a capture is of, forward and backward: noted on the nodes, for profiles and previews."""

import contextlib
from collections.abc import Callable, Iterable, Mapping

from torch.autograd.graph import Node
from torch.fx import Graph
from torch.fx import traceback as fx_traceback

Notes = Mapping[str, str]


def notes_kept() -> contextlib.AbstractContextManager[None]:
    """Let nodes keep what is noted about them."""
    return fx_traceback.preserve_node_meta()


def annotated(**notes: str) -> contextlib.AbstractContextManager[None]:
    """Make notes on the nodes made within."""
    return fx_traceback.annotate(dict(notes))


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
