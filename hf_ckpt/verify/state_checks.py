"""Checks of the run's state: forward counts, random state, buffers, names, flags, autocast, hooks, caches, generation.

The user's own hooks: one inside a recomputed region runs again in backward. Whether that matters depends on what it
does, so this compares what it can have written to: closure cells, the object that it is bound to, arguments of a
`partial`, its defaults and attributes, and the globals that its code names.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.policy.policy import Mode
from hf_ckpt.regions.execution_state import qualified_name
from hf_ckpt.structure.attention_and_ffn import is_at_or_below
from hf_ckpt.units import counted
from hf_ckpt.verify.compare import Trials
from hf_ckpt.verify.record import Record, UserHook, WatchedLayer, tensor_digest
from hf_ckpt.verify.report import Check, Verdict, listed, numbered

FORWARDS = "forward counts"
IN_FORCE = "plan in force"
_MAX_SHOWN = 120
_LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "hf_ckpt",
    "trl",
    "liger_kernel",
    "deepspeed",
)
_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_DEPTH = 4
_MAX_ITEMS = 10_000
"""Items of a container that are compared; of a longer one (a vocabulary, a data set) only the length is."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NEVER_STATE = (torch.dtype, torch.device, types.ModuleType, type)

_RECOVERED = "Memory ran out, and the run went on under a leaner plan: what ran before that ran again."

# --- Forward counts against the policy: what ran again in backward, and what did not. ---


def check_counts(reference: Record, planned: Record) -> Check:
    """Compare how often modules ran, with the plan and without it, with what the policy means."""
    if reference.recomputations:
        return Check(
            FORWARDS,
            "fail",
            f"Without the plan, {_modules(list(reference.recomputations))} ran again in backward all the same: "
            "something else than the plan checkpoints the model. Turn it off.",
        )
    if planned.num_recovered:
        return Check(FORWARDS, "skip", _RECOVERED)
    if planned.expected_plan != planned.plan:
        return Check(FORWARDS, "fail", "The plan in force was not the one that the policy means.")
    if planned.failure is not None:
        return Check(FORWARDS, "skip", "The run ended in the middle of a step.")
    faults = list(_count_faults(planned))
    if faults:
        return Check(FORWARDS, "fail", " ".join(faults))
    num_layers, paths = len(planned.layers), tuple(planned.recomputations)
    num_again = sum(any(path.startswith(f"{layer.path}.") for path in paths) for layer in planned.layers)
    what = f"Nothing of {num_layers} layers ran again in backward, as planned."
    if num_again:
        what = f"{num_again} of {num_layers} layers ran again in backward, whole or in part, each as often as planned."
    figures = {
        "num_layers": num_layers,
        "num_layers_recomputed": num_again,
        "num_module_forwards": planned.forwards.total(),
        "num_module_forwards_in_backward": planned.recomputations.total(),
    }
    return Check(FORWARDS, "pass", what, figures)


def check_in_force(planned: Record) -> Check:
    """Check that what the plan put onto layers and parts stood there in every forward."""
    if planned.num_recovered:
        return Check(IN_FORCE, "skip", _RECOVERED)
    if planned.replaced:
        path, what = next(iter(planned.replaced.items()))
        return Check(
            IN_FORCE,
            "fail",
            f"The plan was overwritten by another library or script on {_modules(list(planned.replaced))}: on "
            f"{path} {what}. Call whatever does this before training, or not at all.",
        )
    faults = " ".join(planned.callback_faults)
    if faults:
        return Check(IN_FORCE, "fail", f"The run itself would stop in its first step: {faults}")
    return Check(IN_FORCE, "pass", "In every forward the plan was on its layers as it was applied.")


def _count_faults(planned: Record) -> Iterator[str]:
    idle: list[WatchedLayer] = []
    again: list[str] = []
    wrong: list[str] = []
    for layer in (layer for layer in planned.layers if not layer.recomputes_itself):
        for root, excluded in _regions(layer):
            if (count := _count(planned, layer, root, excluded)) is None:
                continue
            forward, backward, expected = count
            if not backward:
                idle.append(layer)
            elif backward not in expected:
                wrong.append(f"{root} ran {forward} times, and {backward} times again in backward")
        regions = list(_regions(layer))
        inside = (path for path in planned.recomputations if path.startswith(f"{layer.path}."))
        again += [
            path
            for path in inside
            if not any(is_at_or_below(path, root) and not is_at_or_below(path, *excluded) for root, excluded in regions)
        ]
    # The chunked head runs again, and the modules inside it.
    layers = (*(layer.path for layer in planned.layers), *([planned.head] if planned.head else []))
    again += [path for path in planned.recomputations if not is_at_or_below(path, *layers)]
    if planned.head and not any(is_at_or_below(path, planned.head) for path in planned.recomputations):
        yield f"The plan did nothing on the head: nothing of {planned.head} ran again in backward."
    if idle:
        modes = listed(sorted({f'"{layer.entry.mode}"' for layer in idle}))
        yield (
            f"The plan did nothing on {_layers(idle)}: planned {modes}, but nothing ran again in backward. Its "
            "checkpoint function was replaced or switched off after the plan was applied."
        )
    if again:
        yield (
            f"{_modules(again)} ran again in backward although the plan keeps the activations there: activation "
            "checkpointing of another library or script is on too. Turn it off."
        )
    if wrong:
        yield f"Counts are not those of the plan: {wrong[0]}{f', and {len(wrong) - 1} more' * (len(wrong) > 1)}."


