"""The declaring methods that authors know from vLLM: each has vLLM's meaning, and an override decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sample_backends import CPU, H100, Generous, Plain
from spec_strategies import SIZES

from attnplug.core import AttentionBackend, Device, LayerSpec, MultipleOf, composite_backend

SPEC = LayerSpec(**SIZES, dtype="float16")


def variant(base: type[AttentionBackend] = Generous, **methods: Any) -> type[AttentionBackend]:
    """A backend of its own with class methods that get only their arguments."""
    made = {name: staticmethod(each) if callable(each) else each for name, each in methods.items()}
    return type("Variant", (base,), made)


def sentences(backend: type[AttentionBackend], device: Device = H100, **fields: Any) -> list[str]:
    return [str(reason) for reason in backend.validate_configuration(SPEC.replace(**fields), device)]


class TestDefaults:
    def test_a_class_tells_where_it_is(self) -> None:
        assert Plain.full_cls_name() == ("sample_backends", "Plain")

    def test_outputs_are_always_given(self) -> None:
        assert Plain.accept_output_buffer is True

    @pytest.mark.parametrize("dtype", ["float16", torch.float16, torch.bfloat16])
    def test_a_declared_dtype_is_known_by_name_and_as_a_torch_dtype(self, dtype: object) -> None:
        assert Plain.supports_dtype(dtype)
        assert variant(supported_dtypes=[torch.float16, torch.bfloat16]).supports_dtype(dtype)
        assert not Plain.supports_dtype("float32")
        assert not Plain.supports_dtype(torch.float32)

    def test_a_storage_type_has_the_spellings_of_a_spec(self) -> None:
        assert [Plain.supports_kv_cache_dtype(name) for name in (None, "auto", "fp8")] == [True, True, False]
        for name in ("fp8", "fp8_e4m3", "float8_e4m3fn", "fp8_e5m2"):
            assert Generous.supports_kv_cache_dtype(name)
        only = variant(supported_kv_cache_dtypes=("auto", "fp8_e4m3"))
        assert [only.supports_kv_cache_dtype(name) for name in ("fp8", "fp8_e5m2")] == [True, False]

    def test_a_block_size_is_one_that_the_kernel_reads(self) -> None:
        sixteens = variant(get_supported_kernel_block_sizes=lambda *asked: (8, MultipleOf(16)))
        sizes = (None, 8, 16, 32, 24)
        assert [sixteens.supports_block_size(size) for size in sizes] == [True, True, True, True, False]


class TestDtype:
    @pytest.mark.parametrize(
        "accepts",
        [
            lambda dtype: dtype == "float16",
            lambda dtype: dtype == torch.float16,
            lambda dtype: dtype != torch.bfloat16 and dtype != torch.float32,
            lambda dtype: dtype in (torch.float16,),
            lambda dtype: dtype in {"float16"},
            lambda dtype: str(dtype).endswith("float16") and "b" not in dtype,
        ],
    )
    def test_an_override_is_consulted_in_either_vocabulary(self, accepts: Callable[[Any], bool]) -> None:
        backend = variant(supports_dtype=accepts)
        assert sentences(backend) == []
        (why,) = sentences(backend, dtype="bfloat16")
        assert why == "dtype not supported: bfloat16 is not accepted by Variant.supports_dtype"

    def test_an_override_may_widen(self) -> None:
        assert sentences(variant(Plain, supports_dtype=lambda dtype: True), dtype="float32") == []

    def test_an_override_may_ask_the_default(self) -> None:
        class Narrow(Generous):
            @classmethod
            def supports_dtype(cls, dtype: object) -> bool:
                return super().supports_dtype(dtype) and dtype != torch.float32

        assert [sentences(Narrow, dtype=dtype) == [] for dtype in ("float16", "float32")] == [True, False]

    def test_a_mixin_decides_as_well(self) -> None:
        mixin = type("Mixin", (), {"supports_dtype": classmethod(lambda cls, dtype: False)})
        made: Any = type("Mixed", (mixin, Generous), {})
        assert sentences(made) == ["dtype not supported: float16 is not accepted by Mixed.supports_dtype"]


class TestStorage:
    def test_an_override_decides_on_the_name_that_the_layer_asks(self) -> None:
        asked: list[Any] = []

        def no_fp8(name: str | None) -> bool:
            asked.append(name)
            return name != "fp8"

        backend = variant(supports_kv_cache_dtype=no_fp8)
        assert sentences(backend) == []
        (why,) = sentences(backend, kv_cache_dtype="fp8")
        assert why == "kv_cache_dtype not supported: fp8 is not accepted by Variant.supports_kv_cache_dtype"
        assert set(asked) == {"auto", "fp8"}


class TestBlocks:
    def test_an_override_narrows_what_is_given_and_what_is_chosen(self) -> None:
        backend = variant(supports_block_size=lambda size: size is None or size % 64 == 0)
        (why,) = sentences(backend, block_size=16)
        assert why == (
            "block_size not supported: 16 is not accepted by Variant.supports_block_size; "
            "leave block_size unset and the backend chooses"
        )
        assert sentences(backend, block_size=64) == []
        assert backend.get_preferred_block_size(SPEC, H100) == 64
        assert backend.get_preferred_block_size(SPEC, H100, default=100) == 128

    def test_an_override_cannot_add_pages_that_the_kernel_does_not_read(self) -> None:
        backend = variant(
            get_supported_kernel_block_sizes=lambda *asked: (16,), supports_block_size=lambda size: True
        )
        assert "32 is not 16" in sentences(backend, block_size=32)[0]

    def test_a_composite_reads_what_both_members_accept(self) -> None:
        names = {name: staticmethod(lambda name=name: name) for name in ("ONE", "TWO")}
        one, two = (type(name, (Generous,), {"get_name": get}) for name, get in names.items())
        both = composite_backend(
            type("Ones", (one,), {"supports_block_size": staticmethod(lambda size: size % 32 == 0)}),
            type("Twos", (two,), {"supports_dtype": staticmethod(lambda dtype: dtype == "float16")}),
        )
        assert both.get_preferred_block_size(SPEC, CPU) == 32
        assert not both.supports_block_size(16)
        assert (both.supports_dtype("float16"), both.supports_dtype("float32")) == (True, False)
        assert any("Ones.supports_block_size" in why for why in sentences(both, block_size=16))
        assert any("Twos.supports_dtype" in why for why in sentences(both, dtype="float32"))


class TestOthers:
    def test_a_capability_has_the_parts_that_authors_read(self) -> None:
        seen: list[Any] = []

        def newer(capability: Any) -> bool:
            seen.append((capability.major, capability.minor, capability.to_int(), capability >= (9, 0)))
            return capability.major == 9

        backend = variant(supports_compute_capability=newer)
        assert sentences(backend) == []
        assert sentences(backend, Device("cuda", (8, 6))) == ["compute capability not supported: 8.6"]
        assert seen == [(9, 0, 90, True), (8, 6, 86, False)]
