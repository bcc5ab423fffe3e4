"""Unsloth's checkpointing with offload, as `use_gradient_checkpointing="unsloth"` turns it on.

Every layer is checkpointed, always reentrant, and its input is copied to a pinned buffer that is used again, on a
stream of its own; from the second step on the last layer's input stays. Only this is taken from unsloth: its kernels
and its forwards of models, which `import unsloth` puts in place for the whole process, are left out.

Unsloth allows other versions of transformers and trl than ours: environments/unsloth.txt.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import nn

from benchmarks.side_by_side.contender import OFFLOAD_WARMUP, Contender, NotHereError
from benchmarks.side_by_side.theirs.transformers_own import enable, put_back

_MODULE = "unsloth_zoo.gradient_checkpointing"
_FOR_THE_IMPORT = {
    # Left out, unsloth_zoo asks for `import unsloth` first.
    "UNSLOTH_IS_PRESENT": "1",
    # Its fused head would take the place of every contender's.
    "UNSLOTH_FUSED_FORWARD": "0",
    # It writes generated sources where the process runs.
    "UNSLOTH_COMPILE_LOCATION": str(Path(tempfile.gettempdir()) / "unsloth_compiled_cache"),
}


@contextmanager
def _offloaded(model: nn.Module) -> Iterator[nn.Module]:
    unsloth = _imported()
    weight = next(model.parameters())
    try:
        # It takes its buffers here, and pins them.
        unsloth.patch_unsloth_smart_gradient_checkpointing(weight.dtype)
    except RuntimeError as error:
        raise NotHereError(f"unsloth's offload fails here: {error}") from error
    try:
        if weight.device.type == "cpu":
            raise NotHereError("unsloth offloads from a GPU; the model is on a CPU")
        with put_back(model):
            # Asked for without reentrance, as transformers does; unsloth's function does not listen to that.
            enable(model)
            yield model
    finally:
        unsloth.unpatch_unsloth_smart_gradient_checkpointing()


def _imported() -> ModuleType:
    found = dict(os.environ)
    os.environ.update(_FOR_THE_IMPORT)
    try:
        return import_module(_MODULE)
    # The second is its word for a machine without a GPU.
    except (ImportError, NotImplementedError) as error:
        raise NotHereError(f"unsloth cannot be imported: {error}") from error
    finally:
        # It sets allocators, caches and kernels of the whole process by them.
        os.environ.clear()
        os.environ.update(found)


CONTENDERS = (
    Contender(
        name="unsloth_offload",
        title="unsloth, full with offload",
        group="elsewhere",
        enter=_offloaded,
        num_warmup=OFFLOAD_WARMUP,
    ),
)
