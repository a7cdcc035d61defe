"""Every public module of torch.nn: output, gradients of inputs and parameters, and buffers, against eager torch."""

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.utils import _pytree as torch_pytree

import torch_shard as ts
from tests.tables.nn_table import DRAWING, LAYERS, MORE, NOT_MODULES_TO_CALL, Row
from validation.operators.siblings import SIBLINGS

Tensors = dict[str, torch.Tensor]


def test_the_table_has_every_public_module() -> None:
    public = {kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    assert public == {row.kind for row in [*LAYERS, *MORE, *SIBLINGS]} | set(NOT_MODULES_TO_CALL)
    assert not {row.kind for row in [*LAYERS, *MORE]} & set(NOT_MODULES_TO_CALL)


def scalar_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number that depends on every output with another weight."""
    return sum((o * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outputs if o.is_floating_point())


def run(module: nn.Module, leaves: Tensors, fixed: Tensors, inputs: Sequence[str]) -> tuple[torch.Tensor, Any]:
    """The scalar, with every output and every buffer after the call."""
    held = {n: fixed[n].clone() for n in fixed if n not in inputs}  # so that buffers may be written in place
    tensors = {**leaves, **held}
    tensors |= {n: x * 1 for n, x in leaves.items()}  # some modules write to their inputs or parameters
    args = [tensors[n] if n in tensors else fixed[n] for n in inputs]
    outputs = torch.func.functional_call(module, {n: t for n, t in tensors.items() if n not in inputs}, tuple(args))
    flat = [x for x in torch_pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
    return scalar_of(flat), (flat, held)


def made(row: Row) -> tuple[list[nn.Module], Tensors, Tensors, list[str]]:
    """The module in its modes, what to differentiate by, what else it reads, names of its inputs."""
    torch.manual_seed(0)
    module = row.build().eval()
    given = {f"input {i}": make() for i, make in enumerate(row.inputs)}
    leaves = {n: p.detach() for n, p in module.named_parameters()}
    leaves |= {n: x for n, x in given.items() if x.is_floating_point()}
    fixed = {n: x for n, x in given.items() if n not in leaves} | dict(module.named_buffers())
    modules = [module, copy.deepcopy(module).train()] if row.kind not in DRAWING and has_modes(module) else [module]
    return modules, leaves, fixed, list(given)


def has_modes(module: nn.Module) -> bool:
    """Whether train mode computes anything else, or in another way."""
    return any("training" in inspect.getsource(type(each)) for each in module.modules())


def eager(module: nn.Module, values: Tensors, fixed: Tensors, inputs: Sequence[str]) -> tuple[Any, Tensors]:
    leaves = {n: x.clone().requires_grad_() for n, x in values.items()}
    value, aux = run(module, leaves, fixed, inputs)
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return (value, aux), dict(zip(leaves, grads, strict=True))


def split(arrays: Any) -> Any:
    """Every array over a mesh of 2 by 2: its first even dim over `batch`, the next over `model`."""
    mesh = ts.make_mesh(batch=2, model=2)

    def place(array: jax.Array) -> jax.Array:
        axes = iter(("batch", "model"))
        spec = P(*(next(axes, None) if size and size % 2 == 0 else None for size in array.shape))
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree.map(place, arrays)


def compiled(rows: list[Any], place: Any) -> list[list[Any]]:
    """All rows in all their modes in one program, which compiles what they share only once."""
    adapted = [
        [
            ts.jax_view(ts.jax_value_and_grad(functools.partial(run, module, inputs=inputs), has_aux=True))
            for module in ms
        ]
        for ms, _, _, inputs in rows
    ]
    key = jax.random.key(0)  # some take one though they draw nothing in eval mode
    jitted = jax.jit(
        lambda given: [[fn(*args, key=key) for fn in fns] for fns, args in zip(adapted, given, strict=True)]
    )
    arrays = ts.jax_view(ts.torch_view([(leaves, fixed) for _, leaves, fixed, _ in rows]))
    return ts.torch_view(jitted(place(arrays)))


def assert_close(found: Any, wanted: Any, rtol: float, what: str) -> None:
    """Equal up to `rtol` of the tensor's largest value; integers and shapes exactly."""
    found, wanted = found.cpu(), wanted.detach()
    assert found.shape == wanted.shape, what
    assert found.dtype == wanted.dtype or wanted.dtype is torch.int64, what  # JAX's integers have 32 bits
    floor = rtol * wanted.abs().max().item() + 1e-6 if wanted.is_floating_point() and wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=0, atol=floor, check_dtype=False, msg=lambda text: f"{what}: {text}")


AT_ONCE = 10  # rows of one program


def parts_of(table: list[Row]) -> list[Any]:
    """The rows of a table, so many at once."""
    starts = range(0, len(table), AT_ONCE)
    return [pytest.param(table[at : at + AT_ONCE], id=f"{table[at].kind.__name__} {at}") for at in starts]


