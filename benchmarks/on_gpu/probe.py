"""Stage: facts about the card, the host and the link between them.

What is of the card is proposed for the table of devices (`constants`); what is of this machine is only shown.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.journal import Entry, Journal, sentence_of
from benchmarks.on_gpu import host_probe, sdpa_probe
from benchmarks.on_gpu.setting import Assembled, Setting
from benchmarks.predict import fields_of
from hf_ckpt.measure.calibrate import calibrate, rows_of_run
from hf_ckpt.regions.offload import host_memory
from hf_ckpt.regions.offload.cuda import CudaDevice, PinnedByTorch, PinnedPages, PinningError
from hf_ckpt.simulation.devices import this_device, workspace_bytes

NUM_REPETITIONS = 5
CALIBRATION_S = 3.0
"""Shorter calibrations are tries of the code, and propose nothing."""
MIB = 2**20
_LINK_BYTES = 2**30
# Copied in each repetition, so that the time of small copies can be worked out as well.
_NUM_COPIES = 256
_WAIT_S = 30.0
_CPU = {"skipped": "this is of a CUDA device, and this is a CPU"}


def collect(journal: Journal, setting: Setting) -> None:
    """Measure all of it.

    Args:
        journal: takes an entry for each fact.
        setting: see there.
    """
    place, is_small = torch.device(setting.device), setting.is_small
    journal.entry("device", partial(device, place), needs_s=10, limit_s=90)
    seconds = 0.1 if is_small else CALIBRATION_S
    for number in range(1, NUM_REPETITIONS + 1):
        journal.entry(f"calibrate/{number}", partial(_calibrated, seconds), needs_s=3 * seconds, limit_s=60)
    for name, case in sdpa_probe.CASES.items():
        given = sdpa_probe.small(case) if is_small else case
        measure = partial(sdpa_probe.measure, given, place, 0.01 if is_small else 0.2)
        journal.entry(f"sdpa/{name}", measure, needs_s=2, limit_s=60)
    for tokens in (2048, 8192):
        journal.entry(f"products/{tokens}", partial(products, tokens, place, is_small=is_small), needs_s=3, limit_s=60)
    sizes = [size * MIB for size in ((1,) if is_small else (1, 16, 256))]
    for way in ("out", "in", "both"):
        journal.entry(f"link/{way}", partial(link, way, sizes, place), needs_s=3, limit_s=60)
    for name in ("lora",) if is_small else ("plain", "lora", "lora_with_dropout"):
        measure = partial(host_time, name, setting.device, 3 if is_small else 20)
        journal.entry(f"host_time/{name}", measure, needs_s=10, limit_s=120)
    journal.entry("pinning", partial(pinning, place, is_small=is_small), needs_s=10, limit_s=90)
    # Last: what it does to the machine's memory shows in nothing else.
    touch = partial(host_probe.measure, *((MIB, 5.0, 4) if is_small else (2**30, 20.0)))
    journal.entry("host_memory", touch, needs_s=40, limit_s=90)


def collect_smoke(journal: Journal, setting: Setting) -> None:
    """Measure the few facts that everything else rests on, in a quarter of a minute.

    Args:
        journal: takes an entry for each fact.
        setting: see there.
    """
    place, is_small = torch.device(setting.device), setting.is_small
    journal.entry("device", partial(device, place), needs_s=5, limit_s=60)
    journal.entry("host", host_probe.figures, limit_s=20)
    journal.entry("calibrate/1", partial(_calibrated, 0.1 if is_small else CALIBRATION_S), limit_s=40)
    case = sdpa_probe.CASES["causal_128"]
    given = sdpa_probe.small(case) if is_small else case
    journal.entry("sdpa/causal_128", partial(sdpa_probe.measure, given, place, 0.01 if is_small else 0.2), limit_s=40)
    for way in ("out", "in"):
        journal.entry(f"link/{way}", partial(link, way, [MIB if is_small else 256 * MIB], place), limit_s=40)
    journal.entry("pinning", partial(pinning, place, is_small=is_small), limit_s=40)


def assemble_smoke(journal: Journal, setting: Setting) -> Assembled:
    """Return what was found, as it is."""
    yield f"smoke_{setting.device}.json", {"entries": journal.entries}


def assemble(journal: Journal, setting: Setting) -> Assembled:
    """Return what was found, as it is."""
    yield f"probe_{setting.device}.json", {"entries": journal.entries}


# --- The card and what runs it. ---


def device(place: torch.device) -> Entry:
    """Return what the card and the software on it say of themselves, and what they take of its memory."""
    is_cuda = place.type == "cuda"
    return {
        "table_device": fields_of(this_device()),
        "workspace_bytes_of_the_table": workspace_bytes(this_device()),
        "versions": _versions(),
        "build": torch.__config__.show(),
        "architectures": torch.cuda.get_arch_list() if is_cuda else [],
        "variables": _variables(),
        "properties": _properties() if is_cuda else _CPU,
        "driver": _driver() if is_cuda else _CPU,
        # The first products of this process come last: their workspaces and kernels are what is measured.
        "context": _context() if is_cuda else _CPU,
        "workspaces": _workspaces(place) if is_cuda else _CPU,
        "bytes_outside_the_allocator": _outside() if is_cuda else _CPU,
        "attention": _attention_order(place),
    }


def _versions() -> dict[str, Any]:
    packages = (distribution.metadata["Name"] or "" for distribution in metadata.distributions())
    nvidia = {name: metadata.version(name) for name in packages if name.startswith(("nvidia-", "triton"))}
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cublas_lt": _cublas_version(),
        "nccl": list(torch.cuda.nccl.version()) if hasattr(torch._C, "_nccl_version") else None,
        "packages": dict(sorted(nvidia.items())),
    }


def _cublas_version() -> int | None:
    """Return the version of cuBLAS that torch has loaded, as in 130100 for 13.1."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


