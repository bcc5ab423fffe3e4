"""What the modes cost the host: time of the forward of a layer whose kernels have next to nothing to do.

A Llama with the modules of Llama 2 7B and tiny tensors, plain and with LoRA adapters on every linear layer. Contenders
are copies of one model, each with its policy, and take turns in one process. Times are those that the host's processor
is busy, so that neither a device nor a neighbour on the machine is in them; a device is waited for between forwards
only. Where the host is slower than the device, as with few tokens, this is what a step takes.

With `--state`: what following the state of a layer's modules costs, for a forward and its recomputation together. The
reads are made around nothing: a difference of two steps would be smaller than their spread.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --state --rounds 2000
    python benchmarks/host_time.py --device cuda
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from benchmarks.result_files import write_result
from benchmarks.runner import RESULTS, add_device, add_out, main
from benchmarks.step_costs import synchronize
from hf_ckpt.regions.module_state import CallState
from hf_ckpt.regions.selective.kept_outputs import KeptOutputs

POLICIES = ("none", "full", "selective", "selective_attention")
ADAPTERS: dict[str, dict[str, Any] | None] = {"plain": None, "lora": {}, "lora_with_dropout": {"lora_dropout": 0.1}}
NUM_LAYERS = 4
NUM_TOKENS = 8
# The first step proves the plan, the second and the third find the ways that all later ones go.
NUM_WARMUP = 4


class Dispatches(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Contender:
    """A copy of the model with a policy in force, and the times of its forwards and backwards in seconds."""

    def __init__(self, model: nn.Module, policy: str) -> None:
        self.model = copy.deepcopy(model)
        hf_ckpt.apply(self.model, policy)
        self.forward: list[float] = []
        self.backward: list[float] = []

    def step(self, tokens: Tensor) -> tuple[float, float]:
        """Return the host's seconds of a forward and of a backward."""
        synchronize(tokens.device.type)
        start = time.thread_time()
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        forward = time.thread_time() - start
        synchronize(tokens.device.type)
        # Of a device, backward runs in another thread.
        start = time.process_time()
        loss.backward()
        backward = time.process_time() - start
        self.model.zero_grad(set_to_none=True)
        return forward, backward


def followed(model: nn.Module, num_rounds: int) -> dict[str, float]:
    """Return the host's microseconds for following one layer through a forward and its recomputation."""
    seconds = []
    with hf_ckpt.apply(model, "full"):
        layer = next(module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer")
        for number in range(NUM_WARMUP + num_rounds):
            start = time.thread_time()
            state = CallState(type(layer).forward, (layer,))
            for _ in ("forward", "recomputation"):
                with state.as_in_forward():
                    pass
            if number >= NUM_WARMUP:
                seconds.append(time.thread_time() - start)
    return spread([1e6 * each for each in seconds])


def build(adapters: dict[str, Any] | None, device: str, num_layers: int) -> nn.Module:
    """Return a model in training mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        vocab_size=64,
        attn_implementation="sdpa",
    )
    model: nn.Module = LlamaForCausalLM(config)
    if adapters is not None:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **adapters))
    return model.to(device).train()


def dispatches_of_a_layer(adapters: dict[str, Any] | None, tokens: Tensor) -> int:
    """Return how many operators the forward of one layer dispatches."""
    counts = []
    for num_layers in (1, 2):
        model = build(adapters, str(tokens.device), num_layers)
        with Dispatches() as seen:
            model(input_ids=tokens, use_cache=False)
        counts.append(seen.count)
    return counts[1] - counts[0]


def num_kept_in_a_layer(adapters: dict[str, Any] | None, tokens: Tensor) -> int:
    """Return how many outputs a layer keeps in mode `selective`."""
    model = build(adapters, str(tokens.device), 1)
    with (
        hf_ckpt.apply(model, "selective", prove="off"),
        mock.patch.object(KeptOutputs, "keep", autospec=True, side_effect=KeptOutputs.keep) as entered,
    ):
        model(input_ids=tokens, use_cache=False)
    return entered.call_count


def measure(name: str, device: str, num_rounds: int) -> dict[str, Any]:
    """Measure all policies on one kind of model, in turn."""
    tokens = torch.arange(NUM_TOKENS, device=device)[None]
    model = build(ADAPTERS[name], device, NUM_LAYERS)
    contenders = {policy: Contender(model, policy) for policy in POLICIES}
    for number in range(NUM_WARMUP + num_rounds):
        # Back and forth, so that no contender always finds the caches as the same other one leaves them.
        for contender in list(contenders.values())[:: 1 if number % 2 == 0 else -1]:
            forward, backward = contender.step(tokens)
            if number >= NUM_WARMUP:
                contender.forward.append(forward / NUM_LAYERS)
                contender.backward.append(backward / NUM_LAYERS)
    num_dispatches = dispatches_of_a_layer(ADAPTERS[name], tokens)
    medians = {policy: statistics.median(contender.forward) for policy, contender in contenders.items()}
    figures = {
        policy: {
            "forward_us_per_layer": spread([1e6 * each for each in contender.forward]),
            "backward_us_per_layer": spread([1e6 * each for each in contender.backward]),
            "forward_over_none": ratio(contender, contenders["none"]),
            "forward_over_full": ratio(contender, contenders["full"]),
        }
        for policy, contender in contenders.items()
    }
    num_kept = num_kept_in_a_layer(ADAPTERS[name], tokens)
    over_full = 1e6 * (medians["selective"] - medians["full"])
    figures["selective"] |= {"num_kept": num_kept, "us_per_kept_output": over_full / num_kept}
    return {"num_dispatches_per_layer": num_dispatches, "policies": figures}


def spread(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    first, median, third = statistics.quantiles(values, n=4)
    return {"median": median, "first_quartile": first, "third_quartile": third}


def ratio(contender: Contender, other: Contender) -> float:
    """Return the median of the ratios of neighbouring forwards."""
    return statistics.median(one / two for one, two in zip(contender.forward, other.forward, strict=True))


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--state", action="store_true", help="only what following the state of modules costs")
    add_out(parser, what=None)


def run(options: Namespace) -> None:
    """Measure and write one JSON."""
    if options.device == "cpu":
        torch.set_num_threads(1)
    models = _measured(options)
    for name, found in models.items():
        if options.state:
            print(f"{name}: {found['state_us_per_region']['median']:.0f} us a region and step")
        for policy, figures in found.get("policies", {}).items():
            print(
                f"{name} {policy}: {figures['forward_us_per_layer']['median']:.0f} us a layer, "
                f"{figures['forward_over_none']:.2f} of none, {figures['forward_over_full']:.2f} of full"
            )
    result = {
        "device": options.device,
        "num_layers": NUM_LAYERS,
        "num_tokens": NUM_TOKENS,
        "num_warmup": NUM_WARMUP,
        "num_rounds": options.rounds,
        "models": models,
    }
    state = "state_" if options.state else ""
    write_result(options.out or RESULTS / f"host_time_{state}{options.device}.json", result)


def _measured(options: Namespace) -> dict[str, dict[str, Any]]:
    if not options.state:
        return {name: measure(name, options.device, options.rounds) for name in ADAPTERS}
    return {
        name: {"state_us_per_region": followed(build(adapters, options.device, NUM_LAYERS), options.rounds)}
        for name, adapters in ADAPTERS.items()
    }


if __name__ == "__main__":
    sys.exit(main(__name__))
