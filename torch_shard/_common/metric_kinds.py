"""The classes of torchmetrics' objects, where the program has imported it; nothing here does."""

import sys


def metric_kinds() -> tuple[type, ...]:
    """The classes whose instances gather values over calls."""
    torchmetrics = sys.modules.get("torchmetrics")
    found = (getattr(torchmetrics, name, None) for name in ("Metric", "MetricCollection"))
    return tuple(kind for kind in found if isinstance(kind, type))


def is_metric(value: object) -> bool:
    """Tell whether a value is such an object, whose state is no part of a program."""
    return isinstance(value, metric_kinds())
