"""Several processes that are one program: what they agree on, and how all of them fail where one does."""

from torch_shard._hosts.initialize import Launch, check_started, initialize
from torch_shard._hosts.peers import PeerError, pack
from torch_shard._hosts.processes import (
    Gate,
    ProcessMismatchError,
    agree,
    begin_run,
    broadcast,
    check_peers,
    compare,
    digest,
    exchange,
    follow,
    is_shared,
)
