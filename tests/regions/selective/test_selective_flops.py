"""What selective recomputation costs and what it holds: FLOPs from the shapes of the matrices, bytes of a 7B layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt.policy.policy import Policy
from hf_ckpt.regions.value_proof import Prove
from hf_ckpt.simulation.devices import CPU, DEVICES, Device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from tests.flops import Flops

pytestmark = pytest.mark.slow

# The proportions of a Llama of 7B, 32 times narrower; a head that weighs little, as it does there.
HIDDEN, INNER, HEADS, LAYERS, VOCAB = 128, 344, 4, 4, 64
BATCH, LENGTH = 1, 64
TOKENS = BATCH * LENGTH
LINEARS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (HIDDEN, HIDDEN)) | {
    "gate_proj": (HIDDEN, INNER),
    "up_proj": (HIDDEN, INNER),
    "down_proj": (INNER, HIDDEN),
}
# One product of attention: scores, or their weighted values.
ATTENTION = 2 * BATCH * LENGTH * LENGTH * HIDDEN


def product(inner: int, outer: int) -> int:
    return 2 * TOKENS * inner * outer


FORWARD = {name: product(*shape) for name, shape in LINEARS.items()}
LAYER = sum(FORWARD.values())
HEAD = product(HIDDEN, VOCAB)


def _kernel(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _kernel_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **_: Any) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


# torch has none for the kernel of the CPU. Its backward computes the scores again: five products for two.
for formula in (_kernel, _kernel_backward):
    formula._get_raw = True  # type: ignore[attr-defined]
KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _kernel,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _kernel_backward,
}


@dataclass(frozen=True)
class Llama:
    """A model, and how to step it."""

    model: nn.Module

    @classmethod
    def build(cls, attn_implementation: str = "sdpa", rank: int = 0, **sizes: int) -> Llama:
        torch.manual_seed(0)
        given = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, **sizes}
        config = LlamaConfig(
            num_attention_heads=HEADS, vocab_size=VOCAB, attn_implementation=attn_implementation, **given
        )
        model: nn.Module = LlamaForCausalLM(config)
        if rank:
            model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        return cls(model.train())

    def flops(self, policy: str, prove: Prove = "off", **options: Any) -> int:
        tokens = torch.arange(TOKENS).reshape(BATCH, LENGTH) % VOCAB
        with (
            hf_ckpt.apply(self.model, policy, prove=prove, **options),
            FlopCounterMode(display=False, custom_mapping=KERNELS) as counter,
        ):
            self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        self.model.zero_grad()
        # transformers 5.0 makes the angles of the rotary tables by a matrix product, 5.23 does not.
        angles = sum(
            sum(counts.values()) for name, counts in counter.flop_counts.items() if name.endswith("rotary_emb")
        )
        return counter.get_total_flops() - angles

    def flops_without_hooks(self, policy: str, prove: Prove) -> int:
        tokens = torch.arange(TOKENS).reshape(BATCH, LENGTH) % VOCAB
        with hf_ckpt.apply(self.model, policy, prove=prove), Flops(KERNELS) as counter:
            self.model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        self.model.zero_grad()
        return counter.total


# Each product of forward brings about two in backward.
FULL_STEP = 3 * (LAYERS * LAYER + HEAD) + LAYERS * (2 + 5) * ATTENTION


@pytest.mark.parametrize(
    ("policy", "options", "again"),
    [
        ("none", {}, 0),
        # Recomputation stops before the last product.
        ("full", {}, LAYER - FORWARD["down_proj"] + 2 * ATTENTION),
        ("selective", {}, 0),
        ("selective_attention", {}, LAYER - FORWARD["down_proj"]),
        ("selective", {"save": ["mlp.up_proj"]}, LAYER - FORWARD["down_proj"] - FORWARD["up_proj"] + 2 * ATTENTION),
        ("selective", {"save": ["aten.mm"]}, 2 * ATTENTION),
    ],
)
def test_a_step_costs_what_the_shapes_say(policy: str, options: dict[str, Any], again: int) -> None:
    assert Llama.build().flops(policy, **options) == FULL_STEP + LAYERS * again


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("full", LAYER - FORWARD["down_proj"] + 2 * ATTENTION),
        ("selective", 0),
        # There is no kernel to keep: the scores and their softmax are computed again, the weighted values are not.
        ("selective_attention", LAYER - FORWARD["down_proj"] + ATTENTION),
    ],
)
def test_eager_attention_costs_what_the_shapes_say(policy: str, again: int) -> None:
    step = 3 * (LAYERS * LAYER + HEAD) + LAYERS * 3 * 2 * ATTENTION
    assert Llama.build("eager").flops(policy) == step + LAYERS * again


def test_full_recomputation_of_a_fine_tune_costs_a_quarter_more() -> None:
    model = Llama.build()
    assert model.flops("full") / model.flops("none") == pytest.approx(1.25, abs=0.01)


def with_adapters(rank: int) -> tuple[int, int, int]:
    """Return the FLOPs of a step with adapters and a frozen base, what full recomputation adds, and of a forward."""
    forward = backward = 0
    for name, (inner, outer) in LINEARS.items():
        base, first, second = product(inner, outer), product(inner, rank), product(rank, outer)
        forward += LAYERS * (base + first + second)
        # Of the first layer's three inputs to attention no gradient is asked.
        asking = LAYERS - (name in ("q_proj", "k_proj", "v_proj"))
        backward += asking * (base + first) + LAYERS * (first + 2 * second)
    # The head is frozen too.
    step = forward + backward + 2 * HEAD + LAYERS * (2 + 5) * ATTENTION
    # The adapter's second product is the last one of a layer.
    again = forward + LAYERS * (2 * ATTENTION - product(rank, HIDDEN))
    return step, again, forward + LAYERS * 2 * ATTENTION + HEAD


@pytest.mark.parametrize(("policy", "share"), [("none", 0), ("full", 1), ("selective", 0)])
def test_a_step_with_adapters_costs_what_the_shapes_say(policy: str, share: int) -> None:
    step, again, _ = with_adapters(rank=4)
    assert Llama.build(rank=4).flops(policy) == step + share * again


def test_full_recomputation_with_adapters_costs_nearly_half_more() -> None:
    model = Llama.build(rank=4)
    assert model.flops("full") / model.flops("none") == pytest.approx(1.47, abs=0.02)


def test_adapters_run_no_product_again() -> None:
    # The second ones are four terms each, into 512 numbers and more: too narrow to be kept, but their sums are.
    model = Llama.build(rank=4, hidden_size=4 * HIDDEN, intermediate_size=4 * INNER, num_hidden_layers=1)
    assert model.flops("selective") == model.flops("none")


# --- The first step, which is proven. ---

# But for tiles: they refuse the hooks by which operations are counted.
PROVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "every_2": ("full", {"every_n_layers": 2}),
    "attention": ("attention", {}),
    "ffn": ("ffn", {}),
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
    "save": ("selective", {"save": ["mlp.up_proj"]}),
    "segments": ("full", {"segment_size": 2}),
    "nested": ("full", {"segment_size": 2, "nested": True}),
    "offload": ("full", {"offload": {"to": "cpu", "min_bytes": 0}}),
    "head": ("full", {"head": "chunked"}),
}


@pytest.mark.parametrize("rank", [0, 4], ids=["full fine-tune", "lora"])
@pytest.mark.parametrize("name", PROVEN)
def test_the_step_that_is_proven_costs_little_more_than_a_forward_at_most(name: str, rank: int) -> None:
    policy, options = PROVEN[name]
    model = Llama.build(rank=rank)
    forward = with_adapters(rank)[2] if rank else LAYERS * (LAYER + 2 * ATTENTION) + HEAD
    more = model.flops(policy, "first_step", **options) - model.flops(policy, **options)
    # Each region runs to its end. Or nothing was proven; attention alone runs all of its products again in any case.
    assert more > 0
    # With offload, which the last layer has not, two of the four layers run once more as their originals.
    assert more <= (1.25 if name == "offload" else 1.2) * forward


def test_the_proof_of_a_whole_layer_runs_what_lies_behind_the_last_saved_tensor() -> None:
    model = Llama.build()
    more = model.flops_without_hooks("full", "first_step") - model.flops_without_hooks("full", "off")
    # The last layer runs forward and backward once more, as its original: about three times its forward.
    of_original = more - LAYERS * FORWARD["down_proj"]
    assert 2.9 * (LAYER + 2 * ATTENTION) <= of_original <= 3.2 * (LAYER + 2 * ATTENTION)


# --- Bytes. ---

A100 = next(device for device in DEVICES.values() if device.capability == (8, 0))
LLAMA_7B = LlamaConfig(num_hidden_layers=2, vocab_size=512)


def held_by_a_layer(policy: str | None, device: Device, rank: int = 0) -> int:
    """Return the bytes that the first layer of a Llama of 7B holds for backward, in bfloat16, at 4,096 tokens."""
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(LLAMA_7B).to(torch.bfloat16)
    if rank:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"), low_cpu_mem_usage=True)
    step = Step(batch_size=1, seq_length=4096, optim=None)
    memory = simulate_step(model, None if policy is None else Policy.parse(policy), step, device)
    held: Counter[int | None] = Counter()
    for tensor in memory.ledger:
        held[tensor.place.layer_idx] += tensor.num_bytes
    return held[0]


INPUT_BYTES = 2 * 4096 * 4096


@pytest.mark.parametrize("device", [CPU, A100], ids=["cpu", "a100"])
def test_selective_holds_half_of_a_layer_of_7b(device: Device) -> None:
    none, selective = held_by_a_layer(None, device), held_by_a_layer("selective", device)
    assert selective / none <= 0.55
    # Queries, keys, values, attention and its projection, the wide two of the ffn; and the next layer's input.
    kept = 5 + 2 * 11008 / 4096 + 1
    # Beside, the statistics of attention: a float32 for each row of each head.
    assert selective / INPUT_BYTES == pytest.approx(kept + 32 * 4 / (2 * 4096), abs=0.001)


def test_selective_attention_holds_the_attention_alone() -> None:
    assert held_by_a_layer("selective_attention", A100) / INPUT_BYTES == pytest.approx(2 + 1 / 64, abs=0.001)


def test_selective_holds_sums_in_the_place_of_what_bases_return() -> None:
    plain, adapted = held_by_a_layer("selective", A100), held_by_a_layer("selective", A100, rank=16)
    # Beside them, seven first products of 16 columns, in float32 as PEFT makes adapters of a model in bfloat16.
    assert (adapted - plain) / INPUT_BYTES == pytest.approx(7 * 16 * 2 / 4096, abs=0.001)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.sweep(keep=1)
def test_selective_with_adapters_costs_little_of_a_step_of_7b(dropout: float) -> None:
    # Beside the host's time, which another test is about.
    device = replace(A100, selective_seconds=0.0)
    step = Step(batch_size=1, seq_length=2048, optim=None)
    seconds = {}
    for policy in ("none", "full", "selective"):
        with torch.device("meta"):
            model: nn.Module = LlamaForCausalLM(LLAMA_7B).to(torch.bfloat16)
        config = LoraConfig(r=16, lora_dropout=dropout, target_modules="all-linear")
        model = get_peft_model(model, config, low_cpu_mem_usage=True)
        seconds[policy] = simulate_step(model, Policy.parse(policy), step, device).timeline.seconds[-1]
    assert seconds["full"] / seconds["none"] > 1.3
    assert seconds["selective"] / seconds["none"] <= 1.13
