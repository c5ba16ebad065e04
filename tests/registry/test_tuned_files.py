"""The file of measured times is read strictly, written whole, and shared by several processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import CPU, SPEC
from hypothesis import given
from hypothesis import strategies as st
from test_tuned_selection import DECODE, LONG, row, table

from attnplug import Device, Phase
from attnplug.errors import MatrixFileError, PolicyError
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned import TunedTable, device_slug, merged
from attnplug.registry.measured.tuned_files import read_table, table_to_update, update_table
from attnplug.registry.measured.tuned_lookup import table_file

TABLE = table(
    row("A", 131.0),
    row("C", 100.0, versions={"torch": "2.9.0"}),
    row("A", 12.5, LONG),
    environment={"driver": "580.1"},
    policy={"mode": "eager", "rounds": 5},
    choices=(
        {"layer": 0, "phase": "decode", "backend": "C", "default": "A", "ratio": 1.31, "why": "measured"},
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "folder" / "table.json"
    update_table(file, lambda old: TABLE)
    return file


def test_it_reads_back_as_what_was_written(path: Path) -> None:
    read = read_table(path)
    assert read.to_dict() == TABLE.to_dict()
    assert (read.layers, read.device, read.path) == (TABLE.layers, CPU, path)
    lines = path.read_text().splitlines()
    assert sum('"us": ' in line for line in lines) == 3, "a line for each cell"


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(json.dumps(TABLE.to_dict()))
    change(data)
    return json.dumps(data)


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "schema": (lambda d: d.update(schema="attnplug.matrix"), "has the schema 'attnplug.matrix'"),
    "version": (lambda d: d.update(version=2), "version 2, not 'attnplug.tuned', version 1"),
    "version text": (lambda d: d.update(version="1"), "version '1', not"),
    "misspelt": (lambda d: d.update(chocies=[]), "the table has the unknown field 'chocies'"),
    "missing": (lambda d: d.pop("cells"), "'cells' is missing"),
    "cells": (lambda d: d.update(cells={}), "cells must be list, not dict"),
    "device": (lambda d: d["device"].update(type="GPU"), "device.type='GPU'"),
    "environment": (lambda d: d["environment"].update(driver=580), "environment must map names to text"),
    "versions": (lambda d: d["subjects"][0]["versions"].update(torch=2.9), "versions must map"),
    "spec": (lambda d: d["layers"][0]["spec"].update(num_heads=0), "num_heads=0"),
    "spec field": (lambda d: d["layers"][0]["spec"].update(heads=4), "heads=4"),
    "count": (lambda d: d["layers"][0].update(count=0), "count must be from 1"),
    "twins": (lambda d: d["layers"].append(d["layers"][0]), "two layers are alike"),
    "weight": (lambda d: d["layers"][0]["workload"][0].update(weight=0), "weight must be from 1e-06"),
    "tiny weight": (
        lambda d: d["layers"][0]["workload"][0].update(weight=5e-324),
        "weight must be from 1e-06",
    ),
    "tiny time": (lambda d: d["cells"][0].update(us=5e-324), "a measured cell of A has no time"),
    "three halves": (lambda d: d["subjects"][0].update(backend="A+B+C"), "'A+B+C' is no backend"),
    "shape": (lambda d: d["layers"][0]["workload"][0].update(batch=0), "shape.batch=0"),
    "shape twice": (
        lambda d: d["layers"][0]["workload"].append(d["layers"][0]["workload"][0]),
        "a workload has a shape twice",
    ),
    "decodes": (lambda d: d["cells"][0].update(decodes=2), "must be 0 in a step that is not mixed"),
    "half a mixed step": (lambda d: d["cells"][0].update(phase="mixed"), "shape.decodes=0"),
    "phase": (lambda d: d["cells"][0].update(phase="both"), "'both' is not a valid Phase"),
    "query": (lambda d: d["cells"][0].update(query=9000), "shape.query=9000"),
    "layer": (lambda d: d["cells"][0].update(layer=1), "layer must be below 1, not 1"),
    "negative": (lambda d: d["cells"][0].update(subject=-1), "subject must be below 2, not -1"),
    "flag": (lambda d: d["cells"][0].update(subject=True), "subject must be int, not bool"),
    "cell twice": (lambda d: d["cells"].append(d["cells"][0]), "two cells are of A at decode 64 x 8k"),
    "us": (lambda d: d["cells"][0].update(us=-1.0), "us must be from 0"),
    "us text": (lambda d: d["cells"][0].update(us="1"), "us must be int or float, not str"),
    "huge": (lambda d: d["cells"][0].update(us=1e300), "us must be from 0"),
    "no time": (lambda d: d["cells"][0].update(us=0), "a measured cell of A has no time"),
    "status": (lambda d: d["cells"][0].update(status="fast"), "'fast' is not a valid RowStatus"),
    "layout": (lambda d: d["cells"][0].update(layout="NDH"), "pages of 16 tokens in 'NDH' are none"),
    "pages": (lambda d: d["cells"][0].update(block_size=None), "pages of None tokens in 'NHD' are none"),
    "date": (lambda d: d["cells"][0].update(date="yesterday"), "Invalid isoformat"),
    "choice": (lambda d: d["choices"][0].update(ratio="big"), "ratio must be int or float, not str"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_table_is_refused(path: Path, name: str) -> None:
    change, said = DAMAGED[name]
    path.write_text(edited(change))
    with pytest.raises(MatrixFileError) as error:
        read_table(path)
    assert said in str(error.value), error.value
    assert error.value.remedy is not None
    assert "--no-tuned" in error.value.remedy


@pytest.mark.parametrize("name", ["status", "phase", "date"])
def test_an_error_does_not_repeat_a_long_value(path: Path, name: str) -> None:
    path.write_text(edited(lambda d: d["cells"][0].update({name: "fast" * 2000})))
    with pytest.raises(MatrixFileError, match="fastfast") as error:
        read_table(path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"us": NaN}', "[" * 100_000, "\x00"])
def test_what_is_no_table_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(MatrixFileError):
        read_table(path)


def test_every_cut_of_a_file_is_refused(path: Path) -> None:
    text = path.read_text()
    for end in range(0, len(text) - 2, 97):
        path.write_text(text[:end])
        with pytest.raises(MatrixFileError):
            read_table(path)


def test_a_missing_file_a_folder_and_a_fifo_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, said in (("none", "No such file"), (".", "Is a directory"), ("fifo", "it is a FIFO")):
        with pytest.raises(MatrixFileError, match=said):
            read_table(tmp_path / name)


def test_a_write_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_text()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(MatrixFileError, match="cannot be written: No space left on device; name another"):
            update_table(path, lambda old: table(row("A", 1.0)))
    assert path.read_text() == before
    assert sorted(each.name for each in path.parent.iterdir()) in (
        ["table.json"],
        ["table.json", "table.json.lock"],
    )


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "table.json"

    def add(number: int) -> None:
        mine = table(row("A", 1.0), spec=SPEC.replace(num_heads=2 * number)).layers
        update_table(path, lambda old: TunedTable(CPU, merged(old.layers if old else (), mine)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(1, 9)))
    assert {layer.spec.num_heads for layer in read_table(path).layers} == set(range(2, 17, 2))


def test_a_damaged_file_is_not_written_over(path: Path) -> None:
    path.write_text("{")
    with pytest.raises(
        MatrixFileError, match=r"half written.*; name another file with --output, or delete it"
    ):
        update_table(path, lambda old: TABLE)
    assert path.read_text() == "{"


def test_what_no_tuning_can_change_is_said_before_it_begins(path: Path) -> None:
    assert table_to_update(path, CPU).to_dict() == TABLE.to_dict()  # type: ignore[union-attr]
    assert table_to_update(path.with_name("new.json"), CPU) is None
    before = path.read_text()
    with pytest.raises(MatrixFileError, match="has times of cpu, not of NVIDIA H200; name another file"):
        table_to_update(path, Device("cuda", (9, 0), "NVIDIA H200"))
    assert path.read_text() == before
    other = path.with_name("other.json")
    for text, said in (("{}", "has the schema None"), ("{", "half written")):
        other.write_text(text)
        with pytest.raises(
            MatrixFileError, match=rf"{said}.*; name another file with --output, or delete it"
        ):
            table_to_update(other, CPU)
        assert not other.with_name("other.json.lock").exists()
    with pytest.raises(MatrixFileError, match="File name too long"):
        table_to_update(path.with_name("x" * 300), CPU)


def test_a_newer_tuning_replaces_that_of_the_layer_and_no_other() -> None:
    other = table(row("A", 5.0), spec=SPEC.replace(num_heads=8)).layers
    newer = table(row("A", 7.0), spec=SPEC.replace(scale=0.25)).layers
    found = merged((*TABLE.layers, *other), newer)
    assert [[each.us for each in layer.rows] for layer in found] == [[7.0], [5.0]]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (CPU, "cpu.json"),
        (Device("cuda", (9, 0), "NVIDIA H200"), "h200.json"),
        (Device.parse("H200"), "h200.json"),
        (Device("cuda", (9, 0), "NVIDIA H100 80GB HBM3"), "h100.json"),
        (Device("cuda", (9, 9), "NVIDIA ../../X1"), "nvidia-x1.json"),
        (Device("cuda", (9, 0)), None),
    ],
)
def test_a_device_has_a_file(tmp_path: Path, device: Device, name: str | None) -> None:
    found = table_file(tmp_path, device)
    assert (found and found.relative_to(tmp_path).as_posix()) == name
    assert device_slug(device) == (name and name.removesuffix(".json"))


# Shapes


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("decode 64 x 8k", StepShape(Phase.DECODE, 64, 1, 8192)),
        ("decode 16 x 4 of 8k", StepShape(Phase.DECODE, 16, 4, 8192)),
        ("prefill 4 x 4k", StepShape(Phase.PREFILL, 4, 4096, 4096)),
        ("prefill 4 x 1k of 9k ragged", StepShape(Phase.PREFILL, 4, 1024, 9216, ragged=True)),
        ("decode 1 x 1000", StepShape(Phase.DECODE, 1, 1, 1000)),
    ],
)
def test_a_shape_reads_as_it_is_written(text: str, shape: StepShape) -> None:
    assert StepShape.parse(text) == StepShape.parse(f" {text.upper()} ".replace(" X ", "x")) == shape
    assert str(shape) == text
    assert StepShape.from_dict(shape.to_dict()) == shape


@given(
    st.sampled_from(Phase),
    st.integers(1, 4096),
    st.integers(1, 1 << 20),
    st.integers(0, 1 << 20),
    st.booleans(),
)
def test_every_shape_reads_back(phase: Phase, batch: int, query: int, more: int, ragged: bool) -> None:
    shape = StepShape(phase, batch, query, query + more, ragged)
    assert StepShape.parse(str(shape)) == shape
    lengths = shape.lengths
    assert len(lengths) == batch
    assert min(lengths) >= query
    assert abs(sum(lengths) - batch * shape.context) <= batch
    assert ragged is False or batch == 1 or more == 0 or len(set(lengths)) > 1 or shape.context < 8


@pytest.mark.parametrize(
    "text", ["", "decode", "decode 64", "decode 0 x 8k", "decode 1 x 0", "prefill 4 x 9k of 4k", "mixed 4 x 4k",
             "decode 64 x 8m", "decode 99999999 x 8k", "decode 64 x 8k ragged ragged"]
)  # fmt: skip
def test_other_text_is_no_shape(text: str) -> None:
    with pytest.raises(PolicyError):
        StepShape.parse(text)


def test_ragged_lengths_differ_around_the_mean() -> None:
    lengths = StepShape.parse("decode 8 x 8k ragged").lengths
    assert (min(lengths), max(lengths), sum(lengths)) == (1024, 15360, 8 * 8192)
    assert StepShape.parse("decode 1 x 8k ragged").lengths == (8192,)
    assert DECODE.lengths == (8192,) * 64
