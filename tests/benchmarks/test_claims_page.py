"""docs/claims.md is what claims.yaml and the results say, and says it of every claim."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import runner
from benchmarks.claims import page

CLAIM = {
    "id": "one",
    "claim": "Recomputation is cheap",
    "sources": [{"title": "A paper", "url": "https://example.org/paper", "says": "that it is."}],
    "ours": "{counted.json /lora/flops_ratio .2f} times the operations",
    "case": "A small Llama.",
    "verdict": "holds",
}
COUNTED = {"lora": {"flops_ratio": 1.469, "held_bytes": 3 * 2**29}, "steps": [0.25], "hangs": False, "error": "No."}

IDS = """
    extra_forward_33 extra_forward_20 extra_forward_25_30 extra_forward_40_50 backward_over_forward
    every_4_layers every_2_layers every_layer ffn_only_with_flash recompute_or_store longer_batch
    full_saves full_times_less llama_7b_51_gb lora_7b_24_gb lora_13b_35_to_15 offload_saves
    sqrt_chain sqrt_decoder sqrt_table eager_100_gb kv_cache_40_gb kv_cache_grouped
    attention_saves_40_60 attention_saves_60_80 attention_scores_8_gb attention_first ffn_first attention_logits
    norms_left_out two_all_gathers reentrant_fsdp_hangs batch_norm_twice switch_auto switch_per_module
