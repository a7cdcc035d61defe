"""What all processes must give to `fit` alike, compared before the loop begins."""

from collections.abc import Mapping

from torch_shard._hosts import compare
from torch_shard._io import Checkpointer

SETTINGS = ("batch_size", "drop_last")
"""Attributes of a loader that decide how many batches it gives."""


def agree_on_run(
    settings: Mapping[str, object], checkpointer: Checkpointer | None, loaders: Mapping[str, object]
) -> None:
    """Compare the arguments of `fit` on which the number and the order of its steps depend.

    Args:
        settings: Plain values, by name.
        checkpointer: With its own.
        loaders: By name; what they say of themselves.

    Raises:
        ProcessMismatchError: In every process, if any of it differs.
    """
    facts = dict(settings) | {"the presence of a checkpointer": checkpointer is not None}
    if checkpointer is not None:
        own = {"every": checkpointer.every, "keep": checkpointer.keep, "directory": checkpointer.directory}
        facts |= {f"{name} of the Checkpointer": value for name, value in own.items()}
        facts["the newest checkpoint"] = next(iter(checkpointer.steps()[::-1]), None)
    for name, loader in loaders.items():
        facts[f"the kind of {name}"] = type(loader).__name__
        facts |= {f"{each} of {name}": getattr(loader, each) for each in SETTINGS if hasattr(loader, each)}
        facts[f"the length of {name}"] = _length(loader)
    compare("the beginning of fit", facts, advice=lambda name: _ADVICE.get(name, "Give all processes the same."))


_ADVICE = {
    "directory of the Checkpointer": "All processes save into one directory, which all of them see.",
    "the newest checkpoint": "All processes must see one directory of checkpoints, on a disk that they share.",
}


def _length(loader: object) -> int | None:
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):
        return None
