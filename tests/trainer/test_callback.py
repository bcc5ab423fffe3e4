"""HFCkptCallback in a Trainer: the same numbers, the plan in force, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import logging
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import prepare_model_for_kbit_training
from torch import nn
from transformers import TrainerCallback, TrainingArguments

import hf_ckpt
from hf_ckpt import HFCkptCallback, Plan, PlanMismatchError, PolicyError, UnsupportedError
from hf_ckpt.regions.offload.transfer import Wire
from hf_ckpt.trainer.metrics import describe_recomputed, recomputed_share
from tests.exactness import POLICIES
from tests.traces import differences, snapshot
from tests.training import PLAN_FILE, During, callback, changed, counted, llama, lora, losses, trainer, weights

pytestmark = pytest.mark.core

MODELS: dict[str, Callable[[], nn.Module]] = {"full fine-tune": llama, "lora": lora}
BUSY = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
# The new name came with transformers 5.2x; before it there is only the old one.
SWITCH = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if name in TrainingArguments.__annotations__
)


def switch(model: nn.Module, on: bool) -> None:
    """Toggle transformers' own activation checkpointing, as libraries do between two steps."""
    prefix = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{prefix}_checkpointing_{'enable' if on else 'disable'}")()


@functools.cache
def without_callback(
    kind: str, accumulation: int = 1, busy: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = MODELS[kind]()
    with tempfile.TemporaryDirectory() as folder:
        run = trainer(model, Path(folder), gradient_accumulation_steps=accumulation, **(BUSY if busy else {}))
        run.train()
    return losses(run), weights(model)


@pytest.mark.parametrize(
    ("kind", "accumulation", "policy"),
    [
        *(("full fine-tune", 1, policy) for policy in POLICIES),
        *(("lora", 4, policy) for policy in ("full", "ffn", "nested", "mixed")),
    ],
)
def test_losses_and_final_weights_are_those_without_the_callback(
    tmp_path: Path, policy: str, kind: str, accumulation: int
) -> None:
    expected_losses, expected_weights = without_callback(kind, accumulation, busy=True)
    model = MODELS[kind]()
    run = trainer(model, tmp_path, callback(policy), gradient_accumulation_steps=accumulation, **BUSY)
    run.train()
    assert len(expected_losses) == 4
    assert losses(run) == expected_losses
    assert changed(expected_weights, weights(model)) == []


@pytest.mark.parametrize("policy", ["full", "nested"])
def test_resumed_run_ends_like_one_without_interruption(tmp_path: Path, policy: str) -> None:
    whole = llama()
    run = trainer(whole, tmp_path / "whole", max_steps=4)
    run.train()
    trainer(llama(), tmp_path, callback(policy), max_steps=4, save_strategy="steps", save_steps=2).train()
    model = llama()
    resumed = trainer(model, tmp_path, callback(policy), max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(run)
    assert changed(weights(whole), weights(model)) == []


@pytest.mark.parametrize("kind", MODELS)
def test_nothing_is_left_on_the_model_after_training(tmp_path: Path, kind: str) -> None:
    plain, model = MODELS[kind](), MODELS[kind]()
    trainer(plain, tmp_path).train()
    names = [name for name, _ in model.named_modules()]
    trainer(model, tmp_path, callback("mixed")).train()
    assert [name for name, _ in model.named_modules()] == names
    left = {name: set(module.__dict__) for name, module in model.named_modules()}
    assert left == {name: set(module.__dict__) for name, module in plain.named_modules()}
    hooks = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    assert hooks == []
    pickle.dumps(model)


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
@pytest.mark.parametrize("kind", MODELS)
def test_model_can_be_pickled_and_copied_while_it_trains(tmp_path: Path, kind: str, event: str) -> None:
    copies: list[nn.Module] = []

    def take(model: nn.Module) -> None:
        copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])

    model = MODELS[kind]()
    trainer(model, tmp_path, callback("mixed"), During(event, take)).train()
    assert len(copies) == 4
    assert all(hf_ckpt.remove(taken) for taken in copies)
    assert all(taken.config.use_cache for taken in copies)
    assert [name for name, _ in copies[0].named_parameters()] == [name for name, _ in model.named_parameters()]