""".split()
"""Each claim of the literature that has to have a row."""

FIGURE = re.compile(r"\d\s?(?:%|GiB|MiB|GB|TB|ms|seconds|minutes|times|x)(?!\w)")


def folder(path: Path, claim: dict[str, Any]) -> list[str]:
    """Write one claim and its result, and return the arguments that make a page of them."""
    groups = [{"title": "Cost", "claims": [claim]}]
    (path / "claims.yaml").write_text(yaml.safe_dump({"introduction": "# Claims", "groups": groups}))
    (path / "counted.json").write_text(json.dumps(COUNTED))
    return ["--claims", f"{path / 'claims.yaml'}", "--results", f"{path}", "--out", f"{path / 'claims.md'}"]


def test_document_is_what_the_results_say() -> None:
    assert page.DOCUMENT.read_text(encoding="utf-8") == page.render(page.read())


def test_every_claim_has_a_row() -> None:
    assert sorted(claim.id for claim in page.read()) == sorted(IDS)


def test_every_row_names_its_source_verdict_and_result() -> None:
    rows = [line for line in page.DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| claim |", "| --- |"))]
    # First each claim with its verdict, then each with our figures.
    told, shown = ([row for row in rows if row.count(" | ") == bars] for bars in (1, 3))
    assert len(told) == len(shown) == len(IDS)
    assert told[0].split(" | ")[1].startswith("does not hold")
    for row in shown:
        claim, _, verdict, result = row.strip("| ").split(" | ")
        assert re.search(r"\]\(https://|\(no source found\)$", claim), claim
        assert re.match(rf"\*\*({'|'.join(page.VERDICTS)})\b", verdict), verdict
        links = re.findall(r"\]\(\.\./benchmarks/results/([\w.-]+)\)", result)
        assert links, result
        assert all((page.RESULTS / link).is_file() for link in links), result


def test_our_figures_are_not_typed() -> None:
    for claim in page.read():
        typed = page._REFERENCE.sub("", f"{claim.ours} {claim.verdict}")
        assert not FIGURE.search(typed), (claim.id, typed)


def test_page_is_ascii_and_its_cells_are_short() -> None:
    text = page.DOCUMENT.read_text(encoding="utf-8")
    assert text.isascii()
    for claim in page.read():
        assert len(claim.claim) <= 110, claim.id
        assert len(page.Results(page.RESULTS).written(claim.ours, claim.id)) <= 330, claim.id


@pytest.mark.parametrize(
    ("reference", "shown"),
    [
        ("/lora/flops_ratio .2f", "1.47"),
        ("/steps/0 .0f%", "25 %"),
        ("/lora/held_bytes .1fGiB", "1.5 GiB"),
        ("/lora/held_bytes ,d", "1,610,612,736"),
        ("/hangs hangs/finishes", "finishes"),
        ("/error code", "`No.`"),
    ],
)
def test_reference_becomes_a_figure(tmp_path: Path, reference: str, shown: str) -> None:
    arguments = folder(tmp_path, CLAIM | {"ours": f"it is {{counted.json {reference}}}"})
    assert runner.main("benchmarks.claims.page", arguments) == 0
    expected = (
        f"| Recomputation is cheap ([A paper](https://example.org/paper)) | it is {shown} | **holds** "
        "| [counted](../benchmarks/results/counted.json) |"
    )
    assert expected in (tmp_path / "claims.md").read_text()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"ours": "{count.json /lora/flops_ratio .2f}"},
            'Claim "one" refers to count.json, which is not in {folder}. Files are "counted.json". '
            'Did you mean "counted.json"?',
        ),
        (
            {"ours": "{counted.json /lora/flop_ratio .2f}"},
            'Claim "one" refers to /lora/flop_ratio of counted.json, but /lora has no "flop_ratio": it has '
            '"flops_ratio", "held_bytes". Did you mean "flops_ratio"?',
        ),
        (
            {"ours": "{counted.json /steps/1 .2f}"},
            'Claim "one" refers to /steps/1 of counted.json, but /steps has no "1": it is a list of 1.',
        ),
        (
            {"ours": "{counted.json /lora .2f}"},
            'Claim "one" refers to /lora of counted.json, which is a mapping of "flops_ratio", "held_bytes": it cannot '
            'be shown as ".2f".',
        ),
        (
            {"ours": "{counted.json /lora/flops_ratio ,d}"},
            'Claim "one" refers to /lora/flops_ratio of counted.json, which is 1.469: it cannot be shown as ",d".',
        ),
        (
            {"case": "{counted.json lora}"},
            'Claim "one" has "{counted.json lora}", which is no reference. Write {file.json /pointer format}.',
        ),
        ({"ours": "47 % more"}, 'Claim "one" refers to no result. Write one as {file.json /pointer format}.'),
        (
            {"verdict": "holdsome"},
            'Claim "one" has the verdict "holdsome". A verdict begins with one of "holds", "holds only when", '
            '"does not hold", "not yet measured on a GPU".',
        ),
        ({"verdict": ""}, 'Claim "one" lacks "verdict". Each claim needs it.'),
        (
            {"sources": []},
            'Claim "one" has no source. Add "sources", or say in "no_source" that none was found.',
        ),
        (
            {"sources": [{"title": "A paper", "url": "paper.pdf", "says": "it"}]},
            """Claim "one" has a source {'says': 'it', 'title': 'A paper', 'url': 'paper.pdf'}. It needs "title", """
            '"url" (https) and "says".',
        ),
        (
            {"remark": "hm"},
            'Claim "one" has an unknown key "remark". Keys are "id", "claim", "sources", "no_source", "ours", "case", '
            '"verdict".',
        ),
    ],
)
def test_wrong_claim_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], message: str
) -> None:
    assert runner.main("benchmarks.claims.page", folder(tmp_path, CLAIM | changed)) == 2
    assert capsys.readouterr().err == f"error: {message.replace('{folder}', str(tmp_path))}\n"
    assert not (tmp_path / "claims.md").exists()


def test_two_claims_of_one_id_are_refused(tmp_path: Path) -> None:
    groups = [{"title": "Cost", "claims": [CLAIM, CLAIM]}]
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump({"introduction": "# Claims", "groups": groups}))
    with pytest.raises(page.ClaimsError, match=r'Two claims have the id "one"\. Give each its own\.'):
        page.read(tmp_path / "claims.yaml")
