"""Other ways to save activation memory, as the benchmarks enter them: same gradients, counted cost, nothing left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from accelerate.state import PartialState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.side_by_side.contender import GROUPS, Contender, NotHereError
from benchmarks.side_by_side.theirs import accelerate_fsdp, compiled, torchtitan_like, transformers_own, trl_offload
from benchmarks.side_by_side.theirs.accelerate_fsdp import resizing_followed
from benchmarks.side_by_side.theirs.compiled import GraphTracker
from hf_ckpt.simulation.op_costs import operator_cost
from hf_ckpt.simulation.step_memory import Category
from hf_ckpt.simulation.tape import MemoryChange
from hf_ckpt.simulation.tracker import parameters_and_buffers
from tests import traces

# peft goes by a name that transformers 5.23 gives up.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"),
    pytest.mark.sweep,
]

ORIGINS = (transformers_own, accelerate_fsdp, torchtitan_like, trl_offload, compiled)
CONTENDERS: dict[str, Contender] = {one.name: one for origin in ORIGINS for one in origin.CONTENDERS}
EAGER = ["transformers_full", "transformers_every_2", "transformers_every_4", "torchtitan_selective", "trl_selective"]
LAYERS, HIDDEN, INNER, KEYS, TOKENS = 4, 32, 88, 16, 2 * 16


@contextmanager
def entered(name: str, model: nn.Module) -> Iterator[nn.Module]:
    with CONTENDERS[name].enter(model) as called:
        yield called


def llama(num_layers: int = LAYERS, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **options,
    )
    return LlamaForCausalLM(config).train()


def adapted(**options: Any) -> nn.Module:
    # Adapters that start at zero would give their first matrices no gradient.
    return get_peft_model(llama(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, **options))


def batch() -> dict[str, Tensor]:
    ids = torch.arange(TOKENS).view(2, -1)
    return {"input_ids": ids, "labels": ids}


def gradients(model: nn.Module, called: nn.Module) -> dict[str, Tensor]:
    """Run a step; return the gradients, whole, by the names that parameters have without wrappers; and clear them."""
    called(**batch())["loss"].backward()
    taken = {
        name.replace("_checkpoint_wrapped_module.", ""): getattr(parameter.grad, "full_tensor", parameter.grad.clone)()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return taken


def counted(model: nn.Module, called: nn.Module) -> tuple[int, int]:
    """Return the floating-point operations of a step, and the bytes that its forward leaves for its backward."""

    def cost(function: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, int]:
        return 0.0, operator_cost(function, args, kwargs, output).num_flops

    inputs = batch()
    tracker = GraphTracker(costs=cost)
    tracker.record_existing(parameters_and_buffers(called), Category.PARAMETERS)
    tracker.record_existing(inputs.items(), Category.TEMPORARY)
    signs = {MemoryChange.ALLOCATE: 1, MemoryChange.FREE: -1, MemoryChange.NOTHING: 0}
    with tracker, resizing_followed(tracker):
        loss = called(**inputs)["loss"]
        held = sum(signs[event.change] * event.storage.num_bytes for event in tracker.tape.events if event.storage)
        loss.backward()
    model.zero_grad()
    return sum(event.num_flops for event in tracker.tape.events), held


def differences(expected: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    """Name what differs by a bit."""
    assert expected.keys() == got.keys()
    return [name for name, gradient in expected.items() if not torch.equal(gradient, got[name])]


def product(inner: int, outer: int) -> int:
    return 2 * TOKENS * inner * outer


# What a layer recomputes: its products, and in full its attention too, but not the last product, which nothing needs.
QUERIES, ONE_OF_KV, UP = product(HIDDEN, HIDDEN), product(HIDDEN, KEYS), product(HIDDEN, INNER)
ATTENTION = 2 * 2 * TOKENS * (TOKENS // 2) * HIDDEN
FULL = 2 * QUERIES + 2 * ONE_OF_KV + 2 * UP + ATTENTION
RECOMPUTED = {
    "transformers_full": LAYERS * FULL,
    "transformers_every_2": LAYERS // 2 * FULL,
    "transformers_every_4": LAYERS // 4 * FULL,
    # q, v, gate and down are kept; k, o, which is as wide as q, and up are not.
    "torchtitan_selective": LAYERS * (ONE_OF_KV + QUERIES + UP),
    "trl_selective": LAYERS * (FULL - ATTENTION),
}


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, Tensor], int, int]:
    """Gradients, operations and bytes held of a step without any of it."""
    model = llama()
    return gradients(model, model), *counted(model, model)


def test_names_titles_and_groups_are_sound() -> None:
    names = [one.name for origin in ORIGINS for one in origin.CONTENDERS]
    assert len(names) == len(set(names)) == len({one.title for one in CONTENDERS.values()})
    assert {one.group for one in CONTENDERS.values()} <= set(GROUPS)


@pytest.mark.parametrize("name", EAGER)
def test_gradients_are_the_same_bit_by_bit_and_the_model_is_left_as_found(
    name: str, plain: tuple[dict[str, Tensor], int, int]
) -> None:
    if name == "trl_selective":
        pytest.importorskip("trl")
    expected, num_flops, num_bytes = plain
    model = llama()
    found = traces.snapshot(model)
    with entered(name, model) as called:
        assert differences(expected, gradients(model, called)) == []
        flops, held = counted(model, called)
    assert flops - num_flops == RECOMPUTED[name]
    assert held < num_bytes
    assert traces.differences(found, traces.snapshot(model)) == []


@pytest.mark.parametrize("name", ["transformers_full", "torchtitan_selective"])
def test_adapters_get_the_same_gradients_and_the_hooks_of_the_user_stay(name: str) -> None:
    model = adapted()
    model.enable_input_require_grads()
    expected, found = gradients(model, model), traces.snapshot(model)
    with entered(name, model) as called:
        assert differences(expected, gradients(model, called)) == []
    assert traces.differences(found, traces.snapshot(model)) == []
    assert len(model.get_input_embeddings()._forward_hooks) == 1


@pytest.mark.parametrize("name", ["transformers_full", "torchtitan_selective"])
def test_simulated_step_takes_the_operations_of_the_real_one(name: str) -> None:
    real = llama(num_layers=1)
    num_flops, _ = counted(real, real)
    with FakeTensorMode():
        model = llama(num_layers=1)
        with entered(name, model) as called:
            assert counted(model, called)[0] - num_flops == RECOMPUTED[name] // LAYERS


# --- transformers. ---


def test_offload_of_transformers_says_why_it_cannot_run_on_a_cpu() -> None:
    if torch.accelerator.current_accelerator() is not None:
        pytest.skip("there is an accelerator, or torch is built for one, and transformers goes by that")
    model = llama()
    found = traces.snapshot(model)
    with pytest.raises(NotHereError, match=r"transformers' offload fails here: pin_memory=True requires"):
        ExitStack().enter_context(entered("transformers_offload", model))
    assert traces.differences(found, traces.snapshot(model)) == []


def test_option_that_an_older_transformers_has_not_is_named() -> None:
    class Older(nn.Module):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            assert gradient_checkpointing_kwargs == {"use_reentrant": False}

    with entered("transformers_full", Older()):
        pass
    with pytest.raises(NotHereError, match=r"^gradient_checkpointing_enable has no every_n_layers in this version"):
        ExitStack().enter_context(entered("transformers_every_2", Older()))


# --- accelerate. ---


def test_fsdp_on_one_process_checkpoints_and_cleans_up(plain: tuple[dict[str, Tensor], int, int]) -> None:
    expected, num_flops, num_bytes = plain
    model = llama()
    state = dict(PartialState._shared_state)
    with entered("accelerate_fsdp", model) as called:
        assert type(called.model.layers[0]).__name__ == "FSDPCheckpointWrapper"
        assert differences(expected, gradients(model, called)) == []
        flops, held = counted(model, called)
    assert flops - num_flops == RECOMPUTED["transformers_full"]
    # Over what stays of a layer come the gathered weights of the head and of the norm before it.
    with entered("transformers_full", plain_model := llama()) as called:
        assert held - counted(plain_model, called)[1] == 4 * (64 * HIDDEN + HIDDEN)
    assert held < num_bytes
    assert not dist.is_initialized()
    assert PartialState._shared_state == state


def test_fsdp_is_refused_where_a_process_group_is_in_use() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotHereError, match="a process group is in use"):
            ExitStack().enter_context(entered("accelerate_fsdp", llama()))
    finally:
        dist.destroy_process_group()


# --- trl. ---


def test_offload_of_trl_says_why_it_cannot_run_on_a_cpu() -> None:
    pytest.importorskip("trl")
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(NotHereError, match=r"OffloadActivations asks torch for an accelerator .* no attribute 'type'"):
        ExitStack().enter_context(entered("trl_offload", llama()))


@pytest.mark.parametrize("name", ["trl_offload", "trl_offload_all"])
def test_offload_of_trl_is_around_forward_and_backward(
    name: str, monkeypatch: pytest.MonkeyPatch, plain: tuple[dict[str, Tensor], int, int]
) -> None:
    trl_models = pytest.importorskip("trl.models")
    # Its code without streams and pinned memory, which alone need an accelerator.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
    found_manager = trl_models.get_act_offloading_ctx_manager
    made: list[Any] = []

    def manager(model: nn.Module) -> Any:
        made.append(found_manager(model, use_pin_memory=False, use_streams=False, min_offload_size=0))
        return made[-1]

    monkeypatch.setattr(trl_models, "get_act_offloading_ctx_manager", manager)
    model = llama()
    found = traces.snapshot(model)
    with entered(name, model) as called:
        for _ in range(2):
            assert differences(plain[0], gradients(model, called)) == []
        called(**batch())
        moved = sum(is_moved for _, is_moved, *_ in made[0].tracker.values())
    # With checkpointing the inputs of the layers, and what the last norm and the loss keep.
    assert (moved < 30) == (name == "trl_offload")
    assert traces.differences(found, traces.snapshot(model)) == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter:UserWarning")
def test_selective_of_trl_fails_on_adapters() -> None:
    pytest.importorskip("trl")
    with pytest.raises(NotHereError, match="trl's selective fails here: Unexpected keyword arguments: selective"):
        ExitStack().enter_context(entered("trl_selective", adapted()))


# --- torch.compile. ---


@pytest.mark.filterwarnings("ignore")
def test_compiled_within_a_budget_gives_the_gradients_and_leaves_the_model_as_found() -> None:
    model = llama(num_layers=2)
    expected, (num_flops, num_bytes), found = gradients(model, model), counted(model, model), traces.snapshot(model)
    with entered("compiled_budget_20", model) as called:
        got = gradients(model, called)
        flops, held = counted(model, called)
    # The graph's formulas of norms and of silu are others than those of the eager operators: rounding of float32.
    assert max(((expected[name] - got[name]).abs().max() / expected[name].abs().max()).item() for name in got) < 1e-5
    assert 1.05 < flops / num_flops < 1.3
    assert held / num_bytes < 0.5
    assert functorch_config.activation_memory_budget == 1.0
    assert traces.differences(found, traces.snapshot(model)) == []


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (partial(llama, attention_dropout=0.1), "model.layers.0.self_attn.attention_dropout"),
        (partial(adapted, lora_dropout=0.1), r"layers.0.self_attn.q_proj.lora_dropout.default.p"),
    ],
)
def test_budget_is_refused_where_dropout_is_active(build: Any, where: str) -> None:
    with pytest.raises(NotHereError, match=f"{where} is active"):
        ExitStack().enter_context(entered("compiled_budget_50", build()))


@pytest.mark.parametrize("name", ["compiled_full", "compiled_selective"])
def test_compiled_plan_leaves_the_model_as_found(name: str) -> None:
    model = llama(num_layers=1)
    found = traces.snapshot(model)
    with entered(name, model) as called:
        assert called is model
        assert model.model.layers[0]._compiled_call_impl is not None
    assert traces.differences(found, traces.snapshot(model)) == []


def test_experts_compiled_for_a_cpu_are_refused() -> None:
    class Experts(nn.Linear):
        pass

    model = llama(num_layers=1)
    model.model.layers[0].mlp.gate_proj = Experts(HIDDEN, INNER, bias=False)
    with pytest.raises(NotHereError, match="transformers::grouped_mm_fallback"):
        ExitStack().enter_context(entered("compiled_budget_80", model))
