"""Random programs as data: what a seed draws, and the model, loss, batches, plan and step that it stands for."""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optax
import torch
import torch.nn.functional as F
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.experts import any_grouped_mm
from torch_shard._common.specs import axes_of
from validation.fuzz.blocks import BLOCKS, FUNCTIONS, Apply, adapt
from validation.fuzz.specs import Sizes, draw_mesh, draw_spec

ROWS, VOCABULARY = 16, 16

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.5, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.1, eps=0.1),  # so large that gradients that are rounding stay it
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)),
    "lion-like": lambda: optax.chain(optax.scale_by_rss(initial_accumulator_value=1.0), optax.scale(-0.1)),
    "lamb": lambda: optax.chain(optax.scale_by_adam(eps=0.1), optax.scale_by_trust_ratio(0.1), optax.scale(-0.1)),
    "factored": lambda: optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=4, epsilon=0.1), optax.scale(-0.1)
    ),
}

RECIPES = ["fsdp", "tp", "fsdp_tp", "sequence", "padded", "hsdp", "expert", "zero-1", "context"]
ROUTED = ["routed experts", "repeated experts", "stages of experts"]
"""Kinds of blocks with experts that tokens may be sent to."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One program. Its parts are drawn one by one, so that any of them can be left out.

    Attributes:
        seed: Of values.
        kind: Of the batch: "vectors", "sequences", "images", "tokens" or "bags".
        blocks: By name in the model: the kind and a number from which the rest is drawn.
        mesh: Sizes by axis, in order.
        rules: Specs by name of entry.
        activations: Specs by module.
        stored: Forms by name of entry.
        recipe: Makes the plan, which the rules then edit.
        batch_spec: Of the batch; None for the step's own.
        options: Of the step, as `make_train_step` takes them, and some of the comparison's own; "dispatch": tokens are
            sent to experts over axes of the batch, however small these are.
        pipeline: Over which axis repeated layers are stages, and how.
    """

    seed: int
    kind: str
    blocks: Mapping[str, tuple[str, int]]
    mesh: Sizes
    rules: Mapping[str, P] = dataclasses.field(default_factory=dict)
    activations: Mapping[str, P] = dataclasses.field(default_factory=dict)
    stored: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recipe: str | None = None
    batch_spec: P | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pipeline: ts.Pipeline | None = None

    def option(self, name: str, default: Any = None) -> Any:
        """An option, or its default."""
        return self.options.get(name, default)

    def make_model(self) -> nn.Module:
        """The model, of values that the seed gives."""
        torch.manual_seed(self.seed)
        return Program(self).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and of the batch."""
        if self.option("dtype") is not None:
            return self.option("dtype")
        return torch.float64 if self.option("compute_dtype") is None else torch.float32

    @property
    def is_exact(self) -> bool:
        """Whether it computes in float64, and not in bfloat16."""
        return self.dtype == torch.float64

    def make_batch(self, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and numbers that the loss weighs results by."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64).to(self.dtype)

        inputs = {
            "vectors": lambda: normal(16),
            "sequences": lambda: normal(8, 8),
            "images": lambda: normal(8, 8, 4),
            "tokens": lambda: torch.randint(0, VOCABULARY, (ROWS, 8), generator=generator),
            "bags": lambda: torch.randint(0, VOCABULARY, (ROWS, 5), generator=generator),
        }
        return inputs[self.kind](), normal()

    def make_mesh(self) -> Mesh:
        """The mesh of all axes."""
        return ts.make_mesh(**dict(self.mesh))

    def make_plans(self, model: nn.Module, mesh: Mesh) -> dict[str, Any]:
        """The plan and what goes with it, as `make_train_step` takes them."""
        axes, given = dict(self.mesh), {}
        other, third, *_ = *(axis for axis in axes if axis != "batch"), None, None
        other = other or "batch"
        mode: Any = ("gather", "ring", "heads")[self.seed % 3]
        made = {
            None: lambda: ts.ShardingPlan({}, default=P()),
            "fsdp": lambda: ts.plans.fsdp(model, mesh),
            "tp": lambda: ts.plans.tp(model, mesh, tp=other),
            "fsdp_tp": lambda: ts.plans.fsdp_tp(model, mesh, tp=other),
            "sequence": lambda: ts.plans.fsdp_tp(model, mesh, tp=other, sequence=True),
            "padded": lambda: ts.plans.tp(model, mesh, tp=other, pad_vocab=True),
            "hsdp": lambda: ts.plans.hsdp(model, mesh, replicate=other),
            "expert": lambda: ts.plans.expert(model, mesh, ep=(other, "batch", ("batch", other))[self.seed % 3]),
            "zero-1": ts.plans.replicated,
            "context": lambda: ts.plans.fsdp_tp(model, mesh, tp=third, context=other, context_mode=mode),
        }
        plan = made[self.recipe]()
        if self.rules or self.activations or self.stored:
            plan |= ts.ShardingPlan(dict(self.rules), activations=dict(self.activations), stored=dict(self.stored))
        if self.pipeline is not None:
            plan = dataclasses.replace(plan, pipeline=self.pipeline)
        if self.recipe == "zero-1":
            given["optimizer_plan"] = ts.plans.fsdp(model, mesh)
        return {"plan": plan, "batch_spec": self.batch_spec, **given}

    def make_step(self, model: nn.Module) -> ts.TrainStep:
        """The step that is on trial."""
        mesh = self.make_mesh()
        own = ("optimizer", "guard", "evaluate", "loss", "dtype", "twice", "bare", "map", "dispatch")
        options = {name: value for name, value in self.options.items() if name not in own}
        optimizer = OPTIMIZERS[self.option("optimizer", "sgd")]()
        return ts.make_train_step(model, self.loss, optimizer, mesh=mesh, **self.make_plans(model, mesh), **options)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """A loss of each kind, the mean over rows."""
        x, weights = batch
        out = model(x)
        if self.option("twice"):  # a shared encoder, as DINO and SimCLR have it
            out = out + model(x.roll(1, -1))
        out = out.flatten(1).float() if out.dtype == torch.bfloat16 else out.flatten(1)
        kind = self.option("loss", "squares")
        if kind == "entropy":
            label = (weights > 0).long() + 2 * (weights > 0.7).long()
            return F.cross_entropy(out[:, :8], label), {"right": (out[:, :8].argmax(1) == label).sum()}
        if kind == "weighted":
            return (out.tanh().sum(1) * weights).mean()
        return out.square().mean()


class Program(nn.Module):
    """The blocks of a case, one after the other, each for the shape that the ones before give."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.kind = case.kind
        if case.kind in ("tokens", "bags"):
            self.embed = (nn.Embedding if case.kind == "tokens" else nn.EmbeddingBag)(VOCABULARY, 8)
        self.blocks, self.wants = nn.ModuleDict(), []
        x = self.begin(
            case.make_batch()[0][:2].to(torch.float32 if case.kind not in ("tokens", "bags") else torch.int64)
        )
        for name, (kind, number) in case.blocks.items():
            wants, make = BLOCKS[kind]
            x = adapt(x, wants)
            self.wants.append(wants)
            try:
                self.blocks[name] = made = make(random.Random(number), tuple(x.shape)).train()
                made(x.repeat(4, *(1,) * (x.ndim - 1)))
            except (RuntimeError, ValueError, AssertionError, IndexError):  # the shape is not for it
                self.blocks[name] = made = nn.Linear(x.shape[-1], 8)
            with torch.no_grad():
                x = made.eval()(x)
        self.head = None
        if case.kind == "tokens" and case.option("bare") is None:  # tied to the table
            self.narrow, self.head = nn.Linear(x.shape[-1], 8), nn.Linear(8, VOCABULARY, bias=False)
            self.head.weight = self.embed.weight
        elif not list(self.parameters()) or not any(p.requires_grad for p in self.parameters()):
            self.head = nn.Linear(x.shape[-1], 8)
        self.train()

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        """Values of the batch."""
        return self.embed(x) if self.kind in ("tokens", "bags") else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block, wants in zip(self.blocks.values(), self.wants, strict=True):
            x = block(adapt(x, wants))
        if self.head is None:
            return x
        return self.head(self.narrow(x).tanh() if hasattr(self, "narrow") else x)


