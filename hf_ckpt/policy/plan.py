"""A policy resolved for one model: one entry per layer. Pure data, JSON both ways.

Knows the shape of a model (stacks of layers with a type and parts), never the model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Unpack

from hf_ckpt import html_svg
from hf_ckpt.errors import PolicyError, did_you_mean
from hf_ckpt.policy.options import (
    HeadMode,
    Offload,
    PolicyOptions,
    Tiles,
    parse_head,
    parse_offload,
    parse_save,
    parse_tiles,
    to_json_types,
)
from hf_ckpt.policy.plan_json import PLAN_FORMAT, not_a_plan, read_document
from hf_ckpt.policy.policy import STACK_NAMES, Mode, Policy, Rule, check_combination, slice_of
from hf_ckpt.policy.revolve import segment_starts
from hf_ckpt.policy.text_file import read_text

PLAN_SUFFIX = ".json"
"""What the name of a plan's file ends with; a policy that is such text is the plan in that file."""
_LONGEST_MESSAGE = 1000

MODE_COLOURS: Mapping[Mode, str] = {
    Mode.NONE: "#999999",
    Mode.FULL: "#D55E00",
    Mode.ATTENTION: "#E69F00",
    Mode.FFN: "#CC79A7",
    Mode.SELECTIVE: "#56B4E9",
    Mode.SELECTIVE_ATTENTION: "#0072B2",
}
"""Of layers, where a plan is drawn."""


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


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does.

    Args:
        mode: the layer's mode.
        segment: number of the segment that the layer belongs to, counted from 0 in its stack.
        nested: checkpointed again while its segment is recomputed.
        why: the reason where the policy asked for something else, such as `"frozen"`.
        save: what mode `selective` keeps; the outputs of matrix products and attention if empty. See `Rule`.
        offload: where what the layer keeps waits for its backward; None on the device.
        tiles: slices of the sequence that what is position-wise runs in; None for the whole of it.
        snapshots: inputs that a nested segment may save at a time while it runs again; None for all of its layers'.
    """

    mode: Mode = Mode.NONE
    segment: int | None = None
    nested: bool = False
    why: str = ""
    save: tuple[str, ...] = ()
    offload: Offload | None = None
    tiles: Tiles | None = None
    snapshots: int | None = None

    @property
    def recomputes(self) -> bool:
        """Whether anything of the layer runs again in backward."""
        return self.mode is not Mode.NONE or self.tiles is not None

    @property
    def alone(self) -> LayerPlan:
        """What the entry does with the layer by itself, without its segment: an option of the planner."""
        if self.segment is None and not (self.nested or self.snapshots or self.why):
            return self
        return replace(self, segment=None, nested=False, snapshots=None, why="")

    def in_short(self) -> str:
        """Return mode and modifiers without their details, such as `full + offload`."""
        modifiers = [("nested", self.nested), ("offload", self.offload), ("tiles", self.tiles)]
        return " + ".join([str(self.mode), *(name for name, value in modifiers if value)])

    def describe(self) -> str:
        """Return mode and modifiers, and why they are not what the policy asked for, as one short phrase."""
        parts = [str(self.mode)]
        if self.save:
            parts.append(f"save {', '.join(self.save)}")
        if self.offload is not None:
            parts.append(self.offload.describe())
        if self.tiles is not None:
            parts.append(f"tiles {self.tiles}")
        text = ", ".join(parts)
        return f"{text} ({self.why})" if self.why else text


@dataclass(frozen=True)
class StackPlan:
    """The entries of one stack, by `layer_idx`."""

    path: str
    layers: tuple[LayerPlan, ...]


@dataclass(frozen=True)
class Plan:
    """One entry per layer of every stack of one model.

    Args:
        model_class: name of the model's class, for messages.
        stacks: the stacks in the order in which the model lists them.
        head: how the language-model head and the loss run.
    """

    model_class: str
    stacks: tuple[StackPlan, ...]
    head: HeadMode = HeadMode.PLAIN

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` gives it back."""
        stacks = [
            {"path": stack.path, "layers": [to_json_types(layer, always="mode") for layer in stack.layers]}
            for stack in self.stacks
        ]
        document = {"format": PLAN_FORMAT, "model_class": self.model_class, "stacks": stacks, "head": self.head.value}
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Raises:
            PolicyError: when the text is not a plan of this format.
        """
        try:
            document = read_document(text)
            stacks = tuple(
                StackPlan(stack["path"], _layer_plans(f"stacks.{number}.layers", stack["layers"]))
                for number, stack in enumerate(document["stacks"])
            )
            return cls(document["model_class"], stacks, parse_head(document.get("head")) or HeadMode.PLAIN)
        except RecursionError:
            raise not_a_plan("it is nested too deeply") from None
        except PolicyError as error:
            raise PolicyError(_shortened(str(error))) from None
        # No JSON, or a number of thousands of digits.
        except ValueError as error:
            raise not_a_plan(_shortened(str(error))) from error

    @classmethod
    def from_file(cls, path: Path) -> Plan:
        """Read the file of a plan.

        Raises:
            PolicyError: it cannot be read, or is no plan; names the file.
        """
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(
                f"{path}: no plan can be read there: {error}. Write one: hf-ckpt plan RECIPE --memory-budget 22GiB "
                f"--out {path.name}."
            ) from error
        try:
            return cls.from_json(text)
        except PolicyError as error:
            raise PolicyError(f"{path}: {error}") from None

    def digest(self) -> str:
        """Return 16 hexadecimal digits that are equal for equal plans."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def count(self, mode: Mode) -> int:
        """Return the number of layers with this mode."""
        return sum(layer.mode is mode for stack in self.stacks for layer in stack.layers)

    def describe(self) -> str:
        """Return the plan as one phrase: how many layers do what, such as `layers: 3 full, 1 none`."""
        counts = {stack.path: Counter(layer.in_short() for layer in stack.layers) for stack in self.stacks}
        phrases = [
            f"{'layers' if len(counts) == 1 else path}: {', '.join(f'{n} {what}' for what, n in count.most_common())}"
            for path, count in counts.items()
        ]
        return "; ".join([*phrases, *([f"head: {self.head}"] if self.head is not HeadMode.PLAIN else [])])

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        shown = [html_svg.paragraph(self.describe())]
        for stack in self.stacks:
            cells = [(MODE_COLOURS[layer.mode], f"{idx}: {layer.describe()}") for idx, layer in enumerate(stack.layers)]
            shown.append(html_svg.strip(cells, label=f"{stack.path}: {len(stack.layers)} layers"))
            shown.append(html_svg.table([*_grouped(stack.layers)], header=(stack.path, "what it does")))
        modes = {layer.mode for stack in self.stacks for layer in stack.layers}
        shown.append(html_svg.legend({mode: colour for mode, colour in MODE_COLOURS.items() if mode in modes}))
        return html_svg.notebook(*shown)

    def summary(self) -> str:
        """Return the plan as text, equal neighbouring layers on one line."""
        lines = []
        for stack in self.stacks:
            lines.append(f"{stack.path}: {len(stack.layers)} layers")
            lines.extend(f"  {where:<12} {what}" for where, what in _grouped(stack.layers))
        if self.head is not HeadMode.PLAIN:
            lines.append(f"head: {self.head}")
        return "\n".join(lines)


