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
pytestmark = pytest.mark.filterwarnings("ignore:.*which is quantised anew")

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
        lambda weight: weight.to(torch.float32)[1],
        lambda weight: weight[1:3],
        lambda weight: weight[2][:, 5],
        lambda weight: weight[..., ::2],
        lambda weight: weight.unbind()[2],
        lambda weight: weight.chunk(2, dim=1)[1],
        lambda weight: weight.permute(1, 0, 2),
        lambda weight: weight.flatten(),
        lambda weight: weight.unsqueeze(0),
        lambda weight: weight.diagonal(0, 1, 2),
        lambda weight: weight[1].expand(2, -1, -1),
        lambda weight: weight.view(torch.int16),
    ],
)
def test_a_view_of_it_is_packed_too(view: Callable[[Any], Tensor], shape: tuple[int, ...]) -> None:
    weight = made(shape)
    expected, found = view(weight.values()), view(weight)
    assert isinstance(found, FourBitTensor)
    assert found.packed is weight.packed
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert torch.equal(found.values(), expected)


def test_what_is_gathered_is_values() -> None:
    weight = made()
    assert type(weight[[2, 0]]) is Tensor
    assert torch.equal(weight[[2, 0]], weight.values()[[2, 0]])


def test_a_copy_of_a_view_lies_as_asked_for() -> None:
    for copied in (lambda weight: weight.mT.contiguous(), lambda weight: weight[:, ::2].clone().view(-1)):
        expected, found = copied(made().values()), copied(made())
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        assert torch.equal(found.values(), expected)


def test_a_view_is_pickled_as_values() -> None:
    assert torch.equal(pickle.loads(pickle.dumps(made()[1])), made()[1].values())


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
    with pytest.warns(UserWarning, match="quantised anew"):
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
        lambda weight: weight[0:2].zero_(),
        lambda weight: weight.__setitem__((slice(None), 0), 0.0),
        lambda weight: weight.view(-1).zero_(),
        lambda weight: weight.unbind()[0].zero_(),
        lambda weight: weight.transpose_(1, 2),
        lambda weight: setattr(weight, "data", made((4, 64, 64)).mT),
        lambda weight: setattr(weight, "data", weight.data.float()),
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


def test_packed_values_are_copied_as_they_are() -> None:
    # Quantised a second time, the scales of the blocks would be others.
    module, other = (nn.ParameterDict({"weight": nn.Parameter(made(), requires_grad=False)}) for _ in range(2))
    with torch.no_grad():
        module["weight"].add_(1.0)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other["weight"].values(), module["weight"].values())
    assert other["weight"].packed is not module["weight"].packed


@pytest.mark.parametrize(
    "train",
    [
        lambda weight: weight.requires_grad_(),
        lambda weight: setattr(weight, "requires_grad", True),
        lambda weight: nn.ParameterList([weight]).requires_grad_(True),
        lambda weight: nn.Parameter(weight),
    ],
)
def test_it_cannot_be_trained(train: Callable[[Any], Any]) -> None:
    weight = nn.Parameter(made(), requires_grad=False)
    with pytest.raises(UnsupportedError, match="cannot be trained"):
        train(weight)
    assert not weight.requires_grad_(False).requires_grad


def test_its_values_are_handed_out_to_be_read() -> None:
    weight = made(dtype=torch.float32)
    for each in (weight, weight[1].flatten()):
        array = each.numpy()
        assert (array == each.values().numpy()).all()
        assert not array.flags.writeable
        assert each.tolist() == each.values().tolist()


def test_its_memory_is_not_handed_out() -> None:
    # What reads it would read address 0.
    with pytest.raises(UnsupportedError, match="does not hold its values"):
        made().share_memory_()
    with pytest.raises(UnsupportedError, match="does not hold its values"):
        made().__dlpack__()


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
