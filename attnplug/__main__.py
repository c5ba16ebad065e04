"""`python -m attnplug`."""

from attnplug.cli.app import main

main()
