"""What a simulated step on fake CPU tensors keeps, and needs meanwhile, where it stands for one on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import hf_ckpt
from hf_ckpt.planner.search import StepPlanner
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.simulation.constant_folding import fold
from hf_ckpt.simulation.cuda import add_workspaces, attention_to_build, emulate_cuda, restore_attention
from hf_ckpt.simulation.cuda.attention import Kernel, choose_kernel
from hf_ckpt.simulation.devices import CPU, DEVICES, Device, find_device, workspace_bytes
from hf_ckpt.simulation.fake_model import fake_copy
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.simulator import StepSimulator, simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, Place, StepMemory
from hf_ckpt.simulation.tape import Event, Tape
from hf_ckpt.simulation.tracker import Tracker
from tests import exactness
from tests.live_storages import LiveStorages

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AMPERE, ADA, HOPPER, TURING = (8, 0), (8, 9), (9, 0), (7, 5)
H200 = find_device("h200")
A100 = next(device for device in DEVICES.values() if device.capability == AMPERE)


@dataclass(frozen=True)
class Followed:
    """Bytes beside the inputs: after forward without its output, and the most in backward without its gradient."""

    kept: int
    backward: int
    dtype: torch.dtype


def follow(
    function: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = BF16,
    device: Device = A100,
    autocast: torch.dtype | None = None,
) -> Followed:
    """Run a function forward and backward on fake tensors."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        live = LiveStorages(inputs)
        lower = torch.autocast("cpu", autocast) if autocast else nullcontext()
        with live, Tracker() as tracker, emulate_cuda(Step(), device, tracker), lower:
            output = function(*inputs)
            kept = live.num_bytes() - output.untyped_storage().nbytes()
            gradient = torch.empty_like(output)
            live.restart_peak()
            before = gradient.untyped_storage().nbytes() + output.untyped_storage().nbytes()
            torch.autograd.backward(output, gradient)
    return Followed(kept, live.peak_bytes - before, output.dtype)


def on_meta(config: PretrainedConfig, attention: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=BF16, attn_implementation=attention_to_build(attention)
        )
    return model.train()


def kept_by_model(config: PretrainedConfig, attention: str, *, padded: bool = False) -> int:
    """Return what a model keeps for backward on an A100, in bytes."""
    input_ids = torch.zeros(2, 64, dtype=torch.long)
    mask = {"attention_mask": torch.ones(2, 64, dtype=torch.long).tril()} if padded else {}
    copied = fake_copy(on_meta(config, attention))
    twin, mode = copied.model, copied.mode
    restore_attention(twin, attention)
    with mode, Tracker(run=fold):
        live = LiveStorages([*twin.parameters(), *twin.buffers(), input_ids, *mask.values()])
        with live, Tracker() as tracker, emulate_cuda(Step(is_padded=padded), A100, tracker):
            output = twin(input_ids=input_ids, use_cache=False, **mask)
            return live.num_bytes() - sum(each.untyped_storage().nbytes() for each in (output.logits,))


def llama(num_key_value_heads: int = 2) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        vocab_size=32,
    )


# --- The literature. ---


@pytest.mark.parametrize(("batch", "length", "width", "heads"), [(1, 1024, 1024, 16), (2, 512, 2048, 16)])
def test_a_layer_keeps_what_korthikanti_et_al_count(batch: int, length: int, width: int, heads: int) -> None:
    # "Reducing Activation Recomputation in Large Transformer Models" (2022), equation 1: 16-bit, with dropout.
    counted = length * batch * width * (34 + 5 * heads * length / width)
    config = GPT2Config(n_embd=width, n_head=heads, activation_function="gelu", attn_implementation="eager")
    with torch.device("meta"):
        copied = fake_copy(GPT2Block(config, layer_idx=0).to(BF16).train())
        layer, mode = copied.model, copied.mode
    with mode:
        inputs = torch.empty(batch, length, width, dtype=BF16, requires_grad=True)
        live = LiveStorages([*layer.parameters(), *layer.buffers()])
        with live, Tracker() as tracker, emulate_cuda(Step(), A100, tracker):
            output = layer(inputs.clone())
            output = output[0] if isinstance(output, tuple) else output
            kept = live.num_bytes() - output.untyped_storage().nbytes()
    assert kept == pytest.approx(counted, rel=0.001)


