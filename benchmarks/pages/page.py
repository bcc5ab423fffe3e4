"""docs/benchmarks.md, whole: from results to Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from benchmarks.pages import case_tables, over_step
from benchmarks.pages.pictures import CONTEXT, HEADLINE, frontier_name, memory_name
from benchmarks.pages.results import CPU, CUDA, LENGTHS, PREDICTED, Results, Run, ratio_to
from benchmarks.pages.words import NOT_YET, case_title, gpu_command, installed, kind_words, link, ratio, table

ORDER = (
    *(HEADLINE, "llama2_7b_lora_4096", "llama2_7b_lora_8192", "llama2_7b_lora_2048_eager"),
    *("llama31_8b_qlora_8192", "llama31_8b_qlora_32768", "qwen3_06b_full_2048", "llama32_1b_full_2048"),
    *("llama2_13b_lora_2048", "olmoe_7b_lora_2048"),
)
"""Of the cases on the page."""

_HEAD = """<!-- Written by scripts/benchmark_pages.py from benchmarks/results/: run `make bench-pages`. -->

# Benchmarks

"""

_WHAT = f"""Compared are the ways to save activation memory that we found, on the same training step. There is no
checkpointing, what `TrainingArguments` and accelerate can set (`gradient_checkpointing=True`), and what trl, unsloth,
axolotl and torchtitan have. There is `torch.compile`, and there are the fixed policies of this library and `auto`.

The tables, with every figure:

- [contenders](data/{case_tables.CONTENDERS}): peak, time and operations of each, and why some could not run
- [budgets](data/{case_tables.BUDGETS}): at each memory budget `auto` against the best that fits
- [runs](data/{case_tables.RUNS}): hardware, versions and command of each result
- [what did not help](data/{case_tables.NO_HELP}): policies that another contender beats both ways

The claims of the literature have [a page of their own](claims.md), and so does [long context](long_context.md).
"""

_READING = """## How to read this

- **Predicted**: the published size was simulated for a GPU. Nothing was run. **Measured**: it was run.
- The **small twin** of a case is the same architecture, small enough to train on a CPU. Its operations and bytes are
  counted exactly. Its times are good for ratios within its own run only.
- **Peak** is all that lies on the device at the worst moment: weights, optimizer state, gradients, activations.
- **Held** is what waits between forward and backward, beyond weights, optimizer state and inputs.
- **Operations** are the floating-point operations of matrix products and attention in a whole step.
- A **budget** is what one fixed contender takes, or a little less. On a GPU that is what torch reserves, which is more
  than the peak. `auto` plans for the same budget. It is compared with the fastest contender that fits, without those
  under `torch.compile`: compilation changes more than what is kept.
- `auto` plans for predicted time. Counted in operations alone, it may come after another contender.
- On the CPU, graphs of `torch.compile` are run operator by operator: their operations and held bytes count, their times
  do not.
- In the pictures the line of `auto` goes in steps from one planned budget to the next. Open marks have moved a part of
  their memory to the host.
"""

_COMMANDS = """## Run it

```sh
make bench                                  # the small twins on the CPU, in minutes, against the committed results
make bench-predicted                        # the published sizes, simulated; needs no GPU
make bench-gpu CASE=llama2_7b_lora_2048     # one case on a CUDA GPU; all of them without CASE
python scripts/benchmark_pages.py           # this page, its tables and pictures, from the results that are there
```

