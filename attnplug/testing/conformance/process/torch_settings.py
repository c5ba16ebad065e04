"""The settings of torch and numpy that a backend must leave as they are.

One setting of a process, and its value before and after a backend ran.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, library
from torch._tensor_str import PRINT_OPTS
from torch.utils._config_module import ConfigModule

_LONGEST = 60


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One setting of the process.

    Args:
        name: for messages.
        read: its value, which can be compared; a mapping for several values by name.
        write: sets a value that `read` gave; None if it cannot be set back.
        by_imports: whether a library may change it when it is imported.
        other: gives another value than one that `read` gave, under which backends run as well: what a backend sets
            in each call is then a change, whatever ran before. Without it, that is the value of a new process.
        slow: whether kernels take longer under the other value, or are compiled again.
        lasts: whether it cannot be set back and only a backend changes it, so that a change before a check counts.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None
    by_imports: bool = False
    other: Callable[[Any], Any] | None = None
    slow: bool = False
    lasts: bool = False


def change_of(setting: Setting, before: Any, after: Any) -> str:
    """What changed, such as "default dtype: torch.float32 became torch.float64"."""
    if isinstance(before, Opaque):
        return setting.name
    if isinstance(before, Functions):
        return f"{setting.name} {', '.join(before.replaced(after))}"
    if not isinstance(before, Mapping):
        return f"{setting.name}: {_short(before)} became {_short(after)}"
    names = [name for name in before | after if before.get(name, _UNSET) != after.get(name, _UNSET)]
    return "; ".join(
        f"{setting.name} {name}: {_short(before.get(name, _UNSET))} became {_short(after.get(name, _UNSET))}"
        for name in names
    )


class Opaque:
    """A long value, which is compared and not shown."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]


class Functions:
    """The functions and classes of some modules or classes, by the name of their owner; new names are no change."""

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._owners = owners
        self._found = {name: _names(owner) for name, owner in owners.items()}

    def replaced(self, later: Functions) -> list[str]:
        """The names with another value later."""
        pairs = ((owner, found, later._found.get(owner, found)) for owner, found in self._found.items())
        return [
            f"{owner}.{name}"
            for owner, found, other in pairs
            if found != other
            for name, value in found.items()
            if other.get(name, value) is not value and callable(value)
        ]

    def restore(self) -> None:
        """Give replaced names their values again."""
        for full in self.replaced(Functions(self._owners)):
            title, _, name = full.rpartition(".")
            owner, value = self._owners[title], self._found[title][name]
            setattr(owner, name, value)
            if isinstance(owner, type) and any(vars(base).get(name) is value for base in owner.__mro__[1:]):
                delattr(owner, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Functions) and not self.replaced(other)

    __hash__ = None  # type: ignore[assignment]


def _names(owner: Any) -> dict[str, Any]:
    """The names of a module or a class; of torch.Tensor, with those that it inherits."""
    found: dict[str, Any] = {}
    # Classes in Python hide few functions of their bases, and there are many such classes.
    bases = reversed(owner.__mro__) if owner is torch.Tensor else (owner,)
    for each in bases:
        found |= vars(each)
    return found


class _Unset:
    """No value."""

    def __repr__(self) -> str:
        return "unset"


_UNSET = _Unset()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _set_device(device: torch.device) -> None:
    # The device "cpu" would be set as a mode, which is not what the process had.
    torch.set_default_device(None if device.type == "cpu" else device)


def _torch_random() -> Opaque:
    state = torch.get_rng_state().numpy().tobytes()
    # Read before CUDA is initialised too: a backend that initialises it changes no state.
    if torch.cuda.is_available():
        state += torch.cuda.get_rng_state().cpu().numpy().tobytes()
    return Opaque(state)


def _set_torch_random(state: Opaque) -> None:
    size = torch.get_rng_state().numel()
    cpu, device = state.value[:size], state.value[size:]
    torch.set_rng_state(torch.frombuffer(bytearray(cpu), dtype=torch.uint8))
    if device:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(device), dtype=torch.uint8))