# --- Attention. ---


def qkv(
    *, dtype: torch.dtype = BF16, head_dim: int = 64, kv_heads: int = 4, length: int = 32, value_dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(2, 4, 32, head_dim), (2, kv_heads, length, head_dim), (2, kv_heads, length, value_dim or head_dim)]
    query, key, value = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize(
    ("capability", "options", "call", "kernel"),
    [
        (AMPERE, {}, {}, Kernel.FLASH),
        (AMPERE, {"dtype": FP16}, {"is_causal": True, "dropout": 0.1}, Kernel.FLASH),
        (AMPERE, {"kv_heads": 2}, {"enable_gqa": True}, Kernel.FLASH),
        (AMPERE, {"head_dim": 256}, {}, Kernel.FLASH),
        (AMPERE, {"length": 48}, {}, Kernel.FLASH),
        (AMPERE, {"length": 48}, {"is_causal": True}, Kernel.EFFICIENT),
        (AMPERE, {"head_dim": 264}, {}, Kernel.EFFICIENT),
        (AMPERE, {"value_dim": 32}, {}, Kernel.EFFICIENT),
        (AMPERE, {}, {"mask": True}, Kernel.EFFICIENT),
        (AMPERE, {"dtype": FP32}, {}, Kernel.EFFICIENT),
        (AMPERE, {"dtype": FP32, "kv_heads": 2}, {"enable_gqa": True}, Kernel.MATH),
        (AMPERE, {"dtype": FP32, "head_dim": 62}, {}, Kernel.MATH),
        (AMPERE, {"dtype": torch.float64}, {}, Kernel.MATH),
        (ADA, {"head_dim": 192}, {}, Kernel.FLASH),
        (ADA, {"head_dim": 224}, {}, Kernel.EFFICIENT),
        (ADA, {"head_dim": 256}, {}, Kernel.FLASH),
        (ADA, {"head_dim": 256}, {"dropout": 0.1}, Kernel.EFFICIENT),
        (HOPPER, {}, {"mask": True}, Kernel.CUDNN),
        (HOPPER, {}, {"dropout": 0.125}, Kernel.CUDNN),
        (HOPPER, {}, {"dropout": 0.1}, Kernel.FLASH),
        (HOPPER, {"head_dim": 256}, {}, Kernel.FLASH),
        (HOPPER, {"dtype": FP32}, {}, Kernel.EFFICIENT),
        (HOPPER, {}, {"prefers_cudnn": False}, Kernel.FLASH),
        (HOPPER, {}, {"prefers_cudnn": False, "mask": True}, Kernel.EFFICIENT),
        ((12, 0), {}, {}, Kernel.FLASH),
        (TURING, {"dtype": FP16}, {}, Kernel.EFFICIENT),
        (TURING, {}, {}, Kernel.MATH),
    ],
)
def test_the_kernel_is_the_one_that_torch_chooses(
    capability: tuple[int, int], options: dict[str, object], call: dict[str, object], kernel: Kernel
) -> None:
    mask = torch.empty(2, 1, 32, 32, dtype=torch.bool, device="meta") if call.pop("mask", False) else None
    prefers_cudnn = call.pop("prefers_cudnn", capability == HOPPER)
    assert choose_kernel(capability, *qkv(**options), mask, prefers_cudnn=prefers_cudnn, **call) is kernel


def attend(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, **options)


