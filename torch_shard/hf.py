"""`transformers.Trainer`, and what derives from it, on a mesh: the trainer stays as it is, and a compiled step trains.

This module needs `transformers`, and is imported when it is asked for: `ts.hf.Trainer`. Tried with transformers 5.24,
accelerate 1.15, peft 0.21 and TRL 1.16.
"""

# transformers annotates its trainer in part.
# pyright: reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax.sharding import Mesh
from torch import nn

from torch_shard._common.types import PyTree
from torch_shard._device import BatchLayout, to_cpu
from torch_shard._sharding import ShardingPlan, check_mesh
from torch_shard._state import TrainState
from torch_shard._train import ApplyStep, TrainStep, make_apply
from torch_shard._trainers import (
    Plan,
    Updates,
    check_step_options,
    evaluation_options,
    precision_options,
    resolve_plan,
)

try:
    import transformers
    from accelerate.utils import convert_to_fp32
except ImportError as error:
    raise ImportError("torch_shard.hf needs transformers and accelerate: pip install 'torch_shard[hf]'.") from error

__all__ = ["OnMesh", "Trainer"]

logger = logging.getLogger(__name__)

_Base: Any = transformers.Trainer if TYPE_CHECKING else object

_REFUSED = {
    "deepspeed": "the plan says what is split: plan=ts.plans.fsdp splits what ZeRO-3 splits",
    "fsdp": "the plan says what is split: plan=ts.plans.fsdp",
    "parallelism_config": "mesh= and plan= say it, as docs/guides/plans.md has it for each of its sizes",
    "fp16": "use bf16=True, whose gradients need no scale",
    "fp16_full_eval": "an evaluation computes as training does: bf16=True for both",
    "bf16_full_eval": "an evaluation computes as training does: bf16=True for both",
    "torch_compile": "the step is compiled as a whole",
    "use_liger_kernel": "XLA fuses, and attention takes the kernels of the device",
    "auto_find_batch_size": "trainer.train_step.preview(batch) says what fits, before anything runs",
    "debug": "ts.find_nan(step, state, batch) names the first value that is not finite",
    "predict_with_generate": "generate after training: ts.generate, or model.to('cpu').generate",
}
"""Arguments that would change how transformers trains, with what says it here."""

_BY_ARGUMENTS = {
    "accumulate_steps": "gradient_accumulation_steps of TrainingArguments",
    "clip_grad_norm": "max_grad_norm of TrainingArguments",
    "compute_dtype": "bf16 of TrainingArguments",
}
"""Options of a step that are said otherwise."""


