"""The chunked head: the model's own loss and gradients, logits that are never held, and what is handed out or refused.

Chunks add up their losses, and the gradients of the head's weight, in another order than one product over the whole
batch does: a few roundings of float32, so that 1e-6 relative is the bound. What goes back into the decoder is bitwise
the same where the loss is.
"""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.modeling_outputs import CausalLMOutput

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError, UnsupportedError
from hf_ckpt.policy.plan import parse
from hf_ckpt.regions.head import Chunking, DeferredLogits
from hf_ckpt.regions.head.chunked_loss import InParts
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.structure.lm_head import find_head, governed_by_other
from tests import traces, training

core = pytest.mark.core

VOCAB, BATCH, LENGTH = 97, 2, 24
BOUND = 1e-6

Loss = Callable[[nn.Module], Tensor]


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "vocab_size": VOCAB, **changes})).to(dtype).train()


def ids() -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def labels() -> Tensor:
    """Token ids of which some are ignored."""
    marked = ids()
    marked[0, :5] = -100
    return marked


def own_loss(model: nn.Module, **options: Any) -> Tensor:
    return model(input_ids=ids(), labels=labels(), **options).loss


def logits(model: nn.Module) -> Tensor:
    return model(input_ids=ids()).logits


def shifted(model: nn.Module) -> Tensor:
    """Logits that predict `targets()`, [B, S - 1, V]."""
    return logits(model)[:, :-1]


def targets() -> Tensor:
    return ids()[:, 1:]


def step(model: nn.Module, loss_of: Loss = own_loss) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def chunked(model: nn.Module) -> hf_ckpt.patch.apply.Applied:
    return hf_ckpt.apply(model, "none", head="chunked")


