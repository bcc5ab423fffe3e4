"""Policies resolved for the shape of a model, and what a plan says of itself; no model is built."""

from __future__ import annotations

import pytest

from hf_ckpt.policy.options import HeadMode, Offload
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode
from tests.markups import Markup
from tests.policy.stack_shapes import BOTH, Layer, Stack, decoder, letters, message_of, plan_of, two_towers, typed

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


# --- What a plan says of itself. ---


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
