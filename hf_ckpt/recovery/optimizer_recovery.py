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

_NUMEL = 4096
"""Elements of the weights that an optimizer's temporaries are measured with; their step counters have one."""

Group = dict[str, Any]
Part = list[tuple[Group, nn.Parameter]]
"""Weights with their groups."""


class OptimizerSteps:
    """Runs the steps of a Trainer's optimizer.

    Attributes:
        num_recovered: steps that went on after memory had run out.
    """

    def __init__(self, trainer: Any) -> None:
        self.num_recovered = 0
        self._trainer = trainer
        # Accelerate's optimizer stands around it.
        self._optimizer: torch.optim.Optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self._temporaries: dict[int, Temporaries] = {}
        self._part_bytes: int | None = None

    def run(self, call: TrainerCall) -> Any:
        """Run a step, in parts if need be.

        Raises:
            OutOfMemoryError: says whether weights have been written to, and which checkpoint is the last good one.
        """
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
                parts[:1] = self._halves(parts[0], failure, is_written=is_written)
            is_retried = True
        self.num_recovered += is_retried
        return None

    def _attempt(self, call: TrainerCall, part: Part, *, is_whole: bool) -> Failure | None:
        """Step for some weights. Returns why nothing was written, if so; raises if memory ran out after that."""
        before = _WriteDetector(self._optimizer, part)
        _, failure = attempt(partial(self._try_temporaries, part))
        if failure is None:
            with _nothing_else(self._optimizer, part, is_whole=is_whole):
                _, failure = attempt(call)
            if failure is None:
                return None
            makes_state = any(frame.f_code.co_name == MAKES_STATE for frame, _ in walk_tb(failure.error.__traceback__))
            if not (makes_state and before.is_unwritten()):
                self._give_up(failure, is_written=True)
        before.remove_new_state()
        return failure

    def _halves(self, part: Part, failure: Failure, *, is_written: bool) -> list[Part]:
        if len(part) == 1:
            self._give_up(failure, is_written=is_written)
        self._part_bytes = sum(weight.nbytes for _, weight in part) // 2
        halves = _split(part, self._part_bytes)
        logger.warning(
            "Out of memory in the optimizer step of step %d, before anything of %s weights was written. It goes on in "
            "parts of %s and fewer, to the same result.",
            *(self._step, len(part), max(map(len, halves))),
        )
        return halves

    def _give_up(self, failure: Failure, *, is_written: bool) -> NoReturn:
        if is_written:
            state = "Weights may be half-way through the step, which cannot be undone. Do not save them."
        else:
            state = "No weight was written: they are as they were before the step."
        raise OutOfMemoryError(
            f"Out of memory in the optimizer step of step {self._step}. {failure.figures.describe()} {state}"
        ) from failure.error

    def _is_known(self, groups: Sequence[Group]) -> bool:
        """Whether the optimizer treats each weight by itself, calls nobody, and shows what it has written."""
        optimizer = self._optimizer
        every = (optimizer_pre_hooks, optimizer_post_hooks)
        hooks = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks, *itertools.chain(*every)]
        if type(optimizer) not in _KNOWN or hooks or getattr(self._trainer.accelerator, "scaler", None) is not None:
            return False
        # Fused kernels write past the versions of tensors, but for the counters of these.
        counts = isinstance(optimizer, torch.optim.Adam)
        return all(counts or not group.get("fused") for group in groups)

    def _try_temporaries(self, part: Part) -> None:
        """Allocate what the step will, group by group, and let go of it."""
        state: list[Tensor] = []
        for group, weights in _by_group(part):
            if id(group) not in self._temporaries:
                self._temporaries[id(group)] = Temporaries.of(self._optimizer, group)
            needed = self._temporaries[id(group)]
            # It stays when the group is done with, and those that follow find less.
            state += needed.new_state([weight for weight in weights if weight not in self._optimizer.state])
            needed.allocate(weights)

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1


_KNOWN = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.SGD, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor),
)
"""Those of torch that treat each weight by itself: all but LBFGS, Muon, and SparseAdam."""


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


