"""Structural checks hold a backend to what it declares, and say what a module does that they load."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from catching import failures, variant
from mutants.parts import Around, Call

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import AttentionBackend, Device, Feature, MultipleOf
from attnplug.core.errors import BatchError, LayoutError
from attnplug.ops.storage import FP8_OUTPUTS
from attnplug.testing.conformance.calls import inputs, outputs
from attnplug.testing.conformance.check import Check, CheckSkipped, Level
from attnplug.testing.conformance.declared import acceptance, attributes, pages, refusals
from attnplug.testing.conformance.listing import GROUPS, list_group
from attnplug.testing.conformance.numbers import cache_layouts, cache_reads, cache_writes, requests
from attnplug.testing.conformance.process import lightness, lightness_child
from attnplug.testing.conformance.target import Target

STRUCTURAL = (
    attributes.checks,
    pages.checks,
    attributes.interface_checks,
    lightness.checks,
    refusals.checks,
    refusals.limit_checks,
    acceptance.checks,
    inputs.checks,
    outputs.checks,
    outputs.quantised_output_checks,
    cache_writes.checks,
    cache_reads.checks,
    cache_layouts.checks,
    requests.checks,
)
"""All groups of checks but those of numbers, builders, runtimes and GPUs."""


def those(start: str = "") -> Callable[[Target], Iterator[Check]]:
    def checks(target: Target) -> Iterator[Check]:
        listed_checks = (check for group in STRUCTURAL for check in list_group(group, target))
        return (check for check in listed_checks if check.id.startswith(start))

    return checks


NARROW = variant(
    "NARROW",
    device_types=("cpu",),
    supported_dtypes=("bfloat16",),
    supported_kv_cache_dtypes=("auto",),
    features=Feature(0),
    get_supported_head_sizes=lambda cls: (64, 128),
    get_supported_kernel_block_sizes=lambda cls, spec=None, device=None: (MultipleOf(48), 128),
    supported_kv_cache_layouts=lambda cls: ("HND",),
)


class Reorders(TorchMetadataBuilder):
    """Needs its decodes in front."""

    reorder_batch_threshold = 1


class Refuses(Around):
    """Refuses strided tensors and caches."""

    def before(self, call: Call) -> None:
        if not call.query.is_contiguous():
            raise BatchError("query", call.query.stride(), "must be contiguous")
        if call.kv_cache is not None and call.kv_cache.stride(0) != call.kv_cache[0].numel():
            raise LayoutError("kv_cache", call.kv_cache.stride(), "must be dense")

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return quant_key in FP8_OUTPUTS


STRICT = variant(
    "STRICT",
    impl=Refuses,
    builder=Reorders,
    get_supported_head_sizes=lambda cls: (32, 64),
    supports_combination=lambda cls, spec, device: (
        "unlike sizes" if spec.head_size_v != spec.head_size else None
    ),
)
DECODES_ONLY = variant("DECODES_ONLY", supported_phases=("decode",))


@pytest.mark.parametrize("backend", [NARROW, STRICT, DECODES_ONLY], ids=lambda backend: backend.get_name())
def test_a_backend_is_held_to_what_it_declares_only(backend: type[AttentionBackend]) -> None:
    assert failures(backend, those()) == {}


def test_where_no_check_can_be_listed_one_says_why() -> None:
    wrong = variant("NO_BLOCKS", get_supported_kernel_block_sizes=lambda cls, spec=None, device=None: ())
    found = failures(wrong, those("listed"))
    assert "must name at least one size" in str(found["listed/cache_layouts"])


@pytest.mark.parametrize("start", ["tensors/strided", "cache/strided", "declaration/kv-shape-head_size_v"])
def test_what_a_backend_may_refuse_is_skipped_with_its_words(start: str) -> None:
    for check in those(start)(Target(STRICT, Device("cpu"))):
        with pytest.raises(CheckSkipped, match=r"must be contiguous|must be dense|unlike sizes"):
            check()


def test_the_child_says_what_was_loaded_and_who_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import colorsys\nprint('hello')\nfrom attnplug.backends.torch_native import TorchBackend\n"
    tmp_path.joinpath("colourful_backend.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    asked = {
        "module": "colourful_backend",
        "name": "TorchBackend",
        "watched": ["colorsys"],
        "call_methods": True,
    }
    task, report = tmp_path / "task", tmp_path / "report"
    task.write_text(json.dumps(asked))
    lightness_child.main(str(task), str(report))
    answer = json.loads(report.read_text())
    assert answer == {"loaded": {"colorsys": f"{tmp_path}/colourful_backend.py:1"}, "raised": None}


def test_a_class_that_no_other_process_can_import_is_not_tried_in_one() -> None:
    (check,) = those("declaration/light-import")(Target(NARROW, Device("cpu")))
    with pytest.raises(CheckSkipped, match="it was made here"):
        check()


class InTestModule(TorchBackend):
    """In a module that may import torch."""


def test_a_test_module_may_import_torch() -> None:
    (check,) = those("declaration/light-import")(Target(InTestModule, Device("cpu")))
    with pytest.raises(CheckSkipped, match="is a test module"):
        check()


def test_a_module_that_a_child_cannot_import_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from attnplug.backends.torch_native import TorchBackend\nclass Gone(TorchBackend): pass\n"
    tmp_path.joinpath("gone_backend.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    backend = importlib.import_module("gone_backend").Gone
    monkeypatch.undo()
    found = failures(backend, those("declaration/light"))
    assert len(found) == 2
    assert all("No module named 'gone_backend'" in str(problem) for problem in found.values())


def test_a_module_that_ends_the_process_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from attnplug.backends.torch_native import TorchBackend\nclass Ends(TorchBackend): pass\n"
    module = tmp_path / "ending_backend.py"
    module.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    backend = importlib.import_module("ending_backend").Ends
    module.write_text("raise SystemExit(0)\n")
    found = failures(backend, those("declaration/light-import"))
    assert "before it could answer" in str(found["declaration/light-import"])


def test_a_module_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightness, "_SECONDS", 0.001)
    found = failures(TorchBackend, those("declaration/light-import"))
    assert "took longer than" in str(found["declaration/light-import"])


def test_modules_of_what_a_backend_requires_are_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imports what it requires cannot be loaded where that is not installed."""
    monkeypatch.setattr(TorchBackend, "requires", ("hypothesis>=6", ("ruff", "no such ! name"), "hypothesis"))
    assert "hypothesis" in lightness._required_modules(TorchBackend.requires)


def test_all_of_these_are_among_the_checks_of_the_kit() -> None:
    assert set(STRUCTURAL) <= set(GROUPS)


@pytest.mark.parametrize("level", [Level.SMOKE, pytest.param(Level.FULL, marks=pytest.mark.slow)])
def test_torch_fails_none(level: Level) -> None:
    assert failures(TorchBackend, those(), level) == {}
