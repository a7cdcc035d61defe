"""Recipes: plans by what the layers of a model are, and by shape where nothing else is known."""

# PyTorch annotates some of its functions in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import math
from typing import Literal, cast

import torch
from jax.sharding import Mesh, PartitionSpec

from torch_shard._common.caller import caller, error_prefix, near_misses
from torch_shard._common.validate import check_kind, check_module
from torch_shard._plans.decisions import (
    Axes,
    Decision,
    along,
    check_axes,
    completed,
    find_uneven,
    names_of,
    plan_of,
    size_of,
    warn,
    with_sizes,
)
from torch_shard._plans.roles import Role, experts_of, roles_of, tables_of
from torch_shard._plans.sequence import sequence_constraints
from torch_shard._sharding import (
    Context,
    ContextMode,
    Padded,
    Pieces,
    Pipeline,
    Schedule,
    ShardingPlan,
    check_mesh,
    check_plan,
)

PadVocab = bool | Literal["auto"]
"""Whether a vocabulary that does not divide is padded."""


@error_prefix("plans.replicated")
def replicated(model: torch.nn.Module | None = None, mesh: Mesh | None = None) -> ShardingPlan:
    """A plan that keeps every entry whole on each device: data parallelism.

    Args:
        model: Taken so that all recipes may be called alike; it may be left out.
        mesh: Where the model will lie; it may be left out too.

    Example:
        >>> import torch_shard as ts
        >>> ts.plans.replicated()
        ShardingPlan({'**': P()})
    """
    return ShardingPlan({"**": PartitionSpec()}, reasons={"**": "data parallel: whole on each device"})


@near_misses
@error_prefix("plans.fsdp")
def fsdp(model: torch.nn.Module, mesh: Mesh, *, fsdp: Axes = "batch", strict: bool = False) -> ShardingPlan:
    """Split every matrix over the axis of the batch: ZeRO-3, fully sharded data parallelism.

    Each is gathered where a layer needs it, and its gradient scattered (Rajbhandari et al., 2020). Buffers and small
    vectors stay whole.

    Args:
        model: Any module, on the meta device too: names and shapes alone are read.
        mesh: Where it will lie.
        fsdp: The axis, or several that split as one.
        strict: Whether an entry that no dim of which divides is an error. Else it stays whole, and is listed with its
            bytes: in the plan, and as a warning of the logger.

    Raises:
        ValueError: The mesh lacks the axis; or, with `strict`, entries do not divide.

    Example:
        >>> import torch, torch_shard as ts
        >>> ts.plans.fsdp(torch.nn.Linear(4, 8), ts.make_mesh(batch=4))
        ShardingPlan({'weight': P('batch', None), 'bias': P()})
    """
    model = _check(model, mesh, strict, fsdp=fsdp)
    return plan_of(model, _decide(model, mesh, fsdp=fsdp), strict=strict)


@near_misses
@error_prefix("plans.hsdp")
def hsdp(
    model: torch.nn.Module, mesh: Mesh, *, replicate: Axes = "replica", fsdp: Axes = "batch", strict: bool = False
) -> ShardingPlan:
    """Split every matrix within groups of devices, each group holding a whole model: hybrid sharding.

    Gathers stay within a group, whose devices are near; between groups only gradients are summed. Rows of a batch
    are split over both axes, if the step has no other `batch_spec`. With
    `optimizer_plan=ts.plans.fsdp(model, mesh, fsdp=("batch", "replica"))` the groups share the update too.

    Args:
        model: As `fsdp` takes it.
        mesh: Where it will lie.
        replicate: The axis between the groups.
        fsdp: The axis within one.
        strict: As `fsdp` takes it.

    Raises:
        ValueError: The mesh lacks an axis; or, with `strict`, entries do not divide.

    Example:
        >>> import torch, torch_shard as ts
        >>> ts.plans.hsdp(torch.nn.Linear(4, 8), ts.make_mesh(replica=2, batch=4))
        ShardingPlan({'weight': P('batch', None), 'bias': P()}, rows=('replica', 'batch'))
    """
    model = _check(model, mesh, strict, replicate=replicate, fsdp=fsdp)
    plan = plan_of(model, _decide(model, mesh, fsdp=fsdp), strict=strict)
    return dataclasses.replace(plan, rows=(*names_of(replicate), *names_of(fsdp)))


