"""What a LayerSpec takes, what it fills in, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from spec_strategies import MLA_SIZES, SIZES, spec_arguments

from attnplug.core import AttentionType, Feature, LayerSpec, MLADims, Phase, SparseSpec
from attnplug.core.checks import check_positive
from attnplug.core.state.dims import StateDims
from attnplug.errors import SpecError


def refusal(**arguments: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        LayerSpec(**{**SIZES, **arguments})
    return caught.value


def test_the_sizes_are_all_that_must_be_given() -> None:
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)
    assert (spec.head_size_v, spec.dtype, spec.kv_cache_dtype, spec.block_size) == (
        64,
        "bfloat16",
        "auto",
        None,
    )
    assert (spec.attn_type, spec.causal, spec.scale) == (AttentionType.DECODER, True, 64**-0.5)
    assert (spec.window, spec.sliding_window, spec.chunk_size) == ((-1, 0), None, None)
    assert (spec.logits_soft_cap, spec.mla) == (None, None)
    assert spec.sparse is None
    flags = (spec.has_sinks, spec.has_alibi, spec.mm_prefix, spec.direct_kv, spec.needs_lse)
    assert flags == (False,) * 5


@pytest.mark.parametrize("missing", SIZES)
def test_a_size_left_out_is_a_missing_argument(missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        LayerSpec(**{name: size for name, size in SIZES.items() if name != missing})


def test_arguments_go_by_name_only() -> None:
    with pytest.raises(TypeError):
        LayerSpec(8, 2, 64)  # type: ignore[misc]


@pytest.mark.parametrize("field", [*SIZES, "head_size_v", "block_size", "chunk_size", "sliding_window"])
@pytest.mark.parametrize("value", [0, -1, True, False, 64.0, "64", math.nan, [64]])
def test_a_size_is_an_integer_of_at_least_one(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert (error.field, error.value) == (field, value) or value is math.nan
    assert str(error) == f"{field}={value!r} must be an integer of at least 1"


def test_sizes_of_numpy_become_ints() -> None:
    spec = LayerSpec(num_heads=np.int64(8), num_kv_heads=np.int32(2), head_size=np.uint8(64))
    assert [type(size) for size in (spec.num_heads, spec.num_kv_heads, spec.head_size)] == [int] * 3
    assert spec == LayerSpec(**SIZES)


def test_heads_must_divide_among_the_kv_heads() -> None:
    assert str(refusal(num_heads=7)) == "num_heads=7 must be a multiple of num_kv_heads=2"


@pytest.mark.parametrize(
    ("wrong", "right"), [("bf16", "bfloat16"), ("flaot32", "float32"), ("float", "float32"), ("half", None)]
)
def test_an_unknown_dtype_is_refused_with_the_nearest_name(wrong: str, right: str | None) -> None:
    error = refusal(dtype=wrong)
    assert str(error).startswith(f"dtype={wrong!r} must be one of float16, bfloat16, float32")
    assert error.remedy is None if right is None else error.remedy == f"did you mean {right!r}?"


@pytest.mark.parametrize("value", [None, 16, np.float32, object(), torch.device("cpu")])
def test_what_is_no_dtype_at_all_is_refused(value: object) -> None:
    assert "must be a dtype name such as 'bfloat16', or a torch.dtype" in str(refusal(dtype=value))


def test_torch_dtypes_become_names() -> None:
    spec = LayerSpec(**SIZES, dtype=torch.float16, kv_cache_dtype=torch.bfloat16)
    assert (spec.dtype, spec.kv_cache_dtype) == ("float16", "bfloat16")
    assert LayerSpec(**SIZES, dtype="torch.float32").dtype == "float32"
    assert refusal(dtype=torch.float64).value is torch.float64


def test_a_torch_dtype_is_understood_without_importing_torch() -> None:
    code = """
import sys
class dtype:
    def __repr__(self):
        return "torch.float16"
