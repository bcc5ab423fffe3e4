"""Stage: does a run that really runs out of memory go on, and end as if it had not?

A model with adapters trains for a few steps. From the second one on a child process holds the card's memory, all but
what this step is to have, so that plain training does not fit: too little for its forward, or enough for that and not
for its backward. Another model, all of whose weights are trained, has room for its optimizer's first state and for a
part of the temporaries beside it. Losses and weights are held, bit by bit, against the same run without a limit.

Where memory ran out is read off what the recovery says, and a phase that was not met is not claimed. On a CPU, whose
memory nobody holds, one operator of that phase fails in the place of the child.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks import children
from benchmarks.cases import (
    LLAMAS,
    SHAPES,
    Configuration,
    Llama,
    build_configuration,
    build_llama,
    rows,
    small_configuration,
)
from benchmarks.journal import NO_FIGURES, Entry, Journal
from benchmarks.on_gpu.setting import Assembled, Setting
from benchmarks.repeatable import repeatable_kernels
from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import OutOfMemoryError
from tests.recovery.limits import FailingOperators, Phased, Steps

NUM_STEPS = 3
REFERENCE, REFERENCE_AGAIN, OPTIMIZER_REFERENCE = "reference", "reference_again", "optimizer_reference"
FORWARD, BACKWARD, OPTIMIZER, EXPANDABLE, AUTO = "forward", "backward", "optimizer", "expandable_segments", "auto"
_REFERENCES = (REFERENCE, REFERENCE_AGAIN, OPTIMIZER_REFERENCE)
MOST_TRIES = 4
"""Of amounts to leave, until memory runs out in backward."""
_LORA = Configuration("llama_1b", "lora", None, 2048, batch=2)
# Its weights are large enough that little is lost in the allocator's pieces.
_OPTIMIZED = replace(LLAMAS["llama_38m"], hidden=1024, ffn=2816, heads=8)
_OF_FORWARD = 0.6
"""Of what a plain forward takes, so much is left for it."""
_OF_TEMPORARIES = 0.6
"""Of the optimizer's temporaries, which are as large as the weights, so much is left beside its state."""
_WAIT_S = 20.0
_SKIPPED_ON_CPU = {"skipped": "this is of a CUDA device, and this is a CPU"}
_NOTHING_KNOWN = {"skipped": "the run without a limit has no figures, so nobody knows how much to leave"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Args:
        policy: of the plugin; None trains without it.
        ends_in: the phase that is to run out of memory; None takes nothing away.
        leave_bytes: what the child leaves for that phase; None where an operator fails instead.
        trains_all: all weights of the other model, in place of adapters.
        is_expandable: the allocator's segments can grow.
        warn_only: operators without a kernel that repeats itself run all the same.
    """

    policy: str | None = None
    ends_in: str | None = None
    leave_bytes: int | None = None
    trains_all: bool = False
    is_expandable: bool = False
    warn_only: bool = False


def collect(journal: Journal, setting: Setting) -> None:
    """Train without a limit, and under each.

    Args:
        journal: takes an entry for each run.
        setting: see there; small, or on a CPU, operators fail in place of a child that holds memory.
    """
    logging.getLogger("hf_ckpt").setLevel(logging.WARNING)

    def train(key: str, run: Run, needs_s: float = 6.0) -> Entry:
        return journal.entry(key, partial(trained, run, setting), needs_s=needs_s, limit_s=90)

    def runs_out(key: str, run: Run, leave_bytes: int | None, needs_s: float = 6.0) -> Entry:
        if _is_planted(setting):
            return train(key, run, needs_s)
        if leave_bytes is None:
            return journal.entry(key, partial(dict, _NOTHING_KNOWN))
        return train(key, replace(run, leave_bytes=leave_bytes), needs_s)

    whole = train(REFERENCE, Run(), 12.0)
    given = Run(policy="none", warn_only=bool(whole.get("warn_only")))
    in_forward = _leave_for(whole, "forward_bytes", _OF_FORWARD)
    runs_out(FORWARD, replace(given, ends_in=FORWARD), in_forward)
    # Where it differs from the first nothing that follows says anything.
    train(REFERENCE_AGAIN, Run(warn_only=given.warn_only))
    _try_backward(partial(runs_out, run=replace(given, ends_in=BACKWARD)), whole)
    other = train(OPTIMIZER_REFERENCE, Run(trains_all=True, warn_only=given.warn_only))
    weights = other.get("trained_bytes")
    beside = None if weights is None else int((2 + _OF_TEMPORARIES) * weights)
    runs_out(OPTIMIZER, replace(given, ends_in=OPTIMIZER, trains_all=True), beside)
    expandable = replace(given, ends_in=FORWARD, is_expandable=True)
    if setting.device == "cuda":
        runs_out(EXPANDABLE, expandable, in_forward)
    else:
        journal.entry(EXPANDABLE, partial(dict, _SKIPPED_ON_CPU))
    # Last: it simulates steps, which takes longer than to run them.
    runs_out(AUTO, replace(given, policy=AUTO, ends_in=FORWARD), in_forward, 15.0)


def _is_planted(setting: Setting) -> bool:
    # Of a small model's memory too much is lost in the allocator's pieces.
    return setting.device != "cuda" or setting.is_small


def _leave_for(whole: Entry, phase: str, share: float) -> int | None:
    """Return a share of what a phase of the second step takes beside what is there when the step begins."""
    phases = whole.get("phases") or {}
    return int(share * (phases[phase] - phases["begin_bytes"])) if phases else None


def _try_backward(runs_out: Any, whole: Entry) -> None:
    """Leave enough for the forward and not for the backward, by trial: pieces of memory cannot be predicted."""
    low = _leave_for(whole, "forward_bytes", 1.0)
    # Where nothing is lost in pieces it needs less than was reserved.
    high = _leave_for(whole, "reserved_bytes", 1.0)
    for number in range(1, MOST_TRIES + 1):
        leave = None if low is None or high is None else (low + high) // 2
        found = runs_out(f"{BACKWARD}/{number}", leave_bytes=leave)
        met = _met(found)
        if leave is None or met == BACKWARD or not NO_FIGURES.isdisjoint(found):
            return
        low, high = (low, leave) if met is None else (leave, high)


def _met(found: Entry) -> str | None:
    """Return the phase that ran out of memory first; None where none did."""
    said = found.get("ran_out_in") or [""]
    # "recomputation in backward" is one too.
    return next((phase for phase in (BACKWARD, OPTIMIZER, FORWARD) if phase in said[0]), None)


# --- One run. ---


def trained(run: Run, setting: Setting) -> Entry:
    """Train, and return losses, what the weights are like, and what became of the memory.

    Args:
        run: how.
        setting: see there.
    """
    try:
        with _allocator(run), repeatable_kernels(warn_only=run.warn_only):
            return {"warn_only": run.warn_only, **_trained(run, setting)}
    except RuntimeError as error:
        if run.ends_in is not None or run.warn_only or "deterministic" not in str(error):
            raise
    # Some operator here has no kernel that repeats itself. Whether it matters is seen in the losses.
    return trained(replace(run, warn_only=True), setting)


@contextmanager
def _allocator(run: Run) -> Iterator[None]:
    """Begin with an empty allocator, of the kind that is asked for, and leave it as it was found."""
    if not torch.cuda.is_available():
        yield
        return
    _clear()
    if run.is_expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        yield
    finally:
        _clear()
        if run.is_expandable:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def _clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class _Record:
    """What steps were like.

    Attributes:
        measures: memory of the second step too; the plugin reads the same counts.
        losses: of each step, that of its last run.
        num_runs: of steps, failed ones too.
        phases: memory of the second step.
    """

    measures: bool
    losses: dict[int, Tensor] = field(default_factory=dict)
    num_runs: int = 0
    phases: dict[str, int] = field(default_factory=dict)


class _Measured(Trainer):
    """A Trainer that keeps a record: in its class, for what a Trainer itself counts is brought back by a recovery."""

    record: ClassVar[_Record]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        record, step = self.record, int(self.state.global_step)
        record.num_runs += 1
        measures = record.measures and step == 1
        if measures:
            # What the first step has left in the allocator is no measure of what this one needs.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            record.phases["begin_bytes"] = torch.cuda.memory_allocated()
        loss = super().training_step(*args, **kwargs)
        if measures:
            record.phases["backward_bytes"] = torch.cuda.max_memory_allocated()
            record.phases["reserved_bytes"] = max(record.phases["reserved_bytes"], torch.cuda.max_memory_reserved())
        record.losses[step] = loss.detach().float()
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.record.measures and self.state.global_step == 1:
            self.record.phases["forward_bytes"] = torch.cuda.max_memory_allocated()
            self.record.phases["reserved_bytes"] = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
        return loss


class _Planted(Phased, _Measured):
    """The same, that tells a mode what part of a step runs."""


def _trained(run: Run, setting: Setting) -> Entry:
    before = _allocated_bytes(setting)
    model, data, batch = _built(run, setting)
    ours = None if run.policy is None else _plugin(run, setting)
    said = _Said()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=setting.device == "cpu",
            # Weights of 16 bits are adapted under autocast; those that are all trained have 32.
            bf16=setting.device == "cuda" and not run.trains_all,
            # Fused kernels have no temporaries that could find no room.
            **({"optim": "adamw_torch"} if run.trains_all else {}),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=batch,
            learning_rate=1e-3,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        record, taking = _Record(setting.device == "cuda" and ours is None), _Taking(run, ours)
        kind = type("Recorded", (_trainer(run, setting),), {"record": record})
        trainer = kind(model=model, args=args, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        for callback in (ours, taking):
            if callback is not None:
                trainer.add_callback(callback)
        stack.enter_context(_plant(run, setting, trainer))
        stack.callback(taking.give_back)
        stack.enter_context(said.heard())
        num_errors, began = _num_errors(), time.perf_counter()
        ended = ""
        try:
            trainer.train()
        except OutOfMemoryError as error:
            ended = str(error)
        seconds = time.perf_counter() - began
        after = _figures_after(trainer, model, setting)
    report = {} if ours is None else ours.report()
    return {
        **{key: value for key, value in asdict(run).items() if key != "warn_only"},
        "ended_early": ended,
        "losses": [float(loss) for _, loss in sorted(record.losses.items())],
        "allocated_before_bytes": before,
        **after,
        "ran_out_in": said.places(report.get("ckpt/oom_recovered", 0)),
        "said": said.lines,
        "num_reruns": None if ended else record.num_runs - NUM_STEPS,
        "num_recovered": report.get("ckpt/oom_recovered"),
        "num_plan_switches": report.get("ckpt/plan_switches"),
        # Those of the allocator, also where torch found room by itself after all.
        "num_allocator_errors": _num_errors() - num_errors,
        "plan_before": taking.plan_before,
        "plan_after": None if ours is None or ours.plan is None else ours.plan.describe(),
        "phases": record.phases,
        "taken": taking.facts,
        "seconds": seconds,
    }


def _figures_after(trainer: _Measured, model: nn.Module, setting: Setting) -> dict[str, Any]:
    """Return what the trained weights are like, and what is held besides them when the run is over."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    digest = hashlib.sha256()
    for name, weight in sorted(trained.items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    trainer.model.zero_grad()
    gc.collect()
    segments = torch.cuda.memory_snapshot() if setting.device == "cuda" else []
    return {
        "weights_sha256": digest.hexdigest(),
        "trained_bytes": sum(weight.nbytes for weight in trained.values()),
        "allocated_bytes": _allocated_bytes(setting),
        "num_segments": len(segments),
        "num_expandable_segments": sum(bool(segment.get("is_expandable")) for segment in segments),
    }


def _allocated_bytes(setting: Setting) -> int | None:
    return torch.cuda.memory_allocated() if setting.device == "cuda" else None


def _num_errors() -> int:
    return int(torch.cuda.memory_stats().get("num_ooms", 0)) if torch.cuda.is_available() else 0


def _built(run: Run, setting: Setting) -> tuple[nn.Module, list[dict[str, Tensor]], int]:
    """Return a model, the data of the run, and how many rows a batch has."""
    if run.trains_all:
        case = _optimized(setting)
        model, _ = build_llama(case, setting.device)
        ids = torch.randint(
            case.vocabulary, (NUM_STEPS * case.batch, case.tokens), generator=torch.Generator().manual_seed(0)
        )
        return model, [{"input_ids": row, "labels": row} for row in ids], case.batch
    configuration, shape = _LORA, SHAPES[_LORA.shape]
    if setting.is_small:
        configuration, shape = small_configuration(configuration)
    if setting.device == "cpu":
        configuration = replace(configuration, dtype="float32")
    model = build_configuration(configuration, shape, setting.device)
    return model, rows(configuration, shape, NUM_STEPS), configuration.batch


def _optimized(setting: Setting) -> Llama:
    return LLAMAS["llama_tiny"] if setting.is_small else _OPTIMIZED


def _plugin(run: Run, setting: Setting) -> HFCkptCallback:
    if run.policy != AUTO:
        return HFCkptCallback(run.policy, on_oom="escalate", quiet=True)
    # A CPU has no memory of its own to plan for.
    return HFCkptCallback(AUTO, quiet=True, **({"memory_budget": "1GiB"} if setting.device == "cpu" else {}))


# --- Memory is taken away. ---

_HOLDER = """
import ctypes, json, sys
cuda = ctypes.CDLL("libcuda.so.1")
def check(code):
    if code:
        print(json.dumps({"failed": f"CUDA's error {code}"}), flush=True)
        sys.exit(1)
device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
check(cuda.cuCtxSetCurrent(context))
leave, step, held = int(sys.argv[1]), 2**21, 0
def free_bytes():
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    return free.value
size = (free_bytes() - leave) // step * step
while size >= step:
    pointer = ctypes.c_uint64()
    if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)):
        size = size // 2 // step * step
    else:
        held += size
        size = min(size, (free_bytes() - leave) // step * step)
print(json.dumps({"held_bytes": held, "free_bytes": free_bytes(), "total_bytes": total.value}), flush=True)
sys.stdin.read()
"""
# A process that holds all but so many bytes of the device until it is ended. It needs no torch, and starts at once.


class _Taking(TrainerCallback):
    """Lets a child hold the device's memory in the part of the run that is to have too little.

    Args:
        run: says which, and how much is left.
        ours: the plugin, which comes before this.

    Attributes:
        facts: what the child holds, and what it leaves.
        plan_before: that the first step began with.
    """

    def __init__(self, run: Run, ours: HFCkptCallback | None) -> None:
        self._ours = ours
        self.facts: dict[str, Any] | None = None
        self.plan_before: str | None = None
        self._run = run
        self._child: subprocess.Popen[str] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ours is not None and self._ours.plan is not None and self.plan_before is None:
            self.plan_before = self._ours.plan.describe()
        # In the first step libraries take memory for good.
        if self._run.ends_in in (FORWARD, BACKWARD) and state.global_step == 1:
            self._take()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run.ends_in == OPTIMIZER and state.global_step == 0:
            self._take()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run.ends_in == OPTIMIZER:
            self.give_back()

    def _take(self) -> None:
        if self._run.leave_bytes is None:
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        words = [sys.executable, "-c", _HOLDER, str(self._run.leave_bytes)]
        self._child = children.start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        held = {"reserved_bytes": torch.cuda.memory_reserved(), "allocated_bytes": torch.cuda.memory_allocated()}
        self.facts = {**held, **(json.loads(line) if line else {"failed": "the child said nothing"})}
        if "failed" in self.facts:
            raise RuntimeError(f"no memory was taken: {self.facts['failed']}")

    def give_back(self) -> None:
        """End the child, and wait until its memory is free."""
        child, self._child = self._child, None
        if child is None:
            return
        children.end(child)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        until = time.monotonic() + _WAIT_S
        assert self.facts is not None
        while torch.cuda.mem_get_info()[0] < self.facts["held_bytes"] // 2 and time.monotonic() < until:
            time.sleep(0.01)


# --- A CPU, where an operator fails in place of that. ---

_OF_BACKWARD = 10**6
_AT = {FORWARD: {1: [40]}, BACKWARD: {1: [_OF_BACKWARD + 40]}, OPTIMIZER: {0: [0]}}
# Operators by optimizer step, as `_Failing` counts them.


class _Failing(FailingOperators):
    """Counts the operators of a backward from a million on."""

    def begin(self, phase: str | None) -> None:
        super().begin(phase)
        if phase == BACKWARD:
            self.number = max(self.number, _OF_BACKWARD)


def _trainer(run: Run, setting: Setting) -> type[_Measured]:
    is_counted = _is_planted(setting) and run.ends_in in (FORWARD, BACKWARD)
    return _Planted if is_counted else _Measured


def _plant(run: Run, setting: Setting, trainer: _Measured) -> Any:
    """Return a context in which an operator fails, where no child takes memory."""
    if run.ends_in is None or not _is_planted(setting):
        return nullcontext()
    mode = _Failing(_AT[run.ends_in])
    if isinstance(trainer, _Planted):
        trainer.mode = mode
    trainer.add_callback(Steps(mode, counts_optimizer=run.ends_in == OPTIMIZER))
    return mode


# --- What the recovery says. ---


class _Said(logging.Handler):
    """Keeps what the plugin warns of.

    Attributes:
        lines: its warnings.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listen while the block runs."""
        logger = logging.getLogger("hf_ckpt")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)

    def places(self, num_recovered: float) -> list[str]:
        """Return where memory ran out, in order. A step of the optimizer that is tried again whole is not warned of."""
        found = [match[1] for line in self.lines if (match := _PLACE.search(line))]
        return found or ["optimizer step"] * int(num_recovered)


_PLACE = re.compile(r"Out of memory in the (.+? of step \d+)")


# --- The result. ---


def assemble(journal: Journal, setting: Setting) -> Assembled:
    """Return what each run was like beside the one without a limit.

    Args:
        journal: with the entries.
        setting: that of `collect`.
    """
    entries = journal.entries
    references = {name: entries[name] for name in _REFERENCES if name in entries}
    cases = {
        name: _compared(found, references.get(OPTIMIZER_REFERENCE if name == OPTIMIZER else REFERENCE, {}))
        for name, found in entries.items()
        if name not in references
    }
    tries = [name for name in cases if name.startswith(BACKWARD)]
    result = {
        "device": setting.device,
        "is_small": setting.is_small,
        "num_steps": NUM_STEPS,
        "model": asdict(_LORA) if not setting.is_small else asdict(small_configuration(_LORA)[0]),
        "model_of_optimizer": asdict(_optimized(setting)) | {"dtype": "float32"},
        "memory_is_taken_by": "an operator that fails" if _is_planted(setting) else "a child process",
        "without_a_limit": references,
        "is_repeatable": _compared(references.get(REFERENCE_AGAIN, {}), references.get(REFERENCE, {})).get(
            "has_the_weights"
        ),
        "phases_met": {
            FORWARD: bool(cases.get(FORWARD, {}).get("ran_out_as_intended")),
            BACKWARD: any(cases[name].get("ran_out_as_intended") for name in tries),
            OPTIMIZER: bool(cases.get(OPTIMIZER, {}).get("ran_out_as_intended")),
        },
        "cases": cases,
    }
    yield f"recovery_{setting.device}.json", result


def _compared(found: Entry, whole: Entry) -> dict[str, Any]:
    if "losses" not in found or "losses" not in whole:
        return dict(found)
    after, before = found["allocated_bytes"], whole["allocated_bytes"]
    return {
        **found,
        "ran_out_as_intended": _met(found) == found["ends_in"],
        "has_the_losses": found["losses"] == whole["losses"],
        "has_the_weights": found["weights_sha256"] == whole["weights_sha256"],
        "more_allocated_bytes": None if after is None or before is None else after - before,
        "more_seconds": found["seconds"] - whole["seconds"],
    }
