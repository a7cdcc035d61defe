"""The public function that the user has called: errors begin with its name, and say which argument was meant.

`@public` notes a function, and `caller()` finds the innermost noted one on the stack. So nothing is passed through
the packages, and nothing is wrapped: signatures, doctests, tracebacks and the time of a call are those of the function.
"""

# sys._getframe has no public name.
# pyright: reportPrivateUsage=false

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

_F = TypeVar("_F", bound=Callable[..., object])
_NAMES: dict[CodeType, str | None] = {}


def public(function: _F) -> _F:
    """Let errors raised in this function, and below it, begin with its name; of a constructor, with the class's."""
    return error_prefix(function.__qualname__.removesuffix(".__init__"))(function)


def error_prefix(name: str | None) -> Callable[[_F], _F]:
    """Let errors raised in the decorated function, and below it, begin with `name`.

    Args:
        name: For what runs when the public function has returned: the functions that an adapter returns. None for
            methods of objects whose class states the name, as its attribute `caller`.
    """

    def note(function: _F) -> _F:
        _NAMES[function.__code__] = name
        return function

    return note


def prefix_of(function: Callable[..., object], *args: Any) -> str:
    """Name a noted function, which is given these arguments; empty if it takes them to say that."""
    return _NAMES[function.__code__] or (args[0].caller if args else "")


def caller() -> str:
    """Name the innermost public function under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _NAMES:
            return _NAMES[frame.f_code] or frame.f_locals[frame.f_code.co_varnames[0]].caller
        frame = frame.f_back
    return "torch_shard"


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
    "max_new_tokens": "max_tokens",
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
    "plan": "plan=ts.plans.fsdp(...)",
    "mesh": "mesh=ts.make_mesh(batch=...)",
    "checkpointer": "checkpointer=ts.Checkpointer(directory), from which a run also goes on",
}
_ELSEWHERE = {
    "learning_rate": "The optimizer has the learning rate.",
    "lr": "The optimizer has the learning rate.",
    "fp16": "float16 needs a scaler, which a step does not have: compute_dtype=torch.bfloat16 is as fast.",
    "weight_decay": "The optimizer has the weight decay.",
    **dict.fromkeys(
        ("collate_fn", "data_collator", "shuffle", "num_workers", "drop_last"),
        "Give ts.Rows(dataset, batch_size=32, collate_fn=..., shuffle=..., num_workers=..., drop_last=...) as loader.",
    ),
    "output_dir": "ts.Checkpointer(directory) has the directory; give it to fit as checkpointer=.",
}
_TAKERS: dict[str, list[str]] = {}
"""The public functions that take each argument."""


def near_misses(function: Callable[P, T]) -> Callable[P, T]:
    """Answer a call with arguments that a public function does not have, or without some, with the one that was meant.

    Of keyword arguments that it does not have, it says which they are here.
    """
    parameters = {key: p for key, p in inspect.signature(function).parameters.items() if key != "self"}
    if (name := prefix_of(function)) and "." not in name:
        for own in parameters:
            _TAKERS.setdefault(own, []).append(name)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if getattr(error.__traceback__, "tb_next", None):  # it was raised within
                raise
            name = prefix_of(function, *args)
            said = " ".join(_answer(key, name, list(parameters)) for key in kwargs if key not in parameters)
            raise TypeError(f"{name}: {said or _usual(function, parameters, str(error))}") from None

    return call


def _usual(function: Callable[..., object], parameters: Mapping[str, inspect.Parameter], error: str) -> str:
    """Say after Python's words how a function is called: with what it needs, or else by the name of the first."""
    named = {key: _SAID.get(key, f"{key}=...").partition(",")[0] for key in parameters}
    needed = [
        key if p.kind is p.POSITIONAL_OR_KEYWORD else named[key]
        for key, p in parameters.items()
        if p.default is p.empty
    ]
    own = "step" if function.__name__ == "__call__" else function.__name__
    return f"{error.partition('() ')[2]}. Call it as {own}({', '.join(needed or [*named.values()][:1])})."


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