def test_report_has_the_figures_of_the_run(tmp_path: Path) -> None:
    used = callback("every_2")
    assert used.report() == {}
    trainer(llama(), tmp_path, used).train()
    report = used.report()
    assert report.pop("ckpt/tokens_per_sec") > 0
    memory = "ckpt/peak_allocated_gib" if torch.accelerator.is_available() else "ckpt/peak_resident_gib"
    assert report.pop(memory) > 0
    assert report == {"ckpt/num_layers_full": 2, "ckpt/num_layers_none": 2, "ckpt/recomputed_share": 0.5}
    assert used.plan is not None
    assert used.plan.summary().splitlines()[1:] == [
        "  0            full",
        "  1            none",
        "  2            full",
        "  3            none",
    ]


# A layer has 1,024 weights in its attention, 1,152 in its ffn, and 32 in its norms.
@pytest.mark.parametrize(
    ("policy", "share"),
    [("none", 0), ("full", 1), ("attention", 1024 / 2208), ("ffn", 1152 / 2208), ("segments_2", 1), ("nested", 2)],
)
def test_recomputed_share_is_that_of_the_weights(tmp_path: Path, policy: str, share: float) -> None:
    used = callback(policy)
    trainer(llama(), tmp_path, used, max_steps=1).train()
    assert used.report()["ckpt/recomputed_share"] == pytest.approx(share)
    assert "ckpt/tokens_per_sec" not in used.report()


@pytest.mark.parametrize(
    ("mode", "options", "share"),
    [
        ("selective", {}, 0),
        ("selective", {"save": ["aten.mm"]}, 0),
        ("selective", {"save": ["mlp", "mlp.gate_proj"]}, 1 - 1152 / 2208),
        ("selective_attention", {}, 1),
        # All linear layers and norms, in tiles.
        ("none", {"tiles": 2}, 1),
        ("full", {"tiles": 2}, 2),
    ],
)
def test_recomputed_share_of_finer_modes(mode: str, options: dict[str, Any], share: float) -> None:
    model = llama(attention_dropout=0.0)
    with hf_ckpt.apply(model, mode, **options) as applied:
        assert recomputed_share(applied.plan, applied.stacks) == pytest.approx(share)


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (0.75, "75% of the layers' weights run forward twice"),
        (1.0, "100% of the layers' weights run forward twice"),
        (1.5, "the layers' weights run forward 2.50 times on average"),
    ],
)
def test_more_runs_than_two_are_told_as_such(share: float, told: str) -> None:
    assert describe_recomputed(share) == told


OFFLOAD = {"to": "cpu", "min_bytes": 0}


@pytest.mark.parametrize("kind", MODELS)
def test_figures_of_offload_are_reported(tmp_path: Path, kind: str) -> None:
    used, model = HFCkptCallback("full", offload=OFFLOAD), MODELS[kind]()
    run = trainer(model, tmp_path, used, **BUSY)
    run.train()
    expected_losses, expected_weights = without_callback(kind, busy=True)
    assert losses(run) == expected_losses
    assert changed(expected_weights, weights(model)) == []
    report = used.report()
    # Inputs of 2 sequences of 8 tokens of 16 numbers, in two steps; the same buffers serve both. The last layer's
    # stays, and with adapters the first one's: the embeddings' output is asked for a gradient, and stays for that.
    num_bytes = (3 if kind == "full fine-tune" else 2) * 2 * 8 * 16 * 4
    assert report["ckpt/offloaded_gib"] * 2**30 == pytest.approx(2 * num_bytes)
    assert report["ckpt/host_peak_gib"] * 2**30 == pytest.approx(num_bytes)
    assert report["ckpt/offloaded_share"] == 1
    assert report["ckpt/offload_wait_s"] >= 0


def test_buffers_are_made_for_the_longest_text_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    found = Wire.allocate
    monkeypatch.setattr(Wire, "allocate", lambda wire, size: (made.append(size), found(wire, size))[1])
    used = HFCkptCallback("full", offload=OFFLOAD)
    run = trainer(llama(), tmp_path, used, max_steps=6, per_device_train_batch_size=1)
    run.train_dataset = [{"input_ids": [1] * length, "labels": [1] * length} for length in (4, 5, 6, 7, 8, 16)]
    run.train()
    # The first layer says what all of them need, of whichever text comes first; its own buffer alone is made anew.
    longest = 16 * 16 * 4
    first, *rest = made
    assert first < longest
    assert rest == [longest] * 3
    assert used.report()["ckpt/host_peak_gib"] * 2**30 == pytest.approx(3 * longest)


def test_offload_that_moves_nothing_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="offload was asked for 3 layers, but nothing was sent away"):
        trainer(llama(), tmp_path, HFCkptCallback("full", offload="cpu"), max_steps=1).train()


