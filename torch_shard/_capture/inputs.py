"""The inputs of a captured graph: what it closes over, and what it writes in place."""

import torch

from torch_shard._common.fx import is_random, outputs_of

aten = torch.ops.aten

FAR = 1 << 20
"""Places in the random stream from here on belong to operators that PyTorch has made of others."""

_LITERAL = "_torch_shard_literal"


def is_literal(tensor: torch.Tensor) -> bool:
    """Tell whether it is what a captured `torch.tensor(...)` wrote down: no one else has it, and no one changes it."""
    return _LITERAL in vars(tensor)


def note_literal(tensor: torch.Tensor) -> None:
    """Note that a tensor is a constant of the program alone."""
    vars(tensor)[_LITERAL] = True


def constants_to_inputs(graph: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Turn the tensors that the trace met on its way into further inputs, so that their values stay live."""
    found: dict[str, torch.Tensor] = {}
    placeholders: dict[str, torch.fx.Node] = {}
    last_input = [n for n in graph.graph.nodes if n.op == "placeholder"][-1:]
    for node in list(graph.graph.nodes):
        if node.op != "get_attr" or not isinstance(value := getattr(graph, node.target), torch.Tensor):
            continue
        if node.target not in found:
            found[node.target] = value
            if all(user.target is aten.lift_fresh_copy.default for user in node.users):
                note_literal(value)
            anchor = [*last_input, *placeholders.values()][-1:]
            point = graph.graph.inserting_after(anchor[0]) if anchor else graph.graph.inserting_before()
            with point:
                placeholders[node.target] = graph.graph.placeholder(f"closure{len(found)}")
                placeholders[node.target].meta["value"] = value
        node.replace_all_uses_with(placeholders[node.target])
        graph.graph.erase_node(node)
    graph.recompile()
    return list(found.values())


def return_writes(graph: torch.fx.GraphModule, num_outputs: int, num_inputs: int) -> tuple[int, ...]:
    """Make the new values of inputs that were written in place outputs; return the positions of those inputs."""
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
    writes = {}
    for node in list(graph.graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in inputs:
            writes[inputs.index(node.args[0])] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            graph.graph.erase_node(node)
    outputs = outputs_of(graph.graph)[:num_outputs]
    graph.graph.output_node().args = ([*outputs, *writes.values()],)
    if shapes := [str(tuple(inputs[p].meta["val"].shape)) for p in writes if p >= num_inputs]:
        raise NotImplementedError(
            f"The captured function writes in place to tensors that it closes over, of shapes {', '.join(shapes)}, and "
            "the compiled program could not keep that. make_train_step keeps parameters and buffers (register_buffer), "
            "such as the statistics of batch norms in train mode, which eval() leaves as they are; elsewhere write to "
            "a clone and return it."
        )
    return tuple(writes)


def decomposes_draws(graph: torch.fx.Graph) -> bool:
    """Tell whether PyTorch has made random operators of a graph of others."""
    return any(node.meta.get("random_place", 0) >= FAR for node in graph.nodes)


def carry_random_places(before: torch.fx.Graph, after: torch.fx.Graph) -> None:
    """Give each random node of a rewritten graph the place in the random stream that it had before."""
    old, new = ([n for n in graph.nodes if is_random(n)] for graph in (before, after))
    places = [n.meta.get("random_place") for n in old]
    axes = [n.meta.get("random_axes", ()) for n in old]
    if len(old) != len(new) or None in places:
        if len(set(places)) != len(places):
            raise NotImplementedError(
                "A random operator that PyTorch decomposes is computed again in a checkpoint, and would draw other "
                "numbers there. Use torch.utils.checkpoint without it, or torch_shard.jax_checkpoint."
            )
        if len(set(axes)) > 1:
            raise NotImplementedError(
                "A random operator that PyTorch decomposes draws within fold_in_axis, and others do not. Fold the axis "
                "for the whole function (fold_in_axes of the adapter), or draw with torch.rand and its kin."
            )
        places = [(number + 1) * FAR for number in range(len(new))]
        axes = [axes[0] if axes else ()] * len(new)
    for node, place, along in zip(new, places, axes, strict=True):
        node.meta["random_place"], node.meta["random_axes"] = place, along
