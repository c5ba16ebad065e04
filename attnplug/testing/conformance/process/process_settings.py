"""The settings of a process that a backend must leave as they are: of torch, numpy, Python and the system."""

from __future__ import annotations

import atexit
import builtins
import copyreg
import decimal
import faulthandler
import functools
import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Mapping
from typing import Any

from attnplug.testing.conformance.process.process_files import SET_BY_TORCH
from attnplug.testing.conformance.process.torch_settings import (
    TORCH_SETTINGS,
    Functions,
    Opaque,
    Setting,
    change_of,
)

resource: Any
try:
    import resource
except ImportError:  # Windows has none
    resource = None

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


def unusual_settings(slow: bool) -> None:
    """Give settings other values than those that a backend set in an earlier call, also `slow` ones.

    Random states, levels, filters and hooks are such as no backend has set, and others are those of a new process.
    """
    for setting, first in _FIRST.items():
        if setting.write is not None:
            now = setting.read()
            value = first if setting.other is None or (setting.slow and not slow) else setting.other(now)
            if now != value:
                setting.write(value)


def lasting_changes() -> list[str]:
    """The changes since this module was imported of settings that cannot be set back."""
    return [
        change_of(setting, first, setting.read())
        for setting, first in _FIRST.items()
        if setting.lasts and setting.read() != first
    ]


def _as_it_is(value: Any) -> Any:
    """Leaves to other parties what they may have set since the kit was imported."""
    return value


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in SET_BY_TORCH}


def _set_environment(values: Mapping[str, str]) -> None:
    for name in _environment().keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


# Timers, with which tests end those that take too long.
_ALARMS = {"SIGALRM", "SIGVTALRM", "SIGPROF"}
_SIGNALS = {each.name: each for each in sorted(signal.valid_signals()) if hasattr(each, "name")}


def _signals() -> dict[str, Any]:
    return {name: signal.getsignal(each) for name, each in _SIGNALS.items()}


def _set_signals(values: Mapping[str, Any]) -> None:
    for name, handler in values.items():
        is_another = handler is not None and signal.getsignal(_SIGNALS[name]) != handler
        if is_another and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNALS[name], handler)


def _first_signals(now: Mapping[str, Any]) -> dict[str, Any]:
    return {**_FIRST_HANDLERS, **{name: now[name] for name in _ALARMS & now.keys()}}


_FIRST_HANDLERS = _signals()


def _root_logger() -> dict[str, Any]:
    root = logging.getLogger()
    found = {"level": root.level, "handlers": [*root.handlers], "filters": len(root.filters)}
    return found | {"disabled below": logging.root.manager.disable}


def _set_root_logger(values: Mapping[str, Any]) -> None:
    root = logging.getLogger()
    root.setLevel(values["level"])
    root.handlers[:] = values["handlers"]
    logging.disable(values["disabled below"])


def _other_root_logger(values: Mapping[str, Any]) -> dict[str, Any]:
    # A level of no name, and no handler: basicConfig adds one only then.
    return {**values, "level": logging.WARNING + 1, "handlers": [], "disabled below": 0}


def _filters() -> Opaque:
    return Opaque([*warnings.filters])


def _set_filters(values: Opaque) -> None:
    warnings.filters[:] = values.value  # type: ignore[index]
    # Without this, warnings that the old filters hid stay hidden.
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _other_filters(values: Opaque) -> Opaque:
    # A filter that is set again moves to the front.
    return Opaque([("ignore", None, _NoWarning, None, 0), *values.value])


class _NoWarning(Warning):
    """No code gives this warning."""


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


def _functions() -> Functions:
    owners = {"builtins": builtins, "os": os, "time": time, "warnings": warnings}
    return Functions(owners | _framework(len(sys.modules)))


@functools.lru_cache(maxsize=2)
def _framework(modules: int) -> dict[str, Any]:
    """The loaded modules of the framework that backends use, with their classes; `modules` are loaded in all."""
    found: dict[str, Any] = {}
    for name, module in [*sys.modules.items()]:
        if name.startswith(("attnplug.core.", "attnplug.ops.")):
            own = [each for each in vars(module).values() if getattr(each, "__module__", "") == name]
            found[name] = module
            found |= {f"{name}.{each.__name__}": each for each in own if isinstance(each, type)}
    return found


