"""What could not be kept exact is refused before the model is touched; what can be is not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import DynamicCache

import hf_ckpt
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.patch.checks import check_engine
from hf_ckpt.upstream.transformers import CACHE
from tests import exactness, modes, plain_models, traces, zoo
from tests.exactness import POLICIES, Result

pytestmark = pytest.mark.core


def message_of(model: nn.Module, policy: object, **options: object) -> str:
    """Apply, expect a refusal and an untouched model, and return what was said."""
    found = traces.snapshot(model)
    with pytest.raises(UnsupportedError) as raised:
        hf_ckpt.apply(model, policy, **options)
    assert traces.differences(found, traces.snapshot(model)) == []
    return str(raised.value)


# --- Running statistics. ---


class NormedAttention(plain_models.Attention):
    """Attention with a BatchNorm over its output."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.batch_norm = norm

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.batch_norm(super().forward(hidden, mask).mT).mT


def normed(norm: nn.Module | None = None) -> zoo.Case:
    """A model whose third block has a BatchNorm in its attention."""
    torch.manual_seed(0)
    blocks = [plain_models.Block() for _ in range(4)]
    blocks[2].attention = NormedAttention(norm if norm is not None else nn.BatchNorm1d(plain_models.WIDTH))
    return plain_models.case(plain_models.Decoder(blocks))


@pytest.mark.parametrize("policy", POLICIES)
def test_running_statistics_move_once(policy: str) -> None:
    case = normed()
    expected, means = step_with_statistics(case)
    case = normed()
    with exactness.apply(case.model, policy):
        got, means_under_policy = step_with_statistics(case)
    assert exactness.differences(expected, got) == []
    assert torch.equal(means, means_under_policy)


def step_with_statistics(case: zoo.Case) -> tuple[Result, Tensor]:
    return exactness.step(case), case.model.blocks[2].attention.batch_norm.running_mean.clone()


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_running_statistics_are_accepted(policy: str) -> None:
    case = normed()
    case.model.blocks[2].attention.batch_norm.eval()
    assert exactness.check(case, policy) == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(plain_models.WIDTH, track_running_stats=False), nn.GroupNorm(2, plain_models.WIDTH)]
)
def test_norms_without_running_statistics_are_accepted(norm: nn.Module, policy: str) -> None:
    assert exactness.check(normed(norm), policy) == []


# --- Modules that layers share. ---


def shared(*places: str) -> zoo.Case:
    """A model in which blocks 1 and 3 have one module at each of these places."""
    torch.manual_seed(0)
    blocks = [plain_models.Block() for _ in range(4)]
    for place in places:
        setattr(blocks[3], place, getattr(blocks[1], place))
    return plain_models.case(plain_models.Decoder(blocks))


def one_block() -> zoo.Case:
    torch.manual_seed(0)
    return plain_models.case(plain_models.Decoder([plain_models.Block()] * 4))


@pytest.mark.parametrize(
    ("policy", "options", "first", "second"),
    [
        ("full", {"every_n_layers": 2}, 0, 1),
        ("full", {"segment_size": 2}, 0, 1),
        ("full", {"segment_size": 4}, 0, 1),
        ({"mode": "attention", "layers": 0}, {}, 0, 1),
        ([{"mode": "full", "layers": 0}, {"mode": "ffn", "layers": "1:"}], {}, 0, 1),
    ],
)
def test_one_layer_with_two_modes_raises(policy: object, options: dict[str, object], first: int, second: int) -> None:
    message = message_of(one_block().model, policy, **options)
    assert message.startswith(f"blocks.{first}")
    assert f" and blocks.{second}" in message
    assert message.endswith("but the plan differs there. Give both layers one mode, without segment_size.")


@pytest.mark.parametrize(
    ("place", "policy"),
    [
        ("attention", [{"mode": "attention", "layers": 1}]),
        ("attention", [{"mode": "attention", "layers": 1}, {"mode": "full", "layers": 3}]),
        ("attention", [{"mode": "attention", "layers": 1}, {"mode": "ffn", "layers": 3}]),
        ("mlp", [{"mode": "ffn", "layers": 1}]),
    ],
)
def test_one_part_with_two_modes_raises(place: str, policy: object) -> None:
    kind = "Attention" if place == "attention" else "Mlp"
    assert message_of(shared(place).model, policy) == (
        f"blocks.1.{place} and blocks.3.{place} are the same module ({kind}), but the plan differs there. Give both "
        "layers one mode, without segment_size."
    )


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_one_layer_that_stands_for_all_cannot_offload(mode: str) -> None:
    assert message_of(one_block().model, mode, offload="cpu") == (
        "blocks.0 and blocks.3 are the same module (Block), but the plan differs there. Give both layers one mode, "
        "without offload."
    )


@pytest.mark.parametrize(
    "options", [{"policy": "selective"}, {"policy": "full", "tiles": 1}, {"policy": "none", "tiles": 3}]
)
def test_shared_layers_with_one_finer_mode_are_exact(options: dict[str, object]) -> None:
    case = one_block()
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, **options):
        got = exactness.step(case)
    assert modes.worst(modes.apart(expected, got))[0] <= (modes.CLOSE if options.get("tiles") == 3 else 0)


@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn"])
def test_shared_layers_with_one_mode_are_exact(policy: str) -> None:
    case = one_block()
    found = traces.snapshot(case.model)
    assert exactness.check(case, policy) == []
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_shared_parts_of_layers_with_one_mode_are_exact(policy: str) -> None:
    case = shared("attention", "mlp") if policy != "mixed" else shared("mlp")
    found = traces.snapshot(case.model)
    assert exactness.check(case, policy) == []
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []


