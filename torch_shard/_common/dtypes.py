"""torch dtypes and their JAX counterparts."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

_NAMES = """
    uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128
    float8_e4m3fn float8_e5m2
""".split()  # noqa: SIM905  (a table)

_TORCH_TO_JAX: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(bool),
    **{getattr(torch, name): np.dtype(getattr(jnp, name)) for name in _NAMES},
}

_JAX_TO_TORCH = {j: t for t, j in _TORCH_TO_JAX.items()}


def dtype_of_sums(dtype: np.dtype) -> np.dtype:
    """The dtype that values are added up in, and scores are computed in: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def widened(x: jax.Array) -> jax.Array:
    """An array in the dtype of its sums, in which torch computes what is narrower."""
    return x.astype(dtype_of_sums(x.dtype))


def numbers_of(mask: jax.Array, dtype: np.dtype) -> jax.Array:
    """1 and 0 for booleans: of a product with what is converted from them, XLA makes a choice, which hides NaN."""
    return jnp.where(mask, np.asarray(1, dtype), np.asarray(0, dtype))


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype that JAX gives to data of a torch dtype: 64 bits become 32 unless `jax_enable_x64` is on."""
    if dtype not in _TORCH_TO_JAX:
        raise TypeError(f"{dtype} has no JAX counterpart; convert the tensor to one of {list(_TORCH_TO_JAX)}.")
    return np.dtype(jax.dtypes.canonicalize_dtype(_TORCH_TO_JAX[dtype]))


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of a JAX dtype."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"a random key of JAX ({dtype}) has no torch counterpart. Adapters take one as key=; a step draws by its "
            "own, step.init(seed=0)."
        )
    found = None if jnp.issubdtype(dtype, jax.dtypes.extended) else _JAX_TO_TORCH.get(np.dtype(dtype))
    if found is None:
        raise TypeError(f"JAX dtype {dtype} has no torch counterpart; convert the array with .astype(...).")
    return found


def is_of_numpy(dtype: torch.dtype) -> bool:
    """Tell whether NumPy itself has the dtype, and not only the package that adds to its dtypes."""
    return dtype in _TORCH_TO_JAX and _TORCH_TO_JAX[dtype].isbuiltin == 1


def captured_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype that an array has in a capture: with x64 off, JAX's 32-bit integers are torch's 64-bit ones."""
    found = torch_dtype(dtype)
    return torch.int64 if found is torch.int32 and not has_x64() else found


def has_x64() -> bool:
    """Tell whether JAX keeps 64-bit values."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64
