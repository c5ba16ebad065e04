"""Damaged JSON of a decision or plan: one class of error, or a value that still prints and compares."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
from fake_plugins import CPU, SPEC, backend, registry

from attnplug import Decision, plan
from attnplug.errors import PolicyError, SpecError
from attnplug.runtime import ModelPlan

pytestmark = pytest.mark.attack("JSON")

WRONG = [None, True, -1, 10**400, 1.5, math.nan, "", "\x1b[2J", [], [[1]], {}, {"a": 1}]


def decided() -> Decision:
    return registry(backend("A", 10), backend("B", 20, supported_dtypes=("float16",))).select(
        SPEC, CPU, layer_name="layer", assume_installed={"x": "1"}
    )


def damaged(data: Any) -> Iterator[Any]:
    """The data with each value in turn left out, or replaced by each wrong one."""

    def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, item in items:
            yield (*path, key)
            yield from paths(item, (*path, key))

    for path in paths(data):
        for wrong in (*WRONG, ...):
            made = copy.deepcopy(data)
            holder = made
            for key in path[:-1]:
                holder = holder[key]
            if wrong is ...:
                del holder[path[-1]]
            else:
                holder[path[-1]] = wrong
            yield made


def test_a_damaged_decision_is_an_error_of_one_class_or_still_prints() -> None:
    refused = read = 0
    messages: set[str] = set()
    for data in damaged(decided().to_dict()):
        try:
            found = Decision.from_dict(data)
        except SpecError as error:
            refused += 1
            messages.add(str(error).partition(": ")[0])
            continue
        read += 1
        assert str(found)
        assert found == Decision.from_json(found.to_json())
        assert hash(found) == hash(Decision.from_json(found.to_json()))
    assert refused > read > 0
    assert messages == {"decision='JSON' is not what to_json wrote"}


def test_a_damaged_plan_is_an_error_of_one_class_or_still_prints() -> None:
    made = plan({"a": SPEC, "b": SPEC}, "cpu", num_blocks=9).to_dict()
    # One decision, and few candidates: their own damage has a test above.
    made["decisions"] = {
        name: dict(item, candidates=item["candidates"][:1]) for name, item in made["decisions"].items()
    }
    refused, messages = 0, set()
    for data in damaged(made):
        try:
            str(ModelPlan.from_dict(data))
        except SpecError as error:
            refused += 1
            messages.add(str(error).partition(": ")[0])
    assert refused > 100
    assert messages == {"plan='JSON' is not what to_json wrote"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", '{"schema": 1}', "[" * 100_000, '{"schema": ' + "1" * 5000 + "}", "\ud800"],
)
@pytest.mark.parametrize("kind", [Decision, ModelPlan])
def test_text_that_is_no_decision_is_the_same_error(text: str, kind: Any) -> None:
    with pytest.raises(SpecError, match="is not what to_json wrote"):
        kind.from_json(text)


PATH = PurePosixPath("/tmp/x")


@dataclasses.dataclass(frozen=True)
class PathDefault:
    folder: Any = PATH


@dataclasses.dataclass(frozen=True)
class NotANumber:
    scale: Any = math.nan


@dataclasses.dataclass(frozen=True)
class ListDefault:
    sizes: Any = dataclasses.field(default_factory=lambda: [1, 2])


@dataclasses.dataclass(frozen=True)
class SetDefault:
    names: Any = frozenset({"a"})


@pytest.mark.parametrize("options", [PathDefault, NotANumber, ListDefault, SetDefault])
def test_options_that_json_cannot_hold_are_refused_where_they_are_declared(options: type) -> None:
    decision = registry(backend("A", 10, Options=options), backend("B", 5)).select(SPEC, CPU)
    assert decision.backend == "B"
    (reason,) = decision.refused[0].reasons
    assert reason.code == "plugin_error"
    assert f"the option {dataclasses.fields(options)[0].name} of A" in reason
    assert "cannot be written as JSON and read back" in reason


@dataclasses.dataclass(frozen=True)
class Anything:
    value: Any = 1


@pytest.mark.parametrize("value", [PurePosixPath("/"), math.nan, math.inf, frozenset({1}), object()])
def test_values_that_json_cannot_hold_are_refused_when_they_are_given(value: Any) -> None:
    found = registry(backend("A", 10, Options=Anything))
    with pytest.raises(PolicyError, match="cannot be written as JSON and read back"):
        found.select(SPEC, CPU, options={"A": {"value": value}})


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", (1, ("a", None)), ()])
def test_options_round_trip(value: Any) -> None:
    decision = registry(backend("A", 10, Options=Anything)).select(SPEC, CPU, options={"A": {"value": value}})
    read = Decision.from_json(decision.to_json())
    assert read == decision
    assert json.loads(decision.to_json())["options"] == {"value": json.loads(json.dumps(value))}
