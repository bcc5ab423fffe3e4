"""Selective, offload, tiles and the chunked head: loss and gradients of a step, mode by mode and setting by setting.

Selective modes, offload and one tile are exact to the bit. Several tiles and the chunked head add the same terms in
another order: a gradient of a weight is a sum over the sequence, here a sum of one sum for each slice, and a matrix
product over fewer rows may be blocked otherwise. In float32 both stay within `CLOSE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_ckpt
from hf_ckpt.patch.stack_patch import StackPatch
from hf_ckpt.patch.tileable_modules import tiled_modules
from hf_ckpt.regions.execution_state import is_in_backward
from hf_ckpt.regions.head.head_call import HeadCall
from hf_ckpt.regions.tiling import Tiling, run_tiled
from hf_ckpt.structure.layers import find_layers
from tests import exactness, zoo
from tests.exactness import Result, under_autocast
from tests.modes import CLOSE, LAYERS, MODES, TILES, apart, build, in_force, in_tiles, is_bitwise, llama, worst

pytestmark = [pytest.mark.slow, pytest.mark.core]

CLOSE_IN_BF16 = 2**-7
"""One unit in the last place of bfloat16, which autocast rounds the factors of products and their results to."""


# --- Settings. ---


def tied() -> zoo.Case:
    torch.manual_seed(0)
    case = llama(dropout=0.0)
    config = type(case.model.config)(**{**case.model.config.to_dict(), "tie_word_embeddings": True})
    model = transformers.LlamaForCausalLM(config).train()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    return zoo.Case("llama", model, case.inputs)


def lora() -> zoo.Case:
    """Adapters with dropout on everything, in the ffn as well."""
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1)
    case = llama(dropout=0.0)
    return zoo.Case(case.model_type, get_peft_model(case.model, config), case.inputs)


def on_experts(model_type: str) -> zoo.Case:
    """Adapters on the experts too, which are added to their weights: a copy of all experts in each forward."""
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    case = build(model_type)
    return zoo.Case(case.model_type, get_peft_model(case.model, config), case.inputs)


def qlora() -> zoo.Case:
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    case = llama(dropout=0.0)
    for layer in case.model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, quantized(bnb, linear))
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return zoo.Case(case.model_type, get_peft_model(case.model, config), case.inputs)


def quantized(bnb: Any, linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
    made.load_state_dict({"weight": linear.weight.detach()}, assign=True)
    made.weight = bnb.nn.Params4bit(linear.weight.detach(), requires_grad=False, quant_type="nf4")
    return made.to("cpu")


def in_two_batches(case: zoo.Case) -> Result:
    """Accumulates the gradients of two batches of different lengths."""
    case.model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    losses = []
    for inputs in (case.inputs, {name: tensor.flip(0)[:1, :11] for name, tensor in case.inputs.items()}):
        losses.append(zoo.loss(case.model, inputs))
        losses[-1].backward()
    return torch.stack([loss.detach() for loss in losses]), exactness.gradients(case.model)


# Every batch has a padded row, every model has fewer heads for keys than for queries.
SETTINGS: dict[str, tuple[Callable[[], zoo.Case], Callable[[zoo.Case], Result]]] = {
    "sdpa": (partial(llama, dropout=0.0), exactness.step),
    "eager with dropout": (partial(llama, attn_implementation="eager"), exactness.step),
    "sdpa with dropout": (llama, exactness.step),
    "tied embeddings": (tied, exactness.step),
    "lora with dropout": (lora, exactness.step),
    "experts": (partial(build, "qwen3_moe"), exactness.step),
    "adapters on experts": (partial(on_experts, "qwen3_moe"), exactness.step),
    "adapters on experts of gpt-oss": (partial(on_experts, "gpt_oss"), exactness.step),
    "nf4": (qlora, exactness.step),
    "gemma 2": (partial(build, "gemma2"), exactness.step),
    "bf16 autocast": (llama, under_autocast),
    "bf16 autocast with lora": (lora, under_autocast),
    "accumulation": (llama, in_two_batches),
}
DRAWS_IN_TILES = {"lora with dropout", "bf16 autocast with lora"}
AUTOCAST = {"bf16 autocast", "bf16 autocast with lora"}


@cache
def expected_of(setting: str) -> tuple[zoo.Case, Result]:
    build, run = SETTINGS[setting]
    case = build()
    return case, run(case)


@cache
def sliced(setting: str) -> Result:
    """Run in tiles what a plan would, but keep all activations."""
    case, _ = expected_of(setting)
    patch = StackPatch(hf_ckpt.Plan("", ()), "")
    for stack in find_layers(case.model):
        for layer in stack.layers:
            for name in tiled_modules(layer):
                patch.set_forward(name, layer.submodule(name), partial(run_tiled, Tiling(TILES, recomputes=False)))
    try:
        with exactness.counted_entries(case.model) as (_, backward):
            got = SETTINGS[setting][1](case)
        assert not backward
    finally:
        patch.remove()
    return got


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.sweep(keep=10)
def test_step_is_that_of_no_plan(setting: str, mode: str, tmp_path: Path) -> None:
    case, expected = expected_of(setting)
    with (
        in_force(case, mode, tmp_path) as applied,
        exactness.counted_entries(case.model) as (forward, backward),
        chunks_in_backward() as chunks,
    ):
        got = SETTINGS[setting][1](case)
        check_effect(setting, mode, applied, forward, backward, len(chunks))
    if is_bitwise(mode):
        assert exactness.differences(expected, got) == []
        return
    if in_tiles(mode) and "head" not in MODES[mode][1]:
        assert exactness.differences(sliced(setting), got) == []
    if in_tiles(mode) and setting in DRAWS_IN_TILES:
        # Each slice draws masks of its own, so that another plan computes something else.
        expected = sliced(setting)
    error, name = worst(apart(expected, got))
    assert error <= (CLOSE_IN_BF16 if setting in AUTOCAST else CLOSE), name


@contextmanager
def chunks_in_backward() -> Iterator[list[None]]:
    """Count the chunks of a head that run in backward, where hooks on the head do not."""
    run, found = HeadCall.run, list[None]()

    def counted(*args: Any) -> Any:
        found.extend([None] * is_in_backward())
        return run(*args)

    with mock.patch.object(HeadCall, "run", counted):
        yield found


def check_effect(
    setting: str,
    mode: str,
    applied: hf_ckpt.patch.apply.Applied,
    forward: Counter[str],
    backward: Counter[str],
    num_chunks: int,
) -> None:
    """Assert that the mode did what it is for, or nothing was put to the test."""
    num_batches = 2 if setting == "accumulation" else 1
    most = max(count for name, count in forward.items() if "lm_head" not in name)
    # The first call in tiles looks at whether slices can stand for the whole, which takes a few forwards more.
    assert most >= num_batches * TILES if in_tiles(mode) else most == num_batches
    assert bool(num_chunks) == ("head" in MODES[mode][1])
    assert any(".layers." in name for name in backward) == (mode != "head")
    offloads = "offload" in MODES[mode][1]
    assert len(applied.offloaders) == offloads
    for offloader in applied.offloaders:
        stats = offloader.stats
        num_layers = 1 if mode == "offload_half" else LAYERS - 1
        assert stats.num_tensors >= num_layers * num_batches
        assert stats.bytes_in >= stats.bytes_out > 0
        assert (stats.num_live, stats.live_bytes) == (0, 0)
