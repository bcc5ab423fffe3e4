"""Does a step that runs out of memory at any operator end as if it had not? Every operator of small models, one by one.

Each step of a run fails once, at the operator after the one that failed in the step before: before that operator has
run, and in a second run after it has written. Then the plan without recomputation is put back in force, so that each
failure climbs to the first rung. Losses, and the weights after each step, are held bit by bit against a run that has
recomputed all layers from the beginning. With `--optimizer` each operator of the optimizer's step has a run of its own,
which either gives the same weights or has to end.

    python -m benchmarks recovery_sweep
    python -m benchmarks recovery_sweep --optimizer
    python -m benchmarks recovery_sweep --stride 97 --case llama    # a look
"""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.journal import Entry, Journal
from benchmarks.result_files import carry_out
from benchmarks.runner import RESULTS, add_out, main
from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.recovery.recovery import Recovery
from hf_ckpt.trainer.part import Part
from tests.recovery.limits import FailingOperators, PhasedTrainer, Steps
from tests.recovery.models import WithBatchNorm, mixtral
from tests.training import arguments, llama, losses, rows

MOMENTS = ("before", "after")
_OPTIMIZER = "optimizer"
_ENTRY_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Case:
    """A model, and how many micro-batches a step has."""

    make: Callable[[], nn.Module]
    accumulation: int = 1


def adapted() -> nn.Module:
    """A Llama of one layer with adapters and dropout."""
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
    return get_peft_model(llama(num_hidden_layers=1), config)


CASES = {
    "llama": Case(partial(llama, num_hidden_layers=2)),
    "accumulation": Case(partial(llama, num_hidden_layers=1), 2),
    "lora": Case(adapted),
    "batch_norm": Case(partial(WithBatchNorm, num_hidden_layers=1)),
    "mixture": Case(partial(mixtral, num_hidden_layers=2)),
}


class _InThisProcess(Part):
    is_alone = True


class Kept(TrainerCallback):
    """Keeps the weights after each step, and puts the plan that the run began with back in force.

    Args:
        ours: the plugin.
    """

    def __init__(self, ours: HFCkptCallback) -> None:
        self.weights: list[Tensor] = []
        self._ours = ours
        self._first: Any = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._first = self._first or self._ours.plan

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self.weights.append(torch.cat([each.detach().double().flatten() for each in tensors]))
        run, is_recovered = self._ours._run, any(isinstance(part, Recovery) for part in self._ours._parts)
        if is_recovered and run is not None and run.applied.plan != self._first:
            self._ours._change_plan(run, _InThisProcess(), self._first)


def trained(
    case: Case, ours: HFCkptCallback, mode: FailingOperators, num_steps: int, *, counts_optimizer: bool = False
) -> tuple[list[Tensor], list[float]]:
    """Train, and return weights and buffers after each step, and the losses."""
    kept = Kept(ours)
    model = case.make()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_steps": num_steps, "gradient_accumulation_steps": case.accumulation, "learning_rate": 1e-4}
        args = TrainingArguments(**arguments(Path(folder), **settings))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        steps = Steps(mode, counts_optimizer=counts_optimizer)
        # Elsewhere than in the optimizer's step nothing is to be counted, then.
        kind = Trainer if counts_optimizer else PhasedTrainer
        run = kind(
            model=model, args=args, train_dataset=rows(64), optimizers=(optimizer, None), callbacks=[ours, kept, steps]
        )
        run.remove_callback(PrinterCallback)
        vars(run)["mode"] = mode
        with mode:
            run.train()
    return kept.weights, losses(run)


def escalating() -> HFCkptCallback:
    """The plugin, without recomputation until memory runs out."""
    return HFCkptCallback("none", on_oom="escalate", prove="off")


