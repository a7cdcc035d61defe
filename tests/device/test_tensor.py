"""Tensors on the jax device: made, moved, looked at, written through views, differentiated; always like torch's own."""

import copy
import io
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import torch_shard as ts

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


def test_numbers_are_formatted() -> None:
    assert f"{torch.tensor(1.25, device='jax'):.1f}" == "1.2"


def test_a_parameter_with_hooks_does_not_move() -> None:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad * 100)
    with pytest.raises(NotImplementedError, match=r"parameter of shape \(2, 2\) has gradient hooks"):
        model.to("jax")


VIEWS = {
    "select": lambda x: x[1],
    "slice": lambda x: x[1:3, ::2],
    "transpose": lambda x: x.T,
    "transposed slice": lambda x: x.T[1:, 1],
    "flatten": lambda x: x.view(-1)[3:9],
    "diagonal": lambda x: x.diagonal(1),
    "unsqueeze": lambda x: x[:, None, 2:],
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "element": lambda x: x[2, 3],
    "unfold": lambda x: x.unfold(1, 2, 2),
    "permuted": lambda x: x.view(2, 2, 6).permute(2, 0, 1)[1],
    "chunk": lambda x: x.chunk(3, 1)[2].T,
    "detached": lambda x: x.detach()[0],
    "split with sizes": lambda x: x.split([1, 3])[1],
    "reshaped": lambda x: x[1:3].reshape(3, 4)[1],
    "narrow of a view": lambda x: x.view(3, 8).narrow(0, 1, 2),
    "movedim": lambda x: x.movedim(0, 1)[2:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_writes_to_views_look_at_no_more_than_the_view(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, wanted = (torch.arange(24.0, device=device).reshape(4, 6).clone() for device in ("jax", "cpu"))
    sizes = []

    def arange(size: int) -> jax.Array:
        sizes.append(size)
        return jnp.arange(size)

    for x in (base, wanted):
        view = VIEWS[name](x)
        new = torch.arange(100.0, 100.0 + view.numel()).reshape(view.shape).to(x.device)
        monkeypatch.setattr("torch_shard._device.tensor.jnp", types.SimpleNamespace(**{**vars(jnp), "arange": arange}))
        view.copy_(new)
        view.mul_(2)
        monkeypatch.undo()
    assert_same(base, wanted)
    assert all(size <= max(view.shape, default=1) for size in sizes), sizes


def test_views_have_the_strides_of_torch() -> None:
    base, wanted = (torch.arange(6.0, device=device).reshape(2, 3) for device in ("jax", "cpu"))
    for view in (torch.t, lambda x: x[:, 1:], lambda x: x.expand(4, 2, 3), lambda x: x.t().detach()[1:]):
        found, like = view(base), view(wanted)
        assert (found.stride(), found.storage_offset()) == (like.stride(), like.storage_offset())
        assert found.is_contiguous() == like.is_contiguous()
    for x in (base, wanted):
        x.t().contiguous().add_(1)
    assert_same(base, wanted)
    with pytest.raises(NotImplementedError, match="numbers of its own"):  # torch has no such view at all
        base.t().view(-1).add_(1)


def test_a_reshape_that_copies_in_torch_shares_nothing() -> None:
    base, wanted = (torch.arange(6.0, device=device).reshape(2, 3) for device in ("jax", "cpu"))
    for x in (base, wanted):
        x.T.reshape(-1).add_(1)
        x.reshape(-1).mul_(2)
    assert_same(base, wanted)
