"""The chunked head on a model: evaluation, copies, removal, what is refused, and the heads of other libraries."""

from __future__ import annotations

import copy
import logging
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from transformers.modeling_outputs import CausalLMOutput

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError, UnsupportedError
from hf_ckpt.structure.lm_head import find_head, governed_by_other
from tests import traces, training
from tests.regions.head.head_steps import (
    BOUND,
    VOCAB,
    Loss,
    check_same,
    chunked,
    ids,
    labels,
    llama,
    logits,
    off_by,
    own_loss,
    step,
    worst,
)

core = pytest.mark.core


# --- Without gradients, copies, removal. ---


@core
def test_head_in_evaluation_mode_runs_as_it_is() -> None:
    model = llama()
    model.lm_head.eval()
    with chunked(model):
        assert type(model(input_ids=ids(), labels=labels()).logits) is Tensor


@core
def test_evaluation_and_generation_have_real_logits() -> None:
    model = llama()
    model.eval()
    expected = logits(model)
    generated = model.generate(ids(), max_new_tokens=3, do_sample=False)
    with chunked(model):
        assert type(logits(model)) is Tensor
        assert torch.equal(logits(model), expected)
        assert torch.equal(model.generate(ids(), max_new_tokens=3, do_sample=False), generated)
        model.train()
        with torch.no_grad():
            assert type(logits(model)) is Tensor


