"""Decoder stacks of a model, their layers, and the attention and ffn of each layer; found by structure.

Knows no policy. A stack is a list of modules in which at least one module has an attention (or a mixer in its place)
or an ffn; a list inside a layer of another stack (experts, sub-layers) is no stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_ckpt.errors import StructureError, did_you_mean
from hf_ckpt.structure.attention_and_ffn import PARTS, PartFinder, is_at_or_below, parameter_shapes, unwrapped, words_of
from hf_ckpt.structure.stored import stored

# Engines put one of these around the whole model; a plan names its paths as they are without.
_WRAPPERS_OF_MODELS = ("DistributedDataParallel", "DeepSpeedEngine")
_ROLE_WORDS = {
    "vision": frozenset("visual vision vit image pixel patch".split()),
    "audio": frozenset("audio speech acoustic".split()),
    "encoder": frozenset({"encoder"}),
    "decoder": frozenset({"decoder"}),
}
_BEHIND_LAYERS = frozenset({"head", "norm", "score", "classifier"})
_INPUT_ROLES = {"pixel_values": "vision", "input_features": "audio", "input_values": "audio"}


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Args:
        layer_idx: position in its stack, from 0.
        module: the layer.
        outer: what stands in its place in the list: FSDP1's wrapper around it, or the layer itself.
        attention: dotted names, below the layer, of the modules that mix positions (attention, mamba, ...).
        ffn: the same of the feed-forward networks; empty where the ffn is written out in the layer's own forward.
        ffn_is_inline: the layer's own forward computes the ffn, so that only the layer around the attention can be
            recomputed.
        layer_type: the model's own word, as `sliding_attention`, if it has one.
        needs_gradient: whether this layer, or anything that runs before it, has a trainable parameter.
        computes_attention: whether there is an attention whose output can be kept; a mixer in its place has none.
    """

    layer_idx: int
    module: nn.Module
    outer: nn.Module
    attention: tuple[str, ...]
    ffn: tuple[str, ...]
    ffn_is_inline: bool
    layer_type: str | None
    needs_gradient: bool
    computes_attention: bool

    @property
    def parts(self) -> frozenset[str]:
        """The parts that this layer has, of `attention` and `ffn`."""
        has_ffn = bool(self.ffn) or self.ffn_is_inline
        return frozenset(part for part, here in zip(PARTS, (bool(self.attention), has_ffn), strict=True) if here)

    def submodule(self, name: str) -> nn.Module:
        """Return the module at a dotted name below the layer, without FSDP1's wrapper around it."""
        return unwrapped(self.module.get_submodule(name))


@dataclass(frozen=True)
class Stack:
    """One list of layers that run one after another.

    Args:
        path: dotted path of the list in the model, as it is without DDP or FSDP1 around modules.
        home: the list itself.
        owner: the module around the list that runs it.
        roles: of `language`, `vision`, `audio`, `encoder`, `decoder`, those that fit.
        layers: the layers, by `layer_idx`.
    """

    path: str
    home: nn.Module
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
    check_is_model(model)
    names = {"attention": attention, "ffn": ffn}
    for part, name in names.items():
        if name is not None and not isinstance(name, str):
            raise StructureError(f"{part} is {name!r}. Use the name that each layer has for its {part}.")
    finder = PartFinder(parameter_shapes(model), names)
    if layers is not None:
        lists = _named_lists(model, layers)
    else:
        # The outermost lists of layers; where there are none, of anything that mixes positions.
        lists = list(_outermost_lists(model, finder.is_layer)) or list(_outermost_lists(model, finder.mixes_positions))
    if not lists:
        raise StructureError(
            f"No decoder layers were found in {type(model).__name__}. {_seen(model)} "
            'Name the list of layers with layers="<dotted path>".'
        )
    stacks = tuple(_stack(model, path, modules, finder) for path, modules in lists)
    _check_named_parts(stacks, names, finder)
    return stacks


