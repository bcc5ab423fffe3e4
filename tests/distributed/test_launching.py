"""`accelerate launch` itself: the configurations that are shipped, exit codes, and who says what."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import ShardingStrategy

from tests import small_recipes, twins
from tests.distributed.launching import ROOT, config, parsed

CONFIGS = sorted(path.stem for path in (ROOT / "recipes" / "accelerate").glob("*.yaml"))
FSDP = [name for name in CONFIGS if name.startswith("fsdp")]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
TIMEOUT_S = 110
# The first process that ends has the launcher end the others, which are about to end with the same code.
ENDED_BY_LAUNCHER = "-15"


# --- Configurations. Read here as by accelerate, in one process. ---

reads = pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="once is enough")


@reads
@pytest.mark.distributed
@pytest.mark.parametrize("name", CONFIGS)
def test_accelerate_reads_the_configuration(name: str) -> None:
    args = parsed("--config_file", config(name), "--machine_rank", "1", "script.py")
    num_machines = 2 if "_2x8gpu" in name else 1
    assert (args.num_machines, args.num_processes) == (num_machines, 8 * num_machines)
    asked = {"fsdp": args.use_fsdp, "ddp": args.multi_gpu, "zero3": args.use_deepspeed}
    assert [engine for engine, is_asked in asked.items() if is_asked] == [
        name.partition("_")[0].replace("fsdp1", "fsdp").replace("fsdp2", "fsdp")
    ]
    # The recipe says it.
    assert args.mixed_precision == "no"


@reads
@pytest.mark.distributed
@pytest.mark.parametrize("name", FSDP)
def test_fsdp_gets_every_value_of_the_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parsed(
        "--config_file", config(name), "--main_process_port", "0", "--fsdp_sync_module_states", "false", "x.py"
    )
    given = prepare_multi_gpu_env(args)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    # It asks for a GPU otherwise.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    plugin = FullyShardedDataParallelPlugin()
    assert given["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    assert f"fsdp{plugin.fsdp_version}" == name.partition("_")[0]
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert str(plugin.state_dict_type) == "StateDictType.FULL_STATE_DICT"
    assert plugin.activation_checkpointing is False
    if plugin.fsdp_version == 2:
        assert plugin.reshard_after_forward is True
    else:
        assert plugin.sharding_strategy is ShardingStrategy.FULL_SHARD
        assert plugin.use_orig_params is True


# --- Launches. ---


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_cpu_threads_per_process", "1", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def launch(*arguments: str) -> tuple[int, str, str]:
    """Launch on two processes of this machine; give the exit code and what was printed."""
    given = ("--config_file", config("ddp_8gpu"), "--num_processes", "2", "--main_process_port", free_port())
    process = start(*given, "scripts/finetune.py", *arguments)
    try:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, printed, errors


def exit_codes(errors: str) -> set[str]:
    """What the launcher reports of the processes that failed."""
    return set(re.findall(r"exitcode +: (-?\d+)", errors))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    model = small_recipes.on_weights(twins.model(LLAMA))
    return small_recipes.write(tmp_path, model=model, lora=small_recipes.LORA, training={"max_steps": 2})


@pytest.mark.sweep
@pytest.mark.distributed
def test_wrong_recipe_is_told_once_and_ends_all(recipe: Path) -> None:
    code, printed, errors = launch(str(recipe), "training.learning_rat=1")
    assert code != 0
    assert printed == ""
    assert errors.count("training.learning_rat = 1: unknown key") == 1
    assert exit_codes(errors) <= {"2", ENDED_BY_LAUNCHER}
    assert "2" in exit_codes(errors)


# One launcher of two processes does the same and less: here each machine has its own.
@pytest.mark.distributed
@pytest.mark.sweep
def test_two_machines_run_one_recipe(recipe: Path, tmp_path: Path) -> None:
    port = free_port()
    shared = ("--config_file", config("ddp_2x8gpu"), "--num_processes", "2", "--main_process_ip", "127.0.0.1")
    command = ("scripts/finetune.py", str(recipe), "--merge")
    machines = [start(*shared, "--main_process_port", port, "--machine_rank", rank, *command) for rank in ("0", "1")]
    try:
        outputs = [machine.communicate(timeout=TIMEOUT_S) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    for line in (r"Engine +DDP on 2 processes; .*", r"Training data: .*", r" +all 56 tensors are there, .*"):
        assert [len(re.findall(rf"^{line}$", printed, re.MULTILINE)) for printed, _ in outputs] == [1, 0]
    assert "Recipe" not in outputs[1][0]
    assert {"adapter_model.safetensors", "hf_ckpt_plan.json", "merged"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }
