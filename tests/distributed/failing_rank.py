"""A run of two processes in which something befalls one of them.

`torchrun ... failing_rank.py FAULT VICTIM` is one process of such a run; VICTIM is a rank. Without arguments this is a
process that has imported everything and starts runs, one for each line of standard input, under torchrun's own agent
but forked: that is quicker than to start two interpreters each time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

sys.path.insert(0, str(Path(__file__).parents[2]))
from hf_ckpt import HFCkptCallback
from hf_ckpt.distributed import store, watchdog
from tests.distributed import runs
from tests.training import During, llama, trainer

LIMIT_S = 90
"""After so many seconds a process is given up."""
LINGERS_S = 10
BOTH = -1
ENGINES = ("ddp", "ddp that clips", "fsdp2", "fsdp2 that saves", "ddp in SFTTrainer", "ddp in DPOTrainer")


def raise_in_forward(model: nn.Module) -> None:
    """Let the next forward raise in the middle of the model."""
    model.get_submodule("model.layers.2.mlp").register_forward_pre_hook(_raise)


def _raise(*args: Any) -> NoReturn:
    raise ValueError("a layer failed")


def kill_in_forward(model: nn.Module) -> None:
    """Let the next forward end this process, as the kernel does when memory is out."""
    model.get_submodule("model.layers.2.mlp").register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def cannot_be_planned(model: nn.Module) -> None:
    """Make it another model than the others': a layer that computes its own backward is refused any mode."""
    model.get_submodule("model.layers.1").backward_pass = abs


def exit_unseen(_: nn.Module) -> NoReturn:
    """Exit with 0, which no agent takes for a failure."""
    # Of an explicit 0 torchrun's wrapper around a function makes a return.
    sys.exit()


IN_TRAINING: dict[str, Callable[[nn.Module], None]] = {"raises": raise_in_forward, "is killed": kill_in_forward}


def run_out_of_memory(engine: str, victim: int) -> None:
    """Train; when most of its gradients are there, memory of the victim runs out for good."""
    folder = Path(os.environ["FOLDER"])
    callbacks = [During("on_step_end", save_weights, step=2)]
    if int(os.environ["RANK"]) == victim or victim == BOTH:
        fail = fail_in_clipping if engine.endswith("clips") else fail_in_backward
        callbacks.append(During("on_step_begin", fail, step=2))
    saving = {"save_strategy": "steps", "save_steps": 1} if engine == "fsdp2 that saves" else {}
    callback = HFCkptCallback("none", on_oom="escalate")
    if engine.startswith("ddp in "):
        train_in_trl(engine.removeprefix("ddp in ").removesuffix("Trainer"), folder, [callback, *callbacks])
        return
    # With it the whole process uses one engine.
    with runs.fresh_accelerate():
        asked = runs.engine_arguments(engine.partition(" ")[0])
        trainer(llama(), folder / "run", callback, *callbacks, max_steps=50, **saving, **asked).train()


def train_in_trl(kind: str, folder: Path, callbacks: list[Any]) -> None:
    """Train in a trainer of trl, and leave in files what it had counted when the last step began, and at the end."""
    from tests import trl_trainers

    counted: list[Any] = []

    def count(_: object = None) -> None:
        train = {name: list(values) for name, values in run._metrics["train"].items()}
        counted.append([train, run._total_train_tokens])

    with runs.fresh_accelerate():
        engine = runs.engine_arguments("ddp")
        callbacks = [*callbacks, During("on_step_begin", count, step=2)]
        # Logging clears what was counted.
        settings = {"max_steps": 50, "gradient_accumulation_steps": 2, "logging_steps": 10, **engine}
        case = "whole" if kind == "SFT" else "separate"
        run: Any = trl_trainers.trainer(kind, case, folder / "run", *callbacks, **settings)
        try:
            run.train()
        finally:
            count()
            (folder / f"counted {os.environ['RANK']}").write_text(json.dumps(counted))


def fail_in_backward(model: nn.Module) -> None:
    """Let the backward end when the first layer's gradients come, which are the last but that of the embeddings."""
    weight = model.get_submodule("model.layers.0.self_attn.q_proj").weight
    weight.register_post_accumulate_grad_hook(_out_of_memory)


def fail_in_clipping(_: nn.Module) -> None:
    """Let gradients that are there not be clipped."""
    torch.nn.utils.clip_grad_norm_ = _out_of_memory


def _out_of_memory(*args: Any, **kwargs: Any) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def save_weights(model: nn.Module) -> None:
    """Leave what the weights are, in this process, in a file."""
    torch.save(runs.whole(model), Path(os.environ["FOLDER"]) / f"weights {os.environ['RANK']}.pt")


