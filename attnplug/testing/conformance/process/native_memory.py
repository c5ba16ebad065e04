"""The memory that C code has, and a cache of cuBLAS that grows with each new shape up to its bound."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def _mallinfo() -> Callable[[], Any] | None:
    """The function of the C library; None where it has none."""
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (OSError, TypeError, AttributeError):
        return None
    found.restype = _MallInfo
    return found


def native_bytes() -> int:
    """Bytes that C code and long Python objects have from the C library; 0 where it does not tell."""
    read = _mallinfo()
    if read is None:
        return 0
    found = read()
    return int(found.uordblks + found.hblkhd)


@contextlib.contextmanager
def no_choices_of_cublas() -> Iterator[None]:
    """Keep cuBLASLt from remembering the kernel of each shape, which is no leak of a backend's.

    Its cache has room for thousands of shapes, so steps of other lengths fill it for longer than a check lasts.
    """
    library, capacity = _cublas(), ctypes.c_size_t()
    if library is None or library.cublasLtHeuristicsCacheGetCapacity(ctypes.byref(capacity)):
        yield
        return
    library.cublasLtHeuristicsCacheSetCapacity(ctypes.c_size_t(0))
    try:
        yield
    finally:
        library.cublasLtHeuristicsCacheSetCapacity(capacity)


def _cublas() -> Any:
    """cuBLASLt, if torch has loaded it and it has such a cache."""
    if torch.version.cuda is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return library if library.cublasLtHeuristicsCacheSetCapacity else None
    except (OSError, AttributeError):
        return None
