"""The kernel libraries' versions, GPUs and features in one table, which backends, `doctor` and docs read.

Torch-free, and it imports no kernel library.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LibraryRule:
    """One row: the use of some versions of a kernel library on some GPUs.

    Args:
        backend: the attnplug backend that calls it.
        library: the common name, such as "FlashAttention 2".
        distribution: the name to install.
        versions: a PEP 440 specifier; it covers prereleases only if it names one.
        module: the module whose functions are called.
        capabilities: the compute capabilities as a specifier, such as ">=9.0,<10".
        serves: whether the backend uses these versions there; False marks a refusal.
        what: the features there, or the cause of the refusal.
        compiles: the parts compiled at first use; None without.
        remedy: what a user can do about a refusal.
    """

    backend: str
    library: str
    distribution: str
    versions: str
    module: str
    capabilities: str
    serves: bool
    what: str
    compiles: str | None = None
    remedy: str | None = None

    def covers_version(self, version: str) -> bool:
        """Whether an installed `version` is one of those meant."""
        versions = _specifier(self.versions)
        return versions.contains(version, prereleases=bool(versions.prereleases))

    def covers_capability(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of compute capability `(major, minor)` is one of those meant."""
        return _specifier(self.capabilities).contains("{}.{}".format(*capability))


_FA2 = {
    "backend": "FLASH_ATTN_2",
    "library": "FlashAttention 2",
    "distribution": "flash-attn",
    "module": "flash_attn_2_cuda",
}
_FA3 = {
    "backend": "FLASH_ATTN_3",
    "library": "FlashAttention 3",
    "distribution": "flash-attn-3",
    "module": "flash_attn_3._C",
}
_FA4 = {
    "backend": "FLASH_ATTN_4",
    "library": "FlashAttention 4",
    "distribution": "flash-attn-4",
    "module": "flash_attn.cute.interface",
}
_FI = {
    "backend": "FLASHINFER",
    "library": "FlashInfer",
    "distribution": "flashinfer-python",
    "module": "flashinfer",
}
_MLA = {
    "backend": "FLASH_MLA",
    "library": "FlashMLA",
    "distribution": "sgl-flash-mla",
    "module": "flash_mla",
}

LIBRARY_RULES: tuple[LibraryRule, ...] = (
    LibraryRule(
        **_FA2,
        versions=">=2.7,<3",
        capabilities=">=8.0",
        serves=True,
        what="pages of 256 tokens and multiples; windows, soft cap, ALiBi; head sizes to 256",
    ),
    LibraryRule(
        **_FA2,
        versions="<2.7",
        capabilities=">=8.0",
        serves=False,
        what="its kernels take other arguments",
        remedy="pip install 'flash-attn>=2.7,<3'",
    ),
    LibraryRule(
        **_FA2,
        versions=">=3",
        capabilities=">=8.0",
        serves=False,
        what="not known: later generations are distributions of their own",
        remedy="pip install 'flash-attn>=2.7,<3'",
    ),
    LibraryRule(
        **_FA3,
        versions=">=3.0.0b1,<4",
        capabilities=">=9.0,<10",
        serves=True,
        what="pages of 16, 32 or 64 tokens; windows, soft cap; head sizes to 256, and 192 with values of 128",
    ),
    LibraryRule(
        **_FA4,
        versions=">=4.0.0b26,<5",
        capabilities=">=9.0,<12",
        serves=True,
        what="pages of multiples of 16 tokens, except the size of its key tile; windows, soft cap, sinks; head sizes to "
        "256 on 9.x, and to 128 and 256 on 10.x and 11.x; 192 with values of 128 on all; over pages only "
        "multiples of 16, and on 9.x only those whose rows fill its key tiles",
        compiles="each configuration of sizes, dtypes and features, by the CuTe DSL, for about 2 s each",
    ),
    LibraryRule(
        **_FA4,
        versions=">=4.0.0b26,<5",
        capabilities=">=8.0,<9",
        serves=False,
        what="no paged KV cache there",
        remedy="pip install 'flash-attn>=2.7,<3' for FLASH_ATTN_2",
    ),
    LibraryRule(
        **_FA4,
        versions=">=4.0.0b26,<5",
        capabilities=">=12.0",
        serves=False,
        what="no paged KV cache there",
        remedy="pip install 'flash-attn>=2.7,<3' for FLASH_ATTN_2",
    ),
    LibraryRule(
        **_FA4,
        versions="<4.0.0b26",
        capabilities=">=8.0",
        serves=False,
        what="sinks are rounded to bfloat16",
        remedy="pip install 'flash-attn-4>=4.0.0b26'",
    ),
    LibraryRule(
        **_FI,
        versions=">=0.5,<0.8",
        capabilities=">=8.0,<13",
        serves=True,
        what="pages of any size; windows, soft cap, sinks, fp8 KV, CUDA graphs of decodes; head sizes 64, "
        "128 and 256",
        compiles="each template, head size, dtype, and window, cap or sinks, by nvcc and ninja, for about "
        "20 s, fa3 prefill 95 s; nothing of what flashinfer-jit-cache holds",
    ),
    LibraryRule(
        **_FI,
        versions="<0.5",
        capabilities=">=8.0",
        serves=False,
        what="not known: never tried",
        remedy="pip install 'flashinfer-python>=0.5,<0.8'",
    ),
    LibraryRule(
        **_FI,
        versions=">=0.8",
        capabilities=">=8.0",
        serves=False,
        what="not known: a minor version can move the names that are called",
        remedy="pip install 'flashinfer-python>=0.5,<0.8'",
    ),
    LibraryRule(
        **_MLA,
        versions=">=1.0,<2",
        capabilities=">=9.0,<9.1",
        serves=True,
        what="latents of 512 + 64 or 512 in 16 bits, and of 512 + 64 in fp8_e4m3 with rounded queries; pages of 64 tokens; "
        "the same number of queries for each request; chosen latents in bfloat16; `pip install --no-deps` keeps torch 2.11",
    ),
    LibraryRule(
        **_MLA,
        versions=">=1.0,<2",
        capabilities=">=10.0",
        serves=False,
        what="its dense kernels are for Hopper, and the sparse ones were never run there",
        remedy="use TRITON",
    ),
    LibraryRule(
        **_MLA,
        versions=">=2",
        capabilities=">=9.0",
        serves=False,
        what="not known: a major version can move the names that are called",
        remedy="pip install --no-deps 'sgl-flash-mla>=1.0,<2'",
    ),
)
"""Grouped by backend; rows that serve come before refusals."""


def rules_of(backend: str) -> tuple[LibraryRule, ...]:
    """The rows of one backend."""
    return tuple(rule for rule in LIBRARY_RULES if rule.backend == backend)


def requirements_of(backend: str) -> tuple[str, ...]:
    """The requirements of a backend as PEP 508 strings: the distributions and versions that serve it."""
    served = (rule for rule in rules_of(backend) if rule.serves)
    return _unique(rule.distribution + rule.versions for rule in served)


@functools.lru_cache(maxsize=256)
def serves_capability(backend: str, capability: tuple[int, int]) -> bool:
    """Whether any version serves a backend on GPUs of this compute capability."""
    return any(rule.serves and rule.covers_capability(capability) for rule in rules_of(backend))


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))


@functools.lru_cache(maxsize=256)
def _specifier(text: str) -> SpecifierSet:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(text)
