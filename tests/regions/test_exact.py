"""Loss and every gradient of a step stay the same to the bit, whatever the policy and however the step is taken."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache

import pytest
import torch
from torch import Tensor

from hf_ckpt.errors import RecomputationError
from tests import exactness, live_storages, plain_models, zoo
from tests.exactness import POLICIES, Result, every_core_model, every_policy, every_recomputing_policy

pytestmark = pytest.mark.core


# --- Every architecture. ---


@cache
def cases(model_type: str, attn_implementation: str) -> tuple[zoo.Case, Result]:
    case = exactness.build(model_type, attn_implementation=attn_implementation)
    return case, exactness.step(case)


@pytest.mark.parametrize(
    ("attn_implementation", "policy"),
    # On eager attention, a whole layer, each of its parts and a segment stand for all.
    [
        *(("sdpa", policy) for policy in POLICIES),
        *(("eager", policy) for policy in ("full", "attention", "ffn", "nested")),
    ],
)
@every_core_model
@pytest.mark.sweep(keep=12)
def test_loss_and_gradients_are_bitwise_equal(model_type: str, attn_implementation: str, policy: str) -> None:
    case, expected = cases(model_type, attn_implementation)
    with exactness.apply(case.model, policy), exactness.counted_entries(case.model) as (_, backward):
        got = exactness.step(case)
    assert exactness.differences(expected, got) == []
    # Or nothing was put to the test.
    assert bool(backward) == (policy != "none")


@every_core_model
def test_dropout_is_on_in_the_models_above(model_type: str) -> None:
    case, (loss, _) = cases(model_type, "eager")
    assert not torch.equal(exactness.step(case, seed=1)[0], loss)


@every_core_model
def test_every_parameter_of_the_models_above_gets_a_gradient(model_type: str) -> None:
    _, (_, gradients) = cases(model_type, "eager")
    without = [name for name, gradient in gradients.items() if gradient is None or not gradient.any()]
    assert without == []


# --- LoRA. ---


def with_lora(**options: object) -> zoo.Case:
    return exactness.lora(exactness.build("llama", attn_implementation="eager"), lora_dropout=0.2, **options)


@every_policy
def test_lora_with_dropout_is_exact(policy: str) -> None:
    assert exactness.check(with_lora(), policy) == []


@every_policy
def test_lora_in_later_layers_only_is_exact(policy: str) -> None:
    case = with_lora(layers_to_transform=[2, 3])
    assert exactness.check(case, policy) == []
    assert sum(gradient is not None for gradient in exactness.gradients(case.model).values()) == 8


@every_policy
def test_lora_behind_inputs_that_require_a_gradient_is_exact(policy: str) -> None:
    case = with_lora()
    case.model.enable_input_require_grads()
    assert exactness.check(case, policy) == []


def test_lora_dropout_is_on() -> None:
    case = with_lora()
    case.model.base_model.model.config.attention_dropout = 0.0
    for module in case.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    assert not torch.equal(exactness.step(case, seed=0)[0], exactness.step(case, seed=1)[0])


# --- Mixed precision and caches. ---


@every_policy
@pytest.mark.parametrize("model_type", ["llama", "opt"])
def test_bf16_autocast_is_exact(model_type: str, policy: str) -> None:
    def autocast_step(case: zoo.Case) -> Result:
        case.model.zero_grad()
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = zoo.loss(case.model, case.inputs)
        # Recomputation runs out here and must bring autocast back.
        loss.backward()
        return loss.detach(), exactness.gradients(case.model)

    case = exactness.build(model_type)
    assert exactness.check(case, policy, autocast_step) == []
    assert exactness.differences(exactness.step(case), autocast_step(case)) != []


@pytest.mark.parametrize("policy", ["full", "attention", "nested"])
@pytest.mark.parametrize("model_type", exactness.core_models(without="bert"))
def test_use_cache_is_exact(model_type: str, policy: str) -> None:
    # sdpa hides a cache that was filled twice; eager with padding fails on its mask.
    case = exactness.build(model_type, attn_implementation="eager")
    assert not case.inputs["attention_mask"].all()
    # Under a plan training steps have no cache. With one, convolutions of bamba and jamba round otherwise on some CPUs.
    case.inputs["use_cache"] = False
    expected = exactness.step(case)
    case.inputs["use_cache"] = True
    with exactness.apply(case.model, policy):
        assert exactness.differences(expected, exactness.step(case)) == []


# --- Steps of another form. ---


def shorter(case: zoo.Case) -> zoo.Case:
    """The same model with another batch: other tokens, one row less, and another length."""
    inputs = {name: tensor.flip(0)[:1, :9] for name, tensor in case.inputs.items()}
    return zoo.Case(case.model_type, case.model, inputs)


def collected(case: zoo.Case, *losses: Tensor) -> Result:
    return torch.stack([loss.detach() for loss in losses]), exactness.gradients(case.model)


def start(case: zoo.Case) -> None:
    case.model.zero_grad()
    torch.manual_seed(0)


def accumulated(case: zoo.Case) -> Result:
    start(case)
    losses = []
    for batch in (case, shorter(case)):
        losses.append(zoo.loss(case.model, batch.inputs))
        losses[-1].backward()
    return collected(case, *losses)


def one_backward_for_two_forwards(case: zoo.Case) -> Result:
    start(case)
    losses = [zoo.loss(case.model, batch.inputs) for batch in (case, shorter(case))]
    torch.stack(losses).sum().backward()
    return collected(case, *losses)


def two_forwards_before_their_backwards(case: zoo.Case) -> Result:
    start(case)
    first, second = [zoo.loss(case.model, batch.inputs) for batch in (case, shorter(case))]
    first.backward()
    second.backward()
    return collected(case, first, second)


def backwards_in_the_order_of_a_stack(case: zoo.Case) -> Result:
    start(case)
    first, second = [zoo.loss(case.model, batch.inputs) for batch in (case, shorter(case))]
    second.backward()
    first.backward()
    return collected(case, first, second)


def retained_graph(case: zoo.Case) -> Result:
    start(case)
    loss = zoo.loss(case.model, case.inputs)
    loss.backward(retain_graph=True)
    loss.backward()
    return collected(case, loss)


def autograd_grad(case: zoo.Case) -> Result:
    start(case)
    parameters = dict(case.model.named_parameters())
    loss = zoo.loss(case.model, case.inputs)
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return loss.detach(), dict(zip(parameters, found, strict=True))


def grad_of_a_few_then_of_all(case: zoo.Case) -> Result:
    start(case)
    loss = zoo.loss(case.model, case.inputs)
    some = list(case.model.parameters())[-4:]
    torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
    loss.backward()
    return collected(case, loss)


def forward_without_backward_between(case: zoo.Case) -> Result:
    start(case)
    zoo.loss(case.model, case.inputs)
    loss = zoo.loss(case.model, case.inputs)
    with torch.no_grad():
        zoo.loss(case.model, case.inputs)
    loss.backward()
    return collected(case, loss)


def random_numbers_behind_the_step(case: zoo.Case) -> Result:
    """Recomputation must leave the generator where a step without it would."""
    start(case)
    loss = zoo.loss(case.model, case.inputs)
    loss.backward()
    return torch.cat([loss.detach()[None], torch.rand(3)]), exactness.gradients(case.model)


def gradient_of_a_gradient(case: zoo.Case) -> Result:
    """Differentiates twice, as a gradient penalty does."""
    start(case)
    loss = zoo.loss(case.model, case.inputs)
    weight = case.model.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return collected(case, loss)


def saved_tensors_elsewhere(case: zoo.Case) -> Result:
    """The user's own hooks stand around the forward."""
    start(case)
    with torch.autograd.graph.save_on_cpu():
        loss = zoo.loss(case.model, case.inputs)
    loss.backward()
    return collected(case, loss)


