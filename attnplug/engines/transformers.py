"""Models of transformers: the attention interface, with its masks and its DynamicCache, over rows padded at the left."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from attnplug.core.composite.step_split import split_at
from attnplug.core.errors import BatchError
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.engines.engine import Call, Engine


def _refusals(spec: LayerSpec) -> Iterator[str]:
    flags = {
        "latent attention": spec.mla is not None,
        "states": spec.state is not None,
        "ALiBi slopes": spec.has_alibi,
        "selections of keys": spec.sparse is not None,
        "log-sum-exp": spec.needs_lse,
    }
    yield from (f"its attention interface has no {name}" for name, is_asked in flags.items() if is_asked)
    if spec.resolved_kv_cache_dtype != spec.dtype:
        yield "its caches have the dtype of the layer"
    left, right = spec.window
    if spec.is_windowed and not spec.causal and (left != right or not spec.is_encoder):
        yield "its masks with windows on both sides are of encoders, and as wide on each side"
    if spec.sliding_window == 1:
        yield "its caches keep no window of one token"
    if spec.mm_prefix and spec.chunk_size is not None:
        yield "its masks with chunks have no multimodal blocks"
    if spec.mm_prefix and not spec.causal:
        yield "its bidirectional masks have no multimodal blocks"


def _asked(spec: LayerSpec) -> Iterator[LayerSpec]:
    """The layer with keys and values in the call; attention without a causal mask outside of an encoder is cross attention."""
    stored = {"kv_cache_dtype": "auto", "block_size": None, "head_scales": False}
    direct: dict[str, Any] = {"direct_kv": True, **stored}
    if spec.causal or spec.is_encoder:
        yield spec.replace(**direct)
        return
    yield spec.replace(**direct, attn_type="encoder_decoder")
    if spec.attn_type is AttentionType.DECODER:
        yield spec.replace(**direct, causal=True)  # of a batch that narrows it


_MOST_TOKENS = 1 << 20
"""Places of a batch of padded rows. One request of 3,001 tokens among 1,040 of 5 took 11 GB, and 44 s."""


def _attend(call: Call) -> None:
    lengths, is_cut = call.common.seq_lens.tolist(), call.spec.attn_type is AttentionType.DECODER
    is_cut &= call.spec.has_pages and len(lengths) > 1
    if is_cut and max(lengths) * len(lengths) > _MOST_TOKENS:
        # A service has its longest request in another batch.
        cut = max(lengths.index(max(lengths)), 1)
        tokens, most = int(call.common.query_start_loc_cpu[cut]), call.common.num_actual_tokens
        split = split_at(call.common, cut, tokens)
        for part, rows in ((split.decode, slice(tokens)), (split.prefill, slice(tokens, most))):
            if part is not None:
                own = {name: getattr(call, name)[rows] for name in ("query", "key", "value", "output")}
                _attend(dataclasses.replace(call, common=part, **own))
        return
    _attend_rows(call)


def _attend_rows(call: Call) -> None:
    from transformers import DynamicCache, PreTrainedConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from attnplug.integrations.attention.model_hooks import NAME, LayerState, set_state
    from attnplug.integrations.transformers import register

    register()
    spec, common = call.spec, call.common
    causal = spec.causal_in(common.causal)
    new, lengths = call.new_lens(), common.seq_lens.tolist()
    most_new = max(new, default=0)
    if not most_new:
        return
    config: Any = PreTrainedConfig()
    config._attn_implementation = NAME
    config.is_encoder_decoder = spec.attn_type is AttentionType.ENCODER
    config.num_hidden_layers = 1
    is_self = spec.attn_type is not AttentionType.ENCODER_DECODER
    most = max([*lengths, *(new if is_self else ())])
    tokens = [_row(call, index, most) for index in range(len(new))]
    key, value = (torch.stack(each).transpose(1, 2) for each in zip(*tokens, strict=True))
    query = _rows(call.query, new, most_new).transpose(1, 2)
    places = torch.arange(most, device=query.device)
    real = places >= most - common.seq_lens[:, None]
    cache = None
    if is_self and not spec.is_encoder:
        if causal and spec.sliding_window and not spec.mm_prefix:
            config.layer_types, config.sliding_window = ["sliding_attention"], spec.sliding_window
            cache = DynamicCache(config=config)
        else:
            cache = DynamicCache()
        if before := most - most_new:
            cache.update(key[:, :, :before], value[:, :, :before], 0)
    mask = _mask(call, config, causal, query, real, cache)
    if cache is not None:
        key, value = cache.update(key[:, :, most - most_new :], value[:, :, most - most_new :], 0)
    module: Any = torch.nn.Module().eval()
    module.config, module.layer_idx, module.is_causal = config, 0, causal
    state = set_state(module, LayerState("layer", spec.invariance))
    state.one_sequence = spec.is_encoder
    keywords: dict[str, Any] = {"softcap": spec.logits_soft_cap, "s_aux": call.tensors.sinks}
    if causal and spec.sliding_window:
        keywords["sliding_window"] = spec.sliding_window
    output, _ = ALL_ATTENTION_FUNCTIONS[NAME](
        module, query, key, value, mask, scaling=spec.scale, dropout=0.0, **keywords
    )
    rows = [output[index, most_new - count :] for index, count in enumerate(new)]
    call.output[: common.num_actual_tokens] = torch.cat(rows)


def _rows(packed: torch.Tensor, counts: list[int], most: int) -> torch.Tensor:
    """`[B, most, H, D]` of packed rows `[T, H, D]`, each request at the end of its row after zeros."""
    found = packed.new_zeros(len(counts), most, *packed.shape[1:])
    for row, part in zip(found, torch.split(packed[: sum(counts)], counts), strict=True):
        row[most - len(part) :] = part
    return found


def _row(call: Call, index: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values `[most, Hkv, D]` of a request at the end of its row; those that the engine has dropped are 0."""
    spec, common = call.spec, call.common
    length = int(common.seq_lens[index])
    starts = common.query_start_loc_cpu if common.key_start_loc_cpu is None else common.key_start_loc_cpu
    given = slice(int(starts[index]), int(starts[index + 1]))
    if spec.attn_type is AttentionType.ENCODER_DECODER:
        # The encoder's tokens, all of which are new.
        begin = int(common.seq_lens[:index].sum())
        given = slice(begin, begin + length)
    rows = []
    for packed, pages in zip(
        (call.key, call.value), call.pages() if spec.has_pages else (None, None), strict=True
    ):
        row = packed.new_zeros(most, *packed.shape[1:])
        if pages is not None:
            blocks = common.block_table_tensor[index].long()
            places = torch.arange(max(length - (given.stop - given.start), 0), device=row.device)
            held = blocks[places // pages.shape[1]]
            stored = pages[held, places % pages.shape[1]].to(row.dtype)
            # Block 0 is nobody's: there are tokens that a window has passed.
            row[most - length + places] = stored.where(held[:, None, None] > 0, 0)
        own = packed[given][-length:] if length else packed[:0]
        row[most - len(own) :] = own
        rows.append(row)
    return rows[0], rows[1]


def _mask(call: Call, config: Any, causal: bool, query: torch.Tensor, real: torch.Tensor, cache: Any) -> Any:
    """The mask that a model of the layer's kind makes for the step."""
    from transformers import masking_utils

    spec = call.spec
    embeds = query.new_empty(query.shape[0], query.shape[2], 1)
    given: dict[str, Any] = {"inputs_embeds": embeds, "attention_mask": real.long(), "past_key_values": cache}
    if not causal and spec.is_windowed:
        config.sliding_window = spec.window[0]
        return masking_utils.create_bidirectional_sliding_window_mask(config, **given)
    if not causal:
        return masking_utils.create_bidirectional_mask(config, **given)
    if spec.chunk_size is not None:
        config.attention_chunk_size = spec.chunk_size
        return masking_utils.create_chunked_causal_mask(config, **given)
    if spec.mm_prefix:
        given["block_sequence_ids"] = _blocks(call, real)
    if spec.sliding_window:
        config.sliding_window = spec.sliding_window
        return masking_utils.create_sliding_window_causal_mask(config, **given)
    return masking_utils.create_causal_mask(config, **given)


def _blocks(call: Call, real: torch.Tensor) -> torch.Tensor:
    """The number of each token's multimodal block, int64 `[B, L]`; -1 for text."""
    found = torch.full(real.shape, -1, device=real.device)
    spans = call.common.mm_prefix_spans
    if spans is None:
        raise BatchError("mm_prefix_spans", None, "is required: the layer has mm_prefix")
    offsets = real.shape[1] - call.common.seq_lens
    for index, own in enumerate(call.by_request(spans)):
        for start, stop in {(int(a), int(b)) for a, b in own.tolist() if b > a}:
            found[index, int(offsets[index]) + start : int(offsets[index]) + stop] = start
    return found


ENGINE = Engine("transformers", _refusals, _asked, _attend)
