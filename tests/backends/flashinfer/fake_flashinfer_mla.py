"""FlashInfer's wrapper for latent attention in torch, with the signatures and the plan of 0.6.13.

It attends by exactly the work list that its plan sent, and what the real kernel leaves undefined is an error here.
"""

from __future__ import annotations

import math
from collections import deque

import torch
from torch.nn.functional import pad

_INTS = 1 << 18
_COUNT = 8
"""The first numbers of a work list: requests, and what the plan fixes."""


class BatchMLAPagedAttentionWrapper:
    """Plans and runs on the CPU."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend in ("fa2", "fa3"), "auto may choose another library"
        assert float_workspace_buffer.dtype == torch.uint8
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(_INTS, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(_INTS, dtype=torch.uint8)
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self.plans: deque[dict[str, object]] = deque(maxlen=16)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        for array in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert array.dtype == torch.int32
        for array in (qo_indptr, kv_indptr, kv_len_arr):
            assert array.device.type == "cpu", "the host would wait"
        assert q_data_type == kv_data_type
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        assert not use_profiler
        queries, count = qo_indptr.diff(), len(kv_len_arr)
        assert count >= 1, "an empty batch divides by zero"
        assert bool((queries >= 1).all())
        assert bool((kv_len_arr >= queries).all()), "a query that sees nothing is undefined"
        # A request may have more places for pages than it has pages.
        assert bool((kv_indptr.diff() >= -(-kv_len_arr // page_size)).all())
        assert len(kv_indices) >= int(kv_indptr[-1])
        assert kv_indices.is_contiguous()
        assert int(kv_indptr[-1]) * page_size < 1 << 31, "the kernel counts tokens in 32 bits"
        assert causal or int(queries.max()) == 1
        # The planner ends a causal tile at the key after the real end, the kernel at the one before it.
        tile = 128 if int(qo_indptr[-1]) * num_heads // count > 64 else 64
        assert not causal or tile % num_heads == 0, "FlashInfer may omit a visible key"
        assert int((-(-queries * num_heads // 64)).sum()) <= 16384
        if self._use_cuda_graph:
            assert len(kv_len_arr) == len(self._kv_len_arr_buf), "the batch size is fixed"
            assert len(kv_indices) <= len(self._kv_indices_buf), "more pages than at capture"
            self._qo_indptr_buf.copy_(qo_indptr)
            self._kv_indptr_buf.copy_(kv_indptr)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices.clone())
            self._kv_len_arr_buf.copy_(kv_len_arr)
        else:
            self._kv_indices_buf = kv_indices
        self._causal, self._page_size, self._sm_scale = causal, page_size, sm_scale
        # The kernel reads starts and lengths from the work list alone.
        head = torch.tensor([count, num_heads, page_size, int(causal), 0, 0, 0, 0], dtype=torch.int32)
        raw = torch.cat([head, qo_indptr, kv_indptr, kv_len_arr]).view(torch.uint8)
        self._pin_memory_int_workspace_buffer[: len(raw)] = raw
        self._int_workspace_buffer[: len(raw)].copy_(self._pin_memory_int_workspace_buffer[: len(raw)])
        self._planned_dtype = q_data_type
        names = {"causal": causal, "num_heads": num_heads, "page_size": page_size, "requests": count}
        self.plans.append(names | {"queries": queries.tolist(), "lengths": kv_len_arr.tolist()})

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        assert profiler_buffer is kv_len is page_table is o_scale is None
        work = self._int_workspace_buffer.view(torch.int32)
        count, heads, page_size, causal = work[:4].tolist()
        sizes = (count + 1, count + 1, count)
        qo, kv, lengths = work[_COUNT : _COUNT + sum(sizes)].split(sizes)
        assert (page_size, bool(causal)) == (self._page_size, self._causal), "another plan's work list"
        assert q_nope.shape == (int(qo[-1]), heads, 512), "queries that were not planned for"
        assert q_pe.shape == (*q_nope.shape[:2], 64)
        assert ckv_cache.shape[1:] == (page_size, 512)
        assert kpe_cache.shape[1:] == (page_size, 64)
        for each in (q_nope, q_pe, ckv_cache, kpe_cache, out):
            assert each is not None
            assert each.dtype == self._planned_dtype
            assert each.stride(-1) == 1
        assert out is not None
        assert out.shape == q_nope.shape
        assert return_lse == (lse is not None)
        assert lse is None or (lse.dtype == torch.float32 and lse.is_contiguous())
        self._float_workspace_buffer[:64] = 0xFF  # scratch
        for request, length in enumerate(lengths.tolist()):
            rows = slice(int(qo[request]), int(qo[request + 1]))
            first = int(kv[request])
            pages = self._kv_indices_buf[first : first - -length // page_size].long()
            # A tile of 64 keys is masked by a finite logit, before the scale, where it has no key.
            ends = (0, 0, 0, -length % 64)
            latent = pad(ckv_cache[pages].flatten(0, 1)[:length].double(), ends)
            position = pad(kpe_cache[pages].flatten(0, 1)[:length].double(), ends)
            logits = torch.einsum("thd,sd->ths", q_nope[rows].double(), latent)
            logits += torch.einsum("thd,sd->ths", q_pe[rows].double(), position)
            new = rows.stop - rows.start
            last = torch.arange(length - new, length) if causal else torch.full((new,), length - 1)
            hidden = torch.arange(len(latent)) > last[:, None]
            logits = logits.masked_fill(hidden[:, None], -5e4) * self._sm_scale
            out[rows] = torch.einsum("ths,sd->thd", logits.softmax(2), latent).to(out.dtype)
            if lse is not None:
                base = 1.0 if return_lse_base_on_e else math.log(2)
                lse[rows] = (logits.logsumexp(2) / base).float()
        return out if lse is None else (out, lse)
