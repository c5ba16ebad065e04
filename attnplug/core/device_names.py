"""Names of GPUs, such as "H100" or "RTX 4090", with their architecture and memory. Touches no device."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

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

    asked, names = (
        "".join(_words(text))[:_LONGEST],
        {_compact(model.name): model.name for model in gpu_models()},
    )
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
