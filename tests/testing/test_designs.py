"""Workers take over the designed cases that the listing has found."""

from __future__ import annotations

import pickle

import pytest
from catching import variant

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device
from attnplug.testing.conformance import listing
from attnplug.testing.conformance.cases import designed_cases
from attnplug.testing.conformance.cases.designed_cases import Designs
from attnplug.testing.conformance.target import Target
from attnplug.testing.isolation.listing import Listing, SuiteRequest, list_checks

TARGET = Target(TorchBackend, Device("cpu"))
FEW = Target(variant("FEW", supported_dtypes=("float32",)), Device("cpu"))


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    search = designed_cases.designed_cases

    def counted(target: Target) -> object:
        found.append(target.name)
        return search(target)

    monkeypatch.setattr(designed_cases, "designed_cases", counted)
    return found


def test_what_one_has_found_another_does_not_search_for(searches: list[str]) -> None:
    first = Designs()
    cases = first.of(FEW)
    second = Designs(first.written())
    assert second.of(FEW) == cases
    assert searches == ["FEW"]
    # Another backend is another target.
    second.of(TARGET)
    assert searches == ["FEW", "TORCH"]


def test_targets_with_equal_names_are_searched_for_each(searches: list[str]) -> None:
    first, other = Designs(), Target(variant("FEW", supported_dtypes=("float16",)), Device("cpu"))
    first.of(FEW)
    first.of(other)
    second = Designs(first.written())
    assert {case.spec.dtype for case in second.of(FEW)} == {"float32"}
    assert {case.spec.dtype for case in second.of(other)} == {"float16"}
    assert len(searches) == 4


@pytest.mark.parametrize("written", [b"", b"no pickle", pickle.dumps(3)])
def test_damaged_cases_are_searched_for_again(written: bytes, searches: list[str]) -> None:
    assert Designs(written).of(FEW)
    assert searches == ["FEW"]


def test_a_listing_brings_the_cases_of_each_target_to_the_workers(searches: list[str]) -> None:
    made = list_checks(SuiteRequest("TORCH", only=("correct/*", "mla/correct/*", "state/*")), 100)
    assert isinstance(made, Listing)
    target = Target(TorchBackend, Device("cpu"), designs=Designs(made.designs))
    ids = [check.id for check in listing.target_checks(target)]
    assert ids == list(made.ids)
    assert searches == []
