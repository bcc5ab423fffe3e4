"""A frozen input embedding that lies in host memory: the step is that without it, and who cannot wait is named."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Gemma3TextConfig, LlamaConfig, T5Config

import hf_ckpt
from hf_ckpt.errors import PolicyError, RecomputationError, UnsupportedError
from hf_ckpt.patch.frozen_weights import let_wait_until_planned
from hf_ckpt.policy.plan import Plan
from hf_ckpt.regions.offload.cuda import CudaDevice, CudaWire
from hf_ckpt.regions.offload.host_memory import HostLimits
from hf_ckpt.regions.offload.transfer import HostAllocation, PageableMemory, Wire
from hf_ckpt.structure.layers import find_layers
from tests import traces
from tests.late_copies import Late
from tests.regions.test_waiting_weights import LAYERS, are_equal, engine, llama, train, waiting

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {**SIZES, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "tie_word_embeddings": False}


def made(config: Any, auto: Any = AutoModelForCausalLM, **lora: Any) -> nn.Module:
    """A model with adapters, in bfloat16."""
    torch.manual_seed(0)
    adapter = LoraConfig(r=2, **{"target_modules": "all-linear", **lora}, init_lora_weights=False)
    return get_peft_model(auto.from_config(config, dtype=torch.bfloat16), adapter).train()


def embedding(model: Any) -> nn.Embedding:
    found: nn.Embedding = model.get_input_embeddings()
    return found


def neftune(model: nn.Module) -> None:
    """What the Trainer does with `neftune_noise_alpha`."""

    def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + torch.zeros_like(output).uniform_(-0.1, 0.1)

    embedding(model).register_forward_hook(add_noise)


def renormed(model: nn.Module) -> None:
    embedding(model).max_norm = 0.5


def with_input_gradients(model: Any) -> None:
    model.enable_input_require_grads()


def as_it_is(model: nn.Module) -> None:
    pass


# Gemma's embedding multiplies what it looks up, in its own forward. `max_norm` writes to the rows.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: made(LlamaConfig(**COMMON)),
    "gemma3": lambda: made(Gemma3TextConfig(**COMMON, head_dim=16)),
}
CHANGES = [as_it_is, neftune, renormed, with_input_gradients]


@pytest.mark.parametrize("options", [{"embedding": "cpu"}, {"weights": "cpu"}], ids=["alone", "with layers"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_without_it(name: str, change: Callable[[nn.Module], None], options: dict[str, str]) -> None:
    plain, model = MODELS[name](), MODELS[name]()
    change(plain)
    change(model)
    expected, before = train(plain), traces.snapshot(model)
    parameter, address = embedding(model).weight, embedding(model).weight.data_ptr()
    with hf_ckpt.apply(model, "full", **options) as applied:
        (table, _), *_ = engine(applied).tables
        assert embedding(model).weight is parameter
        assert parameter.data_ptr() != address
        assert table.num_bytes == parameter.nbytes <= engine(applied).host_bytes
        assert are_equal(train(model), expected)
    assert torch.equal(parameter, embedding(plain).weight)
    model.zero_grad()
    if change is not renormed:
        assert traces.differences(before, traces.snapshot(model)) == []


def test_encoder_and_decoder_look_up_in_one_table() -> None:
    config = T5Config(d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, vocab_size=64)
    config.decoder_start_token_id = 0
    plain, model = (made(config, AutoModelForSeq2SeqLM) for _ in range(2))
    for each in (plain, model):
        # As released from version 1.1 on.
        each.base_model.model.lm_head.weight = nn.Parameter(embedding(each).weight.data.clone(), requires_grad=False)
    expected = train(plain)
    with hf_ckpt.apply(model, "full", embedding="cpu") as applied:
        assert [len(table.names) for table, _ in engine(applied).tables] == [1]
        assert are_equal(train(model), expected)


class PerLayerTable(nn.Module):
    """Looks up in a second table, larger than the first, as Gemma 3n does for each layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.per_layer = nn.Embedding(64, 128, dtype=torch.bfloat16).requires_grad_(False)
        self.positions = nn.Embedding(8, 64, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        found = self.model(input_ids=input_ids, **inputs)
        return SimpleNamespace(loss=found.loss + self.per_layer(input_ids).float().mean())


def test_a_table_that_is_no_smaller_waits_too() -> None:
    torch.manual_seed(1)
    plain = PerLayerTable(made(LlamaConfig(**COMMON)))
    model = copy.deepcopy(plain)
    expected = train(plain)
    with hf_ckpt.apply(model, "none", embedding="cpu") as applied:
        paths = [table.name for table, _ in engine(applied).tables]
        assert paths == ["model.base_model.model.model.embed_tokens", "per_layer"]
        assert are_equal(train(model), expected)


# --- Who looks, and what others do. ---


def test_copies_pickles_and_moves_train_alike() -> None:
    expected, model = train(llama(8)), llama(8)
    with waiting(model) as applied:
        state = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        copied = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        (table, _), *_ = engine(applied).tables
        model.to("cpu")
        assert table.is_packed
        assert are_equal(train(model), expected)
        assert are_equal(train(copied), expected)
        assert are_equal(train(loaded), expected)
        weight = next(name for name in state if "embed_tokens" in name)
        kept = model.state_dict()[weight]
        assert torch.equal(kept, state[weight])
    # Whoever kept it reads it after the plan has gone.
    assert torch.equal(kept, state[weight])
    assert not table.is_packed


def test_another_dtype_waits_too() -> None:
    plain, model = llama(), llama()
    with waiting(model) as applied:
        (table, _), *_ = engine(applied).tables
        held = table.num_bytes
        model.to(torch.float32)
        assert table.is_packed
        assert table.num_bytes == 2 * held
        assert are_equal(train(model), train(plain.to(torch.float32)))


def test_what_is_unfrozen_later_trains() -> None:
    def thaw(model: Any) -> Callable[[], None]:
        return lambda: embedding(model).requires_grad_(True) and None

    plain, model = llama(), llama()
    expected = train(plain, between=thaw(plain))
    with waiting(model, "none"):
        assert are_equal(train(model, between=thaw(model)), expected)
    assert torch.equal(embedding(plain).weight, embedding(model).weight)


def test_a_leaner_plan_takes_it_over() -> None:
    apply = hf_ckpt.patch.apply.apply
    model, plain = llama(), llama()
    with apply(model, "none", embedding="cpu") as applied:
        (table, _), *_ = engine(applied).tables
        address = embedding(model).weight.data_ptr()
        applied.adopt(applied.exchange(lambda: apply(model, "full", weights="cpu")))
        assert engine(applied).tables[0][0] is table
        assert embedding(model).weight.data_ptr() == address
        assert are_equal(train(model, steps=1), train(plain, steps=1))
        applied.adopt(applied.exchange(lambda: apply(model, "full")))
        assert not table.is_packed
        assert are_equal(train(model, steps=1), train(plain, steps=1))


@pytest.mark.parametrize("policy", [{"weights": "cpu"}, {}])
def test_a_model_that_was_loaded_onto_the_host_waits_until_planned(policy: dict[str, str]) -> None:
    plain, model = llama(), llama()
    before = traces.snapshot(model)
    let_wait_until_planned(model, find_layers(model), torch.device("cpu"))
    address = embedding(model).weight.data_ptr()
    with hf_ckpt.apply(model, "full", **policy):
        assert (embedding(model).weight.data_ptr() == address) is bool(policy)
        assert are_equal(train(model), train(plain))
    model.zero_grad()
    assert traces.differences(before, traces.snapshot(model)) == [] or policy == {}


def test_what_waits_until_planned_is_not_brought_to_the_device_in_between() -> None:
    """All layers at once would not fit there."""
    model = llama()
    frozen = {name: each for name, each in model.named_parameters() if "layers" in name and "base_layer" in name}
    layers = model.base_model.model.model.layers
    let_wait_until_planned(model, find_layers(model), torch.device("cpu"))
    for layer in layers:
        # What it is after the model was moved; and a device that has no values, for want of another one.
        vars(layer)[hf_ckpt.patch.frozen_weights._HANDED_OVER].device = torch.device("meta")
    for layer in layers:
        assert hf_ckpt.patch.frozen_weights._taken_over(layer) is not None
    assert {each.device.type for each in frozen.values()} == {"cpu"}
    assert {each.device.type for name, each in layers.named_parameters() if "lora" in name} == {"meta"}


# --- The proof, and the device. ---


def test_memory_that_is_anothers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    others = PageableMemory(2**16)
    others.bytes.zero_()
    monkeypatch.setattr(Wire, "map", lambda wire, memory, device: others.bytes[: memory.bytes.numel()])
    model = llama()
    with hf_ckpt.apply(model, "none", embedding="cpu"), pytest.raises(RecomputationError, match="embed_tokens"):
        train(model, steps=1)
    model = llama()
    with hf_ckpt.apply(model, "none", embedding="cpu", prove="off"):
        assert not are_equal(train(model, steps=1), train(llama(), steps=1))


def test_late_copies_change_nothing() -> None:
    model, device = llama(4), Late()
    with waiting(model, "selective") as applied:
        engine(applied).use_wire(CudaWire(device))
        for weights, _ in engine(applied).tables:
            weights.bring_back()
        assert are_equal(train(model), train(llama(4)))
    assert device.faults == []


def test_a_device_that_cannot_read_host_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(memory: Any, device: torch.device) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(torch, "as_tensor", fails)
    for wire in (Wire(), CudaDevice()):
        with pytest.raises(UnsupportedError, match="cannot read host memory in place"):
            wire.map(PageableMemory(8), torch.device("cuda", 0))


def test_memory_that_torch_has_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="pinned by another device"):
        CudaDevice().map(PageableMemory(8), torch.device("cuda", 0))