@pytest.mark.parametrize("is_disk", [False, True])
def test_crashed_run_leaves_no_buffers_files_and_hooks(tmp_path: Path, is_disk: bool) -> None:
    offload = {**OFFLOAD, **({"to": "disk", "path": str(tmp_path / "disk")} if is_disk else {})}
    (tmp_path / "disk").mkdir()
    used, model = HFCkptCallback("full", offload=offload), llama()
    run = trainer(model, tmp_path / "run", used)
    seen: list[Any] = []

    def crash(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        assert used._run is not None
        seen.extend(used._run.applied.offloaders)
        assert seen[0].stats.num_live > 0
        raise RuntimeError("crash")

    hook = model.lm_head.register_forward_hook(crash)
    with pytest.raises(RuntimeError, match="crash"):
        run.train()
    hook.remove()
    assert hf_ckpt.remove(model)
    del run
    gc.collect()
    assert seen[0].stats.num_live == 0
    assert seen[0].stats.host_bytes == 0
    assert list((tmp_path / "disk").rglob("*")) == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_tokens_per_second_leave_out_the_first_step_and_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("hf_ckpt.trainer.metrics.time.perf_counter", lambda: float(next(seconds)))
    used = callback("full")
    trainer(llama(), tmp_path, used, max_steps=3, gradient_accumulation_steps=2, **BUSY).train()
    # Two batches of two texts of eight tokens a step, which begins and ends a second later.
    assert used.report()["ckpt/tokens_per_sec"] == 32


# --- Others that switch activation checkpointing. ---


@pytest.mark.parametrize(("policy", "forwards"), [("none", [2, 2, 2, 2]), ("every_2", [4, 2, 4, 2])])
def test_plan_governs_beside_the_training_arguments_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str, forwards: list[int]
) -> None:
    model = llama()
    run = trainer(model, tmp_path, callback(policy), **{SWITCH: True})
    with counted(model, "q_proj") as counts, caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run.train()
    assert [counts[idx] for idx in range(4)] == forwards
    said = [record for record in caplog.records if "is overruled" in record.getMessage()]
    assert [record.getMessage() for record in said] == [
        "Gradient (activation) checkpointing of the training arguments is overruled: the policy of HFCkptCallback "
        "governs."
    ]
    # Python shows a warning where no logging is set up; `disable_tqdm`, which these runs have, does not silence it.
    assert (said[0].levelno, run.args.disable_tqdm) == (logging.WARNING, True)
    # What the Trainer had switched on is as the Trainer left it.
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.parametrize(
    ("flags", "said"), [(["grad_checkpointing"], ""), (["grad_checkpointing", "with_cp"], " and 1 more")]
)
def test_checkpointing_of_the_models_own_is_overruled_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: list[str], said: str
) -> None:
    model = llama()
    for flag in flags:
        setattr(model.model, flag, True)
    trainer(model, tmp_path, callback("every_2")).train()
    assert [text for text in caplog.messages if "overruled" in text] == [
        f"The model's own checkpointing (model.grad_checkpointing=True{said}) is overruled: the policy of "
        "HFCkptCallback governs."
    ]


def test_quiet_callback_leaves_what_is_overruled_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer(llama(), tmp_path, HFCkptCallback("full", quiet=True), **{SWITCH: True})
    with caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run.train()
    said = [record for record in caplog.records if "overruled" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO]
    assert [text for text in caplog.messages if text.startswith("Activation checkpointing is in force.")]


def test_plan_survives_a_library_that_switches_every_layer_off_and_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def toggle(model: nn.Module) -> None:
        switch(model, on=False)
        switch(model, on=True)

    model = llama()
    run = trainer(model, tmp_path, callback("every_2"), During("on_step_begin", toggle))
    with counted(model, "q_proj") as counts, caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run.train()
    assert [counts[idx] for idx in range(4)] == [4, 2, 4, 2]
    said = [message for message in caplog.messages if "switched to another activation checkpointing" in message]
    assert len(said) == 1
    assert "(torch.utils.checkpoint.checkpoint)" in said[0]
    assert losses(run) == without_callback("full fine-tune")[0]


