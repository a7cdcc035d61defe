"""Calls of Python functions in one thread, seen while a block runs.

From Python 3.12 on by `sys.monitoring`, where a function that is of no interest costs one look. Before, by a profile
function, which sees every call: it is paused where PyTorch's own machinery runs.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from types import CodeType, FrameType
from typing import Any

_MONITORING: Any = getattr(sys, "monitoring", None)

_FREE_TOOLS = (3, 4)  # the others belong to debuggers, coverage, profilers and optimizers


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
        self._tool: int | None = None

    def _is_wanted(self, code: CodeType) -> bool:
        found = self._known.get(id(code))
        if found is None:
            found = self._known[id(code)] = code, self._wants(code)
        return found[1]

    @contextlib.contextmanager
    def watching(self) -> Generator[None, None, None]:
        """See the calls in this thread within `calls_seen`. A profile function that is set goes on as it was."""
        self._tool = None if _MONITORING is None else _free_tool()
        _CURRENT.watchers.append(self)
        try:
            with self._profiling() if self._tool is None else self._monitoring(self._tool):
                yield
        finally:
            _CURRENT.watchers.pop()

    @contextlib.contextmanager
    def _monitoring(self, tool: int) -> Generator[None, None, None]:
        thread = threading.get_ident()

        def start(code: CodeType, offset: int) -> object:
            if not self._is_wanted(code):
                return _MONITORING.DISABLE
            if threading.get_ident() == thread:
                self._on_call(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
            return None

        def end(code: CodeType, offset: int, value: object) -> object:
            if not self._is_wanted(code):
                return _MONITORING.DISABLE
            if threading.get_ident() == thread:
                self._on_return(sys._getframe(1), value)  # pyright: ignore[reportPrivateUsage]
            return None

        events = _MONITORING.events
        _MONITORING.use_tool_id(tool, "torch_shard")
        try:
            _MONITORING.register_callback(tool, events.PY_START, start)
            _MONITORING.register_callback(tool, events.PY_RETURN, end)
            _MONITORING.set_events(tool, events.PY_START | events.PY_RETURN)
            _MONITORING.restart_events()
            yield
        finally:
            _MONITORING.set_events(tool, 0)
            _MONITORING.free_tool_id(tool)

    @contextlib.contextmanager
    def _profiling(self) -> Generator[None, None, None]:
        self._outer = sys.getprofile()
        try:
            yield
        finally:
            self.pause()

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
        """See nothing until `resume`, at least by a profile function; returns whether anything was seen."""
        if self._tool is not None or sys.getprofile() != self._profile:
            return False
        _set_profile(self._outer)
        return True

    def resume(self) -> bool:
        """See calls again; returns whether nothing was seen."""
        if self._tool is not None or sys.getprofile() == self._profile:
            return False
        sys.setprofile(self._profile)
        return True


def _free_tool() -> int | None:
    return next((tool for tool in _FREE_TOOLS if _MONITORING.get_tool(tool) is None), None)


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