@core
def test_copy_and_pickle_run_their_own_head() -> None:
    model = llama()
    with chunked(model):
        expected = own_loss(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(own_loss(other), expected)
            with torch.no_grad():
                other.lm_head.weight.zero_()
            assert not torch.equal(own_loss(other), expected)
        assert torch.equal(own_loss(model), expected)


@core
def test_backward_after_removal_is_the_same() -> None:
    model = llama()
    expected = step(model)
    model.zero_grad()
    with chunked(model):
        loss = own_loss(model)
    loss.backward()
    assert worst({name: p.grad for name, p in model.named_parameters()}, expected[1]) <= BOUND


@core
def test_step_leaves_nothing_alive() -> None:
    model = llama()
    with chunked(model):
        output = model(input_ids=ids(), labels=labels())
        held = [weakref.ref(output.logits), weakref.ref(output.logits.state.head_call)]
        output.loss.backward()
        del output
    assert [reference() for reference in held] == [None, None]


@core
def test_removal_leaves_nothing_behind() -> None:
    model = llama()
    found = traces.snapshot(model)
    with chunked(model):
        step(model)
        model.zero_grad()
    assert traces.differences(found, traces.snapshot(model)) == []


# --- What is refused. ---


class _Doubled(torch.autograd.Function):
    """Doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def write_to_shared(model: nn.Module) -> None:
    found = logits(model)
    found[0].add_(1)


def after_a_step(model: nn.Module) -> None:
    found = logits(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    functional.cross_entropy(found[0], ids()[0])


def function_around(model: nn.Module) -> None:
    functional.cross_entropy(_Doubled.apply(logits(model))[0], ids()[0])


REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "hook": (lambda model: logits(model).register_hook(print), r"The gradient \(register_hook\) was asked for"),
    "retain_grad": (lambda model: logits(model).retain_grad(), r"The gradient \(retain_grad\) was asked for"),
    "shared write": (write_to_shared, r"A write \(add_\) into memory that they share with others"),
    "changed weights": (after_a_step, "after the head's weights have changed"),
    "function around": (function_around, "_DoubledBackward, which somebody put around them"),
    "result": (lambda model: torch.sin(torch.ones(2, 24, VOCAB), out=logits(model)), "Taking in the result of sin"),
}


@core
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    ask, message = REFUSED[name]
    model = llama()
    with chunked(model), pytest.raises(UnsupportedError, match=message):
        ask(model)


@core
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.sweep
def test_compiled_model_is_refused_and_compiled_layers_are_not() -> None:
    model = llama(num_hidden_layers=1)
    expected = step(model)
    # What tests before have compiled counts against the compiler's limit, beyond which it runs a function as it is.
    torch._dynamo.reset()
    with chunked(model):
        with pytest.raises(UnsupportedError, match="Compile the layers alone"):
            own_loss(torch.compile(model, backend="eager"))
        torch._dynamo.reset()
        model.model.layers[0].mlp.compile(backend="eager")
        assert worst(step(model)[1], expected[1]) <= BOUND
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="the whole model is compiled"):
        find_head(torch.compile(model, backend="eager"))


@core
def test_model_without_a_head_is_refused() -> None:
    model = LlamaForSequenceClassification(llama().config)
    with pytest.raises(UnsupportedError, match="LlamaForSequenceClassification has no language-model head"):
        chunked(model)


@core
def test_dropout_on_the_head_is_refused() -> None:
    config = LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.1)
    with pytest.raises(UnsupportedError, match=r"lm_head.lora_dropout.default drops values at random \(p=0.1\)"):
        chunked(get_peft_model(llama(), config))


class _Mixing(nn.Linear):
    """Looks at all positions."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden - hidden.mean(dim=1, keepdim=True))


@core
def test_head_that_may_mix_positions_is_refused() -> None:
    model = llama()
    model.lm_head = _Mixing(32, VOCAB, bias=False)
    with pytest.raises(UnsupportedError, match="lm_head is _Mixing, which is not known"):
        chunked(model)


class _Around(LlamaForCausalLM):
    """Multiplies with the head's weight itself."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden = self.model(input_ids).last_hidden_state
        scores = functional.linear(hidden, self.lm_head.weight)
        return CausalLMOutput(loss=self.loss_function(scores, labels, VOCAB), logits=scores)


@core
def test_head_that_is_passed_over_is_said() -> None:
    model = _Around(llama().config).train()
    with chunked(model), pytest.raises(PlanMismatchError, match="_Around computed its loss without calling its head"):
        own_loss(model)


# --- Other libraries. ---


def test_fused_head_of_liger_governs(caplog: pytest.LogCaptureFixture) -> None:
    liger = pytest.importorskip("liger_kernel.transformers")
    model = llama()
    # Its other kernels are put into the classes of transformers, for all that runs afterwards.
    others = dict.fromkeys(["rope", "rms_norm", "swiglu"], False)
    liger.apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=True, **others)
    with caplog.at_level(logging.INFO, "hf_ckpt"), chunked(model) as applied:
        assert "head" not in applied.summary()
        assert "forward" not in vars(model.lm_head)
    assert "liger_kernel" in caplog.text


def test_fused_head_of_trl_governs() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("needs a trl with a fused head")
    model = llama()
    assert governed_by_other(model) is None
    utils.add_fused_lm_head(model)
    assert governed_by_other(get_peft_model(model, LoraConfig(target_modules=["q_proj"]))) == "trl"


@pytest.mark.parametrize("changes", [{}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 2}])
def test_trainer_logs_the_same_losses(changes: dict[str, Any], tmp_path: Path) -> None:
    plain = training.trainer(training.llama(), tmp_path, **changes)
    plain.train()
    with_it = training.trainer(training.llama(), tmp_path, hf_ckpt.HFCkptCallback("full", head="chunked"), **changes)
    with_it.train()
    assert training.losses(with_it) == pytest.approx(training.losses(plain), rel=BOUND)


# --- What changes after the call, and hooks on the head. ---


def start() -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))


def loss_of(scores: Tensor) -> Tensor:
    return functional.cross_entropy(scores[:, :-1].reshape(-1, VOCAB), ids()[:, 1:].reshape(-1))


def moved_before_the_loss(model: nn.Module) -> Tensor:
    scores = model(input_ids=ids()).logits + (prior := start())
    prior.mul_(-0.5)
    return loss_of(scores)


def moved_after_the_loss(model: nn.Module) -> Tensor:
    loss = loss_of(torch.where(start() > 2, -1e4, model(input_ids=ids()).logits) - (prior := start()))
    prior.mul_(-0.5)
    return loss


def columns_moved(model: nn.Module) -> Tensor:
    scores, prior = model(input_ids=ids()).logits, start()
    scores[..., :9] = prior[:9]
    prior.mul_(-0.5)
    return loss_of(scores)


def class_weights_moved(model: nn.Module) -> Tensor:
    scores = model(input_ids=ids()).logits[:, :-1].reshape(-1, VOCAB)
    weight = start().abs() + 0.1
    # A plain step that saves the weights would refuse the write.
    loss = functional.cross_entropy(
        scores, ids()[:, 1:].reshape(-1), weight=weight if is_chunked(model) else weight.clone()
    )
    weight.mul_(2)
    return loss


def is_chunked(model: nn.Module) -> bool:
    return "forward" in vars(model.lm_head)


@core
@pytest.mark.parametrize(
    "loss", [moved_before_the_loss, moved_after_the_loss, columns_moved, class_weights_moved], ids=lambda x: x.__name__
)
def test_what_is_put_into_the_logits_may_be_written_to_afterwards(loss: Loss) -> None:
    check_same(llama(), loss)


def on_input(hook: Any) -> Any:
    return lambda head, given: given[0].register_hook(hook) and None


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "scales what is given": lambda head: head.register_forward_pre_hook(lambda head, given: (given[0] * 2,)),
    "scales the logits": lambda head: head.register_forward_hook(lambda head, given, out: out * 2),
    "adds to the logits": lambda head: head.register_forward_hook(lambda head, given, out: out + start()),
    "halves the input's gradient": lambda head: head.register_forward_pre_hook(on_input(lambda g: g * 0.5)),
    "normalises the input's gradient": lambda head: head.register_forward_pre_hook(on_input(lambda g: g / g.norm())),
    "normalises the weight's gradient": lambda head: head.weight.register_hook(lambda g: g / g.norm()),
    "places a hook on the weight": lambda head: head.register_forward_pre_hook(
        lambda head, given: head.weight.register_hook(lambda g: g / g.norm()) and None
    ),
}


@core
@pytest.mark.sweep(keep=4)
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_the_head_run_once(hook: str, is_frozen: bool) -> None:
    if is_frozen and "weight" in hook:
        pytest.skip("a frozen weight has no gradient")
    model = llama()
    model.lm_head.requires_grad_(not is_frozen)
    # One that places hooks on the weight does so in each step.
    HOOKS[hook](model.lm_head)
    expected = step(model)
    if model.lm_head.weight._backward_hooks and "places" in hook:
        model.lm_head.weight._backward_hooks.clear()
    with chunked(model):
        got = step(model)
    assert off_by(got[0], expected[0]) <= BOUND
    assert worst(got[1], expected[1]) <= BOUND
