"""Which requirements the installed, or the assumed, versions meet."""

from __future__ import annotations

from typing import Any

import pytest
from fake_plugins import CPU, SPEC, backend, registry

from attnplug.errors import PolicyError
from attnplug.registry.plugins.installed import freeze_assumed, installed_version, missing_requirements

ASSUMED = (("flash-attn", "2.6.3"), ("flash-attn-4", "4.0.0b20"), ("flashinfer-python", "0.5.1"))


@pytest.mark.parametrize(
    "requires",
    [
        (),
        ("flash-attn>=2.6",),
        ("Flash_Attn>=2.6", "flashinfer.python"),
        (("flash-attn>=2.7", "flashinfer-python>=0.5"),),
        (("no-such-thing", "flash-attn"),),
        ("flash-attn-4>=4.0.0b20",),
        ("flash-attn-4",),
        ("no-such-thing; python_version < '3'",),
        "flash-attn>=2.6",
        ((),),
    ],
)
def test_a_requirement_is_met(requires: Any) -> None:
    assert missing_requirements(requires, ASSUMED) == []


def test_an_absent_distribution_is_not_installed_with_the_remedy() -> None:
    (reason,) = missing_requirements(("no-such-thing>=1",), ASSUMED)
    assert (reason.code, reason.field) == ("not_installed", "requires")
    assert reason == "no-such-thing not installed; pip install 'no-such-thing>=1'"


def test_a_wrong_version_says_which_and_which_is_due() -> None:
    (reason,) = missing_requirements(("flash-attn>=2.7",), ASSUMED)
    assert (reason.code, reason.requested, reason.supported) == ("version", "2.6.3", ">=2.7")


def test_a_prerelease_must_be_named() -> None:
    assert [reason.code for reason in missing_requirements(("flash-attn-4>=4.0",), ASSUMED)] == ["version"]
    assert [reason.code for reason in missing_requirements(("flash-attn-4>=3.0",), ASSUMED)] == ["version"]


def test_alternatives_that_all_fail_are_one_reason_with_each_remedy() -> None:
    (reason,) = missing_requirements((("no-such-thing>=1", "flash-attn>=2.7", "nor-this"),), ASSUMED)
    assert reason.code == "version"
    assert reason.startswith("flash-attn version not supported: 2.6.3 is not >=2.7")
    assert "or pip install 'no-such-thing>=1' or pip install 'nor-this'" in reason


def test_each_requirement_has_its_own_reason() -> None:
    codes = [reason.code for reason in missing_requirements(("no-such-thing", "flash-attn>=3"), ASSUMED)]
    assert codes == ["not_installed", "version"]


def test_everything_may_be_assumed() -> None:
    assert missing_requirements(("no-such-thing>=1",), "all") == []


def test_without_assumptions_the_installed_versions_count() -> None:
    installed_version.cache_clear()
    assert missing_requirements(("packaging>=20", "pytest")) == []
    assert [reason.code for reason in missing_requirements(("packaging<1", "no-such-thing"))] == [
        "version",
        "not_installed",
    ]


def test_assumed_versions_are_frozen_under_their_canonical_names() -> None:
    assert freeze_assumed({"Torch": "2.9", "Flash_Attn": "2.8.3"}) == (
        ("flash-attn", "2.8.3"),
        ("torch", "2.9"),
    )
    assert freeze_assumed("all") == "all"
    assert freeze_assumed(None) is None
    assert freeze_assumed({}) == ()


@pytest.mark.parametrize(
    ("assumed", "words"),
    [
        ({"flash-attn": "new"}, r"assume_installed\['flash-attn'\]='new' is not a version"),
        ({"flash-attn": 2}, r"assume_installed\['flash-attn'\]=2 is not a version"),
        ({"flash-attn": ["2.8.3"]}, r"assume_installed\['flash-attn'\]=\['2.8.3'\] is not a version"),
        ({2: "2.8.3"}, r"assume_installed=\{2: '2.8.3'\} must be 'all' or a mapping"),
        ("everything", "assume_installed='everything' must be 'all' or a mapping of distribution to version"),
        (["flash-attn"], r"assume_installed=\['flash-attn'\] must be 'all' or a mapping"),
    ],
)
def test_assumptions_that_mean_nothing_are_errors(assumed: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        registry(backend("A")).explain(SPEC, CPU, assume_installed=assumed)


def test_nothing_is_installed_where_an_empty_mapping_is_assumed() -> None:
    found = registry(backend("A", requires=("packaging",))).explain(SPEC, CPU, assume_installed={})
    assert found.candidates[0].codes == ("not_installed",)


def test_where_an_installation_does_not_help_it_is_no_remedy() -> None:
    requires = ("no-such-thing>=1", ("flash-attn>=3", "nor-this"))
    reasons = missing_requirements(requires, ASSUMED, helps=False)
    assert [reason.remedy for reason in reasons] == [None, None]
    assert not [reason for reason in reasons if "pip install" in reason]
