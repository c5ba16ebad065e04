"""Gathers the pieces of a step, which end at stored tokens, and runs one kernel for each wave of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from attnplug.core import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    StateImpl,
    state_runs,
)

_RANDOM = random.getstate()
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

# What fla imports draws numbers, and a backend leaves the process as it is.
random.setstate(_RANDOM)

_LONG = 64
"""Tokens of a piece from which the chunked form is faster than the recurrent one."""
_FORMS: dict[tuple[str, str | None], tuple[Callable[..., Any], Callable[..., Any]]] = {
    ("delta", "head"): (fused_recurrent_gated_delta_rule, chunk_gated_delta_rule),
    ("delta", "row"): (fused_recurrent_kda, chunk_kda),
    ("linear", "head"): (fused_recurrent_simple_gla, chunk_simple_gla),
}


class Wave(NamedTuple):
    """The n-th pieces of all runs: rows, starts `[N + 1]`, first states, and where states go.

    The rows are a slice if the pieces follow one another, so that inputs are not copied. Pieces of one length are a batch
    without starts. Without fresh ones all have a first state, and without stored ones all are stored.
    """

    rows: torch.Tensor | slice
    starts: torch.Tensor | None
    first: torch.Tensor
    fresh: torch.Tensor | None
    stored: torch.Tensor | None
    pages: torch.Tensor
    longest: int


class FlaMetadata(AttentionMetadata):
    """The waves of a step."""

    def __init__(self, common: CommonAttentionMetadata, waves: list[Wave]) -> None:
        self.slot_mapping, self.waves = common.slot_mapping, waves


class FlaBuilder(AttentionMetadataBuilder[FlaMetadata]):
    """Cuts runs at stored tokens: a chunk kernel has no state inside a piece."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlaMetadata:
        """The waves of one step. A piece of a later wave begins with the last state of the piece before it."""
        runs = [(run.read, run.chunks()) for run in state_runs(common_attn_metadata)]
        waves, before = [], list[int]()
        for number in range(max((len(pieces) for _, pieces in runs), default=0)):
            live = [place for place, (_, pieces) in enumerate(runs) if number < len(pieces)]
            pieces = [runs[place][1][number] for place in live]
            first = [runs[place][0] if number == 0 else before.index(place) for place in live]
            waves.append(self._wave(pieces, first))
            before = live
        return FlaMetadata(common_attn_metadata, waves)

    def _wave(self, pieces: list[tuple[int, int, int]], first: list[int]) -> Wave:
        sizes = [end - begin for begin, end, _ in pieces]
        stored = [place for place, (*_, page) in enumerate(pieces) if page >= 0]
        fresh = [int(each < 0) for each in first]
        rows: torch.Tensor | slice = slice(pieces[0][0], pieces[-1][1])
        if any(end != begin for (_, end, _), (begin, _, _) in itertools.pairwise(pieces)):
            rows = self._indices([row for begin, end, _ in pieces for row in range(begin, end)])
        return Wave(
            rows,
            self._indices([0, *itertools.accumulate(sizes)]) if len({*sizes}) > 1 else None,
            self._indices([max(each, 0) for each in first]),
            self._indices(fresh).bool()[:, None, None, None] if any(fresh) else None,
            self._indices(stored) if len(stored) < len(pieces) else None,
            self._indices([pieces[place][2] for place in stored]),
            max(sizes),
        )

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long).to(self.device, non_blocking=True)


class FlaImpl(StateImpl[FlaMetadata]):
    """One kernel call for each wave; states are gathered before it and stored after it."""

    @torch.no_grad()
    def advance(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        states: torch.Tensor,
        attn_metadata: FlaMetadata,
        output: torch.Tensor,
        *,
        decay: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """As StateImpl.advance; the tensor of a kernel that computed all rows is handed on."""
        dims, given = self.spec.state, {"q": query, "k": key, "v": value, "g": decay, "beta": beta}
        forms = _FORMS[dims.rule if dims else "", dims.decay if dims else None]
        if beta is None:
            # simple_gla has as many key heads as value heads.
            shared = self.spec.num_heads // self.spec.num_kv_heads
            given["q"], given["k"] = (
                None if x is None else x.repeat_interleave(shared, 1) for x in (query, key)
            )
        last = states
        for wave in attn_metadata.waves:
            first = last[wave.first].float()
            if wave.fresh is not None:
                # Not a product with zero, which leaves NaN of stale pages.
                first.masked_fill_(wave.fresh, 0.0)
            # float32 products on tensor cores have 10 bits, so float32 has the recurrent form alone.
            is_long = wave.longest >= _LONG and query.dtype != torch.float32
            batch = (-1, wave.longest) if wave.starts is None else (1, -1)
            call = {
                n: x[wave.rows].unflatten(0, batch).contiguous() for n, x in given.items() if x is not None
            }
            out, last = forms[is_long](
                **call,
                scale=self.spec.scale,
                initial_state=first,
                output_final_state=True,
                cu_seqlens=wave.starts,
            )
            kept = last if wave.stored is None else last[wave.stored]
            states[wave.pages] = kept.to(states.dtype)
            made = out.flatten(0, 1).to(output.dtype)
            if len(made) == len(output):
                return made
            output[wave.rows] = made
        return None
