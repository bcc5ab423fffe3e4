"""What changes in a region's modules between forward and recomputation is brought back or refused, never overlooked."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import PlanMismatchError, UnsupportedError
from hf_ckpt.regions.execution_state import is_in_backward
from hf_ckpt.regions.module_state import STATE
from tests import exactness, modes, plain_models, training, zoo
from tests.exactness import Result
from tests.modes import MODES

# One for each way in which a region is recomputed.
WAYS = [
    "full",
    "attention",
    "ffn",
    "segments_2",
    "nested",
    "selective",
    "offload",
    "full_tiles",
    "none_tiles",
    "full_head",
]
every_way = pytest.mark.parametrize("way", WAYS)
one_of_each_kind = pytest.mark.parametrize("way", ["full", "ffn", "nested", "selective", "none_tiles"])

WRITTEN = r"since its forward weights were written to"
# Of the modules that are not recomputed, torch itself tells where an optimizer moves versions.
IN_PLACE = "has been modified by an inplace operation"


def in_force(case: zoo.Case, way: str) -> hf_ckpt.patch.apply.Applied:
    """Put a policy in force without the proof of the first step: these changes come in any step."""
    policy, options = MODES[way] if way in MODES else exactness.POLICIES[way]
    return hf_ckpt.apply(case.model, policy, **options, prove="off")


def full(way: str) -> zoo.Case:
    return modes.llama()


def lora(way: str) -> zoo.Case:
    """A Llama with two adapters, of which the first is active; tiles draw another mask of dropout for each slice."""
    case = modes.llama()
    # Adapters that start at zero would give their first matrices no gradient.
    dropout = 0.0 if way in MODES and modes.in_tiles(way) else 0.1
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=dropout)
    model = get_peft_model(case.model, config)
    model.add_adapter("other", config)
    return zoo.Case(case.model_type, model, case.inputs)


def loss_of(case: zoo.Case) -> Tensor:
    torch.manual_seed(0)
    return zoo.loss(case.model, case.inputs)


def hold(make: Callable[[str], zoo.Case], flow: Callable[[zoo.Case], Tensor], way: str) -> None:
    """Assert that a flow, which calls backward, gives what it gives without a policy."""
    results: list[Result] = []
    for place in ("none", way):
        case = make(way)
        with in_force(case, place):
            loss = flow(case)
        results.append((loss.detach(), exactness.gradients(case.model)))
    if way in MODES and not modes.is_bitwise(way):
        worst = modes.worst(modes.apart(*results))
        assert worst[0] < modes.CLOSE, worst
    else:
        assert exactness.differences(*results) == []


# --- Brought back. ---


def thaw(case: zoo.Case) -> None:
    """Let all adapters train: what peft freezes when it leaves an adapter would get no gradient from autograd."""
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def switch_adapters(case: zoo.Case) -> Tensor:
    first = loss_of(case)
    case.model.set_adapter("other")
    loss = first + 2 * loss_of(case)
    thaw(case)
    loss.backward()
    assert case.model.active_adapter == "other"
    assert {p.requires_grad for name, p in case.model.named_parameters() if "lora_" in name} == {True}
    return loss


def scale_adapters(case: zoo.Case) -> Tensor:
    loss = loss_of(case)
    scaled = [module for module in case.model.modules() if isinstance(getattr(module, "scaling", None), dict)]
    for module in scaled:
        module.scaling["default"] *= 3
    found = [dict(module.scaling) for module in scaled]
    loss.backward()
    assert scaled
    assert [module.scaling for module in scaled] == found
    return loss


def disable_adapters(case: zoo.Case) -> Tensor:
    loss = loss_of(case)
    case.model.base_model.disable_adapter_layers()
    thaw(case)
    loss.backward()
    return loss


def switch_to_eval(case: zoo.Case) -> Tensor:
    loss = loss_of(case)
    case.model.eval()
    loss.backward()
    assert not any(module.training for module in case.model.modules())
    return loss


def freeze_some(case: zoo.Case) -> Tensor:
    loss = loss_of(case)
    for name, parameter in case.model.named_parameters():
        if "layers.1." in name:
            parameter.requires_grad_(False)
    loss.backward()
    return loss


def _scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 1.5 * output


def _shift(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (args[0] + 0.1, *args[1:]), kwargs


def place_hooks(model: nn.Module) -> list[Any]:
    layers = [model.get_submodule(f"base_model.model.model.layers.{number}") for number in (0, 1)]
    return [
        layers[0].mlp.down_proj.register_forward_hook(_scale),
        layers[0].mlp.up_proj.register_forward_hook(_scale, always_call=True),
        layers[1].self_attn.q_proj.register_forward_hook(_scale),
        layers[1].mlp.register_forward_pre_hook(_shift, with_kwargs=True),
    ]


def take_hooks_away(case: zoo.Case) -> Tensor:
    hooks = place_hooks(case.model)
    loss = loss_of(case)
    for hook in hooks:
        hook.remove()
    loss.backward()
    assert not any(module._forward_hooks.keys() & {hook.id for hook in hooks} for module in case.model.modules())
    return loss


def place_hooks_late(case: zoo.Case) -> Tensor:
    loss = loss_of(case)
    hooks = place_hooks(case.model)
    loss.backward()
    for hook in hooks:
        hook.remove()
    return loss


def exchange_hooks(case: zoo.Case) -> Tensor:
    first = place_hooks(case.model)
    loss = loss_of(case)
    for hook in first:
        hook.remove()
    place_hooks(case.model)
    loss.backward()
    return loss


def take_hooks_on_all_modules_away(case: zoo.Case) -> Tensor:
    def scaled(module: nn.Module, args: Any, output: Any) -> Any:
        return 1.5 * output if "SiLU" in type(module).__name__ else None

    def shifted(module: nn.Module, args: Any) -> Any:
        return (args[0] + 0.1,) if "SiLU" in type(module).__name__ else None

    placed = nn.modules.module
    hooks = [placed.register_module_forward_hook(scaled), placed.register_module_forward_pre_hook(shifted)]
    loss = loss_of(case)
    for hook in hooks:
        hook.remove()
    loss.backward()
    return loss


@every_way
@pytest.mark.parametrize(
    "flow",
    [
        *(switch_adapters, scale_adapters, disable_adapters, switch_to_eval, freeze_some),
        *(take_hooks_away, place_hooks_late, exchange_hooks, take_hooks_on_all_modules_away),
    ],
)
@pytest.mark.sweep(keep=8)
def test_what_the_forward_found_is_brought_back(flow: Callable[[zoo.Case], Tensor], way: str) -> None:
    hold(lora, flow, way)


@pytest.mark.parametrize("flow", [switch_adapters, scale_adapters, disable_adapters])
def test_adapters_of_a_head_in_chunks_are_brought_back_for_its_proof(flow: Callable[[zoo.Case], Tensor]) -> None:
    results: list[Result] = []
    for head in (None, "chunked"):
        case = modes.llama()
        config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = get_peft_model(case.model, config)
        model.add_adapter("other", config)
        case = zoo.Case(case.model_type, model, case.inputs)
        with hf_ckpt.apply(model, "none", head=head):
            results.append((flow(case).detach(), exactness.gradients(model)))
    assert modes.worst(modes.apart(*results))[0] < modes.CLOSE


def test_flags_are_put_back_when_recomputation_raises() -> None:
    case = lora("full")
    with in_force(case, "full"):

        def refuse(module: nn.Module, args: Any) -> None:
            if is_in_backward():
                assert module.training
                raise ValueError("an operator fails")

        hook = case.model.get_submodule("base_model.model.model.layers.1.mlp").register_forward_pre_hook(refuse)
        loss = loss_of(case)
        case.model.eval()
        with pytest.raises(ValueError, match="an operator fails"):
            loss.backward()
        hook.remove()
        assert not any(module.training for module in case.model.modules())
        # Nothing is held: another step runs.
        case.model.train()
        loss_of(case).backward()


def test_second_thread_is_refused_while_flags_are_brought_back() -> None:
    case = lora("full")
    raised: list[BaseException] = []

    def train() -> None:
        try:
            loss_of(case)
        except UnsupportedError as error:
            raised.append(error)

    def from_another_thread(module: nn.Module, args: Any) -> None:
        if is_in_backward() and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

    with in_force(case, "full"):
        layer = case.model.get_submodule("base_model.model.model.layers.0.mlp")
        hook = layer.register_forward_pre_hook(from_another_thread)
        loss = loss_of(case)
        case.model.set_adapter("other")
        # The other thread may have drawn random numbers by then.
        with contextlib.suppress(UnsupportedError):
            loss.backward()
        hook.remove()
    assert [str(error)[:40] for error in raised] == ["base_model.model.model.layers.0 runs in "]


# --- Refused. ---


@every_way
def test_backward_under_other_weights_than_the_forwards_raises(way: str) -> None:
    case = full("full")
    with in_force(case, way):
        weights = {name: (2 * p).detach().requires_grad_() for name, p in case.model.named_parameters()}
        torch.manual_seed(0)
        loss = functional_call(case.model, weights, (), case.inputs).loss
        with pytest.raises(UnsupportedError, match="since its forward other tensors have taken the place of weights: "):
            loss.backward()


def make_8_bit(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "8-bit": make_8_bit,
}


@every_way
@pytest.mark.parametrize(("make", "kind"), [*((full, kind) for kind in OPTIMIZERS), (lora, "fused")])
def test_optimizer_step_between_two_backwards_raises(make: Callable[[str], zoo.Case], kind: str, way: str) -> None:
    if kind == "8-bit" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    case = make(way)
    optimizer = OPTIMIZERS[kind]([p for p in case.model.parameters() if p.requires_grad])
    with in_force(case, way):
        first, second = loss_of(case), loss_of(case)
        first.backward()
        optimizer.step()
        with pytest.raises((UnsupportedError, RuntimeError), match=f"{WRITTEN}|{IN_PLACE}"):
            second.backward()


@pytest.mark.parametrize("name", ["k_proj", "gate_proj", "input_layernorm"])
def test_optimizer_step_on_one_kind_of_weight_raises(name: str) -> None:
    case = full("full")
    optimizer = OPTIMIZERS["fused"]([p for path, p in case.model.named_parameters() if name in path])
    with in_force(case, "full"):
        first, second = loss_of(case), loss_of(case)
        first.backward()
        optimizer.step()
        with pytest.raises(UnsupportedError, match=WRITTEN):
            second.backward()


def test_optimizer_step_that_the_trainer_tells_of_raises(tmp_path: Path) -> None:
    model = training.llama()
    kept: list[Tensor] = []

    class Late(TrainerCallback):
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            kept.pop().backward()

    class Keeps(Trainer):
        def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
            kept.append(self.compute_loss(model, self._prepare_inputs(inputs)))
            return super().training_step(model, inputs, *args, **kwargs)

    # So that no value tells.
    args = TrainingArguments(**training.arguments(tmp_path, learning_rate=0.0))
    callbacks = [HFCkptCallback("full", prove="off"), Late()]
    run = Keeps(model=model, args=args, train_dataset=training.rows(), callbacks=callbacks)
    with pytest.raises(UnsupportedError, match=WRITTEN):
        run.train()


@one_of_each_kind
def test_write_past_the_version_raises(way: str) -> None:
    case = full("full")
    with in_force(case, way):
        loss = loss_of(case)
        for parameter in case.model.parameters():
            parameter.data = parameter.data * 2
        with pytest.raises(UnsupportedError, match=WRITTEN):
            loss.backward()


def test_message_names_the_layer_what_changed_and_what_to_do() -> None:
    case = full("full")
    with in_force(case, "full"):
        loss = loss_of(case)
        with torch.no_grad():
            case.model.model.layers[2].mlp.up_proj.weight.mul_(2)
        with pytest.raises(UnsupportedError) as raised:
            loss.backward()
    assert str(raised.value) == (
        "model.layers.2 is recomputed in backward, but since its forward weights were written to: mlp.up_proj.weight. "
        "Recomputing it would give other values than those that the loss was made of. Call backward before the "
        "optimizer steps, or run the forward again after its step."
    )


@pytest.mark.parametrize("way", ["full", "attention", "segments_2", "selective", "none_tiles"])
def test_adapter_merged_between_forward_and_backward_raises(way: str) -> None:
    case = lora("full")
    with in_force(case, way):
        loss = loss_of(case)
        case.model.merge_adapter()
        with pytest.raises((UnsupportedError, RuntimeError), match=f"adapters were merged|{WRITTEN}|{IN_PLACE}"):
            loss.backward()


def test_replaced_module_raises() -> None:
    case = full("full")
    with in_force(case, "full"):
        loss = loss_of(case)
        case.model.model.layers[1].mlp.act_fn = nn.ReLU()
        with pytest.raises(UnsupportedError, match=r"modules were replaced or taken away: SiLU"):
            loss.backward()


class Counting(plain_models.Block):
    """Counts its calls, and adds a table that others may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        # Small ones would be brought back.
        self.register_buffer("table", torch.arange(5000.0))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return super().forward(hidden + self.table[: plain_models.WIDTH])


