"""`attnplug matrix --compile`: compiles the kernels of cells for GPUs that need not be here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnplug.cli.commands.matrix_files import Outputs, show
from attnplug.cli.output.output import echo
from attnplug.core.errors import PolicyError
from attnplug.matrix.model import Run, Status
from attnplug.matrix.results import read_matrix

if TYPE_CHECKING:
    from attnplug.cli.commands.matrix import Pair

_DOES_NOT_FIT = 4


def compile_runs(
    pairs: Sequence[Pair], declared: Sequence[Run], known: Path | None, jobs: int | None, outputs: Outputs
) -> int:
    """Compile the kernels of the claimed cells, and write the results.

    Args:
        pairs: backends and devices.
        declared: their cells.
        known: results with kernels that are not compiled again.
        jobs: processes; None for one for each processor.
        outputs: the files to write.

    Returns:
        The exit code.

    Raises:
        PolicyError: a backend other than TRITON, or Triton is missing or interpreted.
        SpecError: a device that nothing is compiled for.
        MatrixFileError: `known` cannot be read.
    """
    for pair in pairs:
        if pair.offer.name != "TRITON":
            limit = "has no kernels that are compiled without a GPU"
            raise PolicyError("--backend", pair.name, limit, "add --backend TRITON")
    check_compiler("matrix --compile")
    from attnplug.matrix.compiled import Compilation, known_kernels

    before = known_kernels(read_matrix(known).runs) if known is not None else {}
    compilation = Compilation(declared, [pair.device for pair in pairs], before)
    echo(f"{compilation.remaining} kernels to compile, {len(compilation.kernels)} known", err=True)
    for failure in compilation.failures:
        echo(failure, err=True)
    for device, made in compilation.compile(jobs or os.cpu_count() or 1):
        if made.refused or made.spilled:
            echo(f"{device}: {made}", err=True)
    matrix = compilation.outcome()
    outputs.write(matrix)
    if not outputs.to_stdout:
        show(matrix)
    refused = [each for run in matrix.runs for each in run.kernels if each.refused]
    cells = sum(each.status is Status.COMPILED for run in matrix.runs for each in run.findings)
    echo(f"{cells} cells compiled; {len(refused)} kernels do not fit", err=True)
    return _DOES_NOT_FIT if refused or compilation.failures else 0


def check_compiler(command: str) -> None:
    """PolicyError if Triton compiles nothing here."""
    if importlib.util.find_spec("triton") is None:
        raise PolicyError("attnplug", command, "needs Triton, which is not installed", "pip install triton")
    import triton
    from triton import knobs
    from triton.runtime import cache

    if knobs.runtime.interpret:
        raise PolicyError("TRITON_INTERPRET", "1", "compiles nothing", "unset it")
    if not hasattr(cache, "get_cache_key"):
        raise PolicyError(
            "triton", triton.__version__, "does not name its compiled kernels", "pip install 'triton>=3.5'"
        )
