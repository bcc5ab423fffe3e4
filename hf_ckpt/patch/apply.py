"""A plan put onto a model, in place, and taken off again without a trace.

A layer is reached through the seam that transformers provides (`gradient_checkpointing` and
`_gradient_checkpointing_func` of a `GradientCheckpointingLayer`), a part or a layer without the seam through an
instance `forward`. No module is wrapped and no name changes; every value set here is a module-level function or a
`partial` of one, so that copies and pickles of the model carry the plan too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack

import torch.distributed as dist
from torch import nn

from hf_ckpt.distributed import deepspeed
from hf_ckpt.errors import AlreadyAppliedError, PolicyError
from hf_ckpt.patch import interrupted_run
from hf_ckpt.patch.checks import check_exact, check_model, check_offload_paths
from hf_ckpt.patch.frozen_weights import (
    bring_what_is_left,
    check_weights,
    handed_over,
    let_weights_wait,
    with_embedding,
)
from hf_ckpt.patch.instance_methods import run_all
from hf_ckpt.patch.interrupted_run import NoCall, TrainCall
from hf_ckpt.patch.layer_settings import offloaded_layers, set_on_stack
from hf_ckpt.patch.stack_patch import HANDLE, StackPatch, SwitchedByOthers
from hf_ckpt.patch.use_cache import SharedIndexCheck, Topic, skip_in_training_forwards
from hf_ckpt.policy.options import (
    ApplyOptions,
    HeadMode,
    PolicyOptions,
    Prove,
    StructureOptions,
    parse_prove,
    select,
    takes,
)
from hf_ckpt.policy.plan import Plan, parse
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.policy.resolve_rules import resolve
from hf_ckpt.regions.head import Chunking, check_reached, run_head
from hf_ckpt.regions.offload.offloader import Offloader
from hf_ckpt.regions.pending_errors import PendingErrors
from hf_ckpt.regions.tiling import Tiling
from hf_ckpt.regions.value_proof import ValueProof
from hf_ckpt.regions.waiting_weights import WaitingWeights
from hf_ckpt.structure.attention_and_ffn import unwrapped
from hf_ckpt.structure.layers import (
    Stack,
    class_name,
    clean_path,
    find_layers,
    is_sharded,
    modules_of,
    uncovered_lists,
)
from hf_ckpt.structure.lm_head import find_head, governed_by_other
from hf_ckpt.structure.stored import adapter_configs, stored
from hf_ckpt.upstream.peft import ACTIVATED_BY
from hf_ckpt.upstream.transformers import FLAG, OTHER_FLAGS

logger = logging.getLogger(__name__)

# The paths of stacks, and how many layers each has.
_Shapes = list[tuple[str, int]]

# What paths in a model with an adapter of PEFT begin with: of prompts that are learned, and of LoRA and its like.
_ADAPTED = ("base_model.", "base_model.model.")


class Applied:
    """A plan in force on a model; also a context manager that removes it on exit.

    Attributes:
        plan: what is in force.
        stacks: the stacks of the model that the plan is in force on.
        value_proof: whether recomputation gives what the forward gave.
    """

    def __init__(
        self, plan: Plan, stacks: tuple[Stack, ...], patches: list[StackPatch], value_proof: ValueProof
    ) -> None:
        self.plan = plan
        self.value_proof = value_proof
        self.stacks = stacks
        self._patches = patches

    def summary(self) -> str:
        """Return the plan as text, equal neighbouring layers on one line."""
        return self.plan.summary()

    @property
    def offloaders(self) -> tuple[Offloader, ...]:
        """The engines that move activations to the host or to disk, one for each way that the plan names."""
        return self._patches[0].offloaders if self._patches else ()

    @property
    def waiting(self) -> WaitingWeights | None:
        """What moves frozen weights between host and device; None where the plan lets none wait."""
        return self._patches[0].waiting if self._patches else None

    @property
    def pending_errors(self) -> PendingErrors:
        return self._patches[0].pending_errors if self._patches else PendingErrors()

    @property
    def tilings(self) -> tuple[Tiling, ...]:
        return tuple(tiling for patch in self._patches for tiling in patch.tilings)

    def assert_in_force(self) -> None:
        """Bring the plan back where another library switched it off, or raise `PlanMismatchError`."""
        for patch in self._patches:
            patch.assert_in_force()

    def note_use_cache(self, values: Mapping[int, object]) -> None:
        """Say what `use_cache` would be without the plan, by the id of the config, where configs are changed for it."""
        if self._patches and (check := self._patches[0].cache_check) is not None:
            check.values = values

    def leave_unsaid(self, topics: Iterable[Topic]) -> None:
        self._patches[0].told.update(topics)

    def join_ladder(self) -> None:
        """Say that leaner plans may take this one's place, which all have to give the same bits."""
        if self._patches and (check := self._patches[0].cache_check) is not None:
            check.is_on_ladder = True

    @property
    def leaves_cache(self) -> bool:
        """Whether the plan does nothing, and no other one may take its place: `use_cache` is left as it is."""
        check = self._patches[0].cache_check if self._patches else None
        return check is not None and check.leaves_cache

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the plan is removed, through this handle or through `hf_ckpt.remove`."""
        self._patches[0].on_remove(undo)

    def belongs_to(self, call: TrainCall) -> None:
        """Keep the plan in force no longer than a call of a Trainer runs."""
        for patch in self._patches:
            patch.train_call = call

    def remove_on_use_after(self, call: TrainCall, model: nn.Module, leave_use_cache: Callable[[], None]) -> None:
        """Have the plan taken off when its model is used after a Trainer's call; see `interrupted_run.Removal`."""
        self.belongs_to(call)
        for undo in interrupted_run.place(interrupted_run.Removal(call, remove_leftover, leave_use_cache), model):
            self.on_remove(undo)

    def exchange(self, put: Callable[[], Applied]) -> Applied:
        """Remove the plan and return what `put` puts in its place."""
        # What this plan's removal was to undo, the new one's undoes; where `put` raises, it is undone at once.
        undos, check, told = self._patches[0].take_undos(), self._patches[0].cache_check, self._patches[0].told
        try:
            with handed_over(self.waiting):
                self.remove()
                new = put()
        except BaseException:
            run_all(undos)
            raise
        for undo in undos:
            new.on_remove(undo)
        new.leave_unsaid(told)
        if check is not None:
            # The step may go on under the new plan.
            new.note_use_cache(check.values)
            if (its := new._patches[0].cache_check) is not None:
                its.is_on_ladder = check.is_on_ladder
        return new

    def adopt(self, other: Applied) -> None:
        """Become the handle of another plan on the same model, in place of that plan's own."""
        self.plan, self.stacks, self.value_proof = other.plan, other.stacks, other.value_proof
        self._patches = other._patches

    @property
    def is_removed(self) -> bool:
        """Whether the plan was taken off through this handle."""
        return not self._patches

    def remove(self) -> None:
        """Put the model back as it was found. A second call does nothing."""
        patches = self._patches[::-1]
        self._patches.clear()
        run_all(patch.remove for patch in patches)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


