"""What is found in a model: stacks, layers, parts; and what is said when it cannot be found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import hf_ckpt
from hf_ckpt.errors import PolicyError, StructureError
from hf_ckpt.structure.layers import Layer, find_layers, modules_of
from tests import exactness, plain_models, zoo

pytestmark = pytest.mark.core

USUAL = ("self_attn", "mlp")
# Model type -> stacks as (path, roles, parts), parts as (attention, ffn) of the layers, which take turns.
EXPECTED: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "llama": [("model.layers", "decoder language", [USUAL])],
    "mistral": [("model.layers", "decoder language", [USUAL])],
    "qwen2": [("model.layers", "decoder language", [USUAL])],
    "qwen3": [("model.layers", "decoder language", [USUAL])],
    "gemma2": [("model.layers", "decoder language", [USUAL])],
    "gemma3_text": [("model.layers", "decoder language", [USUAL])],
    "phi3": [("model.layers", "decoder language", [USUAL])],
    "gpt2": [("transformer.h", "decoder language", [("attn", "mlp")])],
    "gpt_neox": [("gpt_neox.layers", "decoder language", [("attention", "mlp")])],
    "opt": [("model.decoder.layers", "decoder language", [("self_attn", "inline")])],
    "bloom": [("transformer.h", "decoder language", [("self_attention", "mlp")])],
    "falcon": [("transformer.h", "decoder language", [("self_attention", "mlp")])],
    "olmo2": [("model.layers", "decoder language", [USUAL])],
    "granite": [("model.layers", "decoder language", [USUAL])],
    "starcoder2": [("model.layers", "decoder language", [USUAL])],
    "mixtral": [("model.layers", "decoder language", [USUAL])],
    "qwen2_moe": [("model.layers", "decoder language", [USUAL])],
    "bamba": [("model.layers", "decoder language", [("mamba", "feed_forward"), ("self_attn", "feed_forward")])],
    "jamba": [("model.layers", "decoder language", [("mamba", "feed_forward"), ("self_attn", "feed_forward")])],
    "t5": [
        ("encoder.block", "encoder language", [("layer.0", "layer.1")]),
        ("decoder.block", "decoder language", [("layer.0 layer.1", "layer.2")]),
    ],
    "bert": [("bert.encoder.layer", "encoder language", [("attention", "inline")])],
    "qwen2_vl": [
        ("model.visual.blocks", "vision", [("attn", "mlp")]),
        ("model.language_model.layers", "decoder language", [USUAL]),
    ],
}


def parts(layer: Layer) -> tuple[str, str]:
    return " ".join(layer.attention), "inline" if layer.ffn_is_inline else " ".join(layer.ffn)


def found(model: nn.Module, **arguments: object) -> list[tuple[str, str, list[tuple[str, str]]]]:
    return [
        (stack.path, " ".join(sorted(stack.roles)), [parts(layer) for layer in stack.layers])
        for stack in find_layers(model, **arguments)
    ]


def expected(model_type: str, prefix: str = "", num_layers: int = 4) -> list[tuple[str, str, list[tuple[str, str]]]]:
    return [
        (prefix + path, roles, [turns[idx % len(turns)] for idx in range(num_layers)])
        for path, roles, turns in EXPECTED[model_type]
    ]


def needing_gradient(model: nn.Module) -> list[str]:
    """Write each stack as one letter per layer: y for those that need a gradient, n for the others."""
    return ["".join("ny"[layer.needs_gradient] for layer in stack.layers) for stack in find_layers(model)]


def frozen(model: nn.Module, *trainable: str) -> nn.Module:
    """Freeze all parameters but those whose name contains one of the words."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in trainable))
    return model


# --- Models of transformers. ---


def test_every_core_model_is_in_the_table() -> None:
    assert set(EXPECTED) == set(zoo.CORE)


@pytest.mark.parametrize("model_type", zoo.CORE)
def test_stacks_and_parts_are_found(model_type: str) -> None:
    assert found(exactness.build(model_type).model) == expected(model_type)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning:peft")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning:peft")
@pytest.mark.parametrize("model_type", zoo.CORE)
def test_stacks_and_parts_are_found_behind_lora(model_type: str) -> None:
    model = get_peft_model(exactness.build(model_type).model, LoraConfig(r=2, target_modules="all-linear"))
    assert found(model) == expected(model_type, prefix="base_model.model.")


def test_layers_are_the_modules_themselves_by_layer_idx() -> None:
    model = exactness.build("llama").model
    (stack,) = find_layers(model)
    assert [layer.layer_idx for layer in stack.layers] == [0, 1, 2, 3]
    assert all(layer.module is module for layer, module in zip(stack.layers, model.model.layers, strict=True))
    assert stack.owner is model.model


