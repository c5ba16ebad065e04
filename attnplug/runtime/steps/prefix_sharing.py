"""Steps whose requests read shared prefixes together, or verify trees of drafts: found, built and run by layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import CrossAttentionSpec
from attnplug.core.prefix_sharing import sharing_refusal, tree_refusal
from attnplug.core.spec import Phase
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.batch.draft_trees import DraftTree
from attnplug.runtime.batch.engine_values import Ints
from attnplug.runtime.batch.forest import Forest, Reach, find_forest, may_share, reach_of
from attnplug.runtime.batch.forest_prices import LayerPrices, SharingPrices, prices_of
from attnplug.runtime.batch.step_batch import HostRows, StepBatch
from attnplug.runtime.steps.attention_groups import AttentionGroup
from attnplug.runtime.steps.forest_parts import Paths, Rows, node_paths, piece_rows, rest_rows
from attnplug.runtime.steps.runtime_layer import RuntimeLayer
from attnplug.runtime.steps.shared_step import SharedStep, shared_step
from attnplug.runtime.steps.twin_layers import TwinLayers, Twins


class SharingLayers(NamedTuple):
    """The layers of an attention group with one window, as they can share."""

    group: AttentionGroup
    names: tuple[str, ...]
    left: int
    chunk: int | None
    prices: LayerPrices | None
    source: str
    refusal: str | None
    tree_refusal: str | None
    twins: TwinLayers

    @property
    def sees_all(self) -> bool:
        """Whether no window or chunk leaves blocks behind, as both do with each token."""
        return self.left < 0 and self.chunk is None


_STEPS = 64
"""Decode steps after which prefixes are looked for again, though no request came, left or moved."""


@dataclasses.dataclass(slots=True)
class _Remembered:
    """What a decode step found: its requests share the same blocks in later ones, which only append to their tables."""

    names: list[str]
    computed: Ints
    first: npt.NDArray[np.int32]
    found: Forest | str
    steps: int = 0

    def serves(self, host: HostRows, table: npt.NDArray[np.int32]) -> bool:
        """Whether a step decodes the same requests in the same order.

        None may have gone back to fewer computed tokens, or have given its first block away, as `free_blocks` lets it.
        """
        self.steps += 1
        return (
            host.names is self.names
            and self.steps < _STEPS
            and bool((host.scheduled == 1).all())
            and bool((host.computed >= self.computed).all())
            and bool((table[:, 0] == self.first).all())
        )


class PrefixSharing(NotCopied):
    """The layers of a runtime whose requests may read a prefix together, in the steps where that pays.

    Args:
        groups: the builders of the layers with pages.
        layers: all layers by name.
        decisions: of all layers.
        config: the limits of a step.
        device: of the layers.
        prices: of all layers; True for those of each backend on the device, and False shares nothing.
        sharded: layers whose tokens ranks share.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        layers: Mapping[str, RuntimeLayer],
        decisions: Mapping[str, Decision],
        config: BuilderConfig,
        device: torch.device,
        prices: SharingPrices | bool,
        sharded: Collection[str] = (),
    ) -> None:
        self._device, self._config = device, config
        self._remembered: dict[tuple[object, ...], _Remembered] = {}
        self.layers: list[SharingLayers] = []
        """By attention group and window."""
        self.notes: tuple[str, ...] = ()
        """Of the last step: for each group of layers, what was shared, or why nothing was."""
        for group in groups:
            by_window: dict[tuple[int, int | None, tuple[str | None, str | None]], list[str]] = {}
            for name in group.layer_names:
                spec = layers[name].spec
                asked = group.backend, spec, decisions[name].device, group.kv_cache_spec.block_size
                reason = _place_refusal(name in sharded, group.fast_prefill)
                refusals = reason or sharing_refusal(*asked), reason or tree_refusal(*asked)
                by_window.setdefault((spec.window[0], spec.chunk_size, refusals), []).append(name)
            for (left, chunk, refusals), names in by_window.items():
                heads = layers[names[0]].spec.num_heads
                own, source = _own_prices(prices, decisions[names[0]], device)
                priced = LayerPrices.of(own, heads, group.kv_cache_spec) if own else None
                twins = TwinLayers(group, tuple(names), layers, decisions, config, device)
                self.layers.append(
                    SharingLayers(group, tuple(names), left, chunk, priced, source, *refusals, twins)
                )

    def close(self) -> None:
        """Release the twins of the layers."""
        self.layers.clear()
        self._remembered.clear()

    @property
    def tree_refusal(self) -> str | None:
        """The first layer that cannot verify trees, and why; None if all can. Cross attention sees no drafts."""
        for each in self.layers:
            if each.tree_refusal is not None and not isinstance(each.group.kv_cache_spec, CrossAttentionSpec):
                return f"layer {each.names[0]}: {each.tree_refusal}"
        return None

    def check_trees(self, batch: StepBatch, is_given: bool) -> None:
        """BatchError if a layer cannot verify the trees of a step, or the batch or its metadata `is_given` by hand."""
        found = sorted(batch.trees)
        if is_given or not batch.is_as_made:
            limit = "cannot be verified in a draft step, with metadata, or by a batch that was changed"
            raise BatchError(
                "batch.trees", found, limit, "begin the step with the batch of step(trees=...) alone"
            )
        if self.tree_refusal is not None:
            limit = f"cannot be verified by {self.tree_refusal}"
            raise BatchError("batch.trees", found, limit, "verify drafts as a chain")

    def begin(self, batch: StepBatch, own_prefix: Collection[str]) -> dict[str, SharedStep]:
        """The shared steps by layer; the other layers run plainly.

        Args:
            batch: the step.
            own_prefix: the layers whose builder attends a prefix by a kernel of its own.
        """
        notes, steps = list[str](), dict[str, SharedStep]()
        trees = trees_of(batch)
        for each, forest in self.forests(batch, own_prefix):
            at = each.group.kv_cache_group_id
            notes.append(note_of(each, forest, len(trees)))
            if batch.host is not None and (trees or not isinstance(forest, str)):
                nodes = None if isinstance(forest, str) else forest
                calls, paths = parts_of(batch, batch.host, each, nodes)
                made = shared_step(calls, paths, *batch.of_group(at), batch.common.num_actual_tokens)
                steps.update(dict.fromkeys(each.names, made))
        self.notes = tuple(notes)
        return steps

    def forests(
        self, batch: StepBatch, own_prefix: Collection[str] = (), piece_rows: int = 0
    ) -> Iterator[tuple[SharingLayers, Forest | str]]:
        """The layers with the prefixes that they share in a step, or why they share none; arguments as `begin`.

        With `piece_rows`, the new tokens of a piece in a graph, the price is that of the graph.
        """
        host, trees = batch.host, trees_of(batch)
        found: dict[tuple[object, ...], Forest | str] = {}
        for each in self.layers:
            at = each.group.kv_cache_group_id
            if at in batch.cross_groups or host is None or not host.scheduled.any():
                continue
            key = at, each.left, each.chunk, each.prices, each.refusal
            if key not in found:
                found[key] = self._found((*key, piece_rows), batch, host, each, trees, piece_rows)
            forest = found[key]
            if each.names[0] in own_prefix and (
                isinstance(forest, str) or forest.saved < _BETTER * _saved_by_own(batch, host, each)
            ):
                forest = "the backend attends the prefix of all requests by its own kernel"
            yield each, forest

    def _found(
        self,
        key: tuple[object, ...],
        batch: StepBatch,
        host: HostRows,
        each: SharingLayers,
        trees: Mapping[int, DraftTree],
        piece_rows: int,
    ) -> Forest | str:
        """`_find`, or what it gave for an earlier decode of the same requests."""
        before = self._remembered.get(key)
        lasts = each.sees_all and not trees
        table = host.tables[each.group.kv_cache_group_id]
        if lasts and before is not None and before.serves(host, table):
            return before.found
        forest = self._find(batch, host, each, trees, piece_rows)
        if lasts and host.names is not None and bool((host.scheduled == 1).all()):
            self._remembered[key] = _Remembered(host.names, host.computed, table[:, 0].copy(), forest)
        return forest

    def _find(
        self,
        batch: StepBatch,
        host: HostRows,
        each: SharingLayers,
        trees: Mapping[int, DraftTree],
        piece_rows: int,
    ) -> Forest | str:
        """The nodes of a step that are worth their calls, or why there are none."""
        if each.refusal is not None:
            return each.refusal
        if each.prices is None:
            return each.source
        at, prices = each.group.kv_cache_group_id, each.prices
        table = host.tables[at]
        if table.shape[0] < 2 or (each.sees_all and not may_share(table)):
            return "no blocks are shared"
        plain = prices.plain(int((host.computed + host.scheduled).sum()))
        if not piece_rows and prices.waits(plain):
            return f"a plain layer takes {plain * 1e6:.0f} us, and the host more for shared prefixes"
        host_time = prices.of_graph(len(each.names)) if piece_rows else 0.0
        # No forest saves all of a plain layer, so most steps of short requests need no search.
        if not prices.pays(plain - host_time, plain):
            return f"a plain layer takes {plain * 1e6:.0f} us, too little for further calls"
        size = batch.block_sizes[at]
        reach = _reach(host, size, each, trees)
        saves = functools.partial(prices.saved, piece_rows=piece_rows)
        forest = find_forest(table, size, host.scheduled, reach, saves)
        if forest is None:
            return "no shared blocks are worth a call of their own"
        tokens = int(host.scheduled.sum())
        saved = forest.saved - host_time - (tokens * prices.merge if prices.safety else 0)
        if not prices.pays(saved, plain):
            return f"shared blocks would save {saved * 1e6:.0f} us, too little for further calls"
        return forest


