"""Proofs of a KV format by its codec alone: its planes, its errors, and the rule that a row's bytes depend on that row.

They run for each format with a codec that a backend reads, and need no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from attnplug.core.errors import SpecError
from attnplug.core.kv_format import KVFormat, kv_format
from attnplug.ops.kv_codec import KVCodec, encoded, make_codec, new_codec, page_planes
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, error_context
from attnplug.testing.conformance.target import Target

_SIZES = (64, 128, 256, 32, 96, 80, 192, 512, 72, 40)
_ROWS, _SCALE = 2048, 0.375
"""Rows of each trial, and a scale of the layer that is a sum of powers of two."""
_SMALL, _REPEATS = 64, 700
"""The largest rows of which many are tried, and how often 96 of them are repeated."""
_SEARCHED, _STEPS = 64, 16
"""Rows that are changed at random to find larger errors, and the number of times."""


def checks(target: Target) -> Iterator[Check]:
    """The proofs of each format with a codec among the target's types."""
    for name in target.kv_cache_dtypes:
        row = kv_format(name)
        if row.codec is not None:
            for each, (prove, summary) in _PROOFS.items():
                yield Check.of(f"format/{row.name}-{each}", summary, _run, prove, row)


def _run(prove: Callable[[KVFormat, KVCodec, int], None], row: KVFormat) -> None:
    sizes = [size for size in _SIZES if _fits(row, size)]
    if not sizes:
        raise ConformanceError(f"{row.name} has no head size among {', '.join(map(str, _SIZES))}")
    for size in sizes:
        with error_context(f"{row.name} with head_size={size}"):
            try:
                prove(row, make_codec(row, size), size)
            except ConformanceError as problem:
                raise ConformanceError(f"with head_size={size}: {problem}") from problem.__cause__


def _fits(row: KVFormat, size: int) -> bool:
    try:
        row.width(size)
    except SpecError:
        return False
    return True


