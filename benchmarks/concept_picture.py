"""Draws docs/images/concepts-step.png: memory over one step of a small decoder, and which layers' activations are held.

The step really runs, on the CPU, and every storage is followed. The picture carries a digest of what it shows, so that
a test can tell whether the picture is still what a step does.

    python -m benchmarks.concept_picture
"""

from __future__ import annotations

import hashlib
import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import hf_ckpt
from benchmarks.runner import add_out, main
from hf_ckpt.simulation.module_hooks import track_modules
from hf_ckpt.simulation.op_costs import operator_cost
from hf_ckpt.simulation.step_memory import COLOURS, Category, Phase
from hf_ckpt.simulation.tape import Event, MemoryChange, Tape, assign_categories
from hf_ckpt.simulation.tracker import Tracker, parameters_and_buffers
from hf_ckpt.structure.layers import find_layers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "concepts-step.png"
DIGEST = "drawn data"
"""The entry of the picture's metadata that holds the digest."""

NUM_LAYERS = 9
HIDDEN, FFN, HEADS, VOCABULARY = 64, 172, 4, 64
BATCH, LENGTH = 8, 128
OUTPUT_BYTES = BATCH * LENGTH * HIDDEN * 4
"""Of what a layer hands to the next one, in float32."""

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "keep everything": ("none", {}),
    "recompute each layer": ("full", {}),
    "segments of sqrt(9) = 3 layers": ("full", {"segment_size": "sqrt"}),
}

SHOWN = [category for category in COLOURS if category is not Category.PARAMETERS]
"""In the order in which they are stacked."""
_MIB = 2**20
_FONT = 13
_TURN = "#444444"


@dataclass(frozen=True)
class Span:
    """A stretch of the step in which something that one layer made is held for backward.

    Args:
        row: 0 for the embedding, layer + 1 for a layer.
        category: `saved activations` or `recomputation`.
        is_whole: whether the inside of the layer is held, and not its output alone.
        start: floating-point operations done before it.
        end: and after it.
    """

    row: int
    category: str
    is_whole: bool
    start: int
    end: int


@dataclass(frozen=True)
class Shown:
    """What one column of the picture shows, in whole numbers.

    Args:
        num_flops: of the step: matrix products and attention, forward and backward.
        backward_at: how many of them are done when backward begins.
        moments: operations done, and bytes of each category of `SHOWN`: between two operations that count, the moment
            with most memory.
        spans: what is held for backward.
    """

    num_flops: int
    backward_at: int
    moments: tuple[tuple[int, tuple[int, ...]], ...]
    spans: tuple[Span, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that the step has made and not let go, weights left out."""
        return max(sum(columns) for _, columns in self.moments)


# --- The step. ---


def follow(policy: str, options: dict[str, Any]) -> Tape:
    """Run forward and backward under a policy, and return what happened."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(_config()).train()
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    tracker = Tracker(costs=_count)
    tracker.record_existing(parameters_and_buffers(model), Category.PARAMETERS)
    tracker.record_existing([("input_ids", ids)], Category.TEMPORARY)
    with (
        hf_ckpt.apply(model, policy, prove="off", **options),
        tracker,
        track_modules(model, find_layers(model), tracker),
    ):
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
    assign_categories(tracker.tape)
    return tracker.tape


def _config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        use_cache=False,
        attn_implementation="sdpa",
    )


def _count(function: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, int]:
    return 0.0, operator_cost(function, args, kwargs, output).num_flops


# --- What is shown of it. ---


def shown(tape: Tape) -> Shown:
    """Return what the picture shows of a step."""
    events = list(_with_flops(tape.events))
    backward_at = next(done for done, event in events if event.place.phase is not Phase.FORWARD)
    return Shown(events[-1][0], backward_at, tuple(_moments(events)), tuple(_spans(events)))


def _with_flops(events: Sequence[Event]) -> Iterator[tuple[int, Event]]:
    """Yield each event with the operations done when it happens."""
    done = 0
    for event in events:
        done += event.num_flops
        yield done, event


