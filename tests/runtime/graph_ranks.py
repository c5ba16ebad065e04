"""Steps of ranks in the buffers of graphs, run on the metadata of their capture as a replay runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from fake_backends import backend, offered
from graph_backends import GraphBuilder, GraphImpl, GraphMetadata
from graph_latents import LatentGraphBuilder, latent_backend

from attnplug.core import AttentionCGSupport, Feature
from attnplug.core.metadata import AttentionMetadata
from attnplug.runtime import AttentionRuntime, GraphState, StepBatch


class UniformBuilder(GraphBuilder):
    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class DirectBuilder(GraphBuilder):
    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class OneTokenLatents(LatentGraphBuilder):
    """Rows of a step are requests of one token, so this level is enough for them."""

    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class PartImpl(GraphImpl):
    """Partial results with LSE, of pages or of keys in the call; rows without keys are NaN."""

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor | None,
        attn_metadata: GraphMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        **asked: Any,
    ) -> torch.Tensor:
        common, spec = attn_metadata.common, self.spec
        rows = torch.arange(common.num_actual_tokens)
        starts, lengths = common.query_start_loc.long(), common.seq_lens.long()
        owner = torch.searchsorted(starts[1:], rows, right=True).clamp(max=common.num_reqs - 1)
        places = lengths[owner] - starts[owner + 1] + rows
        axis = torch.arange(common.max_seq_len)
        if kv_cache is None:
            assert common.key_start_loc is not None
            at = (common.key_start_loc.long()[owner, None] + axis).clamp(max=key.shape[0] - 1)
            keys, values = key[at], value[at]
        else:
            size = kv_cache.shape[2]
            blocks = common.block_table_tensor.long()[owner][:, axis // size]
            keys, values = (kv_cache[:, half][blocks, axis % size] for half in (0, 1))
        groups = spec.num_heads // spec.num_kv_heads
        keys, values = (each.repeat_interleave(groups, dim=2) for each in (keys, values))
        scores = torch.einsum("thd,tlhd->thl", query[: rows.shape[0]], keys) * spec.scale
        seen = axis < lengths[owner, None]
        if spec.causal and common.causal:
            seen &= axis <= places[:, None]
        if spec.window[0] >= 0:
            seen &= axis >= places[:, None] - spec.window[0]
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        output[: rows.shape[0]] = torch.einsum("thl,tlhd->thd", scores.softmax(-1), values)
        if output_lse is not None:
            output_lse[: rows.shape[0]] = scores.logsumexp(-1)
        return output


@contextlib.contextmanager
def graph_backends(*, direct: type[GraphBuilder] = UniformBuilder) -> Iterator[None]:
    """Backends of ranks that graphs can hold: of pages, of keys in the call, and of latents."""
    features = Feature.SLIDING_WINDOW | Feature.NON_CAUSAL | Feature.LSE
    impl = {"get_impl_cls": lambda: PartImpl}
    paged = backend("PAGED", 60, features=features, get_builder_cls=lambda: UniformBuilder, **impl)
    features |= Feature.DIRECT_KV
    both = backend("DIRECT", 50, features=features, get_builder_cls=lambda: direct, **impl)
    with offered(paged, both, latent_backend(OneTokenLatents)):
        yield


class Replays:
    """Graphs of one size: their metadata is of the capture, and a step only fills the buffers."""

    def __init__(self, runtime: AttentionRuntime, state: GraphState, batch_size: int, query_len: int) -> None:
        self.runtime, self.state, self.size = runtime, state, (batch_size, query_len)
        with state.capture(batch_size, query_len) as metadata:
            self.captured: dict[str, AttentionMetadata] = dict(metadata)
            self.captured_new = dict(self._new())

    def _new(self) -> dict[str, AttentionMetadata]:
        sharded = self.runtime._sharded
        return {} if sharded is None else sharded._new._metadata

    def begin(self, batch: StepBatch) -> None:
        """Fill the buffers, and leave what the capture built."""
        padded = self.state.prepare_graph_input_buffers(self.state.get_graph_input_buffers(*self.size), batch)
        self.runtime.begin_step(padded, metadata=self.captured)
        self._new().update(self.captured_new)
