"""Each figure of a document has a result behind it, or is marked as given; and the rule itself is held to that."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.doc_figures import ROOT, Report, blocks_of, check, documents, figures_of, main, unit_of_label

RESULT = {
    "environment": {"hardware": {"memory_gib": 99}},
    "device": "h100-80gb",
    "step": {"batch_size": 2, "seq_length": 65536},
    "num_over_budget": 7,
    "none": {
        "peak_bytes": 30678206464,
        "seconds": {"total": 13.3652},
        "num_flops": {"forward": 4.7e14},
        "tokens_per_sec_per_gpu": 2451.7,
        "held_ratio": 0.5303,
        "time_ratio": 1.143,
    },
    "by_category": {"temporary": 524288},
    "step_time_ms": {"median": 1857.56, "min": 1584.39},
    "published": {"24": 78475},
    "timeline": [[0.5, 77 * 2**30]],
}
LINK = "([result](../benchmarks/results/one.json))"
OTHER = "([result](../benchmarks/results/other.json))"


def report(folder: Path, text: str) -> Report:
    """What is said of a document beside a folder with two results."""
    results, document = folder / "benchmarks" / "results", folder / "docs" / "page.md"
    results.mkdir(parents=True, exist_ok=True)
    document.parent.mkdir(exist_ok=True)
    (results / "one.json").write_text(json.dumps(RESULT))
    (results / "other.json").write_text(json.dumps({"peak_gib": 11.25}))
    document.write_text(text)
    return check(document, folder)


def failures(folder: Path, text: str) -> list[str]:
    return report(folder, text).failures


@pytest.mark.sweep(keep=1000)
@pytest.mark.parametrize("path", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_figures_of_document_are_in_its_results(path: Path) -> None:
    assert "\n".join(check(path).failures) == ""


def test_documents_are_all_that_users_read() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in documents()}
    assert {"README.md", "docs/memory.md", "docs/long_context.md"} <= names
    assert names >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_known_figures_are_seen() -> None:
    # A rule that sees none would let everything through.
    assert check(ROOT / "docs" / "long_context.md").num_figures >= 100
    assert check(ROOT / "README.md").num_figures >= 15
    assert check(ROOT / "docs" / "policies.md").num_figures >= 30


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a peak of 28.6 GiB and 13.4 s", ["28.6 GiB", "13.4 s"]),
        ("53 % or 53% or 53 percent", ["53 %", "53 %", "53 percent"]),
        ("2,048, 4,096 and 8,192 tokens", ["2,048 tokens", "4,096 tokens", "8,192 tokens"]),
        ("8 to 12 times less, 8-12x", ["8 times", "12 times", "8 x", "12 x"]),
        ("2k to 64k tokens, rows of 512-token text", ["2k tokens", "64k tokens", "512 token"]),
        ("+14.3% and -2 %", ["+14.3 %", "-2 %"]),
        ("x 1.23", ["x 1.23"]),
        ("**33** %, **34 %**", ["33 %", "34 %"]),
        ("12&nbsp;GiB", []),
        ("1,234 tokens per second at 700 TFLOP/s", ["1,234 tokens per second", "700 TFLOP/s"]),
        ("4 billion operations", ["4 billion operations"]),
        ("4,8 GiB", ["8 GiB"]),
        ("2 x 8 GPUs, 2 times 3, 2**30 bytes, H100, 4-bit, 7B, torch 2.13, layers 0 to 3, 1e-6", []),
    ],
)
def test_number_with_a_unit_is_a_figure(text: str, shown: list[str]) -> None:
    assert [figure.shown for figure in figures_of(text)] == shown


@pytest.mark.parametrize(
    ("label", "factor"),
    [("peak, GiB", 2**30), ("step (ms)", 1e-3), ("tokens", 1), ("held in MiB", 2**20), ("saved %", 0.01)],
)
def test_label_ends_in_a_unit(label: str, factor: float) -> None:
    unit = unit_of_label(label)
    assert unit is not None
    assert unit.factor == factor


@pytest.mark.parametrize("label", ["step times", "operations", "longest row in 24 GiB", "at 16,384 tokens", "layers"])
def test_label_without_a_unit_of_its_column(label: str) -> None:
    assert unit_of_label(label) is None


@pytest.mark.parametrize(
    "shown",
    [
        *("28.6 GiB", "28.57 GiB", "29 GiB", "30.7 GB", "29,257 MiB", "30,678,206,464 bytes", "0.5 MiB", "512 KiB"),
        *("13.4 s", "13,365 ms", "0.22 minutes", "1,858 ms", "1.86 s", "1,584 ms"),
        *("53 %", "53.0 %", "0.53 times", "+14 %", "-47 %", "1.14x", "114 %"),
        *("65,536 tokens", "64k tokens", "66k tokens", "78,475 tokens", "2,452 tokens per second"),
        *("470 TFLOPs", "470 trillion operations", "80 GB"),
    ],
)
def test_figure_that_the_result_holds_passes(tmp_path: Path, shown: str) -> None:
    assert report(tmp_path, f"It is {shown} {LINK}.") == Report(num_figures=1)


@pytest.mark.parametrize(
    "shown",
    [
        # Another rounding, another unit, another sign.
        *("28.5 GiB", "28.60 GiB", "28.6 GB", "28 GiB", "13.3 s", "13.4 ms", "54 %", "-14 %", "+53.1 %", "14 %"),
        # Numbers that are there, of something else: bytes, a length, a count, a time, a rate.
        *("65,536 bytes", "2.00 times", "700 %", "13.3652 times", "2,452 tokens", "524,288 ms", "7 times"),
        # What is no result: points of curves, and the machine.
        *("77 GiB", "50 %", "99 GiB"),
    ],
)
def test_figure_that_the_result_does_not_hold_fails(tmp_path: Path, shown: str) -> None:
    (failure,) = failures(tmp_path, f"It is {shown} {LINK}.")
    assert " is not in one.json" in failure


def test_failure_names_place_figure_nearest_number_and_what_to_do(tmp_path: Path) -> None:
    assert failures(tmp_path, f"# Page\n\nText.\nIt is\n28.5 GiB {LINK}.\n") == [
        "docs/page.md:3: 28.5 GiB is not in one.json; nearest is 28.5713 GiB (none/peak_bytes). Show what is there, or "
        "link what holds it. If it is not ours, write <!-- given 28.5 GiB: reason --> above the paragraph."
    ]
    assert failures(tmp_path, "- It is 28.6 GiB.") == [
        "docs/page.md:1: 28.6 GiB has no result behind it: no part of this item links a file of benchmarks/results/. "
        "Link one. If it is not ours, write <!-- given 28.6 GiB: reason --> above the item."
    ]
    assert failures(tmp_path, "It is 11.2 GiB ([result](../benchmarks/results/gone.json)).") == [
        "docs/page.md:1: 11.2 GiB is said to be in gone.json, which is not there."
    ]
    (failure,) = failures(tmp_path, f"It took 3 s {OTHER}.")
    assert "is not in other.json, where no key names a number of seconds." in failure


def test_another_block_s_link_does_not_help(tmp_path: Path) -> None:
    assert len(failures(tmp_path, f"Linked {LINK}.\n\nIt is 28.6 GiB.")) == 1
    assert len(failures(tmp_path, f"- Linked {LINK}.\n- It is 28.6 GiB.\n- As is\n  28.6 GiB {LINK}.")) == 1
    assert len(failures(tmp_path, f"Linked {LINK}:\n> It is 28.6 GiB.")) == 1
    assert failures(tmp_path, f"> Linked {LINK}.\n> It is 28.6 GiB.") == []
    assert failures(tmp_path, f"Two {OTHER} {LINK}: 28.6 GiB and 11.3 GiB.") == []


def test_links_elsewhere_and_in_code_or_comments_are_none(tmp_path: Path) -> None:
    for link in ("[r](../benchmarks/one.json)", "[r](https://x.org/benchmarks/results/one.json)", f"`{LINK}`"):
        assert len(failures(tmp_path, f"It is 28.6 GiB {link}.")) == 1
    assert len(failures(tmp_path, f"It is 28.6 GiB <!-- {LINK} -->.")) == 1


def test_code_headings_comments_and_targets_hold_no_figures(tmp_path: Path) -> None:
    text = (
        "# 99 GiB\n\n```text\n99 GiB\n\n99 s\n```\n\n- item\n  ```sh\n  99 GiB\n  ```\n\n<!-- 99 GiB\n\n99 s -->\n\n"
        "`99GiB` <!-- 99 GiB --> [text](https://x.org/99%20GiB) https://x.org/99% `memory_budget=99 GiB`"
    )
    assert report(tmp_path, text) == Report()


@pytest.mark.parametrize(
    "text",
    [
        *("`28.6 GiB`", "28.6&nbsp;GiB", "28.6\nGiB", "[28.6 GiB](page.md)", "![28.6 GiB](a.png)", "**28.6** GiB"),
        *(
            "<b>28.6 GiB</b>",
            "<!-- a --> 28.6 GiB",
            "<!-- a\nb --> 28.6 GiB",
            "<!-- given: x --> 28.6 GiB",
            "1. 28.6 GiB",
            "`<!--` 28.6 GiB `-->`",
            "<!-- ` --> 28.6 GiB <!-- ` -->",
        ),
    ],
)
def test_figure_cannot_hide(tmp_path: Path, text: str) -> None:
    assert len(failures(tmp_path, text)) == 1


# --- Tables. ---

TABLE = f"""\
Text {LINK}:

