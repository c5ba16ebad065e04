"""A pytest plugin for a run in SGLang's environment: attnplug's names, and mutants that the kit must notice."""

from __future__ import annotations

import os
from typing import Any

import sglang_on_cpu

sglang_on_cpu.prepare()

MUTANT = os.environ.get("ATTNPLUG_HARNESS_MUTANT", "")


def pytest_configure(config: Any) -> None:
    import torch
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention

    from attnplug.integrations.sglang import register

    # The kit writes prefixes outside of no_grad.
    torch.set_grad_enabled(False)
    register()
    ours = {name for name in ATTENTION_BACKENDS if name.startswith("attnplug")}
    assert ours, "attnplug's names are not registered"
    # The kit wants each backend in one of two lists: decodes see W + 1 keys here, as all others but triton.
    dense_attention._SWA_DECODE_EXTEND_WINDOW |= ours
    if MUTANT:
        mutate(MUTANT)


def mutate(name: str) -> None:
    """Break the client in one place."""
    from attnplug.integrations.sglang import bound, layers, steps

    if name == "swapped":
        right = bound.logical
        bound.logical = lambda key, value, page: right(key, value, page).flip(1)
    elif name == "window":
        # Of the layer's W, the query's own key is not counted on top.
        seen = layers._visible
        layers._visible = lambda *given: {
            key: value - 1 if key == "sliding_window" else value for key, value in seen(*given).items()
        }
    elif name == "slots":
        slots = steps.Rows.slots
        steps.Rows.slots = lambda self, given, **named: slots(self, given, **named) + 1
    else:
        raise ValueError(name)
