"""The first step proves values: faults planted in the library and in models stop it, and nothing else does."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import logging
import pickle
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from hf_ckpt import HFCkptCallback, PlanMismatchError, PolicyError
from hf_ckpt.policy.policy import REVOLVE
from hf_ckpt.regions import fingerprints, recompute, saved_tensors, segments, value_proof
from hf_ckpt.regions.execution_state import RandomState, is_in_backward
from hf_ckpt.regions.offload import offloader
from hf_ckpt.regions.recompute import Call
from hf_ckpt.regions.selective import kept_outputs, selective_recompute
from hf_ckpt.regions.selective.kept_outputs import KeptOutputs, _KeeperHandle
from tests.planted import in_place_of_checkpoint, random_state_left
from tests.training import llama, lora, rows, trainer, weights

pytestmark = pytest.mark.core

Plant = Callable[[pytest.MonkeyPatch, nn.Module], None]

CPU = {"to": "cpu", "min_bytes": 0}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "attention": ("attention", {}),
    "ffn": ("ffn", {}),
    "segment": ("full", {"segment_size": 2}),
    "nested": ("full", {"segment_size": 2, "nested": True}),
    "snapshots": ("full", {"nested": REVOLVE, "snapshots": 1}),
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
    "offload": ("full", {"offload": CPU}),
    "selective_offload": ("selective", {"offload": CPU}),
}


def batch() -> dict[str, Tensor]:
    texts = rows(2)
    return {name: torch.stack([text[name] for text in texts]) for name in texts[0]}


def backward(model: nn.Module) -> None:
    model(**batch()).loss.backward()


# --- Planted in the library. ---


def random_state_is_left(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    patch.setattr(RandomState, "brought_back", random_state_left)
    patch.setattr(RandomState, "restore", lambda self: None)


def mask_is_dropped(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    run = Call.run

    def forgetful(self: Call, *tensors: Any) -> Any:
        if is_in_backward() and "attention_mask" in self._arguments:
            mask = torch.zeros(2, 1, 8, 8)
            self._arguments["attention_mask"] = mask
        return run(self, *tensors)

    patch.setattr(Call, "run", forgetful)


def outputs_are_rolled(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    hand_out = KeptOutputs._pop

    def rolled(self: KeptOutputs, number: Any, *rest: Any) -> Any:
        found = self.entries[number]
        for other in self.entries.values():
            if other is not found and _shape(other.output) == _shape(found.output) is not None:
                found.output, other.output = other.output, found.output
                break
        return hand_out(self, number, *rest)

    patch.setattr(KeptOutputs, "_pop", rolled)


def _shape(output: object) -> torch.Size | None:
    found = output.value if isinstance(output, _KeeperHandle) else output
    return getattr(found, "shape", None)


def input_is_scaled(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    saved = saved_tensors.saved_behind
    patch.setattr(
        segments, "saved_behind", lambda token: [x * 1.01 if x.is_floating_point() else x for x in saved(token)]
    )


def layer_is_skipped(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    run = Call.run

    def skipping(self: Call, *tensors: Any) -> Any:
        returned = run(self, *tensors)
        keywords = [place for place in self._arguments if isinstance(place, str)]
        return tensors[0] + 0 * returned if is_in_backward() and len(keywords) > 2 else returned

    patch.setattr(Call, "run", skipping)


def buffer_is_stale(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    unpack = offloader.unpack
    found: list[Tensor] = []

    def stale(handle: Any) -> Any:
        tensor = unpack(handle)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            found.append(tensor)
            return next((each for each in found if each.shape == tensor.shape), tensor)
        return tensor

    patch.setattr(offloader, "unpack", stale)


def buffer_is_the_neighbours(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    unpack = offloader.unpack
    last: list[Tensor] = []

    def neighbours(handle: Any) -> Any:
        tensor = unpack(handle)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            before = last[-1] if last and last[-1].shape == tensor.shape else tensor
            last.append(tensor)
            return before
        return tensor

    patch.setattr(offloader, "unpack", neighbours)


def snapshot_is_stale(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    taken_from = segments._Link.taken_from
    first: dict[int, Tensor] = {}

    def stale(self: segments._Link, before: Any) -> Any:
        taken = taken_from(self, before)
        for number, tensor in taken.items():
            first.setdefault(number, tensor)
        return first if first.keys() == taken.keys() else taken

    patch.setattr(segments._Link, "taken_from", stale)


def kept_outputs_are_exchanged(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """Each layer is handed what the one after it kept."""
    hand_out = KeptOutputs._pop
    last: dict[Any, Any] = {}

    def exchanged(self: KeptOutputs, number: Any, *rest: Any) -> Any:
        found = hand_out(self, number, *rest)
        before = last.get(number, found)
        last[number] = found
        return before

    patch.setattr(KeptOutputs, "_pop", exchanged)


def kept_buffer_is_stale(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    get = offloader.OffloadKeeper.get

    def zeros(self: Any, handle: Any) -> Tensor:
        found = get(self, handle)
        # Not where the forward's was, by chance: it would be taken for that, written to since.
        return found.new_zeros(found.numel() + 1)[1:].view(found.shape)

    patch.setattr(offloader.OffloadKeeper, "get", zeros)


# --- Planted in a model. ---


def in_mlp(model: nn.Module, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Let the activation function of the third layer's ffn return something else."""
    mlp = model.get_submodule("model.layers.2.mlp")
    found = mlp.act_fn

    class Changed(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return change(mlp, found(hidden))

    mlp.act_fn = Changed()


def own_generator(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    # Its module does not hold it, nor the four below: what it holds is brought back.
    generator = torch.Generator().manual_seed(0)
    in_mlp(model, lambda mlp, x: x + torch.randn(x.shape, generator=generator))


def generator_of_numpy(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    generator = np.random.default_rng(0)
    in_mlp(model, lambda mlp, x: x * float(generator.uniform(0.5, 1.5)))


def generator_of_python(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    generator = random.Random(0)
    in_mlp(model, lambda mlp, x: x * generator.uniform(0.5, 1.5))


def counter(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    calls: list[int] = []

    def counted(mlp: nn.Module, hidden: Tensor) -> Tensor:
        calls.append(1)
        return hidden * (1 + 0.1 * len(calls))

    in_mlp(model, counted)


def moving_tensor(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    mean = torch.zeros(())

    def moved(mlp: nn.Module, hidden: Tensor) -> Tensor:
        mean.mul_(0.9).add_(hidden.detach().mean())
        return hidden - mean.clone()

    in_mlp(model, moved)


def inputs_are_detached(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    split_call = recompute.split_call

    def detached(function: Any, args: Any) -> Any:
        call, tensors = split_call(function, args)
        return call, [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]

    for module in (recompute, segments, selective_recompute):
        patch.setattr(module, "split_call", detached)


def forward_has_no_graph(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    in_place_of_checkpoint(patch, lambda *args, **_: checkpoint(*args, use_reentrant=True))


LIBRARY: dict[str, tuple[Plant, tuple[str, ...], str]] = {
    "random state": (
        random_state_is_left,
        ("full", "attention", "segment", "nested", "snapshots", "selective", "offload"),
        "generators was not brought back.",
    ),
    "mask": (mask_is_dropped, ("full", "segment", "nested", "offload"), "self_attn"),
    "rolled outputs": (outputs_are_rolled, ("selective", "selective_offload"), "than the forward kept"),
    "scaled input": (input_is_scaled, ("segment", "nested"), "returns something else than its forward"),
    "skipped layer": (layer_is_skipped, ("full", "segment", "selective"), "returns something else than its forward"),
    "exchanged outputs": (kept_outputs_are_exchanged, ("selective", "selective_attention"), "returns something else"),
    "stale snapshot": (snapshot_is_stale, ("snapshots",), "returns something else than its forward"),
    "neighbour's buffer": (buffer_is_the_neighbours, ("offload", "selective_offload"), "than"),
    "stale buffer": (buffer_is_stale, ("offload", "selective_offload"), "than"),
    "lost gradient": (
        inputs_are_detached,
        ("full", "attention", "ffn", "segment", "nested", "selective", "offload"),
        "loses the gradient of",
    ),
    "no graph": (forward_has_no_graph, ("full", "attention"), "its forward ran without a graph"),
    "stale kept buffer": (kept_buffer_is_stale, ("selective_offload",), "than the forward kept"),
}
MODEL: dict[str, tuple[Plant, str]] = {
    "own generator": (own_generator, "state that its module does not hold"),
    "numpy": (generator_of_numpy, "state that its module does not hold"),
    "random": (generator_of_python, "state that its module does not hold"),
    "counter": (counter, "state that its module does not hold"),
    "tensor": (moving_tensor, "state that its module does not hold"),
}
CASES = [
    *((name, plant, option, text) for name, (plant, options, text) in LIBRARY.items() for option in options),
    *(
        (name, plant, option, text)
        for name, (plant, text) in MODEL.items()
        for option in ("full", "ffn", "segment", "selective", "offload")
    ),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[2]}".replace(" ", "_"))
def case(request: pytest.FixtureRequest) -> tuple[str, Plant, str, str]:
    found: tuple[str, Plant, str, str] = request.param
    return found


@pytest.mark.sweep(keep=20)
def test_a_planted_fault_stops_the_first_backward(
    case: tuple[str, Plant, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plant, option, text = case
    policy, options = OPTIONS[option]
    model = llama().train()
    with hf_ckpt.apply(model, policy, **options):
        plant(monkeypatch, model)
        with pytest.raises(PlanMismatchError) as raised:
            backward(model)
    assert text in str(raised.value)
    assert "model.layers." in str(raised.value)


@pytest.mark.parametrize("name", [*LIBRARY, "own generator", "numpy", "counter"])
def test_a_planted_fault_stops_the_trainer_before_the_optimizer_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, *option, text = LIBRARY[name] if name in LIBRARY else MODEL[name]
    policy, options = OPTIONS[option[0][0] if option else "full"]
    model = llama()
    run = trainer(model, tmp_path, HFCkptCallback(policy, **options))
    plant(monkeypatch, model)
    before = weights(model)
    with pytest.raises(PlanMismatchError, match='With on_mismatch="warn"') as raised:
        run.train()
    assert text in str(raised.value)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())


def test_the_first_module_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().train()
    generator_of_numpy(monkeypatch, model)
    with hf_ckpt.apply(model, "full"), pytest.raises(PlanMismatchError) as raised:
        backward(model)
    message = str(raised.value)
    assert message.startswith("model.layers.2: its recomputation returns something else than its forward (by ")
    assert "The first module inside that returns something else is mlp.act_fn." in message


@pytest.mark.parametrize("place", ["mlp", "mlp.act_fn", "self_attn.o_proj"])
@pytest.mark.parametrize("policy", ["full", "selective", "selective_attention"])
def test_parts_of_an_adapted_layer_are_not_named_for_what_differs_behind_them(policy: str, place: str) -> None:
    model = lora().train()
    generator = np.random.default_rng(0)
    model.get_submodule(f"base_model.model.model.layers.1.{place}").register_forward_hook(
        lambda module, args, output: output * float(1 + generator.random())
    )
    with hf_ckpt.apply(model, policy), pytest.raises(PlanMismatchError) as raised:
        backward(model)
    assert f"The first module inside that returns something else is {place}. " in str(raised.value)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_an_identity_is_looked_at_only_where_a_hook_changes_what_it_returns(is_hooked: bool) -> None:
    model = lora(lora_dropout=0.0).train()
    mlp = model.get_submodule("base_model.model.model.layers.1.mlp")
    dropout = mlp.up_proj.lora_dropout.default
    assert type(dropout) is nn.Identity
    place = dropout if is_hooked else mlp.up_proj.lora_A.default
    place.register_forward_hook(lambda module, args, output: output * (1 + is_in_backward()))
    with hf_ckpt.apply(model, "full"), pytest.raises(PlanMismatchError) as raised:
        backward(model)
    first = "lora_dropout" if is_hooked else "lora_A"
    assert f"that returns something else is mlp.up_proj.{first}.default." in str(raised.value)


def test_hooks_of_the_proof_are_not_kept_beyond_it() -> None:
    model = llama().train()
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: None)
    proofs: list[weakref.ref[Any]] = []
    with hf_ckpt.apply(model, "full") as applied:
        make = applied.value_proof.make_call_proof
        applied.value_proof.make_call_proof = lambda *args: proofs.append(weakref.ref(made := make(*args))) or made
        backward(model)
        gc.collect()
        assert len(proofs) == 4
        assert [proof() for proof in proofs] == [None] * 4
    hook.remove()


def test_a_selective_layer_asks_the_device_once_for_all_that_it_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora(lora_dropout=0.0).train()
    asked, looked = [], []
    are_equal, sums_differ = fingerprints.are_equal, fingerprints.sums_differ

    def counted(one: fingerprints.Fingerprint, other: fingerprints.Fingerprint) -> bool:
        asked.append(one.hash.numel())
        return are_equal(one, other)

    def counted_sums(before: Any, now: Any) -> Any:
        looked.append(len(before))
        return sums_differ(before, now)

    monkeypatch.setattr(fingerprints, "are_equal", counted)
    monkeypatch.setattr(fingerprints, "is_read_late", lambda tensor: True)
    monkeypatch.setattr(kept_outputs, "sums_differ", counted_sums)
    with hf_ckpt.apply(model, "selective"):
        backward(model)
    # What each returns; what the last one was given and returned, and its gradients.
    assert len(asked) == 4 + 2
    # All that a layer keeps when its forward ends and when it was handed out; all that was fed.
    assert len(looked) == 3 * 4
    assert all(number > 4 for number in looked)


def test_layers_with_the_same_fault_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().train()
    random_state_is_left(monkeypatch, model)
    with hf_ckpt.apply(model, "full"), pytest.raises(PlanMismatchError) as raised:
        backward(model)
    assert "model.layers.3 (and 3 more): " in str(raised.value)


def test_layers_with_faults_of_their_own_are_all_named() -> None:
    model = llama().train()
    generator = np.random.default_rng(0)
    for number, name in ((1, "mlp"), (2, "self_attn.o_proj")):
        model.get_submodule(f"model.layers.{number}.{name}").register_forward_hook(
            lambda module, args, output: output * float(1 + generator.random())
        )
    with hf_ckpt.apply(model, "full"), pytest.raises(PlanMismatchError) as raised:
        backward(model)
    lines = str(raised.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["model.layers.2", "model.layers.1"]
    assert ["else is self_attn.o_proj." in lines[0], "else is mlp." in lines[1]] == [True, True]


def test_what_is_only_warned_of_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    generator_of_numpy(monkeypatch, model)
    run = trainer(model, tmp_path, HFCkptCallback("full", on_mismatch="warn"))
    with pytest.warns(UserWarning, match="state that its module does not hold"):
        run.train()
    assert run.state.global_step == 2


# --- When. ---


def looked_at(model: nn.Module, prove: Any, forwards: int, policy: str = "full") -> list[int]:
    """Return which of so many forwards, each with its backward, were looked at."""
    found: list[int] = []
    with hf_ckpt.apply(model, policy, prove=prove) as applied:
        regions = applied.value_proof._regions
        for number in range(forwards):
            loss = model(**batch()).loss
            if regions[0]._tries:
                found.append(number)
            loss.backward()
    return found


@pytest.mark.parametrize(
    ("prove", "expected"), [("first_step", [0]), ("off", []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])]
)
def test_prove_says_which_forwards(prove: Any, expected: list[int]) -> None:
    assert looked_at(llama().train(), prove, 5) == expected


def test_selective_regions_are_proven_once_more_where_they_run_in_another_way() -> None:
    # First under a dispatch mode, then with kernels of their own.
    assert looked_at(llama().train(), "first_step", 4, "selective") == [0, 1]


@pytest.mark.parametrize(("prove", "expected"), [("first_step", [0]), ("off", []), (2, [0, 2])])
def test_prove_says_which_steps_of_the_trainer(
    prove: Any, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    compared = value_proof.RegionProof.finish_call
    run = trainer(llama(), tmp_path, HFCkptCallback("full", prove=prove), max_steps=4, gradient_accumulation_steps=2)
    patched = lambda self, fault: (seen.append(run.state.global_step), compared(self, fault))  # noqa: E731
    monkeypatch.setattr(value_proof.RegionProof, "finish_call", patched)
    run.train()
    # The first micro-batch of each: four regions once.
    assert seen == [step for step in expected for _ in range(4)]


def test_what_has_no_gradients_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().train()
    lower = [model.get_submodule(name) for name in ("model.embed_tokens", "model.layers.0", "model.layers.1")]
    for module in lower:
        module.requires_grad_(False)
    with hf_ckpt.apply(model, "full") as applied:
        for _ in range(5):
            backward(model)
        assert [region.is_awaited for region in applied.value_proof._regions] == [True, True, False, False]
        # Unfreezing, layer by layer.
        for module in lower:
            module.requires_grad_(True)
        backward(model)
        assert not any(region.is_awaited for region in applied.value_proof._regions)


def test_forwards_without_a_backward_are_looked_at_less_and_less() -> None:
    model = llama().train()
    seen = []
    with hf_ckpt.apply(model, "full") as applied:
        region = applied.value_proof._regions[0]
        for number in range(20):
            tries = region._tries
            model(**batch())
            seen += [number] * (region._tries - tries)
    assert seen == [0, 1, 2, 3, 7, 15]


def test_a_fault_in_a_backward_that_fails_is_told_in_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().train()
    generator_of_numpy(monkeypatch, model)
    with hf_ckpt.apply(model, "full"):
        hook = model.get_submodule("model.layers.0").register_full_backward_pre_hook(_fail)
        loss = model(**batch()).loss
        with pytest.raises(ValueError, match="an operator fails"):
            loss.backward()
        hook.remove()
        with pytest.raises(PlanMismatchError, match="state that its module does not hold"):
            model(**batch())


def test_rounding_in_recomputation_is_noise_whatever_else_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = llama(attention_dropout=0.0).train()
    noise = torch.Generator().manual_seed(0)

    def rounded(mlp: nn.Module, hidden: Tensor) -> Tensor:
        mlp.calls += 1
        return hidden * (1 + 1e-6 * torch.rand(hidden.shape, generator=noise))

    model.get_submodule("model.layers.2.mlp").calls = 0
    in_mlp(model, rounded)
    with hf_ckpt.apply(model, "full"):
        backward(model)
    assert "kernels here do not repeat themselves" in caplog.text


@pytest.mark.parametrize(("size", "is_noise"), [(1e-6, True), (1e-2, False)])
def test_noise_where_recomputation_cannot_run_to_the_end(size: float, is_noise: bool) -> None:
    model = llama(attention_dropout=0.0).train()
    noise = torch.Generator().manual_seed(0)
    in_mlp(model, lambda mlp, x: x * (1 + size * torch.rand(x.shape, generator=noise)))
    for layer in model.get_submodule("model.layers").children():
        # As ZeRO-3 marks its modules.
        layer.ds_id = 0
    with hf_ckpt.apply(model, "full"), contextlib.ExitStack() as expected:
        if not is_noise:
            found = expected.enter_context(
                pytest.raises(PlanMismatchError, match=r"model\.layers\.2: in its recomputation")
            )
        backward(model)
    assert is_noise or " % of its norm)" in str(found.value)


def _fail(module: nn.Module, gradients: Any) -> None:
    raise ValueError("an operator fails")


def test_forwards_without_gradients_do_not_count() -> None:
    model = llama().train()
    with hf_ckpt.apply(model, "full") as applied:
        with torch.no_grad():
            model(**batch())
        assert all(region.is_awaited and not region._tries for region in applied.value_proof._regions)
        backward(model)
        assert not any(region.is_awaited for region in applied.value_proof._regions)


def test_what_a_backward_never_reached_is_proven_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().train()
    with hf_ckpt.apply(model, "full") as applied:
        hidden = model(**batch(), output_hidden_states=True).hidden_states
        hidden[2].sum().backward()
        awaited = [region.is_awaited for region in applied.value_proof._regions]
        generator_of_numpy(monkeypatch, model)
        with pytest.raises(PlanMismatchError, match=r"model\.layers\.2: "):
            backward(model)
    assert awaited == [False, False, True, True]


def test_a_copy_proves_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().train()
    with hf_ckpt.apply(model, "full", segment_size=2):
        backward(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            generator_of_numpy(monkeypatch, twin)
            with pytest.raises(PlanMismatchError, match="state that its module does not hold"):
                backward(twin)
        backward(model)


@pytest.mark.parametrize("prove", [0, -1, True, "always", 1.5, None])
def test_another_value_of_prove_is_refused(prove: Any) -> None:
    with pytest.raises(PolicyError, match="prove is"):
        hf_ckpt.apply(llama(), "full", prove=prove)
    with pytest.raises(PolicyError, match="prove is"):
        HFCkptCallback("full", prove=prove)


@pytest.mark.parametrize("option", ["full", "ffn", "segment", "selective"])
def test_saved_tensors_that_come_back_rounded_are_noticed_in_whichever_step(option: str) -> None:
    policy, options = OPTIONS[option]
    model = llama().train()
    rounds = torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved.bfloat16() if saved.is_floating_point() else saved,
        lambda packed: packed.float() if packed.is_floating_point() else packed,
    )
    with hf_ckpt.apply(model, policy, **options):
        backward(model)
        with rounds:
            loss = model(**batch()).loss
        with pytest.raises(PlanMismatchError, match="saved_tensors_hooks that do not give back"):
            loss.backward()


# --- No false alarm. ---


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("make", [llama, lora])
def test_what_is_right_is_left_alone(make: Callable[[], nn.Module], option: str) -> None:
    policy, options = OPTIONS[option]
    model = make().train()
    with hf_ckpt.apply(model, policy, prove=1, **options) as applied:
        for _ in range(3):
            backward(model)
        assert not any(region.is_awaited for region in applied.value_proof._regions)


def test_a_second_backward_over_one_graph_is_looked_at_too() -> None:
    model = llama().train()
    with hf_ckpt.apply(model, "full"):
        loss = model(**batch()).loss
        loss.backward(retain_graph=True)
        loss.backward()


def test_kernels_that_do_not_repeat_themselves_are_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama().train()
    noise = torch.Generator().manual_seed(0)

    def rounded_otherwise(mlp: nn.Module, hidden: Tensor) -> Tensor:
        # As far as one unit in the last place.
        return hidden * (1 + 1.2e-7 * torch.randint(0, 2, hidden.shape, generator=noise))

    in_mlp(model, rounded_otherwise)
    with hf_ckpt.apply(model, "full"), caplog.at_level(logging.INFO, "hf_ckpt"):
        backward(model)
        backward(model)
    assert [record.getMessage()[:14] for record in caplog.records if "do not repeat" in record.getMessage()] == [
        "model.layers.2"
    ]


@pytest.mark.parametrize(
    ("runs", "num_runs"),
    [
        # The run that comes first after the recomputation gives the same, or nearly the same.
        ("annna", 5),
        ("an.na", 5),
        ("an.nnnn.na", 10),
        # At once.
        ("ana", 3),
        # A fault that is as small as rounding: however often it runs, what it gives is not what the forward gave.
        ("an", None),
        ("an.n.n.n.n.n", None),
    ],
)
def test_noise_is_measured_by_more_than_one_run(
    runs: str, num_runs: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama(attention_dropout=0.0).train()
    seen: list[str] = []
    of_original: list[str] = []

    def rounded(mlp: nn.Module, hidden: Tensor) -> Tensor:
        # All elements are off, or only one, or none. The original is noisy from run to run.
        is_original = "_run_forward" in {frame.function for frame in inspect.stack(0)}
        run = "an"[len(of_original) % 2] if is_original else runs.ljust(99, "n")[len(seen)]
        (of_original if is_original else seen).append(run)
        off = torch.zeros_like(hidden)
        if run != "n":
            off.view(-1)[: None if run == "a" else 1] = 1e-6
        return hidden * (1 + off)

    in_mlp(model, rounded)
    with hf_ckpt.apply(model, "full"), caplog.at_level(logging.INFO, "hf_ckpt"):
        if num_runs is None:
            with pytest.raises(PlanMismatchError, match=r"model\.layers\.2: its recomputation returns something else"):
                backward(model)
            assert len(seen) == 2 + value_proof.MOST_RUNS
        else:
            backward(model)
            assert len(seen) == num_runs
            assert "do not repeat themselves" in caplog.text


@pytest.mark.slow
@pytest.mark.sweep
def test_what_is_compiled_is_said_not_to_be_proven(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    run = trainer(llama(num_hidden_layers=2), tmp_path, HFCkptCallback("full"), **compiled)
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        run.train()
    said = [record.getMessage() for record in caplog.records if "does not prove" in record.getMessage()]
    assert [text[:25] for text in said] == ["model.layers.0 (and 1 mor"]


def test_nothing_is_left_on_a_model() -> None:
    model = llama().train()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with hf_ckpt.apply(model, "full"):
        backward(model)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


class OwnDropout(nn.Module):
    """A residual layer whose dropout, small beside rounding in bfloat16, draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(64, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        branch = self.linear(hidden)
        kept = torch.rand(branch.shape, generator=self.generator).to(branch.dtype) < 0.9
        return hidden + 0.1 * branch * kept


def test_a_generator_of_its_own_is_brought_back() -> None:
    found = []
    for policy in ("none", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(OwnDropout(), OwnDropout()).bfloat16().train()
        holder = nn.Module()
        holder.layers = nn.ModuleList(model)
        holder.forward = model.forward  # type: ignore[method-assign]
        hidden = torch.randn(4, 16, 64, dtype=torch.bfloat16)
        with hf_ckpt.apply(holder, policy, layers="layers"):
            holder(hidden).square().mean().backward()
        found.append([weight.grad for weight in holder.parameters()])
    assert all(map(torch.equal, *found))
