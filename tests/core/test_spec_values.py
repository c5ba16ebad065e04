"""A LayerSpec as a value: equality, hashing, copies, pickles, JSON."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from spec_strategies import DIMS, MLA_SIZES, SIZES, spec_arguments, specs

from attnplug.core import Feature, LayerSpec, SparseSpec
from attnplug.errors import SpecError


@given(spec_arguments())
def test_equal_arguments_make_equal_specs_with_one_hash(arguments: dict[str, Any]) -> None:
    one, other = LayerSpec(**arguments), LayerSpec(**arguments)
    assert one == other
    assert hash(one) == hash(other)
    assert {one: "found"}[other] == "found"


@given(specs())
def test_a_spec_equals_the_one_that_spells_out_its_defaults(spec: LayerSpec) -> None:
    spelled = LayerSpec(**{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init})
    assert spelled == spec
    assert hash(spelled) == hash(spec)


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": 16},
        {"num_kv_heads": 4},
        {"head_size": 128, "head_size_v": 64, "scale": 0.125},
        {"head_size_v": 32},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 16},
        {"attn_type": "encoder", "causal": True},
        {"causal": False, "window": (-1, 0)},
        {"scale": 1.0},
        {"window": (7, 0)},
        {"chunk_size": 8},
        {"logits_soft_cap": 50.0},
        {"has_sinks": True},
        {"has_alibi": True},
        {"sparse": SparseSpec("token_topk", 2048)},
        {"mm_prefix": True},
        {"direct_kv": True},
        {"needs_lse": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_counts_in_equality(change: dict[str, Any]) -> None:
    spec, changed = LayerSpec(**SIZES), LayerSpec(**{**SIZES, **change})
    assert spec != changed
    assert hash(spec) != hash(changed)


def test_a_spec_equals_no_other_kind_of_value() -> None:
    assert LayerSpec(**SIZES) != LayerSpec(**SIZES).to_dict()


def test_defaults_follow_a_replace() -> None:
    spec = LayerSpec(**SIZES).replace(head_size=128)
    assert (spec.head_size, spec.head_size_v, spec.scale) == (128, 128, 128**-0.5)
    mla = LayerSpec(**MLA_SIZES).replace(
        mla=dataclasses.replace(DIMS, kv_lora_rank=256, qk_nope_head_dim=192), head_size=320
    )
    assert (mla.head_size_v, mla.scale) == (256, 256**-0.5)


def test_given_values_stay_through_a_replace() -> None:
    spec = LayerSpec(**SIZES, head_size_v=32, scale=1.0, causal=False)
    changed = spec.replace(head_size=128, attn_type="decoder")
    assert (changed.head_size_v, changed.scale, changed.causal) == (32, 1.0, False)


def test_causality_follows_the_attention_type_unless_it_was_given() -> None:
    assert LayerSpec(**SIZES).replace(attn_type="encoder").causal is False
    assert LayerSpec(**SIZES, causal=True).replace(attn_type="encoder").causal is True


def test_a_layer_made_non_causal_sees_the_future() -> None:
    assert LayerSpec(**SIZES).replace(causal=False).window == (-1, -1)
    encoder = LayerSpec(**SIZES).replace(attn_type="encoder")
    assert encoder == LayerSpec(**SIZES, attn_type="encoder")
    assert Feature.SLIDING_WINDOW not in encoder.required_features()


def test_a_sliding_layer_made_non_causal_must_state_both_sides() -> None:
    with pytest.raises(SpecError, match="state both sides"):
        LayerSpec(**SIZES, sliding_window=4).replace(causal=False)
    both = LayerSpec(**SIZES, sliding_window=4).replace(causal=False, window=(3, 3))
    assert both.window == (3, 3)


def test_a_window_can_be_replaced_and_removed() -> None:
    spec = LayerSpec(**SIZES, sliding_window=4)
    assert spec.replace(sliding_window=8).window == (7, 0)
    assert spec.replace(window=(1, -1)).window == (1, 0)
    assert spec.replace(sliding_window=None).window == (-1, 0)
    assert spec.replace(sliding_window=None, chunk_size=8).chunk_size == 8
    assert spec.replace(has_sinks=True).window == (3, 0)


def test_a_two_sided_window_stays_through_a_replace() -> None:
    spec = LayerSpec(**SIZES, attn_type="encoder", window=(3, 5))
    assert spec.replace(has_alibi=True).window == (3, 5)
    assert spec.replace(attn_type="decoder", causal=True, sliding_window=2).window == (1, 0)


def test_a_replace_checks_like_the_constructor() -> None:
    with pytest.raises(SpecError, match="num_heads=7"):
        LayerSpec(**SIZES).replace(num_heads=7)
    with pytest.raises(TypeError, match="colour"):
        LayerSpec(**SIZES).replace(colour="red")


@given(specs())
def test_a_replace_of_nothing_gives_an_equal_spec(spec: LayerSpec) -> None:
    assert spec.replace() == spec
    assert dataclasses.replace(spec) == spec


def test_dataclasses_replace_copies_what_was_filled_in() -> None:
    spec = dataclasses.replace(LayerSpec(**SIZES), head_size=128)
    assert (spec.head_size, spec.head_size_v, spec.scale) == (128, 64, 64**-0.5)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="copy.replace came with Python 3.13")
def test_copy_replace_is_replace() -> None:
    spec = LayerSpec(**SIZES)
    assert copy.replace(spec, head_size=128).scale == 128**-0.5  # type: ignore[attr-defined]


@given(specs())
def test_copies_and_pickles_are_equal_and_keep_following_defaults(spec: LayerSpec) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert_same_in_every_way(pickle.loads(pickle.dumps(spec, protocol)), spec)
    assert_same_in_every_way(copy.copy(spec), spec)
    assert_same_in_every_way(copy.deepcopy(spec), spec)


def assert_same_in_every_way(copied: LayerSpec, spec: LayerSpec) -> None:
    assert copied == spec
    assert hash(copied) == hash(spec)
    # The sizes of latents, and of channels that have a state each, are given by others.
    sizes_are_fixed = spec.mla or (spec.state and spec.state.rule == "conv")
    change: dict[str, Any] = {} if sizes_are_fixed else {"head_size": spec.head_size + 1}
    assert copied.replace(**change) == spec.replace(**change)


def in_another_process(code: str, hash_seed: str) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return done.stdout.strip()


def test_a_pickle_is_a_usable_key_in_a_process_with_other_hashes() -> None:
    made = in_another_process(
        "import pickle; from attnplug.core import LayerSpec;"
        "spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, sliding_window=4);"
        "print(pickle.dumps(spec).hex(), hash(spec))",
        hash_seed="1",
    )
    pickled, foreign_hash = made.split()
    here = in_another_process(
        "import pickle; from attnplug.core import LayerSpec;"
        "spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, sliding_window=4);"
        f"read = pickle.loads(bytes.fromhex('{pickled}'));"
        "print({spec: 'found'}[read], hash(read) == hash(spec), hash(spec))",
        hash_seed="2",
    )
    found, equal_hashes, own_hash = here.split()
    assert (found, equal_hashes) == ("found", "True")
    assert own_hash != foreign_hash  # else the seeds made no difference and this shows nothing


@given(specs())
@settings(max_examples=200)
def test_a_spec_survives_json(spec: LayerSpec) -> None:
    data = json.loads(json.dumps(spec.to_dict()))
    read = LayerSpec.from_dict(data)
    assert_same_in_every_way(read, spec)
    assert read.to_dict() == spec.to_dict()


@pytest.mark.parametrize(
    ("arguments", "change", "field", "value"),
    [
        ({"head_size": 16}, {"head_size": 64}, "scale", 0.125),
        ({"head_size": 16, "scale": 0.25}, {"head_size": 64}, "scale", 0.25),
        ({"head_size": 16}, {"head_size": 64}, "head_size_v", 64),
        ({"head_size": 16, "head_size_v": 16}, {"head_size": 64}, "head_size_v", 16),
        ({}, {"attn_type": "encoder_only"}, "causal", False),
        ({"causal": False}, {"attn_type": "decoder"}, "causal", False),
        ({"sliding_window": 4}, {"causal": False, "window": (3, 3)}, "window", (3, 3)),
    ],
)
def test_a_spec_from_json_follows_a_change_as_the_original_does(
    arguments: dict[str, Any], change: dict[str, Any], field: str, value: object
) -> None:
    spec = LayerSpec(**{**SIZES, **arguments})
    read = LayerSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    again = LayerSpec.from_dict(read.to_dict())
    for each in (spec, read, again, pickle.loads(pickle.dumps(read)), copy.deepcopy(read)):
        assert getattr(each.replace(**change), field) == value


def test_a_dict_of_an_earlier_version_states_all_its_values() -> None:
    data = LayerSpec(**SIZES).to_dict()
    del data["derived"]
    assert LayerSpec.from_dict(data).replace(head_size=16).scale == LayerSpec(**SIZES).scale


def test_a_derived_value_may_be_left_out_or_differ_in_the_last_bit() -> None:
    spec = LayerSpec(**{**SIZES, "head_size": 80})
    data = spec.to_dict()
    assert LayerSpec.from_dict({**data, "scale": math.nextafter(spec.scale, 1.0)}) == spec
    del data["scale"]
    assert LayerSpec.from_dict(data) == spec


def test_a_dict_holds_every_field_as_plain_json() -> None:
    data = LayerSpec(**MLA_SIZES, attn_type="decoder").to_dict()
    assert list(data) == [*(f.name for f in dataclasses.fields(LayerSpec) if f.init), "derived"]
    assert data["derived"] == ["causal", "head_size_v", "scale"]
    assert (data["attn_type"], type(data["attn_type"]), data["window"]) == ("decoder", str, [-1, 0])
    assert data["mla"]["kv_lora_rank"] == 512


def test_a_dict_may_leave_out_what_has_a_default() -> None:
    assert LayerSpec.from_dict(SIZES) == LayerSpec(**SIZES)
    assert LayerSpec.from_dict({**SIZES, "sliding_window": 4}).window == (3, 0)
    assert LayerSpec.from_dict(MLA_SIZES) == LayerSpec(**MLA_SIZES)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({**SIZES, "head_sise": 64}, "head_sise=64 is not a field of a LayerSpec; fields are num_heads"),
        ({**SIZES, "_hash": 1}, "_hash=1 is not a field of a LayerSpec"),
        ({"num_heads": 8, "num_kv_heads": 2}, "head_size=None is required"),
        ({**MLA_SIZES, "mla": {"kv_lora_rank": 512}}, "must name exactly kv_lora_rank, q_lora_rank"),
        ({**MLA_SIZES, "mla": [512]}, "mla=[512] must be an MLADims or None"),
        ({**SIZES, "derived": ["window"]}, "derived=['window'] must be a list of names among causal, head_"),
        ({**SIZES, "derived": "scale"}, "derived='scale' must be a list of names"),
        (
            {**SIZES, "scale": 2.0, "derived": ["scale"]},
            "scale=2.0 is not the default 0.125, which derived says",
        ),
        ({**SIZES, "causal": False, "derived": ["causal"]}, "causal=False is not the default True"),
    ],
)
def test_a_dict_that_is_no_spec_is_refused(data: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        LayerSpec.from_dict(data)
    assert text in str(caught.value)
