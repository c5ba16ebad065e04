"""Decodes of real batches in the layers of model_plans.py: ragged lengths, drafts, and keys of 8 bits.

A figure is the time of `model_plans.py --batches`.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnplug

if TYPE_CHECKING:
    from model_plans import Row

    from attnplug.core import LayerSpec
    from attnplug.registry import Decision

RESULTS = Path(__file__).parent / "results"
TIMES = RESULTS / "model-plans-batches-h200.json"


@dataclasses.dataclass(frozen=True)
class Batch:
    """Decodes of 64 requests.

    Args:
        name: in the files.
        title: of the column.
        new: tokens of each request.
        ragged: whether lengths are log-uniform from 200 tokens to four times those of the even batch.
        fields: of the layer.
    """

    name: str
    title: str
    new: int = 1
    ragged: bool = False
    fields: tuple[tuple[str, Any], ...] = ()

    def lens(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """New and all tokens of each request."""
        if not self.ragged:
            return (self.new,) * REQUESTS, (tokens,) * REQUESTS
        drawn, most = random.Random(REQUESTS), 4 * tokens
        return (self.new,) * REQUESTS, tuple(
            int(200 * (most / 200) ** drawn.random()) for _ in range(REQUESTS)
        )


REQUESTS = 64
BATCHES = (
    Batch("ragged", "64 of 200 to 32k, us", ragged=True),
    Batch("drafts", "64 x 8k, 4 tokens, us", new=4),
    Batch("fp8", "64 x 8k, fp8, us", fields=(("kv_cache_dtype", "fp8"),)),
)
Timed = Callable[[str, "LayerSpec", tuple[tuple[int, ...], tuple[int, ...]], "Decision"], float]


def key(row: Row) -> list[Any]:
    """A time is valid for all models with such a layer."""
    return [row.kind, row.heads, row.decode, row.page, row.tokens]


def distinct(rows: Sequence[Row]) -> list[Row]:
    """The first row of each kind of layer."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(json.dumps(key(row)), row)
    return list(found.values())


def measured(row: Row, timed: Timed) -> dict[str, Any]:
    """Times of the batches in one layer, or why there are none."""
    result: dict[str, Any] = {"row": key(row)}
    if row.untimed:
        return {**result, "not_measured": row.untimed}
    for batch in BATCHES:
        spec = row.spec.replace(block_size=row.page, **dict(batch.fields))
        decision = attnplug.explain(spec, backend=row.decode)
        if not decision:
            result[f"{batch.name}_refused"] = decision.explanation()
            continue
        try:
            result[f"{batch.name}_us"] = timed("decode", spec, batch.lens(row.tokens), decision)
        except Exception as problem:  # noqa: BLE001 - what cannot run is shown, and the others are timed
            result[f"{batch.name}_not_measured"] = str(problem).partition("\n")[0][:200]
    return result


def known_times() -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(TIMES.read_text()) if TIMES.exists() else None
    return found


def table(rows: Sequence[Row], times: Mapping[str, Any] | None) -> str:
    """The rows with a figure, in Markdown."""
    taken = {json.dumps(each["row"]): each for each in (times or {}).get("rows", ())}
    titles = " | ".join(batch.title for batch in BATCHES)
    lines = [
        f"| model | heads | asks for | decode | {titles} |",
        "|---|---|---|---|" + "---:|" * len(BATCHES),
    ]
    for row in rows:
        found = taken.get(json.dumps(key(row)), {})
        us = [found.get(f"{batch.name}_us") for batch in BATCHES]
        if any(each is not None for each in us):
            tokens = "" if row.tokens == 8192 else f" ({row.tokens} tokens)"
            shown = " | ".join("-" if each is None else f"{each:.0f}" for each in us)
            lines.append(f"| {row.model}{tokens} | {row.heads} | {row.kind} | `{row.decode}` | {shown} |")
    return "\n".join(lines)


def written(rows: Sequence[Row]) -> str:
    """The part of the page: the table, and which run it is from."""
    times = known_times()
    lines = [table(rows, times), ""]
    if times is not None:
        versions = ", ".join(f"{name} {version}" for name, version in times["versions"].items())
        lines.append(f"Times: {times['device']}, {times['date']}, {versions}.")
    return "\n".join(lines)
