"""Axolotl's checkpointing with offload, as `activation_offloading: hidden_states` turns it on.

Every layer is checkpointed as transformers does it, and the input that each keeps is copied to pinned host memory on
a stream of its own. It is the one way of axolotl's that is its own: `activation_offloading: true` borrows trl's
offload, and with adapters recomputes nothing (see `trl_offload`).

Axolotl pins its own versions of transformers, peft and trl: environments/axolotl.txt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.side_by_side.contender import OFFLOAD_WARMUP, Contender, NotHereError
from benchmarks.side_by_side.theirs.transformers_own import enable, put_back

_MODULE = "axolotl.monkeypatch.checkpoint_activation_offload"
_DEVICES = ("cuda", "xpu", "npu")
"""Tensors of other devices it hands on as they are, without a word."""


@contextmanager
def _offloaded(model: nn.Module) -> Iterator[nn.Module]:
    axolotl = _imported()
    device = next(model.parameters()).device.type
    if device not in _DEVICES:
        raise NotHereError(
            f"axolotl offloads tensors of {', '.join(_DEVICES)} only; on {device} this is transformers' full "
            "checkpointing"
        )
    with put_back(model), _marks_taken_away(axolotl):
        enable(model)
        # Axolotl enters it anew for each step, which only waits for the copies of the step before.
        with axolotl.get_checkpoint_hidden_states_offloading_ctx_manager():
            yield model


def _imported() -> ModuleType:
    try:
        return import_module(_MODULE)
    except ImportError as error:
        raise NotHereError(f"axolotl cannot be imported: {error}") from error


@contextmanager
def _marks_taken_away(axolotl: ModuleType) -> Iterator[None]:
    """Undo what it does to the class of all layers: it has no way back of its own."""
    found = vars(GradientCheckpointingLayer).get("__call__")
    try:
        yield
    finally:
        if found is not None:
            GradientCheckpointingLayer.__call__ = found  # type: ignore[method-assign]
        elif "__call__" in vars(GradientCheckpointingLayer):
            del GradientCheckpointingLayer.__call__
        # It patches again only where this is None.
        vars(axolotl)["_ORIG_GRADIENT_CHECKPOINTING_LAYER_CALL"] = None


CONTENDERS = (
    Contender(
        name="axolotl_offload",
        title="axolotl, full with offload",
        group="elsewhere",
        enter=_offloaded,
        num_warmup=OFFLOAD_WARMUP,
    ),
)
