"""What PyTorch knows of an operator that a user has registered with `torch.library`."""

from collections.abc import Iterable

import torch
from torch._library.custom_ops import OPDEFS

from torch_shard._common.types import Operator


def has_derivative(operator: Operator) -> bool:
    """Tell whether an operator has a formula for its gradients, by `torch.library.register_autograd` or its kernel."""
    definition = OPDEFS.get(operator.name().removesuffix(".default"))
    if definition is not None and definition._opoverload is operator:  # which has a kernel that raises, if not
        return definition._backward_fn is not None
    return _has_kernel(operator, ("Autograd", "AutogradCPU"))


def is_composite(operator: Operator) -> bool:
    """Tell whether PyTorch runs an operator as the operators that its kernel is written in, and no graph has it."""
    return _has_kernel(operator, ("CompositeImplicitAutograd",))


def writes_or_aliases(operator: Operator) -> bool:
    """Tell whether an operator writes to an argument, or returns a view of one."""
    schema = operator._schema
    return schema.is_mutable or any(value.alias_info is not None for value in (*schema.arguments, *schema.returns))


def _has_kernel(operator: Operator, keys: Iterable[str]) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in keys)
