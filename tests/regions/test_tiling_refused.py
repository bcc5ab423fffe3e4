"""Modules that cannot run slice by slice are refused, in whichever step they become so."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import hf_ckpt
from hf_ckpt import UnsupportedError
from hf_ckpt.regions import tiling
from hf_ckpt.regions.tile_checks import PositionsAlone
from hf_ckpt.regions.tiling import Tiling, run_tiled
from tests import exactness, plain_models
from tests.regions.tiled_models import llama, tiled

core = pytest.mark.core
pytestmark = [pytest.mark.slow, core]


def refused(module: nn.Module, *args: Tensor, **kwargs: Any) -> str:
    with pytest.raises(UnsupportedError) as error:
        run_tiled(Tiling(2), module, None, *args, **kwargs).sum().backward()
    return str(error.value)


class Shifted(plain_models.Mlp):
    """Every position sees the one before it."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + hidden.roll(1, dims=1))


def test_a_module_whose_positions_depend_on_others_is_refused() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 20, plain_models.WIDTH)
    assert refused(Shifted(), hidden) == (
        "Shifted is to run in tiles, but it is not position-wise: some positions give other values alone than among "
        "others. Leave tiles out for its layer."
    )


def test_what_an_auxiliary_loss_uses_is_refused() -> None:
    case = exactness.build("mixtral")
    case.model.config.output_router_logits = True
    with hf_ckpt.apply(case.model, "none", tiles=2), pytest.raises(UnsupportedError, match="output_router_logits=Fa"):
        exactness.step(case)


class Statistic(plain_models.Mlp):
    def forward(self, hidden: Tensor) -> Any:
        output = super().forward(hidden)
        return output, output.mean()


class Worded(plain_models.Mlp):
    def forward(self, hidden: Tensor) -> Any:
        return {"hidden": super().forward(hidden)}


class Writing(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mul_(2.0)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Statistic(), r"returns a tensor of shape \[\]: something over all positions"),
        (Worded(), "returns dict, not tensors"),
        (Writing(), "writes into its input"),
    ],
)
def test_what_slices_cannot_give_is_refused(module: nn.Module, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        run_tiled(Tiling(2), module, None, torch.randn(1, 20, plain_models.WIDTH))


class Borrowing(plain_models.Mlp):
    """Computes with a tensor that belongs to nobody it knows."""

    lent: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * _LENT[0]


_LENT = [torch.ones(3, plain_models.WIDTH, requires_grad=True)[0]]


def test_a_trainable_tensor_that_is_not_the_modules_own_is_refused() -> None:
    text = refused(Borrowing(), torch.randn(2, 20, plain_models.WIDTH))
    assert "a trainable tensor of shape [3, 8] that is neither its own parameter nor its argument" in text


def test_a_reference_by_an_idle_cycle_is_no_fault() -> None:
    class Circular(plain_models.Mlp):
        def forward(self, hidden: Tensor) -> Tensor:
            output = super().forward(hidden)
            cycle: list[Any] = [output]
            cycle.append(cycle)
            return output

    run_tiled(Tiling(2), Circular(), None, torch.randn(2, 6, plain_models.WIDTH, requires_grad=True)).sum().backward()


def test_whoever_keeps_the_threads_hooks_keeps_no_graph() -> None:
    # As each collective does that runs on a thread of its own, a moment longer than itself.
    class Gathering(plain_models.Mlp):
        def forward(self, hidden: Tensor) -> Tensor:
            hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(False))
            return super().forward(hidden)

    hooks: list[Any] = []
    run_tiled(Tiling(2), Gathering(), None, torch.randn(2, 6, plain_models.WIDTH, requires_grad=True)).sum().backward()
    assert any(hooks)


