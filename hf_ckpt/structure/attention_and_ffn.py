"""The attention and the ffn of a decoder layer, found by what modules hold, are called and run; no list of models.

What is a matrix, and how large a layer is, is read off shapes as they were before an engine sharded them: FSDP1
flattens the parameters of a unit into one, ZeRO-3 leaves tensors of shape (0,) behind, FSDP2 keeps the shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_ckpt.structure.called_names import calls, class_calls
from hf_ckpt.structure.stored import inside_adapters, stored, weight_shape
from hf_ckpt.upstream.deepspeed import WHOLE_SHAPE
from hf_ckpt.upstream.torch import COMPILED_INSIDE, flattened_shapes

Shapes = dict[nn.Module, dict[str, torch.Size]]


def parameter_shapes(model: nn.Module) -> Shapes:
    """Return, for each module that holds parameters itself, their unsharded shapes by name."""
    shapes: Shapes = {}
    for module in model.modules():
        # What a unit of FSDP1 holds itself is the flat parameter.
        if not isinstance(module, FullyShardedDataParallel):
            own = module.named_parameters(recurse=False)
            # ZeRO-3 notes the shape on the parameter that it has emptied.
            shapes[module] = {name: getattr(parameter, WHOLE_SHAPE, parameter.shape) for name, parameter in own}
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        for (module, name), shape in flattened_shapes(unit).items():
            shapes.setdefault(module, {})[name] = shape
    return shapes


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside FSDP1's or a compiler's wrapper; any other module as it is."""
    while True:
        if isinstance(module, FullyShardedDataParallel):
            module = module.module
        elif (inner := module._modules.get(COMPILED_INSIDE)) is not None:
            module = inner
        else:
            return module


PARTS = ("attention", "ffn")

# What classes and attributes of mixers and feed-forward networks are called, as single lower-case words. A class name
# says more than an attribute name ("mixer" of a hybrid layer may be an mlp), so it comes first.
_ATTENTION_WORDS = frozenset(
    "attention attn att mixer mamba mamba2 ssm ssd recurrent retention delta deltanet conv shortconv hyena "
    "temporal lstm timemix".split()
)
_FFN_WORDS = frozenset("mlp ffn ff forward feedforward moe experts expert channelmix glu".split())
# First words of the names of the halves of an ffn that the layer's own forward strings together.
_FFN_HALVES = frozenset("fc lin linear wi wo intermediate output ffn ff dense".split())
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_ACRONYM = re.compile(r"MoE|MLP|FFN|GLU|SSM")
# What code that computes attention calls by name: a softmax, a fused kernel, or one of transformers' implementations.
_COMPUTES_ATTENTION = re.compile(
    r"_?(safe_)?softmax|ALL_ATTENTION_FUNCTIONS"
    r"|(scaled_dot_product|multi_head|memory_efficient|flex|flash|sage)_?att(n|ention)\w*",
    re.IGNORECASE,
)


