"""JAX and Pallas functions in the place of torch's: values and gradients against eager torch, and what is refused."""

# ruff: noqa: E501  (a table)

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from torch import nn

import torch_shard as ts
from tests.oracles.errors import assert_refused
from tests.oracles.steps import sgd_step
from tests.tables.cases import WHOLE, make_mesh

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32, sums of some dozen terms

CALLS: list[tuple[int, ...]] = []  # the shapes with which JAX functions were traced


def traced(fn):
    """The function, with a note of each call: what equals eager torch may have been torch's own."""

    def noted(*args, **kwargs):
        CALLS.append(np.shape(args[0]))
        return fn(*args, **kwargs)

    return noted


INTERPRETED = True


def _tanh_kernel(x_ref, y_ref):
    y_ref[...] = jnp.tanh(x_ref[...])


@jax.custom_vjp
def pallas_tanh(x):
    return pl.pallas_call(_tanh_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=INTERPRETED)(x)


def _tanh_forward(x):
    y = pallas_tanh(x)
    return y, y


pallas_tanh.defvjp(_tanh_forward, lambda y, grad: (grad * (1 - y * y),))


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    assert attn_mask is None
    assert dropout_p == 0
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores.astype(jnp.float32), -1).astype(v.dtype), v)


def rotate(x, angles):
    return x * angles.cos() + x.flip(-1) * angles.sin()


def detached(x, a):
    return (x * a).detach()


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.linspace(0.5, 1.5, size)), 1e-3

    def forward(self, x):
        return self.weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)

    def scaled(self, x, by):
        return self.weight * x * by


def rms_norm(x, weight, eps):
    return weight * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)


def of_norm(norm, x):
    return x, norm.weight, norm.eps


torch.manual_seed(0)
NORM, X, Q = Norm(4), torch.randn(3, 4), torch.randn(2, 2, 8, 4)
HEADS = nn.MultiheadAttention(4, 2, batch_first=True)

PLACES = {  # what is overridden, with what, options, how it is called, on what
    "function": (torch.tanh, jnp.tanh, {}, torch.tanh, X),
    "Pallas": (torch.tanh, pallas_tanh, {}, lambda x: torch.tanh(x) * x, X),
    "by keyword": (F.gelu, lambda input, approximate="none": jax.nn.gelu(input, approximate != "none"), {},
                   lambda x: F.gelu(input=x) + F.gelu(x, approximate="tanh"), X),
    "method": (torch.Tensor.softmax, lambda x, dim: jax.nn.softmax(x, dim), {}, lambda x: x.softmax(-1), X),
    "operator": (torch.ops.aten.tanh, jnp.tanh, {}, torch.ops.aten.tanh, X),
    "attention": (F.scaled_dot_product_attention, attention, {},
                  lambda q: F.scaled_dot_product_attention(q, q * 2, q.cos(), is_causal=True), Q),
    "within torch's own": (F.scaled_dot_product_attention, attention, {},
                           lambda x: HEADS(x, x, x, need_weights=False)[0], X.expand(2, 3, 4)),
    "held elsewhere": (F.gelu, lambda x, approximate: jax.nn.gelu(x, False), {}, nn.Sequential(nn.GELU()), X),
    "as an attribute": (F.relu, jax.nn.relu, {}, partial(lambda f, x: f(x), F.relu), X),
    "user's function": (rotate, lambda x, a: x * jnp.cos(a) + x[..., ::-1] * jnp.sin(a), {},
                        lambda x: rotate(x, angles=x * 2), X),
    "class": (Norm, rms_norm, {"takes": of_norm}, NORM, X),
    "user's method": (Norm.scaled, lambda w, x, by: w * x * by, {"takes": lambda n, x, by: (n.weight, x, by)},
                      lambda x: NORM.scaled(x, 3.0), X),
    "named results": (torch.sort, lambda x, dim: (jnp.sort(x, dim), jnp.argsort(x, dim).astype(int)), {},
                      lambda x: torch.sort(x, dim=1).values, X),
    "some results": (torch.std_mean, lambda x, dim, keepdim: (x.std(dim, ddof=1, keepdims=True), x.mean(dim, keepdims=True)), {},
                     lambda x: torch.std_mean(x, 1, keepdim=True)[0], X),
    "without grad": (torch.tanh, jnp.tanh, {}, lambda x: torch.tanh(x.detach()) * x, X),
    "torch's own detaches": (detached, lambda x, a: x * a, {}, lambda x: detached(x, x), X),
}  # fmt: skip


