"""Logits that are computed only when something needs their values: a tensor that stores how to compute them.

The model's own code uses them as any logits. An operation that treats each row alone is stored and applied later; one
that only moves rows is done to the hidden states; losses and reductions run in chunks (`chunked_loss`); anything else
gets the real logits, with a warning.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from hf_ckpt.regions.head import chunked_loss, row_operations
from hf_ckpt.regions.head.chunked_loss import LossCall, in_chunks
from hf_ckpt.regions.head.head_call import LogitsState, RowOperation, compute_logits, unsupported
from hf_ckpt.regions.head.head_proof import HeadProof
from hf_ckpt.upstream.torch import (
    DDP_NODE,
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
    node_class_of,
    tree_map_only,
)

logger = logging.getLogger(__name__)

_LOSSES = {"cross_entropy": functional.cross_entropy, "nll_loss": functional.nll_loss}
_SIGNATURES = {name: inspect.signature(function) for name, function in _LOSSES.items()}

_PASSIVE_HOOK_MODULES = ("torch.distributed.", "torch.utils.module_tracker.", "deepspeed.", "accelerate.", "hf_ckpt.")
"""Modules whose hooks on gradients do not change them: they gather weights, or note that a gradient came by."""


class DeferredLogits(Tensor):
    """Logits [..., V] of hidden states [..., H], computed when they are needed; made by `defer`.

    `requires_grad` says whether a gradient flows through what is computed from it: a detached copy has none.
    """

    state: LogitsState
    """What they are computed from."""
    materialized: Tensor | None
    """The real logits, once something needed all of them."""
    shares_memory: bool
    """Whether the real logits would share their memory with other logits."""

    @staticmethod
    def __new__(cls, state: LogitsState) -> DeferredLogits:
        """Make one that no gradient flows through. See `defer`."""
        made: DeferredLogits = make_wrapper_subclass(
            cls, state.shape, dtype=state.sample.dtype, device=state.sample.device
        )
        made.state = state
        made.materialized = None
        made.shares_memory = False
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # upstream has no types
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _answer(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # upstream's types leave the class out
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Called by torch's own C++: autograd makes a second object of what a function returns as it is.
        if function in _ALIASES:
            return DeferredLogits(args[0].state)
        raise unsupported(str(function))


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)


# --- The graph. ---


def defer(state: LogitsState, *sources: Tensor) -> DeferredLogits:
    """Return logits that are computed when a loss or another number is computed from them.

    `sources` are what they come from in the graph; if none of them needs a gradient, none flows.
    """
    if not torch.is_grad_enabled():
        return DeferredLogits(state)
    made: DeferredLogits = _Deferred.apply(state, *sources)  # type: ignore[no-untyped-call]  # upstream
    return made


class _Deferred(torch.autograd.Function):
    """Gives deferred logits their place in the graph, behind what they are made of.

    No gradient comes this way: a loss that is computed from logits has its own way to the hidden states. But engines
    look into the graph (DDP for parameters without a gradient), and put functions of their own into it, which must run
    in backward (`link_to_logits`).
    """

    @staticmethod
    def forward(ctx: Any, state: LogitsState, *sources: Tensor) -> DeferredLogits:
        ctx.set_materialize_grads(False)
        ctx.num_sources = len(sources)
        ctx.is_made_of_logits = isinstance(sources[0], DeferredLogits)
        return DeferredLogits(state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, ...]:
        if gradient is not None:
            raise unsupported("A backward")
        nothing: tuple[None, ...] = (None,) * (1 + ctx.num_sources)
        return nothing


def allows_gradient(logits: DeferredLogits) -> bool:
    """Whether a gradient is to flow through what is computed from logits now.

    Raises `UnsupportedError` if somebody else's function stands around the logits in the graph: its backward would be
    missed.
    """
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return False
    for name in _nodes_around(logits) - _ENGINE_NODES:
        raise unsupported(f"A backward through {name}, which somebody put around them,")
    return True


def link_to_logits(value: Tensor, logits: DeferredLogits) -> Tensor:
    """Return a value that was computed from the hidden states, whose backward engines see as one of the logits."""
    if not value.requires_grad:
        return value
    if DDP_NODE in _nodes_around(logits):
        value = _LinkedToLogits.apply(value, logits)  # type: ignore[no-untyped-call]  # upstream
    for hook in logits.state.head_call.hooks.values():
        value.register_hook(hook)  # type: ignore[no-untyped-call]  # upstream
    return value


class _LinkedToLogits(torch.autograd.Function):
    """Puts a tensor that was computed from the hidden states behind the logits in the graph."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, logits: DeferredLogits) -> Tensor:
        # Not a view of `value`: a view could not be written to.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


