"""The GPUs that TRITON's kernels are compiled for without one, and what each gives to a program.

It imports neither torch nor Triton.
"""

from __future__ import annotations

from typing import NamedTuple

from attnplug.core.device import Device
from attnplug.core.errors import SpecError


class Chip(NamedTuple):
    """A kind of GPU.

    Args:
        arch: the compiler's name: "sm90", "gfx942".
        multiprocessors: of the GPU that is sold most.
        shared_memory: bytes that a program may use.
        registers: 32-bit registers of a multiprocessor of NVIDIA.
        most_registers: that a thread may have.
        warp_size: threads of a warp.
    """

    arch: str
    multiprocessors: int
    shared_memory: int
    registers: int = 65_536
    most_registers: int = 255
    warp_size: int = 32

    @property
    def device(self) -> Device:
        """As attnplug.select is asked for it."""
        return Device.parse(self.arch)

    @property
    def device_number(self) -> int:
        """The compute capability of NVIDIA's, as the compiler takes it: 90 for sm90."""
        return int(self.arch.removeprefix("sm"))

    @property
    def is_nvidia(self) -> bool:
        """Whether CUDA's compiler serves it."""
        return self.arch.startswith("sm")


# Shared memory: the CUDA programming guide's table of compute capabilities ("maximum amount of shared memory per thread
# block"), and AMD's sizes of the LDS. AMD's threads have 512 registers with those for matrix products.
CHIPS = {
    chip.arch: chip
    for chip in (
        Chip("sm80", 108, 163 << 10),
        Chip("sm86", 84, 99 << 10),
        Chip("sm89", 142, 99 << 10),
        Chip("sm90", 132, 227 << 10),
        Chip("sm100", 148, 227 << 10),
        Chip("sm120", 170, 99 << 10),
        Chip("gfx942", 304, 64 << 10, most_registers=512, warp_size=64),
        Chip("gfx950", 256, 160 << 10, most_registers=512, warp_size=64),
    )
}
"""By name, the oldest first."""


def chip_of(device: Device) -> Chip:
    """The chip with a device's compute capability; SpecError for one that nothing is compiled for."""
    for chip in CHIPS.values():
        if (chip.device.type, chip.device.capability) == (device.type, device.capability):
            return chip
    names = ", ".join(CHIPS)
    raise SpecError("device", str(device), f"has no compiler here; kernels are compiled ahead for {names}")
