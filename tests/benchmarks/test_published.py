"""Published measurements: the points are whole, some are predicted anew, and the page shows the result."""

from __future__ import annotations

import csv
import json
import re
import weakref
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext
from transformers import (
    AutoModelForCausalLM,
    GPTBigCodeConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)
from transformers.integrations import sdpa_attention

from benchmarks.published import page, torchtitan
from benchmarks.published.emulations import CHANGES, EMULATIONS, ENGINE_CHANGES, OPTIMIZERS
from benchmarks.published.measure import module_record, predicted_step, step_record
from benchmarks.published.models import MODELS, build
from benchmarks.published.modules import MODULES
from benchmarks.published.points import (
    ENGINES,
    Source,
    StepPoint,
    is_fitted_time,
    is_held_out,
    module_points,
    sources,
    step_points,
)
from benchmarks.published.summary import (
    add_reserved_ratios,
    answers,
    group_of,
    has_run,
    summaries,
    time_ratio,
    time_summaries,
)
from hf_ckpt.simulation.cuda import autocast
from hf_ckpt.simulation.fsdp_tape import FsdpTape
from hf_ckpt.simulation.step_memory import Category
from hf_ckpt.upstream.transformers import CACHE

RESULT = json.loads(page.RESULT.read_text(encoding="utf-8"))
STEPS, KERNELS = {point.name: point for point in step_points()}, {point.name: point for point in module_points()}


def test_every_point_is_whole_and_named_once() -> None:
    assert len(STEPS) == len(list(step_points()))
    assert len(KERNELS) == len(list(module_points()))
    for step in STEPS.values():
        assert step.source in sources()
        assert step.model in MODELS
        assert set(step.emulations) <= EMULATIONS.keys() | CHANGES.keys()
        # What ran has a speed, what ran out of memory has no figure but nvidia-smi's.
        figures = step.allocated_bytes, step.reserved_bytes
        assert (step.tokens_per_second is not None) >= any(figure is not None for figure in figures)
        assert any(figure is not None for figure in (*figures, step.smi_mib, step.tokens_per_second))
    assert {kernel.kernel for kernel in KERNELS.values()} == MODULES.keys()


def test_sources_are_linked_used_and_whole() -> None:
    named = [point.source for point in (*STEPS.values(), *KERNELS.values())]
    for name, source in sources().items():
        assert name in named
        assert source.link("file").startswith(f"https://github.com/{source.repository.split('/', 3)[-1]}/blob/")
        assert all((source.hardware, source.versions, source.measured, source.configuration))
        assert source.engine in ENGINES
        assert set(source.changes) <= CHANGES.keys() | ENGINE_CHANGES.keys()
        assert source.vocab_sizes.keys() <= MODELS.keys()
    assert len({source.repository for source in sources().values()}) >= 5


def test_sources_and_rows_are_held_out() -> None:
    whole = {name for name, source in sources().items() if source.is_held_out}
    torchao = {"torchao_bf16", "torchao_bf16_second", "torchao_bf16_full"}
    assert whole == {"transformers_bert", "fms_liger", "torchtitan"} | torchao
    assert all(is_held_out(point.name) for point in STEPS.values() if point.source in whole)
    assert is_held_out("fms:a100_80gb:2")
    assert not is_held_out("fms:a100_80gb:35")


def test_result_holds_every_point_and_what_they_say_together() -> None:
    records = RESULT["points"]
    assert [record["name"] for record in records] == [*STEPS, *KERNELS]
    assert RESULT["context_bytes"] == add_reserved_ratios(records)
    assert RESULT["summary"] == list(summaries(records))
    assert RESULT["times"] == list(time_summaries(records))
    assert RESULT["answers"] == answers(records)


def test_every_point_that_is_wrong_by_more_than_a_hundredth_has_a_reason() -> None:
    wrong = {record["name"] for record in RESULT["points"] if record["ratio"] and abs(record["ratio"] - 1) > 0.01}
    wrong |= {record["name"] for record in RESULT["points"] if abs(record.get("reserved_ratio", 1) - 1) > 0.05}
    explained = {name for entry in page.reasons() if entry.get("of") != "time" for name in entry["points"]}
    assert wrong <= explained <= {record["name"] for record in RESULT["points"]}


