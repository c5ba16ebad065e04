"""Cascade attention: the blocks that all requests of a step share, and whether a builder attends them once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.composite.builder import CompositeMetadataBuilder
from attnplug.core.metadata import AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.spec import AttentionType, LayerSpec

_NULL_BLOCK = 0


def shared_prefix_lens(
    tables: npt.NDArray[np.int32],
    block_sizes: Sequence[int],
    computed: npt.NDArray[np.int64],
    groups: Collection[int],
) -> tuple[int, ...]:
    """The tokens of the leading blocks that all requests share, in each KV group.

    Only whole blocks that every request has computed count, so each query sees all these keys unless its layer has
    a window or chunks.

    Args:
        tables: host block tables `[G, R, max_blocks]`.
        block_sizes: tokens per block of each group.
        computed: computed tokens of each request, `[R]`.
        groups: the groups to look at; the others have 0, and so has a step of one request.
    """
    least = int(computed.min()) if computed.size > 1 else 0
    return tuple(
        _equal_blocks(tables[group], least // size) * size if group in groups else 0
        for group, size in enumerate(block_sizes)
    )


def _equal_blocks(table: npt.NDArray[np.int32], limit: int) -> int:
    """The number of leading columns, at most `limit`, with one block in all rows."""
    # Most steps share no block; then one column says so.
    if not limit or table[0, 0] == _NULL_BLOCK or (table[:, 0] != table[0, 0]).any():
        return 0
    first = table[0, :limit]
    # Null blocks are equal in all rows too, but have no tokens to share.
    same = (table[:, :limit] == first).all(0) & (first != _NULL_BLOCK)
    return limit if same.all() else int(same.argmin())


def may_cascade(builder: AttentionMetadataBuilder[Any]) -> bool:
    """Whether the builder, or a member of a composite, answers `use_cascade_attention` itself: the base says no."""
    if isinstance(builder, CompositeMetadataBuilder):
        return any(map(may_cascade, builder.members.values()))
    own = getattr(builder.use_cascade_attention, "__func__", None)
    return own is not AttentionMetadataBuilder.use_cascade_attention


def cascade_prefix_len(
    builder: AttentionMetadataBuilder[Any],
    specs: Iterable[LayerSpec],
    shared: int,
    common: CommonAttentionMetadata,
) -> int:
    """`shared`, the tokens of a step's shared prefix, if its builder wants to attend them once; else 0.

    The builder decides only if each query of its layers sees the whole prefix. So a layer with a window or chunks is
    one whose window or chunk covers the longest sequence of the step.

    Args:
        builder: of the layers.
        specs: of the layers; they have equal numbers of heads.
        shared: from `shared_prefix_lens`.
        common: the step.
    """
    layers = tuple(specs)
    if not shared or not all(_sees_all(spec, common.max_seq_len) for spec in layers):
        return 0
    wants = builder.use_cascade_attention(
        common_prefix_len=shared,
        query_lens=np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy()),
        num_query_heads=layers[0].num_heads,
        num_kv_heads=layers[0].num_kv_heads,
        use_alibi=any(spec.has_alibi for spec in layers),
        use_sliding_window=any(spec.window[0] >= 0 for spec in layers),
        use_local_attention=any(spec.chunk_size is not None for spec in layers),
        num_sms=_processors(common.query_start_loc.device),
        dcp_world_size=builder.config.decode_context_parallel_size,
    )
    return shared if wants else 0


def _sees_all(spec: LayerSpec, longest: int) -> bool:
    """Whether every query may attend all keys before it in parts, in sequences of up to `longest` tokens."""
    if spec.attn_type is not AttentionType.DECODER or spec.sparse or spec.mm_prefix:
        return False
    # Which requests share a prefix depends on the step, and a merge of two parts has other bits than one sum.
    if spec.invariance:
        return False
    left = spec.window[0]
    return (left < 0 or longest <= left + 1) and (spec.chunk_size is None or longest <= spec.chunk_size)


def _processors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads() if device.type == "cpu" else 1
