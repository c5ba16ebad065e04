"""The former name of `attnplug.ops.checks`, which plugins of interface 1 import."""

from attnplug.ops.checks import *  # noqa: F403
