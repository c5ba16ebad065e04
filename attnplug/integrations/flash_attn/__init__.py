"""Three functions of the flash-attn library (2.8), each call served by the backend that attnplug selects.

An engine of one file changes its import line::

    from attnplug.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

Arguments, shapes and results are those of the library. What no backend serves is an error with the reasons, and
an argument whose effect attnplug does not have is an error, never ignored. There is no backward pass.
"""

from attnplug.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from attnplug.integrations.flash_attn.running import decisions, one_step

__all__ = ["decisions", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "one_step"]