@any_grouped_mm()
def draw(seed: int) -> Case:
    """The case of a seed."""
    r = random.Random(seed)
    routed = random.Random(f"experts of {seed}")
    kinds = [kind for kind in BLOCKS if kind not in ("dropout", "repeated", "stages", *ROUTED)]
    blocks = {f"b{i}": (r.choice(kinds), r.randrange(1 << 30)) for i in range(r.choice([1, 2, 2, 3]))}
    if r.random() < 0.2:
        blocks["stack"] = "repeated", r.randrange(1 << 30)
    if routed.random() < 0.15:
        name, kind = ("stack", "repeated experts") if "stack" in blocks else ("experts", "routed experts")
        blocks[name] = kind, routed.randrange(1 << 30)
    if r.random() < 0.08:
        blocks["dropout"] = "dropout", 0
    kind = r.choice(["vectors", "sequences", "sequences", "images", "images", "tokens", "bags"])
    case = Case(seed, kind, blocks, draw_mesh(r))
    options = dict(_draw_options(r, case))
    if routed.random() < 0.7 and parallelisms(case):  # whatever their bytes
        options["dispatch"] = True
    case = dataclasses.replace(case, options=options)
    return _draw_stages(random.Random(f"stages of {seed}"), _draw_plan(r, case))


