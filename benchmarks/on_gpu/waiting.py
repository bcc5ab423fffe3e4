"""Stage: frozen weights that wait on the host. Is the step the same, as small as predicted, and how much slower?

Eight layers of Llama 3.1 8B with LoRA, in bfloat16, and the input embedding by itself. Late copies are checked against
a step with all weights on the device, on kernels that repeat themselves; the control leaves out the wait for a copy,
and must be seen. On the CPU a copy stream is imitated, and small twins run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

import hf_ckpt
from benchmarks.cases import SHAPES, Case, batch_of, build
from benchmarks.journal import Entry, Journal
from benchmarks.offload import SlowCuda
from benchmarks.on_gpu.setting import Assembled, Setting
from benchmarks.predict import DEVICE_KEY, device_of, fields_of
from benchmarks.repeatable import repeatable_kernels
from benchmarks.step_costs import Bench, step, synchronize, timed
from hf_ckpt.regions.offload.cuda import CudaWire
from hf_ckpt.simulation.devices import CPU, this_device
from hf_ckpt.simulation.simulator import simulate_step
from tests.late_copies import Late

MODES = ("none", "full", "selective")
TOKENS = (512, 2048, 8192)
WAYS: dict[str, dict[str, str]] = {
    "plain": {},
    "waiting": {"weights": "cpu", "embedding": "device"},
    "with_embedding": {"weights": "cpu", "embedding": "cpu"},
    "plain_again": {},
}
"""The plan without comes first and last: its two times tell how far the machine can be trusted."""
CONTROL = "without_wait"
_EXACT_LAYERS, _EXACT_TOKENS, _EXACT_VOCABULARY = 4, 512, 1024
_NUM_EXACT, _NUM_WARMUP, _NUM_STEPS = 2, 2, 3


def case_of(tokens: int, setting: Setting, **config: Any) -> Case:
    """Return layers of Llama 3.1 8B with LoRA, and rows of so many tokens; the twin where the setting is small."""
    fields = asdict(SHAPES["llama_8b"]) | {"num_hidden_layers": 8} | config
    title = f"8 layers of Llama 3.1 8B, LoRA, {tokens:,} tokens"
    case = Case(name="llama31_8b_layers", title=title, config=fields, method="lora", batch=1, tokens=tokens, scale=16)
    return case.twin() if setting.is_small else case


def collect(journal: Journal, setting: Setting) -> None:
    """Check copies, and time steps with weights on the host and without.

    Args:
        journal: keeps `exact/<mode>`, `device`, and `tokens_<n>/<way>`.
        setting: see there.
    """
    exact = _Exact(setting)
    journal.entry("exact/not_repeatable", exact.not_repeatable)
    for mode in MODES:
        journal.entry(f"exact/{mode}", partial(exact.late, mode, WAYS["waiting"]))
    journal.entry("exact/with_embedding", partial(exact.late, "full", WAYS["with_embedding"]))
    journal.entry(f"exact/{CONTROL}", exact.without_wait)
    del exact
    journal.entry(DEVICE_KEY, lambda: fields_of(CPU if setting.device == "cpu" else this_device()))
    for tokens in TOKENS[: 1 if setting.is_small else None]:
        case = case_of(tokens, setting)
        bench = Bench(partial(_built, case, setting.device))
        for way in WAYS:
            journal.entry(_key(tokens, way), partial(_steps, bench, case, way, setting))


def _key(tokens: int, way: str) -> str:
    return f"tokens_{tokens}/{way}"


def _built(case: Case, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    return build(case, device), batch_of(case, device)


# --- Exact. ---


class _Exact:
    """A step on kernels that repeat themselves, and how many of its gradients change where weights come late.

    Args:
        setting: of the run.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    @cached_property
    def _expected(self) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
        vocabulary = {"vocab_size": _EXACT_VOCABULARY * (16 if self._setting.is_small else 1)}
        case = case_of(_EXACT_TOKENS, self._setting, num_hidden_layers=_EXACT_LAYERS, **vocabulary)
        # Fused attention has a backward that does not repeat itself.
        model, inputs = _built(replace(case, attention="eager"), self._setting.device)
        return model, inputs, _gradients(model, inputs)

    def not_repeatable(self) -> Entry:
        """Count without a plan: where these change, nothing follows from the others."""
        with repeatable_kernels(warn_only=True):
            model, inputs, expected = self._expected
            return {"num_changed": _num_changed(expected, model, inputs), "num_gradients": len(expected)}

    def late(self, mode: str, way: dict[str, str]) -> Entry:
        """Count with weights on the host, whose copies begin late.

        Counted here, so that a copy that goes wrong is a number: the first step's proof would end it with an error.
        """
        with repeatable_kernels(warn_only=True):
            model, inputs, expected = self._expected
            with hf_ckpt.apply(model, mode, prove="off", **way) as applied:
                waiting = applied.waiting
                assert waiting is not None, "the plan says so"
                waiting.use_wire(CudaWire(Late() if self._setting.device == "cpu" else SlowCuda()))
                return {
                    "num_changed": _num_changed(expected, model, inputs),
                    "num_fetched": waiting.num_fetched,
                    "host_bytes": waiting.host_bytes,
                }

    def without_wait(self) -> Entry:
        """Count where nobody waits for a copy: shows that a late one would be seen."""
        with _no_wait():
            return self.late("full", WAYS["waiting"])


