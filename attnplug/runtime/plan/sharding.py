"""Layers under context parallelism: those whose tokens the ranks share, and the specs of their two parts.

A model of the time of such decodes: from where sharing pays. And what a plan and the configuration allow a runtime.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from attnplug.core.arguments import integer, torch_device
from attnplug.core.checks import check_size
from attnplug.core.context_parallel import MOST_SENT_BYTES, ContextParallel
from attnplug.core.device import Device
from attnplug.core.dtypes import element_size
from attnplug.core.errors import BackendUnavailableError, BatchError, LayoutError, NoBackendError, SpecError
from attnplug.core.kv_cache_spec import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, kv_cache_spec_for
from attnplug.core.reasons import Reason
from attnplug.core.spec import LayerSpec
from attnplug.registry.selection.decision import Decision, Gate

if TYPE_CHECKING:
    import torch

    from attnplug.core.config import BuilderConfig
    from attnplug.runtime.plan.model_plan import ModelPlan


CODE = "context_parallel"


def checked_place(place: object) -> ContextParallel | None:
    """`place`, or None where a process has all tokens; SpecError for anything else than a ContextParallel."""
    if place is not None and not isinstance(place, ContextParallel):
        remedy = 'make it by attnplug.runtime.context_parallel(mesh["cp"])'
        raise SpecError("context_parallel", place, "must be a ContextParallel or None", remedy)
    return None if place is None or place.size == 1 else place


def shares_tokens(cache: KVCacheSpec) -> bool:
    """Whether the ranks share the tokens of such pages. Pages of windows, chunks and cross attention are whole."""
    return isinstance(cache, (FullAttentionSpec, MLAAttentionSpec))


def tokens_per_block(cache: KVCacheSpec, place: ContextParallel | None) -> int:
    """Tokens of a request that one block number covers, over all ranks."""
    return cache.block_size * (place.size if place is not None and shares_tokens(cache) else 1)


def is_sharded(spec: LayerSpec) -> bool:
    """Whether the ranks share the tokens of the layer: a decoder with pages that sees all tokens before its own."""
    cache = kv_cache_spec_for(spec, spec.block_size or 1)
    return cache is not None and shares_tokens(cache)


def context_spec(spec: LayerSpec) -> LayerSpec:
    """The layer over the keys of one rank, which all come before its queries.

    Latent attention decodes row by row instead, each with its own number of keys, which needs no such mask.
    """
    return spec.replace(needs_lse=True, **({} if spec.mla is not None else {"causal": False}))


def new_tokens_spec(spec: LayerSpec) -> LayerSpec:
    """The layer over the tokens of the step, whose K and V come with the call."""
    stored = {"kv_cache_dtype": "auto", "block_size": None, "head_scales": False}
    return spec.replace(direct_kv=True, needs_lse=True, **stored)


def refusal(spec: LayerSpec) -> Reason | None:
    """The reason why ranks cannot share the tokens of a layer, or None. Whole layers are not refused."""
    remedy = "plan without context_parallel"
    if spec.state is not None:
        fact = "a state not supported under context parallelism: it is of all tokens before a rank's own"
        return Reason(fact, code=CODE, field="state", remedy=remedy)
    if not is_sharded(spec):
        return None
    facts = (
        (spec.has_alibi, "alibi", "has_alibi", "a rank's keys are not at consecutive positions"),
        (spec.sparse is not None, "sparse attention", "sparse", "a selection is of the keys of all ranks"),
        (spec.mm_prefix, "multimodal prefix spans", "mm_prefix", "a span is of the keys of all ranks"),
        (bool(spec.invariance), "invariance", "invariance", "bits depend on how many ranks share the keys"),
        (
            spec.is_windowed or spec.chunk_size is not None,
            "a window that keeps all tokens",
            "window" if spec.is_windowed else "chunk_size",
            "its pages are those of full layers, and its keys those of a window",
        ),
    )
    for asked, what, field, why in facts:
        if asked:
            fact = f"{what} not supported under context parallelism: {why}"
            return Reason(fact, code=CODE, field=field, remedy=remedy)
    return None


def refuse_layers(decisions: Mapping[str, Decision], specs: Mapping[str, LayerSpec]) -> None:
    """Refuse layers whose tokens ranks cannot share, with the reason against every backend.

    Raises:
        NoBackendError: there are such layers; BackendUnavailableError if a rule asks for the backend of the first.
    """
    reasons = {name: reason for name, spec in specs.items() if (reason := refusal(spec)) is not None}
    if not reasons:
        return
    alike: dict[Reason, list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault(reason, []).append(name)
    lines = [
        f"\n  layer {names[0]}{f' and {len(names) - 1} like it' if names[1:] else ''}: {reason}"
        for reason, names in alike.items()
    ]
    name = next(iter(reasons))
    decision = _refused(decisions[name], reasons[name])
    message = f"ranks cannot share the tokens of{''.join(lines)}"
    if decision.rule is not None:
        raise BackendUnavailableError(message, decision, list(alike))
    raise NoBackendError(message, decision)


def _refused(decision: Decision, reason: Reason) -> Decision:
    """The decision with the reason against each candidate, and without a backend."""
    gate = Gate.CONFIGURATION
    candidates = tuple(
        dataclasses.replace(each, refused_at=each.refused_at or gate, reasons=(*each.reasons, reason))
        for each in decision.candidates
    )
    none: dict[str, Any] = dict.fromkeys(("backend", "backend_cls", "block_size", "kv_cache_layout"))
    return dataclasses.replace(decision, candidates=candidates, **none)


def check_interleave(decisions: Iterable[tuple[str, Decision]], place: ContextParallel) -> None:
    """LayoutError if a block of a sharded layer would cut a run of tokens; it names the layer."""
    for name, decision in decisions:
        if is_sharded(decision.spec) and (decision.block_size or 1) % place.interleave:
            limit = f"must divide the block size {decision.block_size} of layer {name} on {decision.backend}"
            remedy = "choose another interleave, such as 1"
            raise LayoutError("context_parallel.interleave", place.interleave, limit, remedy)


REQUESTS = (1, 8, 64)
"""The numbers of requests that a plan gives a length for."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceRates:
    """Measured rates of a device and of the link between devices of one host.

    Args:
        kv_bytes: bytes of keys and values that a decode reads in a microsecond.
        flops: floating-point operations of a decode in a microsecond.
        link_bytes: bytes that a rank receives in a microsecond.
        collective_us: microseconds of a collective without data, inside a graph.
        merge_us: microseconds of the merge of partial results.
    """

    kv_bytes: float
    flops: float
    link_bytes: float
    collective_us: float
    merge_us: float

    @classmethod
    def of(cls, device: Device) -> Self | None:
        """The rates of H200 for devices of its compute capability; None for others, which were not measured."""
        if device.type != "cuda" or device.capability != (9, 0):
            return None
        return cls(4.3e6, 6e8, 1.7e5, 8.0, 4.0)


