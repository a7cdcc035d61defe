"""The capture of a loss: once per model, loss and signature, and for as long as a step uses it."""

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Generator

import torch

from torch_shard._capture import HostInputs, Mismatch, Reads, is_fake
from torch_shard._common.caller import caller
from torch_shard._common.types import KEPT
from torch_shard._entries import LossFn, gradient_hooks, holdings, memory_span
from torch_shard._loss.answers import HostValues, capture_with
from torch_shard._loss.batch import BatchSignature, Text
from torch_shard._loss.captured import CapturedLoss
from torch_shard._loss.joint import JointLoss, LossShape, LossSource
from torch_shard._loss.loss_program import LossProgram
from torch_shard._lowering import OverContext, RowSplit, capture_settings, refuse_change
from torch_shard._scan import CapturedLayers, capture_layers
from torch_shard._state import live_model

logger = logging.getLogger(__name__)


_CAPTURED = weakref.WeakKeyDictionary[torch.nn.Module, dict[object, list[weakref.ref[CapturedLoss]]]]()
"""The captures of a model, for as long as steps use them: one holds what the loss closes over. The newest first."""


@dataclasses.dataclass(frozen=True)
class _LossCapture:
    """How a loss is captured for one signature of the batch."""

    source: LossSource
    signature: BatchSignature
    sequence_dims: tuple[int | None, ...]

    def run(self, host: HostInputs) -> CapturedLoss:
        """Capture it, for what the host has of the batch and of buffers."""
        what = self._what()
        model = self.source.model
        joint = JointLoss(self.source, self.signature, host)
        reads = Reads(self.source.loss_fn, restore=True)
        places = ()
        try:
            layers = capture_with(host, lambda: self._layers(joint, reads, what))
            places = layers[0].graph.effects.unread_places
        finally:
            # Also where the loss raised: a dict of the user's with parameters as keys has no entry for a stand-in.
            guard = reads.guard(places)
            reads.refuse_identity(guard, holdings(model).all, what)

        captured = CapturedLoss(layers, model, guard, self.look_again)
        program = LossProgram.of(captured, None)
        _refuse_aliases(program, model, what)
        _warn_of(guard.too_large, what)
        _refuse_written_out(program, joint.context, what)
        return captured

    def _layers(self, joint: JointLoss, reads: Reads, what: str) -> CapturedLayers[LossShape]:
        # What is evaluated in torch.inference_mode is the same program; there is nothing to train in it.
        is_inference = torch.is_inference_mode_enabled() and self.source.train
        with torch.inference_mode(is_inference), _told(what, self.signature), reads.seen():
            return capture_layers(
                self.source.model,
                self.source.loss_fn,
                self.source.layers,
                joint=joint,
                num_batch=len(self.signature.specs),
                what=what,
                sequence_dims=self.sequence_dims,
            )

    def look_again(self, captured: CapturedLoss, host: HostInputs) -> None:
        """Capture it once more, as a program of it is about to run again."""
        again = self.run(host)
        if captured.is_same(again):
            captured.take_effects(again)
            return
        refuse_change(*JointLoss(self.source, self.signature, host)(None), self._what(), captured.difference(again))

    def _what(self) -> str:
        return f"{caller()}: {getattr(self.source.loss_fn, 'called', 'the loss')}"


def reads_texts(
    captured: CapturedLoss,
    source: LossSource,
    signature: BatchSignature,
    values: HostValues,
    sequence_dims: tuple[int | None, ...],
) -> bool:
    """Tell whether a captured loss may be another one with the texts of this batch (ids, paths): it asks for them."""
    read = list[str]()
    watched = signature.with_texts(Text(text, read) for text in signature.texts)
    try:
        # With the texts themselves, too: the loss may swallow the error that C code raises of a `Text`.
        captures = [_LossCapture(source, each, sequence_dims).run(values.of(0)) for each in (signature, watched)]
    except Exception:
        return True  # C code has asked for a text
    return bool(read) or captured.asks_for_types or not all(map(captured.is_same, captures))


