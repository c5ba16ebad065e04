"""Runs each kind of step of SGLang's layers once, so that no request waits for the compilation of kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from attnplug.integrations.first_steps import compiles, run_first_steps

if TYPE_CHECKING:
    from attnplug.integrations.sglang.backend import Backend

_log = logging.getLogger("attnplug")


def warm_up(backend: Backend) -> int:
    """Run the first steps of one layer of each kind that compiles kernels, on SGLang's pages; gives their number."""
    began, count, met = time.perf_counter(), 0, set[object]()
    sinks = sinks_by_layer(backend.runner.model, backend.attention_layers())
    for layer in backend.attention_layers():
        bound = backend.bound(layer, sinks.get(id(layer)))
        pages = bound.pages()
        if bound.kind in met or pages is None or not compiles(bound.decision):
            continue
        met.add(bound.kind)
        builder = backend.builder_of(bound)
        count += run_first_steps(
            bound.decision.get_backend_cls(), bound.impl, builder, bound.spec, None, pages
        )
    if count:
        _log.info("%d dummy steps before SGLang's graphs took %.1f s", count, time.perf_counter() - began)
    return count


def sinks_by_layer(model: torch.nn.Module, layers: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The sinks that models will pass to their layers, `[num_heads]` each, by the layer's id.

    SGLang gives sinks to a call only. Its models have them beside the layer, as a parameter named so with one element
    for each head. If a model passes others, or none, its layers are bound again by their first calls.

    Args:
        model: SGLang's.
        layers: its RadixAttention modules.
    """
    heads = {id(layer): layer.tp_q_head_num for layer in layers}
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        ours = [layer for layer in module.children() if id(layer) in heads]
        for name, parameter in module.named_parameters(recurse=False) if ours else ():
            found |= {
                id(layer): parameter
                for layer in ours
                if "sink" in name and parameter.shape == (heads[id(layer)],)
            }
    return found
