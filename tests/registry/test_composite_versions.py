"""The distributions and versions of a composite: in its offer, and in the evidence that counts against it."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence_runs import cell, run
from fake_plugins import CPU, SPEC, Serves, backend, plugin

from attnplug import Registry
from attnplug.registry.plugins import installed
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.registry.plugins.records import Offer, joined
from attnplug.registry.selection.evidence import record

INSTALLED = {"acme": "1.0", "beta": "2.0", "gamma": "1.0"}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that this test keeps evidence in."""
    path = tmp_path / "evidence.json"
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(path))
    return path


@pytest.mark.parametrize(
    ("items", "text"),
    [
        (["acme", "beta"], "acme+beta"),
        (["beta", "acme"], "beta+acme"),
        (["acme", "acme"], "acme"),
        (["acme", None], "acme"),
        ([None, "acme"], "acme"),
        ([None, None], None),
        ([], None),
    ],
)
def test_the_texts_of_both_halves_are_one(items: list[str | None], text: str | None) -> None:
    assert joined(iter(items)) == text


@pytest.mark.parametrize(
    ("distribution", "version", "valid"),
    [
        ("acme", "1.0", True),
        ("acme", "1.1", False),
        ("acme+beta", "1.0+2.0", True),
        ("acme+beta", "2.0+1.0", False),
        ("acme+beta", "1.0+1.9", False),
        ("acme+beta", "0.9+2.0", False),
        ("acme+beta", "1.0", False),
        ("acme+gamma", "1.0", True),
        ("acme+gamma", "1.0+1.0", False),
        ("acme+absent", "1.0+2.0", False),
        ("absent", "1.0", False),
        (None, None, True),
    ],
)
def test_evidence_of_two_distributions_is_of_both_their_versions(
    monkeypatch: pytest.MonkeyPatch, distribution: str | None, version: str | None, valid: bool
) -> None:
    monkeypatch.setattr(installed, "installed_version", INSTALLED.get)
    subject = BackendVersions("A+B", distribution, version, CPU, ())
    assert subject.is_installed is valid


def test_evidence_is_of_one_backend_distribution_and_version() -> None:
    subject = BackendVersions("A+B", "acme+beta", "1.0+2.0", CPU, ())
    mine = ("A+B", Serves, "p:a+q:b", "acme+beta", "1.0+2.0")
    assert subject.is_of(Offer(*mine))
    for place, other in ((0, "B+A"), (3, "acme"), (4, "1.0")):
        assert not subject.is_of(Offer(*(other if at == place else each for at, each in enumerate(mine))))  # type: ignore[arg-type]


def test_a_composite_is_offered_under_both_distributions_and_versions() -> None:
    found = Registry()
    found.register(plugin(backend("OWN", 20)), "mine")
    torch = next(offer for offer in found.plugins.offers if offer.name == "TORCH")
    (mixed,) = found.plugins.find("OWN+TORCH")
    assert (mixed.name, mixed.plugin) == ("OWN+TORCH", f"mine+{torch.plugin}")
    assert (mixed.distribution, mixed.version) == (torch.distribution, torch.version)
    (other,) = found.plugins.find("TRITON+TORCH")
    assert (other.distribution, other.version) == (torch.distribution, torch.version)


def test_evidence_against_a_composite_is_of_the_versions_of_both_halves() -> None:
    owner = next(offer for offer in Registry().plugins.offers if offer.name == "TORCH")
    facts = {"distribution": owner.distribution, "version": owner.version}

    def decided() -> str | None:
        found = Registry()
        found.register(plugin(backend("OWN", 20)), "mine")
        answered: str | None = found.explain(SPEC, CPU, backend="OWN+TORCH").backend
        return answered

    assert decided() == "OWN+TORCH"
    record(run("OWN+TORCH", cell(), **{**facts, "version": f"{owner.version}+{owner.version}"}))
    assert decided() == "OWN+TORCH"
    record(run("OWN+TORCH", cell(), **facts))
    assert decided() is None