class Keeping:
    """A hook that keeps what a module returns in its forward of this number."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.kept: Any = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._left:
            self.kept = output
        self._left -= 1


@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_hook_that_comes_later_and_keeps_outputs_is_refused(number: int) -> None:
    module, tiling = plain_models.Mlp(), Tiling(4)
    hidden = torch.randn(1, 20, plain_models.WIDTH, requires_grad=True)
    for _ in range(2):
        run_tiled(tiling, module, None, hidden).sum().backward()
    handle = module.up.register_forward_hook(Keeping(number))
    with pytest.raises(UnsupportedError, match="used outside too"):
        run_tiled(tiling, module, None, hidden)
    handle.remove()
    run_tiled(tiling, module, None, hidden).sum().backward()


class Scorer(plain_models.Mlp):
    """Leaves what it computes inside on itself, in a list that others hold, or takes its gradient at once."""

    def __init__(self) -> None:
        super().__init__()
        self.leave: Callable[[nn.Module, Tensor], None] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        scores = torch.tanh(self.up(hidden))
        if self.leave is not None:
            self.leave(self, scores)
        return self.down(scores)


_SEEN: list[Tensor] = []


@pytest.mark.parametrize(
    "leave",
    [
        lambda module, scores: setattr(module, "scores", scores),
        lambda module, scores: _SEEN.append(scores),
        lambda module, scores: _SEEN.append(scores.square().sum()),
        lambda module, scores: torch.autograd.grad(scores.sum(), module.up.weight),
    ],
)
# The first layer of a model whose embedding is frozen is given what needs no gradient.
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_what_leaves_a_module_by_another_door_is_refused_in_any_step(
    leave: Callable[[nn.Module, Tensor], None], needs_gradient: bool
) -> None:
    module, tiling = Scorer(), Tiling(4)
    hidden = torch.randn(1, 20, plain_models.WIDTH, requires_grad=needs_gradient)
    for _ in range(2):
        run_tiled(tiling, module, None, hidden).sum().backward()
    module.leave = leave
    with pytest.raises(UnsupportedError, match="used outside too"):
        run_tiled(tiling, module, None, hidden)
    _SEEN.clear()
    # Values without a graph may be looked at.
    module.leave = lambda module, scores: _SEEN.append(scores.detach())
    run_tiled(tiling, module, None, hidden).sum().backward()
    # Four slices, twice, and what runs alone.
    assert len(_SEEN) == 2 * 4 + 1
    _SEEN.clear()


# With nothing in front of it that trains, the first ffn is given what needs no gradient.
@pytest.mark.parametrize("is_first", [False, True])
def test_a_router_loss_that_is_switched_on_later_is_refused(is_first: bool) -> None:
    case = exactness.build("mixtral")
    if is_first:
        case.model.requires_grad_(False)
        case.model.model.layers[0].mlp.requires_grad_(True)
    with hf_ckpt.apply(case.model, [{"layers": "0:1", "mode": "none", "tiles": 2}]):
        exactness.step(case)
        case.model.config.output_router_logits = True
        with pytest.raises(UnsupportedError, match="output_router_logits=False"):
            exactness.step(case)


def test_a_hook_on_a_projection_that_keeps_its_input_is_refused_from_the_step_in_which_it_comes() -> None:
    case = llama()
    kept: list[Tensor] = []
    with hf_ckpt.apply(case.model, "full", tiles=2):
        exactness.step(case)
        projection = case.model.model.layers[0].mlp.gate_proj
        handle = projection.register_forward_hook(lambda module, args, output: kept.append(args[0]))
        with pytest.raises(UnsupportedError, match="take the hook off"):
            exactness.step(case)
        handle.remove()
        kept.clear()
        exactness.step(case)


def test_a_foreign_tensor_that_comes_later_is_refused() -> None:
    module, tiling = plain_models.Mlp(), Tiling(4)
    hidden = torch.randn(1, 20, plain_models.WIDTH, requires_grad=True)
    run_tiled(tiling, module, None, hidden).sum().backward()
    module.up.register_forward_hook(lambda module, args, output: output * _LENT[0].sum())
    with pytest.raises(UnsupportedError, match="neither its own parameter nor its argument"):
        run_tiled(tiling, module, None, hidden)


class Switching(plain_models.Mlp):
    """Uses one of two experts for each slice."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(plain_models.Mlp() for _ in range(2))
        self.order = iter(order)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.experts[next(self.order)](super().forward(hidden))


