"""The devices that a step can be predicted for, and what each has.

Imports torch only to read about the machine's own device. GiB is 2**30; rates are per second, in bytes and FLOPs.

Memory is what CUDA reports to programs, as torch's out-of-memory messages show it ("has a total capacity of ..."),
rounded down: 1 to 3 % less than the size on the box, and 6 % more is missing where error correction keeps its codes
in the same memory (T4, A10, A10G, L4, L40S). Matrix rates are dense, without sparsity, with float32 accumulation,
which is what torch asks for; GeForce cards run that at half the rate of float16 accumulation. float32 is the rate
without TF32, torch's default. Bandwidths and links are those of the data sheets, links one way; a card without NVLink
reaches its peers over PCIe.

`measured_devices.json` holds what was measured of a card, each figure with its source. A device's `source` names them.
Further cards are in `cards.json`; see `card_files`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_ckpt.errors import PolicyError, did_you_mean
from hf_ckpt.simulation import card_files
from hf_ckpt.simulation.attention_rates import AttentionKernel, kernel_named
from hf_ckpt.units import ADDRESSABLE_BYTES, UNITS

GIB = 2**30
MIB = 2**20

# One way, after the 128b/130b line code (PCI Express Base Specification 3.0, 4.0 and 5.0).
_PCIE_3_X16 = 15.75e9
_PCIE_4_X8 = 15.75e9
_PCIE_4_X16 = 31.5e9
_PCIE_5_X16 = 63.0e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that a step can run on."""

    name: str
    """As the user writes it."""
    title: str
    """As the vendor writes it."""
    memory_bytes: int
    """What programs can allocate; 0 where it is not known."""
    matmul_flops: Mapping[str, float]
    """Dense matrix products per second, by name of the dtype (`bfloat16`, `float16`, `float32`)."""
    memory_bandwidth: float
    """Bytes per second, reading and writing together."""
    host_link: float
    """Bytes per second between host and device, one way."""
    rank_link: float
    """Bytes per second between a device and its peers, one way; 0 where it is not known."""
    source: str
    """Where the figures come from."""
    is_cuda: bool = True
    is_timed: bool = True
    """Whether its rates are known, so that times can be predicted; without, rates only put plans in an order."""
    shares_host_memory: bool = False
    """Whether its memory is the host's too: what is offloaded stays in it."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None where it is not known."""
    # An 8192-cubed bfloat16 product of random numbers on an H200 runs at 0.80 of the data sheet's rate, under its
    # power limit; a device-to-device copy moves 0.90 of the data sheet's bytes. Operators of a model fall between
    # such a copy and strided or broadcast access.
    matmul_efficiency: float = 0.80
    """Share of `matmul_flops` that large products reach; 1 where the rate was measured."""
    bandwidth_efficiency: float = 0.85
    """Share of `memory_bandwidth` that operators reach; 1 where it was measured."""
    # Headers and acknowledgements of PCIe take a part of what the line carries; a rule of thumb, not measured.
    link_efficiency: float = 0.80
    """Share of the links that copies reach; 1 where it was measured."""
    attention_efficiency: float | None = None
    """Share of `matmul_flops` that fused attention kernels reach, causal work left out; None for what is known of the
    architecture and the kernel."""
    attention_kernel: AttentionKernel | None = None
    """That a model was told to run; None where torch chooses."""
    prefers_cudnn: bool | None = None
    """Whether torch tries cuDNN's attention before its own flash attention; None where no such machine could be asked.
    See `tries_cudnn_first`."""
    cublas_workspace: int | None = None
    """Bytes that torch gives cuBLAS for each thread and stream; None where unknown. See `workspace_bytes`."""
    # A Llama of transformers with next to nothing to compute takes 10 to 17 microseconds an operator forward and 7 to
    # 10 backward, views and all, on two slow shared cores.
    launch_seconds: float = 10e-6
    """What the host needs to issue an operator of a model's forward: modules, Python, autograd."""
    backward_launch_seconds: float = 6e-6
    """The same for operators that autograd issues by itself, and for the optimizer."""
    kernel_seconds: float = 3e-6
    """What a kernel takes besides its work, to fill the device and to drain it."""
    # Fitted to published steps under FSDP1 (docs/accuracy.md).
    unit_seconds: float = 0.8e-3
    """What the host needs to gather one unit of FSDP, or one module of ZeRO-3, and to let it go."""
    num_multiprocessors: int = 0  # not known
    # A guess, half of what a slow CPU takes: to be measured.
    selective_seconds: float = 20e-6
    """What the host needs more for each operator that a layer in a selective mode handles in Python: those whose
    outputs it keeps, to keep and to return them, and for the sums of small ones (those of large ones are under 1 % of
    a GPU's step, and a few per cent of a CPU's). Under a dispatch mode all operators (`regions.selective.dispatch`)."""

    def beside_host(self, launch_seconds: float, backward_launch_seconds: float) -> Device:
        """Return the device beside a host that takes so long for an operator of a forward, and of a backward.

        What else the host does in Python changes as the first of the two does.
        """
        factor = launch_seconds / self.launch_seconds
        return replace(
            self,
            launch_seconds=launch_seconds,
            backward_launch_seconds=backward_launch_seconds,
            unit_seconds=factor * self.unit_seconds,
            selective_seconds=factor * self.selective_seconds,
        )

    def running(self, attention: str | None) -> Device:
        """Return the device with the kernel of a model's `attn_implementation`, where that names one."""
        kernel = kernel_named(attention)
        return self if kernel is None else replace(self, attention_kernel=kernel)

    @property
    def tries_cudnn_first(self) -> bool:
        """Whether torch tries cuDNN's attention before its own flash attention, as far as a call suits it.

        Without such a machine: on the data-centre cards of the Hopper and Blackwell generations, as torch 2.11 and
        later do with a cuDNN above 9.15, which their packages bring, unless TORCH_CUDNN_SDPA_DEPRIORITIZED is set
        (`check_prefer_cudnn_attention` in `sdp_utils.cpp`).
        """
        if self.attention_kernel is not None:
            return False
        if self.prefers_cudnn is not None:
            return self.prefers_cudnn
        return self.capability is not None and self.capability[0] in (9, 10)

    @property
    def is_slow_in_bfloat16(self) -> bool:
        """Whether it multiplies matrices of float16 several times as fast as those of bfloat16."""
        return self.is_cuda and self.matmul_flops["float16"] > 1.5 * self.matmul_flops["bfloat16"]

    def remarks(self, computes_in: str | None = None) -> list[str]:
        """Return what a user has to know before figures of the device are read. `computes_in`: the step's dtype."""
        found = []
        if not self.is_timed:
            found.append("its rates are not known: no times, and plans are put in order as on an A100")
        if not self.is_cuda and self.shares_host_memory:
            found.append("it runs no CUDA kernels: attention keeps its probabilities, and 4-bit kernels are missing")
        if self.shares_host_memory:
            found.append("its memory is the host's too: what is offloaded stays in it, so that offload gains nothing")
        if self.is_slow_in_bfloat16 and computes_in == "bfloat16":
            times = self.matmul_flops["float16"] / self.matmul_flops["bfloat16"]
            found.append(
                f"it has no matrix units for bfloat16: float16 products are up to {times:.2g} times as fast. "
                f"hf-ckpt init --device {self.name} writes a recipe in float16"
            )
        return found

    def describe_attention(self) -> str | None:
        """Return which attention is tried first and how that is known; None where there is only one."""
        if self.attention_kernel is not None:
            return f"{self.attention_kernel}, as model.attn_implementation names it"
        if self.prefers_cudnn is None and not self.tries_cudnn_first:
            return None
        first = "cuDNN" if self.tries_cudnn_first else "FlashAttention-2"
        how = (
            "assumed: torch 2.11 or later with a cuDNN above 9.15, and no TORCH_CUDNN_SDPA_DEPRIORITIZED"
            if self.prefers_cudnn is None
            else "as torch chooses here"
        )
        return f"sdpa tries {first} first ({how})"


