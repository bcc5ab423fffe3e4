"""Where a difference comes from: the first layer in backward order, and in it the first recomputed operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ckpt.regions.call import is_in_backward
from hf_ckpt.verify.fingerprints import of_tensor, tensors_in
from hf_ckpt.verify.record import Gradients, MicroBatch, Record

if TYPE_CHECKING:
    from hf_ckpt.verify.recorder import Recorder

# Selective checkpointing keeps what these return, so that they are missing in a recomputation.
_KEPT = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_dot_product")
# Checkpointing detaches what it saves.
_NOT_COMPUTING = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")
_ENGINES = ("c10d.", "_c10d_functional.", "c10d_functional.", "fsdp.", "record_param_comms", "profiler.")
# Memory that nobody has written to yet.
_UNWRITTEN = ("empty", "new_empty", "resize_")


@dataclass(frozen=True)
class FirstDifference:
    """Where reference and planned trial part in backward.

    Args:
        layer: path of the layer, or of the parameter outside of all layers.
        micro_batch: number of the micro-batch, counted over all steps.
    """

    layer: str
    micro_batch: int


@dataclass(frozen=True)
class Operator:
    """One operator that ran.

    Args:
        name: as `aten.mm.default`.
        module: path of the module that ran it.
        outputs: digests of what it returned, taken at once.
        has_gradients: whether gradients were enabled.
        is_in_place: whether it wrote into an argument.
        has_indices: whether it returned whole numbers, as a router's choice does.
    """

    name: str
    module: str
    outputs: tuple[str, ...]
    has_gradients: bool
    is_in_place: bool
    has_indices: bool


@dataclass(frozen=True)
class OperatorDifference:
    """The first recomputed operator that is not its forward twin.

    Args:
        forward: the twin, or what the forward ran in its place; None behind the forward's last operator.
        recomputed: the operator.
        kept: operators of the forward, right before the twin, whose outputs were kept rather than recomputed.
        indices_differ: whether an operator of the same module returned other whole numbers, now or later.
    """

    forward: Operator | None
    recomputed: Operator
    kept: tuple[Operator, ...] = ()
    indices_differ: bool = False


def first_layer(reference: Record, planned: Record) -> FirstDifference | None:
    """Return the first layer, in backward order, whose input gradient differs while that at its output is equal."""
    pairs = zip(reference.micro_batches, planned.micro_batches, strict=False)
    for number, (expected, got) in enumerate(pairs):
        layer = _first_layer_of(expected, got)
        if layer is not None:
            return FirstDifference(layer, number)
    return None


def _first_layer_of(expected: MicroBatch, got: MicroBatch) -> str | None:
    there, here = dict(expected.layer_gradients), dict(got.layer_gradients)
    equal_behind = True
    for (path, side), digest in expected.layer_gradients:
        # Input gradients may be asked for in one of the two trials only: what only one has cannot be compared.
        if (path, side) not in here:
            continue
        is_equal = digest == here[path, side]
        if not is_equal and side == "input" and equal_behind:
            return path
        if side == "output":
            equal_behind = is_equal and there[path, side] == digest
    return None


def layer_of_first_parameter(reference: Gradients, planned: Gradients, layers: Sequence[str]) -> str | None:
    """Return the last layer of which a parameter's gradient differs; in backward it comes first."""
    differing = [name for name, gradient in reference.items() if not _same(gradient, planned.get(name))]
    for layer in reversed(layers):
        if any(name.startswith(layer + ".") for name in differing):
            return layer
    return differing[0] if differing else None


def _same(expected: Tensor | None, got: Tensor | None) -> bool:
    if expected is None or got is None:
        return expected is got
    return torch.equal(expected, got)


