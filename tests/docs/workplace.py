"""A folder, and where a page installs something an environment, in which the page's commands are run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from fences import ROOT

__all__ = ["Workplace", "readers_environment", "run_python"]

_SECONDS = 300
_LAUNCH = '#!/bin/sh\nexec "{python}" -m {module} "$@"\n'
_PROGRAMS = {"attnplug": "attnplug", "pip": "pip", "pytest": "pytest"}


def readers_environment() -> dict[str, str]:
    """The variables that a reader has: no switches, and not those that the tests set, TRITON_INTERPRET foremost."""
    left_out = ("ATTNPLUG_", "PYTEST_", "TRITON_")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


def run_python(*arguments: str) -> None:
    """Run Python as a reader does, from the root of the checkout; warnings are errors.

    A process of its own has no plugin and no variable of the tests.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env=readers_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Workplace:
    """An empty folder beside `examples/`, as a reader's clone has it.

    Args:
        folder: made if it is not there.
        installs: whether commands install packages: into an environment of their own then, which sees
            everything that is installed here.
    """

    def __init__(self, folder: Path, *, installs: bool) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "examples").symlink_to(ROOT / "examples")
        self._bin = self._make_environment() if installs else Path(sys.executable).parent

    def write(self, name: str, text: str) -> None:
        """Write a file that a page shows."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, diff: str) -> None:
        """Make the change of a diff without line numbers: its lines must stand in the file, once."""
        lines = diff.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        path = self.folder / name
        text = path.read_text()
        assert text.count(before) == 1, f"{name} does not hold once:\n{before}"
        path.write_text(text.replace(before, after))

    def run(self, command: str) -> tuple[int, str]:
        """Run a command line in bash; the exit code, and everything printed without trailing blanks.

        Raises subprocess.TimeoutExpired after five minutes.
        """
        kept = readers_environment()
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder,
            env={
                **kept,
                "PATH": f"{self._bin}{os.pathsep}{kept.get('PATH', '')}",
                "COLUMNS": "80",
                "NO_COLOR": "1",
                # Pages install nothing but what they have written themselves.
                "PIP_NO_INDEX": "1",
                "PIP_NO_DEPS": "1",
                # pip reads the value as that of build isolation: 0 turns it off.
                "PIP_NO_BUILD_ISOLATION": "0",
                "PYTHONIOENCODING": "utf-8",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            timeout=_SECONDS,
            check=False,
        )
        return done.returncode, "".join(line.rstrip() + "\n" for line in done.stdout.splitlines())

    def _make_environment(self) -> Path:
        folder = self.folder.parent / f"{self.folder.name}-environment"
        venv.create(folder, symlinks=True, with_pip=False)
        python = folder / "bin" / "python"
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        # By addsitedir: an editable install stands in a .pth file of its own.
        lines = [f"import site; site.addsitedir({path!r})\n" for path in sorted(outer)]
        (site / "outer.pth").write_text("".join(lines))
        for name, module in _PROGRAMS.items():
            launcher = python.with_name(name)
            launcher.write_text(_LAUNCH.format(python=python, module=module))
            launcher.chmod(0o755)
        if shutil.which("bash") is None:
            raise RuntimeError("the pages' commands are run by bash, which is not installed")
        return python.parent
