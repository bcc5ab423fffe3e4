"""Routers on kernels that do not repeat themselves: recomputation sends each token where the forward did.

Such kernels are planted: the scores of each router come out one unit in the last place higher or lower, by chance, in
every call, and experts are tied, so that this unit decides. The chance is that of the test, which nothing brings back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError, UnsupportedError
from hf_ckpt.policy.policy import Policy
from hf_ckpt.regions import recompute, routing, tiling
from hf_ckpt.regions.execution_state import extra_run, is_extra_run, is_in_backward
from hf_ckpt.regions.routing import KeptRouting, kernels_vary
from hf_ckpt.regions.selective import dispatch
from hf_ckpt.simulation.caching_allocator import BLOCK_BYTES
from hf_ckpt.simulation.devices import DEVICES
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.upstream.torch import TorchDispatchMode
from tests import exactness, modes, zoo
from tests.following import Run, differences
from tests.modes import TILES, apart, worst

pytestmark = [pytest.mark.slow, pytest.mark.core]

LAYERS = 3
TOKENS = zoo.BATCH * zoo.LENGTH
# Fields of the config that the tiny models do not have: groups of experts in all layers, noise on the router's input.
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "n_routed_experts": 8},
    "mixtral with jitter": {"router_jitter_noise": 0.1},
}
MODELS = ["mixtral", "mixtral with jitter", "qwen3_moe", "deepseek_v3", "gpt_oss", "phimoe"]
POLICIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": ("full", {}),
    "every 2": ("full", {"every_n_layers": 2}),
    "segments": ("full", {"segment_size": 2}),
    "nested": ("full", {"segment_size": 3, "nested": True}),
    "revolve": ("full", {"nested": "revolve", "snapshots": 1}),
    "offload": ("full", {"offload": modes.CPU}),
    "ffn": ("ffn", {}),
    "selective": ("selective", {}),
    "selective_attention": ("selective_attention", {}),
    "selective offload": ("selective", {"offload": modes.CPU}),
    "ffn in tiles": ("ffn", {"tiles": TILES}),
    "none in tiles": ("none", {"tiles": TILES}),
}
CLOSE = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-5}
"""A score of less than 8 has a last place of 2**-21 in float32 and 2**-5 in bfloat16. One unit more or less changes the
weight of an expert, which is the exponential of its score over a sum of such, by that share at most, and gradients with
it. In float32, where tiles add up in another order, twice as much."""
GROSS = 4
"""Times `CLOSE`: where one expert takes the place of another, gradients are off by a tenth and more."""


def built(name: str, dtype: torch.dtype = torch.float32) -> zoo.Case:
    model_type = name.partition(" ")[0]
    torch.manual_seed(0)
    config = zoo.config(model_type, "causal", num_layers=LAYERS, dropout=0.0)
    for key, value in FIELDS.get(name, {}).items():
        assert hasattr(config, key), key
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    return zoo.Case(model_type, model, zoo._text())


class Noise:
    """The planted kernel: adds one unit in the last place, or takes it away."""

    def __init__(self) -> None:
        self.chance = torch.Generator()
        self.is_router = False
        # Where slices run forward, they would draw other units than the whole does.
        self.only_in_backward = False

    def of(self, scores: Tensor) -> Tensor:
        if not self.is_router or (self.only_in_backward and not is_in_backward()):
            return scores
        return _Moved.apply(scores, torch.randint(2, scores.shape, generator=self.chance).bool())  # type: ignore[no-any-return, no-untyped-call]


class _Moved(torch.autograd.Function):
    """Saves nothing, as the product by itself would not."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, is_up: Tensor) -> Tensor:
        up, down = (torch.full_like(scores, way) for way in (float("inf"), -float("inf")))
        return torch.where(is_up, torch.nextafter(scores, up), torch.nextafter(scores, down))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> Noise:
    found, product = Noise(), nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args, **kwargs: found.of(product(*args, **kwargs)))
    return found


def plant(model: nn.Module, noise: Noise) -> None:
    """Tie the experts of each router, and let noise decide between them."""

    def enter(*_: object) -> None:
        noise.is_router = True

    def leave(*_: object) -> None:
        noise.is_router = False

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("router")]
    assert len(routers) == LAYERS
    for router in routers:
        weight: Any = router.weight
        with torch.no_grad():
            weight.normal_(std=0.3)
            # One of a kind and some that are alike. Of groups all are alike, as groups are chosen too. PhiMoE leaves
            # out experts whose score is lower by two hundredths of the largest: these are right there.
            is_phi = "phi" in type(router).__name__.lower()
            weight[1:] = 0.98 * weight[0] if is_phi else weight[0] if len(weight) > 4 else weight[1]
            if getattr(router, "bias", None) is not None:
                router.bias.zero_()  # type: ignore[operator, union-attr]
        router.register_forward_pre_hook(enter)
        router.register_forward_hook(leave)


