"""The table of stored types: what a row says, which names are open, and everything that reads it."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplug.core import kv_format
from attnplug.core.dtypes import element_size
from attnplug.core.errors import SpecError
from attnplug.core.kv_format import KVFormats, kv_cache_dtypes, kv_formats
from attnplug.core.kv_format import kv_format as row_of
from attnplug.ops.storage import STORAGE_DTYPES


@functools.cache
def with_a_new_row() -> dict[str, Any]:
    script = Path(__file__).with_name("new_stored_type.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_rows_are_the_types_that_engines_have() -> None:
    assert kv_cache_dtypes() == (
        *("auto", "float16", "bfloat16", "float32"),
        *("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz", "fp8_inc", "fp8_ds_mla"),
        *("int8", "uint8", "int4", "nvfp4", "mxfp8", "mxfp4", "int8_token_head", "rotated4"),
    )
    assert row_of("fp8") is row_of("fp8_e4m3")
    assert [row.name for row in kv_formats() if row.is_common] == ["fp8_e4m3", "fp8_e5m2"]


@pytest.mark.parametrize("row", kv_formats(), ids=lambda row: row.name)
def test_a_row_has_the_bytes_and_the_rounding_of_its_torch_dtype(row: kv_format.KVFormat) -> None:
    if row.dtype is None:
        assert row.name not in STORAGE_DTYPES
        assert row.rounding is None
        return
    dtype = STORAGE_DTYPES[row.name]
    if row.codec:
        assert (dtype, row.size, row.rounding) == (torch.uint8, None, None)
        row.check()
        return
    assert f"torch.{row.dtype}" == str(dtype)
    assert row.size == dtype.itemsize
    assert (row.rounding is not None) is dtype.is_floating_point
    assert kv_format.kv_format_of_dtype(row.dtype) is row


@pytest.mark.parametrize(
    ("name", "size", "quantized", "feature"),
    [
        ("fp8_of_next_year", 1, True, "fp8_kv"),
        ("int8_per_token_head", None, True, None),
        ("nvfp4_4over6", None, True, None),
        ("of_next_year", None, False, None),
    ],
)
def test_an_open_name_is_a_type_of_its_family(
    name: str, size: int | None, quantized: bool, feature: str | None
) -> None:
    row = row_of(name)
    assert (row.name, row.size, row.is_quantized, row.feature) == (name, size, quantized, feature)
    assert (row.aliases, row.dtype, row.rounding, row.is_common) == ((), None, None, False)
    if size is None:
        with pytest.raises(
            SpecError, match=r"no known element size; known are float16, .*fp8_ds_mla, int8, uint8"
        ):
            element_size(name)


def test_a_row_replaces_that_of_its_name_in_a_copy_alone() -> None:
    copy = KVFormats((*kv_formats(), dataclasses.replace(row_of("int8"), size=2)))
    assert [row.name for row in copy.rows] == [row.name for row in kv_formats()]
    assert (copy.of("int8").size, row_of("int8").size) == (2, 1)
    assert row_of("fp8_e5m2").short_name == "e5m2"
    assert row_of("bfloat16").short_name == "bfloat16"


class TestANewRow:
    def test_changes_layers_and_pages(self) -> None:
        found = with_a_new_row()
        assert found["layer"] == ["acme_e5m2", True, "fp8_kv"]
        assert found["pages"] == "torch.float8_e5m2"
        assert found["feature"] == ["fp8_e4m3", "fp8_e5m2", "acme_e5m2"]

    def test_has_numbers_in_the_oracle(self) -> None:
        assert with_a_new_row()["oracle"] == [1.0, 2 * torch.finfo(torch.float8_e5m2).max]

    def test_is_in_words_axes_and_choices_of_the_matrix(self) -> None:
        found = with_a_new_row()
        assert found["words"] == ["auto", "fp8_e4m3", "acme", "acme_e5m2", "float16"]
        assert found["axis"][:4] == ["auto", "fp8_e4m3", "fp8_e5m2", "acme_e5m2"]
        assert "fp8_kv" in found["goes with"]
        assert not {"plain", "direct_kv", "encoder"} & {*found["goes with"]}
        assert found["choices"]["acme"] == found["choices"]["acme_e5m2"] == ["acme_e5m2"]

    def test_is_refused_by_all_who_do_not_declare_it(self) -> None:
        found = with_a_new_row()
        assert "acme_e5m2" in found["undeclared"]
        assert found["refused"] == "passed"
        assert found["reasons"][0].startswith("kv_cache_dtype not supported: acme is not one of auto")
        assert "kv_cache_dtype not supported: acme is not one of auto" in found["explain"]

    def test_is_tried_by_the_kit_where_it_is_declared(self) -> None:
        found = with_a_new_row()
        assert set(found["checks"].values()) == {"passed"}
        assert {
            "cache/sharing-acme",
            "cache/clamped-acme_e5m2",
            "cache/scales-of-layer-acme_e5m2",
            "correct/long-decode-h4x2-d64-float32-acme_e5m2-b16-NHD",
        } <= {*found["cases"]}

    def test_is_near_to_other_quantised_types(self) -> None:
        assert with_a_new_row()["nearest"][0] == "with --kv-cache-dtype fp8_e4m3"

    def test_is_completed_and_in_the_help(self) -> None:
        found = with_a_new_row()
        assert found["completion"] == ["acme", "acme_e5m2"]
        assert "auto, fp8, fp8_e4m3, fp8_e5m2, acme, acme_e5m2, ..." in found["help"]
