"""Calls of the public API with arguments that are wrong, and with which words each is refused."""

# ruff: noqa: E501

import ast
import functools
import pathlib
import random
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from torch_shard import cli, collectives


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 2), nn.Dropout(0.1)

    def forward(self, x):
        return self.layer(self.dropout(x))


class Plain:
    pass


def mse(model, batch):
    return model(batch).square().mean()


def adds_parameter(model, batch):
    model.scale = nn.Parameter(torch.ones(2))
    return (model(batch) * model.scale).square().mean()


def adds_module(model, batch):
    model.extra = nn.Linear(2, 2)
    return model.extra(model(batch)).square().mean()


def reads_clock(model, batch):
    return mse(model, batch) * time.time()


def reads_perf(model, batch):
    return mse(model, batch) * time.perf_counter()


GENERATOR = np.random.default_rng(0)


def draws(model, batch):
    return mse(model, batch) * GENERATOR.random()


def in_inference(call):
    with torch.inference_mode():
        return call()


def in_explicit(call):
    with jax.set_mesh(explicit()):
        return call()


X = torch.ones(8, 4)
PLAN = ts.ShardingPlan({}, default=P())


@functools.cache
def mesh():
    return ts.make_mesh(batch=2)


@functools.cache
def explicit():
    return jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])


def on_explicit():
    return NamedSharding(explicit(), P("batch"))


def make(model=None, loss_fn=mse, optimizer=None, **options):
    options = {"mesh": mesh(), "plan": PLAN, **options}
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return ts.make_train_step(Net() if model is None else model, loss_fn, optimizer, **options)


def make_eval(model=None, loss_fn=mse, **options):
    return ts.make_eval_step(model or Net(), loss_fn, **{"mesh": mesh(), "plan": PLAN, **options})


def run(loss_fn=mse, **options):
    step = make(loss_fn=loss_fn, **options)
    return step(step.init(seed=0), X)


def run_twice(loss_fn=mse, **options):
    """Two steps: the second looks again at what the loss does."""
    step = make(loss_fn=loss_fn, **options)
    return step(step(step.init(seed=0), X)[0], X)


step = functools.cache(make)


@functools.cache
def evaluate():
    return step().evaluation()


@functools.cache
def apply():
    return ts.make_apply(Net(), mesh=mesh(), plan=PLAN)


def weights_of(model):
    """As a user of JAX has them: a dict of arrays, by name."""
    return ts.jax_view(dict(model.named_parameters()))


def donated():
    state = step().init(seed=0)
    step()(state, X)
    return state


@functools.cache
def other_state():
    return make(nn.Linear(4, 3)).init(seed=0)


@functools.cache
def saved():
    """A Checkpointer with a checkpoint of step 0."""
    with ts.Checkpointer(tempfile.mkdtemp(), asynchronous=False) as checkpointer:
        checkpointer.save(step().init(seed=0), metrics={"loss": 1.0})
    return checkpointer


def restore(**options):
    return saved().restore(step(), **options)


def fit(train_step=None, state=None, loader=None, **options):
    train_step, loader = (step() if train_step is None else train_step), ([X] if loader is None else loader)
    return ts.fit(train_step, state, loader, **{"steps": 1, "progress": False, **options})


def compare(**options):
    options = {"model": Net(), "loss_fn": mse, "batch": X, "mesh": mesh(), "plan": PLAN, **options}
    return ts.compare_with_torch(**options)


comparison = functools.cache(compare)


def prove(**options):
    return ts.prove(**{"model": Net(), "loss_fn": mse, "batch": X, **options})


@functools.cache
def weights():
    return ts.export_safetensors(Net(), tempfile.mkdtemp())


def file():
    path = pathlib.Path(tempfile.mkdtemp()) / "file"
    path.write_text("x")
    return path


def run_cli(*args):
    return cli.app(list(map(str, args)), standalone_mode=False)


MADE: dict[str, Callable[[], Any]] = {
    **{fn.__name__: fn for fn in (mesh, explicit, donated, evaluate, apply, other_state, saved, file, weights)},
    **{"step": step, "comparison": comparison, "model": Net, "folder": tempfile.mkdtemp},
    **{"state": lambda: step().init(seed=0), "sgd": lambda: optax.sgd(0.1), "plan": lambda: PLAN, "x": lambda: X},
}
"""What a name in a call stands for, made anew for each call that has it."""

NAMES: dict[str, Any] = {
    **{"ts": ts, "cli": run_cli, "collectives": collectives, "jax": jax, "jnp": jnp, "np": np, "optax": optax},
    **{
        "data": torch.utils.data,
        "functools": functools,
        "torch": torch,
        "nn": nn,
        "P": P,
        "random": random,
        "re": re,
        "Checkpointer": ts.Checkpointer,
    },
    **{fn.__name__: fn for fn in (Net, Plain, mse, make, make_eval, run, run_twice, restore, fit, compare, prove)},
    **{fn.__name__: fn for fn in (adds_parameter, adds_module, reads_clock, reads_perf, draws)},
    **{fn.__name__: fn for fn in (in_inference, in_explicit, on_explicit, weights_of)},
}


def call(text: str) -> object:
    """Evaluate a call of the tables."""
    tree = ast.parse(text, mode="eval")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    made = {name: make() for name, make in MADE.items() if name in names}
    return eval(compile(tree, "<a call of the table>", "eval"), {**NAMES, **made})


