"""Tiny models for late events: decoders written by hand, and real ones, in which places of each layer take an event.

A `Ground` stands in each of those places. It runs the module that it found there and, once an event has switched it
on, what the event does before or behind that module.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, WIDTH, INNER = 32, 8, 12

Act = Callable[["Ground", Tensor], Tensor]
"""What an event does with the tensor that a module is given, or returned."""


class Ground(nn.Module):
    """Runs a module and, from an event on, what the event does before or behind it.

    Args:
        inner: the module that stood here.
        width: the last dimension of what it is given.
    """

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.statistic = torch.zeros(())
        self.count = 0
        self.scale = 1.0
        self.memory: dict[str, Any] = {"log": [], "deep": {"tensors": (torch.zeros(()), torch.zeros(3))}}
        self.before: Act | None = None
        self.behind: Act | None = None

    def switch(self, act: Act, where: str, *, is_hidden: bool) -> None:
        """Do this from now on, `before` or `behind` the module; hidden, no attribute of a module shows it."""
        if is_hidden:
            _HIDDEN.setdefault(self, {})[where] = act
        else:
            setattr(self, where, act)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before, behind = (_HIDDEN.get(self, {}).get(where, getattr(self, where)) for where in ("before", "behind"))
        if before is not None:
            # Llama hands its attention everything by keyword.
            if args:
                args = (before(self, args[0]), *args[1:])
            else:
                kwargs["hidden_states"] = before(self, kwargs["hidden_states"])
        out = self.inner(*args, **kwargs)
        if behind is None:
            return out
        return (behind(self, out[0]), *out[1:]) if isinstance(out, tuple) else behind(self, out)


_HIDDEN: weakref.WeakKeyDictionary[Ground, dict[str, Act]] = weakref.WeakKeyDictionary()


# --- Decoders written by hand. ---


class Attention(nn.Module):
    """One head with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        scores = self.q_proj(hidden) @ self.k_proj(hidden).mT
        return self.dropout(softmax(scores, dim=-1)) @ self.v_proj(hidden)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(torch.tanh(self.up_proj(hidden)))


@dataclass
class Context:
    """What all layers are given, as a dataclass."""

    shift: Tensor
    idx: int = 0


WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda shift: shift, lambda given: given),
    "dict": (lambda shift: {"shift": shift}, lambda given: given["shift"]),
    "nested": (lambda shift: (1, [{"shift": shift}]), lambda given: given[1][0]["shift"]),
    "dataclass": (Context, lambda given: given.shift),
}
"""How a tensor reaches all layers, and how they take it out."""


class Block(nn.Module):
    """A layer that takes a tensor out of a context; with `residual`, it returns two streams."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.LayerNorm(WIDTH), Attention()
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.form = form

    def forward(self, hidden: Tensor, context: Any, residual: Tensor | None = None) -> Any:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden) + WRAPS[self.form][1](context))
        if residual is not None:
            hidden = hidden + torch.tanh(residual)
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden if residual is None else (hidden, residual + 0.3 * hidden)


Between = Callable[[int, Tensor, Tensor, Tensor | None], Tensor]
"""What happens behind a layer: its index, hidden states, the tensor of the context, the second stream."""


class Decoder(nn.Module):
    """Layers with a context; `between` acts behind each of them."""

    def __init__(self, form: str, *, has_streams: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(form) for _ in range(3))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.form, self.has_streams = form, has_streams
        self.between: Between | None = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, shift = self.embed_tokens(input_ids), torch.zeros(WIDTH, dtype=self.norm.weight.dtype)
        residual = hidden * 1.0 if self.has_streams else None
        for idx, layer in enumerate(self.layers):
            context = WRAPS[self.form][0](shift)
            if residual is None:
                hidden = layer(hidden, context)
            else:
                hidden, residual = layer(hidden, context, residual)
            if self.between is not None:
                hidden = self.between(idx, hidden, shift, residual)
        logits = self.lm_head(self.norm(hidden if residual is None else hidden + residual))
        return {"loss": cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


# --- Real ones. ---

_SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
_SETTINGS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}


def llama() -> nn.Module:
    sizes = {**_SIZES, "num_hidden_layers": 3, "intermediate_size": INNER}
    return LlamaForCausalLM(LlamaConfig(**sizes, **_SETTINGS, attention_dropout=0.1))


def qwen3() -> nn.Module:
    sizes = {**_SIZES, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": INNER}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **_SETTINGS, attn_implementation="eager"))


def mixtral() -> nn.Module:
    sizes = {**_SIZES, "num_key_value_heads": 1, "intermediate_size": INNER}
    return MixtralForCausalLM(MixtralConfig(**sizes, **_SETTINGS, num_local_experts=3, num_experts_per_tok=2))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **_SETTINGS))


def adapted(model: nn.Module, **changes: Any) -> nn.Module:
    """Return the model frozen, with two adapters in attention and ffn."""
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **changes)
    peft = get_peft_model(model, config)
    peft.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    return peft


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": partial(Decoder, "tensor"),
    "context_dict": partial(Decoder, "dict"),
    "context_nested": partial(Decoder, "nested"),
    "context_dataclass": partial(Decoder, "dataclass"),
    "streams": partial(Decoder, "tensor", has_streams=True),
    "llama": llama,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "llama_lora": lambda: adapted(llama(), lora_dropout=0.1),
    "qwen3_dora": lambda: adapted(qwen3(), use_dora=True),
}
BY_HAND = ("plain", "context_dict", "context_nested", "context_dataclass", "streams")
ADAPTED = ("llama_lora", "qwen3_dora")

PLACES: dict[str, tuple[str, ...]] = {
    "attention": ("self_attn", "attn"),
    "ffn": ("mlp",),
    "norm": ("post_attention_layernorm", "ln_2"),
    "query": ("self_attn.q_proj", "attn.c_attn"),
    "up": ("mlp.up_proj", "mlp.c_fc"),
}
"""Places of a layer that an event may take, and the names that they have in it."""


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers."""
    stacks = (module for name, module in model.named_modules() if name.rpartition(".")[2] in ("layers", "h"))
    return next(module for module in stacks if isinstance(module, nn.ModuleList))


def build(name: str, place: str) -> tuple[nn.Module, list[Ground]]:
    """Return a model in train mode with a ground in a place of each layer that has it."""
    model = MODELS[name]().train()
    grounds = [Ground(module, WIDTH) for _, _, module in _places(model, place)]
    for (parent, child, _), ground in zip(_places(model, place), grounds, strict=True):
        setattr(parent, child, ground)
    return model, grounds


def _places(model: nn.Module, place: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for layer in layers_of(model):
        modules = dict(layer.named_modules())
        # Mixtral has experts in place of `up_proj`: the ffn as a whole.
        path = next(each for each in (*PLACES[place], "mlp") if each in modules)
        parent, _, child = path.rpartition(".")
        yield modules[parent], child, modules[path]