def _regions(layer: WatchedLayer) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the paths of what should run again, each with the paths inside it that should not."""
    match layer.entry.mode:
        case Mode.FULL | Mode.SELECTIVE | Mode.SELECTIVE_ATTENTION:
            yield layer.path, ()
        case Mode.ATTENTION:
            yield from ((path, ()) for path in layer.attention)
        case Mode.FFN if layer.ffn:
            # What runs in tiles is recomputed in them.
            yield from ((path, ()) for path in layer.ffn if path not in layer.tiled)
        case Mode.FFN:
            yield layer.path, layer.attention
    yield from ((path, ()) for path in layer.tiled)


def _count(
    planned: Record, layer: WatchedLayer, root: str, excluded: tuple[str, ...]
) -> tuple[int, int, set[int]] | None:
    """Return the numbers of forwards, of recomputations, and of those allowed; None where nothing can be expected.

    Counts the first module that a region enters: a recomputation that stops early still begins at the beginning.
    Without a gradient at its output a region has no backward, and so no reason to run again.
    """
    entered = (path for path in planned.forwards if path.startswith(f"{root}."))
    first = next((path for path in entered if not is_at_or_below(path, *excluded)), None)
    if first is None or root not in planned.with_output_gradient:
        return None
    forward, backward = planned.forwards[first], planned.recomputations[first]
    if root in layer.tiled:
        # Each slice, and before them a few positions, to check that slices give the same as the whole.
        return forward, backward, set(range(1, 2 * forward + 1))
    # Layers of a nested segment run twice, but for the last one, which is needed once only; with snapshots as often as
    # the schedule says, the first one of so many once for each at most.
    most = 2 if layer.entry.snapshots is None else len(planned.layers)
    return forward, backward, set(range(forward, most * forward + 1, forward)) if layer.entry.nested else {forward}


def _layers(layers: Sequence[WatchedLayer]) -> str:
    paths = dict.fromkeys(layer.path.rpartition(".")[0] for layer in layers)
    return listed(
        f"{numbered([int(layer.path.rpartition('.')[2]) for layer in layers if layer.path.startswith(f'{path}.')])} "
        f"of {path}"
        for path in paths
    )


def _modules(paths: Sequence[str]) -> str:
    return f"{paths[0]}{f' and {len(paths) - 1} more modules' * (len(paths) > 1)}"


# --- What training leaves behind besides weights. ---


def check_random_numbers(trials: Trials) -> Check:
    """Compare the states of the random number generators after each forward and backward."""
    name = "random numbers"
    finished = (micro for micro in trials.planned.micro_batches if micro.random_state)
    triples = zip(trials.reference.micro_batches, trials.repeated.micro_batches, finished, strict=False)
    for number, (expected, again, got) in enumerate(triples):
        for generator, state in expected.random_state.items():
            if state == again.random_state.get(generator) and state != got.random_state.get(generator):
                return Check(
                    name,
                    "fail",
                    f"From micro-batch {number + 1} on, the {generator} generator is in another state than "
                    "without the plan: recomputation drew random numbers and did not put the state back.",
                )
    if not trials.planned.micro_batches:
        return Check(name, "skip", "No forward was completed with the plan.")
    generators = listed(trials.reference.micro_batches[0].random_state)
    return Check(name, "pass", f"The generators ({generators}) are in the same states after each micro-batch.")


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
        return Check(name, "pass", what, figures)
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
    return Check(name, "fail", " ".join(parts), figures)


def _differ(values: Mapping[str, object]) -> str:
    return "differs" if len(values) == 1 else "differ"


def _stable_differences(trials: Trials, what: str) -> dict[str, Any]:
    """Return the planned trial's values that differ, where the reference repeats its own."""
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
                name,
                "fail",
                f"Names of modules or of the state dict's keys differ {when} training: {'; '.join(what)}. A "
                "wrapper renames what it wraps, and saved weights are then not found again.",
            )
    number, (*rest, last) = len(trials.reference.names["before"]), trials.planned.names
    when = f"{', '.join(rest)} and {last}" if rest else last
    same = f"{number} names of modules and of state-dict keys are the same {when} training."
    return Check(name, "pass", same, {"num_names": number})


