"""What is printed, from JSON: estimates and plans as text, as wide as the terminal.

Pure Python, so that nothing waits for torch.

An estimate can be printed while it grows: `opening`, `row_text` of each row, `closing`; `estimate_table` is all of it.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hf_ckpt.units import UNITS, format_bytes

FIT_WORDS = {"yes": "fits", "perhaps": "perhaps fits", "no": "does not fit"}
"""Whether a step fits, by the value of a `Fit`."""

Document = Mapping[str, Any]  # What `estimate.estimate_as_json` returns, or a part of it.

_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 80, 60, 120
"""Columns where no terminal says how many it has, the fewest that a table needs, and the most that are easy to read."""
_SHOWN_CATEGORIES = 2
_NAME_WIDTH, _LEAST_NAME_WIDTH = 26, 17
_PEAK_WIDTH, _STEP_WIDTH, _HOST_WIDTH, _FIT_WIDTH = 9, 7, 9, 7
_MOST_DEVICES = 3


def width() -> int:
    """Return how many columns a line may have."""
    return min(max(_LEAST_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns), _MOST_WIDTH)


def wrapped(text: str, indent: str = "", hang: str | None = None) -> str:
    """Return text in lines of at most `width` columns, broken at blanks. `hang`: of lines after the first."""
    lines, room = [], width()
    for line in text.split("\n"):
        # Lines of advice: options to copy, and a comment.
        options, mark, comment = line.partition("  # ")
        parts = [options, f"    # {comment}"] if mark and len(indent + line) > room else [line]
        for part in parts:
            own = part[: len(part) - len(part.lstrip())]
            begin, rest = indent + own, (indent if hang is None else hang) + own
            filled = textwrap.fill(
                # A number and its unit stay together.
                re.sub(r"(\d) (?=([KMGT]i)?B\b|M\b|m?s\b|%)", "\\1\xa0", part.strip()),
                room,
                initial_indent=begin,
                subsequent_indent=rest,
                break_on_hyphens=False,
                break_long_words=False,
            )
            lines.append(filled.replace("\xa0", " "))
    return "\n".join(lines)


def facts(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield (name, text) rows as two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        yield wrapped(text, f"  {name:<{width}}  ", " " * (width + 4))


def columns(rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> Iterator[str]:
    """Yield rows as lines with aligned columns; those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if at in numeric else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def facts_of(device: Document) -> list[tuple[str, str]]:
    """Return rows of `facts`: a device in words, with what it has besides a step, and which attention it runs."""
    margin = f", and {format_bytes(device['margin_bytes'])} a margin" if device["margin_bytes"] else ""
    rows = [
        (
            "device",
            f"{device['title']}, {format_bytes(device['memory_bytes'])}; {_range(*device['outside_bytes'])} of it "
            f"are {device['outside']}{margin}",
        )
    ]
    attention = device["attention"]
    rows += [] if attention is None else [("attention", f"{device['name']}: {attention}")]
    return rows + [("note", f"{device['name']}: {remark}") for remark in device["remarks"]]


def named_facts(document: Document, devices: Sequence[Document] = ()) -> list[tuple[str, str]]:
    """Return rows of `facts`: what was taken for what, and devices."""
    own = [(fact["name"], fact["text"]) for fact in document["facts"]]
    return [*own, *(fact for device in devices for fact in facts_of(device))]


