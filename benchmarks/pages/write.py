"""The page, its tables and the pictures as files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages.case_tables import tables
from benchmarks.pages.drawing import digest_in, digest_of
from benchmarks.pages.page import ORDER, page
from benchmarks.pages.pictures import pictures
from benchmarks.pages.results import read_all

PAGE = "benchmarks.md"
_OURS = ("benchmarks-*.png", "readme-*.png")


def write(results: Path, docs: Path, *, is_all: bool = False) -> list[Path]:
    """Write the page, its tables and the pictures that are stale; remove pictures that nothing draws any more.

    Args:
        results: folder of the JSONs.
        docs: folder of the page; the pictures go to `images` below it, the tables to `data`.
        is_all: draw pictures that are up to date too.

    Returns:
        What was written.
    """
    read = read_all(results, ORDER)
    images = docs / "images"
    images.mkdir(parents=True, exist_ok=True)
    wanted = {images / picture.name: picture for picture in pictures(read)}
    for old in sorted(path for pattern in _OURS for path in images.glob(pattern)):
        if old not in wanted:
            old.unlink()
    written = []
    for path, picture in wanted.items():
        if is_all or not path.is_file() or digest_in(path) != digest_of(picture.data):
            picture.draw(picture.data, path)
            written.append(path)
    (docs / PAGE).write_text(page(read), encoding="utf-8")
    (docs / "data").mkdir(exist_ok=True)
    for name, text in tables(read).items():
        (docs / "data" / name).write_text(text, encoding="utf-8")
        written.append(docs / "data" / name)
    return [*written, docs / PAGE]
