"""What the user may write, and what is said when it cannot be read."""

from __future__ import annotations

import pytest

from hf_ckpt.errors import HFCkptError, PolicyError
from hf_ckpt.policy.options import HeadMode, Offload, PolicyOptions, takes
from hf_ckpt.policy.policy import Mode, Policy, Rule

MODES = '"none", "full", "attention", "ffn", "selective", "selective_attention"'
KEYS = "mode, layers, stack, layer_type, every_n_layers, segment_size, nested, snapshots, save, offload, tiles, weights"
OFFLOAD_KEYS = "to, path, fraction, host_memory, trust_host_memory, min_bytes"
SAVE_ADVICE = "Use a list of operators (aten.mm) and of modules below the layer (mlp.down_proj, *.q_proj)."
GIB = 2**30
LAYERS_ADVICE = 'Use a Python slice as text ("0:24", "-4:", "::2"), one index, or a list of indices.'


def rule(**fields: object) -> dict[str, object]:
    return {"mode": "full", **fields}


# --- What can be read. ---


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        # A mode name, alone and with the options of one rule.
        ("none", {}, [Rule(mode=Mode.NONE)]),
        ("full", {}, [Rule(mode=Mode.FULL)]),
        ("attention", {}, [Rule(mode=Mode.ATTENTION)]),
        ("ffn", {}, [Rule(mode=Mode.FFN)]),
        (Mode.FFN, {}, [Rule(mode=Mode.FFN)]),
        ("full", {"every_n_layers": 2}, [Rule(mode=Mode.FULL, every_n_layers=2)]),
        ("attention", {"every_n_layers": 3}, [Rule(mode=Mode.ATTENTION, every_n_layers=3)]),
        ("full", {"segment_size": 6}, [Rule(mode=Mode.FULL, segment_size=6)]),
        ("full", {"segment_size": "sqrt", "nested": True}, [Rule(mode=Mode.FULL, segment_size="sqrt", nested=True)]),
        ("full", {"segment_size": None, "every_n_layers": None, "nested": None}, [Rule(mode=Mode.FULL)]),
        ("full", {"nested": False}, [Rule(mode=Mode.FULL)]),
        # One mapping is one rule.
        ({"mode": "ffn", "layers": "0:4"}, {}, [Rule(mode=Mode.FFN, layers="0:4")]),
        # A list of rules keeps its order.
        (
            [{"layers": "0:24", "mode": "full"}, {"layers": "24:32", "mode": "ffn"}],
            {},
            [Rule(mode=Mode.FULL, layers="0:24"), Rule(mode=Mode.FFN, layers="24:32")],
        ),
        (({"mode": "full"},), {}, [Rule(mode=Mode.FULL)]),
        # Every key of a rule.
        (rule(stack="vision"), {}, [Rule(mode=Mode.FULL, stack="vision")]),
        (rule(stack="model.layers"), {}, [Rule(mode=Mode.FULL, stack="model.layers")]),
        (rule(layer_type="sliding_attention"), {}, [Rule(mode=Mode.FULL, layer_type="sliding_attention")]),
        (rule(every_n_layers=4), {}, [Rule(mode=Mode.FULL, every_n_layers=4)]),
        (rule(segment_size=2, nested=True), {}, [Rule(mode=Mode.FULL, segment_size=2, nested=True)]),
        ("selective", {}, [Rule(mode=Mode.SELECTIVE)]),
        ("selective_attention", {}, [Rule(mode=Mode.SELECTIVE_ATTENTION)]),
        ("selective", {"save": "aten.mm"}, [Rule(mode=Mode.SELECTIVE, save=("aten.mm",))]),
        (
            "selective",
            {"save": ["aten.mm", "*.q_proj", "aten.mm"]},
            [Rule(mode=Mode.SELECTIVE, save=("aten.mm", "*.q_proj"))],
        ),
        ("selective", {"every_n_layers": 2}, [Rule(mode=Mode.SELECTIVE, every_n_layers=2)]),
        ("selective", {"offload": "cpu"}, [Rule(mode=Mode.SELECTIVE, offload=Offload())]),
        ("full", {"offload": "cpu", "tiles": 4}, [Rule(mode=Mode.FULL, offload=Offload(), tiles=4)]),
        ("full", {"every_n_layers": 2, "tiles": "auto"}, [Rule(mode=Mode.FULL, every_n_layers=2, tiles="auto")]),
        *((mode, {"tiles": 1}, [Rule(mode=Mode(mode), tiles=1)]) for mode in ("none", "full", "attention", "ffn")),
        (rule(offload={"to": "cpu"}, tiles=2), {}, [Rule(mode=Mode.FULL, offload=Offload(), tiles=2)]),
        ({"mode": "selective", "save": ("mlp.*",)}, {}, [Rule(mode=Mode.SELECTIVE, save=("mlp.*",))]),
        # YAML writes a key without a value as None.
        (rule(layers=None, stack=None, layer_type=None, segment_size=None), {}, [Rule(mode=Mode.FULL)]),
        (rule(save=None, offload=None, tiles=None), {}, [Rule(mode=Mode.FULL)]),
    ],
)
def test_policy_is_read(policy: object, options: dict[str, object], expected: list[Rule]) -> None:
    assert Policy.parse(policy, **options) == Policy(tuple(expected))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("0:24", "0:24"),
        (":", ":"),
        ("::", "::"),
        ("-4:", "-4:"),
        (":-1", ":-1"),
        ("::2", "::2"),
        ("::-1", "::-1"),
        (" 0 : 24 : 2 ", "0:24:2"),
        ("5", 5),
        (" -1 ", -1),
        (5, 5),
        (-1, -1),
        (0, 0),
        ([0, 3, -1], (0, 3, -1)),
        ((7,), (7,)),
    ],
)
def test_layers_are_read(written: object, read: object) -> None:
    assert Policy.parse(rule(layers=written)).rules[0].layers == read


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("cpu", Offload()),
        ({"to": "cpu"}, Offload()),
        ({}, Offload()),
        (Offload(fraction=0.5), Offload(fraction=0.5)),
        ({"to": "disk", "path": "/scratch"}, Offload(to="disk", path="/scratch")),
        ({"fraction": 1}, Offload(fraction=1.0)),
        ({"fraction": 0.25, "host_memory": "64GiB"}, Offload(fraction=0.25, host_memory=64 * GIB)),
        ({"host_memory": 2**20}, Offload(host_memory=2**20)),
        ({"trust_host_memory": True}, Offload(trust_host_memory=True)),
        ({"trust_host_memory": False}, Offload()),
        ({"min_bytes": "2MiB"}, Offload(min_bytes=2**21)),
        ({"min_bytes": 0}, Offload(min_bytes=0)),
        ({"path": None, "fraction": None, "host_memory": None, "min_bytes": None}, Offload()),
    ],
)
def test_offload_is_read(written: object, read: Offload) -> None:
    assert Policy.parse(rule(offload=written)).rules[0].offload == read


