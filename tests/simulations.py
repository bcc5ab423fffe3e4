"""Simulated steps that several tests ask for, traced once: the same model, plan, step and device give the same tape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.simulator import StepSimulator, TracedStep

_MOST = 100
_TRACED: OrderedDict[Hashable, TracedStep] = OrderedDict()
_SIMPLE = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_trace = StepSimulator.trace


@contextmanager
def remembered() -> Iterator[None]:
    """Let `StepSimulator.trace` hand out what it has traced before, in this test or in an earlier one.

    Not for tests that change the simulation itself, or its devices, under the same name.
    """

    def trace(simulator: StepSimulator, plan: Plan | None, **options: Any) -> TracedStep:
        key = _key(simulator, plan, options)
        if key is None:
            return _trace(simulator, plan, **options)
        if key not in _TRACED:
            _TRACED[key] = _trace(simulator, plan, **options)
        _TRACED.move_to_end(key)
        while len(_TRACED) > _MOST:
            _TRACED.popitem(last=False)
        return _TRACED[key]

    with mock.patch.object(StepSimulator, "trace", trace):
        yield


def _key(simulator: StepSimulator, plan: Plan | None, options: dict[str, Any]) -> Hashable:
    """What a tape depends on; None where a model has hooks or forwards of its own, which say nothing of themselves."""
    of_model = _of_model(simulator.model)
    if of_model is None or options.get("changed_by") is not None:
        return None
    words = repr((simulator.step, simulator.device, sorted(simulator.structure.items()), sorted(options.items())))
    return of_model, plan, words


def _of_model(model: nn.Module) -> Hashable:
    found: list[Hashable] = []
    configs: dict[int, str] = {}
    for name, module in model.named_modules():
        values = vars(module)
        if "forward" in values or any(values[key] for key in _HOOKS):
            return None
        config = values.get("config")
        if config is not None and id(config) not in configs:
            # Where it was loaded from is a folder of one test.
            configs[id(config)] = repr({key: value for key, value in vars(config).items() if key != "_name_or_path"})
        found.append((name, type(module), tuple(f"{key}={value!r}" for key, value in _simple(values))))
    for kind in (model.named_parameters(), model.named_buffers()):
        for name, tensor in kind:
            shape = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            found.append((name, type(tensor), shape))
    return tuple(found), tuple(configs.values())


def _simple(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that can be compared: numbers, words, and adapters' settings by their names."""
    for key, value in values.items():
        if isinstance(value, _SIMPLE) or (isinstance(value, (dict, list, tuple)) and key[0] != "_"):
            yield key, value