def test_every_time_that_is_wrong_by_more_than_a_tenth_has_a_reason() -> None:
    ratios = {record["name"]: record.get("time_ratio") for record in RESULT["points"]}
    wrong = {name for name, ratio in ratios.items() if ratio is not None and abs(ratio - 1) > 0.1}
    assert wrong == {name for entry in page.reasons() if entry.get("of") == "time" for name in entry["points"]}


def test_times_are_fitted_to_half_of_the_points_and_never_to_sources_that_are_held_out() -> None:
    timed = [point for point in STEPS.values() if point.tokens_per_second is not None]
    fitted = [point for point in timed if is_fitted_time(point.name)]
    assert 0.3 < len(fitted) / len(timed) < 0.5
    assert not any(sources()[point.source].is_held_out for point in fitted)
    constants = ("rank_link", "idle_seconds", "host_factor")
    changed = {
        name
        for name, source in sources().items()
        if any(getattr(source, field) != getattr(Source, field) for field in constants)
    }
    assert changed <= {point.source for point in fitted}


def test_times_are_summed_up_by_card_and_half() -> None:
    records = [
        {"card": card, "is_fitted_time": is_fitted, "time_ratio": ratio}
        for card, is_fitted, ratio in (("A", True, 1.0), ("A", False, 1.25), ("A", False, 0.5), ("B", False, 0.8))
    ]
    found = {
        (times["card"], times["is_fitted"]): times for times in time_summaries([*records, {"time_ratio": None}, {}])
    }
    assert found.keys() == {("A", True), ("A", False), ("B", False), ("all", False)}
    assert found["A", True]["mean_error"] == 0.0
    assert found["A", False]["mean_error"] == pytest.approx((0.25 + 0.5) / 2)
    assert found["A", False]["mean_difference"] == pytest.approx((0.25 - 0.5) / 2)
    assert found["all", False]["num_too_short"] == 2
    assert time_ratio({"published_tokens_per_second": 10.0, "predicted_tokens_per_second": 8.0}) == 1.25
    assert time_ratio({"published_tokens_per_second": None, "predicted_tokens_per_second": 8.0}) is None


def test_page_tables_and_picture_show_the_result() -> None:
    assert page.DOCUMENT.read_text(encoding="utf-8") == page.render(RESULT)
    for name, text in page.tables(RESULT).items():
        assert (page.DOCUMENT.parent / "data" / name).read_text(encoding="utf-8") == text
    picture = page.DOCUMENT.parent / "images" / page.PICTURE
    assert page.digest_in(picture) == page.digest_of(page.picture_data(RESULT))


def test_page_begins_with_the_finding_and_stays_short() -> None:
    text = page.render(RESULT)
    first = text.partition("# Accuracy\n\n")[2].partition("\n\n")[0]
    assert first.startswith("Predicted peak memory is right within 0.91 %")
    assert len(re.findall(r"[A-Za-z][\w'-]*", re.sub(r"<!--.*?-->|\]\([^)]*\)", "", text))) <= 1200
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.split(" | ")]
    assert max(len(re.sub(r"\]\([^)]*\)", "]", cell)) for cell in cells) < 120


def test_every_source_has_a_row_with_versions_and_hardware() -> None:
    rows = list(csv.DictReader(page.tables(RESULT)[page.SOURCES].splitlines()))
    assert [row["source"] for row in rows] == [source.title for source in sources().values()]
    assert all(row["hardware"] and row["versions"] and row["configuration"] for row in rows)


def test_what_has_another_figure_than_the_peak_allocated_ran_and_says_which() -> None:
    unknown = RESULT["points"][0] | {"published_bytes": None, "ratio": None, "published_reserved_bytes": None}
    reserved = unknown | {"published_reserved_bytes": 3 * 2**29}
    failed = unknown | {"published_tokens_per_second": None}
    assert [has_run(record) for record in (unknown, reserved, failed)] == [True, True, False]
    tables = [page.tables({"points": [record]})[page.POINTS] for record in (unknown, reserved, failed)]
    rows = [next(csv.DictReader(text.splitlines())) for text in tables]
    # Nothing is said to be allocated; what the device showed stands behind the prediction.
    assert [row["published_allocated_bytes"] for row in rows] == ["", "", ""]
    assert {row["predicted_allocated_bytes"] for row in rows} == {str(unknown["predicted_bytes"])}
    assert rows[0]["published_nvidia_smi_bytes"] == str(unknown["published_smi_mib"] * 2**20)
    assert [row["published_reserved_bytes"] for row in rows] == ["", str(3 * 2**29), ""]
    assert [row["published"] for row in rows] == ["ran", "ran", "out of memory"]
    found = {summary["what"]: summary for summary in summaries([unknown | {"ratio": 1.0}, unknown])}
    assert (found["ratio"]["num_points"], found["reserved_ratio"]["num_points"]) == (1, 2)


