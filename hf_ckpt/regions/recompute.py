"""Recompute a region in backward: keep its inputs, drop everything else; or all but its attention's outputs.

A region is a layer (through the seam of transformers, or an instance forward) or a part of one (instance forward).
Recomputing it around its attention is mode `ffn` for layers whose own forward strings the ffn together (`fc1`,
activation, `fc2`), where no module could be recomputed alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.execution_state import (
    ConcurrentRun,
    Function,
    RandomState,
    device_witnesses,
    keeps_activations,
    module_of,
    recomputing,
    refuse_transforms,
    tensors_in,
    untransformed,
)
from hf_ckpt.regions.module_state import CallState

if TYPE_CHECKING:
    from hf_ckpt.regions.value_proof import CallProof, RegionProof


def recompute(function: Function, *args: Any, proof: RegionProof | None = None) -> Any:
    """Run `function(*args)` and recompute it in backward.

    Non-reentrant, and the random state of the forward is brought back: with dropout anything else gives wrong
    gradients and the same loss. Costs one more forward of the region. `proof` checks that the recomputation gives what
    the forward gave.
    """
    if torch.compiler.is_compiling():
        # A compiler traces into torch's checkpoint, and takes all that its function closes over for an input. It
        # brings back random numbers by itself, except under its backend "eager" (`patch.checks.check_compiler`).
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True)
    refuse_transforms()
    call, tensors = split_call(function, args)
    return run_watched(
        proof, function, args, tensors, lambda call_proof: run_checkpointed(call_proof, call, call.run, tensors)
    )


def run_watched(
    proof: RegionProof | None,
    function: Function,
    args: Sequence[Any],
    tensors: Sequence[Tensor],
    run: Callable[[CallProof | None], Any],
) -> Any:
    """Return what `run` returns, and check its graph; `run` gets the proof of this call, or None if none is due."""
    call_proof = None if proof is None else proof.start_call(function, tensors)
    returned = run(call_proof)
    if call_proof is not None:
        call_proof.check_graph(function, args, returned)
    return returned


def run_checkpointed(proof: CallProof | None, call: Call, run: Function, tensors: Sequence[Any], **options: Any) -> Any:
    """Run `run(*tensors)`, which runs `call`, under torch's checkpoint; to the end again where `proof` needs that."""
    # Entered before the checkpoint reads the state of the generators.
    with ConcurrentRun():
        if proof is not None:
            options["early_stop"] = not proof.runs_to_end
            run = partial(proof.run, run)
        witnesses = device_witnesses(tensors, call.others)
        forward = _Forward(run, len(witnesses))
        given = (*witnesses, *tensors)
        return forward.end(checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=True, **options))


class _Forward:
    """The function of a checkpoint. Holds an error of its forward back until torch has left the checkpoint.

    Before 2.13 torch leaves it only when the error's traceback is gone. Until then the checkpoint's hooks take what
    others save; then the hooks that are innermost at that moment are removed, whosever they are.
    """

    def __init__(self, run: Function, num_witnesses: int) -> None:
        self._run = run
        self._num_witnesses = num_witnesses
        self._is_forward = True
        self._error: BaseException | None = None

    def __call__(self, *given: Any) -> Any:
        tensors = given[self._num_witnesses :]
        if not self._is_forward:
            with recomputing():
                return self._run(*tensors)
        try:
            return self._run(*tensors)
        except BaseException as error:  # noqa: BLE001  # `end` raises it
            self._error = error

    def end(self, returned: Any) -> Any:
        """Return what the forward returned, or raise what it raised."""
        self._is_forward = False
        if self._error is not None:
            try:
                raise self._error
            finally:
                # Its traceback has this object, and with it all that the forward has made.
                self._error = None
        return returned


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
    return found if found is not None else partial(type(module).forward, module)


# --- A layer around its attention. ---