def hidden_states_in_the_loss(case: zoo.Case) -> Result:
    """What lies between two layers is used by the loss as well."""
    start(case)
    output = case.model(**case.inputs, output_hidden_states=True)
    loss = output.loss + sum(hidden.square().mean() for hidden in output.hidden_states)
    loss.backward()
    return collected(case, loss)


RUNS = [
    accumulated,
    one_backward_for_two_forwards,
    two_forwards_before_their_backwards,
    backwards_in_the_order_of_a_stack,
    retained_graph,
    autograd_grad,
    grad_of_a_few_then_of_all,
    forward_without_backward_between,
    random_numbers_behind_the_step,
    gradient_of_a_gradient,
    saved_tensors_elsewhere,
    hidden_states_in_the_loss,
]


@cache
def expected_of(run: Callable[[zoo.Case], Result], model_type: str) -> Result:
    return run(cases(model_type, "eager")[0])


@every_recomputing_policy
@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.sweep(keep=8)
def test_step_is_exact(run: Callable[[zoo.Case], Result], model_type: str, policy: str) -> None:
    case, _ = cases(model_type, "eager")
    expected = expected_of(run, model_type)
    with exactness.apply(case.model, policy):
        assert exactness.differences(expected, run(case)) == []


@every_recomputing_policy
def test_recorded_outputs_are_exact(policy: str) -> None:
    def recorded(case: zoo.Case) -> Result:
        start(case)
        output = case.model(**case.inputs, output_hidden_states=True, output_attentions=True)
        assert len(output.hidden_states) == 5
        assert len(output.attentions) == 4
        loss = output.loss + sum(tensor.square().mean() for tensor in (*output.hidden_states, *output.attentions))
        loss.backward()
        return collected(case, loss)

    assert exactness.check(cases("llama", "eager")[0], policy, recorded) == []


