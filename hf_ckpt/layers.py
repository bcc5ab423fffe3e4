"""Decoder stacks of a model, their layers, and the attention and ffn of each layer; found by structure.

Knows no policy. A stack is a list of modules in which at least one module has an attention (or a mixer in its place)
or an ffn; a list inside a layer of another stack (experts, sub-layers) is no stack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hf_ckpt.errors import StructureError, did_you_mean

PARTS = ("attention", "ffn")

# What classes and attributes of mixers and feed-forward networks are called, as single lower-case words. A class name
# says more than an attribute name ("mixer" of a hybrid layer may be an mlp), so it is asked first.
_ATTENTION_WORDS = frozenset(
    "attention attn att mixer mamba mamba2 ssm ssd recurrent retention delta deltanet conv shortconv hyena "
    "temporal lstm timemix".split()
)
_FFN_WORDS = frozenset("mlp ffn ff forward feedforward moe experts expert channelmix glu".split())
# First words of the names of the halves of an ffn that the layer's own forward strings together.
_FFN_HALVES = frozenset("fc lin linear wi wo intermediate output ffn ff dense".split())
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_ACRONYM = re.compile(r"MoE|MLP|FFN|GLU|SSM")
_ROLE_WORDS = {
    "vision": frozenset("visual vision vit image pixel patch".split()),
    "audio": frozenset("audio speech acoustic".split()),
    "encoder": frozenset({"encoder"}),
    "decoder": frozenset({"decoder"}),
}
_INPUT_ROLES = {"pixel_values": "vision", "input_features": "audio", "input_values": "audio"}


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Args:
        layer_idx: position in its stack, from 0.
        module: the layer.
        attention: dotted names, below the layer, of the modules that mix positions (attention, mamba, ...).
        ffn: the same of the feed-forward networks; empty where the ffn is written out in the layer's own forward.
        ffn_is_inline: the layer's own forward computes the ffn, so that only the layer around the attention can be
            recomputed.
        layer_type: the model's own word, as `sliding_attention`, if it has one.
        needs_gradient: whether this layer, or anything that runs before it, has a trainable parameter.
    """

    layer_idx: int
    module: nn.Module
    attention: tuple[str, ...]
    ffn: tuple[str, ...]
    ffn_is_inline: bool
    layer_type: str | None
    needs_gradient: bool

    @property
    def parts(self) -> frozenset[str]:
        """The parts that this layer has, of `attention` and `ffn`."""
        has_ffn = bool(self.ffn) or self.ffn_is_inline
        return frozenset(part for part, here in zip(PARTS, (bool(self.attention), has_ffn), strict=True) if here)


@dataclass(frozen=True)
class Stack:
    """One list of layers that run one after another.

    Args:
        path: dotted path of the list in the model.
        owner: the module around the list that runs it.
        roles: of `language`, `vision`, `audio`, `encoder`, `decoder`, those that fit.
        layers: the layers, by `layer_idx`.
    """

    path: str
    owner: nn.Module
    roles: frozenset[str]
    layers: tuple[Layer, ...] = field(repr=False)


def find_layers(
    model: nn.Module,
    *,
    layers: str | Sequence[str] | None = None,
    attention: str | None = None,
    ffn: str | None = None,
) -> tuple[Stack, ...]:
    """Find the stacks of layers of a model.

    Args:
        model: any model; wrappers (PEFT, DDP, FSDP) may stand around it.
        layers: dotted path of the layer list, or several, where they cannot be found by structure.
        attention: attribute name, in each layer, of the attention.
        ffn: attribute name, in each layer, of the ffn.

    Returns:
        The stacks, in the order in which the model lists them.

    Raises:
        StructureError: nothing was found, or what was named is not there; says what was seen.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
        >>> stack, = find_layers(LlamaForCausalLM(config))
        >>> stack.path, stack.layers[0].attention, stack.layers[0].ffn
        ('model.layers', ('self_attn',), ('mlp',))
    """
    names = {"attention": attention, "ffn": ffn}
    lists = _named_lists(model, layers) if layers is not None else _found_lists(model, names)
    if not lists:
        raise StructureError(
            f"No decoder layers were found in {type(model).__name__}. {_seen(model)} "
            'Name the list of layers with layers="<dotted path>".'
        )
    stacks = tuple(_stack(model, path, list(modules), names) for path, modules in lists)
    _check_named_parts(stacks, names)
    return stacks


