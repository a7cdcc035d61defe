"""Checkpoints of torch's training scripts: weights, optimizer and scheduler go on as torch would."""

import copy

import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.steps import mean_square, step_of

DATA = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
MESH, PLAN = ts.make_mesh(batch=2, model=2), ts.ShardingPlan({"0.weight": P("model")}, default=P())


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def train(model, optimizer, scheduler, steps):
    """Eager torch."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mean_square(model, DATA)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def state_dicts(parts):
    return [part.state_dict() for part in parts]


def nanogpt(path, parts):
    model, optimizer, scheduler = state_dicts(parts)
    torch.save({"model": model, "optimizer": optimizer, "scheduler": scheduler, "iter_num": 3, "config": {}}, path)
    return path


def lightning(path, parts):
    model, optimizer, scheduler = state_dicts(parts)
    held = {"epoch": 0, "state_dict": model, "optimizer_states": [optimizer], "lr_schedulers": [scheduler]}
    torch.save(held, path)
    return path


def trainer(path, parts):
    path.mkdir()
    ts.export_safetensors(parts[0], path / "model.safetensors")
    torch.save(parts[1].state_dict(), path / "optimizer.pt")
    torch.save(parts[2].state_dict(), path / "scheduler.pt")
    return path


@pytest.mark.parametrize(("write", "on_meta"), [(nanogpt, True), (lightning, False), (trainer, True)])
def test_a_run_goes_on_as_in_torch(write, on_meta, tmp_path):
    parts = make()
    train(*parts, 3)
    path = write(tmp_path / "kept", parts)
    expected = train(*parts, 4)

    with torch.device("meta" if on_meta else "cpu"):
        model, optimizer, scheduler = make(1)
    ts.load_torch(path, model, MESH, PLAN, optimizer=optimizer, scheduler=scheduler)
    step = step_of(model, optimizer=optimizer, mesh=MESH, plan=PLAN)
    state, losses = step.init(seed=0), []
    for _ in range(4):
        state, metrics = step(state, DATA)
        scheduler.step()
        losses.append(float(metrics["loss"]))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)  # float32, four steps of AdamW

    # and back: what a script of torch goes on with
    again = make(2)
    again[0].load_state_dict(step.export(state).state_dict())
    again[1].load_state_dict(step.export_optimizer(state))
    again[2].load_state_dict(scheduler.state_dict())
    torch.testing.assert_close(train(*again, 3), train(*parts, 3), rtol=1e-5, atol=1e-7)


def test_what_does_not_fit_changes_nothing(tmp_path):
    parts = make()
    train(*parts, 2)
    path = nanogpt(tmp_path / "kept", parts)
    model, _, _ = make(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)  # one group, where the file has two
    before = copy.deepcopy(optimizer.state_dict()), list(optimizer.param_groups[0]["params"])
    with pytest.raises(ValueError, match=r"load_torch: the state of the optimizer .* does not fit: loaded state dict"):
        ts.load_torch(path, model, MESH, PLAN, optimizer=optimizer)
    assert optimizer.state_dict() == before[0]
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before[1], strict=True))
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_weights_that_do_not_fit_leave_the_optimizer_alone(tmp_path):
    parts = make()
    train(*parts, 2)
    path = nanogpt(tmp_path / "kept", parts)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias, model[2].bias]}]
    )
    with pytest.raises(ValueError, match=r"2\.weight"):
        ts.load_torch(path, model, MESH, PLAN, optimizer=optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_states_of_other_shapes_are_refused(tmp_path):
    parts = make()
    train(*parts, 1)
    held = {"model": parts[0].state_dict(), "optimizer": parts[1].state_dict()}
    held["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(held, tmp_path / "kept")
    model, optimizer, _ = make()
    with pytest.raises(ValueError, match=r"exp_avg has shape \(3,\) for a parameter of shape \(6, 4\)"):
        ts.load_torch(tmp_path / "kept", model, MESH, PLAN, optimizer=optimizer)


def test_states_by_name_are_taken_in_the_order_of_the_optimizer(tmp_path):
    parts = make()
    train(*parts, 1)
    held = parts[1].state_dict()
    order = ["0.weight", "2.weight", "0.bias", "2.bias"]
    by_name = {"state": {order[n]: state for n, state in held["state"].items()}, "param_groups": []}
    for group in held["param_groups"]:
        by_name["param_groups"].append({**group, "params": [order[n] for n in group["params"]]})
    torch.save({"model": parts[0].state_dict(), "optimizer": by_name}, tmp_path / "kept")
    model, optimizer, _ = make(1)
    ts.load_torch(tmp_path / "kept", model, MESH, PLAN, optimizer=optimizer)
    assert all(
        torch.equal(optimizer.state[p]["exp_avg"], by_name["state"][n]["exp_avg"]) for n, p in model.named_parameters()
    )
    by_name["param_groups"][0]["params"].reverse()
    torch.save({"model": parts[0].state_dict(), "optimizer": by_name}, tmp_path / "kept")
    with pytest.raises(ValueError, match=r"names of parameters, in another order \(as 2\.weight and 0\.weight"):
        ts.load_torch(tmp_path / "kept", model, MESH, PLAN, optimizer=optimizer)


def test_files_without_such_parts_are_refused(tmp_path):
    model, optimizer, scheduler = make()
    weights, kept = model.state_dict(), tmp_path / "kept"
    for held, said in (
        ({"model": weights}, r"has no state of the optimizer: no optimizer\.pt in a directory"),
        ({"net": weights}, "holds 'net', but no weights under one of 'model', 'state_dict'"),
        ({"state_dict": weights, "optimizer_states": [{}, {}]}, r"\['optimizer_states'\] holds 2 states"),
    ):
        torch.save(held, kept)
        with pytest.raises(ValueError, match=said):
            ts.load_torch(kept, model, MESH, PLAN, optimizer=optimizer)
    with pytest.raises(TypeError, match="The scheduler's optimizer is needed too"):
        ts.load_torch(kept, model, MESH, PLAN, scheduler=scheduler)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ts.load_torch(tmp_path / "none", model, MESH, PLAN, optimizer=optimizer)
