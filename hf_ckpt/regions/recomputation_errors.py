"""What is raised while a region is recomputed, as an error that says so: where, why, and which modes work there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from traceback import walk_tb

import torch
from torch import nn
from torch.distributed import DistError
from torch.utils.checkpoint import CheckpointError

from hf_ckpt.errors import RecomputationError, shortened
from hf_ckpt.upstream.torch import is_out_of_memory

# Other modes for the layer of a region, each with the modules that it recomputes of the region's, by name.
OtherModes = Mapping[str, Sequence[str]]

# Of torch's checkpoint it is the one that ends a recomputation early, whatever it is called.
_SIGNALS = ("hf_ckpt.", "torch._dynamo.", "torch._subclasses.", "torch.fx.", "torch.utils.checkpoint.")
_OF_DEVICES = (DistError, getattr(torch, "AcceleratorError", DistError))  # from torch 2.8 on
_MOST_TEXT = 240

_NOT_REPEATED = (
    "A branch that is taken differently, a router, or something that the first run has left behind, so that it is not "
    "computed again (functools.cache, an attribute of no module), would explain it."
)
_USED_UP = "An iterator or generator that the forward has used up would explain it: make it in the forward."
_TAKEN_OUT = (
    "Something that the forward has taken out of it (pop), or that stands there during the forward only, would explain "
    "it: leave it there until backward has ended."
)
_OVER = (
    "A context manager or variable that stands around the forward only, a lock, a file that is closed, or code that "
    "is to run once would explain it: keep such a thing open until backward has ended."
)


def is_for_others(error: Exception) -> bool:
    """Whether an error is to pass as it is: signals of this package and of torch, and what memory and devices report.

    Recovery knows memory by the type, compilers and simulations know what they have raised.
    """
    return (
        f"{type(error).__module__}.".startswith(_SIGNALS) or isinstance(error, _OF_DEVICES) or is_out_of_memory(error)
    )


def recomputation_error(
    error: Exception,
    path: str,
    module: nn.Module | None,
    modes: OtherModes | None,
    *,
    is_tiled: bool,
    differs_in: str | None,
) -> RecomputationError:
    """Return what to raise in the place of an error that is not for others.

    Args:
        error: what was raised.
        path: of the region.
        module: that of the region, if it is known.
        modes: None where it is not the region of a layer or a part.
        is_tiled: whether it is one run of many, on a part of the positions.
        differs_in: the module inside of which it differs, if that is known.
    """
    said = shortened(" ".join(str(error).partition("\nTip:")[0].split()), _MOST_TEXT).rstrip(".")
    if isinstance(error, CheckpointError):
        inside = differs_in
        place = f" What differs is in {inside}." if inside else ""
        # A layer may have torch's own checkpoint inside.
        what = f"does not repeat its forward there: {said.removeprefix('torch.utils.checkpoint: ')}.{place}"
        cause = _NOT_REPEATED
    else:
        inside = module_that_raised(error, module)
        raised = ": ".join(filter(None, (type(error).__name__, said)))
        when = "in a later slice what it did not in the first" if is_tiled else "there what it did not in the forward"
        what = f"{inside or 'its code'} raised {when}: {raised}."
        cause = _OVER
        if isinstance(error, LookupError):
            cause = _TAKEN_OUT
        elif isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration):
            cause = _USED_UP
    runs = "runs in tiles" if is_tiled else "is recomputed in backward"
    found = RecomputationError(f"{path} {runs}, and {what} {cause} {what_to_do(inside, modes, is_tiled=is_tiled)}")
    found.path = path
    return found


def module_that_raised(error: Exception, module: nn.Module | None) -> str | None:
    """Return the name of the innermost module inside of a region that ran; "" for the region's own."""
    names = {} if module is None else {id(each): name for name, each in module.named_modules()}
    owners = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    found = [names[id(owner)] for owner in owners if isinstance(owner, nn.Module) and id(owner) in names]
    return found[-1] if found else None


def what_to_do(inside: str | None, modes: OtherModes | None, *, is_tiled: bool = False) -> str:
    """Return which modes work for the layer of a region, as a sentence; `inside` is the module at fault, if known."""
    if is_tiled:
        return "Leave tiles out for its layer."
    if modes is None:
        return "Leave it out of the policy."
    others = [mode for mode, names in modes.items() if not any(f"{inside}.".startswith(f"{name}.") for name in names)]
    if not others:
        return 'Use mode "none" for the layer.'
    listed = " or ".join(f'"{mode}"' for mode in others)
    if inside is None and all(modes.values()):
        return f'Use mode "none" for the layer, or {listed}, which recompute a part of it each.'
    return f'Use mode {listed} for the layer, which does not run that again, or "none".'
