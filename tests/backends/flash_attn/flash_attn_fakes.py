"""Entry points of FlashAttention 3 and 4 with their real arguments, computed on the CPU; they keep the traps."""

from __future__ import annotations

import torch
from flash_attn_math import Asked, attend, check_rows, keys_of

FA3_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, "
    "int? max_seqlen_q = None, int? max_seqlen_k = None, Tensor? page_table = None, "
    "Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, "
    "bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
"""The schema in `hopper/flash_api.cpp`."""

FA3_SCHEDULE = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? leftpad_k = None, int? page_size = None, int max_seqlen_k_new = 0, "
    "bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "int attention_chunk = 0, bool has_softcap = False, int num_splits = 0, bool? pack_gqa = None, "
    "int sm_margin = 0) -> Tensor"
)


def _fill(q, k, v, out, lse, starts_q, starts_k, used, table, asked, whole_pages=False, packed_tile=1):
    for request in range(starts_q.shape[0] - 1):
        rows = slice(int(starts_q[request]), int(starts_q[request + 1]))
        keys = keys_of(k, request, table, starts_k, used)
        values = keys_of(v, request, table, starts_k, used, whole_pages)
        if table is None:
            begin = int(starts_k[request])
            values = v[begin : begin + -(-len(keys) // packed_tile) * packed_tile]
        found, its_lse = attend(q[rows], keys, values, asked)
        out[rows] = found.to(out.dtype)
        lse[:, rows] = its_lse.float()


def _flash_attn_fwd(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    learnable_sink=None,
    tile_mn=None,
    mma_pv_is_rs=None,
    intra_wg_overlap=None,
    num_threads=384,
    num_splits=1,
    pack_gqa=None,
    _arch=None,
    score_mod=None,
    mask_mod=None,
    block_sparse_tensors=None,
    return_lse=False,
    out=None,
    lse=None,
    aux_tensors=None,
    aux_scalars=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    gather_kv_indices=None,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False,
):
    """`_flash_attn_fwd` of `flash_attn/cute/interface.py` 4.0.0b36, on compute capability 9.0."""
    check_rows(q, k, v, out)
    batch = cu_seqlens_q.shape[0] - 1
    assert num_splits == 1, "SplitKV not supported on SM 9.0"
    assert 8 <= q.shape[2] <= 256
    assert q.shape[2] % 8 == 0
    for each in (out, q):
        assert each.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in each.stride()[:-1])
    if page_table is not None:
        assert cu_seqlens_k is None
        assert page_table.dtype == torch.int32
        assert page_table.stride(-1) == 1
        assert page_table.shape[0] == batch
        assert seqused_k.shape == (batch,)
        assert max_seqlen_k == page_table.shape[1] * k.shape[1]
    if window_size_left is not None and window_size_right is not None:
        assert window_size_left >= 0 or window_size_right >= 0
    if learnable_sink is not None:
        assert learnable_sink.shape == (q.shape[1],)
    if lse is not None:
        assert lse.shape == (q.shape[1], q.shape[0])
    left = -1 if window_size_left is None else window_size_left
    right = -1 if window_size_right is None else window_size_right
    if causal:
        right = 0
    local = left >= 0 or right > 0 or (right == 0 and left >= 0)
    asked = Asked(
        softmax_scale,
        causal,
        left,
        right,
        softcap or 0.0,
        sinks=learnable_sink,
        empty_lse=-torch.inf,
    )
    by_tma = page_table is not None and k.shape[1] == key_tile(q.shape[2], v.shape[-1], right == 0, local)
    written = torch.empty(q.shape[1], q.shape[0]) if lse is None else lse
    _fill(q, k, v, out, written, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, asked, by_tma)
    return out, lse, None, None, None


def key_tile(size: int, size_v: int, causal: bool, local: bool) -> int:
    """Keys per tile, `_tile_size_fwd_sm90` of the same file."""
    if size <= 64:
        return 128
    if size <= 96:
        return 128 if causal or local else 144
    if size <= 128:
        return 128
    if size <= 192:
        return 96 if local else (128 if size_v <= 128 else 112)
    return 64 if local else 80


SCHEDULES: list[dict[str, object]] = []
"""What `schedule` was asked for."""


def fwd(*, q, k, v, out, cu_seqlens_q, softmax_scale, **given):
    """`flash_attn_3::fwd`, whose other arguments have defaults."""
    check_rows(q, k, v, out)
    table, used = given.get("page_table"), given.get("seqused_k")
    if table is None:
        assert given["cu_seqlens_k"] is not None
        assert given["max_seqlen_k"] >= int(given["cu_seqlens_k"].diff().max())
    else:
        assert used.shape == (cu_seqlens_q.shape[0] - 1,)
        assert table.stride(-1) == 1
        assert k.shape[1] in (1, 16, 32, 64)
    left, right = given["window_size_left"], given["window_size_right"]
    lse = torch.empty(q.shape[1], q.shape[0])
    asked = Asked(softmax_scale, given["is_causal"], left, right, given["softcap"])
    tile = key_tile(q.shape[2], v.shape[-1], asked.causal, left >= 0 or right >= 0)
    starts = given.get("cu_seqlens_k")
    # Seen on an H200: packed values are loaded in whole tiles, of whichever request they are.
    _fill(q, k, v, out, lse, cu_seqlens_q, starts, used, table, asked, packed_tile=tile)
    return out, lse, torch.empty(0), torch.empty(0)


def schedule(**given):
    """`flash_attn_3::get_scheduler_metadata`."""
    SCHEDULES.append(given)
    return torch.zeros(1 + 3 * given["batch_size"], dtype=torch.int32)
