"""Policies resolved for the shape of a model; no model is built."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hf_ckpt.errors import PolicyError
from hf_ckpt.policy.options import HeadMode, Offload
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan, parse, resolve
from hf_ckpt.policy.policy import Mode, Policy
from tests.markups import Markup

BOTH = frozenset({"attention", "ffn"})


@dataclass(frozen=True)
class Layer:
    layer_type: str | None = None
    parts: frozenset[str] = BOTH
    needs_gradient: bool = True
    computes_attention: bool = True


@dataclass(frozen=True)
class Stack:
    layers: list[Layer]
    path: str = "model.layers"
    roles: frozenset[str] = field(default=frozenset({"language", "decoder"}))


def decoder(num_layers: int) -> list[Stack]:
    return [Stack([Layer()] * num_layers)]


def two_towers(num_vision: int = 2, num_text: int = 4) -> list[Stack]:
    vision = Stack([Layer()] * num_vision, "model.visual.blocks", frozenset({"vision"}))
    return [vision, *decoder(num_text)]


def typed(*types: str | None) -> list[Stack]:
    return [Stack([Layer(layer_type=kind) for kind in types])]


def plan_of(policy: object, stacks: list[Stack], **options: object) -> Plan:
    return resolve(Policy.parse(policy, **options), stacks, "TinyForCausalLM")


def letters(plan: Plan) -> list[str]:
    """Write each stack as one letter per layer: none, full, attention, ffn, selective; in segments, their number."""
    return [
        "".join(layer.mode[0] if layer.segment is None else str(layer.segment) for layer in stack.layers)
        for stack in plan.stacks
    ]


def message_of(policy: object, stacks: list[Stack], **options: object) -> str:
    with pytest.raises(PolicyError) as raised:
        plan_of(policy, stacks, **options)
    return str(raised.value)


# --- Which layers a rule reaches. ---


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        # Slices, as in Python.
        ("0:3", "fffnnnnn"),
        (":3", "fffnnnnn"),
        ("3:", "nnnfffff"),
        (":", "ffffffff"),
        ("0:8", "ffffffff"),
        ("2:4", "nnffnnnn"),
        # Counted from the end.
        ("-3:", "nnnnnfff"),
        (":-3", "fffffnnn"),
        ("-8:-6", "ffnnnnnn"),
        ("2:-2", "nnffffnn"),
        # Steps.
        ("::2", "fnfnfnfn"),
        ("1::2", "nfnfnfnf"),
        ("1:6:2", "nfnfnfnn"),
        ("::-1", "ffffffff"),
        ("6:2:-2", "nnnnfnfn"),
        # Indices.
        (0, "fnnnnnnn"),
        (7, "nnnnnnnf"),
        (-1, "nnnnnnnf"),
        (-8, "fnnnnnnn"),
        ([0, 3, -1], "fnnfnnnf"),
        # The same layer twice is one layer.
        ([7, -1], "nnnnnnnf"),
    ],
)
def test_layers_reach(layers: object, expected: str) -> None:
    assert letters(plan_of({"mode": "full", "layers": layers}, decoder(8))) == [expected]


@pytest.mark.parametrize("layers", ["0:9", "8:", "9:12", "-9:", ":9", "8", 8, -9, [0, 8], [-9]])
def test_reaching_past_the_end_raises(layers: object) -> None:
    message = message_of({"mode": "full", "layers": layers}, decoder(8))
    assert "reaches past the end: model.layers of TinyForCausalLM has 8 decoder layers (0 to 7). " in message


@pytest.mark.parametrize("layers", ["3:3", "4:2", "-2:-4", "2:4:-1"])
def test_reaching_no_layer_raises(layers: str) -> None:
    assert message_of({"mode": "full", "layers": layers}, decoder(8)) == (
        f'Rule {{mode: "full", layers: "{layers}"}} reaches no layer: model.layers of TinyForCausalLM has 8 decoder '
        'layers (0 to 7). Name layers between 0 and 7, or count from the end ("-4:"); with more stacks, add stack.'
    )


def test_range_past_the_end_is_told_the_range_that_fits() -> None:
    assert message_of({"layers": "30:40", "mode": "full"}, decoder(36)) == (
        'Rule {mode: "full", layers: "30:40"} reaches past the end: model.layers of TinyForCausalLM has 36 decoder '
        'layers (0 to 35). Use "30:36" or "30:".'
    )


# --- every_n_layers ---


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"every_n_layers": 1}, "ffffffff"),
        ({"every_n_layers": 2}, "fnfnfnfn"),
        ({"every_n_layers": 3}, "fnnfnnfn"),
        ({"every_n_layers": 100}, "fnnnnnnn"),
        # Multiples are of layer_idx, wherever the range starts.
        ({"every_n_layers": 2, "layers": "3:"}, "nnnnfnfn"),
        ({"every_n_layers": 3, "layers": "1:7"}, "nnnfnnfn"),
    ],
)
def test_every_n_layers_counts_layer_idx(rule: dict[str, object], expected: str) -> None:
    assert letters(plan_of({"mode": "full", **rule}, decoder(8))) == [expected]


def test_every_n_layers_counts_each_stack_from_its_first_layer() -> None:
    assert letters(plan_of("full", two_towers(3, 4), every_n_layers=2)) == ["fnf", "fnfn"]


def test_every_n_layers_that_meets_no_layer_of_its_range_raises() -> None:
    assert message_of({"mode": "full", "layers": 1, "every_n_layers": 2}, decoder(8)) == (
        'Rule {mode: "full", layers: 1, every_n_layers: 2} reaches no layer of TinyForCausalLM: none fits everything '
        "that it asks for. every_n_layers takes the layers whose layer_idx is a multiple of it, counted from 0 in each "
        "stack."
    )


# --- Stacks and layer types. ---


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        (None, ["ff", "ffff"]),
        ("vision", ["ff", "nnnn"]),
        ("language", ["nn", "ffff"]),
        ("decoder", ["nn", "ffff"]),
        ("model.visual.blocks", ["ff", "nnnn"]),
        ("model.layers", ["nn", "ffff"]),
    ],
)
def test_stack_is_a_role_or_a_path(stack: str | None, expected: list[str]) -> None:
    assert letters(plan_of({"mode": "full", "stack": stack}, two_towers())) == expected


def test_unknown_stack_raises_with_what_is_there() -> None:
    assert message_of({"mode": "full", "stack": "visoin"}, two_towers()) == (
        'Rule {mode: "full", stack: "visoin"} asks for stack "visoin", but TinyForCausalLM has vision, '
        'model.visual.blocks, decoder, language, model.layers. Did you mean "vision"?'
    )
    assert 'asks for stack "encoder", but TinyForCausalLM has decoder, language, model.layers.' in message_of(
        {"mode": "full", "stack": "encoder"}, decoder(2)
    )


def test_range_must_fit_every_stack_that_it_reaches() -> None:
    rule = {"mode": "full", "layers": "0:4"}
    assert message_of(rule, two_towers()) == (
        'Rule {mode: "full", layers: "0:4"} reaches past the end: model.visual.blocks of TinyForCausalLM has 2 decoder '
        'layers (0 to 1). Use "0:2" or "0:".'
    )
    assert letters(plan_of({**rule, "stack": "language"}, two_towers())) == ["nn", "ffff"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"layer_type": "sliding_attention"}, "ffnffn"),
        ({"layer_type": "full_attention"}, "nnfnnf"),
        ({"layer_type": "sliding_attention", "layers": "2:"}, "nnnffn"),
        ({"layer_type": "sliding_attention", "every_n_layers": 2}, "fnnnfn"),
    ],
)
def test_layer_type_reaches_layers_of_that_type(rule: dict[str, object], expected: str) -> None:
    stacks = typed(*["sliding_attention", "sliding_attention", "full_attention"] * 2)
    assert letters(plan_of({"mode": "full", **rule}, stacks)) == [expected]


def test_layer_type_leaves_stacks_without_it_alone() -> None:
    stacks = [*typed(None, None), *typed("full_attention", "sliding_attention")]
    assert letters(plan_of({"mode": "full", "layer_type": "full_attention"}, stacks)) == ["nn", "fn"]


def test_unknown_layer_type_raises_with_what_is_there() -> None:
    rule = {"mode": "full", "layer_type": "full_atention"}
    assert message_of(rule, typed("sliding_attention", "full_attention")) == (
        'Rule {mode: "full", layer_type: "full_atention"} asks for layer_type "full_atention", but the layers of '
        'TinyForCausalLM have full_attention, sliding_attention. Did you mean "full_attention"?'
    )
    assert message_of(rule, decoder(2)).endswith("but the layers of TinyForCausalLM have no types.")


def test_layer_type_that_is_not_in_the_range_raises() -> None:
    rule = {"mode": "full", "layer_type": "full_attention", "layers": "0:1"}
    assert "reaches no layer of TinyForCausalLM" in message_of(rule, typed("sliding_attention", "full_attention"))


# --- Segments. ---


@pytest.mark.parametrize(
    ("rule", "num_layers", "expected"),
    [
        ({"segment_size": 2}, 6, "002244"),
        ({"segment_size": 1}, 3, "012"),
        ({"segment_size": 4}, 6, "000044"),
        ({"segment_size": 4}, 4, "0000"),
        # The square root of the layers reached, rounded up.
        ({"segment_size": "sqrt"}, 9, "000333666"),
        ({"segment_size": "sqrt"}, 8, "00033366"),
        ({"segment_size": "sqrt"}, 5, "00033"),
        ({"segment_size": "sqrt"}, 4, "0022"),
        ({"segment_size": "sqrt"}, 1, "0"),
        ({"segment_size": "sqrt", "layers": "4:"}, 8, "nnnn4466"),
        # Gaps end a segment.
        ({"segment_size": 3, "layers": [0, 1, 3, 4, 5, 6]}, 8, "00n3336n"),
        ({"segment_size": 2, "layers": [0, 2, 3, 5]}, 8, "0n22n5nn"),
        ({"segment_size": 1, "layers": "::2"}, 4, "0n2n"),
    ],
)
def test_segments_are_runs_of_consecutive_layers(rule: dict[str, object], num_layers: int, expected: str) -> None:
    plan = plan_of({"mode": "full", **rule}, decoder(num_layers))
    assert letters(plan) == [expected]
    assert not any(layer.nested for layer in plan.stacks[0].layers)


def test_segments_of_a_layer_type_end_where_the_type_changes() -> None:
    stacks = typed("a", "a", "b", "a", "a", "a")
    assert letters(plan_of({"mode": "full", "layer_type": "a", "segment_size": 2}, stacks)) == ["00n335"]


def test_sqrt_is_taken_of_each_stack() -> None:
    assert letters(plan_of("full", two_towers(4, 9), segment_size="sqrt")) == ["0022", "000333666"]


@pytest.mark.parametrize(
    ("rule", "num_layers", "longest"),
    [
        ({"segment_size": 5}, 4, 4),
        ({"segment_size": 100}, 4, 4),
        # Gaps end a segment.
        ({"segment_size": 3, "layers": [0, 1, 3, 4]}, 8, 2),
        ({"segment_size": 2, "layers": "::2"}, 4, 1),
    ],
)
def test_segments_that_no_layers_in_a_row_fill_raise(rule: dict[str, object], num_layers: int, longest: int) -> None:
    message = message_of({"mode": "full", **rule}, decoder(num_layers))
    assert (
        f"asks for segments of {rule['segment_size']} layers, but of the layers of TinyForCausalLM that it " in message
    )
    assert message.endswith(
        f"reaches fewer follow one another: {longest} in model.layers. Use segment_size: {longest} or less, or "
        "segment_size: sqrt."
    )


def test_each_rule_has_segments_that_its_own_layers_fill() -> None:
    rules = [{"layers": "0:2", "mode": "full", "segment_size": 2}, {"layers": "2:5", "mode": "full", "segment_size": 4}]
    assert "model.layers" in message_of(rules, decoder(8))
    assert letters(plan_of([rules[0], {**rules[1], "segment_size": 3}], decoder(8))) == ["00222nnn"]


def test_segments_have_to_be_filled_in_one_of_several_stacks() -> None:
    plan = plan_of("full", two_towers(2, 6), segment_size=3)
    assert letters(plan) == ["00", "000333"]
    assert "  0 to 1       full, segments of 2" in plan.summary()
    assert "2 in model.visual.blocks, 6 in model.layers. Use segment_size: 6 or less" in message_of(
        "full", two_towers(2, 6), segment_size=7
    )


def test_nested_marks_the_layers_of_segments() -> None:
    plan = plan_of("full", decoder(4), segment_size=2, nested=True)
    assert plan.stacks[0].layers == tuple(LayerPlan(Mode.FULL, segment=start, nested=True) for start in (0, 0, 2, 2))


# --- Several rules. ---


def test_rules_share_a_stack() -> None:
    rules = [
        {"layers": "0:2", "mode": "full"},
        {"layers": "2:4", "mode": "ffn"},
        {"layers": "4:6", "mode": "attention"},
        {"layers": "6:8", "mode": "full", "segment_size": 2},
    ]
    assert letters(plan_of(rules, decoder(9))) == ["ffffaa66n"]
    assert [layer.mode for layer in plan_of(rules, decoder(9)).stacks[0].layers[2:4]] == [Mode.FFN, Mode.FFN]


def test_none_counts_as_a_mode_that_was_given() -> None:
    rules = [{"layers": "0:2", "mode": "none"}, {"mode": "full", "layers": "1:"}]
    assert message_of(rules, decoder(4)).startswith('Layer 1 of model.layers has two modes: "none" from')


@pytest.mark.parametrize(
    ("first", "second", "which"),
    [
        ("0:12", "8:16", "Layers 8 to 11 of model.layers have"),
        # The message does not depend on the order of the rules.
        ("8:16", "0:12", "Layers 8 to 11 of model.layers have"),
        ("0:9", "8:16", "Layer 8 of model.layers has"),
        (3, "0:16", "Layer 3 of model.layers has"),
        ("::4", "0:9", "Layers 0, 4, 8 of model.layers have"),
        ("0:2", [1, 0], "Layers 0 to 1 of model.layers have"),
    ],
)
def test_two_modes_for_one_layer_raise(first: object, second: object, which: str) -> None:
    def shown(layers: object) -> str:
        return f'"{layers}"' if isinstance(layers, str) else str(layers)

    rules = [{"layers": first, "mode": "full"}, {"layers": second, "mode": "ffn"}]
    assert message_of(rules, decoder(16)) == (
        f'{which} two modes: "full" from {{mode: "full", layers: {shown(first)}}} and "ffn" from '
        f'{{mode: "ffn", layers: {shown(second)}}}. Give each layer one mode.'
    )


def test_overlap_names_the_layers_of_the_first_rule_that_it_meets() -> None:
    rules = [{"layers": "0:2", "mode": "full"}, {"layers": "2:4", "mode": "ffn"}, {"mode": "attention"}]
    assert message_of(rules, decoder(4)) == (
        'Layers 0 to 1 of model.layers have two modes: "full" from {mode: "full", layers: "0:2"} and "attention" from '
        '{mode: "attention"}. Give each layer one mode.'
    )


# --- Parts. ---


def test_layer_without_the_part_is_left_alone_and_says_why() -> None:
    stacks = [Stack([Layer(parts=frozenset({"attention"})), Layer()])]
    assert plan_of("ffn", stacks).stacks[0].layers == (LayerPlan(why="it has no ffn"), LayerPlan(Mode.FFN))
    assert "0            none (it has no ffn)" in plan_of("ffn", stacks).summary()


@pytest.mark.parametrize("part", ["attention", "ffn"])
def test_part_that_no_layer_has_raises(part: str) -> None:
    stacks = [Stack([Layer(parts=BOTH - {part})] * 2)]
    assert message_of(part, stacks) == (
        f'Rule {{mode: "{part}"}} asks for "{part}", but no {part} was found in the layers of TinyForCausalLM that it '
        f'reaches. Name it with {part}="<attribute of the layer>", or use mode "full".'
    )


def test_part_that_no_layer_of_the_range_has_raises() -> None:
    stacks = [Stack([Layer(parts=frozenset({"ffn"})), Layer()])]
    assert "no attention was found" in message_of({"mode": "attention", "layers": 0}, stacks)


def test_part_that_one_of_two_stacks_has_is_enough() -> None:
    stacks = [Stack([Layer(parts=frozenset())], "model.other"), *decoder(1)]
    assert letters(plan_of("ffn", stacks)) == ["n", "f"]


def test_selective_attention_is_full_where_there_is_no_attention_to_keep() -> None:
    stacks = [Stack([Layer(), Layer(computes_attention=False), Layer(computes_attention=False)])]
    assert plan_of("selective_attention", stacks, offload="cpu").summary().splitlines()[1:] == [
        "  0            selective_attention, offload to cpu",
        "  1            full, offload to cpu (it has no attention to keep)",
        "  2            full (it has no attention to keep; the last layer, needed again at once)",
    ]
    assert letters(plan_of("selective", stacks)) == ["sss"]


def test_selective_attention_without_any_attention_raises() -> None:
    stacks = [Stack([Layer(), Layer(computes_attention=False)])]
    assert message_of({"mode": "selective_attention", "layers": 1}, stacks) == (
        'Rule {mode: "selective_attention", layers: 1} keeps what attention returns, but no layer of TinyForCausalLM '
        'that it reaches computes attention: nothing could be kept. Use mode "selective", which keeps the outputs of '
        'matrix products, or "full".'
    )


# --- Frozen layers. ---


def test_skip_frozen_leaves_layers_without_gradient_alone() -> None:
    stacks = [Stack([Layer(needs_gradient=False), Layer(needs_gradient=False), Layer()])]
    plan = plan_of("full", stacks, skip_frozen=True)
    assert plan.stacks[0].layers == (LayerPlan(why="frozen"), LayerPlan(why="frozen"), LayerPlan(Mode.FULL))
    assert letters(plan_of("full", stacks)) == ["fff"]


def test_skip_frozen_gives_no_reason_where_nothing_was_asked() -> None:
    stacks = [Stack([Layer(needs_gradient=False), Layer()])]
    assert plan_of({"layers": 1, "mode": "full"}, stacks, skip_frozen=True).stacks[0].layers[0] == LayerPlan()


# --- Modifiers and the head. ---


def test_entries_have_the_modifiers_of_their_rule() -> None:
    rules = [
        {"layers": "0:1", "mode": "full", "offload": "cpu", "tiles": 4},
        {"layers": "1:2", "mode": "selective", "save": ["aten.mm"]},
        {"layers": "2:3", "mode": "none", "tiles": "auto"},
    ]
    assert plan_of(rules, decoder(4)).stacks[0].layers == (
        LayerPlan(Mode.FULL, offload=Offload(), tiles=4),
        LayerPlan(Mode.SELECTIVE, save=("aten.mm",)),
        LayerPlan(tiles="auto"),
        LayerPlan(),
    )


@pytest.mark.parametrize("mode", ["full", "selective", "selective_attention"])
def test_last_layer_of_a_stack_keeps_what_it_needs_at_once(mode: str) -> None:
    plan = plan_of(mode, two_towers(2, 3), offload="cpu")
    offloads = LayerPlan(Mode(mode), offload=Offload())
    last = LayerPlan(Mode(mode), why="the last layer, needed again at once")
    assert [stack.layers for stack in plan.stacks] == [(offloads, last), (offloads, offloads, last)]


def test_last_layer_keeps_its_other_modifiers() -> None:
    entry = plan_of("full", decoder(2), offload="cpu", tiles=2).stacks[0].layers[-1]
    assert (entry.mode, entry.offload, entry.tiles) == (Mode.FULL, None, 2)


def test_skip_frozen_leaves_layers_that_only_run_in_tiles_alone() -> None:
    stacks = [Stack([Layer(needs_gradient=False), Layer()])]
    plan = plan_of("none", stacks, tiles=2, skip_frozen=True)
    assert plan.stacks[0].layers == (LayerPlan(why="frozen"), LayerPlan(tiles=2))


def test_layer_without_the_part_still_runs_in_tiles() -> None:
    stacks = [Stack([Layer(parts=frozenset({"ffn"})), Layer()])]
    plan = plan_of("attention", stacks, tiles=2)
    assert plan.stacks[0].layers == (
        LayerPlan(why="it has no attention", tiles=2),
        LayerPlan(Mode.ATTENTION, tiles=2),
    )


def test_head_of_the_policy_is_that_of_the_plan() -> None:
    assert plan_of("full", decoder(2)).head is HeadMode.PLAIN
    assert plan_of("full", decoder(2), head="chunked").head is HeadMode.CHUNKED


def test_summary_says_what_is_added_to_a_mode() -> None:
    rules = [
        {"layers": "0:2", "mode": "full", "offload": {"to": "disk", "path": "/scratch", "fraction": 0.5}},
        {"layers": "2:3", "mode": "selective", "save": ["aten.mm", "*.q_proj"]},
        {"layers": "3:4", "mode": "none", "tiles": "auto"},
        {"layers": "4:", "mode": "full", "offload": "cpu", "tiles": 8},
    ]
    assert plan_of(rules, decoder(6), head="chunked").summary() == (
        "model.layers: 6 layers\n"
        "  0 to 1       full, offload to disk, fraction 0.5\n"
        "  2            selective, save aten.mm, *.q_proj\n"
        "  3            none, tiles auto\n"
        "  4            full, offload to cpu, tiles 8\n"
        "  5            full, tiles 8 (the last layer, needed again at once)\n"
        "head: chunked"
    )


# --- JSON, digest, summary. ---

RICH = [
    {"layers": "0:4", "mode": "full", "segment_size": 2, "nested": True},
    {"layers": "4:6", "mode": "ffn"},
    {"layers": "7:9", "mode": "selective", "save": ["aten.mm"], "offload": {"to": "cpu", "fraction": 0.5}},
    {"layers": "9:", "mode": "full", "tiles": "auto", "offload": {"to": "disk", "path": "/scratch"}},
]


def rich() -> Plan:
    stacks = [Stack([Layer()] * 5 + [Layer(parts=frozenset({"attention"}))] + [Layer()] * 5)]
    return plan_of(RICH, stacks, head="chunked")


def test_json_gives_the_plan_back() -> None:
    plan = rich()
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).digest() == plan.digest()


def test_json_holds_what_differs_from_the_default() -> None:
    assert json.loads(rich().to_json()) == {
        "format": 2,
        "model_class": "TinyForCausalLM",
        "head": "chunked",
        "stacks": [
            {
                "path": "model.layers",
                "layers": [
                    {"mode": "full", "segment": 0, "nested": True},
                    {"mode": "full", "segment": 0, "nested": True},
                    {"mode": "full", "segment": 2, "nested": True},
                    {"mode": "full", "segment": 2, "nested": True},
                    {"mode": "ffn"},
                    {"mode": "none", "why": "it has no ffn"},
                    {"mode": "none"},
                    *[{"mode": "selective", "save": ["aten.mm"], "offload": {"to": "cpu", "fraction": 0.5}}] * 2,
                    {"mode": "full", "offload": {"to": "disk", "path": "/scratch"}, "tiles": "auto"},
                    {"mode": "full", "tiles": "auto", "why": "the last layer, needed again at once"},
                ],
            }
        ],
    }


def test_plan_that_was_written_before_there_were_modifiers_is_read() -> None:
    stacks = [{"path": "model.layers", "layers": [{"mode": "full", "segment": 0, "nested": True}, {"mode": "ffn"}]}]
    text = json.dumps({"format": 1, "model_class": "TinyForCausalLM", "stacks": stacks})
    entries = (LayerPlan(Mode.FULL, segment=0, nested=True), LayerPlan(Mode.FFN))
    assert Plan.from_json(text) == Plan("TinyForCausalLM", (StackPlan("model.layers", entries),))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"mode": "none", "offload": {"to": "cpu"}}, 'has offload with mode "none".'),
        ({"mode": "full", "offload": {"to": "cpu"}, "segment": 0}, "has both segment_size and offload."),
        ({"mode": "full", "tiles": 2, "segment": 0}, "has both segment_size and tiles."),
        ({"mode": "selective", "tiles": 2}, 'has tiles with mode "selective".'),
        ({"mode": "full", "save": ["aten.mm"]}, 'has save with mode "full".'),
        ({"mode": "selective", "save": []}, "save is []."),
        ({"mode": "full", "tiles": 0}, "tiles is 0."),
        ({"mode": "full", "offload": {"to": "disk"}}, "has no path."),
        ({"mode": "ffn", "segment": 0}, 'has segment_size with mode "ffn".'),
        ({"mode": "full", "nested": True}, "is nested but has no segment_size."),
    ],
)
def test_entry_that_no_policy_could_have_made_raises(entry: dict[str, object], message: str) -> None:
    stacks = [{"path": "model.layers", "layers": [entry]}]
    with pytest.raises(PolicyError, match=re.escape(message)):
        Plan.from_json(json.dumps({"format": 2, "model_class": "M", "stacks": stacks}))


def _of(*entries: dict[str, object], **changes: object) -> str:
    """The JSON of a plan with one stack."""
    stacks = [{"path": "model.layers", "layers": entries}]
    return json.dumps({"format": 2, "model_class": "M", "stacks": stacks, **changes})


NUMBER, FLAG, PLAIN = "a whole number of 0 or more", "true or false", "text without control characters"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (_of({"mode": "full", "segment": "a"}), f'stacks.0.layers.0.segment is "a". Use {NUMBER}'),
        (_of({"mode": "full", "segment": math.nan}), f"stacks.0.layers.0.segment is NaN. Use {NUMBER}"),
        (_of({"mode": "full", "segment": 1e300}), f"stacks.0.layers.0.segment is 1e+300. Use {NUMBER}"),
        (_of({"mode": "full", "segment": True}), f"stacks.0.layers.0.segment is true. Use {NUMBER}"),
        (_of({"mode": "full", "segment": -1}), f"stacks.0.layers.0.segment is -1. Use {NUMBER}"),
        (_of({"mode": "full", "segment": 3}), "stacks.0.layers.0.segment is 3. Use a number below 1"),
        (
            _of({"mode": "full", "segment": 0}, {"mode": "none"}, {"mode": "full", "segment": 0}),
            "stacks.0.layers.2.segment is 0. Use a number below 3, the layers of the stack, and one number for layers "
            "that follow each other",
        ),
        (_of({"mode": "full", "segment": 0, "nested": 1}), f"stacks.0.layers.0.nested is 1. Use {FLAG}"),
        (_of({"mode": "full", "why": 3}), f"stacks.0.layers.0.why is 3. Use {PLAIN}"),
        (_of({"mode": "full", "why": "\x1b[31m"}), rf'stacks.0.layers.0.why is "\u001b[31m". Use {PLAIN}'),
        (_of({"mode": "ful"}), 'stacks.0.layers.0.mode is "ful". Use one of "none", "full"'),
        (_of({"mode": ["full"]}), 'stacks.0.layers.0.mode is ["full"]. Use one of'),
        (
            _of({"mode": "full", "tile": 2}),
            '"stacks.0.layers.0.tile" is unknown. Did you mean "tiles"? Fields are mode',
        ),
        (_of({"mode": "full", "tiles": True}), "stacks.0.layers.0: tiles is true. Use a whole number of 1 or more"),
        (_of({"mode": "full", "tiles": math.nan}), "stacks.0.layers.0: tiles is nan. Use a whole number of 1 or more"),
        (_of({"mode": "full", "tiles": 1e300}), "stacks.0.layers.0: tiles is 1e+300. Use a whole number of 1 or more"),
        (_of({"mode": "selective", "save": [1]}), "stacks.0.layers.0: save is [1]. Use a list"),
        (
            _of({"mode": "full", "offload": {"to": "cpu", "fraction": math.nan}}),
            "stacks.0.layers.0: fraction of offload is nan. Use a number above 0",
        ),
        (
            _of({"mode": "full", "offload": {"to": "cpu", "host_memory": 10**400}}),
            "stacks.0.layers.0: host_memory of offload is more than any machine has. Write an amount",
        ),
        (
            _of({"mode": "full", "offload": {"to": "cpu", "min_bytes": 1e300}}),
            "stacks.0.layers.0: min_bytes of offload is 1e+300. Write an amount",
        ),
        (
            _of({"mode": "full", "offload": {"to": "cpu", "host_memory": "1e300GiB"}}),
            'stacks.0.layers.0: host_memory is "1e300GiB", more than any machine has. Write',
        ),
        (_of({"mode": "full", "offload": {"too": "cpu"}}), 'stacks.0.layers.0: Unknown key "too" in offload'),
        (_of({"mode": "full"}, format=True), "format is true. Use a whole number, 1 to 2"),
        (_of({"mode": "full"}, format="2"), 'format is "2". Use a whole number, 1 to 2'),
        (_of({"mode": "full"}, model_class=None), f"model_class is null. Use {PLAIN}"),
        (_of({"mode": "full"}, heads="chunked"), '"heads" is unknown. Did you mean "head"? Fields are format'),
        (_of({"mode": "full"})[:-1] + ', "head": "plain", "head": "chunked"}', '"head" is given twice. Keep one'),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"format": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_each_field_of_a_plan_file_is_checked(tmp_path: Path, text: str, says: str) -> None:
    written = tmp_path / "plan.json"
    written.write_text(text)
    with pytest.raises(PolicyError, match=re.escape(says)) as raised:
        parse(str(written))
    assert str(raised.value).startswith(f"{written}: ")
    assert len(str(raised.value)) < 1200


def test_plan_file_has_a_largest_size(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(" " * 2**20 + "{}")
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    for name in ("plan.json", "endless.json"):
        with pytest.raises(PolicyError, match=rf"{name}: no plan can be read there: it holds more than 1 MiB\."):
            parse(str(tmp_path / name))


def test_unknown_head_raises() -> None:
    with pytest.raises(PolicyError, match=r'^head is "fused"\. Use one of "plain", "chunked"\.$'):
        Plan.from_json('{"format": 2, "model_class": "M", "stacks": [], "head": "fused"}')


@pytest.mark.parametrize(
    "text",
    [
        "",
        "full",
        "[]",
        "5",
        "null",
        "{}",
        '{"format": 1}',
        '{"format": 1, "model_class": "M", "stacks": 3}',
        '{"format": 1, "model_class": "M", "stacks": [{"path": "p", "layers": ["full"]}]}',
        '{"format": 1, "model_class": "M", "stacks": [{"path": "p", "layers": [{"mode": "ful"}]}]}',
        '{"format": 1, "model_class": "M", "stacks": [{"layers": []}]}',
    ],
)
def test_text_that_is_no_plan_raises(text: str) -> None:
    with pytest.raises(PolicyError, match=r"^This is not a plan: .*\. Write one with Plan\.to_json\(\)\.$"):
        Plan.from_json(text)


def test_plan_of_another_format_raises() -> None:
    with pytest.raises(PolicyError, match=r"^The plan has format 3, this version reads up to 2\.$"):
        Plan.from_json('{"format": 3}')


def test_digest_tells_plans_apart() -> None:
    plans = [plan_of(policy, decoder(4)) for policy in ("none", "full", "ffn", {"mode": "full", "layers": "0:3"})]
    plans += [plan_of("full", decoder(3)), plan_of("full", two_towers(0, 4))]
    plans += [plan_of("full", decoder(4), segment_size=2), plan_of("full", decoder(4), segment_size=2, nested=True)]
    plans += [plan_of("full", decoder(4), offload="cpu"), plan_of("full", decoder(4), offload={"fraction": 0.5})]
    plans += [plan_of("full", decoder(4), tiles=2), plan_of("full", decoder(4), tiles="auto")]
    plans += [plan_of("selective", decoder(4)), plan_of("selective", decoder(4), save="aten.mm")]
    plans += [plan_of("selective_attention", decoder(4)), plan_of("full", decoder(4), head="chunked")]
    assert len({plan.digest() for plan in plans}) == len(plans)


def test_digest_is_the_same_in_every_process() -> None:
    # Checkpoints hold it: a change of this value is a change of PLAN_FORMAT.
    assert plan_of("full", decoder(2)).digest() == "c8fea24185834db4"
    assert plan_of({"mode": "full", "layers": "0:2"}, decoder(2)).digest() == "c8fea24185834db4"


def test_count_counts_layers_of_all_stacks() -> None:
    plan = plan_of(
        [{"stack": "vision", "mode": "full"}, {"layers": "1:3", "mode": "ffn", "stack": "language"}], two_towers()
    )
    assert {mode.value: count for mode in Mode if (count := plan.count(mode))} == {"none": 2, "full": 2, "ffn": 2}


def test_summary_puts_equal_neighbours_on_one_line() -> None:
    rules = [
        {"stack": "vision", "mode": "full"},
        {"stack": "language", "layers": "0:5", "mode": "full", "segment_size": 2, "nested": True},
        {"stack": "language", "layers": "5:7", "mode": "ffn"},
        {"stack": "language", "layers": "7", "mode": "attention"},
    ]
    assert plan_of(rules, two_towers(2, 10)).summary() == (
        "model.visual.blocks: 2 layers\n"
        "  0 to 1       full\n"
        "model.layers: 10 layers\n"
        "  0 to 3       full, segments of 2, nested\n"
        "  4            full, segments of 1, nested\n"
        "  5 to 6       ffn\n"
        "  7            attention\n"
        "  8 to 9       none"
    )


def test_summary_says_why_a_layer_is_left_alone() -> None:
    stacks = [Stack([Layer(needs_gradient=False)] * 2 + [Layer()])]
    assert plan_of("full", stacks, skip_frozen=True).summary() == (
        "model.layers: 3 layers\n  0 to 1       none (frozen)\n  2            full"
    )


def test_plan_is_a_value() -> None:
    stack = StackPlan("model.layers", (LayerPlan(Mode.FULL),))
    assert Plan("M", (stack,)) == Plan("M", (StackPlan("model.layers", (LayerPlan(Mode.FULL),)),))
    assert hash(Plan("M", (stack,))) == hash(Plan("M", (stack,)))


# --- What a notebook shows, and one line of it. ---


def test_a_plan_in_one_line_counts_what_layers_do() -> None:
    policy = [{"layers": "0:3", "mode": "full", "offload": "cpu"}, {"layers": 3, "mode": "attention"}]
    assert plan_of(policy, decoder(6)).describe() == "layers: 3 full + offload, 2 none, 1 attention"
    towers = plan_of({"stack": "language", "mode": "full"}, two_towers(), head="chunked")
    assert towers.describe() == "model.visual.blocks: 2 none; model.layers: 4 full; head: chunked"


def test_a_notebook_shows_a_plan_as_a_table_and_a_strip_of_layers() -> None:
    shown = Markup(plan_of({"layers": "0:3", "mode": "full"}, decoder(4))._repr_html_())
    assert (shown.wrong, shown.leads_to()) == ([], [])
    cells = [given["fill"] for name, given in shown.elements if name == "rect"]
    assert len(cells) == 4
    assert len(set(cells[:3])) == 1
    assert cells[3] != cells[0]
    assert "0 to 2 full" in shown.text