def workspace_bytes(device: Device) -> int:
    """Return the cuBLAS workspace that torch allocates for each thread and stream.

    Where it is not known of the machine: the default of torch 2.13 (`parseChosenWorkspaceSize` in
    `CublasHandlePool.cpp`; torch 2.11 gives the large one to 9.0 alone).
    """
    if not device.is_cuda:
        return 0
    if device.cublas_workspace is not None:
        return device.cublas_workspace
    is_large = device.capability is not None and device.capability[0] in (9, 10, 12)
    return _LARGE_WORKSPACE if is_large else _SMALL_WORKSPACE


_LARGE_WORKSPACE = 32 * MIB
_SMALL_WORKSPACE = 2 * 4 * MIB + 8 * 16 * 1024


NO_DEVICE = (
    "There is no GPU here, and neither device nor amount was given. Add --device rtx4090, or an amount: "
    "--memory-budget 22GiB."
)
"""What to say to who has no GPU and names none."""


def find_device(name: str) -> Device:
    """Return a device by its name, as in `rtx4090`, `RTX 4090`, `4090` or `NVIDIA A100-SXM4-80GB`.

    An amount such as `96GiB` is a GPU of which only the memory is known, `apple-64gb` an Apple chip with so much, and
    `card.json` a card that a file describes (`card_files`).

    Raises `PolicyError` with a list of the devices when none has that name, and where several have.
    """
    name = str(name).strip()
    found = _in_table(name)
    if found is not None:
        return found
    if name.endswith(".json"):
        return Device(**card_files.read_card(Path(name).expanduser()))
    if (chosen := _AMOUNT.fullmatch(name)) is not None:
        return _by_amount(name, chosen)
    if (several := _SEVERAL.get(_normalized(name))) is not None:
        raise PolicyError(f'"{name}" is {len(several)} cards. Write {" or ".join(several)}.')
    raise PolicyError(
        f'Unknown device "{name}". Devices are {", ".join(DEVICES)}. hf-ckpt devices lists them with their memory; an '
        f"amount such as 24GiB, apple-64gb, or a file such as card.json can be named too."
        + did_you_mean(name.lower(), DEVICES)
    )


