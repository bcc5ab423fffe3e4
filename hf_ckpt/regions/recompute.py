"""Recompute a region in backward: keep its inputs, drop everything else; or all but its attention's outputs.

A region is a layer (through the seam of transformers, or an instance forward) or a part of one (instance forward).
Recomputing it around its attention is mode `ffn` for layers whose own forward strings the ffn together (`fc1`,
activation, `fc2`), where no module could be recomputed alone.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import UserDict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.hooks import RemovableHandle

from hf_ckpt.errors import ChangedSinceForwardError, UnsupportedError
from hf_ckpt.regions.arguments import GivenBits, GivenState, is_cache, is_filled
from hf_ckpt.regions.compiled import recompute_compiled
from hf_ckpt.regions.execution_state import (
    ConcurrentRun,
    ForwardContext,
    Function,
    RandomState,
    is_in_backward,
    is_recomputed,
    keeps_activations,
    module_of,
    refuse_transforms,
    started_again,
    untransformed,
)
from hf_ckpt.regions.fingerprints import BitSum
from hf_ckpt.regions.module_state import CallState
from hf_ckpt.regions.recomputation_errors import is_for_others
from hf_ckpt.regions.region_graph import HooksNoted
from hf_ckpt.regions.routing import KeptRouting, may_vary
from hf_ckpt.regions.saved_tensors import NO_CONTEXTS, Checkpoint, Contexts, GradientInside, own_hooks_away
from hf_ckpt.upstream.torch import ALLOWS_NO_HOOKS, tree_map_only
from hf_ckpt.upstream.transformers import READS_CACHE_ONLY

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import CallProof, RegionProof


def recompute(function: Function, *args: Any, proof: RegionProof | None = None) -> Any:
    """Run `function(*args)` and recompute it in backward.

    Non-reentrant, and the random state of the forward is brought back: with dropout anything else gives wrong
    gradients and the same loss. Costs one more forward of the region. `proof` checks that the recomputation gives what
    the forward gave.
    """
    if torch.compiler.is_compiling():
        return recompute_compiled(partial(_recompute_eagerly, proof), function, *args)
    return _recompute_eagerly(proof, function, *args)


def _recompute_eagerly(proof: RegionProof | None, function: Function, *args: Any) -> Any:
    refuse_transforms()
    call, tensors = split_call(function, args)
    return run_watched(
        proof, function, call, tensors, lambda call_proof: run_checkpointed(call_proof, call, call.run, tensors)
    )


def run_watched(
    proof: RegionProof | None,
    function: Function,
    call: Call,
    tensors: Sequence[Tensor],
    run: Callable[[CallProof | None], Any],
) -> Any:
    """Return what `run` returns, and check its graph; `run` gets the proof of this call, or None if none is due."""
    if proof is not None and call.meets_new():
        # What it hides, as a counter of its own, no recomputation brings back.
        proof.check_again()
    call_proof = None if proof is None else proof.start_call(function, tensors)
    if call_proof is not None:
        call_proof.is_given_noise = may_vary(tensors) and call.state.has_router
    returned = holding_if_needed(call, partial(run, call_proof))
    if call_proof is not None:
        call_proof.routing = call.routing
        call_proof.check_graph()
    return returned


def run_checkpointed(
    proof: CallProof | None,
    call: Call,
    run: Function,
    tensors: Sequence[Any],
    saved: list[Any] | None = None,
    contexts: Contexts = NO_CONTEXTS,
) -> Any:
    """Run `run(*tensors)`, which runs `call`, and again in backward; to the end where `proof` needs that.

    `saved` and `contexts`: see `Checkpoint`. Raises `GradientInside`: see `holding_if_needed`.
    """
    # Entered before the checkpoint reads the state of the generators.
    with ConcurrentRun():
        if proof is not None:
            run = partial(proof.run, run)
        if not torch.is_grad_enabled():
            return run(*tensors)
        return Checkpoint(run, call.state, proof, contexts).forward(tensors, call.others, saved)


def holding_if_needed(call: Call, run: Callable[[], Any]) -> Any:
    """Return what `run` returns, which runs `call` for the first time."""
    holds = call.state.takes_gradients
    try:
        return run()
    except GradientInside as found:
        if holds:
            raise
        random_state = found.random_state
    # If the call takes a gradient inside of itself, its region runs once more from the start, and from then on holds
    # what it saves until its forward ends: a recomputation inside of the forward would take what is kept for the
    # backward.
    call.state.takes_gradients = True
    random_state.restore()
    with started_again():
        return run()


def run_region(region: Function, module: nn.Module, found: Function | None, *args: Any, **kwargs: Any) -> Any:
    """Instance `forward` of a module that becomes a region; `region` is `recompute`, or has its signature.

    `found` is the forward that stood on the instance before, or None for the class's own.
    """
    forward = original_forward(module, found)
    if not keeps_activations(module):
        return forward(*args, **kwargs)
    return region(partial(forward, **kwargs), *args)


def original_forward(module: nn.Module, found: Function | None) -> Function:
    """Return the forward that the module had, looked up on the class at each call so that a copy runs itself."""
    if found is None:
        return partial(type(module).forward, module)
    # A plain function says nothing of the module, whose state is looked at.
    return found if module_of(found) is module else MethodType(partial(_without_module, found), module)


def _without_module(found: Function, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return found(*args, **kwargs)


# --- A layer around its attention. ---


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def recompute_around(kept: KeptModules, function: Function, *args: Any, proof: RegionProof | None = None) -> Any:
    """Run `function(*args)`, a layer's forward, and recompute all of it but its kept modules in backward.

    The kept modules, whose forward must be `run_kept`, run once; when the layer is recomputed they return what they
    returned before. Costs one more copy of each kept module's output. See `recompute`.
    """
    refuse_transforms()
    call, tensors = split_call(function, args)

    def run(call_proof: CallProof | None) -> Any:
        return run_checkpointed(call_proof, call, partial(_ModuleOutputs().run, kept, call), tensors)

    return run_watched(proof, function, call, tensors, run)


# Else torch 2.11 takes what is kept, for one call, for something to compile a layer around.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def run_kept(kept: KeptModules, module: nn.Module, found: Function | None, *args: Any, **kwargs: Any) -> Any:
    """Instance `forward` of a kept module; for `found` see `run_region`."""
    forward = original_forward(module, found)
    return forward(*args, **kwargs) if kept.outputs is None else kept.outputs.of(forward, args, kwargs)


class KeptModules(threading.local):
    """Links a layer with the modules inside it whose outputs are kept. One for each layer; lives on the layer.

    Thread-local: several threads may run the layer at once, and backward runs in others than forward.
    """

    outputs: _ModuleOutputs | None = None
    """What the kept modules return in the call of the layer that runs now; None outside of one."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model made while a layer runs must not share the running call.
        return KeptModules, ()