def _variables() -> dict[str, str]:
    """Return the variables that change what torch and CUDA do. Paths are of this machine, and named only."""
    found = {name: os.environ[name] for name in sorted(os.environ)}
    prefixes = ("TORCH_", "PYTORCH_", "CUBLAS", "CUDA_", "CUDNN_", "NVIDIA_TF32", "OMP_NUM_THREADS")
    return {
        name: "(a path)" if os.sep in value else value for name, value in found.items() if name.startswith(prefixes)
    }


def _attention_order(place: torch.device) -> dict[str, Any]:
    # The order is set by the first call on a device (sdp_utils.cpp, `priority_order`): cuDNN first, or not.
    tiny = torch.zeros(1, 1, 16, 64, device=place, dtype=torch.bfloat16)
    functional.scaled_dot_product_attention(tiny, tiny, tiny)
    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
    return {
        "priority": [names.get(number, str(number)) for number in torch._C._get_sdp_priority_order()],
        "enabled": {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
            "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        },
    }


_PROPERTIES = """name major minor total_memory multi_processor_count clock_rate memory_clock_rate memory_bus_width
    L2_cache_size shared_memory_per_multiprocessor regs_per_multiprocessor max_threads_per_multi_processor""".split()


def _properties() -> dict[str, Any]:
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {name: getattr(found, name) for name in _PROPERTIES if hasattr(found, name)}


_ASKED = (
    *("name", "driver_version", "memory.total", "memory.used", "power.limit", "power.draw", "temperature.gpu"),
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "pstate", "persistence_mode", "compute_mode"),
    *("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "ecc.mode.current", "mig.mode.current"),
)


def _driver() -> dict[str, Any]:
    """Return what the driver's own tool says of the first card."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_WAIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"failed": sentence_of(error)}
    answers = done.stdout.strip().splitlines()
    if done.returncode or not answers:
        return {"failed": " ".join((done.stdout + done.stderr).split())[:400]}
    return dict(zip(_ASKED, (answer.strip() for answer in answers[0].split(",")), strict=False))


_CONTEXT = """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
print(
    cuda.cuInit(0)
    or cuda.cuDeviceGet(ctypes.byref(device), 0)
    or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    flush=True,
)
input()
"""
# A process that makes a context and nothing else, prints 0 or CUDA's error, and waits.


def _context() -> dict[str, Any]:
    """Return the bytes that a context takes of the device before anything runs in it: those of another process."""
    before, total = torch.cuda.mem_get_info()
    child = subprocess.Popen([sys.executable, "-c", _CONTEXT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        answer = child.stdout.readline().strip()
        after, _ = torch.cuda.mem_get_info()
        child.communicate("\n", timeout=_WAIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
    if answer != "0":
        return {"failed": f"no second context: CUDA's error {answer or 'unknown'}"}
    return {"bytes": before - after, "total_bytes": total, "free_bytes_before_any_product": before}


def _workspaces(place: torch.device) -> dict[str, int]:
    """Return what the first products of a process leave allocated, in the thread of the forward and of the backward."""
    given = torch.randn(256, 256, device=place, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = torch.randn_like(given.detach()), torch.randn(256, device=place, dtype=torch.bfloat16)
    gradient = torch.randn_like(weight)
    kept: list[Tensor] = []

    def left_by(run: Callable[[], Tensor]) -> int:
        before = torch.cuda.memory_allocated()
        kept.append(run())
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before - kept[-1].nbytes

    return {
        "forward_bytes": left_by(lambda: given @ weight),
        # With a bias the product is another library's, which may have a workspace of its own.
        "with_bias_bytes": left_by(lambda: functional.linear(weight, weight, bias)),
        "backward_bytes": left_by(lambda: torch.autograd.grad(kept[0], given, gradient)[0]),
    }


def _outside() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


# --- Rates of the card. ---


def _calibrated(seconds: float) -> Entry:
    return {"seconds": seconds, "device": fields_of(calibrate(seconds=seconds))}


def products(tokens: int, place: torch.device, *, is_small: bool) -> Entry:
    """Time the products of a layer of Llama 2 7B, forward and backward, in bfloat16.

    Args:
        tokens: of a micro-batch.
        place: where.
        is_small: all sizes a sixty-fourth.

    Returns:
        FLOPs per second in each of five rows, by layer and direction.
    """
    scale = 64 if is_small else 1
    shapes = {"attention": (4096, 4096), "gate_up": (4096, 11008), "down": (11008, 4096)}
    return {name: _product(tokens // scale, n // scale, m // scale, place) for name, (n, m) in shapes.items()}


def _product(tokens: int, num_in: int, num_out: int, place: torch.device) -> dict[str, list[float]]:
    shapes = ((tokens, num_in), (num_out, num_in), (tokens, num_out))
    given, weight, gradient = (torch.randn(shape, device=place).to(torch.bfloat16) for shape in shapes)
    runs: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: given @ weight.T,
        "input_gradient": lambda: gradient @ weight,
        "weight_gradient": lambda: gradient.T @ given,
    }
    flops = 2.0 * tokens * num_in * num_out
    seconds = 0.15 if place.type == "cuda" else 0.01
    return {name: [flops / each for each in rows_of_run(run, seconds, place)] for name, run in runs.items()}


# --- The host, and the link to it. ---


def link(way: str, sizes: list[int], place: torch.device) -> Entry:
    """Return bytes per second of copies between pinned memory, as offload has it, and the device.

    Args:
        way: `out` of the device, `in`, or `both` at once, each on a stream of its own.
        sizes: of one copy, in bytes.
        place: the device; on a CPU memory is copied to memory.
    """
    return {"way": way, "rates": {str(size): _rates(way, size, place) for size in sizes}}


def _rates(way: str, size: int, place: torch.device) -> list[float]:
    is_cuda = place.type == "cuda"
    ways = ("out", "in") if way == "both" else (way,)
    memories = [CudaDevice().allocate(size) if is_cuda else None for _ in ways]
    hosts = [torch.empty(size, dtype=torch.uint8) if memory is None else memory.bytes for memory in memories]
    devices = [torch.zeros(size, dtype=torch.uint8, device=place) for _ in ways]
    lanes: list[AbstractContextManager[Any]] = [
        torch.cuda.stream(torch.cuda.Stream()) if is_cuda else nullcontext() for _ in ways
    ]
    num_copies = min(_NUM_COPIES, max(1, (_LINK_BYTES if is_cuda else 4 * size) // size))

    def copy() -> None:
        for one, host, tensor, lane in zip(ways, hosts, devices, lanes, strict=True):
            target, source = (host, tensor) if one == "out" else (tensor, host)
            with lane:
                target.copy_(source, non_blocking=True)

    try:
        rates = []
        for number in range(NUM_REPETITIONS + 1):
            _synchronize(place)
            start = time.perf_counter()
            for _ in range(num_copies):
                copy()
            _synchronize(place)
            if number:  # The first row warms up.
                rates.append(len(ways) * num_copies * size / (time.perf_counter() - start))
        return rates
    finally:
        _synchronize(place)
        for memory in memories:
            if memory is not None:
                memory.free()


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize()


def pinning(place: torch.device, *, is_small: bool) -> Entry:
    """Return the seconds that it takes to pin host memory and to free it, by our pages and by torch.

    Args:
        place: a CUDA device, else nothing is pinned.
        is_small: 1 MiB only.
    """
    if place.type != "cuda":
        return dict(_CPU)
    ways: dict[str, Callable[[int], Any]] = {"pages": PinnedPages, "torch": PinnedByTorch}
    sizes = [size * MIB for size in ((1,) if is_small else (64, 256, 1024))]
    left = host_memory.available_bytes()
    rows: list[dict[str, Any]] = []
    for size in sizes:
        if left is not None and size > left // 4:
            rows.append({"bytes": size, "skipped": f"more than a quarter of the {left} bytes that are free"})
            continue
        rows += [_pinned(way, make, size) for way, make in ways.items() for _ in range(3)]
    return {"rows": rows}


def _pinned(way: str, make: Callable[[int], Any], size: int) -> dict[str, Any]:
    row: dict[str, Any] = {"way": way, "bytes": size}
    # What was pinned before and is kept for later would be handed out again.
    _empty_host_cache()
    start = time.perf_counter()
    try:
        memory = make(size)
    except (PinningError, RuntimeError) as error:
        return row | {"failed": sentence_of(error)}
    made = time.perf_counter()
    memory.free()
    _empty_host_cache()
    return row | {"pin_s": made - start, "free_s": time.perf_counter() - made}


def _empty_host_cache() -> None:
    """Let torch give its pinned memory back, which it keeps for later. torch 2.13 has another name for it than 2.11."""
    for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):
        if hasattr(torch._C, name):
            getattr(torch._C, name)()
            return


def host_time(name: str, device: str, num_rounds: int) -> Entry:
    """Return what the host needs for the forward of a layer with next to nothing to compute, under each mode.

    Args:
        name: which adapters the model has.
        device: `cuda` or `cpu`.
        num_rounds: in which the modes take turns.
    """
    from benchmarks.host_time import measure

    return measure(name, device, num_rounds)
