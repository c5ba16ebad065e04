"""The example engine with 128 requests on 8 system prompts, with and without shared reads; and trees of drafts beside chains.

`python benchmarks/shared_prompts.py --json FILE` on a GPU: Qwen3-8B's shape with made-up weights, or `--small` anywhere.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import pathlib
import random
import statistics
import sys
import time
from typing import Any

import torch
from installed import versions
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "engine"))

from engine import Engine

SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
PROMPT = 16384
"""Tokens of a system prompt: without graphs, shorter ones are read faster than the host launches a layer."""
SMALL = {**SHAPE, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 512} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model_of(layers: int, is_small: bool, device: str, dtype: str) -> Qwen3ForCausalLM:
    """A model with random weights, large enough that greedy tokens differ."""
    config = Qwen3Config(
        **(SMALL if is_small else SHAPE), num_hidden_layers=layers, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5 if "embed" not in name else 1.0)
    return model.eval()


def serve(engine: Engine, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Serve the prompts; seconds to the first tokens, and tokens a second after all have one."""
    begin = time.perf_counter()
    requests = [engine.add(prompt, max_tokens=tokens) for prompt in prompts]
    first: dict[str, float] = {}
    steps = engine.steps
    decoding: tuple[float, int, int] | None = None
    while engine.waiting or engine.running:
        for request in engine.step():
            first.setdefault(request.name, time.perf_counter() - begin)
        if decoding is None and len(first) == len(prompts):
            decoding = time.perf_counter(), engine.drawn, engine.steps
    end = time.perf_counter()
    since, drawn, at = decoding or (end, 0, 0)
    return {
        "first token, s": {"mean": statistics.mean(first.values()), "last": max(first.values())},
        "tokens a second": (engine.drawn - drawn) / (end - since),
        "tokens a step of a request": (engine.drawn - drawn) / max(engine.steps - at, 1) / len(prompts),
        "steps": engine.steps - steps,
        "output": [request.output for request in requests],
    }


def shared(model: Qwen3ForCausalLM, scale: int, tokens: int) -> dict[str, Any]:
    """128 requests on 8 prompts: with shared reads and without, in one process."""
    draw, vocabulary = random.Random(0), model.config.vocab_size
    system = [[draw.randrange(vocabulary) for _ in range(PROMPT // scale)] for _ in range(8)]
    prompts = [
        [*system[index % 8], *(draw.randrange(vocabulary) for _ in range(128 // scale))]
        for index in range(128)
    ]
    found: dict[str, Any] = {}
    for name in ("shared", "plain"):
        engine = Engine(
            model,
            num_blocks=(8 * PROMPT + 128 * (256 + tokens)) // 16 + 512,
            block_size=16,
            max_num_seqs=128,
            max_num_batched_tokens=8192,
        )
        sharing = engine.runtime.prefix_sharing
        if name == "plain":
            sharing.layers = [each._replace(prices=None) for each in sharing.layers]
        # The system prompts are computed first, as those of a server are.
        serve(engine, system, 1)
        serve(engine, [[*prompt[:-1], 0] for prompt in prompts], 3)
        found[name] = serve(engine, prompts, tokens)
        found[name]["notes"] = engine.runtime.step_notes
        engine.runtime.close()
    same = [a == b for a, b in zip(found["shared"].pop("output"), found["plain"].pop("output"), strict=True)]
    return found | {"requests with equal tokens": sum(same), "of": len(same)}


def trees(model: Qwen3ForCausalLM, scale: int, tokens: int) -> dict[str, Any]:
    """16 requests with drafts of their own text, as chains and as trees."""
    draw, vocabulary = random.Random(1), model.config.vocab_size
    words = [[draw.randrange(vocabulary) for _ in range(3)] for _ in range(6)]
    prompts = [[token for _ in range(512 // scale) for token in draw.choice(words)] for _ in range(16)]
    found: dict[str, Any] = {}
    for name, drafts, branches in (("none", 0, 1), ("chain", 8, 1), ("tree", 8, 3)):
        engine = Engine(
            model,
            num_blocks=16 * (2048 + tokens) // 16 + 512,
            block_size=16,
            max_num_seqs=16,
            max_num_batched_tokens=8192,
            draft_tokens=drafts,
            draft_branches=branches,
        )
        serve(engine, prompts, 4)
        found[name] = serve(engine, prompts, tokens)
        engine.runtime.close()
    outputs = [found[name].pop("output") for name in found]
    return found | {
        "equal to no drafts": [sum(a == b for a, b in zip(each, outputs[0], strict=True)) for each in outputs]
    }


def main() -> None:
    """Serve both loads, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model on the CPU")
    parser.add_argument("--layers", type=int, default=36, help="of the model (default: 36)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (default: bfloat16)")
    parser.add_argument("--tokens", type=int, default=64, help="to draw for each request (default: 64)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    options = parser.parse_args()
    device, scale = ("cpu", 16) if options.small else ("cuda", 1)
    model = model_of(options.layers, options.small, device, "float32" if options.small else options.dtype)
    with torch.inference_mode():
        found = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "versions": versions("attnplug", "torch", "triton", "transformers"),
            "date": str(dt.date.today()),
            "layers": options.layers,
            "dtype": str(model.dtype),
            "shared": shared(model, scale, options.tokens),
            "trees": trees(model, scale, options.tokens),
        }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
