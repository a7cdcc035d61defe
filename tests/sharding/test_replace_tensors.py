"""Other tensors in the places of a module's own: whoever puts them there, nothing else of the module changes."""

import pytest
import torch
from jax.sharding import PartitionSpec as P
from safetensors.torch import save_file

import torch_shard as ts
from tests.oracles.steps import sgd_step


class Marked(torch.nn.Module):
    """A tie, a frozen parameter, a mark for optimisers, a buffer, and a plain list of what it holds."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.a.weight.no_decay = True
        self.a.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))
        self.listed = [self.a.bias, {"scale": (self.scale, 1)}]

    def forward(self, x):
        return self.b(self.a(x)) * self.scale


MESH, PLAN = ts.make_mesh(batch=4, model=2), ts.ShardingPlan({}, default=P())


def loss_fn(model, batch):
    return model(batch).square().mean()


def exported(model, tmp_path):
    step = sgd_step(model, loss_fn, (4, 2))
    return step.export(step.init(seed=0))


def loaded(model, tmp_path):
    save_file({name: t.clone() for name, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    return ts.load_safetensors(tmp_path / "model.safetensors", model, MESH, PLAN)


WAYS = {
    "place": lambda model, _: ts.place(model, MESH, PLAN),
    "place again": lambda model, _: ts.place(ts.place(model, MESH, PLAN), ts.make_mesh(batch=8, model=1), PLAN),
    "gather": lambda model, _: ts.gather(ts.place(model, MESH, PLAN)),
    "materialize": lambda model, _: ts.materialize(model, MESH, PLAN),
    "load": loaded,
    "export": exported,
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_stay_what_they_are(way, tmp_path):
    before = Marked()
    values = {name: t.clone() for name, t in before.state_dict().items()}
    model = WAYS[way](before, tmp_path)
    assert model.a.weight.no_decay is True
    assert model.b.weight is model.a.weight
    assert [p.requires_grad for p in (model.a.weight, model.a.bias, model.b.bias)] == [True, False, True]
    assert all(type(p) is not torch.Tensor and isinstance(p, torch.nn.Parameter) for p in model.parameters())
    for name, value in values.items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["place", "gather", "materialize", "load"])
def test_plain_attributes_follow_their_entries(way, tmp_path):
    model = WAYS[way](Marked(), tmp_path)
    assert model.listed[0] is model.a.bias
    assert model.listed[1]["scale"][0] is model.scale


@pytest.mark.parametrize("way", ["place", "gather"])
def test_recurrent_modules_run_with_what_they_hold(way, tmp_path):
    model = WAYS[way](torch.nn.LSTM(3, 5), tmp_path)
    held = [getattr(model, name) for name in model._flat_weights_names]
    assert all(found is wanted for found, wanted in zip(model._flat_weights, held, strict=True))
