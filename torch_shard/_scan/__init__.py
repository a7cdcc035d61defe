"""Repeated layers, proved to be one program, run as one lax.scan."""

from torch_shard._scan.bundles import Bundle, GraphInput, graph_inputs, names_of
from torch_shard._scan.capture import FEW, REMAT, LayerOptions, Remat, RolledLoss, ScanLayers, capture_layers, report
from torch_shard._scan.execute import StackRow, StackRows, array_of
from torch_shard._scan.intercept import LayerInterceptor
from torch_shard._scan.region import Call
from torch_shard._scan.siblings import Siblings, stack_layout

__all__ = [
    "FEW",
    "REMAT",
    "Bundle",
    "Call",
    "GraphInput",
    "LayerInterceptor",
    "LayerOptions",
    "Remat",
    "RolledLoss",
    "ScanLayers",
    "Siblings",
    "StackRow",
    "StackRows",
    "array_of",
    "capture_layers",
    "graph_inputs",
    "names_of",
    "report",
    "stack_layout",
]
