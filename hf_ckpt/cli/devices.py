"""`hf-ckpt devices`: the GPUs that a step can be predicted for."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from hf_ckpt.cli.shared_options import HOLDS, Command, listing_parser
from hf_ckpt.estimate.tables import columns, wrapped
from hf_ckpt.simulation.card_files import LEFT_OUT
from hf_ckpt.simulation.devices import DEVICES, Device

_HEADER = ("device", "memory", "bfloat16", "float16", "bandwidth", "host link")
_BESIDES = (
    "Memory is GiB that programs can allocate, rates are dense TFLOP/s, and bandwidths GB/s. --device also takes an "
    "amount such as 24GiB (memory alone, no times), apple-64gb, and a file such as card.json: "
    '{"memory_gib": 23.6, "bfloat16_tflops": 165, "float32_tflops": 82.6, "bandwidth_gb_per_s": 1008}. '
)


def _parser() -> argparse.ArgumentParser:
    return listing_parser(
        "devices",
        "List the GPUs that --device names, with what is taken of their data sheets, and those that are left out for "
        "want of a source.",
        "say where the figures of each come from",
    )


def _run(options: argparse.Namespace) -> int:
    if options.json:
        devices = [asdict(device) | {"matmul_flops": dict(device.matmul_flops)} for device in DEVICES.values()]
        print(json.dumps({"devices": devices, "left_out": LEFT_OUT}, indent=1))
        return HOLDS
    print(*columns([_HEADER, *map(_cells, DEVICES.values())], numeric=range(1, len(_HEADER))), sep="\n")
    if options.verbose:
        for device in DEVICES.values():
            remarks = "".join(f"; {remark}" for remark in device.remarks("bfloat16"))
            print(wrapped(f"{device.name}: {device.title}. {device.source}{remarks}.", hang="  "))
    print()
    print(wrapped(_BESIDES + ("" if options.verbose else "Sources: hf-ckpt devices -v.")))
    for name, why in LEFT_OUT.items():
        print(wrapped(f"Left out: {name}, as {why}.", hang="  "))
    return HOLDS


def _cells(device: Device) -> tuple[str, ...]:
    memory = f"{device.memory_bytes / 2**30:.1f}"
    if not device.is_timed:
        return (device.name, memory, "", "", "", "")
    rates = (_number(device.matmul_flops[dtype] / 1e12) for dtype in ("bfloat16", "float16"))
    return (device.name, memory, *rates, _number(device.memory_bandwidth / 1e9), _number(device.host_link / 1e9))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


DEVICES_COMMAND = Command(_parser, _run, "the GPUs that --device names, and what is known of each")