def stop_for(seconds: float) -> None:
    """Stop this process, as a debugger does, with all its threads."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def run(fault: str, victim: int) -> None:
    """Train for more steps than are reached."""
    model, policy, callbacks = llama(), "full", []
    # Minutes, for a run whose processes have come apart by other work.
    store.PATIENCE_S = 5
    if int(os.environ["RANK"]) == victim:
        if fault == "exits while saving":
            callbacks.append(During("on_save", exit_unseen))
        elif fault in IN_TRAINING:
            callbacks.append(During("on_step_begin", IN_TRAINING[fault], step=2))
        elif fault == "has another policy":
            policy = "attention"
        elif fault == "has no policy":
            trainer(model, Path(tempfile.mkdtemp()), max_steps=50).train()
        else:
            cannot_be_planned(model)
    with tempfile.TemporaryDirectory() as folder:
        saving = {"save_strategy": "steps", "save_steps": 2} if fault == "exits while saving" else {}
        trainer(model, Path(folder), HFCkptCallback(policy), *callbacks, max_steps=50, **saving).train()


def run_and_linger(victim: int, event: str) -> None:
    """Train; the victim raises, but its process lives on with all its connections, as in a notebook."""
    watchdog._GRACE_S, watchdog._LOOK_S = 1.0, 0.2
    where = During(event, raise_in_forward if event == "on_step_begin" else _raise, step=2)
    callbacks = [where] if int(os.environ["RANK"]) == victim else []
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer(llama(), Path(folder), HFCkptCallback("full"), *callbacks, max_steps=50).train()
    except ValueError:
        time.sleep(LINGERS_S)
        raise


def be_slow(victim: int) -> None:
    """Train to the end, though one process takes longer than every timeout, and is stopped for a while."""
    watchdog._LOOK_S, watchdog._GRACE_S = 0.1, 0.5
    store.PATIENCE_S = 0.5
    callbacks: list[Any] = [HFCkptCallback("full")]
    if int(os.environ["RANK"]) == victim:
        # Before the plugin's own, so that the other process waits for this one there.
        callbacks[:0] = [During(event, lambda _: time.sleep(1.2)) for event in ("on_init_end", "on_train_begin")]
        callbacks.append(During("on_step_end", lambda _: stop_for(1.2), step=2))
    with tempfile.TemporaryDirectory() as folder:
        # As one that writes for long: the other waits in the next collective.
        callbacks.append(During("on_save", lambda _: time.sleep(1.2 * (int(os.environ["RANK"]) == victim))))
        trainer(llama(), Path(folder), *callbacks, max_steps=4, save_strategy="steps", save_steps=3).train()


def serve() -> None:
    """Have torchrun's agent run two processes for each line; print a line with what became of them."""
    # accelerate imports DeepSpeed with the first Trainer, in each process were it not here already. It would tell on
    # standard output that it finds no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.suppress(ImportError):
        importlib.import_module("deepspeed")
    # A child that searches all this for garbage, as the Trainer does, would copy it.
    gc.freeze()
    for line in sys.stdin:
        fault, victim, folder = json.loads(line)
        if fault.endswith("Trainer"):
            importlib.import_module("tests.trl_trainers")
        sys.stdout.flush()
        # The agent in a process of its own: no thread of it is here when the next processes are forked.
        if not (agent := os.fork()):
            supervise(fault, victim, Path(folder))
            os._exit(0)
        os.waitpid(agent, 0)
        print((Path(folder) / "end").read_text(), flush=True)
    # Else nanobind, at exit, takes what is frozen for leaked.
    gc.unfreeze()


def supervise(fault: str, victim: int, folder: Path) -> None:
    """Be torchrun's agent; leave in the folder the exit code of whichever process failed first, and the seconds."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="a run",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    redirect(folder, "agent")
    start, failed = time.monotonic(), {}
    try:
        elastic_launch(config, be_a_rank)(fault, victim, folder)
    except ChildFailedError as error:
        failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
    (folder / "end").write_text(json.dumps([failed, time.monotonic() - start]))


def be_a_rank(fault: str, victim: int, folder: Path) -> None:
    """Be one of the processes that the agent started; leave in the folder what it says."""
    redirect(folder, os.environ["RANK"])
    os.environ["FOLDER"] = str(folder)
    # A process that torchrun starts has none of the agent's handlers, which would make an exception of it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Where a crash of torch's own happens.
    faulthandler.enable()
    # Nothing ends a test whose processes wait for each other.
    signal.alarm(LIMIT_S)
    try:
        carry_out(fault, victim)
    except Exception as error:
        # As the interpreter does with what nobody catches: multiprocessing hands it to the agent.
        sys.last_value = error
        traceback.print_exc()
        raise


def redirect(folder: Path, who: str) -> None:
    """Write to files in the folder from here on."""
    for name, stream in ((os.devnull, 0), (folder / f"stdout {who}", 1), (folder / f"stderr {who}", 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)


def carry_out(fault: str, victim: int) -> None:
    """Let something befall a rank."""
    others: dict[str, Callable[[int], None]] = {
        "raises and lingers": partial(run_and_linger, event="on_step_begin"),
        "leaves and lingers": partial(run_and_linger, event="on_step_end"),
        "is slow": be_slow,
        **{f"is out of memory under {engine}": partial(run_out_of_memory, engine) for engine in ENGINES},
    }
    others.get(fault, partial(run, fault))(victim)


if __name__ == "__main__":
    if sys.argv[1:]:
        carry_out(sys.argv[1], int(sys.argv[2]))
    else:
        serve()
