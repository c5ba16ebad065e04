"""The settings of a process that a backend must leave as they are: of torch, numpy, Python and the system."""

from __future__ import annotations

import atexit
import builtins
import decimal
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Mapping
from typing import Any

from attnplug.testing.conformance.process.torch_settings import TORCH_SETTINGS, Opaque, Setting

# Environment variables that torch itself sets when it initialises CUDA or compiles.
_SET_BY_TORCH = ("CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Packages whose loggers belong to the process: a backend may set those of its own package.
_LOGGING = ("attnplug", "numpy", "py", "torch")
_HOOKS: tuple[tuple[Any, str], ...] = (
    (sys, "excepthook"),
    (sys, "unraisablehook"),
    (sys, "displayhook"),
    (sys, "stdout"),
    (sys, "stderr"),
    (threading, "excepthook"),
)


def read_settings() -> dict[Setting, Any]:
    """The value of each setting now."""
    return {setting: setting.read() for setting in _SETTINGS}


def restore_settings(values: Mapping[Setting, Any]) -> None:
    """Set each setting that can be set to its value in `values`."""
    for setting, value in values.items():
        if setting.write is not None and setting.read() != value:
            setting.write(value)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_TORCH}


def _set_environment(values: Mapping[str, str]) -> None:
    for name in _environment().keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


def _signals() -> dict[str, Any]:
    return {
        each.name: signal.getsignal(each) for each in sorted(signal.valid_signals()) if hasattr(each, "name")
    }


def _root_logger() -> dict[str, Any]:
    root = logging.getLogger()
    handlers = [type(each).__name__ for each in root.handlers]
    found = {"level": root.level, "handlers": handlers, "filters": len(root.filters)}
    return found | {"disabled below": logging.root.manager.disable}


def _set_root_logger(values: Mapping[str, Any]) -> None:
    logging.getLogger().setLevel(values["level"])
    logging.disable(values["disabled below"])


def _filters() -> Opaque:
    return Opaque([*warnings.filters])


def _set_filters(values: Opaque) -> None:
    warnings.filters[:] = values.value  # type: ignore[index]
    # Without this, warnings that the old filters hid stay hidden.
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _umask() -> int:
    # The system gives the mask only where it is set.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _affinity() -> Any:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _set_affinity(cpus: Any) -> None:
    if cpus is not None:
        os.sched_setaffinity(0, cpus)


def _functions() -> dict[str, int]:
    return {name: id(value) for name, value in vars(builtins).items() if callable(value)}


def _hooks() -> dict[str, Any]:
    found = {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in _HOOKS}
    return found | {"trace": sys.gettrace(), "profile": sys.getprofile()}


def _set_hooks(values: Mapping[str, Any]) -> None:
    for owner, name in _HOOKS:
        setattr(owner, name, values[f"{owner.__name__}.{name}"])
    sys.settrace(values["trace"])
    sys.setprofile(values["profile"])


def _loggers() -> dict[str, Any]:
    """The level, and whether it is disabled and propagates, of each logger of a library that was set."""
    usual = (logging.NOTSET, False, True)
    found = {
        name: (logger.level, logger.disabled, logger.propagate)
        for name, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in _LOGGING
    }
    return {name: values for name, values in found.items() if values != usual}


def _set_loggers(values: Mapping[str, Any]) -> None:
    for name in {**_loggers(), **values}:
        logger = logging.getLogger(name)
        level, logger.disabled, logger.propagate = values.get(name, (logging.NOTSET, False, True))
        logger.setLevel(level)


def _decimal() -> tuple[int, str]:
    context = decimal.getcontext()
    return context.prec, context.rounding


def _set_decimal(values: tuple[int, str]) -> None:
    decimal.getcontext().prec, decimal.getcontext().rounding = values


def _garbage_collector() -> dict[str, Any]:
    return {
        "enabled": gc.isenabled(),
        "threshold": gc.get_threshold(),
        "callbacks": len(gc.callbacks),
    }


def _priority() -> int | None:
    return os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else None


_SETTINGS = (
    *TORCH_SETTINGS,
    Setting(
        "random state of Python", lambda: Opaque(random.getstate()), lambda it: random.setstate(it.value)
    ),
    Setting("environment variable", _environment, _set_environment, by_imports=True),
    Setting("file mode mask", _umask, os.umask),
    Setting("functions to run at exit", atexit._ncallbacks, by_imports=True),
    Setting("working directory", os.getcwd, os.chdir),
    Setting(
        "locale", lambda: locale.setlocale(locale.LC_ALL), lambda it: locale.setlocale(locale.LC_ALL, it)
    ),
    Setting(
        "sys.path", lambda: [*sys.path], lambda it: sys.path.__setitem__(slice(None), it), by_imports=True
    ),
    Setting("import hooks", lambda: len(sys.meta_path), by_imports=True),
    Setting("warnings filters", _filters, _set_filters, by_imports=True),
    Setting("root logger", _root_logger, _set_root_logger, by_imports=True),
    Setting("handler of the signal", _signals),
    Setting("logger", _loggers, _set_loggers, by_imports=True),
    Setting("hook", _hooks, _set_hooks, by_imports=True),
    Setting("function of Python", _functions, by_imports=True),
    Setting("precision and rounding of decimal", _decimal, _set_decimal),
    Setting("garbage collector:", _garbage_collector),
    Setting("tracing of memory", tracemalloc.is_tracing),
    Setting("size of a thread's stack", threading.stack_size, threading.stack_size),
    Setting("priority of the process", _priority),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, by_imports=True),
    Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    Setting("CPU affinity", _affinity, _set_affinity),
    Setting("start method of processes", lambda: multiprocessing.get_start_method(allow_none=True)),
)
