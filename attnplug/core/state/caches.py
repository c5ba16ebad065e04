"""The state of one layer and one request: its shape, its dtype and its bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from attnplug.core.checks import check_size
from attnplug.core.dtypes import dtype_name, element_size
from attnplug.core.errors import SpecError
from attnplug.core.spec import LayerSpec


@dataclasses.dataclass(frozen=True, slots=True)
class StateCacheSpec:
    """One page of states: what a layer stores for a request. The order of its elements is the backend's own.

    Args:
        shape: sizes of a page: (value heads, K, V), or (channels, width - 1) of a convolution.
        dtype: storage dtype.

    Raises:
        SpecError: a size below 1, or a dtype that no state is stored in.
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.shape, Sequence) or isinstance(self.shape, str) or not self.shape:
            raise SpecError("shape", self.shape, "must be the sizes of a page")
        object.__setattr__(self, "shape", tuple(check_size("shape", size) for size in self.shape))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page."""
        return math.prod(self.shape) * element_size(self.dtype)


def state_cache_for(spec: LayerSpec) -> StateCacheSpec | None:
    """The state of a layer; None for layers without one."""
    dims = spec.state
    if dims is None:
        return None
    shape: tuple[int, ...] = spec.num_heads, spec.head_size, spec.head_size_v
    if dims.width is not None:
        shape = spec.num_heads, dims.width - 1
    return StateCacheSpec(shape, spec.resolved_kv_cache_dtype)
