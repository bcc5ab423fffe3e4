"""Plans as JSON: back as they were, each field of a file checked, and a digest."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from hf_ckpt.errors import PolicyError
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan, parse
from hf_ckpt.policy.policy import Mode
from tests.policy.stack_shapes import decoder, plan_of, rich, two_towers


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