def off_by(got: Tensor, expected: Tensor) -> float:
    """Relative difference, of a number or in the norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(off_by(got[name], gradient) for name, gradient in expected.items())


def check_same(model: nn.Module, loss_of: Loss = own_loss) -> DeferredLogits | None:
    """Assert that the chunked head changes neither loss nor gradients by more than the bound."""
    expected = step(model, loss_of)
    with chunked(model):
        got = step(model, loss_of)
    assert got[0].dtype == torch.float32
    assert off_by(got[0], expected[0]) <= BOUND
    assert worst(got[1], expected[1]) <= BOUND


# --- The model's own loss. ---


@core
@pytest.mark.parametrize("tie", [False, True])
def test_loss_and_gradients_are_those_of_the_model(tie: bool) -> None:
    check_same(llama(tie_word_embeddings=tie))


@core
def test_loss_is_scaled_by_the_number_of_items() -> None:
    check_same(llama(), lambda model: own_loss(model, num_items_in_batch=torch.tensor(33)))


@core
def test_gradients_add_up_over_micro_batches() -> None:
    check_same(llama(), lambda model: own_loss(model) + functional.cross_entropy(logits(model)[0], ids()[1]))


@core
def test_batch_without_any_label_gives_nan_as_the_model_does() -> None:
    model = llama()
    with chunked(model):
        assert model(input_ids=ids(), labels=torch.full_like(ids(), -100)).loss.isnan()


@core
def test_gradients_behind_a_frozen_head_are_bitwise_the_same() -> None:
    model = llama()
    model.lm_head.requires_grad_(False)
    expected = step(model)
    with chunked(model):
        got = step(model)
    assert all(torch.equal(got[1][name], gradient) for name, gradient in expected[1].items())


@core
def test_head_alone_can_be_trained() -> None:
    model = llama()
    model.model.requires_grad_(False)
    check_same(model)


@core
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning")
@pytest.mark.parametrize("settings", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_adapter_on_the_head_is_exact(settings: dict[str, Any]) -> None:
    wanted = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **settings}
    check_same(get_peft_model(llama(tie_word_embeddings=False), LoraConfig(**wanted)).train())


@core
def test_second_backward_through_the_same_graph_gives_the_same() -> None:
    model = llama()
    with chunked(model):
        loss = own_loss(model)
        loss.backward(retain_graph=True)
        first = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        loss.backward()
    assert all(torch.equal(p.grad, first[name]) for name, p in model.named_parameters())


# --- Lower precision. ---


@core
def test_bf16_loss_is_float32_and_that_of_the_model() -> None:
    model = llama(torch.bfloat16)
    expected = own_loss(model).detach()
    with chunked(model):
        got = own_loss(model).detach()
    assert got.dtype == expected.dtype == torch.float32
    assert off_by(got, expected) <= BOUND


@core
def test_bf16_weight_gradient_is_as_near_to_the_truth_as_the_models() -> None:
    # Added up in bf16 it would be three times as far off with this many chunks.
    model = llama(torch.bfloat16, num_hidden_layers=1)
    tokens = torch.randint(0, VOCAB, (2, 512))

    def gradient(of: nn.Module) -> Tensor:
        of.zero_grad()
        of(input_ids=tokens, labels=tokens).loss.backward()
        return of.lm_head.weight.grad

    truth = gradient(copy.deepcopy(model).double())
    plain = off_by(gradient(model), truth)
    with chunked(model):
        model.lm_head.forward.args[0].tokens = 16
        assert off_by(gradient(model), truth) <= 1.5 * plain


@core
def test_autocast_is_as_near_to_the_truth_as_the_models() -> None:
    def loss_of(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return own_loss(model)

    model = llama()
    truth, plain = step(model), step(model, loss_of)
    with chunked(model):
        got = step(model, loss_of)
    assert off_by(got[0], plain[0]) <= BOUND
    for name, gradient in truth[1].items():
        assert off_by(got[1][name], gradient) <= 1.5 * off_by(plain[1][name], gradient)


# --- What is asked of logits: (what, whether the whole logits are needed). ---


def label_smoother(model: nn.Module) -> Tensor:
    """As the Trainer's: sums and picks of log-probabilities, masked in place."""
    negative = -functional.log_softmax(shifted(model), dim=-1)
    picked = negative.gather(dim=-1, index=targets()[..., None])
    summed = negative.sum(dim=-1, keepdim=True, dtype=torch.float32)
    mask = targets()[..., None] < 3
    picked.masked_fill_(mask, 0.0)
    summed.masked_fill_(mask, 0.0)
    return 0.9 * picked.sum() + 0.1 * summed.sum() / VOCAB


def by_hand(model: nn.Module, **options: Any) -> Tensor:
    return functional.cross_entropy(shifted(model).reshape(-1, VOCAB), targets().reshape(-1), **options)


def without_reduction(model: nn.Module) -> Tensor:
    return by_hand(model, reduction="none") @ torch.linspace(0, 1, BATCH * (LENGTH - 1))


def labelled_only(model: nn.Module) -> Tensor:
    mask = labels()[:, 1:] != -100
    return functional.cross_entropy(shifted(model)[mask], targets()[mask])


def capped(model: nn.Module) -> Tensor:
    scores = torch.tanh(logits(model).float() / 30.0) * 30.0
    return functional.cross_entropy(scores.flatten(0, 1), ids().flatten())


def without_some_tokens(model: nn.Module) -> Tensor:
    scores = logits(model)
    scores[:, :, [3, 4]] = torch.finfo(scores.dtype).min
    scores /= 2
    return functional.cross_entropy(scores.view(-1, VOCAB), ids().flatten().clamp_min(5))


def with_z_loss(model: nn.Module) -> Tensor:
    output = model(input_ids=ids(), labels=labels())
    return output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()


