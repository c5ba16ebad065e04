"""Words for layers, requests and sets of numbers in the messages of failing checks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from attnplug.core.spec import AttentionType, LayerSpec

_MOST_RANGES = 4


def layer_words(spec: LayerSpec) -> str:
    """The layer with the values that are not plain, such as "sliding, 4 heads over 2 KV heads of 64, float32"."""
    size = (
        f"{spec.head_size}" if spec.head_size_v == spec.head_size else f"{spec.head_size}/{spec.head_size_v}"
    )
    parts = [" ".join(spec.kinds), f"{spec.num_heads} heads over {spec.num_kv_heads} KV heads of {size}"]
    parts.append(spec.dtype if spec.kv_cache_dtype == "auto" else f"{spec.dtype} over {spec.kv_cache_dtype}")
    parts += [] if spec.causal else ["causal=False"]
    parts += [f"window {spec.window}"] if spec.is_windowed else []
    parts += [f"chunks of {spec.chunk_size}"] if spec.chunk_size else []
    parts += [f"soft cap {spec.logits_soft_cap:g}"] if spec.logits_soft_cap else []
    parts += [f"scale {spec.scale:g}"] if spec.scale != spec.replace(scale=None).scale else []
    parts += [f"sparse {spec.sparse}"] if spec.sparse else []
    flags = {"sinks": spec.has_sinks, "ALiBi": spec.has_alibi, "mm_prefix": spec.mm_prefix}
    flags |= {"direct K and V": spec.direct_kv, "LSE": spec.needs_lse}
    return ", ".join([*parts, *(name for name, is_set in flags.items() if is_set)])


def path_of(spec: LayerSpec, new: int, total: int) -> str:
    """How a request is computed: idle, encoder, cross, padding, decode, prefill or extend."""
    if new == 0:
        return "idle"
    if spec.is_encoder:
        return "encoder"
    if spec.attn_type is AttentionType.ENCODER_DECODER:
        return "cross"
    if new > total:
        return "padding"
    return "decode" if new == 1 else "prefill" if new == total else "extend"


def request_words(spec: LayerSpec, index: int, new: int, total: int) -> str:
    """A request as a reader finds it in the batch: "request 2 (extend, 5 new of 37 tokens)"."""
    of = f"{new} queries, {total} encoder tokens" if path_of(spec, new, total) == "cross" else None
    return f"request {index} ({path_of(spec, new, total)}, {of or f'{new} new of {total} tokens'})"


def numbers_words(numbers: Iterable[int]) -> str:
    """Sorted numbers as ranges, at most four: "0-3, 7, 9-12, 20 ..."."""
    ordered = sorted(set(numbers))
    runs = []
    for _, run in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(f"{members[0]}" if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs[:_MOST_RANGES]) + (" ..." if len(runs) > _MOST_RANGES else "")


def some_of(noun: str, numbers: Iterable[int], total: int) -> str:
    """Which of `total` things are meant: "all 8 heads", "heads 4-7 of 8", "head 3 of 8"."""
    chosen = sorted(set(numbers))
    if len(chosen) == total:
        return f"all {total} {noun}s" if total > 1 else f"the one {noun}"
    return f"{noun}{'' if len(chosen) == 1 else 's'} {numbers_words(chosen)} of {total}"