def format_seconds(seconds: float) -> str:
    """Return seconds with three digits, in milliseconds below one."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


# --- An estimate. ---


def estimate_table(document: Document, *, is_verbose: bool = False) -> str:
    """Return an estimate as text."""
    rows = [row_text(document, row, is_verbose=is_verbose) for row in document["rows"]]
    return "\n".join([opening(document), *filter(None, rows), closing(document, is_verbose=is_verbose)])


def opening(document: Document) -> str:
    """Return what stands above the rows: the verdict, what was taken for what, and the header."""
    named = facts(named_facts(document, document["devices"]))
    return "\n".join([_title("estimate", document), *_verdicts(document), "", *named, "", _header(document)])


def row_text(document: Document, row: Document, *, is_verbose: bool = False, block: int = 0) -> str:
    """Return a row; empty where it is for a device of another block. `is_verbose`: with what fills the peak, and when.

    `block`: devices for which there is no room next to the first ones have another block of columns.
    """
    devices = _blocks(document)[block]
    where = [device for device in devices if row.get("device") in (None, device["name"])]
    if not where:
        return ""
    is_only_device = len(document["devices"]) == 1
    name = row["name"] if is_only_device or "device" not in row else f"{row['name']}, {row['device']}"
    fits = [_fit(row, device, is_only_device) if device in where else "" for device in devices]
    peak, step, host, what = "-", "", "", []
    if "peak_bytes" in row:
        is_timed = row["seconds"] is not None and row.get("device") in (None, document["devices"][0]["name"])
        peak, step = _size(row["peak_bytes"]), format_seconds(row["seconds"]["total"]) if is_timed else ""
        host = _size(row["host_bytes"]) if row["host_bytes"] else ""
        what = [wrapped(f"{_largest(row)}; {row['peak_at'].replace('aten.', '')}", " " * 6)] if is_verbose else []
    return "\n".join([_line(devices, name, peak, step, host, fits), *what])


def closing(document: Document, *, is_verbose: bool = False) -> str:
    """Return what stands below the rows; the last line is the verdict."""
    lines = []
    for block in range(1, len(_blocks(document))):
        rows = (row_text(document, row, is_verbose=is_verbose, block=block) for row in document["rows"])
        lines += ["", _header(document, block), *filter(None, rows)]
    told = ((row["name"], _refused(row["refusal"], row["name"] == document["decides"])) for row in document["rows"])
    refusals = [wrapped(f"{name}: {text}", hang="  ") for name, text in told if text]
    notes = [wrapped(note) for note in _notes(document)]
    return "\n".join([*lines, "", *refusals, *notes, verdict(document)])


def verdict(document: Document) -> str:
    """Return whether the recipe fits, in one line."""
    by_fit = {fit: [found["device"] for found in document["verdicts"] if found["fits"] == fit] for fit in FIT_WORDS}
    words = {fit: f"{said} on" for fit, said in FIT_WORDS.items()}
    if len(document["verdicts"]) > 1:
        words |= {"no": "not on"} if by_fit["yes"] or by_fit["perhaps"] else {}
        words |= {"perhaps": "perhaps on"} if by_fit["yes"] else {}
    named = [(words[fit], names) for fit, names in by_fit.items() if names]
    texts = [
        "; ".join(f"{word} {', '.join(names)}" for word, names in named),
        ", ".join(f"{word} {len(names)} of {len(document['verdicts'])} devices" for word, names in named),
    ]
    peaks = {found["peak_bytes"] for found in document["verdicts"]}
    if len(document["verdicts"]) == 1 and None not in peaks:
        card = format_bytes(document["devices"][0]["memory_bytes"])
        detail = _ONLY if by_fit["perhaps"] else f"{format_bytes(*peaks)} of {card}"
        texts.insert(0, f"{texts[0]}: {detail}")
    lines = [f"{_what(document)} {text}." for text in texts]
    return next((line for line in lines if len(line) <= width()), lines[-1])


def only_by(fit: str) -> str:
    """Return what follows `perhaps`, to say what it means."""
    return f", {_ONLY}" if fit == "perhaps" else ""


def _title(command: str, document: Document) -> str:
    return wrapped(f"hf-ckpt {command} {document['recipe']}", hang="  ")


def _what(document: Document) -> str:
    if document["decides"] == "auto":
        return "The planner's choice"
    own = next(row for row in document["rows"] if row["name"] == document["decides"])
    return "The recipe (no plan)" if own["plan"] is None else "The recipe's plan"


_ONLY = "only by giving cached blocks back"  # What `perhaps` means.
_PERHAPS = f"perhaps: torch reserves more than there is room for; it fits {_ONLY} (retries)."
_FITS = {"yes": "fits", "perhaps": "perhaps", "no": "does not"}


def _verdicts(document: Document) -> Iterator[str]:
    yield ""
    yield f"{_what(document)}:"
    cards = {device["name"]: device for device in document["devices"]}
    found = document["verdicts"]
    yield from (wrapped(line, hang="    ") for line in columns([_cells(one, cards[one["device"]]) for one in found]))
    if any(one["fits"] == "perhaps" for one in found):
        yield wrapped(_PERHAPS, "  ")
    if any(one["is_evaluation"] for one in found):
        yield "  The peak is that of a batch of its evaluation."
    refusals = (_above_rows(one["refusal"]) for one in found)
    yield from (wrapped(f"{text}.", "  ") for text in dict.fromkeys(refusals) if text)


def _above_rows(refusal: str) -> str:
    """Return what was asked and what is true; what to do stands below the rows."""
    return ". ".join(refusal.split(". ")[:2]).rstrip(".")


def _refused(refusal: str, is_above: bool) -> str:
    """Return what is said of a refusal below the rows; `is_above`: its first part stands above them."""
    return refusal[len(_above_rows(refusal)) :].lstrip(". ") if is_above else refusal


def _cells(found: Document, device: Document) -> tuple[str, ...]:
    peak = "no plan" if found["peak_bytes"] is None else f"peak {format_bytes(found['peak_bytes'])}"
    return (
        device["name"],
        _FITS[found["fits"]],
        peak,
        _held(found),
        f"of {format_bytes(device['memory_bytes'])}",
    )


def _held(found: Document) -> str:
    """Return what a device shows in use, where that is known."""
    return f"nvidia-smi {_range(*found['nvidia_smi_bytes'])}" if "nvidia_smi_bytes" in found else ""


def on_exactness(document: Document) -> Iterator[str]:
    """Yield how exact the planner's choice is, and what it costs."""
    exact: dict[str, list[str]] = {}
    for row in document["rows"]:
        if "exactness" in row:
            exact.setdefault(row["exactness"]["text"], []).append(row["device"])
    for text, names in exact.items():
        where = f" for {', '.join(names)}" if len(document["devices"]) > 1 else ""
        yield f"The planner's choice{where}: {text}."


