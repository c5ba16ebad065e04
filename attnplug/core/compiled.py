"""What a kernel takes on a chip, as its compiler says."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel, compiled for one chip.

    Args:
        key: a hash of the source and all that is compiled in.
        kernel: its name, and the constants that are on.
        threads: of a program.
        registers: of a thread.
        shared: bytes of shared memory of a program.
        spilled: bytes of a thread's registers that are written to memory.
        refused: why the chip cannot run it; empty if it can.
    """

    key: str
    kernel: str
    threads: int = 0
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    refused: str = ""

    @property
    def name(self) -> str:
        """Its name without constants."""
        return self.kernel.partition("(")[0]

    def __str__(self) -> str:
        """Such as "prefill_kernel(D=128) spills 56 bytes"."""
        if self.refused:
            return f"{self.kernel}: {self.refused}"
        return f"{self.kernel} spills {self.spilled} bytes" if self.spilled else self.kernel
