"""The binomial schedule against a dynamic program of its own, and what the option refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt.errors import PolicyError
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.policy.resolve_rules import resolve
from hf_ckpt.policy.revolve import most_runs, replays, reruns, segment_starts
from tests.policy.binomial import num_forwards
from tests.policy.stack_shapes import decoder

LAYERS, SNAPSHOTS = 64, 8


@cache
def fewest(num_layers: int, snapshots: int, *, is_forward: bool) -> int:
    """Runs of layers until a chain is through backward: tries every first input to save.

    In a forward the last layer's output goes to the head, so that its own turn comes only in backward.
    """
    if num_layers == 1:
        return 2 if is_forward else 1
    best = num_layers * (num_layers + 1) // 2 + (num_layers if is_forward else 0)
    if snapshots:
        for saved in range(1, num_layers):
            rest = fewest(num_layers - saved, snapshots - 1, is_forward=is_forward)
            best = min(best, saved + rest + fewest(saved, snapshots, is_forward=False))
    return best


def segments(num_layers: int, snapshots: int) -> Iterator[tuple[int, int]]:
    """Yield length and free snapshots of each segment."""
    for (start, free), (end, _) in pairwise([*segment_starts(num_layers, snapshots), (num_layers, 0)]):
        yield end - start, free


@pytest.mark.parametrize("snapshots", range(1, SNAPSHOTS + 1))
def test_layers_run_as_seldom_as_they_can(snapshots: int) -> None:
    for num_layers in range(1, LAYERS + 1):
        runs = [1 + times for each in segments(num_layers, snapshots) for times in reruns(*each)]
        assert len(runs) == num_layers
        assert sum(runs) == num_forwards(num_layers, snapshots) == fewest(num_layers, snapshots, is_forward=True)
        assert max(runs) <= most_runs(num_layers, snapshots)


@pytest.mark.parametrize("snapshots", range(1, SNAPSHOTS + 1))
def test_no_more_inputs_are_saved_than_snapshots(snapshots: int) -> None:
    for num_layers in range(1, LAYERS + 1):
        of_segments = [*segments(num_layers, snapshots)]
        assert len(of_segments) - 1 <= snapshots
        for number, each in enumerate(of_segments):
            assert number + max(len(saved) for _, saved, _ in replays(*each)) <= snapshots


def test_known_lengths_of_griewank_and_walther() -> None:
    # 56 steps, 3 of them checkpoints in one direction: (5 + 3)! / (5! 3!) with 5 checkpoints and 3 repetitions.
    assert [most_runs(layers, 4) for layers in (5, 20, 21, 55, 56)] == [2, 3, 4, 4, 5]
    assert num_forwards(55, 4) == 3 * 56 - 28 + 55


def test_the_documents_table_is_what_the_schedule_does() -> None:
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    rows = re.findall(r"^\| `nested: revolve`, `snapshots: (\d+)` \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    assert len(rows) == 2
    for saved, inputs, runs, most in (map(int, row) for row in rows):
        assert (inputs, runs, most) == (saved + 1, num_forwards(80, saved), most_runs(80, saved))
    sizes = [9] * 8 + [8]
    nested = [1 + times for size in sizes for times in reruns(size, None)]
    saved = len(sizes) + max(len(saved) for _, saved, _ in replays(9, None))
    assert f"| `segment_size: sqrt`, `nested: true` | {saved} | {sum(nested)} | {max(nested)} |" in text


def plan_of(num_layers: int, **options: Any) -> Plan:
    return resolve(Policy.parse("full", **options), decoder(num_layers), "LlamaForCausalLM")


@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 33])
def test_an_input_for_every_layer_is_full(num_layers: int) -> None:
    full = plan_of(num_layers)
    assert plan_of(num_layers, nested="revolve", snapshots=num_layers) == full
    assert num_layers == 1 or plan_of(num_layers, nested="revolve", snapshots=num_layers - 1) == full
    assert num_layers < 4 or plan_of(num_layers, nested="revolve", snapshots=num_layers - 2) != full


def test_a_plan_has_the_segments_of_the_schedule_and_comes_back_from_its_json() -> None:
    plan = plan_of(8, nested="revolve", snapshots=2)
    first, second = (LayerPlan(Mode.FULL, segment=at, nested=True, snapshots=free) for at, free in ((0, 2), (4, 1)))
    assert plan.stacks[0].layers == (*[first] * 4, *[second] * 3, LayerPlan(Mode.FULL))
    assert Plan.from_json(plan.to_json()) == plan
    assert "full, segments of 4, nested (2 snapshots)" in plan.summary()


def test_ranges_of_a_stack_have_schedules_of_their_own() -> None:
    rules = [{"layers": half, "mode": "full", "nested": "revolve", "snapshots": 1} for half in ("0:5", "5:10")]
    plan = resolve(Policy.parse(rules), decoder(10), "LlamaForCausalLM")
    assert [entry.segment for entry in plan.stacks[0].layers] == [0, 0, 0, 3, 3, 5, 5, 5, 8, 8]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"nested": "revolve"}, 'nested: "revolve" but no snapshots. Say how many inputs may be saved at a time'),
        ({"nested": "revolve", "snapshots": 0}, "snapshots is 0. Use a whole number of 1 or more."),
        ({"nested": "revolve", "snapshots": True}, "snapshots is true. Use a whole number of 1 or more."),
        ({"nested": "revolve", "snapshots": 9}, "may save 9 inputs, but reaches 8 layers of LlamaForCausalLM. Use"),
        ({"nested": "revolv", "snapshots": 2}, 'Use true, false or "revolve". Did you mean "revolve"?'),
        ({"snapshots": 2}, 'has snapshots without nested: "revolve", which alone counts saved inputs.'),
        ({"segment_size": 2, "nested": True, "snapshots": 2}, 'has snapshots without nested: "revolve"'),
        ({"nested": "revolve", "snapshots": 2, "segment_size": 2}, "leave out segment_size."),
        ({"nested": "revolve", "snapshots": 2, "every_n_layers": 2}, "leave out every_n_layers."),
        ({"nested": "revolve", "snapshots": 2, "offload": "cpu"}, "leave out offload."),
        ({"nested": "revolve", "snapshots": 2, "tiles": 2}, "leave out tiles."),
        ({"mode": "selective", "nested": "revolve", "snapshots": 2}, 'with mode "selective". Only whole layers can'),
        ({"layers": "::2", "nested": "revolve", "snapshots": 2}, "do not follow each other"),
    ],
)
def test_what_cannot_be_is_refused(rule: dict[str, Any], says: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(says)):
        resolve(Policy.parse({"mode": "full", **rule}), decoder(8), "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([{"mode": "full", "snapshots": 1}], "stacks.0.layers.0.snapshots is for nested segments. Leave it out"),
        ([{"mode": "full", "segment": 0, "nested": True, "snapshots": -1}], "snapshots is -1. Use a whole number"),
        (
            [{"mode": "full", "segment": 0, "nested": True, "snapshots": free} for free in (1, 2)],
            "stacks.0.layers.1.snapshots is 2. Use that of the segment's first layer, 1",
        ),
    ],
)
def test_snapshots_of_a_plan_file_are_checked(layers: list[dict[str, Any]], says: str) -> None:
    import json

    document = {"format": 2, "model_class": "M", "stacks": [{"path": "model.layers", "layers": layers}]}
    with pytest.raises(PolicyError, match=re.escape(says)):
        Plan.from_json(json.dumps(document))
