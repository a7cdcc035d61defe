"""Operators of PyTorch that stand in captured graphs alone: they have shapes and a lowering, and no kernel."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch

Shapes = TypeVar("Shapes", bound=Callable[..., object])


def captured_op(name: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Shapes], Shapes]:
    """Declare an operator by the function that gives its results on fake tensors, whose annotations are its schema."""

    def run(*_: object) -> NoReturn:
        raise NotImplementedError(f"{name} is only captured, never run")

    def declare(shapes: Shapes) -> Shapes:
        schema = torch.library.infer_schema(shapes, mutates_args=())
        torch.library.custom_op(name, run, mutates_args=(), schema=schema, tags=tags).register_fake(shapes)
        return shapes

    return declare
