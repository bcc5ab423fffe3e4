"""A simulation leaves the real model, and what the user's code keeps beside it, as they were."""

from __future__ import annotations

import functools
import random
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.fake_model import fake_copy, meta_copy
from hf_ckpt.simulation.simulator import _turn_cache_off, simulate_step
from hf_ckpt.simulation.step import Step
from tests.training import llama, weights

REACHED = "model.layers.1.mlp.down_proj"
STEP = Step(batch_size=2, seq_length=8, optim="sgd", optim_arguments={"learning_rate": 1e-3})


def reached(model: Any) -> Any:
    return model.get_submodule(REACHED)


# --- Ways that lead to the copy. ---


def closure(model: Any) -> None:
    before = reached(model).forward
    reached(model).forward = lambda x: before(x) * 0.5


def default_argument(model: Any) -> None:
    forward = reached(model).forward
    reached(model).forward = lambda x, before=forward: before(x) * 0.5


def keyword_default(model: Any) -> None:
    module = reached(model)

    def forward(x: Tensor, *, inner: Any = module) -> Tensor:
        return nn.functional.linear(x, inner.weight) * 0.5

    module.forward = forward


def partial(model: Any) -> None:
    def forward(before: Callable[[Tensor], Tensor], x: Tensor, *, factor: float) -> Tensor:
        return before(x) * factor

    reached(model).forward = functools.partial(forward, reached(model).forward, factor=0.5)


def bound_method(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) * 0.5

    model.model.layers[1].mlp.act_fn.forward = functools.partial(torch.mul, 0.5)
    reached(model).forward = types.MethodType(forward, reached(model))


def wrapped(model: Any) -> None:
    def halved(before: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(before)
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return before(*args, **kwargs) * 0.5

        return forward

    reached(model).forward = halved(halved(reached(model).forward))


def attribute(model: Any) -> None:
    before = reached(model).forward
    reached(model).steps = [lambda x: before(x), {"then": (lambda x: x * 0.5, None)}]

    def forward(self: Any, x: Tensor) -> Tensor:
        first, second = self.steps
        return second["then"][0](first(x))

    reached(model).forward = types.MethodType(forward, reached(model))


def list_of_modules(model: Any) -> None:
    found = [reached(model)]
    reached(model).forward = lambda x: nn.functional.linear(x, found[0].weight)


def parameter(model: Any) -> None:
    weight = reached(model).weight
    reached(model).forward = lambda x: nn.functional.linear(x, weight)


def forward_hook(model: Any) -> None:
    other = model.get_submodule("model.layers.0.input_layernorm")
    reached(model).register_forward_hook(lambda module, args, output: output * other.weight)


def forward_pre_hook(model: Any) -> None:
    other = reached(model)
    reached(model).register_forward_pre_hook(lambda module, args: (args[0] * other.weight[0],))


def backward_hook(model: Any) -> None:
    other = reached(model)
    reached(model).register_full_backward_hook(lambda module, before, after: (before[0] * other.weight.sum(),))


def weak_reference(model: Any) -> None:
    before = weakref.ref(reached(model))
    reached(model).forward = lambda x: type(before()).forward(before(), x) * 0.5


def hook_that_takes_itself_off(model: Any) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        handle.remove()
        return output * 0.5

    handle = reached(model).register_forward_hook(hook)


COPIED = [
    *(closure, default_argument, keyword_default, partial, bound_method, wrapped, attribute, list_of_modules),
    *(parameter, forward_hook, forward_pre_hook, backward_hook, weak_reference, hook_that_takes_itself_off),
]

# --- Ways that lead to the real model. ---

GLOBAL: Any = None
BY_NAME: dict[str, Any] = {}


class Holder:
    shared: Any = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(self, x: Tensor) -> Tensor:
        return self.module._forward(x)


class Halved(nn.Linear):
    def _forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) * 0.5


def put_halved(model: Any) -> Any:
    reached(model).__class__ = Halved
    return reached(model)


def by_global(model: Any) -> None:
    global GLOBAL
    GLOBAL = put_halved(model)
    reached(model).forward = lambda x: GLOBAL._forward(x)


