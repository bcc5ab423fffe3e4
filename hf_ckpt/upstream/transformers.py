"""Private and version-dependent names of transformers. Blocks: the seam of layers, models and configs, the Trainer."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_ckpt.upstream import Feature, stand_ins

if not TYPE_CHECKING:
    __getattr__ = stand_ins(__name__)

_feature = partial(Feature, seen="transformers 5.0 to 5.24")

# --- The seam: a layer hands its forward to a checkpoint function. ---

FLAG = "gradient_checkpointing"
FUNCTION = "_gradient_checkpointing_func"
OTHER_FLAGS = ("grad_checkpointing", "use_gradient_checkpointing", "use_checkpoint", "with_cp")
"""What modules that have no such seam call theirs: timm and open_clip, DiffSynth, Swin and MONAI, mmcv. diffusers has
transformers' flag, on the modules around its layers."""
FORWARD = "forward"

with _feature(
    "Plans through the seam of transformers' layers",
    instead="Layers get a forward on the instance in its place, to the same result.",
) as SEAM:
    from transformers.modeling_layers import GradientCheckpointingLayer

    class _ProbeLayer(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
        """Gets the wrapper that every layer class gets when it is made."""

        def forward(self) -> None:
            """Never called."""

    # Until 5.17 `__call__` is wrapped, in the base class, and hooks lie inside; in 5.23 `forward`, of each class.
    SEAM_METHOD = "__call__" if "__call__" in vars(GradientCheckpointingLayer) else FORWARD
    SEAM_CODE = getattr(_ProbeLayer, SEAM_METHOD).__code__
    if FUNCTION not in SEAM_CODE.co_names:
        raise AttributeError(name=FUNCTION, obj=GradientCheckpointingLayer)

if SEAM.gone:

    class GradientCheckpointingLayer:  # type: ignore[no-redef]
        """No layer has the seam."""


_INPUT_GRADIENTS = _feature(
    "Taking off what others leave on a model when they switch checkpointing off and on",
    instead="Hooks on its embeddings may stay after the plan.",
    of="transformers.modeling_utils",
)
INPUT_GRADIENTS = tuple(map(_INPUT_GRADIENTS.attribute, ("_require_grads_hooks", "_require_grads_hook")))
"""Where a model keeps the hooks that `enable_input_require_grads` has placed."""


def asks_for_input_gradients(hook: Any) -> bool:
    """Whether a forward hook is one that `enable_input_require_grads` places."""
    return getattr(hook, "__name__", None) == "make_inputs_require_grads"


CACHE = "cache" if "cache" in inspect.signature(BaseModelOutputWithPast).parameters else "past_key_values"
"""What calls and outputs of transformers name a cache: "cache" from 5.24 on, where the older name still works, with a
warning."""
READS_CACHE_ONLY = "_can_checkpoint_with_cache"
"""Attribute of layer classes, from 5.17 on, that read a cache that others filled, and leave it as it is. Set on a layer
it has the seam take out no argument by its name, whatever is in there."""
CACHE_ARGUMENTS = frozenset({"past_key_values", "past_key_value", "layer_past", "cache_params", "cache"})
"""What layers and their parts call their cache, from 5.0 to 5.24."""
OTHER_CACHES = frozenset(
    {
        "FalconHybridMambaAttentionDynamicCache",
        "FalconMambaCache",
        "HybridMambaAttentionDynamicCache",
        "Lfm2HybridConvCache",
        "Lfm2MoeHybridConvCache",
        "Mamba2Cache",
        "MambaCache",
        "NemotronHHybridDynamicCache",
        "OlmoHybridDynamicCache",
        "Qwen3NextDynamicCache",
        "Qwen3_5DynamicCache",
        "Qwen3_5MoeDynamicCache",
        "ReformerDynamicCache",
        "Zamba2HybridDynamicCache",
        "ZambaHybridDynamicCache",
        "xLSTMCache",
    }
)
"""Caches and recurrent states that are no subclass of `Cache`: those of hybrids until 5.4 (OLMo's until 5.10), of
Reformer and xLSTM in 5.24 still."""
CHECKPOINTING_ARGUMENTS = ("activation_checkpointing", "gradient_checkpointing")
"""The field of TrainingArguments: 5.2x has the new name, earlier versions the old one only."""

# --- Models and configs. ---

_MODELS = _feature(
    "Knowing what of a model is for loading, saving and generation alone",
    instead="Saved files are not looked at (check_saved_files: off), and steps of trl's GRPO and RLOO not simulated.",
    of="transformers.modeling_utils transformers.initialization transformers.generation.utils",
)
IS_INITIALIZED = _MODELS.attribute("_is_hf_initialized")
"""The mark of loading on modules and weights."""
IGNORED_ON_SAVE = _MODELS.attribute("_keys_to_ignore_on_save")
"""Attribute of a model class: what is not saved."""
PIPELINE_STAGE = "_pp_stage"
"""The mark of modules that `DistributedConfig(pp_size=...)` has shared among processes (5.23)."""
_OF_MODEL = "_tp_plan _ep_plan _pp_plan _fsdp_plan _keep_in_fp32_modules _keep_in_fp32_modules_strict"
_OF_LOADING = "_no_split_modules _skip_keys_device_placement _keys_to_ignore_on_load_unexpected"
OF_MODELS = frozenset(f"{_OF_MODEL} {_OF_LOADING} _keys_to_ignore_on_load_missing {IGNORED_ON_SAVE}".split())
"""Attributes of models that are for loading and sharding (5.23)."""
ENDS_GENERATION = _MODELS.attribute("_get_stopping_criteria")
"""The method of a model that says when generation ends."""

_ATTENTION = _feature(
    "Telling which attention a model runs (packing, auto, estimate, plan)",
    instead='Set data.packing to false, and use a fixed policy, such as "full".',
    of="transformers.configuration_utils",
)

ATTENTION = _ATTENTION.attribute("_attn_implementation")
"""Of a config: the name of the attention that a model runs."""


@_ATTENTION
def attention_of(config: Any) -> str | None:
    """Return the name of the attention that a model runs, by its config."""
    name: str | None = config._attn_implementation
    return name


def experts_of(config: Any) -> str | None:
    """Return the name of what computes a mixture's experts; None before transformers told (5.0)."""
    return getattr(config, "_experts_implementation", None)


@_ATTENTION
def set_attention_unchecked(config: Any, name: str) -> None:
    """Have a model run another attention, with no look at whether it can here."""
    config._attn_implementation_internal = name


_MAPPINGS = _feature(
    "Saying what a model that reads images is trained with",
    instead="It is said that no causal language model can be made of its config.",
    of="transformers.models.auto.modeling_auto",
)


@_MAPPINGS
def classes_by_config(auto_class: Any) -> Any:
    """Return which model class an auto class makes of which config."""
    return auto_class._model_mapping


def missing_kernels(model: Any) -> list[str]:
    """Return the packages whose kernels a model would run and that are not installed: torch's own code runs instead.

    Since 5.2x each such function is wrapped with what was found; before, modules said `is_fast_path_available`.
    """
    found: dict[str, None] = {}
    for name in dict.fromkeys(type(module).__module__ for module in model.modules()):
        if not name.startswith("transformers."):
            continue
        known = vars(sys.modules[name])
        if known.get("is_fast_path_available") is False:
            found |= dict.fromkeys(each for each in _FAST_PATHS if any(key.startswith(each) for key in known))
        for function in known.values():
            free = getattr(getattr(function, "__code__", None), "co_freevars", ())
            if "is_new_implementation" in free and "package" in free:
                cells = dict(zip(free, function.__closure__, strict=True))
                if not cells["is_new_implementation"].cell_contents:
                    found[str(cells["package"].cell_contents)] = None
    return [_FAST_PATHS.get(package, package) for package in found]


_FAST_PATHS = {"causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}


def has_chunk_masks_by_document() -> bool:
    """Whether chunks of attention are counted from the start of a document, and not of a row (not in 5.0)."""
    return hasattr(importlib.import_module("transformers.masking_utils"), "remap_positions_for_packed_sequence")


# --- The Trainer. ---

LOSS_SHIFTS = "_loss_shifts_labels"
"""Attribute of a Trainer: whether its loss leaves out the first label of each row (from 5.2x on)."""

_SAVING = _feature('on_oom="escalate"', instead='Leave on_oom="escalate" out.', of="transformers.trainer")
BETWEEN_STEPS = _SAVING.attribute("_maybe_log_save_evaluate")
"""The Trainer's method for all that comes after a step."""


@_SAVING
def save_rng_state(trainer: Any) -> Any:
    """Return the Trainer's method that saves the states of generators into a folder."""
    return trainer._save_rng_state


_FOLDERS = _feature(
    "Checkpoints of the trials of a search",
    instead="They are looked for in output_dir itself.",
    of="transformers.trainer",
)
OUTPUT_FOLDER = _FOLDERS.attribute("_get_output_dir")
"""The Trainer's method that gives the folder of a trial."""
SAVE_MODEL = "save_model"
"""The Trainer's method for checkpoints (`_internal_call`) and for users."""

_ZERO3 = _feature(
    "Making a model on one process under ZeRO-3",
    instead="Use ZeRO-2, FSDP or DDP.",
    of="transformers.integrations.deepspeed",
)


@contextmanager
def on_one_process() -> Iterator[None]:
    """Let one process make a model by itself: under ZeRO-3 transformers would partition it, with all processes."""
    engine, found = _zero3()
    engine._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        engine._hf_deepspeed_config_weak_ref = found


@_ZERO3
def _zero3() -> tuple[Any, Any]:
    from transformers.integrations import deepspeed

    engine: Any = deepspeed
    return engine, engine._hf_deepspeed_config_weak_ref
