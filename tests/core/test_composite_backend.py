"""What a composite declares: what both members can do, and what keeps them apart."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from composite_parts import SPEC, member

from attnplug.core import (
    CompositeBackend,
    Device,
    Feature,
    MLADims,
    MultipleOf,
    Phase,
    Reason,
    composite_backend,
)
from attnplug.core.errors import LayoutError, SpecError

CPU = Device("cpu")
ONE, TWO = member("ONE"), member("TWO", number=2.0)


def why(composite, spec=SPEC, device=CPU, phase=None):
    return [str(reason) for reason in composite.validate_configuration(spec, device, phase)]


def test_it_is_named_after_both_the_prefilling_one_first():
    made = composite_backend(ONE, TWO)
    assert made.get_name() == "ONE+TWO"
    assert issubclass(made, CompositeBackend)
    assert made.members() == {Phase.PREFILL: ONE, Phase.DECODE: TWO}
    assert why(made) == []


def test_the_same_two_give_the_same_class():
    assert composite_backend(ONE, TWO) is composite_backend(ONE, TWO)
    assert composite_backend(ONE, TWO) is not composite_backend(TWO, ONE)


def test_of_one_backend_twice_there_is_no_composite():
    assert composite_backend(ONE, ONE) is ONE


def test_of_a_composite_the_half_that_is_meant_is_taken():
    both, three = composite_backend(ONE, TWO), member("THREE")
    assert composite_backend(both, three) is composite_backend(ONE, three)
    assert composite_backend(three, both) is composite_backend(three, TWO)
    assert composite_backend(both, both) is both


def test_it_declares_what_both_do():
    made = composite_backend(
        member(
            "A", device_types=("cpu", "cuda"), supported_dtypes=("float16", "float32"), requires=("x>=1", "y")
        ),
        member(
            "B", device_types=("cuda", "rocm"), supported_dtypes=("float32",), requires=("y",), step_safe=True
        ),
    )
    assert made.device_types == ("cuda",)
    assert made.supported_dtypes == ("float32",)
    assert made.requires == ("x>=1", "y")
    assert made.step_safe is False
    assert set(made.supported_phases) == set(Phase)


def test_what_is_not_each_requests_own_affair_is_not_served():
    features = composite_backend(ONE, TWO).features
    assert Feature.SINKS | Feature.SLIDING_WINDOW | Feature.CROSS in features
    for feature in (Feature.DIRECT_KV, Feature.ENCODER):
        assert feature not in features


def test_fp8_has_two_names():
    made = composite_backend(
        member("A", supported_kv_cache_dtypes=("auto", "fp8")),
        member("B", supported_kv_cache_dtypes=("fp8_e4m3", "auto")),
    )
    assert made.supported_kv_cache_dtypes == ("auto", "fp8_e4m3")
    assert why(made, SPEC.replace(kv_cache_dtype="fp8")) == []


def test_sizes_are_those_of_both():
    made = composite_backend(
        member("A", get_supported_head_sizes=lambda: (8, 64, MultipleOf(96))),
        member("B", get_supported_head_sizes=lambda: (MultipleOf(64), 8, 96)),
    )
    assert set(made.get_supported_head_sizes()) == {8, 64, 96, MultipleOf(192)}
    assert [size for size in (8, 64, 96, 128, 192) if made.supports_head_size(size)] == [8, 64, 96, 192]


def test_no_limit_and_a_limit_are_the_limit():
    limited = member("A", get_supported_head_sizes=lambda: (64,))
    assert composite_backend(limited, TWO).get_supported_head_sizes() == (64,)
    assert composite_backend(TWO, limited).get_supported_head_sizes() == (64,)


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "size"),
    [((16, 32), (32, 64), 32), ((MultipleOf(48),), (MultipleOf(32),), 96), ((16, 64), (MultipleOf(1),), 16)],
)
def test_the_preferred_block_size_is_one_that_both_read(of_prefill, of_decode, size):
    made = composite_backend(
        member("A", get_supported_kernel_block_sizes=lambda spec=None, device=None: of_prefill),
        member("B", get_supported_kernel_block_sizes=lambda spec=None, device=None: of_decode),
    )
    assert made.get_preferred_block_size(SPEC, CPU) == size
    assert MultipleOf.allows(made.get_supported_kernel_block_sizes(), size)


def test_sizes_that_one_leaves_out_are_left_out():
    odd = member(
        "A", get_supported_kernel_block_sizes=lambda spec=None, device=None: (MultipleOf(16, (64,)),)
    )
    sizes = composite_backend(odd, TWO).get_supported_kernel_block_sizes()
    assert [size for size in (16, 64, 80) if MultipleOf.allows(sizes, size)] == [16, 80]


def test_a_phase_has_its_members_priority_and_both_the_mean():
    made = composite_backend(
        member("A", get_priority=lambda spec, device, phase: 300 if phase == "prefill" else 7),
        member("B", get_priority=lambda spec, device, phase: 101 if phase == "decode" else 7),
    )
    assert [made.get_priority(SPEC, CPU, phase) for phase in (Phase.PREFILL, Phase.DECODE, None)] == [
        300,
        101,
        200,
    ]


def test_a_compile_key_is_both_keys():
    keyed = member("A", compile_key=lambda spec: spec.head_size)
    assert composite_backend(keyed, TWO).compile_key(SPEC) == (8, None)
    assert composite_backend(ONE, TWO).compile_key(SPEC) is None


# Refusals


def test_a_refusal_names_the_phase_and_the_member():
    made = composite_backend(ONE, member("B", features=Feature(0)))
    (reason,) = made.validate_configuration(SPEC.replace(has_sinks=True), CPU)
    assert str(reason) == "decode on B: sinks not supported"
    assert (reason.code, reason.field) == ("sink", "has_sinks")


def test_what_both_refuse_is_one_reason():
    made = composite_backend(ONE, TWO)
    assert why(made, SPEC.replace(dtype="float16")) == [
        "prefill on ONE and decode on TWO: dtype not supported: float16 is not one of float32, bfloat16"
    ]


def test_what_both_refuse_in_other_words_is_one_reason_with_both():
    made = composite_backend(
        member("A", get_supported_head_sizes=lambda: (64,)),
        member("B", get_supported_head_sizes=lambda: (64, 96)),
    )
    (text,) = why(made)
    assert text == (
        "prefill on A: head_size not supported: 8 is not 64; "
        "decode on B: head_size not supported: 8 is not one of 64, 96"
    )


def test_a_member_is_asked_for_its_own_phase_only():
    made = composite_backend(
        member("A", supported_phases=(Phase.PREFILL,)), member("B", supported_phases=(Phase.DECODE,))
    )
    assert why(made) == why(made, phase=Phase.PREFILL) == why(made, phase=Phase.DECODE) == []


def test_members_the_wrong_way_round_are_refused():
    made = composite_backend(
        member("A", supported_phases=(Phase.DECODE,)), member("B", supported_phases=(Phase.PREFILL,))
    )
    (text,) = why(made)
    assert text.startswith("prefill on A: phase not supported: prefill is not decode; decode on B: phase")


def test_combinations_are_refused_with_the_members_name():
    made = composite_backend(member("A", supports_combination=lambda spec, device: "not on Mondays"), TWO)
    assert made.supports_combination(SPEC, CPU) == "A: not on Mondays"
    assert why(made) == ["prefill on A: combination not supported: not on Mondays"]


def test_plain_sentences_of_ported_backends_are_reasons():
    ported = member("A", validate_configuration=lambda spec, device, phase=None: ["no kernels"])
    (reason,) = composite_backend(ported, TWO).validate_configuration(SPEC, CPU)
    assert isinstance(reason, Reason)
    assert (str(reason), reason.code) == ("prefill on A: no kernels", "combination")


@pytest.mark.parametrize(
    ("fields", "codes"),
    [
        ({"direct_kv": True}, ["feature.direct_kv"]),
        ({"attn_type": "encoder_only", "direct_kv": True}, ["feature.direct_kv", "attn_type"]),
    ],
)
def test_layers_that_cannot_be_cut_are_refused_though_both_members_serve_them(fields, codes):
    reasons = composite_backend(ONE, TWO).validate_configuration(SPEC.replace(**fields), CPU)
    assert [reason.code for reason in reasons] == codes


def test_latent_attention_is_refused():
    dims = MLADims(q_lora_rank=None, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    reasons = composite_backend(ONE, TWO).validate_configuration(SPEC.replace(mla=dims), CPU)
    assert {reason.code for reason in reasons} == {"mla"}


def test_a_block_size_that_is_given_is_each_members_own_matter():
    made = composite_backend(
        member("A", get_supported_kernel_block_sizes=lambda spec=None, device=None: (16,)),
        member("B", get_supported_kernel_block_sizes=lambda spec=None, device=None: (32,)),
    )
    assert why(made) == ["block sizes differ: A has 16, B has 32"]
    assert [text.split(":")[0] for text in why(made, SPEC.replace(block_size=16))] == ["decode on B"]


def test_layouts_of_one_name_and_other_strides_are_told_apart():
    flat = member(
        "A", get_kv_cache_stride_order=lambda layers=False, *, layout=None, spec=None: (1, 0, 2, 3, 4)
    )
    (text,) = why(composite_backend(flat, TWO))
    assert text.startswith(
        "stride orders of NHD differ: A has (1, 0, 2, 3, 4) and (1, 0, 2, 3, 4), TWO has (0, 1"
    )


def test_a_layout_that_they_do_not_share_cannot_be_asked_for():
    made = composite_backend(member("A", supported_kv_cache_layouts=lambda: ("NHD",)), TWO)
    assert made.supported_kv_cache_layouts() == ("NHD",)
    assert made.get_kv_cache_stride_order(spec=SPEC) == TWO.get_kv_cache_stride_order(layout="NHD", spec=SPEC)
    with pytest.raises(LayoutError, match=r"must be one that both halves of A\+TWO read: NHD"):
        made.get_kv_cache_stride_order(layout="HND")


def test_a_gpu_must_be_one_for_both():
    hopper = member("A", supports_compute_capability=lambda capability: capability >= (9, 0))
    made = composite_backend(hopper, TWO)
    assert why(made, device=Device("cuda", (9, 0))) == []
    assert [text.split(":")[1] for text in why(made, device=Device("cuda", (8, 0)))] == [
        " compute capability not supported"
    ]
    assert "not known" in why(made, device=Device("cuda"))[0]
    assert why(composite_backend(ONE, TWO), device=Device("cuda")) == []


# Options


@dataclasses.dataclass(frozen=True)
class Splits:
    splits: int = 4
    names: tuple[str, ...] = dataclasses.field(default_factory=tuple)

    def __post_init__(self):
        if self.splits < 1:
            raise ValueError("splits must be at least 1")


def test_options_of_both_members_stand_side_by_side():
    made = composite_backend(member("A", Options=Splits), member("B", Options=Splits))
    options = made.Options
    assert dataclasses.asdict(options(decode_splits=2)) == {
        "prefill_splits": 4,
        "prefill_names": (),
        "decode_splits": 2,
        "decode_names": (),
    }
    assert hash(options()) == hash(options())
    with pytest.raises(ValueError, match="splits must be at least 1"):
        options(prefill_splits=0)


def test_without_options_of_a_member_there_are_none():
    assert composite_backend(ONE, TWO).Options is None


def test_members_get_their_own_options():
    made = composite_backend(member("A"), member("B", Options=Splits))
    impls = (
        made.get_impl_cls()
        .from_spec(SPEC, backend=made, layer_name="l", options=made.Options(decode_splits=2))
        .members
    )
    assert impls[Phase.PREFILL].options is None
    assert impls[Phase.DECODE].options == Splits(2)
    impls = made.get_impl_cls().from_spec(SPEC, backend=made, layer_name="l").members
    assert impls[Phase.DECODE].options == Splits()


def test_members_that_lay_pages_out_differently_share_none():
    wide = member("WIDE", get_kv_cache_shape=lambda blocks, size, heads, head_size, *rest: (blocks, size, 7))
    shape = ONE.get_kv_cache_shape(4, 16, 1, 8, "auto", 8)
    assert f"cache shapes of 4 blocks of 16 differ: WIDE has (4, 16, 7), ONE has {shape}" in why(
        composite_backend(wide, ONE)
    )
    split = member("SPLIT", split_kv=lambda kv_cache, spec: (kv_cache, kv_cache))
    assert "SPLIT and ONE split K and V of a page differently" in why(composite_backend(split, ONE))
    tiled = member("TILED", supported_kv_cache_layouts=lambda: ("TILED",))
    assert "KV layouts differ: TILED has TILED, ONE has NHD, HND" in why(composite_backend(tiled, ONE))


def test_the_shape_and_the_split_of_pages_are_the_members():
    made = composite_backend(ONE, TWO)
    sizes = 3, 16, 1, 8, "auto", 8
    shape = made.get_kv_cache_shape(*sizes)
    assert shape == TWO.get_kv_cache_shape(*sizes)
    cache = torch.arange(float(np.prod(shape))).view(shape)
    for own, theirs in zip(made.split_kv(cache, SPEC), TWO.split_kv(cache, SPEC), strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize(("halves", "text"), [((3, ONE), "prefill=3"), ((ONE, int), "decode=<class 'int'>")])
def test_only_backends_have_a_composite(halves, text):
    with pytest.raises(SpecError) as caught:
        composite_backend(*halves)
    assert str(caught.value) == f"{text} must be a subclass of AttentionBackend"
