"""One life: a random sequence of what a script does, by torch_shard and in eager torch; all values are compared."""

import copy
import pathlib
import random
import tempfile
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import PartitionSpec as P

import torch_shard as ts
from validation.judging import Verdict, ended_by, is_ours
from validation.lives.worlds import KINDS, OPTIMIZERS, SCHEDULERS, About, Net, World, batch, loss_fn

EXACT = 1e-9
"""Of the largest entry: float64, some steps of small sums."""

MESHES = ((1, 1), (2, 1), (4, 1), (2, 2), (1, 4))

IN_TORCH = ("eager", "begin", "begin", "rate", "reach")
ON_MESH = ("steps", "steps", "steps", "fit", "fit", "rate", "restore", "resume", "export", "file", "hand over")
ON_LIVE_MODEL = ("write", "write", "moment", "look", "leave", "again")
RARE = ("load", "load late")


def draw(seed: int) -> tuple[About, list[tuple[str, int]]]:
    """What a life is about, and what happens in it."""
    random_ = random.Random(seed)
    pick = random_.choice
    model = pick(KINDS)
    clip = pick(("none", "none", "norm", "value"))
    about = About(
        model=model,
        optimizer=pick(list(OPTIMIZERS)),
        groups=pick((1, 1, 2)),
        scheduler=pick(list(SCHEDULERS)),
        clip_norm=0.3 if clip == "norm" else None,
        clip_value=0.05 if clip == "value" else None,
        ema=pick((None, None, 0.9)),
        accumulate=1
        if model == "batch norm"
        else pick((1, 1, 2)),  # of which each microbatch has statistics of its own
    )
    is_reached = model == "late" and pick((True, False))  # after some steps without it
    events, on_mesh = [("eager", random_.randint(1, 3)), ("reach", 1)] if is_reached else list[tuple[str, int]](), False
    for _ in range(random_.randint(4, 8)):
        chance = random_.random()
        what = pick(IN_TORCH if not on_mesh else RARE if chance < 0.05 else ON_LIVE_MODEL if chance < 0.4 else ON_MESH)
        on_mesh = what == "begin" or (on_mesh and what != "export")
        events.append((what, random_.randint(1, 3)))
    return about, events


