"""The lines for a shell that run one check again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attnplug.registry.plugins.options import VARIABLE

if TYPE_CHECKING:
    from attnplug.testing.isolation.listing import SuiteRequest


def cli_command(request: SuiteRequest, check: str, limits: Mapping[str, str | None] | None = None) -> str:
    """The line that runs one check of a request alone, in one worker, with the options of `limits`."""
    options = {
        "--level": request.level,
        "--device": request.device,
        "--known-failures": request.known_failures,
        **(limits or {}),
        "--jobs": "1",
    }
    given = [word for text in request.options for word in ("--option", text)]
    return _line("attnplug", "conformance", request.name, "--only", check, *given, **options)


def suite_command(check: str, options: Mapping[str, str | None], of_backend: Sequence[str] = ()) -> str:
    """The line that runs one check of the suite in pytest with the options of the run, and those of the backend."""
    node = f"attnplug.testing.suite::test_conformance[{check}]"
    given = [word for text in of_backend for word in ("--attn-option", text)]
    return _line("pytest", "-p", "attnplug.testing.plugin", "--pyargs", node, *given, **options)


def node_command() -> str | None:
    """The line that runs pytest's current test alone; None outside of pytest."""
    # pytest sets the variable to "tests/test_acme.py::test_conformance[ID] (call)".
    node = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return _line("pytest", node) if node else None


def _line(*words: str, **options: str | None) -> str:
    given = [word for option, value in options.items() if value is not None for word in (option, value)]
    variable = os.environ.get(VARIABLE)
    front = f"{VARIABLE}={shlex.quote(variable)} " if variable else ""
    return front + shlex.join([*words, *given])
