"""Lightning's Trainer on a mesh beside the same Trainer on the CPU: logs, validation, files, weights are equal."""

import ctypes
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.loggers.logger import Logger
from torch import nn

import torch_shard as ts

TOLERANCE = 1e-5
"""Of float32, whose sums are taken in another order on a mesh: of numbers in logs, and of a tensor's largest weight."""

BFLOAT16 = 3e-3
"""A rounding to 8 bits is one of 4e-3 at most, and the policies of CPU and CUDA round other values."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without what Lightning says of the machine."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def profiling_ignored() -> None:
    """Ignore SIGPROF.

    libtpu sets a handler that Python does not see. The plain Trainer, at its end, puts back what Python sees: the
    default, which ends the process.
    """
    signal.signal(signal.SIGPROF, signal.SIG_IGN)


# ---- modules, data, a run ----


class Net(lightning.LightningModule):
    """What most modules do: steps that log, an optimizer, a schedule."""

    def __init__(self, schedule: str = "epoch", optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        # Adam magnifies rounding: of a bias before BatchNorm, whose gradient is rounding alone, and of gradients that
        # are smaller than its epsilon.
        self.net = nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))
        self.schedule = schedule
        self.make_optimizer = optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4))
        self.outputs: list[torch.Tensor] = []

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        logits = self.net(x)
        return F.cross_entropy(logits, y), (logits.argmax(-1) == y).float().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, accuracy = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": accuracy, "twice": 2 * loss.item()}, on_step=False, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("rows", 1.0 * len(batch[1]), reduce_fx=torch.sum, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, accuracy = self.loss(batch)
        self.outputs.append(loss)
        self.log("val_loss", loss)
        self.log("val_accuracy", accuracy, on_step=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", torch.stack(self.outputs).mean())
        self.outputs.clear()

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, _ = self.loss(batch)
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Any) -> dict[str, torch.Tensor]:
        logits = self.net(batch[0])
        return {"logits": logits, "classes": logits.argmax(-1)}

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        match self.schedule:
            case "epoch":
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
            case "step":
                schedule = torch.optim.lr_scheduler.OneCycleLR(
                    optimizer, max_lr=1e-2, total_steps=int(self.trainer.estimated_stepping_batches)
                )
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
            case "plateau":
                schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}
            case _:
                return optimizer


class Memory(Logger):
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.entries.append({**metrics, "step": step or 0})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def rows(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.randn(16, generator=draws), torch.randint(0, 4, (), generator=draws)) for _ in range(num)]


def loader(num: int, size: int = 32) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(rows(num), batch_size=size)  # pyright: ignore[reportArgumentType]


def make_trainer(on_mesh: bool, **options: Any) -> lightning.Trainer:
    arguments: dict[str, Any] = {
        "max_epochs": 3,
        "logger": Memory(),
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if on_mesh:
        arguments["strategy"] = ts.lightning.OnMesh(mesh=ts.make_mesh(batch=4, model=2))
    else:
        arguments |= {"accelerator": "cpu", "devices": 1}
    return lightning.Trainer(**arguments | options)


def both(
    module: Callable[[], lightning.LightningModule] = Net,
    loaders: Any = None,
    more: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> tuple[lightning.Trainer, lightning.Trainer]:
    """The same run on the CPU and on four devices by two."""
    runs: list[lightning.Trainer] = []
    for on_mesh in (False, True):
        torch.manual_seed(0)
        trainer = make_trainer(on_mesh, **options | more())
        trainer.fit(module(), *loaders or (loader(128), loader(64)))
        runs.append(trainer)
    return runs[0], runs[1]


def weights(trainer: lightning.Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().double() for name, value in trainer.lightning_module.state_dict().items()}


def metrics(trainer: lightning.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_equal(theirs: lightning.Trainer, ours: lightning.Trainer, tolerance: float = TOLERANCE) -> None:
    assert theirs.global_step == ours.global_step > 0
    assert metrics(ours) == pytest.approx(metrics(theirs), rel=tolerance)
    logs = [trainer.logger.entries for trainer in (theirs, ours) if isinstance(trainer.logger, Memory)]
    for expected, actual in zip(*logs, strict=True):
        assert actual == pytest.approx(expected, rel=tolerance)
    mine = weights(ours)
    for name, value in weights(theirs).items():
        assert float((mine[name] - value).abs().max()) <= tolerance * float(value.abs().max().clamp(min=0.01)), name


# ---- runs ----


def test_a_run_is_that_of_the_cpu():
    """Accumulation, clipping, a schedule, sums and means, a last batch of six rows; then what the user sees."""
    loaders = loader(102), loader(54)
    theirs, ours = both(loaders=loaders, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert_equal(theirs, ours)
    assert ours.lightning_module.net[0].weight.device.type == "jax"

    expected, actual = (trainer.predict(trainer.lightning_module, loader(54))[1] for trainer in (theirs, ours))
    assert actual["classes"].dtype == torch.int64
    assert torch.equal(actual["classes"], expected["classes"])
    torch.testing.assert_close(actual["logits"], expected["logits"], rtol=TOLERANCE, atol=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "averaged weights": {"more": lambda: {"callbacks": [callbacks.EMAWeightAveraging(decay=0.5)]}},
    "steps": {"module": lambda: Net("step")},
    "an epoch that does not divide": {"loaders": (loader(150), loader(70)), "accumulate_grad_batches": 2},
    "values clipped": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "module": lambda: Net("none")},
    "a plateau": {"module": lambda: Net("plateau"), "max_epochs": 5},
    "sgd": {"module": lambda: Net("epoch", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))},
    "validation within epochs": {"val_check_interval": 2, "limit_train_batches": 4, "max_epochs": 2},
    "accumulation that changes": {
        "more": lambda: {"callbacks": [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]}
    },
    "learning rates": {"more": lambda: {"callbacks": [callbacks.LearningRateMonitor()]}, "module": lambda: Net("step")},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_the_cpu_for(case: str):
    theirs, ours = both(**CASES[case])
    assert_equal(theirs, ours)


def test_handlers_of_signals_that_a_c_library_has_set_stay():
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype = ctypes.c_void_p
    set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
    ignore = 1  # SIG_IGN of C
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    set_handler(signal.SIGUSR2, ignore)
    make_trainer(True).fit(Net(), loader(64))
    assert set_handler(signal.SIGUSR2, ignore) == ignore


# ---- what modules ask for and keep ----


class Asks(Net):
    """Uses numbers of the run in its loss, other kinds of batches, metrics of torchmetrics, and hooks with outputs."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        self.seen: list[float] = []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return {"x": batch[0], "y": batch[1]}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": 2 * batch["x"]}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.train_accuracy.update(logits, batch["y"])
        self.log("accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        if self.current_epoch >= 1:
            loss = loss * 0.5
        if batch_idx % 2 == 0:
            self.log("even", loss)
        annealed = min(1.0, self.global_step / 8) * logits.square().mean()
        self.log("annealed", annealed)
        self.log("step", self.global_step * 1.0)
        offset = torch.ones(4, device=self.device)
        return {"loss": loss + annealed + offset.sum() * 0, "largest": logits.detach().abs().max()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["largest"]) + float(outputs["loss"]))
        self.log("of_hook", float(batch_idx))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self.net(batch["x"])
        self.val_accuracy.update(logits, batch["y"])
        self.log(f"val_accuracy_{dataloader_idx}", self.val_accuracy)
        self.log("val_loss", F.cross_entropy(logits, batch["y"]) + dataloader_idx)
        return logits

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(float(outputs.abs().max()))

    def on_validation_epoch_end(self) -> None:
        pass