def _hooks() -> dict[str, Any]:
    found = {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in _HOOKS}
    return found | {"trace": sys.gettrace(), "profile": sys.getprofile()}


def _other_hooks(values: Mapping[str, Any]) -> dict[str, Any]:
    # Output and traces stay where they go: tests and coverage have set them.
    names = [f"{owner.__name__}.{name}" for owner, name in _HOOKS if "hook" in name]
    return {**values, **dict.fromkeys(names, _no_hook)}


def _no_hook(*given: Any) -> None:
    """A hook that no backend has set."""


def _set_hooks(values: Mapping[str, Any]) -> None:
    for owner, name in _HOOKS:
        setattr(owner, name, values[f"{owner.__name__}.{name}"])
    # A profiler in C is no function that Python could set.
    if sys.gettrace() is not values["trace"]:
        sys.settrace(values["trace"])
    if sys.getprofile() is not values["profile"]:
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
        "frozen": gc.get_freeze_count() > 0,
    }


_THRESHOLD = gc.get_threshold()


def _first_garbage_collector(now: Mapping[str, Any]) -> dict[str, Any]:
    """That of a new process, since this module may be imported while collections are off."""
    return {**now, "enabled": True, "threshold": _THRESHOLD}


def _set_garbage_collector(values: Mapping[str, Any]) -> None:
    (gc.enable if values["enabled"] else gc.disable)()
    gc.set_threshold(*values["threshold"])


def _limits() -> dict[str, Any]:
    if resource is None:
        return {}
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _set_limits(values: Mapping[str, Any]) -> None:
    now = _limits()
    for name in [each for each, value in values.items() if now[each] != value]:
        # Only the system's administrator can raise a hard limit again.
        soft, hard = values[name][0], now[name][1]
        resource.setrlimit(getattr(resource, name), (soft, hard))


def _priority() -> int | None:
    return os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else None


def _other_random(_: Opaque) -> Opaque:
    return Opaque(random.Random(20_011).getstate())  # noqa: S311 - a state of the process


_SETTINGS = (
    *TORCH_SETTINGS,
    Setting(
        "random state of Python",
        lambda: Opaque(random.getstate()),
        lambda it: random.setstate(it.value),
        other=_other_random,
    ),
    Setting("environment variable", _environment, _set_environment, by_imports=True, other=_as_it_is),
    Setting("file mode mask", _umask, os.umask),
    Setting("functions to run at exit", atexit._ncallbacks, by_imports=True),
    Setting("working directory", os.getcwd, os.chdir, other=_as_it_is),
    Setting(
        "locale", lambda: locale.setlocale(locale.LC_ALL), lambda it: locale.setlocale(locale.LC_ALL, it)
    ),
    Setting(
        "sys.path",
        lambda: [*sys.path],
        lambda it: sys.path.__setitem__(slice(None), it),
        by_imports=True,
        other=_as_it_is,
    ),
    Setting("import hooks", lambda: len(sys.meta_path), by_imports=True),
    Setting("warnings filters", _filters, _set_filters, by_imports=True, other=_other_filters),
    Setting("root logger", _root_logger, _set_root_logger, by_imports=True, other=_other_root_logger),
    Setting("handler of the signal", _signals, _set_signals, other=_first_signals),
    Setting("logger", _loggers, _set_loggers, by_imports=True),
    Setting("hook", _hooks, _set_hooks, by_imports=True, other=_other_hooks),
    Setting("function of Python or attnplug", _functions, Functions.restore, by_imports=True),
    Setting("precision and rounding of decimal", _decimal, _set_decimal),
    Setting("garbage collector:", _garbage_collector, _set_garbage_collector, other=_first_garbage_collector),
    Setting("tracing of memory", tracemalloc.is_tracing),
    Setting("size of a thread's stack", threading.stack_size, threading.stack_size),
    Setting("priority of the process", _priority),
    Setting("limit of resources", _limits, _set_limits),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, by_imports=True),
    Setting("most digits of an integer", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval),
    Setting("timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
    Setting("fault handler", faulthandler.is_enabled, by_imports=True),
    Setting("types with a way to be pickled", lambda: len(copyreg.dispatch_table), by_imports=True),
    Setting("CPU affinity", _affinity, _set_affinity),
    Setting("start method of processes", lambda: multiprocessing.get_start_method(allow_none=True)),
)
_FIRST = read_settings()
"""The values of a process in which no backend has run yet."""
