"""What select, explain and doctor say of what was refuted, and how the command line overrides it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from evidence_runs import VERSIONS, WHY, cell
from evidence_runs import run as run_of

from attnplug.core import Device
from attnplug.registry.selection.evidence import record

MODELS = Path(__file__).parents[2] / "examples" / "models"
LLAMA = {"head_size": 128, "dtype": "bfloat16"}
TORCH = {"distribution": "attnplug", "version": version("attnplug")}
ON_CPU = ("--device", "cpu", "--backend", "TORCH")


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """The file that this test keeps evidence in."""
    path = tmp_path / "evidence.json"
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(path))
    return path


def refute_torch(*cells, **facts):
    record(run_of("TORCH", *(cells or [cell(**LLAMA)]), **{**TORCH, **facts}))


def words(text):
    return " ".join(text.split())


def test_select_shows_the_evidence_against_what_was_asked_for(run):
    refute_torch()
    outcome = run("select", MODELS / "llama-3.1-8b.json", *ON_CPU)
    assert outcome.code == 3
    assert "refuted when TORCH was run here on 2026-11-21" in words(outcome.out)
    assert WHY in words(outcome.out)
    assert "--allow-refuted TORCH" in words(outcome.out)
    assert max(map(len, outcome.out.splitlines())) <= 80


@pytest.mark.parametrize("names", [["TORCH"], ["TRITON", "TORCH"], ["TRITON,TORCH"], ["all"]])
def test_select_has_it_all_the_same_and_notes_it_once(run, names):
    refute_torch()
    options = [part for name in names for part in ("--allow-refuted", name)]
    outcome = run("select", MODELS / "llama-3.1-8b.json", *ON_CPU, *options)
    assert outcome.code == 0
    assert words(outcome.out).count("allowed by allow_refuted: refuted when TORCH was run here") == 1
    again = run("select", MODELS / "llama-3.1-8b.json", *ON_CPU, *options, "--json")
    assert all(decision["notes"] for decision in again.json["decisions"])


def test_select_phase_by_phase_notes_it_too(run):
    refute_torch()
    asked = ("--device", "cpu", "--backend", "prefill=TORCH,decode=TORCH")
    outcome = run("select", MODELS / "llama-3.1-8b.json", *asked, "--allow-refuted", "TORCH")
    assert outcome.code == 0
    assert words(outcome.out).count("allowed by allow_refuted: refuted when TORCH was run here") == 1


def test_explain_does_both(run):
    refute_torch()
    layer = ("explain", "--head-size", "128", *ON_CPU)
    outcome = run(*layer)
    assert (outcome.code, WHY in words(outcome.out)) == (3, True)
    assert run(*layer, "--allow-refuted", "TORCH").code == 0
    unknown = run(*layer, "--allow-refuted", "TORHC")
    assert unknown.code == 2
    assert "allow_refuted='TORHC' is not a backend" in unknown.err
    assert "did you mean TORCH" in unknown.err


def findings(run, *backends):
    report = run("doctor", *backends, "--json")
    return [each for each in report.json["findings"] if each["state"] == "warning"], report.code


@pytest.fixture
def here(monkeypatch):
    """Doctor looks at no backend in a child, and finds a CPU."""
    from attnplug.cli.commands import doctor

    device = Device("cpu").to_dict()
    monkeypatch.setattr(
        doctor, "run_probe", lambda *asked: doctor.Probe({"device": device, "used": {}}, None)
    )
    monkeypatch.setattr(doctor, "_import_findings", lambda *asked: [])


@pytest.mark.usefixtures("here")
def test_doctor_names_what_was_refuted_here_and_where_that_is_kept(run, kept):
    refute_torch(*(cell(**LLAMA, block_size=size) for size in (8, 16, 32, 64)))
    (finding,), code = findings(run)
    assert (finding["what"], code) == ("TORCH on cpu", 0)
    ids = ", ".join(f"plain/mixed/d128/bfloat16/auto/b{size}/NHD" for size in (8, 16, 32))
    assert finding["detail"] == f"4 refuted here, and refused: {ids}, ... ({kept})"
    assert "4 refuted here" in run("doctor").out


@pytest.mark.usefixtures("here")
def test_doctor_says_nothing_of_other_devices_versions_and_backends(run):
    refute_torch(device="sm90")
    refute_torch(versions={**VERSIONS, "torch": "1.0"})
    refute_torch(version="0.0.1")
    refute_torch(distribution="no-such-distribution")
    record(run_of("TRITON+TORCH", cell(), **TORCH))
    assert findings(run, "FLASH_ATTN") == ([], 0)
    (found,), _ = findings(run, "TORCH")
    assert found["what"] == "TRITON+TORCH on cpu"
    assert len(findings(run)[0]) == 1


@pytest.mark.usefixtures("here")
def test_doctor_warns_of_a_file_that_cannot_be_read(run, kept):
    kept.write_text("{")
    (finding,), code = findings(run)
    assert (finding["what"], code) == ("evidence", 0)
    assert finding["detail"].startswith(f"left out: {kept} is half written, or no JSON")


def test_doctor_without_a_known_device_says_nothing_of_backends(run):
    from attnplug.cli.commands.doctor import refuted_findings

    refute_torch()
    assert list(refuted_findings(None, ())) == []
    assert len(list(refuted_findings(Device("cpu"), ()))) == 1
