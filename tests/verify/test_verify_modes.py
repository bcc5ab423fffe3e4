"""`hf-ckpt verify` on recipes with selective modes, offload, tiles and the chunked head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_ckpt.regions.execution_state import is_in_backward
from hf_ckpt.verify.compare import FLOAT32_TOLERANCE, HALF_TOLERANCE, Trials, compare_gradients
from hf_ckpt.verify.record import Record, Tolerance
from tests import small_recipes
from tests.verifying import failed, of, report

pytestmark = pytest.mark.slow

EXACT = "gradients equal bit by bit."


def test_exact_modes_are_held_to_the_bit_and_offload_however_small(tmp_path: Path) -> None:
    offload = {"to": "disk", "path": str(tmp_path)}
    rules = [
        {"layers": "0:1", "mode": "selective_attention"},
        {"layers": "1:2", "mode": "selective", "save": ["aten.mm"], "offload": "cpu"},
        {"layers": "2:4", "mode": "full", "offload": offload},
    ]
    found = report(tmp_path, checkpointing={"policy": rules})
    assert failed(found) == {}
    assert of(found, "gradients").detail.endswith(EXACT)
    assert of(found, "forward counts").figures["num_layers_recomputed"] == 4
    # Its callback holds offload against the plan in the first step: tensors of a reduced model were offloaded.
    assert of(found, "plan in force").verdict == "pass"
    assert [file.name for file in tmp_path.iterdir() if "offload" in file.name] == []


def test_tiles_and_head_are_held_to_what_is_stated(tmp_path: Path) -> None:
    found = report(tmp_path, checkpointing={"policy": "ffn", "tiles": "auto", "head": "chunked"})
    assert failed(found) == {}
    assert "1e-06 is allowed in the first step" in of(found, "gradients").detail
    assert "with tiles and the chunked head, the same terms" in of(found, "gradients").detail
    assert 0 < of(found, "gradients").figures["max_relative_error"] < 1e-4
    assert of(found, "weights").detail.startswith("After 2 steps, relative error up to ")


@pytest.mark.sweep
def test_dropout_inside_tiles_is_held_to_the_bit_against_the_same_tiles(tmp_path: Path) -> None:
    policy = {"policy": "full", "tiles": 2}
    found = report(tmp_path, lora={**small_recipes.LORA, "lora_dropout": 0.1}, checkpointing=policy)
    assert failed(found) == {}
    assert of(found, "gradients").detail.endswith(EXACT)
    assert "random numbers" not in failed(found)


def falsify(model: nn.Module) -> None:
    """Change what the first attention computes, by a hundredth, when it is recomputed."""
    model.model.layers[0].self_attn.o_proj.register_forward_hook(shifted)


def shifted(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 1.01 if is_in_backward() else output


def test_wrong_gradient_is_found_in_spite_of_the_tolerance(tmp_path: Path) -> None:
    found = report(tmp_path, setup=falsify, checkpointing={"policy": "full", "head": "chunked"})
    assert "gradients" in failed(found)
    assert "got another gradient, from step 1 on" in failed(found)["gradients"]


@pytest.mark.parametrize(
    ("error", "step", "tolerance", "is_within"),
    [
        (5e-7, 0, FLOAT32_TOLERANCE, True),
        (2e-6, 0, FLOAT32_TOLERANCE, False),
        (2e-6, 1, FLOAT32_TOLERANCE, True),
        (2e-3, 1, FLOAT32_TOLERANCE, False),
        (1e-2, 0, HALF_TOLERANCE, True),
        (2e-2, 0, HALF_TOLERANCE, False),
        (1e-7, 0, None, False),
    ],
)
def test_tolerance_is_that_of_the_first_step_and_then_of_half_the_digits(
    error: float, step: int, tolerance: float | None, is_within: bool, tmp_path: Path
) -> None:
    reference, planned = Record(tmp_path / "reference"), Record(tmp_path / "planned")
    planned.tolerance = None if tolerance is None else Tolerance(tolerance, "tiles")
    gradient = torch.linspace(0.5, 1, 8, dtype=torch.float64)
    for record in (reference, planned):
        record.num_steps = 2
        for number in range(2):
            is_off = record is planned and number == step
            record.keep_gradients(number, {"weight": gradient + error * is_off, "frozen": None})
    assert Trials(reference, reference, planned).is_within_tolerance is is_within


def test_small_gradients_are_measured_by_a_tenth_of_the_largest(tmp_path: Path) -> None:
    records = [Record(tmp_path / name, num_steps=1) for name in ("first", "second")]
    for record, small in zip(records, (1e-6, 2e-6), strict=True):
        record.keep_gradients(0, {"large": torch.ones(2), "small": torch.full((2,), small)})
    diff = compare_gradients(*records)
    assert diff.max_relative_error == pytest.approx(1.0)
    assert diff.max_scaled_error == pytest.approx(1e-5)
