"""`hf-ckpt models`: the models that are known without the hub."""

from __future__ import annotations

import argparse
import json

from hf_ckpt.cli.shared_options import HOLDS, Command, listing_parser
from hf_ckpt.estimate.tables import columns, wrapped


def _parser() -> argparse.ArgumentParser:
    return listing_parser(
        "models",
        "List the models whose shapes come with the package: the commands take their ids without the hub, gated ones "
        "too. Any other id is looked up on the hub or in its cache; a folder with a config.json is a model as well.",
        "say where each shape was read",
    )


def _run(options: argparse.Namespace) -> int:
    # It imports huggingface_hub, which wrong words do not wait for.
    from hf_ckpt.loading.config_files import LEFT_OUT, documents

    found = sorted(documents(), key=lambda document: document["ids"][0].lower())
    if options.json:
        names = ("ids", "parameters", "shape_from", "counted_by")
        models = [{name: document[name] for name in names} for document in found]
        print(json.dumps({"models": models, "left_out": LEFT_OUT}, indent=1))
        return HOLDS
    if options.verbose:
        for document in found:
            print(", ".join(document["ids"]))
            print(wrapped(f"shape: {document['shape_from']}", indent="  "))
            print(wrapped(f"{document['parameters']:,} parameters: {document['counted_by']}", indent="  "))
    else:
        cells = [(hub_id, _short(document["parameters"])) for document in found for hub_id in document["ids"]]
        print(*columns([("model", "parameters"), *cells], numeric=(1,)), sep="\n")
    print()
    for name, why in LEFT_OUT.items():
        print(wrapped(f"Left out: {name}, as {why}.", hang="  "))
    return HOLDS


def _short(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


MODELS = Command(_parser, _run, "the models that are known without the hub, with their sizes")
