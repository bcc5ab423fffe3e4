"""docs/benchmarks.md, whole: from results to Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from benchmarks.pages import case_tables, over_step
from benchmarks.pages.pictures import CONTEXT, HEADLINE, frontier_name, memory_name
from benchmarks.pages.results import CPU, CUDA, LENGTHS, PREDICTED, Results, Run, ratio_to
from benchmarks.pages.words import (
    NOT_YET,
    case_title,
    device_words,
    facts_of,
    folded,
    gpu_command,
    link,
    links,
    ratio,
    table,
)

ORDER = (
    *(HEADLINE, "llama2_7b_lora_4096", "llama2_7b_lora_8192", "llama2_7b_lora_2048_eager"),
    *("llama31_8b_qlora_8192", "llama31_8b_qlora_32768", "qwen3_06b_full_2048", "llama32_1b_full_2048"),
    *("llama2_13b_lora_2048", "olmoe_7b_lora_2048"),
)
"""Of the cases on the page."""

_HEAD = """# Benchmarks

<!-- Written by scripts/benchmark_pages.py from benchmarks/results/. Do not edit by hand. -->

Every way to save activation memory that we found, compared on the same training step: no checkpointing, what
`Trainer` has today, what other trainers and libraries have, `torch.compile`, the fixed policies of this library, and
`auto`. The claims of the literature have [a page of their own](claims.md), and so does [long context](long_context.md).
"""

_READING = """## How to read this

- **Predicted** figures come from a simulated step on the published size: the real modelling code, adapters and
  optimizer, and a table of what the device can do. Nothing of them was run. **Measured** figures were run. The two
  never share a column.
- The **small twin** of a case is the same architecture scaled down until it trains on a CPU. Its operations and bytes
  are counted exactly; its times are good for nothing but ratios within its own run.
- **Peak** is all that lies on the device at the worst moment: weights, optimizer state, gradients, activations.
  **Held** is what waits between forward and backward, beyond weights, optimizer state and inputs.
- **Operations** are the floating-point operations of matrix products and attention in a whole step, counted one by one.
- A **budget** is what one fixed contender takes, just enough memory for it, or a little less, just not enough: on a GPU
  what torch reserves, which is more than the peak. `auto` plans for the same budget and is compared with the fastest
  contender that fits. A ratio below one means that `auto` is faster. Contenders under `torch.compile` are in the tables
  and pictures and not in the budgets: compilation changes more than what is kept.
- On the CPU, torch's compiler decides what is kept, and its graphs are then run operator by operator: their operations
  and held bytes count, times and peaks within a layer are not those of generated code.
- `auto` plans for the time that it predicts, in which memory traffic counts as well. Counted in operations alone it may
  therefore come after another contender.
- **What Trainer has today** is what `TrainingArguments` and accelerate's FSDP plugin can set. *None* counts as well.
- In the pictures the line of `auto` goes in steps from one planned budget to the next; budgets between them would have
  plans of their own. Open marks have moved part of their memory to the host.
"""

_COMMANDS = """## Run it

```sh
make bench                                  # the small twins on the CPU, in minutes, against the committed results
make bench-predicted                        # the published sizes, simulated; needs no GPU
make bench-gpu CASE=llama2_7b_lora_2048     # one case on a CUDA GPU; all of them without CASE
python scripts/benchmark_pages.py           # this page and its pictures, from the results that are there
```

