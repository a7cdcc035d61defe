"""What torch lets a forward do, one small module each: autograd, mutation, parameters, attributes, control flow."""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.tables.cases import Case, regression

WIDTH = 8
RULES = {"a.weight": P("model"), "b.weight": P(None, "model")}


class Two(nn.Module):
    """Two linear layers and what `body(module, x)` does between and with them."""

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def case(body: Callable[[Any, torch.Tensor], torch.Tensor]) -> Case:
    return Case(body.__name__, lambda: Two(body), regression(WIDTH, out=WIDTH), RULES)


def built(build: Callable[[], nn.Module]) -> Case:
    """Every matrix is split over `model`, by rows and by columns in turn."""
    matrices = [name for name, p in build().named_parameters() if p.ndim == 2]
    specs = itertools.cycle([P("model"), P(None, "model")])
    rules = dict(zip(matrices, specs, strict=False))
    return Case(build.__name__, build, regression(WIDTH, out=WIDTH), rules)


AUTOGRAD, WRITES, STATE, PARAMETERS, CONTROL = ([] for _ in range(5))


def row(table: list[Case], make: Callable[..., Case] = case) -> Callable[[Any], Any]:
    def add(item: Any) -> Any:
        table.append(make(item))
        return item

    return add


# Autograd ------------------------------------------------------------------------------------------------------------


@row(AUTOGRAD)
def no_grad_region(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = m.a(x)
        with torch.enable_grad():
            z = m.b(x)
    return y * z


@row(AUTOGRAD)
def inference_mode_of_layers(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = m.a(x)
    return m.b(y.clone())


@row(AUTOGRAD)
def data_written(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).clone()
    y.data.mul_(2)
    y.data[:, 0] = 1.0
    return m.b(y)


@row(AUTOGRAD)
def data_assigned(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).clone()
    y.data = y.data * 3
    return m.b(y)


@row(AUTOGRAD)
def requires_grad_branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x) if not x.requires_grad else m.b(x)
    return m.b(y) if y.requires_grad else y


@row(AUTOGRAD)
def requires_grad_toggled(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.a(x).square().sum(), x, create_graph=True)
    frozen = m.a.weight.detach().requires_grad_(False)
    return m.b(slope) + x @ frozen


class _Several(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> Any:
        return x * w, (x > 0).float(), x.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1], output[2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        x, w = ctx.saved_tensors
        return (grad * w * 2 if ctx.needs_input_grad[0] else None), (grad * x if ctx.needs_input_grad[1] else None)


@row(AUTOGRAD)
def custom_function_of_several(m: Any, x: torch.Tensor) -> torch.Tensor:
    y, mask, best = _Several.apply(x, m.a(x))
    z, _, _ = _Several.apply(m.b(x), x)
    return y * mask + z + F.one_hot(best, WIDTH)


@row(AUTOGRAD, built)
def module_hooks() -> nn.Module:
    m = Two(lambda m, x: m.b(m.a(x)))
    m.a.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    m.a.register_forward_hook(lambda module, args, out: out.tanh())
    m.b.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
    m.b.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 3,))
    m.b.weight.register_hook(lambda grad: grad + 0.1)
    return m


@row(AUTOGRAD)
def func_vmap(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda z: m.b(m.a(z).tanh()))(x)


@row(AUTOGRAD)
def func_jacrev(m: Any, x: torch.Tensor) -> torch.Tensor:
    jacobian = torch.vmap(torch.func.jacrev(lambda z: m.a(z).tanh()))(x)
    return m.b(jacobian.sum(1))


