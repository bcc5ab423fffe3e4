"""The page of `hf-ckpt ui`: fields in, and what `ui_answer` says of them out. Gradio draws and serves it."""

from __future__ import annotations

import os
from html import escape
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.ui_answer import CARDS, METHODS, answer, models

if TYPE_CHECKING:
    import gradio as gr

_TITLE = "hf_ckpt: will it fit, and how fast?"
_ABOUT = "Predicted from the model's config: no GPU, no weights, nothing is run. It takes a few seconds to a minute."
_FIRST = {"model": "meta-llama/Llama-3.1-8B-Instruct", "card": "rtx4090"}
# The reader's own fonts: the usual ones come from a network.
_THEME = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}


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
            card = gr.Dropdown(list(CARDS), value=first_card, label="card", scale=3, min_width=280)
            length = gr.Number(2048, label="length, tokens", precision=0, minimum=1, min_width=120)
            batch = gr.Number(1, label="batch, rows", precision=0, minimum=1, min_width=120)
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
    """Serve the page and return its address.

    Args:
        is_hosted: see `blocks`.
        where: `server_name`, `server_port` and `prevent_thread_lock` of Gradio's `launch`.
    """
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
