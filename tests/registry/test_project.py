"""`[tool.attnplug]` in pyproject.toml: the command line reads each key, strictly, and libraries read none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import attnplug
from attnplug.core.errors import PolicyError
from attnplug.registry.plugins.project import Search, read_from_here, read_project, setting

LAYER = attnplug.LayerSpec(num_heads=8, num_kv_heads=8, head_size=64, dtype="float32")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Writes the table of a repository and goes to a folder in it."""

    def write(text: str, below: str = "src/package") -> Path:
        (tmp_path / ".git").mkdir(exist_ok=True)
        file = tmp_path / "pyproject.toml"
        file.write_text(text)
        folder = tmp_path / below
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(folder)
        read_project.cache_clear()
        return file

    yield write
    read_project.cache_clear()


def read(text: str, project) -> dict[str, object]:
    return dict(read_project(str(project(text).parent)))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # The package is that of this process, wherever the folder of the project is.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"} | environment
    command = [sys.executable, "-m", "attnplug", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=env, check=False, stdin=subprocess.DEVNULL
    )


def test_a_decision_names_the_file_as_the_source_of_its_rule(project):
    project('[tool.attnplug]\nbackend = "TORCH"\n')
    data = json.loads(run("explain", "--device", "cpu", "--json").stdout)
    assert (data["backend"], data["chosen_by"], data["rule"]) == ("TORCH", "pyproject.toml", "TORCH")
    shown = run("explain", "--device", "cpu", ATTNPLUG_BACKEND="TORCH")
    assert "asked for by ATTNPLUG_BACKEND (TORCH)" in shown.stdout
    assert (
        '"chosen_by": "backend"' in run("explain", "--device", "cpu", "--backend", "TORCH", "--json").stdout
    )


def test_a_table_of_rules_comes_after_the_environment(project, monkeypatch):
    project('[tool.attnplug.backend]\nsliding = "NONE"\n"*" = "TORCH"\n')
    monkeypatch.setenv("ATTNPLUG_BACKEND", "sliding=TORCH")
    with read_from_here():
        sliding = attnplug.explain(LAYER.replace(sliding_window=8), "cpu")
        assert (sliding.backend, sliding.chosen_by) == ("TORCH", "ATTNPLUG_BACKEND")
        full = attnplug.explain(LAYER, "cpu")
        assert (full.backend, full.chosen_by) == ("TORCH", "pyproject.toml")


def test_options_are_replaced_by_those_of_the_environment(project, monkeypatch):
    project("[tool.attnplug.options.TRITON]\nprefill_tile = 64\n")
    with read_from_here():
        registry = attnplug.registry.default.get_registry()
        assert registry.environment_options([]) == {"TRITON": {"prefill_tile": 64}}
        monkeypatch.setenv("ATTNPLUG_OPTIONS", "TRITON.other=1")
        assert registry.environment_options([]) == {"TRITON": {"other": 1}}
        project("[tool.attnplug.options.TRITN]\nprefill_tile = 64\n")
        with pytest.raises(PolicyError, match=r"^pyproject.toml='TRITN' is not a backend"):
            registry.environment_options([])


def test_a_library_reads_no_file(project):
    project("[tool.attnplug]\nno-such-key = 1\n")
    assert Search.folder is None
    assert attnplug.explain(LAYER, "cpu").chosen_by != "pyproject.toml"
    assert setting("ATTNPLUG_PLUGINS") == (None, "ATTNPLUG_PLUGINS")
    assert read_project.cache_info().misses == 0


def test_a_command_that_asks_nothing_reads_no_file(project):
    project("[tool.attnplug]\nno-such-key = 1\n")
    assert run("--version").returncode == 0
    failed = run("list")
    assert failed.returncode == 2
    assert "no-such-key" in failed.stderr


@pytest.mark.parametrize(
    ("text", "variable", "value"),
    [
        ("plugins = ['acme', 'other']", "ATTNPLUG_PLUGINS", "acme,other"),
        ("plugins = []", "ATTNPLUG_PLUGINS", ""),
        ("block-plugins = ['acme']", "ATTNPLUG_BLOCK_PLUGINS", "acme"),
        ("rank = ['acme']", "ATTNPLUG_RANK", "acme"),
        ("strict = true", "ATTNPLUG_STRICT", "1"),
        ("allow-refuted = ['TRITON']", "ATTNPLUG_ALLOW_REFUTED", "TRITON"),
        ("kv-cache-layout = 'HND'", "ATTNPLUG_KV_CACHE_LAYOUT", "HND"),
        ("tuned = []", "ATTNPLUG_TUNED", ""),
    ],
)
def test_a_key_sets_a_variable_that_is_unset(project, monkeypatch, text, variable, value):
    project(f"[tool.attnplug]\n{text}\n")
    with read_from_here():
        assert setting(variable) == (value, "pyproject.toml")
        monkeypatch.setenv(variable, "")
        assert setting(variable) == ("", variable)


