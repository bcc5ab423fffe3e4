"""`hf-ckpt verify --processes N`: this command in N processes, started by torchrun, and one result.

Importing this loads no torch: the process that starts the others only waits for them. torchrun passes on neither exit
codes nor results, so each process writes a result to a folder. A refusal by any of them is the result; otherwise the
first process's report is.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hf_ckpt.errors import HFCkptError, RecipeError

if TYPE_CHECKING:
    from hf_ckpt.recipe.recipe import Recipe
    from hf_ckpt.verify.report import Check


PROGRESS = "verify: "  # Prefix of progress lines.
# A trial of a reduced model takes seconds; one at full size may take many minutes.
_SILENT_SECONDS = 1800
_JOIN_SECONDS = 10
_NUM_LAST_LINES = 30
_TORCHRUN = "torch/distributed/elastic/"
# What an earlier launch in this environment may have left, and accelerate would act on.
_DROPPED_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
_ORDER = {"fail": 0, "pass": 1, "skip": 2}
Lines = queue.SimpleQueue[str | None]


class LostProcessError(HFCkptError, RuntimeError):
    """Raised when one of several processes ended without an answer."""


def run_in_processes(command: Sequence[str], *, num_processes: int, say: Callable[[str], None]) -> Any:
    """Run `hf-ckpt` with these arguments and `--answers FOLDER` in several processes and return their report.

    The report is in JSON types. `say` is called with each line of progress. Raises RecipeError if a process refused
    the input; LostProcessError, with the last lines of output, if one ended without a result.
    """
    with tempfile.TemporaryDirectory(prefix="hf_ckpt-answers-") as folder:
        last_lines = _run([*_torchrun(num_processes), *command, "--answers", folder], say)
        answers = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    refusals = [answer["refusal"] for answer in answers if answer["refusal"]]
    if refusals:
        raise RecipeError(refusals[0])
    reports = [answer["report"] for answer in answers if answer["report"]]
    if len(reports) < num_processes:
        raise LostProcessError(
            f"{num_processes - len(reports)} of {num_processes} processes ended without an answer. The last that "
            f"they printed:\n{last_lines}"
        )
    return reports[0]


def write_result(folder: Path, report: Any, refusal: str) -> None:
    """Write this process's report, or why it refused the input, to where `run_in_processes` reads it."""
    path = folder / f"{int(os.environ['RANK']):05d}.json"
    path.write_text(json.dumps({"report": report, "refusal": refusal}), encoding="utf-8")


def _torchrun(num_processes: int) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [*run, "-m", "hf_ckpt.cli.main"]


def _run(command: Sequence[str], say: Callable[[str], None]) -> str:
    """Run the processes to their end, forward lines of progress, and return the last other lines."""
    last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
    lines: Lines = queue.SimpleQueue()
    with subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        reader = threading.Thread(target=_read_lines, args=(process, lines), daemon=True)
        reader.start()
        try:
            with _exit_on_sigterm():
                _forward_progress(lines, say, last_lines)
        finally:
            # torchrun ends its processes when it gets SIGTERM.
            process.terminate()
            process.wait()
            reader.join(_JOIN_SECONDS)
    return "\n".join(last_lines)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl-C does, so that the processes started here do not outlive this one."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set signal handlers.
        yield
        return
    found = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, found)


def _forward_progress(lines: Lines, say: Callable[[str], None], last_lines: deque[str]) -> None:
    """Forward progress and keep the last other lines, until the output ends or nothing came for too long."""
    is_torchrun = False
    while True:
        try:
            line = lines.get(timeout=_SILENT_SECONDS)
        except queue.Empty:
            last_lines.append(f"Nothing was printed for {_SILENT_SECONDS} s; the processes were stopped.")
            return
        if line is None:
            return
        # torchrun's own messages come last, and would push out those of the processes.
        is_torchrun = is_torchrun or _TORCHRUN in line
        if line.startswith(PROGRESS):
            say(line.removeprefix(PROGRESS))
        elif not is_torchrun:
            last_lines.append(line)


