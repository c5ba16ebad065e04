"""`python -m attnplug`."""

from attnplug.cli import main_of_module

main_of_module()
