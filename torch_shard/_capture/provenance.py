"""The line of the user's code that an error is about, and errors that end with it, without frames of machinery."""

import contextlib
import importlib.util
import logging
import os
import pathlib
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Generator
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn

_HERE = pathlib.Path(__file__).parent.parent

_BELOW = ("torch", "jax", "numpy")
_FOLDERS = [_HERE, *(pathlib.Path(str(importlib.util.find_spec(name).origin)).parent for name in _BELOW)]  # pyright: ignore
_LIBRARIES = ("<", *(f"{folder}{os.sep}" for folder in _FOLDERS))
_OF_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
INSTALLED = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"  # may lie within Python's own folder


_LAYERS = ("fx", "_subclasses", "_dynamo", "_compile.py", "_ops.py", "overrides.py", "utils")
_MACHINERY = (*(str(_FOLDERS[1] / layer) for layer in _LAYERS), str(_HERE))


def is_user_file(filename: str) -> bool:
    """Tell whether a file belongs neither to this package nor to Python and the libraries that it stands on."""
    is_python = filename.startswith(_OF_PYTHON) and not any(folder in filename for folder in INSTALLED)
    return not is_python and not filename.startswith(_LIBRARIES)


_OWN_PACKAGES: set[str] = set()


def count_as_own(module: str | None) -> None:
    """Let the files of the package of a module be the user's own, also where it is installed."""
    package = sys.modules.get(str(module).split(".")[0])
    file = str(getattr(package, "__file__", None))
    if file.endswith("__init__.py") and is_user_file(file):
        _OWN_PACKAGES.add(file.removesuffix("__init__.py"))


def is_own_file(filename: str) -> bool:
    """Tell whether a file is the user's own and not one of an installed library; what was typed in counts."""
    if filename.startswith(tuple(_OWN_PACKAGES)):
        return True
    typed = filename.startswith("<") and not filename.startswith("<frozen")
    return typed or (is_user_file(filename) and not any(folder in filename for folder in INSTALLED))


def user_frame(error: BaseException) -> str:
    """The innermost line of the user's own code in the traceback of `error`, as `File "...", line N: source`."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if is_user_file(f.filename)]
    return describe(mine[-1] if mine else frames[-1])


def describe(frame: traceback.FrameSummary) -> str:
    """One line for one frame."""
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}'


def current_user_line() -> str:
    """The innermost line of the user's own code on the stack."""
    frames = (f for f, _ in traceback.walk_stack(None) if is_user_file(f.f_code.co_filename))
    frame = next(frames, None)
    if frame is None:
        return "(no line of user code)"
    return describe(traceback.extract_stack(frame, limit=1)[0])


def asking_frame(*, within_torch: bool = True) -> FrameType | None:
    """The Python function that asked for the value, below the layers of PyTorch's dispatch.

    Args:
        within_torch: Whether it may be one of PyTorch's own.
    """
    frame: FrameType | None = sys._getframe(2)
    others = _MACHINERY if within_torch else (*_MACHINERY, f"{_FOLDERS[1]}{os.sep}")
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    return frame


def is_asked_by_torch() -> bool:
    """Tell whether it is a function of PyTorch's own that asks, and not one of the user or of another library."""
    frame = asking_frame()
    return frame is not None and frame.f_code.co_filename.startswith(f"{_FOLDERS[1]}{os.sep}")


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


class CallWatcher:
    """Tells of each call of a function, and of what it returns."""

    def __init__(
        self,
        wants: Callable[[CodeType], bool],
        on_call: Callable[[FrameType], None],
        on_return: Callable[[FrameType, object], None],
    ) -> None:
        self._wants, self._on_call, self._on_return = wants, on_call, on_return
        self._known: dict[int, tuple[CodeType, bool]] = {}
        self._outer: Any = None

    def _is_wanted(self, code: CodeType) -> bool:
        found = self._known.get(id(code))
        if found is None:
            found = self._known[id(code)] = code, self._wants(code)
        return found[1]

    @contextlib.contextmanager
    def watching(self) -> Generator[None, None, None]:
        """See the calls in this thread within `calls_seen`. A profile function that is set goes on as it was."""
        _CURRENT.watchers.append(self)
        self._outer = sys.getprofile()
        try:
            yield
        finally:
            self.pause()
            _CURRENT.watchers.pop()

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if self._is_wanted(frame.f_code):
                self._on_call(frame)
        elif event == "return" and self._is_wanted(frame.f_code):
            self._on_return(frame, arg)
        if callable(self._outer):
            self._outer(frame, event, arg)

    def note(self, code: CodeType) -> None:
        """Take code for seen that another function runs in the place of."""
        self._is_wanted(code)

    def pause(self) -> bool:
        """See nothing until `resume`; returns whether anything was seen."""
        if sys.getprofile() != self._profile:
            return False
        _set_profile(self._outer)
        return True

    def resume(self) -> bool:
        """See calls again; returns whether nothing was seen."""
        if sys.getprofile() == self._profile:
            return False
        sys.setprofile(self._profile)
        return True


def _set_profile(profile: Any) -> None:
    if profile is not None and not callable(profile):
        profile.enable()  # that of the module cProfile sets itself
    else:
        sys.setprofile(profile)


class _Current(threading.local):
    def __init__(self) -> None:
        self.watchers: list[CallWatcher] = []


_CURRENT = _Current()


def current_watcher() -> CallWatcher | None:
    """The watcher of this thread, if there is one."""
    return _CURRENT.watchers[-1] if _CURRENT.watchers else None


@contextlib.contextmanager
def calls_seen(seen: bool) -> Generator[None, None, None]:
    """Let the watcher of this thread, if there is one, see calls or not, for a block."""
    watcher = current_watcher()
    changed = watcher is not None and (watcher.resume() if seen else watcher.pause())
    try:
        yield
    finally:
        if watcher is not None and changed:
            watcher.pause() if seen else watcher.resume()
