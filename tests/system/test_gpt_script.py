"""The loop of nanoGPT, as its users have it: few lines change, and all the others mean what they mean in torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.tables import cases

SCRIPT = """
import math
from contextlib import nullcontext

import torch

dtype, compile = "float32", False
eval_interval, eval_iters, max_iters = 4, 2, 8
learning_rate, min_lr, warmup_iters, lr_decay_iters = 1e-2, 1e-3, 2, 8
gradient_accumulation_steps, grad_clip = 2, 1.0
torch.manual_seed(1337)
ctx = nullcontext()

model = GPT()
model.to(device)
scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=learning_rate, betas=(0.9, 0.95))
if compile:
    model = torch.compile(model)


@torch.no_grad()
def estimate_loss():
    found = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split, device)
            with ctx:
                logits, loss = model(X, Y)
            losses[k] = loss.item()
        found[split] = losses.mean()
    model.train()
    return found


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


X, Y = get_batch("train", device)
iter_num, best_val_loss = 0, 1e9
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                torch.save(checkpoint, out)
    for _ in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train", device)
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
    iter_num += 1
    if iter_num > max_iters:
        break
"""

CHANGES = {
    "import torch\n": """import torch
import torch_shard as ts
""",
    """X, Y = get_batch("train", device)
iter_num""": """mesh = ts.make_mesh(batch=4, model=2)
how = {"mesh": mesh, "plan": ts.plans.fsdp(model, mesh), "clip_grad_norm": grad_clip}
how["accumulate_steps"] = gradient_accumulation_steps
step = ts.make_train_step(model, lambda model, batch: model(*batch)[1], optimizer, **how)
state = step.init(seed=1337)
X, Y = get_batch("train", device)
iter_num""",
    """    for _ in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train", device)
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
""": """    parts = [(X, Y), *(get_batch("train", device) for _ in range(gradient_accumulation_steps - 1))]
    state, metrics = step(state, tuple(map(torch.cat, zip(*parts))))
    X, Y = get_batch("train", device)
""",
    "{loss.item() * gradient_accumulation_steps:.4f}": "{float(metrics['loss']):.4f}",
}


class GPT(cases.GPT):
    """With the loss, and the groups of its optimizer: no decay for what has one dim."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(x, self.tokens.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay: float, learning_rate: float, betas: Any) -> torch.optim.Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def run(script: str, device: str, path: Path) -> tuple[list[float], Any]:
    """The losses of its evaluations, as it prints them, and what it saves.

    (As the loss of a step it prints that of the last microbatch.)
    """
    draws = torch.Generator().manual_seed(0)

    def get_batch(split: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        data = torch.randint(0, 32, (8, 9), generator=draws)
        return data[:, :-1].to(device), data[:, 1:].to(device)

    printed: list[str] = []
    names = {"GPT": GPT, "get_batch": get_batch, "device": device, "out": path, "print": printed.append}
    exec(compile(script, "train.py", "exec"), names)
    evaluations = [line.replace(",", "").split() for line in printed if line.startswith("step")]
    numbers = [float(word) for words in evaluations for word in words if "." in word]
    return numbers, torch.load(path, weights_only=True)


def test_its_loop_trains_evaluates_and_saves_with_ten_other_lines(tmp_path: Path) -> None:
    script = SCRIPT
    for old, new in CHANGES.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    new_lines = [line for line in script.splitlines() if line not in SCRIPT.splitlines()]
    assert len(new_lines) <= 10
    wanted, saved = run(SCRIPT, "cpu", tmp_path / "torch.pt")
    found, own = run(script, "jax", tmp_path / "own.pt")
    assert found == pytest.approx(wanted, abs=2e-4)  # as they are printed, with four digits
    assert own["iter_num"] == saved["iter_num"]
    for name, value in saved["model"].items():
        if name.endswith(".k.bias"):
            continue  # softmax does not see it: its gradient is rounding, which Adam magnifies
        torch.testing.assert_close(own["model"][name], value, rtol=1e-3, atol=1e-4)  # Adam divides by small numbers
    assert own["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    for number, state in saved["optimizer"]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(own["optimizer"]["state"][number][key], value, rtol=1e-3, atol=1e-5)