def counting(way: str) -> zoo.Case:
    torch.manual_seed(0)
    return plain_models.case(plain_models.Decoder([Counting() for _ in range(4)]))


@pytest.mark.parametrize("way", ["full", "segments_2", "nested"])
def test_buffer_with_other_values_raises(way: str) -> None:
    case = counting(way)
    with in_force(case, way):
        loss = loss_of(case)
        case.model.blocks[3].table.add_(1)
        with pytest.raises(UnsupportedError, match=r"blocks.3 .* buffers have got other values: table\. "):
            loss.backward()


# --- Nothing is said. ---


def rewrite_buffers(case: zoo.Case) -> Tensor:
    """As DDP does before each forward: the first process's buffers, with the same values."""
    first = loss_of(case)
    for buffer in case.model.buffers():
        buffer.copy_(buffer.clone())
    loss = first + loss_of(case)
    loss.backward()
    return loss


def backward_twice(case: zoo.Case) -> Tensor:
    first, loss = loss_of(case), loss_of(case)
    loss.backward(retain_graph=True)
    loss.backward()
    first.backward()
    return loss


@pytest.mark.parametrize("way", ["full", "segments_2", "nested"])
@pytest.mark.parametrize("flow", [rewrite_buffers, backward_twice])
def test_buffers_that_the_region_or_ddp_writes_are_no_change(flow: Callable[[zoo.Case], Tensor], way: str) -> None:
    hold(counting, flow, way)


