"""The reference attention: one request at a time, in float64, with an explicit mask."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from attnplug.core.errors import BatchError, SpecError
from attnplug.core.features import Feature
from attnplug.core.impl import LayerTensors
from attnplug.core.kv_format import kv_format
from attnplug.core.selection import Selection
from attnplug.core.spec import LayerSpec
from attnplug.ops.kv_codec import codec_of
from attnplug.ops.storage import round_to_float, rounding_of, storage_dtype

COMPUTED = (
    Feature.SLIDING_WINDOW
    | Feature.CHUNKED_LOCAL
    | Feature.SOFT_CAP
    | Feature.SINKS
    | Feature.ALIBI
    | Feature.MLA
    | Feature.MM_PREFIX
    | Feature.INVARIANCE
    | Feature.SPARSE
    | Feature.LSE
    | Feature.HEAD_SIZE_V
    | Feature.NON_CAUSAL
    | Feature.DIRECT_KV
    | Feature.FP8_KV
    | Feature.HEAD_SCALES
    | Feature.CROSS
    | Feature.ENCODER
)
"""The features whose numbers the oracle computes. It refuses layers that ask for any other."""

Spans: TypeAlias = Sequence[tuple[int, int]]
"""The multimodal spans of a request: positions of the first token and of the token after the last."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OracleResult:
    """The reference result, packed like the queries.

    Args:
        output: float64 `[T, H, Dv]`; with MLA `[T, H, v_head_dim]`.
        lse: float64 `[T, H]`, natural log; -inf if the query sees no key and the layer has no sinks.
        logit_size: float64 `[T, H]`, the largest `scale * norm(query) * norm(key)` over the keys that a query sees,
            and how far a sink exceeds their logits. Rounding errors of logits are proportional to it.
    """

    output: torch.Tensor
    lse: torch.Tensor
    logit_size: torch.Tensor


def visible_keys(
    spec: LayerSpec,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    causal: bool | None = None,
    spans: Spans | None = None,
) -> torch.Tensor:
    """Whether each query `[n]` sees each key `[m]`, bool `[n, m]`; `causal=True` narrows a non-causal layer.

    Raises:
        BatchError: the layer has mm_prefix, and no `spans` are given.
    """
    query, key = query_positions[:, None], key_positions[None, :]
    left, right = spec.window
    seen = torch.ones(query.shape[0], key.shape[1], dtype=torch.bool)
    if spec.causal or causal:
        seen &= key <= query
    if left >= 0:
        seen &= key >= query - left
    if right >= 0:
        seen &= key <= query + right
    if spec.chunk_size is not None:
        seen &= key // spec.chunk_size == query // spec.chunk_size
    if spec.mm_prefix:
        if spans is None:
            raise BatchError("spans", None, "is required: the layer has mm_prefix", "give [] for text")
        for start, stop in spans:
            seen |= (query >= start) & (query < stop) & (key >= start) & (key < stop)
    return seen


def chosen_keys(spec: LayerSpec, selection: Selection, key_positions: torch.Tensor) -> torch.Tensor:
    """Whether each of the first n queries chose each key `[m]`, bool `[n, m]`, by the counted positions."""
    sparse = spec.sparse
    if sparse is None:
        raise SpecError("sparse", None, "is required: a layer without it attends no selection")
    blocks = key_positions // sparse.block
    positions, counts = selection.positions.cpu().long(), selection.counts.cpu()
    # The last column is that of positions which are not counted, or of no key.
    last = max(blocks.tolist(), default=-1) + 1
    is_counted = torch.arange(positions.shape[1]) < counts[:, None]
    chosen = torch.zeros(counts.shape[0], last + 1, dtype=torch.bool)
    chosen.scatter_(1, positions.where(is_counted & (positions >= 0) & (positions < last), last), True)
    chosen[:, last] = False
    return chosen[:, blocks]


