"""Plans that nobody types: recipes by what layers are, and the plans of other libraries, read and written."""

from torch_shard._plans.from_hf import from_hf
from torch_shard._plans.simple import replicated

__all__ = ["from_hf", "replicated"]
