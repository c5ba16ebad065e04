"""Options of a backend: checked against what it declares, never ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NewType

import pytest
from fake_plugins import CPU, H100, SPEC, backend, registry

from attnplug import Registry, use
from attnplug.core import AttentionBackend
from attnplug.errors import PolicyError
from attnplug.registry.plugins.options import build_options

Tokens = NewType("Tokens", int)


@dataclasses.dataclass(frozen=True)
class Splits:
    num_splits: int = 1
    scale: float = 1.0
    mode: Literal["fast", "exact"] = "fast"
    limit: int | None = None
    sizes: tuple[int, ...] = ()
    names: Sequence[str] = ()
    pages: Tokens = Tokens(1)
    anything: Any = None
    graphs: bool = False
    computed: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True)
class Strict:
    tile: int = 16

    def __post_init__(self) -> None:
        if self.tile % 16:
            raise ValueError(f"tile={self.tile} must be a multiple of 16")


@dataclasses.dataclass(frozen=True)
class Empty:
    pass


@dataclasses.dataclass(frozen=True)
class Needy:
    tile: int


@dataclasses.dataclass(frozen=True)
class Unreadable:
    tile: NoSuchName = 1  # type: ignore[name-defined]  # noqa: F821


EXISTS = (
    "num_splits: int, scale: float, mode: Literal['fast', 'exact'], limit: int | None, sizes: tuple[int, ...]"
)


def found() -> Registry:
    return registry(
        backend("SPLITS", 80, Options=Splits),
        backend("STRICT", 70, Options=Strict, family="TILED"),
        backend("LOOSE", 60, family="TILED"),
        backend("PLAIN", 50),
    )


def built(options: Any = None, **asked: Any) -> Any:
    return found().select(SPEC, CPU, options=options, **asked).get_options()


def test_without_options_the_backend_has_its_defaults() -> None:
    assert built() == Splits()
    assert built(backend="PLAIN") is None
    assert found().select(SPEC, CPU, backend="PLAIN").options is None


def test_options_are_given_by_backend_name_or_plain_for_the_one_asked_for() -> None:
    assert built({"SPLITS": {"num_splits": 4}}) == Splits(num_splits=4)
    assert built({"num_splits": 4}, backend="SPLITS") == Splits(num_splits=4)
    assert built({"num_splits": 4}, backend="full=SPLITS") == Splits(num_splits=4)
    assert built({"num_splits": 4}, backend="SPLITS@fakes") == Splits(num_splits=4)
    assert built({"SPLITS@fakes": {"num_splits": 4}}) == Splits(num_splits=4)
    assert built({}) == Splits()


def test_options_are_given_as_an_instance() -> None:
    assert built(Splits(num_splits=4)) == Splits(num_splits=4)
    assert built({"SPLITS": Splits(num_splits=4)}) == Splits(num_splits=4)
    assert built(Strict(32)) == Splits()
    assert built(Strict(32), backend="STRICT") == Strict(32)


def test_options_are_given_by_family_for_the_members_that_take_them() -> None:
    assert built({"TILED": {"tile": 32}}, backend="STRICT") == Strict(32)
    assert built({"tile": 32}, backend="TILED") == Strict(32)
    assert built({"TILED": {"tile": 32}, "STRICT": {"tile": 64}}, backend="TILED") == Strict(64)
    with pytest.raises(PolicyError, match="LOOSE has no options"):
        built({"TILED": {"tile": 32}}, backend="LOOSE")


@pytest.mark.parametrize(
    "given",
    [
        {"num_splits": 3},
        {"scale": 2.5, "mode": "exact"},
        {"scale": 2},
        {"limit": None},
        {"limit": 9},
        {"sizes": (64,), "names": ("a", "b")},
        {"pages": 3},
        {"anything": ("x", 1)},
        {"graphs": True},
    ],
)
def test_values_of_the_right_type_are_taken(given: dict[str, Any]) -> None:
    assert built({"SPLITS": given}) == Splits(**given)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_splits", "3"),
        ("num_splits", 3.0),
        ("num_splits", True),
        ("scale", "2"),
        ("scale", False),
        ("mode", "slow"),
        ("limit", 1.5),
        ("limit", False),
        ("sizes", 64),
        ("graphs", 1),
    ],
)
def test_a_value_of_the_wrong_type_lists_what_exists(option: str, value: object) -> None:
    with pytest.raises(PolicyError) as error:
        built({option: value}, backend="SPLITS")
    assert str(error.value).startswith(f"options[{option!r}]={value!r} must be ")
    assert f"options of SPLITS are: {EXISTS}" in str(error.value)


def test_a_wrong_type_is_an_error_also_after_an_equal_value_of_the_right_one() -> None:
    same = found()
    same.select(SPEC, CPU, options={"SPLITS": {"num_splits": 1}})
    with pytest.raises(PolicyError, match=r"options\['num_splits'\]=True must be int"):
        same.select(SPEC, CPU, options={"SPLITS": {"num_splits": True}})


@pytest.mark.parametrize("option", ["splits", "computed"])
def test_an_unknown_option_lists_what_exists(option: str) -> None:
    with pytest.raises(
        PolicyError, match=rf"options\['{option}'\]=2 is unknown: SPLITS has no such option; there are: num_"
    ):
        built({"SPLITS": {option: 2}})


def test_a_backend_without_options_says_so() -> None:
    with pytest.raises(PolicyError, match="PLAIN has no options"):
        built({"tile": 1}, backend="PLAIN")
    assert built({"PLAIN": {}}, backend="PLAIN") is None
    with pytest.raises(PolicyError, match="EMPTY has no such option; there are: none"):
        registry(backend("EMPTY", Options=Empty)).select(SPEC, CPU, options={"EMPTY": {"tile": 1}})


def test_values_that_the_options_themselves_refuse_are_an_error() -> None:
    with pytest.raises(
        PolicyError, match="STRICT refuses them: ValueError: tile=17 must be a multiple of 16"
    ):
        built({"tile": 17}, backend="STRICT")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_splits": 2}, "has keys that are not backends; there are: LOOSE, PLAIN, SPLITS, STRICT, TILED"),
        ({"SPLITS": {}, "NOBODY": {}}, "has keys that are not backends"),
        ({3: {}}, "has keys that are not backends"),
        (Empty(), "is neither Options of a backend nor a mapping"),
        ("fast", "is neither Options of a backend nor a mapping"),
        ({"SPLITS": 3}, "must be the Splits of SPLITS, or a mapping"),
        ({"SPLITS": {"anything": []}}, "cannot be written as JSON and read back"),
    ],
)
def test_options_for_no_known_backend_are_an_error_and_never_ignored(options: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        built(options)


def test_options_of_a_backend_that_is_not_chosen_are_checked_all_the_same() -> None:
    with pytest.raises(PolicyError, match="STRICT has no such option"):
        built({"STRICT": {"tiles": 16}}, backend="PLAIN")
    with pytest.raises(PolicyError, match="STRICT has no such option"):
        built({"TILED": {"tiles": 16}}, backend="PLAIN")
    with pytest.raises(PolicyError, match="there are: none"):
        Registry([]).explain(SPEC, CPU, options={"STRICT": {}})


def test_options_come_from_use_and_the_argument_replaces_them_by_backend() -> None:
    same = found()
    with use(options={"SPLITS": {"num_splits": 2}, "STRICT": {"tile": 32}}):
        assert same.select(SPEC, CPU).get_options() == Splits(num_splits=2)
        with use("STRICT"):
            assert same.select(SPEC, CPU).get_options() == Strict(32)
        with use("STRICT", options={"tile": 48}):
            assert same.select(SPEC, CPU).get_options() == Strict(48)
            argument = {"SPLITS": {"num_splits": 3}}
            assert same.select(SPEC, CPU, backend="SPLITS", options=argument).get_options() == Splits(3)
    assert same.select(SPEC, CPU).get_options() == Splits()


def test_different_options_are_different_decisions() -> None:
    same = found()
    two, three = (same.select(SPEC, CPU, options={"SPLITS": {"num_splits": n}}) for n in (2, 3))
    assert (two.get_options().num_splits, three.get_options().num_splits) == (2, 3)
    assert same.explain(SPEC, H100, options=Splits(num_splits=5)).get_options().num_splits == 5


@pytest.mark.parametrize("declared", [Needy, Unreadable, int, raises := type("Raises", (), {})])
def test_options_that_cannot_be_made_are_charged_to_their_backend(declared: type[Any]) -> None:
    odd: type[AttentionBackend] = backend("ODD", 90, Options=declared)
    decision = registry(odd, backend("SOUND")).select(SPEC, CPU)
    assert decision.backend == "SOUND"
    assert decision.refused[0].codes == ("plugin_error",)
    assert "ODD has Options that cannot be made" in decision.refused[0].reasons[0]


def test_an_instance_is_kept_as_it_is() -> None:
    given = Strict(32)
    assert build_options(backend("STRICT", Options=Strict), given) is given
