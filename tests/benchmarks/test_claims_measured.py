"""What docs/claims.md is measured with: small experiments come out as their shapes say, and their results are whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.claims import behaviours, formulas, measure, overhead, parts, predicted, small, switches
from benchmarks.claims.following import Followed
from benchmarks.claims.measure import EXPERIMENTS, run_experiments
from benchmarks.claims.small import HEADS, HIDDEN, Chain, batch, follow_chain, follow_llama, llama, policy
from hf_ckpt.simulation.step_memory import Phase

TOKENS = 32
FFN = HIDDEN * 11008 // 4096
UNIT = 2 * TOKENS
"""Operations of one product with one weight."""
ATTENTION, GATED = 4 * HIDDEN**2, 3 * HIDDEN * FFN
"""Weights of a layer's attention and of its ffn."""
SCORES = 2 * HIDDEN * TOKENS
"""Scores and their product with the values, in the same unit."""
HEAD = 64 * HIDDEN


@pytest.fixture(scope="module")
def decoder() -> Any:
    return llama(layers=2, attention="eager")


def followed(model: Any, mode: str, **options: Any) -> Followed:
    return follow_llama(model, batch(1, TOKENS), policy(mode, **options))


# --- Operations. ---


def test_forward_has_the_products_of_its_weights_and_of_attention(decoder: Any) -> None:
    none = followed(decoder, "none")
    forward = UNIT * (2 * (ATTENTION + GATED + SCORES) + HEAD)
    assert none.num_flops == {"forward": forward, "backward": 2 * forward, "recomputation": 0}


@pytest.mark.parametrize(
    ("mode", "per_layer"),
    [
        # Each stops before its last product, whose result nothing needs.
        ("full", ATTENTION + GATED + SCORES - HIDDEN * FFN),
        ("attention", ATTENTION + SCORES - HIDDEN**2),
        ("ffn", GATED - HIDDEN * FFN),
    ],
)
def test_a_mode_recomputes_its_products_but_the_last_one(decoder: Any, mode: str, per_layer: int) -> None:
    assert followed(decoder, mode).num_flops["recomputation"] == UNIT * 2 * per_layer


def test_without_early_stop_the_last_product_runs_again_too(decoder: Any) -> None:
    found = follow_llama(decoder, batch(1, TOKENS), overhead.without_early_stop)
    assert found.num_flops["recomputation"] == UNIT * 2 * (ATTENTION + GATED + SCORES)


def test_scores_alone_are_recomputed(decoder: Any) -> None:
    found = follow_llama(decoder, batch(1, TOKENS), parts.scores_recomputed)
    # The product with the values is the last one.
    assert found.num_flops["recomputation"] == UNIT * 2 * SCORES // 2


def test_every_n_means_three_things() -> None:
    policies = overhead.every_n_policies(8)
    assert policies["checkpoint_every_nth"][4] == ("full", {"every_n_layers": 4})
    assert policies["segments_of_n"][4] == ("full", {"segment_size": 4})
    assert policies["keep_every_nth"][4] == ([{"layers": [1, 2, 3, 5, 6, 7], "mode": "full"}], {})


# --- Bytes. ---


def test_full_holds_the_input_of_each_layer(decoder: Any) -> None:
    found = followed(decoder, "full")
    # The second one's input is made in the first layer, the last norm's in the second.
    assert found.held_by_layer == {0: 4 * TOKENS * HIDDEN, 1: 4 * TOKENS * HIDDEN}


def test_eager_attention_holds_its_scores_once(decoder: Any) -> None:
    """In float32 the softmax returns what is held; in 16 bits it returns float32, and a copy is held too."""
    fused = llama(layers=2)
    more = followed(decoder, "none").held_by_layer[1] - followed(fused, "none").held_by_layer[1]
    # Less the log-sum-exp of each row, which the fused kernel holds in its place.
    assert more == 4 * HEADS * TOKENS * TOKENS - 4 * HEADS * TOKENS


def test_norms_recomputed_hold_their_input_only(decoder: Any) -> None:
    none = followed(decoder, "none")
    with parts.modules_recomputed(decoder, ("input_layernorm", "post_attention_layernorm")):
        alone = follow_llama(decoder, batch(1, TOKENS))
    assert none.held_by_module["input_layernorm"] == 2 * 4 * TOKENS * (2 * HIDDEN + 1)
    assert none.held_bytes - alone.held_bytes == 2 * 2 * 4 * TOKENS * (HIDDEN + 1)
    assert alone.total_flops == none.total_flops
    assert "forward" not in vars(decoder.model.layers[0].input_layernorm)


# --- Chains. ---


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
def test_a_chain_in_segments_holds_their_inputs_and_runs_one_again(k: int) -> None:
    found = follow_chain(Chain(16, segment=k))
    # The first segment's input is there before; the loss is a number.
    assert found["held_units"] == pytest.approx(16 / k - 1, abs=1e-3)
    # Beside the inputs: the layers of a segment, the gradient that comes in and the one that goes out.
    assert found["peak_units"] == pytest.approx(16 / k - 1 + k + (1 if k == 16 else 2), abs=1.001)
    assert found["forwards_per_layer"] == 2


