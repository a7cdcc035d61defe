"""Training by eager torch and by a step of ours side by side: compare_with_torch, and the table it returns."""

import contextlib
import dataclasses
import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
import optax
import torch
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as torch_pytree

from torch_shard._common.caller import public
from torch_shard._common.convert import host_array
from torch_shard._common.types import PyTree
from torch_shard._device import to_cpu
from torch_shard._sharding import LossFn, ShardingPlan, describe_mesh, make_mesh
from torch_shard._train import TrainState, TrainStep, make_train_step, split_loss

MAX_ROWS = 30


@dataclasses.dataclass(frozen=True)
class Difference:
    """Distance of one value from its reference, as `max |a - b|` over the largest entry of the reference.

    Attributes:
        kind: "loss", "metric", "gradient", "parameter" or "buffer".
        name: Of the parameter, buffer or metric.
        size: Largest absolute entry of the reference.
        one_device: Difference on a single device; None where that is the reference.
        mesh: Difference on the mesh.
    """

    kind: str
    name: str
    size: float
    one_device: float | None
    mesh: float

    @property
    def worst(self) -> float:
        """The larger of the two."""
        return max(self.mesh, self.one_device or 0.0)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences that `compare_with_torch` found; print it with `rich.print` or `print`.

    Attributes:
        rows: One for each loss, metric, gradient, parameter and buffer, the largest difference first.
        reference: What the others are compared with: "eager torch", or "one device" if the loss draws random numbers.
        mesh: The mesh.
        tolerance: What rounding explains, by the lowest precision at work.
        losses: Of the reference, at each step.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> found = ts.compare_with_torch(
        ...     torch.nn.Linear(4, 2), lambda model, batch: model(batch).square().mean(), torch.ones(8, 4),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> found.reference, sorted({row.kind for row in found.rows}), found.rows[0].worst <= found.tolerance
        ('eager torch', ['gradient', 'loss', 'parameter'], True)
    """

    rows: tuple[Difference, ...]
    reference: str
    mesh: str
    tolerance: float
    losses: tuple[float, ...]

    def raise_if_different(self, rtol: float | None = None) -> None:
        """Raise if anything differs by more than `rtol`.

        Args:
            rtol: The largest difference that is allowed, relative to the largest entry of the reference; by default
                `tolerance`.

        Raises:
            AssertionError: With the names and how far they are apart.
        """
        limit = self.tolerance if rtol is None else rtol
        beyond = [row for row in self.rows if not row.worst <= limit]
        if beyond:
            lines = [f"  {row.kind} {row.name}: {_where(row)}" for row in beyond[:MAX_ROWS]]
            raise AssertionError(
                f"{len(beyond)} of {len(self.rows)} values differ from {self.reference} by more than {limit:.0e} of "
                f"their largest entry:\n" + "\n".join(lines)
            )

    def __rich__(self) -> Table:
        table = Table(title=f"Differences from {self.reference}, relative to the largest entry")
        for column in ("", "name", "largest entry", "one device", self.mesh):
            table.add_column(column, justify="left" if column in ("", "name") else "right", overflow="fold")
        for row in self.rows[:MAX_ROWS]:
            colour = "green" if row.worst <= self.tolerance else "red"
            one = "-" if row.one_device is None else f"{row.one_device:.1e}"
            table.add_row(row.kind, row.name, f"{row.size:.2e}", one, f"{row.mesh:.1e}", style=colour)
        if len(self.rows) > MAX_ROWS:
            table.caption = f"and {len(self.rows) - MAX_ROWS} more with smaller differences"
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=110)
        console.print(self)
        return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def _where(row: Difference) -> str:
    if row.one_device is None:
        return f"{row.mesh:.1e} on the mesh"
    return f"{row.one_device:.1e} on one device, {row.mesh:.1e} on the mesh"


ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Relative differences that the order of sums explains, by the lowest precision at work."""

Values = dict[tuple[str, str], np.ndarray]  # by kind and name


@public
def compare_with_torch(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: PyTree,
    *,
    mesh: Mesh,
    plan: ShardingPlan,
    steps: int = 1,
    optimizer: optax.GradientTransformation | None = None,
    torch_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    batch_spec: PartitionSpec | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Comparison:
    """Train copies of a model on one batch by eager torch on the CPU, on one device and on the mesh, and compare.

    Args:
        model: Any module with values, on the CPU or the jax device; it is left as it is.
        loss_fn: `loss_fn(model, batch)`, plain torch; returns what `make_train_step` takes.
            If it draws random numbers (dropout), torch's are others than JAX's, so one device is compared with the
            mesh alone.
        batch: A pytree of CPU tensors, of global sizes.
        mesh: Devices with Auto axes, from `make_mesh`.
        plan: Which parameter and buffer is split how, by name.
        steps: How many steps to take on this batch.
        optimizer: Of optax, by default plain gradient descent with a rate of 0.01.
        torch_optimizer: Makes torch's optimiser for the same rule from a list of parameters.
        batch_spec: How each leaf of a batch is split; by default the leading dim over the mesh axis `batch`.
        compute_dtype: `torch.bfloat16` for mixed precision; torch then runs under
            `torch.autocast("cpu", dtype=compute_dtype)`.

    Returns:
        A `Comparison`: loss and metrics, each gradient, and each parameter and buffer after the steps, worst first;
        of several steps the worst counts.

    Example:
        >>> import torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> found = ts.compare_with_torch(
        ...     torch.nn.Linear(4, 2), lambda model, batch: model(batch).square().mean(), torch.ones(8, 4),
        ...     mesh=ts.make_mesh(batch=2, model=2), plan=ts.ShardingPlan({"weight": P("model")}, default=P()),
        ... )
        >>> found.raise_if_different()
    """
    if steps < 1:
        raise ValueError(f"compare_with_torch: steps must be at least 1, got {steps}.")
    if (optimizer is None) != (torch_optimizer is None):
        raise ValueError("compare_with_torch: give optimizer and torch_optimizer both, for the same rule, or neither.")
    optimizers = (optimizer or optax.sgd(1e-2), torch_optimizer or functools.partial(torch.optim.SGD, lr=1e-2))
    return compare_batches(
        model,
        loss_fn,
        [batch] * steps,
        mesh=mesh,
        plan=plan,
        optimizers=optimizers,
        batch_spec=batch_spec,
        compute_dtype=compute_dtype,
    )


def compare_batches(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batches: Sequence[PyTree],
    *,
    mesh: Mesh,
    plan: ShardingPlan,
    optimizers: tuple[optax.GradientTransformation, Callable[..., torch.optim.Optimizer]],
    batch_spec: PartitionSpec | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Comparison:
    """Do as `compare_with_torch` does, with a batch for each step."""
    alone = make_mesh(devices=[mesh.devices.flat[0]], **dict.fromkeys(mesh.axis_names, 1))
    optimizer = optax.chain(_keep_gradients(), optimizers[0])

    def train(mesh: Mesh) -> tuple[TrainStep, list[Values]]:
        step = make_train_step(
            model, loss_fn, optimizer, mesh=mesh, plan=plan, batch_spec=batch_spec, compute_dtype=compute_dtype
        )
        return step, _on_mesh(step, batches)

    (step, on_mesh), (_, on_one) = train(mesh), train(alone)
    random = step.draws_random
    in_torch = (
        on_one
        if random
        else _in_torch(step, loss_fn, batches, make_optimizer=optimizers[1], compute_dtype=compute_dtype)
    )
    rows = [_difference(key, in_torch, None if random else on_one, on_mesh) for key in {**in_torch[-1], **on_mesh[-1]}]
    dtypes = {t.dtype for t in model.parameters()} | ({compute_dtype} if compute_dtype else set())
    return Comparison(
        rows=tuple(sorted(rows, key=lambda row: -row.worst)),
        reference="one device" if random else "eager torch",
        mesh=f"mesh {describe_mesh(mesh)}",
        tolerance=max(ROUNDING.get(dtype, 1e-4) for dtype in dtypes),
        losses=tuple(float(values["loss", "loss"]) for values in in_torch),
    )


def _keep_gradients() -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, updates))


def _on_mesh(step: TrainStep, batches: Sequence[PyTree]) -> list[Values]:
    state, found = step.init(), []
    with jax.default_matmul_precision("highest"):  # accelerators round products of float32 by default, torch does not
        for batch in batches:
            state, metrics = step(state, batch)
            (kept, _) = cast(tuple[PyTree, PyTree], state.opt_state)  # of `_keep_gradients`, and of the optimizer
            found.append(_values(_numbers(metrics), kept, state))
    return found


def _in_torch(
    step: TrainStep,
    loss_fn: LossFn,
    batches: Sequence[PyTree],
    *,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    compute_dtype: torch.dtype | None,
) -> list[Values]:
    state = step.init()
    model = step.export(state)
    for mine, theirs in zip(model.modules(), step.model.modules(), strict=True):
        mine.training = theirs.training
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    found = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", compute_dtype) if compute_dtype else contextlib.nullcontext():
            loss, metrics = split_loss(loss_fn(model, torch_pytree.tree_map(_copied, batch)))
        loss.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        optimizer.step()
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        tensors = {name: _array(held[name]) for name in state.tensors}
        numbers = {"loss": _array(loss), **_numbers(jax.tree.map(_array, metrics))}
        found.append(_values(numbers, {n: _array(grads[n]) for n in state.params}, state, tensors))
    return found


def _copied(leaf: PyTree) -> PyTree:
    return torch.as_tensor(leaf).clone() if isinstance(leaf, (torch.Tensor, np.ndarray)) else leaf


def _array(value: torch.Tensor | ArrayLike) -> np.ndarray:
    if isinstance(value, jax.Array | torch.Tensor):
        value = to_cpu(value).detach()
        return np.array(host_array(value.to_dense() if value.is_sparse else value, rounds=True))
    return np.array(value)


def _numbers(metrics: dict[str, PyTree]) -> dict[str, PyTree]:
    """Metrics by path, without the step's own gradient norm."""
    leaves = jax.tree_util.tree_leaves_with_path({n: v for n, v in metrics.items() if n != "grad_norm"})
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _values(numbers: dict[str, PyTree], grads: PyTree, state: TrainState, tensors: PyTree = None) -> Values:
    kinds = {**dict.fromkeys(state.params, "parameter"), **dict.fromkeys(state.frozen, "parameter")}
    held = state.tensors if tensors is None else tensors
    found = {("loss" if name == "loss" else "metric", name): value for name, value in numbers.items()}
    found |= {("gradient", name): grad for name, grad in grads.items()}
    found |= {(kinds.get(name, "buffer"), name): value for name, value in held.items()}
    return {key: _array(value) for key, value in found.items()}


def _difference(key: tuple[str, str], reference: list[Values], one: list[Values] | None, mesh: list[Values]) -> Any:
    """The worst of all steps."""
    kind, name = key
    return Difference(
        kind=kind,
        name=name,
        size=max(_largest(values.get(key, np.zeros(0))) for values in reference),
        one_device=None if one is None else max(_apart(key, r, v) for r, v in zip(reference, one, strict=True)),
        mesh=max(_apart(key, r, v) for r, v in zip(reference, mesh, strict=True)),
    )


def _apart(key: tuple[str, str], reference: Values, found: Values) -> float:
    """Relative to the value's own largest entry; what is nothing but rounding is measured by the largest of its kind.

    (A bias before a batch norm has a gradient of zero; what is left of it is the rounding of other gradients.)
    """
    if key not in reference or key not in found:
        return math.inf
    wanted, got = (np.asarray(v[key], np.complex128) for v in (reference, found))
    if wanted.shape != got.shape:
        return math.inf
    alike = (wanted == got) | (np.isnan(wanted) & np.isnan(got)) | (np.isfinite(wanted) & np.isfinite(got))
    if not alike.all():
        return math.inf
    largest_of_kind = max(_largest(v) for (kind, _), v in reference.items() if kind == key[0])
    finite = np.isfinite(wanted)
    distance = np.abs(wanted[finite] - got[finite]).max(initial=0)
    return 0.0 if distance == 0 else float(distance / max(_largest(wanted), 1e-2 * largest_of_kind))


def _largest(value: np.ndarray) -> float:
    array = np.abs(np.asarray(value, np.complex128))
    return float(array[np.isfinite(array)].max(initial=0))
