"""What the measured versions did differently from the installed ones, as far as it takes memory.

An emulation changes a model on `meta`, before adapters come; a change is in force around the step of its fake copy.
Each repeats what the code of that version does, and holds no fitted figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.granite.modeling_granite import GraniteForCausalLM
from transformers.models.opt.modeling_opt import OPTAttention

from benchmarks.published.fused_kernels import fast_loss, fast_norms, fast_rotary, fused_linear_loss, shift
from benchmarks.published.llm_foundry import reduced_in_float32
from benchmarks.published.points import StepPoint
from benchmarks.published.torchtitan import torchtitan_fsdp2, torchtitan_heads, torchtitan_loss, torchtitan_selective
from hf_ckpt.simulation.zero_tape import ZeroTape
from hf_ckpt.upstream.transformers import CACHE


def loss_4_46(model: Any) -> None:
    """Compute the loss as transformers 4.46 to 4.49 does: logits in float32, and those but the last as a copy."""
    model.loss_function = _upcast_loss


def loss_4_45(model: Any) -> None:
    """Compute the loss as models of transformers up to 4.45 do: the model itself keeps its logits in float32 alone."""
    model.loss_function = _loss_of_copies
    model.get_output_embeddings().__class__ = _Float32Linear


def granite_4_45(model: Any) -> None:
    """Scale logits in the dtype of the model, and then keep them in float32 alone, as Granite does in 4.45."""
    model.__class__ = _Granite


def loss_gpt_bigcode(model: Any) -> None:
    """Compute the loss as GPTBigCode and OPT do up to 4.46 or later: of a copy of the logits, in their own dtype."""
    model.loss_function = _loss_of_copies


def float32_norms(model: nn.Module) -> None:
    """Keep norms in float32, as `prepare_model_for_kbit_training` does."""
    for name, module in model.named_modules():
        if "norm" in name.rpartition(".")[2]:
            module.to(torch.float32)


def opt_attention_4_28(model: nn.Module) -> None:
    """Compute attention as OPT does in transformers 4.28, without a kernel: masked scores are bounded from below."""
    for module in model.modules():
        if isinstance(module, OPTAttention):
            module.__class__ = _OPTAttention


def rotary_tables_4_37(model: Any, dtype: torch.dtype) -> None:
    """Let every attention of Llama keep the sines and cosines of all positions, as in transformers 4.37."""
    config = model.config
    shape = config.max_position_embeddings, config.hidden_size // config.num_attention_heads
    for name, module in model.named_modules():
        if name.endswith(".self_attn"):
            for table in ("cos_cached", "sin_cached"):
                module.register_buffer(table, torch.empty(shape, dtype=dtype, device="meta"), persistent=False)


EMULATIONS: Mapping[str, Callable[[Any], None]] = {
    **{
        emulate.__name__: emulate
        for emulate in (
            *(loss_4_46, loss_4_45, granite_4_45, loss_gpt_bigcode, float32_norms, opt_attention_4_28),
            *(fast_norms, fast_loss, fused_linear_loss, torchtitan_loss),
        )
    },
    "rotary_tables_4_37": partial(rotary_tables_4_37, dtype=torch.bfloat16),
    # Where the model is made on `meta` and quantized while it is loaded, they are not cast.
    "rotary_tables_4_37_float32": partial(rotary_tables_4_37, dtype=torch.float32),
}


# --- Changes: around the step of the fake copy. ---


@contextmanager
def reentrant_checkpointing(model: Any, point: StepPoint) -> Iterator[None]:
    """Checkpoint every layer as `TrainingArguments(gradient_checkpointing=True)` does up to transformers 4.57.

    A layer that runs again runs to its end, its output stays while it runs backward, and the output of the embeddings
    is made to need a gradient. The same where torch's `checkpoint_wrapper` lies inside of each FSDP1 unit.
    """
    _checkpoint_layers(model, None)
    yield


@contextmanager
def reentrant_checkpointing_around_fsdp(model: Any, point: StepPoint) -> Iterator[None]:
    """Checkpoint every layer as `reentrant_checkpointing` does, where FSDP1 wrapped the layers before.

    With more than one rank, where the layer's own weights are frozen, the input of each layer that ran again, and its
    gradient, stay to the end of backward. The FSDP unit lies inside of the checkpoint, and the hook that frees its
    weights holds its input, a leaf (`_register_post_backward_reshard_only_hook` in
    `torch/distributed/fsdp/_runtime_utils.py`).
    """
    held: list[Tensor] = []
    keeps_inputs = point.ranks > 1 and point.method != "full"
    _checkpoint_layers(model, held if keeps_inputs else None)
    if keeps_inputs:
        model.get_input_embeddings().register_forward_hook(partial(_release_after_backward, held))
    yield


@contextmanager
def gpt_bigcode_cache(model: Any, point: StepPoint) -> Iterator[None]:
    """Return keys and values with the logits, as GPTBigCode does up to 4.48 or later, though layers are checkpointed.

    Other models then turn `use_cache` off, and it does not. Keys and values are views of what `c_attn` returns, queries
    too, which so lives as long as the logits do.
    """
    # Older transformers cannot import it without a warning.
    from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeBlock

    cache: list[Tensor] = []
    hooks = []
    for layer in model.modules():
        if isinstance(layer, GPTBigCodeBlock):
            returned: list[Tensor] = []
            append = partial(_append_keys_and_values, layer.attn.split_size, returned)
            hooks.append(layer.attn.c_attn.register_forward_hook(append))
            checkpoint_layer = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = partial(_checkpoint_with_cache, checkpoint_layer, returned, cache)
    hooks.append(model.register_forward_hook(partial(_return_cache, cache)))
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def kept_outputs(model: nn.Module, point: StepPoint) -> Iterator[None]:
    """Keep what the model returned, logits too, to the end of the step: a variable of the loop holds it."""
    held: list[Any] = []
    hook = model.register_forward_hook(lambda module, args, output: held.append(output))
    yield
    hook.remove()
    held.clear()


@contextmanager
def gradients_zeroed_in_place(model: nn.Module, point: StepPoint) -> Iterator[None]:
    """Let gradients be there before the step: until torch 2.0 `zero_grad` fills them with zeros, and frees none."""

    def make(module: nn.Module, args: Any) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)

    hook = model.register_forward_pre_hook(make)
    yield
    hook.remove()


@contextmanager
def softmax_keeps_input(model: nn.Module, point: StepPoint) -> Iterator[None]:
    """Keep what a softmax reads for its backward, which torch does before 1.11, and needs its output alone.

    https://github.com/pytorch/pytorch/issues/49600
    """
    with mock.patch.object(functional, "softmax", _softmax):
        yield


@contextmanager
def gradients_of_skipped_step(model: nn.Module, point: StepPoint) -> Iterator[None]:
    """Keep the first rank's gradients of an early step for good, as ZeRO-1 and 2 of DeepSpeed 0.9 do with float16.

    The first steps overflow, and are skipped. The optimizer then makes a new dict of gradients (`averaged_gradients`);
    each weight's `_hp_mapping` goes on holding the old one. In it are whole tensors of which the rank has a part.
    https://github.com/microsoft/DeepSpeed/blob/v0.9.0/deepspeed/runtime/zero/stage_1_and_2.py
    """
    share = sum(parameter.numel() for parameter in model.parameters()) / point.ranks
    begins, of_rank = 0, []
    for parameter in model.parameters():
        if begins < share:
            of_rank.append(parameter)
        begins += parameter.numel()
    held: list[Tensor] = []
    hook = model.register_forward_pre_hook(lambda module, args: held.extend(map(torch.empty_like, of_rank)))
    yield
    hook.remove()
    held.clear()


def _checkpoint_layers(model: Any, held: list[Tensor] | None) -> None:
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(_checkpoint, held)
    model.enable_input_require_grads()


def _checkpoint(held: list[Tensor] | None, function: Callable[..., Any], *args: Any) -> Any:
    run = function if held is None else partial(_run, held, function)
    return checkpoint(run, *args, use_reentrant=True)


def _run(held: list[Tensor], function: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
    if torch.is_grad_enabled():
        held.append(hidden)
    return function(hidden, *args)


def _append_keys_and_values(width: int, returned: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    returned.append(output[..., width:])


def _checkpoint_with_cache(
    checkpoint_layer: Callable[..., Any],
    returned: list[Tensor],
    cache: list[Tensor],
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    output, keys_and_values = checkpoint_layer(partial(_run_with_cache, returned, function), *args)
    cache.append(keys_and_values)
    return output


def _run_with_cache(returned: list[Tensor], function: Callable[..., Any], *args: Any) -> tuple[Any, Tensor]:
    output = function(*args)
    return output, returned.pop()


def _return_cache(cache: list[Tensor], model: nn.Module, args: Any, output: Any) -> None:
    output[CACHE] = tuple(cache)
    cache.clear()


def _release_after_backward(held: list[Tensor], embeddings: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: held.clear())


Change = Callable[[Any, StepPoint], AbstractContextManager[None]]
CHANGES: Mapping[str, Change] = {
    "reentrant_checkpointing": reentrant_checkpointing,
    "reentrant_checkpointing_around_fsdp": reentrant_checkpointing_around_fsdp,
    "gpt_bigcode_cache": gpt_bigcode_cache,
    "kept_outputs": kept_outputs,
    "gradients_zeroed_in_place": gradients_zeroed_in_place,
    "softmax_keeps_input": softmax_keeps_input,
    "gradients_of_skipped_step": gradients_of_skipped_step,
    "fast_rotary": fast_rotary,
    "torchtitan_heads": torchtitan_heads,
    "torchtitan_selective": torchtitan_selective,
}


@contextmanager
def bucket_from_begin_of_backward() -> Iterator[None]:
    """Let ZeRO-2 have its bucket from the beginning of backward, as DeepSpeed does before 0.17.2."""
    with mock.patch.object(ZeroTape, "_opens_bucket_with_backward", True):
        yield


def first_rank() -> AbstractContextManager[None]:
    """Let it be the first of ZeRO's ranks: the rank that holds most is predicted otherwise."""
    return mock.patch.object(ZeroTape, "_rank", 0)


