"""The example engine, with graphs on a GPU, where requests share prompts or draft trees; ratios are of one run.

`python benchmarks/shared_prompts.py --json FILE` on a GPU: Qwen3-8B's shape with made-up weights, or `--tiny` anywhere. The loads:
128 requests on 8 system prompts, 16 rollouts of each of 2 prompts, the same with as many KV heads as OLMo 2 7B, and 16
requests with drafts. `--only TEXT` runs those with this text in their names.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from installed import versions
from transformers import Qwen3Config, Qwen3ForCausalLM

from attnplug.runtime import SharingPrices

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "engine"))

from engine import Engine

Prompts = list[list[int]]

SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    # No request of this page is longer, and graphs read tables of this width.
    "max_position_embeddings": 8192,
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
OLMO: dict[str, Any] = {"intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 100352}
"""What OLMo 2 7B has otherwise: four times the keys and values, so that attention is most of a step."""
OFTEN = 256
"""The vocabulary of the load with drafts: a model with so few tokens and made-up weights repeats itself."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large the model and its loads are."""

    layers: int
    dtype: str
    tokens: int
    graphs: bool
    is_tiny: bool = False

    @property
    def device(self) -> str:
        """Where the model runs."""
        return "cpu" if self.is_tiny else "cuda"

    def length(self, tokens: int) -> int:
        """The tokens of a prompt."""
        return tokens // 32 if self.is_tiny else tokens

    @property
    def sharing(self) -> SharingPrices | bool:
        """Tiny prompts are worth no call by any prices, so all that can be shared is."""
        return SharingPrices.free() if self.is_tiny else True


def model_of(scale: Scale, **changes: Any) -> Qwen3ForCausalLM:
    """A model with random weights, large enough that greedy tokens differ."""
    shape = SHAPE | (TINY if scale.is_tiny else {}) | changes
    config = Qwen3Config(**shape, num_hidden_layers=scale.layers, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(scale.device):
        model = Qwen3ForCausalLM._from_config(config, dtype=getattr(torch, scale.dtype))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5 if "embed" not in name else 1.0)
    return model.eval()


def engine_of(
    model: Qwen3ForCausalLM, scale: Scale, requests: int, own: int, kept: int = 0, **asked: Any
) -> Engine:
    """An engine with room for requests of `own` tokens each, twice, and for `kept` tokens that they share."""
    tokens = kept + 2 * requests * (own + 64)
    return Engine(
        model,
        num_blocks=tokens // 16 + 64,
        block_size=16,
        max_num_seqs=requests,
        max_num_batched_tokens=max(scale.length(8192), 16 * requests),
        graphs=None if scale.graphs else False,
        **asked,
    )


def serve(engine: Engine, prompts: Prompts, tokens: int, temperature: float = 0.0) -> dict[str, Any]:
    """Serve the prompts; seconds to the first tokens, and tokens a second after all have one."""
    begin = time.perf_counter()
    requests = [
        engine.add(prompt, max_tokens=tokens, temperature=temperature, seed=at)
        for at, prompt in enumerate(prompts)
    ]
    first: dict[str, float] = {}
    decoding: tuple[float, int, int, int] | None = None
    steps, graphs = engine.steps, engine.graphs
    replays = graphs.replays if graphs else 0
    while engine.waiting or engine.running:
        for request in engine.step():
            first.setdefault(request.name, time.perf_counter() - begin)
        if decoding is None and len(first) == len(prompts):
            decoding = time.perf_counter(), engine.drawn, engine.steps, engine.accepted
    end = time.perf_counter()
    since, drawn, _, accepted = decoding or (end, engine.drawn, engine.steps, engine.accepted)
    drawn = engine.drawn - drawn
    # A request draws one token in each of its steps, and each accepted draft is one more.
    alone = drawn - (engine.accepted - accepted)
    return {
        "first token, s": {
            "mean": round(statistics.mean(first.values()), 4),
            "last": round(max(first.values()), 4),
        },
        "tokens a second": round(drawn / max(end - since, 1e-9), 1),
        "tokens a step of a request": round(drawn / max(alone, 1), 3),
        "steps": engine.steps - steps,
        "steps in graphs": (graphs.replays if graphs else 0) - replays,
        "output": [request.output for request in requests],
    }


def measured(
    engine: Engine, shared: Prompts, warm: Prompts, prompts: Prompts, tokens: int, temperature: float = 0.0
) -> dict[str, Any]:
    """Serve `prompts` after others of the same lengths, which compile kernels and capture graphs; `shared` are computed first."""
    if shared:
        serve(engine, shared, 1)
    serve(engine, warm, tokens, temperature)
    found = serve(engine, prompts, tokens, temperature)
    found["notes"] = list(engine.runtime.step_notes)
    found["no graphs"] = [engine.no_graphs] if engine.graphs is None else engine.graphs.refusals
    engine.runtime.close()
    return found


