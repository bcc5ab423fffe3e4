"""Tiles: what a position-wise module gives slice by slice is what it gives whole."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt import find_layers
from hf_ckpt.patch import apply as patch
from hf_ckpt.regions.tiling import Cut, Tiling, run_tiled
from hf_ckpt.trainer.first_step import FirstStep
from tests import exactness, plain_models, traces, zoo
from tests.exactness import Result
from tests.regions.tiled_models import LENGTH, llama, tiled

core = pytest.mark.core
pytestmark = [pytest.mark.slow, core]

MODES = ["none", "full", "attention", "ffn"]
every_mode = pytest.mark.parametrize("mode", MODES)
# Sums over the sequence are taken slice by slice, and matrix products over fewer rows are blocked otherwise.
ROUNDING = 1e-6


def furthest(expected: Result, got: Result) -> float:
    """The largest relative difference of a gradient, by its norm, or of the loss."""
    gradients = [(gradient, got[1][name]) for name, gradient in expected[1].items()]
    assert [x is None for x, _ in gradients] == [y is None for _, y in gradients]
    pairs = [expected[:1] + got[:1], *((x, y) for x, y in gradients if x is not None)]
    return max(float((x - y).norm() / x.norm()) for x, y in pairs if float(x.norm()))


def without_dropout(case: zoo.Case) -> zoo.Case:
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return case


# --- The same numbers. ---


@every_mode
def test_one_tile_is_bitwise_the_whole(mode: str) -> None:
    case = llama()
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, mode, tiles=1):
        assert exactness.differences(expected, exactness.step(case)) == []


# 5 does not divide 16 tokens; of 100 slices 16 are left, of one token each.
@pytest.mark.parametrize("tiles", [2, 5, 100])
@every_mode
def test_tiles_give_the_whole_within_rounding(mode: str, tiles: int) -> None:
    case = llama()
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, mode, tiles=tiles):
        assert furthest(expected, exactness.step(case)) < ROUNDING


# Grouped queries and biases, a mixture with shared experts, norms around both halves and inside attention, compressed
# keys, one matrix for all of attention, tied embeddings, lists in a layer, a mixer in the place of attention.
@pytest.mark.parametrize("name", ["mixtral", "gemma2", "qwen3", "deepseek_v3", "gpt_neox", "t5", "bamba"])
@pytest.mark.sweep(keep=1)
def test_families_of_models_give_the_whole_within_rounding(name: str) -> None:
    case = without_dropout(exactness.build(name))
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", tiles=3):
        assert furthest(expected, exactness.step(case)) < ROUNDING


def test_in_double_precision_the_whole_is_met_to_the_last_digits() -> None:
    case = llama()
    # Its norms compute in float32.
    for module in case.model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = partial(nn.functional.rms_norm, normalized_shape=module.weight.shape, weight=module.weight)
    case.model.double()
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", tiles=5):
        assert furthest(expected, exactness.step(case)) < 1e-14


@pytest.mark.parametrize("recomputes", [True, False])
def test_tiles_are_bitwise_the_slices_put_together_by_hand(recomputes: bool) -> None:
    torch.manual_seed(0)
    module, hidden = plain_models.Mlp().double(), torch.randn(2, 7, plain_models.WIDTH).double().requires_grad_()
    by_hand = torch.cat([module(piece.contiguous()) for piece in hidden.split([3, 2, 2], dim=1)], dim=1)
    by_hand.square().sum().backward()
    expected = [x.grad for x in (hidden, *module.parameters())]
    module.zero_grad()
    hidden.grad = None
    output = run_tiled(Tiling(3, recomputes=recomputes), module, None, hidden)
    output.square().sum().backward()
    assert torch.equal(output, by_hand)
    for x, y in zip(expected, (hidden, *module.parameters()), strict=True):
        torch.testing.assert_close(y.grad, x, rtol=1e-14, atol=1e-14)
    assert torch.equal(hidden.grad, expected[0])


@every_mode
def test_masks_of_dropout_are_drawn_again_in_backward(mode: str) -> None:
    case = exactness.lora(llama(), lora_dropout=0.3)
    whole = exactness.step(case)
    with tiled(case.model, 3, recomputes=False):
        expected = exactness.step(case)
    assert not torch.equal(whole[0], expected[0])
    with hf_ckpt.apply(case.model, mode, tiles=3):
        assert exactness.differences(expected, exactness.step(case)) == []


def test_what_backward_recomputes_leaves_the_random_state_alone() -> None:
    case = exactness.lora(llama(), lora_dropout=0.3)
    with tiled(case.model, 3):
        torch.manual_seed(0)
        loss = zoo.loss(case.model, case.inputs)
        before = torch.get_rng_state()
        loss.backward()
        assert torch.equal(before, torch.get_rng_state())


def test_experts_get_the_same_tokens_again() -> None:
    case = exactness.build("mixtral")
    with tiled(case.model, 4, recomputes=False):
        expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", tiles=4):
        assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.parametrize("mode", ["none", "full"])
def test_autocast_around_the_whole_step_loses_no_gradient(mode: str) -> None:
    def step(case: zoo.Case) -> Result:
        with torch.autocast("cpu", torch.bfloat16):
            return exactness.step(case)

    case = exactness.lora(llama())
    whole = step(case)
    with tiled(case.model, 3, recomputes=False):
        expected = step(case)
    with hf_ckpt.apply(case.model, mode, tiles=3):
        got = step(case)
    assert exactness.differences(expected, got) == []
    # bfloat16 has eight bits.
    assert furthest(whole, got) < 2**-5


def test_gradients_in_half_precision_are_added_up_in_float32() -> None:
    torch.manual_seed(0)
    module, hidden = nn.Linear(8, 8), torch.randn(1, 512, 8)
    module(hidden).square().sum().backward()
    true = module.weight.grad
    errors = []
    half = copy.deepcopy(module).bfloat16()
    for tiles in (1, 256):
        half.zero_grad()
        run_tiled(Tiling(tiles), half, None, hidden.bfloat16()).square().sum().backward()
        errors.append(float((half.weight.grad - true).norm() / true.norm()))
    assert errors[1] < 1.5 * errors[0]


def test_quantised_weights_give_the_whole_within_rounding() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    case = exactness.lora(llama())
    for module in case.model.modules():
        if isinstance(getattr(module, "base_layer", None), nn.Linear):
            base = module.base_layer
            module.base_layer = bnb.nn.Linear4bit(
                base.in_features, base.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            module.base_layer.weight = bnb.nn.Params4bit(base.weight.data, requires_grad=False, quant_type="nf4")
            module.base_layer.to("cpu")
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", tiles=5):
        # Sums over weights of 16 values are longer before they round: 1.1e-6 on one kind of CPU, less on others.
        assert furthest(expected, exactness.step(case)) < 2 * ROUNDING


def test_micro_batches_add_up() -> None:
    def two(case: zoo.Case) -> Result:
        case.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        losses = [zoo.loss(case.model, {k: v[row : row + 1] for k, v in case.inputs.items()}) for row in (0, 1)]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).detach(), exactness.gradients(case.model)

    case = llama()
    expected = two(case)
    with hf_ckpt.apply(case.model, "full", tiles=3):
        assert furthest(expected, two(case)) < ROUNDING


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_retained_graph_can_be_used_again_and_a_freed_one_cannot(recomputes: bool) -> None:
    torch.manual_seed(0)
    module, hidden = plain_models.Mlp(), torch.randn(2, 7, plain_models.WIDTH)
    loss = run_tiled(Tiling(3, recomputes=recomputes), module, None, hidden).square().sum()
    loss.backward(retain_graph=True)
    once = module.up.weight.grad.clone()
    loss.backward()
    assert torch.equal(module.up.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_hooks_of_a_parameter_see_one_gradient_a_step() -> None:
    case = llama()
    seen: list[nn.Parameter] = []
    for parameter in case.model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    with hf_ckpt.apply(case.model, "full", tiles=4):
        exactness.step(case)
    assert len(seen) == len(set(seen)) == len(list(case.model.parameters()))


@pytest.mark.parametrize("recomputes", [True, False])
def test_an_input_that_the_whole_gives_no_gradient_gets_none(recomputes: bool) -> None:
    case = llama()
    for layer in case.model.model.layers:
        for module in (layer.mlp.gate_proj, layer.mlp.up_proj):
            module.register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    _, expected = exactness.step(case)
    with tiled(case.model, 2, recomputes=recomputes):
        _, got = exactness.step(case)
    without = [name for name, gradient in expected.items() if gradient is None]
    assert "model.layers.0.post_attention_layernorm.weight" in without
    assert [name for name, gradient in got.items() if gradient is None] == without


def test_frozen_layers_run_in_tiles_too() -> None:
    case = exactness.build("llama")
    case.model.requires_grad_(False)
    case.model.model.layers[2].mlp.down_proj.weight.requires_grad_(True)
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", tiles=3):
        assert furthest(expected, exactness.step(case)) < ROUNDING


def test_forwards_that_others_bound_to_instances_run_slice_by_slice() -> None:
    """Liger binds its forwards so."""
    lengths: list[int] = []

    def bound(module: nn.Module, x: Tensor) -> Tensor:
        lengths.append(x.shape[1])
        return module.down_proj(torch.tanh(module.gate_proj(x)) * module.up_proj(x))

    case = llama()
    mlp = case.model.model.layers[1].mlp
    mlp.forward = MethodType(bound, mlp)
    expected = exactness.step(case)
    lengths.clear()
    with hf_ckpt.apply(case.model, "none", tiles=2):
        assert furthest(expected, exactness.step(case)) < ROUNDING
    # Four positions run alone, in the forward and for the proof.
    assert lengths == [*[LENGTH // 2] * 2, 4] * 2
    assert mlp.forward.__func__ is bound


# --- Shapes. ---


@pytest.mark.parametrize(
    ("length", "tiles", "lengths"),
    [(16, 4, [4, 4, 4, 4]), (16, 5, [4, 3, 3, 3, 3]), (3, 8, [1, 1, 1]), (7, 1, [7])],
)
def test_slices_differ_by_one_position_at_most(length: int, tiles: int, lengths: list[int]) -> None:
    bounds = Cut.of(torch.empty(2, length, 8), tiles).bounds
    assert [length for _, length in bounds] == lengths
    assert [start for start, _ in bounds] == [sum(lengths[:number]) for number in range(len(lengths))]


@pytest.mark.parametrize(
    ("shape", "tiles"), [((1, 2047, 8), 1), ((1, 8192, 8), 4), ((4, 2048, 8), 4), ((1, 157_000, 8), 16), ((0, 8), 1)]
)
def test_auto_takes_slices_of_2048_tokens_and_at_most_16(shape: tuple[int, ...], tiles: int) -> None:
    assert len(Cut.of(torch.empty(shape, device="meta"), "auto").bounds) == tiles


@pytest.mark.parametrize(
    ("shape", "leading"),
    [((6, 8), (6,)), ((2, 6, 8), (2, 6)), ((2, 6, 4, 8), (2, 6)), ((2, 4, 6, 8), (2, 4, 6)), ((9, 2, 6, 8), (9,))],
)
def test_the_sequence_is_the_last_but_one_dimension_or_the_longest_of_more(
    shape: tuple[int, ...], leading: tuple[int, ...]
) -> None:
    assert Cut.of(torch.empty(shape), 2).leading == leading


class Routed(nn.Module):
    """Returns a tuple as mixtures do: one tensor by token of a flattened batch, one that is not differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.router = plain_models.Mlp(), nn.Linear(plain_models.WIDTH, 3)

    def forward(self, hidden: Tensor, shift: Tensor, scale: float = 1.0) -> tuple[Tensor | None, ...]:
        logits = self.router(hidden.view(-1, hidden.shape[-1]))
        return self.mlp(hidden + shift) * scale, logits, logits.argmax(-1), None


