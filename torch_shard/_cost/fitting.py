"""What programs take of the memory of the devices that they are compiled for, which may be too much."""

# JAX annotates some of its functions in part.
# pyright: reportUnknownMemberType=false

import contextlib
import dataclasses
import os
import re
from collections.abc import Generator, Iterator
from typing import Any

import jax
import jaxlib.utils
from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.specs import describe_mesh
from torch_shard._cost.hlo import Hlo, Instruction


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
    def arguments_and_outputs(self) -> int:
        """What is donated counted once."""
        return self.arguments + self.outputs - self.aliased

    @property
    def peak(self) -> int:
        """Everything together."""
        return self.arguments_and_outputs + self.temporaries


def memory_of_program(compiled: jax.stages.Compiled, platform: str) -> ProgramMemory:
    """What a program takes of one device.

    Args:
        compiled: The program.
        platform: That of its devices.
    """
    stats: Any = compiled.memory_analysis()
    host_arguments: int = stats.host_argument_size_in_bytes
    host_outputs: int = stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    memory = ProgramMemory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        host=host_arguments + host_outputs + stats.host_temp_size_in_bytes,
    )
    if platform != "tpu":
        return memory

    # The compiler for TPUs refuses what is too large by its own account of the peak. For large programs that is less
    # than the sum of the parts, as temporaries take the place of others; for small ones more, as memory on the chip
    # counts there. What lies in the host's memory counts, too.
    by_peak = max(stats.peak_memory_in_bytes - memory.arguments_and_outputs - host_arguments, 0)
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
    """Bytes that the compiler says it would need: `Used 20.1G of 15.7G hbm`, `... (20.1G) exceeds ...`."""
    size = re.search(r"Used ([\d.]+)([KMGT]) of", message) or re.search(r"\(([\d.]+)([KMGT])\) exceeds", message)
    if size is None:
        return None
    power = "KMGT".index(size.group(2)) + 1
    return int(float(size.group(1)) * 1024**power)


# What of a compiled program's memory holds values that the forward pass leaves for the backward pass.


_ALIASES = ("bitcast", "copy-done", "optimization-barrier", "opt-barrier")


def saved_bytes(text: str) -> float:
    """Bytes of one device that instructions of the forward pass compute and those of the backward pass read."""
    hlo = Hlo(text)
    entry = hlo.computations[hlo.entry]
    sources = _Sources(hlo)

    # A step opens the scopes `backward` and `optimizer`: what has neither in its label is of the forward pass.
    scopes = {instruction.name: set(instruction.label.split("/")) for instruction in entry}
    forward = set[str]()
    read_backward = set[str]()
    for instruction in entry:
        is_computed = instruction.op not in ("parameter", "constant")
        if instruction.label and is_computed and scopes[instruction.name].isdisjoint(("backward", "optimizer")):
            forward.add(instruction.name)
        if "backward" in scopes[instruction.name]:
            read_backward.update(name for name in instruction.operands if name in hlo.made)

    # A value may be read by several names, and counts once.
    saved = {source for name in read_backward for source in sources.of(name)}
    total = 0.0
    for name, index in saved:
        if name not in forward:
            continue
        array = hlo.operand(name)[index]
        if not array.is_on_chip:
            total += array.num_padded_bytes
    return total


class _Sources:
    """Follows values through what only names them anew, to instructions and which of their results they are."""

    def __init__(self, hlo: Hlo) -> None:
        self._hlo = hlo

    def of(self, name: str) -> Iterator[tuple[str, int]]:
        """What made the arrays of a value."""
        made = self._hlo.made[name]
        if made.op == "get-tuple-element":
            yield from self._element(made.operands[0], _index(made))
        elif made.op in ("tuple", *_ALIASES):
            for operand in made.operands:
                yield from self.of(operand)
        else:
            yield from ((name, at) for at in range(len(made.results)))

    def _element(self, name: str, index: int) -> Iterator[tuple[str, int]]:
        made = self._hlo.made[name]
        if made.op == "tuple":
            yield from self.of(made.operands[index])
        elif made.op == "while" and self._passes(made, index):
            yield from self._element(made.operands[0], index)
        elif index < len(made.results):
            yield name, index

    def _passes(self, loop: Instruction, index: int) -> bool:
        """Tell whether a loop hands an element of what it carries on as it came."""
        body, _ = self._hlo.inner(loop)[0]
        root = next(instruction for instruction in self._hlo.computations[body] if instruction.is_root)
        result = self._hlo.made[root.operands[index]] if root.op == "tuple" else root
        if result.op != "get-tuple-element" or _index(result) != index:
            return False
        return self._hlo.made[result.operands[0]].op == "parameter"


def _index(element: Instruction) -> int:
    return int(element.find(r"index=(\d+)") or 0)
