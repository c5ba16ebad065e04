"""Layers under vLLM's decode context parallelism, in the processes of its group: `ranks_for_vllm.py SIZE FOLDER BACKEND`.

Run in a source tree of vLLM. Each rank writes what failed to `FOLDER/RANK.json`. The specs, the steps and the group are
vLLM's own. A made-up engine fills the pages of each rank by vLLM's rule, and a plain softmax in float64 knows the answers.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from rank_engine import BLOCK, Engine, answer, steps  # isort: skip

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

HEADS, SIZE = 4, 64
LATENT, ROPE, NOPE, SIZE_V = 512, 64, 128, 128
CPU = torch.device("cpu")


def config_of(size: int, interleave: int, exchange: str) -> Any:
    from vllm.config import VllmConfig

    config = VllmConfig()
    config.model_config = None
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.decode_context_parallel_size = size
    parallel.cp_kv_cache_interleave_size, parallel.dcp_comm_backend = interleave, exchange
    config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens = 16, 128
    return config


def run_first_steps(builder: Any, layer: Any, cache: torch.Tensor, backend: str) -> None:
    """The steps before vLLM's graphs, on all ranks; they leave the pages as they are, and later steps right."""
    from attnplug.integrations.vllm import warm_up

    if backend != "_TORCH":
        return  # the interpreter is slow
    layer.kv_cache, seen = cache, list[int]()
    [bound] = builder.kinds().values()
    attend = bound.inner.attend

    def watched(given: Any, query: torch.Tensor, *rest: Any) -> Any:
        seen.append(query.shape[0])
        return attend(given, query, *rest)

    with (
        mock.patch.object(warm_up, "compiles", return_value=True),
        mock.patch.object(bound.inner, "attend", watched),
    ):
        warm_up.warm_up(builder)
    assert {1, 8, 16, 128} <= {*seen}
    assert not cache.any()


def paged(
    rank: int, size: int, backend: str, interleave: int, exchange: str = "ag_rs", dtype: str = "auto", **asks: Any
) -> None:  # fmt: skip
    """A decoder layer whose ranks have the heads of one KV head."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from attnplug.integrations.vllm.backends import backend_class

    config = config_of(size, interleave, exchange)
    engine = Engine(rank, size, interleave, (SIZE, SIZE))
    own, scale, cls = slice(rank * HEADS, (rank + 1) * HEADS), 0.3, backend_class(f"ATTNPLUG{backend}")
    sinks = engine.draw(HEADS * size) if asks.pop("sinks", False) else None
    with set_current_vllm_config(config):
        learned = {} if sinks is None else {"sinks": sinks[own]}
        impl = cls.get_impl_cls()(HEADS, SIZE, scale, 1, kv_cache_dtype=dtype, **asks, **learned)
    impl.see(torch.float32)
    assert impl.need_to_return_lse_for_decode
    scales = {"_k_scale": torch.tensor(2.0), "_v_scale": torch.tensor(0.5)}
    layer = SimpleNamespace(impl=impl, **scales, _k_scale_float=2.0, _v_scale_float=0.5)
    config.compilation_config.static_forward_context = {"a": layer}
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=SIZE, dtype=torch.float32)
    builder = cls.get_builder_cls()(spec, ["a"], config, CPU)
    stored = torch.float32 if dtype == "auto" else torch.uint8
    cache = torch.zeros(64, 2, BLOCK, 1, SIZE, dtype=stored)
    run_first_steps(builder, layer, cache, backend)
    close = {"atol": 2e-5, "rtol": 1e-4}
    # vLLM measures memory first.
    impl.forward(layer, torch.zeros(128, HEADS, SIZE), None, None, cache, None, torch.zeros(128, HEADS, SIZE))
    for given, rows in steps(engine):
        common = CommonAttentionMetadata(**vars(given))
        padding = common.num_actual_tokens - len(rows)
        query = engine.draw(len(rows) + padding, HEADS * size, SIZE)
        keys, values = (
            torch.stack([getattr(request, name)[place] for request, place in rows])[:, None]
            for name in ("keys", "values")
        )
        key, value = (torch.cat((each, torch.zeros(padding, 1, SIZE))) for each in (keys, values))
        metadata = builder.build(0, common)
        impl.do_kv_cache_update(layer, key, value, cache, common.slot_mapping)
        output = torch.full((query.shape[0], HEADS, SIZE), torch.nan)
        impl.forward(layer, query[:, own].contiguous(), key, value, cache, metadata, output)
        for row, (request, place) in enumerate(rows):
            seen = slice(place + 1)
            own_sinks = None if sinks is None else sinks[own]
            expected = answer(
                *(query[row, own], request.keys[seen], request.values[seen], scale),
                *(asks.get("logits_soft_cap"), own_sinks),
            )
            torch.testing.assert_close(output[row].double(), expected, **close)


def latent(rank: int, size: int, backend: str, interleave: int, exchange: str = "ag_rs") -> None:
    """A layer of latent attention, whose ranks have some heads each."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from attnplug.integrations.vllm.latent_backends import latent_class

    config = config_of(size, interleave, exchange)
    model = SimpleNamespace(dtype=torch.float32, max_model_len=512, is_mm_prefix_lm=False)
    config.model_config = model
    heads, scale = 2, 0.07
    engine = Engine(rank, size, interleave, (LATENT + ROPE, 1))
    own = slice(rank * heads, (rank + 1) * heads)
    w_uk = engine.draw(heads * size, NOPE, LATENT) * 0.05
    w_uv = engine.draw(heads * size, LATENT, SIZE_V) * 0.1
    cls = latent_class(f"ATTNPLUG{backend}_MLA")
    sizes = {"kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": SIZE_V}
    with set_current_vllm_config(config):
        impl = cls.get_impl_cls()(
            heads, LATENT + ROPE, scale, q_lora_rank=None, qk_head_dim=NOPE + ROPE, kv_b_proj=None, **sizes
        )
    assert impl.need_to_return_lse_for_decode
    owner = SimpleNamespace(impl=impl, W_UK_T=w_uk[own].contiguous(), W_UV=w_uv[own].contiguous())
    config.compilation_config.static_forward_context = {"a": owner}
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=LATENT + ROPE, dtype=torch.float32)
    builder = cls.get_builder_cls()(spec, ["a"], config, CPU)
    cache = torch.zeros(64, BLOCK, LATENT + ROPE)
    run_first_steps(builder, owner, cache, backend)
    for given, rows in steps(engine):
        common = CommonAttentionMetadata(**vars(given))
        padding = common.num_actual_tokens - len(rows)
        query = engine.draw(len(rows) + padding, heads * size, NOPE + ROPE)
        keys = torch.stack([request.keys[place] for request, place in rows])
        keys = torch.cat((keys, torch.zeros(padding, LATENT + ROPE)))
        kv_c, k_pe = keys[:, :LATENT], keys[:, LATENT:]
        metadata = builder.build(0, common)
        assert metadata.num_prefills == common.num_reqs
        impl.do_kv_cache_update(kv_c, k_pe[:, None], cache, common.slot_mapping)
        output = torch.full((query.shape[0], heads * SIZE_V), torch.nan)
        impl.forward_mha(
            query[:, own].contiguous(), kv_c, k_pe[:, None], cache, metadata, torch.ones(()), output
        )
        for row, (request, place) in enumerate(rows):
            latents = request.keys[: place + 1].double()
            found = output[row].view(heads, SIZE_V).double()
            for head in range(heads):
                k = latents[:, :LATENT] @ w_uk[own][head].double().T
                k = torch.cat((k, latents[:, LATENT:]), dim=1)
                v = latents[:, :LATENT] @ w_uv[own][head].double()
                expected = answer(query[row, own][head][None], k, v, scale, None, None)[0]
                torch.testing.assert_close(found[head], expected, atol=5e-5, rtol=1e-4)