@takes(ApplyOptions)
def apply(model: nn.Module, policy: object, **options: Unpack[ApplyOptions]) -> Applied:
    """Put a policy in force on a model, in place. `hf_ckpt.apply`, which also plans, says what all of it means."""
    parsed = parse(policy, **select(options, PolicyOptions))
    plan, stacks = _planned(model, parsed, select(options, StructureOptions))
    return apply_plan(model, plan, stacks, prove=options["prove"])


def make_plan(
    model: nn.Module,
    policy: Policy | Plan,
    # The model's, where they are known.
    stacks: tuple[Stack, ...] | None = None,
    *,
    # A plan was made for the model before, which has not changed since: only the plan is checked.
    is_checked: bool = False,
    **structure: Unpack[StructureOptions],
) -> Plan:
    """Return the plan that `apply` would put in force, and leave the model alone. Raises what `apply` raises."""
    return _planned(model, policy, structure, stacks, is_checked=is_checked)[0]


def apply_plan(model: nn.Module, plan: Plan, stacks: tuple[Stack, ...], *, prove: Prove) -> Applied:
    """Put a plan in force that was made for this model, or for one that it is a copy of. It carries none yet."""
    check_offload_paths(plan, model)
    proof = ValueProof(parse_prove(prove))
    pending_errors = PendingErrors()
    patches: list[StackPatch] = []
    told: set[Topic] = set()
    offloaded = offloaded_layers(plan)
    switched = SwitchedByOthers(model)
    uses_seam = not any(getattr(each, ACTIVATED_BY, None) for each in adapter_configs(unwrapped(model)).values())
    try:
        for stack_plan, stack in zip(plan.stacks, stacks, strict=True):
            patch = StackPatch(plan, stack.path)
            patch.uses_seam = uses_seam
            patches.append(patch)
            patch.siblings, patch.told = patches, told
            patch.pending_errors = pending_errors
            # Whichever patch is removed first closes them; nothing runs after that.
            patch.offloaders = tuple(dict.fromkeys(offloader for offloader, _ in offloaded.values()))
            set_on_stack(model, patch, stack_plan, stack, offloaded, proof)
        if plan.head is HeadMode.CHUNKED:
            _chunk_head(model, patches[0], proof)
        let_weights_wait(model, patches, plan, stacks, proves=prove != "off")
        bring_what_is_left(model)
        _switch_off_others(model, patches)
        patches[0].switched = switched
        for patch, stack in zip(patches, stacks, strict=True):
            patch.attach(stack.home, stack.owner)
        # A key/value cache serves nobody in a training step.
        drops_cache = any(patch.drops_cache for patch in patches)
        check = SharedIndexCheck(stacks, told, drops_cache=drops_cache, does_nothing=plan.does_nothing)
        patches[0].hooks.extend(skip_in_training_forwards(model, check))
        patches[0].cache_check = check
    except BaseException:
        run_all(patch.remove for patch in reversed(patches))
        raise
    return Applied(plan, stacks, list(patches), proof)


