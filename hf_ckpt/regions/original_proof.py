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

import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils import checkpoint

from hf_ckpt.garbage_collection import no_cycles_collected
from hf_ckpt.regions.execution_state import (
    AutocastState,
    ConcurrentRun,
    ForwardContext,
    Function,
    RandomState,
    extra_run,
    is_compiled,
    module_of,
)
from hf_ckpt.regions.fingerprints import (
    Fingerprint,
    all_equal,
    is_plain,
    largest_distance,
    relative_distance,
    rounding_of,
)
from hf_ckpt.regions.held_state import is_managed
from hf_ckpt.regions.module_state import CallState, gradient_hooks_put_back
from hf_ckpt.regions.put_back import copied, cut_off
from hf_ckpt.regions.recompute import arguments_of, belongs_to_graph
from hf_ckpt.regions.region_graph import (
    Goals,
    HooksNoted,
    Key,
    acts_in_backward,
    edges_of,
    goals_of,
    hook_first,
    is_asked,
    is_held_elsewhere,
    is_hooked,
    leads_around,
    without_hooks,
)
from hf_ckpt.regions.routing import may_vary
from hf_ckpt.regions.selective.dispatch import selection_paused
from hf_ckpt.regions.tiling import run_tiled
from hf_ckpt.regions.value_proof import (
    ALLOWED,
    KEEP,
    MOST_RUNS,
    NOISE,
    CallProof,
    RegionProof,
    by_distance,
    differ_by_rounding,
    drop,
    explaining_noise,
    never_unpack,
)
from hf_ckpt.upstream.torch import (
    BACKWARDS,
    GRAPHS,
    current_graph_task_id,
    dispatch_modes,
    hidden_from_modes,
    is_transformed,
    num_nodes_made,
    queue_callback,
    sequence_number,
    tree_leaves,
)

logger = logging.getLogger(__name__)

_NO_TASK = -1
_MAX_NAMES = 3


