"""Which layers the rules of a policy reach, and what each layer gets: a policy and the shape of a model make a plan.

Knows the shape of a model (stacks of layers with a type and parts), never the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from hf_ckpt.errors import PolicyError, did_you_mean
from hf_ckpt.policy.options import EmbeddingPlace
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import STACK_NAMES, Mode, Policy, Rule, slice_of
from hf_ckpt.policy.revolve import segment_starts


class LayerShape(Protocol):
    """What resolving needs to know of one layer."""

    @property
    def layer_type(self) -> str | None:
        """The model's own word for the layer's type, if it has one."""

    @property
    def parts(self) -> frozenset[str]:
        """Which of `attention` and `ffn` the layer has."""

    @property
    def needs_gradient(self) -> bool:
        """Whether the layer, or anything before it, has a trainable parameter."""

    @property
    def computes_attention(self) -> bool:
        """Whether the layer has an attention whose output can be kept."""


class StackShape(Protocol):
    """What resolving needs to know of one stack of layers."""

    @property
    def path(self) -> str:
        """Dotted path of the list of layers."""

    @property
    def roles(self) -> frozenset[str]:
        """Of `STACK_NAMES`, those that fit."""

    @property
    def layers(self) -> Sequence[LayerShape]:
        """The layers, by `layer_idx`."""


def resolve(policy: Policy, stacks: Sequence[StackShape], model_class: str) -> Plan:
    """Turn a policy into a plan for a model of this shape; messages name the class of the model.

    Raises `PolicyError` where a rule reaches nothing, reaches past the end or asks for a part that no layer has, and
    where two rules reach the same layer.
    """
    chosen: list[dict[int, tuple[Rule, LayerPlan]]] = [{} for _ in stacks]
    for rule in policy.rules:
        numbers = _stacks_of(rule, stacks, model_class)
        reached = {number: _reached(rule, stacks[number], model_class) for number in numbers}
        if not any(reached.values()):
            raise PolicyError(
                f"Rule {rule.describe()} reaches no layer of {model_class}: none fits everything that it asks for. "
                "every_n_layers takes the layers whose layer_idx is a multiple of it, counted from 0 in each stack."
            )
        by_path = {stacks[number].path: indices for number, indices in reached.items()}
        _check_segments(rule, by_path, model_class)
        _check_snapshots(rule, by_path, model_class)
        _check_part(
            rule, [stacks[number].layers[idx] for number, layers in reached.items() for idx in layers], model_class
        )
        for number, indices in reached.items():
            stack, of_stack = stacks[number], chosen[number]
            if taken := [idx for idx in indices if idx in of_stack]:
                first = of_stack[taken[0]][0]
                _raise_overlap(first, rule, stack.path, [idx for idx in taken if of_stack[idx][0] is first])
            of_stack.update((idx, (rule, entry)) for idx, entry in _entries(rule, stack, indices))
    plans = []
    for stack, entries in zip(stacks, chosen, strict=True):
        layers = [entries[idx][1] if idx in entries else LayerPlan() for idx in range(len(stack.layers))]
        if policy.skip_frozen:
            layers = [
                LayerPlan(why="frozen", weights=each.weights) if each.recomputes and not layer.needs_gradient else each
                for each, layer in zip(layers, stack.layers, strict=True)
            ]
        plans.append(StackPlan(stack.path, tuple(layers)))
    waits = any(entry.weights is not None for stack in plans for entry in stack.layers)
    embedding = policy.embedding or (EmbeddingPlace.CPU if waits else EmbeddingPlace.DEVICE)
    return Plan(model_class, tuple(plans), policy.head, embedding)


def _stacks_of(rule: Rule, stacks: Sequence[StackShape], model_class: str) -> list[int]:
    """Return the numbers of the stacks that have what the rule asks for."""
    numbers = [number for number, stack in enumerate(stacks) if rule.stack in (None, stack.path, *stack.roles)]
    if not numbers:
        known = [name for stack in stacks for name in (*sorted(stack.roles), stack.path)]
        raise PolicyError(
            f'Rule {rule.describe()} asks for stack "{rule.stack}", but {model_class} has '
            f"{', '.join(known)}.{did_you_mean(rule.stack, [*known, *STACK_NAMES])}"
        )
    if rule.layer_type is None:
        return numbers
    types = {number: {layer.layer_type for layer in stacks[number].layers} for number in numbers}
    having = [number for number in numbers if rule.layer_type in types[number]]
    if not having:
        known = sorted(filter(None, set().union(*types.values())))
        raise PolicyError(
            f'Rule {rule.describe()} asks for layer_type "{rule.layer_type}", but the layers of {model_class} have '
            f"{', '.join(known) or 'no types'}.{did_you_mean(rule.layer_type, known)}"
        )
    return having


def _reached(rule: Rule, stack: StackShape, model_class: str) -> list[int]:
    return [
        idx
        for idx in _indices(rule, len(stack.layers), model_class, stack.path)
        if idx % rule.every_n_layers == 0 and rule.layer_type in (None, stack.layers[idx].layer_type)
    ]


def _indices(rule: Rule, num_layers: int, model_class: str, path: str) -> list[int]:
    """Return the `layer_idx` that the rule's `layers` names, sorted; unlike Python, never past the end."""
    if rule.layers is None:
        return list(range(num_layers))
    if isinstance(rule.layers, str):
        span = slice_of(rule.layers)
        named = [bound for bound in (span.start, span.stop) if bound is not None]
        # A stop of num_layers is the natural end; every other bound must be a layer.
        ok = all(-num_layers <= bound <= num_layers for bound in named) and span.start != num_layers
        reached = list(range(num_layers))[span]
    else:
        given = (rule.layers,) if isinstance(rule.layers, int) else rule.layers
        ok = all(-num_layers <= idx < num_layers for idx in given)
        reached = [idx % num_layers for idx in given]
    if not ok or not reached:
        does = "reaches no layer" if ok else "reaches past the end"
        raise PolicyError(
            f"Rule {rule.describe()} {does}: {path} of {model_class} has {num_layers} decoder layers "
            f"(0 to {num_layers - 1}). {_range_advice(rule, num_layers)}"
        )
    return sorted(set(reached))


