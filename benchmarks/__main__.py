"""`python -m benchmarks [--quick] [--only step,compile] [--models vit,clip] [--kept JSON] [--page MD] [--out DIR]`."""

import dataclasses
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.processes import Failed, isolated
from benchmarks.report import Section, keep, page, table, write
from benchmarks.rows import Point, Row
from docs.pages import put

SECTIONS = {  # and the simulated devices of each
    "step": 8,
    "distributed": 2,
    "compile": 1,
    "memory": 8,
    "communication": 8,
    "paper": 1,
    "dispatch": 1,
    "generation": 1,
    "gpu": 1,
    "published": 1,
    "tpu": 1,
    "tpu_held_out": 1,
    "tpu_models": 1,
    "tpu_options": 1,
    "tpu_pipeline": 1,
    "scale": 1,
    "tuning": 1,
    "regret": 1,
    "ops": 8,
    "offload": 1,
    "checkpoints": 8,
    "state": 8,
    "precision": 1,
}
BY_MODEL = ("published", "tpu", "tpu_held_out", "tpu_models", "tpu_options", "scale", "regret")
"""Sections of which some models may be chosen."""


def run_section(name: str, quick: bool, names: list[str]) -> list[dict[str, Any]]:
    """Run one section, in the present process; print each row as it is found."""
    found, module = [], importlib.import_module(f"benchmarks.{name}")
    for entry in _until_error(module.rows(quick, names) if names else module.rows(quick)):
        found.append({type(entry).__name__: dataclasses.asdict(entry)})
        if isinstance(entry, Row):
            ratio = "not measured" if entry.ratio is None else f"{entry.ratio:.3g}"
            print(f"  {entry.name}: {ratio}", flush=True)
    return found


def _until_error(entries: Iterator[Row | Point]) -> Iterator[Row | Point]:
    """The entries; an error ends the section, and is a row of its own: what was found before is kept."""
    try:
        yield from entries
    except Exception as error:
        traceback.print_exc()
        yield Row("the rest", note=f"failed: {type(error).__name__}: {str(error)[:200]}")


def _entries(found: list[dict[str, Any]]) -> Iterator[Row | Point]:
    for entry in found:
        ((kind, fields),) = entry.items()
        yield {"Row": Row, "Point": Point}[kind](**fields)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, few repetitions: does it run?")] = False,
    only: Annotated[str, typer.Option(help=f"Sections, by comma: {', '.join(SECTIONS)}.")] = "",
    out: Annotated[Path, typer.Option(help="Where the JSON and the pictures go.")] = Path("benchmarks-out"),
    to_page: Annotated[
        Path | None, typer.Option("--page", help="A page in Markdown, whose section `tpu` becomes the tables.")
    ] = None,
    models: Annotated[str, typer.Option(help=f"Models of {', '.join(BY_MODEL)}, by comma; all, if none is said.")] = "",
    kept: Annotated[
        Path | None, typer.Option(help="Rows of earlier runs, as JSON: what is measured now is put among them.")
    ] = None,
) -> None:
    """Compare torch_shard with its rivals, as ratios of two programs run in turn."""
    chosen = only.split(",") if only else [] if kept is not None else list(SECTIONS)
    if unknown := set(chosen) - set(SECTIONS):
        raise typer.BadParameter(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if models and (others := set(chosen) - set(BY_MODEL)):
        raise typer.BadParameter(f"--models is for {', '.join(BY_MODEL)}, not for {', '.join(sorted(others))}")
    console = Console(width=None if sys.stdout.isatty() else 170)
    rows: dict[str, list[Row]] = {}
    points: list[Point] = []
    took: dict[str, float] = {}
    for section in chosen:
        console.print(f"[bold]{section}[/bold]")
        start = time.perf_counter()
        try:
            devices, where = SECTIONS[section], "" if section == "gpu" else "cpu"
            found = isolated(
                "benchmarks.__main__:run_section",
                num_devices=devices,
                platform=where,
                name=section,
                quick=quick,
                names=models.split(",") if models else [],
            )
            entries = list(_entries(found))
        except Failed as error:  # the other sections are still worth having
            entries = [Row(section, note=f"failed: {str(error)[-300:]}")]
        took[section] = round(time.perf_counter() - start, 1)
        own = [e for e in entries if isinstance(e, Row)]
        rows[section] = [dataclasses.replace(row, target=None) for row in own] if quick else own
        points += [e for e in entries if isinstance(e, Point)]
    console.print(
        table(rows, "ours ÷ rival, paired, median; less is better" + (" (quick: sizes mean nothing)" * quick))
    )
    facts = {"quick": quick, "seconds": took, **_machine()}
    console.print(json.dumps(facts))
    shown = rows if kept is None else keep(kept, rows)
    if to_page is not None:
        shown = {section: shown[section] for section in SECTIONS if section in shown}
        told = {section: _said_of(section) for section in shown}
        put(to_page, "tpu", page(shown, told, facts, to_page))
    for path in write(rows, points, facts, out):
        console.print(str(path))


def _said_of(section: str) -> Section:
    """What a page says before the table of a section, and how that looks."""
    module = importlib.import_module(f"benchmarks.{section}")
    return Section(getattr(module, "PAGE", f"## {section}"), getattr(module, "markdown", None))


def _machine() -> dict[str, Any]:
    """What the numbers depend on."""
    import importlib.metadata as metadata

    names = ("torch", "torchax", "jax", "optax", "flax", "transformers", "libtpu")
    installed = {found.metadata["Name"] for found in metadata.distributions()}
    versions = {name: metadata.version(name) for name in names if name in installed}
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version(), **versions}


if __name__ == "__main__":
    typer.run(main)
