"""An event loop in a thread of its own: connections that are served whatever the rest of the process does."""

import asyncio
import concurrent.futures
import contextlib
import os
import selectors
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class Background:
    """Runs coroutines beside the program.

    Attributes:
        loop: The event loop.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Run a coroutine, and do not wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine to its end, and give its result."""
        return self.start(coroutine).result()

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        self.run(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def abandon(self) -> None:
        """Let go of it in a forked process: what the loop waits with is shared with the parent."""
        replace_descriptor(getattr(self._selector, "fileno", lambda: -1)())


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)  # connections that were closed just now are told so


def replace_descriptor(number: int) -> None:
    """Close a file descriptor in a forked process, and keep its number taken, for it is closed once more at the end."""
    with contextlib.suppress(OSError), open(os.devnull, "rb") as nothing:
        if number >= 0:
            os.dup2(nothing.fileno(), number, inheritable=False)