ENGINE_CHANGES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "first_rank": first_rank,
    "bucket_from_begin_of_backward": bucket_from_begin_of_backward,
    "torchtitan_fsdp2": torchtitan_fsdp2,
    "reduced_in_float32": reduced_in_float32,
}
"""What an engine does differently, with any model."""


# --- Optimizers. ---


class Fp16Optimizer(torch.optim.Optimizer):
    """What DeepSpeed 0.9's `FP16_Optimizer` with its `FusedAdam` holds: float32 weights and Adam's state, flattened.

    https://github.com/microsoft/DeepSpeed/blob/v0.9.0/deepspeed/runtime/fp16/fused_optimizer.py
    """

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make float32 copies of the gradients and one flat tensor of them, which Adam's kernel reads."""
        for group in self.param_groups:
            weights = group["params"]
            for weight in weights:
                if not self.state[weight]:
                    names = "master", "exp_avg", "exp_avg_sq"
                    self.state[weight] = {name: torch.zeros_like(weight, dtype=torch.float32) for name in names}
            flat = torch.cat([weight.grad.float().flatten() for weight in weights]).mul_(0.5)
            gradients = flat.split([weight.numel() for weight in weights])
            for weight, gradient in zip(weights, gradients, strict=True):
                state = self.state[weight]
                gradient = gradient.view_as(weight)
                state["exp_avg"].add_(gradient)
                state["exp_avg_sq"].add_(gradient)
                weight.copy_(state["master"].add_(state["exp_avg"]))


