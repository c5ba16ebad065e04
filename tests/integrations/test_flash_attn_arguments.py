"""Arguments of flash-attn's functions: rows and pages that exist, values in the caller's words, memory that is apart."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from attnplug.core.errors import BatchError, PolicyError, SpecError
from attnplug.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    one_step,
)
from attnplug.ops.shared_memory import overlaps_itself, share_memory


def ints(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def named(given: dict[str, Any] | str) -> str:
    """An id without numbers of tensors, which each process draws anew."""
    return given if isinstance(given, str) else ",".join(given)


def call(**given: Any) -> Any:
    """Two requests over four cache rows of 32 tokens, which are pages of 32 too."""
    caches = torch.randn(2, 4, 32, 2, 16)
    arguments = {"q": torch.randn(2, 1, 2, 16), "k_cache": caches[0], "v_cache": caches[1]}
    return flash_attn_with_kvcache(**(arguments | given))


def new_keys(tokens: int = 1) -> dict[str, torch.Tensor]:
    return {"k": torch.randn(2, tokens, 2, 16), "v": torch.randn(2, tokens, 2, 16)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cache_batch_idx": ints(0, -1)}, r"cache_batch_idx=\[0, -1\] must be in 0 .. 3.*request 1 has -1"),
        ({"cache_batch_idx": ints(4, 0)}, r"cache_batch_idx=\[4, 0\] .*request 0 has 4"),
        ({"cache_batch_idx": ints(0, 2**31 - 1)}, "request 1 has 2147483647"),
        ({"cache_batch_idx": ints(0, -(2**31))}, "request 1 has -2147483648"),
        (
            {"cache_batch_idx": ints(2, 2), "cache_seqlens": 3, **new_keys()},
            r"cache_batch_idx=\[2, 2\] must name each row once where k is given",
        ),
        (
            {"block_table": ints([1, -1], [0, 2]), "cache_seqlens": ints(33, 1)},
            r"block_table=\[\[1, -1\], \[0, 2\]\] must be in 0 .. 3.*request 0 has -1 in column 1",
        ),
        ({"block_table": ints([1], [-1])}, "request 1 has -1 in column 0; its 32 tokens need 1 pages of 32"),
        ({"block_table": ints([1], [4]), "cache_seqlens": 1}, "request 1 has 4"),
        ({"block_table": ints([1, 9], [0, 2]), "cache_seqlens": 32, **new_keys()}, "request 0 has 9"),
        (
            {"block_table": ints([1], [1]), "cache_seqlens": 3, **new_keys()},
            "gives page 1 to request 0, whose new keys are written there, and to request 1",
        ),
        (
            {"block_table": ints([1, 0], [2, 1]), "cache_seqlens": ints(3, 40), **new_keys()},
            "gives page 1 to request 0, whose new keys are written there, and to request 1",
        ),
        (
            {"block_table": ints([1, 1], [2, 3]), "cache_seqlens": 30, **new_keys(34)},
            "gives page 1 to request 0.*and to another of its tokens",
        ),
        ({"cache_seqlens": -1}, "cache_seqlens=-1 must be"),
        ({"cache_seqlens": 33}, r"cache_seqlens=33 must be in 0 .. 32"),
        ({"cache_seqlens": 2**80}, "cache_seqlens=1208925819614629174706176 must be"),
        ({"cache_seqlens": True}, "cache_seqlens=True must be an int"),
        ({"cache_seqlens": 3.0}, "cache_seqlens=3.0 must be an int"),
        ({"cache_seqlens": "3"}, "cache_seqlens='3' must be an int"),
        ({"cache_seqlens": np.bool_(True)}, "cache_seqlens=np.True_ must be an int"),
    ],
    ids=named,
)
def test_rows_pages_and_lengths_are_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        call(**given)


@pytest.mark.parametrize("number", [-1, -7, 99, 2**31 - 1])
def test_pages_behind_the_last_token_may_have_any_number(number: int) -> None:
    torch.manual_seed(0)
    caches, q = torch.randn(2, 4, 32, 2, 16), torch.randn(2, 1, 2, 16)
    arguments = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": ints(20, 32)}
    expected = flash_attn_with_kvcache(**arguments, block_table=ints([3, 0], [1, 0]))
    found = flash_attn_with_kvcache(**arguments, block_table=ints([3, number], [1, number]))
    torch.testing.assert_close(found, expected)


def test_requests_may_share_a_full_page_that_none_of_them_writes() -> None:
    torch.manual_seed(1)
    caches, new, q = torch.randn(2, 4, 32, 2, 16), new_keys(), torch.randn(2, 1, 2, 16)
    rows = [caches[:, [0, page]].flatten(1, 2).clone() for page in (1, 2)]
    found = flash_attn_with_kvcache(
        q, caches[0], caches[1], **new, cache_seqlens=ints(40, 35), block_table=ints([0, 1], [0, 2])
    )
    for request, (row, before) in enumerate(zip(rows, (40, 35), strict=True)):
        keys, values = (
            torch.cat([part[:before], new[name][request]])[None] for part, name in zip(row, "kv", strict=True)
        )
        torch.testing.assert_close(found[request], flash_attn_func(q[request][None], keys, values)[0])


def test_two_requests_may_read_one_row() -> None:
    caches, q = torch.randn(2, 4, 32, 2, 16), torch.randn(1, 1, 2, 16).repeat(2, 1, 1, 1)
    found = flash_attn_with_kvcache(q, caches[0], caches[1], cache_batch_idx=ints(2, 2))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[:1], flash_attn_func(q[:1], caches[0, 2:3], caches[1, 2:3]))


def test_a_step_checks_the_pages_of_each_call_with_other_tensors() -> None:
    caches, q = torch.randn(2, 4, 32, 2, 16), torch.randn(2, 1, 2, 16)
    with one_step():
        flash_attn_with_kvcache(q, caches[0], caches[1], block_table=ints([1], [2]))
        with pytest.raises(BatchError, match="block_table"):
            flash_attn_with_kvcache(q, caches[0], caches[1], block_table=ints([1], [-2]))


def test_nothing_is_written_by_a_call_that_is_refused() -> None:
    caches = torch.zeros(2, 4, 32, 2, 16)
    for given in (
        {"cache_batch_idx": ints(2, 2)},
        {"block_table": ints([1], [4])},
        {"block_table": ints([1], [1])},
    ):
        with pytest.raises(BatchError):
            call(k_cache=caches[0], v_cache=caches[1], cache_seqlens=3, **new_keys(), **given)
    assert not caches.any()


def packed(**given: Any) -> Any:
    arguments = {
        "q": torch.randn(5, 2, 16),
        "k": torch.randn(4, 32, 2, 16),
        "v": torch.randn(4, 32, 2, 16),
        "cu_seqlens_q": ints(0, 2, 5),
        "cu_seqlens_k": ints(0, 30, 80),
        "max_seqlen_q": 3,
        "max_seqlen_k": 50,
        "block_table": ints([1, 7], [0, 2]),
    }
    return flash_attn_varlen_func(**(arguments | given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"block_table": ints([1, 7], [0, -1])}, "block_table.*request 1 has -1 in column 1"),
        ({"block_table": ints([4, 7], [0, 1])}, "request 0 has 4 in column 0"),
        ({"max_seqlen_q": 2}, "max_seqlen_q=2 must be an integer of at least 3, the longest request"),
        ({"max_seqlen_q": "3"}, "max_seqlen_q='3' must be an integer"),
        ({"max_seqlen_q": None}, "max_seqlen_q=None must be an integer"),
        ({"max_seqlen_k": 50.0}, "max_seqlen_k=50.0 must be an integer"),
        ({"max_seqlen_k": True}, "max_seqlen_k=True must be an integer"),
        ({"cu_seqlens_q": [0, 2, 5]}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, "cu_seqlens_q='torch.int64 "),
        ({"cu_seqlens_q": ints(0, 5, 2)}, r"cu_seqlens_q=\[0, 5, 2\] must start at 0, never decrease"),
        ({"cu_seqlens_k": ints(0, 30, 95)}, "max_seqlen_k"),
        (
            {"k": torch.randn(4, 32, 2, 16).half(), "v": torch.randn(4, 32, 2, 16).half()},
            "must have one dtype",
        ),
    ],
    ids=named,
)
def test_packed_requests_are_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        packed(**given)


@pytest.mark.parametrize("longest", [3, np.int64(9), torch.tensor(3)], ids=str)
def test_whole_numbers_of_any_library_are_read(longest: Any) -> None:
    assert packed(max_seqlen_q=longest).shape == (5, 2, 16)


FUNCTIONS = {
    "flash_attn_func": lambda **given: flash_attn_func(*[torch.randn(1, 4, 2, 16)] * 3, **given),
    "flash_attn_varlen_func": packed,
    "flash_attn_with_kvcache": call,
}
SHARED: list[tuple[str, Any, str]] = [
    *((name, value, "must be True or False") for name in ("causal",) for value in ("False", 0, 1.0, None)),
    *(("softmax_scale", value, "must be a finite number above 0") for value in ("0.25", True, 0, -1.0)),
    ("softmax_scale", float("nan"), "must be a finite number above 0"),
    ("softmax_scale", float("inf"), "must be a finite number above 0"),
    ("softmax_scale", 10**400, "must be a finite number above 0"),
    ("softcap", -1.0, "must be a finite number of at least 0.0; 0.0 is no cap"),
    *(("softcap", value, "must be a finite number of at least 0.0") for value in ("0", True, None)),
    ("softcap", float("nan"), "must be a finite number of at least 0.0"),
    ("window_size", (True, 1), "must be .left, right., two integers"),
    ("window_size", ("3", 0), "must be .left, right., two integers"),
    ("window_size", (3.0, 0), "must be .left, right., two integers"),
    ("window_size", 3, "must be .left, right., two integers"),
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("name", "value", "limit"), SHARED, ids=str)
def test_values_are_refused_by_the_names_of_the_caller(
    function: str, name: str, value: Any, limit: str
) -> None:
    with pytest.raises(BatchError, match=limit) as refused:
        FUNCTIONS[function](**{name: value})
    assert (refused.value.field, repr(refused.value.value)) == (name, repr(value))


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        ("flash_attn_func", "deterministic", "no"),
        ("flash_attn_func", "return_attn_probs", "False"),
        ("flash_attn_func", "return_attn_probs", 1),
        ("flash_attn_func", "dropout_p", None),
        ("flash_attn_func", "dropout_p", "0.0"),
        ("flash_attn_func", "dropout_p", False),
        ("flash_attn_varlen_func", "return_attn_probs", "False"),
        ("flash_attn_varlen_func", "deterministic", 0),
        ("flash_attn_with_kvcache", "return_softmax_lse", "False"),
        ("flash_attn_with_kvcache", "rotary_interleaved", "yes"),
        ("flash_attn_with_kvcache", "num_splits", -1),
        ("flash_attn_with_kvcache", "num_splits", "0"),
        ("flash_attn_with_kvcache", "num_splits", 1.0),
    ],
)
def test_flags_and_counts_of_another_type_are_refused(function: str, name: str, value: Any) -> None:
    with pytest.raises(BatchError) as refused:
        FUNCTIONS[function](**{name: value})
    assert (refused.value.field, refused.value.value) == (name, value)


def test_numbers_and_flags_of_numpy_mean_the_same() -> None:
    q = torch.randn(1, 4, 2, 16)
    given = {"causal": np.True_, "softmax_scale": np.float32(0.25), "window_size": (np.int64(2), 0)}
    expected = flash_attn_func(q, q, q, causal=True, softmax_scale=0.25, window_size=(2, 0))
    torch.testing.assert_close(flash_attn_func(q, q, q, **given), expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"q": torch.randn(2, 1, 3, 16)}, r"q=\(2, 1, 3, 16\) has num_heads=3, which must be a multiple"),
        ({"q": torch.randn(2, 1, 0, 16)}, r"q=\(2, 1, 0, 16\) has num_heads=0"),
        (
            dict.fromkeys(("k_cache", "v_cache"), torch.zeros(4, 32, 0, 16)),
            r"k_cache=\(4, 32, 0, 16\) has num_kv_heads=0",
        ),
        ({"window_size": (2**40, 0)}, r"window_size=\(1099511627776, 0\) must not exceed"),
        (
            {
                "q": torch.zeros(2, 1, 2, 16, dtype=torch.int32),
                **dict.fromkeys(("k_cache", "v_cache"), torch.zeros(4, 32, 2, 16, dtype=torch.int32)),
            },
            "q=.* has dtype=torch.int32, which must be one of",
        ),
    ],
    ids=named,
)
def test_impossible_layers_are_told_by_the_tensors_of_the_caller(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        call(**given)


def test_memory_that_a_write_would_change_is_refused() -> None:
    cache, both = torch.randn(4, 32, 2, 16), torch.randn(2, 4, 32, 2, 16)
    one_head = torch.randn(4, 32, 1, 16).expand(4, 32, 2, 16)
    near = torch.randn(4 * 32 * 2 * 16 + 16)
    apart = {"k_cache": both[0], "v_cache": both[1]}
    for words, given in (
        ("k_cache.*shares memory with v_cache", {"k_cache": cache, "v_cache": cache}),
        ("k_cache.*shares memory with v_cache", {"k_cache": cache, "v_cache": cache.view_as(cache)}),
        (
            "k_cache.*shares memory with v_cache",
            {"k_cache": near[16:].view(4, 32, 2, 16), "v_cache": near[:-16].view(4, 32, 2, 16)},
        ),
        ("k_cache='strides .* expanded", {"k_cache": one_head, "v_cache": cache}),
        ("v_cache='strides .* expanded", {"k_cache": cache, "v_cache": one_head}),
        ("k_cache.*shares memory with k,", {**apart, "k": both[0, :2, :1]}),
        ("v_cache.*shares memory with v,", {**apart, "v": both[1, 2:, 4:5]}),
        ("v_cache.*shares memory with q,", {**apart, "q": both[1, :2, 5:6]}),
    ):
        with pytest.raises(BatchError, match=words):
            call(**({"cache_seqlens": 3, **new_keys()} | given))


@pytest.mark.parametrize("kind", ["one tensor for both", "expanded heads"])
def test_shared_memory_that_is_only_read_gives_the_right_output(kind: str) -> None:
    torch.manual_seed(2)
    q, keys = torch.randn(2, 1, 2, 16), torch.randn(2, 32, 2, 16)
    values = keys
    if kind == "expanded heads":
        keys, values = (torch.randn(2, 32, 1, 16).expand(2, 32, 2, 16) for _ in range(2))
    found = flash_attn_with_kvcache(q, keys, values, cache_seqlens=ints(30, 32))
    for request, count in enumerate((30, 32)):
        logits = torch.einsum("hd,khd->hk", q[request, 0], keys[request, :count]) * 0.25
        expected = torch.einsum("hk,khd->hd", logits.softmax(-1), values[request, :count])
        torch.testing.assert_close(found[request, 0], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layout", ["halves", "interleaved", "fused"])
def test_caches_of_one_allocation_are_apart(layout: str) -> None:
    whole = {
        "halves": lambda: torch.zeros(2, 4, 32, 2, 16),
        "interleaved": lambda: torch.zeros(4, 2, 32, 2, 16).transpose(0, 1),
        "fused": lambda: torch.zeros(4, 32, 2, 2, 16).permute(3, 0, 1, 2, 4),
    }[layout]()
    new = new_keys()
    call(k_cache=whole[0], v_cache=whole[1], cache_seqlens=3, block_table=ints([1], [2]), **new)
    torch.testing.assert_close(whole[0, [1, 2], 3], new["k"][:, 0])
    torch.testing.assert_close(whole[1, [1, 2], 3], new["v"][:, 0])


def test_overlaps_are_those_of_the_bytes() -> None:
    """Against the sets of addresses, for views of all kinds."""
    base = torch.arange(240)
    views = [
        base[:60].view(3, 4, 5),
        base[60:120].view(3, 4, 5),
        base[50:110].view(3, 20),
        base.view(24, 2, 5)[:, 0],
        base.view(24, 2, 5)[:, 1],
        base.view(24, 10)[:, 3:8],
        base[::7],
        base[1::7],
        base[5:5],
        base[10:11].expand(6),
        base.as_strided((4, 3), (2, 1)),
    ]
    for one, other in itertools.product(views, views):
        common = set(one.flatten().tolist()) & set(other.flatten().tolist())
        assert share_memory(one, other) is bool(common)
    for view in views:
        assert overlaps_itself(view) is (view.unique().numel() < view.numel())


@pytest.mark.parametrize("text", ["maybe", "2"])
def test_a_debug_mode_that_is_neither_on_nor_off_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnplug.registry.plugins.switches import DEBUG, is_on

    monkeypatch.setenv("ATTNPLUG_DEBUG", text)
    with pytest.raises(PolicyError, match="ATTNPLUG_DEBUG"):
        is_on(DEBUG)
    for word, expected in (
        ("false", False),
        ("No", False),
        ("off", False),
        ("", False),
        ("1", True),
        ("on", True),
    ):
        monkeypatch.setenv("ATTNPLUG_DEBUG", word)
        assert is_on(DEBUG) is expected


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cache_batch_idx": [0, -1]}, "request 1 has -1"),
        ({"cache_batch_idx": [2, 2], "new": True}, "must name each row once"),
        ({"block_table": [[1], [-1]]}, "request 1 has -1"),
        ({"cache_seqlens": [3, 33]}, "cache_seqlens"),
    ],
    ids=str,
)
def test_a_gpu_is_asked_in_debug_mode(
    given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPLUG_DEBUG", "1")
    caches = torch.randn(2, 4, 32, 2, 16, device="cuda", dtype=torch.float16)
    arguments = {"q": caches.new_zeros(2, 1, 2, 16), "k_cache": caches[0], "v_cache": caches[1]}
    if given.pop("new", False):
        arguments |= {name: caches.new_zeros(2, 1, 2, 16) for name in "kv"} | {"cache_seqlens": 3}
    arguments |= {name: ints(*numbers).cuda() for name, numbers in given.items()}
    with pytest.raises(BatchError, match=words):
        flash_attn_with_kvcache(**arguments)