def _moments(events: Sequence[tuple[int, Event]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    alive: Counter[Category] = Counter()
    best: dict[int, tuple[int, ...]] = {}
    for done, event in events:
        if event.storage is None or event.storage.category is None:
            continue
        alive[event.storage.category] += _change(event)
        columns = tuple(alive[category] for category in SHOWN)
        if sum(columns) >= sum(best.get(done, ())):
            best[done] = columns
    yield from best.items()


def _change(event: Event) -> int:
    assert event.storage is not None
    return event.storage.num_bytes if event.change is MemoryChange.ALLOCATE else -event.storage.num_bytes


def _spans(events: Sequence[tuple[int, Event]]) -> Iterator[Span]:
    alive: Counter[tuple[int, Category]] = Counter()
    open_since: dict[int, tuple[tuple[Category, bool], int]] = {}
    made_in: dict[int, int | None] = {}
    for done, event in events:
        storage = event.storage
        if storage is None or storage.category not in (Category.SAVED, Category.RECOMPUTED):
            continue
        if event.change is MemoryChange.ALLOCATE:
            made_in[id(storage)] = event.place.layer_idx
        layer_idx = made_in[id(storage)]
        row = 0 if layer_idx is None else layer_idx + 1
        alive[row, storage.category] += _change(event)
        state = _state(alive[row, Category.SAVED], alive[row, Category.RECOMPUTED])
        found, start = open_since.get(row, (None, 0))
        if found == state:
            continue
        if found is not None and start < done:
            yield Span(row, found[0].value, found[1], start, done)
        if state is None:
            open_since.pop(row, None)
        else:
            open_since[row] = (state, done)


def _state(saved: int, recomputed: int) -> tuple[Category, bool] | None:
    """Return what is held of a layer, and whether it is more than one output; None for less than one."""
    for category, num_bytes in ((Category.RECOMPUTED, recomputed), (Category.SAVED, saved)):
        if num_bytes > 2 * OUTPUT_BYTES:
            return category, True
    for category, num_bytes in ((Category.SAVED, saved), (Category.RECOMPUTED, recomputed)):
        if num_bytes >= OUTPUT_BYTES:
            return category, False
    return None


def digest(columns: dict[str, Shown]) -> str:
    """Return a text that tells whether two pictures show the same."""
    text = json.dumps({name: asdict(column) for name, column in columns.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# --- The picture. ---


def draw(columns: dict[str, Shown], path: Path) -> None:
    """Draw one column for each plan: memory over the step above, what is held of each layer below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 7.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(columns), sharex=True, sharey="row", height_ratios=[1.15, 1], squeeze=False)
    whole = next(iter(columns.values()))
    for (name, column), above, below in zip(columns.items(), *axes, strict=True):
        peak, work = column.peak_bytes / whole.peak_bytes, column.num_flops / whole.num_flops
        above.set_title(f"{name}\npeak {peak:.0%}, operations {work:.0%}", fontsize=_FONT, loc="left")
        _draw_memory(above, column, whole.num_flops)
        _draw_strip(below, column, whole.num_flops)
    longest = max(column.num_flops for column in columns.values()) / whole.num_flops
    axes[0][0].set_xlim(0, longest * 1.01)
    axes[0][0].set_ylim(0, whole.peak_bytes / _MIB * 1.15)
    axes[0][0].set_ylabel("memory of the step,\nwithout weights (MiB)", fontsize=_FONT)
    axes[1][0].set_ylabel("held for backward,\nby the layer that made it", fontsize=_FONT)
    middle = axes[1][len(columns) // 2]
    middle.set_xlabel("operations done, as a share of those of a step that keeps everything", fontsize=_FONT)
    _legend(figure)
    figure.savefig(path, metadata={DIGEST: digest(columns)})


def _draw_memory(panel: Axes, column: Shown, unit: int) -> None:
    x = [done / unit for done, _ in column.moments]
    below = [0.0] * len(x)
    for index, category in enumerate(SHOWN):
        above = [low + columns[index] / _MIB for low, (_, columns) in zip(below, column.moments, strict=True)]
        panel.fill_between(x, below, above, step="post", color=COLOURS[category], linewidth=0)
        below = above
    _draw_turn(panel, column, unit)
    _name_phases(panel, column, unit)
    panel.grid(axis="y", alpha=0.4)
    _bare(panel)


def _draw_strip(panel: Axes, column: Shown, unit: int) -> None:
    for span in column.spans:
        height = 0.84 if span.is_whole else 0.26
        panel.broken_barh(
            [(span.start / unit, (span.end - span.start) / unit)],
            (span.row - height / 2, height),
            facecolors=COLOURS[Category(span.category)],
        )
    rows = ["embedding", *(f"layer {index}" for index in range(NUM_LAYERS))]
    panel.set_yticks(range(len(rows)), rows)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    _draw_turn(panel, column, unit)
    _bare(panel)


def _draw_turn(panel: Axes, column: Shown, unit: int) -> None:
    """Draw where forward ends and backward begins."""
    panel.axvline(column.backward_at / unit, color=_TURN, linewidth=1, linestyle="--")


def _name_phases(panel: Axes, column: Shown, unit: int) -> None:
    for text, side, shift in (("forward", "right", -4), ("backward", "left", 4)):
        panel.annotate(
            text,
            (column.backward_at / unit, 1),
            xycoords=("data", "axes fraction"),
            xytext=(shift, -3),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize=_FONT - 3,
            color=_TURN,
        )


def _bare(panel: Axes) -> None:
    panel.tick_params(labelsize=_FONT - 3)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    words = {
        Category.SAVED: "kept from forward",
        Category.RECOMPUTED: "recomputed in backward",
        Category.GRADIENTS: "gradients of weights",
        Category.LOSS: "logits and loss",
        Category.TEMPORARY: "temporary",
    }
    patches = [Patch(color=COLOURS[category], label=text) for category, text in words.items()]
    title = "Wide bars: the inside of the layer is held. Narrow bars: its output only, which is the next layer's input."
    figure.legend(
        handles=patches,
        title=title,
        loc="outside lower center",
        ncols=5,
        fontsize=_FONT - 1,
        title_fontsize=_FONT - 1,
        frameon=False,
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_out(parser, PICTURE, "the picture's file")


def run(options: Namespace) -> None:
    """Run the steps and draw them."""
    draw({name: shown(follow(policy, settings)) for name, (policy, settings) in PLANS.items()}, options.out)
    print(options.out)


if __name__ == "__main__":
    sys.exit(main(__name__))