def _planned(
    model: nn.Module,
    policy: Policy | Plan,
    structure: Mapping[str, Any],
    stacks: tuple[Stack, ...] | None = None,
    *,
    is_checked: bool = False,
) -> tuple[Plan, tuple[Stack, ...]]:
    if not is_checked:
        check_model(model)
        remove_leftover(model)
        if _patches(model):
            raise AlreadyAppliedError(
                f"{class_name(model)} carries a plan already. Call remove() on the handle that apply() returned, or "
                "hf_ckpt.remove(model), and apply the policy then."
            )
    if stacks is None:
        stacks = find_layers(model, **structure)
        if isinstance(policy, Policy) and structure.get("layers") is None:
            _name_uncovered(model, stacks)
    if not is_checked and is_sharded(model):
        from hf_ckpt.distributed import fsdp

        fsdp.check_units(model, stacks)
    if isinstance(policy, Plan):
        check_plan(policy, stacks, model)
        plan = policy
    else:
        plan = resolve(policy, stacks, class_name(model))
    plan = _with_head(plan, model)
    check_exact(plan, stacks, model)
    check_weights(plan, stacks, model)
    plan = with_embedding(plan, policy, model, stacks)
    deepspeed.check_version(plan, stacks)
    if is_sharded(model) and any(entry.mode is not Mode.NONE for stack in plan.stacks for entry in stack.layers):
        from hf_ckpt.distributed import fsdp

        fsdp.check_prefetch(model)
    return plan, stacks


def _name_uncovered(model: nn.Module, stacks: tuple[Stack, ...]) -> None:
    uncovered = uncovered_lists(model, stacks)
    if uncovered and (not dist.is_initialized() or dist.get_rank() == 0):
        known = ", ".join(f'"{path}"' for path in (*(stack.path for stack in stacks), *uncovered))
        logger.warning(
            "No policy reaches %s of %s: its modules compute attention, and are no layers that were recognised. Name "
            "the lists that are: layers=[%s].",
            *(" and ".join(uncovered), class_name(model), known),
        )


