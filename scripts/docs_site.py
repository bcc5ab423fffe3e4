"""The docs site, from docs/ and from the files that its pages link.

    python scripts/docs_site.py

Pages lead to files outside of docs/: results, recipes, scripts. They are copied, so that the site is whole wherever it
lies, and Markdown among them becomes pages too. zensical.toml says what stands where. Needs the extra `docs`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
DOCS, PAGES, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "build" / "site"
BESIDE = "repository"
"""The folder of the site where files from outside of docs/ are."""

_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
_LOADING = {"src", "srcset", "poster", "data", "background"}
_LOADING_LINKS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "modulepreload",
    "manifest",
}
_STYLE_URL = re.compile(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)")


# --- Pages. ---


def stage(folder: Path = PAGES) -> None:
    """Copy docs/ into a folder, with what its pages link to outside of it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=lambda _, names: [name for name in names if name.endswith(".md")])
    waiting = sorted(DOCS.rglob("*.md"))
    seen = set(waiting)
    for path in waiting:
        place = folder / placed(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copyfile(path, place)
            continue
        text, linked = with_links(path)
        place.write_text(text, encoding="utf-8")
        waiting += [other for other in linked if other not in seen]
        seen.update(linked)


def placed(path: Path) -> Path:
    """Return where a file of the repository is in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    return Path(BESIDE) / path.relative_to(ROOT)


def with_links(path: Path) -> tuple[str, list[Path]]:
    """Return the text of a page with its links as they are in the site, and the files that it links.

    A folder has no page: its link becomes plain text.
    """
    text = path.read_text(encoding="utf-8")
    linked: list[Path] = []

    def link(found: re.Match[str]) -> str:
        name, _, anchor = found["target"].partition("#")
        if not name or urlsplit(name).scheme:
            return found[0]
        target = (path.parent / name).resolve()
        if target.is_dir():
            return found["text"][1:-1]
        linked.append(target)
        relative = os.path.relpath(placed(target), placed(path).parent)
        return f"{found['text']}({Path(relative).as_posix()}{'#' if anchor else ''}{anchor})"

    parts, end = [], 0
    for code in _CODE.finditer(text):
        # The text of a link may be code.
        if code[0].startswith("```"):
            parts += [_LINK.sub(link, text[end : code.start()]), code[0]]
            end = code.end()
    return "".join([*parts, _LINK.sub(link, text[end:])]), linked


# --- What is built. ---


class Read(HTMLParser):
    """What a page loads by itself, what it leads to, and the places in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads_to: list[str] = []
        self.places: set[str] = set()
        self._within = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort what an element names."""
        given = {name: value or "" for name, value in attrs}
        self._within = tag
        self.places.update(filter(None, (given.get("id"), given.get("name"))))
        self.loads += [given[name] for name in _LOADING & given.keys()]
        self.loads += _STYLE_URL.findall(given.get("style", ""))
        if tag == "link" and _LOADING_LINKS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        elif tag == "a" and "href" in given:
            self.leads_to.append(given["href"])

    def handle_data(self, data: str) -> None:
        """Find what a style loads."""
        if self._within == "style":
            self.loads += _STYLE_URL.findall(data)


def wrong(site: Path = SITE) -> list[str]:
    """Return what pages load from elsewhere, and links within the site that lead nowhere."""
    pages = {path.resolve(): Read(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = [
        f"{path.relative_to(site)} loads {url}"
        for path in sorted(site.rglob("*.css"))
        for url in _STYLE_URL.findall(path.read_text(encoding="utf-8"))
    ]
    for path, page in sorted(pages.items()):
        name = path.relative_to(site.resolve())
        found += [f"{name} loads {url}" for url in page.loads if urlsplit(url).netloc]
        # The page for what is not found is shown anywhere, so that its links are from the root.
        if name.name != "404.html":
            found += [f"{name} leads to {url}, which is not there" for url in _lost(path, page, pages)]
    return found


def _lost(path: Path, page: Read, pages: dict[Path, Read]) -> Iterator[str]:
    for url in [*page.loads, *page.leads_to]:
        parts = urlsplit(url)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        target = target / "index.html" if target.is_dir() else target
        places = pages[target].places if target in pages else set()
        if not target.is_file() or (parts.fragment and target in pages and unquote(parts.fragment) not in places):
            yield url


def main() -> int:
    """Build the site, strictly, and look at what was built."""
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "zensical.toml"],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        check=False,
    )
    if built.returncode:
        return built.returncode
    print(*(complaints := wrong()), sep="\n", end="\n" if complaints else "")
    print(f"{len(list(SITE.rglob('*.html')))} pages: {SITE / 'index.html'}")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
