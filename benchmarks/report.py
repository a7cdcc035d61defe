"""The rows as a table on the terminal and as JSON, the points as pictures."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.rows import Point, Row

Found = dict[str, list[Row]]


def table(found: Found, title: str) -> Table:
    """All rows, section by section."""
    out = Table("", "ours", "rival", "ratio", "quartiles", "target", "ok", title=title)
    for section, rows in found.items():
        out.add_section()
        out.add_row(f"[bold]{section}[/bold]")
        for row in rows:
            out.add_row(row.name + (f" [dim]({row.note})[/dim]" if row.note else ""), *_cells(row))
    return out


def _cells(row: Row) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    quartiles = f"{row.quartiles[0]:.2f} to {row.quartiles[1]:.2f}" if row.quartiles else ""
    target = "" if row.target is None else f"{'≥' if row.at_least else '≤'} {row.target:g}"
    ok = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[row.ok]
    return row.ours, row.rival, ratio, quartiles, target, ok


def page(found: Found, introductions: dict[str, str], facts: dict[str, Any]) -> str:
    """The sections as Markdown, each behind its introduction."""
    parts = [f"{introductions[section].strip()}\n\n{_markdown(rows)}" for section, rows in found.items()]
    made = ", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str))
    return "\n\n".join(parts) + f"\n\nMade with {made}.\n"


def _markdown(rows: list[Row]) -> str:
    lines = ["| | ours | rival | ratio | target | |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        ours, rival, ratio, _, target, _ = _cells(row)
        reached = {None: "", True: "reached", False: "missed"}[row.ok]
        about = f"; {row.note}" if row.note else ""
        lines.append(f"| {row.name}{about} | {ours} | {rival} | {ratio} | {target} | {reached} |")
    return "\n".join(lines)


def write(found: Found, points: list[Point], facts: dict[str, Any], folder: Path) -> list[Path]:
    """Write `benchmarks.json` and a picture for each figure; give their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"section": s, **dataclasses.asdict(row), "ok": row.ok} for s, rows in found.items() for row in rows]
    path = folder / "benchmarks.json"
    path.write_text(json.dumps({**facts, "rows": rows, "points": [dataclasses.asdict(p) for p in points]}, indent=1))
    figures = itertools.groupby(sorted(points, key=lambda p: p.figure), lambda p: p.figure)
    return [path, *(_draw(list(own), folder / f"{figure}.png") for figure, own in figures)]


def _draw(points: list[Point], path: Path) -> Path:
    """One picture: a panel per quantity, a line per side, both axes logarithmic."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    panels = list(dict.fromkeys(p.panel for p in points))
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        own = [p for p in points if p.panel == panel]
        for line in dict.fromkeys(p.line for p in own):
            x, y = zip(*sorted((p.x, p.y) for p in own if p.line == line), strict=True)
            axes.plot(x, y, marker="o", label=line)
        ticks = sorted({p.x for p in own})
        axes.set(xscale="log", yscale="log", xlabel=own[0].x_label, ylabel=panel)
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    return path