def test_flash_keeps_its_output_and_a_number_a_row_whatever_the_dropout() -> None:
    rows, extra = 2 * 8 * 128, 2 * 8 + 8
    for dropout in (0.0, 0.1):
        run = partial(attend, is_causal=True, dropout_p=dropout)
        # Beside the output: log-sum-exp, the state of the generator, and a placeholder.
        assert follow(run, *[(2, 8, 128, 64)] * 3).kept == rows * 4 + extra


def test_flash_needs_float32_for_the_querys_gradient_and_expanded_ones_for_grouped_heads() -> None:
    gradients = (2 * 8 + 2 * 2 * 2) * 128 * 64 * 2
    grouped = follow(
        lambda *inputs: attend(*inputs, enable_gqa=True), (2, 8, 128, 64), (2, 2, 128, 64), (2, 2, 128, 64)
    )
    workspace = 2 * 8 * 128 * 64 * 4 + 2 * 8 * 128 * 4 + 2 * (2 * 8 * 128 * 64 * 2)
    assert grouped.backward == gradients + workspace + grouped.kept


def test_cudnn_attention_needs_in_backward_what_was_measured() -> None:
    # On an H200 with torch 2.11 and cuDNN 9.19: 84,148,736 bytes in the backward of 1 x 2,048 tokens, 32 heads of 128.
    shape = (1, 32, 2048, 128)
    found = follow(
        lambda *given: functional.scaled_dot_product_attention(*given, is_causal=True), *[shape] * 3, device=H200
    )
    assert found.backward - found.kept == pytest.approx(84_148_736, abs=512)


def test_flash_pads_heads_to_multiples_of_eight() -> None:
    plain, padded = (follow(attend, *[(1, 2, 64, head_dim)] * 3).kept for head_dim in (104, 100))
    # Its inputs are copies then, and so is what is kept of its output.
    assert padded - plain == 3 * 64 * 2 * 104 * 2


def test_each_call_keeps_an_additive_mask_of_its_own() -> None:
    def masked(*inputs: Tensor) -> Tensor:
        return attend(*inputs, attn_mask=torch.ones(2, 1, length, length, dtype=torch.bool))

    kept = {}
    for length in (64, 60):
        kept[length] = follow(masked, *[(2, 4, length, 64)] * 3).kept
        kept[length] -= 2 * 4 * 64 * 4 + 16
    # Rows of 60 elements are padded to 64 first.
    assert kept == {64: 2 * 64 * 64 * 2, 60: 2 * 60 * 64 * 2}


def test_the_efficient_kernel_adds_up_gradients_and_wide_outputs_in_float32() -> None:
    def masked(*inputs: Tensor) -> Tensor:
        return attend(*inputs, attn_mask=torch.zeros(64, 64, dtype=BF16))

    followed = follow(masked, *[(2, 4, 64, 64)] * 3)
    assert followed.backward - followed.kept == 3 * 2 * 4 * 64 * 64 * 2 + 2 * 4 * 64 * (64 + 1) * 4


def test_attention_runs_in_the_lower_precision_under_autocast() -> None:
    followed = follow(attend, *[(1, 2, 64, 64)] * 3, dtype=FP32, autocast=BF16)
    assert followed.dtype is BF16
    assert followed.kept == 3 * 2 * 64 * 64 * 2 + 2 * 64 * 4 + 24


# --- Flash attention of other packages. ---


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn3"])
def test_flash_attention_keeps_as_much_as_sdpa_without_a_mask(name: str) -> None:
    assert attention_to_build(name) == "sdpa"
    assert kept_by_model(llama(), name) == kept_by_model(llama(), "sdpa")


def test_sdpa_keeps_masks_and_repeated_keys_where_rows_are_padded() -> None:
    without, padded = (kept_by_model(llama(), "sdpa", padded=padded) for padded in (False, True))
    layers, batch, heads, length, head_dim = 2, 2, 4, 64, 16
    additive = batch * length * length * 2
    repeated = 2 * batch * heads * length * head_dim * 2 - 2 * batch * 2 * length * head_dim * 2
    # Their generator's state takes 8 bytes less.
    assert padded - without == layers * (additive + repeated - 8)


