"""What each kind of layer holds from forward to backward: which operator's output, how much, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hf_ckpt.estimate.tables import columns
from hf_ckpt.simulation.step_memory import HeldTensor, StepMemory
from hf_ckpt.units import format_bytes

_SMALL = 0.01
"""Share of a layer's bytes below which tensors are counted together."""
_SHOWN_MODULES = 2
_NUMBERS = (2,)


@dataclass(frozen=True)
class _Kind:
    """Tensors of one layer that differ in their module only."""

    part: str
    operator: str
    what: str
    num_bytes: int
    why: str


_Signature = tuple[tuple[str, _Kind], ...]
"""What a layer holds: the module below the layer, and the kind of tensor."""


def ledger(memory: StepMemory) -> Iterator[str]:
    """Yield lines of text: for each kind of layer what it holds, the most first.

    Args:
        memory: of a step.
    """
    kinds: dict[tuple[str, _Signature], tuple[_Signature, list[int]]] = {}
    for (stack, layer_idx), held in _by_layer(memory.ledger).items():
        signature = _signature(f"{stack}.{layer_idx}", held)
        # What the last layer returns is held for what comes after the layers: that makes it no other kind.
        alike = tuple((module, replace(kind, why="")) for module, kind in signature)
        kinds.setdefault((stack, alike), (signature, []))[1].append(layer_idx)
    for (stack, _), (signature, indices) in kinds.items():
        total = sum(kind.num_bytes for _, kind in signature)
        each = " each" if len(indices) > 1 else ""
        yield f"  {_ranges(indices)} of {stack}: {format_bytes(total)}{each}"
        yield from (f"  {line}" for line in _rows(signature, total))


def outside(memory: StepMemory) -> int:
    """Return the bytes that are held outside the layers."""
    return sum(held.num_bytes for held in memory.ledger if held.place.layer_idx is None)


def _by_layer(held: Sequence[HeldTensor]) -> dict[tuple[str, int], list[HeldTensor]]:
    found: dict[tuple[str, int], list[HeldTensor]] = {}
    for tensor in held:
        if tensor.place.layer_idx is not None:
            found.setdefault((tensor.place.stack, tensor.place.layer_idx), []).append(tensor)
    return dict(sorted(found.items()))


def _signature(path: str, held: Sequence[HeldTensor]) -> _Signature:
    return tuple((module, _kind(tensor, module)) for tensor in held for module in (_module(tensor, path),))


def _ranges(indices: Sequence[int]) -> str:
    """Return `layer 3`, or `layers 0 to 4, 6 to 10`."""
    runs = [
        [idx for _, idx in run]
        for _, run in groupby(enumerate(indices), key=lambda numbered: numbered[1] - numbered[0])
    ]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(words)}"


def _module(tensor: HeldTensor, above: str) -> str:
    return tensor.place.module.removeprefix(above).lstrip(".").removesuffix(".default") or "the layer"


def _kind(tensor: HeldTensor, module: str) -> _Kind:
    operator = tensor.place.operator.removeprefix("aten.").partition(".")[0].lstrip("_")
    what = f"{tensor.dtype} {list(tensor.shape)}"
    reasons = [_reason(reason, module) for reason in tensor.why.split(", ")] if tensor.why else []
    why = f"for {', '.join(dict.fromkeys(reasons))}" if reasons else ""
    return _Kind(tensor.place.part, operator, what, tensor.num_bytes, why)


def _reason(reason: str, module: str) -> str:
    """Return the operator whose backward needs a tensor, and its module where that is not the tensor's own."""
    operator, _, where = reason.partition(" of ")
    return operator if where.removesuffix(".default") == module else reason


def _rows(signature: Sequence[tuple[str, _Kind]], total: int) -> Iterator[str]:
    modules: dict[_Kind, list[str]] = {}
    for module, kind in signature:
        modules.setdefault(kind, []).append(module)
    ordered = sorted(modules.items(), key=lambda item: -item[0].num_bytes * len(item[1]))
    shown = [(kind, names) for kind, names in ordered if kind.num_bytes * len(names) >= _SMALL * total]
    rest = [(kind, names) for kind, names in ordered if kind.num_bytes * len(names) < _SMALL * total]
    rows = [_row(kind, names) for kind, names in shown]
    if rest:
        number = sum(len(names) for _, names in rest)
        size = sum(kind.num_bytes * len(names) for kind, names in rest)
        rows.append(("", "smaller tensors", format_bytes(size), f"{number} together", "", ""))
    return columns(rows, numeric=_NUMBERS)


def _row(kind: _Kind, names: Sequence[str]) -> tuple[str, ...]:
    times = "" if len(names) == 1 else f"{len(names)} x "
    modules = list(dict.fromkeys(names))
    more = f" and {len(modules) - _SHOWN_MODULES} more" if len(modules) > _SHOWN_MODULES else ""
    where = ", ".join(modules[:_SHOWN_MODULES]) + more
    return kind.part, kind.operator, f"{times}{format_bytes(kind.num_bytes)}", kind.what, where, kind.why
