"""`save` takes any operator that a layer dispatches, and the kernels that stand for the process change no call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ckpt
from hf_ckpt.errors import PolicyError
from hf_ckpt.regions.selective import dispatch
from hf_ckpt.structure.layers import find_layers
from tests import exactness, plain_models, zoo
from tests.regions.selective.selective_layers import plain, step_of_plain

pytestmark = pytest.mark.slow

STEPS = 3
MODELS = """
    llama gpt2 t5 mixtral qwen2_moe bamba bert falcon bloom gemma3n_text deepseek_v3 gpt_oss jamba mamba2 rwkv opt
    gemma2 phi3 gpt_neox qwen2_vl whisper bart prophetnet xlnet longformer big_bird
    qwen3_next falcon_mamba llama4_text olmo2
    mpt gpt_neo codegen ctrl dbrx lfm2 zamba2 recurrent_gemma
""".split()
NUM_LISTS = 2
"""Each operator is in one of so many lists; all of them stay registered for the models that follow."""


class Dispatched(TorchDispatchMode):
    """Names the operators that run while a layer of a stack does, by stack."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: list[str] = []
        self.names: dict[str, set[str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stacks:
            name = f"{function._schema.name.replace('::', '.')}.{function._schema.overload_name or 'default'}"
            self.names.setdefault(self.stacks[-1], set()).add(name)
        return function(*args, **(kwargs or {}))


def dispatched(case: zoo.Case) -> list[str]:
    """Return the operators that some layer of each stack dispatches."""
    seen, hooks = Dispatched(), []
    for stack in find_layers(case.model):
        enter, leave = partial(_enter, seen, stack.path), partial(_leave, seen)
        for layer in stack.layers:
            hooks += [layer.module.register_forward_pre_hook(enter), layer.module.register_forward_hook(leave)]
    with seen:
        exactness.step(case)
    for hook in hooks:
        hook.remove()
    return sorted(set.intersection(*seen.names.values()))


def _enter(seen: Dispatched, path: str, module: nn.Module, args: Any) -> None:
    seen.stacks.append(path)


def _leave(seen: Dispatched, module: nn.Module, args: Any, output: Any) -> None:
    seen.stacks.pop()


def is_refused(case: zoo.Case, name: str) -> bool:
    """Whether a name is refused before the model is touched, as it makes no tensor of its own."""
    try:
        hf_ckpt.apply(case.model, "selective", save=[name]).remove()
    except PolicyError as error:
        return "makes no tensor of its own" in str(error)
    return False


@pytest.mark.parametrize("model_type", MODELS)
def test_every_operator_of_a_layer_can_be_kept_and_every_step_is_exact(model_type: str) -> None:
    case = exactness.build(model_type, num_layers=2)
    names = [name for name in dispatched(case) if not is_refused(case, name)]
    random.Random(model_type).shuffle(names)
    expected = exactness.step(case)
    assert len(names) >= 5
    for first in range(NUM_LISTS):
        with hf_ckpt.apply(case.model, "selective", save=names[first::NUM_LISTS]):
            for _ in range(STEPS):
                assert exactness.differences(expected, exactness.step(case)) == []


# --- Numbers in the place of tensors, and other odd arguments. ---


class Scalars(plain_models.Block):
    """Numbers reach operators as tensors: from Python, and from inside of other operators."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = super().forward(hidden, mask)
        hidden = torch.fmod(hidden * 3 + 0.1, 2.5) + torch.fmod(hidden, hidden.detach().abs() + 1)
        hidden = torch.remainder(1 - hidden / 3, 0.7) + torch.where(hidden > 0, hidden, 0.2)
        return torch.copysign(hidden, -1) + torch.xlogy(hidden.abs() + 0.1, 2.0) - torch.copysign(hidden, hidden)


class Complex(plain_models.Block):
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = super().forward(hidden, mask)
        turned = torch.complex(hidden, 0.3 * hidden) * (1 + 0.5j)
        return (turned + turned.conj() * 2 - 0.1j).abs() + hidden


class Integers(plain_models.Block):
    """A number decides the type of what an integer becomes, and that of a tensor without dimensions does not."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        counts = torch.arange(hidden.shape[-1]) + 0.1
        share = torch.tensor(0.3) * 0.123456789 + counts.dtype.itemsize
        return super().forward(hidden, mask) * (counts / 7) * share + (torch.arange(3) * 2).sum()


class Sparse(plain_models.Block):
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        eye = (torch.eye(plain_models.LENGTH) + 0).to_sparse() * 2
        return super().forward(hidden, mask) + torch.stack([torch.sparse.mm(eye, each) for each in hidden])


class Lists(plain_models.Block):
    """Lists of tensors, some of them None, and outputs that the caller gives."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            scale = torch.add(torch.ones(2), 1.5, out=torch.empty(2))
        hidden = torch.cat([hidden, hidden[:, torch.tensor([1])] * scale.sum()], dim=1)[:, :-1]
        return functional.layer_norm(super().forward(hidden, mask), (plain_models.WIDTH,)) + 1


@torch.library.custom_op("hf_ckpt_tests::noisy", mutates_args=())
def noisy(hidden: Tensor) -> Tensor:
    """Draw random numbers without saying so."""
    return hidden * (torch.rand_like(hidden) < 0.5) * 2


@torch.library.custom_op("hf_ckpt_tests::masked", mutates_args=())
def masked(hidden: Tensor, share: float) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(hidden).bernoulli_(1 - share)
    return hidden * mask, mask


noisy.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].ne(0) * 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
masked.register_autograd(
    lambda ctx, gradient, _: (gradient * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Noisy(plain_models.Block):
    """What a library's operators draw comes before what is drawn again."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = functional.dropout(noisy(hidden).tanh(), 0.3, self.training)
        return super().forward(functional.dropout(masked(hidden, 0.2)[0], 0.3, self.training), mask)


@torch.library.custom_op("hf_ckpt_tests::noisy_on_the_host", mutates_args=())
def noisy_on_the_host(hidden: Tensor) -> Tensor:
    return hidden * float(np.random.rand()) * random.random()


noisy_on_the_host.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output / inputs[0]),
)


