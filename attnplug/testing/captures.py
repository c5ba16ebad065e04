"""Captures of CUDA graphs that leave the process usable where they fail."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """A function that replays a graph of `work` on the current GPU.

    Raises:
        Exception: what `work` raises, or RuntimeError from the capture itself. The stream is as it was before.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    cause: Exception | None = None
    try:
        with torch.cuda.graph(graph):
            try:
                work()
            except Exception as error:
                cause = error
                raise
    except RuntimeError as error:
        # The error of an aborted capture hides its cause.
        raise (cause or error) from None
    finally:
        # An aborted capture leaves its own stream current.
        torch.cuda.set_stream(stream)
    # A graph has the addresses of its tensors, and does not keep them: what refers to them is `work`.
    return functools.partial(_replay, graph, work)


def _replay(graph: torch.cuda.CUDAGraph, _: Callable[[], object]) -> None:
    graph.replay()
