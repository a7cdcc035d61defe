"""Ways in which the files of a checkpoint are damaged, forged, or not files at all."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEEP = "[" * 100_000 + "]" * 100_000

FORGED_JSON = {
    "empty": "",
    "no JSON": "{",
    "null": "null",
    "string": '"text"',
    "list of lists": "[[]]",
    "other keys": '{"a": 1}',
    "deep": DEEP,
    "huge number": "9" * 5000,
    "surrogate": '"\\ud800"',
}
"""What may stand in a file of JSON, by name."""


def _rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def rewrite(file: Path) -> None:
        file.write_bytes(change(file.read_bytes()))

    return rewrite


def _flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :] if content else b"x"


def _become_directory(file: Path) -> None:
    file.unlink()
    (file / "below").mkdir(parents=True)


def _become_link_to(target: str) -> Callable[[Path], None]:
    def link(file: Path) -> None:
        file.unlink()
        file.symlink_to(target or file.name)

    return link


def _become_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": lambda file: file.unlink(),
    "empty": _rewrite(lambda content: b""),
    "cut": _rewrite(lambda content: content[: len(content) // 2]),
    "last byte lost": _rewrite(lambda content: content[:-1]),
    "longer": _rewrite(lambda content: content + b"\0"),
    "bit flipped": _rewrite(_flipped),
    "zeros": _rewrite(lambda content: bytes(len(content)) or b"\0"),
    "not UTF-8": _rewrite(lambda content: b"\xff\xfe" + content[2:]),
    "zip": _rewrite(lambda content: b"PK\x05\x06" + bytes(18)),
    "directory": _become_directory,
    "link to itself": _become_link_to(""),
    "link to nothing": _become_link_to("nowhere"),
    "link to a directory": _become_link_to("/"),
    "pipe": _become_pipe,
}
"""What may happen to any file of a checkpoint, by name."""

WRONG_VALUES = (None, "text", {"a": None})


def forged_heads(head: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Descriptions of a checkpoint with a field missing, added or of another type, each with a name."""
    for field, value in head.items():
        yield f"{field} missing", {name: v for name, v in head.items() if name != field}
        for wrong in WRONG_VALUES:
            if type(wrong) is not type(value) or (field not in ("step", "num_batches") and wrong and wrong != value):
                yield f"{field}={wrong!r:.20}", {**head, field: wrong}
    yield "another field", {**head, "more": 1}
    stored = head["stored"]
    for field, value in stored[0].items():
        yield f"stored[0].{field} missing", {
            **head, "stored": [{n: v for n, v in stored[0].items() if n != field}, *stored[1:]]
        }  # fmt: skip
        for wrong in WRONG_VALUES:
            if type(wrong) is not type(value) or (wrong and wrong != value):
                yield (
                    f"stored[0].{field}={wrong!r:.20}",
                    {**head, "stored": [{**stored[0], field: wrong}, *stored[1:]]},
                )
    yield "stored twice", {**head, "stored": [*stored, stored[0]]}
    yield "stored once less", {**head, "stored": stored[1:]}
    yield "another dtype", {**head, "stored": [{**stored[0], "dtype": "float16"}, *stored[1:]]}
    yield "another shape", {**head, "stored": [{**stored[0], "shape": [3, 3]}, *stored[1:]]}
    yield "another name", {**head, "stored": [{**stored[0], "names": ["other"]}, *stored[1:]]}


def files_of(folder: Path) -> list[str]:
    """The names of all files below a folder."""
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def copy(folder: Path, to: Path) -> Path:
    """A copy to damage, in the place of the one before."""
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(folder, to, symlinks=True)


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
