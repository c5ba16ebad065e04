"""Watches the compilation of attnplug's Triton kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from triton import knobs


@contextlib.contextmanager
def watch_compiling() -> Iterator[list[str]]:
    """Inside, the list grows by every kernel that is compiled, or loaded from Triton's cache on disk.

    An entry has the kernel's name and its constants except None and False: "decode_kernel(GROUP=4, BLOCK_M=16)".
    """
    found: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def compiled(*arguments: Any, **facts: Any) -> Any:
        function = facts["fn"]
        if function.module.startswith("attnplug."):
            found.append(_name(function.jit_function, facts["compile"]["constants"]))
        return None if before is None else before(*arguments, **facts)

    knobs.runtime.jit_post_compile_hook = compiled
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


def _name(function: Any, constants: Any) -> str:
    names = function.arg_names
    sizes = [(path if isinstance(path, str) else names[path[0]], value) for path, value in constants.items()]
    shown = ", ".join(f"{name}={value}" for name, value in sizes if value not in (None, False))
    return f"{function.__name__}({shown})"
