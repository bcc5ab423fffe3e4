"""What the user writes: modes, rules and policies, parsed from text, mappings or lists.

Knows no model and imports no torch: a policy can be checked before anything heavy is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from typing import Any, Literal, Unpack

from hf_ckpt.errors import PolicyError, as_written, did_you_mean
from hf_ckpt.policy.options import (
    EmbeddingPlace,
    HeadMode,
    Offload,
    PolicyOptions,
    RuleOptions,
    Tiles,
    Weights,
    check_keys,
    parse_count,
    parse_embedding,
    parse_head,
    parse_offload,
    parse_save,
    parse_tiles,
    parse_weights,
    select,
    takes,
    to_json_types,
)


class Mode(StrEnum):
    """What one decoder layer does with its activations."""

    NONE = "none"
    """Keep everything: no recomputation."""
    FULL = "full"
    """Keep the layer's input, recompute the whole layer in backward."""
    ATTENTION = "attention"
    """Recompute the attention (or the mixer that stands in its place), keep the rest."""
    FFN = "ffn"
    """Recompute the feed-forward network, keep the rest."""
    SELECTIVE = "selective"
    """Keep the outputs of matrix products and attention (or of what `save` names), recompute the rest."""
    SELECTIVE_ATTENTION = "selective_attention"
    """Keep the attention kernel's output, recompute the rest."""


SELECTIVE_MODES = frozenset({Mode.SELECTIVE, Mode.SELECTIVE_ATTENTION})
"""Modes that choose by operator."""

WHOLE_LAYER_MODES = frozenset({Mode.FULL, *SELECTIVE_MODES})
"""Modes under which the whole layer runs again."""

TRAINED_CACHES = ("prefix_tuning", "cartridge")
"""PEFT's kinds of adapters that hand layers keys and values to read: attention cannot run again under them."""
MODES_WITH_TRAINED_CACHE = (Mode.NONE, Mode.FFN)
"""Modes under which attention does not run again."""

REVOLVE: Literal["revolve"] = "revolve"
"""What `Rule.nested` says where segments and what is saved within them follow the binomial schedule."""

AUTO = "auto"
"""The policy that is no policy: the callback chooses a plan for a memory budget."""

STACK_NAMES = ("language", "vision", "audio", "encoder", "decoder")
"""Names of the roles that a stack of layers can have in a model; `Rule.stack` also takes a dotted path."""

SegmentSize = int | Literal["sqrt"]
Nested = bool | Literal["revolve"]
LayerSelection = str | int | tuple[int, ...]

_SLICE = re.compile(r"^\s*-?\d*\s*:\s*-?\d*\s*(:\s*-?\d*\s*)?$")
_INDEX = re.compile(r"^\s*-?\d+\s*$")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of a policy: which layers, and what they do.

    Args:
        mode: what the layers do.
        layers: a Python slice as text (`"0:24"`, `"-4:"`, `"::2"`), one index, or several; all layers if left out.
        stack: role of the stack (`language`, `vision`, `audio`, `encoder`, `decoder`) or its dotted path; every
            stack if left out.
        layer_type: only layers of this type, in the words of the model's `config.layer_types`
            (`sliding_attention`, `full_attention`, `linear_attention`, ...).
        every_n_layers: of the layers reached, those whose `layer_idx` is a multiple of it.
        segment_size: so many consecutive layers share one saved input; `"sqrt"` takes the square root of the number
            of layers reached. Only with mode `full`.
        nested: checkpoint the layers of a segment again while it is recomputed. Only with `segment_size`. `"revolve"`
            chooses the segments itself, and saves inputs within them as often as needed: the fewest forwards for
            `snapshots` saved inputs. Only with mode `full`.
        snapshots: inputs that are saved at a time besides the first layer's, 1 up to the number of layers reached. Only
            with `nested: revolve`.
        save: operators (`aten.mm`) and modules below the layer (`mlp.down_proj`, `*.q_proj`) whose outputs are kept.
            Only with mode `selective`, which keeps those of matrix products and attention if left out.
        offload: what the layers keep waits in host memory or on disk. Only with modes that recompute whole layers.
        tiles: run what is position-wise in so many slices of the sequence, each recomputed in backward.
        weights: the layers' frozen weights wait in host memory while other layers run.
    """

    mode: Mode
    layers: LayerSelection | None = None
    stack: str | None = None
    layer_type: str | None = None
    every_n_layers: int = 1
    segment_size: SegmentSize | None = None
    nested: Nested = False
    snapshots: int | None = None
    save: tuple[str, ...] = ()
    offload: Offload | None = None
    tiles: Tiles | None = None
    weights: Weights | None = None

    def describe(self) -> str:
        """Return the rule as the user would write it, for messages."""
        return "{" + ", ".join(f"{key}: {as_written(value)}" for key, value in self.to_dict().items()) + "}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON types."""
        return to_json_types(self, always="mode")


