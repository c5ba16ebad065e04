"""Decode context parallelism in vLLM: its layers on ranks, in threads here, and with vLLM's own classes in processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_engine import BLOCK, Engine, Group, answer, run_ranks, steps

from attnplug import LayerSpec
from attnplug.backends.torch_native import TorchBackend
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError, LayoutError, SpecError
from attnplug.core.impl import LayerTensors
from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.integrations.vllm.rank_layers import RankBuilder, RankImpl, make_rank_impl
from attnplug.integrations.vllm.ranks import (
    Ranks,
    check_ranks,
    gathered_spec,
    new_tokens_of,
    rank_refusal,
    ranks_of,
)
from attnplug.integrations.vllm.steps import SeenLayer, translate
from attnplug.registry.default import select

HERE = Path(__file__).parent
SOURCES = [Path(path) for path in os.environ.get("ATTNPLUG_VLLM_SOURCE", "").split(os.pathsep) if path]
CPU = torch.device("cpu")
HEADS, SIZE, SCALE = 4, 64, 0.3
SPEC = LayerSpec(num_heads=HEADS, num_kv_heads=1, head_size=SIZE, scale=SCALE, dtype="float32")
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
LATENT = LayerSpec(num_heads=2, num_kv_heads=1, head_size=576, scale=0.07, dtype="float32", mla=DIMS)


def on_rank(ranks: Ranks, spec: LayerSpec, tensors: LayerTensors) -> tuple[RankImpl, RankBuilder]:
    """The layer and its builder, as vLLM's client makes them."""
    pages, new = gathered_spec(spec, ranks.place.size).replace(block_size=BLOCK), new_tokens_of(spec)
    if spec.mla is not None:
        new = new.replace(block_size=BLOCK)
    decisions = (select(each, "cpu", backend="TORCH") for each in (pages, new))
    impl = make_rank_impl(ranks, spec, *decisions, tensors, "a")
    config = BuilderConfig(layers={"a": SeenLayer(None, impl)}, max_num_seqs=16)
    return impl, RankBuilder(impl, config, BLOCK, CPU)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("interleave", [1, 4, BLOCK])
@pytest.mark.parametrize("exchange", ["ag_rs", "a2a"])
def test_ranks_give_the_answers_of_one(size: int, interleave: int, exchange: Any) -> None:
    def run(group: Group) -> None:
        ranks, own = Ranks(group, interleave, exchange), group.rank_in_group
        engine = Engine(own, size, interleave, (SIZE, SIZE))
        sinks, heads = engine.draw(HEADS * size), slice(own * HEADS, (own + 1) * HEADS)
        spec = SPEC.replace(has_sinks=True, logits_soft_cap=5.0)
        impl, builder = on_rank(ranks, spec, LayerTensors(sinks=sinks[heads]))
        cache = torch.zeros(64, 2, BLOCK, 1, SIZE)
        for given, rows in steps(engine):
            common = translate(given, exact=True, has_ranks=True)
            query = engine.draw(common.num_actual_tokens, HEADS * size, SIZE)
            key, value = (torch.zeros(common.num_actual_tokens, 1, SIZE) for _ in range(2))
            for row, (request, place) in enumerate(rows):
                key[row], value[row] = request.keys[place], request.values[place]
            impl.update_kv_cache(None, key, value, cache, common.slot_mapping)
            # Padding of a graph is in the output too.
            output = torch.full((query.shape[0] + 3, HEADS, SIZE), torch.nan)
            impl.attend(None, query[:, heads], key, value, cache, builder.build(0, common), output)
            for row, (request, place) in enumerate(rows):
                seen = request.keys[: place + 1], request.values[: place + 1]
                expected = answer(query[row, heads], *seen, SCALE, 5.0, sinks[heads])
                torch.testing.assert_close(output[row].double(), expected, atol=2e-5, rtol=1e-4)

    run_ranks(size, run)


