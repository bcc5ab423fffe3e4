"""Private and version-dependent names of bitsandbytes (0.50)."""

from __future__ import annotations

from hf_ckpt.upstream import Feature

_OPTIMIZERS = Feature(
    "Simulating the optimizers of bitsandbytes",
    seen="bitsandbytes 0.50",
    instead="Use another optimizer, such as optim=adamw_torch_fused, or a fixed policy.",
    of="bitsandbytes.optim.optimizer bitsandbytes.optim.ademamix",
)
HAS_WARNED_OF_CPU = _OPTIMIZERS.attribute("_cpu_paged_warned")
"""Whether a paged optimizer has warned of parameters on the CPU."""
STATE_BUFFERS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("get_state_buffer", ()),
    (_OPTIMIZERS.attribute("_get_state_double_buffer"), (2,)),
)
"""The methods of an optimizer that make state, with the leading dimensions: AdEMAMix makes two tensors in one."""

_PRODUCTS = Feature(
    "Letting go of the inputs that 8-bit layers keep where a layer is recomputed",
    seen="bitsandbytes 0.50",
    instead="Recomputed layers hold the inputs of their 8-bit layers besides.",
    of="bitsandbytes.autograd._functions",
)
HELD_INPUTS: dict[str, tuple[str, tuple[None, ...] | None]] = {
    f"{_PRODUCTS.attribute('MatMul8bitFp')}Backward": ("A", None),
    f"{_PRODUCTS.attribute('MatMul8bitLt')}Backward": ("tensors", (None, None, None)),
}
"""By the node of a product with 8-bit weights, on a CPU and on CUDA: where it keeps its input, for the gradient of the
weight, and what stands for none."""
