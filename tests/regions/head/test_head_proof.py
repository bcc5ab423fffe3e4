"""Faults planted in the chunked head: the proof of the first step finds each, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.regions import value_proof
from hf_ckpt.regions.head import Chunking, chunked_loss, run_head
from hf_ckpt.regions.head.chunked_loss import LossCall
from hf_ckpt.regions.value_proof import ValueProof
from tests import training

pytestmark = pytest.mark.core

Plant = Callable[[pytest.MonkeyPatch], None]
BATCH, LENGTH, WIDTH, VOCAB = 2, 25, 16, 61
DTYPES = [torch.float32, torch.bfloat16]


def step(
    dtype: torch.dtype = torch.float32,
    *,
    steps: tuple[str, ...] = (),
    is_frozen: bool = False,
    dropout: float = 0.0,
    **options: Any,
) -> None:
    """Run a proven step of a head of 48 rows, in eight chunks of six."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Dropout(dropout), nn.Linear(WIDTH, VOCAB)).to(dtype).requires_grad_(not is_frozen)
    proof = ValueProof("first_step")
    region = proof.region("lm_head")
    head.forward = partial(run_head, Chunking(proof=region), head, None)  # type: ignore[method-assign]
    hidden = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    target = torch.randint(0, VOCAB, (BATCH, LENGTH))
    target[0, :7] = -100
    logits = head(hidden)[:, :-1]
    for name in steps:
        logits = getattr(logits, name)()
    loss = functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), **options)
    (3 * loss.sum()).backward()
    assert not region.is_awaited
    assert hidden.grad is not None


