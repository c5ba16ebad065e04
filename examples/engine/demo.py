"""A small Gemma-3 with random weights, served by the engine: the plan, the speed, and the tokens against `generate`.

python examples/engine/demo.py
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from engine import Engine
from rich.console import Console
from rich.progress import Progress
from tiny import add_options, load

MODELS = Path(__file__).parents[1] / "models"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 1 where a token differs in float32."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=MODELS / "gemma-3-27b-text.json", help="a config.json, shrunk to tiny sizes"
    )
    parser.add_argument("--requests", type=int, default=8, help="prompts of 4 to 96 tokens")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to draw for each")
    add_options(parser)
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # more would wait for each other: the model is that small
    console = Console()
    model = load(options.model, "tiny", options.device, options.dtype)
    reference = copy.deepcopy(model)
    engine = Engine(model, num_blocks=1024)
    console.print(engine.runtime.plan)

    draw = random.Random(0)  # noqa: S311
    prompts = [
        [draw.randrange(model.config.vocab_size) for _ in range(draw.randint(4, 96))]
        for _ in range(options.requests)
    ]
    outputs = {str(index): [] for index in range(len(prompts))}
    start = time.perf_counter()
    with Progress(console=console) as progress:
        bar = progress.add_task("tokens", total=options.requests * options.max_tokens)
        for request in engine.stream(prompts, max_tokens=options.max_tokens):
            outputs[request.name].append(request.tokens[-1])
            progress.advance(bar)
    seconds = time.perf_counter() - start
    tokens = sum(map(len, outputs.values()))
    console.print(f"{tokens} tokens in {engine.steps} steps, {tokens / seconds:,.0f} tokens per second")

    # Of transformers' attention functions, the model's own is the one that honours soft caps and sinks.
    reference.set_attn_implementation("eager")
    start = time.perf_counter()
    expected = [generate(reference, prompt, options.max_tokens) for prompt in prompts]
    console.print(f"generate, one by one: {tokens / (time.perf_counter() - start):,.0f} tokens per second")
    equal = list(outputs.values()) == expected
    console.print(f"tokens equal: {'yes' if equal else 'no'}")
    return 0 if equal or options.dtype != "float32" else 1


def generate(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers draws greedily after `prompt`."""
    ids = torch.tensor([prompt], device=model.device)
    drawn = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return drawn[0, len(prompt) :].tolist()


if __name__ == "__main__":
    sys.exit(main())