@near_misses
@error_prefix("plans.tp")
def tp(
    model: torch.nn.Module, mesh: Mesh, *, tp: Axes = "model", pad_vocab: PadVocab = "auto", strict: bool = False
) -> ShardingPlan:
    """Split layers by their features, in pairs: tensor parallelism as Megatron has it.

    A layer that widens (q, k, v, gate, up) is split by its output, one that narrows (o, down) by its input, embeddings
    by the vocabulary, convolutions by channels, LoRA's factors as their base layer. What a layer is, its class, its
    name and its shape say. Another choice would give the same numbers with other traffic.

    Args:
        model: As `fsdp` takes it.
        mesh: Where it will lie.
        tp: The axis.
        pad_vocab: Whether a vocabulary that does not divide is stored with rows of zeros behind it, `ts.Padded`; else
            it stays whole. By default it is where each device is spared more rows, of the table and of logits, than are
            added. What a model sees, and what is written to files, has torch's shape.
        strict: As `fsdp` takes it; it is also a fault if heads would be cut, which keeps a layer whole.

    Raises:
        ValueError: The mesh lacks the axis; or, with `strict`, entries do not divide.

    Example:
        >>> import torch, torch_shard as ts
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> ts.plans.tp(mlp, ts.make_mesh(batch=4, model=2))
        ShardingPlan({'0.weight': P('model', None), '0.bias': P('model'), '2.weight': P(None, 'model'), '2.bias': P()})
    """
    model = _check(model, mesh, strict, pad_vocab, tp=tp)
    return plan_of(model, _decide(model, mesh, tp=tp, pad_vocab=pad_vocab), strict=strict)


@near_misses
@error_prefix("plans.fsdp_tp")
def fsdp_tp(
    model: torch.nn.Module,
    mesh: Mesh,
    *,
    fsdp: Axes | None = "batch",
    tp: Axes | None = "model",
    context: str | None = None,
    context_mode: ContextMode = "gather",
    sequence: bool = False,
    pad_vocab: PadVocab = "auto",
    strict: bool = False,
) -> ShardingPlan:
    """Split layers by their features over one axis, and what each device then has over that of the batch.

    Args:
        model: As `fsdp` takes it.
        mesh: Where it will lie.
        fsdp: The axis of the batch; None for a mesh without one.
        tp: The axis of features; None for none.
        context: An axis over which the sequence of the batch is split, and what `fsdp` splits too: each device has a
            part of each row. A step splits batches so; `context_mode` says how attention finds all keys.
        context_mode: `"gather"`, `"heads"` or `"ring"`, as `ts.Context` has them.
        sequence: Whether the residual stream, (batch, sequence, features), is split along its sequence over `tp`
            (Korthikanti et al., 2022): each device normalises its part, and the two all-reduces of a layer become
            reduce-scatters and all-gathers.
        pad_vocab: As `tp` takes it.
        strict: As `tp` takes it.

    Raises:
        ValueError: The mesh lacks an axis, or one is given twice; `sequence`, and no layers of a transformer are found;
            `context_mode="heads"`, and heads do not divide; or, with `strict`, entries do not divide.

    Example:
        >>> import jax, torch, torch_shard as ts
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))
        >>> plan = ts.plans.fsdp_tp(mlp, ts.make_mesh(batch=4, model=2))
        >>> plan | {"0.bias": jax.sharding.PartitionSpec()}
        ShardingPlan({'0.weight': P('model', 'batch'), '0.bias': P(), '2.weight': P('batch', 'model')})
    """
    model = _check(model, mesh, strict, pad_vocab)
    check_axes(mesh, fsdp=fsdp, tp=tp, context=context)
    check_kind("context", context, str | None)
    _check_sequence(sequence, tp)
    if tp is None and fsdp is None and context is None:
        raise TypeError(f"{caller()}: {_NO_TP}: no other axis is given.")
    rows = names_of(fsdp)
    over = None if context is None else Context(context, context_mode, rows)
    _tell_of_experts(model)
    data = rows if over is None else (*rows, over.axis)
    decisions = _decide(model, mesh, fsdp=data or None, tp=tp, pad_vocab=pad_vocab)
    if over is not None and rows and any(made.fault for made in decisions.values()):  # some divide over the rows alone
        less = _decide(model, mesh, fsdp=rows, tp=tp, pad_vocab=pad_vocab)
        decisions = {n: less[n] if made.fault and not less[n].fault else made for n, made in decisions.items()}
    activations = sequence_constraints(model, decisions, batch=rows or None, tp=tp) if sequence and tp else {}
    if over is not None:
        _check_heads(model, mesh, over, tp)
    return plan_of(model, decisions, strict=strict, activations=activations, context=over)


