"""Decode context parallelism of vLLM: the ranks that share the tokens of each request, and the layers that allow it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import SpecError
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.ops.combining import Exchange, ExchangeBuffers, all_gather, combine_partials
from attnplug.runtime.plan.sharding import context_spec, new_tokens_spec, refusal

if TYPE_CHECKING:
    import torch.distributed as dist

_SHARED: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
"""By vLLM's group, so that all layers of a process share the memory of the exchange."""


class Ranks:
    """The ranks of vLLM's group for decode context parallelism. Each has some query heads, and all have one KV head.

    Args:
        group: vLLM's GroupCoordinator.
        interleave: tokens in a run of one rank.
        exchange: the exchange that vLLM's options ask for; None chooses by size.
    """

    def __init__(self, group: Any, interleave: int, exchange: Exchange | None) -> None:
        self.place = ContextParallel(group.world_size, group.rank_in_group, interleave)
        self.exchange = exchange
        # Weak, because processes of gloo that exit with a group abort.
        self._group = weakref.ref(group)
        self._buffers: dict[torch.device, ExchangeBuffers] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the device."""
        found: dist.ProcessGroup | None = getattr(self._group(), "device_group", None)
        if found is None:
            raise SpecError("group", None, "is destroyed, and ranks exchange their results over it")
        return found

    def gather_heads(self, query: torch.Tensor) -> torch.Tensor:
        """The heads of all ranks `[T, N * H, D]`, in the order of ranks, from `[T, H, D]` on each."""
        tokens, heads, size = query.shape
        every = query.new_empty(self.place.size, tokens, heads, size)
        # gloo gathers into flat tensors only.
        all_gather(every.view(-1), query.contiguous().view(-1), group=self.group)
        return every.transpose(0, 1).reshape(tokens, -1, size)

    def combine(
        self, part: torch.Tensor, lse: torch.Tensor, output: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The results `[T, H, D]` and LSE of this rank's heads over all keys, from those of all heads over its own."""
        return combine_partials(
            *(part, lse, self.group),
            scatter_heads=True,
            backend=self.exchange,
            buffers=self._memory(part.device),
            output=output,
        )

    def reserve_for(self, query: torch.Tensor, size: int) -> None:
        """Take the memory of a step of as many rows as `query [T, H, D]`, with outputs of `size` elements of a head."""
        tokens, heads = query.shape[0], self.place.size * query.shape[1]
        # A graph keeps addresses, so the memory must not grow after vLLM has measured the largest step.
        memory = self._memory(query.device)
        given = tokens, heads, size, query.dtype, self.group
        memory.reserve(*given, scatter_heads=True, backend=self.exchange)
        # The gathered queries in both orders, and the partial results, which vLLM counts at their peak.
        sizes = query.shape[2], query.shape[2], size
        _ = [query.new_empty(tokens, heads, each) for each in sizes]

    def _memory(self, device: torch.device) -> ExchangeBuffers:
        return self._buffers.setdefault(device, ExchangeBuffers(device))


def ranks_size(vllm_config: Any) -> int:
    """The number of ranks that share the tokens of each request; 1 where a process has all of them."""
    parallel = getattr(vllm_config, "parallel_config", None)
    return int(getattr(parallel, "decode_context_parallel_size", 1))


def gathered_spec(spec: LayerSpec, size: int) -> LayerSpec:
    """The layer over the keys of one of `size` ranks: the query heads of all, without sinks, and with the LSE."""
    # Sinks are those of a rank's own heads, which count once, after the merge.
    return context_spec(spec).replace(num_heads=size * spec.num_heads, has_sinks=False)


def new_tokens_of(spec: LayerSpec) -> LayerSpec:
    """The layer on a rank over the new tokens of a step; latents are prefilled by the layer itself."""
    return spec.replace(needs_lse=True) if spec.mla is not None else new_tokens_spec(spec)


def ranks_of(vllm_config: Any) -> Ranks | None:
    """The ranks of a configuration; None where a process has all tokens of its requests.

    Raises:
        SpecError: prefill context parallelism, or a group of another size than the configuration's.
    """
    parallel: Any = getattr(vllm_config, "parallel_config", None)
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        limit = "is not served: attnplug's layers have the queries of all tokens of a step"
        raise SpecError("prefill_context_parallel_size", parallel.prefill_context_parallel_size, limit)
    size = ranks_size(vllm_config)
    if size == 1:
        return None
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    if group.world_size != size:
        limit = f"is not the {group.world_size} of vLLM's group"
        raise SpecError("decode_context_parallel_size", size, limit)
    exchange: Exchange | None = "a2a" if getattr(parallel, "dcp_comm_backend", "ag_rs") == "a2a" else None
    interleave = parallel.cp_kv_cache_interleave_size
    found = _SHARED.get(group)
    if found is None or (found.place.interleave, found.exchange) != (interleave, exchange):
        found = _SHARED[group] = Ranks(group, interleave, exchange)
    return found


def rank_refusal(spec: LayerSpec, *, shares_kv: bool = False, drafts: bool = False) -> str | None:
    """The reason why vLLM's ranks cannot share the tokens of a layer, or None. Encoders have none in pages."""
    if spec.direct_kv:
        return None
    if fact := refusal(spec):
        return str(fact).removesuffix(f"; {fact.remedy}")
    facts = (
        (
            spec.is_windowed or spec.chunk_size is not None,
            "a window or chunk",
            "a rank's keys are not at consecutive positions",
        ),
        (
            spec.attn_type is not AttentionType.DECODER,
            f"attn_type={spec.attn_type}",
            "its keys are not those of the step's requests",
        ),
        (not spec.causal, "causal=False", "the ranks take the new tokens of a step as causal"),
        (
            spec.mla is None and spec.num_kv_heads != 1,
            f"num_kv_heads={spec.num_kv_heads} on a rank",
            "ranks with different KV heads share no pages",
        ),
        (shares_kv, "a layer that reads another layer's pages", "its call has other keys than they have"),
        (drafts, "draft tokens", "the host does not know the exact lengths that give each rank its share"),
    )
    for is_asked, what, why in facts:
        if is_asked:
            return f"{what} not supported under context parallelism: {why}"
    return None


def check_ranks(ranks: Ranks, spec: LayerSpec, *, shares_kv: bool = False, drafts: bool = False) -> None:
    """SpecError with the reason why vLLM's ranks cannot share the tokens of a layer."""
    if reason := rank_refusal(spec, shares_kv=shares_kv, drafts=drafts):
        limit = f"cannot be served in this layer: {reason}"
        raise SpecError("decode_context_parallel_size", ranks.place.size, limit, "run vLLM without it")