def recompute_around(kept: KeptModules, function: Function, *args: Any, proof: RegionProof | None = None) -> Any:
    """Run `function(*args)`, a layer's forward, and recompute all of it but its kept modules in backward.

    The kept modules, whose forward must be `run_kept`, run once; when the layer is recomputed they return what they
    returned before. Costs one more copy of each kept module's output. See `recompute`.
    """
    refuse_transforms()
    call, tensors = split_call(function, args)
    run = partial(_ModuleOutputs().run, kept, call)
    return run_watched(
        proof, function, args, tensors, lambda call_proof: run_checkpointed(call_proof, call, run, tensors)
    )


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
        self._returned: list[tuple[Any, RandomState]] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._is_complete = False
        self._next = 0

    def run(self, kept: KeptModules, call: Call, *tensors: Any) -> Any:
        """Run the layer: the first time for real, afterwards with the outputs that were kept."""
        self._next = 0
        found, kept.outputs = kept.outputs, self
        try:
            returned = call.run(*tensors)
        finally:
            kept.outputs = found
        if not self._is_complete:
            self._check_untouched()
        self._is_complete = True
        return returned

    def _check_untouched(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise UnsupportedError(
                "The layer changes its attention's output in place, so that it cannot be kept for recomputing the "
                'layer around it. Use mode "full" for this layer instead of "ffn".'
            )

    def of(self, forward: Function, args: Any, kwargs: Any) -> Any:
        """Return the output of the kept module that runs now."""
        if self._is_complete:
            output, random_state = self._returned[self._next]
            self._next += 1
            # What follows must see the random numbers that it saw after the attention had drawn its own.
            random_state.restore()
            return output
        with _without_hooks_of_region():
            output = forward(*args, **kwargs)
        detached = tree_map_only(Tensor, _detached, output)
        self._returned.append((detached, RandomState.of(detached)))
        # A detached tensor shares its version counter with the tensor that the layer goes on with.
        self._versions.extend((tensor, tensor._version) for tensor in tensors_in(detached))
        return output


def _detached(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, so that keeping it keeps nothing else."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def _without_hooks_of_region() -> Iterator[None]:
    """Take the saved-tensor hooks of the innermost region away for the block, so that autograd saves there as usual.

    The public `saved_tensors_hooks` can only be stacked: identity hooks on top would hide the tensors from hooks that
    the user placed around the region (offloading, measuring), and switch off autograd's check for in-place changes.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


# --- A call, kept so that it can be run again. ---


class Call:
    """A function and its arguments, without the tensors that belong to the graph, which `run` gets; see `split_call`.

    `arguments` are positional ones by number, then others by keyword; those at `places` come later. `state` is that of
    the modules that the function runs.
    """

    __slots__ = ("_arguments", "_function", "_lengths", "_places", "_versions", "state")

    def __init__(self, function: Function, arguments: dict[int | str, Any], places: list[int | str]) -> None:
        rest = {place: None if place in places else value for place, value in arguments.items()}
        self._function = function
        self._arguments = rest
        self._places = places
        self._versions = [
            (tensor, tensor._version)
            for value in rest.values()
            for tensor in tensors_in(value)
            if not tensor.is_inference()
        ]
        self._lengths = [(value, len(value)) for value in rest.values() if isinstance(value, list)]
        self.state = CallState(function, [value for place, value in rest.items() if isinstance(place, int)])

    @property
    def others(self) -> list[Any]:
        """What the function is given besides the tensors of the graph, and the first weight of its module."""
        module = module_of(self._function)
        weight = None if module is None else next(module.parameters(), None)
        return [*self._arguments.values(), weight]

    def run(self, *tensors: Any) -> Any:
        """Call the function with `tensors` in their places.

        Raises `UnsupportedError` if an argument has changed since the call was made, whoever changed it, or if the
        state of the modules has changed in a way that cannot be restored.
        """
        self._check_unchanged()
        given = {**self._arguments, **dict(zip(self._places, tensors, strict=True))}
        args = [value for place, value in given.items() if isinstance(place, int)]
        kwargs = {place: value for place, value in given.items() if isinstance(place, str)}
        with self.state.as_in_forward(), untransformed(), ConcurrentRun():
            returned = self._function(*args, **kwargs)
        self._check_unchanged()
        return returned

    def _check_unchanged(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            change = "writes into a tensor that it is given, or another module does"
        elif any(len(values) != length for values, length in self._lengths):
            change = "appends to a list that it is given"
        else:
            return
        raise UnsupportedError(
            f"A layer that is to be recomputed {change}, so that recomputing it would give other values "
            f"({self._function!r:.120}). Leave it out of the policy."
        )


def split_call(function: Function, args: Sequence[Any]) -> tuple[Call, list[Tensor]]:
    """Split a call into what can be kept by reference and the tensors of the graph, which are handed to autograd.

    Autograd frees them with the graph, lets saved-tensor hooks see them, and refuses them when they were changed in
    place. The arguments of a `partial` count too. Every key/value cache is taken out: recomputation would append to it
    a second time. The seam of transformers takes it out of keyword arguments only, and GPT-2 passes its cache by
    position.
    """
    keywords: dict[Any, Any] = {}
    if isinstance(function, partial):
        args, keywords, function = (*function.args, *args), function.keywords, function.func
    given = {**dict(enumerate(args)), **keywords}
    arguments: dict[int | str, Any] = {place: None if is_cache(value) else value for place, value in given.items()}
    graph = {place: value for place, value in arguments.items() if belongs_to_graph(place, value)}
    return Call(function, arguments, list(graph)), list(graph.values())


def belongs_to_graph(place: int | str, value: Any) -> bool:
    """Whether an argument is handed to autograd; see `split_call`."""
    # Masks and rotary tables come by keyword and are shared by all layers; hidden states come either way.
    if not isinstance(value, Tensor):
        return False
    return value.requires_grad or (isinstance(place, int) and value.is_floating_point())


def is_cache(value: object) -> bool:
    """Whether a value is a key/value cache, or the state of a mamba or linear-attention layer."""
    # In transformers 5.0 the caches of some hybrids (jamba, zamba, qwen3_next) are no subclass of Cache, as all are in
    # 5.23: by then `isinstance` does.
    return any(base.__name__.endswith("Cache") for base in type(value).__mro__)


def save_inputs(tensors: Sequence[Tensor]) -> Tensor:
    """Hand tensors that a region starts from to autograd, before the region runs. Saved-tensor hooks see them now.

    Returns a token of no elements whose node holds the others: whoever keeps it keeps them; see `saved_behind`.
    """
    # The first argument makes autograd create a node that holds the others, even if none of them needs a gradient.
    token: Tensor = _SaveForBackward.apply(torch.empty((), requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
    return token


def saved_behind(token: Tensor) -> list[Tensor]:
    """Return the tensors that a token of `save_inputs` keeps."""
    node: Any = token.grad_fn
    return list(node.saved_tensors)


class _SaveForBackward(torch.autograd.Function):
    """Its node never runs; it only holds the tensors."""

    @staticmethod
    def forward(ctx: Any, node_maker: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return (tensors[0] if tensors else node_maker).new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise AssertionError("the output of _SaveForBackward is in no graph")
