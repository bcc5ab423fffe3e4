"""`hf-ckpt verify`: a recipe run a few steps with and without its plan, and everything compared.

reduce_model -> trial (each leaves a record) -> compare, state_checks, saved -> localize -> report
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_ckpt.verify.report import Report


class _Verify(ModuleType):
    """The package as the function of its name: `hf_ckpt.verify` is both, whichever of them was loaded first."""

    def __call__(self, *args: Any, **options: Any) -> Report:
        """Call `hf_ckpt.verify.run.verify`, which says what it takes."""
        from hf_ckpt.verify.run import verify

        return verify(*args, **options)


sys.modules[__name__].__class__ = _Verify
