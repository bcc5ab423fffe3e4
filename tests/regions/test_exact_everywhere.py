"""Every architecture of transformers that can be built: policies are exact on it, or refused with the reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import hf_ckpt
from hf_ckpt import HFCkptError
from tests import exactness, zoo

# Building some architectures warns.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ARCHITECTURES = [
    (task, model_type)
    for task, names in (
        ("causal", zoo.CAUSAL()),
        ("seq2seq", zoo.SEQ2SEQ()),
        ("masked", zoo.ENCODERS()),
        ("image-text", zoo.VISION_LANGUAGE()),
    )
    for model_type in names
]

# What the refused policies are, and a fragment of the reason. "mixed" asks for the attention of a stack's last layer.
REVERSIBLE = "computes its own backward"
SCATTERED = "No decoder layers were found"
CACHE = "was handed a key/value cache"
NO_FFN = "no ffn was found"
NO_ATTENTION = "no attention was found"
TWO_MODES = "two modes"
ONE_LAYER = "segments of"
ALL = tuple(exactness.POLICIES)
# A whole layer, each of its parts, and a segment: what all others are made of. Where one is refused all are tried.
SOME = ("full", "attention", "ffn", "nested")
# In three layers it has two segments.
POLICIES = exactness.POLICIES | {"nested": ("full", {"segment_size": 2, "nested": True})}
RECOMPUTING = tuple(policy for policy in ALL if policy != "none")
USING_ATTENTION = tuple(policy for policy in RECOMPUTING if policy != "ffn")
REFUSED = {
    "falcon_mamba": {"ffn": NO_FFN},
    "mamba": {"ffn": NO_FFN},
    "mamba2": {"ffn": NO_FFN},
    "nemotron_h": {"mixed": NO_ATTENTION},
    "fnet": {"attention": NO_ATTENTION, "ffn": NO_FFN, "mixed": NO_ATTENTION},
    "albert": {"mixed": TWO_MODES, "segments_2": ONE_LAYER, "nested": ONE_LAYER},
    "florence2": {"mixed": TWO_MODES},
    "vibevoice_asr": {"mixed": TWO_MODES},
    "reformer": dict.fromkeys(RECOMPUTING, REVERSIBLE),
    "xlm": dict.fromkeys(ALL, SCATTERED),
    "flaubert": dict.fromkeys(ALL, SCATTERED),
    "diffusion_gemma": dict.fromkeys(USING_ATTENTION, CACHE),
    "pi0": dict.fromkeys(USING_ATTENTION, CACHE),
}
# Models with a kind of layer that comes with the fourth one, or that cannot have three.
OF_FOUR_LAYERS = {
    *("big_bird", "bigbird_pegasus", "blip", "deepseek_v3", "flint", "gemma3n_text", "gemma4", "gemma4_text"),
    *("gemma4_unified", "gemma4_unified_text", "kimi_k25", "lfm2_moe", "llama4", "llama4_text", "minicpm3", "minimax"),
    *("mistral_large4", "muse_spark", "nemotron_h", "nemotron_h_omni", "neomme", "nllb-moe", "qianfan_ocr"),
    *("smollm3", "zamba", "zamba2"),
}
# Reformer hashes with random numbers that it does not take from the seed.
NOT_REPEATABLE = {"reformer"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # Some configs of transformers tell of their own deprecated names, which are not ours to mend.
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(("task", "model_type"), ARCHITECTURES, ids=lambda name: name)
@pytest.mark.sweep(keep=12)
def test_policies_are_exact_or_refused(task: str, model_type: str) -> None:
    torch.manual_seed(0)
    try:
        case = zoo.build(model_type, task=task, num_layers=4 if model_type in OF_FOUR_LAYERS else 3)
    except zoo.CannotBuild as reason:
        pytest.skip(str(reason))
    refused = REFUSED.get(model_type, {})
    expected = exactness.step(case)
    faults = {}
    for policy in ALL if refused else SOME:
        fault = _fault(case, policy, expected, refused.get(policy), model_type in NOT_REPEATABLE)
        if fault:
            faults[policy] = fault
    assert faults == {}


def _fault(case: zoo.Case, policy: str, expected: exactness.Result, reason: str | None, is_random: bool) -> str | None:
    mode, options = POLICIES[policy]
    try:
        with hf_ckpt.apply(case.model, mode, **options):
            different = exactness.differences(expected, exactness.step(case))
    except HFCkptError as error:
        return None if reason is not None and reason in str(error) else str(error)
    if reason is not None:
        return f"was not refused ({reason})"
    return f"differs: {different[:3]}" if different and not is_random else None
