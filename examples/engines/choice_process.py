"""One choice's process: its figures so far, its progress, and why it ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from choice_run import MARK, SAID


def run(
    file: Path,
    choice: str,
    settings: Mapping[str, Any],
    timeout: float,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    *,
    stop: threading.Event | None = None,
    waits: Callable[[], bool] = lambda: False,
    log: Path | None = None,
) -> dict[str, Any]:
    """The result of one choice; with an `error` beside the figures so far where it did not end.

    Args:
        file: the script that runs it, in a session of its own: what it starts ends with it.
        choice: the script's word.
        settings: for its standard input.
        timeout: seconds, without those in which it waits.
        keep: gets the figures so far, whenever there are more.
        stop: ends the process when it is set.
        waits: whether it waits for other choices now.
        log: a file for all of standard error, written where the choice did not end.
    """
    left = timeout
    pipe = subprocess.PIPE
    child = subprocess.Popen(  # noqa: S603  (our own interpreter on our own script)
        [sys.executable, str(file), choice],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    printed = _Printed(child, choice, keep)
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin as given:  # type: ignore[union-attr]
            given.write(json.dumps(settings))
        while child.poll() is None and left > 0 and not (stop and stop.is_set()):
            begin = time.monotonic()
            printed.take(0.2)
            left -= 0.0 if waits() else time.monotonic() - begin
        is_running = child.poll() is None
    finally:
        # vLLM and SGLang have processes of their own, which may outlive a script that ends by an error.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    printed.take_rest()
    found, errors = printed.result, printed.errors
    if "layers" in found:
        return found
    said = [line.strip() for line in errors if line.strip()]
    last = f"its last line is: {said[-1] if said else '-'}"
    if is_running:
        why = f"took more than {timeout:.0f} s; {last}" if left <= 0 else f"was stopped; {last}"
    elif child.returncode < 0:
        # An engine whose process has failed may kill all that it started, this script too.
        why = named_error("".join(errors)) or f"ended by signal {-child.returncode}; {last}"
    else:
        why = last_error("".join(errors)) or f"ended with exit code {child.returncode}"
    if log:
        log.write_text("".join(errors))
    return {**found, "error": why}


class _Printed:
    """What a child prints: figures, progress, and all else of standard error."""

    def __init__(
        self, child: subprocess.Popen[str], choice: str, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        self.result: dict[str, Any] = {}
        self.errors: list[str] = []
        self._choice, self._keep = choice, keep
        self._lines: queue.Queue[str] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=given, daemon=True)
            for given in ((child.stdout, False), (child.stderr, True))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: IO[str], is_error: bool) -> None:
        with stream:
            for line in stream:
                if is_error or line.startswith(MARK):
                    self._lines.put(line)

    def take(self, seconds: float) -> bool:
        """Read one line; False if none comes within `seconds`."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return False
        if line.startswith(MARK):
            self.result = json.loads(line.removeprefix(MARK))
            if "layers" not in self.result:
                self._keep(self.result)
            return True
        self.errors.append(line)
        if line.startswith(SAID):
            print(f"  {self._choice}: {line.removeprefix(SAID).rstrip()}", flush=True)
        return True

    def take_rest(self) -> None:
        """Read what is left; the child has ended."""
        for thread in self._threads:
            thread.join(10.0)
        while not self._lines.empty():
            self.take(0.0)


def last_error(printed: str) -> str:
    """The message of the last exception in a log, which may have several lines; else its name, or the last line."""
    return named_error(printed) or "".join(_lines(printed)[-1:])


def named_error(printed: str) -> str:
    """As `last_error`; empty for a log without an exception."""
    lines = _lines(printed)
    for row, line in reversed([*enumerate(lines)]):
        if named := re.search(r"\b\w*(?:Error|Exception): .*", line):
            return " ".join([named[0], *lines[row + 1 : row + 12]])
    found = (
        line for line in lines if re.fullmatch(r"[\w.]*(?:Error|Exception)|Fatal Python error: .*", line)
    )
    return "".join([*found][-1:])


def _lines(printed: str) -> list[str]:
    # torch names the rank before each line of an exception, and warns at the end about what nobody has closed.
    lines = (re.sub(r"^\[rank\d+\]:", "", line).strip() for line in printed.splitlines())
    return [line for line in lines if line and not re.match(r"\[W\d+", line)]
