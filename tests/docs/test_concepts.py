"""docs/concepts.md: its picture shows what a step really holds, and its "every N" are the layers that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import hf_ckpt
from benchmarks import concept_picture
from benchmarks.concept_picture import NUM_LAYERS, PICTURE, Shown, Span
from hf_ckpt.policy.policy import Mode
from tests import training

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "concepts.md"


@pytest.fixture(scope="module")
def columns() -> dict[str, Shown]:
    """What the picture shows, from steps that run now."""
    plans = concept_picture.PLANS.items()
    return {name: concept_picture.shown(concept_picture.follow(policy, options)) for name, (policy, options) in plans}


def most_at_once(spans: list[Span]) -> int:
    return max(sum(span.start <= at.start < span.end for span in spans) for at in spans)


def test_picture_is_what_a_step_does(columns: dict[str, Shown]) -> None:
    image = pytest.importorskip("PIL.Image")
    with image.open(PICTURE) as picture:
        written = picture.text[concept_picture.DIGEST]
    assert written == concept_picture.digest(columns), "draw it again: python -m benchmarks.concept_picture"


def test_layers_that_are_held_whole_at_once(columns: dict[str, Shown]) -> None:
    whole = [[span for span in column.spans if span.is_whole] for column in columns.values()]
    assert [most_at_once(spans) for spans in whole] == [NUM_LAYERS, 1, 3]
    assert [{span.category for span in spans} for spans in whole] == [
        {"saved activations"},
        {"recomputation"},
        {"recomputation"},
    ]


def test_inputs_that_are_saved(columns: dict[str, Shown]) -> None:
    # Row 0 is the embedding, row 3 is layer 2. The last layer's output is held for a moment, for the head.
    saved = [
        {span.row for span in column.spans if not span.is_whole and span.end - span.start > column.num_flops // 20}
        for column in columns.values()
    ]
    assert saved == [{0}, set(range(NUM_LAYERS)), {0, 3, 6}]


def test_segments_peak_higher_than_single_layers(columns: dict[str, Shown]) -> None:
    none, full, segments = columns.values()
    assert 2 * full.peak_bytes < segments.peak_bytes < none.peak_bytes / 2
    assert none.num_flops < full.num_flops < segments.num_flops
    # Half of what backward does is one forward; the head does not run again.
    assert full.num_flops < none.num_flops + none.backward_at


def test_picture_is_drawn_with_its_digest(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    categories = len(concept_picture.SHOWN)
    moments = ((0, (0,) * categories), (10, (2**20,) * categories))
    columns = {"by hand": Shown(10, 4, moments, (Span(1, "saved activations", True, 2, 8),))}
    concept_picture.draw(columns, tmp_path / "step.png")
    with image.open(tmp_path / "step.png") as picture:
        assert picture.text[concept_picture.DIGEST] == concept_picture.digest(columns)


def policies_of_the_document() -> list[tuple[Any, dict[str, Any]]]:
    """Return what the Python block gives to the callback, in its order."""
    block = re.search(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block is not None
    given: list[tuple[Any, dict[str, Any]]] = []
    _, _, calls = block[1].partition("\n")
    exec(calls, {"HFCkptCallback": lambda policy, **options: given.append((policy, options))})
    return given


def test_three_meanings_of_every_n() -> None:
    model = training.llama(num_hidden_layers=NUM_LAYERS)
    found = []
    for policy, options in policies_of_the_document():
        with hf_ckpt.apply(model, policy, **options) as applied:
            layers = applied.plan.stacks[0].layers
        recomputed = [index for index, layer in enumerate(layers) if layer.mode is Mode.FULL]
        found.append((recomputed, [layer.segment for layer in layers if layer.segment is not None]))
    assert found == [
        ([0, 4, 8], []),
        (list(range(9)), [0, 0, 0, 0, 4, 4, 4, 4, 8]),
        ([1, 2, 3, 5, 6, 7], []),
    ]
