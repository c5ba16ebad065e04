"""Layers that ask for `invariance` give equal bits: each request alone and beside others, its tokens in any step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from attnplug.core.batch.ubatch import UBatchSlice, split_attn_metadata
from attnplug.core.features import FEATURES, Feature
from attnplug.core.invariance import INVARIANCES
from attnplug.core.metadata import AttentionCGSupport
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.testing.batches import Batch
from attnplug.testing.captures import captured
from attnplug.testing.conformance.cases.steps import select_requests
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, SkipKind
from attnplug.testing.conformance.harness import Harness, Output, request_words
from attnplug.testing.conformance.target import GPU_TYPES, Target
from attnplug.testing.drawn_values import FP8_SCALES
from attnplug.testing.views import between

_SUMMARIES = {
    "batch": "the bits of a request are the same alone and beside others, in any order and on any pages",
    "rows": "the bits of a row are the same whichever tokens of its request are in the step",
    "heads": "the bits of a head are the same beside fewer heads",
}
_STEPS: Mapping[str, tuple[Sequence[int], Sequence[int]]] = {
    # Kernels that pad to the longest of a group are found by requests of almost equal length.
    "decodes of almost equal length": ([1] * 6, [130, 131, 137, 146, 30, 238]),
    "decodes, drafts and prompts": ([1, 1, 3, 20, 70], [200, 9, 40, 60, 70]),
    "one long beside short": ([1, 1, 1, 5], [700, 31, 5, 140]),
    "prompts of almost equal length": ([33, 40, 34, 300], [33, 40, 34, 300]),
}
_PLAIN_STEPS = tuple(_STEPS)
_FEATURE_STEPS = _PLAIN_STEPS[:2]
_PADDING = 3
# A prompt whose cuts fall inside of tiles, at their ends, and at its own.
_PROMPT = 150
_TAILS = (1, 2, 3, 8, 17, 64, 149)
_BEGINNINGS = (1, 16, 70, 128)


class _Step(NamedTuple):
    """A batch, and the output and LSE of its own rows."""

    batch: Batch
    found: Output

    def rows(self, request: int) -> list[torch.Tensor]:
        starts = self.batch.common.query_start_loc_cpu.tolist()
        own = slice(starts[request], starts[request + 1])
        return [part[own] for part in self.found if part is not None]


def checks(target: Target) -> Iterator[Check]:
    """For each word that the backend keeps: a check of the plainest layer, and one for each feature, dtype and layout."""
    if Feature.INVARIANCE not in target.backend.features:
        return
    for word in INVARIANCES:
        if word not in target.backend.supported_invariances:
            continue
        for name, fields in _layers(target):
            steps = _PLAIN_STEPS if name == "plain" else _FEATURE_STEPS
            check = functools.partial(_CHECKS[word], steps=steps)
            yield Check.of(f"invariance/{word}-{name}", _SUMMARIES[word], check, target, **fields)
    if target.device.type in GPU_TYPES and target.backend.supported_invariances:
        summary = "a graph of decodes gives the bits of the same step without it, also of fewer requests"
        yield Check.of("invariance/graph", summary, _check_graph, target)


def _layers(target: Target) -> Iterator[tuple[str, dict[str, Any]]]:
    """A name and the fields of each layer that is tried."""
    yield "plain", {}
    size = target.backend.get_preferred_block_size()
    for flag in FEATURES:
        if flag in target.backend.features and flag not in (Feature.MLA, Feature.INVARIANCE):
            yield flag.names()[0], flag.fields(64, size)
    for dtype in target.dtypes[1:]:
        yield dtype, {"dtype": dtype}
    for layout in target.backend.supported_kv_cache_layouts()[1:]:
        yield layout, {"layout": layout}


def _check_batch(target: Target, steps: Sequence[str], layout: str | None = None, **fields: Any) -> None:
    spec = target.spec(**fields, invariance=("batch",))
    for name in steps:
        whole = _run(target, _batch(target, spec, *_STEPS[name], layout))
        count = whole.batch.common.num_reqs
        together = list(range(count))
        for request in together:
            alone = _run(target, select_requests(whole.batch, [request]))
            if (differs := _differs(alone.rows(0), whole.rows(request))) is not None:
                raise ConformanceError(_beside(target, whole.batch, request, alone, name, differs))
        # Requests in another order, on other pages, in a wider table, beside fewer.
        for order in (together[::-1], together[1:], together[: count // 2]):
            moved = _run(target, _moved(target, select_requests(whole.batch, order)))
            for place, request in enumerate(order):
                if (differs := _differs(moved.rows(place), whole.rows(request))) is not None:
                    what = "in another order, on other pages and in a wider table"
                    raise ConformanceError(_text("batch", whole.batch, request, differs, f"{what}, {name}"))


def _beside(target: Target, batch: Batch, request: int, alone: _Step, name: str, differs: str) -> str:
    """The text for a request whose bits are others beside all, with the one neighbour that is enough."""
    for other in range(batch.common.num_reqs):
        if other != request:
            pair = sorted((request, other))
            found = _run(target, select_requests(batch, pair))
            one = _differs(alone.rows(0), found.rows(pair.index(request)))
            if one is not None:
                return _text("batch", batch, request, one, f"beside {_words(batch, other)} alone, {name}")
    return _text("batch", batch, request, differs, f"beside all others, {name}")


def _check_rows(target: Target, steps: Sequence[str], layout: str | None = None, **fields: Any) -> None:
    spec = target.spec(**fields, invariance=("rows",))
    if spec.attn_type is not AttentionType.DECODER or not spec.causal:
        raise CheckSkipped("all tokens of such a layer are in one step", SkipKind.OTHER)
    if spec.direct_kv or spec.mm_prefix or spec.sparse is not None:
        raise CheckSkipped("a part of the step would be another request", SkipKind.OTHER)
    prompt = _batch(target, spec, [_PROMPT], [_PROMPT], layout)
    whole = _run(target, prompt)
    # After the step the pages have all tokens, as before a later step.
    cuts = [(_PROMPT - count, _PROMPT) for count in _TAILS] + [(0, count) for count in _BEGINNINGS]
    for first, end in cuts:
        part = _run(target, _tokens(whole.batch, first, end))
        expected = [rows[first:end] for rows in whole.rows(0)]
        if (differs := _differs(part.rows(0), expected)) is not None:
            what = (
                f"tokens {first} to {end - 1} of {_PROMPT} in a step of their own, against the whole prompt"
            )
            raise ConformanceError(_text("rows", whole.batch, 0, differs, what))


def _check_heads(target: Target, steps: Sequence[str], layout: str | None = None, **fields: Any) -> None:
    spec = target.spec(**fields, invariance=("heads",))
    if spec.num_kv_heads < 2 or spec.num_kv_heads % 2:
        raise CheckSkipped(f"{spec.num_kv_heads} KV heads have no halves", SkipKind.OTHER)
    half = spec.replace(num_heads=spec.num_heads // 2, num_kv_heads=spec.num_kv_heads // 2)
    lengths = [33, 70, 150]
    whole = _run(target, _batch(target, spec, lengths, lengths, layout))
    for part in (0, 1):
        own = _run(target, _half(_batch(target, half, lengths, lengths, layout), whole.batch, part))
        for request in range(len(lengths)):
            expected = [rows.chunk(2, 1)[part] for rows in whole.rows(request)]
            if (differs := _differs(own.rows(request), expected)) is not None:
                raise ConformanceError(
                    _text(
                        "heads", whole.batch, request, differs, f"half {part} of the heads without the other"
                    )
                )


def _check_graph(target: Target) -> None:
    spec = target.spec(invariance=tuple(target.backend.supported_invariances))
    new, totals = _STEPS[_PLAIN_STEPS[0]]
    whole = _batch(target, spec, new, totals, None)
    harness = Harness.of(target, whole)
    builder = harness.builder
    if builder.get_cudagraph_support(builder.config, builder.kv_cache_spec) is AttentionCGSupport.NEVER:
        raise CheckSkipped(f"{target.name} declares no CUDA graphs", SkipKind.OTHER)
    metadata = harness.build(whole)
    expected = _Step(whole, harness.run(whole, metadata))
    for count in (len(new), len(new) // 2):
        found = _replayed(target, select_requests(whole, range(count)))
        for request in range(count):
            if (differs := _differs(found.rows(request), expected.rows(request))) is not None:
                what = f"in a graph of {count} decodes, against {len(new)} without one"
                raise ConformanceError(_text("batch", whole, request, differs, what))


def _replayed(target: Target, batch: Batch) -> _Step:
    """The step's output as the second replay of a graph writes it."""
    harness = Harness.of(target, batch)
    metadata, made = harness.build(batch), list[Output]()
    harness.run(batch, metadata)
    torch.cuda.synchronize()
    replay = captured(lambda: made.append(harness.run(batch, metadata)))
    for _ in range(2):
        replay()
    torch.cuda.synchronize()
    return _Step(batch, made[0])


