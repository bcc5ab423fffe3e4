"""`hf-ckpt inspect`: the layers of a recipe's model, their parts, what they hold and what each mode would do.

Without weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from hf_ckpt.errors import HFCkptError, PolicyError, UnsupportedError
from hf_ckpt.estimate.auto_plan import with_auto_plan
from hf_ckpt.estimate.ledger import ledger, outside
from hf_ckpt.estimate.subject import describe_batch, subject_of
from hf_ckpt.estimate.where import devices_for
from hf_ckpt.loading.model_config import find_config
from hf_ckpt.patch.tileable import tiled_modules
from hf_ckpt.policy.plan import resolve
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.structure.layers import Layer, Stack, find_layers
from hf_ckpt.structure.lm_head import find_head, governed_by_other
from hf_ckpt.trainer.metrics import recomputed_share
from hf_ckpt.units import format_bytes
from hf_ckpt.verify.reduce_model import FullSize, at_full_size, fields_of, written_section
from hf_ckpt.verify.this_machine import on_this_machine

_KEEPS = {
    Mode.NONE: "keeps every activation",
    Mode.FULL: "keeps a layer's input",
    Mode.ATTENTION: "keeps all but the inside of the attention",
    Mode.FFN: "keeps all but the inside of the ffn",
    Mode.SELECTIVE: "keeps the outputs of matrix products and attention, and where tokens are routed to",
    Mode.SELECTIVE_ATTENTION: "keeps a layer's input and the attention's output",
}


def inspection(recipe: Recipe, names: Mapping[str, str]) -> str:
    """Return what there is to say of a recipe's model and plan, as text.

    Args:
        recipe: the recipe.
        names: `layers`, `attention`, `ffn`, where they are not found by structure.

    Raises:
        RecipeError: the config cannot be had, or a section does not suit the model.
        PolicyError: the policy does not suit the model; so do StructureError and UnsupportedError.
    """
    wanted, _ = on_this_machine(with_auto_plan(recipe)[0])
    if wanted.checkpointing is not None:
        wanted = replace(wanted, checkpointing={**wanted.checkpointing, **names})
    found = find_config(wanted)
    with tempfile.TemporaryDirectory(prefix="hf_ckpt-inspect-") as folder:
        full = at_full_size(wanted, written_section(fields_of(found.config), wanted, found, Path(folder)))
    stacks = full.stacks or find_layers(full.model, **names)
    head = f"{full.class_name}, {full.num_parameters:,} parameters, config from {found.source}"
    parts = [head, *_structure(stacks), "", *_modes(full, stacks), "", *_plan(full, stacks), "", *_held(recipe, names)]
    return "\n".join(parts)


def _structure(stacks: Sequence[Stack]) -> Iterator[str]:
    for stack in stacks:
        yield ""
        yield f"{stack.path}: {len(stack.layers)} layers ({', '.join(sorted(stack.roles))})"
        for what, layers in _runs(stack):
            first, last = layers[0].layer_idx, layers[-1].layer_idx
            yield f"  {f'{first} to {last}' if last > first else first!s:<10}  {what}"


def _runs(stack: Stack) -> Iterator[tuple[str, list[Layer]]]:
    for what, layers in groupby(stack.layers, key=_describe):
        yield what, list(layers)


def _describe(layer: Layer) -> str:
    ffn = "in the layer's own forward" if layer.ffn_is_inline else ", ".join(layer.ffn) or "none"
    parts = f"attention: {', '.join(layer.attention) or 'none'}; ffn: {ffn}"
    frozen = "" if layer.needs_gradient else "; frozen, with nothing trained before it"
    return f"{type(layer.module).__name__}{f' ({layer.layer_type})' if layer.layer_type else ''}; {parts}{frozen}"


def _modes(full: FullSize, stacks: Sequence[Stack]) -> Iterator[str]:
    yield "On every layer, a mode"
    width = max(map(len, Mode))
    for mode in Mode:
        yield f"  {mode:<{width}}  {_KEEPS[mode]}{_again(full, stacks, mode)}"
    yield "What can be added to it"
    yield f"  {'offload':<{width}}  what a layer keeps waits in host memory, or on disk, for its backward"
    yield f"  {'tiles':<{width}}  {_tiled(stacks)}"
    yield f"  {'head: chunked':<{width}}  {_chunked(full)}"


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


def _chunked(full: FullSize) -> str:
    """Return which head is meant, or why it cannot run in chunks."""
    try:
        other = governed_by_other(full.model)
        head = find_head(full.model).path
    except HFCkptError as error:
        return str(error)
    return f"{other} governs" if other else f"{head} and the loss run for some tokens at a time: no logits are held"


def _again(full: FullSize, stacks: Sequence[Stack], mode: Mode) -> str:
    """Return what runs again in backward under a mode, or that no layer has such a part."""
    try:
        plan = resolve(Policy.parse(mode.value), stacks, full.class_name)
    except PolicyError:
        return f"; no layer has an {'attention' if mode is Mode.SELECTIVE_ATTENTION else mode}"
    left_out = sum(bool(layer.why) for stack in plan.stacks for layer in stack.layers)
    without = f"; {left_out} layers have none" if left_out else ""
    share = recomputed_share(plan, stacks)
    return f"; {share:.0%} of the layers' weights run forward twice{without}" if share else without


def _plan(full: FullSize, stacks: Sequence[Stack]) -> Iterator[str]:
    if full.plan is None:
        yield "The recipe has no plan (no checkpointing section)."
        return
    yield "The plan of the recipe"
    yield from (f"  {line}" for line in full.plan.summary().splitlines())
    yield f"  {recomputed_share(full.plan, stacks):.0%} of the layers' weights run forward twice"


def _held(recipe: Recipe, names: Mapping[str, str]) -> Iterator[str]:
    """Yield what the layers hold from forward to backward where nothing is recomputed."""
    try:
        subject = subject_of(recipe, structure=names)
        device = devices_for(recipe, ())[0]
        memory = simulate_step(subject.model, None, subject.step, device, explains=True, **subject.structure)
    except HFCkptError as error:
        yield f"What the layers hold is not known: {error}"
        return
    batch = describe_batch(subject.step).partition(";")[0]
    yield f"What the layers hold for their backward without a plan: {batch}; {device.title}"
    yield from ledger(memory)
    yield f"  outside the layers: {format_bytes(outside(memory))}"