def test_tuned_files_are_relative_to_the_file(project):
    file = project("[tool.attnplug]\ntuned = ['tables/h100.json', '/other.json']\n")
    with read_from_here():
        found, _ = setting("ATTNPLUG_TUNED")
    assert found == os.pathsep.join([str(file.parent / "tables/h100.json"), "/other.json"])


def test_a_blocked_plugin_names_the_file(project):
    project("[tool.attnplug]\nblock-plugins = ['attnplug:flashinfer']\n")
    rows = json.loads(run("list", "--no-load", "--json").stdout)["plugins"]
    assert {row["plugin"]: row["blocked_by"] for row in rows}["attnplug:flashinfer"] == "pyproject.toml"


def test_known_failures_of_the_kit(project, monkeypatch):
    from attnplug.testing.conformance.suites import load_suite

    project('[tool.attnplug.known-failures.TORCH]\n"declaration/b*" = "torch#1"\n')
    assert not load_suite("TORCH", device="cpu", only=("declaration/b*",)).known
    with read_from_here():
        known = load_suite("TORCH", device="cpu", only=("declaration/b*",)).known
    assert known
    assert set(known.values()) == {"torch#1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bakend = 'TORCH'", r"pyproject.toml: tool.attnplug.bakend='TORCH' is an unknown key; did you mean backend\?"),
        ("block_plugins = []", r"is an unknown key; did you mean block-plugins\?"),
        ("colour = 1", r"tool.attnplug.colour=1 is an unknown key; known are backend, options, "),
        ("backend = 3", r"tool.attnplug.backend=3 must be a backend's name, rules such as"),
        ("options = {TORCH = 1}", r"tool.attnplug.options=.* must be a table of options for each backend"),
        ("known-failures = {a = 'b'}", r"tool.attnplug.known-failures=.* must be a table of id = reason"),
        ("plugins = 'acme'", r"tool.attnplug.plugins='acme' must be a list of plugins"),
        ("strict = 1", r"tool.attnplug.strict=1 must be true or false"),
        ("tuned = 'x.json'", r"tool.attnplug.tuned='x.json' must be a list of files"),
        ("kv-cache-layout = 'nhd'", r"tool.attnplug.kv-cache-layout='nhd' must be 'NHD' or 'HND'"),
        ("[", r"pyproject.toml='.*' is not TOML: "),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_error_with_its_key_and_remedy(project, text, message):
    with pytest.raises(PolicyError, match=message):
        read(f"[tool.attnplug]\n{text}\n", project)


def test_the_nearest_table_counts_up_to_the_root_of_the_repository(project, tmp_path):
    project('[tool.attnplug]\nbackend = "TORCH"\n')
    inner = tmp_path / "src" / "pyproject.toml"
    inner.write_text("[tool.ruff]\n")
    assert read_project(str(tmp_path / "src" / "package")) == {"backend": "TORCH"}
    read_project.cache_clear()
    inner.write_text('[tool.attnplug]\nbackend = "TRITON"\n')
    assert read_project(str(tmp_path / "src" / "package")) == {"backend": "TRITON"}
    read_project.cache_clear()
    (tmp_path / "src" / "package" / ".git").write_text("gitdir: elsewhere\n")
    assert read_project(str(tmp_path / "src" / "package")) == {}


def test_outside_of_a_repository_only_the_folder_itself_counts(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.attnplug]\nbackend = "TORCH"\n')
    (tmp_path / "below").mkdir()
    assert read_project(str(tmp_path)) == {"backend": "TORCH"}
    assert read_project(str(tmp_path / "below")) == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFO")
def test_no_file_blocks_or_fills_the_memory(project, tmp_path):
    file = project("")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(PolicyError, match=r"cannot be read: it is a FIFO, not a regular file"):
        read_project(str(tmp_path))
    file.unlink()
    file.write_bytes(b" " * (1 << 21))
    with pytest.raises(PolicyError, match=r"cannot be read: it has more than 1 MiB"):
        read_project(str(tmp_path))


def test_children_of_the_command_find_the_same_folder(project):
    project("[tool.attnplug]\nstrict = true\n")
    code = "from attnplug.registry.plugins.project import setting; print(setting('ATTNPLUG_STRICT'))"
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with read_from_here():
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env, check=True
        )
    assert done.stdout == "('1', 'pyproject.toml')\n"
    assert Search.folder is None
    assert "_ATTNPLUG_FOLDER" not in os.environ
