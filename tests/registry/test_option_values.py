"""Values of options: each has the type that its annotation says, and is the same after JSON, text and a second look."""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections.abc import Sequence
from typing import Any, Literal, Optional

import pytest
from fake_plugins import CPU, SPEC, backend, registry

from attnplug import Decision, Registry, plan
from attnplug.core import AttentionBackend
from attnplug.errors import PolicyError, SpecError
from attnplug.registry.plugins.options import parse_options
from attnplug.runtime import ModelPlan


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = ("exact", 2)


@dataclasses.dataclass(frozen=True)
class Typed:
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    pairs: tuple[tuple[int, str], ...] = ()
    none: tuple[()] = ()
    steps: tuple[float, ...] | None = None
    names: Sequence[str] = ()
    words: tuple[Literal["a", "b"], ...] = ()
    limit: Optional[int] = None  # noqa: UP045
    anything: Any = None
    colour: Colour = Colour.RED
    level: Level = Level.LOW
    mode: Mode = Mode.FAST
    colours: tuple[Colour, ...] = ()
    maybe: Colour | int | None = None


@dataclasses.dataclass(frozen=True)
class Scaled:
    workspace: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "workspace", self.workspace * 1024)


@dataclasses.dataclass(frozen=True)
class ScaledByDefault(Scaled):
    workspace: int = 2


@dataclasses.dataclass(frozen=True)
class Renamed:
    name: str = "x"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"my {self.name}")


@dataclasses.dataclass(frozen=True)
class Retyped:
    size: float = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", int(self.size) if isinstance(self.size, float) else self.size + 0.5)


@dataclasses.dataclass(frozen=True)
class Once:
    size: int = 1

    def __post_init__(self) -> None:
        if self.size > 8:
            raise ValueError("too large")
        object.__setattr__(self, "size", self.size * 8)


