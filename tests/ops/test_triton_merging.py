"""The merge kernel gives what plain torch gives, and touches no more."""

from __future__ import annotations

import math

import pytest
import torch

from attnplug.core.errors import BatchError
from attnplug.ops import merge, merge_attn_states, merging
from attnplug.ops import triton as kernels
from attnplug.testing import assert_close, assert_lse_close

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def partials(
    count: int, tokens: int, heads: int, size: int, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Partials of which each has rows it did not see, full of NaN; row 1 nothing saw."""
    generator = torch.Generator().manual_seed(count + size)
    outs = [torch.randn(tokens, heads, size, generator=generator).to(dtype) for _ in range(count)]
    lses = [5 * torch.randn(tokens, heads, generator=generator) for _ in range(count)]
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        unseen = torch.rand(tokens, heads, generator=generator) < 0.2
        unseen[1] = True
        unseen[0] = index % 2 == 1
        lse[unseen] = -math.inf
        out[unseen] = math.nan
    return outs, lses


def on(device: torch.device, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]


def assert_merged(found, lse, outs, lses, dtype=torch.float32):
    expected, expected_lse = merge(outs, lses)
    assert_close(found.cpu().float(), expected.float(), TOLERANCE[dtype])
    assert_lse_close(lse.cpu(), expected_lse, 1e-5)
    assert (found[1] == 0).all()
    assert (lse[1] == -math.inf).all()


@pytest.mark.parametrize("count", [1, 2, 3, 8, 16, 17, 40])
@pytest.mark.parametrize(("heads", "size"), [(3, 16), (2, 80)])
def test_any_number_of_partials_is_merged_as_torch_does(device, count, heads, size):
    outs, lses = partials(count, 5, heads, size)
    found, lse = kernels.merge_attn_states(on(device, outs), on(device, lses))
    assert found.dtype == lse.dtype == torch.float32
    assert_merged(found, lse, outs, lses)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 20])
def test_halves_are_merged_in_float32(device, dtype, count):
    outs, lses = partials(count, 9, 4, 128, dtype)
    found, lse = kernels.merge_attn_states(on(device, outs), on(device, lses))
    assert found.dtype == dtype
    assert_merged(found, lse, outs, lses, dtype)


def test_partials_of_several_dtypes_and_strides_go_into_a_target_of_another(device):
    outs, lses = partials(3, 5, 4, 32)
    by_head = [lse.T.contiguous().to(device).T for lse in lses]
    mixed = [outs[0].to(device).transpose(0, 1).contiguous().transpose(0, 1), *on(device, outs[1:])]
    mixed[2] = torch.stack([mixed[2]] * 2, -1)[..., 0]
    target = torch.full((5, 4, 64), 9.0, dtype=torch.bfloat16, device=device)
    target_lse = torch.full((4, 5), 9.0, device=device)
    found, lse = kernels.merge_attn_states(mixed, by_head, target[..., ::2], target_lse.T)
    assert_merged(found, lse, outs, lses, torch.bfloat16)
    assert torch.equal(found, target[..., ::2])
    assert torch.equal(lse, target_lse.T)
    assert (target[..., 1::2] == 9.0).all()


def test_stacked_partials_are_sequences_too(device):
    outs, lses = partials(2, 5, 4, 32)
    found, lse = kernels.merge_attn_states(torch.stack(outs).to(device), torch.stack(lses).to(device))
    assert_merged(found, lse, outs, lses)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("count", [2, 17])
def test_the_result_can_be_written_over_one_of_the_partials(device, which, count):
    outs, lses = partials(count, 9, 4, 64)
    ours, our_lses = on(device, [out.clone() for out in outs]), on(device, [lse.clone() for lse in lses])
    found, lse = kernels.merge_attn_states(ours, our_lses, ours[which], our_lses[which])
    assert found is ours[which]
    assert lse is our_lses[which]
    assert_merged(found, lse, outs, lses)
    for index in set(range(count)) - {which}:
        torch.testing.assert_close(ours[index].cpu(), outs[index], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(our_lses[index].cpu(), lses[index])


def test_nan_in_a_row_that_was_seen_is_not_hidden(device):
    outs, lses = partials(2, 2, 2, 16)
    outs, lses = on(device, [torch.zeros_like(out) for out in outs]), on(device, lses)
    lses[0][0, 0], outs[0][0, 0, 3] = 1.0, math.nan
    lses[1][0, 1] = math.nan
    found, lse = kernels.merge_attn_states(outs, lses)
    assert found[0, 0].isnan().sum() == 1
    assert found[0, 1].isnan().all()
    assert lse.isnan().tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("apart", [50.0, 500.0, 1e30])
@pytest.mark.parametrize("base", [-1e4, 0.0, 1e4])
def test_lses_far_apart_leave_the_larger_one(device, apart, base):
    outs = [torch.full((1, 1, 16), value, device=device) for value in (1.0, 2.0)]
    lses = [torch.full((1, 1), value, device=device) for value in (base - apart, base)]
    found, lse = kernels.merge_attn_states(outs, lses)
    assert found.flatten().tolist() == pytest.approx([2.0] * 16)
    assert lse.item() == pytest.approx(base)


def test_no_tokens_are_merged_to_none(device):
    found, lse = kernels.merge_attn_states(
        [torch.empty(0, 4, 16, device=device)] * 2, [torch.empty(0, 4, device=device)] * 2
    )
    assert found.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


ONES = torch.ones(2, 3, 16)
BAD = [
    (([], []), {}, r"outputs=0 must be as many as lses \(0\), at least one"),
    (([ONES], []), {}, r"outputs=1 must be as many as lses \(0\), at least one"),
    (
        ([ONES[0]], [ONES[0, :, 0]]),
        {},
        r"outputs\[0\]=\(3, 16\) must be of shape \(tokens, num_heads, head_size_v\)",
    ),
    (([ONES, ONES[:1]], [ONES[..., 0]] * 2), {}, r"outputs\[1\], lses\[1\]=\(\(1, 3, 16\), \(2, 3\)\)"),
    (([ONES], [ONES]), {}, r"must have the shapes \(2, 3, 16\) and \(2, 3\)"),
    (([ONES], [ONES[..., 0]]), {"output": ONES[0]}, r"output=\(3, 16\) must have the shape \(2, 3, 16\)"),
    (([ONES], [ONES[..., 0]]), {"output_lse": ONES}, r"output_lse=\(2, 3, 16\) must have the shape \(2, 3\)"),
]


@pytest.mark.parametrize(("given", "targets", "said"), BAD)
@pytest.mark.parametrize("side", ["triton", "torch"])
def test_arguments_that_do_not_fit_are_refused_in_the_same_words(device, side, given, targets, said):
    with pytest.raises(BatchError, match=said):
        (kernels if side == "triton" else merging).merge_attn_states(*given, **targets)


@pytest.mark.parametrize(("count", "launches"), [(1, 1), (16, 1), (17, 2), (31, 2), (32, 3)])
def test_the_public_function_uses_the_kernel_on_a_gpu(device, on_gpu, launches_of, count, launches):
    calls = launches_of("merging")
    outs, lses = partials(count, 3, 2, 16)
    found, lse = merge_attn_states([on_gpu(out) for out in outs], [on_gpu(lse) for lse in lses])
    assert len(calls) == launches
    assert_merged(found.as_subclass(torch.Tensor), lse.as_subclass(torch.Tensor), outs, lses)
    merge_attn_states(outs, lses)
    assert len(calls) == launches