class TransformersAdamW(torch.optim.Optimizer):
    """What `AdamW` of transformers (before version 5) holds and makes: one weight after the other."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make one temporary as large as a weight at a time; all else is in place, an operator at a time."""
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            if not self.state[weight]:
                self.state[weight] = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            mean, square = self.state[weight]["exp_avg"], self.state[weight]["exp_avg_sq"]
            mean.mul_(0.9).add_(weight.grad)
            square.mul_(0.999).addcmul_(weight.grad, weight.grad)
            weight.addcdiv_(mean, self._root(square).add_(1e-8))

    def _root(self, square: Tensor) -> Tensor:
        return square.sqrt()


class DecoupledAdamW(TransformersAdamW):
    """What Composer's `DecoupledAdamW` without weight decay holds and makes: a second temporary.

    https://github.com/mosaicml/composer/blob/v0.16.4/composer/optim/decoupled_weight_decay.py
    """

    def _root(self, square: Tensor) -> Tensor:
        return square.sqrt() / 0.5


OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "fp16_optimizer": Fp16Optimizer,
    "adamw_hf": TransformersAdamW,
    "decoupled_adamw": DecoupledAdamW,
}


# --- What they run. ---


def _upcast_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return _loss_of_copies(logits.float(), labels, vocab_size)


def _loss_of_copies(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    shifted = shift(logits).contiguous()
    targets = labels[..., 1:].contiguous()
    shifted = shifted.view(-1, vocab_size)
    return functional.cross_entropy(shifted, targets.view(-1))


def _softmax(scores: Tensor, dim: int, **_: Any) -> Tensor:
    # Autocast's copy is what is kept.
    return cast(Tensor, _Softmax.apply(scores.float() if torch.is_autocast_enabled() else scores, dim))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
        ctx.dim, found = dim, torch.softmax(scores, dim)
        ctx.save_for_backward(scores, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        scores, found = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, found, ctx.dim, scores.dtype), None


class _Float32Linear(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).float()


class _Granite(GraniteForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> CausalLMOutputWithPast:
        outputs = self.model(input_ids, **inputs)
        hidden = outputs[0]
        logits = self.lm_head(hidden)
        logits = logits / self.config.logits_scaling
        logits = logits.float()
        return CausalLMOutputWithPast(loss=_loss_of_copies(logits, labels, self.config.vocab_size), logits=logits)


class _OPTAttention(OPTAttention):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        rows, length, width = hidden_states.shape
        query, key, value = (
            states.view(rows, length, self.num_heads, self.head_dim)
            .transpose(1, 2)
            .contiguous()
            .view(-1, length, self.head_dim)
            for states in (
                self.q_proj(hidden_states) * self.scaling,
                self.k_proj(hidden_states),
                self.v_proj(hidden_states),
            )
        )
        scores = torch.bmm(query, key.transpose(1, 2))
        if attention_mask is not None:
            scores = scores.view(rows, self.num_heads, length, length) + attention_mask
            scores = torch.max(scores, torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype))
            scores = scores.view(-1, length, length)
        probabilities = functional.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        mixed = torch.bmm(probabilities, value).view(rows, self.num_heads, length, self.head_dim)
        return cast(Tensor, self.out_proj(mixed.transpose(1, 2).reshape(rows, length, width))), None
