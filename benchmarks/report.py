"""The rows as a table on the terminal and as JSON, the points as pictures."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.rows import Point, Row
from docs.pages import Theme, beside, draw_bars, save_both, shown
from docs.pages import table as markdown_table

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


SHORT = 10  # rows that are read at a glance
PICTURE = "tpu"  # the section that has one
HEAD = ("", "ours", "rival", "ratio", "target", "")


@dataclasses.dataclass(frozen=True)
class Section:
    """How a section looks on a page.

    Attributes:
        introduction: What is said before its rows.
        markdown: Of its rows and the path of the page, where they are no ratios of ours and a rival's.
    """

    introduction: str
    markdown: Callable[[list[Row], Path], str] | None = None


def keep(path: Path, found: Found) -> Found:
    """Put rows among those of earlier runs, in the places of those of the same subjects; and all of them into the file.

    Args:
        path: Of a JSON file, which need not be there.
        found: Rows by section.

    Returns:
        All rows, in the order in which sections and subjects were first seen.
    """
    kept = json.loads(path.read_text()) if path.exists() else {}
    all_rows: Found = {section: [Row(**row) for row in rows] for section, rows in kept.items()}
    for section, rows in found.items():
        by_subject: dict[str, list[Row]] = {}
        for subject, own in itertools.groupby(all_rows.get(section, []), _subject):
            by_subject[subject] = list(own)
        by_subject |= {subject: list(own) for subject, own in itertools.groupby(rows, _subject)}
        all_rows[section] = [row for own in by_subject.values() for row in own]
    text = json.dumps({s: [dataclasses.asdict(row) for row in rows] for s, rows in all_rows.items()}, indent=1)
    path.write_text(text + "\n")
    return all_rows


def _subject(row: Row) -> str:
    return row.name.rpartition(": ")[0] or row.name


def page(found: Found, told: dict[str, Section], facts: dict[str, Any], path: Path) -> str:
    """The sections as Markdown, each behind its introduction; a long table is a short one, and a file beside the page.

    Args:
        found: Rows by section.
        told: How each looks.
        facts: What the numbers depend on.
        path: Of the page: pictures go into `images` beside it, tables into `tables`.
    """
    parts = []
    for section, rows in found.items():
        parts.append(told[section].introduction.strip())
        if (markdown := told[section].markdown) is not None:
            parts.append(markdown(rows, path))
        elif len(rows) > SHORT:
            parts += [by_subject(rows), beside(path, section, HEAD, lines_of(rows)) + "."]
        else:
            parts.append(markdown_table(HEAD, lines_of(rows)))
        if section == PICTURE:
            save_both(path.parent / "images" / section, (8, 4.2), partial(_draw_ratios, rows=rows))
            parts.insert(-2, shown(section, "Ratios of the table below as bars, with a line at 1"))
    made = ", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str))
    return "\n\n".join(part.rstrip() for part in parts) + f"\n\nMade with {made}.\n"


def _subjects(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Rows by what is compared, then by what is measured, which stands behind the last colon of their names."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        subject, _, measured = row.name.rpartition(": ")
        found.setdefault(subject, {})[measured] = row
    return found


def by_subject(rows: list[Row]) -> str:
    """Ratios alone, a column for each thing measured; bold where a target is missed."""
    subjects = _subjects(rows)
    columns = list(dict.fromkeys(measured for own in subjects.values() for measured in own))
    lines = [[subject, *(_ratio(own.get(column)) for column in columns)] for subject, own in subjects.items()]
    return markdown_table(["", *columns], lines)


def _ratio(row: Row | None) -> str:
    if row is None or row.ratio is None:
        return ""
    return f"**{row.ratio:.3g}**" if row.ok is False else f"{row.ratio:.3g}"


def _draw_ratios(figure: Figure, theme: Theme, rows: list[Row]) -> None:
    """Draw what is measured first of each subject."""
    firsts = {subject: next(iter(own.items())) for subject, own in _subjects(rows).items()}
    bars = [(subject, (row.ratio,)) for subject, (_, row) in firsts.items() if row.ratio is not None]
    axes = draw_bars(figure, theme, bars, ())
    axes.axvline(1.0, color=theme["text"], linestyle="--", linewidth=1)
    measured = next(iter(firsts.values()))[0]
    axes.set_xlabel(f"{measured}, ours ÷ rival: less is better", color=theme["text"])


def lines_of(rows: list[Row]) -> list[tuple[str, ...]]:
    """All cells of rows, for `HEAD`."""
    lines = []
    for row in rows:
        ours, rival, ratio, _, target, _ = _cells(row)
        reached = {None: "", True: "reached", False: "missed"}[row.ok]
        about = f"; {row.note}" if row.note else ""
        lines.append((f"{row.name}{about}", ours, rival, ratio, target, reached))
    return lines


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