@pytest.mark.parametrize("event", ["on_init_end", "on_train_begin", "on_step_begin", "on_substep_end"])
def test_plan_survives_preparation_for_kbit_training(tmp_path: Path, event: str) -> None:
    def prepare(model: nn.Module) -> None:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        # It freezes everything (its users add adapters afterwards) and asks for reentrant checkpointing.
        prepare_model_for_kbit_training(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)

    model = lora()
    run = trainer(model, tmp_path, callback("every_2"), During(event, prepare, step=0), gradient_accumulation_steps=2)
    with counted(model, "q_proj.base_layer") as counts:
        run.train()
    assert [counts[idx] for idx in range(4)] == [8, 4, 8, 4]


def test_second_train_applies_the_plan_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    run = trainer(model, tmp_path, callback("full"))
    run.train()
    with counted(model, "q_proj") as counts, caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run.train()
    assert [counts[idx] for idx in range(4)] == [4, 4, 4, 4]
    assert "interrupted" not in caplog.text
    assert not hf_ckpt.remove(model)
    assert model.config.use_cache is True


def test_second_train_with_the_callback_gives_the_losses_of_one_without(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [callback("segments_2")]):
        model = llama()
        run = trainer(model, tmp_path, *callbacks)
        run.train()
        run.train()
        found.append((losses(run), weights(model)))
    assert found[0][0] == found[1][0]
    assert changed(found[0][1], found[1][1]) == []


def replacement(*args: Any, **kwargs: Any) -> Any:
    """Stands for the forward of another library."""
    raise AssertionError("never called: the run stops first")


def test_replaced_forward_stops_the_run_and_names_who_replaced_it(tmp_path: Path) -> None:
    def replace(model: nn.Module) -> None:
        model.model.layers[2].mlp.forward = replacement

    model = llama()
    run = trainer(model, tmp_path, callback("ffn"), During("on_step_end", replace))
    with pytest.raises(
        PlanMismatchError,
        match=r"The forward of model\.layers\.2\.mlp was replaced by .*test_callback\.replacement after the policy was",
    ):
        run.train()
    assert not hf_ckpt.remove(model)
    assert model.config.use_cache is True
    assert model.model.layers[2].mlp.__dict__.pop("forward") is replacement
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_plan_removed_while_training_stops_the_run(tmp_path: Path) -> None:
    model = llama()
    run = trainer(model, tmp_path, callback("full"), During("on_step_end", hf_ckpt.remove, step=1))
    with pytest.raises(PlanMismatchError, match="no plan is in force: it was removed while training ran"):
        run.train()
    assert model.config.use_cache is True


def test_plan_removed_by_a_callback_at_the_end_is_no_failure(tmp_path: Path) -> None:
    used = callback("full")
    trainer(llama(), tmp_path, During("on_train_end", hf_ckpt.remove), used).train()
    assert used.report()["ckpt/num_layers_full"] == 4


def test_callback_added_while_training_stops_the_run(tmp_path: Path) -> None:
    run = trainer(llama(), tmp_path)
    run.add_callback(During("on_step_end", lambda model: run.add_callback(callback("full")), step=1))
    with pytest.raises(PlanMismatchError, match="this callback was added after training had begun"):
        run.train()


def test_callback_added_after_the_trainer_was_built_applies_the_plan(tmp_path: Path) -> None:
    model = llama()
    run = trainer(model, tmp_path)
    run.add_callback(callback("full"))
    with counted(model, "q_proj") as counts:
        run.train()
    assert [counts[idx] for idx in range(4)] == [4, 4, 4, 4]


def test_model_init_gets_the_plan_on_the_model_that_is_trained(tmp_path: Path) -> None:
    run = trainer(None, tmp_path, callback("full"), model_init=lambda: llama())
    built = run.model
    found: list[dict[str, Any]] = []
    run.add_callback(During("on_step_end", lambda model: found.append(model.model.layers[0].__dict__.copy())))
    run.train()
    assert run.model is not built
    assert [attributes["gradient_checkpointing"] for attributes in found] == [True, True]
    assert run.model.config.use_cache is True


def test_plan_of_one_run_is_a_policy_for_another(tmp_path: Path) -> None:
    first = callback("mixed")
    trainer(llama(), tmp_path, first).train()
    second = HFCkptCallback(Plan.from_json((tmp_path / PLAN_FILE).read_text()))
    trainer(llama(), tmp_path, second).train()
    assert first.plan == second.plan


def test_plan_put_on_by_hand_gives_way_to_the_callback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama()
    by_hand = hf_ckpt.apply(model, "full")
    with caplog.at_level(logging.INFO, logger="hf_ckpt"), counted(model, "q_proj") as counts:
        trainer(model, tmp_path, callback("none")).train()
    assert [counts[idx] for idx in range(4)] == [2, 2, 2, 2]
    assert caplog.messages[0].startswith("A plan was still on the model")
    by_hand.remove()