def parse(policy: object, **options: Unpack[PolicyOptions]) -> Policy | Plan:
    """Read a policy; a plan is returned as it is.

    Args:
        policy: what `Policy.parse` reads, a `Plan`, or the name of a file with one, which ends in `.json`.
        options: the options of `Policy.parse`; none of them with a plan.

    Raises:
        PolicyError: the policy cannot be read, or options were given with a plan.
    """
    if isinstance(policy, str) and policy.endswith(PLAN_SUFFIX):
        policy = Plan.from_file(Path(policy))
    if not isinstance(policy, Plan):
        return Policy.parse(policy, **options)
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        raise PolicyError(
            f"{', '.join(given)} was given with a plan, which already says what each layer does. Leave it out, or "
            "give a policy in place of the plan."
        )
    return policy


def resolve(policy: Policy, stacks: Sequence[StackShape], model_class: str) -> Plan:
    """Turn a policy into a plan for a model of this shape.

    Args:
        policy: what the user wrote.
        stacks: the shape of the model.
        model_class: name of the model's class, for messages.

    Raises:
        PolicyError: a rule reaches nothing, reaches past the end, asks for a part that no layer has, or two rules
            reach the same layer.
    """
    chosen: list[dict[int, tuple[Rule, LayerPlan]]] = [{} for _ in stacks]
    for rule in policy.rules:
        reached = {
            number: _reached(rule, stack, model_class) for number, stack in _stacks_of(rule, stacks, model_class)
        }
        if not any(reached.values()):
            raise PolicyError(
                f"Rule {rule.describe()} reaches no layer of {model_class}: none fits everything that it asks for. "
                "every_n_layers takes the layers whose layer_idx is a multiple of it, counted from 0 in each stack."
            )
        _check_segments(rule, reached, stacks, model_class)
        _check_snapshots(rule, {stacks[number].path: indices for number, indices in reached.items()}, model_class)
        _check_part(
            rule, [stacks[number].layers[idx] for number, layers in reached.items() for idx in layers], model_class
        )
        for number, indices in reached.items():
            _choose(rule, stacks[number], indices, chosen[number])
    plans = []
    for stack, entries in zip(stacks, chosen, strict=True):
        layers = [entries[idx][1] if idx in entries else LayerPlan() for idx in range(len(stack.layers))]
        if policy.skip_frozen:
            layers = [_unless_frozen(entry, layer) for entry, layer in zip(layers, stack.layers, strict=True)]
        plans.append(StackPlan(stack.path, tuple(layers)))
    return Plan(model_class, tuple(plans), policy.head)


