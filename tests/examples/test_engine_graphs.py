"""The example engine with graphs: padded steps over memory that stays draw the tokens of plain steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine import Engine
from fake_backends import offered
from graph_backends import graph_backend
from graphs import GraphSteps, batch_sizes
from request import Request
from small_models import random_prompts, small_model
from torch.utils._python_dispatch import TorchDispatchMode

import attnplug
from attnplug.core import AttentionCGSupport, Feature
from attnplug.errors import BatchError
from attnplug.runtime import SharingPrices

UNIFORM = AttentionCGSupport.UNIFORM_BATCH
SHARES = Feature.SLIDING_WINDOW | Feature.CROSS | Feature.NON_CAUSAL | Feature.LSE
TOKENS = 16


class NoWaiting(TorchDispatchMode):
    """Refuses operations for which the host would wait for a device, as the capture of a graph does."""

    WAITING = frozenset(
        f"aten::{name}"
        for name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name().split(".")[0] not in self.WAITING, f"{func.name()} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a CUDA graph: the model again, with the metadata and the memory of the capture alone."""

    def record(self: GraphSteps, rows: int) -> Any:
        with NoWaiting():
            captured, logits = self.runtime._active.layers, self.run(rows).clone()

        def replay() -> None:
            begun, self.runtime._active.layers = self.runtime._active.layers, captured
            try:
                logits.copy_(self.run(rows))
            finally:
                self.runtime._active.layers = begun

        return replay, logits

    monkeypatch.setattr(GraphSteps, "record", record)


def engine_of(family: str = "Llama", level: AttentionCGSupport = UNIFORM, **asked: Any) -> Engine:
    given: dict[str, Any] = {"num_blocks": 48, "block_size": 16, "graphs": True, "max_num_seqs": 6}
    with offered(graph_backend(level, features=SHARES)):
        return Engine(small_model(family, TOKENS), **given | asked)


