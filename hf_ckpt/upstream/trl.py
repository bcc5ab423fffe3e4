"""Private and version-dependent names of trl's trainers (1.16). trl is read off its objects, and not imported here."""

from __future__ import annotations

from functools import partial
from typing import Any

from hf_ckpt.upstream import Feature

_feature = partial(Feature, seen="trl 1.16")

_GENERATION = _feature(
    "Simulating the steps of trl's GRPO and RLOO (auto, estimate, plan)",
    instead='Use a fixed policy, such as "full".',
    of="trl.trainer.grpo_trainer",
)


@_GENERATION
def loss_of(kind: type[Any]) -> Any:
    """Return the method that computes the loss of a micro-batch."""
    return kind._compute_loss


LOSS = _GENERATION.attribute("_compute_loss")
"""The name of that method."""


@_GENERATION
def scores_tokens(trainer: Any) -> Any:
    """Return the method that gives the log-probabilities of the tokens of completions."""
    return trainer._get_per_token_logps_and_entropies


@_GENERATION
def tokenizes_prompts(trainer: Any) -> Any:
    """Return the method that tokenizes a list of prompts."""
    return trainer._tokenize_prompts


@_GENERATION
def is_of_images(trainer: Any) -> bool:
    """Whether a trainer trains a model that reads images."""
    return bool(trainer._is_vlm)


OWN_STEP = tuple(
    map(
        _GENERATION.attribute,
        ("_compute_loss", "_prepare_inputs", "_generate", "_generate_single_turn", "_generate_and_score_completions"),
    )
)
"""Methods of a trainer that make a step another one where somebody has replaced them."""
GENERATED = _GENERATION.attribute("_buffered_inputs")
"""What a trainer has generated before a step."""
_CONSTRUCTORS = _feature(
    "Simulating the losses of trl's trainers (estimate, plan)",
    instead="Use trainer: sft, or measure a step (hf-ckpt profile).",
    of="trl.trainer.dpo_trainer trl.trainer.base_trainer trl.trainer.utils",
)
WITHOUT_DATA = (_CONSTRUCTORS.attribute("_prepare_dataset"), _CONSTRUCTORS.attribute("_send_telemetry"))
"""Methods of a trainer's constructor that a simulation leaves out."""

# --- The fused head of SFT: an autograd function, and what it calls for a tile of logits. ---

_HEAD = _feature(
    "Simulating trl's fused head as it runs on CUDA",
    instead="Its operators on a CPU are simulated, which take more memory.",
    of="trl.trainer.utils trl.kernels.chunked_logprob",
)
FUSED_HEAD = _HEAD.attribute("_ChunkedLogProbFunction")
FORWARD_TILE, BACKWARD_TILE = _HEAD.attribute("_forward_tile"), _HEAD.attribute("_backward_tile")
ADD_PRODUCT = _HEAD.attribute("_addmm_fp32")
