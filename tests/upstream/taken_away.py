"""Trains with a private name of a library taken away, each in a fork of one process that has the libraries.

    python tests/upstream/taken_away.py FOLDER

Reads a library and a name from each line, and prints as JSON what came of each way to use the package: "exact", the
message of an `UnsupportedError`, or a traceback; what was logged; and what `hf_ckpt.upstream.missing` says.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Trainer,
    TrainingArguments,
)

# Slow to import, as the others.
if importlib.util.find_spec("datasets") is not None:
    import datasets  # noqa: F401

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 16}
IDS = torch.arange(8).reshape(2, 4)
GONE = "_of_a_later_version"


class Renaming(ast.NodeTransformer):
    """Lets a file of names look for one of them under another name, which no library has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_alias(self, node: ast.alias) -> ast.alias:
        if node.name == self._name:
            node.asname, node.name = node.asname or node.name, node.name + GONE
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if node.attr == self._name:
            node.attr += GONE
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if node.value == self._name:
            node.value = self._name + GONE
        return node


def take_away(library: str, name: str) -> None:
    """Put a file of `hf_ckpt.upstream` in its place that looks for another name."""
    spec = importlib.util.find_spec(f"hf_ckpt.upstream.{library}")
    assert spec is not None
    assert spec.origin is not None
    tree = Renaming(name).visit(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(tree, spec.origin, "exec"), vars(module))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(intermediate_size=16, **SIZES)).train()


def opt() -> nn.Module:
    """Layers whose own forward strings the ffn together."""
    torch.manual_seed(0)
    config = OPTConfig(ffn_dim=16, word_embed_proj_dim=8, max_position_embeddings=8, attention_dropout=0.1, **SIZES)
    return OPTForCausalLM(config).train()


def adapted() -> nn.Module:
    return get_peft_model(llama(), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))  # type: ignore[arg-type]


def step(model: nn.Module) -> list[Tensor]:
    """Return the loss and the gradients."""
    torch.manual_seed(1)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@cache
def plain_step(build: Callable[[], nn.Module]) -> list[Tensor]:
    return step(build())


def applied(build: Callable[[], nn.Module], policy: str, **options: Any) -> str:
    import hf_ckpt

    model = build()
    with hf_ckpt.apply(model, policy, **options):
        found = step(model)
    # Tiles and the chunked head are exact within this.
    tolerance = 1e-6 if {"tiles", "head"} & set(options) else 0.0
    pairs = zip(found, plain_step(build), strict=True)
    same = all(torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance) for ours, theirs in pairs)
    return "exact" if same else "other numbers"


def train(folder: str, *callbacks: Any) -> list[Tensor]:
    """Return the weights after a step of the Trainer."""
    model: Any = llama()
    args = TrainingArguments(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows: Any = [{"input_ids": row, "labels": row} for row in IDS]
    Trainer(model=model, args=args, train_dataset=rows, callbacks=list(callbacks)).train()
    return [each.detach() for each in model.parameters()]


@cache
def plain_train(folder: str) -> list[Tensor]:
    return train(folder)


def trained(folder: str, **options: Any) -> str:
    import hf_ckpt

    found = train(folder, hf_ckpt.HFCkptCallback("ffn", **options))
    return "exact" if all(map(torch.equal, found, plain_train(folder))) else "other numbers"


def simulated() -> str:
    import hf_ckpt

    memory = hf_ckpt.simulate(llama(), plan="full", device="rtx4090", batch_size=2, seq_length=4)
    return "exact" if memory.peak_bytes > 0 else "nothing"


USES: dict[str, Callable[[str], str]] = {
    "full": lambda _: applied(llama, "full"),
    "ffn": lambda _: applied(llama, "ffn"),
    "callback": lambda folder: trained(folder),
    "ffn of opt": lambda _: applied(opt, "ffn"),
    "segments": lambda _: applied(llama, "full", segment_size=2),
    "selective": lambda _: applied(adapted, "selective"),
    "tiles": lambda _: applied(llama, "full", tiles=2),
    "head": lambda _: applied(llama, "full", head="chunked"),
    "offload": lambda _: applied(llama, "full", offload="cpu"),
    "escalate": lambda folder: trained(folder, on_oom="escalate"),
    "simulate": lambda _: simulated(),
}


def outcome(use: Callable[[str], str], folder: str) -> str:
    from hf_ckpt.errors import UnsupportedError

    try:
        return use(folder)
    except UnsupportedError as error:
        return str(error)
    except Exception:  # noqa: BLE001  # it is what went wrong
        return traceback.format_exc()


def report(library: str, name: str, folder: str) -> dict[str, Any]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_ckpt").addHandler(handler)
    try:
        if name:
            take_away(library, name)
        outcomes = {key: outcome(use, folder) for key, use in USES.items()}
        from hf_ckpt.upstream import missing

        return {"outcomes": outcomes, "logged": logged, "missing": missing()}
    except Exception:  # noqa: BLE001  # it is what went wrong
        return {"outcomes": {"import": traceback.format_exc()}, "logged": logged, "missing": []}


def main() -> None:
    """Answer line by line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # What a plain run imports and gives is there for all.
    plain_train(sys.argv[1])
    for build in (llama, opt, adapted):
        plain_step(build)
    for line in sys.stdin:
        library, _, name = line.strip().partition(" ")
        pid = os.fork()
        if not pid:
            text = json.dumps(report(library, name, sys.argv[1]))
            print(f"\n@{text}", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
