"""Where a difference comes from: the first layer in backward order, in it the first operator, and the likely cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_ckpt.regions.execution_state import is_extra_run, is_in_backward
from hf_ckpt.upstream.torch import TorchDispatchMode
from hf_ckpt.verify.record import Gradients, Record, Recorder, tensor_digest, tensors_in

# Selective checkpointing keeps the outputs of these, so they are missing in a recomputation.
_KEPT = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_dot_product")
# Checkpointing detaches what it saves.
_NOT_COMPUTING = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")
_ENGINES = ("c10d.", "_c10d_functional.", "c10d_functional.", "fsdp.", "record_param_comms", "profiler.")
# Memory that nobody has written to yet.
_UNWRITTEN = ("empty", "new_empty", "resize_")
# Operators that draw random numbers; attention kernels do so for dropout.
_RANDOM = (
    *("bernoulli", "native_dropout", "_fused_dropout", "rand", "normal", "uniform", "multinomial", "exponential"),
    *("rrelu_with_noise", "_scaled_dot_product", "geometric", "log_normal", "poisson"),
)
_CHANGED_SHAPES = re.compile("number of tensors|different metadata|where the forward saved", re.DOTALL)
RANDOM = "random state was not preserved: recomputation drew other random numbers than the forward"
IN_PLACE = (
    "an in-place write behind a kept output: what the forward computed was kept for recomputation and written into "
    "afterwards, so that recomputation starts from changed values"
)
BRANCH = "a branch taken differently: recomputation ran other operators than the forward"
ROUTER = "the router routed differently: the chosen expert indices of recomputation are not those of the forward"
REENTRANT = (
    "reentrant checkpointing (use_reentrant=True): gradients of tensors that layers share other than through their "
    "inputs, such as shared keys and values, are lost. Use non-reentrant checkpointing"
)
NO_OUTPUT_GRADIENT = (
    "with the plan, and only then, a layer's output requires no gradient: reentrant checkpointing "
    "(use_reentrant=True) with no input that requires one. Use non-reentrant checkpointing, or "
    "input_require_grads: true"
)
AUTOCAST = "autocast was lost in recomputation"
OTHER_INPUTS = (
    "every recomputed operator repeats its forward twin, so that the gradient is lost or changed around the layer: a "
    "tensor that reaches it other than through its inputs, or a detached one"
)
CHANGED = "recomputation started from other values than the forward: a module or a tensor that it reads was changed"


@dataclass(frozen=True)
class FirstDifference:
    """Where reference and planned trial begin to differ in backward."""

    layer: str  # its path, or that of a parameter outside of all layers
    micro_batch: int  # counted over all steps


@dataclass(frozen=True)
class Operator:
    """One operator that ran."""

    name: str  # as `aten.mm.default`
    module: str  # path of the module that ran it
    outputs: tuple[str, ...]  # digests, taken before anything could write to them
    has_gradients: bool  # gradients were enabled
    has_indices: bool  # it returned whole numbers, as a router does


@dataclass(frozen=True)
class OperatorDifference:
    """The first recomputed operator that differs from the forward's."""

    forward: Operator | None
    """The same operator in the forward, or what the forward ran in its place; None after its last operator."""
    recomputed: Operator
    kept: tuple[Operator, ...] = ()  # Operators of the forward, right before `forward`, that recomputation did not run.
    indices_differ: bool = False  # This or a later operator of the same module returned other whole numbers.


# --- The first layer. ---


def first_differing_layer(reference: Record, planned: Record) -> FirstDifference | None:
    """Return the first layer, in backward order, whose input gradient differs while that at its output is equal."""
    pairs = zip(reference.micro_batches, planned.micro_batches, strict=False)
    for number, (expected, got) in enumerate(pairs):
        there, here = dict(expected.layer_gradients), dict(got.layer_gradients)
        equal_behind = True
        for (path, side), digest in expected.layer_gradients:
            # Inputs may require a gradient in one of the two trials only.
            if (path, side) not in here:
                continue
            is_equal = digest == here[path, side]
            if not is_equal and side == "input" and equal_behind:
                return FirstDifference(path, number)
            if side == "output":
                equal_behind = is_equal and there[path, side] == digest
    return None


