"""Predicted and measured: peak memory and step time of real Trainer steps, with random weights made on the device.

What is measured and what is predicted are two things. `collect` measures: an entry of each configuration. Predictions
are made from the model on `meta`, with the device table and with a calibration of a few seconds, anywhere and at any
time; `--again` predicts anew for results that are there. One JSON is written for each configuration.

    python benchmarks/predict.py --device cuda                      # all of them, about half a minute each
    python benchmarks/predict.py --device cuda --only llama_7b      # those whose name has it
    python benchmarks/predict.py --again                            # with the code as it is now, on any machine
    python benchmarks/predict.py --device cpu --small               # tiny models of the same kinds
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.cases import (
    CONFIGURATIONS,
    SHAPES,
    Configuration,
    Shape,
    build_configuration,
    rows,
    small_configuration,
)
from benchmarks.environment import describe
from benchmarks.journal import NO_FIGURES, Entry, Journal, replace_text
from benchmarks.result_files import carry_out, text_of
from benchmarks.runner import RESULTS, add_device, add_out, main
from hf_ckpt import HFCkptCallback
from hf_ckpt.measure.calibrate import calibrate
from hf_ckpt.measure.profile import Clock, MemoryReader
from hf_ckpt.simulation.devices import Device, this_device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import StepMemory

GIB = 2**30
DEVICE_KEY = "device"
"""Of the entry with the device as the table has it and as a calibration finds it."""

_RATIOS = ("peak_ratio", "step_time_ratio", "step_time_ratio_with_calibration")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to measure.

    Args:
        device: `cpu` or `cuda`.
        is_small: tiny models of the same kinds.
        num_warmup: steps before the timed ones.
        num_steps: timed steps.
        calibration_s: seconds of measuring the device's rates.
    """

    device: str
    is_small: bool = False
    num_warmup: int = 3
    num_steps: int = 8
    calibration_s: float = 4.0

    def case(self, name: str) -> tuple[Configuration, Shape]:
        """Return a configuration and the shape of its model, both small where that is asked for."""
        configuration = CONFIGURATIONS[name]
        return small_configuration(configuration) if self.is_small else (configuration, SHAPES[configuration.shape])


def step_of(configuration: Configuration) -> Step:
    """Return the step in the words of the prediction."""
    return Step(
        batch_size=configuration.batch,
        seq_length=configuration.tokens,
        autocast="bfloat16",
        gradient_accumulation_steps=configuration.accumulation,
        optim="adamw_torch_fused",
    )


def predict(configuration: Configuration, shape: Shape, device: Device) -> dict[str, Any]:
    """Predict the step, and say how long that took."""
    start = time.perf_counter()
    model = build_configuration(configuration, shape, "meta")
    memory: StepMemory = simulate_step(model, configuration.policy, step_of(configuration), device)
    return {
        "device": device.name,
        "source": device.source,
        "peak_bytes": memory.peak_bytes,
        "peak_at": memory.peak_at.describe(),
        "by_category": {category.value: num_bytes for category, num_bytes in memory.by_category.items()},
        "step_time_ms": 1e3 * memory.time.total,
        "time_ms": {phase: 1e3 * seconds for phase, seconds in asdict(memory.time).items()},
        "num_flops": sum(memory.num_flops.values()),
        "prediction_took_s": time.perf_counter() - start,
    }


# --- Measuring. ---


class StepGauge(TrainerCallback):
    """Times each optimizer step, and watches the memory from the end of the warm-up on."""

    def __init__(self, place: torch.device, num_warmup: int) -> None:
        self._clock = Clock(place)
        self._num_warmup = num_warmup
        self._start = 0.0
        self.memory = MemoryReader(place)
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins."""
        self._clock.synchronize()
        if state.global_step == self._num_warmup:
            self.memory.reset_peak()
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step ends: the optimizer has stepped."""
        self._clock.synchronize()
        if state.global_step > self._num_warmup:
            self.seconds.append(time.perf_counter() - self._start)


