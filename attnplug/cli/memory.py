"""`attnplug select --memory`: the KV cache that fits into device memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnplug.cli.output import console, layers_in_words
from attnplug.core.whole_words import WordTable

if TYPE_CHECKING:
    from attnplug.registry.decision import Decision
    from attnplug.runtime.budget import MemoryBudget

_KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "mla",
    "CrossAttentionSpec": "cross",
}


def budget_for(
    decisions: Mapping[str, Decision], kv_sharing: Mapping[str, str], memory: str
) -> MemoryBudget | None:
    """The KV cache that fits into `memory`; None if a layer has no backend, so no known page size.

    Raises:
        LayoutError: `memory` cannot be parsed or is too small, or pages cannot be made equal.
    """
    from attnplug.core.config import CONTEXT_CHUNK_ROWS
    from attnplug.runtime.budget import fit_kv_cache, most_workspace_bytes, parse_memory
    from attnplug.runtime.grouping import group_kv_caches, unify_page_sizes
    from attnplug.runtime.plan_pages import planned_caches

    size = parse_memory(memory)
    if not all(decisions.values()):
        return None
    caches = unify_page_sizes(planned_caches(decisions))
    workspace = most_workspace_bytes((each.spec for each in decisions.values()), CONTEXT_CHUNK_ROWS)
    config = group_kv_caches(caches, kv_sharing=kv_sharing)
    return fit_kv_cache(config, size, prefill_workspace=workspace)


def print_budget(budget: MemoryBudget | None, memory: str) -> None:
    """Print groups, page bytes, blocks and tokens, and the prefill workspace if a layer has latents."""
    from attnplug.core.config import CONTEXT_CHUNK_ROWS

    out = console()
    if budget is None:
        out.print(f"\nNo estimate for {memory}: a layer has no backend, so its page size is unknown.")
        return
    if not budget.groups:
        out.print(f"\nNo estimate for {memory}: no layer keeps a KV cache.")
        return
    longest = "a sequence of any length fits"
    if budget.max_tokens is not None:
        longest = f"the longest sequence that fits has {budget.max_tokens:,} tokens"
    out.print(
        f"\nKV cache in {memory}: {budget.num_blocks:,} blocks of {budget.bytes_per_block:,} bytes "
        f"(one is the null block);\n{longest}.\n"
    )
    if budget.prefill_workspace:
        out.print(
            f"Prefill workspace of latent attention, taken from the {memory}:\n"
            f"{budget.prefill_workspace:,} bytes for {CONTEXT_CHUNK_ROWS:,} rows of context.\n"
        )
    columns = ("group", "kind", "layers", "which", "block", "page bytes", "blocks", "tokens alone")
    numbers = ("group", "layers", "block", "page bytes", "blocks", "tokens alone")
    shown = WordTable(columns, right=numbers, heading="group {group}: layers {which}")
    for index, group in enumerate(budget.groups):
        cache = group.kv_cache_spec
        shown.add_row(
            str(index),
            _KINDS[type(cache).__name__],
            str(len(group.layer_names)),
            layers_in_words(group.layer_names, 2),
            str(cache.block_size),
            f"{cache.page_size_bytes:,}",
            f"{budget.usable_blocks:,}",
            f"{budget.tokens_of(group):,}",
        )
    out.print(shown)
    if budget.padding_layers:
        out.print(f"\nPadding to groups of equal size uses the pages of {budget.padding_layers} more layers.")
