"""One conformance check: an id, and a function that raises if the backend fails it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.core.errors import AttnplugError
from attnplug.testing.conformance.origins import origin

if TYPE_CHECKING:
    from attnplug.testing.conformance.target import Target


class Level(enum.StrEnum):
    """The number of layers and batches to try."""

    SMOKE = "smoke"
    """A few values of each axis, in pairs: under a minute on two cores."""
    FULL = "full"
    """All values, every pair of them in several designs."""


class ConformanceError(AssertionError):
    """A backend does not do what it declares.

    Args:
        message: what was expected and what was found.
        named: the known mistake that gives the same numbers, such as "window off by one", if there is one.
    """

    def __init__(self, message: str, named: str | None = None) -> None:
        super().__init__(message)
        self.named = named


class SkipKind(enum.StrEnum):
    """Why checks are skipped, in the words of a summary."""

    LAYER = "layer not served"
    """The backend refuses the layers that the check needs."""
    PHASE = "phase not served"
    """The backend serves one phase, and the check needs steps of the other."""
    ALLOWED = "refused as allowed"
    """The backend refuses what it may refuse, such as strided tensors."""
    OPTIONS = "options refused"
    """The backend refuses the options of the run for this layer."""
    UNTESTED = "untested here"
    """A declaration cannot be tried on this machine."""
    OTHER = "does not apply"

    @classmethod
    def read(cls, text: str) -> tuple[SkipKind, str]:
        """The kind and the cause in the text of a skip."""
        name, _, cause = text.partition(": ")
        return (cls(name), cause) if name in {*cls} else (cls.OTHER, text)


class CheckSkipped(AttnplugError):  # noqa: N818 - not an error: the check does not apply
    """A check does not apply to this backend or this machine; the text says why.

    Args:
        cause: why, as a sentence.
        kind: its kind in summaries.
    """

    def __init__(self, cause: str, kind: SkipKind = SkipKind.OTHER) -> None:
        super().__init__(cause)
        self.kind = kind

    @property
    def text(self) -> str:
        """The cause after its kind; `SkipKind.read` reads it."""
        return str(self) if self.kind is SkipKind.OTHER else f"{self.kind}: {self}"


class CheckUntested(CheckSkipped):
    """A declaration cannot be tried on this machine; the text names it and says why. Reports end with it."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, SkipKind.UNTESTED)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One requirement on a backend.

    Args:
        id: its name, such as "correct/decode-h8x2-d64-float32". It is the same for the same declarations.
        run: raises ConformanceError or any error of the backend; CheckSkipped if the check does not apply.
        summary: one sentence that says what is checked.
        group: checks of one group share compiled code, so one worker runs them, one after another. None
            for a check alone.
    """

    id: str
    run: Callable[[], None]
    summary: str
    group: str | None = None

    @classmethod
    def of(cls, check_id: str, summary: str, run: Callable[..., None], *given: Any, **options: Any) -> Check:
        """The check that calls `run` with the arguments `given` and `options`."""
        return cls(check_id, functools.partial(run, *given, **options), summary)

    def __call__(self) -> None:
        """Run the check."""
        self.run()


CheckTable: TypeAlias = Mapping[str, tuple[Callable[..., None], str]]
"""By name: a function of a Target and the names of a variant, and the summary."""


def checks_from(table: CheckTable, prefix: str, target: Target, *variant: str) -> Iterator[Check]:
    """The checks of a table, with ids such as "builder/order-full" for the prefix "builder" and variant "full"."""
    for name, (run, summary) in table.items():
        yield Check.of("-".join((f"{prefix}/{name}", *variant)), summary, run, target, *variant)


@contextlib.contextmanager
def error_context(what: str) -> Iterator[None]:
    """Raise a backend's errors as a ConformanceError that begins with `what`, the operation under way."""
    try:
        yield
    except (CheckSkipped, ConformanceError):
        raise
    except Exception as error:
        text = f"{what}: raised {type(error).__name__}: {error}"
        raise ConformanceError("\n".join([text, *origin(error)])) from error