def test_steps_are_grouped_by_engine_and_ranks() -> None:
    names = {
        "fms:a100_80gb:35": "a step on two GPUs, FSDP1",
        "deepspeed_chat_sft:opt-1.3b-globalBatchSize128.log:1661": "a step on 16 GPUs, ZeRO-2",
        "deepspeed_zero3:README.md:37": "a step on four GPUs, ZeRO-3",
        "transformers_bert:perf_train_gpu_one.mdx:173": "a step on one GPU",
    }
    for name, group in names.items():
        assert group_of({"ranks": STEPS[name].ranks, "source": STEPS[name].source}) == group


# --- Models and emulations, small. ---


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "bert": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99},
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99},
        "opt": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99, "ffn_dim": 96},
        "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 99},
        "llama": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    }
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for name, fields in MODELS.items():
        monkeypatch.setitem(MODELS, name, fields | sizes.get(fields["model_type"], {}) | ends)


# One row of each way in which steps of the sources that came last differ.
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "name",
    [
        "deepspeed_chat_sft:opt-1.3b-globalBatchSize128.log:1661",
        "deepspeed_chat_reward:opt-350m_globalBatchSize-64.log:1833",
        "deepspeed_zero3_bf16:README.md:38",
        "fsdp_qlora:benchmarks_03_2024.md:45",
        "transformers_bert:perf_train_gpu_one.mdx:304",
        "transformers_bert:perf_train_gpu_one.mdx:475",
        "fms_liger:a100_80gb_liger:10",
        "fms_liger:a100_80gb_liger:66",
        "fms_liger:a100_80gb_liger:70",
        "torchtitan:llama3_h100_202412_torchtitan.md:27",
        "torchao_bf16_second:README.md:53",
        "mpt_h100:README.md:118",
        "mpt_h100_full:README.md:117",
    ],
)
def test_small_step_of_each_kind_can_be_predicted(name: str) -> None:
    memory, reserved_bytes, held, _ = predicted_step(replace(STEPS[name], tokens=16))
    assert 0 < memory.peak_bytes < reserved_bytes
    assert held is None


def tiny_opt(attention: str) -> OPTForCausalLM:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=99,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return OPTForCausalLM._from_config(config, attn_implementation=attention)


