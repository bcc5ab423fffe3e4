"""The benchmarks that have a script of their own, as stages: with which options, and in which order.

What was prepared becomes an entry before anything is measured, so that a result holds all that it rests on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from benchmarks import engines, longctx, offload, overhead, predict
from benchmarks.cases import CASES, Case
from benchmarks.journal import Journal, OutOfTimeError
from benchmarks.on_gpu import names
from benchmarks.on_gpu.setting import COMPILED, EAGER, OFFLOADED, Assembled, Setting
from benchmarks.side_by_side import measure
from benchmarks.side_by_side.contender import Contender
from benchmarks.side_by_side.contenders import chosen

Json = dict[str, Any]

# --- Offload: do the copies hide, and can a late one change a gradient? ---


def collect_offload(journal: Journal, setting: Setting) -> None:
    """Check copies, and time steps with and without them."""
    for policy in OFFLOADED:
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
    return offload.Options(device=setting.device, policy=policy, tokens=(2048, 8192))


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
    return list(predict.CONFIGURATIONS)[: 1 if setting.is_small else None]


def _predict_options(setting: Setting) -> predict.Options:
    if setting.is_small:
        return predict.Options(device=setting.device, is_small=True, num_warmup=1, num_steps=1, calibration_s=0.05)
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
    yield file, measure.assemble(journal, *_side_by_side(name, groups, setting))


def _side_by_side(
    name: str, groups: tuple[str, ...], setting: Setting
) -> tuple[Case, str, tuple[Contender, ...], measure.Effort]:
    effort = measure.Effort(num_rounds=5, num_steps=2, num_budgets=0)
    if setting.is_small:
        effort = measure.Effort(num_rounds=1, num_steps=1, num_budgets=0)
        groups = _SMALL_COMPILED if groups == COMPILED else SMALL_CONTENDERS
    return case_of(name, setting.is_small), setting.device, chosen(groups), effort


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


# --- The longest row, and how fast shorter ones are. ---

SMALL_CAP_GIB = 0.004
_SMALL_LENGTHS = (128,)


def collect_longest(cap_gib: float, part: str, journal: Journal, setting: Setting) -> None:
    """Train rows of growing length under a capped allocator, or time some.

    Args:
        cap_gib: of the allocator.
        part: `limit` or `speed`.
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
    if options.part == "limit":
        return [options.key("predicted")]
    return [options.key(f"planned_{length}") for length in options.lengths]