def test_what_torch_is_told_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: HostAllocation = PageableMemory(24)
    told: list[dict[str, Any]] = []

    def as_tensor(mapped: Any, device: torch.device) -> Tensor:
        told.append(mapped.__cuda_array_interface__)
        return memory.bytes

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    assert CudaDevice().map(memory, torch.device("cuda", 0)) is memory.bytes
    data = (memory.bytes.data_ptr(), False)
    assert told == [{"shape": (24,), "typestr": "|u1", "data": data, "version": 2}]


def test_a_host_without_room_is_one_error_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise hf_ckpt.errors.HostMemoryError("planted")

    monkeypatch.setattr(HostLimits, "check", fails)
    model = llama()
    before = traces.snapshot(model)
    with pytest.raises(hf_ckpt.errors.HostMemoryError, match="planted"):
        hf_ckpt.apply(model, "full", embedding="cpu")
    assert traces.differences(before, traces.snapshot(model)) == []


# --- What cannot wait. ---


def in_4_bit(model: Any) -> Any:
    """Replace the input embedding by one of bitsandbytes in 4 bits."""
    weight = model.model.embed_tokens.weight.data
    model.model.embed_tokens = bnb.nn.Embedding4bit(*weight.shape, dtype=torch.bfloat16)
    model.model.embed_tokens.weight = bnb.nn.Params4bit(weight, requires_grad=False)
    return model.to("cpu")


