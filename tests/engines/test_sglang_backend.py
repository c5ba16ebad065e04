"""SGLang's layers and batches on attnplug's backends, against the formula; SGLang itself is not needed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_stubs import (
    MHATokenToKVPool,
    Mode,
    RadixAttention,
    SWAKVPool,
    attend,
    batch,
    fake_sglang,
    runner,
    take_slots,
)

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.errors import BatchError, NoBackendError, SpecError
from attnplug.integrations.sglang import decisions

__all__ = ["fake_sglang"]
pytestmark = pytest.mark.usefixtures("fake_sglang")
BACKENDS = [None, "TORCH"]


@dataclasses.dataclass
class Served:
    """A backend with one layer, and the keys and values that its requests have so far."""

    backend: Any
    run: Any
    layer: RadixAttention
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def step(
        self, mode: str, extends: list[int], padding: int = 0, **changes: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and queries of a step that adds random tokens."""
        prefixes = [len(each) for each in self.keys]
        sinks = changes.pop("sinks", None)
        given = batch(mode, self.run, prefixes, extends, **changes)
        query, key, value = (torch.randn(sum(extends), heads, 16) for heads in (4, 2, 2))
        for stored, new in ((self.keys, key), (self.values, value)):
            for i, part in enumerate(new.split(extends)):
                stored[i] = torch.cat((stored[i], part))
        self.backend.init_forward_metadata(given)
        rows = [
            torch.cat((each, each.new_full((padding, *each.shape[1:]), 7.0))) for each in (query, key, value)
        ]
        output = self.backend.forward_extend(rows[0].flatten(1), *rows[1:], self.layer, given, sinks=sinks)
        assert output.shape == (sum(extends) + padding, 64)
        assert not output[sum(extends) :].any(), "rows of padding are 0"
        return output[: sum(extends)].view(-1, 4, 16), query

    def check(self, mode: str, extends: list[int], padding: int = 0, **expected: Any) -> None:
        """One step against the formula."""
        output, queries = self.step(mode, extends, padding)
        start = 0
        for i, count in enumerate(extends):
            one = attend(queries[start : start + count], self.keys[i], self.values[i], **expected)
            torch.testing.assert_close(output[start : start + count], one, atol=2e-5, rtol=2e-5)
            start += count


def served(
    backend: str | None, page: int = 4, layout: str = "nhd", runs: dict[str, Any] | None = None, **layer: Any
) -> Served:
    from attnplug.integrations.sglang.backend import Backend

    torch.manual_seed(0)
    attention = RadixAttention(**layer)
    run = runner(MHATokenToKVPool(256, page, layout=layout), attention, **(runs or {}))
    take_slots(run, [40, 33, 28])
    nothing = [torch.zeros(0, 2, 16)] * 3
    return Served(Backend(run, backend), run, attention, [*nothing], [*nothing])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_prompts_extends_mixed_steps_and_decodes(page: int, layout: str, backend: str | None) -> None:
    serving = served(backend, page, layout)
    serving.check("EXTEND", [5, 9, 1])
    serving.check("EXTEND", [7, 1, 12], padding=3)
    serving.check("MIXED", [4, 1, 1])
    serving.check("DECODE", [1, 1, 1])
    serving.check("SPLIT_PREFILL", [2, 3, 1])


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a window": ({"sliding_window_size": 5}, {"before": 5}),
    "a cap": ({"logit_cap": 0.7}, {"cap": 0.7}),
    "a scale": ({"scaling": 0.11}, {"scale": 0.11}),
    "a window and a cap": ({"sliding_window_size": 3, "logit_cap": 2.0}, {"before": 3, "cap": 2.0}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asked", ASKED)
def test_what_a_layer_asks_for_is_honoured(asked: str, backend: str | None) -> None:
    layer, expected = ASKED[asked]
    serving = served(backend, **layer)
    serving.check("EXTEND", [5, 9, 1], **expected)
    serving.check("EXTEND", [7, 1, 12], **expected)
    serving.check("DECODE", [1, 1, 1], **expected)


def test_layers_with_chunks_see_their_chunk_alone() -> None:
    serving = served(None, use_irope=True, runs={"attention_chunk_size": 8})
    serving.check("EXTEND", [5, 9, 1], chunk=8)
    serving.check("EXTEND", [7, 1, 12], chunk=8)
    serving.check("DECODE", [1, 1, 1], chunk=8)


def test_sinks_come_with_the_call_and_are_read_at_each() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        serving = served(None)
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=dtype)
        for count in ([5, 9, 1], [1, 1, 1]):
            output, queries = serving.step("EXTEND", count, sinks=sinks)
            keys, values = serving.keys[0], serving.values[0]
            one = attend(queries[: count[0]], keys, values, sinks=sinks.float())
            torch.testing.assert_close(output[: count[0]], one, atol=2e-5, rtol=2e-5)
            sinks.mul_(2.0)  # an update of weights


