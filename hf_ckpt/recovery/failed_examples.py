"""Which examples of the training data a batch holds: read again from the Trainer's sampler, and checked.

The order of an epoch is drawn once more from the seed that the sampler's generator was set to, the batch found by its
number in the epoch, and put together again. Only if that gives the batch's own tensors its examples are known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from hf_ckpt.recovery.accumulation_window import named_tensors
from hf_ckpt.upstream.torch import NUM_SAMPLES, hidden_from_modes

_SHOWN = 16


def describe_examples(trainer: Any, number: int, inputs: Any) -> str:
    """Return which examples a micro-batch holds, by their indices in the data that the Trainer reads, as a sentence.

    Draws from no generator that training draws from, but reads the examples, and calls the collator again.

    Args:
        trainer: that trains.
        number: of the micro-batch in its step, from 0.
        inputs: what the step was given.
    """
    indices: list[int] | None = None
    # Samplers, data sets and collators are anybody's, and the run ends anyway.
    with hidden_from_modes(), suppress(Exception):
        found = _indices(trainer, number)
        indices = found if found is not None and _gives(trainer, found, inputs) else None
    if indices is None:
        return "The indices of its examples are not known: its data or their order cannot be read again."
    shown = ", ".join(map(str, indices[:_SHOWN]))
    more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    return f"Examples of the training data in it: {shown}{more}."


def _indices(trainer: Any, number: int) -> list[int] | None:
    loader = trainer.callback_handler.train_dataloader
    batches = _batches(loader.batch_sampler)
    if batches is None:
        return None
    accumulated = trainer.args.gradient_accumulation_steps
    steps_in_epoch = -(-len(loader) // accumulated)
    position = trainer.state.global_step % steps_in_epoch * accumulated + number
    return next(islice(batches, position, None), None)


def _batches(sampler: Any) -> Iterable[list[int]] | None:
    """Return the batches of the epoch that runs, from its first; None where their order was drawn elsewhere."""
    again = copy.copy(sampler)
    inner = getattr(sampler, "batch_sampler", None)
    base = again if inner is None else copy.copy(inner)
    if type(base) is not BatchSampler:
        return None
    order = _order(base.sampler)
    if order is None:
        return None
    base.sampler = order
    if inner is not None:
        # Of several processes each takes its share of the batches.
        again.batch_sampler = base
    batches: Iterable[list[int]] = again
    return batches


def _order(sampler: Sampler[int] | Iterable[int]) -> Iterable[int] | None:
    if isinstance(sampler, SequentialSampler):
        return sampler
    generator = getattr(sampler, "generator", None)
    # The generator of accelerate's sampler is set to the seed of each epoch, and drawn from by nobody else.
    if type(sampler).__name__ != "SeedableRandomSampler" or generator is None:
        return None
    again = torch.Generator().manual_seed(generator.initial_seed())
    found: Any = sampler
    return RandomSampler(found.data_source, found.replacement, getattr(found, NUM_SAMPLES, None), again)


def _gives(trainer: Any, indices: Sequence[int], inputs: Any) -> bool:
    """Whether these examples make this batch."""
    loader = trainer.callback_handler.train_dataloader
    with torch.random.fork_rng():
        again = loader.collate_fn([loader.dataset[index] for index in indices])
    if not isinstance(again, Mapping):
        return False
    pairs = [(tensor, again[name]) for name, tensor in named_tensors(inputs) if isinstance(again.get(name), Tensor)]
    return bool(pairs) and all(torch.equal(ours.cpu(), theirs.cpu()) for ours, theirs in pairs)
