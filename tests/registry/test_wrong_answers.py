"""Answers of hooks that have another type than the interface asks for: a fault of their plugin, never a yes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_plugins import CPU, H100, SPEC, backend, plugin, raises, registry

from attnplug import Device, LayerSpec, Reason
from attnplug.core.blocks import MultipleOf
from attnplug.core.features import Feature
from attnplug.errors import PluginError

pytestmark = pytest.mark.attack("wrong answers")


async def coroutine(*asked: object) -> bool:
    return True


def slow() -> Iterator[int]:
    yield 16
    time.sleep(3600)


class Text(str):
    __slots__ = ()


NO_BOOLS: dict[str, Any] = {
    "text": lambda: "no sinks before version 2",
    "empty text": lambda: "",
    "pair": lambda: (False, "why"),
    "reason": lambda: Reason("no sinks", code="sink"),
    "none": lambda: None,
    "number": lambda: 1,
    "zero": lambda: 0,
    "list": list,
    "class": lambda: bool,
    "coroutine": coroutine,
    "feature": lambda: Feature.SINKS,
}
"""What a porter may return where True or False is due."""
ASKED: dict[str, tuple[LayerSpec, Device]] = {
    "supports_head_size": (SPEC, CPU),
    "supports_dtype": (SPEC, CPU),
    "supports_kv_cache_dtype": (SPEC, CPU),
    "supports_block_size": (SPEC.replace(block_size=16), CPU),
    "supports_compute_capability": (SPEC, H100),
    "supports_attn_type": (SPEC, CPU),
    "supports_sink": (SPEC.replace(has_sinks=True), CPU),
    "supports_mm_prefix": (SPEC.replace(mm_prefix=True), CPU),
    "is_mla": (SPEC, CPU),
    "is_sparse": (SPEC, CPU),
}
"""A layer and a device about which each of these hooks is asked."""


def fault_of(bad: type, spec: LayerSpec = SPEC, device: Device = CPU) -> str:
    """The one reason against BAD, while GOOD serves the layer, is explained, and can be asked for by name."""
    found = registry(bad, backend("GOOD", 10))
    for decision in (found.explain(spec, device), found.select(spec, device)):
        assert decision.backend == "GOOD"
        (refused,) = [each for each in decision.candidates if each.name == "BAD"]
        assert refused.codes == ("plugin_error",)
        assert str(decision)
        assert type(decision).from_json(decision.to_json()) == decision
    assert found.select(spec, device, backend="GOOD").backend == "GOOD"
    return str(refused.reasons[0])


@pytest.mark.parametrize("kind", NO_BOOLS)
@pytest.mark.parametrize("hook", ASKED)
def test_an_answer_that_is_no_bool_is_no_yes_and_no_no(hook: str, kind: str) -> None:
    spec, device = ASKED[hook]
    why = fault_of(backend("BAD", 900, **{hook: lambda *asked: NO_BOOLS[kind]()}), spec, device)
    assert "BAD returned " in why
    assert f"from {hook}, which must be True or False" in why


@pytest.mark.parametrize("hook", ASKED)
@pytest.mark.parametrize("error", [SystemExit(0), ValueError("acme"), GeneratorExit(), TypeError()])
def test_a_hook_that_raises_is_named(hook: str, error: BaseException) -> None:
    spec, device = ASKED[hook]
    why = fault_of(backend("BAD", 900, **{hook: raises(error)}), spec, device)
    assert f"BAD raised {type(error).__name__}" in why
    assert f"in {hook}" in why


WRONG: dict[str, tuple[str, list[Any]]] = {
    "get_supported_head_sizes": (
        "must be a tuple or list of integers and MultipleOf",
        [None, 64, "64", itertools.count(16), (64.0,), ("64",), {64}, (True,), slow(), iter([64])],
    ),
    "get_supported_kernel_block_sizes": (
        "must be a tuple or list of integers and MultipleOf",
        [None, 16, MultipleOf(16), itertools.count(16), itertools.repeat(16), (None,), slow(), range(10**9)],
    ),
    "get_preferred_block_size": ("must be an integer of at least 1", [None, 0, -16, 16.0, "16", True, (16,), MultipleOf(16)]),
    "supported_kv_cache_layouts": ("NHD", [None, "NHD", (), ("XYZ",), (b"NHD",), itertools.repeat("NHD"), {"NHD"}, (Reason,), 5]),
    "supports_combination": ("must be None, or why the layer is not served", [False, True, "", 0, (None, "why"), ["why"], b"why", Reason]),
    "get_priority": ("must be an integer from 1 to 999", [None, "50", 50.0, True, (50,)]),
    "validate_configuration": ("must be a list of reasons", [None, "no", True, {"no"}, itertools.repeat("no"), 3, {"no": "why"}, slow()]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("hook", "value"),
    [(hook, value) for hook, (_, values) in WRONG.items() for value in values],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_an_answer_of_another_type_names_hook_value_and_limit(hook: str, value: Any) -> None:
    why = fault_of(backend("BAD", 900, **{hook: lambda *asked: value}))
    assert f"from {hook}, which {WRONG[hook][0]}" in why or WRONG[hook][0] in why
    assert f"BAD returned {value!r}"[:60] in why


def test_a_coroutine_is_a_wrong_answer_of_every_hook() -> None:
    for hook in (*ASKED, *WRONG):
        spec, device = ASKED.get(hook, (SPEC, CPU))
        assert f"from {hook}" in fault_of(backend("BAD", 900, **{hook: coroutine}), spec, device)


def bare() -> Reason:
    """A reason without its facts: `str.__new__` skips the constructor."""
    return str.__new__(Reason, "does not serve")


def half() -> Reason:
    made = bare()
    made.code = "dtype"
    return made


def of_numbers() -> Reason:
    made = Reason("x", code="dtype")
    made.code = 5  # type: ignore[assignment]
    return made


def nameless() -> Reason:
    made = Reason("x", code="dtype")
    made.code = ""
    return made


@pytest.mark.parametrize("make", [bare, half, of_numbers, nameless])
def test_a_reason_without_its_facts_is_a_fault(make: Any) -> None:
    why = fault_of(backend("BAD", 900, validate_configuration=lambda *asked: [make()]))
    assert "a reason without its code; make it by Reason(fact, code=...)" in why


@pytest.mark.parametrize(
    "make",
    [
        lambda: Reason("x" * 5_000_000, code="dtype"),
        lambda: "x" * 5_000_000,
        lambda: Reason("x", code="dtype", remedy="y" * 5_000_000),
        lambda: Reason("x", code="dtype", requested="y" * 5_000_000, supported=["z" * 5_000_000]),
    ],
)
def test_a_reason_has_a_length(make: Any) -> None:
    found = registry(backend("BAD", 900, validate_configuration=lambda *asked: [make()]), backend("GOOD", 10))
    decision = found.explain(SPEC, CPU)
    assert decision.backend == "GOOD"
    assert len(decision.to_json()) < 60_000
    assert len(str(decision)) < 200_000


@pytest.mark.parametrize(
    "attributes",
    [
        {"validate_configuration": raises(ValueError("x" * 5_000_000))},
        {"supports_combination": lambda *asked: "x" * 5_000_000},
        {"get_priority": raises(type("E" * 100_000, (Exception,), {})())},
        {"get_priority": lambda *asked: "5" * 5_000_000},
        {"supports_sink": lambda: ["x"] * 1_000_000},
    ],
)
def test_other_texts_of_a_plugin_have_a_length(attributes: dict[str, Any]) -> None:
    found = registry(backend("BAD", 900, **attributes), backend("GOOD", 10))
    decision = found.explain(SPEC.replace(has_sinks=True), CPU)
    assert decision.backend == "GOOD"
    (bad,) = [each for each in decision.candidates if each.name == "BAD"]
    assert all(len(reason) < 6000 for reason in bad.reasons)


@pytest.mark.parametrize("text", ["y" * 5_000_000, "z\n" * 100_000])
def test_a_plugin_that_does_not_load_is_described_in_short(text: str) -> None:
    with pytest.raises(PluginError) as caught:
        registry(backend("BAD", get_name=raises(ValueError(text))))
    assert len(str(caught.value)) < 6000


def test_right_answers_of_every_accepted_form_are_taken() -> None:
    fine = backend(
        "FINE",
        900,
        get_supported_head_sizes=lambda: range(16, 513, 16),
        get_supported_kernel_block_sizes=lambda *asked: [16, MultipleOf(32)],
        supported_kv_cache_layouts=lambda: ["HND"],
        validate_configuration=lambda *asked: (),
        supports_combination=lambda *asked: Text(""),
    )
    found = registry(fine).select(SPEC, CPU)
    assert (found.backend, found.block_size, found.kv_cache_layout) == ("FINE", 16, "HND")


def test_members_of_a_composite_are_asked_with_the_same_care() -> None:
    found = registry(
        backend("BAD", 900, supports_sink=lambda: "no sinks before version 2"), backend("GOOD", 10)
    )
    spec = SPEC.replace(has_sinks=True)
    for name in ("BAD+GOOD", "GOOD+BAD"):
        decision = found.explain(spec, CPU, backend=name)
        assert decision.backend is None
        (both,) = [each for each in decision.candidates if each.name == name]
        assert both.codes == ("plugin_error",)
        assert "BAD returned 'no sinks before version 2' from supports_sink" in both.reasons[0]


def test_a_ranker_with_a_wrong_answer_is_a_note() -> None:
    for value in (5, coroutine, "GOOD" * 1_000_000, [b"GOOD"], itertools.repeat("GOOD")):
        plugins = plugin(backend("GOOD", 10), rank=lambda names, value=value: value)
        decision = type(registry())({"fakes": plugins}).select(SPEC, CPU)
        assert decision.backend == "GOOD"
        assert len("".join(decision.notes)) < 4000