@pytest.mark.parametrize("tiles", [3, 6])
def test_tuples_and_flattened_outputs_and_further_arguments_are_cut_alike(tiles: int) -> None:
    torch.manual_seed(0)
    module = Routed()
    inputs = [torch.randn(2, 6, plain_models.WIDTH).requires_grad_() for _ in range(2)]

    def step(run: Callable[..., Any]) -> list[Tensor]:
        module.zero_grad()
        output, logits, experts, nothing = run(inputs[0], shift=inputs[1], scale=2.0)
        assert nothing is None
        assert not experts.requires_grad
        # Whoever comes next may write into what it is given.
        output, logits = output.add_(1.0), logits.mul_(2.0)
        gradients = torch.autograd.grad(output.square().sum() + logits.exp().sum(), [*inputs, *module.parameters()])
        return [output, logits, experts, *gradients]

    for x, y in zip(step(module), step(partial(run_tiled, Tiling(tiles), module, None)), strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mask": torch.ones(6, 6)},
        {"mask": [torch.ones(2, 6)]},
        {"hidden": torch.ones(plain_models.WIDTH)},
        {"hidden": torch.ones(0, plain_models.WIDTH)},
    ],
)
def test_a_call_that_cannot_be_cut_is_recomputed_whole(arguments: dict[str, Any]) -> None:
    lengths: list[torch.Size] = []

    class Noting(nn.Linear):
        def forward(self, hidden: Tensor, mask: Any = None) -> Tensor:
            lengths.append(hidden.shape)
            return super().forward(hidden).exp()

    module = Noting(plain_models.WIDTH, 3)
    given = {"hidden": torch.ones(2, 6, plain_models.WIDTH)} | arguments
    run_tiled(Tiling(3), module, None, **given).sum().backward()
    assert lengths == [given["hidden"].shape] * 2


