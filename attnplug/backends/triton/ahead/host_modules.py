"""The C modules by which Triton calls a GPU's driver: its functions, and before Triton 3.7 a launcher for each signature.

Triton compiles them at the first launch of a process that finds none in its cache, which takes a second or two. They depend on
neither the GPU nor its driver, so a machine without one can compile them. Nothing is loaded here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from triton.backends.nvidia import driver
from triton.runtime import build

from attnplug.backends.triton.ahead.chips import Chip
from attnplug.backends.triton.ahead.forms import Form
from attnplug.core.interface.guarded import guarded_call

_DRIVER = "libcuda.so.1"
_LAUNCHER = {
    "num_ctas": 1,
    "cluster_dims": (1, 1, 1),
    "global_scratch_size": 0,
    "global_scratch_align": 1,
    "profile_scratch_size": 0,
    "profile_scratch_align": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}
"""Of a kernel's metadata, what its launcher reads; C code depends on the descriptors of tensors alone."""


def c_compiler() -> str | None:
    """The compiler that Triton takes; None without one."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def are_for(chip: Chip) -> bool:
    """Whether they can be compiled here for a chip; those for AMD are left to the first launch."""
    return chip.is_nvidia and c_compiler() is not None


def are_cached(form: Form) -> bool:
    """Whether Triton's cache has the modules that launch a form on an NVIDIA GPU."""
    with mock.patch.object(build, "_build", side_effect=LookupError("a module that the cache does not have")):
        _, problem = guarded_call(_make, form)
    return problem is None


def compile_modules(form: Form) -> None:
    """Put the modules that launch a form on an NVIDIA GPU into Triton's cache, unless the C compiler fails."""
    if not are_cached(form):
        guarded_call(_compile, form)


def _compile(form: Form) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "driver.c")
        source.touch()
        # An empty library in place of the driver, which the linker only names in what it makes.
        made = build._build("driver", str(source), folder, [], [], [], [f"-Wl,-soname,{_DRIVER}"])
        # Triton 3.5 links by the name without a number.
        for name in (_DRIVER, _DRIVER.removesuffix(".1")):
            Path(folder, name).symlink_to(made)
        original: Any = build._build

        def compile_c(*given: Any) -> Any:
            # The linker leaves out a library of which nothing is called, unless it is told to keep the next ones.
            *others, flags = given
            return original(*others, [*flags, "-Wl,--no-as-needed", f"-l:{_DRIVER}"])

        with mock.patch.object(build, "_build", compile_c):
            _make(form, folder)


def _make(form: Form, *folders: str) -> None:
    """Have Triton make what it lacks, linked with libraries of `folders`."""
    # Triton loads what it has compiled, for which the driver would have to be here.
    loaded = mock.MagicMock()
    found = [driver.libdevice_dir, *folders]
    with (
        mock.patch.object(build, "_load_module_from_path", return_value=loaded),
        # Triton keeps names of a module in its own, where a process that launches kernels has those of the real one.
        mock.patch.dict(vars(driver), library_dirs=lambda: found),
    ):
        holder: Any = SimpleNamespace()
        driver.CudaUtils.__init__(holder)
        if hasattr(driver, "make_launcher"):
            # Only kernels for Hopper have any, which are descriptors of its copy engine there.
            described = sum(str(each).startswith("tensordesc") for each in form.signature.values())
            driver.CudaLauncher(
                form.source, SimpleNamespace(**_LAUNCHER, tensordesc_meta=[{}] * described or None)
            )
