"""Attributes that are set for a while, and put back as they were found."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from torch import nn

from hf_ckpt.structure.stored import Missing, own, replaced, restore_own


@pytest.mark.parametrize("found", [None, False, "its own", Missing])
def test_attribute_is_put_back_as_it_was_found(found: object) -> None:
    owner = SimpleNamespace() if found is Missing else SimpleNamespace(name=found)
    before = dict(vars(owner))
    noted = own(owner, "name")
    owner.name = "ours"
    restore_own(owner, "name", noted)
    assert vars(owner) == before


def test_what_a_class_has_is_not_the_objects_own() -> None:
    module = nn.Linear(2, 2)
    assert own(module, "forward") is Missing
    with replaced(module, "forward", len):
        assert vars(module)["forward"] is len
    assert "forward" not in vars(module)


def test_a_pickle_keeps_what_stands_for_nothing() -> None:
    assert pickle.loads(pickle.dumps(Missing)) is Missing
