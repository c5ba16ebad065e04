"""The declarations of TRITON: all of TORCH on GPUs, except odd page sizes and storage types."""

from __future__ import annotations

import os
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

from attnplug.backends.triton.layout import (
    WIDEST_WHOLE,
    has_specialized_prefill,
    head_tiles,
    least_memory,
    limit_class,
    limit_width,
    tile_side,
    window_class,
)
from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.composite.steps import Limits, StepKind, StepPriority, StepRange
from attnplug.core.features import Feature
from attnplug.core.kv_format import kv_format
from attnplug.core.mla.backend import MLADecodeBackend, QueryLens
from attnplug.core.spec import LayerSpec, Phase
from attnplug.core.state.dims import STATE_DTYPES, STATE_RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.backends.triton.builder import TritonMetadataBuilder
    from attnplug.backends.triton.impl import TritonImpl
    from attnplug.backends.triton.latent import TritonMLABuilder, TritonMLAImpl
    from attnplug.backends.triton.state.builder import TritonStateBuilder
    from attnplug.backends.triton.state.impl import TritonStateImpl
    from attnplug.core.device import Device


# Triton reads this variable when it is imported, so attnplug also reads it once.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
# Query heads of one KV head: one tile of the kernels has them all.
_MAX_GROUP = 128
# Elements of a latent without its rope part: the accumulators of a tile are as wide.
_WIDEST_LATENT = 512
# Elements of a latent's rope part: with more, the smallest tiles of float32 exceed 99 KB.
_WIDEST_ROPE = 256
# Compute capabilities with 99 KB of shared memory. Most AMD GPUs have 64 KB, of which keys and values take less.
_LITTLE_MEMORY = {(8, 6), (8, 9), (12, 0), (12, 1)}
_LITTLE, _SOME, _MUCH = 99 << 10, 163 << 10, 227 << 10
"""Bytes of shared memory of those, of other GPUs before compute capability 9.0, and of others."""
# Pages with elements of torch, which latents have too.
_ELEMENTS = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_WIDEST_STATE, _WIDEST_CONVOLUTION = 256, 16
"""K of a state, of which a program has all rows, and width of a convolution, whose inputs are added one by one."""