@dataclasses.dataclass(frozen=True, slots=True)
class SharingCost:
    """The times of the sharded layers of a model in one decode step, in microseconds.

    Args:
        ranks: that share the tokens.
        specs: of the sharded layers.
        rates: of the devices.
    """

    ranks: int
    specs: tuple[LayerSpec, ...]
    rates: DeviceRates

    @classmethod
    def of(cls, ranks: int, specs: Iterable[LayerSpec], device: Device) -> Self | None:
        """The cost for a device; None without sharded layers, or for a device that was not measured."""
        ranks = check_size("ranks", ranks)
        if not isinstance(device, Device):
            raise SpecError("device", device, "must be a Device")
        try:
            layers = tuple(specs)
        except Exception:  # noqa: BLE001  (`__iter__` is code of the caller)
            raise SpecError("specs", specs, "must be LayerSpecs") from None
        if not all(isinstance(each, LayerSpec) for each in layers):
            raise SpecError("specs", specs, "must be LayerSpecs")
        rates = DeviceRates.of(device)
        return cls(ranks, layers, rates) if rates is not None and layers else None

    def attention_us(self, tokens: int) -> float:
        """The layers of one rank that has all keys: `tokens` of all requests together."""
        return tokens * sum(map(self._token_us, self.specs))

    def exchange_us(self, requests: int) -> float:
        """The exchange of partial results and their merge, of all layers."""
        return sum(self._exchange_us(spec, requests) for spec in self.specs)

    def shared_us(self, requests: int, tokens: int) -> float:
        """The layers of ranks that share `tokens` of all requests."""
        return self.attention_us(tokens) / self.ranks + self.exchange_us(requests)

    def pays_from(self, requests: int) -> int:
        """The computed tokens of each of so many requests from which ranks are faster than one GPU."""
        gain = self.attention_us(requests) * (1 - 1 / self.ranks)
        return math.ceil(self.exchange_us(requests) / gain)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object: rates, and the lengths by number of requests."""
        lengths = {str(requests): self.pays_from(requests) for requests in REQUESTS}
        return {"rates": dataclasses.asdict(self.rates), "pays_from": lengths}

    def __str__(self) -> str:
        one, *more = ((requests, self.pays_from(requests)) for requests in REQUESTS)
        others = " and ".join(f"{tokens:,} of each of {requests}" for requests, tokens in more)
        return (
            f"sharing tokens makes decodes faster from {one[1]:,} tokens of one request, {others}, "
            f"by a model of times measured on two H200"
        )

    def _token_us(self, spec: LayerSpec) -> float:
        # A decode is bound by the bytes of its keys, or with many heads on one latent by its products.
        pages = kv_cache_spec_for(spec, block := spec.block_size or 16)
        stored = 0.0 if pages is None else pages.page_size_bytes / block
        key, value = spec.head_size, spec.head_size_v if spec.mla is None else spec.mla.kv_lora_rank
        flops = 2 * spec.num_heads * (key + value)
        return max(stored / self.rates.kv_bytes, flops / self.rates.flops)

    def _exchange_us(self, spec: LayerSpec, requests: int) -> float:
        rows, rates, others = requests * spec.num_heads, self.rates, self.ranks - 1
        outputs = rows * spec.output_size * element_size(spec.dtype)
        if outputs <= MOST_SENT_BYTES:
            received, collectives = float(others * (outputs + 4 * rows)), 1
        else:
            received, collectives = others * 4 * rows + 2 * others / self.ranks * outputs, 2
        return collectives * rates.collective_us + received / rates.link_bytes + rates.merge_us


def check_sharing(plan: ModelPlan, place: ContextParallel | None, fast_prefill: Collection[str]) -> None:
    """LayoutError for a place without a plan for it, or with layers that compute only some tokens of a step."""
    if plan.context_parallel is None and checked_place(place) is not None:
        remedy = "plan with context_parallel, or leave it out"
        raise LayoutError("context_parallel", place, "is not what the plan was made for", remedy)
    if plan.context_parallel is not None and fast_prefill:
        limit = f"is not served under context parallelism, where layer {next(iter(fast_prefill))} needs all tokens"
        raise LayoutError("kv_sharing_fast_prefill", True, limit, "leave it False")


def context_chunk_rows(plan: ModelPlan, config: BuilderConfig) -> int:
    """The rows of the prefill workspace; LayoutError for more than the plan's memory counts."""
    rows = config.context_chunk_rows
    if rows is None:
        return plan.context_chunk_rows
    if plan.memory is not None and rows > plan.context_chunk_rows:
        limit = f"must be at most {plan.context_chunk_rows}, which the plan's memory counts"
        remedy = f"plan with context_chunk_rows={rows}"
        raise LayoutError("config.context_chunk_rows", rows, limit, remedy)
    return rows