dtype.__module__ = "torch"
from attnplug.core import LayerSpec
print(LayerSpec(num_heads=1, num_kv_heads=1, head_size=64, dtype=dtype()).dtype, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["float16", "False"]


@pytest.mark.parametrize(
    ("given_dtype", "kept", "resolved", "quantized"),
    [
        ("auto", "auto", "bfloat16", False),
        ("bfloat16", "bfloat16", "bfloat16", False),
        ("fp8", "fp8", "fp8_e4m3", True),
        ("fp8_e5m2", "fp8_e5m2", "fp8_e5m2", True),
        (torch.float8_e4m3fn, "fp8_e4m3", "fp8_e4m3", True),
        (torch.float8_e5m2, "fp8_e5m2", "fp8_e5m2", True),
        (torch.float8_e4m3fnuz, "fp8_e4m3fnuz", "fp8_e4m3fnuz", True),
        ("int8", "int8", "int8", True),
        ("nvfp4", "nvfp4", "nvfp4", True),
        ("of_next_year", "of_next_year", "of_next_year", False),
    ],
)
def test_kv_cache_dtypes_are_open_strings(
    given_dtype: object, kept: str, resolved: str, quantized: bool
) -> None:
    spec = LayerSpec(**SIZES, kv_cache_dtype=given_dtype)
    assert (spec.kv_cache_dtype, spec.resolved_kv_cache_dtype) == (kept, resolved)
    assert spec.has_quantized_kv_cache is quantized


@pytest.mark.parametrize("value", ["", None, 8])
def test_a_kv_cache_dtype_has_a_name(value: object) -> None:
    assert refusal(kv_cache_dtype=value).field == "kv_cache_dtype"


@pytest.mark.parametrize("field", ["scale", "logits_soft_cap"])
@pytest.mark.parametrize(
    "value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, "1.0", b"1", [], 10**400]
)
def test_scale_and_soft_cap_are_finite_and_above_zero(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert error.field == field
    assert "must be a finite number above 0" in str(error)


def test_a_soft_cap_of_zero_is_told_how_to_ask_for_none() -> None:
    assert refusal(logits_soft_cap=0.0).remedy == "None means no cap"
    assert check_positive("scale", 2) == 2.0


def test_numbers_become_floats() -> None:
    spec = LayerSpec(**SIZES, scale=np.float32(0.5), logits_soft_cap=50)
    assert (type(spec.scale), type(spec.logits_soft_cap)) == (float, float)


@pytest.mark.parametrize("field", ["has_sinks", "has_alibi", "mm_prefix", "direct_kv", "needs_lse", "causal"])
@pytest.mark.parametrize("value", [0, 1, "yes", torch.tensor(True)])
def test_a_flag_is_true_or_false_and_nothing_like_it(field: str, value: object) -> None:
    assert str(refusal(**{field: value})).endswith("must be True or False")


@pytest.mark.parametrize("value", ["decodr", None, 3, []])
def test_an_unknown_attn_type_is_refused_with_the_list(value: object) -> None:
    error = refusal(attn_type=value)
    assert str(error).endswith("must be one of decoder, encoder, encoder_only, encoder_decoder")


@pytest.mark.parametrize("kind", AttentionType)
def test_only_decoders_are_causal_by_default(kind: AttentionType) -> None:
    spec = LayerSpec(**SIZES, attn_type=kind.value)
    assert spec.attn_type is kind
    assert spec.causal is (kind is AttentionType.DECODER)


@pytest.mark.parametrize("member", [*AttentionType, *Phase])
def test_members_are_the_text_they_stand_for(member: AttentionType | Phase) -> None:
    assert isinstance(member, str)
    assert (str(member), f"{member}", {member: 1}[member.value]) == (member.value, member.value, 1)


def test_causality_can_be_stated_against_the_default() -> None:
    assert LayerSpec(**SIZES, causal=False).causal is False
    assert LayerSpec(**SIZES, attn_type="encoder_only", causal=True).causal is True


def test_cross_attention_is_never_causal() -> None:
    error = refusal(attn_type="encoder_decoder", causal=True)
    assert (error.field, error.value) == ("causal", True)
    assert "cross attention" in str(error)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LayerSpec)])
