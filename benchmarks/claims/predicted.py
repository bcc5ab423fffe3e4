"""What the literature claims, at the sizes that it speaks of: simulated steps, predicted times. Needs no GPU.

    python -m benchmarks.claims.predicted --out benchmarks/results/claims_predicted.json

Bytes and operations are those of the real modelling code; times come from a table of devices and are not measured.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.cases import CASES, Case
from benchmarks.claims.following import activation_peak
from benchmarks.claims.formulas import GB, GIB
from benchmarks.claims.measure import add_claims, run_claims
from benchmarks.claims.overhead import every_n_policies
from benchmarks.claims.simulated_rows import (
    A100,
    FULL_7B,
    H100,
    LORA_7B,
    RTX4090,
    SUBJECTS,
    Rows,
    held,
    model_of,
    row,
    simulated,
    to_the_end,
)
from benchmarks.runner import RESULTS, main
from hf_ckpt.planner.largest_that_fits import largest
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.simulation.tape import assign_categories

RESULT = RESULTS / "claims_predicted.json"
NOT_MEASURED = "not yet measured on a GPU"


# --- What recomputation costs. ---


def extra_forward() -> Rows:
    """Claim: checkpointing costs one extra forward, 33 % (20, 25 to 30, 40 to 50 %)."""
    found: Rows = {"case": _sizes_of(SUBJECTS), "gpu": NOT_MEASURED}
    for name, case in SUBJECTS.items():
        found[name] = {A100: _none_and_full(case, A100)}
    for name in ("llama2_7b_lora", "llama32_1b_full"):
        found[name][H100] = _none_and_full(SUBJECTS[name], H100)
    # With adapters early stop leaves out next to nothing: what stands last in a layer is a product of an adapter.
    for name in ("llama2_7b_full", "llama32_1b_full"):
        whole = row(to_the_end(SUBJECTS[name], A100), simulated(SUBJECTS[name], A100))
        found[name][A100]["full_without_early_stop"] = whole
    return found


def _none_and_full(case: Case, device: str) -> Rows:
    none, full = simulated(case, device), simulated(case, device, "full")
    return {"none": row(none), "full": row(full, none)}


def _sizes_of(subjects: dict[str, Case]) -> str:
    steps = "; ".join(f"{name}: {case.batch} x {case.tokens:,} tokens" for name, case in subjects.items())
    return f"{steps}; bfloat16 autocast, sdpa, AdamW. Predicted"


def backward_over_forward() -> Rows:
    """Claim: backward takes 2.0 times as long as forward without checkpointing, 2.66 to 3.0 with."""
    found: Rows = {"case": _sizes_of(SUBJECTS), "gpu": NOT_MEASURED}
    for name, case in SUBJECTS.items():
        found[name] = {}
        for mode in ("none", "full"):
            memory = simulated(case, A100, mode)
            flops, time = memory.num_flops, memory.time
            again = flops.get(Phase.RECOMPUTATION, 0)
            found[name][mode] = {
                "flops": (flops[Phase.BACKWARD] + again) / flops[Phase.FORWARD],
                "time": (time.backward + time.recomputation) / time.forward,
            }
    return found


_MEANINGS = {
    "llama2_7b_lora": ("checkpoint_every_nth",),
    "llama32_1b_full": ("checkpoint_every_nth", "segments_of_n", "keep_every_nth"),
}


def every_n() -> Rows:
    """Claim: every 4 layers cost 10 to 15 %, 2 layers 25 to 35 %, 1 layer 40 to 50 %."""
    found: Rows = {"case": _sizes_of({name: SUBJECTS[name] for name in _MEANINGS}), "gpu": NOT_MEASURED}
    for name, meanings in _MEANINGS.items():
        case = SUBJECTS[name]
        none = simulated(case, A100)
        policies = every_n_policies(case.config["num_hidden_layers"])
        found[name] = {
            meaning: {
                str(n): row(simulated(case, A100, mode, **options), none)
                for n, (mode, options) in policies[meaning].items()
            }
            for meaning in meanings
        }
    return found


def recompute_or_store() -> Rows:
    """Claim: recomputing may be faster than storing."""
    subjects = {name: SUBJECTS[name] for name in ("llama2_7b_full", "llama32_1b_full")}
    found: Rows = {"case": f"{_sizes_of(subjects)}: step time over none", "gpu": NOT_MEASURED}
    ratios = []
    for name, case in subjects.items():
        found[name] = {}
        for mode in ("attention", "ffn", "full"):
            none, some = (simulated(case, A100, policy) for policy in ("none", mode))
            ratios.append(some.time.total / none.time.total)
            found[name][mode] = {"time_ratio": ratios[-1]}
    return {**found, "least_time_ratio": min(ratios)}


# --- Square root of the number of layers. ---


def sqrt_is_optimal() -> Rows:
    """Claim: segments of sqrt(L) layers need the least memory."""
    case = FULL_7B
    plain, nested = (
        {str(k): _in_inputs(simulated(case, A100, "full", **_segments(k, is_nested=is_nested)), case) for k in sizes}
        for is_nested, sizes in ((False, (1, 2, 4, 8)), (True, (4, 8)))
    )
    none, eager = simulated(case, A100), replace(case, attention="eager")
    return {
        "case": "Llama 2 7B, fully trained, 1 x 2,048 tokens, bfloat16 autocast, sdpa: peak beyond weights, gradients "
        "and optimizer, in units of a layer's input (peak_units), and the same without logits and loss "
        "(layers_peak_units); and what a layer holds, with sdpa and with eager attention. Predicted",
        "gpu": NOT_MEASURED,
        "internals_over_input": _of_layer(none, 1) / _input_bytes(case),
        "internals_over_input_eager": _of_layer(simulated(eager, A100), 1) / _input_bytes(case),
        "none": _in_inputs(none, case),
        "by_k": plain,
        "by_k_nested": nested,
        "best_k": _best(plain, "peak_units"),
        "best_k_nested": _best(nested, "peak_units"),
        "best_k_of_layers": _best(plain, "layers_peak_units"),
        "best_k_nested_of_layers": _best(nested, "layers_peak_units"),
    }


def _segments(k: int, *, is_nested: bool) -> dict[str, Any]:
    options: dict[str, Any] = {} if k == 1 else {"segment_size": k}
    return options | {"nested": True} if is_nested else options


def _input_bytes(case: Case) -> int:
    return 2 * case.batch * case.tokens * int(case.config["hidden_size"])


def _of_layer(memory: StepMemory, layer_idx: int) -> int:
    return sum(tensor.num_bytes for tensor in memory.ledger if tensor.place.layer_idx == layer_idx)


def _in_inputs(memory: StepMemory, case: Case) -> Rows:
    return {
        "peak_units": activation_peak(memory) / _input_bytes(case),
        "layers_peak_units": activation_peak(memory, Category.LOSS) / _input_bytes(case),
        "peak_gib": memory.peak_bytes / GIB,
        "step_time_ms": 1000 * memory.time.total,
    }


def _best(by_k: Rows, figure: str) -> int:
    return int(min(by_k, key=lambda k: float(by_k[k][figure])))


# --- Attention, ffn, norms. ---

_LENGTHS = (512, 2048, 8192)
_PARTS_CASE = "Llama 2 7B, fully trained, one row, bfloat16 autocast, A100; by attention and length. Predicted"


def _by_length(mode: str) -> Rows:
    found: Rows = {}
    for attention in ("eager", "sdpa"):
        cases = {tokens: replace(FULL_7B, attention=attention, tokens=tokens) for tokens in _LENGTHS}
        found[attention] = {
            str(tokens): row(simulated(case, A100, mode), simulated(case, A100)) for tokens, case in cases.items()
        }
    return found


def attention_only() -> Rows:
    """Claim: checkpointing attention only saves 40 to 60 % (60 to 80 %) at about 10 %."""
    return {"case": f"{_PARTS_CASE}: mode attention over none", "gpu": NOT_MEASURED, **_by_length("attention")}


def ffn_only_with_flash() -> Rows:
    """Claim: with flash attention checkpoint the ffn only, at 18 to 20 %."""
    return {"case": f"{_PARTS_CASE}: mode ffn over none", "gpu": NOT_MEASURED, **_by_length("ffn")}


def full_saves() -> Rows:
    """Claim: full checkpointing saves 60 to 80 % of memory, 8 to 12 times less activation memory."""
    found: Rows = {"case": f"{_PARTS_CASE}: mode full over none. {_sizes_of(SUBJECTS)}", "gpu": NOT_MEASURED}
    found |= _by_length("full")
    found["subjects"] = {
        name: row(simulated(case, A100, "full"), simulated(case, A100)) for name, case in SUBJECTS.items()
    }
    for rows in (found["eager"], found["sdpa"], found["subjects"]):
        for figures in rows.values():
            figures["times_less_held"] = 1 / figures["held_ratio"]
            figures["times_less_activation_peak"] = 1 / figures["activation_peak_ratio"]
    return found


def attention_or_ffn_first() -> Rows:
    """Claim: checkpoint attention first; claim: the ffn first. Held bytes that each frees per millisecond."""
    found: Rows = {"case": f"{_PARTS_CASE}: held bytes freed and milliseconds added", "gpu": NOT_MEASURED}
    for attention in ("eager", "sdpa"):
        found[attention] = {}
        for tokens in _LENGTHS:
            case = replace(FULL_7B, attention=attention, tokens=tokens)
            parts = {part: _freed(case, part) for part in ("attention", "ffn")}
            first = max(parts, key=lambda part: float(parts[part]["mib_per_ms"]))
            found[attention][str(tokens)] = {**parts, "first": first}
    return found


def _freed(case: Case, part: str) -> Rows:
    none, some = simulated(case, A100), simulated(case, A100, part)
    freed, added = held(none) - held(some), 1000 * (some.time.total - none.time.total)
    return {"freed_bytes": freed, "freed_gib": freed / GIB, "added_ms": added, "mib_per_ms": freed / 2**20 / added}


def norms_left_out() -> Rows:
    """Claim: leave the norms out of checkpointing. What they hold, and their share of the recomputation's time."""
    none = simulated(FULL_7B, A100)
    model = model_of(FULL_7B)
    simulator = StepSimulator(model, FULL_7B.step, find_device(A100))
    tape = simulator.trace(simulator.plan_of(Policy.parse("full"))).tape
    assign_categories(tape)
    again = [event for event in tape.events if event.place.phase is Phase.RECOMPUTATION]
    seconds = sum(event.seconds for event in again)
    norms = sum(event.seconds for event in again if _is_norm(event.place.module))
    kept = sum(tensor.num_bytes for tensor in none.ledger if _is_norm(tensor.place.module))
    full = simulated(FULL_7B, A100, "full")
    return {
        "case": "Llama 2 7B, fully trained, 1 x 2,048 tokens, bfloat16 autocast, A100: what the norms of all layers "
        "make and hold without checkpointing, and the time of running them again under full. Predicted",
        "gpu": NOT_MEASURED,
        "held_by_norms_bytes": kept,
        "held_by_norms_gib": kept / GIB,
        "held_by_norms_share": kept / held(none),
        "held_by_full_gib": held(full) / GIB,
        "recomputation_ms": 1000 * seconds,
        "norms_ms": 1000 * norms,
        "norms_share_of_recomputation": norms / seconds,
        "norms_share_of_step": norms / full.time.total,
    }