def on_cached_blocks(document: Document) -> Iterator[str]:
    """Yield what `perhaps` means of each device, and what would make the step fit there."""
    for found in document["verdicts"]:
        if found["fits"] != "perhaps" or "reserved_bytes" not in found:
            continue
        reserved = f"torch reserves {format_bytes(found['reserved_bytes'])} for a peak of"
        text = f"On {found['device']} {reserved} {format_bytes(found['peak_bytes'])}, and has no room for it"
        if found.get("retries_per_step") is not None:
            number = found["retries_per_step"]
            each = f"{number} time{'s' if number > 1 else ''} in each step, which the time of a step does not count"
            text = f"{text}: it gives cached blocks back, {each if number else 'in the first steps'}"
        if found.get("expandable_bytes"):
            expandable = format_bytes(found["expandable_bytes"])
            text = f"{text}. With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it reserves {expandable} and fits"
        yield f"{text}."


def _range(low: int, high: int) -> str:
    """Return two amounts in the unit of the larger one; one where they are the same."""
    text = format_bytes(high)
    if low == high:
        return text
    return f"{low / UNITS[text.split()[1]]:.1f} to {text}"


def _blocks(document: Document) -> list[list[Document]]:
    """Return the devices, as many at a time as have room next to each other."""
    blocks: list[list[Document]] = [[]]
    for device in document["devices"]:
        wider = [*blocks[-1], device]
        if blocks[-1] and (len(wider) > _MOST_DEVICES or _room(wider) < _LEAST_NAME_WIDTH):
            blocks.append([device])
        else:
            blocks[-1] = wider
    return blocks


def _room(devices: Sequence[Document]) -> int:
    """Return the columns that are left for names."""
    # "no, 1,023 GiB over", or a column for each device.
    fits = 20 if len(devices) == 1 else sum(2 + cell for cell in _fit_widths(devices))
    return width() - 2 - sum(2 + cell for cell in (_PEAK_WIDTH, _STEP_WIDTH, _HOST_WIDTH)) - fits


def _fit_widths(devices: Sequence[Document]) -> list[int]:
    return [max(_FIT_WIDTH, len(device["name"])) for device in devices]


