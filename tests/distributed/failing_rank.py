"""A run of two processes in which something befalls one of them.

`torchrun ... failing_rank.py FAULT VICTIM` is one process of such a run; VICTIM is a rank. Without arguments this is a
process that has imported everything and starts runs, one for each line of standard input, whose processes nobody looks
after: that is quicker than to start two interpreters each time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from hf_ckpt import HFCkptCallback, exchange, watch
from tests.training import During, llama, trainer

LIMIT_S = 90
"""After so many seconds a process is given up."""
LINGERS_S = 10


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
    model.get_submodule("model.layers.1").backward_pass = None


IN_TRAINING: dict[str, Callable[[nn.Module], None]] = {"raises": raise_in_forward, "is killed": kill_in_forward}


def run(fault: str, victim: int) -> None:
    """Train for more steps than are reached."""
    model, policy, callbacks = llama(), "full", []
    # Minutes, for a run whose processes have come apart by other work.
    exchange.PATIENCE_S = 5
    if int(os.environ["RANK"]) == victim:
        if fault in IN_TRAINING:
            callbacks.append(During("on_step_begin", IN_TRAINING[fault], step=2))
        elif fault == "has another policy":
            policy = "attention"
        elif fault == "has no policy":
            trainer(model, Path(tempfile.mkdtemp()), max_steps=50).train()
        else:
            cannot_be_planned(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer(model, Path(folder), HFCkptCallback(policy), *callbacks, max_steps=50).train()


def run_and_linger(victim: int) -> None:
    """Train; the victim raises, but its process lives on with all its connections, as under NCCL or in a notebook."""
    watch._GRACE_S = 1.0
    try:
        run("raises", victim)
    except ValueError:
        time.sleep(LINGERS_S)
        raise


def serve() -> tuple[str, int] | None:
    """Start two processes for each line; print a line when both have ended. In those processes: return what to run."""
    for line in sys.stdin:
        fault, victim, folder = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        children = []
        for rank in range(2):
            children.append(os.fork())
            if not children[-1]:
                _become(rank, port, Path(folder))
                return fault, victim
        print(json.dumps(_ends(children)), flush=True)
    return None


def _become(rank: int, port: int, folder: Path) -> None:
    """Be a process of a run that was started by hand; leave in the folder what it says."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    for name, stream in ((os.devnull, 0), (folder / f"stdout {rank}", 1), (folder / f"stderr {rank}", 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)


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
    if what is not None and what[0] == "raises and lingers":
        run_and_linger(what[1])
    elif what is not None:
        run(*what)
