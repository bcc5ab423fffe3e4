"""The command: what it takes, what it prints, and how it refuses: one message, exit code 2, nothing written."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from safetensors import SafetensorError
from transformers import TrainingArguments

from hf_ckpt.cli.finetune import main, sigterm_as_interrupt
from hf_ckpt.finetune import train
from hf_ckpt.finetune.oom_report import RunWatch
from tests import small_recipes, twins

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "finetune.py")
HUB_ID = "some-maker/some-model"
MISSING = "{0}: there is no file {0}.\n"


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 4)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs the command in an empty folder, holds that it was refused and wrote nothing, and returns its message."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)

    def run(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(arguments) == 2
        assert sorted(tmp_path.rglob("*")) == before
        # Progress bars begin their lines anew.
        message = "\n".join(line for line in capsys.readouterr().err.split("\n") if "\r" not in line).lstrip("\n")
        assert "Traceback" not in message
        return message

    return run


# --- What it takes. ---


def test_print_shows_the_resolved_recipe_and_carries_nothing_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipes.write(tmp_path)
    assert main([str(recipe), "training.max_steps=7", "--print"]) == 0
    printed = capsys.readouterr()
    assert "  max_steps: 7\n" in printed.out
    assert printed.err == ""
    assert not (tmp_path / "run").exists()


def test_overrides_may_stand_before_and_after_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipes.write(tmp_path)
    assert main([str(recipe), "training.max_steps=7", "--print", "training.seed=3"]) == 0
    printed = capsys.readouterr().out
    assert "  max_steps: 7\n" in printed
    assert "  seed: 3\n" in printed


def test_overrides_govern_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipes.write(tmp_path)
    folder = tmp_path / "elsewhere"
    overrides = [f"training.output_dir={folder}", "checkpointing.policy=attention", "training.max_steps=1"]
    assert main([str(recipe), *overrides]) == 0
    assert "  0 to 3       attention" in capsys.readouterr().out
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"]
    assert not (tmp_path / "run").exists()


def test_merge_writes_the_base_with_the_adapter_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = small_recipes.on_weights(twins.model("meta-llama/Llama-3.1-8B-Instruct"))
    recipe = small_recipes.write(tmp_path, model=weights, lora=small_recipes.LORA, training={"max_steps": 1})
    assert main([str(recipe), "--merge"]) == 0
    merged = tmp_path / "run" / "merged"
    assert f"Merged model   {merged} (model.safetensors, " in capsys.readouterr().out
    assert json.loads((merged / "config.json").read_text())["model_type"] == "llama"
    assert not list(merged.glob("adapter*"))


def test_unknown_flag_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["recipe.yaml", "--resum"])
    assert ended.value.code == 2


def test_interrupted_run_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipes.write(tmp_path, training={"save_strategy": "steps", "save_steps": 1})

    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_ckpt.callback.HFCkptCallback.on_save", interrupt)
    assert main([str(recipe)]) == 130
    run = tmp_path / "run"
    assert f"Stopped. --resume goes on from {run / 'checkpoint-1'}.\n" in capsys.readouterr().out


def send_sigterm(*_args: object, **_kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_run_as_an_interruption_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipes.write(tmp_path, training={"save_strategy": "steps", "save_steps": 1})
    found: list[int] = []
    # That of the test's own time limit among them.
    others = threading.enumerate()
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    ours = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("hf_ckpt.callback.HFCkptCallback.on_save", send_sigterm)
    try:
        assert main([str(recipe)]) == 143
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
    # The handler that was there is called too.
    assert found == [signal.SIGTERM]
    assert f"Stopped. --resume goes on from {tmp_path / 'run' / 'checkpoint-1'}.\n" in capsys.readouterr().out
    # Nothing is left that would end this process in the end.
    left = [thread for thread in threading.enumerate() if thread not in others]
    assert not any(isinstance(thread, threading.Timer) and not thread.finished.is_set() for thread in left)


def test_handler_of_the_trainer_governs_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "enable_jit_checkpoint" not in {field.name for field in dataclasses.fields(TrainingArguments)}:
        pytest.skip("this transformers has none")
    recipe = small_recipes.write(tmp_path, training={"enable_jit_checkpoint": True})
    monkeypatch.setattr("transformers.trainer_jit_checkpoint.CheckpointManager.__init__.__defaults__", (0,))
    seen: list[int] = []

    def send_once(_callback: object, _args: object, state: Any, _control: object, **_kwargs: object) -> None:
        seen.append(state.global_step)
        if state.global_step == 1:
            send_sigterm()
            # The handler asks for a checkpoint from a thread.
            time.sleep(1)

    monkeypatch.setattr(RunWatch, "on_step_begin", send_once)
    before = signal.getsignal(signal.SIGTERM)
    assert main([str(recipe)]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert seen == [0, 1]
    # One checkpoint, though the recipe asks for none, and no further step.
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 1


def test_sigterm_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_as_interrupt():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# Of Python 3.12: the child does nothing but end.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_child_ends_by_sigterm_as_any_other() -> None:
    with sigterm_as_interrupt():
        child = os.fork()
        if not child:
            send_sigterm()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_run_that_does_not_end_in_time_is_ended(tmp_path: Path) -> None:
    code = (
        "import os, signal, time; from hf_ckpt.cli import finetune; finetune._DEADLINE_S = 0.5\n"
        "with finetune.sigterm_as_interrupt():\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n    finally:\n        time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=50)
    assert done.returncode == 143


# --- How it refuses. ---


def test_wrong_recipe_is_refused_without_torch(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path, training={"learning_rte": 1e-4})
    code = (
        "import sys; from hf_ckpt.cli.finetune import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout == "2 []\n"
    assert 'Did you mean "learning_rate"?' in done.stderr


def test_script_hands_on_the_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, str(tmp_path / "none.yaml")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == MISSING.format(tmp_path / "none.yaml")


@pytest.mark.sweep
def test_accelerate_launch_shows_the_message_alone(tmp_path: Path) -> None:
    launcher = Path(sys.executable).with_name("accelerate")
    options = ["--quiet", "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    done = subprocess.run(
        [str(launcher), "launch", *options, "--dynamo_backend", "no", SCRIPT, str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr == MISSING.format(tmp_path / "none.yaml")


def test_every_mistake_of_a_recipe_is_one_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    recipe = small_recipes.write(tmp_path, training={"max_steps": "many"}, data={"path": "x", "max_lenght": 3})
    lines = refused(str(recipe)).splitlines()
    assert len(lines) == 2
    assert any(line.endswith('Did you mean "max_length"?') for line in lines)
    assert any('training.max_steps = "many": expected a whole number.' in line for line in lines)


def test_broken_yaml_names_its_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    recipe = tmp_path / "broken.yaml"
    recipe.write_text("model: {name_or_path: a\ndata: b\n")
    assert refused(str(recipe)).startswith(f"{recipe}:2: not valid YAML: ")


def hub_recipe(folder: Path, **model: Any) -> str:
    return str(small_recipes.write(folder, model={"config": None, "tokenizer": None, "name_or_path": HUB_ID, **model}))


def test_hub_id_without_a_connection_asks_for_a_local_path(tmp_path: Path, refused: Callable[..., str]) -> None:
    message = refused(hub_recipe(tmp_path))
    assert message.startswith(f"model.name_or_path: {HUB_ID} is neither a local folder with a model nor found ")
    assert message.endswith(
        "log in with `hf auth login` if it is gated or private, or give the path of a local copy.\n"
    )


def test_missing_folder_is_named(tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = tmp_path / "no" / "such" / "model"
    message = refused(hub_recipe(tmp_path, name_or_path=str(folder)))
    assert message == f"model.name_or_path: there is no folder {folder}. Check the path, or give a hub id.\n"


def test_folder_without_a_model_is_named(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "weights").mkdir()
    message = refused(hub_recipe(tmp_path, name_or_path=str(tmp_path / "weights")))
    assert message.startswith(f"model.name_or_path: {tmp_path / 'weights'} ")
    assert "config.json" in message


def test_damaged_weights_are_named(tmp_path: Path, refused: Callable[..., str]) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(twins.model("meta-llama/Llama-3.1-8B-Instruct"), weights)
    whole = (weights / "model.safetensors").read_bytes()
    (weights / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    message = refused(hub_recipe(tmp_path, name_or_path=str(weights)))
    assert message.startswith(f"model.name_or_path: {weights} cannot be loaded: ")


def test_output_folder_that_is_a_file(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "run").touch()
    recipe = small_recipes.write(tmp_path)
    assert refused(str(recipe)) == (
        f"training.output_dir is {tmp_path / 'run'}, but {tmp_path / 'run'} is a file. Name another folder.\n"
    )


@pytest.mark.parametrize(
    ("folder", "why"),
    [("/proc/none/run", "No such file or directory"), ("x" * 300, "File name too long")],
    ids=["no place for folders", "long name"],
)
def test_output_folder_that_cannot_be_made_is_told_before_the_data_is_read(
    folder: str, why: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    recipe = small_recipes.write(tmp_path, data={"path": "none.jsonl"})
    message = refused(str(recipe), f"training.output_dir={folder}")
    assert message.startswith("training.output_dir is ")
    assert why in message


def test_output_folder_that_cannot_be_written_to_is_told_before_the_data_is_read(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    recipe = small_recipes.write(tmp_path, data={"path": "none.jsonl"})
    assert refused(str(recipe)) == (
        f"training.output_dir is {tmp_path / 'run'}, but it cannot be made and written to: No space left on device. "
        "Name another folder, or mend this one.\n"
    )


def full(*_args: object, **_kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_for_safetensors(*_args: object, **_kwargs: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def full_for_torch(*_args: object, **_kwargs: object) -> None:
    # As torch says it when it opens a file itself: not a word of space.
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")


WRITERS: dict[str, tuple[str, Callable[..., None]]] = {
    "weights": ("transformers.modeling_utils.safe_save_file", full_for_safetensors),
    "optimizer": ("torch.save", full_for_torch),
    "plan": ("hf_ckpt.trainer.saved_files.write_plan", full),
    "data": ("hf_ckpt.finetune.train.prepare", full),
}


@pytest.mark.parametrize("what", WRITERS)
def test_full_disk_is_named(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipes.write(tmp_path, training={"save_strategy": "steps", "save_steps": 1})
    monkeypatch.setattr(*WRITERS[what])
    if what == "optimizer":
        monkeypatch.setattr(train, "_free_bytes", lambda _: 0)
    assert main([str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("The disk is full: ")]
    assert "Free space, or name another folder" in line
    if what != "data":
        assert f"The disk is full: {tmp_path / 'run'} cannot be written (" in line


def test_vocabulary_with_too_little_room(tmp_path: Path, refused: Callable[..., str]) -> None:
    tokenizer = str(twins.model("meta-llama/Llama-3.1-8B-Instruct"))
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    recipe = small_recipes.write(tmp_path, model={"config": {**config, "vocab_size": 100}, "tokenizer": tokenizer})
    assert refused(str(recipe)) == (
        "model.config.vocab_size is 100, but the tokenizer has 259 tokens. Raise it, or leave it out to take the "
        "tokenizer's.\n"
    )


def fail_on_the_hub(monkeypatch: pytest.MonkeyPatch, name: str, status: int) -> None:
    """Let the hub answer every request of transformers with an error of huggingface_hub's."""
    # The class of responses is another one in each major version of huggingface_hub.
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    error = getattr(errors, name)("the hub says no", response=response)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", refuse)