@contextmanager
def routes(model: nn.Module) -> Iterator[tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]]:
    """Note which experts each token is sent to, by module: in forward, and in recomputation."""
    forward: dict[str, list[Tensor]] = defaultdict(list)
    again: dict[str, list[Tensor]] = defaultdict(list)

    def note(name: str, module: nn.Module, args: Any) -> None:
        if not is_extra_run():
            (again if is_in_backward() else forward)[name].append(args[1].clone())

    found = [(name, each) for name, each in model.named_modules() if name.endswith(".experts")]
    hooks = [each.register_forward_pre_hook(lambda *given, name=name: note(name, *given)) for name, each in found]
    try:
        yield forward, again
    finally:
        for hook in hooks:
            hook.remove()


def step(case: zoo.Case, noise: Noise) -> exactness.Result:
    """A step whose forward draws the same units each time, and whose recomputation draws others."""
    noise.chance.manual_seed(1)
    return exactness.step(case)


def error_of(case: zoo.Case, noise: Noise, policy: str, expected: exactness.Result, *, kept: bool) -> float | Exception:
    """Return how far gradients of the second step are from no plan's, or what the first one raises."""
    mode, options = POLICIES[policy]
    try:
        with kernels_vary() if kept else nullcontext(), hf_ckpt.apply(case.model, mode, **options):
            first = step(case, noise)
            second = step(case, noise)
    except (PlanMismatchError, hf_ckpt.HFCkptError) as error:
        return error
    return max(worst(apart(expected, got))[0] for got in (first, second))


CASES = [(name, policy, torch.float32) for name in MODELS for policy in POLICIES]
CASES += [(name, policy, torch.bfloat16) for name in MODELS for policy in ("full", "nested", "ffn", "selective")]
# What is refused without noise too: a router that multiplies its input by noise in place.
REFUSED = {
    *(("mixtral with jitter", policy) for policy in ("ffn", "ffn in tiles", "none in tiles")),
    *(("phimoe", policy) for policy in ("ffn in tiles", "none in tiles")),
}
CASES = [case for case in CASES if case[:2] not in REFUSED]
# `selective` keeps what operators have chosen in any case, but not the masks of PhiMoE, and its proof ran the original
# with a routing of its own.
MAY_BE_RIGHT = {"selective", "selective_attention", "selective offload"}


@pytest.mark.parametrize(("name", "policy", "dtype"), CASES)
@pytest.mark.sweep(keep=12)
def test_tokens_go_where_the_forward_sent_them(name: str, policy: str, dtype: torch.dtype, noise: Noise) -> None:
    case = built(name, dtype)
    plant(case.model, noise)
    noise.only_in_backward = "tiles" in policy
    expected = step(case, noise)
    with routes(case.model) as (forward, again):
        error = error_of(case, noise, policy, expected, kept=True)
    assert isinstance(error, float), error
    assert 0 < error <= CLOSE[dtype]
    assert again
    for name_of_module, tokens in again.items():
        sent = forward[name_of_module]
        # Steps, or slices, follow each other; some policies recompute a layer twice.
        per_step = len(sent) // 2
        halves = [tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]]
        for number, half in enumerate(halves):
            for place, each in enumerate(half):
                assert torch.equal(each, sent[number * per_step + place % per_step]), name_of_module
    # Without the rule.
    other = error_of(case, noise, policy, expected, kept=False)
    if policy not in MAY_BE_RIGHT:
        assert isinstance(other, PlanMismatchError) or other > GROSS * CLOSE[dtype], other


def test_tiles_in_a_layer_that_is_recomputed(noise: Noise) -> None:
    # Without noise in checks: they run some positions alone, of which every one is tied here.
    case = built("mixtral")
    plant(case.model, noise)
    of = noise.of
    noise.of = lambda scores: scores if is_extra_run() else of(scores)  # type: ignore[method-assign]
    noise.only_in_backward = True
    expected = step(case, noise)
    with kernels_vary(), hf_ckpt.apply(case.model, "full", tiles=TILES, prove="off"):
        error, _ = worst(apart(expected, step(case, noise)))
    assert 0 < error <= CLOSE[torch.float32]
    # Without the rule.
    with (
        hf_ckpt.apply(case.model, "full", tiles=TILES, prove="off"),
        pytest.raises(UnsupportedError, match="some positions give other gradients alone"),
    ):
        step(case, noise)


