"""Layers under context parallelism: those whose tokens the ranks share, and the specs of their two parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BackendUnavailableError, LayoutError, NoBackendError, SpecError
from attnplug.core.kv_cache_spec import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, kv_cache_spec_for
from attnplug.core.reasons import Reason
from attnplug.core.spec import LayerSpec
from attnplug.registry.selection.decision import Decision, Gate

CODE = "context_parallel"


def checked_place(place: object) -> ContextParallel | None:
    """`place`, or None where a process has all tokens; SpecError for anything else than a ContextParallel."""
    if place is not None and not isinstance(place, ContextParallel):
        remedy = 'make it by attnplug.runtime.context_parallel(mesh["cp"])'
        raise SpecError("context_parallel", place, "must be a ContextParallel or None", remedy)
    return None if place is None or place.size == 1 else place


def shares_tokens(cache: KVCacheSpec) -> bool:
    """Whether the ranks share the tokens of such pages. Those of windows, chunks and cross attention are whole."""
    return isinstance(cache, (FullAttentionSpec, MLAAttentionSpec))


def tokens_per_block(cache: KVCacheSpec, place: ContextParallel | None) -> int:
    """Tokens of a request that one block number covers, over all ranks."""
    return cache.block_size * (place.size if place is not None and shares_tokens(cache) else 1)


def is_sharded(spec: LayerSpec) -> bool:
    """Whether the ranks share the tokens of the layer: a decoder with pages that sees all tokens before its own."""
    cache = kv_cache_spec_for(spec, spec.block_size or 1)
    return cache is not None and shares_tokens(cache)


def context_spec(spec: LayerSpec) -> LayerSpec:
    """The layer over the keys of one rank, all of which come before its queries.

    Latent attention decodes row by row instead, each with its own number of keys, which needs no such mask.
    """
    return (
        spec.replace(needs_lse=True) if spec.mla is not None else spec.replace(causal=False, needs_lse=True)
    )


def new_tokens_spec(spec: LayerSpec) -> LayerSpec:
    """The layer over the tokens of the step, whose K and V come with the call."""
    return spec.replace(direct_kv=True, needs_lse=True, kv_cache_dtype="auto", block_size=None)


def refusal(spec: LayerSpec) -> Reason | None:
    """The reason why ranks cannot share the tokens of a layer, or None. Whole layers are not refused."""
    if not is_sharded(spec):
        return None
    remedy = "plan without context_parallel"
    facts = (
        (spec.has_alibi, "alibi", "has_alibi", "a rank's keys are not at consecutive positions"),
        (spec.sparse is not None, "sparse attention", "sparse", "a selection is of the keys of all ranks"),
        (spec.mm_prefix, "multimodal prefix spans", "mm_prefix", "a span is of the keys of all ranks"),
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
    candidates = tuple(
        dataclasses.replace(
            each, refused_at=each.refused_at or Gate.CONFIGURATION, reasons=(*each.reasons, reason)
        )
        for each in decision.candidates
    )
    return dataclasses.replace(
        decision,
        candidates=candidates,
        backend=None,
        backend_cls=None,
        block_size=None,
        kv_cache_layout=None,
    )


def check_interleave(decisions: Iterable[tuple[str, Decision]], place: ContextParallel) -> None:
    """LayoutError if a block of a sharded layer would cut a run of tokens; it names the layer."""
    for name, decision in decisions:
        if is_sharded(decision.spec) and (decision.block_size or 1) % place.interleave:
            limit = f"must divide the block size {decision.block_size} of layer {name} on {decision.backend}"
            remedy = "choose another interleave, such as 1"
            raise LayoutError("context_parallel.interleave", place.interleave, limit, remedy)
