"""Operators that fake CPU tensors lack: what stands in for them, and how what has no stand-in is explained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ckpt.errors import PolicyError
from hf_ckpt.simulation.constant_folding import SUBSTITUTES, fold, fold_known, has_values, to_unsupported_error
from hf_ckpt.simulation.fake_model import fake_copy
from hf_ckpt.simulation.tracker import Tracker
from tests import zoo

GROUPED_MM = torch.ops.aten._grouped_mm.default


class Outputs(TorchDispatchMode):
    """Notes shape, strides, dtype and bytes of the output of each grouped product."""

    def __init__(self, *, is_fake: bool) -> None:
        super().__init__()
        self._is_fake = is_fake
        self.seen: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        run = SUBSTITUTES.get(function, function) if self._is_fake else function
        output = run(*args, **(kwargs or {}))
        if function is GROUPED_MM:
            self.seen.append(describe(output))
        return output


class Seen(TorchDispatchMode):
    """Notes the strides of what each operator on a batch's statistics returns first."""

    def __init__(self, mode: FakeTensorMode | None) -> None:
        super().__init__()
        self._mode = mode
        self.strides: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        run = function if self._mode is None else SUBSTITUTES.get(function, function)
        output = run(*args, **(kwargs or {}))
        if "batch_norm" in str(function):
            self.strides.append(output[0].stride())
        return output


@pytest.mark.parametrize(
    "batch",
    [torch.ones(4, 5, 8).transpose(1, 2), torch.ones(4, 8, 5), torch.ones(4, 3, 3, 8).permute(0, 3, 1, 2)],
)
def test_normalised_batches_are_laid_out_as_the_real_ones(batch: Tensor) -> None:
    found = []
    for mode in (None, FakeTensorMode(allow_non_fake_inputs=True)):
        norm = nn.BatchNorm1d(8) if batch.dim() == 3 else nn.BatchNorm2d(8)
        seen = Seen(mode)
        with nullcontext() if mode is None else mode, seen:
            given = batch.detach().clone() if mode is None else mode.from_tensor(batch.detach())
            norm(given.requires_grad_()).sum().backward()
        found.append(seen.strides)
    assert len(found[0]) == 2
    assert found[0] == found[1]


def describe(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


def step_of_experts(dtype: torch.dtype, outer: int, inner: int, *, is_fake: bool) -> list[tuple[object, ...]]:
    tokens = torch.ones(10, outer, dtype=dtype, requires_grad=True)
    weight = torch.ones(4, inner, outer, dtype=dtype, requires_grad=True)
    offsets = torch.tensor([2, 5, 5, 10], dtype=torch.int32)
    if is_fake:
        mode = FakeTensorMode()
        tokens, weight, offsets = (mode.from_tensor(each) for each in (tokens, weight, offsets))
    outputs = Outputs(is_fake=is_fake)
    with mode if is_fake else nullcontext(), outputs:
        output = functional.grouped_mm(tokens, weight.transpose(-2, -1), offs=offsets)
        output.backward(torch.empty_strided(output.shape, output.stride(), dtype=dtype))
    return outputs.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outer", "inner"), [(32, 48), (32, 20)])
def test_products_of_experts_are_laid_out_as_the_real_ones(dtype: torch.dtype, outer: int, inner: int) -> None:
    real, fake = (step_of_experts(dtype, outer, inner, is_fake=is_fake) for is_fake in (False, True))
    assert fake == real
    assert len(real) == 3


def test_other_operators_stand_for_themselves() -> None:
    assert torch.ops.aten.mm.default not in SUBSTITUTES


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_models_with_experts_step_on_fake_tensors(model_type: str) -> None:
    case = zoo.build(model_type, task="causal", num_layers=2)
    copied = fake_copy(case.model)
    twin, mode = copied.model, copied.mode
    with mode, Tracker(run=fold):
        zoo.loss(twin, case.inputs).backward()
    without = {name for name, parameter in twin.named_parameters() if parameter.grad is None}
    zoo.loss(case.model, case.inputs).backward()
    assert without == {name for name, parameter in case.model.named_parameters() if parameter.grad is None}


def test_mask_with_values_says_how_much_it_selects() -> None:
    few, many = (torch.arange(6).view(2, 3) < count for count in (1, 4))
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker(run=fold_known):
        hidden = torch.empty(2, 3, 1000, 1000)
        # Not remembered by shape.
        assert [len(hidden[mask]) for mask in (few, many, few)] == [1, 4, 1]
        assert hidden[:, many[0]].shape == (2, 3, 1000, 1000)
        hidden[many, :] = hidden[many, :] + 1
        assert isinstance(hidden, FakeTensor)
    # Tokens of a text are made up, and so is what they would select.
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker(run=fold), pytest.raises(DynamicOutputShapeException):
        torch.empty(2, 3, 2**18)[many]


def test_views_of_real_tensors_are_real_however_large() -> None:
    mask = torch.tensor([[True], [False]])
    with FakeTensorMode(allow_non_fake_inputs=True), Tracker(run=fold):
        wide = mask.expand(2, 2**23)
        assert not isinstance(wide, FakeTensor)
        assert wide.untyped_storage().nbytes() == 2


class Chooses(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[inputs > 0]


def test_what_depends_on_values_is_explained() -> None:
    with pytest.raises(Exception) as caught, FakeTensorMode():  # noqa: PT011 (which type, `to_unsupported_error` decides)
        Chooses()(torch.empty(3))
    explained = to_unsupported_error(caught.value, "model.layers.0.mlp")
    line = Chooses.forward.__code__.co_firstlineno + 1
    assert str(explained) == (
        'Module "model.layers.0.mlp" cannot be simulated: it reads values of tensors to decide what to compute '
        f"(aten.nonzero.default, in line {line} of test_constant_folding.py: return inputs[inputs > 0]), and a "
        "simulated step has shapes only. Where a value is only noted, keep the detached tensor in place of its number; "
        "else measure a step on the device."
    )
    assert str(to_unsupported_error(caught.value, "")).startswith("The model cannot be simulated: ")
    named = to_unsupported_error(caught.value, "", ["input_ids", "pixel_values"], ["pixel_values"])
    assert "a simulated step has shapes only, of pixel_values too. Where" in str(named)
    raised = to_unsupported_error(ValueError("no"), "", ["input_ids", "labels", "pixel_values"])
    assert "given input_ids, labels and pixel_values, as a simulated step gives them" in str(raised)
    assert 'raises RuntimeError "out of tokens"' in str(to_unsupported_error(RuntimeError("out of tokens"), ""))


@pytest.mark.parametrize("ask", [Tensor.numpy, "{:.2f}".format])
def test_values_that_are_asked_for_outside_of_torch_are_told_of_too(ask: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught, FakeTensorMode():
        ask(torch.empty(()))
    assert "The model cannot be simulated: it reads values of tensors" in str(to_unsupported_error(caught.value, ""))


def test_other_errors_are_left_alone() -> None:
    assert to_unsupported_error(torch.OutOfMemoryError("out of memory"), "") is None
    assert to_unsupported_error(PolicyError("out of layers"), "") is None


# --- Constants beside what has no values. ---


def test_constant_that_something_without_values_is_written_into_has_none() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        unknown = torch.ones(4)
        with Tracker(run=fold):
            constant, other = torch.zeros(4), torch.zeros(4)
            assert has_values(constant)
            constant[:2].copy_(unknown[:2])
            made = constant + 1
    assert [has_values(each) for each in (constant, other, made)] == [False, True, False]