def test_attention_of_old_opt_computes_the_same() -> None:
    inputs = {"input_ids": torch.arange(1, 17).view(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    new, old = tiny_opt("eager"), tiny_opt("eager")
    EMULATIONS["opt_attention_4_28"](old)
    assert type(old.model.decoder.layers[0].self_attn) is not type(new.model.decoder.layers[0].self_attn)
    torch.testing.assert_close(old(**inputs).logits, new(**inputs).logits)


@pytest.fixture
def tiny_santacoder() -> Any:
    config = GPTBigCodeConfig(
        vocab_size=99,
        n_positions=16,
        n_embd=64,
        n_layer=2,
        n_head=4,
        multi_query=True,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    # Older transformers cannot import its class without a warning: not before it is needed.
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def test_gpt_bigcode_returns_keys_and_values_of_checkpointed_layers(tiny_santacoder: Any) -> None:
    point, ids = STEPS["fms:a100_80gb:2"], torch.arange(16).view(2, 8)
    model = tiny_santacoder
    with CHANGES["reentrant_checkpointing"](model, point):
        plain = model(ids, labels=ids)
        plain.loss.backward()
        gradient = model.transformer.h[0].attn.c_attn.weight.grad.clone()
        model.zero_grad()
        with CHANGES["gpt_bigcode_cache"](model, point):
            cached = model(ids, labels=ids)
            cache = cached[CACHE]
            # Keys and values have 16 numbers each. What is held is the output of `c_attn`, queries too.
            assert [tuple(each.shape) for each in cache] == [(2, 8, 2 * 16)] * 2
            assert [each.untyped_storage().nbytes() for each in cache] == [2 * 8 * (64 + 2 * 16) * 4] * 2
            cached.loss.backward()
    assert torch.equal(model.transformer.h[0].attn.c_attn.weight.grad, gradient)


def test_old_granite_scales_its_logits_in_the_dtype_of_the_model_and_returns_them_in_float32() -> None:
    config = GraniteConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        logits_scaling=8.0,
        pad_token_id=0,
    )
    model = GraniteForCausalLM._from_config(config, dtype=torch.bfloat16)
    ids = torch.arange(16).view(2, 8)
    new = model(ids).logits
    EMULATIONS["granite_4_45"](model)
    old = model(ids, labels=ids)
    assert (new.dtype, old.logits.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(old.logits, new.float())
    expected = torch.nn.functional.cross_entropy(old.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(old.loss, expected)


@pytest.mark.usefixtures("small")
def test_llama_keeps_rotary_tables_and_adapters_in_the_dtype_of_the_model() -> None:
    model = build(STEPS["fsdp_qlora:benchmarks_03_2024.md:45"])
    tables = [buffer for name, buffer in model.named_buffers() if name.endswith(("cos_cached", "sin_cached"))]
    assert [(table.shape, table.dtype) for table in tables] == [((4096, 16), torch.bfloat16)] * 4
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_fused_kernels_keep_no_second_tensor_of_logits_and_give_norms_no_gradient() -> None:
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for names in (("fast_norms", "loss_4_45", "fast_loss"), ("fast_norms", "fused_linear_loss")):
        model = LlamaForCausalLM(config)
        for name in names:
            EMULATIONS[name](model)
        kept: list[torch.Tensor] = []
        with CHANGES["fast_rotary"](model, STEPS["fms_liger:a100_80gb_liger:2"]):
            with saved_tensors_hooks(partial(_append, kept), lambda each: each):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        # Of the shifted copy, where there are logits at all.
        shapes = [tuple(tensor.shape) for tensor in kept if tensor.shape in ((14, 99), (16, 99))]
        assert shapes == [(14, 99)] * ("fast_loss" in names)
        without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        assert without == {name for name, _ in model.named_parameters() if "norm" in name}


def _append(kept: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    kept.append(tensor)
    return tensor


@pytest.mark.parametrize("name", ["loss_4_45", "loss_4_46", "loss_gpt_bigcode", "fast_loss"])
def test_old_torch_slices_logits_twice(name: str) -> None:
    config = LlamaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    EMULATIONS[name](model)
    token_ids = torch.zeros(2, 8, dtype=torch.int64)
    node = model(input_ids=token_ids, labels=token_ids)["loss"].grad_fn
    while node.name() != "SliceBackward0":
        node = node.next_functions[0][0]
    # One leaves the last token out, the other nothing.
    assert node.next_functions[0][0].name() == "SliceBackward0"


def test_torchtitan_saves_attention_and_every_second_product_of_each_layer() -> None:
    mm = torch.ops.aten.mm.default
    policy = torchtitan._contexts()[0].policy_fn
    forward, again = SelectiveCheckpointContext(is_recompute=False), SelectiveCheckpointContext(is_recompute=True)
    kept = [policy(forward, mm) is CheckpointPolicy.MUST_SAVE for _ in range(4)]
    assert kept == [policy(again, mm) is CheckpointPolicy.MUST_SAVE for _ in range(4)] == [True, False, True, False]
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert policy(forward, flash) is CheckpointPolicy.MUST_SAVE
    assert policy(forward, torch.ops.aten.mul.Tensor) is CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.usefixtures("small")
def test_torchtitan_keeps_keys_and_values_of_each_head() -> None:
    config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=8)
    config.num_key_value_heads = 2
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    point = STEPS["torchtitan:llama3_h100_202412_torchtitan.md:27"]
    shapes: list[tuple[int, ...]] = []

    def keep(tensor: Any) -> Any:
        shapes.append(tuple(tensor.shape))
        return tensor

    for names, num_heads in (((), 2), (("torchtitan_heads",), 8)):
        shapes.clear()
        with ExitStack() as entered:
            for name in names:
                entered.enter_context(CHANGES[name](model, point))
            entered.enter_context(saved_tensors_hooks(keep, lambda kept: kept))
            model(input_ids=torch.zeros(3, 16, dtype=torch.int64))
        # Keys and values; queries have all heads, as the output has.
        assert shapes.count((3, num_heads, 16, 8)) == (2 if num_heads == 2 else 4)
    with CHANGES["torchtitan_heads"](model, point):
        # It would hold the keys that it is called with.
        assert not isinstance(sdpa_attention.use_gqa_in_sdpa, mock.Mock)


@pytest.mark.sweep
def test_torchtitan_sends_gradients_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    point = replace(STEPS["torchtitan:llama3_h100_202412_torchtitan.md:27"], tokens=16)
    wide = predicted_step(point)[0].timeline.bytes_by_category[Category.GATHERED]
    monkeypatch.setattr(torchtitan, "sent_in_float32", FsdpTape._sent_bytes)
    narrow = predicted_step(point)[0].timeline.bytes_by_category[Category.GATHERED]
    assert sum(wide) > sum(narrow)


def test_optimizers_hold_what_they_stand_for() -> None:
    weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.float16))
    weight.grad = torch.zeros_like(weight)
    held = {}
    for name, kind in OPTIMIZERS.items():
        optimizer: Any = kind([{"params": [weight]}])
        optimizer.step()
        held[name] = sum(value.nbytes for value in optimizer.state[weight].values()) // weight.numel()
    assert held == {"fp16_optimizer": 12, "adamw_hf": 4, "decoupled_adamw": 4}


# NumParams of the table, whose positions depend on the length of rows.
@pytest.mark.parametrize(
    ("name", "num_weights"), [("mpt_h100:README.md:118", 6_658_859_008), ("mpt_h100:README.md:133", 1_328_533_504)]
)
def test_mpt_has_as_many_weights_as_published(name: str, num_weights: int) -> None:
    assert sum(parameter.numel() for parameter in build(STEPS[name]).parameters()) == num_weights


@pytest.mark.usefixtures("small")
def test_micro_batches_that_are_reduced_each_take_as_long_as_one_alone() -> None:
    once = replace(STEPS["mpt_h100:README.md:118"], tokens=16)
    often = replace(once, step={"gradient_accumulation_steps": 3})
    slow, fast = (step_record(point)["predicted_tokens_per_second"] for point in (once, often))
    time = predicted_step(once).memory.time
    # Only the optimizer comes less often.
    assert fast / slow == pytest.approx(3 * time.total / (3 * time.total - 2 * time.optimizer))
    assert fast > slow


def test_outputs_and_old_gradients_are_kept() -> None:
    point: StepPoint = STEPS["deepspeed_chat_sft:opt-1.3b-globalBatchSize128.log:1661"]
    model = torch.nn.Linear(8, 32, bias=False)
    kept: list[Any] = []
    with CHANGES["kept_outputs"](model, point), CHANGES["gradients_zeroed_in_place"](model, point):
        kept.append(weakref.ref(model(torch.ones(1, 8))))
        assert kept[0]() is not None
        assert model.weight.grad is not None
    assert kept[0]() is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("is_mixed", [False, True])
def test_old_softmax_keeps_what_it_read_in_the_dtype_of_its_result(is_mixed: bool) -> None:
    point: StepPoint = STEPS["transformers_bert:perf_train_gpu_one.mdx:173"]
    scores = torch.randn(2, 3, 5, dtype=torch.bfloat16 if is_mixed else torch.float32, requires_grad=True)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=is_mixed),
        autocast.found_by_libraries(),
        saved_tensors_hooks(keep, lambda tensor: tensor),
        CHANGES["softmax_keeps_input"](torch.nn.Identity(), point),
    ):
        found = functional.softmax(scores, dim=-1)
    assert [(tensor.shape, tensor.dtype) for tensor in saved] == 2 * [(scores.shape, torch.float32)]
    expected = functional.softmax(scores.float(), dim=-1)
    assert torch.equal(found, expected)
    gradient = torch.randn_like(found)
    assert torch.equal(*(torch.autograd.grad(each, scores, gradient)[0] for each in (found, expected)))


@pytest.mark.parametrize("name", ["liger_modules:326", "liger_modules:1383", "liger_modules:1664"])
def test_module_is_predicted_to_the_byte(name: str) -> None:
    record = module_record(KERNELS[name])
    assert record["predicted_bytes"] == record["published_bytes"]


# LoRA under FSDP1: the only one with each of what its versions did differently.
@pytest.mark.slow
@pytest.mark.sweep
def test_step_is_predicted_as_in_the_result() -> None:
    record = step_record(STEPS["fms:a100_80gb:35"])
    committed = next(each for each in RESULT["points"] if each["name"] == record["name"])
    assert record["predicted_bytes"] == committed["predicted_bytes"]
    assert record["ratio"] == pytest.approx(1, abs=5e-4)


def test_picture_is_drawn(tmp_path: Path) -> None:
    page.draw(page.picture_data(RESULT), tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
