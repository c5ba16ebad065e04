"""Names that classes ported from vLLM may have, and what to write for each in attnplug.

`attnplug.core.interface.vllm_names` has all names of vLLM's base classes: each is one of attnplug's interface, or is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class PortedName:
    """A name that attnplug does not read.

    Args:
        write: what to write instead.
        harmless: values that ask for nothing, with which the name may stay.
    """

    write: str
    harmless: tuple[object, ...] = ()


_HARMLESS = {"": (), "False": (False,), "True": (True,), "None": (None,)}


def _ported(names: Mapping[str, str]) -> dict[str, PortedName]:
    """The names by what to write for them; "name=False" may stay with this value."""
    each = ((name.partition("="), write) for write, text in names.items() for name in text.split())
    return {name: PortedName(write, _HARMLESS[value]) for (name, _, value), write in each}


BACKEND_NAMES: Mapping[str, PortedName] = _ported(
    {
        "declare Feature.SLIDING_WINDOW in features": "supports_sliding_window",
        "declare Feature.NON_CAUSAL in features": "supports_non_causal",
        "declare Feature.ALIBI in features; slopes are used as they are": "supports_alibi_sqrt",
        "remove it: no layer can ask for it": "supports_kv_connector is_ssm supports_rswa",
        'declare Feature.INVARIANCE in features, and supported_invariances = ("batch",)': (
            "supports_batch_invariance"
        ),
        "declare Feature.HEAD_SCALES in features": "supports_per_head_quant_scales",
        "set supports_pcp on the impl": "supports_pcp",
        "set can_return_lse_for_decode on the impl": "supports_dcp can_return_lse_for_decode",
        "remove it: context parallelism is for causal layers": "supports_non_causal_dcp",
        "set needs_host_seq_lens on the builder": "supports_device_cpu_query_lens_mismatch",
        "set supports_quant_query_input on the impl": "supports_quant_query_input",
        "set it on the builder": (
            "reorder_batch_threshold cudagraph_support _cudagraph_support supports_update_block_table "
            "needs_host_seq_lens"
        ),
        "override get_kv_cache_shape, get_kv_cache_stride_order and split_kv": (
            "customize_spec indexes_kv_by_block_stride get_kv_cache_block_dim"
        ),
        "write update_kv_cache and attend on the impl": "forward_includes_kv_cache_update=False",
        "remove it: update_kv_cache alone writes keys and values": "supports_kv_cache_update_bypass=False",
        "define it as a method of the builder": "use_cascade_attention",
        "remove it: it follows from the class": "full_cls_name",
        "remove it: build returns the metadata": "get_metadata_cls make_metadata get_state_cls",
        "remove it: an engine copies pages by itself": "swap_blocks copy_blocks advance_step",
        "set supported_dtypes": "get_supported_dtypes",
        "set supported_kv_cache_dtypes": "get_supported_kv_cache_dtypes",
        "write get_supported_kernel_block_sizes(cls, spec=None, device=None)": (
            "get_supported_kernel_block_size get_supported_block_sizes supported_block_sizes "
            "supported_kernel_block_sizes"
        ),
        "write get_supported_head_sizes or supports_head_size": "validate_head_size supported_head_sizes",
        "remove it: spec.has_quantized_kv_cache tells it": "is_quantized_kv_cache",
        "write get_name": "get_enum",
        "declare a Feature in features": "supports_logits_soft_cap supports_soft_cap supports_alibi",
    }
)
"""On the backend class."""

_SET_ON_IMPLS = _ported(
    {
        "remove it: from_spec sets it as the spec has it; keep a value of your own under another name": (
            "num_heads num_kv_heads head_size scale kv_cache_dtype"
        )
    }
)
_SET_ON_BUILDERS = _ported(
    {
        "remove it: the constructor gets it": "kv_cache_spec layer_names device",
        "read self.config, which is a BuilderConfig": "vllm_config",
        "read kv_cache_spec.block_size": "kernel_block_size",
    }
)
SET_ON_INSTANCES = frozenset({*_SET_ON_IMPLS, *_SET_ON_BUILDERS})
"""Names of instances, which a class must not have. Many helpers have names like them."""

IMPL_NAMES: Mapping[str, PortedName] = _SET_ON_IMPLS | _ported(
    {
        "name it update_kv_cache(layer, key, value, kv_cache, slot_mapping)": "do_kv_cache_update",
        "set can_return_lse_for_decode": "supports_dcp",
        "set can_return_lse_for_decode; a process needs the LSE if from_spec gets a group dcp": (
            "need_to_return_lse_for_decode=False"
        ),
        "remove it: the groups dcp and pcp given to from_spec set it": (
            "dcp_world_size dcp_rank pcp_world_size pcp_rank total_cp_world_size total_cp_rank"
        ),
        "write natural logarithms to output_lse": "lse_base_on_e=True",
        "remove it: no layer can ask for it": (
            "supports_mtp_with_cp_non_trivial_interleave_size=False hisparse_cache=None"
        ),
        "declare Feature.SPARSE in the backend's features": "is_sparse=False",
        "remove it: supported_phases of the backend tell it": "supports_dense_mha_prefill",
        "remove it: keys come rotated, and update_kv_cache alone writes them": (
            "fused_rope_kvcache_supported fused_qk_norm_rope_kvcache_supported do_rope_and_kv_cache_update "
            "do_qk_norm_rope_kvcache_update fused_qk_norm_mrope_kvcache_supported "
            "do_qk_norm_mrope_kvcache_update"
        ),
        "override split_kv of the backend, which says where values are stored": "set_interleaved_v_cache",
        "do this work in build of the builder": "prepare_for_batch",
        "allocate it in the constructor": "reserve_workspace",
        "remove it: get_impl_cls gives the one impl of a layer": "get_impl_variants",
        "read spec.resolved_kv_cache_dtype": "kv_quant_mode",
        "declare Feature.HEAD_SCALES in the backend's features": "supports_per_head_quant_scales=False",
        "define get_supported_kernel_block_sizes on the backend": (
            "get_supported_kernel_block_size get_supported_kernel_block_sizes"
        ),
        "set it on the backend": "accept_output_buffer supported_dtypes supported_kv_cache_dtypes",
    }
)
"""On the impl class."""

IMPL_INSTANCE_NAMES: Mapping[str, PortedName] = {
    **IMPL_NAMES,
    **_ported({"set it on the class": "can_return_lse_for_decode supports_pcp"}),
}
"""On an impl: what it can do is read from its class, before the constructor runs."""

LATENT_IMPL_NAMES: Mapping[str, PortedName] = _ported(
    {"subclass MLADecodeImpl of attnplug.mla, which calls it": "forward_mha forward_mqa"}
)
"""On an impl class without latent attention."""

BUILDER_NAMES: Mapping[str, PortedName] = _SET_ON_BUILDERS | _ported(
    {
        "call _init_reorder_batch_threshold(supports_spec_as_decode=True)": (
            "query_len_support=False supports_uniform_spec_as_decode=False"
        ),
        "set reorder_batch_threshold": "reorder_batch",
        "do this work in build": "prepare",
        "remove it: graphs of decodes have queries of one length; set cudagraph_support": (
            "get_varlen_cudagraph_max_query_len"
        ),
        "set cudagraph_support": "can_run_in_cudagraph full_cudagraph_supported attn_cudagraph_support",
        "override build_for_drafting": (
            "supports_draft_decode_metadata_update=False update_draft_decode_metadata=False"
        ),
        "read common_attn_metadata.block_table_tensor.shape[1]": "requires_block_table_width=False",
        "read kv_cache_spec.block_size": "set_kernel_block_size",
        "remove it: context parallelism is for causal layers": "supports_non_causal_multi_token_dcp=False",
    }
)
"""On the builder class."""

BUILDER_INSTANCE_NAMES: Mapping[str, PortedName] = {
    **{name: each for name, each in BUILDER_NAMES.items() if name not in SET_ON_INSTANCES},
    **_ported(
        {"set it on the class, or override get_cudagraph_support": "cudagraph_support _cudagraph_support"}
    ),
}
"""On a builder: the level of graphs is read from its class."""

PORTED_PARAMETERS: Mapping[str, str] = {
    "vllm_config": "name it config: it is attnplug's BuilderConfig, with layers, num_speculative_tokens and limits",
    "use_mla": "read spec.mla",
    "has_sink": "read spec.has_sinks",
    "use_sparse": "read spec.sparse",
    "device_capability": "read device.capability",
}
"""Parameters of vLLM's methods, which attnplug gives in another form."""