def test_finding_changes_nothing() -> None:
    model = exactness.build("bert").model
    before = [(name, id(module), sorted(module.__dict__)) for name, module in model.named_modules()]
    find_layers(model)
    assert [(name, id(module), sorted(module.__dict__)) for name, module in model.named_modules()] == before


@pytest.mark.parametrize(
    ("model_type", "types"),
    [
        ("llama", [None] * 4),
        ("qwen3", ["full_attention"] * 4),
        ("gemma2", ["sliding_attention", "full_attention"] * 2),
        ("gemma3_text", ["sliding_attention", "full_attention"] * 2),
    ],
)
def test_layer_types_are_the_models_own_words(model_type: str, types: list[str | None]) -> None:
    (stack,) = find_layers(exactness.build(model_type).model)
    assert [layer.layer_type for layer in stack.layers] == types


def test_layers_of_hybrids_differ_in_type() -> None:
    # transformers 5.0 calls them "mamba" and "attention", 5.23 "linear_attention" and "full_attention".
    (stack,) = find_layers(exactness.build("bamba").model)
    types = [layer.layer_type for layer in stack.layers]
    assert types in (["mamba", "attention"] * 2, ["linear_attention", "full_attention"] * 2)


def test_rule_per_stack_reaches_the_tower_it_names() -> None:
    model = exactness.build("qwen2_vl").model
    with hf_ckpt.apply(model, {"stack": "vision", "mode": "full"}) as applied:
        assert applied.summary() == (
            "model.visual.blocks: 4 layers\n  0 to 3       full\nmodel.language_model.layers: 4 layers\n"
            "  0 to 3       none"
        )


def test_layers_in_wrappers_are_found() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    assert found(Wrapper(exactness.build("llama").model)) == expected("llama", prefix="module.")


def test_layers_on_the_meta_device_are_found() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(zoo.config("llama", "causal"))
    assert found(model) == expected("llama")


# --- Which layers need a gradient. ---


@pytest.mark.parametrize(
    ("model_type", "trainable", "layers"),
    [
        ("llama", ["model"], ["yyyy"]),
        ("llama", [], ["nnnn"]),
        ("llama", ["layers.2."], ["nnyy"]),
        ("llama", ["layers.3."], ["nnny"]),
        ("llama", ["embed_tokens"], ["yyyy"]),
        # What stands behind the layers does not make them need one.
        ("llama", ["lm_head", "model.norm"], ["nnnn"]),
        # A tower sees only itself; the language model sees the towers.
        ("qwen2_vl", ["language_model.layers.2."], ["nnnn", "nnyy"]),
        ("qwen2_vl", ["visual.blocks.1."], ["nyyy", "yyyy"]),
        ("qwen2_vl", ["visual.patch_embed"], ["yyyy", "yyyy"]),
        # What else a tower holds may run before its layers; whether it does, its structure does not tell.
        ("qwen2_vl", ["visual.merger"], ["yyyy", "yyyy"]),
    ],
)
def test_layers_behind_a_trainable_parameter_need_a_gradient(
    model_type: str, trainable: list[str], layers: list[str]
) -> None:
    assert needing_gradient(frozen(exactness.build(model_type).model, *trainable)) == layers


def test_layers_below_the_first_adapter_need_no_gradient() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[2, 3])
    assert needing_gradient(get_peft_model(exactness.build("llama").model, config)) == ["nnyy"]


def test_skip_frozen_leaves_a_frozen_tower_alone() -> None:
    model = frozen(exactness.build("qwen2_vl").model, "language_model")
    with hf_ckpt.apply(model, "full", skip_frozen=True) as applied:
        assert applied.summary() == (
            "model.visual.blocks: 4 layers\n  0 to 3       none (frozen)\nmodel.language_model.layers: 4 layers\n"
            "  0 to 3       full"
        )


# --- Models written by hand. ---


@pytest.mark.parametrize("policy", exactness.POLICIES)
def test_model_without_transformers_is_exact(policy: str) -> None:
    torch.manual_seed(0)
    case = plain_models.case(plain_models.Decoder())
    assert found(case.model) == [("blocks", "decoder language", [("attention", "mlp")] * 4)]
    with exactness.counted_entries(case.model) as (_, backward):
        assert exactness.check(case, policy) == []
    assert bool(backward) == (policy != "none")