def _draw_stages(r: random.Random, case: Case) -> Case:
    """In half of the cases with repeated layers, four are the stages of a pipeline, split alike over other axes."""
    axes = [axis for axis, size in case.mesh if axis != "batch" and size > 1]
    spec, own = case.batch_spec, "blocks.stack."
    if "stack" not in case.blocks or not axes or r.random() < 0.5 or case.recipe not in (None, "fsdp", "zero-1"):
        return case
    axis = r.choice(axes)
    if spec is not None and axis in axes_of(spec):
        spec = None
    if (
        case.option("scan_layers") is False
        or dict(case.mesh)[axis] > 4
        or (spec is None and "batch" not in dict(case.mesh))
    ):
        return case
    kind = "stages of experts" if case.blocks["stack"][0] == "repeated experts" else "stages"
    found = dataclasses.replace(case, blocks={**case.blocks, "stack": (kind, r.randrange(1 << 30))})
    repeats = r.choice([1, 2]) if dict(case.mesh)[axis] == 2 else 1
    given = {what: _without_axis(getattr(case, what), axis, own) for what in ("rules", "activations", "stored")}
    sizes = {name: size for name, size in case.mesh if name != axis}
    for name, entry in found.make_model().named_parameters():
        if name.startswith(f"{own}1.0.") and sizes and r.random() < 0.5:
            drawn_spec = draw_spec(r, tuple(entry.shape), sizes)
            given["rules"] |= {name.replace(f"{own}1.0.", f"{own}1.{at}."): drawn_spec for at in range(4)}
    num = {} if mixes_rows(found) else {"accumulate_steps": r.choice([1, 2]) if repeats == 1 else 2}
    pipeline = ts.Pipeline(axis, repeats, r.choice([None, "gpipe"]))
    return dataclasses.replace(found, pipeline=pipeline, batch_spec=spec, options={**case.options, **num}, **given)


def _without_axis(specs: Mapping[str, Any], axis: str, own: str) -> dict[str, Any]:
    """What neither names the axis nor is about these entries."""
    return {
        name: spec
        for name, spec in specs.items()
        if not name.startswith(own) and not (isinstance(spec, P) and axis in axes_of(spec))
    }


