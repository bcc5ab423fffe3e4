"""Frozen weights that wait on the host: the step is that without it, bit by bit, whoever looks meanwhile."""

from __future__ import annotations

import copy
import io
import itertools
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt.errors import HostMemoryError, PolicyError, RecomputationError, UnsupportedError
from hf_ckpt.patch.apply import Applied
from hf_ckpt.policy.plan import Plan
from hf_ckpt.regions.offload.cuda import CudaCopy, CudaWire
from hf_ckpt.regions.offload.transfer import Wire
from hf_ckpt.regions.waiting_weights import LayerWeights, WaitingWeights
from hf_ckpt.structure.layers import find_layers
from tests import exactness, modes, traces, zoo
from tests.late_copies import Late

LAYERS = 4
# Decoders of several kinds, a hybrid, a mixture, an encoder, an encoder-decoder, a tower.
FEW = ["llama", "gemma2", "jamba", "mixtral", "t5", "qwen2_vl"]
MANY = [*FEW, *(name for name in zoo.CORE if name not in FEW), "deepseek_v3", "gpt_oss", "smollm3"]
POLICIES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("none", "full", "attention", "ffn", "selective", "selective_attention")},
    "every_2": ("full", {"every_n_layers": 2}),
    "offload": ("full", {"offload": modes.CPU}),
}


@pytest.fixture(autouse=True)
def _no_noise() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MatMul8bitLt: inputs will be cast")
        yield


def quantised(linear: nn.Linear, bits: int) -> nn.Module:
    made: Any
    if bits == 4:
        made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
        made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=made)
    else:
        made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    return made.to("cpu")


def llama(bits: int = 16, *, layers: int = LAYERS, **lora: Any) -> nn.Module:
    """A Llama with adapters and dropout, over weights of so many bits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for layer in model.model.layers if bits < 16 else ():
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, quantised(child, bits))
    # Adapters that start at zero would give their first matrices no gradient.
    adapter = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False, **lora)
    return get_peft_model(model, adapter).train()


def train(model: nn.Module, *, steps: int = 3, between: Callable[[], None] | None = None) -> list[Tensor]:
    """Return losses and gradients of some steps of two micro-batches, which differ in length."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    found = []
    for step in range(steps):
        for micro_batch in range(2):
            torch.manual_seed(2 * step + micro_batch)
            ids = torch.randint(0, 64, (2, 8 + step))
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            found.append(loss.detach())
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between()
    return found


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def engine(applied: Any) -> WaitingWeights:
    found: WaitingWeights | None = applied.waiting
    assert found is not None
    return found


def waiting(model: nn.Module, mode: str = "full", **options: Any) -> Applied:
    return hf_ckpt.apply(model, mode, **{"weights": "cpu", **options})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_step_is_that_without_it(bits: int, policy: str) -> None:
    mode, options = POLICIES[policy]
    expected = train(llama(bits))
    model = llama(bits)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with waiting(model, mode, **options) as applied:
        assert are_equal(train(model), expected)
        # Each layer once in forward and once in backward, but those that backward finds there.
        assert engine(applied).num_fetched == 6 * (2 * len(engine(applied).layers) - 2)
        assert not any(layer.is_on_device for layer in engine(applied).layers)
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    assert all(torch.equal(before[name], each) for name, each in frozen.items())


@pytest.mark.parametrize("policy", ["full", "none", "selective", "ffn"])
@pytest.mark.parametrize("resident", [1, 3, 9])
def test_any_number_of_layers_may_be_resident(resident: int, policy: str) -> None:
    model = llama(4)
    with waiting(model, policy, weights={"to": "cpu", "resident": resident}) as applied:
        assert are_equal(train(model), train(llama(4)))
        assert engine(applied).num_fetched == 6 * (2 * LAYERS - min(resident, LAYERS))


@pytest.mark.parametrize("policy", ["none_tiles", "full_tiles", "full_head", "all"])
def test_modifiers_give_what_they_give_without_it(policy: str) -> None:
    mode, options = modes.MODES[policy]
    expected, model = [], llama(4)
    for weights in ({}, {"weights": "cpu"}):
        model = llama(4)
        with hf_ckpt.apply(model, mode, **options, **weights):
            expected.append(train(model))
    assert are_equal(*expected)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("model_type", MANY)
