"""Processes that run a script as torchrun would start them, forked from one that has imported torch and transformers.

The imports take four seconds, and what a script runs at the sizes of a test takes less.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

__all__ = ["Ended", "Rank", "start"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "transformers.modeling_utils"])


class Ended(NamedTuple):
    """How a process ended: minus the number of a signal, or its exit code, and what it wrote."""

    code: int
    printed: str
    problem: str


class Rank:
    """A running process.

    Args:
        arguments: the path of the script, and its arguments.
        environment: variables that it has besides those of this process.
        folder: where it writes its output.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str], folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        folder.mkdir()
        variables = {**os.environ, **environment}
        given = arguments, variables, str(self._out), str(self._err)
        self._process: ForkServerProcess = _CONTEXT.Process(target=_run, args=given, daemon=True)
        self._process.start()

    def wait(self, timeout: float) -> Ended:
        """Wait until it ends; TimeoutError after so many seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(
                f"runs for more than {timeout} s:\n{self._out.read_text()}{self._err.read_text()}"
            )
        return Ended(self._process.exitcode, self._out.read_text(), self._err.read_text())

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()


def start(ranks: list[list[str]], folder: Path) -> list[Rank]:
    """The processes of a group, each with the arguments of its own rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    numbers = [
        {**group, "COLUMNS": "100", "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(len(ranks))
    ]
    return [
        Rank(arguments, variables, folder / variables["RANK"])
        for arguments, variables in zip(ranks, numbers, strict=True)
    ]


def _run(arguments: list[str], variables: dict[str, str], out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        with Path(path).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
