"""Modules' names in compiled programs and in profiles: forward, backward, computed again, in loops and out of them."""

import collections
import pathlib
import re
from typing import Any

import jax
import pytest
import torch
from jax.profiler import ProfileData
from torch import nn

import torch_shard as ts
from tests.oracles.steps import sgd_step

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + self.mlp(self.up(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_step(**options: Any) -> ts.TrainStep:
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    return sgd_step(Stack(), loss_fn, (4, 2), **options)


def labels_of(step: ts.TrainStep) -> list[str]:
    text = step.lower(step.structs, torch.empty(8, WIDTH)).compile().as_text() or ""
    return [
        re.sub(r"while/body/(closed_call/)?", "", label) for label in re.findall(r'op_name="jit\(\w+\)/([^"]*)"', text)
    ]


PRODUCTS = {
    False: ["first/{}", "blocks.0/up/{}", "blocks.2/mlp.0/{}", "head/{}"],
    True: ["first/{}", "blocks.*/up/{}", "blocks.*/mlp.0/{}", "head/{}"],
}


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("remat", ["none", "block"])
def test_products_are_named_by_their_modules(scan_layers: bool, remat: str) -> None:
    found = labels_of(make_step(scan_layers=scan_layers, remat=remat))
    if not scan_layers and remat == "none":  # no layer is a region of its own
        found = [re.sub(r"blocks\.(\d)\.", r"blocks.\1/", label) for label in found]
    products = {label for label in found if label.endswith("dot_general")}
    for path in PRODUCTS[scan_layers]:
        forward, backward = path.format(""), re.escape(path.split("/{}")[0])
        # XLA may make one of what is computed twice
        assert any(label.removeprefix("backward/").startswith(forward) for label in products), (forward, products)
        assert any(
            re.match(rf"backward/(.*/)?{backward}/|backward/{backward.replace('/', '/backward/')}", p) for p in products
        ), backward
    assert any(label.startswith("optimizer/") for label in found)


def test_a_profile_reads_by_module(tmp_path: pathlib.Path) -> None:
    step, batch = make_step(), torch.ones(8, WIDTH)
    state, _ = step(step.init(seed=0), batch)
    with jax.profiler.trace(str(tmp_path)):
        state, metrics = step(state, batch)
        metrics["loss"].block_until_ready()
    (path,) = tmp_path.rglob("*.xplane.pb")
    ran = collections.Counter(
        dict(event.stats).get("hlo_op")
        for plane in ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    )
    text = step.programs[0].compiled.as_text() or ""
    labels = {name: label for name, label in re.findall(r'%([\w.\-]+) = .*op_name="([^"]*)"', text) if name in ran}
    for part in ("blocks.*/up", "backward", "first", "optimizer"):
        assert any(part in label for label in labels.values()), part