def run_region_proven(proof: RegionProof, region: Function, function: Function, *args: Any) -> Any:
    """Run `region(function, *args, proof=...)`, and have it held against `function` where that is due."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not proof.awaits_original():
        return region(function, *args, proof=proof)
    original = OriginalCall(proof, function, args)
    # Collections would make old what `is_held_elsewhere` looks for.
    with no_cycles_collected():
        with original.state.as_in_forward():
            returned = region(function, *args, proof=original)
        original.end_forward(returned)
    return returned


class OriginalCall:
    """One call of a region, and of the original with the same arguments. The region takes it for its `RegionProof`."""

    def __init__(self, region: RegionProof, function: Function, args: Sequence[Any]) -> None:
        self._region = region
        self._function, self._arguments = arguments_of(function, args)
        owners = (module_of(function), *args)
        # Not by its truth: what a compiler has wrapped asks the module inside how long it is.
        self._module = next((each for each in owners if isinstance(each, nn.Module)), None)
        # Its own: what the region does to the modules while it runs is not what they were called with.
        self.state = CallState(function, args)
        # The proof holds this object, as long as the graph does.
        self._proof_ref: weakref.ref[CallProof] | None = None
        self._held: CallProof | None = None
        self._places: list[int | str] = []
        self._goals: Goals = {}
        self._is_late = False
        self._is_hooked = False
        self._has_compared_outputs = False
        # Of the backward that runs: one graph may have several.
        self._task = _NO_TASK
        self._output_gradients: dict[int, Tensor] = {}
        self._received: dict[Key, list[Fingerprint]] = {}
        self._not_asked: set[Key] = set()
        self._num_nodes = self._num_nodes_left = 0
        self._expected: dict[Key, list[Fingerprint]] | None = None
        self._inputs: Sequence[Tensor] = ()
        self.fault: str | None = None
        """What is wrong, unless the recomputation shows more."""

    @property
    def _proof(self) -> CallProof | None:
        """The proof of the call; None if it is not proven, or all is known."""
        return None if self._proof_ref is None else self._proof_ref()

    @property
    def has_noise(self) -> bool:
        """See `RegionProof`."""
        return self._region.has_noise

    # --- While the region runs forward. ---

    def check_again(self) -> None:
        """See `RegionProof`."""
        self._region.check_again()

    def note_other_inputs(self, operator: str) -> None:
        """See `RegionProof`."""
        self._region.note_other_inputs(operator)

    def start_call(self, function: Function, tensors: Sequence[Any]) -> CallProof | None:
        """See `RegionProof`."""
        proof = self._region.start_call(function, tensors)
        module = self._module
        if proof is None or not proof.runs_to_end or module is None or any(map(is_compiled, module.modules())):
            return proof
        self._proof_ref = weakref.ref(proof)
        # A region that saves nothing lets go of it at once.
        self._held = proof
        proof.original = self
        self._region.begin_original(self)
        self._places = [place for place, value in self._arguments.items() if belongs_to_graph(place, value)]
        firsts: dict[int, int | str] = {}
        # Layers may ask whether two are one (torch's MultiheadAttention does), and one has one gradient.
        self._firsts = [firsts.setdefault(id(self._arguments[place]), place) for place in self._places]
        self._require_grad = [self._arguments[place].requires_grad for place in self._places]
        self._inputs = [self._arguments[place] for place in self._places]
        self._is_given_noise = may_vary(self._inputs) and self.state.has_router
        self._given = proof.fingerprints(self._inputs, has_sketch=self._is_given_noise)
        self._goals = goals_of(self._arguments)
        weight = next(module.parameters(), None)
        self._random_state = RandomState.of(*self._arguments.values(), weight)
        self._autocast = AutocastState.now().without_cache()
        self._context = ForwardContext()
        # The graph keeps them, and they come back for the recomputation.
        self._arguments.update(dict.fromkeys(self._places))
        self._arguments = {place: copied(value) for place, value in self._arguments.items()}
        self._first_node = num_nodes_made()
        return proof

    def end_forward(self, returned: Any) -> None:
        """Note what the region returned, and watch the gradients that go in and out."""
        proof, self._held = self._held, None
        if proof is None:
            return
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
            and sequence_number(node) >= self._first_node
        }.values()
        if not numbers:
            self._watch_what_passes_through(proof, inputs, outputs)
            return
        assert self._module is not None
        if GRAPHS.gone or BACKWARDS.gone or _has_tiles(self._module):
            return
        if is_managed(self._module):
            # Its hooks would gather, reduce and free in the middle of the real backward (seen with FSDP2 under
            # transformers 5.0: gradients of that step differed in the last bit).
            self._leave_gradients_out("an engine that shards acts in its backward")
            return
        if any(map(acts_in_backward, self._module.modules())):
            self._leave_gradients_out("a backward does more inside of it than to give gradients, and would do it twice")
            return
        edges, nodes, self._earlier = edges_of([outputs[number] for number in numbers], goals, self._first_node)
        if is_held_elsewhere(nodes, outputs):
            # What the loss makes of it besides, the original would not get.
            self._leave_gradients_out("something holds tensors from inside of it")
            return
        # These nodes are not kept: they keep the hooks, and with them this object.
        for node, targets in edges:
            node.register_hook(partial(self._receive, targets))
        if goals:
            # By its turn all of the region has run that runs at all: experts may be idle.
            oldest = min((node for node, _ in goals), key=lambda node: sequence_number(node))
            oldest.register_prehook(self._leave_region)
        self._num_nodes = len(edges)
        self._keys = {key for _, targets in edges for _, key, _ in targets}
        for number in numbers:
            self._watch_output(number, outputs[number])
        # Of one output all has come before the region is recomputed. Of several, one may be used in the region too.
        self._is_late = len(numbers) > 1

    def _note_hook(self) -> None:
        # It would act a second time: on what it counts, logs or averages.
        self._is_hooked = True

    def _leave_gradients_out(self, why: str) -> None:
        logger.info("%s: gradients are not held against the original's, as %s.", self._region.path, why)

    def _watch_output(self, number: int, output: Tensor) -> None:
        """Note the gradient of an output as it comes to the region, when hooks of others may have changed it."""
        node, place, hooks = output.grad_fn, output.output_nr, output._backward_hooks
        assert node is not None
        if hooks:
            # These were placed in the region, and belong to it: the gradient is taken before them.
            hook_first(output, partial(self._note_first, number, hooks, len(hooks) + 1))
        else:
            node.register_prehook(lambda gradients: self._note_output_gradient(number, gradients[place]))

    def _watch_what_passes_through(self, proof: CallProof, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Run the original when the gradient of an output comes: no recomputation is to be expected."""
        # What the region returns, it was given, or it has no graph. So the inputs are held here.
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
        task = current_graph_task_id()
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

    def _receive(self, targets: Sequence[tuple[int, Key, Node]], gradients: Sequence[Any], _: object) -> None:
        """Note what a node of the region gives to inputs and weights."""
        if self._proof is None or is_transformed():
            return
        self._begin_backward()
        _add_received(self._proof, self._received, targets, gradients)
        self._not_asked.update(key for place, key, node in targets if gradients[place] is None and not is_asked(node))
        self._num_nodes_left -= 1
        if not self._num_nodes_left:
            self._compare_gradients()

    def _leave_region(self, _: object) -> None:
        if self._proof is not None and self._task == current_graph_task_id():
            self._compare_gradients()

    def before_recomputation(self, tensors: Sequence[Tensor]) -> None:
        """Run the original: the region is about to be recomputed from `tensors`."""
        if self._proof is None or is_transformed():
            return
        has_gradients = bool(self._output_gradients) and self._task == current_graph_task_id()
        has_gradients = has_gradients and not self._is_hooked
        if self._expected is not None or (self._has_compared_outputs and not has_gradients):
            return
        is_now = has_gradients and not self._is_late
        if (run := self._try_run(tensors, self._output_gradients if is_now else None)) is None:
            return
        outputs, expected = run
        has_gradients = has_gradients and not self._is_hooked
        if not self._has_compared_outputs and (fault := self._fault_of_values(tensors, outputs)) is not None:
            self.fault = fault
            # What passes through is not recomputed, which would show more.
            self._end(None if self._num_nodes else fault)
            return
        self._has_compared_outputs = True
        self._region.end_original()
        if is_now and expected is None:
            self._end(None)
        elif has_gradients:
            # What is late, `_compare_gradients` asks for.
            self._expected = expected or {}
            # The region lets go of its proof once it is recomputed.
            self._held = self._proof
            # For further runs, if kernels do not repeat themselves.
            self._inputs = tensors
            queue_callback(partial(self._end_backward, self._task))

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
    ) -> tuple[list[Fingerprint], dict[Key, list[Fingerprint]] | None] | None:
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
    ) -> tuple[list[Fingerprint], dict[Key, list[Fingerprint]] | None]:
        """Return what the original returns and, if the gradients of its outputs are given, those of what it used."""
        assert self._proof is not None
        with ExitStack() as entered:
            for context in (ConcurrentRun(), extra_run(), selection_paused(), torch.enable_grad()):
                entered.enter_context(context)
            if any(type(mode).__module__ == checkpoint.__name__ for mode in dispatch_modes()):
                # Where another library has torch's own selective checkpointing run a region, that hands out once.
                entered.enter_context(hidden_from_modes())
            # Routed as the region was, or kernels that do not repeat themselves would send tokens elsewhere.
            routing = self._proof.routing
            with nullcontext() if routing is None else routing.run(is_strict=False):
                outputs, goals, leaves, first_node = self._run_forward(tensors, keeps=gradients is not None)
            found = self._proof.fingerprints(outputs, has_sketch=True)
            if gradients is None or self._is_hooked:
                return found, None
            # Where a region is recomputed, autocast is that of its forward.
            with self._autocast_of_backward.restored():
                return found, self._gradients_of(outputs, gradients, goals, leaves, first_node)

    def _run_forward(self, tensors: Sequence[Tensor], *, keeps: bool) -> tuple[list[Tensor], Goals, list[Tensor], int]:
        """Return what the original returns, and for its backward: the goals, the leaves behind them, the first node."""
        assert self._module is not None
        with ExitStack() as entered:
            for context in (
                self._random_state.brought_back(),
                self._autocast.restored(),
                gradient_hooks_put_back(self._module.parameters()),
                # Once there is one, no backward goes through this run.
                HooksNoted(self._note_hook, leaves_out=not self.state.takes_gradients),
                saved_tensors_hooks(*(KEEP if keeps or self.state.takes_gradients else _DROP)),
                self.state.as_in_forward(),
            ):
                entered.enter_context(context)
            inputs = [
                tensor.detach().requires_grad_(needs) for tensor, needs in zip(tensors, self._require_grad, strict=True)
            ]
            given = {place: cut_off(copied(value)) for place, value in self._arguments.items()}
            # No leaves: they are none in the model, and hooks of others (torch's FLOP counter) do not take them here.
            views = {place: tensor.view_as(tensor) for place, tensor in zip(self._places, inputs, strict=True)}
            given.update((place, views[first]) for place, first in zip(self._places, self._firsts, strict=True))
            first_node = num_nodes_made()
            goals = goals_of(given)
            returned = self._context.run(
                self._function,
                *(value for place, value in given.items() if isinstance(place, int)),
                **{place: value for place, value in given.items() if isinstance(place, str)},
            )
            leaves = [tensor for tensor in inputs if tensor.requires_grad]
            return _tensors_of(returned), goals, leaves, first_node

    def _gradients_of(
        self,
        outputs: list[Tensor],
        gradients: dict[int, Tensor],
        goals: Goals,
        leaves: list[Tensor],
        first_node: int,
    ) -> dict[Key, list[Fingerprint]] | None:
        """See `_run`; None where they are left out."""
        assert self._proof is not None
        received: dict[Key, list[Fingerprint]] = {}
        numbers = [number for number in gradients if number < len(outputs) and outputs[number].requires_grad]
        roots = [outputs[number] for number in numbers]
        given = [gradients[number] for number in numbers]
        edges, nodes, _ = edges_of(roots, goals, first_node)
        if any(map(is_hooked, {*nodes, *(node for node, _ in goals)})):
            self._note_hook()
            return None
        weights = {node.variable for _, targets in edges for _, _, node in targets if hasattr(node, "variable")}
        if leads_around(nodes, goals, weights):
            self._leave_gradients_out("it has tensors, not as arguments, that come of its weights")
            return None
        if self._is_late:
            for root, gradient in zip(roots, given, strict=True):
                # With what the region itself adds to it.
                hook_first(root, lambda _, whole=gradient: whole)
        for node, targets in edges:
            node.register_hook(partial(_receive_and_drop, self._proof, received, targets))
        outputs.clear()
        if edges:
            # What a graph of its own saves, nothing asks for.
            with without_hooks(weights), saved_tensors_hooks(*_DROP):
                torch.autograd.grad(roots, [*leaves, *weights], given, allow_unused=True, create_graph=self._has_graph)
        return received

    # --- Comparing. ---

    def _fault_of_values(self, tensors: Sequence[Tensor], outputs: list[Fingerprint]) -> str | None:
        """Return what is wrong with what the region was given for its recomputation, or with what it returned."""
        assert self._proof is not None
        given = self._proof.fingerprints(tensors, has_sketch=self._is_given_noise)
        if self._proof.is_simulated:
            return None
        with self._proof.unobserved():
            return self._difference_of_values(tensors, given, outputs)

    def _difference_of_values(
        self, tensors: Sequence[Tensor], given: list[Fingerprint], outputs: list[Fingerprint]
    ) -> str | None:
        if all_equal([*self._given, *self._returned], [*given, *outputs]):
            return None
        distance = largest_distance(self._returned, outputs)
        if not all_equal(self._given, given):
            is_noise = distance is not None and distance < NOISE * rounding_of(self._returned)
            if self._is_given_noise and is_noise and differ_by_rounding(self._given, given):
                self._region.note_noise(distance or 0.0)
                return None
            pairs = zip(self._places, self._given, given, strict=False)
            place = next((place for place, one, other in pairs if not all_equal([one], [other])), None)
            return f"its recomputation is given another {_named(place)} than its forward was."
        if distance is not None:
            noise = explaining_noise(distance, outputs, lambda: self._run(tensors, None)[0])
            if noise is not None:
                self._region.note_noise(noise)
                return None
        return (
            "under the plan it returned something else than the forward that its module had before"
            f"{by_distance(distance)}. If nothing has changed that forward since, and it draws random numbers from "
            "torch alone, this is a fault of hf_ckpt: please report it."
        )

    def _compare_gradients(self) -> None:
        if self._proof is None:
            return
        if self._is_hooked:
            self._leave_gradients_out("hooks on them act inside of it, or on its outputs")
            self._end(None)
            return
        if self._expected is None:
            return
        if self._is_late:
            if (run := self._try_run(self._inputs, self._output_gradients)) is None:
                return
            outputs, expected = run
            # What steps in backward (an optimizer in hooks of gradients) may have changed the weights since.
            if expected is None or (not self._proof.is_simulated and not all_equal(outputs, self._returned)):
                self._end(None)
                return
            self._expected = expected
        if self._proof.is_simulated:
            self._end(None)
            return
        with self._proof.unobserved():
            self._end(self._difference_of_gradients(self._expected, self._received))

    def _difference_of_gradients(
        self, expected: dict[Key, list[Fingerprint]], received: dict[Key, list[Fingerprint]]
    ) -> str | None:
        """Return what is wrong with the gradients of the region."""
        assert self._module is not None
        lost = [key for key, found in expected.items() if found and key not in self._keys]
        both = [key for key, found in expected.items() if found and received.get(key)]
        if not self._num_nodes_left:
            lost += [key for key, found in expected.items() if found and key in self._keys and not received.get(key)]
            both += [key for key, found in received.items() if found and not expected.get(key)]
        left_out = self._not_asked | self._earlier
        lost, both = ([key for key in keys if key not in left_out] for keys in (lost, both))
        if lost and any(parameter.is_meta for parameter in self._module.parameters()):
            return (
                f"{self._names(lost)} get no gradient, without a plan either: they lie on `meta` and are loaded for "
                "each forward (accelerate's offload: device_map, cpu_offload), which the gradient goes to. Load the "
                "model so that what trains stays on the device."
            )
        if lost:
            return f"the plan loses the gradient of {self._names(lost)}, which the module's own forward gives."
        pairs = {key: (_total(expected.get(key, [])), _total(received[key])) for key in both}
        if all_equal(*([each for pair in pairs.values() for each in pair[number]] for number in (0, 1))):
            return None
        differ = {key: pair for key, pair in pairs.items() if not all_equal(*pair)}
        if (noise := self._noise_of(differ)) is not None:
            self._region.note_noise(noise)
            return None
        distance = max((_distance(*pair) for pair in differ.values()), default=0.0)
        return (
            f"the plan gives {self._names(list(differ))} another gradient than the module's own forward does"
            f"{by_distance(distance)}. If nothing has changed the module or its hooks since its forward, and they draw "
            "random numbers from torch alone, this is a fault of hf_ckpt: please report it."
        )

    def _noise_of(self, differ: dict[Key, tuple[list[Fingerprint], list[Fingerprint]]]) -> float | None:
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

    def _names(self, keys: Sequence[Key]) -> str:
        assert self._module is not None
        weights = {id(weight): name for name, weight in self._module.named_parameters()}
        names = [weights.get(key[1], "a weight") if isinstance(key, tuple) else _named(key) for key in keys]
        return ", ".join(sorted(names)[:_MAX_NAMES]) + f" and {len(names) - _MAX_NAMES} more" * (
            len(names) > _MAX_NAMES
        )


