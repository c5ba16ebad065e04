"""One step of a state layer over fixed buffers: in a CUDA graph on a GPU, else with the metadata built for a capture."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnplug.runtime.states.state_graphs import StateGraphBuffers
from attnplug.runtime.states.state_step import StateStep, batch_of
from attnplug.testing.captures import captured
from attnplug.testing.conformance.check import error_context
from attnplug.testing.conformance.states.state_cases import draw_inputs

if TYPE_CHECKING:
    from attnplug.testing.conformance.states.state_runs import StateServing

SIZE = 4
"""Requests of a graph; fewer are padded."""


class StateGraph:
    """A captured step of SIZE requests with `queries` tokens each.

    Args:
        serving: the layer.
        queries: of each request.
    """

    def __init__(self, serving: StateServing, queries: int) -> None:
        device, rows = serving.pages.device, SIZE * queries
        names = [str(place) for place in range(SIZE)]
        common = batch_of(names, [queries] * SIZE, [0] * SIZE)
        common = common.changed(
            query_start_loc=common.query_start_loc.to(device), seq_lens=common.seq_lens.to(device)
        )
        self.buffers, self.queries = StateGraphBuffers.allocate(SIZE, rows, device), queries
        drawn = draw_inputs(serving.spec, rows, 9).by_token().items()
        self._inputs = {name: None if each is None else each.to(device) for name, each in drawn}
        query, key, value, decay, beta = self._inputs.values()
        like = query if value is None else value
        assert query is not None and like is not None  # noqa: PT018, S101
        self._output = torch.empty_like(like)
        step = self.buffers.step(common)
        with error_context("build_for_cudagraph_capture"):
            # Kept, since a graph reads the tensors of its metadata.
            self._metadata = serving.builder.build_for_cudagraph_capture(step.common)
        call = query, key, value, serving.pages, self._metadata, self._output
        work: Callable[[], object] = functools.partial(
            serving.impl.forward, None, *call, decay=decay, beta=beta
        )
        with error_context("forward, with pages and slots of -1"):
            work()
        self._replay = captured(work) if device.type == "cuda" else work

    def run(self, step: StateStep, given: Mapping[str, torch.Tensor | None], output: torch.Tensor) -> None:
        """Copy a step into the buffers, replay, and copy its rows of the output; other rows of inputs are NaN."""
        tokens = int(step.common.query_start_loc_cpu[-1])
        for name, buffer in self._inputs.items():
            rows = given[name]
            if buffer is not None and rows is not None:
                buffer.fill_(torch.nan)
                buffer[:tokens] = rows[:tokens]
        self._output.fill_(torch.nan)
        self.buffers.copy_from(step)
        with error_context("a replay"), torch.no_grad():
            self._replay()
        output[:tokens] = self._output[:tokens]


def graph_level(backend: Any) -> int:
    """The level of graphs that the builder of a backend declares."""
    return int(backend.get_builder_cls().cudagraph_support)
