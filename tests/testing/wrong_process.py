"""Backends that change the process they run in: variants of TORCH, each with one change."""

from __future__ import annotations

import atexit
import builtins
import decimal
import gc
import logging
import os
import random
import signal
import sys
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


def _no_profile(*event: Any) -> None:
    """Ignores each event."""


def _round(number: float, digits: int | None = None) -> float:
    """The number as it is."""
    return number


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


def patches_softmax() -> None:
    torch.nn.functional.softmax = lambda *given, **named: _OLD_SOFTMAX(*given, **named)


def patches_tensor() -> None:
    torch.Tensor.cpu = torch.Tensor.detach  # type: ignore[method-assign]


def writes_to_stdout() -> None:
    os.write(1, b"acme: attend\n")


WRONG_PROCESS: list[Wrong] = [
    wrong(
        "sets_dtype",
        "state/settings-kept-decode",
        "from_spec changes default dtype",
        **at_making(lambda: torch.set_default_dtype(torch.float64)),
    ),
    wrong(
        "sets_device",
        "state/settings-kept-decode",
        "process_weights_after_loading changes number of torch's modes",
        **at_loading(lambda: torch.set_default_device("cpu")),
    ),
    wrong(
        "stops_grad",
        "state/settings-kept-decode",
        "attend changes grad mode",
        **at_forward(lambda: torch.set_grad_enabled(False)),
    ),
    wrong(
        "seeds",
        "state/settings-kept-decode",
        "from_spec changes random state of torch",
        **at_making(lambda: torch.manual_seed(0)),
    ),
    wrong(
        "draws",
        "state/settings-kept-decode",
        "attend changes random state of torch",
        **at_forward(lambda: torch.rand(1)),
    ),
    wrong(
        "draws_in_build",
        "state/settings-kept-decode",
        "build changes random state of torch",
        **at_build(lambda: torch.rand(1)),
    ),
    wrong(
        "draws_numpy",
        "state/settings-kept-decode",
        "update_kv_cache changes random state of numpy",
        **at_write(lambda: np.random.default_rng and np.random.mtrand.random()),
    ),
    wrong(
        "draws_python",
        "state/settings-kept-decode",
        "attend changes random state of Python",
        **at_forward(random.random),
    ),
    wrong(
        "sets_threads",
        "state/settings-kept-decode",
        "from_spec changes threads of torch",
        **at_making(lambda: torch.set_num_threads(2)),
    ),
    wrong(
        "sets_precision",
        "state/settings-kept-decode",
        "changes float32 matmul precision",
        **at_loading(lambda: torch.set_float32_matmul_precision("medium")),
    ),
    wrong(
        "silences_warnings",
        "state/settings-kept-decode",
        "from_spec changes warnings filters",
        **at_making(lambda: warnings.simplefilter("ignore")),
    ),
    wrong(
        "sets_environment",
        "state/settings-kept-decode",
        "changes environment variable ACME_CACHE",
        **at_making(lambda: os.environ.update(ACME_CACHE="1")),
    ),
    wrong(
        "sets_environment_late",
        "state/settings-kept-decode",
        "attend changes environment variable ACME_STEP",
        **at_forward(lambda: os.environ.update(ACME_STEP="1")),
    ),
    wrong(
        "logs_more",
        "state/settings-kept-decode",
        "from_spec changes root logger level",
        **at_making(lambda: logging.getLogger().setLevel(logging.DEBUG)),
    ),
    wrong(
        "adds_handler",
        "state/settings-kept-decode",
        "changes root logger handlers",
        **at_loading(lambda: logging.getLogger().addHandler(logging.NullHandler())),
    ),
    wrong(
        "disables_logging",
        "state/settings-kept-decode",
        "from_spec changes root logger disabled below",
        **at_making(lambda: logging.disable(logging.CRITICAL)),
    ),
    wrong(
        "takes_signal",
        "state/settings-kept-decode",
        "from_spec changes handler of the signal SIGUSR1",
        **at_making(lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN)),
    ),
    wrong(
        "changes_folder",
        "state/settings-kept-decode",
        "from_spec changes working directory",
        **at_making(lambda: os.chdir("/")),
    ),
    wrong(
        "patches_softmax",
        "state/settings-kept-decode",
        "changes public functions of torch: torch.nn.functional.softmax",
        **at_loading(patches_softmax),
    ),
    wrong(
        "patches_tensor",
        "state/settings-kept-decode",
        "changes public functions of torch: torch.Tensor.cpu",
        **at_making(patches_tensor),
    ),
    wrong(
        "deterministic",
        "state/settings-kept-decode",
        "from_spec changes deterministic algorithms",
        **at_making(lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
    ),
    wrong(
        "stops_gc", "state/settings-kept-decode", "build changes garbage collector", **at_build(gc.disable)
    ),
    wrong("prints", "state/prints-nothing", "print to stdout: 'acme", **at_forward(lambda: print("acme"))),
    wrong(
        "prints_once", "state/prints-nothing", "print to stdout: 'acme: attend", **at_making(writes_to_stdout)
    ),
    wrong(
        "runs_at_exit",
        "state/settings-kept-decode",
        "from_spec changes functions to run at exit",
        **at_making(lambda: atexit.register(int)),
    ),
    wrong(
        "recursion",
        "state/settings-kept-decode",
        "from_spec changes recursion limit",
        **at_making(lambda: sys.setrecursionlimit(5000)),
    ),
    wrong(
        "extends_path",
        "state/settings-kept-decode",
        "the import of the impl or the builder changes sys.path",
        **at_question(lambda: sys.path.append("/acme")),
    ),
    wrong(
        "numpy_errors",
        "state/settings-kept-decode",
        "build changes floating-point errors of numpy",
        **at_build(lambda: np.seterr(all="ignore")),
    ),
    wrong(
        "print_options",
        "state/settings-kept-decode",
        "from_spec changes print options of torch",
        **at_making(lambda: torch.set_printoptions(precision=2)),
    ),
    wrong(
        "flushes_denormals",
        "state/settings-kept-decode",
        "changes flush of denormal numbers",
        **at_loading(lambda: torch.set_flush_denormal(True)),
    ),
    wrong(
        "stops_mkldnn",
        "state/settings-kept-decode",
        "changes mkldnn: True became False",
        **at_loading(lambda: setattr(torch.backends.mkldnn, "enabled", False)),
    ),
    wrong(
        "math_sdp_only",
        "state/settings-kept-decode",
        "attend changes torch.backends cuda.enable_flash_sdp",
        **at_forward(lambda: torch.backends.cuda.enable_flash_sdp(False)),
    ),
    wrong(
        "excepthook",
        "state/settings-kept-decode",
        "from_spec changes hook sys.excepthook",
        **at_making(lambda: setattr(sys, "excepthook", lambda *a: None)),
    ),
    wrong(
        "switch_interval",
        "state/settings-kept-decode",
        "from_spec changes switch interval",
        **at_making(lambda: sys.setswitchinterval(0.5)),
    ),
    wrong(
        "umask",
        "state/settings-kept-decode",
        "from_spec changes file mode mask",
        **at_making(lambda: os.umask(0o077)),
    ),
    wrong(
        "profiles",
        "state/settings-kept-decode",
        "attend changes hook profile: None became",
        **at_forward(lambda: sys.setprofile(_no_profile)),
    ),
    wrong(
        "displays",
        "state/settings-kept-decode",
        "from_spec changes hook sys.displayhook",
        **at_making(lambda: setattr(sys, "displayhook", print)),
    ),
    wrong(
        "fewer_digits",
        "state/settings-kept-decode",
        "build changes precision and rounding of decimal",
        **at_build(lambda: setattr(decimal.getcontext(), "prec", 9)),
    ),
    wrong(
        "silences_torch",
        "state/settings-kept-decode",
        "attend changes logger torch: ",
        **at_forward(lambda: logging.getLogger("torch").setLevel(50)),
    ),
    wrong(
        "replaces_round",
        "state/settings-kept-decode",
        "from_spec changes function of Python round",
        **at_making(lambda: setattr(builtins, "round", _round)),
    ),
    wrong(
        "slower_transformers",
        "state/settings-kept-decode",
        "build changes fast path of torch's transformers: True became False",
        **at_build(lambda: torch.backends.mha.set_fastpath_enabled(False)),
    ),
    wrong(
        "warns_always",
        "state/settings-kept-decode",
        "from_spec changes repeated warnings of torch",
        **at_making(lambda: torch.set_warn_always(True)),
    ),
    wrong(
        "yields_to_others",
        "state/settings-kept-decode",
        "attend changes priority of the process",
        **at_forward(lambda: setattr(os, "getpriority", lambda *which: 19)),
    ),
]
