"""Private and version-dependent names of torch. Blocks: autograd, dispatcher, fake tensors, modules, engines, compiler.

See the package for what a block is. What is heavy to import (the compiler, DTensor) is imported by who asks for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import methodcaller
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_ckpt.errors import DiskFullError, HFCkptError, HostMemoryError
from hf_ckpt.upstream import Feature, stand_ins

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel
else:
    __getattr__ = stand_ins(__name__)

_feature = partial(Feature, seen="torch 2.11 to 2.14")
_NO_SIMULATION = 'Use a fixed policy, such as "full", which needs no simulation.'
_OTHER_MODE = 'Use mode "full" or "ffn".'

# --- The engine of autograd. ---

with _feature(
    "Raising errors when a backward ends, and telling one backward from another,",
    instead="Without it they are raised where they are found, and the first step is not held against the original.",
) as BACKWARDS:
    from torch._C import _current_graph_task_id as current_graph_task_id

    # Runs a function when the backward that is running in this thread has ended.
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback

NO_BACKWARD = -1
"""The number of the backward that runs, where none does."""

if BACKWARDS.gone:

    def current_graph_task_id() -> int:
        """Say that no backward runs."""
        BACKWARDS.warn()
        return NO_BACKWARD


with _feature("Simulating a backward", instead=_NO_SIMULATION):
    run_backward = torch.autograd.Variable._execution_engine.run_backward

with _feature(
    "Holding gradients of the first step against those of the original forward",
    instead="Its outputs are held against the original's all the same.",
) as GRAPHS:
    from torch._C import _will_engine_execute_node as will_engine_execute_node
    from torch._C._autograd import _get_sequence_nr as num_nodes_made

    # Each kind of node has a method of its own.
    _of_leaves = torch._C._functions.AccumulateGrad._sequence_nr  # type: ignore[attr-defined]  # not in the stubs
    sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")

if GRAPHS.gone:

    def num_nodes_made() -> int:
        GRAPHS.warn()
        return 0

    def sequence_number(node: Any) -> int:
        return 0


with _feature(
    "Telling other checkpointing inside of a plan's region",
    instead="Layers that checkpoint themselves are looked for in the whole stack of calls instead.",
) as RUNS_BACKWARD:
    RUNS_BACKWARD_CODE: CodeType | None = torch.autograd.graph._engine_run_backward.__code__

if RUNS_BACKWARD.gone:
    RUNS_BACKWARD_CODE = None

RUNS_BACKWARD_NAME = ("torch.autograd.graph", "_engine_run_backward")
"""The module and the name of the function that every backward passes through."""

with _feature("Tiles", instead="Leave tiles out of the policy."):
    from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph_of_backward

with _feature(
    "Exchanging the saved-tensor hooks of a region (a layer around its attention, tiles)",
    instead='Use mode "full", or "ffn" for layers whose ffn is a module of its own.',
) as HOOKS:
    from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
    from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks

# --- Memory. ---

OF_HOST = "can't allocate memory|Cannot allocate memory|not enough memory: you tried to allocate"
"""Words of the allocator of the CPU."""
_OUT_OF_MEMORY = re.compile(
    # Not out of something else that has to do with memory.
    r"out of memory(?! \w)|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|"
    # Of cuDNN 9.
    r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|"
    # A handle of cuBLAS takes memory of the device; any other call says it of a handle that there is not.
    r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(?:Lt)?Create|" + OF_HOST
)
"""Words of CUDA, cuBLAS, cuDNN, NCCL and torch's allocators, in errors that have no type of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory of the device or of the host, or the disk of an offload, has run out."""
    if isinstance(error, torch.OutOfMemoryError | HostMemoryError | DiskFullError | MemoryError):
        return True
    # Other errors of this package may mention it: that another process was killed for want of memory.
    is_of_others = isinstance(error, RuntimeError | OSError) and not isinstance(error, HFCkptError)
    return is_of_others and _OUT_OF_MEMORY.search(str(error)) is not None


# --- torch.utils.checkpoint. ---

with _feature(
    "Recomputing once for several backwards (torch's GraphExecGroup)",
    instead="Each of them recomputes for itself.",
) as GROUPS:
    from torch._C import _get_graph_exec_group as graph_exec_group

