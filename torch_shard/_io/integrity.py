"""Directories that are whole or damaged: a checksum of every file, written last."""

import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import signal
import threading
import weakref
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

CHECKSUMS = "checksums.json"


class Unreadable(ValueError):
    """A file is not what it was written as."""


@contextlib.contextmanager
def reading(name: str) -> Generator[None, None, None]:
    """Let whatever the content of a file leads to say which file it is."""
    try:
        yield
    except (FileNotFoundError, Unreadable, MemoryError):
        raise
    except Exception as error:  # of the decoder, of missing keys and wrong types, of who interprets them
        reason = str(error).partition("\n")[0][:300]
        raise Unreadable(f"{name}: cannot be read, {type(error).__name__}: {reason}") from error


def read_json(file: Path) -> Any:
    """Content of a file of JSON, of whatever kind; to be called within `reading`."""
    if file.exists() and not file.is_file():
        raise OSError("it is not a file")  # to read a pipe would wait forever
    return json.loads(file.read_text(encoding="utf-8"))


def seal(directory: Path) -> None:
    """Write down the checksum of every file within, after all of them have reached the disk."""
    found = {file.relative_to(directory).as_posix(): _checksum(file, sync=True) for file in _files(directory)}
    with (directory / CHECKSUMS).open("w", encoding="utf-8") as file:
        json.dump(found, file)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Let the names of its files reach the disk."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def find_damage(directory: Path, *, part: tuple[int, int] = (0, 1)) -> list[str]:
    """Differences from the checksums: a line for each file; none for a whole directory.

    Args:
        directory: That `seal` has seen.
        part: `(k, n)` to read only the `k`-th of each `n` files.
    """
    try:
        wanted = _read_checksums(directory)
    except FileNotFoundError:
        return [f"{CHECKSUMS}: missing, so it was not written to its end"]
    except Unreadable as error:
        return [str(error)]
    mine = list(wanted.items())[part[0] :: part[1]]
    return [f"{name}: {fault}" for name, sums in mine if (fault := _fault_of(directory / name, *sums))]


def _read_checksums(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 by the names of files."""
    with reading(CHECKSUMS):
        found = read_json(directory / CHECKSUMS)
        if not found:
            raise ValueError("it names no file")
        return {str(name): (int(size), int(checksum)) for name, (size, checksum) in found.items()}


def _fault_of(file: Path, size: int, checksum: int) -> str | None:
    """Say how a file differs from what was written."""
    try:
        if not file.is_file():
            return "it is not a file any more" if file.exists() else "missing"
        if (now := file.stat().st_size) != size:
            return f"{now} bytes, must have {size}"
        return None if _checksum(file)[1] == checksum else "its checksum differs, so some of its bits have changed"
    except (OSError, ValueError) as error:  # a NUL in the name is no value
        return f"cannot be read: {error}"


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.is_file() and file.name != CHECKSUMS)


def _checksum(file: Path, *, sync: bool = False) -> list[int]:
    """Size and CRC-32."""
    size = checksum = 0
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 22):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        if sync:
            os.fsync(opened.fileno())
    return [size, checksum]


# Ctrl-C and the end of the interpreter, neither of which may cut a checkpoint short.


logger = logging.getLogger(__name__)

_WRITING: weakref.WeakSet[concurrent.futures.Future[None]] = weakref.WeakSet()


@contextlib.contextmanager
def uninterrupted() -> Generator[None, None, None]:
    """Hold `SIGINT` back within the `with`; it comes at its end. In other threads than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came:
            signal.raise_signal(signal.SIGINT)


def finish_at_exit(writing: concurrent.futures.Future[None]) -> None:
    """Let this be done before the interpreter ends; an error that nobody has asked for by then is logged."""
    _listen()
    _WRITING.add(writing)


@functools.cache
def _listen() -> None:
    # The only hook that comes before Python stops taking work for threads, which orbax still has to give them; `atexit`
    # comes after that. `concurrent.futures` uses it too, earlier, so that its own is called after this one.
    threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue]
    os.register_at_fork(after_in_child=_WRITING.clear)  # their threads are the parent's


def _finish_all() -> None:
    writing = list(_WRITING)
    if writing and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it was heard: the interpreter ends
    for future in writing:
        if (error := future.exception()) is not None:
            logger.error("A checkpoint could not be written: %s", error)
