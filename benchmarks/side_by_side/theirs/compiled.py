"""torch.compile on the decoder layers: with an activation memory budget, and with our plans.

Each layer is compiled, and not the model as a whole: layers that are alike share one graph, which is compiled once, and
the budget counts within a layer, so that no more than one layer is recomputed at a time. So does torchtitan.

On a CPU the compiler is `aot_eager_decomp_partition`: torch's partitioner decides what is kept as it does for Inductor,
and then the operators of its graphs run one by one, so that they can be counted. No code is generated: operations and
what is held from forward to backward are those of the graphs, the order within a graph, and so its peak, is Inductor's
to choose, and times say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ckpt
from benchmarks.side_by_side.contender import Contender, NotHereError
from hf_ckpt.errors import StructureError
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.structure.layers import find_layers

_BACKENDS = {"cpu": "aot_eager_decomp_partition"}
_BUDGETS = (0.2, 0.5, 0.8)
_WARMUP = 2
"""A layer that is kept selectively is compiled when it has been recomputed once."""


class GraphTracker(Tracker):
    """Follows storages, and sees the operators of compiled graphs as well.

    Under a mode that does not ask for this, torch runs what was compiled as if it was not; so no such mode may be
    entered with it, and no hooks may be put on modules. To be entered when all is compiled: after two steps, since a
    layer that our plan keeps selectively is compiled when it has been recomputed once.
    """

    # An operator that draws random numbers and is recomputed is, in a graph, the argument of another operator.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled stay compiled."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not isinstance(function, HigherOrderOperator):
            return super().__torch_dispatch__(function, types, args, kwargs)
        # Torch has left this mode for the call. `Tracker.__exit__` would end what is followed.
        TorchDispatchMode.__enter__(self)
        try:
            return function.py_kernels[DispatchKey.CPU](*args, **(kwargs or {}))
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)


@contextmanager
def _within_budget(model: nn.Module, *, budget: float) -> Iterator[nn.Module]:
    dropout = _active_dropout(model)
    if dropout:
        raise NotHereError(
            f"{dropout} is active, and torch.compile with activation_memory_budget below 1 draws other numbers when it "
            "recomputes dropout: gradients would be wrong"
        )
    with functorch_config.patch(activation_memory_budget=budget), _compiled(model):
        yield model


@contextmanager
def _planned(model: nn.Module, *, policy: str) -> Iterator[nn.Module]:
    with hf_ckpt.apply(model, policy), _compiled(model):
        yield model


@contextmanager
def _compiled(model: nn.Module) -> Iterator[None]:
    """Compile the decoder layers, from nothing: graphs do not know the budget that they were partitioned for."""
    try:
        layers = [layer.module for stack in find_layers(model) for layer in stack.layers]
    except StructureError as error:
        raise NotHereError(str(error)) from error
    device_type = next(model.parameters()).device.type
    if device_type == "cpu" and any(type(module).__name__.endswith("Experts") for module in model.modules()):
        raise NotHereError(
            "compiled for a CPU, transformers runs experts in one operator, transformers::grouped_mm_fallback, which "
            "hides its operations and makes gradients of frozen experts too"
        )
    backend = _BACKENDS.get(device_type, "inductor")
    torch._dynamo.reset()
    try:
        for layer in layers:
            layer.compile(backend=backend)
        yield
    finally:
        for layer in layers:
            # As of now torch has no way back.
            vars(layer).pop("_compiled_call_impl", None)
        torch._dynamo.reset()


def _active_dropout(model: nn.Module) -> str:
    """Return the path of something with a rate of dropout above zero; empty if there is none."""
    for path, module in model.named_modules():
        rates = {name: value for name, value in vars(module).items() if "dropout" in name}
        if isinstance(module, nn.Dropout):
            rates["p"] = module.p
        active = [name for name, value in rates.items() if isinstance(value, float) and value > 0]
        if active:
            return f"{path}.{active[0]}"
    return ""


CONTENDERS = (
    *(
        Contender(
            name=f"compiled_budget_{100 * budget:.0f}",
            title=f"torch.compile, activation_memory_budget={budget}",
            group="compiled",
            num_warmup=_WARMUP,
            enter=partial(_within_budget, budget=budget),
        )
        for budget in _BUDGETS
    ),
    *(
        Contender(
            name=f"compiled_{policy}",
            title=f"{policy}, compiled",
            group="compiled",
            num_warmup=_WARMUP,
            enter=partial(_planned, policy=policy),
        )
        for policy in ("full", "selective")
    ),
)