def test_masks_of_thresholds_are_kept(noise: Noise, monkeypatch: pytest.MonkeyPatch) -> None:
    case = built("phimoe", torch.bfloat16)
    plant(case.model, noise)
    expected = step(case, noise)
    monkeypatch.setattr(routing, "_COMPARISONS", frozenset())
    routing._may_choose.cache_clear()
    try:
        other = error_of(case, noise, "full", expected, kept=True)
    finally:
        monkeypatch.undo()
        routing._may_choose.cache_clear()
    assert isinstance(other, PlanMismatchError) or other > CLOSE[torch.bfloat16], other


def test_a_second_backward_goes_by_the_same(noise: Noise) -> None:
    case = built("mixtral")
    plant(case.model, noise)
    with kernels_vary(), hf_ckpt.apply(case.model, "full", prove="off"):
        loss = zoo.loss(case.model, case.inputs)
        loss.backward(retain_graph=True)
        first = exactness.gradients(case.model)
        case.model.zero_grad()
        loss.backward()
    again = exactness.gradients(case.model)
    assert 0 < worst(apart((loss.detach(), first), (loss.detach(), again)))[0] <= CLOSE[torch.float32]


def test_other_faults_are_still_found(noise: Noise) -> None:
    # Experts that compute something else in recomputation, by a half.
    case = built("mixtral")
    plant(case.model, noise)
    experts = case.model.model.layers[1].mlp.experts
    experts.register_forward_hook(lambda *given: given[-1] * (1.5 if is_in_backward() else 1.0))
    for policy in ("full", "ffn", "nested"):
        assert isinstance(error_of(case, noise, policy, step(case, noise), kept=True), PlanMismatchError)


# --- Where kernels repeat themselves nothing changes. ---


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[KeptRouting]:
    """What keeps choices, of all calls."""
    found: list[KeptRouting] = []

    def make() -> KeptRouting:
        found.append(KeptRouting())
        return found[-1]

    for module in (recompute, tiling):
        monkeypatch.setattr(module, "KeptRouting", make)
    return found


@pytest.mark.parametrize("policy", ["full", "nested", "ffn", "selective", "ffn in tiles"])
def test_nothing_is_kept_on_a_cpu(policy: str, made: list[KeptRouting]) -> None:
    case = built("qwen3_moe")
    expected = exactness.step(case)
    mode, options = POLICIES[policy]
    with hf_ckpt.apply(case.model, mode, **options):
        got = exactness.step(case)
    assert not made
    if "tiles" not in policy:
        assert exactness.differences(expected, got) == []


