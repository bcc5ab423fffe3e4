"""Recipes on the two processes of a test, as `accelerate launch --config_file` would start them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from tests import twins
from tests.distributed.runs import fresh_accelerate

ROOT = Path(__file__).parents[2]


def made_by_first(make: Callable[[], Path]) -> Path:
    """Return, in both processes, the path that the first one makes."""
    path = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path, src=0)
    assert path[0] is not None
    return path[0]


def share_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make twins once for both: where there are several processes, save_pretrained writes in the first one only."""
    for name in ("model", "data"):
        make = getattr(twins, name)
        monkeypatch.setattr(
            twins, name, lambda hub_id, make=make, **fields: made_by_first(lambda: make(hub_id, **fields))
        )


def parsed(*arguments: str) -> argparse.Namespace:
    """What accelerate makes of the arguments of `accelerate launch`, its configuration file read."""
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*arguments]))
    return args


def config(name: str) -> str:
    """Return the path of a configuration that is shipped."""
    return str(ROOT / "recipes" / "accelerate" / f"{name}.yaml")


@contextmanager
def launched(name: str, *more: str) -> Iterator[None]:
    """Set the environment that accelerate gives the processes that it starts.

    Args:
        name: of a configuration that is shipped.
        more: further arguments of `accelerate launch`.
    """
    args = parsed("--config_file", config(name), "--main_process_port", "0", *more, "script.py")
    with fresh_accelerate():
        given = prepare_multi_gpu_env(args)
        os.environ.update({key: value for key, value in given.items() if key.startswith(("ACCELERATE_", "FSDP_"))})
        yield
