"""Figures of a training run: peak memory, tokens, time and the recomputed share; and how they reach its reporters."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from hf_ckpt.patch.apply import Applied
from hf_ckpt.patch.tileable_modules import tiled_modules
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.policy.revolve import reruns
from hf_ckpt.structure.attention_and_ffn import Shapes, parameter_shapes
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.trainer.device_peak import DevicePeak
from hf_ckpt.trainer.input_gradients import input_embeddings
from hf_ckpt.trainer.part import ChangePlan, Part

logger = logging.getLogger(__name__)

GIB = 2**30

# Operators that the linear layers of a model are made of.
_PRODUCTS = ("mm", "addmm", "linear")


class StepClock(Part):
    """Counts the tokens that training steps see and the seconds they take."""

    # Tokens are counted at the model's input embeddings, padding included. The first step is left out: it pays for
    # allocations and for the check of the plan.

    def __init__(self) -> None:
        self.num_tokens = 0
        self.seconds = 0.0
        self._num_steps = 0
        self._tokens_in_step = 0
        self._started: float | None = None

    def place_hooks(self, model: nn.Module, change_plan: ChangePlan) -> Iterable[RemovableHandle]:
        embeddings = input_embeddings(model)
        return () if embeddings is None else [embeddings.register_forward_pre_hook(self._count)]

    def begin_step(self) -> None:
        self._tokens_in_step = 0
        self._started = time.perf_counter()

    def end_step(self) -> None:
        if self._started is None:
            return
        if self._num_steps:
            self.seconds += time.perf_counter() - self._started
            self.num_tokens += self._tokens_in_step
        self._num_steps += 1
        self._started = None

    def _count(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            # A changing count would be compiled in, again at each step.
            return
        if module.training and torch.is_grad_enabled() and args and isinstance(args[0], Tensor):
            self._tokens_in_step += args[0].numel()


def run_figures(applied: Applied, peak: DevicePeak, clock: StepClock, predicted_bytes: int) -> dict[str, float]:
    """Return what the reporters get of a run, by the names in the docstring of `HFCkptCallback`."""
    plan = applied.plan
    figures: dict[str, float] = {f"num_layers_{mode}": plan.count(mode) for mode in Mode if plan.count(mode)}
    figures["recomputed_share"] = recomputed_share(plan, applied.stacks)
    stats = [offloader.stats for offloader in applied.offloaders]
    figures.update(_peak_memory(peak.highest()))
    if stats:
        figures["host_peak_gib"] = sum(each.peak_host_bytes for each in stats) / GIB
        figures["offloaded_gib"] = sum(each.bytes_out for each in stats) / GIB
        figures["offload_wait_s"] = sum(each.seconds_waited for each in stats)
        # The least share of theirs.
        figures["offloaded_share"] = min(each.fraction for each in stats)
    if applied.waiting is not None:
        on_host = applied.waiting.host_bytes / GIB
        figures["host_peak_gib"] = figures.get("host_peak_gib", 0.0) + on_host
        figures["waiting_weights_gib"] = on_host
    if predicted_bytes:
        figures["predicted_peak_gib"] = predicted_bytes / GIB
    if clock.num_tokens:
        figures["tokens_per_sec"] = clock.num_tokens / clock.seconds
    return {f"ckpt/{name}": value for name, value in figures.items()}


def _peak_memory(of_device: int | None) -> dict[str, float]:
    """Return the highest memory so far: of the device's allocator where one counts, of the process otherwise."""
    # One entry; none where the system does not report it.
    if of_device is not None:
        return {"peak_allocated_gib": of_device / GIB}
    try:
        import resource
    except ImportError:
        logger.info("The peak memory of the process is not known: this system does not tell it (no module resource).")
        return {}

    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}


def recomputed_share(plan: Plan, stacks: Sequence[Stack]) -> float:
    """Return the share of the layers' weights whose forward runs again in backward, counted once per extra run."""
    # A nested segment runs its layers twice more, with snapshots as often as the binomial schedule says, and a layer
    # under `full` runs twice more what it runs in tiles: the share can exceed 1. Weights stand for the work of a
    # forward: the matrix products of a layer take time in proportion to them, and what `selective` recomputes between
    # them has next to none.
    each = [
        (entry, layer, times)
        for planned, stack in zip(plan.stacks, stacks, strict=True)
        for entry, layer, times in zip(planned.layers, stack.layers, _reruns(planned.layers), strict=True)
    ]
    shapes: Shapes = {}
    for stack in stacks:
        shapes |= parameter_shapes(stack.home)
    total = sum(_num_weights(layer.module, shapes) for _, layer, _ in each)
    return sum(_recomputed_weights(*of_layer, shapes) for of_layer in each) / total if total else 0.0


