"""The lines of a shipped recipe's header that say what it needs: predicted, and written by a command.

The header's own words say for what: the memory of the GPUs that `Hardware` names, and the configuration of accelerate
that `Launch` names. A recipe that leaves the plan to the planner says too what that chooses on cards of usual sizes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_ckpt.errors import BudgetError, RecipeError
from hf_ckpt.estimate.estimate import capacity_of_subject, own_budget
from hf_ckpt.estimate.launch_config import Launch
from hf_ckpt.estimate.max_length_and_batch import largest_fitting, largest_of_all
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, is_auto, subject_of
from hf_ckpt.estimate.tables import format_seconds
from hf_ckpt.recipe.recipe import load_recipe
from hf_ckpt.recipe.shipped import HEADER_ITEM, header
from hf_ckpt.simulation.devices import CPU, Device, find_device
from hf_ckpt.simulation.fit import capacity_of
from hf_ckpt.units import format_bytes

CARDS = {6: "5.8GiB", 16: "t4", 24: "rtx4090", 40: "a100-40gb", 48: "a6000", 80: "a100-80gb"}
"""The card that stands for each size that `Hardware` names, in GB."""

_TOLD_FROM = 2**30
"""Bytes of host memory that are worth a word: paged optimizers take some MiB in any case."""

FITTED = {16: "rtx4080", 24: "rtx4090", 48: "a6000", 80: "a100-80gb"}
"""The cards that a recipe under policy `auto` is planned for, which compute in bfloat16, by their size in GB."""

_KEY, _CARDS = "Memory", "Cards"
_WIDTH = 120


@dataclass(frozen=True)
class Needs:
    """What a recipe needs on its hardware.

    Args:
        device: that the header names.
        peak_bytes: of the recipe as it stands.
        longest: tokens of the longest row that fits.
        is_bound: whether the model has no more positions.
        host_bytes: of the recipe as it stands, on the host.
    """

    device: Device
    peak_bytes: int
    longest: int
    is_bound: bool
    host_bytes: int = 0

    def describe(self) -> str:
        """Return the text of the header's line."""
        capacity = capacity_of(self.device)
        free = format_bytes(capacity.num_bytes - capacity.reserved_bytes)
        title, memory = self.device.title, format_bytes(self.device.memory_bytes)
        # A GPU without a name is called by its memory.
        card = f" fit ({title if title.endswith(memory) else f'{title}, {memory}'}, {free} of it left free)"
        fits = card if self.device.is_cuda else ""
        limit = f"sequences of up to {self.longest:,} tokens{fits}" if self.longest else "no sequence fits"
        bound = ", all that the model has positions for" if self.is_bound else ""
        host = f" and {format_bytes(self.host_bytes)} of host memory" if self.host_bytes >= _TOLD_FROM else ""
        return f"predicted peak {format_bytes(self.peak_bytes)}{host}; {limit}{bound}."


def needs_of(path: Path) -> Needs:
    """Predict what a recipe needs on the hardware that its header names.

    Args:
        path: the recipe, with a header; the files that it is launched with are found from the folder above its own.

    Raises:
        RecipeError: the header names no hardware that is known; or see `subject_of`.
    """
    predictor = on_hardware(path)
    subject, device = predictor.subject, predictor.device
    capacity = capacity_of_subject(predictor, device)
    if is_auto(subject.recipe):
        memory = predictor.planned(capacity).memory
        limit = largest_of_all(predictor, capacity, is_length=True)
    else:
        memory = predictor.memory(subject.plan)
        limit = largest_fitting(predictor, subject.plan, capacity, is_length=True)
    return Needs(device, memory.peak_bytes, limit.number, limit.is_bound, memory.host_bytes)


def plans_on_cards(predictor: Predictor) -> list[str]:
    """Return what the planner chooses on each size of card, a line each; none where the recipe names plan or budget."""
    subject = predictor.subject
    is_for_one = predictor.device.is_cuda and subject.step.sharding.world_size == 1
    if not (is_for_one and is_auto(subject.recipe) and own_budget(subject) is None):
        return []
    return [f"{size} GB ({name}): {_planned(subject, find_device(name))}" for size, name in FITTED.items()]


def _planned(subject: Subject, device: Device) -> str:
    predictor = Predictor(subject, device)
    try:
        planned = predictor.planned(predictor.capacity(device), compare=True)
    except BudgetError:
        return "no plan fits"
    memory = planned.memory
    return f"{planned.plan.describe()}; {format_bytes(memory.peak_bytes)}, {format_seconds(memory.time.total)} a step"


def on_hardware(path: Path) -> Predictor:
    """Return what predicts a recipe's steps on the hardware that its header names. See `needs_of`."""
    said = header(path.read_text(encoding="utf-8"))
    device = _device(path, said.get("Hardware", ""))
    return Predictor(subject_of(load_recipe(path), _launch(path, said.get("Launch", ""))), device)


def with_needs(text: str, needs: Needs) -> str:
    """Return a recipe's text with the line in its header, in the place of an earlier one or below `Hardware`."""
    return _with_item(text, _KEY, [needs.describe()], below="Hardware")


def with_cards(text: str, lines: Sequence[str]) -> str:
    """Return a recipe's text with the lines of `plans_on_cards` below what it needs, or without any."""
    return _with_item(text, _CARDS, lines, below=_KEY)


def _with_item(text: str, key: str, lines: Sequence[str], below: str) -> str:
    filled = [
        textwrap.fill(
            line,
            _WIDTH,
            initial_indent=(f"# {key}:" if idx == 0 else "#").ljust(12),
            subsequent_indent="#".ljust(12),
            break_on_hyphens=False,
        )
        for idx, line in enumerate(lines)
    ]
    items = {found["key"]: found for found in HEADER_ITEM.finditer(text)}
    if key in items:
        text = text[: items[key].start()].rstrip("\n") + text[items[key].end() :]
        items = {found["key"]: found for found in HEADER_ITEM.finditer(text)}
    end = items[below].end()
    return text[:end] + "".join(f"\n{each}" for each in filled) + text[end:]


def written_needs(text: str) -> str | None:
    """Return what a recipe's header says that it needs, on one line; None where it says nothing."""
    return header(text).get(_KEY)


def _device(path: Path, hardware: str) -> Device:
    size = re.search(r"with (\d+) GB", hardware)
    if size is None and "CPU" in hardware:
        return CPU
    if size is None or int(size[1]) not in CARDS:
        raise RecipeError(
            f'{path}: the header\'s Hardware is "{hardware}", which names no known size of GPUs. Write "with 24 GB"; '
            f"known are {', '.join(map(str, CARDS))} GB and CPU."
        )
    return find_device(CARDS[int(size[1])])


def _launch(path: Path, launch: str) -> Launch:
    config = re.search(r"--config_file (\S+)", launch)
    return Launch(config=path.parent.parent / config[1]) if config else Launch()
