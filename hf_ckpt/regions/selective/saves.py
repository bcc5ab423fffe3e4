"""What a layer keeps: a preset, or a list of operators and modules; checked and matched by name. Knows no policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from hf_ckpt.errors import PolicyError, did_you_mean
from hf_ckpt.regions.selective.operators import PRODUCTS, Kind, Role, is_narrow, kind_of

SELECTIVE = "selective"
SELECTIVE_ATTENTION = "selective_attention"

_PREFIX = "torch.ops."
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
_KERNELS = ("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention")


@dataclass(frozen=True)
class Saves:
    """What is kept of a layer's forward; everything else is recomputed.

    Routing decisions are kept beside, whatever is asked for.

    Args:
        preset: `selective` (matrix products and attention) or `selective_attention` (attention only); empty where the
            list says what is kept.
        names: operators (`aten.mm`, `aten.mm.default`, `mm`, `torch.ops.aten.mm`, `bitsandbytes.gemm_4bit`) and globs
            of module paths below the layer (`self_attn.*`, `mlp.down_proj`). An operator's outputs are kept wherever
            it runs; of a module those of the matrix products and attention kernels that run inside it. So
            `self_attn` takes in the kernel, which runs in its own forward, and `self_attn.*` the projections alone.
    """

    preset: str = ""
    names: tuple[str, ...] = ()

    @staticmethod
    def of(mode: str, save: Sequence[str] = ()) -> Saves:
        """Return what a mode keeps.

        Args:
            mode: `selective` or `selective_attention`.
            save: the user's list; the mode's own choice where it is empty.
        """
        # One object for all layers that keep the same: compiled layers share a graph only then.
        return _only("", tuple(save)) if save else _only(str(mode), ())

    @property
    def asked(self) -> tuple[str, ...]:
        """What has to occur."""
        return self.names or (self.preset,)

    @property
    def globs(self) -> tuple[str, ...]:
        """The names that stand for modules."""
        return _globs(self)

    @property
    def is_by_modules(self) -> bool:
        """Whether it does not matter by which operators a linear layer computes its product."""
        return _is_by_modules(self)

    def for_operator(self, kind: Kind, args: Any) -> tuple[str, ...]:
        """Return what of `asked` keeps the output of this call, wherever it runs; empty if nothing does."""
        if self.names:
            return _naming(self, kind.name, kind.packet)
        is_kept = kind.role is Role.ATTENTION
        if self.preset == SELECTIVE:
            is_kept = is_kept or (kind.role is Role.PRODUCT and not is_narrow(kind.packet, args))
        return (self.preset,) if is_kept else ()

    def may_keep(self) -> Mapping[Kind, bool]:
        """Return of which operators the output can be kept at all, somewhere in the layer."""
        return _may_keep(self)

    def ignores(self, function: Any) -> bool:
        """Whether an operator neither writes nor has an output that can be kept."""
        kind = kind_of(function)
        return not kind.written and not _may_keep(self)[kind]

    def matching(self, layer: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
        """Yield the modules below a layer that globs match, each with those globs."""
        for path, module in _modules(layer):
            found = tuple(glob for glob in self.globs if fnmatchcase(path, glob))
            if found:
                yield module, found


@lru_cache(maxsize=256)
def _only(preset: str, names: tuple[str, ...]) -> Saves:
    return Saves(preset, names)


def is_kept_in_modules(kind: Kind, args: Any) -> bool:
    """Whether an operator's output is kept where it runs in a module that was named."""
    return kind.role is Role.ATTENTION or (kind.role is Role.PRODUCT and not is_narrow(kind.packet, args))


def check_saves(saves: Saves, *layers: nn.Module) -> None:
    """Refuse names that torch does not know and that match no module in any of the layers.

    Args:
        saves: what the layers keep.
        layers: all that keep it, of one stack.

    Raises:
        PolicyError: names it, and the nearest name that there is.
    """
    paths = dict.fromkeys(path for layer in layers for path, _ in _modules(layer))
    for name in saves.names:
        operators = _operators(name)
        if any(fnmatchcase(path, name) for path in paths):
            continue
        if not operators:
            near = did_you_mean(name.removeprefix(_PREFIX), [*paths, *sorted(PRODUCTS), *_KERNELS])
            raise PolicyError(
                f'save: "{name}" is no operator that torch knows, and no module of the layer matches it. Name an '
                "operator as torch dispatches it (aten.mm; of another library once that is imported), or a module "
                f"by its path below the layer, * for any characters ({_some(paths)}).{near}"
            )
        if not any(kind_of(operator).returns_new for operator in operators):
            raise PolicyError(
                f'save: "{name}" makes no tensor of its own: it returns a view of its input or writes into it. Name '
                "the operator that made that input, such as aten.mm."
            )


def _some(paths: Sequence[str] | dict[str, None]) -> str:
    leaves = [path for path in paths if not any(other.startswith(path + ".") for other in paths)]
    return ", ".join(leaves[:8]) + (", ..." if len(leaves) > 8 else "")


def _modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for raw, module in layer.named_modules():
        # Engines and compilers put modules of their own around others, which a plan does not name.
        names = [name for name in raw.split(".") if name not in _WRAPPERS]
        if names and names[0]:
            yield ".".join(names), module


@lru_cache(maxsize=256)
def _is_by_modules(saves: Saves) -> bool:
    return not any(_operators(name) for name in saves.names)


@lru_cache(maxsize=256)
def _may_keep(saves: Saves) -> _MayKeep:
    return _MayKeep(saves)


class _MayKeep(dict[Kind, bool]):
    """Of which operators an output can be kept; found out when it is first asked."""

    def __init__(self, saves: Saves) -> None:
        super().__init__()
        self._saves = saves

    def __missing__(self, kind: Kind) -> bool:
        is_named = bool(self._saves.names) and bool(_naming(self._saves, kind.name, kind.packet))
        self[kind] = kind.returns_new and (is_named or kind.role is not Role.CHEAP)
        return self[kind]


@lru_cache(maxsize=256)
def _globs(saves: Saves) -> tuple[str, ...]:
    # A word may be both, as `conv1d`: then it stands for both.
    return tuple(name for name in saves.names if not _is_certain(name) or not _operators(name))


def _is_certain(name: str) -> bool:
    return name.startswith(("aten.", "aten::", _PREFIX, "prims.")) or "::" in name


@lru_cache(maxsize=4096)
def _naming(saves: Saves, name: str, packet: str) -> tuple[str, ...]:
    return tuple(asked for asked in saves.names if {name, packet} & _full_names(asked))


@lru_cache(maxsize=1024)
def _full_names(name: str) -> frozenset[str]:
    """Return what a name can mean, as `Kind` has it: `aten.mm` for `mm`."""
    plain = name.removeprefix(_PREFIX).replace("::", ".")
    full = {plain, f"aten.{plain}"}
    return frozenset(full | {f"higher_order.{plain}"} if "." not in plain else full)


def _operators(name: str) -> list[Any]:
    """Return the overloads that a name means; none where torch knows no such operator."""
    found: list[Any] = []
    for full in _full_names(name):
        parts = full.split(".")
        if not all(part.isidentifier() for part in parts) or len(parts) not in (2, 3):
            continue
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
        if packet is None:
            continue
        if not hasattr(packet, "overloads"):
            found += [packet] if len(parts) == 2 else []
        else:
            wanted = parts[2:] or packet.overloads()
            found += [getattr(packet, overload) for overload in wanted if hasattr(packet, overload)]
    return found
