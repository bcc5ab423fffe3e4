"""How many kernels does the first step's proof launch, here and in another checkout, and for what share of a forward?

OMP_NUM_THREADS=1 python -m benchmarks proof_launches --against ../before

Counted on fake tensors, on any machine: a layer of Llama 2 7B with adapters on all linear layers runs forward and
backward under bfloat16 autocast, and the operators of its proof are counted, without those that give views or empty
tensors. One layer of all is held against its original too; its second forward and backward are no part of the counts.
All other layers are alike, which is counted at 2,048 tokens. Bytes are those that the operators read and write.
Seconds are those of `hf_ckpt.simulation.devices` for an H100: of memory traffic alone, and with what every kernel takes
beside it. The forward is predicted for the same device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, WrongInputError, add_out, main

_ROOT = Path(__file__).parents[1]
_DEVICE = "h100"
CASES = {
    "full_2048": ("full", 2048),
    "full_8192": ("full", 8192),
    "full_131072": ("full", 131072),
    "selective_8192": ("selective", 8192),
    "full_8192_zero3": ("full", 8192),
}
"""Policy and tokens. Under ZeRO-3 recomputation stops early: what modules inside return gets whole fingerprints."""


@dataclass
class _Counter(TorchDispatchMode):
    """Counts what is dispatched while the proof runs."""

    num_launches: int = 0
    num_bytes: int = 0
    is_counting: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        # What asks a fake tensor for its device is no kernel.
        if (
            self.is_counting
            and function.namespace == "aten"
            and not function.is_view
            and "empty" not in function.name()
        ):
            self.num_launches += 1
            tensors = {id(each): each for each in tree_leaves((args, kwargs, output)) if isinstance(each, Tensor)}
            self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        return output

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what runs in the block."""
        found, self.is_counting = self.is_counting, True
        try:
            yield
        finally:
            self.is_counting = found


def counted(case: str, num_layers: int) -> dict[str, int]:
    """Return the launches and bytes of the proof of so many layers, forward and recomputation together."""
    import hf_ckpt
    from benchmarks.cases import SHAPES, Configuration, build_configuration
    from hf_ckpt.regions import fingerprints, value_proof
    from hf_ckpt.regions.execution_state import RandomState
    from hf_ckpt.simulation.fake_model import fake_copy
    from hf_ckpt.simulation.isolation import random_states_kept

    # An older checkout holds no layer against its original.
    users = [value_proof]
    with suppress(ImportError):
        users.append(import_module("hf_ckpt.regions.original_proof"))
    policy, tokens = CASES[case]
    counter = _Counter()

    def are_equal(one: fingerprints.Fingerprint, other: fingerprints.Fingerprint) -> bool:
        # Fake tensors have no values; the comparison is a kernel.
        _ = one.hash == other.hash
        return True

    unobserved = partial(fingerprints.unobserved, counter.counting)
    with ExitStack() as entered:
        for owner, name, stand_in in (
            (fingerprints, "is_plain", lambda tensor: True),
            *((user, "is_plain", lambda tensor: True) for user in users),
            (fingerprints, "are_equal", are_equal),
            (value_proof, "_unobserved", unobserved),
            (RandomState, "is_same", lambda self, other: True),
            (RandomState, "others_than", lambda self, other: []),
        ):
            # An older checkout names no generators.
            entered.enter_context(mock.patch.object(owner, name, stand_in, create=name == "others_than"))
        shape = replace(SHAPES["llama_7b"], num_hidden_layers=num_layers)
        fake = fake_copy(build_configuration(Configuration("llama_7b", "lora", policy, tokens), shape, "meta"))
        for layer in fake.model.get_submodule("base_model.model.model.layers") if "zero3" in case else ():
            # As ZeRO-3 marks its modules.
            layer.ds_id = 0
        entered.enter_context(random_states_kept())
        entered.enter_context(fake.mode)
        with hf_ckpt.apply(fake.model, policy), torch.autocast("cpu", torch.bfloat16), counter:
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            fake.model(input_ids=ids, labels=ids).loss.backward()
    return {"num_launches": counter.num_launches, "num_bytes": counter.num_bytes}


