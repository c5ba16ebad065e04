"""The Device for an argument, and whether this machine has it."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, TypeAlias

from attnplug.core.device import Device
from attnplug.core.errors import SpecError

if TYPE_CHECKING:
    import torch

DeviceLike: TypeAlias = "Device | str | torch.device | None"
"""A Device, text that Device.parse reads, a torch.device, or None for the current device."""


def resolve_device(device: DeviceLike) -> Device:
    """The Device for an argument. "cuda:1" is that GPU of this machine; "cuda" is the current one.

    Raises:
        SpecError: text that is not a device, a GPU that this machine does not have, or another type.
    """
    if device is None:
        return Device.current()
    if not isinstance(device, Device):
        # The attributes tell a torch.device, so torch is not imported.
        text = device if isinstance(device, str) else getattr(device, "type", None)
        if not isinstance(text, str):
            raise SpecError("device", device, "must be a Device, text, a torch.device or None")
        kind, _, number = text.partition(":")
        index = getattr(device, "index", None) if text is not device else number
        # No machine has a million GPUs, and Python refuses to read integers of thousands of digits.
        if kind in ("cuda", "rocm") and re.fullmatch("[0-9]{1,6}", str(index)):
            return Device.current(int(str(index)))
        if text.strip().lower() == "gpu":
            text = "cuda" if Device.current().type == "cpu" else "current"
        # The current GPU may change, so "current" is not cached.
        device = Device.current() if text == "current" else _parse(text)
    # Backends judge a GPU by its capability, so text such as "cuda" gets that of the current one.
    if device.capability is None and device.type in ("cuda", "rocm"):
        current = Device.current()
        if device.matches(current):
            return current
    return device


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> Device:
    return Device.parse(text)


def is_here(device: Device) -> bool:
    """Whether this machine has the device, so that a backend's parts can be imported for it."""
    return device.type == "cpu" or Device.current().matches(device)
