"""FLASH_MLA as it is, but on a CPU, where only the FlashMLA of these tests runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attnplug.backends.flash_mla import FlashMLABackend
from attnplug.core import LayerSpec, MLADims

if TYPE_CHECKING:
    from attnplug.backends.flash_mla.builder import FlashMLABuilder
    from attnplug.backends.flash_mla.impl import FlashMLAImpl

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=12)


class FlashMLAOnCpu(FlashMLABackend):
    """Imports nothing of the library before a builder is made."""

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = ()
    device_types: ClassVar[Sequence[str]] = ("cpu",)

    @classmethod
    def get_impl_cls(cls) -> type[FlashMLAImpl]:
        from attnplug.backends.flash_mla.impl import FlashMLAImpl

        return FlashMLAImpl

    @classmethod
    def get_builder_cls(cls) -> type[FlashMLABuilder]:
        from attnplug.backends.flash_mla.builder import FlashMLABuilder

        return FlashMLABuilder


def layer(heads: int = 4, **fields: Any) -> LayerSpec:
    given = {"num_heads": heads, "num_kv_heads": 1, "head_size": 576, "mla": DIMS, "dtype": "bfloat16"}
    return LayerSpec(**given | fields)
