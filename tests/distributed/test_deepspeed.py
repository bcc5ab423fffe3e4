"""ZeRO-2 and ZeRO-3 through the Trainer: what a plan must not change, and what cannot run beside one."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from hf_ckpt import HFCkptCallback, HFCkptError, UnsupportedError
from tests import training
from tests.distributed import runs
from tests.distributed import test_modes as modes
from tests.distributed.deepspeed_on_a_cpu import config, deepspeed_on_a_cpu, ignores_its_warnings, whole
from tests.distributed.launching import made_by_first
from tests.distributed.runs import KINDS, STEPS, Outcome, callback, fresh_accelerate, make_trainer
from tests.training import During, changed

deepspeed = pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install '.[deepspeed]'")

pytestmark = ignores_its_warnings
STAGES = [2, 3]
BOTH = pytest.mark.parametrize("kind", KINDS)
both_stages = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture(autouse=True)
def _deepspeed() -> Iterator[None]:
    with fresh_accelerate(), deepspeed_on_a_cpu():
        yield


def train(stage: int, model: nn.Module, *callbacks: Any, **changes: Any) -> Outcome:
    return runs.train(model, "none", *callbacks, read=whole, deepspeed=config(stage), **changes)


def trainer(stage: int, model: nn.Module, folder: Path, *callbacks: Any, **changes: Any) -> Trainer:
    return make_trainer(model, folder, *callbacks, deepspeed=config(stage), **changes)


# --- Losses and weights. ---


@functools.cache
def without_plan(stage: int, model_type: str, kind: str, accumulation: int) -> Outcome:
    return train(stage, KINDS[kind](model_type), gradient_accumulation_steps=accumulation)


def check(stage: int, model_type: str, kind: str, accumulation: int, mode: str) -> None:
    expected = without_plan(stage, model_type, kind, accumulation)
    got = train(stage, KINDS[kind](model_type), callback(mode), gradient_accumulation_steps=accumulation)
    assert len(got.losses) == STEPS
    assert got.losses == expected.losses
    assert changed(expected.weights, got.weights) == []
    assert got.names == expected.names


@pytest.mark.parametrize(("stage", "kind"), [(2, "full"), (3, "lora")])
def test_engine_repeats_itself(stage: int, kind: str) -> None:
    expected = without_plan(stage, "llama", kind, 1)
    again = train(stage, KINDS[kind]("llama"))
    assert again.losses == expected.losses
    assert changed(expected.weights, again.weights) == []
    assert changed(dict(KINDS[kind]("llama").named_parameters()), again.weights) != []


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("lora", mode) for mode in ("full", "ffn", "every_2", "segments_2", "nested", "mixed")),
        *(("full", mode) for mode in ("attention", "nested")),
    ],
)
def test_llama_trains_under_zero_3_as_without_a_plan(mode: str, kind: str) -> None:
    check(3, "llama", kind, 1, mode)


@pytest.mark.parametrize(
    ("kind", "accumulation", "mode"),
    [
        *(("full", 1, mode) for mode in ("full", "attention", "nested")),
        *(("lora", 2, mode) for mode in ("ffn", "segments_2", "mixed")),
    ],
)
def test_llama_trains_under_zero_2_as_without_a_plan(kind: str, accumulation: int, mode: str) -> None:
    check(2, "llama", kind, accumulation, mode)


@pytest.mark.parametrize(("kind", "mode"), [("full", "nested"), ("lora", "full")])
def test_llama_accumulates_under_zero_3_as_without_a_plan(kind: str, mode: str) -> None:
    check(3, "llama", kind, 2, mode)


@pytest.mark.parametrize(
    ("stage", "model_type", "mode"),
    # ZeRO-2 leaves modules as they are.
    [
        (2, "qwen3_moe", "segments_2"),
        (3, "qwen3", "nested"),
        (3, "gemma3_text", "full"),
        (3, "qwen3_moe", "segments_2"),
    ],
)
def test_other_models_train_as_without_a_plan(stage: int, model_type: str, mode: str) -> None:
    check(stage, model_type, "lora" if stage == 3 else "full", 1, mode)


@pytest.mark.parametrize(
    ("stage", "kind", "mode"),
    [
        *((3, "lora", mode) for mode in ("selective", "offload")),
        *((3, "full", mode) for mode in ("head", "all")),
        (2, "full", "all"),
    ],
)
def test_finer_modes_train_as_without_a_plan(stage: int, kind: str, mode: str) -> None:
    policy, options = modes.MODES[mode]
    is_bitwise = mode not in modes.IN_ANOTHER_ORDER
    changes = {} if is_bitwise else modes.SGD
    expected = without_plan(stage, "llama", kind, 1) if is_bitwise else without_plan_by_sgd(stage)
    got = train(stage, KINDS[kind]("llama"), HFCkptCallback(policy, **options), **changes)
    assert got.names == expected.names
    if is_bitwise:
        assert got.losses == expected.losses
        assert changed(expected.weights, got.weights) == []
    else:
        modes.check_near(expected, got)


@functools.cache
def without_plan_by_sgd(stage: int) -> Outcome:
    return train(stage, KINDS["full"]("llama"), **modes.SGD)


# --- What really ran. ---


class Glimpses(TrainerCallback):
    """Looks at the shape of a weight of the first layer whenever the last one runs, in forward and in recomputation."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.model_type = type(model)
        layers = next(module for name, module in model.named_modules() if name.endswith(".layers"))
        weight = layers[0].self_attn.q_proj.weight
        layers[-1].mlp.down_proj.register_forward_pre_hook(lambda *_: self.shapes.add(tuple(weight.shape)))