_ZERO3_NODE = "PreBackwardFunctionForModuleBackward"
"""ZeRO-3's node around what each module returns: it gathers the module's weight, which each chunk's own call does too.
Its backward would get zeros of the size of the logits."""

_ENGINE_NODES = frozenset({DDP_NODE, _ZERO3_NODE})


def _nodes_around(logits: DeferredLogits) -> set[str]:
    """Return the names of the nodes in the graph between these logits and what the head returned, except for ours."""
    names: set[str] = set()
    node, place = logits.grad_fn, logits.output_nr
    while node is not None:
        if isinstance(node, node_class_of(_Deferred)):
            # What the head's own logits come from are the hidden states.
            node, place = node.next_functions[0] if node.is_made_of_logits else (None, 0)
            continue
        names.add(node.name())
        befores = [before for before in node.next_functions if before[0] is not None]
        node, place = befores[min(place, len(befores) - 1)] if befores else (None, 0)
    return names


# --- Which way a function of torch is answered. ---


def _answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of torch returns for deferred logits, which are among its arguments.

    Raises `UnsupportedError` if not even the real logits would do.
    """
    name = function.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return _get_property(function, name, args)
    if name in row_operations.METADATA:
        return _run_natively(function, args, kwargs)
    if name in row_operations.WANT_GRADIENT:
        return _register_hook(name, args)
    # These need nothing but the shape of their second argument.
    given = args[:1] if name in ("view_as", "reshape_as") else (*args, *kwargs.values())
    deferred = [value for value in given if isinstance(value, DeferredLogits)]
    if len(deferred) == 1 and deferred[0].materialized is None:
        position = next((place for place, value in enumerate(args) if value is deferred[0]), None)
        if position is not None and "out" not in kwargs:
            found = _answer_deferred(function, deferred[0], position, args, kwargs)
            if found is not NotImplemented:
                return found
    return _answer_materialized(function, args, kwargs)


def _run_natively(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _get_property(function: Callable[..., Any], kind: str, args: tuple[Any, ...]) -> Any:
    name = getattr(getattr(function, "__self__", None), "__name__", "")
    logits = args[0]
    if kind != "__get__":
        raise unsupported(f"Setting {name}")
    if name == "data":
        return logits.detach()
    if name in row_operations.VIEWED_PROPERTIES:
        return function(_materialize(logits, name))
    return _run_natively(function, args, {})


def _register_hook(name: str, args: tuple[Any, ...]) -> RemovableHandle:
    """Run an engine's hook before the backward of what is computed from the logits; refuse everybody else's."""
    # FSDP registers one on what a module returns, to gather weights before they are needed, and leaves the gradient as
    # it is.
    if name == "register_hook" and _leaves_gradient(args[1]):
        hooks = args[0].state.head_call.hooks
        handle = RemovableHandle(hooks)
        hooks[handle.id] = args[1]
        return handle
    raise unsupported(f"The gradient ({name})")


def _leaves_gradient(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    # A hook that torch makes for several tensors has the user's hook in its closure.
    inside = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    origins = [getattr(each, "__module__", None) for each in (hook, *inside) if callable(each)]
    return any(f"{origin}.".startswith(_PASSIVE_HOOK_MODULES) for origin in origins)


def _answer_deferred(
    function: Callable[..., Any], logits: DeferredLogits, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Answer without the real logits, or with NotImplemented."""
    name = function.__name__
    if logits.state.has_classes_first and name not in row_operations.CASTS and name not in _LOSSES:
        return NotImplemented
    if name in row_operations.ELEMENTWISE:
        return _apply_to_rows(function, logits, position, args, kwargs)
    if position != 0:
        return NotImplemented
    if row_operations.is_in_place(name):
        return _apply_in_place(name, logits, args, kwargs)
    if name in row_operations.REDUCTIONS:
        reduction = row_operations.reduction_of_rows(function, name, logits.shape, args[1:], kwargs)
        return NotImplemented if reduction is None else _compute_rows(logits, reduction[0], *reduction[1])
    if name in _LOSSES:
        return _loss(name, logits, args, kwargs)
    if name in row_operations.ALONG_ROWS:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        is_along = row_operations.is_of_vocabulary(dim, logits.dim())
        return _apply_to_rows(function, logits, 0, args, kwargs) if is_along else NotImplemented
    return _move_rows(name, logits, args, kwargs)