def test_flash_attention_keeps_its_own_output_beside_the_padded_one_where_rows_are_padded() -> None:
    without, padded = (kept_by_model(llama(), "flash_attention_2", padded=padded) for padded in (False, True))
    layers, batch, heads, length, head_dim = 2, 2, 4, 64, 16
    positions = batch * length * 8
    assert padded - without == layers * (batch * heads * length * head_dim * 2 + positions)


def test_flash_attention_needs_no_mask_for_sliding_windows() -> None:
    config = Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        vocab_size=32,
        sliding_window=16,
    )
    sdpa, flash = (kept_by_model(config, name) for name in ("sdpa", "flash_attention_2"))
    assert sdpa - flash == 2 * (2 * 64 * 64 * 2 - 8)


def test_other_attention_is_built_as_it_is() -> None:
    assert [attention_to_build(name) for name in ("eager", "sdpa", None)] == ["eager", "sdpa", None]
    copied = fake_copy(on_meta(llama(), "eager"))
    twin = copied.model
    restore_attention(twin, "eager")
    assert twin.config._attn_implementation == "eager"


def test_transformers_knows_the_stand_in_while_a_step_is_simulated_and_no_longer() -> None:
    before = list(ALL_ATTENTION_FUNCTIONS)
    with Tracker() as tracker, emulate_cuda(Step(), A100, tracker):
        assert set(ALL_ATTENTION_FUNCTIONS) - set(before) == {"hf_ckpt_flash"}
        with emulate_cuda(Step(), CPU, tracker):
            # A step is followed, and a larger one is planned for in the middle of it.
            assert "hf_ckpt_flash" in ALL_ATTENTION_FUNCTIONS
        assert "hf_ckpt_flash" in ALL_ATTENTION_FUNCTIONS
    assert list(ALL_ATTENTION_FUNCTIONS) == before


# --- Dropout, norms, autocast. ---


@pytest.mark.parametrize(("device", "mask_bytes"), [(A100, 1), (CPU, 2)], ids=["cuda", "cpu"])
def test_dropout_keeps_a_byte_per_element_on_cuda(device: Device, mask_bytes: int) -> None:
    assert follow(nn.Dropout(0.1), (4, 64), device=device).kept == 4 * 64 * mask_bytes


def test_dropout_under_its_other_names_keeps_a_byte_per_element_too() -> None:
    assert follow(lambda inputs: torch.dropout(inputs, p=0.1, train=True), (4, 64)).kept == 4 * 64
    assert follow(lambda inputs: functional.dropout(inputs, 0.1), (4, 64)).kept == 4 * 64


def test_no_dropout_keeps_nothing() -> None:
    for dropout in (nn.Dropout(0.1).eval(), nn.Dropout(0.0)):
        assert follow(lambda inputs, dropout=dropout: dropout(inputs + 1), (4, 64)).kept == 0


@pytest.mark.parametrize("softmax", [functional.softmax, torch.softmax, Tensor.softmax])
def test_softmax_of_float16_into_float32_is_one_kernel_on_cuda(softmax: Callable[..., Tensor]) -> None:
    def widened(inputs: Tensor) -> Tensor:
        return softmax(inputs, dim=-1, dtype=FP32)

    # In backward CUDA makes the gradient in float16; everything else makes one in float32, and then a copy.
    of_half, of_bfloat16 = (follow(widened, (4, 512), dtype=dtype) for dtype in (FP16, BF16))
    assert (of_half.backward, of_bfloat16.backward) == (4 * 512 * 2, 4 * 512 * (4 + 2))
    assert of_half.dtype is FP32