def _read_lines(process: subprocess.Popen[str], lines: Lines) -> None:
    """Put each line of the processes into the queue as they write it, and None at the end."""
    assert process.stderr is not None  # it was asked for
    for line in process.stderr:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED_VARIABLES)}
    # Without it torchrun sets the same and warns about it.
    kept.setdefault("OMP_NUM_THREADS", "1")
    return {**kept, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


# --- In each of the processes: torch is loaded only there. With one process everything is its own. ---


def with_engine(recipe: Recipe, engine: str | None) -> Recipe:
    """Return a recipe for "ddp", "fsdp1" or "fsdp2"; None means the engine of `training`, by default DDP."""
    training = {key: value for key, value in recipe.training.items() if key not in ("fsdp", "fsdp_config")}
    config = _fsdp_config(recipe.training.get("fsdp_config"))
    own = f"fsdp{config.get('version', 2)}" if recipe.training.get("fsdp") else "ddp"
    wanted = engine or own
    if wanted != "ddp":
        training |= {"fsdp": True, "fsdp_config": {**config, "version": int(wanted[-1])}}
    return replace(recipe, training=training)


def _fsdp_config(written: Any) -> dict[str, Any]:
    """Return the settings of FSDP under their names without `fsdp_`, with those that need a GPU off on a CPU."""
    import torch

    read = json.loads(Path(written).read_text(encoding="utf-8")) if isinstance(written, str) else dict(written or {})
    config = {name.removeprefix("fsdp_"): value for name, value in read.items()}
    if not torch.accelerator.is_available():
        config |= {"cpu_offload": False, "sync_module_states": False, "cpu_ram_efficient_loading": False}
    return config


def join_processes() -> bool:
    """Join the process group that torchrun started, before anything else; return whether this is the first process."""
    import torch
    from accelerate.state import PartialState

    is_cpu = not torch.accelerator.is_available()
    if is_cpu:
        # accelerate would number the CPU, and FSDP1 takes "cpu:0" for another device than "cpu".
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    return bool(PartialState(cpu=is_cpu).is_main_process)


def end_process(code: int) -> NoReturn:
    """End this process at once, after its process group: the interpreter gets nothing to tear down.

    A normal exit aborts in about one process of twenty, after all work is done.
    """
    from torch import distributed

    if code == 0 and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
    sys.stderr.flush()
    os._exit(code)


def gather(value: Any) -> list[Any]:
    """Return every process's value, in the order of their ranks."""
    from torch import distributed

    if not distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def is_first() -> bool:
    """Whether this is the process that reports for all."""
    return _rank() == 0


def is_first_with(is_able: bool) -> bool:
    """Whether this is the first process where `is_able` holds; the first of all where it holds nowhere."""
    able = [rank for rank, is_able in enumerate(gather(is_able)) if is_able]
    return _rank() == (able[0] if able else 0)


def _rank() -> int:
    from torch import distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def temporary_folder() -> Path:
    """Return a new folder, one for all processes; the first process makes it and has to remove it."""
    folder: Path = gather(Path(tempfile.mkdtemp(prefix="hf_ckpt-verify-")) if is_first() else None)[0]
    return folder


def combine_checks(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Combine the tables of all processes, the same on each: a check holds only where it holds on all of them."""
    tables: list[dict[str, Check]] = gather({check.name: check for check in checks})
    names = dict.fromkeys(name for table in tables for name in table)
    return tuple(_of_all([table.get(name) for table in tables]) for name in names)


def _of_all(checks: Sequence[Check | None]) -> Check:
    there = [(rank, check) for rank, check in enumerate(checks) if check is not None]
    rank, worst = min(there, key=lambda pair: (_ORDER[pair[1].verdict], pair[0]))
    where = f"[process {rank}] " if worst.verdict == "fail" and len(checks) > 1 else ""
    figures = _worst_figures([check.figures for _, check in there])
    return replace(worst, detail=where + worst.detail, figures=figures)


def _worst_figures(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for values in figures for name in values)
    # The worst cosine is the lowest; of all other figures the worst is the highest.
    return {
        name: (min if "cosine" in name else max)(values[name] for values in figures if name in values) for name in names
    }
