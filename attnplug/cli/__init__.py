"""The command line: one file per command, no logic of its own."""

from __future__ import annotations

from attnplug.cli.app import main

__all__ = ["main"]
