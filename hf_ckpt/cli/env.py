"""`hf-ckpt env`: what is installed, what is known of these versions together, and what is off because of them."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from hf_ckpt import upstream
from hf_ckpt.cli.shared_options import HOLDS, Command, command_parser, quiet
from hf_ckpt.estimate.tables import columns, json_text, versions, wrapped
from hf_ckpt.recipe.optional_packages import EXTRAS, install_command
from hf_ckpt.units import format_bytes


@dataclass(frozen=True)
class Known:
    """What was seen of versions together."""

    packages: Mapping[str, str]  # The versions of each, as pip writes them.
    what: str
    do: str


KNOWN = (
    Known(
        {"transformers": ">=5.24", "peft": "<0.22"},
        "transformers asks for peft 0.22: model.add_adapter, model.load_adapter and the like raise ValueError.",
        "Use peft.get_peft_model(model, config) and PeftModel.from_pretrained, as recipes do: they work.",
    ),
    Known(
        {"transformers": ">=5.24", "peft": "<0.22"},
        "model.generate leaves a prefix out (prefix_tuning) and inserts a prompt before each token (prompt_tuning, "
        "p_tuning): other tokens, without an error. Loss and gradients are right.",
        "Install transformers 5.23 to generate with these adapters.",
    ),
    Known(
        {"transformers": "==5.24.0"},
        "No forward of Llama4ForConditionalGeneration ends: AttributeError.",
        "Train Llama4ForCausalLM, its text model, or install transformers 5.23.",
    ),
)
"""Each with the versions that it was seen with. What a package asks for itself is in the package's own metadata."""


@dataclass(frozen=True)
class Off:
    """A feature that is off here."""

    feature: str
    name: str  # What it misses: a package, or a name of one.
    reason: str


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "env",
        "Print the versions of Python, torch and the libraries around it, the GPUs, what is known of these versions "
        "together, and which features are off because of them.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _run(options: argparse.Namespace) -> int:
    found = versions("numpy", "datasets", "trl")
    known = [each for each in (*_outside_of_bounds(found), *KNOWN) if _applies(each, found)]
    missing = {
        name: extra for name, extra in {**EXTRAS, "trl": "trl"}.items() if importlib.util.find_spec(name) is None
    }
    off = [Off(extra, name, f"not installed. Run: {install_command(extra)}") for name, extra in missing.items()]
    # Names of other libraries that this version of them has not.
    off += [Off(*each) for each in upstream.missing()]
    with quiet():
        torch_build, devices = _devices()
    if options.json:
        document = {
            "versions": found,
            "torch_build": torch_build,
            "devices": devices,
            "known": [asdict(each) for each in known],
            "off": [asdict(each) for each in off],
        }
        print(json_text(document, options.words))
        return HOLDS
    rows = [*found.items(), ("torch is", torch_build)]
    rows += [("device", f"{each['name']}, {format_bytes(int(each['memory_bytes']))}") for each in devices]
    print(*columns(rows), sep="\n")
    names = [" with ".join(f"{name} {found[name]}" for name in each.packages) for each in known]
    for title, lines in (
        ("Known of these versions:", [f"{n}: {each.what} {each.do}" for n, each in zip(names, known, strict=True)]),
        ("Off here:", [f"{each.feature} ({each.name}): {each.reason}" for each in off]),
    ):
        print(f"\n{title}", *[wrapped(line, indent="  ", hang="    ") for line in lines or ["nothing"]], sep="\n")
    return HOLDS


def _applies(known: Known, found: Mapping[str, str]) -> bool:
    # transformers needs it.
    from packaging.specifiers import SpecifierSet

    return all(
        name in found and SpecifierSet(which).contains(found[name], prereleases=True)
        for name, which in known.packages.items()
    )


def _outside_of_bounds(found: Mapping[str, str]) -> Iterator[Known]:
    """Yield a line for each package that is older than hf_ckpt or one of its extras asks for."""
    from packaging.requirements import Requirement

    # Run from a checkout it may have no metadata.
    for line in (importlib.metadata.requires("hf_ckpt") or ()) if "hf_ckpt" in found else ():
        needs = Requirement(line)
        if needs.specifier and not needs.specifier.contains(found.get(needs.name, "9999"), prereleases=True):
            yield Known(
                {needs.name: f"=={found[needs.name]}"},
                f"hf_ckpt is tested from {needs.specifier} on.",
                f'Run: pip install "{needs.name}{needs.specifier}"',
            )


def _devices() -> tuple[str, list[dict[str, str | int]]]:
    """Return what torch was built for, and the GPUs that it sees."""
    try:
        import torch
    # A library of CUDA's that is missing, or of the system's.
    except (ImportError, OSError) as error:
        return f"not to be imported: {error}", []
    versions_of = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = next((f"built for {name} {each}" for name, each in versions_of.items() if each), "built for the CPU")
    if not torch.cuda.is_available():
        return f"{build}, sees no GPU" if any(versions_of.values()) else build, []
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return build, [{"name": each.name, "memory_bytes": each.total_memory} for each in properties]


ENV = Command(_parser, _run, "versions, GPUs, what is known of them, and what is off")