Each result says with which command, versions, commit and hardware it was made. Weights are random: no download is
needed, and speed and memory do not depend on what they are.
"""


def page(results: Results) -> str:
    """Return the document.

    Args:
        results: all that are there; with none of a kind the page says so.
    """
    parts = [_HEAD, _summary(results)]
    parts += [part for case, runs in results.runs.items() for part in _case(case, runs)]
    parts += [_memory(results), _context(results), _no_help(results), _READING, _COMMANDS, _made_on(results)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _summary(results: Results) -> str:
    rows = [row for case, runs in results.runs.items() for row in _summary_rows(case, runs)]
    header = (
        "case",
        "run",
        "auto over Trainer's best, best budget",
        "auto over the best fixed contender, worst budget",
    )
    if not rows:
        return ""
    text = (
        "## In short\n\n"
        "Time of a step that `auto` planned over that of the fastest contender in the same memory: below one,\n"
        "`auto` is faster. On the CPU it is counted operations in place of time. Each row links its result;\n"
        "[how to read this](#how-to-read-this) is at the end."
    )
    waiting = [case for case, runs in results.runs.items() if CUDA not in runs]
    without = f"Of {len(waiting)} cases the times are {NOT_YET}: `make bench-gpu`." if waiting else ""
    return "\n\n".join(filter(None, (text, f'<!-- given "case": its title -->\n{table(header, rows)}', without)))


def _summary_rows(case: str, runs: Mapping[str, Run]) -> Iterator[tuple[str, ...]]:
    for kind in (PREDICTED, CUDA, CPU):
        run = runs.get(kind)
        budgets = (run.budgets_by_flops if kind == CPU else run.budgets) if run else ()
        worst = max((over for budget in budgets if (over := ratio_to(budget, "fixed")) is not None), default=None)
        best = min((over for budget in budgets if (over := ratio_to(budget, "today")) is not None), default=None)
        if run and (best is not None or worst is not None):
            what = "predicted" if run.is_predicted else f"measured, {device_words(run)}"
            title = f"[{case_title(run)}](#{_anchor(case)})"
            yield title, f"[{what}](../benchmarks/results/{run.names[0]})", ratio(best), ratio(worst)


def _anchor(case: str) -> str:
    return case.replace("_", "-")


def _made_on(results: Results) -> str:
    rows = []
    for runs in results.runs.values():
        for run in runs.values():
            environment = run.read["environment"]
            hardware = environment["hardware"]
            chip = hardware.get("gpu") or f"{hardware.get('cpu', 'CPU')}, {hardware.get('num_threads')} thread"
            versions = environment["versions"]
            on = f"for {device_words(run)}, on {chip}" if run.is_predicted else chip
            installed = ", ".join(
                f"{name} {versions[name]}" for name in ("torch", "transformers", "accelerate") if versions.get(name)
            )
            rows.append((link(run.names[0]), on, installed, f"`{environment['command']}`"))
    if not rows:
        return ""
    return f"## Hardware and versions\n\n{table(('result', 'made on', 'versions', 'command'), rows)}"


def _case(case: str, runs: Mapping[str, Run]) -> Iterator[str]:
    first = next(iter(runs.values()))
    titled = next((runs[kind] for kind in (PREDICTED, CUDA, CPU) if kind in runs), first)
    yield f'<a id="{_anchor(case)}"></a>\n\n## {case_title(titled)}'
    yield from _on_published_size(case, runs)
    if CPU in runs:
        yield from _on_twin(case, runs[CPU])
    if refused := case_tables.not_run(list(runs.values())):
        yield folded("Contenders without figures, and why", refused)


def _on_published_size(case: str, runs: Mapping[str, Run]) -> Iterator[str]:
    runs = {kind: runs[kind] for kind in (PREDICTED, CUDA) if kind in runs}
    yield "### The published size"
    if not runs:
        yield f"Not predicted, and {NOT_YET}: `{gpu_command(case)}`."
        return
    for kind, run in runs.items():
        yield _image(frontier_name(case, kind), "Peak memory against step time", run)
        yield from _budgets(run)
    if CUDA not in runs:
        yield f"Measured: {NOT_YET}. The command is `{gpu_command(case)}`."
    facts = facts_of(next(iter(runs.values())))
    text = f"{_words(runs.values())}; pictures and tables from {case_tables.sources(runs)}.\n{facts}"
    yield folded("All contenders", text, case_tables.published_size(case, runs))


def _on_twin(case: str, run: Run) -> Iterator[str]:
    yield "### The small twin, on a CPU"
    yield _image(frontier_name(case, CPU), "Peak memory against operations of a step", run)
    yield from _budgets(run)
    text = f"Measured, and peaks predicted too; picture and tables from {links(run.names)}.\n{facts_of(run)}"
    yield folded("All contenders on the small twin", text, case_tables.twin(run))


def _budgets(run: Run) -> Iterator[str]:
    if run.budgets or run.budgets_by_flops:
        yield f"At each budget, {_word(run)} ({links(run.names)}):"
        yield case_tables.budgets(run)


def _image(name: str, words: str, run: Run) -> str:
    return f"![{words}, {_word(run)}](images/{name})"


def _words(runs: Iterable[Run]) -> str:
    return " and ".join(_word(run) for run in runs).capitalize()


def _word(run: Run) -> str:
    return "predicted" if run.is_predicted else "measured"


def _memory(results: Results) -> str:
    runs = results.runs.get(HEADLINE, {})
    parts = [
        f"{_image(memory_name(kind), 'Memory over one step for five modes', run)}\n\n"
        f"{_word(run).capitalize()}, drawn from {links(run.names)}."
        for kind, run in runs.items()
        if over_step.data_of(run)
    ]
    return (
        "\n\n".join(("## Memory over the step", "The dotted line is the first panel again.", *parts)) if parts else ""
    )


def _context(results: Results) -> str:
    if results.lengths is None:
        return ""
    return (
        f"## Context against the memory of the card\n\n![Longest row against memory](images/{CONTEXT})\n\n"
        f"Predicted, drawn from {link(LENGTHS)}; the dashed lines are figures that others published,\n"
        "for their own code and their own cards. The table and its sources are on the page about\n"
        "[long context](long_context.md)."
    )


def _no_help(results: Results) -> str:
    lines = []
    for runs in results.runs.values():
        for run in runs.values():
            what = "predicted" if run.is_predicted else f"measured, {device_words(run)}"
            if found := case_tables.no_help(run):
                lines.append(f"- {links(run.names[:1])} ({what}). {found}")
    if not lines:
        return ""
    text = (
        "Found by rule in each result: fixed policies of this library that another contender beats both ways, and\n"
        "budgets for which the planned step is not the fastest."
    )
    return "\n".join(("## What did not help", "", text, "", *lines))