REFUSED: dict[str, dict[str, str]] = {
    "plans.fsdp": {
        "ts.plans.fsdp(5, mesh)": "TypeError: plans.fsdp: model must be a Module, got int.",
        "ts.plans.fsdp(model, 5)": "TypeError: plans.fsdp: mesh must be a jax.sharding.Mesh, got int.",
        "ts.plans.fsdp(model, mesh, fsdp=5)": "TypeError: plans.fsdp: fsdp must be the name of an axis, or a tuple of some, got 5.",
        "ts.plans.fsdp(model)": "TypeError: plans.fsdp: missing 1 required positional argument: 'mesh'. Call it as fsdp(model, mesh).",
        "ts.plans.fsdp(model, ts.make_mesh(data=8))": 'ValueError: plans.fsdp: on the mesh (data=8): fsdp="batch" names no axis of it. Give axes that it has, each once, or a mesh of these: make_mesh(batch=...).',
        'ts.plans.fsdp(model, mesh, fsdp="x")': 'ValueError: plans.fsdp: on the mesh (batch=2): fsdp="x" names no axis of it.',
        "ts.plans.tp(model, mesh, tp='batch', pad_vocab=1)": 'ValueError: plans.tp: pad_vocab must be True, False or "auto", got 1.',
        "ts.plans.fsdp(model, mesh, strict=1)": "TypeError: plans.fsdp: strict must be a bool, got int.",
        "ts.plans.fsdp(nn.LazyLinear(4), mesh)": "ValueError: plans.fsdp: weight, bias: lazy, without a shape yet.",
    },
    "plans.hsdp": {
        "ts.plans.hsdp(5, mesh)": "TypeError: plans.hsdp: model must be a Module, got int.",
        "ts.plans.hsdp(model, mesh)": 'ValueError: plans.hsdp: on the mesh (batch=2): replicate="replica" names no axis of it.',
    },
    "plans.tp": {
        "ts.plans.tp(5, mesh)": "TypeError: plans.tp: model must be a Module, got int.",
        "ts.plans.tp(model, mesh, tp=None)": "TypeError: plans.tp: tp must be the name of an axis, or a tuple of some, got None.",
    },
    "plans.fsdp_tp": {
        "ts.plans.fsdp_tp(5, mesh)": "TypeError: plans.fsdp_tp: model must be a Module, got int.",
        "ts.plans.fsdp_tp(model, mesh)": 'ValueError: plans.fsdp_tp: on the mesh (batch=2): tp="model" names no axis of it.',
    },
    "plans.expert": {
        "ts.plans.expert(5, mesh)": "TypeError: plans.expert: model must be a Module, got int.",
        'ts.plans.expert(model, mesh, ep="batch", fsdp=None)': "ValueError: plans.expert: no entry of Net holds several experts",
        'ts.plans.expert(model, mesh, ep="batch", fsdp=None, sequence=True)': "TypeError: plans.expert: tp must be the name of an axis, or a tuple of some, got None: sequence=True splits the residual stream over it.",
    },
    "plans.from_dtensor": {
        "ts.plans.from_dtensor(5, mesh, {})": "TypeError: plans.from_dtensor: model must be a Module, got int.",
        "ts.plans.from_dtensor(model, 5, {})": "TypeError: plans.from_dtensor: mesh must be a jax.sharding.Mesh, got int.",
        'ts.plans.from_dtensor(model, mesh, 5, tp="batch")': "TypeError: plans.from_dtensor: parallelize_plan must be a Mapping, got int. Give what",
        'ts.plans.from_dtensor(model, mesh, {"layer": 5}, tp="batch")': "TypeError: plans.from_dtensor: parallelize_plan maps names of modules to styles, got 'layer': int.",
        'ts.plans.from_dtensor(model, mesh, {}, tp="x")': 'ValueError: plans.from_dtensor: on the mesh (batch=2): tp="x" names no axis of it.',
        'ts.plans.from_dtensor(model, mesh, {}, tp="batch", batch_spec="batch")': "TypeError: plans.from_dtensor: batch_spec must be a P or None, got str.",
        'ts.plans.from_dtensor(model, mesh, {}, tp="batch", ndim="3")': "TypeError: plans.from_dtensor: ndim must be a whole number, or some by names or globs of modules; got '3'.",
        'ts.plans.from_dtensor(model, mesh, {}, tp="batch", ndim=0)': "ValueError: plans.from_dtensor: 1 thing cannot be read. ndim=0 must be a positive integer.",
        "ts.plans.from_dtensor(model, mesh, {}, tp=None)": "TypeError: plans.from_dtensor: tp must be a str, got NoneType.",
    },
    "initialize": {
        'ts.initialize("node001")': "ValueError: initialize: the coordinator's address must be host:port, found coordinator_address='node001'.",
        "ts.initialize(num_processes=0)": "ValueError: initialize: the number of processes must be a positive integer, found num_processes=0.",
        "ts.initialize(process_id=-1)": "ValueError: initialize: the number of a process must be an integer of at least 0, found process_id=-1.",
        'ts.initialize("a:1", 2, 2)': "ValueError: initialize: processes are numbered from 0: the number of one must be less than the number of all",
        'ts.initialize("a:1", 2)': "ValueError: initialize: found coordinator_address='a:1', num_processes=2, which does not say",
        "ts.initialize(num_processes=2, process_id=1)": "ValueError: initialize: this is one of 2 processes (arguments: num_processes=2, process_id=1), and nothing says where process 0 runs.",
        'mesh and ts.initialize("a:1", 2, 1)': "RuntimeError: initialize: must be called before JAX starts its devices",
        "ts.initialize(initialization_timeout=0)": "ValueError: initialize: initialization_timeout must be a positive integer, got 0.",
        "ts.initialize(heartbeat_timeout_seconds=0.5)": "ValueError: initialize: heartbeat_timeout_seconds must be a positive integer, got 0.5.",
        "ts.initialize(5)": "ValueError: initialize: the coordinator's address must be host:port, found coordinator_address=5.",
        'ts.initialize("a:1", 2, 1, local_device_ids=1)': "TypeError: initialize: local_device_ids must be a sequence of integers",
    },
    "make_mesh": {
        "ts.make_mesh()": "ValueError: make_mesh: at least one axis is required, as in make_mesh(batch=4, model=2).",
        "ts.make_mesh(4)": "ValueError: make_mesh: at least one axis is required, as in make_mesh(batch=4, model=2).",
        'ts.make_mesh("cpu", batch=1)': "ValueError: make_mesh: devices must be a sequence of different JAX devices, as in",
        'ts.make_mesh(devices="cpu", batch=-1)': "ValueError: make_mesh: devices must be a sequence of different JAX devices, as in",
        "ts.make_mesh(batch=0)": "ValueError: make_mesh: axis sizes must be positive, or -1 for the rest, got batch=0.",
        "ts.make_mesh(batch=-2)": "ValueError: make_mesh: axis sizes must be positive, or -1 for the rest, got batch=-2.",
        "ts.make_mesh(batch=True)": "TypeError: make_mesh: every axis size must be an int, got batch=True.",
        "ts.make_mesh(batch=-1, model=-1)": "ValueError: make_mesh: one axis size at most may be -1, got batch and model.",
        "ts.make_mesh(batch=3, model=-1)": "ValueError: make_mesh: model=-1 takes what the other axes leave, but their product 3 does not",
        "ts.make_mesh(batch=10**30)": "ValueError: make_mesh: batch=1000000000000000000000000000000 needs",
    },
    "plans of Hugging Face": {
        "ts.plans.from_hf(None, mesh)": "TypeError: plans.from_hf: model must be a Module, got NoneType.",
        "ts.plans.from_hf(Net(), None)": "TypeError: plans.from_hf: mesh must be a jax.sharding.Mesh, got NoneType.",
        "ts.plans.from_hf(Net(), explicit)": "ValueError: plans.from_hf: ",
        "ts.plans.from_hf(Net(), ts.make_mesh(batch=2, model=2))": "ValueError: plans.from_hf: Net has no plan that can be read. it has no tp_plan. Use ts.plans.tp(model, mesh)",
        "ts.plans.from_hf(Net(), ts.make_mesh(batch=2, model=2), tp=None, fsdp=None, ep='model')": "ValueError: plans.from_hf: Net has no plan that can be read. it has no ep_plan. Use",
        "ts.plans.from_hf(Net(), mesh, tp=3)": "TypeError: plans.from_hf: tp must be the name of an axis, or a tuple of some, got 3.",
        "ts.plans.from_hf(Net(), ts.make_mesh(batch=2, model=2), ep=['model'])": "TypeError: plans.from_hf: ep must be the name of an axis, or a tuple of some, got ['model'].",
        'ts.plans.from_hf(Net(), mesh, tp="modle")': 'ValueError: plans.from_hf: on the mesh (batch=2): tp="modle" names no axis of it.',
        "ts.plans.from_hf(Net(), mesh, strict=1)": "TypeError: plans.from_hf: strict must be a bool, got int.",
        'ts.plans.from_hf(Net(), ts.make_mesh(batch=2, model=2), fsdp="model")': 'ValueError: plans.from_hf: on the mesh (batch=2, model=2): axis "model" is given twice.',
    },
    "ShardingPlan": {
        "ts.ShardingPlan(None)": "TypeError: ShardingPlan: rules must map names to specs, got NoneType.",
        "ts.ShardingPlan({1: P()})": "TypeError: ShardingPlan: 1 rule cannot be read. rule 1: a rule is a name, a glob or a compiled",
        "ts.ShardingPlan({None: P()})": "TypeError: ShardingPlan: 1 rule cannot be read. rule default: a rule is a name, a glob or a",
        'ts.ShardingPlan({"weight": "model"})': 'TypeError: ShardingPlan: 1 rule cannot be read. rule "weight": expected a PartitionSpec, got',
        'ts.ShardingPlan({}, default="batch")': "TypeError: ShardingPlan: 1 rule cannot be read. rule default: expected a PartitionSpec, got",
        'ts.ShardingPlan({"a**": P()})': 'ValueError: ShardingPlan: 1 rule cannot be read. rule "a**": ** stands for whole segments. Use',
        'ts.ShardingPlan({re.compile(b"x"): P()})': "TypeError: ShardingPlan: 1 rule cannot be read. rule re.compile(b'x'): a rule is a name, a",
        'ts.ShardingPlan({"weight": P(("batch", 1))})': "TypeError: ShardingPlan: 1 rule cannot be read. rule \"weight\": P(('batch', 1)) has 1. Its",
        'ts.ShardingPlan({"weight": P(P.UNCONSTRAINED)})': 'TypeError: ShardingPlan: 1 rule cannot be read. rule "weight": P(UNCONSTRAINED) has',
        "ts.ShardingPlan({}, default=P(3))": "TypeError: ShardingPlan: 1 rule cannot be read. rule default: P(3) has 3. Its parts are names",
        "ts.ShardingPlan({}, default=P(P.UNCONSTRAINED))": "TypeError: ShardingPlan: 1 rule cannot be read. rule default: P(UNCONSTRAINED) has",
        'ts.ShardingPlan({"layer.weight": P(True)})': 'TypeError: ShardingPlan: 1 rule cannot be read. rule "layer.weight": P(True) has True. Its',
        "plan.resolve(None, mesh)": "TypeError: ShardingPlan.resolve: expected a module or a mapping, got NoneType.",
        "plan.resolve(model, None)": "TypeError: ShardingPlan.resolve: mesh must be a jax.sharding.Mesh, got NoneType. Build one",
        'plan.resolve({"a": 3}, mesh)': "TypeError: ShardingPlan: 1 value cannot be read. a: int has no shape. Give a tensor, an array",
        'plan.resolve({"a": "xy"}, mesh)': "TypeError: ShardingPlan: 1 value cannot be read. a: str has no shape. Give a tensor, an array",
        'plan.resolve({"a": (-1,)}, mesh)': "TypeError: ShardingPlan: 1 value cannot be read. a: tuple has no shape. Give a tensor, an",
        'plan.resolve({"a": None}, mesh)': "TypeError: ShardingPlan: 1 value cannot be read. a: NoneType has no shape. Give a tensor, an",
        "plan.resolve({1: (2,)}, mesh)": "TypeError: ShardingPlan: 1 value cannot be read. 1: a name must be a string, got int.",
        "plan.resolve(model, explicit)": "ValueError: ShardingPlan.resolve: every mesh axis must be Auto, so that XLA may choose the",
        'ts.ShardingPlan({"layer.weight": P("bach")}, default=P()).resolve(model, mesh)': "ValueError: ShardingPlan: 1 parameter cannot be split as asked on mesh (batch=2). layer.weight",
        'ts.ShardingPlan({"": P()}, default=P()).resolve(model, mesh)': 'ValueError: ShardingPlan: 1 rule matches nothing. rule "" matches no name. The closest name is',
    },
    "data_shard": {
        "ts.data_shard(None)": "TypeError: data_shard: mesh must be a jax.sharding.Mesh, got NoneType. Build one with",
        "ts.data_shard(explicit)": "ValueError: data_shard: every mesh axis must be Auto, so that XLA may choose the",
        "ts.data_shard(ts.make_mesh(model=2))": "ValueError: data_shard: batches are split over the mesh axis 'batch', but mesh (model=2) has none. Say",
        'ts.data_shard(mesh, "batch")': "TypeError: data_shard: batch_spec must be a P or None, got str.",
        'ts.data_shard(mesh, P("bach"))': "ValueError: data_shard: batch_spec on mesh (batch=2): P('bach') names an axis that the",
    },
    "Rows": {
        "ts.Rows(None, batch_size=2)": "TypeError: Rows: NoneType is no dataset. A dataset has len(dataset) and dataset[index].",
        "ts.Rows([x], batch_size=0)": "ValueError: Rows: batch_size must be a positive integer, got 0.",
        'ts.Rows([x], batch_size=2, shuffle="yes")': "TypeError: Rows: shuffle must be a bool, got str.",
        "ts.Rows([x], batch_size=2, drop_last=1)": "TypeError: Rows: drop_last must be a bool, got int.",
        "ts.Rows([x], batch_size=2, num_workers=-1)": "ValueError: Rows: num_workers must be an integer, 0 or more, got -1.",
        "ts.Rows([x], batch_size=2, num_workers=None)": "ValueError: Rows: num_workers must be an integer, 0 or more, got None.",
        "ts.Rows([x], batch_size=2, collate_fn=5)": "TypeError: Rows: collate_fn must be a Callable, got int.",
        "ts.Rows([x], batch_size=2, collate_fn=lambda: x)": "TypeError: Rows: collate_fn is called with (rows), but <lambda>() cannot be:",
    },
    "make_train_step": {
        "ts.make_train_step(None, mse, sgd, mesh=mesh, plan=plan)": "TypeError: make_train_step: model must be a Module, got NoneType.",
        "make(Net)": "TypeError: make_train_step: model must be a Module, got type.",
        "make(loss_fn=None)": "TypeError: make_train_step: loss_fn must be a Callable, got NoneType.",
        "make(loss_fn=nn.MSELoss())": "TypeError: make_train_step: loss_fn is called with (model, batch), and MSELoss wants",
        "make(loss_fn=lambda: 0)": "TypeError: make_train_step: loss_fn is called with (model, batch), but <lambda>() cannot be:",
        "ts.make_train_step(model, mse, sgd)": "TypeError: make_train_step: missing 2 required keyword-only arguments: 'mesh' and 'plan'. Call it as make_train_step(model, loss_fn, optimizer, mesh=ts.make_mesh(batch=...), plan=ts.plans.fsdp(...)).",
        'make(optimizer="adam")': "TypeError: make_train_step: optimizer must be an optimizer of torch.optim, such as",
        "make(optimizer=torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1))": "ValueError: make_train_step: the optimizer has parameters that are not the model's",
        "make(optimizer=torch.optim.LBFGS(model.parameters()))": "TypeError: make_train_step: the optimizer is a torch.optim.lbfgs.LBFGS, and what its step() does cannot be known",
        'make(clip_grad_norm="1")': "TypeError: make_train_step: clip_grad_norm must be a positive number or None",
        "make(clip_grad_norm=0)": "ValueError: make_train_step: clip_grad_norm must be a positive number or None",
        'make(plan="fsdp")': "TypeError: make_train_step: plan must be a ShardingPlan, got str. Write plan=ts.plans.fsdp(model, mesh), or another recipe of ts.plans.",
        'make(plan="DDP")': "TypeError: make_train_step: plan must be a ShardingPlan, got str. Write plan=ts.plans.replicated(), or",
        "make(optimizer=optax.lbfgs())": "NotImplementedError: make_train_step: the optimizer has a line search, which asks for the loss at several parameters in one update (value_fn), and a step computes it once. Give a learning rate instead: optax.lbfgs(0.1, linesearch=None).",
        "make(optimizer=optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=9)))": "NotImplementedError: make_train_step: the optimizer has a line search,",
        'run(optimizer=optax.sgd("0.1"))': "TypeError: make_train_step: optimizer.update fails for the parameters of the model, a dict by",
        'run(optimizer=optax.sgd(lambda step: "x"))': "ValueError: make_train_step: optimizer.update fails for the parameters of the model, a dict by",
        'run(optimizer=optax.adamw(1e-3, mask={"layer.wrong": True}))': "ValueError: make_train_step: optimizer.init fails for the parameters of the model, a dict by",
        'make(optimizer=optax.masked(optax.sgd(0.1), {"x": True}))': "ValueError: make_train_step: optimizer.init fails for the parameters of the model, a dict by",
        "make(mesh=None)": "TypeError: make_train_step: mesh must be a jax.sharding.Mesh, got NoneType. Build one with",
        "make(mesh=explicit)": "ValueError: make_train_step: every mesh axis must be Auto, so that XLA may choose the",
        "make(plan=None)": "TypeError: make_train_step: plan must be a ShardingPlan, got NoneType.",
        "make(plan={})": "TypeError: make_train_step: plan must be a ShardingPlan, got dict. Make one of rules, as in ts.ShardingPlan({...}, default=P()).",
        "make(plan=lambda model: PLAN)": "TypeError: make_train_step: plan is called with (model, mesh), but <lambda>(model) cannot be: too many positional arguments. Recipes such as ts.plans.fsdp can, and their results are plans too.",
        "make(plan=lambda model, mesh: {})": "TypeError: make_train_step: what plan(model, mesh) returns must be a ShardingPlan, got dict.",
        "make(plan=ts.plans.fsdp, mesh=explicit)": "ValueError: make_train_step: every mesh axis must be Auto,",
        "make(optimizer_plan={})": "TypeError: make_train_step: optimizer_plan must be a ShardingPlan or None, got dict.",
        'make(batch_spec="batch")': "TypeError: make_train_step: batch_spec must be a P or a Mapping or None, got str.",
        'make(batch_spec=P("bach"))': "ValueError: make_train_step: batch_spec on mesh (batch=2): P('bach') names an axis that the",
        'make(batch_spec=P("batch", "batch"))': "ValueError: make_train_step: batch_spec on mesh (batch=2): P('batch', 'batch') names 'batch'",
        'make(batch_spec=P(("batch", "bach")))': "ValueError: make_train_step: batch_spec on mesh (batch=2): P(('batch', 'bach')) names an axis",
        "make(local_batches=1)": "TypeError: make_train_step: local_batches must be a bool, got int.",
        'make(compute_dtype="bfloat16")': "ValueError: make_train_step: compute_dtype must be torch.bfloat16 or None, got bfloat16.",
        "make(compute_dtype=torch.float16)": "ValueError: make_train_step: compute_dtype must be torch.bfloat16 or None, got torch.float16.",
        'make(moment_dtype="bfloat16")': "ValueError: make_train_step: moment_dtype must be torch.bfloat16 or None, got bfloat16.",
        "make(moment_dtype=torch.float16)": "ValueError: make_train_step: moment_dtype must be torch.bfloat16 or None, got torch.float16.",
        "make(moment_dtype=torch.bfloat16)": "ValueError: make_train_step: moment_dtype is for moments in the shape of their parameter, of at most 32 bits, and",
        'make(scan_layers="yes")': "ValueError: make_train_step: scan_layers must be True, False or \"auto\", got 'yes'.",
        "make(scan_layers=None)": 'ValueError: make_train_step: scan_layers must be True, False or "auto", got None.',
        'make(remat="all")': "ValueError: make_train_step: remat must be 'none', 'dots', 'block' or a number of bytes, got",
        "make(remat=True)": "ValueError: make_train_step: remat must be 'none', 'dots', 'block' or a number of bytes, got",
        'run(remat="block", scan_layers=False)': "ValueError: make_train_step: the loss: remat='block' needs repeated layers that are one",
        "make(accumulate_steps=0)": "ValueError: make_train_step: accumulate_steps must be a positive integer, got 0.",
        "make(accumulate_steps=-1)": "ValueError: make_train_step: accumulate_steps must be a positive integer, got -1.",
        "run(accumulate_steps=10**30)": "ValueError: make_train_step: the batch cannot be split into",
        "make(compile_cache=1)": "TypeError: make_train_step: compile_cache must be a path, got int.",
        'make(compile_cache="")': "ValueError: make_train_step: compile_cache is empty. Name a file or a directory.",
        'make(compile_cache="a\\0b")': "ValueError: make_train_step: compile_cache cannot be 'a\\x00b': embedded null byte",
        "make(compile_cache=file)": "ValueError: make_train_step: compile_cache='",
        "make(compiled=1)": "TypeError: make_train_step: compiled must be a path, got int.",
        'make(compiled="")': "ValueError: make_train_step: compiled is empty. Name a file or a directory.",
        'make(compiled="step.zip")': "ValueError: make_train_step: compiled='step.zip' must be a whole file of step.save_compiled, but",
        'make(compiled=".")': "IsADirectoryError: make_train_step: compiled must be a file, but . is a directory.",
        "ts.make_train_step(model, sgd, mse, mesh=mesh, plan=plan)": "TypeError: make_train_step: loss_fn must be a Callable, got GradientTransformationExtraArgs.",
        "make(nn.Linear(4, 2).requires_grad_(False))": "ValueError: make_train_step: no parameter of Linear has requires_grad=True.",
        "make(nn.LazyLinear(2))": "TypeError: ShardingPlan: 2 values cannot be read. weight: a lazy parameter has no shape yet.",
        "make(nn.Linear(4, 2, dtype=torch.float64)).init()": "TypeError: init: weight, bias are float64 or complex128 and need 64 bits, which JAX has",
    },
    "init": {
        "step.init(seed=1.5)": "ValueError: init: seed must be an int of 32 bits, from 0 to 4294967295, got 1.5.",
        'step.init(seed="a")': "ValueError: init: seed must be an int of 32 bits, from 0 to 4294967295, got 'a'.",
        "step.init(seed=jax.random.key(0))": "TypeError: init: seed must be an int of 32 bits, got a random key of JAX. Give the number that the key was made of: seed=0, not seed=jax.random.key(0).",
        "step.init(seed=jax.random.PRNGKey(0))": "TypeError: init: seed must be an int of 32 bits, got a random key of JAX.",
        "step.init(0)": "TypeError: init: takes 1 positional argument but 2 were given. Call it as init(seed=...).",
    },
    "step": {
        "step(x)": "TypeError: make_train_step: missing 1 required positional argument: 'batch'. Call it as step(state, batch).",
        "evaluate()": "TypeError: make_eval_step: missing 2 required positional arguments: 'state' and 'batch'. Call it as step(state, batch).",
        "step.export()": "TypeError: export: missing 1 required positional argument: 'state'. Call it as export(state).",
        "step(None, x)": "TypeError: make_train_step: state must be a TrainState, got NoneType. step.init(seed=0) gives",
        "step(other_state, x)": "ValueError: make_train_step: params of the state do not fit. layer.weight: missing layer.bias:",
        'step(make(nn.ModuleDict({"layer": nn.Linear(4, 3)})).init(), x)': "ValueError: make_train_step: the state has layer.weight (3, 4), where the model has (2, 4),",
        'step(make(plan=ts.ShardingPlan({"*.weight": P(None, "batch")}, default=P())).init(), x)': "ValueError: make_train_step: the state lies as the plan or the mesh of another step has it: params['layer.weight'] (2, 4) is split by",
        "step(donated, x)": "ValueError: make_train_step: this state was donated to an earlier call of the step. Go on with",
        'step(state, np.array(["a", "b"]))': "TypeError: make_train_step: batch: JAX dtype <U1 has no torch counterpart; convert the array",
        "step(state, np.array([object(), None]))": "TypeError: make_train_step: batch: JAX dtype object has no torch counterpart; convert the",
        'step(state, np.array(["2020-01-01"], dtype="datetime64[s]"))': "TypeError: make_train_step: batch: JAX dtype datetime64[s] has no torch counterpart; convert",
        "step(state, torch.ones(8, 4).to_sparse())": "TypeError: make_train_step: batch: A torch.sparse_coo tensor cannot move to the jax device;",
        'step(state, torch.ones(8, 4, device="meta"))': "NotImplementedError: make_train_step: batch: Cannot copy out of meta tensor; no data!",
        "step(state, torch.ones(7, 4))": "ValueError: make_train_step: the batch cannot be split on mesh (batch=2). batch (7, 4): dim 0",
        "step(state, torch.full((8, 4), 2**40))": "OverflowError: make_train_step: batch: An int64 array of shape (8, 4) has values from",
        "step(state, (x, 2**31))": "OverflowError: make_train_step: batch[1]: An int64 array of shape () has values from",
        "step(state, (x, 2**64))": "OverflowError: make_train_step: batch[1]: 18446744073709551616 does not fit 64 bits. Give",
        'step(state, {1: x, "a": x})': "TypeError: make_train_step: a dict has the keys 1, 'a', which cannot be put in order, as JAX",
        'step(state, {"a": {1: x, "b": x}})': "TypeError: make_train_step: a dict has the keys 1, 'b', which cannot be put in order, as JAX",
        "step(state, Plain())": "TypeError: make_train_step: batch is of type Plain, which is neither an array nor a",
        "step(state, {x})": "TypeError: make_train_step: batch is of type set, which is neither an array nor a",
        "step(state, torch.utils.data.DataLoader([x]))": "TypeError: make_train_step: batch is of type DataLoader, which is neither an array nor a",
        "step(state, (y for y in [x]))": "TypeError: make_train_step: batch is of type generator, which is neither an array nor a",
        "step(state, jax.random.key(0))": "TypeError: make_train_step: batch: a random key of JAX (key<fry>) has no torch counterpart. Adapters take one as key=; a step",
        'step(state, x, skip_grad_norm="1")': "ValueError: make_train_step: skip_grad_norm must be a positive number, math.inf to skip only",
        "step(state, x, skip_grad_norm=0)": "ValueError: make_train_step: skip_grad_norm must be a positive number, math.inf to skip only",
        "step.prove(None, x)": "TypeError: make_train_step: state must be a TrainState, got NoneType.",
        "step.prove(donated, x)": "ValueError: make_train_step: this state was donated to an earlier call of the step.",
        "step.prove(other_state, x)": "ValueError: make_train_step: the state lacks layer.weight, layer.bias, so that it is of another model.",
        "step.prove(state, x, skip_grad_norm=0)": "ValueError: make_train_step: skip_grad_norm must be a positive number",
        "fit(prove_steps=-1)": "ValueError: fit: prove_steps must be an integer, 0 or more, got -1.",
        "fit(prove_steps=True)": "ValueError: fit: prove_steps must be an integer, 0 or more, got True.",
        "step.lower(None, x)": "TypeError: make_train_step: state must be a TrainState, got NoneType. step.init(seed=0) gives",
        "step.export(None)": "TypeError: export: state must be a TrainState, got NoneType. step.init(seed=0) gives",
        "step.export(other_state)": "ValueError: export: the state lacks layer.weight, layer.bias, so that it is of",
        "step.export(donated)": "ValueError: export: this state was donated to an earlier call of the step. Go on with",
        "evaluate(None, x)": "TypeError: make_eval_step: state must be a TrainState, got NoneType. step.init(seed=0) gives",
        "evaluate(other_state, x)": "ValueError: make_eval_step: the state lacks layer.weight, layer.bias, so that it is of another",
        "evaluate(donated, x)": "ValueError: make_eval_step: this state was donated to an earlier call of the step. Go on with",
        "evaluate.lower(None, x)": "TypeError: make_eval_step: state must be a TrainState, got NoneType. step.init(seed=0) gives",
        "jax.jit(lambda s: step(s, x))(state)": "NotImplementedError: make_train_step: the state is traced by a jax.jit or another transform",
        "jax.jit(lambda x: step(state, x))(jnp.ones((8, 4)))": "NotImplementedError: make_train_step: the batch is traced by a jax.jit or another transform",
        "jax.grad(lambda s: evaluate(s, x), allow_int=True)(state)": "NotImplementedError: make_eval_step: the state is traced by a jax.jit or another transform",
        "in_explicit(lambda: step(state, x))": "ValueError: make_train_step: every axis of the mesh that is current here, by jax.set_mesh or",
        "in_inference(lambda: run())": "ValueError: make_train_step: the loss does not depend on any trainable parameter. Something",
        "in_explicit(lambda: evaluate(state, x))": "ValueError: make_eval_step: every axis of the mesh that is current here, by jax.set_mesh or",
    },
    "losses": {
        "run(lambda model, batch: None)": "TypeError: make_train_step: loss_fn must return a scalar (a floating-point tensor of one",
        "run(lambda model, batch: mse(model, batch).detach())": "ValueError: make_train_step: the loss does not depend on any trainable parameter. Something",
        'run(lambda model, batch: (mse(model, batch), {"loss": 1.0}))': "ValueError: make_train_step: the step itself reports loss; name that metric otherwise.",
        'run(lambda model, batch: (mse(model, batch), {"name": "train"}))': "TypeError: make_train_step: metrics must be tensors or numbers, but loss_fn returns 'train'",
        'run(lambda model, batch: (mse(model, batch), {1: 2.0, "a": 3.0}))': "TypeError: make_train_step: metrics are named by strings, but loss_fn names one 1.",
        'run(lambda model, batch: (mse(model, batch), {"a": torch.ones(2).to_sparse()}))': "NotImplementedError: make_train_step: the loss uses 1 operator without a lowering to JAX:",
        "run(adds_parameter)": "NotImplementedError: The function adds scale to a module, with parameters that the state of a",
        "run(adds_module)": "NotImplementedError: The function adds extra to a module, with parameters that the state of a",
        "run(draws)": 'NotImplementedError: File "',
        "run_twice(reads_clock)": 'NotImplementedError: File "',
        "run_twice(reads_perf)": 'NotImplementedError: File "',
        "run(lambda model, batch: mse(model, batch.cuda()))": 'NotImplementedError: File "',
        "run(lambda model, batch: mse(model, batch) * random.random())": 'NotImplementedError: File "',
        'run(lambda model, batch: run()[1]["loss"])': "NotImplementedError: make_train_step: called within a function that is captured",
    },
    "make_eval_step": {
        "make_eval(Net)": "TypeError: make_eval_step: model must be a Module, got type.",
        "ts.make_eval_step(None, mse, mesh=mesh, plan=plan)": "TypeError: make_eval_step: model must be a Module, got NoneType.",
        "make_eval(loss_fn=None)": "TypeError: make_eval_step: loss_fn must be a Callable, got NoneType.",
        "make_eval(loss_fn=lambda batch: 0)": "TypeError: make_eval_step: loss_fn is called with (model, batch), but <lambda>(batch) cannot",
        "make_eval(mesh=None)": "TypeError: make_eval_step: mesh must be a jax.sharding.Mesh, got NoneType. Build one with",
        "make_eval(mesh=explicit)": "ValueError: make_eval_step: every mesh axis must be Auto, so that XLA may choose the shardings",
        "make_eval(plan={})": "TypeError: make_eval_step: plan must be a ShardingPlan, got dict.",
        "make_eval(local_batches=None)": "TypeError: make_eval_step: local_batches must be a bool, got NoneType.",
        'make_eval(batch_spec="batch")': "TypeError: make_eval_step: batch_spec must be a P or a Mapping or None, got str.",
        "make_eval(compile_cache=5)": "TypeError: make_eval_step: compile_cache must be a path, got int.",
        "make_eval(compiled=5)": "TypeError: make_eval_step: compiled must be a path, got int.",
    },
    "make_apply": {
        "apply()": "TypeError: make_apply: call apply(state, batch) or apply(batch), found apply(). Several inputs",
        "apply(state)": "TypeError: make_apply: call apply(state, batch) or apply(batch), found apply(TrainState).",
        "apply(x, state)": "TypeError: make_apply: call apply(state, batch) or apply(batch), found apply(Tensor, TrainState).",
        "apply(x, x)": """TypeError: make_apply: call apply(state, batch) or apply(batch), found apply(Tensor, Tensor). Several inputs are one batch: apply((x, y)) or apply({"x": x}).""",
        "apply(x=x)": "TypeError: make_apply: call apply(state, batch) or apply(batch), found apply(x=).",
    },
    "Checkpointer": {
        "ts.Checkpointer(None)": "TypeError: Checkpointer: directory must be a path, got NoneType.",
        'ts.Checkpointer("")': "ValueError: Checkpointer: directory is empty. Name a file or a directory.",
        'ts.Checkpointer("a\\0b")': "ValueError: Checkpointer: directory cannot be 'a\\x00b': embedded null byte. Name another path.",
        "ts.Checkpointer(file)": "NotADirectoryError: Checkpointer: directory must be a directory, but",
        'ts.Checkpointer(f"{file}/below")': "NotADirectoryError: Checkpointer: directory is",
        'ts.Checkpointer(folder + "/" + "a" * 300).save(state)': "ValueError: Checkpointer: directory cannot be '",
        "ts.Checkpointer(folder, keep=True)": "ValueError: Checkpointer: keep must be a positive integer, got True.",
        "ts.Checkpointer(folder, keep=0)": "ValueError: Checkpointer: keep must be a positive integer, got 0.",
        "ts.Checkpointer(folder, every=0)": "ValueError: Checkpointer: every must be a positive integer, got 0.",
        "ts.Checkpointer(folder, every=True)": "ValueError: Checkpointer: every must be a positive integer, got True.",
        'ts.Checkpointer(folder, asynchronous="no")': "TypeError: Checkpointer: asynchronous must be a bool, got str.",
        "ts.Checkpointer(saved.path(0))": "ValueError: Checkpointer:",
        "ts.Checkpointer(folder).restore(step)": "FileNotFoundError: Checkpointer: no whole checkpoint in",
        "saved.restore(None)": "TypeError: Checkpointer.restore: train_step must be a TrainStep, got NoneType. make_train_step",
        "restore(step=False)": "ValueError: Checkpointer.restore: step must be a number of steps, 0 or more, got False.",
        "restore(step=True)": "ValueError: Checkpointer.restore: step must be a number of steps, 0 or more, got True.",
        "restore(step=99)": "FileNotFoundError: Checkpointer: no checkpoint of step 99 in",
        "restore(step=10**30)": "FileNotFoundError: Checkpointer: no checkpoint of step 1000000000000000000000000000000 in",
        'restore(params_only="yes")': "TypeError: Checkpointer.restore: params_only must be a bool, got str.",
        'restore(params_only=True, seed="a")': "ValueError: Checkpointer.restore: seed must be an int of 32 bits, from 0 to 4294967295, got",
        "restore(params_only=True, seed=-1)": "ValueError: Checkpointer.restore: seed must be an int of 32 bits, from 0 to 4294967295, got -1.",
        'saved.path("x")': "ValueError: Checkpointer.path: step must be a number of steps, 0 or more, got 'x'.",
        "saved.path(-1)": "ValueError: Checkpointer.path: step must be a number of steps, 0 or more, got -1.",
        'saved.metrics("0")': "ValueError: Checkpointer.path: step must be a number of steps, 0 or more, got '0'.",
        "saved.metrics(99)": "ValueError: Checkpointer.metrics:",
        "saved.metrics(None)": "ValueError: Checkpointer.path: step must be a number of steps, 0 or more, got None.",
        "Checkpointer(folder).save(None)": "TypeError: Checkpointer.save: state must be a TrainState, got NoneType. A step returns one.",
        "Checkpointer(folder).save(donated)": "ValueError: Checkpointer: this state was donated to a step. Save it before, or save what the",
        "Checkpointer(folder).save(state, metrics=[1])": "TypeError: Checkpointer.save: metrics must be a Mapping, got list. Give numbers by name.",
        'Checkpointer(folder).save(state, metrics={"a": "x"})': "TypeError: Checkpointer.save: metrics must be numbers by name, got 'a': 'x'.",
    },
    "names of other libraries": {
        "ts.DDP(model)": "AttributeError: module 'torch_shard' has no attribute 'DDP'. Nothing wraps the model: a plan says what lies where, plan=ts.plans.replicated() of",
        "ts.fully_shard(model)": "AttributeError: module 'torch_shard' has no attribute 'fully_shard'. Nothing wraps the model: a plan says what lies where, plan=ts.plans.fsdp(model, mesh) of",
        "ts.Accelerator()": "AttributeError: module 'torch_shard' has no attribute 'Accelerator'. ts.make_train_step(model, loss_fn, optimizer, mesh=mesh, plan=plan) makes a step",
        "ts.Trainer(model)": "AttributeError: module 'torch_shard' has no attribute 'Trainer'. The loop is ts.fit(step, None, loader, steps=1000), or transformers' own: ts.hf.Trainer.",
        'ts.save(state, "a.pt")': "AttributeError: module 'torch_shard' has no attribute 'save'. torch.save(model.state_dict(), \"model.pt\") has the values of the last step. A run is saved",
        'ts.load("a.pt")': "AttributeError: module 'torch_shard' has no attribute 'load'. model.load_state_dict(...) reaches the next step.",
        "ts.init_process_group()": "AttributeError: module 'torch_shard' has no attribute 'init_process_group'. Processes are joined by ts.initialize()",
        "ts.init_device_mesh('cpu', (8,))": "AttributeError: module 'torch_shard' has no attribute 'init_device_mesh'. Devices with names for their axes are ts.make_mesh(batch=4, model=2).",
        "ts.vmap(mse)": "AttributeError: module 'torch_shard' has no attribute 'vmap'. It is called ts.jax_vmap.",
        "ts.visualize_sharding(x)": "AttributeError: module 'torch_shard' has no attribute 'visualize_sharding'. JAX draws which devices hold which part: jax.debug.visualize_array_sharding(tensor.jax())",
        "ts.anything": "AttributeError: module 'torch_shard' has no attribute 'anything'",
        "ts.fit(step, [x], steps=1)": "TypeError: fit: missing 1 required positional argument: 'loader'. Call it as fit(step, state, loader, steps=).",
        "ts.fit(step, None, [x], epochs=1)": "TypeError: fit: epochs= is called steps=, the number of batches of the whole run (epochs * len(loader)) here.",
        "ts.fit(step, None, [x], steps=1, max_norm=1.0)": "TypeError: fit: max_norm= is no argument of fit: it is clip_grad_norm= of make_train_step.",
        "ts.fit(step, None, [x], steps=1, collate_fn=torch.stack)": "TypeError: fit: collate_fn= is no argument of fit. Give ts.Rows(dataset, batch_size=32, collate_fn=...,",
        "ts.fit(step, None, [x], steps=1, prefecth=1)": "TypeError: fit: there is no argument prefecth=. Did you mean prefetch=?",
        "ts.make_train_step(model, mse, optax.sgd(0.1), mesh=mesh, plan=plan, gradient_accumulation_steps=2)": "TypeError: make_train_step: gradient_accumulation_steps= is called accumulate_steps= here.",
        "ts.make_train_step(model, mse, optax.sgd(0.1), mesh=mesh, plan=plan, bf16=True, lr=0.1)": "TypeError: make_train_step: bf16= is called compute_dtype=torch.bfloat16 here. lr= is no argument of make_train_step. The optimizer has the learning rate.",
        "ts.Checkpointer('x', save_steps=2)": "TypeError: Checkpointer: save_steps= is called every= here.",
    },
    "fit": {
        "ts.fit(None, state, [x], steps=1)": "TypeError: fit: step must be a TrainStep, got NoneType. make_train_step gives one.",
        "fit(evaluate)": "TypeError: fit: step must be a TrainStep, got EvalStep. make_train_step gives one.",
        "fit(state=(state, {}))": "TypeError: fit: state must be a TrainState or None, got tuple. step.init(seed=0) gives one.",
        "fit(state=donated)": "ValueError: fit: this state was donated to an earlier step or fit. Go on with the state that",
        "fit(state=other_state)": "ValueError: make_train_step: params of the state do not fit. layer.weight: missing layer.bias:",
        'fit(loader=[{"ids": [1, 2], "labels": 0}] * 8, batch_size=8)': "TypeError: fit: 'ids' of a row is a list of numbers, as tokenizers give it, of which a DataLoader makes no tensor (rows, length) but",
        "fit(loader=[([[1.0, 2.0]], 3)] * 8, batch_size=8)": "TypeError: fit: 0 of a row is a list of numbers",
        "fit(loader=5)": "TypeError: fit: a loader is an iterable of batches, or a function from a position to one, got",
        "fit(loader=[])": "ValueError: fit: the loader has no batches (drop_last=True, and too few rows?).",
        "fit(loader=lambda: [x])": "TypeError: fit: the loader, a function, is called with (position), but <lambda>() cannot be:",
        "fit(loader=lambda position: None)": "TypeError: fit: the loader, a function, must return an iterable of batches, got NoneType at",
        'fit(loader=[{1: x, "a": x}])': "TypeError: make_train_step: a dict has the keys 1, 'a', which cannot be put in order, as JAX",
        "fit(loader=[(x, 2**70)])": "OverflowError: make_train_step: batch[1]: 1180591620717411303424 does not fit 64 bits. Give",
        "fit(loader=data.TensorDataset(x))": "ValueError: fit: loader is a dataset of rows, TensorDataset. Say how many make a batch, batch_size=32",
        "fit(loader=data.Subset(data.TensorDataset(x), [0]))": "ValueError: fit: loader is a dataset of rows, Subset. Say how many make a batch,",
        "fit(eval_loader=data.TensorDataset(x))": "ValueError: fit: eval_loader is a dataset of rows, TensorDataset. Say how many make a batch,",
        "fit(loader=data.TensorDataset(x), batch_size=0)": "ValueError: fit: batch_size must be a positive integer, got 0.",
        "fit(loader=data.TensorDataset(x), batch_size=2.0)": "ValueError: fit: batch_size must be a positive integer, got 2.0.",
        "fit(loader=data.TensorDataset(x), batch_size=3)": "ValueError: fit: batch_size=3 is not a multiple of 2: mesh (batch=2) splits a batch into 2",
        "fit(loader=data.TensorDataset(x), batch_size=64)": "ValueError: fit: the dataset has 8 rows, fewer than batch_size=64.",
        "fit(loader=data.DataLoader(x), batch_size=2)": "TypeError: fit: a DataLoader makes batches itself. Give its dataset, or leave batch_size out.",
        "fit(loader=ts.Rows(x, batch_size=4), batch_size=2)": "ValueError: fit: batch_size is given twice: the Rows have batch_size=4.",
        "fit(loader=data.ChainDataset([]), batch_size=2)": "TypeError: fit: ChainDataset is an IterableDataset, of which rows cannot be chosen. A dataset has len",
        "fit(loader=iter([x]), batch_size=2)": "TypeError: fit: list_iterator is no dataset. A dataset has len(dataset) and dataset[index].",
        "fit(loader={0: x}, batch_size=2)": "TypeError: fit: dict is no dataset. A dataset has len(dataset) and dataset[index].",
        "fit(loader=[], batch_size=2)": "ValueError: fit: the dataset has no rows.",
        "fit(loader=data.Dataset(), batch_size=2)": "TypeError: fit: Dataset has no length. A dataset has len(dataset) and dataset[index].",
        "fit(loader=5, batch_size=2)": "TypeError: fit: int is no dataset. A dataset has len(dataset) and dataset[index].",
        "fit(loader=data.DataLoader(x, batch_size=2, sampler=data.DistributedSampler(x, num_replicas=2, rank=0)))": "ValueError: fit: the DistributedSampler of loader has num_replicas=2, rank=0, so that each",
        "fit(check_replicas_every=0)": "ValueError: fit: check_replicas_every must be a positive integer, got 0.",
        "fit(check_replicas_every=True)": "ValueError: fit: check_replicas_every must be a positive integer, got True.",
        "fit(steps=0)": "ValueError: fit: steps must be a positive integer, got 0.",
        "fit(steps=-1)": "ValueError: fit: steps must be a positive integer, got -1.",
        "fit(steps=10**30, loader=lambda position: [])": "ValueError: fit: the loader ended before the run did. Let it go on, or pass what starts anew",
        "fit(eval_loader=5)": "TypeError: fit: eval_loader must be an Iterable, got int. All of its batches are taken each",
        "fit(eval_loader=[])": "ValueError: fit: eval_loader has no batches. (An iterator is used up after one evaluation.)",
        "fit(eval_every=1)": "ValueError: fit: eval_every, eval_step, predict and compute_metrics are for an evaluation, which needs eval_loader.",
        "fit(eval_loader=[x], eval_every=0)": "ValueError: fit: eval_every must be a positive integer, got 0.",
        "fit(eval_loader=[x], eval_every=True)": "ValueError: fit: eval_every must be a positive integer, got True.",
        "fit(eval_loader=[x], eval_step=step)": "TypeError: fit: eval_step must be an EvalStep or None, got TrainStep. make_eval_step gives one.",
        "fit(eval_step=evaluate)": "ValueError: fit: eval_every, eval_step, predict and compute_metrics are for an evaluation, which needs eval_loader.",
        'fit(checkpointer="runs")': "TypeError: fit: checkpointer must be a Checkpointer or None, got str. Give",
        "fit(log=5)": "TypeError: fit: log must be a path, got int.",
        'fit(log="")': "ValueError: fit: log is empty. Name a file or a directory.",
        'fit(log="a\\0b")': "ValueError: fit: log cannot be 'a\\x00b': embedded null byte. Name another path.",
        "fit(log=file)": "NotADirectoryError: fit: log must be a directory, but",
        'fit(log=f"{file}/below")': "NotADirectoryError: fit: log is",
        "fit(log_every=0)": "ValueError: fit: log_every must be a positive integer, got 0.",
        "fit(log_every=True)": "ValueError: fit: log_every must be a positive integer, got True.",
        'fit(on_bad_step="ignore")': "ValueError: fit: on_bad_step must be one of 'raise', 'explain', 'stop', 'skip', got 'ignore'.",
        "fit(on_bad_step=None)": "ValueError: fit: on_bad_step must be one of 'raise', 'explain', 'stop', 'skip', got None.",
        'fit(skip_grad_norm="1")': "ValueError: fit: skip_grad_norm must be a positive number, math.inf to skip only what is not",
        "fit(skip_grad_norm=0)": "ValueError: fit: skip_grad_norm must be a positive number, math.inf to skip only what is not",
        "fit(seed=-1)": "ValueError: fit: seed must be an int of 32 bits, from 0 to 4294967295, got -1.",
        "fit(seed=jax.random.key(0))": "TypeError: fit: seed must be an int of 32 bits, got a random key of JAX. Give the number",
        "fit(seed=1.5)": "ValueError: fit: seed must be an int of 32 bits, from 0 to 4294967295, got 1.5.",
        "fit(prefetch=0)": "ValueError: fit: prefetch must be a positive integer, got 0.",
        "fit(prefetch=-1)": "ValueError: fit: prefetch must be a positive integer, got -1.",
        'fit(progress="yes")': "TypeError: fit: progress must be a bool or a Console, got str.",
    },
    "compare_with_torch": {
        "compare(model=None)": "TypeError: make_train_step: model must be a Module, got NoneType.",
        "compare(loss_fn=None)": "TypeError: make_train_step: loss_fn must be a Callable, got NoneType.",
        'compare(batch={1: x, "a": x})': "TypeError: make_train_step: a dict has the keys 1, 'a', which cannot be put in order, as JAX",
        "compare(batch=torch.ones(7, 4))": "ValueError: make_train_step: the batch cannot be split on mesh (batch=2). batch (7, 4): dim 0",
        "compare(mesh=None)": "TypeError: compare_with_torch: mesh must be a jax.sharding.Mesh, got NoneType. Build one with",
        "compare(mesh=explicit)": "ValueError: compare_with_torch: every mesh axis must be Auto, so that XLA may choose the",
        "compare(plan=None)": "TypeError: compare_with_torch: plan must be a ShardingPlan, got NoneType.",
        "compare(steps=0)": "ValueError: compare_with_torch: steps must be a positive integer, got 0.",
        "compare(steps=1.5)": "ValueError: compare_with_torch: steps must be a positive integer, got 1.5.",
        "compare(optimizer=sgd)": "ValueError: compare_with_torch: give optimizer and torch_optimizer both, for the same rule, or",
        "compare(torch_optimizer=torch.optim.SGD)": "ValueError: compare_with_torch: give optimizer and torch_optimizer both, for the same rule, or",
        'compare(optimizer="sgd", torch_optimizer=torch.optim.SGD)': "TypeError: compare_with_torch: optimizer must be an optimizer of torch.optim, such as",
        'compare(optimizer=sgd, torch_optimizer="sgd")': "TypeError: compare_with_torch: torch_optimizer must be a Callable, got str.",
        "compare(optimizer=sgd, torch_optimizer=torch.optim.SGD(model.parameters(), 0.1))": "TypeError: compare_with_torch: torch_optimizer must be a Callable, got SGD.",
        'compare(batch_spec=P("bach"))': "ValueError: make_train_step: batch_spec on mesh (batch=2): P('bach') names an axis that the",
        'compare(batch_spec="batch")': "TypeError: make_train_step: batch_spec must be a P or a Mapping or None, got str.",
        'compare(compute_dtype="bfloat16")': "ValueError: make_train_step: compute_dtype must be torch.bfloat16 or None, got bfloat16.",
        "compare(compute_dtype=torch.float16)": "ValueError: make_train_step: compute_dtype must be torch.bfloat16 or None, got torch.float16.",
        'comparison.raise_if_different("a")': "ValueError: raise_if_different: rtol must be a number of at least 0, got 'a'.",
        "comparison.raise_if_different(-1)": "ValueError: raise_if_different: rtol must be a number of at least 0, got -1.",
    },
    "prove": {
        "prove(model=None)": "TypeError: prove: model must be a Module, got NoneType.",
        'prove(model=Net().to("meta"))': "ValueError: prove: layer.weight, layer.bias on the meta device, so without values. Give the model values",
        "prove(loss_fn=None)": "TypeError: prove: loss_fn must be a Callable, got NoneType.",
        "prove(steps=0)": "ValueError: prove: steps must be a positive integer, got 0.",
        'prove(plans="fdsp")': "ValueError: prove: plans has 'fdsp', which is none of 'dp', 'fsdp', 'hsdp', 'fsdp_tp',",
        "prove(plans=3)": "TypeError: prove: plans must be a Sequence, got int.",
        'prove(plans={"mine": 3})': "TypeError: prove: plans['mine'] must be a ShardingPlan, or a function of a model and a mesh",
        "prove(plans={3: ts.plans.fsdp}, meshes=[mesh])": "TypeError: prove: a name in plans must be a str, got int.",
        'prove(plans={"mine": plan})': "ValueError: prove: give meshes=[...] for the plans mine: where they are to lie.",
        "prove(meshes=3)": "TypeError: prove: meshes must be a Sequence, got int.",
        "prove(meshes=[None])": "TypeError: prove: mesh must be a jax.sharding.Mesh, got NoneType. Build one with",
        'prove(plans=["hsdp"], meshes=[mesh])': 'ValueError: plans.hsdp: on the mesh (batch=2): replicate="replica" names no axis of it.',
        "prove(optimizer=sgd)": "ValueError: prove: give optimizer and torch_optimizer both, for the same rule, or neither.",
        'prove(optimizer="sgd", torch_optimizer=torch.optim.SGD)': "TypeError: prove: optimizer must be an optimizer of torch.optim, such as",
        'prove(optimizer=sgd, torch_optimizer="sgd")': "TypeError: prove: torch_optimizer must be a Callable, got str.",
        "prove(batch_spec=3)": "TypeError: make_train_step: batch_spec must be a P or a Mapping or None, got int.",
        "prove(compute_dtype=torch.float16)": "ValueError: make_train_step: compute_dtype must be torch.bfloat16 or None, got torch.float16.",
    },
    "explain_capture": {
        "ts.explain_capture(None, mse, x)": "TypeError: explain_capture: model must be a Module, got NoneType.",
        "ts.explain_capture(model, None, x)": "TypeError: explain_capture: loss_fn must be a Callable, got NoneType.",
        'ts.explain_capture(model, mse, {1: x, "a": x})': "TypeError: explain_capture: a dict has the keys 1, 'a', which cannot be put in order, as JAX",
        'ts.explain_capture(model, mse, x, train="yes")': "TypeError: explain_capture: train must be a bool, got str.",
        "ts.explain_capture(model, lambda batch: 0, x)": "TypeError: explain_capture: loss_fn is called with (model, batch), but <lambda>(batch) cannot",
        "ts.explain_capture(model, lambda model, batch: None, x)": "TypeError: explain_capture: loss_fn must return a scalar (a floating-point tensor of one",
    },
    "interop": {
        'ts.call_jax(jnp.sin, {1: x, "a": x})': "TypeError: call_jax: a dict has the keys 1, 'a', which cannot be put in order, as JAX does.",
        "ts.call_torch(nn.BatchNorm1d(4), jnp.ones((8, 4)))": "NotImplementedError: The captured function writes in place to tensors that it closes over, of shapes (), (4,), (4,), and the compiled program could not keep that.",
        "ts.jax_view(model)(weights_of(model), jnp.ones((8, 4)))": "TypeError: jax_view: the first argument is a dict of parameters of Net, and Net is called as in torch, with the parameters that it has. For a function of them write lambda params, *args: torch.func.functional_call(net, params, args) in place of net.",
        "ts.jax_view(model)({'layer.weight': jnp.ones((2, 4))}, jnp.ones((8, 4)))": "TypeError: jax_view: the first argument is a dict of parameters of Net,",
        "ts.call_torch(model, weights_of(model), jnp.ones((8, 4)))": "TypeError: call_torch: the first argument is a dict of parameters of Net,",
        "ts.jax_jit(model)(weights_of(model), x)": "TypeError: jax_jit: the first argument is a dict of parameters of Net,",
        "ts.jax_view(torch.nn.functional.relu)(jax.device_put(jnp.ones(8), on_explicit()))": "ValueError: jax_view: every mesh axis must be Auto, so that XLA may choose the shardings inside relu(), but 'batch' is Explicit. jax.make_mesh gives Explicit axes by default: build the mesh with torch_shard.make_mesh(batch=2) or pass axis_types=(AxisType.Auto,) * 1. Or let XLA choose there alone, and say how the results lie: jax.sharding.auto_axes(ts.jax_view(fn), out_sharding=P()).",
        "ts.jax_jit(torch.nn.functional.relu)(ts.torch_view(jax.device_put(jnp.ones(8), on_explicit())))": "ValueError: jax_jit: every mesh axis must be Auto, so that XLA may choose the shardings inside relu(), but 'batch' is Explicit.",
        "ts.call_torch(torch.nn.functional.dropout, jnp.ones(2))": "NeedsKey: dropout() draws random numbers: pass it a key (key=jax.random.key(seed)).",
        "ts.call_torch(torch.nn.functional.dropout, jnp.ones(2), key=5)": "TypeError: call_torch: key must be a random key of JAX, jax.random.key(seed), got 5.",
        'ts.call_torch(lambda x: x, {1: jnp.ones(2), "a": jnp.ones(2)})': "TypeError: call_torch: a dict has the keys 1, 'a', which cannot be put in order, as JAX does.",
        "ts.jax_view(torch.ones(2).to_sparse())": "TypeError: jax_view: value: A torch.sparse_coo tensor cannot move to the jax device; use",
        "ts.jax_view(torch.full((2,), 2**40))": "OverflowError: jax_view: value: An int64 array of shape (2,) has values from 1099511627776 to",
        "ts.jax_view(torch.ones(2, dtype=torch.float64))": "TypeError: jax_view: value: A float64 array of shape (2,) needs 64 bits, and JAX has them",
        'ts.jax_view({1: x, "a": x})': "TypeError: jax_view: a dict has the keys 1, 'a', which cannot be put in order, as JAX does.",
        'ts.torch_view({1: jnp.ones(2), "a": jnp.ones(2)})': "TypeError: torch_view: a dict has the keys 1, 'a', which cannot be put in order, as JAX does.",
        "ts.debug_print(5)": "TypeError: debug_print: fmt must be a str, got int.",
        'ts.debug_print("{} {}", x)': "ValueError: debug_print: '{} {}' cannot be formatted with 1 arguments and the names []:",
        'ts.debug_print("{name}", x)': "ValueError: debug_print: '{name}' cannot be formatted with 1 arguments and the names []:",
        'ts.debug_print("{", x)': "ValueError: debug_print: '{' cannot be formatted with 1 arguments and the names []: ValueError",
        "ts.jax_jit(None)": "TypeError: jax_jit: expected a torch callable, such as a function or a module, got None.",
        'ts.jax_jit(lambda x: {1: x, "a": x})(x)': "TypeError: jax_jit: a dict has the keys 1, 'a', which cannot be put in order, as JAX does.",
        "ts.jax_grad(lambda x: x.sum(), argnums=3)(x)": "ValueError: call_jax: argnums has 3, and the function was called with 1 arguments (argument 0).",
        "ts.jax_grad(lambda x: x.sum(), argnums=-3)(x)": "ValueError: call_jax: argnums has -3, and the function was called with 1 arguments (argument",
        "ts.jax_grad(lambda x: x.sum(), has_aux=True)(x)": "TypeError: jax_value_and_grad: with has_aux=True <lambda>() must return a pair of a scalar and",
        "ts.jax_grad(lambda x: x)(x)": "TypeError: jax_value_and_grad: <lambda>() must return a scalar floating-point tensor to be",
        "ts.jax_value_and_grad(lambda x: x.sum(), argnums=3)(x)": "ValueError: call_jax: argnums has 3, and the function was called with 1 arguments (argument 0).",
        "ts.jax_value_and_grad(lambda x: x.sum(), has_aux=True)(x)": "TypeError: jax_value_and_grad: with has_aux=True <lambda>() must return a pair of a scalar and",
        "ts.jax_checkpoint(None)": "TypeError: jax_checkpoint: expected a torch callable, such as a function or a module, got None.",
        'ts.jax_checkpoint(torch.relu, policy="dots")(x)': "TypeError: jax_checkpoint: policy must be a Callable or None, got str. jax.checkpoint_policies",
        "x.apply_jax_(lambda a: a[0])": "ValueError: apply_jax_ keeps shape and dtype: the tensor is (8, 4) torch.float32, the function",
        "x.shard_(None)": "TypeError: shard_: sharding must be a Sharding, got NoneType. Give NamedSharding(mesh,",
        "x.jax()": "TypeError: jax() gives the array of a jax-device tensor; this tensor is on the CPU: move it",
    },
    "maps": {
        "ts.jax_vmap(None)": "TypeError: jax_vmap: expected a torch callable, such as a function or a module, got None.",
        'ts.jax_vmap(torch.relu)({1: x, "a": x})': "TypeError: torch_shard: a dict has the keys 1, 'a', which cannot be put in order, as JAX does.",
        "ts.jax_pmap(None)": "TypeError: jax_pmap: expected a torch callable, such as a function or a module, got None.",
        "ts.jax_pmap(torch.relu, 5)": "TypeError: jax_pmap: axis_name must be a str or None, got int.",
        'ts.jax_pmap(torch.relu, devices="cpu")': "ValueError: jax_pmap: devices must be a sequence of different JAX devices, as in",
        "ts.jax_pmap(torch.relu, devices=[])": "ValueError: jax_pmap: devices must be a sequence of different JAX devices, as in",
        'ts.jax_pmap(torch.relu, static_broadcasted_argnums="0")(x)': "TypeError: jax_pmap: static_broadcasted_argnums must be a position of an argument, or a tuple",
        "ts.jax_pmap(torch.relu, static_broadcasted_argnums=5)(x)": "ValueError: jax_pmap: static_broadcasted_argnums has 5, and the function was called with 1",
        "ts.jax_pmap(torch.relu, donate_argnums=5)(x)": "ValueError: jax_pmap: donate_argnums has 5, and the function was called with 1 arguments",
        "ts.jax_shard_map(None, mesh=mesh, in_specs=P(), out_specs=P())": "TypeError: jax_shard_map: expected a torch callable, such as a function or a module, got None.",
        "ts.jax_shard_map(torch.relu, mesh=None, in_specs=P(), out_specs=P())": "TypeError: jax_shard_map: mesh must be a jax.sharding.Mesh, got NoneType. Build one with",
        "ts.jax_shard_map(torch.relu, mesh=explicit, in_specs=P(), out_specs=P())": "ValueError: jax_shard_map: every mesh axis must be Auto, so that XLA may choose the shardings",
        'ts.tpmap(None, "i", ["shard"])': "TypeError: tpmap: expected a torch callable, such as a function or a module, got None.",
        'ts.tpmap(torch.relu, 5, ["shard"])': "TypeError: tpmap: axis_name must be a str, got int.",
        'ts.tpmap(torch.relu, "i", "shard")': "ValueError: tpmap: argtypes[0] is 's', which is not a kind of argument. The kinds are 'broadcas",
        'ts.tpmap(torch.relu, "i", None)': "TypeError: tpmap: argtypes must be a Sequence, got NoneType.",
        'ts.tpmap(torch.relu, "i", ["shrad"])': "ValueError: tpmap: argtypes[0] is 'shrad', which is not a kind of argument. Did you mean",
        'ts.tpmap(torch.relu, "i", [None])': "ValueError: tpmap: argtypes[0] is None, which is not a kind of argument. The kinds are",
        'ts.tpmap(torch.relu, "i", [5])': "ValueError: tpmap: argtypes[0] is 5, which is not a kind of argument. The kinds are",
        'ts.tpmap(torch.relu, "i", ["shard"], ["shard"])': "TypeError: tpmap: kwargtypes must be a Mapping, got list.",
        'ts.tpmap(torch.relu, "i", ["shard"], {"x": "shrad"})': "ValueError: tpmap: kwargtypes['x'] is 'shrad', which is not a kind of argument. Did you mean",
        'ts.tpmap(torch.relu, "i", ["shard"], devices="cpu")(x)': "ValueError: tpmap: devices must be a sequence of different JAX devices, as in",
        'ts.tpmap(torch.relu, "i", ["shard"], devices=[])(x)': "ValueError: tpmap: devices must be a sequence of different JAX devices, as in",
        'ts.tpmap(torch.relu, "i", ["shard"], wrap_return="rng")': "ValueError: tpmap: wrap_return='rng' cannot be undone; 'shard', 'thru' can. Or pass a callable.",
        'ts.tpmap(torch.relu, "i", ["shard"], wrap_return=5)': "ValueError: tpmap: wrap_return is 5, which is not a kind of argument. The kinds are",
        'ts.tpmap(torch.relu, "i", ["shard"])("text")': "ValueError: tpmap: arguments of _VariableFunctionsClass.relu: argument 0 is 'text', which is",
        'ts.tpmap(torch.relu, "i", ["shard"])(None)': "ValueError: tpmap: arguments of _VariableFunctionsClass.relu: argument 0 is None: it holds no",
        'ts.tpmap(torch.relu, "i", ["shard"])()': "ValueError: tpmap: _VariableFunctionsClass.relu takes 1 positional arguments by its argtypes",
        "ts.unshard(None)": "ValueError: unshard: the tree holds no tensor, so there is nothing to take apart.",
        "ts.unshard(5)": "ValueError: unshard: every leaf needs a leading dim of devices, and the tensor () has none.",
        'ts.unshard("text")': "ValueError: unshard: every leaf needs a leading dim of devices, and the tensor () has none.",
        'ts.unshard(["a", "b"])': "ValueError: unshard: every leaf needs a leading dim of devices, and [0] (), [1] () has none.",
        "ts.unshard([])": "ValueError: unshard: the tree holds no tensor, so there is nothing to take apart.",
        'ts.unshard({1: x, "a": x})': "TypeError: unshard: a dict has the keys 1, 'a', which cannot be put in order, as JAX does.",
        "ts.unshard([torch.ones(2), torch.ones(3)])": "ValueError: unshard: the leading dims must have one size, the number of devices, got [0]: 2,",
        "ts.broadcast(None)": "TypeError: broadcast: model must be a Module, got NoneType.",
        'ts.broadcast(nn.Linear(2, 2, device="meta"))': "ValueError: broadcast: entries must be on the CPU, and these are not: weight (meta), bias (meta).",
        "ts.assert_replica_integrity(None)": "ValueError: assert_replica_integrity: the tree holds no tensor, so there is nothing to compare.",
        'ts.assert_replica_integrity("text")': "TypeError: assert_replica_integrity: the tensor is 'text'; the tree must hold tensors and",
        "ts.assert_replica_integrity(model)": "TypeError: assert_replica_integrity: the tensor is Net( (layer): Linear(in_features=4,",
        'ts.assert_replica_integrity({1: x, "a": x})': "TypeError: assert_replica_integrity: a dict has the keys 1, 'a', which cannot be put in order,",
        'ts.assert_replica_integrity(x, rtol="a")': "ValueError: assert_replica_integrity: rtol must be a number of at least 0, got 'a'.",
        "ts.assert_replica_integrity(x, rtol=-1)": "ValueError: assert_replica_integrity: rtol must be a number of at least 0, got -1.",
        "ts.assert_replica_integrity(x, atol=None)": "ValueError: assert_replica_integrity: atol must be a number of at least 0, got None.",
        'ts.assert_replica_integrity(x, device_axis="yes")': "TypeError: assert_replica_integrity: device_axis must be a bool, got str.",
        "ts.assert_replica_integrity(torch.tensor(1.0), device_axis=True)": "ValueError: assert_replica_integrity: the tensor is a scalar, and device_axis=True needs a",
        'ts.gather_from_jax_processes({1: x, "a": x})': "TypeError: gather_from_jax_processes: a dict has the keys 1, 'a', which cannot be put in",
    },
    "collectives": {
        'collectives.psum(x, "i")': "NameError: psum: axis 'i' is not bound here. Collectives work inside a function that is mapped",
        'collectives.psum("x", "i")': "NameError: psum: axis 'i' is not bound here. Collectives work inside a function that is mapped",
        'collectives.psum(x, ("i", "i"))': "ValueError: psum: ('i', 'i') names an axis twice.",
        'collectives.pmean(x, "i")': "NameError: pmean: axis 'i' is not bound here. Collectives work inside a function that is",
        'collectives.all_gather(x, "i", dim="0")': "NameError: all_gather: axis 'i' is not bound here. Collectives work inside a function that is",
        'collectives.all_gather(x, "i", to="all")': "NameError: all_gather: axis 'i' is not bound here. Collectives work inside a function that is",
        'collectives.axis_index("i")': "NameError: axis_index: axis 'i' is not bound here. Collectives work inside a function that is",
        'collectives.fold_in_axis("i")': "NameError: fold_in_axis: axis 'i' is not bound here. Collectives work inside a function that",
        'ts.jax_vmap(lambda x: collectives.psum("x", "i"), axis_name="i")(x)': "TypeError: psum: expected torch tensors, or a pytree of them, got str.",
        'ts.jax_vmap(lambda x: collectives.psum(x, "j"), axis_name="i")(x)': "NameError: psum: axis 'j' is not bound here. Collectives work inside a function that is mapped",
        'ts.jax_vmap(lambda x: collectives.pmean(x.long(), "i"), axis_name="i")(x)': "TypeError: pmean: a mean needs floating-point numbers, got torch.int64. Use x.float(), or psum.",
        'ts.jax_vmap(lambda x: collectives.pmax(x.to(torch.complex64), "i"), axis_name="i")(x)': "TypeError: pmax: complex numbers have no order, got torch.complex64.",
        'ts.jax_vmap(lambda x: collectives.psum_scatter(x, "i", dim=0), axis_name="i")(x)': "ValueError: psum_scatter: dim 0 of local shape (4,) is not a multiple of the axes {'i': 8}.",
        'ts.jax_vmap(lambda x: collectives.all_to_all(x, "i", split_dim=0, concat_dim=0), axis_name="i")(x)': "ValueError: all_to_all: dim 0 of local shape (4,) is not a multiple of the axes {'i': 8}.",
        'ts.jax_vmap(lambda x: collectives.ppermute(x, "i", [(0, 9)]), axis_name="i")(x)': "ValueError: ppermute: sources and destinations must be unique, of 0 to 7, got [(0, 9)].",
        'ts.jax_vmap(lambda x: collectives.ppermute(x, "i", [(0, 1), (0, 2)]), axis_name="i")(x)': "ValueError: ppermute: sources and destinations must be unique, of 0 to 7, got [(0, 1), (0, 2)].",
        'ts.jax_vmap(lambda x: collectives.axis_index(None), axis_name="i")(x)': "NameError: axis_index: axis None is not bound here. Collectives work inside a function that is",
    },
    "place, gather, materialize": {
        "ts.place(None, mesh, plan)": "TypeError: place: model_or_tree must be a Module or a Mapping, got NoneType.",
        'ts.place({"a": "text"}, mesh, plan)': "TypeError: ShardingPlan: 1 value cannot be read. a: str has no shape. Give a tensor, an array",
        'ts.place({"a": (2, 2)}, mesh, plan)': "TypeError: place: a must be a Tensor or a jaxlib._jax.Array or a ndarray, got tuple.",
        "ts.place(model, plan, mesh)": "TypeError: place: mesh must be a jax.sharding.Mesh, got ShardingPlan. Build one with",
        "ts.place(dict(model.named_parameters()), mesh, ts.plans.fsdp)": "TypeError: plans.fsdp: model must be a Module, got dict.",
        "ts.place(model, mesh, None)": "TypeError: place: plan must be a ShardingPlan, got NoneType.",
        "ts.place(model, explicit, plan)": "ValueError: place: every mesh axis must be Auto, so that XLA may choose the shardings inside a",
        'ts.place({"a": torch.ones(2, dtype=torch.float64)}, mesh, plan)': "TypeError: place: a are float64 or complex128 and need 64 bits, which JAX has switched off.",
        'ts.place({"a": torch.tensor([2**40])}, mesh, plan)': "OverflowError: place: a: An int64 array of shape (1,) has values from 1099511627776 to",
        'ts.place(nn.Linear(2, 2, device="meta"), mesh, plan)': "ValueError: place: weight, bias on the meta device, so without values. Give the model values",
        "ts.place(nn.Linear(2, 2).double(), mesh, plan)": "TypeError: place: weight, bias are float64 or complex128 and need 64 bits, which JAX has",
        'ts.gather({1: x, "a": x})': "TypeError: gather: a dict has the keys 1, 'a', which cannot be put in order, as JAX does. Give",
        "ts.gather(donated.params)": "ValueError: gather: an array of shape (2, 4) was donated to a step. Take what it returned.",
        "ts.materialize(None, mesh, plan)": "TypeError: materialize: model must be a module or a callable, got NoneType.",
        "ts.materialize(lambda: None, mesh, plan)": "TypeError: materialize: the callable must return a torch.nn.Module, got NoneType.",
        "ts.materialize(lambda n: Net(), mesh, plan)": "TypeError: materialize: model is called with (), but <lambda>(n) cannot be: missing a required",
        "ts.materialize(model, plan, mesh)": "TypeError: materialize: mesh must be a jax.sharding.Mesh, got ShardingPlan. Build one with",
        "ts.materialize(model, mesh, None)": "TypeError: materialize: plan must be a ShardingPlan, got NoneType.",
        "ts.materialize(Net, mesh, plan, seed=1.5)": "ValueError: materialize: seed must be an int of 32 bits, from 0 to 4294967295, got 1.5.",
        "ts.materialize(Net, mesh, plan, seed=2**32)": "ValueError: materialize: seed must be an int of 32 bits, from 0 to 4294967295, got 4294967296.",
        "ts.materialize(Net, mesh, plan, seed=jax.random.key(0))": "TypeError: materialize: seed must be an int of 32 bits, got a random key of JAX. Give the number",
        'ts.materialize(Net, mesh, plan, seed="a")': "ValueError: materialize: seed must be an int of 32 bits, from 0 to 4294967295, got 'a'.",
        'ts.materialize(Net, mesh, plan, init="reset_parameters")': "TypeError: materialize: init= is for modules on the meta device; a constructor initialises by",
        'ts.materialize(nn.Linear(2, 2, device="meta"), mesh, plan)': "ValueError: materialize: a module on the meta device does not say how its values come about.",
        'ts.materialize(nn.Linear(2, 2, device="meta"), mesh, plan, init=5)': "TypeError: materialize: init must be a str or a Callable or None, got int. It names a method",
        'ts.materialize(nn.Linear(2, 2, device="meta"), mesh, plan, init="reset")': 'ValueError: materialize: init="reset" must name a method of the module or of one in it, and',
        'ts.materialize(nn.Linear(2, 2, device="meta"), mesh, plan, init="")': 'ValueError: materialize: init="" must name a method of the module or of one in it, and Linear',
        'ts.materialize(nn.Linear(2, 2, device="meta"), mesh, plan, init=lambda: 0)': "TypeError: materialize: init is called with (module), but <lambda>() cannot be: too many",
    },
    "weights": {
        "ts.load_safetensors(None, model, mesh, plan)": "TypeError: load_safetensors: path must be a path, got NoneType.",
        'ts.load_safetensors("", model, mesh, plan)': "ValueError: load_safetensors: path is empty. Name a file or a directory.",
        'ts.load_safetensors("a\\0b", model, mesh, plan)': "ValueError: load_safetensors: path cannot be 'a\\x00b': embedded null byte. Name another path.",
        'ts.load_safetensors("nowhere", model, mesh, plan)': "FileNotFoundError: load_safetensors: nowhere does not exist.",
        "ts.load_safetensors(folder, model, mesh, plan)": "FileNotFoundError: load_safetensors:",
        "ts.load_safetensors(file, model, mesh, plan)": "ValueError: load_safetensors:",
        'ts.load_safetensors(f"{file}/below", model, mesh, plan)': "NotADirectoryError: load_safetensors: path is",
        "ts.load_safetensors(weights, None, mesh, plan)": "TypeError: load_safetensors: model_or_names must be a Module or a Mapping, got NoneType.",
        "ts.load_safetensors(weights, model, plan, mesh)": "TypeError: load_safetensors: mesh must be a jax.sharding.Mesh, got ShardingPlan. Build one",
        "ts.load_safetensors(weights, model, mesh, None)": "TypeError: load_safetensors: plan must be a ShardingPlan, got NoneType.",
        "ts.load_safetensors(weights, model, explicit, plan)": "ValueError: load_safetensors: every mesh axis must be Auto, so that XLA may choose the",
        "ts.load_safetensors(weights, model, mesh, plan, rename=5)": "TypeError: load_safetensors: rename must be a Mapping or a Callable or None, got int.",
        "ts.load_safetensors(weights, model, mesh, plan, rename=lambda name: 5)": "TypeError: load_safetensors: rename must give strings, or None to drop a name, but gives",
        "ts.load_safetensors(weights, model, mesh, plan, rename=lambda: None)": "TypeError: load_safetensors: rename is called with (name), but <lambda>() cannot be: too many",
        'ts.load_safetensors(weights, model, mesh, plan, rename={"x": "y"})': "ValueError: load_safetensors:",
        'ts.load_safetensors(weights, model, mesh, plan, rename={"layer.weight": 5})': "TypeError: load_safetensors: rename must give strings, or None to drop a name, but gives",
        'ts.load_safetensors(weights, model, mesh, plan, rename={5: "layer.weight"})': "ValueError: load_safetensors:",
        'ts.load_safetensors(weights, model, mesh, plan, dtype="bfloat16")': "TypeError: load_safetensors: dtype must be a floating-point torch.dtype such as",
        "ts.load_safetensors(weights, model, mesh, plan, allow_missing=5)": "TypeError: load_safetensors: allow_missing must be an Iterable or a bool, got int. Give names",
        "ts.load_safetensors(weights, model, mesh, plan, allow_missing=[5])": "TypeError: load_safetensors: a pattern of allow_missing must be a str, got int.",
        'ts.load_safetensors(weights, model, mesh, plan, allow_unused="nothing")': "ValueError: load_safetensors:",
        "ts.load_safetensors(weights, model, mesh, plan, allow_unused=[None])": "TypeError: load_safetensors: a pattern of allow_unused must be a str, got NoneType.",
        'ts.load_safetensors(weights, {"layer.weight": 5}, mesh, plan)': "TypeError: ShardingPlan: 1 value cannot be read. layer.weight: int has no shape. Give a",
        "ts.load_safetensors(weights, {1: x}, mesh, plan)": "TypeError: ShardingPlan: 1 value cannot be read. 1: a name must be a string, got int.",
        "ts.load_torch(None, model, mesh, plan)": "TypeError: load_torch: path must be a path, got NoneType.",
        'ts.load_torch("", model, mesh, plan)': "ValueError: load_torch: path is empty. Name a file or a directory.",
        'ts.load_torch("nowhere", model, mesh, plan)': "FileNotFoundError: load_torch: nowhere does not exist.",
        'ts.load_torch("a\\0b", model, mesh, plan)': "ValueError: load_torch: path cannot be 'a\\x00b': embedded null byte. Name another path.",
        "ts.load_torch(file, model, mesh, plan)": "ValueError: load_torch:",
        "ts.load_torch(folder, model, mesh, plan)": "FileNotFoundError: load_torch:",
        "ts.load_torch({}, model, mesh, plan)": "ValueError: load_torch: the mapping cannot be loaded as asked; nothing was. layer.weight (2,",
        'ts.load_torch({"a": 5}, model, mesh, plan)': "ValueError: load_torch: the mapping must hold tensors by name, and nothing else. It holds 'a':",
        "ts.load_torch({1: x}, model, mesh, plan)": "ValueError: load_torch: the mapping must hold tensors by name, and nothing else. It holds 1:",
        "ts.load_torch(model.state_dict(), mesh, model, plan)": "TypeError: load_torch: mesh must be a jax.sharding.Mesh, got Net. Build one with",
        "ts.load_torch(model.state_dict(), model, mesh, plan, dtype=5)": "TypeError: load_torch: dtype must be a floating-point torch.dtype such as torch.bfloat16, got",
        "ts.load_torch(model.state_dict(), model, mesh, plan, rename=[1])": "TypeError: load_torch: rename must be a Mapping or a Callable or None, got list.",
        "ts.export_safetensors(None, folder)": "TypeError: export_safetensors: expected a TrainState, a module or a mapping, got NoneType.",
        "ts.export_safetensors(folder, model)": "TypeError: export_safetensors: path must be a path, got Net.",
        "ts.export_safetensors(donated, folder)": "ValueError: export_safetensors: this state was donated to a step. Export what the step",
        'ts.export_safetensors(model, "")': "ValueError: export_safetensors: path is empty. Name a file or a directory.",
        'ts.export_safetensors(model, "a\\0b")': "ValueError: export_safetensors: path cannot be 'a\\x00b': embedded null byte. Name another path.",
        "ts.export_safetensors(model, file)": "NotADirectoryError: export_safetensors: path must be a directory, but",
        'ts.export_safetensors(model, f"{file}/below")': "NotADirectoryError: export_safetensors: path is",
        'ts.export_safetensors(model, f"{file}/below.safetensors")': "NotADirectoryError: export_safetensors: path is",
        'ts.export_safetensors(model, folder + "/" + "a" * 300 + ".safetensors")': "ValueError: export_safetensors: path cannot be '",
        "ts.export_safetensors(model, folder, max_shard_bytes=0)": "ValueError: export_safetensors: max_shard_bytes must be a positive integer, got 0.",
        "ts.export_safetensors(model, folder, max_shard_bytes=-1)": "ValueError: export_safetensors: max_shard_bytes must be a positive integer, got -1.",
        'ts.export_safetensors(model, folder, metadata=["a"])': "TypeError: export_safetensors: metadata must be a Mapping or None, got list.",
        'ts.export_safetensors(model, folder, metadata={"a": 1})': "TypeError: export_safetensors: metadata must map strings to strings, got {'a': 1}.",
        'ts.export_safetensors({"a": 5}, folder)': "TypeError: export_safetensors: names must lead to tensors or arrays, but a is a int.",
        "ts.export_safetensors({1: x}, folder)": "TypeError: export_safetensors: 1 cannot be names in a file. Names must be other strings.",
        'ts.export_safetensors({"__metadata__": x}, folder)': "TypeError: export_safetensors: '__metadata__' cannot be names in a file. Names must be other",
        'ts.export_safetensors({"a": x.to_sparse()}, folder)': "TypeError: export_safetensors: files hold dense tensors, but not a (torch.sparse_coo). Use",
        'ts.export_safetensors(nn.Linear(2, 2, device="meta"), folder)': "ValueError: export_safetensors: weight, bias on the meta device, so without values. Give the",
        'ts.export_torch(None, folder + "/a.pt")': "TypeError: export_torch: expected a TrainState, a module or a mapping, got NoneType.",
        "ts.export_torch(model, None)": "TypeError: export_torch: path must be a path, got NoneType.",
        'ts.export_torch(model, "")': "ValueError: export_torch: path is empty. Name a file or a directory.",
        "ts.export_torch(model, folder)": "IsADirectoryError: export_torch: path must be a file, but",
        'ts.export_torch(model, "a\\0b")': "ValueError: export_torch: path cannot be 'a\\x00b': embedded null byte. Name another path.",
        'ts.export_torch(model, f"{file}/below.pt")': "NotADirectoryError: export_torch: path is",
        'ts.export_torch(donated, folder + "/a.pt")': "ValueError: export_torch: this state was donated to a step. Export what the step returned.",
        'ts.export_torch({"a": 5}, folder + "/a.pt")': "TypeError: export_torch: names must lead to tensors or arrays, but a is a int.",
    },
    "command line": {
        'cli("demo", "--mesh", "batch")': "BadParameter: expected a positive size for each of the axes batch and model, as in",
        'cli("demo", "--mesh", "batch=0,model=1")': "BadParameter: expected a positive size for each of the axes batch and model, as in",
        'cli("demo", "--mesh", "rows=4,model=2")': "BadParameter: expected a positive size for each of the axes batch and model, as in",
        'cli("demo", "--steps", "0")': "BadParameter: Input should be greater than or equal to 1",
        'cli("demo", "--steps", "many")': "BadParameter: Input should be a valid integer, unable to parse string as an integer",
        'cli("demo", "--seed", "-1")': "BadParameter: Input should be greater than or equal to 0",
        'cli("demo", "--seed", 2**40)': "BadParameter: Input should be less than or equal to 2147483647",
        'cli("demo", "--out", file)': "BadParameter: cannot write to",
        'cli("demo", "--out", f"{file}/below")': "BadParameter: cannot write to",
        'cli("inspect")': "MissingParameter: Missing parameter: checkpoint",
        'cli("inspect", "nowhere")': "BadParameter: there is no file nowhere.",
        'cli("inspect", "")': "BadParameter: . is not a checkpoint and holds none (directories such as step_00000100).",
        'cli("inspect", file)': "BadParameter:",
        'cli("inspect", folder)': "BadParameter:",
        'cli("inspect", "a\\0b")': "BadParameter: Value error, embedded null byte",
        'cli("tutorials", "nothing")': r"UsageError: Got unexpected extra argument",
        'cli("wrong")': "UsageError: No such command 'wrong'.",
    },
}
"""By what is called: the call, and how its error begins, after the name of its class. Of text, each run of white space counts as one space."""

