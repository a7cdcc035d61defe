"""XLA options without which a program would be wrong, or slower; the compiler is asked whether it has them."""

import functools
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.fx import GraphModule

Options = dict[str, str | int | bool]

# Only these operators lower to `pad`; the gradients of slices come as `cat` and scatters, which are not affected.
_MAY_PAD = {"aten::constant_pad_nd", "torch_shard::ctc_backward", "torch_shard::call", "torch_shard::call_for_effect"}

# XLA's CPU backend can give wrong values for a fused `pad` over slices of exactly two local rows (an address
# computation loses its row in LLVM's loop strength reduction; whether it does depends on the CPU). The older way to
# emit fusions is right. jaxlib 0.11 has it no more: there, no fusions at all, if the values are wrong with them.
_WAYS: tuple[Options, ...] = ({"xla_cpu_use_fusion_emitters": False}, {}, {"xla_disable_hlo_passes": "fusion"})

# XLA's CPU backend of jax 0.10 gives wrong values for the sum of many exp(c * x) of bfloat16 x, which it hands to
# YNNPACK: NaN, infinity, or the end of the process, so that it is not tried out. Without that all is right.
_MAY_EXP = {"aten::exp", "aten::exp2", "aten::expm1", "torch_shard::call", "torch_shard::call_for_effect"}
_WITHOUT_YNNPACK: Options = {"xla_cpu_experimental_ynn_fusion_type": ""}


WHOLE: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
"""XLA:TPU cuts products whose factors are gathered, or whose results are summed, into pieces that travel meanwhile.

Whole, they take fewer cycles, bytes and memory in all, with what the schedule leaves exposed of them: docs/tpu.md.
"""


def compiler_options(graphs: Sequence[GraphModule], mesh: Mesh) -> Options | None:
    """XLA options for a program of these graphs on these devices, for a top-level `jax.jit`."""
    platforms = {device.platform for device in mesh.devices.flat}
    if platforms == {"tpu"}:
        return whole_collectives(mesh)
    names = {getattr(node.target, "_name", "").split(".")[0] for graph in graphs for node in graph.graph.nodes}
    if platforms != {"cpu"}:
        return None
    return {**(safe_pads() if names & _MAY_PAD else {}), **(safe_exps(mesh) if names & _MAY_EXP else {})} or None


def whole_collectives(mesh: Mesh) -> Options | None:
    """What lets XLA:TPU not cut collectives, where several devices have any; None where the user has set it."""
    (name,) = WHOLE
    if mesh.size == 1 or any(name in os.environ.get(flags, "") for flags in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")):
        return None
    version = mesh.devices.flat[0].client.platform_version
    if version not in _KNOWS_WHOLE:
        _KNOWS_WHOLE[version] = _compiles(WHOLE, mesh)
    return WHOLE if _KNOWS_WHOLE[version] else None


_KNOWS_WHOLE: dict[str, bool] = {}
"""By version of the compiler."""


def _compiles(options: Options, mesh: Mesh) -> bool:
    """Tell whether a compiler has these options."""
    number = jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    try:
        jax.jit(jax.numpy.negative, compiler_options=options).lower(number).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


@functools.cache
def safe_pads() -> Options:
    """The first way of these to compile for the CPU which this compiler has, and which pads right on this machine."""
    a, b = np.arange(32, dtype=np.float32).reshape(2, 2, 8)
    wanted = np.pad(a[:, :4] + b[:, :4], ((0, 0), (8, 8)))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for options in _WAYS:
            try:
                got = jax.jit(cut_add_pad, compiler_options=options)(0, a, b)
            except jax.errors.JaxRuntimeError as error:
                if "No such compile option" not in str(error):
                    raise
            else:
                if np.array_equal(got, wanted):
                    return options
    raise NotImplementedError(
        f"XLA's CPU backend (jax {jax.__version__}) pads the sum of two slices wrong on this machine, whatever its "
        "options. Use another version of jax."
    )


@functools.cache
def safe_exps(mesh: Mesh) -> Options:
    """Options for right sums of exponentials on CPUs."""
    return _WITHOUT_YNNPACK if jax.__version_info__ < (0, 11) and _compiles(_WITHOUT_YNNPACK, mesh) else {}


def cut_add_pad(i: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Half of each, chosen at run time; added; put into a row of zeros: the smallest program that XLA has wrong."""
    cut = [jax.lax.dynamic_slice(x, (0, i * 4), (2, 4)) for x in (a, b)]
    return jax.lax.pad(cut[0] + cut[1], np.float32(0), ((0, 0, 0), (8, 8, 0)))
