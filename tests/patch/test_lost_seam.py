"""Where something else runs than the wrapper of transformers, layers are recomputed all the same, and exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer

import hf_ckpt
from hf_ckpt.patch.stack_patch import runs_seam
from hf_ckpt.upstream.transformers import FLAG, FORWARD
from tests import exactness, traces, zoo
from tests.training import callback, counted, llama, losses, trainer

pytestmark = pytest.mark.core

Lose = Callable[[zoo.Case, pytest.MonkeyPatch], None]

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "selective": ("selective", {}),
    "offload": ("full", {"offload": "cpu"}),
    "segments": ("full", {"segment_size": 2}),
    "nested": ("full", {"segment_size": 2, "nested": True}),
}
every_policy = pytest.mark.parametrize("policy", POLICIES)


def layers_of(case: zoo.Case) -> list[nn.Module]:
    model = case.model.model
    return list(getattr(model, "decoder", model).layers)


def put_on_class(case: zoo.Case, patch: pytest.MonkeyPatch) -> None:
    """As a library does that is imported for its speed."""
    cls = type(layers_of(case)[0])
    before = cls.forward
    patch.setattr(cls, "forward", lambda self, *args, **kwargs: before(self, *args, **kwargs))


def put_on_class_with_wraps(case: zoo.Case, patch: pytest.MonkeyPatch) -> None:
    """The patch looks like what it calls."""
    cls = type(layers_of(case)[0])
    before = cls.forward

    @wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return before(self, *args, **kwargs)

    patch.setattr(cls, "forward", forward)


def put_on_base_class(case: zoo.Case, patch: pytest.MonkeyPatch) -> None:
    """The layers are of a class whose own wrapper is gone, so that the base's counts."""
    put_on_class(case, patch)
    base = type(layers_of(case)[0])
    inner = type(base.__name__, (base,), {})
    if FORWARD in vars(inner):
        del inner.forward
    for layer in layers_of(case):
        layer.__class__ = inner


class Unwrapped:
    """Comes before the layer's class, and keeps transformers from wrapping the forward of the class made of both."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Does not call the next one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def put_before_class(case: zoo.Case, patch: pytest.MonkeyPatch) -> None:
    base = type(layers_of(case)[0])
    mixed = type(f"Mixed{base.__name__}", (Unwrapped, base), {})
    for layer in layers_of(case):
        layer.__class__ = mixed


def put_on_layers(case: zoo.Case, patch: pytest.MonkeyPatch) -> None:
    """Bound to the instance, past the wrapper."""
    for layer in layers_of(case):
        cls = type(layer)
        layer.forward = MethodType(wraps(cls.forward)(partial(getattr(cls.forward, "__wrapped__", cls.forward))), layer)


LOST: dict[str, Lose] = {
    "class": put_on_class,
    "class, wraps": put_on_class_with_wraps,
    "base class": put_on_base_class,
    "mixin": put_before_class,
    "instance": put_on_layers,
}
every_loss = pytest.mark.parametrize("lose", LOST.values(), ids=LOST)


def build(model_type: str = "llama") -> zoo.Case:
    return exactness.build(model_type, attn_implementation="eager")


def runs_of(case: zoo.Case) -> list[int]:
    """Return how often the last linear of each layer's ffn is entered in a backward."""
    with exactness.counted_entries(case.model) as (_, backward):
        exactness.step(case)
    names = [name for name, _ in case.model.named_modules() if name.endswith(("input_layernorm", "final_layer_norm"))]
    return [backward[name] for name in names if "layers." in name]