Weights are random: no download is needed, and speed and memory do not depend on their values.
"""


def page(results: Results) -> str:
    """Return the document.

    Args:
        results: all that are there; with none of a kind the page says so.
    """
    parts = [_HEAD + _finding(results), _picture(results), _WHAT, _summary(results), _cases(results)]
    parts += [_memory(results), _context(results), _no_help(results), _READING, _COMMANDS]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _finding(results: Results) -> str:
    """Return the first paragraph: what auto gains in the memory of what a Trainer user has."""
    sentences = []
    if (measured := results.runs.get(HEADLINE, {}).get(CUDA)) and (best := _best(measured)) is not None:
        sentences.append(
            f"In the same memory, a step under `auto` takes {ratio(best)} times as long as under the best setting of "
            f"`TrainingArguments`: measured on one {measured.read['environment']['hardware'].get('gpu', 'GPU')} with "
            f"{case_title(measured)}, at the budget where it gains most ({link(measured.names[0])})."
        )
    predicted = [(best, run) for run in _of_kind(results, PREDICTED) if (best := _best(run)) is not None]
    if predicted:
        low, high = min(predicted, key=lambda each: each[0]), max(predicted, key=lambda each: each[0])
        sentences.append(
            f"Predicted for {len(predicted)} cases, it is {ratio(low[0])} ({link(low[1].names[0])}) to "
            f"{ratio(high[0])} ({link(high[1].names[0])}) times as long."
        )
    if without := [case for case, runs in results.runs.items() if CUDA not in runs]:
        sentences.append(f"{len(without)} of {len(results.runs)} cases are {NOT_YET}.")
    return " ".join(sentences)


def _of_kind(results: Results, kind: str) -> list[Run]:
    return [runs[kind] for runs in results.runs.values() if kind in runs]


def _best(run: Run) -> float | None:
    """Return auto's time over that of the best of Trainer's settings, at the budget where it gains most."""
    return min((over for budget in _judged(run) if (over := ratio_to(budget, "today")) is not None), default=None)


def _judged(run: Run) -> list[Mapping[str, object]]:
    return list(run.budgets_by_flops if run.kind == CPU else run.budgets)


def _picture(results: Results) -> str:
    runs = results.runs.get(HEADLINE, {})
    kind = next((kind for kind in (CUDA, PREDICTED) if kind in runs), None)
    if kind is None:
        return ""
    run = runs[kind]
    image = f"![Peak memory against step time, {_word(run)}](images/{frontier_name(HEADLINE, kind)})"
    return f"{image}\n\n{case_title(run)}: {kind_words(run)}, {installed(run)} ({link(run.names[0])})."


def _summary(results: Results) -> str:
    rows = [row for case, runs in results.runs.items() for row in _summary_rows(case, runs)]
    header = ("case", "run", "versions", "best budget, over Trainer's best", "worst budget, over the best fixed")
    if not rows:
        return ""
    text = (
        "## In short\n\n"
        "The time of a step under `auto` over that of the fastest contender in the same memory. Below one, `auto` is\n"
        "faster. On the CPU, counted operations stand in place of time. Each row links its result."
    )
    return f'{text}\n\n<!-- given "case", "versions": names -->\n{table(header, rows)}'


def _summary_rows(case: str, runs: Mapping[str, Run]) -> Iterator[tuple[str, ...]]:
    for kind in (PREDICTED, CUDA, CPU):
        if run := runs.get(kind):
            overs = [over for budget in _judged(run) if (over := ratio_to(budget, "fixed")) is not None]
            best, worst = _best(run), max(overs, default=None)
            if best is not None or worst is not None:
                title = f"[{case_title(run)}](#{_anchor(case)})"
                result = f"[{kind_words(run)}](../benchmarks/results/{run.names[0]})"
                yield title, result, installed(run), ratio(best), ratio(worst)


def _anchor(case: str) -> str:
    return case.replace("_", "-")


def _cases(results: Results) -> str:
    """Return where the pictures of each case are, and what was not run."""
    rows = []
    for case, runs in results.runs.items():
        there = [runs[kind] for kind in (PREDICTED, CUDA, CPU) if kind in runs]
        pictures = [f"[{kind_words(run)}](images/{frontier_name(case, run.kind)})" for run in there]
        files = [f"([result](../benchmarks/results/{run.names[0]}))" for run in there]
        shown = [f"{picture} {file}" for picture, file in zip(pictures, files, strict=True)]
        missing = [] if CUDA in runs else [f"{NOT_YET}: `{gpu_command(case)}`"]
        title = f'<a id="{_anchor(case)}"></a>{case_title(there[0])}'
        rows.append((title, "; ".join([*shown, *missing])))
    if not rows:
        return ""
    note = '<!-- given "case": its title -->'
    return f"## The cases\n\nA picture of each run:\n\n{note}\n{table(('case', 'pictures'), rows)}"


def _word(run: Run) -> str:
    return "predicted" if run.is_predicted else "measured"


def _memory(results: Results) -> str:
    runs = results.runs.get(HEADLINE, {})
    kind = next((kind for kind in (CUDA, PREDICTED, CPU) if kind in runs and over_step.data_of(runs[kind])), None)
    if kind is None:
        return ""
    run = runs[kind]
    return (
        "## Memory over the step\n\nFive modes of one step; the dotted line is the first panel again.\n\n"
        f"![Memory over one step for five modes, {_word(run)}](images/{memory_name(kind)})\n\n"
        f"{_word(run).capitalize()}, drawn from {link(run.names[0])}."
    )


def _context(results: Results) -> str:
    if results.lengths is None:
        return ""
    return (
        f"[The longest sequence against the memory of the GPU](images/{CONTEXT}) is predicted, from\n"
        f"{link(LENGTHS)}. Its dashed lines are figures\nthat others published for their own code. "
        "[Long context](long_context.md) has the table and its sources."
    )


def _no_help(results: Results) -> str:
    """Return which fixed policies of ours were beaten, and in how many results; and where auto was not the fastest."""
    found = [row for runs in results.runs.values() for run in runs.values() for row in case_tables.no_help(run)]
    if not found:
        return ""
    beaten = Counter(row["what"] for row in found if row["what"] != "auto")
    lost = [row for row in found if row["what"] == "auto"]
    lines = [f"- `{name}`: {count}" for name, count in beaten.most_common()]
    text = (
        "Fixed policies of this library that another contender beats in memory and in time (on the CPU: in\n"
        f"operations), and in how many results. [Which contender, in which result](data/{case_tables.NO_HELP}):"
    )
    parts = ["## What did not help", text, "\n".join(lines)] if lines else ["## What did not help"]
    if lost:
        where = ", ".join(dict.fromkeys(f"{row['case']} ({row['run']})" for row in lost))
        sentence = f"`auto` costs more than what fits as well at {len(lost)} budgets: {where}."
        parts.append(f"<!-- given: titles of cases -->\n{sentence}")
    return "\n\n".join(parts)
