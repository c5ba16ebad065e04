"""What several ranks do together: exchanges of partial results, and steps of runtimes compared with one rank."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graph_ranks import DirectBuilder, Replays, graph_backends

import attnplug
from attnplug import LayerSpec, errors
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import BuilderConfig, ContextParallel, LayerTensors, MLADims
from attnplug.ops import ExchangeBuffers, combine, combine_partials
from attnplug.runtime import (
    AttentionRuntime,
    GraphState,
    ModelPlan,
    RankWatch,
    check_same_plan,
    context_parallel,
)
from attnplug.runtime.batch import sharded_step
from attnplug.runtime.ranks import new_tokens
from attnplug.runtime.ranks.new_tokens import NewLatents

Case = Callable[[dist.ProcessGroup], None]

FULL = LayerSpec(num_heads=6, num_kv_heads=2, head_size=16, dtype="float32")
LATENT = LayerSpec(
    num_heads=4,
    num_kv_heads=1,
    head_size=40,
    dtype="float32",
    mla=MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
)
MODELS: dict[str, dict[str, LayerSpec]] = {
    "llama": {"0": FULL, "1": FULL},
    "gemma": {"0": FULL.replace(logits_soft_cap=3.0), "1": FULL.replace(sliding_window=8)},
    "sinks": {"0": FULL.replace(has_sinks=True), "1": FULL.replace(has_sinks=True, sliding_window=8)},
    "windows": {"0": FULL, "1": FULL.replace(sliding_window=8)},
    "whole": {"0": FULL.replace(sliding_window=8)},
    "chunks": {"0": FULL, "1": FULL.replace(chunk_size=16)},
    "value sizes": {"0": FULL.replace(head_size_v=8)},
    "latents": {"0": LATENT},
    "readers": {"0": FULL, "1": FULL},
    "lse": {"0": FULL.replace(needs_lse=True)},
    "not causal": {"0": FULL.replace(causal=False)},
}
# Decodes, chunked prefills, several new tokens, a request without tokens, and shards without keys.
STEPS = (
    {"x": 5, "y": 20, "z": 1},
    {"x": 1, "y": 1, "z": 1},
    {"x": 1, "y": 7, "z": 1},
    {"x": 4, "y": 4, "z": 4},
    {"x": 1, "y": 0, "z": 1},
    {"x": 30, "y": 0, "z": 1},
    {"x": 1, "y": 1, "z": 1},
)
# In the third step, two ranks have as many computed keys of x and y as these have new tokens.
CHUNKS = ({"x": 18, "y": 17, "z": 3}, {"x": 18, "y": 17, "z": 1}, {"x": 18, "y": 17, "z": 1})
Steps = Sequence[dict[str, int]]


def cases(size: int) -> Iterator[tuple[str, Case]]:
    """The cases of a group, by name."""
    for backend in ("ag_rs", "a2a", None):
        for scatter_heads in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"combine {backend} scatter_heads={scatter_heads} {dtype}"
                yield name, functools.partial(_combines, backend, scatter_heads, dtype)
    yield "an exchange keeps its memory", _keeps_memory
    for model in [name for name in MODELS if name != "windows"]:
        for interleave in (1, 16) if size == 2 else (4,):
            yield f"{model} interleave={interleave}", functools.partial(_equals_one_rank, model, interleave)
    for model in ("llama", "sinks", "value sizes", "readers", "lse", "not causal", "latents"):
        yield f"{model} with all rows split", functools.partial(_splits_rows, model)
    for model in ("llama", "windows", "whole", "latents"):
        yield f"{model} in graphs", functools.partial(_replays, model)
    for model in ("llama", "sinks", "lse", "not causal", "value sizes", "readers", "latents"):
        yield f"{model} in equal chunks", functools.partial(_serves_equal_chunks, model)
    yield "latents in long and in short steps", _attends_new_latents_apart
    yield "graphs without support", _refuses_graphs_without_support
    yield "a plan from JSON", _runs_a_plan_from_json
    yield "a plan that differs", _names_the_plan_that_differs
    yield "a batch of one rank", _refuses_batches_of_one_rank
    yield "a rank that raises", _names_the_rank_that_raises
    yield "a rank with another step", _names_the_rank_with_another_step


def _partials(group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The partial results of all ranks, the same on each: rows without keys have any output."""
    generator, heads = torch.Generator().manual_seed(3), 2 * group.size()
    outs = [torch.randn(5, heads, 8, generator=generator).to(dtype) for _ in range(group.size())]
    lses = [torch.randn(5, heads, generator=generator) * 9 for _ in range(group.size())]
    for rank, poison in enumerate((-torch.inf, torch.inf, torch.nan)[: group.size()]):
        lses[rank][rank] = poison
        outs[rank][rank] = torch.nan
    for out, lse in zip(outs, lses, strict=True):
        lse[4], out[4] = -torch.inf, torch.inf
    return outs, lses


