"""`torch.distributed` within a captured function: one program has the rows of all processes.

What a script does there between its processes (DINO's center, MoCo's keys, the gathered features of CLIP) is what it
does in a world of one process. With several JAX processes it is refused: each of them runs the program of all rows, so
that a sum over processes would count each row several times.
"""

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, cast

import jax
import torch
import torch.distributed as dist

from torch_shard._capture import current_user_line, is_user_file
from torch_shard._common.overrides import OPERATORS, instead_of_attribute
from torch_shard._common.patching import patched

logger = logging.getLogger(__name__)

_HOMES = ("torch.distributed", "torch.distributed.distributed_c10d")

_DIFFERENTIABLE = ("torch.distributed.nn", "torch.distributed.nn.functional")


_CALLS: list[tuple[str, str, Callable[..., Any]]] = []


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """Let eager torch do the same within: it needs no process group."""
    with contextlib.ExitStack() as stack:
        for owner, name, call in _CALLS:
            if hasattr(module := sys.modules.get(owner), name):
                stack.enter_context(patched(cast(ModuleType, module), name, lambda _, own=call: own))
        yield


class _Done:
    """The `Work` of a collective with `async_op=True`."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _in_a_world_of_one(name: str, owners: Sequence[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a capture call the decorated function under this name of these modules, if PyTorch has it."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(sys.modules.get(owners[0]), name, None)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(2)  # beyond what `patched` calls this by
            if original is not None and not is_user_file(frame.f_code.co_filename):
                return original(*args, **kwargs)  # PyTorch asks, for its logs
            line = current_user_line()
            if _is_alone():
                _say_once(f"{owners[0]}.{name}", line)
                return fn(*args, **kwargs)
            raise NotImplementedError(
                f"{line}\nHere {owners[0]}.{name} runs in the captured function. Delete it: the program is that "
                "of the rows of all processes, so that its sums, means and gathered rows are already those of "
                "all. (num_replicas and rank of a DistributedSampler are those of torch_shard.data_shard(mesh).)"
            )

        for owner in owners:
            instead_of_attribute(owner, name)(call)
            _CALLS.append((owner, name, call))
        return fn

    return register


def _is_alone() -> bool:
    is_torch_alone = not (dist.is_available() and dist.is_initialized()) or dist.group.WORLD.size() == 1  # pyright: ignore
    return jax.process_count() == 1 and is_torch_alone


@functools.lru_cache(maxsize=256)
def _say_once(name: str, line: str) -> None:
    logger.warning(
        "%s\nHere %s does what it does in a world of one process: a compiled program has the rows of the whole batch.",
        line,
        name,
    )


@_in_a_world_of_one("all_reduce", _HOMES)
@_in_a_world_of_one("reduce", _HOMES)
@_in_a_world_of_one("broadcast", _HOMES)
@_in_a_world_of_one("barrier", _HOMES)
@_in_a_world_of_one("monitored_barrier", _HOMES)
@_in_a_world_of_one("broadcast_object_list", _HOMES)
def leave(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
    """Leave what is there."""
    return _Done() if async_op else None


@_in_a_world_of_one("get_rank", _HOMES)
def get_rank(group: object = None) -> int:
    return 0


@_in_a_world_of_one("get_world_size", _HOMES)
def get_world_size(group: object = None) -> int:
    return 1


def _copying(name: str) -> Callable[..., _Done | None]:
    """What is given second, a tensor or a list of one, to what is given first; in `gather` the other way round."""
    names = list(inspect.signature(getattr(dist, name)).parameters)

    def copy(*args: Any, **kwargs: Any) -> _Done | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        first, second = (given.get(each) for each in names[:2])
        to, values = (second, first) if name == "gather" else (first, second)
        with torch.no_grad():  # as in torch, where collectives of c10d have no derivative
            for out, value in zip(_listed(to), _listed(values), strict=True) if second is not None else ():
                out.copy_(value.reshape(out.shape))
        return leave(async_op=given.get("async_op", False))

    return copy


def _listed(given: Any) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else given


for _name in (
    *("all_gather", "all_gather_single", "all_gather_into_tensor", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
):
    if hasattr(dist, _name):  # torch 2.11 has no all_gather_single
        _in_a_world_of_one(_name, _HOMES)(_copying(_name))


@_in_a_world_of_one("all_gather_object", _HOMES)
def all_gather_object(object_list: list[Any], obj: Any, group: object = None) -> None:
    object_list[:] = [obj]


@_in_a_world_of_one("all_reduce", _DIFFERENTIABLE)
@_in_a_world_of_one("reduce", _DIFFERENTIABLE)
@_in_a_world_of_one("broadcast", _DIFFERENTIABLE)
def same(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor.view_as(tensor)


@_in_a_world_of_one("all_gather", _DIFFERENTIABLE)
@_in_a_world_of_one("gather", _DIFFERENTIABLE)
def gathered(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    return (same(tensor),)


@_in_a_world_of_one("scatter", _DIFFERENTIABLE)
def scattered(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    (only,) = tensors
    return same(only)


@_in_a_world_of_one("reduce_scatter", _DIFFERENTIABLE)
def reduced(output: torch.Tensor, input_list: list[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return scattered(input_list)


@_in_a_world_of_one("all_to_all_single", _DIFFERENTIABLE)
def exchanged(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return input.view_as(output)


@_in_a_world_of_one("all_to_all", _DIFFERENTIABLE)
def exchanged_lists(
    output_tensor_list: list[torch.Tensor], input_tensor_list: list[torch.Tensor], group: object = None
) -> tuple[torch.Tensor, ...]:
    return tuple(map(same, input_tensor_list))


def _refuse_operator(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{current_user_line()}\nHere a collective of torch.distributed runs in the captured function, by a name of "
        "its own. Call it as torch.distributed.all_reduce, or delete it: the program has the rows of the whole batch."
    )


def _refuse_operators() -> None:
    """Refuse the collectives below those functions: point to point, functional, or `from ... import` under a name."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and "." not in name:
            OPERATORS[getattr(getattr(torch.ops, namespace), name).default] = _refuse_operator


if dist.is_available():
    _refuse_operators()
