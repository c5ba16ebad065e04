"""What equal bits cost on a GPU, and whether they are equal: TRITON with and without `invariance`.

    python benchmarks/invariance.py --json invariance.json
    python benchmarks/invariance.py --bits 10000 --json bits.json     # random batches of each kind of layer

Prices are times over those of TRITON without, in turns: with `batch` alone, and with all three words as "rows". Decodes
run by graph replay, prompts as calls. "one split" is the other way to equal bits, which vLLM takes: no request is divided.

With `--bits`, each row of a random step is compared with the same row of its request's whole prompt alone, or with
`--words batch` of the same tokens alone. Steps have 1
to 48 requests, decodes, drafts, parts of prompts and whole ones, which may be attended from the keys of the call. Lengths
are also almost equal, in any order and tables of any width. Every fourth step has half of the heads. No bit may differ.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import math
import random
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention import decode, prefill
from installed import versions
from paged_layers import Cell, PagedLayer, interleaved_us

import attnplug
from attnplug.backends.triton import share_bindings
from attnplug.core import BuilderConfig, CommonAttentionMetadata, LayerSpec, LayerTensors
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.ops.storage import STORAGE_DTYPES

WORDS = ("batch", "rows", "heads")
HEADS = (32, 8, 128)
_RANDOM = random.Random(5)


def _ragged(count: int, least: int, most: int) -> list[int]:
    return [int(least * (most / least) ** _RANDOM.random()) for _ in range(count)]


CELLS = [
    decode("64 x 8k", HEADS, [8192] * 64, "even"),
    decode("53 of 80 to 26k", HEADS, _ragged(53, 80, 26000)),
    decode("150 of 30 to 8k", HEADS, _ragged(150, 30, 8000)),
    decode("8 x 700", HEADS, [700] * 8),
    decode("2 x 3k", HEADS, [3000] * 2),
    decode("1 x 1k", HEADS, [1024]),
    decode("1 x 8k", HEADS, [8192]),
    decode("1 x 32k", HEADS, [32768]),
    decode("4 x 32k", HEADS, [32768] * 4),
    decode("16 x 2k", HEADS, [2048] * 16),
    decode("32 x 1k", HEADS, [1024] * 32),
    decode("8 x 500 and 1 x 60k", HEADS, [500] * 8 + [60000]),
    Cell("8 drafts, 16 x 4k", "drafts", HEADS, (8,) * 16, (4096,) * 16),
    Cell("8 drafts, 53 of 80 to 26k", "drafts", HEADS, (8,) * 53, tuple(_ragged(53, 80, 26000))),
    prefill("4 x 4k", HEADS, [4096] * 4),
    prefill("1 x 16k", HEADS, [16384]),
    Cell("1k more of 8k, 4", "prefill", HEADS, (1024,) * 4, (9216,) * 4),
    decode("fp8, 64 x 8k", HEADS, [8192] * 64, "fp8 decode", kv_cache_dtype="fp8_e4m3"),
    decode("fp8, 53 of 80 to 26k", HEADS, _ragged(53, 80, 26000), "fp8 decode", kv_cache_dtype="fp8_e4m3"),
    Cell(
        "fp8, 1k more of 8k, 4",
        "fp8 part",
        HEADS,
        (1024,) * 4,
        (9216,) * 4,
        (("kv_cache_dtype", "fp8_e4m3"),),
    ),
]
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "window": {"sliding_window": 300},
    "chunk": {"chunk_size": 512},
    "soft cap": {"logits_soft_cap": 30.0},
    "sinks and window": {"has_sinks": True, "sliding_window": 128, "head_size": 64},
    "ALiBi": {"has_alibi": True},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_e5m2 and cap": {"kv_cache_dtype": "fp8_e5m2", "logits_soft_cap": 20.0},
    "head size 80": {"head_size": 80, "head_size_v": 96},
    "head size 256": {"head_size": 256},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--bits", type=int, metavar="N", help="compare N random steps of each kind of layer")
    parser.add_argument("--only", metavar="NAME", help="only this cell or kind of layer")
    parser.add_argument("--words", default=",".join(WORDS), help="compare bits of layers that ask for these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=500, help="stop comparing steps after so long")
    parser.add_argument("--backend", default="TRITON", help="compare bits of this one (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="compare bits on it (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=1 << 20, help="leave out requests of more tokens")
    given = parser.parse_args(arguments)
    where = given.backend, given.device
    _Requests.lengths = tuple(length for length in _Requests.lengths if length <= given.longest)
    found = {
        "date": dt.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else given.device,
        "versions": versions("attnplug", "torch", "triton"),
    }
    wanted: Callable[[str], bool] = lambda name: given.only in (None, name)  # noqa: E731
    if given.bits:
        end = time.monotonic() + given.seconds
        found["bits"], words = [], tuple(given.words.split(","))
        for index, name in enumerate(_KINDS):
            if wanted(name):
                found["bits"].append(compare_bits(name, where, words, given.bits, given.seed + index, end))
    else:
        found["cells"] = [measure(cell) for cell in CELLS if wanted(cell.name)]
        found["summary"] = summary(found["cells"])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return int(any(each["steps_that_differ"] for each in found.get("bits", ())))


def measure(cell: Cell) -> dict[str, Any]:
    """Times of one cell, in microseconds, and their ratios to plain TRITON."""
    plain = PagedLayer(cell)
    backend = attnplug.explain(plain.spec, "cuda", backend="TRITON").get_backend_cls()
    calls = {"plain": plain.attend(backend)}
    for name in ("batch", "rows", "one split"):
        plain.spec = plain.spec.replace(invariance=("batch",) if name == "batch" else WORDS)
        calls[name] = plain.attend(backend)
        plan = share_bindings.SharesPlan
        if name == "one split":
            share_bindings.SharesPlan = functools.partial(_undivided, plan)
        plain.output.fill_(torch.nan)
        error = plain.error(calls[name](0))
        share_bindings.SharesPlan = plan
        if not error < 1e-2:
            raise SystemExit(f"{cell.name}: error {error} of {name}")
    if cell.is_prefill:
        del calls["one split"]
    count = 1 if cell.is_prefill else 4 if cell.kv_bytes > 200_000_000 else 16
    us = interleaved_us(calls, count, 9, graphs=not cell.is_prefill)
    ratios = {name: us[name] / us["plain"] for name in us if name != "plain"}
    print(
        f"{cell.kind:8}{cell.name:28}plain {us['plain']:8.1f} us  "
        + "  ".join(f"{name} {us[name]:8.1f} us {ratio:.3f}" for name, ratio in ratios.items()),
        flush=True,
    )
    return {"cell": cell.name, "kind": cell.kind, "us": us, "ratio": ratios}


def _undivided(plan: Callable[..., Any], **values: Any) -> Any:
    """A plan whose shares are no shorter than any request."""
    return plan(**{**values, "least": 1 << 20})


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(each["kind"] for each in cells):
        for name in ("batch", "rows"):
            ratios = [each["ratio"][name] for each in cells if each["kind"] == kind]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            found[f"{kind}, {name}"] = {"geometric_mean": mean, "worst": max(ratios)}
            print(f"{kind}, {name}: {mean:.3f} by geometric mean of {len(ratios)}, {max(ratios):.3f} at most")
    return found


class _Requests:
    """Some requests with all their tokens written, and the output of each whole prompt alone."""

    lengths = (1, 17, 130, 131, 137, 146, 300, 511, 700, 701, 1023, 1100, 2000, 2049, 4100, 6000)
    page = 16

    def __init__(
        self, where: tuple[str, str], fields: dict[str, Any], words: tuple[str, ...], seed: int
    ) -> None:
        torch.manual_seed(seed)
        name, self.device = where
        self.backend = attnplug.list_backends()[name]
        given = {
            "num_heads": 8,
            "num_kv_heads": 2,
            "head_size": 128,
            "dtype": "bfloat16",
            "block_size": self.page,
        }
        self.spec = LayerSpec(**{"needs_lse": True, **given, **fields}, invariance=words)
        spec, device = self.spec, self.device
        dtype, stored = (STORAGE_DTYPES[each] for each in (spec.dtype, spec.resolved_kv_cache_dtype))
        counts = [-(-each // self.page) for each in self.lengths]
        # Each request is on two sets of pages.
        places = (torch.randperm(2 * sum(counts)) + 1).int().split(counts * 2)
        cache = (torch.randn(self._shape(spec, 2 * sum(counts) + 1), device=device) * 2).to(dtype).to(stored)
        raw = cache.view(torch.uint8)  # torch assigns no elements of 8-bit floats
        for first, second in zip(places[: len(counts)], places[len(counts) :], strict=True):
            raw[second.long().to(self.device)] = raw[first.long().to(self.device)]
        self.cache, self.places = cache, places
        total = sum(self.lengths)
        self.starts = np.cumsum([0, *self.lengths])
        self.queries = (torch.randn(total, spec.num_heads, spec.head_size, device=device) * 2).to(dtype)
        self.tensors = LayerTensors(
            sinks=torch.randn(spec.num_heads, device=device) if spec.has_sinks else None,
            alibi_slopes=2.0 ** -torch.arange(1.0, spec.num_heads + 1, device=device)
            if spec.has_alibi
            else None,
            k_scale=0.5 if spec.has_quantized_kv_cache else 1.0,
            v_scale=2.0 if spec.has_quantized_kv_cache else 1.0,
        )
        self.whole = self._layer(spec, self.tensors)
        half = spec.replace(num_heads=spec.num_heads // 2, num_kv_heads=spec.num_kv_heads // 2)
        halves = (
            None if each is None else each[: half.num_heads]
            for each in (self.tensors.sinks, self.tensors.alibi_slopes)
        )
        sinks, slopes = halves
        self.half = self._layer(
            half,
            LayerTensors(
                sinks=sinks, alibi_slopes=slopes, k_scale=self.tensors.k_scale, v_scale=self.tensors.v_scale
            ),
        )
        self._alone: dict[tuple[int, int, int], tuple[torch.Tensor, ...]] = {}

    def alone(self, request: int, tokens: int, new: int) -> list[torch.Tensor]:
        """Output and LSE of a request without others; where rows may come in any step, those of its whole prompt."""
        whole = self.lengths[request]
        asked = (request, whole, whole) if "rows" in self.spec.invariance else (request, tokens, new)
        if asked not in self._alone:
            self._alone[asked] = self.run([asked], random.Random(0))
        end = asked[2] - asked[1] + tokens
        return [each[end - new : end] for each in self._alone[asked]]

    def _layer(self, spec: LayerSpec, tensors: LayerTensors) -> tuple[LayerSpec, Any, Any]:
        impl = self.backend.get_impl_cls().from_spec(
            spec, backend=self.backend, layer_name="layer", tensors=tensors, options=None
        )
        impl.process_weights_after_loading(getattr(torch, spec.dtype))
        told: Any = types.SimpleNamespace(impl=impl)
        builder = self.backend.get_builder_cls()(
            kv_cache_spec_for(spec, self.page),
            ["layer"],
            BuilderConfig(layers={"layer": told}),
            torch.device(self.device),
        )
        return spec, impl, builder

    def run(
        self, step: list[tuple[int, int, int]], rng: random.Random, half: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of a step: of each request its number, its tokens, and how many of the last are new."""
        spec, impl, builder = self.half if half else self.whole
        width = max(-(-tokens // self.page) for _, tokens, _ in step) + rng.choice((0, 0, 1, 70))
        table = torch.full((len(step), width), 0, dtype=torch.int32)
        rows = []
        for place, (request, tokens, new) in enumerate(step):
            used = -(-tokens // self.page)
            table[place, :used] = self.places[request + rng.choice((0, len(self.lengths)))][:used]
            begin = int(self.starts[request])
            rows.append(self.queries[begin + tokens - new : begin + tokens])
        query = torch.cat(rows)[:, : spec.num_heads].contiguous()
        starts = torch.from_numpy(np.cumsum([0, *(new for _, _, new in step)]).astype(np.int32))
        lens = np.asarray([tokens for _, tokens, _ in step], dtype=np.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(lens.copy()).to(self.device),
            num_reqs=len(step),
            num_actual_tokens=len(query),
            max_query_len=max(new for _, _, new in step),
            max_seq_len=int(lens.max()),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.full((len(query),), -1, dtype=torch.int64, device=self.device),
            seq_lens_host=lens,
        )
        output = torch.full(
            (*query.shape[:2], spec.head_size_v), torch.nan, dtype=query.dtype, device=self.device
        )
        lse = torch.full(query.shape[:2], torch.nan, device=self.device)
        cache = self.cache
        if half:
            cache = self.half_cache
        keys = None, None
        if all(tokens == new for _, tokens, new in step) and rng.random() < 0.5:
            # Whole prompts may be attended from the keys of the call, which are those of the pages.
            pages = self.backend.split_kv(cache, spec)
            if pages[0].dtype == query.dtype:
                keys = tuple(self._rows(each, step) for each in pages)
        impl.attend(None, query, *keys, cache, builder.build(0, common), output, output_lse=lse)
        return output, lse

    def _rows(self, pages: torch.Tensor, step: list[tuple[int, int, int]]) -> torch.Tensor:
        """The tokens of each request in `pages [blocks, tokens, heads, size]`, one after another."""
        each = [
            pages[self.places[request].long().to(self.device)].flatten(0, 1)[:tokens]
            for request, tokens, _ in step
        ]
        return torch.cat(each).contiguous()

    @property
    def half_cache(self) -> torch.Tensor:
        if not hasattr(self, "_half"):
            spec = self.spec
            k, v = self.backend.split_kv(self.cache, spec)
            half = self.half[0]
            blocks = self.cache.shape[0]
            self._half = torch.zeros(self._shape(half, blocks), dtype=self.cache.dtype, device=self.device)
            own_k, own_v = self.backend.split_kv(self._half, half)
            own_k.copy_(k[:, :, : half.num_kv_heads])
            own_v.copy_(v[:, :, : half.num_kv_heads])
        return self._half

    def _shape(self, spec: LayerSpec, blocks: int) -> tuple[int, ...]:
        sizes = spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v
        return self.backend.get_kv_cache_shape(blocks, self.page, *sizes)


def _random_step(rng: random.Random, lengths: tuple[int, ...]) -> list[tuple[int, int, int]]:
    kind = rng.choice(("decodes", "drafts", "mixed", "mixed", "parts", "prompts"))
    step, budget = [], 4000
    for _ in range(rng.choice((1, 2, 3, 8, 20, 48))):
        request = rng.randrange(len(lengths))
        tokens = rng.choice((lengths[request], rng.randint(1, lengths[request])))
        most = {"decodes": 1, "drafts": 9, "mixed": rng.choice((1, 1, 5, 40)), "parts": 700}.get(kind)
        new = tokens if most is None else min(rng.randint(1, most), tokens, max(budget, 1))
        if most is None and new > max(budget, tokens if not step else 0):
            break
        budget -= new
        step.append((request, tokens, new))
    return step


def compare_bits(
    name: str, where: tuple[str, str], words: tuple[str, ...], count: int, seed: int, end: float
) -> dict[str, Any]:
    """How many of `count` random steps have a row with other bits than its request alone."""
    rng, requests = random.Random(seed), _Requests(where, _KINDS[name], words, seed)
    differ, done, rows, first = 0, 0, 0, None
    heads = requests.half[0].num_heads
    while done < count and time.monotonic() < end:
        step, half = _random_step(rng, requests.lengths), "heads" in words and done % 4 == 3
        found = requests.run(step, rng, half)
        expected = [torch.cat(parts) for parts in zip(*(requests.alone(*each) for each in step), strict=True)]
        if half:
            expected = [each[:, :heads] for each in expected]
        equal = torch.stack(
            [
                (one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)).all()
                for one, other in zip(found, expected, strict=True)
            ]
        )
        if not bool(equal.all()):
            differ += 1
            first = first or {"step": step, "half": half, "equal": equal.tolist()}
        done += 1
        rows += len(found[0])
    print(f"{name:20}{'+'.join(words)} {done} steps, {rows} rows, {differ} differ  {first or ''}", flush=True)
    return {
        "kind": name,
        "words": words,
        "steps": done,
        "rows": rows,
        "steps_that_differ": differ,
        "first": first,
        "seed": seed,
    }


if __name__ == "__main__":
    sys.exit(main())
