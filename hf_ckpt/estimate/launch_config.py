"""How a recipe is started, as far as that can be read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ckpt.errors import RecipeError, did_you_mean

ENGINES = ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
"""Engines of several processes, as `--engine` and `Sharding.engine` name them."""


@dataclass(frozen=True)
class Launch:
    """How a recipe is started, where the recipe itself does not say."""

    config: Path | None = None  # Accelerate's configuration file.
    engine: str | None = None  # One of `ENGINES`, in place of the file's.
    num_processes: int | None = None  # Of all machines together, in place of the file's.

    def check(self) -> None:
        """Refuse an engine that nobody knows, one of an unknown number of processes, and a file that is none."""
        if self.engine is not None and self.engine not in ENGINES:
            raise RecipeError(
                f'engine is "{self.engine}". Engines are {", ".join(ENGINES)}.{did_you_mean(self.engine, ENGINES)}'
            )
        if self.config is not None:
            read_config(self.config)
        elif self.engine is not None:
            check_number(self.engine, self.num_processes or 1)


def check_number(engine: str, num_processes: int) -> None:
    """Refuse an engine of several processes for one."""
    if num_processes == 1 and engine != "none":
        raise RecipeError(
            f"{engine} shares the work among processes, and how many there are is not said. Add --processes 8, or "
            "--accelerate-config with the file that the run is launched with."
        )


def read_config(path: Path) -> Mapping[str, Any]:
    """Read accelerate's configuration file."""
    import yaml

    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"--accelerate-config {path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(read, Mapping) or "distributed_type" not in read:
        raise RecipeError(
            f"--accelerate-config {path} is no configuration of accelerate, which has a distributed_type. Write one: "
            "accelerate config"
        )
    return read