class PartFinder:
    """Finds the parts of the layers of one model; `names` are, by part, what the user calls them."""

    def __init__(self, shapes: Shapes, names: Mapping[str, str | None]) -> None:
        self._shapes = shapes
        self._names = names
        # For one model, at one time: classes come and go, and others may exchange their methods.
        self._with_attention: dict[type, bool] = {}

    def is_layer(self, module: nn.Module) -> bool:
        """Whether a module is a layer: one that transformers can checkpoint, or one with an attention and an ffn."""
        # Blocks of convolutions and single attentions in image tokenizers are no layers.
        attention, ffn, _ = self.parts(module)
        has_ffn = bool(ffn) or self._has_inline_ffn(list(self.children(module)), ())
        if stored(module, "gradient_checkpointing") is not None:
            return bool(attention) or has_ffn
        return bool(attention) and has_ffn

    def mixes_positions(self, module: nn.Module) -> bool:
        """Whether a module has an attention, or a mixer in its place."""
        return bool(self.parts(module)[0])

    def parts(self, module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
        """Return the names of the attention modules, those of the ffn modules, and whether the ffn is inline."""
        children = list(self.children(module))
        kinds = {name: self._kind(name, child) for name, child in children}
        found = {part: tuple(name for name, _ in children if kinds[name] == part) for part in PARTS}
        for part in PARTS:
            name = self._names[part]
            if name is not None:
                found[part] = (name,) if _has(module, name) else ()
        if self._names["ffn"] is not None:
            return found["attention"], found["ffn"], False
        inline = self._has_inline_ffn(children, found["ffn"]) and bool(found["attention"])
        return found["attention"], () if inline else found["ffn"], inline

    def computes_attention(self, module: nn.Module) -> bool:
        """Whether a layer computes attention, whose output mode `selective_attention` keeps."""
        # Names do not say: a mixer of states or convolutions may be called an attention (RWKV, lightning attention).
        # The code is read, without the ffn's: routers have a softmax too.
        ffn = self.parts(module)[1]
        return any(
            self._calls_attention(child) for name, child in module.named_modules() if not is_at_or_below(name, *ffn)
        )

    def _calls_attention(self, module: nn.Module) -> bool:
        # A forward of the instance's own may have taken the place of the class's.
        return calls(vars(module).get("forward"), _COMPUTES_ATTENTION) or any(
            self._with_attention[kind] if kind in self._with_attention else self._look(kind)
            for kind in type(module).__mro__
        )

    def _look(self, kind: type) -> bool:
        found = self._with_attention[kind] = class_calls(kind, _COMPUTES_ATTENTION)
        return found

    def children(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield the direct children, looking through lists (T5) and layers inside layers (Zamba)."""
        for name, child in _named_children(module):
            if isinstance(child, nn.ModuleList | nn.ModuleDict) or self._is_layer_inside(child):
                yield from ((f"{name}.{key}", grandchild) for key, grandchild in _named_children(child))
            else:
                yield name, child

    def _is_layer_inside(self, child: nn.Module) -> bool:
        kinds = {self._kind(name, grandchild) for name, grandchild in _named_children(child)}
        return stored(child, "gradient_checkpointing") is not None or kinds >= set(PARTS)

    def _kind(self, name: str, child: nn.Module) -> str | None:
        # The halves of BERT's ffn are called so even where they are convolutions.
        is_half = words_of(name)[:1] in (["intermediate"], ["output"])
        if is_half or not self._has_weights(child) or self._is_linear(child):
            return None
        for text in (type(child).__name__, name):
            # The last telling word is the noun: RecurrentGemmaMlp is an mlp, MoeMambaMixer a mixer.
            for word in reversed(words_of(text)):
                if word in _ATTENTION_WORDS:
                    return "attention"
                if word in _FFN_WORDS:
                    return "ffn"
        return None

    def _has_weights(self, child: nn.Module) -> bool:
        """Whether the module multiplies by a matrix; norms, dropouts and rotary embeddings do not."""
        return any(len(shape) >= 2 for module in child.modules() for shape in self._shapes.get(module, {}).values())

    def _is_linear(self, child: nn.Module) -> bool:
        """Whether the module is one matrix product: nn.Linear, Conv1D, or a quantised or LoRA layer in their place."""
        child = inside_adapters(child)
        # FSDP1 and ZeRO-3 leave something flat in its place.
        return len(weight_shape(child) or ()) >= 2 or len(self._shapes.get(child, {}).get("weight", ())) >= 2

    def _has_inline_ffn(self, children: list[tuple[str, nn.Module]], ffn: tuple[str, ...]) -> bool:
        """Whether the layer's forward strings the halves of its ffn together (`fc1`/`fc2`, BERT's two modules)."""
        # One matrix that is called an ffn is half of one, whatever the other is called (`proj_mlp` next to an
        # attention).
        if not ffn and any(
            self._is_linear(child) and _FFN_WORDS.intersection(words_of(name)) for name, child in children
        ):
            return True
        halves = [name for name, child in children if self._is_half(name, child)]
        return len(halves) >= 2 and set(ffn) <= set(halves)

    def _is_half(self, name: str, child: nn.Module) -> bool:
        is_called_so = any(word in _FFN_HALVES for word in words_of(name)[:1])
        return is_called_so and self._has_weights(child) and self._kind(name, child) != "attention"


def is_at_or_below(name: str, *paths: str) -> bool:
    """Whether a dotted name is one of these paths, or lies below one."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def words_of(text: str) -> list[str]:
    """Return the words of a name in lower case, however they are joined: `NemotronHMLP` is nemotron, h, mlp."""
    # Otherwise NemotronHMLP would be one word behind "Nemotron".
    spelled = _ACRONYM.sub(lambda acronym: acronym.group().capitalize(), text)
    return [word.lower() for word in _WORD.findall(spelled)]


def _named_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, unwrapped(child)) for name, child in unwrapped(module).named_children())


def _has(module: nn.Module, name: str) -> bool:
    for part in name.split("."):
        found = vars(unwrapped(module))["_modules"].get(part)
        if found is None:
            return False
        module = found
    return True
