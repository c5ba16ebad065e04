"""The device a layer runs on, as a value: no device is touched.

Names of GPUs, such as "H100" or "RTX 4090", with their architecture and memory. Whether torch can see a GPU is found
without importing it: the import takes more than a second.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnplug.core.errors import SpecError

_NVIDIA = {
    "sm121": "GB10: 128",
    "sm120": (
        "RTX PRO 6000: 96, RTX PRO 5000: 48/72, RTX PRO 4500: 32, RTX PRO 4000: 24, RTX PRO 2000: "
        "16, RTX 5090: 32, RTX 5090 D: 24/32, RTX 5080: 16, RTX 5070 Ti: 16, RTX 5070: 12, RTX "
        "5060 Ti: 8/16, RTX 5060: 8, RTX 5050: 8"
    ),
    "sm110": "Thor: 128",
    "sm103": "B300: 288, GB300: 288",
    "sm100": "B100: 192, B200: 180, GB200: 186",
    "sm90": "H100: 80/94, H200: 141, H800: 80, H20: 96/141, GH200: 96/144",
    "sm89": (
        "L4: 24, L20: 48, L40: 48, L40S: 48, RTX 6000 Ada: 48, RTX 5880 Ada: 48, RTX 5000 Ada: "
        "32, RTX 4500 Ada: 24, RTX 4000 Ada: 20, RTX 2000 Ada: 16, RTX 4090: 24, RTX 4090 D: 24, "
        "RTX 4080 Super: 16, RTX 4080: 16, RTX 4070 Ti Super: 16, RTX 4070 Ti: 12, RTX 4070 "
        "Super: 12, RTX 4070: 12, RTX 4060 Ti: 8/16, RTX 4060: 8"
    ),
    "sm87": "Orin: 32/64",
    "sm86": (
        "A40: 48, A10: 24, A10G: 24, A16: 16, A2: 16, RTX A6000: 48, RTX A5500: 24, RTX A5000: "
        "24, RTX A4500: 20, RTX A4000: 16, RTX A2000: 6/12, RTX 3090 Ti: 24, RTX 3090: 24, RTX "
        "3080 Ti: 12, RTX 3080: 10/12, RTX 3070 Ti: 8, RTX 3070: 8, RTX 3060 Ti: 8, RTX 3060: "
        "8/12, RTX 3050: 6/8"
    ),
    "sm80": "A100: 40/80, A800: 40/80, A30: 24",
    "sm75": (
        "T4: 16, Quadro RTX 8000: 48, Quadro RTX 6000: 24, Quadro RTX 5000: 16, Quadro RTX 4000: "
        "8, TITAN RTX: 24, RTX 2080 Ti: 11, RTX 2080 Super: 8, RTX 2080: 8, RTX 2070 Super: 8, "
        "RTX 2070: 8, RTX 2060: 6/12"
    ),
    "sm70": "V100: 16/32, V100S: 32, TITAN V: 12",
    "sm61": "P40: 24, P4: 8, GTX 1080 Ti: 11, GTX 1080: 8",
    "sm60": "P100: 12/16",
}
"""NVIDIA's GPUs by compute capability: the memory of each desktop or server card in GB, with / between sizes."""

_AMD = {
    "gfx1201": "RX 9070 XT: 16, RX 9070: 16, AI PRO R9700: 32",
    "gfx1100": "RX 7900 XTX: 24, RX 7900 XT: 20, PRO W7900: 48",
    "gfx950": "MI355X: 288, MI350X: 288",
    "gfx942": "MI325X: 256, MI300X: 192, MI300A: 128, MI308X: 192",
    "gfx90a": "MI250X: 128, MI250: 128, MI210: 64",
    "gfx908": "MI100: 32",
}
"""AMD's GPUs that ROCm supports, by LLVM target."""

_MAKER = {"nvidia", "amd", "instinct", "geforce", "radeon", "tesla", "jetson", "agx", "gpu"}
_FORM = {"pcie", "nvl", "oam", "mig", "laptop", "sff", "generation", "blackwell", "server", "workstation"}
_FORM |= {"edition", "max", "q"}
# Memory ("80GB", "HBM3e", "3e"), sockets ("SXM5") and MIG slices ("1g.10gb") follow a name.
_SUFFIX = re.compile(r"\d+gi?b?|\d*g?hbm\d*e?|3e|sxm\d?|\d+g\.\d+gb(\+.*)?")
# The same in names without blanks, such as "h100pcie".
_GLUED = re.compile(r"^(nvidia|amd)(geforce|instinct|radeon)?|(sxm\d?|pcie|nvl|oam)$")
_LONGEST = 40


