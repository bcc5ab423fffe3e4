"""A weight in 4 bits that looks like itself: views, copies and writes; and what backward makes anew."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.structure.four_bit_tensor import FourBitTensor

pytest.importorskip("bitsandbytes")

NF4 = {"quant_type": "nf4", "compress_statistics": True}
# Rows of whole blocks of 64 values, rows that are none, and experts that are none.
SHAPES = [(4, 64, 128), (4, 64, 96), (3, 10, 30)]


def made(shape: tuple[int, ...] = SHAPES[0], dtype: torch.dtype = torch.bfloat16, **options: Any) -> FourBitTensor:
    torch.manual_seed(0)
    return FourBitTensor.quantized(torch.randn(shape, dtype=dtype), **{**NF4, **options})


@pytest.mark.parametrize(
    "options", [{}, {"compress_statistics": False}, {"quant_type": "fp4"}, {"quant_storage": torch.bfloat16}]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_its_values_are_those_that_were_quantised_but_for_4_bits(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    weight = made(shape, dtype, **options)
    torch.manual_seed(0)
    values = torch.randn(shape, dtype=dtype)
    assert (weight.shape, weight.dtype, weight.stride()) == (values.shape, dtype, values.stride())
    # The step of 16 levels: bitsandbytes' own error on normal values is 0.09 in nf4, and 0.12 in fp4.
    assert (weight.values() - values).float().norm() < 0.13 * values.float().norm()
    assert sum(each.nbytes for each in (weight.packed, weight.quant_state.absmax)) < 0.8 * values.numel()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight[1],
        lambda weight: weight[torch.tensor(2)],
        lambda weight: weight[-1],
        lambda weight: weight.transpose(-2, -1),
        lambda weight: weight.mT,
        lambda weight: weight[1].t(),
        lambda weight: weight.transpose(1, 2)[0],
        lambda weight: weight.detach(),
        lambda weight: weight.to(torch.float32),
    ],
)
def test_a_view_of_it_is_packed_too(view: Callable[[Any], Tensor], shape: tuple[int, ...]) -> None:
    weight = made(shape)
    expected, found = view(weight.values()), view(weight)
    assert isinstance(found, FourBitTensor)
    assert found.packed is weight.packed
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert torch.equal(found.values(), expected)


@pytest.mark.parametrize(
    "view", [lambda weight: weight[1:3], lambda weight: weight[[2, 0]], lambda weight: weight.permute(1, 0, 2)]
)
def test_other_views_are_values(view: Callable[[Any], Tensor]) -> None:
    weight = made()
    assert type(view(weight)) is Tensor
    assert torch.equal(view(weight), view(weight.values()))


def test_backward_makes_the_values_anew() -> None:
    weight = nn.Parameter(made(), requires_grad=False)
    inputs = torch.randn(5, 128, dtype=torch.bfloat16, requires_grad=True)
    saved = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = nn.functional.linear(inputs, weight[1])
    assert [type(each) for each in saved] == [FourBitTensor]
    (gradient,) = torch.autograd.grad(output.sum(), inputs)
    plain = inputs.detach().requires_grad_()
    (expected,) = torch.autograd.grad(nn.functional.linear(plain, weight[1].values()).sum(), plain)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda weight: pickle.loads(pickle.dumps(weight)),
        lambda weight: _saved(weight),
        lambda weight: nn.Parameter(weight.data.clone(), requires_grad=False),
    ],
)
def test_a_copy_has_its_own_values(copied: Callable[[Any], Any]) -> None:
    weight = nn.Parameter(made(), requires_grad=False)
    other = copied(weight)
    assert isinstance(other, nn.Parameter)
    assert isinstance(other, FourBitTensor)
    assert torch.equal(other.values(), weight.values())
    with torch.no_grad():
        weight.zero_()
    assert other.values().any()


def _saved(weight: Any) -> Any:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_write_into_the_whole_is_quantised() -> None:
    weight = nn.Parameter(made(), requires_grad=False)
    packed, before = weight.packed, weight.values()
    weight.data += 1.0
    assert weight.packed is packed
    # The levels are 0.3 apart around values of about 3; no value may be off by more than half of that.
    assert (weight.values() - before - 1).abs().max() < 0.6
    with torch.no_grad():
        weight.copy_(before)
    assert torch.equal(weight.values(), FourBitTensor.quantized(before, **NF4).values())


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight[0].zero_(),
        lambda weight: weight.mT.add_(1),
        lambda weight: torch.add(weight.values(), 1, out=weight),
        lambda weight: torch._foreach_add_([weight], 1),
        lambda weight: setattr(weight, "data", weight.values()),
        lambda weight: setattr(weight, "data", made((4, 64, 64))),
    ],
)
def test_a_write_that_would_be_lost_is_refused(write: Callable[[Any], Any]) -> None:
    weight = nn.Parameter(made(), requires_grad=False)
    before = weight.values()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="in 4 bits"):
        write(weight)
    assert torch.equal(weight.values(), before)


def test_a_module_moves_with_it() -> None:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(made(), requires_grad=False))
    module.to("meta")
    moved: Any = module.weight
    assert isinstance(moved, FourBitTensor)
    assert {each.device.type for each in (moved, moved.packed, moved.quant_state.absmax)} == {"meta"}
    assert moved.values().is_meta


def test_its_text_needs_no_values() -> None:
    assert repr(made().to("meta")) == "FourBitTensor(nf4, shape=(4, 64, 128), dtype=torch.bfloat16)"
