"""Convolutions within a step on every mesh; `test_ops.py` has their arguments."""

import re

import optax
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.collectives import count_collectives
from tests.oracles.derivatives import both
from tests.oracles.steps import step_of
from tests.tables.cases import make_mesh
from torch_shard._cost.total import costs_of
from torch_shard._lowering.ops import conv as conv_module
from torch_shard._sharding import plan as plan_module


def test_a_batch_norm_of_bfloat16_reads_what_it_normalises_once_for_its_statistics() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64)), torch.empty(4096, 64, 32, 32)
    step = step_of(
        model,
        lambda model, x: (model(x) ** 3).float().mean(),
        mesh=ts.make_mesh(topology="v5e:2x2", batch=4),
        compute_dtype=torch.bfloat16,
        mixed_precision="params",
    )
    compiled = step.preview(x).compiled
    assert compiled is not None
    costs = costs_of(compiled.as_text() or "")
    read = sum(cost.memory_bytes for cost in costs if "batch_norm_legit_functional" in cost.label)
    assert read < x.numel() / 4 * 2  # bytes of bfloat16: the sums are made beside the convolution


def test_a_batch_norm_of_bfloat16_has_the_variance_of_values_that_hardly_vary() -> None:
    x = torch.full((8, 4, 16, 16), 300.0).bfloat16()
    x[0, :, :2] = 302.0

    def normed(x: torch.Tensor) -> torch.Tensor:
        mean, var = torch.full((4,), 299.0), torch.ones(4)
        out = F.batch_norm(x, mean, var, training=True, momentum=1.0)
        return torch.cat([out.float().flatten(), mean, var])

    # one rounding of the result to bfloat16
    torch.testing.assert_close(ts.jax_jit(normed)(x).cpu(), normed(x), rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(("sizes", "spec"), [((1, 8), P()), ((4, 2), P(("model", "batch")))], ids=str)
def test_grouped_convolutions_on_a_mesh_equal_eager_torch(sizes: tuple[int, int], spec: P) -> None:
    """However weights are split: XLA's partitioner errs where it splits groups, forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, groups=4, padding=1, stride=2, dilation=2),
        nn.Conv2d(16, 8, 1, groups=4),
        nn.Tanh(),
        nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1, groups=4),
        nn.ConvTranspose2d(8, 16, 2, dilation=2, groups=2),
        nn.Conv2d(16, 16, 3, groups=16),
    )
    plan = ts.ShardingPlan({"*.weight": spec}, default=P())
    step = step_of(model, mesh=make_mesh(sizes), plan=plan)
    step.prove(step.init(), torch.randn(8, 8, 5, 5)).raise_if_different()


@pytest.mark.parametrize(("padding", "dtype"), [(0, torch.float32), (5, torch.float32), (3, torch.bfloat16)], ids=str)
def test_a_few_taps_of_each_channel_equal_eager_torch(padding: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype).float() for shape in ((2, 6, 9), (6, 1, 4), (6,))]

    def conv(*given: torch.Tensor) -> torch.Tensor:
        return F.conv1d(*given, padding=padding, groups=6)

    rtol = 1e-5 if dtype is torch.float32 else 2**-7  # each of the few roundings of bfloat16 is 2**-9
    for found, wanted in both(lambda *given: conv(*(x.to(dtype) for x in given)).float(), inputs, eager=conv):
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol * float(wanted.abs().max()))


def test_a_short_depthwise_convolution_of_a_sequence_is_split_by_channels() -> None:
    torch.manual_seed(0)

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1d = nn.Conv1d(16, 16, 4, groups=16, padding=3)
            self.out_proj = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out_proj(self.conv1d(x.mT)[..., :12].mT)

    model, mesh = Mixer(), ts.make_mesh(batch=4, model=2)
    plan = ts.ShardingPlan({"out_proj.weight": P(None, "model")}, default=P())
    step = step_of(model, mesh=mesh, plan=plan)
    x = torch.randn(8, 12, 16)
    compiled = step.lower(step.structs, x).compile()
    found = count_collectives(compiled)
    assert found["all-gather"] == 2
    gathered = re.findall(r"= (\S+?)\{[\d,]*\} all-gather\(", compiled.as_text() or "")
    assert sorted(gathered) == ["f32[16,4]", "f32[16]"]  # gradients of weight and bias alone
    assert set(found) == {"all-gather", "all-reduce"}
    step.prove(step.init(), x).raise_if_different()


@pytest.mark.parametrize("shape", [(2, 3, 33, 48), (2, 3, 7, 8, 9), (3, 1, 9)], ids=str)
def test_images_taken_apart_into_patches_equal_eager_torch(shape: tuple[int, ...]) -> None:
    """Kernels as large as their steps; what is left over behind the last patch is not read."""
    torch.manual_seed(0)
    kernel = (4, 3, 2)[: len(shape) - 2]
    inputs = [torch.randn(size) for size in (shape, (5, shape[1], *kernel), (5,))]
    op = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]

    def conv(*given: torch.Tensor) -> torch.Tensor:
        return op(*given, stride=kernel)

    for found, wanted in both(conv, inputs, eager=conv):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))  # order of sums


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_patches_take_less_code_on_tpu_than_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    def code_bytes() -> int:
        with torch.device("meta"):
            model = nn.Conv2d(3, 768, 16, 16)
        mesh = ts.make_mesh(topology="v5e:2x2", batch=4)
        step = step_of(model, optimizer=optax.sgd(0.1), mesh=mesh, compute_dtype=torch.bfloat16)
        compiled = step.lower(step.structs, torch.empty(128, 3, 224, 224, device="meta")).compile()
        return compiled.memory_analysis().generated_code_size_in_bytes

    ours = code_bytes()
    monkeypatch.setattr(conv_module, "_takes_patches", lambda *given: False)
    assert ours < 0.5 * code_bytes()  # 0.33 with libtpu 0.0.42, and a quarter of the seconds


def bottleneck() -> nn.Module:
    kernels = (nn.Conv2d(256, 512, 1, bias=False), nn.Conv2d(512, 256, 3, bias=False))
    return nn.Sequential(kernels[0], nn.ReLU(), kernels[1])


@pytest.mark.usefixtures("optimized")
def test_kernels_are_read_and_written_as_they_lie_on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against torch's order, in which XLA:TPU copies each kernel and what an optimizer keeps for it, there and back."""
    mesh, x = ts.make_mesh(topology="v5e:2x2", batch=4), torch.empty(64, 256, 9, 9, device="meta")

    def preview() -> ts.Preview:
        with torch.device("meta"):
            model = bottleneck()
        step = step_of(model, optimizer=optax.sgd(0.1, momentum=0.9), mesh=mesh, compute_dtype=torch.bfloat16)
        return step.preview(x)

    ours = preview()
    monkeypatch.setattr(plan_module, "kernel_forms", lambda source, platform: {})
    plain = preview()
    assert ours.collective_bytes == plain.collective_bytes
    assert ours.cycles < 0.8 * plain.cycles  # 0.63 with libtpu 0.0.42
