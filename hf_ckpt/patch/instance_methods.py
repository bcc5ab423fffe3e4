"""A method set on an instance, and taken off again wherever other libraries nest theirs with it.

A library that has put its own over ours calls ours for as long as its own stands, and puts ours back when it goes. So
a method that was taken off does nothing but call the original, wherever it is found, and is gone where it is put back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any

import torch


def set_method(owner: object, name: str, run: partial[Any]) -> partial[Any]:
    """Set `run` as a method of an instance, and return what was set."""
    # It is of a module-level function, so that copies and pickles of the owner have it too. Its last argument before
    # those of the call is the method that stood on the instance, or None for the class's own.
    _vanish(owner, name)
    ours = partial(run.func, *run.args, vars(owner).get(name))
    # Tools that look at the signature, and schedulers that look for a mark, see the original's.
    setattr(owner, name, update_wrapper(ours, getattr(owner, name)))
    return ours


def method_before(owner: object, name: str, found: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the method under the one that `set_method` has set: `found`, or the class's own where that is None."""
    return partial(getattr(type(owner), name), owner) if found is None else found


def take_off(owner: object, name: str, ours: Any) -> None:
    """Take off what `set_method` has set. If another method stands over it, that one stays."""
    # In place: whoever has put its own over ours, or keeps ours to put it back, has this object.
    ours.__setstate__((_call_original, (owner, name, ours.args[-1]), {}, vars(ours)))
    _vanish_when_put_back(weakref.ref(owner), name, weakref.ref(ours))


def run_all(undos: Iterable[Callable[[], object]]) -> None:
    """Call all of them, though some fail, and raise what failed: one error as it is, several as a group."""
    errors: list[Exception] = []
    for undo in undos:
        try:
            undo()
        except Exception as error:  # noqa: BLE001  # raised below: the others are to run first
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        texts = "; ".join(f"{type(error).__name__}: {error}" for error in errors)
        raise ExceptionGroup(f"{len(errors)} undos of a plan failed, the others ran. {texts}", errors)


def _call_original(owner: Any, name: str, found: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """What a method that was taken off has become."""
    if not torch.compiler.is_compiling():
        _vanish(owner, name)
    return method_before(owner, name, found)(*args, **kwargs)


def _vanish(owner: object, name: str) -> None:
    """Put back what stood there before methods that were taken off, where one of them stands there again."""
    there: Any = vars(owner).get(name)
    original = there
    while isinstance(original, partial) and original.func is _call_original:
        original = original.args[-1]
    if original is there:
        return
    if original is None:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def _vanish_when_put_back(its_owner: weakref.ref[Any], name: str, ours: weakref.ref[Any]) -> None:
    """Do that now, and again when the method that another library has put over ours is gone."""
    owner = its_owner()
    if owner is None or ours() is None:
        return
    _vanish(owner, name)
    over = vars(owner).get(name)
    try:
        weakref.finalize(over, _vanish_when_put_back, its_owner, name, ours).atexit = False
    except TypeError:
        # There is none, or it does not let itself be watched: then ours goes when it is called.
        return
