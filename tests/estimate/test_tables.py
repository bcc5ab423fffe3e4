"""An estimate as a table and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from hf_ckpt.estimate import estimate as estimates
from hf_ckpt.estimate import tables
from hf_ckpt.estimate.estimate import RECIPE, Row
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.fit import capacity_of
from hf_ckpt.simulation.step_memory import StepMemory
from tests import steps_by_hand
from tests.estimate.small_estimates import CARD, by_hand, row_of, table
from tests.steps_by_hand import GIB

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]


def test_table_has_a_verdict_above_the_rows_and_in_the_last_line() -> None:
    lines = table(by_hand(CARD)).splitlines()
    assert lines[:10] == [
        "hf-ckpt estimate recipe.yaml",
        "",
        "The recipe (no plan):",
        "  rtx4090  fits  peak 5.3 GiB  nvidia-smi 5.6 to 6.0 GiB  of 23.6 GiB",
        "",
        "  model   LlamaForCausalLM",
        "  batch   1 row",
        "  device  GeForce RTX 4090, 23.6 GiB; 307.2 to 716.8 MiB of it are CUDA's",
        "          context, and 241.7 MiB a margin",
        "",
    ]
    assert lines[10:15] == [
        "  plan                             peak     step       host  fits",
        "  recipe                        5.3 GiB      3 s             yes",
        "  none                         28.5 GiB      2 s             no, 5.2 GiB over",
        "  ffn                                 -                      no",
        "  auto                          8.5 GiB    2.5 s             yes",
    ]
    assert 'ffn: Rule {mode: ffn} asks for "ffn".' in lines
    assert lines[-1] == "The recipe (no plan) fits on rtx4090: 5.3 GiB of 23.6 GiB."


def test_verbose_table_says_what_fills_memory_and_when() -> None:
    lines = table(by_hand(CARD), is_verbose=True).splitlines()
    at = lines.index("  none                         28.5 GiB      2 s             no, 5.2 GiB over")
    assert lines[at + 1 : at + 3] == [
        "      saved activations 24.0 GiB, parameters 4.0 GiB, logits and loss 512.0 MiB;",
        "      forward, _log_softmax",
    ]


def test_table_of_several_devices_has_a_column_for_each() -> None:
    cards = [find_device(name) for name in ("rtx4090", "a6000", "a100-80gb")]
    lines = table(by_hand(*cards)).splitlines()
    assert lines[3:6] == [
        "  rtx4090    fits  peak 5.3 GiB  nvidia-smi 5.6 to 6.0 GiB  of 23.6 GiB",
        "  a6000      fits  peak 5.3 GiB  nvidia-smi 5.6 to 6.0 GiB  of 47.4 GiB",
        "  a100-80gb  fits  peak 5.3 GiB  nvidia-smi 5.6 to 7.1 GiB  of 79.1 GiB",
    ]
    header = next(line for line in lines if line.startswith("  plan"))
    assert header.split() == ["plan", "peak", "step", "host", "rtx4090", "a6000", "a100-80gb"]
    none = next(line for line in lines if line.startswith("  none"))
    assert none.split() == ["none", "28.5", "GiB", "2", "s", "no", "yes", "yes"]
    assert [line.split("  ")[1] for line in lines if line.startswith("  auto")] == [
        f"auto, {card.name}" for card in cards
    ]
    # Only the first device's times are known.
    assert [" s " in line for line in lines if line.startswith("  auto")] == [True, False, False]
    assert "Steps are timed for rtx4090." in lines
    assert lines[-1] == "The recipe (no plan) fits on rtx4090, a6000, a100-80gb."


def test_more_devices_than_fit_beside_each_other_have_further_columns_below() -> None:
    cards = [find_device(name) for name in ("rtx4090", "a6000", "a100-80gb", "rtx4070tisuper", "t4")]
    text = table(by_hand(*cards))
    headers = [line.split()[4:] for line in text.splitlines() if line.startswith("  plan")]
    assert headers == [["rtx4090", "a6000", "a100-80gb"], ["rtx4070tisuper", "t4"]]
    assert text.count("\n  none ") == 2
    assert text.count("\n  auto, t4 ") == 1
    assert len(text.splitlines()[-1]) <= 80


def test_lines_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 60
    for columns, expected in (("40", 60), ("100", 100), ("300", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert expected - 5 < max(map(len, tables.wrapped(text).splitlines())) <= expected


def test_perhaps_says_what_it_means() -> None:
    step = replace(steps_by_hand.step(), peak_bytes=20 * GIB)
    found = by_hand(CARD)
    found = replace(found, rows=(*found.rows, row_of("full", step, CARD, reserved=24 * GIB)))
    lines = table(found).splitlines()
    assert "  full                         20.0 GiB      2 s             perhaps, by retries" in lines
    assert "perhaps: torch reserves more than there is room for; it fits only by giving" in lines


def test_name_that_is_too_long_has_a_line_of_its_own() -> None:
    cards = [find_device(name) for name in ("rtx4090", "a6000", "a100-80gb")]
    found = by_hand(*cards)
    found = replace(found, rows=(*found.rows, row_of("full, offload, tiles, head", steps_by_hand.step(1.0), *cards)))
    lines = table(found).splitlines()
    at = lines.index("  full, offload, tiles, head")
    assert lines[at + 1].split() == ["8.5", "GiB", "2", "s", "yes", "yes", "yes"]
    # Numbers stay below each other.
    assert lines[at + 1].index("8.5 GiB") == lines[at - 1].index("8.5 GiB")


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ((20, 20), "The recipe (no plan) fits on rtx4090, a6000."),
        ((23, 20), "The recipe (no plan) fits on a6000; perhaps on rtx4090."),
        ((24, 20), "The recipe (no plan) fits on a6000; not on rtx4090."),
        ((50, 50), "The recipe (no plan) does not fit on rtx4090, a6000."),
        ((23, 50), "The recipe (no plan) perhaps fits on rtx4090; not on a6000."),
    ],
)
def test_last_line_names_the_devices_that_it_fits_on(peaks: tuple[int, int], expected: str) -> None:
    cards = (CARD, find_device("a6000"))
    found = by_hand(*cards)
    rows = [
        estimates.verdict_as_json(found.predictor, card, row_of(RECIPE, step_of(peak), card))
        for card, peak in zip(cards, peaks, strict=True)
    ]
    assert tables.verdict(estimates.estimate_as_json(found) | {"verdicts": rows}) == expected


def step_of(gib: int) -> StepMemory:
    """A step with such a peak."""
    return replace(steps_by_hand.step(), peak_bytes=gib * steps_by_hand.GIB)


def test_what_the_planner_finds_no_plan_for_does_not_fit() -> None:
    advice = "checkpointing.memory_budget=22.1GiB checkpointing.offload=cpu checkpointing.tiles=auto"
    refusal = (
        "No plan fits memory_budget=21.7 GiB. Lowest predicted peak is 22.0 GiB, in the backward. With each of these "
        f"lines one fits, as simulated:\n  {advice[:31]}  # 22.0 GiB\n  {advice}  # 20.0 GiB"
    )
    found = replace(by_hand(CARD), rows=(Row(AUTO, None, refusal, CARD),), decides=AUTO)
    lines = table(found).splitlines()
    assert lines[2:6] == [
        "The planner's choice:",
        "  rtx4090  does not  no plan    of 23.6 GiB",
        "  No plan fits memory_budget=21.7 GiB. Lowest predicted peak is 22.0 GiB, in the",
        "  backward.",
    ]
    # A line to copy is broken at its comment.
    assert lines[-5:] == [
        "  checkpointing.memory_budget=22.  # 22.0 GiB",
        "  checkpointing.memory_budget=22.1GiB checkpointing.offload=cpu",
        "    checkpointing.tiles=auto",
        "    # 20.0 GiB",
        "The planner's choice does not fit on rtx4090.",
    ]


def test_rendering_needs_no_torch() -> None:
    code = "import sys; import hf_ckpt.estimate.tables; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_attention_that_is_assumed_has_a_line_where_there_is_a_choice() -> None:
    hopper = find_device("h100")
    words = " ".join(table(by_hand(CARD, hopper)).split())
    assert words.count(" attention h100: ") == words.count(f" attention h100: {hopper.describe_attention()} ") == 1
    assert " attention rtx4090" not in words
    devices = estimates.estimate_as_json(by_hand(CARD, hopper))["devices"]
    assert [device["attention"] for device in devices] == [None, hopper.describe_attention()]


def test_host_memory_has_a_column_and_a_sentence_where_some_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_hand(CARD)
    assert "host memory" not in table(found)
    assert estimates.estimate_as_json(found)["host"] == []
    rows = tuple(
        replace(row, memory=replace(row.memory, host_bytes=3 * steps_by_hand.GIB))
        if row.name == RECIPE and row.memory
        else row
        for row in found.rows
    )
    found = replace(found, rows=rows)
    lines = table(found).splitlines()
    assert " ".join(lines[11].split()).endswith("3 s 3.0 GiB yes")
    assert lines[-2] == "It needs 3.0 GiB of host memory too, next to rtx4090."
    # On this machine it is known what is free.
    monkeypatch.setattr(estimates, "this_device", lambda: CARD)
    monkeypatch.setattr(
        estimates.host_memory, "available_bytes", lambda *, trusts: None if trusts else 2 * steps_by_hand.GIB
    )
    assert table(found).splitlines()[-3:-1] == [
        "It needs 3.0 GiB of host memory; 2.0 GiB are free here: it does not fit: offload",
        "fewer layers (fraction), or to disk.",
    ]
    assert estimates.estimate_as_json(found)["host"] == [
        {"device": "rtx4090", "needed_bytes": 3 * steps_by_hand.GIB, "free_bytes": 2 * steps_by_hand.GIB},
    ]
    allowed = Allowed(offload=Offload(trust_host_memory=True))
    trusted = replace(found, predictor=Predictor(replace(found.subject, allowed=allowed), CARD))
    assert table(trusted).splitlines()[-2] == "It needs 3.0 GiB of host memory too, next to rtx4090."


def test_json_has_every_figure() -> None:
    read = json.loads(
        tables.json_text(estimates.estimate_as_json(by_hand(CARD)), ["estimate", "recipe.yaml", "data.path=a b"])
    )
    assert read["command"] == "hf-ckpt estimate recipe.yaml 'data.path=a b'"
    assert read["versions"].keys() >= {"python", "hf_ckpt", "torch", "transformers", "accelerate"}
    assert (read["recipe"], read["fits"], read["decides"]) == ("recipe.yaml", True, "recipe")
    assert read["devices"][0]["outside_bytes"] == list(capacity_of(CARD).outside)
    assert read["verdicts"][0]["needed_bytes"] == capacity_of(CARD).needed_bytes(read["rows"][0]["peak_bytes"])
    own, none, ffn, _ = read["rows"]
    assert (own["fits"], none["fits"]) == ({"rtx4090": "yes"}, {"rtx4090": "no"})
    assert none["by_category"] == {
        "parameters": 4 * steps_by_hand.GIB,
        "saved activations": 24 * steps_by_hand.GIB,
        "logits and loss": GIB // 2,
    }
    assert none["peak_at"] == "forward, aten._log_softmax"
    assert (own["seconds"]["total"], own["num_flops"]) == (3.0, {"forward": 10, "backward": 20})
    assert ffn == {"name": "ffn", "refusal": 'Rule {mode: ffn} asks for "ffn".'}


def test_seconds_have_three_digits() -> None:
    assert [tables.format_seconds(value) for value in (1234.5, 12.345, 1.0, 0.01234)] == [
        *("1,234 s", "12.3 s", "1 s", "12.3 ms"),
    ]
