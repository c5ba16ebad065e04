"""What a backend of latent attention declares: sizes, a prefill half, and the class that serves chosen keys."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from composite_parts import DecodesFirst, RecordingImpl, member

from attnplug.core import Device, Feature, LayerSpec, MLADecodeBackend, MLADims, Phase, QueryLens, SparseSpec
from attnplug.core.composite.pair import class_of, reference_of
from attnplug.errors import SpecError

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
SPEC = LayerSpec(num_heads=6, num_kv_heads=1, head_size=40, mla=DIMS, dtype="float32")
SPARSE = SPEC.replace(sparse=SparseSpec("token_topk", topk=4))
CPU = Device("cpu")


class Latent(MLADecodeBackend):
    """In a module, so that another process finds it."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float32",)
    requires = ("latents>=1",)
    features = Feature.MLA | Feature.LSE | Feature.SPARSE

    @staticmethod
    def get_name() -> str:
        return "LATENT"

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        return RecordingImpl

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return DecodesFirst


class Dense(member("DENSE", device_types=("cuda", "rocm"), requires=("dense", "latents>=1"))):  # type: ignore[misc]
    """In a module too."""


def fresh(**attributes: Any) -> type[MLADecodeBackend]:
    return type("Fresh", (Latent,), attributes)


def refused(backend: type[MLADecodeBackend], spec: LayerSpec = SPEC, phase: Phase | None = None) -> list[str]:
    return [str(reason) for reason in backend.validate_configuration(spec, CPU, phase)]


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("query_layout", "spilt", "query_layout='spilt' must be one of split, packed"),
        ("query_lens", "several", "query_lens='several' must be one of single, uniform, any"),
        ("decode_threshold", 0, "decode_threshold=0 must be an integer of at least 1"),
        ("latent_sizes", (32, 8), "latent_sizes=32 must be pairs of kv_lora_rank and qk_rope_head_dim"),
        ("latent_sizes", ((32,),), "latent_sizes=(32,) must be pairs of kv_lora_rank and qk_rope_head_dim"),
        ("latent_sizes", ((32, -1),), "latent_sizes=-1 must be an integer of at least 0"),
        ("latent_sizes", ((0, 8),), "latent_sizes=0 must be an integer of at least 1"),
        (
            "padded_heads",
            classmethod(lambda cls, num_heads: 4),
            "padded_heads=4 must be an integer of at least 6",
        ),
    ],
)
def test_a_declaration_without_meaning_is_named(attribute: str, value: Any, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        fresh(**{attribute: value}).validate_configuration(SPEC, CPU)
    assert str(caught.value) == text


@pytest.mark.parametrize("lens", [*QueryLens, "single", "uniform", "any"])
def test_each_kind_of_query_lengths_may_be_text(lens: QueryLens | str) -> None:
    assert refused(fresh(query_lens=lens), phase=Phase.DECODE) == []


def test_only_the_declared_pairs_of_sizes_are_served() -> None:
    made = fresh(latent_sizes=((32, 8), (30, 10), [16, 8]))
    assert made.get_supported_head_sizes() == (40, 24)
    assert made.supports_combination(SPEC, CPU) is None
    # Also a pair with the sum of another one is refused.
    other = MLADims(q_lora_rank=None, kv_lora_rank=31, qk_nope_head_dim=12, qk_rope_head_dim=9, v_head_dim=10)
    why = "kv_lora_rank + qk_rope_head_dim of 31+9 is not one of 32+8, 30+10, 16+8"
    assert made.supports_combination(SPEC.replace(mla=other), CPU) == why
    plain = LayerSpec(num_heads=6, num_kv_heads=1, head_size=40, dtype="float32")
    assert made.supports_combination(plain, CPU) is None
    assert Latent.get_supported_head_sizes() == ()
    assert Latent.supports_combination(SPEC.replace(mla=other), CPU) is None


def test_added_heads_are_told() -> None:
    assert Latent.notes(SPEC) == ()
    made = fresh(padded_heads=classmethod(lambda cls, num_heads: 16))
    assert made.notes(SPEC) == ("6 heads padded to 16",)


def test_a_feature_that_the_base_does_not_carry_out_is_refused_though_declared() -> None:
    made = fresh(features=Latent.features | Feature.SOFT_CAP)
    assert refused(made, SPEC.replace(logits_soft_cap=2.0), Phase.DECODE) == [
        "soft_cap not supported with MLA"
    ]
    assert "soft_cap" not in str(refused(made))


def test_it_decodes_alone_and_with_a_prefill_half_does_both() -> None:
    both = Latent.with_prefill(Dense)
    assert Latent.supported_phases == (Phase.DECODE,)
    assert (both.get_name(), both.supported_phases) == ("DENSE+LATENT", tuple(Phase))
    assert both.device_types == ("cuda",)
    assert both.requires == ("dense", "latents>=1")
    assert both.__doc__ == "Decodes latents on LATENT and prefills expanded K and V on DENSE."
    assert both.step_safe is (Dense.step_safe and Latent.step_safe)
    assert Latent.with_prefill(Dense) is both
    assert both.with_prefill(Dense) is both
    same = Latent.with_prefill(member("LATENT"))
    assert same.get_name() == "LATENT"
    # Another half takes the place of the first one.
    assert both.with_prefill(member("OTHER")).get_name() == "OTHER+LATENT"


def test_the_reasons_of_the_prefill_half_are_about_the_expanded_layer() -> None:
    half = member("HALF", supported_dtypes=("float32",), get_supported_head_sizes=lambda: (64,))
    both = Latent.with_prefill(half)
    # The decode attends 32 + 8, and the prefill keys of 12 + 8.
    assert refused(both) == [
        "expanded prefill on HALF: head_size not supported: 20 is not 64",
        "expanded prefill on HALF: head_size_v not supported: 10 is not 64",
    ]
    assert refused(both, phase=Phase.DECODE) == []
    assert refused(Latent.with_prefill(member("ANY"))) == []
    (decode_only,) = refused(both, SPEC.replace(dtype="bfloat16"))
    assert "expanded" not in decode_only


def test_sparse_layers_are_decoded_in_both_phases_by_a_class_of_their_own() -> None:
    both = Latent.with_prefill(member("LATENT"))
    serves = both.for_layer(SPARSE)
    assert both.for_layer(SPEC) is both
    assert serves is Latent.for_layer(SPARSE)
    assert serves.for_layer(SPARSE) is serves
    assert issubclass(serves, Latent)
    assert (serves.is_selecting, serves.prefill, serves.supported_phases) == (True, None, tuple(Phase))
    with pytest.raises(SpecError) as caught:
        serves.with_prefill(Dense)
    assert str(caught.value) == "prefill='DENSE' is not used: sparse layers decode every query"
    # Asked through the class that is offered, the answer is that of the class that serves.
    assert refused(both, SPARSE) == refused(serves, SPARSE) == []
    dense_only = fresh(features=Feature.MLA | Feature.LSE)
    assert dense_only.for_layer(SPARSE) is dense_only
    assert any("sparse" in reason for reason in refused(dense_only, SPARSE, Phase.DECODE))


def test_a_pair_of_two_names_gives_sparse_layers_to_its_decode_half() -> None:
    both = Latent.with_prefill(Dense)
    assert (both.get_name(), both.for_layer(SPARSE)) == ("DENSE+LATENT", Latent.for_layer(SPARSE))
    assert refused(both, SPARSE) == refused(Latent, SPARSE) == []


def test_what_is_compiled_is_that_of_the_prefill_half() -> None:
    heard: list[LayerSpec] = []

    def compile_key(spec: LayerSpec) -> str:
        heard.append(spec)
        return f"key of {spec.head_size}"

    both = Latent.with_prefill(member("HALF", compile_key=compile_key))
    assert both.compile_key(SPEC) == "key of 20"
    assert heard == [SPEC.expanded()]
    assert Latent.compile_key(SPEC) is None
    assert both.compile_key(SPARSE) is None
    assert both.compile_key(SPEC.replace(logits_soft_cap=2.0)) is None
    with Latent.watch_compiling() as kernels:
        assert kernels == []
    with both.watch_compiling() as kernels:
        assert kernels == []


class TestReferences:
    """Classes of two, as values that another process finds again."""

    LOCAL: ClassVar[Any] = member("LOCAL")

    def test_a_pair_is_found_again_by_its_halves(self) -> None:
        both = Latent.with_prefill(Dense)
        reference = reference_of(both)
        assert isinstance(reference, tuple)
        assert reference[1:] == (Dense, Latent)
        assert class_of(reference) is both
        assert class_of(Latent) is Latent
        assert class_of(None) is None

    def test_of_halves_that_no_other_process_finds_there_is_none(self) -> None:
        assert reference_of(Latent.with_prefill(self.LOCAL)) is None
        assert reference_of(self.LOCAL) is None
