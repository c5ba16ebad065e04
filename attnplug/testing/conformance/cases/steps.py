"""The small steps that structural checks run: lengths around page boundaries, decodes first."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from attnplug.core.batch.host import optional_rows
from attnplug.core.features import FEATURES, Feature
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import CheckSkipped, SkipKind
from attnplug.testing.conformance.target import Target
from attnplug.testing.design.search import compile_key

BatchFactory: TypeAlias = Callable[[], Batch]
"""Returns the same batch at each call, as it is before a backend runs it."""

LAYER_KINDS: dict[str, Feature] = {
    "full": Feature(0),
    "window": Feature.SLIDING_WINDOW,
    "chunk": Feature.CHUNKED_LOCAL,
    "spans": Feature.MM_PREFIX,
}
"""Layers for which builders do different work, and the feature that each needs."""

_MOST_KEYS = 4
"""Compile keys of the layers of all features: each compiles kernels of its own."""
_FAR = 1 << 14
"""Keys that no request of these steps has."""

PAGED_SCENARIOS = ("decode", "mixed")
"""Scenarios with K and V in pages."""

_ENCODER = Feature.ENCODER | Feature.DIRECT_KV | Feature.NON_CAUSAL
_DIRECT: dict[str, Any] = {"attn_type": "decoder", "direct_kv": True}


def paged_scenarios(target: Target) -> tuple[str, ...]:
    """PAGED_SCENARIOS; none if the backend serves no layer with K and V in pages, such as one for encoders alone."""
    try:
        target.paged_spec()
    except CheckSkipped:
        # The checks of pages report a backend that serves nothing at all.
        return () if target.serves() else PAGED_SCENARIOS
    return PAGED_SCENARIOS


def layer_kinds(target: Target) -> list[str]:
    """The kinds of LAYER_KINDS that the backend declares."""
    return [kind for kind, feature in LAYER_KINDS.items() if feature in target.backend.features]


def paged_kinds(target: Target) -> list[str]:
    """As `layer_kinds`; none if the backend serves no layer with K and V in pages."""
    return layer_kinds(target) if paged_scenarios(target) else []


def layer_of_kind(target: Target, kind: str, *, paged: bool = False) -> tuple[LayerSpec, int]:
    """A small layer of one of LAYER_KINDS, if `paged` over pages, and its block size; a chunk is two pages.

    Raises:
        CheckSkipped: the backend serves none.
    """
    size = target.backend.get_preferred_block_size()
    wanted: dict[str, dict[str, Any]] = {"window": {"window": (6, 0)}, "chunk": {"chunk_size": 2 * size}}
    wanted["spans"] = {"mm_prefix": True}
    made = target.paged_spec if paged else target.spec
    return with_pages(target, made(**wanted.get(kind, {})))


def with_pages(target: Target, spec: LayerSpec) -> tuple[LayerSpec, int]:
    """The layer with the block size that the backend prefers for it, and that size.

    A layer whose K and V come with the call stays as it is; lengths of its requests are around the size.

    Raises:
        CheckSkipped: the backend refuses the layer with that block size.
    """
    size = target.block_size(spec)
    chosen = spec if spec.direct_kv else spec.replace(block_size=size)
    if reasons := target.reasons(chosen):
        raise CheckSkipped(
            f"{target.name} refuses the block size that it prefers: {'; '.join(reasons)}", SkipKind.LAYER
        )
    return chosen, size


def layer_without_limits(target: Target, **fields: Any) -> tuple[LayerSpec, int]:
    """A decoder layer over pages, with `fields`, whose queries see all keys before them, and its block size.

    For a backend that serves only windows or chunks, it has one that no request reaches.

    Raises:
        CheckSkipped: the backend serves none.
    """
    plain: dict[str, Any] = {"attn_type": "decoder", "direct_kv": False, "causal": True}
    limits: tuple[dict[str, Any], ...] = ({}, {"window": (_FAR, 0)}, {"chunk_size": _FAR})
    problems = []
    for limit in limits:
        try:
            spec, size = with_pages(target, target.spec(**{**plain, **limit, **fields}))
        except CheckSkipped as problem:
            problems.append(problem)
            continue
        reaches = [reach for reach in (spec.window[0], spec.chunk_size) if reach is not None and reach >= 0]
        if all(reach >= _FAR for reach in reaches):
            return spec, size
    raise problems[0]


def mixed_lengths(size: int, more: int = 0) -> tuple[list[int], list[int]]:
    """New and all tokens of two decodes, an extend and a prefill, over pages of `size`.

    `more` tokens of context, at most 2, take no more pages, so two such steps differ in their keys only.
    """
    return [1, 1, 5, size + 3], [max(size - 2, 1) + more, 2 * size + 1 + more, size + 5 + more, size + 3]


def decode_lengths(size: int, more: int = 0, new: int = 1) -> tuple[list[int], list[int]]:
    """New and all tokens of four decodes of `new` tokens, with `more` of context, at most 2."""
    return [new] * 4, [max(size - 2, new) + more, 2 * size + 1 + more, size + 5 + more, 3 + more]


def long_decodes(size: int) -> tuple[list[int], list[int]]:
    """New and all tokens of long and short decodes: backends may switch kernels at some hundred keys."""
    return [1] * 4, [3, 600 + size, size + 1, 300 + size]


def step_factory(
    target: Target, spec: LayerSpec, lengths: tuple[Sequence[int], Sequence[int]], seed: int = 0
) -> BatchFactory:
    """Batches of a step with padding rows and freed window pages."""
    return functools.partial(target.batch, spec, *lengths, padding=3, drop_window=True, seed=seed)


def scenarios(target: Target) -> list[str]:
    """The scenarios that the backend serves: "decode" and "mixed" over pages, "direct" and "encoder" without."""
    features = target.backend.features
    direct = ["direct"] if Feature.DIRECT_KV in features and target.serves(**_DIRECT) else []
    # No step of a backend that only decodes has an encoder.
    has_encoders = _ENCODER in features and target.phase is not Phase.DECODE
    encoder = ["encoder"] if has_encoders and _encoder_type(target) is not None else []
    return [*paged_scenarios(target), *direct, *encoder]


def _encoder_type(target: Target) -> str | None:
    kinds = ("encoder_only", "encoder")
    return next((kind for kind in kinds if target.serves(attn_type=kind, direct_kv=True)), None)


def plain_scenario(target: Target) -> str:
    """The scenario for checks that need only one: "mixed", or without pages the first."""
    found = scenarios(target)
    return "mixed" if "mixed" in found else found[0]


def scenario_layer(target: Target, scenario: str, **fields: Any) -> LayerSpec:
    """A layer for the steps of one of `scenarios`, with `fields` of a LayerSpec.

    Raises:
        CheckSkipped: the backend serves no such layer.
    """
    if scenario == "encoder":
        fields = {"attn_type": _encoder_type(target) or "encoder_only", "direct_kv": True, **fields}
        return target.spec(**fields)
    return target.spec(**_DIRECT, **fields) if scenario == "direct" else target.paged_spec(**fields)


def scenario_factory(target: Target, scenario: str, *, seed: int = 0, **fields: Any) -> BatchFactory:
    """Batches of one of `scenarios` with padding rows, for a layer with `fields` of a LayerSpec.

    Another `seed` gives other values.

    Raises:
        CheckSkipped: the backend serves no such layer.
    """
    return scenario_steps(target, scenario, scenario_layer(target, scenario, **fields), seed)


def scenario_steps(target: Target, scenario: str, spec: LayerSpec, seed: int = 0) -> BatchFactory:
    """As `scenario_factory`, for one layer of the scenario."""
    if scenario == "direct":
        # Two requests have keys of their last tokens only, one as many keys as queries.
        lens = [1, 1, 5, 33], [40, 9, 60, 33]
        return functools.partial(target.batch, spec, *lens, key_lens=[40, 5, 50, 33], padding=3, seed=seed)
    if scenario == "encoder":
        return functools.partial(target.batch, spec, [1, 5, 33], [1, 5, 33], padding=3, seed=seed)
    lengths = (decode_lengths if scenario == "decode" else mixed_lengths)(target.block_size(spec))
    return step_factory(target, spec, lengths, seed)


def of_each_storage(target: Target) -> list[dict[str, Any]]:
    """Fields of layers of the first dtype, the last one and 8-bit pages, for which backends have kernels of their own."""
    half = [{"dtype": target.dtypes[-1]}] if len(target.dtypes) > 1 else []
    return [{}, *half, *({"kv_cache_dtype": name} for name in target.scaled_kv_dtypes[:1])]


def layers_of_each_feature(target: Target) -> list[LayerSpec]:
    """Small layers, no two alike: the plainest, and one for each declared feature, storage type and further dtype.

    Of a backend that compiles, layers with a few compile keys.
    """
    size, features = target.backend.get_preferred_block_size(), target.backend.features
    asked: list[dict[str, Any]] = [
        {},
        *(flag.fields(64, size) for flag in FEATURES if flag in features and flag is not Feature.MLA),
        *({"kv_cache_dtype": name} for name in target.scaled_families.values()),
        *({"dtype": name} for name in target.dtypes[1:]),
    ]
    found: list[LayerSpec] = []
    keys: set[Hashable] = set()
    for fields in asked:
        with contextlib.suppress(CheckSkipped):
            spec = target.spec(**fields)
            key = compile_key(target.backend, spec)
            if spec not in found and (key is None or key in keys or len(keys) < _MOST_KEYS):
                keys.add(key)
                found.append(spec)
    return found


def with_lengths(common: CommonAttentionMetadata, lengths: torch.Tensor) -> CommonAttentionMetadata:
    """The step with other lengths, int32 `[R]` on the host; negative ones become 0."""
    host = lengths.clamp(min=0).int()
    return dataclasses.replace(
        common,
        seq_lens=host.to(common.seq_lens.device),
        seq_lens_host=host.numpy(),
        seq_lens_host_exact=True,
        max_seq_len=int(host.max()),
        _seq_lens_cpu=None,
        _num_computed_tokens_cpu=None,
    )


def select_requests(batch: Batch, requests: Sequence[int]) -> Batch:
    """A batch over pages with these requests only, in this order, over the same cache and without padding."""
    common = batch.common
    starts = common.query_start_loc_cpu.tolist()
    lens = [starts[index + 1] - starts[index] for index in requests]
    new_starts = torch.tensor([0, *lens], dtype=torch.int64).cumsum(0).int()
    seq_lens = [batch.seq_lens[index] for index in requests]
    device = batch.query.device
    own = [row for index in requests for row in range(starts[index], starts[index + 1])]
    rows = torch.tensor(own, dtype=torch.int64, device=device)
    # The keys of a cross layer are the encoder's tokens.
    lengths = batch.seq_lens if batch.spec.attn_type is AttentionType.ENCODER_DECODER else np.diff(starts)
    firsts = [0, *itertools.accumulate(lengths)]
    given = [row for index in requests for row in range(firsts[index], firsts[index + 1])]
    kept = torch.tensor(given, dtype=torch.int64, device=device)
    host = torch.tensor(seq_lens, dtype=torch.int32)
    return dataclasses.replace(
        batch,
        common=dataclasses.replace(
            common,
            query_start_loc=new_starts.to(device),
            query_start_loc_cpu=new_starts,
            seq_lens=host.to(device),
            num_reqs=len(lens),
            num_actual_tokens=sum(lens),
            max_query_len=max(lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table_tensor=common.block_table_tensor[
                torch.tensor(list(requests), dtype=torch.int64, device=device)
            ],
            slot_mapping=common.slot_mapping[kept],
            seq_lens_host=host.numpy(),
            **optional_rows(common, np.array(requests, dtype=np.int64), np.array(own, dtype=np.int64)),
        ),
        query=batch.query[rows],
        key=batch.key[kept],
        value=batch.value[kept],
        queries=[batch.queries[index] for index in requests],
        keys=[batch.keys[index] for index in requests],
        values=[batch.values[index] for index in requests],
        seq_lens=seq_lens,
        spans=None if batch.spans is None else [batch.spans[index] for index in requests],
        strange=frozenset(place for place, index in enumerate(requests) if index in batch.strange),
    )
