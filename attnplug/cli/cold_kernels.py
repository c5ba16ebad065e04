"""The kernels of a model that are cold, found in a child process of `attnplug doctor`.

The child imports torch and Triton, which may crash or hang.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from attnplug._system.processes import Child, python_command
from attnplug.cli.commands.matrix_compile import check_compiler
from attnplug.cli.commands.warm import kernels_of
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import AttnplugError

_CHILD = "from attnplug.cli.cold_kernels import main; main(*sys.argv[1:])"
_MOST_NAMES = 3


def main(task: str, report: str) -> None:
    """Run in the child: write the state and the sentence about a model's kernels to the file `report`, as JSON."""
    config, device = json.loads(Path(task).read_text(encoding="utf-8"))
    try:
        found = state_of(Path(config), device)
    except AttnplugError as problem:
        found = "lacking", str(problem)
    Path(report).write_text(json.dumps(found), encoding="utf-8")


def state_of(config: Path, device: str) -> tuple[str, str]:
    """The state, "ok" or "warning", and a sentence; errors as `kernels_of`."""
    from attnplug.registry.devices import resolve_device

    check_compiler("doctor --model")
    where = resolve_device(device)
    _, forms, cold, _ = kernels_of(config, where, BuilderConfig())
    if forms is None:
        return "ok", "TRITON serves no layer of it, and the kernels of others are not compiled ahead"
    if not cold:
        return "ok", f"all {len(forms)} kernels of TRITON are warm on {where}"
    names = list(dict.fromkeys(str(form).partition("(")[0] for form in cold))
    more = ", ..." if len(names) > _MOST_NAMES else ""
    command = f"attnplug warm {shlex.quote(str(config))} --device {shlex.quote(device)}"
    are = "is" if len(cold) == 1 else "are"
    return "warning", (
        f"{len(cold)} of {len(forms)} kernels of TRITON {are} cold on {where}, so first requests wait for the "
        f"compiler: {', '.join(names[:_MOST_NAMES])}{more}; {command} compiles them"
    )


def cold_kernels(config: Path, device: str, seconds: float) -> tuple[str, str]:
    """The state of a model's kernels and a sentence: "ok", "warning" if some are cold, "lacking" or "failed"."""
    task = str(config.absolute()), device
    with Child(python_command(_CHILD), task) as child:
        problem = child.problem(seconds)
        if problem is not None:
            return "failed", problem
        try:
            state, detail = json.loads(child.report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return "failed", f"its report cannot be read: {child.last_line()}"
    return str(state), str(detail)
