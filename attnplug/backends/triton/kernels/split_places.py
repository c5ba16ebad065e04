"""Splits of keys at fixed places: where they begin, and the factors with which one is folded into those before."""

from __future__ import annotations

import itertools

import triton
import triton.language as tl

# Short splits let one short request fill a GPU. Long ones have few parts to merge, and are for keys that come late, in
# requests that have many splits already. All places are multiples of the next size, so that no split has two sizes.
_PLACES = ((0, 128), (1024, 256), (2048, 512), (16384, 1024), (65536, 2048))
"""First keys, and keys of each split from there on."""
_KEYS, _SIZES = zip(*_PLACES, strict=True)
_COUNTS = [0, *itertools.accumulate((b - a) // size for (a, size), (b, _) in itertools.pairwise(_PLACES))]
_A, _B, _C, _D = (tl.constexpr(key) for key in _KEYS[1:])
# Sizes are powers of two, and kernels compute with their logarithms: they divide slowly by a number that varies.
_L0, _L1, _L2, _L3, _L4 = (tl.constexpr(size.bit_length() - 1) for size in _SIZES)
_S0, _S1, _S2, _S3, _S4 = (tl.constexpr(size) for size in _SIZES)
_NA, _NB, _NC, _ND = (tl.constexpr(count) for count in _COUNTS[1:])


# Where tokens may come in any steps, a row's position alone says where splits are, as above. Where only the other
# requests may differ, a request's own lengths may say it: its splits then have one size, and are no more than these.
_MOST_EVEN: tl.constexpr = tl.constexpr(32)
_SHORT, _SHORTEST = tl.constexpr(1536), tl.constexpr(1024)
"""Keys up to which even splits have 128 keys, or 64, and not at least 256."""
# So many queries fill a GPU without splits.
_MANY_QUERIES: tl.constexpr = tl.constexpr(256)


def most_splits(keys: int, even: bool) -> int:
    """The splits of a request of up to `keys` keys."""
    if even:
        return min(-(-keys // 64), _MOST_EVEN.value)
    ends = [*_KEYS[1:], keys]
    return sum(
        -(-max(min(end, keys) - first, 0) // size)
        for first, size, end in zip(_KEYS, _SIZES, ends, strict=True)
    )


@triton.jit
def even_log(seq_len, query_len, EVEN: tl.constexpr):
    """The logarithm of the keys of each split of a request; 0 without EVEN: position says it."""
    if EVEN:
        log = tl.where(seq_len <= _SHORTEST, 6, tl.where(seq_len <= _SHORT, 7, 8))
        # Doubled while there are too many, up to 15 times.
        for half in tl.static_range(4):
            more = 8 >> half
            log = tl.where((seq_len - 1) >> (log + (more - 1)) >= _MOST_EVEN, log + more, log)
        return tl.where(query_len < _MANY_QUERIES, log, 30)
    else:
        return 0


@triton.jit
def split_log(key, even):
    """The logarithm of the keys of the split that has `key`; `even` is that of even_log."""
    early = tl.where(key < _A, _L0, tl.where(key < _B, _L1, _L2))
    log = tl.where(key < _C, early, tl.where(key < _D, _L3, _L4))
    return tl.where(even > 0, even, log)


@triton.jit
def split_size(key, even):
    """Keys of the split that has `key`."""
    return 1 << split_log(key, even)


@triton.jit
def split_number(key, even):
    """The splits before the one that has `key`."""
    early = tl.where(key < _B, _NA + (key - _A) // _S1, _NB + (key - _B) // _S2)
    late = tl.where(key < _D, _NC + (key - _C) // _S3, _ND + (key - _D) // _S4)
    number = tl.where(key < _A, key // _S0, tl.where(key < _C, early, late))
    return tl.where(even > 0, key >> even, number)


@triton.jit
def split_start(number, even):
    """The first key of a split."""
    early = tl.where(number < _NB, _A + (number - _NA) * _S1, _B + (number - _NB) * _S2)
    late = tl.where(number < _ND, _C + (number - _NC) * _S3, _D + (number - _ND) * _S4)
    key = tl.where(number < _NA, number * _S0, tl.where(number < _NC, early, late))
    return tl.where(even > 0, number << even, key)


@triton.jit
def nearest_split(key, base, even):
    """Where the split begins that is nearest to `key`, or to `base` if that is later."""
    key = tl.maximum(key, base)
    log = split_log(key, even)
    return (key + ((1 << log) >> 1)) >> log << log


@triton.jit
def fold_weights(held_top, top):
    """The factors of what is held and of a split more, and the maximum of both.

    A split without keys that a row sees changes no bit: the factors are 1 and 0. What they are multiplied with is added
    by an explicit FMA, since compilers choose themselves which of two products they round.
    """
    new_top = tl.maximum(held_top, top)
    pivot = tl.maximum(new_top, -1e38)
    return tl.exp2(held_top - pivot), tl.exp2(top - pivot), new_top