@dataclasses.dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU that is sold under a name.

    Args:
        name: the maker's name without the brand: "H100", "RTX 4090", "MI300X".
        vendor: "NVIDIA" or "AMD".
        arch: the compiler's name of the architecture: "sm90", "gfx942".
        capability: `(major, minor)`, as torch gives it: (9, 0) for an H100, (9, 4) for an MI300X.
        memory_gb: the sizes of memory that it is sold with, in the maker's GB.
    """

    name: str
    vendor: str
    arch: str
    capability: tuple[int, int]
    memory_gb: tuple[int, ...]

    @property
    def type(self) -> str:
        """The device type: "cuda" or "rocm"."""
        return "cuda" if self.arch.startswith("sm") else "rocm"


@functools.cache
def gpu_models() -> tuple[GpuModel, ...]:
    """Every GPU that attnplug knows by name: NVIDIA's, then AMD's, newest architecture first."""
    return (*_listed("NVIDIA", _NVIDIA), *_listed("AMD", _AMD))


def _listed(vendor: str, table: Mapping[str, str]) -> Iterator[GpuModel]:
    for arch, entries in table.items():
        capability = arch_capability(arch) or (0, 0)
        for entry in entries.split(", "):
            name, _, sizes = entry.partition(": ")
            yield GpuModel(name, vendor, arch, capability, tuple(map(int, sizes.split("/"))))


def find_gpu(text: str) -> GpuModel | None:
    """The GPU that `text` names; None for an unknown name.

    Case, blanks and dashes do not matter. The names that torch gives are read too, such as
    "NVIDIA H100 80GB HBM3" or "NVIDIA A100-SXM4-40GB".
    """
    by_key, written = _by_key(), _compact(text)
    return by_key.get(written) or by_key.get("".join(_words(text))) or by_key.get(_GLUED.sub("", written))


def near_gpus(text: str, most: int = 5) -> tuple[str, ...]:
    """Names of known GPUs that resemble `text`, nearest first; empty if none does."""
    import difflib  # only an error needs it

    # The comparison takes quadratic time, so long texts are cut.
    asked = "".join(_words(text))[:_LONGEST]
    names = {_compact(model.name): model.name for model in gpu_models()}
    close = difflib.get_close_matches(asked, names, n=most, cutoff=0.6) if asked else []
    # "6000" resembles no whole name, but it is a part of some.
    parts = [key for key in names if len(asked) > 1 and asked in key]
    return tuple(names[key] for key in dict.fromkeys([*close, *parts]))[:most]


def same_gpu_name(one: str, other: str) -> bool:
    """Whether two names can be of the same GPU: "H100" and "NVIDIA H100 80GB HBM3" can."""
    if one == other:
        return True
    known = find_gpu(one)
    return known is not None and known == find_gpu(other)


def arch_capability(arch: str) -> tuple[int, int] | None:
    """`(major, minor)` of "sm90", "sm_90a" or "gfx942"; None for other text."""
    # The last digit is the minor version, so sm120 is (12, 0). The letter of sm_90a is not kept.
    if match := re.fullmatch(r"sm_?(\d{1,2})(\d)[a-z]?", arch):
        return int(match[1]), int(match[2])
    # LLVM writes the minor version and the stepping as one digit each, the stepping in hexadecimal.
    if match := re.fullmatch(r"gfx(\d{1,2})(\d)[0-9a-f]", arch):
        return int(match[1]), int(match[2])
    return None


@functools.cache
def _by_key() -> dict[str, GpuModel]:
    models = {_compact(model.name): model for model in gpu_models()}
    # The A6000 and the R9700 are often named without their series, and the GB10 by its computer.
    short = {key.removeprefix("rtx"): model for key, model in models.items() if key.startswith("rtxa")}
    return {
        **short,
        "dgxspark": models["gb10"],
        "r9700": models["aipror9700"],
        "w7900": models["prow7900"],
        **models,
    }


def _compact(text: str) -> str:
    return re.sub(r"[\s_-]", "", text.lower())


def _words(text: str) -> Iterator[str]:
    """The words of a name without its brand, form and memory."""
    for word in re.split(r"[\s_-]+", text.lower().partition("/")[0]):
        if word not in _MAKER and word not in _FORM and not _SUFFIX.fullmatch(word):
            yield word


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
        """Read "cpu", "cuda", "cuda:9.0", "9.0", "rocm:9.4", "sm90" (also "sm_90a"), "gfx942", "H100", or "current".

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
        # A compute capability alone is one of NVIDIA's, as in their tables.
        if match := re.fullmatch(r"(?:(cuda|rocm|xpu):)?(\d{1,4})\.(\d{1,4})", word):
            return cls(match[1] or "cuda", (int(match[2]), int(match[3])))
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
                limit = f"is not a field of a Device; fields are {', '.join(fields)}"
                raise SpecError(name, data[name], limit)
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


_AMD_DRIVER = Path("/dev/kfd")
"""The compute interface of the kernel's driver for AMD GPUs."""


def may_see_gpus() -> bool:
    """False only if torch would certainly find no GPU: it is built without one, or the driver is absent."""
    # An imported torch answers itself, and at once.
    if "torch" in sys.modules:
        return True
    build = _build()
    if build is None or build.get("xpu") is not None or not {"cuda", "hip"} <= build.keys():
        return True
    # Only Linux has the drivers under these names; elsewhere torch must be asked.
    if build["hip"] is not None:
        return sys.platform != "linux" or _AMD_DRIVER.exists()
    return build["cuda"] is not None and (sys.platform != "linux" or _loads("libcuda.so.1"))


def _build() -> dict[str, Any] | None:
    """The variables of `torch/version.py`, which torch's build writes; None if the file is missing."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    # Run as a file, because an import of `torch.version` imports all of torch.
    try:
        return runpy.run_path(str(path))
    except Exception:  # noqa: BLE001  (the file may be of any torch)
        return None


def _loads(library: str) -> bool:
    """Whether the dynamic linker finds `library`."""
    # torch asks the same linker for it.
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