@pytest.mark.parametrize("rows", parts_of(LAYERS)[7:])
def test_layers_equal_eager_torch(rows: list[Row]) -> None:
    """Losses, convolutions and norms."""
    assert_equal_eager(rows, lambda arrays: arrays)


@pytest.mark.slow
@pytest.mark.parametrize("rows", parts_of(LAYERS) + parts_of(MORE))
def test_layers_on_a_mesh_equal_eager_torch(rows: list[Row]) -> None:
    """`pytest validation/operators/test_modules.py` has all other modules there, and all within `jax_shard_map`."""
    assert_equal_eager(rows, split)


def assert_equal_eager(rows: list[Row], place: Any) -> None:
    each = [made(row) for row in rows]
    for row, (modules, *rest), outs in zip(rows, each, compiled(each, place), strict=True):
        for module, ((found_value, found_aux), found_grads) in zip(modules, outs, strict=True):
            what = f"{row.name}, {'train' if module.training else 'eval'}"
            (value, aux), grads = eager(module, *rest)
            assert_close(found_value, value, row.rtol, f"{what}: value")
            for i, (found, wanted) in enumerate(zip(found_aux[0], aux[0], strict=True)):
                assert_close(found, wanted, row.rtol, f"{what}: output {i}")
            for name, wanted in grads.items():
                assert_close(found_grads[name], wanted, row.rtol, f"{what}: gradient of {name}")
            for name, wanted in aux[1].items():
                assert_close(found_aux[1][name], wanted, row.rtol, f"{what}: buffer {name}")


DROPOUTS = {
    "Dropout": (lambda: nn.Dropout(0.3), (40, 50), (40, 50)),
    "Dropout inplace": (lambda: nn.Dropout(0.3, inplace=True), (40, 50), (40, 50)),
    "Dropout1d": (lambda: nn.Dropout1d(0.3), (20, 50, 3), (20, 50, 1)),
    "Dropout2d": (lambda: nn.Dropout2d(0.3), (20, 50, 2, 3), (20, 50, 1, 1)),
    "Dropout3d": (lambda: nn.Dropout3d(0.3), (20, 50, 2, 2, 2), (20, 50, 1, 1, 1)),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), (40, 50), (40, 50)),
    "FeatureAlphaDropout": (lambda: nn.FeatureAlphaDropout(0.3), (20, 50, 2, 3), (20, 50, 1, 1)),
}


def test_every_module_that_draws_is_tested_in_train_mode() -> None:
    assert {type(build()) for build, *_ in DROPOUTS.values()} | {nn.RReLU} == DRAWING


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_draws_as_torch_does(name: str) -> None:
    """Kept entries are scaled, dropped ones constant, whole channels together; the gradient has the same mask."""
    build, shape, mask_shape = DROPOUTS[name]
    x = torch.linspace(0.5, 1.5, torch.Size(shape).numel()).view(shape)
    out, slope = drawn(build(), x)
    kept = slope[tuple(slice(size) for size in mask_shape)] > 0
    mean, deviation = kept.float().mean(), (0.3 * 0.7 / kept.numel()) ** 0.5
    assert abs(mean - 0.7) < 6 * deviation  # six standard errors
    scale, shift, dropped = (1 / 0.7, 0.0, 0.0) if "Alpha" not in name else alpha_constants(0.3)
    torch.testing.assert_close(slope, (kept * scale).expand(shape))
    torch.testing.assert_close(out, torch.where(kept, x * scale + shift, dropped))
    again, _ = drawn(build(), x, seed=1)
    assert not torch.equal(out, again)


def alpha_constants(p: float) -> tuple[float, float, float]:
    """What keeps mean 0 and variance 1 behind a SELU, which falls to `low`: x * scale + shift, or a constant."""
    low = -1.7580993408473766
    scale = (1 - p + p * (1 - p) * low**2) ** -0.5
    return scale, -scale * low * p, scale * low - scale * low * p


def drawn(module: nn.Module, x: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and slope of an elementwise random module in train mode, from one compiled program."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = module.train()(x * 1)
        return out.sum(), out

    torch.manual_seed(seed)
    (_, out), slope = ts.jax_jit(ts.jax_value_and_grad(fn, has_aux=True))(x)
    return out.cpu(), slope.cpu()


def test_rrelu_draws_a_slope_for_each_negative_entry() -> None:
    x = torch.linspace(-2, 2, 4000)
    out, slope = drawn(nn.RReLU(0.1, 0.4), x)
    torch.testing.assert_close(out, x * slope)
    assert (slope[x > 0] == 1).all()
    below = slope[x < 0]
    assert ((below >= 0.1) & (below <= 0.4)).all()
    assert abs(below.mean() - 0.25) < 6 * 0.3 / (12 * 2000) ** 0.5  # six standard errors of a uniform draw