def test_small_tensors_stay_on_the_device_unless_told_otherwise() -> None:
    assert Offload().min_bytes == 2**20


@pytest.mark.parametrize(
    ("head", "read"), [(None, HeadMode.PLAIN), ("plain", HeadMode.PLAIN), ("chunked", HeadMode.CHUNKED)]
)
@pytest.mark.parametrize("policy", ["none", {"mode": "ffn"}, [{"mode": "full"}]])
def test_head_belongs_to_the_policy_and_not_to_a_rule(policy: object, head: str | None, read: HeadMode) -> None:
    assert Policy.parse(policy, head=head).head is read


def test_head_can_be_set_on_a_policy_object_and_taken_off_it() -> None:
    policy = Policy.parse("full", head="chunked")
    assert Policy.parse(policy).head is HeadMode.CHUNKED
    assert Policy.parse(policy, head="plain") == Policy.parse("full")
    assert Policy.parse(Policy.parse("full"), head="chunked") == policy


def test_skip_frozen_belongs_to_the_policy_and_not_to_a_rule() -> None:
    assert Policy.parse("full", skip_frozen=True) == Policy((Rule(mode=Mode.FULL),), skip_frozen=True)
    assert Policy.parse([rule()], skip_frozen=True).skip_frozen


def test_policy_object_is_returned_as_it_is() -> None:
    policy = Policy.parse("full", segment_size=2)
    assert Policy.parse(policy) == policy


