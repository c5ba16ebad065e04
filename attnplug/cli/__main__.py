"""`python -m attnplug.cli`."""

from attnplug.cli.app import main

main()
