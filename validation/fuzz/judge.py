"""A random program against eager torch: right, refused, foreign or wrong."""

import contextlib
import copy
import dataclasses
from typing import Any
from unittest import mock

import jax
import numpy as np
import torch
from torch import nn

import torch_shard as ts
from tests.oracles.experts import any_grouped_mm
from torch_shard._lowering.ops.expert_dispatch import Exchange
from validation.fuzz.programs import OPTIMIZERS, ROUTED, Case, draw
from validation.judging import Verdict, ended_by, is_ours

EXACT = 1e-9
"""Of the largest entry: float64 sums of some hundred terms in another order, through a few layers."""

ROUGH = 0.1
"""Of the norm, where bfloat16 rounds what an other order of sums or of casts makes: an error of layout is about 1."""

NUM_STEPS = 2


def judge(case: Case) -> Verdict:
    """Run a case in this process."""
    always = mock.patch.object(Exchange, "moves_tokens", return_value=True)
    with jax.enable_x64(True), any_grouped_mm(), always if case.option("dispatch") else contextlib.nullcontext():
        try:
            return _compared(case)
        except Exception as error:
            return ended_by(error, ours=is_ours(error) or _is_torchs(case, error))


def judge_seed(seed: int) -> Verdict:
    """Run what a seed draws in this process."""
    return judge(draw(seed))


def _is_torchs(case: Case, error: Exception) -> bool:
    """Whether eager torch says the same of the program; in mixed precision, where its own words differ, at all."""
    dtype, model, batch = case.option("compute_dtype"), case.make_model(), case.make_batch()
    if dtype is not None and case.option("mixed_precision") == "params":
        for parameter in model.parameters():
            parameter.data = parameter.to(dtype)
        for module in model.modules():  # torch's own layers take what comes in their dtype
            if type(module).__module__.startswith("torch.nn"):
                module.register_forward_pre_hook(lambda _, args: _cast(args, dtype))
    try:
        with torch.autocast("cpu", dtype, enabled=dtype is not None and case.option("mixed_precision") != "params"):
            _loss_of(case, model, batch)
    except Exception as own:
        return type(own) is type(error) and (dtype is not None or str(own).splitlines()[0] in str(error))
    return False


def _cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args)


def _compared(case: Case) -> Verdict:
    model = case.make_model()
    step = case.make_step(model)
    if "dropout" in case.blocks:
        _order_gradients(model)
        return _proved(case, step)
    found = _run(case, step)
    for name, value in model.state_dict().items():
        last = found.get(f"{name} {NUM_STEPS - 1}")  # a tie is there by its first name alone
        if last is not None and not np.array_equal(value.cpu().double().numpy(), last, equal_nan=True):
            return Verdict("wrong", f"the model has another {name} than the last state")
    if not case.is_exact:
        alone = _run(case, _on_one_device(case))
        return Verdict("right") if _chooses(case) else _rounded(found, alone, case)
    wanted = _eager(case)
    verdict = _apart(found, wanted, case)
    if verdict.kind == "wrong":  # what rounding of the inputs alone makes of it
        noise = _distances(_eager(case, noise=1e-14), wanted)
        largest = max(noise.values())  # after a step that magnifies it, everything has it
        distances = _distances(found, wanted)
        limits = {name: size if name.endswith(" 0") else largest for name, size in noise.items()}
        if all(size <= max(EXACT, 1e3 * limits[name]) for name, size in distances.items()):
            return Verdict("right", "but for rounding, which it magnifies")
    return verdict


def _rounded(found: dict[str, np.ndarray], alone: dict[str, np.ndarray], case: Case) -> Verdict:
    """Of bfloat16 on a mesh and on one device: apart only if the mesh is farther from what float64 gives.

    Of the first step and its update: what that has rounded, the second may magnify.
    """
    found, alone = ({n: value for n, value in run.items() if n.endswith(" 0")} for run in (found, alone))
    verdict = _apart(found, alone, case)
    if verdict.kind == "right":
        return verdict
    exact = {
        name: value for name, value in case.options.items() if name not in ("dtype", "compute_dtype", "mixed_precision")
    }
    wanted = _eager(dataclasses.replace(case, options=exact))
    wanted = {name: wanted[name] for name in alone}
    ours, rounding = _distances(found, wanted), _distances(alone, wanted)
    return Verdict("right") if all(size <= 2 * rounding[name] + ROUGH / 10 for name, size in ours.items()) else verdict


def _chooses(case: Case) -> bool:
    """Whether a rounded value may become another one at a jump: another expert, another order."""
    kinds = [kind for kind, _ in case.blocks.values()]
    return any(kind in ("experts", "function", "pool", "repeated", *ROUTED) for kind in kinds) or case.kind == "bags"


