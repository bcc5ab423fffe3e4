"""The docs site: what can be seen without building it; and, where the extra `docs` is installed, what is built."""

from __future__ import annotations

import html
import importlib.util
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import docs_site
from tests.browsing import Browser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    return found


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    docs_site.stage(folder)
    return folder


def named(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for place in entry.values():
            yield from named(place) if isinstance(place, list) else (place,)


def test_every_page_is_in_the_navigation_once_and_there(config: dict[str, Any], staged: Path) -> None:
    names = list(named(config["nav"]))
    assert len(names) == len(set(names))
    assert [name for name in names if not (staged / name).is_file()] == []
    assert {page.relative_to(DOCS).as_posix() for page in PAGES} <= set(names)


def test_every_public_name_is_in_the_reference() -> None:
    import hf_ckpt

    shown = re.findall(
        r"^::: hf_ckpt\.(?:verify\.run\.)?(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(shown) == sorted(set(hf_ckpt.__all__) - {"__version__"})


def test_no_font_is_loaded_from_elsewhere(config: dict[str, Any]) -> None:
    assert config["theme"]["font"] is False
    # Left out, the plugin loads one from a network.
    assert config["extra"]["polyfills"] == ["iframe-worker.js"]


def places_of(page: Path) -> set[str]:
    """The anchors of a page: of its headings, as GitHub and the site make them, and those that it names itself."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_anchors_of_links_are_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    targets = [((page.parent / name).resolve() if name else page, anchor) for name, anchor in links]
    assert [(path.name, anchor) for path, anchor in targets if anchor not in places_of(path)] == []


def test_what_pages_link_comes_along(staged: Path) -> None:
    result = "repository/benchmarks/results/estimate_llama7b_lora.json"
    assert (staged / result).read_bytes() == (ROOT / result.removeprefix("repository/")).read_bytes()
    assert f"]({result})" in (staged / "index.md").read_text(encoding="utf-8")
    assert f"](../{result})" in (staged / "how_to" / "it_is_slow.md").read_text(encoding="utf-8")
    # A folder has no page.
    assert "are in examples/:" in (staged / "coming_from.md").read_text(encoding="utf-8")
    for page in staged.rglob("*.md"):
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
        assert [link for link in links if not (page.parent / link).is_file()] == [], page.name


@pytest.mark.parametrize(
    ("element", "complaint"),
    [
        ('<script src="https://cdn.example.org/x.js"></script>', "page.html loads https://cdn.example.org/x.js"),
        ('<link rel="stylesheet" href="//fonts.example.org/f">', "page.html loads //fonts.example.org/f"),
        ('<link rel="preconnect" href="https://f.example.org">', "page.html loads https://f.example.org"),
        ("<style>@import 'https://example.org/x.css'</style>", "page.html loads https://example.org/x.css"),
        ('<p style="background: url(https://example.org/x.png)">', "page.html loads https://example.org/x.png"),
        ('<a href="other.html">', "page.html leads to other.html, which is not there"),
        ('<a href="#below">', "page.html leads to #below, which is not there"),
    ],
)
def test_what_is_wrong_with_a_page_is_found(tmp_path: Path, element: str, complaint: str) -> None:
    (tmp_path / "page.html").write_text(
        '<link rel="icon" href="icon.png"><a href="https://example.org"></a><a href="page.html#here" id="here"></a>'
    )
    (tmp_path / "icon.png").touch()
    assert docs_site.wrong(tmp_path) == []
    with (tmp_path / "page.html").open("a") as page:
        page.write(element)
    assert docs_site.wrong(tmp_path) == [complaint]


def test_what_a_style_loads_is_found(tmp_path: Path) -> None:
    (tmp_path / "site.css").write_text(
        "a { background: url(data:image/png;base64,) } b { src: url('https://x.org/f') }"
    )
    assert docs_site.wrong(tmp_path) == ["site.css loads https://x.org/f"]


# --- What is built. ---


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, built strictly and whole."""
    if not all(map(importlib.util.find_spec, ("zensical", "mkdocstrings"))):
        pytest.skip("needs the extra `docs`: make site builds the site and runs this")
    assert docs_site.main() == 0
    return Path(docs_site.SITE)


def test_pages_load_nothing_and_lead_somewhere(site: Path) -> None:
    assert docs_site.wrong(site) == []
    assert {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")} >= {
        page.relative_to(DOCS).as_posix() for page in PAGES
    }
    reference = (site / "api.html").read_text(encoding="utf-8")
    assert "what a whole step may use of the device" in reference
    assert "the rules; no layer may be reached by two of them" in reference
    # Options are shown as options.
    text = re.sub(r"<[^>]*>", "", reference)
    assert "HFCkptCallback(policy, *, quiet=False, memory_budget=None, max_length=None, exact=None," in text
    assert "strict_resume=False, on_oom=None, quiet_steps=50, prove='first_step')" in html.unescape(text)
    assert "names and types of all these options" not in text


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_site_is_read_in_a_browser_without_a_network(site: Path, tmp_path: Path, width: int) -> None:
    moved = shutil.copytree(site, tmp_path / "site")
    with Browser() as browser:
        browser.open((moved / "index.html").as_uri(), width)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert "It does not fit" in browser.evaluate("document.body.innerText")
        # Search runs as it does for a reader who opened the folder.
        browser.evaluate("document.querySelector('.md-search__button').click()")
        browser.wait_for("document.activeElement.shadowRoot?.activeElement?.tagName === 'INPUT'")
        browser("Input.insertText", text="chunked")
        browser.wait_for("/\\d+ results/.test(document.activeElement.shadowRoot.textContent)")
        assert browser.complaints == []
        assert [url for url in browser.requested if not url.startswith(("file:", "data:"))] == []
