"""What does a run lose when memory runs out: with recovery, with auto_find_batch_size, and without either?

A stream of short rows with rare long ones goes through a small Llama under a memory limit that a dispatch mode
enforces: long batches do not fit without recomputation, short ones do. Each contender trains on the same stream. Its
losses are held, step by step, against those of the same run without a limit. Operations are counted over all that runs,
failed attempts too. The best fixed plan is the one of all that reach the end that needs the fewest.

    python -m benchmarks recovery_stream
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.journal import Entry, Journal
from benchmarks.result_files import carry_out
from benchmarks.runner import RESULTS, add_out, main
from hf_ckpt import HFCkptCallback
from tests.recovery.limits import LimitedTrainer
from tests.training import VOCAB, arguments, llama, losses

NUM_LAYERS = 4
BATCH_SIZE = 4
SHORT, LONG = (8, 24), 96
LONG_EVERY = 40
"""Batches, on average, of which one has a long row."""
_FREE = "no_limit"
_OURS, _HALVES, _NOTHING = "escalate", "auto_find_batch_size", "no_recovery"
_MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS}


def stream(num_steps: int) -> list[dict[str, Tensor]]:
    """Return rows of random lengths, of which few are long."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(num_steps * BATCH_SIZE):
        length = int(torch.randint(*SHORT, (1,), generator=generator))
        if float(torch.rand(1, generator=generator)) < 1 / (LONG_EVERY * BATCH_SIZE):
            length = LONG
        found.append({"input_ids": torch.randint(1, VOCAB, (length,), generator=generator)})
    return found


def collate(rows: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch, padded to its longest row."""
    longest = max(len(row["input_ids"]) for row in rows)
    padded = torch.zeros(len(rows), longest, dtype=torch.long)
    for padding, row in zip(padded, rows, strict=True):
        padding[: len(row["input_ids"])] = row["input_ids"]
    mask = (padded != 0).long()
    return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}


class Counted(TrainerCallback):
    """Counts optimizer steps, those of attempts that were given up too."""

    num_steps = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.num_steps += 1


def policy(num_full: int) -> list[dict[str, str]] | str:
    """Return a policy that recomputes so many layers."""
    return [{"layers": f"0:{num_full}", "mode": "full"}] if num_full else "none"


def trained(name: str, num_steps: int, limit: int | None) -> Entry:
    """Train a contender to the end, or until it goes out of memory."""
    counted, callbacks = Counted(), []
    fixed = name.rpartition("_")[2]
    if name == _OURS:
        callbacks.append(HFCkptCallback("none", on_oom="escalate", prove="off"))
    elif name not in (_HALVES, _NOTHING, _FREE):
        callbacks.append(HFCkptCallback(policy(int(fixed)), prove="off"))
    with tempfile.TemporaryDirectory() as folder, FlopCounterMode(display=False) as flops:
        settings = {"max_steps": num_steps, "per_device_train_batch_size": BATCH_SIZE, "learning_rate": 1e-3}
        args = TrainingArguments(**arguments(Path(folder), **settings, auto_find_batch_size=name == _HALVES))
        model = llama(**_MODEL)
        run = LimitedTrainer(
            model=model,
            args=args,
            train_dataset=stream(num_steps),
            data_collator=collate,
            callbacks=[*callbacks, counted],
        )
        run.remove_callback(PrinterCallback)
        run.limit = limit
        start, died = time.process_time(), ""
        try:
            run.train()
        except torch.OutOfMemoryError as error:
            died = str(error)
        seconds = time.process_time() - start
    ours = callbacks[0].report() if callbacks else {}
    return {
        "died": died,
        "num_steps": run.state.global_step,
        "num_steps_run": counted.num_steps,
        "losses": losses(run),
        "flops": flops.get_total_flops(),
        "seconds": seconds,
        "batch_size": run.state.train_batch_size,
        "peaks": sorted(set(run.peaks)),
        **{key: ours[key] for key in ("ckpt/oom_recovered", "ckpt/plan_switches") if key in ours},
    }


# --- Entries and the result. ---


def collect(journal: Journal, num_steps: int) -> None:
    """Train all contenders."""
    logging.getLogger("hf_ckpt").setLevel(logging.ERROR)
    free = journal.entry(_FREE, partial(trained, _FREE, num_steps, None))
    limit = limit_of(free, journal.entry("lean", partial(trained, f"full_{NUM_LAYERS}", num_steps, None)))
    for name in contenders():
        journal.entry(name, partial(trained, name, num_steps, limit))


def contenders() -> list[str]:
    """Return the names of those that train under the limit."""
    return [_OURS, _HALVES, _NOTHING, *(f"full_{number}" for number in range(1, NUM_LAYERS + 1))]


def limit_of(free: Entry, lean: Entry) -> int:
    """Return the bytes half-way between what the largest batch needs without recomputation, and with all of it."""
    return int((free["peaks"][-1] + lean["peaks"][-1]) // 2)


def assemble(journal: Journal, num_steps: int) -> dict[str, Any]:
    """Return the result of the entries that are there."""
    entries = journal.entries
    free = entries[_FREE]
    found = {
        name: _figures(entries[name], free, num_steps) for name in contenders() if "losses" in entries.get(name, {})
    }
    fixed = {name: each for name, each in found.items() if name.startswith("full_") and not each["died"]}
    best = min(fixed, key=lambda name: fixed[name]["flops"], default=None)
    return {
        "num_steps": num_steps,
        "limit_bytes": limit_of(free, entries["lean"]) if "lean" in entries else None,
        "no_limit": {"flops": free["flops"], "seconds": free["seconds"], "peak_bytes": free["peaks"][-1]},
        "contenders": found,
        "best_fixed": best,
        "best_fixed_flops_over_ours": fixed[best]["flops"] / found[_OURS]["flops"] if best and _OURS in found else None,
    }


def _figures(entry: Entry, free: Entry, num_steps: int) -> dict[str, Any]:
    is_dead = bool(entry["died"])
    pairs = zip(entry["losses"], free["losses"], strict=False)
    return {
        "died": entry["died"],
        # Steps whose work is gone: all of a run that dies, for nothing was saved.
        "steps_lost": entry["num_steps_run"] - (0 if is_dead else entry["num_steps"]),
        "steps_missing": num_steps - entry["num_steps"],
        # The first so many are the same batches with the same weights.
        "steps_changed": sum(one != other for one, other in pairs),
        "flops": entry["flops"],
        "flops_over_no_limit": entry["flops"] / free["flops"],
        "seconds": entry["seconds"],
        **{key: entry[key] for key in ("batch_size", "ckpt/oom_recovered", "ckpt/plan_switches") if key in entry},
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of the stream")
    add_out(parser)


def run(asked: Namespace) -> None:
    """Train all contenders and write one JSON."""
    out = asked.out or RESULTS / "recovery_stream.json"
    result = carry_out(out, partial(collect, num_steps=asked.steps), partial(assemble, num_steps=asked.steps))
    for name, found in result["contenders"].items():
        print(f"{name}: {found}")
    print(f"best fixed: {result['best_fixed']}, {result['best_fixed_flops_over_ours']} of ours; written to {out}")


if __name__ == "__main__":
    sys.exit(main(__name__))