# torch looks at the attribute while it traces.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.sweep
def test_compiled_model_has_the_losses_of_one_without_the_callback(tmp_path: Path, backend: str) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": backend}
    # A whole layer, one without a plan, and a layer's attention.
    plain = trainer(llama(num_hidden_layers=3), tmp_path)
    plain.train()
    run = trainer(llama(num_hidden_layers=3), tmp_path, callback("mixed"), **compiled)
    run.train()
    # Graphs of the backward add up in another order.
    assert losses(run) == pytest.approx(losses(plain), rel=1e-6)


def test_best_model_is_loaded_under_the_plan(tmp_path: Path) -> None:
    best = {**BUSY, "save_steps": 1, "load_best_model_at_end": True}
    plain, model = lora(), lora()
    trainer(plain, tmp_path / "plain", **best).train()
    trainer(model, tmp_path / "planned", callback("mixed"), **best).train()
    assert changed(weights(plain), weights(model)) == []


# --- What is refused. ---


def test_unknown_on_mismatch_raises() -> None:
    with pytest.raises(PolicyError, match=r'on_mismatch is "ignore"\. Use "error" or "warn"'):
        HFCkptCallback("full", on_mismatch="ignore")  # type: ignore[arg-type]


def test_policy_that_cannot_be_read_raises_before_there_is_a_model() -> None:
    with pytest.raises(PolicyError, match=r'Unknown mode "ful".*Did you mean "full"\?'):
        HFCkptCallback("ful")


def test_policy_that_does_not_suit_the_model_leaves_it_as_it_was(tmp_path: Path) -> None:
    model = llama()
    before = snapshot(model)
    run = trainer(model, tmp_path, HFCkptCallback({"layers": "30:40", "mode": "full"}))
    with pytest.raises(PolicyError, match=r"reaches past the end: model\.layers of LlamaForCausalLM has 4"):
        run.train()
    # The Trainer's own mark.
    assert [trace for trace in differences(before, snapshot(model)) if trace != ": _is_accelerate_prepared"] == []
    assert not (tmp_path / PLAN_FILE).exists()


def test_several_gpus_in_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(UnsupportedError, match="accelerate launch --num_processes 2 <script>"):
        trainer(llama(), tmp_path, callback("full"))


def test_callback_is_a_trainer_callback() -> None:
    assert isinstance(callback("full"), TrainerCallback)


# --- Two callbacks. ---

TWO = (
    'Two HFCkptCallbacks are on this Trainer, with policies [{mode: "full"}] and [{mode: "ffn"}], but one plan governs '
    "a model. Pass one of them; different layers are different rules of one policy: "
)


def test_two_callbacks_are_refused_when_the_trainer_is_built(tmp_path: Path) -> None:
    model = llama()
    found = snapshot(model)
    with pytest.raises(PolicyError) as raised:
        trainer(model, tmp_path, HFCkptCallback("full"), HFCkptCallback("ffn"))
    assert str(raised.value).startswith(TWO)
    assert differences(found, snapshot(model)) == []


def test_callback_that_is_added_beside_another_is_refused_and_leaves_no_plan(tmp_path: Path) -> None:
    model = llama()
    run = trainer(model, tmp_path, HFCkptCallback("full"))
    run.add_callback(HFCkptCallback("ffn"))
    with pytest.raises(PolicyError) as raised:
        run.train()
    assert str(raised.value).startswith(TWO)
    assert hf_ckpt.patch.apply.plan_of(model) is None
    assert [name for module in model.modules() for name in vars(module) if name.startswith("_hf_ckpt")] == []
    assert model.config.use_cache is True


def test_callback_that_takes_the_place_of_another_governs(tmp_path: Path) -> None:
    run = trainer(llama(), tmp_path, HFCkptCallback("full"))
    run.train()
    run.pop_callback(HFCkptCallback)
    run.add_callback(second := HFCkptCallback("ffn"))
    run.train()
    assert second.plan is not None
    assert second.plan.summary() == "model.layers: 4 layers\n  0 to 3       ffn"


@pytest.mark.parametrize("name", ["strict_resume", "input_require_grads"])
def test_flags_that_are_text_are_refused(name: str) -> None:
    with pytest.raises(PolicyError, match=f'^{name} is "yes"\\. Use true or false\\.$'):
        HFCkptCallback("full", **{name: "yes"})
