"""Layers of latent attention of vLLM on a GPU that is not there: after their first steps no step needs another kernel.

Run in a source tree as vllm_harness says; pytest collects it when it is named alone.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from attnplug.backends.triton.ahead.chips import CHIPS
from attnplug.backends.triton.ahead.pretended import pretended
from attnplug.core.device import Device
from attnplug.integrations.vllm.latent_backends import latent_class
from attnplug.mla import builder as builder_module
from attnplug.mla import chunks

HEADS, RANK, ROPE, NOPE, VALUE = 16, 512, 64, 128, 128
BLOCK, BLOCKS, TOPK = 64, 64, 2048
REQUESTS, TOKENS, LONGEST = 40, 600, 900


class Served:
    """One layer in vLLM, and requests that grow.

    Args:
        sparse: whether an indexer picks its keys.
        drafts: tokens of speculation.
        dtype: of the pages, by vLLM's name.
    """

    def __init__(self, *, sparse: bool, drafts: int, dtype: str) -> None:
        config = VllmConfig()
        config.model_config = SimpleNamespace(
            dtype=torch.bfloat16, max_model_len=LONGEST, is_mm_prefix_lm=False
        )
        scheduler = config.scheduler_config
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = REQUESTS, TOKENS
        if drafts:
            config.speculative_config = SimpleNamespace(
                num_speculative_tokens=drafts, parallel_drafting=False
            )
        cls, picked = latent_class("ATTNPLUG_TRITON_MLA"), None
        if sparse:
            # What the memory had before is no position of any request.
            picked = torch.full((TOKENS, TOPK), 1 << 30, dtype=torch.int32, device="cuda")
        sizes = {
            "kv_lora_rank": RANK,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": VALUE,
        }
        given = {**sizes, "q_lora_rank": None, "qk_head_dim": NOPE + ROPE, "kv_b_proj": None}
        with set_current_vllm_config(config):
            impl = cls.get_impl_cls()(
                *(HEADS, RANK + ROPE, 0.1), kv_cache_dtype=dtype, topk_indices_buffer=picked, **given
            )
        weights = {"W_UK_T": (HEADS, NOPE, RANK), "W_UV": (HEADS, RANK, VALUE)}
        made = {
            name: torch.zeros(*size, dtype=torch.bfloat16, device="cuda") for name, size in weights.items()
        }
        stored = torch.bfloat16 if dtype == "auto" else torch.uint8
        cache = torch.zeros(BLOCKS, BLOCK, RANK + ROPE, dtype=stored, device="cuda")
        scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0, "_k_scale": torch.ones(())}
        self.layer = SimpleNamespace(impl=impl, kv_cache=cache, **made, **scales)
        self.picked, self.cache, self.impl = picked, cache, impl
        config.compilation_config.static_forward_context = {"a": self.layer}
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=RANK + ROPE, dtype=stored)
        self.builder = cls.get_builder_cls()(spec, ["a"], config, torch.device("cuda"))

    def common(self, counts: list[int], lengths: list[int]) -> CommonAttentionMetadata:
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lens, tokens = torch.tensor(lengths).int(), sum(counts)
        return CommonAttentionMetadata(
            query_start_loc=starts.to("cuda"),
            query_start_loc_cpu=starts,
            seq_lens=lens.to("cuda"),
            num_reqs=len(counts),
            num_actual_tokens=tokens,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_table_tensor=torch.zeros(
                len(counts), -(-LONGEST // BLOCK), dtype=torch.int32, device="cuda"
            ),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device="cuda"),
            seq_lens_cpu_upper_bound=lens,
            causal=True,
        )

    def capture(self) -> None:
        self.builder.build_for_cudagraph_capture(self.common([1], [1]))

    def step(self, counts: list[int], lengths: list[int]) -> None:
        """A step of requests with so many new tokens, which then have those lengths, as vLLM's layer runs it."""
        common, tokens = self.common(counts, lengths), sum(counts)
        metadata = self.builder.build(0, common)
        draw = {"dtype": torch.bfloat16, "device": "cuda"}
        kv_c, k_pe = torch.zeros(tokens, RANK, **draw), torch.zeros(tokens, 1, ROPE, **draw)
        self.impl.do_kv_cache_update(kv_c, k_pe, self.cache, common.slot_mapping)
        if self.picked is not None:
            # vLLM absorbs by a product whose result has the heads first.
            absorbed = torch.zeros(HEADS, tokens, RANK, **draw).transpose(0, 1)
            query = absorbed, torch.zeros(tokens, HEADS, NOPE + ROPE, **draw)[..., NOPE:]
            self.impl.forward_mqa(query, self.cache, metadata, self.layer)
            return
        query = torch.zeros(tokens, HEADS, NOPE + ROPE, **draw)
        output = torch.zeros(tokens, HEADS * VALUE, **draw)
        scale = torch.ones(())
        self.impl.forward_mha(query, kv_c, k_pe, self.cache, metadata, scale, output)


def drawn_steps(drafts: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, extends, decodes, drafts and mixed steps: the new tokens of each request, and its length."""
    draw, found = random.Random(5), list[tuple[list[int], list[int]]]()
    for new in (1, 2, 3, 15, 16, 17, 64, 100, 333, TOKENS):
        found += [([new], [new]), ([new], [min(new + draw.choice((1, 16, 300)), LONGEST)])]
    for reqs in (1, 2, 7, 16, REQUESTS):
        for new in range(1, 2 + drafts):
            found.append(([new] * reqs, [draw.randint(new, LONGEST) for _ in range(reqs)]))
    for _ in range(20):
        counts, left = list[int](), TOKENS
        while left and len(counts) < draw.randint(1, REQUESTS):
            counts.append(draw.choice([each for each in (1, 1, 2, 9, 64, 130, 512) if each <= left]))
            left -= counts[-1]
        counts.sort()
        found.append((counts, [draw.randint(count, LONGEST) for count in counts]))
    return found


CASES = [("sm90", *case) for case in itertools.product(("auto", "fp8"), (0, 3))]
CASES += [("sm100", "auto", 0), ("gfx942", "fp8", 0)]


@pytest.mark.parametrize(("arch", "dtype", "drafts"), CASES)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_no_step_needs_another_kernel_after_the_first_steps(
    sparse: bool, drafts: int, dtype: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "current", lambda *index: CHIPS[arch].device)
    event = SimpleNamespace(record=lambda *given: None, synchronize=lambda: None, query=lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda **given: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: None)
    for module in (builder_module, chunks):
        # Small, so that prefills of a few hundred computed tokens have many chunks.
        monkeypatch.setattr(module, "CONTEXT_CHUNK_ROWS", 4 * BLOCK)
    with pretended(CHIPS[arch]) as found:
        made = Served(sparse=sparse, drafts=drafts, dtype=dtype)
        assert not found

        made.capture()
        warm = len(found)
        assert warm > 3
        for counts, lengths in drawn_steps(drafts):
            made.step(counts, lengths)
        assert [str(form) for form in [*found][warm:]] == []
