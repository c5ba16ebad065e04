"""Measured times reorder accepted candidates: which rows count, for which layers, devices and versions, in which words."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evidence_runs import cell, run
from fake_plugins import CPU, H100, SPEC, backend, registry

from attnplug import Decision, Device, LayerSpec, Phase, Registry
from attnplug.errors import MatrixFileError, PolicyError, SpecError
from attnplug.registry.measured import tuned_lookup
from attnplug.registry.measured.comparisons import Measured, PhaseTimes
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned import RowStatus, TimedRow, TunedLayer, TunedTable
from attnplug.registry.measured.tuned_files import read_table, table_text, update_table
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.registry.selection.evidence import Pages, record

DECODE, LONG = StepShape.parse("decode 64 x 8k"), StepShape.parse("decode 1 x 32k")
PREFILL = StepShape.parse("prefill 4 x 4k")
H200 = Device("cuda", (9, 0), "NVIDIA H200")
DATE = "2026-11-22T02:00:00+00:00"
# By priority A is the default, then B, then C.
NAMES = {"A": 90, "B": 50, "C": 10}


def row(name: str, us: float, shape: StepShape = DECODE, **facts: Any) -> TimedRow:
    """A measurement of a backend that nobody ships."""
    versions = tuple(facts.pop("versions", {}).items())
    subject = BackendVersions(name, None, None, facts.pop("device", CPU), versions)
    given = {"pages": (16, "NHD"), "build_us": 0.0, "spread": 0.004, "rounds": 5, "date": DATE, **facts}
    return TimedRow(subject, shape, us=us, **given)


def of_both(name: str, us: float, **facts: Any) -> tuple[TimedRow, TimedRow]:
    """Equal times in both phases."""
    return row(name, us, **facts), row(name, us, PREFILL, **facts)


def table(
    *rows: TimedRow, spec: LayerSpec = SPEC, count: int = 1, device: Device = CPU, **facts: Any
) -> TunedTable:
    """A table of one layer; each of its shapes has the same weight."""
    shapes = dict.fromkeys(each.shape for each in rows)
    layer = TunedLayer(spec, count, tuple((shape, 1.0) for shape in shapes), rows)
    return TunedTable(device, (layer,), **facts)


def found(
    tuned: Any, spec: LayerSpec = SPEC, device: Device = CPU, phase: Any = Phase.DECODE, **asked: Any
) -> Decision:
    """What is chosen among A, B and C."""
    return of().explain(spec, device, phase, tuned=tuned, **asked)


def of(**attributes: Any) -> Registry:
    return registry(*(backend(name, priority) for name, priority in NAMES.items()), **attributes)


# The rule


def test_the_fastest_comes_first_then_the_measured_then_the_others_by_priority() -> None:
    decision = found(table(row("A", 131.0), row("C", 100.0)))
    assert [each.name for each in decision.candidates if each.accepted] == ["C", "A", "B"]
    assert (decision.backend, decision.chosen_by) == ("C", "measured")
    assert str(decision.measured) == (
        "measured 1.31x faster than A at decode 64 x 8k, spread 0.4 %, 2026-11-22"
    )
    assert [each.measured_us for each in decision.candidates] == [100.0, 131.0, None]
    text = " ".join(str(decision).split())
    assert "declared; measured 1.31x faster than A at decode 64 x 8k, spread 0.4 %," in text
    assert "A 90 accepted 131.0 us" in text


@pytest.mark.parametrize(
    ("default", "spread", "chosen"),
    [
        (102.0, 0.0, "A"),
        (102.1, 0.0, "C"),
        (102.1, 0.0099, "C"),
        (102.1, 0.02, "A"),
        (110.0, 0.049, "C"),
        (110.0, 0.051, "A"),
        (90.0, 0.0, "A"),
    ],
)
def test_the_default_stays_unless_it_is_beaten_beyond_the_noise(
    default: float, spread: float, chosen: str
) -> None:
    decision = found(table(row("A", default, spread=spread), row("C", 100.0, spread=spread / 2)))
    assert decision.backend == chosen
    assert decision.chosen_by == "measured"


def test_a_default_that_stays_says_what_it_was_compared_with() -> None:
    assert str(found(table(row("A", 101.0), row("C", 100.0))).measured) == (
        "measured, and C is not faster beyond the noise (1.01x) at decode 64 x 8k, spread 0.4 %, 2026-11-22"
    )
    assert str(found(table(row("A", 50.0), row("C", 100.0))).measured).startswith(
        "measured 2.00x faster than C"
    )
    assert str(found(table(row("A", 50.0))).measured).startswith("measured alone at decode 64 x 8k")


def test_nobody_wins_who_is_slower_than_the_default_at_one_shape() -> None:
    fast = [row("A", 200.0), row("C", 100.0)]
    assert found(table(*fast, row("A", 100.0, LONG), row("C", 101.0, LONG))).backend == "C"
    slow = found(table(*fast, row("A", 100.0, LONG), row("C", 103.0, LONG)))
    assert slow.backend == "A"
    assert str(slow.measured).startswith(
        "measured, and C is slower at one step, though 1.48x faster at decode 64"
    )
    # The noise is that of both.
    noisy = found(table(row("A", 150.0), row("C", 100.0, spread=0.4)))
    assert (noisy.backend, noisy.measured.spread) == ("A", 0.4)  # type: ignore[union-attr]
    assert "C is not faster beyond the noise (1.50x)" in str(noisy.measured)
    # Another one may still beat the default.
    third = [row("B", 150.0), row("B", 90.0, LONG)]
    assert found(table(*fast, row("A", 100.0, LONG), row("C", 103.0, LONG), *third)).backend == "B"


def test_long_steps_do_not_hide_short_ones() -> None:
    rows = [row("A", 1000.0), row("C", 990.0), row("A", 20.0, LONG), row("C", 10.0, LONG)]
    assert found(table(*rows)).backend == "C"


def test_a_step_of_the_model_is_its_layers_and_one_build() -> None:
    rows = [row("A", 20.0, build_us=100.0), row("C", 10.0, build_us=300.0)]
    assert found(table(*rows, count=1)).backend == "A"
    assert found(table(*rows, count=40)).backend == "C"


def test_both_phases_weigh_where_one_backend_serves_both() -> None:
    rows = [row("A", 20.0), row("C", 10.0), row("A", 100.0, PREFILL), row("C", 200.0, PREFILL)]
    tuned = table(*rows)
    chosen = {phase: found(tuned, phase=phase).backend for phase in (None, *Phase)}
    assert chosen == {None: "A", Phase.DECODE: "C", Phase.PREFILL: "A"}


def test_times_of_one_phase_say_nothing_about_both() -> None:
    tuned = table(row("A", 131.0), row("C", 100.0))
    assert found(tuned).backend == "C"
    both = found(tuned, phase=None)
    assert (both.backend, both.chosen_by, both.measured) == ("A", "priority", None)
    assert both.notes[0].endswith("has times of decode only, not of both phases: not used")
    encoder = SPEC.replace(attn_type="encoder_only", causal=False)
    whole = table(row("A", 131.0, PREFILL), row("C", 100.0, PREFILL), spec=encoder)
    assert found(whole, encoder, phase=None).backend == "C"


# What it cannot do


def test_a_refused_candidate_stays_refused() -> None:
    tuned = table(row("A", 100.0), row("GPU", 1.0))
    gpu = registry(backend("A"), backend("GPU", device_types=("cuda",)))
    decision = gpu.explain(SPEC, CPU, tuned=tuned)
    assert decision.backend == "A"
    assert decision.candidates[1].measured_us is None


def test_a_refuted_cell_beats_a_measured_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(tmp_path / "refuted.json"))
    record(run("C", cell(phase="decode")))
    assert found(table(row("A", 100.0), row("C", 1.0))).backend == "A"


@pytest.mark.parametrize("status", [RowStatus.WRONG, RowStatus.CRASHED])
def test_who_failed_comes_last_and_is_no_default(status: RowStatus) -> None:
    bad = row("A", 0.0, status=status, why="it ended")
    decision = found(table(bad, row("B", 100.0), row("C", 50.0)))
    assert [each.name for each in decision.candidates] == ["C", "B", "A"]
    assert decision.measured is not None
    assert decision.measured.over == "B"


def test_without_the_default_nothing_is_compared() -> None:
    decision = found(table(row("C", 1.0)))
    assert (decision.backend, decision.chosen_by, decision.measured) == ("A", "priority", None)
    assert decision.notes[0].endswith("has no time of A, the default, that applies: not used")


def failed(name: str) -> TimedRow:
    return row(name, 0.0, status=RowStatus.CRASHED, why="x")


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        ([failed("A")], "BCA"),
        ([failed("B")], "ACB"),
        ([failed("A"), failed("B"), failed("C")], "ABC"),
        # B is the default then, and has no time to compare with.
        ([failed("A"), row("C", 1.0)], "BCA"),
    ],
)
def test_who_failed_comes_last_without_times_too(rows: list[TimedRow], order: str) -> None:
    decision = found(table(*rows))
    assert "".join(each.name for each in decision.candidates) == order
    assert (decision.chosen_by, decision.measured) == ("priority", None)
    said = any(
        "has A, the first by priority, as wrong or crashed: it comes last" in n for n in decision.notes
    )
    assert said is (rows[0].subject.backend == "A")


def test_who_was_not_measured_at_each_shape_of_the_default_is_not_compared() -> None:
    tuned = table(row("A", 100.0), row("A", 100.0, LONG), row("C", 1.0), row("B", 90.0), row("B", 90.0, LONG))
    assert found(tuned).backend == "B"


def test_an_explicit_choice_and_ranking_plugins_come_before_times() -> None:
    tuned = table(row("A", 131.0), row("C", 100.0))
    asked = found(tuned, backend="B")
    assert (asked.backend, asked.chosen_by, asked.measured) == ("B", "backend", None)
    seen = []

    def rank(candidates: tuple[str, ...]) -> list[str]:
        seen.append(candidates)
        return ["B"]

    ranked = of(rank=rank).explain(SPEC, CPU, "decode", tuned=tuned)
    assert seen == [("C", "A", "B")], "a plugin sees the measured order"
    assert (ranked.backend, ranked.chosen_by, ranked.measured) == ("B", "rank", None)


def test_a_winner_whose_parts_do_not_import_did_not_win() -> None:
    def fail() -> Any:
        raise ImportError("no such kernel")

    broken = registry(backend("A", 90), backend("C", 10, get_impl_cls=fail))
    decision = broken.select(SPEC, CPU, "decode", tuned=table(row("A", 131.0), row("C", 100.0)))
    assert (decision.backend, decision.chosen_by, decision.measured) == ("A", "priority", None)


# Which rows count


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        (SPEC, True),
        (SPEC.replace(scale=0.5), True),
        (SPEC.replace(kv_cache_dtype="bfloat16"), True),
        (SPEC.replace(block_size=16), True),
        (SPEC.replace(num_heads=8), False),
        (SPEC.replace(sliding_window=128), False),
        (SPEC.replace(has_sinks=True), False),
        (SPEC.replace(kv_cache_dtype="fp8"), False),
        (SPEC.replace(dtype="float16"), False),
        (SPEC.replace(needs_lse=True), False),
    ],
)
def test_times_are_of_equal_layers_only(spec: LayerSpec, counts: bool) -> None:
    serves = [backend(n, p, supported_kv_cache_dtypes=("auto", "fp8_e4m3")) for n, p in NAMES.items()]
    decision = registry(*serves).explain(spec, CPU, "decode", tuned=table(row("A", 131.0), row("C", 100.0)))
    assert decision.backend == ("C" if counts else "A")
    assert any("has no times of this layer" in note for note in decision.notes) is not counts


@pytest.mark.parametrize("pages", [(32, "NHD"), (16, "HND"), None])
def test_times_with_other_pages_are_not_used(pages: Pages) -> None:
    decision = found(table(row("A", 131.0), row("C", 100.0, pages=pages)))
    assert decision.backend == "A"
    told = "no pages" if pages is None else f"pages of {pages[0]} tokens in {pages[1]}"
    assert decision.notes[0].endswith(f"C was measured with {told}, not pages of 16 tokens in NHD: not used")


@pytest.mark.parametrize("device", [H100, H200, Device("cuda", (8, 0), "NVIDIA A100-SXM4-80GB")])
def test_another_device_has_other_times(device: Device) -> None:
    mine = Device("cuda", (9, 0), "NVIDIA H100 80GB HBM3")
    tuned = table(row("A", 131.0, device=mine), row("C", 100.0, device=mine), device=mine)
    decision = found(tuned, device=device)
    assert decision.backend == "A"
    assert decision.notes[0].split(" has ")[1].startswith("times of sm90 (NVIDIA H100 80GB HBM3), not of ")
    assert found(tuned, device=Device.parse("H100")).backend == "C"


def test_a_new_version_of_one_library_leaves_exactly_its_rows_out() -> None:
    times = {"A": 300.0, "B": 200.0, "C": 100.0}
    of_each = {"A": {"pytest": "8"}, "B": {"pluggy": "1.6"}, "C": {"packaging": "24.0"}}
    installed = {"pytest": "8", "pluggy": "1.6", "packaging": "24.0"}
    tuned = table(*(row(name, us, versions=of_each[name]) for name, us in times.items()))
    assert found(tuned, assume_installed=installed).backend == "C"
    later = found(tuned, assume_installed={**installed, "packaging": "25.0"})
    assert later.backend == "B"
    assert [each.measured_us for each in later.candidates] == [200.0, 300.0, None]
    (note,) = later.notes
    assert note.endswith(
        "C was measured with packaging 24.0, and 25.0 is assumed: not used; run attnplug tune again"
    )
    assert found(tuned, assume_installed={**installed, "pytest": "9"}).chosen_by == "priority"
    assert found(tuned, assume_installed="all").backend == "C"


def test_rows_of_one_other_version_share_a_note() -> None:
    facts: Any = {"versions": {"packaging": "24.0"}}
    tuned = table(*(row(name, 1.0, **facts) for name in NAMES))
    (note,) = found(tuned, assume_installed={"packaging": "25.0"}).notes
    assert note.endswith(
        "A, B and C were measured with packaging 24.0, and 25.0 is assumed: not used; run attnplug tune again"
    )


def test_the_versions_installed_here_say_nothing_about_another_machine() -> None:
    facts: Any = {"versions": {"torch": "99.0"}}
    assert found(table(row("A", 131.0, **facts), row("C", 100.0, **facts))).backend == "A"
    facts["device"] = H200
    there = table(row("A", 131.0, **facts), row("C", 100.0, **facts), device=H200)
    assert found(there, device=Device.parse("NVIDIA H200")).backend == "C"


def test_the_nearest_shapes_can_be_asked_for() -> None:
    tuned = table(row("A", 20.0), row("C", 10.0), row("A", 10.0, LONG), row("C", 20.0, LONG))
    assert found(tuned).backend == "A"
    assert found(tuned.at(StepShape.parse("decode 128 x 4k"))).backend == "C"
    assert found(tuned.at(DECODE)).backend == "C", "it was measured itself"
    assert found(tuned.at(StepShape.parse("decode 1 x 32k"))).backend == "A"


def test_between_two_shapes_a_backend_must_lose_at_neither() -> None:
    between = StepShape.parse("decode 32 x 4k")
    lost = table(row("A", 20.0), row("C", 10.0), row("A", 10.0, LONG), row("C", 20.0, LONG))
    assert found(lost.at(between)).backend == "A"
    won = table(row("A", 20.0), row("C", 10.0), row("A", 10.0, LONG), row("C", 9.0, LONG))
    assert found(won.at(between)).backend == "C"
    ragged = StepShape.parse("decode 1 x 4k ragged")
    of_another_kind = table(row("A", 20.0), row("C", 10.0), row("A", 10.0, ragged), row("C", 20.0, ragged))
    assert found(of_another_kind.at(between)).backend == "C"


def test_tables_of_other_shapes_are_other_tables() -> None:
    tuned = table(row("A", 20.0), row("A", 10.0, LONG))
    assert tuned.at(LONG).digest != tuned.at(DECODE).digest


# Where it comes from


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file whose table prefers C."""
    update_table(tmp_path / "table.json", lambda old: table(row("A", 131.0), row("C", 100.0)))
    return tmp_path / "table.json"


