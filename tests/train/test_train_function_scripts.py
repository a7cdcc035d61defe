"""Training loops that people have, each with its step in a function, with the decorator above it and in eager torch."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_shard as ts

ROWS, STEPS = 16, 10

Decorate = Callable[[nn.Module, torch.optim.Optimizer], Callable[[Any], Any]]
Loop = Callable[[Decorate], tuple[list[Any], list[tuple[nn.Module, torch.optim.Optimizer]]]]
"""Runs a loop and gives what it has logged, and the models with their optimizers."""


def batches(seed: int = 0) -> Iterator[torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield generator


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.attn, self.proj = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int = 64, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(16, width)
        self.blocks, self.ln_f = nn.Sequential(*[Block(width, 4) for _ in range(layers)]), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.ln_f(self.blocks(x)))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 64, (ROWS, 17), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def nano_gpt(decorate: Decorate) -> Any:
    torch.manual_seed(0)
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    ctx, grad_clip, gradient_accumulation_steps = nullcontext(), 1.0, 2
    running_mfu, log = -1.0, []

    @decorate(model, optimizer)
    def train(X: torch.Tensor, Y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for micro_step in range(gradient_accumulation_steps):
            rows = slice(micro_step * ROWS // 2, (micro_step + 1) * ROWS // 2)
            with ctx:
                _, loss = model(X[rows], Y[rows])
                loss = loss / gradient_accumulation_steps
            scaler.scale(loss).backward()
        if grad_clip != 0.0:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss, norm

    for number, generator in enumerate(batches()):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * number / STEPS))
        loss, norm = train(*tokens(generator))
        lossf = loss.item() * gradient_accumulation_steps
        running_mfu = lossf if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * lossf
        log.append((lossf, norm.item(), running_mfu))
    return log, [(model, optimizer)]


class MinGPTTrainer:
    """The trainer of minGPT: callbacks after each batch, the loss as an attribute."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.callbacks, self.iter_num = GPT(), [], 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss: Any = None

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        model = self.model
        _, self.loss = model(x, y)
        model.zero_grad(set_to_none=True)
        self.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()
        for callback in self.callbacks:
            callback(self)
        self.iter_num += 1


def min_gpt(decorate: Decorate) -> Any:
    trainer, log = MinGPTTrainer(), []
    trainer.callbacks.append(lambda trainer: log.append((trainer.iter_num, trainer.loss.item())))
    train = decorate(trainer.model, trainer.optimizer)(trainer.train)
    for generator in batches():
        train(*tokens(generator))
    return log, [(trainer.model, trainer.optimizer)]


class ConvNet(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv2(F.relu(self.conv1(x)))))
        return self.fc(torch.flatten(F.max_pool2d(x, 2), 1))


def images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, 1, 12, 12, generator=generator), torch.randint(0, 10, (ROWS,), generator=generator)