@dataclass(frozen=True)
class Policy:
    """A list of rules; layers that no rule reaches are left alone.

    Args:
        rules: the rules; no layer may be reached by two of them.
        skip_frozen: leave alone the layers that need no gradient, whatever the rules say.
        head: how the language-model head and the loss run.
        embedding: where a frozen input embedding lies; None in host memory where a rule has `weights` and it can.

    Example:
        >>> Policy.parse("full", every_n_layers=2).rules[0].every_n_layers
        2
    """

    rules: tuple[Rule, ...]
    skip_frozen: bool = False
    head: HeadMode = HeadMode.PLAIN
    embedding: EmbeddingPlace | None = None

    def describe(self) -> str:
        """Return the policy as the user would write it, for messages."""
        text = "[" + ", ".join(rule.describe() for rule in self.rules) + "]"
        text = f"{text}, skip_frozen: true" if self.skip_frozen else text
        text = text if self.head is HeadMode.PLAIN else f"{text}, head: {self.head}"
        return text if self.embedding is None else f"{text}, embedding: {self.embedding}"

    @classmethod
    @takes(PolicyOptions)
    def parse(cls, policy: object, **options: Unpack[PolicyOptions]) -> Policy:
        """Read a policy.

        Args:
            policy: a mode name, a mapping (one rule), a list of mappings, or a `Policy`, which is returned as it is.
            options: those of `RuleOptions`, see `Rule`, only with a mode name; `head`, see `HeadMode`; `embedding`, see
                `EmbeddingPlace`; and `skip_frozen`, which leaves alone the layers that need no gradient.

        Raises:
            PolicyError: names the key, the value, and the nearest valid word.
        """
        skip_frozen = options["skip_frozen"]
        given = {name: value for name, value in select(options, RuleOptions).items() if value is not None}
        if not isinstance(skip_frozen, bool):
            raise PolicyError(f"skip_frozen is {as_written(skip_frozen)}. Use true or false.")
        if policy == AUTO:
            raise PolicyError(
                f'Policy "{AUTO}" chooses a plan for a training step, and no step is known here. Use '
                'HFCkptCallback("auto", memory_budget="22GiB") in a Trainer, or tell the step: hf_ckpt.apply(model, '
                '"auto", memory_budget="22GiB", batch_size=..., seq_length=..., optimizer=...).'
            )
        head_mode, place = parse_head(options["head"]), parse_embedding(options["embedding"])
        parsed = partial(cls, skip_frozen=skip_frozen, head=head_mode or HeadMode.PLAIN, embedding=place)
        if isinstance(policy, str):
            return parsed((_parse_rule({"mode": policy, **given}),))
        if given:
            raise PolicyError(
                f"{', '.join(given)} was given with a policy that is not a mode name. Write it inside the rule."
            )
        if isinstance(policy, Policy):
            return replace(
                policy,
                skip_frozen=policy.skip_frozen or skip_frozen,
                head=head_mode or policy.head,
                embedding=place or policy.embedding,
            )
        rules = (policy,) if isinstance(policy, Mapping) else policy
        if isinstance(rules, Sequence) and not isinstance(rules, bytes) and rules:
            return parsed(tuple(_parse_rule(rule) for rule in rules))
        # A model in its place would fill the screen.
        is_written = policy is None or isinstance(policy, bool | int | float | Mapping | Sequence)
        what = as_written(policy) if is_written else f"of type {type(policy).__name__}"
        raise PolicyError(
            f"Policy {what} cannot be read. Use a mode name ({_mode_names()}), a mapping such as "
            '{layers: "0:24", mode: full}, or a list of such mappings.'
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as JSON types; `Policy.parse` of its `policy` gives it back."""
        values = {"policy": [rule.to_dict() for rule in self.rules], "skip_frozen": self.skip_frozen}
        values = values if self.head is HeadMode.PLAIN else {**values, "head": self.head.value}
        return values if self.embedding is None else {**values, "embedding": self.embedding.value}


def _parse_rule(rule: object) -> Rule:
    if not isinstance(rule, Mapping):
        raise PolicyError(f'Rule {as_written(rule)} is not a mapping. Write it as {{layers: "0:24", mode: full}}.')
    check_keys("rule", rule, [field.name for field in fields(Rule)])
    if "mode" not in rule:
        raise PolicyError(f"Rule {as_written(rule)} has no mode. Modes are {_mode_names()}.")
    size, snapshots = rule.get("segment_size"), rule.get("snapshots")
    parsed = Rule(
        mode=_parse_mode(rule["mode"]),
        layers=_parse_layers(rule.get("layers")),
        stack=_parse_name("stack", rule.get("stack")),
        layer_type=_parse_name("layer_type", rule.get("layer_type")),
        every_n_layers=parse_count("every_n_layers", rule.get("every_n_layers", 1)),
        segment_size=None if size is None else parse_count("segment_size", size, "sqrt"),
        nested=_parse_nested(rule.get("nested", False)),
        snapshots=None if snapshots is None else parse_count("snapshots", snapshots),
        save=() if rule.get("save") is None else parse_save(rule["save"]),
        offload=parse_offload(rule.get("offload")),
        tiles=parse_tiles(rule.get("tiles")),
        weights=parse_weights(rule.get("weights")),
    )
    check_combination(parsed)
    return parsed


def check_combination(rule: Rule) -> None:
    """Refuse a rule whose keys contradict each other.

    Raises:
        PolicyError: names the rule, the keys, and what to do.
    """
    if rule.segment_size is not None and rule.mode is not Mode.FULL:
        raise PolicyError(
            f'Rule {rule.describe()} has segment_size with mode "{rule.mode}". Only whole layers can share a saved '
            'input: use mode "full", or leave segment_size out.'
        )
    if rule.segment_size is not None and rule.every_n_layers != 1:
        raise PolicyError(
            f"Rule {rule.describe()} has both every_n_layers and segment_size. every_n_layers leaves layers between "
            "alone, segment_size joins consecutive layers: use one of them."
        )
    _check_nested(rule)
    if rule.every_n_layers != 1 and rule.mode is Mode.NONE:
        raise PolicyError(f'Rule {rule.describe()} has every_n_layers with mode "none". Use mode "full" with it.')
    if rule.save and rule.mode is not Mode.SELECTIVE:
        raise PolicyError(
            f'Rule {rule.describe()} has save with mode "{rule.mode}". Only mode "selective" chooses what is kept: use '
            "that, or leave save out."
        )
    _check_modifiers(rule)


def _check_nested(rule: Rule) -> None:
    if rule.nested == REVOLVE:
        _check_revolve(rule)
    elif rule.snapshots is not None:
        raise PolicyError(
            f'Rule {rule.describe()} has snapshots without nested: "{REVOLVE}", which alone counts saved inputs. Add '
            "that, or leave snapshots out."
        )
    elif rule.nested and rule.segment_size is None:
        raise PolicyError(f"Rule {rule.describe()} is nested but has no segment_size. Add segment_size: sqrt.")


def _check_revolve(rule: Rule) -> None:
    others = {
        "segment_size": rule.segment_size is not None,
        "every_n_layers": rule.every_n_layers != 1,
        "offload": rule.offload is not None,
        "tiles": rule.tiles is not None,
        "weights": rule.weights is not None,
    }
    given = [key for key, is_given in others.items() if is_given]
    if rule.mode is not Mode.FULL:
        problem = f'with mode "{rule.mode}". Only whole layers can share saved inputs: use mode "full"'
    elif given:
        problem = (
            f"and {given[0]}. It chooses which inputs are saved, and saves them on the device: leave out {given[0]}"
        )
    elif rule.snapshots is None:
        problem = "but no snapshots. Say how many inputs may be saved at a time, such as snapshots: 4"
    else:
        return
    raise PolicyError(f'Rule {rule.describe()} has nested: "{REVOLVE}" {problem}.')


def _check_modifiers(rule: Rule) -> None:
    if rule.offload is not None and rule.mode not in WHOLE_LAYER_MODES:
        raise PolicyError(
            f'Rule {rule.describe()} has offload with mode "{rule.mode}". Only modes that recompute the whole layer '
            'keep little enough to move: use "full", "selective" or "selective_attention".'
        )
    if rule.tiles is not None and rule.mode in SELECTIVE_MODES:
        raise PolicyError(
            f'Rule {rule.describe()} has tiles with mode "{rule.mode}". What runs in tiles is recomputed whole, so '
            'that nothing of it could be kept: use mode "full" or "none" with tiles.'
        )
    for key in ("offload", "tiles"):
        if rule.segment_size is not None and getattr(rule, key) is not None:
            raise PolicyError(
                f"Rule {rule.describe()} has both segment_size and {key}. Leave segment_size out: with {key} the "
                "layers need not share their inputs."
            )
    if rule.segment_size is not None and rule.weights is not None:
        raise PolicyError(
            f"Rule {rule.describe()} has both segment_size and weights. A segment runs all of its layers again before "
            "the backward of one: their weights would be copied a third time. Leave segment_size out."
        )


def _parse_mode(value: object) -> Mode:
    # YAML reads a bare `none` as text but `null` and `~` as nothing; both spellings of "nothing" are likely mistakes.
    if isinstance(value, str) and value in set(Mode):
        return Mode(value)
    if value == AUTO:
        raise PolicyError(
            f'Mode "{AUTO}" in a rule: "{AUTO}" plans for all layers together. Write it in place of the rules: '
            f'policy "{AUTO}". Modes are {_mode_names()}.'
        )
    raise PolicyError(
        f"Unknown mode {as_written(value)}. Modes are {_mode_names()}.{did_you_mean(value, (*Mode, AUTO))}"
    )


def _parse_layers(value: object) -> LayerSelection | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and _INDEX.match(value):
        return int(value)
    if isinstance(value, str) and _SLICE.match(value):
        if slice_of(value).step == 0:
            raise PolicyError(f'layers is "{value}": a step of 0 reaches nothing. Use a step of 1 or more.')
        return value.replace(" ", "")
    if isinstance(value, list | tuple) and value and all(type(index) is int for index in value):
        return tuple(value)
    raise PolicyError(
        f'layers is {as_written(value)}. Use a Python slice as text ("0:24", "-4:", "::2"), one index, or a list of '
        "indices."
    )


def slice_of(text: str) -> slice:
    """Return the slice that `text` such as `"0:24:2"` stands for."""
    return slice(*(int(bound) if bound.strip() else None for bound in text.split(":")))


def _parse_name(key: str, value: object) -> str | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise PolicyError(f"{key} is {as_written(value)}. Use a name as text.")


def _parse_nested(value: object) -> Nested:
    if isinstance(value, bool) or value == REVOLVE:
        return value
    raise PolicyError(f'nested is {as_written(value)}. Use true, false or "{REVOLVE}".{did_you_mean(value, [REVOLVE])}')


def _mode_names() -> str:
    return ", ".join(f'"{mode}"' for mode in Mode)
