"""`hf-ckpt ui`: what it answers, which needs no Gradio; and its page in a browser, where Gradio is installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_ckpt import load_recipe
from hf_ckpt.cli.estimate import ESTIMATE
from hf_ckpt.cli.main import main
from hf_ckpt.cli.model_options import training_of
from hf_ckpt.cli.ui import CARDS, HOST, METHODS, Answer, answer, command, framed, models
from hf_ckpt.recipe.recipe import Training
from tests.browsing import Browser
from tests.markups import Markup
from tests.small_recipes import CONFIG

ROOT = Path(__file__).parents[2]
CARD = next(card for card, name in CARDS.items() if name == "rtx4090")
LORA = next(iter(METHODS))


def model_in(folder: Path, **fields: int) -> Path:
    """Make a folder with a model's config."""
    made = folder / "model"
    made.mkdir()
    config = CONFIG | {"vocab_size": 300, "architectures": ["LlamaForCausalLM"]} | fields
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_in(tmp_path)


@pytest.mark.sweep
def test_answer_is_what_the_commands_tell(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(str(folder), LORA, CARD, 64, 2)
    assert found.plan == "base_model.model.model.layers: 2 layers\n  0 to 1       none"
    shown = command(str(folder), Training(length=64, batch=2), "rtx4090")
    assert main([*shlex.split(shown)[1:], "--no-cache"]) == 0
    assert found.verdict == capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"The planner's choice fits on rtx4090: [\d.]+ MiB of 23\.6 GiB\.", found.verdict)
    read = Markup(found.page)
    assert (read.wrong, read.leads_to()) == ([], [])
    assert shown in read.text
    # The recipe is the one that `init` writes.
    monkeypatch.chdir(tmp_path)
    words = ["--data", "rows.jsonl", "--out", "my_recipe.yaml", "--lora", "16", "--length", "64", "--batch", "2"]
    assert main(["init", str(folder), *words]) == 0
    assert found.recipe == (tmp_path / "my_recipe.yaml").read_text()
    assert load_recipe("my_recipe.yaml").data["max_length"] == 64


def test_what_does_not_fit_has_its_reason_in_place_of_a_plan(tmp_path: Path) -> None:
    # Weights, gradients and optimizer state of the embeddings alone are more than the card has.
    found = answer(str(model_in(tmp_path, vocab_size=2**27)), "all weights", CARD, 64, 1)
    assert found.verdict.startswith("The planner's choice does not fit on rtx4090")
    assert "No plan fits" in found.plan
    assert "max_length: 64" in found.recipe


@pytest.mark.parametrize("method", METHODS.values())
def test_command_says_the_same_again(method: str) -> None:
    training = Training(method=method, length=4096, batch=2)
    words = shlex.split(command("Qwen/Qwen3-8B", training, "h100"))
    options = ESTIMATE.parser().parse_intermixed_args(words[2:], argparse.Namespace(words=words))
    assert training_of(options) == training
    assert (options.recipe, options.device, options.quick) == ("Qwen/Qwen3-8B", ["h100"], True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model": " "},
            '"" is no model. Give its id on the hub, such as Qwen/Qwen3-8B, or a folder with a config.json.',
        ),
        ({"model": "../no-such-folder"}, '"../no-such-folder" is no model. Give its id'),
        ({"model": None}, '"" is no model.'),
        ({"length": None}, "length is left out. Give a whole number of 1 or more."),
        ({"batch": 0}, "batch is 0. Give a whole number of 1 or more."),
        ({"length": 2.5}, "length is 2.5. Give"),
        ({"model": "no/such-model"}, "model.name_or_path: the config of no/such-model was not found"),
    ],
)
def test_wrong_fields_are_refused(changed: dict[str, Any], message: str) -> None:
    asked = {"model": "Qwen/Qwen3-8B", "method": LORA, "card": CARD, "length": 64, "batch": 1} | changed
    found = answer(**asked)
    assert found.verdict.startswith(message)
    assert found == Answer(found.verdict)


def test_folders_of_a_host_are_not_read_for_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    for name in (str(folder), f"{folder.parent.name}/model"):
        found = answer(name, LORA, CARD, 64, 1, is_hosted=True)
        assert found == Answer(f'"{name}" is no model. Give its id on the hub, such as Qwen/Qwen3-8B.')


def test_models_and_cards_are_those_that_are_known() -> None:
    assert {"Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"} <= set(models())
    assert CARDS["GeForce RTX 4090, 23.6 GiB"] == "rtx4090"
    assert "cpu" not in CARDS.values()


