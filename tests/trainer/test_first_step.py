"""The check of the first step: faults planted in a model are named, and what is no fault is not."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import HFCkptCallback, PlanMismatchError, find_layers
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.patch import apply as patch
from hf_ckpt.policy.policy import Mode
from hf_ckpt.regions import execution_state
from hf_ckpt.trainer.first_step import FirstStep
from tests import exactness, plain_models, traces, zoo
from tests.exactness import POLICIES, every_core_model
from tests.planted import in_place_of_checkpoint, not_checkpointed
from tests.training import During, arguments, callback, changed, llama, lora, losses, rows, trainer, weights

pytestmark = pytest.mark.core


def backward(model: nn.Module, **inputs: Tensor) -> None:
    """One forward and backward of a training step."""
    zoo.loss(model, inputs or batch()).backward()


def batch() -> dict[str, Tensor]:
    texts = rows(2)
    return {name: torch.stack([text[name] for text in texts]) for name in texts[0]}


def faults(
    model: nn.Module, policy: object, step: Callable[[nn.Module], object] = backward, **options: Any
) -> list[str]:
    """Apply a policy, run a step of a model in train mode under watch, and return what is found."""
    model.train()
    model.zero_grad(set_to_none=True)
    # Not `hf_ckpt.apply`, which watches by itself.
    with patch.apply(model, policy, **options) as applied:
        watch = FirstStep(model, applied.plan, find_layers(model))
        watch.start()
        step(model)
        found = watch.finish()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found


# --- Planted faults. ---

SWITCHED_OFF = (
    "Its checkpoint function was replaced after the policy was applied: apply the policy after that call. Or it "
    "computes in a thread, or under saved_tensors_hooks, of its own, where nothing is recomputed: leave it out of the "
    "policy."
)
SWITCHED_ON = "Another library's activation checkpointing is on too. Turn it off."


def test_recomputation_that_does_not_happen_is_named_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def lost_in_the_middle(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls.append(function)
        return function(*args) if len(calls) in (2, 3) else checkpoint(function, *args, **options)

    in_place_of_checkpoint(monkeypatch, lost_in_the_middle)
    assert faults(llama(), "full") == [
        'Layers 1, 2 of model.layers are set to "full", but a forward ran once in step 1 (twice expected). '
        + SWITCHED_OFF
    ]


@pytest.mark.parametrize("part", ["attention", "ffn"])
def test_part_that_is_not_recomputed_is_named(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    in_place_of_checkpoint(monkeypatch, not_checkpointed)
    assert faults(llama(), {"mode": part, "layers": -1}) == [
        f'Layer 3 of model.layers is set to "{part}", but the forward of {part} ran once in step 1 (twice expected). '
        + SWITCHED_OFF
    ]


def test_segment_that_is_not_recomputed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_ckpt.regions.segments.saved_tensors_hooks", lambda *hooks: contextlib.nullcontext())
    (fault,) = faults(llama(), "full", segment_size=2)
    assert fault.startswith('Layers 0, 1, 2, 3 of model.layers are set to "full", but a forward ran once')


def checkpointed(found: Callable[..., Any], use_reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    """Instance forward of another library."""
    return checkpoint(partial(found, **kwargs), *args, use_reentrant=use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_another_library_on_a_layer_of_none_is_named(use_reentrant: bool) -> None:
    # Such a checkpointing would fill a cache twice.
    model = llama(use_cache=False)
    layer = model.model.layers[3]
    layer.forward = partial(checkpointed, layer.forward, use_reentrant)
    assert faults(model, "full", every_n_layers=2) == [
        f'Layer 3 of model.layers is set to "none", but a forward ran again in the backward of step 1. {SWITCHED_ON}'
    ]


def test_checkpointing_of_another_library_on_the_other_part_is_named() -> None:
    model = llama(use_cache=False)
    for layer in model.model.layers[:2]:
        layer.mlp.forward = partial(checkpointed, layer.mlp.forward, False)
    assert faults(model, "attention") == [
        'Layers 0, 1 of model.layers are set to "attention", but the forward of ffn ran again in the backward of '
        f"step 1. {SWITCHED_ON}"
    ]


def plant(model: nn.Module) -> None:
    layer = model.model.layers[1]
    layer.forward = partial(checkpointed, layer.forward, False)


def test_fault_stops_the_run_and_leaves_the_model_clean(tmp_path: Path) -> None:
    model = llama()
    run = trainer(model, tmp_path, During("on_step_begin", plant, step=0), HFCkptCallback("none"))
    with pytest.raises(PlanMismatchError, match=r'^Layer 1 of .* Turn it off\.\nWith on_mismatch="warn" the run goes'):
        run.train()
    assert run.state.global_step == 0
    assert not hf_ckpt.remove(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config.use_cache is True


def test_fault_warns_once_and_the_run_goes_on_when_asked_to(tmp_path: Path) -> None:
    model = llama()
    warned = HFCkptCallback("none", on_mismatch="warn")
    run = trainer(model, tmp_path, During("on_step_begin", plant, step=0), warned)
    with pytest.warns(UserWarning, match='Layer 1 of model.layers is set to "none", but') as caught:
        run.train()
    assert len(caught) == 1
    assert len(losses(run)) == 2


class CountingBlock(plain_models.Block):
    """Counts its forwards in a buffer, as balanced routers count their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_forwards", torch.zeros(()))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        self.num_forwards += 1
        return super().forward(hidden, mask)


