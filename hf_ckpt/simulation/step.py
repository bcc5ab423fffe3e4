"""The training step to simulate, as the Trainer runs it: its inputs, precision, optimizer and engine; `run_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.trainer.batch import InputTensor, Settings
from hf_ckpt.upstream import old_names_untold
from hf_ckpt.upstream.torch import run_backward, tree_leaves
from hf_ckpt.upstream.transformers import CACHE


@dataclass(frozen=True, kw_only=True)
class Zero:
    """How DeepSpeed's ZeRO is configured. Names and defaults are those of its configuration; sizes are in elements."""

    reduce_bucket_size: int = 500_000_000
    """Of the bucket that gradients are copied into."""
    num_buckets: int = 1
    """2 where ZeRO-1 and 2 fill one while the other is sent (`overlap_comm`)."""
    max_live_parameters: int = 1_000_000_000
    """ZeRO-3 gathers ahead until so many are whole; 0 where it does not gather ahead."""
    max_reuse_distance: int = 1_000_000_000
    """ZeRO-3 keeps weights whole that are used again within so many."""
    param_persistence_threshold: int = 100_000
    """ZeRO-3 keeps weights of up to so many whole."""
    sub_group_size: int = 1_000_000_000
    """ZeRO-3's optimizer steps so many weights of a rank at a time."""
    master_bytes: int = 4
    """Of one weight that the optimizer steps, and at least of each number of its state: 2 with
    `bf16_master_weights_and_grads` and `bf16_optimizer_states`."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How ranks share a model."""

    engine: str = "none"
    """`none`, `ddp`, `tp`, `fsdp1`, `fsdp2`, `zero1`, `zero2` or `zero3`. Under `tp` (tensor parallelism) the model
    that is simulated holds one rank's part already."""
    world_size: int = 1
    reshards_after_forward: bool = True
    """Whether layers gathered in forward are freed until backward (FSDP's full shard)."""
    prefetches_in_backward: bool = True
    """Whether the next unit is gathered while one runs backward. FSDP1 does with `BACKWARD_PRE` only, and not where
    layers ran forward without a graph (reentrant checkpointing)."""
    gathers_to_recompute: bool = False
    """Whether a layer is gathered once more to run again: where the checkpoint lies around FSDP1's unit, as that of
    transformers does. It takes time, and no memory."""
    broadcasts_weights: bool = True
    """Whether rank 0 sends its weights to the others while FSDP1 makes its units (`sync_module_states`)."""
    syncs_each_batch: bool = False
    """Whether FSDP shares out gradients in each micro-batch (accelerate's `sync_each_batch`), not only in the last."""
    zero: Zero = Zero()
    """Of ZeRO only."""


@dataclass(frozen=True)
class GivenOptimizer:
    """An optimizer that was made already, instead of by the Trainer's arguments."""

    kind: type[torch.optim.Optimizer]
    groups: tuple[tuple[tuple[str, ...], dict[str, Any]], ...]
    """Of each parameter group: the names of its parameters, and its options."""
    copied: torch.optim.Optimizer | None = None
    """The optimizer itself, where it is copied instead of made anew: one of another library's classes, or the user's,
    whose arguments are not known."""


