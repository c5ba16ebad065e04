"""On a GPU: the step path copies without waiting, and never overwrites what is still being copied."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from model_layers import BLOCK, caches, whisper
from runtime_backends import Swapping, decision

from attnplug.core import BuilderConfig
from attnplug.core.batch import reorder_batch_to_split_decodes_and_prefills
from attnplug.runtime import (
    CpuGpuBuffer,
    StagingRing,
    StepBatch,
    StepBatchBuilder,
    build_attn_metadata,
    group_kv_caches,
    init_attn_backend,
    init_kv_cache,
)

pytestmark = pytest.mark.gpu

NoSync = Callable[[], AbstractContextManager[None]]


def delay() -> torch.cuda.Event:
    """Keep the current stream busy for a good part of a second; the event is done when it is over."""
    torch.cuda._sleep(10**9)
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.fixture(autouse=True)
def idle() -> Iterator[None]:
    for dtype in (torch.int32, torch.int64):  # what torch loads once, it has loaded
        torch.zeros(2, 2, dtype=dtype, device="cuda").clone()
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def builder(device: str = "cuda", groups: int = 4, cross: bool = True) -> StepBatchBuilder:
    """Decoder groups with pages of 16, and one of encoder tokens."""
    return StepBatchBuilder(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        block_sizes=[16] * (groups + cross),
        cross_groups=[groups] if cross else [],
        max_encoder_len=100 if cross else 0,
        device=device,
    )


def fill(made: StepBatchBuilder, count: int, seed: int = 0) -> None:
    drawn = random.Random(seed)
    for index in range(count):
        pages = [[drawn.randrange(2**31) for _ in range(drawn.randrange(80, 90))] for _ in made.block_sizes]
        placeholders = {"image": [(4, 30), (60, 9)]} if index % 3 == 0 else None
        computed, encoder = drawn.randrange(0, 500) * (index % 2), 90 * bool(made.cross_groups)
        made.add_request(f"{seed}-{index}", pages, computed, encoder, placeholders)


def counts(made: StepBatchBuilder, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.choice([0, 1, 1, 7, 90]) for _ in made.req_ids]


def tensors_of(batch: StepBatch) -> list[torch.Tensor]:
    common = batch.common
    found = [common.query_start_loc, common.seq_lens, common.block_table_tensor, common.slot_mapping]
    if common.encoder_seq_lens is not None:
        found.append(common.encoder_seq_lens)
    for made in batch.placeholders.values():
        found += [made.token_indices, made.embedding_indices]
    return found + [batch.of_group(group)[1] for group in range(len(batch.num_slots))]


def test_a_buffer_is_pinned_and_its_twin_on_the_gpu():
    buffer = CpuGpuBuffer(5, 2, dtype=torch.int32, device="cuda", fill=3)
    assert buffer.cpu.is_pinned()
    assert buffer.gpu.is_cuda
    assert buffer.gpu.tolist() == [[3, 3]] * 5
    buffer.np[:2] = 7
    assert buffer.copy_to_gpu(2).tolist() == [[7, 7]] * 2
    assert buffer.gpu.tolist() == [[7, 7]] * 2 + [[3, 3]] * 3


def test_a_buffer_is_sent_without_waiting_for_the_gpu():
    buffer = CpuGpuBuffer(1 << 16, dtype=torch.int64, device="cuda")
    buffer.np[:] = 9
    busy = delay()
    sent = buffer.copy_to_gpu()
    assert not busy.query()
    torch.cuda.synchronize()
    assert (sent == 9).all()


def test_a_ring_waits_for_the_set_it_hands_out_and_for_nothing_else():
    ring = StagingRing(["a", "b"], "cuda")
    events = []
    for _ in range(2):
        ring.acquire()
        events.append(delay())
        ring.release()
    assert [event.query() for event in events] == [False, False]
    assert ring.acquire() == "a"
    assert [event.query() for event in events] == [True, False]


def test_steps_ahead_of_a_slow_gpu_do_not_overwrite_each_other():
    made, same = builder(), builder("cpu")
    for one in (made, same):
        fill(one, 20)
    seen, expected, busy = [], [], []
    for step in range(3):
        busy.append(delay())
        seen.append([tensor.clone() for tensor in tensors_of(made.step(counts(made, step)))])
        expected.append([tensor.clone() for tensor in tensors_of(same.step(counts(same, step)))])
        made.finish_step()
        same.finish_step()
    # The third step could begin only when the first one's copies were done.
    assert busy[0].query()
    torch.cuda.synchronize()
    for found, wanted in zip(seen, expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            # On the GPU tables are as wide as they need to be.
            part = other[:, : one.shape[1]] if other.ndim == 2 else other
            assert torch.equal(one.cpu(), part)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kind", ["decode", "mixed", "profile"])
def test_a_step_does_not_wait_for_the_gpu(groups, cross, kind):
    made = builder(groups=groups, cross=cross)

    def step() -> None:
        if kind == "profile":
            made.profile_step(40, 2000)
        else:
            made.step(1 if kind == "decode" else counts(made, 3))

    if kind != "profile":
        fill(made, 40)
    step()  # what torch does once, it has done
    torch.cuda.synchronize()
    busy = delay()
    step()
    assert not busy.query()


def test_megabytes_of_tables_and_slots_are_sent_without_waiting():
    # Only copies of this size show it: torch makes a strided one through pageable memory.
    made = StepBatchBuilder(
        max_num_seqs=300,
        max_num_batched_tokens=80_000,
        max_model_len=64_000,
        block_sizes=[16] * 4,
        device="cuda",
    )
    for index in range(256):
        made.add_request(str(index), torch.arange(2000).expand(4, 2000), num_computed_tokens=1000 + index)
    made.step(256)
    torch.cuda.synchronize()
    busy = delay()
    batch = made.step(256)
    assert not busy.query()
    torch.cuda.synchronize()
    assert torch.equal(batch.block_tables.cpu(), torch.arange(2000, dtype=torch.int32).expand(4, 256, 2000))
    expected = torch.cat([torch.arange(1000 + index, 1256 + index) for index in range(256)])
    assert torch.equal(batch.slot_mappings.cpu(), expected.expand(4, 256 * 256))


def test_a_gpus_batch_is_the_cpus():
    made, same = builder(), builder("cpu")
    for seed in range(6):
        for one in (made, same):
            fill(one, 9, seed)
            one.remove_request(one.req_ids[seed])
            one.swap_states(0, one.num_reqs - 1)
        found, expected = made.step(counts(made, seed)), same.step(counts(same, seed))
        width = found.block_tables.shape[2]
        assert torch.equal(found.block_tables.cpu(), expected.block_tables[:, :, :width])
        for group in range(5):
            assert torch.equal(found.of_group(group)[1].cpu(), expected.of_group(group)[1])
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "encoder_seq_lens"):
            assert torch.equal(getattr(found.common, name).cpu(), getattr(expected.common, name))
        for name in ("query_start_loc_cpu", "seq_lens_host", "encoder_seq_lens_cpu"):
            assert getattr(found.common, name).tolist() == getattr(expected.common, name).tolist()
        assert found.placeholders.keys() == expected.placeholders.keys()
        for name, one in found.placeholders.items():
            other = expected.placeholders[name]
            assert torch.equal(one.token_indices.cpu(), other.token_indices)
            assert torch.equal(one.embedding_indices.cpu(), other.embedding_indices)
            assert one.items == other.items
        made.finish_step()
        same.finish_step()


def test_nothing_on_the_step_path_synchronises(sync_errors: NoSync):
    class Scheduled:
        def __init__(self, made: StepBatchBuilder) -> None:
            self.num_scheduled_tokens = dict(zip(made.req_ids, counts(made, 3), strict=True))

    config = group_kv_caches(caches(whisper))
    decisions = {name: decision(spec, Swapping) for name, spec in whisper().items()}
    groups = init_attn_backend(config.kv_cache_groups, decisions, BuilderConfig(), "cuda")
    made = builder(groups=1)
    with sync_errors():
        fill(made, 12)
        for step in range(5):
            scheduled = Scheduled(made)
            reorder_batch_to_split_decodes_and_prefills(made, scheduled)
            batch = made.step(scheduled.num_scheduled_tokens)
            metadata: Any = build_attn_metadata(groups, batch, config)
            metadata["decoder.layers.0.encoder_attn"].common.compute_num_computed_tokens()
            made.finish_step({name: count // 2 for name, count in scheduled.num_scheduled_tokens.items()})
            made.append_blocks(made.req_ids[0], [[7 + step], [70 + step]])
            made.free_blocks(made.req_ids[1], 0, 0)
            made.remove_request(made.req_ids[step])


def test_caches_lie_on_the_gpu():
    specs = {name: spec for name, spec in whisper().items() if not spec.direct_kv}
    config = group_kv_caches(caches(whisper), 3)
    found = init_kv_cache(config, specs, dict.fromkeys(specs, Swapping), "cuda", "HND")
    one = found["decoder.layers.0.self_attn"]
    assert one.is_cuda
    assert one.shape == (3, 2, BLOCK, 2, 8)
    assert not one.any()
    assert one.data_ptr() == found["decoder.layers.0.encoder_attn"].data_ptr()
