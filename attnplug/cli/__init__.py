"""The command line: one file per command, and no logic beyond printing."""

from __future__ import annotations

from attnplug.cli.app import main as main
