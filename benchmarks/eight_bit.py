"""How many bytes does a Llama with 8-bit weights and LoRA hold after its forward, under each policy, here and before?

OMP_NUM_THREADS=1 python -m benchmarks eight_bit --against ../before

On a CPU, with the layers of bitsandbytes. Every storage that an operator makes is followed until it is freed: what
counts are those that are alive when the forward has ended, whoever holds them. Beside it the same model in float32, and
whether the gradients of each policy are those of `none`, bit by bit.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, WrongInputError, add_out, main

_ROOT = Path(__file__).parents[1]
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "full": ("full", {}),
    "full, every 2nd layer": ("full", {"every_n_layers": 2}),
    "full, segments of 2": ("full", {"segment_size": 2}),
    "attention": ("attention", {}),
    "ffn": ("ffn", {}),
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
}
SHAPE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
ROWS, LENGTH, VOCAB = 4, 256, 64


class _Alive(TorchDispatchMode):
    """Follows the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and (key := (storage := tensor.untyped_storage())._cdata) not in self._alive:
                self._alive[key] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, key, None)
        return output

    def num_bytes(self) -> int:
        """Return the bytes of those that are alive."""
        gc.collect()
        return sum(self._alive.values())


def build(*, is_8bit: bool) -> nn.Module:
    """Return the model, in training mode."""
    import bitsandbytes
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **SHAPE)).requires_grad_(False)
    linears = [(path, each) for path, each in model.model.named_modules() if type(each) is nn.Linear] if is_8bit else []
    for path, linear in linears:
        packed = bitsandbytes.nn.Linear8bitLt(
            linear.in_features, linear.out_features, bias=False, has_fp16_weights=False
        )
        packed.weight = bitsandbytes.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        model.model.set_submodule(path, packed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    # The weights are packed on their way to a device.
    return get_peft_model(model.to("cpu"), config).train()


def held(name: str, *, is_8bit: bool) -> tuple[int, list[Tensor]]:
    """Return the bytes that are held after the forward under a policy, and the gradients."""
    import hf_ckpt

    policy, options = POLICIES[name]
    model, ids = build(is_8bit=is_8bit), torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator())
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    with hf_ckpt.apply(model, policy, prove="off", **options), _Alive() as alive:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        num_bytes = alive.num_bytes()
        loss.backward()
    return num_bytes, [each.grad for each in model.parameters() if each.grad is not None]


def counted() -> dict[str, Any]:
    """Return the figures of all policies."""
    found: dict[str, Any] = {}
    for kind in ("int8", "float32"):
        of_none, expected = held("none", is_8bit=kind == "int8")
        found[kind] = {}
        for name in POLICIES:
            num_bytes, gradients = held(name, is_8bit=kind == "int8")
            is_exact = len(gradients) == len(expected) and all(map(torch.equal, gradients, expected))
            found[kind][name] = {
                "held_bytes": num_bytes,
                "share_of_none": round(num_bytes / of_none, 4),
                "is_exact": is_exact,
            }
    return found


def counted_in(checkout: Path) -> dict[str, Any]:
    """Return what `counted` gives in a process that imports `hf_ckpt` from a checkout."""
    words = [sys.executable, str(Path(__file__)), "--count", "--checkout", str(checkout)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"counting in {checkout} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    parser.add_argument("--count", action="store_true", help="count in this process, and print it")
    parser.add_argument("--checkout", type=Path, default=_ROOT, help="where hf_ckpt is imported from, with --count")
    add_out(parser, RESULTS / "eight_bit_cpu.json")


def run(options: Namespace) -> None:
    """Count under all policies and write the result."""
    if options.count:
        # Nothing of it is imported yet.
        sys.path.insert(0, str(options.checkout))
        print(json.dumps(counted()))
        return
    found = describe() | {"against": None, "shape": SHAPE | {"rows": ROWS, "length": LENGTH}}
    if options.against is not None:
        if not (options.against / "hf_ckpt").is_dir():
            raise WrongInputError(f"--against {options.against} holds no hf_ckpt. Name a checkout of this repository.")
        # A result says which commit it was, not where that lay.
        found["command"] = found["command"].replace(str(options.against), "../before")
        git = ["git", "-C", str(options.against), "rev-parse", "HEAD"]
        found["against"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        found["before"] = counted_in(options.against.resolve())
    write(options.out, found | {"here": counted_in(_ROOT)})


if __name__ == "__main__":
    sys.exit(main(__name__))