def swept(case: Case, moment: str, stride: int) -> Entry:
    """Let each operator of forward and backward fail in a step of its own."""
    counting = FailingOperators()
    trained(case, escalating(), counting, 2)
    starts = sorted(set(counting.starts[1]))
    numbers = list(range(0, starts[-1], stride))
    mode = FailingOperators({step: [number] for step, number in enumerate(numbers, start=1)}, after=moment == "after")
    ours = escalating()
    got = trained(case, ours, mode, len(numbers) + 1)
    expected = trained(case, HFCkptCallback("full", prove="off"), FailingOperators(), len(numbers) + 1)
    pairs = zip(zip(*got, strict=True), zip(*expected, strict=True), strict=True)
    wrong = [step for step, pair in enumerate(pairs) if not _is_same(*pair)]
    return {
        "num_operators": starts[-1],
        "phases_begin_at": starts,
        "num_tried": len(numbers),
        # Which operators run may depend on values: of experts, for one.
        "num_failed": mode.raised,
        "num_recovered": int(ours.report()["ckpt/oom_recovered"]),
        "num_equal": len(numbers) + 1 - len(wrong),
        "wrong": [numbers[step - 1] if step else None for step in wrong],
    }


def _is_same(got: tuple[Tensor, float], expected: tuple[Tensor, float]) -> bool:
    return torch.equal(got[0], expected[0]) and got[1] == expected[1]


def swept_optimizer(case: Case, moment: str, stride: int) -> Entry:
    """Let each operator of the optimizer's third step fail in a run of its own."""
    counting = FailingOperators()
    expected = trained(case, escalating(), counting, 4, counts_optimizer=True)[0]
    found: dict[str, list[int]] = {"went_on": [], "ended": [], "wrong": []}
    num_operators = counting.number
    for number in range(0, num_operators, stride):
        mode = FailingOperators({2: [number]}, after=moment == "after")
        try:
            got = trained(case, escalating(), mode, 4, counts_optimizer=True)[0]
        except OutOfMemoryError:
            found["ended"].append(number)
            continue
        found["went_on" if all(map(torch.equal, got, expected)) and mode.raised else "wrong"].append(number)
    return {"num_operators": num_operators, **found}


# --- Entries and the result. ---


def collect(journal: Journal, names: list[str], stride: int, *, of_optimizer: bool) -> None:
    """Sweep over forward and backward of the cases, or over the optimizer's step of the first."""
    # What torch and transformers have made is not searched in each of thousands of recoveries.
    gc.collect()
    gc.freeze()
    logging.getLogger("hf_ckpt").setLevel(logging.ERROR)
    for moment in MOMENTS:
        for name in [_OPTIMIZER] if of_optimizer else names:
            measure = partial(swept_optimizer, CASES["llama"]) if of_optimizer else partial(swept, CASES[name])
            journal.entry(f"{name}/{moment}", partial(measure, moment, stride), limit_s=_ENTRY_LIMIT_S)
            _show(f"{name}/{moment}", journal)


def _show(key: str, journal: Journal) -> None:
    found = {name: value for name, value in journal.entries[key].items() if not isinstance(value, list)}
    print(f"{key}: {found}", flush=True)


def assemble(journal: Journal, stride: int) -> dict[str, Any]:
    """Return the result of the entries that are there."""
    steps = [entry for key, entry in journal.entries.items() if not key.startswith(_OPTIMIZER)]
    whole = [entry for entry in steps if "num_tried" in entry]
    totals = {name: sum(entry[name] for entry in whole) for name in ("num_tried", "num_failed", "num_recovered")}
    totals["num_wrong"] = sum(len(entry["wrong"]) for entry in journal.entries.values() if "wrong" in entry)
    return {"stride": stride, "totals": totals, "entries": journal.entries}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--case", choices=CASES, action="append", help="one of the models; all if left out")
    parser.add_argument("--optimizer", action="store_true", help="the optimizer's step, in place of the rest")
    parser.add_argument("--stride", type=int, default=1, help="look at each so many-th operator only")
    parser.add_argument("--seconds", type=float, help="after which no entry begins; the same command goes on")
    add_out(parser)


def run(asked: Namespace) -> int:
    """Sweep and write one JSON; the exit code says whether anything differed."""
    out = asked.out or RESULTS / f"recovery_sweep{'_optimizer' * asked.optimizer}.json"
    names = asked.case or list(CASES)
    result = carry_out(
        out,
        partial(collect, names=names, stride=asked.stride, of_optimizer=asked.optimizer),
        partial(assemble, stride=asked.stride),
        asked.seconds,
    )
    print(f"{result['totals']}; written to {out}")
    return int(result["totals"]["num_wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(__name__))