def by_global_dictionary(model: Any) -> None:
    BY_NAME["it"] = put_halved(model)
    reached(model).forward = lambda x: BY_NAME["it"]._forward(x)


def by_attribute_of_an_object(model: Any) -> None:
    holder = Holder(put_halved(model))
    reached(model).forward = lambda x: holder.run(x)


def by_method_of_an_object(model: Any) -> None:
    run = Holder(put_halved(model)).run
    act_fn = model.model.layers[1].mlp.act_fn
    act_fn.register_forward_hook(lambda module, args, output: run(output).mean() + output)


def by_class(model: Any) -> None:
    Holder.shared = put_halved(model)
    reached(model).register_forward_hook(lambda module, args, output: output + Holder.shared._forward(args[0]))


def by_function_in_c(model: Any) -> None:
    before = functools.lru_cache(maxsize=None)(put_halved(model)._forward)
    reached(model).forward = lambda x: before(x)


def by_parameter_of_no_module(model: Any) -> None:
    global GLOBAL
    GLOBAL = nn.Parameter(torch.ones(16))
    reached(model).register_forward_hook(lambda module, args, output: output * GLOBAL)


def by_code_that_catches(model: Any) -> None:
    global GLOBAL
    GLOBAL = put_halved(model)

    def forward(x: Tensor) -> Tensor:
        try:
            return GLOBAL._forward(x)
        except ValueError:
            return x[..., :16]

    reached(model).forward = forward


REFUSED = [
    *(by_global, by_global_dictionary, by_attribute_of_an_object, by_method_of_an_object, by_class, by_function_in_c),
    *(by_parameter_of_no_module, by_code_that_catches),
]


@pytest.fixture(autouse=True)
def globals_kept() -> Any:
    yield
    globals().update(GLOBAL=None)
    BY_NAME.clear()
    Holder.shared = None


def state(model: Any) -> Any:
    """Everything of a model that a simulation could touch, by identity, version and value."""
    modules = [
        (name, value, list(value) if isinstance(value, list | dict) else None)
        for module in model.modules()
        for name, value in vars(module).items()
    ]
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [(name, id(value), held) for name, value, held in modules],
        [(id(tensor), tensor._version, tensor.grad) for tensor in tensors],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # the global one
    ]


def trained(model: Any) -> dict[str, Tensor]:
    ids = torch.arange(16).view(2, 8)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return weights(model)


@pytest.mark.parametrize("kept_on_meta", [False, True], ids=["live", "meta"])
@pytest.mark.parametrize("put_on", COPIED)
def test_what_the_model_reaches_of_itself_is_the_copys(put_on: Any, kept_on_meta: bool) -> None:
    model, plain = (llama(num_hidden_layers=2) for _ in range(2))
    put_on(model)
    put_on(plain)
    before = state(model)
    simulate_step(meta_copy(model) if kept_on_meta else model, "full", STEP, CPU)
    assert state(model) == before
    expected, got = trained(plain), trained(model)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kept_on_meta", [False, True], ids=["live", "meta"])
@pytest.mark.parametrize("put_on", REFUSED)
def test_what_the_model_reaches_otherwise_is_refused_by_name(put_on: Any, kept_on_meta: bool) -> None:
    model = llama(num_hidden_layers=2)
    put_on(model)
    before = state(model)
    with pytest.raises(UnsupportedError) as raised:
        simulate_step(meta_copy(model) if kept_on_meta else model, None, STEP, CPU, traces_all=True)
    assert state(model) == before
    inside = "model.layers.1.mlp.act_fn" if put_on is by_method_of_an_object else REACHED
    name = "a trainable parameter [16]" if put_on is by_parameter_of_no_module else f"{REACHED}.weight of the real"
    assert f'the forward of "{inside}" reaches {name}' in str(raised.value)
    assert "or use a fixed policy" in str(raised.value)


