"""Several processes that are one JAX program, on this host."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap

# One process imports everything, which takes longest, and forks before JAX starts.
START = """
import os, sys, traceback, warnings, jax, pytest, torch, torch_shard as ts
num, port, devices = map(int, sys.argv[1:])
warnings.filterwarnings("ignore", "os.fork")  # of JAX, whose threads have not started
rank = next((rank for rank in range(num) if os.fork() == 0), None)
if rank is None:
    for _ in range(num):
        if os.wait()[1]:
            os._exit(1)
    os._exit(0)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num, rank, initialization_timeout=60)
try:
"""
END = """
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # an orderly end would wait for the others
"""


def run_processes(program: str, num: int, *, num_devices: int = 2, timeout_s: float = 120) -> None:
    """Run a program, which sees `rank`, in several processes with so many devices each; all must come to their end."""
    # gRPC too listens with SO_REUSEPORT: bound, though never listening, the port stays ours.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        command = [sys.executable, "-c", START + textwrap.indent(textwrap.dedent(program), "    ") + END]
        command += [str(number) for number in (num, held.getsockname()[1], num_devices)]
        with tempfile.TemporaryFile("w+") as output:
            first = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                first.wait(timeout_s)  # for the first that fails: the others may wait for it for ever
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(first.pid, signal.SIGKILL)
                first.wait()
            output.seek(0)
            assert first.returncode == 0, output.read()[-6000:]
