"""The page of an estimate: one file that shows the answer, loads nothing, and works in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_ckpt.cli.main import main
from hf_ckpt.estimate import html_page, plots
from tests import small_recipes
from tests.conftest import CHROMIUM
from tests.markups import Markup

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

SCRIPT = Path(html_page.__file__).with_name("html_page.js")


@pytest.fixture(scope="module")
def folder(remembered_simulations: None) -> Iterator[Path]:
    """A folder with the pages of an estimate and of a plan."""
    with tempfile.TemporaryDirectory() as name:
        made = Path(name)
        recipe = str(small_recipes.write(made))
        wanted = [recipe, "--device", "rtx4090", "--no-cache", "--html"]
        assert main(["estimate", *wanted, str(made / "estimate.html")]) == 0
        assert main(["plan", *wanted, str(made / "plan.html")]) == 0
        yield made


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_page_shows_the_answer_and_loads_nothing(folder: Path, command: str) -> None:
    text = (folder / f"{command}.html").read_text(encoding="utf-8")
    read = Markup(text)
    assert (read.wrong, read.leads_to()) == ([], [])
    assert [name for name, _ in read.elements if name in ("link", "img", "iframe", "object", "base")] == []
    assert "@import" not in read.style
    assert "url(" not in read.style
    assert re.findall(r"fetch|XMLHttpRequest|WebSocket|import\b|https?:", read.script) == []
    # The only address is the name of SVG's kind of elements.
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert f"hf-ckpt {command} {folder}" in read.text
    assert "fits on rtx4090" in read.text
    for headed in ("Time against memory", "Memory over the step", "The plan", "What layers hold", "The command"):
        assert headed in read.text
    assert f"--html {folder / command}.html" in read.text


def test_each_row_of_the_table_has_its_mark(folder: Path) -> None:
    read = Markup((folder / "estimate.html").read_text(encoding="utf-8"))
    rows = [given["data-row"] for name, given in read.elements if name == "tr" and "data-row" in given]
    marks = {given["data-row"]: given["data-said"] or "" for name, given in read.elements if name == "circle"}
    assert len(rows) > 10
    assert set(rows) <= set(marks)
    assert re.fullmatch(r"recipe: peak [\d.]+ MiB, a step in [\d.]+ ms; it fits", marks["0"] or "")


def test_the_script_is_short() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "--html", "page.html"], "--html shows an estimate. Leave out --html, or --grid"),
        (["--html", "no/such/page.html"], "--html no/such/page.html: there is no folder"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["estimate", str(small_recipes.write(tmp_path)), *words]) == 2
    assert message in capsys.readouterr().err


# --- In a browser. ---


def in_a_browser(path: Path) -> tuple[str, list[str]]:
    """Return the page as it is when its scripts have run, and what they and the page's rules complained of."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)))
    # Without a sandbox, which needs rights that a container does not give; the page is our own.
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [browser, *flags, f"--user-data-dir={profile}", "--dump-dom", path.as_uri()],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.browser
def test_pointing_at_a_mark_says_what_its_plan_needs(folder: Path, tmp_path: Path) -> None:
    text = (folder / "estimate.html").read_text(encoding="utf-8")
    point = "document.querySelector('circle[data-row=\"2\"]').dispatchEvent(new PointerEvent('pointerenter'));"
    path = tmp_path / "pointed.html"
    path.write_text(text.replace("</body>", f"<script>{point}</script></body>"), encoding="utf-8")
    shown, complaints = in_a_browser(path)
    assert complaints == []
    read = Markup(shown)
    (mark,) = [given for name, given in read.elements if name == "circle" and given.get("data-row") == "2"]
    assert mark["class"] == "point marked"
    said = re.search(r'id="said"[^>]*>([^<]*)<', shown)
    assert said is not None
    assert said[1] == mark["data-said"]
    assert said[1].startswith("full: peak ")


@pytest.mark.browser
def test_what_a_page_would_load_is_forbidden(folder: Path, tmp_path: Path) -> None:
    text = (folder / "plan.html").read_text(encoding="utf-8")
    assert in_a_browser(folder / "plan.html")[1] == []
    path = tmp_path / "loading.html"
    path.write_text(text.replace("</body>", '<img src="https://example.org/x.png"></body>'), encoding="utf-8")
    (complaint,) = in_a_browser(path)[1]
    assert "Content Security Policy" in complaint


def test_labels_of_pictures_are_at_least_10_pixels_on_a_phone() -> None:
    style = (Path(html_page.__file__).parent / "html_page.css").read_text(encoding="utf-8")
    phone = style.partition("@media (max-width: 36rem)")[2].partition("\n}\n")[0]
    size = float(re.findall(r"svg text.*?font-size: (\d+)px", phone)[0])
    # The page has a rem of padding at each side.
    assert size * (390 - 2 * 16) / plots.WIDTH >= 10