def check_state(planned: Record) -> Iterator[Check]:
    """Compare flags and autocast in recomputation with those of the forward."""
    autocast = [change for change in planned.state_changes if change.what == "autocast"]
    flags = [change for change in planned.state_changes if change.what != "autocast"]
    if_same: Verdict = "pass" if planned.recomputations else "skip"
    if flags:
        first, modules = flags[0], len({change.path for change in flags})
        cause = "eval() or train() was called" if first.what == "training" else "the flag was changed"
        detail = (
            f"{first.what} of {first.path} was {first.in_forward!r} in the forward and {first.in_recomputation!r} in "
            f"its recomputation ({counted(modules, 'module')} in all): {cause} between forward and backward."
        )
        yield Check("training flags", "fail", detail, {"num_modules_changed": modules})
    else:
        detail = "Flags of recomputed modules, training mode among them, were those of their forward."
        yield Check("training flags", if_same, detail)
    if autocast:
        first = autocast[0]
        detail = (
            f"Autocast was lost in recomputation: {first.in_forward} in the forward of {first.path}, "
            f"{first.in_recomputation} in its recomputation. Gradients are of another precision than the forward."
        )
        yield Check("autocast", "fail", detail)
    else:
        yield Check("autocast", if_same, "Autocast in recomputation was that of the forward.")


def check_use_cache(planned: Record) -> Check:
    """Check that every `use_cache` is the user's again."""
    if planned.use_cache:
        where, (before, after) = next(iter(planned.use_cache.items()))
        detail = f"use_cache of {where} was {before!r} before training and is {after!r} after it."
        return Check("use_cache", "fail", detail)
    return Check("use_cache", "pass", "After training every use_cache is what it was before.")


def check_generation(trials: Trials) -> Check:
    """Compare what is generated between two steps and after training."""
    name = "generation"
    expected, got = trials.reference.generated, trials.planned.generated
    tried = {when: tokens for when, tokens in expected.items() if not isinstance(tokens, str)}
    if not tried:
        reason = next(iter(expected.values()), "no step was done")
        return Check(name, "skip", f"The model does not generate without the plan either: {reason}")
    wrong = [when for when in tried if got.get(when) != tried[when]]
    if wrong and not trials.is_repeatable:
        return Check(name, "skip", "Not compared: the run does not repeat itself.")
    if wrong and trials.planned.tolerance is not None:
        why = f"{trials.planned.tolerance.what} round otherwise, and the weights with them"
        return Check(name, "skip", f"Not compared: {why}.")
    if wrong:
        when = wrong[0]
        return Check(name, "fail", f"Generation {when} gives {got.get(when)} with and {tried[when]} without the plan.")
    detail = f"Greedy generation {', '.join(tried)} gives the same tokens."
    return Check(name, "pass", detail, {"num_tokens": sum(map(len, tried.values()))})


# --- The user's own hooks. ---


def check_hooks(trials: Trials) -> Check:
    """Compare what the user's own hooks did with the reference."""
    name = "hooks"
    hooks = list(zip(trials.reference.hooks, trials.repeated.hooks, trials.planned.hooks, strict=True))
    if not hooks:
        return Check(name, "skip", "The model carries no hooks but those of libraries.")
    twice = [planned for _, _, planned in hooks if planned.runs_again]
    wrong = [
        (reference, planned)
        for reference, repeated, planned in hooks
        if reference.change == repeated.change != planned.change
    ]
    figures = {"num_hooks": len(hooks), "num_run_again": len(twice)}
    if wrong and trials.planned.num_recovered:
        return Check(name, "skip", f"{_RECOVERED} So hooks ran more often, and left other values behind.", figures)
    if wrong:
        reference, planned = wrong[0]
        more = f", and so do {len(wrong) - 1} more" if len(wrong) > 1 else ""
        detail = (
            f"The {planned.kind} {planned.name} on {planned.path} left other values behind: "
            f"{_shown(reference.change)} without and {_shown(planned.change)} with the plan. It runs again when the "
            f"module is recomputed{more}. Let it return early while a backward runs "
            "(torch._C._current_graph_task_id() != -1), or leave the layer out of the policy."
        )
        return Check(name, "fail", detail, figures)
    return Check(name, "pass", _harmless(hooks, twice), figures)