class Stage(nn.Module):
    """A layer in which nothing tells what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), plain_models.Attention(), plain_models.Mlp()
        self.first, self.second = Nameless(self.first), Nameless(self.second)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.first(self.norm(hidden))
        return hidden + self.second(hidden)


class Nameless(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)


def stages() -> zoo.Case:
    torch.manual_seed(0)
    return plain_models.case(plain_models.Decoder([Stage() for _ in range(3)]))


def test_unknown_model_shows_what_was_seen() -> None:
    with pytest.raises(StructureError) as raised:
        find_layers(stages().model)
    assert str(raised.value) == (
        "No decoder layers were found in Decoder. Lists of modules seen: blocks (3 x Stage). Name the list of layers "
        'with layers="<dotted path>".'
    )


def test_model_without_lists_says_so() -> None:
    with pytest.raises(StructureError) as raised:
        find_layers(nn.Linear(2, 2))
    assert str(raised.value) == (
        "No decoder layers were found in Linear. It holds no list of modules. Name the list of layers with "
        'layers="<dotted path>".'
    )


def test_long_lists_of_lists_are_cut() -> None:
    model = nn.ModuleDict({f"part_{number}": nn.ModuleList([nn.Linear(2, 2)]) for number in range(20)})
    with pytest.raises(StructureError, match=r"part_10 \(1 x Linear\), and 9 more\. Name the list"):
        find_layers(model)


def test_lists_without_layers_are_no_stack() -> None:
    model = plain_models.Decoder()
    model.heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model.merger = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model.empty = nn.ModuleList()
    assert [stack.path for stack in find_layers(model)] == ["blocks"]


def test_lists_inside_layers_are_no_stack() -> None:
    blocks = [plain_models.Block() for _ in range(2)]
    for block in blocks:
        block.mlp.experts = nn.ModuleList([plain_models.Block(), plain_models.Block()])
    assert [stack.path for stack in find_layers(plain_models.Decoder(blocks))] == ["blocks"]


# --- The arguments that settle what was not found. ---


def test_layers_argument_names_the_list() -> None:
    case = stages()
    assert found(case.model, layers="blocks") == [("blocks", "decoder language", [("", "")] * 3)]
    expected_step = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", layers="blocks") as applied:
        assert applied.summary() == "blocks: 3 layers\n  0 to 2       full"
        with exactness.counted_entries(case.model) as (_, backward):
            assert exactness.differences(expected_step, exactness.step(case)) == []
    assert [backward[f"blocks.{idx}.first"] for idx in range(3)] == [1, 1, 1]


def test_layers_argument_takes_several_lists_in_the_order_given() -> None:
    model = exactness.build("t5").model
    assert [stack.path for stack in find_layers(model, layers="decoder.block")] == ["decoder.block"]
    both = find_layers(model, layers=["decoder.block", "encoder.block"])
    assert [stack.path for stack in both] == ["decoder.block", "encoder.block"]


@pytest.mark.parametrize(("part", "name", "inner"), [("attention", "first", "query"), ("ffn", "second", "up")])
def test_part_arguments_name_the_parts(part: str, name: str, inner: str) -> None:
    case = stages()
    expected_step = exactness.step(case)
    with hf_ckpt.apply(case.model, part, layers="blocks", **{part: name}) as applied:
        assert applied.summary() == f"blocks: 3 layers\n  0 to 2       {part}"
        with exactness.counted_entries(case.model) as (_, backward):
            assert exactness.differences(expected_step, exactness.step(case)) == []
    assert {path for path in backward if path.endswith(("query", "up"))} == {
        f"blocks.{idx}.{name}.inner.{inner}" for idx in range(3)
    }


def test_attention_argument_makes_a_list_a_stack() -> None:
    assert found(stages().model, attention="first") == [("blocks", "decoder language", [("first", "")] * 3)]


def test_part_arguments_settle_inline_ffns() -> None:
    (stack,) = find_layers(exactness.build("opt").model, ffn="fc1")
    assert [parts(layer) for layer in stack.layers] == [("self_attn", "fc1")] * 4


def test_part_arguments_may_fit_some_layers_only() -> None:
    (stack,) = find_layers(exactness.build("bamba").model, attention="mamba")
    assert [layer.attention for layer in stack.layers] == [("mamba",), (), ("mamba",), ()]


def refuses(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


def test_unknown_list_raises_with_the_nearest() -> None:
    model = stages().model
    refuses(
        lambda: find_layers(model, layers="block"),
        StructureError,
        'layers="block" is not a list of modules in Decoder. Lists of modules seen: blocks (3 x Stage). Did you mean '
        '"blocks"?',
    )
    refuses(
        lambda: find_layers(model, layers=["blocks", "embedding"]),
        StructureError,
        'layers="embedding" is not a list of modules in Decoder. Lists of modules seen: blocks (3 x Stage).',
    )


@pytest.mark.parametrize("part", ["attention", "ffn"])
def test_unknown_part_raises_with_the_children_of_a_layer(part: str) -> None:
    refuses(
        lambda: find_layers(stages().model, layers="blocks", **{part: "secnd"}),
        StructureError,
        f'{part}="secnd" is not in any layer. Stage has norm, first, second. Did you mean "second"?',
    )
    refuses(
        lambda: find_layers(stages().model, layers="blocks", **{part: ["second"]}),
        StructureError,
        f"{part} is ['second']. Use the name that each layer has for its {part}.",
    )


def test_policy_for_a_part_that_was_not_found_names_the_argument() -> None:
    refuses(
        lambda: hf_ckpt.apply(stages().model, "ffn", layers="blocks"),
        PolicyError,
        'Rule {mode: "ffn"} asks for "ffn", but no ffn was found in the layers of Decoder that it reaches. Name it '
        'with ffn="<attribute of the layer>", or use mode "full".',
    )


# --- Attention that can be kept. ---


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", [True] * 4),
        ("gpt2", [True] * 4),
        ("t5", [True] * 8),
        ("bert", [True] * 4),
        # Attention in windows, and in the decoder whole.
        ("led", [True] * 8),
        # Mixers of states and convolutions, whatever they are called.
        ("mamba", [False] * 4),
        ("rwkv", [False] * 4),
        ("minimax", [True, False] * 2),
        ("bamba", [False, True] * 2),
        ("jamba", [False, True] * 2),
        # Routers of experts have a softmax too.
        ("mixtral", [True] * 4),
    ],
)
def test_layers_that_compute_attention(model_type: str, expected: list[bool]) -> None:
    layers = [layer for stack in find_layers(exactness.build(model_type).model) for layer in stack.layers]
    assert [layer.computes_attention for layer in layers] == expected


def mixed(hidden: Tensor) -> Tensor:
    return attended(hidden, hidden)


def attended(query: Tensor, value: Tensor) -> Tensor:
    return (query @ value.mT).softmax(-1) @ value


class Mixer(nn.Module):
    """Averages positions."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(plain_models.WIDTH, plain_models.WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.value(hidden).mean(1, keepdim=True).expand_as(hidden)


