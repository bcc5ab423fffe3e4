"""The engine that a recipe will run on, and on how many processes: read from what starts it, without starting it.

In this order: `--engine` and `--processes`, accelerate's configuration file, the recipe's `training.fsdp` and
`training.deepspeed`, one process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from torch.torch_version import TorchVersion

from hf_ckpt.auto.live_step import SPLIT_SIZES, syncs_each_batch, zero_of
from hf_ckpt.errors import RecipeError
from hf_ckpt.estimate.launch_config import Launch, check_number, read_config
from hf_ckpt.loading.sharding_engine import Engine, says_yes
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.step import Sharding

_UNSHARDED = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU")
_WHOLE_LAYERS_IN_BACKWARD = ("FULL_SHARD", "1", "TRUE")
_PREFETCHES_IN_BACKWARD = {
    **dict.fromkeys(("BACKWARD_PRE", "1"), True),
    # A layer is freed before the next one is gathered.
    **dict.fromkeys(("BACKWARD_POST", "2", "NO_PREFETCH", "NONE"), False),
}


def sharding_of(recipe: Recipe, launch: Launch) -> Sharding:
    """Return what each process will hold."""
    launch.check()
    found = _of_file(launch.config) if launch.config is not None else Sharding()
    training = recipe.training
    of_recipe: Sharding | None = None
    if training.get("fsdp"):
        of_recipe = _fsdp(_fsdp_config(training), 1, where="training.fsdp_config")
    elif training.get("deepspeed"):
        of_recipe = _deepspeed(_mapping(training["deepspeed"]), 1, where="training.deepspeed")
    if of_recipe is not None:
        if found.engine not in ("none", "ddp"):
            raise RecipeError(
                f"training asks for {of_recipe.engine}, and {launch.config} for {found.engine}. Keep one of the two."
            )
        found = replace(of_recipe, world_size=found.world_size)
    engine = launch.engine or found.engine
    world_size = launch.num_processes or found.world_size
    if engine == "none" and world_size > 1:
        engine = "ddp"
    check_number(engine, world_size)
    if engine != found.engine:
        # What a file says of one engine does not hold for another.
        found = Sharding()
    syncs_each = syncs_each_batch(_mapping(recipe.training.get("accelerator_config") or {}))
    return replace(found, engine=engine, world_size=world_size, syncs_each_batch=syncs_each)


def describe_sharding(sharding: Sharding) -> str:
    """Return the engine in words, such as `FSDP2 on 8 processes`."""
    if sharding.engine == "none":
        return str(Engine.NONE)
    name = sharding.engine
    kind = f"{Engine.DEEPSPEED} ZeRO-{name[-1]}" if name.startswith("zero") else str(Engine[name.upper()])
    return f"{kind} on {sharding.world_size} processes"


# --- accelerate's file. ---


def _of_file(path: Path) -> Sharding:
    read = read_config(path)
    _check_whole_rows_and_weights(read.get("parallelism_config") or {}, path)
    kind = str(read.get("distributed_type", "NO")).upper()
    world_size = int(read.get("num_processes", 1))
    if kind in _UNSHARDED:
        return Sharding(engine="ddp" if world_size > 1 else "none", world_size=world_size)
    if kind == "FSDP":
        return _fsdp(_without_prefix(read.get("fsdp_config")), world_size, where=str(path))
    if kind == "DEEPSPEED":
        config = dict(read.get("deepspeed_config") or {})
        if "deepspeed_config_file" in config:
            config = _read_json(Path(config["deepspeed_config_file"]))
        return _deepspeed(config, world_size, where=str(path))
    raise RecipeError(
        f"{path}: distributed_type {kind} cannot be simulated. What can is one process, DDP (MULTI_GPU), FSDP and "
        "DEEPSPEED."
    )


def _check_whole_rows_and_weights(config: Mapping[str, Any], path: Path) -> None:
    """Refuse ranks that share rows or matrices, and weights that only some of them share."""
    sizes = {name.removeprefix("parallelism_config_"): value for name, value in config.items()}
    split = [name for name in ("tp_size", *SPLIT_SIZES) if int(sizes.get(name) or 1) > 1]
    if all(int(sizes.get(name) or 1) > 1 for name in ("dp_replicate_size", "dp_shard_size")):
        split.append("dp_replicate_size")
    if split:
        raise RecipeError(
            f"{path}: {split[0]} = {sizes[split[0]]} in parallelism_config cannot be simulated. What can is DDP, and "
            "FSDP and DEEPSPEED that share weights among all processes. Leave it out."
        )


def _without_prefix(written: Any) -> dict[str, Any]:
    """Return the keys of FSDP's section, each of which may begin with `fsdp_`, as they are without it."""
    return {name.removeprefix("fsdp_"): value for name, value in _mapping(written or {}).items()}


