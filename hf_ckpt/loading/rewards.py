"""The functions that reward what a model writes, found by the names that a recipe gives them.

Names are those of trl's own command: one of its functions, such as `think_format_reward`, or where a function lies, as
`module.function` or `module:function`. What has a slash is a model that scores rows, by its hub id or folder.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_ckpt.errors import RecipeError, did_you_mean
from hf_ckpt.recipe.trainer_kinds import REWARDS

_OF_TRL: dict[str, dict[str, Any]] = {
    "accuracy_reward": {},
    "reasoning_accuracy_reward": {},
    "think_format_reward": {},
    # Makes a function: with what trl's command gives it.
    "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256},
}
_NEED_MATH_VERIFY = ("accuracy_reward", "reasoning_accuracy_reward")


def reward_functions(names: Sequence[str], folder: Path) -> list[Any]:
    """Return what each name stands for; of a model its name, which trl loads it by.

    Args:
        names: of `reward_funcs`.
        folder: of the recipe; modules are looked for there too, and where the command runs.

    Raises:
        RecipeError: one is not found.
    """
    with _importable(folder, Path.cwd()):
        return [_found(name) for name in names]


def _found(name: str) -> Any:
    if is_model(name):
        return name
    if name in _OF_TRL:
        function = _function("trl.rewards", name, name)
        return function(**_OF_TRL[name]) if _OF_TRL[name] else function
    module, separator, attribute = name.rpartition(":" if ":" in name else ".")
    if not separator:
        near = did_you_mean(name, _OF_TRL)
        raise _refused(
            name, f"trl has no such function.{near} It has {', '.join(_OF_TRL)}; yours is written module:function."
        )
    return _function(module, attribute, name)


def is_model(name: str) -> bool:
    """Whether a name is that of a model, and of no function."""
    return "/" in name


def _function(module: str, attribute: str, name: str) -> Callable[..., Any]:
    try:
        holder = importlib.import_module(module)
    # Whatever it raises while it is imported; an empty name is a ValueError.
    except Exception as error:
        what = str(error).partition("\n")[0].rstrip(".")
        raise _refused(name, f"module {module} cannot be imported ({type(error).__name__}: {what}).") from error
    found = getattr(holder, attribute, None)
    if not callable(found):
        near = did_you_mean(attribute, [each for each in vars(holder) if not each.startswith("_")])
        raise _refused(name, f"module {module} has no function {attribute}.{near}")
    if getattr(found, "__module__", "").startswith("trl.") and attribute in _NEED_MATH_VERIFY:
        _check_math_verify(name)
    made: Callable[..., Any] = found
    return made


def _check_math_verify(name: str) -> None:
    """Refuse now what trl would refuse when the first completions are there."""
    from trl.import_utils import is_math_verify_available

    if not is_math_verify_available():
        raise _refused(name, "needs math_verify, which is not installed. Run: pip install math-verify")


def _refused(name: str, what: str) -> RecipeError:
    return RecipeError(f'{REWARDS}: "{name}": {what}')


@contextmanager
def _importable(*folders: Path) -> Iterator[None]:
    """Let modules in these folders be imported, where nothing installed has their name."""
    found = list(sys.path)
    sys.path.extend(str(folder.resolve()) for folder in folders)
    try:
        yield
    finally:
        sys.path[:] = found
