"""The repeated layers of a model over the stages of a mesh, against the same step without them and eager torch."""

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles import steps

WORDS = 16


class Block(nn.Module):
    """A layer that adds to what it is given."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Add what it makes of it."""
        found = self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return x + (found if scale is None else found * scale)


class Tower(nn.Module):
    """Embeddings, layers and a head that is tied to the embeddings."""

    def __init__(self, layers: int = 8, width: int = 8, *, dropout: float = 0.0, words: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Logits."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(x)


def loss_fn(model: nn.Module, batch: Any) -> Any:
    """Cross-entropy of tokens."""
    logits = model(batch["ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), {"logits": logits}


def batch_of(rows: int = 16) -> dict[str, torch.Tensor]:
    """Tokens and their successors."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, WORDS, (rows, 4), generator=generator) for name in ("ids", "labels")}


def step_of(model: nn.Module, plan: ts.ShardingPlan, num: int, loss: Any = loss_fn, **options: Any) -> Any:
    """A step on a mesh of two rows and four stages."""
    mesh = options.pop("mesh", None) or ts.make_mesh(batch=2, stage=4)
    optimizer = options.pop("optimizer", None) or optax.adamw(1e-2)
    return steps.step_of(model, loss, optimizer, mesh=mesh, plan=plan, accumulate_steps=num, **options)


def staged(**how: Any) -> ts.ShardingPlan:
    """Everything on each device of a stage."""
    return ts.plans.pipeline(ts.plans.replicated(), **how)


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    """Sums in another order then differ by 1e-15."""
    torch.manual_seed(0)
    with jax.enable_x64(True):
        yield


SCHEDULES = {
    "1F1B of one microbatch": (1, {}),
    "GPipe": (8, {"schedule": "gpipe"}),
}  # of eight microbatches, 1F1B and circular ones are below, with more


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_numbers_of_eager_torch(name: str) -> None:
    num, how = SCHEDULES[name]
    step = step_of(Tower(dropout=0.2).double(), staged(**how), num)
    step.prove(step.init(seed=0), batch_of()).raise_if_different()


def test_a_run_is_that_of_the_same_step_without_stages_and_goes_on_there() -> None:
    model, mesh = Tower(dropout=0.2).double(), ts.make_mesh(jax.devices()[:2], batch=2)
    alone = copy.deepcopy(model)
    steps = step_of(model, staged(repeats=2), 8), step_of(alone, ts.plans.replicated(), 8, mesh=mesh)
    runs = []
    for step in steps:
        state, metrics = step.init(seed=0), dict[str, Any]()
        for _ in range(3):
            state, metrics = step(state, batch_of())
        runs.append((metrics, state, step.evaluation()(state, batch_of())["loss"]))
    (metrics, state, loss), (others, other, other_loss) = runs
    assert np.allclose(metrics["logits"], others["logits"], rtol=1e-12)  # dropout drew the same numbers
    assert float(loss) == pytest.approx(float(other_loss), rel=1e-12)
    close = {"rtol": 1e-9, "atol": 1e-12}  # Adam divides by small numbers
    params = {name: np.asarray(value) for name, value in state.params.items()}
    assert all(np.allclose(value, params[name], **close) for name, value in other.params.items())
    back, moved = (step(dataclasses.replace(step.init(seed=0), params=params), batch_of())[0] for step in steps)
    assert all(np.allclose(value, back.params[name], **close) for name, value in moved.params.items())
    exported = steps[0].export(back).state_dict()
    assert np.allclose(exported["layers.5.up.weight"], back.params["layers.5.up.weight"])


def test_each_stage_has_the_layers_of_its_own() -> None:
    for how, first in (({}, [0, 1]), ({"repeats": 2}, [0, 4])):
        state = step_of(Tower().double(), staged(**how), 8).init(seed=0)
        (stack,) = (
            (group, array)
            for group, array in zip(state.params.layout.groups, state.params.arrays, strict=True)
            if group[0] == "layers.0.up.weight"
        )
        group, array = stack
        shards = {s.data.shape for s in array.addressable_shards}
        assert shards == {(2, 16, 8)}  # of eight layers
        assert list(group[:2]) == [f"layers.{number}.up.weight" for number in first]
        assert {s.index[0].start or 0 for s in state.opt_state[0].mu.arrays[1].addressable_shards} == {0, 2, 4, 6}


@pytest.mark.parametrize("kind", ["fsdp_tp", "context"])
def test_it_goes_with_other_parallelisms(kind: str) -> None:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=64, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).double()
    second = {"fsdp_tp": "model", "context": "context"}[kind]
    mesh = ts.make_mesh(**{second: 2, "batch": 2, "stage": 2})
    plan = ts.plans.fsdp_tp(model, mesh, **({"tp": None, "context": "context"} if kind == "context" else {}))

    def loss_of(model: nn.Module, batch: Any) -> Any:
        found = model(**batch)
        return found.loss, {"logits": found.logits}

    tokens = torch.randint(1, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    step = step_of(model, ts.plans.pipeline(plan), 4, loss_of, mesh=mesh)
    compared = step.prove(step.init(seed=0), {"input_ids": tokens, "labels": tokens})
    assert max(row.worst for row in compared.rows) < 1e-5  # the norms of transformers compute in float32


def test_values_of_the_batch_go_along_with_their_microbatch() -> None:
    def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch["ids"], batch["scale"][:, None, None] * 2)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    batch = batch_of() | {"scale": torch.linspace(0.1, 2, 16, dtype=torch.float64)}
    step = step_of(Tower().double(), staged(repeats=2), 8, scaled)
    step.prove(step.init(seed=0), batch).raise_if_different()


def test_a_loss_of_what_layers_return_beside_and_of_parameters() -> None:
    class Beside(Block):
        def forward(self, x: torch.Tensor, scale: Any = None) -> Any:
            x = super().forward(x)
            return x, self.up(x).mean(-1)

    class Outputs(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Beside(8) for _ in range(8))

        def forward(self, ids: torch.Tensor, scale: Any = None) -> Any:
            x, found = self.embed(ids), []
            for layer in self.layers:
                x, beside = layer(x)
                found.append(beside)
            return self.head(x), found

    def deep(model: nn.Module, batch: Any) -> Any:
        logits, found = model(batch["ids"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        decay = sum(layer.up.weight.square().sum() for layer in model.layers)
        return loss + 0.1 * sum((x.square() + x.clone()).mean() for x in found) + 1e-3 * decay, {"third": found[2]}

    step = step_of(Outputs().double(), staged(), 8, deep)
    step.prove(step.init(seed=0), batch_of()).raise_if_different()


def test_the_schedule_in_the_program() -> None:
    step = step_of(Tower().double(), staged(), 8, remat="dots")
    step(step.init(seed=0), batch_of())
    assert "1F1B: 27% of the time is idle" in step.report()  # three of eleven ticks
    assert "collective-permute" not in step.programs[0].collectives  # which XLA:CPU runs beside others, and hangs


WORDS_OF_MANY, TOKENS, WIDE = 2048, 128, 64


def temporaries(num: int, **how: Any) -> int:
    """Bytes of a device, with one row in each of so many microbatches; the loss alone is returned."""
    mesh = ts.make_mesh(jax.devices()[:4], batch=1, stage=4)
    model = Tower(width=WIDE, words=WORDS_OF_MANY)
    step = step_of(model, staged(**how), num, lambda m, b: loss_fn(m, b)[0], mesh=mesh)
    step(step.init(seed=0), {name: tensor[:, :1].expand(num, TOKENS) for name, tensor in batch_of(1).items()})
    return step.programs[0].memory.temporaries


def test_only_so_many_microbatches_are_kept() -> None:
    """1F1B keeps what `2 P - 1` microbatches need, GPipe what all of them do: `M + P - 1` ticks.

    And neither the gradient of a tied matrix nor that of logits, which are twice as large, is kept for each.
    """
    few, many, all_kept = temporaries(8), temporaries(32), temporaries(32, schedule="gpipe")
    matrix, activations = 4 * WORDS_OF_MANY * WIDE, 4 * TOKENS * WIDE
    assert many - few < 24 * 3 * activations < 24 * matrix / 4  # what enters and leaves the layers
    assert many - few < 0.25 * (all_kept - many)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "axis": (
        lambda: step_of(Tower(), staged(stage="pipe"), 8),
        'pipeline: the mesh (batch=2, stage=4) has no axis "pipe"',
    ),
    "layers": (lambda: step_of(Tower(6), staged(), 8), "the 6 layers of layers are not a multiple of 4 = stage=4"),
    "repeats": (lambda: step_of(Tower(), staged(repeats=3), 8), "not a multiple of 12 = stage=4 * repeats=3"),
    "no layers": (lambda: step_of(nn.Linear(4, 4), staged(), 8), "a pipeline needs repeated layers, and Linear has no"),
    "spec": (
        lambda: step_of(Tower(), staged() | {"layers.*.up.weight": P("stage")}, 8),
        "layers.0.up.weight is split over 'stage', which is the axis of the pipeline",
    ),
    "rows": (
        lambda: step_of(Tower(), staged(), 8, batch_spec=P(("batch", "stage"))),
        "batch_spec splits the batch over 'stage', which is the axis of the pipeline",
    ),
    "activations": (
        lambda: step_of(Tower(), dataclasses.replace(staged(), activations={"layers.*.up": P("stage")}), 8),
        "activations: layers.0.up is split over 'stage', which is the axis of the pipeline",
    ),
    "schedule": (lambda: staged(schedule="zb"), 'plans.pipeline: schedule must be one of "1f1b", "gpipe", got \'zb\''),
    "both": (lambda: staged(schedule="1f1b", repeats=2), 'schedule="1f1b" is for repeats=1, got repeats=2'),
    "scan_layers": (lambda: step_of(Tower(), staged(), 8, scan_layers=False), "scan_layers=False"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_traced(name: str) -> None:
    make, words = BAD[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_too_few_microbatches_for_the_rounds_are_refused() -> None:
    step = step_of(Tower().double(), staged(repeats=2), 2)
    with pytest.raises(ValueError, match="a pipeline with repeats=2 needs as many microbatches as stages"):
        step(step.init(seed=0), batch_of())


def test_layers_that_do_not_follow_each_other_are_refused() -> None:
    class Apart(Tower):
        def forward(self, ids: torch.Tensor, scale: Any = None) -> torch.Tensor:
            x = self.embed(ids)
            return self.head(sum(layer(x) for layer in self.layers))

    step = step_of(Apart().double(), staged(), 8)
    with pytest.raises(ValueError, match=r"layers\.0 to layers\.7 cannot be the stages"):
        step(step.init(seed=0), batch_of())


@pytest.mark.parametrize("where", ["in the layers", "behind them"])
def test_buffers_that_forward_writes_are_refused(where: str) -> None:
    class Counting(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.stats = inner, nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor, *scale: Any) -> torch.Tensor:
            return self.stats(self.inner(x))

    model: Any = Tower()
    if where == "in the layers":
        model.layers = nn.ModuleList(map(Counting, model.layers))
    else:
        model = Counting(model)
    step = step_of(model.double(), staged(), 8)
    with pytest.raises(NotImplementedError, match=r"forward writes .*stats.running_mean, .*nn.LayerNorm for"):
        step(step.init(seed=0), batch_of())
