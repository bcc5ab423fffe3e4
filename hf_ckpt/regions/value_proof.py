"""Whether a recomputation gives, bit by bit, what the forward gave: checked while regions run, in one step or more.

A region that is due takes fingerprints of what its forward returns, and checksums of what the modules inside return.
Its recomputation, which then runs to the end, takes them again. If two fingerprints differ, the first module inside
whose checksums differ is named and a cause looked for.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.policy.options import Prove
from hf_ckpt.regions.execution_state import (
    AllRecomputed,
    Function,
    RandomState,
    computes_nothing,
    extra_run,
    is_extra_run,
    is_in_backward,
    module_of,
    modules_inside,
    runs_again,
)
from hf_ckpt.regions.fingerprints import (
    Fingerprint,
    all_equal,
    is_plain,
    largest_distance,
    plain_checksums,
    plain_fingerprints,
    plain_tensors,
    rounding_of,
    unobserved,
)
from hf_ckpt.regions.recomputation_errors import module_that_raised
from hf_ckpt.regions.routing import KeptRouting
from hf_ckpt.regions.selective.dispatch import selection_paused
from hf_ckpt.upstream.torch import current_graph_task_id, hidden_from_modes, queue_callback

logger = logging.getLogger(__name__)

# Hides what runs in a block from modes.
_unobserved = partial(unobserved, hidden_from_modes)

# Forwards without a backward after which a region is checked less often: in one of each step, and without steps in the
# 4th, 8th, 16th ... forward.
_TRIES = 3
# Units of rounding, relative to the norm, by which results of nondeterministic kernels may differ.
NOISE = 8.0
# That measure the noise of nondeterministic kernels. With the recomputation they are nine: a result that one run in
# three gives, and the others do not, is missing from them, or all there is, in one case of forty: (2/3)**9 + 3**-9.
MOST_RUNS = 8
# Times the largest difference between such runs that a forward may be off.
ALLOWED = 4

# Returns the proof of a call, from the region, the function that it calls and the tensors that the function gets.
CallProofFactory = Callable[["RegionProof", Function, Sequence[Any]], "CallProof | None"]


class ValueProof:
    """Which values of one plan's regions are proven, and what was found. Lives on the regions, and is copied with them.

    `faults` are those found since they were last taken, by the path of their region.
    """

    def __init__(self, prove: Prove = "off") -> None:
        self.prove = prove
        self._regions: list[RegionProof] = []
        # By kind: what is like it is not held against the original as well.
        self._representatives: dict[Hashable, RegionProof] = {}
        self._start()

    def _start(self) -> None:
        self.faults: dict[str, str] = {}
        # A simulated step puts its own in its place.
        self.make_call_proof: CallProofFactory = _call_proof
        self._has_steps = False
        self._num_steps = 0
        self._is_open = False
        self._has_said_noise = self._has_said_inputs = False
        self._raised_by: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What was found belongs to this model's steps, which a copy has not run.
        return {"prove": self.prove, "_regions": self._regions, "_representatives": self._representatives}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def region(self, path: str, kind: Hashable = None) -> RegionProof:
        """Return the proof of a new region; `path` is that of its module, for messages.

        The last region of each `kind` is held against the original: it is the first one in backward. None: it is not.
        """
        region = RegionProof(self, path)
        self._regions.append(region)
        if kind is not None:
            self._representatives[kind] = region
        return region

    def represents(self, region: RegionProof) -> bool:
        """Whether a region is the one of its kind that is held against the original."""
        return any(each is region for each in self._representatives.values())

    @property
    def without_original(self) -> list[str]:
        """The paths of regions that were to be held against the original, have run and were not."""
        return [each.path for each in self._representatives.values() if each.is_seen and not each.has_original]

    # --- Steps. Without calls of `begin_step` each forward of a region counts as a step. ---

    def begin_step(self) -> None:
        """A training step begins. Its first micro-batch is checked if it is due, or if a due one was missed."""
        self._has_steps = True
        is_due = self.is_due(self._num_steps)
        self._num_steps += 1
        for region in self._regions:
            region.begin_step(is_due)
        self._is_open = self.prove != "off"

    def take_faults(self) -> list[str]:
        """End the proof of the step, and return what was found as sentences."""
        self._is_open = False
        found, self.faults = self.faults, {}
        return _as_sentences(found)

    @property
    def is_open(self) -> bool | None:
        """Whether awaited regions are to be checked now; None if `begin_step` is not called."""
        return self._is_open if self._has_steps else None

    def is_due(self, number: int) -> bool:
        """Whether the step, or forward, after `number` earlier ones is to be checked."""
        if self.prove == "off":
            return False
        return number == 0 if self.prove == "first_step" else number % self.prove == 0

    @property
    def unseen(self) -> list[str]:
        """The paths of regions that were never called, or that a compiler runs."""
        return [region.path for region in self._regions if not region.is_seen]

    # --- What regions report. ---

    def finish_call(self, path: str, fault: str | None) -> None:
        """A region was recomputed, in the micro-batch that is the last one to be checked."""
        self._is_open = False
        if fault is not None:
            self.add_fault(path, fault)

    def add_fault(self, path: str, fault: str) -> None:
        """Record a fault. Without `begin_step` it is raised at the end of the backward that runs."""
        self.faults.setdefault(path, fault)
        if self._has_steps:
            return
        if not is_in_backward():
            self._raise()
        elif self._raised_by != (backward := current_graph_task_id()):
            self._raised_by = backward
            # At its end, when all faults are known; the caller of backward gets the error.
            queue_callback(self._raise)

    def raise_faults(self) -> None:
        """Raise the faults of a backward that ended in another exception, which drops the engine's callbacks."""
        if not self._has_steps:
            self._raise()

    def _raise(self) -> None:
        if faults := self.take_faults():
            raise PlanMismatchError("\n".join(faults))

    def note_other_inputs(self, path: str, operator: str) -> None:
        """Log, once, that a device feeds an operator something else in a recomputation."""
        if not self._has_said_inputs:
            self._has_said_inputs = True
            logger.warning(
                "%s: its recomputation feeds %s, whose output is kept, something else than its forward did. Kernels "
                "that do not repeat themselves, and noise of a generator that no module holds, would explain it: with "
                "such noise the gradients of this step are wrong. %s torch.use_deterministic_algorithms(True) chooses "
                "kernels that repeat themselves, and then this stops the step.",
                *(path, operator, "" if self.prove == "off" else "The next step proves which it is."),
            )

    def note_noise(self, path: str, distance: float) -> None:
        """Log, once, that a region's kernels are nondeterministic."""
        if not self._has_said_noise:
            self._has_said_noise = True
            logger.info(
                "%s: two recomputations differ by %.2g, relative to the norm, as much as the forward does: kernels "
                "here do not repeat themselves. torch.use_deterministic_algorithms(True) chooses others.",
                *(path, distance),
            )


