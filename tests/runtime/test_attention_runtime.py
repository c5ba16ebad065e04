"""AttentionRuntime against the oracle, over the steps of requests that come, grow, share and go."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from model_layers import layer
from served_model import ServedModel

from attnplug import LayerSpec, plan
from attnplug.core.errors import BatchError
from attnplug.runtime import AttentionRuntime
from attnplug.testing import assert_close, attention_oracle, direct_batch, tolerance

FULL = layer(dtype="float32")
SLIDING = layer(dtype="float32", sliding_window=20)
CROSS = layer(dtype="float32", attn_type="encoder_decoder")
BLOCK = 16


def serve(model: ServedModel) -> None:
    """Chunked prefill, decodes and extends of two requests in one batch; one goes, another comes."""
    model.add("a")
    model.step(a=20)
    model.add("b")
    model.step(a=11, b=3)
    for _ in range(3):
        model.step(a=1, b=1)
    model.step(a=1, b=17)
    model.remove("a")
    model.add("c")
    model.step(b=1, c=40)
    model.step(b=1)
    model.step(b=2, c=1)


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        SLIDING,
        layer(dtype="float32", chunk_size=8),
        layer(dtype="float32", logits_soft_cap=5.0, scale=0.5),
        layer(dtype="float32", has_sinks=True, sliding_window=9),
        layer(dtype="float32", has_alibi=True),
        layer(dtype="float32", head_size_v=4),
        layer(dtype="bfloat16"),
        layer(dtype="float16", block_size=4),
    ],
    ids=["full", "sliding", "chunked", "cap", "sinks", "alibi", "values", "bfloat16", "float16"],
)
def test_mixed_batches_of_prefills_extends_and_decodes(spec):
    serve(ServedModel({"layers.0": spec}))


def test_a_hybrid_model_frees_the_pages_that_windows_have_passed():
    model = ServedModel({f"layers.{i}": FULL if i % 3 == 2 else SLIDING for i in range(6)})
    serve(model)
    model.step(c=20)
    sliding = [blocks for g, blocks in enumerate(model.requests["c"].blocks) if 0 in blocks]
    assert len(sliding) == 2
    assert all(blocks[:2] == [0, 0] for blocks in sliding)
    model.step(b=1, c=1)
    model.remove("b")
    model.remove("c")
    assert model.runtime.block_pool.num_free == 127


def test_the_null_block_stays_zero():
    model = ServedModel({"full": FULL, "sliding": SLIDING})
    serve(model)
    assert all(not cache[0].any() for cache in model.runtime.kv_caches.values())


def test_a_prefix_is_attended_from_the_pages_of_another_request():
    model = ServedModel({"full": FULL, "sliding": layer(dtype="float32", sliding_window=64)})
    model.add("a")
    model.step(a=37)
    model.add("b", prefix=("a", 32))
    shared = model.requests["a"].blocks[0][:2]
    assert [model.runtime.block_pool.users(block) for block in shared] == [2, 2]
    model.step(a=1, b=5)
    model.remove("a")
    assert [model.runtime.block_pool.users(block) for block in shared] == [1, 1]
    model.step(b=1)
    model.step(b=9)


def test_a_speculation_of_which_fewer_tokens_are_accepted():
    model = ServedModel({"full": FULL, "sliding": SLIDING})
    model.add("a")
    model.add("b")
    model.step(a=9, b=14)
    model.step(a=4, b=4, accepted={"a": 1, "b": 3})
    model.step(a=4, b=4, accepted={"a": 4, "b": 0})
    model.step(a=1, b=4, accepted={"b": 2})
    model.step(a=1, b=1)


def test_layers_that_share_kv_read_the_pages_of_their_target():
    specs = {"0": FULL, "1": SLIDING, "2": FULL, "3": SLIDING}
    model = ServedModel(specs, kv_sharing={"2": "0", "3": "1"})
    serve(model)
    caches = model.runtime.kv_caches
    assert caches["2"].data_ptr() == caches["0"].data_ptr()
    impls = [each.impl.kv_sharing_target_layer_name for each in model.runtime.layers.values()]
    assert impls == [None, None, "0", "1"]


def test_fp8_pages_have_the_scales_of_their_layer():
    spec = layer(dtype="bfloat16", kv_cache_dtype="fp8")
    serve(ServedModel({"layers.0": spec}, scales=(0.5, 0.25)))


def test_a_layer_that_shares_fp8_pages_has_the_scales_of_its_target():
    spec = layer(dtype="bfloat16", kv_cache_dtype="fp8")
    serve(ServedModel({"0": spec, "1": spec}, scales=(2.0, 0.5), kv_sharing={"1": "0"}))


@pytest.mark.parametrize("spec", [FULL, layer(dtype="float32", head_size_v=4)], ids=["one", "packed"])
def test_pages_with_heads_first(spec, monkeypatch):
    monkeypatch.setenv("ATTNPLUG_KV_CACHE_LAYOUT", "HND")
    model = ServedModel({"layers.0": spec})
    serve(model)
    # Heads before tokens, in the strides only.
    heads, tokens = model.runtime.kv_caches["layers.0"].stride()[-2], BLOCK
    assert heads == tokens * model.runtime.kv_caches["layers.0"].shape[-1]


def test_pages_of_unlike_head_counts_share_one_pool():
    narrow = layer(dtype="float32", num_kv_heads=1)
    model = ServedModel({"narrow": narrow, "wide": layer(dtype="float32", sliding_window=12)})
    assert [group.kv_cache_spec.block_size for group in model.groups] == [32, 16]
    serve(model)


# Encoders and decoders


def test_a_decoder_attends_its_encoder_from_pages_written_once():
    model = ServedModel({"self": FULL, "cross": CROSS}, max_encoder_len=40)
    model.add("a", encoder_len=33)
    model.step(a=4)
    model.add("b", encoder_len=7)
    model.step(a=1, b=3)
    model.step(a=1, b=1)
    model.remove("a")
    model.add("c", encoder_len=40)
    model.step(c=1)
    model.step(b=1, c=2)


def encoder_runtime(**asked: Any) -> tuple[LayerSpec, AttentionRuntime]:
    spec = layer(dtype="float32", attn_type="encoder", direct_kv=True, **asked)
    return spec, AttentionRuntime(plan({"e0": spec, "e1": spec, "self": FULL}, "cpu", num_blocks=8))


@pytest.mark.parametrize("asked", [{}, {"window": (3, 3)}, {"block_size": 16}], ids=["all", "near", "paged"])
def test_encoder_layers_attend_what_comes_with_the_call(asked):
    spec, runtime = encoder_runtime(**asked)
    batch = direct_batch(spec, [5, 30], [5, 30])
    runtime.begin_step(direct=batch.common)
    for name in ("e0", "e1"):
        found = runtime.forward(name, batch.query, batch.key, batch.value)
        assert_close(found, batch.oracle().output, tolerance(spec).output)


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_direct_keys_are_more_than_the_queries(on_host):
    spec, runtime = encoder_runtime(causal=True)
    batch = direct_batch(spec, [1, 4], [9, 20], key_lens=[9, 12])
    if not on_host:
        batch.common.key_start_loc_cpu = None
    runtime.begin_step(direct=batch.common)
    found = runtime.forward("e0", batch.query, batch.key, batch.value)
    assert_close(found, batch.oracle().output, tolerance(spec).output)


def test_fewer_direct_keys_than_the_step_has():
    spec, runtime = encoder_runtime(causal=True)
    batch = direct_batch(spec, [1, 4], [9, 20], key_lens=[9, 12])
    runtime.begin_step(direct=batch.common)
    with pytest.raises(BatchError, match=r"key=\(20, 2, 8\) of layer e0 must have the shape \(at least 21"):
        runtime.forward("e0", batch.query, batch.key[:20], batch.value)
    found = runtime.forward("e0", batch.query, batch.key, batch.value)
    assert_close(found, batch.oracle().output, tolerance(spec).output)


def test_an_encoder_and_a_decoder_in_one_step():
    spec, runtime = encoder_runtime()
    direct = direct_batch(spec, [6], [6])
    batches = runtime.step_batch_builder(32)
    batches.add_request("a", [runtime.block_pool.allocate(1)])
    runtime.begin_step(batches.step(3), direct.common)
    runtime.forward("e0", direct.query, direct.key, direct.value)
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    expected = attention_oracle(FULL, [q], [k], [v], [3]).output
    assert_close(runtime.forward("self", q, k, v), expected, 1e-5)


# Outputs


def test_an_output_that_is_given_is_written_and_rows_past_the_tokens_are_not():
    model = ServedModel({"0": FULL}, debug=False)
    model.add("a")
    model.begin(a=3)
    drawn = model.draw("0", {"a": 3})
    padded = torch.cat([drawn.query, torch.full((2, 4, 8), torch.nan)])
    output = torch.full((6, 4, 8), 7.0)
    found = model.runtime.forward("0", padded, drawn.key, drawn.value, output)
    assert found is output
    assert_close(output[:3], drawn.expected, 1e-5)
    assert (output[3:] == 7.0).all()


def test_the_log_sum_exp_is_written_where_it_is_asked():
    model = ServedModel({"0": layer(dtype="float32", needs_lse=True)})
    model.add("a")
    model.begin(a=3)
    drawn = model.draw("0", {"a": 3})
    lse = torch.empty(3, 4)
    model.runtime.forward("0", drawn.query, drawn.key, drawn.value, output_lse=lse)
    keys = [model.requests["a"].keys["0"][0]]
    values = [model.requests["a"].keys["0"][1]]
    spec = model.plan.specs["0"]
    expected = attention_oracle(spec, [drawn.query], keys, values, [3]).lse
    torch.testing.assert_close(lse.double(), expected, rtol=1e-4, atol=1e-4)


def test_an_empty_step_gives_an_empty_output():
    model = ServedModel({"0": FULL})
    model.add("a")
    model.step(a=2)
    model.step(a=0)
    assert model.requests["a"].computed == 2


# Several runtimes


def test_two_runtimes_serve_in_two_threads_at_once():
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            serve(ServedModel({"full": FULL, "sliding": SLIDING}, seed=seed))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_one_plan_serves_two_runtimes_with_pages_of_their_own():
    made = plan({"0": FULL}, "cpu", num_blocks=64)
    first, second = (ServedModel({"0": FULL}, planned=made, seed=seed) for seed in (1, 2))
    first.add("a")
    second.add("a")
    for count in (18, 1, 5):
        first.step(a=count)
        second.step(a=count)
    assert first.runtime.kv_caches["0"].data_ptr() != second.runtime.kv_caches["0"].data_ptr()


def test_the_tokens_of_a_request_do_not_depend_on_its_batch():
    alone, together = ServedModel({"0": FULL}, seed=3), ServedModel({"0": FULL}, seed=3)
    alone.add("a")
    alone.begin(a=7)
    drawn = alone.draw("0", {"a": 7})
    together.add("a")
    together.add("b")
    together.begin(a=7, b=2)
    other = together.draw("0", {"a": 7, "b": 2})
    key, value = (
        torch.cat([mine, theirs[7:]]) for mine, theirs in ((drawn.key, other.key), (drawn.value, other.value))
    )
    found = together.runtime.forward("0", torch.cat([drawn.query, other.query[7:]]), key, value)
    assert_close(found[:7], drawn.expected, 1e-5)


def test_autocast_of_the_engine_does_not_reach_attention():
    spec, runtime = encoder_runtime()
    batch = direct_batch(spec, [5, 30], [5, 30])
    runtime.begin_step(direct=batch.common)
    with torch.autocast("cpu", torch.bfloat16):
        found = runtime.forward("e0", batch.query, batch.key, batch.value)
    assert_close(found, batch.oracle().output, tolerance(spec).output)
