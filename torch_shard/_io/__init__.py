"""State and weights on disk: checkpoints, safetensors, torch files."""

from torch_shard._io.checkpointer import Checkpointer
from torch_shard._io.export import export_safetensors, export_torch
from torch_shard._io.integrity import find_damage
from torch_shard._io.inventory import find_checkpoint, inventory
from torch_shard._io.load import load_safetensors, load_torch
