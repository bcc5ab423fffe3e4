"""`hf-ckpt estimate`, `plan`, `profile` and `inspect`: what they take, print, write and return."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import Plan, load_recipe
from hf_ckpt.cli.estimate import ESTIMATE, _quick
from hf_ckpt.cli.main import main
from hf_ckpt.cli.shared_options import subject_asked
from hf_ckpt.estimate import estimate as estimates
from hf_ckpt.estimate.estimate import RECIPE, Estimate
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.simulation.devices import Device
from tests import small_recipes, steps_by_hand
from tests.estimate.small_estimates import row_of

Asked = tuple[Subject, tuple[Device, ...], Sequence[str]]
Estimates = Callable[..., list[Asked]]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> Estimates:
    """Puts steps made by hand in the place of simulated ones, and returns what was asked for."""

    def put(saved_gib: float, *, is_interrupted: bool = False) -> list[Asked]:
        asked: list[Asked] = []

        def growing(
            subject: Subject, devices: tuple[Device, ...], say: Callable[[str], None], names: Sequence[str]
        ) -> Iterator[Estimate]:
            asked.append((subject, devices, names))
            say("Simulating ...")
            print("what a library prints")
            row = row_of(RECIPE, steps_by_hand.step(saved_gib), *devices)
            found = Estimate(Predictor(subject, devices[0]), devices, (row,), RECIPE)
            yield found
            say("Planning ...")
            if is_interrupted:
                raise KeyboardInterrupt
            auto = row_of(AUTO, steps_by_hand.step(0.1), devices[0], device=devices[0])
            yield replace(found, rows=(*found.rows, auto))

        monkeypatch.setattr(estimates, "growing", growing)
        return asked

    return put


# --- estimate. ---


# The steps of a layer each keep four times as much: 23 GiB of 23.6 are perhaps too much.
@pytest.mark.parametrize(("saved_gib", "code"), [(1.0, 0), (6.0, 1), (4.625, 3)])
def test_exit_code_tells_whether_the_recipes_plan_fits(
    saved_gib: float, code: int, estimated: Estimates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimated(saved_gib)
    assert main(["estimate", str(small_recipes.write(tmp_path)), "--device", "rtx4090"]) == code
    printed = capsys.readouterr()
    assert printed.out.startswith("hf-ckpt estimate")
    assert "what a library prints" not in printed.out
    assert printed.err.endswith("Building the model without weights ...\nSimulating ...\nPlanning ...\n")
    # Above the rows, and in the last line.
    verdict, last = printed.out.split("  plan ")[0], printed.out.splitlines()[-1]
    assert {0: "fits  peak", 1: "does not", 3: "perhaps  peak"}[code] in verdict
    assert {0: " fits on rtx4090", 1: " does not fit on rtx4090", 3: " only by giving cached blocks back."}[
        code
    ] in last


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_leaves_the_rows_that_were_printed(
    estimated: Estimates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimated(1.0, is_interrupted=True)
    assert main(["estimate", str(small_recipes.write(tmp_path)), "--device", "rtx4090"]) == 130
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].split() == [*("recipe", "8.5", "GiB", "2", "s", "yes")]
    assert printed.err.endswith("Planning ...\nStopped by Ctrl-C after 1 of 13 rows.\n")


def test_terminal_has_a_bar_that_leaves_nothing_behind(
    estimated: Estimates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated(1.0)
    screen = _Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["estimate", str(small_recipes.write(tmp_path)), "--device", "rtx4090"]) == 0
    written = screen.getvalue()
    assert "\r[#                   ] 1 of 13  Planning ..." in written
    assert "\x1b" not in written
    # Each line ends with the text that was written last from its left edge on.
    assert not any("[" in line.split("\r")[-1] for line in written.splitlines(keepends=True))
    assert max(len(part) for part in re.split(r"[\r\n]", written) if ".yaml" not in part) <= 80


def test_quick_estimate_has_two_fixed_modes(estimated: Estimates, tmp_path: Path) -> None:
    asked = estimated(1.0)
    assert main(["estimate", str(small_recipes.write(tmp_path)), "--quick"]) == 0
    ((_, _, names),) = asked
    assert names == ("none", "full")


def test_verbose_rows_say_what_fills_the_peak_and_when(
    estimated: Estimates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimated(1.0)
    assert main(["estimate", str(small_recipes.write(tmp_path)), "--device", "rtx4090", "-v"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "parameters 4.0 GiB, saved activations 4.0 GiB, logits and loss 512.0 MiB; forward, _log_softmax" in words


def test_json_stands_alone_on_standard_output(
    estimated: Estimates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    estimated(1.0)
    assert main(["estimate", str(small_recipes.write(tmp_path)), "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]] == [RECIPE, AUTO]


def test_options_reach_the_estimate(estimated: Estimates, tmp_path: Path) -> None:
    asked = estimated(1.0)
    words = ["--device", "rtx4090", "--device", "h100", "--engine", "fsdp2", "--processes", "4", "data.max_length=32"]
    assert main(["estimate", str(small_recipes.write(tmp_path)), *words, "--exact", "true"]) == 0
    ((subject, devices, _),) = asked
    assert [device.name for device in devices] == ["rtx4090", "h100"]
    assert (subject.step.sharding.engine, subject.step.sharding.world_size) == ("fsdp2", 4)
    assert subject.step.seq_length == 32
    assert (subject.allowed.exact, subject.command_options) == (True, {"exact": "--exact"})


def test_plot_writes_three_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    # Two rows are enough to draw.
    monkeypatch.setattr(estimates, "FIXED", {"full": {"policy": "full"}})
    picture = tmp_path / "memory.png"
    recipe = str(
        small_recipes.write(tmp_path, model={"config": small_recipes.CONFIG}, checkpointing={"policy": "full"})
    )
    assert main(["estimate", recipe, "--plot", str(picture)]) == 0
    written = [tmp_path / f"memory{what}.png" for what in ("", "-frontier", "-checkpoints")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("Wrote")] == [f"Wrote {path}" for path in written]


def test_max_length_and_grid_are_asked_for_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**small_recipes.CONFIG, "max_position_embeddings": 128}
    recipe = str(small_recipes.write(tmp_path, model={"config": config}, checkpointing={"policy": "full"}))
    assert main(["estimate", recipe, "--max-length", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["number"] == 128
    with pytest.raises(SystemExit) as ended:
        main(["estimate", recipe, "--max-length", "--grid"])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("estimate", ["--device", "rtx409"], 'Did you mean "rtx4090"?'),
        ("estimate", ["training.learning_rat=1"], 'Did you mean "learning_rate"?'),
        ("estimate", ["training.torch_compile=true"], "training.torch_compile = True cannot be simulated"),
        ("estimate", ["--engine", "fsdp2"], "Add --processes 8"),
        ("estimate", ["--accelerate-config", "nowhere.yaml"], "there is no file nowhere.yaml"),
        ("plan", ["--memory-budget", "22"], '--memory-budget is "22", without a unit'),
        ("plan", ["--memory-budget", "22GX"], 'unknown unit "GX"'),
        ("plan", ["--memory-budget", "-1GiB"], "must be above 0"),
        ("plan", ["--memory-budget", "30GiB", "--device", "rtx4090"], "GeForce RTX 4090 has 23.6 GiB"),
        ("plan", ["--out", "plan.txt"], "Write plan.txt.json"),
        ("plan", ["--out", "nowhere/plan.json"], "there is no folder"),
    ],
)
def test_wrong_input_is_refused_with_code_2(
    command: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # argparse takes a value that begins with a dash for an option.
    words = [f"--memory-budget={options[1]}"] if options[:1] == ["--memory-budget"] and len(options) == 2 else options
    assert main([command, str(small_recipes.write(tmp_path)), *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("command", ["estimate", "plan", "inspect", "profile"])
def test_wrong_recipe_is_refused_before_torch_is_loaded(command: str, tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path, training={"learning_rat": 1})
    code = (
        "import sys; from hf_ckpt.cli.main import main; "
        f"print(main([{command!r}, {str(recipe)!r}]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["estimate", "--help"],
            "exit codes: 0 the recipe fits; 1 it does not; 2 wrong input; 3 it fits only perhaps; 130 Ctrl-C",
        ),
        (["plan", "--help"], "exit codes: 0 there is a plan; 1 none fits; 2 wrong input"),
        (["profile", "--help"], "forward, backward and recomputation"),
        (["--help"], "hf-ckpt estimate llama7b_lora --device rtx4090"),
    ],
)
def test_help_says_what_there_is(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert expected in " ".join(capsys.readouterr().out.split())


# --- plan. ---


def test_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(small_recipes.write(tmp_path)), tmp_path / "plan.json"
    assert main(["plan", recipe, "--device", "rtx4090", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    # Everything fits.
    assert "model.layers: 4 layers\n  0 to 3       none\n" in printed.out
    assert "Peak " in printed.out
    assert "assumed" not in printed.out
    assert "\nThe plan fits on rtx4090: peak " in printed.out
    assert f"checkpointing.policy={out}" in printed.err
    assert Plan.from_json(out.read_text()).stacks[0].path == "model.layers"


def test_plan_as_json_has_the_plan_and_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(small_recipes.write(tmp_path)), "--memory-budget", "1GiB", "--json"]) == 0
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert read["budget_bytes"] == 2**30
    assert Plan.from_json(json.dumps(read["plan"])).model_class == "LlamaForCausalLM"
    assert read["peak_bytes"] == sum(read["by_category"].values())


def test_plan_says_which_device_it_assumed_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_gpu = {"use_cpu": False}
    assert main(["plan", str(small_recipes.write(tmp_path, training=on_gpu)), "--memory-budget", "23GiB"]) == 0
    printed = capsys.readouterr().out
    of_recipe = {"checkpointing": {"policy": "auto", "memory_budget": "23GiB"}, "training": on_gpu}
    assert main(["plan", str(small_recipes.write(tmp_path, **of_recipe))]) == 0
    assert capsys.readouterr().out == printed
    assumed = "assumed the smallest usual GPU with 23GiB, as there is no GPU here and no --device was given"
    assert assumed in " ".join(printed.split())
    assert max(len(line) for line in printed.splitlines() if ".yaml" not in line) <= 80


@pytest.mark.sweep
def test_budget_that_nothing_fits_ends_with_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(
        small_recipes.write(tmp_path, model={"config": small_recipes.CONFIG}, checkpointing={"policy": "full"})
    )
    assert main(["plan", recipe, "--memory-budget", "64KiB", "--device", "rtx4090"]) == 1
    printed = capsys.readouterr()
    assert "No plan fits" in printed.err
    assert printed.out == ""


# --- profile. ---


def test_profile_prints_what_was_measured_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(
        small_recipes.write(tmp_path, model={"config": small_recipes.CONFIG}, checkpointing={"policy": "full"})
    )
    trace = tmp_path / "trace.json"
    assert main(["profile", recipe, "--steps", "1", "--json", "--trace", str(trace)]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["measured"]["phases"].keys() == {"forward", "recomputation", "backward", "optimizer"}
    assert read["predicted"]["seconds"]["recomputation"] > 0
    assert "measured with torch" in read["device"]["source"]
    assert "recompute layer 1" in trace.read_text()


@pytest.mark.sweep
def test_step_that_does_not_fit_is_not_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = {**small_recipes.CONFIG, "hidden_size": 65536, "num_attention_heads": 512, "num_hidden_layers": 8}
    recipe = str(small_recipes.write(tmp_path, model={"config": large}, checkpointing=None))
    assert main(["profile", recipe]) == 2
    assert "it cannot be run here. Predict it instead" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ("none", "full")),
        (["--offload", "cpu"], ("none", "full", "full, offload")),
        (["--offload", "cpu", "--head", "chunked"], ("none", "full", "full, offload", "full, offload, tiles, head")),
    ],
)
def test_what_is_allowed_besides_modes_has_rows(words: list[str], names: tuple[str, ...], tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path)
    options = ESTIMATE.parser().parse_args([str(recipe), *words])
    assert _quick(options) == names
    subject = subject_asked(load_recipe(recipe), options)
    assert (subject.allowed.offload is not None) is ("--offload" in words)
    assert subject.allowed.head is (True if "--head" in words else None)