RAISED: dict[str, str] = {
    "step(state, None)": "TypeError",
    'step(state, "text")': "TypeError",
    "step(state, 5)": "RuntimeError",
    "step(state, torch.ones(8, 5))": "RuntimeError",
    "step(state, torch.ones(8, 4, dtype=torch.int64))": "RuntimeError",
    'evaluate(state, "text")': "TypeError",
    "fit(loader=[None])": "TypeError",
    "fit(eval_loader=[None])": "TypeError",
    "ts.explain_capture(model, mse, None)": "TypeError",
    'ts.explain_capture(model, mse, "text")': "TypeError",
}
"""Calls in which the user's own code raises, and the class: the error stays torch's, and a note says for which batch."""

ACCEPTED = (
    "step.init(seed=2**32 - 1)",
    "step.init(seed=np.int64(3))",
    "restore(step=np.int64(0), params_only=True, seed=np.uint32(7))",
    "fit(seed=np.int32(3), steps=np.int64(1))",
    "make(batch_spec=P(('batch',)))",
    "make(loss_fn=functools.partial(mse))",
    "make(loss_fn=lambda *args: mse(*args))",
    "make(loss_fn=torch.nn.Module())",
    "ts.Checkpointer(folder, keep=None)",
    "ts.Checkpointer(f'{folder}/to/be/made')",
    "in_inference(lambda: evaluate(state, x))",
    "in_explicit(lambda: step.init(seed=0))",
    "run(lambda model, batch: (mse(model, batch), {'a': np.float64(0.1), 'b': True, 'c': np.ones(2), 'd': 3}))",
    "ts.make_mesh(jax.devices()[:2], batch=2)",
    "ts.jax_jit(torch.relu, static_argnums=(), donate_argnums=0)(x)",
    "ts.jax_view('text')",
    "ts.debug_print('{:.3f} {x[0]} {}', x[0, 0], 5, x=x)",
)
"""Calls that are near to the refused ones, and right."""
