"""`hf-ckpt inspect`: the layers of a recipe's model, their parts, what they hold and what each mode would do.

Without weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from hf_ckpt.errors import HFCkptError, PolicyError, UnsupportedError
from hf_ckpt.estimate.predict import devices_for
from hf_ckpt.estimate.recipe_plan import with_auto_plan
from hf_ckpt.estimate.step_of_recipe import Subject, describe_rows, subject_of
from hf_ckpt.estimate.tables import columns, facts
from hf_ckpt.estimate.weights import weights_of
from hf_ckpt.loading.model import find_config
from hf_ckpt.patch.tileable_modules import tiled_modules
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.policy.resolve_rules import resolve
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.step_memory import HeldTensor, StepMemory
from hf_ckpt.structure.layers import Layer, Stack, find_layers
from hf_ckpt.structure.lm_head import find_head, governed_by_other
from hf_ckpt.trainer.metrics import describe_recomputed, recomputed_share
from hf_ckpt.units import format_bytes
from hf_ckpt.verify.reduce_model import MetaModel, adapt_to_machine, build_on_meta, config_fields, write_config

_KEEPS = {
    Mode.NONE: "keeps every activation",
    Mode.FULL: "keeps a layer's input",
    Mode.ATTENTION: "keeps all but the inside of the attention",
    Mode.FFN: "keeps all but the inside of the ffn",
    Mode.SELECTIVE: "keeps the outputs of matrix products and attention, and where tokens are routed to",
    Mode.SELECTIVE_ATTENTION: "keeps a layer's input and the attention's output",
}


def inspect_report(recipe: Recipe, names: Mapping[str, str]) -> str:
    """Return what there is to say of a recipe's model and plan, as text.

    `names`: `layers`, `attention`, `ffn`, where they are not found by structure.
    """
    wanted, _ = adapt_to_machine(with_auto_plan(recipe)[0])
    if wanted.checkpointing is not None:
        wanted = replace(wanted, checkpointing=wanted.checkpointing.with_options(**names))
    found = find_config(wanted)
    with tempfile.TemporaryDirectory(prefix="hf_ckpt-inspect-") as folder:
        full = build_on_meta(wanted, write_config(config_fields(found.config), wanted, found, Path(folder)))
    stacks = full.stacks or find_layers(full.model, **names)
    head = f"{full.class_name}, config from {found.source}"
    subject = _subject(recipe, names)
    # What cannot be simulated is built as it is, on this machine.
    weights = weights_of(full.model) if isinstance(subject, HFCkptError) else subject.weights
    parts = [
        head,
        *([] if weights is None else facts(list(weights.rows()))),
        *_structure(stacks),
        "",
        *_modes(recipe, full, stacks),
        "",
        *_plan(full, stacks),
        "",
        *_held(subject),
    ]
    return "\n".join(parts)


def _structure(stacks: Sequence[Stack]) -> Iterator[str]:
    for stack in stacks:
        yield ""
        yield f"{stack.path}: {len(stack.layers)} layers ({', '.join(sorted(stack.roles))})"
        for what, alike in groupby(stack.layers, key=_describe):
            layers = list(alike)
            first, last = layers[0].layer_idx, layers[-1].layer_idx
            yield f"  {f'{first} to {last}' if last > first else first!s:<10}  {what}"


def _describe(layer: Layer) -> str:
    ffn = "in the layer's own forward" if layer.ffn_is_inline else ", ".join(layer.ffn) or "none"
    parts = f"attention: {', '.join(layer.attention) or 'none'}; ffn: {ffn}"
    frozen = "" if layer.needs_gradient else "; frozen, with nothing trained before it"
    return f"{type(layer.module).__name__}{f' ({layer.layer_type})' if layer.layer_type else ''}; {parts}{frozen}"


def _modes(recipe: Recipe, full: MetaModel, stacks: Sequence[Stack]) -> Iterator[str]:
    yield "On every layer, a mode"
    width = max(map(len, Mode))
    for mode in Mode:
        yield f"  {mode:<{width}}  {_KEEPS[mode]}{_again(full, stacks, mode)}"
    yield "What can be added to it"
    yield f"  {'offload':<{width}}  what a layer keeps waits in host memory, or on disk, for its backward"
    yield f"  {'weights':<{width}}  a layer's frozen weights wait in host memory while other layers run"
    yield f"  {'tiles':<{width}}  {_tiled(stacks)}"
    yield f"  {'head: chunked':<{width}}  {_chunked(recipe, full)}"


def _tiled(stacks: Sequence[Stack]) -> str:
    """Return what runs in slices of the sequence, or why nothing does."""
    found: dict[str, None] = {}
    reasons: dict[str, None] = {}
    for stack in stacks:
        for layer in stack.layers:
            try:
                found[", ".join(tiled_modules(layer))] = None
            except UnsupportedError as error:
                reasons[str(error)] = None
    sliced = [f"slices of the sequence, each recomputed, in {' or '.join(found)}"] if found else []
    return "; ".join([*sliced, *list(reasons)[:1]])


def _chunked(recipe: Recipe, full: MetaModel) -> str:
    """Return which head is meant, or why it cannot run in chunks."""
    if recipe.kind.of_trl and not recipe.kind.scores_rows:
        return "trl computes head and loss together, and governs"
    try:
        other = governed_by_other(full.model)
        head = find_head(full.model).path
    except HFCkptError as error:
        return str(error)
    return f"{other} governs" if other else f"{head} and the loss run for some tokens at a time: no logits are held"


def _again(full: MetaModel, stacks: Sequence[Stack], mode: Mode) -> str:
    """Return what runs again in backward under a mode, or that no layer has such a part."""
    try:
        plan = resolve(Policy.parse(mode.value), stacks, full.class_name)
    except PolicyError:
        return f"; no layer has an {'attention' if mode is Mode.SELECTIVE_ATTENTION else mode}"
    left_out = sum(bool(layer.why) for stack in plan.stacks for layer in stack.layers)
    without = f"; {left_out} layers have none" if left_out else ""
    share = recomputed_share(plan, stacks)
    return f"; {describe_recomputed(share)}{without}" if share else without


def _plan(full: MetaModel, stacks: Sequence[Stack]) -> Iterator[str]:
    if full.plan is None:
        yield "The recipe has no plan (no checkpointing section)."
        return
    yield "The plan of the recipe"
    yield from (f"  {line}" for line in full.plan.summary().splitlines())
    yield f"  {describe_recomputed(recomputed_share(full.plan, stacks))}"


def _subject(recipe: Recipe, names: Mapping[str, str]) -> Subject | HFCkptError:
    """Return the recipe's step as it is simulated, or why it cannot be."""
    try:
        return subject_of(recipe, structure=names)
    except HFCkptError as error:
        return error