# --- Layers that compute their own backward. ---


class Reversible(plain_models.Block):
    def backward_pass(self) -> None:
        """Stands for what a reversible layer brings."""


@pytest.mark.parametrize("policy", ["full", "attention", "ffn"])
def test_layer_with_its_own_backward_raises(policy: str) -> None:
    model = plain_models.Decoder([plain_models.Block(), Reversible()])
    assert message_of(model, policy) == (
        f'Layer 1 of blocks is set to "{policy}", but Reversible computes its own backward (a reversible layer), which '
        "already recomputes. Leave it out of the policy."
    )
    hf_ckpt.apply(model, {"mode": policy, "layers": 0}).remove()


# --- Caches that are handed in. ---


def with_cache(case: zoo.Case) -> zoo.Case:
    """A step on the second half of each row, the first half being in a cache."""
    half = case.inputs["input_ids"].shape[1] // 2
    inputs = {name: tensor[:1, half:] for name, tensor in case.inputs.items() if name != "attention_mask"}
    return zoo.Case(case.model_type, case.model, {**inputs, CACHE: prompt_cache(case, half)})


def prompt_cache(case: zoo.Case, length: int) -> DynamicCache:
    cache = DynamicCache(config=case.model.config)
    case.model.eval()
    with torch.no_grad():
        case.model(input_ids=case.inputs["input_ids"][:1, :length], use_cache=True, **{CACHE: cache})
    case.model.train()
    assert cache.get_seq_length() == length
    return cache


@pytest.mark.parametrize("policy", ["full", "attention", "every_2", "segments_2", "nested", "mixed"])
def test_cache_handed_to_recomputed_layers_raises(policy: str) -> None:
    case = exactness.build("llama", attn_implementation="eager")
    prompted = with_cache(case)
    with exactness.apply(case.model, policy), pytest.raises(UnsupportedError) as raised:
        exactness.step(prompted)
    assert str(raised.value) == (
        "The model that runs model.layers was handed a key/value cache in a training step (prefix tuning, a prompt "
        "that was encoded before, or use_cache=True). Recomputed layers can neither read nor fill it, and the loss "
        'would change without a word. Set use_cache=False, or use mode "none" or "ffn" there.'
    )


@pytest.mark.parametrize("policy", ["none", "ffn"])
def test_cache_handed_to_layers_that_keep_their_attention_is_used(policy: str) -> None:
    case = exactness.build("llama", attn_implementation="eager")
    prompted = with_cache(case)
    expected = exactness.step(prompted)
    with exactness.apply(case.model, policy):
        assert exactness.differences(expected, exactness.step(with_cache(case))) == []


def test_cache_in_evaluation_is_used() -> None:
    case = exactness.build("llama", attn_implementation="eager", dropout=0.0)
    expected = zoo.loss(case.model.eval(), with_cache(case).inputs)
    with hf_ckpt.apply(case.model.train(), "full"):
        prompted = with_cache(case)
        assert torch.equal(zoo.loss(case.model.eval(), prompted.inputs), expected)


# --- Engines. ---


def engine(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"n_gpu": 1, "world_size": 1, "deepspeed": None, "fsdp": [], **changes})


def test_one_device_is_accepted() -> None:
    check_engine(engine())
    check_engine(engine(n_gpu=0))


def test_several_gpus_in_one_process_raise() -> None:
    with pytest.raises(UnsupportedError) as raised:
        check_engine(engine(n_gpu=4))
    assert str(raised.value) == (
        "One process would use 4 GPUs through nn.DataParallel, whose replicas run the original's layers. Start one "
        "process for each: accelerate launch --num_processes 4 <script>, or set CUDA_VISIBLE_DEVICES to one GPU."
    )


REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
ENGINES = [
    ({"world_size": 2}, {}),
    ({"fsdp": "full_shard"}, {}),
    ({"deepspeed": "z.json"}, {}),
    ({}, {"ACCELERATE_USE_FSDP": "true"}),
]


@pytest.mark.parametrize(("changes", "environment"), ENGINES)
def test_reentrant_request_beside_an_engine_raises(
    changes: dict[str, object], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_engine(engine(**changes))
    check_engine(engine(**changes, **{**REENTRANT, "gradient_checkpointing": False}))
    check_engine(engine(**changes, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}))
    with pytest.raises(UnsupportedError, match=r"use_reentrant: True.*Set gradient_checkpointing=False"):
        check_engine(engine(**changes, **REENTRANT))


def test_reentrant_request_in_one_process_gives_way() -> None:
    check_engine(engine(**REENTRANT))


# --- Wrappers of others. ---


def test_model_with_checkpoint_wrappers_raises() -> None:
    model = zoo.build("llama").model
    apply_activation_checkpointing(model, check_fn=lambda module: module is model.model.layers[1])
    before = traces.snapshot(model)
    with pytest.raises(UnsupportedError) as raised:
        hf_ckpt.apply(model, "full")
    assert str(raised.value) == (
        "model.layers.1 is wrapped in CheckpointWrapper (accelerate's fsdp_activation_checkpointing, or "
        "apply_activation_checkpointing with torch's wrapper). It renames parameters, so that PEFT saves an empty "
        "adapter, and layers would be recomputed twice. Leave it out: the policy does its work."
    )
    assert traces.differences(before, traces.snapshot(model)) == []


def test_checkpoint_function_of_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def reentrant(*args: object) -> None:
        """Another library's."""

    monkeypatch.setattr("hf_ckpt.patch.checks.checkpoint", reentrant)
    with pytest.raises(UnsupportedError, match=r"was .*test_checks.*reentrant already when hf_ckpt was imported"):
        hf_ckpt.apply(zoo.build("llama").model, "full")
