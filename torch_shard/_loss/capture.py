"""The capture of a loss: once per model, loss and signature, and for as long as a step uses it."""

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Generator

import torch

from torch_shard._capture import HostInputs, Mismatch, Reads
from torch_shard._common.caller import caller
from torch_shard._common.types import KEPT
from torch_shard._loss.answers import HostValues, capture_with
from torch_shard._loss.batch import BatchSignature, Text
from torch_shard._loss.captured import CapturedLoss
from torch_shard._loss.joint import JointLoss, LossShape, LossSource
from torch_shard._loss.loss_program import LossProgram
from torch_shard._lowering import OverContext, RowSplit, capture_settings, refuse_change
from torch_shard._scan import CapturedLayers, capture_layers
from torch_shard._sharding import LossFn, gradient_hooks, holdings, memory_span
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
        model, joint = self.source.model, JointLoss(self.source, self.signature, host)
        reads, places = Reads(self.source.loss_fn, restore=True), ()
        try:
            layers = capture_with(host, lambda: self._layers(joint, reads, what))
            places = layers[0].graph.effects.unread_places
        finally:  # a dict that was asked for a parameter may have raised
            reads.refuse_identity(guard := reads.guard(places), holdings(model).all, what)
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
    try:  # with the texts themselves, too: the loss may swallow the error that C code raises
        found = [_LossCapture(source, each, sequence_dims).run(values.of(0)) for each in (signature, watched)]
    except Exception:  # of C code, which is given no text
        return True
    return bool(read) or captured.asks_for_types or not all(map(captured.is_same, found))


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
    model, plan, held = source.model, source.plan, source.held
    entries = tuple((name, tuple(t.shape), t.dtype, name in held.trainable) for name, t in held.all.items())
    flags = tuple(m.training for m in model.modules()) if source.train else None
    hooks = gradient_hooks(held.trainable.values()) if source.train else ()
    key = (_identity(source.loss_fn), signature, entries, flags, source.precision, source.layers, capture_settings())
    key = (*key, hooks, source.accumulate_steps, sequence_dims)
    if plan is not None and (plan.activations or plan.context):
        key = (*key, plan.activations, plan.context, plan.mesh)  # the mesh says what fits
    refs = _CAPTURED.setdefault(model, {})
    known = [captured for ref in refs.get(key, ()) if (captured := ref()) is not None and not captured.outdated()]
    host = values.of(microbatch)
    captured = next((captured for captured in known if not isinstance(captured.answers.run(host), Mismatch)), None)
    if captured is None:
        captured = _LossCapture(source, signature, sequence_dims).run(host)
        known = [captured, *known[: KEPT - 1]]
    for unused in [other for other, found in refs.items() if not any(ref() for ref in found)]:
        del refs[unused]
    refs[key] = list(map(weakref.ref, known))
    return LossProgram.of(captured, rows)


def _refuse_aliases(program: LossProgram, model: torch.nn.Module, what: str) -> None:
    """Refuse tensors beside a model's own that lie in the memory of what changes."""
    held = holdings(model)
    changing = {name: held.all[name] for name in (*(program.grads or held.trainable), *program.written)}
    before = live_model(model).memory_of_before
    pairs = ((name, tensor, memory_span(tensor) or before.get(name)) for name, tensor in changing.items())
    spans = [(name, tensor, span) for name, tensor, span in pairs if span is not None]
    found = [
        f"  {variable}, {tuple(value.shape)}, in that of {name}, {tuple(tensor.shape)}"
        for variable, value in program.captured.outside
        if (own := memory_span(value))
        for name, tensor, span in spans
        if value is not tensor and own[0] < span[1] and span[0] < own[1]
    ]
    if found:
        listed = "\n".join([*dict.fromkeys(found)][:8])
        raise NotImplementedError(
            f"{what} reads what lies in the memory of the model's parameters or buffers:\n\n{listed}\n\nEager torch "
            "changes both together. A state has parameters and buffers alone, and these would stay as they are now. "
            "Read them from the model within the loss or forward (model.weight.detach()), or, if they are to stay as "
            "they are, .clone() them before."
        )


def _refuse_written_out(program: LossProgram, context: OverContext | None, what: str) -> None:
    if context is not None and context.mode != "gather" and (found := program.written_out):
        raise ValueError(
            f"{what}: context_mode={context.mode!r} is for attention that is called, and not for what is written out "
            f"as softmax and products: {', '.join(found[:4])}{', ...' * (len(found) > 4)}. Use "
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
