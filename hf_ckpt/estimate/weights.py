"""What a model's weights are: how many in which dtype, what is not quantised, what is trained, and by which adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from hf_ckpt.structure.experts import are_experts, whole_shape
from hf_ckpt.structure.stored import adapted_parameter, path_without_adapters

EXPERTS, EMBEDDINGS, HEAD, LINEAR, OTHERS = "experts", "embeddings", "head", "linear layers", "others"
"""What may not be quantised in a model that is."""

_BITS = " bits"
_NAMED = 0.9  # The share of what is not quantised that is told by name.
_KINDS = {"LORA": "LoRA", "ADALORA": "AdaLoRA", "LOHA": "LoHa", "LOKR": "LoKr", "VERA": "VeRA", "XLORA": "X-LoRA"}
"""How kinds of adapters are written, where not as PEFT writes them."""


@dataclass(frozen=True, slots=True)
class Target:
    """Modules, or parameters, of one name that an adapter is on."""

    name: str
    count: int
    rank: int | None  # None of a kind of adapter that has none.


@dataclass(frozen=True, slots=True)
class Adapter:
    """What trains in place of the weights."""

    kind: str
    targets: tuple[Target, ...]
    whole: tuple[str, ...]  # Names of the modules that train whole next to it (`modules_to_save`).

    def describe(self) -> str:
        """Return it as text, such as `LoRA of rank 16 on q_proj, v_proj (32 each)`."""
        alike: dict[tuple[int | None, int], list[str]] = {}
        for target in self.targets:
            alike.setdefault((target.rank, target.count), []).append(target.name)
        texts: list[str] = []
        told = None
        for (rank, count), names in alike.items():
            of_rank = "" if rank in (None, told) else f"of rank {rank} "
            texts.append(f"{of_rank}on {', '.join(names)} ({count}{' each' if len(names) > 1 else ''})")
            told = rank
        on = f" {' and '.join(texts)}" if texts else ""
        whole = f"; {', '.join(self.whole)} whole" if self.whole else ""
        return f"{self.kind}{on}{whole}"


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture, where those of a layer are one parameter."""

    by_dtype: Mapping[str, int]  # As those of all weights.
    num_layers: int  # That have experts.
    in_layer: tuple[int, ...]  # How many experts those have, each number once.
    num_trained: int  # Of the experts themselves, without what an adapter adds.
    adapted: tuple[str, ...]  # Names of the parameters that an adapter is on.

    def describe(self) -> str:
        """Return them as text, such as `29.0 B in bfloat16: 128 in each of 48 layers, frozen`."""
        numbers = ", ".join(f"{_short(number)} in {kind}" for kind, number in self.by_dtype.items())
        how_many = " or ".join(map(str, self.in_layer))
        each = f"{how_many} in each of {self.num_layers} layers"
        done = (
            f"an adapter on {', '.join(self.adapted)}" if self.adapted else "trained" if self.num_trained else "frozen"
        )
        return f"{numbers}: {each}, {done}"


@dataclass(frozen=True, slots=True)
class Weights:
    """How many numbers a model has."""

    by_dtype: Mapping[str, int]  # Without what an adapter adds; `4 bits` and `8 bits` where they are quantised.
    not_quantised: Mapping[str, int]  # Of a quantised model: what the others are, as `EXPERTS`, `HEAD` and so on.
    num_experts: int  # Of those without what an adapter adds.
    trained_by_dtype: Mapping[str, int]
    adapter: Adapter | None = None
    experts: Experts | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether any are in 4 or 8 bits."""
        return any(kind.endswith(_BITS) for kind in self.by_dtype)

    @property
    def num_all(self) -> int:
        """Without what an adapter adds."""
        return sum(self.by_dtype.values())

    @property
    def num_trained(self) -> int:
        """All that is trained."""
        return sum(self.trained_by_dtype.values())

    def describe(self) -> str:
        """Return them as text, such as `8.0 B parameters: 7.0 B in 4 bits, 1.1 B in bfloat16 (embeddings, head)`."""
        each = " parameters" if len(self.by_dtype) == 1 else ""
        parts = [f"{_short(number)}{each} in {kind}" for kind, number in self.by_dtype.items()]
        text = parts[0] if len(parts) == 1 else f"{_short(self.num_all)} parameters: {', '.join(parts)}"
        whole_experts = self.not_quantised.get(EXPERTS, 0) if self.is_quantised else self.num_experts
        if not whole_experts:
            names: list[str] = []
            told = 0
            for name, number in self.not_quantised.items():
                if told < _NAMED * sum(self.not_quantised.values()):
                    names, told = [*names, name], told + number
            return f"{text} ({', '.join(names)})" if names else text
        why = ", as bitsandbytes quantises linear layers only" if self.is_quantised else ""
        return f"{text}, {_short(whole_experts)} of them experts{why}"

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield what commands and runs say of the weights, as (name, text) rows."""
        yield "weights", self.describe()
        if self.experts is not None:
            yield "experts", self.experts.describe()
        yield "trained", self.describe_trained()

    def describe_trained(self) -> str:
        """Return what is trained as text."""
        of_all = "all" if self.num_trained == self.num_all else f"{self.num_trained:,} numbers"
        adapter = "" if self.adapter is None else f": {self.adapter.describe()}"
        return f"{of_all} in {' and '.join(self.trained_by_dtype)}{adapter}"


