"""Pages of tokens, and finding full ones again by what they hold."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from attnplug.runtime import BlockPool

Page = tuple[int, ...]
"""The blocks that hold one page of tokens: of every KV group in turn."""


class Pages:
    """Hands out pages from a block pool. Full pages stay findable until their blocks are handed out again.

    Args:
        pool: the runtime's.
        block_sizes: tokens per block of each KV group.
    """

    def __init__(self, pool: BlockPool, block_sizes: Sequence[int]) -> None:
        self.pool = pool
        self.size = math.lcm(*block_sizes)
        self.split = [self.size // size for size in block_sizes]
        self.shared = 0
        self._page_of: dict[bytes, Page] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody uses."""
        return self.pool.num_free // sum(self.split)

    def count(self, tokens: int) -> int:
        """Pages that so many tokens need."""
        return -(-tokens // self.size)

    def keys(self, tokens: Sequence[int], parents: Sequence[bytes] = ()) -> list[bytes]:
        """A name for each full page of a sequence, which says all its tokens up to there; `parents` are known."""
        keys = list(parents)
        for start in range(len(keys) * self.size, len(tokens) - self.size + 1, self.size):
            page = ",".join(map(str, tokens[start : start + self.size])).encode()
            keys.append(hashlib.blake2b((keys[-1] if keys else b"") + page, digest_size=16).digest())
        return keys

    def allocate(self, count: int) -> list[Page]:
        """New pages; what their blocks held is forgotten. BatchError where fewer are free."""
        width = sum(self.split)
        blocks = self.pool.allocate(count * width)
        for block in blocks:
            key = self._key_of.pop(block, b"")
            if block in self._page_of.get(key, ()):
                del self._page_of[key]
        return [tuple(blocks[start : start + width]) for start in range(0, len(blocks), width)]

    def find(self, keys: Iterable[bytes]) -> list[Page]:
        """The pages of the longest known prefix, each with one more user."""
        found = []
        for key in keys:
            if key not in self._page_of:
                break
            found.append(self._page_of[key])
            self.pool.share(found[-1])
        return found

    def store(self, key: bytes, page: Page) -> None:
        """Let a page whose K and V are computed be found; the first of equal pages stays."""
        if self._page_of.setdefault(key, page) is page:
            self._key_of.update(dict.fromkeys(page, key))

    def free(self, pages: Sequence[Page]) -> None:
        """Take a user from each; the last page, the least likely to be asked for again, is reused first."""
        for page in reversed(pages):
            self.pool.free(page)

    def by_group(self, pages: Sequence[Page]) -> list[list[int]]:
        """The pages as StepBatchBuilder takes them: block numbers of each KV group."""
        groups, start = [], 0
        for width in self.split:
            groups.append([block for page in pages for block in page[start : start + width]])
            start += width
        return groups