def _is_norm(module: str) -> bool:
    return module.rpartition(".")[2] in ("input_layernorm", "post_attention_layernorm")


# --- Activations in bytes. ---


def llama_7b_activations() -> Rows:
    """Claim: the activations of LLaMA 7B at batch 8 x 2,048 are 51 GB."""
    found: Rows = {
        "case": "LLaMA 7B, 8 x 2,048 tokens, bfloat16 autocast, no checkpointing: held for backward. Predicted"
    }
    for attention in ("eager", "sdpa"):
        found[attention] = {}
        for method in ("full", "lora"):
            case = replace(LORA_7B, attention=attention, method=method, batch=8)
            size = held(simulated(case, A100))
            per_value = size / (_input_bytes(case) / 2 * case.config["num_hidden_layers"])
            found[attention][method] = {
                "held_bytes": size,
                "held_gb": size / GB,
                "held_gib": size / GIB,
                "bytes_per_value": per_value,
            }
    return found


def eager_attention_100_gb() -> Rows:
    """Claim: 32 layers at 2,048 x 8 with eager attention take 100 GB of activations."""
    case = replace(LORA_7B, attention="eager", method="full", batch=8)
    none, full = simulated(case, A100), simulated(case, A100, "full")
    scores = _scores(none, case)
    return {
        "case": "LLaMA 7B, 8 x 2,048 tokens, eager attention, bfloat16 autocast: held for backward. scores: tensors "
        "[B, H, S, S]. Predicted",
        "held_gb": held(none) / GB,
        "held_gib": held(none) / GIB,
        "scores_gb": sum(tensor.num_bytes for tensor in scores) / GB,
        "full_held_gb": held(full) / GB,
    }