if GROUPS.gone:

    def graph_exec_group() -> Any:  # type: ignore[misc]  # None, always
        """Say that there is none."""


with _feature(
    "Saving the inputs of a region without a node of the graph",
    instead="They are saved by a node, which takes a kilobyte of the device for each region.",
) as SAVED:
    from torch._C._autograd import _make_saved_tensor as make_saved_tensor

_CHECKPOINT = _feature(
    "Telling layers that checkpoint themselves, and set_checkpoint_early_stop,",
    instead="Leave torch's own checkpoint and its switches out.",
    of="torch.utils.checkpoint",
)
UNPACK_HOOK = _CHECKPOINT.attribute("unpack_hook")
"""The function in which torch's checkpoint recomputes: when a saved tensor is asked for."""
STOPS_EARLY = _CHECKPOINT.attribute("_enable_checkpoint_early_stop")
"""Whether recomputations stop early, where somebody has set that for all of them (`set_checkpoint_early_stop`)."""

# --- Ways to differentiate. ---

ALLOWS_NO_HOOKS = "don't yet support saved tensor hooks"
"""In what torch.func raises inside of a checkpoint (torch 2.11 to 2.14)."""

with _feature(
    "Refusing transforms of torch.func and forward-mode derivatives around a region",
    instead="Call a model under a plan outside of them: torch raises from somewhere inside.",
) as TRANSFORMS:
    from torch._C._functorch import peek_interpreter_stack
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.autograd import forward_ad

    _no_level = forward_ad._current_level

    def has_forward_derivatives() -> bool:
        """Whether forward-mode derivatives are at work."""
        return forward_ad._current_level >= 0


if TRANSFORMS.gone:

    def peek_interpreter_stack() -> Any:  # type: ignore[misc]  # None, always
        TRANSFORMS.warn()

    def has_forward_derivatives() -> bool:
        return False


with _feature(
    "Selective recomputation by kernels of our own, and backwards of several gradients at once (is_grads_batched),",
    instead="A dispatch mode follows each operator instead, which costs host time; ask for one gradient at a time.",
) as KEYS:
    from torch._C import DispatchKeySet
    from torch._C import _dispatch_dump_table as dispatch_table
    from torch._C import _dispatch_has_kernel as has_kernel
    from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel_for_key
    from torch._C import _dispatch_key_parse as dispatch_key
    from torch._C import _dispatch_keyset_full_after as keys_after
    from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_key_excluded
    from torch._C import _dispatch_tls_is_dispatch_key_included as is_key_included
    from torch._C import _dispatch_tls_set_dispatch_key_included as set_key_included
    from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeys
    from torch._C import _jit_get_all_schemas as all_schemas
    from torch._guards import TracingContext

    def redispatch_of(function: Any) -> Callable[..., Any]:
        """Return what calls an operator below some dispatch keys."""
        found: Callable[..., Any] = function._handle.redispatch_boxed
        return found

    _below_product = redispatch_of(torch.ops.aten.mm.default)
    BATCHED_BACKWARD = dispatch_key("VmapMode")
    """Set in a thread while `is_grads_batched=True` vectorizes a backward there; `torch.vmap` has an interpreter."""

    def is_transformed() -> bool:
        """Whether a transform of torch.func is at work, or a backward of several gradients at once."""
        return peek_interpreter_stack() is not None or (
            bool(is_key_included(BATCHED_BACKWARD)) and not is_key_excluded(BATCHED_BACKWARD)
        )


if KEYS.gone:

    def is_transformed() -> bool:
        KEYS.warn()
        return peek_interpreter_stack() is not None

# --- The dispatcher. ---

with _feature(
    "Following the operators of a step (selective modes without kernels, simulation, verify, calibrate)",
    instead=_OTHER_MODE,
):
    from torch.utils._python_dispatch import TorchDispatchMode

with _feature(
    "Hiding from dispatch modes what is none of the step (checks, and all of a simulation)",
    instead='Modes of others see the operators of the checks too; use a fixed policy, such as "full", and not auto.',
) as HIDING:
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

    hidden_from_modes: Callable[[], AbstractContextManager[Any]] = disable_current_modes
    """Takes the modes away, or goes on without."""
    hidden_from_dispatch: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch
    """Passes by the modes and the classes of tensors."""