def walked(monkeypatch: pytest.MonkeyPatch, module: nn.Module, num_steps: int) -> int:
    """Return how many slices of four were looked through for weights in so many steps."""
    found, count = tiling.weights_used, itertools.count()
    monkeypatch.setattr(tiling, "weights_used", lambda *given: (next(count), found(*given))[1])
    # Nothing runs alone: that would ask for an expert too.
    monkeypatch.setattr(PositionsAlone, "outputs_differ", lambda *given, **options: None)
    settings = Tiling(4)
    hidden = torch.randn(1, 20, plain_models.WIDTH, requires_grad=True)
    for _ in range(num_steps):
        run_tiled(settings, module, None, hidden).sum().backward()
    return next(count)


def test_each_slice_of_a_call_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert walked(monkeypatch, plain_models.Mlp(), 3) == 3 * 4


def test_an_expert_that_is_idle_in_all_slices_is_told_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # The second expert comes in the third slice; then never; then at once. Backward runs the slices again.
    orders = [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]
    module = Switching([expert for order in orders for expert in order * 2])
    told: list[Any] = []
    weight = module.experts[1].up.weight
    weight.register_post_accumulate_grad_hook(lambda weight: told.append(weight.grad.clone()))
    assert walked(monkeypatch, module, 3) == 3 * 4
    assert len(told) == 2