@dataclasses.dataclass(frozen=True)
class Normal:
    name: str = "X"
    size: int = 16
    half: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.upper())
        object.__setattr__(self, "half", self.size // 2)


def of(options: type[Any]) -> Registry:
    return registry(backend("TYPED", 80, Options=options), backend("PLAIN", 10))


def select(given: Any, options: type[Any] = Typed) -> Decision:
    return of(options).select(SPEC, CPU, backend="TYPED", options=given)


@pytest.mark.parametrize("given", [{"workspace": 2}, Scaled(2)])
def test_options_that_change_their_values_each_time_are_refused(given: Any) -> None:
    with pytest.raises(PolicyError, match=r"made anew from its own values, with workspace=2048"):
        select(given, Scaled)


@pytest.mark.parametrize("options", [ScaledByDefault, Renamed, Retyped, Once])
def test_defaults_that_change_each_time_are_the_backends_fault(options: type[Any]) -> None:
    chosen = of(options).select(SPEC, CPU)
    assert chosen.backend == "PLAIN"
    assert "made anew from its own values" in str(chosen.refused[0].reasons[0])


def test_options_that_write_their_values_in_one_form_are_kept() -> None:
    chosen = select({"name": "abc"}, Normal)
    assert chosen.get_options() == Normal("ABC")
    assert chosen.get_options().half == 8
    assert select(Normal("abc"), Normal).options == chosen.options


WRONG = [
    ("sizes", (1, "2")),
    ("sizes", ("a",)),
    ("sizes", (True,)),
    ("sizes", (1.0,)),
    ("pair", (1,)),
    ("pair", (1, "a", 2)),
    ("pair", ("a", 1)),
    ("pairs", ((1, "a"), (2,))),
    ("pairs", ((1, 2),)),
    ("pairs", (1, "a")),
    ("none", (1,)),
    ("steps", (1, "2")),
    ("steps", (False,)),
    ("names", ("a", 1)),
    ("names", "ab"),
    ("words", ("a", "c")),
    ("limit", "1"),
    ("limit", True),
    ("colour", "green"),
    ("colour", 1),
    ("colour", Mode.FAST),
    ("level", 3),
    ("level", True),
    ("level", 1.0),
    ("mode", "exact"),
    ("mode", ("exact", 2.0)),
    ("colours", ("red", "green")),
    ("maybe", "green"),
]


@pytest.mark.parametrize(("option", "value"), WRONG)
@pytest.mark.parametrize("as_instance", [False, True])
def test_an_element_of_another_type_is_refused(option: str, value: Any, as_instance: bool) -> None:
    given: Any = Typed(**{option: value}) if as_instance else {option: value}
    with pytest.raises(PolicyError, match=rf"options\['{option}'\]=.* must be "):
        select(given)


RIGHT = [
    ({"sizes": (1, 2)}, Typed(sizes=(1, 2))),
    ({"pair": (3, "b")}, Typed(pair=(3, "b"))),
    ({"pairs": ((1, "a"), (2, "b"))}, Typed(pairs=((1, "a"), (2, "b")))),
    ({"steps": (1, 2.5)}, Typed(steps=(1, 2.5))),
    ({"names": ("a",), "words": ("a", "b")}, Typed(names=("a",), words=("a", "b"))),
    ({"colour": "blue", "level": 2}, Typed(colour=Colour.BLUE, level=Level.HIGH)),
    ({"colour": Colour.BLUE, "mode": ("exact", 2)}, Typed(colour=Colour.BLUE, mode=Mode.EXACT)),
    ({"mode": Mode.EXACT}, Typed(mode=Mode.EXACT)),
    ({"colours": ("red", Colour.BLUE)}, Typed(colours=(Colour.RED, Colour.BLUE))),
    ({"maybe": "blue"}, Typed(maybe=Colour.BLUE)),
    ({"maybe": 4}, Typed(maybe=4)),
]


def same(one: Any, other: Any) -> bool:
    return one == other and repr(one) == repr(other)


@pytest.mark.parametrize(("given", "expected"), RIGHT)
def test_a_value_is_the_same_after_json_and_pickle(given: dict[str, Any], expected: Typed) -> None:
    chosen = select(given)
    assert same(chosen.get_options(), expected)
    read = Decision.from_json(chosen.to_json())
    assert read == chosen
    assert same(dataclasses.replace(read, backend_cls=chosen.backend_cls).get_options(), expected)
    assert same(select(expected).get_options(), expected)
    assert same(select(Typed(**given)).get_options(), expected)
    assert hash(read) == hash(chosen)


def test_a_plan_read_from_json_has_the_members_of_enumerations() -> None:
    plugins = of(Typed)
    given = {"TYPED": {"colour": "blue", "colours": ("red",)}}
    read = ModelPlan.from_json(plan({"a": SPEC}, CPU, registry=plugins, options=given).to_json(), plugins)
    found = next(iter(read.decisions.values())).get_options()
    assert (type(found.colour), found.colours) == (Colour, (Colour.RED,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("colour=blue", Typed(colour=Colour.BLUE)),
        ("level=2", Typed(level=Level.HIGH)),
        ('colours=["red","blue"]', Typed(colours=(Colour.RED, Colour.BLUE))),
        ('pairs=[[1,"a"],[2,"b"]]', Typed(pairs=((1, "a"), (2, "b")))),
        ('mode=["exact",2]', Typed(mode=Mode.EXACT)),
        ("anything=[[1,[2]],[]]", Typed(anything=((1, (2,)), ()))),
    ],
)
def test_text_sets_nested_tuples_and_enumerations(
    text: str, expected: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same(select(parse_options([text], "--option", "TYPED")).get_options(), expected)
    monkeypatch.setenv("ATTNPLUG_OPTIONS", f"TYPED.{text}")
    assert same(of(Typed).select(SPEC, CPU).get_options(), expected)


def test_equal_values_of_other_types_are_other_decisions() -> None:
    plugins = of(Typed)
    for value in (1, True, 1.0, (1,), (True,)):
        for given in ({"anything": value}, Typed(anything=value)):
            found = plugins.select(SPEC, CPU, options={"TYPED": given}).get_options().anything
            assert repr(found) == repr(value)


@pytest.mark.parametrize("value", [Colour.RED, Level.LOW, (Mode.FAST,), type("Text", (str,), {})("a")])
def test_a_value_that_json_would_give_another_type_is_refused(value: Any) -> None:
    with pytest.raises(PolicyError, match="cannot be written as JSON and read back"):
        select({"anything": value})


@pytest.mark.parametrize("value", [{}, [{"a": 1}], [[{}]]])
def test_a_damaged_decision_with_an_option_that_is_an_object_is_an_error(value: Any) -> None:
    data = select({}).to_dict()
    with pytest.raises(SpecError, match="is not what to_json wrote"):
        Decision.from_dict({**data, "options": {"anything": value}})


def test_options_of_the_class_that_serves_the_layer_are_its_own() -> None:
    @dataclasses.dataclass(frozen=True)
    class Wide:
        lanes: int = 4

    offered: type[AttentionBackend] = backend("TWO", 80, Options=Normal)
    wide = type("Wide", (offered,), {"Options": Wide, "for_layer": classmethod(lambda cls, spec: cls)})
    offered.for_layer = classmethod(lambda cls, spec: wide if spec.head_size > 64 else cls)  # type: ignore[method-assign,assignment]
    found = registry(offered)
    assert found.select(SPEC, CPU).get_options() == Normal()
    assert found.select(SPEC.replace(head_size=128), CPU).get_options() == Wide()


def test_a_decision_with_options_can_be_pickled() -> None:
    chosen = dataclasses.replace(select({"colour": "blue"}), backend_cls=None)
    assert pickle.loads(pickle.dumps(chosen)) == chosen
