"""The check before timing: some rows of a backend's output against the float64 oracle."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from attnplug.core.features import Feature
from attnplug.core.impl import LayerTensors
from attnplug.testing.comparison import assert_close, tolerance
from attnplug.testing.oracle import OracleResult, request_oracle

if TYPE_CHECKING:
    from attnplug.core.spec import LayerSpec
    from attnplug.tuning.step_inputs import StepInputs

_ROWS = 4
"""The first and the last rows of a request that are compared: the whole of a long prefill would take minutes."""
_WITHOUT: dict[Feature, dict[str, Any]] = {
    Feature.SLIDING_WINDOW: {"window": (-1, -1)},
    Feature.CHUNKED_LOCAL: {"chunk_size": None},
    Feature.SOFT_CAP: {"logits_soft_cap": None},
    Feature.SINKS: {"has_sinks": False},
    Feature.ALIBI: {"has_alibi": False},
}
"""Layers without a feature, to recognise a backend that ignores it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wrong:
    """A wrong output: the difference, and the lower-case name of the feature at fault; "plain" if none is asked for."""

    text: str
    feature: str


def check_output(inputs: StepInputs) -> Wrong | None:
    """Compare sampled rows of `inputs.output` with the oracle; None if they agree within the tolerance."""
    for part in _parts(inputs):
        problem = part.problem(inputs.spec)
        if problem is not None:
            return Wrong(*_at_fault(part, inputs.spec, problem))
    return None


def _at_fault(part: _Part, spec: LayerSpec, problem: str) -> tuple[str, str]:
    asked = spec.required_features()
    for feature, changes in _WITHOUT.items():
        if feature in asked and part.problem(spec.replace(**changes)) is None:
            name = next(iter(feature.names()))
            return f"{name} ignored: {problem}", name
    return problem, feature_of(spec)


def feature_of(spec: LayerSpec) -> str:
    """The feature that a refuted cell of a layer names, where none of them is known to be at fault."""
    return next(iter(spec.required_features().names()), "plain")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some rows of a request, for some of the heads."""

    name: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    seq_len: int
    found: torch.Tensor
    tensors: LayerTensors

    def problem(self, spec: LayerSpec) -> str | None:
        """The difference from the oracle of `spec`, or None."""
        tensors = dataclasses.replace(
            self.tensors,
            sinks=self.tensors.sinks if spec.has_sinks else None,
            alibi_slopes=self.tensors.alibi_slopes if spec.has_alibi else None,
        )
        few = spec.replace(num_heads=self.query.shape[1], num_kv_heads=self.key.shape[1], scale=spec.scale)
        expected: OracleResult = request_oracle(
            few, self.query, self.key.double(), self.value.double(), self.seq_len, tensors=tensors
        )
        bound = tolerance(few, expected.logit_size)
        try:
            assert_close(self.found, expected.output, bound.output, self.name, whole=bound.whole)
        except AssertionError as problem:
            return str(problem)
        return None


def _parts(inputs: StepInputs) -> Iterator[_Part]:
    spec, shape = inputs.spec, inputs.shape
    lengths = inputs.shape.lengths
    # Of a mixed step, the last request that decodes and the first that prefills are among them.
    chosen = sorted({0, shape.decodes - 1, shape.decodes, shape.requests // 2, shape.requests - 1} - {-1})
    begins = [0, *itertools.accumulate(shape.query_lens)]
    kv_heads = sorted({0, spec.num_kv_heads - 1})
    group = spec.num_heads // spec.num_kv_heads
    # The first and the last query head of each KV head: a wrong mapping of heads is wrong in these too.
    heads = [head * group + each for head in kv_heads for each in sorted({0, group - 1})]
    tensors = _tensors_of(inputs.tensors, heads)
    for request in chosen:
        keys, values = inputs.keys(request)
        length, begin, new = lengths[request], begins[request], shape.query_lens[request]
        for first in sorted({0, max(new - _ROWS, 0)}):
            rows = min(_ROWS, new - first)
            end = length - new + first + rows
            # Without causality a query sees all keys, so only the last rows have none after them.
            if not spec.causal and end != length:
                continue
            span = slice(begin + first, begin + first + rows)
            yield _Part(
                f"output of request {request}, rows {first} to {first + rows - 1}",
                inputs.query[span][:, heads].cpu(),
                keys[:end, kv_heads].cpu(),
                values[:end, kv_heads].cpu(),
                end,
                inputs.output[span][:, heads],
                tensors,
            )


def _tensors_of(tensors: LayerTensors, heads: list[int]) -> LayerTensors:
    def few(each: torch.Tensor | None) -> torch.Tensor | None:
        return None if each is None else each.cpu()[heads]

    return dataclasses.replace(
        tensors,
        sinks=few(tensors.sinks),
        alibi_slopes=few(tensors.alibi_slopes),
        w_uk=few(tensors.w_uk),
        w_uv=few(tensors.w_uv),
    )