def _with_head(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with the head as it can be: where another library fuses head and loss, that governs."""
    if plan.head is HeadMode.PLAIN:
        return plan
    other = governed_by_other(model)
    if other is not None:
        logger.info("head: %s is asked for, but %s computes the loss already; it goes on to govern.", plan.head, other)
        return replace(plan, head=HeadMode.PLAIN)
    find_head(model)
    return plan


def remove(model: nn.Module) -> bool:
    """Take a plan off a model without the handle that `apply` returned.

    Args:
        model: the model that the policy was applied to, or one around it.

    Returns:
        Whether there was a plan.
    """
    patches = _patches(model)
    run_all(patch.remove for patch in reversed(patches))
    return bool(patches)


def remove_leftover(model: nn.Module) -> bool:
    """Take off a plan whose run an exception has ended, and return whether there was one; applied by hand, it stays."""
    # The first one removes those of the other stacks too.
    return sum(patch.remove_if_over() for patch in _patches(model)) > 0


def train_call_of(model: nn.Module) -> TrainCall:
    """Return the call of a Trainer that the plan on a model belongs to; `NoCall` without one, or if applied by hand."""
    patches = _patches(model)
    return patches[0].train_call if patches else NoCall()


def plan_of(model: nn.Module) -> Plan | None:
    patches = _patches(model)
    return patches[0].plan if patches else None


def offloaders_of(model: nn.Module) -> tuple[Offloader, ...]:
    """Return the engines of the plan that is in force on a model. See `Applied.offloaders`."""
    patches = _patches(model)
    return patches[0].offloaders if patches else ()


def waiting_of(model: nn.Module) -> WaitingWeights | None:
    """Return what moves the weights of the plan that is in force on a model. See `Applied.waiting`."""
    patches = _patches(model)
    return patches[0].waiting if patches else None


def _patches(model: nn.Module) -> list[StackPatch]:
    return [module.__dict__[HANDLE] for module in modules_of(model) if HANDLE in module.__dict__]


def check_plan(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> None:
    """Refuse a plan that was made for other layers, other parts of them or another adapter around them."""
    planned = [(stack.path, len(stack.layers)) for stack in plan.stacks]
    there = [(stack.path, len(stack.layers)) for stack in stacks]
    if planned != there:
        _check_adapter(plan, planned, there, model)
        raise PolicyError(
            f"The plan was made for {plan.model_class} with {_shapes(planned)}, but {class_name(model)} has "
            f"{_shapes(there)}. Resolve the policy for this model."
        )
    for stack_plan, stack in zip(plan.stacks, stacks, strict=True):
        for entry, layer in zip(stack_plan.layers, stack.layers, strict=True):
            if entry.mode in (Mode.ATTENTION, Mode.FFN) and entry.mode not in layer.parts:
                raise PolicyError(
                    f"The plan was made for {plan.model_class} and asks for the {entry.mode} of layer "
                    f"{layer.layer_idx} of {stack.path}, but that layer of {class_name(model)} has none. Resolve "
                    "the policy for this model."
                )
            if entry.mode is Mode.SELECTIVE_ATTENTION and not layer.computes_attention:
                raise PolicyError(
                    f"The plan was made for {plan.model_class} and sets layer {layer.layer_idx} of {stack.path} to "
                    f'"{entry.mode}", but that layer of {class_name(model)} computes no attention that could be kept. '
                    'Use mode "full" there, or resolve the policy for this model.'
                )


def _check_adapter(plan: Plan, planned: _Shapes, there: _Shapes, model: nn.Module) -> None:
    """Raise if the plan would suit the model with another kind of adapter, or with none, around it."""
    had, has = (all(path.startswith(_ADAPTED[0]) for path, _ in shapes) for shapes in (planned, there))
    if not (had or has) or len(planned) != len(there) or not all(map(_is_same_without_adapter, planned, there)):
        return
    made = "with LoRA or another adapter" if had else "without an adapter"
    raise PolicyError(
        f"The plan was made {made} ({plan.model_class}), and this model ({class_name(model)}) has "
        f"{_adapter_of(model)}: what it needs is not what was planned for. Run `hf-ckpt plan` again, or train what the "
        "plan was made for."
    )


def _is_same_without_adapter(one: tuple[str, int], other: tuple[str, int]) -> bool:
    bare = [{path.removeprefix(prefix) for prefix in ("", *_ADAPTED)} for path, _ in (one, other)]
    return one[1] == other[1] and not bare[0].isdisjoint(bare[1])


def _adapter_of(model: nn.Module) -> str:
    configs = adapter_configs(unwrapped(model))
    kinds = {str(getattr(config.peft_type, "value", config.peft_type)) for config in configs.values()}
    return f"an adapter ({', '.join(sorted(kinds))})" if kinds else "none"


def _shapes(shapes: _Shapes) -> str:
    return ", ".join(f"{num_layers} layers in {path}" for path, num_layers in shapes)


def _chunk_head(model: nn.Module, patch: StackPatch, proof: ValueProof) -> None:
    """Let the head of a model return logits that are computed some tokens at a time."""
    head = find_head(model)
    # FSDP1's wrapper around the head gathers its weight.
    outer = None if head.outer is head.module else head.outer
    chunking = Chunking(outer=outer, proof=proof.region(head.path))
    patch.set_forward(head.path, head.module, partial(run_head, chunking))
    patch.hooks.append(head.owner.register_forward_hook(partial(check_reached, chunking), with_kwargs=True))


def _switch_off_others(model: nn.Module, patches: list[StackPatch]) -> None:
    """Hold every other seam off: one plan governs, also when a library switches all seams on later."""
    ours = {module for patch in patches for module in patch.seams()}
    for raw_path, module in model.named_modules():
        if unwrapped(module) is not module:
            continue
        found = [FLAG] if stored(module, FLAG) is not None and module not in ours else []
        # By other names only what is a flag of the instance.
        found += [name for name in OTHER_FLAGS if isinstance(vars(module).get(name), bool)]
        for name in found:
            path = clean_path(model, raw_path)
            # That of the stack whose owner holds the module; the first one's if none does.
            around = (patch for patch in patches if path.startswith(patch.path.rpartition(".")[0]))
            next(around, patches[0]).set(path, module, name, False)
