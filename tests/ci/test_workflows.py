"""The workflows that run recipes: each recipe is run, its rows are kept, and one page is made of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_recipe
import yaml
from recipe import find_recipes, matrix

from attnplug.matrix.model import Cell, Finding, Matrix, Run, Status
from attnplug.matrix.results import write_matrix

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
RECIPES = find_recipes([str(ROOT / "ci/recipes/*.toml")])


def workflow(name: str) -> dict[str, Any]:
    found: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    # YAML 1.1 takes the key `on` for a truth value.
    return {"on" if key is True else key: value for key, value in found.items()}


def calls() -> dict[str, dict[str, Any]]:
    """The jobs that call conformance.yml, by workflow, with what they hand over."""
    found = {}
    for path in WORKFLOWS.glob("*.yml"):
        for job in workflow(path.name)["jobs"].values():
            if str(job.get("uses", "")).endswith("conformance.yml"):
                found[path.name] = job["with"]
    return found


def row(*statuses: Status, torch: str) -> Run:
    """TORCH's row with one cell for each status, of ever larger heads."""
    findings = tuple(
        Finding(
            Cell("plain", "decode", 32 * size, "float32", "auto", 16, "NHD"),
            status,
            ("off by 1",) if status is Status.REFUTED else (),
        )
        for size, status in enumerate(statuses, 1)
    )
    date = "2026-11-21T18:00:00+00:00"
    return Run("TORCH", "attnplug", "0.1.0", "cpu", None, {"torch": torch}, date, None, findings)


def script_of(job: str) -> str:
    """What a job of the reusable workflow runs last."""
    return str(
        [step["run"] for step in workflow("conformance.yml")["jobs"][job]["steps"] if "run" in step][-1]
    )


def uploaded(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]


def test_each_python_of_our_ci_has_a_row_with_the_torch_that_we_develop_with() -> None:
    pinned = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    rows = {recipe.python for recipe in RECIPES if recipe.device == "cpu" and [recipe.torch] == pinned}
    assert rows == set(workflow("ci.yml")["jobs"]["check"]["strategy"]["matrix"]["python"])


def test_every_recipe_is_run_by_a_workflow_and_the_cpu_rows_by_ci() -> None:
    run_by = {
        name: {recipe.name for recipe in find_recipes([str(ROOT / given["recipes"])])}
        for name, given in calls().items()
    }
    assert set.union(*run_by.values()) == {recipe.name for recipe in RECIPES}
    assert run_by["ci.yml"] == {recipe.name for recipe in RECIPES if recipe.device == "cpu"}


def test_every_call_hands_over_inputs_that_the_reusable_workflow_has() -> None:
    inputs = workflow("conformance.yml")["on"]["workflow_call"]["inputs"]
    needed = {name for name, about in inputs.items() if about.get("required")}
    assert {"backend", "package", "recipes", "level"} <= set(inputs)
    for given in calls().values():
        assert needed <= set(given) <= set(inputs)


def test_the_reusable_workflow_uses_each_input_and_never_pastes_one_into_a_script() -> None:
    text = (WORKFLOWS / "conformance.yml").read_text()
    called = workflow("conformance.yml")
    for name in called["on"]["workflow_call"]["inputs"]:
        assert f"inputs.{name}" in text
    scripts = [step["run"] for job in called["jobs"].values() for step in job["steps"] if "run" in step]
    assert len(scripts) == 3
    assert not [script for script in scripts if "${{" in script]


def test_the_reusable_workflow_runs_scripts_and_matrix_keys_that_exist() -> None:
    text = (WORKFLOWS / "conformance.yml").read_text()
    for script in re.findall(r"\.attnplug/(\S+\.py)", text):
        assert (ROOT / script).is_file()
    (row, *_) = matrix(RECIPES)["include"]
    assert set(re.findall(r"\{ matrix\.([a-z]+) \}", text)) == set(row)
    flags = set(re.findall(r"--[a-z-]+", script_of("kit")))
    assert flags == {"--backend", "--level", "--matrix", "--install"}
    assert flags <= set(run_recipe._parser()._option_string_actions)