@contextmanager
def _no_wait() -> Iterator[None]:
    wait = CudaWire.wait
    CudaWire.wait = lambda wire, copy, device: None
    try:
        yield
    finally:
        CudaWire.wait = wait


def _gradients(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    step(model, inputs)
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def _num_changed(expected: dict[str, Tensor], model: nn.Module, inputs: dict[str, Tensor]) -> int:
    steps = (_gradients(model, inputs) for _ in range(_NUM_EXACT))
    return sum(not torch.equal(each, found[name]) for found in steps for name, each in expected.items())


# --- Time and memory. ---


def _steps(bench: Bench[Any], case: Case, way: str, setting: Setting) -> Entry:
    model, inputs = bench.built
    is_cuda = setting.device == "cuda"
    autocast = nullcontext() if case.autocast is None else torch.autocast(setting.device, torch.bfloat16)
    with hf_ckpt.apply(model, "full", prove="off", **WAYS[way]) as applied, autocast:
        for _ in range(_NUM_WARMUP):
            step(model, inputs)
        if is_cuda:
            synchronize(setting.device)
            torch.cuda.reset_peak_memory_stats()
        steps = [timed(model, inputs, setting.device) for _ in range(_NUM_STEPS)]
        found: Entry = {"losses": [loss for loss, _ in steps], "seconds": [seconds for _, seconds in steps]}
        if is_cuda:
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["host_bytes"] = 0 if applied.waiting is None else applied.waiting.host_bytes
    return found


# --- The result. ---


def assemble(journal: Journal, setting: Setting) -> Assembled:
    """Return what changed, and for each length times and peaks with and without, beside what is predicted."""
    exact = {key.removeprefix("exact/"): entry for key, entry in journal.entries.items() if key.startswith("exact/")}
    lengths = [_length(journal, tokens, setting) for tokens in TOKENS if _key(tokens, "plain") in journal.entries]
    yield f"waiting_weights_{setting.device}.json", {"exact": exact, "lengths": lengths}


def _length(journal: Journal, tokens: int, setting: Setting) -> dict[str, Any]:
    entries = {way: journal.entries.get(_key(tokens, way), {}) for way in WAYS}
    predicted = _predicted(case_of(tokens, setting), journal)
    peaks = {way: entry["peak_bytes"] for way, entry in entries.items() if "peak_bytes" in entry}
    medians = {way: statistics.median(entry["seconds"]) for way, entry in entries.items() if "seconds" in entry}
    found: dict[str, Any] = {"tokens": tokens, "contenders": entries, "predicted": predicted}
    if predicted is not None:
        found["peak_ratios"] = {
            way: predicted[way]["peak_bytes"] / peak for way, peak in peaks.items() if way in predicted
        }
    if medians.keys() == WAYS.keys():
        base = statistics.mean((medians["plain"], medians["plain_again"]))
        found |= {"step_time_ratio": medians["waiting"] / base, "noise": medians["plain_again"] / medians["plain"]}
    return found


def _predicted(case: Case, journal: Journal) -> dict[str, Any] | None:
    """Return what the code as it is now predicts for the device that measured; None where that is not known."""
    fields = journal.entries.get(DEVICE_KEY, {})
    if "capability" not in fields:
        return None
    device = device_of({key: value for key, value in fields.items() if key != "took_s"})
    model, found = build(case, "meta"), {}
    for way in WAYS:
        plan = hf_ckpt.Policy.parse("full", **WAYS[way])
        memory = simulate_step(model, plan, replace(case.step, optim=None), device)
        found[way] = {
            "peak_bytes": memory.peak_bytes,
            "host_bytes": memory.host_bytes,
            "step_time_ms": 1e3 * memory.time.total,
        }
    return found
