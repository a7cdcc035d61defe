"""What a compiled program costs, read from its text: cycles, arithmetic, memory traffic, collectives, by module."""

from torch_shard._cost.by_module import COMPILER, ModuleCost, ModulePaths
from torch_shard._cost.collectives import KINDS
from torch_shard._cost.saved import saved_bytes
from torch_shard._cost.total import Cost, costs_of

__all__ = ["COMPILER", "KINDS", "Cost", "ModuleCost", "ModulePaths", "costs_of", "saved_bytes"]
