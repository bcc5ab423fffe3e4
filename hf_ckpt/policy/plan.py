"""A policy resolved for one model: one entry per layer. Pure data, JSON both ways."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from hf_ckpt import html_svg
from hf_ckpt.errors import PolicyError
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
from hf_ckpt.policy.policy import Mode, Policy, Rule, check_combination
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
            shown.append(html_svg.html_table([*_grouped(stack.layers)], header=(stack.path, "what it does")))
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
