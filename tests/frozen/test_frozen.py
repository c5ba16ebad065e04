"""Plugins and engines that were written for interface version 1 run on today's attnplug, unchanged."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnplug.registry.plugins.records import API_VERSION

HERE = Path(__file__).parent
FOLDERS = [HERE / "plugins", HERE / "engine"]
DIGEST = "85ccb2ef5bcfde4491a8e5ae7f4be2d398a796ea02c2f4d21ee61b184bddde3d"


def run(script: str) -> list[str]:
    """The lines that a script prints in a process of its own, where the frozen files are importable."""
    inherited = os.environ.get("PYTHONPATH", "")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, FOLDERS), inherited]),
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        cwd=HERE.parents[1],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_files_are_as_they_were() -> None:
    found = hashlib.sha256()
    for file in sorted(file for folder in FOLDERS for file in folder.rglob("*.py")):
        found.update(file.relative_to(HERE).as_posix().encode() + file.read_bytes())
    assert found.hexdigest() == DIGEST, (
        "never edit these files: README.md beside them says what to do instead"
    )


def test_they_are_for_the_version_that_this_release_offers() -> None:
    """A new version needs files of its own: README.md says how."""
    assert API_VERSION == 1
    assert "ATTNPLUG_API = (1, 1)" in (HERE / "plugins/attnplug_acme/__init__.py").read_text()


def test_an_engine_that_calls_impl_and_builder_itself_runs_plugins_and_built_in_backends() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    assert run("serve_by_hand.py") == ["ACME", "FLEX", "TORCH", "TRITON"]


def test_an_engine_with_a_runtime_draws_the_tokens_of_generate() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert run("serve_models.py") == ["ACME", "FLEX", "TORCH"]
