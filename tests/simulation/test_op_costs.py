"""What single operators cost, and what a whole step adds up to beside torch's own counter of FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hf_ckpt.simulation.devices import CPU, find_device
from hf_ckpt.simulation.op_costs import (
    FREE,
    OperatorCost,
    attention_efficiency,
    busy_seconds,
    busy_share,
    copy_seconds,
    operator_cost,
)
from tests import zoo

pytestmark = pytest.mark.core

aten = torch.ops.aten


class Costs(TorchDispatchMode):
    """Keeps the cost of every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: list[tuple[str, OperatorCost]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.costs.append(
            (function._schema.name.partition("::")[2], operator_cost(function, args, kwargs or {}, output))
        )
        return output

    def paid(self) -> list[tuple[str, int]]:
        """Return name and bytes of the operators that are not free."""
        return [(name, cost.num_bytes) for name, cost in self.costs if cost is not FREE]


def costs_of(run: Callable[[], object]) -> Costs:
    with Costs() as costs:
        run()
    return costs


def flops_of(run: Callable[[], object]) -> int:
    return sum(cost.num_flops for _, cost in costs_of(run).costs)


# --- Bytes. ---


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        # One float32 [4, 8] is 128 bytes: read once, written once.
        (lambda x: x.relu(), [("relu", 256)]),
        (lambda x: x + x, [("add", 384)]),
        (lambda x: x.to(torch.bfloat16), [("_to_copy", 192)]),
        (lambda x: x.add_(1), [("add_", 256)]),
        (lambda x: x.mul_(x), [("mul_", 384)]),
        (lambda x: x.sum(), [("sum", 132)]),
        # Written, not read.
        (lambda x: x.zero_(), [("zero_", 128)]),
        (lambda x: x.copy_(torch.empty(4, 8)), [("copy_", 256)]),
        (lambda x: torch.zeros(4, 8), [("zeros", 128)]),
        # Views and fresh memory.
        (lambda x: x.t().reshape(2, 16).unsqueeze(0), [("clone", 256)]),
        (lambda x: x.view(8, 4)[2:].detach().split(2), []),
        (lambda x: torch.empty_like(x), []),
        (lambda x: torch.ones_like(x), [("ones_like", 128)]),
        (lambda x: x.new_zeros(2, 2), [("new_zeros", 16)]),
        (lambda x: aten._unsafe_view(x, [8, 4]), []),
        # An expanded tensor has the memory of what it was expanded from.
        (lambda x: x[:1].expand(4, 8).relu(), [("relu", 128 + 128)]),
        # Rows: the table has 128 bytes, two rows of it 64; the indices 16.
        (lambda x: functional.embedding(torch.tensor([1, 3]), x), [("embedding", 16 + 2 * 64)]),
        (lambda x: x[torch.tensor([1, 3])], [("index", 16 + 2 * 64)]),
        (lambda x: x.index_add_(0, torch.tensor([1, 3]), torch.empty(2, 8)), [("index_add_", 3 * (16 + 64))]),
        # Lists of tensors.
        (lambda x: torch._foreach_mul_([x, torch.empty(2)], 2.0), [("_foreach_mul_", 2 * (128 + 8))]),
        (lambda x: torch._foreach_norm([x]), [("_foreach_norm", 128 + 4)]),
    ],
)
def test_bytes_are_read_once_and_written_once(run: Callable[[Tensor], object], expected: list[tuple[str, int]]) -> None:
    x = torch.ones(4, 8)
    assert [entry for entry in costs_of(lambda: run(x)).paid() if entry[0] not in ("tensor", "fill_")] == expected


def test_fused_adamw_reads_four_tensors_and_writes_three() -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(64, 64)
    optimizer.step()
    paid = dict(costs_of(optimizer.step).paid())
    # And the count of steps.
    assert paid["_fused_adamw_"] == 7 * 64 * 64 * 4 + 4


def test_loss_reads_one_probability_of_each_row_and_writes_the_whole_gradient() -> None:
    scores = torch.ones(4, 100, requires_grad=True)
    paid = costs_of(lambda: functional.cross_entropy(scores, torch.tensor([1, 2, 3, 4])).backward()).paid()
    moved = {name: num_bytes for name, num_bytes in paid if name.startswith("nll_loss")}
    # Four targets of 8 bytes; the loss and the total weight, twice.
    assert moved == {"nll_loss_forward": 4 * 8 + 2 * (4 + 4), "nll_loss_backward": 4 * 100 * 4}


def test_matrix_product_moves_its_operands_and_its_result() -> None:
    a, b = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(32, 8, dtype=torch.bfloat16)
    assert operator_cost(aten.mm.default, (a, b), {}, a @ b) == OperatorCost(
        2 * 16 * 32 * 8, 2 * (16 * 32 + 32 * 8 + 16 * 8), "bfloat16", 2 * 16 * 32 * 8, product=(1, 16, 8)
    )


