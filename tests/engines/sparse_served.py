"""Layers of latent attention as vLLM makes and calls them, for the cases in sparse_layers_for_vllm.py.

An indexer of the tests fills the buffers, because vLLM's runs on GPUs only.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import vllm_harness
from latent_cases_for_vllm import NoPrefill
from tests.v1.attention.utils import create_vllm_config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.selector import _cached_get_attn_backend

HEADS, RANK, ROPE, NOPE, VALUE = 4, 32, 16, 24, 40
TOPK, BLOCK, PAGES, TABLE = 8, 16, 64, 6
SCALE, _TOKENS = 0.2, 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def configuration(name: Any, **parallel: int) -> VllmConfig:
    """vLLM's configuration of a small model of DeepSeek V3.2's kind, with `--attention-backend name`."""
    sizes = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    config = create_vllm_config(
        vllm_harness.folder("deepseek-ai/DeepSeek-R1"),
        dtype=torch.float32,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=_TOKENS,
        hf_config_override={**sizes, "num_attention_heads": HEADS, "index_topk": TOPK},
    )
    config.attention_config.backend = name
    # On a CPU vLLM raises it, before models make their buffers.
    config.scheduler_config.max_num_batched_tokens = _TOKENS
    # Small, so that requests have several; nobody asks for this size, because vLLM's indexer reads 64.
    config.cache_config.user_specified_block_size = False
    for field, value in parallel.items():
        setattr(config.parallel_config, field, value)
    return config


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's choice of a backend by name as on NVIDIA's GPUs, where the class itself is asked."""

    def chosen(cls: Any, backend: Any, attn_selector_config: Any, **rest: Any) -> str:
        reasons = backend.get_class().validate_configuration(
            **attn_selector_config._asdict(), device_capability=None
        )
        if reasons:
            raise ValueError(f"Selected backend {backend} is not valid. Reason: {reasons}")
        return str(backend.get_path())

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", classmethod(chosen))
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda config: NoPrefill)
    _cached_get_attn_backend.cache_clear()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(DEVICE)
        yield
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def make_layer(
    config: VllmConfig, prefix: str, buffer: torch.Tensor | None, *, has_indexer: bool = True, **more: Any
) -> Any:
    """vLLM's layer, with weights, and pages that no request has written."""
    with set_current_vllm_config(config):
        projection = ColumnParallelLinear(RANK, HEADS * (NOPE + VALUE), bias=False)
        projection.weight.data.normal_(std=0.3)
        indexer = types.SimpleNamespace(topk_indices_buffer=buffer) if has_indexer else None
        layer = mla_attention.MLAAttention(
            *(HEADS, SCALE, NOPE, ROPE, VALUE, None, RANK, projection),
            cache_config=config.cache_config,
            prefix=prefix,
            **{"use_sparse": True, "indexer": indexer, "topk_indices_buffer": buffer, **more},
        )
        layer.process_weights_after_loading(torch.float32)
    layer.kv_cache = torch.full((PAGES, BLOCK, RANK + ROPE), torch.nan)
    layer.filled = buffer
    return layer


