"""What random programs are made of: modules that take and return a tensor of any of four kinds.

Legend of shape suffixes: B rows, T positions, C features, H, W and D of images.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

Make = Callable[[random.Random, tuple[int, ...]], nn.Module]

VECTOR, SEQUENCE, IMAGE, VOLUME = 2, 3, 4, 5
"""Number of dims of each kind of value: (B, C), (B, T, C), (B, C, H, W), (B, C, D, H, W)."""

BLOCKS: dict[str, tuple[int | None, Make]] = {}
"""By name: how many dims a block wants (None: any), and what makes it for a shape."""


def block(name: str, wants: int | None = None) -> Callable[[Make], Make]:
    """Put a maker of modules into the table."""

    def put(make: Make) -> Make:
        BLOCKS[name] = wants, make
        return make

    return put


def adapt(x: torch.Tensor, wants: int | None) -> torch.Tensor:
    """The value as one of another kind, small as it was."""
    if wants is None or x.ndim == wants:
        return x
    if x.ndim == VECTOR:
        x = torch.stack([x, x.roll(1, -1), x.cos(), 0.5 * x], 1)
    elif x.ndim > SEQUENCE:
        x = (x if x[0, 0].numel() <= 16 else x[..., ::2, ::2]).flatten(2).transpose(1, 2)
    if wants == VECTOR:
        return x.mean(1)
    if wants == SEQUENCE:
        return x
    space = (2, -1) if wants == IMAGE else (2, 2, -1)
    x = x if x.shape[1] % 4 == 0 else F.pad(x, (0, 0, 0, -x.shape[1] % 4))
    return x.transpose(1, 2).unflatten(2, space).contiguous()  # torch 2.13 ends the process in some norms if it is not


class Apply(nn.Module):
    """A function of the value, and of parameters where it has any."""

    def __init__(self, fn: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.fn = fn
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x, *self.weights)


class Residual(nn.Module):
    """A module beside the value itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def _features(r: random.Random) -> int:
    return r.choice([8, 16])