def _scores(memory: StepMemory, case: Case) -> list[Any]:
    shape = (case.batch, case.config["num_attention_heads"], case.tokens, case.tokens)
    numel = torch.Size(shape).numel()
    return [tensor for tensor in memory.ledger if torch.Size(tensor.shape).numel() == numel]


def attention_scores() -> Rows:
    """Claim: attention scores take 8 GB at 4,096 tokens x 8. What one layer holds of them."""
    config = {**LORA_7B.config, "num_hidden_layers": 2}
    case = replace(LORA_7B, config=config, attention="eager", batch=8, tokens=4096)
    scores = [tensor for tensor in _scores(simulated(case, A100), case) if tensor.place.layer_idx == 0]
    dtypes = Counter(tensor.dtype for tensor in scores)
    return {
        "case": "one layer of LLaMA 7B, 8 x 4,096 tokens, eager attention, bfloat16 autocast: tensors [B, H, S, S] "
        "that are held for backward. Predicted",
        "num_tensors": len(scores),
        "dtypes": dict(dtypes),
        "held_bytes": sum(tensor.num_bytes for tensor in scores),
        "held_gb": sum(tensor.num_bytes for tensor in scores) / GB,
        "held_gib": sum(tensor.num_bytes for tensor in scores) / GIB,
    }


