"""A loss whose repeated layers are captured as regions and rolled into loops; which are, and of the others why not."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
from jax.sharding import PartitionSpec
from torch import nn
from torch.fx import GraphModule

from torch_shard._capture import Spec, TensorFn
from torch_shard._entries import LossFn
from torch_shard._lowering import ROWS, SEQUENCE, Program, RowSplit, draws_random, untie_gradients
from torch_shard._scan.dims import Dim, note_rows
from torch_shard._scan.execute import Inputs, Result, execute
from torch_shard._scan.instructions import BundleValues, Instruction, Saving, instructions_of, only_adds_bundles
from torch_shard._scan.intercept import LayerInterceptor
from torch_shard._scan.pieces import Cut, EntryNotes
from torch_shard._scan.region import LAYER, LAYER_BACKWARD, Call
from torch_shard._scan.reroll import Loop, reroll
from torch_shard._scan.siblings import LEAST, GraphInput, Refused, Restart, Siblings, Unbundled, find_siblings, names_of
from torch_shard._sharding import Stages

Aux = TypeVar("Aux")

SHOWN = 6

FEW = 16
"""So many repeated layers run one by one on TPUs; benchmarks/tpu.py has cycles and times to compile of both ways."""

FEW_OF_KERNELS = 64
"""The same where layers have kernels of convolutions: in a loop ResNet-101 takes 1.75 x the cycles."""

ScanLayers = bool | Literal["auto"]
"""Choice of whether repeated layers become loops: yes, no, or where it is proved to mean the same."""
Remat = Literal["none", "dots", "block"]
"""Choice of what the backward pass computes again: nothing, all but matrix products, all but a layer's inputs."""
REMAT: tuple[Remat, ...] = get_args(Remat)

ALONE = (
    "layers next to it are other programs (the first is, where its input needs no gradient) or do not take its result"
)


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """Options for repeated layers.

    Attributes:
        scan: Whether they become loops: True, False, or "auto".
        remat: What is computed again in the backward pass, one of `REMAT`, or a budget in bytes per device.
        offload: Whether what is not computed again waits in the host's memory.
        specs: How the parameters and buffers are split, by name: layers that are split differently stay apart.
        cuts: Which of them are kept in how many pieces, along which dim from the end; these alike.
        uses: How some are split where they are used, if that is less than where they are kept.
        why_none: Why no layers become loops, where none are to.
        stages: Those that some layers are split over, which then are a loop.
    """

    scan: ScanLayers = "auto"
    remat: Remat | int = "none"
    offload: bool = False
    specs: tuple[tuple[str, PartitionSpec], ...] = ()
    cuts: tuple[tuple[str, Cut], ...] = ()
    uses: tuple[tuple[str, PartitionSpec], ...] = ()
    why_none: str = "scan_layers=False"
    stages: Stages | None = None

    def decided(self, model: nn.Module, platform: str) -> "LayerOptions":
        """The same, with `"auto"` decided for a model on these devices: on TPUs, few layers run one by one.

        XLA:TPU then overlaps and fuses across layers, and nothing is stacked; it takes longer to compile.
        """
        if self.scan != "auto" or self._is_asked or platform != "tpu":
            return self
        paths = [path for group in self.groups(model) if group.refused is None for path in group.members.values()]
        has_kernels = any(p.ndim > 3 for path in paths for p in model.get_submodule(path).parameters())
        count, few = len(paths), FEW_OF_KERNELS if has_kernels else FEW
        if not 0 < count <= few:
            return self
        why = (
            f"on TPU up to {few} layers, here {count}, are faster one by one, and compile two to three times as long; "
            "scan_layers=True makes loops"
        )
        return dataclasses.replace(self, scan=False, why_none=why)

    @property
    def wanted(self) -> bool:
        """Tell whether layers are captured as regions at all."""
        return self.scan is not False or self._is_asked

    @property
    def choices(self) -> tuple[Remat, ...]:
        """Choices of what to compute again: one, or with a budget all of them, the fastest first."""
        return REMAT if isinstance(self.remat, int) else (self.remat,)

    def groups(self, model: nn.Module) -> list[Siblings]:
        """The layers of a model that may be one program."""
        if not self.wanted:
            return []
        cuts = dict(self.cuts)
        specs = {name: (*spec, *cuts.get(name, ())) for name, spec in self.specs}
        return list(find_siblings(model, specs, self.least))

    @property
    def least(self) -> int:
        """So many alike siblings are looked at."""
        return LEAST if self.scan == "auto" and not self._is_asked else 2

    @property
    def _is_asked(self) -> bool:
        return self.remat != "none" or self.offload


class RolledLoss:
    """A captured program of instructions and loops.

    Args:
        program: With an operator for each call of a layer.
        calls: What these are.
        scan: Whether to look for loops.
        saving: What layers leave for their backward pass.
    """

    def __init__(self, program: Program[Any], calls: dict[int, Call], scan: bool, saving: Saving) -> None:
        self._program, self.calls, self.scan, self._saving = program, calls, scan, saving
        instructions, self.outputs = instructions_of(program.graph.module, calls, saving)
        self.items: list[Instruction | Loop] = reroll(instructions) if scan else list(instructions)
        self.random = program.random or any(draws_random(graph) for _, graph in self.graphs)

    @property
    def graphs(self) -> list[tuple[str, GraphModule]]:
        """Path and graph of the layer of each call."""
        return [(call.path, call.region.graph.module) for call in self.calls.values()]

    def with_remat(self, remat: str) -> "RolledLoss":
        """The same program with another choice."""
        saving = dataclasses.replace(self._saving, remat=remat)
        return RolledLoss(self._program, self.calls, self.scan, saving)

    def of(self, program: Program[Any]) -> "RolledLoss":
        """The same of another graph with these calls."""
        return RolledLoss(program, self.calls, self.scan, self._saving)

    def run(self, key: jax.Array | None, inputs: Inputs, split: RowSplit | None) -> list[Result]:
        """Arrays, and rows of stacked arrays."""
        return execute(self.items, self.outputs, key, inputs, split=split)

    def without(self, inputs: Sequence[GraphInput]) -> list[str]:
        """Names of bundled parameters that the loss does not reach, of the inputs whose gradients follow it."""
        without: list[str] = []
        for graph_input, output in zip(inputs, self.outputs[1:], strict=False):
            if isinstance(output, BundleValues):
                members = zip(names_of(graph_input), output.values, strict=True)
                without += [name for name, value in members if value is None]
        return without

    @property
    def loops(self) -> list[Loop]:
        """In order, forward and backward."""
        return [item for item in self.items if isinstance(item, Loop)]


