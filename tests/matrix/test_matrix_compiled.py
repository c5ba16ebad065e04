"""Compiled cells: between claims and runs, with what each kernel takes, in files, tables and merged results."""

from __future__ import annotations

import dataclasses
import json
from importlib import metadata

import pytest
from synthetic_matrix import finding, run

from attnplug.cli.commands.matrix_compile import compile_runs
from attnplug.cli.commands.matrix_files import Outputs
from attnplug.core.compiled import CompiledKernel
from attnplug.core.errors import MatrixFileError, PolicyError
from attnplug.matrix.markdown import render_markdown
from attnplug.matrix.merging import join, merge
from attnplug.matrix.model import Matrix, Status
from attnplug.matrix.results import read_matrix, write_matrix
from attnplug.matrix.summary import summarise

FITS = CompiledKernel("1", "prefill_kernel(D=64)", 128, 200, 65_536)
SPILLS = CompiledKernel("2", "prefill_kernel(D=128)", 128, 255, 65_536, 40)
WORSE = CompiledKernel("3", "prefill_kernel(D=256)", 128, 255, 65_536, 88)


def compiled(*kernels, status=Status.COMPILED, date="2026-11-27T12:00:00+00:00"):
    why = tuple(str(each) for each in kernels if each.spilled)
    return dataclasses.replace(run(finding(status, *why), device="sm86"), kernels=kernels, date=date)


def test_kernels_are_written_a_line_each_and_read_back(tmp_path):
    path = tmp_path / "matrix.json"
    matrix = Matrix((compiled(FITS, SPILLS),))
    write_matrix(matrix, path)
    assert read_matrix(path) == matrix
    assert len([line for line in path.read_text().splitlines() if '"registers"' in line]) == 2


@pytest.mark.parametrize(("field", "value"), [("registers", -1), ("spilled", True), ("kernel", "")])
def test_a_kernel_with_a_wrong_value_is_refused_by_its_place(tmp_path, field, value):
    path = tmp_path / "matrix.json"
    write_matrix(Matrix((compiled(FITS),)), path)
    data = json.loads(path.read_text())
    data["runs"][0]["kernels"][0][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(MatrixFileError, match=rf"runs\[0\]\.kernels\[0\]\.{field}"):
        read_matrix(path)


def test_tables_name_the_kernels_that_spill():
    text = render_markdown(Matrix((compiled(FITS, SPILLS, WORSE),)))
    assert "◉ compiled" in text
    assert "prefill_kernel: 2 of 3 spill, at most 88 bytes of a thread" in text
    assert "Spills" not in render_markdown(Matrix((compiled(FITS),)))


def test_the_kernels_of_another_source_of_a_joined_run_are_named_too():
    own = finding(Status.VERIFIED, head_size=64)
    ran = dataclasses.replace(compiled(), findings=(own,), device_name="NVIDIA H200")
    (found,) = join([Matrix((ran,)), Matrix((compiled(FITS, SPILLS, WORSE),))]).runs
    assert [str(each.status) for each in found.findings] == ["verified", "compiled"]
    text = render_markdown(Matrix((found,)))
    assert "prefill_kernel: 2 of 3 spill, at most 88 bytes of a thread" in text


def test_a_compiled_cell_counts_more_than_a_claim_and_less_than_a_run():
    later = "2026-11-28T12:00:00+00:00"
    claim = compiled(status=Status.DECLARED, date=later)
    (kept,) = merge([Matrix((compiled(FITS),)), Matrix((claim,))]).runs
    assert kept.findings[0].status is Status.COMPILED
    assert kept.kernels == (FITS,)
    verified = compiled(status=Status.VERIFIED, date="2026-11-26T12:00:00+00:00")
    (kept,) = merge([Matrix((compiled(FITS),)), Matrix((verified,))]).runs
    assert kept.findings[0].status is Status.VERIFIED
    assert summarise(compiled(SPILLS)).total.why == (str(SPILLS),)


def test_only_kernels_of_this_triton_are_known():
    pytest.importorskip("triton")
    from attnplug.matrix.compiled import known_kernels

    here = dataclasses.replace(compiled(FITS), versions={"triton": metadata.version("triton")})
    assert known_kernels([here]) == {("sm86", "1"): FITS}
    assert not known_kernels([dataclasses.replace(here, versions={"triton": "3.0.0"})])


def test_a_backend_without_kernels_to_compile_is_refused():
    from attnplug.cli.commands.matrix import pairs_of

    pairs = pairs_of(["TORCH"], ["sm86"], verify=False)
    with pytest.raises(PolicyError, match="has no kernels that are compiled without a GPU"):
        compile_runs(pairs, [], None, 1, Outputs())
