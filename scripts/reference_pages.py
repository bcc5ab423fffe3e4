"""The reference pages, from the code: docs/reference/options.md and docs/reference/cli.md.

    python scripts/reference_pages.py

Types and defaults are those of `hf_ckpt.policy.options`, meanings those of the docstrings. Which options exclude each
other is tried: each pair is given to `Policy.parse` or `HFCkptCallback` under each mode. `make bench-pages` runs this.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.pages import words  # noqa: E402
from hf_ckpt import HFCkptCallback, PolicyError, apply  # noqa: E402  # found only from here on
from hf_ckpt.cli.main import _COMMANDS  # noqa: E402
from hf_ckpt.policy import options  # noqa: E402
from hf_ckpt.policy.options import Offload, types_of  # noqa: E402
from hf_ckpt.policy.policy import AUTO, Mode, Rule  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
_WRITTEN = "<!-- Written by scripts/reference_pages.py: run `make bench-pages`. -->"

# A value of each option that can be refused together with another, or under a mode.
_SAMPLES: Sequence[tuple[str, Any]] = (
    ("every_n_layers", 2),
    ("segment_size", "sqrt"),
    ("nested", True),
    ("nested", "revolve"),
    ("snapshots", 4),
    ("save", ["aten.mm"]),
    ("offload", "cpu"),
    ("tiles", "auto"),
    ("head", "chunked"),
    ("skip_frozen", True),
    ("memory_budget", "22GiB"),
    ("max_length", 2048),
    ("exact", True),
    ("fallback", "full"),
)
_GROUPS: Sequence[tuple[str, str, type]] = (
    ("What a mode does", "With a mode name; inside a list of rules they are keys of the rule.", options.RuleOptions),
    ("Head and frozen layers", "With every policy.", options.PolicyOptions),
    ("Only with `auto`", "The planner reads them.", options.AutoOptions),
    ("Where layers are", "Where structure does not tell.", options.StructureOptions),
    ("During a run", "Only in a `Trainer`.", options.RunOptions),
    ("Proof", "With every policy.", options.ProofOptions),
)
# A recipe has these two besides the options of the callback, which document themselves nowhere else.
_OF_RECIPES = {
    "policy": (
        "str | mapping | list of mappings",
        "as the callback's first argument; or the name of a plan's JSON file, from the recipe's folder.",
    ),
    "micro_batch": (
        "Literal['auto'] | None",
        "`auto` chooses the batch size of a micro-batch and the number of micro-batches together with the plan; the "
        "sequences of a step stay as many.",
    ),
}


# --- Options. ---


def options_page() -> str:
    """Return docs/reference/options.md."""
    callback, loop, rule, offload = map(meanings, (HFCkptCallback, apply, Rule, Offload))
    of_rule = {name: rule[name] for name in rule}
    given: set[str] = set()
    parts = [
        f"{_WRITTEN}\n\n# Options",
        "`HFCkptCallback(policy, ...)`, `hf_ckpt.apply(model, policy, ...)` and the section `checkpointing:` of a "
        "recipe take the same options and mean the same. A default of `None` means: left out. "
        "[Policies](../policies.md) explains modes and modifiers with examples; this page is generated from the code.",
    ]
    for title, where, kind in _GROUPS:
        names = [name for name in types_of(kind) if name not in given]
        given.update(names)
        rows = [
            _row(name, types_of(kind)[name], options.DEFAULTS.get(name), _full(callback[name], of_rule.get(name, "")))
            for name in names
        ]
        parts += [f"## {title}", f"{where} {_takers(names)}".strip(), _options_table(rows)]
    quiet = inspect.signature(HFCkptCallback).parameters["quiet"]
    only_loop = {name: hint for name, hint in types_of(options.LoopOptions).items() if name not in given}
    parts += [
        "## Only in the callback",
        _options_table([_row("quiet", "bool", quiet.default, callback["quiet"])]),
        "## Only in `hf_ckpt.apply`",
        'The step that `"auto"` plans for.',
        _options_table([_row(name, hint, None, loop[name]) for name, hint in only_loop.items()]),
        "## Only in a recipe",
        _options_table([_row(name, hint, None, text) for name, (hint, text) in _OF_RECIPES.items()]),
        "## Keys of a rule",
        'A policy may be a list of rules: `[{layers: "0:24", mode: full}, {layers: "24:32", mode: ffn}]`. The keys '
        "that no option above has:",
        _options_table(_field_rows(Rule, rule, without=types_of(options.RuleOptions))),
        "## Keys of `offload`",
        _options_table(_field_rows(Offload, offload)),
        "## What goes with which mode",
        "Tried: yes, no, or what has to be given with it.",
        _modes_table(),
        "## What excludes each other",
        "Tried with each pair that some mode takes one by one. The message is the one that a user reads.",
        _pairs_table(),
    ]
    return "\n\n".join(parts) + "\n"


def meanings(documented: Any) -> dict[str, str]:
    """Return what the `Args` of a docstring say, by name, each on one line."""
    doc = inspect.getdoc(documented) or ""
    args = doc.partition("Args:\n")[2]
    found: dict[str, str] = {}
    name = ""
    for line in args.splitlines():
        if line and not line.startswith(" "):
            break
        if start := re.match(r"    (\w+): (.*)", line):
            name, found[start[1]] = start[1], start[2]
        elif line.strip():
            found[name] += f" {line.strip()}" if name else ""
    return found


def _full(meaning: str, of_rule: str) -> str:
    """Return a meaning with what the rule's says in the place of `see Rule`."""
    rest = re.sub(r"^see `Rule`[.:]? ?", "", meaning)
    return meaning if rest == meaning else f"{of_rule} {rest[:1].upper()}{rest[1:]}".strip()