if HIDING.gone:

    def hidden_from_modes() -> AbstractContextManager[Any]:
        HIDING.warn()
        return nullcontext()

    hidden_from_dispatch = hidden_from_modes

with _feature(
    "Telling which dispatch modes are entered",
    instead="One is taken to be: selective modes follow each operator by a mode, which costs host time.",
) as MODE_STACK:
    from torch._C import _len_torch_dispatch_stack as num_dispatch_modes

    dispatch_modes: Callable[[], list[Any]] = torch.utils._python_dispatch._get_current_dispatch_mode_stack

if MODE_STACK.gone:

    def num_dispatch_modes() -> int:
        """Say that there is one."""
        MODE_STACK.warn()
        return 1

    def dispatch_modes() -> list[Any]:
        """Say that none is known."""
        return []


with _feature("Knowing what operators write and return (selective modes, simulation)", instead=_OTHER_MODE):
    _of_product = torch.ops.aten.mm.default._schema

    def schema_of(function: Any) -> Any:
        """Return the schema of an overload; None of a higher-order operator, which has none."""
        return getattr(function, "_schema", None)


with _feature(
    "Recomputing in the modes that surrounded a forward (torch.device, modes over functions and operators)",
    instead="Enter such modes around the backward as well.",
) as SURROUNDINGS:
    from torch._C import _get_function_stack_at as function_mode_at
    from torch._C import _len_torch_function_stack as num_function_modes
    from torch.overrides import _pop_mode as pop_function_mode
    from torch.overrides import _push_mode as push_function_mode
    from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
    from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

if SURROUNDINGS.gone:

    def num_function_modes() -> int:
        SURROUNDINGS.warn()
        return 0


KERNEL_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = ()
"""What reads and sets what chooses kernels: `sdpa_kernel` and the `flags` of backends do, for a block."""