LOSSES: dict[str, tuple[Loss, bool]] = {
    "label smoother": (label_smoother, False),
    "smoothing": (lambda model: by_hand(model, label_smoothing=0.1), False),
    "weights": (lambda model: by_hand(model, weight=torch.linspace(0.1, 2, VOCAB), ignore_index=5), False),
    "weights, smoothing": (
        lambda model: by_hand(model, weight=torch.linspace(0.1, 2, VOCAB), label_smoothing=0.2),
        False,
    ),
    "sum": (lambda model: by_hand(model, reduction="sum"), False),
    "none": (without_reduction, False),
    "module": (lambda model: nn.CrossEntropyLoss()(shifted(model).flatten(0, 1), targets().flatten()), False),
    "nll": (
        lambda model: functional.nll_loss(shifted(model).log_softmax(-1).flatten(0, 1), targets().flatten()),
        False,
    ),
    "mask": (labelled_only, False),
    "capping": (capped, False),
    "writes": (without_some_tokens, False),
    "z loss": (with_z_loss, False),
    "columns": (
        lambda model: functional.cross_entropy(shifted(model)[..., :90].flatten(0, 1), targets().flatten() % 90),
        False,
    ),
    "one column": (lambda model: shifted(model)[..., 7].square().mean(), False),
    "largest": (lambda model: shifted(model).max(dim=-1).values.sum() + shifted(model).topk(3).values.sum(), False),
    "classes first": (lambda model: functional.cross_entropy(shifted(model).transpose(1, 2), targets()), False),
    "classes first, none": (
        lambda model: functional.cross_entropy(shifted(model).permute(0, 2, 1).float(), targets(), reduction="none")[
            1, 3
        ],
        False,
    ),
    "classes first, else": (lambda model: shifted(model).mT.softmax(1)[:, 3].sum(), True),
    "transposed": (lambda model: shifted(model).transpose(1, 2).square().mean(), True),
    "probabilities": (
        lambda model: functional.cross_entropy(shifted(model).flatten(0, 1), torch.full((46, VOCAB), 1 / VOCAB)),
        True,
    ),
    "picks": (lambda model: -shifted(model).log_softmax(-1)[0][torch.arange(23), targets()[0]].mean(), True),
    "divergence": (
        lambda model: functional.kl_div(shifted(model).log_softmax(-1), torch.full((2, 23, VOCAB), 1 / VOCAB)),
        True,
    ),
}


