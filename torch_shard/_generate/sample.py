"""The next token of logits: the largest, or one drawn from the most probable.

Shapes: B rows, V words of the vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; numbers are inputs of the program, so that others need no other program.

    Attributes:
        key: Of the first draw; the following ones fold their number in.
        temperature: Logits are divided by it.
        top_k: Only so many most probable tokens are drawn from.
        top_p: Only the most probable tokens are drawn from that have this probability together.
        greedy: Take the largest instead.
    """

    key: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    greedy: bool = dataclasses.field(metadata={"static": True})

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