def measure(configuration: Configuration, shape: Shape, device: str, num_warmup: int, num_steps: int) -> Entry:
    """Train a few steps with the Trainer."""
    place = torch.device(device)
    _forget_others(place)
    gauge = StepGauge(place, num_warmup)
    # On the CPU, where bytes are those of the process: what the interpreter and the libraries take.
    unrelated = gauge.memory.now()
    model = build_configuration(configuration, shape, device)
    # Without reentrant checkpointing no input gradients are needed, and the prediction has none. Nor has it the proof,
    # whose memory and buffers of the first step would stay in the allocator behind the warm-up.
    options: dict[str, Any] = {"input_require_grads": False, "prove": "off"}
    plugins = [] if configuration.policy is None else [HFCkptCallback(configuration.policy, **options)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=num_warmup + num_steps,
            per_device_train_batch_size=configuration.batch,
            gradient_accumulation_steps=configuration.accumulation,
            bf16=True,
            optim="adamw_torch_fused",
            use_cpu=device == "cpu",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=device != "cpu",
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows(configuration, shape, num_warmup + num_steps),
            data_collator=default_data_collator,
            callbacks=[*plugins, gauge],
        )
        loss = trainer.train().training_loss
    return {
        "peak_bytes": gauge.memory.peak() - unrelated,
        "step_time_ms_median": 1e3 * statistics.median(gauge.seconds),
        "step_time_ms_min": 1e3 * min(gauge.seconds),
        "step_time_ms_max": 1e3 * max(gauge.seconds),
        "num_warmup": num_warmup,
        "num_steps": num_steps,
        "mean_loss": loss,
    } | (reserved_bytes() if device == "cuda" else {})


def reserved_bytes() -> dict[str, int]:
    """Return what a CUDA process takes in addition to its tensors: what the reserve of the prediction stands for."""
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "bytes_outside_the_allocator": total - free - reserved,
        "device_bytes": total,
    }


def _forget_others(place: torch.device) -> None:
    """Let go what configurations before this one have left: a process of its own would not have it either."""
    gc.collect()
    if place.type == "cuda":
        # They are kept by thread and stream, and belong to what is measured.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        # Else a step would find its memory in the process, and its peak would be nothing.
        ctypes.CDLL(None).malloc_trim(0)


# --- Entries and results. ---


def collect(journal: Journal, names: list[str], options: Options) -> None:
    """Measure configurations, and the device's rates.

    Args:
        journal: keeps `device` and `measured/<name>`.
        names: of `CONFIGURATIONS`.
        options: how.

    Raises:
        OutOfTimeError: the journal's time is over.
        DeviceFaultError: the device does not answer any more.
    """
    journal.entry(DEVICE_KEY, partial(_rates, options))
    for name in names:
        configuration, shape = options.case(name)
        sizes = options.device, options.num_warmup, options.num_steps
        journal.entry(_key(name), partial(measure, configuration, shape, *sizes))


def _key(name: str) -> str:
    return f"measured/{name}"


def _rates(options: Options) -> Entry:
    return {"table": fields_of(this_device()), "calibrated": fields_of(calibrate(seconds=options.calibration_s))}


