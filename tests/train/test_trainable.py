"""Steps that train parts of one model, each with its loss and optimizer, over one state (`trainable=`)."""

import copy

import jax
import optax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.nn import functional as F

import torch_shard as ts
from tests.oracles.steps import step_of

PLAN = ts.ShardingPlan({"netG.0.weight": P("model"), "netD.0.weight": P("model")}, default=P())
REAL = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
BATCH = {"real": REAL, "noise": NOISE}


class Gan(nn.Module):
    def __init__(self, depth=1):
        super().__init__()
        torch.manual_seed(0)
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.Tanh())]
        self.netG = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), *hidden, nn.Linear(8, 6))
        self.netD = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), *copy.deepcopy(hidden), nn.Linear(8, 1))


def loss_d(gan, batch):
    real = gan.netD(batch["real"])
    fake = gan.netD(gan.netG(batch["noise"]).detach())
    ones, zeros = torch.ones_like(real), torch.zeros_like(fake)
    return F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, zeros)


def loss_g(gan, batch):
    fake = gan.netD(gan.netG(batch["noise"]))
    return F.binary_cross_entropy_with_logits(fake, torch.ones_like(fake))


def in_torch(gan, optimizers, batch):
    """Eager torch, as pytorch/examples' dcgan does it."""
    losses, norms = [], []
    for _ in range(4):
        for name, loss_fn in (("netD", loss_d), ("netG", loss_g)):
            gan.zero_grad()
            loss = loss_fn(gan, batch)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(getattr(gan, name).parameters(), 0.5).item())
            optimizers[name].step()
            losses.append(loss.item())
    return losses, norms


def make(gan, loss_fn=loss_d, optimizer=None, **options):
    return step_of(gan, loss_fn, optimizer, mesh=(2, 2), plan=PLAN, **options)


def steps_of(gan, *optimizers):
    """Of the discriminator and of the generator, each with an optimizer of its own or all with one."""
    parts = zip(("netD.**", "netG.**"), (loss_d, loss_g), 2 * optimizers, strict=False)
    return [make(gan, loss_fn, own, trainable=part, clip_grad_norm=0.5) for part, loss_fn, own in parts]


def in_torch_optimizers(gan):
    return {
        name: torch.optim.Adam(getattr(gan, name).parameters(), lr=0.01, betas=(0.5, 0.999))
        for name in ("netD", "netG")
    }


@pytest.mark.parametrize(("kind", "depth"), [("torch", 1), ("optax", 4)])
def test_a_gan_trains_as_in_torch(kind, depth):
    """In float64, as Adam makes a whole step of a gradient that is only rounding."""
    batch = {name: value.double() for name, value in BATCH.items()}
    gan = Gan(depth).double()
    expected, norms = in_torch(eager := copy.deepcopy(gan), in_torch_optimizers(eager), batch)
    optimizers = in_torch_optimizers(gan).values() if kind == "torch" else [optax.adam(0.01, 0.5)]
    with jax.enable_x64(True):
        steps = steps_of(gan, *optimizers)
        state, losses, found_norms = steps[0].init(seed=0), [], []
        for _ in range(4):
            for step in steps:
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
                found_norms.append(float(metrics["grad_norm"]))
        assert losses == pytest.approx(expected, rel=1e-10)
        assert found_norms == pytest.approx(norms, rel=1e-8)
        assert sorted(state.opt_state) == ["netD.**", "netG.**"]
        assert bool(steps[0].programs[0].loops) == (depth > 1)
        for name, value in steps[1].export(state).state_dict().items():
            torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-8, atol=1e-9, msg=name)
        steps[1].prove(state, batch).raise_if_different()
        if kind == "torch":
            back = steps[0].export_optimizer(state)
            assert len(back["state"]) == len(list(gan.netD.parameters()))
            assert back["state"][0]["step"] == 4


def test_states_go_through_a_checkpoint(tmp_path):
    steps = steps_of(Gan(), optax.adam(0.01))

    def run(state, times):
        losses = []
        for _ in range(times):
            for step in steps:
                state, metrics = step(state, BATCH)
                losses.append(float(metrics["loss"]))
        return state, losses

    state, _ = run(steps[0].init(seed=0), 2)
    with ts.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
        checkpointer.wait()
        _, expected = run(state, 2)
        _, found = run(checkpointer.restore(steps), 2)
    assert found == expected


def test_a_part_alone_leaves_the_rest():
    gan = Gan()
    step, first = make(gan, trainable="netD.**"), copy.deepcopy(gan.state_dict())
    state, _ = step(step.init(seed=0), BATCH)
    exported = step.export(state).state_dict()
    for name, before in first.items():
        changed = not torch.equal(before, exported[name])
        assert changed == (name.startswith("netD") or "running" in name or "num_batches" in name), name


@pytest.mark.parametrize(
    ("trainable", "error", "says"),
    [
        ("netD", ValueError, r"trainable='netD' finds no trainable parameter: none has such a name"),
        (["netD.**", "other.*"], ValueError, r"trainable='other\.\*' finds no trainable parameter"),
        (3, TypeError, r"trainable must be a name or a glob"),
        ([], TypeError, r"trainable must be a name or a glob"),
    ],
)
def test_bad_globs_are_refused(trainable, error, says):
    with pytest.raises(error, match=says):
        make(Gan(), trainable=trainable)


def test_an_optimizer_of_other_parameters_is_refused():
    gan = Gan()
    with pytest.raises(ValueError, match=r"the optimizer has parameters that trainable='netD\.\*\*' leaves out: netG"):
        steps_of(gan, torch.optim.SGD(gan.parameters(), lr=0.1))


def test_a_state_of_the_whole_model_is_refused():
    gan, adam = Gan(), optax.adam(0.1)
    whole, step = make(gan, optimizer=adam), make(gan, optimizer=adam, trainable="netD.**")
    with pytest.raises(ValueError, match=r"of a step that trains the whole model, and this one trains netD"):
        step(whole.init(seed=0), BATCH)
    with pytest.raises(ValueError, match=r"opt_state does not fit"):
        whole(step.init(seed=0), BATCH)
