"""Whether a module holds a router, which sends each token elsewhere: found by what its code calls, and by names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch import nn

from hf_ckpt.structure.attention_and_ffn import words_of
from hf_ckpt.structure.called_names import class_calls

# What code that takes the best of some scores, or draws one by them, calls by name.
_CHOOSES = re.compile(r"topk|argmax|multinomial|kthvalue")
# A class of such a name belongs to a mixture, whatever its router calls (`max`, that of PhiMoE).
_WORDS = frozenset({"expert", "experts", "router"})


def has_router(modules: Iterable[nn.Module]) -> bool:
    """Whether one of the modules is, or belongs to, a router. Of the classes only, as it does not depend on weights."""
    kinds: set[Any] = {type(module) for module in modules}
    return any(map(_routes, kinds))


@lru_cache(maxsize=1024)
def _routes(kind: type[nn.Module]) -> bool:
    # What torch defines itself routes nothing.
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] != "torch"]
    return any(not _WORDS.isdisjoint(words_of(base.__name__)) or class_calls(base, _CHOOSES) for base in own)
