"""Selective regions step after step: the first under a dispatch mode, later ones through kernels of our own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import hf_ckpt
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.selective import adapted_layers, dispatch
from hf_ckpt.regions.selective.save_rules import SaveRules
from hf_ckpt.regions.selective.selective_recompute import SelectiveStack, recompute_selectively
from hf_ckpt.structure.layers import find_layers
from hf_ckpt.trainer.first_step import FirstStep
from tests import exactness, traces, zoo
from tests.exactness import Result, under_autocast

pytestmark = pytest.mark.slow

STEPS = 4
Step = Callable[[zoo.Case], Result]


class Entered:
    """Counts regions, forward and again, that ran through kernels of our own."""

    def __init__(self) -> None:
        self.count = 0

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> Entered:
    seen, enter = Entered(), dispatch.begin_interception

    def counted(region: Any) -> Any:
        seen.count += 1
        return enter(region)

    monkeypatch.setattr(dispatch, "begin_interception", counted)
    return seen


def check(case: zoo.Case, mode: str, run: Step = exactness.step, **options: Any) -> None:
    expected = run(case)
    with hf_ckpt.apply(case.model, mode, **options):
        for _ in range(STEPS):
            assert exactness.differences(expected, run(case)) == []


def without_early_stop(case: zoo.Case) -> Result:
    with set_checkpoint_early_stop(False):
        return exactness.step(case)


# --- Which way. ---


def test_torch_leaves_the_key_unused_and_no_thread_has_it_outside_of_regions() -> None:
    assert dispatch.kernels_are_possible()
    check(exactness.build("llama"), "selective")
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C._dispatch_key_parse(dispatch._KEY_NAME))


@pytest.mark.parametrize(
    ("mode", "attn_implementation", "is_served"),
    [
        ("selective", "sdpa", True),
        ("selective", "eager", True),
        ("selective_attention", "sdpa", True),
        # Its probabilities are followed from operator to operator.
        ("selective_attention", "eager", False),
    ],
)
def test_layers_run_through_kernels_once_all_is_proved(
    mode: str, attn_implementation: str, is_served: bool, entered: Entered
) -> None:
    case = exactness.build("llama", attn_implementation=attn_implementation, dropout=0.0)
    num_layers = len(case.model.model.layers)
    with hf_ckpt.apply(case.model, mode):
        exactness.step(case)
        assert entered.take() == 0
        exactness.step(case)
        assert entered.take() == is_served * 2 * num_layers


def test_a_mode_of_somebody_else_sees_what_it_always_saw(entered: Entered) -> None:
    case = exactness.build("llama")
    with hf_ckpt.apply(case.model, "selective"):
        exactness.step(case)
        exactness.step(case)
        entered.take()
        with FlopCounterMode(display=False) as counter:
            exactness.step(case)
        assert entered.take() == 0
    with FlopCounterMode(display=False) as without:
        exactness.step(case)
    assert counter.get_total_flops() == without.get_total_flops()


def test_without_a_free_key_layers_run_under_a_mode(monkeypatch: pytest.MonkeyPatch, entered: Entered) -> None:
    monkeypatch.setattr(dispatch, "kernels_are_possible", lambda: False)
    check(exactness.lora(exactness.build("llama"), lora_dropout=0.2), "selective")
    assert entered.count == 0


# --- Exact, on all ways. ---


@pytest.mark.parametrize("mode", ["selective", "selective_attention"])
@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "opt", "t5", "qwen3_moe", "gpt_oss", "gemma3n_text", "deepseek_v3", "prophetnet"]
)
def test_every_step_is_exact(model_type: str, mode: str) -> None:
    check(exactness.build(model_type), mode)


@pytest.mark.parametrize("run", [exactness.step, under_autocast, without_early_stop])
@pytest.mark.parametrize(
    ("mode", "save"),
    [
        ("selective", []),
        ("selective_attention", []),
        ("selective", ["self_attn.*", "mlp"]),
        ("selective", ["mlp.up_proj", "*.lora_A.*"]),
        ("selective", ["mlp.*.base_layer"]),
        ("selective", ["aten.mm"]),
    ],
)
def test_every_step_with_adapters_is_exact(mode: str, save: list[str], run: Step) -> None:
    case = exactness.lora(exactness.build("llama"), lora_dropout=0.2)
    check(case, mode, run, **({"save": save} if save else {}))


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"use_rslora": True, "bias": "lora_only"},
        {"r": 32, "lora_dropout": 0.2},
        {"lora_bias": True, "bias": "all"},
        {"layers_to_transform": [0]},
    ],
)
@pytest.mark.parametrize(("model_type", "names"), [("gpt2", ["c_attn", "c_proj"]), ("opt", ["q_proj", "fc1", "fc2"])])
def test_adapters_of_layers_with_biases_are_exact(model_type: str, names: list[str], options: dict[str, Any]) -> None:
    case = exactness.build(model_type)
    given = {"r": 2, "target_modules": names, "init_lora_weights": False, "fan_in_fan_out": model_type == "gpt2"}
    config = LoraConfig(**given | options)
    check(zoo.Case(model_type, get_peft_model(case.model, config), case.inputs), "selective")


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_base_that_is_trained_beside_its_adapter_is_exact(is_trained: bool) -> None:
    case = exactness.lora(exactness.build("llama"), lora_dropout=0.2)
    for name, parameter in case.model.named_parameters():
        if "base_layer" in name or "lora_A" in name:
            parameter.requires_grad_(is_trained == ("base_layer" in name))
    check(case, "selective")


class Turned(nn.Module):
    """Gives a linear layer with a bias what is not contiguous: torch adds the bias in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(hidden.transpose(0, 1)))
        return torch.tanh(self.second(hidden[:, None])).squeeze(1)


