"""Loss, gradients, new buffers and metrics of a module as one flat torch function, which is what is captured."""

# JAX and PyTorch annotate some of their functions in part.
# pyright: reportUnknownMemberType=false

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from torch_shard._capture import Spec, TensorFn, note_modules
from torch_shard._common.caller import caller
from torch_shard._common.convert import flatten
from torch_shard._common.types import PyTree
from torch_shard._common.validate import check_call
from torch_shard._scan import Bundle, GraphInput, LayerInterceptor, graph_inputs
from torch_shard._sharding import LossFn, holdings
from torch_shard._train.batch import BatchSignature

T = TypeVar("T")

RESERVED = ("loss", "grad_norm", "guard")

Check = Callable[[], None] | None


@dataclasses.dataclass(frozen=True)
class LossShape:
    """The order of the flat inputs and outputs of the capture."""

    inputs: list[GraphInput]
    grads: list[GraphInput]
    buffers: list[str]
    metrics: object
    without_grad: tuple[GraphInput, ...]


class JointLoss:
    """`loss_fn(model, batch)` with all that a step needs of it.

    Args:
        model: Captured with the training flags that it has now, or in eval mode.
        loss_fn: Returns a scalar, or a scalar and a dict of metrics.
        signature: Of the batch.
        compute_dtype: What products run in, by autocast; None for what torch gives.
        train: With gradients; otherwise in eval mode and without.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        signature: BatchSignature,
        *,
        compute_dtype: torch.dtype | None = None,
        train: bool,
    ) -> None:
        self._model, self._loss_fn, self._signature = model, loss_fn, signature
        self._compute_dtype, self._train = compute_dtype, train
        self._held = holdings(model)
        self._hooks = {name: _hooks(name, parameter) for name, parameter in self._held.trainable.items()}

    def __call__(self, regions: LayerInterceptor | None = None) -> tuple[TensorFn[LossShape], list[Spec]]:
        """`(*tensors, *batch) -> loss, gradients, buffers and metrics`, and what it takes.

        Args:
            regions: What repeated layers are to be.
        """
        hooked = [name for name, hooks in self._hooks.items() if hooks]
        groups = regions.groups if regions else ()
        named = graph_inputs(self._model, self._held.all, groups, trainable=self._held.trainable, apart=hooked)

        def joint(*inputs: torch.Tensor) -> tuple[Sequence[torch.Tensor], LossShape]:
            given = dict(zip(named, inputs, strict=False))
            batch = inputs[len(named) :]
            with contextlib.ExitStack() as stack:
                if regions:
                    stack.enter_context(regions.active())
                if not self._train:
                    stack.enter_context(eval_mode(self._model))
                    stack.enter_context(torch.no_grad())
                run = self._training if self._train else self._evaluation
                check = regions.check if regions else None
                found = call_with(self._model, lambda m: run(m, given, batch, check), self._tensors(given, regions))
                if regions:
                    regions.check_used()
                return found

        return joint, [*map(self._spec, named), *self._signature.specs]

    def _spec(self, given: GraphInput) -> Spec:
        if isinstance(given, Bundle):
            return Spec((), torch.float32, self._train)
        tensor = self._held.all[given]
        return Spec(tuple(tensor.shape), tensor.dtype, self._train and given in self._held.trainable)

    def _tensors(
        self, given: dict[GraphInput, torch.Tensor], regions: LayerInterceptor | None
    ) -> dict[str, torch.Tensor]:
        """Tensors that the module is to hold instead of its own, by name."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in given.items():
            if isinstance(name, Bundle):
                assert regions is not None
                regions.bind(name, tensor, self._held.trainable)
            else:
                found[name] = tensor
        return found

    def _training(
        self, module: nn.Module, given: dict[GraphInput, torch.Tensor], batch: Sequence[torch.Tensor], check: Check
    ) -> tuple[Sequence[torch.Tensor], LossShape]:
        leaves = {name: t for name, t in given.items() if isinstance(name, Bundle) or name in self._held.trainable}
        for name, hooks in self._hooks.items():
            for hook in hooks:
                leaves[name].register_hook(hook)
        loss, metrics, tree = self._forward(module, batch, check)
        grads, without = self._gradients(loss, leaves)
        buffers = self._buffers(module)
        outputs = [loss.detach(), *grads, *(b.detach() for b in buffers), *metrics]
        return outputs, LossShape(list(given), list(leaves), list(self._held.buffers), tree, without)

    def _evaluation(
        self, module: nn.Module, given: dict[GraphInput, torch.Tensor], batch: Sequence[torch.Tensor], check: Check
    ) -> tuple[Sequence[torch.Tensor], LossShape]:
        loss, metrics, tree = self._forward(module, batch, check)
        return [loss, *self._buffers(module), *metrics], LossShape(list(given), [], list(self._held.buffers), tree, ())

    def _forward(
        self, module: nn.Module, batch: Sequence[torch.Tensor], check: Check
    ) -> tuple[torch.Tensor, list[torch.Tensor], object]:
        with torch.autocast("jax", self._compute_dtype) if self._compute_dtype else contextlib.nullcontext():
            out = self._loss_fn(module, self._signature.rebuild(batch))
        if check:  # now that the user's code has run
            check()
        loss, metrics = split_loss(out)
        leaves, tree = flatten(metrics)
        return loss, list(map(_as_metric, leaves)), tree

    def _buffers(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The buffers as forward left them."""
        now = dict(module.named_buffers())
        for name, before in self._held.buffers.items():
            after = now.get(name)
            if after is None or (after.shape, after.dtype) != (before.shape, before.dtype):
                what = "removes it" if after is None else f"makes it {tuple(after.shape)} {after.dtype}"
                raise NotImplementedError(
                    f"The buffer {name} is {tuple(before.shape)} {before.dtype} and forward {what}, but a compiled "
                    "program keeps shapes and dtypes. Give the buffer its largest size at first and write to a part."
                )
        return [now[name] for name in self._held.buffers]

    def _gradients(
        self, loss: torch.Tensor, leaves: dict[GraphInput, torch.Tensor]
    ) -> tuple[list[torch.Tensor], tuple[GraphInput, ...]]:
        if not loss.requires_grad:
            raise ValueError(
                f"{caller()}: the loss does not depend on any trainable parameter. Something between them "
                "cuts the gradient: .detach(), torch.no_grad(), argmax, or a loss of the batch alone."
            )
        found = _derivatives(loss, list(leaves.values()))
        without = tuple(name for name, grad in zip(leaves, found, strict=True) if grad is None)
        grads = [
            torch.zeros(p.shape, dtype=p.dtype) if g is None else g for p, g in zip(leaves.values(), found, strict=True)
        ]
        return grads, without


def _hooks(name: str, parameter: torch.Tensor) -> list[Callable[..., object]]:
    """The gradient hooks of a parameter, to be read before the capture, in which a fake stands for it."""
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise NotImplementedError(
            f"{name} has a post-accumulate-grad hook, which sees .grad, and a compiled step has none. "
            "Use Tensor.register_hook, or an optax transformation."
        )
    return list((parameter._backward_hooks or {}).values())


def _derivatives(loss: torch.Tensor, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """Gradients; by `backward` where only that will do, which costs the capture a node for each."""
    if not _has_reentrant_checkpoint(loss):
        return torch.autograd.grad(loss, leaves, allow_unused=True)
    loss.backward()
    return [leaf.grad for leaf in leaves]


def _has_reentrant_checkpoint(loss: torch.Tensor) -> bool:
    seen: set[torch.autograd.graph.Node] = set()
    todo: list[torch.autograd.graph.Node | None] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        todo += [after for after, _ in node.next_functions]
    return False


def _as_metric(value: PyTree) -> torch.Tensor:
    """A leaf of the metrics as a tensor.

    Raises:
        TypeError: It is neither a tensor nor a number.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{caller()}: metrics must be tensors or numbers, but loss_fn returns {value!r:.99} among them. A compiled "
            "program returns arrays alone: keep the rest outside."
        ) from error
    return found.to(torch.get_default_dtype()) if found.is_floating_point() else found