class OnMesh(_Base):
    """Train on a mesh what a trainer of transformers trains: `class Mine(ts.hf.OnMesh, AnyTrainer)`.

    The trainer keeps its loop, arguments, callbacks, files and `compute_loss`. Each update is one compiled program, and
    so is each batch of an evaluation or prediction. `model` is the one that is trained: callbacks, `save_model` and
    what comes after see the values of the last step (on the device `jax`).

    `per_device_train_batch_size` and `per_device_eval_batch_size` are rows per device, as under data parallelism: a
    batch has as many times more as there are devices along the mesh axes of the batch. `bf16=True` computes by the
    policy of `torch.autocast("cuda")`, as the trainer does; parameters and moments stay in float32. Dropout and its kin
    draw by keys of `args.seed`, other numbers than torch's; a resumed run draws what one without a stop would.

    Args:
        *args: As the trainer takes them.
        mesh: Devices with Auto axes, from `make_mesh`.
        plan: How each parameter is split, or a function of (model, mesh) that says so, as the recipes of `ts.plans`. By
            default `fsdp_tp` on a mesh with an axis `model`, and else `fsdp`.
        step_options: Further options of `make_train_step` by name: `remat`, `offload`, `mixed_precision`, ...
        **options: As the trainer takes them.

    Raises:
        NotImplementedError: An argument cannot be meant on a mesh (`deepspeed`, `fsdp`, `fp16`, `torch_compile`, ...),
            or there are several processes.

    Example:
        >>> import torch_shard as ts
        >>> from transformers import Seq2SeqTrainer
        >>> class Mine(ts.hf.OnMesh, Seq2SeqTrainer):
        ...     pass
        >>> ts.hf.OnMesh in Mine.__mro__
        True
    """

    def __init__(
        self,
        *args: Any,
        mesh: Mesh,
        plan: Plan | None = None,
        step_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.mesh = check_mesh(mesh)
        self._plan = plan
        self._step_options = check_step_options(type(self).__name__, step_options, _BY_ARGUMENTS)
        self._updates: Updates | None = None
        self._predictions: dict[tuple[object, ...], ApplyStep] = {}
        self._state_to_evaluate: TrainState | None = None
        self._microbatches: list[dict[str, PyTree]] = []
        self._update_metrics: dict[str, Any] = {}
        self._is_resumed = False

        super().__init__(*args, **options)

        self.args = _on_mesh(self.args, self._num_row_shards())
        self._train_batch_size = self.args.train_batch_size

    # ---- what is settled before anything runs ----

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and let accelerate neither place nor cast anything: a step does."""
        _check_arguments(type(self).__name__, self.args)
        super().create_accelerator_and_postprocess()
        self._is_bf16 = self.args.mixed_precision == "bf16"
        self.accelerator.device_placement = False
        self.accelerator.native_amp = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """A model goes onto the mesh, when training begins."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer as the trainer does, and the step, which refuses an optimizer that it does not take.

        Args:
            model: By default the trainer's.

        Returns:
            The optimizer.
        """
        optimizer = super().create_optimizer(*([] if model is None else [model]))
        # Accelerate wraps it, and a step takes torch's own.
        bare = optimizer
        while hasattr(bare, "optimizer"):
            bare = bare.optimizer
        updates = self._updates
        if updates is None or updates.model is not self.model or updates.optimizer is not bare:
            self._updates = self._make_updates(bare)
            self._updates.step(self.args.gradient_accumulation_steps)
        return optimizer

    def _make_updates(self, optimizer: torch.optim.Optimizer) -> Updates:
        options = precision_options(is_bf16=self._is_bf16)
        options["clip_grad_norm"] = self.args.max_grad_norm or None

        # XLA merges what torch.utils.checkpoint would compute again with what was computed first. The step's own way of
        # doing so holds.
        checkpointing = [module for module in self.model.modules() if getattr(module, "gradient_checkpointing", False)]
        for module in checkpointing:
            module.gradient_checkpointing = False
        if checkpointing:
            options["remat"] = "block"

        options |= self._step_options
        return Updates(
            self.model, self._loss_of, optimizer, mesh=self.mesh, plan=self._resolved_plan(), options=options
        )

    def _resolved_plan(self) -> ShardingPlan:
        return resolve_plan(self._plan, self.model, self.mesh)

    def _num_row_shards(self) -> int:
        plan = self._resolved_plan()
        layout = BatchLayout(self.mesh, self._step_options.get("batch_spec"), plan.context, rows=plan.rows)
        num = 1
        for axis in layout.row_axes:
            num *= self.mesh.shape[axis]
        return num

    # ---- training ----

    @property
    def train_step(self) -> TrainStep:
        """The step that trains, to be asked: `report()`, `preview(batch)`, `programs`."""
        if self._updates is None:
            raise RuntimeError(
                f"{type(self).__name__}: there is a step as soon as there is an optimizer: after train()."
            )
        return self._updates.step(self.args.gradient_accumulation_steps)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train, as the trainer does.

        Args:
            resume_from_checkpoint: As the trainer takes it: a directory, or True for the last one.
            *args: As the trainer takes them.
            **options: As the trainer takes them.

        Returns:
            What the trainer returns.
        """
        self._microbatches = []
        self._is_resumed = bool(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **options)

    def training_step(
        self, model: nn.Module, inputs: dict[str, PyTree], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Take a microbatch; with the last one of an update, run the step.

        Args:
            model: The trainer's.
            inputs: A microbatch.
            num_items_in_batch: Of all microbatches of the update, if the trainer counts them.

        Returns:
            The loss of the update with its last microbatch, and zero with the others: the trainer adds them up.
        """
        model.train()
        self._microbatches.append(
            {
                "inputs": dict(self._prepare_inputs(inputs)),
                "num_items_in_batch": num_items_in_batch,
                "divisor": self._divisor(num_items_in_batch),
            }
        )
        if not self.accelerator.sync_gradients:
            return torch.zeros(())

        updates = self._begun()
        microbatches = self._microbatches
        self._microbatches = []
        self._update_metrics = updates(microbatches)
        return torch.tensor(float(self._update_metrics["loss"]))

    def _begun(self) -> Updates:
        """The run, which the first step begins; the first one after a checkpoint draws what comes there."""
        assert self._updates is not None
        if self._updates.state is None:
            self._updates.begin(self.args.gradient_accumulation_steps, seed=self.args.seed)
        if self._is_resumed:
            self._is_resumed = False
            self._updates.go_on_from(self.state.global_step)
        return self._updates

    def _divisor(self, num_items_in_batch: torch.Tensor | int | None) -> int:
        """What the loss of a microbatch is divided by, which does not count the items of all of them itself."""
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = counts or self.compute_loss_func is not None
        return 1 if is_scaled else self.current_gradient_accumulation_steps

    def _loss_of(self, model: nn.Module, microbatch: dict[str, PyTree]) -> torch.Tensor:
        """What a microbatch adds to the loss of an update."""
        # A trainer may take entries out of its inputs, as with its labels.
        inputs = dict(microbatch["inputs"])
        with self._float32_outputs(model), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=microbatch["num_items_in_batch"])
        return loss / microbatch["divisor"]

    @contextmanager
    def _float32_outputs(self, model: nn.Module) -> Iterator[None]:
        """What the model returns in bfloat16 is float32 for the loss, as accelerate has it."""
        if not self._is_bf16:
            yield
            return
        handle = model.register_forward_hook(lambda _, __, outputs: convert_to_fp32(outputs))
        try:
            yield
        finally:
            handle.remove()

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return torch.tensor(float(self._update_metrics["grad_norm"]))

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | float | None = None) -> float:
        return float(self._update_metrics["grad_norm"])

    # ---- evaluation and prediction ----

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate or predict, as the trainer does.

        Args:
            *args: As the trainer takes them.
            **options: As the trainer takes them.

        Returns:
            What the trainer returns.
        """
        if self._updates is None or self._updates.state is None:
            apply = make_apply(self.model, mesh=self.mesh, plan=self._resolved_plan())
            self._state_to_evaluate = apply.init()
        try:
            return super().evaluation_loop(*args, **options)
        finally:
            self._state_to_evaluate = None

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, PyTree],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, PyTree, PyTree]:
        """Evaluate the model on a batch: what the trainer computes, as one compiled program.

        Args:
            model: The trainer's.
            inputs: A batch.
            prediction_loss_only: Return the loss alone.
            ignore_keys: Entries of the outputs that are not returned.

        Returns:
            Loss, logits and labels on the CPU.
        """
        key = (prediction_loss_only, None if ignore_keys is None else tuple(ignore_keys))
        if key not in self._predictions or self._predictions[key].model is not self.model:
            self._predictions[key] = self._make_prediction(prediction_loss_only, ignore_keys)
        apply = self._predictions[key]

        # Outside of `evaluation_loop`, the model may have changed since the last call.
        state = self._state_to_evaluate
        if state is None and self._updates is not None:
            state = self._updates.state
        if state is None:
            state = apply.of_model()

        outputs = jax.tree.map(_on_host, apply(state, dict(inputs)))
        return outputs.get("loss"), outputs.get("logits"), outputs.get("labels")

    def _make_prediction(self, prediction_loss_only: bool, ignore_keys: list[str] | None) -> ApplyStep:
        compute = super().prediction_step

        def predict(model: nn.Module, inputs: dict[str, PyTree]) -> dict[str, PyTree]:
            with self._float32_outputs(model):
                outputs = compute(model, dict(inputs), prediction_loss_only, ignore_keys)

            # None is no output of a program.
            present: dict[str, PyTree] = {}
            for name, value in zip(("loss", "logits", "labels"), outputs, strict=True):
                if value is not None:
                    present[name] = value
            return present

        options = evaluation_options(self._step_options, is_bf16=self._is_bf16)
        return make_apply(self.model, mesh=self.mesh, plan=self._resolved_plan(), fn=predict, **options)


