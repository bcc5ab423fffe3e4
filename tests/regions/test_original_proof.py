"""One region of each kind is held against the original: what both runs of a region do wrong stops the first step."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt import HFCkptCallback, PlanMismatchError
from hf_ckpt.patch import layer_settings
from hf_ckpt.regions import original_proof, recompute, segments
from hf_ckpt.regions.execution_state import is_extra_run
from hf_ckpt.regions.recompute import Call
from hf_ckpt.regions.selective import selective_recompute
from tests import exactness, plain_models
from tests.flops import Flops
from tests.regions.test_value_proof import OPTIONS, backward, batch
from tests.training import llama, lora, trainer, weights

pytestmark = pytest.mark.core

Plant = Callable[[pytest.MonkeyPatch], None]


# --- What a library could do wrong in both runs of a region: no comparison of the two would show it. ---


def on_regions(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Let `change(region, function, *args)` run in place of each region."""
    for name in ("recompute", "recompute_around", "recompute_selectively", "run_in_segment"):
        found = getattr(layer_settings, name)
        patch.setattr(layer_settings, name, partial(_changed, change, found))


def _changed(change: Callable[..., Any], region: Callable[..., Any], *args: Any, **options: Any) -> Any:
    # What a plan gives a region comes before the function.
    at = next(at for at, each in enumerate(args) if isinstance(each, partial) and _runs_a_module(each))
    return change(partial(region, *args[:at], **options), *args[at:])


def _runs_a_module(function: partial[Any]) -> bool:
    from hf_ckpt.regions.execution_state import module_of

    return module_of(function) is not None


def output_is_scaled(patch: pytest.MonkeyPatch) -> None:
    on_regions(patch, lambda region, *args: _on_first(lambda x: x * 1.001, region(*args)))


def input_is_scaled(patch: pytest.MonkeyPatch) -> None:
    def scaled(region: Any, function: Any, *args: Any) -> Any:
        if args:
            return region(function, args[0] * 1.001, *args[1:])
        keywords = {**function.keywords, "hidden_states": function.keywords["hidden_states"] * 1.001}
        return region(partial(function.func, *function.args, **keywords))

    on_regions(patch, scaled)


def region_is_skipped(patch: pytest.MonkeyPatch) -> None:
    run = Call.run

    def skipping(self: Call, *tensors: Any) -> Any:
        returned = run(self, *tensors)
        if not tensors or not tensors[0].requires_grad:
            # Or nothing of an adapter would be trained, which torch says.
            return returned
        return tensors[0] if isinstance(returned, Tensor) else (tensors[0], *returned[1:])

    patch.setattr(Call, "run", skipping)


def keyword_is_dropped(patch: pytest.MonkeyPatch) -> None:
    split = recompute.split_call

    def dropping(function: Any, args: Any) -> Any:
        call, tensors = split(function, args)
        if call._arguments.get("position_embeddings") is not None:
            call._arguments["position_embeddings"] = tuple(map(torch.ones_like, call._arguments["position_embeddings"]))
        return call, tensors

    for module in (recompute, segments, selective_recompute):
        patch.setattr(module, "split_call", dropping)


def gradient_is_doubled(patch: pytest.MonkeyPatch) -> None:
    def doubled(region: Any, *args: Any) -> Any:
        returned = region(*args)
        first = returned if isinstance(returned, Tensor) else returned[0]
        first.register_hook(lambda gradient: 2 * gradient)
        return returned

    on_regions(patch, doubled)


