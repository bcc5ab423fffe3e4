"""`checkpointing: {policy: auto}` in a recipe: read, refused, carried out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import Plan, RecipeError, load_recipe
from hf_ckpt.cli.finetune import main
from hf_ckpt.finetune import train
from hf_ckpt.finetune.run_report import RunSummary
from tests import small_recipes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
AUTO = {"policy": "auto", "memory_budget": "1GiB"}


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 4)


def recipe(folder: Path, checkpointing: dict[str, Any], **training: Any) -> Path:
    return small_recipes.write(folder, model={"config": CONFIG}, checkpointing=checkpointing, training=training)


@pytest.mark.parametrize(
    ("checkpointing", "message"),
    [
        (
            {"policy": "auto", "memory_budget": "22"},
            'checkpointing.memory_budget = "22": memory_budget is "22", without',
        ),
        ({"policy": "auto", "memory_budget": "22GX"}, 'with the unknown unit "GX"'),
        ({"policy": "auto", "memory_budget": -0.5}, "memory_budget is -0.5. It must be above 0"),
        ({"policy": "full", "memory_budget": "22GiB"}, "checkpointing.memory_budget"),
        ({"policy": "full", "micro_batch": "auto"}, "checkpointing.micro_batch"),
        ({"policy": "full", "exact": True}, "checkpointing.exact"),
        ({**AUTO, "exact": "always"}, 'checkpointing.exact = "always": expected'),
        ({**AUTO, "micro_batch": 4}, "checkpointing.micro_batch = 4: expected"),
        ({**AUTO, "nested": True}, "checkpointing.nested"),
        ({"policy": "not_there.json"}, "no plan can be read there"),
    ],
)
def test_wrong_words_are_refused_when_the_recipe_is_read(
    tmp_path: Path, checkpointing: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe(tmp_path, checkpointing))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("checkpointing", "training", "message"),
    [
        ({"policy": "auto"}, {}, 'Policy "auto" has no memory_budget, and this machine\'s CPU shares its memory'),
        ({"policy": "auto", "memory_budget": "900TiB"}, {}, 'memory_budget is "900TiB", but this machine\'s CPU has'),
        ({**AUTO, "micro_batch": "auto"}, {"auto_find_batch_size": True}, "both choose the batch."),
    ],
)
def test_what_this_machine_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    checkpointing: dict[str, Any],
    training: dict[str, Any],
    message: str,
) -> None:
    assert main([str(recipe(tmp_path, checkpointing, **training))]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_recipe_is_carried_out_and_its_plan_is_a_policy_for_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main([str(recipe(tmp_path, AUTO, max_steps=1))]) == 0
    printed = capsys.readouterr().out
    assert "Batch: 2 sequences x 1 micro-batch x 1 process = 2 sequences in each optimizer step" in printed
    predicted, measured = re.search(
        r"Predicted peak +([\d.]+) KiB, measured ([\d.]+) KiB in a further step", printed
    ).groups()
    assert float(measured) == pytest.approx(float(predicted), rel=0.01)
    # The steps that are measured are not spoken of.
    assert caplog.text.count("Activation checkpointing is in force.") == 1
    written = tmp_path / "run" / "hf_ckpt_plan.json"
    again = load_recipe(recipe(tmp_path, {"policy": "run/hf_ckpt_plan.json"}))
    assert again.checkpointing == {"policy": str(written)}
    assert Plan.from_json(written.read_text()).summary() == "model.layers: 1 layers\n  0            none"


def test_summary_puts_the_predicted_peak_beside_the_measured_one(tmp_path: Path) -> None:
    figures = {"ckpt/recomputed_share": 0.0, "ckpt/predicted_peak_gib": 21.0, "ckpt/peak_allocated_gib": 20.5}
    table = RunSummary("r.yaml", None, figures, (), tmp_path, is_adapter=False).table()
    assert "Predicted peak  21.0 GiB\nPeak memory     20.50 GiB on the device\n" in table
