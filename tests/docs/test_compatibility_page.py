"""The page of compatibility and the README's table are what the committed results and the classes make them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from fences import DOCS, ROOT
from scripts import load_script
from workplace import readers_environment, run_python

from attnplug.errors import AttnplugError
from attnplug.matrix import Matrix, Run, Status
from attnplug.matrix.design import declare
from attnplug.matrix.merging import ChangeKind, changes
from attnplug.matrix.results import read_matrix, write_matrix
from attnplug.registry import list_backends

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(DOCS / "matrix.py")


def verified(backend: str, device: str, name: str) -> Run:
    """A run in which everything that the class declares was right."""
    declared = declare(list_backends()[backend], device)
    findings = tuple(
        dataclasses.replace(each, status=Status.VERIFIED) if each.status is Status.DECLARED else each
        for each in declared.findings
    )
    return dataclasses.replace(
        declared,
        distribution="attnplug",
        version="0.1.0",
        device_name=name,
        versions={"python": "3.12.3", "torch": "2.11.0"},
        findings=findings,
    )


def test_the_page_and_the_table_are_those_that_the_script_writes() -> None:
    # In a process of its own: TRITON_INTERPRET, which tests set, changes what TRITON declares.
    run_python(str(DOCS / "matrix.py"), "--check")


def test_a_stale_file_is_named(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "PAGE", tmp_path / "compatibility.md")
    assert script.stale(Matrix(())) == [tmp_path / "compatibility.md", ROOT / "README.md"]


def test_the_committed_cells_of_a_cpu_are_those_that_are_claimed_today() -> None:
    committed = read_matrix(ROOT / "benchmarks/results/matrix-cpu.json")
    assert [run.key for run in committed.runs] == [("TORCH", "cpu")]
    today = Matrix((declare(list_backends()["TORCH"], "cpu"),))
    # To be only declared is no change of the claim.
    changed = [str(each) for each in changes(committed, today) if each.kind is not ChangeKind.UNKNOWN]
    again = "attnplug matrix --verify --backend TORCH --device cpu --json benchmarks/results/matrix-cpu.json"
    assert changed == [], f"run {again} and python docs/matrix.py"


@pytest.mark.slow
def test_a_result_file_that_changes_makes_page_and_table_stale(tmp_path: Path) -> None:
    for path in RESULTS.glob("matrix-*.json"):
        runs = [
            dataclasses.replace(
                run,
                findings=tuple(
                    dataclasses.replace(each, status=Status.REFUTED, why=("off",))
                    if each.cell.feature == "alibi" and each.status is Status.VERIFIED
                    else each
                    for each in run.findings
                ),
            )
            for run in read_matrix(path).runs
        ]
        write_matrix(Matrix(tuple(runs)), tmp_path / path.name)
    program = f"""
import runpy, pathlib
script = runpy.run_path({str(DOCS / "matrix.py")!r})
matrix = script["docs_matrix"](pathlib.Path({str(tmp_path)!r}))
print([path.name for path in script["stale"](matrix)])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=readers_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "['compatibility.md', 'README.md']\n", done.stderr


@pytest.mark.slow
def test_what_was_run_stands_before_what_is_only_declared(script: ModuleType, tmp_path: Path) -> None:
    write_matrix(Matrix((verified("TRITON", "sm90", "NVIDIA H200"),)), tmp_path / "matrix-triton-h200.json")
    matrix = script.docs_matrix(tmp_path)
    assert len({run.key for run in matrix.runs}) == len(matrix.runs)
    assert {run.key for run in matrix.runs if run.device_name} == {("TRITON", "sm90")}
    devices = re.findall(r"^## (.*)$", script.page(matrix), re.MULTILINE)
    assert devices == ["sm90 (NVIDIA H200)", "cpu", "sm80", "sm100", "rocm:9.4"]


@pytest.mark.slow
def test_cells_of_another_card_are_in_the_table_with_its_name(script: ModuleType, tmp_path: Path) -> None:
    run = verified("TRITON", "sm90", "NVIDIA H100")
    states = tuple(each for each in run.findings if each.cell.feature == "state")
    assert any(each.status is Status.VERIFIED for each in states)
    others = tuple(each for each in run.findings if each not in states)
    later = dataclasses.replace(
        run, device_name="NVIDIA H200", findings=states, date="2027-01-01T00:00:00+00:00"
    )
    write_matrix(Matrix((dataclasses.replace(run, findings=others),)), tmp_path / "matrix-1.json")
    write_matrix(Matrix((later,)), tmp_path / "matrix-2.json")
    matrix = script.docs_matrix(tmp_path)
    table = script.table(matrix)
    assert "| `TRITON`<br>on NVIDIA H100 |" in table
    (row,) = (line for line in table.splitlines() if line.startswith("| state |"))
    assert "| ◐ on NVIDIA H200 |" in row
    assert "A card or a version beside a mark is that of another run than the column's." in table
    assert "| state | ○ declared | ◐ sampled\\* 36 cells, on NVIDIA H200 |" in script.page(matrix)


def test_states_ran_on_a_gpu_as_the_readme_says(script: ModuleType) -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for feature in ("state", "state drafts", "state checkpoints"):
        (row,) = (line for line in lines if line.startswith(f"| {feature} |"))
        # TORCH, then TRITON, whose main run may be on another card.
        assert row.startswith(f"| {feature} | ◐ | ◐")