@pytest.mark.parametrize("policy", ["full", "attention", "none"])
def test_buffer_that_a_forward_writes_to_is_no_fault(policy: str) -> None:
    case = plain_models.case(plain_models.Decoder([plain_models.Block(), CountingBlock()]))
    stacks = find_layers(case.model)
    with patch.apply(case.model, policy) as applied:
        watch = FirstStep(case.model, applied.plan, stacks)
        watch.start()
        zoo.loss(case.model, case.inputs).backward()
        assert watch.finish() == []
    assert int(case.model.blocks[1].num_forwards) == 1


# --- Parameters without a gradient are the model's own affair, and are said. ---

QUESTION = "If they are to train, is an adapter disabled, or something detached?"


def said(model: nn.Module, policy: object, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """Return what a step without faults says of its parameters."""
    with caplog.at_level(logging.INFO, logger="hf_ckpt.trainer.first_step"):
        assert faults(model, policy, **options) == []
    return [record.getMessage() for record in caplog.records if record.name == "hf_ckpt.trainer.first_step"]


@pytest.mark.parametrize("policy", ["none", "full"])
def test_disabled_adapter_is_said(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model = lora(target_modules=["q_proj", "v_proj"])
    model.base_model.model.model.layers[2].self_attn.q_proj._disable_adapters = True
    assert said(model, policy, caplog) == [
        "2 trainable parameters got no gradient in step 1: "
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.default.weight, "
        f"base_model.model.model.layers.2.self_attn.q_proj.lora_B.default.weight. {QUESTION}"
    ]


def without_weight(module: nn.Linear, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, module.weight.detach())


def test_detached_parameters_are_said(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "o_proj")):
            module.forward = partial(without_weight, module)
    assert said(model, "full", caplog) == [
        "8 trainable parameters got no gradient in step 1: "
        "model.layers.0.self_attn.o_proj.weight, model.layers.0.self_attn.q_proj.weight, "
        f"model.layers.1.self_attn.o_proj.weight, model.layers.1.self_attn.q_proj.weight .... {QUESTION}"
    ]


def test_detached_parameter_of_the_first_module_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    embedding = model.model.embed_tokens
    embedding.forward = lambda tokens: nn.functional.embedding(tokens, embedding.weight.detach())
    assert said(model, "full", caplog) == [
        f"1 trainable parameter got no gradient in step 1: model.embed_tokens.weight. {QUESTION}"
    ]


class Biased(plain_models.Mlp):
    """Its bias chooses, and is not computed with, as that of a router without an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(plain_models.WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = (hidden + self.bias).argmax(-1, keepdim=True)
        return super().forward(hidden) * hidden.gather(-1, chosen)


@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn"])
def test_bias_that_only_chooses_is_said(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model = plain_models.Decoder()
    model.blocks[1].mlp = Biased()
    case = plain_models.case(model)
    step = partial(backward, **case.inputs)
    assert said(case.model, policy, caplog, step=step) == [
        f"1 trainable parameter got no gradient in step 1: blocks.1.mlp.bias. {QUESTION}"
    ]


def test_step_without_any_gradient_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def grad(model: nn.Module) -> None:
        torch.autograd.grad(zoo.loss(model, batch()), list(model.parameters()))

    assert said(llama(), "full", caplog, step=grad) == []


def freeze(model: nn.Module, *, is_frozen: bool = True) -> None:
    for part in (model.model.embed_tokens, *model.model.layers[:3]):
        part.requires_grad_(not is_frozen)


def freeze_none_but_one(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)


@pytest.mark.parametrize("change", [freeze, partial(freeze, is_frozen=False), freeze_none_but_one])
@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn", "segments_2"])
def test_callback_that_freezes_after_ours_is_no_fault(
    policy: str, change: Callable[[nn.Module], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(*callbacks: HFCkptCallback) -> dict[str, Tensor]:
        model = llama()
        freeze(model, is_frozen=isinstance(change, partial))
        trainer(model, tmp_path, *callbacks, During("on_step_begin", change)).train()
        return weights(model)

    expected = train()
    with caplog.at_level(logging.INFO, logger="hf_ckpt.trainer.first_step"):
        assert changed(expected, train(callback(policy))) == []
    assert [record.getMessage() for record in caplog.records if "gradient" in record.getMessage()] == []


# --- A forward that the user runs in a backward is no recomputation. ---


@torch.no_grad()
def embed(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return model.model(input_ids=part["input_ids"]).last_hidden_state[:, -1]


def again(model: nn.Module, part: dict[str, Tensor], gradient: Tensor) -> None:
    with torch.enable_grad():
        found = model.model(input_ids=part["input_ids"]).last_hidden_state[:, -1]
        (found * gradient).sum().backward()


def parts_of_batch() -> list[dict[str, Tensor]]:
    return [{name: tensor[row : row + 1] for name, tensor in batch().items()} for row in range(2)]


def cached_gradients(model: nn.Module) -> tuple[list[dict[str, Tensor]], Tensor, list[Tensor]]:
    """Run the parts of a batch without a graph; return them, the loss and the gradients of what they gave."""
    parts = parts_of_batch()
    found = [embed(model, part).requires_grad_() for part in parts]
    whole = torch.cat(found)
    loss = (whole @ whole.T).logsumexp(-1).sum()
    loss.backward()
    return parts, loss.detach().requires_grad_(), [each.grad for each in found]


def in_a_tensor_hook(model: nn.Module) -> None:
    parts, loss, gradients = cached_gradients(model)

    def hook(_: Tensor) -> None:
        for part, gradient in zip(parts, gradients, strict=True):
            again(model, part, gradient)

    loss.register_hook(hook)
    (2 * loss).backward()


def in_a_backward_hook_of_a_module(model: nn.Module) -> None:
    parts, _, gradients = cached_gradients(model)
    scale = nn.Linear(1, 1, bias=False)

    def hook(module: nn.Module, *_: object) -> None:
        for part, gradient in zip(parts, gradients, strict=True):
            again(model, part, gradient)

    scale.register_full_backward_hook(hook)
    scale(torch.ones(1, 1, requires_grad=True)).sum().backward()


class Again(torch.autograd.Function):
    """Runs the model in forward without a graph, and in backward with one."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        ctx.given = model, part
        return embed(model, part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        again(*ctx.given, gradient)
        return None, None, None


def in_an_autograd_function(model: nn.Module) -> None:
    token = torch.zeros((), requires_grad=True)
    whole = torch.cat([Again.apply(token, model, part) for part in parts_of_batch()])
    (whole @ whole.T).logsumexp(-1).sum().backward()


def in_the_middle_of_its_own_backward(model: nn.Module) -> None:
    """Another forward and backward of the model while one of its layers waits for its own."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if not kept:
            kept.append(output)
            output.register_hook(lambda gradient: again(model, parts_of_batch()[0], gradient[:1, -1]))

    hook = model.model.layers[1].register_forward_hook(keep)
    try:
        backward(model)
    finally:
        hook.remove()
    assert kept


def with_grad_in_a_hook(model: nn.Module) -> None:
    """A penalty on gradients that are asked for in a hook."""

    def hook(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = zoo.loss(model, parts_of_batch()[0])
            found = torch.autograd.grad(loss, model.model.embed_tokens.weight)
        return gradient * (1 + found[0].norm())

    loss = zoo.loss(model, parts_of_batch()[1])
    loss.register_hook(hook)
    loss.backward()


def with_a_reference_in_a_hook(model: nn.Module) -> None:
    """A forward without gradients in a hook, and generation before the step."""
    prompt = parts_of_batch()[0]["input_ids"][:, :3]
    model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
    loss = zoo.loss(model, batch())
    loss.register_hook(lambda gradient: gradient * (1 + embed(model, parts_of_batch()[0]).norm()))
    loss.backward()


def with_a_second_model_in_a_hook(model: nn.Module) -> None:
    other = llama(num_hidden_layers=2).train()
    with hf_ckpt.apply(other, "attention"):
        loss = zoo.loss(model, batch())
        loss.register_hook(lambda _: again(other, parts_of_batch()[0], torch.ones(1)))
        loss.backward()


FLOWS = [
    in_a_tensor_hook,
    in_a_backward_hook_of_a_module,
    in_an_autograd_function,
    in_the_middle_of_its_own_backward,
    with_grad_in_a_hook,
    with_a_reference_in_a_hook,
    with_a_second_model_in_a_hook,
]
KINDS: dict[str, tuple[object, dict[str, object]]] = {
    **{name: POLICIES[name] for name in ("none", "full", "attention", "ffn", "segments_2", "nested")},
    "selective": ("selective", {}),
    "tiles": ("none", {"tiles": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.sweep(keep=6)
def test_forward_of_the_user_in_a_backward_is_no_fault(flow: Callable[[nn.Module], None], kind: str) -> None:
    # Without dropout: how often the user's own forwards draw is no matter here.
    policy, options = KINDS[kind]
    model = llama(attention_dropout=0.0, use_cache=False).train()
    flow(model)
    expected = exactness.gradients(model)
    assert faults(model, policy, flow, **options) == []
    if kind != "tiles":
        assert exactness.differences((torch.ones(()), expected), (torch.ones(()), exactness.gradients(model))) == []
    # And under `hf_ckpt.apply`, which watches until a backward through a region has ended.
    model.zero_grad()
    with hf_ckpt.apply(model, policy, **options):
        flow(model)
        assert hooked(model) == []


@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn", "selective"])
def test_forward_in_a_hook_of_a_trainers_loss_is_no_fault(policy: str, tmp_path: Path) -> None:
    class Cached(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **_: Any) -> Tensor:
            parts, loss, gradients = cached_gradients(model)
            loss.register_hook(lambda _: [again(model, *each) for each in zip(parts, gradients, strict=True)] and None)
            return loss

    def train(*callbacks: HFCkptCallback) -> dict[str, Tensor]:
        model = llama()
        args = TrainingArguments(**arguments(tmp_path))
        Cached(model, args, train_dataset=rows(), callbacks=list(callbacks)).train()
        return weights(model)

    assert changed(train(), train(HFCkptCallback(policy))) == []


@pytest.mark.parametrize("prove", ["first_step", 2])
def test_forward_in_a_hook_is_proven(prove: Any) -> None:
    model = llama()
    model.model.layers[1].mlp.act_fn.register_forward_hook(
        lambda module, args, output: output * (1.5 if execution_state.is_recomputed() else 1)
    )
    with hf_ckpt.apply(model, "full", prove=prove), pytest.raises(PlanMismatchError, match="returns something else"):
        in_a_tensor_hook(model)


# --- In a loop of one's own. ---


def hooked(model: nn.Module) -> list[str]:
    """Name the modules inside of layers that are watched."""
    inside = ((name, module) for name, module in model.named_modules() if ".layers." in name)
    return [
        name
        for name, module in inside
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), FirstStep)
    ]


@pytest.mark.parametrize("policy", ["full", "attention", "ffn", "segments_2"])
def test_apply_names_a_plan_without_effect_and_leaves_no_hook(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_place_of_checkpoint(monkeypatch, not_checkpointed)
    monkeypatch.setattr("hf_ckpt.regions.segments.saved_tensors_hooks", lambda *hooks: contextlib.nullcontext())
    model = llama().train()
    mode, options = POLICIES[policy]
    found = traces.snapshot(model)
    with hf_ckpt.apply(model, mode, **options):
        loss = zoo.loss(model, batch())
        with pytest.raises(PlanMismatchError, match=rf"^Layers 0, 1, 2, 3 of model.layers .* {SWITCHED_OFF}$"):
            loss.backward()
        assert hooked(model) == []
        # Said once: who goes on knows.
        backward(model)
    model.zero_grad()
    assert traces.differences(found, traces.snapshot(model)) == []


def test_apply_looks_at_one_backward_that_comes_to_a_region() -> None:
    model = llama().train()
    with hf_ckpt.apply(model, "full"):
        assert hooked(model) == []
        with torch.no_grad():
            zoo.loss(model, batch())
        assert hooked(model) == []
        loss = zoo.loss(model, batch())
        assert hooked(model)
        # This one comes to no region.
        torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)
        assert hooked(model)
        loss.backward()
        assert hooked(model) == []
        backward(model)


def test_gradient_of_what_a_layer_returns_is_no_backward_of_the_layer() -> None:
    model = llama().train()
    with hf_ckpt.apply(model, "full"):
        hidden = model.model(input_ids=batch()["input_ids"], output_hidden_states=True).hidden_states
        torch.autograd.grad(hidden[-1].sum(), hidden[2])
        assert hooked(model) == []


def last_bias(model: nn.Module) -> None:
    model.requires_grad_(False)
    linear = model.model.layers[2].mlp.down_proj
    linear.bias = nn.Parameter(torch.zeros(linear.out_features))


def all_biases(model: nn.Module) -> None:
    model.requires_grad_(False)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.bias = nn.Parameter(torch.zeros(module.out_features))


def last_norm(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)


@pytest.mark.parametrize("train_only", [last_bias, all_biases, last_norm])
@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn", "segments_2", "nested"])
def test_backward_that_needs_no_recomputation_is_no_fault(policy: str, train_only: Callable[[nn.Module], None]) -> None:
    model = llama()
    train_only(model)
    mode, options = POLICIES[policy]
    assert faults(model, mode, **options) == []
    with hf_ckpt.apply(model, mode, **options):
        backward(model)


def test_apply_forgets_a_backward_that_fails() -> None:
    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError

    model = llama().train()
    with hf_ckpt.apply(model, "full"):
        # It comes to the last layer, and ends before that is recomputed.
        hidden = model.model(input_ids=batch()["input_ids"]).last_hidden_state
        hook = model.model.layers[3].mlp.down_proj.register_full_backward_hook(lambda *_: fail(hidden))
        with pytest.raises(ArithmeticError):
            backward(model)
        hook.remove()
        backward(model)
        assert hooked(model) == []


def test_removal_before_the_first_step_leaves_no_trace() -> None:
    for begin in (lambda model: None, lambda model: zoo.loss(model, batch())):
        model = llama().train()
        found = traces.snapshot(model)
        applied = hf_ckpt.apply(model, "full")
        begin(model)
        applied.remove()
        assert traces.differences(found, traces.snapshot(model)) == []
        hf_ckpt.apply(model, "full")
        begin(model)
        assert hf_ckpt.remove(model)
        assert traces.differences(found, traces.snapshot(model)) == []


def test_copy_made_in_the_first_step_is_watched_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().train()
    with hf_ckpt.apply(model, "full"):
        loss = zoo.loss(model, batch())
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        loss.backward()
        for each in copies:
            backward(each)
            assert hooked(each) == []
            assert hf_ckpt.remove(each)


def test_apply_warns_of_other_checkpointing() -> None:
    model = llama(use_cache=False).train()
    layer = model.model.layers[3]
    layer.mlp.forward = partial(checkpointed, layer.mlp.forward, False)
    for policy, what in {
        "attention": "the forward of ffn ran again in the backward of step 1",
        "full": "a forward ran again in the backward of step 1 for somebody else too",
    }.items():
        with hf_ckpt.apply(model, policy), pytest.warns(UserWarning, match=re.escape(what)) as caught:
            backward(model)
        assert [str(each.message) for each in caught] == [
            f'Layer 3 of model.layers is set to "{policy}", but {what}. {SWITCHED_ON}'
        ]


class Stack(nn.Module):
    """Calls a model under torch's own checkpointing."""

    def __init__(self, model: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, **inputs: Tensor) -> Any:
        embedded = self.model.get_input_embeddings()(inputs["input_ids"])
        run = partial(self.model, labels=inputs["labels"])
        return checkpoint(lambda hidden: run(inputs_embeds=hidden)["loss"], embedded, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(("policy", "is_fault"), [("none", True), ("attention", True), ("full", False)])
def test_other_checkpointing_around_the_model_is_named(policy: str, is_fault: bool, use_reentrant: bool) -> None:
    model = Stack(llama(use_cache=False), use_reentrant)

    def step(model: nn.Module) -> None:
        model(**batch()).backward()

    if is_fault:
        (fault,) = faults(model, policy, step)
        assert fault.startswith("Layers 0, 1, 2, 3 of model.model.layers are set to")
        assert fault.endswith(SWITCHED_ON)
    else:
        with pytest.warns(UserWarning, match="for somebody else too"):
            assert faults(model, policy, step) == []


RESTS = (
    "model.layers runs in eval mode with gradients on, where the plan rests: nothing is recomputed, and activations "
    "are kept as without it. If a backward follows, call train() on the model, with the p of its dropouts at 0 if they "
    "are to be off; if none follows, use torch.no_grad()."
)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        *(("full", {}), ("attention", {}), ("selective", {}), ("full", {"segment_size": 2}), ("none", {"tiles": 2})),
        ("none", {"head": "chunked"}),
    ],
)
def test_plan_that_rests_in_eval_mode_is_said(
    policy: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = llama().eval()
    with hf_ckpt.apply(model, policy, **options):
        with torch.no_grad():
            zoo.loss(model, batch())
        assert caplog.messages == []
        for _ in range(2):
            backward(model)
        assert hooked(model) == []
    assert caplog.messages == [RESTS]


def test_plan_that_rests_from_a_later_step_on_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = llama().train()
    with hf_ckpt.apply(model, "full"):
        backward(model)
        model.eval()
        torch.autograd.grad(zoo.loss(model, batch()), model.lm_head.weight)
    assert caplog.messages == [RESTS]


def test_layers_that_rest_in_a_model_that_trains_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = llama().train()
    for layer in model.model.layers[:2]:
        layer.eval()
    with hf_ckpt.apply(model, "attention"):
        backward(model)
    assert caplog.messages == [
        'Layers 0, 1 of model.layers are set to "attention", but the forward of attention ran in eval mode in step 1, '
        "in which a plan rests: it was not recomputed. Call train()."
    ]


@pytest.mark.parametrize("policy", ["none", "full", "auto"])
def test_trainer_whose_loss_is_taken_in_eval_mode_is_told_once(
    policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Eval(Trainer):
        def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model.eval(), *args, **kwargs)

    used = HFCkptCallback(policy, memory_budget="1GiB" if policy == "auto" else None)
    run = Eval(llama(), TrainingArguments(**arguments(tmp_path)), train_dataset=rows(), callbacks=[used])
    with (
        pytest.raises(UnsupportedError, match="or it was in eval mode")
        if policy == "auto"
        else contextlib.nullcontext()
    ):
        run.train()
    assert caplog.messages.count(RESTS) == (policy == "full")


# --- No false alarm. ---


@every_core_model
@pytest.mark.sweep(keep=1)
def test_no_policy_gives_a_fault(model_type: str) -> None:
    torch.manual_seed(0)
    case = _build(model_type)
    for name, (policy, options) in POLICIES.items():
        assert faults(case.model, policy, lambda model: backward(model, **case.inputs), **options) == [], name


@pytest.mark.parametrize("policy", ["full", "attention"])
@every_core_model
def test_every_layer_is_named_when_none_is_recomputed(
    model_type: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = _build(model_type)
    in_place_of_checkpoint(monkeypatch, not_checkpointed)
    found = faults(case.model, policy, lambda model: backward(model, **case.inputs))
    named = [len(re.match(r"Layers? ([\d, ]+) of", fault).group(1).split(", ")) for fault in found]
    with hf_ckpt.apply(case.model, policy) as applied:
        assert sum(named) == applied.plan.count(Mode(policy))


def _build(model_type: str) -> zoo.Case:
    try:
        return zoo.build(model_type)
    except zoo.CannotBuild as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("targets", [["q_proj"], ["down_proj"], ["o_proj", "gate_proj"]])
@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn", "nested"])
def test_part_without_a_gradient_is_no_fault(policy: str, targets: list[str]) -> None:
    mode, options = POLICIES[policy]
    assert faults(lora(target_modules=targets), mode, **options) == []


@pytest.mark.parametrize("policy", ["full", "attention", "ffn"])
def test_frozen_lower_layers_are_no_fault(policy: str) -> None:
    model = llama()
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    assert faults(model, policy) == []


def test_two_forwards_of_one_step_and_one_without_gradients_are_no_fault() -> None:
    def preferences(model: nn.Module) -> None:
        with torch.no_grad():
            reference = zoo.loss(model, batch())
        (zoo.loss(model, batch()) - zoo.loss(model, batch()) + reference).backward()

    assert faults(llama(), "full", preferences) == []
    assert faults(lora(), "attention", preferences) == []


def test_gradient_accumulation_is_no_fault() -> None:
    def accumulate(model: nn.Module) -> None:
        for _ in range(3):
            backward(model)

    assert faults(llama(), "full", accumulate, segment_size=2) == []


def test_parameters_that_the_loss_does_not_need_are_no_fault() -> None:
    def step(model: nn.Module) -> None:
        model.side(model.model(batch()["input_ids"]).last_hidden_state)
        backward(model)

    model = llama()
    model.side = nn.Linear(16, 2)
    model.model.layers[0].mlp.never_called = nn.Linear(2, 2)
    assert faults(model, "full", step) == []
    assert model.side.weight.grad is None


class Mixture(nn.Module):
    """A mixture of experts whose router never chooses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(plain_models.WIDTH, 3)
        self.experts = nn.ModuleList(plain_models.Mlp() for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        shares = torch.softmax(self.router(hidden), dim=-1)
        return sum(expert(hidden) * shares[..., idx : idx + 1] for idx, expert in enumerate(self.experts[:3]))


@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn"])
def test_idle_expert_is_no_fault(policy: str) -> None:
    model = plain_models.Decoder()
    for block in model.blocks:
        block.mlp = Mixture()
    case = plain_models.case(model)
    assert faults(model, policy, lambda model: backward(model, **case.inputs)) == []
    assert model.blocks[0].mlp.experts[3].up.weight.grad is None


@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn"])
def test_text_alone_for_a_vision_language_model_is_no_fault(policy: str) -> None:
    torch.manual_seed(0)
    model = zoo.build("qwen2_vl").model
    tokens = torch.randint(zoo.FIRST_TOKEN, zoo.LAST_TOKEN, (2, 8))
    assert faults(model, policy, lambda model: backward(model, input_ids=tokens, labels=tokens)) == []
    assert all(parameter.grad is None for parameter in model.model.visual.parameters())


def test_layers_dropped_by_layerdrop_are_no_fault() -> None:
    torch.manual_seed(0)
    case = zoo.build("opt", num_layers=8)
    case.model.model.decoder.layerdrop = 0.5
    for policy in ("none", "full", "attention", "ffn"):
        assert faults(case.model, policy, lambda model: backward(model, **case.inputs)) == []
        ran = [any(p.grad is not None for p in layer.parameters()) for layer in case.model.model.decoder.layers]
        assert set(ran) == {True, False}


def test_layer_that_recomputes_by_itself_is_no_fault() -> None:
    torch.manual_seed(0)
    case = _build("reformer")
    assert faults(case.model, "none", lambda model: backward(model, **case.inputs)) == []


def test_step_that_an_fp16_scaler_skips_is_no_fault(tmp_path: Path) -> None:
    model = llama()
    before = model.lm_head.weight.detach().clone()
    run = trainer(model, tmp_path, HFCkptCallback("full"), max_steps=1, max_grad_norm=0.0)
    # accelerate makes a scaler on a GPU only. The gradients of the first step overflow float32.
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    run.train()
    assert run.accelerator.scaler.get_scale() < 3e38
    assert torch.equal(model.lm_head.weight, before)


def test_engine_that_takes_the_gradients_away_is_no_fault() -> None:
    def step(model: nn.Module) -> None:
        backward(model)
        model.zero_grad(set_to_none=True)

    assert faults(llama(), "full", step) == []


def test_only_the_first_step_is_watched(tmp_path: Path) -> None:
    hooks: list[int] = []

    def count(model: nn.Module) -> None:
        hooks.append(sum(len(module._forward_pre_hooks) for module in model.model.layers.modules()))

    trainer(llama(), tmp_path, HFCkptCallback("full"), During("on_optimizer_step", count)).train()
    assert hooks == [0, 0]
