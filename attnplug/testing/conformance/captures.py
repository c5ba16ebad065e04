"""Without a GPU: metadata that was built for a capture serves later steps in the same buffers.

The layers run again with that metadata, as a graph would. So a builder that declares graphs and copies lengths or
tables to the host fails on any machine. The graphs themselves are checked on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from attnplug.core.composite import CompositeBackend
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.gpu import GPU_TYPES
from attnplug.testing.conformance.graphs import LEVELS, check_level
from attnplug.testing.conformance.target import Target

_RULE = (
    "rule: a builder that declares CUDA graphs plans in build, and forward reads lengths, tables and slots from the "
    "tensors of the step, because a graph runs no Python again; declare AttentionCGSupport.NEVER otherwise"
)


def checks(target: Target) -> Iterator[Check]:
    """One check, at the level that the builder declares; the halves of a composite are checked on their own."""
    if (
        target.device.type in GPU_TYPES
        or target.phase is not None
        or issubclass(target.backend, CompositeBackend)
    ):
        return
    summary = "metadata that was built for a capture serves later steps in the same buffers"
    yield Check.of("builder/captured", summary, _check_captured, target)


def _check_captured(target: Target) -> None:
    *higher, lowest = reversed(LEVELS)
    try:
        for name in higher:
            with contextlib.suppress(CheckSkipped):
                check_level(target, name)
                return
        check_level(target, lowest)
    except ConformanceError as problem:
        raise ConformanceError(f"{problem}\n{_RULE}", problem.named) from problem
