"""The parts of SGLang's interface that the client reads, small: pools, layers, batches and runners. SGLang is not needed.

`kit_cases_for_sglang.py` runs the client on SGLang's own.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ForwardMode = enum.Enum(
    "ForwardMode",
    "EXTEND DECODE MIXED IDLE TARGET_VERIFY DRAFT_EXTEND_V2 PREBUILT SPLIT_PREFILL DLLM_EXTEND",
)


class Mode:
    """One of SGLang's modes, with the questions that the client asks."""

    def __init__(self, name: str) -> None:
        self.name = ForwardMode[name].name

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_idle(self) -> bool:
        return self.name == "IDLE"

    def is_target_verify(self) -> bool:
        return self.name == "TARGET_VERIFY"

    def is_draft_extend_v2(self) -> bool:
        return self.name == "DRAFT_EXTEND_V2"


class RadixAttention(torch.nn.Module):
    """A layer of 4 over 2 heads of 16 elements; `changes` are its attributes."""

    def __init__(self, layer_id: int = 0, **changes: Any) -> None:
        super().__init__()
        fields: dict[str, Any] = {
            "tp_q_head_num": 4,
            "tp_k_head_num": 2,
            "tp_v_head_num": 2,
            "head_dim": 16,
            "qk_head_dim": 16,
            "v_head_dim": 16,
            "scaling": 0.3,
            "layer_id": layer_id,
            "logit_cap": 0.0,
            "sliding_window_size": -1,
            "is_cross_attention": False,
            "use_irope": False,
            "use_prefill_attention_wrapper": True,
            **dict.fromkeys(("k_scale", "v_scale", "k_scale_float", "v_scale_float", "q_scale_float")),
            "quant_method": None,
            "attn_type": "decoder",
            "pos_encoding_mode": "NONE",
            "logit_capping_method": "tanh",
            "xai_temperature_len": -1,
        }
        vars(self).update(fields | changes)


class MHATokenToKVPool:
    """K and V of layers as two parts of one allocation each, as SGLang's pool of that name."""

    is_quantized_kv_cache = False
    post_capture_active = False

    def __init__(
        self,
        size: int,
        page_size: int,
        layers: int = 1,
        *,
        dtype: torch.dtype = torch.float32,
        layout: str = "nhd",
    ) -> None:
        self.dtype, self.page_size, self.kv_cache_layout = dtype, page_size, layout
        pages = size // page_size + 1
        shape = (pages * page_size, 2, 16) if layout == "nhd" else (pages, 2, page_size, 16)
        store = torch.uint8 if dtype.itemsize == 1 else dtype
        self.buffers = [torch.zeros(2, *shape, dtype=store) for _ in range(layers)]
        self.asked: list[int] = []

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(layer_id)
        pair = self.buffers[layer_id]
        return pair[0].view(self.dtype), pair[1].view(self.dtype)


class SWAKVPool:
    """Two pools; tokens of layers with windows have slots of their own."""

    def __init__(self, full: MHATokenToKVPool, windows: MHATokenToKVPool, mapping: torch.Tensor) -> None:
        self.full_kv_pool, self.swa_kv_pool, self.mapping = full, windows, mapping
        self.layers_mapping = {0: (0, False), 1: (0, True)}

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        inner, windowed = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if windowed else self.full_kv_pool).get_kv_buffer(inner)

    def translate_loc_from_full_to_swa(self, slots: torch.Tensor) -> torch.Tensor:
        return self.mapping[slots]


def runner(
    pool: Any, *layers: RadixAttention, requests: int = 4, longest: int = 64, **changes: Any
) -> SimpleNamespace:
    """A runner in float32 whose requests have no slots yet; `changes` are its attributes, or those of its arguments."""
    page = getattr(pool, "page_size", None) or pool.full_kv_pool.page_size
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(layers)
    fields: dict[str, Any] = {
        "device": "cpu",
        "dtype": torch.float32,
        "page_size": page,
        "token_to_kv_pool": pool,
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.zeros(requests, longest, dtype=torch.int32)),
        "model": model,
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "server_args": SimpleNamespace(speculative_num_draft_tokens=None),
        "use_mla_backend": False,
        "attention_chunk_size": None,
        "kv_index_translator": SimpleNamespace(is_translating=False),
    }
    for name, value in changes.items():
        if name in fields:
            fields[name] = value
        else:
            setattr(fields["server_args"], name, value)
    return SimpleNamespace(**fields)


def batch(mode: str, run: Any, prefixes: list[int], extends: list[int], **changes: Any) -> SimpleNamespace:
    """A batch of the runner's first requests, whose rows have their slots already."""
    reqs = len(prefixes)
    totals = torch.tensor(prefixes) + torch.tensor(extends)
    rows = run.req_to_token_pool.req_to_token
    starts = changes.get("encoder_lens")
    starts = [0] * reqs if starts is None else starts.tolist()
    slots = [
        rows[i, s + p : s + p + n] for i, (s, p, n) in enumerate(zip(starts, prefixes, extends, strict=True))
    ]
    lens = torch.tensor(prefixes) if mode == "TARGET_VERIFY" else totals
    fields: dict[str, Any] = {
        "forward_mode": Mode(mode),
        "batch_size": reqs,
        "req_pool_indices": torch.arange(reqs),
        "seq_lens": lens,
        "seq_lens_cpu": lens.clone(),
        "out_cache_loc": torch.cat(slots).long(),
        "encoder_lens": None,
        "encoder_out_cache_loc": None,
        "spec_info": None,
        "mm_inputs": None,
        "kv_loc_plan": object(),
    }
    if mode not in ("DECODE", "TARGET_VERIFY"):
        fields |= {"extend_seq_lens_cpu": extends, "extend_prefix_lens_cpu": prefixes}
    return SimpleNamespace(**fields | changes)


def take_slots(run: Any, lens: list[int], seed: int = 0) -> None:
    """Give each request its pages, in random order; page 0 is padding, and entries behind a request are leftovers."""
    rows, page = run.req_to_token_pool.req_to_token, run.page_size
    needed = [-(-each // page) for each in lens]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed)) + 1
    rows.fill_(3)
    for i, pages in enumerate(order.split(needed)):
        slots = (pages[:, None] * page + torch.arange(page)).flatten()[: lens[i]]
        rows[i, : lens[i]] = slots.int()


@pytest.fixture
def fake_sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`attnplug.integrations.sglang.backend` over these classes."""

    class AttentionBackend:
        pass

    found = {
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.layers.radix_attention": {"RadixAttention": RadixAttention},
    }
    for path, names in found.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules or end == len(parts):
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[path]).update(names)
    ours = [f"attnplug.integrations.sglang.{name}" for name in ("backend", "drafts")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in ours:
        sys.modules.pop(name, None)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float = 0.3,
    causal: bool = True,
    before: int = -1,
    after: int = -1,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """`[T, H, D]` of one request by the formula; `before` and `after` count keys beside the query's own."""
    rows, keys = query.shape[0], key.shape[0]
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query, key) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    at, of = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)[None]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        seen &= of <= at
    if before >= 0:
        seen &= of >= at - before
    if after >= 0:
        seen &= of <= at + after
    if chunk:
        seen &= of >= at // chunk * chunk
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks[:, None, None].expand(-1, rows, 1)), dim=-1)
    weights = logits.softmax(-1)[..., :keys]
    return torch.einsum("hqk,khd->qhd", weights, value)
