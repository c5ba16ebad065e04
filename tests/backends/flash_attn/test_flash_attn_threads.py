"""FlashAttention 4 compiles inside its calls, with a compiler that serves one thread: calls take turns."""

from __future__ import annotations

import concurrent.futures
import threading

import flash_attn_cpu_impls
import flash_attn_fakes
import pytest
import torch
from flash_attn_on_cpu import FlashAttn4OnCpu

from attnplug.backends.flash_attn import fa4
from attnplug.core import LayerSpec
from attnplug.testing import paged_batch, run_batch


class Watched:
    """A lock that says when a thread asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = threading.Semaphore(0)

    def __enter__(self) -> None:
        self.asked.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_second_thread_waits_until_the_first_has_left(monkeypatch):
    lock, inside, calls = Watched(), [], []

    def forward(**given):
        assert inside == [], "two threads are in the library at once"
        inside.append(given)
        calls.append(given)
        if len(calls) == 1:
            # Stay until the second thread is at the door too.
            assert lock.asked.acquire(timeout=60)
            assert lock.asked.acquire(timeout=60)
        flash_attn_fakes._flash_attn_fwd(**given)
        inside.clear()

    def kernels(cls):
        # Of each thread its own: what they share is the library.
        return fa4.FlashAttn4Kernels(forward)

    monkeypatch.setattr(fa4, "_ONE_AT_A_TIME", lock)
    monkeypatch.setattr(flash_attn_cpu_impls.Impl4, "kernels", classmethod(kernels))
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float16")
    batch = paged_batch(spec, [1, 5], [7, 5], block_size=16, backend=FlashAttn4OnCpu)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_batch, FlashAttn4OnCpu, batch) for _ in range(2)]
        first, second = (run.result()[0] for run in runs)
    assert len(calls) == 2
    assert torch.equal(first, second)


def test_a_call_that_raises_lets_the_next_one_in(monkeypatch):
    def forward(**given):
        raise RuntimeError("does not compile")

    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float16")
    batch = paged_batch(spec, [1], [7], block_size=16, backend=FlashAttn4OnCpu)
    with monkeypatch.context() as broken:
        broken.setattr(
            flash_attn_cpu_impls.Impl4, "kernels", classmethod(lambda cls: fa4.FlashAttn4Kernels(forward))
        )
        with pytest.raises(RuntimeError, match="does not compile"):
            run_batch(FlashAttn4OnCpu, batch)
    output, _ = run_batch(FlashAttn4OnCpu, batch)
    assert not output[:1].isnan().any()
