"""What one trial left behind, to be compared with another trial's. Data only: no hooks, no verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.verify.tolerance import Leeway

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class StateChange:
    """Something around a module that was not the same when it was recomputed.

    Args:
        path: the module.
        what: the flag, or "autocast", ...
        in_forward: its value in the forward.
        in_recomputation: its value in the recomputation.
    """

    path: str
    what: str
    in_forward: object
    in_recomputation: object


@dataclass(frozen=True)
class Failure:
    """An exception that ended a trial.

    Args:
        error: the exception.
        path: the layer whose forward or recomputation ran; empty outside of the layers.
        is_recomputing: whether it came while backward ran.
        step: optimizer steps done before.
    """

    error: Exception
    path: str
    is_recomputing: bool
    step: int


@dataclass
class MicroBatch:
    """One forward and backward.

    Args:
        loss: as the Trainer got it, not rounded.
        outputs: (module path, digests of the tensors that it returned), in the order in which forwards ended.
        layer_gradients: ((layer path, "input" or "output"), digest), in the order in which they came by in backward.
        random_state: digests of the generators' states after backward.
    """

    loss: float = float("nan")
    outputs: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    layer_gradients: list[tuple[tuple[str, str], str]] = field(default_factory=list)
    random_state: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WatchedLayer:
    """One layer, as far as forwards are counted in it.

    Args:
        path: the layer.
        entry: what the policy makes of it.
        attention: paths of its attention.
        ffn: paths of its ffn; empty where the layer's own forward computes it.
        recomputes_itself: whether it is a reversible layer, which recomputes under any plan.
        tiled: paths of what runs in slices of the sequence, each of them recomputed.
    """

    path: str
    entry: LayerPlan
    attention: tuple[str, ...]
    ffn: tuple[str, ...]
    recomputes_itself: bool
    tiled: tuple[str, ...] = ()


@dataclass(frozen=True)
class UserHook:
    """A hook or a replaced forward that is neither ours nor a library's.

    Args:
        path: the module that it is on.
        kind: "forward hook", "forward pre-hook", "backward hook", "backward pre-hook" or "forward".
        name: the function's name.
        change: what its visible state gained over the trial, in comparable form; None without visible state.
        runs_again: how often it ran in backward, in recomputation.
    """

    path: str
    kind: str
    name: str
    change: Any
    runs_again: int


@dataclass
class Record:
    """What one trial left behind.

    Args:
        folder: where the trial wrote its gradients, weights and what the Trainer saved.
        head: path of the head, where the plan runs it in chunks.
        leeway: how far it may be from a trial without the plan; None where not by a bit.
        elsewhere: those of `trainable` of which this process holds no part, because FSDP1 left them to others.
    """

    folder: Path
    layers: tuple[WatchedLayer, ...] = ()
    expected_plan: Plan | None = None
    plan: Plan | None = None
    head: str = ""
    leeway: Leeway | None = None
    callback_faults: list[str] = field(default_factory=list)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    num_steps: int = 0
    trainable: tuple[str, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    tensors_before: dict[str, str] = field(default_factory=dict)
    tensors_after: dict[str, str] = field(default_factory=dict)
    trained: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    entries: Counter[tuple[str, bool]] = field(default_factory=Counter)
    reached: set[str] = field(default_factory=set)
    cut_off: set[str] = field(default_factory=set)
    reentrant: set[str] = field(default_factory=set)
    state_changes: list[StateChange] = field(default_factory=list)
    replaced: dict[str, str] = field(default_factory=dict)
    hooks: list[UserHook] = field(default_factory=list)
    failure: Failure | None = None
    use_cache: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    generated: dict[str, Any] = field(default_factory=dict)
    logits: Tensor | None = None
    engine: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the model itself can be saved and run: FSDP1 keeps weights in its wrappers, and cannot on a CPU."""
        return self.engine != "fsdp1"

    def gradients(self, step: int) -> Gradients:
        """Return the gradients of an optimizer step, before clipping; of shards, this process's."""
        gradients: Gradients = _read(self._file("gradients", step))
        return gradients

    def keep_gradients(self, step: int, gradients: Gradients) -> None:
        """Write the gradients of a step; memory for all steps of all trials is not there on a real model."""
        _write(self._file("gradients", step), gradients)

    def weights(self) -> dict[str, Tensor]:
        """Return the trainable parameters after the last step; of shards, this process's."""
        weights: dict[str, Tensor] = _read(self._file("weights", self.num_steps))
        return weights

    def keep_weights(self, weights: dict[str, Tensor]) -> None:
        """Write the trainable parameters as they are after the last step."""
        _write(self._file("weights", self.num_steps), weights)

    def _file(self, what: str, step: int) -> Path:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self.folder / f"{what}_{step}_{rank}.pt"

    @property
    def saved(self) -> Path:
        """Folder of what `Trainer.save_model` wrote at the end."""
        return self.folder / "run"


def _read(file: Path) -> Any:
    return torch.load(file, mmap=True, weights_only=True)


def _write(file: Path, tensors: Mapping[str, Tensor | None]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not over the file itself: somebody may have it mapped.
    new = file.with_suffix(".part")
    torch.save({name: None if tensor is None else tensor.detach().cpu() for name, tensor in tensors.items()}, new)
    new.replace(file)