def _header(document: Document, block: int = 0) -> str:
    devices = _blocks(document)[block]
    fits = ["fits"] if len(document["devices"]) == 1 else [device["name"] for device in devices]
    return _line(devices, "plan", "peak", "step", "host", fits)


def _line(devices: Sequence[Document], name: str, peak: str, step: str, host: str, fits: Sequence[str]) -> str:
    room = min(_NAME_WIDTH, _room(devices))
    cells = [f"{peak:>{_PEAK_WIDTH}}", f"{step:>{_STEP_WIDTH}}", f"{host:>{_HOST_WIDTH}}"]
    cells += [f"{fit:<{width}}" for fit, width in zip(fits, _fit_widths(devices), strict=True)]
    # A name that is too long has a line of its own.
    above, name = ("", name) if len(name) <= room else (f"  {name}\n", "")
    return f"{above}  {'  '.join([name.ljust(room), *cells])}".rstrip()


def _fit(row: Document, device: Document, is_only_device: bool) -> str:
    fit: str = row["fits"][device["name"]] if "peak_bytes" in row else "no"
    if fit == "perhaps" and is_only_device:
        return "perhaps, by retries"
    if fit != "no" or not is_only_device or "peak_bytes" not in row:
        return fit
    return f"no, {_size(row['peak_bytes'] + device['outside_bytes'][0] - device['memory_bytes'])} over"


def _size(num_bytes: int) -> str:
    """Return bytes in nine columns: what has thousands of a unit has no tenths."""
    return re.sub(r"(,\d+)\.\d", r"\1", format_bytes(num_bytes))


def _largest(memory: Document, number: int | None = None) -> str:
    ordered = sorted(memory["by_category"].items(), key=lambda item: -item[1])[:number]
    return ", ".join(f"{category} {format_bytes(num_bytes)}" for category, num_bytes in ordered)


def _notes(document: Document) -> Iterator[str]:
    if len(document["devices"]) > 1 and any(row.get("seconds") for row in document["rows"]):
        yield f"Steps are timed for {document['devices'][0]['name']}."
    yield from on_exactness(document)
    evaluation = document["evaluation"]
    if evaluation is not None:
        peak = format_bytes(evaluation["peak_bytes"])
        yield f"A batch of its evaluation needs {peak}: {_largest(evaluation, _SHOWN_CATEGORIES)}."
    is_told = any(found["fits"] == "perhaps" for found in document["verdicts"])
    if not is_told and any("perhaps" in row.get("fits", {}).values() for row in document["rows"]):
        yield _PERHAPS
    yield from on_cached_blocks(document)
    yield from _host(document)


def _host(document: Document) -> Iterator[str]:
    """Yield what the plan that decides needs of the host, and what is free where it would run on this machine."""
    for host in document["host"]:
        needed, free = format_bytes(host["needed_bytes"]), host["free_bytes"]
        if free is None:
            yield f"It needs {needed} of host memory too, next to {host['device']}."
        else:
            is_enough = host["needed_bytes"] <= free
            fits = "fits" if is_enough else "does not fit: offload fewer layers (fraction), or to disk"
            yield f"It needs {needed} of host memory; {format_bytes(free)} are free here: it {fits}."


# --- What fits, and peaks around a recipe's own. ---


def sizes_table(document: Document) -> str:
    """Return the sizes that fit, as text. `document`: of `fitting_sizes`."""
    is_length = document["unit"] == "tokens"
    header = ("device", "plan", "longest sequence" if is_length else "largest micro-batch", "needs", "of", "host")
    body = []
    for row in document["rows"]:
        number, needed = "none", "-"
        if row["number"]:
            # The model's positions end rows; of micro-batches there is no such end.
            mark = "*" if is_length and row["is_bound"] else ""
            number, needed = f"{row['number']:,} {document['unit']}{mark}", format_bytes(row["needed_bytes"])
        host = format_bytes(row["host_bytes"]) if row.get("host_bytes") else ""
        body.append((row["device"], row["plan"], number, needed, format_bytes(row["budget_bytes"]), host))
    table: list[Sequence[str]] = [header, *body]
    if not any(cells[-1] for cells in body):
        table = [cells[:-1] for cells in table]
    named = named_facts(document)
    bound = ["*: all that the model has positions for"] if any(cells[2].endswith("*") for cells in body) else []
    lines = [_title("estimate", document), *facts(named), "", *columns(table, numeric=(2, 3, 4, 5)), *bound]
    return "\n".join(lines)


