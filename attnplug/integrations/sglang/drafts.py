"""The backend of a draft model that decodes several tokens in a row: one backend for each of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from attnplug.core.errors import SpecError
from attnplug.integrations.sglang.backend import Backend
from attnplug.integrations.sglang.batches import check_fields


class DraftBackend:
    """What SGLang's workers for drafts hold: step i of a draft runs on `attn_backends[i]`.

    Args:
        runner: the draft model's runner.
        name: attnplug's name of the one backend, or None to select for each layer.
        branches: of a draft; 1.
        steps: tokens that a draft has. The last one needs no attention.

    Raises:
        SpecError: drafts with branches; and as `Backend`.
    """

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, name: str | None, branches: int, steps: int) -> None:
        if branches != 1:
            limit = "gives drafts branches, which is not served"
            raise SpecError("speculative_eagle_topk", branches, limit, "use 1")
        self.steps = steps
        self.attn_backends = [Backend(runner, name) for _ in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take a draft of `steps` tokens for each request, outside of graphs."""
        for backend, view in zip(self.attn_backends, self._views(forward_batch), strict=True):
            backend.init_forward_metadata(view)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs of at most so many requests read."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Take a draft for a graph, before its capture or before a replay."""
        for backend, view in zip(self.attn_backends, self._views(forward_batch), strict=True):
            backend.init_forward_metadata_out_graph(view, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing: a replay copies what it reads before."""

    def _views(self, batch: Any) -> list[SimpleNamespace]:
        """The decodes of a draft: step i writes its column of the slots, and sees i + 1 keys more than are computed."""
        check_fields(batch, has_image_masks=False)
        reqs = batch.batch_size
        columns = batch.out_cache_loc.view(-1, self.steps)[:reqs].T
        host: torch.Tensor | None = batch.seq_lens_cpu
        return [
            SimpleNamespace(
                batch_size=reqs,
                forward_mode=batch.forward_mode,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens[:reqs] + (i + 1),
                seq_lens_cpu=None if host is None else host[:reqs] + (i + 1),
                out_cache_loc=columns[i],
                encoder_lens=batch.encoder_lens,
                spec_info=None,
            )
            for i in range(self.steps - 1)
        ]