@pytest.mark.parametrize("interleave", [1, BLOCK])
def test_ranks_exchange_absorbed_queries_and_latents(interleave: int) -> None:
    size, rank = 2, DIMS.kv_lora_rank

    def run(group: Group) -> None:
        ranks, own = Ranks(group, interleave, None), group.rank_in_group
        engine = Engine(own, size, interleave, (576, 1))
        w_uk, w_uv = engine.draw(2 * size, 128, rank) * 0.05, engine.draw(2 * size, rank, 128) * 0.1
        heads = slice(own * 2, own * 2 + 2)
        impl, builder = on_rank(ranks, LATENT, LayerTensors(w_uk=w_uk[heads], w_uv=w_uv[heads]))
        cache = torch.zeros(64, BLOCK, 576)
        for given, rows in steps(engine):
            common = translate(given, exact=True, has_ranks=True)
            query = engine.draw(common.num_actual_tokens, 2 * size, 192)
            key = torch.zeros(common.num_actual_tokens, 1, 576)
            for row, (request, place) in enumerate(rows):
                key[row] = request.keys[place]
            impl.update_kv_cache(None, key, key, cache, common.slot_mapping)
            output = torch.full((query.shape[0], 2, 128), torch.nan)
            impl.attend(None, query[:, heads], key, None, cache, builder.build(0, common), output)
            for row, (request, place) in enumerate(rows):
                latents = request.keys[: place + 1].double()
                for head in range(2):
                    k = latents[:, :rank] @ w_uk[heads][head].double().T
                    k = torch.cat((k, latents[:, rank:]), dim=1)
                    v = latents[:, :rank] @ w_uv[heads][head].double()
                    expected = answer(query[row, heads][head][None], k, v, 0.07, None, None)[0]
                    found = output[row, head].double()
                    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)

    run_ranks(size, run)


def built(step: Any, method: str = "build", **changes: Any) -> Any:
    group = Group(2, 1)
    _, builder = on_rank(Ranks(group, 1, None), SPEC, LayerTensors())
    common = translate(step, exact=True, has_ranks=True)
    for name, value in changes.items():
        setattr(common, name, value)
    return getattr(builder, method)(*((0, common) if method == "build" else (common,)))


def some_step(*counts: int) -> Any:
    engine = Engine(1, 2, 1, (SIZE, SIZE))
    for number, count in enumerate(counts):
        engine.add(str(number), count + 8)
    return engine.step({str(number): count for number, count in enumerate(counts)})[0]


def test_a_graph_of_decodes_reads_the_lengths_that_vllm_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = some_step(1, 1, 1), list[Any]()
    builder = TorchBackend.get_builder_cls()
    capture = builder.build_for_cudagraph_capture
    monkeypatch.setattr(
        builder,
        "build_for_cudagraph_capture",
        lambda self, common: seen.append(common) or capture(self, common),
    )
    assert built(step, "build_for_cudagraph_capture").new is None
    assert [common.seq_lens.data_ptr() for common in seen] == [step.dcp_local_seq_lens.data_ptr()]
    with pytest.raises(BatchError, match=r"max_query_len=2 must be 1 in a graph"):
        built(some_step(2, 1), "build_for_cudagraph_capture")


def test_new_prompts_at_the_end_exchange_nothing() -> None:
    assert built(some_step(3, 5)).paged_tokens == 0
    engine = Engine(1, 2, 1, (SIZE, SIZE))
    for name in ("a", "b"):
        engine.add(name, 20)
    engine.step({"a": 9})
    found = built(engine.step({"a": 2, "b": 4})[0])
    assert (found.paged_tokens, found.num_actual_tokens) == (2, 6)


def test_the_share_of_a_rank_needs_exact_lengths_on_the_host() -> None:
    with pytest.raises(BatchError, match=r"seq_lens_host='an upper bound' must be the exact lengths"):
        built(some_step(1, 1), seq_lens_host_exact=False)
    with pytest.raises(BatchError, match=r"seq_lens_host='none' must be the exact lengths"):
        built(some_step(1, 1), seq_lens_host=None)


