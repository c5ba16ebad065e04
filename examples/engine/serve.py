"""Serves many requests at once on few KV blocks: those that do not fit are preempted, and none is lost.

python examples/engine/serve.py --model examples/models/llama-3.1-8b.json --scale tiny --requests 64 --max-blocks 96
torchrun --standalone --nproc-per-node 2 examples/engine/serve.py --context-parallel 2
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from engine import Engine
from ranks import Ranks, joined_ranks
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from tiny import add_options, load, needs_equal
from transformers import PreTrainedModel

from attnplug.errors import AttnplugError, RankFailureError
from attnplug.integrations.transformers import read_config

MODELS = Path(__file__).parents[1] / "models"
CONSOLE = Console()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve; 2 for bad arguments, 1 where a request was lost or, in float32, an output differs between the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        help="the path of a config.json; weights are random (several processes: default a tiny Llama)",
    )
    parser.add_argument("--scale", choices=["tiny", "full"], help="tiny: same structure, small sizes")
    parser.add_argument("--requests", type=positive, default=64, help="how many (default: %(default)s)")
    parser.add_argument("--max-blocks", type=positive, default=96, help="KV blocks, the null block included")
    parser.add_argument(
        "--block-size", type=positive, help="tokens per block (default: what the backend likes)"
    )
    parser.add_argument("--max-tokens", type=positive, default=48, help="tokens to draw for each request")
    parser.add_argument(
        "--max-prompt", type=positive, default=96, help="longest prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=positive, default=32, help="most requests in a step (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk", type=positive, default=256, help="most tokens in a step (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 draws greedily (default: %(default)s)"
    )
    parser.add_argument(
        "--draft-tokens", type=int, default=0, help="drafts to verify in a step of a request (default: none)"
    )
    parser.add_argument(
        "--tensor-parallel", type=positive, default=1, help="processes that share heads, started by torchrun"
    )
    parser.add_argument(
        "--context-parallel",
        type=positive,
        default=1,
        help="processes that share tokens, started by torchrun",
    )
    parser.add_argument("--interleave", type=positive, default=1, help="tokens that a rank gets in a run")
    parser.add_argument(
        "--timeout", type=positive, default=60, help="seconds to wait for other ranks (default: %(default)s)"
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.model is None and options.tensor_parallel * options.context_parallel == 1:
        parser.error("the following arguments are required: --model")
    if options.scale is None:
        options.scale = "full" if options.model else "tiny"
    options.model = options.model or MODELS / "llama-3.1-8b.json"
    if options.chunk < options.batch:
        parser.error(
            f"--chunk {options.chunk} must be at least --batch {options.batch}: a token for each request"
        )
    sizes = options.tensor_parallel, options.context_parallel
    try:
        with joined_ranks(*sizes, options.interleave, options.device, options.timeout) as ranks:
            return run(options, ranks)
    except RankFailureError as error:
        print(f"serve.py: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # the threads of a group that failed would keep the process
    except AttnplugError as error:
        print(f"serve.py: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, ranks: Ranks) -> int:
    """The constrained run, the same without drafts and in one process, then with blocks for all."""
    CONSOLE.quiet = ranks.watch is not None and ranks.watch.rank > 0
    model = load(options.model, options.scale, options.device, options.dtype)
    if options.scale == "tiny":
        torch.set_num_threads(1)  # more would wait for each other
    draw = random.Random(0)  # noqa: S311
    vocabulary = range(model.config.vocab_size)
    system = draw.choices(vocabulary, k=options.max_prompt // 3)
    prompts = [
        system + draw.choices(vocabulary, k=draw.randint(1, options.max_prompt - len(system)))
        for _ in range(options.requests)
    ]
    drafts, alone = options.draft_tokens, None
    if ranks.watch is not None:
        _, alone = serve(model, prompts, options.max_blocks, drafts, options, "one process", Ranks())
        ranks.split_heads(model, dict(read_config(model.config).layers))
    engine, outputs = serve(model, prompts, options.max_blocks, drafts, options, "constrained", ranks)
    CONSOLE.print(engine.runtime.plan)
    lost = sum(len(output) != options.max_tokens for output in outputs)
    CONSOLE.print(
        f"{len(prompts) - lost} of {len(prompts)} requests finished, {lost} lost; {engine.preemptions} preemptions, "
        f"{engine.pages.shared} pages shared, {engine.steps} steps"
    )
    longest = options.max_prompt + options.max_tokens
    equal = alone in (None, outputs)
    if drafts:
        _, expected = serve(model, prompts, options.max_blocks, 0, options, "without drafts", ranks)
        equal = equal and outputs == expected
    enough = 1 + options.requests * -(-longest // engine.pages.size) * len(engine.pages.group_of)
    free, expected = serve(model, prompts, enough, 0, options, "unconstrained", ranks)
    equal = equal and outputs == expected
    CONSOLE.print(f"unconstrained: {free.preemptions} preemptions, {free.steps} steps")
    CONSOLE.print(f"outputs equal: {'yes' if equal else 'no'}")
    return 0 if not lost and (equal or not needs_equal(options)) else 1


def serve(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    blocks: int,
    drafts: int,
    options: argparse.Namespace,
    title: str,
    ranks: Ranks,
) -> tuple[Engine, list[list[int]]]:
    """The engine, and each prompt's output. The model then runs on this engine, and no more on an earlier one."""
    engine = Engine(
        model,
        num_blocks=blocks,
        block_size=options.block_size,
        max_num_seqs=options.batch,
        max_num_batched_tokens=options.chunk,
        draft_tokens=drafts,
        ranks=ranks,
        invariance=options.invariance,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    requests = [
        engine.add(prompt, max_tokens=options.max_tokens, temperature=options.temperature, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]
    columns = TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn()
    counts = TextColumn("{task.fields[state]}")
    start = time.perf_counter()
    with Progress(*columns, counts, console=CONSOLE) as progress:
        bar = progress.add_task(title, total=len(prompts), state="")
        for request in engine.stream([]):
            state = f"{len(engine.running)} running, {len(engine.waiting)} waiting, {engine.preemptions} preempted"
            rate = engine.drawn / (time.perf_counter() - start)
            progress.update(bar, advance=request.is_done, state=f"{state}, {rate:,.0f}/s")
    CONSOLE.print(f"{title}: {engine}, {rate:,.0f} tokens per second")
    return engine, [request.output for request in requests]


def positive(text: str) -> int:
    """An argument of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
