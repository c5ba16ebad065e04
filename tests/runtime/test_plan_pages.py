"""Block sizes and layouts that the layers of a plan agree on."""

from __future__ import annotations

import pytest
from fake_backends import backend, layouts, offered, reads
from model_layers import FULL, PAGE, SLIDING, layer, model, whisper

import attnplug
from attnplug import plan
from attnplug.core.blocks import MultipleOf
from attnplug.core.errors import LayoutError

TWO_KINDS = model([SLIDING, FULL])


def two_head_counts(**asked):
    """Layers whose pages would have 1 and 2 heads' worth of bytes."""
    return {"narrow": layer(num_kv_heads=1, **asked), "wide": layer(num_kv_heads=2, sliding_window=8)}


def test_pages_of_unlike_bytes_are_made_equal_by_larger_blocks():
    made = plan(two_head_counts(), "cpu", num_blocks=4)
    assert {n: d.block_size for n, d in made.decisions.items()} == {"narrow": 32, "wide": 16}
    assert {g.kv_cache_spec.page_size_bytes for g in made.kv_cache_config.kv_cache_groups} == {PAGE}


def test_a_backend_that_does_not_read_the_larger_block_is_named_with_its_layer():
    fixed = backend("FIXED", get_supported_kernel_block_sizes=reads(16, MultipleOf(48)))
    with offered(fixed), pytest.raises(LayoutError) as caught:
        plan(two_head_counts(), "cpu")
    assert "block_size=32 is what pages of equal bytes ask of layer narrow on FIXED" in str(caught.value)
    assert "reads 16, multiples of 48" in str(caught.value)


def test_a_block_size_given_by_a_spec_is_never_rewritten():
    with pytest.raises(LayoutError, match="layer narrow on TORCH, its spec fixes 16"):
        plan(two_head_counts(block_size=16), "cpu")


def test_pages_that_no_block_makes_equal_are_refused_by_layer_and_backend():
    specs = {
        "odd": layer(num_kv_heads=17, num_heads=17),
        "even": layer(num_kv_heads=18, num_heads=18, sliding_window=8),
    }
    with pytest.raises(LayoutError) as caught:
        plan(specs, "cpu")
    text = str(caught.value)
    assert "8704 of layer odd (TORCH, block_size=16)" in text
    assert "9216 of layer even (TORCH, block_size=16)" in text


def test_pages_that_do_not_divide_each_other_get_their_least_common_multiple():
    specs = {"odd": layer(num_kv_heads=3, num_heads=6), "even": layer(sliding_window=8)}
    made = plan(specs, "cpu", num_blocks=4)
    assert {n: d.block_size for n, d in made.decisions.items()} == {"odd": 32, "even": 48}


# Layouts


@pytest.fixture
def fixed_layout(monkeypatch):
    """Fixes a layout by the function or by the variable, and undoes it."""

    def fix(how: str, layout: str) -> None:
        if how == "function":
            attnplug.runtime.set_kv_cache_layout(layout)
        else:
            monkeypatch.setenv("ATTNPLUG_KV_CACHE_LAYOUT", layout)

    yield fix
    attnplug.runtime.set_kv_cache_layout(None)


@pytest.mark.parametrize("how", ["function", "variable"])
def test_a_layout_fixed_from_outside_is_taken_for_every_layer_with_pages(how, fixed_layout):
    fixed_layout(how, "HND")
    made = plan(whisper(), "cpu")
    assert {d.kv_cache_layout for d in made.decisions.values() if not d.spec.direct_kv} == {"HND"}
    assert made.decisions["encoder.layers.0.self_attn"].kv_cache_layout is None


@pytest.mark.parametrize("how", ["function", "variable"])
def test_a_layout_that_a_backend_cannot_read_is_refused_by_layer_and_backend(how, fixed_layout):
    fixed_layout(how, "HND")
    nhd = backend("TOKENS_FIRST", supported_kv_cache_layouts=layouts("NHD"))
    limit = r"'HND' cannot be read by TOKENS_FIRST \(layer layers.0\), which takes NHD; clear ATTNPLUG"
    with offered(nhd), pytest.raises(LayoutError, match=limit):
        plan(TWO_KINDS, "cpu")


def test_the_layout_of_the_backend_where_nothing_is_fixed():
    with offered(backend("HEADS_FIRST", supported_kv_cache_layouts=layouts("HND"))):
        made = plan(TWO_KINDS, "cpu")
    assert {decision.kv_cache_layout for decision in made.decisions.values()} == {"HND"}
