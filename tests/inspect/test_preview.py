"""What a step would take, before anything runs: against JAX's own shard shapes and compiler, and counts by hand."""

import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from typer.testing import CliRunner

import torch_shard as ts
from tests.oracles.errors import said
from tests.tables.cases import make_mesh
from torch_shard._cost.total import costs_of
from torch_shard._demo import GPT, loss_fn
from torch_shard._inspect import find_step
from torch_shard.cli import app

WIDTH, LENGTH, WORDS = 32, 16, 64

RULES = {
    **{f"blocks.*.{name}.weight": P("model", "batch") for name in "qkv"},
    "blocks.*.o.weight": P("batch", "model"),
    "blocks.*.up.weight": P("model", "batch"),
    "blocks.*.down.weight": P("batch", "model"),
    "tokens.weight": P("model", "batch"),
}


def build() -> nn.Module:
    return GPT(WORDS, LENGTH, WIDTH, num_layers=3, num_heads=4)


def shapes(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.empty(rows, LENGTH, dtype=torch.int64, device="meta")
    return tokens, tokens


def make_step(rules: dict[str, P] = RULES, model: nn.Module | None = None, **options: Any) -> ts.TrainStep:
    plan = ts.ShardingPlan(rules, default=P())
    if model is None:
        with torch.device("meta"):
            model = build()
    return ts.make_train_step(model, loss_fn, optax.adam(1e-3), mesh=make_mesh((4, 2)), plan=plan, **options)


@pytest.fixture(scope="module")
def step() -> ts.TrainStep:
    return make_step()


@pytest.fixture(scope="module")
def preview(step: ts.TrainStep) -> ts.Preview:
    return step.preview(shapes())


def bytes_of(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def test_memory_is_that_of_the_state_on_its_shards_and_what_xla_says(step: ts.TrainStep, preview: ts.Preview) -> None:
    structs, memory = step.structs, preview.memory
    assert memory.parameters == bytes_of(structs.params)
    assert memory.moments == bytes_of(structs.opt_state)
    assert preview.compiled is not None
    found = preview.compiled.memory_analysis()
    assert memory.saved + memory.temporaries == found.temp_size_in_bytes
    assert memory.saved > 0
    whole = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    assert memory.peak == whole - found.alias_size_in_bytes
    assert preview.fits(memory.peak)
    assert not preview.fits(memory.peak - 1)
    with pytest.raises(ValueError, match=r"fits: the memory of these devices is not known\. Give it"):
        preview.fits()


def test_collectives_are_those_of_the_program_and_known_by_module(step: ts.TrainStep, preview: ts.Preview) -> None:
    assert preview.compiled is not None
    once = len(re.findall(r"= \S+ all-gather(?:-start)?\(", preview.compiled.as_text() or ""))
    assert preview.collectives["all-gather"] > once  # those in loops count each time
    assert preview.attributed >= 0.95
    paths = {module.path for module in preview.modules}
    assert {"blocks.*.q", "blocks.*.down", "blocks.*.ln_1", "(optimizer)", "tokens"} <= paths
    assert not any(path.startswith("blocks.0") for path in paths)  # the layers are one loop
    assert [len(loop.layers) for loop in step.programs[0].loops] == [3, 3]


def test_collectives_by_hand_are_counted_one_by_one() -> None:
    """XLA gives those of a `shard_map` one channel."""

    def twice(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jax.lax.all_gather(x, "batch", tiled=True)[:8] + 1, "batch", tiled=True)

    fn = jax.jit(jax.shard_map(twice, mesh=make_mesh((8, 1)), in_specs=P("batch"), out_specs=P(), check_vma=False))
    costs = costs_of(fn.lower(jax.ShapeDtypeStruct((64, 4), "float32")).compile().as_text() or "")
    assert [cost.received_bytes for cost in costs if cost.collective] == [7 * 8 * 4 * 4] * 2


def test_flops_of_products_are_those_of_the_textbook(preview: ts.Preview) -> None:
    """Forward once, backward twice: for each device its share of the products with weights."""
    tokens = 8 * LENGTH / 8  # rows over 4, heads and hidden dims over 2
    wanted = {"q": WIDTH * WIDTH, "up": WIDTH * 4 * WIDTH, "down": WIDTH * 4 * WIDTH}
    by_path = {module.path: module.flops for module in preview.modules}
    for name, size in wanted.items():
        assert by_path[f"blocks.*.{name}"] == 3 * 3 * 2 * tokens * size


def test_a_budget_names_what_is_above_it(preview: ts.Preview) -> None:
    whole = preview
    received, gathers = whole.collective_bytes, whole.collectives["all-gather"]
    whole.assert_at_most(memory=whole.memory.peak, collective_bytes=received, all_gathers=gathers)
    # the rule of one projection is forgotten: `blocks.1.o` lies whole on each device, and its gradient is summed whole
    forgotten = {f"blocks.{i}.o.weight": RULES["blocks.*.o.weight"] for i in (0, 2)}
    rules = {name: spec for name, spec in RULES.items() if name != "blocks.*.o.weight"} | forgotten
    worse = make_step(rules).preview(shapes())
    with pytest.raises(
        AssertionError, match=r"(?s)bytes of memory, at most .* allowed.*Not split.*blocks\.1\.o\.weight"
    ):
        worse.assert_at_most(memory=whole.memory.peak)
    with pytest.raises(AssertionError, match=r"all-gathers, at most 0 allowed\. Most of it: .*blocks\.\*\.q 6"):
        whole.assert_at_most(all_gathers=0)
    assert worse.replicated[0][0] in ("positions.weight", "blocks.1.o.weight")


def test_printed_it_is_tables(preview: ts.Preview) -> None:
    text = str(preview)
    for part in ("parameters", "moments", "saved", "peak", "all-gather", "blocks.*.down", "The largest values"):
        assert part in text


def test_shapes_alone_are_lowered_to_the_program_that_runs() -> None:
    tokens = torch.zeros(8, LENGTH, dtype=torch.int64)
    structs = jax.ShapeDtypeStruct(tokens.shape, "int32")
    torch.manual_seed(0)
    step = make_step(model=build())
    state = step.init(seed=0)
    ran = step.lower(state, (tokens, tokens)).as_text()
    for given in (shapes(), (structs, structs), (tokens, tokens)):
        assert step.lower(step.structs, given).as_text() == ran


def test_evaluation_is_previewed_without_moments(preview: ts.Preview) -> None:
    found = make_step().evaluation().preview(shapes())
    assert found.memory.moments == 0
    assert found.memory.parameters == preview.memory.parameters
    assert found.memory.peak < preview.memory.peak


def test_states_of_shapes_do_not_run(step: ts.TrainStep) -> None:
    with pytest.raises(
        TypeError, match=r"the state has shapes and no values, which step\.lower and step\.preview take"
    ):
        step(step.structs, 2 * (torch.zeros(8, LENGTH, dtype=torch.int64),))


FILE = """
import optax, torch
from jax.sharding import PartitionSpec as P
import torch_shard as ts
model = torch.nn.Linear(8, 4)
loss_fn = lambda model, batch: model(batch).square().mean()
batch, plan, optimizer = torch.empty(8, 8, device="meta"), ts.ShardingPlan({}, default=P()), optax.sgd(0.1)
"""
FUNCTION = f"""
{FILE}
def made(mesh):
    return ts.make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=plan), batch
"""


def test_the_command_previews_files_and_functions(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(FILE)
    (tmp_path / "made_up_steps.py").write_text(FUNCTION)
    (tmp_path / "lacks.py").write_text("model = 1")
    monkeypatch.chdir(tmp_path)
    for target in ("train.py", "made_up_steps:made"):
        found = CliRunner().invoke(app, ["preview", target, "--mesh", "batch=4"])
        assert found.exit_code == 0, found.output
        assert "all-reduce" in found.output
    wrong = {
        "lacks.py": "defines no loss_fn, batch, plan, optimizer",
        "none.py": "there is no file none.py",
        "made_up_steps:other": "has no function other",
        "not_there:made": "there is no module not_there",
        "llama-9": "nor an example",
    }
    for target, message in wrong.items():
        found = CliRunner().invoke(app, ["preview", target, "--mesh", "batch=4"])
        assert found.exit_code == 2
        assert message in said(found)
    assert CliRunner().invoke(app, ["preview", "train.py", "--mesh", "batch"]).exit_code == 2
    assert "there is no topology" in CliRunner().invoke(app, ["preview", "train.py", "--topology", "v9:2x2"]).output


SCRIPT = """
import argparse, helper, torch
import torch_shard as ts

rate = argparse.ArgumentParser()
rate.add_argument("--rate", type=float, default=0.1)
model, batch = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)), torch.empty(16, 64, device="meta")
mesh, plan = ts.make_mesh(batch=4, model=2), ts.plans.fsdp_tp
optimizer = torch.optim.SGD(model.parameters(), rate.parse_args().rate)
loss_fn = helper.loss_fn
step = ts.make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=plan, accumulate_steps=2)
if __name__ == "__main__":
    raise AssertionError("it trains")
"""


def write_script(folder: Path) -> str:
    (folder / "helper.py").write_text("def loss_fn(model, batch): return model(batch).square().mean()")
    (folder / "train.py").write_text(SCRIPT)
    return str(folder / "train.py")


def test_a_training_script_is_previewed_with_its_own_step(tmp_path: Path) -> None:
    step, batch = find_step(write_script(tmp_path), lambda of_file: of_file or pytest.fail("it has a mesh"))
    assert dict(step.mesh.shape) == {"batch": 4, "model": 2}
    assert step.options.accumulate_steps == 2
    assert tuple(batch.shape) == (16, 64)


def test_a_script_whose_plan_is_a_function_is_previewed_on_any_mesh(tmp_path: Path) -> None:
    mesh = ts.make_mesh(batch=2, model=4)
    step, _ = find_step(write_script(tmp_path), lambda of_file: mesh, "dots")
    wanted = ts.plans.fsdp_tp(step.model, mesh).resolve(step.model, mesh)
    assert {name: each.spec for name, each in step.plan.items()} == {name: each.spec for name, each in wanted.items()}
    assert (step.options.accumulate_steps, step.options.remat) == (2, "dots")


def test_a_script_makes_its_mesh_on_the_topology_and_says_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path)
    monkeypatch.chdir(tmp_path)
    script = "train.py"  # a long path would be broken into lines
    for arguments in ([], ["--mesh", "batch=2,model=1"]):
        found = CliRunner().invoke(app, ["preview", script, "--topology", "v9:2x2", *arguments])
        assert found.exit_code == 2  # 1 says that a program does not fit
        assert "train.py fails in line 8: ValueError: make_mesh: there is no topology 'v9:2x2'" in said(found)
    Path(script).write_text("1 / 0")
    found = CliRunner().invoke(app, ["preview", script])
    assert found.exit_code == 2
    assert "train.py fails in line 1: ZeroDivisionError" in said(found)


@pytest.mark.slow
def test_the_script_of_the_readme_is_previewed(tmp_path: Path) -> None:
    """With its loop for training alone, in a process of its own, where it says how many devices JAX shows."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    script = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)[0]
    definitions, training = script.split("\nfor _")
    line = re.search(r"^ +(batch = .*)$", training, re.MULTILINE)
    assert line is not None
    loop = textwrap.indent(f"for _{training}", "    ")
    (tmp_path / "train.py").write_text(f'{definitions}\n{line[1]}\nif __name__ == "__main__":\n{loop}')
    command = [sys.executable, "-m", "torch_shard", "preview", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "all-gather" in done.stdout
    assert not (tmp_path / "model.pt").exists()
