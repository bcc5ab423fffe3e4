"""The language-model head of a model: the module that turns hidden states into logits; found by structure.

Knows no policy. Also finds whether another library computes head and loss together already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.structure.attention_and_ffn import unwrapped
from hf_ckpt.structure.layers import class_name, clean_path, modules_down_to, path_of
from hf_ckpt.structure.stored import stored
from hf_ckpt.upstream.torch import COMPILED_INSIDE

_FUSING = ("liger_kernel", "trl", "unsloth", "unsloth_zoo", "axolotl", "cut_cross_entropy")
"""Libraries that put a forward with a fused head and loss, or a cross entropy of their own, onto models."""

_LINEAR = frozenset({"Linear4bit", "Conv1D", "NonDynamicallyQuantizableLinear"})
"""Besides `nn.Linear`: of bitsandbytes, transformers and torch. All treat each position alone."""

_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList, nn.Identity)


@dataclass(frozen=True)
class Head:
    """The head of a model."""

    path: str
    """Without the wrappers of engines."""
    module: nn.Module
    """The head; PEFT's layer around it where an adapter is on it."""
    outer: nn.Module
    """What stands in its place: FSDP1's wrapper around it, or the head itself."""
    owner: nn.Module
    """The outermost module that names it as its output embeddings."""


def find_head(model: nn.Module) -> Head:
    """Find the head of a model, whatever stands around it; refuse one that does not treat each position alone.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
        >>> find_head(LlamaForCausalLM(config)).path
        'lm_head'
    """
    _check_not_compiled(model)
    owner, outer = next(_output_embeddings(model), (None, None))
    if owner is None or outer is None:
        raise UnsupportedError(
            f"head: chunked was asked for, but {class_name(model)} has no language-model head (its "
            "get_output_embeddings() returns none): there are no logits over a vocabulary. Leave head out."
        )
    path = path_of(model, outer)
    if path is None or isinstance(outer, nn.ModuleList):
        raise UnsupportedError(
            f"head: chunked was asked for, but the head of {class_name(model)} is {type(outer).__name__}, not one "
            "module of the model. Leave head out."
        )
    head = Head(clean_path(model, path), unwrapped(outer), outer, owner)
    _check_position_wise(head)
    return head


def governed_by_other(model: nn.Module) -> str | None:
    """Return the library that computes head and loss of a model together, such as `liger_kernel`; None without one."""
    _, head = next(_output_embeddings(model), (None, None))
    # Around the head, from the outside; the model alone where it has no head.
    for module in modules_down_to(model, path_of(model, head) or "")[:-1] or [model]:
        for name in _origins(module.__dict__.get("forward", type(module).forward)):
            if (library := name.partition(".")[0]) in _FUSING:
                return library
    # Liger can replace it for the whole process. It reads logits by their address.
    return next(
        ("liger_kernel" for name in _origins(functional.cross_entropy) if name.startswith("liger_kernel")), None
    )


def _check_not_compiled(model: nn.Module) -> None:
    if hasattr(model, COMPILED_INSIDE):
        raise UnsupportedError(
            "head: chunked was asked for, but the whole model is compiled (torch.compile), which cannot trace logits "
            "that are put off. Compile the layers alone (model.model.layers), or leave head out."
        )


def _output_embeddings(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the modules that name output embeddings, the outermost first, and what they name."""
    for module in model.modules():
        if hasattr(module, "get_output_embeddings"):
            head: Any = module.get_output_embeddings()  # type: ignore[operator]  # a method, not a submodule
            if isinstance(head, nn.Module):
                yield module, head


def _origins(function: Any) -> Iterator[str]:
    """Yield the modules that a function and whatever it is wrapped around come from."""
    # A wrapper may go by the name of what it wraps, and what it wraps by the name of what it replaces: both count.
    while function is not None:
        while isinstance(function, partial):
            function = function.func
        plain = getattr(function, "__func__", function)
        yield str(getattr(plain, "__module__", ""))
        yield str(getattr(plain, "__globals__", {}).get("__name__", ""))
        function = getattr(function, "__wrapped__", None)


def _check_position_wise(head: Head) -> None:
    """Refuse heads that mix positions, or that may: what is not known is refused."""
    for name, module in head.module.named_modules():
        where = f"{head.path}.{name}" if name else head.path
        module = unwrapped(module)
        if "Dropout" in type(module).__name__:
            if stored(module, "p"):
                raise UnsupportedError(
                    f"head: chunked was asked for, but {where} drops values at random (p={module.p}): its masks would "
                    "be drawn chunk by chunk, and the loss would differ. Set lora_dropout to 0, leave the head out of "
                    "the adapter's target_modules, or leave head: chunked out."
                )
        elif not _is_position_wise(module):
            raise UnsupportedError(
                f"head: chunked was asked for, but {where} is {class_name(module)}, which is not known to "
                "treat each position alone. Leave head out."
            )


def _is_position_wise(module: nn.Module) -> bool:
    if isinstance(module, _CONTAINERS) or type(module).forward is nn.Linear.forward:
        return True
    names = {kind.__name__ for kind in type(module).__mro__}
    # All tuners of PEFT change the weight, or add to the output of each position.
    return bool(names & _LINEAR) or type(module).__module__.startswith("peft.")
