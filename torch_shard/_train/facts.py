"""What all processes of a job must have alike before a step is made, and before it is compiled: facts by name."""

# JAX annotates its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import concurrent.futures
import dataclasses
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh

from torch_shard._common.caller import caller
from torch_shard._common.convert import host_array
from torch_shard._common.specs import describe_mesh, describe_spec
from torch_shard._common.types import PyTree
from torch_shard._device import JaxTensor
from torch_shard._entries import Holdings
from torch_shard._hosts import ProcessMismatchError, compare, digest, exchange, is_shared
from torch_shard._sharding import ResolvedPlan
from torch_shard._state import TrainState
from torch_shard._train.options import StepOptions
from torch_shard._train.program_cache import ProgramKey

SMALL = 1 << 20
"""Bytes up to which an array that each device has whole is compared at a compilation."""


_UNNAMED = {"mesh", "plan", "optimizer_plan", "remat", "look_again", "compile_cache", "compiled"}
"""Options that other facts or the program itself have, or that are no part of it."""

_OF_NO_PROGRAM = ("--xla_dump", "--xla_force_host")


def agree_on_values(held: Holdings, plan: ResolvedPlan, *, seed: int, opt_state: PyTree) -> None:
    """Compare what a run begins with: initial values, plan, mesh, optimiser, versions."""
    if not is_shared(plan.mesh):
        return
    moments = str(jax.tree.map(lambda struct: (struct.shape, str(struct.dtype)), opt_state))
    facts = {"seed": seed, "the optimiser's state": digest(moments.encode())}
    facts = {**_setting(plan), **_shapes(held.all), **facts, **_values(held.all)}
    compare(
        "init", facts, advice=lambda name: _ADVICE.get(name, _OF_VALUES if name.partition("[")[0] in held.all else "")
    )


def agree_on_numbers(numbers: Mapping[str, float], mesh: Mesh) -> None:
    """Compare the numbers of an optimizer's parameter groups."""
    if numbers and is_shared(mesh):
        compare("the numbers of the optimizer", numbers, advice=lambda name: _OF_NUMBERS)


_OF_NUMBERS = (
    "Give the optimizer, its schedule and what steps it (ReduceLROnPlateau: the metric) the same numbers in all "
    "processes."
)
_OF_VALUES = (
    "Was the model seeded alike? Call torch.manual_seed(0) before it is made, or ts.broadcast(model) before the step."
)
_ADVICE = {
    "the plan": "Give all processes one plan.",
    "the mesh": "Make the mesh alike in all processes.",
    "the optimiser's state": "Make the optimiser alike in all processes.",
}