def serve(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    requests = [engine.add(prompt, **sampling) for prompt in prompts]
    for _ in engine.stream():
        pass
    assert engine.runtime.block_pool.num_free == engine.runtime.plan.num_blocks - 1
    return [request.output for request in requests]


def prompts_of(*lengths: int, **asked: Any) -> list[list[int]]:
    return random_prompts(*lengths, vocab_size=TOKENS, **asked)


def test_decodes_are_replayed_on_padded_memory(on_cpu: None) -> None:
    prompts = prompts_of(1, 7, 30, 20, 3)
    engine = engine_of()

    outputs = serve(engine, prompts, max_tokens=24)

    assert set(engine.graphs._graphs) == {(6, 1)}, "five requests are padded to six"
    assert engine.graphs.replays == 23
    assert outputs == serve(engine_of(graphs=False), prompts, max_tokens=24)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3", "Mistral"])
def test_models_of_other_families_run_in_graphs(on_cpu: None, family: str) -> None:
    prompts = prompts_of(3, 40)
    engine, plain = (engine_of(family, graphs=graphs, num_blocks=96) for graphs in (True, False))

    outputs = serve(engine, prompts, max_tokens=12)

    assert engine.graphs.replays == 11
    assert outputs == serve(plain, prompts, max_tokens=12)


def test_each_number_of_requests_has_a_graph(on_cpu: None) -> None:
    engine = engine_of()
    requests = [engine.add([at + 1], max_tokens=3 + 4 * at) for at in range(5)]
    for _ in engine.stream():
        pass

    assert set(engine.graphs._graphs) == {(size, 1) for size in (1, 2, 4, 6)}
    plain = engine_of(graphs=False)
    expected = [plain.add([at + 1], max_tokens=3 + 4 * at) for at in range(5)]
    for _ in plain.stream():
        pass
    assert [request.output for request in requests] == [request.output for request in expected]
    assert batch_sizes(1) == (1,)
    assert batch_sizes(8) == (1, 2, 4, 8)
    assert batch_sizes(9) == (1, 2, 4, 8, 9)


def test_decodes_share_prefixes_in_graphs(on_cpu: None) -> None:
    system = prompts_of(40, 33)
    prompts = [[*system[at % 2], at, at + 1] for at in range(5)]
    engine = engine_of(prefix_sharing=SharingPrices.free())
    serve(engine, system, max_tokens=1)

    outputs = serve(engine, prompts, max_tokens=20)

    assert engine.graphs.shared_replays == engine.graphs.replays == 19
    assert "2 shared prefixes with 5 readers" in engine.runtime.step_notes[0]
    plain = engine_of(graphs=False, prefix_sharing=False)
    serve(plain, system, max_tokens=1)
    assert outputs == serve(plain, prompts, max_tokens=20)


@pytest.mark.parametrize(("drafts", "branches"), [(4, 1), (6, 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_drafts_of_one_shape_are_verified_in_graphs(
    on_cpu: None, drafts: int, branches: int, temperature: float
) -> None:
    prompts = prompts_of(5, 9, 30)
    sampling = {"max_tokens": 40, "temperature": temperature, "seed": 3}
    engine = engine_of(draft_tokens=drafts, draft_branches=branches)

    outputs = serve(engine, prompts, **sampling)

    assert engine.graphs.is_tree is (branches > 1)
    assert not engine.graphs.refusals
    drafted = [key for key in engine.graphs._graphs if key[1] not in (1, None)]
    assert drafted
    assert engine.accepted > 0
    assert engine.graphs.replays > engine.steps // 2
    assert outputs == serve(engine_of(graphs=False, num_blocks=48), prompts, **sampling)


def test_windows_verify_trees_without_a_graph(on_cpu: None) -> None:
    prompts = prompts_of(5, 40)
    engine = engine_of("Mistral", draft_tokens=6, draft_branches=2)

    outputs = serve(engine, prompts, max_tokens=40)

    assert any("window or chunk" in reason for reason in engine.graphs.refusals)
    assert 0 < engine.graphs.replays < engine.steps
    assert outputs == serve(engine_of("Mistral", graphs=False), prompts, max_tokens=40)


def test_drafts_that_a_builder_cannot_capture_run_without_a_graph(on_cpu: None) -> None:
    single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    prompts = prompts_of(5, 9, 30)
    engine = engine_of(level=single, draft_tokens=4)

    outputs = serve(engine, prompts, max_tokens=24)

    assert any("UNIFORM_BATCH" in reason for reason in engine.graphs.refusals)
    assert {key[1] for key in engine.graphs._graphs} == {1}
    assert outputs == serve(engine_of(graphs=False), prompts, max_tokens=24)


def test_preempted_and_chunked_requests_draw_the_same_tokens(on_cpu: None) -> None:
    prefix = prompts_of(40, seed=1)[0]
    prompts = prompts_of(1, 90, 17, seed=2) + prompts_of(5, 60, 30, prefix=prefix, seed=3)
    few = {"num_blocks": 14, "max_num_batched_tokens": 24, "draft_tokens": 4, "draft_branches": 2}
    engine = engine_of(**few, prefix_sharing=SharingPrices.free())

    outputs = serve(engine, prompts, max_tokens=32)

    assert engine.preemptions > 0
    assert engine.graphs.replays > 0
    assert outputs == serve(engine_of(graphs=False), prompts, max_tokens=32)


def test_a_request_at_the_end_of_its_room_is_drafted_without_a_graph(on_cpu: None) -> None:
    """The shape of a graph has more nodes than the pool has tokens left."""
    [prompt] = prompts_of(12)
    prompt = (prompt * 3)[:20]
    engine = engine_of(num_blocks=3, draft_tokens=7)

    assert serve(engine, [prompt], max_tokens=12) == serve(engine_of(graphs=False), [prompt], max_tokens=12)


def test_drafts_are_placed_on_the_nodes_of_a_shape() -> None:
    request = Request("0", [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 7, 1, 2], 1)
    request.drafts, request.parents = request.branch(9, 3)
    request.fit_drafts([-1, 0, 1, 2, 0, 4, 5, 0, 7, 8], is_tree=True)
    assert request.drafts == [7, 1, 2, 3, 5, 1, 0, 0, 0]
    assert request.children(0) == {7: 1, 3: 4, 0: 7}
    request.drafts, request.parents = [6, 0], []
    request.fit_drafts([-1, 0, 1, 2], is_tree=False)
    assert (request.drafts, request.parents) == ([6, 0, 0], [])
    assert request.children(0) == {6: 1}


def test_of_equal_drafts_the_first_is_followed() -> None:
    request = Request("0", [5, 6], 1, drafts=[0, 9, 0, 0], parents=[-1, 0, 1, 0, 3])
    assert request.children(0) == {0: 1}


def test_an_engine_on_a_cpu_runs_without_graphs() -> None:
    engine = Engine(small_model("Llama", TOKENS))
    assert (engine.graphs, engine.no_graphs) == (None, "no CUDA graphs of a CPU")
    assert engine.limits.cudagraph_batch_sizes == ()


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"level": AttentionCGSupport.NEVER}, "DeclaringBuilder of GRAPHS .* declares NEVER"),
        ({"graphs": "yes"}, "graphs='yes' must be True, False or None"),
    ],
)
def test_graphs_that_are_refused_say_why(asked: dict[str, Any], match: str) -> None:
    with pytest.raises(BatchError, match=match):
        engine_of(**asked)


def test_models_that_wait_for_the_device_are_refused() -> None:
    with pytest.raises(BatchError, match="has experts"):
        Engine(small_model("GptOss", TOKENS), graphs=True)
    model = small_model("Llama", TOKENS)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(BatchError, match="rotary embedding that depends on the longest request"):
        Engine(model, graphs=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("drafts", "branches"), [(0, 1), (4, 1), (6, 3)])
def test_graphs_on_a_gpu_draw_the_tokens_of_plain_steps(drafts: int, branches: int) -> None:
    """128 requests over 8 system prompts."""
    torch.backends.cuda.matmul.allow_tf32 = False
    system = random_prompts(*[130] * 8, vocab_size=TOKENS, seed=1)
    prompts = [[*system[at % 8], at % TOKENS, at // TOKENS] for at in range(128)]
    found = []
    for graphs in (True, False):
        with attnplug.use("TRITON"):
            engine = Engine(
                small_model("Llama", TOKENS).cuda(),
                num_blocks=2048,
                block_size=16,
                max_num_seqs=128,
                max_num_batched_tokens=2048,
                draft_tokens=drafts,
                draft_branches=branches,
                prefix_sharing=SharingPrices.free() if graphs else False,
                graphs=graphs,
            )
        for prompt in system:
            engine.add(prompt, max_tokens=1)
        for _ in engine.stream():
            pass
        requests = [engine.add(prompt, max_tokens=32) for prompt in prompts]
        for _ in engine.stream():
            pass
        found.append([request.output for request in requests])
        if graphs:
            assert engine.graphs.replays > 0
            assert drafts or engine.graphs.shared_replays > 0
            assert not engine.graphs.refusals
    assert found[0] == found[1]
