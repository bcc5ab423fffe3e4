"""What training leaves behind beside weights: random state, buffers, names, flags, hooks, caches, generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_ckpt.verify.check import Check, Verdict
from hf_ckpt.verify.record import MicroBatch, Record, UserHook
from hf_ckpt.verify.trials import Trials
from hf_ckpt.verify.words import counted, listed


def check_random_numbers(trials: Trials) -> Check:
    """Compare the states of the random number generators after each forward and backward."""
    name = "random numbers"
    for number, (expected, again, got) in enumerate(_triples(trials)):
        for generator, state in expected.random_state.items():
            if state == again.random_state.get(generator) and state != got.random_state.get(generator):
                return Check(
                    name=name,
                    verdict="fail",
                    detail=f"From micro-batch {number + 1} on, the {generator} generator is in another state than "
                    "without the plan: recomputation drew random numbers and did not put the state back.",
                )
    if not trials.planned.micro_batches:
        return Check(name=name, verdict="skip", detail="No forward was completed with the plan.")
    generators = listed(trials.reference.micro_batches[0].random_state)
    what = f"The generators ({generators}) are in the same states after each micro-batch."
    return Check(name=name, verdict="pass", detail=what)


def _triples(trials: Trials) -> Iterator[tuple[MicroBatch, MicroBatch, MicroBatch]]:
    finished = (micro for micro in trials.planned.micro_batches if micro.random_state)
    yield from zip(trials.reference.micro_batches, trials.repeated.micro_batches, finished, strict=False)


def check_buffers(trials: Trials) -> Check:
    """Compare buffers, and plain values on modules such as counters, after the last step."""
    name = "buffers"
    buffers = _stable_differences(trials, "buffers")
    values = _stable_differences(trials, "attributes")
    figures = {
        "num_buffers": len(trials.planned.buffers),
        "num_buffers_not_equal": len(buffers),
        "num_values_not_equal": len(values),
    }
    if not buffers and not values:
        what = f"{counted(len(trials.planned.buffers), 'buffer')} and the plain values on all modules are equal."
        return Check(name=name, verdict="pass", detail=what, figures=figures)
    parts = []
    if buffers:
        parts.append(
            f"{counted(len(buffers), 'buffer')} {_differ(buffers)} ({listed(buffers)}): the forward writes to "
            "them, and recomputation wrote a second time, as with the running statistics of a batch norm."
        )
    if values:
        pairs = (f"{key} {trials.reference.attributes.get(key)!r}, {values[key]!r} with the plan" for key in values)
        parts.append(
            f"{counted(len(values), 'value')} on modules {_differ(values)} ({listed(pairs)}): the forward changes them."
        )
    parts.append("Leave these layers out of the policy.")
    return Check(name=name, verdict="fail", detail=" ".join(parts), figures=figures)


def _differ(values: Mapping[str, object]) -> str:
    return "differs" if len(values) == 1 else "differ"


def _stable_differences(trials: Trials, what: str) -> dict[str, Any]:
    """Return what the reference repeats and the planned trial has otherwise."""
    reference, repeated, planned = (
        getattr(record, what) for record in (trials.reference, trials.repeated, trials.planned)
    )
    return {
        key: planned.get(key)
        for key in sorted(reference.keys() | planned.keys())
        if reference.get(key) == repeated.get(key) != planned.get(key)
    }


def check_names(trials: Trials) -> Check:
    """Compare names of modules and keys of the state dict before, during and after training with the reference's."""
    name = "names"
    for when, names in trials.planned.names.items():
        before = set(trials.reference.names[when])
        new, gone = sorted(set(names) - before), sorted(before - set(names))
        if new or gone:
            what = [f"new are {listed(new)}"] if new else []
            what += [f"gone are {listed(gone)}"] if gone else []
            return Check(
                name=name,
                verdict="fail",
                detail=f"Names of modules or of the state dict's keys differ {when} training: {'; '.join(what)}. A "
                "wrapper renames what it wraps, and saved weights are then not found again.",
            )
    number = len(trials.reference.names["before"])
    same = f"{number} names of modules and of state-dict keys are the same {_and(trials.planned.names)} training."
    return Check(name=name, verdict="pass", detail=same, figures={"num_names": number})