@pytest.mark.slow
def test_what_modules_ask_for_and_keep():
    theirs, ours = both(Asks, (loader(128), [loader(64), loader(32)]))
    assert_equal(theirs, ours)
    seen = [trainer.lightning_module.seen for trainer in (theirs, ours)]
    assert seen[1] == pytest.approx(seen[0], rel=TOLERANCE)
    assert len(seen[0]) == 3 * (4 + 3) + 3


@pytest.mark.slow
def test_a_checkpoint_goes_on_elsewhere_and_back(tmp_path: Path):
    def run(on_mesh: bool, max_epochs: int, name: str, start: Path | None = None) -> lightning.Trainer:
        torch.manual_seed(0)
        trainer = make_trainer(on_mesh, max_epochs=max_epochs)
        trainer.fit(Net(), loader(128), loader(64), ckpt_path=start)
        trainer.save_checkpoint(tmp_path / name)
        return trainer

    for first in (False, True):
        run(first, 2, "first.ckpt")
        there, here = (run(on_mesh, 4, f"second{on_mesh}.ckpt", tmp_path / "first.ckpt") for on_mesh in (False, True))
        assert_equal(there, here)
        theirs, ours = (torch.load(tmp_path / f"second{on_mesh}.ckpt", weights_only=False) for on_mesh in (False, True))
        assert theirs["loops"] == ours["loops"]
        assert theirs["optimizer_states"][0]["param_groups"] == ours["optimizer_states"][0]["param_groups"]
        for number, moments in theirs["optimizer_states"][0]["state"].items():
            for name, expected in moments.items():
                actual = ours["optimizer_states"][0]["state"][number][name]
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_callbacks_keep_the_best_and_stop_early(tmp_path: Path):
    def more() -> dict[str, Any]:
        best = callbacks.ModelCheckpoint(tmp_path / str(len(stops)), monitor="val_loss", save_top_k=1, filename="best")
        stops.append(callbacks.EarlyStopping("val_loss", patience=1))
        return {"callbacks": [best, stops[-1]], "enable_checkpointing": True}

    stops: list[callbacks.EarlyStopping] = []
    module = lambda: Net("none", lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))  # noqa: E731
    theirs, ours = both(module, more=more, max_epochs=20, num_sanity_val_steps=0)
    assert_equal(theirs, ours, 1e-4)  # a learning rate of a half magnifies rounding
    assert stops[0].stopped_epoch == stops[1].stopped_epoch > 0
    kept = [trainer.checkpoint_callback.best_model_score for trainer in (theirs, ours)]
    assert float(kept[1]) == pytest.approx(float(kept[0]), rel=1e-4)

    tested = [trainer.test(trainer.lightning_module, loader(64), "best", verbose=False) for trainer in (theirs, ours)]
    assert tested[1][0] == pytest.approx(tested[0][0], rel=1e-4)
    loaded = torch.load(tmp_path / "1" / "best.ckpt", weights_only=True)
    assert loaded["state_dict"]["net.0.weight"].device.type == "cpu"