def test_skip_frozen_can_be_added_to_a_policy_object() -> None:
    policy = Policy.parse("full", segment_size=2)
    assert Policy.parse(policy, skip_frozen=True) == Policy(policy.rules, skip_frozen=True)
    assert Policy.parse(Policy.parse("full", skip_frozen=True)).skip_frozen


def test_to_dict_is_read_back() -> None:
    rules = [rule(layers=[0, -1]), rule(layers="1:3", segment_size="sqrt", nested=True)]
    policy = Policy.parse(rules, skip_frozen=True)
    written = policy.to_dict()
    assert written == {
        "policy": [
            {"mode": "full", "layers": [0, -1]},
            {"mode": "full", "layers": "1:3", "segment_size": "sqrt", "nested": True},
        ],
        "skip_frozen": True,
    }
    assert Policy.parse(written["policy"], skip_frozen=written["skip_frozen"]) == policy


def test_to_dict_with_modifiers_is_read_back() -> None:
    rules = [
        rule(
            layers="0:2",
            offload={"to": "disk", "path": "/scratch", "trust_host_memory": True, "min_bytes": 0},
            tiles=4,
        ),
        {"layers": "2:", "mode": "selective", "save": ["aten.mm"], "offload": "cpu"},
    ]
    policy = Policy.parse(rules, head="chunked")
    written = policy.to_dict()
    assert written == {
        "policy": [
            {
                "mode": "full",
                "layers": "0:2",
                "offload": {"to": "disk", "path": "/scratch", "trust_host_memory": True, "min_bytes": 0},
                "tiles": 4,
            },
            {"mode": "selective", "layers": "2:", "save": ["aten.mm"], "offload": {"to": "cpu"}},
        ],
        "skip_frozen": False,
        "head": "chunked",
    }
    assert Policy.parse(written["policy"], head=written["head"]) == policy


