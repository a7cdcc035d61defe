"""Functions of which a captured callable is not given a result: what they tell is told after each step instead."""

import contextlib
import copy
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch_shard._capture.guards import metric_kinds
from torch_shard._capture.provenance import current_user_line
from torch_shard._common.patching import patched

_TELLING = (
    ("builtins", "", ("print",)),
    ("torch.utils.tensorboard.writer", "SummaryWriter", ("add_scalar", "add_scalars", "add_text")),
    ("tensorboardX.writer", "SummaryWriter", ("add_scalar", "add_scalars", "add_text")),
    ("tqdm.std", "tqdm", ("set_postfix", "set_postfix_str", "set_description", "write")),
    ("wandb", "", ("log",)),
    ("mlflow", "", ("log_metric", "log_metrics")),
)
"""Functions that only tell: a module, a class in it, and names there."""


def telling() -> Iterator[tuple[Any, str]]:
    """The owner and the name of each of them that has been imported."""
    for module_name, class_name, names in _TELLING:
        module = sys.modules.get(module_name)
        owner = getattr(module, class_name, None) if class_name else module
        for name in names if owner is not None else ():
            if hasattr(owner, name):
                yield owner, name


class Handled:
    """A message of a logger, to be handled with other values."""

    __name__ = "handle"

    def __init__(self, logger: logging.Logger, record: logging.LogRecord, handle: Callable[..., Any]) -> None:
        self._logger, self._record, self._handle = logger, copy.copy(record), handle
        self._record.msg = self._record.args = None

    def __call__(self, **about: Any) -> None:
        record = copy.copy(self._record)
        vars(record).update(about, created=time.time())
        self._handle(self._logger, record)


_GATHERED = ("forward", "compute", "reset", "merge_state", "state_dict", "load_state_dict")
"""What an object of torchmetrics does with values of earlier steps, besides taking up those of one more."""


def on_metrics(update: Callable[..., None]) -> Iterator[contextlib.AbstractContextManager[None]]:
    """Contexts in which objects of torchmetrics call this instead of their `update`, and refuse the rest.

    Args:
        update: Is given the object, its own `update`, and the arguments.
    """

    def instead(original: Callable[[object, str], Any]) -> Callable[[object, str], Any]:
        def getattribute(metric: object, name: str) -> Any:
            if name == "update":
                return functools.partial(update, metric, original(metric, name))
            if name in _GATHERED:
                return functools.partial(refuse_metric, metric)
            return original(metric, name)

        return getattribute

    # Each object has an `update` of its own, which its constructor wraps: a patch of the class's would not be called.
    for kind in metric_kinds():
        yield patched(kind, "__getattribute__", instead)


def refuse_metric(metric: object, *args: object, **kwargs: object) -> NoReturn:
    """Refuse what a program cannot know of an object of torchmetrics."""
    raise NotImplementedError(
        f"{current_user_line()}\nHere the captured function uses what a {type(metric).__name__} has gathered in "
        "earlier steps, or updates it within a repeated layer. Only update(...) in loss_fn itself can be kept: it "
        "is made after each step. Call the rest after the step, where it has its values."
    )


@contextlib.contextmanager
def silent(*, loggers: bool) -> Iterator[None]:
    """Tell nothing within.

    Args:
        loggers: Whether messages of loggers are left out, too.
    """
    contexts = [*on_metrics(_do_nothing), *(patched(owner, name, _silent) for owner, name in telling())]
    if loggers:
        contexts.append(patched(logging.Logger, "handle", _silent))
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass


def _silent(original: Callable[..., Any]) -> Callable[..., Any]:
    return _do_nothing