@every_way
def test_graph_that_is_kept_for_a_second_backward_is_exact(way: str) -> None:
    hold(lora, backward_twice, way)


def accumulate_and_step(case: zoo.Case) -> Tensor:
    """Two optimizer steps of two micro-batches, with an evaluation between them; every graph is done in time."""
    optimizer = torch.optim.AdamW([p for p in case.model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    for _ in range(2):
        for _ in range(2):
            loss = loss_of(case)
            loss.backward()
        optimizer.step()
        case.model.eval()
        with torch.no_grad():
            loss_of(case)
        case.model.train()
        gradients = exactness.gradients(case.model)
        optimizer.zero_grad()
    for name, parameter in case.model.named_parameters():
        parameter.grad = gradients[name]
    return loss


@one_of_each_kind
def test_training_loop_with_a_fused_optimizer_runs(way: str) -> None:
    case = lora("full")
    with in_force(case, way):
        accumulate_and_step(case)
    if way not in MODES or modes.is_bitwise(way):
        hold(lora, accumulate_and_step, way)


def add_adapter(case: zoo.Case) -> Tensor:
    loss = loss_of(case)
    case.model.add_adapter("third", LoraConfig(r=2, target_modules=["q_proj"]))
    loss.backward()
    return loss


@one_of_each_kind
def test_adapter_that_is_added_before_backward_is_no_change(way: str) -> None:
    hold(lora, add_adapter, way)


@pytest.mark.parametrize("way", ["full", "attention", "ffn", "selective"])
def test_weights_that_accelerate_loads_for_each_use_are_no_change(way: str) -> None:
    case = modes.llama()
    for parameter in case.model.parameters():
        parameter.requires_grad_(False)
    expected = modes.llama()
    expected.model.requires_grad_(False)
    found = []
    for each in (expected, case):
        embeds = each.model.get_input_embeddings()(each.inputs["input_ids"]).detach().requires_grad_()
        given = {"inputs_embeds": embeds, "labels": each.inputs["labels"]}
        if each is case:
            cpu_offload(case.model, torch.device("cpu"))
            with in_force(case, way):
                for _ in range(2):
                    torch.manual_seed(0)
                    (gradient,) = torch.autograd.grad(case.model(**given).loss, embeds)
        else:
            torch.manual_seed(0)
            (gradient,) = torch.autograd.grad(each.model(**given).loss, embeds)
        found.append(gradient)
    assert torch.equal(*found)


@pytest.mark.parametrize("policy", ["full", "attention", "selective"])
def test_what_trains_and_is_loaded_for_each_use_is_said_to_get_no_gradient(policy: str) -> None:
    model = get_peft_model(modes.llama().model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    cpu_offload(model.train(), torch.device("cpu"))
    ids = torch.arange(8)[None]
    with hf_ckpt.apply(model, policy), pytest.raises(PlanMismatchError) as raised:
        model(input_ids=ids, labels=ids).loss.backward()
    assert "get no gradient, without a plan either: they lie on `meta` and are loaded for each forward" in str(
        raised.value
    )


def test_notes_are_no_part_of_copies() -> None:
    case = lora("full")
    with in_force(case, "full"):
        loss = loss_of(case)
        copied = copy.deepcopy(case.model)
        case.model.eval()
        loss.backward()
        state = case.model.get_submodule("base_model.model.model.layers.0").__dict__[STATE]
        again = pickle.loads(pickle.dumps(state))
        assert vars(again).keys() == vars(state).keys()
        assert again._layout is None
        zoo.loss(copied, case.inputs).backward()
        assert all(module.training for module in copied.modules())
    assert not any(STATE in vars(module) for module in case.model.modules())


def test_modes_that_count_operators_see_none_of_it() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[-1] += 1
            return function(*args, **(kwargs or {}))

    case = full("full")
    for removes in (False, True):
        with hf_ckpt.apply(case.model, "full", prove="off"):
            if removes:
                for layer in case.model.model.layers:
                    del layer.__dict__[STATE]
            counts.append(0)
            with Counted():
                loss_of(case).backward()
            case.model.zero_grad()
            for layer in case.model.model.layers:
                layer.__dict__.setdefault(STATE, None)
    assert counts[0] == counts[1]