def test_the_first_table_named_counts(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**asked: Any) -> str | None:
        return of().explain(SPEC, CPU, "decode", **asked).backend

    def put(path: Path, name: str) -> None:
        update_table(path, lambda old: table(row("A", 131.0), row(name, 100.0)))

    packaged = tmp_path / "packaged"
    monkeypatch.setattr(tuned_lookup, "PACKAGED", packaged)
    assert chosen() == "A"
    put(packaged / "cpu.json", "C")
    assert chosen() == "C"
    put(tuned_lookup.user_folder() / "cpu.json", "B")
    assert chosen() == "B"
    monkeypatch.setenv("ATTNPLUG_TUNED", str(written))
    assert chosen() == "C"
    put(tmp_path / "b.json", "B")
    assert chosen(tuned=tmp_path / "b.json") == "B"
    assert chosen(tuned=False) == "A"
    monkeypatch.setenv("ATTNPLUG_TUNED", "")
    assert chosen() == "A"
    monkeypatch.setenv("ATTNPLUG_TUNED", f"{tmp_path / 'b.json'}:{written}")
    assert chosen() == "B"


def test_a_table_that_has_not_the_layer_leaves_it_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuned_lookup, "PACKAGED", tmp_path)
    update_table(tmp_path / "cpu.json", lambda old: table(row("A", 131.0), row("C", 100.0)))
    other = table(row("A", 131.0), row("B", 100.0), spec=SPEC.replace(num_heads=8))
    update_table(tuned_lookup.user_folder() / "cpu.json", lambda old: other)
    decision = of().explain(SPEC, CPU, "decode")
    assert (decision.backend, decision.notes) == ("C", ())


