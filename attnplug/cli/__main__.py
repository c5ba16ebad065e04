"""`python -m attnplug.cli`."""

from attnplug.cli import main

main()
