"""What every test runs under: no network, a cache of its own, one thread, and no deprecated call into transformers."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from typing import Any
from unittest import mock

import pytest

# Imports leave no garbage, and searching for it would take a fifth of their time.
gc.disable()

# Libraries read these when they are imported, and processes that tests start inherit them.
_CACHE = tempfile.TemporaryDirectory(prefix="hf_ckpt-tests-", ignore_cleanup_errors=True)
os.environ["HF_HOME"] = _CACHE.name
os.environ["HF_HUB_OFFLINE"] = "1"
# No answer of a command is kept, or taken from the user's: no folder can be made there.
os.environ["HF_CKPT_CACHE"] = os.devnull
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is printed is as wide as the terminal that tests are run from.
os.environ["COLUMNS"] = "80"

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let the configuration stand where pytest-timeout is not installed; nothing ends what hangs there."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds, as pytest-timeout has it")
        parser.addini("timeout_method", "as pytest-timeout has it")
    parser.addoption("--cases", type=int, help="run at most so many cases of each test; `sweep` says another number")


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker of pytest-timeout."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): as pytest-timeout has it")


class DeprecationRecorder(logging.Handler):
    """Keeps what a library's loggers say about deprecation."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "deprecat" in message.lower():
            self.messages.append(f"{record.name}: {message}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test during which transformers logged that it is used in a deprecated way.

    transformers tells of most deprecations through its loggers, which `filterwarnings` does not see. Where
    `-W default` lets warnings of versions pass that nobody here has seen, these pass as well.
    """
    recorder = DeprecationRecorder()
    logger = logging.getLogger("transformers")
    logger.addHandler(recorder)
    try:
        result = yield
    finally:
        logger.removeHandler(recorder)
    if recorder.messages and "default" not in (item.config.getoption("pythonwarnings") or ()):
        pytest.fail("\n".join(["transformers reports deprecated use:", *recorder.messages]), pytrace=False)
    return result


def keep_some_cases(config: pytest.Config, items: list[pytest.Item], most: int) -> None:
    """Leave so many cases of each test: the first, the last, and others evenly between them."""
    tests: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        marker = cases[0].get_closest_marker("sweep")
        keep = min(marker.kwargs.get("keep", 0) if marker else most, len(cases))
        kept = {round(i * (len(cases) - 1) / max(keep - 1, 1)) for i in range(keep)}
        left_out.update(case for i, case in enumerate(cases) if i not in kept)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files with tests marked `slow` first, so that no process is left with one of them in the end.

    Skip tests marked `gpu` where there is no CUDA device, and those marked `browser` where there is no chromium.
    """
    if (most := config.getoption("cases")) is not None:
        keep_some_cases(config, items, most)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if item.get_closest_marker("browser") and not any(map(shutil.which, CHROMIUM)):
            item.add_marker(pytest.mark.skip(reason="needs an installed chromium"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Search for garbage from now on, but not among what was imported.

    Seed no device that is not there: torch keeps each seed for it, with the stack of who set it, for good.
    """
    gc.freeze()
    gc.enable()
    torch = sys.modules.get("torch")
    for device in (getattr(torch, name, None) for name in ("cuda", "xpu", "mtia")):
        if device is not None and not device.is_available():
            device.manual_seed_all = lambda seed: None


# Else nanobind, at exit, takes what is frozen for leaked.
atexit.register(gc.unfreeze)


_num_full_searches = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Take what is there before a test out of what is searched for garbage, which the Trainer does in each run.

    That search takes several times as long as the rest of a tiny run. What the test before left is searched once more.
    """
    stash, num_searches = item.session.stash, gc.get_stats()[-1]["collections"]
    if num_searches > stash.get(_num_full_searches, -1):
        gc.collect()
        gc.freeze()
        stash[_num_full_searches] = num_searches + 1


@pytest.fixture(autouse=True)
def _environment_is_put_back() -> Iterator[None]:
    """Undo what accelerate and the Trainer write into the environment, such as ACCELERATE_USE_FSDP."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _loggers_are_put_back() -> Iterator[None]:
    """Undo what the fine-tuning command sets for the process that it usually has to itself."""
    loggers = [logging.getLogger(name) for name in ("hf_ckpt", "bitsandbytes")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _overrides_of_bitsandbytes_are_forgotten() -> Iterator[None]:
    """Undo what its optimizers note for the process: the numbers and addresses of weights whose state has 32 bits."""
    yield
    optimizer: Any = sys.modules.get("bitsandbytes.optim.optimizer")
    if optimizer is not None:
        optimizer.GlobalOptimManager._instance = None


@pytest.fixture(scope="module")
def remembered_simulations() -> Iterator[None]:
    """Simulate a step once, however many tests of a module, and of others like it, ask for it."""
    from tests.simulations import remembered

    with remembered():
        yield


@pytest.fixture(autouse=True)
def _no_test_ends_this_process() -> Iterator[None]:
    """Those behind it would not run, and with code 0 nobody would know."""
    end, process = os._exit, os.getpid()

    def end_forked(code: int) -> None:
        if os.getpid() == process:
            raise AssertionError(f"a test ends the process with code {code}")
        end(code)

    with mock.patch.object(os, "_exit", end_forked):
        yield
