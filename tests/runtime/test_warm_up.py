"""Warming up: which steps are run for which layers, what is reported, and that no page is touched."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.spec import Phase
from attnplug.errors import BatchError
from attnplug.runtime import AttentionRuntime
from attnplug.runtime.steps.dummy_steps import shapes_within

SPEC = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32", block_size=8)
LIMITS = BuilderConfig(max_num_seqs=6, max_num_batched_tokens=20, num_speculative_tokens=1)


class Compiler:
    """A library that compiles once for each number of rows, and whether there is an LSE."""

    def __init__(self):
        self.built, self.watched = set(), None

    def use(self, *key: object) -> None:
        if key not in self.built:
            self.built.add(key)
            if self.watched is not None:
                self.watched.append(f"kernel{key}")


@pytest.fixture
def runtime_of(monkeypatch):
    """`runtime_of(layers, **)` on TORCH, made to compile."""
    library = Compiler()

    @contextlib.contextmanager
    def watch_compiling():
        library.watched = []
        yield library.watched
        library.watched = None

    attend = TorchImpl.attend

    def attend_compiled(self, layer, query, *arguments, output_lse=None, **options):
        library.use(query.shape[0], output_lse is not None)
        return attend(self, layer, query, *arguments, output_lse=output_lse, **options)

    monkeypatch.setattr(TorchImpl, "attend", attend_compiled)
    monkeypatch.setattr(TorchBackend, "watch_compiling", watch_compiling)
    monkeypatch.setattr(TorchBackend, "compile_key", lambda spec: (spec.head_size, spec.required_features()))

    def make(layers, config=LIMITS, **options):
        plan = attnplug.plan(layers, device="cpu", backend="TORCH", num_blocks=9, **options)
        return AttentionRuntime(plan, config=config)

    return make


def test_one_layer_stands_for_all_that_compile_the_same(runtime_of):
    layers = {"a": SPEC, "b": SPEC, "c": SPEC.replace(sliding_window=4), "d": SPEC}
    assert {step.layer for step in runtime_of(layers).warm_up().steps} == {"a", "c"}


def test_decodes_of_each_speculated_length_then_prompts_alone_and_as_many_as_fit(runtime_of):
    steps = runtime_of({"a": SPEC}).warm_up().steps
    decodes = [(s.requests, s.query_len) for s in steps if s.phase is Phase.DECODE]
    prefills = [(s.requests, s.query_len, s.computed) for s in steps if s.phase is Phase.PREFILL]
    assert decodes == [(1, 1), (6, 1), (1, 2), (6, 2)]
    alone = [(1, n, computed) for n in (3, 4, 8, 16, 20) for computed in (False, True)]
    assert sorted(prefills) == sorted([*alone, (6, 3, True), (5, 4, True), (2, 8, True)])


def test_prompts_are_no_longer_than_sequences_may_be(runtime_of):
    config = BuilderConfig(max_num_seqs=2, max_num_batched_tokens=9000, max_model_len=5)
    steps = runtime_of({"a": SPEC}, config).warm_up().steps
    assert max(step.query_len for step in steps) == 5


@pytest.mark.parametrize(("tokens", "longest"), [(700, 700), (9000, 9000), (40_000, 16_384)])
def test_the_longest_prompt_of_a_step_is_run_once(tokens, longest):
    config = BuilderConfig(max_num_seqs=2, max_num_batched_tokens=tokens)
    shapes = list(shapes_within(config, TorchBackend, is_paged=True))
    assert max(shape.query_len for shape in shapes) == longest
    powers = [shape.query_len for shape in shapes if shape.query_len not in (longest, 1)]
    assert max(powers) == min(1024, 1 << (longest - 1).bit_length() - 1)
    assert [(s.requests, s.computed) for s in shapes if s.query_len == longest][:2] == [(1, 0), (1, 1)]


def test_short_queries_are_run_for_a_few_requests_too():
    """Kernels of latents that merge the parts of a request differ by their number, by factors of 8."""
    config = BuilderConfig(max_num_seqs=100, max_num_batched_tokens=1000, num_speculative_tokens=1)
    shapes = list(shapes_within(config, TorchBackend, is_paged=True))
    counts = {n: [s.requests for s in shapes if s.query_len == n and s.computed] for n in (1, 2, 16, 32)}
    assert counts == {1: [1, 8, 64, 100], 2: [1, 8, 64, 100], 16: [1, 8, 62], 32: [1, 31]}


@pytest.mark.parametrize(
    ("most", "length", "expected"),
    [(9, None, (1, 200)), (9, 300, (1, 200)), (9, 82, (4, 50)), (9, 50, None), (3, 82, None)],
)
def test_a_step_of_many_computed_tokens_is_run_if_there_can_be_one(most, length, expected):
    config = BuilderConfig(max_num_seqs=most, max_num_batched_tokens=256, max_model_len=length)
    shapes = list(shapes_within(config, TorchBackend, is_paged=True, context=200))
    found = [(s.requests, s.computed) for s in shapes if s.computed > 1]
    assert found == ([] if expected is None else [expected])


def test_the_report_names_what_was_compiled_and_when(runtime_of):
    runtime = runtime_of({"a": SPEC.replace(needs_lse=True)})
    report = runtime.warm_up()
    assert report.steps[0].compiled == ("kernel(1, False)", "kernel(1, True)")
    assert len(report.compiled) == len(set(report.compiled)) == 20
    assert report.seconds == sum(step.seconds for step in report.steps) > 0
    assert "kernel(6, True)" in str(report)
    assert str(report).startswith("20 kernels compiled in 17 steps")
    assert runtime.warm_up().compiled == ()


def test_what_compiles_is_logged_with_its_layer(runtime_of, caplog):
    with caplog.at_level(logging.INFO, logger="attnplug"):
        runtime_of({"a": SPEC, "b": SPEC}).warm_up()
    assert "warming up TORCH for layer a and 1 alike" in caplog.messages
    assert "TORCH compiled kernel(6, False) for decode of a" in caplog.messages


def test_backends_that_compile_nothing_are_passed_over():
    plan = attnplug.plan({"a": SPEC}, device="cpu", backend="TORCH", num_blocks=9)
    report = AttentionRuntime(plan).warm_up()
    assert report.steps == report.compiled == ()
    assert "nothing to warm up" in str(report)


def test_no_page_is_written_and_the_step_that_was_begun_ends(runtime_of):
    runtime = runtime_of({"a": SPEC})
    for cache in runtime.kv_caches.values():
        cache.fill_(3.0)
    builder = runtime.step_batch_builder(16)
    builder.add_request("r", [[1]])
    runtime.begin_step(builder.step())
    runtime.warm_up()
    assert all((cache == 3.0).all() for cache in runtime.kv_caches.values())
    with pytest.raises(BatchError, match="has no step"):
        runtime.forward("a", torch.zeros(1, 2, 16))


def test_layers_that_read_anothers_pages_and_encoders_are_warmed_up_as_they_are_called(runtime_of):
    layers = {
        "writer": SPEC,
        "reader": SPEC,
        "encoder": SPEC.replace(attn_type="encoder_only", causal=False, direct_kv=True, block_size=None),
        "cross": SPEC.replace(attn_type="encoder_decoder", causal=False),
    }
    report = runtime_of(layers, kv_sharing={"reader": "writer"}).warm_up()
    assert {step.layer for step in report.steps} == set(layers)
    assert {step.phase for step in report.steps if step.layer == "encoder"} == {Phase.PREFILL}
    assert min(step.query_len for step in report.steps if step.layer == "encoder") == 1


def test_a_closed_runtime_is_not_warmed_up(runtime_of):
    runtime = runtime_of({"a": SPEC})
    runtime.close()
    with pytest.raises(BatchError, match="closed"):
        runtime.warm_up()
