"""What the package reaches into of torch that is not public API: where, which names, why, since and until when.

For a new release of torch, `pytest tests/system/test_torch_internals.py` says what has gone. That gets the release in
`until`, and the code which used it another way beside the old one.
"""

from typing import NamedTuple

OLDEST = "2.11"
"""The oldest release of torch that the package takes."""


class Internals(NamedTuple):
    """Names of torch that no documentation promises."""

    owner: str  # an expression: a module, a class or an object of it
    names: str
    why: str
    since: str = OLDEST
    until: str | None = None  # the first release without them


_TRACER = "the tracer of make_fx, its state and what it raises"
_FAKES = "tensors with a shape and no values"
_AS_IT_IS = "read a tensor without what a capture puts around it"
_OPERATORS = "the classes of operators, and what they say of themselves"
_FUNC = "torch.func within a capture, and a capture within torch.func"
_FUNCTION = "autograd.Function takes tensors where no torch function mode sees it"
_BACKWARD = "the autograd graph behind a tensor, and the Python that a backward pass runs"
_DEVICE = "the jax device"
_HOOKS = "tell of hooks that a loop over layers, or a step, would not run"
_STATE = "parameters and buffers under their names"
_FORWARD = "what a forward calls that a capture replaces"
_SETTINGS = "a setting that a region has, or that cannot be set otherwise without a warning"
_CLASSES = "the class that several public classes share"
_TREES = "trees of tensors, with the classes that users have registered"
_MEMORY = "whether a tensor was written, and what shares its memory"

