"""What programs take of the memory of the devices that they are compiled for, which may be too much."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false

import contextlib
import dataclasses
import os
import re
from collections.abc import Generator
from typing import Any

import jax
import jaxlib.utils
from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._sharding import describe_mesh


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


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Bytes of one device while a program runs, by what XLA says of it.

    Attributes:
        arguments: Of the program.
        outputs: Of the program.
        temporaries: What is in between.
        aliased: Of the outputs, what has the place of an argument.
        host: In the host's memory.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    host: int = 0

    @property
    def held(self) -> int:
        """Arguments and results, what is donated counted once."""
        return self.arguments + self.outputs - self.aliased

    @property
    def peak(self) -> int:
        """Everything together."""
        return self.held + self.temporaries


def memory_of_program(compiled: jax.stages.Compiled, platform: str) -> ProgramMemory:
    """What a program takes of one device.

    Args:
        compiled: The program.
        platform: That of its devices. The compiler for TPUs refuses what is too large by its own account of the peak,
            which for large programs is less than the sum of its parts, as temporaries take the place of others; for
            small ones it is more, as memory on the chip counts there. What lies in the host's memory counts, too.
    """
    found: Any = compiled.memory_analysis()
    memory = ProgramMemory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        host=found.host_argument_size_in_bytes
        + found.host_output_size_in_bytes
        - found.host_alias_size_in_bytes
        + found.host_temp_size_in_bytes,
    )
    if platform != "tpu":
        return memory
    by_peak = max(found.peak_memory_in_bytes - memory.held - found.host_argument_size_in_bytes, 0)
    return dataclasses.replace(memory, temporaries=min(memory.temporaries, by_peak))


def compile_or_refuse(lowered: jax.stages.Lowered) -> jax.stages.Compiled | TooLarge:
    """Compile a program; compilers that know the device's memory, as that for TPUs does, may refuse it."""
    try:
        with _quiet_compiler():
            return lowered.compile()
    except RuntimeError as error:  # JAX's
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return TooLarge(str(error).splitlines()[0][:300], _needed(str(error)))


@contextlib.contextmanager
def partitioner_refusals(mesh: Mesh) -> Generator[None, None, None]:
    """Say of a program that XLA's partitioner breaks, as its own verifier finds, what its user can do."""
    try:
        with _quiet_compiler():
            yield
    except RuntimeError as error:  # JAX's
        if "[hlo verifier]" not in str(error):
            raise
        raise NotImplementedError(
            f"{caller()}: XLA's partitioner (jax {jax.__version__}) cannot split this step over {describe_mesh(mesh)}: "
            f"{str(error).splitlines()[0][:200]}. This is an error of its own. Split fewer entries or activations of "
            "the plan, or over fewer axes: P() is always fine. The state is as it was."
        ) from error


@contextlib.contextmanager
def _quiet_compiler() -> Generator[None, None, None]:
    """Leave out XLA's warnings of what it gathers, which a preview has by module; unless the user chose a level."""
    chosen = jax.config.values["jax_logging_level"] != "NOTSET"
    if chosen or os.environ.get("TF_CPP_MIN_LOG_LEVEL") != str(_WARNING):
        yield
        return
    jaxlib.utils.absl_set_min_log_level(_WARNING + 1)
    try:
        yield
    finally:
        jaxlib.utils.absl_set_min_log_level(_WARNING)


_WARNING = 1
"""The lowest level that XLA writes, where JAX chooses it."""


def _needed(message: str) -> int | None:
    found = re.search(r"Used ([\d.]+)([KMGT]) of", message) or re.search(r"\(([\d.]+)([KMGT])\) exceeds", message)
    return int(float(found.group(1)) * 1024 ** ("KMGT".index(found.group(2)) + 1)) if found else None