def _check_heads(model: torch.nn.Module, mesh: Mesh, context: Context, tp: Axes | None) -> None:
    """Refuse heads that do not divide over the axis of the context, if they are to be exchanged for the sequence."""
    if context.mode != "heads":
        return
    axes = (*names_of(tp), context.axis)
    for name, role in roles_of(model).items():
        if role.side == "column" and role.heads % size_of(axes, mesh):
            raise ValueError(
                f'{caller()}: context_mode="heads" gives each device whole heads, and {role.heads} heads of {name} are '
                f'not a multiple of {with_sizes(axes, mesh)}. Use a smaller axis, or context_mode="gather".'
            )


def _tell_of_experts(model: torch.nn.Module) -> None:
    """Say that there is a better recipe for experts than splitting the features of each."""
    found = [path for path, layer in model.named_modules() if experts_of(layer)]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warn(
            f"plans.fsdp_tp: {found[0]}{more} hold experts, whose features are split. "
            "plans.expert(model, mesh, tp=...) gives each device whole experts of its own instead, and less goes over "
            "the wire."
        )


@near_misses
@error_prefix("plans.expert")
def expert(
    model: torch.nn.Module,
    mesh: Mesh,
    *,
    ep: Axes = "model",
    fsdp: Axes | None = "batch",
    tp: Axes | None = None,
    sequence: bool = False,
    pad_vocab: PadVocab = "auto",
    strict: bool = False,
) -> ShardingPlan:
    """Give each device its own experts, and split all else as `fsdp`, `tp` or both do.

    Args:
        model: As `fsdp` takes it, with experts in one tensor, (experts, features, features), as transformers has them.
        mesh: Where it will lie.
        ep: The axis of experts, or several. Over an axis of the batch, tokens are sent to their experts and back, or
            the experts are gathered, whichever is less; `step.report()` says which.
        fsdp: The axis of the batch; None leaves what it would split whole. Experts are split over it only if it is none
            of theirs.
        tp: The axis of features of the other layers, which may be that of the experts; None for none.
        sequence: As `fsdp_tp` takes it; a layer of experts, too, is given the whole sequence.
        pad_vocab: As `tp` takes it.
        strict: As `tp` takes it.

    Raises:
        TypeError: `sequence` without `tp`.
        ValueError: The mesh lacks an axis; no entry holds several experts; `sequence`, and no layers of a transformer
            are found; or, with `strict`, entries do not divide.

    Example:
        >>> import torch, torch_shard as ts
        >>> class Experts(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = torch.nn.Parameter(torch.zeros(4, 8, 2))
        >>> ts.plans.expert(Experts(), ts.make_mesh(batch=2, model=4))
        ShardingPlan({'up': P('model', 'batch', None)})
    """
    model = _check(model, mesh, strict, pad_vocab, ep=ep)
    check_axes(mesh, fsdp=fsdp, tp=tp)
    _check_sequence(sequence, tp)
    if not any(map(experts_of, model.modules())):
        raise ValueError(
            f"{caller()}: no entry of {type(model).__name__} holds several experts along its first dim, as the 3-D "
            "parameters of transformers' MoE layers do. Experts that are modules of their own are split by plans.tp."
        )
    decisions = _decide(model, mesh, fsdp=fsdp, tp=tp, ep=ep, pad_vocab=pad_vocab)
    activations = sequence_constraints(model, decisions, batch=fsdp, tp=tp) if sequence and tp else {}
    return plan_of(model, decisions, strict=strict, activations=activations)


@error_prefix("plans.pipeline")
def pipeline(
    plan: ShardingPlan, *, stage: str = "stage", repeats: int = 1, schedule: Schedule | None = None
) -> ShardingPlan:
    """A plan whose repeated layers are the stages of a pipeline; the model is not rewritten.

    Each stage has the parameters of its own layers, split further as the plan says. Microbatches, of which
    `make_train_step(accumulate_steps=)` says the number, go from stage to stage within one compiled program; twice as
    many as stages, or more, keep the stages busy: of `M` over `P` stages, `(P - 1) / (repeats * M + P - 1)` of the time
    is idle. Numbers are those of the same step without stages. Embeddings, head and loss are computed by all stages,
    each for a part of the rows.

    Args:
        plan: For the other axes of the mesh; its rules do not split layers over `stage`.
        stage: The axis of the mesh that has the stages. The layers are a multiple of its size times `repeats`.
        repeats: How often a microbatch goes round, through other layers each time.
        schedule: `"1f1b"` or `"gpipe"`; see `Pipeline`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: There is no such schedule. Making the step says what does not fit the model.

    Example:
        >>> import torch_shard as ts
        >>> plan = ts.plans.pipeline(ts.plans.replicated(), stage="stage")
        >>> plan.pipeline.axis, plan.pipeline.schedule
        ('stage', '1f1b')
    """
    check_plan(plan)
    return dataclasses.replace(plan, pipeline=Pipeline(stage, repeats, schedule))


