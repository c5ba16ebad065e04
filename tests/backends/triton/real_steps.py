"""A hybrid model's steps as an engine makes them, and which kernels TRITON compiles in them.

As a script, without a GPU: a driver that knows one stands in, nothing is compiled or launched, and what would be
is counted. Prints the kernels of the warm-up, then those that the steps compile after it.
"""

from __future__ import annotations

import inspect
import json
import sys
from types import SimpleNamespace

import torch

import attnplug
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.impl import LayerTensors
from attnplug.runtime import AttentionRuntime, GraphState

HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "block_size": 16}
SPECS = {
    "full": LayerSpec(**HEADS, logits_soft_cap=30.0),
    "window": LayerSpec(**HEADS, sliding_window=40, has_sinks=True),
    "fp8": LayerSpec(**HEADS | {"block_size": 32}, kv_cache_dtype="fp8_e5m2"),
    "wide": LayerSpec(**HEADS | {"num_heads": 10}, needs_lse=True),
}
LIMITS = BuilderConfig(
    max_num_seqs=40,
    max_num_batched_tokens=600,
    max_model_len=700,
    num_speculative_tokens=2,
    cudagraph_batch_sizes=(4, 12),
)


def runtime_on(device: str) -> AttentionRuntime:
    plan = attnplug.plan(SPECS, device=device, backend="TRITON", num_blocks=400)
    sinks = {"window": LayerTensors(sinks=torch.zeros(8))}
    return AttentionRuntime(plan, sinks, config=LIMITS)


def run_steps(runtime: AttentionRuntime) -> int:
    """Prompts, chunks, decodes, speculation, mixed batches, one to many requests, and a graph's batch."""
    builder, state = runtime.step_batch_builder(), GraphState(runtime)
    sizes = [group.kv_cache_spec.block_size for group in runtime.kv_cache_config.kv_cache_groups]

    def add(name: str, tokens: int) -> None:
        counts = [-(-tokens // size) for size in sizes]
        builder.add_request(name, [runtime.block_pool.allocate(count) for count in counts])

    def step(*counts: int) -> None:
        batch = builder.step(list(counts))
        runtime.begin_step(batch)
        forward(runtime, batch.common.num_actual_tokens)
        builder.finish_step()
        done.append(counts)

    done: list[tuple[int, ...]] = []
    add("a", 450)
    step(1)
    step(3)
    step(50)
    step(333)
    add("b", 160)
    step(1, 100)
    step(3, 1)
    step(7, 21)
    for index in range(33):
        add(f"c{index}", 32)
    step(2, 1, *[9] * 33)
    step(*[1] * 35)
    step(*[2] * 35)
    step(*[17] * 35)
    for index in range(27):
        builder.remove_request(f"c{index}")
    buffers = state.get_graph_input_buffers(12, 1)
    state.prepare_graph_input_buffers(buffers, builder.step([1] * builder.num_reqs))
    forward(runtime, 12)
    return len(done) + 1


def forward(runtime: AttentionRuntime, tokens: int) -> None:
    """Keys and values are cut from one tensor, as a fused projection gives them."""
    for name, spec in SPECS.items():
        heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        both = torch.zeros(tokens, sum(heads), spec.head_size, dtype=torch.bfloat16, device=runtime.device)
        query, key, value = both.split(heads, 1)
        lse = torch.empty(tokens, spec.num_heads, device=runtime.device) if spec.needs_lse else None
        runtime.forward(name, query, key, value, output_lse=lse)


def main() -> None:
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    from attnplug.backends.triton import TritonBackend, bindings
    from attnplug.backends.triton.launch import Gpu

    TritonBackend.device_types = ("cpu",)
    bindings.gpu_of = lambda device: Gpu(132, 227 << 10)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )

    def compile_nothing(self, key, signature, device, constexprs, options, attrs, warmup):
        idle = SimpleNamespace(
            function=0, packed_metadata=(), launch_metadata=lambda *_: None, run=lambda *_: None
        )
        self.device_caches[device][0][key] = idle
        facts = {"target": driver.active.get_current_target(), "device": device, "constants": constexprs}
        facts |= {
            "key": key,
            "signature": signature,
            "options": options,
            "configs": [attrs],
            "is_warmup": warmup,
        }
        known = inspect.signature(self._call_hook).parameters  # Triton 3.6 gives no target
        facts = {name: value for name, value in facts.items() if name in known}
        self._call_hook(knobs.runtime.jit_post_compile_hook, **facts)
        return idle

    JITFunction._do_compile = compile_nothing
    runtime = runtime_on("cpu")
    report = runtime.warm_up()
    with TritonBackend.watch_compiling() as compiled:
        steps = run_steps(runtime)
    json.dump({"warmed": report.compiled, "after": compiled, "steps": steps}, sys.stdout)


if __name__ == "__main__":
    main()
