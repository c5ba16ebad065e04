"""Random plans, layers of every kind mixed, through random steps of AttentionRuntime, each against the oracle.

`python tests/runtime/random_plans.py --plans 10000 --backend TORCH` runs them from a shell and prints what was run,
what was refused and why, and what was wrong.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import sys
import time
import traceback
from typing import Any

import torch
from served_model import ServedModel

from attnplug import Device, LayerSpec, explain
from attnplug.core import BuilderConfig
from attnplug.core.errors import BatchError, LayoutError, NoBackendError, PolicyError, SpecError
from attnplug.core.mla.dims import MLADims
from attnplug.runtime import GraphState
from attnplug.testing import assert_close, direct_batch, tolerance

REFUSALS = LayoutError, NoBackendError, PolicyError, SpecError
LONGEST, MOST = 160, 4
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "two-sided": {"causal": False},
    "two-sided window": {"causal": False, "window": (7, 3)},
    "left only": {"causal": False, "window": (11, -1)},
    "sliding": {"sliding_window": 20},
    "long window": {"sliding_window": 70},
    "chunked": {"chunk_size": 32},
    "cap": {"logits_soft_cap": 3.0},
    "sinks": {"has_sinks": True},
    "sliding with sinks": {"has_sinks": True, "sliding_window": 9},
    "slopes": {"has_alibi": True},
    "two-sided slopes": {"has_alibi": True, "causal": False},
    "values": {"head_size_v": 16},
    "cross": {"attn_type": "encoder_decoder"},
    "latents": {
        "mla": MLADims(
            q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
        ),
        "num_kv_heads": 1,
        "head_size": 48,
    },
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "two-sided fp8": {"kv_cache_dtype": "fp8_e5m2", "causal": False},
    "int8 rows": {"kv_cache_dtype": "int8_token_head"},
    "sliding nvfp4": {"kv_cache_dtype": "nvfp4", "sliding_window": 20},
    "rotated with sinks": {"kv_cache_dtype": "rotated4", "has_sinks": True},
    "direct": {"direct_kv": True},
    "two-sided direct": {"direct_kv": True, "causal": False},
    "encoder": {"direct_kv": True, "attn_type": "encoder_only"},
    "encoder window": {"direct_kv": True, "attn_type": "encoder_only", "window": (9, 9)},
}


@dataclasses.dataclass
class Found:
    """What became of the plans: counts of layers by kind, refusals by text, and the seeds that were wrong."""

    plans: int = 0
    steps: int = 0
    outputs: int = 0
    graphs: int = 0
    layers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: dict[int, str] = dataclasses.field(default_factory=dict)


def random_layers(draw: random.Random, backend: str, device: str, found: Found) -> dict[str, LayerSpec]:
    """One to five layers that the backend accepts; layers with pages first."""
    heads, kv_heads = draw.choice([(4, 2), (2, 2), (4, 1), (8, 2), (6, 3)])
    size = draw.choice([16, 24, 32, 40, 64, 80])
    dtype = draw.choice(["float32", "float32", "bfloat16", "float16"])
    chosen = [draw.choice(list(KINDS)) for _ in range(draw.randint(1, 5))]
    specs: dict[str, LayerSpec] = {}
    for kind in chosen:
        fields = {"num_heads": heads, "num_kv_heads": kv_heads, "head_size": size, "dtype": dtype} | KINDS[
            kind
        ]
        if draw.random() < 0.2 and kind not in ("direct", "two-sided direct", "encoder", "encoder window"):
            fields["block_size"] = draw.choice([16, 32])
        try:
            spec = LayerSpec(**fields)
        except SpecError as problem:
            found.refused[f"{kind}: {problem.field}"] += 1
            continue
        decision = explain(
            spec, Device.parse("cpu") if device == "cpu" else Device.current(), backend=backend
        )
        if decision.backend is None:
            asked = next(each for each in decision.candidates if each.name == backend)
            found.refused[f"{kind}: {asked.reasons[0].code}"] += 1
            continue
        specs[f"{len(specs)} {kind}"] = spec
        found.layers[kind] += 1
    if all(spec.direct_kv for spec in specs.values()):
        specs["plain"] = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=size, dtype=dtype)
    return dict(sorted(specs.items(), key=lambda item: item[1].direct_kv))


class RandomRun:
    """One random plan and its steps."""

    def __init__(self, seed: int, backend: str, device: str, found: Found, graphs: bool) -> None:
        self.draw, self.found = random.Random(seed), found
        specs = random_layers(self.draw, backend, device, found)
        self.direct = {name: spec for name, spec in specs.items() if spec.direct_kv}
        self.paged = {name: spec for name, spec in specs.items() if not spec.direct_kv}
        has_cross = any(spec.attn_type == "encoder_decoder" for spec in specs.values())
        config = BuilderConfig(
            max_num_seqs=MOST,
            max_num_batched_tokens=MOST * LONGEST,
            max_model_len=LONGEST,
            num_speculative_tokens=2,
            cudagraph_batch_sizes=(MOST,) if graphs else (),
        )
        quantised = any(spec.has_kv_scales for spec in specs.values())
        self._model = ServedModel(
            specs,
            max_model_len=LONGEST,
            max_encoder_len=24 if has_cross else 0,
            num_blocks=400,
            scales=(0.5, 2.0) if quantised else (1.0, 1.0),
            debug=not graphs and self.draw.random() < 0.5,
            seed=seed,
            device=device,
            backend=backend,
            config=config,
        )
        self.has_cross, self.added = has_cross, 0
        self._drawn: dict[str, Any] = {}
        self.state = self._graph_state() if graphs and not has_cross else None

    def run(self) -> None:
        self.found.plans += 1
        for _ in range(self.draw.randint(2, 6)):
            if self.direct and self.draw.random() < 0.7:
                self._direct()
            self._change()
            self._step()

    def _change(self) -> None:
        model, draw = self._model, self.draw
        names = list(model.requests)
        if names and draw.random() < 0.2:
            model.remove(draw.choice(names))
        while len(model.requests) < MOST and (not model.requests or draw.random() < 0.5):
            name, self.added = f"r{self.added}", self.added + 1
            model.add(name, encoder_len=draw.randint(1, 24) if self.has_cross else 0)
        if len(model.requests) > 1 and draw.random() < 0.3:
            model.batches.swap_states(0, len(model.requests) - 1)

    def _step(self) -> None:
        model, draw = self._model, self.draw
        most = draw.choice([1, 1, 3, 20, 100])
        tokens = {}
        for name, request in model.requests.items():
            room = LONGEST - request.computed
            count = min(draw.randint(1, most), room)
            if count > 0 and (draw.random() < 0.9 or self.has_cross):
                tokens[name] = count
        if not tokens:
            return
        drafts = draw.random() < 0.15 and max(tokens.values()) == 1
        batch = model.begin(0 if drafts else None, **tokens)
        for name in self.paged:
            model.check(name, self._checked(name, tokens))
        self.found.steps += 1
        if self.state is not None:
            self._replay(batch, tokens)
        accepted = {name: draw.randint(1, count) for name, count in tokens.items()}
        model.finish(accepted if draw.random() < 0.4 and not self.has_cross else None, **tokens)

    def _checked(self, name: str, tokens: dict[str, int]) -> Any:
        self.found.outputs += 1
        self._drawn[name] = self._model.draw(name, tokens)
        return self._drawn[name]

    def _direct(self) -> None:
        model, draw = self._model, self.draw
        lens = [draw.randint(1, draw.choice([3, 40, 90])) for _ in range(draw.randint(1, MOST))]
        for name, spec in self.direct.items():
            more = [0 if spec.is_encoder else draw.choice([0, draw.randint(0, 30)]) for _ in lens]
            given = [count + extra for count, extra in zip(lens, more, strict=True)]
            batch = direct_batch(
                spec, lens, given, key_lens=None if spec.is_encoder else given, seed=draw.randint(0, 1 << 30),
                device=str(model.runtime.device),
            )  # fmt: skip
            batch = dataclasses.replace(batch, tensors=model.tensors[name])
            # The batch says nothing, so that the layer's own causality counts.
            common = dataclasses.replace(batch.common, causal=None)
            model.runtime.begin_step(direct=common)
            out = model.runtime.forward(name, batch.query, batch.key, batch.value)
            assert_close(out.cpu(), batch.oracle().output, tolerance(spec).output, name)
            self.found.outputs += 1

    def _graph_state(self) -> GraphState | None:
        model = self._model
        try:
            state = GraphState(model.runtime, max_model_len=LONGEST, max_query_len=3)
            self.graph = self._captured(state)
        except BatchError as problem:
            self.found.refused[f"graph: {problem.field}"] += 1
            return None
        return state

    def _captured(self, state: GraphState) -> torch.cuda.CUDAGraph:
        """One graph of all layers with pages, each with queries, keys and outputs of its own."""
        device = self._model.runtime.device
        self.inputs: dict[str, list[torch.Tensor | None]] = {}
        for name, spec in self.paged.items():
            dtype = getattr(torch, spec.dtype)
            shapes = (spec.num_heads, spec.query_size), (spec.num_kv_heads, spec.head_size)
            shapes += ((spec.num_kv_heads, spec.head_size_v), (spec.num_heads, spec.output_size))
            made: list[torch.Tensor | None] = [
                torch.zeros(MOST, *shape, dtype=dtype, device=device) for shape in shapes
            ]
            made[2] = None if spec.mla is not None else made[2]
            self.inputs[name] = made
        graph = torch.cuda.CUDAGraph()
        with state.capture(MOST):
            self._forward()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self._forward()
        return graph

    def _forward(self) -> None:
        for name, (query, key, value, output) in self.inputs.items():
            assert query is not None
            self._model.runtime.forward(name, query, key, value, output)

    def _replay(self, batch: Any, tokens: dict[str, int]) -> None:
        """The same decode once more by the graph: it writes the same keys to the same slots."""
        lens = batch.common.query_start_loc_cpu.diff()
        if self.state is None or not bool((lens == 1).all()):
            return
        reqs = batch.common.num_reqs
        for name in self.paged:
            drawn = self._drawn[name]
            for into, given in zip(self.inputs[name], (drawn.query, drawn.key, drawn.value), strict=False):
                if into is not None and given is not None:
                    into[:reqs].copy_(given)
        self.state.prepare_graph_input_buffers(self.state.get_graph_input_buffers(MOST), batch)
        self.graph.replay()
        for name, spec in self.paged.items():
            output = self.inputs[name][3]
            assert output is not None
            assert_close(
                output[:reqs].cpu(), self._drawn[name].expected, tolerance(spec).output, f"graph of {name}"
            )
        self.found.graphs += 1


def run(seeds: range, backend: str, device: str = "cpu", graphs: bool = False, seconds: float = 1e9) -> Found:
    """Run the plan of each seed; a refusal of a plan is counted, and any other error is wrong."""
    found, ends = Found(), time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > ends:
            break
        try:
            RandomRun(seed, backend, device, found, graphs).run()
        except REFUSALS as problem:
            found.refused[f"plan: {type(problem).__name__} {getattr(problem, 'field', '')}"] += 1
        except Exception:
            found.wrong[seed] = traceback.format_exc(limit=-4)
    return found


def main() -> int:
    """Run from a shell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--backend", default="TORCH")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--graphs", action="store_true", help="replay decodes by CUDA graphs too")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after this time")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    # The tensors are small: more threads only wait for each other.
    torch.set_num_threads(1)
    seeds = range(asked.first, asked.first + asked.plans)
    found = run(seeds, asked.backend, asked.device, asked.graphs, asked.seconds)
    report = {"backend": asked.backend, "device": asked.device, **vars(found)}
    report |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1))
    for seed, text in list(found.wrong.items())[:10]:
        print(f"seed {seed}:\n{text}")
    print(
        f"{asked.backend} on {asked.device}: {found.plans} plans, {found.steps} steps, {found.outputs} outputs, "
        f"{found.graphs} replays of graphs, {len(found.wrong)} wrong; refused {dict(found.refused)}"
    )
    return bool(found.wrong)


if __name__ == "__main__":
    sys.exit(main())
