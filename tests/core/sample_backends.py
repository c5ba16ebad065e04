"""Backends that only declare, for tests of what is made of declarations."""

from __future__ import annotations

from typing import Any, ClassVar

from attnplug.core import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    Device,
    Feature,
    MultipleOf,
)

CPU = Device("cpu")
H100 = Device("cuda", (9, 0))
EVERYTHING = ~Feature(0)
ONE_KIND_ONLY = Feature.MLA | Feature.SPARSE | Feature.STATE
"""Features that narrow a backend: with them it serves nothing else."""


class Plain(AttentionBackend):
    """Declares nothing beyond its name."""

    @staticmethod
    def get_name() -> str:
        return "PLAIN"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        raise NotImplementedError

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        raise NotImplementedError


class Generous(Plain):
    """Serves every dense layer, anywhere."""

    device_types = ("cpu", "cuda", "rocm")
    supported_dtypes = ("float16", "bfloat16", "float32")
    supported_kv_cache_dtypes = ("auto", "fp8", "fp8_e5m2", "float16", "int8")
    features = EVERYTHING & ~ONE_KIND_ONLY
    supported_invariances = ("batch", "rows", "heads")
    supported_state_rules = ("linear", "delta", "conv")


class Latent(Generous):
    """Serves MLA, and only that."""

    features = Generous.features | Feature.MLA


class Picky(Plain):
    """Has a limit of every sort."""

    device_types = ("cuda",)
    supported_dtypes = ("float16",)
    supported_phases = ("decode",)
    wants: ClassVar[str] = "an even number of heads"

    @classmethod
    def get_supported_head_sizes(cls) -> tuple[int | MultipleOf, ...]:
        return (64, 128, 256)

    @classmethod
    def get_supported_kernel_block_sizes(cls, spec: Any = None, device: Any = None) -> tuple[Any, ...]:
        return (MultipleOf(16),)

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        return capability >= (9, 0)

    @classmethod
    def supports_combination(cls, spec: Any, device: Device) -> str | None:
        return cls.wants if spec.num_heads % 2 else None
