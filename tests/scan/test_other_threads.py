"""What other threads do while a layer is captured is not the layer's."""

import threading

import torch
from torch import nn

from tests.oracles.steps import sgd_step

SEEN, ERRORS = [], []  # a capture puts back what it changes of modules


class Talkative(nn.Module):
    """A layer during whose forward another thread, a data loader's say, trains something of its own with hooks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        thread = threading.Thread(target=self.elsewhere)
        thread.start()
        thread.join()
        return self.linear(x).tanh()

    def elsewhere(self):
        try:
            weight = torch.ones(3, requires_grad=True)
            loss = (weight * 2).sum()
            weight.register_hook(lambda grad: SEEN.append(grad.tolist()))
            loss.grad_fn.register_hook(lambda *grads: None)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                (loss * loss).backward()
            normal = torch.distributions.Normal(0.0, torch.tensor(1.0))
            SEEN.append(normal._validate_args)
        except BaseException as error:
            ERRORS.append(error)


def test_hooks_of_another_thread_are_not_hooks_of_the_layer(monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile switches it off
    model = nn.Sequential(*(Talkative() for _ in range(4)))
    step = sgd_step(model, lambda model, batch: model(batch).square().mean(), (8, 1), scan_layers=True)
    step(step.init(seed=0), torch.ones(8, 8))
    assert ERRORS == []
    assert len(SEEN) >= 2 * len(model)
    assert [found for found in SEEN if found not in ([24.0] * 3, True)] == []
    assert "1 to 3: one loop, 3 iterations" in step.report()
