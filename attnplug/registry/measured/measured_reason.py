"""Why a backend comes first by measured times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from attnplug._system.json_files import typed

MIN_GAIN = 0.02
"""A backend must be faster than the default by more than this share, and by more than twice the spread."""


def least_gain(spread: float) -> float:
    """The ratio of two times above which they differ by more than the noise."""
    return 1 + max(MIN_GAIN, 2 * spread)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Why a backend comes first by measured times.

    Args:
        is_default: it also comes first by priority, and no other was faster beyond the noise.
        over: the backend that `ratio` compares with: the default, or for the default the next measured one; None
            without another.
        ratio: time of `over` divided by its own, in steps of the whole model.
        shape: the step of the workload with the most weight.
        shapes: number of steps in the workload.
        spread: of the rounds of both, relative to the time.
        date: of the measurement, without the time of day.
        table: the digest of the table.
    """

    is_default: bool
    over: str | None
    ratio: float
    shape: str
    shapes: int
    spread: float
    date: str
    table: str

    def __str__(self) -> str:
        more = f" and {self.shapes - 1} more" if self.shapes > 1 else ""
        about = f"at {self.shape}{more}, spread {100 * self.spread:.1f} %, {self.date}"
        if self.over is None:
            return f"measured alone {about}"
        if self.is_default and self.ratio < 1 + MIN_GAIN:
            gain = 1 / self.ratio
            if gain > least_gain(self.spread):
                return f"measured, and {self.over} is slower at one step, though {gain:.2f}x faster {about}"
            return f"measured, and {self.over} is not faster beyond the noise ({gain:.2f}x) {about}"
        return f"measured {self.ratio:.2f}x faster than {self.over} {about}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The comparison that `dataclasses.asdict` wrote; LookupError, TypeError or ValueError for damaged data."""
        kinds: dict[str, tuple[type | None, ...]] = {
            "is_default": (bool,),
            "over": (str, None),
            "shapes": (int,),
        }
        kinds |= dict.fromkeys(("ratio", "spread"), (int, float)) | dict.fromkeys(
            ("shape", "date", "table"), (str,)
        )
        found = cls(**{name: typed(data, name, *each) for name, each in kinds.items()})
        if found.ratio <= 0:
            raise ValueError(f"ratio must be above 0, not {found.ratio}")
        return found