class Cyclic(plain_models.Mlp):
    """Leaves what it computes to the collector in each forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        cycle = [self.up(hidden)]
        cycle.append(cycle)
        return super().forward(hidden)


def test_cycles_of_each_step_are_collected_among_what_is_new() -> None:
    collected: list[int] = []
    note = lambda phase, found: collected.append(found["generation"]) if phase == "start" else None  # noqa: E731
    settings = Tiling(4)
    hidden = torch.randn(1, 20, plain_models.WIDTH, requires_grad=True)
    # The collector's own turns would come in between.
    gc.disable()
    gc.callbacks.append(note)
    try:
        for _ in range(3):
            run_tiled(settings, Cyclic(), None, hidden).sum().backward()
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert len(collected) >= 3 * 4
    assert 2 not in collected


def test_evaluation_runs_whole() -> None:
    case = llama()
    with hf_ckpt.apply(case.model, "full", tiles=4), exactness.counted_entries(case.model) as (forward, _):
        case.model.eval()
        case.model(**case.inputs)
        with torch.no_grad():
            case.model.train()(**case.inputs)
    assert forward["model.layers.1.mlp.up_proj"] == 2


# --- What comes later than the first slice, and the first step. ---


def centred(output: Tensor) -> Tensor:
    return output - 0.5 * output.mean(1, keepdim=True)


def cumulated(output: Tensor) -> Tensor:
    return output.cumsum(1)


def shifted(output: Tensor) -> Tensor:
    return output + output.roll(1, dims=1)


def slightly_cumulated(output: Tensor) -> Tensor:
    """By less than bfloat16 or TF32 would round: a few thousandths."""
    return output + 1e-3 * output.cumsum(1)


def with_another_first(output: Tensor) -> Tensor:
    return torch.cat([output[:, :1] * 0.5, output[:, 1:]], dim=1)


def with_another_last(output: Tensor) -> Tensor:
    return torch.cat([output[:, :-1], output[:, -1:] * 0.5], dim=1)


@pytest.mark.sweep(keep=6)
@pytest.mark.parametrize(
    "mix", [centred, cumulated, shifted, slightly_cumulated, with_another_first, with_another_last]
)
@pytest.mark.parametrize("place", ["hook", "switch"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_module_that_mixes_positions_later_is_refused(
    policy: str, place: str, mix: Callable[[Tensor], Tensor]
) -> None:
    case = llama()
    mlp = case.model.model.layers[1].mlp
    found = mlp.forward
    mlp.mixes = False
    mlp.forward = lambda hidden: mix(found(hidden)) if mlp.mixes else found(hidden)
    with hf_ckpt.apply(case.model, policy, tiles=3):
        for _ in range(2):
            exactness.step(case)
        if place == "hook":
            mlp.down_proj.register_forward_hook(lambda module, given, output: mix(output))
        else:
            mlp.mixes = True
        with pytest.raises(UnsupportedError, match="other values alone"):
            exactness.step(case)


def slightly_mixed(output: Tensor) -> Tensor:
    """Its values stay within what rounding may be, its gradients do not."""
    scale = output.detach().square().mean().sqrt()
    return output + 1e-3 * scale * (1e4 * output.mean(1, keepdim=True) / scale).sin()


def test_a_branch_that_mixes_positions_next_to_nothing_is_held_against_gradients_when_it_comes() -> None:
    case = llama()
    mlp = case.model.model.layers[1].mlp
    found = mlp.forward
    mlp.mixes = False
    mlp.forward = lambda hidden: slightly_mixed(found(hidden)) if mlp.mixes else found(hidden)
    with hf_ckpt.apply(case.model, "none", tiles=3):
        for _ in range(2):
            exactness.step(case)
        mlp.mixes = True
        with pytest.raises(UnsupportedError, match="other gradients alone"):
            exactness.step(case)


def test_a_slice_that_takes_another_branch_than_the_whole_is_refused() -> None:
    case = llama()
    mlp = case.model.model.layers[1].mlp
    found = mlp.forward
    firsts: list[float] = []

    def branches(hidden: Tensor) -> Tensor:
        """Goes by the first value that it gets: that of the whole for the first slice, and for positions alone."""
        first = hidden.detach().flatten()[0].item()
        firsts[:] = firsts or [first]
        return found(hidden) if first == firsts[0] or not mlp.does_branch else -found(hidden)

    mlp.does_branch, mlp.forward = False, branches
    with hf_ckpt.apply(case.model, "none", tiles=2):
        for _ in range(2):
            exactness.step(case)
        mlp.does_branch = True
        firsts.clear()
        with pytest.raises(UnsupportedError, match="other values alone"):
            exactness.step(case)


class Pooled(plain_models.Mlp):
    """Sends rare tokens to an expert that is none of its own."""

    def forward(self, hidden: Tensor) -> Tensor:
        rare = (hidden[..., 0].detach() > 2).nonzero(as_tuple=True)
        output = super().forward(hidden)
        return output.index_put(rare, _SHARED(hidden[rare]), accumulate=True) if len(rare[0]) else output


_SHARED = nn.Linear(plain_models.WIDTH, plain_models.WIDTH)


@pytest.mark.parametrize("place", [0, 10, 19])
def test_a_foreign_weight_is_found_in_whichever_slice_it_is_used(place: int) -> None:
    hidden = torch.randn(2, 20, plain_models.WIDTH).clamp(max=1)
    hidden[0, place, 0] = 3
    with pytest.raises(UnsupportedError, match="neither its own parameter nor its argument"):
        run_tiled(Tiling(4), Pooled(), None, hidden.requires_grad_())


class Uneven(plain_models.Mlp):
    """Returns something else for rare tokens."""

    def __init__(self, instead: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.instead = instead

    def forward(self, hidden: Tensor) -> Any:
        output = super().forward(hidden)
        return (output, self.instead(output) if (hidden > 2).any() else output)


@pytest.mark.parametrize("instead", [lambda output: None, lambda output: output.double()])
def test_slices_that_return_different_things_are_refused(instead: Callable[[Tensor], Any]) -> None:
    hidden = torch.randn(2, 20, plain_models.WIDTH).clamp(max=1)
    hidden[0, 15] = 3
    with pytest.raises(UnsupportedError, match="its slices return different things"):
        run_tiled(Tiling(4), Uneven(instead), None, hidden)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("compute", [nn.utils.weight_norm, lambda x: prune.l1_unstructured(x, "weight", 0.3)])
def test_a_weight_that_a_hook_computes_is_named(compute: Callable[[nn.Module], Any]) -> None:
    module = plain_models.Mlp()
    compute(module.up)
    with pytest.raises(UnsupportedError, match=r"up\.weight is computed anew each time .*prune and weight_norm"):
        run_tiled(Tiling(4), module, None, torch.randn(2, 20, plain_models.WIDTH, requires_grad=True))


@pytest.mark.parametrize("part", [slice(None), slice(2)])
def test_a_write_into_the_input_that_begins_later_is_refused(part: slice) -> None:
    def write(module: nn.Module, args: tuple[Tensor]) -> None:
        args[0][..., part].mul_(1.5)

    case = llama()
    with tiled(case.model, 2):
        exactness.step(case)
        case.model.model.layers[1].mlp.gate_proj.register_forward_pre_hook(write)
        with pytest.raises(UnsupportedError, match="writes into its input"):
            exactness.step(case)