def test_architectures(model_type: str, policy: str) -> None:
    case = exactness.build(model_type)
    for stack in find_layers(case.model):
        for layer in stack.layers:
            for parameter in layer.module.parameters():
                # Norms and biases train: the gradient passes each layer.
                parameter.requires_grad_(parameter.ndim < 2)
    expected = exactness.step(case)
    case.model.zero_grad()
    found = traces.snapshot(case.model)
    with waiting(case.model, policy) as applied:
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
        assert engine(applied).num_fetched > 0
    case.model.zero_grad()
    left = traces.differences(found, traces.snapshot(case.model))
    # Qwen2-VL keeps that from its forward.
    assert [each for each in left if "rope_deltas" not in each] == []


# --- Copies that come late, and storages that are shared. ---


def late(model: nn.Module, mode: str, **options: Any) -> tuple[list[Tensor], Late]:
    device = Late()
    with waiting(model, mode, **options) as applied:
        engine(applied).use_wire(CudaWire(device))
        return train(model), device


@pytest.mark.parametrize("policy", ["none", "full", "selective", "offload"])
def test_late_copies_change_nothing(policy: str) -> None:
    mode, options = POLICIES[policy]
    found, device = late(llama(4), mode, **options)
    assert device.faults == []
    assert are_equal(found, train(llama(4)))


def test_weights_that_are_used_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaWire, "wait", lambda wire, copy, device: None)
    for mode in ("none", "full", "selective"):
        with pytest.raises(RecomputationError):
            late(llama(4), mode)
    found, _ = late(llama(4), "full", prove="off")
    assert not are_equal(found, train(llama(4)))


def test_a_storage_that_is_emptied_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = Late(), llama()
    with waiting(model, "none") as applied:
        engine(applied).use_wire(CudaWire(device))
        fetched = engine(applied).layers[0]
        for waits in (True, False):
            if not waits:
                monkeypatch.setattr(CudaCopy, "wait_home_stream", lambda copy: None)
            fetched.fetch(engine(applied)._wire(fetched))
            fetched.free()
            for stream in device.streams:
                stream.run_to(stream.num_given)
            # Fetched for nothing, and freed while the copy is under way.
            assert device.faults == ([] if waits else ["the target was emptied"])


@contextmanager
def pooled(applied: Any) -> Iterator[None]:
    """Lend layers one of two storages each time that they are fetched."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        slots = [(layer._memory, [place.on_device for place in layer._places]) for layer in engine(applied).layers[:2]]
        fetch, lent = LayerWeights.fetch, itertools.cycle(slots)

        def from_pool(weights: LayerWeights, wire: Wire) -> None:
            weights._memory, shown = next(lent)
            for place, on_device in zip(weights._places, shown, strict=True):
                place.on_device = on_device
            fetch(weights, wire)

        monkeypatch.setattr(LayerWeights, "fetch", from_pool)
        monkeypatch.setattr(LayerWeights, "free", lambda weights: setattr(weights, "is_on_device", False))
        yield


def test_layers_must_not_share_storages() -> None:
    """4-bit products keep their weight where no hook sees it: of a pool of storages, backward would read another's."""
    expected = train(llama(4), steps=1)
    model = llama(4)
    with waiting(model, "full", prove="off") as applied, pooled(applied):
        found = train(model, steps=1)
    assert all(map(torch.equal, found[:2], expected[:2]))
    assert not are_equal(found, expected)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "every_2"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_first_step_finds_a_storage_that_is_anothers(bits: int, policy: str) -> None:
    mode, options = POLICIES[policy]
    model = llama(bits)
    with waiting(model, mode, **options) as applied, pooled(applied), pytest.raises(RecomputationError):
        train(model, steps=1)


# --- Who looks, and what others do. ---


@pytest.mark.parametrize("bits", [16, 8])
def test_who_looks_meanwhile_sees_the_weights(bits: int) -> None:
    # Not of 4 bits: on a CPU these are converted in evaluation.
    model = llama(bits)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    kinds = {name: (type(each), each.dtype, each.shape) for name, each in model.named_parameters()}
    ids = torch.randint(0, 64, (2, 8))
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(
            all(
                torch.equal(value, state[name])
                for name, value in model.state_dict().items()
                if isinstance(value, Tensor) and "lora" not in name
            )
        )

    with waiting(model):
        assert [name for name, _ in model.named_parameters()] == names
        assert {name: (type(each), each.dtype, each.shape) for name, each in model.named_parameters()} == kinds
        look()
        hooks = [layer.register_forward_hook(look) for layer in model.base_model.model.model.layers]
        train(model, steps=1, between=look)
        for hook in hooks:
            hook.remove()
        kept = model.state_dict()
        train(model, steps=1)
        assert all(torch.equal(kept[name], state[name]) for name in state if "base_layer.weight" in name)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        assert len(seen) > LAYERS
        with torch.no_grad():
            model.eval()(input_ids=ids)
            look()
            model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
            model.train()
    assert all(seen)


