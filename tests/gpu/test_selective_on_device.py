"""Selective recomputation with each attention kernel of a device, bit by bit; the same code runs small on the CPU."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_ckpt
from benchmarks.repeatable import repeatable_kernels
from tests import exactness, zoo
from tests.gpu.test_exact_on_device import on_device
from tests.zoo_tables import HEADS, KV_HEADS

# In the order in which triton looks. What it compiles are modules of Python, whose headers a bare machine may not have.
COMPILER = os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
HEADER = Path(sysconfig.get_path("include"), "Python.h")
needs_triton = pytest.mark.skipif(
    not (COMPILER and HEADER.is_file()), reason=f"triton needs a C compiler (found: {COMPILER}) and {HEADER}"
)
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
ON_CUDA = [pytest.param(kernel, "cuda", marks=pytest.mark.gpu) for kernel in KERNELS]
ON_CPU = [(kernel, "cpu") for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)]


def has_kernel(case: zoo.Case) -> bool:
    """Whether one of the kernels that are allowed takes what a model asks of it."""
    try:
        with torch.no_grad():
            zoo.loss(case.model, case.inputs)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize("mode", ["selective", "selective_attention"])
@pytest.mark.parametrize(("kernel", "device"), [*ON_CPU, *ON_CUDA])
def test_every_attention_output_is_exact(kernel: SDPBackend, device: str, mode: str) -> None:
    is_cudnn = kernel is SDPBackend.CUDNN_ATTENTION
    # Dropout inside of a kernel draws on CUDA; the CPU's has none, and adapters draw behind it on both.
    dropout = 0.1 if device == "cuda" and not is_cudnn else 0.0
    # Memory-efficient attention knows no groups of heads.
    num_key_value_heads = HEADS if kernel is SDPBackend.EFFICIENT_ATTENTION else KV_HEADS
    built = on_device("llama", "cpu", dropout=dropout, num_key_value_heads=num_key_value_heads)
    case = exactness.lora(built, lora_dropout=0.2)
    case.model.to(device, torch.bfloat16)
    for name, value in case.inputs.items():
        case.inputs[name] = value.to(device)
    # Without padding there is no mask, which flash attention does not take.
    case.inputs.pop("attention_mask")
    # cuDNN's is not to be had where every operator must repeat itself; the others repeat themselves only there.
    with repeatable_kernels(warn_only=is_cudnn), sdpa_kernel(kernel):
        if is_cudnn and not has_kernel(case):
            pytest.skip("this cuDNN has no kernel for these sizes")
        expected = exactness.step(case)
        is_repeatable = exactness.differences(expected, exactness.step(case)) == []
        if is_cudnn and not is_repeatable:
            pytest.skip("this kernel does not repeat itself here")
        assert is_repeatable, "the step itself is not repeatable"
        with hf_ckpt.apply(case.model, mode):
            assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.gpu
@needs_triton
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_exact() -> None:
    case = on_device("llama", "cuda", attn_implementation="flex_attention", dropout=0.0)
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "selective"):
        assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.gpu
@needs_triton
def test_the_rotary_embedding_of_liger_which_writes_unseen_is_exact() -> None:
    liger = pytest.importorskip("liger_kernel.transformers")
    case = on_device("llama", "cuda", dropout=0.0, attn_implementation="eager")
    liger.apply_liger_kernel_to_llama(
        rope=True, swiglu=True, rms_norm=True, fused_linear_cross_entropy=False, model=case.model
    )
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "selective"):
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