class OwnLoss(Protocol):
    """A loss that is computed by more than the model's own forward: by a Trainer, which may ask other models too."""

    @property
    def name(self) -> str:
        """The method that computes it."""

    @property
    def others(self) -> Mapping[str, nn.Module]:
        """The models on the device besides the trained one, on `meta`, by any names."""

    @property
    def code(self) -> tuple[object, ...]:
        """What computes it: classes and functions, whose lists and counters a simulation leaves as they are."""

    @property
    def rows_per_example(self) -> int:
        """Rows that the model sees of each example."""

    @property
    def keeps_predictions(self) -> bool:
        """Whether evaluation keeps what the model returns."""

    def make_inputs(self, step: Step, model: nn.Module) -> dict[str, Tensor]:
        """Return a micro-batch: what the Trainer's collator makes of the largest examples."""

    def bound_to(self, model: nn.Module, others: Mapping[str, nn.Module], *, is_cuda: bool) -> Callable[..., Any]:
        """Return what computes the loss of a micro-batch on copies of the models, as on CUDA or as on a CPU.

        With `return_outputs=True` it returns what the model returned as well.

        Raises:
            UnsupportedError: when called, the loss cannot be computed of tensors without values.
        """

    @property
    def prepares(self) -> str:
        """What `prepare` does, in words; empty where it does nothing."""

    def make_prepared(self, step: Step) -> dict[str, Tensor]:
        """Return what `prepare` has made for the step before, with values."""

    def prepare(self, step: Step, model: nn.Module, loss_of: Callable[..., Any]) -> None:
        """Run on a copy of the model what comes before the first micro-batch; `loss_of` is that of `bound_to`."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of the Trainer on one rank."""

    batch_size: int = 1
    """Rows of a micro-batch; examples where the Trainer's own loss has several rows of each."""
    seq_length: int = 2048
    """Tokens of a row, padding included."""
    is_padded: bool = False
    """Whether rows may differ in length, so that the model gets a mask."""
    is_packed: bool = False
    """Whether rows hold several documents, separated by position ids."""
    more_inputs: tuple[str, ...] = ()
    """Further inputs of the forward: integers [B, S], such as `token_type_ids`."""
    tensors: tuple[InputTensor, ...] = ()
    """All tensors that the forward is given, where sizes of a text do not describe them; they go before those."""
    settings: Settings = ()
    """What the forward is given besides `tensors`."""
    autocast: str | None = None
    """`bfloat16` or `float16` where the Trainer runs with bf16 or fp16; None without mixed precision."""
    gradient_accumulation_steps: int = 1
    """The number of micro-batches."""
    max_grad_norm: float = 1.0
    """Gradients are clipped where it is above 0."""
    optim: str | None = "adamw_torch_fused"
    """A name of `TrainingArguments.optim`; None for no optimizer step."""
    # Compared, but a dict has no hash.
    optim_arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further fields of `TrainingArguments` that the optimizer reads, such as `optim_args`."""
    given_optimizer: GivenOptimizer | None = field(default=None, hash=False)
    """Goes before `optim`."""
    beside_bytes: int = 0
    """That other tensors of the run have all the time, such as averaged weights."""
    sharding: Sharding = Sharding()
    is_proven: bool = False
    """Whether the first micro-batch is proven (`prove` of `apply`): that adds memory, and no time."""
    loss: OwnLoss | None = field(default=None, hash=False)
    """In the place of the model's own."""

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.batch_size * (1 if self.loss is None else self.loss.rows_per_example)

    @property
    def prepares(self) -> str:
        """What comes before the first micro-batch, in words; empty where nothing does."""
        return "" if self.loss is None else self.loss.prepares

    @property
    def tokens(self) -> int:
        """Tokens of the step on one rank, padding included."""
        return self.rows * self.seq_length * self.gradient_accumulation_steps


MICRO_BATCHES = 2
"""The first one makes the gradients, all others add to them."""

_TOKEN = 5  # Every token of the step: one that means nothing special, such as padding.

_Forward = Callable[..., Any]


@old_names_untold()
def run_step(
    model: nn.Module,
    step: Step,
    tracker: Tracker,
    step_optimizer: Callable[[], None] | None,
    others: Mapping[str, nn.Module],
    *,
    is_cuda: bool,
) -> None:
    """Run an optimizer step as the Trainer does: forward, backward, optimizer. Of many micro-batches, two run.

    The model is in training mode, and the tracker is entered. `step_optimizer` clips gradients and steps; without
    it the step ends with the last backward. `others` are copies of those of `step.loss`, which may run other kernels on
    CUDA.
    """
    loss_of = prepare_loss(model, step, others, is_cuda=is_cuda)
    with tracker.before_step():
        # The Trainer draws the micro-batches of a step before it runs the first one, and keeps them to the end.
        batches = [make_inputs(step, model) for _ in range(step.gradient_accumulation_steps)]
    for inputs in batches:
        tracker.record_existing(inputs.items(), Category.TEMPORARY)
    for number, inputs in enumerate(batches[:MICRO_BATCHES]):
        tracker.start_micro_batch(number)
        # Copied, as the Trainer moves inputs to the device in a new dictionary: trl's losses add to it.
        loss = loss_of({**inputs})
        # What `loss.backward()` does. That would be a function of torch to a function mode, which is off while one
        # runs, and so while layers run forward again.
        run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
        # Its graph is freed before the next forward, as in the Trainer.
        del loss
    if step_optimizer is not None:
        with tracker.phase(Phase.OPTIMIZER):
            step_optimizer()
            model.zero_grad()
            tracker.free_copied_gradients()


_MASK, _POSITIONS = "attention_mask", "position_ids"
_SOUND = "input_features"


