"""What each policy keeps after forward, how often each layer runs, and what that costs: exact figures.

A Llama with eager attention and without dropout; B rows of S tokens, hidden size H, all in float32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import hf_ckpt
from tests import exactness, live_storages, zoo
from tests.zoo_tables import BATCH, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LENGTH, VOCAB

FLOAT32 = 4
INPUT_BYTES = BATCH * LENGTH * HIDDEN * FLOAT32  # what one layer takes
ROTARY_BYTES = 2 * LENGTH * HEAD_DIM * FLOAT32  # cosines and sines, shared by all layers


@cache
def llama(num_layers: int) -> zoo.Case:
    return exactness.build("llama", attn_implementation="eager", num_layers=num_layers, dropout=0.0)


@contextmanager
def in_force(model: nn.Module, policy: object, options: dict[str, object]) -> Iterator[None]:
    # A proven step runs again to the end.
    with hf_ckpt.apply(model, policy, prove="off", **options):
        yield


def saved_bytes(case: zoo.Case, policy: object, **options: object) -> int:
    """Return the bytes that autograd holds after forward: each storage once, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in case.model.parameters()}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Held here, so that no address is used twice.
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with in_force(case.model, policy, options), saved_tensors_hooks(pack, lambda tensor: tensor):
        zoo.loss(case.model, case.inputs)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in held.items() if address not in parameters)


def live_bytes(case: zoo.Case, policy: object, **options: object) -> tuple[int, int]:
    """Return the bytes of all tensors alive after forward, and the most in backward, gradients left out."""
    embedding = case.model.get_input_embeddings().weight
    with in_force(case.model, policy, options), live_storages.of(case.model, case.inputs.values()) as alive:
        loss = zoo.loss(case.model, case.inputs)
        after_forward = alive.num_bytes()
        alive.restart_peak()
        # The gradients of the parameters would hide what backward itself needs; this asks for the first one's alone.
        loss.backward(inputs=[embedding])
        embedding.grad = None
    return after_forward, alive.peak_bytes


def entries(case: zoo.Case, probe: str, policy: object, **options: object) -> list[int]:
    """Return how often the module called `probe` in each layer is entered in a step, recomputation included."""
    counts: Counter[str] = Counter()
    with in_force(case.model, policy, options), exactness.counted_entries(case.model) as (forward, backward):
        exactness.step(case)
        counts = forward + backward
    return [counts[name] for name, _ in case.model.named_modules() if name.endswith(probe)]


def flops(case: zoo.Case, policy: object, **options: object) -> int:
    with in_force(case.model, policy, options), FlopCounterMode(display=False) as counter:
        exactness.step(case)
    return counter.get_total_flops()


# --- Bytes held after forward. ---


def test_full_keeps_one_input_per_layer() -> None:
    # What is not in the layers (norm, head, loss) is held either way.
    assert saved_bytes(llama(8), "full") - saved_bytes(llama(4), "full") == 4 * INPUT_BYTES


def test_full_keeps_less_than_a_part_and_a_part_less_than_none() -> None:
    none, full, attention, ffn = (saved_bytes(llama(8), mode) for mode in ("none", "full", "attention", "ffn"))
    assert full < attention < none
    assert full < ffn < none


def test_ffn_frees_what_is_between_its_input_and_its_output() -> None:
    # The gate before and behind its activation, the other projection, and their product.
    freed = saved_bytes(llama(8), "none") - saved_bytes(llama(8), "ffn")
    assert freed == 8 * 4 * BATCH * LENGTH * INNER * FLOAT32


def test_attention_frees_at_least_its_probabilities() -> None:
    freed = saved_bytes(llama(8), "none") - saved_bytes(llama(8), "attention")
    assert freed > 8 * BATCH * HEADS * LENGTH * LENGTH * FLOAT32


def test_full_frees_more_than_both_parts_together() -> None:
    none, full, attention, ffn = (saved_bytes(llama(8), mode) for mode in ("none", "full", "attention", "ffn"))
    assert none - full > (none - attention) + (none - ffn)


def test_every_second_layer_is_half_way_between_none_and_full() -> None:
    none, every_2, full = (
        saved_bytes(llama(8), "none"),
        saved_bytes(llama(8), "full", every_n_layers=2),
        saved_bytes(llama(8), "full"),
    )
    # Exactly, but for the rotary tables: one pair for all layers, held as soon as one layer is not recomputed.
    assert 2 * every_2 == none + full + ROTARY_BYTES


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("segment_size", "num_inputs"), [(1, 9), (2, 5), (3, 3), (4, 3), (9, 1), ("sqrt", 3)], ids=str)
def test_segments_keep_one_input_each(segment_size: int | str, num_inputs: int, nested: bool) -> None:
    freed = saved_bytes(llama(9), "full") - saved_bytes(llama(9), "full", segment_size=segment_size, nested=nested)
    assert freed == (9 - num_inputs) * INPUT_BYTES


