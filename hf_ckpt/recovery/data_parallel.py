"""A process under DistributedDataParallel that runs a window of micro-batches again while the others wait for it.

Note [Alone among others]. What is sent in a window is what its forwards send when they begin (buffers, the order of
buckets) and the gradients of its last backward. A process that has failed before the first of those gradients has sent
nothing that the others would not have been sent in any case. It may take its time and run again, if it does not send
again what its forwards have sent. The others wait in their first bucket, need no message, and may stand on another
plan: checkpointing sends nothing. From the first gradient on a window cannot be left: the reducer does not take it
back, and nobody knows which of the others have it.

Once the last forward is done the reducer sends the gradients of whatever backward comes next. So where the last
micro-batch failed, it alone runs again: the sums of those before it are as they were, and each bitwise plan would give
the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.recovery.accumulation_window import Gradients, Window


class DataParallel:
    """What this process has sent in a window.

    Args:
        wrapper: around the model that is trained.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper
        self._trainable = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
        self._gradients = Gradients(self._trainable)
        self.begin_window()
        self._hooks = (
            wrapper.register_forward_pre_hook(partial(_before_wrapper, self)),
            wrapper.module.register_forward_pre_hook(partial(_before_module, self), prepend=True),
        )

    def remove(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()

    def begin_window(self) -> None:
        """An optimizer step begins."""
        self._num_begun = self._num_sent = 0
        self._begun_before: list[int] = []
        self._is_sending = False

    def begin_replay(self) -> int:
        """Micro-batches run again. Returns the number of the first of them."""
        first = len(self._begun_before) - 1 if self.syncs else 0
        self._num_begun = self._begun_before[first]
        self._is_sending = False
        return first

    @property
    def syncs(self) -> bool:
        """Whether the next backward sends gradients."""
        return bool(self._wrapper.require_backward_grad_sync)

    def begin_micro_batch(self) -> None:
        """A micro-batch begins that was not there before."""
        self._begun_before.append(self._num_begun)
        self._gradients = Gradients(self._trainable)

    def begin_again(self, *, syncs: bool) -> None:
        """A micro-batch begins again."""
        self._wrapper.require_backward_grad_sync = syncs
        self._gradients = Gradients(self._trainable)

    def fault(self, window: Window) -> str | None:
        """Return why a window cannot be run again by this process alone; None if it can."""
        if written := window.micro_batches[0].buffers.with_other_values():
            names = ", ".join(written[:4])
            return f"forwards change buffers ({names}), which DistributedDataParallel sends from process 0"
        if self._is_sending:
            return "memory ran out while DistributedDataParallel was sending buffers"
        if self.syncs and self._gradients.is_changed():
            return "its backward had begun to send gradients to the other processes, which cannot be taken back"
        return None


def _before_wrapper(sent: DataParallel, wrapper: nn.Module, args: Any) -> None:
    sent._num_begun += 1
    sent._is_sending = True
    if sent._num_begun <= sent._num_sent:
        wrapper.require_forward_param_sync = False  # type: ignore[assignment]


def _before_module(sent: DataParallel, module: nn.Module, args: Any) -> None:
    if sent._is_sending:
        sent._is_sending = False
        sent._num_sent = max(sent._num_sent, sent._num_begun)


def why_not_alone(trainer: Any, planning: Any) -> str | None:
    """Return why no window of a run of several processes is run again by one of them; None if it is.

    Args:
        trainer: that trains.
        planning: of policy `auto`, or None.
    """
    wrapper = getattr(trainer, "model_wrapped", None)
    if not isinstance(wrapper, DistributedDataParallel):
        return "several processes share the model, and no step is repeated in one of them alone"
    if wrapper.static_graph:
        return "DistributedDataParallel has a static graph, which is recorded from the steps that run"
    own = [name for name in ("training_step", "compute_loss") if not _is_trainers(trainer, name)]
    if own:
        what = " and ".join(f"{type(trainer).__name__}.{name}" for name in own)
        return f"{what} may send something of its own to the other processes"
    if getattr(trainer, "compute_loss_func", None) is not None:
        return "compute_loss_func may send something of its own to the other processes"
    if planning is not None and planning.compares_batches:
        return "the processes compare their batches before each forward, for no bound of them is known"
    return None


def why_not_evaluated_alone(trainer: Any) -> str | None:
    """Return why no batch of an evaluation is run again by one of several processes; None if it is."""
    if _is_trainers(trainer, "prediction_step"):
        return None
    return f"{type(trainer).__name__}.prediction_step may send something of its own to the other processes"


def _is_trainers(trainer: Any, name: str) -> bool:
    from transformers import Trainer

    return getattr(type(trainer), name) is getattr(Trainer, name)