def test_evaluation_and_generation_between_steps_change_nothing() -> None:
    ids = torch.randint(0, 64, (2, 8))

    def evaluate(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                model.eval()
                outputs.append(model(input_ids=ids).logits)
                outputs.append(model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0))
                model.train()

        return run

    outputs: list[Tensor] = []
    plain, model = llama(8), llama(8)
    expected = train(plain, between=evaluate(plain))
    outputs_without = outputs
    outputs = []
    with waiting(model, "selective"):
        assert are_equal(train(model, between=evaluate(model)), expected)
    assert are_equal(outputs, outputs_without)


def loss_of(model: Any, length: int) -> Tensor:
    ids = torch.randint(0, 64, (2, length))
    found: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return found


def two_backwards(model: nn.Module) -> None:
    loss = loss_of(model, 8)
    loss.backward(retain_graph=True)
    loss.backward()


def two_graphs(model: nn.Module) -> None:
    first, second = loss_of(model, 8), loss_of(model, 9)
    first.backward()
    second.backward()


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("run", [two_backwards, two_graphs])
def test_other_ways_to_run_a_backward(run: Callable[[nn.Module], None], policy: str) -> None:
    plain, model = llama(4), llama(4)
    torch.manual_seed(0)
    run(plain)
    with waiting(model, policy):
        torch.manual_seed(0)
        run(model)
    expected, found = exactness.gradients(plain), exactness.gradients(model)
    assert any(each is not None for each in expected.values())
    assert all(each is None or torch.equal(each, found[name]) for name, each in expected.items())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_on_the_way_leaves_everything_whole(where: str) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("planted")

    model, plain = llama(4), llama(4)
    layer = model.base_model.model.model.layers[2]
    with waiting(model):
        register = layer.register_forward_pre_hook if where == "forward" else layer.register_full_backward_pre_hook
        hook = register(fails)
        with pytest.raises(ValueError, match="planted"):
            train(model, steps=1)
        hook.remove()
        model.zero_grad()
        assert are_equal(train(model), train(plain))


def test_copies_train_alike() -> None:
    expected, model = train(llama(4)), llama(4)
    with waiting(model, "selective"):
        copied = copy.deepcopy(model)
        assert are_equal(train(model), expected)
        assert are_equal(train(copied), expected)
        hf_ckpt.remove(copied)
        again = copy.deepcopy(model)
    hf_ckpt.remove(again)
    assert are_equal(train(again, steps=1), train(model, steps=1))


@pytest.mark.parametrize("how", ["written", "data", "replaced", "merged"])
def test_a_change_from_outside_is_kept(how: str) -> None:
    def change(model: Any) -> None:
        weight = model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight
        with torch.no_grad():
            if how == "written":
                weight.mul_(1.5)
            elif how == "data":
                weight.data.mul_(1.5)
            elif how == "replaced":
                weight.data = weight.data * 1.5
            else:
                model.merge_adapter()
                model.unmerge_adapter()

    plain, model = llama(), llama()
    expected = train(plain, between=lambda: change(plain))
    with waiting(model):
        assert are_equal(train(model, between=lambda: change(model)), expected)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_what_is_unfrozen_later_trains() -> None:
    def thaw(model: Any) -> Callable[[], None]:
        return lambda: model.base_model.model.model.layers[2].requires_grad_(True) and None

    plain, model = llama(), llama()
    expected = train(plain, between=thaw(plain))
    with waiting(model, "none"):
        assert are_equal(train(model, between=thaw(model)), expected)


@pytest.mark.parametrize("bits", [16, 4])
def test_a_backward_after_removal_reads_the_weights(bits: int) -> None:
    plain, model = llama(bits, layers=2), llama(bits, layers=2)
    applied = waiting(model, "none")
    torch.manual_seed(0)
    loss_of(plain, 8).backward()
    torch.manual_seed(0)
    loss = loss_of(model, 8)
    applied.remove()
    loss.backward()
    one, other = ([each.grad for each in found.parameters() if each.grad is not None] for found in (plain, model))
    assert are_equal(one, other)


