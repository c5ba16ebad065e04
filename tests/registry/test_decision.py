"""A Decision keeps who was chosen and why not the others, and reads the same from JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections import Counter
from typing import Any

import pytest
from fake_plugins import CPU, H100, SPEC, backend, raises, registry
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from attnplug import Decision, Device, LayerSpec, Phase, Reason
from attnplug.core.reasons import REASON_CODES
from attnplug.errors import NoBackendError, PluginError, SpecError
from attnplug.registry import Candidate, Gate

WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), max_size=20)
REASONS = st.builds(
    Reason,
    WORDS,
    code=st.sampled_from(REASON_CODES),
    field=st.none() | WORDS,
    requested=st.none() | WORDS,
    supported=st.none() | WORDS,
    remedy=st.none() | WORDS,
)
CANDIDATES = st.builds(
    Candidate,
    WORDS,
    st.none() | WORDS,
    st.none() | WORDS,
    st.none() | st.integers(0, 999),
    st.none() | st.sampled_from(Gate),
    st.lists(REASONS, max_size=3).map(tuple),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS, lambda each: st.lists(each, max_size=2).map(tuple)
)
DECISIONS = st.builds(
    Decision,
    spec=st.sampled_from([SPEC, SPEC.replace(sliding_window=8), SPEC.replace(logits_soft_cap=30.0)]),
    device=st.sampled_from([CPU, H100, Device("rocm", (9, 4), "MI300X")]),
    phase=st.none() | st.sampled_from(Phase),
    backend=st.none() | WORDS,
    candidates=st.lists(CANDIDATES, max_size=3).map(tuple),
    layer_name=st.none() | WORDS,
    level=st.sampled_from(["declared", "usable"]),
    chosen_by=st.none() | WORDS,
    rule=st.none() | WORDS,
    ranked_by=st.lists(WORDS, max_size=2).map(tuple),
    block_size=st.none() | st.integers(1, 256),
    kv_cache_layout=st.none() | st.sampled_from(["NHD", "HND"]),
    options=st.none() | st.dictionaries(WORDS, VALUES, max_size=3).map(lambda o: tuple(sorted(o.items()))),
    assumed=st.sampled_from([None, "all", (), (("flash-attn", "2.8.3"), ("torch", "2.9"))]),
    notes=st.lists(WORDS, max_size=2).map(tuple),
)


@dataclasses.dataclass(frozen=True)
class Splits:
    num_splits: int = 1
    sizes: tuple[int, ...] = (64, 128)


def decided(**asked: Any) -> Decision:
    narrow = backend("NARROW", 900, device_types=("cuda",), supported_dtypes=("float16",))
    found = registry(backend("FIRST", 80, Options=Splits), backend("SECOND"), narrow)
    return found.select(SPEC, CPU, **asked)


@given(DECISIONS)
def test_json_reads_back_as_what_was_written(decision: Decision) -> None:
    back = Decision.from_json(decision.to_json())
    assert back == decision
    assert hash(back) == hash(decision)
    assert [each.to_dict() for each in back.candidates] == [each.to_dict() for each in decision.candidates]
    assert json.loads(back.to_json(indent=2)) == json.loads(decision.to_json())


@given(DECISIONS)
def test_every_decision_prints(decision: Decision) -> None:
    assert str(decision.device) in str(decision)


def test_equal_questions_have_equal_decisions_and_others_do_not() -> None:
    assert decided() == decided()
    assert decided() != decided(backend="SECOND")
    assert decided() != decided(layer_name="model.0")
    assert decided() != decided(options={"FIRST": {"num_splits": 2}})


def test_a_decision_is_true_where_somebody_was_chosen() -> None:
    assert decided()
    assert not registry(backend("A", device_types=())).explain(SPEC, CPU)


def test_it_knows_the_chosen_and_the_refused() -> None:
    decision = decided()
    assert decision.chosen is decision.candidates[0]
    assert decision.chosen is not None
    assert (decision.chosen.name, decision.chosen.accepted, decision.chosen.codes) == ("FIRST", True, ())
    assert [(c.name, c.codes) for c in decision.refused] == [("NARROW", ("dtype", "device_type"))]
    nobody = registry(backend("A", device_types=())).explain(SPEC, CPU)
    assert nobody.chosen is None


def test_it_gives_the_class_and_its_options() -> None:
    decision = decided(options={"FIRST": {"num_splits": 4}})
    assert decision.get_backend_cls().get_name() == "FIRST"
    assert decision.get_options() == Splits(4)
    assert decided(backend="SECOND").get_options() is None


def test_without_a_backend_there_is_no_class() -> None:
    decision = registry(backend("A", device_types=("cuda",))).explain(SPEC, CPU)
    with pytest.raises(NoBackendError, match="no backend was chosen: A: device type not supported") as error:
        decision.get_backend_cls()
    assert error.value.decision is decision


def test_read_from_json_it_knows_the_name_only() -> None:
    back = Decision.from_json(decided().to_json())
    assert back.backend == "FIRST"
    assert back.options == decided().options
    with pytest.raises(PluginError, match="a decision read from JSON knows the name FIRST only"):
        back.get_backend_cls()


@pytest.mark.parametrize("schema", [None, 0, 1, 2, "1", "attnplug.plan", []])
def test_another_schema_is_refused(schema: object) -> None:
    data = {**decided().to_dict(), "schema": schema}
    with pytest.raises(
        SpecError,
        match=re.escape(f"schema={schema!r}, version=1: this attnplug reads attnplug.decision, version 1"),
    ):
        Decision.from_dict(data)


def test_a_block_size_asked_for_is_kept_and_another_is_the_backends() -> None:
    assert (decided().block_size, decided().kv_cache_layout) == (16, "NHD")
    fixed = registry(backend("A")).select(SPEC.replace(block_size=48), CPU)
    assert fixed.block_size == 48
    direct = registry(backend("A")).select(SPEC.replace(direct_kv=True), CPU)
    assert (direct.block_size, direct.kv_cache_layout) == (None, None)


def test_it_prints_a_table_with_every_candidate_and_reason() -> None:
    assert str(decided(layer_name="model.0")).splitlines() == [
        "model.0: FIRST on cpu",
        "backend  priority  verdict   why",
        "FIRST          80  chosen    usable; first by priority",
        "SECOND         50  accepted",
        "NARROW        900  refused   dtype not supported: bfloat16 is not float16",
        "                             device type not supported: cpu is not cuda",
    ]


def test_the_table_says_what_settled_it() -> None:
    asked = str(decided(phase="decode", backend="full=SECOND"))
    assert asked.startswith("SECOND on cpu in decode\n")
    assert "usable; asked for by backend (full=SECOND)" in asked
    ranks = registry(backend("A", 90), backend("B"), rank=lambda candidates: ["B"]).explain(SPEC, CPU)
    assert "declared; first by fakes" in str(ranks)
    odd = registry(backend("A"), rank=raises(RuntimeError("?"))).explain(SPEC, CPU)
    assert str(odd).splitlines()[-1] == "fakes raised RuntimeError: ? in attnplug_rank; ignored"
    assert str(registry(backend("A", device_types=())).explain(SPEC, CPU)).startswith("no backend on cpu")


@pytest.mark.parametrize("width", [80, 100])
def test_no_word_of_a_reason_is_lost_at(width: int) -> None:
    names = [f"attnplug-bad-not-a-{kind}:bad-not-a-{kind}" for kind in ("sequence", "backend")]
    why = Reason("head_size not supported", code="head_size", requested=80, supported=(64, 128, 256))
    long = Reason(
        f"{names[0]} raised ImportError: /usr/lib/{'x' * 40}.so: undefined symbol", code="import_failed"
    )
    decision = Decision(
        spec=SPEC,
        device=H100,
        phase=None,
        backend=None,
        candidates=tuple(Candidate(name, refused_at=Gate.PLUGIN, reasons=(why, long)) for name in names),
    )
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(decision)
    assert all(len(line) <= width for line in text.getvalue().splitlines())
    assert "…" not in text.getvalue()
    # The lines of cells are side by side, so that words can only be counted; a block repeats the label of reasons.
    expected = " ".join([f"no backend on {H100}", *(f"{name} refused {why} {long}" for name in names)])
    found = Counter(text.getvalue().split())
    assert not Counter(expected.split()) - found
    assert (found - Counter(expected.split())).keys() <= {"backend", "priority", "verdict", "why"}


def test_markup_in_names_and_reasons_is_text() -> None:
    odd = backend("A", validate_configuration=lambda *asked: ["[bold]not[/bold] [/] supported"])
    found = registry(odd).explain(LayerSpec(num_heads=1, num_kv_heads=1, head_size=64), CPU)
    assert "[bold]not[/bold] [/] supported" in str(found)
    text = io.StringIO()
    Console(file=text, width=100, color_system=None).print(found)
    assert "[bold]not[/bold] [/] supported" in text.getvalue()
