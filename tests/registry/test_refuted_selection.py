"""What was refuted here is refused: for which layers, devices and versions, with which words, and overridden how."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from evidence_runs import VERSIONS, WHY, cell, run
from fake_plugins import CPU, H100, SPEC, backend, plugin, raises, registry

from attnplug import Decision, Device, LayerSpec, Phase, Registry
from attnplug.errors import BackendUnavailableError, LayoutError, PolicyError, UnknownBackendError
from attnplug.registry import Gate
from attnplug.registry.selection.evidence import record

SINKS = SPEC.replace(has_sinks=True)
STORES = ("auto", "fp8_e4m3", "fp8_e5m2")
LIAR, HONEST = (
    backend(name, priority, supported_kv_cache_dtypes=STORES)
    for name, priority in (("LIAR", 90), ("HONEST", 10))
)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that this test keeps evidence in."""
    path = tmp_path / "evidence.json"
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(path))
    return path


def ask(spec: LayerSpec = SPEC, device: Device = CPU, phase: str | None = None, **asked: Any) -> Decision:
    """Of LIAR, which ranks first, and HONEST."""
    return registry(LIAR, HONEST).explain(spec, device, phase, **asked)


# Which layers


@pytest.mark.parametrize(
    ("refuted", "spec"),
    [
        (cell(), SPEC),
        (cell(), SINKS),
        (cell("sinks"), SINKS),
        (cell("sinks"), SINKS.replace(sliding_window=8)),
        (cell("sliding_window"), SPEC.replace(sliding_window=8)),
        (cell(block_size=32), SPEC.replace(block_size=32)),
        (cell(kv_cache_dtype="bfloat16"), SPEC),
        (cell("fp8_kv", kv_cache_dtype="fp8"), SPEC.replace(kv_cache_dtype="fp8_e4m3")),
        (cell("direct_kv", block_size=None, layout=None), SPEC.replace(direct_kv=True)),
        (cell("non_causal"), SPEC.replace(attn_type="encoder_decoder")),
    ],
)
def test_a_layer_that_meets_a_refuted_cell_is_refused(refuted: dict[str, Any], spec: LayerSpec) -> None:
    assert ask(spec).backend == "LIAR"
    record(run("LIAR", refuted))
    decision = ask(spec)
    assert decision.backend == "HONEST"
    (one,) = decision.refused
    assert (one.name, one.codes, one.refused_at) == ("LIAR", ("refuted",), Gate.EVIDENCE)


@pytest.mark.parametrize(
    ("refuted", "spec"),
    [
        (cell("sinks"), SPEC),
        (cell("sinks"), SPEC.replace(sliding_window=8)),
        (cell(head_size=128), SPEC),
        (cell(dtype="float16"), SPEC),
        (cell("fp8_kv", kv_cache_dtype="fp8"), SPEC),
        (cell(), SPEC.replace(kv_cache_dtype="fp8")),
        (cell("fp8_kv", kv_cache_dtype="fp8_e5m2"), SPEC.replace(kv_cache_dtype="fp8")),
        (cell(block_size=32), SPEC),
        (cell(block_size=32), SPEC.replace(block_size=64)),
        (cell(layout="HND"), SPEC),
        (cell(), SPEC.replace(direct_kv=True)),
        (cell("direct_kv", block_size=None, layout=None), SPEC),
        (cell("thought_of_next_year"), SPEC),
    ],
)
def test_a_layer_that_differs_in_anything_is_not(refuted: dict[str, Any], spec: LayerSpec) -> None:
    record(run("LIAR", refuted))
    assert ask(spec).backend == "LIAR"


@pytest.mark.parametrize(
    ("refuted", "refused"),
    [
        ("prefill", {None, Phase.PREFILL}),
        ("decode", {None, Phase.DECODE}),
        ("mixed", {None}),
    ],
)
def test_a_phase_is_refused_for_what_is_wrong_in_it_and_both_for_anything(
    refuted: str, refused: set[Phase | None]
) -> None:
    record(run("LIAR", cell(phase=refuted)))
    chosen = {phase: ask(phase=phase).backend for phase in (None, *Phase)}
    assert {phase for phase, name in chosen.items() if name == "HONEST"} == refused


def test_the_pages_are_those_that_the_backend_prefers_where_the_layer_leaves_them_open() -> None:
    wide = backend("WIDE", 90, get_preferred_block_size=lambda spec=None, device=None, default=16: 128)
    record(run("WIDE", cell()))
    assert registry(wide).select(SPEC, CPU).block_size == 128
    assert not registry(wide).explain(SPEC.replace(block_size=16), CPU)


# Which backend, device and versions


