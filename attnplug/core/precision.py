"""Attention in the dtypes that the caller gave, also inside of `torch.autocast`."""

from __future__ import annotations

import contextlib

import torch

# One object, because each forward of a layer enters it.
_AS_IT_IS: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context whose operations keep their dtypes.

    Where autocast is not enabled for the device, entering it does nothing.
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return _AS_IT_IS
    # Autocast would multiply float32 sums in its lower precision.
    return torch.autocast(kind, enabled=False)