def describe_recomputed(share: float) -> str:
    """Return what `recomputed_share` says, in words.

    Example:
        >>> describe_recomputed(0.5), describe_recomputed(1.25)
        ("50% of the layers' weights run forward twice", "the layers' weights run forward 2.25 times on average")
    """
    if share > 1:
        return f"the layers' weights run forward {1 + share:.2f} times on average"
    return f"{share:.0%} of the layers' weights run forward twice"


def _reruns(entries: Sequence[LayerPlan]) -> Iterator[int]:
    """Yield how often each layer runs again where it does so as a whole."""
    for _, run in groupby(entries, key=lambda entry: entry.segment):
        members = list(run)
        snapshots = members[0].snapshots
        again = (2 if entry.nested else 1 for entry in members)
        yield from again if snapshots is None else reruns(len(members), snapshots)


def _recomputed_weights(entry: LayerPlan, layer: Layer, times: int, shapes: Shapes) -> int:
    tiled = tiled_modules(layer) if entry.tiles is not None else []
    # Tiles are recomputed by themselves, besides what the mode recomputes around them.
    in_tiles = _num_below(layer, tiled, shapes)
    whole = _num_weights(layer.module, shapes)
    attention = _num_below(layer, layer.attention, shapes)
    match entry.mode:
        case Mode.NONE:
            return in_tiles
        case Mode.FULL:
            return in_tiles + whole * times
        case Mode.SELECTIVE:
            return in_tiles + _unsaved_weights(entry, layer, shapes)
        case Mode.SELECTIVE_ATTENTION:
            return in_tiles + whole
        case Mode.ATTENTION:
            return in_tiles + attention
        case Mode.FFN if layer.ffn_is_inline:
            return in_tiles + whole - attention
        case Mode.FFN:
            return in_tiles + _num_below(layer, [name for name in layer.ffn if name not in tiled], shapes)


def _unsaved_weights(entry: LayerPlan, layer: Layer, shapes: Shapes) -> int:
    """Return the weights of the products whose outputs mode `selective` does not keep."""
    if not entry.save or any(name.rpartition(".")[2] in _PRODUCTS for name in entry.save):
        return 0
    kept = [name for name, _ in layer.module.named_modules() if any(fnmatchcase(name, saved) for saved in entry.save)]
    outermost = [name for name in kept if not any(name.startswith(f"{other}.") for other in kept)]
    return _num_weights(layer.module, shapes) - _num_below(layer, outermost, shapes)


def _num_below(layer: Layer, names: Iterable[str], shapes: Shapes) -> int:
    return sum(_num_weights(layer.submodule(name), shapes) for name in names)


def _num_weights(module: nn.Module, shapes: Shapes) -> int:
    return sum(shape.numel() for child in module.modules() for shape in shapes.get(child, {}).values())


def send_to_reporters(
    figures: Mapping[str, float],
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    model: nn.Module,
) -> None:
    """Log figures through the reporters that the run names in `report_to`."""
    if not state.is_world_process_zero:
        return
    # A user's callback sees `on_log` after the reporters have read the logs, so that figures added there arrive
    # nowhere. Reporters of our own write to the same run: TensorBoard reads all event files of a folder as one run, the
    # others join the run that is active in the process. TensorBoard shows the figures below `train/`.
    for reporter_class in get_reporting_integration_callbacks(args.report_to):  # type: ignore[no-untyped-call]
        if reporter_class.on_log is TrainerCallback.on_log:
            # It takes no figures; a second one would be made for nothing.
            continue
        reporter = reporter_class()
        if hasattr(reporter, "tb_writer") and not _joins_the_run(reporter, args.output_dir):
            continue
        reporter.on_log(args, state, control, logs=dict(figures), model=model)
        if getattr(reporter, "tb_writer", None) is not None:
            reporter.tb_writer.close()


def _joins_the_run(reporter: Any, output_dir: str | None) -> bool:
    """Point a TensorBoard reporter at the run's own folder; False if there is none."""
    # Left alone, that of transformers 5.23 would begin a second run in the working directory.
    if getattr(reporter, "logging_dir", None) is None:
        events = Path(output_dir or ".").rglob("events.out.tfevents.*")
        newest = max(events, key=lambda path: path.stat().st_mtime, default=None)
        reporter.logging_dir = None if newest is None else str(newest.parent)
    return reporter.logging_dir is not None