def _held(subject: Subject | HFCkptError) -> Iterator[str]:
    """Yield what the layers hold from forward to backward where nothing is recomputed."""
    try:
        if isinstance(subject, HFCkptError):
            raise subject
        device = devices_for(subject.recipe, ())[0]
        memory = subject.simulator(device).simulate(None, explains=True)
    except HFCkptError as error:
        yield f"What the layers hold is not known: {error}"
        return
    yield f"What the layers hold for their backward without a plan: {describe_rows(subject.step)}; {device.title}"
    yield from ledger(memory)
    yield f"  outside the layers: {format_bytes(outside(memory))}"


_SMALL = 0.01  # Share of a layer's bytes below which tensors are counted together.
_SHOWN_MODULES = 2


class _Kind(NamedTuple):
    """A tensor that a layer holds, as it is shown; without a module, all that differ in that only."""

    module: str  # Below the layer.
    part: str
    operator: str
    what: str
    num_bytes: int
    why: str


def ledger(memory: StepMemory) -> Iterator[str]:
    """Yield lines of text: for each kind of layer what it holds, the most first."""
    kinds: dict[tuple[str, tuple[_Kind, ...]], tuple[list[_Kind], list[int]]] = {}
    by_layer: dict[tuple[str, int], list[HeldTensor]] = {}
    for tensor in memory.ledger:
        if tensor.place.layer_idx is not None:
            by_layer.setdefault((tensor.place.stack, tensor.place.layer_idx), []).append(tensor)
    for (stack, layer_idx), tensors in sorted(by_layer.items()):
        held = [_kind(tensor, f"{stack}.{layer_idx}") for tensor in tensors]
        # What the last layer returns is held for what comes after the layers: that makes it no other kind.
        alike = tuple(kind._replace(why="") for kind in held)
        kinds.setdefault((stack, alike), (held, []))[1].append(layer_idx)
    for (stack, _), (held, indices) in kinds.items():
        total = sum(kind.num_bytes for kind in held)
        each = " each" if len(indices) > 1 else ""
        yield f"  {_ranges(indices)} of {stack}: {format_bytes(total)}{each}"
        yield from (f"  {line}" for line in _rows(held, total))


