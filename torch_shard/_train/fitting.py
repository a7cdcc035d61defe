"""Programs that may be too large for the devices that they are compiled for."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

import dataclasses
import re

import jax


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """What the compiler says of a program that does not fit.

    Attributes:
        message: Its first line.
        num_bytes: That one device would need, if it says.
    """

    message: str
    num_bytes: int | None

    def __str__(self) -> str:
        return "more than the device has" + ("" if self.num_bytes is None else f", {self.num_bytes}")


def compile_or_refuse(lowered: jax.stages.Lowered) -> jax.stages.Compiled | TooLarge:
    """Compile a program; compilers that know the device's memory, as that for TPUs does, may refuse it."""
    try:
        return lowered.compile()
    except RuntimeError as error:  # JAX's
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return TooLarge(str(error).splitlines()[0][:300], _needed(str(error)))


def _needed(message: str) -> int | None:
    found = re.search(r"Used ([\d.]+)([KMGT]) of", message) or re.search(r"\(([\d.]+)([KMGT])\) exceeds", message)
    return int(float(found.group(1)) * 1024 ** ("KMGT".index(found.group(2)) + 1)) if found else None