def _on_one_device(case: Case) -> ts.TrainStep:
    sizes = tuple((axis, 1) for axis, _ in case.mesh)
    alone = dataclasses.replace(case, mesh=sizes)
    return alone.make_step(alone.make_model())


def _proved(case: Case, step: ts.TrainStep) -> Verdict:
    """By the step itself, which lets eager torch draw as it does."""
    comparison = step.prove(step.init(seed=0), case.make_batch())
    limit = EXACT if case.is_exact else ROUGH
    rows = [row for row in comparison.rows if not row.worst <= limit]
    if rows and case.is_exact and max(map(abs, comparison.losses)) > EXACT:  # of less, all is rounding
        return Verdict("wrong", ", ".join(f"{row.kind} {row.name} {row.worst:.0e}" for row in rows[:4]))
    return Verdict("right")


def _run(case: Case, step: ts.TrainStep) -> dict[str, np.ndarray]:
    """Losses, metrics, parameters and buffers of some steps, and of an evaluation."""
    state, found = step.init(seed=0), {}
    guard = {"skip_grad_norm": case.option("guard")} if case.option("guard") else {}
    for number in range(NUM_STEPS):
        state, metrics = step(state, case.make_batch(number), **guard)
        found[f"loss {number}"] = np.asarray(metrics["loss"])
        found |= {f"{name} {number}": np.asarray(state.tensors[name]) for name in state.tensors}
    if case.option("evaluate"):
        found["evaluation"] = np.asarray(step.evaluation()(state, case.make_batch(7))["loss"])
    return {name: value.astype(np.float64) for name, value in found.items()}


def _eager(case: Case, noise: float = 0.0) -> dict[str, np.ndarray]:
    """The same of eager torch, with optax on one device."""
    model, found = case.make_model(), {}
    _order_gradients(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = OPTIMIZERS[case.option("optimizer", "sgd")]()
    opt_state = optimizer.init(_arrays(trained))
    for number in range(NUM_STEPS):
        x, weights = case.make_batch(number)
        x = x * (1 + noise * torch.sin(torch.arange(x.numel()).view(x.shape))) if x.is_floating_point() else x
        if noise:
            with torch.no_grad():
                for parameter in trained.values():
                    parameter.mul_(1 + noise)
        loss = _loss_of(case, model, (x, weights))
        given = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        used = [name for name, grad in zip(trained, given, strict=True) if grad is not None]
        grads = {
            n: np.zeros(p.shape) if g is None else g.numpy() for (n, p), g in zip(trained.items(), given, strict=True)
        }
        updates, opt_state = optimizer.update(grads, opt_state, _arrays(trained))
        with torch.no_grad():
            for name in used:
                trained[name] += torch.from_numpy(np.asarray(updates[name]).copy())
        found[f"loss {number}"] = loss.detach().numpy()
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found |= {f"{name} {number}": tensor.detach().clone().numpy() for name, tensor in held.items()}
    if case.option("evaluate"):
        with torch.no_grad():
            found["evaluation"] = _loss_of(case, copy.deepcopy(model).eval(), case.make_batch(7)).numpy()
    return {name: value.astype(np.float64) for name, value in found.items()}


def _order_gradients(model: nn.Module) -> None:
    """The backward pass of norms errs in torch 2.13, on the CPU, where gradients are not contiguous."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase):
            module.register_forward_hook(lambda module, args, out: _InOrder.apply(out))


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].contiguous()


def _loss_of(case: Case, model: nn.Module, batch: Any) -> torch.Tensor:
    result = case.loss(model, batch)
    return result[0] if isinstance(result, tuple) else result


def _arrays(tensors: dict[str, nn.Parameter]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def _distances(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    """By name, relative to the largest entry, or to one where that is smaller."""
    assert found.keys() >= wanted.keys(), wanted.keys() - found.keys()
    return {name: _distance(found[name], value) for name, value in wanted.items()}


def _distance(found: np.ndarray, wanted: np.ndarray) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.nan_to_num(np.abs(found - wanted), nan=np.inf)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    largest = np.abs(wanted, where=np.isfinite(wanted), out=np.ones_like(wanted)).max(initial=1)
    return float((np.where(same, 0, apart) / largest).max(initial=0))


def _apart(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], case: Case) -> Verdict:
    limit = EXACT if case.is_exact else ROUGH
    distances = {name: size for name, size in _distances(found, wanted).items() if size > limit}
    if not distances:
        return Verdict("right")
    first = {name: size for name, size in distances.items() if name.endswith(" 0")} or distances
    worst = sorted(first.items(), key=lambda item: -item[1])[:4]
    return Verdict("wrong", ", ".join(f"{name}: {size:.0e}" for name, size in worst))
