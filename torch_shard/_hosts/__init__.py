"""Several processes that are one program: what they agree on, and how all of them fail where one does."""

from torch_shard._hosts.initialize import Launch as Launch
from torch_shard._hosts.initialize import check_started as check_started
from torch_shard._hosts.initialize import initialize as initialize
from torch_shard._hosts.processes import agree as agree
from torch_shard._hosts.processes import exchange as exchange
