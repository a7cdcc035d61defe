"""Functions of a user's own among those that run a program: what they have to return, and how often they are called."""

import collections
import dataclasses
from collections.abc import Iterable

import jax
from torch.fx import GraphModule, Node
from torch.utils import _pytree as torch_pytree

from torch_shard._common.dtypes import jax_dtype
from torch_shard._common.fx import notes_of, target_of
from torch_shard._common.types import Operator, PyTree
from torch_shard._lowering.ops import LOWERINGS


@dataclasses.dataclass(frozen=True)
class Own:
    """A function of the user's.

    Attributes:
        name: What it stands for, an operator or a function of torch.
        fn: Which it is, with its file and line.
        promise: What it has to return.
    """

    name: str
    fn: str
    promise: str

    def check(self, fakes: PyTree, values: PyTree) -> None:
        """Refuse results that are others than those which PyTorch knows of."""
        tensors = [f for f in torch_pytree.tree_leaves(fakes) if f is not None]
        wanted = [(tuple(f.shape), jax_dtype(f.dtype)) for f in tensors]
        found = [(jax.numpy.shape(v), jax.numpy.result_type(v)) for v in jax.tree.leaves(values)]
        if found != wanted:
            raise ValueError(
                f"{self.fn} must return what {self.promise}: {_shown(wanted)}. It returned {_shown(found)}. Correct "
                "one of the two."
            )


def _shown(results: Iterable[tuple[tuple[int, ...], object]]) -> str:
    return ", ".join(f"{shape} {dtype}" for shape, dtype in results) or "nothing"


def is_own(op: Operator) -> bool:
    """Tell whether the lowering of an operator is the user's."""
    return isinstance(getattr(LOWERINGS.get(op), "own", None), Own)


def own_of(node: Node) -> Own | None:
    """The function of the user's that runs a node, if one does."""
    runs = node.meta.get("called") or (LOWERINGS.get(target_of(node)) if node.op == "call_function" else None)
    return getattr(runs, "own", None)


def report_own(graphs: Iterable[GraphModule]) -> list[str]:
    """Lines that say how often the forward passes of these graphs call functions of the user's."""
    nodes = (n for graph in graphs for n in graph.graph.nodes if notes_of(n).get("pass") != "backward")
    counts = collections.Counter(own for own in map(own_of, nodes) if own is not None)
    return [f"{own.name}: {n} call{'s' * (n > 1)} run{'s' * (n == 1)} as {own.fn}" for own, n in counts.items()]