@pytest.mark.parametrize("how", ["unfrozen", "data", "written to data", "unfrozen between forward and backward"])
def test_the_first_step_proves_what_was_changed_before_it(how: str) -> None:
    def change(model: Any) -> None:
        weight = model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight
        if how.startswith("unfrozen"):
            weight.requires_grad_(True)
        elif how == "data":
            weight.data = weight.data * 2
        else:
            # So does `merge_adapter` of peft.
            weight.data.mul_(2)

    def run(model: Any) -> list[Tensor]:
        torch.manual_seed(0)
        loss = loss_of(model, 8) if how.endswith("backward") else None
        change(model)
        if loss is not None:
            loss.backward()
            model.zero_grad()
        return train(model)

    model = llama(layers=2)
    with waiting(model, "none"):
        assert are_equal(run(model), run(llama(layers=2)))


def test_moving_the_model_leaves_what_waits() -> None:
    model, plain = llama(), llama()
    with waiting(model) as applied:
        held = engine(applied).host_bytes
        model.to("cpu")
        assert engine(applied).host_bytes == held
        assert are_equal(train(model), train(plain))
        model.to(torch.float32)
        assert are_equal(train(model), train(plain.to(torch.float32)))
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_leaner_plan_takes_the_weights_over() -> None:
    model, plain = llama(4), llama(4)
    with hf_ckpt.patch.apply.apply(model, "none", weights="cpu") as applied:
        waits = engine(applied).layers
        assert are_equal(train(model, steps=1), train(plain, steps=1))
        applied.adopt(applied.exchange(lambda: hf_ckpt.patch.apply.apply(model, "full", weights="cpu")))
        assert engine(applied).layers == waits
        assert all(layer.is_packed for layer in waits)
        assert are_equal(train(model, steps=1), train(plain, steps=1))
        applied.adopt(applied.exchange(lambda: hf_ckpt.patch.apply.apply(model, "full")))
        assert not any(layer.is_packed for layer in waits)
        assert are_equal(train(model, steps=1), train(plain, steps=1))


def test_where_no_other_plan_can_take_its_place_the_weights_are_back() -> None:
    model, plain = llama(4), llama(4)
    applied = hf_ckpt.patch.apply.apply(model, "none", weights="cpu")
    waits = engine(applied).layers
    with pytest.raises(PolicyError):
        applied.exchange(lambda: hf_ckpt.patch.apply.apply(model, "fall"))
    assert not any(layer.is_packed for layer in waits)
    assert are_equal(train(model, steps=1), train(plain, steps=1))


def test_memory_that_runs_out_while_fetching_leaves_everything_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model = train(llama(4)), llama(4)
    with waiting(model) as applied:
        fill, calls = engine(applied)._wire(engine(applied).layers[0]), []

        def fails(target: Tensor, buffer: Any) -> Any:
            calls.append(target)
            if len(calls) == 5:
                raise torch.OutOfMemoryError("planted")
            return type(fill).fill(fill, target, buffer)

        monkeypatch.setattr(fill, "fill", fails)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            train(model, steps=1)
        model.zero_grad()
        assert are_equal(train(model), expected)


def test_a_host_without_room_is_one_error_and_nothing_is_lost() -> None:
    model = llama(4)
    before = traces.snapshot(model)
    with pytest.raises(HostMemoryError, match="host_memory allows"):
        waiting(model, weights={"to": "cpu", "host_memory": "40KiB"})
    assert traces.differences(before, traces.snapshot(model)) == []


# --- Processes that are killed, and forked. ---


def forked(run: Callable[[], bool]) -> int:
    """Run something in a forked process; return how it ended: 0 if it was true, 1 if not, less than 0 by a signal."""
    child = os.fork()
    if not child:
        code = 2
        with suppress(BaseException):
            code = 0 if run() else 1
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_reads_trains_and_removes() -> None:
    plain, model = llama(), llama()
    first, second, third = (train(plain, steps=1) for _ in range(3))
    frozen = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    with waiting(model) as applied:
        assert are_equal(train(model, steps=1), first)

        def looks_and_goes_on() -> bool:
            now = dict(model.named_parameters())
            same = all(torch.equal(each, now[name]) for name, each in frozen.items())
            same &= are_equal(train(model, steps=1), second)
            applied.remove()
            return same and are_equal(train(model, steps=1), third)

        assert forked(looks_and_goes_on) == 0
        # What it did was its own.
        assert all(each.is_packed for each in engine(applied).weights)
        assert are_equal(train(model, steps=1), second)


