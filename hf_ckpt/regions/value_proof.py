"""Whether a recomputation gives, bit by bit, what the forward gave: looked at while regions run, step by step or once.

A region that is due takes fingerprints of what its forward returns, and its recomputation, which then runs to the end,
takes them again. Where two differ, the first module inside that differs is named and a cause looked for.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _StopRecomputationError

from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.policy.modifiers import Prove
from hf_ckpt.regions.call import AllRecomputed, Function, is_in_backward, tensors_of
from hf_ckpt.regions.rng_state import RandomState
from hf_ckpt.regions.selective import kernels
from hf_ckpt.regions.tensor_hashes import (
    Fingerprint,
    are_equal,
    fingerprint,
    is_plain,
    plain_tensors,
    relative_distance,
)

logger = logging.getLogger(__name__)

_TRIES = 3
"""Forwards without a backward after which a region is looked at less often: in one of each step, and without steps in
the 4th, 8th, 16th ... forward."""
_MOST_STATE = 1 << 20
"""Elements of a tensor that is looked at as a cause."""
_NOISE = 8.0
"""Units of rounding, relative to the norm, that kernels which do not repeat themselves may be apart."""


Look = Callable[["RegionProof", Function, Sequence[Any]], "CallProof | None"]
"""Returns what looks at a call of a region, from the region, what it calls and the tensors that this is given."""


class ValueProof:
    """What is proven of the regions of one plan, and what was found. Lives on the regions, and is copied with them.

    Args:
        prove: which steps.

    Attributes:
        faults: by the path of its region, what was found since they were last taken.
    """

    def __init__(self, prove: Prove = "off") -> None:
        self.prove = prove
        self._regions: list[RegionProof] = []
        self._start()

    def _start(self) -> None:
        self.faults: dict[str, str] = {}
        self._look: Look = _call_proof
        self._has_steps = False
        self._num_steps = 0
        self._is_open = False
        self._has_said_noise = False
        self._raised_by: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What was found belongs to this model's steps, which a copy has not run.
        return {"prove": self.prove, "_regions": self._regions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def region(self, path: str) -> RegionProof:
        """Return the proof of one region.

        Args:
            path: of its module, for messages.
        """
        region = RegionProof(self, path)
        self._regions.append(region)
        return region

    # --- Steps, where somebody tells of them; by itself each forward of a region counts as one. ---

    def begin_step(self) -> None:
        """A training step begins. Its first micro-batch is looked at if it is due, or was missed by an earlier one."""
        self._has_steps = True
        is_due = self.is_due(self._num_steps)
        self._num_steps += 1
        for region in self._regions:
            region.begin_step(is_due)
        self._is_open = self.prove != "off"

    def take_faults(self) -> list[str]:
        """Return what was found, in words, and forget it. Ends the step's proof."""
        self._is_open = False
        found, self.faults = self.faults, {}
        return _in_words(found)

    @property
    def is_open(self) -> bool | None:
        """Whether regions that are awaited are to be looked at now; None where nobody tells of steps."""
        return self._is_open if self._has_steps else None

    def is_due(self, number: int) -> bool:
        """Whether a step, or forward, is to be looked at.

        Args:
            number: how many there were before.
        """
        if self.prove == "off":
            return False
        return number == 0 if self.prove == "first_step" else number % self.prove == 0

    @property
    def unseen(self) -> list[str]:
        """The paths of regions that were never called, or that a compiler runs."""
        return [region.path for region in self._regions if not region.is_seen]

    def use(self, look: Look) -> None:
        """Let calls be looked at by another than `CallProof`, as in a step that is simulated.

        Args:
            look: see `Look`.
        """
        self._look = look

    def look_at(self, region: RegionProof, function: Function, tensors: Sequence[Any]) -> CallProof | None:
        """Return what looks at a call of a region, or None. See `RegionProof.watch`."""
        return self._look(region, function, tensors)

    # --- What regions tell. ---

    def compared(self, path: str, fault: str | None) -> None:
        """A region was recomputed, in the micro-batch that is the last one to be looked at."""
        self._is_open = False
        if fault is not None:
            self.found(path, fault)

    def found(self, path: str, fault: str) -> None:
        """A region has a fault. Raised at the end of the backward that runs, if nobody tells of steps."""
        self.faults.setdefault(path, fault)
        if self._has_steps:
            return
        if not is_in_backward():
            self._raise()
        elif self._raised_by != (backward := torch._C._current_graph_task_id()):
            self._raised_by = backward
            # The caller of backward gets it, when all that is wrong is known.
            torch.autograd.Variable._execution_engine.queue_callback(self._raise)

    def raise_found(self) -> None:
        """Raise what was found in a backward that ended in another exception, which drops the engine's callbacks."""
        if not self._has_steps:
            self._raise()

    def _raise(self) -> None:
        if faults := self.take_faults():
            raise PlanMismatchError("\n".join(faults))

    def note_noise(self, path: str, distance: float) -> None:
        """A region's kernels do not repeat themselves."""
        if not self._has_said_noise:
            self._has_said_noise = True
            logger.info(
                "%s: two recomputations differ by %.2g, relative to the norm, as much as the forward does: kernels "
                "here do not repeat themselves. torch.use_deterministic_algorithms(True) chooses others.",
                *(path, distance),
            )


