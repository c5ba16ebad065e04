"""The settings of torch and numpy that a backend must leave as they are.

One setting of a process, and its value before and after a backend ran.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch._tensor_str import PRINT_OPTS

_LONGEST = 60


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One setting of the process.

    Args:
        name: for messages.
        read: its value, which can be compared; a mapping for several values by name.
        write: sets a value that `read` gave; None if it cannot be set back.
        by_imports: whether a library may change it when it is imported.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None
    by_imports: bool = False


def change_of(setting: Setting, before: Any, after: Any) -> str:
    """What changed, such as "default dtype: torch.float32 became torch.float64"."""
    if isinstance(before, Opaque):
        return setting.name
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


def _functions() -> dict[str, int]:
    """The identities of torch's public functions, which a backend must not replace."""
    owners = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor}
    return {
        f"{owner}.{name}": id(value)
        for owner, module in owners.items()
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_")
    }


def _deterministic() -> Any:
    # A module whose attributes are properties, which type checkers do not know.
    return torch.utils.deterministic


def _current() -> tuple[int, int]:
    """The current GPU and the address of its stream; zeros without CUDA."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


TORCH_SETTINGS = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("default device", torch.get_default_device, _set_device),
    Setting("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    Setting("inference mode", torch.is_inference_mode_enabled),
    Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Setting("autocast", _autocast, _set_autocast),
    Setting("number of torch's modes", _modes),
    Setting("threads of torch", torch.get_num_threads, torch.set_num_threads),
    Setting("interop threads of torch", torch.get_num_interop_threads),
    Setting(
        "float32 matmul precision",
        lambda: _or_error(torch.get_float32_matmul_precision),
        torch.set_float32_matmul_precision,
    ),
    Setting("torch.backends", _backend_flags, _set_backend_flags),
    Setting("mkldnn", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
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
    ),
    Setting("repeated warnings of torch", torch.is_warn_always_enabled, torch.set_warn_always),
    Setting(
        "sharing strategy of torch",
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
    ),
    Setting("current GPU and stream", _current),
    Setting("flush of denormal numbers", _flushes_denormals, torch.set_flush_denormal),
    Setting("random state of torch", _torch_random, _set_torch_random),
    Setting("random state of numpy", _numpy_random, _set_numpy_random),
    Setting("floating-point errors of numpy", np.geterr, lambda values: np.seterr(**values)),
    Setting("print options of torch", lambda: repr(PRINT_OPTS), by_imports=True),
    Setting(
        "print options of numpy", np.get_printoptions, lambda it: np.set_printoptions(**it), by_imports=True
    ),
    Setting("public functions of torch:", _functions, by_imports=True),
)
