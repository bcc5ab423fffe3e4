"""Whether a region gives what its module's own forward gives, and the same gradients: held against the original.

`value_proof` compares a region with its own recomputation: what is wrong with both of them escapes it. Here, for one
region of each kind in a plan, the forward that the module had before the plan runs once, in backward, where the region
is recomputed and before that keeps anything, on the arguments that the region was called with; then its backward.
Fingerprints of the outputs, and of the gradients of inputs and weights, have to be those of the region.

Never in the forward: what a model collects there (logits of routers, caches) would be collected twice.

Note [edges]: gradients are compared where nodes of the region hand them to inputs and weights, before they are added to
those of other users. So it does not matter what else uses an input or a weight. The original's gradients end there, one
by one: all of them together are never held.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import random
import sys
import weakref
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isnan
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import Node, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_ckpt.regions.execution_state import (
    AutocastState,
    ConcurrentRun,
    Function,
    RandomState,
    extra_run,
    is_compiled,
    is_transformed,
    module_of,
)
from hf_ckpt.regions.fingerprints import Fingerprint, all_equal, is_plain, largest_distance, relative_distance
from hf_ckpt.regions.module_state import CallState, is_managed
from hf_ckpt.regions.recompute import arguments_of, belongs_to_graph
from hf_ckpt.regions.selective.dispatch import selection_paused
from hf_ckpt.regions.tiling import run_tiled
from hf_ckpt.regions.value_proof import ALLOWED, MOST_RUNS, CallProof, RegionProof, by_distance, explaining_noise

logger = logging.getLogger(__name__)

_Key = Hashable
"""What a gradient is for: an argument, by its place, or a weight, by its id."""
_Goals = dict[tuple[Node, int], _Key]
"""What the outputs of nodes stand for: arguments of a region."""
_Edges = list[tuple[Node, list[tuple[int, _Key, Node]]]]
"""Nodes, and which of the gradients that each returns is for what, with the node that gets it."""
_NO_TASK = -1
_MAX_NAMES = 3


def run_region_proven(proof: RegionProof, region: Function, function: Function, *args: Any) -> Any:
    """Run `region(function, *args, proof=...)`, and have it held against `function` where that is due."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not proof.awaits_original():
        return region(function, *args, proof=proof)
    original = OriginalCall(proof, function, args)
    with _garbage_kept():
        with original.state.as_in_forward():
            returned = region(function, *args, proof=original)
        original.end_forward(returned)
    return returned