class Attending(Mixer):
    """Attention by way of a function that calls another."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return mixed(self.value(hidden))


def test_attention_in_a_function_and_in_the_forward_of_an_instance_is_seen() -> None:
    case = plain_models.case()
    for block, attention in zip(case.model.blocks, (Mixer(), Attending(), Mixer()), strict=False):
        block.attention = attention
    case.model.blocks[2].attention.forward = partial(plain_models.Attention.forward, case.model.blocks[2].attention)
    (stack,) = find_layers(case.model)
    assert [layer.computes_attention for layer in stack.layers] == [False, True, True, True]


# --- What is no model, and no path. ---


@pytest.mark.parametrize(
    ("given", "shown"), [("meta-llama/Llama-2-7b-hf", '"meta-llama/Llama-2-7b-hf"'), (None, "a NoneType")]
)
def test_what_is_no_model_is_refused(given: Any, shown: str) -> None:
    for call in (find_layers, lambda model: hf_ckpt.apply(model, "full")):
        with pytest.raises(StructureError) as raised:
            call(given)
        assert str(raised.value) == (
            f"The model is {shown}, and a torch.nn.Module is needed. Load it first: "
            "AutoModelForCausalLM.from_pretrained(...)."
        )


@pytest.mark.parametrize("layers", [3, [0, 1]])
def test_numbers_are_no_paths_of_layers(layers: Any) -> None:
    with pytest.raises(StructureError) as raised:
        find_layers(plain_models.case().model, layers=layers)
    assert str(raised.value).startswith(
        f"layers is {layers}. Use the dotted path of a list of layers, or several. Lists"
    )


def test_model_in_the_place_of_the_policy_is_named_by_its_type() -> None:
    with pytest.raises(PolicyError, match=r"^Policy of type Decoder cannot be read\. Use a mode name"):
        hf_ckpt.apply("full", plain_models.case().model)


def test_modules_are_those_of_torch_in_the_same_order_though_one_is_in_two_places() -> None:
    shared = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"a": nn.Sequential(shared[1], shared), "b": shared, "c": nn.ModuleList([nn.Tanh()])})
    model.register_module("none", None)
    assert list(modules_of(model)) == list(model.modules())


class Mixing(nn.Module):
    """Computes no attention until another forward is put in the place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(plain_models.WIDTH, plain_models.WIDTH) for _ in range(3))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed: Tensor = self.value(hidden).cumsum(1)
        return mixed


def test_what_a_class_computes_is_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = plain_models.case()
    for block in case.model.blocks:
        block.attention = Mixing()
    assert not any(layer.computes_attention for layer in find_layers(case.model)[0].layers)
    monkeypatch.setattr(Mixing, "forward", plain_models.Attention.forward)
    assert all(layer.computes_attention for layer in find_layers(case.model)[0].layers)