@pytest.mark.parametrize(("stage", "shape"), [(2, (64, 64)), (3, (0,))])
def test_weights_are_whole_in_stage_2_and_let_go_between_layers_in_stage_3(stage: int, shape: tuple[int, ...]) -> None:
    glimpses = Glimpses()
    train(stage, KINDS["full"]("llama"), callback("full"), glimpses, max_steps=1)
    assert glimpses.model_type is LlamaForCausalLM
    assert glimpses.shapes == {shape}


@pytest.mark.parametrize(
    ("stage", "policy", "forwards"),
    [
        (2, "every_2", [2, 1, 2, 1]),
        *((3, policy, forwards) for policy, forwards in (("none", [1, 1, 1, 1]), ("nested", [3, 3, 2, 2]))),
    ],
)
def test_layers_run_as_often_as_planned(stage: int, policy: str, forwards: list[int]) -> None:
    model = KINDS["full"]("llama")
    with training.counted(model, "q_proj") as counts:
        train(stage, model, callback(policy), max_steps=2)
    assert [counts[layer_idx] / 2 for layer_idx in sorted(counts)] == forwards


def collectives_of_a_step(kind: str, policy: str) -> dict[str, int]:
    """Count the numbers that ZeRO-3 gathers and reduces in the last step of a Llama."""
    counted: Counter[str] = Counter()
    after_step: list[Counter[str]] = []
    note = During("on_step_end", lambda model: after_step.append(counted.copy()))
    # DeepSpeed looks the functions up once.
    with ExitStack() as stack, mock.patch.object(deepspeed.comm.comm, "cdb", None):
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            stack.enter_context(mock.patch.object(dist, name, counting(counted, getattr(dist, name))))
        train(3, KINDS[kind]("llama"), callback(policy), note, max_steps=2)
    return {name: after_step[1][name] - after_step[0][name] for name in counted}


