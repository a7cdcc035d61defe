"""What a compiled program costs: memory, cycles, arithmetic, memory traffic, collectives, by module; the preview."""

from torch_shard._cost.chips import Chip, chip_of
from torch_shard._cost.fitting import (
    ProgramMemory,
    TooLarge,
    compile_or_refuse,
    memory_of_program,
    partitioner_refusals,
)
from torch_shard._cost.preview import Preview, preview_of
from torch_shard._cost.total import Cost, costs_of