def test_gated_weights_say_how_to_get_access(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on_the_hub(monkeypatch, "GatedRepoError", 403)
    assert refused(hub_recipe(tmp_path)) == (
        f"model.name_or_path: {HUB_ID} is gated. Accept its licence on its page, log in with `hf auth login`, or give "
        "the path of a local copy.\n"
    )


def test_id_that_the_hub_does_not_know(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on_the_hub(monkeypatch, "RepositoryNotFoundError", 404)
    message = refused(hub_recipe(tmp_path))
    assert message.startswith(f"model.name_or_path: {HUB_ID} is neither a local folder with a model nor found ")


def test_missing_data_is_told_before_the_base_is_trained(tmp_path: Path, refused: Callable[..., str]) -> None:
    base = small_recipes.write(tmp_path, "base.yaml", training={"output_dir": str(tmp_path / "base")})
    model = {**small_recipes.on_weights(tmp_path / "base"), "base_recipe": base.name}
    recipe = small_recipes.write(tmp_path, model=model, data={"path": "none.jsonl"})
    message = refused(str(recipe))
    assert message.startswith("data.path: there is no file or directory 'none.jsonl' in ")


def test_policy_past_the_last_layer_is_told_before_the_base_is_trained(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    base = small_recipes.write(tmp_path, "base.yaml", training={"output_dir": str(tmp_path / "base")})
    model = {**small_recipes.on_weights(tmp_path / "base"), "base_recipe": base.name}
    policy = {"policy": {"layers": "2:9", "mode": "full"}}
    recipe = small_recipes.write(tmp_path, model=model, lora=small_recipes.LORA, checkpointing=policy)
    message = refused(str(recipe))
    assert message.endswith('has 4 decoder layers (0 to 3). Use "2:4" or "2:".\n')


def test_base_has_to_be_where_its_recipe_writes(tmp_path: Path, refused: Callable[..., str]) -> None:
    base = small_recipes.write(tmp_path, "base.yaml", training={"output_dir": str(tmp_path / "base")})
    model = {**small_recipes.on_weights(tmp_path / "other"), "base_recipe": base.name}
    message = refused(str(small_recipes.write(tmp_path, model=model)))
    assert message == (
        f"model.base_recipe {base} writes to {tmp_path / 'base'}, but model.name_or_path is {tmp_path / 'other'}. "
        "Make them the same folder.\n"
    )


def test_base_has_to_be_a_whole_model(tmp_path: Path, refused: Callable[..., str]) -> None:
    base = small_recipes.write(
        tmp_path, "base.yaml", lora=small_recipes.LORA, training={"output_dir": str(tmp_path / "base")}
    )
    model = {**small_recipes.on_weights(tmp_path / "base"), "base_recipe": base.name}
    message = refused(str(small_recipes.write(tmp_path, model=model)))
    assert message == f"model.base_recipe {base} makes an adapter. Name a recipe without a lora section.\n"


REFUSALS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "policy past the last layer": (
        {"checkpointing": {"policy": {"layers": "2:9", "mode": "full"}}},
        [],
        'has 4 decoder layers (0 to 3). Use "2:4" or "2:".',
    ),
    "policy for a part that is not there": (
        {"checkpointing": {"policy": "full", "layers": "model.blocks"}},
        [],
        "model.blocks",
    ),
    "adapter for modules that are not there": (
        {"lora": {"r": 4, "target_modules": ["query_key_value"]}},
        [],
        "Its linear layers are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj.",
    ),
    "merge without an adapter": ({}, ["--merge"], "--merge merges an adapter, but this recipe has no lora section."),
    "merge into weights that are made anew": (
        {"lora": small_recipes.LORA},
        ["--merge"],
        "--merge loads the base model again, but model.config makes new weights in each run.",
    ),
    "resume without a checkpoint": ({}, ["--resume"], "holds no complete checkpoint."),
    "data that is not there": ({"data": {"path": "none.jsonl"}}, [], "data.path: there is no file or directory"),
    "float16 without a GPU": ({"training": {"fp16": True}}, [], "training.fp16 is true, but there is no GPU"),
    "reporter that is not installed": (
        {"training": {"report_to": "comet_ml"}},
        [],
        "training.report_to names comet_ml, which is not installed here.",
    ),
    "optimizer that is not installed": ({"training": {"optim": "lomo"}}, [], "training.optim: You need to install"),
    "file of DeepSpeed that is not there": (
        {"training": {"deepspeed": "none.json"}},
        [],
        "training: TrainingArguments refuse it: ",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    sections, arguments, says = REFUSALS[name]
    recipe = small_recipes.write(tmp_path, **sections)
    assert says in refused(str(recipe), *arguments)


def test_conversations_without_a_chat_template(tmp_path: Path, refused: Callable[..., str]) -> None:
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}] * 4
    (tmp_path / "talk.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    recipe = small_recipes.write(tmp_path, data={"path": str(tmp_path / "talk.jsonl")})
    assert "has no chat template. Set data.chat_template" in refused(str(recipe))


@pytest.mark.parametrize(
    ("sections", "overrides"),
    [
        ({}, "training.bf16=false training.fp16=true"),
        ({"model": {"dtype": "bfloat16"}}, "training.bf16=false training.fp16=true model.dtype=float32"),
        (
            {"model": {"dtype": "bfloat16"}, "lora": small_recipes.LORA},
            "training.bf16=false training.fp16=true model.dtype=float16",
        ),
    ],
    ids=["float32", "bfloat16", "adapter"],
)
def test_bfloat16_without_support_names_the_overrides(
    sections: dict[str, Any],
    overrides: str,
    tmp_path: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    recipe = small_recipes.write(tmp_path, **sections, training={"bf16": True, "use_cpu": False})
    assert refused(str(recipe)) == (f"training.bf16 is true, but Tesla T4 has no bfloat16. Use float16: {overrides}\n")


def test_bfloat16_without_a_gpu_names_the_cpu(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    recipe = small_recipes.write(tmp_path, training={"bf16": True, "use_cpu": False})
    assert "To train on the CPU all the same, slowly, use training.use_cpu=true." in refused(str(recipe))