@pytest.mark.slow
def test_a_module_is_validated_and_trained_again():
    runs: list[lightning.Trainer] = []
    losses: list[list[Any]] = []
    for on_mesh in (False, True):
        torch.manual_seed(0)
        module, trainer = Net("none"), make_trainer(on_mesh, max_epochs=2)
        losses.append([trainer.validate(module, loader(64), verbose=False)])
        trainer.fit(module, loader(128), loader(64))
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, loader(128))
        losses[-1].append(trainer.validate(module, loader(64), verbose=False))
        runs.append(trainer)
    assert_equal(*runs)
    for theirs, ours in zip(*losses, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=TOLERANCE)


@pytest.mark.slow
def test_bf16_mixed_is_autocast():
    theirs, ours = both(precision="bf16-mixed")
    assert metrics(ours)["val_loss"] == pytest.approx(metrics(theirs)["val_loss"], rel=BFLOAT16)
    assert {value.dtype for value in ours.lightning_module.parameters()} == {torch.float32}
    logits = ours.predict(ours.lightning_module, loader(32))[0]["logits"]
    assert logits.dtype == torch.bfloat16


class Keeps(Net):
    """Keeps tensors for its hooks, which keep other things; and reads some of them in a way that no code shows."""

    def __init__(self) -> None:
        super().__init__("none")
        self.scale, self.best, self.history = 2.0, 0.0, {"loss": [1.0]}
        self.last = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.last = self.net(batch[0])
        loss = F.cross_entropy(self.last, batch[1])
        self.count = loss.item()
        return loss * getattr(self, "sca" + "le")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.last is not None
        self.history["loss"].append(float(self.last.detach().sum()))
        self.best = float(self.count) + batch_idx

    def on_validation_epoch_end(self) -> None:
        self.history["validation"] = [float(each) for each in self.outputs]
        self.outputs = []


def test_hooks_keep_what_they_like_and_no_program_is_made_for_it():
    theirs, ours = both(Keeps)
    assert_equal(theirs, ours)
    for name in ("loss", "validation"):
        expected, actual = (trainer.lightning_module.history[name] for trainer in (theirs, ours))
        assert len(expected) == {"loss": 1 + 3 * 4, "validation": 2}[name]
        assert actual == pytest.approx(expected, rel=TOLERANCE)
    assert ours.lightning_module.best == pytest.approx(theirs.lightning_module.best, rel=TOLERANCE)
    assert ours.strategy.train_step.num_compiles == 1