@every_recomputing_policy
def test_gradient_of_the_embeddings_handed_in_is_exact(policy: str) -> None:
    def embedded(case: zoo.Case) -> Result:
        start(case)
        embeddings = case.model.get_input_embeddings()(case.inputs["input_ids"]).detach().requires_grad_()
        loss = case.model(inputs_embeds=embeddings, labels=case.inputs["labels"]).loss
        loss.backward()
        return loss.detach(), {**exactness.gradients(case.model), "embeddings": embeddings.grad}

    assert exactness.check(cases("llama", "eager")[0], policy, embedded) == []


@every_recomputing_policy
def test_two_models_with_interleaved_steps_are_exact(policy: str) -> None:
    models = [exactness.build("gpt2", seed=seed) for seed in (0, 1)]

    def interleaved() -> list[Result]:
        for case in models:
            start(case)
        losses = [zoo.loss(case.model, case.inputs) for case in models]
        for loss in losses:
            loss.backward()
        return [collected(case, loss) for case, loss in zip(models, losses, strict=True)]

    expected = interleaved()
    with ExitStack() as stack:
        for case in models:
            stack.enter_context(exactness.apply(case.model, policy))
        got = interleaved()
    assert [exactness.differences(*pair) for pair in zip(expected, got, strict=True)] == [[], []]


def test_two_models_may_have_two_policies() -> None:
    first, second = exactness.build("gpt2"), exactness.build("gpt2")
    with exactness.apply(first.model, "full"), exactness.apply(second.model, "attention"):
        with exactness.counted_entries(first.model) as (_, in_first):
            exactness.step(first)
        with exactness.counted_entries(second.model) as (_, in_second):
            exactness.step(second)
    children = ["transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc"]
    assert [in_first[name] for name in children] == [1, 1]
    assert [in_second[name] for name in children] == [1, 0]


# --- A graph that is dropped leaves nothing behind. ---


@every_policy
@pytest.mark.parametrize("model_type", ["llama", "opt", "t5"])
def test_forward_without_backward_leaves_nothing_alive(model_type: str, policy: str) -> None:
    case = exactness.build(model_type)
    with exactness.apply(case.model, policy), live_storages.of(case.model, case.inputs.values()) as alive:
        loss = zoo.loss(case.model, case.inputs)
        assert alive.num_bytes() > 10_000
        del loss
        gc.collect()
        assert alive.num_bytes() == 0


@every_policy
def test_backward_leaves_only_gradients_alive(policy: str) -> None:
    case = exactness.build("llama")
    with exactness.apply(case.model, policy), live_storages.of(case.model, case.inputs.values()) as alive:
        zoo.loss(case.model, case.inputs).backward()
        gc.collect()
        assert alive.num_bytes() == sum(parameter.grad.nbytes for parameter in case.model.parameters())


def stumble(*_: object) -> None:
    raise ArithmeticError("stumbled")


def stumble_in_backward(*_: object) -> None:
    if torch._C._current_graph_task_id() != -1:
        stumble()


@every_policy
@pytest.mark.parametrize("moment", ["forward", "gradient", "recomputation"])
def test_step_after_a_failed_one_is_exact(moment: str, policy: str) -> None:
    torch.manual_seed(0)
    case = plain_models.case()
    expected = exactness.step(case)
    block = case.model.blocks[0]
    with exactness.apply(case.model, policy):
        if moment == "forward":
            hook = block.attention.value.register_forward_pre_hook(stumble)
        elif moment == "gradient":
            hook = block.mlp.down.register_full_backward_pre_hook(stumble)
        else:
            hook = block.attention.value.register_forward_pre_hook(stumble_in_backward)
        if moment == "recomputation" and policy in ("none", "ffn"):
            exactness.step(case)
        else:
            # What a recomputation raises says so.
            error = RecomputationError if moment == "recomputation" else ArithmeticError
            with pytest.raises(error, match="stumbled"):
                exactness.step(case)
        hook.remove()
        assert exactness.differences(expected, exactness.step(case)) == []


@every_recomputing_policy
def test_error_of_a_forward_leaves_no_hooks_while_it_is_kept(policy: str) -> None:
    case = plain_models.case()
    case.model.blocks[0].attention.value.register_forward_pre_hook(stumble)
    with exactness.apply(case.model, policy), pytest.raises(ArithmeticError) as raised:
        exactness.step(case)
    assert raised.value.__traceback__ is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
