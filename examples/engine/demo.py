"""A small Gemma-3 with random weights, served by the engine: plan, speed with and without drafts, tokens against `generate`.

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
from tiny import add_options, load, needs_equal

MODELS = Path(__file__).parents[1] / "models"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 1 where a token differs in float32."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=MODELS / "gemma-3-27b-text.json", help="a config.json, shrunk to tiny sizes"
    )
    parser.add_argument("--requests", type=int, default=8, help="prompts of 4 to 96 tokens")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to draw for each")
    parser.add_argument("--draft-tokens", type=int, default=4, help="drafts to verify in a step of a request")
    parser.add_argument(
        "--vocab-size", type=int, default=64, help="with fewer tokens a random model repeats itself more"
    )
    add_options(parser)
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)  # more would wait for each other: the model is that small
    console = Console()
    model = load(options.model, "tiny", options.device, options.dtype, options.vocab_size)
    reference = copy.deepcopy(model)
    draw = random.Random(0)  # noqa: S311
    prompts = [
        [draw.randrange(options.vocab_size) for _ in range(draw.randint(4, 96))]
        for _ in range(options.requests)
    ]
    runs = []
    for drafts in dict.fromkeys((0, options.draft_tokens)):
        asked = {"invariance": options.invariance, "kv_cache_dtype": options.kv_cache_dtype}
        engine = Engine(model, num_blocks=1024, draft_tokens=drafts, **asked)
        if not drafts:
            console.print(engine.runtime.plan)
        requests = [engine.add(prompt, max_tokens=options.max_tokens) for prompt in prompts]
        start = time.perf_counter()
        with Progress(console=console) as progress:
            bar = progress.add_task("tokens", total=options.requests * options.max_tokens)
            for _ in engine.stream():
                progress.update(bar, completed=engine.drawn)
        speed = engine.drawn / (time.perf_counter() - start)
        title = f"with {drafts} draft tokens" if drafts else "without drafts"
        console.print(f"{title}: {engine}, {speed:,.0f} tokens per second")
        runs.append([request.output for request in requests])

    # Only the model's own attention function in transformers honours soft caps and sinks.
    reference.set_attn_implementation("eager")
    start = time.perf_counter()
    expected = [generate(reference, prompt, options.max_tokens) for prompt in prompts]
    speed = sum(map(len, expected)) / (time.perf_counter() - start)
    console.print(f"generate, one by one: {speed:,.0f} tokens per second")
    equal = all(outputs == expected for outputs in runs)
    console.print(f"tokens equal: {'yes' if equal else 'no'}")
    return 0 if equal or not needs_equal(options) else 1


def generate(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers draws greedily after `prompt`."""
    ids = torch.tensor([prompt], device=model.device)
    drawn = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return drawn[0, len(prompt) :].tolist()


if __name__ == "__main__":
    sys.exit(main())
