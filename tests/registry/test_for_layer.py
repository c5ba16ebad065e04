"""`for_layer` gives a class of the same plugin, and always the same one; else its backend is at fault, and no other."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from fake_plugins import CPU, SPEC, Serves, backend, raises, registry

from attnplug import AttentionBackend, LayerSpec
from attnplug.backends.torch_native import TorchBackend
from attnplug.errors import BackendUnavailableError, SpecError

pytestmark = pytest.mark.attack("for_layer")

OTHER = backend("OTHER")


class Abstract(AttentionBackend):
    """Lacks all that a backend needs, but the name."""

    @staticmethod
    def get_name() -> str:
        return "BAD"


class Odd(type(Serves)):
    def __hash__(cls) -> int:
        raise RuntimeError("no hash")


def fresh(cls: Any, spec: object) -> Any:
    return type(f"{cls.__name__}x", (cls,), {})


def names_of_others(cls: Any, spec: object) -> Any:
    return type("Hidden", (TorchBackend,), {"get_name": staticmethod(lambda: "TORCH")})


CLASSES: dict[str, Any] = {
    "none": lambda cls, spec: None,
    "text": lambda cls, spec: "no return",
    "instance": lambda cls, spec: object(),
    "pair": lambda cls, spec: (cls, "why"),
    "type": lambda cls, spec: type,
    "int": lambda cls, spec: int,
    "builtin": lambda cls, spec: TorchBackend,
    "another plugin's": lambda cls, spec: OTHER,
    "another name": names_of_others,
    "the interface": lambda cls, spec: AttentionBackend,
    "abstract": lambda cls, spec: Abstract,
    "fresh each time": fresh,
    "raises": lambda cls, spec: raises(SystemExit(0))(),
    "spec error": lambda cls, spec: raises(SpecError("spec", 1, "must be 2"))(),
    "recursion": lambda cls, spec: cls.for_layer(spec),
    "wrong features": lambda cls, spec: WrongFeatures,
    "unread names": lambda cls, spec: UnreadNames,
    "odd metaclass": lambda cls, spec: Odd("Bad", (BAD["plain"],), {}),
}
BAD: dict[str, Any] = {"plain": backend("BAD")}
WrongFeatures = type("WrongFeatures", (BAD["plain"],), {"features": 5})
UnreadNames = type("UnreadNames", (BAD["plain"],), {"supports_sliding_window": True})


@pytest.mark.parametrize("kind", CLASSES)
def test_a_wrong_class_is_the_fault_of_its_backend_alone(kind: str) -> None:
    bad = type("Bad", (backend("BAD", 900),), {"for_layer": classmethod(CLASSES[kind])})
    found = registry(bad, backend("GOOD", 10))
    assert found.select(SPEC, CPU).backend == "GOOD"
    assert found.select(SPEC, CPU, backend="GOOD").backend == "GOOD"
    decision = found.explain(SPEC, CPU)
    (refused,) = [each for each in decision.candidates if each.name == "BAD"]
    assert refused.codes == ("plugin_error",)
    assert "for_layer" in refused.reasons[0]
    assert "Bad" in refused.reasons[0]
    assert len(str(decision)) < 20_000
    with pytest.raises(BackendUnavailableError, match="for_layer"):
        found.select(SPEC, CPU, backend="BAD")


def test_no_chain_of_classes_is_followed() -> None:
    made: list[type] = []

    def chain(cls: Any, spec: LayerSpec) -> Any:
        made.append(type(f"Link{len(made)}", (cls,), {}))
        return made[-1]

    bad = type("Bad", (backend("BAD", 900),), {"for_layer": classmethod(chain)})
    found, began = registry(bad, backend("GOOD", 10)), time.process_time()
    assert found.explain(SPEC, CPU).backend == "GOOD"
    assert len(made) < 10
    assert time.process_time() - began < 5


def test_a_class_that_begins_a_chain_later_is_asked_once() -> None:
    counter = itertools.count()

    def later(cls: Any, spec: LayerSpec) -> Any:
        return cls if next(counter) < 2 else type("Next", (cls,), {})

    found = registry(
        type("Bad", (backend("BAD", 900),), {"for_layer": classmethod(later)}), backend("GOOD", 10)
    )
    for _ in range(5):
        assert found.explain(SPEC, CPU).backend in ("BAD", "GOOD")
    assert next(counter) < 10


def test_classes_that_take_turns_are_a_fault() -> None:
    pair = itertools.cycle([backend("BAD"), backend("BAD")])
    turns = type("Bad", (backend("BAD", 900),), {"for_layer": classmethod(lambda cls, spec: next(pair))})
    decision = registry(turns, backend("GOOD", 10)).explain(SPEC, CPU)
    assert decision.backend == "GOOD"


def test_a_class_of_the_same_plugin_serves() -> None:
    sliding = backend("MINE", 70)
    mine = type(
        "Mine",
        (backend("MINE", 60),),
        {"for_layer": classmethod(lambda cls, spec: sliding if spec.sliding_window else cls)},
    )
    found = registry(mine)
    assert found.select(SPEC.replace(sliding_window=8), CPU).get_backend_cls() is sliding
    assert found.select(SPEC, CPU).get_backend_cls() is mine


def test_a_subclass_that_is_made_once_serves() -> None:
    class Mine(backend("MINE", 60)):
        made: type | None = None

        @classmethod
        def for_layer(cls, spec: LayerSpec) -> Any:
            if cls.made is None:
                cls.made = type("Wide", (cls,), {})
                cls.made.made = cls.made  # type: ignore[attr-defined]
            return cls.made

    decision = registry(Mine).select(SPEC, CPU)
    assert decision.get_backend_cls() is Mine.made
