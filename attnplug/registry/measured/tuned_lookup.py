"""The tables of measured times that a selection reads: the argument's, the variable's, the user's, the packaged."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from attnplug._system import files
from attnplug.core.errors import MatrixFileError, PolicyError
from attnplug.registry.measured.tuned import TunedTable, device_slug
from attnplug.registry.measured.tuned_files import read_table
from attnplug.registry.plugins.project import setting
from attnplug.registry.plugins.switches import TUNED

if TYPE_CHECKING:
    from attnplug.core.device import Device

Tuned: TypeAlias = "TunedTable | str | os.PathLike[str] | Literal[False] | None"
"""A table or its file; False for none; None leaves it to ATTNPLUG_TUNED and the folders of tables."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a selection.

    Args:
        tables: the most important first.
        asked: the user named them, so a selection notes why one does not apply.
        notes: files in the user's folder that cannot be read.
        borrowed: they are of another GPU of the same compute capability, because there is none of the device.
    """

    tables: tuple[TunedTable, ...] = ()
    asked: bool = False
    notes: tuple[str, ...] = ()
    borrowed: bool = False

    @property
    def digest(self) -> str | None:
        """The digests of the tables, with + between them; None without any."""
        return "+".join(table.digest for table in self.tables) or None


NO_TABLES = Tables()
PACKAGED = Path(__file__).with_name("tuned_tables")
"""The folder of the tables that attnplug ships, one for each device."""


def user_folder() -> Path:
    """The folder for the user's tables, one for each device."""
    from platformdirs import user_data_path

    return user_data_path("attnplug", appauthor=False) / "tuned"


def table_file(folder: Path, device: Device) -> Path | None:
    """The file for a device in a folder of tables; None for a GPU of unknown name."""
    slug = device_slug(device)
    return None if slug is None else folder / f"{slug}.json"


class TableLookup:
    """Finds tables and remembers them, so that each file is read once. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[str, Tables] = {}
        self._variable: list[Tables | None] = []
        self._named: dict[str, Tables] = {}

    def of_argument(self, tuned: Tuned) -> Tables | None:
        """The tables that an argument names; None if it names none.

        Raises:
            MatrixFileError: a file that is missing or damaged.
            PolicyError: an argument of another type.
        """
        if tuned is None:
            return None
        if tuned is False:
            return NO_TABLES
        if isinstance(tuned, TunedTable):
            return Tables((tuned,), asked=True)
        try:
            path = os.fspath(tuned)
        except TypeError:
            path = None
        if not isinstance(path, str) or not path:
            raise PolicyError("tuned", tuned, "must be a file, a TunedTable, False or None")
        with self._lock:
            if path not in self._named:
                self._named[path] = _asked_for([Path(path)])
            return self._named[path]

    def for_device(self, device: Device) -> Tables:
        """The tables without an argument: those of ATTNPLUG_TUNED or the project, else the user's and the packaged one for a device.

        The variable is read once. If it is set and empty, there are no tables.

        Raises:
            MatrixFileError: a file that the variable names is missing or damaged.
        """
        with self._lock:
            if not self._variable:
                given, source = setting(TUNED)
                # os.path, because pathlib raises where a home cannot be looked up.
                names = (os.path.expanduser(each) for each in (given or "").split(os.pathsep) if each)  # noqa: PTH111
                paths = list(map(Path, names))
                self._variable.append(
                    None
                    if given is None
                    else _asked_for(paths, f"name files of attnplug tune in {source}, or leave it empty")
                )
            if self._variable[0] is not None:
                return self._variable[0]
            key = f"{device.type} {device.name}"
            if key not in self._read:
                self._read[key] = _in_folders(device)
            return self._read[key]


def tables_by_source(device: Device) -> dict[str, TunedTable]:
    """The user's own table for a device and the packaged one, as far as there are any.

    Raises:
        MatrixFileError: one of them is damaged.
    """
    paths = {"user table": table_file(user_folder(), device), "packaged table": table_file(PACKAGED, device)}
    return {
        name: read_table(path) for name, path in paths.items() if path is not None and files.may_exist(path)
    }


def _asked_for(paths: list[Path], *remedy: str) -> Tables:
    if not paths:
        return NO_TABLES
    return Tables(tuple(read_table(path, *remedy) for path in paths), asked=True)


def _in_folders(device: Device) -> Tables:
    tables, notes = [], []
    for folder in (user_folder(), PACKAGED):
        path = table_file(folder, device)
        if path is None or not files.may_exist(path):
            continue
        try:
            tables.append(read_table(path))
        except MatrixFileError as problem:
            notes.append(str(problem))
    if not tables and (other := _of_another_gpu(device)) is not None:
        return Tables((other,), notes=tuple(notes), borrowed=True)
    return Tables(tuple(tables), notes=tuple(notes))


def _of_another_gpu(device: Device) -> TunedTable | None:
    """The packaged table of a GPU with the capability of a device whose name is known; None without one."""
    if device.name is None or device.capability is None:
        return None
    for path in sorted(PACKAGED.glob("*.json")):
        try:
            table = read_table(path)
        except MatrixFileError:
            # Its own device notes it.
            continue
        if (table.device.type, table.device.capability) == (device.type, device.capability):
            return table
    return None
