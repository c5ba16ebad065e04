"""The keys that the indexer of a sparse layer of vLLM picks, as attnplug's selection of a step."""

from __future__ import annotations

from typing import Any, Self

import torch

from attnplug.core.errors import SpecError
from attnplug.core.selection import Selection
from attnplug.core.sparse import SparseSpec


def has_indexer(model_config: Any) -> bool:
    """Whether a model has an indexer, as vLLM knows it."""
    return _topk(model_config) is not None


def sparse_of(model_config: Any) -> SparseSpec:
    """How many keys the indexer of a model picks for each query.

    SpecError: the model's configuration does not say so.
    """
    topk = _topk(model_config)
    if topk is None:
        limit = "is not in the model's configuration, and vLLM asks for sparse layers"
        raise SpecError("index_topk", None, limit)
    return SparseSpec("token_topk", topk)


def _topk(model_config: Any) -> Any:
    configs = model_config.hf_text_config, model_config.hf_config
    found = (getattr(config, "index_topk", None) for config in configs)
    return next((topk for topk in found if topk is not None), None)


class PickedKeys(Selection):
    """The buffer that vLLM's indexer fills: positions in the request, and -1 for none in any place of a row.

    All counts are the width of the buffer, because vLLM counts nothing; a layer leaves the -1 out.
    """

    __slots__ = ()

    @classmethod
    def of(cls, buffer: torch.Tensor) -> Self:
        """The selection of steps whose keys are in `buffer`, int32 `[tokens, topk]`; shares its memory."""
        rows, width = buffer.shape
        return cls(buffer, torch.full((rows,), width, dtype=torch.int32, device=buffer.device))

    def check_values(self, sparse: SparseSpec, ends: torch.Tensor) -> None:
        """As Selection.check_values, without the -1 between positions."""
        rows = self.positions[: ends.shape[0]]
        is_key = rows != -1
        order = is_key.int().argsort(dim=1, descending=True, stable=True)
        counts = is_key.sum(dim=1, dtype=torch.int32)
        Selection(rows.gather(1, order), counts).check_values(sparse, ends)


def check_buffer(buffer: object) -> torch.Tensor:
    """The buffer, if it is one of vLLM's indexers: int32 `[tokens, topk]`; SpecError for anything else."""
    if not isinstance(buffer, torch.Tensor) or (buffer.dtype, buffer.ndim) != (torch.int32, 2):
        found = (buffer.dtype, buffer.ndim) if isinstance(buffer, torch.Tensor) else buffer
        raise SpecError("topk_indices_buffer", found, "must be an int32 tensor [tokens, topk]")
    return buffer
