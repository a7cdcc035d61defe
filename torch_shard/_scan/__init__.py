"""Repeated layers, proved to be one program, run as one lax.scan."""

from torch_shard._scan.execute import StackRow, StackRows, array_of, operands_of
from torch_shard._scan.instructions import Operand
from torch_shard._scan.intercept import LayerInterceptor
from torch_shard._scan.pipeline_layers import Order, take
from torch_shard._scan.pipeline_parts import NoPipeline, Parts, find_stages, parts_of
from torch_shard._scan.pipeline_run import PipelineRun
from torch_shard._scan.region import Call, Region
from torch_shard._scan.rolled import (
    REMAT,
    CapturedLayers,
    LayerOptions,
    Remat,
    RolledLoss,
    ScanLayers,
    capture_layers,
    report,
)
from torch_shard._scan.siblings import Bundle, GraphInput, Siblings, graph_inputs, names_of, stack_layout