class Writing(nn.Module):
    """Writes into what a linear layer returned, through a view that counts its own writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden)
        hidden.mul_(torch.sigmoid(hidden.detach()))
        return torch.tanh(self.second(torch.tanh(hidden)))


class WritingProduct(Writing):
    """The same, of a product of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = torch.matmul(hidden, self.first.weight)
        hidden.mul_(torch.sigmoid(hidden.detach()))
        return torch.tanh(self.second(torch.tanh(hidden)))


def gradients(layer: nn.Module, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    output = layer(hidden) if run is None else run(layer, hidden)
    return list(torch.autograd.grad(output.pow(2).sum(), [hidden, *layer.parameters()]))


@pytest.mark.parametrize("cls", [Turned, Writing, WritingProduct])
def test_layers_that_are_not_what_they_seem_are_exact(cls: type[nn.Module], entered: Entered) -> None:
    layer, selection, saves = cls(), SelectiveStack(), SaveRules.of("selective")
    handles = selection.hooks(layer, saves)
    expected = gradients(layer)
    for _ in range(STEPS):
        got = gradients(layer, partial(recompute_selectively, selection, saves, None))
        assert all(map(torch.equal, got, expected))
    assert entered.count
    # What is written to is copied as soon as it is made, once that is known.
    assert selection.coverage.copied_calls
    for handle in handles:
        handle.remove()


class Measuring(nn.Module):
    """Takes numbers in inference mode from what it computes: of its layer, of a product, and of a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            found = self.first(hidden)
            scale = float((found @ found.mT).topk(2)[0].mean())
        return torch.tanh(self.second(torch.tanh(self.first(hidden) * scale)))


@pytest.mark.parametrize("save", [(), ("aten.addmm", "aten.topk"), ("aten.mean", "aten.tanh"), ("first",)])
def test_what_is_computed_in_inference_mode_is_computed_again(save: tuple[str, ...]) -> None:
    layer, selection, saves = Measuring(), SelectiveStack(), SaveRules.of("selective", save)
    handles = selection.hooks(layer, saves)
    expected = gradients(layer)
    for _ in range(STEPS):
        got = gradients(layer, partial(recompute_selectively, selection, saves, None))
        assert all(map(torch.equal, got, expected))
    for handle in handles:
        handle.remove()


def test_an_output_that_changes_its_size_is_refused() -> None:
    layer, selection, saves = Writing(), SelectiveStack(), SaveRules.of("selective")
    selection.hooks(layer, saves)
    rows = iter([3, 2])

    def changing(hidden: Tensor) -> Tensor:
        return layer.second(torch.tanh(layer.second(torch.tanh(hidden[:, : next(rows)]))))

    hidden = torch.randn(2, 3, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"inputs of \[\[4, 8\]\] where the forward had \[\[6, 8\]\]"):
        recompute_selectively(selection, saves, None, changing, hidden).sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_what_is_compiled_inside_of_a_layer_is_none_of_its_operators() -> None:
    case = exactness.build("llama", num_layers=2)
    torch._dynamo.reset()
    for layer in case.model.model.layers:
        layer.mlp.compile(backend="aot_eager")
    check(case, "selective")


def test_a_second_backward_over_a_retained_graph_is_exact() -> None:
    case = exactness.lora(exactness.build("llama"), lora_dropout=0.2)
    trained = [parameter for parameter in case.model.parameters() if parameter.requires_grad]

    def grads() -> list[Tensor]:
        torch.manual_seed(0)
        loss = zoo.loss(case.model, case.inputs)
        return [g for _ in range(2) for g in torch.autograd.grad(loss, trained, retain_graph=True)]

    expected = grads()
    with hf_ckpt.apply(case.model, "selective"):
        for _ in range(STEPS):
            assert all(map(torch.equal, grads(), expected))


def test_two_forwards_before_their_backwards_are_exact() -> None:
    def two(case: zoo.Case) -> Result:
        case.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        losses = [zoo.loss(case.model, case.inputs) for _ in range(2)]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).detach(), exactness.gradients(case.model)

    check(exactness.lora(exactness.build("llama"), lora_dropout=0.2), "selective", two)


def test_copies_and_pickles_go_their_own_ways() -> None:
    case = exactness.lora(exactness.build("llama"), lora_dropout=0.2)
    expected = exactness.step(case)
    case.model.zero_grad()
    with hf_ckpt.apply(case.model, "selective"):
        for _ in range(STEPS):
            exactness.step(case)
        for copied in (copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model))):
            other = zoo.Case(case.model_type, copied, case.inputs)
            for _ in range(STEPS):
                assert exactness.differences(expected, exactness.step(other)) == []


def test_removal_takes_the_hooks_off() -> None:
    case = exactness.lora(exactness.build("llama"))
    found = traces.snapshot(case.model)
    with hf_ckpt.apply(case.model, "selective"):
        exactness.step(case)
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []


# --- Sums of adapted layers. ---


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False, **options)
    return get_peft_model(nn.ModuleDict({"proj": nn.Linear(8, 8)}), config).base_model.model["proj"]


HIDDEN = torch.randn(2, 3, 8)


def test_an_adapted_layer_is_a_sum() -> None:
    assert adapted_layers.rank_of_sum(adapted(lora_dropout=0.1), (HIDDEN,))


def _merge(module: Any) -> None:
    module.merge()


def _disable(module: Any) -> None:
    module.enable_adapters(False)


def _hook_inside(module: Any) -> None:
    module.lora_A["default"].register_forward_hook(lambda *args: None)


def _hook_base(module: Any) -> None:
    module.base_layer.register_forward_pre_hook(lambda *args: None)


def _patch(module: Any) -> None:
    module.forward = partial(type(module).forward, module)


def _patch_base(module: Any) -> None:
    module.base_layer.forward = partial(type(module.base_layer).forward, module.base_layer)


@pytest.mark.parametrize("change", [_merge, _disable, _hook_inside, _hook_base, _patch, _patch_base])
def test_a_layer_that_somebody_has_changed_is_none(change: Callable[[Any], None]) -> None:
    module = adapted()
    change(module)
    assert not adapted_layers.rank_of_sum(module, (HIDDEN,))


def test_variants_are_none() -> None:
    assert not adapted_layers.rank_of_sum(adapted(use_dora=True), (HIDDEN,))


@contextmanager
def _looked_into(case: zoo.Case) -> Iterator[None]:
    """Hook the inside of adapted layers."""
    modules = [module for module in case.model.modules() if adapted_layers.is_adapted(module)]
    handles = [module.lora_A["default"].register_forward_hook(lambda *args: None) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_a_layer_that_is_looked_into_since_its_forward_runs_for_real() -> None:
    case = exactness.lora(exactness.build("llama"), lora_dropout=0.2)

    def hooked_in_backward(case: zoo.Case) -> Result:
        case.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        loss = zoo.loss(case.model, case.inputs)
        with _looked_into(case):
            loss.backward()
        return loss.detach(), exactness.gradients(case.model)

    check(case, "selective", hooked_in_backward)


def _double(module: nn.Module, args: Any, output: Tensor) -> None:
    output.mul_(2)


def test_writes_into_kept_sums_are_exact() -> None:
    case = exactness.lora(exactness.build("llama"), lora_dropout=0.2)
    for layer in case.model.base_model.model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(_double)
    check(case, "selective")


def test_adapters_whose_base_adds_its_bias_in_place_are_exact() -> None:
    layer = Turned()
    config = LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False)
    layer = get_peft_model(layer, config).base_model.model
    selection, saves = SelectiveStack(), SaveRules.of("selective")
    selection.hooks(layer, saves)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]

    def grads(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
        return torch.autograd.grad(run(hidden).pow(2).sum(), trained)

    expected = grads(layer)
    for _ in range(STEPS):
        got = grads(partial(recompute_selectively, selection, saves, None, layer))
        assert all(map(torch.equal, got, expected))


def test_placeholders_are_what_torch_makes_of_tensors_on_meta() -> None:
    def run(first: Tensor, second: Tensor) -> list[Tensor]:
        total = first.view(2, 3, 4) + 0.5 * torch.ops.aten._unsafe_view(second, (2, 3, 4))
        return [total, total.bfloat16(), first.view(-1, 2), first.clone(), first.t(), first + second[0]]

    stood = run(*(adapted_layers.Placeholder.of((6, 4), dtype) for dtype in (torch.bfloat16, torch.float32)))
    plain = run(*(torch.empty(6, 4, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32)))
    assert all(type(tensor) is adapted_layers.Placeholder and tensor.is_meta for tensor in stood)
    assert [(tensor.shape, tensor.dtype) for tensor in stood] == [(tensor.shape, tensor.dtype) for tensor in plain]


def test_placeholders_do_not_mix_with_numbers() -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"(?i)meta"):
        adapted_layers.Placeholder.of((2, 4), torch.float32) + torch.ones(2, 4)


def test_hooks_of_the_first_step_do_not_keep_sums_from_being_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stood_for, placeholder = [], adapted_layers.placeholder

    def counted(*args: Any) -> Tensor:
        stood_for.append(placeholder(*args))
        return stood_for[-1]

    monkeypatch.setattr(adapted_layers, "placeholder", counted)
    case = exactness.lora(exactness.build("llama"), lora_dropout=0.2)
    expected = exactness.step(case)
    case.model.zero_grad()
    with hf_ckpt.apply(case.model, "selective", prove="off") as applied:
        first_step = FirstStep(case.model, applied.plan, find_layers(case.model))
        first_step.start()
        assert exactness.differences(expected, exactness.step(case)) == []
        assert first_step.finish() == []
    # Two of `q_proj` in each layer; of `down_proj` the base's: recomputation stops before the adapter's second.
    assert len(stood_for) == 3 * len(case.model.base_model.model.model.layers)
    assert all(tensor.is_meta for tensor in stood_for)
