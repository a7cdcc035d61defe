"""What a run measures, step by step: JSON lines for programs, TensorBoard for people."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_shard._common.files import replacing

METRICS = "metrics.jsonl"


class MetricsLog:
    """A directory with `metrics.jsonl` and TensorBoard's event files, to which a run adds as it goes.

    Args:
        directory: Made if it is missing.
        start: The number of batches that the run has seen. What was written about later ones, by a run that did not
            come to save them, is taken back.

    Raises:
        OSError: It cannot be written to.
    """

    def __init__(self, directory: str | os.PathLike[str], *, start: int) -> None:
        from tensorboardX import SummaryWriter  # takes a second to import

        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._take_back(start)
        self._lines = (self.directory / METRICS).open("a", encoding="utf-8")
        # A name of its own: by default it is that of the second, and a file of the same second is written over.
        suffix = f".{time.time_ns()}"
        self._events = SummaryWriter(str(self.directory), purge_step=start + 1, filename_suffix=suffix)

    def _take_back(self, start: int) -> None:
        path = self.directory / METRICS
        records = read_metrics(path) if path.exists() else []
        kept = [record for record in records if record["batch"] <= start]
        with replacing(path) as partial:
            partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")

    def write(self, kind: str, batch: int, numbers: Mapping[str, Any]) -> None:
        """Add a record.

        Args:
            kind: `train` or `eval`.
            batch: The number of batches that the run has seen.
            numbers: By name; scalars, the only ones that TensorBoard gets, or nested lists.
        """
        self._lines.write(json.dumps({"kind": kind, "batch": batch, **numbers}) + "\n")
        self._lines.flush()
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self._events.add_scalar(f"{kind}/{name}", value, batch)

    def close(self) -> None:
        """Write what is left."""
        self._lines.close()
        self._events.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read `metrics.jsonl`; a last line that was not written to its end, as by a killed process, is left out."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
