"""Several processes that are one program: what they agree on, and how all of them fail where one does."""

from torch_shard._hosts.initialize import Launch as Launch
from torch_shard._hosts.initialize import check_started as check_started
from torch_shard._hosts.initialize import initialize as initialize
from torch_shard._hosts.peers import PeerError as PeerError
from torch_shard._hosts.peers import pack as pack
from torch_shard._hosts.processes import ProcessMismatchError as ProcessMismatchError
from torch_shard._hosts.processes import agree as agree
from torch_shard._hosts.processes import begin_run as begin_run
from torch_shard._hosts.processes import broadcast as broadcast
from torch_shard._hosts.processes import check_peers as check_peers
from torch_shard._hosts.processes import compare as compare
from torch_shard._hosts.processes import digest as digest
from torch_shard._hosts.processes import exchange as exchange
from torch_shard._hosts.processes import follow as follow
from torch_shard._hosts.processes import is_shared as is_shared
from torch_shard._hosts.stopping import Gate as Gate
