"""Several processes that are one JAX program, on this host."""

import socket
import subprocess
import sys
import textwrap
import time

START = """
import sys, jax
rank, num, port, devices = map(int, sys.argv[1:])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num, rank, initialization_timeout=60)
"""


def run_processes(program: str, num: int, *, num_devices: int = 2, timeout_s: float = 120) -> None:
    """Run a program, which sees `rank`, in several processes with so many devices each; all must come to their end."""
    # gRPC too listens with SO_REUSEPORT: bound, though never listening, the port stays ours.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        source = START + textwrap.dedent(program)
        commands = [[sys.executable, "-c", source, *map(str, (rank, num, port, num_devices))] for rank in range(num)]
        workers = [
            subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=-1)
            for c in commands
        ]
        deadline = time.monotonic() + timeout_s
        try:
            while any(w.poll() is None for w in workers) and time.monotonic() < deadline:
                if any(w.poll() for w in workers):  # the others would wait for it
                    break
                time.sleep(0.05)
        finally:
            failed = [rank for rank, w in enumerate(workers) if w.poll() != 0]
            for w in workers:
                w.kill()
            outputs = [w.communicate()[0] for w in workers]
    assert not failed, "\n".join(f"process {rank}:\n{outputs[rank][-3000:]}" for rank in failed)