def _and(names: Mapping[str, object]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def check_state(planned: Record) -> Iterator[Check]:
    """Hold flags and autocast in recomputation against those of the forward."""
    autocast = [change for change in planned.state_changes if change.what == "autocast"]
    flags = [change for change in planned.state_changes if change.what != "autocast"]
    if flags:
        first, modules = flags[0], len({change.path for change in flags})
        cause = "eval() or train() was called" if first.what == "training" else "the flag was changed"
        detail = (
            f"{first.what} of {first.path} was {first.in_forward!r} in the forward and {first.in_recomputation!r} in "
            f"its recomputation ({counted(modules, 'module')} in all): {cause} between forward and backward."
        )
        yield Check(name="training flags", verdict="fail", detail=detail, figures={"num_modules_changed": modules})
    else:
        detail = "Flags of recomputed modules, training mode among them, were those of their forward."
        yield Check(name="training flags", verdict=_if_recomputed(planned), detail=detail)
    if autocast:
        first = autocast[0]
        detail = (
            f"Autocast was lost in recomputation: {first.in_forward} in the forward of {first.path}, "
            f"{first.in_recomputation} in its recomputation. Gradients are of another precision than the forward."
        )
        yield Check(name="autocast", verdict="fail", detail=detail)
    else:
        detail = "Autocast in recomputation was that of the forward."
        yield Check(name="autocast", verdict=_if_recomputed(planned), detail=detail)


def _if_recomputed(planned: Record) -> Verdict:
    return "pass" if any(in_backward for _, in_backward in planned.entries) else "skip"


def check_hooks(trials: Trials) -> Check:
    """Hold what the user's own hooks did against the reference."""
    name = "hooks"
    hooks = list(zip(trials.reference.hooks, trials.repeated.hooks, trials.planned.hooks, strict=True))
    if not hooks:
        return Check(name=name, verdict="skip", detail="The model carries no hooks but those of libraries.")
    twice = [planned for _, _, planned in hooks if planned.runs_again]
    wrong = [
        (reference, planned)
        for reference, repeated, planned in hooks
        if reference.change == repeated.change != planned.change
    ]
    figures = {"num_hooks": len(hooks), "num_run_again": len(twice)}
    if wrong:
        reference, planned = wrong[0]
        detail = (
            f"The {planned.kind} {planned.name} on {planned.path} left other values behind: "
            f"{_shown(reference.change)} without and {_shown(planned.change)} with the plan. It runs again when the "
            f"module is recomputed{_and_more(len(wrong) - 1)}. Let it return early while a backward runs "
            "(torch._C._current_graph_task_id() != -1), or leave the layer out of the policy."
        )
        return Check(name=name, verdict="fail", detail=detail, figures=figures)
    return Check(name=name, verdict="pass", detail=_harmless(hooks, twice), figures=figures)


def _harmless(hooks: list[Any], twice: list[UserHook]) -> str:
    if not twice:
        return f"{counted(len(hooks), 'hook')} of the user, none in a recomputed region."
    first = twice[0]
    return (
        f"{counted(len(twice), 'hook')} of {len(hooks)} ran again in recomputation, first {first.name} on "
        f"{first.path}; nothing that can be seen of them differs. What they write elsewhere (files, other processes) "
        "cannot be seen."
    )


def _and_more(number: int) -> str:
    return f", and so do {number} more" if number else ""


def _shown(change: Any) -> str:
    text = "nothing" if change is None else repr(change)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + " ..."


_LONGEST_SHOWN = 120


def check_use_cache(planned: Record) -> Check:
    """See that every `use_cache` is the user's again."""
    if planned.use_cache:
        where, (before, after) = next(iter(planned.use_cache.items()))
        detail = f"use_cache of {where} was {before!r} before training and is {after!r} after it."
        return Check(name="use_cache", verdict="fail", detail=detail)
    return Check(name="use_cache", verdict="pass", detail="After training every use_cache is what it was before.")


def check_generation(trials: Trials) -> Check:
    """Compare what is generated between two steps and after training."""
    name = "generation"
    expected, got = trials.reference.generated, trials.planned.generated
    tried = {when: tokens for when, tokens in expected.items() if not isinstance(tokens, str)}
    if not tried:
        reason = next(iter(expected.values()), "no step was done")
        return Check(name=name, verdict="skip", detail=f"The model does not generate without the plan either: {reason}")
    wrong = [when for when in tried if got.get(when) != tried[when]]
    if wrong and not trials.is_repeatable:
        return Check(name=name, verdict="skip", detail="Not compared: the run does not repeat itself.")
    if wrong and trials.planned.leeway is not None:
        why = f"{trials.planned.leeway.what} round otherwise, and the weights with them"
        return Check(name=name, verdict="skip", detail=f"Not compared: {why}.")
    if wrong:
        when = wrong[0]
        detail = f"Generation {when} gives {got.get(when)} with and {tried[when]} without the plan."
        return Check(name=name, verdict="fail", detail=detail)
    detail = f"Greedy generation {', '.join(tried)} gives the same tokens."
    return Check(name=name, verdict="pass", detail=detail, figures={"num_tokens": sum(map(len, tried.values()))})
