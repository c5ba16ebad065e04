"""The configurations inside a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from attnplug._system.text import shown
from attnplug.core.errors import ModelConfigError


def parts_of(config: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The configuration and those inside it, each with its place; ModelConfigError for a part that is none."""
    yield before, config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from parts_of(part, f"{before}{name}.")
        elif part is not None and not isinstance(part, Mapping):
            raise ModelConfigError(
                f"{before}{name}={shown(part, 40)}: must be an object with the configuration of that part"
            )