def _numpy_random() -> Opaque:
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - the state of the process
    return Opaque((name, keys.tobytes(), *rest))  # type: ignore[union-attr]


def _set_numpy_random(state: Opaque) -> None:
    name, keys, *rest = state.value
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))  # noqa: NPY002


def _flushes_denormals() -> bool:
    # torch sets this state and has no function to read it.
    return float(torch.full((1,), 1e-40, dtype=torch.float32, device="cpu").mul(0.5)) == 0.0


def _backend_flags() -> dict[str, Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    reads: dict[str, Callable[[], Any]] = {
        "cuda.matmul.allow_tf32": lambda: cuda.matmul.allow_tf32,
        "cuda.matmul.allow_fp16_reduced_precision_reduction": (
            lambda: cuda.matmul.allow_fp16_reduced_precision_reduction
        ),
        "cuda.matmul.allow_bf16_reduced_precision_reduction": (
            lambda: cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
        "cudnn.enabled": lambda: cudnn.enabled,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        **{f"cuda.enable_{name}": getattr(cuda, f"{name}_enabled") for name in _SDP},
    }
    return {name: _or_error(read) for name, read in reads.items()}


_SDP = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


def _or_error(read: Callable[[], Any]) -> Any:
    # torch raises where a precision was set by its new functions and is read by the old ones.
    try:
        return read()
    except RuntimeError as error:
        return type(error).__name__


def _set_backend_flags(values: Mapping[str, Any]) -> None:
    now = _backend_flags()
    for name, value in values.items():
        if now[name] == value or not isinstance(value, bool):
            continue
        *path, last = name.split(".")
        owner: Any = torch.backends
        for part in path:
            owner = getattr(owner, part)
        if last.startswith("enable_"):
            getattr(owner, last)(value)
        else:
            setattr(owner, last, value)


def _autocast() -> dict[str, Any]:
    kinds = ("cpu", "cuda")
    found: dict[str, Any] = {f"enabled for {kind}": torch.is_autocast_enabled(kind) for kind in kinds}
    return found | {"cache": torch.is_autocast_cache_enabled()}


def _set_autocast(values: Mapping[str, Any]) -> None:
    for kind in ("cpu", "cuda"):
        torch.set_autocast_enabled(kind, values[f"enabled for {kind}"])
    torch.set_autocast_cache_enabled(values["cache"])


def _modes() -> tuple[int, int]:
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    functions: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return len(functions), len(_get_current_dispatch_mode_stack())


def _functions() -> Functions:
    """The functions of torch and numpy, which a backend must not replace."""
    owners: dict[str, Any] = {"torch": torch, "torch.nn.functional": torch.nn.functional}
    return Functions(owners | {"torch.Tensor": torch.Tensor, "torch.nn.Module": torch.nn.Module, "numpy": np})


_OF_TORCH = ("aten", "prim", "prims", "quantized", "mkldnn", "c10d", "_c10d_functional", "inductor")


def _operators() -> dict[str, str]:
    """Where Python code outside of torch has registered kernels for operators of torch."""
    return _registered(len(library._impls), len(library._defs))


@functools.lru_cache(maxsize=4)
def _registered(kernels: int, operators: int) -> dict[str, str]:
    # A read of all names takes milliseconds, and a registration changes their numbers.
    places = {}
    for name in library._impls | library._defs:
        space, _, rest = name.replace("::", "/").partition("/")
        if space in _OF_TORCH and name not in _BY_TORCH:
            operator, _, key = rest.partition("/")
            lines = torch._C._dispatch_dump(f"{space}::{operator}").splitlines()
            # The dump marks keys that stand for several others; a name without a key is the operator's own.
            starts = (f"{key}: ", f"{key}[alias]: ") if key else "debug: "
            place = next((line for line in lines if line.startswith(starts)), "").partition(" at ")[2]
            # Parts of torch that are imported later register kernels too.
            if not place.startswith(_TORCH):
                places[name] = place.partition(" ")[0]
    return places


_TORCH = str(Path(torch.__file__).parent)
_BY_TORCH = frozenset(library._impls | library._defs)


def _configs() -> dict[str, Any]:
    """The values of torch's modules of settings that are not their defaults, such as torch._dynamo.config.verbose."""
    return {
        f"{module.__name__}.{name}": value
        for module in _config_modules(len(sys.modules))
        for name, value in module.get_config_copy().items()
        if value != module._config[name].default
    }


@functools.lru_cache(maxsize=4)
def _config_modules(modules: int) -> list[Any]:
    """Those of the `modules` that are loaded."""
    return [each for each in [*sys.modules.values()] if isinstance(each, ConfigModule)]


def _set_configs(values: Mapping[str, Any]) -> None:
    for name in _configs().keys() | values.keys():
        for module in _config_modules(len(sys.modules)):
            own = name.removeprefix(f"{module.__name__}.")
            if own in module._config:
                setattr(module, own, values.get(name, module._config[own].default))


def _deterministic() -> Any:
    # A module whose attributes are properties, which type checkers do not know.
    return torch.utils.deterministic


def _current() -> tuple[int, int]:
    """The current GPU and the address of its stream; zeros without CUDA."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


def _other_random(state: Opaque) -> Opaque:
    other = torch.Generator().manual_seed(20_011).get_state().numpy().tobytes()
    return Opaque(other + state.value[len(other) :])


def _other_numpy_random(_: Opaque) -> Opaque:
    name, keys, *rest = np.random.RandomState(20_011).get_state(legacy=True)
    return Opaque((name, keys.tobytes(), *rest))  # type: ignore[union-attr]


def _negation(value: bool) -> bool:
    return not value


TORCH_SETTINGS = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("default device", torch.get_default_device, _set_device),
    Setting("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled, other=_negation, slow=True),
    Setting("inference mode", torch.is_inference_mode_enabled),
    Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Setting("autocast", _autocast, _set_autocast),
    Setting("number of torch's modes", _modes),
    Setting(
        "threads of torch",
        torch.get_num_threads,
        torch.set_num_threads,
        other=lambda count: count + 1,
        slow=True,
    ),
    Setting("interop threads of torch", torch.get_num_interop_threads),
    Setting(
        "float32 matmul precision",
        lambda: _or_error(torch.get_float32_matmul_precision),
        torch.set_float32_matmul_precision,
    ),
    Setting("torch.backends", _backend_flags, _set_backend_flags),
    Setting("mkldnn", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, other=_negation, slow=True),
    Setting(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,
        lambda mode: torch._C._set_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
    Setting(
        "fill of uninitialised memory",
        lambda: _deterministic().fill_uninitialized_memory,
        lambda fills: setattr(_deterministic(), "fill_uninitialized_memory", fills),
    ),
    Setting(
        "fast path of torch's transformers",
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
        other=_negation,
    ),
    Setting("repeated warnings of torch", torch.is_warn_always_enabled, torch.set_warn_always),
    Setting(
        "sharing strategy of torch",
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
    ),
    Setting("current GPU and stream", _current),
    Setting("flush of denormal numbers", _flushes_denormals, torch.set_flush_denormal, other=_negation),
    Setting("random state of torch", _torch_random, _set_torch_random, other=_other_random),
    Setting("random state of numpy", _numpy_random, _set_numpy_random, other=_other_numpy_random),
    Setting("floating-point errors of numpy", np.geterr, lambda values: np.seterr(**values)),
    Setting(
        "print options of torch",
        lambda: dict(vars(PRINT_OPTS)),
        lambda values: vars(PRINT_OPTS).update(values),
        by_imports=True,
    ),
    Setting(
        "print options of numpy", np.get_printoptions, lambda it: np.set_printoptions(**it), by_imports=True
    ),
    Setting("function of torch or numpy", _functions, Functions.restore, by_imports=True),
    Setting("kernels of operators of torch:", _operators, lasts=True),
    Setting("configuration", _configs, _set_configs, by_imports=True),
    Setting("process group of torch", lambda: distributed.is_available() and distributed.is_initialized()),
)