class Trainer(OnMesh, transformers.Trainer):
    """Train on a mesh with `transformers.Trainer`: two more arguments, and all else as it is; see `OnMesh`.

    Args:
        *args: As `transformers.Trainer` takes them.
        mesh: Devices with Auto axes, from `make_mesh`.
        plan: As `OnMesh` takes it.
        step_options: As `OnMesh` takes them.
        **options: As `transformers.Trainer` takes them.

    Example:
        >>> import tempfile, torch, torch_shard as ts
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
        >>> data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 8))]
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True
        ... )
        >>> trainer = ts.hf.Trainer(model, args, mesh=ts.make_mesh(batch=4, model=2), train_dataset=data)
        >>> output = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        >>> output.global_step, next(model.parameters()).device
        (2, device(type='jax', index=0))
    """


def _check_arguments(name: str, args: transformers.TrainingArguments) -> None:
    """Refuse what cannot be meant on a mesh, all at once."""
    faults: list[str] = []
    for argument, instead in _REFUSED.items():
        # Which arguments there are depends on the version of transformers.
        value = getattr(args, argument, None)
        if value:
            faults.append(f"  {argument}={value!r}: {instead}.")
    if (getattr(args, "activation_checkpointing_kwargs", None) or {}).get("offload"):
        faults.append("  activation_checkpointing_kwargs offload: step_options={'offload': 'activations'} is there.")
    if args.mixed_precision not in ("no", "bf16", "fp16"):
        faults.append(f"  ACCELERATE_MIXED_PRECISION={args.mixed_precision}: bf16=True is there.")
    if faults:
        raise NotImplementedError(
            f"{name}: some of TrainingArguments cannot be meant on a mesh. Leave them out.\n\n" + "\n".join(faults)
        )
    if args.world_size > 1 or jax.process_count() > 1:
        raise NotImplementedError(
            f"{name}: there are {max(args.world_size, jax.process_count())} processes, and a trainer on a mesh has "
            "one, with all devices of its host. On several hosts, train with ts.fit."
        )


