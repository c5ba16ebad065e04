"""The declaration of the correct backend; like any plugin's, it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from attnplug.core.backend import AttentionBackend
from attnplug.core.features import Feature


class ReferenceBackend(AttentionBackend):
    """Declares all that the oracle computes."""

    device_types: ClassVar[Sequence[str]] = ("cpu",)
    supported_dtypes: ClassVar[Sequence[object]] = ("float16", "bfloat16", "float32")
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = (
        "auto",
        "float16",
        "bfloat16",
        "float32",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    )
    features: ClassVar[Feature] = (
        Feature.SLIDING_WINDOW
        | Feature.CHUNKED_LOCAL
        | Feature.SOFT_CAP
        | Feature.SINKS
        | Feature.ALIBI
        | Feature.MM_PREFIX
        | Feature.SPARSE
        | Feature.LSE
        | Feature.HEAD_SIZE_V
        | Feature.NON_CAUSAL
        | Feature.DIRECT_KV
        | Feature.FP8_KV
        | Feature.CROSS
        | Feature.ENCODER
    )
    supported_sparse_kinds: ClassVar[Sequence[str]] = ("token_topk", "block")
    serves_dense: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        """The name."""
        return "REFERENCE"

    @classmethod
    def supports_combination(cls, spec: Any, device: Any) -> str | None:
        """Direct K and V are not stored."""
        if spec.direct_kv and spec.resolved_kv_cache_dtype != spec.dtype:
            return "direct K and V are not stored in another dtype"
        return None

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """Reference."""
        from mutants.reference import Reference

        return Reference

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """ReferenceBuilder."""
        from mutants.reference import ReferenceBuilder

        return ReferenceBuilder
