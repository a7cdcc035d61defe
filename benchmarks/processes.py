"""Functions in processes of their own: nothing that one side caches, allocates or configures reaches another."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

FAIR = {"GOMP_SPINCOUNT": "1000"}
"""Threads of torch that wait for one another give the core up early. With the default they spin, which on a busy
machine makes torch up to twenty times slower, and whoever runs next slower as well."""


class Failed(RuntimeError):
    """The process ended with an error; the message has the end of what it said."""


def isolated(
    function: str, /, *, num_devices: int = 1, platform: str = "cpu", timeout_s: float | None = None, **kwargs: Any
) -> Any:
    """Call `module:function` with `kwargs` in a new process.

    Args:
        function: Where it is, as `benchmarks.compile:first_step`.
        num_devices: Simulated devices, where the platform is the CPU.
        platform: For JAX; empty to let JAX choose.
        timeout_s: The process is ended after that.
        kwargs: Anything that JSON can hold.

    Returns:
        What the function returns, as JSON holds it.

    Raises:
        Failed: It raised, was killed for want of memory, or took too long.
    """
    environment = FAIR | os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices)}
    if platform:
        environment["JAX_PLATFORMS"] = platform
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.processes", function, json.dumps(kwargs), str(result)]
        try:
            done = subprocess.run(
                command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace", timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{function}: no result after {timeout_s:g} s") from None
        if not result.exists():
            raise Failed(f"{function}: exit status {done.returncode}: {done.stderr.strip()[-2000:]}")
        return json.loads(result.read_text())


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """The other side of `isolated`."""
    function, kwargs, result = sys.argv[1:]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    module, name = function.split(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(kwargs))
    Path(result).write_text(json.dumps(value))


if __name__ == "__main__":
    main()
