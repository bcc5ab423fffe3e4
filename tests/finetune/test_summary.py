"""The table that a run prints at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_ckpt.finetune.run_report import RunSummary
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode

pytestmark = pytest.mark.core

MIB = 2**20
PLAN = Plan("LlamaForCausalLM", (StackPlan("model.layers", (LayerPlan(Mode.FULL),) * 3 + (LayerPlan(),)),))
FIGURES = {
    "ckpt/num_layers_full": 3,
    "ckpt/num_layers_none": 1,
    "ckpt/recomputed_share": 0.75,
    "ckpt/peak_allocated_gib": 7.1249,
    "ckpt/tokens_per_sec": 12345.6,
}
HISTORY: list[dict[str, float]] = [
    {"eval_loss": 8.0, "step": 0},
    {"loss": 7.5, "step": 1},
    {"loss": 5.0, "step": 2},
    {"eval_loss": 6.0, "step": 2},
    {"train_runtime": 1.0, "train_loss": 6.25, "step": 2},
]


def weights(folder: Path, *names: str, mib: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        save_file({"weight": torch.zeros(mib * MIB, dtype=torch.uint8)}, folder / name)
    return folder


def summary(folder: Path, **changes: Any) -> RunSummary:
    values: dict[str, Any] = {
        "title": "recipes/some.yaml",
        "plan": PLAN,
        "figures": FIGURES,
        "log_history": HISTORY,
        "saved": folder,
        "is_adapter": True,
    }
    return RunSummary(**{**values, **changes})


def rows(table: str) -> list[str]:
    """The lines between the two rules."""
    first, *lines, last = table.splitlines()
    assert first == last == "-" * max(len(line) for line in lines)
    return lines


def test_table_shows_what_the_run_did(tmp_path: Path) -> None:
    adapter = weights(tmp_path / "run", "adapter_model.safetensors", mib=3)
    assert rows(summary(adapter).table()) == [
        "Recipe           recipes/some.yaml",
        "Layers           model.layers: 4 layers",
        "                   0 to 2       full",
        "                   3            none",
        "Recomputed       75% of the layers' weights run forward twice",
        "Peak memory      7.12 GiB on the device",
        "Speed            12,346 tokens/s per process",
        "Training loss    7.500 -> 5.000 (fell by 33.3%)",
        "Evaluation loss  8.000 -> 6.000 (fell by 25.0%)",
        f"Adapter          {adapter} (adapter_model.safetensors, 3.0 MiB)",
    ]


def test_memory_of_the_process_is_called_so(tmp_path: Path) -> None:
    figures = {"ckpt/recomputed_share": 0.0, "ckpt/peak_resident_gib": 0.5}
    table = summary(weights(tmp_path / "run", "model.safetensors"), figures=figures).table()
    assert "Peak memory      0.50 GiB of the process" in table
    assert "Speed" not in table


def test_run_without_a_policy_says_so(tmp_path: Path) -> None:
    folder = weights(tmp_path / "run", "model.safetensors")
    lines = rows(summary(folder, plan=None, figures={}, is_adapter=False).table())
    assert lines[1] == "Layers           no activation checkpointing"
    assert not any(line.startswith("Recomputed") for line in lines)
    assert lines[-1] == f"Model            {folder} (model.safetensors, 1.0 MiB)"


def test_loss_that_rose_is_said_to_have_risen(tmp_path: Path) -> None:
    folder = weights(tmp_path / "run", "model.safetensors")
    history = [{"loss": 2.0}, {"loss": 2.5}]
    lines = rows(summary(folder, log_history=history).table())
    assert "Training loss  2.000 -> 2.500 (rose by 25.0%)" in lines
    assert not any(line.startswith("Evaluation loss") for line in lines)


def test_single_loss_is_no_trend(tmp_path: Path) -> None:
    folder = weights(tmp_path / "run", "model.safetensors")
    assert "Training loss  2.000" in rows(summary(folder, log_history=[{"loss": 2.0}]).table())


def test_shards_and_merged_model_are_counted(tmp_path: Path) -> None:
    folder = weights(tmp_path / "run", "model-1.safetensors", "model-2.safetensors")
    merged = weights(tmp_path / "run" / "merged", "model.safetensors", mib=2)
    lines = rows(summary(folder, is_adapter=False, merged=merged).table())
    assert lines[-2] == f"Model            {folder} (2 files, 2.0 MiB)"
    assert lines[-1] == f"Merged model     {merged} (model.safetensors, 2.0 MiB)"


def test_table_tells_the_engine_and_that_the_files_are_whole(tmp_path: Path) -> None:
    folder = weights(tmp_path / "run", "adapter_model.safetensors")
    lines = rows(summary(folder, engine="FSDP2 on 8 processes", verdict="all 56 tensors are there").table())
    assert lines[1] == "Engine           FSDP2 on 8 processes"
    assert lines[-2:] == [
        f"Adapter          {folder} (adapter_model.safetensors, 1.0 MiB)",
        "                 all 56 tensors are there",
    ]


def test_small_adapter_has_a_size(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file({"weight": torch.zeros(3000, dtype=torch.uint8)}, folder / "adapter_model.safetensors")
    assert rows(summary(folder).table())[-1] == f"Adapter          {folder} (adapter_model.safetensors, 3.0 KiB)"


def test_loss_that_is_the_same_did_not_rise(tmp_path: Path) -> None:
    history = [{"eval_loss": 7.749, "step": 0}, {"eval_loss": 7.749, "step": 1}]
    assert "Evaluation loss  7.749 -> 7.749 (unchanged)" in rows(summary(tmp_path, log_history=history).table())


def test_what_the_plan_saved_and_costs_stands_above_the_peaks(tmp_path: Path) -> None:
    said = "plain training would need 97.0 MiB, your budget is 76.0 MiB, this plan needs 75.7 MiB: same bits"
    figures = {**FIGURES, "ckpt/predicted_peak_gib": 0.0739}
    lines = rows(summary(weights(tmp_path, "a.safetensors"), prediction=said, figures=figures).table())
    first = next(number for number, line in enumerate(lines) if line.startswith("Memory"))
    assert [line.split(maxsplit=1)[0] for line in lines[first : first + 4]] == ["Memory", "needs", "Predicted", "Peak"]
    assert " ".join(" ".join(lines[first : first + 2]).split()) == f"Memory {said}"


def test_what_a_layer_does_is_wrapped(tmp_path: Path) -> None:
    names = tuple(f"self_attn.{name}_proj.base_layer" for name in "qkvo")
    plan = Plan("LlamaForCausalLM", (StackPlan("model.layers", (LayerPlan(Mode.SELECTIVE, save=names),)),))
    lines = rows(summary(weights(tmp_path, "a.safetensors"), plan=plan).table())
    assert max(len(line) for line in lines if "proj" in line) <= 90
    assert all(name in "\n".join(lines) for name in names)
