"""The axes of the kit's cases: the values of each that a backend declares.

The kinds of batches that the designed cases try, and the lengths of their requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attnplug.core.features import Feature
from attnplug.core.kv_format import kv_format
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.testing.conformance.cases.model_sizes import FAR
from attnplug.testing.conformance.check import Level
from attnplug.testing.conformance.target import Target
from attnplug.testing.design.search import spread
from attnplug.testing.drawn_values import Numbers
from attnplug.testing.oracle import COMPUTED

# `speculative` verifies three drafted tokens, and `draft` one. `one` is a single decode.
# `alike` has requests of equal lengths, so that a kernel that swaps their pages fails. `idle`
# has requests without new tokens, and a query that sees no key. `lengths` knows `ordered`
# too: `mixed` with the decodes first, so that both halves of a composite have work.
SHAPES = ("decode", "prefill", "extend", "mixed", "speculative", "draft", "one", "alike", "idle")
"""Kinds of batches."""

# `long-extend` has queries of several tokens over more than 2048 keys, the last position that float16
# counts to. `round-decode` and `round-extend` have lengths at the ends of large tiles and splits: no split
# is empty, or has one key. `many-drafts` has queries between those of `speculative` and those that are no
# drafts. `many-rows` has more than 2048 rows, and a prompt of more than 1024. `crowd` has more than 1024
# requests, the threads of a block, one of them long. `many-extends` has tiles for all of a GPU, so that none is divided by its keys. `one-prompt`
# has one request without context. `far-blocks` has block numbers that 16 bits with a sign do not hold, and slots that 16 bits do not hold.
LONG: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "long-decode": ((1, 1, 1), (5003, 129, 2100)),
    "long-prompt": ((700, 1), (700, 300)),
    "many-requests": ([1, 2, 5, 1] * 10, [count + 3 * step for step, count in enumerate([1, 2, 5, 1] * 10)]),
    "long-extend": ((5, 70), (3001, 2300)),
    "many-rows": ((1101, 513, 520), (1101, 553, 533)),
    "crowd": ([1] * 1037 + [2, 3, 1], [1 + step % 5 for step in range(1037)] + [4, 3, 3001]),
    "many-extends": ([70] * 14, [100 + 7 * step for step in range(14)]),
    "one-prompt": ((37,), (37,)),
    "round-decode": ([1] * 9, [255, 256, 257, 511, 512, 513, 1024, 1025, 2048]),
    "round-extend": ((256, 512, 16, 48, 64, 128), (256, 512, 528, 240, 1024, 256)),
    "many-drafts": ((6, 7, 8, 9, 12, 15), (40, 135, 64, 70, 12, 300)),
    "far-blocks": ((1, 1, 5), (300, 17, 40)),
    **FAR,
}
"""Large batches: new and all tokens. They are tried with single values, and not with pairs."""

# The first three have queries that some backends decode, and others prefill. `uniform` has queries that
# see no key: those of a request with more new tokens than tokens. `halves` has decodes first, so that
# both halves of a backend have work. In `context`, requests without computed tokens are between others.
LATENT: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "uniform": ([4] * 5, (4, 33, 2, 90, 20)),
    "eight": ([8] * 3, (8, 70, 131)),
    "unequal": ((1, 2, 3, 8, 5), (9, 34, 3, 90, 64)),
    "halves": ((1, 1, 20, 33, 40, 19), (40, 97, 85, 33, 131, 20)),
    "context": ((20, 33, 40, 18, 17), (90, 33, 171, 18, 82)),
}
"""Batches for latent attention: new and all tokens."""

_FAR_BLOCKS, _FAR_SLOTS = 33_000, 66_000

_DRAFTED = {"speculative": 3, "draft": 1}
_LONGEST = 300
_TILES = (16, 64, 128)


def far_blocks(block_size: int) -> int:
    """The blocks in front of those of `far-blocks`."""
    return max(_FAR_BLOCKS, -(-_FAR_SLOTS // block_size))


def lengths(shape: str, spec: LayerSpec, block_size: int) -> tuple[list[int], list[int]]:
    """The new tokens and all tokens of each request of a batch of kind `shape`.

    For a cross layer the second list counts the encoder's tokens. Encoders compute all their tokens at once.
    """
    # Pages, limits and tiles end there: the lengths are near multiples of the block
    # size, of windows, chunks and tiles of 16, 64 and 128 keys.
    if fixed := (LONG | LATENT).get(shape):
        new, tokens = fixed
        return list(new), list(new if spec.is_encoder else tokens)
    marks = [block_size, 2 * block_size, *_TILES, *(step * (spec.chunk_size or 0) for step in (1, 2))]
    # A window of `side` keys and the query's own key are `side + 1` keys.
    marks += [side + 1 for side in spec.window if side >= 0]
    # Lengths one below, at and one above each mark find off-by-one mistakes at its end.
    edges = sorted({mark + step for mark in marks if 0 < mark < _LONGEST for step in (-1, 0, 1)} | {1, 40})
    ends = [edge for edge in edges if edge > 0]
    if spec.is_encoder:
        counts = {"one": ends[-1:], "decode": [1, *ends[-2:]], "alike": ends[-1:] * 3, "idle": [*ends[:3], 0]}
        return counts.get(shape, ends[-5:]), counts.get(shape, ends[-5:])
    if shape == "decode":
        return [1] * len(ends), ends
    if shape == "one":
        return [1], ends[-1:]
    if shape == "prefill":
        return ends[-4:], ends[-4:]
    if shape in _DRAFTED:
        # Drafted tokens follow the verified one, so the first query ends at the edge.
        drafted = _DRAFTED[shape]
        return [drafted + 1] * len(ends), [end + drafted for end in ends]
    if shape == "alike":
        return [3] * 4, ends[-1:] * 4
    new = [max(end // 3, 1) for end in ends]
    if shape == "extend":
        return new[-5:], ends[-5:]
    if shape == "idle":
        return [0, 1, 0, 1, new[-1], 0], [ends[-1], ends[-2], 0, 0, ends[-1], 1]
    # Decodes, extends and prefills in no order.
    mixed = [new[-1], 1, ends[0], 1, new[-2], ends[-1]]
    all_tokens = [ends[-1], ends[-2], ends[0], ends[-1], ends[-2], ends[-1]]
    if spec.attn_type is AttentionType.ENCODER_DECODER:
        # The tokens of an encoder may be fewer than the queries.
        all_tokens[0] = ends[len(ends) // 4]
    if shape == "ordered":
        order = sorted(range(len(mixed)), key=lambda request: mixed[request] > 1)
        return [mixed[request] for request in order], [all_tokens[request] for request in order]
    return mixed, all_tokens


KINDS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "non_causal": {"causal": False},
    "narrowed": {"causal": False},
    "direct": {"direct_kv": True},
    "direct_non_causal": {"direct_kv": True, "causal": False},
    "encoder": {"attn_type": "encoder_only", "direct_kv": True},
    "encoder_half": {"attn_type": "encoder", "direct_kv": True},
    "cross": {"attn_type": "encoder_decoder"},
}
"""The roles of queries and keys, and the place of K and V. A narrowed layer is not causal, but its batch is."""

# Its two halves are tried apart, unless the backend serves them only together.
_LAST_KIND = "direct_non_causal"
_PAIRED_NUMBERS = 5
"""The first of Numbers, which the smoke level tries with all other values in pairs."""
_OF_PHASE: dict[Phase | None, tuple[str, ...]] = {
    None: SHAPES,
    Phase.DECODE: ("decode", "one", "alike", "idle"),
    Phase.PREFILL: ("mixed", "prefill", "extend", "speculative", "draft", "alike", "idle"),
}

_OF_LATENTS: dict[Phase | None, tuple[str, ...]] = {
    None: ("halves", "context"),
    Phase.DECODE: (),
    Phase.PREFILL: ("context",),
}

HEADS = (
    (4, 2),
    (2, 2),
    (9, 3),
    (14, 2),
    (4, 1),
    (8, 1),
    (5, 1),
    (9, 9),
    (27, 9),
    (16, 1),
    (21, 3),
    (8, 8),
    (32, 8),
    (96, 4),
    (6, 1),
    (12, 1),
    (18, 2),
    (32, 32),
    (48, 1),
)
_OWN_AXES = {"mla", "head_size_v", "kv_cache_dtype", "causal", "direct_kv", "attn_type"}
"""Fields that ask for a feature and have no axis of their name: `values`, the storage types and KINDS try them."""


def axes(target: Target) -> dict[str, list[Any]]:
    """The values of each axis to try with `target`, the plainest first."""
    few = target.level is Level.SMOKE
    tried, small = target.backend.features & COMPUTED, LayerSpec(num_heads=1, num_kv_heads=1, head_size=2)
    values: dict[str, list[Any]] = {
        "kind": [
            kind
            for kind, fields in KINDS.items()
            if small.replace(**fields).required_features() in tried
            and (kind != _LAST_KIND or not target.serves(attn_type="decoder", causal=True, direct_kv=True))
        ],
        "shape": list(_OF_PHASE[target.phase]),
        # Pairs with each of the others would cost a tenth of a run; the designed cases have each with some layers.
        "numbers": list(Numbers)[: _PAIRED_NUMBERS if few else None],
        "head_size": spread(target.head_sizes, 6 if few else 12),
        "heads": list(HEADS[:8] if few else HEADS),
        "dtype": target.dtypes,
        "kv_cache_dtype": target.kv_cache_dtypes,
        "block_size": spread(target.block_sizes, 4 if few else 12),
        "layout": list(target.backend.supported_kv_cache_layouts()),
        # The default of no head size above, so that a case fails if the backend takes a default instead.
        "scale": [None, 0.15, *([] if few else [0.07])],
        "values": [None, *(["smaller", "larger"] if Feature.HEAD_SIZE_V in tried else [])],
    }
    if target.is_latent:
        del values["head_size"]
        prefills = target.phase is not Phase.DECODE
        values["shape"] += _OF_LATENTS[target.phase]
        # 12 and 20 are no powers of 2, and are those of models.
        values["heads"] = [(count, 1) for count in (4, 1, 12, 16, 20)]
        values["mla"] = target.latents[: 7 if few else 12]
        values["chunk_rows"] = [None, *(((3, 1), (1, 0), (4, 0)) if prefills else ())]
        values |= {"joint": [False, True], "apart": [False, True]}
    for flag in COMPUTED & ~Feature.MLA:
        field, samples = flag.ask.field, samples_of(target, flag)
        if field not in _OWN_AXES:
            most = max(len(samples) // 2, 1) if few else len(samples)
            plain = False if samples[0] is True else None
            values[field] = [plain, *(samples[:most] if flag in tried else ())]
    return values


def samples_of(target: Target, flag: Feature) -> tuple[Any, ...]:
    """Values that ask for a feature: its samples, before them a page of tokens if no sample is whole pages.

    Sparse samples are of the served kinds, and stored types those that are declared, if there are any.
    """
    # Kernels that read chunks as requests of their own begin each at a page.
    samples, size = flag.ask.values, target.block_sizes[0]
    if flag is Feature.CHUNKED_LOCAL and all(sample % size for sample in samples):
        return (size, *samples)
    if flag is Feature.FP8_KV:
        own = [name for name in target.scaled_kv_dtypes if kv_format(name).feature == flag.names()[0]]
        return tuple(own) or samples
    if flag is Feature.MLA:
        return tuple(target.latents) or samples
    if flag is Feature.INVARIANCE:
        words = set(target.backend.supported_invariances)
        return tuple(sample for sample in samples if words.issuperset(sample)) or samples
    if flag is Feature.SPARSE:
        served = target.backend.supported_sparse_kinds
        return tuple(sample for sample in samples if sample.kind in served) or samples
    return samples
