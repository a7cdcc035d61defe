"""`step.export`: an ordinary module again."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.oracles.steps import step_of
from tests.tables.cases import CASE, make_step, squared_error


def test_export_is_an_ordinary_module_with_ties_and_flags() -> None:
    case = CASE["tied"]
    model = case.model()
    model.out.bias.requires_grad_(False)
    before = copy.deepcopy(model)
    step = make_step(case, model=model)
    state, _ = step(step.init(), case.batches(1)[0])
    exported = step.export(state)
    assert exported.again.weight is exported.encode.weight is exported.extra
    assert [n for n, p in exported.named_parameters() if not p.requires_grad] == ["out.bias"]
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in exported.parameters())
    np.testing.assert_array_equal(exported.encode.weight.detach().numpy(), state.params["extra"])  # the first name
    assert not torch.equal(exported.encode.weight, before.encode.weight)
    assert all(torch.equal(exported.state_dict()[n], t.cpu()) for n, t in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_modules_that_keep_computed_tensors_are_exported() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    prune.l1_unstructured(model[1], "weight", 0.5)
    step = step_of(model, squared_error)
    batch = torch.ones(8, 8), torch.ones(8, 4)
    state, _ = step(step.init(), batch)
    trained = step.export(state)
    _, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], squared_error(trained, batch).item(), rtol=1e-5)


class CopiesItself(nn.Linear):
    """As models do that are made of a config: the copy is made anew, and loads the values."""

    def __deepcopy__(self, memo):
        new = CopiesItself(self.in_features, self.out_features)
        new.load_state_dict(self.state_dict())
        return new


class SharesItself(nn.Linear):
    def __deepcopy__(self, memo):
        return self


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [CopiesItself, lambda *sizes: torch.jit.script(nn.Linear(*sizes))])
def test_modules_that_copy_themselves_are_exported_with_trained_values(make) -> None:
    for model in (make(8, 4), nn.Sequential(make(8, 4))):
        before = [p.detach().clone() for p in model.parameters()]
        step = step_of(model, squared_error)
        state, _ = step(step.init(), (torch.ones(8, 8), torch.ones(8, 4)))
        live = dict(model.named_parameters())
        for name, p in step.export(state).named_parameters():
            np.testing.assert_array_equal(p.detach().numpy(), state.params[name])
            assert torch.equal(p, live[name].cpu())
        assert not any(map(torch.equal, before, step.export(state).parameters()))
        step.prove(state, (torch.ones(8, 8), torch.ones(8, 4))).raise_if_different()


def test_a_copy_made_anew_has_the_training_flags_of_the_module() -> None:
    model = nn.Sequential(CopiesItself(8, 4), nn.Dropout()).eval()
    trained = step_of(model, squared_error)
    assert [m.training for m in trained.export(trained.init()).modules()] == [False] * 3


def test_a_copy_that_is_the_module_itself_is_refused() -> None:
    model = nn.Sequential(SharesItself(8, 4))
    step = step_of(model, squared_error)
    with pytest.raises(ValueError, match=r"export: copy.deepcopy\(Sequential\) gives a module that shares 0.weight"):
        step.export(step.init())
