"""Checkpoints: the whole state of a run on disk, whole or not at all, and back onto any mesh."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from os import rename
from pathlib import Path
from shutil import rmtree as remove_tree
from typing import Any, cast

import filelock
import jax

from torch_shard._common.caller import caller, near_misses, public
from torch_shard._common.validate import check_count, check_directory, check_kind, check_seed, is_integer
from torch_shard._hosts import PeerError, agree, check_peers, compare, exchange
from torch_shard._io.integrity import Unreadable, find_damage, finish_at_exit, seal, sync_directory, uninterrupted
from torch_shard._io.manifest import (
    HEAD,
    TENSORS,
    Entries,
    Head,
    SavedArray,
    check_alike,
    check_random,
    fill,
    find_steps,
    flatten,
    head_of,
    make_orbax,
    parts_of,
    read_arrays,
    read_head,
    step_path,
    targets,
    to_save,
    write_head,
)
from torch_shard._sharding import Stacks
from torch_shard._state import TrainState, as_arrays, present_state
from torch_shard._train import TrainStep

logger = logging.getLogger(__name__)

_UNFINISHED = ".unfinished"


class Checkpointer:
    """Saves states to a directory and restores them; only one process or job may save to it at a time.

    A checkpoint holds everything that a `TrainState` does, under the names of the model, however its layers are
    stored. It is written by orbax under another name, gets a checksum for each of its files, and only then its own
    name, so that a directory `step_00000040` is a whole checkpoint of step 40; older ones are removed after that.

    Args:
        directory: Made when the first checkpoint is saved. Several processes of one job share it.
        keep: How many checkpoints to keep, the newest; None for all.
        every: Steps from one checkpoint to the next, where `fit` saves.
        asynchronous: Let `save` return when the state has been copied to the host, and write in the background. What
            goes wrong there is raised by the next `save`, `wait` or `close`.

    Raises:
        TypeError: `directory` is not a path.
        NotADirectoryError: It is a file.
        ValueError: `keep` or `every` is not a positive number, or `directory` is empty or a checkpoint itself.

    Example:
        >>> import tempfile, optax, torch, torch_shard as ts
        >>> from jax.sharding import PartitionSpec as P
        >>> step = ts.make_train_step(
        ...     torch.nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), optax.sgd(0.1),
        ...     mesh=ts.make_mesh(batch=1), plan=ts.ShardingPlan({}, default=P()),
        ... )
        >>> with tempfile.TemporaryDirectory() as directory, ts.Checkpointer(directory) as checkpointer:
        ...     checkpointer.save(step.init(seed=0))
        ...     state = checkpointer.restore(step)
        True
    """

    @near_misses
    @public
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int = 1000,
        asynchronous: bool = True,
    ) -> None:
        path = check_directory("directory", directory)
        if keep is not None:
            check_count("keep", keep)
        check_count("every", every)
        check_kind("asynchronous", asynchronous, bool)
        self.directory = path.absolute()
        if (self.directory / HEAD).exists():
            raise ValueError(
                f"Checkpointer: {path} is a checkpoint; it takes the directory of checkpoints, {path.parent}, and "
                f"`restore(..., step=)` says which one."
            )
        self.keep, self.every, self.asynchronous = keep, every, asynchronous
        self._orbax = make_orbax()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._claimed = False
        self._damaged: set[int] = set()
        self._known: set[int] = set()
        self._lock = filelock.FileLock(self.directory / ".lock", timeout=0, thread_local=False)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        return find_steps(self.directory)

    @public
    def metrics(self, step: int) -> dict[str, float]:
        """Numbers that were saved with a step.

        Args:
            step: One of `steps()`.

        Raises:
            ValueError: It has no checkpoint that can be read.
        """
        return self._head(step).metrics

    @public
    def notes(self, step: int) -> dict[str, Any]:
        """Notes that were saved with a step.

        Args:
            step: One of `steps()`.

        Raises:
            ValueError: It has no checkpoint that can be read.
        """
        return self._head(step).notes

    def _head(self, step: int) -> Head:
        try:
            return read_head(self.path(step))
        except Unreadable as error:
            raise ValueError(f"{caller()}: {error} There are those of steps {self.steps()}.") from error

    @public
    def path(self, step: int) -> Path:
        """Directory of the checkpoint of a step.

        Args:
            step: A number of steps; it need not have a checkpoint.

        Raises:
            ValueError: It is not a number of steps.
        """
        _check_step(step)
        return step_path(self.directory, step)

    def claim(self) -> None:
        """Make the directory and be the one that saves to it, until `close` or the end of the process.

        Raises:
            BlockingIOError: Another process saves to it.
        """
        if self._claimed:
            return
        self._claimed = True
        if jax.process_index() == 0:  # for all processes of the job
            self.directory.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(filelock.Timeout):
                self._lock.acquire()
                remove_tree(self.directory / _UNFINISHED, ignore_errors=True)  # of a process that was killed
        if agree(jax.process_index() == 0 and not self._lock.is_locked):
            self._claimed = False
            raise BlockingIOError(
                f"Checkpointer: another process or Checkpointer is saving to {self.directory}. Give each run a "
                "directory of its own, or end the other one."
            )

    @public
    def save(
        self,
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save a state.

        Args:
            state: It may be donated to the next step as soon as this returns.
            metrics: Numbers to keep with it.
            notes: More to keep with it: numbers, texts, lists and dicts of them.

        Returns:
            True if it was saved; a step that has a checkpoint is not saved again.

        Raises:
            BlockingIOError: Another process saves to this directory.
            ValueError: The state was donated, or the directory has later steps that this has not saved, of which the
                newest would be restored in place of this one.
            RuntimeError: This or an earlier checkpoint could not be written; those that are there are as they were.
        """
        check_kind("state", state, TrainState, hint="A step returns one.")
        self.wait()
        state = as_arrays(present_state(state))
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            raise ValueError(
                "Checkpointer: this state was donated to a step. Save it before, or save what the step returned."
            )
        step = int(state.step)
        facts = {
            "directory": self.directory,
            "step of the state": step,
            "num_batches of the state": int(state.num_batches),
        }
        compare("a checkpoint", facts, advice=lambda name: "Processes save one state together, into one directory.")
        is_there, later = exchange(lambda: self._others_than(step))[0]
        if is_there:
            return False
        if later:
            raise ValueError(
                f"{caller()}: {self.directory} has checkpoints of later steps than {step}, {later}, which were there "
                "before: of another run, or of one that you have gone back in. `restore` takes the newest, which would "
                "be theirs. Give this run a directory of its own, or remove those."
            )
        self._known.add(step)
        head = head_of(state, _as_numbers({} if metrics is None else metrics), _as_json({} if notes is None else notes))
        self.claim()
        partial = self.directory / _UNFINISHED / self.path(step).name
        with uninterrupted():
            self._orbax.save(partial, args=to_save(flatten(parts_of(state))), force=True)
            self._pending = self._worker.submit(self._finish, step, partial, head)
            finish_at_exit(self._pending)
        if not self.asynchronous:
            self.wait()
        return True

    def _others_than(self, step: int) -> tuple[bool, list[int]]:
        """Whether a step has a checkpoint, and the later ones that others have saved."""
        steps = [found for found in self.steps() if found not in self._damaged]
        return step in steps, [found for found in steps if found > step and found not in self._known]

    def take_over(self) -> None:
        """Count the checkpoints that are there as those of this run."""
        self._known.update(self.steps())

    def _finish(self, step: int, partial: Path, head: Head) -> None:
        """In the background: wait for orbax, seal what it wrote, give it its name, remove what is too old."""
        self._orbax.wait_until_finished()
        if jax.process_index() > 0:
            return
        write_head(partial, head)
        seal(partial)
        self._remove(step)
        rename(partial, self.path(step))
        sync_directory(self.directory)
        self._damaged.discard(step)
        if self.keep is not None:
            whole = [s for s in self.steps() if s <= step and s not in self._damaged]
            for old in (s for s in self.steps() if s < whole[-self.keep :][0]):
                self._remove(old)

    def _remove(self, step: int) -> None:
        """Take a checkpoint's name away first, so that none is ever seen in part."""
        if self.path(step).exists():
            doomed = self.directory / _UNFINISHED / f"{self.path(step).name}.old"
            rename(self.path(step), doomed)
            remove_tree(doomed)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            RuntimeError: It could not be written.
        """
        if self._pending is None:
            return
        error = self._outcome(self._pending)  # an interrupt leaves it pending
        self._pending = None
        if agree(error is not None):
            self._orbax = make_orbax()
            steps = self.steps()
            raise RuntimeError(
                f"Checkpointer: a checkpoint could not be written to {self.directory}: "
                f"{error or 'another process failed'}. "
                + (f"The newest whole one is that of step {steps[-1]}." if steps else "There is none yet.")
            ) from error

    def _outcome(self, writing: concurrent.futures.Future[None]) -> BaseException | None:
        """Wait for what is written; each process writes a part, so not for one that has failed."""
        while True:
            try:
                return writing.exception(0.5)
            except concurrent.futures.TimeoutError:
                check_peers()

    def close(self) -> None:
        """Wait for the last checkpoint, and let others save to the directory."""
        try:
            self.wait()
        finally:
            if self._pending is None:  # else an interrupt came, and the directory is still written to
                self._claimed = False
                self._lock.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        try:
            self.close()
        except PeerError as second:  # who has failed is told already, by the error that is under way
            if error is None:
                raise
            error.add_note(str(second))

    # ---- restoring ----

    @public
    def restore(
        self,
        train_step: TrainStep | Sequence[TrainStep],
        *,
        step: int | None = None,
        params_only: bool = False,
        seed: int = 0,
    ) -> TrainState:
        """Read a checkpoint, each array straight onto its shards.

        Mesh, plan and storage of layers are those of `train_step`, whatever the checkpoint was written from. The
        learning rates of an optimizer of torch are those that it has now: `fit` gives it those of the checkpoint.

        Args:
            train_step: Says what the state must hold, and where it is to lie. Its model, which may be on the meta
                device, has the values of the state from then on. Of
                several that train parts of one model (`trainable=`), all that have taken the state.
            step: Which one; by default the newest. One that is damaged is then passed over, with a warning.
            params_only: Take parameters and buffers alone, and start anew at step 0, with the optimiser of
                `train_step`, whichever the checkpoint was written with. Buffers that are in no `state_dict` are the
                model's, if the checkpoint lacks them.
            seed: Of the new start, as for `train_step.init`.

        Raises:
            FileNotFoundError: There is no checkpoint, or none that is whole.
            ValueError: It does not fit the model or the optimiser, or was written under settings of JAX that draw other
                random numbers; all differences are listed by name. Or the one that was asked for is damaged.
        """
        several = isinstance(train_step, list | tuple) and bool(train_step)
        steps = cast(list[TrainStep], list(cast(Any, train_step)) if several else [train_step])
        for each in steps:
            check_kind("train_step", each, TrainStep, hint="make_train_step gives one.")
        check_kind("params_only", params_only, bool)
        seed = check_seed(seed)
        if step is not None:
            _check_step(step)
        self.wait()
        for each in steps:
            each.look_at_model()
        while True:
            path = self._choose(step)
            try:
                state = self._load(path, steps, params_only, seed)
                for each in steps:
                    each.follow(state)
                return state
            except Exception as error:
                if step is not None or path.exists() or jax.process_count() > 1:
                    if isinstance(error, Unreadable | FileNotFoundError):
                        raise ValueError(f"Checkpointer: {error} {self._others(path)}") from error
                    raise
                logger.info("Checkpointer: %s was removed while it was read; the newest is read instead.", path)

    def _load(self, path: Path, steps: Sequence[TrainStep], params_only: bool, seed: int) -> TrainState:
        train_step, wanted_state = steps[0], steps[0].structs
        if len(steps) > 1:
            by_label = {label: own for step in steps for label, own in step.structs.opt_state.items()}
            wanted_state = dataclasses.replace(wanted_state, opt_state=by_label)
        head = read_head(path)
        found = head.stored
        if not params_only:
            check_random(path, head.random)
        else:
            found = [stored for stored in found if stored.where == TENSORS]
        structs = parts_of(wanted_state, all_of_it=not params_only)
        wanted = Entries(flatten(structs))
        own = self._own(train_step, Entries(dict.fromkeys(found))) if params_only else {}
        check_alike(path, Entries(dict.fromkeys([*found, *own])), wanted, params_only=params_only)
        filled = fill(structs, Entries(read_arrays(self._orbax, path, targets(found, wanted)) | own))
        if params_only:
            return train_step.start(filled, seed=seed)
        state = dataclasses.replace(wanted_state, **filled)
        return dataclasses.replace(state, key=jax.random.wrap_key_data(state.key))

    def _own(self, train_step: TrainStep, found: Entries) -> dict[SavedArray, jax.Array]:
        """Buffers of the model that no `state_dict` has, so that weights from elsewhere come without them."""
        missing = [name for name in train_step.structs.unsaved if (TENSORS, name) not in set(found)]
        return flatten(collections.OrderedDict(buffers=Stacks.merged(train_step.values_on_mesh(missing))))

    def _choose(self, step: int | None) -> Path:
        """The checkpoint to read: whole."""
        passed: set[int] = set()
        # listed anew each time: another process may write newer ones and remove older ones
        while candidates := [s for s in (exchange(self.steps)[0] if step is None else [step]) if s not in passed]:
            path = self.path(candidates[-1])
            if step is not None and not os.path.lexists(path):
                break
            damage = find_damage(path, part=(jax.process_index(), jax.process_count()))
            if not agree(bool(damage)):
                return path
            passed.add(candidates[-1])
            if not os.path.lexists(path):
                continue
            self._damaged.add(candidates[-1])
            message = f"Checkpointer: {path} is damaged: " + "; ".join(damage or ["another process found it so"])
            if step is not None:
                raise ValueError(f"{message}. {self._others(path)}")
            logger.warning("%s. It is passed over for an older one.", message)
        damaged = f" Damaged are those of steps {sorted(passed)}; the warnings say how." if passed else ""
        there = f"those of steps {self.steps()}" if self.steps() else "none"
        wanted = "no whole checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"Checkpointer: {wanted} in {self.directory}: there are {there}.{damaged}")

    def _others(self, path: Path) -> str:
        """Say which step to restore instead of one that cannot be read."""
        others = [step for step in reversed(self.steps()) if self.path(step) != path]
        whole = next((step for step in others if not find_damage(self.path(step))), None)
        return "No other step is whole." if whole is None else f"Step {whole} is whole: restore(..., step={whole})."


def _check_step(step: object) -> None:
    if not is_integer(step) or cast(int, step) < 0:
        raise ValueError(f"{caller()}: step must be a number of steps, 0 or more, got {step!r}.")


def _as_numbers(metrics: object) -> dict[str, float]:
    """The metrics of a save, as they are written."""
    check_kind("metrics", metrics, Mapping, hint="Give numbers by name.")
    found: dict[str, float] = {}
    for name, value in cast(Mapping[object, Any], metrics).items():
        try:
            if not isinstance(name, str) or isinstance(value, str):
                raise TypeError
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{caller()}: metrics must be numbers by name, got {name!r}: {value!r:.99}.") from error
    return found


def _as_json(notes: object) -> dict[str, Any]:
    """The notes of a save, as they are written."""
    check_kind("notes", notes, Mapping, hint="Give numbers, texts, lists and dicts by name.")
    try:
        return cast(dict[str, Any], json.loads(json.dumps(notes)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{caller()}: notes must be what JSON can hold: {error}.") from error
