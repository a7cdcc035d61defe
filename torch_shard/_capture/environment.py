"""Settings of PyTorch while a callable is captured."""

import contextlib
import fnmatch
import functools
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from torch_shard._capture import libraries, replacements  # noqa: F401  (they fill the table)
from torch_shard._capture.autocast import autocast_on_fakes
from torch_shard._capture.autograd_functions import standins_given
from torch_shard._capture.provenance import current_watcher
from torch_shard._common.overrides import KERNELS, attribute_overrides, digest_of
from torch_shard._common.patching import Owner, having, patched

logger = logging.getLogger(__name__)


class _Entered(threading.local):
    now = False


_ENTERED = _Entered()


@contextlib.contextmanager
def capture_environment() -> Iterator[None]:
    """For the time that the callable itself runs, with all captures within it."""
    if _ENTERED.now:
        yield
        return
    with having(_ENTERED, now=True), contextlib.ExitStack() as stack:
        stack.enter_context(_cumulative_batch_norms())
        stack.enter_context(autocast_on_fakes())
        stack.enter_context(standins_given())
        for owner, name, own, source in attribute_overrides():
            for held in _imported(owner) if isinstance(owner, str) else [owner]:
                if hasattr(held, name):
                    stack.enter_context(patched(held, name, functools.partial(_instead, own, source)))
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:  # a compiled function runs as what it is made of
            stack.enter_context(dynamo.config.patch(error_on_nested_fx_trace=False))
            message = r"(?s)Using `torch.compile\(module\)` when there are global hooks"  # ours
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message)
        if torch.is_anomaly_enabled():  # it looks at values
            logger.warning(
                "torch.autograd.detect_anomaly does nothing in a compiled program, which cannot raise. To stop at what "
                "is not finite, use fit, or step(state, batch, skip_grad_norm=math.inf)."
            )
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if KERNELS:  # an operator of the user's that a kernel of PyTorch calls, below all that gives it a derivative
            names = "|".join(re.escape(kernel.name) for kernel in KERNELS)
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("error", rf"({names})\S*: an autograd kernel was not registered")
        # checks of values
        stack.enter_context(patched(torch.distributions.Distribution, "_validate_args", lambda _: False))
        yield


@contextlib.contextmanager
def reference_kernels() -> Iterator[None]:
    """Math attention and plain RNN cells: kernels whose derivative is a graph of ordinary operators."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    onednn = torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns about TF32 on CPU builds
    try:
        # TorchScript runs a script as it is written, and does not rewrite it after it has seen it run
        as_written = torch.jit.optimized_execution(False)  # pyright: ignore[reportPrivateImportUsage]
        with sdpa_kernel(SDPBackend.MATH), as_written:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        torch._C._set_mkldnn_enabled(onednn)


def _imported(path: str) -> list[Owner]:
    """Modules, or classes in them, by a glob of their path, as far as they have been imported."""
    if path in sys.modules:
        return [sys.modules[path]]
    module, _, name = path.rpartition(".")
    found = fnmatch.filter(list(sys.modules), module) if "*" in module else sys.modules.keys() & {module}
    holders = map(sys.modules.__getitem__, found)
    classes = (value for held in holders for key, value in vars(held).items() if fnmatch.fnmatchcase(key, name))
    return [*dict.fromkeys(cls for cls in classes if isinstance(cls, type))]


def _instead(own: Callable[..., Any], source: str, original: Any) -> Any:
    """What stands for an attribute: ours, if nothing is said of its source, or if that is what was read."""
    code: Any = getattr(original, "__code__", None)  # that of a wrapper is its own
    if not source or digest_of(code) != source:
        return original if source else own

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (watcher := current_watcher()) is not None:
            watcher.note(code)  # a program is for the attributes that it reads, too
        return own(original, *args, **kwargs)

    return call


@contextlib.contextmanager
def _cumulative_batch_norms() -> Iterator[None]:
    """Run them within on tensors alone.

    Such a norm keeps the plain mean of all its batches: after batch n, `(1 - 1/n) * old + 1/n * new`. With momentum 1
    its forward leaves `new` in the buffers, and the mean is taken after it.
    """
    before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def enter(module: nn.Module, args: object) -> None:
        if isinstance(module, _BatchNorm) and module.momentum is None and module.training and _tracks(module):
            before[id(module)] = _running(module)[0].clone(), _running(module)[1].clone()
            module.momentum = 1.0

    def leave(module: nn.Module, args: object, output: object) -> None:
        old = before.pop(id(module), None)
        if old is None:
            return
        module.momentum = None  # pyright: ignore[reportArgumentType]
        count: Any = module.num_batches_tracked
        with torch.no_grad():
            for running, mean in zip(_running(module), old, strict=True):
                # .data: the norm's backward, which has no use for them, has noted their version
                running.data.copy_(mean + (running - mean) / count)

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tracks(module: _BatchNorm) -> bool:
    return module.running_mean is not None and module.num_batches_tracked is not None


def _running(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return module.running_mean, module.running_var