# --- What fits. ---


def cpu_offload() -> Rows:
    """Claim: offload to the CPU saves 80 to 90 %. Of what is held, and of the peak, over none and over full."""
    case = replace(LORA_7B, tokens=8192)
    none, full = simulated(case, A100), simulated(case, A100, "full")
    found: Rows = {
        "case": "Llama 2 7B, LoRA on all linear layers, 1 x 8,192 tokens, bfloat16 autocast, A100. full_offload: each "
        "layer's input waits on the host; selective_offload: the outputs of products and attention do. Predicted",
        "gpu": NOT_MEASURED,
        "none": row(none),
        "full": row(full, none),
    }
    for mode in ("full", "selective"):
        memory = simulated(case, A100, mode, offload="cpu")
        found[f"{mode}_offload"] = {
            **row(memory, none),
            "host_bytes": memory.host_bytes,
            "host_gib": memory.host_bytes / GIB,
            "peak_saved_over_full": 1 - memory.peak_bytes / full.peak_bytes,
            "activation_peak_saved": 1 - activation_peak(memory) / activation_peak(none),
            "activation_peak_saved_over_full": 1 - activation_peak(memory) / activation_peak(full),
            "time_over_full": memory.time.total / full.time.total,
        }
    return found


def lora_7b_on_24_gb() -> Rows:
    """Claim: a 7B LoRA fits 24 GB at 2,048 tokens with bf16, checkpointing and accumulation."""
    device = find_device(RTX4090)
    none, full = (simulated(LORA_7B, RTX4090, mode, accumulation=16) for mode in ("none", "full"))
    longer = simulated(replace(LORA_7B, tokens=4096), RTX4090, "full", accumulation=16)
    rows = {"none": (none, row(none)), "full": (full, row(full, none)), "full_4096": (longer, row(longer))}
    return {
        "case": "Llama 2 7B, LoRA of rank 16 on all linear layers, 1 x 2,048 tokens, 16 micro-batches, bfloat16 "
        "weights and autocast, AdamW, GeForce RTX 4090; full_4096: 1 x 4,096 tokens. Predicted",
        "gpu": NOT_MEASURED,
        "device_bytes": device.memory_bytes,
        "device_gib": device.memory_bytes / GIB,
        **{
            name: {**figures, "fits": memory.peak_bytes <= device.memory_bytes}
            for name, (memory, figures) in rows.items()
        },
    }