class _ModuleOutputs:
    """What the kept modules returned in one call of the layer, in the order in which they ran."""

    def __init__(self) -> None:
        self._returned: list[tuple[Any, RandomState, GivenState, GivenBits]] = []
        self._is_complete = False
        self._next = 0

    def run(self, kept: KeptModules, call: Call, *tensors: Any) -> Any:
        """Run the layer: the first time for real, afterwards with the outputs that were kept."""
        self._next = 0
        self._add_error = call.state.add_error
        found, kept.outputs = kept.outputs, self
        try:
            returned = call.run(*tensors)
        finally:
            kept.outputs = found
        # In the recomputation too: what is returned of them, others may have written to since.
        self._check_untouched()
        self._is_complete = True
        return returned

    def _check_untouched(self) -> None:
        if any(state.find_change() for *_, state, _ in self._returned):
            self._refuse_written()

    def _refuse_written(self) -> NoReturn:
        raise ChangedSinceForwardError(
            "The layer, or what runs after it, changes its attention's output in place, so that it cannot be kept "
            'for recomputing the layer around it. Use mode "full" for this layer instead of "ffn".'
        )

    def of(self, forward: Function, args: Any, kwargs: Any) -> Any:
        """Return the output of the kept module that runs now."""
        if self._is_complete:
            output, random_state, state, bits = self._returned[self._next]
            self._next += 1
            differ = bits.differ(state.tensors())
            if isinstance(differ, Tensor):
                self._add_error(differ, self._refuse_written)
            elif differ:
                self._refuse_written()
            # What follows must see the random numbers that it saw after the attention had drawn its own.
            random_state.restore()
            return _copied(output)
        with own_hooks_away():
            output = forward(*args, **kwargs)
        detached = _copied(output, is_detached=True)
        # A detached tensor shares its version counter with the tensor that the layer goes on with.
        state = GivenState({0: detached})
        self._returned.append((detached, RandomState.of(detached), state, GivenBits(state.tensors())))
        return output


