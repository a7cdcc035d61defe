"""Repeated layers, proved to be one program, run as one lax.scan."""

from torch_shard._scan.bundles import Bundle, Unit, names_of, units_of
from torch_shard._scan.capture import REMAT, Repeats, Rolled, capture_layers, report
from torch_shard._scan.execute import Row, Rows, array_of
from torch_shard._scan.intercept import Regions
from torch_shard._scan.region import LAYER, Call
from torch_shard._scan.siblings import Siblings, stack_layout

__all__ = [
    "LAYER",
    "REMAT",
    "Bundle",
    "Call",
    "Regions",
    "Repeats",
    "Rolled",
    "Row",
    "Rows",
    "Siblings",
    "Unit",
    "array_of",
    "capture_layers",
    "names_of",
    "report",
    "stack_layout",
    "units_of",
]
