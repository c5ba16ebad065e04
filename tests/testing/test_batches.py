"""The batches with traps hold what they say."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

import attnplug.testing
from attnplug.core import AttentionBackend, LayerSpec
from attnplug.testing import direct_batch, layer_tensors, paged_batch

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype="float32")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_size_v", [8, 6])
def test_pages_hold_the_computed_tokens_and_nan_elsewhere(layout: str, head_size_v: int) -> None:
    spec = SPEC.replace(head_size_v=head_size_v)
    batch = paged_batch(spec, [1, 3, 5], [9, 3, 12], block_size=4, layout=layout)
    assert batch.kv_cache is not None
    held = 0
    for row, (new, seq_len) in enumerate(zip([1, 3, 5], [9, 3, 12], strict=True)):
        positions = torch.arange(seq_len - new)
        blocks = batch.common.block_table_tensor[row].long()[positions // 4]
        assert (blocks > 0).all()
        for pages, tokens in zip(
            AttentionBackend.split_kv(batch.kv_cache, spec), (batch.keys, batch.values), strict=True
        ):
            assert torch.equal(pages[blocks, positions % 4].double(), tokens[row][: seq_len - new])
        held += seq_len - new
    assert not batch.kv_cache[0].any()
    k_pages, _ = AttentionBackend.split_kv(batch.kv_cache[1:], spec)
    assert int((~k_pages.isnan()).all(-1).all(-1).sum()) == held


def test_layouts_differ_in_strides_only() -> None:
    nhd, hnd = (paged_batch(SPEC, [1], [9], layout=layout).kv_cache for layout in ("NHD", "HND"))
    assert nhd is not None
    assert hnd is not None
    assert nhd.shape == hnd.shape
    assert torch.equal(nhd.nan_to_num(7.0), hnd.nan_to_num(7.0))
    assert nhd.stride()[2:4] == (16, 8)
    assert hnd.stride()[2:4] == (8, 128)


def test_slots_are_those_of_the_new_tokens() -> None:
    batch = paged_batch(SPEC, [2], [6], block_size=4, padding=1)
    first = int(batch.common.block_table_tensor[0, 1]) * 4
    assert batch.common.slot_mapping.tolist() == [first, first + 1, -1]
    assert batch.common.num_actual_tokens == 2
    assert batch.query[2:].isnan().all()


def test_a_padding_request_stores_nothing() -> None:
    batch = paged_batch(SPEC, [1, 2], [0, 1])
    assert batch.common.slot_mapping.tolist()[:2] == [-1, -1]
    assert batch.key[:2].isnan().all()
    assert not batch.key[2:].isnan().any()


def test_dropped_pages_point_to_the_null_block() -> None:
    windowed = SPEC.replace(sliding_window=5)
    kept = paged_batch(windowed, [2], [30], block_size=4).common.block_table_tensor
    dropped = paged_batch(windowed, [2], [30], block_size=4, drop_window=True).common.block_table_tensor
    assert dropped[0, :6].tolist() == [0] * 6
    assert torch.equal(dropped[0, 6:], kept[0, 6:])


def test_cross_layers_write_all_tokens_of_the_encoder() -> None:
    spec = SPEC.replace(attn_type="encoder_decoder")
    batch = paged_batch(spec, [3, 1], [5, 7])
    assert batch.query.shape[0] == 4
    assert batch.key.shape[0] == batch.common.slot_mapping.shape[0] == 12


def test_direct_batches_say_where_their_keys_start() -> None:
    batch = direct_batch(SPEC.replace(direct_kv=True), [1, 3], [9, 8], key_lens=[4, 8])
    assert batch.kv_cache is None
    assert batch.common.key_start_loc_cpu is not None
    assert batch.common.key_start_loc_cpu.tolist() == [0, 4, 12]
    assert direct_batch(SPEC.replace(direct_kv=True), [3], [3]).common.key_start_loc_cpu is None


def test_a_seed_gives_the_same_batch() -> None:
    first, second, other = (paged_batch(SPEC, [3], [9], seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.query, second.query)
    assert not torch.equal(first.query, other.query)


def test_layers_get_the_tensors_they_ask_for() -> None:
    plain = layer_tensors(SPEC)
    assert plain.sinks is None
    assert plain.alibi_slopes is None
    full = layer_tensors(SPEC.replace(has_sinks=True, has_alibi=True))
    full.check(SPEC.replace(has_sinks=True, has_alibi=True))
    assert full.alibi_slopes is not None
    slopes = full.alibi_slopes.tolist()
    assert slopes not in (sorted(slopes), sorted(slopes, reverse=True))
    ratios = {round(larger / smaller, 3) for smaller, larger in itertools.pairwise(sorted(slopes))}
    assert len(ratios) == 3  # no geometric series
    assert min(slopes) < 0.01
    assert max(slopes) > 0.2


def test_the_package_exports_what_it_names_and_imports_torch_only_when_used() -> None:
    assert sorted(attnplug.testing.__all__) == dir(attnplug.testing)
    assert all(hasattr(attnplug.testing, name) for name in attnplug.testing.__all__)
    code = "import sys, attnplug.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