def test_the_rows_of_every_recipe_are_kept_and_one_job_makes_a_page_of_them() -> None:
    jobs = workflow("conformance.yml")["jobs"]
    uploads, page = uploaded(jobs["kit"]), jobs["compatibility"]
    (download,) = [step for step in page["steps"] if "download-artifact" in step.get("uses", "")]
    assert [upload["with"]["path"] for upload in uploads] == ["rows/*.json"]
    assert "--matrix rows " in script_of("kit")
    # The name of a job is in that of its rows: two of one name would be an error.
    assert uploads[0]["with"]["name"] == "matrix-${{ inputs.backend }}-${{ matrix.name }}"
    assert download["with"]["pattern"] == "matrix-${{ inputs.backend }}-*"
    assert (download["with"]["path"], download["with"]["merge-multiple"]) == ("rows", True)
    assert {"recipes", "kit"} == set(page["needs"])
    assert [step["with"]["path"] for step in uploaded(page)] == ["page"]


def test_the_rows_are_kept_and_the_page_is_made_where_a_recipe_fails() -> None:
    jobs = workflow("conformance.yml")["jobs"]
    (rows,), (page,) = uploaded(jobs["kit"]), uploaded(jobs["compatibility"])
    assert rows["if"] == page["if"] == "${{ !cancelled() }}"
    assert jobs["compatibility"]["if"].startswith("${{ !cancelled() && ")
    assert "continue-on-error" not in (WORKFLOWS / "conformance.yml").read_text()


class TestThePage:
    """The script of the last job, run as GitHub runs it; pip is left out."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
        """`run(name=statuses, ...)` writes rows of these statuses to name.json and runs the script beside them."""

        def run_it(**rows: list[Status]) -> subprocess.CompletedProcess[str]:
            for name, statuses in rows.items():
                (tmp_path / "rows").mkdir(exist_ok=True)
                write_matrix(Matrix((row(*statuses, torch=name),)), tmp_path / "rows" / f"{name}.json")
            bin_ = tmp_path / "bin"
            bin_.mkdir()
            for name, text in {"pip": "exit 0", "attnplug": f'"{sys.executable}" -m attnplug "$@"'}.items():
                (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
                (bin_ / name).chmod(0o755)
            script = tmp_path / "script.sh"
            script.write_text(script_of("compatibility"))
            path = f"{bin_}:{os.environ['PATH']}"
            return subprocess.run(
                ["bash", "-e", script],
                cwd=tmp_path,
                env={**os.environ, "PATH": path, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")},
                capture_output=True,
                text=True,
                check=False,
            )

        return run_it

    def test_every_recipe_is_on_it_though_their_versions_differ(self, run: Any, tmp_path: Path) -> None:
        done = run(**{"torch-2.9": [Status.VERIFIED], "torch-2.13": [Status.VERIFIED]})
        assert done.returncode == 0, done.stdout + done.stderr
        summary = (tmp_path / "summary.md").read_text()
        devices = re.findall(r"^## (.*)$", summary, re.MULTILINE)
        assert devices == ["cpu (torch-2.13)", "cpu (torch-2.9)"]
        assert {path.name for path in (tmp_path / "page").iterdir()} == {
            "matrix.json",
            "matrix.html",
            "matrix.md",
        }

    def test_a_refuted_claim_of_any_recipe_fails_the_job_after_the_page_is_made(
        self, run: Any, tmp_path: Path
    ) -> None:
        done = run(**{"torch-2.9": [Status.VERIFIED, Status.REFUTED], "torch-2.13": [Status.VERIFIED] * 2})
        assert done.returncode == 4
        assert (
            "TORCH on cpu (torch-2.9): plain/decode/d64/float32/auto/b16/NHD is refuted: off by 1"
            in done.stderr
        )
        assert "✗ refuted" in (tmp_path / "summary.md").read_text()
        assert (tmp_path / "page" / "matrix.html").is_file()

    def test_no_rows_at_all_fail_it(self, run: Any, tmp_path: Path) -> None:
        done = run()
        assert done.returncode == 2
        assert "rows/*.json cannot be read" in done.stderr
        assert not (tmp_path / "summary.md").exists()
