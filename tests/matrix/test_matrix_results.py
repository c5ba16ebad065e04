"""Result files: what is written is read back, and what is no result file is named and refused."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle

import pytest
from synthetic_matrix import HOSTILE, finding, run, synthetic_matrix

from attnplug.core.errors import MatrixFileError
from attnplug.matrix.model import Matrix, Status
from attnplug.matrix.results import read_matrix, run_to_dict, write_matrix


@pytest.fixture
def path(tmp_path):
    return tmp_path / "matrix.json"


@pytest.fixture
def written(path):
    """The JSON of a matrix with two runs, as data to be damaged; `path` holds it."""
    runs = (run(finding(Status.VERIFIED)), run(finding(Status.REFUTED, "off by one"), device="sm90"))
    write_matrix(Matrix(runs), path)
    return json.loads(path.read_text())


def refusal(path, data) -> str:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(MatrixFileError) as refused:
        read_matrix(path)
    assert str(refused.value).startswith(f"{path} ")
    return str(refused.value).removeprefix(f"{path} ")


@pytest.mark.parametrize(
    "matrix",
    [synthetic_matrix(), Matrix((run(finding(Status.REFUTED, HOSTILE), backend=HOSTILE),)), Matrix(())],
    ids=lambda m: len(m.runs),
)
def test_what_is_written_is_read_back(path, matrix):
    write_matrix(matrix, path)
    assert read_matrix(path) == matrix


def test_each_cell_is_a_line(path):
    write_matrix(
        Matrix((run(finding(Status.VERIFIED), finding(Status.REFUSED, "no\nnot yet", head_size=64)),)), path
    )
    lines = path.read_text().splitlines()
    assert [json.loads(line.rstrip(","))["status"] for line in lines if '"feature"' in line] == [
        "verified",
        "refused",
    ]


def test_a_file_says_schema_version_and_where_its_runs_are_from(written):
    assert (written["schema"], written["version"]) == ("attnplug.matrix", 1)
    first = written["runs"][0]
    assert list(first) == [
        *(
            "backend",
            "distribution",
            "version",
            "device",
            "device_name",
            "versions",
            "date",
            "commit",
            "cells",
        )
    ]
    assert first["cells"] == [
        {
            "feature": "plain",
            "phase": "prefill",
            "head_size": 128,
            "dtype": "bfloat16",
            "kv_cache_dtype": "auto",
            "block_size": 16,
            "layout": "NHD",
            "status": "verified",
            "why": [],
        }
    ]


def test_a_run_alone_is_as_in_the_file(path, written):
    assert run_to_dict(read_matrix(path).runs[0]) == written["runs"][0]


@pytest.mark.parametrize("length", [0, 1, 40, -3])
def test_a_half_written_file_is_named(path, written, length):
    text = path.read_text()
    found = refusal(path, text[:length])
    assert found.startswith("is half written, or no JSON: ")
    assert found.endswith("; make it again with attnplug matrix --json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "junit"}, "has the schema 'junit', not 'attnplug.matrix'"),
        ({"schema": None}, "has the schema None, not"),
        (
            {"version": 2},
            "is version 2 of attnplug.matrix; this reads 1; read it with the attnplug that wrote it",
        ),
        ({"version": True}, "is version True of attnplug.matrix"),
        ({"version": "1"}, "is version '1' of attnplug.matrix"),
        ({"runs": {}}, "has no list of runs"),
        ({"runs": [3]}, "has 3 for runs[0], not an object"),
        ({"runs": [{}]}, "lacks backend, cells, commit, date, device, device_name"),
    ],
)
def test_another_schema_or_version_is_refused(path, written, change, message):
    assert refusal(path, {**written, **change}).startswith(message)


@pytest.mark.parametrize("data", ["[]", '"attnplug.matrix"', "null"])
def test_other_json_is_refused(path, data):
    assert "has the schema" in refusal(path, data)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("backend", "", "text"),
        ("distribution", 3, "text or null"),
        ("version", [], "text or null"),
        ("device", None, "text"),
        ("versions", {"torch": 2}, "an object of text"),
        ("versions", [], "an object of text"),
        ("date", "yesterday", "a date and time with its offset"),
        ("date", "2026-11-21T18:00:00", "a date and time with its offset"),
        ("date", 5, "a date and time with its offset"),
        ("cells", {}, "a list"),
    ],
)
def test_a_wrong_field_of_a_run_is_named(path, written, field, value, limit):
    written["runs"][1][field] = value
    assert refusal(path, written).startswith(f"has {value!r} for runs[1].{field}, which must be {limit}")


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("feature", None, "text"),
        ("phase", "training", "one of prefill, decode, mixed"),
        ("head_size", 0, "a whole number above 0"),
        ("head_size", True, "a whole number above 0"),
        ("block_size", "16", "a whole number above 0, or null"),
        ("layout", 3, "text or null"),
        ("status", "maybe", "one of declared, compiled, refused, verified, refuted, unclaimed, not run"),
        ("status", ["verified"], "one of declared"),
        ("why", "wrong", "a list of text"),
        ("why", [""], "a list of text"),
    ],
)
def test_a_wrong_field_of_a_cell_is_named(path, written, field, value, limit):
    written["runs"][0]["cells"][0][field] = value
    assert refusal(path, written).startswith(
        f"has {value!r} for runs[0].cells[0].{field}, which must be {limit}"
    )


def test_fields_that_nobody_knows_are_refused(path, written):
    written["runs"][0]["cells"][0]["speed"] = "high"
    assert refusal(path, written).startswith("has the unknown 'speed' in runs[0].cells[0]")


def test_a_page_size_without_a_layout_is_refused(path, written):
    written["runs"][0]["cells"][0]["layout"] = None
    assert "one of block_size and layout without the other" in refusal(path, written)


def test_runs_and_cells_come_once(path, written):
    twice = {**written, "runs": [*written["runs"], written["runs"][0]]}
    assert "has two runs of TORCH on cpu; put each into a file of its own" in refusal(path, twice)
    written["runs"][0]["cells"] *= 2
    assert "has two cells plain/prefill/d128/bfloat16/auto/b16/NHD in runs[0]" in refusal(path, written)


def test_a_file_that_is_not_there_or_no_text_is_named(path, tmp_path):
    with pytest.raises(MatrixFileError, match="cannot be read: No such file"):
        read_matrix(path)
    with pytest.raises(MatrixFileError, match="cannot be read: Is a directory"):
        read_matrix(tmp_path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(MatrixFileError, match="is not UTF-8 text"):
        read_matrix(path)
    path.write_text("[" * 100_000)
    with pytest.raises(MatrixFileError, match=r"nested too deeply|half written"):
        read_matrix(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, written, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    before = path.read_text()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MatrixFileError, match="cannot be written: No space left on device"):
        write_matrix(synthetic_matrix(), path)
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_error_survives_pickling():
    error = MatrixFileError("a.json", "is empty", "write it again")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.path, copy.what, copy.remedy) == (
        *("a.json is empty; write it again", "a.json", "is empty", "write it again"),
    )
    assert str(MatrixFileError("a.json", "is empty")) == "a.json is empty"


def test_why_prefixes_are_not_shared_is_read_back(path):
    made = dataclasses.replace(
        run(finding(Status.VERIFIED)), prefixes={"plain": None, "alibi": "no positions"}
    )
    write_matrix(Matrix((made,)), path)
    assert read_matrix(path).runs[0].prefixes == {"plain": None, "alibi": "no positions"}


def test_a_reason_that_is_no_text_is_refused(path, written):
    written["runs"][0]["prefixes"] = {"plain": 1}
    assert "an object with text or null for each feature" in refusal(path, written)
