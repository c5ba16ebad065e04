"""The one table of the types of keys and values in KV caches: each KVFormat is a row of it. Imports no torch.

Layers, pages, the oracle, the conformance kit, the matrix, the command line and the clients of engines read their rows
here. A new type is a new row, the function that rounds to it, and the kernels that serve it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Final

_ROUNDS_FLOATS: Final = "attnplug.ops.storage:round_to_float"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """One row: a type of stored keys and values.

    Args:
        name: the `kv_cache_dtype` of a layer.
        aliases: other names of the same bytes, such as "fp8".
        family: the word for several like types: "fp8". Open names that begin with it are types of the family.
        dtype: the torch dtype of an element in a page; None if attnplug has no such pages.
        size: bytes of an element; None if pages cannot be sized.
        is_quantized: stored values differ from the computed ones by a scale.
        layer_scales: `k_scale` and `v_scale` of the layer are these scales: stored x scale = computed.
        feature: name of the Feature that a layer asks for with it; None if the backend's list of types is enough.
        rounding: "module:function" that rounds float32 values, already divided by the scale, to a torch dtype; None if
            nothing knows the numbers, so that the kit has no case and TORCH no pages. The function may write into
            its argument.
        is_common: the matrix has it for every backend, and pages and help texts show it.
        article: before its name in a sentence.
    """

    name: str
    aliases: tuple[str, ...] = ()
    family: str | None = None
    dtype: str | None = None
    size: int | None = None
    is_quantized: bool = True
    layer_scales: bool = False
    feature: str | None = None
    rounding: str | None = None
    is_common: bool = False
    article: str = "an"

    @property
    def names(self) -> tuple[str, ...]:
        """The aliases and the name."""
        return (*self.aliases, self.name)

    @property
    def has_scaled_numbers(self) -> bool:
        """Whether the kit knows its numbers, and they depend on the scales of the layer."""
        return self.layer_scales and self.rounding is not None

    @property
    def short_name(self) -> str:
        """The name without that of the family: "e4m3"."""
        return self.name.removeprefix(f"{self.family}_")


class KVFormats:
    """Rows by name. A row replaces an earlier one of the same name."""

    __slots__ = ("_by_name", "by_dtype", "rows")

    def __init__(self, rows: Iterable[KVFormat]) -> None:
        self.rows: Final = tuple({row.name: row for row in rows}.values())
        self._by_name: Final = {name: row for row in self.rows for name in row.names}
        # Reversed, so that the first row of a dtype counts.
        self.by_dtype: Final = {row.dtype: row for row in reversed(self.rows) if row.dtype is not None}

    def of(self, name: str) -> KVFormat:
        """The row of a name; for an open name without one that of its family, else one without bytes and scales."""
        row = self._by_name.get(name)
        if row is not None:
            return row
        like = next((row for row in self.rows if row.family and name.startswith(row.family)), None)
        if like is None:
            return KVFormat(name=name, is_quantized=False, article="a")
        # Other types without a feature may have scales in their pages, so the bytes of an element are not known.
        size = like.size if like.feature else None
        fixed = {"name": name, "aliases": (), "dtype": None, "rounding": None, "is_common": False}
        return dataclasses.replace(like, size=size, **fixed)  # type: ignore[arg-type]


_float = functools.partial(KVFormat, is_quantized=False, rounding=_ROUNDS_FLOATS, article="a")
_fp8 = functools.partial(KVFormat, family="fp8", size=1, layer_scales=True, feature="fp8_kv")
_known_fp8 = functools.partial(_fp8, rounding=_ROUNDS_FLOATS)

TABLE = KVFormats(
    (
        _float(name="float16", dtype="float16", size=2),
        _float(name="bfloat16", dtype="bfloat16", size=2),
        _float(name="float32", dtype="float32", size=4),
        _known_fp8(name="fp8_e4m3", aliases=("fp8",), dtype="float8_e4m3fn", is_common=True),
        _known_fp8(name="fp8_e5m2", dtype="float8_e5m2", is_common=True),
        _known_fp8(name="fp8_e4m3fnuz", dtype="float8_e4m3fnuz"),
        _known_fp8(name="fp8_e5m2fnuz", dtype="float8_e5m2fnuz"),
        _fp8(name="fp8_inc"),
        _fp8(name="fp8_ds_mla"),
        KVFormat(name="int8", family="int8", dtype="int8", size=1, layer_scales=True),
        KVFormat(name="uint8", dtype="uint8", size=1, is_quantized=False, article="a"),
        KVFormat(name="int4"),
        KVFormat(name="nvfp4", family="nvfp4", layer_scales=True),
        KVFormat(name="mxfp8"),
        KVFormat(name="mxfp4"),
    )
)
"""The rows that engines have, in the order of lists. Read it by `kv_format` and `kv_formats`."""


def kv_format(name: str) -> KVFormat:
    """The row of a stored type, which is any `resolved_kv_cache_dtype`."""
    return TABLE.of(name)


def kv_formats() -> tuple[KVFormat, ...]:
    """All rows."""
    return TABLE.rows


def kv_format_of_dtype(dtype: str) -> KVFormat | None:
    """The row whose pages have elements of a torch dtype, given by name; None if no row has."""
    return TABLE.by_dtype.get(dtype)


def kv_cache_dtypes() -> tuple[str, ...]:
    """The values of `kv_cache_dtype` that engines have: "auto", and the names of all rows. Others are open."""
    return ("auto", *(name for row in kv_formats() for name in row.names))


def common_kv_cache_dtypes(*, aliases: bool = False) -> tuple[str, ...]:
    """The types that are shown for every backend, "auto" among them, with their aliases or without."""
    rows = [row for row in kv_formats() if row.is_common]
    return ("auto", *(name for row in rows for name in (row.names if aliases else (row.name,))))
