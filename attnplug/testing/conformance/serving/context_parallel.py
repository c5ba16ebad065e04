"""Each request's keys on several ranks, simulated in one process: the ranks' partial results merge to the whole.

An impl knows the context-parallel groups that from_spec was given, or refuses them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from attnplug.core.context_parallel import ContextParallel
from attnplug.core.features import Feature
from attnplug.core.metadata import PAD_SLOT_ID
from attnplug.core.spec import LayerSpec
from attnplug.ops.merging import merge_attn_states
from attnplug.registry.plugins.waiting import describe
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import with_lengths
from attnplug.testing.conformance.check import (
    Check,
    ConformanceError,
    Level,
    error_context,
)
from attnplug.testing.conformance.harness import Harness, Output, make_impl
from attnplug.testing.conformance.mistakes.deviation import deviation
from attnplug.testing.conformance.mistakes.expectations import difference, wrong_answer
from attnplug.testing.conformance.numbers.merging import (
    forms_of_groups,
    layer_to_divide,
    part_mistake,
    without_mask,
)
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors
from attnplug.testing.pages import block_table, poisoned_cache, put


@dataclasses.dataclass(frozen=True, slots=True)
class _Sharing:
    """Runs of `interleave` tokens go round `ranks` ranks; token p is on rank p // interleave % ranks."""

    ranks: int
    interleave: int

    def positions(self, tokens: int, rank: int) -> torch.Tensor:
        """The positions of a request of `tokens` tokens that are on a rank."""
        positions = torch.arange(tokens)
        return positions[positions // self.interleave % self.ranks == rank]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _RankStep:
    """The step of one rank, and whether it writes keys and counts the sinks."""

    name: str
    batch: Batch
    group: ContextParallel | None
    writes: bool = False
    use_sinks: bool = False


def checks(target: Target) -> Iterator[Check]:
    """The checks of shared requests, where the backend declares LSE, and for other layers than latents NON_CAUSAL."""
    features, is_latent = target.backend.features, target.is_latent
    if Feature.LSE not in features or not (is_latent or Feature.NON_CAUSAL in features):
        return
    more = [(2, "half"), (3, "1"), (2, "block")] if target.level is Level.FULL else []
    runs_of = [
        (_check_decode, "decode", "a decode over keys on several ranks is the decode over all keys"),
        (_check_extend, "extend", "new tokens after a context on several ranks are those after all keys"),
    ]
    for has_sinks in (False, True) if Feature.SINKS in features else (False,):
        pairs = [(ranks, _RUNS[ranks], fields) for ranks, fields in forms_of_groups(target, has_sinks)]
        for ranks, runs, fields in [*pairs, *((*each, {}) for each in more)]:
            for run, name, summary in runs_of if Feature.DIRECT_KV in features else runs_of[:1]:
                place = "-".join(
                    [f"{name}-{ranks}-ranks-runs-of-{runs}", *["sinks"] * has_sinks, *fields.values()]
                )
                yield Check.of(
                    f"context_parallel/{place}", summary, run, target, ranks, runs, has_sinks, **fields
                )


_RUNS = {2: "1", 3: "block", 4: "half", 8: "1"}
"""The runs of tokens on each rank, by the number of ranks."""


def _layer(
    target: Target, has_sinks: bool, runs: str, ranks: int, **fields: str
) -> tuple[LayerSpec, LayerSpec, int, _Sharing]:
    """The layer, the same without a causal mask, the block size, and how tokens are shared."""
    # Layers with latents stay causal: the runtime decodes their new tokens one by one, so no mask differs between ranks.
    spec, size = layer_to_divide(target, has_sinks, **fields)
    free = spec if spec.mla else without_mask(target, spec)
    return spec, free, size, _Sharing(ranks, {"1": 1, "half": max(size // 2, 1), "block": size}[runs])


def _check_decode(target: Target, ranks: int, runs: str, has_sinks: bool, **fields: str) -> None:
    spec, free, size, sharing = _layer(target, has_sinks, runs, ranks, **fields)
    # All ranks but one have no keys of the first request.
    lengths = [1, 5 * size + 3, size, 2 * size + 1, 7]
    whole = target.batch(spec, [1] * len(lengths), lengths, exact=True)
    parts = []
    for rank in range(ranks):
        batch = _on_rank(target, whole, free, size, sharing, rank, lengths, written=1)
        parts.append(
            _RankStep(f"rank {rank}", batch, ContextParallel(ranks, rank), True, use_sinks=rank == 0)
        )
    _expect_merged(target, whole, parts, sharing, lengths)


def _check_extend(target: Target, ranks: int, runs: str, has_sinks: bool, **fields: str) -> None:
    spec, free, size, sharing = _layer(target, has_sinks, runs, ranks, **fields)
    direct = target.changed(spec, direct_kv=True)
    context, new = [3 * size + 2, 0, 1, 2 * size], [3, size + 5, 4, 2]
    lengths = [old + more for old, more in zip(context, new, strict=True)]
    whole = target.batch(spec, new, lengths, exact=True)
    parts = []
    for rank in range(ranks):
        batch = _on_rank(target, whole, free, size, sharing, rank, context)
        parts.append(_RankStep(f"the context of rank {rank}", batch, ContextParallel(ranks, rank)))
    # The caller chooses the part with the sinks: here no rank has them, and in decodes the first one.
    parts.append(_RankStep("the new tokens", _new_tokens(whole, direct, new), None, True, use_sinks=True))
    _expect_merged(target, whole, parts, sharing, context)


def _on_rank(
    target: Target,
    whole: Batch,
    spec: LayerSpec,
    size: int,
    sharing: _Sharing,
    rank: int,
    tokens: Sequence[int],
    written: int = 0,
) -> Batch:
    """The whole batch's queries over a rank's keys among the first `tokens` of each request.

    The last `written` of them are not in the rank's pages yet: `forward` writes those of the rank.
    """
    generator, device = torch.Generator().manual_seed(rank), whole.query.device
    own = [sharing.positions(count, rank) for count in tokens]
    lengths = [len(positions) for positions in own]
    table, blocks = block_table(lengths, size, generator)
    cache = poisoned_cache(spec, blocks, size, target.backend.supported_kv_cache_layouts()[0], target.backend)
    pages = target.backend.split_kv(cache, spec)
    slots = torch.full_like(whole.common.slot_mapping.cpu(), PAD_SLOT_ID)
    for row, (positions, count) in enumerate(zip(own, tokens, strict=True)):
        places = torch.arange(len(positions))
        at = table[row].long()[places // size]
        old = positions < count - written
        for each, tokens_of in zip(pages, (whole.keys[row], whole.values[row]), strict=True):
            # The whole batch's keys and values are those that its pages give back.
            kept = tokens_of[positions[old]]
            put(each, at[old], places[old] % size, kept, kept, spec, 1.0)
        first = int(whole.common.query_start_loc_cpu[row])
        slots[first + positions[~old] - (count - written)] = (at * size + places % size)[~old]
    common = dataclasses.replace(
        with_lengths(whole.common, torch.tensor(lengths)),
        block_table_tensor=table.to(device),
        slot_mapping=slots.to(device),
        causal=spec.causal,
    )
    on_device = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=device)
    return dataclasses.replace(
        whole,
        spec=spec,
        common=common,
        kv_cache=on_device.copy_(cache),
        keys=[keys[positions] for keys, positions in zip(whole.keys, own, strict=True)],
        values=[values[positions] for values, positions in zip(whole.values, own, strict=True)],
        seq_lens=lengths,
    )


def _new_tokens(whole: Batch, spec: LayerSpec, new: Sequence[int]) -> Batch:
    """The new tokens alone, with K and V in the call."""
    common = dataclasses.replace(
        with_lengths(whole.common, torch.tensor(new)),
        slot_mapping=torch.full_like(whole.common.slot_mapping, PAD_SLOT_ID),
    )
    return dataclasses.replace(
        whole,
        spec=spec,
        common=common,
        kv_cache=None,
        keys=[keys[len(keys) - count :] for keys, count in zip(whole.keys, new, strict=True)],
        values=[values[len(values) - count :] for values, count in zip(whole.values, new, strict=True)],
        seq_lens=list(new),
    )


def _expect_merged(
    target: Target, whole: Batch, parts: Sequence[_RankStep], sharing: _Sharing, tokens: Sequence[int]
) -> None:
    """Run each rank's part and compare the merged result with the whole batch's."""
    found = [_run(target, part) for part in parts]
    lses = [answer.lse for answer in found if answer.lse is not None]
    merged = Output(*merge_attn_states([answer.output for answer in found], lses))
    problem = difference(whole, merged)
    if problem is None:
        return
    problem = f"{sharing.ranks} ranks with runs of {sharing.interleave} tokens, merged: {problem}"
    for part, answer in zip(parts, found, strict=True):
        counted = part.batch
        if not part.use_sinks:
            # As the oracle of a part without sinks sees it; known mistakes are compared with its rules.
            tensors, spec = (
                dataclasses.replace(counted.tensors, sinks=None),
                counted.spec.replace(has_sinks=False),
            )
            counted = dataclasses.replace(counted, spec=spec, tensors=tensors)
        if wrong := deviation(counted, answer):
            mistake = part_mistake(part.batch, answer, part.use_sinks) or _length_mistake(
                part, answer, sharing, tokens
            )
            raise wrong_answer(f"{problem}; {part.name} alone: {wrong.problem}", mistake, wrong)
    raise wrong_answer(f"{problem}; each part alone is within its tolerance", None)


def _run(target: Target, part: _RankStep) -> Output:
    # Only an impl that says so works in a group; for any other, a rank's step is an ordinary one.
    group = part.group if target.backend.get_impl_cls().can_return_lse_for_decode else None
    with error_context(part.name):
        harness = Harness.of(target, part.batch, dcp=group)
        metadata = harness.builder.build(0, part.batch.common)
        return harness.run(part.batch, metadata, use_sinks=part.use_sinks, writes=part.writes)


def _length_mistake(part: _RankStep, answer: Output, sharing: _Sharing, tokens: Sequence[int]) -> str | None:
    """The name of the wrong number of local keys that gives a rank's answer."""
    if part.group is None:
        return None
    rank, batch = part.group.rank, part.batch
    others = {
        f"owner rule with runs of {runs} tokens": [
            len(_Sharing(sharing.ranks, runs).positions(n, rank)) for n in tokens
        ]
        for runs in sorted(
            {1, sharing.interleave * 2, math.ceil(sharing.interleave / 2)} - {sharing.interleave}
        )
    }
    others["local lengths of rank 0"] = [len(sharing.positions(n, 0)) for n in tokens]
    again = "local lengths shared among the ranks again"
    others[again] = [len(sharing.positions(n, rank)) for n in batch.seq_lens]
    single = _Sharing(sharing.ranks, 1)
    others[f"{again}, token by token"] = [len(single.positions(n, rank)) for n in batch.seq_lens]
    for name, lengths in others.items():
        # Keys past a rank's own are in no page.
        fewer = [min(pair) for pair in zip(lengths, batch.seq_lens, strict=True)]
        cut = dataclasses.replace(
            batch,
            keys=[keys[:count] for keys, count in zip(batch.keys, fewer, strict=True)],
            values=[values[:count] for values, count in zip(batch.values, fewer, strict=True)],
            seq_lens=fewer,
        )
        kept = [
            index
            for index, pair in enumerate(zip(lengths, batch.seq_lens, strict=True))
            if pair[0] <= pair[1]
        ]
        if fewer != batch.seq_lens and _agrees(cut, answer, kept, part.use_sinks):
            return name
    return None


def _agrees(batch: Batch, answer: Output, requests: Sequence[int], use_sinks: bool) -> bool:
    """Whether the rows of some requests are the oracle's."""
    starts = batch.common.query_start_loc_cpu.tolist()
    rows = [row for index in requests for row in range(starts[index], starts[index + 1])]
    wrong = deviation(batch, answer, use_sinks=use_sinks)
    return wrong is None or (bool(rows) and not bool(wrong.wrong[rows].any()))


_FLAGS = {"dcp": "can_return_lse_for_decode", "pcp": "supports_pcp"}
# A group of three, and one whose rank is in no smaller group.
_GROUPS = (ContextParallel(3, 1), ContextParallel(8, 5))


def rank_checks(target: Target) -> Iterator[Check]:
    """One check for each kind of group."""
    for field in _FLAGS:
        summary = f"an impl knows its rank in the group {field}, or refuses the group"
        yield Check.of(f"context_parallel/ranks-{field}", summary, _check_ranks, target, field)


def _check_ranks(target: Target, field: str) -> None:
    for group in _GROUPS:
        _expect_rank(target, field, group)


def _expect_rank(target: Target, field: str, group: ContextParallel) -> None:
    backend, flag, given = target.backend, _FLAGS[field], f"{field}={group}"
    spec = target.spec()
    shared: dict[str, Any] = {field: group, "options": target.own_options}
    try:
        impl = make_impl(backend, spec, layer_tensors(spec, device=target.torch_device), **shared)
    except Exception as problem:
        if getattr(backend.get_impl_cls(), flag):
            raise ConformanceError(
                f"from_spec refuses {given}, though {flag} is True: {describe(problem)}"
            ) from problem
        return
    wanted: dict[str, Any] = {f"{field}_world_size": group.size, f"{field}_rank": group.rank}
    if field == "dcp":
        wanted["need_to_return_lse_for_decode"] = True
    for name, value in wanted.items():
        if (found := getattr(impl, name, None)) != value:
            raise ConformanceError(
                f"from_spec was given {given}, and impl.{name} is {found!r}, not {value!r}: "
                f"pass {field} on to super().from_spec, or refuse the group with a SpecError"
            )