def counted_in(checkout: Path, case: str, num_layers: int) -> dict[str, int]:
    """Return what `counted` gives in a process that imports `hf_ckpt` from a checkout."""
    words = [str(Path(__file__)), "--count", case, "--layers", str(num_layers), "--checkout", str(checkout)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"counting {case} in {checkout} failed:\n{done.stderr}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def forward_seconds(case: str) -> float:
    """Return the predicted seconds of the forward of a whole micro-batch."""
    from benchmarks.cases import SHAPES, Configuration, build_configuration
    from hf_ckpt.simulation.devices import find_device
    from hf_ckpt.simulation.simulator import simulate_step
    from hf_ckpt.simulation.step import Step

    policy, tokens = CASES[case]
    model = build_configuration(Configuration("llama_7b", "lora", policy, tokens), SHAPES["llama_7b"], "meta")
    step = Step(batch_size=1, seq_length=tokens, autocast="bfloat16")
    return simulate_step(model, policy, step, find_device(_DEVICE)).time.forward


def measured(case: str, checkouts: dict[str, Path]) -> dict[str, Any]:
    """Return the figures of one case, in each checkout."""
    from benchmarks.cases import SHAPES
    from hf_ckpt.simulation.devices import find_device

    device, num_layers = find_device(_DEVICE), SHAPES["llama_7b"].num_hidden_layers
    policy, tokens = CASES[case]
    forward = forward_seconds(case)
    found: dict[str, Any] = {"policy": policy, "tokens": tokens, "forward_seconds": forward}
    for label, checkout in checkouts.items():
        # With one layer only, nothing would be trained below it.
        two, three = (counted_in(checkout, case, number) for number in (2, 3))
        if tokens == min(each for _, each in CASES.values()):
            four = counted_in(checkout, case, 4)
            assert four == {name: 2 * three[name] - two[name] for name in two}, (two, three, four)
        whole = {name: two[name] + (num_layers - 2) * (three[name] - two[name]) for name in two}
        moving = whole["num_bytes"] / (device.memory_bandwidth * device.bandwidth_efficiency)
        launching = whole["num_launches"] * device.kernel_seconds
        found[label] = whole | {
            "memory_seconds": moving,
            "share_of_forward": moving / forward,
            "share_of_forward_with_launches": (moving + launching) / forward,
        }
        print(case, label, found[label], flush=True)
    return found


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    parser.add_argument("--only", choices=CASES, action="append", help="count this case; may be given again")
    parser.add_argument("--count", choices=CASES, help="count this case in this process, and print it")
    parser.add_argument("--layers", type=int, default=1, help="so many, with --count")
    parser.add_argument("--checkout", type=Path, default=_ROOT, help="where hf_ckpt is imported from, with --count")
    add_out(parser, RESULTS / "proof_launches.json")


def run(options: Namespace) -> None:
    """Count all cases and write the result."""
    if options.count is not None:
        # Nothing of it is imported yet.
        sys.path.insert(0, str(options.checkout))
        print(json.dumps(counted(options.count, options.layers)))
        return
    checkouts = {"here": _ROOT}
    if options.against is not None:
        if not (options.against / "hf_ckpt").is_dir():
            raise WrongInputError(f"--against {options.against} holds no hf_ckpt. Name a checkout of this repository.")
        checkouts["before"] = options.against.resolve()
    cases = {case: measured(case, checkouts) for case in options.only or CASES}
    found = describe() | {"against": None, "device": _DEVICE, "cases": cases}
    if options.against is not None:
        # A result says which commit it was, not where that lay.
        found["command"] = found["command"].replace(str(options.against), "../before")
        git = ["git", "-C", str(options.against), "rev-parse", "HEAD"]
        found["against"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    write(options.out, found)


if __name__ == "__main__":
    sys.exit(main(__name__))