_GRID_TITLES = {"none": "Peak without checkpointing", "recipe": "Peak under the recipe's plan"}
_GRID_MARKS = {"yes": "", "perhaps": " ?", "no": " x"}


def grid_table(document: Document) -> str:
    """Return grids as text; what does not fit on the device is marked. `document`: of `grids`."""
    parts = []
    for grid in document["grids"]:
        # By row length, in the order of micro-batches.
        cells: dict[int, list[str]] = {}
        for peak in grid["peaks"]:
            text = f"{format_bytes(peak['peak_bytes'])}{_GRID_MARKS[peak['fits']]}"
            cells.setdefault(peak["seq_length"], []).append(text)
        numbers = dict.fromkeys(peak["batch_size"] for peak in grid["peaks"])
        header = ("tokens", *(f"batch {number}" for number in numbers))
        body = [(f"{length:,}", *texts) for length, texts in cells.items()]
        lines = columns([header, *body], numeric=range(len(header)))
        parts.append("\n".join([_GRID_TITLES[grid["plan"]], *lines]))
    marks = f"x: does not fit on {document['device']}; ?: perhaps, {_ONLY}"
    return "\n\n".join([*parts, marks])


# --- A plan. ---


def plan_text(document: Document) -> str:
    """Return a plan and what it needs as text, equal layers on one line. `document`: of `recipe_plan.plan_as_json`."""
    assumed = document["device_was_assumed"]
    named = [
        *named_facts(document, [document["card"]]),
        *([("assumed", assumed)] if assumed else []),
        ("budget", format_bytes(document["budget_bytes"])),
    ]
    seconds = document["seconds"]
    parts = [f"{name} {format_seconds(spent)}" for name, spent in (seconds or {}).items() if spent and name != "total"]
    sizes = [(category, format_bytes(num_bytes)) for category, num_bytes in document["by_category"].items()]
    exactness = document["exactness"]
    lines = [
        _title("plan", document),
        *facts(named),
        "",
        *(wrapped(line, hang=" " * 15) for line in document["plan_in_words"].split("\n")),
        "",
        wrapped(f"Peak {format_bytes(document['peak_bytes'])}, in the {document['peak_at']}", hang="  "),
        *columns(sizes, numeric=(1,)),
        *([f"Host memory {format_bytes(document['host_bytes'])}"] if document["host_bytes"] else []),
        *([wrapped(f"Step {format_seconds(seconds['total'])}: {', '.join(parts)}", hang="  ")] if seconds else []),
        *([wrapped(f"Exactness: {exactness['text']}", hang="  ")] if exactness is not None else []),
        wrapped(verdict_on_plan(document), hang="  "),
    ]
    return "\n".join(lines)


def verdict_on_plan(document: Document) -> str:
    """Return whether a plan fits, in one line."""
    found, card = document["verdict"], document["card"]
    peak = f"peak {format_bytes(found['peak_bytes'])}{' in evaluation' if found['is_evaluation'] else ''}"
    parts = [peak, _held(found), f"of {format_bytes(card['memory_bytes'])}"]
    fits = f"{FIT_WORDS[found['fits']]} on {card['name']}{only_by(found['fits'])}"
    verdict = f"The plan {fits}: {', '.join(filter(None, parts))}."
    return " ".join([verdict, *on_cached_blocks({"verdicts": [found]})])


# --- JSON text. ---


def json_text(read: Mapping[str, Any], words: Sequence[str]) -> str:
    """Return JSON text, with the command that made it and the versions that it holds for."""
    command = shlex.join(["hf-ckpt", *words])
    return json.dumps({"command": command, "versions": versions(), **read}, indent=1, allow_nan=False)


_PACKAGES = "hf_ckpt torch transformers accelerate peft trl bitsandbytes deepspeed kernels".split()


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, of the packages that are installed, and of `more` that are, by name."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