def _draw_options(r: random.Random, case: Case) -> Iterator[tuple[str, Any]]:
    has_stack = "stack" in case.blocks
    mixes = mixes_rows(case)
    if r.random() < 0.3:
        yield "optimizer", r.choice([name for name in OPTIMIZERS if name != "sgd"])
    if r.random() < 0.2 and not mixes:
        yield "accumulate_steps", 2
    if r.random() < 0.2:
        yield "split_activations", False
    if has_stack and r.random() < 0.4:
        yield "remat", r.choice(["dots", "block"])
    elif has_stack and r.random() < 0.3:
        yield "scan_layers", False
    if r.random() < 0.06:
        yield "compute_dtype", torch.bfloat16
        yield "mixed_precision", r.choice(["autocast", "params"])
    elif r.random() < 0.03:
        yield "dtype", torch.bfloat16
    if r.random() < 0.15:
        yield "guard", math.inf
    if r.random() < 0.15:
        yield "evaluate", True
    if r.random() < 0.08:
        yield "twice", True
    if r.random() < 0.5:
        yield "bare", True
    yield "loss", r.choice(["squares", "weighted", "entropy"])


def _draw_plan(r: random.Random, case: Case) -> Case:
    model = case.make_model()
    sizes, entries = dict(case.mesh), dict(model.named_parameters())
    recipe = r.choice(RECIPES) if r.random() < 0.35 and "batch" in sizes and len(sizes) > 1 else None
    if recipe == "expert" and not any("experts" in name for name, _ in case.blocks.values()):
        recipe = "fsdp_tp"
    if parallelisms(case) and "batch" in sizes and len(sizes) > 1 and r.random() < 0.5:
        recipe = "expert"
    odds = 0.6 if recipe is None else 0.08
    rules = {n: draw_spec(r, tuple(p.shape), sizes) for n, p in entries.items() if r.random() < odds}
    batch_spec = None
    if "batch" not in sizes or r.random() < 0.3:
        batch_spec = draw_spec(r, tuple(case.make_batch()[1].shape), sizes, odds=0.7)
    if recipe == "hsdp":
        batch_spec = P((next(axis for axis in sizes if axis != "batch"), "batch"))
    stored = {}
    for name, entry in entries.items():
        fused = "qkv" in name or "fused" in name or "in_proj" in name
        if recipe is None and entry.ndim in (1, 2) and r.random() < (0.3 if fused else 0.04):
            num = 3 if entry.shape[0] % 3 == 0 else 2
            stored[name] = ts.Pieces(num, dim=0)
    activations = _draw_activations(r, case, model) if r.random() < 0.25 and recipe is None else {}
    found = dataclasses.replace(
        case, rules=rules, recipe=recipe, batch_spec=batch_spec, stored=stored, activations=activations
    )
    return _without_remat(found) if case.option("remat") and "stack" not in case.blocks else found


def _without_remat(case: Case) -> Case:
    return dataclasses.replace(case, options={k: v for k, v in case.options.items() if k != "remat"})


def _draw_activations(r: random.Random, case: Case, model: nn.Module) -> dict[str, P]:
    """Specs for what one or two modules return."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, torch.Tensor) and out.ndim > 1:
                shapes[name] = tuple(out.shape)

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        model(case.make_batch()[0].to(case.dtype) if case.kind not in ("tokens", "bags") else case.make_batch()[0])
    for hook in hooks:
        hook.remove()
    names = [name for name in shapes if ".layers." not in name and "parametrizations" not in name]
    chosen = r.sample(names, min(len(names), r.choice([1, 1, 2])))
    rows = 2 if case.option("accumulate_steps") else 1
    return {name: draw_spec(r, (shapes[name][0] // rows, *shapes[name][1:]), dict(case.mesh)) for name in chosen}


def parallelisms(case: Case) -> set[str]:
    """Those of "context", "expert" and "stage" that it has."""
    found = {case.recipe} & {"context"}
    found |= {"expert"} if any(kind in ROUTED for kind, _ in case.blocks.values()) else set()
    return found | ({"stage"} if case.pipeline else set())


def mixes_rows(case: Case) -> bool:
    """Whether one of its blocks computes with all rows of the batch at once, of which microbatches have a part."""
    functions = [module.fn for module in case.make_model().modules() if isinstance(module, Apply)]
    norm = any("batch norm" in kind for kind, _ in case.blocks.values())
    return norm or any(fn in (FUNCTIONS["edges"], FUNCTIONS["center"]) for fn in functions)
