"""Errors of the user's own code in a capture: they end with the user's line, without frames of machinery."""

import contextlib
import logging
import traceback
from collections.abc import Callable, Generator
from types import FrameType, TracebackType

import torch
from torch import nn

from torch_shard._capture.provenance import describe, is_user_file

_PACKAGE = "torch_shard"
_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def torchs_log_silent() -> Generator[None, None, None]:
    """Without PyTorch's log of an operator that refuses its inputs, which raises the error as well."""
    _FAKE_TENSORS.addFilter(_is_no_traceback)
    try:
        yield
    finally:
        _FAKE_TENSORS.removeFilter(_is_no_traceback)


def _is_no_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def end_at_the_users_line(error: Exception, path: Callable[[nn.Module], str]) -> None:
    """Let an error say in which line of the user's code and in which module it came up."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [s for s in traceback.extract_tb(error.__traceback__) if is_user_file(s.filename)]
    if not lines or _is_of_the_package(frames[-1]):
        return
    if isinstance(error, TypeError) and "FakeTensor" in str(error) and "abstract array" in str(error):  # JAX's
        error.add_note("JAX was given a torch tensor. Within torch code, ts.call_jax(function, *args) calls JAX.")
    module = next((found for frame in reversed(frames) if (found := _module_called(frame)) is not None), None)
    at = "" if module is None else f'In "{path(module[0])}", {_kind(module[0])}, given {_shapes(module[1])}: '
    error.add_note(f"{at}{describe(lines[-1])}")


def _is_of_the_package(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _PACKAGE


def _module_called(frame: FrameType) -> tuple[nn.Module, tuple[object, ...]] | None:
    """The module that a frame calls, with its arguments."""
    if frame.f_code is not nn.Module._call_impl.__code__:  # pyright: ignore[reportPrivateUsage]
        return None
    return frame.f_locals["self"], (*frame.f_locals["args"], *frame.f_locals["kwargs"].values())


def _kind(module: nn.Module) -> str:
    extra = module.extra_repr()
    return f"{type(module).__name__}({extra})" if len(extra) < 100 else type(module).__name__


def _shapes(args: tuple[object, ...]) -> str:
    shown = (str(tuple(a.shape)) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args)
    return ", ".join(shown) or "nothing"


def leave_users_frames(error: Exception) -> None:
    """Leave of a traceback the entries that lie in the user's files; of an error of the package itself, all."""
    entries, tb = list[TracebackType](), error.__traceback__
    while tb is not None:
        entries.append(tb)
        tb = tb.tb_next
    found: TracebackType | None = None
    for entry in reversed(entries):
        if is_user_file(entry.tb_frame.f_code.co_filename):
            found = TracebackType(found, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    if found is not None and not _is_of_the_package(entries[-1].tb_frame):
        error.__traceback__ = found