class RegionProof:
    """The proof of one region.

    `is_awaited` says whether a recomputation is still to be checked, and `has_noise` whether kernels were seen that do
    not repeat themselves.
    """

    def __init__(self, proof: ValueProof, path: str) -> None:
        self.path = path
        self.proof = proof
        self._start()

    def _start(self) -> None:
        self.is_awaited = True
        self.has_noise = False
        self._num_forwards = 0
        self._tries = 0
        self.has_original = False
        self._is_original_due = True
        self._original: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "proof": self.proof}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def is_seen(self) -> bool:
        """Whether it has run without being compiled."""
        return self._num_forwards > 0

    def begin_step(self, is_due: bool) -> None:
        """See `ValueProof.begin_step`."""
        if is_due:
            self.is_awaited, self._tries, self._is_original_due = True, 0, True
        self._tries = min(self._tries, _TRIES - 1)

    def start_call(self, function: Function, tensors: Sequence[Any]) -> CallProof | None:
        """Return the proof of a call that begins, or None if none is due.

        `function` is bound to the module, or a `partial` whose first argument is the module.
        """
        proof = self.proof
        if proof.prove == "off" or not torch.is_grad_enabled() or is_extra_run():
            return None
        # A forward that a user runs in a hook is trained, and proven, like any other.
        if runs_again():
            return None
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1
        if proof.is_open is None and number and proof.is_due(number):
            self.begin_step(is_due=True)
        if proof.faults:
            proof.raise_faults()
        if not self.is_awaited or proof.is_open is False:
            return None
        if self._tries >= _TRIES and number & (number + 1):
            return None
        if not _has_gradients(function, tensors):
            return None
        call_proof = proof.make_call_proof(self, function, tensors)
        self._tries += call_proof is not None
        return call_proof

    def awaits_original(self) -> bool:
        """Whether the call that begins is to be held against the original: one of a forward, if the region is due."""
        proof = self.proof
        return (
            self._is_original_due
            and self.is_awaited
            and proof.prove != "off"
            and proof.is_open is not False
            and proof.represents(self)
            and (self._original is None or self._original() is None)
        )

    def begin_original(self, original: Any) -> None:
        """Note that a call is held against the original: no other one is while its graph lives."""
        self._original = weakref.ref(original)

    def end_original(self) -> None:
        """Note that a call was held against the original."""
        self.has_original, self._is_original_due = True, False

    def add_fault(self, fault: str) -> None:
        """See `ValueProof.add_fault`."""
        self.proof.add_fault(self.path, fault)

    def note_noise(self, distance: float) -> None:
        """See `ValueProof.note_noise`."""
        self.has_noise = True
        self.proof.note_noise(self.path, distance)

    def note_other_inputs(self, operator: str) -> None:
        """A device fed an operator whose output is kept something else; the next call proves whether that is noise."""
        if not self.has_noise:
            self.proof.note_other_inputs(self.path, operator)
            self.check_again()

    def check_again(self) -> None:
        """The region runs in another way from now on, which is to be checked too."""
        if self.proof.prove != "off":
            self.is_awaited, self._tries = True, 0

    def finish_call(self, fault: str | None) -> None:
        """A call that is checked has been recomputed."""
        self.is_awaited, self._tries = False, 0
        self.proof.finish_call(self.path, fault)