def _named_lists(model: nn.Module, layers: str | Sequence[str]) -> list[tuple[str, Sequence[nn.Module]]]:
    known = dict(_module_lists(model))
    found = []
    for path in [layers] if isinstance(layers, str) else layers:
        if path not in known:
            raise StructureError(
                f'layers="{path}" is not a list of modules in {type(model).__name__}. '
                f"{_seen(model)}{did_you_mean(path, known)}"
            )
        found.append((path, known[path]))
    return found


def _module_lists(model: nn.Module) -> Iterator[tuple[str, Sequence[nn.Module]]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            yield path, list(module)
        elif isinstance(module, nn.ModuleDict) and len(module):
            yield path, list(module.values())


def _found_lists(model: nn.Module, names: dict[str, str | None]) -> list[tuple[str, Sequence[nn.Module]]]:
    """Return the outermost lists of layers; where there are none, of anything that mixes positions."""
    return list(_outermost_lists(model, names, _is_layer)) or list(_outermost_lists(model, names, _mixes_positions))


def _outermost_lists(
    model: nn.Module, names: dict[str, str | None], is_layer: Callable[[nn.Module, dict[str, str | None]], bool]
) -> Iterator[tuple[str, Sequence[nn.Module]]]:
    inside: set[nn.Module] = set()
    for path, modules in _module_lists(model):
        if modules[0] in inside or not any(is_layer(module, names) for module in modules):
            continue
        yield path, modules
        inside.update(child for module in modules for child in module.modules())


def _is_layer(module: nn.Module, names: dict[str, str | None]) -> bool:
    """Whether a module is a layer: one that transformers can checkpoint, or one with an attention and an ffn.

    Blocks of convolutions and single attentions in image tokenizers are no layers.
    """
    attention, ffn, _ = _parts(module, names)
    has_ffn = bool(ffn) or _has_inline_ffn(list(_children(module)), ())
    if hasattr(module, "gradient_checkpointing"):
        return bool(attention) or has_ffn
    return bool(attention) and has_ffn


def _mixes_positions(module: nn.Module, names: dict[str, str | None]) -> bool:
    return bool(_parts(module, names)[0])


def _stack(model: nn.Module, path: str, modules: Sequence[nn.Module], names: dict[str, str | None]) -> Stack:
    owner_path, owner = _owner(model, path)
    config = _nearest_config(model, owner_path)
    roles = _roles(path, model, owner_path)
    trainable = _trains_before(model, path, roles)
    layers = []
    for idx, module in enumerate(modules):
        trainable = trainable or any(parameter.requires_grad for parameter in module.parameters())
        attention, ffn, inline = _parts(module, names)
        layers.append(
            Layer(idx, module, attention, ffn, inline, _layer_type(module, config, idx, len(modules)), trainable)
        )
    return Stack(path, owner, roles, tuple(layers))


def _owner(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """Return the nearest module around the list at `path` that has a forward of its own; lists of lists have none."""
    while path:
        path = path.rpartition(".")[0]
        owner = model.get_submodule(path)
        if not isinstance(owner, nn.ModuleList | nn.ModuleDict):
            return path, owner
    return "", model


def _parts(module: nn.Module, names: dict[str, str | None]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return the names of the attention modules, those of the ffn modules, and whether the ffn is inline."""
    children = list(_children(module))
    kinds = {name: _kind(name, child) for name, child in children}
    found = {part: tuple(name for name, _ in children if kinds[name] == part) for part in PARTS}
    for part in PARTS:
        name = names[part]
        if name is not None:
            found[part] = (name,) if _has(module, name) else ()
    if names["ffn"] is not None:
        return found["attention"], found["ffn"], False
    inline = _has_inline_ffn(children, found["ffn"]) and bool(found["attention"])
    return found["attention"], () if inline else found["ffn"], inline


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the direct children, looking through lists (T5) and layers inside layers (Zamba)."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or _is_layer_inside(child):
            yield from ((f"{name}.{key}", grandchild) for key, grandchild in child.named_children())
        else:
            yield name, child


def _is_layer_inside(child: nn.Module) -> bool:
    kinds = {_kind(name, grandchild) for name, grandchild in child.named_children()}
    return hasattr(child, "gradient_checkpointing") or kinds >= set(PARTS)


def _kind(name: str, child: nn.Module) -> str | None:
    # The halves of BERT's ffn are called so even where they are convolutions.
    if not _has_weights(child) or _is_linear(child) or _words(name)[:1] in (["intermediate"], ["output"]):
        return None
    for text in (type(child).__name__, name):
        # The last telling word is the noun: RecurrentGemmaMlp is an mlp, MoeMambaMixer a mixer.
        for word in reversed(_words(text)):
            if word in _ATTENTION_WORDS:
                return "attention"
            if word in _FFN_WORDS:
                return "ffn"
    return None


def _words(text: str) -> list[str]:
    # Otherwise NemotronHMLP would be one word behind "Nemotron".
    spelled = _ACRONYM.sub(lambda acronym: acronym.group().capitalize(), text)
    return [word.lower() for word in _WORD.findall(spelled)]


def _has_weights(child: nn.Module) -> bool:
    """Whether the module multiplies by a matrix; norms, dropouts and rotary embeddings do not."""
    return any(parameter.dim() >= 2 for parameter in child.parameters())


def _is_linear(child: nn.Module) -> bool:
    """Whether the module is one matrix product: nn.Linear, Conv1D, or a quantised or LoRA layer in their place."""
    # LoRA layers show the weight of the layer below them, so the attribute is asked and not the class.
    weight = getattr(child, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() >= 2


def _has_inline_ffn(children: list[tuple[str, nn.Module]], ffn: tuple[str, ...]) -> bool:
    """Whether the layer's forward strings the halves of its ffn together itself (`fc1`/`fc2`, BERT's two modules)."""
    halves = [name for name, child in children if _is_half(name, child)]
    return len(halves) >= 2 and set(ffn) <= set(halves)


def _is_half(name: str, child: nn.Module) -> bool:
    is_called_so = any(word in _FFN_HALVES for word in _words(name)[:1])
    return is_called_so and _has_weights(child) and _kind(name, child) != "attention"


def _has(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def _layer_type(module: nn.Module, config: object, idx: int, num_layers: int) -> str | None:
    for name in ("layer_type", "attention_type", "block_type"):
        if isinstance(value := getattr(module, name, None), str):
            return value
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        values = getattr(config, name, None)
        if isinstance(values, list | tuple) and len(values) == num_layers and isinstance(values[idx], str):
            return str(values[idx])
    return None


def _nearest_config(model: nn.Module, path: str) -> object:
    """Return the config of the module at `path` or of the nearest one around it."""
    names = path.split(".") if path else []
    for length in range(len(names), -1, -1):
        config = getattr(model.get_submodule(".".join(names[:length])), "config", None)
        if config is not None:
            return config
    return None


def _roles(path: str, model: nn.Module, owner_path: str) -> frozenset[str]:
    words = {word for name in path.split(".") for word in _words(name)}
    roles = {role for role, known in _ROLE_WORDS.items() if words & known}
    main_input = getattr(model.get_submodule(owner_path), "main_input_name", None)
    if not roles & {"vision", "audio"}:
        roles.add(_INPUT_ROLES.get(str(main_input), "language"))
    if "language" in roles and "encoder" not in roles:
        roles.add("decoder")
    return frozenset(roles)


def _trains_before(model: nn.Module, path: str, roles: frozenset[str]) -> bool:
    """Whether a trainable parameter outside the stack can run before its first layer.

    A vision or audio tower sees only itself; before the layers of the language model anything may run, but for what
    stands behind its layers: norms and heads.
    """
    start = _tower(path, roles)
    for name, module in model.named_modules():
        inside = not start or name == start or name.startswith(start + ".")
        if not inside or name == path or name.startswith(path + ".") or _runs_after(name):
            continue
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            return True
    return False


def _tower(path: str, roles: frozenset[str]) -> str:
    """Return the dotted path of the tower that the stack stands in; empty for the language model."""
    names = path.split(".")
    for role in ("vision", "audio"):
        if role in roles:
            for length, name in enumerate(names, start=1):
                if _ROLE_WORDS[role].intersection(_words(name)):
                    return ".".join(names[:length])
    return ""


def _runs_after(name: str) -> bool:
    return (
        bool({"head", "norm", "score", "classifier"}.intersection(_words(name.rpartition(".")[2]))) or "lm_head" in name
    )


def _check_named_parts(stacks: Sequence[Stack], names: dict[str, str | None]) -> None:
    for part, name in names.items():
        found = any(name in getattr(layer, part) for stack in stacks for layer in stack.layers)
        if name is not None and not found:
            layer = stacks[0].layers[0].module
            children = [child for child, _ in _children(layer)]
            raise StructureError(
                f'{part}="{name}" is not in any layer. {type(layer).__name__} has '
                f"{', '.join(children)}.{did_you_mean(name, children)}"
            )


def _seen(model: nn.Module) -> str:
    lists = [f"{path} ({len(modules)} x {type(modules[0]).__name__})" for path, modules in _module_lists(model)]
    shown = lists[:12] + ([f"and {len(lists) - 12} more"] if len(lists) > 12 else [])
    return f"Lists of modules seen: {', '.join(shown)}." if shown else "It holds no list of modules."
