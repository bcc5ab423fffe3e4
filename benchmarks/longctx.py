"""The longest context, measured: QLoRA of Llama 3.1 8B with the allocator capped, in steps of a real Trainer.

The case is recipes/llama3_8b_qlora_longctx.yaml with random weights made on the device, and with the optimizer's state
on the device: paged, it is memory that the driver moves as it likes, which under a cap can stop a card for good. Each
trial is a process of its own that trains one step at one length; lengths are tried from the predicted one on until the
largest that trains and the smallest that runs out of memory are within 1 % of each other. What was tried is kept and
not tried again, so that the command can be stopped and repeated: `--seconds` begins no trial after so long.

    python benchmarks/longctx.py --device cuda --part speed             # tokens per second at 8k to 64k tokens
    python benchmarks/longctx.py --device cuda --part limit --cap 24    # the longest row in 24 GiB, about 10 minutes
    python benchmarks/longctx.py --device cuda --part limit --cap 80    # the same in 80 GiB, with 4 of the 32 layers
    python benchmarks/longctx.py --device cuda --part bracket --cap 24  # is the prediction right? 3 % below, 3 % above
    python benchmarks/longctx.py --device cpu --small                   # a tiny model; followed, and capped by a budget

A full step at 80 GiB would take half an hour: there 4 layers are run, under a cap that is smaller by what the
prediction gives the others, and the result holds both predictions. A bracket asks less than the search, and of few
layers at every cap: a row of 97 % of the predicted length has to train, one of 103 % must not, of ours and of the
Trainer's own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, default_data_collator

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import children
from benchmarks.host_limit import with_capped_offload
from benchmarks.journal import NO_FIGURES, Entry, FileJournal, Journal, OutOfTimeError
from benchmarks.longctx_cases import GIB, build, recipe_of, subject
from benchmarks.longctx_predict import Search
from benchmarks.predict import StepGauge, reserved_bytes
from benchmarks.result_files import carry_out
from benchmarks.runner import RESULTS, add_device, add_out, main
from hf_ckpt import HFCkptCallback, Plan
from hf_ckpt.estimate.max_length_and_batch import leanest_plans, with_length
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.planner.advice import LENGTH_MULTIPLE
from hf_ckpt.recipe.checkpointing import NO_CHECKPOINTING
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import CPU, Device, find_device
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.step_memory import StepMemory

SPEED_LENGTHS = (8192, 16384, 32768, 65536)
FEW_LAYERS = 4
FEW_FROM_GIB = 48
"""Caps from which on a full step takes too long, and few layers stand for all."""
BRACKET = (97, 103)
"""Percent of the predicted length."""
PREDICTED = {"hf_ckpt": "predicted", "transformers": "predicted_transformers"}
"""Names of entries with what is predicted for a bracket, by whose rows they are; ours is tried first."""
_SHORT = 8192
"""Tokens of a row that is quick to simulate."""
CLOSE = 0.01
"""Of the predicted length: trials that are nearer to each other end the search."""
OUT_OF_MEMORY = "out_of_memory"
OPTIM = "adamw_8bit"
_TRIAL_LIMIT_S = 540.0
_START_S = 8.0
"""That a trial takes at least before its step begins."""
_TO_END_S = 30.0
"""That ending a trial may take."""
_PREDICTION_LIMIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        device: `cpu` or `cuda`.
        is_small: a tiny model on the CPU.
        part: `limit`, the longest row, `bracket`, whether it is as long as predicted, or `speed`.
        cap_gib: that the allocator may take.
        predicts_for: the device in the words of the prediction.
        lengths: of the rows whose speed is measured.
    """

    device: str
    is_small: bool = False
    part: str = "limit"
    cap_gib: float = 24.0
    predicts_for: str = "h200"
    lengths: tuple[int, ...] = SPEED_LENGTHS

    @property
    def cap_bytes(self) -> int:
        """What the allocator may take."""
        return int(self.cap_gib * GIB)

    def key(self, of: object) -> str:
        """Return the key of an entry of this part under this cap."""
        return f"{self.part}_{self.cap_gib:g}gib/{of}"


@dataclass(frozen=True)
class Trial:
    """A step to train, in a process of its own.

    Args:
        length: tokens of the row.
        cap_bytes: that the allocator may take; 0 for no cap.
        plan: JSON of the plan, or a key of `OWN`.
        num_layers: of the model; None for all.
        num_steps: to train; the first one warms up where there are several.
        is_small: a tiny model on the CPU.
    """

    length: int
    cap_bytes: int
    plan: str
    num_layers: int | None = None
    num_steps: int = 1
    is_small: bool = False