def make_inputs(step: Step, model: nn.Module) -> dict[str, Tensor]:
    """Return one micro-batch: token ids [B, S], labels, what padding or packing adds, and further inputs [B, S].

    Where the step has `tensors`, it is made of those.
    """
    if step.loss is not None:
        return step.loss.make_inputs(step, model)
    if step.tensors:
        like = next(model.parameters())
        return {each.name: each.make(like) for each in step.tensors}
    shape = (step.batch_size, step.seq_length)
    inputs = {"input_ids": torch.full(shape, _TOKEN, dtype=torch.long), "labels": _make_labels(model, *shape)}
    if getattr(model, "main_input_name", "") == _SOUND:
        # The encoder hears all that it has positions for, at two frames each; the decoder writes the row.
        config: Any = model.config
        frames = (step.batch_size, config.num_mel_bins, 2 * config.max_source_positions)
        # Features are in float32, and without autocast have to be in the weights' dtype.
        dtype = torch.float32 if step.autocast else next(model.parameters()).dtype
        return {_SOUND: torch.zeros(frames, dtype=dtype), "labels": inputs["labels"]}
    # A type of a token: 0 is one everywhere. In a mask 1 is what is no padding. Positions count on, as of one document.
    inputs |= {name: torch.full(shape, int(name == _MASK), dtype=torch.long) for name in step.more_inputs}
    if _POSITIONS in inputs:
        inputs[_POSITIONS] = torch.arange(step.seq_length).expand(shape).contiguous()
    if step.is_padded:
        # One token of the first row is padding, for code that checks whether there is any.
        inputs[_MASK] = torch.ones(shape, dtype=torch.long).index_fill_(1, torch.tensor([-1]), 0)
    if step.is_packed:
        # Two documents in each row.
        positions = torch.arange(step.seq_length) % max(1, (step.seq_length + 1) // 2)
        inputs[_POSITIONS] = positions.expand(shape).contiguous()
    return inputs


def labels_shape(model: nn.Module, rows: int, length: int) -> tuple[int, ...]:
    """Return the shape of the labels of a model's loss: [B, S], or [B] or [B, classes] where rows are scored."""
    if not _scores_rows(model):
        return rows, length
    config: Any = model.config
    is_one_each = config.num_labels == 1 or config.problem_type not in ("regression", "multi_label_classification")
    return (rows,) if is_one_each else (rows, config.num_labels)


def _make_labels(model: nn.Module, rows: int, length: int) -> Tensor:
    shape = labels_shape(model, rows, length)
    if not _scores_rows(model):
        return torch.full(shape, _TOKEN, dtype=torch.long)
    config: Any = model.config
    is_class = config.num_labels > 1 and config.problem_type in (None, "single_label_classification")
    return torch.zeros(shape, dtype=torch.long if is_class else torch.float32)


def _scores_rows(model: nn.Module) -> bool:
    """Whether a model gives each row a class or a score, as transformers names its loss."""
    return getattr(model, "loss_type", None) == "ForSequenceClassification"


def prepare_loss(model: nn.Module, step: Step, others: Mapping[str, nn.Module], *, is_cuda: bool) -> Callable[..., Any]:
    """Return what computes the loss of a micro-batch: the model's own forward, or the step's own loss."""
    if step.loss is None:
        return partial(_loss, partial(_under_autocast(model, step.autocast), **dict(step.settings)))
    loss = step.loss.bound_to(model, others, is_cuda=is_cuda)
    for each in (model, *others.values()):
        if step.autocast is not None:
            # Where accelerate puts it: a Trainer's own loss calls the model itself.
            each.forward = _under_autocast(each.forward, step.autocast)
    return loss


def _loss(forward: _Forward, inputs: dict[str, Tensor]) -> Tensor:
    # A function of its own, so that the logits are freed where the Trainer frees them.
    output = forward(**inputs)
    # As `Trainer.compute_loss` takes it.
    loss: Tensor | None = output.get("loss") if isinstance(output, Mapping) else output[0]
    if loss is None:
        raise UnsupportedError(
            f"The step cannot be simulated: given {', '.join(inputs)}, the model's forward returns no loss. Give it "
            "labels, or measure a step on the device instead."
        )
    return loss


def _under_autocast(function: _Forward, dtype: str | None) -> _Forward:
    """Return a forward as accelerate prepares it: under autocast, with outputs in float32."""
    if dtype is None:
        return function
    autocast = torch.autocast("cpu", getattr(torch, dtype))
    forward: _Forward = convert_outputs_to_fp32(autocast(function))
    return forward


@old_names_untold()
def run_evaluation_batch(
    model: nn.Module, step: Step, tracker: Tracker, others: Mapping[str, nn.Module], *, is_cuda: bool
) -> int:
    """Run the forward of a batch of evaluation, and return the bytes of its predictions and labels."""
    with tracker.before_step():
        inputs = make_inputs(step, model)
    tracker.record_existing(inputs.items(), Category.TEMPORARY)
    with torch.no_grad():
        if step.loss is not None:
            loss_of = prepare_loss(model, step, others, is_cuda=is_cuda)
            found = loss_of({**inputs}, return_outputs=step.loss.keeps_predictions)
            return found[1]["logits"].nbytes if step.loss.keeps_predictions else 0
        output = _under_autocast(model, step.autocast)(**inputs, **dict(step.settings))
    ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", (CACHE,))
    named = output if isinstance(output, Mapping) else {str(place): each for place, each in enumerate(output[1:])}
    kept = tree_leaves([value for name, value in named.items() if name not in ("loss", *ignored)])
    kept += [value for name, value in inputs.items() if name in _LABELS]
    return sum(each.nbytes for each in kept if isinstance(each, Tensor))


_LABELS = ("labels", "start_positions", "end_positions")  # What a forward is given to compute its loss.