def weights_of(model: nn.Module) -> Weights:
    """Count the weights of a model: on `meta`, quantised and with adapters as it will train."""
    adapter = _adapter_of(model)
    by_dtype, others, trained = Counter[str](), Counter[str](), Counter[str]()
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            # A head may share the weight of the embeddings.
            if parameter in seen:
                continue
            seen.add(parameter)
            number, kind = num_weights(parameter), _kind(parameter)
            if parameter.requires_grad:
                trained[kind] += number
            # Next to an adapter what trains was added.
            if adapter is None or not parameter.requires_grad:
                by_dtype[kind] += number
                if not kind.endswith(_BITS):
                    others[_what(module, parameter, head)] += number
    # What is quantised is told first.
    ordered = sorted(by_dtype.items(), key=lambda item: (not item[0].endswith(_BITS), -item[1]))
    not_quantised = dict(others.most_common()) if ordered[0][0].endswith(_BITS) else {}
    experts = _experts_of(model)
    num_experts = 0 if experts is None else sum(experts.by_dtype.values())
    return Weights(dict(ordered), not_quantised, num_experts, dict(trained.most_common()), adapter, experts)


def _experts_of(model: nn.Module) -> Experts | None:
    by_dtype, num_trained = Counter[str](), 0
    in_layer: dict[nn.Module, int] = {}
    adapted: dict[str, None] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if are_experts(module, parameter):
                by_dtype[_kind(parameter)] += num_weights(parameter)
                num_trained += num_weights(parameter) * parameter.requires_grad
                in_layer[module] = whole_shape(parameter)[0]
        target = adapted_parameter(module)
        if target is not None and are_experts(target.base, getattr(target.base, target.name)):
            adapted[target.name] = None
    if not in_layer:
        return None
    kinds = tuple(dict.fromkeys(in_layer.values()))
    return Experts(dict(by_dtype.most_common()), len(in_layer), kinds, num_trained, tuple(adapted))


def as_json(weights: Weights) -> dict[str, Any]:
    """Return the weights as JSON types."""
    return {"num_all": weights.num_all, "num_trained": weights.num_trained, **asdict(weights)}


def num_weights(parameter: torch.Tensor) -> int:
    """Return how many numbers a parameter has: a 4-bit weight packs several into one of its storage."""
    state = getattr(parameter, "quant_state", None)
    return whole_shape(parameter).numel() if state is None else int(torch.Size(state.shape).numel())


def _kind(parameter: nn.Parameter) -> str:
    if getattr(parameter, "quant_state", None) is not None:
        return f"4{_BITS}"
    # bitsandbytes keeps the scales of an 8-bit weight on it.
    return f"8{_BITS}" if hasattr(parameter, "SCB") else str(parameter.dtype).removeprefix("torch.")


def _what(module: nn.Module, parameter: nn.Parameter, head: object) -> str:
    if isinstance(module, nn.Embedding):
        return EMBEDDINGS
    if isinstance(module, nn.Linear):
        return HEAD if module is head else LINEAR
    return EXPERTS if are_experts(module, parameter) else OTHERS


def _short(number: int) -> str:
    """Return a count in words, such as `7.0 B` for billions."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        # As it is printed, 999,950,000 would be 1,000.0 M.
        if number >= 0.9995 * size:
            return f"{number / size:.1f} {unit}"
    return f"{number:,}"


# --- Adapters. ---


def _adapter_of(model: nn.Module) -> Adapter | None:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return None
    config: Any = next(iter(configs.values()))
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    name = "DoRA" if getattr(config, "use_dora", False) else _KINDS.get(kind, kind)
    found = Counter(_targets(model))
    targets = tuple(Target(name, count, rank) for (name, rank), count in found.items())
    return Adapter(name, targets, tuple(getattr(config, "modules_to_save", None) or ()))


def _targets(model: nn.Module) -> Iterator[tuple[str, int | None]]:
    """Yield the name of each module or parameter that an adapter is on, and its rank."""
    for path, module in model.named_modules():
        adapted: Any = module
        # PEFT's layers name what they add.
        if not getattr(adapted, "adapter_layer_names", ()) or not hasattr(adapted, "base_layer"):
            continue
        parameter = adapted_parameter(module)
        name = path_without_adapters(path).rpartition(".")[2]
        ranks = getattr(adapted, "r", None)
        rank = next(iter(ranks.values()), None) if isinstance(ranks, Mapping) else None
        yield name if parameter is None or parameter.name == "weight" else f"{name}.{parameter.name}", rank
