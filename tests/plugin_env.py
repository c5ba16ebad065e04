"""Scratch environments that hold plugins, of tests/plugins or elsewhere, really built and really installed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock

__all__ = ["PLUGINS", "InstallPlugins", "PluginEnvironments", "RunWithPlugins", "distribution_names"]

PLUGINS = Path(__file__).parent / "plugins"

InstallPlugins = Callable[..., Path]
"""What the fixture `install_plugins` gives: PluginEnvironments.install."""
RunWithPlugins = Callable[..., subprocess.CompletedProcess[str]]
"""What the fixture `run_with_plugins` gives: PluginEnvironments.run."""

# All wheels in one child: starting Python and importing hatchling costs more than a wheel.
_BUILD_ALL = """
import os, sys
from hatchling.build import build_wheel
target, *sources = sys.argv[1:]
for source in sources:
    os.chdir(source)
    build_wheel(target)
"""


def distribution_names() -> list[str]:
    """The names of all distributions under tests/plugins, sorted."""
    return sorted(path.parent.name for path in PLUGINS.glob("*/pyproject.toml"))


class PluginEnvironments:
    """Builds plugin wheels once and installs sets of them into folders below `root`.

    Safe for several processes that share `root`: each step is made under a lock, then renamed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def wheels(self) -> dict[str, Path]:
        """The wheel of each distribution by name, all built at the first call."""
        sources = [PLUGINS / name for name in distribution_names()]
        folder = self._once("wheels", lambda target: _build_wheels(target, sources))
        built = {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
        return {name: built[name] for name in distribution_names()}

    def install(self, *plugins: str | Path) -> Path:
        """A folder for PYTHONPATH into which pip installed these distributions, made once per set.

        A plugin is the name of one under tests/plugins, or the folder of another distribution. Raises
        ValueError for a name that is not under tests/plugins.
        """
        known = distribution_names()
        names = {plugin for plugin in plugins if isinstance(plugin, str)}
        if unknown := sorted(names.difference(known)):
            raise ValueError(f"no such test plugin: {', '.join(unknown)}; there are {', '.join(known)}")
        chosen = sorted(set(plugins), key=str)
        key = hashlib.sha1("\n".join(map(str, chosen)).encode(), usedforsecurity=False).hexdigest()[:12]

        def pip_install(target: Path) -> None:
            wheels = [self.wheels()[each] if isinstance(each, str) else self._wheel(each) for each in chosen]
            if wheels:
                _pip_install(target, wheels)

        return self._once(f"env-{key}", pip_install)

    def _wheel(self, source: Path) -> Path:
        folder = self._once(f"wheel-{source.name}", lambda target: _build_wheels(target, [source]))
        (wheel,) = folder.glob("*.whl")
        return wheel

    def run(
        self,
        names: Sequence[str | Path],
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python in a child that sees these distributions, and waits for its end.

        `command` is code, or the arguments after `python`, as `["-m", "attnplug", "list"]`. The child
        inherits the environment but for ATTNPLUG_*; `env` is added to it. It runs in an empty folder.
        Raises subprocess.TimeoutExpired after `timeout` seconds; the child and its children are killed.
        """
        arguments = ["-c", command] if isinstance(command, str) else list(command)
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=_environment(self.install(*names), env or {}),
            cwd=self._once("empty", lambda folder: None),
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def _once(self, name: str, make: Callable[[Path], None]) -> Path:
        final = self._root / name
        if not final.exists():
            self._root.mkdir(parents=True, exist_ok=True)
            with FileLock(self._root / f"{name}.lock"):
                if not final.exists():
                    unfinished = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=self._root))
                    make(unfinished)
                    unfinished.rename(final)
        return final


def _build_wheels(target: Path, sources: Sequence[Path]) -> None:
    _run_quietly([sys.executable, "-c", _BUILD_ALL, str(target), *map(str, sources)])


def _pip_install(target: Path, wheels: Sequence[Path]) -> None:
    options = [
        "--isolated",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    command = [sys.executable, "-m", "pip", *options[:3], "install", *options[3:], "--target", str(target)]
    _run_quietly([*command, *map(str, wheels)])


def _run_quietly(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:4])} ... ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )


def _environment(plugins: Path, changes: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
    path = [str(plugins), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONIOENCODING": "utf-8", **changes}