# --- FLOPs. ---


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "t5"])
def test_step_has_the_flops_that_torch_counts(model_type: str, attn_implementation: str) -> None:
    case = zoo.build(model_type, attn_implementation=attn_implementation)

    def step() -> None:
        case.model(**case.inputs).loss.backward()

    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, **kwargs: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *args, **kwargs: (
            sdpa_backward_flop_count(g, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        step()
    own = flops_of(step)
    assert own - grouped_flops(step) == counter.get_total_flops() > 0


def grouped_flops(run: Callable[[], object]) -> int:
    """FLOPs of grouped products, for which torch has no formula."""
    return sum(cost.num_flops for name, cost in costs_of(run).costs if name == "_grouped_mm")


def test_grouped_products_count_each_row_once() -> None:
    tokens, weights = torch.ones(32, 16, dtype=torch.bfloat16), torch.ones(4, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    assert flops_of(lambda: torch._grouped_mm(tokens, weights, offs=ends)) == 2 * 32 * 16 * 8
    # The gradient of the weights: [16, 32] by [32, 8], the tokens in groups.
    gradient = torch.ones(32, 8, dtype=torch.bfloat16)
    assert flops_of(lambda: torch._grouped_mm(tokens.t(), gradient, offs=ends)) == 2 * 16 * 32 * 8


def attention(rows: int, heads: int, key_heads: int, *, is_causal: bool, is_backward: bool = False) -> OperatorCost:
    query = torch.ones(2, heads, rows, 32, requires_grad=True)
    key, value = (torch.ones(2, key_heads, rows, 32, requires_grad=True) for _ in range(2))

    def run() -> None:
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=heads != key_heads
        )
        if is_backward:
            out.sum().backward()

    costs = [cost for name, cost in costs_of(run).costs if name.startswith("_scaled_dot_product")]
    return costs[-1]


def test_causal_attention_computes_half_of_what_is_counted() -> None:
    whole, causal = (attention(64, 4, 4, is_causal=is_causal) for is_causal in (False, True))
    assert whole.num_flops == causal.num_flops == 4 * 2 * 4 * 64 * 64 * 32
    assert whole.num_effective_flops == whole.num_flops == 2 * causal.num_effective_flops
    assert whole.is_attention


def test_attention_backward_has_five_products_to_the_two_of_forward() -> None:
    forward, backward = (attention(64, 4, 4, is_causal=True, is_backward=back) for back in (False, True))
    assert 2 * backward.num_flops == 5 * forward.num_flops
    assert 2 * backward.num_effective_flops == 5 * forward.num_effective_flops


def test_attention_with_shared_keys_computes_scores_for_every_query_head() -> None:
    assert attention(64, 4, 2, is_causal=True).num_flops == attention(64, 4, 4, is_causal=True).num_flops


def test_fake_tensors_cost_what_real_ones_do() -> None:
    case = zoo.build("llama", attn_implementation="sdpa")
    real = costs_of(lambda: case.model(**case.inputs).loss.backward())
    with FakeTensorMode(allow_non_fake_inputs=True):
        a, b = torch.ones(8, 16), torch.ones(16, 4)
        fake = costs_of(lambda: a @ b)
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    assert fake.costs == costs_of(lambda: a @ b).costs
    assert len(real.paid()) > 50


class Bitsandbytes:
    """Stands for an operator of the library, which counts without being imported."""

    class _schema:  # noqa: N801
        name, overload_name, arguments, returns = "bitsandbytes::int8_linear_matmul", "default", (), ()


def test_products_of_bitsandbytes_are_counted() -> None:
    a, b = torch.ones(2, 16, 32, dtype=torch.int8), torch.ones(8, 32, dtype=torch.int8)
    cost = operator_cost(Bitsandbytes, (a, b), {}, torch.ones(2, 16, 8, dtype=torch.int32))
    assert cost == OperatorCost(2 * 32 * 32 * 8, 1024 + 256 + 1024, "int8", 2 * 32 * 32 * 8, product=(1, 32, 8))


# --- Seconds. ---

H200 = find_device("h200")


def test_product_takes_the_time_of_its_flops() -> None:
    flops = 2 * 8192**3
    cost = OperatorCost(flops, 3 * 2 * 8192**2, "bfloat16", flops)
    assert busy_seconds(cost, H200) == pytest.approx(flops / (0.8 * 989e12) + 3e-6)
    assert busy_seconds(OperatorCost(flops, 0, "float32", flops), H200) == pytest.approx(flops / (0.8 * 67e12) + 3e-6)
    # Products of eight bits at least as fast as of sixteen, those of unknown dtypes as float32.
    assert busy_seconds(OperatorCost(flops, 0, "int8", flops), H200) == busy_seconds(cost, H200)
    assert busy_seconds(OperatorCost(flops, 0, "float64", flops), H200) == pytest.approx(flops / (0.8 * 67e12) + 3e-6)


def test_everything_else_takes_the_time_of_its_bytes() -> None:
    assert busy_seconds(OperatorCost(0, 2**30), H200) == pytest.approx(2**30 / (0.85 * 4.8e12) + 3e-6)
    # A product of one row is no faster than its weights are read.
    assert busy_seconds(OperatorCost(2 * 2**29, 2**30, "bfloat16", 2 * 2**29), H200) == pytest.approx(
        2**30 / (0.85 * 4.8e12) + 3e-6
    )


def test_small_operators_keep_a_device_busy_for_a_moment_and_free_ones_not() -> None:
    assert busy_seconds(OperatorCost(0, 4), H200) == pytest.approx(3e-6, rel=1e-5)
    assert busy_seconds(FREE, H200) == 0.0


def test_fused_attention_has_a_rate_of_its_own() -> None:
    cost = OperatorCost(2 * 10**12, 0, "bfloat16", 10**12, is_attention=True)
    assert busy_seconds(cost, H200) == pytest.approx(1e12 / (0.35 * 989e12) + 3e-6)
    of_cudnn = OperatorCost(2 * 10**12, 0, "bfloat16", 10**12, is_attention=True, is_cudnn=True)
    assert busy_seconds(of_cudnn, H200) == pytest.approx(1e12 / (0.50 * 989e12) + 3e-6)
    for name, share, of_cudnn_share in (("a100-80gb", 0.6, 0.6), ("rtx4090", 0.6, 0.6), ("h100", 0.35, 0.5)):
        device = find_device(name)
        assert attention_efficiency(device, is_cudnn=False) == share
        assert attention_efficiency(device, is_cudnn=True) == of_cudnn_share
    for is_cudnn in (False, True):
        assert attention_efficiency(CPU, is_cudnn=is_cudnn) == CPU.matmul_efficiency
        assert attention_efficiency(replace(H200, attention_efficiency=0.45), is_cudnn=is_cudnn) == 0.45


@pytest.mark.parametrize(
    ("name", "attention", "share"),
    [
        ("h100", "flash_attention_3", 0.49),
        ("h100", "kernels-community/vllm-flash-attn3", 0.49),
        ("h100", "flash_attention_2", 0.35),
        ("h200", "sdpa", 0.35),
        ("b200", "flash_attention_2", 0.135),
        ("b300", "kernels-community/flash-attn2", 0.135),
        ("a100-80gb", "flash_attention_2", 0.6),
        ("rtx5090", "flash_attention_2", 0.6),
        ("mi300x", None, 0.6),
    ],
)
def test_attention_has_the_rate_of_the_kernel_that_a_model_is_told(
    name: str, attention: str | None, share: float
) -> None:
    device = find_device(name).running(attention)
    assert attention_efficiency(device, is_cudnn=False) == share
    if attention not in (None, "sdpa"):
        assert not device.tries_cudnn_first
        assert device.describe_attention() == f"{device.attention_kernel}, as model.attn_implementation names it"


def test_the_rate_is_that_of_the_kernel_that_runs() -> None:
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    with FakeTensorMode():
        query = torch.empty(1, 2, 16, 8, dtype=torch.bfloat16)
        given = (query, query, query, None, True, 0.0, True)
        cost = operator_cost(cudnn, given, {}, cudnn(*given))
        assert (cost.is_attention, cost.is_cudnn) == (True, True)
        cost = operator_cost(flash, (query, query, query), {}, flash(query, query, query))
        assert (cost.is_attention, cost.is_cudnn) == (True, False)


def test_copies_take_the_time_of_the_link() -> None:
    assert copy_seconds(63 * 10**9, H200) == pytest.approx(1 / 0.8)
    assert copy_seconds(450 * 10**9, H200, between_ranks=True) == pytest.approx(1 / 0.8)
    assert copy_seconds(10**9, CPU, between_ranks=True) == 0.0


# --- The share of a card that a product keeps busy. ---


def test_the_last_round_of_tiles_leaves_multiprocessors_idle() -> None:
    # 256 x 128 tiles: 64 x 32 = 2,048 for 132 multiprocessors, 15.5 rounds that take 16.
    assert busy_share((1, 8192, 8192), 132) == pytest.approx(2048 / 132 / 16)
    # 16 x 8 = 128 tiles are less than one round: tiles of 128 x 128 take 1.94 of 2.
    assert busy_share((1, 2048, 2048), 132) == pytest.approx(256 / 132 / 2)
    # Many small products fill a card as one large does.
    assert busy_share((64, 256, 128), 64) == 1.0
    assert busy_share((1, 8192, 8192), 0) == busy_share((0, 0, 0), 132) == busy_share((1, 8192, 16), 132) == 1.0


def test_products_that_fill_no_card_take_longer() -> None:
    first = torch.empty(2048, 512, dtype=torch.bfloat16)
    weight = torch.empty(512, 2048, dtype=torch.bfloat16)
    cost = operator_cost(aten.mm.default, (first, weight), {}, torch.empty(2048, 2048))
    assert cost.product == (1, 2048, 2048)
    assert busy_seconds(cost, H200) == pytest.approx(
        2 * 2048 * 512 * 2048 / (0.8 * 989e12 * busy_share((1, 2048, 2048), 132)) + 3e-6
    )
    batched = torch.empty(8, 64, 32)
    cost = operator_cost(aten.bmm.default, (batched, batched.mT), {}, torch.empty(8, 64, 64))
    assert cost.product == (8, 64, 64)
