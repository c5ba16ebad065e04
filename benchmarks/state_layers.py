"""Decodes, drafts and prompts of layers with a state: TRITON, TORCH and flash-linear-attention, beside copies, on one GPU.

    python benchmarks/state_layers.py --json state-layers.json
    python benchmarks/state_layers.py --only gdn --tiles 2048x1,4096x4,8192x8 --rounds 3

`of_copy` is the rate of the states that a step reads and writes, each once, over that of a copy of as many bytes in the same
run. Decodes and drafts are replayed as one graph, in turns; TORCH, which graphs cannot hold, and prompts are called. "fla" is
the library called directly, on states without pages; "FLA" is the package of examples/plugins/attnplug-fla over it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from installed import versions
from paged_layers import interleaved_us

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.triton import TritonBackend
from attnplug.backends.triton.state import impl as triton_impl
from attnplug.core import BuilderConfig, LayerSpec, StateDims
from attnplug.core.interface.impl_and_builder import make_builder, make_impl
from attnplug.core.state.caches import state_cache_for
from attnplug.runtime import StateStep
from attnplug.runtime.states.state_step import batch_of
from attnplug.testing.conformance.states.state_cases import draw_inputs, state_weights

_PLUGIN = Path(__file__).parents[1] / "examples" / "plugins" / "attnplug-fla"
_COUNT = 4
"""Calls of one graph."""
_L2 = 256 << 20
"""Bytes of states in all copies of a step, so that none is in the L2 from the call before."""
_COPY, _PROMPT, _PACKAGE = 0.93, 8192, 0.95


@dataclasses.dataclass(frozen=True)
class Cell:
    """A step of requests with as many tokens each; all tokens of drafts store a state, of prompts the last."""

    name: str
    kind: str
    spec: LayerSpec
    requests: int
    tokens: int = 1

    @property
    def stores(self) -> int:
        """States that a request stores."""
        return self.tokens if self.kind == "drafts" else 1


def _recurrent(rule: str, decay: str, heads: int, keys: int, k: int, v: int, **fields: Any) -> LayerSpec:
    dims, sizes = StateDims(rule=rule, decay=decay, drafts=3), {"head_size": k, "head_size_v": v}
    return LayerSpec(num_heads=heads, num_kv_heads=keys, state=dims, **sizes, **fields)


LAYERS = {
    "gdn": _recurrent("delta", "head", 32, 16, 128, 128),
    "gdn bf16 states": _recurrent("delta", "head", 32, 16, 128, 128, kv_cache_dtype="bfloat16"),
    "kda": _recurrent("delta", "row", 32, 32, 128, 128),
    "mamba2": _recurrent("linear", "head", 64, 8, 128, 64, scale=1.0),
    "lightning": _recurrent("linear", "head", 64, 64, 128, 128, scale=1.0),
    "mamba": _recurrent("linear", "row", 8192, 1, 16, 1, scale=1.0),
    "conv": LayerSpec(
        num_heads=8192,
        num_kv_heads=8192,
        head_size=1,
        state=StateDims(rule="conv", width=4, activation="silu"),
    ),
}
"""Qwen3-Next's recurrence and convolution, and those of Kimi-Linear, Nemotron-H, MiniMax and Jamba."""
CELLS = (
    *(Cell(f"{name}, 256 requests", "decode", spec, 256) for name, spec in LAYERS.items()),
    Cell("gdn, 8 requests", "decode", LAYERS["gdn"], 8),
    Cell("gdn, 64 requests of 4 tokens", "drafts", LAYERS["gdn"], 64, 4),
    *(
        Cell(f"{name}, 1 x 8k", "prompt", LAYERS[name], 1, _PROMPT)
        for name in ("gdn", "kda", "mamba2", "conv")
    ),
    Cell("gdn, 16 x 512", "prompt", LAYERS["gdn"], 16, 512),
)


class Layer:
    """A layer on a backend, and a step of it for each copy of its pages."""

    def __init__(self, backend: Any, cell: Cell, copies: int, device: str) -> None:
        serving, spec = backend.for_layer(cell.spec), cell.spec
        self.impl = make_impl(serving, spec, layer_name="layer", tensors=state_weights(spec, device))
        page: Any = state_cache_for(spec)
        builder = make_builder(serving, page, ["layer"], BuilderConfig(), torch.device(device))
        self.metadata = [builder.build(0, _step(cell, copy, device).common) for copy in range(copies)]

    def call(
        self, given: dict[str, Any], states: torch.Tensor, output: torch.Tensor | None
    ) -> Callable[[int], Any]:
        """Runs the step of a copy; without `output` the impl makes one, as the library does."""
        query, key, value, decay, beta = given.values()

        def run(index: int) -> torch.Tensor:
            made = self.metadata[index % len(self.metadata)]
            return self.impl.forward(None, query, key, value, states, made, output, decay=decay, beta=beta)

        return run


