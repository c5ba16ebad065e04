"""The one table of the types of keys and values in KV caches: each KVFormat is a row of it. Imports no torch.

Layers, pages, the oracle, the conformance kit, the matrix, the command line and the clients of engines read their rows
here. A new type is a new row, the function that rounds to it, and the kernels that serve it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from attnplug.core.errors import SpecError

if TYPE_CHECKING:
    from attnplug.core.spec import LayerSpec

__all__ = ["KVFormat", "Plane", "kv_format"]

CODEC: Final = "codec"
"""In `supported_kv_cache_dtypes`: every registered format that has a codec, which the backend reads by it."""
_ROUNDS_FLOATS: Final = "attnplug.ops.storage:round_to_float"
_ITEM_BYTES: Final = {
    **dict.fromkeys(("uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16"), 2),
    "float32": 4,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One array in the pages of a format with a codec.

    Args:
        name: such as "data" or "scale".
        dtype: the torch dtype of an item: uint8, int8, float8_e4m3fn, float8_e5m2, float16, bfloat16 or float32.
        per_element: items for each element of a row, such as 1/2 for two codes in a byte.
        per_row: items for each row, such as 1 for a scale by token and head.
    """

    name: str
    dtype: str
    per_element: Fraction | int = 0
    per_row: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in _ITEM_BYTES:
            raise SpecError("dtype", self.dtype, f"of a plane must be one of {', '.join(_ITEM_BYTES)}")
        if self.per_element < 0 or self.per_row < 0 or self.per_element == self.per_row == 0:
            raise SpecError("per_element", self.per_element, "must give a plane items, and per_row too")

    def items(self, head_size: int) -> int | None:
        """Items in a row of `head_size` elements; None if they are not whole."""
        items = self.per_element * Fraction(head_size) + self.per_row
        return items.numerator if items.denominator == 1 else None

    def bytes(self, head_size: int) -> int | None:
        """Bytes of a row of `head_size` elements; None if its items are not whole."""
        items = self.items(head_size)
        return None if items is None else items * _ITEM_BYTES[self.dtype]


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
        planes: the arrays of K in a page, and then those of V; none for a type that is an element of torch.
        codec: "module:class" of an `attnplug.ops.kv_codec.KVCodec`, which turns rows into planes and back.
        version: name and version mean the same bytes for ever.
        head_size_multiple: head sizes are multiples of it.
        rms_error: the largest error of Gaussian rows, as norm(decoded - row) / norm(row) over many rows.
        worst_error: the largest error of any single row whose numbers are in range.
        dot_bias: the largest error of a row's product with itself: |sum(row * decoded) / sum(row * row) - 1|.
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
    planes: tuple[Plane, ...] = ()
    codec: str | None = None
    version: int = 1
    head_size_multiple: int = 1
    rms_error: float = 0.0
    worst_error: float = 0.0
    dot_bias: float = 5e-3
    is_common: bool = False
    article: str = "an"

    @property
    def names(self) -> tuple[str, ...]:
        """The aliases and the name."""
        return (*self.aliases, self.name)

    @property
    def has_numbers(self) -> bool:
        """Whether the oracle knows the numbers that its pages give back."""
        return self.rounding is not None or self.codec is not None

    @property
    def has_scaled_numbers(self) -> bool:
        """Whether its pages have elements of torch whose numbers the oracle knows, and which the layer's scales multiply."""
        return self.layer_scales and self.rounding is not None

    def check(self) -> None:
        """SpecError unless a plugin can offer the format: a plain name, planes, a codec and bounds of its errors."""
        for name in self.names:
            if not is_format_name(name):
                limit = f"must be small letters, digits and _, the first a letter, not auto, {CODEC} or float8_..."
                raise SpecError("name", name, limit, "such as acme_int3")
        if self.dtype != "uint8" or not self.planes or not all(type(each) is Plane for each in self.planes):
            raise SpecError("planes", self.planes, f"of {self.name} must be Planes, and its dtype 'uint8'")
        if self.codec is None or not re.fullmatch(r"[\w.]+:[\w.]+", self.codec):
            raise SpecError(
                "codec", self.codec, f"of {self.name} must be the name of a class, as module:Class"
            )
        if type(self.head_size_multiple) is not int or self.head_size_multiple < 1:
            limit = f"of {self.name} must be an integer of at least 1"
            raise SpecError("head_size_multiple", self.head_size_multiple, limit)
        for field in ("rms_error", "worst_error", "dot_bias"):
            if not 0 < getattr(self, field) < math.inf:
                limit = f"of {self.name} must be above 0: the largest error that the codec makes"
                raise SpecError(field, getattr(self, field), limit)

    def width(self, head_size: int) -> int:
        """Elements of `dtype` that a page has for one token and head: `head_size`, or the bytes of all planes.

        Raises:
            SpecError: a page cannot have heads of this size.
        """
        if not self.planes:
            return head_size
        widths = [plane.bytes(head_size) for plane in self.planes]
        if head_size % self.head_size_multiple or None in widths:
            limit = f"must be a multiple of {self.head_size_multiple} with kv_cache_dtype={self.name!r}"
            raise SpecError("head_size", head_size, limit)
        return sum(width for width in widths if width is not None)

    def row_bytes(self, head_size: int) -> int:
        """Bytes of one token and head of keys or values.

        Raises:
            SpecError: a page cannot have heads of this size, or nothing says how many bytes it has.
        """
        size = 1 if self.planes else self.size
        if size is None:
            known = ", ".join(name for row in kv_formats() if row.size or row.planes for name in row.names)
            raise SpecError("dtype", self.name, f"has no known element size; known are {known}")
        return size * self.width(head_size)

    def fault(self, spec: LayerSpec) -> str | None:
        """Why no page can have keys and values of a layer in this format; None if one can.

        Types without planes have any layer, if attnplug knows their bytes.
        """
        if spec.direct_kv:
            return None
        if not self.planes:
            if self.size:
                return None
            if spec.kv_cache_dtype in kv_cache_dtypes():
                return f"the bytes of {spec.kv_cache_dtype} in a page are not known: no installed format describes them"
            return f"no KV format has the name {spec.kv_cache_dtype}"
        if spec.mla is not None or spec.head_size_v != spec.head_size:
            what = "latents" if spec.mla is not None else "values with a head size of their own"
            return f"{self.name} has no pages for {what}"
        try:
            self.width(spec.head_size)
        except SpecError as error:
            return str(error)
        return None

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
        fixed |= {"planes": (), "codec": None}
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
        KVFormat(
            name="nvfp4",
            family="nvfp4",
            dtype="uint8",
            layer_scales=True,
            planes=(
                Plane(name="data", dtype="uint8", per_element=Fraction(1, 2)),
                Plane(name="scale", dtype="float8_e4m3fn", per_element=Fraction(1, 16)),
            ),
            codec="attnplug.ops.kv_codecs:NVFP4Codec",
            head_size_multiple=16,
            rms_error=0.1,
            worst_error=0.2,
        ),
        KVFormat(name="mxfp8"),
        KVFormat(name="mxfp4"),
        KVFormat(
            name="int8_token_head",
            dtype="uint8",
            planes=(
                Plane(name="data", dtype="int8", per_element=1),
                Plane(name="scale", dtype="float32", per_row=1),
            ),
            codec="attnplug.ops.kv_codecs:Int8TokenHeadCodec",
            rms_error=0.009,
            worst_error=0.1,
        ),
        KVFormat(
            name="rotated4",
            dtype="uint8",
            planes=(
                Plane(name="data", dtype="uint8", per_element=Fraction(1, 2)),
                Plane(name="scale", dtype="float16", per_row=1),
            ),
            codec="attnplug.ops.kv_codecs:Rotated4Codec",
            head_size_multiple=16,
            rms_error=0.12,
            worst_error=1.6,
            article="a",
        ),
    )
)
"""The rows that engines have, in the order of lists. Read it by `kv_format` and `kv_formats`."""