class RegionProof:
    """The proof of one region.

    Args:
        proof: of the plan.
        path: of the region's module.

    Attributes:
        is_awaited: whether a recomputation is to be looked at.
    """

    def __init__(self, proof: ValueProof, path: str) -> None:
        self.path = path
        self.proof = proof
        self._start()

    def _start(self) -> None:
        self.is_awaited = True
        self._num_forwards = 0
        self._tries = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "proof": self.proof}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def is_seen(self) -> bool:
        """Whether it has run, and not compiled."""
        return self._num_forwards > 0

    def begin_step(self, is_due: bool) -> None:
        """See `ValueProof.begin_step`."""
        if is_due:
            self.is_awaited, self._tries = True, 0
        self._tries = min(self._tries, _TRIES - 1)

    def watch(self, function: Function, tensors: Sequence[Any]) -> CallProof | None:
        """Return what looks at a call that begins, if it is due; it must run to the end in recomputation too.

        Args:
            function: that is called, bound to the module or a `partial` that is given it first.
            tensors: that it is given.
        """
        proof = self.proof
        if proof.prove == "off" or not torch.is_grad_enabled() or is_in_backward():
            return None
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1
        if proof.is_open is None and number and proof.is_due(number):
            self.begin_step(is_due=True)
        if proof.faults:
            proof.raise_found()
        if not self.is_awaited or proof.is_open is False:
            return None
        if self._tries >= _TRIES and number & (number + 1):
            return None
        if not _has_gradients(function, tensors):
            return None
        looked = proof.look_at(self, function, tensors)
        self._tries += looked is not None
        return looked

    def found(self, fault: str) -> None:
        """See `ValueProof.found`."""
        self.proof.found(self.path, fault)

    def again(self) -> None:
        """The region has come to run in another way: that is to be looked at too."""
        if self.proof.prove != "off":
            self.begin_step(is_due=True)

    def compared(self, fault: str | None) -> None:
        """A call that was looked at has been recomputed."""
        self.is_awaited, self._tries = False, 0
        self.proof.compared(self.path, fault)


@dataclass(slots=True)
class _Run:
    """What one run of a call showed.

    Args:
        outputs: of what it returned.
        modules: by name, of what the modules inside returned, call by call.
        before: what it started from.
        after: what it left.
    """

    outputs: list[Fingerprint]
    modules: dict[str, list[Fingerprint]]
    before: _State
    after: _State