def loss_program(
    source: LossSource,
    signature: BatchSignature,
    values: HostValues,
    *,
    rows: RowSplit | None = None,
    microbatch: int = 0,
    sequence_dims: tuple[int | None, ...] = (),
) -> LossProgram:
    """The program of `loss_fn(model, batch)` for batches like this, captured once per model, loss and signature."""
    model = source.model
    plan = source.plan
    tensors = source.held
    entries = tuple((name, tuple(t.shape), t.dtype, name in tensors.trainable) for name, t in tensors.all.items())
    flags = tuple(m.training for m in model.modules()) if source.train else None
    hooks = gradient_hooks(tensors.trainable.values()) if source.train else ()
    key = (_identity(source.loss_fn), signature, entries, flags, source.precision, source.layers, capture_settings())
    key = (*key, hooks, source.accumulate_steps, sequence_dims)
    if plan is not None and (plan.activations or plan.context):
        # A program is the same on each mesh, but which splits of activations are refused depends on its axes.
        key = (*key, plan.activations, plan.context, plan.mesh)

    references = _CAPTURED.setdefault(model, {})
    current: list[CapturedLoss] = []
    for reference in references.get(key, ()):
        captured = reference()
        if captured is not None and not captured.outdated():
            current.append(captured)

    host = values.of(microbatch)
    chosen = next((captured for captured in current if not isinstance(captured.answers.run(host), Mismatch)), None)
    if chosen is None:
        chosen = _LossCapture(source, signature, sequence_dims).run(host)
        current = [chosen, *current[: KEPT - 1]]

    unused = [other for other, captures in references.items() if not any(reference() for reference in captures)]
    for other in unused:
        del references[other]
    references[key] = list(map(weakref.ref, current))
    return LossProgram.of(chosen, rows)


def _refuse_aliases(program: LossProgram, model: torch.nn.Module, what: str) -> None:
    """Refuse tensors beside a model's own that lie in the memory of what changes."""
    entries = holdings(model)
    changing = dict.fromkeys((*(program.grads or entries.trainable), *program.written))

    # Tensors of a live model have no memory of their own; aliases were made of what they were before.
    memory_before = live_model(model).memory_of_before
    spans: list[tuple[str, torch.Tensor, tuple[int, int]]] = []
    for name in changing:
        tensor = entries.all[name]
        span = memory_span(tensor) or memory_before.get(name)
        if span is not None:
            spans.append((name, tensor, span))

    aliases: dict[str, None] = {}
    for variable, value in program.captured.outside:
        # A tensor of constants that forward has made in the capture has no memory.
        memory = None if is_fake(value) else memory_span(value)
        if not memory:
            continue
        for name, tensor, span in spans:
            overlaps = memory[0] < span[1] and span[0] < memory[1]
            if value is not tensor and overlaps:
                aliases[f"  {variable}, {tuple(value.shape)}, in that of {name}, {tuple(tensor.shape)}"] = None
    if aliases:
        listed = "\n".join([*aliases][:8])
        raise NotImplementedError(
            f"{what} reads what lies in the memory of the model's parameters or buffers:\n\n{listed}\n\nEager torch "
            "changes both together. A state has parameters and buffers alone, and these would stay as they are now. "
            "Read them from the model within the loss or forward (model.weight.detach()), or, if they are to stay as "
            "they are, .clone() them before."
        )


def _refuse_written_out(program: LossProgram, context: OverContext | None, what: str) -> None:
    if context is None or context.mode == "gather":
        return
    modules = program.written_out
    if modules:
        raise ValueError(
            f"{what}: context_mode={context.mode!r} is for attention that is called, and not for what is written out "
            f"as softmax and products: {', '.join(modules[:4])}{', ...' * (len(modules) > 4)}. Use "
            "context_mode='gather', or torch.nn.functional.scaled_dot_product_attention (Hugging Face: "
            'attn_implementation="sdpa"; nn.MultiheadAttention: need_weights=False).'
        )


@functools.lru_cache(maxsize=1024)
def _warn_of(too_large: tuple[str, ...], what: str) -> None:
    """Say once what is read and not compared."""
    if too_large:
        logger.warning(
            "%s reads %s: too large to be compared before each step, so that later changes of their contents are not "
            "seen. Pass them in the batch, make them tensors, or make a new step after a change.",
            what,
            ", ".join(too_large),
        )


@contextlib.contextmanager
def _told(what: str, signature: BatchSignature) -> Generator[None, None, None]:
    """Let an error of the user's own code say that it ran for a capture, and on what."""
    try:
        yield
    except Exception as error:
        shown = ", ".join(f"{tuple(spec.shape)} {spec.dtype}" for spec in signature.specs[:9]) or "no arrays"
        note = f"{what} was captured, once, for a batch of {shown}."
        if isinstance(error, AttributeError) and error.name in ("module", "_orig_mod"):
            error.add_note("loss_fn is given the module that a wrapper of PyTorch runs: write model for model.module.")
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def _identity(fn: LossFn) -> object:
    try:
        return weakref.ref(fn)
    except TypeError:
        return fn