def _add_received(
    proof: CallProof,
    received: dict[Key, list[Fingerprint]],
    targets: Sequence[tuple[int, Key, Node]],
    gradients: Sequence[Any],
) -> None:
    for place, key, _ in targets:
        gradient = gradients[place]
        if isinstance(gradient, Tensor) and (proof.is_simulated or is_plain(gradient)):
            received.setdefault(key, []).extend(proof.fingerprints([gradient], has_sketch=True))


def _receive_and_drop(
    proof: CallProof,
    received: dict[Key, list[Fingerprint]],
    targets: Sequence[tuple[int, Key, Node]],
    gradients: Sequence[Any],
    _: object,
) -> tuple[Any, ...]:
    """Hook of a node of the original: its gradients for inputs and weights go nowhere."""
    _add_received(proof, received, targets, gradients)
    dropped = {place for place, *_ in targets}
    return tuple(None if place in dropped else gradient for place, gradient in enumerate(gradients))


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


def _tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _named(place: object) -> str:
    return f"argument {place}"


def _has_tiles(module: nn.Module | None) -> bool:
    """Whether parts of a module run in tiles, which have a proof of their own."""
    forwards = [vars(inner).get("forward") for inner in (() if module is None else module.modules())]
    return any(isinstance(forward, partial) and forward.func is run_tiled for forward in forwards)


_DROP = drop, never_unpack
