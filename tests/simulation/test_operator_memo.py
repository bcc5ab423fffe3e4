"""Operators on fake tensors, run once: what is made again is what the fake mode makes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ckpt.simulation import operator_memo
from hf_ckpt.simulation.operator_memo import run_once

aten = torch.ops.aten
CASES: dict[str, tuple[Any, Callable[[Tensor], tuple[Any, ...]], dict[str, Any]]] = {
    "product": (aten.mm.default, lambda x: (x, x.t()), {}),
    "number": (aten.mul.Tensor, lambda x: (x, 2.0), {}),
    "view": (aten.view.default, lambda x: (x, [2, 12]), {}),
    "transposed": (aten.t.default, lambda x: (x,), {}),
    "part": (aten.slice.Tensor, lambda x: (x, 0, 1, 3), {}),
    "parts": (aten.split.Tensor, lambda x: (x, 2), {}),
    "cast": (aten._to_copy.default, lambda x: (x,), {"dtype": torch.bfloat16}),
    "in-place": (aten.add_.Tensor, lambda x: (x, x), {}),
    "several": (aten.native_layer_norm.default, lambda x: (x, [6], None, None, 1e-5), {}),
    "list": (aten._foreach_norm.Scalar, lambda x: ([x, x.t()],), {}),
    "list-in-place": (aten._foreach_mul_.Scalar, lambda x: ([x], 2.0), {}),
}


def call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def look(value: Any, args: Any) -> Any:
    if isinstance(value, tuple | list):
        return [look(each, args) for each in value]
    if not isinstance(value, Tensor):
        return value
    # Whose storage it has, and whether it is an argument itself.
    tensors = [each for arg in args for each in (arg if isinstance(arg, list) else [arg]) if isinstance(each, Tensor)]
    storage = value.untyped_storage()
    shared = [each.untyped_storage()._cdata == storage._cdata for each in tensors]
    same = [each is value for each in tensors]
    form = tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, storage.nbytes()
    return *form, str(value.device), shared, same, vars(value)


@pytest.mark.parametrize("name", CASES)
def test_outputs_made_again_look_like_those_of_the_fake_mode(name: str) -> None:
    function, arguments, kwargs = CASES[name]
    with FakeTensorMode():
        seen = []
        for run in (
            lambda *args, **kwargs: function(*args, **kwargs),
            lambda *a, **k: run_once(call, function, a, k)[0],
        ):
            for _ in range(2):
                args = arguments(torch.empty(4, 6))
                seen.append(look(run(*args, **kwargs), args))
    assert seen[1:] == seen[:-1]


def test_nothing_holds_a_fake_mode_that_is_over() -> None:
    mode = FakeTensorMode()
    with mode:
        for _ in range(2):
            run_once(call, aten.mm.default, (torch.empty(4, 6), torch.empty(6, 4)), {})
    alive = weakref.ref(mode)
    del mode
    gc.collect()
    assert alive() is None


def test_numbers_of_different_types_are_told_apart() -> None:
    with FakeTensorMode():
        counts = torch.empty(3, dtype=torch.long)
        made = [run_once(call, aten.add.Tensor, (counts, number), {})[0].dtype for number in (1, 1.0, True)]
    assert made == [torch.long, torch.float32, torch.long]


def test_an_operator_that_changes_what_its_argument_looks_like_runs_each_time() -> None:
    with FakeTensorMode():
        for _ in range(3):
            flat = torch.empty(6)
            run_once(call, aten.resize_.default, (flat, [2, 6]), {})
            assert tuple(flat.shape) == (2, 6)


def test_what_was_run_once_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_memo, "_known", {})
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return aten.mm.default(*args, **kwargs)

    with FakeTensorMode():
        for _ in range(3):
            run_once(call, counted, (torch.empty(2, 3), torch.empty(3, 2)), {})
    assert len(calls) == 1


def test_what_is_run_on_fake_tensors_and_labels_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_memo, "_known", {})
    seen, calls = [], []

    def counted(function: Any, args: Any, kwargs: Any) -> Any:
        calls.append(function)
        return function(*args, **kwargs)

    chunks = torch.arange(6).split(3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for run in (call, lambda *each: run_once(counted, *each)[0]):
            for labels in chunks:
                args = (torch.empty(3, 8), labels, None, 2, -100)
                seen.append(look(run(aten.nll_loss_forward.default, args, {}), []))
    assert seen[1:] == seen[:-1]
    assert calls == [aten.nll_loss_forward.default]


def test_a_change_in_place_with_real_tensors_runs_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_memo, "_known", {})
    calls = []

    def counted(function: Any, args: Any, kwargs: Any) -> Any:
        calls.append(function)
        return function(*args, **kwargs)

    values = torch.arange(3.0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for _ in range(2):
            run_once(counted, aten.add_.Tensor, (torch.empty(3), values), {})
    assert calls == [aten.add_.Tensor] * 2


def test_calls_that_look_the_same_cost_the_same_unless_memory_is_read_again() -> None:
    with FakeTensorMode():
        cases = [torch.empty(4, 6), torch.empty(6, 4).t(), torch.empty(8, 6)[::2], torch.empty(6).expand(4, 6)]
        known = [run_once(call, aten.mul.Tensor, (each, 2.0), {})[1] for each in cases]
    assert [each is not None and each.has_one_cost for each in known] == [True, True, True, False]
