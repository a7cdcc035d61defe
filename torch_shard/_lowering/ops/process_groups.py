"""`torch.distributed` within a captured function is refused: one program has the rows of all processes.

A sum over processes that DINO's center or the gathered features of CLIP need between the processes of DDP is here a sum
over rows. With several JAX processes, each of which runs the program of all rows, it would count rows several times.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torch_shard._capture import current_user_line, is_user_file
from torch_shard._common.overrides import OPERATORS, instead_of_attribute

_HOMES = ("torch.distributed", "torch.distributed.distributed_c10d")
_DIFFERENTIABLE = ("torch.distributed.nn", "torch.distributed.nn.functional")

_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "barrier",
    "monitored_barrier",
    "broadcast_object_list",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_gather_object",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)
_NUMBERS = ("get_rank", "get_world_size")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{current_user_line()}\nHere {name} runs in the captured function. Delete it: the program is that "
        "of the rows of all processes, so that its sums, means and gathered rows are already those of "
        "all. (num_replicas and rank of a DistributedSampler are those of torch_shard.data_shard(mesh).)"
    )


def _refuse_call(name: str, owners: Sequence[str], *, if_alone: bool) -> None:
    """Refuse what a user calls by this name of these modules.

    Args:
        name: Of a function, which a release of torch may lack.
        owners: The modules that have it, once they are imported.
        if_alone: Also where torch has one process, in which its number and that of all are what torch says.
    """
    original = getattr(sys.modules.get(owners[0]), name, None)

    def call(*args: Any, **kwargs: Any) -> Any:
        # PyTorch itself asks for ranks, for its logs. This frame is called by that of `patched`.
        caller_frame = sys._getframe(2)
        is_asked = is_user_file(caller_frame.f_code.co_filename) and (if_alone or _has_several_processes())
        if original is not None and not is_asked:
            return original(*args, **kwargs)
        _refuse(f"{owners[0]}.{name}")

    for owner in owners:
        instead_of_attribute(owner, name)(call)


def _has_several_processes() -> bool:
    return dist.is_initialized() and dist.group.WORLD.size() > 1  # pyright: ignore[reportOptionalMemberAccess]


def _refuse_operator(*args: Any, **kwargs: Any) -> NoReturn:
    _refuse("a collective of torch.distributed")


def _refuse_operators() -> None:
    """Refuse the collectives below those functions: point to point, functional, or `from ... import` under a name."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and "." not in name:
            operator: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name).default
            OPERATORS[operator] = _refuse_operator  # pyright: ignore[reportArgumentType]


if dist.is_available():
    for _name in _COLLECTIVES:
        _refuse_call(_name, _HOMES, if_alone=True)
        _refuse_call(_name, _DIFFERENTIABLE, if_alone=True)
    for _name in _NUMBERS:
        _refuse_call(_name, _HOMES, if_alone=False)
    _refuse_operators()
