"""The longest row, or the largest micro-batch, of a recipe: under its plan, without one, and with every layer full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_ckpt.errors import HFCkptError
from hf_ckpt.estimate.estimate import AUTO, RECIPE, Say, budget_of
from hf_ckpt.estimate.least import longest_row_of_all
from hf_ckpt.estimate.limits import largest_batch, longest_row
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.subject import Subject, is_auto
from hf_ckpt.estimate.tables import columns, facts
from hf_ckpt.planner.bisect import Limit
from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.devices import Device
from hf_ckpt.units import format_bytes


@dataclass(frozen=True)
class Row:
    """What fits on one device under one plan."""

    plan: str
    device: Device
    budget_bytes: int
    limit: Limit


@dataclass(frozen=True)
class Most:
    """What fits.

    Args:
        subject: the recipe's model and step.
        is_length: whether rows are counted in tokens, or micro-batches in rows.
        rows: by device and plan.
    """

    subject: Subject
    is_length: bool
    rows: tuple[Row, ...]

    @property
    def unit(self) -> str:
        """What is counted."""
        return "tokens" if self.is_length else "rows"


def find(subject: Subject, devices: Sequence[Device], *, is_length: bool, say: Say) -> Most:
    """Find the longest row or the largest micro-batch that fits.

    Args:
        subject: the recipe's model and step.
        devices: the devices.
        is_length: rows in tokens, or micro-batches in rows.
        say: is told what goes on.
    """
    search = longest_row if is_length else largest_batch
    predictor = Predictor(subject, devices[0])
    rows = []
    for device in devices:
        budget = budget_of(subject, device)
        if is_length and is_auto(subject.recipe):
            say(f"Searching what fits on {device.name}: {AUTO} ...")
            rows.append(Row(AUTO, device, budget, longest_row_of_all(predictor, budget).limit))
        for name, plan in _plans(subject):
            say(f"Searching what fits on {device.name}: {name} ...")
            rows.append(Row(name, device, budget, search(predictor, plan, budget)))
    return Most(subject, is_length, tuple(rows))


def _plans(subject: Subject) -> Iterator[tuple[str, Plan | None]]:
    if subject.plan is not None:
        yield RECIPE, subject.plan
    yield "none", None
    try:
        yield "full", subject.resolve("full")
    except HFCkptError:
        # A model of which not every layer can be recomputed; its own plan is there.
        return


def table(found: Most) -> str:
    """Return what fits as text."""
    what = "longest row" if found.is_length else "largest micro-batch"
    header = ("device", "plan", what, "peak", "budget")
    body = [
        (row.device.name, row.plan, _number(row, found), _peak(row), format_bytes(row.budget_bytes))
        for row in found.rows
    ]
    lines = [f"hf-ckpt estimate {found.subject.title}", *facts(found.subject.facts), ""]
    return "\n".join([*lines, *columns([header, *body], numeric=(2, 3, 4))])


def as_json(found: Most) -> dict[str, Any]:
    """Return what fits as JSON types."""
    return {
        "recipe": found.subject.title,
        "unit": found.unit,
        "rows": [
            {
                "device": row.device.name,
                "plan": row.plan,
                "budget_bytes": row.budget_bytes,
                "number": row.limit.number,
                "peak_bytes": row.limit.peak_bytes,
                "is_bound": row.limit.is_bound,
            }
            for row in found.rows
        ],
    }


def _number(row: Row, found: Most) -> str:
    if not row.limit.number:
        return "none"
    more = " (all the model has positions for)" if row.limit.is_bound and found.is_length else ""
    return f"{row.limit.number:,} {found.unit}{more}"


def _peak(row: Row) -> str:
    return format_bytes(row.limit.peak_bytes) if row.limit.number else "-"