def layer_of_first_differing_parameter(reference: Gradients, planned: Gradients, layers: Sequence[str]) -> str | None:
    """Return the last layer with a parameter whose gradient differs: in backward it comes first."""
    differing = []
    for name, expected in reference.items():
        got = planned.get(name)
        is_equal = expected is got if expected is None or got is None else torch.equal(expected, got)
        differing += [] if is_equal else [name]
    for layer in reversed(layers):
        if any(name.startswith(layer + ".") for name in differing):
            return layer
    return differing[0] if differing else None


# --- The first operator. ---


class OperatorWatch(TorchDispatchMode):
    """Records the operators of one layer in one micro-batch: those of its forward, and those of its recomputation."""

    def __init__(self, layer: str, micro_batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch publishes it without types
        self.layer = layer
        self.micro_batch = micro_batch
        self.recorder: Recorder | None = None
        self.forward: list[Operator] = []
        self.recomputed: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note it if the watched layer ran it."""
        output = func(*args, **(kwargs or {}))
        assert self.recorder is not None, "the trial gives the watch its recorder"
        if self.recorder.is_digesting or is_extra_run():
            return output
        if not is_in_backward():
            if self.recorder.is_inside(self.layer):
                self.forward.append(_operator(func, self.recorder.current_module, output))
        # Autograd's own operators run without gradients, recomputed ones with them.
        # Meta tensors take the place of matrix products in selective recomputation, and of what depends on them.
        elif (
            torch.is_grad_enabled()
            and self.recorder.current_layer == self.layer
            and not any(tensor.is_meta for tensor in tensors_in(output))
        ):
            self.recomputed.append(_operator(func, self.recorder.current_module, output))
        return output

    def first_difference(self) -> OperatorDifference | None:
        """Return the first recomputed operator that differs from the same operator in the forward."""
        # A reentrant checkpoint runs its whole forward without gradients; elsewhere no such operator is recorded again.
        is_reentrant = not any(operator.has_gradients for operator in self.forward)
        forward = [op for op in self.forward if _is_computation(op) and (op.has_gradients or is_reentrant)]
        recomputed = [op for op in self.recomputed if _is_computation(op)]
        if not forward or not recomputed:
            return None
        pairs = list(_aligned(forward, recomputed))
        for number, (forward_op, again, kept) in enumerate(pairs):
            if forward_op is None or forward_op.outputs != again.outputs or (kept and not _kept_operators(kept)):
                return OperatorDifference(forward_op, again, kept, _indices_differ(pairs[number:]))
        return None


def _operator(func: Any, module: str, output: Any) -> Operator:
    tensors = list(tensors_in(output))
    name = str(func)
    is_unwritten = name.removeprefix("aten.").startswith(_UNWRITTEN)
    return Operator(
        name=name,
        module=module,
        outputs=() if is_unwritten else tuple(tensor_digest(tensor) for tensor in tensors),
        has_gradients=torch.is_grad_enabled(),
        has_indices=any(not tensor.is_floating_point() and tensor.dtype != torch.bool for tensor in tensors),
    )


def _is_computation(operator: Operator) -> bool:
    """Whether an operator belongs to the layer's computation: checkpointing detaches, and engines gather weights."""
    return operator.name not in _NOT_COMPUTING and not operator.name.startswith(_ENGINES)


Pair = tuple[Operator | None, Operator, tuple[Operator, ...]]


def _aligned(forward: Sequence[Operator], recomputed: Sequence[Operator]) -> Iterator[Pair]:
    """Yield each recomputed operator with the same one in the forward, and with the operators skipped to get there."""
    first = _next_match(forward, 0, recomputed[0])
    at = first or 0
    for again in recomputed:
        found = _next_match(forward, at, again)
        if found is None and again.name == recomputed[0].name and again.module == recomputed[0].module:
            # A nested segment recomputes a layer twice.
            found = first
        if found is None and not again.module:
            # Without a module it may be the next layer's, before that enters its first module.
            continue
        if found is None:
            yield forward[at] if at < len(forward) else None, again, ()
            return
        yield forward[found], again, tuple(forward[at:found])
        at = found + 1


def _next_match(forward: Sequence[Operator], start: int, again: Operator) -> int | None:
    return next(
        (
            at
            for at in range(start, len(forward))
            if forward[at].name == again.name and again.module in ("", forward[at].module)
        ),
        None,
    )


def _kept_operators(skipped: Sequence[Operator]) -> list[Operator]:
    """Return those of the skipped operators whose outputs selective checkpointing keeps."""
    return [operator for operator in skipped if operator.name.removeprefix("aten.").startswith(_KEPT)]


def _indices_differ(pairs: Sequence[Pair]) -> bool:
    """Whether other whole numbers follow from here on, in the same module or in one directly inside it."""
    module = pairs[0][1].module
    return any(
        forward is not None and forward.has_indices and forward.outputs != again.outputs
        for forward, again, _ in pairs
        if module in (again.module, again.module.rpartition(".")[0])
    )


# --- The likely cause. ---


def likely_cause(reference: Record, planned: Record, difference: OperatorDifference | None) -> str:
    """Return the likely cause of a gradient that differs or of a recomputation that failed, as text."""
    if flag := next((change for change in planned.state_changes if change.what != "autocast"), None):
        call = "eval() or train() was called" if flag.what == "training" else "a flag was changed"
        values = f"{flag.in_forward!r}, then {flag.in_recomputation!r}"
        return f"{call} between forward and backward: {flag.what} of {flag.path} was {values}"
    if any(change.what == "autocast" for change in planned.state_changes):
        return AUTOCAST
    without_gradient = sorted(planned.no_output_gradient - reference.no_output_gradient)
    # No plan is reentrant. Where checkpointing is, other operators follow from that.
    if planned.reentrant - reference.reentrant and not without_gradient:
        return REENTRANT
    if difference is not None:
        return _of_operators(difference)
    if without_gradient:
        return f"{NO_OUTPUT_GRADIENT} ({without_gradient[0]})"
    failure = planned.failure
    if failure is not None and _CHANGED_SHAPES.search(str(failure.error)):
        return BRANCH
    return OTHER_INPUTS


def _of_operators(difference: OperatorDifference) -> str:
    forward, again = difference.forward, difference.recomputed
    # Where its outputs are the same, operators before it are missing whose outputs nothing keeps.
    if forward is None or forward.name != again.name or forward.outputs == again.outputs:
        return BRANCH
    if again.name.removeprefix("aten.").startswith(_RANDOM):
        return RANDOM
    if difference.indices_differ:
        return ROUTER
    if _kept_operators(difference.kept):
        return IN_PLACE
    return CHANGED


def describe_operators(difference: OperatorDifference) -> str:
    """Return which operator it is, and what the forward ran in its place, as a sentence without its full stop."""
    forward, again = difference.forward, difference.recomputed
    where = again.module or (forward.module if forward is not None else "") or "the layer"
    if forward is None:
        return f"Recomputation ran {again.name} in {where} behind the last operator of the forward"
    if forward.name != again.name:
        return f"The forward ran {forward.name} in {forward.module}, recomputation {again.name} in {where}"
    if forward.outputs == again.outputs:
        missing = ", ".join(operator.name for operator in difference.kept[:3])
        return f"Recomputation left out {missing} before {again.name} in {where}"
    kept_operator = next(iter(_kept_operators(difference.kept)), None)
    kept = f", behind {kept_operator.name}, whose output was kept" if kept_operator is not None else ""
    return f"The first recomputed operator that differs from its forward twin is {again.name} in {where}{kept}"
