"""FLOPs of what runs, counted without hooks."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Flops(TorchDispatchMode):
    """Counts them as torch's `FlopCounterMode` does, whose hooks on modules and gradients keep graphs.

    `formulas` are those of operators for which torch has none; they are called as torch calls its own.
    """

    def __init__(self, formulas: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self._formulas = flop_registry | (formulas or {})
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        output = function(*args, **(kwargs or {}))
        if (count := self._formulas.get(function.overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=output)
        return output