# Products
@block("linear")
def _linear(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    linear = nn.Linear(shape[-1], _features(r), bias=r.random() < 0.7)
    return nn.Sequential(linear, r.choice([nn.Tanh(), nn.GELU(), nn.Identity(), nn.SiLU()]))


@block("mlp")
def _mlp(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    size = r.choice([16, 32])
    mlp = nn.Sequential(nn.Linear(shape[-1], size), nn.GELU(), nn.Linear(size, shape[-1], bias=r.random() < 0.5))
    return nn.Sequential(nn.LayerNorm(shape[-1]), Residual(mlp))


@block("bilinear", VECTOR)
def _bilinear(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    class Square(nn.Bilinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            return super().forward(x, x.tanh())

    return Square(shape[-1], shape[-1], 8)


class Gated(nn.Module):
    """A fused projection whose halves gate each other, cut in one of three ways."""

    def __init__(self, size: int, hidden: int, how: str) -> None:
        super().__init__()
        self.fused, self.down, self.how = nn.Linear(size, 2 * hidden), nn.Linear(hidden, size), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.fused(x)
        if self.how == "chunk":
            gate, up = both.chunk(2, -1)
        elif self.how == "unflatten":
            gate, up = both.unflatten(-1, (2, -1)).unbind(-2)
        else:
            half = both.shape[-1] // 2
            gate, up = both[..., :half], both[..., half:]
        return self.down(F.silu(gate) * up)


@block("gated")
def _gated(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return Gated(shape[-1], 16, r.choice(["chunk", "unflatten", "slice"]))


@block("grouped einsum")
def _einsum(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    heads, size = r.choice([2, 4]), shape[-1]

    def grouped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (heads, -1))
        return torch.einsum("b...gi,goi->b...go", parts, w.view(heads, 4, size // heads)).flatten(-2)

    return Apply(grouped, (heads * 4, size // heads))


@block("lora")
def _lora(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    base = nn.Linear(shape[-1], 16)
    base.requires_grad_(False)
    rank = r.choice([2, 4])

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.lora_A, self.lora_B = base, nn.Linear(shape[-1], rank, bias=False), nn.Linear(rank, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.lora_B(self.lora_A(x))

    return Lora()


@block("weight norm")
def _weight_norm(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(shape[-1], _features(r)), dim=r.choice([0, 1]))


@block("symmetric")
def _symmetric(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    linear = nn.Linear(shape[-1], shape[-1])
    nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


@block("reused")
def _reused(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(shape[-1], shape[-1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.tanh(self.inner(x))) + x @ self.inner.weight

    return Twice()


@block("experts")
def _experts(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    num, top, hidden, size = 4, r.choice([1, 2]), 8, shape[-1]

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(size, num)  # with biases: of ties, torch chooses any
            self.up = nn.Parameter(torch.randn(num, size, hidden) / size**0.5)
            self.down = nn.Parameter(torch.randn(num, hidden, size) / hidden**0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.reshape(-1, size)
            weights, chosen = self.gate(flat).softmax(-1).topk(top, -1)
            dense = x.new_zeros(flat.shape[0], num).scatter(1, chosen, weights.to(x.dtype))
            hidden = torch.einsum("nc,ech->neh", flat, self.up).relu()
            return torch.einsum("neh,ehc,ne->nc", hidden, self.down, dense).view_as(x)

    return Residual(Experts())


class Routed(nn.Module):
    """Experts of Mixtral or gpt-oss behind a router, of few or many bytes: to these, tokens are sent."""

    def __init__(self, size: int, r: random.Random) -> None:
        super().__init__()
        self.num, self.top = r.choice([4, 8]), r.choice([1, 2, 3])
        config = GptOssConfig(
            hidden_size=size,
            intermediate_size=r.choice([8, 64]),
            num_local_experts=self.num,
            experts_implementation="grouped_mm",
        )
        self.gate = nn.Linear(size, self.num)  # with biases: of ties, torch chooses any
        self.experts = r.choice([MixtralExperts, GptOssExperts])(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=size**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2).tanh()  # of whose results eight layers with gates would be no numbers
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top, -1)
        return self.experts(flat, chosen, weights.to(x.dtype)).view_as(x)


@block("routed experts")
def _routed(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return Residual(Routed(shape[-1], r))


# Norms
@block("layer norm")
def _layer_norm(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.LayerNorm(shape[-1])


@block("rms norm")
def _rms_norm(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.RMSNorm(shape[-1], eps=1e-5)


@block("batch norm", VECTOR)
def _batch_norm(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.BatchNorm1d(shape[1])


@block("batch norm of images", IMAGE)
def _batch_norm_2d(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.BatchNorm2d(shape[1])


@block("group norm", IMAGE)
def _group_norm(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.GroupNorm(r.choice([2, 4]), shape[1])


@block("instance norm", IMAGE)
def _instance_norm(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.InstanceNorm2d(shape[1], affine=True)


# Convolutions
PADDINGS = ["zeros", "circular", "reflect", "replicate"]


def _conv(kind: Any, transposed: Any, r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    channels, smallest = shape[1], min(shape[2:])
    out = r.choice([8, 16])
    groups = r.choice([g for g in (1, 1, 2, 4, channels) if channels % g == out % g == 0])
    kernel = r.choice([k for k in (1, 2, 3, 4) if k <= smallest + 1])
    stride, dilation = r.choice([1, 1, 2]), r.choice([1, 1, 2])
    if r.random() < 0.3:
        return transposed(channels, out, kernel, stride=stride, groups=groups, dilation=dilation)
    padding = (dilation * (kernel - 1) + 1) // 2
    mode = r.choice(PADDINGS if 0 < padding < smallest and kind is not nn.Conv3d else ["zeros"])
    return kind(channels, out, kernel, stride, padding, dilation, groups, r.random() < 0.7, padding_mode=mode)


class First(nn.Module):
    """The first channels of images."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num = num

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW[:, : self.num]


class Turned(nn.Module):
    """A module of channels first, for values of features last."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.inner(x_BTC.transpose(1, 2)).transpose(1, 2)


@block("conv 1d", SEQUENCE)
def _conv_1d(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return Turned(_conv(nn.Conv1d, nn.ConvTranspose1d, r, (shape[0], shape[2], shape[1])))


@block("conv 2d", IMAGE)
def _conv_2d(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return _conv(nn.Conv2d, nn.ConvTranspose2d, r, shape)


@block("conv 3d", VOLUME)
def _conv_3d(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return _conv(nn.Conv3d, nn.ConvTranspose3d, r, shape)


@block("patches", IMAGE)
def _patches(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    patch, channels = min(r.choice([2, 2, 3]), *shape[2:]), r.choice([3, shape[1]])  # of few, it is a product
    kernel = nn.Conv2d(min(channels, shape[1]), 16, patch, stride=patch)
    return nn.Sequential(First(kernel.in_channels), kernel, nn.GELU())


@block("pool", IMAGE)
def _pool(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    kernel = min(2, *shape[2:])
    return r.choice([nn.MaxPool2d(kernel), nn.AvgPool2d(kernel), nn.AdaptiveAvgPool2d(1), nn.LPPool2d(2, kernel)])


@block("resample", IMAGE)
def _resample(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.Upsample(scale_factor=2, mode=r.choice(["nearest", "bilinear"]))


# Attention and recurrence
class Attention(nn.Module):
    """Heads from a fused projection or from three, with fewer of keys where they are grouped."""

    def __init__(self, size: int, r: random.Random) -> None:
        super().__init__()
        self.heads, self.mask = 4, r.choice(["none", "causal", "window", "bias"])
        self.kv_heads = r.choice([4, 4, 2])
        self.fused = self.kv_heads == 4 and r.random() < 0.6
        self.by_unflatten = r.random() < 0.5
        if self.fused:
            self.qkv = nn.Linear(size, 3 * size)
        else:
            self.q = nn.Linear(size, size)
            self.k, self.v = (nn.Linear(size, size // 4 * self.kv_heads, bias=False) for _ in range(2))
        self.out = nn.Linear(size, size)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        length = x_BTC.shape[1]
        if not self.fused:
            q, k, v = self.q(x_BTC), self.k(x_BTC), self.v(x_BTC)
        elif self.by_unflatten:
            q, k, v = self.qkv(x_BTC).unflatten(-1, (3, -1)).unbind(-2)
        else:
            q, k, v = self.qkv(x_BTC).chunk(3, -1)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for t in (k, v))
        at = torch.arange(length, device=x_BTC.device)
        mask = None
        if self.mask == "window":
            mask = (at[:, None] - at).abs() < 3
        elif self.mask == "bias":
            mask = -0.1 * (at[:, None] - at).abs().to(x_BTC.dtype)
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.mask == "causal", enable_gqa=self.kv_heads != self.heads
        )
        return self.out(found.transpose(1, 2).flatten(2))


@block("attention", SEQUENCE)
def _attention(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return Residual(Attention(shape[-1], r))


@block("multihead attention", SEQUENCE)
def _multihead(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    class Own(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            return super().forward(x, x, x, need_weights=False)[0]

    return Own(shape[-1], 4, batch_first=True, bias=r.random() < 0.7)


@block("encoder layer", SEQUENCE)
def _encoder(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.TransformerEncoderLayer(shape[-1], 2, 16, dropout=0.0, batch_first=True, norm_first=r.random() < 0.5)


@block("recurrent", SEQUENCE)
def _recurrent(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = r.choice([nn.LSTM, nn.GRU, nn.RNN])
            self.inner = kind(shape[-1], 8, r.choice([1, 2]), batch_first=True, bidirectional=r.random() < 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    return First()


# Functions
def _power(x: torch.Tensor) -> torch.Tensor:
    """The logarithm of the spectrum, smooth where it is zero; torch has no transform of bfloat16."""
    spectrum = torch.fft.rfft(x.float() if x.dtype == torch.bfloat16 else x, norm="ortho")
    return torch.view_as_real(spectrum).square().sum(-1).add(1e-3).log().to(x.dtype)


def _edges(x: torch.Tensor) -> torch.Tensor:
    """Weighed by how many edges a node has, of edges that come out of the values and one of each node to itself."""
    ends = x.detach().mul(2).long() % 5
    edges = torch.cat([ends.flatten(), torch.arange(5, device=x.device)])
    degree = x.new_zeros(5).scatter_add(0, edges, x.new_ones(len(edges)))
    return x * (degree / len(edges))[ends]


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "fft": _power,
    "edges": _edges,
    "sort": lambda x: x.sort(-1).values,
    "sort rows": lambda x: x.softmax(-1).sort(1).values if x.ndim > 2 else x.sort(-1, descending=True).values,
    "top": lambda x: x.topk(4, -1).values,
    "roll": lambda x: x.roll((1, 2), (-1, 1 if x.ndim > 2 else -1)),
    "cumulative": lambda x: x.cumsum(-1) / x.shape[-1],
    "softmax": lambda x: x.softmax(-1) * x,
    "logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "gather": lambda x: x.gather(-1, x.detach().argsort(-1)),
    "scatter": lambda x: torch.zeros_like(x).scatter_add(-1, (x.detach() > 0).long(), x),
    "flip": lambda x: x.flip(-1) + x,
    "pad": lambda x: F.pad(x, (3, 5)),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x.square()),
    "pick": lambda x: x.index_select(-1, torch.tensor([3, 0, 5, 1, 1, 2, 7, 6], device=x.device)),
    "center": lambda x: x - x.mean(0, keepdim=True),
    "outer": lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)[..., ::4],
}


@block("function")
def _function(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    last = shape[-1]
    usable = [
        n for n in FUNCTIONS if last >= 8 or n in ("fft", "edges", "roll", "softmax", "logsumexp", "flip", "where")
    ]
    return Apply(FUNCTIONS[r.choice(usable)])


@block("dropout")
def _dropout(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return nn.Dropout(0.3)


@block("scale")
def _scale(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return Apply(lambda x, gain, bias: x * gain + bias, (shape[-1],), (shape[-1],))


# Repeated layers
REPEATED = ["mlp", "attention", "gated", "encoder layer", "experts", "multihead attention", "conv 1d", "weight norm"]


class Added(nn.Module):
    """What a module makes of its input, added to it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the shape of its input."""
        return x + _shaped(self.inner(x), x)


def _shaped(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The one in the shape of the other."""
    y = adapt(y, SEQUENCE)
    y = y[:, : x.shape[1], : x.shape[2]]
    return F.pad(y, (0, x.shape[2] - y.shape[2], 0, x.shape[1] - y.shape[1]))


@block("stages", SEQUENCE)
def _stages(r: random.Random, shape: tuple[int, ...], kinds: Sequence[str] = REPEATED) -> nn.Module:
    """Four layers, each of which takes what the one before gives."""
    make, knob = BLOCKS[r.choice(kinds)][1], r.random()
    first = nn.Linear(shape[-1], shape[-1])  # so that the input of the first layer has a gradient, as of all others
    return nn.Sequential(first, nn.Sequential(*(Added(make(random.Random(knob), shape)) for _ in range(4))))


@block("repeated", SEQUENCE)
def _repeated(r: random.Random, shape: tuple[int, ...], kinds: Sequence[str] = REPEATED) -> nn.Module:
    kind, num, knob = r.choice(kinds), r.randint(3, 5), r.random()
    make = BLOCKS[kind][1]

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = [make(random.Random(knob), shape) for _ in range(num)]
            self.layers = nn.ModuleList(made)
            self.gains = [1.0] * (num - 1) + [r.choice([1.0, 0.5])]
            self.odd = r.choice([None, None, 1])
            self.twice = r.random() < 0.15

        def once(self, x: torch.Tensor) -> torch.Tensor:
            for number, (layer, gain) in enumerate(zip(self.layers, self.gains, strict=True)):
                y = _shaped(layer(x), x)
                x = x + gain * (y.tanh() if number == self.odd else y)
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.once(self.once(x)) if self.twice else self.once(x)

    return Stack()


@block("stages of experts", SEQUENCE)
def _stages_of_experts(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return _stages(r, shape, ["routed experts"])


@block("repeated experts", SEQUENCE)
def _repeated_experts(r: random.Random, shape: tuple[int, ...]) -> nn.Module:
    return _repeated(r, shape, ["routed experts"])