_BETTER = 1.5
"""The savings of all shared prefixes, over those of the one prefix that a backend's own kernel attends, that are worth calls."""


def _saved_by_own(batch: StepBatch, host: HostRows, each: SharingLayers) -> float:
    """The seconds that a kernel saves which attends the prefix of all requests once."""
    if each.prices is None:
        return 0.0
    shared = int(batch.shared_prefix_lens[each.group.kv_cache_group_id])
    return each.prices.saved(host.scheduled.size, int(host.scheduled.sum()), shared)


def trees_of(batch: StepBatch) -> dict[int, DraftTree]:
    """The trees of a step by the index of their request, in the step's order."""
    if not batch.trees:
        return {}
    return {at: batch.trees[name] for at, name in enumerate(batch.req_ids) if name in batch.trees}


def parts_of(
    batch: StepBatch, host: HostRows, each: SharingLayers, forest: Forest | None
) -> tuple[list[tuple[Twins, Rows]], Paths | None]:
    """The ordinary batches of a step, and the paths of its trees.

    Args:
        batch: the step.
        host: its requests.
        each: the layers.
        forest: the prefixes that are shared; None for trees alone.
    """
    at, trees = each.group.kv_cache_group_id, trees_of(batch)
    table, size = host.tables[at], batch.block_sizes[at]
    reach = _reach(host, size, each, trees)
    is_tree = np.zeros(host.scheduled.size, dtype=bool)
    is_tree[list(trees)] = True
    kept = reach.first * is_tree if forest is None else forest.kept
    nodes = [] if forest is None else forest.nodes
    calls: list[tuple[Twins, Rows]] = []
    rest = rest_rows(host, size, kept, is_tree)
    if rest.rows.size:
        calls.append((each.twins.rest(), rest))
    pieces = piece_rows(host, table, size, nodes, kept, trees)
    if pieces is not None:
        calls.append((each.twins.pieces(), pieces))
    if not trees:
        return calls, None
    return calls, node_paths(host, table, size, reach.first, trees, each.left, each.chunk)


