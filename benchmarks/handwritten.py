"""The rival: a model and its optimiser written by hand in plain JAX, one jit, sharded and donated as ours.

A `Rival` is pure functions on a flat dict of arrays, by torch's names. Its `Layout` says how it holds them: turned as
suits JAX best, and the layers of a transformer stacked, for `jax.lax.scan`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a rival holds the entries of a torch state_dict.

    Attributes:
        turn: The permutation of an entry's dims, from its name and rank; None to hold it as torch does.
        stacked: Prefix of the layers (`h.`) that are stacked, as `h.0.q.weight`, ... under `h.q.weight`; or None.
    """

    turn: Callable[[str, int], tuple[int, ...] | None] = lambda name, ndim: None
    stacked: str | None = None

    def values(self, values: dict[str, np.ndarray]) -> Arrays:
        """A torch state_dict in this layout."""
        orders = {n: self.turn(n, v.ndim) for n, v in values.items()}
        turned = {n: np.ascontiguousarray(v.transpose(orders[n])) if orders[n] else v for n, v in values.items()}
        return self._grouped(turned, np.stack)

    def specs(self, specs: dict[str, P], values: dict[str, np.ndarray]) -> Arrays:
        """Specs by torch's names in this layout."""
        turned = {}
        for name, spec in specs.items():
            whole = (*spec, *(None,) * (values[name].ndim - len(spec)))
            order = self.turn(name, len(whole)) or range(len(whole))
            turned[name] = P(*(whole[dim] for dim in order))
        return self._grouped(turned, lambda found: P(None, *found[0]))

    def _grouped(self, entries: Arrays, join: Callable[[list[Any]], Any]) -> Arrays:
        if self.stacked is None:
            return entries
        rest = {n: v for n, v in entries.items() if not n.startswith(self.stacked)}
        rows: dict[str, list[Any]] = {}
        for name, value in entries.items():
            if name not in rest:
                rows.setdefault(self.stacked + name.removeprefix(self.stacked).partition(".")[2], []).append(value)
        return rest | {name: join(found) for name, found in rows.items()}


@dataclasses.dataclass(frozen=True)
class Rival:
    """A model by hand: `loss(params, buffers, batch)` gives the loss and the new buffers."""

    loss: Callable[[Arrays, Arrays, Any], tuple[jax.Array, Arrays]]
    layout: Layout = Layout()
    compute_dtype: Any = None


@dataclasses.dataclass(frozen=True)
class Values:
    """Where both sides start: values and specs by torch's names."""

    params: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]
    specs: dict[str, P]

    @staticmethod
    def of_shapes(shapes: Mapping[str, tuple[int, ...]], specs: dict[str, P]) -> "Values":
        """Parameters in float32, of which the shapes alone are there, without buffers."""
        structs: Any = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
        return Values(structs, {}, specs)


class HandwrittenStep:
    """A train step as a careful JAX user writes it: one jit, pinned shardings, donated state, loss and grad norm."""

    def __init__(self, rival: Rival, optimizer: optax.GradientTransformation, mesh: Mesh, start: Values) -> None:
        self.optimizer, self.rows = optimizer, NamedSharding(mesh, P("batch"))
        self._replicated = NamedSharding(mesh, P())
        host = [rival.layout.values(values) for values in (start.params, start.buffers)]
        specs = [
            rival.layout.specs({n: start.specs[n] for n in values}, values) for values in (start.params, start.buffers)
        ]
        self._host = host
        shardings, buffer_shardings = ({n: NamedSharding(mesh, s) for n, s in part.items()} for part in specs)
        self.shardings = (shardings, buffer_shardings, self._moments(shardings))
        self.jitted = jax.jit(
            self._step(rival),
            in_shardings=(self.shardings, self.rows),
            out_shardings=(self.shardings, self._replicated),
            donate_argnums=0,
        )
        self.state: Any = None

    def _moments(self, shardings: Arrays) -> Any:
        return optax.tree_utils.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self.optimizer.init, self._host[0]),
            shardings,
            transform_non_params=lambda _: self._replicated,
        )

    def _step(self, rival: Rival) -> Callable[..., Any]:
        def step(state: Any, batch: Any) -> Any:
            params, buffers, opt_state = state

            def loss(params: Arrays) -> Any:
                cast = params
                if rival.compute_dtype is not None:
                    cast = jax.tree.map(lambda p: p.astype(rival.compute_dtype), params)
                return rival.loss(cast, buffers, batch)

            (value, buffers), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            metrics = {"loss": value, "grad_norm": optax.tree.norm(grads)}
            return (optax.apply_updates(params, updates), buffers, opt_state), metrics

        return step

    def init(self) -> None:
        """Put the values on the mesh."""
        params, buffers = jax.device_put(tuple(self._host), self.shardings[:2])
        opt_state = jax.jit(self.optimizer.init, out_shardings=self.shardings[2])(params)
        self.state = (params, buffers, opt_state)

    def put(self, batch: Any) -> Any:
        """A batch of CPU tensors on the mesh."""
        arrays = [t.numpy().astype(np.int32) if not t.is_floating_point() else t.numpy() for t in batch]
        return jax.device_put(tuple(arrays), self.rows)

    def __call__(self, batch: Any) -> float:
        """Train by one step, wait for it, and return the loss."""
        if self.state is None:
            self.init()
        self.state, metrics = self.jitted(self.state, self.put(batch))
        return float(jax.block_until_ready((self.state, metrics))[1]["loss"])

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The lowered program; nothing is executed or moved."""
        state = (*self._host, jax.eval_shape(self.optimizer.init, self._host[0]))
        shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, self.shardings)
        arrays = tuple(
            jax.ShapeDtypeStruct(tuple(t.shape), np.float32 if t.is_floating_point() else np.int32, sharding=self.rows)
            for t in batch
        )
        return self.jitted.lower(shapes, arrays)
