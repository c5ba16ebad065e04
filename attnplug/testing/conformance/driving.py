"""A backend's parts put together by hand: a builder, its layers, and a batch through them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from attnplug.core.config import BuilderConfig
from attnplug.core.impl import AttentionImpl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.testing.batches import Batch
from attnplug.testing.comparison import assert_close, assert_lse_close, tolerance
from attnplug.testing.conformance.check import CheckSkipped, ConformanceError
from attnplug.testing.conformance.target import Target

__all__ = [
    "Answer",
    "Build",
    "DrivenLayer",
    "Driver",
    "Misread",
    "check_slots",
    "compare",
    "during",
    "judge",
    "with_lengths",
]

Build: TypeAlias = Callable[[AttentionMetadataBuilder[Any], CommonAttentionMetadata], AttentionMetadata]
"""A way of making a step's metadata."""

Misread: TypeAlias = Callable[[CommonAttentionMetadata], CommonAttentionMetadata]
"""A step as a backend that makes a known mistake takes it."""


class Answer(NamedTuple):
    """What a backend gave for a batch's T tokens: output `[T, H, Dv]`, and LSE `[T, H]` where it is asked."""

    output: torch.Tensor
    lse: torch.Tensor | None


class DrivenLayer:
    """A layer as its impl sees it: the AttentionLayer protocol.

    Args:
        target: the backend.
        name: the layer's.
        batch: has its spec, tensors and device.
    """

    def __init__(self, target: Target, name: str, batch: Batch) -> None:
        self._q_scale_float = self._prob_scale_float = 1.0
        self._k_scale_float, self._v_scale_float = float(batch.tensors.k_scale), float(batch.tensors.v_scale)
        self._q_scale = self._prob_scale = torch.ones((), device=batch.query.device)
        self._k_scale = torch.tensor(self._k_scale_float, device=batch.query.device)
        self._v_scale = torch.tensor(self._v_scale_float, device=batch.query.device)
        options = target.backend.Options
        self.impl: AttentionImpl[Any] = target.backend.get_impl_cls().from_spec(
            batch.spec,
            layer_name=name,
            tensors=batch.tensors,
            options=None if options is None else options(),
        )
        self.impl.process_weights_after_loading(getattr(torch, batch.spec.dtype))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Driver:
    """A builder, and the layers that it serves: they share pages of one kind.

    Args:
        layers: in order.
        builder: knows them by its `config.layers`.
    """

    layers: tuple[DrivenLayer, ...]
    builder: AttentionMetadataBuilder[Any]

    @classmethod
    def of(cls, target: Target, *batches: Batch, **config: Any) -> Driver:
        """A builder for one layer of each batch, which must be over pages; `config` is BuilderConfig's."""
        named = {f"layers.{i}": DrivenLayer(target, f"layers.{i}", batch) for i, batch in enumerate(batches)}
        first = batches[0]
        assert first.kv_cache is not None  # noqa: S101 - the kit's own batches
        block_size = target.backend.split_kv(first.kv_cache, first.spec)[0].shape[1]
        cache: Any = kv_cache_spec_for(first.spec, block_size)
        made = BuilderConfig(layers=named, **config)
        builder = target.backend.get_builder_cls()(cache, list(named), made, first.query.device)
        return cls(tuple(named.values()), builder)

    def run(
        self,
        batch: Batch,
        metadata: AttentionMetadata,
        *,
        layer: int = 0,
        use_sinks: bool = True,
        writes: bool = True,
    ) -> Answer:
        """One layer's forward into poisoned outputs; `writes=False` brings no key: the pages hold all."""
        spec, query, tokens = batch.spec, batch.query, batch.common.num_actual_tokens
        output = query.new_full((query.shape[0], spec.num_heads, spec.head_size_v), torch.nan)
        lse = torch.full(output.shape[:2], torch.nan, device=query.device) if spec.needs_lse else None
        self.layers[layer].impl.forward(
            self.layers[layer],
            query,
            batch.key if writes else None,
            batch.value if writes else None,
            batch.kv_cache,
            metadata,
            output,
            output_lse=lse,
            use_sinks=use_sinks,
        )
        return Answer(output[:tokens], None if lse is None else lse[:tokens])


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """ConformanceError that says `what` was under way, where a backend raises."""
    try:
        yield
    except (CheckSkipped, ConformanceError):
        raise
    except Exception as error:
        raise ConformanceError(f"{what}: raised {type(error).__name__}: {error}") from error


def compare(batch: Batch, found: Answer, *, use_sinks: bool = True) -> None:
    """AssertionError unless `found` is the oracle's answer."""
    expected, bound = batch.oracle(use_sinks=use_sinks), tolerance(batch.spec)
    assert_close(found.output, expected.output, bound.output)
    if found.lse is not None:
        assert_lse_close(found.lse, expected.lse, bound.lse)


def check_slots(metadata: AttentionMetadata, common: CommonAttentionMetadata, what: str) -> None:
    """ConformanceError unless the metadata has the step's own slots: `forward` writes there."""
    tokens = common.num_actual_tokens
    if not torch.equal(metadata.slot_mapping[:tokens], common.slot_mapping[:tokens]):
        raise ConformanceError(f"{what}: metadata.slot_mapping is not the step's own, so new keys go astray")


def judge(
    target: Target,
    make: Callable[[], Batch],
    found: Answer,
    what: str,
    likely: Mapping[str, Misread] | None = None,
) -> None:
    """ConformanceError unless `found` is the oracle's answer to the batch.

    Args:
        target: the backend.
        make: the batch, as it was before it was run.
        found: what came.
        what: how it was asked for.
        likely: mistakes by name. Where a plain build of the step as one of them takes it gives the same
            numbers, the error names it.
    """
    try:
        compare(make(), found)
    except AssertionError as problem:
        named = next(
            (name for name, misread in (likely or {}).items() if _gives(target, make, misread, found)), None
        )
        because = f"; these are the numbers of {named}" if named else ""
        raise ConformanceError(f"{what}: {problem}{because}", named) from None


def with_lengths(common: CommonAttentionMetadata, lengths: torch.Tensor) -> CommonAttentionMetadata:
    """The step with other lengths, int32 `[R]` on the host, and none below 0."""
    host = lengths.clamp(min=0).int()
    return dataclasses.replace(
        common,
        seq_lens=host.to(common.seq_lens.device),
        seq_lens_host=host.numpy(),
        seq_lens_host_exact=True,
        max_seq_len=int(host.max()),
        _seq_lens_cpu=None,
        _num_computed_tokens_cpu=None,
    )


def _gives(target: Target, make: Callable[[], Batch], misread: Misread, found: Answer) -> bool:
    batch = make()
    # A step taken wrongly may well raise: then it is not what came.
    with contextlib.suppress(Exception):
        driver, common = Driver.of(target, batch), misread(batch.common)
        given = driver.run(batch, driver.builder.build(0, common)).output
        bound = tolerance(batch.spec).output
        return torch.allclose(given.double(), found.output.double(), rtol=bound, atol=bound, equal_nan=True)
    return False