class NoisyOnTheHost(plain_models.Block):
    """Draws from numpy and Python in an operator, and behind it."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = noisy_on_the_host(hidden).tanh()
        return super().forward(hidden * float(np.random.rand()) * random.random(), mask)


ODD: dict[type[nn.Module], list[str]] = {
    Scalars: [
        f"aten.{name}" for name in ("add", "mul", "sub", "div", "fmod", "remainder", "copysign", "xlogy", "where")
    ],
    Complex: ["aten.add", "aten.mul", "aten.sub", "aten.complex"],
    Integers: ["aten.add", "aten.mul", "aten.div", "aten.arange"],
    Sparse: ["aten.add", "aten.mul", "aten._to_sparse", "aten.stack"],
    Noisy: ["hf_ckpt_tests.noisy", "hf_ckpt_tests.masked"],
    NoisyOnTheHost: ["hf_ckpt_tests.noisy_on_the_host"],
    Lists: ["aten.add", "aten.mul", "aten.cat", "aten.index", "aten.native_layer_norm"],
}


def hold(block: type[nn.Module], policy: str, **options: Any) -> None:
    case = plain(block)
    expected = step_of_plain(case)
    # Its proof would be right to stop some of these; none of the steps may need it.
    with hf_ckpt.apply(case.model, policy, **options, prove="off"):
        for _ in range(STEPS):
            assert exactness.differences(expected, step_of_plain(case)) == []


@pytest.mark.parametrize("block", ODD)
def test_odd_arguments_reach_an_operator_that_is_kept(block: type[nn.Module]) -> None:
    hold(block, "selective", save=["aten.addmm", *ODD[block]])
    # One after the other, as the first failure would hide the others.
    for name in ODD[block]:
        hold(block, "selective", save=[name])


@pytest.mark.parametrize("block", ODD)
def test_a_plan_that_is_removed_leaves_nothing_that_fails(block: type[nn.Module]) -> None:
    for each, names in ODD.items():
        hold(each, "selective", save=names)
    hold(block, "selective")
    hold(block, "full")
    case = plain(block)
    assert exactness.differences(step_of_plain(plain(block)), step_of_plain(case)) == []


def _calls(first: Tensor) -> Iterator[Tensor]:
    yield from (first + 0.1, first * 3, first + True, 1 - first, first - 0.1, first / 3, first == 1)
    if first.dtype is not torch.float16:
        yield first * (1 + 2j)
    if not first.is_complex():
        yield from (torch.fmod(first, 0.3), torch.remainder(first, 0.3), torch.copysign(first, -1))
        yield from (torch.xlogy(first.abs() + 1, 0.7), torch.where(first > 0, first, 0.1))
    # The numbers that autograd saves are such as torch passes for a number.
    yield first + (torch.ones((), requires_grad=True) * 0.1).grad_fn._saved_other  # type: ignore[union-attr]  # of `mul`


class Numbers(plain_models.Block):
    """Computes with numbers and a tensor that is no part of its graph; `then` gets the results."""

    def __init__(self, first: Tensor, then: Callable[[list[Tensor]], None]) -> None:
        super().__init__()
        self.first, self.then = first, then

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        found = list(_calls(self.first))
        self.then(found)
        return super().forward(hidden, mask) * found[1].abs().float().mean() + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.complex64])
@pytest.mark.parametrize("shape", [(), (7,)])
def test_a_layer_computes_with_a_number_what_torch_computes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    first = (10 * torch.randn(shape)).to(dtype)
    expected, runs = list(_calls(first)), []

    def hold(found: list[Tensor]) -> None:
        assert [each.dtype for each in found] == [each.dtype for each in expected]
        assert all(map(torch.equal, found, expected))
        runs.append(torch._C._current_graph_task_id() != -1)

    def others() -> None:
        """What no plan is for: calls outside of layers, and another model."""
        hold(list(_calls(first)))
        assert exactness.differences(plainly, step_of_plain(other)) == []

    case, other = (plain(lambda: Numbers(first, hold)) for _ in range(2))
    plainly = step_of_plain(other)
    for names in (["add", "mul", "sub"], ["div", "eq", "addmm"]):
        with hf_ckpt.apply(case.model, "selective", save=[f"aten.{name}" for name in names], prove="off"):
            for _ in range(STEPS):
                assert exactness.differences(plainly, step_of_plain(case)) == []
                others()
        others()
    assert exactness.differences(plainly, step_of_plain(case)) == []
    assert True in runs
    assert dispatch.ACTIVE.run is None
    assert not dispatch.ACTIVE.interception.is_on
