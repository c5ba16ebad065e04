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

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from mutants.parts import acts
from mutants.table import Table

table = Table("process")


_OLD_SOFTMAX = torch.nn.functional.softmax


def _no_profile(*event: Any) -> None:
    """Ignores each event."""


def _round(number: float, digits: int | None = None) -> float:
    """The number as it is."""
    return number


at_forward = acts(table, TorchImpl, "attend")

at_making = acts(table, TorchImpl, "__init__")

at_loading = acts(table, TorchImpl, "process_weights_after_loading")

at_write = acts(table, TorchImpl, "update_kv_cache")

at_build = acts(table, TorchMetadataBuilder, "build")


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


# fmt: off
at_making("from_spec changes default dtype", sets_dtype=lambda: torch.set_default_dtype(torch.float64))
at_loading("process_weights_after_loading changes number of torch's modes", sets_device=lambda: torch.set_default_device("cpu"))
at_forward("attend changes grad mode", stops_grad=lambda: torch.set_grad_enabled(False))
at_making("from_spec changes random state of torch", seeds=lambda: torch.manual_seed(0))
at_forward("attend changes random state of torch", draws=lambda: torch.rand(1))
at_build("build changes random state of torch", draws_in_build=lambda: torch.rand(1))
at_write("update_kv_cache changes random state of numpy", draws_numpy=lambda: np.random.default_rng and np.random.mtrand.random())
at_forward("attend changes random state of Python", draws_python=random.random)
at_making("from_spec changes threads of torch", sets_threads=lambda: torch.set_num_threads(2))
at_loading("changes float32 matmul precision", sets_precision=lambda: torch.set_float32_matmul_precision("medium"))
at_making("from_spec changes warnings filters", silences_warnings=lambda: warnings.simplefilter("ignore"))
at_making("changes environment variable ACME_CACHE", sets_environment=lambda: os.environ.update(ACME_CACHE="1"))
at_forward("attend changes environment variable ACME_STEP", sets_environment_late=lambda: os.environ.update(ACME_STEP="1"))
at_making("from_spec changes root logger level", logs_more=lambda: logging.getLogger().setLevel(logging.DEBUG))
at_loading("changes root logger handlers", adds_handler=lambda: logging.getLogger().addHandler(logging.NullHandler()))
at_making("from_spec changes root logger disabled below", disables_logging=lambda: logging.disable(logging.CRITICAL))
at_making("from_spec changes handler of the signal SIGUSR1", takes_signal=lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))
at_making("from_spec changes working directory", changes_folder=lambda: os.chdir("/"))
at_loading("changes public functions of torch: torch.nn.functional.softmax", patches_softmax=patches_softmax)
at_making("changes public functions of torch: torch.Tensor.cpu", patches_tensor=patches_tensor)
at_making("from_spec changes deterministic algorithms", deterministic=lambda: torch.use_deterministic_algorithms(True, warn_only=True))
at_build("build changes garbage collector", stops_gc=gc.disable)
at_forward("print to stdout: 'acme", check="state/prints-nothing", prints=lambda: print("acme"))
at_making("print to stdout: 'acme: attend", check="state/prints-nothing", prints_once=writes_to_stdout)
at_making("from_spec changes functions to run at exit", runs_at_exit=lambda: atexit.register(int))
at_making("from_spec changes recursion limit", recursion=lambda: sys.setrecursionlimit(5000))
table.add("extends_path | state/settings-kept-decode | the import of the impl or the builder changes sys.path",
    **at_question(lambda: sys.path.append("/acme")))
at_build("build changes floating-point errors of numpy", numpy_errors=lambda: np.seterr(all="ignore"))
at_making("from_spec changes print options of torch", print_options=lambda: torch.set_printoptions(precision=2))
at_loading("changes flush of denormal numbers", flushes_denormals=lambda: torch.set_flush_denormal(True))
at_loading("changes mkldnn: True became False", stops_mkldnn=lambda: setattr(torch.backends.mkldnn, "enabled", False))
at_forward("attend changes torch.backends cuda.enable_flash_sdp", math_sdp_only=lambda: torch.backends.cuda.enable_flash_sdp(False))
at_making("from_spec changes hook sys.excepthook", excepthook=lambda: setattr(sys, "excepthook", lambda *a: None))
at_making("from_spec changes switch interval", switch_interval=lambda: sys.setswitchinterval(0.5))
at_making("from_spec changes file mode mask", umask=lambda: os.umask(0o077))
at_forward("attend changes hook profile: None became", profiles=lambda: sys.setprofile(_no_profile))
at_making("from_spec changes hook sys.displayhook", displays=lambda: setattr(sys, "displayhook", print))
at_build("build changes precision and rounding of decimal", fewer_digits=lambda: setattr(decimal.getcontext(), "prec", 9))
at_forward("attend changes logger torch: ", silences_torch=lambda: logging.getLogger("torch").setLevel(50))
at_making("from_spec changes function of Python round", replaces_round=lambda: setattr(builtins, "round", _round))
at_build("build changes fast path of torch's transformers: True became False",
    slower_transformers=lambda: torch.backends.mha.set_fastpath_enabled(False))
at_making("from_spec changes repeated warnings of torch", warns_always=lambda: torch.set_warn_always(True))
at_forward("attend changes priority of the process", yields_to_others=lambda: setattr(os, "getpriority", lambda *which: 19))
# fmt: on