def test_a_damaged_table_is_an_error_where_it_was_named_and_a_note_elsewhere(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.write_text(written.read_text()[:-40])
    with pytest.raises(MatrixFileError, match=r"table\.json is half written, or no JSON"):
        found(written)
    with monkeypatch.context() as patched:
        patched.setenv("ATTNPLUG_TUNED", str(written))
        with pytest.raises(
            MatrixFileError, match=r"table\.json is half written.*in ATTNPLUG_TUNED, or leave it"
        ):
            of().select(SPEC, CPU)
    own = tuned_lookup.user_folder() / "cpu.json"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    decision = of().select(SPEC, CPU)
    assert decision.backend == "A"
    assert "has the schema None, version None, not 'attnplug.tuned'" in decision.notes[0]


def test_a_folder_that_nobody_may_search_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is not the owner of its home."""
    # The tests may run as root, who may search all folders; nobody can search one with so long a name.
    monkeypatch.setattr(tuned_lookup, "user_folder", lambda: Path("/", "x" * 300))
    decision = of().select(SPEC, CPU)
    assert decision.backend == "A"
    assert "cpu.json cannot be read: File name too long" in decision.notes[0]


@pytest.mark.parametrize("wrong", [3, True, [], ""])
def test_an_argument_that_is_no_table_is_refused(wrong: object) -> None:
    with pytest.raises(PolicyError, match="must be a file, a TunedTable, False or None"):
        found(wrong)


def test_a_table_is_read_once(written: Path) -> None:
    asked = of()
    first = asked.explain(SPEC, CPU, "decode", tuned=str(written))
    written.write_text("{}")
    assert asked.explain(SPEC, CPU, "decode", tuned=str(written)) is first
    assert asked.tuned_tables(CPU, str(written)).digest == first.measured.table  # type: ignore[union-attr]


def test_a_decision_by_times_reads_back_from_json(written: Path) -> None:
    decision = found(written)
    assert Decision.from_json(decision.to_json()) == decision
    data = decision.to_dict()
    assert data["measured"]["ratio"] == 1.31
    assert data["candidates"][0]["measured_us"] == 100.0
    older = {
        **data,
        "candidates": [{k: v for k, v in each.items() if k != "measured_us"} for each in data["candidates"]],
    }
    del older["measured"]
    assert Decision.from_dict(older).backend == "C"


def test_a_comparison_that_nobody_made_is_refused(written: Path) -> None:
    data = found(written).to_dict()
    data["measured"]["ratio"] = 0.0
    with pytest.raises(SpecError, match="ratio must be above 0"):
        Decision.from_dict(data)


@pytest.mark.parametrize("us", [1e-3, 1e12])
def test_times_at_their_limits_have_a_ratio(us: float) -> None:
    """The one that is far faster is the default's loser at one shape, so the default stays with a ratio near 0."""
    far = of_both("A", 1e9)
    decision = found(table(*far, row("C", us), row("C", 2e9, PREFILL)), phase=None)
    assert decision.measured is not None
    assert decision.measured.ratio > 0
    assert "measured" in str(decision.measured)
    assert Decision.from_json(decision.to_json()) == decision


def test_equal_tables_have_equal_digests_and_others_not(written: Path) -> None:
    read = read_table(written)
    assert read.digest == table(row("A", 131.0), row("C", 100.0)).digest
    assert table_text(read) == written.read_text()
    assert read.digest != table(row("A", 131.0), row("C", 100.1)).digest
    assert read.digest != table(row("A", 131.0, spread=0.1), row("C", 100.0)).digest


def test_no_torch_is_loaded(written: Path) -> None:
    code = (
        "import sys, attnplug; s = attnplug.LayerSpec(num_heads=4, num_kv_heads=2, head_size=64); "
        f"print(attnplug.explain(s, 'cpu', tuned={str(written)!r}).notes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "() False"


def test_threads_get_one_table(written: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    asked = of()
    with ThreadPoolExecutor(8) as pool:
        every = list(pool.map(lambda _: asked.tuned_tables(CPU, str(written)), range(64)))
    assert len({id(each.tables[0]) for each in every}) == 1


def test_a_plan_has_the_digest(written: Path) -> None:
    from attnplug import plan
    from attnplug.runtime import ModelPlan

    digest = read_table(written).digest
    made = plan({"layer": SPEC}, "cpu", tuned=written)
    assert made.tuned == digest
    assert ModelPlan.from_json(made.to_json()) == dataclasses.replace(made)
    assert plan({"layer": SPEC}, "cpu").tuned is None
    older = {name: value for name, value in made.to_dict().items() if name != "tuned"}
    assert ModelPlan.from_dict(older).tuned is None
    by_times = plan({"layer": SPEC}, "cpu", registry=of(), tuned=written, per_phase=True)
    assert by_times.by_phase["layer"][Phase.DECODE].chosen_by == "measured"


def test_ranks_with_unlike_tables_have_unlike_plans() -> None:
    from attnplug import plan
    from attnplug.errors import RankFailureError
    from attnplug.runtime.ranks.rank_groups import compare_digests

    def made(us: float) -> Any:
        return plan(
            {"layer": SPEC}, "cpu", registry=of(), tuned=table(*of_both("A", 131.0), *of_both("C", us))
        )

    one, other = made(100.0), made(100.1)
    assert {name: d.backend for name, d in one.decisions.items()} == {"layer": "C"}
    assert one.digest() == made(100.0).digest() != other.digest()
    plans = [(each.digest(), each.layer_digests()) for each in (one, one, other)]
    with pytest.raises(RankFailureError, match=r"rank 2 of 3 planned otherwise than the others"):
        compare_digests(plans)


MIXED = StepShape.parse("mixed 16 x 4k + 1 x 512")


def in_three(name: str, decode: float, prefill: float, mixed: float, **facts: Any) -> list[TimedRow]:
    times = ((DECODE, decode), (PREFILL, prefill), (MIXED, mixed))
    return [row(name, us, shape, **facts) for shape, us in times]


def by_phase(tuned: TunedTable, **asked: Any) -> Any:
    """The plan of one layer; nothing is imported, because the fakes have no parts."""
    from attnplug import plan

    return plan({"layer": SPEC}, "cpu", registry=of(), tuned=tuned, assume_installed="all", **asked)


@pytest.mark.parametrize(
    ("pair", "rows", "mixed"),
    [
        # The pair gains half of each phase, and its mixed steps are as fast.
        (100.0, 3, False),
        # Its mixed steps are slower than those of A alone.
        (900.0, 3, True),
        # It was not measured at mixed steps, or A was not: nothing is compared.
        (None, 3, False),
        (900.0, 2, False),
    ],
)
def test_mixed_steps_that_a_composite_is_measured_slower_in_go_to_one_backend(
    pair: float | None, rows: int, mixed: bool
) -> None:
    times = [*in_three("A", 200.0, 100.0, 100.0)[:rows], *in_three("B", 100.0, 200.0, 100.0)[:rows]]
    tuned = table(*times, *([] if pair is None else [row("A+B", pair, MIXED)]))
    decision = by_phase(tuned, per_phase=True).decisions["layer"]
    assert decision.backend == "A+B"
    words = [(each.steps.kind, each.backend, each.why) for each in decision.steps]
    assert [each[:2] for each in words] == ([("mixed", "A")] if mixed else [])
    assert all("measured 9.00x faster than A+B at" in why for *_, why in words)
    # A user who asks for the pair gets it.
    assert by_phase(tuned, backend="prefill=A,decode=B").decisions["layer"].backend == "A+B"


@pytest.mark.parametrize("status", [RowStatus.CRASHED, RowStatus.WRONG])
def test_a_composite_that_failed_in_mixed_steps_does_not_serve(status: RowStatus) -> None:
    times = [*in_three("A", 200.0, 100.0, 100.0), *in_three("B", 100.0, 200.0, 100.0)]
    made = by_phase(table(*times, row("A+B", 0.0, MIXED, status=status, why="x")), per_phase=True)
    assert made.decisions["layer"].backend == "A"
    (note,) = [note for note in made.notes if "would prefill on A and decode on B" in note]
    assert note.endswith("but A+B was wrong or crashed when it was measured. A serves both phases")


def test_times_of_halves_with_other_pages_say_nothing_about_a_composite() -> None:
    times = [*in_three("A", 200.0, 100.0, 100.0), *in_three("B", 100.0, 200.0, 100.0)]
    tuned = table(*times, row("A+B", 900.0, MIXED, pages=(64, "NHD")))
    assert by_phase(tuned, per_phase=True).decisions["layer"].backend == "A+B"


def test_a_plan_notes_pages_that_were_not_measured() -> None:
    from attnplug import plan

    def sizes(*allowed: int) -> dict[str, Any]:
        return {
            "get_supported_kernel_block_sizes": lambda spec=None, device=None: list(allowed),
            "get_preferred_block_size": lambda spec=None, device=None, default=16: allowed[0],
        }

    both = registry(backend("WIDE", 10, **sizes(64, 16)), backend("ODD", 90, **sizes(16)))
    tuned = table(*of_both("ODD", 200.0), *of_both("WIDE", 100.0, pages=(64, "NHD")))
    made = plan({"a": SPEC, "b": SPEC.replace(logits_soft_cap=30.0)}, "cpu", registry=both, tuned=tuned)
    assert {name: (d.backend, d.block_size) for name, d in made.decisions.items()} == {
        "a": ("WIDE", 16),
        "b": ("ODD", 16),
    }
    assert (
        "WIDE was measured with pages of 64 tokens in NHD; the plan gives layer a pages of 16 tokens in NHD; "
        "attnplug tune --block-size 16 measures these"
    ) in made.notes
    assert plan({"a": SPEC}, "cpu", registry=both, tuned=tuned).notes == ()


def test_a_table_read_from_a_file_is_compared_once_and_not_by_each_decision(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_table(written)
    monkeypatch.setattr(PhaseTimes, "_compared", lambda *_: pytest.fail("compared again"))
    assert found(read).backend == "C"


# Another GPU of the same capability


def borrowing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: Device, *rows: TimedRow) -> Decision:
    """The decision on a device for which only another GPU's table is packaged."""
    monkeypatch.setattr(tuned_lookup, "PACKAGED", tmp_path)
    update_table(tmp_path / "h200.json", lambda _: table(*rows, device=H200))
    return found(None, device=device)


def on_h200(name: str, us: float) -> TimedRow:
    return row(name, us, device=H200)


H100_CARD = Device("cuda", (9, 0), "NVIDIA H100 80GB HBM3")


def test_a_gpu_without_a_table_borrows_a_large_ratio_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decision = borrowing(monkeypatch, tmp_path, H100_CARD, on_h200("A", 131.0), on_h200("C", 100.0))
    assert (decision.backend, decision.chosen_by) == ("C", "measured")
    (note,) = decision.notes
    assert note.startswith("tuned table h200.json has times of sm90 (NVIDIA H200): used on sm90 (NVIDIA H100")
    assert note.endswith("because the ratio 1.31 is above 1.15")


@pytest.mark.parametrize(("default", "device"), [
    (114.0, H100_CARD),
    (90.0, H100_CARD),
    (131.0, Device("cuda", (9, 0))),
    (131.0, Device("cuda", (10, 0), "NVIDIA B200")),
])  # fmt: skip
def test_small_ratios_and_gpus_of_no_name_or_another_capability_borrow_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, default: float, device: Device
) -> None:
    decision = borrowing(monkeypatch, tmp_path, device, on_h200("A", default), on_h200("C", 100.0))
    assert (decision.backend, decision.chosen_by, decision.notes) == ("A", "priority", ())


@pytest.mark.parametrize(
    ("ratio", "words"), [(1.0199, "is not faster beyond the noise"), (1.02, "1.02x faster than B")]
)
def test_a_default_that_is_faster_by_the_least_gain_says_by_how_much(ratio: float, words: str) -> None:
    found = Measured(True, "B", ratio, "decode 64 x 8k", 1, 0.004, "2026-11-22", "digest")
    assert words in str(found)