with _feature(
    "Recomputing with the kernels that were allowed around a forward (sdpa_kernel, flags of backends)",
    instead="Enter such blocks around the backward as well.",
):
    KERNEL_SWITCHES = (
        (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
        (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
        (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
        (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
        (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
        (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
        (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
        (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
    )


with _feature(
    "Recomputing as under parametrize.cached()", instead="Leave cached() out, or enter it within a layer."
) as PARAMETRIZED:
    from torch.nn.utils import parametrize

    _CACHE = parametrize._cache, parametrize._cache_enabled

    def parametrized_weights() -> dict[Any, Any] | None:
        """Return the weights that `parametrize.cached()` has kept so far; None outside of it."""
        return parametrize._cache if parametrize._cache_enabled else None

    @contextmanager
    def parametrized_weights_kept(weights: dict[Any, Any] | None) -> Iterator[None]:
        """Let these be the ones that it has kept so far, in the block."""
        found = parametrize._cache, parametrize._cache_enabled
        parametrize._cache, parametrize._cache_enabled = dict(weights or {}), int(weights is not None)
        try:
            yield
        finally:
            parametrize._cache, parametrize._cache_enabled = found


if PARAMETRIZED.gone:

    def parametrized_weights() -> dict[Any, Any] | None:
        return None


with _feature("Simulating what operators cost", instead=_NO_SIMULATION):
    from torch._C import DisableTorchFunction
    from torch._ops import OperatorBase
    from torch.utils._mode_utils import no_dispatch

with _feature("Keeping the outputs of adapted layers in selective modes, and the chunked head,", instead=_OTHER_MODE):
    from torch._C import DisableTorchFunctionSubclass
    from torch._C import _disabled_torch_function_impl as disabled_torch_function

    CAST, UNSAFE_VIEW = torch.ops.aten._to_copy.default, torch.ops.aten._unsafe_view.default
    # Gives a tensor a node that nobody may go back through.
    DelayedError = torch._C._functions.DelayedError

# --- Tensors. ---

with _feature(
    "Walking through nested arguments (a layer around its attention, selective modes, the chunked head, simulation)",
    instead='Use mode "full", or "ffn" for layers whose ffn is a module of its own.',
) as TREES:
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

if TREES.gone:

    def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
        """Walk through tuples, lists and dictionaries alone."""
        TREES.warn()
        if not isinstance(tree, dict | tuple | list):
            return [tree]
        inside = tree.values() if isinstance(tree, dict) else tree
        return [leaf for each in inside for leaf in tree_leaves(each)]


with _feature(
    "Stand-ins for tensors (selective modes with adapters, the chunked head, modules that make tensors anew)",
    instead='Use mode "full" or "ffn", and no chunked head.',
):
    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

_HEAD = _feature("The chunked head", instead="Leave head: chunked out.", of="torch.autograd.function")


@_HEAD
def node_class_of(function: Any) -> Any:
    """Return the class of the nodes of an autograd function."""
    return function._backward_cls


with _feature(
    "Telling plain tensors from others (offload, what modules hold)",
    instead='Use mode "full" or "ffn" without offload.',
):
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    is_view = torch.Tensor._is_view
    base_of: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor._base.__get__  # type: ignore[union-attr]  # a descriptor
    storage_id: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage._cdata.__get__
    """Of a storage: equal for all tensors that share it."""

# --- Fake tensors. ---

with _feature("Fake tensors (auto, estimate, plan)", instead=_NO_SIMULATION):
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )

with _feature("Making fake tensors at once (auto, estimate, plan)", instead=_NO_SIMULATION):
    from torch._C import _get_dispatch_mode as dispatch_mode
    from torch._C import _set_throw_on_mutable_data_ptr as set_throw_on_mutable_data_ptr
    from torch._C import _TorchDispatchModeKey as DispatchModeKey

    make_subclass = torch.Tensor._make_subclass

_PARAMETERS = _feature("Making fake parameters (auto, estimate, plan)", instead=_NO_SIMULATION, of="torch.nn.parameter")
IS_PARAMETER = _PARAMETERS.attribute("_is_param")
"""The mark that makes a tensor a parameter."""

with _feature("Simulating what CUDA's kernels keep, and what optimizers and engines make", instead=_NO_SIMULATION):
    from torch import _fused_sdp_choice as fused_sdp_choice
    from torch import _softmax as softmax

    GROUPED_MM = torch.ops.aten._grouped_mm.default
    INDEX_PUT = torch.ops.aten._index_put_impl_.default
    CTC_LOSS, CTC_LOSS_OF_TENSORS = torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor
    FUSED_OPTIMIZERS = (torch.ops.aten._fused_adam_.default, torch.ops.aten._fused_adamw_.default)
    MATH_ATTENTION = torch.ops.aten._scaled_dot_product_attention_math.default
    FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
    FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    CUDNN_ATTENTION = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention.default
    EFFICIENT_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

    WAIT = torch.ops._c10d_functional.wait_tensor.default
    FakeWork = torch._C._distributed_c10d.FakeWork

# --- Modules. ---

with _feature(
    "Telling layers that look over positions or draw random numbers", instead="Leave tiles out of the policy."
):
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.modules.conv import _ConvNd as ConvNd
    from torch.nn.modules.dropout import _DropoutNd as DropoutNd

_WRAPPERS = _feature(
    "Looking inside of what torch wraps modules in (torch.compile, FSDP1, torch's own checkpointing)",
    instead="Compile the layers alone, use FSDP2, and leave torch's own checkpointing out.",
    of=(
        "torch._dynamo.eval_frame torch.nn.modules.module torch.distributed.fsdp._common_utils "
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    ),
)
COMPILED_INSIDE = _WRAPPERS.attribute("_orig_mod")
"""The child of a module that torch.compile has made, and what it puts into names."""
COMPILED_CALL = _WRAPPERS.attribute("_compiled_call_impl")
"""What `nn.Module.compile` leaves on a module."""
CHECKPOINT_WRAPPED = _WRAPPERS.attribute("_checkpoint_wrapped_module")
"""The child of torch's own wrapper for checkpointing, and what it puts into names."""
FSDP_WRAPPED = _WRAPPERS.attribute("_fsdp_wrapped_module")
"""The child of FSDP1's wrapper, and what it puts into names."""
WRAPPER_NAMES = (CHECKPOINT_WRAPPED, FSDP_WRAPPED, COMPILED_INSIDE)

_DEVICES = _feature(
    "Bringing back the random numbers of devices that are no arguments of a layer",
    instead="On a GPU leave dropout out.",
    of="torch.cuda",
)
IS_USED = _DEVICES.attribute("_initialized")
"""Of `torch.cuda` and the like: whether the device has been used."""
_DDP = _feature(
    "The chunked head under DDP with a static graph",
    instead="Leave head: chunked out, or static_graph.",
    of="torch.nn.parallel.distributed",
)
DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""On a model: names of parameters that DDP neither looks at nor sends."""
DDP_NODE = _DDP.attribute("_DDPSink") + "Backward"
"""DDP's node around what the model returns: with a static graph its backward reduces the gradients."""

# --- Optimizers. ---

with _feature(
    'on_oom="escalate": an optimizer step in parts', instead="An optimizer step that runs out of memory ends the run."
):
    from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_post_hooks
    from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_pre_hooks

    _init_group = torch.optim.AdamW._init_group
MAKES_STATE = "_init_group"
"""The method of torch's optimizers that makes the state of a group, before anything of the group is written."""

_SAMPLERS = _feature(
    "Naming the examples of a batch that has run out of memory",
    instead="Where a sampler draws fewer examples than there are, its sizes alone are named.",
    of="torch.utils.data.sampler",
)
NUM_SAMPLES = _SAMPLERS.attribute("_num_samples")
"""Of a sampler: how many examples it gives, where the user says so."""

# --- Processes, and engines that shard. ---

with _feature(
    "Agreeing with the other processes of a run", instead="Train in one process, or use another version of torch."
):
    from torch.distributed.distributed_c10d import _get_default_store as default_store

_FSDP1 = _feature(
    "A plan under FSDP1",
    instead="Use FSDP2 (fsdp_version: 2).",
    of="torch.distributed.fsdp.fully_sharded_data_parallel torch.distributed.fsdp._flat_param",
)


@_FSDP1
def flat_parameter(unit: Any) -> Any:
    """Return the parameter that a unit has flattened its own into; None without one."""
    return unit._flat_param


@_FSDP1
def flattened_modules(flat: Any) -> list[nn.Module]:
    """Return the modules of the parameters that lie in a flat one."""
    return [info.module for info in flat._param_infos]


@_FSDP1
def local_shard(flat: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(flat, "_local_shard", flat)
    return found


@_FSDP1
def flattened_shapes(unit: FullyShardedDataParallel) -> dict[tuple[nn.Module, str], torch.Size]:
    """Return the shapes of the parameters that a unit has flattened into its own, by module and name."""
    if unit._handle is None:
        # A unit whose parameters are all in units below it, or that has none.
        return {}
    flat = unit._handle.flat_param
    names = [(info.module, info.param_name) for info in flat._param_infos]
    shapes = dict(zip(names, flat._shapes, strict=True))
    for shared in flat._shared_param_infos:
        shapes[shared.module, shared.param_name] = shapes[shared.prim_module, shared.prim_param_name]
    return shapes


_FSDP2 = _feature(
    "A plan under FSDP2",
    instead="Use FSDP1 (fsdp_version: 1), or DDP.",
    of=(
        "torch.distributed.fsdp._fully_shard._fully_shard torch.distributed.fsdp._fully_shard._fsdp_state "
        "torch.distributed.fsdp._fully_shard._fsdp_param_group torch.distributed.fsdp._fully_shard._fsdp_param"
    ),
)


@_FSDP2
def sharded_parameters(unit: Any) -> list[Any]:
    """Return the parameters that a unit of FSDP2 gathers, each with `sharded_param`."""
    return [parameter for group in groups_of(unit) for parameter in group.fsdp_params]


@_FSDP2
def shard_of(parameter: Any) -> torch.Tensor:
    """Return this rank's share of such a parameter."""
    found: torch.Tensor = parameter._sharded_param_data
    return found


@_FSDP2
def owner_of(parameter: Any) -> nn.Module:
    found: nn.Module = parameter._module_info.module
    return found


@_FSDP2
def frees_after_forward(unit: Any) -> bool:
    """Whether a unit frees what it has gathered when its forward ends."""
    return any(group._reshard_after_forward for group in groups_of(unit))


@_FSDP2
def num_modules_in_unit(unit: Any) -> int:
    """Return how many modules are gathered with this one."""
    return len(unit._get_fsdp_state()._modules)


_GROUPS, _GROUP = "_fsdp_param_groups", "_fsdp_param_group"
"""Several from torch 2.13 on, one before."""


def groups_of(unit: Any) -> list[Any]:
    """Return what of a unit is gathered together."""
    state = unit._get_fsdp_state()
    groups = getattr(state, _GROUPS, None) or [getattr(state, _GROUP)]
    return [group for group in groups if group is not None]


FSDP_MANAGED = _FSDP2.attribute("_is_fsdp_managed_module")
"""The mark that both versions of FSDP leave on modules whose weights they gather."""

_APPLYING = _feature(
    "A plan under FSDP", instead="Use DDP.", of="torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
)


@_APPLYING
def visitor_of_modules() -> Callable[..., None]:
    """Return torch's own way to visit the modules of a model that FSDP has sharded."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    return apply_activation_checkpointing


with _feature(
    "Simulating tensor parallelism",
    instead=_NO_SIMULATION,
    of="torch.distributed.tensor._api torch.distributed.tensor._dispatch torch.distributed.tensor._sharding_prop",
) as _SHARED:
    # What a collective returns before it has ended.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor


@_SHARED
def local_tensor(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor._local_tensor
    return found


@_SHARED
def shape_finder(kind: Any) -> Any:
    """Return what finds the shapes of whole tensors for DTensor."""
    return kind._op_dispatcher.sharding_propagator


FINDS_SHAPES = _SHARED.attribute("_propagate_tensor_meta_non_cached")
"""The method of `shape_finder`."""


# --- The compiler. ---

_COMPILER = _feature(
    "Leaving regions to torch.compile",
    instead='Regions run uncompiled with backend="eager"; compile with it, or leave torch.compile out.',
    of=(
        "torch torch._dynamo.eval_frame torch._dynamo.symbolic_convert torch._dynamo.decorators "
        "torch._dynamo.convert_frame "
        "torch._dynamo.backends.common"
    ),
)
INDUCTOR = _COMPILER.attribute("_TorchCompileInductorWrapper")
IS_CONSTANT = _COMPILER.attribute("_dynamo_marked_constant")
"""The mark of functions that the compiler calls once, for a constant."""
_NUM_FRAMES = _COMPILER.attribute("FRAME_COUNTER")
AOT_BACKENDS = ("aot_eager", "aot_eager_decomp_partition", "aot_eager_decomp_partition_with_mode", "cudagraphs")
"""Of `torch._dynamo.backends`."""


def has_compiled() -> bool:
    """Whether the compiler may have looked at code in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, _NUM_FRAMES, 1) != 0


@_COMPILER
def brings_back_random_numbers() -> bool:
    """Whether the backend that compiles in this thread goes through AOTAutograd, as far as that is known."""
    # At import time it takes seconds.
    from torch._dynamo.backends.common import AotAutograd
    from torch._dynamo.eval_frame import innermost_backend
    from torch._dynamo.symbolic_convert import tls

    # Where the graph breaks on the way, this runs when nothing is traced.
    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return False
    outer: Any = innermost_backend(translator.output.compiler_fn)
    backend = getattr(outer, "compiler_fn", outer)
    if type(outer).__name__ == INDUCTOR or isinstance(backend, AotAutograd):
        return True
    module, name = getattr(backend, "__module__", "") or "", getattr(backend, "__name__", "")
    is_known = module.startswith("torch._dynamo.backends.") and name in AOT_BACKENDS
    return is_known or (module, name) == ("torch._inductor.compile_fx", "compile_fx")


def keeps_all_digits(kind: str, *, convolutions: bool = False) -> bool:
    """Whether products of float32 on a kind of device keep all digits: no TF32, and on a CPU no bfloat16.

    `torch.get_float32_matmul_precision` raises where the newer settings were used. `convolutions`: ask of those too.
    """
    backends: Any = torch.backends
    known = {
        "cpu": (backends.mkldnn.matmul, backends.mkldnn.conv),
        "cuda": (backends.cuda.matmul, backends.cudnn.conv),
    }
    asked = known.get(kind, ())[: 2 if convolutions else 1]
    return bool(asked) and all(each.fp32_precision in ("ieee", "none") for each in asked)
