"""Tensors on the jax device: made, moved, looked at, written through views, differentiated; always like torch's own."""

import copy
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts
from tests.tables.odd import odd

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.device.type == "jax"
    torch.testing.assert_close(found.cpu(), wanted, check_dtype=wanted.dtype is not torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_dtypes_survive_the_round_trip(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 2], [3, 4, 100]]).to(dtype)
    y = x.to("jax")
    assert y.dtype is dtype
    assert type(y.cpu()) is torch.Tensor
    assert torch.equal(y.cpu(), x)


def test_the_array_is_not_copied() -> None:
    array = jnp.arange(4.0)
    tensor = ts.torch_view(array)
    assert tensor.jax() is array
    assert ts.jax_view(tensor) is array


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.ones(2, dtype=torch.int32, device=d),
        lambda d: torch.full((2, 2), 7.0, device=d),
        lambda d: torch.arange(5, device=d),
        lambda d: torch.arange(1.0, 2.0, 0.25, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.tensor([[1.0, 2.0]], device=d),
        lambda d: torch.tensor(3, device=d),
        lambda d: torch.as_tensor(np.float32([1, 2]), device=d),
        lambda d: torch.zeros_like(torch.ones(2, device=d)),
        lambda d: torch.tril(torch.ones(3, 3, device=d)),
    ],
)
def test_factories_equal_those_of_the_cpu(make) -> None:
    assert_same(make("jax"), make("cpu"))


def test_random_factories_follow_manual_seed() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(64, device="jax"), torch.randn(64, device="jax")
    torch.manual_seed(0)
    again = torch.randn(64, device="jax")
    assert torch.equal(first.cpu(), again.cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    assert abs(float(torch.rand(10_000, device="jax").mean()) - 0.5) < 0.02  # 0.5 +- 7 standard errors


def test_random_numbers_on_the_jax_device_leave_the_cpu_generator_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    torch.rand(5, device="jax")
    assert torch.equal(torch.rand(3), wanted)


WRITES = {
    "view of view": lambda x: x.view(-1).view(2, 8)[1].add_(1),
    "transpose": lambda x: x.t()[0].mul_(2),
    "diagonal": lambda x: x.diagonal().fill_(9),
    "slice": lambda x: x[1:3, ::2].zero_(),
    "setitem": lambda x: x.__setitem__((slice(None), 1), 5.0),
    "setitem of mask": lambda x: x.__setitem__(x > 8, -1.0),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0).select(0, 2).neg_(),
    "flatten": lambda x: x.flatten()[3].copy_(torch.tensor(7.0)),
    "permute": lambda x: x.view(2, 2, 4).permute(2, 0, 1)[0].add_(3),
    "chunk": lambda x: x.chunk(2)[1].sub_(1),
    "detach": lambda x: x.detach().add_(1),
    "data": lambda x: x.data.mul_(3),
    "augmented": lambda x: x.__iadd__(x.t().clone()),
    "out": lambda x: torch.add(x, 1, out=x),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_land_where_torch_lands_them(name: str) -> None:
    wanted = torch.arange(16.0).view(4, 4)
    found = wanted.to("jax")
    alias = found[:]
    WRITES[name](wanted)
    WRITES[name](found)
    assert_same(found, wanted)
    assert_same(alias, wanted)


def test_eager_gradients_are_torchs_own() -> None:
    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    found = copy.deepcopy(wanted).to("jax")
    x = torch.randn(3, 4)
    wanted(x).square().sum().backward()
    found(x.to("jax")).square().sum().backward()
    for (name, a), b in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert a.grad.device.type == "jax", name
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-5, atol=1e-5)  # float32, other order of sums


def test_a_torch_optimizer_runs_on_the_jax_device() -> None:
    torch.manual_seed(0)
    wanted = nn.Linear(3, 2)
    found = copy.deepcopy(wanted).to("jax")
    x = torch.randn(5, 3)
    for model, device in ((wanted, "cpu"), (found, "jax")):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x.to(device)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(found.weight.cpu(), wanted.weight, rtol=1e-4, atol=1e-5)  # Adam divides small numbers


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)
        self.register_buffer("kept", torch.arange(2.0))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.plain = torch.full((2,), 3.0)