_CHECKS: Mapping[str, Callable[..., None]] = {
    "batch": _check_batch,
    "rows": _check_rows,
    "heads": _check_heads,
}


def _batch(
    target: Target, spec: LayerSpec, new: Sequence[int], totals: Sequence[int], layout: str | None
) -> Batch:
    options: dict[str, Any] = dict(FP8_SCALES) if spec.has_kv_scales else {}
    options |= {} if layout is None else {"layout": layout}
    if spec.is_encoder or spec.direct_kv:
        # All keys of such a request come with its queries.
        new, options = totals, {**options, "exact": True}
    return target.batch(spec, new, totals, padding=_PADDING, **options)


def _run(target: Target, batch: Batch) -> _Step:
    """One step of a new layer over a copy of the pages; the batch that is given back has the written ones."""
    if batch.kv_cache is not None:
        batch = dataclasses.replace(batch, kv_cache=batch.kv_cache.clone())
    harness = Harness.of(target, batch)
    return _Step(batch, harness.run(batch, harness.build(batch)))


def _moved(target: Target, batch: Batch) -> Batch:
    """The step on other pages, in a table with more columns."""
    common, spec, cache = batch.common, batch.spec, batch.kv_cache
    if cache is None:
        return batch
    size = target.backend.for_layer(spec).split_kv(cache, spec)[0].shape[1]
    device, table, slots = cache.device, common.block_table_tensor, common.slot_mapping
    places = torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(cache.shape[0] - 1, 0, -1)]).to(device)
    # Entries past a request's pages name none.
    known = (table >= 0) & (table < len(places))
    table = places.int()[table.long().where(known, 0)].where(known, table)
    table = torch.nn.functional.pad(table, (0, 5), value=int(table[0, -1]))
    slots = (places[slots.clamp(min=0) // size] * size + slots % size).where(slots >= 0, slots)
    moved = dataclasses.replace(common, block_table_tensor=table, slot_mapping=slots)
    return dataclasses.replace(batch, common=moved, kv_cache=cache[places.argsort()])


def _tokens(batch: Batch, first: int, end: int) -> Batch:
    """A step of the tokens `first` to `end` of a step of one prompt, whose pages have them already."""
    rows = slice(first, end)
    (part,) = split_attn_metadata([UBatchSlice(slice(0, 1), rows)], batch.common)
    query, key, value = batch.query[rows], batch.key[rows], batch.value[rows]
    return dataclasses.replace(
        batch, common=part, query=query, key=key, value=value, seq_lens=[end], made_of=None
    )


def _half(half: Batch, whole: Batch, part: int) -> Batch:
    """`half`, of a layer of half the heads, with a half of the numbers of `whole`."""
    query, key, value = (
        between(each.chunk(2, 1)[part].contiguous()) for each in (whole.query, whole.key, whole.value)
    )
    tensors = whole.tensors
    names = ["sinks", "alibi_slopes", *(["k_scale", "v_scale"] if half.spec.head_scales else [])]
    numbers: dict[str, Any] = {
        name: None if (found := getattr(tensors, name)) is None else found.chunk(2)[part].contiguous()
        for name in names
    }
    return dataclasses.replace(
        half,
        query=query,
        key=key,
        value=value,
        tensors=dataclasses.replace(tensors, **numbers),
        common=dataclasses.replace(half.common, selection=whole.common.selection),
        made_of=None,
    )


def _differs(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """How many numbers have other bits, in words; None if none has."""
    for name, one, other in zip(("output", "LSE"), found, expected, strict=False):
        bits = [each.contiguous().view(_BITS[each.element_size()]) for each in (one, other)]
        wrong = bits[0] != bits[1]
        if wrong.any():
            most = float((one.double() - other.double()).abs().nan_to_num(torch.inf).max())
            return f"{int(wrong.sum())} of {wrong.numel()} numbers of the {name} have other bits, by up to {most:.2g}"
    return None


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(batch: Batch, request: int) -> str:
    starts = batch.common.query_start_loc_cpu.tolist()
    new = starts[request + 1] - starts[request]
    return request_words(batch.spec, request, new, batch.seq_lens[request])


def _text(word: str, batch: Batch, request: int, differs: str, what: str) -> str:
    return f"invariance {word}: {_words(batch, request)}: {differs}: {what}"