def latent_weights(spec: LayerSpec, tensors: LayerTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK `[H, nope, rank]` and W_UV `[H, rank, v_head_dim]` of a layer with MLA, in float64.

    Raises:
        SpecError: the layer has no `mla`, or `tensors` no weights as tensors.
    """
    dims = spec.mla
    if dims is None:
        raise SpecError("mla", None, "is required: other layers have no latents")
    if isinstance(tensors.kv_b_proj, torch.Tensor):
        weight = tensors.kv_b_proj.detach().cpu().double().view(spec.num_heads, -1, dims.kv_lora_rank)
        return weight[:, : dims.qk_nope_head_dim], weight[:, dims.qk_nope_head_dim :].mT
    if tensors.w_uk is None or tensors.w_uv is None:
        raise SpecError("tensors", "no weights", "must have w_uk and w_uv, or kv_b_proj as a tensor")
    return tensors.w_uk.detach().cpu().double(), tensors.w_uv.detach().cpu().double()


def expanded_latents(
    spec: LayerSpec, latent: torch.Tensor, tensors: LayerTensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[m, H, nope + rope]` and values `[m, H, v_head_dim]` of latents `[m, 1, rank + rope]`, in float64."""
    up_key, up_value = latent_weights(spec, tensors)
    rows, rank = latent[:, 0].detach().cpu().double(), up_key.shape[2]
    positions = rows[:, None, rank:].expand(-1, spec.num_heads, -1)
    keys = torch.cat([torch.einsum("sl,hpl->shp", rows[:, :rank], up_key), positions], dim=2)
    return keys, torch.einsum("sl,hlv->shv", rows[:, :rank], up_value)


def _largest_sizes(queries: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The largest product `[H, n]` of the norms of a query `[H, n]` and of a key `[Hkv, m]` that it sees."""
    # A column of zeros is the size for queries without keys.
    most = torch.nn.functional.pad(keys[:, None, :].where(seen, 0.0), (0, 1)).amax(2)
    return queries * most.repeat_interleave(queries.shape[0] // keys.shape[0], dim=0)


def _absorbed_sizes(
    spec: LayerSpec, query: torch.Tensor, latent: torch.Tensor, seen: torch.Tensor, tensors: LayerTensors
) -> torch.Tensor:
    """As `_largest_sizes`, of absorbed queries, whose logits are sums of other terms than the expanded ones."""
    up_key, _ = latent_weights(spec, tensors)
    nope = up_key.shape[1]
    wide = query.detach().cpu().double()
    absorbed = torch.einsum("thp,hpl->thl", wide[..., :nope], up_key).square().sum(2)
    norms: torch.Tensor = (absorbed + wide[..., nope:].square().sum(2)).sqrt()
    return _largest_sizes(norms.T, latent.detach().cpu().double().norm(dim=2).T, seen)


def request_oracle(
    spec: LayerSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_len: int,
    *,
    tensors: LayerTensors | None = None,
    use_sinks: bool = True,
    causal: bool | None = None,
    spans: Spans | None = None,
    selection: Selection | None = None,
    rows: torch.Tensor | None = None,
) -> OracleResult:
    """The result of one request of `seq_len` tokens.

    Args:
        spec: the layer; its dtypes do not matter here.
        query: `[n, H, D]`; row j has position `seq_len - n + j`.
        key: `[m, Hkv, D]`, the last m keys; key j has position `seq_len - m + j`. With MLA the latents, and queries
            of nope + rope elements: the oracle expands them.
        value: `[m, Hkv, Dv]`, dequantised by `stored_values` if the cache is quantised.
        seq_len: tokens of the request, with dropped ones.
        tensors: sinks and slopes, if the spec has them.
        use_sinks: whether sinks enter the denominator.
        causal: True if the batch narrows the spec.
        spans: the multimodal spans, for layers with mm_prefix.
        selection: of the n queries, for sparse layers.
        rows: int64, the queries to compute, in this order; default all n.

    Raises:
        SpecError: the layer needs a feature that is not in COMPUTED.
        BatchError: a layer with mm_prefix without spans, or a sparse layer without a selection of n queries.
    """
    # A reference that ignored a feature would accept a backend that ignores it too.
    if unknown := spec.required_features() & ~COMPUTED:
        asked = next(iter(unknown)).ask.field
        limit = f"asks for {', '.join(unknown.names())}, which the oracle does not compute"
        raise SpecError(asked, getattr(spec, asked), limit)
    tensors = tensors or LayerTensors()
    tensors.check(spec)
    latent = key
    if spec.mla is not None:
        key, value = expanded_latents(spec, key, tensors)
    q, k, v = (each.detach().cpu().double().transpose(0, 1) for each in (query, key, value))
    query_positions = torch.arange(q.shape[1]) + seq_len - q.shape[1]
    if rows is not None:
        q, query, query_positions = q[:, rows], query[rows.to(query.device)], query_positions[rows]
        selection = None if selection is None else selection[rows.to(selection.counts.device)]
    key_positions = torch.arange(k.shape[1]) + seq_len - k.shape[1]

    logits = _of_groups(q, k.transpose(1, 2)) * spec.scale
    if spec.logits_soft_cap is not None:
        # The cap comes after the scale and before ALiBi and the mask.
        logits = spec.logits_soft_cap * torch.tanh(logits / spec.logits_soft_cap)
    if tensors.alibi_slopes is not None:
        distance = (key_positions[None, :] - query_positions[:, None]).abs()
        logits = logits - tensors.alibi_slopes.cpu().double()[:, None, None] * distance
    seen = visible_keys(spec, query_positions, key_positions, causal, spans)
    if spec.sparse is not None:
        if selection is None or selection.counts.shape[0] != q.shape[1]:
            found = None if selection is None else selection.counts.shape[0]
            raise BatchError("selection", found, f"must have a row for each of {q.shape[1]} queries")
        seen &= chosen_keys(spec, selection, key_positions)
    logits = logits.masked_fill(~seen, -math.inf)
    logit_size = _largest_sizes(q.norm(dim=2), k.norm(dim=2), seen)
    if spec.mla is not None:
        logit_size = logit_size.maximum(_absorbed_sizes(spec, query, latent, seen, tensors))
    logit_size = logit_size * spec.scale
    terms = logits
    # A sink enters the denominator only: it has a logit and no value.
    if tensors.sinks is not None and use_sinks:
        sinks = tensors.sinks.cpu().double()[:, None, None].expand(-1, q.shape[1], 1)
        terms = torch.cat([logits, sinks], dim=2)
        if k.shape[1]:
            logit_size = logit_size + (sinks[:, :, 0] - logits.amax(2)).clamp_min(0).nan_to_num(posinf=0.0)
    lse = torch.logsumexp(terms, dim=2)
    # A query without keys has an LSE of -inf; 0 in its place gives weights of 0 instead of NaN.
    weights = torch.exp(logits - lse[:, :, None].nan_to_num(neginf=0.0))
    return OracleResult(
        _of_groups(weights, v).transpose(0, 1), lse.transpose(0, 1), logit_size.transpose(0, 1)
    )


def _of_groups(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Rows `[H, n, ...]` times the matrices `[Hkv, ...]`, of which consecutive heads share one."""
    # Interleaved groups are a known mistake.
    heads, count, size = rows.shape
    grouped = rows.reshape(shared.shape[0], heads // shared.shape[0] * count, size)
    return (grouped @ shared).reshape(heads, count, shared.shape[2])


def attention_oracle(
    spec: LayerSpec,
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    seq_lens: Sequence[int],
    *,
    tensors: LayerTensors | None = None,
    use_sinks: bool = True,
    causal: bool | None = None,
    spans: Sequence[Spans] | None = None,
    selection: Selection | None = None,
    rows: torch.Tensor | None = None,
) -> OracleResult:
    """The results of a batch, one request after another; the arguments are those of `request_oracle`.

    The rows of `selection` are those of all requests together, as are `rows`, int64 and sorted: the results of other
    queries are zeros.

    Raises:
        BatchError: the sequences have different lengths, or a layer with mm_prefix gets no spans.
    """
    given = (queries, keys, values, seq_lens, *(() if spans is None else (spans,)))
    counts = [len(part) for part in given]
    if len(set(counts)) != 1:
        raise BatchError("requests", counts, "queries, keys, values, seq_lens and spans must be as many")
    of_each = [None] * len(seq_lens) if spans is None else spans
    total = sum(query.shape[0] for query in queries)
    output = torch.zeros(total, spec.num_heads, spec.output_size, dtype=torch.float64)
    found, start = (
        OracleResult(output, torch.zeros_like(output[:, :, 0]), torch.zeros_like(output[:, :, 0])),
        0,
    )
    for query, key, value, seq_len, own in zip(queries, keys, values, seq_lens, of_each, strict=True):
        span = slice(start, start := start + query.shape[0])
        computed = None if rows is None else rows[(rows >= span.start) & (rows < span.stop)] - span.start
        part = request_oracle(
            spec,
            query,
            key,
            value,
            seq_len,
            tensors=tensors,
            use_sinks=use_sinks,
            causal=causal,
            spans=own,
            selection=None if selection is None else selection[span],
            rows=computed,
        )
        for field in dataclasses.fields(part):
            into = getattr(found, field.name)[span]
            into[slice(None) if computed is None else computed] = getattr(part, field.name)
    return found


def stored_values(tensor: torch.Tensor, spec: LayerSpec, scale: Any = 1.0) -> torch.Tensor:
    """The values that a KV cache of `spec` returns for `tensor [n, Hkv, D]`: rounded, or quantised with `scale`; float64.

    The scale is a number, or float32 `[Hkv, 1]`.
    """
    dtype, row = storage_dtype(spec), kv_format(spec.resolved_kv_cache_dtype)
    codec = codec_of(spec)
    if codec is not None:
        return codec.decode(codec.encode(tensor.float(), scale), scale).double()
    rounding = rounding_of(row) or round_to_float
    if not row.layer_scales:
        return rounding(tensor.clone(), dtype).double()
    stored: torch.Tensor = rounding(tensor.float() / scale, dtype).double() * scale
    return stored
