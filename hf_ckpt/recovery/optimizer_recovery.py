"""The optimizer's step where memory is short: what it needs is tried first, then it runs for some weights at a time.

A step that has begun to write cannot be undone. So before it begins the memory of its temporaries, and of state that it
is to make, is allocated and let go. Where that fails nothing has been written, and torch's optimizers, which treat each
weight by itself, run part by part: to the bit what they do for all weights at once. A failure after the first write
ends the run.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.recovery.accumulation_window import TrainerCall
from hf_ckpt.recovery.out_of_memory import Failure, attempt, release_memory
from hf_ckpt.upstream.torch import (
    MAKES_STATE,
    TorchDispatchMode,
    hidden_from_modes,
    optimizer_post_hooks,
    optimizer_pre_hooks,
    storage_id,
    tree_leaves,
)

logger = logging.getLogger(__name__)

# Elements of the weights that an optimizer's temporaries are measured with; their step counters have one.
_NUMEL = 4096
# Those of torch that treat each weight by itself: all but LBFGS, Muon, and SparseAdam.
_KNOWN = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor),
)

Group = dict[str, Any]
# Weights with their groups.
Part = list[tuple[Group, nn.Parameter]]


class OptimizerSteps:
    """Runs the steps of a Trainer's optimizer. `num_recovered` of them went on after memory had run out."""

    def __init__(self, trainer: Any) -> None:
        self.num_recovered = 0
        self._trainer = trainer
        # Accelerate's optimizer stands around it.
        self._optimizer: torch.optim.Optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self._temporaries: dict[int, Temporaries] = {}
        self._part_bytes: int | None = None

    def run(self, call: TrainerCall) -> Any:
        """Run a step, in parts if need be, or raise `OutOfMemoryError`: says whether weights have been written to."""
        groups: list[Group] = self._optimizer.param_groups
        whole = [(group, weight) for group in groups for weight in group["params"] if weight.grad is not None]
        if call.args or call.kwargs or not whole or not self._is_known(groups):
            returned, failure = attempt(call)
            if failure is not None:
                self._give_up(failure, is_written=True)
            return returned
        parts = _split(whole, self._part_bytes)
        is_written = is_retried = False
        while parts:
            failure = self._attempt(call, parts[0], is_whole=len(parts[0]) == len(whole))
            if failure is None:
                parts.pop(0)
                is_written = True
                continue
            release_memory()
            if is_retried:
                if len(parts[0]) == 1:
                    self._give_up(failure, is_written=is_written)
                self._part_bytes = sum(weight.nbytes for _, weight in parts[0]) // 2
                halves = _split(parts[0], self._part_bytes)
                logger.warning(
                    "Out of memory in the optimizer step of step %d, before anything of %s weights was written. It "
                    "goes on in parts of %s and fewer, to the same result.",
                    *(self._step, len(parts[0]), max(map(len, halves))),
                )
                parts[:1] = halves
            is_retried = True
        self.num_recovered += is_retried
        return None

    def _is_known(self, groups: Sequence[Group]) -> bool:
        """Whether the optimizer treats each weight by itself, calls nobody, and shows what it has written."""
        optimizer = self._optimizer
        every = (optimizer_pre_hooks, optimizer_post_hooks)
        hooks = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks, *itertools.chain(*every)]
        if type(optimizer) not in _KNOWN or hooks or getattr(self._trainer.accelerator, "scaler", None) is not None:
            return False
        # Fused kernels write past the versions of tensors, but for the counters of these.
        return isinstance(optimizer, torch.optim.Adam) or not any(group.get("fused") for group in groups)

    def _attempt(self, call: TrainerCall, part: Part, *, is_whole: bool) -> Failure | None:
        """Step for some weights. Returns why nothing was written, if so; raises if memory ran out after that."""
        state = self._optimizer.state
        new = [weight for _, weight in part if weight not in state]
        # Where all have their state, nothing is made of it before the first write.
        held = [weight for _, weight in part] if new else []
        values = [value for weight in held if weight in state for value in state[weight].values()]
        versions = [(each, each._version) for each in (*held, *values) if isinstance(each, Tensor)]
        _, failure = attempt(partial(self._try_temporaries, part))
        if failure is None:
            with _nothing_else(self._optimizer, part, is_whole=is_whole):
                _, failure = attempt(call)
            if failure is None:
                return None
            makes_state = any(frame.f_code.co_name == MAKES_STATE for frame, _ in walk_tb(failure.error.__traceback__))
            counters = [float(state[weight].get("step", 0)) for weight in new if weight in state]
            is_unwritten = bool(new) and all(each._version == was for each, was in versions) and not any(counters)
            if not (makes_state and is_unwritten):
                self._give_up(failure, is_written=True)
        for weight in new:
            # Half of a weight's state would be taken for the whole.
            state.pop(weight, None)
        return failure

    def _try_temporaries(self, part: Part) -> None:
        """Allocate what the step will, group by group, and let go of it."""
        state: list[Tensor] = []
        for group, weights in _by_group(part):
            if id(group) not in self._temporaries:
                self._temporaries[id(group)] = Temporaries.of(self._optimizer, group)
            needed = self._temporaries[id(group)]
            if needed.state_share:
                # It stays when the group is done with, and those that follow find less.
                new = [weight for weight in weights if weight not in self._optimizer.state]
                state += [_bytes_like(weight, needed.state_share) for weight in new]
            at_once = weights if needed.is_at_once else [max(weights, key=lambda weight: weight.nbytes)]
            kept = [_bytes_like(weight, needed.share) for weight in at_once]
            kept.clear()

    def _give_up(self, failure: Failure, *, is_written: bool) -> NoReturn:
        if is_written:
            state = "Weights may be half-way through the step, which cannot be undone. Do not save them."
        else:
            state = "No weight was written: they are as they were before the step."
        raise OutOfMemoryError(
            f"Out of memory in the optimizer step of step {self._step}. {failure.figures.describe()} {state}"
        ) from failure.error

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1


