"""Backends that change the process they run in: variants of TORCH, each with one change."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from catching import Wrong, wrong

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl

__all__ = ["WRONG_PROCESS"]

_OLD_SOFTMAX = torch.nn.functional.softmax
_LEAK: list[Any] = []


class Quiet(logging.Filter):
    """Lets no record pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        return False


def at_forward(act: Callable[[], object]) -> dict[str, Any]:
    """Parts that act after each forward."""

    class Acts(TorchImpl):
        def attend(self, *given: Any, **asked: Any) -> torch.Tensor:
            found = super().attend(*given, **asked)
            act()
            return found

    return {"impl": Acts}


def at_making(act: Callable[[], object]) -> dict[str, Any]:
    """Parts that act when an impl is made."""

    class Acts(TorchImpl):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            act()

    return {"impl": Acts}


def at_loading(act: Callable[[], object]) -> dict[str, Any]:
    """Parts that act after the weights are loaded."""

    class Acts(TorchImpl):
        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            act()

    return {"impl": Acts}


def at_write(act: Callable[[], object]) -> dict[str, Any]:
    """Parts that act after each write to the cache."""

    class Acts(TorchImpl):
        def update_kv_cache(self, *given: Any, **asked: Any) -> None:
            super().update_kv_cache(*given, **asked)
            act()

    return {"impl": Acts}


def at_build(act: Callable[[], object]) -> dict[str, Any]:
    """Parts that act after each build."""

    class Acts(TorchMetadataBuilder):
        def build(self, *given: Any, **asked: Any) -> Any:
            found = super().build(*given, **asked)
            act()
            return found

    return {"builder": Acts}


def at_question(act: Callable[[], object]) -> dict[str, Any]:
    """Parts that act when the backend is asked for its class."""

    def get_impl_cls(cls: Any) -> Any:
        act()
        return TorchImpl

    return {"get_impl_cls": get_impl_cls}


def leaves_file() -> None:
    _LEAK.append(tempfile.TemporaryFile())  # noqa: SIM115 - that is the mistake


def leaves_thread() -> None:
    thread = threading.Thread(target=threading.Event().wait, args=(30,), daemon=True)
    thread.start()


def leaves_descriptor() -> None:
    _LEAK.append(os.dup(0))


def patches_softmax() -> None:
    torch.nn.functional.softmax = lambda *given, **named: _OLD_SOFTMAX(*given, **named)


def patches_tensor() -> None:
    torch.Tensor.cpu = torch.Tensor.detach  # type: ignore[method-assign]


def lets_cpu_alone() -> None:
    _LEAK.append(torch.empty(1 << 15).fill_(1.0))


def writes_to_stdout() -> None:
    os.write(1, b"acme: attend\n")


WRONG_PROCESS: list[Wrong] = [
    wrong("sets_dtype", "*", "", **at_making(lambda: torch.set_default_dtype(torch.float64))),
    wrong("sets_device", "*", "", **at_loading(lambda: torch.set_default_device("cpu"))),
    wrong("stops_grad", "*", "", **at_forward(lambda: torch.set_grad_enabled(False))),
    wrong("seeds", "*", "", **at_making(lambda: torch.manual_seed(0))),
    wrong("draws", "*", "", **at_forward(lambda: torch.rand(1))),
    wrong("draws_in_build", "*", "", **at_build(lambda: torch.rand(1))),
    wrong("draws_numpy", "*", "", **at_write(lambda: np.random.default_rng and np.random.mtrand.random())),
    wrong("draws_python", "*", "", **at_forward(random.random)),
    wrong("sets_threads", "*", "", **at_making(lambda: torch.set_num_threads(2))),
    wrong("sets_precision", "*", "", **at_loading(lambda: torch.set_float32_matmul_precision("medium"))),
    wrong("silences_warnings", "*", "", **at_making(lambda: warnings.simplefilter("ignore"))),
    wrong("sets_environment", "*", "", **at_question(lambda: os.environ.update(ACME_CACHE="1"))),
    wrong("sets_environment_late", "*", "", **at_forward(lambda: os.environ.update(ACME_STEP="1"))),
    wrong("logs_more", "*", "", **at_making(lambda: logging.getLogger().setLevel(logging.DEBUG))),
    wrong(
        "adds_handler", "*", "", **at_loading(lambda: logging.getLogger().addHandler(logging.NullHandler()))
    ),
    wrong("disables_logging", "*", "", **at_making(lambda: logging.disable(logging.CRITICAL))),
    wrong("takes_signal", "*", "", **at_making(lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))),
    wrong("changes_folder", "*", "", **at_making(lambda: os.chdir("/"))),
    wrong("patches_softmax", "*", "", **at_loading(patches_softmax)),
    wrong("patches_tensor", "*", "", **at_question(patches_tensor)),
    wrong(
        "deterministic",
        "*",
        "",
        **at_making(lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
    ),
    wrong("stops_gc", "*", "", **at_build(gc.disable)),
    wrong("grows", "*", "", **at_forward(lets_cpu_alone)),
    wrong("leaves_files", "*", "", **at_write(leaves_file)),
    wrong("leaves_descriptors", "*", "", **at_forward(leaves_descriptor)),
    wrong("leaves_threads", "*", "", **at_forward(leaves_thread)),
    wrong("prints", "*", "", **at_forward(lambda: print("acme"))),
    wrong("prints_once", "*", "", **at_making(writes_to_stdout)),
    wrong("runs_at_exit", "*", "", **at_making(lambda: atexit.register(int))),
    wrong("recursion", "*", "", **at_making(lambda: sys.setrecursionlimit(5000))),
    wrong("extends_path", "*", "", **at_question(lambda: sys.path.append("/acme"))),
    wrong("numpy_errors", "*", "", **at_build(lambda: np.seterr(all="ignore"))),
    wrong("print_options", "*", "", **at_making(lambda: torch.set_printoptions(precision=2))),
    wrong("flushes_denormals", "*", "", **at_loading(lambda: torch.set_flush_denormal(True))),
    wrong("stops_mkldnn", "*", "", **at_loading(lambda: setattr(torch.backends.mkldnn, "enabled", False))),
    wrong("math_sdp_only", "*", "", **at_forward(lambda: torch.backends.cuda.enable_flash_sdp(False))),
    wrong("excepthook", "*", "", **at_making(lambda: setattr(sys, "excepthook", lambda *a: None))),
    wrong("switch_interval", "*", "", **at_making(lambda: sys.setswitchinterval(0.5))),
    wrong("umask", "*", "", **at_making(lambda: os.umask(0o077))),
]
