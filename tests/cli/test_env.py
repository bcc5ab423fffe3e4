"""`hf-ckpt env`: versions, what is known of them together, and what is off."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_ckpt import upstream
from hf_ckpt.cli import env
from hf_ckpt.cli.main import main

ROOT = Path(__file__).parents[2]

SEEN = {
    "torch": "2.13.0+cpu",
    "transformers": "5.24.0",
    "peft": "0.21.2",
    "deepspeed": "0.19.2",
    "trl": "1.16.0",
}


def test_versions_are_those_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "hf-ckpt env --json"
    for package in ("torch", "transformers", "numpy", "trl"):
        assert document["versions"][package] == importlib.metadata.version(package)
    assert main(["env"]) == 0
    assert f"  transformers  {document['versions']['transformers']}\n" in capsys.readouterr().out


def test_what_is_known_of_versions_is_told_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "versions", lambda *more: {"hf_ckpt": "0.1.0", **SEEN})
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["torch>=2.11", 'deepspeed>=0.19.3; extra == "x"'])
    assert main(["env"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert 'deepspeed 0.19.2: hf_ckpt is tested from >=0.19.3 on. Run: pip install "deepspeed>=0.19.3"' in said
    assert "transformers 5.24.0 with peft 0.21.2: transformers asks for peft 0.22" in said
    assert "torch 2.13.0" not in said.partition("Known of")[2]
    monkeypatch.setitem(SEEN, "peft", "0.22.0")
    monkeypatch.setitem(SEEN, "transformers", "5.23.0")
    monkeypatch.setitem(SEEN, "deepspeed", "0.19.8")
    assert main(["env"]) == 0
    assert "Known of these versions:\n  nothing\n" in capsys.readouterr().out


def test_what_is_off_is_told_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = upstream.Missing("selective", "torch.utils.x", "it is gone in torch 9")
    monkeypatch.setattr(upstream, "missing", lambda: [gone])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gradio" else object())
    assert main(["env"]) == 0
    assert capsys.readouterr().out.endswith(
        f'Off here:\n  ui (gradio): not installed. Run: pip install "{ROOT}[ui]"\n'
        "  selective (torch.utils.x): it is gone in torch 9\n"
    )


def test_gpus_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert main(["env"]) == 0
    assert "  device        NVIDIA H100, 80.0 GiB\n" in capsys.readouterr().out


def test_torch_that_cannot_be_imported_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["env"]) == 0
    assert "torch is      not to be imported: import of torch halted" in capsys.readouterr().out