def _range_advice(rule: Rule, num_layers: int) -> str:
    span = slice_of(rule.layers) if isinstance(rule.layers, str) else None
    if span is not None and span.start is not None and 0 <= span.start < num_layers and (span.stop or 0) > num_layers:
        return f'Use "{span.start}:{num_layers}" or "{span.start}:".'
    return f'Name layers between 0 and {num_layers - 1}, or count from the end ("-4:"); with more stacks, add stack.'


def _check_segments(rule: Rule, reached: Mapping[str, list[int]], model_class: str) -> None:
    """Refuse segments that are longer than every run of consecutive layers that the rule reaches.

    Where several stacks are reached, shorter ones next to one that is long enough are one segment each.
    """
    if not isinstance(rule.segment_size, int):
        return
    longest = {path: max(map(len, _runs(indices)), default=0) for path, indices in reached.items()}
    if rule.segment_size <= max(longest.values()):
        return
    rows = ", ".join(f"{num_layers} in {path}" for path, num_layers in longest.items() if num_layers)
    raise PolicyError(
        f"Rule {rule.describe()} asks for segments of {rule.segment_size} layers, but of the layers of {model_class} "
        f"that it reaches fewer follow one another: {rows}. Use segment_size: {max(longest.values())} or less, or "
        "segment_size: sqrt."
    )


def _check_snapshots(rule: Rule, reached: Mapping[str, list[int]], model_class: str) -> None:
    """Refuse layers that do not follow each other, and more snapshots than there are layers in the longest stack."""
    if rule.snapshots is None:
        return
    for path, indices in reached.items():
        if len(list(_runs(indices))) > 1:
            raise PolicyError(
                f"Rule {rule.describe()} reaches layers of {path} of {model_class} that do not follow each other, and "
                "only layers that do can run again from one saved input. Name a range of layers."
            )
    most = max(map(len, reached.values()))
    if rule.snapshots > most:
        raise PolicyError(
            f"Rule {rule.describe()} may save {rule.snapshots} inputs, but reaches {most} layers of {model_class}. Use "
            f'snapshots: {most - 1} or less, or mode "full" alone, which saves the input of each layer.'
        )