def _combines(backend: Any, scatter_heads: bool, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    outs, lses = _partials(group, dtype)
    expected, expected_lse = combine(outs, lses)
    rank, own = group.rank(), expected.shape[1] // group.size()
    heads = slice(rank * own, (rank + 1) * own) if scatter_heads else slice(None)
    mine, mine_lse = outs[rank].clone(), lses[rank].clone()
    found, lse = combine_partials(mine, mine_lse, group, scatter_heads=scatter_heads, backend=backend)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected[:, heads], **close)
    torch.testing.assert_close(lse, expected_lse[:, heads])
    assert (found[4] == 0).all()
    assert (lse[4] == -torch.inf).all()
    torch.testing.assert_close(mine_lse, lses[rank], equal_nan=True)
    again, _ = combine_partials(mine, mine_lse, group, scatter_heads=scatter_heads, backend=backend)
    assert torch.equal(found, again)


def _keeps_memory(group: dist.ProcessGroup) -> None:
    buffers = ExchangeBuffers()
    heads, size = 2 * group.size(), 8
    buffers.reserve(5, heads, size, torch.float32, group, backend="ag_rs")
    buffers.reserve(5, heads, size, torch.float32, group)
    buffers.freeze()
    held = buffers.nbytes
    outs, lses = _partials(group, torch.float32)
    expected, _ = combine(outs, lses)
    for backend in ("ag_rs", "a2a", "a2a"):
        part, lse = buffers.partial(5, heads, size, torch.float32, group)
        part.copy_(outs[group.rank()])
        lse.copy_(lses[group.rank()])
        found, _ = combine_partials(part, lse, group, backend=backend, buffers=buffers)
        torch.testing.assert_close(found, expected)
    assert buffers.nbytes == held
    with pytest.raises(errors.BatchError, match="frozen"):
        buffers.partial(6, heads, size, torch.float32, group)


def _equals_one_rank(model: str, interleave: int, group: dist.ProcessGroup) -> None:
    alone = _outputs(model, None)
    place = context_parallel(group, interleave)
    shared = _outputs(model, place)
    for step, (one, many) in enumerate(zip(alone, shared, strict=True)):
        error = float((one - many).abs().max() / one.abs().max().clamp_min(1e-9)) if one.numel() else 0.0
        assert error < 1e-5, f"step {step}: {error}"
    for one, again in zip(shared, _outputs(model, place), strict=True):
        assert torch.equal(one, again)


def _serves_equal_chunks(model: str, group: dist.ProcessGroup) -> None:
    alone = _outputs(model, None, CHUNKS)
    with pytest.MonkeyPatch.context() as patch:
        for least in (1, sharded_step._LEAST_CPU_PAIRS):
            patch.setattr(sharded_step, "_LEAST_CPU_PAIRS", least)
            shared = _outputs(model, context_parallel(group), CHUNKS)
            for one, many in zip(alone, shared, strict=True):
                torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5)


