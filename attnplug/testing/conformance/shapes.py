"""Lengths of the requests of a batch, near the limits at which kernels fail."""

from __future__ import annotations

from attnplug.core.spec import AttentionType, LayerSpec, Phase

SHAPES = ("decode", "prefill", "extend", "mixed", "speculative", "one", "alike", "idle")
"""Kinds of batches. `one` is a single decode. `alike` has requests of equal lengths, so that a kernel that
swaps their pages fails. `idle` has requests without new tokens, and a query that sees no key. `lengths` knows
`ordered` too: `mixed` with the decodes first, so that both halves of a composite have work."""

_LONGEST = 300
_TILE = 128
_OF_PHASE: dict[Phase | None, tuple[str, ...]] = {
    None: SHAPES,
    Phase.DECODE: ("decode", "one", "alike", "idle"),
    Phase.PREFILL: ("mixed", "prefill", "extend", "speculative", "alike", "idle"),
}


def shapes_of(phase: Phase | None) -> tuple[str, ...]:
    """The kinds of batches for a backend of one phase; all for None."""
    return _OF_PHASE[phase]


def lengths(shape: str, spec: LayerSpec, block_size: int) -> tuple[list[int], list[int]]:
    """The new tokens and all tokens of each request of a batch of kind `shape`.

    The lengths are near multiples of the block size, of windows, chunks and tiles of 128 keys. For a cross
    layer the second list counts the encoder's tokens. Encoders compute all their tokens at once.
    """
    marks = [block_size, 2 * block_size, _TILE, spec.chunk_size or 0]
    marks += [side + 1 for side in spec.window if side >= 0]
    edges = sorted({mark + step for mark in marks if 0 < mark < _LONGEST for step in (-1, 0, 1)} | {1, 40})
    ends = [edge for edge in edges if edge > 0]
    if spec.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        counts = {"one": ends[-1:], "decode": [1, *ends[-2:]], "alike": ends[-1:] * 3, "idle": [*ends[:3], 0]}
        return counts.get(shape, ends[-5:]), counts.get(shape, ends[-5:])
    if shape == "decode":
        return [1] * len(ends), ends
    if shape == "one":
        return [1], ends[-1:]
    if shape == "prefill":
        return ends[-4:], ends[-4:]
    if shape == "speculative":
        return [4] * len(ends), [end + 3 for end in ends]
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
    if shape == "ordered":
        order = sorted(range(len(mixed)), key=lambda request: mixed[request] > 1)
        return [mixed[request] for request in order], [all_tokens[request] for request in order]
    return mixed, all_tokens
