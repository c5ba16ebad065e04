"""The versions that the built-in backends require: each has an upper end, because later ones were never run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_plugins import H100, SPEC
from packaging.requirements import Requirement
from packaging.version import Version

from attnplug import LayerSpec, Registry
from attnplug.backends.libraries import LIBRARY_RULES
from attnplug.core import MLADims, Phase

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
MLA = LayerSpec(num_heads=16, num_kv_heads=1, head_size=576, mla=DIMS)


def requirements() -> Iterator[tuple[str, Requirement]]:
    """Those of each built-in backend, and of the classes that serve latent and sparse layers under its name."""
    registry = Registry()
    for name, (offer, *_) in {n: registry.plugins.find(n) for n in registry.backends()}.items():
        for each in {offer.backend, offer.backend.for_layer(MLA), offer.backend.for_layer(SPEC)}:
            for given in each.requires:
                for text in (given,) if isinstance(given, str) else given:
                    yield name, Requirement(text)


REQUIRED = sorted({(name, str(each)) for name, each in requirements()})


@pytest.mark.parametrize(("name", "text"), REQUIRED)
def test_a_requirement_has_a_lower_and_an_upper_end(name: str, text: str) -> None:
    specifier = Requirement(text).specifier
    assert {each.operator for each in specifier} == {">=", "<"}
    assert not specifier.contains("99.0", prereleases=True)
    (upper,) = [Version(each.version) for each in specifier if each.operator == "<"]
    assert not specifier.contains(f"{upper}rc1", prereleases=True)


def test_all_libraries_are_among_them() -> None:
    found = {Requirement(text).name for _, text in REQUIRED}
    assert found == {
        "flash-attn",
        "flash-attn-3",
        "flash-attn-4",
        "flashinfer-python",
        "sgl-flash-mla",
        "triton",
    }


@pytest.mark.parametrize(
    ("name", "distribution", "version", "is_served"),
    [
        ("FLASHINFER", "flashinfer-python", "0.4.1", False),
        ("FLASHINFER", "flashinfer-python", "0.5.0", True),
        ("FLASHINFER", "flashinfer-python", "0.7.2.post1", True),
        ("FLASHINFER", "flashinfer-python", "0.8.0", False),
        ("FLASHINFER", "flashinfer-python", "0.8.0rc1", False),
        ("FLASHINFER", "flashinfer-python", "1.0", False),
        ("TRITON", "triton", "3.9.0", True),
        ("TRITON", "triton", "4.0.0", False),
        ("FLASH_ATTN_2", "flash-attn", "2.8.3.post2", True),
        ("FLASH_ATTN_2", "flash-attn", "3.0", False),
        ("FLASH_ATTN_4", "flash-attn-4", "5.0", False),
        ("FLASH_MLA", "sgl-flash-mla", "2.0", False),
    ],
)
def test_a_version_that_no_release_had_is_refused(
    name: str, distribution: str, version: str, is_served: bool
) -> None:
    decision = Registry().explain(SPEC, H100, Phase.DECODE, assume_installed={distribution: version})
    (candidate,) = [each for each in decision.candidates if each.name == name]
    assert ("version" not in candidate.codes) is is_served
    if not is_served:
        assert any(version in reason and "pip install" in reason for reason in candidate.reasons)


def test_the_rules_of_a_library_leave_no_version_out() -> None:
    for distribution in {rule.distribution for rule in LIBRARY_RULES if rule.backend == "FLASHINFER"}:
        for version in ("0.1", "0.4.9", "0.5", "0.6.13", "0.7.2.post1", "0.8", "0.9", "2.0"):
            rules = [rule for rule in LIBRARY_RULES if rule.distribution == distribution]
            covering = [rule for rule in rules if rule.covers_version(version)]
            assert len(covering) == 1, version


@pytest.mark.parametrize("extra", ["flashinfer", "flash-attn", "flash-attn-4", "flash-mla", "triton"])
def test_an_extra_installs_what_its_backend_requires(extra: str) -> None:
    (text,) = PROJECT["optional-dependencies"][extra]
    asked = Requirement(text)
    served = {Requirement(each).specifier for _, each in REQUIRED if Requirement(each).name == asked.name}
    assert asked.specifier in served