@every_policy
@every_loss
def test_policy_is_in_force_where_the_seam_was_lost_before(
    lose: Lose, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = build()
    lose(case, monkeypatch)
    expected = exactness.step(case)
    case.model.zero_grad()
    found = traces.snapshot(case.model)
    mode, options = POLICIES[policy]
    with hf_ckpt.apply(case.model, mode, **options):
        assert exactness.differences(expected, exactness.step(case)) == []
        assert min(runs_of(case)) >= 1
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []


@every_policy
@every_loss
def test_policy_stays_in_force_where_the_seam_is_lost_later(
    lose: Lose, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = build()
    expected = exactness.step(case)
    mode, options = POLICIES[policy]
    with hf_ckpt.apply(case.model, mode, **options):
        assert exactness.differences(expected, exactness.step(case)) == []
        lose(case, monkeypatch)
        forwards = [layer.__dict__.get(FORWARD) for layer in layers_of(case)]
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
            assert min(runs_of(case)) >= 1
    assert [layer.__dict__.get(FORWARD) for layer in layers_of(case)] == forwards
    assert not any(vars(layer).get(FLAG) or vars(layer).get("_hf_ckpt_module_state") for layer in layers_of(case))
    assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.parametrize("lose", [put_on_class, put_on_layers])
@pytest.mark.parametrize("is_later", [False, True])
def test_layer_around_its_attention_is_in_force(lose: Lose, is_later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The ffn of an OPT is written out in its layers.
    case = build("opt")
    assert isinstance(layers_of(case)[0], OPTDecoderLayer)
    if not is_later:
        lose(case, monkeypatch)
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "ffn"):
        if is_later:
            lose(case, monkeypatch)
        assert exactness.differences(expected, exactness.step(case)) == []
        assert runs_of(case) == [1] * 4


def test_class_that_gets_its_forward_back_goes_on_to_be_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build()
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full"):
        with monkeypatch.context() as patch:
            put_on_class(case, patch)
            assert exactness.differences(expected, exactness.step(case)) == []
        assert runs_of(case) == [1] * 4
        assert exactness.differences(expected, exactness.step(case)) == []
    assert exactness.recomputed(case) == [False] * 4


def test_copy_of_a_model_without_its_seam_runs_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    case = build()
    put_on_class(case, monkeypatch)
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full"):
        other = zoo.Case("llama", copy.deepcopy(case.model), case.inputs)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.zero_()
    assert exactness.differences(expected, exactness.step(other)) == []
    assert runs_of(other) == [1] * 4


@pytest.mark.parametrize("policy", ["full", "mixed"])
@every_loss
def test_trainer_recomputes_where_the_seam_is_lost(
    lose: Lose, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    lose(zoo.Case("llama", model, {}), monkeypatch)
    run = trainer(model, tmp_path, callback(policy))
    with counted(model, "mlp") as counts:
        run.train()
    plain = llama()
    lose(zoo.Case("llama", plain, {}), monkeypatch)
    reference = trainer(plain, tmp_path)
    reference.train()
    assert losses(run) == losses(reference)
    assert counts[0] == 2 * run.state.max_steps


def test_layers_as_transformers_made_them_go_through_the_seam() -> None:
    case = build()
    with hf_ckpt.apply(case.model, "full"):
        assert all(map(runs_seam, layers_of(case)))
        assert not any(FORWARD in vars(layer) for layer in layers_of(case))


def test_subclass_of_a_layer_goes_through_the_seam() -> None:
    case = build()
    inner = type(
        "Inner", (LlamaDecoderLayer,), {"forward": lambda self, *a, **k: LlamaDecoderLayer.forward(self, *a, **k)}
    )
    for layer in layers_of(case):
        layer.__class__ = inner
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full"):
        assert not any(FORWARD in vars(layer) for layer in layers_of(case))
        assert exactness.differences(expected, exactness.step(case)) == []
        assert runs_of(case) == [1] * 4


# --- The flag, where others act on it. ---


@pytest.mark.parametrize("policy", ["full", "selective", "segments"])
def test_alora_trains_and_evaluates_as_without_a_plan(policy: str) -> None:
    # Each forward of PEFT's model places hooks on layers whose flag is set, which only a backward takes off.
    mode, options = POLICIES[policy]

    def losses(is_planned: bool) -> list[float]:
        case = exactness.build("llama", num_layers=2)
        tokens = case.inputs["input_ids"][0, -2:].tolist()
        config = LoraConfig(
            r=2,
            alora_invocation_tokens=tokens,
            target_modules=["q_proj"],
            task_type="CAUSAL_LM",
            init_lora_weights=False,
        )
        torch.manual_seed(0)
        model = get_peft_model(case.model, config).train()
        found = []
        with hf_ckpt.apply(model, mode, **options) if is_planned else nullcontext():
            for _ in range(2):
                loss = zoo.loss(model, case.inputs)
                loss.backward()
                found.append(loss.item())
                with torch.no_grad():
                    found += [zoo.loss(model.eval(), case.inputs).item(), zoo.loss(model, case.inputs).item()]
                model.train()
            assert not any(getattr(module, FLAG, False) for module in model.modules())
        return found

    assert losses(True) == losses(False)
