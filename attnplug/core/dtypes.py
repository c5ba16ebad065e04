"""Names of element types, without importing torch."""

from __future__ import annotations

import difflib
from typing import Self

from attnplug.core.errors import SpecError
from attnplug.core.kv_format import kv_format, kv_format_of_dtype, kv_formats

DTYPES: tuple[str, ...] = ("float16", "bfloat16", "float32")
"""Dtypes of queries, keys, values and outputs."""


class DtypeName(str):
    """The name of a dtype that also equals the torch dtype of that name.

    Overrides of `supports_dtype` ported from vLLM compare with torch dtypes, and core imports no torch. A set finds it
    by its hash alone, which is that of the name unless another is given.

    Args:
        name: of the dtype.
        own_hash: the hash, such as that of the torch dtype.
    """

    __slots__ = ("_own_hash", "was_hashed")
    _own_hash: int
    was_hashed: bool
    """Whether it was looked up in a set, a dict or a cache."""

    def __new__(cls, name: str, own_hash: int | None = None) -> Self:
        """The text, with its hash."""
        made = super().__new__(cls, name)
        made._own_hash = str.__hash__(made) if own_hash is None else own_hash
        made.was_hashed = False
        return made

    def __eq__(self, other: object) -> bool:
        return str(other) == f"torch.{self}" if _is_torch_dtype(other) else str.__eq__(self, other)

    # Written here, because str has its own, which does not call `__eq__`.
    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        self.was_hashed = True
        return self._own_hash


def _is_torch_dtype(value: object) -> bool:
    # The names of the type identify a torch.dtype, so torch is not imported.
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


def bare_dtype_name(value: object, field: str) -> str:
    """The name of any dtype, given by name or as a `torch.dtype`; SpecError for anything else."""
    if isinstance(value, str):
        return str(value).removeprefix("torch.")
    if _is_torch_dtype(value):
        return str(value).removeprefix("torch.")
    raise SpecError(field, value, "must be a dtype name such as 'bfloat16', or a torch.dtype")


def dtype_name(value: object, field: str = "dtype") -> str:
    """The name in DTYPES for a name or a `torch.dtype`; SpecError for anything else."""
    name = bare_dtype_name(value, field)
    if name not in DTYPES:
        near = difflib.get_close_matches(name, DTYPES, 1)
        hint = f"did you mean {near[0]!r}?" if near else None
        raise SpecError(field, value, f"must be one of {', '.join(DTYPES)}", hint)
    return name


def kv_cache_dtype_name(value: object, field: str = "kv_cache_dtype") -> str:
    """A KV cache dtype as an open string: "auto", "fp8_e4m3", ...; a `torch.dtype` becomes its name."""
    name = bare_dtype_name(value, field)
    if not name:
        raise SpecError(field, value, "must be 'auto' or the name of a storage dtype")
    # torch and engines spell fp8 types differently. One spelling makes equal specs compare equal.
    row = kv_format_of_dtype(name)
    return name.replace("float8_", "fp8_") if row is None else row.name


def output_quant_key(dtype: object, has_block_scale: bool = False) -> str | None:
    """The `quant_key` of an output: its dtype's name, such as "fp8_e4m3", with one scale for the whole tensor.

    With a scale for each block of elements it is "fp8_e4m3_block", ..., and "nvfp4" for uint8, of two values each.
    None for outputs that are not quantised.
    """
    name = kv_cache_dtype_name(dtype, "output.dtype")
    if name in DTYPES:
        return None
    if not has_block_scale:
        return name
    return "nvfp4" if name == "uint8" else f"{name}_block"


def stored_dtype_name(kv_cache_dtype: str, dtype: str) -> str:
    """The storage dtype that `kv_cache_dtype` means: "auto" is `dtype`, "fp8" is "fp8_e4m3"."""
    return dtype if kv_cache_dtype == "auto" else kv_format(kv_cache_dtype).name


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """Whether stored values differ from the computed ones by a scale ("fp8", "fp8_e5m2", "int8")."""
    if not isinstance(kv_cache_dtype, str):
        raise SpecError("kv_cache_dtype", kv_cache_dtype, "must be the name of a dtype")
    return kv_format(kv_cache_dtype).is_quantized


def element_size(dtype: str) -> int:
    """Bytes per element of a dtype or KV cache dtype name; SpecError for an unknown name."""
    size = kv_format(dtype).size
    if size is None:
        known = ", ".join(name for row in kv_formats() if row.size for name in row.names)
        raise SpecError("dtype", dtype, f"has no known element size; known are {known}")
    return size
