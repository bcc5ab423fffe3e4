"""docs/coming_from.md: settings that it names exist, its trl snippet trains; contenders of frameworks refuse here."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks.side_by_side.contender import Contender, NotHereError
from benchmarks.side_by_side.theirs import axolotl_offload, unsloth_offload
from hf_ckpt import HFCkptCallback
from tests.byte_tokenizer import byte_tokenizer
from tests.docs.test_docs import ROOT, Block, blocks_of
from tests.training import arguments, counted, llama

PAGE = ROOT / "docs" / "coming_from.md"
HOW_TO = ROOT / "docs" / "how_to" / "preference_training.md"
ENVIRONMENTS = ROOT / "benchmarks" / "side_by_side" / "theirs" / "environments"
AXOLOTL, UNSLOTH = axolotl_offload.CONTENDERS[0], unsloth_offload.CONTENDERS[0]


def snippet(first_line: str, page: Path = PAGE) -> Block:
    """The Python block of a page that begins so."""
    found = [block for block in blocks_of(page, {"python", "diff"}) if block.text.lstrip().startswith(first_line)]
    assert len(found) == 1
    return found[0]


# --- What the page says of others ---


def test_page_has_a_section_for_each() -> None:
    sections = [line[3:] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    assert sections == ["Plain Trainer", "trl", "axolotl", "LLaMA-Factory", "unsloth"]


def test_trainer_has_the_settings_that_the_page_names() -> None:
    from transformers import PreTrainedModel

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {"activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing"} <= fields
    options = inspect.signature(PreTrainedModel.activation_checkpointing_enable).parameters
    assert {"every_n_layers", "offload"} <= options.keys()


def test_trl_has_checkpointing_on_by_default_and_transformers_has_not() -> None:
    trl = pytest.importorskip("trl")
    configs = (trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig, trl.KTOConfig, trl.RewardConfig, trl.RLOOConfig)

    def default(config: type, name: str) -> object:
        return next(field.default for field in dataclasses.fields(config) if field.name == name)

    assert {default(config, "gradient_checkpointing") for config in configs} == {True}
    assert not default(TrainingArguments, "gradient_checkpointing")
    offloading = [config.__name__ for config in configs if "activation_offloading" in config.__dataclass_fields__]
    assert offloading == ["SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig"]


# trl 1.16 uses the names that transformers 5.23 gives up.
@pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("page", "forwards", "shown"),
    [
        (PAGE, [4, 4, 4, 4], ["  0 to 3       selective_attention"]),
        (
            HOW_TO,
            [4, 2, 4, 2],
            ["  0            full", "  1            none", "  2            full", "  3            none"],
        ),
    ],
    ids=["coming_from", "preference_training"],
)
def test_trl_snippet_trains_under_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: Path, forwards: list[int], shown: list[str]
) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    monkeypatch.chdir(tmp_path)
    # What the snippet writes wins: these are for two short steps on a CPU.
    for name in ("SFTConfig", "DPOConfig"):
        config = partial(getattr(trl, name), **arguments(tmp_path, max_length=16, bf16=False))
        monkeypatch.setattr(trl, name, config)
    tokenizer = byte_tokenizer(pad_token="<pad>")
    llama(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id).save_pretrained(tmp_path / "model")
    # Of a folder, from which trl loads the reference model.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    texts = {"text": ["the cat sat", "a dog ran"] * 2}
    pairs = {"prompt": ["the ", "a "] * 2, "chosen": ["cat sat", "dog ran"] * 2, "rejected": ["sat", "ran"] * 2}
    data = Dataset.from_dict(texts if page == PAGE else pairs)
    names: dict[str, Any] = {"model": model, "data": data, "tokenizer": tokenizer}
    with counted(model, "q_proj") as counts:
        exec(compile(snippet("from trl", page).code(), str(page), "exec"), names)
    assert [counts[idx] for idx in range(4)] == forwards
    plan = next(one.plan for one in names["trainer"].callback_handler.callbacks if isinstance(one, HFCkptCallback))
    assert plan.summary().splitlines()[1:] == shown


# --- The contenders of other frameworks ---


@pytest.mark.parametrize(
    ("contender", "package", "message"),
    [
        (AXOLOTL, "axolotl", "axolotl cannot be imported: No module named 'axolotl'"),
        (UNSLOTH, "unsloth_zoo", "unsloth cannot be imported: No module named 'unsloth_zoo'"),
    ],
    ids=["axolotl", "unsloth"],
)
def test_contender_refuses_without_its_framework(contender: Contender, package: str, message: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    found = dict(os.environ)
    with pytest.raises(NotHereError) as refused, contender.enter(llama()):
        pass
    assert str(refused.value) == message
    assert dict(os.environ) == found


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> ModuleType:
    """Put a module in the place of one that is not installed."""
    module = ModuleType(name)
    vars(module).update(contents)
    *parents, _ = name.split(".")
    for depth in range(len(parents)):
        path = ".".join(parents[: depth + 1])
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    monkeypatch.setitem(sys.modules, name, module)
    return module


def seams(model: nn.Module) -> list[bool]:
    return [
        module.gradient_checkpointing for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]


def test_axolotl_refuses_on_a_cpu_where_it_would_offload_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "axolotl.monkeypatch.checkpoint_activation_offload")
    message = "axolotl offloads tensors of cuda, xpu, npu only; on cpu this is transformers' full checkpointing"
    with pytest.raises(NotHereError, match=re.escape(message)), AXOLOTL.enter(llama()):
        pass


def test_axolotl_checkpoints_all_layers_inside_its_context_and_leaves_no_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    def patch() -> nullcontext[None]:
        # As axolotl's own does, and takes back nowhere.
        GradientCheckpointingLayer.__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return nullcontext()

    module = pretend(
        monkeypatch,
        "axolotl.monkeypatch.checkpoint_activation_offload",
        get_checkpoint_hidden_states_offloading_ctx_manager=patch,
        _ORIG_GRADIENT_CHECKPOINTING_LAYER_CALL=object(),
    )
    monkeypatch.setattr(axolotl_offload, "_DEVICES", ("cpu",))
    found = vars(GradientCheckpointingLayer).get("__call__")
    model = llama()
    with AXOLOTL.enter(model) as called:
        assert called is model
        assert seams(model) == [True] * 4
    assert seams(model) == [False] * 4
    assert vars(GradientCheckpointingLayer).get("__call__") is found
    assert module._ORIG_GRADIENT_CHECKPOINTING_LAYER_CALL is None


def test_unsloth_refuses_in_the_words_of_its_own_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def patch(dtype: torch.dtype) -> None:
        raise RuntimeError(f"no pinned memory for {dtype}")

    pretend(monkeypatch, "unsloth_zoo.gradient_checkpointing", patch_unsloth_smart_gradient_checkpointing=patch)
    message = "unsloth's offload fails here: no pinned memory for torch.float32"
    with pytest.raises(NotHereError, match=re.escape(message)), UNSLOTH.enter(llama()):
        pass


def test_unsloth_takes_its_patch_back_where_the_model_is_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    pretend(
        monkeypatch,
        "unsloth_zoo.gradient_checkpointing",
        patch_unsloth_smart_gradient_checkpointing=lambda dtype: done.append("patch"),
        unpatch_unsloth_smart_gradient_checkpointing=lambda: done.append("unpatch"),
    )
    with pytest.raises(NotHereError, match="the model is on a CPU"), UNSLOTH.enter(llama()):
        pass
    assert done == ["patch", "unpatch"]


@pytest.mark.parametrize("name", ["axolotl", "unsloth"])
def test_environment_pins_what_it_installs_and_says_how_it_is_made(name: str) -> None:
    text = (ENVIRONMENTS / f"{name}.txt").read_text(encoding="utf-8")
    requirements = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in requirements if not re.fullmatch(r"[\w-]+==[\d.]+", line)] == []
    assert {"torch==2.13.0", "bitsandbytes==0.50.2"} <= set(requirements)
    assert f"install -r benchmarks/side_by_side/theirs/environments/{name}.txt" in text
    assert f"--contender transformers_full --contender {name}_offload" in text
