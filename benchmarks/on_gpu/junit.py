"""The tests that ran, as a file in the form of JUnit, which other tools read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.journal import Entry, replace_text


def write(cases: Mapping[str, Entry], path: Path) -> None:
    """Write the file; nothing where there are no cases.

    Args:
        cases: entries of the stage `exactness` by the test's name.
        path: of the file.
    """
    if not cases:
        return
    suite = ElementTree.Element("testsuite", name="tests/gpu", tests=str(len(cases)))
    for name, found in cases.items():
        file, _, test = name.partition("::")
        case = ElementTree.SubElement(
            suite, "testcase", classname=file.removesuffix(".py").replace("/", "."), name=test
        )
        case.set("time", str(found.get("took_s", 0.0)))
        outcome = "failed" if "died" in found else found["outcome"]
        if outcome != "passed":
            kind = "skipped" if outcome == "skipped" else "failure"
            text = str(found.get("text") or found.get("died") or "")
            ElementTree.SubElement(case, kind, message=text.strip().rpartition("\n")[2]).text = text
    for kind, attribute in (("failure", "failures"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{kind}"))))
    replace_text(path, ElementTree.tostring(suite, encoding="unicode") + "\n")
