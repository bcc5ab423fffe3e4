"""The benchmarks that have a script of their own, as stages: with which options, and in which order.

Each has a lean extent, for a card that is there for a quarter of an hour, and a whole one, which goes on from what the
lean one has found: their entries have the same names. What was prepared becomes an entry before anything is measured,
so that a result holds all that it rests on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from benchmarks import engines, longctx, offload, overhead, predict
from benchmarks.cases import CASES, Case
from benchmarks.journal import Journal, OutOfTimeError
from benchmarks.on_gpu import names
from benchmarks.on_gpu.setting import COMPILED, EAGER, OFFLOADED, Assembled, Setting
from benchmarks.side_by_side import measure
from benchmarks.side_by_side.contender import Contender
from benchmarks.side_by_side.contenders import chosen

Json = dict[str, Any]

# --- What the lean programme takes of each. ---


class Lean(NamedTuple):
    """A case of the comparison in the lean programme.

    Args:
        contenders: beside `none`.
        budgets: that `auto` plans for, by what sets them; see `side_by_side.budgets`.
    """

    contenders: tuple[str, ...]
    budgets: tuple[str, ...]


_HEADLINE = "llama2_7b_lora_2048"
_TRAINER = ("transformers_full", "transformers_every_2", "transformers_every_4", "transformers_offload")
LEAN_COMPARED = {
    # What the Trainer has, what torchtitan has, and ours. Budgets: the least that the Trainer reaches without offload,
    # where its next best setting is the farthest off, and the most that leaves it something to choose.
    _HEADLINE: Lean(
        contenders=(*_TRAINER, "torchtitan_selective", "full", "selective", "full_offload"),
        budgets=("transformers_full", "just below transformers_every_2", "transformers_every_4"),
    ),
    "llama32_1b_full_2048": Lean(
        contenders=("transformers_full", "transformers_every_2", "full", "selective"),
        budgets=("just below transformers_every_2",),
    ),
}
LEAN_PREDICTED = (
    *("llama_7b_lora_none", "llama_7b_lora_full", "llama_7b_lora_selective", "llama_7b_lora_ffn"),
    *("llama_8b_qlora_full", "llama_1b_full_none", "llama_1b_full_full", "llama_3b_full_full", "llama_8b_full_full"),
)
"""Adapters under each kind of plan, 4-bit weights, and full fine-tunes up to what a card of 80 GB just holds."""
LEAN_WARMUP, LEAN_STEPS = 2, 4
LEAN_OFFLOADED = OFFLOADED[:1]

# --- Offload: do the copies hide, and can a late one change a gradient? ---


def collect_offload(journal: Journal, setting: Setting) -> None:
    """Check copies, and time steps with and without them."""
    for policy in LEAN_OFFLOADED if setting.is_lean else OFFLOADED:
        offload.collect(journal.below(policy), _offload_options(policy, setting))


def assemble_offload(journal: Journal, setting: Setting) -> Assembled:
    """Return one result for each policy."""
    for policy in OFFLOADED:
        below = journal.below(policy)
        if below.entries:
            yield names.offload(policy, setting.device), offload.assemble(below, _offload_options(policy, setting))


def _offload_options(policy: str, setting: Setting) -> offload.Options:
    if setting.is_small:
        return offload.Options(
            device=setting.device, policy=policy, tokens=(32,), num_layers=3, num_warmup=1, num_steps=1
        )
    # Of 8,192 tokens the copies can hide; of 2,048 they cannot, which can wait.
    return offload.Options(device=setting.device, policy=policy, tokens=(8192,) if setting.is_lean else (2048, 8192))


# --- Predicted and measured. ---


def collect_predicted(journal: Journal, setting: Setting) -> None:
    """Measure training steps for which predictions were made."""
    options, wanted = _predict_options(setting), _predict_names(setting)
    for name in wanted:
        if found := setting.prepared.get(f"predicted/{name}"):
            journal.give(f"predicted/{name}", found)
    predict.collect(journal, wanted, options)


def assemble_predicted(journal: Journal, setting: Setting) -> Assembled:
    """Return one result for each configuration; what was not predicted beforehand is predicted now, and says so."""
    options = _predict_options(setting)
    for name in _predict_names(setting):
        if f"measured/{name}" in journal.entries:
            prepared = journal.entries.get(f"predicted/{name}")
            result = predict.assemble(journal, name, options, {"predicted": prepared} if prepared else None)
            now = predict.with_predictions(result)
            yield (
                names.predict(name, setting.device, is_small=setting.is_small),
                now | {"predicted_beforehand": prepared},
            )


def _predict_names(setting: Setting) -> list[str]:
    names = LEAN_PREDICTED if setting.is_lean else tuple(predict.CONFIGURATIONS)
    return list(names)[: 1 if setting.is_small and setting.device == "cpu" else None]


def _predict_options(setting: Setting) -> predict.Options:
    if setting.is_small:
        return predict.Options(device=setting.device, is_small=True, num_warmup=1, num_steps=1, calibration_s=0.05)
    if setting.is_lean:
        return predict.Options(device=setting.device, num_warmup=LEAN_WARMUP, num_steps=LEAN_STEPS, calibration_s=2.0)
    return predict.Options(device=setting.device)


# --- Side by side. ---


def collect_side_by_side(name: str, groups: tuple[str, ...], journal: Journal, setting: Setting) -> None:
    """Measure contenders on a case, and the plans that were prepared for it.

    Args:
        name: of the case.
        groups: of contenders.
        journal: takes entries.
        setting: see there.
    """
    found = setting.prepared.get(f"side_by_side/{name}")
    if found is not None and groups == EAGER:
        journal.give(measure.PLANS, _plans(found))
    measure.collect(journal, *_side_by_side(name, groups, setting), say=print)


def assemble_side_by_side(name: str, groups: tuple[str, ...], journal: Journal, setting: Setting) -> Assembled:
    """Return the result of a case."""
    file = names.side_by_side(name, setting.device, is_compiled=groups == COMPILED)
    result = measure.assemble(journal, *_side_by_side(name, groups, setting))
    # Contenders that nobody has looked at belong to the other extent.
    looked_at = {key.partition("/")[2] for key in journal.entries if key.startswith("first_look/")}
    contenders = {one: record for one, record in result["contenders"].items() if one in looked_at}
    yield file, result | {"contenders": contenders}


def _side_by_side(
    name: str, groups: tuple[str, ...], setting: Setting
) -> tuple[Case, str, tuple[Contender, ...], measure.Effort]:
    effort = measure.Effort(num_rounds=5, num_steps=2, num_budgets=0)
    if setting.is_small:
        effort = measure.Effort(num_rounds=1, num_steps=1, num_budgets=0)
        # A device runs what the CPU's tests cannot.
        eager = SMALL_CONTENDERS if setting.device == "cpu" else LEAN_COMPARED[_HEADLINE].contenders
        groups = _SMALL_COMPILED if groups == COMPILED else eager
    elif setting.is_lean and name in LEAN_COMPARED and groups == EAGER:
        effort = lean_effort()
        groups = LEAN_COMPARED[name].contenders
    return case_of(name, setting.is_small), setting.device, chosen(groups), effort


def lean_effort() -> measure.Effort:
    """Return how much of each contender the lean programme measures: a step of the first look, one there, one back."""
    return measure.Effort(num_rounds=2, num_steps=1, num_budgets=0, is_split=False)


SMALL_CONTENDERS = ("transformers_full", "full")
"""Beside `none`; all others have tests of their own."""
_SMALL_COMPILED = ("compiled_full",)


def case_of(name: str, is_small: bool) -> Case:
    """Return a case of the comparison, or the same with two narrow layers.

    Args:
        name: of the case.
        is_small: the latter.
    """
    case = CASES[name]
    if not is_small:
        return case
    twin = case.twin()
    return replace(twin, config=twin.config | {"num_hidden_layers": 2, "vocab_size": 256}, batch=1, tokens=32)


def _plans(found: Json) -> Json:
    return {"autos": list(map(asdict, _autos(found)))}


def _autos(found: Json) -> Iterator[measure.Auto]:
    """Yield the plans of a prepared comparison."""
    for record in found["contenders"].values():
        if record["group"] == "auto" and not record["not_run"]:
            yield measure.Auto(
                budget_bytes=record["budget_bytes"],
                set_by=record["set_by"],
                plan=record["plan"],
                predicted=record["predicted"],
            )


# --- Overhead: what does going through this library cost? ---


def collect_overhead(cases: tuple[str, ...], journal: Journal, setting: Setting) -> None:
    """Time policy full against transformers' own full activation checkpointing.

    Args:
        cases: of `benchmarks.cases`.
        journal: takes entries.
        setting: see there.
    """
    for case in cases[: 1 if setting.is_small else None]:
        overhead.collect(journal.below(case), _overhead_options(case, setting))


def assemble_overhead(cases: tuple[str, ...], journal: Journal, setting: Setting) -> Assembled:
    """Return one result for each case."""
    for case in cases:
        below = journal.below(case)
        if below.entries:
            yield names.overhead(case, setting.device), overhead.assemble(below, _overhead_options(case, setting))


def _overhead_options(case: str, setting: Setting) -> overhead.Options:
    if setting.is_small:
        return overhead.Options(device=setting.device, case="llama_tiny", num_warmup=1, num_rounds=2)
    return overhead.Options(device=setting.device, case=case, num_warmup=1, num_rounds=10)


# --- Engines: what do plans cost and free under DDP and FSDP2, in a group of one process? ---


def collect_engine(case: str, method: str, name: str, journal: Journal, setting: Setting) -> None:
    """Train under every policy in an engine.

    Args:
        case: of `benchmarks.cases`.
        method: `lora` or `full`.
        name: `ddp` or `fsdp2`.
        journal: takes entries.
        setting: see there.
    """
    with engines.process_group(setting.device):
        engines.collect(journal, _engine_options(case, method, name, setting))


def assemble_engine(case: str, method: str, name: str, journal: Journal, setting: Setting) -> Assembled:
    """Return the result of an engine."""
    result = engines.assemble(journal, _engine_options(case, method, name, setting))
    yield names.engine(case, method, name, setting.device), result


def _engine_options(case: str, method: str, name: str, setting: Setting) -> engines.Options:
    options = engines.Options(device=setting.device, case=case, engine=name, has_lora=method == "lora")
    return replace(options, case="llama_tiny", num_steps=2, num_warmup=1) if setting.is_small else options


# --- The longest row: whether it is as long as predicted, how long it is, and how fast shorter ones are. ---

SMALL_CAP_GIB = 0.004
_SMALL_LENGTHS = (128,)


def collect_longest(cap_gib: float, part: str, journal: Journal, setting: Setting) -> None:
    """Train rows of growing length under a capped allocator, or time some.

    Args:
        cap_gib: of the allocator.
        part: of `longctx`.
        journal: takes entries.
        setting: with what was prepared, without which nothing is tried: to simulate here takes minutes.
    """
    options = longest_options(cap_gib, part, device=setting.device, is_small=setting.is_small)
    for key in longest_keys(options):
        found = setting.prepared.get(f"longest/{key}")
        if key not in journal.entries and found is None:
            raise OutOfTimeError(f"{key} was not prepared")
        journal.give(key, found or {})
    longctx.collect(journal, options)


def assemble_longest(cap_gib: float, part: str, journal: Journal, setting: Setting) -> Assembled:
    """Return the result of a part under a cap."""
    options = longest_options(cap_gib, part, device=setting.device, is_small=setting.is_small)
    yield (
        names.longest(part, options.cap_gib, setting.device, is_small=setting.is_small),
        longctx.assemble(journal, options),
    )


def longest_options(
    cap_gib: float, part: str, *, device: str, is_small: bool, predicts_for: str = "h200"
) -> longctx.Options:
    """Return the options of a part under a cap; of tiny models where it is small."""
    if is_small:
        return longctx.Options(device=device, is_small=True, part=part, cap_gib=SMALL_CAP_GIB, lengths=_SMALL_LENGTHS)
    return longctx.Options(device=device, part=part, cap_gib=cap_gib, predicts_for=predicts_for)


def longest_keys(options: longctx.Options) -> list[str]:
    """Return the keys of what has to be prepared for a part."""
    if options.part == "speed":
        return [options.key(f"planned_{length}") for length in options.lengths]
    of = longctx.PREDICTED.values() if options.part == "bracket" else ("predicted",)
    return [options.key(name) for name in of]