def test_each_rule_keeps_what_its_mode_keeps() -> None:
    rules = [{"layers": "0:4", "mode": "full"}, {"layers": "4:8", "mode": "ffn"}]
    full, ffn = saved_bytes(llama(8), "full"), saved_bytes(llama(8), "ffn")
    assert 2 * saved_bytes(llama(8), rules) == full + ffn + ROTARY_BYTES


def test_inline_ffn_keeps_more_than_full_and_less_than_none() -> None:
    case = exactness.build("opt", attn_implementation="eager", num_layers=8, dropout=0.0)
    assert saved_bytes(case, "full") < saved_bytes(case, "ffn") < saved_bytes(case, "none")
    assert live_bytes(case, "full")[0] < live_bytes(case, "ffn")[0] < live_bytes(case, "none")[0]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("none", {}),
        ("full", {}),
        ("attention", {}),
        ("ffn", {}),
        ("full", {"segment_size": 3}),
        ("full", {"segment_size": 3, "nested": True}),
    ],
)
def test_nothing_is_held_behind_the_back_of_autograd(policy: object, options: dict[str, object]) -> None:
    case = llama(9)
    mask_bytes = BATCH * LENGTH * LENGTH * FLOAT32
    held = live_bytes(case, policy, **options)[0] - saved_bytes(case, policy, **options)
    # Held by reference: the mask and the rotary tables, once for all layers. And scalars: the loss and, for each layer
    # of a segment, the two of the node that holds its inputs.
    assert abs(held) <= mask_bytes + ROTARY_BYTES + 64 * FLOAT32


# --- Selective, offload, tiles and the chunked head. ---


def test_selective_modes_keep_more_than_full_and_less_than_none() -> None:
    # With a kernel: eager attention has none to keep.
    case = exactness.build("llama", num_layers=4, dropout=0.0)
    modes = ("full", "selective_attention", "selective", "none")
    held = [live_bytes(case, mode)[0] for mode in modes]
    assert held == sorted(set(held))


def test_selective_attention_keeps_the_inputs_and_what_the_kernels_return() -> None:
    case = exactness.build("llama", num_layers=4, dropout=0.0)
    statistics_bytes = BATCH * HEADS * LENGTH * FLOAT32
    # The kernel's output has the size of an input: as many heads as the hidden size holds.
    assert HEADS * HEAD_DIM == HIDDEN
    assert live_bytes(case, "selective_attention")[0] - live_bytes(case, "full")[0] == 4 * (
        INPUT_BYTES + statistics_bytes
    )


def test_offload_leaves_the_last_input_and_what_is_not_in_the_layers() -> None:
    # The host is the same machine here: what waits there is taken off.
    everything, in_layers = llama(8), []
    for offload in (None, {"to": "cpu", "min_bytes": 0}):
        with hf_ckpt.apply(everything.model, "full", offload=offload) as applied:
            with live_storages.of(everything.model, everything.inputs.values()) as alive:
                loss = zoo.loss(everything.model, everything.inputs)
                waiting = sum(offloader.stats.live_bytes for offloader in applied.offloaders)
                in_layers.append(alive.num_bytes() - waiting)
            loss.backward()
    # The first layer's input is the embedding's own output, the others' what the layers before them returned.
    assert in_layers[0] - in_layers[1] == 7 * INPUT_BYTES


@pytest.mark.sweep
def test_tiles_shrink_what_a_layer_needs_at_once() -> None:
    long = exactness.build("llama", num_layers=2, dropout=0.0)
    long.inputs.update({name: tensor.repeat(1, 32) for name, tensor in long.inputs.items()})
    at_once = []
    for tiles in (None, 1, 4, 16):
        held, peak = live_bytes(long, "full", tiles=tiles, head="chunked")
        at_once.append(peak - held)
    whole, one, four, sixteen = at_once
    assert sixteen < four < min(whole, one)