def test_a_page_within_the_page_may_only_run_its_script() -> None:
    (name, given), *more = Markup(framed('<p class="a">1 & 2</p>')).elements
    assert (name, given["sandbox"], given["srcdoc"], more) == ("iframe", "allow-scripts", '<p class="a">1 & 2</p>', [])
    assert framed("") == ""


def test_missing_gradio_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    assert main(["ui"]) == 2
    said = capsys.readouterr().err
    assert said == f'hf-ckpt needs gradio, which is not installed. Run: pip install "{ROOT}[ui]"\n'


class StandIn(ModuleType):
    """In the place of Gradio: notes how components and servers are made."""

    def __init__(self) -> None:
        super().__init__("gradio")
        self.made: dict[str, dict[str, Any]] = {}
        self.themes = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **given: self.made.update({name: given}) or self

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def launch(self, **given: Any) -> tuple[None, str, None]:
        self.made["launch"] = given
        return None, "http://there", None


def test_hosted_space_neither_counts_nor_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    gradio = StandIn()
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "True")
    runpy.run_path(str(ROOT / "examples" / "space" / "app.py"))
    assert os.environ["GRADIO_ANALYTICS_ENABLED"] == "False"
    assert gradio.made["Blocks"]["analytics_enabled"] is False
    started = gradio.made["launch"]
    # The host says where it listens.
    assert "server_name" not in started
    assert [started[name] for name in ("share", "run_history", "mcp_server", "enable_monitoring")] == [False] * 4
    fonts = gradio.made["Default"]
    assert {font for fonts in fonts.values() for font in fonts} <= {
        "system-ui",
        "sans-serif",
        "ui-monospace",
        "monospace",
    }


# --- In a browser. ---

# What the process connects to beyond this machine ends it with a word of where.
GUARD = f"""
import os, socket, sys
connect, resolve = socket.socket.connect, socket.getaddrinfo
def guarded(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ({HOST!r}, "::1", "localhost"):
        print("OUTWARD", address, flush=True); os._exit(3)
    return connect(self, address)
def resolved(host, *rest, **more):
    if host not in (None, {HOST!r}, "localhost", b"127.0.0.1"):
        print("OUTWARD", host, flush=True); os._exit(3)
    return resolve(host, *rest, **more)
socket.socket.connect, socket.getaddrinfo = guarded, resolved
from hf_ckpt.cli.main import main
sys.exit(main(["ui"]))
"""


@pytest.fixture
def address() -> Iterator[str]:
    """Of the page, served by a process that may reach nobody else."""
    if importlib.util.find_spec("gradio") is None:
        pytest.skip('needs Gradio: pip install "hf_ckpt[ui]"')
    with subprocess.Popen(
        [sys.executable, "-c", GUARD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ui:
        assert ui.stderr is not None
        told = next((line for line in ui.stderr if line.startswith("Open ")), "")
        try:
            yield told.split()[1]
        finally:
            ui.send_signal(signal.SIGINT)
            out, _ = ui.communicate(timeout=60)
            assert (ui.returncode, out) == (130, "")


@pytest.mark.browser
def test_page_answers_in_a_browser_and_asks_nobody_else(address: str, folder: Path) -> None:
    assert re.fullmatch(rf"http://{re.escape(HOST)}:\d+/", address)
    with Browser() as browser:
        browser.open(address)
        browser.wait_for("document.querySelector('button.primary')?.innerText")
        field = "document.querySelector('input[aria-label=model]')"
        browser.wait_for(f"{field}?.value")
        browser.evaluate(f"{field}.focus()")
        # Focus opens the list of the field; what is typed before that is lost.
        browser.wait_for(f"{field}.ariaExpanded === 'true'")
        browser.evaluate(f"{field}.select()")
        browser("Input.insertText", text=str(folder))
        browser("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13)
        browser.wait_for(f"{field}.ariaExpanded === 'false'")
        assert browser.evaluate(f"{field}.value") == str(folder)
        browser.evaluate("document.querySelector('button.primary').click()")
        browser.wait_for("document.querySelector('iframe')?.srcdoc", seconds=120)
        shown = browser.evaluate("document.body.innerText")
        assert re.search(r"The planner's choice fits on rtx4090: [\d.]+ MiB of 23\.6 GiB\.", shown)
        assert "base_model.model.model.layers: 2 layers" in shown
        assert "policy: auto" in shown
        assert browser.evaluate("document.fonts.size") == 0
        for width in (1280, 390):
            browser("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.complaints == []
        assert browser.asked_elsewhere(HOST) == []