_owners: dict[str, str] = {}


def is_format_name(name: str) -> bool:
    """Whether a format can have the name: `float8_...` is read as `fp8_...`, and would never be found."""
    taken = name in ("auto", CODEC) or name.startswith("float8_")
    return re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None and not taken


def register_kv_formats(rows: Iterable[KVFormat], owner: str) -> None:
    """Add a plugin's formats to the table; the same plugin's earlier ones of these names are replaced.

    They stay until the process ends, also if the plugin is unregistered: pages may have their bytes.

    Raises:
        SpecError: a row has no pages or bounds of its own, or a name that another row, plugin or attnplug has.
    """
    global TABLE  # noqa: PLW0603 - the one table of the process, which is replaced as a whole
    rows = tuple(rows)
    seen: set[str] = set()
    for row in rows:
        row.check()
        twice = seen & {*row.names}
        if twice:
            raise SpecError("name", min(twice), "is the name of another KV format of this plugin")
        seen |= {*row.names}
        if any(_owners.get(known.name) != owner for known in TABLE.rows if {*known.names} & {*row.names}):
            raise SpecError("name", row.name, "is the name of another KV format", "choose a name of your own")
    # The table is made whole before it is seen, and last, so that an error leaves the old one.
    table = KVFormats((*TABLE.rows, *rows))
    _owners.update(dict.fromkeys((row.name for row in rows), owner))
    TABLE = table


def kv_format(name: str) -> KVFormat:
    """The row of a stored type, which is any `resolved_kv_cache_dtype`."""
    return TABLE.of(name)


def kv_formats() -> tuple[KVFormat, ...]:
    """All rows."""
    return TABLE.rows


def with_codecs(names: Iterable[str]) -> list[str]:
    """Declared names of stored types, with all formats that have a codec in place of CODEC; each once."""
    coded = [row.name for row in kv_formats() if row.codec]
    return list(dict.fromkeys(each for name in names for each in (coded if name == CODEC else (name,))))


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