@pytest.mark.parametrize(("function", "fn", "options", "call", "x"), PLACES.values(), ids=PLACES)
def test_value_and_gradient_equal_eager_torch(function, fn, options, call, x):
    def loss(x):
        return (call(x) * x.cos()).sum()

    leaf = x.clone().requires_grad_()
    wanted = loss(leaf)
    gradient = torch.autograd.grad(wanted, leaf)[0]
    compiled = ts.jax_jit(ts.jax_value_and_grad(loss))
    CALLS.clear()
    with ts.override(function, **options)(traced_like(fn)) as kernel:
        assert kernel.name
        found = [compiled(x)]
        assert CALLS, "torch's own ran"
    CALLS.clear()
    if fn is rms_norm:  # programs are made for what is in place at a call
        found.append(compiled(x))
    assert not CALLS
    for value, grad in found:
        torch.testing.assert_close(value.cpu(), wanted.detach(), **CLOSE)
        torch.testing.assert_close(grad.cpu(), gradient, **CLOSE)


def traced_like(fn):
    noted = traced(fn)
    noted.__wrapped__ = fn  # its signature
    return noted


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = Norm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + torch.tanh(x)


def square(model, x):
    return model(x).square().mean()


HEADS_SPLIT = P("batch", "model")


@pytest.mark.parametrize(
    ("sizes", "specs", "options"),
    [
        ((4, 1), False, {}),
        ((2, 2), True, {"remat": "block", "accumulate_steps": 2}),
    ],
)
def test_in_layers_on_a_mesh(sizes, specs, options):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(3))), torch.randn(8, 6, 8)

    def split(*args):
        return {"in_specs": args, "out_specs": args[0]} if specs else {}

    norm = ts.override(Norm, takes=of_norm, **split(P("batch"), P(), None))(traced_like(rms_norm))
    sdpa = ts.override(F.scaled_dot_product_attention, **split(*(HEADS_SPLIT,) * 3))(traced_like(attention))
    # check_vma: Pallas interpreted on a CPU reads its blocks by indices that vary nowhere
    tanh = ts.override(torch.tanh, **split(P("batch")), check_vma=not specs)(pallas_tanh)
    CALLS.clear()
    with norm, sdpa, tanh:
        step = sgd_step(model, square, sizes, **options)
        step.prove(step.init(), x).raise_if_different()
        report = step.report()
    rows = 8 // options.get("accumulate_steps", 1) // (sizes[0] if specs else 1)
    assert set(CALLS) == {(rows, 6, 8), (rows, 2 // (sizes[1] if specs else 1), 6, 4)}
    assert "1 to 3: one loop, 3 iterations" in report
    assert f"torch.nn.functional.scaled_dot_product_attention: 3 calls run as attention ({__file__}:" in report
    assert "test_override.Norm.forward: 3 calls run as rms_norm" in report


def test_programs_are_made_for_the_kernels_in_place():
    step = sgd_step(nn.Linear(4, 4), lambda m, x: torch.tanh(m(x)).sum(), (2, 1), rate=0.0)
    losses = []
    for fn in (None, jnp.tanh, lambda x: 0 * x, None):
        if fn is not None:
            kernel = ts.override(torch.tanh)(fn)
        losses.append(float(step(step.init(), torch.ones(2, 4))[1]["loss"]))
        if fn is not None:
            kernel.remove()
            kernel.remove()
    assert losses[0] == losses[3]
    np.testing.assert_allclose(losses[:2], losses[0], rtol=1e-6)
    assert losses[2] == 0
    assert step.num_compiles == 3


def test_a_wrong_kernel_is_found_by_its_proof():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 4)
    with ts.override(torch.tanh)(lambda x: jnp.tanh(x) * 1.01):
        step = sgd_step(model, square, (2, 1))
        for found in (
            step.prove(step.init(), x),
            ts.compare_with_torch(model, square, x, mesh=make_mesh((2, 1)), plan=WHOLE),
        ):
            with pytest.raises(AssertionError, match="loss"):
                found.raise_if_different()


def test_when_leaves_calls_to_torch():
    def call(x):
        return F.gelu(x) + F.gelu(x, approximate="tanh") + torch.func.vmap(F.gelu)(x)

    CALLS.clear()
    with ts.override(F.gelu, when=lambda x, approximate="none": approximate == "tanh")(
        traced_like(lambda x, approximate: jax.nn.gelu(x))  # of tanh, which differs in the fourth digit
    ):
        torch.testing.assert_close(ts.jax_jit(call)(X).cpu(), call(X), rtol=1e-5, atol=1e-6)
        assert CALLS == [(3, 4)] * len(CALLS) != []


def test_maps_of_jax():
    with ts.override(torch.tanh)(pallas_tanh):
        found = ts.jax_value_and_grad(lambda x: ts.jax_vmap(torch.tanh)(x).sum())(X)[1]
        torch.testing.assert_close(found.cpu(), 1 - X.tanh() ** 2, **CLOSE)
        mapped = ts.jax_shard_map(
            torch.tanh, mesh=ts.make_mesh(i=4), in_specs=P("i"), out_specs=P("i"), check_vma=False
        )
        torch.testing.assert_close(mapped(X.repeat(4, 1)).cpu(), X.repeat(4, 1).tanh(), **CLOSE)


def test_products_have_the_precision_that_is_asked_for():
    found = []

    def note(*results):
        found.append(jax.config.jax_default_matmul_precision)
        return results[0]

    noting = jax.custom_vjp(lambda x: note(jnp.tanh(x)))
    noting.defvjp(lambda x: (note(jnp.tanh(x)), x), lambda x, grad: (note(grad * (1 - jnp.tanh(x) ** 2)),))
    for asked, wanted in ((None, "highest"), ("default", "default")):
        with ts.override(torch.tanh, matmul_precision=asked)(lambda x: noting(x)):
            ts.jax_jit(ts.jax_grad(lambda x: torch.tanh(x).sum()))(X)
        assert len(found) >= 2
        assert set(found) == {wanted}
        found.clear()


def test_calls_of_pytorch_itself_are_left_alone():
    """Rules of shapes are written in torch, as that of a select by a mask."""
    with ts.override(torch.where)(traced_like(jnp.where)), ts.override(torch.sum)(lambda x: jnp.sum(x)):
        x = torch.arange(6.0)
        found = ts.jax_jit(ts.jax_grad(lambda x: torch.nn.functional.huber_loss(x, x * 2) + torch.sum(x.diag())))(x)
    leaf = x.clone().requires_grad_()
    (torch.nn.functional.huber_loss(leaf, leaf * 2) + torch.sum(leaf.diag())).backward()
    torch.testing.assert_close(found.cpu(), leaf.grad)


def test_a_pallas_kernel_for_tpus_compiles_in_layers_on_a_mesh(monkeypatch):
    """In a loop, with its own derivative, for a machine that is not there."""
    monkeypatch.setitem(globals(), "INTERPRETED", False)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), *(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)))
    options = {"in_specs": P("batch"), "out_specs": P("batch"), "check_vma": False}
    with ts.override(torch.tanh, **options)(pallas_tanh):
        step = sgd_step(model, square, ts.make_mesh(topology="v5e:2x2", batch=4), scan_layers=True)
        program = step.preview(torch.empty(32, 256, device="meta")).compiled
    assert "1 to 3: one loop, 3 iterations" in step.report()
    assert program.as_text().count("tpu_custom_call") >= 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_as_torch_has_it(device):
    dtypes = []

    def noted(q, k, v):
        dtypes.append(q.dtype)
        return attention(q, k, v)

    def soft(x, dim):
        dtypes.append(x.dtype)
        return jax.nn.softmax(x, dim)

    def run(q):
        with torch.autocast(device, torch.bfloat16):
            return F.softmax(F.scaled_dot_product_attention(q, q, q), dim=-1)

    own = ts.jax_jit(run)(Q)
    with ts.override(F.scaled_dot_product_attention)(noted), ts.override(F.softmax)(soft):
        found = ts.jax_jit(run)(Q)
    assert found.dtype == own.dtype
    assert set(dtypes[:1]) == {jnp.dtype(jnp.bfloat16)}
    assert set(dtypes[1:]) == {jnp.dtype(jnp.float32) if device == "cuda" else jnp.dtype(jnp.bfloat16)}
    torch.testing.assert_close(found.float().cpu(), own.float().cpu(), rtol=2e-2, atol=1e-3)  # digits of bfloat16


