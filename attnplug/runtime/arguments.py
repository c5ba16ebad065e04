"""Checks of arguments that an engine gives; see `attnplug.core.arguments`."""

from __future__ import annotations

from attnplug.core.arguments import instance as instance
from attnplug.core.arguments import integer as integer
from attnplug.core.arguments import integers as integers
from attnplug.core.arguments import listed as listed
from attnplug.core.arguments import torch_device as torch_device