def test_a_run_of_tokens_that_a_page_cuts_is_refused() -> None:
    group = Group(2, 1)
    with pytest.raises(LayoutError, match=r"cp_kv_cache_interleave_size=32 must divide 16"):
        on_rank(Ranks(group, 32, None), SPEC, LayerTensors())


def test_lengths_of_ranks_are_refused_where_no_group_shares_tokens() -> None:
    with pytest.raises(BatchError, match=r"dcp_local_seq_lens.*no group of ranks shares the tokens"):
        translate(some_step(1, 1), exact=True)


@pytest.mark.parametrize(
    ("spec", "asked", "words"),
    [
        (SPEC.replace(sliding_window=8), {}, "a window or chunk"),
        (SPEC.replace(chunk_size=64), {}, "a window or chunk"),
        (SPEC.replace(has_alibi=True), {}, "alibi"),
        (SPEC.replace(mm_prefix=True), {}, "multimodal prefix spans"),
        (SPEC.replace(invariance=("batch",)), {}, "invariance"),
        (SPEC.replace(causal=False), {}, "causal=False"),
        (SPEC.replace(num_kv_heads=2), {}, "num_kv_heads=2 on a rank"),
        (SPEC.replace(attn_type="encoder_decoder", causal=False), {}, "attn_type=encoder_decoder"),
        (LATENT.replace(sparse=SparseSpec(kind="token_topk", topk=64)), {}, "sparse attention"),
        (SPEC, {"shares_kv": True}, "a layer that reads another layer's pages"),
        (SPEC, {"drafts": True}, "draft tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_ranks_cannot_share_are_refused_with_the_reason(
    spec: LayerSpec, asked: dict[str, bool], words: str
) -> None:
    reason = rank_refusal(spec, **asked)
    assert reason is not None
    assert reason.startswith(f"{words} not supported under context parallelism: ")
    group = Group(2, 1)
    with pytest.raises(
        SpecError, match=r"decode_context_parallel_size=2 cannot be served in this layer"
    ) as error:
        check_ranks(Ranks(group, 1, None), spec, **asked)
    assert reason in str(error.value)


def test_layers_that_ranks_can_share_are_not_refused() -> None:
    assert rank_refusal(SPEC.replace(has_sinks=True, logits_soft_cap=5.0)) is None
    assert rank_refusal(LATENT) is None
    assert rank_refusal(SPEC.replace(attn_type="encoder_only", causal=False, direct_kv=True)) is None


def test_a_configuration_without_ranks_has_none_and_prefill_ranks_are_refused() -> None:
    assert ranks_of(SimpleNamespace()) is None
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=2)
    with pytest.raises(SpecError, match=r"prefill_context_parallel_size=2 is not served"):
        ranks_of(SimpleNamespace(parallel_config=parallel))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "backend"), [(2, "_TORCH"), (4, "_TORCH"), (2, "_TRITON"), (2, "")])
@pytest.mark.parametrize("source", SOURCES or [None], ids=lambda path: path.name if path else "none")
def test_vllms_own_classes_give_the_answers_of_one_rank(
    source: Path | None, size: int, backend: str, tmp_path: Path
) -> None:
    if source is None:
        pytest.skip("no source tree of vLLM: ATTNPLUG_VLLM_SOURCE is not set")
    path = os.pathsep.join(map(str, (source, HERE.parents[1], HERE)))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / "ranks_for_vllm.py"),
        str(size),
        str(tmp_path),
        backend,
    ]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    reports = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert len(reports) == size, done.stdout + done.stderr
    for report in reports:
        assert not report["failed"], "\n".join(report["failed"].values())
        assert report["ran"] == reports[0]["ran"]
        assert len(report["ran"]) >= 3
