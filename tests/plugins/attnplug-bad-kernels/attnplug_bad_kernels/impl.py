"""TORCH's impl with one way to go wrong for each feature; of several the first counts."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import torch

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.spec import LayerSpec


def hang_in_python() -> None:
    """Forever, and whatever is raised meanwhile is swallowed as a careless retry loop does."""
    while True:
        try:
            signal.pause()
        except Exception:
            continue


def hang_in_c() -> None:
    """Forever, in C, with the interpreter's lock held and every signal blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
    while True:
        ctypes.PyDLL(None).pause()


def crash() -> None:
    """Read address 0."""
    ctypes.string_at(0)


def abort() -> None:
    """End as C++ does on an exception that nobody catches."""
    os.write(2, b"terminate called after throwing an instance of 'AcmeError'\n  what():  no such kernel\n")
    os.abort()


def leave() -> None:
    """End the process, as a library does whose licence has run out."""
    os._exit(7)


def hog() -> None:
    """Allocate until nothing is left; nothing is written, so this costs the machine nothing."""
    taken = []
    while True:
        taken.append(torch.empty(64 * 2**20, dtype=torch.uint8))


def show() -> None:
    """Print, and go on."""
    print("acme: 4 blocks")


def write() -> None:
    """Write to standard output as a kernel's printf does, in C's buffer, and go on."""
    ctypes.CDLL(None).printf(b"acme: block 0\n")


def interrupt() -> None:
    """Raise what is the user's to raise."""
    raise KeyboardInterrupt


def misbehaviour(spec: LayerSpec) -> Any:
    """What goes wrong for a layer; None for a plain one."""
    cases = (
        (spec.has_sinks, hang_in_c),
        (spec.has_alibi, crash),
        (spec.logits_soft_cap is not None, hog),
        (spec.chunk_size is not None, show),
        (spec.direct_kv, hang_in_python),
        (spec.needs_lse, write),
        (spec.head_size_v != spec.head_size, abort),
        (not spec.causal, leave),
        (spec.is_windowed, interrupt),
    )
    return next((does for asked, does in cases if asked), None)


class BadKernelsImpl(TorchImpl):
    """Goes wrong, then attends as TORCH does where it comes back."""

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        """TORCH's, after what the layer brings."""
        does = misbehaviour(self.spec)
        if does is not None:
            does()
        return super().attend(*args, **kwargs)
