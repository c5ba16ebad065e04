"""FLEX does what it declares, as attnplug's conformance kit has it; on a GPU also with compiled kernels."""

from __future__ import annotations

from typing import Any

import pytest
from attnplug.core import AttentionImpl, LayerSpec
from attnplug.testing import parametrize_with_checks
from attnplug.testing.conformance import Check

from attnplug_flex import FlexBackend, FlexOptions


class CompiledBackend(FlexBackend):
    """FLEX as `FlexOptions(compile=True)` makes it, for the kit asks for no options."""

    device_types = ("cuda",)

    @staticmethod
    def get_name() -> str:
        return "FLEX_COMPILED"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        impl = super().get_impl_cls()

        class CompiledImpl(impl):  # type: ignore[misc, valid-type]
            @classmethod
            def from_spec(cls, spec: LayerSpec, **arguments: Any) -> Any:
                return super().from_spec(spec, **{**arguments, "options": FlexOptions(compile=True)})

        return CompiledImpl


@parametrize_with_checks(FlexBackend)
def test_conformance(check: Check) -> None:
    check()


@pytest.mark.gpu
@parametrize_with_checks(CompiledBackend)
def test_conformance_of_compiled_kernels(check: Check) -> None:
    check()
