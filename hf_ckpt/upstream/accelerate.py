"""Private and version-dependent names of accelerate. Blocks: the state of a process, what it leaves on modules."""

from __future__ import annotations

from functools import partial
from typing import Any

from hf_ckpt.upstream import Feature

_feature = partial(Feature, seen="accelerate 1.7 to 1.15")

# --- The state of a process, which all objects of a kind share. ---

_STATE = _feature(
    "Reading accelerate's engine without starting one (FSDP, verify, losses of trl in estimate)",
    instead="Use DDP, and a fixed policy.",
    of="accelerate.state",
)


SHARED_STATE = _STATE.attribute("_shared_state")


def fsdp_plugin() -> Any:
    """Return accelerate's description of FSDP, or None where accelerate does not shard the model."""
    from accelerate.state import AcceleratorState

    # Asking AcceleratorState for its plugin would start one where there is none.
    state: dict[str, Any] | None = getattr(AcceleratorState, SHARED_STATE, None)
    if state is None:
        _STATE.warn(f"AcceleratorState.{SHARED_STATE}")
        return None
    return state.get("fsdp_plugin")


@_STATE
def shared_state(kind: Any) -> dict[str, Any]:
    """Return what all objects of a kind of state hold; empty where there is none."""
    found: dict[str, Any] = getattr(kind, SHARED_STATE)
    return found


@_STATE
def forget_state() -> None:
    """Let the process have no engine and no gradient accumulation, as before an Accelerator was made."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


_ACCUMULATION = _feature(
    'on_oom="escalate" with gradient accumulation', instead='Leave on_oom="escalate" out.', of="accelerate.state"
)


@_ACCUMULATION
def set_sync_gradients(gradient_state: Any) -> Any:
    """Return the method that says whether the micro-batch that comes is the last one of its step."""
    return gradient_state._set_sync_gradients


# --- What it leaves on modules. ---

_ON_MODULES = _feature(
    "Plans on models that accelerate has put hooks or autocast around",
    instead="Load the model without a device_map, and apply the plan before accelerate prepares it.",
    of="accelerate.hooks accelerate.accelerator",
)
HOOK = _ON_MODULES.attribute("_hf_hook")
"""The hook that moves a module's weights under a `device_map`."""
FORWARD_BEFORE_HOOK = _ON_MODULES.attribute("_old_forward")
"""The forward that a module had before such a hook."""
FORWARD_BEFORE_AUTOCAST = _ON_MODULES.attribute("_original_forward")
"""The forward that a model had before accelerate put autocast around it."""
