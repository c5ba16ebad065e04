"""Pages of tokens, handed out and found again by what they hold."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence

from attnplug.runtime import BlockPool

Page = tuple[int, ...]  # its blocks, of every KV group in turn


class Pages:
    """Hands out pages of `size` tokens. A full one that was stored is found until its blocks are handed out again."""

    def __init__(self, pool: BlockPool, block_sizes: Sequence[int]) -> None:
        """`block_sizes` are the tokens that a block of each KV group covers, on all ranks together."""
        self.pool, self.size, self.shared = pool, math.lcm(*block_sizes), 0
        # KV groups with larger blocks have fewer of them in a page.
        self.group_of = [g for g, size in enumerate(block_sizes) for _ in range(self.size // size)]
        self.max_tokens = pool.num_free // len(self.group_of) * self.size
        self._page_of: dict[bytes, Page] = {}
        self._key_of: dict[int, bytes] = {}

    def allocate(self, count: int) -> list[Page] | None:
        """New pages, or None where fewer are free; what their blocks held is forgotten."""
        width = len(self.group_of)
        if count * width > self.pool.num_free:
            return None
        blocks = self.pool.allocate(count * width)
        self.forget(blocks)
        return [tuple(blocks[start : start + width]) for start in range(0, len(blocks), width)]

    def forget(self, blocks: Iterable[int]) -> None:
        """Let no request find the pages of these blocks any more."""
        for block in blocks:
            key = self._key_of.pop(block, b"")
            if block in self._page_of.get(key, ()):
                del self._page_of[key]

    def free(self, pages: Sequence[Page]) -> None:
        """Take a user from each; the last, least likely to be asked for again, is handed out first."""
        self.pool.free([block for page in reversed(pages) for block in page])

    def add_keys(self, keys: list[bytes], tokens: Sequence[int]) -> None:
        """Extend `keys` to one for each full page of a sequence; it identifies all tokens up to the page's end."""
        for start in range(len(keys) * self.size, len(tokens) - self.size + 1, self.size):
            page = str(tokens[start : start + self.size]).encode()
            keys.append(hashlib.blake2b(b"".join(keys[-1:]) + page).digest())

    def store(self, key: bytes, page: Page) -> None:
        """Let a page be found, now that its K and V are computed; the first of equal ones stays."""
        if self._page_of.setdefault(key, page) is page:
            self._key_of.update(dict.fromkeys(page, key))

    def find(self, keys: Iterable[bytes]) -> list[Page]:
        """The stored pages of the longest known prefix, each with one more user."""
        found = [self._page_of[key] for key in itertools.takewhile(self._page_of.__contains__, keys)]
        self.pool.share(itertools.chain(*found))
        return found

    def by_group(self, pages: Sequence[Page]) -> list[list[int]]:
        """Block numbers of each KV group, as StepBatchBuilder takes them."""
        pairs = [pair for page in pages for pair in zip(self.group_of, page, strict=True)]
        return [[block for at, block in pairs if at == group] for group in range(self.group_of[-1] + 1)]