class Life:
    """The two worlds of a life, and what happens in them."""

    def __init__(self, about: About, directory: pathlib.Path, seed: int) -> None:
        self.about, self._directory, self._random = about, directory, random.Random(seed)
        self.eager = World.of(about, Net(about.model, 0))
        self.ours = World.of(about, Net(about.model, 0))
        self.number = self._base = 0
        self.step: Any = None
        self.state: Any = None
        self.ema: dict[str, torch.Tensor] = {}

    def happen(self, what: str, times: int) -> None:
        """Let it happen in both worlds."""
        getattr(self, f"_{what.replace(' ', '_')}")(times)

    def _eager(self, times: int) -> None:
        for _ in range(times):
            for world in (self.eager, self.ours):
                world.train(batch(self.number))
            self.number += 1

    def _reach(self, times: int) -> None:
        for world in (self.eager, self.ours):
            world.model.reaches = True

    def _rate(self, times: int) -> None:
        for world in (self.eager, self.ours):
            for group in world.optimizer.param_groups:
                group["lr"] *= 0.5

    def _make(self) -> None:
        sizes = self._random.choice(MESHES)
        mesh = ts.make_mesh(batch=sizes[0], model=sizes[1], devices=jax.devices()[: sizes[0] * sizes[1]])
        rules = {"**.weight": P("model")} if sizes[1] > 1 and self.about.model != "batch norm" else {}
        about = self.about
        self.step = ts.make_train_step(
            self.ours.model,
            loss_fn,
            self.ours.optimizer,
            mesh=mesh,
            plan=ts.ShardingPlan(rules, default=P()),
            clip_grad_norm=about.clip_norm,
            clip_grad_value=about.clip_value,
            ema=about.ema,
            accumulate_steps=about.accumulate if sizes[0] * about.accumulate <= 8 else 1,
        )

    def _begin(self, times: int) -> None:
        self._make()
        self._start()

    def _start(self) -> None:
        self.state, self._base = self.step.init(seed=0), self.number
        self.ema = {n: p.detach().clone() for n, p in self.eager.model.named_parameters() if p.requires_grad}

    def _follow(self) -> None:
        """A step in eager torch, with the average that the step on the mesh keeps."""
        self.eager.train(batch(self.number))
        decay = self.about.ema or 0.0
        for name, param in self.eager.model.named_parameters():
            if param.requires_grad:
                self.ema[name] = decay * self.ema[name] + (1 - decay) * param.detach()
        self.number += 1

    def _steps(self, times: int) -> None:
        for _ in range(times):
            self.state, _ = self.step(self.state, batch(self.number))
            self.ours.step_scheduler()
            self._follow()

    def _batches(self, position: int) -> Any:
        return (batch(self._base + position + more) for more in range(99))

    def _fit(self, times: int, **more: Any) -> None:
        steps = self.number - self._base + times
        about = {"scheduler": self.ours.scheduler, "progress": False, **more}
        self.state = ts.fit(self.step, self.state, self._batches, steps=steps, **about)
        for _ in range(times):
            self._follow()

    def _anew(self) -> World:
        """Objects of another process: other values, fresh numbers."""
        fresh = Net(self.about.model, 9)
        fresh.reaches = self.ours.model.reaches
        return World.of(self.about, fresh)

    def _restore(self, times: int) -> None:
        where = self._directory / f"restore{len(list(self._directory.iterdir()))}"
        with ts.Checkpointer(where) as checkpointer:
            checkpointer.save(self.state)
        before, self.ours = self.ours, self._anew()
        self.ours.take_numbers(before)
        self._make()
        self.state = ts.Checkpointer(where).restore(self.step)

    def _resume(self, times: int) -> None:
        where = self._directory / f"resume{self.number}"
        with ts.Checkpointer(where) as checkpointer:
            self._fit(times, checkpointer=checkpointer)
        self.ours, self.state = self._anew(), None
        self._make()
        with ts.Checkpointer(where) as checkpointer:
            self._fit(times, checkpointer=checkpointer)

    def _leave(self, times: int = 1) -> None:
        """The model goes to the CPU, where it is written to, and stays there or comes back."""
        self.ours.model.to("cpu")
        self._write(times)
        if times > 1:
            self.ours.model.to("jax")
        self._steps(1)

    def _in_torch(self) -> World:
        """The present run as objects of torch."""
        model: Any = self.step.export(self.state)
        left = World.of(self.about, model)
        left.optimizer.load_state_dict(self.step.export_optimizer(self.state))
        left.take_numbers(self.ours)
        return left

    def _export(self, times: int) -> None:
        self.ours, self.state, self.step = self._in_torch(), None, None

    def _hand_over(self, times: int) -> None:
        self.ours = self._in_torch()
        self._begin(times)

    def _file(self, times: int) -> None:
        left, path = self._in_torch(), self._directory / f"{self.number}.pt"
        torch.save({"model": left.model.state_dict(), "optimizer": left.optimizer.state_dict()}, path)
        mesh = self.step.mesh
        self.ours = self._anew()
        ts.load_torch(path, self.ours.model, mesh, ts.ShardingPlan({}, default=P()), optimizer=self.ours.optimizer)
        if self.ours.scheduler is not None:
            self.ours.scheduler.load_state_dict(copy.deepcopy(left.scheduler.state_dict()))
        self._begin(times)

    def _load_late(self, times: int) -> None:
        """Moments come into the optimizer when the step was made, and has no state yet."""
        left = self._in_torch()
        moments, left.optimizer.state = left.optimizer.state_dict(), type(left.optimizer.state)(dict)
        self.ours = left
        self._make()
        left.optimizer.load_state_dict(moments)
        self._start()

    def _load(self, times: int) -> None:
        """Other moments come into the optimizer while the state of a run has its own."""
        doubled = copy.deepcopy(self.eager.optimizer.state_dict()["state"])
        for own in doubled.values():
            own.update({name: 2 * value for name, value in own.items() if torch.is_tensor(value) and value.dim()})
        for world in (self.eager, self.ours):
            found = copy.deepcopy(doubled)
            groups = world.optimizer.state_dict()["param_groups"]
            world.optimizer.load_state_dict({"state": found, "param_groups": groups})
        self._steps(times)

    def _write(self, times: int) -> None:
        """Lines that write to the model between steps."""
        name = self._random.choice([name for name, _ in self.eager.model.named_parameters()])
        for world in (self.eager, self.ours):
            with torch.no_grad():
                parameter = world.model.get_parameter(name)
                parameter.data.clamp_(-0.5, 0.5)
                parameter.mul_(0.9)

    def _moment(self, times: int) -> None:
        """Moments that are written in the optimizer, or all of them dropped."""
        drops = self._random.random() < 0.3
        for world in (self.eager, self.ours):
            if drops:
                world.optimizer.state.clear()
            for own in world.optimizer.state.values():
                for value in own.values():
                    if torch.is_tensor(value) and value.dim():
                        value.mul_(0.5)

    def _look(self, times: int) -> None:
        """Evaluate the model in the user's hands by eager operators."""
        outputs: list[torch.Tensor] = []
        for world in (self.eager, self.ours):
            flags = [(module, module.training) for module in world.model.modules()]
            world.model.eval()
            with torch.no_grad():
                x = batch(self.number).to(next(world.model.parameters()).device)
                outputs.append(loss_fn(world.model, x).cpu())
            for module, flag in flags:
                module.training = flag
        assert abs(outputs[0] - outputs[1]) <= EXACT * max(1.0, abs(outputs[0])), "an evaluation is another one"

    def _again(self, times: int) -> None:
        """Another step of the same model and optimizer."""
        self._begin(times)
        self._steps(1)

    def fault(self) -> str:
        """What is apart now; empty if nothing is."""
        model = self.ours.model if self.state is None else self.step.export(self.state)
        pairs = {"value": (dict(model.state_dict()), dict(self.eager.model.state_dict()))}
        found = None if self.state is None else self.step.export_optimizer(self.state)
        pairs["moment"] = (self.ours.moments(found), self.eager.moments())
        pairs["rate"] = (self.ours.rates(), self.eager.rates())
        if self.state is not None:
            pairs["value of the model"] = (dict(self.ours.model.state_dict()), pairs["value"][1])
            pairs["moment of the optimizer"] = (self.ours.moments(), pairs["moment"][1])
        if self.state is not None and self.about.ema is not None:
            averaged = self.step.averaged(self.state).params
            pairs["average"] = ({name: torch.from_numpy(np.array(averaged[name])) for name in self.ema}, self.ema)
        for kind, (mine, wanted) in pairs.items():
            if mine.keys() != wanted.keys():
                return f"{kind}: {sorted(mine.keys() ^ wanted.keys())} on one side alone"
            for name, value in wanted.items():
                own = torch.as_tensor(mine[name]).detach().cpu().double()
                apart = (own - value.detach().double()).abs().max().item() if value.numel() else 0.0
                if not apart <= EXACT * max(1.0, value.abs().max().item()):
                    return f"{kind} {name} apart by {apart:.1e}"
        return ""


def judge(seed: int) -> Verdict:
    """Live a life in this process."""
    about, events = draw(seed)
    past: list[str] = []
    with jax.enable_x64(True), tempfile.TemporaryDirectory() as directory:
        life = Life(about, pathlib.Path(directory), seed)
        for what, times in events:
            past.append(f"{what} {times}")
            try:
                life.happen(what, times)
                if fault := life.fault():
                    return Verdict("wrong", f"{about} {past}: {fault}")
            except Exception as error:
                return ended_by(error, ours=is_ours(error), about=f"{about} {past}: ")
    return Verdict("right")
