"""Communication between the devices, or the mapped rows, of a named axis; on torch tensors, by axis name.

They work inside a torch function that is mapped over named axes: by `jax_shard_map` (the axes of its mesh), or by
`jax_pmap`, `jax_vmap` and `tpmap` (their `axis_name`). Each takes one name, or several as a tuple (as one axis, the
first name slowest), and a tensor or a pytree of tensors; shapes are those of one device. Gradients flow through all of
them, and through `jax_shard_map` they are those of the unsharded computation.

Inside `jax_shard_map`, `jax_value_and_grad` means what it means in JAX: the gradient by a value that is the same on all
devices is summed over the devices. PyTorch's own `torch.autograd.grad` there means what it means in
`torch.distributed`, with a process for each device: each differentiates by its own copy, and what it differentiates
counts once per device. Hooks on gradients see one device's share, of which the gradient is the sum.
"""

from torch_shard._spmd import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    fold_in_axis,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "fold_in_axis",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
]
