"""Keyword arguments under the name that another library gives them: an error that has the name here."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_HERE = {
    "accumulate_steps": "gradient_accumulation_steps accumulate_grad_batches grad_accumulation_steps grad_accum",
    "batch_size": "per_device_train_batch_size train_batch_size global_batch_size",
    "callbacks": "callback",
    "compute_metrics": "metrics eval_metrics",
    "checkpointer": "resume_from_checkpoint ckpt_path default_root_dir enable_checkpointing checkpoint",
    "clip_grad_norm": "clip_grad max_norm max_grad_norm grad_clip gradient_clip_val gradient_clipping grad_norm",
    "clip_grad_value": "clip_value gradient_clip_value",
    "compute_dtype": "precision bf16 amp autocast dtype half",
    "eval_every": "eval_steps val_check_interval check_val_every_n_epoch eval_strategy evaluation_strategy",
    "eval_loader": "val_loader valid_loader eval_dataset val_dataset val_dataloaders eval_dataloader eval_data",
    "every": "save_steps save_every save_interval every_n_train_steps",
    "keep": "save_total_limit save_top_k max_to_keep",
    "loader": "train_loader train_dataset train_dataloader train_dataloaders dataloader dataset data train_data",
    "log": "logger logging_dir report_to log_dir",
    "log_every": "logging_steps log_every_n_steps log_interval",
    "loss_fn": "loss criterion compute_loss loss_func",
    "max_new_tokens": "max_length max_tokens",
    "mesh": "devices num_devices accelerator strategy num_nodes device device_mesh",
    "optimizer": "optim opt optimizers tx",
    "plan": "sharding shardings parallelize_plan tp_plan fsdp fsdp_config deepspeed sharding_plan in_shardings",
    "progress": "disable_tqdm enable_progress_bar progress_bar verbose",
    "remat": "gradient_checkpointing activation_checkpointing checkpoint_activations",
    "scheduler": "lr_scheduler lr_schedulers schedule",
    "steps": "epochs num_epochs max_epochs num_train_epochs max_steps num_steps total_steps train_steps",
}
_TABLE = {theirs: ours for ours, names in _HERE.items() for theirs in names.split()}
"""Names in torch, transformers, Lightning, accelerate and optax, and what they are called here."""

_SAID = {
    "batch_size": "batch_size=, the rows of a batch over all devices",
    "compute_dtype": "compute_dtype=torch.bfloat16",
    "steps": "steps=, the number of batches of the whole run (epochs * len(loader))",
    "progress": "progress=, True or False",
    "remat": 'remat="block"',
    "plan": "plan=, which ts.plans.fsdp(model, mesh) and others make",
    "mesh": "mesh=ts.make_mesh(batch=...)",
    "checkpointer": "checkpointer=ts.Checkpointer(directory), from which a run also goes on",
}
_ELSEWHERE = {
    "learning_rate": "The optimizer has the learning rate.",
    "lr": "The optimizer has the learning rate.",
    "fp16": "float16 needs a scaler, which a step does not have: compute_dtype=torch.bfloat16 is as fast.",
    "weight_decay": "The optimizer has the weight decay.",
    "output_dir": "ts.Checkpointer(directory) has the directory; give it to fit as checkpointer=.",
}
_TAKERS: dict[str, list[str]] = {}
"""The public functions that take each argument."""


def near_misses(function: Callable[P, T]) -> Callable[P, T]:
    """Answer a keyword argument that a public function does not have with the one that was meant."""
    name = function.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(function).parameters
    known = list(parameters)
    num_positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    required = [key for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    for own in known:
        _TAKERS.setdefault(own, []).append(name)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if unknown := [key for key in kwargs if key not in known]:
            raise TypeError(f"{name}: " + " ".join(_answer(key, name, known) for key in unknown))
        if len(args) > num_positional:
            raise TypeError(
                f"{name}: takes {num_positional} arguments by position, found {len(args)}. Name the others."
            )
        if missing := [key for key in required if key not in kwargs]:
            raise TypeError(f"{name}: give it " + " and ".join(_SAID.get(key, f"{key}=") for key in missing) + ".")
        return function(*args, **kwargs)

    return call


def _answer(key: str, name: str, known: list[str]) -> str:
    ours = _TABLE.get(key) or (key if key in _TAKERS else None)
    if ours in known:
        return f"{key}= is called {_SAID.get(ours, f'{ours}=')} here."
    if ours in _TAKERS:
        return f"{key}= is no argument of {name}: it is {_SAID.get(ours, f'{ours}=')} of {' and '.join(_TAKERS[ours])}."
    if key in _ELSEWHERE:
        return f"{key}= is no argument of {name}. {_ELSEWHERE[key]}"
    close = difflib.get_close_matches(key, known, 1)
    return f"there is no argument {key}=." + (
        f" Did you mean {close[0]}=?" if close else f" There are: {', '.join(known)}."
    )
