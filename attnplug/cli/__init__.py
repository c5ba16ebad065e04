"""The command line: the commands and their output, without other logic."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the program. Ctrl-C ends it with exit code 130, also while it is being imported."""
    try:
        from attnplug.cli.app import main as program

        program()
    except KeyboardInterrupt:
        sys.exit(130)


def main_of_module() -> None:
    """As `main`, for `python -m`, which puts the current folder first: files there may have the names of modules."""
    # os.path, because nothing that Python has not loaded yet may be imported before.
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    if not sys.flags.safe_path and sys.path[:1] not in ([source], []):
        del sys.path[0]
    main()
