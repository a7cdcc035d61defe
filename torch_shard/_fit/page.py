"""A run as a page: one HTML file that needs nothing else, made of what `fit` has written to its log."""

import html
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_shard._common.caller import caller, public
from torch_shard._common.files import replacing
from torch_shard._fit.overview import OVERVIEW
from torch_shard._fit.reports import METRICS, read_metrics

PAGE = "report.html"

STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --faint: #656d76; --line: #d0d7de; --card: #f6f8fa; --back: #fff;
  --one: #0969da; --two: #bc4c00; --fill: #ddf4ff; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --faint: #9198a1; --line: #3d444d; --card: #151b23;
  --back: #0d1117; --one: #4493f8; --two: #f0883e; --fill: #12304d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
  max-width: 1040px; padding: 24px 16px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 32px 0 8px; }
p, .faint { color: var(--faint); margin: 0; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 16px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; min-width: 0; }
.card b { display: block; font-size: 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } td, th { text-align: left; padding: 3px 14px 3px 0;
  border-bottom: 1px solid var(--line); white-space: nowrap; } code { font-size: 12px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--faint); font-size: 11px; }
.axis { stroke: var(--line); } .one { stroke: var(--one); } .two { stroke: var(--two); }
polyline { fill: none; stroke-width: 1.5; } .mesh { display: grid; gap: 6px; }
.mesh div { background: var(--fill); border-radius: 6px; padding: 6px 8px; font: 11px/1.4 ui-monospace, monospace;
  overflow-wrap: anywhere; }
"""


@public
def write_report(directory: str | os.PathLike[str]) -> Path:
    """Write a page about a run: loss, rates, gradient norms, speed, mesh, memory, loops, compilations.

    It is one file, light and dark, that a browser shows without a network.

    Args:
        directory: What `fit(log=...)` was given.

    Returns:
        The path of the page, `report.html` in that directory.

    Raises:
        FileNotFoundError: No run has been logged there.
        ValueError: A file of the log is damaged.

    Example:
        >>> import tempfile, optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=2), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> log = tempfile.mkdtemp()
        >>> state = ts.fit(step, None, [torch.ones(8, 4)], steps=3, log=log, progress=False)
        >>> ts.write_report(log).name
        'report.html'
    """
    folder = Path(directory)
    if not (folder / METRICS).is_file():
        raise FileNotFoundError(f"{caller()}: {folder} has no {METRICS}: give the directory of fit(log=...).")
    try:
        records = read_metrics(folder / METRICS)
        path = folder / OVERVIEW
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        text = _page(folder.absolute().name, run, records)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{caller()}: the log in {folder} is damaged: {type(error).__name__}: {error}") from error
    with replacing(folder / PAGE) as partial:
        partial.write_text(text, encoding="utf-8")
    return folder / PAGE


def _page(name: str, run: dict[str, Any], records: list[dict[str, Any]]) -> str:
    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    parts = [
        f"<h1>{_text(name)}</h1>",
        f"<p>{_text(_headline(run))}</p>",
        f'<div class="row" style="margin-top:16px">{_numbers(train, evals)}</div>',
        "<h2>Curves</h2>",
        f'<div class="row">{_curves(train, evals)}</div>',
        *([_mesh(run), _memory(run), _layers(run)] if run else []),
        _compilations([record for record in records if record["kind"] == "compile"]),
        *([_entries(run)] if run else []),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f"<!doctype html><html lang=en><head>{head}<title>{_text(name)}</title><style>{STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _headline(run: dict[str, Any]) -> str:
    if not run:
        return ""
    axes = " × ".join(f"{name} {size}" for name, size in run["mesh"]["axes"].items())
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"{run['model']} with {run['optimizer']} on {axes} ({run['platform']}); {versions}"


def _numbers(train: list[dict[str, Any]], evals: list[dict[str, Any]]) -> str:
    """The last numbers, large."""
    cards: dict[str, str] = {}
    if train:
        cards["batches"] = f"{train[-1]['batch']:,}"
    for kind, records in (("training loss", train), ("evaluation loss", evals)):
        if losses := _points(records, "loss"):
            cards[kind] = f"{losses[-1][1]:.4g}"
    for unit in ("tokens", "samples"):
        if speeds := sorted(value for _, value in _points(train, f"{unit}_per_s")):
            cards[f"{unit} per second, median"] = f"{speeds[len(speeds) // 2]:,.0f}"
    return "".join(
        f'<div class="card"><span class="faint">{_text(k)}</span><b>{_text(v)}</b></div>' for k, v in cards.items()
    )


def _points(records: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Finite values of a number, by batch."""
    found = [(float(r["batch"]), r.get(name)) for r in records]
    return [(x, float(y)) for x, y in found if isinstance(y, int | float) and math.isfinite(y)]


