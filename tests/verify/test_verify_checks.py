"""Each check of `verify`, on records that are right but for one thing: it fails with that thing and passes without."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraModel
from safetensors.torch import load_file, save_file

from hf_ckpt.recipe.recipe import load_recipe
from hf_ckpt.verify import compare, processes, run, saved_checks, state_checks
from hf_ckpt.verify.compare import Trials
from hf_ckpt.verify.record import Record, StateChange, UserHook
from hf_ckpt.verify.report import Check, Report
from hf_ckpt.verify.run import _Verification
from hf_ckpt.verify.state_checks import check_counts, check_in_force
from hf_ckpt.verify.trial import TrialInputs
from tests import small_recipes

pytestmark = pytest.mark.slow

LAYERS = "base_model.model.model.layers"
Change = Callable[[Record], object]


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialInputs, Trials, Record]:
    """A recipe with adapters, its three trials and a resumed one, as `verify` makes them."""
    folder = tmp_path_factory.mktemp("proven")
    recipe = load_recipe(small_recipes.write(folder, lora=small_recipes.LORA, checkpointing={"policy": "full"}))
    small = run.reduce_recipe(recipe, folder / "model", is_full=False)
    inputs = run._trial_inputs(small, folder, 2, None)
    runs = _Verification(inputs, folder, 2, lambda line: None, saves_model_only=False)
    reference, repeated = runs._run("without", ""), runs._run("repeated", "")
    planned = runs._run("planned", "", is_planned=True, save_at=1)
    resumed = runs._run("resumed", "", is_planned=True, resume_from=planned.saved / "checkpoint-1")
    return inputs, Trials(reference, repeated, planned), resumed


@pytest.fixture
def trials(proven: tuple[TrialInputs, Trials, Record], tmp_path: Path) -> Trials:
    """The three trials, the planned one with files of its own that a test may change."""
    found = proven[1]
    shutil.copytree(found.planned.folder, tmp_path / "planned")
    planned = replace(copy.deepcopy(found.planned), folder=tmp_path / "planned")
    return Trials(found.reference, found.repeated, planned)


def changed(trials: Trials, change: Change, record: str = "planned") -> Trials:
    """The same trials, one of them with something changed."""
    other = copy.deepcopy(getattr(trials, record))
    change(other)
    return replace(trials, **{record: other})


def change_gradient(record: Record) -> None:
    gradients = record.gradients(1)
    name = f"{LAYERS}.1.mlp.up_proj.lora_A.default.weight"
    # The smallest change that a float32 can have, in one of its numbers.
    gradients[name] = gradients[name].clone()
    gradients[name][0, 0] = torch.nextafter(gradients[name][0, 0], torch.tensor(torch.inf))
    record.keep_gradients(1, gradients)


def lose_gradient(record: Record) -> None:
    for step in (0, 1):
        record.keep_gradients(step, {**record.gradients(step), f"{LAYERS}.0.mlp.up_proj.lora_B.default.weight": None})


def first(values: dict[str, str]) -> None:
    values[next(iter(values))] = "another digest"


def stand_still(record: Record) -> None:
    record.tensors_after = dict(record.tensors_before)


def with_name(when: str) -> Change:
    return lambda record: record.names.__setitem__(when, (*record.names[when], "module a.new_one"))


def count_again(path: str, number: int) -> Change:
    return lambda record: record.recomputations.__setitem__(path, number)


def draw(record: Record) -> None:
    record.micro_batches[-1].random_state["torch"] = "another state"


def hook(change: object, runs_again: int = 0) -> UserHook:
    return UserHook("a.module", "forward hook", "a.function", change, runs_again)


def counts(trials: Trials) -> Check:
    return check_counts(trials.reference, trials.planned)


def in_force(trials: Trials) -> Check:
    return check_in_force(trials.planned)


def flags(trials: Trials) -> Check:
    return next(state_checks.check_state(trials.planned))


def autocast(trials: Trials) -> Check:
    return list(state_checks.check_state(trials.planned))[1]


def use_cache(trials: Trials) -> Check:
    return state_checks.check_use_cache(trials.planned)


def other_loss(record: Record) -> None:
    record.micro_batches[1].loss = 0.5


def other_cache(record: Record) -> None:
    record.use_cache = {"config": (True, False)}


def other_tokens(record: Record) -> None:
    record.generated["after training"] = (1, 2)


def no_plan(record: Record) -> None:
    record.plan = None


def other_state(what: str, before: object, after: object) -> Change:
    return lambda record: record.state_changes.append(StateChange("a.module", what, before, after))


FAULTS: list[tuple[str, Callable[[Trials], Check], Change, str]] = [
    ("loss", compare.check_loss, other_loss, "the first in micro-batch 2"),
    ("gradients", compare.check_gradients, change_gradient, "1 parameter got another gradient, from step 2 on"),
    ("gradients", compare.check_gradients, lose_gradient, "1 parameter lost the gradient"),
    ("trainable parameters", compare.check_trainable, lose_gradient, "recomputation loses the gradient"),
    ("trainable parameters", compare.check_trainable, stand_still, "no trainable parameter moved"),
    ("weights", compare.check_weights, lambda r: first(r.tensors_after), "frozen ones among them"),
    ("random numbers", state_checks.check_random_numbers, draw, "From micro-batch 2 on, the torch generator"),
    ("buffers", state_checks.check_buffers, lambda r: first(r.buffers), "1 buffer differs"),
    ("buffers", state_checks.check_buffers, lambda r: r.attributes.update({"a.calls": 3}), "a.calls None, 3 with"),
    ("names", state_checks.check_names, with_name("during"), "differ during training: new are module a.new_one"),
    ("names", state_checks.check_names, with_name("after"), "differ after training: new are module a.new_one"),
    ("use_cache", use_cache, other_cache, "was True before training and is False after it"),
    ("generation", state_checks.check_generation, other_tokens, "Generation after training gives (1, 2)"),
    ("forward counts", counts, count_again(f"{LAYERS}.0.input_layernorm", 7), f"{LAYERS}.0 ran 2 times, and 7 times"),
    ("forward counts", counts, count_again("base_model.model.lm_head", 1), "lm_head ran again in backward although"),
    ("forward counts", counts, no_plan, "was not the one that the policy means"),
    ("plan in force", in_force, lambda r: r.replaced.update({"a.layer": "forward is now b"}), "on a.layer forward is"),
    ("plan in force", in_force, lambda r: r.callback_faults.append("A fault."), "stop in its first step: A fault."),
    ("training flags", flags, other_state("training", True, False), "training of a.module was True in the forward"),
    ("autocast", autocast, other_state("autocast", "cpu", "off"), "Autocast was lost in recomputation: cpu in the"),
]


@pytest.mark.parametrize(("name", "check", "change", "words"), FAULTS)
def test_check_passes_and_fails_for_one_thing(
    name: str, check: Callable[[Trials], Check], change: Change, words: str, trials: Trials
) -> None:
    found = check(trials)
    assert (found.name, found.verdict) == (name, "pass")
    wrong = check(changed(trials, change))
    assert (wrong.name, wrong.verdict) == (name, "fail")
    assert words in wrong.detail


def test_reference_that_does_not_repeat_itself_fails(trials: Trials) -> None:
    def other_output(record: Record) -> None:
        micro = record.micro_batches[1]
        micro.loss += 1e-6
        micro.outputs[5] = (micro.outputs[5][0], ("other",))

    assert compare.check_repeatability(trials).verdict == "pass"
    wrong = compare.check_repeatability(changed(trials, other_output, "repeated"))
    assert wrong.verdict == "fail"
    assert f"The first module whose output differs is {trials.reference.micro_batches[1].outputs[5][0]}" in wrong.detail


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "pass"), (3.0, "pass"), (50.0, "fail")])
def test_gradients_are_held_against_the_noise_of_the_reference(
    factor: float, verdict: str, trials: Trials, tmp_path: Path
) -> None:
    def noisy(record: Record, amount: float) -> None:
        record.folder = tmp_path / str(amount)
        gradients = trials.reference.gradients(0)
        record.keep_gradients(0, {name: value * (1 + amount) for name, value in gradients.items()})
        record.num_steps = 1

    noise = changed(trials, lambda record: noisy(record, 1e-4), "repeated")
    found = compare.check_gradients(changed(noise, lambda record: noisy(record, factor * 1e-4 + 1e-9)))
    assert found.verdict == verdict
    assert ("within what the reference itself varies" in found.detail) is (verdict == "pass")


def test_one_bit_in_a_gradient_is_no_noise_when_the_reference_repeats_itself(trials: Trials) -> None:
    found = compare.check_gradients(changed(trials, change_gradient))
    assert found.verdict == "fail"
    assert found.figures["num_not_equal"] == 1
    assert 0 < found.figures["max_relative_error"] < 1e-6


def test_hook_is_judged_by_what_it_leaves_behind(trials: Trials) -> None:
    def hooks(reference: object, repeated: object, planned: object, runs_again: int) -> Check:
        with_hooks = trials
        for record, change in (("reference", reference), ("repeated", repeated), ("planned", planned)):
            runs = runs_again if record == "planned" else 0
            with_hooks = changed(with_hooks, lambda r, c=change, n=runs: setattr(r, "hooks", [hook(c, n)]), record)
        return state_checks.check_hooks(with_hooks)

    assert state_checks.check_hooks(trials).verdict == "skip"
    assert hooks(4, 4, 8, 4).verdict == "fail"
    assert hooks(4, 4, 4, 4).verdict == "pass"
    # A hook that notes the time differs in any case, which says nothing of the plan.
    assert hooks(4, 5, 6, 4).verdict == "pass"


def test_adapter_file_without_a_tensor_fails(proven: tuple[TrialInputs, Trials, Record], trials: Trials) -> None:
    inputs = proven[0]
    assert next(saved_checks.check_saved(inputs, trials)).verdict == "pass"
    file = trials.planned.saved / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    lacking = list(saved_checks.check_saved(inputs, trials))
    assert [(check.name, check.verdict) for check in lacking] == [
        ("adapter file", "fail"),
        ("reload", "skip"),
        ("merge", "skip"),
    ]
    assert "has 27 tensors, and of 28 trained ones it lacks 1" in lacking[0].detail


def test_adapter_file_under_other_keys_fails(proven: tuple[TrialInputs, Trials, Record], trials: Trials) -> None:
    file = trials.planned.saved / "adapter_model.safetensors"
    save_file({f"wrapper.{key}": value for key, value in load_file(file).items()}, file)
    found = next(saved_checks.check_saved(proven[0], trials))
    assert found.verdict == "fail"
    assert "Its keys are not those of a run without the plan" in found.detail


def test_other_logits_after_loading_fail(proven: tuple[TrialInputs, Trials, Record], trials: Trials) -> None:
    def other(record: Record) -> None:
        assert record.logits is not None
        record.logits[0, 0, 0] += 1e-3

    reload = list(saved_checks.check_saved(proven[0], changed(trials, other)))[1]
    assert (reload.name, reload.verdict) == ("reload", "fail")
    assert reload.figures["max_error"] == pytest.approx(1e-3, rel=0.01)


def test_merge_that_does_nothing_fails(
    proven: tuple[TrialInputs, Trials, Record], trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self: self.unload())
    merge = list(saved_checks.check_saved(proven[0], trials))[2]
    assert (merge.name, merge.verdict) == ("merge", "fail")
    assert merge.figures["relative_error"] == pytest.approx(merge.figures["relative_effect_of_adapter"])


def test_resumed_run_with_another_loss_or_weight_fails(
    proven: tuple[TrialInputs, Trials, Record], trials: Trials
) -> None:
    resumed = proven[2]
    assert saved_checks.check_resume(trials, resumed, 1).verdict == "pass"
    other = copy.deepcopy(resumed)
    other.micro_batches[-1].loss += 1e-7
    assert saved_checks.check_resume(trials, other, 1).verdict == "fail"
    other = copy.deepcopy(resumed)
    first(other.trained)
    assert "1 of 28 trained parameters differ" in saved_checks.check_resume(trials, other, 1).detail


def test_check_of_several_processes_fails_where_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Check(name="loss", verdict="pass", detail="equal", figures={"max_error": 0.0, "min_cosine": 1.0})
    bad = Check(name="loss", verdict="fail", detail="not equal", figures={"max_error": 0.5, "min_cosine": 0.9})
    only_first = Check(name="merge", verdict="pass", detail="the same")
    monkeypatch.setattr(processes, "gather", lambda value: [{"loss": good, "merge": only_first}, {"loss": bad}])
    loss, merge = processes.combine_checks([])
    assert (loss.verdict, loss.detail) == ("fail", "[process 1] not equal")
    assert loss.figures == {"max_error": 0.5, "min_cosine": 0.9}
    assert merge == only_first
    assert not Report(title="a", checks=(loss, merge)).holds
