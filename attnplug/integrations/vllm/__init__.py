"""attnplug's backends in vLLM: `ATTNPLUG`, which selects for each layer, and `ATTNPLUG_NAME` for each backend.

vLLM calls `register` in each of its processes, through the entry point `attnplug` of `vllm.general_plugins`. vLLM is
imported by that call only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug.registry.selection.decision import Decision

__all__ = ["decisions", "register"]

_log = logging.getLogger("attnplug")


def register() -> None:
    """Make the backends known to vLLM; may be called again.

    `--attention-backend ATTNPLUG` then selects a backend for each layer by attnplug's rules, and
    `--attention-backend ATTNPLUG_TRITON` is TRITON for all layers; names follow `attnplug list`.

    A vLLM without the interface gets a warning and no names: it starts, as it does without attnplug.
    """
    try:
        from attnplug.integrations.vllm.names import register_names
    except ImportError as error:
        _log.warning("vLLM gets no ATTNPLUG backends: its interface is not that of 0.20 to 0.33 (%s)", error)
        return

    register_names()


def decisions(vllm_config: Any) -> dict[str, Decision]:
    """The decision for each layer that has run on attnplug, by vLLM's name of the layer.

    Args:
        vllm_config: the engine's VllmConfig, in the process that runs the model. With
            `VLLM_ENABLE_V1_MULTIPROCESSING=0` that is `llm.llm_engine.vllm_config`.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found = {name: getattr(getattr(layer, "impl", None), "decision", None) for name, layer in layers.items()}
    return {name: decision for name, decision in found.items() if decision is not None}
