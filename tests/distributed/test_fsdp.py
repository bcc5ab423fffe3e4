"""Models that FSDP has wrapped, in a process group of one: what the plan finds, sets and refuses there.

Two processes are in tests/distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import hf_ckpt
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.structure.attention_and_ffn import parameter_shapes
from hf_ckpt.structure.layers import class_name, clean_path, find_layers
from hf_ckpt.trainer.metrics import recomputed_share
from tests import exactness, traces, zoo
from tests.exactness import POLICIES, every_policy

pytestmark = [
    pytest.mark.core,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*`NO_SHARD` sharding strategy is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP will not all-gather parameters for containers:UserWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def _group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(case: zoo.Case, engine: str) -> zoo.Case:
    """Return the case with each decoder layer, and the whole, a unit of FSDP."""
    layers = [layer.module for stack in find_layers(case.model) for layer in stack.layers]
    if engine == "fsdp1":
        policy = ModuleWrapPolicy({type(layer) for layer in layers})
        # With a group of one, FSDP1 flattens parameters as it does with two.
        wrapped: nn.Module = FullyShardedDataParallel(
            case.model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
        return zoo.Case(case.model_type, wrapped, case.inputs)
    mesh = init_device_mesh("cpu", (1,))
    for module in (*layers, case.model):
        fully_shard(module, mesh=mesh)
    return case


every_engine = pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])


@every_engine
@every_policy
def test_policy_changes_nothing_on_a_sharded_model(engine: str, policy: str) -> None:
    case = sharded(exactness.build("qwen3_moe" if engine == "fsdp2" else "llama"), engine)
    assert exactness.check(case, policy) == []


@every_engine
@pytest.mark.parametrize("policy", ["full", "segments_2", "nested", "attention"])
def test_policy_holds_that_was_applied_before_sharding(engine: str, policy: str) -> None:
    plain = exactness.build("llama")
    expected = exactness.step(sharded(exactness.build("llama"), engine))
    exactness.apply(plain.model, policy)
    case = sharded(plain, engine)
    assert exactness.differences(expected, exactness.step(case)) == []
    with exactness.counted_entries(case.model) as (_, backward):
        exactness.step(case)
    assert {name.replace("_fsdp_wrapped_module.", "") for name in backward if name.endswith("self_attn.q_proj")} == {
        f"model.layers.{idx}.self_attn.q_proj" for idx in range(num_layers(case.model))
    }


def num_layers(model: nn.Module) -> int:
    (stack,) = find_layers(model)
    return len(stack.layers)


@every_engine
@pytest.mark.parametrize("policy", ["segments_2", "nested"])
def test_layers_of_a_segment_share_one_saved_input(engine: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_ckpt.regions import segments

    joined: list[bool] = []
    goes_on = segments._Segment.goes_on_with

    def recording(self: segments._Segment, *args: object) -> bool:
        joined.append(goes_on(self, *args))  # type: ignore[arg-type]
        return joined[-1]

    monkeypatch.setattr(segments._Segment, "goes_on_with", recording)
    case = sharded(exactness.build("llama", num_layers=6), engine)
    with exactness.apply(case.model, policy):
        exactness.step(case)
    size = POLICIES[policy][1]["segment_size"]
    # The first layer of the stack finds no open segment to go on with.
    assert joined == [bool(idx % size) for idx in range(1, 6)]


@every_engine
def test_plan_is_the_one_of_the_unsharded_model(engine: str) -> None:
    with hf_ckpt.apply(exactness.build("llama").model, "full", every_n_layers=2) as plain:
        expected = plain.plan
    case = sharded(exactness.build("llama"), engine)
    with hf_ckpt.apply(case.model, "full", every_n_layers=2) as applied:
        assert applied.plan == expected
        assert applied.plan.model_class == "LlamaForCausalLM"
    with hf_ckpt.apply(case.model, expected) as again:
        assert again.plan == expected


@every_engine
def test_removal_leaves_a_sharded_model_as_found(engine: str) -> None:
    case = sharded(exactness.build("llama"), engine)
    exactness.step(case)
    hooks = hooks_of(case.model)
    before = traces.snapshot(case.model)
    names = [name for name, _ in case.model.named_modules()]
    for policy in POLICIES:
        with exactness.apply(case.model, policy):
            exactness.step(case)
            assert [name for name, _ in case.model.named_modules()] == names
        case.model.zero_grad(set_to_none=True)
    assert hooks_of(case.model) == hooks
    changed = traces.differences(before, traces.snapshot(case.model))
    assert [line for line in changed if "gradient_checkpointing" in line or line.endswith(": forward")] == []


def hooks_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {
        name: (len(module._forward_pre_hooks), len(module._forward_hooks)) for name, module in model.named_modules()
    }


@every_engine
def test_shapes_are_those_of_the_unsharded_model(engine: str) -> None:
    def shapes(model: nn.Module) -> dict[str, torch.Size]:
        found = parameter_shapes(model)
        names = {module: clean_path(model, name) for name, module in model.named_modules()}
        return {f"{names[module]}.{name}": shape for module, own in found.items() for name, shape in own.items()}

    assert shapes(sharded(exactness.build("llama"), engine).model) == shapes(exactness.build("llama").model)


@every_engine
def test_recomputed_share_is_that_of_the_unsharded_model(engine: str) -> None:
    def share(model: nn.Module) -> float:
        with hf_ckpt.apply(model, "ffn") as applied:
            return recomputed_share(applied.plan, applied.stacks)

    assert share(sharded(exactness.build("llama"), engine).model) == share(exactness.build("llama").model)


def test_class_name_is_the_one_without_engines() -> None:
    case = sharded(exactness.build("llama"), "fsdp2")
    assert type(case.model).__name__ == "FSDPLlamaForCausalLM"
    assert class_name(case.model) == "LlamaForCausalLM"
    assert class_name(sharded(exactness.build("llama"), "fsdp1").model) == "LlamaForCausalLM"


def whole_in_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def whole_in_fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("wrap", [whole_in_fsdp1, whole_in_fsdp2])
def test_model_in_one_shard_raises(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(exactness.build("llama", num_layers=4).model)
    with pytest.raises(UnsupportedError) as raised:
        hf_ckpt.apply(model, "full")
    assert str(raised.value) == (
        "FSDP wrapped 1 module of LlamaForCausalLM, but none of its 4 decoder layers: every device would gather the "
        "whole model at once. Set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP and "
        "fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer."
    )


def test_parts_as_units_are_accepted() -> None:
    case = exactness.build("llama")
    mesh = init_device_mesh("cpu", (1,))
    for layer in case.model.model.layers:
        fully_shard(layer.mlp, mesh=mesh)
    fully_shard(case.model, mesh=mesh)
    assert isinstance(case.model.model.layers[0].mlp, FSDPModule)
    for policy in POLICIES:
        assert exactness.check(case, policy) == []
