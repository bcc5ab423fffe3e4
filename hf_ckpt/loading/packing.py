"""Several documents in one row without padding: the collator, and whether a model keeps them apart.

The collator makes one row of a batch: `DataCollatorWithFlattening` writes position ids that restart with every
document, and transformers builds the mask of each document from them: in its mask functions for sdpa, eager and flex
attention, in the kernel's arguments for flash attention. Not every model comes that way (learned position offsets,
ALiBi, convolutions, recurrent states), so the model itself is asked (`check_packing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, PreTrainedModel

from hf_ckpt.errors import DataError
from hf_ckpt.upstream.transformers import attention_of, has_chunk_masks_by_document

_DOCUMENT_LENGTH = 6


class PackingCollator(DataCollatorWithFlattening):
    """Flattens a batch into one row [1, S] with `position_ids`, and asks the model for no cache.

    transformers looks for documents in `position_ids` only when there is no cache. With `use_cache` true, as it may be
    in evaluation, they would see each other, silently: loss and predictions are then those of one long text.
    """

    def __call__(self, features: list[dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return `input_ids`, `labels` and `position_ids`, each [1, S], and `use_cache` False."""
        batch: dict[str, Any] = super().__call__(features, *args, **kwargs)  # type: ignore[no-untyped-call]  # upstream
        return {**batch, "use_cache": False}


def packing_collator() -> PackingCollator:
    """Return a collator for packed batches of examples with `input_ids` and `labels`."""
    return PackingCollator()  # type: ignore[no-untyped-call]  # upstream


def check_packing(model: nn.Module) -> None:
    """Make sure that documents packed into one row do not see each other in this model.

    Runs two documents of six tokens forward and asks for the gradient of the second one's logits at the first one's
    embeddings. A masked position gives exactly zero, whatever the dtype or kernel. A model on `meta` is not asked; one
    on the CPU is asked with eager attention where its own (flash, flex) needs a GPU, so ask it on its device.

    `model`: a causal language model of transformers, with adapters or not, on its device and not yet wrapped. Modes and
    gradients are left as they were.
    """
    name = type(model).__name__
    causal_lm = cast(PreTrainedModel, model)  # PEFT's wrapper hands on what it does not have itself
    if _has_chunks_across_documents(causal_lm):
        raise DataError(_refusal(name, "chunks of its attention are counted from the start of the sequence"))
    if causal_lm.device.type == "meta":
        return
    if (leaked := _leaked_gradient(causal_lm)) != 0:
        attention = attention_of(causal_lm.config.get_text_config())
        seen = f"with {attention} attention, tokens depend on the document before theirs (gradient {leaked:.1e}, not 0)"
        raise DataError(_refusal(name, seen))


def _refusal(name: str, reason: str) -> str:
    return f"data.packing: {name} cannot keep packed documents apart: {reason}. Set data.packing to false."


def _has_chunks_across_documents(model: PreTrainedModel) -> bool:
    if has_chunk_masks_by_document():
        return False
    return "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or [])


def _leaked_gradient(model: PreTrainedModel) -> float:
    embedded: list[Tensor] = []

    def keep_output(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = model.get_input_embeddings().register_forward_hook(keep_output)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.enable_grad(), _attention_that_runs(model):
            logits = model.eval()(**_two_documents(model)).logits  # type: ignore[no-untyped-call]  # upstream
            of_second = logits[:, _DOCUMENT_LENGTH:].float().square().sum()
            (gradient,) = torch.autograd.grad(of_second, embedded[:1])
    finally:
        handle.remove()
        for module, mode in modes:
            module.training = mode
    return float(gradient[:, :_DOCUMENT_LENGTH].abs().max())


@contextmanager
def _attention_that_runs(model: PreTrainedModel) -> Iterator[None]:
    configs = {"": model.config, **{name: getattr(model.config, name) for name in model.config.sub_configs}}
    found = {name: attention_of(config) for name, config in configs.items() if config is not None}
    if model.device.type != "cpu" or set(found.values()) <= {"eager", "sdpa"}:
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(found)


def _two_documents(model: PreTrainedModel) -> dict[str, Any]:
    vocab_size: int = model.config.get_text_config().vocab_size
    tokens = [(7 * at + 3) % vocab_size for at in range(_DOCUMENT_LENGTH)]
    batch = packing_collator()([{"input_ids": tokens}, {"input_ids": tokens[::-1]}])
    del batch["labels"]
    return {key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()}
