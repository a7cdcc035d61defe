"""The programs of a step: what each was compiled for, which one serves a call, and why another one is needed."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator

import jax

from torch_shard._capture import Mismatch
from torch_shard._common.types import KEPT, LastUsed
from torch_shard._loss import BatchSignature, HostValues, LossProgram, program_for
from torch_shard._train.programs import StepProgram

logger = logging.getLogger(__name__)

MANY_SHAPES = 3
"""A short last batch makes two."""

WARNED, REFUSED = 4, 8
"""Of the programs that were needed anew for one reason, the one that a warning tells of, and the one too many."""

PAID_OFF = 100
"""Calls of a program after which its compilation does not count."""


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """All that a program of a step was compiled for.

    Attributes:
        signature: Of the batch.
        flags: Training flags of the model's modules, in order; none of an evaluation.
        settings: Settings of torch and JAX that change what a callable means.
        hooks: Gradient hooks of the trained parameters, as of `gradient_hooks`; none of an evaluation.
        skip_grad_norm: The limit of the guard, if the step has one.
    """

    signature: BatchSignature
    flags: tuple[bool, ...]
    settings: tuple[object, ...]
    hooks: tuple[tuple[int, ...], ...]
    skip_grad_norm: float | None

    @property
    def without_texts(self) -> "ProgramKey":
        """The same for all texts in the batch."""
        bare = self.signature.without_texts
        return self if bare is self.signature else dataclasses.replace(self, signature=bare)

    def difference(self, earlier: "ProgramKey") -> str:
        """Say what differs from an earlier program."""
        if self.flags != earlier.flags:
            return "modules were switched between train() and eval()"
        if self.settings != earlier.settings:
            return "torch's default dtype, autocast, hooks on all modules, JAX's x64 or the user's own kernels changed"
        if self.hooks != earlier.hooks:
            return "gradient hooks of parameters (register_hook) were added or removed"
        if self.skip_grad_norm != earlier.skip_grad_norm:
            return f"skip_grad_norm changed from {earlier.skip_grad_norm} to {self.skip_grad_norm}"
        old, new = earlier.signature, self.signature
        if new.tree != old.tree or len(new.leaves) != len(old.leaves):
            return f"the structure of the batch changed from {old.tree} to {new.tree}"
        pairs = zip(old.leaves, new.leaves, strict=True)
        changed = [f"{was} is now {now}" for was, now in pairs if was != now]
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return "in the batch, " + "; ".join(changed[:3]) + more

    def varying(self, others: Iterable["ProgramKey"]) -> dict[str, list[tuple[int, ...]]]:
        """Arrays of the batch that have come in three shapes or more where all else is as here: paths and shapes."""
        alike = [other.signature.specs for other in others if other._apart_from_leaves() == self._apart_from_leaves()]
        shapes = [list(dict.fromkeys(spec.shape for spec in specs)) for specs in zip(*alike, strict=True)]
        if not any(len(seen) >= MANY_SHAPES for seen in shapes):
            return {}
        pairs = zip(self.signature.paths, shapes, strict=True)
        return {path: seen for path, seen in pairs if len(seen) >= MANY_SHAPES}

    def apart_from_plain(self) -> tuple[object, ...]:
        """The same for all values in the batch that are neither numbers nor arrays."""
        return *self._apart_from_leaves(), tuple(self.signature.specs)

    def _apart_from_leaves(self) -> tuple[object, ...]:
        signature = self.signature
        return signature.tree, len(signature.specs), self.flags, self.settings, self.hooks, self.skip_grad_norm


class Causes:
    """Counts the programs that were needed anew for the same reason, so that nobody pays for many without knowing."""

    def __init__(self, who: str) -> None:
        self._who, self._found = who, dict[str, list[str]]()

    def note(self, cause: str | Mismatch, num_calls: int) -> None:
        """Note why a program is needed anew."""
        is_value = isinstance(cause, Mismatch)
        found = self._found.setdefault(cause.place if is_value else cause, [])
        if num_calls > PAID_OFF:
            found.clear()
        if is_value and not found:
            found.append(cause.before)
        found.append(cause.now if is_value else "")
        number = len(found) - is_value
        if number != WARNED and number < REFUSED:
            return
        values = f" (so far {', '.join(found)})" if is_value else ""
        remedy = _OF_VALUES if is_value else _OF_ATTRIBUTES
        if number >= REFUSED:
            raise NotImplementedError(f"{self._who}: {cause}{values}, which would be program {number + 1}. {remedy}")
        logger.warning(
            "%s: %s%s. This is program %d, and each takes time to compile. %s",
            self._who,
            cause,
            values,
            number + 1,
            remedy,
        )


_TEXTS = (
    "loss_fn reads a text of the batch (an id, a path), and a program is for one text. Pass what it needs of it as a "
    "number or a tensor."
)
_PLAIN = (
    "What is neither a number nor an array is a part of the program, and so are the texts of an object. Leave out of "
    "the batch what the loss does not read, or give it as a dict."
)
_OF_ATTRIBUTES = (
    "Pass what changes from step to step in the batch, as a tensor, or keep it in a buffer (register_buffer). A tensor "
    "may also be written in place (x.copy_(new)), which needs no other program."
)
_OF_VALUES = (
    "Work on it as a tensor: torch.where(condition, a, b) instead of `if`, arithmetic instead of .item(). "
    "Pad what differs in size to one size; or compute the value before the step and pass it as data, in the batch. A "
    "number needs no other program where it only says at which index a slice of fixed length begins, or is added, "
    "multiplied or compared."
)


class ProgramCache:
    """The last programs of a step, by what they were compiled for and by the values that Python asked for.

    Args:
        who: The step, for errors.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        # By what they are for apart from texts; in each, the one that was used last is the last.
        self._families = LastUsed[ProgramKey, list[StepProgram]]()
        self._causes, self._has_warned = Causes(who), False

    def __iter__(self) -> Iterator[StepProgram]:
        """In the order of their last use."""
        return (program for family in self._families.values() for program in family)

    def find(
        self,
        key: ProgramKey,
        values: HostValues,
        *,
        capture: Callable[[int], LossProgram],
        compile_loss: Callable[[LossProgram], StepProgram],
        reads_texts: Callable[[LossProgram], bool],
        looks: bool,
    ) -> tuple[StepProgram, list[jax.Array]]:
        """The program for a call, made where there is none yet, and its inputs that are computed on the host.

        Args:
            key: What it is for, as far as that is known without the loss.
            values: What Python may ask for.
            capture: Captures the loss for a microbatch.
            compile_loss: Makes a program of a loss.
            reads_texts: Tells whether a loss may be another one with the texts of this batch.
            looks: Whether to take a second look at the loss where one is due.
        """
        family = self._families.use(key.without_texts) or []
        num_calls = family[-1].num_calls if family else 0
        why: str | Mismatch | None = None
        newest = family[::-1]
        for program in sorted(newest, key=lambda program: program.key != key):
            if outdated := program.loss.captured.outdated():
                why = why or outdated
                family.remove(program)
            elif isinstance(given := program.fit(values), Mismatch):
                why = why or given
            elif program.key == key or not _reads(program, reads_texts):
                if looks and program.looks.is_due():
                    if program.key != key and reads_texts(program.loss):
                        raise NotImplementedError(f"{self._who}: {_TEXTS}")
                    program.loss.look_again(values)
                return _used(family, program), given
        if isinstance(why, str):
            self._causes.note(why, num_calls)
        loss = program_for([program.loss for program in reversed(family) if program.key == key], values, capture)
        known = next((program for program in family if program.loss is loss), None)
        if known is None and isinstance(why, Mismatch):
            self._causes.note(why, num_calls)
        program = self._added(key, compile_loss(loss), why) if known is None else _used(family, known)
        given = program.fit(values)
        assert not isinstance(given, Mismatch)
        return program, given

    def _added(self, key: ProgramKey, program: StepProgram, why: str | Mismatch | None) -> StepProgram:
        """Take in a program, in the place of those that it is more general than, and say why it was needed."""
        bare, captured = key.without_texts, program.loss.captured
        last = next(reversed(self._families), bare)
        family = [known for known in self._families.get(bare, []) if known.loss.captured is not captured]
        if last == bare and family and family[-1].key != key:
            last = family[-1].key
            if len({known.key for known in family if known.reads_texts}) == WARNED - 1:
                logger.warning("%s: %s This is program %d, and each takes time to compile.", self._who, _TEXTS, WARNED)
        if why := why or (key.difference(last) if last not in (key, bare) else None):
            logger.info("%s compiles again: %s", self._who, why)
        self._families.keep(bare, [*family[1 - KEPT :], program])
        same = {known for known in self._families if known.apart_from_plain() == bare.apart_from_plain()}
        if len(same) == WARNED and not family:
            logger.warning(
                "%s: %s. This is program %d, and each takes time to compile. %s", self._who, why, WARNED, _PLAIN
            )
        if self._has_warned or not (found := key.varying(self._families)):
            return program
        self._has_warned = True
        logger.warning(
            "%s: each new shape of a batch is compiled, which takes time, and kept, which takes memory (the last %d "
            "programs): %s. Pad to one size, or to a few; leave a short last batch out (drop_last=True).",
            self._who,
            KEPT,
            "; ".join(f"{path} has come as {', '.join(map(str, shapes))}" for path, shapes in found.items()),
        )
        return program


def _reads(program: StepProgram, reads_texts: Callable[[LossProgram], bool]) -> bool:
    """Tell whether a program is for the texts of its own batch alone, which is found out once, for one answer."""
    if program.loss.answers.num > 1:  # with another one than that of the values here, texts may be read
        return True
    if program.reads_texts is None:
        program.reads_texts = reads_texts(program.loss)
    return program.reads_texts


def _used(family: list[StepProgram], program: StepProgram) -> StepProgram:
    """Let it be the one that was used last."""
    if program is not family[-1]:
        family.append(family.pop(family.index(program)))
    return program
