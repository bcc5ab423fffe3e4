"""Predicted beside measured: peak memory and step time of real Trainer steps, with random weights made on the device.

Each configuration runs in a process of its own and writes one JSON. The prediction is made from the model on `meta`,
with the device table and with a calibration of a few seconds; `--again` predicts anew for results that are there,
without the device.

    python benchmarks/predict.py --device cuda                      # all of them, about half a minute each
    python benchmarks/predict.py --device cuda --only llama_7b      # those whose name has it
    python benchmarks/predict.py --again                            # with the code as it is now, on any machine
    python benchmarks/predict.py --device cpu --small               # tiny models of the same kinds
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_ckpt import HFCkptCallback
from hf_ckpt.memory.calibrate import calibrate
from hf_ckpt.memory.devices import Device, this_device
from hf_ckpt.memory.gauges import Clock, Memory
from hf_ckpt.memory.simulate import simulate_step
from hf_ckpt.memory.step import Step
from hf_ckpt.memory.timeline import StepMemory

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.environment import describe
from benchmarks.predict_cases import CONFIGURATIONS, SHAPES, Configuration, Shape, build, rows, small

RESULTS = Path(__file__).parent / "results"
GIB = 2**30


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
    model = build(configuration, shape, "meta")
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
        self.memory = Memory(place)
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins."""
        self._clock.synchronize()
        if state.global_step == self._num_warmup:
            self.memory.forget_peak()
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step ends: the optimizer has stepped."""
        self._clock.synchronize()
        if state.global_step > self._num_warmup:
            self.seconds.append(time.perf_counter() - self._start)


def measure(configuration: Configuration, shape: Shape, device: str, num_warmup: int, num_steps: int) -> dict[str, Any]:
    """Train a few steps with the Trainer."""
    place = torch.device(device)
    gauge = StepGauge(place, num_warmup)
    # On the CPU, where bytes are those of the process: what the interpreter and the libraries take.
    unrelated = gauge.memory.now()
    model = build(configuration, shape, device)
    # Without reentrant checkpointing no input gradients are needed, and the prediction has none.
    plugins = [] if configuration.policy is None else [HFCkptCallback(configuration.policy, input_require_grads=False)]
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
    """Return what a CUDA process takes beside its tensors: what the reserve of the prediction stands for."""
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "bytes_outside_the_allocator": total - free - reserved,
        "device_bytes": total,
    }


# --- One result. ---


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one configuration and predict it, with the device table and with measured rates."""
    configuration, shape = CONFIGURATIONS[name], SHAPES[CONFIGURATIONS[name].shape]
    if options.small:
        configuration, shape = small(configuration)
    measured: dict[str, Any] = {}
    try:
        measured = measure(configuration, shape, options.device, options.warmup, options.steps)
    except torch.OutOfMemoryError as error:
        measured["out_of_memory"] = str(error).partition(". ")[0]
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    calibrated = calibrate(seconds=options.calibration)
    result = {
        "environment": describe(),
        "name": name,
        "is_small": options.small,
        "configuration": asdict(configuration),
        "shape": asdict(shape),
        "measured": measured,
        "table_device": fields_of(this_device()),
        "calibrated_device": fields_of(calibrated),
    }
    return with_predictions(result)


def with_predictions(result: dict[str, Any]) -> dict[str, Any]:
    """Add what is predicted, and its ratios to what was measured."""
    configuration, shape = Configuration(**result["configuration"]), Shape(**result["shape"])
    devices = {"predicted": result["table_device"], "predicted_with_calibration": result["calibrated_device"]}
    for key, fields in devices.items():
        result[key] = predict(configuration, shape, device_of(fields))
    measured = result["measured"]
    if "peak_bytes" in measured:
        result["peak_ratio"] = result["predicted"]["peak_bytes"] / measured["peak_bytes"]
        result["step_time_ratio"] = result["predicted"]["step_time_ms"] / measured["step_time_ms_median"]
        calibrated = result["predicted_with_calibration"]["step_time_ms"]
        result["step_time_ratio_with_calibration"] = calibrated / measured["step_time_ms_median"]
    return result


def fields_of(device: Device) -> dict[str, Any]:
    """Return a device as JSON types."""
    return asdict(device) | {"matmul_flops": dict(device.matmul_flops)}


def device_of(fields: dict[str, Any]) -> Device:
    """Return the device of `fields_of`, as it comes back from JSON."""
    capability = fields["capability"]
    return Device(**fields | {"capability": None if capability is None else tuple(capability)})


def line(result: dict[str, Any]) -> str:
    """Return a result as one line of a table."""
    measured, predicted = result["measured"], result["predicted"]
    text = (
        f"{result['name']:<26} predicted {predicted['peak_bytes'] / GIB:7.2f} GiB {predicted['step_time_ms']:8.0f} ms"
    )
    if "peak_bytes" not in measured:
        return f"{text}; {measured['out_of_memory']}"
    return (
        f"{text}; measured {measured['peak_bytes'] / GIB:7.2f} GiB {measured['step_time_ms_median']:8.0f} ms; ratios "
        f"{result['peak_ratio']:.3f} {result['step_time_ratio']:.2f} {result['step_time_ratio_with_calibration']:.2f}"
    )


def write(result: dict[str, Any], out: Path) -> None:
    """Write one JSON, and say what it holds."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(line(result), flush=True)


def again(results: Path) -> None:
    """Predict anew for the results that are there; what was measured stays."""
    for path in sorted(results.glob("predict_*.json")):
        result = with_predictions(json.loads(path.read_text()))
        result["predicted_in"] = describe()
        write(result, path)


def main() -> None:
    """Run the configurations asked for, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", default="", help="configurations whose name has this")
    parser.add_argument("--name", choices=CONFIGURATIONS, help="this one, in this process")
    parser.add_argument("--small", action="store_true", help="tiny models of the same kinds")
    parser.add_argument("--again", action="store_true", help="predict anew for the results that are there")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--calibration", type=float, default=4.0, help="seconds of measuring the device's rates")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.again:
        again(options.results)
    elif options.name is not None:
        kind = "small_" if options.small else ""
        write(run(options.name, options), options.results / f"predict_{kind}{options.name}_{options.device}.json")
    else:
        names = [name for name in CONFIGURATIONS if options.only in name]
        failed = [name for name in names if subprocess.run([sys.executable, *sys.argv, "--name", name]).returncode]
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
