"""The longest context, measured: QLoRA of Llama 3.1 8B with the allocator capped, in steps of a real Trainer.

The case is recipes/llama3_8b_qlora_longctx.yaml with random weights made on the device. Each trial is a process of its
own that trains one step at one length; lengths are tried from the predicted one on until the largest that trains and
the smallest that does not are within 1 % of each other. What was tried is in the result and is not tried again, so that
the command can be stopped and repeated: `--seconds` begins no trial after so long.

    python benchmarks/longctx.py --device cuda --part speed             # tokens per second at 8k to 64k tokens
    python benchmarks/longctx.py --device cuda --part limit --cap 24    # the longest row in 24 GiB, about 10 minutes
    python benchmarks/longctx.py --device cuda --part limit --cap 80    # the same in 80 GiB, with 4 of the 32 layers
    python benchmarks/longctx.py --device cpu --small                   # a tiny model; followed, and capped by a budget

A full step at 80 GiB would take half an hour: there 4 layers are run, under a cap that is smaller by what the
prediction gives the others, and the result holds both predictions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, default_data_collator

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.environment import describe
from benchmarks.longctx_cases import GIB, build, recipe_of, subject
from benchmarks.longctx_predict import Search
from benchmarks.predict import StepGauge, reserved_bytes
from hf_ckpt import HFCkptCallback, Plan
from hf_ckpt.finetune.estimate.least import least_plans
from hf_ckpt.finetune.estimate.limits import LENGTH_UNIT, with_length
from hf_ckpt.finetune.estimate.predict import Predictor
from hf_ckpt.finetune.estimate.subject import Subject
from hf_ckpt.memory.devices import CPU, Device, find_device
from hf_ckpt.memory.follow import follow_trainer
from hf_ckpt.memory.timeline import StepMemory

RESULTS = Path(__file__).parent / "results"
SPEED_LENGTHS = (8192, 16384, 32768, 65536)
FEW_LAYERS = 4
FEW_FROM_GIB = 48
"""Caps from which on a full step takes too long, and few layers stand for all."""
_SHORT = 8192
"""Tokens of a row that is quick to simulate."""
CLOSE = 0.01
"""Of the predicted length: trials that are nearer to each other end the search."""
OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True)
class Trial:
    """A step to train, in a process of its own.

    Args:
        length: tokens of the row.
        cap_bytes: that the allocator may take; 0 for no cap.
        plan: JSON of the plan, or a key of `OWN`.
        num_layers: of the model; None for all.
        num_steps: to train; the first one warms up where there are several.
        is_small: a tiny model on the CPU.
    """

    length: int
    cap_bytes: int
    plan: str
    num_layers: int | None = None
    num_steps: int = 1
    is_small: bool = False


# --- One trial. ---


def train(trial: Trial, device: str) -> dict[str, Any]:
    """Train the steps of a trial in this process, and return what they took."""
    place = torch.device(device)
    recipe = recipe_of(num_layers=trial.num_layers, is_small=trial.is_small)
    model = build(recipe, place)
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, trial.cap_bytes / total) if trial.cap_bytes else 1.0)
        torch.cuda.reset_peak_memory_stats()
    own = trial.plan if trial.plan in OWN else None
    plugin = None if own else HFCkptCallback(Plan.from_json(trial.plan))
    gauge = StepGauge(place, min(1, trial.num_steps - 1))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            **_arguments(recipe.training, trial, device), **OWN.get(own or "", {}), output_dir=folder
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=_rows(trial, int(model.config.get_text_config().vocab_size)),
            data_collator=default_data_collator,
            callbacks=[gauge] if plugin is None else [plugin, gauge],
        )
        if device != "cuda":
            memory = follow_trainer(trainer, at_step=trial.num_steps)
            return {"peak_bytes": memory.peak_bytes, "host_bytes": memory.host_bytes}
        loss = trainer.train().training_loss
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "seconds": gauge.seconds,
        "loss": loss,
        "figures": {} if plugin is None else plugin.report(),
    } | reserved_bytes()


OWN: dict[str, dict[str, Any]] = {
    "transformers": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
}
"""Arguments of the Trainer that ask for its own full checkpointing."""


def _arguments(training: Mapping[str, Any], trial: Trial, device: str) -> dict[str, Any]:
    taken = {key: training[key] for key in ("optim", "bf16", "learning_rate", "per_device_train_batch_size")}
    return taken | {
        "max_steps": trial.num_steps,
        "use_cpu": device != "cuda",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


def _rows(trial: Trial, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (trial.num_steps, trial.length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def in_a_process(trial: Trial, device: str, timeout_s: float | None) -> dict[str, Any]:
    """Run a trial in a process of its own; what runs out of memory takes nothing along."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "trial.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(asdict(trial)))
        words = [sys.executable, __file__, "--trial", str(asked), "--answer", str(answer), "--device", device]
        began = time.perf_counter()
        try:
            done = subprocess.run(words, env=environment, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return {"stopped_after_s": time.perf_counter() - began}
        if not answer.is_file():
            return {"failed": f"exit code {done.returncode}"}
        return {**json.loads(answer.read_text()), "wall_s": time.perf_counter() - began}


def _answer(asked: Path, answer: Path, device: str) -> None:
    try:
        read = train(Trial(**json.loads(asked.read_text())), device)
    except torch.OutOfMemoryError as error:
        read = {OUT_OF_MEMORY: str(error).partition(". ")[0]}
    answer.write_text(json.dumps(read))


# --- The search. ---


def next_length(tried: Mapping[int, bool], predicted: int) -> int | None:
    """Return the length to try next, or None where the end is known.

    Args:
        tried: lengths, and whether a step trained.
        predicted: the longest row as predicted; the first one to try.
    """
    unit = max(LENGTH_UNIT, int(predicted * CLOSE) // LENGTH_UNIT * LENGTH_UNIT)
    fits = max((length for length, is_good in tried.items() if is_good), default=0)
    fails = min((length for length, is_good in tried.items() if not is_good), default=0)
    if not tried:
        return predicted
    if not fails:
        return fits + 2 * unit
    if not fits:
        # Further away each time: nothing is known of where it begins to fit.
        below = fails - unit * 2 ** len(tried)
        return below if below > 0 else fails // 2 // LENGTH_UNIT * LENGTH_UNIT or None
    if fails - fits <= unit:
        return None
    return (fits + fails) // 2 // LENGTH_UNIT * LENGTH_UNIT


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a cap.

    Args:
        plan: that reaches furthest.
        length: the longest row of the whole model.
        peak_bytes: at that length.
        host_bytes: at that length.
        cap_bytes: that what is run may take; less than asked for where few layers stand for all.
        run_peak_bytes: of what is run, at that length.
        num_layers: of what is run; None for all.
    """

    plan: Plan
    length: int
    peak_bytes: int
    host_bytes: int
    cap_bytes: int
    run_peak_bytes: int
    num_layers: int | None = None


def predicted(cap_bytes: int, device: Device, *, num_layers: int | None, is_small: bool) -> Prediction:
    """Predict the longest row under a cap, and what a few layers need at that length.

    Args:
        cap_bytes: the step may use all of it.
        device: where.
        num_layers: of what is run; None for all.
        is_small: the tiny model.
    """
    whole = Predictor(subject(recipe_of(is_small=is_small)), device)
    plan = next(least_plans(whole.subject))
    search = Search(lambda tokens: _at(whole, plan, tokens).peak_bytes, _SHORT // 16 if is_small else _SHORT)
    best = search.longest(cap_bytes)
    memory = _at(whole, plan, best.number)
    told = Prediction(plan, best.number, memory.peak_bytes, memory.host_bytes, cap_bytes, memory.peak_bytes)
    if num_layers is None:
        return told
    few = Predictor(subject(recipe_of(num_layers=num_layers, is_small=is_small)), device)
    plan = _of_few(plan, few.subject)
    of_few = _at(few, plan, best.number).peak_bytes
    less = memory.peak_bytes - of_few
    return replace(told, plan=plan, cap_bytes=cap_bytes - less, run_peak_bytes=of_few, num_layers=num_layers)


def _at(predictor: Predictor, plan: Plan, length: int) -> StepMemory:
    return predictor.memory(plan, with_length(predictor.subject.step, max(length, LENGTH_UNIT)))


def _of_few(plan: Plan, few: Subject) -> Plan:
    """Return the plan for a model with fewer layers: the first ones, and the last one, as they are."""
    (stack,) = plan.stacks
    num_layers = len(few.stacks[0].layers)
    return replace(plan, stacks=(replace(stack, layers=(*stack.layers[: num_layers - 1], stack.layers[-1])),))


def find(told: Prediction, result: dict[str, Any], path: Path, options: argparse.Namespace) -> None:
    """Try lengths until the end is known or time is over; the result is written after each."""
    began = time.perf_counter()
    trials: list[dict[str, Any]] = result["trials"]
    while time.perf_counter() - began < options.seconds:
        tried = {trial["length"]: "peak_bytes" in trial and _fits(trial, told, options) for trial in trials}
        length = next_length(tried, told.length)
        if length is None:
            result["longest"] = max(length for length, is_good in tried.items() if is_good)
            break
        trial = Trial(length, told.cap_bytes, told.plan.to_json(), told.num_layers, is_small=options.small)
        found = _measured(trial, options, options.seconds - (time.perf_counter() - began))
        if "stopped_after_s" in found:
            print(f"{length:,} tokens take longer than the {options.seconds} s that are left: --seconds more")
            break
        trials.append({"length": length, **found})
        write(result, path)
        print(f"{length:,} tokens: {json.dumps({key: found[key] for key in found if key != 'figures'})}", flush=True)
    write(result, path)


def _fits(trial: Mapping[str, Any], told: Prediction, options: argparse.Namespace) -> bool:
    # Nothing caps memory on the CPU but the comparison.
    return options.device == "cuda" or int(trial["peak_bytes"]) <= told.cap_bytes


def _measured(trial: Trial, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    if options.small:
        return train(trial, options.device)
    return in_a_process(trial, options.device, seconds)


# --- Parts. ---


def limit(options: argparse.Namespace) -> None:
    """Find the longest row under a cap."""
    cap = int(options.cap * GIB)
    num_layers = FEW_LAYERS if options.cap >= FEW_FROM_GIB else None
    device = CPU if options.device == "cpu" else find_device(options.predicts_for)
    path = _path(options, f"limit_{options.cap:g}gib")
    result = _resumed(path)
    if "predicted" not in result:
        # Some minutes, which the next call need not spend again.
        told = predicted(cap, device, num_layers=num_layers, is_small=options.small)
        result["predicted"] = {**asdict(told), "plan": json.loads(told.plan.to_json())}
        write(result, path)
    read = result["predicted"]
    told = Prediction(**{**read, "plan": Plan.from_json(json.dumps(read["plan"]))})
    print(f"predicted: {told.length:,} tokens, {told.peak_bytes / GIB:.2f} GiB, host {told.host_bytes / GIB:.1f} GiB")
    find(told, result, path, options)


def speed(options: argparse.Namespace) -> None:
    """Measure tokens per second, with the fastest plan for the cap and with transformers' own full checkpointing."""
    cap = int(options.cap * GIB)
    path = _path(options, f"speed_{options.cap:g}gib")
    result = _resumed(path)
    began = time.perf_counter()
    for length, name in ((length, name) for length in SPEED_LENGTHS for name in ("hf_ckpt", *OWN)):
        left = options.seconds - (time.perf_counter() - began)
        if any((trial["length"], trial["name"]) == (length, name) for trial in result["trials"]):
            continue
        if left <= 0:
            break
        trial, told = _speed_trial(length, name, cap, options)
        found = _measured(trial, options, left)
        if "stopped_after_s" in found:
            break
        if "seconds" in found:
            found["tokens_per_sec"] = length / statistics.median(found["seconds"])
        result["trials"].append({"length": length, "name": name, **told, **found})
        write(result, path)
        print(f"{length:,} tokens, {name}: {found.get('tokens_per_sec', found)}", flush=True)


def _speed_trial(length: int, name: str, cap: int, options: argparse.Namespace) -> tuple[Trial, dict[str, Any]]:
    if name in OWN:
        return Trial(length, cap, name, num_steps=3), {}
    case = subject(recipe_of())
    step = with_length(case.step, length)
    planned = Predictor(replace(case, step=step), find_device(options.predicts_for)).planned(cap)
    told = {
        "plan": planned.plan.summary().splitlines(),
        "predicted_peak_bytes": planned.memory.peak_bytes,
        "predicted_seconds": planned.memory.time.total,
    }
    return Trial(length, cap, planned.plan.to_json(), num_steps=3), told


def _path(options: argparse.Namespace, what: str) -> Path:
    small = "small_" if options.small else ""
    folder: Path = options.results
    return folder / f"longctx_{small}{what}_{options.device}.json"


def _resumed(path: Path) -> dict[str, Any]:
    if path.is_file():
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return read
    return {"environment": describe(), "trials": []}


def write(result: dict[str, Any], path: Path) -> None:
    """Write the result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main(words: list[str] | None = None) -> None:
    """Measure the part asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--part", choices=("limit", "speed"), default="limit")
    parser.add_argument("--cap", type=float, default=24.0, help="GiB that the allocator may take")
    parser.add_argument("--seconds", type=float, default=540.0, help="after so long no trial begins, and none goes on")
    parser.add_argument("--predicts-for", default="h200", help="the device in the words of the prediction")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--trial", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.trial is not None:
        _answer(options.trial, options.answer, options.device)
    elif options.part == "speed":
        speed(options)
    else:
        limit(options)


if __name__ == "__main__":
    main()
