"""The steps that checks of builders run: small, with lengths around pages, decodes first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import CheckSkipped
from attnplug.testing.conformance.target import Target

__all__ = [
    "KINDS",
    "Make",
    "decodes",
    "kinds",
    "layer_of_kind",
    "long_decodes",
    "mixed",
    "step_of",
    "with_pages",
]

Make: TypeAlias = Callable[[], Batch]
"""Gives the same batch each time, as it is before it is run."""

KINDS: dict[str, Feature] = {
    "full": Feature(0),
    "window": Feature.SLIDING_WINDOW,
    "chunk": Feature.CHUNKED_LOCAL,
}
"""Layers for which builders do different work, and what a backend declares to serve them."""


def kinds(target: Target) -> list[str]:
    """The kinds that the backend declares."""
    return [kind for kind, feature in KINDS.items() if feature in target.backend.features]


def layer_of_kind(target: Target, kind: str, **fields: Any) -> LayerSpec:
    """A small layer of one of KINDS, its block size chosen; a chunk is two pages.

    Raises:
        CheckSkipped: the backend serves none.
    """
    size = target.backend.get_preferred_block_size()
    asked: dict[str, dict[str, Any]] = {"window": {"window": (6, 0)}, "chunk": {"chunk_size": 2 * size}}
    return with_pages(target, target.spec(**asked.get(kind, {}), **fields))


def with_pages(target: Target, spec: LayerSpec) -> LayerSpec:
    """The layer with the block size that the backend prefers for it.

    Raises:
        CheckSkipped: it does not serve the layer with that.
    """
    chosen = spec.replace(block_size=target.block_size(spec))
    reasons = target.reasons(chosen)
    if reasons:
        raise CheckSkipped(
            f"{target.name} does not serve the block size that it prefers: {'; '.join(reasons)}"
        )
    return chosen


def mixed(size: int, more: int = 0) -> tuple[list[int], list[int]]:
    """New and all tokens of two decodes, an extend and a prefill, over pages of `size`.

    `more` tokens of context, 2 at most, take no more pages, so that a step taken for the other reads keys.
    """
    return [1, 1, 5, size + 3], [max(size - 2, 1) + more, 2 * size + 1 + more, size + 5 + more, size + 3]


def decodes(size: int, more: int = 0, new: int = 1) -> tuple[list[int], list[int]]:
    """New and all tokens of four decodes of `new` tokens, with `more` of context, 2 at most."""
    return [new] * 4, [max(size - 2, new) + more, 2 * size + 1 + more, size + 5 + more, 3 + more]


def long_decodes(size: int) -> tuple[list[int], list[int]]:
    """New and all tokens of decodes with some hundred keys beside short ones, for which kernels may change."""
    return [1] * 4, [3, 600 + size, size + 1, 300 + size]


def step_of(
    target: Target, spec: LayerSpec, lengths: tuple[Sequence[int], Sequence[int]], seed: int = 0
) -> Make:
    """Makes the batch of a step, with padding rows and dropped window pages."""
    return functools.partial(target.batch, spec, *lengths, padding=3, drop_window=True, seed=seed)
