"""`hf-ckpt ui`: what `estimate`, `plan` and `init` tell of a model, in a browser on this machine."""

from __future__ import annotations

import argparse
import threading

from hf_ckpt.cli.exit_codes import HOLDS
from hf_ckpt.cli.shared_options import Command, count, quiet, say
from hf_ckpt.recipe.optional_packages import require

HOST = "127.0.0.1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-ckpt ui",
        allow_abbrev=False,
        description="Ask in a browser whether a model can be trained on a card, under which plan,\n"
        "and by which recipe. The page is served to this machine only, loads nothing from\n"
        "elsewhere and counts nobody's clicks. Ctrl-C ends it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""example:
  pip install "hf_ckpt[ui]"
  hf-ckpt ui --port 7860""",
    )
    parser.add_argument("--port", type=count, metavar="N", help="a free one from 7860 on, if left out")
    return parser


def _run(options: argparse.Namespace) -> int:
    require("gradio")
    with quiet():
        from hf_ckpt.cli.ui_page import launch

    address = launch(server_name=HOST, server_port=options.port, prevent_thread_lock=True)
    say(f"Open {address} in a browser. Ctrl-C ends it.")
    threading.Event().wait()
    return HOLDS


UI = Command(_parser, _run, "ask for an estimate, a plan and a recipe in a browser")
