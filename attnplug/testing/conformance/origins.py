"""Where an error of a backend comes from: the call of the kit, and the backend's own lines."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import attnplug

_TESTING = str(Path(attnplug.__file__).parent / "testing")
_CORE = str(Path(attnplug.__file__).parent / "core")
_MOST_FRAMES = 3


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


def _is_of_others(path: str) -> bool:
    """Whether a file is of torch, the standard library or the framework, which only pass the error on."""
    library = sysconfig.get_path("stdlib")
    of_library = path.startswith(library) and "site-packages" not in path
    return of_library or path.startswith((_CORE, "<")) or "/torch/" in path.replace("\\", "/")