def test_a_spec_cannot_be_changed(field: str) -> None:
    spec = LayerSpec(**SIZES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(spec, field, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(spec, field)
    assert not hasattr(spec, "__dict__")


@given(spec_arguments())
def test_attributes_have_exact_types(arguments: dict[str, Any]) -> None:
    spec = LayerSpec(**arguments)
    exact: dict[str, Any] = dict.fromkeys(("num_heads", "num_kv_heads", "head_size", "head_size_v"), int)
    exact |= {"dtype": str, "kv_cache_dtype": str, "attn_type": AttentionType, "causal": bool, "scale": float}
    exact |= dict.fromkeys(
        ("has_sinks", "has_alibi", "mm_prefix", "direct_kv", "needs_lse", "head_scales"), bool
    )
    optional: dict[str, Any] = {"block_size": int, "chunk_size": int, "logits_soft_cap": float}
    optional |= {"mla": MLADims, "sparse": SparseSpec, "state": StateDims}
    for name, kind in exact.items():
        assert type(getattr(spec, name)) is kind, name
    for name, kind in optional.items():
        assert getattr(spec, name) is None or type(getattr(spec, name)) is kind, name
    assert [type(side) for side in spec.window] == [int, int]
    assert type(spec.window) is tuple
    assert type(spec.invariance) is tuple
    assert {*exact, *optional, "window", "invariance"} == {f.name for f in dataclasses.fields(spec) if f.init}


class TestMLA:
    def test_sizes_and_scale_follow_from_the_dimensions(self) -> None:
        spec = LayerSpec(**MLA_SIZES)
        assert (spec.head_size, spec.head_size_v) == (512 + 64, 512)
        assert spec.scale == (128 + 64) ** -0.5

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"num_kv_heads": 2}, "num_kv_heads=2 must be 1 with mla"),
            ({"head_size": 128}, "head_size=128 must be kv_lora_rank + qk_rope_head_dim = 576 with mla"),
            ({"head_size_v": 128}, "head_size_v=128 must be kv_lora_rank = 512 with mla"),
            ({"mla": {"kv_lora_rank": 512}}, "must be an MLADims or None"),
            ({"attn_type": "encoder"}, "is for decoder layers, not encoder"),
        ],
    )
    def test_what_does_not_fit_the_dimensions_is_refused(self, changes: dict[str, Any], text: str) -> None:
        with pytest.raises(SpecError) as caught:
            LayerSpec(**{**MLA_SIZES, **changes})
        assert text in str(caught.value)

    def test_the_value_size_may_be_stated_as_it_follows(self) -> None:
        assert LayerSpec(**MLA_SIZES, head_size_v=512) == LayerSpec(**MLA_SIZES)

    @pytest.mark.parametrize("field", MLADims.__slots__)
    @pytest.mark.parametrize("value", [0, -1, 1.5, True])
    def test_dimensions_are_integers_of_at_least_one_but_for_positions_of_none(
        self, field: str, value: object
    ) -> None:
        least = 0 if field == "qk_rope_head_dim" else 1
        if value == least and value is not True:
            assert dataclasses.replace(MLA_SIZES["mla"], qk_rope_head_dim=0).latent_size == 512
            return
        with pytest.raises(SpecError, match=rf"mla\.{field}=.*at least {least}"):
            dataclasses.replace(MLA_SIZES["mla"], **{field: value})

    def test_a_call_passes_queries_and_outputs_of_heads_and_the_expanded_layer_has_their_sizes(self) -> None:
        spec = LayerSpec(**MLA_SIZES, kv_cache_dtype="fp8", block_size=64, scale=0.25)
        assert (spec.query_size, spec.output_size) == (192, 128)
        expanded = spec.expanded()
        assert (expanded.num_kv_heads, expanded.head_size, expanded.head_size_v) == (16, 192, 128)
        assert (expanded.scale, expanded.dtype, expanded.kv_cache_dtype) == (0.25, spec.dtype, "auto")
        asked = Feature.DIRECT_KV | Feature.LSE | Feature.NON_CAUSAL | Feature.HEAD_SIZE_V
        assert expanded.required_features() == asked

    def test_layers_of_other_kinds_have_nothing_to_expand(self) -> None:
        spec = LayerSpec(**SIZES)
        assert (spec.query_size, spec.output_size) == (spec.head_size, spec.head_size_v)
        with pytest.raises(SpecError, match="mla=None is required"):
            spec.expanded()

    def test_only_the_query_rank_may_be_none(self) -> None:
        dims = MLA_SIZES["mla"]
        assert dims.q_lora_rank is None
        with pytest.raises(SpecError):
            dataclasses.replace(dims, kv_lora_rank=None)
