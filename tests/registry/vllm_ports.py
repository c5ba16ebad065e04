"""Backends that run as TORCH does, with names of vLLM in their classes."""

from __future__ import annotations

from typing import Any

from fake_plugins import CPU, H100, plugin

import attnplug
from attnplug import LayerSpec, Registry
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, Feature, FullAttentionSpec, LayerTensors, MLADims, SparseSpec
from attnplug.errors import AttnplugError
from attnplug.runtime import AttentionRuntime

IMPL: Any = TorchBackend.get_impl_cls()
BUILDER: Any = TorchBackend.get_builder_cls()
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
MLA = LayerSpec(num_heads=4, num_kv_heads=1, head_size=48, mla=DIMS, dtype="float32")
LATENT: Any = TorchBackend.for_layer(MLA)
LATENT_IMPL: Any = LATENT.get_impl_cls()
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
ASKED = {
    "plain": SPEC,
    "sinks": SPEC.replace(has_sinks=True),
    "spans": SPEC.replace(mm_prefix=True),
    "cross": SPEC.replace(attn_type="encoder_decoder"),
    "sparse": SPEC.replace(sparse=SparseSpec("token_topk", 8)),
    "pages": SPEC.replace(block_size=16),
}
CACHE = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype="float32")

# What is read, by a call that raises and is noticed, or by a value that decides. test_vllm_names_read.py tries each.
CALLED = {
    "backend": {
        *("get_name", "get_impl_cls", "get_builder_cls", "get_supported_head_sizes", "supports_head_size"),
        *("supports_dtype", "supports_kv_cache_dtype", "supports_block_size", "get_preferred_block_size"),
        *("get_supported_kernel_block_sizes", "supports_compute_capability", "supports_attn_type", "is_mla"),
        *("is_sparse", "supports_sink", "supports_mm_prefix", "supports_combination", "get_kv_cache_shape"),
        *("validate_configuration", "supported_kv_cache_layouts", "get_kv_cache_stride_order"),
    },
    "impl": {
        *("forward", "forward_mha", "forward_mqa", "fused_output_quant_supported"),
        "process_weights_after_loading",
    },
    "builder": {
        *("build", "build_for_cudagraph_capture", "build_for_drafting", "update_block_table"),
        *("use_cascade_attention", "get_cudagraph_support", "_init_reorder_batch_threshold"),
    },
}
VALUES = {
    "backend": {"supported_dtypes", "supported_kv_cache_dtypes"},
    "impl": {"can_return_lse_for_decode", "supports_pcp", "supports_quant_query_input"},
    "builder": {
        *("_cudagraph_support", "cudagraph_support", "reorder_batch_threshold"),
        "supports_update_block_table",
    },
}


class Read(RuntimeError):
    """Raised by what attnplug is expected to call."""


def reads(*given: Any, **named: Any) -> Any:
    raise Read("it is read")


def made(impl: type = IMPL, builder: type = BUILDER, base: type = TorchBackend, **names: Any) -> Any:
    parts = {
        "get_impl_cls": classmethod(lambda cls: impl),
        "get_builder_cls": classmethod(lambda cls: builder),
    }
    parts |= {"get_name": staticmethod(lambda: "ACME"), "get_priority": classmethod(lambda cls, *asked: 50)}
    return type("Acme", (base,), {**parts, **names})


def everything(backend: Any) -> str:
    """What attnplug says when it chooses this backend for layers of all kinds, and allocates caches."""
    said: list[str] = []
    undeclared = type("Acme", (backend,), {"features": Feature(0)})
    for offered in (backend, undeclared):
        try:
            registry = Registry({"acme": plugin(offered)})
            said += [str(registry.explain(spec, device)) for spec in ASKED.values() for device in (CPU, H100)]
            plan = attnplug.plan({"a": SPEC}, CPU, num_blocks=4, registry=registry)
            AttentionRuntime(plan)
        except (Read, AttnplugError) as error:
            said.append(str(error))
    # A table breaks lines between words.
    return " ".join(" ".join(said).split())


def runtime_of(
    backend: Any, spec: LayerSpec = SPEC, tensors: LayerTensors | None = None, **more: LayerSpec
) -> AttentionRuntime:
    """A runtime of layer "a", and of others, on this backend alone."""
    registry = Registry({"acme": plugin(backend)})
    plan = attnplug.plan({"a": spec, **more}, CPU, num_blocks=8, registry=registry)
    config = BuilderConfig(cudagraph_batch_sizes=(1,), max_model_len=64, num_speculative_tokens=1)
    return AttentionRuntime(plan, {} if tensors is None else {"a": tensors}, config=config)