def _splits_rows(model: str, group: dist.ProcessGroup) -> None:
    """Steps of more than one new token: even the shortest is split, and none has the rows of another rank.

    Rows that see later tokens stay whole, because they need the keys of all ranks.
    """
    seen, limit = [], sharded_step._LEAST_CPU_PAIRS
    attend = TorchImpl.attend

    def counted(self: TorchImpl, layer: Any, query: torch.Tensor, *given: Any, **named: Any) -> Any:
        if self.spec.direct_kv:
            seen.append(query.shape[0])
        return attend(self, layer, query, *given, **named)

    alone = _outputs(model, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchImpl, "attend", counted)
        for least in (1, limit):
            seen.clear()
            patch.setattr(sharded_step, "_LEAST_CPU_PAIRS", least)
            shared = _outputs(model, context_parallel(group))
            for one, many in zip(alone, shared, strict=True):
                torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5)
            if least == 1 and model != "not causal":
                assert max(seen) <= 2 * -(-30 // (2 * group.size())) + 4, seen


def _attends_new_latents_apart(group: dist.ProcessGroup) -> None:
    """Long steps attend new latents apart, with and without computed ones; a backend that only decodes never does."""
    alone, longest = _outputs("latents", None), []
    attend, place = NewLatents.attend, context_parallel(group)

    def counted(self: NewLatents, name: str, query: torch.Tensor, *given: Any) -> None:
        longest.append(query.shape[0])
        attend(self, name, query, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NewLatents, "attend", counted)
        patch.setattr(sharded_step, "_LEAST_CPU_PAIRS", 1 << 20)
        outputs = [_outputs("latents", place)]
        # The steps of 20 and of 30 new tokens of a request; the first has no computed ones.
        assert longest[-2:] == [26, 31]
        assert [rows for rows in longest[:-2] if rows < new_tokens.LEAST_QUERIES] == []
        longest.clear()
        found = NewLatents.__init__

        def without(self: NewLatents, *given: Any) -> None:
            found(self, [], *given[1:])

        patch.setattr(NewLatents, "__init__", without)
        outputs.append(_outputs("latents", place))
        assert longest == []
    for shared in outputs:
        for one, many in zip(alone, shared, strict=True):
            torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5)


def _outputs(model: str, place: ContextParallel | None, steps: Steps = STEPS) -> list[torch.Tensor]:
    """Every layer's output in every step, in the order of the requests."""
    specs = MODELS[model]
    sharing = {"1": "0"} if model == "readers" else {}
    plan = attnplug.plan(specs, "cpu", num_blocks=64, kv_sharing=sharing, context_parallel=place)
    if place is not None and model == "llama":
        assert all(tokens == place.size * 16 for tokens in plan.tokens_per_block)
    return _run(plan, specs, None, steps)