def _curves(train: list[dict[str, Any]], evals: list[dict[str, Any]]) -> str:
    names = [
        n for r in train for n, v in r.items() if n not in ("kind", "batch", "loss") and isinstance(v, int | float)
    ]
    first = [n for n in ("lr", "grad_norm", "tokens_per_s", "samples_per_s") if n in names]
    charts = [_chart("loss", [("one", _points(train, "loss")), ("two", _points(evals, "loss"))])]
    charts += [_chart(name, [("one", _points(train, name))]) for name in dict.fromkeys([*first, *names])]
    return "".join(f'<div class="card">{chart}</div>' for chart in charts if chart)


WIDTH, HEIGHT, LEFT, BOTTOM = 320.0, 170.0, 44.0, 18.0


def _chart(title: str, lines: Sequence[tuple[str, list[tuple[float, float]]]]) -> str:
    """A line chart; empty if there is nothing to draw."""
    points = [point for _, line in lines for point in line]
    if not points:
        return ""
    (left, right), (low, high) = ((min(each), max(each)) for each in zip(*points, strict=True))
    right, high = right + (right == left), high + (high == low) * max(abs(high), 1e-9)

    def place(point: tuple[float, float]) -> str:
        x = LEFT + (point[0] - left) / (right - left) * (WIDTH - LEFT - 6)
        y = 8 + (high - point[1]) / (high - low) * (HEIGHT - BOTTOM - 8)
        return f"{x:.1f},{y:.1f}"

    def drawn(kind: str, line: list[tuple[float, float]]) -> str:
        every = max(1, len(line) // 600)
        shown = [*line[::every], line[-1]]
        return f'<polyline class="{kind}" points="{" ".join(map(place, shown))}"/>'

    base = HEIGHT - BOTTOM
    return (
        f'<span class="faint">{_text(title)}</span><svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" '
        f'aria-label="{_text(title)}"><line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}"/>'
        f'<text x="{LEFT - 4}" y="14" text-anchor="end">{_short(high)}</text>'
        f'<text x="{LEFT - 4}" y="{base}" text-anchor="end">{_short(low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{left:g}</text>'
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 4}" text-anchor="end">{right:g}</text>'
        + "".join(drawn(kind, line) for kind, line in lines if line)
        + "</svg>"
    )


def _short(value: float) -> str:
    """A number of few characters."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def _mesh(run: dict[str, Any]) -> str:
    """The mesh, and what each device holds of some entries."""
    sizes = run["mesh"]["axes"]
    columns = int(list(sizes.values())[-1]) if sizes else 1

    def box(one: dict[str, Any]) -> str:
        return f"<div><b>device {int(one['device'])}</b><br>{'<br>'.join(map(_text, one['held']))}</div>"

    more = int(run["mesh"]["num_devices"]) - len(run["drawn"])
    note = f"<p>and {more} more devices</p>" if more > 0 else ""
    grid = f'<div class="mesh" style="grid-template-columns:repeat({columns},minmax(150px,1fr))">'
    axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
    boxes = "".join(map(box, run["drawn"]))
    return f'<h2>Mesh ({_text(axes)})</h2><div class="scroll">{grid}{boxes}</div></div>{note}'


def _memory(run: dict[str, Any]) -> str:
    rows = [(name, _size(size)) for name, size in run["memory"].items()]
    return "<h2>State on each device</h2>" + _table(("part", "bytes"), rows)


def _layers(run: dict[str, Any]) -> str:
    return "<h2>Layers</h2>" + "".join(f"<p>{_text(line)}</p>" for line in run["layers"])


def _compilations(records: list[dict[str, Any]]) -> str:
    if not records:
        return ""
    rows = [
        (f"{r['batch']:,}", f"{r['seconds']:.1f}", ", ".join(r["batch_shapes"]), "; ".join(r["loops"])) for r in records
    ]
    head = ("for batch", "seconds until the call returned", "batch", "loops: iterations")
    return "<h2>What was compiled, and when</h2>" + _table(head, rows)


def _entries(run: dict[str, Any]) -> str:
    rows = [(e["name"], str(tuple(e["shape"])), e["dtype"], e["spec"], _size(e["bytes"])) for e in run["entries"]]
    table = _table(("name", "shape", "dtype", "sharding", "bytes in all"), rows)
    return f"<h2>Entries</h2><details><summary>{len(rows)} parameters and buffers</summary>{table}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    names = "".join(f"<th>{_text(name)}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:g} B"
        num_bytes /= 1024
    return ""
