"""validate_configuration, cause by cause: sizes, storage, kinds, devices, roles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sample_backends import CPU, H100, Generous, Latent, Picky, Plain
from spec_strategies import MLA_SIZES, SIZES

from attnplug.core import AttentionType, Device, Feature, LayerSpec, Phase, Reason, SparseSpec


def spec(**arguments: Any) -> LayerSpec:
    return LayerSpec(**{**SIZES, **arguments})


def codes(reasons: list[Reason]) -> list[str]:
    return [reason.code for reason in reasons]


def variant(base: type[Plain] = Plain, **attributes: Any) -> type[Plain]:
    return type("Variant", (base,), attributes)


class TestSizes:
    def test_a_value_size_is_held_to_the_same_sizes(self) -> None:
        backend = variant(Picky, features=Feature.HEAD_SIZE_V)
        reasons = backend.validate_configuration(spec(head_size_v=80, dtype="float16"), H100, Phase.DECODE)
        assert reasons == ["head_size_v not supported: 80 is not one of 64, 128, 256"]
        assert (reasons[0].code, reasons[0].field) == ("head_size", "head_size_v")

    def test_a_backend_without_value_sizes_says_so_once(self) -> None:
        reasons = Picky.validate_configuration(spec(head_size_v=80, dtype="float16"), H100, Phase.DECODE)
        assert codes(reasons) == ["feature.head_size_v"]

    def test_the_value_size_of_mla_is_no_size_of_its_own(self) -> None:
        backend = variant(Latent, get_supported_head_sizes=classmethod(lambda cls: (576,)))
        assert backend.validate_configuration(LayerSpec(**MLA_SIZES), CPU) == []

    def test_a_head_size_refused_without_a_list_states_no_limit(self) -> None:
        backend = variant(supports_head_size=classmethod(lambda cls, size: False))
        assert backend.validate_configuration(spec(), H100) == ["head_size not supported: 64"]

    def test_an_unset_block_size_is_the_backends_to_choose(self) -> None:
        assert Picky.validate_configuration(spec(dtype="float16"), H100, Phase.DECODE) == []

    def test_block_sizes_are_asked_for_the_spec_and_device_at_hand(self) -> None:
        asked: list[object] = []

        def sizes(cls: type[Plain], spec: LayerSpec, device: Device) -> tuple[int, ...]:
            asked.extend((spec, device))
            return (16, 32)

        paged = spec(block_size=64)
        backend = variant(get_supported_kernel_block_sizes=classmethod(sizes))
        reasons = backend.validate_configuration(paged, H100)
        assert asked == [paged, H100]
        assert reasons == [
            "block_size not supported: 64 is not one of 16, 32; leave block_size unset and the backend chooses"
        ]

    def test_a_layer_without_pages_has_no_block_size_to_refuse(self) -> None:
        backend = variant(Picky, features=Feature.DIRECT_KV)
        direct = spec(dtype="float16", block_size=24, direct_kv=True)
        assert backend.validate_configuration(direct, H100, Phase.DECODE) == []


class TestStorage:
    @pytest.mark.parametrize(
        ("offered", "asked", "stored"),
        [
            ("auto", "auto", True),
            ("auto", "bfloat16", True),
            ("auto", "float16", False),
            ("bfloat16", "auto", True),
            ("float16", "auto", False),
            ("fp8", "fp8", True),
            ("fp8", "fp8_e4m3", True),
            ("fp8_e4m3", "fp8", True),
            ("fp8", "fp8_e5m2", False),
            ("fp8_e5m2", "fp8_e5m2", True),
            (torch.float8_e4m3fn, "fp8", True),
            (torch.float8_e5m2, "fp8", False),
            ("auto", "fp8", False),
            ("int8", "int8", True),
        ],
    )
    def test_storage_is_compared_by_what_the_names_stand_for(
        self, offered: object, asked: str, stored: bool
    ) -> None:
        backend = variant(supported_kv_cache_dtypes=(offered,), features=Feature.FP8_KV)
        reasons = backend.validate_configuration(spec(kv_cache_dtype=asked), H100)
        assert codes(reasons) == ([] if stored else ["kv_cache_dtype"])

    def test_a_type_without_known_bytes_is_refused_as_a_plan_refuses_it(self) -> None:
        backend = variant(supported_kv_cache_dtypes=("of_next_year",))
        reasons = backend.validate_configuration(spec(kv_cache_dtype="of_next_year"), H100)
        assert codes(reasons) == ["kv_format"]

    def test_fp8_that_is_not_stored_is_one_reason(self) -> None:
        reasons = Plain.validate_configuration(spec(kv_cache_dtype="fp8"), H100)
        assert codes(reasons) == ["kv_cache_dtype"]

    def test_fp8_that_is_stored_but_not_served_is_the_feature(self) -> None:
        backend = variant(supported_kv_cache_dtypes=("auto", "fp8"))
        reasons = backend.validate_configuration(spec(kv_cache_dtype="fp8"), H100)
        assert codes(reasons) == ["feature.fp8_kv"]
        assert reasons[0].field == "kv_cache_dtype"


class TestKinds:
    def test_mla_and_the_rest_exclude_each_other(self) -> None:
        dense, latent = spec(), LayerSpec(**MLA_SIZES)
        assert Generous.validate_configuration(latent, CPU) == ["MLA not supported"]
        assert Latent.validate_configuration(dense, CPU) == ["non-MLA not supported"]
        assert codes(Latent.validate_configuration(dense, CPU)) == ["mla"]

    def test_sparse_and_the_rest_exclude_each_other(self) -> None:
        sparse = variant(Generous, features=Generous.features | Feature.SPARSE)
        asking = spec(sparse=SparseSpec("token_topk", 2048))
        assert Generous.validate_configuration(asking, CPU) == ["sparse token_topk 2048 not supported"]
        assert sparse.validate_configuration(spec(), CPU) == ["non-sparse attention not supported"]
        assert sparse.validate_configuration(asking, CPU) == []

    def test_a_backend_may_serve_sparse_layers_and_others(self) -> None:
        both = variant(Generous, features=Generous.features | Feature.SPARSE, serves_dense=True)
        assert both.validate_configuration(spec(), CPU) == []
        assert both.validate_configuration(spec(sparse=SparseSpec("token_topk", 8)), CPU) == []
        assert variant(Generous, serves_dense=True).validate_configuration(spec(), CPU) == []

    def test_a_kind_of_selection_that_is_not_declared_is_refused_by_name(self) -> None:
        sparse = variant(Generous, features=Generous.features | Feature.SPARSE)
        (reason,) = sparse.validate_configuration(spec(sparse=SparseSpec("block", 16, 64)), CPU)
        assert str(reason) == "sparse block 16 of 64 tokens not supported: kind block is not token_topk"
        assert (reason.code, reason.field) == ("sparse", "sparse")
        blocks = variant(sparse, supported_sparse_kinds=("token_topk", "block"))
        assert blocks.validate_configuration(spec(sparse=SparseSpec("block", 16, 64)), CPU) == []

    @pytest.mark.parametrize(
        ("field", "method", "code"),
        [("has_sinks", "supports_sink", "sink"), ("mm_prefix", "supports_mm_prefix", "mm_prefix")],
    )
    def test_a_method_that_authors_know_can_answer_instead_of_the_flag(
        self, field: str, method: str, code: str
    ) -> None:
        asks = spec(**{field: True})
        assert codes(Plain.validate_configuration(asks, H100)) == [code]
        says_yes = variant(**{method: classmethod(lambda cls: True)})
        assert says_yes.validate_configuration(asks, H100) == []


class TestDevices:
    def test_a_device_type_is_named_with_those_served(self) -> None:
        reasons = Plain.validate_configuration(spec(), CPU)
        why = "Plain does not set device_types, whose default this is"
        assert reasons == [f"device type not supported: cpu is not cuda; {why}"]
        assert Picky.validate_configuration(spec(), CPU)[1] == "device type not supported: cpu is not cuda"
        assert (reasons[0].code, reasons[0].field) == ("device_type", "device.type")

    def test_a_device_of_another_type_has_no_capability_to_refuse(self) -> None:
        reasons = Picky.validate_configuration(spec(dtype="float16"), Device("rocm", (1, 0)), "decode")
        assert codes(reasons) == ["device_type"]

    def test_a_capability_is_refused_by_number(self) -> None:
        reasons = Picky.validate_configuration(spec(dtype="float16"), Device("cuda", (8, 6)), "decode")
        assert reasons == ["compute capability not supported: 8.6"]
        assert (reasons[0].code, reasons[0].field) == ("compute_capability", "device.capability")

    @pytest.mark.parametrize(("kind", "example"), [("cuda", "sm90"), ("rocm", "rocm:9.4")])
    def test_an_unknown_capability_is_refused_where_it_matters(self, kind: str, example: str) -> None:
        backend = variant(Picky, device_types=("cuda", "rocm"))
        reasons = backend.validate_configuration(spec(dtype="float16"), Device(kind), "decode")
        assert reasons == [f"compute capability not known; name the device with one, such as {example}"]
        assert codes(reasons) == ["compute_capability"]

    def test_an_unknown_capability_is_fine_where_none_is_asked(self) -> None:
        assert Plain.validate_configuration(spec(), Device("cuda")) == []
        assert (
            variant(Picky, device_types=("cpu",)).validate_configuration(spec(dtype="float16"), CPU, "decode")
            == []
        )


class TestRoles:
    @pytest.mark.parametrize("kind", ["encoder", "encoder_only", "encoder_decoder"])
    def test_an_attention_type_that_is_not_served_is_one_reason(self, kind: str) -> None:
        reasons = Plain.validate_configuration(spec(attn_type=kind), H100)
        assert reasons == [f"attention type not supported: {kind} is not decoder"]
        assert codes(reasons) == ["attn_type"]

    def test_an_encoder_that_is_served_still_needs_non_causal(self) -> None:
        backend = variant(features=Feature.ENCODER)
        assert codes(backend.validate_configuration(spec(attn_type="encoder"), H100)) == [
            "feature.non_causal"
        ]
        causal = spec(attn_type="encoder", causal=True)
        assert backend.validate_configuration(causal, H100) == []

    def test_a_decoder_that_is_not_causal_needs_the_feature(self) -> None:
        assert codes(Plain.validate_configuration(spec(causal=False), H100)) == ["feature.non_causal"]

    def test_attention_types_can_be_answered_by_a_method(self) -> None:
        only_cross = classmethod(lambda cls, kind: kind is AttentionType.ENCODER_DECODER)
        backend = variant(supports_attn_type=only_cross, features=Feature.NON_CAUSAL)
        assert backend.validate_configuration(spec(attn_type="encoder_decoder"), H100) == []
        assert backend.validate_configuration(spec(), H100) == [
            "attention type not supported: decoder is not encoder_decoder"
        ]

    @pytest.mark.parametrize(
        ("served", "asked", "text"),
        [
            (("decode", "prefill"), None, None),
            (tuple(Phase), Phase.PREFILL, None),
            ((Phase.DECODE,), Phase.DECODE, None),
            ((Phase.DECODE,), "prefill", "phase not supported: prefill is not decode"),
            ((Phase.DECODE,), None, "phase not supported: prefill is not decode; select per phase"),
            (("prefill",), None, "phase not supported: decode is not prefill; select per phase"),
            ((), None, "phase not supported: decode, prefill"),
            (tuple(Phase), "prefil", "phase not supported: prefil is not one of decode, prefill"),
        ],
    )
    def test_no_phase_asks_for_both(self, served: tuple[str, ...], asked: Any, text: str | None) -> None:
        reasons = variant(supported_phases=served).validate_configuration(spec(), H100, asked)
        assert reasons == ([] if text is None else [text])
        assert codes(reasons) == ([] if text is None else ["phase"])

    def test_a_combination_is_refused_in_the_backends_words(self) -> None:
        odd = spec(num_heads=3, num_kv_heads=3, dtype="float16")
        reasons = Picky.validate_configuration(odd, H100, Phase.DECODE)
        assert reasons == ["combination not supported: an even number of heads"]
        assert codes(reasons) == ["combination"]