class CallProof:
    """Looks at the runs of one call: the forward, then its recomputations.

    Args:
        region: that is called.
        module: its module; None where that cannot be told.

    Attributes:
        is_simulated: whether there are shapes only.
        runs_to_end: whether recomputation is to run on behind the last tensor that backward needs.
    """

    is_simulated = False

    def __init__(self, region: RegionProof, module: nn.Module | None) -> None:
        self._region = region
        self._module = module
        self._forward: _Run | None = None
        self._has_graph = True
        self._kept: dict[Any, list[Fingerprint]] = {}
        self._wrong_kept: list[str] = []
        # ZeRO-3 lets go of weights when a module's forward ends, those of the last one while backward needs them.
        self.runs_to_end = module is None or "ds_id" not in vars(module)

    def run(self, function: Function, *tensors: Any) -> Any:
        """Run `function(*tensors)` and look at it."""
        is_again = self._forward is not None
        returned, fault = self.compared(function, *tensors)
        if is_again:
            self.report(fault)
        return returned

    def compared(self, function: Function, *tensors: Any) -> tuple[Any, str | None]:
        """Return what `function(*tensors)` returns, and what is wrong with that, from the second time on."""
        modules: dict[str, list[Fingerprint]] = {}
        if self._forward is None:
            self._has_graph = torch.is_grad_enabled()
        try:
            returned, run = self._looked_at(function, tensors, modules)
        except (AllRecomputed, _StopRecomputationError):
            # Where it does not run to the end.
            if self._forward is not None:
                self.report(self._fault_inside(self._forward, modules))
            raise
        if self._forward is None:
            self._forward = run
            return returned, None
        with _unseen():
            fault = self._fault(self._forward, run, lambda: self._once_more(function, tensors, run))
        return returned, fault

    def look_at_graph(self, function: Function, args: Sequence[Any], returned: Any) -> None:
        """Look whether gradients come through the region, once its forward has returned.

        Args:
            function: that the region was given.
            args: likewise, as they came.
            returned: by the region.
        """
        if not self._has_graph:
            self._region.found("its forward ran without a graph, so that its weights get no gradient.")
            return
        given = [*args, *function.args, *function.keywords.values()] if isinstance(function, partial) else args
        inputs = [tensor for value in given for tensor in tensors_of(value) if tensor.requires_grad]
        known = set(map(id, inputs))
        outputs = [
            tensor for tensor in plain_tensors(returned) if tensor.is_floating_point() and id(tensor) not in known
        ]
        if inputs and outputs and not _leads_to(outputs, inputs):
            self._region.found(
                "what it returns does not depend on what it was given, so that the layers below get no gradient."
            )

    def report(self, fault: str | None) -> None:
        """The call has been looked at; see `RegionProof.compared`."""
        self._region.compared(fault)

    # --- For what looks at calls in another way. ---

    def part(self) -> CallProof:
        """Return what looks at a part of the call that runs, and runs again, by itself."""
        return CallProof(self._region, self._module)

    def fingerprints(self, tensors: Sequence[Tensor], *, has_sketch: bool = False) -> list[Fingerprint]:
        """Return the fingerprints of tensors that are plain."""
        with _unseen():
            return self._fingerprints(tensors, has_sketch=has_sketch)

    def unseen(self) -> AbstractContextManager[None]:
        """Let what runs in the block be seen by nobody."""
        return _unseen()

    def note_noise(self, distance: float) -> None:
        """See `ValueProof.note_noise`."""
        self._region.proof.note_noise(self._region.path, distance)

    # --- What runs only to be looked at; who simulates a step counts no time for it. ---

    def goes_on(self) -> None:
        """A recomputation has made all that backward needs."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What runs in the block is needed by no backward."""
        yield

    # --- Outputs that selective regions keep. ---

    def kept(self, number: Any, tensors: Sequence[Tensor]) -> None:
        """An output is kept."""
        with _unseen():
            self._kept[number] = self._fingerprints(tensors)

    def handed_out(self, number: Any, name: str, tensors: Sequence[Tensor]) -> None:
        """An output is handed out in the place of what the operator would return again."""
        with _unseen():
            found = self._fingerprints(tensors)
        if not _all_equal(self._kept.get(number, []), found):
            self._wrong_kept.append(name)

    # --- Inside. ---

    def _looked_at(
        self, function: Function, tensors: Sequence[Any], modules: dict[str, list[Fingerprint]]
    ) -> tuple[Any, _Run]:
        with _unseen():
            before = _State.of(self._module, tensors, self._fingerprints)
        with self._hooks(modules):
            returned = function(*tensors)
        with _unseen():
            after = _State.of(None, tensors, self._fingerprints)
            outputs = self._fingerprints(plain_tensors(returned), has_sketch=True)
        return returned, _Run(outputs, modules, before, after)

    def _fingerprints(self, tensors: Sequence[Tensor], *, has_sketch: bool = False) -> list[Fingerprint]:
        return [fingerprint(tensor, has_sketch=has_sketch) for tensor in tensors if is_plain(tensor)]

    @contextmanager
    def _hooks(self, found: dict[str, list[Fingerprint]]) -> Iterator[None]:
        """Look at what the modules inside return while the block runs."""
        with ExitStack() as hooks:
            for name, module in modules_inside(self._module):
                handle = module.register_forward_hook(partial(self._returned, found, name))
                hooks.callback(handle.remove)
            yield

    def _returned(
        self, found: dict[str, list[Fingerprint]], name: str, module: nn.Module, args: Any, output: Any
    ) -> None:
        if not torch.compiler.is_compiling():
            with _unseen():
                # With what tells rounding from more, where there is no whole output to be held against.
                taken = self._fingerprints(plain_tensors(output), has_sketch=not self.runs_to_end)
                found.setdefault(name, []).extend(taken)

    def _fault(self, forward: _Run, again: _Run, run_again: Callable[[], _Run]) -> str | None:
        if self._wrong_kept:
            return (
                f"recomputation is handed another output of {self._wrong_kept[0]} than the forward kept. This is a "
                "fault of hf_ckpt: please report it, and use another mode meanwhile."
            )
        if _all_equal(forward.outputs, again.outputs):
            if forward.before.draws(forward.after) and not forward.after.is_at(again.after):
                return (
                    "its random numbers are not those of the forward: the state of the generators was not brought back."
                )
            return None
        distance = _distance(forward.outputs, again.outputs)
        cause = _random_cause(forward, again)
        if cause is None and distance is not None and distance < _NOISE * _rounding(forward.outputs):
            third = run_again()
            noise = _distance(again.outputs, third.outputs)
            if noise and distance <= 4 * noise:
                self._region.proof.note_noise(self._region.path, noise)
                return None
        size = "" if distance is None else f" (by {_percent(distance)} of its norm)"
        first = _first_difference(forward.modules, again.modules)
        cause = cause or _cause(forward, again, self._module)
        where = f" The first module inside that returns something else is {first}." if first else ""
        why = cause or (
            "A generator of its own, state that its module does not hold, or a changed input would explain it."
        )
        return f"its recomputation returns something else than its forward{size}.{where} {why}"

    def _fault_inside(self, forward: _Run, modules: dict[str, list[Fingerprint]]) -> str | None:
        """See `_fault`: of a recomputation that was stopped, by what the modules returned that it came to."""
        for name, found in modules.items():
            with _unseen():
                before = forward.modules.get(name, [])[: len(found)]
                if _all_equal(before, found):
                    continue
                distance = _distance(before, found)
            if distance is None or not distance < _NOISE * _rounding(found):
                size = "" if distance is None else f" (by {_percent(distance)} of its norm)"
                return f"in its recomputation {name} returns something else than in its forward{size}."
            # A second recomputation would tell more, but would gather weights in this process alone.
            self.note_noise(distance)
        return None

    def _once_more(self, function: Function, tensors: Sequence[Any], run: _Run) -> _Run:
        with run.before.random.kept(), torch.autograd.graph.saved_tensors_hooks(_dropped, _never_asked):
            run.before.random.restore()
            with torch.enable_grad():
                returned = function(*tensors)
        with _unseen():
            outputs = self._fingerprints(plain_tensors(returned), has_sketch=True)
        return _Run(outputs, {}, run.before, run.after)