class _Scaled(torch.autograd.Function):
    """Gives the gradient times what a function returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Callable[[], float]) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor(), None


def _tripled(x: Tensor) -> Tensor:
    tripled: Tensor = _Scaled.apply(x, lambda: 3.0)
    return tripled


def gradient_of_inputs_is_tripled(patch: pytest.MonkeyPatch) -> None:
    def tripled(region: Any, function: Any, *args: Any) -> Any:
        if args:
            return region(function, _tripled(args[0]), *args[1:])
        keywords = {**function.keywords, "hidden_states": _tripled(function.keywords["hidden_states"])}
        return region(partial(function.func, *function.args, **keywords))

    on_regions(patch, tripled)


def weights_are_detached(patch: pytest.MonkeyPatch) -> None:
    """An adapter, or a weight, trains in the model and not under the plan."""
    run = Call.run

    def detached(self: Call, *tensors: Any) -> Any:
        module = recompute.module_of(self._function) or next(
            value for value in self._arguments.values() if isinstance(value, nn.Module)
        )
        weight = [each for name, each in module.named_parameters() if each.requires_grad][-1]
        weight.requires_grad_(False)
        try:
            return run(self, *tensors)
        finally:
            weight.requires_grad_(True)

    patch.setattr(Call, "run", detached)


def _on_first(change: Callable[[Tensor], Tensor], returned: Any) -> Any:
    return change(returned) if isinstance(returned, Tensor) else (change(returned[0]), *returned[1:])


PLANTS: dict[str, tuple[Plant, str]] = {
    "output": (output_is_scaled, "returned something else|returns something else"),
    "input": (input_is_scaled, "is given another|returned something else"),
    "skipped": (region_is_skipped, "returned something else|does not depend|returns something else|ran once"),
    "keyword": (keyword_is_dropped, "returned something else"),
    "doubled": (gradient_is_doubled, "another gradient"),
    "tripled": (gradient_of_inputs_is_tripled, "another gradient|loses the gradient|is given another"),
    "detached": (weights_are_detached, "loses the gradient"),
}
UNCHANGED = {("keyword", "ffn"): "its inputs are no keywords"}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.parametrize("make", [llama, lora], ids=["full fine-tune", "lora"])
@pytest.mark.sweep(keep=14)
def test_a_fault_of_both_runs_stops_the_first_backward(
    name: str, option: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, option) in UNCHANGED:
        return
    plant, message = PLANTS[name]
    plant(monkeypatch)
    mode, options = OPTIONS[option]
    model = make().train()
    with hf_ckpt.apply(model, mode, **options), pytest.raises(PlanMismatchError, match=message):
        backward(model)


def test_the_trainer_stops_before_its_optimizer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient_is_doubled(monkeypatch)
    model = llama()
    before = weights(model)
    with pytest.raises(PlanMismatchError, match="another gradient"):
        trainer(model, tmp_path, HFCkptCallback("full")).train()
    assert all(map(torch.equal, before.values(), weights(model).values()))


# --- No false alarms. ---


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[original_proof.OriginalCall]:
    """Collect the calls whose gradients were compared."""
    found: list[original_proof.OriginalCall] = []
    compare = original_proof.OriginalCall._difference_of_gradients

    def noted(self: original_proof.OriginalCall, expected: Any, received: Any) -> str | None:
        if expected and received:
            found.append(self)
        return compare(self, expected, received)

    monkeypatch.setattr(original_proof.OriginalCall, "_difference_of_gradients", noted)
    return found


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("make", [llama, lora], ids=["full fine-tune", "lora"])
def test_gradients_are_compared_once_for_each_kind(
    option: str, make: Callable[[], nn.Module], proven: list[original_proof.OriginalCall]
) -> None:
    mode, options = OPTIONS[option]
    model = make().train()
    with hf_ckpt.apply(model, mode, **options) as applied:
        backward(model)
        # The last layer never offloads.
        assert len(proven) == (2 if option in ("offload", "selective_offload") else 1)
        assert applied.value_proof.without_original == []
        backward(model)
        assert len(proven) == (2 if option in ("offload", "selective_offload") else 1)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: weight.grad for name, weight in model.named_parameters()}


class Mixture(nn.Module):
    """A layer that returns the scores of its router as well, and adds what it has seen to lists and buffers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.router = nn.Linear(size, 2)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(2))
        self.register_buffer("num_seen", torch.zeros(()))
        self.history: list[int] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.history.append(len(x))
        scores = self.router(x)
        share = scores.softmax(-1)
        y = sum(
            share[..., [n]] * torch.nn.functional.dropout(torch.tanh(e(x)), 0.1) for n, e in enumerate(self.experts)
        )
        return x + y, scores


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for layer in self.layers:
            x, scores = layer(x)
            losses.append(scores.logsumexp(-1).square().mean())
        return x.square().mean() + sum(losses)


def mixtures() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Mixtures().train(), torch.randn(2, 5, 8)


