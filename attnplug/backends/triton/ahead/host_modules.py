"""The C modules by which Triton calls a GPU's driver: its functions, and before Triton 3.7 a launcher for each signature.

Triton compiles them at the first launch of a process that finds none in its cache, which takes a second or two. They depend on
neither the GPU nor its driver, so a machine without one can compile them. Nothing is loaded here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from triton.backends.nvidia import driver
from triton.runtime import build

from attnplug.backends.triton.ahead.chips import Chip
from attnplug.backends.triton.ahead.forms import Form

_DRIVER = "libcuda.so.1"
_LAUNCHER = SimpleNamespace(
    num_ctas=1,
    cluster_dims=(1, 1, 1),
    tensordesc_meta=None,
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)
"""Of a kernel's metadata, what its launcher reads; no C code depends on it for kernels without tensor descriptors."""


class _ColdError(Exception):
    """A module that the cache does not have."""


def c_compiler() -> str | None:
    """The compiler that Triton takes; None without one."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def are_for(chip: Chip) -> bool:
    """Whether they can be compiled here for a chip; those for AMD are left to the first launch."""
    return chip.is_nvidia and c_compiler() is not None


def are_cached(form: Form) -> bool:
    """Whether Triton's cache has the modules that launch a form on an NVIDIA GPU."""

    def refuse(*_: object) -> str:
        raise _ColdError

    with mock.patch.object(build, "_build", refuse), contextlib.suppress(_ColdError):
        _make(form)
        return True
    return False


def compile_modules(form: Form) -> None:
    """Put the modules that launch a form on an NVIDIA GPU into Triton's cache, unless the C compiler fails."""
    if are_cached(form):
        return
    with contextlib.suppress(OSError, subprocess.CalledProcessError), _driver_to_link():
        _make(form)


def _make(form: Form) -> None:
    # Triton loads what it has compiled, for which the driver would have to be here.
    loaded = mock.MagicMock()
    folders = [driver.libdevice_dir, *_folders]
    with (
        mock.patch.object(build, "_load_module_from_path", return_value=loaded),
        # Triton keeps names of a module in its own, where a process that launches kernels has those of the real one.
        mock.patch.dict(vars(driver), library_dirs=lambda: folders),
    ):
        holder: Any = SimpleNamespace()
        driver.CudaUtils.__init__(holder)
        if hasattr(driver, "make_launcher"):
            driver.CudaLauncher(form.source, _LAUNCHER)


_folders: list[str] = []
"""Of a library with the name of the GPU's driver, while modules are linked."""


@contextlib.contextmanager
def _driver_to_link() -> Iterator[None]:
    """An empty library in place of the driver, which the linker only names in what it makes."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "driver.c")
        source.touch()
        library = Path(folder, _DRIVER)
        command = [c_compiler() or "cc", "-shared", f"-Wl,-soname,{_DRIVER}", "-o", str(library), str(source)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        # Triton 3.5 links by the name without a number.
        Path(folder, _DRIVER.removesuffix(".1")).symlink_to(library)
        _folders[:] = [folder]
        try:
            yield
        finally:
            _folders.clear()