class OperatorWatch(TorchDispatchMode):
    """Writes down the operators of one layer, those of its forward and those of its recomputation apart.

    Args:
        layer: path of the layer.
        micro_batch: number of the micro-batch that is watched.
    """

    def __init__(self, layer: str, micro_batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch publishes it without types
        self.layer = layer
        self.micro_batch = micro_batch
        self.recorder: Recorder | None = None
        self.forward: list[Operator] = []
        self.recomputed: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note it if the watched layer ran it."""
        output = func(*args, **(kwargs or {}))
        assert self.recorder is not None, "the trial gives the watch its recorder"
        if self.recorder.is_looking:
            return output
        if not is_in_backward():
            if self.recorder.is_inside(self.layer):
                self.forward.append(_operator(func, self.recorder.inside, output))
        # Autograd's own operators run without gradients, recomputed ones with them.
        # On meta: tensors that selective recomputation has stand for products, and what is computed with them.
        elif (
            torch.is_grad_enabled()
            and self.recorder.layer == self.layer
            and not any(tensor.is_meta for tensor in tensors_in(output))
        ):
            self.recomputed.append(_operator(func, self.recorder.inside, output))
        return output

    def first_difference(self) -> OperatorDifference | None:
        """Return the first recomputed operator that differs from its forward twin."""
        # A reentrant checkpoint runs its whole forward without gradients; elsewhere what runs so runs so again.
        is_reentrant = not any(operator.has_gradients for operator in self.forward)
        forward = [op for op in self.forward if _counts(op) and (op.has_gradients or is_reentrant)]
        recomputed = [op for op in self.recomputed if _counts(op)]
        if not forward or not recomputed:
            return None
        pairs = list(_aligned(forward, recomputed))
        for number, (twin, again, kept) in enumerate(pairs):
            if twin is None or twin.outputs != again.outputs or (kept and not kept_ones(kept)):
                return OperatorDifference(twin, again, kept, _indices_differ(pairs[number:]))
        return None


def _operator(func: Any, module: str, output: Any) -> Operator:
    tensors = list(tensors_in(output))
    name = str(func)
    is_unwritten = name.removeprefix("aten.").startswith(_UNWRITTEN)
    return Operator(
        name=name,
        module=module,
        outputs=() if is_unwritten else tuple(of_tensor(tensor) for tensor in tensors),
        has_gradients=torch.is_grad_enabled(),
        is_in_place=bool(func._schema.is_mutable),
        has_indices=any(not tensor.is_floating_point() and tensor.dtype != torch.bool for tensor in tensors),
    )


def _counts(operator: Operator) -> bool:
    """Whether an operator belongs to the layer's computation: checkpointing detaches, and engines gather weights."""
    return operator.name not in _NOT_COMPUTING and not operator.name.startswith(_ENGINES)


Pair = tuple[Operator | None, Operator, tuple[Operator, ...]]


def _aligned(forward: Sequence[Operator], recomputed: Sequence[Operator]) -> Iterator[Pair]:
    """Yield each recomputed operator with its forward twin, and with the operators passed over to get there."""
    first = _next_twin(forward, 0, recomputed[0])
    at = first or 0
    for again in recomputed:
        found = _next_twin(forward, at, again)
        if found is None and again.name == recomputed[0].name and again.module == recomputed[0].module:
            # A nested segment recomputes a layer twice.
            found = first
        if found is None and not again.module:
            # Not told by a module: it may be the next layer's, before that enters its first module.
            continue
        if found is None:
            yield forward[at] if at < len(forward) else None, again, ()
            return
        yield forward[found], again, tuple(forward[at:found])
        at = found + 1


def _next_twin(forward: Sequence[Operator], start: int, again: Operator) -> int | None:
    return next((at for at in range(start, len(forward)) if _is_twin(forward[at], again)), None)


def _is_twin(forward: Operator, again: Operator) -> bool:
    return forward.name == again.name and again.module in ("", forward.module)


def kept_ones(passed_over: Sequence[Operator]) -> list[Operator]:
    """Return the operators, of those missing in recomputation, whose outputs selective checkpointing keeps."""
    return [operator for operator in passed_over if operator.name.removeprefix("aten.").startswith(_KEPT)]


def _indices_differ(pairs: Sequence[Pair]) -> bool:
    """Whether the first operators that differ lead to other whole numbers, in the same module or in one right below."""
    module = pairs[0][1].module
    return any(
        twin is not None and twin.has_indices and twin.outputs != again.outputs
        for twin, again, _ in pairs
        if module in (again.module, again.module.rpartition(".")[0])
    )
