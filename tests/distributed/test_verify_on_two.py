"""`hf-ckpt verify` as each of two processes runs it: a sound recipe, a fault, a refusal, and what they answer."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.cli import verify
from hf_ckpt.cli.main import main
from tests import small_recipes
from tests.distributed.launching import made_by_first


def end(code: int) -> None:
    """Stand for the end of a process."""
    raise SystemExit(code)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "end_process", end)
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Here so as to be put back: the setups of tests/verify_setups.py are for processes of their own.
    monkeypatch.setattr(HFCkptCallback, "on_train_begin", HFCkptCallback.on_train_begin)


def answer(folder: Path, *words: str, **sections: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of this process."""
    folder = made_by_first(lambda: folder)
    given = {"lora": small_recipes.LORA, "checkpointing": {"policy": "full"}, **sections}
    recipe = made_by_first(lambda: small_recipes.write(folder, **given))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(recipe), "--steps", "2", *words, "--answers", str(folder)])
    assert isinstance(ended.value.code, int)
    return ended.value.code, json.loads((folder / f"{dist.get_rank():05d}.json").read_text())


def details(answered: dict[str, Any], verdict: str) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in answered["report"]["checks"] if check["verdict"] == verdict}


IN_BF16 = ["model.dtype=bfloat16", "training.bf16=true"]
"""FSDP trains such weights in float32, and saves them so."""


@pytest.mark.parametrize(("engine", "overrides"), [("fsdp1", []), ("fsdp2", IN_BF16)])
def test_full_fine_tune_holds(
    engine: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FSDP1 is deprecated, which transformers says through its logger.
    monkeypatch.setattr(logging.getLogger("transformers.training_args"), "disabled", True)
    # Small enough for processes to hold no part of some parameters.
    code, answered = answer(tmp_path, "--engine", engine, *overrides, lora=None)
    assert (code, details(answered, "fail")) == (0, {})
    assert f"of 1 forward and backward each, {engine}." in details(answered, "pass")["run"]
    skipped = {"hooks"} if engine == "fsdp2" else {"hooks", "generation", "saved files"}
    assert details(answered, "skip").keys() == skipped


def test_wrapper_under_fsdp2_empties_the_adapter_file(tmp_path: Path) -> None:
    # That checks fail is for the process that asked to tell.
    code, answered = answer(tmp_path, "--engine", "fsdp2", "--setup", "tests.verify_setups:wrap_layers")
    failed = details(answered, "fail")
    assert code == 0
    assert "of 1 forward and backward each, fsdp2." in details(answered, "pass")["run"]
    assert details(answered, "pass")["gradients"] == "56 gradients equal bit by bit."
    assert "_checkpoint_wrapped_module" in failed["names"]
    assert "adapter_model.safetensors has 0 tensors" in failed["adapter file"]


def test_policy_that_is_refused_ends_with_code_2(tmp_path: Path) -> None:
    code, answered = answer(tmp_path, "checkpointing.policy=[{layers: '0:9', mode: full}]")
    assert code == 2
    assert "has 4 decoder layers (0 to 3)" in answered["refusal"]