@dataclass(slots=True)
class _Run:
    """What one run of a call started from, returned and left behind."""

    given: list[Fingerprint]
    """Of what it started from, where that may differ by noise."""
    outputs: list[Fingerprint]
    modules: dict[str, list[Fingerprint]]
    """By name, of what the modules inside returned, call by call: checksums where whole outputs are compared too."""
    before: RandomState
    after: RandomState


class Original(Protocol):
    """Holds a call against the forward that its module had before the plan; see `original_proof`."""

    fault: str | None
    """What is wrong, unless the recomputation shows more."""

    def before_recomputation(self, tensors: Sequence[Tensor]) -> None:
        """Run the original: the region is about to be recomputed from `tensors`."""


class KeptValues(Protocol):
    """What a selective region keeps of a call."""

    def fault(self, *, is_fed: bool) -> str | None:
        """Return what is wrong with what its recomputation was handed, or with what it fed to operators."""

    def fed_distance(self) -> tuple[float | None, float]:
        """Return how far apart is what was fed in both runs, None if that is not known, and its unit of rounding."""


_UNKNOWN_CAUSE = (
    "A generator or other state that its module does not hold (as an attribute it would be brought back), a changed "
    "input, or saved_tensors_hooks that do not give back what they were given would explain it."
)
_KEPT_WRONG = (
    "Where nothing in the layer writes into it, this is a fault of hf_ckpt: please report it, and use another mode "
    "meanwhile."
)