_AMOUNT = re.compile(
    r"(?P<apple>(?:(?:apple|apple[ -]m\d|m\d)(?:[ -]?(?:pro|max|ultra))?)[ -])?"
    r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>gi?b)",
    re.IGNORECASE,
)


def _by_amount(name: str, chosen: re.Match[str]) -> Device:
    # What is sold as 64 GB of host memory has 64 GiB.
    unit = "GiB" if chosen["apple"] or chosen["unit"].lower() == "gib" else "GB"
    num_bytes = int(float(chosen["number"]) * UNITS[unit])
    if not UNITS["GiB"] <= num_bytes <= ADDRESSABLE_BYTES:
        raise PolicyError(f"--device {name} is no amount that a GPU has. Write one such as 24GiB.")
    plain = name.lower().replace(" ", "-") if chosen["apple"] else name.replace(" ", "")
    return Device(**(card_files.apple if chosen["apple"] else card_files.memory_only)(plain, num_bytes))


def may_have_gpu() -> bool:
    """Tell whether torch might find a GPU here, without asking it."""
    # NVIDIA's driver, that of Windows under WSL, and AMD's. Windows itself shows no files.
    signs = ("/dev/nvidiactl", "/proc/driver/nvidia/gpus", "/dev/dxg", "/dev/kfd")
    return sys.platform == "win32" or any(map(os.path.exists, signs))