# --- One trial. ---


def _recipe(*, num_layers: int | None = None, is_small: bool = False) -> Recipe:
    return recipe_of(num_layers=num_layers, is_small=is_small, optim=OPTIM)


def train(trial: Trial, device: str) -> Entry:
    """Train the steps of a trial in this process, and return what they took."""
    place = torch.device(device)
    recipe = _recipe(num_layers=trial.num_layers, is_small=trial.is_small)
    model = build(recipe, place)
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, trial.cap_bytes / total) if trial.cap_bytes else 1.0)
        torch.cuda.reset_peak_memory_stats()
    own = trial.plan if trial.plan in OWN else None
    plugin = None if own else _plugin(trial, recipe)
    gauge = StepGauge(place, min(1, trial.num_steps - 1))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            **_arguments(recipe.training, trial, device), **OWN.get(own or "", {}), output_dir=folder
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=_rows(trial, int(model.config.get_text_config().vocab_size)),
            data_collator=default_data_collator,
            callbacks=[gauge] if plugin is None else [plugin, gauge],
        )
        if device != "cuda":
            memory = follow_trainer(trainer, at_step=trial.num_steps)
            return {"peak_bytes": memory.peak_bytes, "host_bytes": memory.host_bytes}
        loss = trainer.train().training_loss
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "seconds": gauge.seconds,
        "loss": loss,
        "figures": {} if plugin is None else plugin.report(),
    } | reserved_bytes()


def _plugin(trial: Trial, recipe: Recipe) -> HFCkptCallback:
    section = recipe.checkpointing or NO_CHECKPOINTING
    return HFCkptCallback(
        with_capped_offload(Plan.from_json(trial.plan)),
        prove="off",
        # No plan says it, and PEFT models have them on by default. Then the embeddings' output is a leaf that needs a
        # gradient, which autograd keeps to the end of backward: one layer input more on the device than is predicted.
        input_require_grads=section.input_require_grads,
    )


OWN: dict[str, dict[str, Any]] = {
    "transformers": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
}
"""Arguments of the Trainer that ask for its own full checkpointing."""


