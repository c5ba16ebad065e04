"""The exception tree, under the name users import it by."""

from attnplug.core.errors import *  # noqa: F403
from attnplug.core.errors import __all__ as __all__