@dataclass(slots=True)
class _State:
    """What a region may read beside its inputs and weights, at one moment.

    Args:
        random: of torch's generators.
        python: of `random`.
        numpy: of `numpy.random`; None where numpy was not imported.
        values: plain attributes of the modules inside, by name.
        tensors: of their buffers and of tensors that they hold otherwise, by name.
    """

    random: RandomState
    python: object
    numpy: object
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, list[Fingerprint]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, module: nn.Module | None, tensors: Sequence[Any], take: Callable[[Sequence[Tensor]], list[Fingerprint]]
    ) -> _State:
        """Read it."""
        values: dict[str, Any] = {}
        held: dict[str, list[Fingerprint]] = {}
        for path, inner in () if module is None else module.named_modules():
            prefix = f"{path}." if path else ""
            for name, value in vars(inner).items():
                if isinstance(value, bool | int | float | str):
                    values[prefix + name] = value
            held.update((prefix + name, take([tensor])) for name, tensor in tensors_held(inner))
        return cls(RandomState.of(list(tensors)), random.getstate(), _numpy_state(), values, held)

    def draws(self, after: _State) -> bool:
        """Whether random numbers of torch's were drawn up to another state."""
        return not self.random.is_same(after.random)

    def is_at(self, other: _State) -> bool:
        """Whether torch's generators are at the same place."""
        return self.random.is_same(other.random)


