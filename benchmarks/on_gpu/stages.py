"""What there is to measure, in the order of its value. Imports nothing that measures; see `names`.

Stages with `share_s` are the lean programme: those of the first 570 seconds on an H100, and behind them those of a
second run on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.cases import CASES, CONFIGURATIONS
from benchmarks.on_gpu import names
from benchmarks.on_gpu.setting import COMPILED, EAGER, OFFLOADED, Stage
from benchmarks.repeatable import CUBLAS

_HEADLINE, _SECOND = "llama2_7b_lora_2048", "llama32_1b_full_2048"
_BRACKET = "is the longest row of {} GiB as long as predicted, ours and the Trainer's ({})?"
_OVERHEAD = ("llama_1b", "llama_7b")
_ENGINES = tuple(
    (case, method, name) for case, method in (("llama_7b", "lora"), ("llama_1b", "full")) for name in ("fsdp2", "ddp")
)


def _later(module: str, function: str, *given: Any) -> Callable[..., Any]:
    """Return a function that is imported when it is called, with its first arguments."""
    return partial(_call, module, function, *given)


def _call(module: str, function: str, *given: Any) -> Any:
    return getattr(import_module(f"benchmarks.on_gpu.{module}"), function)(*given)


def _benchmark(part: str, *given: Any) -> dict[str, Callable[..., Any]]:
    """Return what a stage does, of `measurements`."""
    return {kind: _later("measurements", f"{kind}_{part}", *given) for kind in ("collect", "assemble")}


def _side_by_side(name: str, groups: tuple[str, ...] = EAGER, share_s: float | None = None) -> Stage:
    is_compiled = groups == COMPILED
    whose = "compiled layers" if is_compiled else "all ways to save memory"
    return Stage(
        name=f"side_by_side_{name}{'_compiled' if is_compiled else ''}",
        question=f"what do {whose} cost and free: {CASES[name].title}?",
        files=(names.side_by_side(name, "cuda", is_compiled=is_compiled),),
        limit_s=400,
        share_s=share_s,
        **_benchmark("side_by_side", name, groups),
    )


def _engine(case: str, method: str, name: str) -> Stage:
    return Stage(
        name=f"engine_{case}_{method}_{name}",
        question=f"what do plans cost and free under {name}, {case}?",
        files=(names.engine(case, method, name, "cuda"),),
        limit_s=200,
        variables=CUBLAS,
        **_benchmark("engine", case, method, name),
    )


def _rows(name: str, question: str, cap_gib: float, part: str, limit_s: float, share_s: float | None = None) -> Stage:
    return Stage(
        name=name,
        question=question,
        files=(names.longest(part, cap_gib, "cuda"),),
        limit_s=limit_s,
        share_s=share_s,
        **_benchmark("longest", cap_gib, part),
    )


STAGES = (
    Stage(
        name="smoke",
        question="does the card answer, and how fast is it?",
        collect=_later("probe", "collect_smoke"),
        assemble=_later("probe", "assemble_smoke"),
        files=("smoke_cuda.json",),
        limit_s=100,
        share_s=20,
    ),
    Stage(
        name="recovery",
        question="does a run that runs out of memory go on, and end as if it had not?",
        collect=_later("recovery", "collect"),
        assemble=_later("recovery", "assemble"),
        files=("recovery_cuda.json",),
        limit_s=150,
        share_s=45,
        variables=CUBLAS,
    ),
    Stage(
        name="exactness",
        question="are losses and gradients those of a step without a plan, to the bit?",
        collect=_later("exactness", "collect"),
        assemble=_later("exactness", "assemble"),
        files=("exactness_cuda.json",),
        limit_s=300,
        share_s=85,
        variables=CUBLAS,
    ),
    Stage(
        name="predicted",
        question="how near are predicted peaks and times to measured ones?",
        files=tuple(names.predict(name, "cuda") for name in CONFIGURATIONS),
        limit_s=400,
        share_s=75,
        **_benchmark("predicted"),
    ),
    _side_by_side(_HEADLINE, share_s=155),
    _rows("bracket_24gib", _BRACKET.format(24, "4 of 32 layers"), 24, "bracket", 500, share_s=105),
    Stage(
        name="offload",
        question="do copies to the host hide behind computation, and can a late one change a gradient?",
        files=tuple(names.offload(policy, "cuda") for policy in OFFLOADED),
        limit_s=200,
        share_s=30,
        variables=CUBLAS,
        **_benchmark("offload"),
    ),
    Stage(
        name="proof",
        question="what does the proof of the first step cost?",
        collect=_later("proof_time", "collect"),
        assemble=_later("proof_time", "assemble"),
        files=("proof_cuda.json",),
        limit_s=100,
        share_s=12,
    ),
    # From here on in a second run. The shorter ones first: they may find room in what is left of the first run.
    Stage(
        name="waiting_weights",
        question="is a step with frozen weights on the host the same, as small as predicted, and how much slower?",
        collect=_later("waiting", "collect"),
        assemble=_later("waiting", "assemble"),
        files=("waiting_weights_cuda.json",),
        limit_s=100,
        share_s=35,
        variables=CUBLAS,
    ),
    _side_by_side(_SECOND, share_s=35),
    _rows("bracket_80gib", _BRACKET.format(80, "1 of 32 layers"), 80, "bracket", 500, share_s=170),
    Stage(
        name="probe",
        question="what are this card, this host and the link between them?",
        collect=_later("probe", "collect"),
        assemble=_later("probe", "assemble"),
        files=("probe_cuda.json",),
        limit_s=150,
        share_s=100,
    ),
    # From here on in the long programme only.
    Stage(
        name="overhead",
        question="what does policy full cost over transformers' own full checkpointing?",
        files=tuple(names.overhead(case, "cuda") for case in _OVERHEAD),
        limit_s=120,
        **_benchmark("overhead", _OVERHEAD),
    ),
    _rows("longest_row_24gib", "what is the longest row that trains in 24 GiB?", 24, "limit", 500),
    *(_side_by_side(name) for name in CASES if name not in (_HEADLINE, _SECOND)),
    *(_engine(*given) for given in _ENGINES),
    _side_by_side(_HEADLINE, COMPILED),
    _rows("longest_row_80gib", "what is the longest row in 80 GiB, with 4 of 32 layers?", 80, "limit", 500),
    _rows("speed_of_rows_24gib", "how fast are rows of 8k to 64k tokens in 24 GiB?", 24, "speed", 400),
)
"""All stages."""