def note_of(each: SharingLayers, forest: Forest | str, trees: int) -> str:
    """What layers share in a step, or why nothing; `trees` is the number of requests with one."""
    where = f"KV group {each.group.kv_cache_group_id}, {each.group.backend.get_name()}"
    where += f": trees of {trees} requests; " if trees else ": "
    by = f", by {each.source}" if each.source and each.prices is not None else ""
    if isinstance(forest, str):
        return f"{where}plain, {forest}{by}"
    readers = sum(node.readers.size for node in forest.nodes)
    return f"{where}{len(forest.nodes)} shared prefixes with {readers} readers{by}"


def _own_prices(
    prices: SharingPrices | bool, decision: Decision, device: torch.device
) -> tuple[SharingPrices | None, str]:
    """The prices of a layer, and their source where they are not built in; without prices, why."""
    if isinstance(prices, SharingPrices):
        return prices, ""
    if not prices:
        return None, "prefix_sharing=False"
    if decision.sharing_prices is not None:
        return decision.sharing_prices.prices, str(decision.sharing_prices)
    # The name of a composite's class ends with the backend of its last range of steps.
    found = prices_of(device, decision.members[Phase.DECODE])
    unknown = (
        "no prices of shared prefixes are known; run attnplug tune, or give prefix_sharing=SharingPrices(...)"
    )
    return found, "" if found is not None else unknown


def _place_refusal(is_sharded: bool, is_fast: bool) -> str | None:
    if is_sharded:
        return "context parallelism: a rank has a part of each prefix"
    return "fast prefill: a step computes some rows only" if is_fast else None


def _reach(host: HostRows, size: int, each: SharingLayers, trees: Mapping[int, DraftTree]) -> Reach:
    if not trees:
        return reach_of(host.computed, host.scheduled, size, each.left, each.chunk)
    spans, is_tree = host.scheduled.copy(), np.zeros(host.scheduled.size, dtype=bool)
    for request, tree in trees.items():
        spans[request], is_tree[request] = int(tree.depths.max()) + 1, True
    return reach_of(host.computed, spans, size, each.left, each.chunk, is_tree)