def this_device() -> Device:
    """Return the machine's own device: the current CUDA device where there is one, else its CPU."""
    import torch

    if not torch.cuda.is_available():
        return CPU
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = (int(properties.major), int(properties.minor))
    found = _in_table(properties.name) or _from_properties(properties, capability)
    prefers_cudnn = _prefers_cudnn() if replace(found, capability=capability).tries_cudnn_first else None
    return replace(
        found,
        memory_bytes=int(properties.total_memory),
        # Where the GPU is a part of the processor.
        shares_host_memory=found.shares_host_memory or bool(getattr(properties, "is_integrated", 0)),
        capability=capability,
        prefers_cudnn=prefers_cudnn,
        cublas_workspace=_own_workspace(capability),
    )


def _own_workspace(capability: tuple[int, int]) -> int:
    """Return what torch gives cuBLAS on the current card."""
    import torch

    # torch 2.13 has a function for it; before, torch's rules are here.
    workspace_size = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    if workspace_size is not None:
        return int(workspace_size())
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(1024 * int(kib) * int(count) for kib, count in pairs)
    return _LARGE_WORKSPACE if capability == (9, 0) else _SMALL_WORKSPACE


def _prefers_cudnn() -> bool:
    """Ask torch which attention it chooses for a small call that suits both cuDNN and flash attention."""
    import torch
    from torch.nn.attention import SDPBackend

    from hf_ckpt.upstream.torch import fused_sdp_choice

    query = torch.empty(1, 1, 128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    return bool(fused_sdp_choice(query, query, query, is_causal=True) == SDPBackend.CUDNN_ATTENTION.value)


def _in_table(name: str) -> Device | None:
    plain = _normalized(str(name))
    for known in DEVICES.values():
        short = _normalized(known.name)
        if plain in (short, short.removeprefix("rtx"), _normalized(known.title)):
            return known
    return DEVICES.get(_OTHER_NAMES.get(plain, ""))


def _normalized(name: str) -> str:
    """Return a name without vendor, family, capitals, blanks and dashes."""
    words = re.sub(r"nvidia|geforce|tesla|amd|instinct|generation|graphics|tensor core|gpu", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)


# FLOPs of one multiprocessor in one clock, dense, with float32 accumulation: (bfloat16 and float16, float32). From the
# white papers of each architecture; of 8.6, 8.9 and 12.0 the GeForce rate, half of the professional cards'.
_FLOPS_PER_CLOCK = {7: (1024, 128), 8: (512, 256), 9: (4096, 256), 10: (8192, 256), 12: (512, 256)}


def _from_properties(properties: Any, capability: tuple[int, int]) -> Device:
    """Describe a card that is not in the table by its clocks, as CUDA reports them."""
    matmul, plain = (2048, 128) if capability == (8, 0) else _FLOPS_PER_CLOCK.get(capability[0], (512, 256))
    clocks = properties.multi_processor_count * 1e3 * getattr(properties, "clock_rate", 1_500_000)
    # Two transfers a clock, as all graphics memories since GDDR.
    bandwidth = 2e3 * getattr(properties, "memory_clock_rate", 7_000_000) * getattr(properties, "memory_bus_width", 256)
    return Device(
        name=_normalized(properties.name) or "cuda",
        title=properties.name,
        memory_bytes=int(properties.total_memory),
        matmul_flops={"bfloat16": clocks * matmul, "float16": clocks * matmul, "float32": clocks * plain},
        memory_bandwidth=bandwidth / 8,
        host_link=_PCIE_4_X16,
        rank_link=0.0,
        source="not in the table: derived from its clocks, PCIe 4.0 x16 taken for granted",
        capability=capability,
        num_multiprocessors=int(properties.multi_processor_count),
    )


def _card(
    name: str,
    title: str,
    memory_gib: float,
    tensor_tflops: float,
    float32_tflops: float,
    bandwidth_gb: float,
    host_link: float,
    capability: tuple[int, int],
    num_multiprocessors: int,
    source: str,
    *,
    nvlink_gb: float = 0.0,
) -> Device:
    return Device(
        name=name,
        title=title,
        memory_bytes=int(memory_gib * GIB),
        matmul_flops={
            # T4 and V100 have no bfloat16 tensor cores: torch runs such products, at most, at the rate of float32.
            "bfloat16": 1e12 * (tensor_tflops if capability >= (8, 0) else float32_tflops),
            "float16": 1e12 * tensor_tflops,
            "float32": 1e12 * float32_tflops,
        },
        memory_bandwidth=1e9 * bandwidth_gb,
        host_link=host_link,
        rank_link=1e9 * nvlink_gb or host_link,
        source=source,
        capability=capability,
        num_multiprocessors=num_multiprocessors,
    )


_AMPERE = "NVIDIA Ampere GA102 GPU Architecture white paper"
_ADA = "NVIDIA Ada GPU Architecture white paper"
_ADA_CORES = "GeForce specifications (cores, clock, memory); rate per core from the " + _ADA
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture white paper"
_V100, _A100, _H100, _ADA_6000 = (f"NVIDIA {name} data sheet" for name in ("V100", "A100", "H100", "RTX 6000 Ada"))
_GRACE = "NVIDIA GH200 Grace Hopper data sheet"
_HGX = "NVIDIA HGX B200 and DGX B200 data sheets"

CPU = Device(
    name="cpu",
    title="this machine's CPU",
    memory_bytes=0 if sys.platform == "win32" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    # Two fused multiply-adds of eight float32 lanes in each clock of 2.5 GHz: a usual core of today. Stands in until it
    # is measured; predictions for a CPU are about memory.
    matmul_flops=dict.fromkeys(("bfloat16", "float16", "float32"), 2 * 2 * 8 * 2.5e9 * (os.cpu_count() or 1)),
    memory_bandwidth=20e9,
    host_link=20e9,
    rank_link=0.0,
    source="a usual core of 2.5 GHz with AVX2 and two channels of DDR4; measure it with hf-ckpt profile",
    is_cuda=False,
    matmul_efficiency=0.7,
    bandwidth_efficiency=0.7,
    kernel_seconds=0.0,
    # benchmarks/results/host_time_cpu.json: forwards of `selective` compared with those of `full`,
    # for each of 8 or 22 outputs of a layer.
    selective_seconds=45e-6,
)
"""This machine's CPU."""

# Multiprocessors are from the same sources as the rates.
_TABLE = (
    _card("rtx3060", "GeForce RTX 3060", 11.6, 25.5, 12.7, 360, _PCIE_4_X16, (8, 6), 28, _AMPERE + ", rate per core"),
    _card("rtx3090", "GeForce RTX 3090", 23.6, 71, 35.6, 936, _PCIE_4_X16, (8, 6), 82, _AMPERE, nvlink_gb=56.25),
    _card("rtx4060ti16gb", "GeForce RTX 4060 Ti 16GB", 15.55, 44.1, 22.1, 288, _PCIE_4_X8, (8, 9), 34, _ADA_CORES),
    _card("rtx4070", "GeForce RTX 4070", 11.6, 58.3, 29.1, 504, _PCIE_4_X16, (8, 9), 46, _ADA_CORES),
    _card("rtx4070tisuper", "GeForce RTX 4070 Ti SUPER", 15.55, 88.2, 44.1, 672, _PCIE_4_X16, (8, 9), 66, _ADA_CORES),
    _card("rtx4080", "GeForce RTX 4080", 15.55, 97.5, 48.7, 716.8, _PCIE_4_X16, (8, 9), 76, _ADA),
    _card("rtx4080super", "GeForce RTX 4080 SUPER", 15.55, 104.4, 52.2, 736, _PCIE_4_X16, (8, 9), 80, _ADA_CORES),
    _card("rtx4090", "GeForce RTX 4090", 23.6, 165.2, 82.6, 1008, _PCIE_4_X16, (8, 9), 128, _ADA),
    _card("rtx5080", "GeForce RTX 5080", 15.45, 112.6, 56.3, 960, _PCIE_5_X16, (12, 0), 84, _BLACKWELL),
    _card("rtx5090", "GeForce RTX 5090", 31.3, 209.5, 104.8, 1792, _PCIE_5_X16, (12, 0), 170, _BLACKWELL),
    _card("a6000", "RTX A6000", 47.4, 154.8, 38.7, 768, _PCIE_4_X16, (8, 6), 84, _AMPERE, nvlink_gb=56.25),
    _card("rtx6000ada", "RTX 6000 Ada", 47.4, 364.2, 91.1, 960, _PCIE_4_X16, (8, 9), 142, _ADA_6000),
    _card("t4", "T4", 14.5, 65, 8.1, 320, _PCIE_3_X16, (7, 5), 40, "NVIDIA T4 data sheet"),
    _card("v100-16gb", "V100-SXM2-16GB", 15.7, 125, 15.7, 900, _PCIE_3_X16, (7, 0), 80, _V100, nvlink_gb=150),
    _card("v100-32gb", "V100-SXM2-32GB", 31.7, 125, 15.7, 900, _PCIE_3_X16, (7, 0), 80, _V100, nvlink_gb=150),
    _card("a10", "A10", 22.0, 125, 31.2, 600, _PCIE_4_X16, (8, 6), 72, "NVIDIA A10 data sheet"),
    _card("a10g", "A10G", 22.0, 70, 31.5, 600, _PCIE_4_X16, (8, 6), 80, "NVIDIA A10G data sheet"),
    _card("l4", "L4", 22.0, 121, 30.3, 300, _PCIE_4_X16, (8, 9), 58, "NVIDIA L4 data sheet"),
    _card("l40s", "L40S", 44.4, 362, 91.6, 864, _PCIE_4_X16, (8, 9), 142, "NVIDIA L40S data sheet"),
    _card("a100-40gb", "A100-SXM4-40GB", 39.4, 312, 19.5, 1555, _PCIE_4_X16, (8, 0), 108, _A100, nvlink_gb=300),
    _card("a100-80gb", "A100-SXM4-80GB", 79.1, 312, 19.5, 2039, _PCIE_4_X16, (8, 0), 108, _A100, nvlink_gb=300),
    _card("h100-pcie", "H100 PCIe", 79.1, 756, 51, 2000, _PCIE_5_X16, (9, 0), 114, _H100, nvlink_gb=300),
    _card("h100", "H100 80GB HBM3", 79.1, 989, 67, 3350, _PCIE_5_X16, (9, 0), 132, _H100, nvlink_gb=450),
    _card("h200", "H200", 139.7, 989, 67, 4800, _PCIE_5_X16, (9, 0), 132, "NVIDIA H200 data sheet", nvlink_gb=450),
    # Its host link is NVLink-C2C to the Grace processor.
    _card("gh200", "GH200 96GB HBM3", 94.4, 989, 67, 4000, 450e9, (9, 0), 132, _GRACE, nvlink_gb=450),
    _card("b200", "B200", 178.3, 2250, 75, 8000, _PCIE_5_X16, (10, 0), 148, _HGX, nvlink_gb=900),
)

# --- Measured devices. ---

MEASURED = Path(__file__).with_name("measured_devices.json")
"""By name of the card: `measured`, which has a `value` and its `source` for each figure, and `card`, the fields of a
`Device`, where the table has none of that name."""

RATES = {
    "matmul_flops.bfloat16": "bfloat16 products",
    "matmul_flops.float16": "float16 products",
    "matmul_flops.float32": "float32 products",
    "attention_flops": "attention",
    "memory_bandwidth": "memory",
    "kernel_seconds": "a kernel in addition to its work",
}
"""What can be measured of a card, with its name in messages: rates that it reaches, and seconds."""


def with_measured(device: Device, measured: Mapping[str, Mapping[str, Any]]) -> Device:
    """Return a device that reaches the rates which were measured of it: `value` and `source` of some of `RATES`.

    The rates of its data sheet stay, so that efficiencies remain shares of them: of bfloat16 products, attention and
    memory the efficiency is the measured rate over the nominal one. Other dtypes share the efficiency of bfloat16, and
    get the nominal rate that yields theirs.
    """
    if not measured:
        return device
    value = {name: float(figure["value"]) for name, figure in measured.items()}
    nominal, efficiency = device.matmul_flops["bfloat16"], device.matmul_efficiency
    if "matmul_flops.bfloat16" in value:
        efficiency = value["matmul_flops.bfloat16"] / nominal
    flops = {
        dtype: value.get(f"matmul_flops.{dtype}", rate * device.matmul_efficiency) / efficiency
        for dtype, rate in device.matmul_flops.items()
    }
    attention, bandwidth = device.attention_efficiency, device.bandwidth_efficiency
    if "attention_flops" in value:
        attention = value["attention_flops"] / nominal
    if "memory_bandwidth" in value:
        bandwidth = value["memory_bandwidth"] / device.memory_bandwidth
    sources = ", ".join(sorted({str(figure["source"]) for figure in measured.values()}))
    names = ", ".join(words for name, words in RATES.items() if name in measured)
    return replace(
        device,
        matmul_flops=flops | {"bfloat16": nominal},
        matmul_efficiency=efficiency,
        attention_efficiency=attention,
        bandwidth_efficiency=bandwidth,
        kernel_seconds=value.get("kernel_seconds", device.kernel_seconds),
        source=f"{device.source}; measured ({sources}): {names}",
    )


def measured_devices(table: Iterable[Device], path: Path = MEASURED) -> dict[str, Device]:
    """Return devices by name: those of a table, with what was measured of them, and those that only were measured.

    `path` is a file like `MEASURED`.
    """
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    devices = {device.name: device for device in table}
    for name, found in known.items():
        if name not in devices:
            card = found["card"]
            devices[name] = Device(**card | {"capability": tuple(card["capability"])})
        devices[name] = with_measured(devices[name], found["measured"])
    return devices


_FURTHER = tuple(Device(**fields) for fields in card_files.read_cards().values())
DEVICES: Mapping[str, Device] = measured_devices((CPU, *_TABLE, *_FURTHER))
"""All devices, by name."""

# Names that are those of several cards, without vendor, family, blanks and dashes.
_SEVERAL = {"a100": ("a100-40gb", "a100-80gb")}

# Other names of the same cards, without vendor, family, blanks and dashes, as people and drivers write them.
_OTHER_NAMES: Mapping[str, str] = {
    "4060ti": "rtx4060ti16gb",
    "rtx4060ti": "rtx4060ti16gb",
    "v100": "v100-16gb",
    "v100pcie16gb": "v100-16gb",
    "v100pcie32gb": "v100-32gb",
    "a100pcie40gb": "a100-40gb",
    "a10080gbpcie": "a100-80gb",
    "h10080gb": "h100",
    "h100sxm": "h100",
    "h100sxm5": "h100",
    "h200sxm": "h200",
    "h200141gb": "h200",
    "gh200480gb": "gh200",
    "b200sxm": "b200",
    "b300sxm": "b300",
    "b300sxm6ac": "b300",
    "h100nvl94gb": "h100-nvl",
    "h2096gb": "h20",
    "dgxspark": "gb10",
    "rtx5060ti8gb": "rtx5060ti",
    "5060ti8gb": "rtx5060ti",
    "rtx30508gb": "rtx3050",
    "rtxpro6000blackwell": "rtxpro6000",
    "rtxpro6000blackwellserveredition": "rtxpro6000",
    "rtxpro6000blackwellmaxqworkstationedition": "rtxpro6000",
    "rtx6000pro": "rtxpro6000",
    "pro6000": "rtxpro6000",
}