def test_a_verification_sees_the_drafts_before_it() -> None:
    serving = served(None)
    serving.check("EXTEND", [5, 9, 1])
    drafts = SimpleNamespace(draft_token_num=3, topk=1, custom_mask=None)
    output, queries = serving.step("TARGET_VERIFY", [3, 3, 3], spec_info=drafts)
    one = attend(queries[3:6], serving.keys[1], serving.values[1])
    torch.testing.assert_close(output[3:6], one, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_pages_of_8_bits_have_the_scales_of_the_layer(stored: torch.dtype) -> None:
    from attnplug.integrations.sglang.backend import Backend

    torch.manual_seed(0)
    layer = RadixAttention(k_scale_float=0.5, v_scale=torch.tensor(0.25))
    pool = MHATokenToKVPool(64, 4, dtype=stored)
    run = runner(pool, layer)
    take_slots(run, [12])
    backend = Backend(run)
    query, key, value = (torch.randn(9, heads, 16) for heads in (4, 2, 2))
    given = batch("EXTEND", run, [0], [9])
    backend.init_forward_metadata(given)
    backend.forward_extend(query, key, value, layer, given)
    rows = run.req_to_token_pool.req_to_token[0, :9].long()
    found = [part.view(stored)[rows].float() for part in pool.buffers[0]]
    for part, given_part, scale in zip(found, (key, value), (0.5, 0.25), strict=True):
        torch.testing.assert_close(part, (given_part / scale).to(stored).float())
    decode = batch("DECODE", run, [9], [1])
    one = [torch.randn(1, heads, 16) for heads in (4, 2, 2)]
    backend.init_forward_metadata(decode)
    output = backend.forward_decode(*one, layer, decode)
    keys, values = (
        torch.cat((a * s, (b / s).to(stored).float() * s))
        for a, b, s in zip(found, one[1:], (0.5, 0.25), strict=True)
    )
    torch.testing.assert_close(output.view(1, 4, 16), attend(one[0], keys, values), atol=1e-3, rtol=1e-3)


def test_layers_with_windows_have_slots_of_their_own() -> None:
    from attnplug.integrations.sglang.backend import Backend

    torch.manual_seed(0)
    layers = RadixAttention(0), RadixAttention(1, sliding_window_size=6)
    # The pages of windows have other numbers, and the page behind the window has none any more.
    mapping = torch.full((256,), -1, dtype=torch.int64)
    pool = SWAKVPool(MHATokenToKVPool(192, 4), MHATokenToKVPool(64, 4), mapping)
    run = runner(pool, *layers)
    take_slots(run, [20])
    rows = run.req_to_token_pool.req_to_token[0].long()
    for page, number in zip(range(0, 20, 4), (9, 2, 7, 5, 3), strict=True):
        mapping[rows[page : page + 4]] = torch.arange(4) + 4 * number
    backend = Backend(run)
    steps = [(batch("EXTEND", run, [0], [17]), 17), (batch("DECODE", run, [17], [1]), 1)]
    keys, values = torch.zeros(0, 2, 16), torch.zeros(0, 2, 16)
    for given, count in steps:
        query, key, value = (torch.randn(count, heads, 16) for heads in (4, 2, 2))
        keys, values = torch.cat((keys, key)), torch.cat((values, value))
        backend.init_forward_metadata(given)
        for layer in layers:
            output = backend.forward_extend(query, key, value, layer, given)
            expected = attend(query, keys, values, before=layer.sliding_window_size)
            torch.testing.assert_close(output.view(-1, 4, 16), expected, atol=2e-5, rtol=2e-5)
        mapping[rows[:8]] = -1
    assert set(decisions(SimpleNamespace(attn_backend=backend))) == {"layers.0", "layers.1"}


def test_cross_attention_reads_the_encoders_part_of_a_row() -> None:
    from attnplug.integrations.sglang.backend import Backend

    torch.manual_seed(0)
    own, cross = RadixAttention(0), RadixAttention(1, is_cross_attention=True)
    encoder_decoder = SimpleNamespace(is_encoder_decoder=True)
    run = runner(MHATokenToKVPool(128, 1, 2), own, cross, model_config=encoder_decoder)
    encoders, prompts = [6, 4], [3, 5]
    take_slots(run, [6 + 5, 4 + 7])
    rows = run.req_to_token_pool.req_to_token
    lens = torch.tensor(encoders)
    places = torch.cat([rows[i, :count] for i, count in enumerate(encoders)]).long()
    both = {"encoder_lens": lens, "encoder_lens_cpu": encoders, "encoder_out_cache_loc": places}
    backend = Backend(run)
    seen, memory = torch.randn(2, 10, 2, 16), [torch.zeros(0, 2, 16), torch.zeros(0, 2, 16)]
    prefixes = [0, 0]
    for counts, mode in ((prompts, "EXTEND"), ([1, 1], "DECODE")):
        given = batch(mode, run, prefixes, counts, **both)
        query, key = torch.randn(sum(counts), 4, 16), torch.randn(sum(counts), 2, 16)
        backend.init_forward_metadata(given)
        given_to_cross = (seen[0], seen[1]) if mode == "EXTEND" else (None, None)
        crossed = backend.forward_extend(query, *given_to_cross, cross, given).view(-1, 4, 16)
        output = backend.forward_extend(query, key, key, own, given).view(-1, 4, 16)
        start, end = 0, 0
        for i, (count, encoded) in enumerate(zip(counts, encoders, strict=True)):
            memory[i] = torch.cat((memory[i], key[start : start + count]))
            rows_of = slice(start, start + count)
            part = attend(
                query[rows_of], seen[0, end : end + encoded], seen[1, end : end + encoded], causal=False
            )
            torch.testing.assert_close(crossed[rows_of], part, atol=2e-5, rtol=2e-5)
            part = attend(query[rows_of], memory[i], memory[i])
            torch.testing.assert_close(output[rows_of], part, atol=2e-5, rtol=2e-5)
            start, end = start + count, end + encoded
        prefixes = prompts


def test_an_encoders_layer_sees_all_keys_of_its_call_and_writes_none() -> None:
    from attnplug.integrations.sglang.backend import Backend

    torch.manual_seed(0)
    layer, local = (
        RadixAttention(attn_type="encoder_only"),
        RadixAttention(attn_type="encoder_only", sliding_window_size=2),
    )
    pool = MHATokenToKVPool(64, 4)
    run = runner(pool, layer, local)
    take_slots(run, [7, 5])
    given = batch("EXTEND", run, [0, 0], [7, 5])
    backend = Backend(run)
    backend.init_forward_metadata(given)
    query, key, value = (torch.randn(12, heads, 16) for heads in (4, 2, 2))
    for each, reach in ((layer, -1), (local, 2)):
        output = backend.forward_extend(query, key, value, each, given).view(-1, 4, 16)
        expected = attend(query[7:], key[7:], value[7:], causal=False, before=reach, after=reach)
        torch.testing.assert_close(output[7:], expected, atol=2e-5, rtol=2e-5)
    assert not pool.buffers[0].any()
    computed = batch("EXTEND", run, [2, 0], [5, 5])
    backend.init_forward_metadata(computed)
    with pytest.raises(BatchError, match=r"extend_prefix_lens.*--disable-radix-cache"):
        backend.forward_extend(query[:10], key[:10], value[:10], layer, computed)


def test_keys_that_are_in_the_pages_are_not_written_again() -> None:
    serving = served(None)
    serving.check("EXTEND", [5, 9, 1])
    before = serving.run.token_to_kv_pool.buffers[0].clone()
    given = batch("DECODE", serving.run, [4, 8, 0], [1, 1, 1])
    serving.backend.init_forward_metadata(given)
    query, junk = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    for keys, saves in (((None, None), True), ((junk, junk), False)):
        output = serving.backend.forward_decode(query, *keys, serving.layer, given, saves).view(-1, 4, 16)
        torch.testing.assert_close(
            output[1:2], attend(query[1:2], serving.keys[1], serving.values[1]), atol=2e-5, rtol=2e-5
        )
    assert torch.equal(before, serving.run.token_to_kv_pool.buffers[0])


def test_the_pool_is_asked_at_each_call_because_it_may_load_pages_layer_by_layer() -> None:
    serving = served(None)
    serving.check("EXTEND", [5, 9, 1])
    asked = len(serving.run.token_to_kv_pool.asked)
    serving.check("DECODE", [1, 1, 1])
    assert len(serving.run.token_to_kv_pool.asked) == asked + 1


def test_a_layer_that_the_model_changes_is_bound_again() -> None:
    serving = served(None)
    serving.check("EXTEND", [5, 9, 1])
    serving.layer.sliding_window_size = 3
    serving.check("EXTEND", [3, 2, 1], before=3)


def test_arguments_that_are_not_known_are_refused() -> None:
    serving = served(None)
    given = batch("EXTEND", serving.run, [0], [3])
    serving.backend.init_forward_metadata(given)
    query, key = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    serving.backend.forward_extend(query, key, key, serving.layer, given, k_rope=None, return_lse=False)
    with pytest.raises(BatchError, match=r"q=\(3, 128\) must have 64 elements for each token"):
        serving.backend.forward_extend(query.repeat(1, 2, 1).flatten(1), key, key, serving.layer, given)
    for name in ("score_mod", "q_rope", "return_lse", "idx_q"):
        with pytest.raises(BatchError, match=f"{name}.*does not serve in SGLang"):
            serving.backend.forward_extend(query, key, key, serving.layer, given, **{name: object()})


def test_a_model_is_refused_when_it_starts_with_each_backends_reason() -> None:
    with pytest.raises(SpecError, match=r"pos_encoding_mode='ROPE_LLAMA'"):
        served(None, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(NoBackendError, match=r"TORCH.*page|block_size") as refused:
        served("FLASH_ATTN_2")
    assert "FLASH_ATTN_2" in str(refused.value)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_draft_decodes_its_tokens_one_after_the_other(in_graph: bool) -> None:
    from attnplug.integrations.sglang.drafts import DraftBackend

    serving, steps = served("TORCH"), 4
    serving.check("EXTEND", [5, 9, 1])
    drafts = DraftBackend(serving.run, "TORCH", 1, steps)
    rows = serving.run.req_to_token_pool.req_to_token
    slots = torch.stack([rows[i, len(keys) : len(keys) + steps] for i, keys in enumerate(serving.keys)])
    given = batch("DECODE", serving.run, [4, 8, 0], [1, 1, 1], spec_info=SimpleNamespace())
    given.out_cache_loc = slots.long().flatten()
    if in_graph:
        drafts.init_cuda_graph_state(4, 16)
        drafts.init_forward_metadata_out_graph(given, in_capture=True)
        drafts.init_forward_metadata_out_graph(given)
        drafts.init_forward_metadata_in_graph(given)
    else:
        drafts.init_forward_metadata(given)
    keys, values = [*serving.keys], [*serving.values]
    for backend in drafts.attn_backends:
        query, key, value = (torch.randn(3, heads, 16) for heads in (4, 2, 2))
        output = backend.forward_decode(query, key, value, serving.layer, given).view(-1, 4, 16)
        for i in range(3):
            keys[i], values[i] = (
                torch.cat((keys[i], key[i : i + 1])),
                torch.cat((values[i], value[i : i + 1])),
            )
            expected = attend(query[i : i + 1], keys[i], values[i])
            torch.testing.assert_close(output[i : i + 1], expected, atol=2e-5, rtol=2e-5)
    with pytest.raises(SpecError, match="speculative_eagle_topk=2 gives drafts branches"):
        DraftBackend(serving.run, "TORCH", 2, steps)


def test_a_draft_that_reads_another_models_pages_is_refused() -> None:
    backend = served(None).backend
    backend.token_to_kv_pool = backend.token_to_kv_pool
    with pytest.raises(SpecError, match=r"token_to_kv_pool.*another model's pages"):
        backend.token_to_kv_pool = MHATokenToKVPool(64, 4)


def test_idle_ranks_have_no_step() -> None:
    serving = served(None)
    serving.backend.init_forward_metadata(SimpleNamespace(forward_mode=Mode("IDLE")))
    with pytest.raises(BatchError, match="was not given to init_forward_metadata"):
        serving.backend.forward_extend(
            torch.zeros(1, 64), None, None, serving.layer, batch("DECODE", serving.run, [1], [1])
        )


def test_graphs_read_tensors_that_stay() -> None:
    serving = served("TORCH")
    backend, run = serving.backend, serving.run
    serving.check("EXTEND", [5, 9, 1])
    backend.init_cuda_graph_state(4, 4)
    captured = batch("DECODE", run, [0, 0, 0, 0], [1, 1, 1, 1])
    captured.req_pool_indices = torch.zeros(4, dtype=torch.int64)
    captured.out_cache_loc = torch.zeros(4, dtype=torch.int64)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    query, key = torch.randn(4, 4, 16), torch.randn(4, 2, 16)
    backend.forward_decode(query, key, key, serving.layer, captured)
    common = backend._step.common("full")
    addresses = [
        each.data_ptr() for each in (common.block_table_tensor, common.seq_lens, common.slot_mapping)
    ]
    # SGLang gives a replay the slots of its real requests alone, and fills up requests.
    replayed = batch("DECODE", run, [5, 9, 1], [1, 1, 1])
    replayed.batch_size = 4
    replayed.req_pool_indices = torch.tensor([0, 1, 2, 0])
    replayed.seq_lens = replayed.seq_lens_cpu = torch.tensor([6, 10, 2, 1])
    backend.init_forward_metadata_out_graph(replayed)
    common = backend._step.common("full")
    assert addresses == [
        each.data_ptr() for each in (common.block_table_tensor, common.seq_lens, common.slot_mapping)
    ]
    assert common.slot_mapping.tolist() == [*replayed.out_cache_loc.tolist(), -1], "padding writes nothing"
    output = backend.forward_decode(query, key, key, serving.layer, replayed).view(-1, 4, 16)
    for i in range(3):
        keys = torch.cat((serving.keys[i], key[i : i + 1])), torch.cat((serving.values[i], key[i : i + 1]))
        torch.testing.assert_close(output[i : i + 1], attend(query[i : i + 1], *keys), atol=2e-5, rtol=2e-5)
    smaller = batch("DECODE", run, [5, 9], [1, 1])
    with pytest.raises(BatchError, match="batch_size=2 of 1 tokens each were not captured"):
        backend.init_forward_metadata_out_graph(smaller)
    with pytest.raises(BatchError, match="forward_mode='EXTEND' is not served inside of CUDA graphs"):
        backend.init_forward_metadata_out_graph(batch("EXTEND", run, [0], [4]), in_capture=True)
    serving.layer.scaling = 0.2  # the layer is of another kind from now on, and graphs read the first one's
    outside = batch("DECODE", run, [5, 9, 1], [1, 1, 1])
    backend.init_forward_metadata(outside)
    backend.forward_decode(query[:3], key[:3], key[:3], serving.layer, outside)
    backend.init_forward_metadata_out_graph(replayed)
    assert [kind[1].scale for kind in backend._step.made] == [0.3]
    backend.init_cuda_graph_state(2, 2)
    assert backend._captured, "smaller sizes change nothing"
    backend.init_cuda_graph_state(5, 5)
    with pytest.raises(BatchError, match="batch_size=4 of 1 tokens each were not captured"):
        backend.init_forward_metadata_out_graph(replayed)
    backend.init_cuda_graph_state(4, 4)
    replayed.batch_size = 6
    replayed.req_pool_indices = torch.zeros(6, dtype=torch.int64)
    replayed.seq_lens = replayed.seq_lens_cpu = torch.ones(6, dtype=torch.int64)
    with pytest.raises(BatchError, match="must be at most 5 requests"):
        backend.init_forward_metadata_out_graph(replayed)


def test_a_warm_up_runs_each_kind_of_step_and_writes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnplug.integrations.sglang.warm_up import warm_up  # it needs the stand-ins of SGLang

    serving = served(None)
    serving.check("EXTEND", [5, 9, 1])
    before = serving.run.token_to_kv_pool.buffers[0].clone()
    assert warm_up(serving.backend) == 0  # TORCH compiles nothing
    monkeypatch.setattr("attnplug.integrations.sglang.warm_up.compiles", lambda decision: True)
    seen: list[tuple[int, int]] = []
    attend_once = TorchImpl.attend

    def noted(impl: Any, layer: Any, query: torch.Tensor, *given: Any, **asked: Any) -> torch.Tensor:
        metadata = given[3]
        seen.append((query.shape[0], int(metadata.slot_mapping.max())))
        return attend_once(impl, layer, query, *given, **asked)

    monkeypatch.setattr(TorchImpl, "attend", noted)
    assert warm_up(serving.backend) == len(seen) > 10
    assert {rows for rows, _ in seen} >= {1, 4, 64}
    assert {slot for _, slot in seen} == {-1}
    assert torch.equal(before, serving.run.token_to_kv_pool.buffers[0])
    serving.check("DECODE", [1, 1, 1])


def test_a_warm_up_runs_layers_with_the_sinks_that_their_models_have_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from attnplug.integrations.sglang.warm_up import warm_up

    serving, seen = served(None), list[bool]()
    beside = torch.nn.Module()
    beside.sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.25]), requires_grad=False)
    beside.sink_k = torch.nn.Parameter(torch.zeros(7), requires_grad=False)  # not one for each head
    beside.attn = serving.layer
    serving.run.model.layers = torch.nn.ModuleList([beside])
    monkeypatch.setattr(
        "attnplug.integrations.sglang.warm_up.compiles",
        lambda decision: seen.append(decision.spec.has_sinks) or True,
    )
    assert warm_up(serving.backend) > 10
    assert seen == [True]
    warm = serving.backend.bound(serving.layer, beside.sinks)
    output, queries = serving.step("EXTEND", [5, 9, 1], sinks=beside.sinks)
    one = attend(queries[:5], serving.keys[0], serving.values[0], sinks=beside.sinks)
    torch.testing.assert_close(output[:5], one, atol=2e-5, rtol=2e-5)
    assert serving.backend.bound(serving.layer, beside.sinks) is warm
    serving.check("DECODE", [1, 1, 1])  # a model that passes none
