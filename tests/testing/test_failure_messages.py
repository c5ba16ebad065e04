"""A failing check says which requests, rows and heads are wrong, by how much, where an error comes from."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import pytest
import torch
from catching import variant

from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import Device, LayerSpec
from attnplug.testing import Batch, paged_batch
from attnplug.testing.conformance.check import ConformanceError, error_context, naming_seconds, time_limit
from attnplug.testing.conformance.harness import Harness, Output
from attnplug.testing.conformance.layer_names import layer_names
from attnplug.testing.conformance.mistakes import mistake_recognition
from attnplug.testing.conformance.mistakes.deviation import Deviation, deviation, deviation_of
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.mistakes.mistake_recognition import mistaken_answers, recognise
from attnplug.testing.conformance.mistakes.wrong_answers import description
from attnplug.testing.conformance.target import Target

SPEC = LayerSpec(num_heads=8, num_kv_heads=2, head_size=16, dtype="float32", needs_lse=True)
LENGTHS = [1, 1, 5, 40, 33], [12, 40, 37, 140, 33]
"""Two decodes, two extends and a prefill; rows 0, 1, 2-6, 7-46 and 47-79."""


def batch_of(**fields: object) -> Batch:
    return paged_batch(SPEC.replace(**fields), *LENGTHS)


def wrong_with(change: Callable[[torch.Tensor, torch.Tensor], object], **fields: object) -> Deviation:
    """The right answer after `change` of its output and LSE."""
    batch = batch_of(**fields)
    truth = batch.oracle()
    output, lse = truth.output.float(), truth.lse.float()
    change(output, lse)
    found = deviation(batch, Output(output, lse))
    assert found is not None
    return found


def text_of(change: Callable[[torch.Tensor, torch.Tensor], object], **fields: object) -> str:
    return "\n".join(description(wrong_with(change, **fields)))


def test_requests_rows_and_heads_are_counted() -> None:
    text = text_of(lambda output, lse: output[2:5, 4:].add_(1.0))
    assert "wrong: 1 of 5 requests, 3 of 80 rows, heads 4-7 of 8; output error" in text
    assert ", bound 1.2e-05, LSE is right" in text
    assert "request 2 (extend, 5 new of 37 tokens): rows 0-2 of 5, heads 4-7 of 8" in text
    assert "layer: full, 8 heads over 2 KV heads of 16, float32, LSE" in text


def test_a_wrong_lse_of_a_right_output_is_told_apart() -> None:
    text = text_of(lambda output, lse: lse[0].add_(1.0))
    assert "output is right, LSE error" in text
    assert "bound 0.0001" in text
    assert "request 0 (decode, 1 new of 12 tokens): the one row, all 8 heads" in text


def test_nan_is_counted_by_request() -> None:
    text = text_of(lambda output, lse: (output[1].fill_(math.nan), output[3, 0].fill_(math.inf)))
    assert (
        "request 1 (decode, 1 new of 40 tokens): the one row, all 8 heads, 128 of 128 elements NaN or infinite"
        in text
    )
    assert (
        "request 2 (extend, 5 new of 37 tokens): row 1 of 5, head 0 of 8, 16 of 640 elements NaN or infinite"
        in text
    )


def test_one_request_of_each_path_is_shown() -> None:
    text = text_of(lambda output, lse: output.add_(1.0))
    assert "wrong: 5 of 5 requests, 80 of 80 rows, all 8 heads" in text
    for path in ("request 0 (decode", "request 2 (extend", "request 4 (prefill", "and 2 other requests"):
        assert path in text
    assert len(text.splitlines()) <= 9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda output: output[:2].add_(1), "only requests with decode"),
        (lambda output: output[2:47].add_(1), "only requests with extend"),
        (lambda output: output[47:].add_(1), "only requests with prefill"),
        (lambda output: output[7:47].add_(1), "only requests of more than 40 tokens"),
        (lambda output: output[32:].add_(1), "only rows from row 32 of the batch on"),
        (lambda output: output[35:47].add_(1), "only rows from position 128 on"),
        (
            lambda output: (output[6].add_(1), output[46].add_(1), output[79].add_(1)),
            "in the last row of a request",
        ),
        (lambda output: output[:, 4:].add_(1), "only the heads of KV head 1 of 2"),
        (
            lambda output: output.index_fill_(1, torch.tensor([1, 2, 3, 5, 6, 7]), 5.0),
            "all but the first head of each group",
        ),
        (lambda output: output[..., 8:].add_(1), "only elements 8-15 of 16 in a head"),
        (lambda output: output.zero_(), "the wrong rows are 0"),
        (lambda output: output.mul_(1.5), "the right ones times 1.5"),
        (lambda output: output.copy_(output.flip(1)), "head 0 has the numbers of head 7"),
        (lambda output: output.copy_(output.roll(1, 0)), "row 0 has the numbers of row 79"),
        (lambda output: output.copy_(output.bfloat16()), "half precision"),
        (lambda output: output[4:6].fill_(math.nan), "whole rows are NaN"),
    ],
)
def test_patterns_point_at_the_cause(change: Callable[[torch.Tensor], object], says: str) -> None:
    assert says in text_of(lambda output, lse: change(output))


def test_numbers_without_a_pattern_have_none() -> None:
    noise = torch.randn(80, 8, 16, generator=torch.Generator().manual_seed(0))
    assert "pattern" not in text_of(lambda output, lse: output.add_(noise))


def test_an_overflow_of_exp_is_recognised_by_its_rows() -> None:
    batch = batch_of(needs_lse=False)
    batch = dataclasses.replace(batch, queries=[20 * each for each in batch.queries])
    truth = batch.oracle()
    output = truth.output.float()
    output[truth.lse.abs() > 88] = math.nan
    assert 0 < int(output.isnan().sum()) < output.numel()
    wrong = deviation(batch, Output(output, None))
    assert wrong is not None
    assert any("beyond 88" in line for line in description(wrong))


def test_a_message_is_short_and_names_the_mistake_first() -> None:
    batch = batch_of(sliding_window=9, has_sinks=True, logits_soft_cap=3.0, has_alibi=True)
    ((_, output, lse),) = mistaken_answers(batch, {"sinks ignored"})
    assert lse is not None
    with pytest.raises(ConformanceError) as caught:
        expect_correct(batch, Output(output.float(), lse.float()), "in step 2")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("in step 2: output[")
    assert first.endswith("these are the numbers of a known mistake: sinks ignored")
    assert caught.value.named == "sinks ignored"
    assert len(rest) <= 10


def test_naming_ends_with_its_time() -> None:
    batch = batch_of(sliding_window=9)
    ((_, output, lse),) = mistaken_answers(batch, {"pages of the first request"})
    wrong = deviation_of(batch, output, lse, batch.oracle())
    found = recognise(wrong, seconds=0.0)
    assert found.name is None
    assert found.tried == 0 < found.of
    assert recognise(wrong, seconds=60.0).name == "pages of the first request"


def test_naming_takes_a_share_of_the_time_that_is_left() -> None:
    assert naming_seconds() > 1
    with time_limit(4.0):
        assert 0 < naming_seconds() <= 1
    with time_limit(-1.0):
        assert naming_seconds() == 0
        batch = batch_of()
        with pytest.raises(ConformanceError, match="time was over after 0 of") as caught:
            expect_correct(batch, Output(batch.oracle().output.float() + 1, None), "late")
    assert caught.value.named is None


def test_a_long_request_is_compared_in_a_sample() -> None:
    spec = SPEC.replace(sliding_window=9, num_heads=16, num_kv_heads=2)
    batch = paged_batch(spec, [1, 200], [5000, 700])
    ((_, output, lse),) = mistaken_answers(batch, {"window off by one: a key too few before the query"})
    wrong = deviation_of(batch, output, lse, batch.oracle())
    samples = mistake_recognition._samples(wrong, mistake_recognition.requests_of(batch))
    for sample in samples:
        assert len(sample.rows) * len(sample.heads) * batch.seq_lens[sample.request] <= 2**18
    begin = time.process_time()
    assert recognise(wrong).name == "window off by one: a key too few before the query"
    assert time.process_time() - begin < 10


class _Raising(TorchImpl):
    """Raises below its attend."""

    def attend(self, *given: object, **options: object) -> torch.Tensor:
        return self._looked_up(7)

    def _looked_up(self, page: int) -> torch.Tensor:
        raise ValueError(f"no page {page}")


def test_an_error_names_the_call_the_layer_and_the_backends_lines() -> None:
    target = Target(variant("RAISING", impl=_Raising), Device("cpu"))
    batch = batch_of(sliding_window=9)
    with pytest.raises(ConformanceError) as caught:
        Harness.of(target, batch).forward(batch, what="with pages of 32 tokens")
    first, call, *frames = str(caught.value).splitlines()
    assert first == "with pages of 32 tokens: raised ValueError: no page 7"
    (name,) = layer_names(1, batch.spec)
    words = "sliding, 8 heads over 2 KV heads of 16, float32, window (8, 0), LSE"
    assert call == f"in forward of {name} ({words})"
    assert [line.split(" in ")[1] for line in frames] == [
        "attend: return self._looked_up(7)",
        '_looked_up: raise ValueError(f"no page {page}")',
    ]
    assert all("test_failure_messages.py:" in line for line in frames)


class _Refusing(TorchImpl):
    @classmethod
    def from_spec(cls, *given: object, **options: object) -> _Refusing:
        raise RuntimeError("no kernel")


def test_an_error_of_from_spec_names_it() -> None:
    target = Target(variant("REFUSING", impl=_Refusing), Device("cpu"))
    with pytest.raises(
        ConformanceError, match=r"(?s)raised RuntimeError: no kernel.*in from_spec of \S*attn\S* \(full"
    ):
        Harness.of(target, batch_of())


def test_a_call_without_a_layer_is_named_by_its_function() -> None:
    def build() -> None:
        raise ValueError("no table")

    with pytest.raises(ConformanceError) as caught, error_context("step 3"):
        build()
    assert "step 3: raised ValueError: no table" in str(caught.value)
    assert "test_failure_messages.py" in str(caught.value)