class TritonBackend(AttentionBackend):
    """Paged attention in Triton: decode, prefill and mixed batches, without any vendor library.

    For tests it runs on a CPU too, slowly, if TRITON_INTERPRET=1 is set before triton is imported.
    """

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = ("triton>=3.4,<4",)
    device_types: ClassVar[Sequence[str]] = ("cuda", "rocm", *(("cpu",) if _INTERPRETED else ()))
    supported_dtypes: ClassVar[Sequence[object]] = ("float16", "bfloat16", "float32")
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = (*_ELEMENTS, "int8_token_head", "nvfp4", "rotated4")
    features: ClassVar[Feature] = (
        Feature.SLIDING_WINDOW
        | Feature.CHUNKED_LOCAL
        | Feature.SOFT_CAP
        | Feature.SINKS
        | Feature.ALIBI
        | Feature.MM_PREFIX
        | Feature.LSE
        | Feature.HEAD_SIZE_V
        | Feature.NON_CAUSAL
        | Feature.DIRECT_KV
        | Feature.FP8_KV
        | Feature.HEAD_SCALES
        | Feature.CROSS
        | Feature.ENCODER
        | Feature.INVARIANCE
    )
    supported_invariances: ClassVar[Sequence[str]] = ("batch", "rows", "heads")
    step_safe: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        """The name, "TRITON"."""
        return "TRITON"

    @classmethod
    def for_layer(cls, spec: LayerSpec) -> type[AttentionBackend]:
        """A class of its own for latent attention and for state layers; a subclass of this one has none of them."""
        if cls is not TritonBackend:
            return cls
        if spec.state is not None:
            return TritonStateBackend
        return TritonMLABackend.for_layer(spec) if spec.mla is not None else cls

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """As measured on an H200, for compute capability 9.x: 245 for decodes, and 210, 222 or 242 for prefills.

        On other GPUs it has 100: it comes after the vendors' kernels and before TORCH. Interpreted on a CPU it comes
        after TORCH.
        """
        # 71 of 80 kinds of decodes of six models are fastest here: they take 0.65 of FlashInfer's time and
        # 0.53 of FlashAttention 4's. Prefills have 222 where the kernel with specialised warps can serve:
        # they take 0.84 of FlashInfer's time, and 1.10 of FlashAttention 4's. Heads of 64 with windows of
        # at most 128 keys have 242: new prompts take 0.84 of FlashAttention 4's time, and further parts of
        # prompts 1.09. Soft caps that this kernel serves have 242 too: new prompts take 0.73 to 0.97 of FlashAttention
        # 4's time (`prompts-h200.json`). Others have 210: they take 1.08 of FlashInfer's time. Both phases together have the
        # mean, rounded up. These are geometric means of kernels and builders over the steps of
        # `attnplug/registry/measured/tuned_tables/h200.json` and `benchmarks/results/regret-h200.json`,
        # and of `benchmarks/results/attention-core-h200.json`.
        if device.type == "cpu":
            return 0
        if device.type != "cuda" or device.capability is None or device.capability[0] != 9:
            return 100
        prefill = 210
        if device.capability == (9, 0) and has_specialized_prefill(spec):
            is_short = spec.head_size == 64 and 0 <= spec.window[0] < 128
            prefill = 242 if is_short or spec.logits_soft_cap else 222
        return {Phase.PREFILL: prefill, Phase.DECODE: 245, None: (prefill + 246) // 2}[phase]

    @classmethod
    def get_step_priorities(cls, spec: LayerSpec, device: Device) -> Sequence[StepPriority]:
        """On compute capability 9.x, 243 for prefills of short queries, and for mixed steps of few: before FLASH_ATTN_4."""
        # With heads of 64 and 128, FLASH_ATTN_4 takes 1.14 to 2.4 of the time here for prompts of 40 to 300 tokens, and with
        # 128 1.09 and 1.13 for 4 x 1500, 1.18 and 1.23 for 3 x 700 more of 5k, 2.5 to 3.3 for 16 and 100 more of 30k, and 0.99
        # for 512 more of 32k. One prompt of 20000 tokens takes 0.87. With windows of 1024 and 4096, 3 x 1500 take 0.95 and 0.84. A
        # prompt is not told from an extend: with heads of 64, 16 x 64 more of 8k take 0.98, and 512 more of 32k 1.21; without
        # specialised warps the range of more than 128 tokens has several requests. A pair has two builds: mixed steps of 276 to
        # 536 tokens and heads of 128 take 1.02 to 1.12 of the time with it. See step-choice-h200.json, regret-h200.json and
        # attention-serving-h200.json. Other sizes were not measured: the range ends where the margin is large.
        if device.type != "cuda" or device.capability is None or device.capability[0] != 9:
            return ()
        size, is_fast = spec.head_size, has_specialized_prefill(spec)
        ranges: list[dict[str, Limits]] = [{"query": (1, 384 if 96 <= size <= 128 else 128)}]
        if is_fast and 96 < size <= 128:
            width = limit_width(spec.window[0], spec.chunk_size or 0)
            ranges = [{"query": (1, 1024 if width else 2048)}]
        elif is_fast and size == 96:
            ranges.append({"query": (385, 1024), "requests": (2, None)})
        elif is_fast and size == 64:
            ranges = [{"query": (1, 1024)}]
        elif size == 64:
            ranges.append({"query": (129, 384), "requests": (4, None)})
        found = [StepPriority(StepRange(StepKind.PREFILL, **each), 243) for each in ranges]
        if is_fast and size == 128:
            found.append(StepPriority(StepRange(StepKind.MIXED, rows=(1, 1280)), 243))
        return tuple(found)

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """16 to 256 in steps of 8, which are rows of 16 bytes and more, and 288 to 512 in steps of 32."""
        return (*range(16, 257, 8), *range(288, 513, 32))

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """8.0 and above: Triton's bfloat16 matrix products need it."""
        return capability >= (8, 0)

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse groups larger than a tile, storage that nothing uses, and fp8 and equal bits that GPU or compiler lack."""
        if spec.invariance and (other := _other_bits(device)):
            return other
        if spec.invariance and kv_format(spec.resolved_kv_cache_dtype).planes:
            return f"equal bits are not kept over kv_cache_dtype={spec.kv_cache_dtype!r}; over auto and fp8 they are"
        if spec.direct_kv and spec.resolved_kv_cache_dtype != spec.dtype:
            return f"direct_kv stores nothing, so kv_cache_dtype={spec.kv_cache_dtype!r} cannot be honoured"
        if spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
            return (
                f"{spec.num_heads // spec.num_kv_heads} query heads share a KV head, more than {_MAX_GROUP}"
            )
        if lacks := _lacks_memory(spec, device) or _lacks_e4m3(spec, device):
            return lacks
        if spec.resolved_kv_cache_dtype == "rotated4" and spec.head_size > WIDEST_WHOLE:
            return (
                f"head_size={spec.head_size} over kv_cache_dtype='rotated4': the matrix that turns rows of more than "
                f"{WIDEST_WHOLE} elements exceeds the shared memory; other types have room"
            )
        # On an H200 such values were wrong beside wider keys. Tiles are widened for them now, most of which is padding: on
        # no GPU have they been seen right, except with float32 queries.
        tiles = head_tiles(spec.head_size, spec.head_size_v, 1, whole=True)
        widened, _ = tiles.values
        has_bytes = spec.has_quantized_kv_cache and spec.dtype != "float32"
        if has_bytes and widened > tile_side(spec.head_size_v):
            return (
                f"head_size_v={spec.head_size_v} with head_size={spec.head_size} over fp8; "
                f"there value heads have at least {widened // 2 + 1} elements"
            )
        return None

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """The compiled-in values: sizes, dtypes, features, classes of windows and chunks; lengths and most caps are not."""
        if _INTERPRETED:
            return None
        return (
            spec.num_heads // spec.num_kv_heads,
            spec.head_size,
            spec.head_size_v,
            spec.dtype,
            spec.resolved_kv_cache_dtype,
            spec.block_size,
            spec.required_features(),
            spec.invariance,
            window_class(spec.window[0]),
            limit_class(limit_width(spec.window[0], spec.chunk_size or 0)),
            has_specialized_prefill(spec),
        )

    @classmethod
    def watch_compiling(cls) -> AbstractContextManager[list[str]]:
        """Inside, the list grows by attnplug's kernels and the sizes that they are compiled for."""
        from attnplug.ops.triton.launch import watch_compiling

        return watch_compiling()

    @classmethod
    def get_impl_cls(cls) -> type[TritonImpl]:
        """TritonImpl."""
        from attnplug.backends.triton.impl import TritonImpl

        return TritonImpl

    @classmethod
    def get_builder_cls(cls) -> type[TritonMetadataBuilder]:
        """TritonMetadataBuilder."""
        from attnplug.backends.triton.builder import TritonMetadataBuilder

        return TritonMetadataBuilder


class TritonMLABackend(MLADecodeBackend):
    """Latent attention in Triton: decodes on the latents, and prefills expanded K and V on TRITON."""

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = TritonBackend.requires
    device_types: ClassVar[Sequence[str]] = TritonBackend.device_types
    supported_dtypes: ClassVar[Sequence[object]] = TritonBackend.supported_dtypes
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = _ELEMENTS
    supported_phases: ClassVar[Sequence[Phase | str]] = tuple(Phase)
    features: ClassVar[Feature] = Feature.MLA | Feature.SPARSE | Feature.LSE | Feature.FP8_KV
    supported_sparse_kinds: ClassVar[Sequence[str]] = ("token_topk", "block")
    step_safe: ClassVar[bool] = True
    prefill: ClassVar[type[AttentionBackend] | None] = TritonBackend

    query_lens: ClassVar[QueryLens | str] = QueryLens.ANY
    # Queries share a tile of latents; with more of them the expanded product has less to compute.
    decode_threshold: ClassVar[int] = 8

    @staticmethod
    def get_name() -> str:
        """The name, "TRITON"."""
        return TritonBackend.get_name()

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """100: after the kernels of vendors, before TORCH; interpreted on a CPU it comes after TORCH."""
        return 0 if device.type == "cpu" else 100

    @classmethod
    def get_step_priorities(cls, spec: LayerSpec, device: Device) -> Sequence[StepPriority]:
        """On compute capability 9.0, 125 for decodes and drafts of few requests: before FLASH_MLA."""
        # With its builds FLASH_MLA takes 1.54, 1.50, 1.26 and 1.21 of the time here for one request of 8k with 16, 32, 64 and 128
        # heads, and 0.99 to 1.18 for four; for two drafts of 3 tokens 1.01 to 1.14; for eight of 30k with 64 heads 1.05, and with
        # others 0.88 to 1.00. See step-choice-h200.json.
        if device.type != "cuda" or device.capability != (9, 0) or spec.sparse is not None:
            return ()
        few = (StepKind.DECODE, 8 if 32 < spec.num_heads <= 64 else 4), (StepKind.DRAFT, 2)
        return tuple(StepPriority(StepRange(kind, requests=(1, most)), 125) for kind, most in few)

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """As TritonBackend."""
        return TritonBackend.supports_compute_capability(capability)

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse latents wider than a tile, and fp8 that the GPU lacks."""
        if spec.mla is not None and spec.mla.kv_lora_rank > _WIDEST_LATENT:
            return f"kv_lora_rank={spec.mla.kv_lora_rank} is more than {_WIDEST_LATENT}"
        if spec.mla is not None and spec.mla.qk_rope_head_dim > _WIDEST_ROPE:
            return f"qk_rope_head_dim={spec.mla.qk_rope_head_dim} is more than {_WIDEST_ROPE}"
        return _lacks_e4m3(spec, device)

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """The compiled-in values of the decode, and the key of the prefill half."""
        sizes = (spec.num_heads, spec.head_size, spec.head_size_v, spec.block_size, spec.needs_lse)
        if _INTERPRETED or spec.mla is None:
            return None
        if spec.sparse is not None:
            return (*sizes, spec.dtype, spec.resolved_kv_cache_dtype, spec.sparse)
        prefill = super().compile_key(spec)
        return None if prefill is None else (*sizes, prefill)

    @classmethod
    def get_impl_cls(cls) -> type[TritonMLAImpl]:
        """TritonMLAImpl."""
        from attnplug.backends.triton.latent import TritonMLAImpl

        return TritonMLAImpl

    @classmethod
    def get_builder_cls(cls) -> type[TritonMLABuilder]:
        """TritonMLABuilder."""
        from attnplug.backends.triton.latent import TritonMLABuilder

        return TritonMLABuilder


class TritonStateBackend(AttentionBackend):
    """State layers in Triton: each state is read once and written once in a step, in one launch for all requests."""

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = TritonBackend.requires
    device_types: ClassVar[Sequence[str]] = TritonBackend.device_types
    supported_dtypes: ClassVar[Sequence[object]] = TritonBackend.supported_dtypes
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = STATE_DTYPES
    features: ClassVar[Feature] = Feature.STATE | Feature.STATE_DRAFTS | Feature.STATE_CHECKPOINTS
    supported_state_rules: ClassVar[Sequence[str]] = STATE_RULES

    @staticmethod
    def get_name() -> str:
        """The name, "TRITON"."""
        return TritonBackend.get_name()

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """100, and 40 for recurrences with prompts: before TORCH, after kernels in chunks; on a CPU after TORCH."""
        # Prompts run token by token here.
        if device.type == "cpu":
            return 0
        return 100 if phase is Phase.DECODE or spec.kinds == ("conv",) else 40

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """As TritonBackend."""
        return TritonBackend.supports_compute_capability(capability)

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse states with more rows, and convolutions of more inputs, than a program has."""
        width = None if spec.state is None else spec.state.width
        if width is not None and width > _WIDEST_CONVOLUTION:
            return f"a convolution of {width} inputs is wider than {_WIDEST_CONVOLUTION}"
        if spec.head_size > _WIDEST_STATE:
            return f"head_size={spec.head_size} of a state is more than {_WIDEST_STATE}"
        return None

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """The compiled-in values: sizes, dtypes and the rule; drafts and checkpoints are not."""
        if _INTERPRETED or spec.state is None:
            return None
        sizes = spec.num_heads, spec.num_kv_heads, spec.head_size, spec.head_size_v
        dims = spec.state.rule, spec.state.decay, spec.state.width, spec.state.activation
        return (*sizes, spec.dtype, spec.resolved_kv_cache_dtype, *dims)

    @classmethod
    def watch_compiling(cls) -> AbstractContextManager[list[str]]:
        """As TritonBackend."""
        return TritonBackend.watch_compiling()

    @classmethod
    def get_impl_cls(cls) -> type[TritonStateImpl]:
        """TritonStateImpl."""
        from attnplug.backends.triton.state.impl import TritonStateImpl

        return TritonStateImpl

    @classmethod
    def get_builder_cls(cls) -> type[TritonStateBuilder]:
        """TritonStateBuilder."""
        from attnplug.backends.triton.state.builder import TritonStateBuilder

        return TritonStateBuilder


def _other_bits(device: Device) -> str | None:
    """Why the bits of a row depend on the tile that it is in, if they do."""
    if device.type != "cuda":
        return "equal bits are kept on NVIDIA's GPUs alone: elsewhere the products of unlike tiles have other orders"
    # Seen on compute capability 9.0, where tiles of 64 rows have instructions of their own. Capabilities 8.x and 12.x have
    # one instruction for all tiles, and 10.x and 11.x have others for large ones, whose sums nobody has compared here.
    if device.capability is not None and device.capability[0] in (10, 11):
        return "equal bits are not kept on compute capability 10.x and 11.x, whose large tiles have instructions of their own"
    return None


def _lacks_memory(spec: LayerSpec, device: Device) -> str | None:
    """Why the heads of a group do not fit the shared memory of the GPU, if they do not."""
    if device.type == "rocm" or device.capability in _LITTLE_MEMORY:
        room = _LITTLE
    else:
        room = _SOME if device.capability is not None and device.capability < (9, 0) else _MUCH
    # What warps exchange takes as much as whole tiles.
    if device.type not in ("cuda", "rocm") or least_memory(spec) <= room:
        return None
    group, widest = spec.num_heads // spec.num_kv_heads, max(spec.head_size, spec.head_size_v)
    return f"{group} query heads of {widest} {spec.dtype} elements share a KV head, more than fit the shared memory"


def _lacks_e4m3(spec: LayerSpec, device: Device) -> str | None:
    """Why the GPU cannot read fp8_e4m3, if it cannot."""
    is_e4m3 = spec.resolved_kv_cache_dtype == "fp8_e4m3"
    if is_e4m3 and device.type == "cuda" and device.capability is not None and device.capability < (8, 9):
        return "fp8_e4m3 needs compute capability 8.9; fp8_e5m2 does not"
    return None
