"""`python -m attnplug.cli`."""

from attnplug.cli import main_of_module

main_of_module()