<!-- a comment parts nothing -->

| policy | peak | step, s | held | tokens |
| --- | --- | --- | --- | --- |
| `none`, layer 16 | **28.6 GiB** | 13.4 | 0.53 | 78,475 |
"""


def test_table_has_the_link_of_the_paragraph_next_to_it(tmp_path: Path) -> None:
    before = report(tmp_path, TABLE)
    assert before == Report(num_figures=4)
    table = TABLE.partition("\n\n")[2]
    assert report(tmp_path, f"{table}\nText {LINK}.") == before
    assert len(failures(tmp_path, f"{table}\n## Heading\n\nText {LINK}.")) == 4
    assert len(failures(tmp_path, f"Text {LINK}.\n\nText.\n\n{table}")) == 4


@pytest.mark.parametrize(
    ("found", "wrong", "message"),
    [
        ("28.6", "28.5", "docs/page.md:7: 28.5 GiB is not in one.json; nearest is 28.5713 GiB (none/peak_bytes)."),
        ("13.4", "14", "docs/page.md:7: 14 is not in one.json; nearest is 13.3652 (none/seconds/total)."),
        ("0.53", "0.54", "docs/page.md:7: 0.54 is not in one.json; nearest is 0.5303 (none/held_ratio)."),
        ("78,475", "78,470", "docs/page.md:7: 78,470 is not in one.json; nearest is 78,475 (published/24)."),
        ("0.53", "0.54 (counted)", "docs/page.md:7: 0.54 is not in one.json; nearest is 0.5303 (none/held_ratio)."),
    ],
)
def test_each_cell_is_held_against_the_result(tmp_path: Path, found: str, wrong: str, message: str) -> None:
    (failure,) = failures(tmp_path, TABLE.replace(found, wrong))
    assert failure.startswith(message)


def test_label_of_a_row_gives_the_unit_too(tmp_path: Path) -> None:
    text = f"| at the peak {LINK} | small |\n| --- | --- |\n| step (ms) | 1,858 |\n| layers | 33 |\n"
    assert report(tmp_path, text) == Report(num_figures=1)


def test_row_with_a_link_is_held_against_that_alone(tmp_path: Path) -> None:
    text = f"| case | peak |\n| --- | --- |\n| one {LINK} | 28.6 GiB |\n| other {OTHER} | 11.3 GiB |\n"
    assert failures(tmp_path, text) == []
    (failure,) = failures(tmp_path, f"Text {LINK}:\n\n" + text.replace("11.3", "28.6"))
    assert "docs/page.md:6: 28.6 GiB is not in other.json" in failure


# --- Marks. ---


def test_mark_says_that_a_block_is_not_ours(tmp_path: Path) -> None:
    text = "<!-- given: what the card has -->\n\n<!-- another comment -->\nA card of 24 GB.\n\n"
    assert report(tmp_path, text) == Report(num_figures=1, num_given=1)
    assert len(failures(tmp_path, f"{text}Another of 24 GB.")) == 1


def test_mark_names_figures_or_columns(tmp_path: Path) -> None:
    text = f"Cards of 24 and 48 GB hold 28.6 GiB {LINK}."
    assert report(tmp_path, f"<!-- given 24 and 48 GB: cards -->\n{text}") == Report(num_figures=3, num_given=2)
    (failure,) = failures(tmp_path, f"<!-- given 24 GB: a card -->\n{text}")
    assert "48 GB is not in one.json" in failure
    table = f"| claim | `ours` |\n| --- | --- |\n| saves 60 to 80 % | 53 % {LINK} |\n"
    assert report(tmp_path, f'<!-- given "claim": they say so -->\n{table}') == Report(num_figures=3, num_given=2)
    assert len(failures(tmp_path, f'<!-- given "`ours`": they say so -->\n{table}')) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- given: -->\n24 GB.", "docs/page.md:1: the mark has no reason. Write <!-- given: reason -->."),
        ("<!-- given -->\n24 GB.", "docs/page.md:1: the mark has no reason. Write <!-- given: reason -->."),
        (
            f"<!-- given: a card -->\nIt is 24 GB, ours 28.6 GiB {LINK}.",
            "docs/page.md:1: the mark gives away a whole paragraph that links one.json. Name what is given: "
            '<!-- given 24 GB: reason -->, or columns of a table: <!-- given "source": reason -->.',
        ),
        (
            '<!-- given 25 GB, "said": a card -->\n| what | is |\n| --- | --- |\n| card | 24 GB |',
            'docs/page.md:1: the mark names column "said", 25 GB, and the table has none. Name what is shown there.',
        ),
        (
            "<!-- given our words: a card -->\nIt is 24 GB.",
            "docs/page.md:1: the mark names neither a figure nor a column in quotes before its colon.",
        ),
        (
            "<!-- given: a card -->\n\n## Cards",
            "docs/page.md:1: the mark stands above no paragraph, list item, quote or table. Put it right above one.",
        ),
        (
            "Text.\n\n<!-- given: a card -->\n",
            "docs/page.md:3: the mark stands above no paragraph, list item, quote or table. Put it right above one.",
        ),
    ],
)
def test_mark_that_says_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert failures(tmp_path, text)[0] == message


def test_blocks_are_those_of_markdown() -> None:
    text = "# A\nb\nc\n- d\n  e\n- f\n\n> g\nh\n| i |\n| - |\n---\n~~~\n- j\n~~~\nk"
    kinds = [(block.kind, block.line, len(block.lines)) for block in blocks_of(text)]
    assert kinds == [
        ("break", 1, 1),
        ("paragraph", 2, 2),
        ("item", 4, 2),
        ("item", 6, 1),
        ("quote", 8, 2),
        ("table", 10, 2),
        ("break", 12, 1),
        ("break", 13, 3),
        ("paragraph", 16, 1),
    ]


def test_command_prints_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT / "docs" / "memory.md")]) == 0
    assert re.search(r"docs/memory\.md: \d+ figures, \d+ of them given\n$", capsys.readouterr().out)