def test_what_was_changed_on_the_real_model_is_named_and_put_back() -> None:
    model = llama(num_hidden_layers=2)
    BY_NAME["it"] = reached(model)
    reached(model).calls = 0
    reached(model).seen = []

    def count(module: nn.Module, args: Any, output: Tensor) -> None:
        BY_NAME["it"].calls += 1
        BY_NAME["it"].seen.append(output)
        BY_NAME["it"].weight.grad = None if BY_NAME["it"].weight.grad is not None else torch.zeros(16, 24)

    model.get_submodule("model.norm").register_forward_hook(count)
    gradient = reached(model).weight.grad = torch.ones(16, 24)
    before = state(model)
    with pytest.raises(UnsupportedError, match=r"has changed the real model \(.*down_proj") as raised:
        simulate_step(model, None, STEP, CPU)
    assert state(model) == before
    assert reached(model).weight.grad is gradient
    assert f"{REACHED}.seen" in str(raised.value)


# --- What hooks keep. ---

COUNT = 0
SEEN: list[Any] = []
STATES: Any = {"generator": torch.Generator(), "python": random.Random(0), "numpy": np.random.default_rng(0)}
NUMBER = torch.zeros(())


class Collector:
    number = 0

    def __init__(self) -> None:
        self.outputs: dict[str, list[Any]] = {"all": []}
        self.last: Any = None

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        Collector.number += 1
        self.outputs["all"].append(output)
        self.last = output

    hook = __call__


def in_a_list() -> tuple[Any, Any]:
    outputs: list[Any] = []
    return lambda module, args, output: outputs.append(output), lambda: len(outputs)


def in_containers() -> tuple[Any, Any]:
    found: dict[str, Any] = {"deque": deque(maxlen=3), "set": set()}

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        found["deque"].append(output)
        found["set"].add(output.shape)
        found[str(len(found))] = output

    return hook, lambda: (list(found), len(found["deque"]), found["set"])


def in_a_counter() -> tuple[Any, Any]:
    count = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal count
        count += 1

    return hook, lambda: count


def in_globals() -> tuple[Any, Any]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        global COUNT
        COUNT += 1
        SEEN.append(output)

    return hook, lambda: (COUNT, len(SEEN))


def in_an_object() -> tuple[Any, Any]:
    collector = Collector()
    return lambda *given: collector(*given), lambda: (Collector.number, len(collector.outputs["all"]), collector.last)


def in_the_object_of_a_method() -> tuple[Any, Any]:
    collector = Collector()
    return collector.hook, lambda: (Collector.number, len(collector.outputs["all"]), collector.last)


def in_an_object_that_is_called() -> tuple[Any, Any]:
    collector = Collector()
    return collector, lambda: (Collector.number, len(collector.outputs["all"]), collector.last)


def in_the_function() -> tuple[Any, Any]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        hook.calls = getattr(hook, "calls", 0) + 1

    return hook, lambda: getattr(hook, "calls", 0)


def in_generators() -> tuple[Any, Any]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        torch.rand(1, generator=STATES["generator"])
        STATES["python"].random()
        STATES["numpy"].random()
        NUMBER.add_(1)
        torch.rand(1)
        random.random()
        np.random.rand()

    def kept() -> Any:
        torchs, numpys = STATES["generator"].get_state().tolist(), STATES["numpy"].bit_generator.state
        return torchs, numpys, STATES["python"].getstate(), NUMBER.item()

    return hook, kept


@pytest.mark.parametrize(
    "collecting",
    [
        *(in_a_list, in_containers, in_a_counter, in_globals, in_an_object, in_the_object_of_a_method),
        *(in_an_object_that_is_called, in_the_function, in_generators),
    ],
)
def test_what_hooks_collected_is_taken_out_again(collecting: Any) -> None:
    hook, kept = collecting()
    model = llama(num_hidden_layers=2)
    for path in (REACHED, "model.norm"):
        model.get_submodule(path).register_forward_hook(hook)
    inputs = torch.arange(16).view(2, 8)
    model(input_ids=inputs)
    before, of_model = kept(), state(model)
    for shape in (model, meta_copy(model)):
        simulate_step(shape, "full", STEP, CPU)
    assert (kept(), state(model)) == (before, of_model)
    model(input_ids=inputs)
    assert kept() != before


def test_module_of_a_layer_that_another_stands_for_is_the_copys() -> None:
    model: Any = llama(num_hidden_layers=6)
    other = model.model.layers[2].mlp.up_proj
    model.model.layers[4].mlp.down_proj.register_forward_hook(lambda module, args, output: output * other.weight.mean())
    before = state(model)
    simulate_step(model, "full", STEP, CPU)
    assert state(model) == before