# --- The model around it. ---


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_in_tiles_with_weights_of_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    case = llama()
    with hf_ckpt.apply(case.model, "full", tiles=3):
        exactness.step(case)
        twin = zoo.Case("llama", copied(case.model), case.inputs)
        with torch.no_grad():
            twin.model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
        with exactness.counted_entries(twin.model) as (forward, _):
            changed = exactness.step(twin)
    assert forward["model.layers.1.mlp.up_proj"] == 3
    assert not torch.equal(changed[0], exactness.step(case)[0])


def test_removal_leaves_no_trace() -> None:
    case = llama()
    found = traces.snapshot(case.model)
    applied = hf_ckpt.apply(case.model, "ffn", tiles=3)
    exactness.step(case)
    applied.remove()
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []


def faults(model: nn.Module, run: Callable[[], object], mode: str) -> list[str]:
    # Not `hf_ckpt.apply`, which watches by itself.
    with patch.apply(model, mode, tiles=3) as applied:
        watch = FirstStep(model, applied.plan, find_layers(model))
        watch.start()
        run()
        return watch.finish()


@every_mode
@pytest.mark.parametrize("adapters", [False, True])
def test_the_first_step_is_as_planned(mode: str, adapters: bool) -> None:
    case = llama()
    case = exactness.lora(case) if adapters else case
    assert faults(case.model, lambda: exactness.step(case), mode) == []


def test_tiles_that_are_not_recomputed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_ckpt.patch.layer_settings.Tiling", partial(Tiling, recomputes=False))
    case = exactness.build("llama")
    (fault,) = faults(case.model, lambda: exactness.step(case), "none")
    assert fault.startswith(
        'Layers 0, 1, 2, 3 of model.layers are set to "none, tiles 3", but the forward of ffn ran once in step 1'
    )


def test_an_adapter_in_tiles_that_gets_no_gradient_is_said(caplog: pytest.LogCaptureFixture) -> None:
    case = exactness.lora(llama())
    adapter = case.model.base_model.model.model.layers[1].mlp.down_proj

    def detached(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach()

    adapter.lora_A["default"].register_forward_hook(detached)
    # The model's own affair: without a plan it gets none either.
    with caplog.at_level(logging.INFO, logger="hf_ckpt.trainer.first_step"):
        assert faults(case.model, lambda: exactness.step(case), "full") == []
    (said,) = (record.getMessage() for record in caplog.records if record.name == "hf_ckpt.trainer.first_step")
    assert said.startswith("1 trainable parameter got no gradient in step 1: base_model.")
    assert "layers.1.mlp.down_proj.lora_A.default.weight. If" in said