def counting(counted: Counter[str], found: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective of torch so that the numbers count that all ranks together give to it or get from it."""

    def collective(*args: Any, **options: Any) -> Any:
        tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
        counted[found.__name__] += max(tensor.numel() for tensor in tensors)
        return found(*args, **options)

    return collective


def test_zero_3_gathers_what_is_recomputed_once_more() -> None:
    sizes = {name: parameter.numel() for name, parameter in KINDS["full"]("llama").named_parameters()}
    model, layer = sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers.0." in name)
    # Recomputation ends inside the last matrix product of a layer, whose weight its backward then finds in place.
    last = sizes["model.layers.0.mlp.down_proj.weight"]
    forward_and_backward = {"all_gather_into_tensor": 2 * model, "reduce_scatter_tensor": model}
    assert collectives_of_a_step("full", "none") == forward_and_backward
    for policy, more in {
        "full": 4 * (layer - last),
        "every_2": 2 * (layer - last),
        # Two segments: the first layer of each runs to its end in the row.
        "segments_2": 4 * (layer - last) + 2 * last,
        # The first two of three run once more, whole, for their outputs.
        "nested": 4 * (layer - last) + 2 * layer,
    }.items():
        expected = {**forward_and_backward, "all_gather_into_tensor": 2 * model + more}
        assert collectives_of_a_step("full", policy) == expected, policy


@both_stages
def test_adapter_that_gets_no_gradient_is_said(stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = KINDS["lora"]("llama")
    lora_a = model.get_submodule("base_model.model.model.layers.1.mlp.down_proj.lora_A.default")
    lora_a.register_forward_hook(lambda module, args, output: output.detach())
    run = trainer(stage, model, tmp_path, callback("full"))
    with caplog.at_level(logging.INFO, logger="hf_ckpt.trainer.first_step"):
        run.train()
    path = "base_model.model.model.layers.1.mlp.down_proj.lora_A.default.weight"
    (said,) = (record.getMessage() for record in caplog.records if record.name == "hf_ckpt.trainer.first_step")
    assert said.startswith(f"1 trainable parameter got no gradient in step 1: {path}. If")


# --- What is saved. ---


@BOTH
@both_stages
def test_saved_model_has_the_names_and_shapes_of_one_process(stage: int, kind: str, tmp_path: Path) -> None:
    folder = made_by_first(lambda: tmp_path)
    expected = saved_by_one_process(kind)
    run = trainer(stage, KINDS[kind]("llama"), folder, callback("full"), max_steps=1)
    run.train()
    trained = whole(run.model_wrapped)
    run.save_model()
    dist.barrier()
    (file,) = folder.glob("*.safetensors")
    got = load_file(file)
    assert {name: weight.shape for name, weight in got.items()} == expected
    in_model = {name.replace(".default", ""): weight for name, weight in trained.items()}
    assert [name for name, weight in got.items() if not torch.equal(weight, in_model[name])] == []


def saved_by_one_process(kind: str) -> dict[str, torch.Size]:
    """The names and shapes that PEFT or transformers save without an engine."""
    model = KINDS[kind]("llama")
    tensors = get_peft_model_state_dict(model) if isinstance(model, PeftModel) else dict(model.named_parameters())
    return {name: tensor.shape for name, tensor in tensors.items()}


@pytest.mark.parametrize(("stage", "kind"), [(2, "lora"), (3, "full"), (3, "lora")])
def test_resumed_run_ends_as_one_that_was_not_stopped(stage: int, kind: str, tmp_path: Path) -> None:
    folder = made_by_first(lambda: tmp_path)
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "gradient_accumulation_steps": 2}
    # Both now: with a configuration of ZeRO-3 about, transformers makes other models.
    model, same_model = KINDS[kind]("llama"), KINDS[kind]("llama")
    run = trainer(stage, model, folder, callback("nested"), **saving)
    run.train()
    expected, losses = whole(run.model_wrapped), training.losses(run)
    AcceleratorState._reset_state(reset_partial_state=True)
    again = trainer(stage, same_model, folder, callback("nested"), **saving)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert training.losses(again) == losses
    assert changed(expected, whole(again.model_wrapped)) == []


# --- What is refused. ---


@both_stages
def test_deepspeeds_own_checkpointing_in_its_configuration_is_refused(stage: int, tmp_path: Path) -> None:
    own = {"partition_activations": False, "cpu_checkpointing": True, "number_checkpoints": 4}
    asked = config(stage, activation_checkpointing=own)
    with pytest.raises(UnsupportedError, match=r"\(activation_checkpointing: cpu_checkpointing, number_checkpoints\)"):
        make_trainer(KINDS["full"]("llama"), tmp_path, callback("full"), deepspeed=asked)


def test_configuration_that_switches_deepspeeds_own_off_is_accepted(tmp_path: Path) -> None:
    asked = config(2, activation_checkpointing={"partition_activations": False, "number_checkpoints": None})
    make_trainer(KINDS["full"]("llama"), tmp_path, callback("full"), deepspeed=asked, max_steps=1).train()


def test_deepspeeds_own_checkpointing_that_was_configured_in_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed.checkpointing, "deepspeed_checkpointing_enabled", False)
    deepspeed.init_distributed("gloo")
    deepspeed.checkpointing.configure(None, partition_activations=False)
    with pytest.raises(UnsupportedError, match=r"deepspeed.checkpointing.configure\(\) was called"):
        trainer(2, KINDS["full"]("llama"), tmp_path, callback("full"))


def test_frozen_weights_need_a_version_that_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(3, KINDS["lora"]("llama"), tmp_path, callback("ffn"))
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.2" if name == "deepspeed" else found(name))
    # Raised on rank 0, which makes the plan, and told to the other.
    with pytest.raises(HFCkptError, match=r"DeepSpeed 0\.19\.2 empties .* Install DeepSpeed 0\.19\.3 or later"):
        run.train()


@pytest.mark.parametrize(("stage", "kind"), [(2, "lora"), (3, "full")])
def test_other_weights_need_no_such_version(
    stage: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(stage, KINDS[kind]("llama"), tmp_path, callback("ffn"), max_steps=1)
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.2" if name == "deepspeed" else found(name))
    run.train()
    assert run.state.global_step == 1
