"""The same contenders at real size, simulated: peak and step time of each, and plans for the budgets that they set.

Ours are simulated through the policy. Others are let in on the fake copy of the model, as on a real one; where that is
no use the result says why. Needs no GPU: a case takes some minutes on one core.

    python -m benchmarks.side_by_side.predicted --case llama2_7b_lora_2048
    python -m benchmarks.side_by_side.predicted --case all      # goes on where it stopped
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.cases import CASES, Case, build
from benchmarks.environment import describe
from benchmarks.longctx_predict import with_synchronous_offload
from benchmarks.result_files import text_of
from benchmarks.runner import RESULTS, add_case, add_out, main
from benchmarks.side_by_side.budgets import Budget, budgets_of, compare, plans, verdict
from benchmarks.side_by_side.contender import Contender, NotHereError
from benchmarks.side_by_side.contenders import CONTENDERS
from benchmarks.side_by_side.counting import thinned
from benchmarks.side_by_side.measure import predicted
from benchmarks.side_by_side.ours import POLICIES
from hf_ckpt.errors import HFCkptError
from hf_ckpt.planner.search import Planned
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import Device, find_device
from hf_ckpt.simulation.op_costs import copy_seconds
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.structure.layers import find_layers
from hf_ckpt.units import format_bytes

DEVICE = "h100-80gb"

_WITH_TIMELINE = ("none", "full", "selective", "ffn", "full_offload")
_BY_ARITHMETIC = "transformers_offload"
_HOW = (
    "by arithmetic from the simulated step of transformers' full checkpointing: less the inputs of layers that wait on "
    "the host, more both copies of each on the compute stream; host memory in powers of two, as torch pins it"
)
_ENGINE = "its own engine copies to the host on streams of a GPU, which the simulation does not follow"
_NOT_SIMULATED = {
    "accelerate_fsdp": "sharding makes the parameters anew, which a fake copy has no weights for",
    "trl_offload": _ENGINE,
    "trl_offload_all": _ENGINE,
    "unsloth_offload": _ENGINE,
    "axolotl_offload": _ENGINE,
}
_COMPILED = "what torch.compile keeps is decided when it has made code for the device"

Say = Callable[[str], None]
Record = dict[str, Any]


def predict(
    case: Case,
    contenders: Iterable[Contender],
    *,
    num_budgets: int,
    set_by: Sequence[str] = (),
    device: Device | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Predict contenders on a case, and plans for the budgets that their peaks set.

    Args:
        case: of real size, or a twin.
        contenders: in the order of the result.
        num_budgets: for how many budgets to plan at most.
        set_by: only for budgets that these set; for all of them if left out.
        device: to predict for; an H100 if left out.
        say: is called with what goes on.
    """
    device = device or find_device(DEVICE)
    model = build(case, "meta")
    records: dict[str, Record] = {}
    memories: dict[str, tuple[StepMemory, int]] = {}
    for contender in contenders:
        record = records[contender.name] = _record(contender)
        try:
            found = memories[contender.name] = _simulated(model, case, contender, device, memories)
        except (NotHereError, HFCkptError) as error:
            record["not_run"] = f"cannot be simulated: {' '.join(str(error).split())}"
            say(f"{contender.name}: {record['not_run']}")
            continue
        if contender.name == _BY_ARITHMETIC:
            record["how"] = _HOW
        _enter(record, *found, has_timeline=contender.name in _WITH_TIMELINE)
        say(f"{contender.name}: {_told(*found)}")
    asked = budgets_of(_flat(records), num_budgets, between=True) if num_budgets else []
    asked = [budget for budget in asked if not set_by or budget.set_by in set_by]
    made = plans(model, case, device, asked, say) if asked else []
    records |= {f"auto_{number}": _auto(*each) for number, each in enumerate(made, 1)}
    planned = {budget.num_bytes for budget, _ in made}
    return {
        "case": case.name,
        "title": case.title,
        "device": device.name,
        "is_small": case.is_small,
        "step": {"batch_size": case.batch, "seq_length": case.tokens},
        "model": case.facts(),
        "contenders": records,
        **judged(records, [budget for budget in asked if budget.num_bytes not in planned]),
    }


# --- Fixed contenders. ---


def _simulated(
    model: nn.Module, case: Case, contender: Contender, device: Device, memories: Mapping[str, tuple[StepMemory, int]]
) -> tuple[StepMemory, int]:
    """Return a simulated step of a contender, and the bytes that torch reserves for it.

    Raises:
        NotHereError: it cannot be simulated.
        HFCkptError: the policy does not suit the model.
    """
    simulator = StepSimulator(model, case.step, device)
    if contender.group == "none":
        return simulator.read(simulator.trace(None), None)
    if contender.name in POLICIES:
        options = dict(POLICIES[contender.name][1])
        plan = simulator.plan_of(Policy.parse(options.pop("policy"), **options))
        return simulator.read(simulator.trace(plan), plan)
    if reason := _COMPILED if contender.group == "compiled" else _NOT_SIMULATED.get(contender.name):
        raise NotHereError(reason)
    if contender.name == _BY_ARITHMETIC:
        if "transformers_full" not in memories:
            raise NotHereError("it is worked out from transformers_full, which is not there")
        full, reserved = memories["transformers_full"]
        memory = with_copies_in_line(model, case, device, full)
        return memory, reserved - full.peak_bytes + memory.peak_bytes
    return simulator.read(simulator.trace(None, changed_by=contender.enter), None)