def _on_mesh(args: transformers.TrainingArguments, num_row_shards: int) -> transformers.TrainingArguments:
    """A copy of the arguments whose batches have the rows of all devices, and whose torch is on the CPU."""
    on_mesh = copy.copy(args)
    on_mesh.__class__ = _arguments_on_mesh(type(args))
    on_mesh._num_row_shards = num_row_shards
    return on_mesh


@functools.cache
def _arguments_on_mesh(kind: type[Any]) -> type[Any]:
    """Arguments of this class for a mesh. They are pickled as the class itself."""

    class OnMeshArguments(kind):
        _num_row_shards: int

        @property
        def train_batch_size(self) -> int:
            return self.per_device_train_batch_size * self._num_row_shards

        @property
        def eval_batch_size(self) -> int:
            return self.per_device_eval_batch_size * self._num_row_shards

        @property
        def n_gpu(self) -> int:
            return 1

        @property
        def device(self) -> torch.device:
            return torch.device("cpu")

        def __reduce__(self) -> tuple[object, ...]:
            values = dict(vars(self))
            del values["_num_row_shards"]
            return object.__new__, (kind,), values

    # What a trainer prints and what `torch.save` writes shows the class that the user knows.
    OnMeshArguments.__name__ = kind.__name__
    OnMeshArguments.__qualname__ = kind.__qualname__
    OnMeshArguments.__module__ = kind.__module__
    return OnMeshArguments


def _on_host(array: jax.Array) -> torch.Tensor:
    """An output as torch has it on the CPU: integers of 64 bits."""
    tensor = to_cpu(array)
    return tensor.long() if tensor.dtype == torch.int32 else tensor
