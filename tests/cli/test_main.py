"""The `hf-ckpt` command: what it takes, prints and returns. What is verified is in the tests of verify."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt.cli.main import _COMMANDS as COMMANDS
from hf_ckpt.cli.main import main
from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe import shipped
from hf_ckpt.recipe.recipe import load_recipe
from hf_ckpt.verify import processes
from hf_ckpt.verify import run as verify
from hf_ckpt.verify.report import Check, Report
from tests import small_recipes

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
SHIPPED = sorted(path.stem for path in RECIPES.glob("*.yaml"))

PASSED = Check(name="loss", verdict="pass", detail="8 losses equal bit by bit.", figures={"num_losses": 8})
FAILED = Check(
    name="gradients",
    verdict="fail",
    detail="A gradient differs: model.layers.1.mlp.down_proj.weight, cosine 0.947. Set preserve_rng_state.",
    figures={"cosine": 0.947, "relative_error": math.inf},
)
SKIPPED = Check(name="adapter file", verdict="skip", detail="The recipe trains no adapter.")
FACTS = (("model", "LlamaForCausalLM, config from model.config"), ("model.layers", "all 4 layers"))


def found(*checks: Check) -> Report:
    return Report(title="small.yaml", checks=checks, facts=FACTS)


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Puts a report in the place of a verification, and returns how it was asked for."""

    def put(*checks: Check) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def verify_nothing(recipe: Any, **options: Any) -> Report:
            asked.append({"recipe": recipe, **options})
            options["say"]("Running ...")
            print("what a library prints")
            return found(*checks)

        monkeypatch.setattr(verify, "verify", verify_nothing)
        return asked

    return put


# --- Table and JSON. ---


def test_table_has_facts_checks_and_a_verdict() -> None:
    assert found(PASSED, SKIPPED).table(width=80).splitlines() == [
        "hf-ckpt verify small.yaml",
        "  model         LlamaForCausalLM, config from model.config",
        "  model.layers  all 4 layers",
        "",
        "  loss          pass  8 losses equal bit by bit.",
        "  adapter file  skip  The recipe trains no adapter.",
        "",
        "1 of 1 checks hold (1 skipped: nothing to compare)",
    ]


def test_failures_say_what_to_do_and_fit_the_terminal() -> None:
    lines = found(PASSED, FAILED).table(width=72).splitlines()
    assert max(map(len, lines)) <= 72
    assert lines[5:8] == [
        "  gradients  FAIL  A gradient differs:",
        "                   model.layers.1.mlp.down_proj.weight, cosine 0.947.",
        "                   Set preserve_rng_state.",
    ]
    assert "1 of 2 checks hold" in lines
    assert " ".join(lines[lines.index("1 of 2 checks hold") + 1 :]).startswith(
        "This plan changes what the recipe does: gradients. Each line above says where it was seen first"
    )


def test_json_is_json_and_has_every_figure() -> None:
    read = json.loads(found(PASSED, FAILED).to_json())
    assert read["versions"].keys() >= {"python", "hf_ckpt", "torch", "transformers", "accelerate"}
    assert (read["recipe"], read["holds"]) == ("small.yaml", False)
    assert read["facts"][1] == {"name": "model.layers", "text": "all 4 layers"}
    assert read["checks"][1]["figures"] == {"cosine": 0.947, "relative_error": "inf"}


def test_report_comes_back_from_json() -> None:
    whole = found(PASSED, SKIPPED)
    assert Report.from_json(json.loads(json.dumps(whole.as_json()))) == whole


# --- Exit codes and streams. ---