class OriginalCall:
    """One call of a region, and of the original with the same arguments. The region takes it for its `RegionProof`."""

    def __init__(self, region: RegionProof, function: Function, args: Sequence[Any]) -> None:
        self._region = region
        self._function, self._arguments = arguments_of(function, args)
        self._module = module_of(function) or next((each for each in args if isinstance(each, nn.Module)), None)
        # Its own: what the region does to the modules while it runs is not what they were called with.
        self.state = CallState(function, args)
        # The proof holds this object, as long as the graph does.
        self._proof_ref: weakref.ref[CallProof] | None = None
        self._held: CallProof | None = None
        self._places: list[int | str] = []
        self._goals: _Goals = {}
        self._is_late = False
        self._is_hooked = False
        self._has_compared_outputs = False
        # Of the backward that runs: one graph may have several.
        self._task = _NO_TASK
        self._output_gradients: dict[int, Tensor] = {}
        self._received: dict[_Key, list[Fingerprint]] = {}
        self._not_asked: set[_Key] = set()
        self._num_nodes = self._num_nodes_left = 0
        self._expected: dict[_Key, list[Fingerprint]] | None = None
        self._inputs: Sequence[Tensor] = ()
        self.fault: str | None = None
        """What is wrong, unless the recomputation shows more."""

    @property
    def _proof(self) -> CallProof | None:
        """The proof of the call; None if it is not proven, or all is known."""
        return None if self._proof_ref is None else self._proof_ref()

    # --- While the region runs forward. ---

    def check_again(self) -> None:
        """See `RegionProof`."""
        self._region.check_again()

    def start_call(self, function: Function, tensors: Sequence[Any]) -> CallProof | None:
        """See `RegionProof`."""
        proof = self._region.start_call(function, tensors)
        module = self._module
        if proof is None or not proof.runs_to_end or module is None or any(map(is_compiled, module.modules())):
            return proof
        self._proof_ref = weakref.ref(proof)
        proof.original = self
        self._region.begin_original(self)
        self._places = [place for place, value in self._arguments.items() if belongs_to_graph(place, value)]
        firsts: dict[int, int | str] = {}
        # Layers may ask whether two are one (torch's MultiheadAttention does), and one has one gradient.
        self._firsts = [firsts.setdefault(id(self._arguments[place]), place) for place in self._places]
        self._require_grad = [self._arguments[place].requires_grad for place in self._places]
        self._inputs = [self._arguments[place] for place in self._places]
        self._given = proof.fingerprints([self._arguments[place] for place in self._places])
        for place, value in self._arguments.items():
            if isinstance(value, Tensor) and value.requires_grad:
                node, number, *_ = get_gradient_edge(value)
                self._goals.setdefault((node, number), place)
        weight = next(module.parameters(), None)
        self._random = RandomState.of(*self._arguments.values(), weight)
        self._python = random.getstate()
        self._numpy = None if (numpy := _numpy_random()) is None else numpy.get_state()
        self._autocast = AutocastState.now().without_cache()
        self._versions = [(tensor, tensor._version) for tensor in _held_tensors(module)]
        # The graph keeps them, and they come back for the recomputation.
        self._arguments.update(dict.fromkeys(self._places))
        self._arguments = {place: _copied(value) for place, value in self._arguments.items()}
        self._first_node = _num_nodes_made()
        return proof

    def end_forward(self, returned: Any) -> None:
        """Note what the region returned, and watch the gradients that go in and out."""
        proof = self._proof
        if proof is None:
            return
        self._written = [tensor for tensor, version in self._versions if tensor._version != version]
        del self._versions
        outputs = _tensors_of(returned)
        self._returned = proof.fingerprints(outputs, has_sketch=True)
        inputs, self._inputs = self._inputs, ()
        goals, self._goals = self._goals, {}
        passed_on = {node for node, _ in goals}
        # A tensor that is returned at several places has one gradient.
        numbers = {
            id(tensor): number
            for number, tensor in reversed(list(enumerate(outputs)))
            if (node := tensor.grad_fn) is not None
            and node not in passed_on
            and node._sequence_nr() >= self._first_node
        }.values()
        if not numbers:
            self._watch_what_passes_through(proof, inputs, outputs)
            return
        assert self._module is not None
        if _has_tiles(self._module):
            return
        if any(map(_acts_in_backward, self._module.modules())):
            self._leave_gradients_out("a backward does more inside of it than to give gradients, and would do it twice")
            return
        edges, nodes = _edges_of([outputs[number] for number in numbers], goals, self._first_node)
        if _is_held_elsewhere(nodes, outputs):
            # What the loss makes of it besides, the original would not get.
            self._leave_gradients_out("something holds tensors from inside of it")
            return
        # These nodes are not kept: they keep the hooks, and with them this object.
        for node, targets in edges:
            node.register_hook(partial(self._receive, targets))
        if goals:
            # By its turn all of the region has run that runs at all: experts may be idle.
            oldest = min((node for node, _ in goals), key=lambda node: node._sequence_nr())
            oldest.register_prehook(self._leave_region)
        self._num_nodes = len(edges)
        self._keys = {key for _, targets in edges for _, key, _ in targets}
        for number in numbers:
            self._watch_output(number, outputs[number])
        # Of one output all has come before the region is recomputed. Of several, one may be used in the region too.
        self._is_late = len(numbers) > 1

    def _leave_gradients_out(self, why: str) -> None:
        logger.info("%s: gradients are not held against the original's, as %s.", self._region.path, why)

    def _watch_output(self, number: int, output: Tensor) -> None:
        """Note the gradient of an output as it comes to the region, when hooks of others may have changed it."""
        node, place, hooks = output.grad_fn, output.output_nr, output._backward_hooks
        assert node is not None
        if hooks:
            # These were placed in the region, and belong to it: the gradient is taken before them.
            _hook_first(output, partial(self._note_first, number, hooks, len(hooks) + 1))
        else:
            node.register_prehook(lambda gradients: self._note_output_gradient(number, gradients[place]))

    def _watch_what_passes_through(self, proof: CallProof, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Run the original when the gradient of an output comes: no recomputation is to be expected.

        What the region returns, it was given, or it has no graph. So the inputs are held here.
        """
        inputs = [each.detach() for each in inputs]

        def run_original(_: Tensor, proof: CallProof = proof) -> None:
            # With the proof, which nothing else may hold here.
            self.before_recomputation(inputs)

        for output in outputs:
            if output.requires_grad:
                output.register_hook(run_original)  # type: ignore[no-untyped-call]

    # --- While the backward of the region runs. ---

    def _begin_backward(self) -> None:
        """Forget what came in another backward over the same graph."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._output_gradients, self._received, self._not_asked = {}, {}, set()
            self._expected, self._inputs, self._num_nodes_left = None, (), self._num_nodes

    def _note_first(self, number: int, hooks: dict[Any, Any], num_of_region: int, gradient: Tensor | None) -> None:
        # What other hooks make of it is known only behind the region's own.
        if len(hooks) == num_of_region:
            self._note_output_gradient(number, gradient)
        else:
            self._is_hooked = True

    def _note_output_gradient(self, number: int, gradient: Tensor | None) -> None:
        # None: it came through another output of the same node.
        if self._proof is not None and gradient is not None and not is_transformed():
            self._begin_backward()
            self._autocast_of_backward = AutocastState.now()
            # With a graph of its own (`create_graph`) a backward takes other kernels.
            self._has_graph = torch.is_grad_enabled()
            self._output_gradients[number] = gradient.detach()

    def _receive(self, targets: Sequence[tuple[int, _Key, Node]], gradients: Sequence[Any], _: object) -> None:
        """Note what a node of the region gives to inputs and weights."""
        if self._proof is None or is_transformed():
            return
        self._begin_backward()
        _add_received(self._proof, self._received, targets, gradients)
        self._not_asked.update(key for place, key, node in targets if gradients[place] is None and not _is_asked(node))
        self._num_nodes_left -= 1
        if not self._num_nodes_left:
            self._compare_gradients()

    def _leave_region(self, _: object) -> None:
        if self._proof is not None and self._task == torch._C._current_graph_task_id():
            self._compare_gradients()

    def before_recomputation(self, tensors: Sequence[Tensor]) -> None:
        """Run the original: the region is about to be recomputed from `tensors`."""
        if self._proof is None or is_transformed():
            return
        has_gradients = bool(self._output_gradients) and self._task == torch._C._current_graph_task_id()
        has_gradients = has_gradients and not self._is_hooked
        if self._expected is not None or (self._has_compared_outputs and not has_gradients):
            return
        is_now = has_gradients and not self._is_late
        if (run := self._try_run(tensors, self._output_gradients if is_now else None)) is None:
            return
        outputs, expected = run
        if not self._has_compared_outputs and (fault := self._fault_of_values(tensors, outputs)) is not None:
            self.fault = fault
            # What passes through is not recomputed, which would show more.
            self._end(None if self._num_nodes else fault)
            return
        self._has_compared_outputs = True
        self._region.end_original()
        if has_gradients:
            # What is late, `_compare_gradients` asks for.
            self._expected = expected or {}
            # The region lets go of its proof once it is recomputed.
            self._held = self._proof
            # For further runs, if kernels do not repeat themselves.
            self._inputs = tensors
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, self._task))

    def _end_backward(self, task: int) -> None:
        if self._proof is not None and self._task == task:
            self._compare_gradients()

    def _end(self, fault: str | None) -> None:
        """All is known: let go of everything."""
        self._proof_ref = self._held = self._expected = None
        self._arguments, self._output_gradients, self._received, self._inputs = {}, {}, {}, ()
        if fault is not None:
            self._region.add_fault(fault)

    # --- The original. ---

    def _try_run(
        self, tensors: Sequence[Tensor], gradients: dict[int, Tensor] | None
    ) -> tuple[list[Fingerprint], dict[_Key, list[Fingerprint]] | None] | None:
        """See `_run`; None if it raises, which ends the proof."""
        assert self._proof is not None
        with self._proof.extra_run():
            try:
                return self._run(tensors, gradients)
            except (torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                if self._proof.is_simulated:
                    raise
                self._end(None)
                logger.info("%s could not be held against its own forward: %r", self._region.path, error)
                return None

    def _run(
        self, tensors: Sequence[Tensor], gradients: dict[int, Tensor] | None
    ) -> tuple[list[Fingerprint], dict[_Key, list[Fingerprint]] | None]:
        """Return what the original returns and, if the gradients of its outputs are given, those of what it used."""
        assert self._proof is not None
        with ExitStack() as entered:
            for context in (ConcurrentRun(), extra_run(), selection_paused(), torch.enable_grad()):
                entered.enter_context(context)
            outputs, goals, leaves, first_node = self._run_forward(tensors, keeps=gradients is not None)
            found = self._proof.fingerprints(outputs, has_sketch=True)
            if gradients is None:
                return found, None
            # Where a region is recomputed, autocast is that of its forward.
            with self._autocast_of_backward.restored():
                return found, self._gradients_of(outputs, gradients, goals, leaves, first_node)

    def _run_forward(self, tensors: Sequence[Tensor], *, keeps: bool) -> tuple[list[Tensor], _Goals, list[Tensor], int]:
        """Return what the original returns, and for its backward: the goals, the leaves behind them, the first node."""
        assert self._module is not None
        with ExitStack() as entered:
            for context in (
                self._random.kept(),
                _python_random(self._python, self._numpy),
                self._autocast.restored(),
                _state_put_back(self._module, self._written),
                saved_tensors_hooks(*(_KEEP if keeps else _DROP)),
                self.state.as_in_forward(),
            ):
                entered.enter_context(context)
            self._random.restore()
            inputs = [
                tensor.detach().requires_grad_(needs) for tensor, needs in zip(tensors, self._require_grad, strict=True)
            ]
            given = {place: _cut_off(_copied(value)) for place, value in self._arguments.items()}
            # No leaves: they are none in the model, and hooks of others (torch's FLOP counter) do not take them here.
            views = {place: tensor.view_as(tensor) for place, tensor in zip(self._places, inputs, strict=True)}
            given.update((place, views[first]) for place, first in zip(self._places, self._firsts, strict=True))
            first_node = _num_nodes_made()
            goals: _Goals = {}
            for place, tensor in given.items():
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    node, number, *_ = get_gradient_edge(tensor)
                    goals.setdefault((node, number), place)
            returned = self._function(
                *(value for place, value in given.items() if isinstance(place, int)),
                **{place: value for place, value in given.items() if isinstance(place, str)},
            )
            leaves = [tensor for tensor in inputs if tensor.requires_grad]
            return _tensors_of(returned), goals, leaves, first_node

    def _gradients_of(
        self,
        outputs: list[Tensor],
        gradients: dict[int, Tensor],
        goals: _Goals,
        leaves: list[Tensor],
        first_node: int,
    ) -> dict[_Key, list[Fingerprint]]:
        assert self._proof is not None
        received: dict[_Key, list[Fingerprint]] = {}
        numbers = [number for number in gradients if number < len(outputs) and outputs[number].requires_grad]
        roots = [outputs[number] for number in numbers]
        given = [gradients[number] for number in numbers]
        edges, _ = _edges_of(roots, goals, first_node)
        if self._is_late:
            for root, gradient in zip(roots, given, strict=True):
                # With what the region itself adds to it.
                _hook_first(root, lambda _, whole=gradient: whole)
        for node, targets in edges:
            node.register_hook(partial(_receive_and_drop, self._proof, received, targets))
        weights = {node.variable for _, targets in edges for _, _, node in targets if hasattr(node, "variable")}
        outputs.clear()
        if edges:
            # What a graph of its own saves, nothing asks for.
            with _without_hooks(weights), saved_tensors_hooks(*_DROP):
                torch.autograd.grad(roots, [*leaves, *weights], given, allow_unused=True, create_graph=self._has_graph)
        return received

    # --- Comparing. ---

    def _fault_of_values(self, tensors: Sequence[Tensor], outputs: list[Fingerprint]) -> str | None:
        """Return what is wrong with what the region was given for its recomputation, or with what it returned."""
        assert self._proof is not None
        given = self._proof.fingerprints(tensors)
        if self._proof.is_simulated:
            return None
        with self._proof.unobserved():
            return self._difference_of_values(tensors, given, outputs)

    def _difference_of_values(
        self, tensors: Sequence[Tensor], given: list[Fingerprint], outputs: list[Fingerprint]
    ) -> str | None:
        if all_equal([*self._given, *self._returned], [*given, *outputs]):
            return None
        if not all_equal(self._given, given):
            pairs = zip(self._places, self._given, given, strict=False)
            place = next((place for place, one, other in pairs if not all_equal([one], [other])), None)
            return f"its recomputation is given another {_named(place)} than its forward was."
        distance = largest_distance(self._returned, outputs)
        if distance is not None:
            noise = explaining_noise(distance, outputs, lambda: self._run(tensors, None)[0])
            if noise is not None:
                self._region.proof.note_noise(self._region.path, noise)
                return None
        return (
            "under the plan it returned something else than the forward that its module had before"
            f"{by_distance(distance)}. If nothing has changed that forward since, this is a fault of hf_ckpt: please "
            "report it."
        )

    def _compare_gradients(self) -> None:
        if self._expected is None or self._proof is None:
            return
        if self._is_hooked:
            self._leave_gradients_out("hooks of others change those of its outputs")
            self._end(None)
            return
        if self._is_late:
            if (run := self._try_run(self._inputs, self._output_gradients)) is None:
                return
            outputs, self._expected = run[0], run[1] or {}
            # What steps in backward (an optimizer in hooks of gradients) may have changed the weights since.
            if not self._proof.is_simulated and not all_equal(outputs, self._returned):
                self._end(None)
                return
        if self._proof.is_simulated:
            self._end(None)
            return
        with self._proof.unobserved():
            self._end(self._difference_of_gradients(self._expected, self._received))

    def _difference_of_gradients(
        self, expected: dict[_Key, list[Fingerprint]], received: dict[_Key, list[Fingerprint]]
    ) -> str | None:
        """Return what is wrong with the gradients of the region."""
        lost = [key for key, found in expected.items() if found and key not in self._keys]
        both = [key for key, found in expected.items() if found and received.get(key)]
        if not self._num_nodes_left:
            lost += [key for key, found in expected.items() if found and key in self._keys and not received.get(key)]
            both += [key for key, found in received.items() if found and not expected.get(key)]
        lost, both = ([key for key in keys if key not in self._not_asked] for keys in (lost, both))
        if lost:
            return f"the plan loses the gradient of {self._names(lost)}, which the module's own forward gives."
        pairs = {key: (_total(expected.get(key, [])), _total(received[key])) for key in both}
        if all_equal(*([each for pair in pairs.values() for each in pair[number]] for number in (0, 1))):
            return None
        differ = {key: pair for key, pair in pairs.items() if not all_equal(*pair)}
        if (noise := self._noise_of(differ)) is not None:
            self._region.proof.note_noise(self._region.path, noise)
            return None
        distance = max((_distance(*pair) for pair in differ.values()), default=0.0)
        return (
            f"the plan gives {self._names(list(differ))} another gradient than the module's own forward does"
            f"{by_distance(distance)}. If nothing has changed the module or its hooks since its forward, this is a "
            "fault of hf_ckpt: please report it."
        )

    def _noise_of(self, differ: dict[_Key, tuple[list[Fingerprint], list[Fingerprint]]]) -> float | None:
        """Return how far apart gradients of the original are, if that explains the differences, else None.

        See `value_proof.MOST_RUNS`.
        """
        runs = [{key: pair[0] for key, pair in differ.items()}]
        noise = dict.fromkeys(differ, 0.0)
        for _ in range(MOST_RUNS):
            _, found = self._run(self._inputs, self._output_gradients)
            assert found is not None
            runs.append({key: _total(found.get(key, [])) for key in differ})
            for key in differ:
                noise[key] = max(noise[key], *(_distance(before[key], runs[-1][key]) for before in runs[:-1]))
            if all(_distance(*pair) <= ALLOWED * noise[key] for key, pair in differ.items()):
                return max(noise.values())
        return None

    def _names(self, keys: Sequence[_Key]) -> str:
        assert self._module is not None
        weights = {id(weight): name for name, weight in self._module.named_parameters()}
        names = [weights.get(key[1], "a weight") if isinstance(key, tuple) else _named(key) for key in keys]
        return ", ".join(sorted(names)[:_MAX_NAMES]) + f" and {len(names) - _MAX_NAMES} more" * (
            len(names) > _MAX_NAMES
        )


# --- Graphs. ---


def _num_nodes_made() -> int:
    """Return how many nodes this thread has made: the number of the next one."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _edges_of(outputs: Sequence[Tensor], goals: _Goals, first_node: int) -> tuple[_Edges, set[Node]]:
    """Return the nodes between tensors and goals that hand gradients to a goal or to a leaf, and all nodes between.

    See Note [edges].

    `first_node` is the number of the first node that belongs here: what is older is reached by tensors that came
    another way, as through a container.
    """
    edges: _Edges = []
    nodes = deque(
        node
        for node in dict.fromkeys(tensor.grad_fn for tensor in outputs)
        if node is not None and node._sequence_nr() >= first_node
    )
    seen = set(nodes)
    while nodes:
        node = nodes.popleft()
        targets: list[tuple[int, _Key, Node]] = []
        for place, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            if (following, number) in goals:
                targets.append((place, goals[following, number], following))
            elif hasattr(following, "variable"):
                # Other leaves may have been made inside, for this run alone.
                if isinstance(following.variable, nn.Parameter):
                    targets.append((place, ("weight", id(following.variable)), following))
            elif following not in seen and following._sequence_nr() >= first_node:
                seen.add(following)
                nodes.append(following)
        if targets:
            edges.append((node, targets))
    return edges, seen


def _is_held_elsewhere(nodes: set[Node], outputs: Sequence[Tensor]) -> bool:
    """Whether a tensor that one of these nodes has made is still there, besides the outputs: a hook collects it, say.

    Once a region has run, what it is to recompute is gone. Looks at all objects that are new: see `_garbage_kept`. What
    only the graph holds, as the base of a view, is in Python's list of objects too; nothing of Python refers to it.
    """
    known = set(map(id, outputs))
    young = [each for each in gc.get_objects(generation=0) if issubclass(type(each), Tensor)]
    inside = [each for each in young if id(each) not in known and each.grad_fn in nodes]
    holders = gc.get_referrers(*inside) if inside else []
    return any(each is not young and each is not inside and not isinstance(each, FrameType) for each in holders)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Let no automatic collection make the objects old that come to be in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _add_received(
    proof: CallProof,
    received: dict[_Key, list[Fingerprint]],
    targets: Sequence[tuple[int, _Key, Node]],
    gradients: Sequence[Any],
) -> None:
    for place, key, _ in targets:
        gradient = gradients[place]
        if isinstance(gradient, Tensor) and (proof.is_simulated or is_plain(gradient)):
            received.setdefault(key, []).extend(proof.fingerprints([gradient], has_sketch=True))


def _receive_and_drop(
    proof: CallProof,
    received: dict[_Key, list[Fingerprint]],
    targets: Sequence[tuple[int, _Key, Node]],
    gradients: Sequence[Any],
    _: object,
) -> tuple[Any, ...]:
    """Hook of a node of the original: its gradients for inputs and weights go nowhere."""
    _add_received(proof, received, targets, gradients)
    dropped = {place for place, *_ in targets}
    return tuple(None if place in dropped else gradient for place, gradient in enumerate(gradients))


def _is_asked(node: Node) -> bool:
    """Whether the backward that runs wants the gradient that a node gets: `torch.autograd.grad` names a few."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # Of a leaf that `torch.autograd.grad` names.
        return False


def _hook_first(tensor: Tensor, hook: Any) -> None:
    """Place a gradient hook before those that are there."""
    hooks: Any = tensor._backward_hooks
    before = dict(hooks or {})
    if before:
        hooks.clear()
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # upstream
    # torch calls them in the order in which they came to be there.
    (tensor._backward_hooks or {}).update(before)


def _acts_in_backward(module: nn.Module) -> bool:
    """Whether a backward does more here than give gradients: in hooks, or to what weights hold. It would do it twice.

    Engines with fused kernels add the gradient of a weight to its `main_grad` (Megatron, TransformerEngine).
    """
    forward = inspect.unwrap(type(module).forward)
    return (
        bool(module._backward_hooks or module._backward_pre_hooks)
        or "register_hook" in getattr(getattr(forward, "__code__", None), "co_names", ())
        or any(
            isinstance(value, Tensor)
            for weight in module._parameters.values()
            if weight is not None and weight.requires_grad
            for value in vars(weight).values()
        )
    )


@contextmanager
def _without_hooks(weights: Collection[Tensor]) -> Iterator[None]:
    """Take the gradient hooks of weights away for the block: autograd calls them whether a gradient comes or not.

    Their gradients too, and what else is set on them: functions of others may do so by hand.
    """
    attributes = [(weight, dict(vars(weight))) for weight in weights]
    found: list[tuple[Any, dict[Any, Any]]] = []
    gradients = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    for weight, _ in gradients:
        weight.grad = None
    for weight in weights:
        hooks: Any = weight._backward_hooks
        if hooks:
            found.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)
        for weight, before in attributes:
            _put_back(vars(weight), before)
            weight.grad = None
        for weight, gradient in gradients:
            weight.grad = gradient