def test_nothing_is_kept_with_deterministic_algorithms(made: list[KeptRouting]) -> None:
    case = built("qwen3_moe")
    torch.use_deterministic_algorithms(True)
    try:
        with kernels_vary(), hf_ckpt.apply(case.model, "full"):
            exactness.step(case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not made


@pytest.mark.parametrize(("name", "policy"), [("llama", "full"), ("qwen3_moe", "attention"), ("qwen3_moe", "none")])
def test_nothing_is_kept_without_a_router(name: str, policy: str, made: list[KeptRouting]) -> None:
    case = built(name)
    with kernels_vary(), hf_ckpt.apply(case.model, policy):
        exactness.step(case)
    assert not made


@pytest.mark.parametrize("policy", ["full", "segments", "nested", "ffn", "selective"])
def test_without_noise_the_step_is_that_of_no_plan(policy: str, made: list[KeptRouting]) -> None:
    case = built("deepseek_v3")
    expected = exactness.step(case)
    mode, options = POLICIES[policy]
    with kernels_vary(), hf_ckpt.apply(case.model, mode, **options):
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
    # Of 8 experts in 2 groups: two of each group, a group, and two experts; a byte each.
    assert len(made) == 2 * LAYERS
    assert [sum(kept.nbytes for _, kept in each.choices) for each in made] == [TOKENS * (4 + 1 + 2)] * len(made)


# --- Memory. ---

A100 = next(device for device in DEVICES.values() if device.capability == (8, 0))
SIZES = Run(model_type="mixtral", policy="full")


@pytest.mark.parametrize("policy", ["full", "segments", "ffn", "selective"])
def test_prediction_for_a_card_counts_what_is_kept(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = built("mixtral")
    mode, options = POLICIES[policy]
    # Of 4 experts, 2 for each token.
    sizes = Step(batch_size=2, seq_length=300, optim="sgd")
    kept = -(-2 * 300 * 2 // BLOCK_BYTES) * BLOCK_BYTES

    def predict() -> StepMemory:
        return simulate_step(case.model, Policy.parse(mode, **options), sizes, A100)

    found = predict()
    held = [each.num_bytes for each in found.ledger if each.dtype == "uint8"]
    assert held == [kept] * LAYERS
    for module in (recompute, tiling):
        monkeypatch.setattr(module, "may_vary", lambda tensors: False)
    without = predict()
    assert [each for each in without.ledger if each.dtype == "uint8"] == []
    assert sum(each.num_bytes for each in found.ledger) - sum(each.num_bytes for each in without.ledger) == sum(held)
    assert 0 < found.peak_bytes - without.peak_bytes <= sum(held)


@pytest.mark.parametrize("policy", ["full", "ffn"])
def test_real_step_needs_what_is_predicted(policy: str, tmp_path: Any) -> None:
    run = Run(model_type="mixtral", policy=policy)
    with kernels_vary():
        real, simulated = run.followed(tmp_path), run.simulated()
    assert all(abs(off) <= 1e-3 for off in differences(simulated, real).values())
    assert run.simulated().peak_bytes < simulated.peak_bytes


# --- Operators. ---

Chooses = Callable[[Tensor], Any]
OPERATORS: dict[str, Chooses] = {
    "topk": lambda x: x.topk(2),
    "topk of rows": lambda x: x.topk(3, dim=0, sorted=False),
    "sort": lambda x: x.sort(descending=True),
    "stable sort": lambda x: x.sort(stable=True, dim=-1),
    "max": lambda x: x.max(-1),
    "max in place": lambda x: x.max(dim=-1, keepdim=True),
    "min": lambda x: x.min(0),
    "kthvalue": lambda x: x.kthvalue(2),
    "median": lambda x: x.median(-1),
    "mode": lambda x: x.mode(-1),
    "argmax": lambda x: (None, x.argmax(-1)),
    "argmax of all": lambda x: (None, x.argmax()),
    "argsort": lambda x: (None, x.argsort(-1)),
    "multinomial": lambda x: (None, x.softmax(-1).multinomial(2)),
    "bernoulli": lambda x: (None, x.softmax(-1).bernoulli()),
    "threshold": lambda x: (None, x >= x.max(-1, keepdim=True).values - 0.5),
}


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the place of kernels of our own, as a simulation does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_that_choose(operator: str, watched: bool) -> None:
    assert dispatch.kernels_are_possible()
    choose = OPERATORS[operator]
    torch.manual_seed(0)
    scores, others = torch.randn(7, 300), torch.randn(7, 300)
    kept = KeptRouting()
    with Watching() if watched else nullcontext(), torch.set_grad_enabled(operator != "threshold"):
        with kept.run():
            values, places = choose(scores)
        expected = places.clone()
        # What the region does with its own changes nothing.
        places.zero_()
        for _ in range(2):
            again = others.clone().requires_grad_()
            with kept.run():
                found, places = choose(again)
            assert torch.equal(places, expected)
            assert places.dtype == expected.dtype
            if values is None:
                continue
            rows = torch.zeros_like(others)
            dim = 0 if operator in ("topk of rows", "min") else 1
            index = places if places.dim() == 2 else places.unsqueeze(dim)
            assert torch.equal(found.reshape(-1), others.gather(dim, index).reshape(-1))
            (gradient,) = torch.autograd.grad(found.sum(), again)
            assert torch.equal(gradient, rows.scatter(dim, index, 1.0))
    own = choose(others)[1]
    assert own.shape == expected.shape
    assert not torch.equal(own, expected)


def test_what_does_not_choose_is_not_kept() -> None:
    kept = KeptRouting()
    scores = torch.randn(2, 3, 4, 5)
    with kept.run():
        # The largest of a row of attention, whole numbers, the branch of an activation, what has not been chosen from.
        scores.max(-1)
        torch.arange(5).sort()
        torch.where(scores > 0, scores, 0.0)
        with torch.no_grad():
            _ = scores > 0.5
        with extra_run():
            scores.topk(2)
    assert kept.choices == []
    assert kept.is_complete


def test_a_run_that_chooses_otherwise_is_refused() -> None:
    kept = KeptRouting()
    scores = torch.randn(4, 5)
    with kept.run():
        scores.topk(2)
    expected = scores.flip(-1)[:2].topk(2).indices
    with kept.run(is_strict=False):
        assert torch.equal(scores.flip(-1)[:2].topk(2).indices, expected)
    for choose in (lambda: scores.argmax(-1), lambda: scores.topk(3)):
        with pytest.raises(CheckpointError, match="as choice number 1 of a router"), kept.run():
            choose()
    with kept.run():
        scores.topk(2)
        with pytest.raises(CheckpointError, match="the forward had none"):
            scores.topk(2)


def test_a_forward_that_starts_again_starts_anew() -> None:
    kept = KeptRouting()
    scores = torch.randn(4, 5)

    def fail() -> None:
        scores.topk(2)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), kept.run():
        fail()
    assert not kept.is_complete
    with kept.run():
        scores.argmax(-1)
    assert [name for name, _ in kept.choices] == ["aten.argmax.default"]
    with kept.run():
        scores.flip(-1).argmax(-1)