@pytest.mark.parametrize(
    "facts",
    [
        {"backend": "OTHER"},
        {"distribution": "liar", "version": "1.0"},
        {"version": "1.0"},
        {"device": "sm90"},
        {"versions": {**VERSIONS, "torch": "1.0"}},
        {"versions": {**VERSIONS, "Python": "3.9.1"}},
        {"versions": {**VERSIONS, "no-such-library": "1.0"}},
    ],
)
def test_what_was_run_otherwise_is_no_evidence(facts: dict[str, Any]) -> None:
    record({**run("LIAR", cell()), **facts})
    assert ask().backend == "LIAR"


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (H100, "HONEST"),
        (Device("cuda", (9, 0), "NVIDIA H200"), "HONEST"),
        (Device("cuda", (9, 0), "NVIDIA H100"), "LIAR"),
        (Device("cuda", (10, 0)), "LIAR"),
        (Device("cuda"), "LIAR"),
        (CPU, "LIAR"),
    ],
)
def test_a_device_is_the_same_by_type_capability_and_name_where_it_is_known(
    asked: Device, chosen: str
) -> None:
    record(run("LIAR", cell(), device="sm90", device_name="NVIDIA H200"))
    assert ask(device=asked).backend == chosen


def test_versions_that_are_assumed_stand_for_the_installed_ones() -> None:
    record(run("LIAR", cell(), versions={**VERSIONS, "flash-attn": "2.8.3"}))
    assert ask().backend == "LIAR"
    assert ask(assume_installed="all").backend == "LIAR"
    assert ask(assume_installed={"flash_attn": "2.8.3"}).backend == "HONEST"
    assert ask(assume_installed={"flash-attn": "2.8.4"}).backend == "LIAR"
    assert ask(assume_installed={"flash-attn": "2.8.3", "torch": "1.0"}).backend == "LIAR"


# What is said


def test_the_reason_has_the_evidence_the_date_and_two_ways_out() -> None:
    record(run("LIAR", cell("sinks"), cell("sinks", "decode"), date="2026-10-01T08:00:00+00:00"))
    record(run("LIAR", cell("sinks", "prefill", why=[WHY, "sinks\nignored"])))
    ((reason,),) = (each.reasons for each in ask(SINKS).refused)
    assert reason == (
        "refuted when LIAR was run here on 2026-11-21: sinks/prefill/d64/bfloat16/auto/b16/NHD: "
        f"{WHY}; sinks ignored (and 2 more like it); run it again with attnplug matrix --verify "
        "--backend LIAR, or have it all the same with --allow-refuted LIAR"
    )


def test_a_refutation_without_words_is_one_too() -> None:
    record(run("LIAR", cell(why=[])))
    ((reason,),) = (each.reasons for each in ask().refused)
    assert "2026-11-21: plain/mixed/d64/bfloat16/auto/b16/NHD; run it again" in reason


def test_asked_for_by_name_it_is_an_error_with_the_evidence() -> None:
    record(run("LIAR", cell()))
    with pytest.raises(BackendUnavailableError, match="LIAR: refuted when LIAR was run here") as error:
        registry(LIAR, HONEST).select(SPEC, CPU, backend="LIAR")
    assert [reason.code for reason in error.value.reasons] == ["refuted"]


def test_what_is_not_declared_is_refused_for_that_alone() -> None:
    record(run("NARROW", cell()))
    narrow = backend("NARROW", device_types=("cuda",))
    (one,) = registry(narrow).explain(SPEC, CPU).refused
    assert one.codes == ("device_type",)


def test_a_refuted_backends_parts_are_not_imported() -> None:
    record(run("LIAR", cell()))
    heavy = backend("LIAR", 90, get_impl_cls=raises(AssertionError("imported")))
    decision = registry(heavy, HONEST).select(SPEC, CPU)
    assert [each.codes for each in decision.refused] == [("refuted",)]


# Overridden


@pytest.mark.parametrize("names", ["LIAR", "all", "HONEST, LIAR", ["LIAR"], {"LIAR"}, "LIAR@fakes"])
def test_the_user_may_have_it_all_the_same_and_the_decision_says_so(names: Any) -> None:
    record(run("LIAR", cell()))
    decision = ask(allow_refuted=names)
    assert decision.backend == "LIAR"
    (note,) = decision.notes
    assert note == (
        "allowed by allow_refuted: refuted when LIAR was run here on 2026-11-21: "
        f"plain/mixed/d64/bfloat16/auto/b16/NHD: {WHY}"
    )
    assert set(decision.allow_refuted) == set(names.split(", ") if isinstance(names, str) else names)
    assert Decision.from_json(decision.to_json()) == decision


def test_the_environment_overrides_and_the_argument_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    record(run("LIAR", cell()))
    monkeypatch.setenv("ATTNPLUG_ALLOW_REFUTED", "LIAR")
    decision = ask()
    assert decision.backend == "LIAR"
    assert decision.notes[0].startswith("allowed by ATTNPLUG_ALLOW_REFUTED: refuted when")
    assert ask(allow_refuted=()).backend == "HONEST"
    assert ask(allow_refuted="HONEST").backend == "HONEST"


def test_a_family_is_allowed_by_its_name() -> None:
    record(run("LIAR", cell()))
    found = registry(backend("LIAR", 90, family="LIARS"), HONEST)
    assert found.select(SPEC, CPU, allow_refuted="LIARS").backend == "LIAR"


def test_nothing_is_noted_where_nothing_was_refuted() -> None:
    decision = ask(allow_refuted="all")
    assert (decision.backend, decision.notes) == ("LIAR", ())


