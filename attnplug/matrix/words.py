"""The matrix in words for people: marks and meanings of statuses, names of axes and features.

A letter and a colour for each backend, where a layer has room for no more: in the terminal's strip, in the grid of models
and GPUs, and on the page of models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from attnplug.core.features import Feature
from attnplug.core.kv_format import common_kv_cache_dtypes
from attnplug.matrix.model import Run, Status

Value = str | int | None
"""A value of an axis; None where the layer has no pages."""

AXIS_NAMES = {
    "feature": "feature",
    "phase": "phase",
    "head_size": "head size",
    "dtype": "dtype",
    "kv_cache_dtype": "KV dtype",
    "block_size": "block size",
    "layout": "layout",
}
"""The name of each axis by its field of Cell, in the order of the fields."""

MARKS = {
    Status.VERIFIED: "✓",
    Status.SAMPLED: "◐",
    Status.COMPILED: "◉",
    Status.DECLARED: "○",
    Status.REFUTED: "✗",
    Status.UNCLAIMED: "+",
    Status.NOT_RUN: "?",
    Status.REFUSED: "–",  # noqa: RUF001  (a dash as wide as the other marks)
}
"""A mark for each status; their shapes differ."""

PLAIN_MARKS = {
    **MARKS,
    Status.VERIFIED: "v",
    Status.SAMPLED: "s",
    Status.COMPILED: "c",
    Status.DECLARED: "o",
    Status.REFUTED: "x",
    Status.REFUSED: "-",
}
"""The marks for output in ASCII."""

MEANINGS = {
    Status.VERIFIED: "claimed, run on the device, and right",
    Status.SAMPLED: "claimed; some combinations were run on the device and are right, the others were not run",
    Status.COMPILED: "claimed, and not run; the kernels are compiled, and fit the device",
    Status.DECLARED: "claimed, and not run",
    Status.REFUTED: "claimed, run on the device, and wrong",
    Status.UNCLAIMED: "not claimed, run all the same, and right",
    Status.NOT_RUN: "claimed, and could not be run",
    Status.REFUSED: "not claimed: the reasons say why",
}
"""The meaning of each status, in the order of the legends."""

_FEWEST_STEPS = 5
_ORDERS: dict[str, tuple[str, ...]] = {
    "feature": ("plain", *(str(flag.name).lower() for flag in Feature)),
    "phase": ("prefill", "decode", "mixed"),
    "dtype": ("float16", "bfloat16", "float32"),
    "layout": ("NHD", "HND"),
}


def value_in_words(axis: str, value: Value) -> str:
    """The text of a value: "sliding window", "128"; "no pages" for None."""
    if value is None:
        return "no pages"
    if axis == "feature":
        flag = Feature.__members__.get(str(value).upper())
        return str(value).replace("_", " ") if flag is None else flag.label
    return str(value)


def in_order(axis: str, values: Iterable[Value]) -> list[Value]:
    """The distinct values in reading order: numbers by size, known names, other names, then None."""
    is_stored = axis == "kv_cache_dtype"
    known = common_kv_cache_dtypes(aliases=True) if is_stored else _ORDERS.get(axis, ())

    def key(value: Value) -> tuple[bool, int, str]:
        if isinstance(value, int):
            return False, value, ""
        name = str(value)
        return value is None, known.index(name) if name in known else len(known), name

    return sorted(set(values), key=key)


def list_in_words(axis: str, marked: Sequence[tuple[Value, str]]) -> str:
    """The values with their marks: "16 to 256 in steps of 8, 320*".

    Six or more numbers in equal steps with equal marks are shown as a range.
    """
    words = [f"{one_line(value_in_words(axis, value))}{mark}" for value, mark in marked]
    listed = []
    at = 0
    while at < len(marked):
        step, end = _equal_steps(marked, at)
        if end - at >= _FEWEST_STEPS:
            listed.append(f"{words[at]} to {words[end]} in steps of {step}")
            at = end + 1
        else:
            listed.append(words[at])
            at += 1
    return ", ".join(listed)


def _equal_steps(marked: Sequence[tuple[Value, str]], start: int) -> tuple[int, int]:
    """The step from the number at `start` to the next, and the index of the last number in such steps."""
    step = 0
    for at, ((value, mark), (following, its)) in enumerate(itertools.pairwise(marked[start:]), start):
        if not isinstance(value, int) or not isinstance(following, int) or mark != its:
            return step, at
        if step not in (0, following - value):
            return step, at
        step = following - value
    return step, len(marked) - 1


def device_names(runs: Iterable[Run]) -> list[str]:
    """The names of the hardware of some runs and of their sources."""
    each = (one.device_name for run in runs for one in (run, *run.sources))
    return list(dict.fromkeys(name for name in each if name))


def device_in_words(runs: Iterable[Run]) -> str:
    """The device of some runs with the name of the hardware: "sm90 (NVIDIA H200)"."""
    runs = list(runs)
    names = device_names(runs)
    return f"{runs[0].device} ({', '.join(names)})" if names else runs[0].device


def source_in_words(run: Run, source: Run) -> str:
    """A source of a joined run by its card and versions that the run lacks: "on NVIDIA H200 with torch 2.12.0"."""
    card = [f"on {source.device_name}"] if source.device_name not in (None, run.device_name) else []
    others = [
        f"{name} {version}" for name, version in source.versions.items() if run.versions.get(name) != version
    ]
    differs = [*card, *([f"with {', '.join(others)}"] if others else [])]
    return " ".join(differs or [f"of {source.date[:10]}"])


def backend_in_words(run: Run) -> str:
    """The backend of a run, with its distribution if that is a plugin's: "FLA (attnplug-fla)"."""
    return f"{run.backend} ({run.plugin})" if run.plugin else run.backend


def one_line(text: str) -> str:
    """The text in one line; characters that control a terminal become escapes."""
    joined = " ".join(text.split())
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in joined)


NO_BACKEND = "none"
"""The name for no backend; its letter is "-"."""


COLOURS = {
    "FLASHINFER": ("#2563b0", "blue"),
    "TRITON": ("#a8500a", "yellow"),
    "FLASH_ATTN_4": ("#0f766e", "cyan"),
    "FLASH_ATTN_3": ("#4d6b1f", "green"),
    "FLASH_ATTN_2": ("#6d4bb0", "magenta"),
    "FLASH_MLA": ("#a03050", "red"),
    "TORCH": ("#6b7280", "default"),
}
"""The colour of each built-in backend on a page, where white is readable on it, and the nearest of a terminal's own."""
_OTHER_COLOURS = (("#9d3f77", "bright_magenta"), ("#7a5c00", "bright_yellow"), ("#005f99", "bright_blue"))


def colours(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The colours of each name, as in `COLOURS`; backends of plugins share three."""
    others = sorted(set(names) - COLOURS.keys())
    return COLOURS | dict(zip(others, itertools.cycle(_OTHER_COLOURS), strict=False))


def letters(names: Iterable[str]) -> dict[str, str]:
    """A letter or digit for each name, the same for the same set of names: its last digit, or its first free letter."""
    found = {NO_BACKEND: "-"}
    # Numbered names first: the digit is what tells them apart. The others then share out the letters.
    for name in sorted(set(names) - {NO_BACKEND}, key=lambda name: (not name[-1].isdigit(), name)):
        wanted = name[-1] + name if name[-1].isdigit() else name
        free = (sign for sign in wanted.upper() if sign.isalnum() and sign not in found.values())
        anything = (chr(code) for code in range(ord("!"), ord("\x7f")) if chr(code) not in found.values())
        found[name] = next(free, None) or next(anything, "?")
    return found