def _stacks_of(rule: Rule, stacks: Sequence[StackShape], model_class: str) -> list[tuple[int, StackShape]]:
    reached = [
        (number, stack)
        for number, stack in enumerate(stacks)
        if rule.stack is None or rule.stack == stack.path or rule.stack in stack.roles
    ]
    if not reached:
        known = [name for stack in stacks for name in (*sorted(stack.roles), stack.path)]
        raise PolicyError(
            f'Rule {rule.describe()} asks for stack "{rule.stack}", but {model_class} has '
            f"{', '.join(known)}.{did_you_mean(rule.stack, [*known, *STACK_NAMES])}"
        )
    if rule.layer_type is not None:
        return _with_layer_type(rule, reached, model_class)
    return reached


def _with_layer_type(
    rule: Rule, stacks: list[tuple[int, StackShape]], model_class: str
) -> list[tuple[int, StackShape]]:
    having = [
        (number, stack)
        for number, stack in stacks
        if any(layer.layer_type == rule.layer_type for layer in stack.layers)
    ]
    if not having:
        known = sorted({layer.layer_type for _, stack in stacks for layer in stack.layers if layer.layer_type})
        raise PolicyError(
            f'Rule {rule.describe()} asks for layer_type "{rule.layer_type}", but the layers of {model_class} have '
            f"{', '.join(known) or 'no types'}.{did_you_mean(rule.layer_type, known)}"
        )
    return having


def _reached(rule: Rule, stack: StackShape, model_class: str) -> list[int]:
    """Return the `layer_idx` of `stack` that the rule reaches."""
    return [
        idx
        for idx in _indices(rule, len(stack.layers), model_class, stack.path)
        if idx % rule.every_n_layers == 0 and rule.layer_type in (None, stack.layers[idx].layer_type)
    ]


def _choose(rule: Rule, stack: StackShape, reached: list[int], chosen: dict[int, tuple[Rule, LayerPlan]]) -> None:
    """Enter `rule` for the layers of `stack` that it reaches."""
    taken = [idx for idx in reached if idx in chosen]
    if taken:
        first = chosen[taken[0]][0]
        _raise_overlap(first, rule, stack.path, [idx for idx in taken if chosen[idx][0] is first])
    chosen.update((idx, (rule, entry)) for idx, entry in _entries(rule, stack, reached))


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


def _check_segments(
    rule: Rule, reached: Mapping[int, list[int]], stacks: Sequence[StackShape], model_class: str
) -> None:
    """Refuse segments that are longer than every run of consecutive layers that the rule reaches.

    Where several stacks are reached, shorter ones next to one that is long enough are one segment each.
    """
    if not isinstance(rule.segment_size, int):
        return
    longest = {number: max(map(len, _runs(indices)), default=0) for number, indices in reached.items()}
    if rule.segment_size <= max(longest.values()):
        return
    rows = ", ".join(f"{num_layers} in {stacks[number].path}" for number, num_layers in longest.items() if num_layers)
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
                "only a row of layers can run again from one saved input. Name a range of layers."
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
            yield idx, LayerPlan(why=f"it has no {rule.mode}", tiles=rule.tiles)
            continue
        entry = LayerPlan(rule.mode, save=rule.save, offload=rule.offload, tiles=rule.tiles)
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


def _unless_frozen(entry: LayerPlan, layer: LayerShape) -> LayerPlan:
    if layer.needs_gradient or not entry.recomputes:
        return entry
    return LayerPlan(why="frozen")


def _layer_plans(where: str, entries: list[dict[str, Any]]) -> tuple[LayerPlan, ...]:
    layers = []
    for layer_idx, entry in enumerate(entries):
        try:
            layers.append(_layer_plan(entry))
        except PolicyError as error:
            raise PolicyError(f"{where}.{layer_idx}: {error}") from None
    return tuple(layers)


def _layer_plan(entry: dict[str, Any]) -> LayerPlan:
    layer = LayerPlan(
        Mode(entry["mode"]),
        entry.get("segment"),
        entry.get("nested", False),
        entry.get("why", ""),
        parse_save(entry["save"]) if "save" in entry else (),
        parse_offload(entry.get("offload")),
        parse_tiles(entry.get("tiles")),
        entry.get("snapshots"),
    )
    # Files of plans are edited by hand; a modifier that its mode does not know would be ignored without a word.
    size = None if layer.segment is None else 1
    rule = Rule(mode=layer.mode, segment_size=size, nested=layer.nested)
    check_combination(replace(rule, save=layer.save, offload=layer.offload, tiles=layer.tiles))
    return layer


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def _grouped(layers: Sequence[LayerPlan]) -> Iterator[tuple[str, str]]:
    """Yield (`"0 to 3"`, description) for runs of equal layers; segments of equal size count as equal."""
    sizes = Counter(layer.segment for layer in layers)

    def describe(layer: LayerPlan) -> str:
        nested = ", nested" if layer.nested else ""
        nested += f" ({layer.snapshots} snapshots)" if layer.snapshots is not None else ""
        return layer.describe() if layer.segment is None else f"full, segments of {sizes[layer.segment]}{nested}"

    for what, run in itertools.groupby(enumerate(layers), key=lambda pair: describe(pair[1])):
        numbers = [idx for idx, _ in run]
        yield (str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"), what
