"""Files that a backend leaves behind, and environment variables that it sets again to the same value."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Environment variables that torch itself sets when it initialises CUDA or compiles.
SET_BY_TORCH = ("CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# The place of the path among the arguments of events that make a file.
_MAKES = {"open": 0, "os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}


class FileWatch:
    """Notes what Python code does to files and variables, and what any code leaves in the working directory."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._home, self._temporary = folder, Path.home(), Path(tempfile.gettempdir())
        self._made: set[Path] = set()
        self._values: dict[str, list[str | None]] = {}
        self._told: set[Path] = set()
        self._leaves_temporary = False

    def note(self, event: str, given: tuple[Any, ...]) -> None:
        """Note an event of the interpreter, before it happens."""
        if event in ("os.putenv", "os.unsetenv"):
            name = os.fsdecode(given[0])
            value = os.fsdecode(given[1]) if event == "os.putenv" else None
            self._values.setdefault(name, [os.environ.get(name)]).append(value)
        elif event in _MAKES and not (event == "open" and not given[2] & _WRITES):
            with contextlib.suppress(TypeError, ValueError):
                path = Path(os.fsdecode(given[_MAKES[event]])).absolute()
                # Python keeps what it compiled beside the modules that it imports.
                if "__pycache__" not in path.parts and not path.exists():
                    self._made.add(path)

    def found(self, is_again: bool) -> list[str]:
        """What was done since the last call, each as a phrase with a verb; `is_again`: as in an earlier round."""
        values, self._values = self._values, {}
        again = [
            name
            for name, own in values.items()
            if name not in SET_BY_TORCH and len(set(own)) == 1 and own[0] is not None
        ]
        made, self._made = {path for path in self._made if path.exists()}, set()
        phrases = [f"sets environment variable {name} to the value that it has" for name in again]
        here = {path for path in self._folder.iterdir() if not self._is_named(path)}
        phrases += [f"leaves {path.name} in the working directory" for path in sorted(here - self._told)]
        self._told |= here
        own = (path for path in sorted(made) if path.parent == self._home and path.name[0] != ".")
        phrases += [f"leaves {path} in the home directory" for path in own]
        if temporary := [path for path in made if path.parent == self._temporary]:
            # A file that the next layer finds again is a cache.
            if is_again and self._leaves_temporary:
                phrases.append(f"leaves one more file in {self._temporary} each time, such as {temporary[0]}")
            self._leaves_temporary = True
        return phrases

    def _is_named(self, path: Path) -> bool:
        """Whether an environment variable names a folder of the working directory, such as that of a cache."""
        return any(value.removeprefix("./").split("/")[0] == path.name for value in os.environ.values())


@functools.cache
def _watches() -> list[FileWatch]:
    """The watches in use; the interpreter keeps the hook that this adds for ever."""
    found: list[FileWatch] = []

    def note(event: str, given: tuple[Any, ...]) -> None:
        for each in found:
            each.note(event, given)

    sys.addaudithook(note)
    return found


@contextlib.contextmanager
def watched_files() -> Iterator[FileWatch]:
    """An empty working directory, and a watch of it."""
    old, path = str(Path.cwd()), [*sys.path]
    with tempfile.TemporaryDirectory() as name:
        watch = FileWatch(Path(name).resolve())
        # Modules that are imported later are still found below the old directory.
        sys.path[:] = [each or old for each in path]
        os.chdir(name)
        _watches().append(watch)
        try:
            yield watch
        finally:
            _watches().remove(watch)
            os.chdir(old)
            sys.path[:] = path