class _WriteDetector:
    """What tells whether a step has written to some weights or their state."""

    def __init__(self, optimizer: torch.optim.Optimizer, part: Part) -> None:
        self._state = optimizer.state
        self._new = [weight for _, weight in part if weight not in optimizer.state]
        # Where all have their state, nothing is made of it before the first write.
        written = part if self._new else []
        self._versions = [(tensor, tensor._version) for _, weight in written for tensor in self._tensors(weight)]

    def _tensors(self, weight: nn.Parameter) -> Iterator[Tensor]:
        yield weight
        if weight in self._state:
            yield from (value for value in self._state[weight].values() if isinstance(value, Tensor))

    def is_unwritten(self) -> bool:
        """Whether neither what was there nor the counters of new state show a write."""
        if not self._new:
            return False
        counters = (self._state[weight].get("step", 0) for weight in self._new if weight in self._state)
        return all(tensor._version == version for tensor, version in self._versions) and not any(map(float, counters))

    def remove_new_state(self) -> None:
        """Take away what was made of a weight's state: half of it would be taken for the whole."""
        for weight in self._new:
            self._state.pop(weight, None)


# --- Temporaries. ---


@dataclass(frozen=True, slots=True)
class Temporaries:
    """What a step needs besides weights, gradients and the state that there is."""

    share: float
    """Of the bytes of the weights."""
    is_at_once: bool
    """Whether for all weights of a group at once, or one after the other."""
    state_share: float = 0.0
    """Of the bytes of a weight that has no state yet: what the step makes of it."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: Group) -> Temporaries:
        """Measure them: an optimizer of the same kind and options steps with two small weights on the CPU."""
        weights = group["params"]
        is_at_once = group.get("foreach")
        if is_at_once is None and not group.get("fused"):
            is_at_once = all(weight.device.type == "cuda" for weight in weights)
        options = {name: value for name, value in group.items() if name != "params"}
        if "foreach" in options and not options.get("fused"):
            options["foreach"] = bool(is_at_once)
        options.pop("capturable", None)
        with hidden_from_modes(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            twins = [nn.Parameter(torch.ones(_NUMEL, dtype=weights[0].dtype)) for _ in range(2)]
            for twin in twins:
                twin.grad = torch.ones_like(twin)
            make: Any = type(optimizer)
            twin_optimizer = make([{**copy.deepcopy(options), "params": twins}])
            twin_optimizer.step()
            state = [value for value in twin_optimizer.state[twins[0]].values() if isinstance(value, Tensor)]
            with _Peak() as peak:
                twin_optimizer.step()
        num_bytes = twins[0].nbytes * (2 if is_at_once else 1)
        # That of Adafactor has rows and columns only, where a weight has two dimensions.
        state_bytes = 0 if isinstance(optimizer, torch.optim.Adafactor) else sum(map(_nbytes_of_large, state))
        return cls(peak.num_bytes / num_bytes, bool(is_at_once), state_bytes / twins[0].nbytes)

    def new_state(self, weights: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return as much memory as the state of some weights needs."""
        return [_bytes_like(weight, self.state_share) for weight in weights if self.state_share]

    def allocate(self, weights: Sequence[nn.Parameter]) -> None:
        """Allocate them for some weights, and let go of them."""
        at_once = weights if self.is_at_once else [max(weights, key=lambda weight: weight.nbytes)]
        kept = [_bytes_like(weight, self.share) for weight in at_once]
        kept.clear()


def _bytes_like(weight: nn.Parameter, share: float) -> Tensor:
    return torch.empty(math.ceil(share * weight.nbytes), dtype=torch.uint8, device=weight.device)


def _nbytes_of_large(tensor: Tensor) -> int:
    # Of one element are counters, on the host for the most part.
    return tensor.nbytes if tensor.numel() > 1 else 0


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
        given = {id(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()
            # Of one element are counters and factors.
            if id(tensor) not in given and storage.nbytes() >= _NUMEL:
                self._made[storage_id(storage)] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}  # type: ignore[no-untyped-call]
        self.num_bytes = max(self.num_bytes, sum(num_bytes for _, num_bytes in self._made.values()))
        return output


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
