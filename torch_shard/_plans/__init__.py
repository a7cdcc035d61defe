"""Recipes for plans, by what layers are, and the plans of other libraries."""

# pyright: reportUnusedImport=false

from torch_shard._plans.decisions import quietly
from torch_shard._plans.from_dtensor import from_dtensor
from torch_shard._plans.from_hf import from_hf
from torch_shard._plans.recipes import expert, fsdp, fsdp_tp, hsdp, pipeline, replicated, tp
from torch_shard._plans.roles import experts_of
