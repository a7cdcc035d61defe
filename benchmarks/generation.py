"""Generating tokens: our two programs against the loop of transformers on the CPU, and against JAX by hand for TPUs.

The first is timed, in turn, from a state that lies on the mesh, as a training run has it. What is saved is Python, so
the ratio grows with the products, which XLA runs on one core of a CPU where there is one row. The second is counted by
TPU's compiler, for one token: one iteration of the loop of `ts.generate`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh

import torch_shard as ts
from benchmarks.rows import Row, timed
from benchmarks.timing import round_robin
from benchmarks.tpu_cases import hf_llama
from benchmarks.tpu_decode import DecodeByHand
from benchmarks.tpu_llama import Llama
from torch_shard._cost.total import costs_of
from torch_shard._generate.decode import Decode, Loop, Prefill
from torch_shard._loss import flatten_batch
from torch_shard._state import as_arrays
from torch_shard._train import ShardedBatch, StepOptions

TIMED = Llama(layers=4, width=128, hidden=352, heads=8, kv_heads=2, vocab=512)
LARGER = Llama(layers=4, width=256, hidden=704, heads=8, kv_heads=2, vocab=512)
COUNTED = Llama(layers=2, vocab=32768)
ROWS, SLOTS, NEW = 16, 1024, 128
"""Of the program for TPUs."""


def rows(quick: bool) -> Iterator[Row]:
    """The loop of transformers, then TPU's compiler."""
    for sizes, target in ((TIMED, 0.2), (LARGER, None)):
        yield from against_transformers(sizes, 64 if not quick else 8, 5 if not quick else 2, target)
    sizes = Llama(layers=1, width=512, hidden=1024, heads=4, kv_heads=4, vocab=2048) if quick else COUNTED
    ours, rival = cycles_per_token(ours_lowered(sizes)), cycles_per_token(by_hand_lowered(sizes))
    texts = [f"{cycles / 1e3:.4g} kcycles" for cycles in (ours, rival)]
    name = "one token of Llama, v5e:2x2, tensor parallel: ours ÷ by hand"
    yield Row(name, *texts, float(f"{ours / rival:.3g}"), target=1.1)


def against_transformers(sizes: Llama, num_new: int, rounds: int, target: float | None) -> Iterator[Row]:
    """Greedy tokens, the same on both sides, of one row and of eight."""
    torch.manual_seed(0)
    model = type(on_meta := hf_llama(sizes))(on_meta.config).eval()
    model.generation_config.eos_token_id = None
    apply = ts.make_apply(model, mesh=ts.make_mesh(batch=1), plan=ts.plans.replicated())
    state = apply.init()
    for num_rows in (1, 8):
        ids = torch.randint(0, sizes.vocab, (num_rows, 16))
        sides: dict[str, Callable[[], torch.Tensor]] = {
            "ours": lambda ids=ids: ts.generate(apply, ids, state, max_new_tokens=num_new),
            "rival": lambda ids=ids: _of_transformers(model, ids, num_new),
        }
        assert torch.equal(sides["ours"](), sides["rival"]())
        times = round_robin(sides, rounds)
        name = f"{num_new} tokens for {num_rows} rows, width {sizes.width}: ours ÷ the loop of transformers, eager"
        yield timed(name, times["ours"], times["rival"], target)


def _of_transformers(model: Any, ids: torch.Tensor, num_new: int) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new, pad_token_id=0
        )


def cycles_per_token(lowered: jax.stages.Lowered) -> float:
    """Of the instructions in the loop over tokens, each once, by the compiler."""
    costs = costs_of(lowered.compile().as_text() or "")
    return sum((cost.cycles or 0) / cost.times for cost in costs if "while/body" in cost.label)


def by_hand_lowered(sizes: Llama) -> jax.stages.Lowered:
    """The rival's loop."""
    return DecodeByHand(sizes, ROWS, SLOTS + NEW, NEW).lower(_mesh())


def ours_lowered(sizes: Llama) -> jax.stages.Lowered:
    """The loop of `ts.generate`, on keys and values as the program for the prompt leaves them."""
    mesh, model = _mesh(), hf_llama(sizes).to(torch.bfloat16)
    options = StepOptions(mesh=mesh, plan=ts.plans.tp(model, mesh), scan_layers=False)
    prefill, decode = Prefill(model, sizes.layers, options), Decode(model, options)
    return _decode_lowered(decode, _first(prefill))


def _mesh() -> Mesh:
    return ts.make_mesh(topology="v5e:2x2", batch=1, model=4)


def _first(prefill: Prefill) -> Any:
    """What the program for the prompt leaves: shapes, and how they are split."""
    lengths = (SLOTS, SLOTS + NEW, SLOTS)
    batch = tuple(torch.empty(ROWS, length, dtype=torch.int64, device="meta") for length in lengths)
    lowered = prefill.lower(prefill.structs, batch)
    splits = lowered.compile().output_shardings
    return jax.tree.map(lambda a, split: _struct(a.shape, a.dtype, split), lowered.out_info, splits)


def _decode_lowered(decode: Decode, first: Any) -> jax.stages.Lowered:
    whole = decode.replicated
    shapes = ((ROWS, 1), (ROWS, SLOTS + NEW), (ROWS, 1), ())
    arrays = [*(_struct(shape, np.int32, whole) for shape in shapes), *first["keys"], *first["values"]]
    _, signature = flatten_batch((*arrays[:4], first["keys"], first["values"]))
    batch: Any = ShardedBatch(arrays, signature, leaves=tuple(arrays))
    program, _ = decode._prepare(batch, decode.structs, only_shapes=True)  # pyright: ignore[reportPrivateUsage]
    number, key = _struct((), np.int32, whole), jax.eval_shape(lambda: jax.random.key(0))
    fraction: Any = _struct((), np.float32, whole)
    drawn = _struct((), key.dtype, whole), fraction, number, fraction
    loop = Loop(first["logits"], number, _struct((1,), np.int32, whole), number, *drawn, greedy=True, num_new=NEW)
    return program.lower(as_arrays(decode.structs), [*arrays, loop])


def _struct(shape: tuple[int, ...], dtype: Any, split: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=split)