class CallProof:
    """Checks the runs of one call: the forward, then its recomputations. `module` is None if it is not known."""

    is_simulated = False
    """Whether there are shapes only."""
    original: Original | None = None
    """What holds the call against the original, if it is held."""
    routing: KeptRouting | None = None
    """What routers chose in the call's forward, where that is kept."""
    is_given_noise = False
    """Whether what it is given may differ by noise of kernels: in a row of layers with routers that runs again."""
    differs_in: str | None = None
    """The first module inside of which a recomputation differed, once that is known."""

    def __init__(self, region: RegionProof, module: nn.Module | None) -> None:
        self._region = region
        self._module = module
        self._forward: _Run | None = None
        self._has_graph = True
        self._kept: weakref.ref[KeptValues] | None = None
        # Whether recomputation is to run on after the last tensor that backward needs. Under ZeRO-3 it cannot: weights
        # are freed when a module's forward ends, those of the last module while backward needs them.
        self.runs_to_end = module is None or "ds_id" not in vars(module)

    def run(self, function: Function, *tensors: Any) -> Any:
        """Run `function(*tensors)` and check it."""
        is_again = self._forward is not None
        returned, fault = self.run_and_compare(function, *tensors)
        if is_again:
            self.finish(fault)
        return returned

    def run_and_compare(self, function: Function, *tensors: Any) -> tuple[Any, str | None]:
        """Return what `function(*tensors)` returns and, from the second time on, what is wrong with that."""
        modules: dict[str, list[Fingerprint]] = {}
        if self._forward is None:
            self._has_graph = torch.is_grad_enabled()
        elif self.original is not None:
            self.original.before_recomputation(tensors)
        try:
            returned, run = self._run(function, tensors, modules)
        except AllRecomputed:
            # If it does not run to the end.
            if self._forward is not None:
                self.finish(self._find_fault_inside(self._forward, modules))
            raise
        except CheckpointError as error:
            if self._forward is not None:
                with _unobserved():
                    self._place_of_first(self._forward.modules, modules)
                # Where all modules that have ended agree, it is in the one that ran.
                self.differs_in = self.differs_in or module_that_raised(error, self._module)
            raise
        if self._forward is None:
            self._forward = run
            return returned, None
        with _unobserved():
            fault = self._find_fault(
                self._forward, run, returned, lambda: self._run_once_more(function, tensors, run.before)
            )
        return returned, fault

    def check_graph(self) -> None:
        """Check that gradients go through the region, once its forward has returned."""
        if not self._has_graph:
            self._region.add_fault("its forward ran without a graph, so that its weights get no gradient.")

    def finish(self, fault: str | None) -> None:
        """The call has been checked; see `RegionProof.finish_call`."""
        # A recomputation that differs says more: which module does, and why.
        self._region.finish_call(fault or (None if self.original is None else self.original.fault))

    # --- For proofs of tiles and of the head. ---

    def part_proof(self) -> CallProof:
        """Return the proof of a part of the call that runs, and is recomputed, by itself."""
        return CallProof(self._region, self._module)

    def fingerprints(self, tensors: Sequence[Tensor], *, has_sketch: bool = False) -> list[Fingerprint]:
        """Return the fingerprints of those tensors that are plain."""
        with _unobserved():
            return plain_fingerprints(tensors, has_sketch=has_sketch)

    def unobserved(self) -> AbstractContextManager[None]:
        """Hide what runs in the block from modes and from the region's own selection."""
        return _unobserved()

    def note_noise(self, distance: float) -> None:
        """See `ValueProof.note_noise`."""
        self._region.note_noise(distance)

    # --- What runs only for the check; a simulated step counts no time for it. ---

    def after_last_needed(self) -> None:
        """A recomputation has saved the last tensor that backward needs, and runs on."""

    @contextmanager
    def extra_run(self) -> Iterator[None]:
        """No backward needs what runs in the block."""
        yield

    # --- Outputs that selective regions keep. ---

    def watch_kept(self, kept: KeptValues) -> None:
        """Ask the region's kept outputs too. They hold this proof."""
        self._kept = weakref.ref(kept)

    def _fault_of_kept(self, *, is_fed: bool) -> str | None:
        kept = None if self._kept is None else self._kept()
        return None if kept is None else kept.fault(is_fed=is_fed)

    def _rounding_of_fed(self) -> float | None:
        """Return how far apart is what kept operators were fed, if rounding would explain it, else None."""
        kept = None if self._kept is None else self._kept()
        distance, rounding = (None, 0.0) if kept is None else kept.fed_distance()
        return distance if distance is not None and distance < NOISE * rounding else None

    def _run(
        self, function: Function, tensors: Sequence[Any], modules: dict[str, list[Fingerprint]]
    ) -> tuple[Any, _Run]:
        is_forward = self._forward is None
        with _unobserved():
            before = RandomState.of(list(tensors))
            given = plain_fingerprints(plain_tensors(tensors), has_sketch=True) if self.is_given_noise else []
        with self._hooks(modules):
            returned = function(*tensors)
        with _unobserved():
            after = RandomState.of(list(tensors))
            # A recomputation's sketches are wanted only where its hashes differ.
            outputs = plain_fingerprints(plain_tensors(returned), has_sketch=is_forward)
        return returned, _Run(given, outputs, modules, before, after)

    @contextmanager
    def _hooks(self, found: Any) -> Iterator[None]:
        """Fingerprint what the modules inside return while the block runs; see `_returned`."""
        with ExitStack() as hooks:
            for name, module in modules_inside(self._module):
                if not computes_nothing(module):
                    hooks.enter_context(module.register_forward_hook(partial(self._returned, found, name)))
            yield

    def _returned(self, found: Any, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Hook of the module with a name; `found` is a `_Run.modules` that is being filled."""
        if not torch.compiler.is_compiling():
            with _unobserved():
                tensors = plain_tensors(output)
                # With a sketch, which tells rounding from more, if no whole output will be there to compare.
                taken = plain_checksums(tensors) if self.runs_to_end else plain_fingerprints(tensors, has_sketch=True)
                found.setdefault(name, []).extend(taken)

    def _find_fault(
        self, forward: _Run, again: _Run, returned: Any, run_again: Callable[[], list[Fingerprint]]
    ) -> str | None:
        if (fault := self._fault_of_kept(is_fed=False)) is not None:
            return f"{fault} {_KEPT_WRONG}"
        if all_equal(forward.outputs, again.outputs):
            if _drawn_from(forward) & {*again.after.others_than(forward.after)}:
                return (
                    "its random numbers are not those of the forward: the state of the generators was not brought back."
                )
            if (fault := self._fault_of_kept(is_fed=True)) is not None:
                cause = _random_cause(forward, again)
                place = self._place_of_first(forward.modules, again.modules)
                if cause is None and self._rounding_of_fed() is not None:
                    # The outputs, being kept, are equal: those of a run that keeps nothing show the noise.
                    noise = explaining_noise(0.0, forward.outputs, run_again)
                    if noise is not None and noise < NOISE * rounding_of(forward.outputs):
                        self.note_noise(noise)
                        return None
                return f"{fault}{place} {cause or _UNKNOWN_CAUSE}"
            return None
        outputs = plain_fingerprints(plain_tensors(returned), has_sketch=True)
        distance = largest_distance(forward.outputs, outputs)
        cause = _random_cause(forward, again)
        if cause is None and distance is not None and distance < NOISE * rounding_of(forward.outputs):
            # Runs from the same inputs do not show noise of a layer before.
            noise = distance if differ_by_rounding(forward.given, again.given) else None
            noise = noise or explaining_noise(distance, outputs, run_again)
            if noise is not None:
                self.note_noise(noise)
                return None
        place = self._place_of_first(forward.modules, again.modules)
        why = cause or _UNKNOWN_CAUSE
        return f"its recomputation returns something else than its forward{by_distance(distance)}.{place} {why}"

    def _place_of_first(self, forward: dict[str, list[Fingerprint]], again: dict[str, list[Fingerprint]]) -> str:
        """Name the first module whose values differ, as a sentence; one that has not ended, by those that it has."""
        # In the order in which modules ended: what is inside comes before what is around it. Parts of an adapted layer
        # return no values where its sum was kept.
        pairs = ((name, found, again.get(name, [])) for name, found in forward.items())
        self.differs_in = next((name for name, found, now in pairs if not all_equal(found[: len(now)], now)), None)
        if self.differs_in is None:
            return ""
        return f" The first module inside that returns something else is {self.differs_in}."

    def _find_fault_inside(self, forward: _Run, modules: dict[str, list[Fingerprint]]) -> str | None:
        """Compare what the modules returned that a recomputation ran before it was stopped."""
        if (fault := self._fault_of_kept(is_fed=False)) is not None:
            return f"{fault} {_KEPT_WRONG}"
        if (fault := self._fault_of_kept(is_fed=True)) is not None:
            if (distance := self._rounding_of_fed()) is None:
                return f"{fault} {_UNKNOWN_CAUSE}"
            self.note_noise(distance)
        for name, found in modules.items():
            with _unobserved():
                before = forward.modules.get(name, [])[: len(found)]
                if all_equal(before, found):
                    continue
                distance = largest_distance(before, found)
            if distance is None or not distance < NOISE * rounding_of(found):
                return f"in its recomputation {name} returns something else than in its forward{by_distance(distance)}."
            # A second recomputation would show more, but would gather weights in this process alone.
            self.note_noise(distance)
        return None

    def _run_once_more(self, function: Function, tensors: Sequence[Any], random: RandomState) -> list[Fingerprint]:
        # Kept, as its forward may take a gradient inside of itself.
        with random.kept(), torch.autograd.graph.saved_tensors_hooks(*KEEP):
            random.restore()
            # A selective region keeps nothing of it, and hands nothing out.
            with torch.enable_grad(), extra_run(), selection_paused():
                returned = function(*tensors)
        return self.fingerprints(plain_tensors(returned), has_sketch=True)


def differ_by_rounding(one: list[Fingerprint], other: list[Fingerprint]) -> bool:
    """Whether tensors differ, and kernels that do not repeat themselves would explain it."""
    distance = None if all_equal(one, other) else largest_distance(one, other)
    return distance is not None and distance < NOISE * rounding_of(one)


def explaining_noise(
    distance: float, outputs: list[Fingerprint], run_again: Callable[[], list[Fingerprint]]
) -> float | None:
    """Return how far apart recomputations are, if that explains the distance of the first from the forward, else None.

    The first returned `outputs`. One more may happen to be next to it, so that several run until two are far enough
    apart. Kernels that repeat themselves cost `MOST_RUNS` of the region, and then are no explanation.
    """
    found = [outputs]
    largest = 0.0
    for _ in range(MOST_RUNS):
        another = run_again()
        # Not a number, or not comparable: no measure of noise.
        distances = [largest_distance(one, another) or 0.0 for one in found]
        largest = max(largest, *(each for each in distances if not isnan(each)), 0.0)
        if largest and distance <= ALLOWED * largest:
            return largest
        found.append(another)
    return None


def _random_cause(forward: _Run, again: _Run) -> str | None:
    """Return what drew other random numbers, as a sentence; None if nothing did."""
    others = _drawn_from(forward) & {*again.before.others_than(forward.before)}
    return f"The state of {' and '.join(sorted(others))} generators was not brought back." if others else None


def _drawn_from(run: _Run) -> set[str]:
    """Name the generators that a run has drawn from; of others a recomputation finds what state there is."""
    return {*run.after.others_than(run.before)}


def _has_gradients(function: Function, tensors: Sequence[Any]) -> bool:
    """Whether anything that a call computes with requires a gradient, as far as that is known."""
    module = module_of(function)
    if module is None or any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        return True
    return any(parameter.requires_grad for parameter in module.parameters())


def by_distance(distance: float | None) -> str:
    """Return a distance as words that end a clause."""
    if distance is None:
        return ""
    # By way of a number, as text of three digits or more would be 1.1e+02.
    percent = f"{float(f'{100 * distance:.2g}'):g} %"
    return f" (by {'what is not a number' if isnan(distance) else percent} of its norm)"


_DISTANCE = re.compile(r"\(by .*? of its norm\)")


def _as_sentences(found: dict[str, str]) -> list[str]:
    """Return one sentence for each fault, with the first region that has it."""
    regions: dict[str, list[str]] = {}
    for path, fault in found.items():
        # With the figures of the first.
        regions.setdefault(_DISTANCE.sub("", fault), []).append(path)
    return [
        f"{paths[0]}{f' (and {len(paths) - 1} more)' if len(paths) > 1 else ''}: {found[paths[0]]} Leave "
        f"{'these layers' if len(paths) > 1 else 'the layer'} out of the policy, or mend the cause; prove: off skips "
        "this check."
        for paths in regions.values()
    ]


def _call_proof(region: RegionProof, function: Function, tensors: Sequence[Any]) -> CallProof | None:
    is_possible = all(is_plain(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    return CallProof(region, module_of(function)) if is_possible else None


def drop(tensor: Tensor) -> None:
    """Keep nothing of what is saved: for a run that has no backward."""
    return None


def never_unpack(nothing: None) -> Tensor:
    """Goes with `drop`."""
    raise AssertionError("this graph is of a run that is only compared")


def _detached(tensor: Tensor) -> Tensor:
    # A node that holds its own output would keep itself alive for ever.
    return tensor.detach()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


# Hooks that keep what is saved, and hide it from the hooks around them.
KEEP = _detached, _as_it_is
