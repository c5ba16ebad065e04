"""As many decodes as before are planned by FlashInfer's planner alone, where it is known to answer as `plan()` does."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from flashinfer_builders import PAGE, builder_of, common_of, costs, layer, run, wrappers
from flashinfer_signatures import VERSIONS

from attnplug.backends.flashinfer.builder import FlashInferMetadataBuilder
from attnplug.backends.flashinfer.native_plan import _WRITTEN, native_plan_of
from attnplug.backends.flashinfer.options import Options
from attnplug.core import LayerSpec
from attnplug.testing import paged_batch

pytestmark = pytest.mark.usefixtures("fake_library")

STEPS = ([3, 14], [9, 1], [16, 16], [2, 5])


def decodes(builder: FlashInferMetadataBuilder, spec: LayerSpec, *steps: list[int]) -> Any:
    """The wrapper that ran these steps, each against the oracle."""
    for tokens in steps:
        batch = paged_batch(spec, [1] * len(tokens), tokens, block_size=PAGE)
        metadata = builder.build(0, batch.common)
        run(builder, batch, metadata)
    return wrappers(metadata, next(iter(builder._groups)))[0]


@pytest.mark.parametrize("fake_version", VERSIONS)
@pytest.mark.parametrize(
    "spec", [layer(), layer(sliding_window=6), layer(has_sinks=True)], ids=["plain", "window", "sinks"]
)
def test_steps_of_as_many_decodes_ask_the_planner_alone(spec: LayerSpec) -> None:
    builder = builder_of({"0": spec})
    wrapper = decodes(builder, spec, *STEPS)
    # Of one request when it was made, then of two; the planner is asked then whether it plans the same.
    assert (wrapper.plans, wrapper.replans) == (2, len(STEPS))
    assert costs(builder) == [(len(STEPS), 0)]
    assert decodes(builder, spec, [4, 4, 4], [8, 9, 9]) is wrapper
    assert (wrapper.plans, wrapper.replans) == (3, len(STEPS) + 1)
    assert decodes(builder, spec, *STEPS) is wrapper
    assert (wrapper.plans, wrapper.replans) == (4, 2 * len(STEPS))


@pytest.mark.parametrize("fake_version", VERSIONS)
def test_captured_steps_do_too(fake_version: str) -> None:
    builder = builder_of({"0": layer()}, cudagraph_batch_sizes=(2,), max_model_len=16)
    capture = dataclasses.replace(common_of([1, 1], [16, 16]), max_seq_len=16)
    kept = wrappers(builder.build_for_cudagraph_capture(capture), next(iter(builder._groups)))[0]
    place = kept._paged_kv_indptr_buf.data_ptr()
    assert decodes(builder, layer(), *STEPS) is kept
    assert (kept.plans, kept.replans) == (1, 1 + len(STEPS))
    assert kept._paged_kv_indptr_buf.data_ptr() == place


def answers_otherwise(wrapper: Any, plan: Any, given: tuple[Any, ...]) -> Any:
    return [*plan(*given)[:-1], 7]


def lists_other_work(wrapper: Any, plan: Any, given: tuple[Any, ...]) -> Any:
    answer = plan(*given)
    given[2][:4] += 1
    wrapper._int_workspace_buffer[:4] += 1
    return answer


def takes_other_arguments(wrapper: Any, plan: Any, given: tuple[Any, ...]) -> Any:
    raise TypeError("Mismatched number of arguments")


def refuses(wrapper: Any, plan: Any, given: tuple[Any, ...]) -> Any:
    raise RuntimeError("Check failed")


@pytest.mark.parametrize("spoil", [answers_otherwise, lists_other_work, takes_other_arguments, refuses])
@pytest.mark.parametrize("captured", [False, True])
def test_a_planner_that_is_not_known_is_left_alone(
    spoil: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper_cls = type(decodes(builder_of({"0": layer()}), layer(), [3, 3]))
    schedule = wrapper_cls._schedule

    def spoiled(self: Any, *given: Any) -> None:
        schedule(self, *given)
        plan = self._cached_module.plan
        self._cached_module.plan = lambda *given: spoil(self, plan, given)

    monkeypatch.setattr(wrapper_cls, "_schedule", spoiled)
    builder = builder_of({"0": layer()}, cudagraph_batch_sizes=(2,), max_model_len=16)
    if captured:
        capture = dataclasses.replace(common_of([1, 1], [16, 16]), max_seq_len=16)
        builder.build_for_cudagraph_capture(capture)
    wrapper = decodes(builder, layer(), *STEPS)
    assert wrapper.plans == 1 + len(STEPS) + 1


@pytest.mark.parametrize("name", ["_cached_module", "_paged_kv_indptr_buf"])
def test_a_name_that_moved_leaves_planning_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = native_plan_of(
        types.SimpleNamespace(
            **{each: torch.zeros(3) for each in (*_WRITTEN, "_cached_module") if each != name}
        ),
        (4, 2, 64, PAGE),
        False,
        -1,
        2,
        torch.zeros(8, dtype=torch.uint8),
        {},
        torch.zeros(1),
    )
    assert found is None


def test_requests_of_a_page_each_prove_nothing() -> None:
    builder = builder_of({"0": layer()})
    wrapper = decodes(builder, layer(), [3, 2], [1, 4], [2, 2])
    assert not wrapper.replans
    decodes(builder, layer(), [3, 14], [9, 1])
    assert wrapper.replans == 2


def test_a_batch_of_another_mask_is_planned_whole() -> None:
    spec = layer(has_sinks=True, causal=False)
    builder, plans = builder_of({"0": spec}), []
    for tokens, causal in (
        ([9, 5], False),
        ([6, 14], False),
        ([3, 3], True),
        ([9, 2], True),
        ([5, 9], False),
    ):
        batch = paged_batch(spec, [1, 1], tokens, block_size=PAGE)
        common = dataclasses.replace(batch.common, causal=causal)
        metadata = builder.build(0, common)
        wrapper = wrappers(metadata, next(iter(builder._groups)))[0]
        plans.append((wrapper.plans, wrapper.replans))
        assert wrapper.planned["causal"] == causal
        run(builder, batch, metadata)
    # Nothing is proved by the third, whose requests have a page each.
    assert plans == [(2, 1), (2, 2), (3, 2), (4, 3), (5, 4)]


def test_a_planner_that_failed_is_followed_by_a_whole_plan() -> None:
    builder = builder_of({"0": layer()})
    wrapper = decodes(builder, layer(), *STEPS)
    plans, planner = wrapper.plans, next(iter(builder._wrappers._wrappers.values()))._native_plan
    assert planner is not None
    good = planner._planner

    def fails(*given: object) -> None:
        raise RuntimeError("out of memory")

    planner._planner = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        builder.build(0, common_of([1, 1], [9, 9]))
    planner._planner = good
    decodes(builder, layer(), [16, 3])
    assert wrapper.plans == plans + 1


def test_a_plan_that_failed_is_made_whole_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of({"0": layer()})
    wrapper = decodes(builder, layer(), [3, 14])

    def fails(*given: object, **keywords: object) -> None:
        wrapper._paged_kv_indptr_buf = torch.zeros(9, dtype=torch.int32)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(wrapper, "plan", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            builder.build(0, common_of([1, 1, 1], [3, 14, 5]))
    plans = wrapper.plans
    decodes(builder, layer(), [9, 1])
    assert wrapper.plans == plans + 1


@pytest.mark.parametrize("tokens", [[9, 1], [4, 14]], ids=["other pages", "other lengths"])
def test_steps_out_of_inference_mode_follow_steps_in_it(tokens: list[int]) -> None:
    """What `plan()` made there cannot be written outside."""
    builder = builder_of({"0": layer()})
    builder.warm_up()
    with torch.inference_mode():
        wrapper = decodes(builder, layer(), [3, 9], [2, 13])
        before = wrapper.plans
        for name in ("_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf"):
            setattr(wrapper, name, getattr(wrapper, name).clone())
    decodes(builder, layer(), tokens)
    assert wrapper.plans == before + 1
    decodes(builder, layer(), [16, 16])
    assert wrapper.plans == before + 1


@pytest.mark.parametrize(
    ("new", "options"),
    [([1, 1], Options(tensor_cores=False)), ([2, 3], Options())],
    ids=["cuda cores", "prefill"],
)
def test_other_planners_are_asked_through_plan(new: list[int], options: Options) -> None:
    builder = builder_of({"0": layer()}, options=options)
    for tokens in STEPS[:3]:
        tokens = [max(each, 3) for each in tokens]
        batch = paged_batch(layer(), new, tokens, block_size=PAGE, seed=tokens[0])
        metadata = builder.build(0, batch.common)
        run(builder, batch, metadata)
    wrapper = wrappers(metadata, next(iter(builder._groups)))[0]
    assert wrapper.plans == 4
    assert not wrapper.replans