# ---- what is refused ----


def refused(match: str, module: lightning.LightningModule | None = None, loaders: Any = None, **options: Any) -> None:
    trainer = make_trainer(True, **options)
    with pytest.raises(NotImplementedError, match=match):
        trainer.fit(module or Net(), loaders or loader(32))


@pytest.mark.parametrize(
    ("hook", "instead"),
    [
        ("on_before_backward", "change the loss in training_step"),
        ("on_after_backward", "gradients are never on the host"),
        ("on_before_optimizer_step", "gradients are never on the host"),
        ("on_before_zero_grad", "on_train_batch_end is called after it"),
        ("configure_gradient_clipping", "gradient_clip_val of the Trainer"),
        ("optimizer_step", "the update is in the program"),
        ("optimizer_zero_grad", "a step keeps no gradients"),
        ("backward", "the step computes gradients"),
    ],
)
def test_hooks_within_the_step_are_refused_by_name(hook: str, instead: str):
    module = type("Hooked", (Net,), {hook: lambda self, *args, **options: None})()
    refused(rf"Hooked\.{hook}: .*{instead}", module)


def test_callbacks_within_the_step_are_refused_by_name():
    class Watches(callbacks.Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            pass

    refused(r"Watches\.on_after_backward", callbacks=[Watches()])


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("precision='64-true': use 'bf16-mixed'", {"precision": "64-true"}),
        ("precision='bf16-true': use 'bf16-mixed'", {"precision": "bf16-true"}),
        ("detect_anomaly=True: ts.find_nan", {"detect_anomaly": True}),
        ("devices=2, num_nodes=1: leave them out", {"devices": 2, "accelerator": "cpu"}),
    ],
)
def test_options_that_cannot_be_meant_are_refused(match: str, options: dict[str, Any]):
    refused(match, **options)


def test_manual_optimization_is_refused():
    module = Net()
    module.automatic_optimization = False
    refused(r"Net\.automatic_optimization=False: an own loop", module)


def test_a_compiled_module_is_refused():
    trainer = make_trainer(True)
    with pytest.raises(NotImplementedError, match=r"torch\.compile\(Net\): fit the module itself"):
        trainer.fit(torch.compile(Net(), backend="eager"), loader(32))  # pyright: ignore[reportArgumentType]


def test_an_optimizer_that_is_not_taken_is_refused_by_its_name():
    trainer = make_trainer(True)
    with pytest.raises(TypeError, match=r"the optimizer is a torch\.optim\.lbfgs\.LBFGS"):
        trainer.fit(Net("none", torch.optim.LBFGS), loader(32))


def test_steps_that_cannot_be_compiled_are_refused():
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

    class AsksForRates(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    class ReadsList(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.outputs.append(loss)
            self.log("mean", torch.stack(list(self.outputs)).mean())
            return loss

    class NamesNumbers(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log(f"loss_{loss.item():.3f}", loss)
            return loss

    class Anneals(Net):
        temperature = 0.0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.temperature = 1.0 + batch_idx

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) / self.temperature

    refused(r"Anneals\.temperature was 1\.0 at the first", Anneals(), loaders=loader(64), accumulate_grad_batches=2)
    refused(r"Skips\.training_step returns NoneType without a loss", Skips())
    refused(r"training_step asks for trainer\.optimizers.*LearningRateMonitor", AsksForRates())
    refused(r"a step reads the list ReadsList\.outputs, to which it appends", ReadsList())
    refused("Here a number of the step becomes a part of a text", NamesNumbers())


def test_options_that_the_trainer_says_are_refused():
    with pytest.raises(TypeError, match="step_options has 'accumulate_steps', which accumulate_grad_batches of the"):
        ts.lightning.OnMesh(mesh=ts.make_mesh(batch=8), step_options={"accumulate_steps": 2})


def test_there_is_a_step_after_fit():
    strategy = ts.lightning.OnMesh(mesh=ts.make_mesh(batch=8))
    with pytest.raises(RuntimeError, match=r"after trainer\.fit\(\)"):
        _ = strategy.train_step