def last_readers(plan: ModelPlan) -> tuple[str, ...]:
    """The longest run of layers at the end that read the pages of others: no layer after them needs all tokens."""
    names = list(plan.decisions)
    last = list(itertools.takewhile(plan.kv_sharing.__contains__, reversed(names)))
    if not last:
        found = names[-1] if names else None
        limit = "needs last layers that read the pages of others: the last layer has its own"
        raise LayoutError("kv_sharing_fast_prefill", found, limit, "leave it False")
    sparse = next((name for name in last if plan.specs[name].sparse is not None), None)
    if sparse is not None:
        limit = "is sparse: a step's selection has a row for every token, not for the wanted ones"
        raise LayoutError("kv_sharing_fast_prefill", sparse, limit, "leave it False")
    return tuple(reversed(last))


def longest_sequence(config: BuilderConfig, max_model_len: int | None) -> int:
    """`max_model_len`, by default the configuration's.

    Raises:
        BatchError: both are None, or the length is above the configuration's.
    """
    limit = config.max_model_len
    if max_model_len is None:
        if limit is None:
            raise BatchError("max_model_len", None, "is required: config.max_model_len is None too")
        return limit
    max_model_len = integer("max_model_len", max_model_len)
    if limit is not None and max_model_len > limit:
        raise BatchError("max_model_len", max_model_len, f"must be at most config.max_model_len={limit}")
    return max_model_len


def device_of(plan: ModelPlan, device: torch.device | str | None) -> torch.device:
    """The device of a runtime: `device`, by default that of the plan; LayoutError for another type."""
    # torch names ROCm devices "cuda".
    planned = {"rocm": "cuda"}.get(plan.device.type, plan.device.type)
    where = torch_device("device", planned if device is None else device, LayoutError)
    if where.type != planned:
        limit = f"is not the device of the plan: {plan.device}"
        raise LayoutError("device", str(where), limit, "plan for it")
    return where
