"""Runs one step on each frozen plugin and on the built-in backends, as the frozen engine does it by hand."""

from __future__ import annotations

import attnplug_acme
import attnplug_flex
from batches import direct_batch, paged_batch
from by_hand import run_batch

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.triton import TritonBackend
from attnplug.testing import assert_close

LENGTHS = [5, 1, 0, 40, 3], [5, 70, 9, 300, 20]
"""Prefill, decode, nothing new, and two extends."""
PLAIN = attnplug.LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
RICH = PLAIN.replace(sliding_window=20, has_sinks=True, logits_soft_cap=4.0)

registry = attnplug.Registry({"acme": attnplug_acme, "flex": attnplug_flex})
assert [record.reason for record in registry.records] == [None, None]
for backend in (attnplug_acme.AcmeBackend, attnplug_flex.FlexBackend, TorchBackend, TritonBackend):
    name = backend.get_name()
    batches = [paged_batch(PLAIN, *LENGTHS, padding=2)]
    if backend is not attnplug_acme.AcmeBackend:
        batches += [
            paged_batch(RICH, *LENGTHS),
            direct_batch(PLAIN.replace(direct_kv=True), [5, 40], [5, 40]),
        ]
    elif registry.explain(RICH, "cpu", backend=name).chosen is not None:
        raise AssertionError(f"{name} takes a layer that it does not declare")
    for batch in batches:
        output, _ = run_batch(backend, batch)
        assert_close(output[: batch.common.num_actual_tokens], batch.oracle().output, 1e-5, name)
    print(name)
