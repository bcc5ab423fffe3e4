"""`hf-ckpt ui`: what `estimate`, `plan` and `init` tell of a model, in a browser on this machine.

Fields in; verdict, plan, recipe and an estimate out. Gradio draws the page and serves it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import threading
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.estimate import page_of
from hf_ckpt.cli.init import recipe_text
from hf_ckpt.cli.model_options import recipe_for
from hf_ckpt.cli.shared_options import HOLDS, Command, command_parser, count, quiet, say
from hf_ckpt.errors import HFCkptError, RecipeError
from hf_ckpt.estimate import tables
from hf_ckpt.recipe.optional_packages import require
from hf_ckpt.recipe.recipe import Training
from hf_ckpt.simulation.devices import CPU, DEVICES

if TYPE_CHECKING:
    import gradio as gr

HOST = "127.0.0.1"

METHODS = {"LoRA": "lora", "QLoRA (4-bit weights)": "qlora", "all weights": "full"}
"""Ways to train, as the page names them."""
CARDS = {
    f"{device.title}, {device.memory_bytes / 2**30:.1f} GiB": name
    for name, device in DEVICES.items()
    if name != CPU.name and device.is_timed
}
"""Devices, as the page names them."""
_RECIPE = Path("my_recipe.yaml")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_TITLE = "hf_ckpt: will it fit, and how fast?"
_ABOUT = "Predicted from the model's config: no GPU, no weights, nothing is run. It takes a few seconds to a minute."
_FIRST = {"model": "meta-llama/Llama-3.1-8B-Instruct", "card": "rtx4090"}
# The reader's own fonts: the usual ones come from a network.
_THEME = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "ui",
        "Ask in a browser whether a model can be trained on a GPU, under which plan,\n"
        "and by which recipe. The page is served to this machine only, loads nothing from\n"
        "elsewhere and counts nobody's clicks. Ctrl-C ends it.",
        epilog="""example:
  pip install ".[ui]"   (in the checkout)
  hf-ckpt ui --port 7860""",
    )
    parser.add_argument("--port", type=count, metavar="N", help="a free one from 7860 on, if left out")
    return parser


def _run(options: argparse.Namespace) -> int:
    require("gradio")
    address = launch(server_name=HOST, server_port=options.port, prevent_thread_lock=True)
    say(f"Open {address} in a browser. Ctrl-C ends it.")
    threading.Event().wait()
    return HOLDS


# --- What is answered. ---


@dataclass(frozen=True)
class Answer:
    """What the page shows."""

    verdict: str  # With the peak; or why there is none.
    plan: str = ""  # What each layer does.
    recipe: str = ""  # YAML, as `hf-ckpt init` writes it.
    page: str = ""  # HTML, as `hf-ckpt estimate --html` writes it.


def models() -> list[str]:
    """Return the models whose shapes come with the package."""
    # Imports huggingface_hub, which not every command waits for.
    from hf_ckpt.loading.config_files import known_configs

    return sorted(known_configs(), key=str.lower)


def answer(
    model: str | None, method: str, card: str, length: float | None, batch: float | None, *, is_hosted: bool = False
) -> Answer:
    """Return what is predicted of a model, by its id on the hub or its folder, or why nothing can be.

    `method` and `card`: of `METHODS` and `CARDS`. `length`, `batch`: tokens of the longest row, rows of a micro-batch.
    `is_hosted`: whether others ask: folders of this machine are not theirs.
    """
    try:
        training = Training(method=METHODS[method], length=_whole("length", length), batch=_whole("batch", batch))
        name = _model(model, is_hosted=is_hosted)
        with quiet():
            return _answer(name, training, CARDS[card])
    except HFCkptError as error:
        return Answer(str(error))


def _whole(name: str, number: float | None) -> int:
    if number is None or number < 1 or number != int(number):
        raise RecipeError(f"{name} is {'left out' if number is None else number}. Give a whole number of 1 or more.")
    return int(number)


def _model(written: str | None, *, is_hosted: bool) -> str:
    name = (written or "").strip()
    is_folder = not is_hosted and Path(name).is_dir()
    if not name or not (is_folder or (_HUB_ID.fullmatch(name) and not Path(name).exists())):
        or_folder = "" if is_hosted else ", or a folder with a config.json"
        raise RecipeError(f'"{name}" is no model. Give its id on the hub, such as Qwen/Qwen3-8B{or_folder}.')
    return name


def _answer(model: str, training: Training, device: str) -> Answer:
    from hf_ckpt.estimate import estimate as estimates
    from hf_ckpt.estimate.estimate import estimate_as_json
    from hf_ckpt.estimate.predict import devices_for
    from hf_ckpt.estimate.step_of_recipe import subject_of

    recipe = recipe_for(training, model)
    found = estimates.estimate(subject_of(recipe), devices_for(recipe, [device]), lambda _: None, estimates.QUICK)
    document = estimate_as_json(found)
    _, row = next(iter(found.deciding()))
    plan = None if row.memory is None else row.memory.plan
    advice = "".join(f"\n\n{text}" for text in tables.on_cached_blocks(document))
    return Answer(
        f"{tables.verdict(document)}{advice}",
        row.refusal if plan is None else plan.summary(),
        recipe_text(recipe, _RECIPE),
        page_of(found, document, shlex.split(command(model, training, device))[1:]).html() if found.steps() else "",
    )


def command(model: str, training: Training, device: str) -> str:
    """Return the command that gives the same answer."""
    method = f"--{training.method}" + ("" if training.method == "full" else f" {training.rank}")
    sizes = f"--length {training.length} --batch {training.batch}"
    return f"hf-ckpt estimate {shlex.quote(model)} {method} {sizes} --device {device} --quick"


# --- The page. ---


def blocks(*, is_hosted: bool = False) -> gr.Blocks:
    """Return the page; `is_hosted`: for others than this machine's user."""
    # Gradio looks at it when it is imported, and sends figures of use where it is not set.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio as gr

    def ask(*asked: Any) -> tuple[str, str, str, str]:
        found = answer(*asked, is_hosted=is_hosted)
        return f"## {found.verdict}", found.plan, found.recipe, framed(found.page)

    first_card = next(card for card, name in CARDS.items() if name == _FIRST["card"])
    with gr.Blocks(title=_TITLE, analytics_enabled=False) as page:
        gr.Markdown(f"# {_TITLE}\n{_ABOUT}")
        with gr.Row():
            model = gr.Dropdown(
                models(), value=_FIRST["model"], label="model", allow_custom_value=True, scale=3, min_width=300
            )
            method = gr.Dropdown(list(METHODS), label="method", scale=2, min_width=240)
            card = gr.Dropdown(list(CARDS), value=first_card, label="GPU", scale=3, min_width=280)
            length = gr.Number(2048, label="length, tokens", precision=0, minimum=1, min_width=120)
            batch = gr.Number(1, label="batch size", precision=0, minimum=1, min_width=120)
        button = gr.Button("Ask", variant="primary")
        verdict = gr.Markdown()
        with gr.Row(equal_height=False):
            plan = gr.Code(label="plan", interactive=False, lines=1, show_line_numbers=False, wrap_lines=True)
            recipe = gr.Code(label="recipe", language="yaml", interactive=False, lines=1, show_line_numbers=False)
        picture = gr.HTML()
        asked = [model, method, card, length, batch]
        button.click(ask, asked, [verdict, plan, recipe, picture], api_visibility="private")
    return page


def framed(page: str) -> str:
    """Return a page within a page, with its own rules; it may run its script and load nothing."""
    if not page:
        return ""
    return (
        f'<iframe title="answer" sandbox="allow-scripts" srcdoc="{escape(page)}" '
        'style="width: 100%; height: 75rem; border: 0"></iframe>'
    )


def launch(*, is_hosted: bool = False, **where: Any) -> str:
    """Serve the page and return its address. `where`: options of Gradio's `launch`."""
    with quiet():
        # Torch and transformers take seconds, which those who ask do not have to wait for.
        importlib.import_module("hf_ckpt.estimate.estimate")
    page = blocks(is_hosted=is_hosted)
    import gradio as gr

    _, address, _ = page.launch(
        theme=gr.themes.Default(**_THEME),
        share=False,
        inbrowser=False,
        quiet=True,
        run_history=False,
        footer_links=[],
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        **where,
    )
    return str(address)


UI = Command(_parser, _run, "ask for an estimate, a plan and a recipe in a browser")
