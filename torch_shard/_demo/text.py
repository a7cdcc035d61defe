"""Real text that every machine has: the sources of Python's standard library, as tokens."""

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

# Tests are not typical code, and the last two are tables and one long string.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
INDENT = "    "
# One token per printable ASCII character, and a tab for one level of indentation: Python sources have few of their own.
VOCABULARY = "\n\t" + "".join(map(chr, range(32, 127)))
UNKNOWN = "?"

_TOKEN_OF_BYTE = np.full(256, VOCABULARY.index(UNKNOWN), np.uint8)
_TOKEN_OF_BYTE[np.frombuffer(VOCABULARY.encode(), np.uint8)] = np.arange(len(VOCABULARY))


def encode(text: str) -> torch.Tensor:
    r"""Turn text into tokens, int64 (T,); characters beyond ASCII become question marks.

    Example:
        >>> decode(encode("if x:\n    y"))
        'if x:\n    y'
    """
    return torch.from_numpy(_encode(text).astype(np.int64))


def _encode(text: str) -> np.ndarray:
    narrow = text.replace("\t", INDENT).replace(INDENT, "\t").encode("ascii", "replace")
    return _TOKEN_OF_BYTE[np.frombuffer(narrow, np.uint8)]


def decode(tokens: torch.Tensor) -> str:
    """Turn tokens, (T,), into text."""
    return "".join(VOCABULARY[token] for token in tokens.tolist()).replace("\t", INDENT)


@dataclass(frozen=True)
class Corpus:
    """Tokens of the standard library, split by file.

    Attributes:
        train: uint8 (N,), files to learn from, one after the other.
        validation: uint8 (M,), other files.
        num_files: Of both.
    """

    train: np.ndarray
    validation: np.ndarray
    num_files: int

    @property
    def unigram_entropy(self) -> float:
        """Entropy of single tokens, in nats: the best loss of a model that ignores context."""
        counts = np.bincount(self.validation, minlength=len(VOCABULARY))
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())


def read_corpus() -> Corpus:
    """Read the standard library of the running Python.

    Raises:
        FileNotFoundError: It was installed without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if SKIPPED.isdisjoint(f.relative_to(root).parts))
    parts: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for file in files:
        # By a checksum of its name a file is on the same side on every machine, whatever the other files.
        held_out = zlib.crc32(file.relative_to(root).as_posix().encode()) % 10 == 0
        parts[held_out].append(_encode(file.read_text("utf-8", errors="replace")))
    if not (parts[True] and parts[False]):
        raise FileNotFoundError(f"The demo reads Python's standard library, but {root} holds no .py files.")
    return Corpus(np.concatenate(parts[False]), np.concatenate(parts[True]), len(files))


def draw_batch(tokens: np.ndarray, *, batch_size: int, context: int, seed: tuple[int, ...]) -> list[torch.Tensor]:
    """Draw windows at random.

    Args:
        tokens: (N,).
        batch_size: Number of windows, B.
        context: Length of a window, T.
        seed: The same numbers, such as a seed and a step, always draw the same windows.

    Returns:
        Inputs and targets, both int64 (B, T); a target is the input one position on.
    """
    starts = np.random.default_rng(seed).integers(len(tokens) - context, size=batch_size)
    windows = torch.from_numpy(np.stack([tokens[i : i + context + 1] for i in starts]).astype(np.int64))
    return [windows[:, :-1].contiguous(), windows[:, 1:].contiguous()]
