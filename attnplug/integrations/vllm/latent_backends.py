"""vLLM's backend classes for latent attention (MLA): `ATTNPLUG_MLA` and `ATTNPLUG_NAME_MLA`."""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import get_current_vllm_config_or_none

from attnplug.core.errors import AttnplugError
from attnplug.core.mla.dims import get_mla_dims
from attnplug.core.spec import LayerSpec
from attnplug.integrations.vllm.backends import Backend, class_of, named, reasons_against, unserved
from attnplug.integrations.vllm.impl import HAS_CACHE_SHAPE, latent_pages_refusal
from attnplug.integrations.vllm.names import AUTOMATIC, LATENT
from attnplug.integrations.vllm.picked_keys import has_indexer, sparse_of
from attnplug.integrations.vllm.ranks import ranks_size
from attnplug.integrations.vllm.sparse import AnyLatentLayer, SparseBuilder, indexer_block_sizes
from attnplug.integrations.vllm.steps import INVARIANT


class LatentBackend(Backend):
    """The common part of the classes, which serve dense and sparse layers."""

    layer_class = AnyLatentLayer
    builder_class = SparseBuilder

    @classmethod
    def is_mla(cls) -> bool:
        """True."""
        return True

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """As vLLM's; for models with an indexer a size that this can read too."""
        model = getattr(get_current_vllm_config_or_none(), "model_config", None)
        if model is not None and has_indexer(model):
            sizes = [size for size in indexer_block_sizes() if cls.supports_block_size(size)]
            if sizes:
                return max(sizes)
        preferred: int = super().get_preferred_block_size(default_block_size)
        return preferred

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """The reasons of attnplug against the layer, in sentences."""
        given = named(args, kwargs)
        reasons = unserved(
            {name: value for name, value in given.items() if name not in ("use_mla", "use_sparse")}
        )
        stored = given.get("kv_cache_dtype") or "auto"
        if refusal := latent_pages_refusal(stored):
            return [*reasons, f"kv_cache_dtype {stored} {refusal}"]
        asked = [
            name
            for name in (
                "has_sink",
                "has_sliding_window",
                "use_non_causal",
                "use_mm_prefix",
                "use_per_head_quant_scales",
            )
            if given.get(name)
        ]
        reasons += [f"{name} is not served with latent attention in vLLM" for name in asked]
        if not given.get("use_mla"):
            return [*reasons, f"{cls.name} serves latent attention alone; name {AUTOMATIC} for other layers"]
        size = given.get("block_size")
        if given.get("use_sparse") and size and all(size % each for each in indexer_block_sizes()):
            read = max(indexer_block_sizes())
            reasons.append(
                f"block_size {size} not supported: vLLM's indexer reads {read}; use --block-size {read}"
            )
        config = get_current_vllm_config_or_none()
        model = getattr(config, "model_config", None)
        if model is None:
            return reasons
        try:
            spec = LayerSpec(
                num_heads=model.get_num_attention_heads(config.parallel_config),
                num_kv_heads=1,
                head_size=given["head_size"],
                dtype=given["dtype"],
                kv_cache_dtype=stored,
                block_size=given.get("block_size"),
                mla=get_mla_dims(model.hf_text_config),
                sparse=sparse_of(model) if given.get("use_sparse") else None,
                invariance=INVARIANT if given.get("use_batch_invariant") else (),
            )
        except AttnplugError as error:
            return [*reasons, str(error)]
        return reasons + reasons_against(spec, cls.backend, ranks=ranks_size(config))


if HAS_CACHE_SHAPE:

    def _get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, head_size)

    LatentBackend.get_kv_cache_shape = staticmethod(_get_kv_cache_shape)


@functools.cache
def latent_class(name: str) -> type[Backend]:
    """The class for ATTNPLUG_MLA or ATTNPLUG_NAME_MLA. AttributeError: no backend has that name."""
    backend = None if name == f"{AUTOMATIC}_{LATENT}" else name[len(AUTOMATIC) + 1 : -len(LATENT) - 1]
    return class_of(LatentBackend, name, backend)


def __getattr__(name: str) -> type[Backend]:
    """The class by its name, as vLLM resolves paths."""
    if name.startswith(AUTOMATIC) and name.endswith(LATENT):
        return latent_class(name)
    raise AttributeError(name)