def assemble(
    journal: Journal, name: str, options: Options, prepared: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the result of one configuration that has been measured.

    Args:
        journal: with its entry and the device's.
        name: of the configuration.
        options: those of `collect`.
        prepared: `predicted`, `predicted_with_calibration` or both, as `predict` returns them; what is left out is not
            in the result, and `with_predictions` adds it.
    """
    configuration, shape = options.case(name)
    measured = {key: figure for key, figure in journal.entries[_key(name)].items() if key != "took_s"}
    rates = journal.entries.get(DEVICE_KEY, {})
    result = {
        "name": name,
        "is_small": options.is_small,
        "configuration": asdict(configuration),
        "shape": asdict(shape),
        "measured": measured,
        "table_device": rates.get("table"),
        "calibrated_device": rates.get("calibrated"),
    }
    return with_ratios(result | dict(prepared or {}))


def with_predictions(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with what is predicted now, and its ratios to what was measured."""
    configuration, shape = Configuration(**result["configuration"]), Shape(**result["shape"])
    devices = {"predicted": result["table_device"], "predicted_with_calibration": result["calibrated_device"]}
    made = {key: predict(configuration, shape, device_of(fields)) for key, fields in devices.items() if fields}
    return with_ratios(result | made)


def with_ratios(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the ratios of the predictions that it has to what was measured."""
    measured = result["measured"]
    ratios = {}
    if "peak_bytes" in measured:
        # Of tiny models on a CPU nothing may show.
        if "predicted" in result and measured["peak_bytes"] > 0:
            ratios["peak_ratio"] = result["predicted"]["peak_bytes"] / measured["peak_bytes"]
        for key, ending in (("predicted", ""), ("predicted_with_calibration", "_with_calibration")):
            if key in result:
                ratios[f"step_time_ratio{ending}"] = result[key]["step_time_ms"] / measured["step_time_ms_median"]
    return result | ratios


def fields_of(device: Device) -> dict[str, Any]:
    """Return a device as JSON types."""
    return asdict(device) | {"matmul_flops": dict(device.matmul_flops)}


def device_of(fields: dict[str, Any]) -> Device:
    """Return the device of `fields_of`, as it comes back from JSON."""
    capability = fields["capability"]
    return Device(**fields | {"capability": None if capability is None else tuple(capability)})


def line(result: dict[str, Any]) -> str:
    """Return a result, with its predictions, as one line of a table."""
    measured, predicted = result["measured"], result["predicted"]
    text = (
        f"{result['name']:<26} predicted {predicted['peak_bytes'] / GIB:7.2f} GiB {predicted['step_time_ms']:8.0f} ms"
    )
    if "peak_bytes" not in measured:
        return f"{text}; {next(measured[key] for key in NO_FIGURES if key in measured)}"
    ratios = [f"{result[key]:.3f}" for key in _RATIOS if key in result]
    return (
        f"{text}; measured {measured['peak_bytes'] / GIB:7.2f} GiB {measured['step_time_ms_median']:8.0f} ms; "
        f"ratios {' '.join(ratios)}"
    )


def measure_and_predict(name: str, options: Options, out: Path) -> dict[str, Any]:
    """Measure one configuration, predict it, and write its result into a folder."""
    kind = "small_" if options.is_small else ""
    return carry_out(
        out / f"predict_{kind}{name}_{options.device}.json",
        lambda journal: collect(journal, [name], options),
        lambda journal: with_predictions(assemble(journal, name, options)),
    )


def again(results: Path) -> None:
    """Predict anew for the results that are there; what was measured stays."""
    for path in sorted(results.glob("predict_*.json")):
        result = with_predictions(json.loads(path.read_text(encoding="utf-8")))
        result["predicted_in"] = describe()
        replace_text(path, text_of(result))
        print(line(result), flush=True)


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_device(parser, "cuda")
    parser.add_argument("--only", default="", help="configurations whose name has this")
    parser.add_argument("--small", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--again", action="store_true", help="predict anew for the results that are there")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--calibration", type=float, default=4.0, help="seconds of measuring the device's rates")
    add_out(parser, RESULTS, "folder of the results")


def run(asked: Namespace) -> None:
    """Measure the configurations asked for; predict them."""
    if asked.again:
        again(asked.out)
        return
    options = Options(
        device=asked.device,
        is_small=asked.small,
        num_warmup=asked.warmup,
        num_steps=asked.steps,
        calibration_s=asked.calibration,
    )
    for name in (name for name in CONFIGURATIONS if asked.only in name):
        print(line(measure_and_predict(name, options, asked.out)), flush=True)


if __name__ == "__main__":
    sys.exit(main(__name__))