def _takers(names: Sequence[str]) -> str:
    """Return which options of a group `hf_ckpt.apply` does not take."""
    without = [name for name in names if name not in types_of(options.LoopOptions)]
    if not without:
        return ""
    if len(without) == len(names) > 1:
        return "`hf_ckpt.apply` takes none of them."
    *first, last = [f"`{name}`" for name in without]
    return f"`hf_ckpt.apply` does not take {', '.join(first)}{' or ' if first else ''}{last}."


def _row(name: str, hint: str, default: object, meaning: str) -> tuple[str, ...]:
    shown = re.sub(r"Literal\[(.*?)\]", r"\1", hint).replace("'", '"').replace(", ", " | ")
    shown = re.sub(r"Mapping\[str \| Any\]", "mapping", re.sub(r"Sequence\[(\w+)\]", r"list of \1", shown))
    types = ", ".join(f"`{each}`" for each in shown.split(" | ") if each != "None")
    return f"`{name}`", types, f"`{default!r}`", meaning[:1].upper() + meaning[1:]


def _field_rows(kind: Any, text: Mapping[str, str], without: Mapping[str, str] | tuple[()] = ()) -> list[Any]:
    # `LayerSelection`, `Mode` and the like are names of ours: what may be written is in the meaning.
    return [
        (
            f"`{field.name}`",
            "required" if field.default is MISSING else f"`{_plain(field.default)!r}`",
            text[field.name],
        )
        for field in fields(kind)
        if field.name not in without
    ]


def _plain(value: object) -> object:
    return str(value) if isinstance(value, str) else value


