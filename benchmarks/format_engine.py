"""The example engine, with graphs on a GPU, over each KV format: tokens a second, capacity and equal tokens, in one run.

`python benchmarks/format_engine.py --json FILE` on a GPU: Qwen3-8B's shape with made-up weights, or `--tiny` anywhere. Prompts of
2k tokens and, as a second load, of 100 to 8k. `--formats` names others than the built-in ones. The first format is the one that
the others are compared with.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import pathlib
import random
import statistics
from typing import Any

import torch
from installed import versions
from shared_prompts import Prompts, Scale, engine_of, measured, model_of

FORMATS = ("auto", "fp8_e4m3", "int8_token_head", "nvfp4", "rotated4")
CAPACITY = 64e9
"""Bytes of pages whose tokens are counted."""


def loads(scale: Scale, vocabulary: int) -> dict[str, tuple[Prompts, Prompts]]:
    """The prompts of each load, after others of the same lengths."""
    draw = random.Random(0)
    count = 4 if scale.is_tiny else 64
    lengths = {
        f"{count} x 2k": [scale.length(2048)] * count,
        f"{count} of 100 to 8k": [max(int(scale.length(8000) * 80 ** -draw.random()), 1) for _ in range(count)],
    }  # fmt: skip
    return {
        name: tuple([[draw.randrange(vocabulary) for _ in range(each)] for each in own] for _ in range(2))  # type: ignore[misc]
        for name, own in lengths.items()
    }


def equal_tokens(outputs: list[list[int]], others: list[list[int]]) -> dict[str, float]:
    """Tokens equal to those of the first format: those of a request before its first other one count, and its first tokens."""
    before = [
        next((at for at, pair in enumerate(zip(x, y, strict=True)) if pair[0] != pair[1]), len(x))
        for x, y in zip(outputs, others, strict=True)
    ]
    return {
        "share before the first other token": round(statistics.mean(before) / len(outputs[0]), 3),
        "share of first tokens": round(sum(each > 0 for each in before) / len(before), 3),
    }


def bytes_per_token(engine: Any) -> int:
    """Bytes of one token in all layers."""
    groups = engine.runtime.kv_cache_config.kv_cache_groups
    return sum(len(each.layer_names) * each.kv_cache_spec.bytes_per_token for each in groups)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Serve the loads over each format, and print their figures and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--layers", type=int, help="of the model (default: 36, tiny 2)")
    parser.add_argument("--tokens", type=int, help="to draw for each request (default: 64, tiny 12)")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--only", default="", help="loads whose names have this text")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here after each format")
    options = parser.parse_args(arguments)
    usual = (2, "float32", 12) if options.tiny else (36, "bfloat16", 64)
    layers, tokens = options.layers or usual[0], options.tokens or usual[2]
    scale = Scale(layers, usual[1], tokens, graphs=True, is_tiny=options.tiny)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if scale.device == "cuda" else "cpu",
        "versions": versions("attnplug", "torch", "triton", "transformers"),
        "date": str(dt.date.today()),
        "layers": layers,
        "tokens of a request": tokens,
        "loads": {},
    }
    with torch.inference_mode():
        model = model_of(scale)
        for name, (warm, given) in loads(scale, model.config.vocab_size).items():
            if options.only not in name:
                continue
            first: list[list[int]] = []
            by_format = found["loads"].setdefault(name, {})
            for kind in options.formats:
                room = sum(map(len, given)) + len(given) * tokens
                engine = engine_of(model, scale, len(given), 0, room, kv_cache_dtype=kind)
                size = bytes_per_token(engine)
                backends = sorted({each.backend for each in engine.runtime.plan.decisions.values()})
                figures = measured(engine, [], warm, given, tokens)
                output = figures.pop("output")
                first = first or output
                by_format[kind] = figures | {
                    "backends": backends,
                    "bytes of a token": size,
                    f"tokens in {CAPACITY / 1e9:g} GB": int(CAPACITY // size),
                    "equal tokens": equal_tokens(output, first),
                }
                base = by_format[options.formats[0]]
                for what, a, b in (
                    ("tokens a second, ratio", figures["tokens a second"], base["tokens a second"]),
                    ("last first token, ratio", base["first token, s"]["last"], figures["first token, s"]["last"]),
                ):  # fmt: skip
                    by_format[kind][what] = round(a / b, 3)
                print(name, kind, json.dumps(by_format[kind]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