def test_an_output_that_is_used_inside_too_is_no_false_alarm(proven: list[original_proof.OriginalCall]) -> None:
    plain, x = mixtures()
    torch.manual_seed(1)
    plain(x).backward()
    model, _ = mixtures()
    with hf_ckpt.apply(model, "full", layers="layers"):
        torch.manual_seed(1)
        model(x).backward()
    assert len(proven) == 1
    assert all(map(torch.equal, gradients_of(plain).values(), gradients_of(model).values()))
    # What the recomputation and the original add is taken out again.
    assert [len(layer.history) for layer in model.layers] == [1, 1, 1]


def test_tensors_that_a_hook_collects_are_no_false_alarm(caplog: pytest.LogCaptureFixture) -> None:
    model = llama().train()
    collected: list[Tensor] = []
    hook = model.get_submodule("model.layers.3.mlp").register_forward_hook(lambda *args: collected.append(args[-1]))
    with hf_ckpt.apply(model, "full"), caplog.at_level(logging.INFO, "hf_ckpt"):
        loss = model(**batch()).loss
        hook.remove()
        (loss + collected[0].square().mean()).backward()
    assert "model.layers.3: gradients are not held against" in caplog.text


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_of_some_and_of_several_backwards_are_no_false_alarm(option: str) -> None:
    mode, options = OPTIONS[option]
    model = llama().train()
    with hf_ckpt.apply(model, mode, **options):
        loss = model(**batch()).loss
        torch.autograd.grad(loss, [model.get_input_embeddings().weight], retain_graph=True)
        torch.autograd.grad(2 * loss, [model.get_parameter("model.layers.1.mlp.up_proj.weight")], retain_graph=True)
        (3 * loss).backward()


def test_a_second_derivative_is_no_false_alarm() -> None:
    model = llama(attn_implementation="eager").train()
    with hf_ckpt.apply(model, "full"):
        weight = model.get_input_embeddings().weight
        (gradient,) = torch.autograd.grad(model(**batch()).loss, [weight], create_graph=True)
        gradient.square().sum().backward()


@pytest.mark.parametrize("option", ["full", "segment", "selective"])
def test_what_a_layer_is_given_and_leaves_alone_is_no_fault(option: str) -> None:
    # Mllama hands the states of its images, which train, to text layers too.
    class Unread(plain_models.Block):
        def forward(self, hidden: Tensor, states: Tensor) -> Tensor:
            return super().forward(hidden)

    model = plain_models.Decoder([Unread() for _ in range(4)]).train()
    model.embedding.requires_grad_(False)
    policy, options = OPTIONS[option]
    with hf_ckpt.apply(model, policy, prove=1, **options):
        model(torch.randn(2, 6, 8), states=torch.randn(2, 6, 8, requires_grad=True)).sum().backward()


def test_what_the_original_gives_no_gradient_is_no_fault(proven: list[original_proof.OriginalCall]) -> None:
    class Biased(nn.Module):
        def __init__(self, found: nn.Module) -> None:
            super().__init__()
            self.found = found
            self.bias = nn.Parameter(torch.zeros(()))
            self.unused = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                chosen = x + self.bias > 0
            return self.found(x * chosen)

    model = llama().train()
    for layer in model.model.layers:
        layer.mlp = Biased(layer.mlp)
    with hf_ckpt.apply(model, "full"):
        backward(model)
    assert len(proven) == 1