def lora_13b() -> Rows:
    """Claim: checkpointing brings a 13B LoRA from 35 to 15 GB."""
    found: Rows = {
        "case": "Llama 2 13B, LoRA of rank 16 on all linear layers, 1 x 2,048 tokens, autocast, AdamW, A100; weights "
        "in bfloat16, and in 4 bits (nf4, double quantization). eight_bit_by_arithmetic: bfloat16, less half of all "
        "weights but embeddings and head. Predicted",
        "gpu": NOT_MEASURED,
    }
    for name, method in (("bfloat16", "lora"), ("nf4", "qlora")):
        case = replace(CASES["llama2_13b_lora_2048"], method=method)
        none, full = simulated(case, A100), simulated(case, A100, "full")
        weights = full.by_category[Category.PARAMETERS]
        rows = {"none": row(none), "full": row(full, none)}
        for figures in rows.values():
            figures["peak_gb"] = figures["peak_bytes"] / GB
        found[name] = {"weights_bytes": weights, "weights_gib": weights / GIB, "weights_gb": weights / GB, **rows}
    return {**found, "eight_bit_by_arithmetic": _in_eight_bits(found["bfloat16"])}


def _in_eight_bits(rows: Rows) -> Rows:
    """Return the peaks had all weights but embeddings and head half the size."""
    config = CASES["llama2_13b_lora_2048"].config
    less = (rows["weights_bytes"] - 2 * 2 * config["vocab_size"] * config["hidden_size"]) / 2
    return {f"{mode}_gb": (rows[mode]["peak_bytes"] - less) / GB for mode in ("none", "full")}


_LONGER = {
    "llama32_1b_full_2048_rtx4090": (SUBJECTS["llama32_1b_full"], RTX4090),
    "llama32_1b_full_2048_a100": (SUBJECTS["llama32_1b_full"], A100),
    "llama32_1b_full_128_a100": (replace(SUBJECTS["llama32_1b_full"], tokens=128), A100),
    "llama2_7b_lora_2048_a100": (LORA_7B, A100),
    "llama2_7b_lora_128_rtx4090": (replace(LORA_7B, tokens=128), RTX4090),
}
"""By model, method, tokens of a row, and device."""


def longer_batch() -> Rows:
    """Claim: a longer batch that checkpointing makes possible pays for the recomputation. Tokens per second."""
    found: Rows = {
        "case": "model, method, tokens of a row and device are in the name; the largest batch that fits the device "
        "without checkpointing and with it, one micro-batch a step. tokens_per_second_ratio: full over none, each at "
        "its largest batch. Predicted",
        "gpu": NOT_MEASURED,
    }
    for name, (case, device) in _LONGER.items():
        rows = {mode: _at_largest(case, device, mode) for mode in ("none", "full")}
        ratio = None
        if rows["none"]["batch"]:
            ratio = rows["full"]["tokens_per_second"] / rows["none"]["tokens_per_second"]
        found[name] = {**rows, "tokens_per_second_ratio": ratio}
    return found


def _at_largest(case: Case, device: str, mode: str) -> Rows:
    limit = largest(
        lambda rows: simulated(replace(case, batch=rows), device, mode).peak_bytes,
        find_device(device).memory_bytes,
        start=8,
        most=4096,
    )
    if not limit.number:
        return {"batch": 0, "peak_gib": limit.needed_bytes / GIB, "tokens_per_second": None}
    memory = simulated(replace(case, batch=limit.number), device, mode)
    return {
        "batch": limit.number,
        "peak_gib": memory.peak_bytes / GIB,
        "tokens_per_second": memory.tokens / memory.time.total,
        "seconds": asdict(memory.time),
    }


EXPERIMENTS: tuple[Callable[[], Rows], ...] = (
    extra_forward,
    backward_over_forward,
    sqrt_is_optimal,
    every_n,
    attention_only,
    ffn_only_with_flash,
    full_saves,
    llama_7b_activations,
    attention_scores,
    cpu_offload,
    lora_7b_on_24_gb,
    lora_13b,
    recompute_or_store,
    longer_batch,
    attention_or_ffn_first,
    norms_left_out,
    eager_attention_100_gb,
)
"""One for each claim whose sizes are those of a large model, named for it."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_claims(parser, "benchmarks.claims.predicted", EXPERIMENTS, RESULT)


def run(options: Namespace) -> None:
    """Predict the claims."""
    run_claims(options, EXPERIMENTS, is_predicted=True)


if __name__ == "__main__":
    sys.exit(main(__name__))