def _fsdp(config: Mapping[str, Any], world_size: int, *, where: str) -> Sharding:
    # accelerate itself takes version 1 where nothing is said.
    version = str(config.get("version", "1"))
    if says_yes(config.get("offload_params")) or says_yes(config.get("cpu_offload")):
        raise RecipeError(
            f"{where}: FSDP's offloading of parameters to the host cannot be simulated. Set fsdp_offload_params: false."
        )
    if version == "2":
        reshards = says_yes(config.get("reshard_after_forward", True))
        return Sharding(engine="fsdp2", world_size=world_size, reshards_after_forward=reshards)
    strategy = str(config.get("sharding_strategy", config.get("reshard_after_forward", "FULL_SHARD"))).upper()
    if strategy in ("NO_SHARD", "3"):
        return Sharding(engine="ddp", world_size=world_size)
    if "HYBRID" in strategy or strategy in ("4", "5"):
        raise RecipeError(
            f"{where}: FSDP's {strategy} shards within each machine, which cannot be simulated. Simulate one machine: "
            "FULL_SHARD with its number of processes."
        )
    return Sharding(
        engine="fsdp1",
        world_size=world_size,
        reshards_after_forward=strategy in _WHOLE_LAYERS_IN_BACKWARD,
        prefetches_in_backward=_prefetches_in_backward(config, where),
        # accelerate does where it loads the weights on rank 0 alone.
        broadcasts_weights=says_yes(config.get("sync_module_states", True))
        or says_yes(config.get("cpu_ram_efficient_loading")),
    )


def _prefetches_in_backward(config: Mapping[str, Any], where: str) -> bool:
    """Return whether FSDP1 gathers the next layer before one's gradients. accelerate does not unless it is asked to."""
    asked = str(config.get("backward_prefetch", "NO_PREFETCH")).upper()
    if asked not in _PREFETCHES_IN_BACKWARD:
        raise RecipeError(
            f'{where}: backward_prefetch is "{asked}". It is BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH, which is what '
            "leaving it out means."
        )
    return _PREFETCHES_IN_BACKWARD[asked]


def _deepspeed(config: Mapping[str, Any], world_size: int, *, where: str) -> Sharding:
    zero = config.get("zero_optimization", {})
    stage = int(zero.get("stage", config.get("zero_stage", 0)))
    devices = [config.get(f"offload_{what}_device") for what in ("optimizer", "param")]
    devices += [zero.get(f"offload_{what}", {}).get("device") for what in ("optimizer", "param")]
    if any(device not in (None, "none") for device in devices):
        raise RecipeError(
            f"{where}: DeepSpeed's offloading to the host cannot be simulated. Set the devices of offload_optimizer "
            "and offload_param to none."
        )
    if not stage:
        return Sharding(engine="ddp", world_size=world_size)
    return Sharding(engine=f"zero{stage}", world_size=world_size, zero=zero_of(config))


# --- The recipe. ---


def _fsdp_config(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fsdp_config` as transformers completes it: with the version, and what the words in `fsdp` ask for.

    Before transformers 5.10 version 1 is the default, and version 2 keeps whole layers unless it is told otherwise.
    """
    config = _without_prefix(training.get("fsdp_config"))
    is_recent = TorchVersion(transformers.__version__) >= "5.10"
    is_second = str(config.setdefault("version", 2 if is_recent else 1)) == "2"
    written = training["fsdp"]
    words = written.split() if isinstance(written, str) else [] if written is True else written
    if "offload" in words:
        config.setdefault("cpu_offload", True)
    strategy = next((word for word in words if word not in ("auto_wrap", "offload")), "full_shard")
    config.setdefault("reshard_after_forward", is_recent and strategy == "full_shard" if is_second else strategy)
    return config


def _mapping(written: Any) -> dict[str, Any]:
    return _read_json(Path(written)) if isinstance(written, str) else dict(written)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    return read
