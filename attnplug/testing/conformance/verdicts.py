"""Whether a backend's answer is the oracle's, and which known mistake gives the same numbers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch

from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.testing.batches import Batch
from attnplug.testing.comparison import assert_close, assert_lse_close, tolerance
from attnplug.testing.conformance.check import CheckSkipped, ConformanceError
from attnplug.testing.conformance.driving import Answer, Driver
from attnplug.testing.conformance.target import Target

__all__ = ["Misread", "agrees", "check_slots", "compare", "during", "judge", "with_lengths"]

Misread: TypeAlias = Callable[[CommonAttentionMetadata], CommonAttentionMetadata]
"""A step as a backend that makes a known mistake takes it."""


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


def agrees(batch: Batch, found: Answer, *, use_sinks: bool = True) -> bool:
    """Whether `found` is the oracle's answer."""
    try:
        compare(batch, found, use_sinks=use_sinks)
    except AssertionError:
        return False
    return True


def check_slots(metadata: AttentionMetadata, common: CommonAttentionMetadata, what: str) -> None:
    """ConformanceError unless the metadata has the step's own slots: `forward` writes there."""
    tokens = common.num_actual_tokens
    if not torch.equal(metadata.slot_mapping[:tokens].long(), common.slot_mapping[:tokens]):
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
