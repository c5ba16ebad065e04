"""Steps in the order that a builder asks for, decodes first, for engines that keep an order of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.metadata import LENGTHS_ON_HOST, OPTIONAL_ROWS, CommonAttentionMetadata

_Ints: TypeAlias = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ordered:
    """A builder's metadata for a step whose requests were moved.

    `queries` are the rows of the engine's tokens in the builder's order, int64 `[T]`, and `keys` those of the keys
    and values of the call.
    """

    metadata: Any
    queries: torch.Tensor
    keys: torch.Tensor


def build_in_order(
    build: Callable[[CommonAttentionMetadata], Any], common: CommonAttentionMetadata, threshold: int | None
) -> Any:
    """`build(common)`, or Ordered where requests of at most `threshold` new tokens are not in front.

    Args:
        build: the builder's.
        common: the step, in the engine's order.
        threshold: the builder's `reorder_batch_threshold`; None keeps any order.
    """
    if threshold is None:
        return build(common)
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
    longer = np.diff(starts) > threshold
    if not (longer[:-1] & ~longer[1:]).any():
        return build(common)
    order = np.argsort(longer, kind="stable")
    device = common.seq_lens.device
    host = torch.from_numpy(order)
    rows, moved = _moved(starts, order)
    keys, index, queries = rows, host.to(device), torch.from_numpy(rows).to(device)
    fields: dict[str, Any] = {"query_start_loc": moved.to(device), "query_start_loc_cpu": moved}
    per = {**OPTIONAL_ROWS, **LENGTHS_ON_HOST, "seq_lens": "request", "block_table_tensor": "request"}
    if common.slot_mapping.shape[0] >= rows.size and common.encoder_seq_lens is None:
        per["slot_mapping"] = "token"  # slots of cross attention are of the encoder's tokens
    for name, kind in per.items():
        value = getattr(common, name)
        if isinstance(value, torch.Tensor):
            places = host if kind == "request" else torch.from_numpy(rows)
            fields[name] = value[
                places if value.device.type == "cpu" else index if kind == "request" else queries
            ]
        elif value is not None:
            fields[name] = value[order if kind == "request" else rows]
    if common.key_start_loc_cpu is not None:
        keys, moved = _moved(common.key_start_loc_cpu[: common.num_reqs + 1].numpy(), order)
        fields |= {"key_start_loc": moved.to(device), "key_start_loc_cpu": moved}
    made = build(dataclasses.replace(common, **fields))
    return Ordered(made, queries, torch.from_numpy(keys).to(device))


def _moved(starts: npt.NDArray[np.int32], order: _Ints) -> tuple[_Ints, torch.Tensor]:
    """The rows of packed requests in another order, and where each request starts then, int32 `[R + 1]`."""
    lens = np.diff(starts)[order].astype(np.int64)
    ends = np.cumsum(lens)
    rows = np.arange(lens.sum()) + np.repeat(starts[:-1][order] - (ends - lens), lens)
    return rows, torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))


def run_in_order(
    call: Callable[..., Any],
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor | None,
    metadata: Any,
    output: torch.Tensor,
    output_lse: torch.Tensor | None = None,
) -> None:
    """An impl's `attend` or `forward` with what `build_in_order` gave; outputs are in the engine's order."""
    if not isinstance(metadata, Ordered):
        call(layer, query, key, value, kv_cache, metadata, output, output_lse=output_lse)
        return
    rows = metadata.queries
    given = (None if each is None else each[metadata.keys] for each in (key, value))
    part, lse = output[rows], None if output_lse is None else output_lse[rows]
    call(layer, query[rows], *given, kv_cache, metadata.metadata, part, output_lse=lse)
    output[rows] = part
    if output_lse is not None and lse is not None:
        output_lse[rows] = lse
