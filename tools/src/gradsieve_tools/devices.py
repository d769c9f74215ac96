"""What people rent: one table of devices, for a plan whose hosts were not measured.

Bandwidths of memory are those of the vendor's data sheet, as others quote it (the sheets themselves were not
at hand), of the slowest variant that is sold under the name.
A launch is taken to cost the same on all of them: it is the host's work. NVIDIA shows some 20 us from the
call to the kernel for an element-wise op of PyTorch on a V100 (developer.nvidia.com/blog, "Understanding the
Visualization of Overhead and Latency in NVIDIA Nsight Systems"). `gradsieve doctor` measures both on hosts
that are there.
"""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH = 20e-6  # seconds
# Bytes of memory traffic for an element compared with a threshold: 500 M/s at 10 GB/s on the lab's CPU
COMPARED = 20.0
MESSAGE = 20e-6  # processor seconds of a message


@dataclass(frozen=True, slots=True)
class Device:
    memory: float  # bytes a second, read and written
    source: str
    launch: float = LAUNCH

    @property
    def selection(self) -> float:
        """Elements a second that are compared with a threshold."""
        return self.memory / COMPARED


_GB = 1e9
DEVICES = {
    "cpu": Device(10 * _GB, "this project's lab: 2.5 with all ranks at work to 14 with one", launch=0.0),
    "t4": Device(300 * _GB, "NVIDIA T4 data sheet"),
    "l4": Device(300 * _GB, "NVIDIA L4 data sheet"),
    "a10": Device(600 * _GB, "NVIDIA A10 data sheet"),
    "v100": Device(900 * _GB, "NVIDIA V100 data sheet"),
    "rtx3090": Device(936 * _GB, "NVIDIA Ampere GA102 white paper"),
    "rtx4090": Device(1008 * _GB, "NVIDIA Ada white paper"),
    "l40s": Device(864 * _GB, "NVIDIA L40S data sheet"),
    "a100": Device(1555 * _GB, "NVIDIA A100 data sheet (40 GB; 80 GB: 1,935 and 2,039)"),
    "h100": Device(2000 * _GB, "NVIDIA H100 data sheet (PCIe; SXM: 3,350)"),
    "h200": Device(4800 * _GB, "NVIDIA H200 data sheet"),
}