def test_nesting_runs_all_but_the_last_layer_of_a_segment_once_more() -> None:
    found = follow_chain(Chain(16, 3, segment=4, nested=True))
    assert found["forwards_per_layer"] == 2 + 3 / 4


def test_segments_do_not_help_where_layers_hold_much() -> None:
    peaks = {k: follow_chain(Chain(16, 24, segment=k))["peak_units"] for k in (1, 4)}
    assert peaks[1] < peaks[4]


# --- Formulas. ---


def test_formulas_of_the_literature() -> None:
    assert formulas.activations_by_formula(8, 2048, is_fused=True) == 34 * 2048 * 8 * 4096 * 32
    assert formulas.activations_by_formula(8, 2048, is_fused=False) == (34 + 80) * 2048 * 8 * 4096 * 32
    assert formulas.attention_scores()["one_tensor_gib"] == 8
    cache = formulas.kv_cache_70b()
    assert (cache["grouped_gib"], cache["cache_over_formula"]) == (20, 1)


# --- What happens. ---


def test_recomputation_updates_a_batch_norm_twice() -> None:
    found = behaviours.batch_norm()
    assert found["none"]["num_batches_tracked"] == 1
    for way in ("non_reentrant", "reentrant"):
        assert found[way] == {"num_batches_tracked": 2, "running_mean_ratio": 1.9, "is_gradient_equal": True}


def test_one_way_to_shard_and_checkpoint_gathers_once_more_for_each_layer() -> None:
    found = behaviours.fsdp_all_gathers()
    extra = {
        (engine, way): found[engine][way]["extra_per_layer"] for engine in ("fsdp1", "fsdp2") for way in found[engine]
    }
    assert {key for key, more in extra.items() if more >= 1} == {("fsdp1", "wrapper_around_the_shard_reentrant")}
    assert all(extra["fsdp2", way] == 0 for way in found["fsdp2"])


def test_transformers_takes_auto_for_true_and_every_n_layers_for_what_it_says() -> None:
    found = {name: switches.outcome_of(name) for name in ("auto", "enable_every_n_layers", "enable_modules")}
    assert found["auto"]["outcome"] == "all layers"
    assert found["enable_every_n_layers"]["layers_recomputed"] == [0, 2]
    assert found["enable_modules"]["outcome"] == "refused"
    assert "unexpected keyword argument 'modules'" in found["enable_modules"]["message"]


# --- The results. ---


@pytest.mark.parametrize("module", [measure, predicted])
def test_committed_results_have_each_claim_with_its_case(module: Any) -> None:
    if not module.RESULT.exists():
        pytest.skip(f"{module.RESULT.name} is not there yet: python -m {module.__name__}")
    result = json.loads(module.RESULT.read_text())
    names = [experiment.__name__ for experiment in module.EXPERIMENTS]
    assert list(result) == ["environment", "is_predicted", *names]
    assert all(result[name]["case"] for name in names)


def test_committed_figures_are_those_of_today() -> None:
    if not measure.RESULT.exists():
        pytest.skip("nothing is committed yet")
    committed = json.loads(measure.RESULT.read_text())
    cheap = [experiment for experiment in EXPERIMENTS if experiment.__module__ == formulas.__name__]
    found = run_experiments([*cheap, behaviours.batch_norm, behaviours.fsdp_all_gathers], say=lambda text: None)
    assert {name: committed[name] for name in found} == found


def test_names_of_claims_are_the_same_in_both_results() -> None:
    measured, simulated = (
        {each.__name__ for each in experiments} for experiments in (EXPERIMENTS, predicted.EXPERIMENTS)
    )
    assert simulated - measured == {"cpu_offload", "lora_7b_on_24_gb", "lora_13b", "longer_batch"}
    assert len(measured | simulated) == 24


def test_predicted_rows_tell_shares_of_none() -> None:
    subject = predicted.SUBJECTS["llama2_7b_full"]
    case = replace(subject, config={**subject.config, "num_hidden_layers": 2}, tokens=256)
    none, full = (predicted.simulated(case, predicted.A100, mode) for mode in ("none", "full"))
    row = predicted.row(full, none)
    assert row["held_saved"] == 1 - predicted.held(full) / predicted.held(none)
    # Each layer's input and the rotary tables in 16 bits, and the ids of the embedding's backward.
    assert predicted.held(full) == 2 * 2 * 256 * 4096 + 2 * 2 * 256 * 128 + 8 * 256
    # All products of two layers but `down_proj`.
    again = 2 * 2 * 256 * (4 * 4096**2 + 2 * 4096 * 11008 + 2 * 4096 * 256)
    assert full.num_flops[Phase.RECOMPUTATION] == again
    assert row["flops_added"] == pytest.approx(again / sum(none.num_flops.values()))


def test_small_models_keep_the_shares_of_the_7b_model() -> None:
    assert small.HIDDEN * small.SCALE == 4096
    assert FFN * small.SCALE == 11008