INTERNALS = (
    Internals(
        "torch.fx.experimental.proxy_tensor",
        "disable_proxy_modes_tracing get_proxy_mode get_proxy_slot make_fx set_proxy_slot",
        _TRACER,
    ),
    Internals(
        "torch.fx.experimental.symbolic_shapes",
        "GuardOnDataDependentSymNode PendingUnbackedSymbolNotFound ShapeEnv",
        _TRACER,
    ),
    Internals("torch._dispatch.python", "enable_python_dispatcher no_python_dispatcher", _TRACER),
    Internals("torch.fx.Interpreter", "_set_current_node", _TRACER),
    Internals("torch._decomp", "core_aten_decompositions decomposition_table", "PyTorch's own rules for operators"),
    Internals(
        "torch._subclasses.fake_tensor",
        "DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorMode "
        "UnsupportedOperatorException",
        _FAKES,
    ),
    Internals(
        "torch._C", "DisableTorchFunction DisableTorchFunctionSubclass _DisableAutocast _DisableFuncTorch", _AS_IT_IS
    ),
    Internals(
        "torch.utils._python_dispatch",
        "TorchDispatchMode _disable_current_modes _get_current_dispatch_mode_stack",
        _AS_IT_IS,
    ),
    Internals("torch._ops", "OpOverload OpOverloadPacket OperatorBase", _OPERATORS),
    Internals("torch.ops.aten.add.Tensor", "_can_decompose _op_dk _opname _overloadname _schema", _OPERATORS),
    Internals("torch._C", "DispatchKey", _OPERATORS),
    Internals("torch._C.DispatchKey", "CompositeExplicitAutograd", _OPERATORS),
    Internals("torch.ops.aten.add", "_qualified_op_name", _OPERATORS),
    Internals("torch.ops.aten", "cholesky", "torch.cholesky, which was deprecated", until="2.14"),
    Internals("torch._library.custom_ops", "OPDEFS", _OPERATORS),
    Internals(
        "torch.library.custom_op('internals::same', torch.clone, mutates_args=(), schema='(Tensor x) -> Tensor')",
        "_backward_fn _opoverload",
        _OPERATORS,
    ),
    Internals(
        "torch._C",
        "_dispatch_get_all_op_names _dispatch_has_kernel_for_dispatch_key _jit_resolve_packet",
        _OPERATORS,
    ),
    Internals("torch._C._functorch", "is_functorch_wrapped_tensor maybe_current_level", _FUNC),
    Internals("torch.autograd.forward_ad", "_current_level", _FUNC),
    Internals("torch._functorch.vmap", "_add_batch_dim", _FUNC),
    Internals("torch._functorch.eager_transforms", "_wrap_for_grad", _FUNC),
    Internals("torch.autograd.function", "custom_function_call", _FUNC),
    Internals("torch._functorch.utils", "unwrap_if_dead", _FUNCTION, until="2.14"),
    Internals("torch.autograd.Function", "apply", _FUNCTION),
    Internals("torch.autograd", "_engine_run_backward", _BACKWARD),
    Internals("torch.zeros(1, requires_grad=True).exp().grad_fn", "_sequence_nr", _BACKWARD),
    Internals("torch._C", "_current_graph_task_id", _BACKWARD),
    Internals("torch._C.TensorBase", "grad_fn", _BACKWARD),
    Internals("torch._C._autograd", "_top_saved_tensors_default_hooks", _BACKWARD),
    Internals(
        "torch._C._acc", "register_python_privateuseone_device_guard register_python_privateuseone_hook", _DEVICE
    ),
    Internals(
        "torch._C",
        "_accelerator_getAccelerator _get_accelerator _get_privateuse1_backend_name",
        "name the jax device, and keep the accelerator",
    ),
    Internals("torch.utils.backend_registration", "_DummyDeviceGuard _DummyPrivateUse1Hook", _DEVICE),
    Internals("torch", "_has_compatible_shallow_copy_type _register_device_module", _DEVICE),
    Internals("torch.Tensor", "_make_wrapper_subclass _use_count", _DEVICE),
    Internals("torch._C", "_swap_tensor_impl", "what torch.utils.swap_tensors does, for weights of nn.LSTM too"),
    Internals("torch.UntypedStorage", "_new_with_weak_ptr", _MEMORY),
    Internals("torch.multiprocessing.reductions", "StorageWeakRef", _MEMORY),
    Internals("torch.Tensor", "_backward_hooks _post_accumulate_grad_hooks", _HOOKS),
    Internals("torch.optim.optimizer", "_global_optimizer_post_hooks _global_optimizer_pre_hooks", _HOOKS),
    Internals(
        "torch.nn.Module()",
        "_backward_hooks _backward_pre_hooks _forward_hooks _forward_pre_hooks _load_state_dict_pre_hooks",
        _HOOKS,
    ),
    Internals("torch.optim.SGD([torch.zeros(1)])", "_optimizer_step_post_hooks _optimizer_step_pre_hooks", _HOOKS),
    Internals("torch.nn.Module()", "_buffers _modules _non_persistent_buffers_set _parameters", _STATE),
    Internals("torch.nn.LSTM(1, 1)", "_flat_weight_refs _flat_weights _init_flat_weights", _STATE),
    Internals("torch.nn.Module", "_apply _call_impl", _FORWARD),
    Internals("torch.nn.modules.adaptive", "_ASMoutput", _FORWARD),
    Internals("torch._C._nn", "multilabel_margin_loss", _FORWARD),
    Internals("torch._VF", "_pack_padded_sequence _pad_packed_sequence", _FORWARD),
    Internals("torch", "_check_tensor_all_with", _FORWARD),
    Internals("torch.nn._reduction", "legacy_get_string", _FORWARD),
    Internals("torch.nn.init", "_no_grad_trunc_normal_", _FORWARD),
    Internals("torch.nn.attention", "_sdpa_kernel", _FORWARD),
    Internals("torch.distributions.Distribution", "_validate_args", _FORWARD),
    Internals("torch.nn.MultiheadAttention", "_reset_parameters", "how a module without reset_parameters begins"),
    Internals("torch._C", "_get_mkldnn_enabled _set_mkldnn_enabled", _SETTINGS),
    Internals("torch.autocast('cpu')", "_cache_enabled _enabled", _SETTINGS),
    Internals("torch.nn.modules.batchnorm", "_BatchNorm", _CLASSES),
    Internals("torch.nn.modules.conv", "_ConvNd", _CLASSES),
    Internals(
        "torch.utils._pytree",
        "NodeDef SUPPORTED_NODES tree_flatten tree_is_leaf tree_leaves tree_map tree_map_only tree_unflatten",
        _TREES,
    ),
    Internals("torch.Tensor", "_base _version", _MEMORY),
    Internals("torch.zeros(1).untyped_storage()", "_cdata", _MEMORY),
)
