"""One cell of the compatibility matrix; evidence refers to cells."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One value of every axis.

    Args:
        feature: lower-case name of a Feature that the layer asks for, or "plain" for none.
        phase: what the batch holds: "prefill", "decode" or "mixed".
        head_size: of queries and keys, in elements.
        dtype: bare name of the queries' dtype, such as "bfloat16".
        kv_cache_dtype: as `LayerSpec.kv_cache_dtype`, "auto" for that of the queries.
        block_size: tokens per page; None where the layer has no pages.
        layout: physical order of the cache, "NHD" or "HND"; None where the layer has no pages.
    """

    feature: str
    phase: str
    head_size: int
    dtype: str
    kv_cache_dtype: str
    block_size: int | None
    layout: str | None

    @property
    def id(self) -> str:
        """All values in a fixed order: "sinks/decode/d128/bfloat16/auto/b16/NHD"."""
        pages = ("direct",) if self.block_size is None else (f"b{self.block_size}", str(self.layout))
        return "/".join(
            [self.feature, self.phase, f"d{self.head_size}", self.dtype, self.kv_cache_dtype, *pages]
        )