def _arguments(training: Mapping[str, Any], trial: Trial, device: str) -> dict[str, Any]:
    taken = {key: training[key] for key in ("optim", "bf16", "learning_rate", "per_device_train_batch_size")}
    return taken | {
        "max_steps": trial.num_steps,
        "use_cpu": device != "cuda",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


def _rows(trial: Trial, vocab_size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (trial.num_steps, trial.length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def in_a_process(trial: Trial, device: str, timeout_s: float) -> Entry:
    """Run a trial in a process of its own; what runs out of memory takes nothing along.

    Raises:
        OutOfTimeError: it took longer than it may, of which nothing follows.
    """
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "trial.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(asdict(trial)), encoding="utf-8")
        words = [sys.executable, __file__, "--trial", str(asked), "--answer", str(answer), "--device", device]
        process = children.start(words, env=environment)
        try:
            code = process.wait(timeout_s)
        except TimeoutExpired:
            raise OutOfTimeError(
                f"{trial.length:,} tokens take longer than the {timeout_s:.0f} s that are left"
            ) from None
        finally:
            children.end(process)
        if not answer.is_file():
            return {"failed": f"exit code {code}"}
        found: Entry = json.loads(answer.read_text(encoding="utf-8"))
        return found


def _answer(asked: Path, answer: Path, device: str) -> None:
    trial = Trial(**json.loads(asked.read_text(encoding="utf-8")))
    found = FileJournal().entry("trial", partial(train, trial, device))
    answer.write_text(json.dumps(found), encoding="utf-8")


# --- The search. ---


def next_length(tried: Mapping[int, bool], predicted: int) -> int | None:
    """Return the length to try next, or None where the end is known.

    Args:
        tried: lengths, and whether a step trained.
        predicted: the longest row as predicted; the first one to try.
    """
    unit = max(LENGTH_MULTIPLE, int(predicted * CLOSE) // LENGTH_MULTIPLE * LENGTH_MULTIPLE)
    fits = max((length for length, is_good in tried.items() if is_good), default=0)
    fails = min((length for length, is_good in tried.items() if not is_good), default=0)
    if not tried:
        return predicted
    if not fails:
        return fits + 2 * unit
    if not fits:
        # Further away each time: nothing is known of where it begins to fit.
        below = fails - unit * 2 ** len(tried)
        return below if below > 0 else fails // 2 // LENGTH_MULTIPLE * LENGTH_MULTIPLE or None
    if fails - fits <= unit:
        return None
    return (fits + fails) // 2 // LENGTH_MULTIPLE * LENGTH_MULTIPLE


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a cap. It can be made on another machine, and handed over as JSON types.

    Args:
        plan: that reaches furthest.
        length: the longest row of the whole model.
        peak_bytes: at that length.
        host_bytes: at that length.
        cap_bytes: that what is run may take; less than asked for where few layers stand for all.
        run_peak_bytes: of what is run, at that length.
        run_seconds: that one step of what is run takes.
        num_layers: of what is run; None for all.
    """

    plan: Plan
    length: int
    peak_bytes: int
    host_bytes: int
    cap_bytes: int
    run_peak_bytes: int
    run_seconds: float = 0.0
    num_layers: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {**asdict(self), "plan": json.loads(self.plan.to_json())}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Prediction:
        """Return what `as_json` returned."""
        known = {key: value for key, value in fields.items() if key != "took_s"}
        return Prediction(**{**known, "plan": Plan.from_json(json.dumps(fields["plan"]))})


def _leanest(subject_: Subject) -> Plan:
    """Return the plan that reaches furthest."""
    return next(leanest_plans(subject_))


def _full(subject_: Subject) -> Plan:
    """Return what the Trainer's own checkpointing does."""
    return subject_.resolve("full")


def predicted(
    cap_bytes: int,
    device: Device,
    *,
    num_layers: int | None,
    is_small: bool,
    plan_of: Callable[[Subject], Plan] = _leanest,
) -> Prediction:
    """Predict the longest row under a cap, and what a few layers need at that length.

    Args:
        cap_bytes: the step may use all of it.
        device: where.
        num_layers: of what is run; None for all.
        is_small: the tiny model.
        plan_of: chooses the plan.
    """
    whole = Predictor(subject(_recipe(is_small=is_small)), device)
    plan = plan_of(whole.subject)
    search = Search(lambda tokens: _at(whole, plan, tokens).peak_bytes, _SHORT // 16 if is_small else _SHORT)
    best = search.longest(cap_bytes)
    memory = _at(whole, plan, best.number)
    found = Prediction(
        plan, best.number, memory.peak_bytes, memory.host_bytes, cap_bytes, memory.peak_bytes, memory.time.total
    )
    if num_layers is None:
        return found
    few = Predictor(subject(_recipe(num_layers=num_layers, is_small=is_small)), device)
    plan = _of_few(plan, few.subject)
    of_few = _at(few, plan, best.number)
    less = memory.peak_bytes - of_few.peak_bytes
    return replace(
        found,
        plan=plan,
        cap_bytes=cap_bytes - less,
        run_peak_bytes=of_few.peak_bytes,
        run_seconds=of_few.time.total,
        num_layers=num_layers,
    )


def _at(predictor: Predictor, plan: Plan, length: int) -> StepMemory:
    return predictor.memory(plan, with_length(predictor.subject.step, max(length, LENGTH_MULTIPLE)))


def _of_few(plan: Plan, few: Subject) -> Plan:
    """Return the plan for a model with fewer layers: the first ones, and the last one, as they are."""
    (stack,) = plan.stacks
    num_layers = len(few.stacks[0].layers)
    return replace(plan, stacks=(replace(stack, layers=(*stack.layers[: num_layers - 1], stack.layers[-1])),))


def _fits(entry: Mapping[str, Any], predicted: Prediction, options: Options) -> bool:
    # Nothing caps memory on the CPU but the comparison.
    return "peak_bytes" in entry and (options.device == "cuda" or int(entry["peak_bytes"]) <= predicted.cap_bytes)


def _tried(journal: Journal, options: Options) -> dict[int, Entry]:
    """Return the trials that are there by their lengths, in the order in which they were made."""
    start = options.key("")
    keys = {key: key.removeprefix(start) for key in journal.entries if key.startswith(start)}
    return {int(length): journal.entries[key] for key, length in keys.items() if length.isdecimal()}


def _stops(entry: Mapping[str, Any]) -> str | None:
    """Return why nothing follows from a trial: it ended, but not for want of memory."""
    return next((f"{key}: {entry[key]}" for key in NO_FIGURES if key in entry and key != OUT_OF_MEMORY), None)


# --- Entries and the result. ---


def collect(journal: Journal, options: Options) -> None:
    """Find the longest row under a cap, try those around the predicted one, or measure the speed of some lengths.

    Args:
        journal: keeps `<part>_<cap>gib/<length>` of a trial, `/<length>/<name>` of one whose speed is measured, and
            `/predicted` or `/planned_<length>`, which are made here, in some minutes, unless they are there already.
            Those of a bracket are `/<name>/<percent>`.
        options: what.

    Raises:
        OutOfTimeError: the journal's time is over.
    """
    if options.part == "limit":
        _collect_limit(journal, options)
    elif options.part == "bracket":
        _collect_bracket(journal, options)
    else:
        _collect_speed(journal, options)


def _collect_limit(journal: Journal, options: Options) -> None:
    entry = journal.entry(options.key("predicted"), partial(prediction, options), limit_s=_PREDICTION_LIMIT_S)
    if "plan" not in entry:
        return
    predicted = Prediction.from_json(entry)
    while True:
        tried = _tried(journal, options)
        if any(_stops(entry) for entry in tried.values()):
            return
        length = next_length({one: _fits(entry, predicted, options) for one, entry in tried.items()}, predicted.length)
        if length is None:
            return
        trial = Trial(
            length, predicted.cap_bytes, predicted.plan.to_json(), predicted.num_layers, is_small=options.is_small
        )
        _try(journal, options.key(length), trial, options)


def _collect_bracket(journal: Journal, options: Options) -> None:
    for name, of in PREDICTED.items():
        make = partial(prediction, options, name)
        entry = journal.entry(options.key(of), make, limit_s=_PREDICTION_LIMIT_S)
        if "plan" not in entry:
            continue
        read = Prediction.from_json(entry)
        plan = name if name in OWN else read.plan.to_json()
        for percent in BRACKET:
            length = _share_of(read.length, percent)
            trial = Trial(length, read.cap_bytes, plan, read.num_layers, is_small=options.is_small)
            needs_s = 0.0 if options.is_small else _START_S + read.run_seconds * percent / 100
            _try(journal, options.key(f"{name}/{percent}"), trial, options, needs_s)


def _share_of(length: int, percent: int) -> int:
    # Away from the prediction, on either side.
    tokens = length * percent // 100
    return max(1, tokens // LENGTH_MULTIPLE if percent < 100 else -(-tokens // LENGTH_MULTIPLE)) * LENGTH_MULTIPLE


def _collect_speed(journal: Journal, options: Options) -> None:
    for length in options.lengths:
        make = partial(planned, options, length)
        written = journal.entry(options.key(f"planned_{length}"), make, limit_s=_PREDICTION_LIMIT_S)
        plans = {"hf_ckpt": json.dumps(written["plan"])} if "plan" in written else {}
        for name, plan in (plans | {own: own for own in OWN}).items():
            trial = Trial(length, options.cap_bytes, plan, num_steps=3, is_small=options.is_small)
            _try(journal, options.key(f"{length}/{name}"), trial, options)


def _try(journal: Journal, key: str, trial: Trial, options: Options, needs_s: float = 0.0) -> None:
    left = min(journal.seconds_left(), _TRIAL_LIMIT_S)
    # A tiny step is run here.
    measure = (
        partial(train, trial, options.device)
        if options.device == "cpu"
        else partial(in_a_process, trial, options.device, left)
    )
    found = journal.entry(key, measure, needs_s=needs_s, limit_s=_TRIAL_LIMIT_S + _TO_END_S)
    print(
        f"{key}: {json.dumps({name: found[name] for name in found if name != 'figures'})}", file=sys.stderr, flush=True
    )


def prediction(options: Options, name: str = "hf_ckpt") -> dict[str, Any]:
    """Return what is predicted for the cap as JSON types. Needs no GPU, and some minutes.

    Args:
        options: what.
        name: of `PREDICTED`, whose rows they are.
    """
    device = CPU if options.device == "cpu" else find_device(options.predicts_for)
    return predicted(
        options.cap_bytes,
        device,
        num_layers=_num_layers(options),
        is_small=options.is_small,
        plan_of=_full if name in OWN else _leanest,
    ).as_json()


def _num_layers(options: Options) -> int | None:
    """Return how many layers stand for all; None where all are run."""
    if options.part == "bracket" and not options.is_small:
        # A step of one layer takes half a minute at 80 GiB, one of four layers a quarter of a minute at 24 GiB.
        return 1 if options.cap_gib >= FEW_FROM_GIB else FEW_LAYERS
    return FEW_LAYERS if options.cap_gib >= FEW_FROM_GIB else None


def planned(options: Options, length: int) -> dict[str, Any]:
    """Return the fastest plan for a length under the cap as JSON types. Needs no GPU, and some minutes."""
    case = subject(_recipe(is_small=options.is_small))
    device = CPU if options.device == "cpu" else find_device(options.predicts_for)
    found = Predictor(replace(case, step=with_length(case.step, length)), device).planned(Capacity(options.cap_bytes))
    return {
        "plan": json.loads(found.plan.to_json()),
        "summary": found.plan.summary().splitlines(),
        "predicted_peak_bytes": found.memory.peak_bytes,
        "predicted_seconds": found.memory.time.total,
    }


def assemble(journal: Journal, options: Options) -> dict[str, Any]:
    """Return the result of the entries that are there; the arguments are those of `collect`."""
    if options.part == "limit":
        return _assembled_limit(journal, options)
    if options.part == "bracket":
        return dict(_assembled_bracket(journal, options))
    return {"trials": _speed_trials(journal, options)}


def _assembled_limit(journal: Journal, options: Options) -> dict[str, Any]:
    tried = _tried(journal, options)
    result: dict[str, Any] = {"trials": [{"length": length, **entry} for length, entry in tried.items()]}
    written = journal.entries.get(options.key("predicted"), {})
    result["predicted"] = {key: value for key, value in written.items() if key != "took_s"}
    reasons = [f"{length} tokens: {reason}" for length, entry in tried.items() if (reason := _stops(entry))]
    if reasons:
        result["stopped_by"] = reasons[0]
    elif "plan" in written:
        read = Prediction.from_json(written)
        fits = {length: _fits(entry, read, options) for length, entry in tried.items()}
        if next_length(fits, read.length) is None:
            result["longest"] = max((length for length, is_good in fits.items() if is_good), default=0)
    return result


def _assembled_bracket(journal: Journal, options: Options) -> Iterator[tuple[str, Any]]:
    """Yield, by whose rows they are, the prediction, both trials, and whether it is right: one trained, one did not."""
    for name, of in PREDICTED.items():
        written = journal.entries.get(options.key(of), {})
        if "plan" not in written:
            continue
        read = Prediction.from_json(written)
        trials = []
        for percent in BRACKET:
            entry = journal.entries.get(options.key(f"{name}/{percent}"))
            if entry is not None:
                fits = None if _stops(entry) else _fits(entry, read, options)
                length = _share_of(read.length, percent)
                trials.append({"percent": percent, "length": length, "fits": fits, **entry})
        is_right = [one["fits"] for one in trials] == [True, False] if len(trials) == len(BRACKET) else None
        kept = {key: value for key, value in written.items() if key != "took_s"}
        yield name, {"predicted": kept, "trials": trials, "is_as_predicted": is_right}


def _speed_trials(journal: Journal, options: Options) -> list[dict[str, Any]]:
    trials = []
    for length in options.lengths:
        written = journal.entries.get(options.key(f"planned_{length}"), {})
        plan = {key: written[key] for key in ("predicted_peak_bytes", "predicted_seconds") if key in written}
        plan |= {"plan": written["summary"]} if "summary" in written else {}
        for name in ("hf_ckpt", *OWN):
            found = journal.entries.get(options.key(f"{length}/{name}"))
            if found is None:
                continue
            speed = {"tokens_per_sec": length / statistics.median(found["seconds"])} if "seconds" in found else {}
            trials.append({"length": length, "name": name, **(plan if name == "hf_ckpt" else {}), **found, **speed})
    return trials


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_device(parser, "cuda")
    parser.add_argument("--part", choices=("limit", "bracket", "speed"), default="limit")
    parser.add_argument("--cap", type=float, default=24.0, help="GiB that the allocator may take")
    parser.add_argument("--seconds", type=float, default=540.0, help="after so long no trial begins, and none goes on")
    parser.add_argument("--predicts-for", default="h200", help="the device in the words of the prediction")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    add_out(parser, RESULTS, "folder of the result")
    parser.add_argument("--trial", type=Path, help=SUPPRESS)
    parser.add_argument("--answer", type=Path, help=SUPPRESS)


def run(asked: Namespace) -> None:
    """Measure the part asked for; in the process of a trial, that trial."""
    if asked.trial is not None:
        _answer(asked.trial, asked.answer, asked.device)
        return
    options = Options(
        device=asked.device,
        is_small=asked.small,
        part=asked.part,
        cap_gib=asked.cap,
        predicts_for=asked.predicts_for,
    )
    small = "small_" if options.is_small else ""
    path = asked.out / f"longctx_{small}{options.part}_{options.cap_gib:g}gib_{options.device}.json"
    result = carry_out(path, partial(collect, options=options), partial(assemble, options=options), asked.seconds)
    for key in ("longest", "stopped_by"):
        if key in result:
            print(f"{key}: {result[key]}")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main(__name__))
