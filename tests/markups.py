"""Markup read by a parser: that elements close in order, what they say, and where they lead."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "hr"}
_LEADING = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "background", "formaction"}


class Markup(HTMLParser):
    """A text read as HTML.

    Attributes:
        elements: (name, attributes) of each element, in order.
        text: what a reader sees, styles and scripts left out.
        wrong: ends that fit no beginning.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []
        self.script = self.style = ""
        self._open: list[str] = []
        self._said: list[str] = []
        self.feed(text)
        self.close()
        self.wrong += [f"<{name}> is not closed" for name in self._open]
        self.text = " ".join(" ".join(self._said).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.wrong.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            self.script += data
        elif inside == "style":
            self.style += data
        else:
            self._said.append(data)

    def count(self, name: str) -> int:
        """Return how many elements have this name."""
        return sum(found == name for found, _ in self.elements)

    def leads_to(self) -> list[str]:
        """Return what is loaded from elsewhere, or named to be followed; places on the page itself are none."""
        found = [value for _, given in self.elements for name, value in given.items() if name in _LEADING and value]
        return [value for value in found if not value.startswith("#")]
