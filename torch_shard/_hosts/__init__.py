"""Several processes that are one program: what they agree on, and how all of them fail where one does."""

from torch_shard._hosts.processes import agree as agree
from torch_shard._hosts.processes import exchange as exchange
