"""Composites of members that declare different things: each declaration, by which members it takes to make it true."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from composite_parts import SPEC, member

from attnplug.core import (
    AttentionType,
    Device,
    Feature,
    MLADims,
    MultipleOf,
    Phase,
    SparseSpec,
    composite_backend,
)
from attnplug.core.composite.pair import class_of, reference_of
from attnplug.core.errors import SpecError
from attnplug.core.mla.backend import MLADecodeBackend

CPU = Device("cpu")
ALL, NONE = member("ALL", features=~Feature(0)), member("NONE", features=Feature(0))
STATES = Feature.STATE | Feature.STATE_DRAFTS | Feature.STATE_CHECKPOINTS
UNSERVED = Feature.MLA | Feature.DIRECT_KV | Feature.ENCODER | STATES
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
LATENT = SPEC.replace(mla=DIMS)


def both_ways(one, other):
    return [composite_backend(one, other), composite_backend(other, one)]


def latents(name, **attributes):
    """A backend that decodes latents, of the parts of `member`."""
    parts = vars(member(name))
    names = ("get_name", "get_impl_cls", "get_builder_cls", "device_types", "supported_dtypes")
    return type(name, (MLADecodeBackend,), {each: parts[each] for each in names} | attributes)


@pytest.mark.parametrize("feature", list(Feature), ids=lambda flag: flag.names()[0])
def test_a_feature_is_served_where_both_serve_it_and_each_request_can_have_it_alone(feature):
    other = member("OTHER", features=~Feature(0))
    assert (feature in composite_backend(ALL, other).features) is (feature not in UNSERVED)
    for made in both_ways(ALL, member("LESS", features=~feature)):
        assert feature not in made.features
        assert made.features == ~UNSERVED & ~feature


@pytest.mark.parametrize("attn_type", list(AttentionType), ids=str)
def test_an_attention_type_is_served_where_both_serve_it_from_pages(attn_type):
    has_pages = attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
    others = member("OTHER", supports_attn_type=lambda kind: True)
    everything = member("EVERY", supports_attn_type=lambda kind: True)
    assert composite_backend(everything, others).supports_attn_type(attn_type) is has_pages
    for made in both_ways(everything, member("LESS", supports_attn_type=lambda kind: kind != attn_type)):
        assert not made.supports_attn_type(attn_type)


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        ("supports_dtype", "float16"),
        ("supports_head_size", 64),
        ("supports_block_size", 16),
        ("supports_compute_capability", (9, 0)),
    ],
)
def test_a_method_of_a_member_that_refuses_refuses_for_both(hook, value):
    yes = member("YES", **{hook: lambda asked: True})
    no = member("NO", **{hook: lambda asked: asked != value})
    assert getattr(composite_backend(yes, member("YES2", **{hook: lambda asked: True})), hook)(value)
    for made in both_ways(yes, no):
        assert not getattr(made, hook)(value)


@pytest.mark.parametrize("field", ["step_safe", "serves_dense"])
def test_a_promise_is_made_where_both_make_it(field):
    yes, no = member("YES", **{field: True}), member("NO", **{field: False})
    assert getattr(composite_backend(yes, member("YES2", **{field: True})), field) is True
    assert [getattr(made, field) for made in both_ways(yes, no)] == [False, False]


def test_sparse_kinds_are_those_of_both():
    features = Feature.SPARSE | Feature.LSE
    one = member("A", features=features, supported_sparse_kinds=("token_topk", "block"), serves_dense=True)
    other = member("B", features=features, supported_sparse_kinds=("block",), serves_dense=True)
    for made in both_ways(one, other):
        assert made.supported_sparse_kinds == ("block",)
        assert made.is_sparse()
        assert not made.validate_configuration(SPEC.replace(sparse=SparseSpec("block", 3, 16)), CPU)
        reasons = made.validate_configuration(SPEC.replace(sparse=SparseSpec("token_topk", 3)), CPU)
        assert [(reason.code, reason.field) for reason in reasons] == [("sparse", "sparse")]


def test_a_phase_is_served_by_its_member():
    only = member("P", supported_phases=(Phase.PREFILL,)), member("D", supported_phases=(Phase.DECODE,))
    assert composite_backend(*only).supported_phases == (Phase.PREFILL, Phase.DECODE)
    assert composite_backend(*reversed(only)).supported_phases == ()


def test_all_that_a_member_objects_to_is_said_once():
    made = composite_backend(
        member("A", supports_combination=lambda spec, device: "no Mondays"),
        member("B", supports_combination=lambda spec, device: "no Tuesdays"),
    )
    assert made.supports_combination(SPEC, CPU) == "A: no Mondays; B: no Tuesdays"
    (reason,) = made.validate_configuration(SPEC, CPU)
    assert str(reason).count("no Mondays") == str(reason).count("no Tuesdays") == 1


def test_a_preferred_block_size_that_the_other_cannot_read_is_left_for_the_others():
    fixed = {"get_supported_kernel_block_sizes": lambda spec=None, device=None: (16, 32)}
    odd = member("A", get_preferred_block_size=lambda spec=None, device=None, default=16: 64)
    assert composite_backend(member("B", **fixed), odd).get_preferred_block_size(SPEC, CPU, 32) == 32
    wide = member("C", get_preferred_block_size=lambda spec=None, device=None, default=16: 32, **fixed)
    assert composite_backend(wide, odd).get_preferred_block_size(SPEC, CPU) == 32
    assert composite_backend(odd, wide).get_preferred_block_size(SPEC, CPU) == 32


def test_pages_are_split_as_the_decoding_member_splits_them():
    torch = pytest.importorskip("torch")
    pages = torch.arange(2 * 2 * 4 * 8.0).view(2, 2, 4, 1, 8)
    swapped = member("A", split_kv=lambda cache, spec: (cache[:, 1], cache[:, 0]))
    made = composite_backend(swapped, member("B"))
    assert torch.equal(made.split_kv(pages, SPEC)[0], pages[:, 0])
    assert [reason.field for reason in made.validate_configuration(SPEC, CPU)] == ["split_kv"]


@pytest.mark.parametrize("sizes", [{}, {"head_size_v": 4}, {"kv_cache_dtype": "fp8"}])
def test_a_cache_has_the_members_shape(sizes):
    spec = SPEC.replace(**sizes)
    given = 3, 16, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v
    one = member("ONE")
    assert composite_backend(NONE, one).get_kv_cache_shape(*given) == one.get_kv_cache_shape(*given)


def test_pages_of_other_shapes_are_not_shared():
    flat = member(
        "A", get_kv_cache_shape=lambda blocks, size, heads, head, dtype="auto", v=None: (blocks, size)
    )
    (reason,) = composite_backend(flat, member("B")).validate_configuration(SPEC, CPU)
    assert str(reason) == "cache shapes of 4 blocks of 16 differ: A has (4, 16), B has (4, 2, 16, 1, 8)"
    assert (reason.code, reason.field) == ("kv_cache_layout", "shape")


def test_what_is_no_backend_is_refused():
    for pair, name in (((ALL, object), "decode"), ((3, ALL), "prefill")):
        with pytest.raises(SpecError, match=f"{name}.*must be a subclass of AttentionBackend"):
            composite_backend(*pair)


@dataclasses.dataclass(frozen=True)
class Fixed:
    tiles: int = 1
    made: int = dataclasses.field(default=7, init=False)


def test_a_field_that_nobody_gives_is_no_option():
    made = composite_backend(member("A-1", Options=Fixed), member("B"))
    assert [field.name for field in dataclasses.fields(made.Options)] == ["prefill_tiles"]
    assert (made.Options.__name__, made.Options.__doc__) == (
        "A1BOptions",
        "The options of both members of A-1+B.",
    )


# Layers that another class serves


def test_latent_layers_are_served_by_the_decoding_member_with_the_other_for_its_prefill():
    decodes, prefills = latents("DECODES"), member("PREFILLS")
    made = composite_backend(prefills, decodes)
    assert made.for_layer(SPEC) is made
    serving = made.for_layer(LATENT)
    assert serving is decodes.with_prefill(prefills)
    assert (serving.prefill, serving.get_name()) == (prefills, "PREFILLS+DECODES")
    assert issubclass(serving, decodes)
    assert composite_backend(decodes, prefills).for_layer(LATENT) is composite_backend(decodes, prefills)


def test_a_class_with_a_prefill_gets_another_and_keeps_its_own_decode():
    decodes, one, two = latents("DECODES"), member("ONE"), member("TWO")
    first = decodes.with_prefill(one)
    assert decodes.with_prefill(one) is first is first.with_prefill(one)
    assert first.with_prefill(two) is decodes.with_prefill(two)


def test_a_pair_of_latents_declares_what_both_do():
    decodes = latents("D", device_types=("cuda", "cpu"), requires=("x", "y"), step_safe=True)
    prefills = member("P", device_types=("cpu", "rocm"), requires=("y", "z"), step_safe=True)
    made = decodes.with_prefill(prefills)
    assert made.device_types == ("cpu",)
    assert made.requires == ("y", "z", "x")
    assert made.supported_phases == tuple(Phase)
    assert made.step_safe is True
    assert decodes.with_prefill(member("SLOW")).step_safe is False
    assert latents("SLOWER").with_prefill(prefills).step_safe is False
    assert made.features == decodes.features
    assert latents("P").with_prefill(prefills).get_name() == "P"


def test_sparse_latents_need_no_prefill():
    decodes = latents("D", features=MLADecodeBackend.features | Feature.SPARSE)
    sparse = LATENT.replace(sparse=SparseSpec("token_topk", 4))
    made = composite_backend(member("P"), decodes)
    assert made.for_layer(sparse) is made
    selecting = decodes.for_layer(sparse)
    assert (selecting.is_selecting, selecting.prefill, selecting.serves_dense) == (True, None, False)
    assert decodes.with_prefill(member("P2")).for_layer(sparse) is selecting
    with pytest.raises(SpecError, match="sparse layers decode every query"):
        selecting.with_prefill(member("P3"))


def test_the_prefill_of_latents_refuses_with_its_name_and_for_its_phase_only():
    decodes = latents("D")
    made = decodes.with_prefill(member("P", get_supported_head_sizes=lambda: (MultipleOf(64),)))
    texts = [str(reason) for reason in made.validate_configuration(LATENT, CPU)]
    assert texts[0].startswith("expanded prefill on P: head_size not supported: 8 is not")
    assert all(text.startswith("expanded prefill on P: ") for text in texts)
    assert made.validate_configuration(LATENT, CPU, Phase.PREFILL) == made.validate_configuration(LATENT, CPU)
    assert made.validate_configuration(LATENT, CPU, Phase.DECODE) == []


def test_both_kinds_of_pairs_are_found_again_by_their_references():
    from attnplug.backends.torch_native import TorchBackend
    from attnplug.backends.torch_native.backend import TorchMLABackend
    from attnplug.backends.triton import TritonBackend

    for made in (
        composite_backend(TorchBackend, TritonBackend),
        TorchMLABackend.with_prefill(TritonBackend),
        TorchBackend,
    ):
        assert class_of(pickle.loads(pickle.dumps(reference_of(made)))) is made
    assert reference_of(composite_backend(ALL, TorchBackend)) is None
    assert class_of(None) is None