def _drawn(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


def shared_reads(
    model: Qwen3ForCausalLM, scale: Scale, count: int, prompts: int, own: int, temperature: float = 0.0
) -> dict[str, Any]:
    """`count` requests on `prompts` prompts of 4k tokens, with `own` further tokens: with shared reads and without."""
    draw, vocabulary = random.Random(0), model.config.vocab_size
    system = [_drawn(draw, scale.length(4096), vocabulary) for _ in range(prompts)]
    warm, given = (
        [[*system[at % prompts], *_drawn(draw, own, vocabulary)] for at in range(count)] for _ in range(2)
    )
    kept, found = sum(map(len, system)), dict[str, Any]()
    for name, sharing in (("shared", scale.sharing), ("plain", False)):
        engine = engine_of(model, scale, count, own + scale.tokens, kept, prefix_sharing=sharing)
        found[name] = measured(engine, system, warm, given, scale.tokens, temperature)
    a, b = (found[name].pop("output") for name in ("shared", "plain"))
    same = [
        next((at for at, pair in enumerate(zip(x, y, strict=True)) if pair[0] != pair[1]), len(x))
        for x, y in zip(a, b, strict=True)
    ]
    return found | {
        "tokens a second, ratio": _ratio(found["shared"], found["plain"]),
        "last first token, ratio": round(
            found["plain"]["first token, s"]["last"] / found["shared"]["first token, s"]["last"], 3
        ),
        "requests with equal tokens": sum(length == len(x) for length, x in zip(same, a, strict=True)),
        "of": count,
        # With 16 bits, a merge rounds otherwise than one sum, and made-up weights give many tokens nearly equal logits.
        "equal tokens before the first other one, mean": round(statistics.mean(same), 1),
    }


def drafts(model: Qwen3ForCausalLM, scale: Scale) -> dict[str, Any]:
    """16 requests with drafts of their own text: none, a chain and a tree."""
    draw, vocabulary = random.Random(1), model.config.vocab_size
    warm, given = ([_drawn(draw, scale.length(2048), vocabulary) for _ in range(16)] for _ in range(2))
    found: dict[str, Any] = {}
    for name, count, branches in (("none", 0, 1), ("chain of 8", 8, 1), ("tree of 3 x 4", 12, 3)):
        asked = {"draft_tokens": count, "draft_branches": branches}
        engine = engine_of(model, scale, 16, len(given[0]) + 4 * scale.tokens, **asked)
        found[name] = measured(engine, [], warm, given, 4 * scale.tokens)
    outputs = {name: each.pop("output") for name, each in found.items()}
    ratios = {name: _ratio(each, found["none"]) for name, each in found.items()}
    equal = {
        name: sum(a == b for a, b in zip(each, outputs["none"], strict=True))
        for name, each in outputs.items()
    }
    return found | {"tokens a second, ratio to none": ratios, "requests equal to no drafts": equal, "of": 16}


def _ratio(a: dict[str, Any], b: dict[str, Any]) -> float:
    return round(a["tokens a second"] / b["tokens a second"], 3)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Serve the loads, and print their figures and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--layers", type=int, help="of the model (default: 36, tiny 2)")
    parser.add_argument("--dtype", help="of the weights (default: bfloat16, tiny float32)")
    parser.add_argument("--tokens", type=int, help="to draw for each request (default: 128, tiny 12)")
    parser.add_argument("--only", default="", help="loads whose names have this text")
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    options = parser.parse_args(arguments)
    usual = (2, "float32", 12) if options.tiny else (36, "bfloat16", 128)
    given = options.layers, options.dtype, options.tokens
    scale = Scale(*(a or b for a, b in zip(given, usual, strict=True)), not options.eager, options.tiny)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if scale.device == "cuda" else "cpu",
        "versions": versions("attnplug", "torch", "triton", "transformers"),
        "date": str(dt.date.today()),
        "layers": scale.layers,
        "dtype": scale.dtype,
        "tokens of a request": scale.tokens,
        "graphs": scale.graphs and scale.device != "cpu",
    }
    rollouts = "16 rollouts of each of 2 prompts of 4k tokens"
    loads: dict[str, tuple[dict[str, Any], Callable[[Qwen3ForCausalLM], dict[str, Any]]]] = {
        "128 requests on 8 system prompts of 4k tokens": (
            {},
            lambda model: shared_reads(model, scale, 128, 8, scale.length(128)),
        ),
        # Rollouts are drawn, so that they differ.
        rollouts: ({}, lambda model: shared_reads(model, scale, 32, 2, 0, 1.0)),
        f"{rollouts}, 32 KV heads": (
            {} if scale.is_tiny else OLMO,
            lambda model: shared_reads(model, scale, 32, 2, 0, 1.0),
        ),
        f"drafts for 16 requests, a vocabulary of {OFTEN}": (
            {"vocab_size": OFTEN},
            lambda model: drafts(model, scale),
        ),
    }
    with torch.inference_mode():
        for name, (changes, run) in loads.items():
            if options.only in name:
                found[name] = run(model_of(scale, **changes))
                print(name, json.dumps(found[name], indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
