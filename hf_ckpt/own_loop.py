"""A plan in a loop of one's own: chosen for its step, put in force, and left for a leaner one where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from torch import nn

from hf_ckpt.errors import PlanMismatchError, PolicyError
from hf_ckpt.patch import apply as patch
from hf_ckpt.patch.apply import Applied
from hf_ckpt.policy.allowances import allowed_by, check_no_rule
from hf_ckpt.policy.options import (
    ApplyOptions,
    LoopOptions,
    PolicyOptions,
    ProofOptions,
    StructureOptions,
    parse_count,
    select,
    takes,
    types_of,
)
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.trainer.first_step import FirstStep
from hf_ckpt.trainer.part import Planning, ProvenPlans, load
from hf_ckpt.units import parse_budget

Returned = TypeVar("Returned")

_OF_EVERY_POLICY = {*types_of(ApplyOptions), "exact", "quiet_steps"}


class AppliedInLoop(Applied):
    """A plan in force on a model that a loop of one's own trains; also a context manager that removes it on exit.

    Attributes:
        plan: what is in force.
        stacks: the stacks of the model that the plan is in force on.
        value_proof: whether recomputation gives what the forward gave.
    """

    def __init__(self, applied: Applied, model: nn.Module, planning: Planning, options: Mapping[str, Any]) -> None:
        self.adopt(applied)
        self._model = model
        self._planning = planning
        self._proven = ProvenPlans(options["prove"])
        self._is_exact = options["exact"] is not False
        self._quiet_steps = options["quiet_steps"]
        self._steps: Any = None
        self._watch_first_step()

    def _watch_first_step(self) -> None:
        self._first_step = FirstStep(self._model, self.plan, self.stacks)
        self._first_step.start_with_forward()
        self.on_remove(self._first_step.stop)

    @property
    def num_recovered(self) -> int:
        """How many steps went on after they had run out of memory."""
        return 0 if self._steps is None else int(self._steps.num_recovered)

    def step(self, closure: Callable[[], Returned], batch: object = None, *, undo: Sequence[object] = ()) -> Returned:
        """Run the forwards and backwards of a step; if memory runs out, again, under a leaner plan, to the same result.

        Random states, buffers, attributes of the model's modules and what `undo` names are brought back, and new
        gradients dropped, before the closure is called again. Nothing else is undone. What the closure runs then is
        held, bit by bit, against what it ran before. In one process, for a model that is neither sharded nor compiled;
        elsewhere the closure is called once, and its error raised.

        Args:
            closure: sets gradients to None (`optimizer.zero_grad()`), and runs forward and backward of all
                micro-batches. It does not step the optimizer, and may be called more than once.
            batch: what the closure trains on: a tensor, or mappings and sequences of them. Leaner plans are then kept
                for batches as large as the one that failed; without it, for all that follow.
            undo: what else the closure changes: objects whose attributes are brought back, such as a gradient scaler,
                containers, generators, and modules that are not the model's.

        Returns:
            What the closure returns.

        Raises:
            OutOfMemoryError: there is no leaner plan, or the closure cannot be undone: says why.
            PlanMismatchError: the plan was removed; or what ran again was not the same computation: says what differs.

        Example:
            ```python
            def closure():
                optimizer.zero_grad()
                loss = model(**batch).loss
                loss.backward()
                return loss.detach()

            loss = applied.step(closure, batch)
            optimizer.step()
            ```
        """
        if self.is_removed:
            raise PlanMismatchError("step() was called, but the plan was removed. Apply it again.")
        if self._steps is None:
            # Not before: a loop that never calls this runs no step again.
            self._steps = load("recovery.closure_steps", "applied.step()").ClosureSteps(
                *(self._model, self, self._planning, self._change_plan),
                is_exact=self._is_exact,
                quiet_steps=self._quiet_steps,
            )
        returned: Returned = self._steps.run(closure, batch, undo)
        self._proven.note(self.plan)
        return returned

    def _change_plan(self, plan: Plan) -> None:
        prove = self._proven.prove_under(plan)
        is_watched = not self._first_step.is_over
        self._first_step.stop()
        self.adopt(self.exchange(lambda: patch.apply_plan(self._model, plan, self.stacks, prove=prove)))
        if is_watched:
            # The step that failed is held against the plan that it runs again under.
            self._watch_first_step()
        self._planning.change_plan(plan)


@takes(LoopOptions)
def apply(model: nn.Module, policy: object, **options: Unpack[LoopOptions]) -> AppliedInLoop:
    """Put a policy in force on a model, in place.

    Loss and gradients do not change by a bit, but for sums in another order with `tiles` and `head` (within 1e-6 in
    float32); module and parameter names stay. Activation (gradient) checkpointing costs up to one more forward of the
    layers it reaches.

    With `"auto"` the step is simulated first, and the fastest plan that fits `memory_budget` is taken.

    Args:
        model: any transformers model, or another with layers that can be found; PEFT, DDP, FSDP or DeepSpeed may stand
            around it or its layers.
        policy: a mode name, a rule, a list of rules, a `Policy`, or a `Plan` made for this model; or `"auto"`, for one
            process that has the whole model.
        every_n_layers: see `Rule`.
        segment_size: see `Rule`.
        nested: see `Rule`.
        snapshots: see `Rule`.
        save: see `Rule`.
        offload: see `Rule`: `"cpu"`, or a mapping with the fields of `Offload`. With `"auto"`, as for
            `HFCkptCallback`; so are `tiles` and `head`.
        weights: see `Rule`: `"cpu"`, or a mapping with the fields of `Weights`. With `"auto"`, as for `HFCkptCallback`.
        tiles: see `Rule`.
        head: `"chunked"` computes logits and loss for some tokens at a time, so that the logits are never held.
        embedding: `"cpu"` keeps a frozen input embedding in host memory, `"device"` on the device. Left out, it follows
            `weights`, if it can.
        skip_frozen: leave alone the layers that need no gradient.
        layers: dotted path of the layer list, or several, where they cannot be found by structure.
        attention: attribute name, in each layer, of the attention.
        ffn: attribute name, in each layer, of the ffn.
        prove: which calls of a recomputed region are proven, bit by bit, to be repeated by its recomputation:
            `"first_step"` the first that has a backward, n every n-th as well, `"off"` none. Costs the
            device about a third of a forward, and 16 MiB; more where the host is slower (see `HFCkptCallback`).
        memory_budget: with `"auto"`, what a whole step may use of the device: `"22GiB"`, or a fraction such as 0.9,
            CUDA's context and torch's cache among it. What is free of the GPU if left out.
        exact: with `"auto"`, see `HFCkptCallback`. With any policy, False lets `step` chunk the head and run layers in
            tiles, where nothing else is leaner.
        batch_size: with `"auto"`, sequences of the largest micro-batch.
        seq_length: with `"auto"`, tokens of its sequences, padding included.
        is_padded: with `"auto"`, whether sequences may hold padding, so that the model gets a mask.
        gradient_accumulation_steps: with `"auto"`, micro-batches of a step; 1 if left out.
        autocast: with `"auto"`, `"bfloat16"` or `"float16"` where the forward runs under autocast.
        optimizer: with `"auto"`, the optimizer of the model; AdamW is counted if left out.
        quiet_steps: calls of `step` without trouble after which a faster plan returns, for batches that there is room
            for.
        **options: names and types of all these options (`LoopOptions`).

    Returns:
        A handle with `summary()`, `step()` and `remove()`; as a context manager it removes the plan on exit.

    Raises:
        PolicyError: the policy cannot be read or does not suit the model; or `"auto"` does not know the step.
        BudgetError: with `"auto"`: no plan fits; says what would.
        StructureError: the layers cannot be found.
        UnsupportedError: a mode could not be exact on a layer, or a step cannot be simulated.
        AlreadyAppliedError: the model carries a plan already.
        PlanMismatchError: from a backward that is proven: a recomputation gave something else than the forward; from
            the first one: a layer was not recomputed as planned.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import hf_ckpt
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=2)
        >>> with hf_ckpt.apply(LlamaForCausalLM(config), "full", every_n_layers=2) as applied:
        ...     print(applied.summary())
        model.layers: 4 layers
          0            full
          1            none
          2            full
          3            none
    """
    parse_count("quiet_steps", options["quiet_steps"])
    planning = Planning()
    asked: object = policy
    for_apply = select(options, ApplyOptions)
    if policy == AUTO and options["batch_size"] is not None and options["seq_length"] is not None:
        check_no_rule(select(options, PolicyOptions))
        planning = _planning(model, options)
        asked = planning.plan
        for_apply = select(options, StructureOptions) | select(options, ProofOptions)
    else:
        _check_no_step(policy, options)
    return AppliedInLoop(patch.apply(model, asked, **for_apply), model, planning, options)


def _planning(model: nn.Module, options: LoopOptions) -> Any:
    names = ("batch_size", "seq_length", "is_padded", "gradient_accumulation_steps", "autocast")
    given: dict[str, Any] = {name: options[name] for name in names if options[name] is not None}  # type: ignore[literal-required]
    budget = None if options["memory_budget"] is None else parse_budget(options["memory_budget"])
    structure = select(options, StructureOptions)
    # What simulates a step brings in the Trainer, and peft and bitsandbytes with it.
    plan_own_step = load("auto.auto", f'policy "{AUTO}"').plan_own_step
    return plan_own_step(
        *(model, budget, allowed_by(options), structure, options["optimizer"]),
        is_proven=options["prove"] != "off",
        **given,
    )


def _check_no_step(policy: object, options: LoopOptions) -> None:
    """Refuse what describes a step where none is planned for."""
    given = [name for name, value in options.items() if name not in _OF_EVERY_POLICY and value not in (None, False)]
    if given and policy != AUTO:
        raise PolicyError(
            f'{", ".join(given)} was given, but only policy "{AUTO}" plans for a step, and the policy is {policy}. '
            "Leave it out."
        )
