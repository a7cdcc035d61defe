"""The opening of the channel, and what forked processes have of it."""

from tests.oracles.processes import run_alone
from torch_shard._hosts.session import job_secret

PROGRAM = """
import os, sys, time
from tests.oracles.hubs import TIMES, Ends, SECRET
from torch_shard._hosts.hub import Hub
from torch_shard._hosts.session import _forget
from torch_shard._hosts.wire import Times
import functools, gc, socket, threading

times = Times(beat=0.05, silent=5)
served = socket.create_server(("127.0.0.1", 0))
hub = Hub(3, SECRET, times, [served])  # which goes on listening for the third
ends = Ends()
lines = [ends.line(served.getsockname(), rank, times) for rank in range(2)]
os.register_at_fork(after_in_child=functools.partial(_forget, lines[1], ends, hub))
os.register_at_fork(after_in_child=lines[0].wire.abandon)
sys.stdout.flush()
reader, writer = os.pipe()
if (pid := os.fork()) == 0:
    assert lines[1].closing and not lines[0].closing
    lines[1].wire.send("over", "failed", "from the child", "there")  # is heard by nobody
    del hub, ends, lines, served
    gc.collect()
    os.write(writer, b"ready")
    time.sleep(30)
    os._exit(0)
assert os.read(reader, 5) == b"ready"
for _ in range(20):  # the parent's loops still wake up for what its threads send
    lines[1].wire.send("beat", 0, "here")
    time.sleep(0.01)
before = lines[0].heard
until = time.monotonic() + 5
while lines[0].heard == before and time.monotonic() < until:
    time.sleep(0.01)
assert lines[0].heard > before and lines[0].failure is None
lines[1].closing = True
lines[1].wire.close()  # heard at once, though the child lives on
until = time.monotonic() + 5
while lines[0].failure is None and time.monotonic() < until:
    time.sleep(0.01)
os.kill(pid, 9)
os.waitpid(pid, 0)
assert lines[0].failure is not None and "connection lost" in lines[0].failure[1], lines[0].failure
lines[0].closing = True
print("done", flush=True)
os._exit(0)
"""


def test_a_forked_process_leaves_the_channel_to_its_parent():
    ended = run_alone(PROGRAM)
    assert (ended.output, ended.status) == ("done\n", 0)


def test_the_secret_is_that_of_process_0_and_of_the_launcher(monkeypatch):
    monkeypatch.delenv("TORCH_SHARD_SECRET", raising=False)
    drawn = [job_secret(bytes(32)), job_secret(bytes([1] * 32))]
    monkeypatch.setenv("TORCH_SHARD_SECRET", "of the launcher")
    assert len({*drawn, job_secret(bytes(32)), job_secret(bytes([1] * 32))}) == 4