def facts_of_step(made_by: str, options: StepOptions, plan: ResolvedPlan, held: Holdings) -> dict[str, object]:
    """What a step is made of, of what decides what is compiled."""
    devices = options.mesh.devices.flat
    flags = (flag for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") for flag in os.environ.get(name, "").split())
    named = (field.name for field in dataclasses.fields(options) if field.name not in _UNNAMED)
    return {
        "made by": made_by,
        **_setting(plan),
        "the devices": f"{len(devices)} of {devices[0].device_kind} ({devices[0].platform})",
        "the compiler of the devices": " ".join(devices[0].client.platform_version.split()),
        "XLA's flags": sorted(flag for flag in flags if not flag.startswith(_OF_NO_PROGRAM)),
        **{f"{name}=": getattr(options, name) for name in named},
        **_shapes(held.all),
        **_specs(plan),
    }


def _setting(plan: ResolvedPlan) -> dict[str, object]:
    mesh = plan.mesh
    devices = digest(repr([device.id for device in mesh.devices.flat]).encode())
    found: dict[str, object] = {"the version of python": platform.python_version().rpartition(".")[0]}
    found |= {f"the version of {name}": version(name) for name in ("torch", "jax", "jaxlib", "torch_shard", "optax")}
    return found | {
        "the mesh": describe_mesh(mesh),
        "the order of the mesh's devices": devices,
        "the plan's context": str(plan.context),
    }


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    names = digest(repr(list(tensors)).encode())
    found: dict[str, object] = {f"the shape of {n}": f"{tuple(t.shape)} {t.dtype}" for n, t in tensors.items()}
    return (
        found | {f"requires_grad of {n}": t.requires_grad for n, t in tensors.items()} | {"the order of entries": names}
    )


def _values(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """A digest of each entry; of one that lies on devices, of each part that this process has."""
    pieces: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, JaxTensor):
            pieces |= {f"{name}{_where(shard.index)}": shard.data for shard in tensor.jax().addressable_shards}
        else:
            pieces[name] = tensor
    with concurrent.futures.ThreadPoolExecutor() as pool:  # hashing large data lets other threads run
        return dict(zip(pieces, pool.map(digest_of, pieces.values()), strict=True))


def _specs(plan: ResolvedPlan) -> dict[str, object]:
    return {f"the spec of {name}": describe_spec(plan[name].spec) for name in plan.entries}


def _where(index: tuple[slice, ...]) -> str:
    whole = all(part == slice(None) for part in index)
    return "" if whole else "[" + ", ".join(f"{p.start or 0}:{'' if p.stop is None else p.stop}" for p in index) + "]"


def digest_of(value: Any) -> bytes:
    """Of a tensor or array of this process, its bytes and its kind."""
    array = np.ascontiguousarray(host_array(value.detach() if isinstance(value, torch.Tensor) else value, rounds=True))
    return digest(digest(array.reshape(-1).view(np.uint8).data) + f"{array.shape} {array.dtype}".encode())


def facts_of_call(key: ProgramKey) -> dict[str, object]:
    """What a program is for, of what is known before it is captured."""
    signature = key.signature
    shapes = zip(signature.paths, signature.specs, strict=True)
    return {
        "the structure of the batch": digest(repr((str(signature.tree), len(signature.leaves))).encode()),
        **{f"the shape of {path}": f"{s.shape} {str(s.dtype).removeprefix('torch.')}" for path, s in shapes},
        "skip_grad_norm": key.skip_grad_norm,
        "train() or eval() of the modules": digest(repr(key.flags).encode()),
    }


def agree_on_program(
    key: ProgramKey,
    plan: ResolvedPlan,
    content: Mapping[str, bytes],
    state: TrainState,
    *,
    closure: Sequence[torch.Tensor],
    lowered: jax.stages.Lowered,
) -> None:
    """Compare a program that is to be compiled, and what it is given first."""
    facts: dict[str, object] = {
        **facts_of_call(key),
        **_setting(plan),
        **_specs(plan),
        **content,
        **{f"tensor {n} that loss_fn closes over": digest_of(tensor) for n, tensor in enumerate(closure)},
        **_small_parts(state),
    }
    subject = f"the compilation of {caller()}"
    compare(subject, facts, advice=_advise_on_program)
    text = lowered.as_text().splitlines()
    try:
        compare(subject, {"the program": digest("\n".join(text).encode())})
    except ProcessMismatchError:
        raise ProcessMismatchError(_first_difference(text, lowered)) from None


def _advise_on_program(name: str) -> str:
    if name.startswith("the content of"):
        return (
            "Without local_batches, each process gives the same rows, those of the whole batch: leave out the "
            "DistributedSampler, and shuffle by one seed; or give rows of one's own, make_train_step(..., "
            "local_batches=True)."
        )
    if name.startswith("the shape of") or name.endswith("batch"):
        return (
            "Each process gives the same rows, those of the whole batch; or rows of its own, by count, index = "
            "ts.data_shard(mesh) and make_train_step(..., local_batches=True)."
        )
    return ""


def _small_parts(state: TrainState) -> dict[str, bytes]:
    """Digests of what each device has whole, where it is small: counts, keys, hyperparameters of an optimiser."""
    found: dict[str, bytes] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        if array.is_fully_replicated and array.nbytes <= SMALL:
            found[f"state{jax.tree_util.keystr(path)}"] = digest_of(np.asarray(array.addressable_data(0)))
    return found


# ---- texts of programs ----


def _first_difference(text: list[str], lowered: jax.stages.Lowered) -> str:
    """Say where programs differ that were found to differ."""
    sums = exchange(lambda: [digest(line.encode())[:6] for line in text], "the lines of the program")
    other = next(process for process, found in enumerate(sums) if found != sums[0])
    pairs = enumerate(zip(sums[0], sums[other], strict=False))
    number = next((n for n, (a, b) in pairs if a != b), min(len(sums[0]), len(sums[other])))
    shown = exchange(lambda: show_line(text, number, lowered), "the line that differs")
    lines = "\n".join(f"  process {process}: {shown[process]}" for process in (0, other))
    return (
        f"{caller()}: the program differs between process 0 and {other}, so they would train different models. The "
        f"first line that does:\n{lines}\nMake model, loss_fn, optimiser and options alike in all processes. If they "
        "are, start all with PYTHONHASHSEED=0: Python walks a set of strings, such as Gemma 3's kinds of layers, in an "
        "order that is random in each process."
    )


def show_line(text: list[str], number: int, lowered: jax.stages.Lowered) -> str:
    """A line, and from where in the model it comes; of a constant, from where it is used."""
    if number >= len(text):
        return "(the program has ended)"
    line, result = text[number].strip(), text[number].strip().partition(" = ")[0]
    whole = lowered.as_text(debug_info=True)
    users = [n for n in range(number, len(text)) if n == number or re.search(rf"{re.escape(result)}\b", text[n])]
    marked = [each for each in whole.splitlines() if not each.startswith("#loc")]
    scopes = [_scope(marked[n], whole) for n in users[: 2 if "constant" in line else 1]]
    shown = line if len(line) < 200 else f"{line[:197]}..."
    return f"{shown}  (in {max(scopes, key=len)})" if any(scopes) else shown


def _scope(line: str, text: str) -> str:
    """The names in which an operation was traced: modules, and parts of the step."""
    marks = re.findall(r"loc\((#loc\d*)\)", line)
    found = re.search(rf'^{re.escape(marks[-1])} = loc\("([^"]*)"', text, re.MULTILINE) if marks else None
    return found[1] if found else ""
