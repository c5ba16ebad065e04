"""The command line: the commands and their output, without other logic."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the program. Ctrl-C ends it with exit code 130, also while it is being imported."""
    try:
        from attnplug.cli.app import main as program

        program()
    except KeyboardInterrupt:
        sys.exit(130)