def _copied(output: Any, *, is_detached: bool = False) -> Any:
    """Return what a module returned, so that a layer may put something else into it.

    With `is_detached` its tensors are without their graph, so that keeping them keeps nothing else.
    """
    if isinstance(output, Tensor):
        return output.detach().requires_grad_(output.requires_grad) if is_detached else output
    if is_dataclass(output) and hasattr(output, "__dict__") and not isinstance(output, Mapping):
        copied = copy.copy(output)
        vars(copied).update({name: _copied(each, is_detached=is_detached) for name, each in vars(output).items()})
        return copied
    return tree_map_only(Tensor, partial(_copied, is_detached=is_detached), output)


# --- A call, kept so that it can be run again. ---


class Call:
    """A function and its arguments, without the tensors that belong to the graph, which `run` gets; see `split_call`.

    `arguments` are positional ones by number, then others by keyword; those at `places` come later. `state` is that of
    the modules that the function runs. The first run is the forward, unless `has_run` says that there was one.
    `in_parts`: each run is of other tensors, and a backward goes through it; the caller enters the state around them.
    `made_again` are the numbers of tensors that are computed again for each run. `routing` is what routers chose in the
    first run, if it is kept; of a call in parts the caller sets it for each.
    """

    __slots__ = (
        "_arguments",
        "_bits",
        "_context",
        "_dicts",
        "_function",
        "_given",
        "_in_parts",
        "_others",
        "_places",
        "_places_hooks",
        "has_run",
        "made_again",
        "routing",
        "state",
    )

    def __init__(
        self, function: Function, arguments: dict[int | str, Any], places: list[int | str], *, in_parts: bool = False
    ) -> None:
        rest = {place: None if place in places else value for place, value in arguments.items()}
        self._function = function
        self._arguments = rest
        self._places = places
        self._in_parts = in_parts
        # Unless the forward tells: another call may have run in its place.
        self._places_hooks = True
        self._context = ForwardContext()
        self._bits: tuple[GivenBits, list[BitSum]] | None = None
        self._others: list[Tensor] = []
        self.made_again: Container[int] = ()
        # Layers hand keys and values on in a dictionary (gemma3n). Each recomputation gets it as it was before the
        # forward, and what it writes there reaches nobody.
        self._dicts = {place: copy.copy(value) for place, value in rest.items() if _is_mapping(value)}
        self._given = GivenState({**rest, **self._dicts} if self._dicts else rest)
        self.has_run = False
        self.routing: KeptRouting | None = None
        self.state = CallState(function, [value for place, value in rest.items() if isinstance(place, int)])

    def runs(self, function: Function) -> bool:
        """Whether the call is one of this function."""
        return getattr(self._function, "func", self._function) is function

    @property
    def others(self) -> list[Any]:
        """What the function is given besides the tensors of the graph, and the first weight of its module."""
        module = module_of(self._function)
        weight = None if module is None else next(module.parameters(), None)
        return [*self._arguments.values(), weight]

    def meets_new(self) -> bool:
        """Whether hooks, attributes or modes have come that no call of its region has met."""
        return self.state.meets_new(self._context.kinds())

    def run(self, *tensors: Any) -> Any:
        """Call the function with `tensors` in their places.

        Raises `UnsupportedError` if an argument has changed since the call was made, whoever changed it, or if the
        state of the modules has changed in a way that cannot be restored.
        """
        given = {**self._arguments, **dict(zip(self._places, tensors, strict=True))}
        if self.has_run:
            self._check_unchanged()
        self._watch_bits(tensors)
        if self.has_run:
            given.update((place, copy.copy(value)) for place, value in self._dicts.items())
        state = nullcontext() if self._in_parts else self.state.as_in_forward()
        with state, untransformed(), ConcurrentRun(), self._routed(tensors):
            if self.has_run and not self._in_parts:
                aliases: dict[int, Tensor] = {}
                for place, value in given.items():
                    if type(value) not in _HOLD_NO_TENSOR:
                        given[place] = _aliased(aliases, value)
            args = [value for place, value in given.items() if isinstance(place, int)]
            kwargs = {place: value for place, value in given.items() if isinstance(place, str)}
            # They are for nothing in a recomputation, unless it takes gradients itself, and may be on what was there
            # before it: globals, what an object holds that it is given.
            leaves_out = self.has_run and self._places_hooks and not (self._in_parts or self.state.takes_gradients)
            number = RemovableHandle.next_id
            with HooksNoted(_ignore, leaves_out=True) if leaves_out else nullcontext():
                returned = self._call(args, kwargs)
        if not self.has_run:
            self.has_run, self._places_hooks = True, RemovableHandle.next_id != number
            self._arguments = {**self._arguments, **self._dicts}
        self._check_unchanged()
        return returned

    def _routed(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Keep in the first run, where kernels may not repeat themselves, what routers choose; later go by that."""
        if self.routing is None and not (self.has_run or self._in_parts) and torch.is_grad_enabled():
            self.routing = KeptRouting() if may_vary(tensors) and self.state.has_router else None
        return nullcontext() if self.routing is None else self.routing.run()

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            if self.has_run and (is_recomputed() or is_in_backward()):
                return self._context.run(self._function, *args, **kwargs)
            return self._function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, RuntimeError) and ALLOWS_NO_HOOKS in str(error):
                self._refuse_torch_func(error)
            # Of torch's checkpoint, who asked for the recomputation knows more. What passes is raised here: a function
            # that raises what it is handed is in the traceback of that, and the cycle would hold the region's tensors.
            if not self.has_run or isinstance(error, CheckpointError) or is_for_others(error):
                raise
            self.state.explain(error, is_tiled=self._in_parts)

    def _watch_bits(self, tensors: Sequence[Tensor]) -> None:
        """Sum the bits of what the call is given or, in later runs, look at whether they are the same."""
        if self.has_run and (self._bits is None or (self._in_parts and not is_in_backward())):
            return
        # Slices are looked at by those who cut them.
        own = [] if self._in_parts else [each for at, each in enumerate(tensors) if at not in self.made_again]
        if self._bits is None:
            self._others = self._given.tensors()
            self._bits = GivenBits(own), self.state.sums_of(self._others)
            return
        bits, sums = self._bits
        differ = bits.differ(own, sums, self.state.sums_of(self._others))
        if isinstance(differ, Tensor):
            self.state.add_error(differ, self.refuse_written)
        elif differ:
            self.refuse_written()

    def _refuse_torch_func(self, error: RuntimeError) -> NoReturn:
        raise UnsupportedError(
            f"{self.state.path} calls torch.func (grad, vjp, jacrev or hessian) in its "
            "forward. torch refuses that where tensors that autograd saves are looked at, as recomputing does (its own "
            "checkpointing too). Use torch.autograd.grad there, or leave it out of the policy."
        ) from error

    def refuse_written(self) -> NoReturn:
        """Raise: what the call is given was written to past the versions of tensors."""
        raise ChangedSinceForwardError(
            f"{self.state.path} is recomputed in backward, but since its forward began "
            "what it is given was written to past the versions of tensors (through .data, numpy or dlpack). "
            "Recomputing it would give other values. Write to a copy, or leave it out of the policy."
        )

    def _check_unchanged(self) -> None:
        changed = self._given.find_change()
        if changed is None:
            return
        place, change = changed
        raise ChangedSinceForwardError(
            f"{self.state.path} is to be recomputed, but it {change}, or another module "
            f"does: the argument {self._name_of(place)}. Recomputing it would give other values. "
            f"{self.state.what_to_do()}"
        )

    def _name_of(self, place: int | str) -> str:
        """Return the name of the parameter that an argument is for."""
        if isinstance(place, str):
            return place
        positional = [value for at, value in self._arguments.items() if isinstance(at, int)]
        module = _layer_of(self._function, positional)
        names = [] if module is None else list(inspect.signature(type(module).forward).parameters)[1:]
        number = place - (module is not None and positional[0] is module)
        return names[number] if number < len(names) else f"number {number + 1}"


def _ignore() -> None:
    """Make nothing of a hook."""


def _aliased(aliases: dict[int, Tensor], value: Any) -> Any:
    """Return an argument of a recomputation: in the place of tensors with a graph, others that no backward comes to."""
    # Hooks on gradients that a forward places on what it is given are there already. Those of its recomputation are to
    # act on nothing. `aliases` has those of the call by the `id` of the tensors: layers may ask whether two are one.
    if isinstance(value, Tensor):
        if value.requires_grad and id(value) not in aliases:
            # A leaf or none, as in the forward: only a leaf takes some hooks, and only what is none may be written to.
            aliases[id(value)] = value.detach().requires_grad_() if value.is_leaf else value.view_as(value)
        return aliases.get(id(value), value)
    return tree_map_only(Tensor, partial(_aliased, aliases), value) if _needs_gradient(value) else value


def _needs_gradient(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    items = value if isinstance(value, tuple | list) else value.values() if _is_mapping(value) else ()
    return any(map(_needs_gradient, items))


_HOLD_NO_TENSOR = frozenset({type(None), bool, int, float, str})


def _is_mapping(value: Any) -> bool:
    # `isinstance` asks the class of an abstract one, which is slow.
    return isinstance(value, dict) or UserDict in type(value).__mro__


def split_call(function: Function, args: Sequence[Any]) -> tuple[Call, list[Tensor]]:
    """Split a call into what can be kept by reference and the tensors of the graph, which are handed to autograd.

    Autograd frees them with the graph, lets saved-tensor hooks see them, and refuses them when they were changed in
    place. For `function` and `args` see `arguments_of`.
    """
    function, arguments = arguments_of(function, args)
    graph = {place: value for place, value in arguments.items() if belongs_to_graph(place, value)}
    return Call(function, arguments, list(graph)), list(graph.values())


def arguments_of(function: Function, args: Sequence[Any]) -> tuple[Function, dict[int | str, Any]]:
    """Return a function and its arguments, those of a `partial` too: positional ones by number, others by keyword."""
    keywords: dict[Any, Any] = {}
    if isinstance(function, partial):
        args, keywords, function = (*function.args, *args), function.keywords, function.func
    arguments: dict[int | str, Any] = {**dict(enumerate(args)), **keywords}
    # Every key/value cache is taken out: recomputation would append to it a second time. The seam of transformers goes
    # by the names of keyword arguments, others in each version, and GPT-2 passes its cache by position.
    caches = [place for place, value in arguments.items() if is_cache(value)]
    if caches and not getattr(type(layer := _layer_of(function, args)), READS_CACHE_ONLY, False):
        if any(is_filled(arguments[place], layer) for place in caches):
            raise UnsupportedError(
                f"{CallState(function, args).path} is to be recomputed, but it is handed a "
                "key/value cache that has something for it already (a prefix). A recomputed layer can neither read nor "
                'fill it, and the loss would change without a word. Use mode "none" or "ffn" there.'
            )
        arguments.update(dict.fromkeys(caches))
    return function, arguments


def _layer_of(function: Function, args: Sequence[Any]) -> nn.Module | None:
    """Return the module that runs: the first argument of its class's function, or what a method is bound to."""
    return args[0] if args and isinstance(args[0], nn.Module) else module_of(function)


def belongs_to_graph(place: int | str, value: Any) -> bool:
    """Whether an argument is handed to autograd; see `split_call`."""
    # Masks and rotary tables come by keyword and are shared by all layers; hidden states come either way.
    # What was made in inference mode autograd refuses to save; nobody can write to it.
    if not isinstance(value, Tensor) or value.is_inference():
        return False
    return value.requires_grad or (isinstance(place, int) and value.is_floating_point())