# --- What cannot. ---


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        # The mode.
        ("ful", f'Unknown mode "ful". Modes are {MODES}. Did you mean "full"?'),
        ("FULL", f'Unknown mode "FULL". Modes are {MODES}. Did you mean "full"?'),
        ("", f'Unknown mode "". Modes are {MODES}.'),
        ("xyz", f'Unknown mode "xyz". Modes are {MODES}.'),
        ({"mode": "atention"}, f'Unknown mode "atention". Modes are {MODES}. Did you mean "attention"?'),
        ({"mode": None}, f'Unknown mode None. Modes are {MODES}. Did you mean "none"?'),
        ({"mode": False}, f"Unknown mode false. Modes are {MODES}."),
        ({"mode": ["full"]}, f"Unknown mode ['full']. Modes are {MODES}. Did you mean \"full\"?"),
        ({"layers": "0:4"}, f'Rule {{layers: "0:4"}} has no mode. Modes are {MODES}.'),
        # The form.
        (
            None,
            f"Policy None cannot be read. Use a mode name ({MODES}), a mapping such as "
            '{layers: "0:24", mode: full}, or a list of such mappings.',
        ),
        (
            3,
            f"Policy 3 cannot be read. Use a mode name ({MODES}), a mapping such as "
            '{layers: "0:24", mode: full}, or a list of such mappings.',
        ),
        (
            [],
            f"Policy [] cannot be read. Use a mode name ({MODES}), a mapping such as "
            '{layers: "0:24", mode: full}, or a list of such mappings.',
        ),
        (
            b"full",
            f"Policy b'full' cannot be read. Use a mode name ({MODES}), a mapping such as "
            '{layers: "0:24", mode: full}, or a list of such mappings.',
        ),
        (["full"], 'Rule "full" is not a mapping. Write it as {layers: "0:24", mode: full}.'),
        ([rule(), None], 'Rule None is not a mapping. Write it as {layers: "0:24", mode: full}.'),
        # The keys of a rule.
        (
            rule(layer="0:4"),
            f'Unknown key "layer" in rule {{mode: "full", layer: "0:4"}}. Keys are {KEYS}. Did you mean "layers"?',
        ),
        (
            rule(segments=2),
            f'Unknown key "segments" in rule {{mode: "full", segments: 2}}. Keys are {KEYS}. '
            'Did you mean "segment_size"?',
        ),
        (
            rule(tile=2),
            f'Unknown key "tile" in rule {{mode: "full", tile: 2}}. Keys are {KEYS}. Did you mean "tiles"?',
        ),
        # The head and skip_frozen are the policy's.
        (rule(head="chunked"), f'Unknown key "head" in rule {{mode: "full", head: "chunked"}}. Keys are {KEYS}.'),
        ({}, f"Rule {{}} has no mode. Modes are {MODES}."),
        ({1: 2}, f'Unknown key "1" in rule {{1: 2}}. Keys are {KEYS}.'),
        # layers
        (rule(layers="0-24"), f'layers is "0-24". {LAYERS_ADVICE}'),
        (rule(layers="0:1:2:3"), f'layers is "0:1:2:3". {LAYERS_ADVICE}'),
        (rule(layers="a:b"), f'layers is "a:b". {LAYERS_ADVICE}'),
        (rule(layers=""), f'layers is "". {LAYERS_ADVICE}'),
        (rule(layers="1.5"), f'layers is "1.5". {LAYERS_ADVICE}'),
        (rule(layers=1.5), f"layers is 1.5. {LAYERS_ADVICE}"),
        (rule(layers=True), f"layers is true. {LAYERS_ADVICE}"),
        (rule(layers=[]), f"layers is []. {LAYERS_ADVICE}"),
        (rule(layers=[0, "1"]), f"layers is [0, '1']. {LAYERS_ADVICE}"),
        (rule(layers=[0, True]), f"layers is [0, True]. {LAYERS_ADVICE}"),
        (rule(layers={"from": 0}), f"layers is {{from: 0}}. {LAYERS_ADVICE}"),
        (rule(layers="::0"), 'layers is "::0": a step of 0 reaches nothing. Use a step of 1 or more.'),
        (rule(layers="0:8:0"), 'layers is "0:8:0": a step of 0 reaches nothing. Use a step of 1 or more.'),
        # The other keys.
        (rule(stack=""), 'stack is "". Use a name as text.'),
        (rule(stack=3), "stack is 3. Use a name as text."),
        (rule(layer_type=["full_attention"]), "layer_type is ['full_attention']. Use a name as text."),
        (rule(every_n_layers=0), "every_n_layers is 0. Use a whole number of 1 or more."),
        (rule(every_n_layers=-2), "every_n_layers is -2. Use a whole number of 1 or more."),
        (rule(every_n_layers="2"), 'every_n_layers is "2". Use a whole number of 1 or more.'),
        (rule(every_n_layers=True), "every_n_layers is true. Use a whole number of 1 or more."),
        (rule(every_n_layers=2.0), "every_n_layers is 2.0. Use a whole number of 1 or more."),
        (rule(every_n_layers=None), "every_n_layers is None. Use a whole number of 1 or more."),
        (rule(segment_size=0), 'segment_size is 0. Use a whole number of 1 or more, or "sqrt".'),
        (rule(segment_size=-1), 'segment_size is -1. Use a whole number of 1 or more, or "sqrt".'),
        (rule(segment_size=True), 'segment_size is true. Use a whole number of 1 or more, or "sqrt".'),
        (
            rule(segment_size="sqr"),
            'segment_size is "sqr". Use a whole number of 1 or more, or "sqrt". Did you mean "sqrt"?',
        ),
        (rule(segment_size=2, nested="yes"), 'nested is "yes". Use true, false or "revolve".'),
        (rule(segment_size=2, nested=1), 'nested is 1. Use true, false or "revolve".'),
        # Keys that contradict each other.
        (
            {"mode": "ffn", "segment_size": 2},
            'Rule {mode: "ffn", segment_size: 2} has segment_size with mode "ffn". Only whole layers can share a saved '
            'input: use mode "full", or leave segment_size out.',
        ),
        (
            rule(every_n_layers=2, segment_size=2),
            'Rule {mode: "full", every_n_layers: 2, segment_size: 2} has both every_n_layers and segment_size. '
            "every_n_layers leaves layers between alone, segment_size joins consecutive layers: use one of them.",
        ),
        (
            rule(nested=True),
            'Rule {mode: "full", nested: true} is nested but has no segment_size. Add segment_size: sqrt.',
        ),
        (
            {"mode": "none", "every_n_layers": 2},
            'Rule {mode: "none", every_n_layers: 2} has every_n_layers with mode "none". Use mode "full" with it.',
        ),
        # save
        (rule(save=[]), f"save is []. {SAVE_ADVICE}"),
        (rule(save=""), f'save is "". {SAVE_ADVICE}'),
        (rule(save=["aten.mm", 3]), f"save is ['aten.mm', 3]. {SAVE_ADVICE}"),
        (rule(save=True), f"save is true. {SAVE_ADVICE}"),
        (rule(save={"aten.mm": 1}), f"save is {{aten.mm: 1}}. {SAVE_ADVICE}"),
        *(
            (
                {"mode": mode, "save": ["aten.mm"]},
                f'Rule {{mode: "{mode}", save: [\'aten.mm\']}} has save with mode "{mode}". Only mode "selective" '
                "chooses what is kept: use that, or leave save out.",
            )
            for mode in ("none", "full", "attention", "ffn", "selective_attention")
        ),
        # offload
        (rule(offload=True), "offload is true. Use cpu, or a mapping such as {to: disk, path: /scratch}."),
        (rule(offload=0.5), "offload is 0.5. Use cpu, or a mapping such as {to: disk, path: /scratch}."),
        (
            rule(offload="cppu"),
            'offload goes to "cppu". Use "cpu" (host memory) or "disk". Did you mean "cpu"?',
        ),
        (rule(offload={"to": 1}), 'offload goes to 1. Use "cpu" (host memory) or "disk".'),
        (
            rule(offload={"to": "cpu", "fractoin": 1}),
            f'Unknown key "fractoin" in offload {{to: "cpu", fractoin: 1}}. Keys are {OFFLOAD_KEYS}. '
            'Did you mean "fraction"?',
        ),
        (
            rule(offload="disk"),
            'offload {to: "disk"} has no path. Name a directory on a fast local disk: {to: disk, path: /scratch}.',
        ),
        (
            rule(offload={"path": "/scratch"}),
            'offload {path: "/scratch"} has a path, which only disk uses. Write to: disk, or leave it out.',
        ),
        (
            rule(offload={"to": "disk", "path": ""}),
            'path of offload is "". Use the name of a directory.',
        ),
        (rule(offload={"to": "disk", "path": 3}), "path of offload is 3. Use the name of a directory."),
        *(
            (
                rule(offload={"fraction": fraction}),
                f"fraction of offload is {shown}. Use a number above 0 and at most 1.",
            )
            for fraction, shown in ((0, "0"), (1.5, "1.5"), (-0.1, "-0.1"), (True, "true"), ("half", '"half"'))
        ),
        (
            rule(offload={"host_memory": 64}),
            'host_memory is 64, without a unit. Write "64GiB" or "64GB"; only a fraction of the device, above 0 and '
            "at most 1, has none.",
        ),
        (
            rule(offload={"host_memory": 0.9}),
            'host_memory of offload is 0.9. Write an amount, such as "64GiB".',
        ),
        (
            rule(offload={"trust_host_memory": "yes"}),
            'trust_host_memory of offload is "yes". Use true or false.',
        ),
        (
            rule(offload={"min_bytes": 0.5}),
            'min_bytes of offload is 0.5. Write an amount, such as "64GiB".',
        ),
        *(
            (
                {"mode": mode, "offload": "cpu"},
                f'Rule {{mode: "{mode}", offload: {{to: "cpu"}}}} has offload with mode "{mode}". Only modes that '
                'recompute the whole layer keep little enough to move: use "full", "selective" or '
                '"selective_attention".',
            )
            for mode in ("none", "attention", "ffn")
        ),
        (
            rule(segment_size=2, offload="cpu"),
            'Rule {mode: "full", segment_size: 2, offload: {to: "cpu"}} has both segment_size and offload. Leave '
            "segment_size out: with offload the layers need not share their inputs.",
        ),
        # tiles
        *(
            (rule(tiles=tiles), f'tiles is {shown}. Use a whole number of 1 or more, or "auto".{near}')
            for tiles, shown, near in (
                (0, "0", ""),
                (-2, "-2", ""),
                (2.0, "2.0", ""),
                (True, "true", ""),
                ("4", '"4"', ""),
                ("atuo", '"atuo"', ' Did you mean "auto"?'),
            )
        ),
        *(
            (
                {"mode": mode, "tiles": 2},
                f'Rule {{mode: "{mode}", tiles: 2}} has tiles with mode "{mode}". What runs in tiles is recomputed '
                'whole, so that nothing of it could be kept: use mode "full" or "none" with tiles.',
            )
            for mode in ("selective", "selective_attention")
        ),
        (
            rule(segment_size=2, tiles="auto"),
            'Rule {mode: "full", segment_size: 2, tiles: "auto"} has both segment_size and tiles. Leave segment_size '
            "out: with tiles the layers need not share their inputs.",
        ),
        (
            {"mode": "selective", "segment_size": 2},
            'Rule {mode: "selective", segment_size: 2} has segment_size with mode "selective". Only whole layers can '
            'share a saved input: use mode "full", or leave segment_size out.',
        ),
    ],
)
def test_unreadable_policy_raises(policy: object, message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        Policy.parse(policy)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("full", {"every_n_layers": 0}, "every_n_layers is 0. Use a whole number of 1 or more."),
        ("full", {"segment_size": "all"}, 'segment_size is "all". Use a whole number of 1 or more, or "sqrt".'),
        ("full", {"nested": "true"}, 'nested is "true". Use true, false or "revolve".'),
        ("full", {"skip_frozen": "yes"}, 'skip_frozen is "yes". Use true or false.'),
        ("full", {"skip_frozen": None}, "skip_frozen is None. Use true or false."),
        (
            "full",
            {"head": "chunkd"},
            'head is "chunkd". Use one of "plain", "chunked". Did you mean "chunked"?',
        ),
        ("full", {"head": True}, 'head is true. Use one of "plain", "chunked".'),
        ("selective", {"save": 3}, f"save is 3. {SAVE_ADVICE}"),
        # No message holds an address.
        ("selective", {"save": [object()]}, f"save is [<object object>]. {SAVE_ADVICE}"),
        ("full", {"tiles": 0}, 'tiles is 0. Use a whole number of 1 or more, or "auto".'),
        ("full", {"offload": "ram"}, 'offload goes to "ram". Use "cpu" (host memory) or "disk".'),
        (
            [rule()],
            {"save": ["aten.mm"], "offload": "cpu", "tiles": 2},
            "save, offload, tiles was given with a policy that is not a mode name. Write it inside the rule.",
        ),
        (
            "attention",
            {"segment_size": 2},
            'Rule {mode: "attention", segment_size: 2} has segment_size with mode "attention". Only whole layers can '
            'share a saved input: use mode "full", or leave segment_size out.',
        ),
        (
            rule(),
            {"every_n_layers": 2},
            "every_n_layers was given with a policy that is not a mode name. Write it inside the rule.",
        ),
        (
            [rule()],
            {"segment_size": 2, "nested": True},
            "segment_size, nested was given with a policy that is not a mode name. Write it inside the rule.",
        ),
        (
            Policy.parse("full"),
            {"segment_size": 2},
            "segment_size was given with a policy that is not a mode name. Write it inside the rule.",
        ),
    ],
)
def test_unreadable_options_raise(policy: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        Policy.parse(policy, **options)
    assert str(raised.value) == message


def test_policy_error_is_a_value_error_of_this_package() -> None:
    assert issubclass(PolicyError, ValueError)
    assert issubclass(PolicyError, HFCkptError)


def test_rule_describes_itself_as_it_is_written() -> None:
    parsed = Policy.parse(rule(layers=[0, 2], stack="vision", segment_size="sqrt", nested=True)).rules[0]
    assert parsed.describe() == '{mode: "full", layers: [0, 2], stack: "vision", segment_size: "sqrt", nested: true}'


def test_an_option_that_is_nearly_right_is_suggested() -> None:
    function = takes(PolicyOptions)(lambda **options: None)
    with pytest.raises(TypeError, match=r"argument 'every_n_layer'\. Did you mean \"every_n_layers\"\?$"):
        function(every_n_layer=2)