def fill(x):
    return x.fill_(1.0)


def same(x):
    return x


def by_value(x):
    return x[: int(x.sum())]


def inner():
    def local(x):
        return x

    return local


def run(function, fn, call=None, **options):
    with ts.override(function, **options)(fn):
        return ts.jax_jit(call or function)(X)


MESH = make_mesh((4, 1))

REFUSED = {
    "ts.override(len)": "TypeError: override: function must be a function of torch, a Python function, a class of",
    "ts.override(nn.ReLU())": "TypeError: override: function must be .*, got ReLU",
    "ts.override(inner())": "TypeError: override: inner.<locals>.local .* is found under no name in a module or class",
    "ts.override(Norm)": "TypeError: override: .*Norm.forward is given a module, which holds tensors. Say by takes= which",
    "ts.override(torch.ops.aten.tanh.default)": "TypeError: override: aten.tanh.default is one of several overloads",
    "ts.override(torch.tanh)(3)": "TypeError: override: fn must be a Callable, got int. Decorate a function of arrays.",
    "ts.override(torch.tanh, matmul_precision='lowest')": "ValueError: .*'default', 'high', 'highest'",
    "ts.override(torch.tanh, out_specs=P())": "ValueError: override: in_specs and out_specs go together",
    "run(torch.tanh, lambda: 1)": "TypeError: <lambda> .* is called as torch.tanh is, and cannot be: too many pos.*takes=",
    "run(torch.tanh, jnp.tanh, takes=lambda x: x)": "TypeError: override: takes must return a tuple, the arguments of ",
    "run(torch.tanh, lambda x: x[0])": r"ValueError: .* must return what torch.tanh does, whose place it takes: \(3, 4\) "
    r"float32. It returned \(4,\) float32",
    "run(torch.tanh, lambda x: x.astype('bfloat16'))": r"ValueError: .* It returned \(3, 4\) bfloat16. Correct one of",
    "run(torch.sort, lambda x: x)": r"ValueError: .* must return .*: \(3, 4\) float32, \(3, 4\) int32. It returned \(3, 4\)",
    "run(fill, lambda x: x, lambda x: fill(x * 1))": "NotImplementedError: .*fill writes in place to a tensor.*when=",
    "run(same, lambda x: x, lambda x: same(x))": "NotImplementedError: .*same returns a tensor that it is given, or a view of one",
    "run(torch.Tensor.t, lambda x: x.T)": "NotImplementedError: torch.Tensor.t returns a tensor that it is given, or a",
    "run(by_value, lambda x: x, lambda x: by_value(x))": "NotImplementedError: .*Here Python needs the value of a tensor",
    "run(torch.tanh, lambda x: ts.call_torch(lambda x: x * NORM.weight, x))": "NotImplementedError: <lambda> .*, in place "
    r"of torch.tanh, reaches a torch tensor of shape \(4,\) by itself",
    "run(rotate, lambda x, a: x, lambda x: rotate(x, {1}))": "(TypeError|AttributeError): ",
    "run(torch.tanh, jnp.tanh, in_specs=P('batch'), out_specs=P('batch'), mesh=MESH)": "ValueError: .*'tanh.*, in place "
    r"of torch.tanh,' .*evenly divisible.*args\[0\] of shape float32\[3,4\]",
    "run(torch.tanh, jnp.tanh, in_specs=(None,), out_specs=P(), mesh=MESH)": "ValueError: .* has no spec in in_specs "
    "for an array of shape .3, 4.",
    "run(torch.tanh, jnp.tanh, ts.jax_shard_map(torch.tanh, mesh=MESH, in_specs=P(), out_specs=P()), in_specs=P(), "
    "out_specs=P(), mesh=MESH)": "NotImplementedError: .*has in_specs, and is called within a function that is mapped",
    "two()": "ValueError: override: torch.tanh has tanh .*in its "
    "place already. Call .remove.. on what override returned",
}


def two():
    with ts.override(torch.tanh)(jnp.tanh):
        ts.override(torch.tanh)(pallas_tanh)


def test_what_is_refused():
    assert_refused(REFUSED, lambda text: eval(text))


def test_a_function_of_a_module_may_be_defined_anew():
    earlier = ts.override(torch.tanh)(pallas_tanh)
    with ts.override(torch.tanh)(pallas_tanh) as later:
        assert later(jnp.zeros(2)).tolist() == [0, 0]
        earlier.remove()
        assert ts.jax_jit(torch.tanh)(X).shape == (3, 4)
