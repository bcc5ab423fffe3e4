"""axolotl's plugin, against the signatures of axolotl's source, with a stand-in where axolotl is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hf_ckpt import PolicyError
from hf_ckpt.policy.policy import Mode
from tests.training import llama, trainer

NAME = "hf_ckpt.integrations.axolotl"

# The arguments of BasePlugin's methods, in order: src/axolotl/integrations/base.py of commit 002a637c.
SIGNATURES = {
    "register": ["cfg"],
    "get_input_args": [],
    "load_datasets": ["cfg", "preprocess"],
    "pre_model_load": ["cfg"],
    "post_model_build": ["cfg", "model"],
    "pre_lora_load": ["cfg", "model"],
    "post_lora_load": ["cfg", "model"],
    "post_model_load": ["cfg", "model"],
    "get_trainer_cls": ["cfg"],
    "post_trainer_create": ["cfg", "trainer"],
    "create_optimizer": ["cfg", "trainer"],
    "create_lr_scheduler": ["cfg", "trainer", "optimizer", "num_training_steps"],
    "add_callbacks_pre_trainer": ["cfg", "model"],
    "add_callbacks_post_trainer": ["cfg", "trainer"],
    "post_train": ["cfg", "model"],
    "post_train_unload": ["cfg"],
}


class StandIn:
    """As much of axolotl's BasePlugin as a plugin inherits."""


class Config(dict[str, Any]):
    """Answers None for a name that it has not, as axolotl's does."""

    def __missing__(self, name: str) -> None:
        return None


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, imported as axolotl does by its dotted name."""
    if importlib.util.find_spec("axolotl") is None:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules["axolotl.integrations.base"], "BasePlugin", StandIn, raising=False)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def test_methods_take_what_axolotl_gives(plugins: ModuleType) -> None:
    own = {name: each for name, each in vars(plugins.HFCkptPlugin).items() if inspect.isfunction(each)}
    assert own
    for name, method in own.items():
        _, *arguments = inspect.signature(method).parameters
        assert arguments == SIGNATURES[name], name


def test_a_run_is_governed_by_the_section(plugins: ModuleType, tmp_path: Path) -> None:
    plugin = plugins.HFCkptPlugin()
    assert isinstance(plugin, sys.modules["axolotl.integrations.base"].BasePlugin)
    rules = [Config(layers="0:2", mode="full"), Config(layers=2, mode="ffn")]
    model = llama()
    (callback,) = plugin.add_callbacks_pre_trainer(Config(hf_ckpt=Config(policy=rules)), model)
    trainer(model, tmp_path, callback).train()
    assert callback.plan is not None
    assert [layer.mode for layer in callback.plan.stacks[0].layers] == [Mode.FULL, Mode.FULL, Mode.FFN, Mode.NONE]


def test_the_section_has_a_model_that_axolotl_finds_by_name(plugins: ModuleType) -> None:
    pytest.importorskip("pydantic")
    module, _, name = plugins.HFCkptPlugin().get_input_args().rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert found(hf_ckpt={"policy": "full"}).hf_ckpt == {"policy": "full"}
    assert found().hf_ckpt is None


def test_a_plugin_without_its_section_is_refused(plugins: ModuleType) -> None:
    with pytest.raises(PolicyError, match=r"names no policy for it. Write, for instance, hf_ckpt: {policy: auto"):
        plugins.HFCkptPlugin().add_callbacks_pre_trainer(Config(base_model="x"), None)


def test_the_file_can_be_read_without_axolotl() -> None:
    if importlib.util.find_spec("axolotl") is None:
        sys.modules.pop(NAME, None)
        assert importlib.import_module(NAME).HFCkptPlugin.__mro__[1] is object
