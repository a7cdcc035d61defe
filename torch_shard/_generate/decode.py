"""The two programs of a decoder: the prompt at once, and the loop over new tokens; and which token is next.

Shapes: B rows, T slots of the prompt, N of new tokens, L = T + N slots of the cache, V words of the vocabulary.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_shard._common.caller import caller
from torch_shard._common.types import PyTree
from torch_shard._device import put
from torch_shard._loss import LossProgram, flatten_batch
from torch_shard._state import TrainState, as_arrays, check_names
from torch_shard._train import ApplyStep, Body, ShardedBatch, StepOptions, Task


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loop:
    """What the loop over new tokens is given beside the model's own inputs.

    Its numbers are inputs of the program, so that others need no other program.

    Attributes:
        logits: Of the first new token, (B, V).
        limit: Number of new tokens, at most N.
        stops: Tokens that end a row, (any number,).
        pad: The token of rows that have ended.
        key: Of the first draw; the following ones fold their number in.
        temperature: Logits are divided by it.
        top_k: Only so many most probable tokens are drawn from.
        top_p: Only the most probable tokens are drawn from that have this probability together.
        greedy: Take the largest instead.
        num_new: N.
    """

    logits: jax.Array
    limit: jax.Array
    stops: jax.Array
    pad: jax.Array
    key: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    greedy: bool = dataclasses.field(metadata={"static": True})
    num_new: int = dataclasses.field(metadata={"static": True})

    def pick(self, logits_BV: jax.Array, number: jax.Array | int) -> jax.Array:
        """The tokens (B,), int32, of draw `number`."""
        if self.greedy:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        allowed_BV = allowed(logits_BV / self.temperature, self.top_k, self.top_p)
        drawn = jax.random.categorical(jax.random.fold_in(self.key, number), allowed_BV, axis=-1)
        return drawn.astype(jnp.int32)


def allowed(logits_BV: jax.Array, top_k: jax.Array | int, top_p: jax.Array | float) -> jax.Array:
    """Logits of the tokens that may be drawn, and -inf for the others.

    Args:
        logits_BV: Of all tokens.
        top_k: The most probable `top_k` stay, and those equal to the last of them.
        top_p: Of those, the fewest most probable stay whose probabilities reach `top_p`; one at least.
    """
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    last_B1 = jnp.take(sorted_BV, jnp.minimum(top_k, logits_BV.shape[-1])[None] - 1, axis=-1)
    sorted_BV = jnp.where(sorted_BV < last_B1, -jnp.inf, sorted_BV)
    probable_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probable_BV, axis=-1) - probable_BV
    stays_BV = ((before_BV < top_p) | (top_p >= 1)).at[:, 0].set(True)  # sums of all but the last may round to 1
    sorted_BV = jnp.where(stays_BV, sorted_BV, -jnp.inf)
    return jnp.take_along_axis(sorted_BV, jnp.argsort(order_BV, axis=-1), axis=-1)


def _run(
    model: Any, cache: Any, *, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
) -> dict[str, PyTree]:
    """A call of the model: the logits of the last token, and what the cache has then."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    takes = inspect.signature(base.forward).parameters
    options: dict[str, Any] = {"position_ids": positions} if "position_ids" in takes else {}
    options |= {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    options["cache" if "cache" in takes else "past_key_values"] = cache  # "cache" from transformers 5.24 on
    out = model(input_ids=ids, attention_mask=mask, use_cache=True, return_dict=True, **options)
    keys, values = contents(cache)
    return {"logits": out.logits[:, -1].float(), "keys": keys, "values": values}


class Prefill(ApplyStep):
    """The call for the prompt: logits of the next token, and the cache."""

    caller = "generate"

    def __init__(self, model: Any, num_layers: int, options: StepOptions) -> None:
        def prefill(model: Any, batch: tuple[torch.Tensor, ...]) -> PyTree:
            ids, mask, positions = batch
            return _run(model, empty_cache(num_layers, mask.shape[1]), ids=ids, mask=mask, positions=positions)

        super().__init__(model, prefill, options)

    def _body(self, task: Task) -> tuple[Body, dict[str, Any]]:
        refuse_values(task.loss)

        def prefill(state: TrainState, batch: list[jax.Array], closure: list[jax.Array]) -> PyTree:
            check_names(state, self._held.all)
            return task.loss.run(state.key, state.tensors, batch, closure).metrics["outputs"]

        return prefill, {}

    def run(self, state: TrainState, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> PyTree:
        """Logits (B, V), keys and values, after a prompt."""
        return self._run((ids, mask, positions), state)[1]


class Decode(ApplyStep):
    """The loop over new tokens."""

    caller = "generate"

    def __init__(self, model: Any, options: StepOptions) -> None:
        def decode(model: Any, batch: tuple[Any, ...]) -> PyTree:
            ids, mask, positions, filled, keys, values = batch
            return _run(model, filled_cache(keys, values, filled), ids=ids, mask=mask, positions=positions)

        super().__init__(model, decode, options)

    def _body(self, task: Task) -> tuple[Body, dict[str, Any]]:
        refuse_values(task.loss)

        def decode(state: TrainState, given: list[Any], closure: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            check_names(state, self._held.all)
            tensors = state.tensors
            held = {name: tensors.in_program(name) for name in tensors}  # rows of stacks are taken once, not per token
            _, mask, positions, filled, *cache = given[:-1]

            def call(number: jax.Array, token: jax.Array, cache: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
                batch = [token[:, None], mask, positions + number, filled + number, *cache]
                out = task.loss.run(jax.random.fold_in(state.key, number), held, batch, closure).metrics["outputs"]
                return out["logits"], [*out["keys"], *out["values"]]

            return _loop(given[-1], call, cache)

        return decode, {"out_shardings": self.replicated}

    def run(self, state: TrainState, first: PyTree, mask: Any, positions: Any, *, filled: int, loop: Loop) -> PyTree:
        """New tokens (B, N), and how many of the N were made."""
        small = [np.zeros(positions.shape, np.int32), mask, positions, np.asarray(filled, np.int32)]
        arrays = [*(put(array, self.replicated) for array in small), *first["keys"], *first["values"]]
        _, signature = flatten_batch((*arrays[:4], first["keys"], first["values"]))
        program, _ = self._prepare(ShardedBatch(arrays, signature, leaves=tuple(arrays)), state)
        return program(as_arrays(state), [*arrays, loop])


def _loop(
    loop: Loop, call: Callable[..., tuple[jax.Array, list[jax.Array]]], cache: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    token = loop.pick(loop.logits, 0)
    tokens = jnp.full((token.shape[0], loop.num_new), loop.pad, jnp.int32).at[:, 0].set(token)

    def goes_on(carry: tuple[Any, ...]) -> jax.Array:
        number, _, ended, *_ = carry
        return (number < loop.limit) & ~jnp.all(ended)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        number, token, ended, tokens, cache = carry
        logits, cache = call(number - 1, token, cache)
        token = jnp.where(ended, loop.pad, loop.pick(logits, number))
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (jnp.zeros_like(number), number))
        return number + 1, token, ended | jnp.isin(token, loop.stops), tokens, cache

    start = (jnp.ones((), jnp.int32), token, jnp.isin(token, loop.stops), tokens, cache)
    number, _, _, tokens, _ = jax.lax.while_loop(goes_on, step, start)
    return tokens, number


def refuse_values(program: LossProgram) -> None:
    """Refuse a model whose Python asks for values: they change from token to token."""
    if program.host is not None:
        raise NotImplementedError(
            "generate: Python in the model asks for values of its inputs (a rotary embedding that depends on the "
            "length, for example), which change from token to token. Use model.generate for this one."
        )


# Keys and values of the tokens so far, as tensors of a fixed length that go into a decoder and come out of it.
#
# Shapes: B rows, H heads of keys, L slots of the cache, D size of a head, T tokens of this call.


@functools.cache
def _layer_class() -> Any:
    """The class of a layer of the cache; transformers is imported when there is a model of it."""
    from transformers.cache_utils import StaticLayer

    class Slots(StaticLayer):
        """A cache layer whose update makes new tensors, and writes to none that it was given."""

        def __init__(self, num_slots: int, filled: torch.Tensor | int) -> None:
            super().__init__(num_slots)
            self.filled, self.keys, self.values = filled, None, None

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            pairs = ((self.keys, key_states), (self.values, value_states))
            self.keys, self.values = (self._written(*pair) for pair in pairs)
            self.is_initialized = True
            return self.keys, self.values

        def _written(self, slots_BHLD: torch.Tensor | None, new_BHTD: torch.Tensor) -> torch.Tensor:
            if slots_BHLD is None:
                return torch.nn.functional.pad(new_BHTD, (0, 0, 0, self.max_cache_len - new_BHTD.shape[2]))
            at = torch.arange(new_BHTD.shape[2]) + self.filled
            return slots_BHLD.index_copy(2, at, new_BHTD)

        def get_seq_length(self) -> Any:  # the number, or in the loop a tensor
            return self.filled

    return Slots


def empty_cache(num_layers: int, num_slots: int) -> Any:
    """A cache of transformers for a first call: the first tokens go into its first slots.

    Layers with a sliding window have all slots, too: the mask says which count.
    """
    from transformers.cache_utils import Cache

    return Cache(layers=[_layer_class()(num_slots, 0) for _ in range(num_layers)])


def filled_cache(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], filled: torch.Tensor) -> Any:
    """A cache with these tensors, each (B, H, L, D), of which the first `filled` slots are in use."""
    from transformers.cache_utils import Cache

    layers: list[Any] = []
    for key, value in zip(keys, values, strict=True):
        layer = _layer_class()(key.shape[2], filled)
        layer.keys, layer.values, layer.is_initialized = key, value, True
        layers.append(layer)
    return Cache(layers=layers)


def contents(cache: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of all layers."""
    if missing := [str(number) for number, layer in enumerate(cache.layers) if layer.keys is None]:
        raise NotImplementedError(
            f"{caller()}: layer {', '.join(missing)} of the model keeps no keys and values in the cache. Decoders "
            "whose layers all have their own attention are generated from; use model.generate for this one."
        )
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
