"""What select and explain say of a table of measured times, and `attnplug tune` on a small model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attnplug import Device
from attnplug.integrations.transformers import read_config
from attnplug.registry.measured import tuned_lookup
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned import TimedRow, TunedLayer, TunedTable
from attnplug.registry.measured.tuned_files import read_table, update_table
from attnplug.registry.plugins.installed import BackendVersions

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
QWEN = MODELS / "qwen3-8b.json"
H200 = Device("cuda", (9, 0), "NVIDIA H200")
THERE = ("--device", "NVIDIA H200", "--assume-installed", "all")


def h200_table(path: Path, **times: float) -> Path:
    """A table as an H200 with libraries of its own would give it, for the layers of Qwen3-8B."""
    (spec,) = set(read_config(QWEN).layers.values())
    shape = StepShape.parse("decode 64 x 8k")
    rows = tuple(
        TimedRow(
            BackendVersions(name, "attnplug", "0.1.0", H200, (("torch", "2.11.0+cu130"), ("triton", "3.6.0"))),
            shape, (16, "NHD"), us=us, spread=0.006, rounds=5, date="2026-11-22T02:00:00+00:00",
        )
        for name, us in times.items()
    )  # fmt: skip
    layer = TunedLayer(spec, 36, ((shape, 1.0),), rows)
    update_table(path, lambda old: TunedTable(H200, (layer,), {"driver": "580.159.04"}))
    return path


def test_a_laptop_asks_about_another_machine(run, tmp_path, monkeypatch):
    table = h200_table(tmp_path / "table.json", FLASH_ATTN_4=373.4, TRITON=489.1)
    asked = ("select", QWEN, *THERE, "--phase", "decode", "--tuned", table, "--json")
    first = run(*asked)
    assert first.code == 0, first.err
    decision = first.json["decisions"][0]
    assert (decision["backend"], decision["chosen_by"], decision["notes"]) == ("FLASH_ATTN_4", "measured", [])
    assert decision["measured"] == {
        "is_default": False, "over": "TRITON", "ratio": 1.3099, "shape": "decode 64 x 8k", "shapes": 1,
        "spread": 0.006, "date": "2026-11-22", "table": read_table(table).digest,
    }  # fmt: skip
    # Neither the place of the file nor the user's folder is part of the answer.
    moved = tmp_path / "other" / "table.json"
    moved.parent.mkdir()
    moved.write_text(table.read_text())
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "elsewhere"))
    assert run(*asked[:-2], moved, "--json").json == first.json
    monkeypatch.setenv("ATTNPLUG_TUNED", str(moved))
    assert run(*asked[:-3], "--json").json == first.json


def test_the_words_of_a_measured_choice(run, tmp_path):
    table = h200_table(tmp_path / "table.json", FLASH_ATTN_4=373.4, TRITON=489.1)
    outcome = run("select", QWEN, *THERE, "--phase", "decode", "--tuned", table, "--why")
    text = " ".join(outcome.out.split())
    assert "declared; measured 1.31x faster than TRITON at decode 64 x 8k, spread 0.6 %, 2026-11-22" in text
    assert re.search(r"TRITON \d+ accepted 489.1 us", text)


def test_no_tuned_leaves_times_out(run, tmp_path, monkeypatch):
    table = h200_table(tmp_path / "table.json", FLASH_ATTN_4=373.4, TRITON=489.1)
    asked = ("explain", "--num-heads", "32", "--num-kv-heads", "8", "--phase", "decode", *THERE)
    assert run(*asked, "--tuned", table, "--json").json["backend"] == "FLASH_ATTN_4"
    monkeypatch.setenv("ATTNPLUG_TUNED", str(table))
    assert run(*asked, "--json").json["backend"] == "FLASH_ATTN_4"
    without = run(*asked, "--no-tuned", "--json").json
    assert (without["backend"], without["measured"]) == ("TRITON", None)
    both = run(*asked, "--tuned", table, "--no-tuned")
    assert (both.code, "cannot be combined with --no-tuned" in both.err) == (2, True)


def test_a_packaged_table_is_the_last_resort(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_lookup, "PACKAGED", tmp_path)
    h200_table(tmp_path / "h200.json", FLASH_ATTN_4=373.4, TRITON=489.1)
    asked = ("select", QWEN, *THERE, "--phase", "decode", "--json")
    assert run(*asked).json["decisions"][0]["chosen_by"] == "measured"
    assert run(*asked, "--no-tuned").json["decisions"][0]["chosen_by"] == "priority"
    other = run("select", QWEN, "--device", "b200", "--phase", "decode", "--json").json["decisions"][0]
    assert (other["chosen_by"], other["notes"]) == ("priority", [])
    # The ratio is large enough for a GPU of the same capability.
    near = run("select", QWEN, "--device", "h100", "--phase", "decode", "--json").json["decisions"][0]
    assert near["chosen_by"] == "measured"
    assert "because the ratio 1.31 is above 1.15" in near["notes"][0]


def test_a_foreign_device_and_a_damaged_table_are_said(run, tmp_path):
    table = h200_table(tmp_path / "table.json", FLASH_ATTN_4=373.4, TRITON=489.1)
    foreign = run("explain", "--device", "cpu", "--tuned", table)
    assert foreign.code == 0
    assert "table.json has times of sm90 (NVIDIA H200), not of cpu: not used" in " ".join(foreign.out.split())
    cut = tmp_path / "cut.json"
    cut.write_text(table.read_text()[:200])
    damaged = run("explain", "--device", "cpu", "--tuned", cut, "--json")
    assert (damaged.code, damaged.json["error"]["code"]) == (2, "invalid_file")
    assert "--no-tuned" in damaged.json["error"]["remedy"]


@pytest.mark.slow
def test_tune_writes_a_table_that_select_reads(run, few_heads):
    done = run("tune", few_heads, "--device", "cpu", "--workload", "decode 1 x 32", "--json")
    assert done.code == 0, done.err
    path = tuned_lookup.user_folder() / "cpu.json"
    assert json.loads(path.read_text()) == done.json
    assert f"wrote {path} ({read_table(path).digest})" in done.err
    chosen = run("select", few_heads, "--device", "cpu", "--phase", "decode", "--json").json["decisions"][0]
    assert (chosen["chosen_by"], chosen["measured"]["table"]) == ("measured", read_table(path).digest)
    assert (
        "0 cells to measure, 1 kept from an earlier run"
        in run("tune", few_heads, "--device", "cpu", "--workload", "decode 1 x 32").err
    )


@pytest.mark.slow
def test_tune_fits_the_prices_of_shared_prefixes_once_and_select_names_them(run, few_heads):
    asked = ("tune", few_heads, "--device", "cpu", "--workload", "decode 1 x 32")
    assert "prices" not in run(*asked, "--no-prices", "--json").json
    done = run(*asked, "--json")
    assert "shared prefixes: TORCH reads" in done.err
    (price,) = done.json["prices"]
    assert done.json["subjects"][price["subject"]]["backend"] == "TORCH"
    assert "shared prefixes" not in run(*asked).err, "prices of these versions are kept"
    said = run("select", few_heads, "--device", "cpu", "--phase", "decode", "--why").out
    assert f"Prices by which steps decide: tuned table cpu.json, measured {price['date'][:10]}." in said
    untuned = run("select", few_heads, "--device", "cpu", "--phase", "decode", "--why", "--no-tuned").out
    assert "Prices by which steps decide: built in." in untuned


@pytest.mark.slow
def test_a_table_of_tune_can_be_packaged_as_it_is_and_regret_compares_it(
    run, few_heads, tmp_path, monkeypatch
):
    monkeypatch.setattr(tuned_lookup, "PACKAGED", tmp_path / "tuned_tables")
    asked = ("tune", few_heads, "--device", "cpu", "--workload", "decode 1 x 32, prefill 1 x 32")
    done = run(*asked, "--output", tuned_lookup.table_file(tuned_lookup.PACKAGED, Device("cpu")))
    assert done.code == 0, done.err
    assert [file.name for file in tuned_lookup.PACKAGED.glob("*.json")] == ["cpu.json"]
    chosen = run("select", few_heads, "--device", "cpu", "--json").json["decisions"][0]
    assert chosen["measured"]["table"] == read_table(tuned_lookup.PACKAGED / "cpu.json").digest
    assert run(*asked).code == 0
    held = run("tune", few_heads, "--device", "cpu", "--workload", "decode 2 x 24", "--regret", "--json")
    assert held.code == 0, held.err
    assert [each["policy"] for each in held.json["policies"]] == [
        "priorities", "user table", "user table, nearest shape", "packaged table", "packaged table, nearest shape",
    ]  # fmt: skip
    (cell,) = held.json["cells"]
    assert set(cell["chosen"].values()) == {cell["best"]} == {"TORCH"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "h100"), "--device='h100' is not a device of this machine"),
        (("--workload", "chat", "--context", "1k"), "--context='1k' cannot be combined with --workload"),
        (("--backends", "TORCH,TROCH"), "--backends='TROCH' is not a backend"),
        (("--budget", "0"), "--budget='0' must be a time above 0"),
        (("--output", "."), "--output='.' is a folder"),
    ],
)
def test_bad_usage_of_tune_is_said(run, arguments, said):
    outcome = run("tune", QWEN, "--device", "cpu", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err


@pytest.mark.parametrize("more", [(), ("--regret",)])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(run, tmp_path, more):
    (tmp_path / "file").touch()
    outcome = run("tune", QWEN, "--device", "cpu", "--output", tmp_path / "file" / "table.json", *more)
    assert (outcome.code, outcome.out) == (2, "")
    assert "cannot be made" in outcome.err
    assert "checking" not in outcome.err


@pytest.mark.parametrize("more", [(), ("--fresh",), ("--regret",)])
def test_a_file_of_something_else_is_said_before_anything_is_measured(run, tmp_path, more):
    other = tmp_path / "other.json"
    other.write_text('{"mine": 1}')
    outcome = run("tune", QWEN, "--device", "cpu", "--output", other, *more)
    assert (outcome.code, outcome.out, other.read_text()) == (2, "", '{"mine": 1}')
    assert "name another file with --output, or delete it" in " ".join(outcome.err.split())
    assert "checking" not in outcome.err


def test_regret_reads_the_tables_before_anything_is_measured(run):
    own = tuned_lookup.table_file(tuned_lookup.user_folder(), Device("cpu"))
    own.parent.mkdir(parents=True)
    own.write_text("{")
    outcome = run("tune", QWEN, "--device", "cpu", "--batch", "1", "--context", "64", "--regret")
    assert (outcome.code, outcome.out) == (2, "")
    assert "half written" in outcome.err
    assert "checking" not in outcome.err


def test_layers_that_no_workload_describes_are_no_backend(run):
    asked = ("tune", MODELS / "deepseek-v3.2.json", "--device", "cpu", "--workload", "decode 1 x 32")
    outcome = run(*asked)
    assert (outcome.code, outcome.out) == (3, "")
    assert "no backend serves a layer that can be measured" in outcome.err
    assert "is sparse: its steps need inputs that no workload describes" in outcome.err
    error = run(*asked, "--json").json["error"]
    assert (error["code"], error["exit_code"]) == ("no_backend", 3)
