"""Private and version-dependent names of peft: what its layers and its model hold (0.18 to 0.21)."""

from __future__ import annotations

from hf_ckpt.upstream import Feature

_ADAPTERS = Feature(
    "Seeing that adapters are changed between a forward and its recomputation, and simulating them",
    seen="peft 0.18 to 0.21",
    instead="Change adapters between steps only, and use a fixed policy.",
    of="peft.tuners.tuners_utils peft.peft_model",
)
ACTIVE_ADAPTER = _ADAPTERS.attribute("_active_adapter")
"""Of an adapted layer: which adapters count."""
DISABLE_ADAPTERS = _ADAPTERS.attribute("_disable_adapters")
"""Of an adapted layer: whether no adapter counts."""
MODEL_CONFIGS = _ADAPTERS.attribute("_peft_config")
"""The configs of prompt learning, on PEFT's model itself; `PeftModel.peft_config` is a property over both places."""
CASTS_INPUT = _ADAPTERS.attribute("_cast_input_dtype")
"""The method of an adapted layer that casts its input to the dtype of the adapter's weights."""
ACTIVATED_BY = "alora_invocation_tokens"
"""Of LoRA's config, where an adapter acts behind these tokens alone (aLoRA): each forward of the model places hooks on
all layers whose `gradient_checkpointing` is set, which only a backward takes off."""
ACTIVATED_VARIANT = "ALoraLinearVariant"
"""The class of such an adapter in the `lora_variant` of a layer."""
CONSTANT = frozenset(
    "r lora_alpha lora_bias lora_variant use_dora use_rslora kwargs _caches fan_in_fan_out is_target_conv_1d_layer "
    "ephemeral_gpu_offload cast_input_dtype_enabled".split()
)
"""Attributes of an adapted layer that stay as they are. One that is not named here costs some time."""
CONSTANT_IN_RUN = CONSTANT | {"merged_adapters", "device_map", "tied_adapter", ACTIVE_ADAPTER, DISABLE_ADAPTERS}
"""The same, of those that no forward changes."""
UNMATCHED = (
    r"target_(modules|parameters)=.* were set but no",
    r"The following (rank|alpha)_pattern keys did not match",
)
"""How PEFT's warnings begin that names match nothing. It gives the second one, wrongly, of patterns that it adds itself
for experts: it looks for them among modules, and they match parameters."""
