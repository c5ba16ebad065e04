"""The few batches that structural checks run: decodes, a mix with prefills, K and V with the call, encoders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from attnplug.core.features import Feature
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.steps import Make, decodes, mixed, step_of
from attnplug.testing.conformance.target import Target

__all__ = ["PAGED", "only", "situations", "step"]

PAGED = ("decode", "mixed")
"""Situations whose K and V are in pages."""

_ENCODER = Feature.ENCODER | Feature.DIRECT_KV | Feature.NON_CAUSAL


def situations(target: Target) -> list[str]:
    """Those that the backend declares: "decode" and "mixed" over pages, "direct" and "encoder" with the call."""
    features = target.backend.features
    direct = ["direct"] if Feature.DIRECT_KV in features else []
    return [*PAGED, *direct, *(["encoder"] if _ENCODER in features else [])]


def step(target: Target, situation: str, *, seed: int = 0, **fields: Any) -> Make:
    """Makes the batch of a situation, with padding rows; decodes stand first.

    Args:
        target: the backend.
        situation: of `situations`.
        seed: of everything random.
        fields: of the LayerSpec.

    Raises:
        CheckSkipped: the backend serves no such layer.
    """
    if situation == "direct":
        spec = target.spec(direct_kv=True, **fields)
        # Keys of the last tokens only, and as many as there are queries.
        return functools.partial(
            target.batch, spec, [1, 1, 5, 33], [40, 9, 60, 33], key_lens=[40, 5, 50, 33], padding=3, seed=seed
        )
    if situation == "encoder":
        spec = target.spec(attn_type="encoder_only", direct_kv=True, **fields)
        return functools.partial(target.batch, spec, [1, 5, 33], [1, 5, 33], padding=3, seed=seed)
    spec = target.spec(**fields)
    lengths = (decodes if situation == "decode" else mixed)(target.block_size(spec))
    return step_of(target, spec, lengths, seed)


def only(batch: Batch, requests: Sequence[int]) -> Batch:
    """Of a batch over pages these requests, in this order; the cache is the same one, padding rows are gone."""
    common = batch.common
    starts = common.query_start_loc_cpu.tolist()
    rows = torch.tensor(
        [row for index in requests for row in range(starts[index], starts[index + 1])], dtype=torch.int64
    )
    lens = [starts[index + 1] - starts[index] for index in requests]
    new_starts = torch.tensor([0, *lens], dtype=torch.int64).cumsum(0).int()
    seq_lens = [batch.seq_lens[index] for index in requests]
    device = batch.query.device
    picked, chosen = rows.to(device), torch.tensor(list(requests), dtype=torch.int64, device=device)
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
            block_table_tensor=common.block_table_tensor[chosen],
            slot_mapping=common.slot_mapping[picked],
            seq_lens_host=host.numpy(),
        ),
        query=batch.query[picked],
        key=batch.key[picked],
        value=batch.value[picked],
        queries=[batch.queries[index] for index in requests],
        keys=[batch.keys[index] for index in requests],
        values=[batch.values[index] for index in requests],
        seq_lens=seq_lens,
    )