def _drawn(size: int, rows: int = _ROWS, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def _scale_of(row: KVFormat) -> float:
    return _SCALE if row.layer_scales else 1.0


def _given_back(row: KVFormat, codec: KVCodec, rows: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(rows, _scale_of(row)), _scale_of(row))


def _planes(row: KVFormat, codec: KVCodec, size: int) -> None:
    rows = _drawn(size, 6).view(3, 2, size)
    before, drawn = rows.clone(), torch.get_rng_state()
    planes = codec.encode(rows, _scale_of(row))
    if len(planes) != len(row.planes):
        raise ConformanceError(f"encode gives {len(planes)} planes, and the format has {len(row.planes)}")
    for plane, declared in zip(planes, row.planes, strict=True):
        wanted = (3, 2, declared.items(size)), getattr(torch, declared.dtype)
        if (tuple(plane.shape), plane.dtype) != wanted:
            found = f"{plane.dtype} {tuple(plane.shape)}"
            raise ConformanceError(
                f"encode gives the plane {declared.name} as {found}, not {wanted[1]} {wanted[0]}"
            )
    if not torch.equal(rows, before):
        raise ConformanceError("encode changes the rows that it is given")
    # Keys are written after values are encoded.
    kept = [_bytes(plane).clone() for plane in planes]
    codec.encode(-2 * rows, _scale_of(row))
    if not all(map(torch.equal, kept, map(_bytes, planes))):
        raise ConformanceError("encode changes the planes that it gave before")
    decoded = codec.decode(planes, _scale_of(row))
    if decoded.dtype != torch.float32 or decoded.shape != rows.shape:
        found = f"{decoded.dtype} {tuple(decoded.shape)}"
        raise ConformanceError(f"decode gives {found}, not torch.float32 {tuple(rows.shape)}")
    if not torch.equal(torch.get_rng_state(), drawn):
        raise ConformanceError("encode or decode changes torch's random numbers, which belong to the engine")
    # A step may have no new token of a request.
    with error_context("without a row"):
        given = codec.decode(codec.encode(rows[:0], _scale_of(row)), _scale_of(row))
        if given.shape != rows[:0].shape:
            raise ConformanceError(f"decode gives {tuple(given.shape)}, not {tuple(rows[:0].shape)}")


def _bytes(plane: torch.Tensor) -> torch.Tensor:
    """The bytes of a plane, which compare NaN too."""
    return plane.contiguous().view(torch.uint8)


def _errors(found: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The error of each row, relative to its norm."""
    error: torch.Tensor = (found - rows).norm(dim=-1) / rows.norm(dim=-1).clamp_min(1e-30)
    return error


def _gaussian(row: KVFormat, codec: KVCodec, size: int) -> None:
    rows = _drawn(size)
    found = _given_back(row, codec, rows)
    error = float((found - rows).norm() / rows.norm())
    if not 0.5 * row.rms_error <= error <= row.rms_error:
        limit = "more than" if error > row.rms_error else "less than half of"
        raise ConformanceError(
            f"Gaussian rows have an error of {error:.4g}, {limit} the declared {row.rms_error:g}"
        )
    bias = float((rows * found).sum() / rows.square().sum() - 1)
    if abs(bias) > row.dot_bias:
        text = f"products with the rows themselves are {abs(bias):.2%} {'larger' if bias > 0 else 'smaller'}"
        raise ConformanceError(f"{text}, more than the declared {row.dot_bias:.2%}")


def _worst(row: KVFormat, codec: KVCodec, size: int) -> None:
    rows = torch.cat([*_hard_rows(codec, size)]) * _scale_of(row)
    generator = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        error = _errors(_given_back(row, codec, rows), rows)
        largest = float(error.max())
        if not largest <= row.worst_error:
            place = int(error.nan_to_num(torch.inf).argmax())
            shown = ", ".join(f"{each:.3g}" for each in rows[place, :6].tolist())
            text = f"the row {shown}, ... has an error of {largest:.3g}"
            raise ConformanceError(f"{text}, more than the declared worst_error {row.worst_error:g}")
        kept = rows[error.topk(min(_SEARCHED, len(rows))).indices]
        changed = kept * (1 + 0.5 * torch.randn(kept.shape, generator=generator))
        rows = torch.cat([kept, changed])


def _hard_rows(codec: KVCodec, size: int) -> Iterator[torch.Tensor]:
    """Rows that are the worst of some format, with numbers of up to 400."""
    yield torch.ones(1, size)
    yield torch.eye(size)
    rotate = getattr(codec, "rotate", None)
    if rotate is not None:
        yield rotate(torch.eye(size), back=True)
    yield torch.where(torch.arange(size) > 0, 0.5, 127.0)[None]
    # Numbers just below and above the middles of E2M1, beside the largest of each block.
    yield torch.where(torch.arange(size) % 16 == 0, 6.0, torch.linspace(0.2, 5.9, 16)[:, None])
    yield (_drawn(size, 512, 2) ** 5).clamp(-400, 400)


def _edges(row: KVFormat, codec: KVCodec, size: int) -> None:
    if bool(_given_back(row, codec, torch.zeros(3, size)).any()):
        raise ConformanceError("a row of zeros gives back other numbers")
    for value in (
        torch.inf,
        torch.finfo(torch.float32).max,
        3e4,
        torch.finfo(torch.float32).smallest_normal,
        1e-40,
    ):
        rows = _drawn(size, 8)
        rows[:, 1::3] = value * rows[:, 1::3].sign()
        found = _given_back(row, codec, rows)
        if not bool(found.isfinite().all()):
            count = int((~found.isfinite()).sum())
            raise ConformanceError(f"rows with {value:g} give back {count} numbers that are NaN or infinite")
        if bool((found[:, 1::3].sign() == -rows[:, 1::3].sign()).any()) and value >= 1:
            raise ConformanceError(f"a number of {value:g} gives back one of the other sign")


def _rows_alone(row: KVFormat, codec: KVCodec, size: int) -> None:
    rows, scale = _drawn(size, 96), _scale_of(row)
    rows[::3] *= 30.0
    together = [each.clone() for each in encoded(codec, rows, scale)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    wide = torch.zeros(len(rows), 2 * size + 1)
    wide[:, 1 : 2 * size + 1 : 2] = rows
    trials = {
        "alone": [
            torch.cat(each)
            for each in zip(*(tuple(encoded(codec, one[None], scale)) for one in rows), strict=True)
        ],
        "in another order": [each[order.argsort()] for each in encoded(codec, rows[order], scale)],
        "in a view with strides": list(encoded(codec, wide[:, 1 : 2 * size + 1 : 2], scale)),
        "as tokens and heads": [each.flatten(0, 1) for each in encoded(codec, rows.view(24, 4, size), scale)],
        "a second time": list(encoded(codec, rows, scale)),
    }
    for what, found in trials.items():
        for plane, wanted, each in zip(row.planes, together, found, strict=True):
            if not torch.equal(wanted, each):
                text = f"{what}, rows have other bytes in the plane {plane.name}"
                raise ConformanceError(f"{text}: the bytes of a row depend on other rows")


def _decoded_alone(row: KVFormat, codec: KVCodec, size: int) -> None:
    rows, scale = _drawn(size, 96), _scale_of(row)
    rows[::3] *= 30.0
    planes = codec.encode(rows, scale)
    wanted = torch.cat([codec.decode(tuple(each[at : at + 1] for each in planes), scale) for at in range(96)])
    trials = {
        "together": codec.decode(planes, scale),
        "as tokens and heads": codec.decode(tuple(each.view(24, 4, -1) for each in planes), scale),
        "in views with strides": codec.decode(tuple(map(_strided, planes)), scale),
    }
    if size <= _SMALL:
        # A prompt has more rows than 16 bits count.
        many = rows.repeat(_REPEATS, 1)
        trials["among 67,200"] = codec.decode(codec.encode(many.view(-1, 4, size), scale), scale)
    for what, found in trials.items():
        error = float(_errors(found.view(-1, 96, size), wanted).max())
        # Sums of a rotation have another order.
        if not error <= 1e-4:
            text = f"{what}, rows give back other numbers than alone, by up to {error:.3g} of their norm"
            raise ConformanceError(f"{text}: a row depends on other rows")


def _strided(plane: torch.Tensor) -> torch.Tensor:
    """The plane as a part of pages with other bytes between its rows."""
    wide = torch.full((len(plane), 3 * plane.shape[-1]), 0x7F, dtype=torch.uint8).to(plane.dtype)
    part = wide[:, plane.shape[-1] : 2 * plane.shape[-1]]
    return part.copy_(plane)


def _layer_scale(row: KVFormat, codec: KVCodec, size: int) -> None:
    rows, factor = _drawn(size, 64), 4.0 if row.layer_scales else 1.0
    one, other = list(encoded(codec, rows, 0.5)), list(encoded(codec, factor * rows, 2.0))
    if not all(map(torch.equal, one, other)):
        text = (
            "rows and the layer's scale times 4 have other bytes"
            if row.layer_scales
            else ("the layer's scale changes the bytes, though the format has no scale of the layer")
        )
        raise ConformanceError(text)
    given = codec.decode(codec.encode(rows, 0.5), 2.0) / codec.decode(codec.encode(rows, 0.5), 0.5)
    if not bool(((given.nan_to_num(factor) - factor).abs() < 1e-3).all()):
        raise ConformanceError(
            f"decode with a layer's scale 4 times as large does not give numbers {factor:g} times as large"
        )


def _rotation(row: KVFormat, codec: KVCodec, size: int) -> None:
    rotate = getattr(codec, "rotate", None)
    if rotate is None:
        raise CheckSkipped(f"{row.name} turns no rows")
    rows = _drawn(size, 64)
    turned = rotate(rows)
    if not torch.allclose(turned.norm(dim=-1), rows.norm(dim=-1), rtol=1e-5):
        raise ConformanceError("rotate changes the norm of rows")
    if not torch.allclose(rotate(turned, back=True), rows, atol=1e-5):
        raise ConformanceError("rotate with back=True does not undo rotate")


def _pages(row: KVFormat, codec: KVCodec, size: int) -> None:
    """Pages with gaps, in both orders: each token alone, blocks copied, and other bytes untouched."""
    heads, block, scale = 3, 5, _scale_of(row)
    rows = _drawn(size, 13 * heads, 4).view(13, heads, size)
    wanted = codec.decode(codec.encode(rows, scale), scale)
    width, table = row.width(size), torch.tensor([6, 2, 4])
    for order in ((0, 1, 2), (0, 2, 1)):
        inner = [(block, heads)[each - 1] for each in order[1:]]
        raw = torch.full((8, block * heads * width + 48), 255, dtype=torch.uint8)
        pages = raw[:, 16:-32].view(8, *inner, width).permute(*order, 3)
        planes = page_planes(pages, row, size)
        for token, each in enumerate(rows):
            for plane, items in zip(planes, encoded(codec, each, scale), strict=True):
                plane[table[token // block], token % block] = items
        if not bool(
            (raw[[0, 1, 3, 5, 7]] == 255).all() and (raw[:, :16] == 255).all() and (raw[:, -32:] == 255).all()
        ):
            raise ConformanceError("writing tokens changed bytes of other blocks, or between them")
        raw[[1, 7]] = raw[[6, 4]]
        raw[[6, 4]] = 255
        copied = [each[torch.tensor([1, 2, 7])].flatten(0, 1)[:13].contiguous() for each in planes]
        typed = (
            each.view(getattr(torch, plane.dtype)) for each, plane in zip(copied, row.planes, strict=True)
        )
        if not torch.equal(codec.decode(tuple(typed), scale), wanted):
            raise ConformanceError("tokens of copied blocks give back other numbers")


def _defaults(row: KVFormat, codec: KVCodec, size: int) -> None:
    rows, scale = _drawn(size, 16), _scale_of(row)
    wanted, before = codec.encode(rows, scale), torch.get_default_dtype()
    for dtype in (torch.float64, torch.bfloat16):
        try:
            torch.set_default_dtype(dtype)
            with error_context(f"while torch's default dtype is {dtype}"):
                # A codec that was made before may hold what it drew then.
                made = new_codec(row, size)
                planes, decoded = made.encode(rows, scale), made.decode(wanted, scale)
        finally:
            torch.set_default_dtype(before)
        for plane, found, right in zip(row.planes, planes, wanted, strict=True):
            if not torch.equal(found.view(torch.uint8), right.view(torch.uint8)):
                raise ConformanceError(
                    f"the plane {plane.name} has other bytes while torch's default dtype is {dtype}"
                )
        same = codec.decode(wanted, scale)
        if decoded.dtype != same.dtype or not torch.equal(decoded, same):
            raise ConformanceError(f"decode gives other rows while torch's default dtype is {dtype}")


_PROOFS: dict[str, tuple[Callable[[KVFormat, KVCodec, int], None], str]] = {
    "planes": (_planes, "encode gives the declared planes, and decode rows of float32"),
    "errors": (_gaussian, "Gaussian rows have the declared error, and products no larger bias"),
    "worst": (_worst, "no row that is searched for has more than the declared worst error"),
    "edges": (_edges, "zeros give zeros, and numbers out of range the nearest in range"),
    "rows": (_rows_alone, "the bytes of a row depend on that row alone"),
    "decoded": (_decoded_alone, "the numbers that a row gives back depend on that row alone"),
    "scales": (_layer_scale, "the layer's scale has its effect, or none if the format has none"),
    "defaults": (_defaults, "the bytes and the rows do not depend on torch's default dtype"),
    "rotation": (_rotation, "a rotation keeps norms and can be undone"),
    "pages": (_pages, "pages with gaps keep rows, in both orders, also when blocks are copied"),
}