def test_a_root_mean_square_norm_keeps_a_number_a_row_on_cuda() -> None:
    def norm(inputs: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(inputs, (64,), weight)

    on_cuda, on_cpu = (follow(norm, (4, 64), (64,), device=device).kept for device in (A100, CPU))
    assert (on_cuda, on_cpu) == (4 * 4, 2 * (4 * 64 * 4) + 4 * 4)


@pytest.mark.parametrize(
    "function",
    [
        lambda inputs: functional.layer_norm(inputs, (64,)),
        lambda inputs: functional.rms_norm(inputs, (64,)),
        lambda inputs: inputs.softmax(-1),
        lambda inputs: torch.softmax(inputs, -1),
        lambda inputs: nn.Softmax(-1)(inputs),
        lambda inputs: inputs.sum(-1),
        lambda inputs: inputs**2,
        lambda inputs: inputs.pow(2),
        lambda inputs: 2**inputs,
        lambda inputs: torch.rsqrt(inputs),
        lambda inputs: inputs.cumsum(-1),
        lambda inputs: torch.linalg.vector_norm(inputs),
        lambda inputs: functional.softplus(inputs),
        lambda inputs: functional.cross_entropy(inputs, torch.zeros(4, dtype=torch.long)),
    ],
)
def test_operators_of_cudas_list_run_in_float32_under_autocast(function: Callable[[Tensor], Tensor]) -> None:
    assert follow(function, (4, 64), autocast=BF16).dtype is FP32
    assert follow(function, (4, 64)).dtype is BF16


@pytest.mark.parametrize(
    "function",
    [
        lambda inputs: inputs.softmax(-1, dtype=BF16),
        lambda inputs: torch.softmax(inputs, -1, BF16),
        lambda inputs: inputs * 2,
        functional.gelu,
        functional.silu,
    ],
)
def test_other_operators_and_those_asked_for_a_dtype_keep_it(function: Callable[[Tensor], Tensor]) -> None:
    assert follow(function, (4, 64), autocast=BF16).dtype is BF16


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_makes_logarithms_in_16_bits_and_a_copy_in_float32_under_autocast(smoothing: float) -> None:
    def loss(logits: Tensor) -> Tensor:
        return functional.cross_entropy(logits, torch.zeros(64, dtype=torch.long), label_smoothing=smoothing)

    kept = follow(loss, (64, 512), autocast=BF16).kept
    assert 64 * 512 * (2 + 4) <= kept < 64 * 512 * (2 + 4) + 64 * 4 * 4


def test_a_norm_of_a_16_bit_model_keeps_a_copy_in_float32_under_autocast() -> None:
    followed = follow(lambda inputs: functional.layer_norm(inputs, (64,)), (4, 64), autocast=BF16)
    assert followed.kept == 4 * 64 * 4 + 2 * (4 * 4)


def test_products_stay_in_the_lower_precision_under_autocast() -> None:
    followed = follow(functional.linear, (4, 64), (8, 64), dtype=FP32, autocast=BF16)
    assert (followed.dtype, followed.kept) == (BF16, (4 + 8) * 64 * 2)


def test_scores_are_kept_where_no_kernel_suits() -> None:
    turing = next(device for device in DEVICES.values() if device.capability == TURING)
    kept = follow(attend, *[(1, 2, 64, 64)] * 3, device=turing).kept
    assert kept >= 2 * 64 * 64 * 4


def test_putting_images_into_a_text_takes_indices_of_all_its_numbers() -> None:
    def put(text: Tensor, images: Tensor) -> Tensor:
        mask = torch.zeros(2, 64, 1, dtype=torch.bool)
        return text.masked_scatter(mask, images)

    found = {device.name: follow(put, (2, 64, 32), (10, 32), device=device) for device in (A100, CPU)}
    assert found[A100.name].kept == found[CPU.name].kept
    # Of each selected number three indices, and a mask as large as the text.
    workspace = 10 * 32 * 3 * 8 + 2 * 64 * 32
    assert found[A100.name].backward - found[CPU.name].backward == workspace


# --- The workspaces that torch gives cuBLAS: one for each thread that runs matrix products. ---

A100_80GB, H100 = find_device("a100-80gb"), find_device("h100")
MIB = 2**20
SMALL, LARGE = 8 * MIB + 128 * 1024, 32 * MIB
STEP = Step(batch_size=1, seq_length=16)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    built: nn.Module = exactness.build("llama").model
    return built


def workspaces(memory: StepMemory) -> int:
    return memory.by_category.get(Category.WORKSPACES, 0)


def products(*phases: Phase, operator: str = "aten.mm.default") -> Tape:
    return Tape(events=[Event(Place(phase, operator=operator)) for phase in phases])


@pytest.mark.parametrize(
    ("phases", "num_threads"),
    [
        ((), 0),
        ((Phase.FORWARD, Phase.FORWARD), 1),
        ((Phase.FORWARD, Phase.OPTIMIZER), 1),
        ((Phase.OPTIMIZER,), 1),
        ((Phase.BACKWARD, Phase.RECOMPUTATION), 1),
        ((Phase.FORWARD, Phase.RECOMPUTATION), 2),
        ((Phase.FORWARD, Phase.BACKWARD), 2),
    ],
)
def test_each_thread_that_runs_products_has_one(phases: tuple[Phase, ...], num_threads: int) -> None:
    tape = products(*phases)
    add_workspaces(tape, A100_80GB)
    assert [storage.num_bytes for storage in tape.before] == [SMALL] * num_threads


@pytest.mark.parametrize(
    ("operator", "has_one"),
    [
        ("aten.addmm.default", True),
        ("aten.addmm_.default", True),
        ("aten.bmm.out", True),
        ("aten._int_mm.default", True),
        ("aten.mul.Tensor", False),
        ("aten._scaled_dot_product_flash_attention.default", False),
        ("aten._grouped_mm.default", False),
        ("bitsandbytes.mm.default", False),
        ("", False),
    ],
)
def test_products_of_cublas_alone_need_one(operator: str, has_one: bool) -> None:
    tape = products(Phase.FORWARD, operator=operator)
    add_workspaces(tape, A100_80GB)
    assert len(tape.before) == has_one


def test_a_step_has_two_all_the_time(model: nn.Module) -> None:
    for device, each in ((A100_80GB, SMALL), (H100, LARGE)):
        memory = simulate_step(model, None, STEP, device)
        column = memory.timeline.bytes_by_category[Category.WORKSPACES]
        assert set(column) == {2 * each}
        assert workspaces(memory) == 2 * each == 2 * workspace_bytes(device)
        assert sum(memory.by_category.values()) == memory.peak_bytes
    assert Category.WORKSPACES not in simulate_step(model, None, STEP, CPU).timeline.bytes_by_category


@pytest.mark.parametrize("policy", ["full", "selective", "ffn"])
def test_plans_have_the_same_two_also_where_equal_layers_are_traced_once(model: nn.Module, policy: str) -> None:
    for traces_all in (False, True):
        assert workspaces(simulate_step(model, policy, STEP, A100_80GB, traces_all=traces_all)) == 2 * SMALL


def test_a_batch_of_evaluation_has_those_of_the_steps_around_it(model: nn.Module) -> None:
    assert workspaces(StepSimulator(model, STEP, A100_80GB).evaluate().memory) == 2 * SMALL


@pytest.mark.sweep
def test_the_planner_counts_them_once(model: nn.Module) -> None:
    full = simulate_step(model, "full", STEP, A100_80GB)
    # They are in the least that there is, and so in what the planner compares with a budget.
    least = StepPlanner(StepSimulator(model, STEP, A100_80GB), allowed=Allowed(exact=True)).plan_for(
        Capacity(full.peak_bytes)
    )
    assert workspaces(least.memory) == 2 * SMALL
    assert least.memory.peak_bytes <= full.peak_bytes
    with pytest.raises(hf_ckpt.BudgetError):
        StepPlanner(StepSimulator(model, STEP, A100_80GB), allowed=Allowed(exact=True)).plan_for(
            Capacity(least.memory.peak_bytes - 2 * SMALL)
        )
