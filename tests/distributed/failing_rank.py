"""A run of two processes in which something befalls one of them.

`torchrun ... failing_rank.py FAULT VICTIM` is one process of such a run; VICTIM is a rank. Without arguments this is a
process that has imported everything and starts runs, one for each line of standard input, whose processes nobody looks
after: that is quicker than to start two interpreters each time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from hf_ckpt import HFCkptCallback
from hf_ckpt.cli import finetune
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


IN_TRAINING: dict[str, Callable[[nn.Module], None]] = {"raises": raise_in_forward, "is killed": kill_in_forward}


def kill_with_a_child(*_: object) -> NoReturn:
    """Be killed where a child that was forked, as for loading data, lives on with all that was open."""
    if not os.fork():
        time.sleep(LIMIT_S)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is gone")


def wait_for_connection() -> None:
    """Wait until the other process would notice the end of this one."""
    (mine,) = watchdog._running
    while not mine.watches(1):
        time.sleep(0.05)


def run_out_of_memory(engine: str, victim: int) -> None:
    """Train; when most of its gradients are there, memory of the victim runs out for good."""
    folder = Path(os.environ["FOLDER"])
    callbacks = [During("on_step_end", save_weights, step=2)]
    if int(os.environ["RANK"]) == victim or victim == BOTH:
        callbacks.append(During("on_step_begin", lambda _: wait_for_connection(), step=1))
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
            callbacks.append(During("on_save", lambda _: sys.exit(0)))
        elif fault in IN_TRAINING:
            # The first steps may be over before the processes are connected.
            callbacks.append(During("on_step_begin", lambda _: wait_for_connection(), step=1))
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
    """Train; the victim raises, but its process lives on with all its connections, as under NCCL or in a notebook."""
    watchdog._GRACE_S = watchdog._CHECK_S = 1.0
    where = During(event, raise_in_forward if event == "on_step_begin" else _raise, step=2)
    connected = During("on_step_begin", lambda _: wait_for_connection(), step=1)
    callbacks = [connected, where] if int(os.environ["RANK"]) == victim else []
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer(llama(), Path(folder), HFCkptCallback("full"), *callbacks, max_steps=50).train()
    except ValueError:
        time.sleep(LINGERS_S)
        raise


def be_killed_before_training(victim: int) -> None:
    """Be killed between the Trainer's making and its training, for which the other process is loading something."""
    watchdog._GRACE_S = 1.0
    with tempfile.TemporaryDirectory() as folder:
        trainer(llama(), Path(folder), HFCkptCallback("full"))
        wait_for_connection()
        if int(os.environ["RANK"]) == victim:
            kill_with_a_child()
        time.sleep(LIMIT_S)


def be_killed_in_the_command(victim: int) -> None:
    """Be killed in the first line of the fine-tuning command, while the other process reads something slow."""
    watchdog._GRACE_S = 1.0
    is_victim = int(os.environ["RANK"]) == victim
    finetune.read_recipe = kill_with_a_child if is_victim else lambda *_: time.sleep(LIMIT_S)
    sys.exit(finetune.main(["recipe.yaml"]))


def be_slow(victim: int) -> None:
    """Train to the end, though one process takes longer than every timeout, and strangers come to the watch's door."""
    watchdog._CONNECT_S = watchdog._CHECK_S = watchdog._GRACE_S = 1.0
    store.PATIENCE_S = 1
    callbacks: list[Any] = [HFCkptCallback("full")]
    if int(os.environ["RANK"]) == victim:
        # Before the plugin's own, so that the other process waits for this one there.
        callbacks[:0] = [During(event, lambda _: time.sleep(3)) for event in ("on_init_end", "on_train_begin")]
        callbacks.append(During("on_step_end", lambda _: stop_for(3), step=2))
    else:
        threading.Thread(target=send_strangers, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        trainer(llama(), Path(folder), *callbacks, max_steps=4).train()
    assert int(os.environ["RANK"]) == victim or len(strangers_met) == len(RUBBISH)
    # The store ends with rank 0.
    dist.barrier()


RUBBISH = (b"", b"x", b"\xff\n", b"[]\n", b'{"rank": 1, "token": "x"}\n', b'{"rank": "1"}\n', b"x" * 100_000)
strangers_met: list[socket.socket] = []


def send_strangers() -> None:
    """Connect to the watch of rank 0 before the other process does, and talk rubbish."""
    while not (found := [mine for mine in watchdog._running if mine._listener is not None]):
        time.sleep(0.01)
    where = found[0]._listener.getsockname()
    for said in RUBBISH:
        strangers_met.append(socket.create_connection(where))
        with contextlib.suppress(OSError):
            strangers_met[-1].sendall(said)


def serve() -> tuple[str, int] | None:
    """Start two processes for each line; print a line when both have ended. In those processes: return what to run."""
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
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        children = []
        for rank in range(2):
            children.append(os.fork())
            if not children[-1]:
                _become(rank, port, Path(folder))
                return fault, victim
        print(json.dumps(_ends(children)), flush=True)
    # Else nanobind, at exit, takes what is frozen for leaked.
    gc.unfreeze()
    return None


def _become(rank: int, port: int, folder: Path) -> None:
    """Be a process of a run that was started by hand; leave in the folder what it says."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FOLDER": str(folder)})
    for name, stream in ((os.devnull, 0), (folder / f"stdout {rank}", 1), (folder / f"stderr {rank}", 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)
    # Where a crash of torch's own happens.
    faulthandler.enable()


def _ends(children: list[int]) -> list[tuple[int, float]]:
    """Return each process's exit code, negative for a signal, and when it ended, in seconds from here."""
    start = time.monotonic()
    ends: dict[int, tuple[int, float]] = {}
    while len(ends) < len(children):
        seconds = time.monotonic() - start
        for child in children:
            if child not in ends and seconds > LIMIT_S:
                os.kill(child, signal.SIGKILL)
            if child not in ends and (ended := os.waitpid(child, os.WNOHANG))[0]:
                ends[child] = os.waitstatus_to_exitcode(ended[1]), seconds
        time.sleep(0.05)
    return [ends[child] for child in children]


if __name__ == "__main__":
    what = (sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else serve()
    others: dict[str, Callable[[int], None]] = {
        "raises and lingers": lambda victim: run_and_linger(victim, "on_step_begin"),
        "leaves and lingers": lambda victim: run_and_linger(victim, "on_step_end"),
        "is killed before training": be_killed_before_training,
        "is killed in the command": be_killed_in_the_command,
        "is slow": be_slow,
        **{f"is out of memory under {engine}": partial(run_out_of_memory, engine) for engine in ENGINES},
    }
    if what is not None and what[0] in others:
        others[what[0]](what[1])
    elif what is not None:
        run(*what)
