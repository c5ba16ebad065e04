"""Prefills of latent attention for benchmarks/mla.py: expanded, beside their kernel and products; and in chunks of context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from mla_latents import DIMS, TOLERANCE, Cell, common_of, parts_of, table_of
from paged_layers import interleaved_us

import attnplug
from attnplug.backends.triton.backend import TritonBackend
from attnplug.core import AttentionBackend, CommonAttentionMetadata, Phase

__all__ = ["CHUNKED", "PREFILLS", "Prompts", "measured_chunks", "measured_prefills"]


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Requests of `new` tokens each, after `context` computed ones."""

    requests: int
    new: int
    heads: int
    context: int = 0
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        after = f" after {self.context}" if self.context else ""
        return f"{self.requests} x {self.new}{after}, {self.heads} heads"


PREFILLS = [
    *(Prompts(4, 4096, heads) for heads in (128, 16)),
    *(Prompts(1, 8192, heads) for heads in (16, 64, 128)),
]
CHUNKED = [Prompts(4, 1024, 128, 8192)]
ROWS = {"chunks of 4096 rows": 4096, "chunks of 16384 rows": 16384, "one pass": None}


class Prompt:
    """The tensors of a cell, in pages; the last tokens of each request are new."""

    def __init__(self, cell: Prompts, device: str) -> None:
        torch.manual_seed(0)
        self.cell, self.device = cell, torch.device(device)
        self.spec = Cell(cell.requests, cell.new, cell.heads, stored=cell.dtype, dtype=cell.dtype).spec
        dtype, page, rank = getattr(torch, cell.dtype), self.spec.block_size, DIMS.kv_lora_rank
        lengths = [cell.context + cell.new] * cell.requests
        self.table, blocks = table_of(lengths, page, self.device)
        self.cache = torch.randn(blocks, page, DIMS.latent_size, device=device, dtype=dtype)
        tokens = cell.requests * cell.new
        self.query = torch.randn(tokens, cell.heads, DIMS.query_size, device=device, dtype=dtype)
        out = DIMS.qk_nope_head_dim + DIMS.v_head_dim
        # So that keys and values are about as large as their latents.
        self.weight = torch.randn(cell.heads * out, rank, device=device, dtype=dtype) * rank**-0.5
        places = torch.arange(cell.context, cell.context + cell.new, device=device)
        slots = self.table[:, places // page].long() * page + places % page
        self.key = self.cache.flatten(0, 1)[slots.flatten()][:, None]
        self.output = torch.empty(tokens, cell.heads, DIMS.v_head_dim, device=device, dtype=dtype)
        self.common: CommonAttentionMetadata = common_of([cell.new] * cell.requests, lengths, self.table)

    def run(self, decode: Any, prefill: type[AttentionBackend], **config: Any) -> tuple[Any, Any]:
        """The impl and the metadata of the prompts."""
        backend = decode.for_layer(self.spec).with_prefill(prefill.for_layer(self.spec.expanded()))
        impl, builder = parts_of(backend, self.spec, self.device, self.weight, **config)
        builder.get_workspace_buffer()
        return impl, builder.build(0, self.common)

    def error(self, output: torch.Tensor) -> float:
        """The relative error of the last 8 queries of the last request, of 4 heads, against float32."""
        cell, nope, rank = self.cell, DIMS.qk_nope_head_dim, DIMS.kv_lora_rank
        rows = self.cache[self.table[-1].long()].flatten(0, 1)[: cell.context + cell.new].float()
        count, heads = min(8, cell.new), sorted({0, 1, cell.heads // 2, cell.heads - 1})
        weight = self.weight.view(cell.heads, -1, rank)[heads].float()
        both = torch.einsum("sl,hol->sho", rows[:, :rank], weight)
        keys = torch.cat((both[..., :nope], rows[:, None, rank:].expand(-1, len(heads), -1)), 2)
        logits = torch.einsum("qhd,shd->hqs", self.query[-count:, heads].float(), keys) * self.spec.scale
        places = torch.arange(len(rows), device=self.device)
        logits.masked_fill_(places > places[-count:, None], -torch.inf)
        expected = torch.einsum("hqs,shd->qhd", logits.softmax(2), both[..., nope:])
        return float((output[-count:, heads].float() - expected).norm() / expected.norm())


def prefill_backends(prompt: Prompt, names: Sequence[str] = ()) -> dict[str, type[AttentionBackend]]:
    """The backends that prefill here: the chosen one first, then those of `names` that serve the expanded layer."""
    decision = attnplug.explain(prompt.spec.expanded(), prompt.device.type, Phase.PREFILL)
    accepted = {each.name for each in decision.candidates} - {each.name for each in decision.refused}
    found = [decision.backend, *names]
    return {name: attnplug.list_backends()[name] for name in found if name is not None and name in accepted}


def measured_prefills(
    cells: Sequence[Prompts], device: str = "cuda", decode: Any = TritonBackend
) -> Iterator[dict[str, Any]]:
    """Each cell: the whole prefill, the same kernel alone, and the product with the weight alone.

    The expansion as the prefill does it, with the keys' rope part, is shown beside the product.
    """
    for cell in cells:
        prompt = Prompt(cell, device)
        calls: dict[str, Callable[[int], object]] = {"product": _product(prompt)}
        errors: dict[str, float] = {}
        refused: dict[str, str] = {}
        backends = prefill_backends(prompt, ["TRITON"])
        for name, prefill in backends.items():
            try:
                impl, metadata = prompt.run(decode, prefill)
                whole = _whole(prompt, impl, metadata)
                whole(0)
                errors[name] = prompt.error(prompt.output)
            except Exception as problem:  # noqa: BLE001 - a library that cannot run here
                refused[name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
                continue
            if errors[name] < TOLERANCE:
                calls[name] = whole
                calls[f"{name}, kernel alone"] = _kernel(prompt, impl, metadata)
                calls["expansion"] = _expansion(prompt, impl)
            else:
                refused[name] = f"wrong: {errors[name]:.2g}"
        times = interleaved_us(calls, 2, graphs=False) if device == "cuda" else {}
        chosen = next(iter(backends), None)
        print(f"{cell.name}, expanded; chosen: {chosen}")
        for name, us in times.items():
            print(f"    {name:28}{us:10.1f} us")
        for name, error in errors.items():
            text = f"relative error {error:.1e}"
            if name in times:
                parts = times[f"{name}, kernel alone"] + times["product"]
                text += f", {times[name] / parts:.3f} of kernel and product"
            print(f"    {name}: {text}", flush=True)
        for name, why in refused.items():
            print(f"    {name}: {why}")
        row = {**dataclasses.asdict(cell), "cell": cell.name, "chosen": chosen}
        yield {**row, "us": times, "relative_errors": errors, "errors": refused}


def measured_chunks(
    cells: Sequence[Prompts], device: str = "cuda", decode: Any = TritonBackend, rows: Any = None
) -> Iterator[dict[str, Any]]:
    """Each cell with the context in chunks of some rows: how far its output is from that of one pass, and its time."""
    for cell in cells:
        prompt = Prompt(cell, device)
        name, prefill = next(iter(prefill_backends(prompt).items()))
        calls: dict[str, Callable[[int], object]] = {}
        outputs, chunks = {}, {}
        for title, count in (rows or ROWS).items():
            impl, metadata = prompt.run(
                decode, prefill, context_chunk_rows=count or cell.requests * cell.context
            )
            calls[title] = _whole(prompt, impl, metadata)
            calls[title](0)
            outputs[title], chunks[title] = prompt.output.clone(), len(metadata.prefill.chunks)
        errors = {title: prompt.error(output) for title, output in outputs.items()}
        one = outputs["one pass"].float()
        distances = {
            title: float((each.float() - one).norm() / one.norm()) for title, each in outputs.items()
        }
        times = interleaved_us(calls, 1, graphs=False) if device == "cuda" else {}
        print(f"{cell.name}; prefill by {name}")
        for title, error in errors.items():
            spent = f"{times[title]:10.1f} us   " if title in times else ""
            print(f"    {title:22}{chunks[title]:3} chunks {spent}relative error {error:.1e}, "
                  f"from one pass {distances[title]:.1e}", flush=True)  # fmt: skip
        row = {**dataclasses.asdict(cell), "cell": cell.name, "prefill": name, "chunks": chunks}
        yield {**row, "us": times, "relative_errors": errors, "from_one_pass": distances}


def _whole(prompt: Prompt, impl: Any, metadata: Any) -> Callable[[int], object]:
    """The prefill of an impl, without the write to the pages."""
    given = prompt.query, prompt.key, None, prompt.cache, metadata, prompt.output
    return lambda index: impl.attend(None, *given)


def _kernel(prompt: Prompt, impl: Any, metadata: Any) -> Callable[[int], object]:
    """The prefill half alone, on keys and values that are expanded before."""
    nope, rank = DIMS.qk_nope_head_dim, DIMS.kv_lora_rank
    latent = prompt.key[:, 0]
    both = (latent[:, :rank] @ prompt.weight.T).view(len(latent), prompt.cell.heads, -1)
    key = torch.cat((both[..., :nope], prompt.key[..., rank:].expand(-1, prompt.cell.heads, -1)), 2)
    value = both[..., nope:].contiguous()
    given = prompt.query, key, value, None, metadata.prefill.new, torch.empty_like(prompt.output)
    return lambda index: impl.prefill_impl.attend(None, *given)


def _expansion(prompt: Prompt, impl: Any) -> Callable[[int], object]:
    """The keys and values of the prompts' latents."""
    rank, heads = DIMS.kv_lora_rank, prompt.cell.heads
    parts = prompt.key[:, 0, :rank], prompt.key[:, 0, rank:]
    key, value = (
        prompt.key.new_empty(len(prompt.key), heads, size) for size in (DIMS.query_size, DIMS.v_head_dim)
    )
    # A private method, because no caller needs it alone.
    return lambda index: impl._expand(*parts, key, value)


def _product(prompt: Prompt) -> Callable[[int], object]:
    """The latents times the whole weight, in one product."""
    latent, weight = prompt.key[:, 0, : DIMS.kv_lora_rank], prompt.weight
    output = latent.new_empty(len(latent), len(weight))
    return lambda index: torch.mm(latent, weight.T, out=output)