def test_chunked_head_never_makes_all_logits() -> None:
    case = llama(4)
    plain, chunked = (most_rows_of_logits(case, head=head) for head in ("plain", "chunked"))
    assert (plain, chunked) == (BATCH * LENGTH, BATCH * LENGTH // 8)


def most_rows_of_logits(case: zoo.Case, **options: object) -> int:
    """Return the most tokens that one tensor has a value of each word for; the head's weight is left out."""
    with in_force(case.model, "none", options), Logits() as logits:
        exactness.step(case)
    return logits.most_rows


class Logits(TorchDispatchMode):
    """Looks at the tensors with one column for each word that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.most_rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.ndim > 1 and tensor.shape[-1] == VOCAB:
                num_rows = tensor.shape[:-1].numel()
                self.most_rows = max(self.most_rows, num_rows if num_rows != HIDDEN else 0)
        return output


# --- Bytes while backward runs. ---


def test_segment_brings_back_all_of_its_layers_at_once() -> None:
    (held, peak), (_, none_peak) = (live_bytes(llama(9), "full", segment_size=3), live_bytes(llama(9), "none"))
    per_layer = none_peak - live_bytes(llama(8), "none")[1]
    # Two of three layers are complete while the third is recomputed; a fourth would be too much.
    assert 2 * per_layer < peak - held < 4 * per_layer


def test_nested_segment_brings_back_one_layer_at_a_time() -> None:
    _, full_peak = live_bytes(llama(9), "full")
    _, nested_peak = live_bytes(llama(9), "full", segment_size=3, nested=True)
    # In the backward of the last layer `full` holds 9 inputs; nested holds 3, and 2 more of the segment that is being
    # recomputed. Scalars: one for each layer, of the node that holds its inputs.
    assert full_peak - nested_peak == (9 - 3 - 2) * INPUT_BYTES - 9 * FLOAT32


@pytest.mark.parametrize("options", [{}, {"segment_size": 3}, {"segment_size": 3, "nested": True}], ids=str)
def test_retained_graph_holds_no_more_than_before_backward(options: dict[str, object]) -> None:
    case = llama(9)
    embedding = case.model.get_input_embeddings().weight
    known = [*case.inputs.values(), embedding]
    with in_force(case.model, "full", options), live_storages.of(case.model, known) as alive:
        loss = zoo.loss(case.model, case.inputs)
        after_forward = alive.num_bytes()
        loss.backward(inputs=[embedding], retain_graph=True)
        after_backward = alive.num_bytes() - embedding.grad.nbytes
    embedding.grad = None
    assert after_backward == after_forward


def test_full_needs_less_than_none_in_backward() -> None:
    assert live_bytes(llama(8), "full")[1] < live_bytes(llama(8), "none")[1] / 3


# --- Forward entries per layer. ---


@pytest.mark.parametrize(
    ("policy", "options", "layer", "attention", "ffn"),
    [
        ("none", {}, [1] * 6, [1] * 6, [1] * 6),
        ("full", {}, [2] * 6, [2] * 6, [2] * 6),
        ("attention", {}, [1] * 6, [2] * 6, [1] * 6),
        ("ffn", {}, [1] * 6, [1] * 6, [2] * 6),
        ("full", {"every_n_layers": 2}, [2, 1] * 3, [2, 1] * 3, [2, 1] * 3),
        ("attention", {"every_n_layers": 3}, [1] * 6, [2, 1, 1] * 2, [1] * 6),
        ("full", {"segment_size": 3}, [2] * 6, [2] * 6, [2] * 6),
        # A nested segment is complete when its last layer's input is there: that layer runs once fewer.
        ("full", {"segment_size": 3, "nested": True}, [3, 3, 2] * 2, [3, 3, 2] * 2, [3, 3, 2] * 2),
        ("full", {"segment_size": 4, "nested": True}, [3, 3, 3, 2, 3, 2], [3, 3, 3, 2, 3, 2], [3, 3, 3, 2, 3, 2]),
        (
            [{"layers": "0:2", "mode": "full"}, {"layers": "2:4", "mode": "ffn"}, {"layers": 4, "mode": "attention"}],
            {},
            [2, 2, 1, 1, 1, 1],
            [2, 2, 1, 1, 2, 1],
            [2, 2, 2, 2, 1, 1],
        ),
    ],
)
def test_layers_run_as_often_as_planned(
    policy: object, options: dict[str, object], layer: list[int], attention: list[int], ffn: list[int]
) -> None:
    case = llama(6)
    assert entries(case, "input_layernorm", policy, **options) == layer
    assert entries(case, "q_proj", policy, **options) == attention
    assert entries(case, "gate_proj", policy, **options) == ffn


def test_each_stack_is_counted_from_its_own_first_layer() -> None:
    # transformers' own every_n_layers counts on over all towers.
    case = exactness.build("qwen2_vl", num_layers=3)
    assert entries(case, ".norm1", "full", every_n_layers=2) == [2, 1, 2]
    assert entries(case, "input_layernorm", "full", every_n_layers=2) == [2, 1, 2]


def test_inline_ffn_runs_its_attention_once() -> None:
    case = exactness.build("opt", attn_implementation="eager")
    assert entries(case, "q_proj", "ffn") == [1] * 4
    assert entries(case, "fc1", "ffn") == [2] * 4
    assert entries(case, "q_proj", "attention") == [2] * 4
    assert entries(case, "fc1", "attention") == [1] * 4


def test_frozen_layers_are_not_recomputed() -> None:
    case = exactness.build("llama")
    case.model.requires_grad_(False)
    case.model.model.layers[2:].requires_grad_(True)
    assert entries(case, "q_proj", "full", skip_frozen=True) == [1, 1, 2, 2]
    # Nothing asks for them, so nothing brings them back.
    assert entries(case, "q_proj", "full") == [1, 1, 2, 2]


def test_evaluation_runs_every_layer_once() -> None:
    case = exactness.build("llama")
    with exactness.apply(case.model.eval(), "full"), exactness.counted_entries(case.model) as (forward, backward):
        exactness.step(case)
    assert [forward[f"model.layers.{idx}"] for idx in range(4)] == [1] * 4
    assert not backward


# --- FLOPs, counted from the shapes. ---

TOKENS = BATCH * LENGTH
QUERY = OUTPUT = 2 * TOKENS * HIDDEN * HEADS * HEAD_DIM
KEY = VALUE = 2 * TOKENS * HIDDEN * KV_HEADS * HEAD_DIM
SCORES = WEIGHTED = 2 * BATCH * HEADS * LENGTH * LENGTH * HEAD_DIM
GATE = UP = DOWN = 2 * TOKENS * HIDDEN * INNER
LAYER = QUERY + KEY + VALUE + SCORES + WEIGHTED + OUTPUT + GATE + UP + DOWN
HEAD = 2 * TOKENS * HIDDEN * VOCAB


# transformers 5.0 makes the angles of the rotary tables by a matrix product, 5.23 does not.
ANGLES = LENGTH * HEAD_DIM


def test_step_without_checkpointing_costs_three_forwards() -> None:
    # Backward multiplies twice for each product of forward: for the gradient of each factor.
    assert flops(llama(6), "none") - 3 * (6 * LAYER + HEAD) in (0, ANGLES)


@pytest.mark.parametrize(
    ("policy", "options", "extra"),
    [
        # Recomputation stops at the last tensor that backward needs: the last product of a region is not run again.
        ("full", {}, 6 * (LAYER - DOWN)),
        ("attention", {}, 6 * (QUERY + KEY + VALUE + SCORES + WEIGHTED)),
        ("ffn", {}, 6 * (GATE + UP)),
        ("full", {"every_n_layers": 2}, 3 * (LAYER - DOWN)),
        ("full", {"segment_size": 3}, 2 * (3 * LAYER - DOWN)),
        ("full", {"segment_size": 6}, 6 * LAYER - DOWN),
        # Up to the input of the segment's last layer, then each layer once more.
        ("full", {"segment_size": 3, "nested": True}, 2 * (2 * LAYER + 3 * (LAYER - DOWN))),
    ],
)
def test_recomputation_costs_what_is_run_again(policy: object, options: dict[str, object], extra: int) -> None:
    assert flops(llama(6), policy, **options) - flops(llama(6), "none") == extra


def test_full_costs_less_than_a_third_more() -> None:
    none, full = flops(llama(6), "none"), flops(llama(6), "full")
    angles = none - 3 * (6 * LAYER + HEAD)
    assert Fraction(full - angles, none - angles) == 1 + Fraction(6 * (LAYER - DOWN), 3 * (6 * LAYER + HEAD))
    assert 1.25 < full / none < 4 / 3


def test_gradients_do_not_depend_on_what_is_kept() -> None:
    # The figures above are of steps without dropout; that these are exact too is not seen elsewhere.
    expected = exactness.step(llama(6))
    for policy in exactness.RECOMPUTING:
        with exactness.apply(llama(6).model, policy):
            assert exactness.differences(expected, exactness.step(llama(6))) == []
    assert torch.isfinite(expected[0])
