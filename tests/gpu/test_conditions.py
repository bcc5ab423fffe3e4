"""The conditions that tests on a device run under, which no CPU can bring about."""

from __future__ import annotations

import os
import warnings

import pytest
import torch

_STRICT = "To explicitly enable determinism call torch.use_deterministic_algorithms(True, warn_only=False)."
OF_TORCH = (
    f"Flash Attention defaults to a non-deterministic algorithm. {_STRICT}",
    f"Memory Efficient attention defaults to a non-deterministic algorithm. {_STRICT}",
    f"cuDNN Attention defaults to a non-deterministic algorithm. {_STRICT}",
    "_histc_cuda does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True, "
    "warn_only=True)'. You can file an issue.",
    "The AccumulateGrad node's stream does not match the stream of the node that produced the incoming gradient.",
    "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context...",
)


@pytest.mark.parametrize("text", OF_TORCH)
def test_what_torch_warns_of_on_cuda_fails_no_test(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=1)


def test_other_warnings_are_errors() -> None:
    with pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", UserWarning, stacklevel=1)


def test_kernels_repeat_themselves() -> None:
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
