"""The line of the user's code that an error is about."""

import importlib.util
import os
import pathlib
import sys
import sysconfig
import traceback
from types import FrameType

_HERE = pathlib.Path(__file__).parent.parent

_BELOW = ("torch", "jax", "numpy")
_FOLDERS = [_HERE, *(pathlib.Path(str(importlib.util.find_spec(name).origin)).parent for name in _BELOW)]  # pyright: ignore
_LIBRARIES = ("<", *(f"{folder}{os.sep}" for folder in _FOLDERS))
_OF_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_INSTALLED = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"  # may lie within Python's own folder


_TORCH = pathlib.Path(str(importlib.util.find_spec("torch").origin)).parent  # pyright: ignore
_LAYERS = ("fx", "_subclasses", "_dynamo", "_compile.py", "_ops.py", "overrides.py", "utils")
_MACHINERY = (*(str(_TORCH / layer) for layer in _LAYERS), str(_HERE))


def is_user_file(filename: str) -> bool:
    """Tell whether a file belongs neither to this package nor to Python and the libraries that it stands on."""
    is_python = filename.startswith(_OF_PYTHON) and not any(folder in filename for folder in _INSTALLED)
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
    return typed or (is_user_file(filename) and not any(folder in filename for folder in _INSTALLED))


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


def asking_frame() -> FrameType | None:
    """The Python function that asked for the value, below the layers of PyTorch's dispatch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return frame
