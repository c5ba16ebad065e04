"""The kinds of batches that the designed cases try, and the lengths of their requests."""

from __future__ import annotations

from collections.abc import Sequence

from attnplug.core.spec import AttentionType, LayerSpec

SHAPES = ("decode", "prefill", "extend", "mixed", "speculative", "draft", "one", "alike", "idle")
"""Kinds of batches. `speculative` verifies three drafted tokens, and `draft` one. `one` is a single decode. `alike` has requests of equal lengths, so that a kernel that
swaps their pages fails. `idle` has requests without new tokens, and a query that sees no key. `lengths` knows
`ordered` too: `mixed` with the decodes first, so that both halves of a composite have work."""

LONG: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "long-decode": ((1, 1, 1), (5003, 129, 2100)),
    "long-prompt": ((700, 1), (700, 300)),
    "many-requests": ([1, 2, 5, 1] * 10, [count + 3 * step for step, count in enumerate([1, 2, 5, 1] * 10)]),
    "long-extend": ((5, 70), (3001, 2300)),
    "many-rows": ((1101, 513, 520), (1101, 553, 533)),
    "crowd": ([1] * 257 + [2, 3], [1 + step % 5 for step in range(257)] + [4, 3]),
    "many-extends": ([70] * 14, [100 + 7 * step for step in range(14)]),
    "one-prompt": ((37,), (37,)),
    "round-decode": ([1] * 9, [255, 256, 257, 511, 512, 513, 1024, 1025, 2048]),
    "round-extend": ((256, 512, 16, 48, 64, 128), (256, 512, 528, 240, 1024, 256)),
    "many-drafts": ((6, 7, 8, 9, 12, 15), (40, 135, 64, 70, 12, 300)),
    "far-decode": ((1, 1), (33_003, 5)),
    "far-blocks": ((1, 1, 5), (300, 17, 40)),
}
"""Large batches: new and all tokens. They are tried with single values, and not with pairs.

`long-extend` has queries of several tokens over more than 2048 keys, the last position that float16 counts to.
`round-decode` and `round-extend` have lengths at the ends of large tiles and splits: no split is empty, or has one key.
`many-drafts` has queries between those of `speculative` and those that are no drafts. `many-rows` has more than 2048 rows, and a prompt of more than 1024. `crowd` has more than 256 requests. `many-extends` has tiles for all of a GPU, so that none
is divided by its keys. `one-prompt` has one request without context. A length of
`far-decode` is one that 16 bits with a sign do not hold. `far-blocks` has block numbers that 16 bits with a sign do not hold, and slots that 16 bits do not hold."""

_FAR_BLOCKS, _FAR_SLOTS = 33_000, 66_000

_DRAFTED = {"speculative": 3, "draft": 1}
_LONGEST = 300
_TILES = (16, 64, 128)


def far_blocks(block_size: int) -> int:
    """The blocks in front of those of `far-blocks`."""
    return max(_FAR_BLOCKS, -(-_FAR_SLOTS // block_size))


def lengths(shape: str, spec: LayerSpec, block_size: int) -> tuple[list[int], list[int]]:
    """The new tokens and all tokens of each request of a batch of kind `shape`.

    The lengths are near multiples of the block size, of windows, chunks and tiles of 16, 64 and 128 keys. For a cross
    layer the second list counts the encoder's tokens. Encoders compute all their tokens at once.
    """
    if shape in LONG:
        new, tokens = LONG[shape]
        return list(new), list(new if spec.is_encoder else tokens)
    marks = [block_size, 2 * block_size, *_TILES, spec.chunk_size or 0]
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