def mnist(decorate: Decorate) -> Any:
    torch.manual_seed(0)
    model = ConvNet(norm=False)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    log = []

    @decorate(model, optimizer)
    def train(data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        output = F.log_softmax(model(data), dim=1)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        return loss

    for number, generator in enumerate(batches()):
        loss = train(*images(generator))
        if number % 5 == 4:
            log.append((loss.item(), scheduler.get_last_lr()[0]))
            scheduler.step()
    return log, [(model, optimizer)]


class AverageMeter:
    def __init__(self) -> None:
        self.val, self.sum, self.count, self.avg = 0.0, 0.0, 0, 0.0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...]) -> list[torch.Tensor]:
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def imagenet(decorate: Decorate) -> Any:
    torch.manual_seed(0)
    model, criterion = ConvNet(norm=True), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    losses, top1, top5, log = AverageMeter(), AverageMeter(), AverageMeter(), []
    model.train()

    @decorate(model, optimizer)
    def train(images: torch.Tensor, target: torch.Tensor) -> None:
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0].item(), images.size(0))
        top5.update(acc5[0].item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for generator in batches():
        train(*images(generator))
        log.append((losses.val, losses.avg, top1.avg, top5.avg))
    return log, [(model, optimizer)]


def run_clm_no_trainer(decorate: Decorate) -> Any:
    """As that of transformers: the batch is a dict, and the schedule goes on with the optimizer."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    total_loss, completed_steps, log = 0.0, 0, []
    model.train()

    @decorate(model, optimizer)
    def train(batch: dict[str, torch.Tensor]) -> None:
        nonlocal total_loss, completed_steps
        _, loss = model(batch["input_ids"], batch["labels"])
        loss.backward()
        optimizer.step()
        total_loss += loss.detach().float()  # it stood before backward()
        lr_scheduler.step()
        optimizer.zero_grad()
        completed_steps += 1

    for generator in batches():
        train(dict(zip(("input_ids", "labels"), tokens(generator), strict=True)))
        log.append((float(total_loss), completed_steps, lr_scheduler.get_last_lr()[0]))
    return log, [(model, optimizer)]


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.first, self.last = nn.Embedding(20, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.last(F.silu(self.first(x) + self.time(t)))


def ddpm(decorate: Decorate) -> Any:
    torch.manual_seed(0)
    model = Denoiser()
    ema_model = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 20), 0)
    log = []

    @decorate(model, optimizer)
    def train(x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        share = kept[t][:, None]
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for averaged, parameter in zip(ema_model.parameters(), model.parameters(), strict=True):
                averaged.copy_(0.9 * averaged.to(parameter.device) + 0.1 * parameter)
        return loss

    for generator in batches():
        x, noise = torch.randn(2, ROWS, 8, generator=generator)
        log.append(train(x, noise, torch.randint(0, 20, (ROWS,), generator=generator)).item())
    log.append([parameter.detach().to("cpu") for parameter in ema_model.parameters()])
    return log, [(model, optimizer)]


def critic(decorate: Decorate) -> Any:
    """That of a WGAN with a gradient penalty and clamped weights, and its generator."""
    torch.manual_seed(0)
    netG, netD = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizerD = torch.optim.RMSprop(netD.parameters(), lr=5e-4)
    optimizerG = torch.optim.RMSprop(netG.parameters(), lr=5e-4)
    log = []

    @decorate(netD, optimizerD)
    def train_critic(real: torch.Tensor, z: torch.Tensor, alpha: torch.Tensor) -> tuple[float, float]:
        netD.zero_grad()
        with torch.no_grad():
            fake = netG(z)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        gradients = torch.autograd.grad(netD(mixed).sum(), mixed, create_graph=True)[0]
        penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
        loss = netD(fake).mean() - netD(real).mean() + 10 * penalty
        loss.backward()
        optimizerD.step()
        for p in netD.parameters():
            p.data.clamp_(-0.2, 0.2)
        return loss.item(), penalty.item()

    @decorate(netG, optimizerG)
    def train_generator(z: torch.Tensor) -> float:
        netG.zero_grad()
        loss = -netD(netG(z)).mean()
        loss.backward()
        optimizerG.step()
        return loss.item()

    for generator in batches():
        z = torch.randn(ROWS, 4, generator=generator)
        real, alpha = torch.randn(ROWS, 8, generator=generator), torch.rand(ROWS, 1, generator=generator)
        log.append((*train_critic(real, z, alpha), train_generator(z)))
    return log, [(netD, optimizerD), (netG, optimizerG)]


def dpo(decorate: Decorate) -> Any:
    torch.manual_seed(0)
    policy = GPT()
    reference = GPT().eval().requires_grad_(False)  # other weights: `now > before` is no question of rounding
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    stats: dict[str, list[float]] = {"chosen": [], "rejected": [], "accuracy": []}
    log = []

    def log_probs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits, _ = model(ids[:, :-1])
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

    @decorate(policy, optimizer)
    def train(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            before = log_probs(reference, chosen) - log_probs(reference, rejected)
        now = log_probs(policy, chosen) - log_probs(policy, rejected)
        loss = -F.logsigmoid(beta * (now - before)).mean()
        stats["chosen"].append((beta * now).mean().item())
        stats["rejected"].append((beta * before).mean().item())
        stats["accuracy"].append((now > before).float().mean().item())
        loss.backward()
        optimizer.step()
        return loss

    for generator in batches():
        chosen, rejected = torch.randint(0, 64, (2, ROWS, 12), generator=generator)
        log.append(train(chosen, rejected, 0.1).item())
    return [log, stats], [(policy, optimizer)]


class MoCo(nn.Module):
    """A queue and an encoder of keys that follows that of queries, written in forward."""

    def __init__(self, dim: int = 8, size: int = 64) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = nn.Linear(12, dim), nn.Linear(12, dim)
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, im_q: torch.Tensor, im_k: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = (q * k).sum(1, keepdim=True)
        l_neg = q @ self.queue.clone().detach()
        with torch.no_grad():
            ptr = int(self.queue_ptr)
            self.queue[:, ptr : ptr + k.shape[0]] = k.T
            self.queue_ptr[0] = (ptr + k.shape[0]) % self.queue.shape[1]
        return torch.cat([l_pos, l_neg], dim=1) / 0.07


def moco(decorate: Decorate) -> Any:
    torch.manual_seed(0)
    model = MoCo()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.05, momentum=0.9)
    log = []

    @decorate(model, optimizer)
    def train(im_q: torch.Tensor, im_k: torch.Tensor) -> torch.Tensor:
        output = model(im_q, im_k)
        loss = F.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.long, device=output.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():  # it stood in forward, before the keys
            for param_q, param_k in zip(model.encoder_q.parameters(), model.encoder_k.parameters(), strict=True):
                param_k.data = param_k.data * 0.9 + param_q.data * 0.1
        return loss

    for generator in batches():
        im_q, im_k = torch.randn(2, ROWS, 12, generator=generator)
        log.append(train(im_q, im_k).item())
    return log, [(model, optimizer)]


LOOPS: list[Loop] = [nano_gpt, min_gpt, mnist, imagenet, run_clm_no_trainer, ddpm, critic, dpo, moco]

PROGRAMS = {moco: 2}
"""Where Python asks for the place in a queue: one for the beginning, one for any other."""


def of_all(models: list[tuple[nn.Module, torch.optim.Optimizer]]) -> list[Any]:
    """Parameters, buffers, moments and numbers of groups."""
    found: list[Any] = []
    for model, optimizer in models:
        found.append({name: value.detach().to("cpu") for name, value in model.state_dict().items()})
        state = optimizer.state_dict()
        found.append([group["lr"] for group in state["param_groups"]])
        found.append({(n, k): torch.as_tensor(v).to("cpu") for n, of in state["state"].items() for k, v in of.items()})
    return found


def assert_same(ours: Any, theirs: Any) -> None:
    """To what sums in another order make of ten steps in float32.

    Adam and RMSprop move an entry whose gradient is zero but for rounding by a whole step: 1 % of the way it may go.
    """
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=1e-3, atol=2e-4)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


class Made:
    """A function that is decorated, and the arguments of its last call."""

    def __init__(self, train: ts.TrainFunction[Any, Any]) -> None:
        self.train, self.args = train, ()

    def __call__(self, *args: Any) -> Any:
        self.args = args
        return self.train(*args)


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_are_as_in_eager_torch_and_proved(loop: Loop) -> None:
    theirs, of_torch = loop(lambda *_: lambda function: function)
    all_made: list[Made] = []
    mesh = ts.make_mesh(batch=4, model=2)

    def decorate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def note(function: Any) -> Any:
            all_made.append(Made(ts.train_step(model, optimizer, mesh=mesh, plan=ts.plans.fsdp_tp)(function)))
            return all_made[-1]

        return note

    ours, models = loop(decorate)
    assert_same(ours, theirs)
    assert_same(of_all(models), of_all(of_torch))
    assert [made.train.step.num_compiles for made in all_made] == [PROGRAMS.get(loop, 1)] * len(all_made)
    for made in all_made:
        made.train.prove(*made.args).raise_if_different()
