"""`attnplug matrix`: what it asks, runs, writes, joins and compares, and how it ends."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnplug.backends.flashinfer.backend import FlashInferBackend
from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.backends.triton.backend import TritonBackend
from attnplug.cli.commands import matrix_files, matrix_verify
from attnplug.core.device import Device
from attnplug.core.errors import MatrixFileError
from attnplug.core.spec import LayerSpec, Phase
from attnplug.matrix import design as declared
from attnplug.matrix import verify
from attnplug.matrix.design import design
from attnplug.matrix.model import Matrix, Status
from attnplug.matrix.results import read_matrix, write_matrix
from attnplug.registry.selection import evidence as refuted
from attnplug.testing.isolation.listing import Listing, ListingFailure
from attnplug.testing.isolation.results import CheckOutcome, Result

FEW = ("--only", "plain/*/d128/*/auto/b16/NHD")
"""Few cells of TORCH; its three dtypes and three phases."""
WRONG = "output[0]: 1 is not 2; these are the numbers of a known mistake: window ignored"


@pytest.fixture
def command(run, monkeypatch, tmp_path):
    """`command(...)` runs `attnplug matrix ...` in an empty folder, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(declared, "source_commit", lambda: "0123")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda *args: run("matrix", *args)


class Workers:
    """Stands for the workers: every cell passes but those with an ending of their own."""

    def __init__(self) -> None:
        self.endings: dict[str, Result | type[BaseException] | int] = {}
        self.trouble: dict[str, str] = {}
        self.problem: str | None = None
        self.runs: list[list[str]] = []
        self.limits = None
        self.request = None

    def listing(self, request, timeout):
        if request.name in self.trouble:
            return ListingFailure(self.trouble[request.name], True)
        return Listing(request, request.name, "attnplug", "cpu", "cpu", None, (), {}, {}, "0123")

    def run_checks(self, listing, ids, limits, observer):
        self.runs.append(list(ids))
        self.limits, self.request = limits, listing.request
        for each in ids:
            observer.started(each)
            ending = self.endings.get(each)
            if isinstance(ending, int):
                os.kill(os.getpid(), ending)
            if isinstance(ending, type):
                raise ending
            observer.finished(ending or Result(each, CheckOutcome.PASSED, 2.0))
        return self.problem


@pytest.fixture
def workers(monkeypatch) -> Iterator[Workers]:
    played = Workers()
    monkeypatch.setattr(verify, "list_checks", played.listing)
    monkeypatch.setattr(verify, "run_checks", played.run_checks)
    before = signal.getsignal(signal.SIGTERM)
    yield played
    assert signal.getsignal(signal.SIGTERM) is before


def torch_cells() -> list[str]:
    """The cells of FEW, in the order in which they are asked."""
    ids = [each.cell.id for each in declared.declare(TorchBackend, "cpu").findings]
    return fnmatch.filter(ids, FEW[1])


def wrong(cell: str) -> Result:
    return Result(cell, CheckOutcome.FAILED, 0.2, WRONG)


def statuses(path) -> dict[str, str]:
    (run,) = read_matrix(Path(path)).runs
    return {finding.cell.id: str(finding.status) for finding in run.findings}


# Help and declarations.


@pytest.mark.parametrize("name", [(), ("merge",), ("diff",)])
def test_help_fits_80_columns_and_names_the_exit_codes(run, name):
    outcome = run("matrix", *name, "--help")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "Exit codes: 0 " in outcome.out


def test_any_devices_are_asked_at_once_and_nothing_is_run(command):
    outcome = command(
        "--backend", "TORCH", "--device", "sm90", "--device", "cpu", "--device", "sm90", "--json", "m.json"
    )
    assert (outcome.code, outcome.err) == (0, "")
    runs = read_matrix(Path("m.json")).runs
    assert [each.key for each in runs] == [("TORCH", "sm90"), ("TORCH", "cpu")]
    # TORCH refuses only formats without pages for a layer's heads; "verified" would need a run.
    assert {str(each.status) for one in runs for each in one.findings} == {"declared", "refused"}
    assert re.search(r"^sinks +○ declared", outcome.out, re.M)


