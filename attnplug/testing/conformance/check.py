"""One conformance check: an id, and a function that raises if the backend fails it.

Where an error of a backend comes from: the call of the kit, and the backend's own lines.

The time limit of the check under way, of which naming a mistake may take a share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import attnplug
from attnplug._system.scopes import Scopes
from attnplug.core.errors import AttnplugError, SpecError

if TYPE_CHECKING:
    from attnplug.testing.batches import StepArguments
    from attnplug.testing.conformance.mistakes.smallest_step import SmallestStep
    from attnplug.testing.conformance.target import Target


SHRINK_SECONDS = 20.0
"""The time to shrink all wrong answers of a run to their smallest failing steps if none is given."""

_TESTING = str(Path(attnplug.__file__).parent / "testing")
_CORE = str(Path(attnplug.__file__).parent / "core")
_MOST_FRAMES = 3
# Code that only takes values of layers and steps, so an error of a call by the kit is the kit's own.
_TAKERS = tuple(
    str(Path(attnplug.__file__).parent / each)
    for each in ("core/spec.py", "core/sparse.py", "core/mla/dims.py", "core/batch", "runtime/batch")
)


@contextlib.contextmanager
def calling(function: str, layer: str | None = None) -> Iterator[None]:
    """Note in an error that it was raised in `function` of a backend, called for `layer`."""
    try:
        yield
    except Exception as error:
        # The call nearest to the backend comes first, and is the one that counts.
        if not hasattr(error, "__attnplug_call__"):
            error.__attnplug_call__ = f"in {function}" + (f" of {layer}" if layer else "")  # type: ignore[attr-defined]
        raise


def origin(error: Exception) -> list[str]:
    """The call of the kit that raised, and the last lines of the backend that the error went through, at most three."""
    called = _frames(error)
    call = getattr(error, "__attnplug_call__", f"in {called[0].name}" if called else None)
    own = [frame for frame in called if not _is_of_others(frame.filename)] or called
    lines = [f"  {each.filename}:{each.lineno} in {each.name}: {each.line}" for each in own[-_MOST_FRAMES:]]
    return [*([call] if call else []), *lines]


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    """The frames below those of the kit, which has called the backend."""
    frames = traceback.extract_tb(error.__traceback__)
    after = max(
        (place for place, each in enumerate(frames) if each.filename.startswith(_TESTING)), default=-1
    )
    return list(frames[after + 1 :])


def own_skip(error: Exception) -> CheckSkipped | None:
    """The skip in place of an error that no line of the backend caused: the kit asked for a layer or step that cannot be."""
    called = [frame.filename for frame in _frames(error) if not frame.filename.startswith("<")]
    is_own = isinstance(error, AttnplugError) and (not called or called[0].startswith(_TAKERS))
    return (
        CheckSkipped(f"the kit can make no such layer or step: {error}", SkipKind.LAYER) if is_own else None
    )


def _is_of_others(path: str) -> bool:
    """Whether a file is of torch, the standard library or the framework."""
    # They only pass the error on, so a frame of theirs does not say who raised it.
    library = sysconfig.get_path("stdlib")
    of_library = path.startswith(library) and "site-packages" not in path
    return of_library or path.startswith((_CORE, "<")) or "/torch/" in path.replace("\\", "/")


class Level(enum.StrEnum):
    """The number of layers and batches to try."""

    SMOKE = "smoke"
    """A few values of each axis, in pairs: under a minute on two cores."""
    FULL = "full"
    """All values, every pair of them in several designs."""

    @classmethod
    def read(cls, name: str) -> Level:
        """The level of this name; SpecError if there is none."""
        if name not in {*cls}:
            raise SpecError("level", name, f"must be one of {', '.join(cls)}")
        return cls(name)


class ConformanceError(AssertionError):
    """A backend does not do what it declares.

    Args:
        message: what was expected and what was found.
        named: the known mistake that gives the same numbers, such as "window off by one", if there is one.
        step: the step with the wrong answer, if the message is about numbers.
        says: text that errors of the same mistake share; default the name, else the first line of the message.
    """

    smallest: SmallestStep | None = None
    """The smallest step that fails in the same way, once it is found."""

    def __init__(
        self,
        message: str,
        named: str | None = None,
        step: StepArguments | None = None,
        says: str | None = None,
    ) -> None:
        super().__init__(message)
        self.named, self.step = named, step
        self.says = named or (message.partition("\n")[0] if says is None else says)


def reworded(problem: Exception, text: str) -> ConformanceError:
    """An error with another text, which keeps what `problem` knows of the mistake."""
    if isinstance(problem, ConformanceError):
        return ConformanceError(text, problem.named, problem.step, problem.says)
    return ConformanceError(text)


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
    SLOW = "too slow here"
    """A step of thousands of tokens, for which the backend would take minutes on this device."""
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
        """Run the check.

        Raises:
            CheckSkipped: also for an error of the kit's own making.
        """
        try:
            self.run()
        except (CheckSkipped, ConformanceError):
            raise
        except AttnplugError as error:
            raise own_skip(error) or error from error


CheckTable: TypeAlias = Mapping[str, tuple[Callable[..., None], str]]
"""By name: a function of a Target and the names of a variant, and the summary."""


def checks_from(table: CheckTable, prefix: str, target: Target, *variant: str) -> Iterator[Check]:
    """The checks of a table, with ids such as "builder/order-full" for the prefix "builder" and variant "full"."""
    for name, (run, summary) in table.items():
        yield Check.of("-".join((f"{prefix}/{name}", *variant)), summary, run, target, *variant)


@contextlib.contextmanager
def error_context(what: str) -> Iterator[None]:
    """Raise a backend's errors as a ConformanceError that begins with `what`, the operation under way.

    Errors of the kit's own making become CheckSkipped.
    """
    try:
        yield
    except (CheckSkipped, ConformanceError):
        raise
    except Exception as error:
        if skip := own_skip(error):
            raise skip from error
        kind, lines = type(error).__name__, origin(error)
        text = "\n".join([f"{what}: raised {kind}: {error}", *lines])
        # Errors of one line are of one mistake, whatever the check was doing.
        raise ConformanceError(text, says=f"{kind} {lines[-1].strip() if lines else error}") from error


# Part of the time left that naming may take, so that the failure itself is always reported.
_SHARE = 0.25
_MOST_SECONDS = 15.0

_END: Scopes[float] = Scopes("attnplug_check_end")


def time_limit(seconds: float) -> AbstractContextManager[float]:
    """Declare that the check in this context is stopped after `seconds`."""
    return _END.block(time.monotonic() + seconds)


def naming_seconds() -> float:
    """The seconds that the search for a known mistake may take now."""
    ends = _END.get()
    return max(0.0, min(_MOST_SECONDS, _SHARE * (ends[0] - time.monotonic()))) if ends else _MOST_SECONDS