def _check(
    model: torch.nn.Module, mesh: Mesh, strict: bool, pad_vocab: object = "auto", **axes: Axes
) -> torch.nn.Module:
    """The module to be read; refuse what a recipe cannot read."""
    model = check_module("model", model)
    check_kind("strict", strict, bool)
    if not isinstance(pad_vocab, bool) and pad_vocab != "auto":
        raise ValueError(f'{caller()}: pad_vocab must be True, False or "auto", got {pad_vocab!r}.')
    for argument, given in axes.items():
        if cast(object, given) is None:
            raise TypeError(f"{caller()}: {argument} must be the name of an axis, or a tuple of some, got None.")
    check_axes(check_mesh(mesh), **axes)
    return model


_NO_TP = "tp must be the name of an axis, or a tuple of some, got None"


def _check_sequence(sequence: bool, tp: Axes | None) -> None:
    check_kind("sequence", sequence, bool)
    if sequence and tp is None:
        raise TypeError(f"{caller()}: {_NO_TP}: sequence=True splits the residual stream over it.")


def _decide(
    model: torch.nn.Module,
    mesh: Mesh,
    *,
    fsdp: Axes | None = None,
    tp: Axes | None = None,
    ep: Axes | None = None,
    pad_vocab: PadVocab = False,
) -> dict[str, Decision]:
    """What these axes do with each entry."""
    roles = {} if tp is None else roles_of(model)
    experts = {id(p) for layer in model.modules() for p in experts_of(layer).values()} if ep else set[int]()
    tables, split = tables_of(model), dict[str, Decision]()
    for name, entry in model.named_parameters(remove_duplicate=False):
        if ep and id(entry) in experts:
            split[name] = _by_experts(entry, ep, mesh)
        elif tp is None:
            split[name] = Decision(PartitionSpec(), "")
        elif name in roles:  # all but those of adapters
            made = _by_features(entry, roles[name], tp, mesh)
            if made.fault and roles[name].is_vocabulary:
                made = _padded(made, entry, roles[name], tp=tp, mesh=mesh, asked=pad_vocab)
            if made.fault and roles[name].side == "column":
                tables |= {id(entry)}  # by its features too: if it is fused, its parts are rows
            split[name] = made
    return completed(model, split, mesh, fsdp=fsdp, tables=tables)


def _by_experts(entry: torch.Tensor, ep: Axes, mesh: Mesh) -> Decision:
    why, num = "experts, each on one device", entry.shape[0]
    if num % size_of(ep, mesh):
        return Decision(PartitionSpec(), why, f"{num} are not a multiple of {with_sizes(ep, mesh)}")
    return Decision(PartitionSpec(ep), why)


def _by_features(entry: torch.Tensor, role: Role, tp: Axes, mesh: Mesh) -> Decision:
    if role.dim is None:
        return Decision(PartitionSpec(), role.reason)
    if fault := find_uneven(entry, role.dim, tp, mesh, pieces=role.pieces, heads=role.heads):
        return Decision(PartitionSpec(), role.reason, fault)
    form = Pieces(role.pieces, dim=role.dim) if role.pieces > 1 else None
    return Decision(along(role.dim, entry.ndim, tp), role.reason, form=form)


def _padded(whole: Decision, entry: torch.Tensor, role: Role, *, tp: Axes, mesh: Mesh, asked: PadVocab) -> Decision:
    """Split with as many rows of zeros behind as it takes, if that is asked for, or worth it."""
    dim, shards = role.dim or 0, size_of(tp, mesh)
    num_words = entry.shape[dim]
    share = math.ceil(num_words / shards)
    form = Padded(share * shards, dim=dim)
    spared, added = num_words - share, form.size - num_words
    if asked is False or (asked == "auto" and spared <= added):
        return whole
    return Decision(along(dim, entry.ndim, tp), f"{role.reason}, padded to {form.size}", form=form)
