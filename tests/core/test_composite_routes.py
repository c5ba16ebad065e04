"""Composites of several members: each kind of step reaches the member that its route names."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from composite_parts import (
    ONE,
    SPEC,
    TWO,
    CapturesNothing,
    DecodesFirst,
    NeedsLengths,
    RecordingImpl,
    member,
    rows,
)
from hypothesis import given
from hypothesis import strategies as st
from sample_batches import KV_SPEC, batch

from attnplug.core import (
    AttentionCGSupport,
    BuilderConfig,
    Device,
    LayerSpec,
    MLADims,
    Phase,
    composite_backend,
)
from attnplug.core.composite.pair import class_of, reference_of
from attnplug.core.composite.steps import StepKind, StepRange
from attnplug.core.errors import BatchError, SpecError

THREE = member("THREE", number=3.0)
SHORT = StepRange(StepKind.PREFILL, query=(1, 4))
DRAFT, MIXED_STEP = StepRange(StepKind.DRAFT), StepRange(StepKind.MIXED, rows=(1, 9), keys=(1, 20))
FEW = StepRange(StepKind.DECODE, requests=(1, 2))
ROUTES = (SHORT, THREE), (DRAFT, THREE), (MIXED_STEP, ONE), (FEW, THREE)


@pytest.fixture
def calls():
    RecordingImpl.calls.clear()
    return RecordingImpl.calls


def routed(routes=ROUTES, prefill=ONE, decode=TWO):
    return composite_backend(prefill, decode, routes)


def builder_of(backend, **config):
    return backend.get_builder_cls()(KV_SPEC, ["l"], BuilderConfig(**config), torch.device("cpu"))


def attended(backend, lengths, **config):
    """The number of the member that wrote each row."""
    impl = backend.get_impl_cls().from_spec(SPEC, backend=backend, layer_name="l")
    common = batch(*lengths)
    metadata = builder_of(backend, **config).build(0, common)
    tokens = common.num_actual_tokens
    output = torch.full((tokens, 2, 8), torch.nan)
    impl.forward(None, rows(tokens), rows(tokens, 1), rows(tokens, 1), torch.zeros(1), metadata, output)
    return output[:, 0, 0].tolist()


# Each step reaches its member


@pytest.mark.parametrize(
    ("new", "members"),
    [
        ([1, 1, 1], [2, 2, 2]),
        ([1, 1], [3, 3]),
        ([2, 3], [3] * 5),
        ([4, 4], [3] * 8),
        ([4, 5], [1] * 9),
        ([1, 6], [1] * 7),
        ([1, 2, 6], [1] * 9),
        # Past the rows of the route, the step is cut, and the routes of its parts choose.
        ([1, 1, 9], [3, 3] + [1] * 9),
        ([1, 1, 1, 9], [2] * 3 + [1] * 9),
        ([1, 3, 9], [3] * 4 + [1] * 9),
        ([1] * 6 + [4], [2] * 6 + [3] * 4),
    ],
)
def test_each_step_reaches_the_member_that_its_route_names(calls, new, members):
    assert attended(routed(), (new, [9] * len(new)), num_speculative_tokens=2) == members


def test_a_mixed_step_with_a_longer_request_is_cut(calls):
    assert attended(routed(), ([1, 6], [21, 9])) == [3] + [1] * 6


def test_a_mixed_step_whose_parts_have_one_member_is_not_cut(calls):
    assert attended(routed(((SHORT, TWO),)), ([1, 1, 3], [9, 9, 9])) == [2] * 5
    assert [call[:2] for call in calls] == [(2.0, "write"), (2.0, "attend")]
    made = routed(((SHORT, THREE),), ONE, ONE)
    calls.clear()
    assert attended(made, ([1, 1, 5], [9, 9, 9])) == [1] * 7
    assert len(calls) == 2


def test_the_decoding_half_writes_for_all_members(calls):
    attended(routed(), ([4, 4], [9, 9]))
    assert [call[:2] for call in calls] == [(2.0, "write"), (3.0, "attend")]


def test_the_first_route_that_has_a_step_decides(calls):
    routes = (SHORT, THREE), (StepRange(StepKind.PREFILL), TWO)
    assert attended(routed(routes), ([4], [9])) == [3] * 4
    assert attended(routed(routes), ([5], [9])) == [2] * 5


def test_one_backend_in_both_phases_can_have_routes(calls):
    made = routed(((SHORT, THREE),), ONE, ONE)
    assert attended(made, ([4], [9])) == [3] * 4
    assert attended(made, ([1, 5], [9, 9])) == [1] * 6


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=7),
    st.lists(
        st.tuples(
            st.sampled_from(StepKind),
            st.integers(1, 10),
            st.integers(1, 5),
            st.sampled_from([ONE, TWO, THREE]),
        ),
        max_size=4,
    ),
    st.integers(0, 3),
)
def test_any_step_and_any_routes_agree_with_a_plain_reading_of_them(new, drawn, drafts):
    RecordingImpl.calls.clear()
    routes = tuple(
        (StepRange(kind, query=(1, query), requests=(1, many)), each) for kind, query, many, each in drawn
    )
    backend, threshold = routed(routes) if routes else routed(()), 1 + drafts
    new = sorted(new, key=lambda count: count > threshold)
    decodes = [count for count in new if count <= threshold]
    rest = new[len(decodes) :]

    def chosen(kind, lens, default):
        for each, query, many, to in drawn:
            if each is kind and max(lens) <= query and len(lens) <= many:
                return to
        return default

    number = {ONE: 1.0, TWO: 2.0, THREE: 3.0}
    whole = chosen(StepKind.MIXED, new, None) if decodes and rest else None
    if whole is not None:
        expected = [number[whole]] * sum(new)
    else:
        expected = []
        if decodes:
            kind = StepKind.DECODE if max(decodes) == 1 else StepKind.DRAFT
            expected += [number[chosen(kind, decodes, TWO)]] * sum(decodes)
        if rest:
            expected += [number[chosen(StepKind.PREFILL, rest, ONE)]] * sum(rest)
    assert attended(backend, (new, [20] * len(new)), num_speculative_tokens=drafts) == expected


# What is declared


def test_routes_are_part_of_the_class_and_no_part_of_the_name():
    assert routed() is routed()
    assert routed() is not composite_backend(ONE, TWO)
    assert routed().get_name() == "ONE+TWO+THREE"
    assert routed(((SHORT, TWO),)).get_name() == "ONE+TWO"
    assert (
        routed(((SHORT, TWO), (DRAFT, THREE))).full_name()
        == "ONE+TWO[prefill query ..4 on TWO; draft on THREE]"
    )
    assert "Decodes of several tokens run on THREE." in routed().__doc__


def test_members_have_places_and_the_phases_of_their_steps():
    assert routed().members() == {Phase.PREFILL: ONE, Phase.DECODE: TWO, "third": THREE}
    assert routed().served_phases() == {
        Phase.PREFILL: (None,),
        Phase.DECODE: (Phase.DECODE,),
        "third": (None,),
    }
    assert composite_backend(ONE, TWO).served_phases() == {
        Phase.PREFILL: (Phase.PREFILL,),
        Phase.DECODE: (Phase.DECODE,),
    }


def test_a_member_is_validated_in_each_phase_that_it_serves():
    decodes = member("DECODES", supported_phases=(Phase.DECODE,))
    cpu = Device("cpu")
    assert composite_backend(ONE, decodes).validate_configuration(SPEC, cpu) == []
    (reason,) = composite_backend(ONE, decodes, ((SHORT, decodes),)).validate_configuration(SPEC, cpu)
    assert "all steps on DECODES" in str(reason)
    (reason,) = composite_backend(ONE, decodes, ((MIXED_STEP, decodes),)).validate_configuration(SPEC, cpu)
    assert "all steps on DECODES" in str(reason)


def test_a_third_member_must_share_the_cache():
    other = member("OTHER", supported_kv_cache_layouts=lambda: ("HND",))
    nhd = member("NHD_ONLY", supported_kv_cache_layouts=lambda: ("NHD",))
    made = composite_backend(ONE, nhd, ((SHORT, other),))
    reasons = made.validate_configuration(SPEC, Device("cpu"))
    assert any("KV layouts differ: OTHER has HND, NHD_ONLY has NHD" in str(each) for each in reasons)


def test_with_routes_a_row_depends_on_the_other_requests():
    kept = {"supported_invariances": ("batch", "rows", "heads")}
    one, two = member("A", **kept), member("B", **kept)
    assert composite_backend(one, two).supported_invariances == ("batch", "heads")
    assert composite_backend(one, two, ((SHORT, two),)).supported_invariances == ("heads",)


def test_options_of_a_third_member_have_its_place_in_front():
    @dataclasses.dataclass(frozen=True)
    class Options:
        speed: int = 1

    other = member("OTHER", Options=Options)
    made = routed(((SHORT, other),))
    assert [each.name for each in dataclasses.fields(made.Options)] == ["third_speed"]


def test_a_builder_needs_what_any_member_needs():
    other = member("OTHER", NeedsLengths)
    made = builder_of(routed(((SHORT, other),)))
    assert made.needs_host_seq_lens == "exact"
    assert not made.supports_update_block_table


@pytest.mark.parametrize(
    ("routes", "why"),
    [
        (((SHORT, "THREE"),), "must be a subclass of AttentionBackend"),
        ((("prefill", THREE),), "must be pairs of a StepRange and a backend"),
        (((SHORT, composite_backend(ONE, TWO)),), "is a composite"),
        (tuple((SHORT, member(f"M{i}")) for i in range(5)), "more than 4 members"),
    ],
)
def test_routes_of_another_form_are_refused(routes, why):
    with pytest.raises(SpecError, match=why):
        composite_backend(ONE, TWO, routes)


def test_a_routed_composite_of_modules_is_found_again_by_its_reference():
    from attnplug.backends.torch_native import TorchBackend
    from attnplug.backends.triton import TritonBackend

    made = composite_backend(TorchBackend, TritonBackend, ((SHORT, TritonBackend),))
    assert class_of(pickle.loads(pickle.dumps(reference_of(made)))) is made
    assert reference_of(routed()) is None


# Graphs, drafts and shared builds


def test_drafts_are_decodes_if_the_member_that_serves_them_captures_them():
    assert builder_of(routed(), num_speculative_tokens=2).reorder_batch_threshold == 3
    never = member("NEVER", CapturesNothing)
    refused = routed(((DRAFT, never),))
    assert builder_of(refused, num_speculative_tokens=2).reorder_batch_threshold == 1
    # The decoding half has no say about drafts that another member serves.
    decodes = member("DECODES", supported_phases=(Phase.DECODE,), number=2.0)
    helped = routed(((DRAFT, THREE),), decode=decodes)
    assert builder_of(helped, num_speculative_tokens=2).reorder_batch_threshold == 3
    some = routed(((StepRange(StepKind.DRAFT, requests=(1, 2)), THREE),), decode=decodes)
    assert builder_of(some, num_speculative_tokens=2).reorder_batch_threshold == 1


@pytest.mark.parametrize(
    ("decode", "third", "level"),
    [
        ("ALWAYS", "ALWAYS", "UNIFORM_BATCH"),
        ("ALWAYS", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("UNIFORM_SINGLE_TOKEN_DECODE", "ALWAYS", "UNIFORM_BATCH"),
        ("NEVER", "ALWAYS", "NEVER"),
    ],
)
def test_graphs_are_captured_as_far_as_the_members_of_decodes_and_drafts_can(decode, third, level):
    parts = [
        member("M", type("Captures", (DecodesFirst,), {"cudagraph_support": AttentionCGSupport[each]}))
        for each in (decode, third)
    ]
    one = builder_of(routed(((DRAFT, parts[1]),), decode=parts[0]))
    found = one.get_cudagraph_support(one.config, KV_SPEC)
    assert found.name == level
    assert type(one).cudagraph_support is found


def test_a_capture_is_built_by_the_member_that_serves_such_steps():
    one = builder_of(routed(), num_speculative_tokens=2)
    for new, place in (([1, 1], "third"), ([1, 1, 1], Phase.DECODE), ([3, 3, 3], "third")):
        common = batch(new, [9] * len(new))
        made, step = one.build_for_cudagraph_capture(common), one.build(0, common)
        assert made.decode_place == step.decode_place == place
        assert made.decode.way == "capture"
        assert made.prefill is None


def test_a_mixed_step_is_not_captured_although_one_member_serves_it_whole():
    one = builder_of(routed())
    assert one.build(0, batch([1, 6], [9, 9])).decode is None
    with pytest.raises(BatchError, match="max_query_len"):
        one.build_for_cudagraph_capture(batch([1, 6], [9, 9]))


def test_a_draft_step_and_another_groups_table_go_to_the_same_member():
    one = builder_of(routed())
    assert one.build_for_drafting(batch([1, 6], [9, 9]), 3).prefill.way == 3
    table, slots = torch.arange(6, dtype=torch.int32).view(2, 3), torch.arange(100, 109)
    made = one.update_block_table(one.build(0, batch([1, 6], [9, 9])), table, slots)
    assert torch.equal(made.prefill.updated[0], table)
    assert made.prefill.updated[1].tolist()[:7] == list(range(100, 107))
    assert made.prefill_place == Phase.PREFILL


def test_a_step_with_a_shared_prefix_is_cut_and_its_members_are_asked_about_their_parts():
    heard = {}

    def wanting(name):
        def wanted(self, common_prefix_len, query_lens, *args, **kwargs):
            heard[name] = query_lens.tolist()
            return True

        return type(f"Wanting{name}", (DecodesFirst,), {"use_cascade_attention": wanted})

    one, two, three = (member(name, wanting(name)) for name in ("ONE", "TWO", "THREE"))
    made = builder_of(routed(((StepRange(StepKind.MIXED), one), (SHORT, three)), one, two))
    lens = [1, 1, 3, 4]
    common = batch(lens, [9 + each for each in lens])
    assert made.use_cascade_attention(8, np.array(lens, np.int32))
    assert heard == {"TWO": [1, 1], "THREE": [3, 4]}
    built = made.build(8, common)
    assert (built.decode.prefix, built.prefill.prefix) == (8, 8)
    assert built.prefill_place == "third"
    assert made.build(0, common).decode is None


# Latent attention


DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
LATENTS = LayerSpec(num_heads=4, num_kv_heads=1, head_size=DIMS.latent_size, mla=DIMS)


def of_latents(*routes):
    from attnplug.backends.flash_mla import FlashMLABackend
    from attnplug.backends.torch_native import TorchBackend
    from attnplug.backends.triton import TritonBackend

    given = tuple((steps, TritonBackend) for steps in routes)
    return composite_backend(TorchBackend, FlashMLABackend, given)


def test_latents_have_a_class_whose_members_decode_and_prefill_with_one_half():
    made = of_latents(FEW, DRAFT)
    serving = made.for_layer(LATENTS)
    assert serving is made.for_layer(LATENTS)
    assert serving is not made
    assert (serving.is_latent, serving.get_name()) == (True, made.get_name())
    assert serving.for_layer(LATENTS) is serving
    names = {place: each.get_name() for place, each in serving.members().items()}
    assert names == {"prefill": "TORCH+FLASH_MLA", "decode": "TORCH+FLASH_MLA", "third": "TORCH+TRITON"}
    assert {each.prefill.get_name() for each in serving.members().values()} == {"TORCH"}
    assert serving.get_supported_kernel_block_sizes(LATENTS, Device("cuda", (9, 0))) == (64,)
    assert serving.validate_configuration(LATENTS, Device("cuda", (9, 0))) == []
    assert class_of(pickle.loads(pickle.dumps(reference_of(serving)))) is serving


def test_without_routes_latents_have_the_decoding_half_bound_to_the_other():
    serving = of_latents().for_layer(LATENTS)
    assert serving.get_name() == "TORCH+FLASH_MLA"
    assert not hasattr(serving, "is_latent")


@pytest.mark.parametrize("steps", [SHORT, MIXED_STEP])
def test_ranges_of_prefills_of_latents_are_refused_with_the_reason(steps):
    made = of_latents(FEW, steps)
    assert made.for_layer(LATENTS) is made
    reasons = made.validate_configuration(LATENTS, Device("cuda", (9, 0)))
    assert any("MLA not supported" in str(each) for each in reasons)
