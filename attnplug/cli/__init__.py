"""The command line: the commands and their output, without other logic."""

from __future__ import annotations

from attnplug.cli.app import main as main