def _step(cell: Cell, copy: int, device: str) -> StateStep:
    """The step of one copy: each request starts from a page, and its last token is stored there."""
    first = 1 + copy * cell.requests * cell.stores
    own = range(first, first + cell.requests)
    others = iter(range(first + cell.requests, first + cell.requests * cell.stores))
    slots = []
    for page in own:
        stored = [next(others) for _ in range(cell.stores - 1)]
        slots += [*[-1] * (cell.tokens - cell.stores), *stored, page]
    common = batch_of([str(page) for page in own], [cell.tokens] * cell.requests, [0] * cell.requests)
    places = {name: getattr(common, name).to(device) for name in ("query_start_loc", "seq_lens")}
    return StateStep.of(common.changed(**places), list(own), slots)


def measured(
    cell: Cell,
    rounds: int,
    tiles: list[tuple[int, int]],
    device: str = "cuda",
    timed: Callable[..., dict[str, float]] = interleaved_us,
) -> dict[str, Any]:
    """The times of a cell in us, and the error of each output against TORCH's, relative to its largest number."""
    cache = state_cache_for(cell.spec)
    assert cache is not None
    size = cell.requests * cell.stores
    copies = 1 if cell.kind == "prompt" else min(max(_L2 // (size * cache.page_size_bytes), 1), 64)
    shape, dtype = (1 + copies * size, *cache.shape), getattr(torch, cache.dtype)
    # The inputs of a page of a convolution are equal, because each backend has them in its own order.
    drawn_shape = (*shape[:1], 1, 1) if cell.spec.kinds == ("conv",) else shape
    states = torch.randn(drawn_shape, device=device).to(dtype).expand(shape).contiguous()
    drawn = draw_inputs(cell.spec, cell.requests * cell.tokens, 3).by_token()
    given = {name: None if each is None else each.to(device) for name, each in drawn.items()}
    like = given["query"] if given["value"] is None else given["value"]
    assert like is not None
    output, before = torch.empty_like(like), states.clone()
    graphed: dict[str, Callable[[int], Any]] = {}
    called: dict[str, Callable[[int], Any]] = {}
    triton = graphed if cell.kind != "prompt" else called
    for tile in tiles or [None]:
        if tile is not None:
            triton_impl.TILES.update(dict.fromkeys((True, False), tile))
        name = "TRITON" if tile is None else f"TRITON, {tile[0]} in {tile[1]} warps"
        triton[name] = Layer(TritonBackend, cell, copies, device).call(given, states, output)
        # The first call binds the tile.
        triton[name](0)
        states.copy_(before)
    if cell.kind != "prompt":
        called["TORCH"] = Layer(TorchBackend, cell, copies, device).call(given, states, output)
    triton.update(_fla(cell, given, before))
    if (package := _package()) is not None and cell.kind == "prompt" and cell.spec.kinds == ("state",):
        called["FLA"] = Layer(package, cell, copies, device).call(given, states, None)
    errors = _errors(graphed | called, states, before)
    page = states[1 : 1 + cell.requests]
    into = torch.empty_like(page)
    copied = {"copy": lambda index: into.copy_(_pages(states, cell, index))}
    us = timed(copied | graphed, _COUNT, rounds)
    # TORCH takes up to seconds, and is timed once.
    slow = {"TORCH": called.pop("TORCH")} if "TORCH" in called else {}
    us |= timed(called, 1, rounds, False) if called else {}
    us |= timed(slow, 1, 1, False) if slow else {}
    row: dict[str, Any] = {"cell": cell.name, "kind": cell.kind, "us": us, "errors": errors}
    moved = cell.requests * (1 + cell.stores) * cache.page_size_bytes
    rate = 2 * page.numel() * page.element_size() / us["copy"]
    row["tbps"] = {name: moved / each / 1e6 for name, each in us.items() if name != "copy"}
    row["copy_tbps"] = rate / 1e6
    row["of_copy"] = {name: moved / each / rate for name, each in us.items() if name != "copy"}
    _show(row)
    return row


def _pages(states: torch.Tensor, cell: Cell, index: int) -> torch.Tensor:
    size = cell.requests * cell.stores
    first = 1 + index % ((states.shape[0] - 1) // size) * size
    return states[first : first + cell.requests]


def _errors(
    calls: dict[str, Callable[[int], Any]], states: torch.Tensor, before: torch.Tensor
) -> dict[str, float]:
    found = {}
    for name, call in calls.items():
        states.copy_(before)
        found[name] = call(0).flatten().float().clone()
    states.copy_(before)
    right = found.get("TORCH", found.get("fla"))
    if right is None:
        return {}
    return {name: float((each - right).abs().max() / right.abs().max()) for name, each in found.items()}


def _fla(cell: Cell, given: dict[str, Any], states: torch.Tensor) -> dict[str, Callable[[int], Any]]:
    """The library called directly on the states in their order, without pages; nothing where it is not installed."""
    dims = cell.spec.state
    if (
        dims is None
        or dims.rule == "conv"
        or cell.kind == "drafts"
        or (dims.rule, dims.decay) == ("linear", "row")
    ):
        return {}
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
    except ImportError:
        return {}
    forms = {
        ("delta", "head"): (fused_recurrent_gated_delta_rule, chunk_gated_delta_rule),
        ("delta", "row"): (fused_recurrent_kda, chunk_kda),
        ("linear", "head"): (fused_recurrent_simple_gla, chunk_simple_gla),
    }
    form = forms[dims.rule, dims.decay][cell.kind == "prompt"]
    names = {"query": "q", "key": "k", "value": "v", "decay": "g", "beta": "beta"}
    parts = {
        short: given[name].unflatten(0, (cell.requests, cell.tokens))
        for name, short in names.items()
        if given[name] is not None
    }
    first = states[1 : 1 + cell.requests].float()
    fixed = {"scale": cell.spec.scale, "initial_state": first, "output_final_state": True}
    if dims.rule == "delta":
        return {"fla": lambda _: form(**parts, **fixed)[0]}
    shared = cell.spec.num_heads // cell.spec.num_kv_heads

    def repeated(_: int) -> torch.Tensor:
        # The library has one key head for each value head, so whoever calls it for these layers repeats them.
        own = {each: parts[each].repeat_interleave(shared, 2) for each in ("q", "k")}
        output: torch.Tensor = form(**{**parts, **own}, **fixed)[0]
        return output

    return {"fla": repeated}


def _package() -> Any:
    if _PLUGIN.is_dir() and str(_PLUGIN) not in sys.path:
        sys.path.append(str(_PLUGIN))
    try:
        import fla.ops as _  # noqa: F401
        from attnplug_fla import FlaStates
    except ImportError:
        return None
    return FlaStates


def _show(row: dict[str, Any]) -> None:
    print(f"{row['cell']}, copies {row['copy_tbps']:.2f} TB/s")
    for name, us in row["us"].items():
        text = f"{us:10.1f} us"
        if name != "copy" and row["kind"] != "prompt":
            text += f", {row['of_copy'][name]:.1%} of copies"
        if name in row["errors"]:
            text += f", error {row['errors'][name]:.1e}"
        print(f"  {name:22}{text}", flush=True)


def judged(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each goal with its value and whether it is met."""
    for row in rows:
        us = row["us"]
        if row["cell"] == "gdn, 256 requests":
            best = max(each for name, each in row["of_copy"].items() if name.startswith("TRITON"))
            yield {"name": f"{row['cell']}, of copies", "value": best, "goal": _COPY, "met": best >= _COPY}
        if row["kind"] == "prompt" and {"fla", "FLA"} <= us.keys():
            ratio = us["fla"] / us["FLA"]
            name = f"{row['cell']}, the package against the library"
            yield {"name": name, "value": ratio, "goal": _PACKAGE, "met": ratio >= _PACKAGE}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--only", metavar="WORD", action="append", help="only cells with this word in their names"
    )
    parser.add_argument(
        "--tiles",
        default="",
        help="elements and warps of TRITON's programs, such as 4096x4; default: its own",
    )
    parser.add_argument("--rounds", type=int, default=7, help="times of each, of which the median counts")
    given = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if not given.only or any(word in cell.name for word in given.only)]
    tiles: list[tuple[int, int]] = []
    for each in filter(None, given.tiles.split(",")):
        elements, warps = map(int, each.split("x"))
        tiles.append((elements, warps))
    found: dict[str, Any] = {
        "date": dt.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": versions("attnplug", "torch", "triton", "flash-linear-attention", "fla-core"),
        "cells": [],
    }
    print(found["device"], flush=True)
    for cell in cells:
        found["cells"].append(measured(cell, given.rounds, tiles))
        torch.cuda.empty_cache()
    found["goals"] = list(judged(found["cells"]))
    for goal in found["goals"]:
        print(
            f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {goal['value']:.3f} >= {goal['goal']}"
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
