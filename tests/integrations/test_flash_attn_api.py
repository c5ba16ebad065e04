"""The functions of flash-attn's API against a float64 reference, over the sizes and options that its users pass."""

from __future__ import annotations

import inspect
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import attnplug
from attnplug.core.errors import BackendUnavailableError, BatchError
from attnplug.integrations.flash_attn import (
    decisions,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    one_step,
)

BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = [(1, 147), (113, 203), (128, 217), (64, 33), (1, 1), (40, 40)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (30, 9)},
    {"causal": True, "window_size": (25, 4)},
    {"causal": True, "softcap": 11.5},
    {"alibi_slopes": True},
    {"causal": True, "alibi_slopes": True, "softmax_scale": 0.2},
]


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request in float64: `q [Lq, H, D]` over `k [Lk, Hkv, D]`; outputs `[Lq, H, Dv]` and LSE `[H, Lq]`."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = options.get("softmax_scale")
    logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if cap := options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    places = torch.arange(k.shape[0]) - (torch.arange(q.shape[0]) + k.shape[0] - q.shape[0])[:, None]
    if (slopes := options.get("alibi_slopes")) is not None:
        logits = logits - slopes.double()[:, None, None] * places.abs()
    left, right = options.get("window_size", (-1, -1))
    if options.get("causal"):
        right = 0
    seen = torch.ones_like(places, dtype=torch.bool)
    if left >= 0:
        seen &= places >= -left
    if right >= 0:
        seen &= places <= right
    logits = logits.masked_fill(~seen, float("-inf"))
    weights = torch.nan_to_num(logits.softmax(-1))
    return torch.einsum("hqk,khd->qhd", weights, v), logits.logsumexp(-1)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def options_for(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return options | ({"alibi_slopes": torch.rand(heads) * 0.3} if options.get("alibi_slopes") else {})


def close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    torch.testing.assert_close(found.double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_fixed_lengths(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    options = options_for(options, 6)
    q = drawn(2, lengths[0], 6, 40)
    k, v = drawn(2, lengths[1], 2, 40), drawn(2, lengths[1], 2, 40)
    out, lse, probabilities = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert probabilities is None
    for request in range(2):
        expected, expected_lse = reference(q[request], k[request], v[request], **options)
        close(out[request], expected, 2e-5)
        close(lse[request], expected_lse, 2e-5)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_packed_requests(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    query_lens, key_lens = [5, 1, 0, 33], [7, 80, 3, 33]
    q = drawn(sum(query_lens) + 2, 8, 64, dtype=dtype)
    k, v = drawn(sum(key_lens) + 1, 2, 64, dtype=dtype), drawn(sum(key_lens) + 1, 2, 64, dtype=dtype)
    starts = [
        torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (query_lens, key_lens)
    ]
    out, lse, _ = flash_attn_varlen_func(q, k, v, *starts, 33, 80, return_attn_probs=True, **options)
    assert out.dtype == dtype
    assert lse.shape == (8, q.shape[0])
    for request in range(4):
        rows, keys = (slice(*start[request : request + 2].tolist()) for start in starts)
        expected, expected_lse = reference(q[rows], k[keys], v[keys], **options)
        close(out[rows], expected, BOUNDS[dtype])
        close(lse[:, rows], expected_lse, BOUNDS[dtype])
    assert not out[sum(query_lens) :].any()


@pytest.mark.parametrize("one_allocation", [True, False])
def test_packed_queries_over_pages(one_allocation: bool) -> None:
    torch.manual_seed(2)
    query_lens, key_lens = [4, 9], [20, 9]
    both = torch.randn(2, 12, 16, 2, 32)
    pages = both if one_allocation else tuple(part.clone() for part in both)
    table = torch.randperm(12, dtype=torch.int32).view(2, 6)
    q = drawn(13, 4, 32)
    starts = [
        torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32) for lens in (query_lens, key_lens)
    ]
    out = flash_attn_varlen_func(q, pages[0], pages[1], *starts, 9, 20, causal=True, block_table=table)
    for request in range(2):
        rows = slice(*starts[0][request : request + 2].tolist())
        k, v = (part[table[request].long()].flatten(0, 1)[: key_lens[request]] for part in both)
        close(out[rows], reference(q[rows], k, v, causal=True)[0], 2e-5)


@pytest.mark.parametrize("layout", ["one allocation", "two allocations", "pages", "pages of two allocations"])
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
@pytest.mark.parametrize(("queries", "new"), [(1, 1), (1, 0), (3, 3), (2, 5), (40, 0)])
def test_caches(queries: int, new: int, options: dict[str, Any], layout: str) -> None:
    torch.manual_seed(3)
    batch, size, before = 3, 96, torch.tensor([0 if new else 1, 33, 90], dtype=torch.int32)
    q = drawn(batch, queries, 4, 32)
    k, v = (drawn(batch, new, 2, 32) for _ in range(2))
    arguments: dict[str, Any] = {}
    if "pages" in layout:
        caches = torch.randn(2, 24, 16, 2, 32)
        table = torch.randperm(24, dtype=torch.int32)[:18].view(batch, 6)
        arguments["block_table"] = table
        rows = [caches[:, table[request].long()].flatten(1, 2) for request in range(batch)]
    else:
        caches = torch.randn(2, 5, size, 2, 32)
        chosen = torch.tensor([4, 0, 2], dtype=torch.int32)
        arguments["cache_batch_idx"] = chosen
        rows = [caches[:, request] for request in chosen.tolist()]
    expected_rows = [row.clone() for row in rows]
    k_cache, v_cache = caches if "two" not in layout else (caches[0].clone(), caches[1].clone())
    if new:
        arguments |= {"k": k, "v": v}
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=before, return_softmax_lse=True, **arguments, **options
    )
    for request in range(batch):
        start, row = int(before[request]), expected_rows[request]
        row[0, start : start + new], row[1, start : start + new] = k[request], v[request]
        expected, expected_lse = reference(q[request], *row[:, : start + new], **options)
        close(out[request], expected, 2e-5)
        close(lse[request], expected_lse, 2e-5)
        # The new keys are in the caller's own cache, and nothing else was written to it.
        if "pages" in layout:
            held = [
                cache[arguments["block_table"][request].long()].flatten(0, 1) for cache in (k_cache, v_cache)
            ]
        else:
            held = [cache[int(arguments["cache_batch_idx"][request])] for cache in (k_cache, v_cache)]
        assert torch.equal(torch.stack(held), row)


def test_a_cache_of_any_length_and_an_int_for_all() -> None:
    torch.manual_seed(4)
    caches = torch.randn(2, 2, 77, 2, 16)
    q = drawn(2, 1, 2, 16)
    for length in (77, 50):
        out = flash_attn_with_kvcache(q, *caches, cache_seqlens=None if length == 77 else length)
        for request in range(2):
            close(out[request], reference(q[request], *caches[:, request, :length])[0], 2e-5)


def test_layers_of_a_step_share_what_was_built_and_later_steps_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from attnplug.integrations.binding import Binding

    built = []
    build = Binding.build
    monkeypatch.setattr(Binding, "build", lambda self, common: built.append(1) or build(self, common))
    torch.manual_seed(5)
    caches = torch.randn(2, 2, 64, 2, 16)
    lengths = torch.tensor([10, 20], dtype=torch.int32)
    q = drawn(2, 1, 2, 16)

    def layer() -> torch.Tensor:
        found = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)
        assert isinstance(found, torch.Tensor)
        return found

    with one_step():
        first = layer()
        assert torch.equal(layer(), first)
    assert len(built) == 1
    lengths += 1
    for found, request in itertools.product([layer()], range(2)):
        close(found[request], reference(q[request], *caches[:, request, : int(lengths[request])])[0], 2e-5)
    assert len(built) == 2


@pytest.mark.parametrize("ends_elsewhere", [False, True])
def test_steps_that_end_out_of_order_or_elsewhere_leave_no_metadata(ends_elsewhere: bool) -> None:
    torch.manual_seed(6)
    caches, q = torch.randn(2, 1, 64, 2, 16), drawn(1, 1, 2, 16)
    lengths = torch.tensor([10], dtype=torch.int32)
    first, second = one_step(), one_step()
    first.__enter__()
    flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)
    second.__enter__()
    for each in (first, second):
        if ends_elsewhere:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(each.__exit__, None, None, None).result()
        else:
            each.__exit__(None, None, None)
    lengths += 30
    out = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)
    close(out[0], reference(q[0], *caches[:, 0, :40])[0], 2e-5)