def _move_rows(name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer by moving rows, or with NotImplemented."""
    if name == "__getitem__":
        return _index(logits, args[1])
    if row_operations.puts_classes_first(name, logits.shape, *args[1:], **kwargs):
        return _with_classes_first(logits)
    if name in row_operations.MOVES:
        hidden = row_operations.MOVES[name](logits.state.hidden, logits.shape, *args[1:], **kwargs)
        return _move(logits, name, hidden)
    return NotImplemented


def _answer_materialized(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with the real logits."""
    name = function.__name__
    writes = row_operations.is_in_place(name) and isinstance(args[0], DeferredLogits)
    if writes and args[0].shares_memory:
        raise unsupported(f"A write ({name}) into memory that they share with others")
    if isinstance(kwargs.get("out"), Tensor):
        raise unsupported(f"Taking in the result of {name}")
    real_args, real_kwargs = tree_map_only(DeferredLogits, partial(_materialize, name=name), (args, kwargs))
    found = function(*real_args, **real_kwargs)
    return args[0] if writes and found is real_args[0] else found


# --- Operations that return deferred logits: stored, or done to the hidden states. ---


def _apply_to_rows(
    function: Callable[..., Any], logits: DeferredLogits, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the logits after an operation on each row; NotImplemented if an operand differs from row to row.

    `position` is that of the logits in `args`.
    """
    others = (*args[:position], *args[position + 1 :], *kwargs.values())
    is_cast = function.__name__ in row_operations.CASTS
    if is_cast:
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    elif not all(row_operations.is_same_for_rows(other, logits.dim()) for other in others):
        return NotImplemented
    if not logits.requires_grad and any(isinstance(other, Tensor) and other.requires_grad for other in others):
        return NotImplemented
    state = logits.state
    stored = (*args[:position], None, *args[position + 1 :])
    operation = RowOperation.of(function, stored, kwargs, position, logits.dim())
    sample = operation.run(state.sample)
    if is_cast:
        if (sample.dtype, sample.device) == (state.sample.dtype, state.sample.device) and not kwargs.get("copy"):
            return logits
        # Not as it was called: `type_as`, say, would keep its operand alive.
        operation = replace(
            operation, function=Tensor.to, args=(None, sample.device, sample.dtype), kwargs={}, position=0
        )
    return _derive(logits, replace(state, operations=(*state.operations, operation), sample=sample))


def _apply_in_place(name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on each row to the logits themselves; NotImplemented if that cannot be."""
    if logits.shares_memory or not torch.is_grad_enabled():
        return NotImplemented
    if name == "__setitem__":
        made = _with_columns_set(logits, *args[1:])
    elif (plain := name.removesuffix("_")) in row_operations.ELEMENTWISE:
        made = _apply_to_rows(getattr(Tensor, plain), logits, 0, args, kwargs)
    else:
        return NotImplemented
    if made is NotImplemented or made.dtype != logits.dtype:
        return NotImplemented
    logits.state = made.state
    return logits


def _with_columns_set(logits: DeferredLogits, index: Any, value: Any) -> Any:
    split = row_operations.split_index(index, logits.dim())
    if split is None or not row_operations.are_all(split[0]):
        return NotImplemented
    return _apply_to_rows(row_operations.with_columns_set, logits, 0, (logits, split[1], value), {})


def _move(logits: DeferredLogits, name: str, hidden: Any) -> Any:
    """Return the logits of hidden states that were moved as the logits are to be.

    `hidden` is None, and the result NotImplemented, if that cannot be done to the hidden states.
    """
    if hidden is None:
        return NotImplemented
    if isinstance(hidden, tuple | list):
        return tuple(_move(logits, name, each) for each in hidden)
    if name == "contiguous":
        return logits
    state = replace(logits.state, hidden=hidden, version=hidden._version)
    is_same = hidden is logits.state.hidden
    made = DeferredLogits(state) if name == "detach" else _derive(logits, state, is_same=is_same)
    if name != "clone" and isinstance(made, DeferredLogits):
        logits.shares_memory = made.shares_memory = True
    return made


def _with_classes_first(logits: DeferredLogits) -> Any:
    """Return logits [B, S, V] as [B, V, S]."""
    made = _derive(logits, replace(logits.state, has_classes_first=True), is_same=True)
    logits.shares_memory = made.shares_memory = True
    return made


def _index(logits: DeferredLogits, index: Any) -> Any:
    """Return a part of the logits; NotImplemented if positions and vocabulary are indexed together."""
    split = row_operations.split_index(index, logits.dim())
    if split is None:
        return NotImplemented
    positions, columns = split
    if isinstance(columns, slice) and columns == row_operations.ALL:
        return _move(logits, "__getitem__", logits.state.hidden[positions])
    if not row_operations.are_all(positions):
        is_basic = row_operations.is_basic(positions)
        return logits[(*positions, row_operations.ALL)][..., columns] if is_basic else NotImplemented
    if isinstance(columns, int):
        return _compute_rows(logits, lambda rows: rows[:, columns])
    made = _apply_to_rows(Tensor.__getitem__, logits, 0, (logits, (..., columns)), {})
    logits.shares_memory = made.shares_memory = True
    return made


def _derive(logits: DeferredLogits, state: LogitsState, *, is_same: bool = False) -> Any:
    """Return logits made from others; a single row is computed at once."""
    is_detached = logits.state.is_detached or not (is_same or torch.is_grad_enabled())
    made = defer(replace(state, is_detached=is_detached), logits)
    return made if len(state.shape) > 1 else _materialize(made, "a row")


# --- Values: computed in chunks, or from the real logits. ---


def _loss(name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return one of `_LOSSES` in float32, for logits in a lower precision as well; NotImplemented if torch must do it.

    `logits` are [T, V] or [B, V, S]; `args` and `kwargs` include them.
    """
    bound = _SIGNATURES[name].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    target, weight, leading = given["target"], given["weight"], logits.state.hidden.shape[:-1]
    has_classes = isinstance(target, Tensor) and not target.is_floating_point() and target.shape == leading
    is_in_order = logits.dim() == 2 or logits.state.has_classes_first
    if not (is_in_order and has_classes) or given["size_average"] is not None or given["reduce"] is not None:
        return NotImplemented
    exact: Any = logits.to(torch.promote_types(logits.dtype, torch.float32))
    options = {"label_smoothing": given["label_smoothing"]} if name == "cross_entropy" else {}
    # The proof is given what the caller wrote, and prepares it by itself.
    loss = LossCall(_LOSSES[name], target, weight, given["ignore_index"], given["reduction"], options)
    proof = _proof(loss, logits)
    loss = replace(loss, target=target.flatten(), weight=None if weight is None else weight.to(exact.dtype, copy=True))
    compute = partial(_in_chunks, exact)
    value = chunked_loss.loss_in_chunks(compute if proof is None else partial(proof.compute, compute), loss)
    value = link_to_logits(value if value.dim() == 0 else value.view(leading), logits)
    if proof is not None:
        proof.check_loss(value)
    return value


def _proof(loss: LossCall, logits: DeferredLogits) -> HeadProof | None:
    """Return the proof of a loss, if one is due."""
    region = logits.state.head_call.chunking.proof
    if region is None or not allows_gradient(logits):
        return None
    call = region.start_call(loss.function, [logits.state.hidden])
    return None if call is None or call.is_simulated else HeadProof(call, logits.state, loss)


def _compute_rows(logits: DeferredLogits, function: Callable[..., Any], *operands: Tensor) -> Any:
    """Return a function of each row, with the positions in their shape.

    `function` takes some rows [n, V] and their rows of the operands [..., k], and returns a tensor with n rows, or a
    named tuple of such.
    """
    leading = logits.shape[:-1]
    parts = _in_chunks(logits, function, *(operand.reshape(-1, operand.shape[-1]) for operand in operands))
    if isinstance(parts[0], Tensor):
        return link_to_logits(_joined(parts, leading), logits)
    joined = (_joined(each, leading) for each in zip(*parts, strict=True))
    return type(parts[0])([link_to_logits(each, logits) for each in joined])


def _joined(parts: Any, leading: torch.Size) -> Tensor:
    joined = torch.cat(list(parts))
    return joined.view(*leading, *joined.shape[1:])


def _in_chunks(
    logits: DeferredLogits, function: Callable[..., Any], *operands: Tensor, watch: chunked_loss.Watch | None = None
) -> list[Any]:
    """Return what a function returns for each chunk of rows; see `chunked_loss.in_chunks`."""
    state, has_gradient = logits.state, allows_gradient(logits)
    rows = state.rows(has_gradient=has_gradient)
    with torch.set_grad_enabled(has_gradient):
        lengths = state.head_call.lengths(len(rows))
        return in_chunks(state.head_call, state.operations, rows, lengths, function, *operands, watch=watch)


def _materialize(logits: DeferredLogits, name: str) -> Tensor:
    """Return the real logits, and keep them, as they are usually needed again. Warns of their size once."""
    if logits.materialized is None:
        _warn_of_size(logits, name)
        state, has_gradient = logits.state, allows_gradient(logits)
        with torch.set_grad_enabled(has_gradient):
            rows = compute_logits(state.head_call, state.operations, state.rows(has_gradient=has_gradient))
            found = rows.view(*state.hidden.shape[:-1], rows.shape[-1])
        logits.materialized = link_to_logits(found.movedim(-1, 1) if state.has_classes_first else found, logits)
    return logits.materialized


def _warn_of_size(logits: DeferredLogits, name: str) -> None:
    head_call = logits.state.head_call
    # Up to as many rows as a chunk has cost no more than the loss does.
    if logits.shape[:-1].numel() <= max(head_call.lengths(head_call.num_rows)) or head_call.chunking.has_warned:
        return
    head_call.chunking.has_warned = True
    logger.warning(
        "head: chunked keeps logits from being held, but %s asks for all of them (%s in %s, %.2f GiB), and gets them. "
        "Compute it with torch.nn.functional.cross_entropy or from a few rows at a time, or leave head: chunked out.",
        name,
        tuple(logits.shape),
        str(logits.dtype).removeprefix("torch."),
        logits.numel() * logits.element_size() / 2**30,
    )
