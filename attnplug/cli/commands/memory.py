"""`attnplug select --memory`: the KV cache that fits into device memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnplug._system.terminal_tables import Paragraph, WrappedTable
from attnplug.cli.output.output import console, layers_in_words

if TYPE_CHECKING:
    from attnplug.integrations.model_spec import ModelSpec
    from attnplug.registry.selection.decision import Decision
    from attnplug.runtime.plan.budget import MemoryBudget

_KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "mla",
    "CrossAttentionSpec": "cross",
}


_STATES = ("mamba", "linear_attention", "conv", "recurrent", "rwkv", "xlstm")
"""Kinds of other layers that keep a state of fixed size for each request."""
_ENCODER = re.compile(r"vision|visual|image|audio|speech|encoder|tower")
"""Names of parts that see a whole input at once, and keep no state."""


def left_out(model: ModelSpec) -> dict[str, int]:
    """The layers whose states the estimate does not count, by kind: they depend on requests, not on tokens."""
    kept = (kind for name, kind in model.other_layers.items() if not _ENCODER.search(name))
    kinds = Counter(re.split(r"[^a-z_0-9]", kind)[0] for kind in kept)
    return {kind: count for kind, count in kinds.items() if kind.startswith(_STATES)}


def budget_for(decisions: Mapping[str, Decision], model: ModelSpec, memory: str) -> MemoryBudget | None:
    """The KV cache that fits into `memory`; None if a layer has no backend, so no known page size.

    The index keys of sparse layers count as part of each block.

    Raises:
        LayoutError: `memory` cannot be parsed or is too small, or pages cannot be made equal.
    """
    from attnplug.core.config import CONTEXT_CHUNK_ROWS
    from attnplug.runtime.plan.budget import fit_kv_cache, index_key_bytes, most_workspace_bytes, parse_memory
    from attnplug.runtime.plan.grouping import group_kv_caches, unify_page_sizes
    from attnplug.runtime.plan.plan_pages import planned_caches

    size = parse_memory(memory)
    if not all(decisions.values()):
        return None
    caches = unify_page_sizes(planned_caches(decisions))
    workspace = most_workspace_bytes((each.spec for each in decisions.values()), CONTEXT_CHUNK_ROWS)
    config = group_kv_caches(caches, kv_sharing=model.kv_sharing)
    keys = sum(
        caches[name].block_size * index_key_bytes(decisions[name].spec, elements)
        for name, elements in model.index_keys.items()
        if name in caches
    )
    return fit_kv_cache(config, size, prefill_workspace=workspace, index_keys=keys)


def print_budget(budget: MemoryBudget | None, model: ModelSpec, memory: str) -> None:
    """Print groups, page bytes, blocks and tokens, the prefill workspace of latents, and what the estimate leaves out."""
    out = console()
    _print_blocks(budget, model, memory)
    states = left_out(model)
    if states:
        counted = " and ".join(f"{count} {kind}" for kind, count in states.items())
        out.print()
        out.print(
            Paragraph(
                f"Not counted: the states of {counted} layers. Each request needs them once, whatever its length. "
                f"Take them from the memory yourself."
            )
        )


def _print_blocks(budget: MemoryBudget | None, model: ModelSpec, memory: str) -> None:
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
    if budget.index_keys:
        share = budget.index_keys / (budget.bytes_per_block - budget.index_keys)
        out.print(
            f"Index keys of {len(model.index_keys)} sparse layers: {budget.index_keys:,} bytes of each block, "
            f"{share:.0%} of its pages.\n"
        )
    columns = ("group", "kind", "layers", "which", "block", "page bytes", "blocks", "tokens alone")
    numbers = ("group", "layers", "block", "page bytes", "blocks", "tokens alone")
    shown = WrappedTable(columns, right=numbers, heading="group {group}: layers {which}")
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