def _run(
    plan: ModelPlan, specs: dict[str, LayerSpec], place: ContextParallel | None, steps: Steps = STEPS
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    config = BuilderConfig(max_model_len=96, max_num_batched_tokens=64, max_num_seqs=4)
    tensors = {name: _tensors(spec, generator) for name, spec in specs.items()}
    found = []
    with AttentionRuntime(plan, tensors, config=config, debug=True, context_parallel=place) as runtime:
        runtime.warm_up()
        builder = runtime.step_batch_builder()
        blocks = iter(range(1, 64))
        for name in ("x", "y", "z"):
            pages = [[next(blocks) for _ in range(-(-64 // tokens))] for tokens in plan.tokens_per_block]
            builder.add_request(name, pages)
        for counts in steps:
            batch = builder.step(counts)
            runtime.begin_step(batch)
            tokens = batch.common.num_actual_tokens
            for name, spec in specs.items():
                query = torch.randn(tokens, spec.num_heads, spec.query_size, generator=generator)
                key = torch.randn(tokens, spec.num_kv_heads, spec.head_size, generator=generator)
                value = torch.randn(tokens, spec.num_kv_heads, spec.head_size_v, generator=generator)
                given = (None, None) if name in plan.kv_sharing else (key, None if spec.mla else value)
                lse = torch.empty(tokens, spec.num_heads) if spec.needs_lse else None
                out = runtime.forward(name, query, *given, output_lse=lse)
                found.append(batch.in_former_order(out).clone())
                if lse is not None:
                    found.append(batch.in_former_order(lse).clone())
            builder.finish_step()
    return found


def _tensors(spec: LayerSpec, generator: torch.Generator) -> LayerTensors:
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.has_sinks else None
    if spec.mla is None:
        return LayerTensors(sinks=sinks)
    rows = spec.num_heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
    return LayerTensors(kv_b_proj=torch.randn(rows, spec.mla.kv_lora_rank, generator=generator) * 0.2)


def _replays(model: str, group: dist.ProcessGroup) -> None:
    """Three requests in graphs for four, on the metadata of the capture: nothing of the fourth may change them."""
    alone, shared, replayed = (
        _steps_of_drafts(model, place, in_graphs)
        for place, in_graphs in (
            (None, False),
            (context_parallel(group), False),
            (context_parallel(group), True),
        )
    )
    for one, many, again in zip(alone, shared, replayed, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(many, again, rtol=1e-5, atol=1e-5)


def _steps_of_drafts(model: str, place: ContextParallel | None, in_graphs: bool) -> list[torch.Tensor]:
    """A prefill, then steps of one and of three new tokens for each request."""
    specs, found = MODELS[model], []
    generator = torch.Generator().manual_seed(2)
    sizes = {"cudagraph_batch_sizes": (4,), "num_speculative_tokens": 2}
    config = BuilderConfig(max_model_len=96, max_num_batched_tokens=64, max_num_seqs=4, **sizes)
    with graph_backends():
        plan = attnplug.plan(specs, "cpu", num_blocks=64, context_parallel=place)
        tensors = {name: _tensors(spec, generator) for name, spec in specs.items()}
        with AttentionRuntime(plan, tensors, config=config) as runtime:
            state = GraphState(runtime)
            graphs = {q: Replays(runtime, state, 4, q) for q in (1, 3) if in_graphs}
            builder, blocks = runtime.step_batch_builder(), iter(range(1, 64))
            for name in ("x", "y", "z"):
                pages = [[next(blocks) for _ in range(-(-64 // tokens))] for tokens in plan.tokens_per_block]
                builder.add_request(name, pages)
            for counts, accepted in (
                ({"x": 9, "y": 30, "z": 2}, None),
                (3, 2),
                (1, 1),
                (3, 1),
                (3, 3),
                (1, 1),
            ):
                batch = builder.step(counts)
                graph = graphs.get(batch.common.max_query_len)
                runtime.begin_step(batch) if graph is None else graph.begin(batch)
                found += _forward_padded(runtime, specs, batch.common.num_actual_tokens, generator)
                builder.finish_step(accepted)
            if in_graphs and model != "whole":
                uneven = builder.step({"x": 3, "y": 2, "z": 3})
                with pytest.raises(errors.BatchError, match="query_len=3 for every request"):
                    graphs[3].begin(uneven)
    return found


def _forward_padded(
    runtime: AttentionRuntime, specs: dict[str, LayerSpec], tokens: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Every layer's output, with rows of zeros after those of the step, as graphs have."""
    found, rows = [], max(tokens, 12)
    for name, spec in specs.items():
        shapes = (spec.num_heads, spec.query_size), (spec.num_kv_heads, spec.head_size)
        query, key = torch.zeros(rows, *shapes[0]), torch.zeros(rows, *shapes[1])
        for each in (query, key):
            each[:tokens] = torch.randn(tokens, *each.shape[1:], generator=generator)
        found.append(runtime.forward(name, query, key, None if spec.mla else key)[:tokens].clone())
    return found


def _refuses_graphs_without_support(group: dist.ProcessGroup) -> None:
    """A graph of several new tokens runs the backend of new tokens too, and asks for its support."""
    config = BuilderConfig(max_model_len=96, cudagraph_batch_sizes=(4,), num_speculative_tokens=2)
    with graph_backends(direct=DirectBuilder):
        plan = attnplug.plan({"a": FULL}, "cpu", num_blocks=64, context_parallel=context_parallel(group))
        with AttentionRuntime(plan, config=config) as runtime:
            state = GraphState(runtime)
            state.metadata_for_capture(4, 1)
            with pytest.raises(
                errors.BatchError, match=r"DirectBuilder of DIRECT .* declares UNIFORM_SINGLE"
            ):
                state.metadata_for_capture(4, 3)


def _runs_a_plan_from_json(group: dist.ProcessGroup) -> None:
    place = context_parallel(group)
    specs = MODELS["llama"]
    made = attnplug.plan(specs, "cpu", num_blocks=64, context_parallel=place)
    read = ModelPlan.from_json(made.to_json(), attnplug.registry.get_registry())
    assert read.digest() == made.digest()
    with pytest.raises(errors.LayoutError, match="has no process group"):
        AttentionRuntime(read)
    for one, other in zip(_run(read, specs, place), _run(made, specs, None), strict=True):
        assert torch.equal(one, other)


def _names_the_plan_that_differs(group: dist.ProcessGroup) -> None:
    blocks = 64 + (group.rank() == 1)
    spec = FULL if group.size() == 2 else FULL.replace(block_size=16 << (group.rank() == 1))
    plan = attnplug.plan({"deep": spec}, "cpu", num_blocks=blocks, context_parallel=context_parallel(group))
    what = "the number of blocks" if group.size() == 2 else "layer deep differs"
    expected = f"rank 1 of {group.size()} planned otherwise.*{what}"
    with pytest.raises(errors.RankFailureError, match=expected) as raised:
        check_same_plan(plan, group)
    assert raised.value.ranks == (1,)


def _refuses_batches_of_one_rank(group: dist.ProcessGroup) -> None:
    plan = attnplug.plan({"a": FULL}, "cpu", num_blocks=8, context_parallel=context_parallel(group))
    alone = attnplug.plan({"a": FULL}, "cpu", num_blocks=8)
    config = BuilderConfig(max_model_len=32)
    batch = AttentionRuntime(alone, config=config).step_batch_builder()
    batch.add_request("x", [[1]])
    runtime = AttentionRuntime(plan, config=config)
    with pytest.raises(errors.BatchError, match=r"batch\.sharded=None must be the step of"):
        runtime.begin_step(batch.step({"x": 3}))
    shared = runtime.step_batch_builder()
    shared.add_request("x", [[1]])
    with pytest.raises(errors.BatchError, match=r"batch\.sharded=.* must be None: the plan"):
        AttentionRuntime(alone, config=config).begin_step(shared.step({"x": 3}))


def _names_the_rank_that_raises(group: dist.ProcessGroup) -> None:
    watch = RankWatch(dist.new_group(backend="gloo"), timeout=60)
    for _ in range(3):
        with watch.step("the same"):
            dist.all_reduce(torch.ones(1), group=group)
    if group.rank() == 1:
        with pytest.raises(ValueError, match="out of ideas"), watch.step("the same"):
            raise ValueError("out of ideas")
    else:
        expected = f"rank 1 of {group.size()} failed: ValueError: out of ideas; step 4 has no result"
        with pytest.raises(errors.RankFailureError, match=expected) as raised, watch.step("the same"):
            pass
        assert raised.value.ranks == (1,)
    with (
        pytest.raises(errors.RankFailureError, match="an earlier step failed: rank 1"),
        watch.step("the same"),
    ):
        raise AssertionError("a step ran after a failure")


def _names_the_rank_with_another_step(group: dist.ProcessGroup) -> None:
    watch = RankWatch(dist.new_group(backend="gloo"), timeout=60)
    expected = f"rank 1 of {group.size()} runs another step than the others"
    with pytest.raises(errors.RankFailureError, match=expected), watch.step(f"step of {group.rank() == 1}"):
        raise AssertionError("the step ran")


def lose_a_rank(group: dist.ProcessGroup, leave: Callable[[], None]) -> None:
    """The last rank leaves in the middle of a step: the others name it, and none has an output, now or later."""
    seconds = dt.timedelta(seconds=2)
    place = context_parallel(dist.new_group(timeout=seconds))
    watch = RankWatch(dist.new_group(backend="gloo"), timeout=1)
    plan = attnplug.plan({"a": FULL}, "cpu", num_blocks=8, context_parallel=place)
    runtime = AttentionRuntime(plan, config=BuilderConfig(max_model_len=32))
    builder = runtime.step_batch_builder()
    builder.add_request("x", [[1]])
    last, outputs = group.size() - 1, []

    def step(new: int) -> None:
        with watch.step(str(new)):
            runtime.begin_step(builder.step(new))
            if group.rank() == last and new == 1:
                leave()
            key = torch.ones(new, 2, 16)
            output = runtime.forward("a", torch.ones(new, 6, 16), key, key)
        outputs.append(output)
        builder.finish_step()

    step(4)
    with pytest.raises(
        errors.RankFailureError, match=f"rank {last} of {group.size()} (has died|did not answer)"
    ) as raised:
        step(1)
    assert raised.value.ranks == (last,)
    assert len(outputs) == 1
    with pytest.raises(errors.RankFailureError, match="could not compare its plan with the others"):
        AttentionRuntime(plan, config=BuilderConfig(max_model_len=32))
