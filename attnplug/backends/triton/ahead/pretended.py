"""A GPU that is not there: tensors lie in host memory and say that they are on it, and launches are noted instead of made.

All host code runs as on that GPU, so what is noted are the launches that it would get.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import JITFunction, driver

from attnplug.backends.triton.ahead.chips import CHIPS, Chip
from attnplug.backends.triton.ahead.compiling import target_of
from attnplug.backends.triton.ahead.forms import Form

_LOCK = threading.Lock()


@contextlib.contextmanager
def pretended(chip: Chip) -> Iterator[dict[Form, None]]:
    """Inside, torch and Triton see one GPU, a `chip`; the value grows by the form of each kernel that is launched.

    Kernels are neither compiled nor run, so outputs have no numbers. It changes torch and Triton for the whole process:
    other threads must not use them meanwhile.
    """
    # Caches of the host code, such as gpu_of's, tell devices apart by their number.
    place = list(CHIPS).index(chip.arch)
    target = target_of(chip)
    found: dict[Form, None] = {}
    functions: dict[int, Any] = {}

    def note(
        self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, *_: Any
    ) -> Any:
        found[Form.of(self, signature, constexprs, attrs, options)] = None
        functions[id(self)] = self
        idle = SimpleNamespace(function=0, packed_metadata=(), run=_nothing, launch_metadata=_nothing)
        self.device_caches[device][0][key] = idle
        return idle

    properties = {"multiprocessor_count": chip.multiprocessors, "max_shared_mem": chip.shared_memory}
    stand_in: Any = SimpleNamespace(
        get_current_device=lambda: place,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cuda", place),
        utils=SimpleNamespace(get_device_properties=lambda index: properties),
    )
    of_torch = {
        "current_device": lambda: place,
        "get_device_capability": lambda device=None: chip.device.capability,
        "get_device_name": lambda device=None: chip.arch,
        "synchronize": _nothing,
        "is_current_stream_capturing": lambda: False,
        "device_of": lambda tensor: contextlib.nullcontext(),
    }
    with _LOCK, contextlib.ExitStack() as patches:
        before: Any = getattr(driver, "_active", None)
        driver.set_active(stand_in)
        patches.callback(driver.set_active, before)
        patches.callback(_forget, functions, place)
        patches.enter_context(mock.patch.object(JITFunction, "_do_compile", note))
        for name, value in of_torch.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, value))
        hip = None if chip.is_nvidia else "pretended"
        patches.enter_context(mock.patch.object(torch.version, "hip", hip))
        patches.enter_context(_OnHost(place))
        yield found


def _nothing(*_: Any, **__: Any) -> None:
    """No launch."""


def _forget(functions: Mapping[int, Any], place: int) -> None:
    """Leave no kernel that cannot be launched to the real device of the same number."""
    for function in functions.values():
        function.device_caches.pop(place, None)


class PretendedTensor(torch.Tensor):
    """A tensor of host memory that says it is on the GPU."""

    _place = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The pretended GPU."""
        return torch.device("cuda", PretendedTensor._place)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    def get_device(self) -> int:
        """The number of the pretended GPU."""
        return PretendedTensor._place


class _OnHost(TorchFunctionMode):
    """Makes tensors for the GPU in host memory, as PretendedTensor."""

    def __init__(self, place: int) -> None:
        super().__init__()
        PretendedTensor._place = place

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` with the CPU in place of the GPU, and mark its result by the device that was asked for."""
        named = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        asked = named.get("device")
        if func in _MOVES:
            asked = next((device for each in args[1:] if (device := _device(each))), asked)
            args = (args[0], *("cpu" if _device(each) else each for each in args[1:]))
        asked = torch.device("cpu") if func is torch.Tensor.cpu else _device(asked)
        if func is torch.Tensor.cuda:
            asked, func, args, named = torch.device("cuda"), torch.Tensor.to, (args[0], "cpu"), {}
        if func is torch.Tensor.pin_memory:
            return args[0]
        if "device" in named:
            named["device"] = "cpu"
        # The projections of latents are the only products of the host code, and take seconds on a CPU.
        if func is torch.bmm:
            left, right = args
            return named["out"] if "out" in named else left.new_empty(*left.shape[:2], right.shape[2])
        idle = bool(args) and isinstance(args[0], PretendedTensor) and _has_numbers(args[0])
        if func in _WRITES and idle:
            # The expanded latents of 131,072 tokens have 6 GB.
            return args[0] if func is torch.Tensor.copy_ else None
        if func is torch.Tensor.contiguous and idle and not args[0].is_contiguous():
            return args[0].new_empty(args[0].shape)
        dtype = named.get("dtype")
        if func is torch.zeros and dtype is not None and dtype.is_floating_point:
            # No kernel reads the numbers. Memory that is not written takes no room; states of 256 requests have 20 GB.
            func = torch.empty
        result = func(*args, **named)
        if asked is None or not isinstance(result, torch.Tensor):
            return result
        if asked.type == "cuda" and func in _MOVES and result.data_ptr() == args[0].data_ptr():
            # Memory of numpy may begin anywhere, and on a GPU each tensor of its own begins at whole 512 bytes. Torch's
            # begins at 64; the weights of all layers are one tensor here, which is not written.
            result = result if _has_numbers(result) and not result.data_ptr() & 63 else result.clone()
        return result.as_subclass(PretendedTensor if asked.type == "cuda" else torch.Tensor)


_MOVES = {torch.Tensor.to, torch.Tensor.new_empty, torch.Tensor.new_zeros}
_WRITES = {torch.Tensor.copy_, torch.Tensor.__setitem__}


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Whether only kernels read its elements; host code reads those of integers."""
    # Words of 16 bytes are complex.
    return tensor.is_floating_point() or tensor.is_complex()


def _device(value: object) -> torch.device | None:
    """The device that an argument names; None for another argument."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, torch.Tensor):
        return None
    return torch.device(value) if isinstance(value, str) else None