def test_a_step_shares_nothing_between_calls_of_other_lengths_or_caches() -> None:
    torch.manual_seed(7)
    caches, longer = torch.randn(2, 2, 512, 2, 16), torch.randn(2, 2, 1024, 2, 16)
    lengths = torch.tensor([500, 3], dtype=torch.int32)
    q = drawn(2, 1, 2, 16)
    with one_step():
        for pair, given in (
            (caches, 10),
            (caches, 300),
            (caches, None),
            (caches, lengths),
            (longer, lengths),
        ):
            out = flash_attn_with_kvcache(q, *pair, cache_seqlens=given)
            for request in range(2):
                length = int(given[request]) if isinstance(given, torch.Tensor) else given
                close(out[request], reference(q[request], *pair[:, request, :length])[0], 2e-5)


def test_a_step_reads_no_metadata_whose_builder_has_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnplug.integrations.binding import Binding

    last: list[Any] = []
    build = Binding.build

    def overwriting(self: Binding, common: Any) -> Any:
        for earlier in last:
            earlier.seq_lens.fill(1)
            earlier.plans.clear()
        last[:] = [build(self, common)]
        return last[0]

    monkeypatch.setattr(Binding, "build", overwriting)
    torch.manual_seed(8)
    caches, q = torch.randn(2, 2, 64, 2, 16), drawn(2, 1, 2, 16)
    both = [torch.tensor(lengths, dtype=torch.int32) for lengths in ([10, 20], [40, 30])]
    with one_step():
        for lengths in both * 2:
            out = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths)
            for request in range(2):
                keys = caches[:, request, : int(lengths[request])]
                close(out[request], reference(q[request], *keys)[0], 2e-5)