# --- Parts. ---


def _split(part: Part, part_bytes: int | None) -> list[Part]:
    """Split a part into runs of weights of at most so many bytes, or of one weight; None leaves it whole."""
    if part_bytes is None:
        return [part]
    parts: list[Part] = []
    room = 0
    for group, weight in part:
        if not parts or weight.nbytes > room:
            parts.append([])
            room = part_bytes
        parts[-1].append((group, weight))
        room -= weight.nbytes
    return parts


def _by_group(part: Part) -> Iterator[tuple[Group, list[nn.Parameter]]]:
    for _, found in itertools.groupby(part, key=lambda each: id(each[0])):
        pairs = list(found)
        yield pairs[0][0], [weight for _, weight in pairs]


@contextmanager
def _nothing_else(optimizer: torch.optim.Optimizer, part: Part, *, is_whole: bool) -> Iterator[None]:
    """Let an optimizer see no other weights while the block runs."""
    if is_whole:
        yield
        return
    groups = optimizer.param_groups
    found = [(group, group["params"]) for group in groups]
    try:
        optimizer.param_groups = []
        for group, weights in _by_group(part):
            group["params"] = weights
            optimizer.param_groups.append(group)
        yield
    finally:
        optimizer.param_groups = groups
        for group, weights in found:
            group["params"] = weights


# --- Temporaries. ---


@dataclass(frozen=True, slots=True)
class Temporaries:
    """What a step needs besides weights, gradients and the state that there is."""

    # Of the bytes of the weights.
    share: float
    # Whether for all weights of a group at once, or one after the other.
    is_at_once: bool
    # Of the bytes of a weight that has no state yet: what the step makes of it.
    state_share: float = 0.0

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: Group) -> Temporaries:
        """Measure them: an optimizer of the same kind and options steps with two small weights on the CPU."""
        weights = group["params"]
        is_at_once = group.get("foreach")
        if is_at_once is None and not group.get("fused"):
            is_at_once = all(weight.device.type == "cuda" for weight in weights)
        options = {name: value for name, value in group.items() if name not in ("params", "capturable")}
        if "foreach" in options and not options.get("fused"):
            options["foreach"] = bool(is_at_once)
        with hidden_from_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            twins = [nn.Parameter(torch.ones(_NUMEL, dtype=weights[0].dtype)) for _ in range(2)]
            for twin in twins:
                twin.grad = torch.ones_like(twin)
            make: Any = type(optimizer)
            twin_optimizer = make([{**copy.deepcopy(options), "params": twins}])
            twin_optimizer.step()
            state = twin_optimizer.state[twins[0]].values()
            # Of one element are counters, on the host for the most part.
            made_bytes = sum(each.nbytes for each in state if isinstance(each, Tensor) and each.numel() > 1)
            with _Peak() as peak:
                twin_optimizer.step()
        num_bytes = twins[0].nbytes * (2 if is_at_once else 1)
        # That of Adafactor has rows and columns only, where a weight has two dimensions.
        state_share = 0.0 if isinstance(optimizer, torch.optim.Adafactor) else made_bytes / twins[0].nbytes
        return cls(peak.num_bytes / num_bytes, bool(is_at_once), state_share)


def _bytes_like(weight: nn.Parameter, share: float) -> Tensor:
    return torch.empty(math.ceil(share * weight.nbytes), dtype=torch.uint8, device=weight.device)


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the most bytes that were alive of what operators made while this is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        given = set(map(id, tree_leaves((args, kwargs))))
        for tensor in tree_leaves(output):
            # Of one element are counters and factors.
            if isinstance(tensor, Tensor) and id(tensor) not in given and tensor.untyped_storage().nbytes() >= _NUMEL:
                storage = tensor.untyped_storage()
                self._made[storage_id(storage)] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}  # type: ignore[no-untyped-call]
        self.num_bytes = max(self.num_bytes, sum(num_bytes for _, num_bytes in self._made.values()))
        return output