def _check_part(rule: Rule, layers: Sequence[LayerShape], model_class: str) -> None:
    """Refuse a rule that asks for a part which none of the layers it reaches has."""
    if rule.mode is Mode.SELECTIVE_ATTENTION and not any(layer.computes_attention for layer in layers):
        raise PolicyError(
            f"Rule {rule.describe()} keeps what attention returns, but no layer of {model_class} that it reaches "
            'computes attention: nothing could be kept. Use mode "selective", which keeps the outputs of matrix '
            'products, or "full".'
        )
    part = rule.mode.value
    if rule.mode not in (Mode.ATTENTION, Mode.FFN) or any(part in layer.parts for layer in layers):
        return
    raise PolicyError(
        f'Rule {rule.describe()} asks for "{part}", but no {part} was found in the layers of {model_class} that it '
        f'reaches. Name it with {part}="<attribute of the layer>", or use mode "full".'
    )


def _entries(rule: Rule, stack: StackShape, reached: list[int]) -> Iterator[tuple[int, LayerPlan]]:
    if rule.segment_size is not None or rule.snapshots is not None:
        yield from _segments(rule, reached) if rule.snapshots is None else binomial(rule.snapshots, reached)
        return
    for idx in reached:
        missing = rule.mode in (Mode.ATTENTION, Mode.FFN) and rule.mode.value not in stack.layers[idx].parts
        if missing:
            yield idx, LayerPlan(why=f"it has no {rule.mode}", tiles=rule.tiles, weights=rule.weights)
            continue
        entry = LayerPlan(rule.mode, save=rule.save, offload=rule.offload, tiles=rule.tiles, weights=rule.weights)
        if rule.mode is Mode.SELECTIVE_ATTENTION and not stack.layers[idx].computes_attention:
            entry = replace(entry, mode=Mode.FULL, why="it has no attention to keep")
        if rule.offload is not None and idx == len(stack.layers) - 1:
            # Backward begins with it.
            why = "the last layer, needed again at once"
            entry = replace(entry, offload=None, why=f"{entry.why}; {why}" if entry.why else why)
        yield idx, entry


def _segments(rule: Rule, reached: list[int]) -> Iterator[tuple[int, LayerPlan]]:
    """Number the segments: runs of consecutive layers, cut into pieces of `segment_size`."""
    size = math.ceil(math.sqrt(len(reached))) if rule.segment_size == "sqrt" else int(rule.segment_size or 1)
    for run in _runs(reached):
        for place, idx in enumerate(run):
            # The number of a segment is its first layer's, so that the rules of one stack cannot collide.
            yield idx, LayerPlan(Mode.FULL, segment=run[place // size * size], nested=bool(rule.nested))


def binomial(snapshots: int, reached: list[int]) -> Iterator[tuple[int, LayerPlan]]:
    """Yield the entries of a row of layers under the binomial schedule; a segment of one layer is that layer."""
    starts = segment_starts(len(reached), snapshots) if reached else []
    for (start, free), (end, _) in itertools.pairwise([*starts, (len(reached), 0)]):
        entry = LayerPlan(Mode.FULL)
        if end - start > 1:
            # Neither the first input nor that of the layer whose turn comes takes a place.
            entry = replace(entry, segment=reached[start], nested=True, snapshots=min(free, end - start - 2))
        yield from ((idx, entry) for idx in reached[start:end])


def _runs(indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield the runs of consecutive numbers among sorted ones."""
    for _, run in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        yield [idx for _, idx in run]


def _raise_overlap(first: Rule, second: Rule, path: str, both: list[int]) -> None:
    is_range = len(both) > 1 and both == list(range(both[0], both[-1] + 1))
    which = f"{both[0]} to {both[-1]}" if is_range else ", ".join(map(str, both))
    layers = f"Layer {which} of {path} has" if len(both) == 1 else f"Layers {which} of {path} have"
    raise PolicyError(
        f'{layers} two modes: "{first.mode}" from {first.describe()} and "{second.mode}" from {second.describe()}. '
        "Give each layer one mode."
    )
