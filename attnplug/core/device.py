"""The device a layer runs on, as a value: no device is touched."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from attnplug.core.device_names import arch_capability, find_gpu, near_gpus, same_gpu_name
from attnplug.core.errors import SpecError
from attnplug.core.torch_build import may_see_gpus

_FORMS = "such as 'cpu', 'H100', 'sm90', 'cuda:9.0', 'rocm:9.4' or 'current'"


class ComputeCapability(NamedTuple):
    """A GPU's compute capability, as `supports_compute_capability` gets it; equal to the plain tuple."""

    major: int
    minor: int

    def to_int(self) -> int:
        """The number in names such as sm90."""
        return 10 * self.major + self.minor


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """A kind of device: its type, compute capability and name.

    Making one touches no hardware, so a laptop can ask about `Device("cuda", (9, 0))`.

    Args:
        type: "cpu", "cuda", "rocm", "xpu", "mps", ...
        capability: compute capability `(major, minor)`, if the type has one.
        name: the marketing name, if known ("NVIDIA H200").
    """

    type: str
    capability: tuple[int, int] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.type, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", self.type):
            raise SpecError("device.type", self.type, f"must be a device type in lower case, {_FORMS}")
        if self.name is not None and not isinstance(self.name, str):
            raise SpecError("device.name", self.name, "must be text, or None if it is not known")
        if self.capability is None:
            return
        pair = tuple(self.capability) if isinstance(self.capability, Sequence) else ()
        if len(pair) != 2 or not all(type(part) is int and part >= 0 for part in pair):
            raise SpecError("device.capability", self.capability, "must be (major, minor), such as (9, 0)")
        # JSON gives a list. A tuple can be hashed, which the cache of decisions needs.
        object.__setattr__(self, "capability", pair)

    @classmethod
    def current(cls, index: int | None = None) -> Device:
        """The device torch would run on now, or GPU number `index`: the current GPU, else the CPU.

        Raises:
            SpecError: a GPU that this machine does not have.
        """
        ask = _gpu_index()
        if index is None:
            return _probe(None if ask is None else ask())
        import torch

        count = 0 if ask is None else torch.cuda.device_count()
        if not 0 <= index < count:
            limit = f"must be below {count}, the number of GPUs of this machine"
            remedy = None if count else "name the GPU of another machine, such as 'H100' or 'sm90'"
            raise SpecError("device.index", index, limit if count else "needs a GPU here", remedy)
        return _probe(index)

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read "cpu", "cuda", "cuda:9.0", "rocm:9.4", "sm90" (also "sm_90a"), "gfx942", "H100", or "current".

        The names of GPUs are those of `gpu_models`; case, blanks and dashes do not matter. Only "current"
        asks torch. SpecError for any other text, with the names that resemble it.
        """
        if not isinstance(text, str):
            raise SpecError("device", text, f"must be text {_FORMS}")
        word = text.strip().lower()
        if word == "current":
            return cls.current()
        if (capability := arch_capability(word)) is not None:
            return cls("rocm" if word.startswith("gfx") else "cuda", capability)
        if match := re.fullmatch(r"(cuda|rocm|xpu):(\d{1,4})\.(\d{1,4})", word):
            return cls(match[1], (int(match[2]), int(match[3])))
        if word in ("cpu", "cuda", "rocm", "mps", "xpu", "hpu", "tpu", "npu"):
            return cls(word)
        if (gpu := find_gpu(word)) is not None:
            return cls(gpu.type, gpu.capability, gpu.name)
        near = near_gpus(word)
        meant = f"near names are {', '.join(near)}; " if near else ""
        raise SpecError("device", text, "is unknown", f"{meant}name a device {_FORMS}")

    def matches(self, other: Device) -> bool:
        """Whether both can be the same device: a capability or name that is None matches any.

        "H100" matches the longer name that torch gives, such as "NVIDIA H100 80GB HBM3".
        """
        return (
            self.type == other.type
            and (self.capability is None or other.capability in (None, self.capability))
            and (self.name is None or other.name is None or same_gpu_name(self.name, other.name))
        )

    def __str__(self) -> str:
        if self.capability is None:
            return self.type
        major, minor = self.capability
        return f"sm{major}{minor}" if self.type == "cuda" else f"{self.type}:{major}.{minor}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON object: `type`, `capability`, `name`."""
        capability = None if self.capability is None else list(self.capability)
        return {"type": self.type, "capability": capability, "name": self.name}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Device:
        """The device that `to_dict` wrote. SpecError for a missing type or an unknown field."""
        fields = [field.name for field in dataclasses.fields(cls)]
        for name in data:
            if name not in fields:
                raise SpecError(
                    name, data[name], f"is not a field of a Device; fields are {', '.join(fields)}"
                )
        if "type" not in data:
            raise SpecError("device.type", None, "is required")
        return cls(**data)


@functools.cache
def _gpu_index() -> Callable[[], int] | None:
    # Cached: the answer does not change, and asking costs more than a selection.
    if not may_see_gpus():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    # With one GPU its number is always 0, so torch is not asked at each selection.
    return torch.cuda.current_device if torch.cuda.device_count() > 1 else lambda: 0


@functools.cache
def _probe(index: int | None) -> Device:
    if index is None and not may_see_gpus():
        return Device("cpu")
    import torch

    if index is not None:
        # torch.cuda also serves ROCm GPUs; torch.version.hip tells the two apart.
        kind = "rocm" if torch.version.hip else "cuda"
        capability = torch.cuda.get_device_capability(index)
        return Device(kind, capability, torch.cuda.get_device_name(index))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return Device("xpu", None, torch.xpu.get_device_name())
    return Device("cpu")
