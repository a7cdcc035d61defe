"""Recurrent nets, batch norms and lists of tensors in eager PyTorch on the device, as on the CPU: nothing leaves it."""

import copy
import logging

import pytest
import torch
from torch import nn

import torch_shard  # noqa: F401  (registers the device)


@pytest.fixture(autouse=True)
def on_the_device_alone(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="torch_shard"):
        yield
    assert "runs on the CPU" not in caplog.text


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-5, atol=1e-5)  # float32 sums


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_net_has_values_and_gradients_of_torch(kind: type[nn.RNNBase], bias: bool) -> None:
    torch.manual_seed(0)
    wanted = kind(4, 3, num_layers=2, bias=bias, bidirectional=True, batch_first=True)
    found, x = copy.deepcopy(wanted).to("jax"), torch.randn(2, 5, 4)
    inputs = [x.clone().requires_grad_(), x.to("jax").requires_grad_()]
    outputs = [net(own)[0] for net, own in zip((wanted, found), inputs, strict=True)]
    for output in outputs:
        output.square().sum().backward()
    assert_close(outputs[1], outputs[0])
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert_close(inputs[1].grad, inputs[0].grad)
    for own, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert_close(own.grad, other.grad)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_norm_is_that_of_torch_in_both_modes(momentum: float | None) -> None:
    torch.manual_seed(0)
    wanted = nn.BatchNorm2d(3, momentum=momentum)
    found = copy.deepcopy(wanted).to("jax")
    for training in (True, True, False):
        x = torch.randn(4, 3, 2, 2)
        assert_close(found.train(training)(x.to("jax")), wanted.train(training)(x))
    for name, value in wanted.state_dict().items():
        assert_close(found.state_dict()[name].cpu().to(value.dtype), value)  # a count of batches is int32 on the device


def test_a_linear_layer_without_bias_takes_a_vector() -> None:
    wanted = nn.Linear(4, 6, bias=False)
    found, x = copy.deepcopy(wanted).to("jax"), torch.randn(4)
    assert_close(found(x.to("jax")), wanted(x))


def test_averages_of_lists_of_tensors_are_those_of_torch() -> None:
    torch.manual_seed(0)
    first, second = [torch.randn(3), torch.randn(2, 2)], [torch.randn(3), torch.randn(2, 2)]
    on_device = [each.to("jax") for each in first]
    torch._foreach_lerp_(on_device, [each.to("jax") for each in second], 0.25)
    torch._foreach_lerp_(first, second, 0.25)
    for found, wanted in zip(on_device, first, strict=True):
        assert_close(found, wanted)


def test_products_of_groups_are_those_of_torch() -> None:
    torch.manual_seed(0)
    x, matrices = torch.randn(6, 16), torch.randn(2, 16, 8)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    found = torch.nn.functional.grouped_mm(x.to("jax"), matrices.to("jax"), offs=ends.to("jax"))
    assert_close(found, torch.cat([x[:2] @ matrices[0], x[2:] @ matrices[1]]))


def test_a_loss_of_many_labels_counts_those_before_the_first_minus_one() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(5, 4), torch.tensor([[0, 2, -1, 1]] * 5)
    loss = nn.functional.multilabel_margin_loss(x.to("jax"), labels.to("jax"))
    assert loss.item() == pytest.approx(nn.functional.multilabel_margin_loss(x, labels).item(), rel=1e-6)