def test_hooks_and_gradients_of_the_user_are_as_without_the_proof() -> None:
    called: list[str] = []
    model = llama().train()
    weight = model.get_parameter("model.layers.3.mlp.up_proj.weight")
    weight.register_hook(lambda gradient: called.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    with hf_ckpt.apply(model, "full"):
        backward(model)
    assert called == ["gradient", "accumulated"]


@pytest.mark.parametrize("num_noisy", [1, 2])
def test_a_backward_that_does_not_repeat_itself_is_no_fault(num_noisy: int, caplog: pytest.LogCaptureFixture) -> None:
    model = llama().train()
    calls: list[int] = []

    def factor() -> float:
        calls.append(1)
        # In some runs it is what it was in the one before.
        return 1 + 1e-7 * (len(calls) // num_noisy % 3)

    mlp = model.get_submodule("model.layers.3.mlp")
    found = mlp.act_fn

    class Changed(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return _Scaled.apply(found(hidden), factor)

    mlp.act_fn = Changed()
    with hf_ckpt.apply(model, "full"), caplog.at_level(logging.INFO, "hf_ckpt"):
        backward(model)
    assert "do not repeat themselves" in caplog.text


class Layered(nn.Module):
    """A model of three layers of one kind; `call(layer, x)` returns what goes on, and what else the loss is to have."""

    def __init__(self, make: Callable[[], nn.Module], call: Callable[..., tuple[Tensor, Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedded = nn.Parameter(torch.randn(2, 5, 8))
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.call = call

    def forward(self) -> Tensor:
        x, rest = 1.0 * self.embedded, 0.0
        for layer in self.layers:
            x, more = self.call(layer, x)
            rest = rest + more
        return x.square().mean() + rest


class Block(nn.Module):
    """A layer; `run` makes of its own result what it returns."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.run = run

    def body(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.silu(nn.functional.dropout(self.first(x), 0.1))) * self.gain

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Any:
        return self.run(self, x, *rest, **options)


def _with_norm(layer: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    y = layer.body(x)
    return y, y.square().mean(-1)


def _with_attribute(layer: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    y, layer.aux = _with_norm(layer, x)
    return y, layer.aux


def _with_pair(layer: Block, x: Tensor, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return layer.body(x) + pair[0] * pair[1], pair


def _hooked(layer: Block, x: Tensor) -> Tensor:
    y = layer.body(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: 0.5 * gradient)
    return y


def _call_hooked(layer: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    y = layer(x)
    y.register_hook(lambda gradient: 0.7 * gradient)
    return y, 0.0


def _call_pair(layer: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    y, scores = layer(x)
    y.register_hook(lambda gradient: 0.7 * gradient)
    return y, scores.mean()


def _call_attribute(layer: Any, x: Tensor) -> tuple[Tensor, Any]:
    y, scores = layer(x)
    return y, scores.mean() + 0.5 * layer.aux.mean()


def _call_writing(layer: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    y, scores = layer(x)
    return y, scores.mul_(3).mean()


def _call_shared(layer: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    y, pair = layer(x, (x.sin(), 2 * x))
    return y, pair[1].square().mean()


# How a layer returns, how the model goes on with it, and how many gradients are compared.
FLOWS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Tensor, Any]], int]] = {
    "one output at two places": (lambda s, x: (y := s.body(x), y), lambda layer, x: (sum(layer(x)), 0.0), 1),
    "one in a nested tuple": (
        lambda s, x: ((z := _with_norm(s, x))[0], (z[1], {"scores": [z[1]]})),
        lambda layer, x: ((y := layer(x))[0], y[1][1]["scores"][0].mean()),
        1,
    ),
    "parts of one output": (lambda s, x: (y := s.body(x), *y.chunk(2, -1)), lambda layer, x: (layer(x)[0], 0.0), 1),
    "a view of the other": (
        lambda s, x: (y := s.body(x), y[..., 0]),
        lambda layer, x: ((y := layer(x))[0], y[1].mean()),
        1,
    ),
    "hook on the output": (lambda s, x: s.body(x), _call_hooked, 1),
    "hook on an output that is used inside": (_with_norm, _call_pair, 1),
    "hooks inside and outside": (_hooked, _call_hooked, 0),
    "output that is an attribute": (_with_attribute, _call_attribute, 1),
    "output written to": (lambda s, x: ((y := s.body(x)), y.sum(-1)), _call_writing, 1),
    "tensors that pass through in a tuple": (_with_pair, _call_shared, 1),
    "one argument at two places": (
        lambda s, x, y, scale: s.body(x) * scale + y,
        lambda layer, x: (layer(x, x, scale=x), 0.0),
        1,
    ),
}


@pytest.mark.parametrize("option", ["full", "segment", "snapshots", "selective", "offload"])
@pytest.mark.parametrize("name", FLOWS)
def test_what_others_do_with_inputs_and_outputs_is_no_false_alarm(
    name: str, option: str, proven: list[original_proof.OriginalCall]
) -> None:
    run, call, num_compared = FLOWS[name]

    def steps(model: nn.Module) -> list[Any]:
        found = []
        for seed in range(2):
            model.zero_grad()
            torch.manual_seed(seed)
            loss = model()
            loss.backward()
            found += [loss, *(weight.grad for weight in model.parameters())]
        return found

    plain = steps(Layered(partial(Block, run), call).train())
    mode, options = OPTIONS[option]
    model = Layered(partial(Block, run), call).train()
    with hf_ckpt.apply(model, mode, layers="layers", **options):
        found = steps(model)
    assert all(map(torch.equal, plain, found))
    # With offload there are two kinds, as the last layer never offloads.
    assert len(proven) >= num_compared


def test_attention_that_asks_whether_its_inputs_are_one_is_no_false_alarm(
    proven: list[original_proof.OriginalCall],
) -> None:
    class Attending(Block):
        def __init__(self) -> None:
            super().__init__(lambda self, x: x + self.self_attn(x, x, x, need_weights=False)[0] + self.mlp(x))
            self.self_attn = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
            self.mlp = nn.Linear(8, 8)

    model = Layered(Attending, lambda layer, x: (layer(x), 0.0)).train()
    with hf_ckpt.apply(model, "attention", layers="layers"):
        model().backward()
    assert len(proven) == 1


class _Accumulating(torch.autograd.Function):
    """Adds the gradient of a weight to what the weight holds, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.name = weight, name
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        found = getattr(ctx.weight, ctx.name, None)
        more = (gradient * x).sum((0, 1))
        setattr(ctx.weight, ctx.name, more if found is None else found + more)
        return gradient * weight, None, None


def _note(called: list[object]) -> Callable[..., None]:
    return lambda *args: called.append(args)


@pytest.mark.parametrize("kind", ["grad", "main_grad", "module hook", "module pre-hook", "tensor hook"])
@pytest.mark.parametrize("option", ["full", "segment"])
def test_what_acts_in_backward_acts_once(kind: str, option: str) -> None:
    called: list[object] = []

    class Acting(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.body(_Accumulating.apply(x, self.gain, kind) if kind.endswith("grad") else x)
            if kind == "tensor hook" and y.requires_grad:
                y = 2 * y
                y.register_hook(called.append)
                y = 2 * y
            return y

    results = []
    for is_planned in (False, True):
        called.clear()
        model = Layered(partial(Acting, _with_norm), lambda layer, x: (layer(x), 0.0)).train()
        for layer in model.layers:
            if kind == "main_grad":
                layer.gain.main_grad = torch.zeros(8)
            elif kind == "module hook":
                layer.first.register_full_backward_hook(_note(called))
            elif kind == "module pre-hook":
                layer.second.register_full_backward_pre_hook(_note(called))
        torch.manual_seed(1)
        mode, options = OPTIONS[option]
        with hf_ckpt.apply(model, mode if is_planned else "none", layers="layers", **(options if is_planned else {})):
            model().backward()
        held = [getattr(layer.gain, kind, None) for layer in model.layers if kind.endswith("grad")]
        results.append((len(called), [each.tolist() for each in held]))
    assert results[0] == results[1]


@pytest.mark.parametrize("option", ["full", "attention", "ffn"])
def test_a_backward_of_several_gradients_at_once_is_no_false_alarm(option: str) -> None:
    model = llama(attn_implementation="eager").train()
    ids = batch()["input_ids"]
    with hf_ckpt.apply(model, option):
        hidden = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=hidden).logits
        vectors = torch.eye(3, logits.numel()).view(3, *logits.shape)
        (gradients,) = torch.autograd.grad(logits, hidden, vectors, is_grads_batched=True)
        assert gradients.shape == (3, *hidden.shape)


def test_a_second_derivative_through_activations_is_no_false_alarm() -> None:
    model = Layered(partial(Block, lambda layer, x: layer.body(x)), lambda layer, x: (layer(x), 0.0)).train()
    with hf_ckpt.apply(model, "full", layers="layers"):
        (gradient,) = torch.autograd.grad(model(), [model.embedded], create_graph=True)
        gradient.square().sum().backward()


def test_an_optimizer_in_backward_is_no_false_alarm() -> None:
    model = Layered(partial(Block, _with_norm), _call_pair).train()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(_step)
    with hf_ckpt.apply(model, "full", layers="layers"):
        model().backward()


@torch.no_grad()
def _step(weight: Tensor) -> None:
    assert weight.grad is not None
    weight -= weight.grad
    weight.grad = None


# --- What it costs, and leaves. ---


@pytest.mark.parametrize(("mode", "most"), [("full", 0.6), ("ffn", 0.6), ("selective", 0.6)])
@pytest.mark.sweep(keep=1)
def test_the_first_step_costs_little_more(mode: str, most: float) -> None:
    model = llama(num_hidden_layers=32).train()

    def num_flops(run: Callable[[], object]) -> int:
        with Flops() as counter:
            run()
        return counter.total

    forward = num_flops(lambda: model(**batch()))
    with hf_ckpt.apply(model, mode):
        first, _, later = (num_flops(lambda: backward(model)) for _ in range(3))
    # Under `full` one layer runs forward and backward once more.
    assert (3 / 40 if mode == "full" else 0) * forward < first - later <= most * forward


def test_a_forward_in_the_proof_is_told_from_others() -> None:
    model = llama().train()
    seen: list[bool] = []
    model.get_submodule("model.layers.3.mlp").register_forward_hook(lambda *_: seen.append(is_extra_run()))
    with hf_ckpt.apply(model, "full"):
        backward(model)
    assert seen == [False, True, False]


def test_collections_go_on() -> None:
    model = llama().train()
    with hf_ckpt.apply(model, "full"):
        model(**batch())
        assert gc.isenabled()
        model.get_submodule("model.layers.3.mlp").register_forward_pre_hook(_raise)
        with pytest.raises(ValueError, match="here"):
            model(**batch())
    assert gc.isenabled()


def _raise(*_: object) -> None:
    raise ValueError("here")


def test_what_an_original_changes_before_it_fails_is_put_back(caplog: pytest.LogCaptureFixture) -> None:
    model = llama().train()
    mlp = model.get_submodule("model.layers.3.mlp")
    mlp.calls = []

    def failing(*_: object) -> None:
        mlp.calls.append(object())
        if is_extra_run():
            raise ValueError("only in a further run")

    mlp.register_forward_pre_hook(failing)
    with hf_ckpt.apply(model, "full"), caplog.at_level(logging.INFO, "hf_ckpt"):
        backward(model)
    assert "could not be held against its own forward" in caplog.text
    assert len(mlp.calls) == 1


# --- Graphs that are not the original's own. ---


class Reusing(plain_models.Block):
    """Uses a weight as it is, and what was made of it before the layer ran."""

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        return super().forward(hidden * self.norm.weight * self.made)


class MadeBefore(plain_models.Decoder):
    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        for block in self.blocks:
            block.made = torch.exp(block.norm.weight)
        return super().forward(hidden)


@pytest.mark.parametrize("mode", ["full", "ffn", "selective"])
def test_what_was_made_of_a_weight_before_the_layer_is_gone_through_once(mode: str) -> None:
    case = plain_models.case(MadeBefore([Reusing() for _ in range(3)]))
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, mode):
        assert exactness.differences(expected, exactness.step(case)) == []


class Collecting(plain_models.Block):
    """Keeps what it returns where only it looks, and adds what is there: of the layers before, and in vain its own."""

    def forward(self, hidden: Tensor, **given: Any) -> Tensor:
        hidden = super().forward(hidden + sum(self.seen[-1:]))
        self.seen.append(hidden)
        return hidden


def test_a_backward_through_the_graph_that_runs_is_not_begun() -> None:
    case = plain_models.case(plain_models.Decoder([Collecting() for _ in range(3)]))
    seen = type(
        "Seen", (), {"__getitem__": lambda self, at: held[at], "append": lambda self, each: held.append(each)}
    )()
    held: list[Tensor] = []
    for block in case.model.blocks:
        object.__setattr__(block, "seen", seen)
    # What runs again adds itself up: no plan makes this exact. It ends, with an error, and does not hang.
    with hf_ckpt.apply(case.model, "full"), pytest.raises((hf_ckpt.UnsupportedError, PlanMismatchError)):
        exactness.step(case)
