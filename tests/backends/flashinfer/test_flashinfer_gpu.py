"""FLASHINFER passes the conformance kit on a GPU, with either template of prefill."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import pytest

from attnplug.backends.flashinfer import FlashInferBackend
from attnplug.backends.flashinfer.options import Options
from attnplug.testing import parametrize_with_checks

pytestmark = [
    pytest.mark.gpu,
    # What the library warns of when it compiles is none of attnplug's warnings.
    pytest.mark.filterwarnings("default", "error:::attnplug"),
]


@dataclasses.dataclass(frozen=True, slots=True)
class Fa2Options(Options):
    """Prefill on fa2, unless the user says otherwise."""

    prefill_backend: Literal["auto", "fa2", "fa3"] = "fa2"


class FlashInferFa2(FlashInferBackend):
    """Prefill on fa2; without it, on fa3 where the GPU has it and the cache is not fp8."""

    Options: ClassVar[type[Any] | None] = Fa2Options


@parametrize_with_checks(FlashInferFa2)
def test_fa2(check):
    check()


@parametrize_with_checks(FlashInferBackend)
def test_fa3(check):
    check()


@pytest.mark.slow
@parametrize_with_checks(FlashInferFa2, level="full")
def test_fa2_at_the_full_level(check):
    check()
