"""What a plugin returns is read once, inside the guarded call: later it can raise, hang or change no more."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_plugins import CPU, SPEC, backend, plugin, registry

from attnplug import Registry
from attnplug.core import Reason
from attnplug.errors import PluginError

pytestmark = pytest.mark.attack("values after the call")


class Explodes(str):
    """Text that raises wherever it is used later."""

    __slots__ = ()

    def _raise(self, *_: object) -> Any:
        raise GeneratorExit("exploded")

    __eq__ = __hash__ = __str__ = __repr__ = __format__ = __iter__ = __len__ = _raise  # type: ignore[assignment]


class Unreadable:
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)


class Endless(Sequence[Any]):
    """A sequence without an end."""

    def __getitem__(self, index: Any) -> Any:
        return "reason"

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return itertools.repeat("reason")


class LaterReason(Reason):
    """A reason that raises when it is printed."""

    def __str__(self) -> str:
        raise RuntimeError("later")


def assert_harmless(found: Registry, codes: tuple[str, ...]) -> None:
    """TORCH's place is taken by GOOD, and the bad backend is refused with a reason that prints."""
    decision = found.select(SPEC, CPU)
    assert decision.backend == "GOOD"
    (bad,) = [each for each in decision.candidates if each.name == "BAD"]
    assert bad.codes == codes
    assert str(decision)
    assert decision.explanation()
    assert decision.to_json()
    assert type(decision).from_json(decision.to_json()) == decision


HOSTILE: dict[str, Any] = {
    "text": lambda: [Explodes("x")],
    "endless": Endless,
    "unreadable": Unreadable,
    "list": lambda: [Unreadable()],
    "reason": lambda: [LaterReason("x", code="dtype")],
    "one text": lambda: Explodes("16"),
}
"""Makers of values: pytest itself could not print the values."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_reasons_are_taken_at_once(kind: str) -> None:
    bad = backend("BAD", 900, validate_configuration=lambda *asked: HOSTILE[kind]())
    assert_harmless(registry(bad, backend("GOOD", 10)), ("plugin_error",))


@pytest.mark.parametrize("attribute", ["get_preferred_block_size", "get_priority"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_numbers_are_taken_at_once(attribute: str, kind: str) -> None:
    bad = backend("BAD", 900, **{attribute: lambda *asked: HOSTILE[kind]()})
    assert_harmless(registry(bad, backend("GOOD", 10)), ("plugin_error",))


def test_layouts_are_taken_at_once() -> None:
    for make in (*HOSTILE.values(), lambda: "NHD", itertools.count):
        bad = backend("BAD", 900, supported_kv_cache_layouts=lambda make=make: make())
        assert_harmless(registry(bad, backend("GOOD", 10)), ("plugin_error",))


def test_sizes_without_an_end_are_a_fault() -> None:
    bad = backend("BAD", 900, get_supported_head_sizes=lambda: itertools.count(7))
    assert_harmless(registry(bad, backend("GOOD", 10)), ("plugin_error",))


def test_an_exception_whose_message_raises_is_a_reason() -> None:
    class Bad(Exception):
        def __str__(self) -> str:
            raise GeneratorExit

    def validate(*asked: object) -> Any:
        raise Bad

    assert_harmless(
        registry(backend("BAD", 900, validate_configuration=validate), backend("GOOD", 10)), ("plugin_error",)
    )


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_ranking_is_taken_at_once(kind: str) -> None:
    found = registry(backend("GOOD", 90), backend("OTHER", 10), rank=lambda names: HOSTILE[kind]())
    decision = found.select(SPEC, CPU)
    assert decision.backend == "GOOD"
    assert str(decision)
    assert decision.to_json()


def test_a_class_whose_hash_changes_is_refused_at_admission() -> None:
    class Random(type(backend("X"))):
        def __hash__(cls) -> int:
            return next(numbers)

    numbers = itertools.count()
    bad = Random("BAD", (backend("BAD"),), {})
    with pytest.raises(PluginError, match="metaclass defines how classes compare"):
        registry(bad)


@pytest.mark.parametrize(
    "field", ["device_types", "supported_dtypes", "supported_kv_cache_dtypes", "supported_phases"]
)
@pytest.mark.parametrize("value", [itertools.count(), Endless(), (x for x in "ab"), None, 3])
def test_a_declared_sequence_is_a_tuple_or_a_list(field: str, value: Any) -> None:
    with pytest.raises(PluginError, match=f"{field} is .*; it must be a sequence"):
        Registry([plugin(backend("BAD", **{field: value}))])