@pytest.mark.parametrize(("batch", "queries"), [(0, 3), (2, 0), (0, 0)])
def test_no_queries_give_an_empty_output_and_lse(batch: int, queries: int) -> None:
    q, k = drawn(batch, queries, 4, 16), drawn(batch, 5, 2, 16)
    out, lse, _ = flash_attn_func(q, k, k, return_attn_probs=True)
    assert (out.shape, lse.shape) == (q.shape, (batch, 4, queries))


def test_compiled_callers_get_the_same() -> None:
    compiled = torch.compile(lambda q: flash_attn_func(q * 2, q, q, causal=True), backend="eager")
    for length in (3, 5):
        q = drawn(1, length, 2, 16)
        with torch.no_grad():
            close(compiled(q)[0], reference(2 * q[0], q[0], q[0], causal=True)[0], 2e-5)


def test_slopes_are_read_at_each_call() -> None:
    torch.manual_seed(6)
    q, k, v = (drawn(1, 9, 2, 16) for _ in range(3))
    slopes = torch.tensor([0.1, 0.2])
    for _ in range(2):
        out = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
        close(out[0], reference(q[0], k[0], v[0], causal=True, alibi_slopes=slopes)[0], 2e-5)
        slopes.data.mul_(3)


def test_rules_choose_the_backend_and_decisions_tell_it() -> None:
    q = drawn(1, 4, 2, 16)
    with attnplug.use("flash_attn=TORCH"):
        flash_attn_func(q, q, q)
    assert decisions()[-1].backend == "TORCH"
    with attnplug.use("FLASHINFER"), pytest.raises(BackendUnavailableError, match="FLASHINFER"):
        flash_attn_func(q, q, q)


