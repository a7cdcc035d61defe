"""Directories that are whole or damaged: a checksum of every file, written last."""

import json
import os
import zlib
from pathlib import Path

CHECKSUMS = "checksums.json"


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
        wanted = json.loads((directory / CHECKSUMS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [f"{CHECKSUMS}: missing, so it was not written to its end"]
    except ValueError:
        return [f"{CHECKSUMS}: cannot be read"]
    lines = []
    for name, (size, checksum) in list(wanted.items())[part[0] :: part[1]]:
        file = directory / name
        if not file.is_file():
            lines.append(f"{name}: missing")
        elif file.stat().st_size != size:
            lines.append(f"{name}: {file.stat().st_size} bytes, must have {size}")
        elif _checksum(file)[1] != checksum:
            lines.append(f"{name}: its checksum differs, so some of its bits have changed")
    return lines


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
