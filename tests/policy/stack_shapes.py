"""Shapes of models for policies to be resolved for, and what is said of one that cannot be."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from hf_ckpt.errors import PolicyError
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy
from hf_ckpt.policy.resolve_rules import resolve

BOTH = frozenset({"attention", "ffn"})


@dataclass(frozen=True)
class Layer:
    layer_type: str | None = None
    parts: frozenset[str] = BOTH
    needs_gradient: bool = True
    computes_attention: bool = True


@dataclass(frozen=True)
class Stack:
    layers: list[Layer]
    path: str = "model.layers"
    roles: frozenset[str] = field(default=frozenset({"language", "decoder"}))


def decoder(num_layers: int) -> list[Stack]:
    return [Stack([Layer()] * num_layers)]


def two_towers(num_vision: int = 2, num_text: int = 4) -> list[Stack]:
    vision = Stack([Layer()] * num_vision, "model.visual.blocks", frozenset({"vision"}))
    return [vision, *decoder(num_text)]


def typed(*types: str | None) -> list[Stack]:
    return [Stack([Layer(layer_type=kind) for kind in types])]


def plan_of(policy: object, stacks: list[Stack], **options: object) -> Plan:
    return resolve(Policy.parse(policy, **options), stacks, "TinyForCausalLM")


def letters(plan: Plan) -> list[str]:
    """Write each stack as one letter per layer: none, full, attention, ffn, selective; in segments, their number."""
    return [
        "".join(layer.mode[0] if layer.segment is None else str(layer.segment) for layer in stack.layers)
        for stack in plan.stacks
    ]


def message_of(policy: object, stacks: list[Stack], **options: object) -> str:
    with pytest.raises(PolicyError) as raised:
        plan_of(policy, stacks, **options)
    return str(raised.value)


RICH = [
    {"layers": "0:4", "mode": "full", "segment_size": 2, "nested": True},
    {"layers": "4:6", "mode": "ffn"},
    {"layers": "7:9", "mode": "selective", "save": ["aten.mm"], "offload": {"to": "cpu", "fraction": 0.5}},
    {"layers": "9:", "mode": "full", "tiles": "auto", "offload": {"to": "disk", "path": "/scratch"}},
]


def rich() -> Plan:
    stacks = [Stack([Layer()] * 5 + [Layer(parts=frozenset({"attention"}))] + [Layer()] * 5)]
    return plan_of(RICH, stacks, head="chunked")