def in_place_of(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Return what lets `change` be called in the place of a function; it is given that as its first argument."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        found = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(found, *args, **kwargs))

    return plant


def scale_loss(factor: float, number: int | None = None) -> Plant:
    """Return what multiplies the loss of each chunk, or of one of them."""

    def scaled(
        found: Any, head: Any, source: Any, steps: Any, function: Any, weights: Any, which: int, *args: Any
    ) -> Any:
        value = found(head, source, steps, function, weights, which, *args)
        return value * factor if number in (None, which) else value

    return in_place_of(chunked_loss, "_run", scaled)


def skip_chunk(found: Any, compute: Any, loss: LossCall) -> Any:
    return found(lambda *given: compute(*given)[:-1], loss)


def leave_out_of_sum(found: Any, compute: Any, loss: LossCall) -> Any:
    def computed(*given: Any) -> Any:
        values = compute(*given)
        values.pop(2)
        return values

    return found(computed, loss)


def shift_labels(found: Any, compute: Any, loss: LossCall) -> Any:
    return found(compute, replace(loss, target=loss.target.roll(1)))


def shift_rows(found: Any, self: Any, tensor: Tensor, number: int) -> Tensor:
    """Give the third chunk the rows from one before."""
    return tensor[11:17] if number == 2 else found(self, tensor, number)


def put_elsewhere(found: Any, self: Any, gradient: Tensor, number: int) -> None:
    found(self, gradient, 3 if number == 2 else number)


def drop_gradient(found: Any, self: Any, gradient: Tensor, number: int) -> None:
    if number != 1:
        found(self, gradient, number)


def scale_gradient(found: Any, ctx: Any, gradient: Tensor) -> Any:
    return found(ctx, 1.05 * gradient)


PLANTED: dict[str, Plant] = {
    "losses times 1.001": scale_loss(1.001),
    "losses times 1.01": scale_loss(1.01),
    "last loss times 1.001": scale_loss(1.001, 7),
    "loss of a chunk missing": in_place_of(chunked_loss, "loss_in_chunks", skip_chunk),
    "loss of a chunk left out of the sum": in_place_of(chunked_loss, "loss_in_chunks", leave_out_of_sum),
    "labels shifted": in_place_of(chunked_loss, "loss_in_chunks", shift_labels),
    "rows shifted": in_place_of(chunked_loss._RowGradients, "part_of", shift_rows),
    "divisor off by one": in_place_of(chunked_loss, "_divisor", lambda found, *args: found(*args) + 1),
    "gradient put elsewhere": in_place_of(chunked_loss._RowGradients, "add", put_elsewhere),
    "gradient of a chunk lost": in_place_of(chunked_loss._SummedGradient, "add", drop_gradient),
    "gradients scaled": in_place_of(chunked_loss._ChunkInput, "backward", scale_gradient),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"weight": torch.linspace(0.5, 2, VOCAB)},
        {"steps": ("float", "tanh")},
        {"is_frozen": True},
        {"dropout": 0.3},
    ],
    ids=str,
)
def test_nothing_is_found_where_nothing_is_wrong(options: dict[str, Any], dtype: torch.dtype) -> None:
    if "weight" in options:
        options = {"weight": options["weight"], "steps": ("float",)}
    step(dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    with pytest.raises(PlanMismatchError, match=r"^lm_head: "):
        step(dtype)


def test_both_figures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_loss(1.01, 3)(monkeypatch)
    with pytest.raises(PlanMismatchError, match=r"its loss over rows 18 to 23 is \d+\.\d+, and that of the plain head"):
        step()


def of_each_half(loss: Tensor, halves: list[list[Tensor]], head: Tensor) -> None:
    for half in halves:
        torch.autograd.grad(loss, half, retain_graph=True)
    loss.backward()


def of_the_head_first(loss: Tensor, halves: list[list[Tensor]], head: Tensor) -> None:
    for _ in range(2):
        torch.autograd.grad(loss, head, retain_graph=True)
    loss.backward()


def scaled_otherwise(loss: Tensor, halves: list[list[Tensor]], head: Tensor) -> None:
    torch.autograd.grad(loss / 2, halves[0], retain_graph=True)
    (3 * loss).backward()


def into_some_weights(loss: Tensor, halves: list[list[Tensor]], head: Tensor) -> None:
    loss.backward(inputs=halves[0], retain_graph=True)
    loss.backward(inputs=[*halves[1], head])


def of_all_but_the_head(loss: Tensor, halves: list[list[Tensor]], head: Tensor) -> None:
    torch.autograd.grad(loss, [*halves[0], *halves[1]])


@pytest.mark.parametrize(
    "take", [of_each_half, of_the_head_first, scaled_otherwise, into_some_weights, of_all_but_the_head]
)
def test_partial_gradients_are_no_fault(take: Callable[..., None]) -> None:
    def gradients(**options: Any) -> list[Tensor | None]:
        model = training.llama().train()
        halves = [[layer.mlp.up_proj.weight for layer in model.model.layers[at]] for at in (slice(2), slice(2, None))]
        ids = torch.arange(16).view(2, 8)
        torch.manual_seed(0)
        with hf_ckpt.apply(model, "full", **options):
            take(model(input_ids=ids, labels=ids).loss, halves, model.lm_head.weight)
        return [weight.grad for weight in model.parameters()]

    torch.testing.assert_close(gradients(head="chunked"), gradients())


def test_random_numbers_stay_where_they_are() -> None:
    step(dropout=0.3)
    proven = torch.get_rng_state()
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(value_proof, "_call_proof", lambda *call: None)
        with pytest.raises(AssertionError):
            step(dropout=0.3)
    # The step ended in its last lines, behind its backward.
    assert torch.equal(proven, torch.get_rng_state())


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["losses times 1.001", "last loss times 1.001", "labels shifted", "gradient of a chunk lost"]
)
def test_trainer_stops_before_the_optimizer_steps(
    name: str, is_half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED[name](monkeypatch)
    model = training.llama()
    before = training.weights(model)
    run = training.trainer(model, tmp_path, HFCkptCallback("none", head="chunked"), bf16=is_half)
    with pytest.raises(PlanMismatchError, match=r"lm_head: its loss|lm_head: 7 of 8 chunks gave|lm_head: the gradient"):
        run.train()
    assert all(torch.equal(before[key], weight) for key, weight in training.weights(model).items())


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "bfloat16"])
def test_every_step_of_a_run_with_an_adapted_head_is_proven(is_half: bool, tmp_path: Path) -> None:
    model = training.lora(target_modules=["lm_head", "q_proj"], lora_dropout=0.0)
    callback = HFCkptCallback("full", head="chunked", prove=1)
    run = training.trainer(model, tmp_path, callback, gradient_accumulation_steps=2, bf16=is_half)
    run.train()
    assert run.state.global_step == 2