def outside(memory: StepMemory) -> int:
    """Return the bytes that are held outside the layers."""
    return sum(held.num_bytes for held in memory.ledger if held.place.layer_idx is None)


def _ranges(indices: Sequence[int]) -> str:
    """Return `layer 3`, or `layers 0 to 4, 6 to 10`."""
    runs = [
        [idx for _, idx in run]
        for _, run in groupby(enumerate(indices), key=lambda numbered: numbered[1] - numbered[0])
    ]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(words)}"


def _kind(tensor: HeldTensor, layer: str) -> _Kind:
    module = tensor.place.module.removeprefix(layer).lstrip(".").removesuffix(".default") or "the layer"
    operator = tensor.place.operator.removeprefix("aten.").partition(".")[0].lstrip("_")
    what = f"{tensor.dtype} {list(tensor.shape)}"
    reasons = [_reason(reason, module) for reason in tensor.why.split(", ")] if tensor.why else []
    why = f"for {', '.join(dict.fromkeys(reasons))}" if reasons else ""
    return _Kind(module, tensor.place.part, operator, what, tensor.num_bytes, why)


def _reason(reason: str, module: str) -> str:
    """Return the operator whose backward needs a tensor, and its module where that is not the tensor's own."""
    operator, _, where = reason.partition(" of ")
    return operator if where.removesuffix(".default") == module else reason


def _rows(held: Sequence[_Kind], total: int) -> Iterator[str]:
    modules: dict[_Kind, list[str]] = {}
    for kind in held:
        modules.setdefault(kind._replace(module=""), []).append(kind.module)
    sizes = {kind: kind.num_bytes * len(names) for kind, names in modules.items()}
    ordered = sorted(sizes, key=lambda kind: -sizes[kind])
    shown = [kind for kind in ordered if sizes[kind] >= _SMALL * total]
    rest = ordered[len(shown) :]
    rows = []
    for kind in shown:
        names = modules[kind]
        times = "" if len(names) == 1 else f"{len(names)} x "
        different = list(dict.fromkeys(names))
        more = f" and {len(different) - _SHOWN_MODULES} more" if len(different) > _SHOWN_MODULES else ""
        where = ", ".join(different[:_SHOWN_MODULES]) + more
        rows.append((kind.part, kind.operator, f"{times}{format_bytes(kind.num_bytes)}", kind.what, where, kind.why))
    if rest:
        number, size = sum(len(modules[kind]) for kind in rest), sum(sizes[kind] for kind in rest)
        rows.append(("", "smaller tensors", format_bytes(size), f"{number} together", "", ""))
    return columns(rows, numeric=(2,))
