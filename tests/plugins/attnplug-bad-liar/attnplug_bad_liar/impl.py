"""TORCH's impl without the sinks."""

from __future__ import annotations

from typing import Any

from attnplug.backends.torch_native.impl import TorchImpl


class BadLiarImpl(TorchImpl):
    """Attends as TORCH does on a layer without sinks."""

    def attend(self, *args: Any, **kwargs: Any) -> Any:
        """TORCH's, which may leave sinks out where partial results are merged, always without them."""
        return super().attend(*args, **{**kwargs, "use_sinks": False})