Case = Callable[[int, int], None]


def cases(size: int, backend: str) -> Iterator[tuple[str, Case]]:
    """The cases of a backend's name in vLLM without its prefix, such as "_TORCH"; the same on all ranks."""

    def named(run: Callable[..., None], **given: Any) -> tuple[str, Case]:
        words = " ".join(f"{name}={value}" for name, value in given.items())
        return f"{run.__name__} {words}", lambda rank, size: run(rank, size, backend, **given)

    yield named(paged, interleave=1)
    yield named(paged, interleave=BLOCK, exchange="a2a", logits_soft_cap=5.0, sinks=True)
    yield named(latent, interleave=4)
    if backend == "_TORCH":
        yield named(paged, interleave=2, sinks=True)
        yield named(paged, interleave=4, dtype="fp8")
        yield named(latent, interleave=1)
        yield named(latent, interleave=BLOCK, exchange="a2a")


def main(rank: int, size: int, folder: Path, backend: str) -> None:
    """Run the cases of a rank."""
    torch.set_num_threads(1)
    import vllm.platforms
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    from attnplug.integrations.vllm.rank_layers import RankImpl

    vllm.platforms._current_platform = CpuPlatform()
    Engine.local_lengths = staticmethod(get_dcp_local_seq_lens)
    failed, ran = {}, []
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(size, rank, f"file://{folder}/store", rank, "gloo")
        parallel_state.initialize_model_parallel(size, decode_context_model_parallel_size=size)
    for name, case in cases(size, backend):
        ran.append(name)
        own = RankImpl.process_weights_after_loading
        spied = mock.patch.object(RankImpl, "process_weights_after_loading", autospec=True, side_effect=own)
        try:
            with spied as processed:
                case(rank, size)
            assert processed.call_count == 1, "a layer has one impl, which takes its loaded weights once"
        except Exception:
            failed[name] = traceback.format_exc()
            # The others wait for what this rank no longer sends, so no later case can run.
            break
    (folder / f"{rank}.json").write_text(json.dumps({"ran": ran, "failed": failed}))
    sys.stderr.flush()
    os._exit(0)


def start(rank: int, size: int, folder: Path, backend: str) -> int:
    """The process of a rank."""
    process = os.fork()
    if process:
        return process
    try:
        main(rank, size, folder, backend)
    finally:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    ranks = [start(rank, size, folder, sys.argv[3]) for rank in range(size)]
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]))