class Served:
    """Layers of one model in vLLM, with requests that grow, and their latents in float64."""

    def __init__(self, config: VllmConfig, layers: dict[str, Any]) -> None:
        self.config, self.layers = config, layers
        first = next(iter(layers.values()))
        with set_current_vllm_config(config):
            spec = first.get_kv_cache_spec(config)
            self.builder = first.attn_backend.get_builder_cls()(spec, [*layers], config, DEVICE)
        # No page is behind that of the page before it.
        self.pages = (torch.randperm(PAGES - 1) + 1).tolist()
        self.tables: dict[int, list[int]] = {}
        self.latents: dict[tuple[str, int], torch.Tensor] = {}

    def step(
        self,
        new: Sequence[tuple[int, int]],
        pick: Callable[[int], list[int]],
        *,
        beyond: int = 0,
        padding: int = 0,
        how: str = "build",
    ) -> list[float]:
        """Run a step of (request, new tokens), and give each layer's worst error from the oracle's output.

        The host's lengths are upper bounds by `beyond`, and `padding` rows follow that are no query. `how` is the
        builder's method.
        """
        counts = [count for _, count in new]
        tokens, starts = sum(counts), torch.tensor([0, *counts]).cumsum(0).int()
        name = next(iter(self.layers))
        before = [self._length(name, request) for request, _ in new]
        lens = torch.tensor([b + c for b, c in zip(before, counts, strict=True)]).int()
        positions = [b + j for b, count in zip(before, counts, strict=True) for j in range(count)]
        table = torch.zeros(len(new), TABLE).int()
        for row, ((request, _), length) in enumerate(zip(new, lens.tolist(), strict=True)):
            own = self.tables.setdefault(request, [])
            own += [self.pages.pop() for _ in range(-(-length // BLOCK) - len(own))]
            table[row, : len(own)] = torch.tensor(own).int()
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        places = zip(rows, positions, strict=True)
        written = [int(table[row, at // BLOCK]) * BLOCK + at % BLOCK for row, at in places]
        slots = torch.tensor(written + [-1] * padding)
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.cpu(),
            seq_lens=lens,
            num_reqs=len(new),
            num_actual_tokens=tokens + padding,
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            seq_lens_cpu_upper_bound=lens.cpu() + beyond,
            causal=True,
        )
        self.metadata = getattr(self.builder, how)(*((0, common) if how == "build" else (common,)))
        given = {"attn_metadata": dict.fromkeys(self.layers, self.metadata), "vllm_config": self.config}
        errors = []
        with set_forward_context(**given, slot_mapping=dict.fromkeys(self.layers, slots)):
            for name, layer in self.layers.items():
                self._pick(layer, positions, pick)
                q = torch.randn(tokens + padding, HEADS, NOPE + ROPE)
                latent = torch.randn(tokens + padding, RANK + ROPE)
                for row, (request, count) in enumerate(new):
                    own = latent[int(starts[row]) : int(starts[row]) + count].double()
                    seen = self.latents.get((name, request), own[:0])
                    self.latents[name, request] = torch.cat((seen, own))
                right = self._oracle(layer, name, q, [new[row][0] for row in rows], positions)
                shape = (tokens + padding, HEADS * VALUE)
                found = layer(q, latent[:, :RANK], latent[:, None, RANK:], output_shape=shape)
                errors.append(float((found[:tokens].double() - right).abs().max()))
                assert not found[tokens:].any()
        return errors

    def _length(self, name: str, request: int) -> int:
        return self.latents[name, request].shape[0] if (name, request) in self.latents else 0

    @staticmethod
    def _pick(layer: Any, positions: list[int], pick: Callable[[int], list[int]]) -> None:
        """What vLLM's indexer does: -1 everywhere, then positions in the request. A layer without one writes nothing."""
        if layer.indexer is None:
            return
        buffer = layer.indexer.topk_indices_buffer
        buffer[:] = -1
        for row, position in enumerate(positions):
            chosen = torch.tensor(pick(position)).int()
            buffer[row, : len(chosen)] = chosen

    def _oracle(
        self, layer: Any, name: str, q: torch.Tensor, requests: list[int], positions: list[int]
    ) -> torch.Tensor:
        """Each query over its keys, expanded for each head, in float64."""
        weights = layer.kv_b_proj.weight.double().view(HEADS, NOPE + VALUE, RANK)
        buffer = layer.filled if layer.indexer is None else layer.indexer.topk_indices_buffer
        rows = []
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            keys = list(range(position + 1))
            if buffer is not None:
                keys = sorted({key for key in buffer[row].tolist() if 0 <= key <= position})
            latent = self.latents[name, request][keys]
            heads = torch.einsum("hnl,sl->hsn", weights, latent[:, :RANK])
            key = torch.cat((heads[..., :NOPE], latent[None, :, RANK:].expand(HEADS, -1, -1)), dim=-1)
            scores = torch.einsum("hn,hsn->hs", q[row].double(), key) * SCALE
            rows.append(torch.einsum("hs,hsv->hv", scores.softmax(-1), heads[..., NOPE:]).flatten())
        return torch.stack(rows)


def picks(position: int) -> list[int]:
    """Up to TOPK of the positions that a query sees, in any order."""
    return torch.randperm(position + 1)[:TOPK].tolist()


def picks_with_gaps(position: int) -> list[int]:
    """As `picks` of fewer, with -1 between them."""
    chosen = [-1] * TOPK
    places = torch.randperm(TOPK).tolist()
    for place, key in zip(places, picks(position)[:5], strict=False):
        chosen[place] = key
    return chosen


STEPS: list[list[tuple[int, int]]] = [
    [(0, 20)],  # a prompt, whose first queries see fewer keys than they may choose
    [(0, 1), (1, 3), (2, 41)],  # a decode and prompts
    [(1, 1), (0, 1), (2, 1)],  # decodes, in another order
    [(2, 1), (1, 17), (3, 1), (0, 4)],  # mixed: decodes, extends and a prompt of one token
    [(3, 2), (0, 2), (1, 2), (2, 2)],  # as with drafts
]


def buffer() -> torch.Tensor:
    return torch.full((_TOKENS, TOPK), -1, dtype=torch.int32)


def served(name: Any, *, before: Callable[[Any], None] = lambda layer: None) -> Served:
    """Three layers: the second takes the keys that were picked for the first, and the third has others."""
    config, shared = configuration(name), buffer()
    layers = {
        "first": make_layer(config, "first", shared),
        "without": make_layer(config, "without", shared, has_indexer=False),
        "last": make_layer(config, "last", buffer()),
    }
    for layer in layers.values():
        before(layer)
    return Served(config, layers)