def _total(found: Sequence[Fingerprint]) -> list[Fingerprint]:
    """Return one fingerprint for the parts of a gradient, whatever their order; none for none."""
    if len(found) < 2:
        return list(found)
    sketches = [each.sketch for each in found if each.sketch is not None]
    sketch = torch.stack(sketches).sum(0) if len(sketches) == len(found) else None
    return [Fingerprint(found[0].shape, found[0].dtype, torch.stack([each.hash for each in found]).sum(), sketch)]


def _distance(ones: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> float:
    if len(ones) != len(others):
        return 1.0
    distances = [relative_distance(one, other) for one, other in zip(ones, others, strict=True)]
    # Where it is not known there is no measure: as far as can be.
    return max((1.0 if each is None or isnan(each) else each for each in distances), default=0.0)


# --- Values and state. ---


def _tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _copied(value: Any) -> Any:
    """Return containers as copies, so that what the original puts into them stays there."""
    if isinstance(value, dict | list | set | deque):
        return copy.copy(value)
    return value


def _cut_off(value: Any) -> Any:
    """Return what a tuple, a list or a dictionary holds without its graph, through which no backward is to go twice."""
    return tree_map_only(Tensor, _cut, value) if isinstance(value, tuple | list | dict) else value


def _cut(tensor: Tensor) -> Tensor:
    # No leaf: see `_run_forward`.
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_().view_as(tensor)


def _named(place: object) -> str:
    return f"argument {place}"


def _has_tiles(module: nn.Module | None) -> bool:
    """Whether parts of a module run in tiles, which have a proof of their own."""
    forwards = [vars(inner).get("forward") for inner in (() if module is None else module.modules())]
    return any(isinstance(forward, partial) and forward.func is run_tiled for forward in forwards)


def _held_tensors(module: nn.Module) -> list[Tensor]:
    """Return the buffers below a module, and tensors that are plain attributes there."""
    held = (value for inner in module.modules() for each in (vars(inner), inner._buffers) for value in each.values())
    return [value for value in held if isinstance(value, Tensor) and not value.is_inference()]


@contextmanager
def _state_put_back(module: nn.Module, written: Sequence[Tensor]) -> Iterator[None]:
    """Put attributes of the modules below one back when the block ends, and the values of tensors that it writes to."""
    copies = [tensor.detach().clone() for tensor in written]
    attributes = [(inner, dict(vars(inner))) for inner in module.modules()]
    containers: list[tuple[Any, Any]] = [
        (value, copy.copy(value))
        for inner, found in attributes
        for name, value in found.items()
        if isinstance(value, dict | list | set | deque) and not (is_managed(inner) and _is_weight(name, value))
    ]
    with _unsafe_preserve_version_counter(tuple(written)):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, values in zip(written, copies, strict=True):
                    tensor.copy_(values)
    for inner, before in attributes:
        now = vars(inner)
        if is_managed(inner):
            # The engine exchanges the weights, some for attributes.
            kept = {name: value for name, value in before.items() if not _is_weight(name, value)}
            before = kept | {name: value for name, value in now.items() if _is_weight(name, value)}
        _put_back(now, before)
    for container, found in containers:
        if isinstance(container, dict):
            _put_back(container, found)
        elif isinstance(container, set):
            container.intersection_update(found)
            container.update(found)
        elif list(map(id, container)) != list(map(id, found)):
            container.clear()
            container.extend(found)


def _is_weight(name: str, value: object) -> bool:
    return name == "_parameters" or isinstance(value, Tensor)


def _put_back(now: dict[Any, Any], found: dict[Any, Any]) -> None:
    if list(now) != list(found) or any(now[name] is not value for name, value in found.items()):
        now.clear()
        now.update(found)


@contextmanager
def _python_random(python: Any, numpy_state: Any) -> Iterator[None]:
    """Let Python and numpy draw what they drew in the forward."""
    numpy = None if numpy_state is None else _numpy_random()
    found = random.getstate(), None if numpy is None else numpy.get_state()
    random.setstate(python)
    if numpy is not None:
        numpy.set_state(numpy_state)
    try:
        yield
    finally:
        random.setstate(found[0])
        if numpy is not None:
            numpy.set_state(found[1])


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def _detached(tensor: Tensor) -> Tensor:
    # A node that holds its own output would keep itself alive for ever.
    return tensor.detach()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _dropped(tensor: Tensor) -> None:
    return None


def _never_unpacked(nothing: None) -> Tensor:
    raise AssertionError("this graph is of a run that is only compared")


_KEEP = _detached, _as_it_is
_DROP = _dropped, _never_unpacked