CapturedLayers = tuple[Program[Aux], RolledLoss | None, list[Siblings]]
"""A captured loss; its loops, if it has layers that are regions; and the groups of layers."""


def report(groups: list[Siblings], rolled: RolledLoss | None) -> list[str]:
    """Lines that say which layers are loops, and of the others why not."""
    lines, scanned = [], set()
    for loop in rolled.loops if rolled else ():
        layers = loop.layers
        scanned |= set(layers)
        per = len(layers) // len(loop.iterations)
        what = f"{len(loop.iterations)} iterations" + (f" of {per} layers" if per > 1 else "")
        lines.append(f"{layers[0]} to {layers[-1]}{', backward' * loop.is_backward}: one loop, {what}")
    for group in groups:
        alone = [path for path in group.members.values() if path not in scanned]
        if alone:
            paths = ", ".join(alone) if len(alone) <= SHOWN else f"{alone[0]}, ..., {alone[-1]} ({len(alone)} layers)"
            asked = rolled is None or rolled.scan
            lines.append(f"{paths}: not in a loop: {group.refused or (ALONE if asked else 'scan_layers=False')}")
    return lines


def capture_layers(
    model: nn.Module,
    loss_fn: LossFn,
    repeats: LayerOptions,
    *,
    joint: Callable[[LayerInterceptor | None], tuple[TensorFn[Aux], list[Spec]]],
    num_batch: int,
    what: str,
    sequence_dims: Sequence[Dim] = (),
) -> CapturedLayers[Aux]:
    """Capture a loss, its repeated layers as regions where that is safe."""

    def note(program: Program[Any], specs: list[Spec], calls: dict[int, Call]) -> None:
        """Note what a plan says of entries, and follow the rows of the batch, the first dim of its leaves."""
        EntryNotes(dict(repeats.cuts), dict(repeats.uses)).put(program.graph, calls)
        graph, before = program.graph.module.graph, [None] * (len(specs) - num_batch)
        rows = [0 if spec.shape else None for spec in specs[len(before) :]]
        note_rows(graph, [*before, *rows], calls, ROWS)
        if any(dim is not None for dim in sequence_dims):
            note_rows(graph, [*before, *sequence_dims], calls, SEQUENCE)

    def attempt(regions: LayerInterceptor) -> tuple[Program[Aux], RolledLoss] | Restart:
        """Capture a loss with its layers as regions, or find out why that has to start again."""
        try:
            fn, specs = joint(regions)
            program = Program(fn, specs, what, others=(LAYER, LAYER_BACKWARD), inner=regions.graphs)
            if not only_adds_bundles(program.graph.module, regions.calls):
                return Unbundled()
            note(program, specs, regions.calls)
            if repeats.stages is not None:
                untie_gradients(program.graph.module)
            saving = Saving(repeats.choices[0], repeats.offload)
            rolled = RolledLoss(program, regions.calls, repeats.scan is not False, saving)
        except Exception as error:  # of one that has nothing to do with regions, the capture without them says it again
            why = f"the loss cannot be captured with them as a whole: {' '.join(str(error).split())[:400]}"
            return regions.restart or Refused(None, why)
        finally:
            regions.release()
        return Refused(None, ALONE) if repeats.scan is True and not rolled.loops else (program, rolled)

    groups = repeats.groups(model)
    while any(group.refused is None for group in groups):
        result = attempt(LayerInterceptor(groups, model))
        if not isinstance(result, Restart):
            return *result, groups
        result.learn(groups)
    _refuse_if_asked(groups, repeats, what)
    fn, specs = joint(None)
    program = Program(fn, specs, what)
    note(program, specs, {})
    return program, None, groups


def _refuse_if_asked(groups: list[Siblings], repeats: LayerOptions, what: str) -> None:
    """Say why there are no regions where the user has asked for what needs them."""
    if repeats.stages is not None:
        asked = "a pipeline"
    elif repeats.scan is True:
        asked = "scan_layers=True"
    elif repeats.remat in REMAT[1:]:
        asked = f"remat={repeats.remat!r}"
    elif repeats.offload:
        asked = 'offload="activations"'
    else:
        return
    reasons = [f"  {group.path} ({len(group.members)} layers): {group.refused}" for group in groups]
    none = "  It has no numbered siblings (nn.ModuleList, nn.Sequential) that are alike in classes, shapes and splits."
    found = "\n".join(reasons) or none
    raise ValueError(
        f"{what}: {asked} needs repeated layers that are one program, and there are none:\n\n{found}\n\n"
        'Use scan_layers="auto", remat="none", no offload of activations and a plan without pipeline, or wrap what is '
        "to be computed again in torch.utils.checkpoint."
    )