def test_without_a_name_all_backends_are_asked_and_composites_by_name(command):
    assert command("--device", "cpu", "--json", "m.json").code == 0
    names = {each.backend for each in read_matrix(Path("m.json")).runs}
    assert {"TORCH", "TRITON", "FLASH_ATTN_2", "FLASHINFER"} <= names
    command("--backend", "FLASH_ATTN_4+FLASHINFER", "--device", "sm90", "--json", "m.json")
    assert [each.backend for each in read_matrix(Path("m.json")).runs] == ["FLASH_ATTN_4+FLASHINFER"]


def test_a_family_stands_for_its_members(command):
    command("--backend", "FLASH_ATTN", "--device", "sm90", "--json", "m.json")
    names = [each.backend for each in read_matrix(Path("m.json")).runs]
    assert {"FLASH_ATTN_2", "FLASH_ATTN_4"} <= set(names)


def test_cells_are_chosen_by_feature_and_by_id(command):
    command(
        "--backend", "TORCH", "--device", "cpu", "--feature", "sinks", "--only", "*/d64/*", "--json", "m.json"
    )
    found = statuses("m.json")
    assert found
    assert all(each.startswith("sinks/") and "/d64/" in each for each in found)


def test_the_commit_is_that_of_the_checkout_unless_told(command):
    command("--backend", "TORCH", "--device", "cpu", "--json", "m.json")
    assert read_matrix(Path("m.json")).runs[0].commit == "0123"
    command("--backend", "TORCH", "--device", "cpu", "--commit", "4567", "--json", "m.json")
    assert read_matrix(Path("m.json")).runs[0].commit == "4567"