def other(**lora: Any) -> Callable[[], nn.Module]:
    return lambda: made(LlamaConfig(**COMMON), **lora)


def quantised() -> nn.Module:
    plain = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON), dtype=torch.bfloat16)
    return get_peft_model(in_4_bit(plain), LoraConfig(r=2, target_modules=["q_proj"]))


def tied() -> nn.Module:
    return made(LlamaConfig(**{**COMMON, "tie_word_embeddings": True}))


STAYS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (tied, "tied to base_model.model.lm_head, which reads all of it"),
    "trained": (lambda: other()().requires_grad_(True), "trained"),
    "lora": (other(target_modules=["q_proj", "embed_tokens"]), "computed by Embedding"),
    "modules_to_save": (other(modules_to_save=["embed_tokens"]), "computed by ModulesToSaveWrapper"),
    "token_indices": (other(trainable_token_indices=[1, 2]), "computed by TrainableTokensWrapper"),
    "4 bits": (quantised, "a Params4bit"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_cannot_wait_stays_or_is_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build, reason = STAYS[name]
    with pytest.raises(UnsupportedError, match=reason):
        hf_ckpt.apply(build(), "full", embedding="cpu")
    if name == "trained":
        return
    with caplog.at_level(logging.INFO), waiting(build()) as applied:
        assert engine(applied).tables == ()
        assert "embedding" not in applied.plan.describe()
    assert reason in caplog.text


def test_a_model_without_one_is_refused() -> None:
    model = nn.Module()
    model.layers = made(LlamaConfig(**COMMON)).base_model.model.model.layers
    with pytest.raises(UnsupportedError, match="Module does not name one"):
        hf_ckpt.apply(model, "full", layers="layers", embedding="cpu")


def test_plans_and_policies_say_it() -> None:
    apply = hf_ckpt.patch.apply.apply
    model = llama()
    for options, said in (
        ({"embedding": "cpu"}, "layers: 4 full; embedding: cpu"),
        ({"weights": "cpu"}, "layers: 4 full + weights; embedding: cpu"),
        ({"weights": "cpu", "embedding": "device"}, "layers: 4 full + weights"),
    ):
        with apply(model, "full", **options) as applied:
            plan = applied.plan
        assert plan.describe().endswith(said)
        assert Plan.from_json(plan.to_json()) == plan
        with apply(model, plan) as applied:
            assert (engine(applied).tables != ()) is ("embedding" in said) if options else True
    with pytest.raises(PolicyError, match='embedding is "disk"'):
        apply(model, "full", embedding="disk")
    with apply(model, "none", embedding="cpu") as applied:
        assert not applied.plan.does_nothing


def test_ddp_leaves_out_each_name_of_what_waits() -> None:
    model = llama()
    layers = model.base_model.model.model.layers
    layers[1].mlp.up_proj.base_layer.weight = layers[1].mlp.gate_proj.base_layer.weight
    with waiting(model):
        left_out = set(model._ddp_params_and_buffers_to_ignore)
    path = "base_model.model.model.layers.1.mlp"
    assert {f"{path}.{name}_proj.base_layer.weight" for name in ("gate", "up")} <= left_out
    assert "base_model.model.model.embed_tokens.weight" in left_out
    assert len(left_out) == LAYERS * 7 + 1
