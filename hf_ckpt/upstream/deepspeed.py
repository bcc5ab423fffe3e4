"""Private and version-dependent names of DeepSpeed (0.19). It is read off its objects, and not imported here."""

from __future__ import annotations

ITS_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"
"""The module whose `is_configured()` says whether layers recompute themselves through DeepSpeed."""
PARTITIONED, WHOLE_SHAPE, WHOLE_NUMEL = "ds_id", "ds_shape", "ds_numel"
"""Of a parameter that ZeRO-3 has emptied: its number, its shape and its number of elements. Modules have the first."""
ON_MODULES = ("ds_", "applied_pre_backward", "_original_parameters")
"""How attributes begin that it counts in on modules, or holds their parameters by."""
KEEPS_FROZEN_WEIGHTS = "0.19.3"
"""The first version in which ZeRO-3 lets the frozen weights that a recomputation gathers stand until they are used.

Before, it emptied them when the module's forward ended, with torch's checkpoint still holding them (DeepSpeed #8148,
trl #2514). torch raises then; a checkpoint that did not compare shapes would go on with empty weights.
"""