def assert_whole(model: Holder) -> None:
    assert model.a.weight is model.b.weight
    assert isinstance(model.a.weight, nn.Parameter)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["a.weight", "b.bias"]
    assert model._non_persistent_buffers_set == {"passing"}
    assert torch.equal(model.plain, torch.full((2,), 3.0))


def test_a_module_moves_there_and_back_whole() -> None:
    model = Holder()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    weight = model.a.weight
    model.to("jax")
    assert_whole(model)
    assert model.a.weight is weight  # an optimiser that holds it goes on with it
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"jax"}
    model.to("cpu")
    assert_whole(model)
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in (*model.parameters(), *model.buffers()))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_module_moves_whole_while_an_autograd_graph_holds_it() -> None:
    model = Holder()
    out = model.b(model.a(torch.ones(1, 2)))
    wanted = out.detach()
    model.to("jax")
    assert_whole(model)
    assert {p.device.type for p in model.parameters()} == {"jax"}
    again = model.b(model.a(torch.ones(1, 2, device="jax")))
    assert_same(again.detach(), wanted)
    model.bfloat16()
    assert_whole(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert out.grad_fn is not None
    model.a(torch.ones(1, 2, device="jax", dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"off the jax device while an autograd graph holds it.*del loss"):
        model.to("cpu")
    del again
    assert_whole(model.to("cpu"))


def test_parameters_moved_one_by_one_are_apart() -> None:
    parameter = nn.Parameter(torch.ones(2))
    first, second = (parameter.to("jax").detach() for _ in range(2))
    first.zero_()
    assert_same(second, torch.ones(2))


def test_gradients_move_with_their_parameters() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    model.to("jax")
    assert_same(model.weight.grad, torch.ones(1, 2))
    model.to("cpu")
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_copies_do_not_share_memory() -> None:
    x = torch.ones(3, device="jax")
    for copied in (x.cpu(), torch.from_numpy(x.numpy()), x.clone(), copy.deepcopy(x)):
        copied.zero_()
    assert_same(x, torch.ones(3))
    host = torch.ones(3)
    moved = host.to("jax")
    host.zero_()
    assert_same(moved, torch.ones(3))


def test_a_deep_copy_keeps_ties_and_kinds() -> None:
    model = copy.deepcopy(Holder().to("jax"))
    assert_whole(model)
    assert model.a.weight.device.type == "jax"


def test_a_saved_state_dict_loads_anywhere() -> None:
    model, file = Holder().to("jax"), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(t) is torch.Tensor and t.device.type == "cpu" for t in loaded.values())
    assert torch.equal(loaded["a.weight"], model.a.weight.detach().cpu())


def test_looking_at_a_tensor() -> None:
    x = torch.tensor([1.0, 2.0], device="jax")
    assert repr(x) == "tensor([1., 2.], device='jax:0')"
    assert (x.tolist(), float(x.sum()), x.max().item(), bool((x > 0).all()), len(x)) == ([1.0, 2.0], 3.0, 2.0, True, 2)
    assert np.array_equal(np.asarray(x), [1, 2])
    with pytest.raises(RuntimeError, match="requires grad"):
        x.requires_grad_().numpy()


def test_integers_must_fit() -> None:
    assert_same(torch.tensor([2**31 - 1], dtype=torch.int64).to("jax"), torch.tensor([2**31 - 1]))
    with pytest.raises(OverflowError, match=r"values from 0 to 2147483648, which do not fit int32.*jax_enable_x64"):
        torch.tensor([0, 2**31]).to("jax")


def test_float64_is_refused_while_x64_is_off() -> None:
    with pytest.raises(
        TypeError, match=r"float64 array of shape \(2,\) needs 64 bits.*tensor\.float\(\).*jax_enable_x64"
    ):
        torch.ones(2, dtype=torch.float64).to("jax")


def test_cpu_and_jax_tensors_do_not_mix_unless_scalar() -> None:
    x = torch.ones(3, device="jax")
    assert_same(x * torch.tensor(2.0), torch.full((3,), 2.0))
    with pytest.raises(
        RuntimeError, match=r"CPU tensor of shape \(3,\) meets a tensor on the jax device.*\.to\('jax'\)"
    ):
        x + torch.ones(3)


def test_apply_jax_in_place_keeps_shape() -> None:
    x = torch.ones(4, device="jax")
    assert x.apply_jax_(jnp.negative) is x
    assert_same(x, -torch.ones(4))
    with pytest.raises(ValueError, match=r"apply_jax_ keeps shape and dtype: the tensor is \(4,\).*returned \(2,\)"):
        x.apply_jax_(lambda a: a[:2])


def test_jax_of_a_cpu_tensor_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"on the CPU: move it with \.to\('jax'\)"):
        torch.ones(2).jax()