@core
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_logits_are_exact(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss_of, needs_all = LOSSES[name]
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        check_same(llama(), loss_of)
    assert len(caplog.records) == needs_all


@core
def test_whole_logits_are_those_of_the_model_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    expected = logits(model)
    with chunked(model), caplog.at_level(logging.WARNING, "hf_ckpt"):
        put_off = logits(model)
        assert torch.equal(put_off.sin(), expected.sin())
        assert torch.equal(logits(model).cos(), expected.cos())
    assert [record.getMessage() for record in caplog.records] == [
        "head: chunked keeps logits from being held, but sin asks for all of them ((2, 24, 97) in float32, 0.00 GiB), "
        "and gets them. Compute it with torch.nn.functional.cross_entropy or from a few rows at a time, or leave head: "
        "chunked out."
    ]


@core
def test_few_rows_of_the_logits_are_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    expected = logits(model)
    with chunked(model), caplog.at_level(logging.WARNING, "hf_ckpt"):
        put_off = logits(model)
        # A product with fewer rows adds up in another order.
        torch.testing.assert_close(put_off[0, 3], expected[0, 3], rtol=BOUND, atol=BOUND)
        torch.testing.assert_close(put_off[:, -1, :].sin(), expected[:, -1].sin(), rtol=BOUND, atol=BOUND)
        assert torch.equal(put_off.detach().argmax(-1), expected.argmax(-1))
    assert caplog.records == []


@core
def test_logits_look_like_logits() -> None:
    model = llama(torch.bfloat16)
    with chunked(model):
        found = logits(model)
        assert (found.shape, found.size(-1), len(found), found.dim(), found.numel()) == (
            (2, 24, VOCAB),
            VOCAB,
            2,
            3,
            4656,
        )
        assert (found.dtype, found.device.type, found.is_floating_point()) == (torch.bfloat16, "cpu", True)
        assert found.is_contiguous()
        assert found.requires_grad
        assert found.grad_fn is not None
        assert found.float().dtype == torch.float32
        assert not found.detach().requires_grad
        assert repr(found) == "DeferredLogits(shape=(2, 24, 97), dtype=torch.bfloat16, device=cpu)"


@core
def test_detached_logits_pass_no_gradient() -> None:
    model = llama()
    with chunked(model):
        found = logits(model)
        assert not functional.cross_entropy(found.detach()[0], ids()[0]).requires_grad
        with torch.no_grad():
            inside = found.clone()
        assert not functional.cross_entropy(inside[0], ids()[0]).requires_grad


# --- The logits are never held. ---


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.elements = max(self.elements, output.numel())
        return output


@core
def test_no_tensor_of_the_size_of_the_logits_is_made() -> None:
    model = llama(vocab_size=997)
    with _Largest() as plain:
        step(model)
    with chunked(model), _Largest() as largest:
        step(model)
    assert plain.elements == BATCH * LENGTH * 997
    # The head's own weight and its gradient.
    assert largest.elements == 997 * 32


def test_simulated_step_holds_no_logits() -> None:
    config = LlamaConfig(hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=32000)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    size = 4 * 8192 * 32000
    shape, device = Step(seq_length=8192, optim=None), find_device("cpu")
    plain = simulate_step(model, "full", shape, device)
    less = simulate_step(model, parse("full", head="chunked"), shape, device)
    assert max(plain.timeline.bytes_by_category[Category.LOSS]) >= 3 * size
    assert max(less.timeline.bytes_by_category[Category.LOSS]) <= size
    # One more product with the weight of the head, and nothing else.
    assert sum(less.num_flops.values()) - sum(plain.num_flops.values()) == 2 * 8192 * 32000 * 256
    assert less.num_flops[Phase.BACKWARD] == plain.num_flops[Phase.BACKWARD]


@core
@pytest.mark.parametrize(
    ("rows", "columns", "hidden_bytes", "chunks", "longest"),
    [
        (24, 97, 3072, 8, 3),
        (5, 97, 640, 5, 1),
        (0, 97, 0, 1, 0),
        (4096, 32000, 2**25, 8, 512),
        (8192, 128256, 2**26, 16, 512),
        # A quarter of the bytes of 685,000 hidden states, which are 5.2 GiB.
        (685_000, 128_256, 685_000 * 8192, 126, 5437),
    ],
)
def test_chunks_are_small_and_few(rows: int, columns: int, hidden_bytes: int, chunks: int, longest: int) -> None:
    lengths = Chunking().lengths(rows, columns, hidden_bytes)
    assert (len(lengths), max(lengths), sum(lengths)) == (chunks, longest, rows)


@core
def test_gradient_of_a_tensor_used_in_parts_is_made_in_one_buffer() -> None:
    tensor = torch.randn(6, 3, requires_grad=True)
    rows = InParts.by_rows(tensor * 1, [4, 2])
    (rows(0).sum() * 2 + rows(1).sum() * 3).backward()
    assert torch.equal(tensor.grad, torch.tensor([[2.0] * 3] * 4 + [[3.0] * 3] * 2))
    tensor.grad = None
    again = InParts.repeated(tensor)
    (again(0).sum() + again(1).square().sum()).backward()
    assert torch.equal(tensor.grad, 1 + 2 * tensor)


@core
def test_step_costs_one_more_product_with_the_heads_weight() -> None:
    model = llama()
    with FlopCounterMode(display=False) as plain:
        step(model)
    product = 2 * BATCH * LENGTH * VOCAB * 32
    with chunked(model):
        with FlopCounterMode(display=False) as first:
            step(model)
        with FlopCounterMode(display=False) as later:
            step(model)
    assert later.get_total_flops() - plain.get_total_flops() == product
    # Its proof: the loss of the plain head, and the gradients of one chunk of eight.
    assert first.get_total_flops() - later.get_total_flops() == product + 3 * product // 8


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
def test_compiled_model_is_refused_and_compiled_layers_are_not() -> None:
    model = llama(num_hidden_layers=1)
    expected = step(model)
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
    with pytest.raises(UnsupportedError, match="lm_head is _Mixing, of which it is not known"):
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
