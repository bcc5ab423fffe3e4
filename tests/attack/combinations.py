"""What is tried: a seed gives a model, an event, its step, a plan, and the loop that trains."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.attack import plans
from tests.attack.events import COARSE, EVENTS
from tests.attack.layer_events import Event
from tests.attack.models import ADAPTED, BY_HAND, MODELS, PLACES
from tests.attack.plans import Asked

NUM_STEPS = 5
_TRAINER_SHARE = 0.08
_SHORT, _LONG = 8, 28
"""Tokens of a row. torch takes other operators from 26 on."""
_PRODUCTS = {"gpt2": "aten.addmm"}
"""What computes matrix products in a model, where that is not `aten.mm`."""


@dataclass(frozen=True)
class Combination:
    """A late event under a plan. The seed alone rebuilds it.

    Args:
        place: where in a layer the event's ground lies: of `PLACES`.
        step: the step, counted from 0, that begins with the event.
        lengths: tokens of the rows of each step that is trained.
        by_trainer: whether the Trainer trains; else a loop of one's own.
    """

    seed: int
    model: str
    place: str
    event: str
    step: int
    lengths: tuple[int, ...]
    asked: Asked
    by_trainer: bool

    @classmethod
    def of(cls, seed: int) -> Combination:
        """Return the combination of a seed."""
        rng = random.Random(seed)
        event = rng.choice(list(EVENTS.values()))
        by_trainer = rng.random() < _TRAINER_SHARE and event.needs != "own loop"
        model = rng.choice(_models_for(event))
        step = rng.choice((0, 1, 2, 2, 3, 3))
        longer = _LONG if event.name == "nothing_but_length" or rng.random() < 0.25 else _SHORT
        # Two steps with the event show what it does; more would cost a quarter more time.
        num_steps = min(NUM_STEPS, step + 2)
        lengths = tuple(longer if number >= step else _SHORT for number in range(num_steps))
        is_real, is_coarse = model not in BY_HAND, event.name in COARSE
        asked = plans.drawn(
            rng,
            saves=(_PRODUCTS.get(model, "aten.mm"), "aten.tanh" if not is_real else "mlp.*"),
            may_tile=not _draws_in_tiles(event, model) and not is_coarse,
            may_chunk=is_real and not is_coarse,
        )
        return cls(seed, model, rng.choice(list(PLACES)), event.name, step, lengths, asked, by_trainer)

    def describe(self) -> str:
        """Return it as one line."""
        loop = "Trainer" if self.by_trainer else "apply"
        length = f", {self.lengths[-1]} tokens" if self.lengths[-1] != _SHORT else ""
        return (
            f"seed {self.seed}: {self.event} at step {self.step + 1}{length}, {self.model} ({self.place}), "
            f"{self.asked.policy} {self.asked.options} by {loop}"
        )


def _draws_in_tiles(event: Event, model: str) -> bool:
    """Whether random numbers are drawn in what runs in tiles: there each slice draws its own, as the docs say."""
    # The ffn of GPT-2 ends in dropout, with a rate of 0 at first.
    has_late_dropout = event.name == "changes_rates_of_dropout" and model == "gpt2"
    return model == "llama_lora" or event.kind == "noise" or has_late_dropout


def _models_for(event: Event) -> list[str]:
    suitable = {
        "by hand": BY_HAND,
        "streams": ("streams",),
        "adapted": ADAPTED,
        "real": [name for name in MODELS if name not in BY_HAND],
    }
    return list(suitable.get(event.needs, MODELS))