@pytest.mark.parametrize(("checks", "code"), [((PASSED, SKIPPED), 0), ((PASSED, FAILED), 1)])
def test_exit_code_tells_whether_every_check_holds(
    checks: tuple[Check, ...], code: int, finds: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(*checks)
    assert main(["verify", str(small_recipes.write(tmp_path))]) == code
    printed = capsys.readouterr()
    assert printed.out.startswith("hf-ckpt verify small.yaml\n")
    assert "what a library prints" not in printed.out
    assert printed.err == "Running ...\n"


def test_json_stands_alone_on_standard_output(finds: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finds(PASSED)
    assert main(["verify", str(small_recipes.write(tmp_path)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True


def test_options_reach_the_verification(finds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_script.py").write_text("def prepare(model):\n    model.prepared = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    asked = finds(PASSED)
    recipe = str(small_recipes.write(tmp_path))
    options = ["--steps", "3", "training.seed=5", "--full", "--setup", "my_script:prepare"]
    assert main(["verify", recipe, "checkpointing.policy=full", *options]) == 0
    assert (asked[0]["num_steps"], asked[0]["is_full"], asked[0]["setup"].__name__) == (3, True, "prepare")
    assert asked[0]["recipe"].checkpointing["policy"] == "full"
    assert asked[0]["recipe"].training["seed"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["training.learning_rat=1"], 'Did you mean "learning_rate"?'),
        (["--engine", "fsdp2"], "--engine fsdp2 is for several processes. Add --processes 2."),
        (["--setup", "no_such_script:prepare"], "--setup no_such_script:prepare: No module named 'no_such_script'."),
        (["--setup", "math"], "--setup math"),
        (["checkpointing.policy=[{layers: '0:9', mode: full}]"], "has 4 decoder layers (0 to 3)"),
        (["checkpointing=null"], "has no checkpointing section"),
    ],
)
def test_wrong_input_is_refused_with_code_2(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(small_recipes.write(tmp_path)), *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_tensor_parallelism_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", "a.yaml", "--processes", "2", "--engine", "tp"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--engine: tensor parallelism was asked for, and a recipe's model is loaded whole" in said
    assert "write a script that loads the model with DistributedConfig(tp_size=...)" in said


@pytest.mark.parametrize(
    "words", [["verfy", "a.yaml"], ["verify"], ["verify", "a.yaml", "--steps", "0"], ["verify", "--js"]]
)
def test_wrong_words_end_with_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: hf-ckpt" in capsys.readouterr().err


def test_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["estimte", "a.yaml"])
    known = (
        "the commands are recipes, init, estimate, plan, finetune, verify, inspect, profile, models, devices, ui, env, "
        "completion"
    )
    assert f'there is no command "estimte"; {known}. Did you mean "estimate"?' in capsys.readouterr().err


def test_package_is_the_command_too() -> None:
    command = [sys.executable, "-m", "hf_ckpt", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "hf-ckpt 0.1.0\n"


def test_recipes_are_listed_with_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    _, *rows = text.split("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == shipped.names()
    assert max(map(len, text.splitlines())) <= 80
    assert main(["recipes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["folder"] == str(RECIPES)
    assert document["recipes"] == [asdict(each) for each in shipped.summaries()]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "hf-ckpt verify my_recipe.yaml"),
        (["--help"], "exit codes: 0 all is well; 1 a check of verify failed, or nothing fits; 2 wrong input"),
        (["--version"], "hf-ckpt 0.1.0"),
        (["verify", "--help"], "--processes N"),
        (["inspect", "--help"], "Loads no weights"),
    ],
)
def test_help_and_version(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert expected in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_fits_a_terminal(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_wrong_recipe_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path, training={"learning_rat": 1})
    code = (
        "import sys; from hf_ckpt.cli.main import main; "
        f"print(main(['verify', {str(recipe)!r}]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"


def test_a_prediction_ends_at_once_with_its_exit_code_and_what_is_registered_for_the_end() -> None:
    code = """
import atexit, sys
from hf_ckpt.cli.main import run
class Kept:
    def __del__(self):
        print("taken apart")
kept = Kept()
atexit.register(print, "ended")
sys.argv = ["hf-ckpt", "inspect", "no_such_recipe"]
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "ended\n")
    assert "no_such_recipe" in done.stderr


# --- inspect. ---


def test_inspect_shows_layers_parts_modes_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(small_recipes.write(tmp_path))]) == 0
    printed = capsys.readouterr().out
    head, found, held = printed.partition("What the layers hold")
    projections = ", ".join(f"self_attn.{name}_proj" for name in "qkvo")
    norms = "input_layernorm, post_attention_layernorm"
    assert head == textwrap.dedent(
        """\
        LlamaForCausalLM, config from model.config
          weights  54,304 parameters in float32
          trained  all in float32

        model.layers: 4 layers (decoder, language)
          0 to 3      LlamaDecoderLayer; attention: self_attn; ffn: mlp

        On every layer, a mode
          none                 keeps every activation
          full                 keeps a layer's input; 100% of the layers' weights run forward twice
          attention            keeps all but the inside of the attention; 47% of the layers' weights run forward twice
          ffn                  keeps all but the inside of the ffn; 53% of the layers' weights run forward twice
          selective            keeps the outputs of matrix products and attention, and where tokens are routed to
          selective_attention  keeps a layer's input and the attention's output; 100% of the layers' weights TWICE
        What can be added to it
          offload              what a layer keeps waits in host memory, or on disk, for its backward
          weights              a layer's frozen weights wait in host memory while other layers run
          tiles                slices of the sequence, each recomputed, in PROJECTIONS, mlp, NORMS
          head: chunked        lm_head and the loss run for some tokens at a time: no logits are held

        The plan of the recipe
          model.layers: 4 layers
            0 to 1       full
            2            ffn
            3            none
          63% of the layers' weights run forward twice

        """
    ).replace("TWICE", "run forward twice").replace("PROJECTIONS", projections).replace("NORMS", norms)
    lines = [" ".join(line.split()) for line in (found + held).splitlines()]
    assert lines[0] == (
        "What the layers hold for their backward without a plan: 2 sequences of 64 tokens, padded; this machine's CPU"
    )
    assert lines[1].startswith("layers 0 to 3 of model.layers: ")
    # Two inputs of 128 tokens and 48 channels in float32.
    assert "ffn mm 24.0 KiB float32 [128, 48] mlp.gate_proj for silu of mlp.act_fn" in lines
    assert "ffn mm 24.0 KiB float32 [128, 48] mlp.up_proj for mul of mlp" in lines
    assert lines[-1].startswith("outside the layers: ")


def test_inspect_takes_names_where_structure_does_not_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(small_recipes.write(tmp_path))
    assert main(["inspect", recipe, "--ffn", "no_such"]) == 2
    assert "no_such" in capsys.readouterr().err


# --- Several processes. ---


def script(folder: Path, text: str) -> list[str]:
    """A command that takes the place of torchrun; it is given the folder for answers last."""
    path = folder / "stand_in.py"
    path.write_text("import json, pathlib, sys\nfolder = pathlib.Path(sys.argv[-1])\n" + textwrap.dedent(text))
    return [sys.executable, str(path)]


ANSWERING = """
for rank in range(2):
    (folder / f"{rank:05d}.json").write_text(json.dumps({"report": {"rank": rank}, "refusal": ""}))
print("verify: Running ...", file=sys.stderr)
print("a warning", file=sys.stderr)
"""
DYING = """
print("Traceback", file=sys.stderr)
print("ValueError: the reason", file=sys.stderr)
print("E0101 torch/distributed/elastic/multiprocessing/api.py:1] failed", file=sys.stderr)
print("what torchrun says of itself", file=sys.stderr)
sys.exit(1)
"""
REFUSING = """
(folder / "00001.json").write_text(json.dumps({"report": None, "refusal": "Rule {...} reaches no layer."}))
sys.exit(1)
"""


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], tuple[Any, list[str]]]:
    def run(text: str) -> tuple[Any, list[str]]:
        said: list[str] = []
        monkeypatch.setattr(processes, "_torchrun", lambda num_processes: script(tmp_path, text))
        return processes.run_in_processes(["verify"], num_processes=2, say=said.append), said

    return run


def test_first_process_answers_for_all_and_only_progress_is_shown(ask: Any) -> None:
    assert ask(ANSWERING) == ({"rank": 0}, ["Running ..."])


def test_processes_that_die_are_told_by_their_last_words(ask: Any) -> None:
    with pytest.raises(processes.LostProcessError) as raised:
        ask(DYING)
    assert str(raised.value) == (
        "2 of 2 processes ended without an answer. The last that they printed:\nTraceback\nValueError: the reason"
    )


def test_refusal_of_one_process_stands_for_all(ask: Any) -> None:
    with pytest.raises(RecipeError) as raised:
        ask(REFUSING)
    assert str(raised.value) == "Rule {...} reaches no layer."


def test_processes_that_fall_silent_are_stopped(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_SILENT_SECONDS", 1)
    with pytest.raises(processes.LostProcessError, match="Nothing was printed for 1 s; the processes were stopped"):
        ask("import time\ntime.sleep(60)")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM")
def test_processes_do_not_outlive_a_command_that_is_told_to_end(tmp_path: Path) -> None:
    # "--answers" and its folder come last, behind what was asked.
    text = "import os, time\npathlib.Path(sys.argv[-3]).write_text(str(os.getpid()))\ntime.sleep(60)"
    own = script(tmp_path, text)
    noted = tmp_path / "pid"
    code = textwrap.dedent(
        f"""
        from hf_ckpt.verify import processes
        processes._torchrun = lambda num_processes: {own!r}
        processes.run_in_processes([{str(noted)!r}], num_processes=2, say=print)
        """
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_for(lambda: noted.is_file() and noted.read_text() != "")
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


def wait_for(is_true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_lost_processes_end_with_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(small_recipes.write(tmp_path))
    monkeypatch.setattr(processes, "_torchrun", lambda num_processes: script(tmp_path, DYING))
    assert main(["verify", recipe, "--processes", "2"]) == 1
    assert "ValueError: the reason" in capsys.readouterr().err


def test_refusal_of_several_processes_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(small_recipes.write(tmp_path))
    monkeypatch.setattr(processes, "_torchrun", lambda num_processes: script(tmp_path, REFUSING))
    assert main(["verify", recipe, "--processes", "2"]) == 2
    assert "Rule {...} reaches no layer." in capsys.readouterr().err


def test_head_of_trl_is_said_to_govern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl", minversion="1.16")
    assert main(["inspect", str(small_recipes.of_trainer(tmp_path, "dpo"))]) == 0
    printed = capsys.readouterr().out
    assert "trl computes head and loss together, and governs" in printed
    assert "without a plan: 4 sequences of 64 tokens" in printed


def is_refused(stem: str) -> bool:
    """Whether verify makes no batches for a shipped recipe: on images, or on what is generated."""
    text = (RECIPES / f"{stem}.yaml").read_text("utf-8")
    return "\n  format: images" in text or "\ntrainer: grpo" in text


def test_recipes_are_listed_in_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    header, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert header.split()[:2] == ["recipe", "GPUs"]
    assert [line.split()[0] for line in lines] == list(SHIPPED)
    assert max(map(len, lines)) <= 80
    assert main(["recipes", "--verbose"]) == 0
    assert "one GPU with 24 GB that computes in bfloat16" in capsys.readouterr().out


def names_a_trainer(stem: str) -> bool:
    """Whether a shipped recipe trains by another loss than the model's own."""
    return "\ntrainer: " in (RECIPES / f"{stem}.yaml").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("stem", [stem for stem in SHIPPED if not is_refused(stem)])
@pytest.mark.sweep(keep=1)
def test_shipped_recipe_holds(stem: str, capsys: pytest.CaptureFixture[str]) -> None:
    if names_a_trainer(stem):
        pytest.importorskip("trl", minversion="1.16")
    overrides = [f"checkpointing.{each}" for each in _written_out(stem)]
    code = main(["verify", str(RECIPES / f"{stem}.yaml"), *overrides, "--json", "--steps", "2"])
    read = json.loads(capsys.readouterr().out)
    failed = [f"{check['name']}: {check['detail']}" for check in read["checks"] if check["verdict"] == "fail"]
    assert (code, failed) == (0, [])


def _written_out(stem: str) -> list[str]:
    """Return what the planner chooses for most layers: planning takes seconds, and is done for two small ones."""
    if stem == "tiny_llama_lora":
        return []
    if stem == "tiny_llama_dpo_lora":
        # For a card, whose kernels this machine does not run.
        return ["policy=auto", "every_n_layers=null", "exact=true", "memory_budget=2.1GiB"]
    if stem.endswith("longctx"):
        return ["policy=full", "tiles=auto", "head=chunked"]
    return ["policy=selective"] if load_recipe(RECIPES / f"{stem}.yaml").is_auto else []
