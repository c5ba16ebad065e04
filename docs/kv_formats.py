"""Writes the tables of KV formats: errors measured by their codecs, and times of `benchmarks/kv_formats.py`.

python docs/kv_formats.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from attnplug.core import LayerSpec
from attnplug.core.kv_format import KVFormat, kv_format
from attnplug.testing.oracle import request_oracle, stored_values

PAGE = Path(__file__).parent / "concepts" / "kv-formats.md"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
NAMES = ("bfloat16", "fp8_e4m3", "int8_token_head", "nvfp4", "rotated4")
SIZE, TOKENS, QUERIES, KV_HEADS = 128, 2048, 8, 2


def rows(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[TOKENS, KV_HEADS, SIZE]` of one distribution."""
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, TOKENS, KV_HEADS, SIZE, generator=generator)
    if kind == "outliers":
        # Four channels of keys with a large mean, as trained models have, and one large token.
        key[..., :4] += torch.tensor([8.0, -9.0, 10.0, 12.0])
        key[0] *= 4
    if kind == "heavy":
        chi = torch.randn(3, TOKENS, KV_HEADS, SIZE, generator=generator).square().mean(0).sqrt()
        key, value = key / chi, value / chi.flip(0)
    return key, value


def errors(name: str, kind: str) -> tuple[float, float]:
    """The relative errors of keys, and of outputs, over four seeds."""
    spec = LayerSpec(
        num_heads=4 * KV_HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype="float32", kv_cache_dtype=name
    )
    plain, wrong, size, wrong_out, size_out = spec.replace(kv_cache_dtype="float32"), 0.0, 0.0, 0.0, 0.0
    for seed in range(4):
        key, value = rows(kind, seed)
        query = torch.randn(QUERIES, spec.num_heads, SIZE, generator=torch.Generator().manual_seed(seed + 9))
        stored = [stored_values(each, spec).float() for each in (key, value)]
        wrong += float((stored[0] - key).square().sum())
        size += float(key.square().sum())
        exact = request_oracle(plain, query, key, value, TOKENS).output
        found = request_oracle(plain, query, *stored, TOKENS).output
        wrong_out += float((found - exact).square().sum())
        size_out += float(exact.square().sum())
    return (wrong / size) ** 0.5, (wrong_out / size_out) ** 0.5


def table() -> Iterator[str]:
    """The lines of the table."""
    kinds = ("gaussian", "outliers", "heavy")
    heads = " | ".join(f"{kind}: keys, output" for kind in kinds)
    yield f"| `kv_cache_dtype` | bytes | smaller by | declared errors | {heads} |"
    yield f"|---|---:|---:|---|{'---|' * len(kinds)}"
    for name in NAMES:
        row = kv_format(name)
        found = (errors(name, kind) for kind in kinds)
        cells = " | ".join(f"{key:.3f}, {output:.3f}" for key, output in found)
        size = 2 * row.row_bytes(SIZE)
        yield f"| `{name}` | {size} | {4 * SIZE / size:.2f} | {declared(row)} | {cells} |"


def declared(row: KVFormat) -> str:
    """The bounds that a format declares."""
    return f"{row.rms_error:g}, worst {row.worst_error:g}" if row.codec else "-"


def speeds() -> Iterator[str]:
    """The measured times: microseconds, and in parentheses the ratio that each kind of step has."""
    found = json.loads((RESULTS / "kv-formats-h200.json").read_text())
    yield f"Times on one {found['device']}, in microseconds. In parentheses, decodes have the time of bfloat16 over that of the format;"
    yield "prompts and writes have that of the format over that of `fp8_e4m3`."
    yield ""
    yield f"| step | {' | '.join(f'`{name}`' for name in NAMES)} |"
    yield f"|---|{'---:|' * len(NAMES)}"
    for row in found["cells"]:
        names = ("auto", *NAMES[1:])
        cells = " | ".join(f"{row['us'][name]:.1f} ({row['ratios'][name]:.2f})" for name in names)
        yield f"| {row['cell']} | {cells} |"


def engine() -> Iterator[str]:
    """What the example engine measured over each format."""
    found = json.loads((RESULTS / "format-engine-h200.json").read_text())
    heads = " | ".join(
        f"{load}: tokens a second | last first token | equal first tokens" for load in found["loads"]
    )
    yield f"| `kv_cache_dtype` | tokens in 64 GB | {heads} |"
    yield f"|---|---:|{'---:|' * 3 * len(found['loads'])}"
    by_name = zip(*(each.values() for each in found["loads"].values()), strict=True)
    for name, loads in zip(NAMES, by_name, strict=True):
        cells = [
            f"{each['tokens a second']:,.0f} ({each['tokens a second, ratio']:.2f}) | "
            f"{each['first token, s']['last']:.2f} s | {each['equal tokens']['share of first tokens']:.0%}"
            for each in loads
        ]
        yield f"| `{name}` | {loads[0]['tokens in 64 GB']:,} | {' | '.join(cells)} |"


def replaced(text: str, name: str, lines: Iterator[str]) -> str:
    """A page with lines between the marks of a name."""
    start, end = f"<!-- {name} -->", "<!-- end -->" if name == "table" else f"<!-- end {name} -->"
    made = f"{start}\n" + "\n".join(lines) + f"\n{end}"
    return re.sub(f"{start}.*?{end}", lambda _: made, text, flags=re.DOTALL)


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, lines in {"table": table, "speed": speeds, "engine": engine}.items():
        page = replaced(page, name, lines())
    PAGE.write_text(page)
