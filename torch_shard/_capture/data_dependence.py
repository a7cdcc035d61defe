"""Values that a captured callable asks of a tensor: known from the program alone, not needed, or refused."""

import contextlib
import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import Graph, Node
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from torch_shard._capture.checks import leads_only_to_raise
from torch_shard._capture.constants import Constants, in_eager_torch, literal_of
from torch_shard._capture.function_mode import current_mode
from torch_shard._capture.host_values import LARGEST, HostInputs, HostPart, Question, Source
from torch_shard._capture.masks import SELECTIONS, Masks, is_same
from torch_shard._capture.provenance import asking_frame, current_user_line
from torch_shard._capture.ragged import PLACE
from torch_shard._common.fx import args_of, tensors_in
from torch_shard._common.patching import having
from torch_shard._common.types import Operator, PyTree

aten = torch.ops.aten

DEVICE_OF = torch.ops.prim.device.default  # PyTorch asks fakes this all the time; the answer needs no other mode

_CHECK_ALL = torch._check_tensor_all_with.__code__  # it hands the value on to what raises

Traced = tuple[Node, Callable[[Node], torch.Tensor | None]]


class DataDependence(TorchDispatchMode):
    """Answers for tensors that have no value.

    A tensor made from Python numbers alone has one: it is computed. A check that would only raise an error passes:
    a compiled program cannot raise. What depends on the batch and on buffers alone is computed on the host, and the
    program is for that value. Anything else goes on to the tracer, which refuses it.

    Args:
        node_of: The node of a traced tensor.
        root: Gives the module that holds what the `get_attr` nodes of the trace name.
        graph: Gives the graph of the trace.
    """

    def __init__(
        self,
        node_of: Callable[[torch.Tensor], Node | None],
        root: Callable[[], torch.nn.Module | None],
        graph: Callable[[], Graph | None],
    ) -> None:
        super().__init__()
        self._node_of, self._root, self._graph = node_of, root, graph
        self._masks = Masks(node_of, lambda mask: self._sized(_nonzero, (mask,), {}))
        self._inputs: HostInputs | None = None
        self._sources: dict[Node, Source] = {}
        self._questions: list[Question] = []
        self._later: dict[str, torch.Tensor] = {}
        self._assumed: list[tuple[str, torch.Tensor]] = []
        self._constants: Constants | None = None
        self._mode = None
        self._around: DataDependence | None = None  # that of the capture around this one
        self.skipped: list[str] = []
        """Places of the checks that were passed."""
        self.asked: str | None = None
        """The line that first asked for what nobody knows, and may have caught the refusal."""
        self.refused: str | None = None
        """Why a value could not be given; the callable may have caught it."""
        self.axes: tuple[str, ...] = ()
        """Named axes along which random operators draw other numbers."""
        self.position = 0
        """Number of random operators that have run; a checkpoint sets it back to draw the same numbers again."""

    def __enter__(self) -> "DataDependence":
        self._around = _CURRENT.stack[-1] if _CURRENT.stack else None
        _CURRENT.stack.append(self)
        self._mode = current_mode()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _CURRENT.stack.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Operator, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if func is DEVICE_OF:
            return args[0].fake_device
        if func is aten._local_scalar_dense.default or func is aten.equal.default:
            answer = self._answer(func, args)
            if answer is not None:
                return answer
        func, args = self._masks.unify(func, args)
        if _has_unknown_size(func, kwargs):
            results = self._sized(func, args, kwargs or {})
            if results is not None:
                return results

        graph = self._graph()
        last = None if graph is None else graph._root.prev
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            self.asked = self.asked or current_user_line()
            raise
        except Exception:
            # The tracer writes an operator down before it runs. One that raises, and whose error the callable catches,
            # has not happened.
            while graph is not None and graph._root.prev is not last:
                graph.erase_node(graph._root.prev)
            raise
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note_draw(result)
        if func in SELECTIONS and isinstance(result, torch.Tensor):
            node = self._node_of(result)
            if node is not None:
                node.meta[PLACE] = current_user_line()
        return result

    def _note_draw(self, result: PyTree) -> None:
        first = torch_pytree.tree_leaves(result)[0]
        node = self._node_of(first) if isinstance(first, torch.Tensor) else None
        if node is not None:
            node = args_of(node)[0] if node.target is operator.getitem else node
            node.meta["random_place"], node.meta["random_axes"] = self.position, self.axes
        self.position += 1

    def skip_draws(self, count: int) -> int:
        """Go over random operators that run elsewhere; returns the position of the first."""
        self.position += count
        return self.position - count

    def drawing_along(self, axes: tuple[str, ...]) -> contextlib.AbstractContextManager[None]:
        """Let random operators draw other numbers for each index along these named axes."""
        return having(self, axes=tuple(dict.fromkeys((*self.axes, *axes))))

    def is_within_operator(self) -> bool:
        """Tell whether it is PyTorch that calls, to run an operator of the capture, and not the user's code."""
        # PyTorch takes a dispatch mode off its stack while the mode handles an operator.
        return self not in _get_current_dispatch_mode_stack()

    def constant(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that depends on no input of this capture, nor of those around it; None if it does.

        It is not to be written to. Within another capture, only what a rehearsal knows too, which writes no graph:
        views of constants around.
        """
        node = self._node_of(tensor)
        if self._around is not None or node is None:
            return self._constant_around(tensor)
        return self._constant(node)

    def traced(self, tensor: torch.Tensor) -> Traced | None:
        """The node of a tensor in the outermost capture, and what tells the value of a node there if it is constant."""
        if self._around is None:
            node = self._node_of(tensor)
            return None if node is None else (node, self._constant)

        original = tensor if self._mode is None else self._mode.original(tensor)
        if original is not tensor:
            return self._around.traced(original)
        if tensor._base is not None and _is_all_of(tensor, tensor._base):
            return self.traced(tensor._base)
        return None

    def _constant(self, node: Node) -> torch.Tensor | None:
        if self._constants is None:
            self._constants = Constants(node.graph, self._root())
        with in_eager_torch():
            return self._constants.value(node)

    def _constant_around(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that is a constant around this capture, or a view of one, where there is no graph."""
        original = tensor if self._mode is None else self._mode.original(tensor)
        if original is not tensor:
            return None if self._around is None else self._around.constant(original)

        with in_eager_torch():
            base = tensor._base
            value = None if base is None else self._constant_around(base)
            if base is None or value is None or value.stride() != base.stride():
                return None
            offset = value.storage_offset() + tensor.storage_offset() - base.storage_offset()
            return value.as_strided(tensor.shape, tensor.stride(), offset)

    def specialise(
        self, inputs: HostInputs, buffers: Mapping[str, torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> None:
        """Let Python ask for values that depend on the batch, on buffers and on what the callable closes over."""
        self._inputs = inputs
        fakes: list[tuple[Source, torch.Tensor]] = [*buffers.items(), *enumerate(batch)]
        self._sources = {}
        for source, fake in fakes:
            node = self._node_of(fake)
            if node is not None:
                self._sources[node] = source

    @property
    def has_inputs(self) -> bool:
        """Whether Python may ask for values of the batch."""
        return self._inputs is not None and not self._inputs.missing

    @property
    def host(self) -> HostPart | None:
        """The part of the trace that answers what Python has asked for, if it has."""
        if not self._questions:
            return None
        part = self._part(self._questions)
        part.later = self._later
        return part

    def follow(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Compute on the host what becomes of the buffers that answers depend on, if another call follows this one."""
        inputs, tried = self._inputs, set[str]()
        while inputs is not None and inputs.goes_on and self._questions:
            names = [name for name in self._part(self._questions).buffers if name not in tried]
            if not names:
                return
            tried.update(names)
            for name in names:
                answer = self.ask(_copies, ([buffers[name]],), {}, batch=not inputs.missing)
                if answer is not None:
                    self._later[name] = answer[0]

    def _part(self, questions: Sequence[Question]) -> HostPart:
        graph, root = questions[0].after.graph, self._root()
        return HostPart(graph, questions, functools.partial(self._source, root), lambda node: literal_of(node, root))

    def _source(self, root: torch.nn.Module | None, node: Node) -> Source | None:
        """What an input of the trace stands for, if Python may ask for its value."""
        source = self._sources.get(node)
        if source is not None:
            is_small = isinstance(source, int) or node.meta["val"].numel() <= LARGEST
            return source if is_small else None

        standin = getattr(root, str(node.target), None) if node.op == "get_attr" else None
        if self._mode is None or not isinstance(standin, torch.Tensor):
            return None
        tensor = self._mode.original(standin)
        is_plain = tensor is not standin and type(tensor) is torch.Tensor and tensor.device.type == "cpu"
        return tensor if is_plain and tensor.numel() <= LARGEST and not tensor.requires_grad else None

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a value of this trace."""
        return self._node_of(tensor) is not None

    def known_values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The values of tensors that depend on no input, if none of them does."""
        values: list[torch.Tensor] = []
        for tensor in tensors:
            node = self._node_of(tensor)
            value = None if node is None else self._constant(node)
            if value is None:
                return None
            values.append(value)
        return values or None

    def ask(
        self, func: Callable[..., Any], args: PyTree, kwargs: PyTree, *, given: bool = False, batch: bool = True
    ) -> Any:
        """What a function of tensors gives on the host; None if it depends on more than the host has."""
        inputs = self._inputs
        if inputs is None:
            return None
        with torch._C.DisableTorchFunction():
            nodes = [self._node_of(t) or self._node_of(aten.alias.default(t)) for t in tensors_in((args, kwargs))]
            if not nodes or None in nodes:
                return None
            remaining = iter(nodes)
            call = torch_pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), (args, kwargs))
            graph: Any = nodes[0].graph  # pyright: ignore[reportOptionalMemberAccess]
            question = Question(current_user_line(), (func, *call), graph._root.prev)
            part = self._part([question])
            if not part.is_known or (part.reads_batch and not batch):
                return None

            # At first, selections by a mask of the batch are tried as whole tensors beside the mask.
            if part.reads_batch and given and not inputs.sizes:
                inputs.missed = True
                return None
            if part.reads_batch and inputs.missing:
                self.refused = f"{question.place}\nHere Python needs a value of the batch, {inputs.missing}"
                raise NotImplementedError(self.refused)
            answer = part.answer(inputs)
            tensors = tuple(torch_pytree.tree_leaves(answer)) if given else None
            self._questions.append(dataclasses.replace(question, answer=answer, given=tensors))
        return answer

    def _sized(self, func: Callable[..., Any], args: PyTree, kwargs: PyTree) -> PyTree:
        """The results of an operator, as constants or as inputs of the program, if they can be computed now."""
        with torch._C.DisableTorchFunction():  # a `CaptureMode` would take a value for what is closed over
            values = self.known_values(tensors_in((args, kwargs)))
            if values is not None:
                remaining = iter(values)
                args, kwargs = torch_pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), (args, kwargs))
                with _disable_current_modes(), torch.no_grad():
                    results = func(*args, **kwargs)
                return torch_pytree.tree_map_only(torch.Tensor, aten.lift_fresh_copy.default, results)
            results = self.ask(func, args, kwargs, given=True)
            return torch_pytree.tree_map_only(torch.Tensor, self._as_input, results)

    def _as_input(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the trace for a value that is an input of the program."""
        assert self._mode is not None
        return aten.clone.default(self._mode.adopt(value))

    def values(self, tensors: Sequence[torch.Tensor], *, batch: bool = True) -> list[torch.Tensor] | None:
        """The values of tensors, if they can be computed now; the program is then for these alone."""
        values = self.known_values(tensors)
        if values is not None:
            return values
        return self.ask(_copies, (list(tensors),), {}, batch=batch) if tensors else None

    def _answer(self, func: Operator, args: Sequence[torch.Tensor]) -> Any:
        """The answer to `tensor.item()` and its like, in the order that README.md gives; None if nobody knows it."""
        values = self.known_values(args)
        if values is not None:
            with _disable_current_modes():
                return func(*values)

        answer = self.ask(func, args, {}, batch=False)
        if answer is not None:
            return answer

        frame = asking_frame()
        if frame is not None and (func is aten.equal.default or args[0].dtype is torch.bool):
            truth = True if frame.f_code is _CHECK_ALL else leads_only_to_raise(frame)
            if truth is not None:
                self.skipped.append(current_user_line())
                return truth

        answer = self.ask(func, args, {})
        if answer is None and func is aten.equal.default:
            return self._equal(*args)
        return answer

    def _equal(self, a: torch.Tensor, b: torch.Tensor) -> bool | None:
        """Tell whether tensors are equal, if the trace alone says so."""
        if a.shape != b.shape:
            return False
        if a is not b:
            first, second = self._node_of(a), self._node_of(b)
            if first is None or second is None or not is_same(first, second):
                return None
        # NaN is not equal to itself, which only the values say: the results are NaN then.
        if a.is_floating_point() or a.is_complex():
            self._assumed.append((current_user_line(), ~a.isnan().any()))
        return True

    def where_assumed(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of the callable, and not a number where a tensor that is NaN was taken to be equal to itself."""
        if not self._assumed:
            return list(outputs)
        if not any(output.is_floating_point() or output.is_complex() for output in outputs):
            raise NotImplementedError(
                f"{self._assumed[0][0]}\nHere Python asks whether a tensor equals itself. So it does, unless it is NaN "
                "somewhere, of which no result of the captured function can tell. Return a floating-point tensor, too."
            )
        holds = torch.stack([holds for _, holds in self._assumed]).all()
        marked: list[torch.Tensor] = []
        for output in outputs:
            has_nan = output.is_floating_point() or output.is_complex()
            marked.append(torch.where(holds, output, torch.nan) if has_nan else output)
        return marked


def _has_unknown_size(func: Operator, kwargs: PyTree) -> bool:
    """Tell whether the size of an operator's result depends on values, but for `x[mask]`, of which `Masks` know."""
    fixed = kwargs and kwargs.get("output_size") is not None
    return torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor and not fixed


def _nonzero(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return mask.nonzero(as_tuple=True)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


class _Current(threading.local):
    def __init__(self) -> None:
        self.stack: list[DataDependence] = []


_CURRENT = _Current()


def current_values() -> DataDependence:
    """Those of the capture under way."""
    return _CURRENT.stack[-1]


def _is_all_of(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    with in_eager_torch():
        same = (tensor.shape, tensor.stride(), tensor.storage_offset())
        return same == (base.shape, base.stride(), base.storage_offset())