def tensors_held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module, without those inside, and the tensors that it holds otherwise."""
    yield from ((name, value) for name, value in (*vars(module).items(), *module._buffers.items()) if _is_state(value))


def _is_state(value: object) -> bool:
    # What is larger may be a weight, which an engine has put there as a plain attribute.
    return isinstance(value, Tensor) and not value.requires_grad and value.numel() <= _MOST_STATE


def _random_cause(forward: _Run, again: _Run) -> str | None:
    """Return what has drawn other random numbers, as a sentence; None where nothing has."""
    before, after, now = forward.before, forward.after, again.before
    if before.draws(after) and not before.is_at(now):
        return "The state of torch's generators was not brought back."
    if before.numpy != after.numpy:
        return "Its forward draws from numpy.random, which recomputation cannot bring back: draw from torch instead."
    if before.python != after.python:
        return "Its forward draws from random, which recomputation cannot bring back: draw from torch instead."
    return None


def _cause(forward: _Run, again: _Run, module: nn.Module | None) -> str | None:
    """Return the likeliest other cause of a difference, as a sentence; None where nothing was found."""
    before, now = forward.before, again.before
    for name, value in before.values.items():
        if now.values.get(name) != value:
            return f"Its attribute {name} was {value!r} in forward and is {now.values.get(name)!r} in recomputation."
    return _cause_in_tensors(before, now, module)


def _cause_in_tensors(before: _State, now: _State, module: nn.Module | None) -> str | None:
    for name, found in before.tensors.items():
        if not _all_equal(found, now.tensors.get(name, [])):
            return f"Its tensor {name} was changed between forward and recomputation."
    for name, inner in () if module is None else module.named_modules():
        if any(isinstance(value, torch.Generator) for value in vars(inner).values()):
            return f"{name or 'It'} holds a generator of its own, which recomputation does not bring back."
    return None


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), tuple(rest)


def _has_gradients(function: Function, tensors: Sequence[Any]) -> bool:
    """Whether anything that a call computes with requires a gradient, as far as that can be told."""
    module = module_of(function)
    if module is None or any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        return True
    return any(parameter.requires_grad for parameter in module.parameters())


def _leads_to(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether a gradient of one of these outputs would come to one of these inputs."""
    goals = {get_gradient_edge(tensor).node for tensor in inputs}
    nodes = [tensor.grad_fn for tensor in outputs]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node in goals:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return False


def _first_difference(forward: dict[str, list[Fingerprint]], again: dict[str, list[Fingerprint]]) -> str | None:
    # In the order in which modules ended: what is inside comes before what is around it.
    names = (name for name, found in forward.items() if name in again and not _all_equal(found, again[name]))
    return next(names, None)


def _all_equal(ones: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> bool:
    return len(ones) == len(others) and all(map(are_equal, ones, others))


def _distance(ones: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> float | None:
    """Return the largest distance of outputs, relative to the norm; None where one of them has none."""
    if len(ones) != len(others):
        return None
    unequal = [(one, other) for one, other in zip(ones, others, strict=True) if not are_equal(one, other)]
    distances = [relative_distance(one, other) for one, other in unequal]
    known = [distance for distance in distances if distance is not None]
    return max(known, default=0.0) if len(known) == len(distances) else None


def _rounding(outputs: Sequence[Fingerprint]) -> float:
    floating = [torch.finfo(output.dtype).eps for output in outputs if output.dtype.is_floating_point]
    return max(floating, default=0.0)


def _percent(distance: float) -> str:
    return "what is not a number" if distance != distance else f"{100 * distance:.2g} %"


def _in_words(found: dict[str, str]) -> list[str]:
    """Return one sentence for each fault, with the first region that has it."""
    regions: dict[str, list[str]] = {}
    for path, fault in found.items():
        # With the figures and modules of the first.
        regions.setdefault(fault[:24], []).append(path)
    return [
        f"{paths[0]}{f' (and {len(paths) - 1} more)' if len(paths) > 1 else ''}: {found[paths[0]]} Leave "
        f"{'these layers' if len(paths) > 1 else 'the layer'} out of the policy, or mend the cause; prove: off skips "
        "this check."
        for paths in regions.values()
    ]


def module_of(function: Any) -> nn.Module | None:
    """Return the module whose forward a region calls."""
    while isinstance(function, partial):
        if function.args and isinstance(function.args[0], nn.Module):
            return function.args[0]
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


def modules_inside(module: nn.Module | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside, but for those that are compiled."""
    for name, child in () if module is None else module.named_children():
        if not is_compiled(child):
            yield name, child
            yield from ((f"{name}.{inner}", found) for inner, found in modules_inside(child))


def _call_proof(region: RegionProof, function: Function, tensors: Sequence[Any]) -> CallProof | None:
    return CallProof(region, module_of(function)) if _is_possible(tensors) else None


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is run by a compiler."""
    # By name: the class lies in what takes seconds to import.
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def _is_possible(tensors: Sequence[Any]) -> bool:
    return all(is_plain(tensor) for tensor in tensors if isinstance(tensor, Tensor))


@contextmanager
def _unseen() -> Iterator[None]:
    """Let what runs in the block be seen by nobody, the region's own selection included."""
    setting = kernels.pause()
    try:
        with torch.no_grad(), _disable_current_modes():
            yield
    finally:
        kernels.leave(setting)


def _dropped(tensor: Tensor) -> None:
    return None


def _never_asked(nothing: None) -> Tensor:
    raise AssertionError("this graph is of a run that is only compared")
