"""What a run prints at its end, for a person to read."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ckpt.policy.plan import Plan
from hf_ckpt.trainer.metrics import describe_recomputed
from hf_ckpt.units import format_bytes

_WIDTH = 72
# Below what a layer does, in `Plan.summary`; names are not broken.
_HANGING: dict[str, Any] = {"subsequent_indent": " " * 15, "break_on_hyphens": False, "break_long_words": False}


@dataclass(frozen=True)
class RunSummary:
    """What a run did."""

    title: str
    plan: Plan | None  # What was in force, or None without a policy.
    figures: Mapping[str, float]  # `HFCkptCallback.report()`.
    log_history: Sequence[Mapping[str, Any]]  # The Trainer's.
    saved: Path  # Folder that holds the adapter or the model.
    is_adapter: bool  # Whether it is an adapter.
    prediction: str | None = None  # `HFCkptCallback.prediction`.
    merged: Path | None = None  # Folder of the merged model, if one was written.
    engine: str | None = None  # What ran on how many processes, and what it sharded, in words.
    verdict: str | None = None  # That what was saved is complete, in words.
    batch: str | None = None  # Rows of an optimizer step over all processes, in words.
    measured_bytes: int | None = None  # The peak of a step whose tensors were followed; see `measured_peak`.

    def table(self) -> str:
        """Return the summary as a table of two columns."""
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        rule = "-" * max(len(line) for line in lines)
        return "\n".join([rule, *lines, rule])

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "Recipe", self.title
        if self.prediction:
            # First what the plan is for, then what it is.
            yield from self._memory_rows()
        if self.engine is not None:
            yield "Engine", self.engine
        if self.batch is not None:
            yield "Batch", self.batch
        yield from self._plan_rows()
        if not self.prediction:
            yield from self._memory_rows()
        if "ckpt/tokens_per_sec" in self.figures:
            yield "Speed", f"{self.figures['ckpt/tokens_per_sec']:,.0f} tokens/s per process"
        yield from self._loss_row("Training loss", "loss")
        yield from self._loss_row("Evaluation loss", "eval_loss")
        yield ("Adapter" if self.is_adapter else "Model"), f"{self.saved} ({_weights(self.saved)})"
        if self.verdict is not None:
            yield "", self.verdict
        if self.merged is not None:
            yield "Merged model", f"{self.merged} ({_weights(self.merged)})"

    def _memory_rows(self) -> Iterator[tuple[str, str]]:
        for number, line in enumerate(textwrap.wrap(self.prediction or "", _WIDTH)):
            yield "" if number else "Memory", line
        if "ckpt/predicted_peak_gib" in self.figures:
            predicted = format_bytes(self.figures["ckpt/predicted_peak_gib"] * 2**30)
            yield "Predicted peak", f"{predicted}{self._measured()}"
        process = "of the process, Python and libraries included"
        for key, what in (("peak_allocated_gib", "on the device"), ("peak_resident_gib", process)):
            if f"ckpt/{key}" in self.figures:
                yield "Peak memory", f"{self.figures[f'ckpt/{key}']:.2f} GiB {what}"

    def _measured(self) -> str:
        if "ckpt/peak_allocated_gib" in self.figures:
            return ""
        if self.measured_bytes is not None:
            return f", measured {format_bytes(self.measured_bytes)} in a further step of that size"
        return "; a CPU does not count what is allocated, so nothing was measured"

    def _plan_rows(self) -> Iterator[tuple[str, str]]:
        if self.plan is None:
            yield "Layers", "no activation checkpointing"
            return
        lines = [part for line in self.plan.summary().splitlines() for part in textwrap.wrap(line, _WIDTH, **_HANGING)]
        for number, line in enumerate(lines):
            yield "" if number else "Layers", line
        yield "Recomputed", describe_recomputed(self.figures["ckpt/recomputed_share"])

    def _loss_row(self, name: str, key: str) -> Iterator[tuple[str, str]]:
        losses = [entry[key] for entry in self.log_history if key in entry]
        if len(losses) == 1:
            yield name, f"{losses[0]:.3f}"
        elif losses:
            first, last = losses[0], losses[-1]
            change = abs(last - first) / first if first else 0.0
            how = f"{'fell' if last < first else 'rose'} by {change:.1%}" if last != first else "unchanged"
            yield name, f"{first:.3f} -> {last:.3f} ({how})"


def _weights(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    return f"{files[0].name if len(files) == 1 else f'{len(files)} files'}, {format_bytes(size)}"