@row(AUTOGRAD)
def func_jacfwd(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(torch.func.jvp(lambda z: m.a(z).tanh(), (x,), (x.cos(),))[1])


@row(AUTOGRAD)
def inner_gradient_step(m: Any, x: torch.Tensor) -> torch.Tensor:
    """One step of MAML."""
    weights = dict(m.a.named_parameters())
    inner = lambda w: torch.func.functional_call(m.a, w, (x,)).square().mean()  # noqa: E731
    grads = torch.func.grad(inner)(weights)
    fast = {n: w - 0.1 * grads[n] for n, w in weights.items()}
    return m.b(torch.func.functional_call(m.a, fast, (x,)))


@row(AUTOGRAD)
def checkpoint_both_ways(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = checkpoint(lambda z: m.a(z).tanh(), x, use_reentrant=False)
    return checkpoint(lambda z: m.b(z).tanh(), y, use_reentrant=True)


# Mutation and aliasing -----------------------------------------------------------------------------------------------

_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda h: h.view(WIDTH, -1),
    "flatten": lambda h: h.flatten(),
    "transpose": lambda h: h.transpose(0, 1),
    "permute": lambda h: h.permute(1, 0),
    "unsqueeze": lambda h: h.unsqueeze(1),
    "select": lambda h: h.select(1, 2),
    "narrow": lambda h: h.narrow(1, 2, 3),
    "diagonal": lambda h: h.diagonal(),
    "slice": lambda h: h[::2, 1:-1],
    "as_strided": lambda h: h.as_strided((3, 2), (2, 1), 1),
    "unflatten": lambda h: h.unflatten(1, (2, 4)),
    "unfold": lambda h: h.unfold(1, 3, 3),  # two columns are in no window
    "view_as_complex": lambda h: torch.view_as_real(torch.view_as_complex(h.view(-1, 4, 2))),
    "detach": lambda h: h.detach(),
    "chain": lambda h: h.view(-1, 4, 2).permute(2, 0, 1)[1].t().diagonal(),
}


def _write(view: Callable[[torch.Tensor], torch.Tensor], m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x).clone()
    part = view(h)
    part += part.detach().cos()
    view(h).mul_(1.5)
    return m.b(h)


for _name, _view in _VIEWS.items():
    _body = functools.partial(_write, _view)
    _body.__name__ = f"write_through_{_name}"  # pyright: ignore[reportAttributeAccessIssue]
    WRITES.append(case(_body))


@row(WRITES)
def write_through_several_outputs(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    with torch.no_grad():  # torch refuses writes to the outputs of chunk, split and unbind where a gradient flows
        work = h.clone()
        work.chunk(2, 1)[1].add_(1)
        work.split([2, 6], 1)[0].mul_(2)
        work.unbind(0)[3].zero_()
        work.tensor_split(4, 1)[2].neg_()
        work.hsplit(2)[0].sin_()
    return m.b(h * work)


@row(WRITES)
def expanded_read_after_write(m: Any, x: torch.Tensor) -> torch.Tensor:
    base = m.a(x)[:, :1].clone()
    wide = base.expand(-1, WIDTH)
    base.mul_(3)
    return m.b(wide)


@row(WRITES)
def out_argument(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = torch.empty(x.shape[0], WIDTH)
        torch.mul(x, 2.0, out=out)
        torch.add(out, 1.0, out=out[:])
        torch.matmul(x, m.a.weight.t(), out=out)
    return m.b(out) + m.a(x)


@row(WRITES)
def index_writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    h, rows = m.a(x).clone(), torch.tensor([0, 2, 2])
    h.index_put_((rows, torch.tensor([1, 3, 3])), m.b(x)[:3, 0], accumulate=True)
    h[rows[:2]] = x[:2] * 2
    h[:, [1, 4]] *= 0.5
    h.index_add_(0, rows, x[:3])
    h.index_copy_(1, torch.tensor([6]), x[:, :1])
    h.index_fill_(1, torch.tensor([5]), 0.25)
    return m.b(h)


@row(WRITES)
def scatters(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x).clone()
    index = x.argsort(1)
    h.scatter_(1, index[:, :3], x[:, :3])
    h.scatter_add_(1, index[:, 3:6], m.b(x)[:, 3:6])
    h = h.scatter_reduce(1, index[:, :4], x[:, :4], "amax").clone()
    h.masked_fill_(x > 1, 0.5)
    h.masked_scatter_(x < -1, x.detach())
    return m.b(h.gather(1, index))


@row(WRITES)
def copies(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros(x.shape[0], 2 * WIDTH)
    h[:, :WIDTH].copy_(m.a(x))
    h[:, WIDTH:] = m.b(x)
    h.fill_diagonal_(0.5)
    h.clamp_(-1, 1).add_(h.detach(), alpha=0.5)
    return h[:, ::2].contiguous()


# What forward keeps on the module ------------------------------------------------------------------------------------


class Keeps(nn.Module):
    """Writes tensors to self in forward and reads them in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.a(x)
        self.features = {"hidden": self.hidden}
        return self.b(self.features["hidden"] * self.hidden.detach())


STATE.append(built(Keeps))


@row(STATE, built)
def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.4), nn.Linear(WIDTH, WIDTH))


@row(STATE, built)
def sync_batch_norm() -> nn.Module:
    """Over the whole batch, however it is split."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm())


class Averaged(nn.Module):
    """A teacher that follows its student, a step counter with a schedule, reassigned and written buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)
        self.step = self.step + 1
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return self.a(x) * (1 / self.step) + self.teacher(x) - self.average


STATE.append(built(Averaged))


class SpectralOld(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


STATE.append(built(SpectralOld))


# Parameters ----------------------------------------------------------------------------------------------------------


def _wrapped(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@row(PARAMETERS, built)
def weight_norm_old() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is old, and used
        return _wrapped(nn.utils.weight_norm)


@row(PARAMETERS, built)
def weight_norm_new() -> nn.Module:
    return _wrapped(parametrizations.weight_norm)


@row(PARAMETERS, built)
def spectral_norm_new() -> nn.Module:
    return _wrapped(parametrizations.spectral_norm)


@row(PARAMETERS, built)
def orthogonal_householder() -> nn.Module:
    return _wrapped(lambda m: parametrizations.orthogonal(m, orthogonal_map="householder"))


@row(PARAMETERS, built)
def orthogonal_cayley() -> nn.Module:
    return _wrapped(lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"))


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


@row(PARAMETERS, built)
def own_parametrization() -> nn.Module:
    def wrap(m: nn.Module) -> nn.Module:
        parametrize.register_parametrization(m, "weight", _Symmetric())
        return m

    return _wrapped(wrap)


class Cached(nn.Module):
    """`parametrize.cached` computes a parametrized weight once per forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.a(self.a(x).tanh())


PARAMETERS.append(built(Cached))


class Lists(nn.Module):
    """ParameterList, ParameterDict, ties across modules and three ways, a tied bias, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.full((WIDTH,), 0.5)])
        self.shifts = nn.ParameterDict({"x": torch.zeros(WIDTH), "y": torch.ones(WIDTH)})
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight
        self.c.bias = self.a.bias
        self.scales.append(self.shifts["y"])
        self.shifts["x"].requires_grad_(False)
        self.constant = torch.linspace(0, 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        x = self.c(self.b(self.a(x + self.shifts["x"])).tanh()) + self.shifts["y"]
        return x * self.constant


PARAMETERS.append(built(Lists))


class Sparse(nn.Module):
    """Embeddings that ask for sparse gradients: the values are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bag = nn.Embedding(WIDTH, WIDTH, sparse=True), nn.EmbeddingBag(WIDTH, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = x.argsort(1)
        return self.tokens(places).mean(1) + self.bag(places[:, :3])


PARAMETERS.append(built(Sparse))


@row(PARAMETERS, built)
def lazy_after_a_call() -> nn.Module:
    m = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(WIDTH))
    m(torch.randn(4, WIDTH))
    return m


# Control flow and checks of values -----------------------------------------------------------------------------------


@row(CONTROL)
def where(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.sum() > 0, m.a(x), m.b(x))


@row(CONTROL)
def cond(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda z: m.a(z).sin(), lambda z: m.b(z).cos(), (x,))


@row(CONTROL)
def cond_not_taken(m: Any, x: torch.Tensor) -> torch.Tensor:
    """The other branch would make NaN, and its gradient too."""
    return torch.cond(m.a(x).sum() > 1e9, lambda z: (z - z).log() / m.a(z), lambda z: m.b(z), (x,))


@row(CONTROL)
def assertions(m: Any, x: torch.Tensor) -> torch.Tensor:
    torch._assert(x.shape[0] > 0, "no rows")
    torch._assert((x == x).all(), "not a number")
    assert x.isfinite().all(), "not finite"
    torch._assert_async(x.isfinite().all())
    return m.b(m.a(x))


@row(CONTROL)
def distributions(m: Any, x: torch.Tensor) -> torch.Tensor:
    normal = torch.distributions.Normal(m.a(x), m.b(x).exp())
    choice = torch.distributions.Categorical(logits=m.b(x))
    divergence = torch.distributions.kl_divergence(normal, torch.distributions.Normal(torch.zeros(()), torch.ones(())))
    return normal.log_prob(x) + choice.log_prob(x.argmax(-1))[:, None] + choice.entropy()[:, None] + divergence


@row(CONTROL)
def constants_as_numbers(m: Any, x: torch.Tensor) -> torch.Tensor:
    scale, sizes = torch.tensor(2.0), torch.tensor([3, 5])
    first, second = x.split(sizes.tolist(), 1)
    if torch.tensor(True):
        x = torch.cat([second, first], 1)
    return m.b(m.a(x)) * scale.item() * float(torch.linspace(0, 1, 3)[1])


@row(CONTROL)
def what_a_compiled_program_goes_without(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Ranges of a profiler, a choice of kernels, moves of modules to where they are, anomaly mode, other compilers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.profiler.record_function("first"), torch.autograd.set_detect_anomaly(True):
        y = m.a.to(device)(x.to(device))
    y = torch.profiler.record_function("again")(m.a.to(x.device).float().cpu())(y)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), torch.autocast(device.type, enabled=False):
        y = y + F.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])[0, 0]
    return m.b.to(y)(y) if not torch.jit.is_scripting() and torch.utils.data.get_worker_info() is None else y