def _harmless(hooks: list[Any], twice: list[UserHook]) -> str:
    if not twice:
        return f"{counted(len(hooks), 'hook')} of the user, none in a recomputed region."
    first = twice[0]
    return (
        f"{counted(len(twice), 'hook')} of {len(hooks)} ran again in recomputation, first {first.name} on "
        f"{first.path}; nothing that can be seen of them differs. What they write elsewhere (files, other processes) "
        "cannot be seen."
    )


def _shown(change: Any) -> str:
    text = "nothing" if change is None else repr(change)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."


class UserHooks:
    """The user's hooks on a model, and their state, before any hook of verify or of the plan is on it."""

    def __init__(self, model: nn.Module) -> None:
        # The state of modules is compared elsewhere: a hook that holds a module of the model has not written it.
        self._known = {id(module) for module in model.modules()} | {
            id(module.config) for module in model.modules() if hasattr(module, "config")
        }
        self._found = [
            (path, kind, function, visible_state(function, self._known))
            for path, module in model.named_modules()
            for kind, function in _functions_on(module)
            if not qualified_name(function).startswith(tuple(f"{name}." for name in _LIBRARIES))
        ]

    def finish(self, recomputations: Counter[str]) -> list[UserHook]:
        """Return the hooks with what was added to their visible state since, and how often their module ran again."""
        return [
            UserHook(
                path=path,
                kind=kind,
                name=qualified_name(function),
                change=_added_state(state_before, visible_state(function, self._known)),
                runs_again=0 if "backward" in kind else recomputations[path],
            )
            for path, kind, function, state_before in self._found
        ]


def _functions_on(module: nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    for attribute, kind in _KINDS.items():
        for function in getattr(module, attribute, {}).values():
            yield kind, function
    if (forward := vars(module).get("forward")) is not None:
        yield "forward", forward


def visible_state(function: Callable[..., Any], known: set[int]) -> Any:
    """Return, in comparable form, what a function can have written to; None if nothing of that is visible.

    Objects with an id in `known` are left out.
    """
    state: dict[str, Any] = {}
    read = partial(_comparable, known=known)
    while isinstance(function, partial):
        state["arguments"] = read((*function.args, *function.keywords.values()))
        function = function.func
    bound = getattr(function, "__self__", None)
    if bound is not None:
        state["bound object"] = read(bound)
    elif not isinstance(function, types.FunctionType) and hasattr(function, "__dict__"):
        state["callable object"] = read(function)
    plain = getattr(function, "__func__", function)
    if isinstance(plain, types.FunctionType):
        state.update(_state_of_function(plain, read))
    return {name: value for name, value in state.items() if value not in ((), None, {})} or None


def _state_of_function(function: types.FunctionType, read: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, read(cell.cell_contents)
        except ValueError:  # a cell that was never filled
            continue
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if not isinstance(value, types.ModuleType | type) and not callable(value):
            yield name, read(value)
    yield "attributes", read(vars(function))
    yield "defaults", read(function.__defaults__ or ())


def _comparable(value: Any, known: set[int], depth: int = _DEPTH) -> Any:
    """Return a value as plain ones, in containers; tensors as digests, and what cannot be compared as None."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else tensor_digest(value)
    if depth == 0 or id(value) in known or isinstance(value, _NEVER_STATE):
        return None
    if hasattr(value, "__len__") and len(value) > _MAX_ITEMS:
        return len(value)
    return _inside(value, partial(_comparable, known=known, depth=depth - 1))


def _inside(value: Any, read: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {str(key): read(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(repr(item) for item in value)
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):  # lists, tuples, deques, arrays
        return [read(item) for item in value]
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    if isinstance(value, nn.Module):
        attributes = {name: item for name, item in attributes.items() if not name.startswith("_")}
    return {name: read(item) for name, item in attributes.items()} or None


def _added_state(before: Any, after: Any) -> Any:
    """Return what was added to a state: differences of numbers, new items of lists, other new values as they are.

    Values themselves would not do: a hook's counter may be a global that all trials share.
    """
    if isinstance(after, bool) or not isinstance(before, type(after)):
        return None if before == after else after
    if isinstance(after, int | float | complex):
        return after - before or None
    if isinstance(after, dict):
        added = {key: _added_state(before.get(key), value) for key, value in after.items()}
        return {key: value for key, value in added.items() if value is not None} or None
    if isinstance(after, list) and after[: len(before)] == before:
        return after[len(before) :] or None
    return None if before == after else after