def modules_of(model: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[nn.Module]:
    """Yield what `model.modules()` yields, in half the time: that passes each module through all above it.

    Those of `without` are left out, and what only they hold.
    """
    seen = set(without)
    remaining: list[nn.Module | None] = [model]
    while remaining:
        module = remaining.pop()
        if module is not None and module not in seen:
            seen.add(module)
            remaining.extend(reversed(module._modules.values()))
            yield module


def path_of(model: nn.Module, module: nn.Module | None) -> str | None:
    """Return the path of a module below a model, or None."""
    return next((path for path, each in model.named_modules() if each is module), None)


def uncovered_lists(model: nn.Module, stacks: Sequence[Stack]) -> tuple[str, ...]:
    """Return the paths of lists of modules that all compute attention, and lie in none of the stacks.

    They may be layers of which only a person can tell, such as one fused product for attention and ffn.
    """
    finder = PartFinder(parameter_shapes(model), dict.fromkeys(PARTS))
    inside = {module for stack in stacks for layer in stack.layers for module in (stack.home, *layer.outer.modules())}
    found = []
    for path, modules in _module_lists(model):
        if model.get_submodule(path) in inside or len(modules) < 2:
            continue
        if all(
            finder.mixes_positions(each) and finder.computes_attention(each) for each in map(_with_forward, modules)
        ):
            found.append(clean_path(model, path))
            inside.update(child for module in modules for child in module.modules())
    return tuple(found)


def _with_forward(module: nn.Module) -> nn.Module:
    """Return the module inside FSDP1's wrapper; an empty one for a mere container, which runs nothing itself."""
    module = unwrapped(module)
    return nn.Module() if type(module) is nn.Module else module


def check_is_model(model: object) -> None:
    """Refuse what is no model, such as the name of one.

    Raises:
        StructureError: says what was given.
    """
    if not isinstance(model, nn.Module):
        given = f'"{model}"' if isinstance(model, str) else f"a {type(model).__name__}"
        raise StructureError(
            f"The model is {given}, and a torch.nn.Module is needed. Load it first: "
            "AutoModelForCausalLM.from_pretrained(...)."
        )


_NamedList = tuple[str, Sequence[nn.Module]]
"""The path of a list of modules, with all wrappers in it, and the modules."""


def clean_path(model: nn.Module, path: str) -> str:
    """Return a module's path as it is without the wrappers that engines put around modules.

    Args:
        model: the model that the path starts from.
        path: dotted path, as `named_modules()` gives it.
    """
    around = modules_down_to(model, path)
    return ".".join(name for name, module in zip(path.split("."), around, strict=False) if not _is_wrapper(module))


def modules_down_to(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the model, the modules around the one at `path` from the outside to the inside, and that one."""
    return list(accumulate(path.split(".") if path else (), getattr, initial=model))


def is_unit(module: nn.Module) -> bool:
    """Whether FSDP gathers and frees the parameters of this module together."""
    return isinstance(module, FSDPModule | FullyShardedDataParallel)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP has sharded the model, or a part of it."""
    return any(map(is_unit, modules_of(model)))


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class as it is without engines: FSDP2 derives a class of its own from it."""
    while _is_wrapper(module):
        module = module.get_submodule("module")
    kinds = type(module).__mro__
    if isinstance(module, FSDPModule):
        return next(kind for kind in kinds[1:] if kind is not FSDPModule).__name__
    return kinds[0].__name__


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel) or type(module).__name__ in _WRAPPERS_OF_MODELS


def _named_lists(model: nn.Module, layers: str | Sequence[str]) -> list[_NamedList]:
    known = {clean_path(model, path): (path, modules) for path, modules in _module_lists(model)}
    found = []
    # What a user gives, whatever the annotation says.
    given: object = [layers] if isinstance(layers, str) else layers
    paths = list(given) if isinstance(given, Sequence) else []
    if not paths or not all(isinstance(path, str) for path in paths):
        raise StructureError(
            f"layers is {layers!r}. Use the dotted path of a list of layers, or several. {_seen(model)}"
        )
    for path in paths:
        if path not in known:
            raise StructureError(
                f'layers="{path}" is not a list of modules in {type(model).__name__}. '
                f"{_seen(model)}{did_you_mean(path, known)}"
            )
        found.append(known[path])
    return found


def members(home: nn.Module) -> list[nn.Module]:
    """Return what stands in a list of modules; nothing for any other module."""
    if isinstance(home, nn.ModuleDict):
        return list(home.values())
    return list(home) if isinstance(home, nn.ModuleList | nn.Sequential) else []


def _module_lists(model: nn.Module) -> Iterator[_NamedList]:
    for path, module in model.named_modules():
        if modules := members(module):
            yield path, modules


def _outermost_lists(model: nn.Module, is_layer: Callable[[nn.Module], bool]) -> Iterator[_NamedList]:
    inside: set[nn.Module] = set()
    for path, modules in _module_lists(model):
        # PEFT keeps what encodes its virtual tokens in a dictionary of adapters.
        is_one_by_name = len(modules) == 1 and isinstance(model.get_submodule(path), nn.ModuleDict)
        if is_one_by_name or modules[0] in inside or not any(is_layer(unwrapped(module)) for module in modules):
            continue
        yield path, modules
        inside.update(child for module in modules for child in module.modules())


def _stack(model: nn.Module, path: str, modules: Sequence[nn.Module], finder: PartFinder) -> Stack:
    owner_path, owner = _owner(model, path)
    config = nearest_config(model, owner_path)
    roles = _roles(path, model, owner_path)
    trainable = _trains_before(model, path, roles)
    layers = []
    for idx, outer in enumerate(modules):
        # Of the outermost: FSDP1 may keep the layer's parameters in its wrapper.
        trainable = trainable or any(parameter.requires_grad for parameter in outer.parameters())
        module = unwrapped(outer)
        layer_type = _layer_type(module, config, idx, len(modules))
        parts, computes = finder.parts(module), finder.computes_attention(module)
        layers.append(Layer(idx, module, outer, *parts, layer_type, trainable, computes))
    return Stack(clean_path(model, path), model.get_submodule(path), owner, roles, tuple(layers))


def _owner(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """Return the nearest module around the list at `path` that has a forward of its own; lists of lists have none."""
    while path:
        path = path.rpartition(".")[0]
        owner = model.get_submodule(path)
        if not isinstance(owner, nn.ModuleList | nn.ModuleDict):
            return path, owner
    return "", model


def _layer_type(module: nn.Module, config: object, idx: int, num_layers: int) -> str | None:
    for name in ("layer_type", "attention_type", "block_type"):
        if isinstance(value := stored(module, name), str):
            return value
    for name in ("layer_types", "layers_block_type", "attention_layers"):
        values = getattr(config, name, None)
        if isinstance(values, list | tuple) and len(values) == num_layers and isinstance(values[idx], str):
            return str(values[idx])
    return None


def nearest_config(model: nn.Module, path: str) -> Any:
    """Return the config of the module at `path` or of the nearest one around it."""
    configs = (stored(module, "config") for module in reversed(modules_down_to(model, path)))
    return next((config for config in configs if config is not None), None)


def _roles(path: str, model: nn.Module, owner_path: str) -> frozenset[str]:
    words = {word for name in path.split(".") for word in words_of(name)}
    roles = {role for role, known in _ROLE_WORDS.items() if words & known}
    main_input = stored(model.get_submodule(owner_path), "main_input_name")
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
        inside = not start or is_at_or_below(name, start)
        bare = clean_path(model, name)
        runs_after = "lm_head" in bare or not _BEHIND_LAYERS.isdisjoint(words_of(bare.rpartition(".")[2]))
        if not inside or is_at_or_below(name, path) or runs_after:
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
                if _ROLE_WORDS[role].intersection(words_of(name)):
                    return ".".join(names[:length])
    return ""


def _check_named_parts(stacks: Sequence[Stack], names: dict[str, str | None], finder: PartFinder) -> None:
    for part, name in names.items():
        found = any(name in getattr(layer, part) for stack in stacks for layer in stack.layers)
        if name is not None and not found:
            layer = stacks[0].layers[0].module
            children = [child for child, _ in finder.children(layer)]
            raise StructureError(
                f'{part}="{name}" is not in any layer. {type(layer).__name__} has '
                f"{', '.join(children)}.{did_you_mean(name, children)}"
            )


def _seen(model: nn.Module) -> str:
    lists = [
        f"{clean_path(model, path)} ({len(modules)} x {type(modules[0]).__name__})"
        for path, modules in _module_lists(model)
    ]
    shown = lists[:12] + ([f"and {len(lists) - 12} more"] if len(lists) > 12 else [])
    return f"Lists of modules seen: {', '.join(shown)}." if shown else "It holds no list of modules."
