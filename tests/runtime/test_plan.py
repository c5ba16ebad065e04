"""Who serves each layer of a plan, and which plans are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_backends import backend, no, offered, reads
from model_layers import FULL, PAGE, SLIDING, every, gemma_3, gpt_oss, layer, llama, model, whisper

import attnplug
from attnplug import plan
from attnplug.core.errors import (
    BackendUnavailableError,
    LayoutError,
    NoBackendError,
    PolicyError,
    SpecError,
    UnknownBackendError,
)
from attnplug.core.features import Feature
from attnplug.core.kv_cache_spec import CrossAttentionSpec, FullAttentionSpec, SlidingWindowSpec

LATENT = Feature.MLA.fields(576) | {"logits_soft_cap": 3.0}
"""Fields of a layer that no backend here serves."""
TWO_KINDS = model([SLIDING, FULL])
FIRST, SECOND = backend("FIRST", 60), backend("SECOND", 55)
PLAIN = backend("PLAIN", 70, features=no(Feature.SLIDING_WINDOW))


def served_by(made: attnplug.runtime.ModelPlan) -> dict[str, str | None]:
    return {name: decision.backend for name, decision in made.decisions.items()}


# What is planned


def test_a_mapping_of_specs_is_planned_layer_by_layer():
    made = plan(llama(), "cpu")
    assert list(made.decisions) == list(llama())
    assert made.backends == ("TORCH",)
    assert made.specs == llama()
    assert made.num_blocks is None
    assert made.budget is None


def test_a_model_that_was_read_brings_its_layers_and_its_sharing():
    read = SimpleNamespace(layers=model([FULL, FULL]), kv_sharing={"layers.1": "layers.0"})
    made = plan(read, "cpu", num_blocks=4)
    assert made.kv_sharing == {"layers.1": "layers.0"}
    (tensor,) = made.kv_cache_config.kv_cache_tensors
    assert tensor.shared_by == ("layers.0", "layers.1")


def test_an_argument_comes_before_the_sharing_of_the_model():
    read = SimpleNamespace(layers=model([FULL, FULL]), kv_sharing={"layers.1": "layers.0"})
    assert plan(read, "cpu", kv_sharing={}).kv_sharing == {}


def test_gemma_3_has_groups_of_equal_count_and_two_sets_of_hyperparameters():
    made = plan(gemma_3(), "cpu", num_blocks=8)
    groups = made.kv_cache_config.kv_cache_groups
    assert [len(group.layer_names) for group in groups] == [9, 9, 9, 9, 8, 8, 10]
    assert {type(group.kv_cache_spec) for group in groups} == {FullAttentionSpec, SlidingWindowSpec}
    assert [len(names) for names in made.hyperparameter_groups.values()] == [52, 10]


def test_gemma_2_alternates_windows_under_one_cap():
    cap = {"logits_soft_cap": 50.0}
    made = plan(model(every(26, 2, SLIDING | cap, cap)), "cpu")
    assert [p.window_left for p in made.hyperparameter_groups] == [127, -1]
    assert {p.logits_soft_cap for p in made.hyperparameter_groups} == {50.0}


def test_gpt_oss_has_sinks_in_both_sets_of_hyperparameters():
    made = plan({n: s.replace(has_sinks=True) for n, s in gpt_oss().items()}, "cpu")
    assert [(p.window_left, p.has_sinks, len(n)) for p, n in made.hyperparameter_groups.items()] == [
        (127, True, 12),
        (-1, True, 12),
    ]


def test_an_encoder_keeps_no_pages_and_a_decoder_two_kinds():
    made = plan(whisper(), "cpu", num_blocks=8)
    kinds = [type(group.kv_cache_spec) for group in made.kv_cache_config.kv_cache_groups]
    assert kinds == [FullAttentionSpec, CrossAttentionSpec]
    assert made.decisions["encoder.layers.0.self_attn"].block_size is None


def test_no_layers_make_an_empty_plan():
    assert plan({}, "cpu", uniform=True, memory=1 << 20).num_blocks is None


# How many blocks


def test_memory_says_how_many_blocks_fit():
    made = plan(llama(), "cpu", memory="1MiB")
    each = 32 * PAGE
    assert (made.memory, made.num_blocks) == (1 << 20, (1 << 20) // each)
    assert made.budget is not None
    assert made.budget.bytes_per_block == each
    assert made.budget.max_tokens == 31 * 16
    assert made.kv_cache_config.num_blocks == 32


def test_a_number_of_blocks_says_how_much_memory_they_take():
    made = plan(llama(), "cpu", num_blocks=32)
    assert made.budget == plan(llama(), "cpu", memory="1MiB").budget


def test_blocks_and_memory_at_once_are_refused():
    with pytest.raises(PolicyError, match=r"num_blocks=4 cannot be combined with memory='1GiB'; give one"):
        plan(llama(), "cpu", num_blocks=4, memory="1GiB")


@pytest.mark.parametrize("blocks", [-1, 0, 1, 2.5, True])
def test_a_pool_without_a_usable_block_is_refused(blocks):
    with pytest.raises(SpecError, match=r"num_blocks=.* must be an integer of at least 2"):
        plan(llama(), "cpu", num_blocks=blocks)


def test_memory_for_less_than_two_blocks_is_refused():
    with pytest.raises(LayoutError, match="must have room for two blocks of 32768 bytes"):
        plan(llama(), "cpu", memory=65_535)


@pytest.mark.parametrize("asked", [{"num_blocks": 7}, {"memory": 7 * 10 * PAGE}])
def test_a_pool_that_cannot_hold_a_token_of_every_group_is_refused(asked):
    with pytest.raises(
        LayoutError, match="num_blocks=7 must be at least 8: the null block, and one for each"
    ):
        plan(gemma_3(), "cpu", **asked)


# What is refused


@pytest.mark.parametrize("specs", [layer(), [layer()], None])
def test_what_is_no_mapping_of_layers_is_refused(specs):
    with pytest.raises(SpecError, match="must be a mapping of layer names to LayerSpec"):
        plan(specs, "cpu")
    with pytest.raises(
        SpecError, match=r"must be a mapping of layer names to LayerSpec, such as ModelSpec\.layers"
    ):
        attnplug.select_layers(specs, "cpu")


@pytest.mark.parametrize("choose", [plan, attnplug.select_layers])
@pytest.mark.parametrize("rules", [None, "sliding=TORCH"])
def test_a_layer_that_is_no_spec_is_named(choose, rules):
    with pytest.raises(SpecError, match=r"specs\['layers\.1'\]='full' must be a LayerSpec"):
        choose({"layers.0": layer(), "layers.1": "full"}, "cpu", backend=rules)


@pytest.mark.parametrize(
    ("sharing", "what"),
    [
        ({"nobody": "layers.0"}, "is not a layer with a cache"),
        ({"layers.0": "nobody"}, "is not a layer with pages of its own"),
        ({"layers.0": "layers.1"}, "has another cache than layers.0"),
    ],
)
def test_a_sharing_that_cannot_be_is_refused_by_the_plan(sharing, what):
    with pytest.raises(LayoutError, match=what):
        plan(TWO_KINDS, "cpu", kv_sharing=sharing)


@pytest.mark.parametrize("sharing", ["layers.1", ["layers.1"], {"layers.1": 0}, {1: "layers.0"}, 3])
def test_sharing_that_maps_no_names_is_refused(sharing: object) -> None:
    with pytest.raises(LayoutError, match=r"kv_sharing=.* must be a mapping of layer names to layer names"):
        plan(TWO_KINDS, "cpu", kv_sharing=sharing)


def test_layers_without_a_backend_are_listed_by_kind_with_every_reason():
    unserved = model(
        [
            LATENT,
            LATENT,
            FULL,
            {"kv_cache_dtype": "int8"},
        ]
    )
    with pytest.raises(NoBackendError) as caught:
        plan(unserved, "cpu")
    text = str(caught.value)
    assert text.startswith("no backend on cpu serves\n  layer layers.0 and 1 like it\n")
    assert text.count("\n    TORCH: soft_cap not supported") == 1
    assert "layer layers.3\n" in text
    assert text.count("\n    TORCH: kv_cache_dtype not supported") == 1
    assert "layers.2" not in text
    assert caught.value.decision.layer_name == "layers.0"
    assert not isinstance(caught.value, BackendUnavailableError)


def test_the_backend_asked_for_is_named_and_no_other_is():
    with offered(PLAIN, FIRST), pytest.raises(BackendUnavailableError) as caught:
        plan(TWO_KINDS, "cpu", backend="FIRST,sliding=PLAIN")
    text = str(caught.value)
    assert "layer layers.0 (asked of sliding=PLAIN by backend)\n    PLAIN: sliding_window" in text
    assert "FIRST:" not in text
    assert caught.value.reasons[0].code == "feature.sliding_window"


def test_others_that_would_refuse_too_are_left_out_where_one_was_asked():
    with offered(FIRST), pytest.raises(BackendUnavailableError) as caught:
        plan(model([LATENT]), "cpu", backend="FIRST")
    assert "FIRST: MLA" in str(caught.value)
    assert "TORCH" not in str(caught.value)


def test_an_unknown_name_is_refused():
    with pytest.raises(UnknownBackendError, match="NOBODY"):
        plan(TWO_KINDS, "cpu", backend="NOBODY")


# One backend throughout


def test_layers_may_have_different_backends():
    with offered(PLAIN, FIRST):
        assert served_by(plan(TWO_KINDS, "cpu")) == {"layers.0": "FIRST", "layers.1": "PLAIN"}


def test_uniform_takes_the_highest_ranked_that_serves_every_layer():
    specs = model([FULL, SLIDING])
    with offered(PLAIN, FIRST):
        made = plan(specs, "cpu", uniform=True)
    assert made.backends == ("FIRST",)
    assert str(made.decisions["layers.0"]).splitlines()[2].split("why")[0].startswith("FIRST")
    assert {decision.rule for decision in made.decisions.values()} == {"uniform=True"}


def test_uniform_names_each_backend_and_the_layer_it_refuses():
    windowed = backend("WINDOWED", 60, supports_combination=_only_windows)
    specs = model([FULL, SLIDING, LATENT])
    with offered(PLAIN, windowed), pytest.raises(NoBackendError) as caught:
        plan(specs, "cpu", uniform=True)
    text = str(caught.value)
    assert text.startswith("no one backend serves every layer, as uniform=True asks")
    assert "PLAIN does not serve layer layers.1: sliding_window" in text
    assert "WINDOWED does not serve layer layers.0: " in text
    assert "TORCH does not serve layer layers.2: soft_cap" in text


def _only_windows(spec, device):
    return None if spec.sliding_window else "only windows are served"


def test_uniform_lists_plugins_that_did_not_load(monkeypatch):
    monkeypatch.setenv("ATTNPLUG_BLOCK_PLUGINS", "torch")
    limit = (
        "attnplug:torch does not serve layer layers.0: attnplug:torch is left out by ATTNPLUG_BLOCK_PLUGINS"
    )
    with offered(FIRST), pytest.raises(NoBackendError, match=limit):
        plan(model([LATENT]), "cpu", uniform=True)


def test_uniform_is_the_remedy_where_backends_cannot_share_pages():
    narrow = backend("NARROW", 60, get_supported_kernel_block_sizes=reads(16))
    wide = backend("WIDE", 70, features=no(Feature.ALIBI), get_supported_kernel_block_sizes=reads(48))
    specs = model([{"has_alibi": True}, FULL])
    with offered(narrow, wide):
        with pytest.raises(LayoutError, match=r"NARROW \(layer layers.0\) takes 16; WIDE \(layer layers.1\)"):
            plan(specs, "cpu")
        assert plan(specs, "cpu", uniform=True).backends == ("NARROW",)


def test_a_backend_that_cannot_share_pages_with_itself_is_passed_over_by_uniform():
    fickle = backend("FICKLE", 60, get_supported_kernel_block_sizes=_by_alibi)
    specs = model([{"has_alibi": True}, FULL])
    with offered(fickle):
        assert plan(specs, "cpu", uniform=True).backends == ("TORCH",)


def _by_alibi(spec=None, device=None):
    return (16, 48) if spec is None else (16,) if spec.has_alibi else (48,)


def test_uniform_keeps_to_the_rules():
    with offered(FIRST, SECOND):
        made = plan(TWO_KINDS, "cpu", uniform=True, backend="sliding=SECOND")
    assert made.backends == ("SECOND",)
    assert made.decisions["layers.0"].rule == "sliding=SECOND"
    assert made.decisions["layers.1"].rule == "uniform=True"


def test_uniform_against_rules_for_two_backends_is_refused():
    with offered(FIRST, SECOND), pytest.raises(NoBackendError) as caught:
        plan(TWO_KINDS, "cpu", uniform=True, backend="sliding=SECOND,decode=FIRST")
    assert "SECOND is not what backend asks for layer layers.1: decode=FIRST" in str(caught.value)
    assert "FIRST is not what backend asks for layer layers.0: sliding=SECOND" in str(caught.value)


def test_uniform_under_one_name_is_that_backend():
    with offered(FIRST, SECOND), attnplug.use("SECOND"):
        assert plan(TWO_KINDS, "cpu", uniform=True).backends == ("SECOND",)
