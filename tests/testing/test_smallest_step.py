"""A wrong answer shrinks to the smallest step that still gives it, and that step is a test that anybody can run."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import Device, LayerSpec, SparseSpec
from attnplug.testing import assert_step_correct
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.harness import Output, run_batch
from attnplug.testing.conformance.mistakes import single_step, smallest_step
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.mistakes.single_step import step_test
from attnplug.testing.conformance.mistakes.smallest_step import Shrinker
from attnplug.testing.conformance.target import Target, latent_dims
from attnplug.testing.decorator import as_parameters
from attnplug.testing.drawn_values import FP8_SCALES, Numbers

CPU = Device("cpu")


class Forgets(TorchImpl):
    """Forgets windows."""

    @classmethod
    def from_spec(cls, spec: LayerSpec, **rest: Any) -> Any:
        return super().from_spec(spec.replace(window=(-1, -1)), **rest)


class ForgetsWindows(TorchBackend):
    """Serves windows, and forgets them."""

    @staticmethod
    def get_name() -> str:
        return "FORGETS_WINDOWS"

    @classmethod
    def get_impl_cls(cls) -> type[TorchImpl]:
        return Forgets


class LosesPage(TorchImpl):
    """Loses a tenth of the answers of contexts of more than a page of 16, in layers with sinks."""

    def forward(self, layer: Any, query: Any, *given: Any, **rest: Any) -> Any:
        out = super().forward(layer, query, *given, **rest)
        return out.mul_(0.9) if self.spec.has_sinks and int(max(given[3].seq_lens)) > 16 else out


class LosesPages(TorchBackend):
    """Is wrong for steps of more than 16 tokens in layers with sinks."""

    @classmethod
    def get_impl_cls(cls) -> type[TorchImpl]:
        return LosesPage


SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32")
WINDOW = SPEC.replace(sliding_window=7)
LENGTHS = [43, 1, 0, 5, 33], [80, 60, 9, 5, 33]


def batch_of(backend: type[TorchBackend], spec: LayerSpec, **options: Any) -> Batch:
    return Target(backend, CPU).batch(spec, *LENGTHS, **{"padding": 3, "drop_window": True, **options})


def failure_of(backend: type[TorchBackend], spec: LayerSpec) -> ConformanceError:
    batch = batch_of(backend, spec)
    with pytest.raises(ConformanceError) as caught:
        expect_correct(batch, Output(*run_batch(backend, batch)), "a step")
    return caught.value


@pytest.fixture(scope="module")
def forgotten() -> ConformanceError:
    """A failure of a forgotten window after it was shrunk."""
    problem = failure_of(ForgetsWindows, WINDOW)
    Shrinker(60).shrink(problem)
    return problem


def test_a_forgotten_window_is_one_request_of_two_tokens(forgotten: ConformanceError) -> None:
    assert forgotten.smallest is not None
    assert (forgotten.smallest.words, forgotten.smallest.is_least) == ("1 request of 2 tokens", True)
    spec = forgotten.smallest.step.spec
    assert (spec.num_heads, spec.head_size, spec.window) == (1, 16, (0, 0))
    (note,) = forgotten.__notes__
    assert note == f"smallest failing step, 1 request of 2 tokens:\n\n{forgotten.smallest.test}\n"


def test_the_printed_test_fails_for_the_wrong_backend_and_passes_for_a_right_one(
    forgotten: ConformanceError,
) -> None:
    assert forgotten.smallest is not None
    text = forgotten.smallest.test
    assert text.splitlines()[-3] == "def test_sliding_window_ignored():"
    assert len([line for line in text.splitlines() if line]) == 6
    run_printed(text.replace("ForgetsWindows", "TorchBackend"))
    with pytest.raises(ConformanceError, match="sliding window ignored"):
        run_printed(text)


@pytest.mark.slow
def test_pytest_runs_the_printed_test_as_it_is(forgotten: ConformanceError, tmp_path: Path) -> None:
    assert forgotten.smallest is not None
    Path(tmp_path, "test_printed.py").write_text(forgotten.smallest.test)
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.append({here!r}); import pytest; sys.exit(pytest.main(['-q', '-pno:cacheprovider']))"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "1 failed" in found.stdout
    assert "these are the numbers of a known mistake: sliding window ignored" in found.stdout


def run_printed(text: str) -> None:
    names: dict[str, Any] = {}
    exec(text, names)
    next(function for name, function in names.items() if name.startswith("test_"))()


def test_a_step_keeps_the_tokens_heads_and_features_that_the_mistake_needs() -> None:
    found = [failure_of(LosesPages, SPEC.replace(has_sinks=True)) for _ in range(2)]
    for problem in found:
        Shrinker(60).shrink(problem)
    first, second = (problem.smallest for problem in found)
    assert first is not None
    assert first.words == "1 request of 17 tokens"
    assert first.step.spec == LayerSpec(
        num_heads=1, num_kv_heads=1, head_size=16, dtype="float32", has_sinks=True
    )
    assert first == second


def test_the_first_failure_of_each_mistake_is_shrunk_within_the_time() -> None:
    shrinker, problems = Shrinker(60), [failure_of(ForgetsWindows, WINDOW) for _ in range(2)]
    for problem in problems:
        shrinker.shrink(problem)
    assert [problem.smallest is not None for problem in problems] == [True, False]
    none = failure_of(ForgetsWindows, WINDOW)
    Shrinker(0).shrink(none)
    assert none.smallest is None
    assert not hasattr(none, "__notes__")


def test_a_test_of_a_check_fails_with_its_smallest_step_unless_the_failure_is_known() -> None:
    def run() -> None:
        raise failure_of(ForgetsWindows, WINDOW)

    check, notes = Check("correct/window", run, "windows are right"), []
    for known in ({}, {check.id: "acme#12"}):
        (parameter,) = as_parameters([check], known, lambda check: f"run {check}", shrink=60)
        with pytest.raises(ConformanceError) as caught:
            parameter.values[0]()
        notes.append(caught.value.__notes__)
    assert [note.partition("\n")[0] for note in notes[0]] == [
        "smallest failing step, 1 request of 2 tokens:",
        "rerun: run correct/window",
    ]
    assert notes[1] == ["rerun: run correct/window"]


def test_a_time_that_ends_gives_what_was_found_so_far() -> None:
    problem = failure_of(ForgetsWindows, WINDOW)
    assert problem.step is not None
    found = smallest_step.smallest_step(problem.step, problem.named, seconds=0.0)
    assert found is not None
    assert (found.step, found.is_least) == (problem.step, False)
    assert found.words.endswith(" tokens, when the time to shrink it ended")


def test_a_step_that_is_right_alone_has_no_smaller_one() -> None:
    right = batch_of(TorchBackend, WINDOW).made_of
    assert right is not None
    assert smallest_step.smallest_step(right, "sliding window ignored", 60.0) is None


def test_a_layer_that_the_backend_refuses_is_told_with_the_reasons() -> None:
    spec = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype="float32", kv_cache_dtype="unheard_of")
    with pytest.raises(CheckSkipped, match="unheard_of"):
        assert_step_correct(TorchBackend, spec, [1], [2], device="cpu")


LATENT = latent_dims((64, 16))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"sliding_window": 7}, {"seed": 3}),
        ({"mm_prefix": True}, {}),
        ({"direct_kv": True}, {"key_lens": [50, 60, 9, 5, 33]}),
        ({"attn_type": "encoder_decoder"}, {}),
        ({"sparse": SparseSpec("block", 3, 16)}, {"block_size": 32}),
        ({"kv_cache_dtype": "fp8", "needs_lse": True}, FP8_SCALES),
        ({"causal": False}, {"causal": True}),
        ({"dtype": "bfloat16", "scale": 0.15}, {"layout": "HND"}),
        ({"chunk_size": 24, "has_sinks": True}, {"numbers": Numbers.SHARP}),
        ({"num_kv_heads": 1, "head_size": LATENT.latent_size, "mla": LATENT}, {}),
    ],
    ids=lambda each: " ".join(each),
)
def test_the_text_of_a_step_makes_the_same_batch(
    fields: dict[str, Any], options: dict[str, Any], monkeypatch: Any
) -> None:
    batch, made = batch_of(TorchBackend, SPEC.replace(**fields), **options), []
    step = batch.made_of
    assert step is not None
    monkeypatch.setattr(single_step, "wrong_step", lambda step: made.append(step.batch()))
    run_printed(step_test(step, None))
    assert made[0].spec == batch.spec
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(made[0], name).nan_to_num(), getattr(batch, name).nan_to_num())
    assert torch.equal(made[0].common.block_table_tensor, batch.common.block_table_tensor)
    assert (made[0].common.causal, made[0].spans) == (batch.common.causal, batch.spans)
    if batch.kv_cache is not None:
        assert made[0].kv_cache.stride() == batch.kv_cache.stride()


@pytest.mark.slow
@pytest.mark.rare
def test_most_numeric_mutants_shrink_to_two_requests_and_twenty_tokens() -> None:
    from mutants.running import first_failure
    from test_mutants_numeric import NUMERIC

    sizes = []
    for mutant in NUMERIC:
        problem = first_failure(mutant)
        if isinstance(problem, ConformanceError) and problem.step is not None:
            found = smallest_step.smallest_step(problem.step, problem.named, seconds=10.0)
            sizes += [] if found is None else [(len(found.step.seq_lens), sum(found.step.seq_lens))]
    assert len(sizes) > len(NUMERIC) / 2
    requests, tokens = zip(*sizes, strict=True)
    assert statistics.median(requests) <= 2
    assert statistics.median(tokens) <= 20
