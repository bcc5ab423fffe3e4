"""What most likely brought a difference about, in words."""

from __future__ import annotations

import re

from hf_ckpt.verify.localize import Operator, OperatorDifference, kept_ones
from hf_ckpt.verify.record import Record

# Operators that draw random numbers; attention kernels do where they are given dropout.
_RANDOM = (
    *("bernoulli", "native_dropout", "_fused_dropout", "rand", "normal", "uniform", "multinomial", "exponential"),
    *("rrelu_with_noise", "_scaled_dot_product", "geometric", "log_normal", "poisson"),
)
_CHANGED_SHAPES = re.compile("number of tensors|different metadata|saved .* tensors where|gave a tensor of", re.DOTALL)

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
CUT_OFF = (
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


def cause_of(reference: Record, planned: Record, difference: OperatorDifference | None) -> str:
    """Return the likely cause of a gradient that differs or of a recomputation that failed.

    Args:
        reference: a trial without the plan.
        planned: the trial with the plan.
        difference: the first operator that differs, if operators were looked at and one does.
    """
    if flag := next((change for change in planned.state_changes if change.what != "autocast"), None):
        call = "eval() or train() was called" if flag.what == "training" else "a flag was changed"
        values = f"{flag.in_forward!r}, then {flag.in_recomputation!r}"
        return f"{call} between forward and backward: {flag.what} of {flag.path} was {values}"
    if any(change.what == "autocast" for change in planned.state_changes):
        return AUTOCAST
    if difference is not None:
        return _of_operators(difference)
    if cut_off := sorted(planned.cut_off - reference.cut_off):
        return f"{CUT_OFF} ({cut_off[0]})"
    if planned.reentrant:
        return REENTRANT
    failure = planned.failure
    if failure is not None and _CHANGED_SHAPES.search(str(failure.error)):
        return BRANCH
    return OTHER_INPUTS


def _of_operators(difference: OperatorDifference) -> str:
    forward, again = difference.forward, difference.recomputed
    if forward is None or forward.name != again.name:
        return BRANCH
    if forward.outputs == again.outputs:
        # Its twin was found, but operators on the way to it are missing that nothing keeps.
        return BRANCH
    if _short(again).startswith(_RANDOM):
        return RANDOM
    if difference.indices_differ:
        return ROUTER
    if kept_ones(difference.kept):
        return IN_PLACE
    return CHANGED


def describe(difference: OperatorDifference) -> str:
    """Return which operator it is, and what the forward ran in its place."""
    forward, again = difference.forward, difference.recomputed
    where = again.module or (forward.module if forward is not None else "") or "the layer"
    if forward is None:
        return f"recomputation ran {again.name} in {where} behind the last operator of the forward"
    if forward.name != again.name:
        return f"the forward ran {forward.name} in {forward.module}, recomputation {again.name} in {where}"
    if forward.outputs == again.outputs:
        missing = ", ".join(operator.name for operator in difference.kept[:3])
        return f"recomputation left out {missing} before {again.name} in {where}"
    passed_over = next(iter(kept_ones(difference.kept)), None)
    kept = f", behind {passed_over.name}, whose output was kept" if passed_over is not None else ""
    return f"the first recomputed operator that differs from its forward twin is {again.name} in {where}{kept}"


def _short(operator: Operator) -> str:
    return operator.name.removeprefix("aten.")
