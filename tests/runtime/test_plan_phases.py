"""Plans that ask each phase alone: composites of two backends, what keeps two apart, and rules for phases."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from fake_backends import backend, layouts, no, offered, reads
from model_layers import FULL, SLIDING, gemma_3, layer, llama, model, whisper

import attnplug
from attnplug import Device, Phase, plan
from attnplug.core.errors import BackendUnavailableError, NoBackendError, PolicyError, UnknownBackendError
from attnplug.core.features import Feature
from attnplug.integrations.transformers import read_config
from attnplug.runtime import AttentionRuntime, ModelPlan

TWO_KINDS = model([SLIDING, FULL])
FIRST, SECOND = backend("FIRST", 60), backend("SECOND", 55)
MODELS = Path(__file__).parents[2] / "examples" / "models"
HOPPER = Device("cuda", (9, 0))


def decoder(name="DECODER", **attributes):
    return backend(name, 90, supported_phases=(Phase.DECODE,), **attributes)


def served_by(made):
    return {name: decision.backend for name, decision in made.decisions.items()}


def by_priority_in(phase, priority):
    return lambda spec, device, asked: priority if asked == phase else 10


# Two backends that share a cache


def test_a_layer_whose_phases_choose_otherwise_is_served_by_both():
    with offered(decoder()):
        made = plan(TWO_KINDS, "cpu", per_phase=True)
    assert made.backends == ("TORCH+DECODER",)
    assert made.notes == ()
    assert made.by_phase["layers.0"][Phase.DECODE].backend == "DECODER"
    assert made.members["layers.1"] == {Phase.PREFILL: "TORCH", Phase.DECODE: "DECODER"}


def test_without_per_phase_nobody_is_split():
    with offered(decoder()):
        assert plan(TWO_KINDS, "cpu", per_phase=False).backends == ("TORCH",)
        assert plan(TWO_KINDS, "cpu").backends == plan(TWO_KINDS, "cpu", per_phase=True).backends


def test_the_decision_for_a_composite_is_asked_for_by_the_plan():
    with offered(decoder()):
        (decision,) = plan(model([FULL]), "cpu", per_phase=True).decisions.values()
    assert (decision.phase, decision.chosen_by, decision.rule) == (None, "plan", "per_phase=True")
    assert decision.chosen is not None
    assert decision.level == "usable"
    assert "TORCH" in {candidate.name for candidate in decision.candidates if candidate.accepted}


def test_a_backend_that_is_first_in_both_phases_serves_alone():
    fastest = backend("FASTEST", get_priority=lambda spec, device, phase: 90 if phase else 5)
    with offered(fastest, FIRST):
        made = plan(model([FULL]), "cpu", per_phase=True)
    assert made.backends == ("FASTEST",)
    assert made.notes == ()


def test_pages_are_of_a_size_that_both_read():
    prefers = {"get_preferred_block_size": lambda spec=None, device=None, default=16: 48}
    narrow = decoder(get_supported_kernel_block_sizes=reads(32, 48), **prefers)
    wide = backend("WIDE", 60, get_supported_kernel_block_sizes=reads(32, 64))
    with offered(narrow, wide):
        (decision,) = plan(model([FULL]), "cpu", per_phase=True).decisions.values()
    assert (decision.backend, decision.block_size) == ("WIDE+DECODER", 32)


def test_pages_are_in_the_order_that_the_decoding_half_prefers():
    either = backend("EITHER", 60, supported_kv_cache_layouts=layouts("NHD", "HND"))
    with offered(decoder(supported_kv_cache_layouts=layouts("HND", "NHD")), either):
        (decision,) = plan(model([FULL]), "cpu", per_phase=True).decisions.values()
    assert (decision.backend, decision.kv_cache_layout) == ("EITHER+DECODER", "HND")


# Two that do not


def the_note(made):
    (note,) = made.notes
    return note


@pytest.mark.parametrize(
    ("of_decoder", "of_other", "why"),
    [
        (
            {"supported_kv_cache_layouts": layouts("HND")},
            {"supported_kv_cache_layouts": layouts("NHD")},
            "KV layouts differ: BOTH has NHD, DECODER has HND",
        ),
        (
            {"get_supported_kernel_block_sizes": reads(48)},
            {"get_supported_kernel_block_sizes": reads(16, 32)},
            "block sizes differ: BOTH has 16, 32, DECODER has 48",
        ),
        (
            {"get_kv_cache_shape": lambda blocks, size, heads, dim, dtype="auto", dv=None: (2, blocks, size)},
            {},
            "cache shapes of 4 blocks of 16 differ: BOTH has (4, 2, 16, 2, 8), DECODER has (2, 4, 16)",
        ),
        (
            {"get_kv_cache_stride_order": lambda layers=False, *, layout=None, spec=None: (1, 0, 2, 3, 4)},
            {},
            "stride orders of NHD differ: BOTH has (0, 1, 2, 3, 4) and",
        ),
        (
            {"split_kv": lambda cache, spec: (cache[:, 1], cache[:, 0])},
            {},
            "BOTH and DECODER split K and V of a page differently",
        ),
    ],
    ids=["layout", "block size", "shape", "strides", "split"],
)
def test_two_that_share_no_cache_are_kept_apart_and_the_plan_says_why(of_decoder, of_other, why):
    with offered(decoder(**of_decoder), backend("BOTH", 80, **of_other)):
        made = plan(llama(), "cpu", per_phase=True)
    assert made.backends == ("BOTH",)
    note = the_note(made)
    assert note.startswith("32 layers would prefill on BOTH and decode on DECODER, but ")
    assert why in note
    assert note.endswith("BOTH serves both phases")
    assert note.split()[0] in str(made)


def test_storage_that_one_half_lacks_keeps_the_phases_of_that_layer_alike():
    plain = decoder(supported_kv_cache_dtypes=("auto",), features=no(Feature.FP8_KV))
    with offered(plain):
        made = plan(model([FULL, {"kv_cache_dtype": "fp8"}]), "cpu", per_phase=True)
        assert served_by(made) == {"layers.0": "TORCH+DECODER", "layers.1": "TORCH"}
        with pytest.raises(BackendUnavailableError, match="decode on DECODER: kv_cache_dtype not supported"):
            plan(model([{"kv_cache_dtype": "fp8"}]), "cpu", backend="TORCH+DECODER")


def test_layers_whose_keys_come_with_the_call_have_no_pages_to_share():
    with offered(decoder()):
        made = plan({"a": layer(direct_kv=True)}, "cpu", per_phase=True)
    assert made.backends == ("TORCH",)
    assert "K and V come with the call: there are no pages that TORCH and DECODER could share" in the_note(
        made
    )


def test_an_encoder_stays_with_one_backend_and_its_decoder_has_two():
    with offered(decoder()):
        made = plan(whisper(), "cpu", per_phase=True)
    assert made.backends == ("TORCH", "TORCH+DECODER")
    assert made.notes == ()


def test_rules_for_decodes_leave_an_encoder_to_what_prefills():
    no_encoders = decoder(features=no(Feature.ENCODER))
    with offered(no_encoders, FIRST):
        made = plan(whisper(), "cpu", backend="FIRST,decode=DECODER")
    assert made.backends == ("FIRST", "FIRST+DECODER")


def test_a_backend_of_one_phase_serves_no_encoder():
    prefiller = backend("PREFILLER", 90, supported_phases=(Phase.PREFILL,))
    with offered(prefiller):
        assert plan(whisper(), "cpu", per_phase=True).backends == ("TORCH", "PREFILLER+TORCH")
        with pytest.raises(
            BackendUnavailableError, match="PREFILLER: phase not supported: decode is not prefill"
        ):
            plan(whisper(), "cpu", backend="prefill=PREFILLER")


def test_what_a_phase_alone_would_choose_does_not_decide_the_pages():
    odd = decoder(get_supported_kernel_block_sizes=reads(48), supported_kv_cache_layouts=layouts("HND"))
    both = backend(
        "BOTH", 80, get_supported_kernel_block_sizes=reads(16), supported_kv_cache_layouts=layouts("NHD")
    )
    with offered(odd, both):
        made = plan(llama(), "cpu", per_phase=True)
    assert made.decisions["layers.0"].block_size == 16
    assert made.decisions["layers.0"].kv_cache_layout == "NHD"


def test_a_composite_that_fits_no_other_layer_of_its_group_gives_way():
    windowed = decoder(
        supported_kv_cache_layouts=layouts("HND"),
        supports_combination=lambda spec, device: None if spec.has_alibi else "only ALiBi",
    )
    only_nhd = backend("NHD", 70, supported_kv_cache_layouts=layouts("NHD"), features=no(Feature.ALIBI))
    with offered(windowed, only_nhd, backend("ALIBI", 60)):
        made = plan(model([{"has_alibi": True}, FULL]), "cpu", per_phase=True)
    assert served_by(made) == {"layers.0": "ALIBI", "layers.1": "NHD"}
    note = the_note(made)
    assert note.startswith("1 layer would prefill on ALIBI and decode on DECODER, but kv_cache_layout=None")
    assert "cannot be agreed on by layers with like caches: ALIBI+DECODER (layer layers.0) takes HND" in note


def test_phases_that_nobody_serves_together_are_refused_with_what_keeps_them_apart(monkeypatch):
    monkeypatch.setenv("ATTNPLUG_BLOCK_PLUGINS", "torch,triton")
    prefiller = backend(
        "PREFILLER",
        supported_phases=(Phase.PREFILL,),
        features=no() | Feature.MM_PREFIX,
        supported_kv_cache_layouts=layouts("NHD"),
    )
    other = decoder(features=no() | Feature.MM_PREFIX, supported_kv_cache_layouts=layouts("HND"))
    with offered(prefiller, other), pytest.raises(NoBackendError) as caught:
        plan(model([{"mm_prefix": True}]), "cpu", per_phase=True)
    assert "PREFILLER+DECODER: KV layouts differ: PREFILLER has NHD, DECODER has HND" in str(caught.value)
    assert "multimodal prefix spans not supported" in str(caught.value)


def test_a_pair_further_down_serves_where_nobody_serves_both_phases(monkeypatch):
    monkeypatch.setenv("ATTNPLUG_BLOCK_PLUGINS", "torch,triton")
    odd = backend("ODD", 80, supported_phases=(Phase.PREFILL,), supported_kv_cache_layouts=layouts("NHD"))
    even = backend("EVEN", 70, supported_phases=(Phase.PREFILL,))
    with offered(odd, even, decoder(supported_kv_cache_layouts=layouts("HND"))):
        made = plan(model([FULL]), "cpu", per_phase=True)
    assert made.backends == ("EVEN+DECODER",)
    assert the_note(made).startswith("1 layer would prefill on ODD and decode on DECODER, but KV layouts")


def test_phases_that_agree_leave_no_note():
    assert plan(TWO_KINDS, "cpu", per_phase=True).notes == ()


def test_uniform_keeps_one_backend_and_says_so():
    with offered(decoder()):
        made = plan(TWO_KINDS, "cpu", per_phase=True, uniform=True)
    assert made.backends == ("TORCH",)
    assert "but uniform=True asks for one backend. TORCH serves both phases" in the_note(made)


# Rules


@pytest.mark.parametrize("where", ["argument", "use", "environment"])
def test_phase_rules_for_two_backends_make_a_composite_wherever_they_came_from(where, monkeypatch):
    rules = "decode=FIRST,prefill=SECOND"
    if where == "environment":
        monkeypatch.setenv("ATTNPLUG_BACKEND", rules)
    with offered(FIRST, SECOND), attnplug.use(rules if where == "use" else None):
        made = plan(TWO_KINDS, "cpu", backend=rules if where == "argument" else None)
    assert made.backends == ("SECOND+FIRST",)
    source = {"argument": "backend", "use": "attnplug.use", "environment": "ATTNPLUG_BACKEND"}[where]
    decision = made.decisions["layers.0"]
    assert decision.chosen_by == source
    assert set(str(decision.rule).split(",")) == {"decode=FIRST", "prefill=SECOND"}


def test_a_phase_rule_leaves_the_other_phase_to_the_ranking():
    with offered(FIRST, SECOND):
        assert plan(TWO_KINDS, "cpu", backend="decode=SECOND").backends == ("FIRST+SECOND",)


def test_the_ranking_of_the_other_phase_is_followed_down_to_one_that_shares_the_cache():
    apart = backend("APART", 80, supported_kv_cache_layouts=layouts("HND"))
    only = backend("ONLY", 60, supported_kv_cache_layouts=layouts("NHD"), supported_phases=(Phase.DECODE,))
    with offered(apart, only, SECOND):
        made = plan(model([FULL]), "cpu", backend="decode=ONLY")
    assert made.backends == ("SECOND+ONLY",)
    assert "would prefill on APART and decode on ONLY, but KV layouts differ" in the_note(made)


def test_a_backend_that_can_do_both_serves_alone_where_the_best_shares_no_cache_with_it():
    apart = backend("APART", 80, supported_kv_cache_layouts=layouts("HND"))
    with offered(apart, backend("NHD", 60, supported_kv_cache_layouts=layouts("NHD"))):
        assert plan(model([FULL]), "cpu", backend="decode=NHD").backends == ("NHD",)


def test_rules_for_two_that_share_no_cache_are_refused_and_nobody_takes_their_place():
    hnd = backend("HND", supported_kv_cache_layouts=layouts("HND"))
    nhd = backend("NHD", supported_kv_cache_layouts=layouts("NHD"))
    with offered(hnd, nhd), pytest.raises(BackendUnavailableError) as caught:
        plan(TWO_KINDS, "cpu", backend="HND,decode=NHD")
    assert str(caught.value) == (
        "HND,decode=NHD, asked for by backend, cannot serve layer layers.0 on cpu together: KV layouts differ: "
        "HND has HND, NHD has NHD"
    )
    assert [reason.code for reason in caught.value.reasons] == ["kv_cache_layout"]


def test_of_a_family_the_member_that_shares_the_cache_is_taken():
    new = backend("FAM_2", 70, family="FAM", supported_kv_cache_layouts=layouts("HND"))
    old = backend("FAM_1", 60, family="FAM", supported_kv_cache_layouts=layouts("NHD"))
    nhd = backend("NHD", supported_kv_cache_layouts=layouts("NHD"))
    with offered(new, old, nhd):
        made = plan(model([FULL]), "cpu", backend="FAM,decode=NHD")
    assert made.backends == ("FAM_1+NHD",)


def test_phase_rules_that_agree_are_followed():
    with offered(FIRST, SECOND):
        made = plan(TWO_KINDS, "cpu", backend="decode=SECOND,prefill=SECOND")
    assert made.backends == ("SECOND",)
    assert {decision.phase for decision in made.decisions.values()} == {None}
    assert made.notes == ()


def test_a_phase_rule_leaves_layers_of_more_specific_rules_alone():
    with offered(FIRST, SECOND):
        made = plan(TWO_KINDS, "cpu", backend="sliding=SECOND,decode=FIRST")
    assert served_by(made) == {"layers.0": "SECOND", "layers.1": "FIRST"}


def test_a_phase_rule_whose_backend_does_not_serve_the_phase_is_refused_with_its_reason():
    prefiller = backend("PREFILLER", supported_phases=(Phase.PREFILL,))
    with (
        offered(prefiller),
        pytest.raises(BackendUnavailableError, match=r"layer layers\.0 and 31 like it in decode"),
    ):
        plan(llama(), "cpu", backend="decode=PREFILLER")


# By name


def test_a_composite_can_be_asked_for_by_name():
    with offered(FIRST, SECOND):
        assert plan(TWO_KINDS, "cpu", backend="FIRST+SECOND").backends == ("FIRST+SECOND",)
        assert plan(TWO_KINDS, "cpu", backend="sliding=SECOND + FIRST").backends == ("SECOND+FIRST", "FIRST")
        assert plan(TWO_KINDS, "cpu", backend="FIRST+SECOND", uniform=True).backends == ("FIRST+SECOND",)
        assert plan(TWO_KINDS, "cpu", backend="FIRST+SECOND", per_phase=True).backends == ("FIRST+SECOND",)


def test_one_name_twice_is_that_backend():
    with offered(FIRST):
        assert plan(TWO_KINDS, "cpu", backend="FIRST+FIRST").backends == ("FIRST",)


def test_a_rule_for_a_phase_that_names_a_composite_means_its_half():
    with offered(FIRST, SECOND):
        assert plan(TWO_KINDS, "cpu", backend="decode=FIRST+SECOND,TORCH").backends == ("TORCH+SECOND",)


def test_families_stand_for_their_members_on_both_sides():
    members = backend("FAM_1", 60, family="FAM"), backend("FAM_2", 70, family="FAM")
    with offered(*members, SECOND):
        decision = attnplug.select(layer(), "cpu", backend="FAM+SECOND")
        assert decision.backend == "FAM_2+SECOND"
        assert decision.candidates[0].priority == (70 + 55) // 2
        assert attnplug.select(layer(), "cpu", backend="FAM+FAM").backend == "FAM_2"


def test_three_names_are_refused():
    with offered(FIRST, SECOND), pytest.raises(PolicyError, match="names 3 backends; a composite has two"):
        plan(TWO_KINDS, "cpu", backend="FIRST+SECOND+TORCH")


@pytest.mark.parametrize("name", ["FIRST+", "+SECOND", "FIRST+ ", "+"])
def test_a_composite_needs_a_name_on_both_sides(name: str) -> None:
    with (
        offered(FIRST, SECOND),
        pytest.raises(PolicyError, match=r"has an empty half; write PREFILL\+DECODE"),
    ):
        attnplug.select(layer(), "cpu", backend=name)


def test_an_unknown_half_is_named():
    with offered(FIRST), pytest.raises(UnknownBackendError, match="backend='NOBODY' is not a backend"):
        plan(TWO_KINDS, "cpu", backend="FIRST+NOBODY")


# Models, on a GPU that is not here


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_example_models_are_planned_by_phases_for_a_gpu_elsewhere(path):
    on_gpu = {"device_types": ("cuda",), "step_safe": True}
    fast_prefill = backend(
        "PREFILLS", get_priority=by_priority_in(Phase.PREFILL, 300), features=no(Feature.ALIBI), **on_gpu
    )
    fast_decode = backend(
        "DECODES",
        get_priority=by_priority_in(Phase.DECODE, 300),
        features=no(Feature.CHUNKED_LOCAL),
        **on_gpu,
    )
    read = read_config(path)
    with offered(fast_prefill, fast_decode):
        made = plan(read, HOPPER, per_phase=True, assume_installed="all")
    for name, spec in read.layers.items():
        members = made.members[name]
        if not spec.has_pages:
            assert members[Phase.PREFILL] == members[Phase.DECODE]
        elif spec.mla is not None and spec.sparse is not None:
            # Nothing is expanded: each query is a decode of its chosen latents.
            assert members == {Phase.PREFILL: "TRITON", Phase.DECODE: "TRITON"}
        elif spec.mla is not None:
            # Any backend prefills expanded K and V; only one of latent attention decodes.
            decode = "FLASH_MLA" if spec.num_heads >= 32 else "TRITON"
            assert members == {Phase.PREFILL: "PREFILLS", Phase.DECODE: decode}
        else:
            assert (members[Phase.PREFILL] == "PREFILLS") is not spec.has_alibi
            assert (members[Phase.DECODE] == "DECODES") is (spec.chunk_size is None)
    assert json.loads(made.to_json())["members"].keys() == read.layers.keys()
    assert all(decision.level == "declared" for decision in made.decisions.values())


def test_a_hybrid_model_of_composites_has_the_groups_it_has_without():
    with offered(decoder()):
        made, plain = plan(gemma_3(), "cpu", per_phase=True), plan(gemma_3(), "cpu")
    assert made.kv_cache_config == plain.kv_cache_config


# Options of the halves


@dataclasses.dataclass(frozen=True)
class Splits:
    splits: int = 4


OPTED = backend("OPTED", 70, family="FAM", Options=Splits), backend("OTHER", 60, Options=Splits)


@pytest.mark.parametrize(
    ("options", "prefill", "decode"),
    [
        (None, 4, 4),
        ({"OPTED": {"splits": 2}}, 4, 2),
        ({"FAM": {"splits": 3}, "OTHER": Splits(9)}, 9, 3),
        ({"decode_splits": 7}, 4, 7),
        ({"OPTED": {"splits": 2}, "OTHER+OPTED": {"decode_splits": 8}}, 4, 8),
    ],
)
def test_options_reach_the_half_that_they_are_for(options, prefill, decode):
    with offered(*OPTED):
        made = plan(model([FULL]), "cpu", backend="OTHER+OPTED", options=options, num_blocks=4)
        members = AttentionRuntime(made).layers["layers.0"].impl.members
        assert ModelPlan.from_json(made.to_json()) == made
    assert members[Phase.PREFILL].options == Splits(prefill)
    assert members[Phase.DECODE].options == Splits(decode)


def test_options_reach_the_halves_that_rules_make():
    with offered(*OPTED):
        made = plan(model([FULL]), "cpu", backend="OTHER,decode=OPTED", options={"OPTED": {"splits": 2}})
    assert dict(made.decisions["layers.0"].options) == {"prefill_splits": 4, "decode_splits": 2}


def test_an_option_that_no_half_has_is_refused_with_those_there_are():
    with (
        offered(*OPTED),
        pytest.raises(PolicyError, match="there are: prefill_splits: int, decode_splits: int"),
    ):
        plan(model([FULL]), "cpu", backend="OTHER+OPTED", options={"splits": 2})