def some_caches() -> dict[str, Any]:
    k_cache, v_cache = torch.zeros(2, 2, 32, 2, 16)
    return {"q": torch.zeros(2, 1, 2, 16), "k_cache": k_cache, "v_cache": v_cache}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rotary_cos": torch.zeros(4, 8)}, "rotary_cos.*rotate"),
        ({"rotary_sin": torch.zeros(4, 8)}, "rotary_sin"),
        ({"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, "cache_leftpad"),
        ({"cache_seqlens": 33}, "cache_seqlens=33|cache_seqlens.*32"),
        ({"cache_seqlens": torch.tensor([1, 2])}, "cache_seqlens.*int32"),
        ({"cache_seqlens": torch.tensor([1, -2], dtype=torch.int32)}, "cache_seqlens"),
        ({"cache_seqlens": 32, "k": torch.zeros(2, 1, 2, 16), "v": torch.zeros(2, 1, 2, 16)}, "0 .. 31"),
        ({"k": torch.zeros(2, 1, 2, 16), "cache_seqlens": 3}, "v=None"),
        ({"k": torch.zeros(2, 1, 2, 16), "v": torch.zeros(2, 1, 2, 16)}, "cache_seqlens"),
        (
            {"block_table": torch.zeros(2, 1, dtype=torch.int32), "cache_batch_idx": torch.zeros(2)},
            "cache_batch_idx",
        ),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, "block_table"),
        ({"block_table": [[0], [1]]}, "block_table='list' must be a tensor"),
        ({"cache_batch_idx": [0, 1]}, "cache_batch_idx='list' must be a tensor"),
        ({"alibi_slopes": [0.1, 0.2]}, "alibi_slopes='list' must be a tensor"),
        ({"alibi_slopes": torch.zeros(2, requires_grad=True)}, "alibi_slopes.*no backward pass"),
        ({"alibi_slopes": torch.zeros(2, 2)}, "alibi_slopes.*request"),
        ({"window_size": 5}, "window_size"),
        ({"q": torch.zeros(2, 1, 2, 16, dtype=torch.float16)}, "dtype"),
        ({"q": torch.zeros(3, 1, 2, 16)}, "3 requests"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_what_is_not_served_is_an_error_that_names_it(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        flash_attn_with_kvcache(**(some_caches() | given))


def test_dropout_and_gradients_are_refused() -> None:
    q = drawn(1, 4, 2, 16)
    with pytest.raises(BatchError, match="dropout_p"):
        flash_attn_func(q, q, q, dropout_p=0.1)
    with pytest.raises(BatchError, match="requires_grad"):
        flash_attn_func(q.requires_grad_(), q, q)


def test_arguments_are_those_of_the_library() -> None:
    """By flash-attn 2.8.3, in order, with its defaults."""
    shared = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    shared += "deterministic=False, return_attn_probs=False"
    expected = {
        flash_attn_func: f"q, k, v, {shared}",
        flash_attn_varlen_func: "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
        f"{shared}, block_table=None",
        flash_attn_with_kvcache: "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
        "num_splits=0, return_softmax_lse=False",
    }
    for function, words in expected.items():
        bare = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
        assert str(inspect.Signature(bare)) == f"({words})"


@pytest.mark.parametrize("case", ["pages", "packed"])
def test_triton_serves_the_same(case: str) -> None:
    pytest.importorskip("triton")
    with attnplug.use("TRITON"):
        if case == "pages":
            test_caches(2, 2, {"causal": True, "window_size": (25, 4)}, "pages")
        else:
            test_packed_requests({"causal": True}, torch.float16)
    assert decisions()[-1].backend == "TRITON"