def _options_table(rows: Sequence[tuple[str, ...]]) -> str:
    header = ("option", "type", "default", "meaning") if len(rows[0]) == 4 else ("key", "default", "meaning")
    return table(header, rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown; its figures are those of the docstrings and of `--help`."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return f"<!-- given: as the code says -->\n{words.table(header, escaped)}"


# --- What excludes each other. ---


def refusal(policy: str, given: Mapping[str, Any]) -> str | None:
    """Return why a policy with options is refused; None if it is not."""
    try:
        HFCkptCallback(policy, **given)
    except PolicyError as error:
        return str(error)
    return None


_POLICIES = [mode.value for mode in Mode] + [AUTO]


def _modes_table() -> str:
    rows = []
    for name, value in _SAMPLES:
        cells = [_answer(policy, name, value) for policy in _POLICIES]
        rows.append((_written(name, value), *cells))
    return table(("option", *(f"`{policy}`" for policy in _POLICIES)), rows)


def _answer(policy: str, name: str, value: Any) -> str:
    if refusal(policy, {name: value}) is None:
        return "yes"
    partner = _partner(policy, name, value)
    return "no" if partner is None else f"with {_written(*partner)}"


def _partner(policy: str, name: str, value: Any) -> tuple[str, Any] | None:
    """Return what an option that is refused alone is taken with."""
    others = [(other, sample) for other, sample in _SAMPLES if other != name]
    return next((each for each in others if refusal(policy, {name: value, each[0]: each[1]}) is None), None)


def _pairs_table() -> str:
    rows = []
    for one, other in itertools.combinations(_SAMPLES, 2):
        # An option that needs another one excludes what that one excludes: said once, there.
        alone = [
            policy for policy in _POLICIES if refusal(policy, dict([one])) is refusal(policy, dict([other])) is None
        ]
        messages = [refusal(policy, dict([one, other])) for policy in alone]
        if messages and all(messages) and one[0] != other[0]:
            rows.append((_written(*one), _written(*other), str(messages[0])))
    # With `nested: revolve` goes `snapshots`, which alone is refused.
    revolve = {"nested": "revolve", "snapshots": 4}
    for other in _SAMPLES:
        message = refusal("full", {**dict([other]), **revolve})
        if other[0] not in revolve and message and refusal("full", dict([other])) is None:
            rows.append((_written("nested", "revolve"), _written(*other), message))
    return table(("option", "with", "message"), rows)


def _written(name: str, value: Any) -> str:
    return f"`{name}={value!r}`".replace("'", '"')


# --- The command line. ---


def cli_page() -> str:
    """Return docs/reference/cli.md."""
    parts = [
        f"{_WRITTEN}\n\n# Commands",
        "What `hf-ckpt COMMAND --help` says, command by command. RECIPE and the overrides "
        "`key.path=value` are explained on the page about [recipes](../recipes.md).",
        table(("command", "what it does"), [(f"[`{name}`](#{name})", each.help) for name, each in _COMMANDS.items()]),
    ]
    for name, command in _COMMANDS.items():
        parts += [f"## {name}", *_command(command.parser())]
    return "\n\n".join(parts) + "\n"


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    # argparse lays its text out in another way in each Python; what it says is the same.
    actions = [
        action
        for action in parser._actions
        if argparse.SUPPRESS not in (action.dest, action.help) and action.dest != "help"
    ]
    named = [action for action in actions if action.option_strings]
    words = [
        _value(action) + (" ..." if action.nargs == "*" else "") for action in actions if not action.option_strings
    ]
    yield f"`{' '.join([parser.prog, *words])}`"
    yield " ".join((parser.description or "").split())
    rows = [(f"`{_value(action)}`", _help(action)) for action in actions if not action.option_strings]
    rows += [
        (", ".join(f"`{each}`" for each in action.option_strings) + _argument(action), _help(action))
        for action in named
    ]
    if rows:
        yield table(("argument", "meaning"), rows)
    if parser.epilog:
        yield f"```text\n{parser.epilog % {'prog': parser.prog}}\n```"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest)


def _argument(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return f" `{_value(action)}{' ...' if action.nargs in ('*', '+') else ''}`"


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {**vars(action), "prog": "hf-ckpt"}


PAGES: Mapping[str, Callable[[], str]] = {"options.md": options_page, "cli.md": cli_page}


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(f"Wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