def test_sharding_in_place_returns_the_tensor() -> None:
    sharding = jax.sharding.NamedSharding(ts.make_mesh(a=8), jax.sharding.PartitionSpec("a"))
    x = torch.arange(16.0, device="jax")
    assert x.shard_(sharding) is x
    assert x.sharding == sharding
    assert (x + 1).sharding == sharding


def test_modes_of_torchax_are_accepted() -> None:
    ts.enable_globally()
    with ts.jax_device():
        assert_same(torch.ones(2, device="jax") + 1, torch.full((2,), 2.0))
    ts.disable_globally()
    assert_same(torch.ones(2, device="jax") + 1, torch.full((2,), 2.0))


def test_loading_a_state_dict_keeps_the_layout() -> None:
    plan = ts.ShardingPlan({"weight": jax.sharding.PartitionSpec("model")}, default=jax.sharding.PartitionSpec())
    model, source = nn.Linear(4, 4), nn.Linear(4, 4)
    ts.place(model, ts.make_mesh(batch=4, model=2), plan)
    layout = model.weight.sharding
    model.load_state_dict(source.state_dict())
    assert model.weight.sharding == layout
    assert_same(model.weight.detach(), source.weight.detach())


def test_numbers_are_formatted() -> None:
    assert f"{torch.tensor(1.25, device='jax'):.1f}" == "1.2"


def test_a_generator_of_torchs_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(NotImplementedError, match=r"given a torch\.Generator.*Leave generator= out"):
        torch.randn(2, device="jax", generator=generator)
    with pytest.raises(NotImplementedError, match=r"given a torch\.Generator"):
        ts.jax_jit(lambda x: torch.bernoulli(x, generator=generator))(torch.ones(2))


def test_operators_without_a_lowering_run_on_the_cpu_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """Also in a backward pass, where PyTorch cannot survive an error on a device written in Python."""
    x = torch.randn(1, 2, 3, 3)
    found, wanted = x.to("jax").requires_grad_(), x.clone().requires_grad_()
    for leaf in (found, wanted):
        (odd(leaf) ** 2).sum().backward()
    assert_same(found.grad, wanted.grad)
    assert "tests.odd_backward.default has no lowering to JAX: it runs on the CPU" in caplog.text


def test_a_foreach_optimizer_runs() -> None:
    found, wanted = (nn.Parameter(torch.ones(3).to(device)) for device in ("jax", "cpu"))
    for parameter in (found, wanted):
        optimizer = torch.optim.Adam([parameter], lr=0.1, foreach=True)
        (parameter**2).sum().backward()
        optimizer.step()
    assert_same(found.detach(), wanted.detach())


def test_a_parameter_with_hooks_does_not_move() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad * 100)
    with pytest.raises(NotImplementedError, match=r"parameter of shape \(2, 2\) has gradient hooks"):
        model.to("jax")


def test_sums_of_bools_are_bools() -> None:
    x = torch.tensor([True, False], device="jax")
    assert_same(x + x, x.cpu() + x.cpu())


def test_unfolding_has_a_backward_pass() -> None:
    x = torch.randn(1, 2, 5, 5)
    found, wanted = x.to("jax").requires_grad_(), x.clone().requires_grad_()
    for leaf in (found, wanted):
        (nn.functional.unfold(leaf, 3, padding=1) ** 2).sum().backward()
    assert_same(found.grad, wanted.grad)


def test_rrelu() -> None:
    x = torch.linspace(-2, 2, 8)
    found = x.to("jax").requires_grad_()
    out = nn.functional.rrelu(found, training=False)
    assert_same(out.detach(), nn.functional.rrelu(x))
    (slope,) = torch.autograd.grad(nn.functional.rrelu(found, training=True).sum(), found)
    slope = slope.cpu()
    assert (slope[x > 0] == 1).all()
    assert ((slope[x < 0] > 1 / 8) & (slope[x < 0] < 1 / 3)).all()
    assert len(slope.unique()) == 5