def test_two_functions_go_on_sharing_what_they_share() -> None:
    model = llama(num_hidden_layers=2)
    last: Any = None

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal last
        last = output

    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + last

    model.get_submodule("model.embed_tokens").register_forward_hook(keep)
    model.get_submodule("model.norm").register_forward_hook(add)
    simulate_step(model, None, STEP, CPU)
    assert last is None


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_real_weights_do_not_run(kind: str) -> None:
    model, calls = llama(num_hidden_layers=2), []
    for weight in model.parameters():
        getattr(weight, kind)(lambda _: calls.append(1))
    simulate_step(model, None, STEP, CPU)
    assert not calls
    trained(model)
    assert calls


def test_hooks_of_all_modules_collect_nothing() -> None:
    model, outputs = llama(num_hidden_layers=2), []
    with nn.modules.module.register_module_forward_hook(lambda module, args, output: outputs.append(output)):
        simulate_step(model, None, STEP, CPU)
        assert not outputs
        model(input_ids=torch.arange(16).view(2, 8))
    assert outputs


def test_teacher_in_a_closure_is_asked_and_left_alone() -> None:
    model, teacher = (llama(num_hidden_layers=2).model for _ in range(2))

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        with torch.no_grad():
            return output + teacher.norm(output.detach()) * teacher.norm.weight.mean()

    student = llama(num_hidden_layers=2)
    student.model = model
    model.norm.register_forward_hook(hook)
    before = state(teacher)
    simulate_step(student, None, STEP, CPU)
    assert state(teacher) == before


@pytest.mark.parametrize(
    ("hold", "of"),
    [
        (lambda generator: generator, lambda held: held),
        (lambda generator: {"noise": [generator]}, lambda held: held["noise"][0]),
        (lambda generator: types.SimpleNamespace(noise=generator), lambda held: held.noise),
        (
            lambda generator: functools.partial(torch.randn, generator=generator),
            lambda held: held.keywords["generator"],
        ),
    ],
    ids=["itself", "in containers", "in an object", "in a partial"],
)
@pytest.mark.parametrize("policy", [None, "full"])
def test_generator_of_a_module_is_copied(hold: Any, of: Any, policy: str | None) -> None:
    model = llama(num_hidden_layers=2)
    generator = torch.Generator().manual_seed(3)
    reached(model).held = hold(generator)

    def noisy(module: Any, args: Any, output: Tensor) -> Tensor:
        return output + torch.randn(output.shape, generator=of(module.held))

    reached(model).register_forward_hook(noisy)
    before = generator.get_state()
    simulate_step(meta_copy(model), policy, STEP, CPU)
    assert torch.equal(generator.get_state(), before)


def test_auto_plans_for_a_model_with_a_generator() -> None:
    def gradients(**options: Any) -> list[Tensor | None]:
        model = llama(num_hidden_layers=2).train()
        reached(model).held = torch.Generator().manual_seed(3)
        reached(model).register_forward_hook(
            lambda module, args, output: output + torch.randn(output.shape, generator=module.held)
        )
        ids = torch.arange(16).view(2, 8)
        torch.manual_seed(0)
        with hf_ckpt.apply(model, **options):
            model(input_ids=ids, labels=ids).loss.backward()
        return [weight.grad for weight in model.parameters()]

    planned = gradients(policy="auto", memory_budget="1GiB", batch_size=2, seq_length=8)
    assert all(map(torch.equal, planned, gradients(policy="none")))


def test_attribute_that_cannot_be_copied_is_named() -> None:
    model = llama(num_hidden_layers=2)
    reached(model).pending = (number for number in range(3))
    with pytest.raises(UnsupportedError, match=r'down_proj.pending" \(generator\) cannot be copied'):
        fake_copy(model)


def test_config_of_a_class_keeps_its_cache() -> None:
    class Model(nn.Module):
        config = types.SimpleNamespace(use_cache=True)

    model: Any = Model()
    _turn_cache_off(model)
    assert (model.config.use_cache, Model.config.use_cache) == (False, True)
