"""Rules: how they are read, which comes first, and what becomes of one that means nothing."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable

import pytest
from fake_plugins import CPU, H100, SLIDING, SPEC, backend, plugin, registry

from attnplug import Decision, LayerSpec, Registry, use
from attnplug.core import MLADims
from attnplug.errors import BackendUnavailableError, PolicyError, UnknownBackendError
from attnplug.registry import Rule, parse_rules
from attnplug.registry.selection.policy import rule_for

MLA = MLADims(q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
ENCODER = LayerSpec(num_heads=2, num_kv_heads=2, head_size=64, attn_type="encoder", window=(8, 8))
LATENT = LayerSpec(num_heads=2, num_kv_heads=1, head_size=80, mla=MLA, sliding_window=64)


def two() -> Registry:
    return registry(backend("A", 70), backend("B", 60), backend("C", 50))


def chosen(found: Registry, **asked: object) -> str | None:
    return found.select(SPEC, CPU, **asked).backend  # type: ignore[arg-type]


def test_text_and_mapping_say_the_same() -> None:
    text = parse_rules(" FLASH_ATTN , sliding = TRITON,decode=FLASHINFER,*.0.*=TORCH")
    mapping = {"*": "FLASH_ATTN", "sliding": "TRITON", "decode": "FLASHINFER", "*.0.*": "TORCH"}
    assert text == parse_rules(mapping)
    assert [str(rule) for rule in text] == [
        "*.0.*=TORCH",
        "sliding=TRITON",
        "decode=FLASHINFER",
        "FLASH_ATTN",
    ]
    assert [rule.scope for rule in text] == ["layer", "kind", "phase", "default"]
    assert text[-1] == Rule("FLASH_ATTN", "default", "*", "backend")


@pytest.mark.parametrize("given", [None, "", {}])
def test_nothing_asked_is_no_rule(given: dict[str, str] | str | None) -> None:
    assert parse_rules(given) == ()


@pytest.mark.parametrize(
    "given", [" ", "A,", "=A", "sliding=", "A,,B=C", {"sliding": ""}, {"": "A"}, {"sliding": 3}, {3: "A"}]
)
def test_a_rule_with_an_empty_part_is_an_error(given: dict[str, str] | str) -> None:
    with pytest.raises(PolicyError, match="has an empty part; write NAME or KEY=NAME"):
        parse_rules(given)


@pytest.mark.parametrize(("given", "key"), [("A,B", "*"), ("sliding=A,sliding=B", "sliding"), ("A,*=B", "*")])
def test_two_rules_for_one_thing_are_an_error(given: str, key: str) -> None:
    with pytest.raises(PolicyError, match="has two rules for") as error:
        parse_rules(given)
    assert repr(key) in str(error.value)


def test_a_rule_must_be_text_or_a_mapping() -> None:
    with pytest.raises(PolicyError, match=r"backend=\['A'\] must be a backend name, rules, or a mapping"):
        two().select(SPEC, CPU, backend=["A"])  # type: ignore[arg-type]


def test_a_layer_name_comes_before_a_kind_before_a_phase_before_the_rest() -> None:
    rules = "A,decode=B,full=C,model.*=D"
    found = registry(*map(backend, "ABCD"))

    def ask(spec: LayerSpec, phase: str | None, name: str) -> str | None:
        return found.select(spec, CPU, phase, layer_name=name, backend=rules).backend

    assert ask(SPEC, "decode", "model.0") == "D"
    assert ask(SPEC, "decode", "other.0") == "C"
    assert ask(SLIDING, "decode", "other.0") == "B"
    assert ask(SLIDING, "prefill", "other.0") == "A"


def test_the_longest_glob_decides() -> None:
    decided = two().select(SPEC, CPU, layer_name="model.1.attn", backend="model.*=A,model.1.*=B,*.attn=C")
    assert (decided.backend, decided.rule, decided.layer_name) == ("B", "model.1.*=B", "model.1.attn")


@pytest.mark.parametrize("spec", [ENCODER, LATENT])
def test_who_attends_whom_says_more_than_which_keys_are_seen(spec: LayerSpec) -> None:
    rules = parse_rules("sliding=A,encoder=B,mla=C")
    decided = rule_for([rules], spec, None, None)
    assert decided is not None
    assert decided.pattern == spec.kinds[0] != "sliding"


def test_the_argument_comes_before_use_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = two()
    monkeypatch.setenv("ATTNPLUG_BACKEND", "C")
    assert chosen(found) == "C"
    assert found.select(SPEC, CPU).chosen_by == "ATTNPLUG_BACKEND"
    with use("B"):
        assert chosen(found) == "B"
        assert found.select(SPEC, CPU).chosen_by == "attnplug.use"
        assert chosen(found, backend="A") == "A"
        assert found.select(SPEC, CPU, backend="A").chosen_by == "backend"
    assert chosen(found) == "C"


def test_a_layer_that_no_rule_speaks_of_falls_through_to_the_next_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = two()
    monkeypatch.setenv("ATTNPLUG_BACKEND", "C")
    with use("chunked=B"):
        assert chosen(found, backend="sliding=A") == "C"
        assert found.select(SLIDING, CPU, backend="sliding=A").backend == "A"
        assert found.select(SPEC.replace(chunk_size=8), CPU, backend="sliding=A").backend == "B"
    monkeypatch.delenv("ATTNPLUG_BACKEND")
    automatic = found.select(SPEC, CPU, backend="sliding=B")
    assert (automatic.backend, automatic.rule, automatic.chosen_by) == ("A", None, "priority")


def test_an_empty_variable_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", "")
    assert two().select(SPEC, CPU).chosen_by == "priority"


@pytest.mark.parametrize("text", ["NOBODY", "A,,B", "sliding=", " "])
def test_a_variable_that_means_nothing_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", text)
    with pytest.raises(PolicyError, match=f"^ATTNPLUG_BACKEND={text!r} "):
        two().select(SPEC, CPU)


def test_an_unknown_name_suggests_near_ones_and_lists_what_is_loaded() -> None:
    found = registry(backend("ACME_DECODE"), backend("ACME_2", family="ACME"))
    with pytest.raises(UnknownBackendError) as error:
        found.select(SPEC, CPU, backend="acme_decod")
    assert str(error.value) == (
        "backend='acme_decod' is not a backend; loaded are ACME, ACME_2, ACME_DECODE; "
        "did you mean ACME_DECODE or ACME_2 or ACME?"
    )
    with pytest.raises(UnknownBackendError, match=r"loaded are ACME, ACME_2, ACME_DECODE$"):
        found.explain(SPEC, CPU, backend="zzz")
    with pytest.raises(UnknownBackendError, match="is not a backend; loaded are none"):
        Registry([]).select(SPEC, CPU, backend="A")


@pytest.mark.parametrize("name", ["A@nobody", "B@fakes@x"])
def test_a_name_at_an_unknown_distribution_is_unknown(name: str) -> None:
    with pytest.raises(UnknownBackendError, match="is not a backend"):
        two().select(SPEC, CPU, backend=name)


def test_a_backend_registered_in_code_is_named_by_its_plugin_too() -> None:
    assert chosen(two(), backend="C@fakes") == "C"


def test_a_family_name_means_its_members_in_ranking_order() -> None:
    members = [
        backend("FAKE_1", 10, family="FAKE"),
        backend("FAKE_3", 30, family="FAKE", device_types=("cuda",)),
        backend("FAKE_2", 20, family="FAKE"),
    ]
    found = registry(backend("BEST", 999), *members)
    on_cpu = found.select(SPEC, CPU, backend="FAKE")
    assert [candidate.name for candidate in on_cpu.candidates] == ["FAKE_2", "FAKE_1", "BEST", "FAKE_3"]
    assert (on_cpu.backend, on_cpu.rule) == ("FAKE_2", "FAKE")
    assert found.explain(SPEC, H100, backend="FAKE").backend == "FAKE_3"


def test_a_family_that_cannot_serve_gives_every_members_reasons() -> None:
    found = registry(
        backend("FAKE_1", family="FAKE", device_types=("cuda",)),
        backend("FAKE_2", family="FAKE", supported_dtypes=("float16",)),
        backend("OTHER"),
    )
    with pytest.raises(BackendUnavailableError) as error:
        found.select(SPEC, CPU, backend="FAKE")
    assert [reason.code for reason in error.value.reasons] == ["dtype", "device_type"]
    assert str(error.value).startswith(
        "FAKE, asked for by backend, does not serve this layer on cpu\n  FAKE_2: dtype not supported"
    )


def test_a_backend_asked_for_is_never_swapped_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry(backend("NARROW", supported_phases=("decode",), device_types=("cuda",)), backend("WIDE"))
    with pytest.raises(BackendUnavailableError) as error:
        found.select(SPEC, CPU, "prefill", layer_name="model.0", backend="NARROW")
    assert [reason.code for reason in error.value.reasons] == ["device_type", "phase"]
    assert str(error.value).startswith(
        "NARROW, asked for by backend, does not serve layer model.0 on cpu in prefill\n  NARROW: "
    )
    assert error.value.decision is not None
    monkeypatch.setenv("ATTNPLUG_BACKEND", "NARROW")
    with pytest.raises(BackendUnavailableError, match=r"^NARROW, asked for by ATTNPLUG_BACKEND, does not"):
        found.select(SPEC, CPU)
    explained = found.explain(SPEC, CPU)
    assert (explained.backend, explained.chosen_by, bool(explained)) == (None, "ATTNPLUG_BACKEND", False)
    assert explained.candidates[0].name == "WIDE"


@pytest.mark.parametrize(
    ("rule", "words"), [("model.*=A", "so it needs layer_name"), ("slidng=A", "no kind")]
)
def test_a_rule_by_name_needs_a_layer_name(rule: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        two().select(SPEC, CPU, backend=rule)


PHASE_ERROR = (
    "='decode=B' is a rule for one phase, and this choice is for both; select for a phase, "
    "use attnplug.plan, or ask for one backend named 'PREFILL+DECODE'"
)


@pytest.mark.parametrize("source", ["backend", "attnplug.use", "ATTNPLUG_BACKEND"])
@pytest.mark.parametrize("ask", ["select", "explain", "select_named", "select_layers"])
def test_a_choice_for_both_phases_refuses_a_rule_for_one(
    ask: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, rules = two(), "A,decode=B"
    given = {"backend": rules} if source == "backend" else {}
    if source == "ATTNPLUG_BACKEND":
        monkeypatch.setenv(source, rules)
    calls: dict[str, Callable[[str | None], Decision]] = {
        "select": lambda phase: found.select(SPEC, CPU, phase, **given),
        "explain": lambda phase: found.explain(SPEC, CPU, phase, **given),
        "select_named": lambda phase: found.select(SPEC, CPU, phase, layer_name="model.0", **given),
        "select_layers": lambda phase: found.select_layers({"model.0": SPEC}, CPU, phase, **given)["model.0"],
    }
    block = use(rules) if source == "attnplug.use" else contextlib.nullcontext()
    with block:
        with pytest.raises(PolicyError, match=f"^{re.escape(source + PHASE_ERROR)}$"):
            calls[ask](None)
        assert calls[ask]("decode").backend == "B"
        assert calls[ask]("prefill").backend == "A"


def test_a_rule_for_one_phase_is_no_matter_where_another_rule_decides() -> None:
    found, layers = two(), {"model.0": SLIDING}
    assert found.select(SLIDING, CPU, backend="sliding=A,decode=B").backend == "A"
    with use("decode=B"):
        assert found.select(SPEC, CPU, backend="A").backend == "A"
        assert found.select_layers(layers, CPU, backend="model.0=C")["model.0"].backend == "C"
    encoder = SPEC.replace(attn_type="encoder_only", direct_kv=True)
    assert found.explain(encoder, CPU, backend="A,decode=B").rule == "A"
    with pytest.raises(PolicyError, match="rule for one phase"):
        found.explain(encoder, CPU, backend="A,prefill=B")


@pytest.mark.parametrize("source", ["argument", "use"])
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("slidng=B", r"='slidng=B' matches none of 1 layers \(kinds here: full\); did you mean sliding=B\?"),
        ("other.*=B", r"='other.\*=B' matches none of 1 layers \(kinds here: full\)$"),
        ("mla=B", "='mla=B' matches none of 1 layers"),
    ],
)
def test_a_rule_that_matches_no_layer_is_an_error(rule: str, words: str, source: str) -> None:
    found, layers = two(), {"model.0": SPEC}
    if source == "argument":
        with pytest.raises(PolicyError, match=f"^backend{words}"):
            found.select_layers(layers, CPU, backend=rule)
    else:
        with use(rule), pytest.raises(PolicyError, match=f"^attnplug.use{words}"):
            found.select_layers(layers, CPU)


def test_a_rule_from_the_environment_that_matches_no_layer_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", "B,mla=A")
    with caplog.at_level(logging.WARNING, "attnplug"):
        decisions = two().select_layers({"model.0": SPEC}, CPU)
    assert decisions["model.0"].backend == "B"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith("ATTNPLUG_BACKEND='mla=A' matches none of 1 layers")


def test_rules_choose_layer_by_layer() -> None:
    layers = {"model.0": SLIDING, "model.1": SPEC, "model.2": SLIDING}
    decisions = two().select_layers(layers, CPU, backend="A,sliding=B,*.2=C")
    assert {name: decision.backend for name, decision in decisions.items()} == {
        "model.0": "B",
        "model.1": "A",
        "model.2": "C",
    }
    assert [decision.layer_name for decision in decisions.values()] == list(layers)


def test_the_first_layer_that_cannot_be_served_is_named() -> None:
    found = Registry([plugin(backend("A", supported_dtypes=("float16",)), backend("B"))])
    layers = {"model.0": SPEC, "model.1": SPEC.replace(dtype="float16")}
    with pytest.raises(
        BackendUnavailableError, match=r"A, asked for by backend, .* layer model.0 on cpu in dec"
    ):
        found.select_layers(layers, CPU, "decode", backend="A")
