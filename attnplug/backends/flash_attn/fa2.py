"""FLASH_ATTN_2: calls `varlen_fwd` of flash-attn 2, and `fwd_kvcache` for decodes over pages.

The library's public functions call these too, but return a new output that would have to be copied. The order of the
arguments follows `_flash_attn_varlen_forward` in `flash_attn/flash_attn_interface.py`.

Decodes over pages with `fwd_kvcache` of flash-attn 2, which takes the number of splits as an argument.

`varlen_fwd` derives that number, and its memory for partial results, from the context. If it is 1, the returned LSE
belongs to other heads and requests (2.7 to 2.8.3: written as `[Hkv, R, group]`, read as `[Hkv, group, R]`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch

from attnplug.backends.flash_attn.impl import FlashAttnImpl
from attnplug.backends.flash_attn.metadata import Call, Kernels, Requests
from attnplug.backends.library_imports import import_library
from attnplug.core.errors import BackendUnavailableError, BatchError

FWD_KVCACHE = (
    *("q", "kcache", "vcache", "k", "v", "seqlens_k", "rotary_cos", "rotary_sin", "cache_batch_idx"),
    *("leftpad_k", "block_table", "alibi_slopes", "out", "softmax_scale", "is_causal", "window_size_left"),
    *("window_size_right", "softcap", "is_rotary_interleaved", "num_splits"),
)
"""The arguments of `fwd_kvcache`, which are positional."""

_DECODE_ROWS = 64
"""Rows of queries per thread block."""
_MOST_SPLITS = 128
_BLOCKS_AT_ONCE = 2
"""Thread blocks that a multiprocessor runs at the same time."""


def attend_decodes(fwd_kvcache: Callable[..., Any], call: Call) -> torch.Tensor | None:
    """As `Kernels`, by `fwd_kvcache`, of requests with one query each, over pages."""
    requests, spec = call.requests, call.spec
    own = slice(requests.first_token, requests.end_token)
    out, left = call.output[own].unsqueeze(1), call.window[0]
    heads, rows = spec.num_heads, 1
    if heads > spec.num_kv_heads and left < 0 and call.alibi_slopes is None:
        # In this case it packs the query heads of a KV head, and writes the output as `[R, group, Hkv, D]`.
        heads, rows = spec.num_kv_heads, heads // spec.num_kv_heads
        out = call.output[own].view(-1, heads, rows, spec.head_size).transpose(1, 2)
    page, table = call.key.shape[1], requests.block_table
    units = requests.seq_lens.shape[0] * heads * -(-rows // _DECODE_ROWS)
    slots = _multiprocessors(call.query.device) * _BLOCKS_AT_ONCE
    # From the table's width: the memory for splits may not depend on the context.
    keys = 256 if spec.head_size <= 64 else 128 if spec.head_size <= 128 else 64
    splits = num_splits(units, slots, -(-call.table_keys // keys))
    # It takes the table's width for the longest context, so the table is cut to that.
    longest = max(-(-requests.max_seq_len // page), 1)
    _, lse = fwd_kvcache(
        call.query[own].unsqueeze(1),
        call.key,
        call.value,
        None,
        None,
        requests.seq_lens,
        None,
        None,
        None,
        None,
        table[:, :longest],
        call.alibi_slopes,
        out,
        spec.scale,
        False,  # the one query is the last token: no key comes after it
        left,
        -1,
        spec.logits_soft_cap or 0.0,
        False,
        splits,
    )
    return cast(torch.Tensor, lse)[:, :, 0].t() if call.wants_lse else None


@functools.lru_cache(maxsize=4096)
def num_splits(units: int, slots: int, key_blocks: int) -> int:
    """The number of parts to split the keys of each request into.

    Args:
        units: thread blocks without splitting.
        slots: thread blocks that the GPU runs at once.
        key_blocks: blocks of keys that the longest request may have; a part has at least one.
    """
    # It is the smallest number that fills the GPU to 85 % of the best one, the rule of the library.
    # Among numbers that give parts of equally many key blocks, only the smallest is considered.
    if units >= 0.8 * slots:
        return 1
    # Each wave of blocks takes as long as a full one.
    blocks = max(key_blocks, 1)
    # Parts that get no shorter gain nothing: one request of 8k keys took up to 12 % longer with more of them.
    counts = [
        count
        for count in range(1, min(blocks, slots, _MOST_SPLITS) + 1)
        if count == 1 or -(-blocks // count) < -(-blocks // (count - 1))
    ]
    full = [units * count / (-(-units * count // slots) * slots) for count in counts]
    enough = 0.85 * max(full)
    return next(count for count, share in zip(counts, full, strict=True) if share >= enough)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    # On a CPU, where tests run the library's arithmetic, few enough that keys are split.
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


VARLEN_FWD = (
    *("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"),
    *("alibi_slopes", "max_seqlen_q", "max_seqlen_k", "p_dropout", "softmax_scale", "zero_tensors"),
    *("is_causal", "window_size_left", "window_size_right", "softcap", "return_softmax", "gen"),
)
"""The arguments of `varlen_fwd`, which are positional."""

_ROWS = 64
"""Queries in a block of the kernels that read pages, for every head size."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FilledRequests:
    """Requests that all have a key: one without any is given the first row of the null block.

    `varlen_fwd` over pages writes +inf to the LSE of queries that see nothing, at the place it would have if all
    requests had as many queries: over the LSE of others, or outside its memory (2.7 to 2.8.3,
    `compute_attn_1rowblock_splitkv`).

    Args:
        seq_lens: int32 `[R]`.
        block_table: int32 `[R, max_blocks]`. An idle request's row may hold anything.
        unseeing: bool `[rows]`, the queries that see nothing; None if the host knows that there are none.
    """

    seq_lens: torch.Tensor
    block_table: torch.Tensor
    unseeing: torch.Tensor | None

    @classmethod
    def of(cls, requests: Requests) -> FilledRequests:
        """`requests`, filled; the host does not wait, and the layers of a step share the result."""
        if not requests.may_lack_keys:
            return cls(requests.seq_lens, requests.block_table, None)
        if requests.captured:
            # A graph's replay must make it again, so the graph may not use what an earlier call made.
            return cls._made(requests)
        found = requests.kept.get("filled")
        if found is None:
            found = requests.kept["filled"] = cls._made(requests)
        return cast(FilledRequests, found)

    @classmethod
    def _made(cls, requests: Requests) -> FilledRequests:
        lens, ends = requests.seq_lens, requests.query_start_loc[1:]
        none = lens == 0
        rows = torch.arange(requests.first_token, requests.end_token, dtype=ends.dtype, device=ends.device)
        # Rows past the last request are padding, whose outputs nobody reads.
        owners = torch.bucketize(rows, ends, right=True).clamp_(max=lens.shape[0] - 1)
        return cls(lens.clamp(min=1), requests.block_table.masked_fill(none[:, None], 0), none[owners])

    def blank(self, output: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Set outputs `[rows, H, Dv]` to 0 and LSEs `[H, rows]` to -inf for queries that see nothing."""
        if self.unseeing is None:
            return
        output.masked_fill_(self.unseeing[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(self.unseeing, -torch.inf)


class FlashAttn2Kernels:
    """Calls `varlen_fwd`, and `fwd_kvcache` for decodes over pages.

    Args:
        varlen_fwd: of the extension `flash_attn_2_cuda`.
        fwd_kvcache: of the same.
    """

    # It packs the heads of a KV head and splits the keys only if every request has one query.
    separate_decodes: ClassVar[bool] = True

    def __init__(self, varlen_fwd: Callable[..., Any], fwd_kvcache: Callable[..., Any]) -> None:
        self._varlen_fwd = varlen_fwd
        self._fwd_kvcache = fwd_kvcache

    def __call__(self, call: Call) -> torch.Tensor | None:
        """As `Kernels`.

        Raises:
            BatchError: a request whose queries outnumber its keys so far that a whole block of them sees nothing.
        """
        requests = call.requests
        own = slice(requests.first_token, requests.end_token)
        if requests.single:
            return attend_decodes(self._fwd_kvcache, call) if call.paged else self._single(call, own)
        filled = None
        if call.paged:
            _check_blocks(call)
            filled = FilledRequests.of(requests)
        # With a longest query of 1 it may take row i for request i and ignore the start locations.
        _, lse = self._varlen(call, call.query, call.output, max(requests.max_query_len, 2), filled)
        lse = lse[:, own]
        if filled is not None:
            filled.blank(call.output[own], lse)
        return lse if call.wants_lse else None

    def _single(self, call: Call, own: slice) -> torch.Tensor | None:
        """One query of each request, over keys that come with the call."""
        spec, query, out = call.spec, call.query[own], call.output[own]
        _, left, right = _window(call)
        # In these cases it packs the query heads of a KV head and returns an output of its own. It allocates for up
        # to 128 parts of the keys, which is bounded here: the keys come with the call.
        packs = spec.num_heads > spec.num_kv_heads and call.alibi_slopes is None and left < 0 and right < 0
        found, lse = self._varlen(call, query, None if packs else out, 1, None)
        if packs:
            out.copy_(found)
        return lse if call.wants_lse else None

    def _varlen(
        self,
        call: Call,
        query: torch.Tensor,
        out: torch.Tensor | None,
        longest: int,
        filled: FilledRequests | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of `varlen_fwd`; over pages if `filled` is given."""
        requests, spec = call.requests, call.spec
        causal, left, right = _window(call)
        found, lse, *_ = self._varlen_fwd(
            query,
            call.key,
            call.value,
            out,
            requests.query_start_loc,
            requests.key_start_loc if filled is None else requests.query_start_loc,
            None if filled is None else filled.seq_lens,
            None,
            None if filled is None else filled.block_table,
            call.alibi_slopes,
            longest,
            max(requests.max_seq_len, 1),
            0.0,
            spec.scale,
            False,
            causal,
            left,
            right,
            spec.logits_soft_cap or 0.0,
            False,
            None,
        )
        return cast(torch.Tensor, found), cast(torch.Tensor, lse)


class FlashAttn2Impl(FlashAttnImpl):
    """Attention in FlashAttention 2."""

    @classmethod
    def import_kernels(cls) -> Kernels:
        """FlashAttn2Kernels."""
        library = import_library("FLASH_ATTN_2")
        functions = []
        for name, arguments in (("varlen_fwd", VARLEN_FWD), ("fwd_kvcache", FWD_KVCACHE)):
            found = getattr(library, name, None)
            if found is None:
                raise BackendUnavailableError(f"flash_attn_2_cuda has no {name}; {_REMEDY}")
            # An extension has no signature, but pybind11 writes the arguments into the docstring.
            numbers = re.findall(r"\barg(\d+):", found.__doc__ or "")
            if numbers and int(numbers[-1]) + 1 != len(arguments):
                what = f"takes {int(numbers[-1]) + 1} arguments, not {len(arguments)}"
                raise BackendUnavailableError(f"{name} of flash_attn_2_cuda {what}; {_REMEDY}")
            functions.append(found)
        return FlashAttn2Kernels(*functions)


def _window(call: Call) -> tuple[bool, int, int]:
    """Causal, left and right as arguments of `varlen_fwd`, which derives a right of 0 from causal itself."""
    left, right = call.window
    if call.alibi_slopes is None or right != 0:
        return call.causal, left, -1 if call.causal else right
    # With causal=True it adds slope * key position to each logit, which shifts the LSE by slope * query position
    # and costs precision at high positions. With a window, even one as wide as all keys, it subtracts the distance.
    widest = max(call.requests.max_seq_len, 1) - 1
    return False, min(left, widest) if left >= 0 else widest, 0


def _check_blocks(call: Call) -> None:
    """BatchError if a whole block of queries lies before the first key: see `FilledRequests` for the defect."""
    right, queries_before_keys = call.window[1], call.requests.queries_before_keys
    if right < 0 or queries_before_keys - right < _ROWS:
        return
    limit = f"must be at most {_ROWS - 1 + right} here: FLASH_ATTN_2 needs a key in reach of every {_ROWS} queries"
    if call.requests.captured:
        raise BatchError(
            "max_query_len - 1", queries_before_keys, f"{limit}, and requests of a graph may become padding"
        )
    raise BatchError(
        "query_len - seq_len", queries_before_keys, limit, "let seq_lens count the new tokens too"
    )


_REMEDY = "pip install 'flash-attn==2.8.3'"