def with_copies_in_line(model: nn.Module, case: Case, device: Device, full: StepMemory) -> StepMemory:
    """Return the step under full checkpointing as it would be with transformers' own offload.

    Args:
        model: of the case.
        case: says what hidden states are.
        device: has the link.
        full: the step without offload.
    """
    num_layers = sum(len(stack.layers) for stack in find_layers(model))
    hidden = case.batch * case.tokens * case.config["hidden_size"]
    input_bytes = hidden * getattr(torch, case.dtype).itemsize
    peak, host = with_synchronous_offload(full, num_layers, input_bytes)
    copies = full.time.copies + 2 * num_layers * copy_seconds(input_bytes, device)
    time = replace(full.time, copies=copies)
    # What it is made of at its peak does not follow from this arithmetic.
    return replace(full, peak_bytes=peak, host_bytes=host, time=time, by_category={})


def _record(contender: Contender) -> Record:
    return {"title": contender.title, "group": contender.group, "plan": None, "not_run": None}


def _auto(budget: Budget, found: Planned) -> Record:
    record: Record = {"title": f"auto, {format_bytes(budget.num_bytes)}", "group": "auto", "not_run": None}
    record |= {"budget_bytes": budget.num_bytes, "set_by": budget.set_by}
    _enter(record, found.memory, found.verdict.reserved_bytes, has_timeline=True)
    return record


def _enter(record: Record, memory: StepMemory, reserved_bytes: int, *, has_timeline: bool) -> None:
    record["plan"] = None if memory.plan is None else json.loads(memory.plan.to_json())
    record["predicted"] = predicted(memory) | {"peak_reserved_bytes": reserved_bytes}
    if has_timeline:
        end = memory.timeline.seconds[-1]
        record["predicted"]["timeline"] = [[round(share * end, 6), size] for share, size in thinned(memory.timeline)]


# --- Budgets. ---


def judged(records: Mapping[str, Record], unplanned: Sequence[Budget] = ()) -> dict[str, Any]:
    """Return how the plans for budgets compare with what fits the same budget, and the verdict over all of them.

    Args:
        records: by name, with what was predicted.
        unplanned: budgets that the planner found nothing for, though a contender fits.
    """
    rows = compare(_flat(records), lambda record: float(record["step_time_ms"]))
    missing = [{"budget_bytes": budget.num_bytes, "set_by": budget.set_by} for budget in unplanned]
    return {"budgets": rows, "unplanned": missing, "verdict": verdict(rows) | {"num_unplanned": len(missing)}}


def _flat(records: Mapping[str, Record]) -> dict[str, Record]:
    """Return records with what was predicted at their top, as measured ones have it."""
    return {name: record | record.get("predicted", {}) for name, record in records.items()}


def _told(memory: StepMemory, reserved_bytes: int) -> str:
    host = f", {format_bytes(memory.host_bytes)} on the host" if memory.host_bytes else ""
    peak = f"{format_bytes(memory.peak_bytes)} of {format_bytes(reserved_bytes)} reserved"
    return f"{peak}, {1e3 * memory.time.total:,.1f} ms{host}"


# --- Files. ---


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a case.

    Args:
        folder: of results.
        name: of the case.
    """
    return folder / f"predicted_{name}.json"


def is_done(path: Path, commit: str) -> bool:
    """Return whether a file holds a result of this commit.

    Args:
        path: that may be there.
        commit: that is checked out.
    """
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["environment"]["commit"] == commit


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_case(parser, ("all", *CASES), "llama2_7b_lora_2048")
    parser.add_argument(
        "--budgets", type=int, default=6, help="for how many budgets to plan, those of today in any case"
    )
    parser.add_argument("--again", action="store_true", help="cases too that this commit has results of")
    add_out(parser, RESULTS, "folder of the results")


def run(options: Namespace) -> None:
    """Predict cases and write their results."""
    options.out.mkdir(parents=True, exist_ok=True)
    for name in CASES if options.case == "all" else [options.case]:
        environment, path = describe(), path_of(options.out, name)
        if options.case == "all" and not options.again and is_done(path, environment["commit"]):
            print(f"{path} is there")
            continue
        result = predict(CASES[name], CONTENDERS.values(), num_budgets=options.budgets, say=_say)
        path.write_text(text_of({"environment": environment} | result), encoding="utf-8")
        print(json.dumps(result["verdict"]), f"written to {path}", sep="\n", flush=True)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(__name__))