@pytest.mark.slow
def test_all_three_files_are_written(command):
    outcome = command(
        "--backend", "TORCH", "--device", "cpu", "--json", "m.json", "--html", "m.html", "--markdown", "m.md"
    )
    assert outcome.code == 0
    assert Path("m.html").read_text().startswith("<!doctype html>")
    assert "TORCH" in Path("m.md").read_text()
    assert sorted(path.name for path in Path().iterdir()) == ["m.html", "m.json", "m.md"]
    assert command("--backend", "TORCH", "--device", "cpu", "--json", "build/new/m.json").code == 0
    assert Path("build/new/m.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "TORHC"), "--backend='TORHC' is not a backend"),
        (("--device", "sm9000000"), "is unknown"),
        (("--feature", "sink"), "--feature='sink' must be one of plain, sliding_window"),
        (("--only", "sink/*"), "--only='sink/*' matches no cell; an id is "),
        (("--only", "*/d73/*"), "combinations, none of them sampled; at most 1,500 are evaluated; name more"),
        (("--only", "plain/decode/d64/float16/fp8/b16/NHD"), "names values that no layer has together; fp8"),
        (("--only", "sinks/decode/d73/float16/fp9/b16/NHD"), "matches no cell; an id is "),
        (
            ("--verify", "--device", "cpu", "--only", "sinks/decode/d73/float16/auto/b16/NHD"),
            "matches no sampled cell, and only these are run; an id is sinks/",
        ),
        (("--unclaimed",), "--unclaimed=True says how cells are run; add --verify"),
        (("--resume",), "--resume=True says how cells are run; add --verify"),
        (("--jobs", "2"), "--jobs=2 says how cells are run; add --verify"),
        (("--compile-limit", "2"), "--compile-limit=2 says how cells are run; add --verify"),
        (("--memory", "2GiB"), "--memory='2GiB' says how cells are run; add --verify"),
        (("--json", "."), "--json='.' is a folder; name a file in it"),
        (("--html", "file/m.html"), "--html='file/m.html' is in a folder that cannot be made: File exists"),
        (("--html", "file/no/m.html"), "is in a folder that cannot be made: Not a directory"),
        (("--json", "m", "--markdown", "./m"), "--markdown='m' is the file of --json too; name two files"),
        (
            ("--verify", "--device", "rocm:9.4"),
            "--device='rocm:9.4' is not on this machine, so nothing can run",
        ),
        (("--verify", "--memory", "lots"), "lots"),
    ],
)
def test_bad_usage_is_named_before_anything_is_run(command, workers, arguments, message):
    Path("file").touch()
    outcome = command(*arguments) if "--backend" in arguments else command("--backend", "TORCH", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert workers.runs == []


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("device", ["sm80", "sm90"])
def test_a_combination_that_is_not_sampled_is_asked_of_the_class(command, device, dtype):
    only = f"sinks/decode/d72/bfloat16/{dtype}/b48/HND"
    outcome = command(
        "--backend",
        "TRITON",
        "--backend",
        "FLASHINFER",
        "--device",
        device,
        "--only",
        only,
        "--json",
        "m.json",
    )
    assert outcome.code == 0
    for run, backend in zip(
        read_matrix(Path("m.json")).runs, (TritonBackend, FlashInferBackend), strict=True
    ):
        spec = LayerSpec(
            num_heads=4,
            num_kv_heads=2,
            head_size=72,
            dtype="bfloat16",
            kv_cache_dtype=dtype,
            block_size=48,
            has_sinks=True,
        )
        expected = backend.validate_configuration(spec, Device.parse(device), Phase.DECODE)
        (found,) = run.findings
        assert found.cell.id == only
        assert found.why == tuple(map(str, expected))
        assert found.status is (Status.REFUSED if expected else Status.DECLARED)
        said = f"{run.backend} on {device}: {only} is not sampled; the answer is what the class says of this combination"
        assert said in outcome.err


def test_only_the_backends_without_a_sampled_cell_are_asked(command):
    only = "plain/mixed/d24/bfloat16/auto/*/NHD"
    arguments = ("--backend", "TRITON", "--backend", "FLASHINFER", "--device", "sm90", "--only", only)
    outcome = command(*arguments, "--json", "m.json")
    triton, flashinfer = read_matrix(Path("m.json")).runs
    sampled = fnmatch.filter([cell.id for cell in design(TritonBackend, Device.parse("sm90"))], only)
    assert [each.cell.id for each in triton.findings] == sampled != []
    assert fnmatch.filter([cell.id for cell in design(FlashInferBackend, Device.parse("sm90"))], only) == []
    assert {each.status for each in flashinfer.findings} == {Status.REFUSED}
    assert all(each.why[0].startswith("head_size not supported: 24") for each in flashinfer.findings)
    assert "FLASHINFER on sm90" in outcome.err
    assert "TRITON on sm90" not in outcome.err


def test_an_option_of_a_subcommand_is_not_taken_for_one_of_the_whole(command):
    assert command("diff", "a.json", "b.json").err.startswith("attnplug: a.json cannot be read: No such file")
    assert command("merge", "a.json").code == 2


# Verifying, with played workers.


def verifying(*more):
    return ("--backend", "TORCH", "--device", "cpu", "--verify", *FEW, "--json", "m.json", *more)


def test_what_passes_is_verified(command, workers):
    outcome = command(*verifying("--jobs", "2", "--timeout", "9", "--memory", "3GiB"))
    assert (outcome.code, outcome.err) == (0, "")
    assert workers.runs == [torch_cells()]
    assert set(statuses("m.json").values()) == {"verified"}
    assert (workers.limits.timeout, workers.limits.jobs, workers.limits.memory) == (9.0, 2, 3 * 2**30)
    assert (workers.request.name, workers.request.device) == ("TORCH", "cpu")
    lines = outcome.out.splitlines()
    count = len(torch_cells())
    assert lines[0] == f"TORCH on cpu: {count} cells, 2 workers"
    assert lines[1].startswith(f"TORCH on cpu: {count} verified in ")
    assert "plain    ◐ sampled 1 of 12 head sizes" in outcome.out


def test_a_refuted_claim_ends_with_4_and_select_is_told(command, workers):
    cell = torch_cells()[1]
    workers.endings[cell] = wrong(cell)
    outcome = command(*verifying())
    assert outcome.code == 4
    assert statuses("m.json")[cell] == "refuted"
    assert f"refuted   {cell}\n" in outcome.out
    assert WRONG in outcome.out
    assert (
        f"TORCH on cpu: attnplug select refuses what was refuted ({refuted.evidence_path()})" in outcome.out
    )
    known = json.loads(refuted.evidence_path().read_text())
    assert WRONG in json.dumps(known)
    workers.endings.clear()
    outcome = command(*verifying())
    assert outcome.code == 0
    assert "TORCH on cpu: 1 refuted before and right now, no longer refused" in outcome.out


def test_where_select_cannot_be_told_the_results_stand_all_the_same(command, workers, monkeypatch):
    def record(run):
        raise MatrixFileError("refuted.json", "is half written", "delete it")

    monkeypatch.setattr(refuted, "record", record)
    workers.endings[torch_cells()[0]] = wrong(torch_cells()[0])
    outcome = command(*verifying())
    assert outcome.code == 4
    assert (
        outcome.err
        == "attnplug: attnplug select will not refuse these cells: refuted.json is half written; delete it\n"
    )
    assert "refuted" in statuses("m.json").values()


@pytest.mark.parametrize("how", [KeyboardInterrupt, signal.SIGTERM])
@pytest.mark.slow
def test_an_interrupted_run_writes_what_it_has_and_goes_on_with_resume(command, workers, how):
    cells = torch_cells()
    workers.endings[cells[2]] = how
    outcome = command(*verifying("--html", "m.html"))
    assert outcome.code == 130
    assert "interrupted; run the same command with --resume to continue" in outcome.out
    assert f"{len(cells) - 2} not run: interrupted" in outcome.out
    assert list(statuses("m.json").values()) == ["verified"] * 2 + ["not run"] * (len(cells) - 2)
    assert Path("m.html").exists()
    workers.endings.clear()
    outcome = command(*verifying("--resume"))
    assert outcome.code == 0
    assert workers.runs[1] == cells[2:]
    assert "2 kept from the run before" in outcome.out
    assert set(statuses("m.json").values()) == {"verified"}


def test_an_interrupted_run_counts_as_such_even_where_something_is_refuted(command, workers):
    cells = torch_cells()
    workers.endings |= {cells[0]: wrong(cells[0]), cells[1]: KeyboardInterrupt}
    assert command(*verifying()).code == 130


def test_a_signal_that_comes_twice_at_once_is_one_interrupt(command, workers, monkeypatch):
    def show(matrix):
        os.kill(os.getpid(), signal.SIGTERM)

    workers.endings[torch_cells()[1]] = signal.SIGTERM
    monkeypatch.setattr("attnplug.cli.commands.matrix_verify.show", show)
    assert command(*verifying()).code == 130
    assert next(iter(statuses("m.json").values())) == "verified"


def test_one_that_comes_later_is_another(command, workers, monkeypatch):
    monkeypatch.setattr("attnplug.cli.own_process._SAME_SIGNAL_SECONDS", 0.0)
    monkeypatch.setattr(matrix_files.Outputs, "write", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    workers.endings[torch_cells()[1]] = signal.SIGTERM
    assert command(*verifying()).code == 130
    assert not Path("m.json").exists()


def test_a_terminal_sees_a_bar(command, workers, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    outcome = command(*verifying())
    assert outcome.code == 0
    assert f"{len(torch_cells())}/{len(torch_cells())}" in outcome.err
    assert "━" in outcome.err


def test_results_are_written_while_cells_run(command, workers, monkeypatch):
    seen = []
    cells = torch_cells()
    monkeypatch.setattr(matrix_verify, "_SECONDS", -1.0)
    finished = verify.Verification.finished

    def watch(self, result):
        finished(self, result)
        seen.append(list(statuses("m.json").values()).count("verified"))

    monkeypatch.setattr(verify.Verification, "finished", watch)
    outcome = command(*verifying())
    assert seen == list(range(1, len(cells) + 1))
    assert f"  1 of {len(cells)}: 1 verified" in outcome.out


def test_a_backend_asked_for_by_name_that_does_not_run_here_ends_with_1(command, workers):
    workers.trouble["TORCH"] = "TORCH does not run here on cpu: torch is missing"
    outcome = command(*verifying())
    assert (outcome.code, outcome.err) == (1, "attnplug: TORCH does not run here on cpu: torch is missing\n")
    assert set(statuses("m.json").values()) == {"not run"}
    assert "not run: TORCH does not run here on cpu: torch is missing" in outcome.out


def test_of_all_backends_one_that_does_not_run_here_is_no_error(command, workers):
    workers.trouble["TORCH"] = "TORCH does not run here"
    outcome = command("--device", "cpu", "--verify", *FEW, "--json", "m.json")
    assert (outcome.code, outcome.err) == (0, "")
    assert len(read_matrix(Path("m.json")).runs) > 1


def test_a_run_that_stops_is_an_error_with_the_cause(command, workers):
    workers.problem = "no worker process starts: SIGKILL\nkilled"
    outcome = command(*verifying())
    assert outcome.code == 1
    assert outcome.err == "attnplug: the run of TORCH on cpu stopped: no worker process starts: SIGKILL\n"
    assert "the run stopped:\nno worker process starts: SIGKILL\nkilled" in outcome.out


def test_where_nothing_is_claimed_no_worker_starts(command, workers):
    outcome = command("--backend", "FLASHINFER", "--device", "cpu", "--verify", "--json", "m.json")
    assert outcome.code == 0
    assert workers.runs == []
    assert set(statuses("m.json").values()) == {"refused"}


def test_unclaimed_cells_are_run_when_asked_and_listed(command, workers):
    only = ("--only", "plain/decode/d128/bfloat16/*/b16/NHD", "--only", "sparse/mixed/d576/*")
    backends = ("--backend", "TORCH", "--backend", "FLASHINFER", "--device", "cpu")
    outcome = command(*backends, "--verify", "--unclaimed", *only, "--json", "m.json")
    assert outcome.code == 0
    torch, flashinfer = read_matrix(Path("m.json")).runs
    # FLASHINFER claims nothing on a CPU.
    assert {each.status for each in torch.findings} == {Status.VERIFIED}
    assert {each.status for each in flashinfer.findings} == {Status.UNCLAIMED}


def test_every_cell_is_shown_where_all_are_wanted(command, workers):
    cells = torch_cells()
    workers.endings[cells[0]] = wrong(cells[0])
    lines = command(*verifying("--verbose")).out.splitlines()
    assert lines[1] == f"refuted   {cells[0]}"
    assert lines[2].strip() == WRONG
    assert lines[3] == f"verified  {cells[1]} (2.0 s)"


def test_many_reasons_for_what_was_not_run_are_summed_up(command, workers):
    for number, cell in enumerate(torch_cells()[:5]):
        workers.endings[cell] = Result(cell, CheckOutcome.SKIPPED, 0.0, f"reason {number}")
    assert "  ... and 2 other reasons" in command(*verifying()).out


def test_workers_need_their_extra(command, workers, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "xdist" else find_spec(name)
    )
    outcome = command(*verifying())
    assert (outcome.code, outcome.err) == (
        *(2, "attnplug: matrix --verify needs pytest-xdist: pip install pytest-xdist\n"),
    )


# Files.


@pytest.fixture
def files(command, workers):
    """`files(name, cell=Result, ...)` writes a verified matrix in which cells may end otherwise."""

    def write(name, *more, **endings):
        workers.endings = endings
        command(*verifying("--json", name, *more))
        return name

    return write


def test_merge_joins_machines_and_says_what_it_leaves_out(command, files):
    first, second = files("a.json"), files("b.json")
    older = read_matrix(Path(first)).runs[0]
    write_matrix(Matrix((dataclasses.replace(older, versions={"torch": "2.0"}),)), Path(first))
    outcome = command("merge", first, second, "-o", "all.json", "--html", "all.html", "--markdown", "all.md")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith("attnplug: TORCH on cpu of ")
    assert read_matrix(Path("all.json")) == read_matrix(Path(second))
    assert Path("all.html").exists()
    assert Path("all.md").exists()


def test_merge_by_file_keeps_versions_apart_and_names_them(command, files):
    first, second = Path(files("old.json")), Path(files("new.json"))
    older = read_matrix(first).runs[0]
    write_matrix(Matrix((dataclasses.replace(older, versions={"torch": "2.0"}),)), first)
    Path("other").mkdir()
    third = Path(shutil.copy(first, "other"))
    outcome = command("merge", first, second, third, "--by-file", "-o", "all.json")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    runs = read_matrix(Path("all.json")).runs
    assert [run.device for run in runs] == ["cpu (old)", "cpu (new)", "cpu (other/old)"]
    assert [run.versions.get("torch") == "2.0" for run in runs] == [True, False, True]


def test_merge_ends_with_4_where_a_claim_is_refuted_and_writes_all_the_same(command, files, monkeypatch):
    one, other = torch_cells()[:2]
    broken = files("a.json", **{one: wrong(one), other: wrong(other)})
    outcome = command("merge", broken, "-o", "all.json")
    assert (outcome.code, outcome.out) == (4, "")
    told = [f"attnplug: TORCH on cpu: {cell} is refuted: {WRONG}\n" for cell in (one, other)]
    assert outcome.err == "".join(told)
    assert read_matrix(Path("all.json")) == read_matrix(Path(broken))
    monkeypatch.setattr("attnplug.cli.commands.matrix_files._SHOWN", 1)
    assert (
        command("merge", broken, "-o", "all.json").err == told[0] + "attnplug: ... and 1 more are refuted\n"
    )


def test_merge_does_not_end_with_4_for_what_a_newer_run_found_right(command, files):
    cell = torch_cells()[0]
    before, now = files("a.json", **{cell: wrong(cell)}), files("b.json")
    outcome = command("merge", before, now, "-o", "all.json")
    assert outcome.code == 0
    assert f"{cell} was refuted on " in outcome.err


def test_merge_without_a_file_shows_tables(command, files):
    outcome = command("merge", files("a.json"))
    assert outcome.code == 0
    assert "plain    ◐ sampled 1 of 12 head sizes" in outcome.out


def test_merge_refuses_what_is_no_result_file_and_writes_nothing(command, files):
    Path("half.json").write_text(Path(files("a.json")).read_text()[:-20])
    outcome = command("merge", "a.json", "half.json", "-o", "all.json")
    assert outcome.code == 2
    assert outcome.err.startswith("attnplug: half.json is half written, or no JSON")
    assert not Path("all.json").exists()


def test_diff_of_equal_results_finds_nothing(command, files):
    outcome = command("diff", files("a.json"), files("b.json"))
    assert (outcome.code, outcome.out) == (0, "nothing changed\n")


def test_diff_names_what_is_refuted_now_and_ends_with_4(command, files):
    cell = torch_cells()[0]
    outcome = command("diff", files("a.json"), files("b.json", **{cell: wrong(cell)}))
    assert outcome.code == 4
    assert outcome.out == f"TORCH on cpu: {cell} now refuted (was verified): {WRONG}\n1 now refuted\n"
    back = command("diff", "b.json", "a.json")
    assert (back.code, back.out) == (0, f"TORCH on cpu: {cell} now verified (was refuted)\n1 now verified\n")


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_named(command, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnplug._system.files.write_text", full)
    outcome = command("--backend", "TORCH", "--device", "cpu", "--html", "m.html")
    assert (outcome.code, outcome.err) == (2, "attnplug: m.html cannot be written: No space left on device\n")


def test_diff_shows_many_changes_of_a_kind_when_asked(command, monkeypatch):
    monkeypatch.setattr(matrix_files, "_SHOWN", 2)
    for device, name in (("cpu", "a.json"), ("sm90", "b.json")):
        command("--backend", "TORCH", "--device", device, *FEW, "--json", name)
    outcome = command("diff", "a.json", "b.json")
    count = len(torch_cells())
    assert outcome.code == 4
    assert f"... and {count - 2} more vanished; --all shows them\n" in outcome.out
    assert "... and" not in command("diff", "a.json", "b.json", "--all").out