def check_loss_fn(loss_fn: object) -> None:
    """Refuse what cannot be called with a model and a batch.

    Raises:
        TypeError: It is not callable, takes other arguments, or compares predictions with targets.
    """
    check_call("loss_fn", loss_fn, "model", "batch")
    if getattr(loss_fn, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(
            f"{caller()}: loss_fn is called with (model, batch), and {name} wants predictions and targets. Put them "
            "together: lambda model, batch: loss(model(batch[0]), batch[1])."
        )


def split_loss(out: PyTree) -> tuple[torch.Tensor, dict[str, PyTree]]:
    """Split what a loss function returned into a scalar and metrics, or say what it should return."""
    pair = cast(tuple[PyTree, ...], out) if isinstance(out, tuple) else ()
    loss, metrics = cast(tuple[PyTree, PyTree], pair if len(pair) == 2 else (out, {}))
    is_scalar = isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.is_floating_point()
    if not is_scalar or not isinstance(metrics, dict):
        found = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        also = "" if isinstance(metrics, dict) else f" and metrics of type {type(metrics).__name__}"
        raise TypeError(
            f"{caller()}: loss_fn must return a scalar floating-point tensor, or a pair of it and a dict of metrics; "
            f"it returned {found}{also}. Reduce the loss with .mean() or .sum()."
        )
    if odd := [name for name in metrics if not isinstance(name, str)]:
        raise TypeError(f"{caller()}: metrics are named by strings, but loss_fn names one {odd[0]!r}.")
    if taken := [name for name in RESERVED if name in metrics]:
        raise ValueError(f"{caller()}: the step itself reports {', '.join(taken)}; name that metric otherwise.")
    return loss, cast(dict[str, PyTree], metrics)


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Generator[None, None, None]:
    """The module in eval mode; each submodule gets its own flag back."""
    flags = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


class _Around(nn.Module):
    """A module and what is to run with it, so that `torch.func.functional_call` can swap the module's tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[nn.Module], T]) -> T:
        """Return what `run` returns."""
        return run(self.model)


def call_with(module: nn.Module, run: Callable[[nn.Module], T], tensors: Mapping[str, torch.Tensor]) -> T:
    """Call `run(module)` with other tensors in the places of the module's own.

    Args:
        module: Left as it was.
        run: Forward and backward: a backward pass may run parts of the module again.
        tensors: By the names of `holdings`; every name of a tie gets the one tensor.
    """
    note_modules(module)
    swapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return torch.func.functional_call(_Around(module), swapped, (run,), tie_weights=True)
