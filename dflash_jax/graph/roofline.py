"""Minimum time of a program: bytes over bandwidth, operations over peak.

The table has sustained rates where they are known, not those of data sheets.
"""

import dataclasses

from dflash_jax.graph.memory import StepWork


@dataclasses.dataclass(frozen=True)
class Device:
    """Sustained rates of a device."""

    name: str
    bytes_per_s: float  # reads and writes together
    flops_per_s: dict[str, float]  # by dtype
    memory: int  # bytes


def _device(name: str, tb_s: float, tflops: float, gib: int, f32: float) -> Device:
    half = tflops * 1e12
    rates = {"bfloat16": half, "float16": half, "float32": half * f32}
    return Device(name, tb_s * 1e12, rates, gib * 2**30)


# TB/s, TFLOP/s in half precision, GiB, and how much of that rate float32 reaches. H200: copy
# bandwidth and GEMM rate measured; the other GPUs 0.9 and 0.8 of their data sheets.
_RATES = {
    "H200": (4.3, 790, 139, 0.06),
    "H100": (3.0, 790, 78, 0.06),
    "A100": (1.8, 250, 78, 0.06),
    "L40S": (0.78, 290, 44, 0.2),
    "RTX 4090": (0.9, 130, 23, 0.5),
    "RTX 3090": (0.84, 57, 23, 0.5),
    "CPU": (0.04, 0.2, 16, 1.0),
}
DEVICES = {name: _device(name, *rates) for name, rates in _RATES.items()}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Minimum time of one call on a device."""

    seconds: float
    bound: str  # "memory" or "compute"


def roofline(work: StepWork, device: Device, dtype: str) -> Roofline:
    """Return max(bytes / bandwidth, operations / peak) and which of the two it is."""
    moving, computing = work.bytes / device.bytes_per_s, work.flops / device.flops_per_s[dtype]
    return Roofline(max(moving, computing), "memory" if moving >= computing else "compute")


def find_device(kind: str) -> Device:
    """Return the table's entry for a JAX device kind or a name, or the CPU entry."""
    wanted = kind.lower()
    return next((d for d in DEVICES.values() if d.name.lower() in wanted), DEVICES["CPU"])
