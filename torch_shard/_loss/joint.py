"""Loss, gradients, new buffers and metrics of a module as one flat torch function, which is what is captured."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Generator, Mapping, Sequence

import torch
from torch import nn

from torch_shard._capture import (
    Effects,
    HostInputs,
    Precision,
    Spec,
    TensorFn,
    current_mode,
    current_values,
    user_leaves,
)
from torch_shard._common.caller import caller
from torch_shard._common.convert import flatten
from torch_shard._entries import Holdings, LossFn, entry_places, holdings, marked_like
from torch_shard._loss.batch import BatchSignature
from torch_shard._loss.constrained_modules import Activations
from torch_shard._loss.result import as_metric, for_effects, split_loss
from torch_shard._lowering import OverContext
from torch_shard._scan import Bundle, GraphInput, LayerInterceptor, LayerOptions, graph_inputs
from torch_shard._sharding import ResolvedPlan

Check = Callable[[], None] | None


@dataclasses.dataclass(frozen=True)
class LossShape:
    """The order of the flat inputs and outputs of the capture."""

    inputs: list[GraphInput]
    grads: list[GraphInput]
    buffers: list[str]
    metrics: object
    without_grad: tuple[GraphInput, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LossSource:
    """A loss, and what it is captured by for any batch.

    Attributes:
        model: Captured with the training flags that it has now, or in eval mode.
        loss_fn: Returns what `split_loss` takes.
        train: With gradients; otherwise in eval mode and without.
        precision: What it computes in.
        layers: What concerns repeated layers.
        plan: How entries and activations are split; None where it is only looked at.
        trained: The parameters with gradients, if not all that require them.
        accumulate_steps: Number of microbatches, whose gradients add up: they are those of `loss / accumulate_steps`.
    """

    model: torch.nn.Module
    loss_fn: LossFn
    train: bool
    precision: Precision = dataclasses.field(default_factory=Precision)
    layers: LayerOptions = dataclasses.field(default_factory=LayerOptions)
    plan: ResolvedPlan | None = None
    trained: Collection[str] | None = None
    accumulate_steps: int = 1

    @property
    def held(self) -> Holdings:
        """The tensors of the model as the loss takes them."""
        return holdings(self.model).training(self.trained)


class JointLoss:
    """`loss_fn(model, batch)` with all that a step needs of it.

    Args:
        source: The loss.
        signature: Of the batch.
        host: What the host has of the batch and of buffers, where Python asks for values; they are refused without.
    """

    def __init__(self, source: LossSource, signature: BatchSignature, host: HostInputs | None) -> None:
        self._source = source
        self._signature = signature
        self._host = host
        plan = source.plan
        self.context = OverContext(plan.context, plan.mesh) if plan and plan.context else None
        self._activations = None
        if plan and plan.activations:
            self._activations = Activations(source.model, plan.activations, plan.mesh)

        self._holdings = source.held
        self._hooks = {name: _hooks(name, parameter) for name, parameter in self._holdings.trainable.items()}

    def __call__(self, regions: LayerInterceptor | None = None) -> tuple[TensorFn[LossShape], list[Spec]]:
        """`(*tensors, *batch) -> loss, gradients, buffers and metrics`, and what it takes."""
        # A hook sees the gradient of its own parameter, not that of a bundle.
        hooked = [name for name, hooks in self._hooks.items() if hooks]
        named = graph_inputs(
            self._source.model,
            self._holdings.all,
            regions.groups if regions else (),
            trainable=self._holdings.trainable,
            apart=hooked,
        )

        def joint(*inputs: torch.Tensor) -> tuple[Sequence[torch.Tensor], LossShape]:
            tensors = dict(zip(named, inputs, strict=False))
            batch = inputs[len(named) :]
            if self._host:
                buffers = {name: tensors[name] for name in self._holdings.buffers if name in tensors}
                current_values().specialise(self._host, buffers, batch)
            capture_mode = current_mode()
            assert capture_mode is not None
            capture_mode.note([("", self._source.model), ("loss_fn", self._source.loss_fn)])

            with contextlib.ExitStack() as stack:
                if self.context:
                    stack.enter_context(self.context.active())
                if self._activations:  # within the layers, which see them
                    stack.enter_context(self._activations.active())
                if regions:
                    stack.enter_context(regions.active())
                if not self._source.train:
                    stack.enter_context(eval_mode(self._source.model))
                    stack.enter_context(torch.no_grad())
                else:
                    stack.enter_context(Precision.without_float16())
                stack.enter_context(holding(self._source.model, self._module_tensors(tensors, regions)))
                outputs = self._run(tensors, batch, regions.check if regions else None)
                if regions:
                    regions.check_used()
                return outputs

        return joint, [*map(self._spec, named), *self._signature.specs]

    def _spec(self, graph_input: GraphInput) -> Spec:
        if isinstance(graph_input, Bundle):
            return Spec((), torch.float32, self._source.train)
        tensor = self._holdings.all[graph_input]
        has_grad = self._source.train and graph_input in self._holdings.trainable
        return Spec(tuple(tensor.shape), tensor.dtype, has_grad)

    def _module_tensors(
        self, tensors: dict[GraphInput, torch.Tensor], regions: LayerInterceptor | None
    ) -> dict[str, torch.Tensor]:
        """Tensors that the module is to hold instead of its own, by name."""
        by_name: dict[str, torch.Tensor] = {}
        for graph_input, tensor in tensors.items():
            if isinstance(graph_input, Bundle):
                assert regions is not None
                regions.bind(graph_input, tensor, self._holdings.trainable)
            else:
                by_name[graph_input] = tensor
        return by_name

    def _run(
        self, tensors: dict[GraphInput, torch.Tensor], batch: Sequence[torch.Tensor], check: Check
    ) -> tuple[Sequence[torch.Tensor], LossShape]:
        """Run the loss and take its gradients.

        Args:
            tensors: By the inputs of the graph that they are.
            batch: Its leaves.
            check: Is called when the user's code has run.
        """
        trains = self._source.train
        leaves: dict[GraphInput, torch.Tensor] = {}
        if trains:
            for graph_input, tensor in tensors.items():
                if isinstance(graph_input, Bundle) or graph_input in self._holdings.trainable:
                    leaves[graph_input] = tensor
            for name, hooks in self._hooks.items():
                for hook in hooks:
                    leaves[name].register_hook(hook)

        effects = Effects()
        with effects.active():
            with self._source.precision.active("jax"):
                out = self._source.loss_fn(self._source.model, self._signature.rebuild(batch))
            if check:
                check()
            if self._activations:
                self._activations.check(all_met=trains)

            loss, named = split_loss(out)
            named = {name: effects.as_tensors(metric) for name, metric in named.items()}

            # What is returned may have numbers that nobody keeps; those that are alive at the end count as kept.
            del out

            # Within the effects, as gradient hooks may keep numbers, too.
            grads: list[torch.Tensor] = []
            without_grad: tuple[GraphInput, ...] = ()
            if trains:
                grads, without_grad = self._gradients(loss, leaves)

        effects.plan()
        values, tree = flatten({**named, **for_effects(effects.tensors())})
        metrics = list(map(as_metric, values))
        buffers = [buffer.detach() for buffer in self._buffers()]
        shape = LossShape(list(tensors), list(leaves), list(self._holdings.buffers), tree, without_grad)
        return [loss.detach(), *grads, *buffers, *metrics], shape

    def _buffers(self) -> list[torch.Tensor]:
        """The buffers as forward left them."""
        now = dict(self._source.model.named_buffers())
        for name, before in self._holdings.buffers.items():
            after = now.get(name)
            if after is None or (after.shape, after.dtype) != (before.shape, before.dtype):
                what = "removes it" if after is None else f"makes it {tuple(after.shape)} {after.dtype}"
                raise NotImplementedError(
                    f"The buffer {name} is {tuple(before.shape)} {before.dtype} and forward {what}, but a compiled "
                    "program keeps shapes and dtypes. Give the buffer its largest size at first and write to a part."
                )
        if self._host:
            current_values().follow(now)
        return [now[name] for name in self._holdings.buffers]

    def _gradients(
        self, loss: torch.Tensor, leaves: dict[GraphInput, torch.Tensor]
    ) -> tuple[list[torch.Tensor], tuple[GraphInput, ...]]:
        if not loss.requires_grad:
            raise ValueError(
                f"{caller()}: the loss does not depend on any trainable parameter. Something between them "
                "cuts the gradient: .detach(), torch.no_grad(), torch.inference_mode() (around the step, too), argmax, "
                "or a loss of the batch alone."
            )

        # Gradient hooks need not be linear: they see what they would see in `(loss / n).backward()`.
        num_microbatches = self._source.accumulate_steps
        seed = torch.full_like(loss, 1 / num_microbatches) if num_microbatches > 1 else None
        derivatives = _derivatives(loss, seed, list(leaves.values()))

        grads: list[torch.Tensor] = []
        without_grad: list[GraphInput] = []
        for (graph_input, leaf), derivative in zip(leaves.items(), derivatives, strict=True):
            if derivative is None:
                without_grad.append(graph_input)
                derivative = torch.zeros(leaf.shape, dtype=leaf.dtype)
            grads.append(derivative)
        return grads, tuple(without_grad)


def _hooks(name: str, parameter: torch.Tensor) -> list[Callable[..., object]]:
    """The gradient hooks of a parameter, to be read before the capture, in which a fake stands for it."""
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise NotImplementedError(
            f"{caller()}: {name} has a post-accumulate-grad hook, which sees .grad, and a compiled step has none. "
            "Use Tensor.register_hook, or an optax transformation."
        )
    return list((parameter._backward_hooks or {}).values())


def _derivatives(
    loss: torch.Tensor, seed: torch.Tensor | None, leaves: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Gradients; by `backward` where some may land in `.grad` only, which costs the capture a node for each."""
    try:
        if all(leaf.grad is None for leaf in leaves) and user_leaves([loss]) is None:
            return torch.autograd.grad(loss, leaves, seed, allow_unused=True)
        loss.backward(seed)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise RuntimeError(
            f"{caller()}: loss_fn has called backward() on the loss that it returns, or on a part of it. Leave "
            "backward(), optimizer.step() and zero_grad() out: the step does this with the loss that loss_fn returns."
        ) from error
    return [leaf.grad for leaf in leaves]


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


@contextlib.contextmanager
def holding(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Generator[None, None, None]:
    """Let a module hold other tensors, under all names of a tie.

    (`torch.func.functional_call` leaves its own tensors in a module that is registered under two names.)

    Args:
        module: It gets its own back.
        tensors: By the names of `holdings`.
    """
    originals = holdings(module).all
    new = {id(originals[name]): marked_like(originals[name], tensor) for name, tensor in tensors.items()}
    places = [place for place in entry_places(module) if id(place[2]) in new]
    for entries, name, original in places:
        entries[name] = new[id(original)]
        if isinstance(original, nn.Parameter):
            # isinstance(tensor, nn.Parameter) asks for this attribute, of which modules make decisions.
            new[id(original)]._is_param = True
    capture_mode = current_mode()
    assert capture_mode is not None
    try:
        # A parameter may stand in a list or a closure, too, from where the forward pass reads it.
        with capture_mode.binding([originals[name] for name in tensors], list(new.values())):
            yield
    finally:
        for entries, name, original in places:
            entries[name] = original
