"""attnplug's backends in vLLM: `ATTNPLUG`, which selects for each layer, and `ATTNPLUG_NAME` for each backend.

vLLM calls `register` in each of its processes, through the entry point `attnplug` of `vllm.general_plugins`. vLLM is
imported by that call only.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Make the backends known to vLLM; may be called again.

    `--attention-backend ATTNPLUG` then selects a backend for each layer by attnplug's rules, and
    `--attention-backend ATTNPLUG_TRITON` is TRITON for all layers; names follow `attnplug list`.
    """
    from attnplug.integrations.vllm.names import register_names

    register_names()
