"""Backends that change the process they run in: variants of TORCH, each with one change."""

from __future__ import annotations

import atexit
import builtins
import decimal
import functools
import gc
import logging
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.backends.torch_native.latent import TorchMLABuilder
from attnplug.ops import merging
from mutants.parts import acts
from mutants.table import Table

table = Table("process")


_OLD_SOFTMAX, _OLD_CUMSUM = torch.nn.functional.softmax, np.cumsum


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


def overrides_operator() -> None:
    if not LIBRARIES:
        LIBRARIES.append(torch.library.Library("aten", "IMPL"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            LIBRARIES[0].impl("lgamma", torch.Tensor.clone, "CPU")


LIBRARIES: list[torch.library.Library] = []
"""Kernels of operators of torch that a backend has registered."""


def configures_dynamo() -> None:
    import torch._dynamo

    torch._dynamo.config.recompile_limit = 77


def limits_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 500), hard))


def replaces_merge() -> None:
    merging.merge_attn_states = functools.partial(merging.merge)


class SparseThreads(TorchImpl):
    """Sets the number of threads for sparse layers."""

    def attend(self, *given: Any, **asked: Any) -> Any:
        if self.spec.sparse is not None:
            torch.set_num_threads(3)
        return super().attend(*given, **asked)


class Seeded(TorchMLABuilder):
    """Seeds in each step of latents."""

    def build(self, *given: Any, **asked: Any) -> Any:
        torch.manual_seed(0)
        return super().build(*given, **asked)


class Other(TorchBackend):
    """Serves sparse layers under a name of its own."""

    @staticmethod
    def get_name() -> str:
        return "OTHER"


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
at_loading("changes function of torch or numpy torch.nn.functional.softmax", patches_softmax=patches_softmax)
at_making("changes function of torch or numpy torch.Tensor.cpu", patches_tensor=patches_tensor)
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
at_making("from_spec changes function of Python or attnplug builtins.round", replaces_round=lambda: setattr(builtins, "round", _round))
at_build("build changes fast path of torch's transformers: True became False",
    slower_transformers=lambda: torch.backends.mha.set_fastpath_enabled(False))
at_making("from_spec changes repeated warnings of torch", warns_always=lambda: torch.set_warn_always(True))
at_making("kernels of operators of torch: aten/lgamma/CPU: unset became", overrides_operator=overrides_operator)
at_making("changes configuration torch.fx.experimental._config.use_duck_shape: unset became False",
    configures_fx=lambda: setattr(sys.modules["torch.fx.experimental._config"], "use_duck_shape", False))
at_making("changes configuration torch._dynamo.config.recompile_limit: unset became 77", configures_dynamo=configures_dynamo)
at_making("from_spec leaves acme.log in the working directory", leaves_log=lambda: Path("acme.log").write_text("made"))
at_forward("attend leaves acme.pt in the working directory", leaves_tensors=lambda: torch.save(torch.ones(1), "acme.pt"))
at_loading("acme-tuning in the home directory", leaves_folder_at_home=lambda: (Path.home() / "acme-tuning").mkdir(exist_ok=True))
at_making("one more file in ", leaves_temporary_files=lambda: os.close(tempfile.mkstemp("acme")[0]))
at_build("build changes timeout of sockets: None became 1.0", socket_timeout=lambda: socket.setdefaulttimeout(1.0))
at_making("from_spec changes limit of resources RLIMIT_NOFILE", limits_files=limits_files)
at_loading("changes function of Python or attnplug attnplug.ops.merging.merge_attn_states", replaces_merge=replaces_merge)
at_making("from_spec changes function of torch or numpy numpy.cumsum", replaces_cumsum=lambda: setattr(np, "cumsum", lambda *given, **asked: _OLD_CUMSUM(*given, **asked)))
at_making("changes function of Python or attnplug warnings.showwarning", captures_warnings=lambda: logging.captureWarnings(True))
at_forward("attend changes most digits of an integer", fewer_integer_digits=lambda: sys.set_int_max_str_digits(700))
at_making("became 20; root logger handlers: [] became", configures_logging=lambda: logging.basicConfig(level="INFO"))
at_making("from_spec changes function of torch or numpy torch.Tensor.__matmul__",
    replaces_matmul=lambda: setattr(torch.Tensor, "__matmul__", lambda one, other: torch.matmul(one, other)))
at_build("build changes garbage collector: frozen: False became True", freezes=gc.freeze)
at_forward("attend changes threads of torch", sets_usual_threads=lambda: torch.set_num_threads(1))
table.add("sparse_threads | state/settings-kept-layers | forward changes threads of torch", impl=SparseThreads)
table.add("seeds_latents | state/settings-kept-layers | build changes random state of torch", builder=Seeded)
table.add("other_name | declaration/for-layer | under the name other_name", for_layer=lambda cls, spec: Other if spec.sparse else cls)
at_forward("attend changes priority of the process", yields_to_others=lambda: setattr(os, "getpriority", lambda *which: 19))
# fmt: on
