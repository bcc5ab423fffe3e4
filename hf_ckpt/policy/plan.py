"""A policy resolved for one model: one entry per layer. Pure data, JSON both ways.

Files of plans are edited by hand, copied and cut short: a value that nobody checked would be ignored without a word,
or end the run somewhere else. So each field's type and range is checked, and that each is given once, and no other. The
values of options have readers of their own (`options`).
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from hf_ckpt.errors import PolicyError, did_you_mean, shortened
from hf_ckpt.policy.options import (
    READERS,
    EmbeddingPlace,
    HeadMode,
    Offload,
    PolicyOptions,
    Tiles,
    Weights,
    is_whole,
    parse_embedding,
    parse_head,
    to_json_types,
)
from hf_ckpt.policy.policy import Mode, Policy, Rule, check_combination
from hf_ckpt.policy.text_file import read_text

PLAN_FORMAT = 2
"""Version of the JSON layout; raised when a reader of the old one would misread the new one."""
PLAN_SUFFIX = ".json"
"""What the name of a plan's file ends with; a policy that is such text is the plan in that file."""
_LONGEST_MESSAGE = 1000
_LONGEST_SHOWN = 80


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
        weights: where the layer's frozen weights wait while other layers run; None on the device.
    """

    mode: Mode = Mode.NONE
    segment: int | None = None
    nested: bool = False
    why: str = ""
    save: tuple[str, ...] = ()
    offload: Offload | None = None
    tiles: Tiles | None = None
    snapshots: int | None = None
    weights: Weights | None = None

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
        modifiers = ("nested", "offload", "tiles", "weights")
        return " + ".join([str(self.mode), *(name for name in modifiers if getattr(self, name))])

    def describe(self) -> str:
        """Return mode and modifiers, and why they are not what the policy asked for, as one short phrase."""
        parts = [str(self.mode)]
        if self.save:
            parts.append(f"save {', '.join(self.save)}")
        if self.offload is not None:
            parts.append(self.offload.describe())
        if self.tiles is not None:
            parts.append(f"tiles {self.tiles}")
        if self.weights is not None:
            parts.append(self.weights.describe())
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
        embedding: where a frozen input embedding lies.
    """

    model_class: str
    stacks: tuple[StackPlan, ...]
    head: HeadMode = HeadMode.PLAIN
    embedding: EmbeddingPlace = EmbeddingPlace.DEVICE

    @property
    def does_nothing(self) -> bool:
        """Whether it leaves every layer, the head and the embedding as they are."""
        entries = {replace(layer, why="") for stack in self.stacks for layer in stack.layers}
        return entries <= {LayerPlan()} and not self._beside_layers

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` gives it back."""
        stacks = [
            {"path": stack.path, "layers": [to_json_types(layer, always="mode") for layer in stack.layers]}
            for stack in self.stacks
        ]
        document = {"format": PLAN_FORMAT, "model_class": self.model_class, "stacks": stacks, "head": self.head.value}
        if self.embedding is not EmbeddingPlace.DEVICE:
            document["embedding"] = self.embedding.value
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Raises:
            PolicyError: when the text is not a plan of this format.
        """
        try:
            document = json.loads(text, object_pairs_hook=_each_once)
            _check_document(document)
            stacks = tuple(
                StackPlan(stack["path"], _layer_plans(f"stacks.{number}.layers", stack["layers"]))
                for number, stack in enumerate(document["stacks"])
            )
            head, embedding = parse_head(document.get("head")), parse_embedding(document.get("embedding"))
            return cls(document["model_class"], stacks, head or HeadMode.PLAIN, embedding or EmbeddingPlace.DEVICE)
        except RecursionError:
            raise _not_a_plan("it is nested too deeply") from None
        except PolicyError as error:
            raise PolicyError(shortened(str(error), _LONGEST_MESSAGE)) from None
        # No JSON, or a number of thousands of digits.
        except ValueError as error:
            raise _not_a_plan(shortened(str(error), _LONGEST_MESSAGE)) from error

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
        return self._digest

    @cached_property
    def _digest(self) -> str:
        # Policy "auto" asks for it in each forward.
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
        return "; ".join([*phrases, *self._beside_layers])

    @property
    def _beside_layers(self) -> list[str]:
        """What it does besides what layers do, as phrases."""
        head = [f"head: {self.head}"] if self.head is not HeadMode.PLAIN else []
        return head if self.embedding is EmbeddingPlace.DEVICE else [*head, f"embedding: {self.embedding}"]

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        # By name: what a plan is does not stand on pictures of it.
        pictures = importlib.import_module("hf_ckpt.html_svg")
        return str(pictures.plan_html(self, {stack.path: [*_grouped(stack.layers)] for stack in self.stacks}))

    def summary(self) -> str:
        """Return the plan as text, equal neighbouring layers on one line."""
        lines = []
        for stack in self.stacks:
            lines.append(f"{stack.path}: {len(stack.layers)} layers")
            lines.extend(f"  {where:<12} {what}" for where, what in _grouped(stack.layers))
        lines += self._beside_layers
        return "\n".join(lines)


def with_entries(plan: Plan, change: Callable[[LayerPlan], LayerPlan]) -> Plan:
    """Return the plan with each entry as `change` returns it, called in the order of stacks and layers."""
    stacks = tuple(replace(stack, layers=tuple(map(change, stack.layers))) for stack in plan.stacks)
    return replace(plan, stacks=stacks)


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


def _layer_plans(where: str, entries: list[dict[str, Any]]) -> tuple[LayerPlan, ...]:
    layers = []
    for layer_idx, entry in enumerate(entries):
        try:
            layers.append(_layer_plan(entry))
        except PolicyError as error:
            raise PolicyError(f"{where}.{layer_idx}: {error}") from None
    return tuple(layers)


def _layer_plan(entry: dict[str, Any]) -> LayerPlan:
    readers = {"mode": Mode, **READERS}
    layer = LayerPlan(**{**entry, **{name: read(entry[name]) for name, read in readers.items() if name in entry}})
    # A modifier that its mode does not know would be ignored without a word.
    size = None if layer.segment is None else 1
    rule = Rule(mode=layer.mode, segment_size=size, nested=layer.nested)
    modifiers = {name: getattr(layer, name) for name in ("save", "offload", "tiles", "weights")}
    check_combination(replace(rule, **modifiers))
    return layer


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


# --- The JSON of a plan. ---


@dataclass(frozen=True)
class _Field:
    allows: Callable[[Any], bool]
    allowed: str
    is_required: bool = False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


_TEXT = "text without control characters"
_MODES = "one of " + ", ".join(f'"{mode}"' for mode in Mode)
_FORMAT = _Field(lambda value: is_whole(value, 1), f"a whole number, 1 to {PLAN_FORMAT}", is_required=True)
_READ_BY_OPTIONS = _Field(lambda value: True, "")
_PLAN = {
    "format": _FORMAT,
    "model_class": _Field(_is_text, _TEXT, is_required=True),
    "stacks": _Field(lambda value: isinstance(value, list), "a list", is_required=True),
    "head": _READ_BY_OPTIONS,
    "embedding": _READ_BY_OPTIONS,
}
_STACK = {
    "path": _Field(_is_text, _TEXT, is_required=True),
    "layers": _Field(lambda value: isinstance(value, list), "a list", is_required=True),
}
_LAYER = {
    "mode": _Field(lambda value: isinstance(value, str) and value in set(Mode), _MODES, is_required=True),
    "segment": _Field(
        lambda value: value is None or is_whole(value, 0), "a whole number of 0 or more, or leave it out"
    ),
    "nested": _Field(lambda value: isinstance(value, bool), "true or false"),
    "snapshots": _Field(lambda value: value is None or is_whole(value, 0), "a whole number of 0 or more"),
    "why": _Field(_is_text, _TEXT),
    **dict.fromkeys(("save", "offload", "tiles", "weights"), _READ_BY_OPTIONS),
}


def _not_a_plan(problem: str) -> PolicyError:
    """Return the error for a text that is no plan."""
    return PolicyError(f"This is not a plan: {problem}. Write one with Plan.to_json().")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    given = dict(pairs)
    if len(given) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise _not_a_plan(f"{json.dumps(twice)} is given twice. Keep one")
    return given


def _check_document(read: object) -> None:
    plan = _mapping("", read)
    _check_field("", "format", _FORMAT, plan)
    if plan["format"] > PLAN_FORMAT:
        # Only a later version knows its fields.
        raise PolicyError(f"The plan has format {plan['format']}, this version reads up to {PLAN_FORMAT}.")
    _check(_PLAN, "", plan)
    for number, stack in enumerate(plan["stacks"]):
        where = f"stacks.{number}"
        _check(_STACK, where, stack)
        for layer_idx, layer in enumerate(stack["layers"]):
            _check(_LAYER, f"{where}.layers.{layer_idx}", layer)
        _check_segments(f"{where}.layers", stack["layers"])


def _check(fields: Mapping[str, _Field], where: str, read: object) -> None:
    given = _mapping(where, read)
    for name in given:
        if name not in fields:
            path = json.dumps(f"{where}.{name}".lstrip("."))[:_LONGEST_SHOWN]
            raise _not_a_plan(f"{path} is unknown.{did_you_mean(name, fields)} Fields are {', '.join(fields)}")
    for name, field in fields.items():
        _check_field(where, name, field, given)


def _check_field(where: str, name: str, field: _Field, given: Mapping[str, Any]) -> None:
    path = f"{where}.{name}".lstrip(".")
    if name not in given:
        if field.is_required:
            raise _not_a_plan(f"{path} is missing. Use {field.allowed}")
        return
    if not field.allows(given[name]):
        raise _not_a_plan(f"{path} is {_shown(given[name])}. Use {field.allowed}")


def _mapping(where: str, read: object) -> Mapping[str, Any]:
    if not isinstance(read, Mapping):
        raise _not_a_plan(f"{where or 'it'} is {_shown(read)}. Use a mapping")
    return read


def _check_segments(where: str, layers: list[Mapping[str, Any]]) -> None:
    """Refuse a segment whose layers do not follow each other: each run of them would be one of its own."""
    numbers = [layer.get("segment") for layer in layers]
    _check_snapshots(where, layers)
    seen: set[int] = set()
    for position, (before, number) in enumerate(itertools.pairwise([None, *numbers])):
        if number is None or number == before:
            continue
        if number in seen or number >= len(layers):
            raise _not_a_plan(
                f"{where}.{position}.segment is {_shown(number)}. Use a number below {len(layers)}, the layers of the "
                "stack, and one number for layers that follow each other"
            )
        seen.add(number)


def _check_snapshots(where: str, layers: list[Mapping[str, Any]]) -> None:
    """Refuse snapshots that are not those of a whole nested segment."""
    saved: dict[int, int | None] = {}
    for position, layer in enumerate(layers):
        segment, snapshots = layer.get("segment"), layer.get("snapshots")
        if snapshots is not None and not layer.get("nested"):
            raise _not_a_plan(f"{where}.{position}.snapshots is for nested segments. Leave it out")
        if segment is not None and saved.setdefault(segment, snapshots) != snapshots:
            raise _not_a_plan(
                f"{where}.{position}.snapshots is {_shown(snapshots)}. Use that of the segment's first layer, "
                f"{_shown(saved[segment])}"
            )


def _shown(value: object) -> str:
    return shortened(json.dumps(value), _LONGEST_SHOWN)
