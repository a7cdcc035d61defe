"""Where the nodes of a captured graph come from: module path and source line, if the capture is to explain itself."""

import contextlib

import torch
from torch.fx import traceback as fx_traceback


def explained(explain: bool) -> contextlib.AbstractContextManager:
    """Whether nodes keep what is noted about them."""
    return fx_traceback.preserve_node_meta() if explain else contextlib.nullcontext()


def annotated(where: str) -> contextlib.AbstractContextManager:
    """Note `where` on the nodes made within."""
    return fx_traceback.annotate({"where": where})


def explain_backward(graph: torch.fx.GraphModule) -> None:
    """A node of the backward pass stands where the forward node with its sequence number does."""
    places = {n.meta.get("seq_nr"): n.meta["custom"] for n in reversed(graph.graph.nodes) if n.meta.get("custom")}
    for node in graph.graph.nodes:
        if not node.meta.get("custom") and node.meta.get("seq_nr") in places:
            where = places[node.meta["seq_nr"]]["where"]
            node.meta["custom"] = {"where": f"{where} (in its backward)"}