@pytest.mark.parametrize("given", ["LIAR,", "", 3, ["LIAR", 3]])
def test_names_that_are_none_are_an_error(given: Any) -> None:
    with pytest.raises(PolicyError, match=r"allow_refuted=.* must be names of backends, or 'all'"):
        ask(allow_refuted=given)


def test_an_unknown_name_is_an_error_by_argument_and_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnknownBackendError, match=r"allow_refuted='LIER' is not a backend; .*did you mean LIAR"
    ):
        ask(allow_refuted="LIER")
    monkeypatch.setenv("ATTNPLUG_ALLOW_REFUTED", "all,LIER")
    with pytest.raises(UnknownBackendError, match="ATTNPLUG_ALLOW_REFUTED='LIER' is not a backend"):
        ask()
    monkeypatch.setenv("ATTNPLUG_ALLOW_REFUTED", "LIAR,,HONEST")
    with pytest.raises(PolicyError, match="must be backend names with commas between them"):
        ask()


# Composites


def joined(**asked: Any) -> Decision:
    return registry(backend("A", 20), backend("B", 30)).explain(SPEC, CPU, backend="A+B", **asked)


@pytest.mark.parametrize(
    ("name", "phase", "refused"),
    [
        ("A+B", "mixed", True),
        ("A", "prefill", True),
        ("A", "decode", False),
        ("A", "mixed", False),
        ("B", "decode", True),
        ("B", "prefill", False),
    ],
)
def test_a_composite_is_refused_for_what_a_half_gets_wrong_in_its_own_phase(
    name: str, phase: str, refused: bool
) -> None:
    record(run(name, cell(phase=phase)))
    (one,) = [each for each in joined().candidates if each.name == "A+B"]
    assert one.accepted is not refused
    if refused:
        assert one.reasons[0].startswith(f"refuted when {name} was run here")
        for allowed in (name, "A+B"):
            assert joined(allow_refuted=allowed).backend == "A+B"


def test_of_a_composite_asked_in_one_phase_the_other_half_does_not_count() -> None:
    record(run("A", cell(phase="prefill")))
    found = registry(backend("A", 20), backend("B", 30))
    assert found.explain(SPEC, CPU, "decode", backend="A+B").backend == "A+B"
    assert not found.explain(SPEC, CPU, "prefill", backend="A+B")


# Pages that layers agree on


def test_pages_agreed_on_with_other_layers_that_were_refuted_are_an_error() -> None:
    only = backend("ONLY", get_supported_kernel_block_sizes=lambda spec=None, device=None: (32,))
    layers = {"model.0": SPEC, "model.1": SINKS}
    rules = "LIAR,*.1=ONLY"
    assert {
        d.block_size for d in registry(LIAR, only).select_layers(layers, CPU, backend=rules).values()
    } == {32}
    record(run("LIAR", cell(block_size=32)))
    found = registry(LIAR, only)
    with pytest.raises(LayoutError) as error:
        found.select_layers(layers, CPU, backend=rules)
    assert "block_size=32 in NHD, agreed on with other layers, does not serve layer model.0 on LIAR: " in str(
        error.value
    )
    assert WHY in str(error.value)
    assert found.select_layers(layers, CPU, backend=rules, allow_refuted="LIAR")["model.0"].block_size == 32


# The file


def test_the_file_is_read_once_for_a_registry(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(run("LIAR", cell()))
    found = registry(LIAR, HONEST)
    assert found.select(SPEC, CPU).backend == "HONEST"
    kept.unlink()
    assert found.select(SPEC.replace(needs_lse=True), CPU).backend == "HONEST"
    found.register(plugin(backend("LATER", 1)), "later")
    assert found.select(SPEC, CPU).backend == "HONEST"
    assert registry(LIAR, HONEST).select(SPEC, CPU).backend == "LIAR"


def test_a_file_that_cannot_be_read_is_left_out_logged_once_and_noted(
    kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept.write_text("{")
    found = registry(LIAR, HONEST)
    with caplog.at_level(logging.WARNING, "attnplug"):
        decisions = [found.select(SPEC, CPU), found.select(SINKS, CPU)]
    assert [decision.backend for decision in decisions] == ["LIAR", "LIAR"]
    (message,) = [entry.getMessage() for entry in caplog.records]
    assert message.startswith(f"evidence is left out: {kept} is half written, or no JSON")
    assert all(decision.notes == (message.removeprefix("evidence is left out: "),) for decision in decisions)


def test_evidence_of_a_distribution_is_of_the_version_installed() -> None:
    found = Registry()
    torch = next(offer for offer in found.plugins.offers if offer.name == "TORCH")
    owner = {"distribution": torch.distribution, "version": torch.version}
    record(run("TORCH", cell(), **owner))
    assert Registry().explain(SPEC, CPU, backend="TORCH").backend is None
    record(run("TORCH", cell(status="verified"), **owner, date="2026-11-22T18:00:00+00:00"))
    record(run("TORCH", cell(), **{**owner, "version": "0.0.1"}))
    assert Registry().explain(SPEC, CPU, backend="TORCH").backend == "TORCH"