class Rows(torch.utils.data.Dataset[Tensor]):
    """Rows that are made with the weights of the model: as a data set that looks up embeddings."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Tensor:
        weights = [self.model.get_input_embeddings().weight, self.model.base_model.model.model.layers[0].mlp.up_proj]
        return torch.stack([weights[0].float().sum(), weights[1].base_layer.weight.float().sum() * number])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader_read_what_waits() -> None:
    model = llama()
    expected = list(torch.utils.data.DataLoader(Rows(model)))
    with waiting(model):
        loader = torch.utils.data.DataLoader(Rows(model), num_workers=2, multiprocessing_context="fork")
        # Begun while a step runs, too.
        for batch, wanted in zip(loader, expected, strict=True):
            assert torch.equal(batch, wanted)
            train(model, steps=1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_process_that_is_killed_in_a_step_takes_nothing_along(where: str) -> None:
    expected, model = train(llama(4)), llama(4)
    with waiting(model) as applied:

        def is_killed() -> bool:
            layer = model.base_model.model.model.layers[2]
            register = layer.register_forward_pre_hook if where == "forward" else layer.register_full_backward_pre_hook
            register(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            return bool(train(model, steps=1))

        assert forked(is_killed) == -signal.SIGKILL
        assert not any(layer.is_on_device for layer in engine(applied).layers)
        assert are_equal(train(model), expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_signal_that_ends_a_step_leaves_everything_whole(where: str) -> None:
    """As launchers end a process that may save first: by a handler that raises."""

    def ends(*_: Any) -> None:
        raise SystemExit(143)

    expected, model = train(llama()), llama()
    before = traces.snapshot(model)
    layer = model.base_model.model.model.layers[2]
    found = signal.signal(signal.SIGTERM, ends)
    try:
        with waiting(model):
            register = layer.register_forward_pre_hook if where == "forward" else layer.register_full_backward_pre_hook
            hook = register(lambda *_: signal.raise_signal(signal.SIGTERM))
            with pytest.raises(SystemExit):
                train(model, steps=1)
            hook.remove()
    finally:
        signal.signal(signal.SIGTERM, found)
    model.zero_grad()
    assert traces.differences(before, traces.snapshot(model)) == []
    with waiting(model):
        assert are_equal(train(model), expected)


# --- What is refused. ---


def test_what_cannot_wait_is_refused_by_name() -> None:
    model = llama()
    with pytest.raises(PolicyError, match="both segment_size and weights"):
        waiting(model, segment_size=2)
    with pytest.raises(PolicyError, match='weights go to "disk"'):
        waiting(model, weights="disk")
    with pytest.raises(PolicyError, match="resident is 0"):
        waiting(model, weights={"resident": 0})
    rules = [
        {"layers": "0:2", "mode": "full", "weights": "cpu"},
        {"layers": "2:4", "mode": "full", "weights": {"resident": 3}},
    ]
    with pytest.raises(PolicyError, match="One engine moves the weights"):
        hf_ckpt.apply(model, rules)
    case = exactness.build("llama")
    with pytest.raises(UnsupportedError, match="their weights are trained"):
        waiting(case.model)


def test_shared_weights_stay() -> None:
    model = llama()
    layers = model.base_model.model.model.layers
    layers[3].mlp.up_proj.base_layer.weight = layers[0].mlp.up_proj.base_layer.weight
    with waiting(model) as applied:
        names = [name for layer in engine(applied).layers for name in layer.names]
        assert names.count("mlp.up_proj.base_layer.weight") == LAYERS - 2
        train(model, steps=1)


def test_a_plan_says_it_and_is_read_again() -> None:
    model = llama()
    with hf_ckpt.patch.apply.apply(model, [{"layers": "1:", "mode": "full", "weights": "cpu"}]) as applied:
        plan = applied.plan
    assert Plan.from_json(plan.to_json()) == plan
    assert "full + weights" in plan.describe()
    assert "full, weights on cpu" in plan.summary()
