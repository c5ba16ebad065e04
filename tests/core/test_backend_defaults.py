"""What a backend that declares nothing serves, and what subclassing changes."""

from __future__ import annotations

from typing import Any

import pytest
from sample_backends import CPU, H100, Generous, Latent, Picky, Plain
from spec_strategies import SIZES

from attnplug.core import (
    AttentionBackend,
    AttentionType,
    Feature,
    LayerSpec,
    MultipleOf,
    Phase,
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
)

SPEC = LayerSpec(**SIZES)


def test_a_backend_must_say_its_name_and_open_its_doors() -> None:
    assert AttentionBackend.__abstractmethods__ == {"get_name", "get_impl_cls", "get_builder_cls"}


def test_what_is_not_declared_is_not_served() -> None:
    assert Plain.features == Feature(0)
    assert (tuple(Plain.device_types), tuple(Plain.supported_dtypes)) == (("cuda",), ("float16", "bfloat16"))
    assert tuple(Plain.supported_kv_cache_dtypes) == ("auto",)
    answers = (Plain.is_mla(), Plain.is_sparse(), Plain.supports_sink(), Plain.supports_mm_prefix())
    assert answers == (False,) * 4
    assert [kind for kind in AttentionType if Plain.supports_attn_type(kind)] == [AttentionType.DECODER]
    assert Plain.step_safe is False


def test_what_has_a_harmless_default_is_open() -> None:
    assert set(Plain.supported_phases) == set(Phase)
    assert Plain.supports_head_size(1)
    assert Plain.supports_head_size(12345)
    assert MultipleOf.allows(Plain.get_supported_kernel_block_sizes(), 1)
    assert Plain.supports_compute_capability((1, 0))
    assert Plain.supports_combination(SPEC, CPU) is None
    assert (Plain.family, tuple(Plain.requires), Plain.Options) == (None, (), None)


def test_a_third_party_stands_in_the_middle_of_the_order() -> None:
    assert Plain.get_priority(SPEC, H100, Phase.DECODE) == 50


def test_head_sizes_come_from_the_declared_list() -> None:
    assert [size for size in (32, 64, 80, 128) if Picky.supports_head_size(size)] == [64, 128]


@pytest.mark.parametrize("flag", Feature)
def test_features_answer_the_questions_that_authors_know(flag: Feature) -> None:
    declares = type("Declares", (Plain,), {"features": flag})
    assert declares.is_mla() is (flag is Feature.MLA)
    assert declares.is_sparse() is (flag is Feature.SPARSE)
    assert declares.supports_sink() is (flag is Feature.SINKS)
    assert declares.supports_mm_prefix() is (flag is Feature.MM_PREFIX)
    assert declares.supports_attn_type(AttentionType.ENCODER) is (flag is Feature.ENCODER)
    assert declares.supports_attn_type(AttentionType.ENCODER_ONLY) is (flag is Feature.ENCODER)
    assert declares.supports_attn_type(AttentionType.ENCODER_DECODER) is (flag is Feature.CROSS)


def test_attention_types_may_be_named_as_text() -> None:
    assert all(Generous.supports_attn_type(kind.value) for kind in AttentionType)
    assert Plain.supports_attn_type("decoder")
    assert not Generous.supports_attn_type("of_next_year")


def test_the_preferred_block_size_is_the_default_or_the_nearest_readable() -> None:
    assert Plain.get_preferred_block_size() == 16
    assert Plain.get_preferred_block_size(default=24) == 24
    assert Picky.get_preferred_block_size(SPEC, H100, default=24) == 32


class TestSubclassing:
    class Builder:
        """Stands for a metadata builder."""

    def test_a_subclass_builds_with_the_builder_it_was_given(self) -> None:
        backend: Any = subclass_attention_backend("Fast", Generous, self.Builder)  # type: ignore[arg-type]
        assert backend.get_builder_cls() is self.Builder
        assert (backend.__name__, backend.__module__) == ("FastGenerous", Generous.__module__)
        assert issubclass(backend, Generous)

    def test_a_subclass_answers_everything_else_as_before(self) -> None:
        backend: Any = subclass_attention_backend("Fast", Picky, self.Builder)  # type: ignore[arg-type]
        assert backend.get_name() == "PLAIN"
        odd = LayerSpec(num_heads=3, num_kv_heads=1, head_size=80)
        assert backend.validate_configuration(odd, CPU) == Picky.validate_configuration(odd, CPU)
        with pytest.raises(NotImplementedError):
            Picky.get_builder_cls()

    def test_overrides_may_be_values_functions_or_methods(self) -> None:
        def get_preferred_block_size(cls: type[AttentionBackend]) -> tuple[str, int]:
            return cls.__name__, 64

        backend: Any = subclass_attention_backend_with_overrides(
            "My",
            Plain,
            {
                "features": Feature.SINKS,
                "Options": dict,
                "get_name": lambda: "MY_PLAIN",
                "get_required_kv_cache_layout": staticmethod(lambda: "HND"),
                "get_preferred_block_size": classmethod(get_preferred_block_size),
            },
        )
        assert backend.get_name() == "MY_PLAIN"
        assert backend.supports_sink()
        assert backend.Options is dict
        assert backend.get_required_kv_cache_layout() == "HND"
        assert backend.get_preferred_block_size() == ("MyPlain", 64)

    def test_the_original_is_left_alone(self) -> None:
        subclass_attention_backend_with_overrides("My", Plain, {"features": Feature.SINKS})
        assert Plain.features == Feature(0)
        assert not Plain.supports_sink()

    def test_a_subclass_can_be_subclassed(self) -> None:
        once = subclass_attention_backend_with_overrides("One", Latent, {"family": "LATENT"})
        twice = subclass_attention_backend_with_overrides("Two", once, {})
        assert (twice.__name__, twice.family, twice.is_mla()) == ("TwoOneLatent", "LATENT", True)