@pytest.mark.slow
def test_an_example_package_has_a_column_with_the_claims_of_its_class_today(
    script: ModuleType, tmp_path: Path
) -> None:
    (fla,) = (run for run in script.docs_matrix().runs if run.backend == "FLA")
    assert "FLA (attnplug-fla)" in script.page(Matrix((fla,)))
    by_status = {each.status: each for each in fla.findings}
    assert by_status[Status.VERIFIED].cell.feature.startswith("state")
    refused = by_status[Status.REFUSED]
    # A cell that the class refuses today, or that nobody has run, is as today's class says.
    wrong = dataclasses.replace(refused, status=Status.VERIFIED, why=())
    lost = dataclasses.replace(by_status[Status.VERIFIED], status=Status.REFUSED, why=("no longer",))
    write_matrix(Matrix((dataclasses.replace(fla, findings=(wrong, lost)),)), tmp_path / "matrix-1.json")
    (shown,) = (run for run in script.docs_matrix(tmp_path).runs if run.backend == "FLA")
    found = {each.cell: each for each in shown.findings}
    assert (found[wrong.cell].status, found[wrong.cell].why) == (Status.REFUSED, refused.why)
    assert found[lost.cell].status is Status.DECLARED
    assert script.example_of(dataclasses.replace(fla, distribution="attnplug-other")) is None


@pytest.mark.slow
def test_a_cell_that_no_run_has_tried_is_as_the_class_declares_it_today(
    script: ModuleType, tmp_path: Path
) -> None:
    run = verified("TRITON", "sm90", "NVIDIA H200")
    old, refused, *others = run.findings
    outdated = dataclasses.replace(old, status=Status.REFUSED, why=("not supported yet",))
    fp32 = dataclasses.replace(old.cell, dtype="float64")
    gone = dataclasses.replace(old, cell=fp32, status=Status.REFUSED, why=("no layer has it",))
    write_matrix(
        Matrix((dataclasses.replace(run, findings=(outdated, gone, *others)),)), tmp_path / "matrix-1.json"
    )
    (shown,) = (each for each in script.docs_matrix(tmp_path).runs if each.key == run.key)
    statuses = {finding.cell: finding.status for finding in shown.findings}
    assert statuses[old.cell] is Status.DECLARED
    assert statuses[refused.cell] is Status.DECLARED
    assert fp32 not in statuses
    assert all(statuses[each.cell] is each.status for each in others)


@pytest.mark.slow
def test_a_cell_that_was_verified_and_is_refused_today_is_refused(script: ModuleType, tmp_path: Path) -> None:
    run = verified("TRITON", "sm90", "NVIDIA H200")
    lost = dataclasses.replace(run.findings[0].cell, head_size=20)
    claimed = dataclasses.replace(run.findings[0], cell=lost)
    assert claimed.status is Status.VERIFIED
    write_matrix(Matrix((dataclasses.replace(run, findings=(claimed,)),)), tmp_path / "matrix-1.json")
    (shown,) = (each for each in script.docs_matrix(tmp_path).runs if each.key == run.key)
    found = {finding.cell: finding for finding in shown.findings}
    assert found[lost].status is Status.REFUSED
    assert found[lost].why[0].startswith("head_size not supported: 20")


@pytest.mark.slow
def test_declarations_have_no_date_that_would_make_the_page_stale(script: ModuleType, tmp_path: Path) -> None:
    assert {(run.date, run.commit) for run in script.docs_matrix(tmp_path).runs} == {("", None)}


@pytest.mark.slow
def test_the_table_shows_a_backend_where_most_of_it_was_run(script: ModuleType, tmp_path: Path) -> None:
    write_matrix(Matrix((verified("TRITON", "sm90", "NVIDIA H200"),)), tmp_path / "matrix-1.json")
    write_matrix(Matrix((verified("TORCH", "cpu", "some CPU"),)), tmp_path / "matrix-2.json")
    table = script.table(script.docs_matrix(tmp_path))
    head, _, *rows = table.splitlines()
    assert head.startswith(
        "|  | `TORCH`<br>on some CPU | `TRITON`<br>on NVIDIA H200 | `FLASHINFER`<br>on sm90 |"
    )
    cells = {row.split(" | ")[0].strip("| "): row.split(" | ")[1:] for row in rows if row.startswith("|")}
    assert cells["sinks"][:3] == ["◐", "◐", "○ KV dtype auto only"]
    assert cells["MLA"][:2] == ["◐", "◐"]
    assert cells["sparse"][1:3] == ["◐ head size 576 only", "–"]  # noqa: RUF001
    assert cells["head sizes"][1] == "16 to 256 in steps of 8, 288 to 512 in steps of 32, 576"
    assert "◐ sampled (claimed; some combinations were run on the device and are right" in table


def test_the_readme_keeps_everything_but_its_table(script: ModuleType) -> None:
    text = f"before\n{script.BEGIN}\nold\n{script.END}\nafter"
    matrix = Matrix((verified("TORCH", "cpu", "some CPU"),))
    made = script.readme(matrix, text)
    assert made.startswith(f"before\n{script.BEGIN}\n\n|  | `TORCH`")
    assert made.endswith(f"{script.END}\nafter")
    assert "old" not in made
    assert script.readme(matrix, made) == made


@pytest.mark.parametrize("text", ["nothing", "<!-- End of the table. -->"])
def test_a_readme_without_its_markers_is_an_error(script: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md lacks"):
        script.readme(Matrix(()), text)


def test_a_broken_result_file_is_named(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "matrix-torn.json").write_text('{"schema": "attnplug.matrix", "ver')
    with pytest.raises(AttnplugError, match=r"matrix-torn\.json"):
        script.docs_matrix(tmp_path)


def test_the_pictures_of_the_page_are_there(script: ModuleType) -> None:
    pictures = re.findall(r"\]\(\.\./(assets/[\w.-]+\.png)", script.page(Matrix(())))
    assert {picture.rpartition("-")[2] for picture in pictures} == {"light.png", "dark.png"}
    assert len(pictures) == len(set(pictures)) == 6
    assert all((DOCS / picture).is_file() for picture in pictures)
