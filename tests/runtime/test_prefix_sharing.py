"""Requests read shared prefixes together, on any backend with LSE: the numbers are the oracle's, and notes say why."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from fake_backends import backend, offered
from model_layers import layer
from served_model import ServedModel

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.errors import BatchError, SpecError
from attnplug.core.metadata import AttentionMetadataBuilder
from attnplug.runtime import AttentionRuntime, StepBatchBuilder
from attnplug.runtime.batch.forest_prices import SharingPrices, prices_of
from attnplug.runtime.steps import prefix_sharing, shared_step
from attnplug.runtime.steps.prefix_sharing import PrefixSharing
from attnplug.runtime.steps.shared_step import SharedStep

FREE = SharingPrices.free()
PARTS: Any = {"get_impl_cls": TorchBackend.get_impl_cls, "get_builder_cls": TorchBackend.get_builder_cls}
FULL = layer(dtype="float32")


def shares(specs: dict[str, LayerSpec] | LayerSpec, prices: Any = FREE, **asked: Any) -> ServedModel:
    """A model whose runtime shares by `prices`."""
    specs = {"0": specs} if isinstance(specs, LayerSpec) else specs
    asked = {"max_model_len": 160, "num_blocks": 400, **asked}
    return ServedModel(specs, memory=lambda plan: {"prefix_sharing": prices}, **asked)


def run_forest(model: ServedModel, seed: int) -> None:
    """Requests come at random depths of others, and run decodes, drafts and prompts."""
    rng = random.Random(seed)
    for number in range(8):
        name = str(number)
        others = [other for other, request in model.requests.items() if request.computed >= 16]
        if others and rng.random() < 0.8:
            other = rng.choice(others)
            blocks = model.requests[other].computed // 16
            # A window may have passed pages, which nobody can take any more.
            held = [b[:blocks] for b in model.requests[other].blocks]
            if all(all(blocks) for blocks in held):
                model.add(name, prefix=(other, 16 * rng.randint(1, blocks)))
        if name not in model.requests:
            model.add(name)
        counts = {each: rng.choice((1, 1, 1, 3)) for each in model.requests if each != name}
        model.step(**counts, **{name: rng.choice((1, 7, 20, 40))})
    for _ in range(3):
        model.step(**dict.fromkeys(model.requests, 1))


KINDS = {
    "full": FULL,
    "groups": layer(dtype="float32", num_heads=6, num_kv_heads=2, head_size_v=4),
    "cap": layer(dtype="float32", logits_soft_cap=2.0),
    "sinks": layer(dtype="float32", has_sinks=True),
    "window": layer(dtype="float32", sliding_window=49),
    "long-window": layer(dtype="float32", sliding_window=150, has_sinks=True, logits_soft_cap=3.0),
    "chunk": layer(dtype="float32", chunk_size=64),
    "uneven-chunk": layer(dtype="float32", chunk_size=24),
    "lse": layer(dtype="float32", needs_lse=True),
    "bfloat16": layer(dtype="bfloat16", has_sinks=True),
    "fp8": layer(dtype="bfloat16", kv_cache_dtype="fp8"),
    "fp8 heads": layer(dtype="bfloat16", kv_cache_dtype="fp8", head_scales=True),
}


class Counted:
    """The shared forwards of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[int] = []
        forward = SharedStep.forward

        def noted(step: SharedStep, *given: Any) -> None:
            self.parts.append(len(step.parts))
            forward(step, *given)

        monkeypatch.setattr(SharedStep, "forward", noted)
        monkeypatch.setattr(TorchMetadataBuilder, "use_cascade_attention", lambda *_, **__: False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_forests_have_the_numbers_of_the_oracle(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    scales = (0.5, 0.25) if kind.startswith("fp8") else (1.0, 1.0)
    run_forest(shares(KINDS[kind], scales=scales), seed)
    if kind not in ("window", "uneven-chunk"):
        assert 2 in counted.parts


def test_layers_of_several_kv_groups_share_each_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    specs = {"0": FULL, "1": layer(dtype="float32", sliding_window=33), "2": FULL, "3": FULL}
    run_forest(shares(specs, num_blocks=800), 5)
    assert counted.parts


def test_a_window_that_begins_at_a_block_shares_the_blocks_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    # A window of 33 tokens: at position 64, key 32 is the first.
    model = shares(layer(dtype="float32", sliding_window=33))
    model.add("a")
    model.step(a=32)
    model.step(a=32)
    model.add("b")
    model.batches.remove_request("b")
    blocks = model.requests["a"].blocks
    model.requests["b"].blocks[:] = [list(held) for held in blocks]
    model.requests["b"].computed = 64
    model.requests["b"].keys = dict(model.requests["a"].keys)
    for held in blocks:
        model.runtime.block_pool.share([block for block in held if block])
    model.batches.add_request("b", blocks, 64)
    model.step(a=1, b=1)
    assert counted.parts == [2]
    model.step(a=1, b=1)
    assert counted.parts == [2]


def forest_of(model: ServedModel, readers: int = 4, prefix: int = 96) -> None:
    """`readers` of one prefix, and a stranger."""
    model.add("first")
    model.step(first=prefix + 1)
    for number in range(readers - 1):
        model.add(f"r{number}", prefix=("first", prefix))
    model.add("stranger")
    model.step(stranger=40, **dict.fromkeys((n for n in model.requests if n != "stranger"), 1))


def test_a_stranger_takes_the_prefix_from_nobody_and_notes_say_what_was_shared() -> None:
    model = shares(FULL)
    forest_of(model)
    assert model.runtime.step_notes == ("KV group 0, TORCH: 1 shared prefixes with 4 readers",)
    model.step(stranger=1)
    assert model.runtime.step_notes == (
        "KV group 0, TORCH: plain, no shared blocks are worth a call of their own",
    )


def test_decodes_of_the_same_requests_look_for_prefixes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []

    def find(self: Any, batch: Any, *given: Any) -> Any:
        searches.append(1)
        return FIND(self, batch, *given)

    monkeypatch.setattr(prefix_sharing, "_STEPS", 5)
    monkeypatch.setattr(PrefixSharing, "_find", find)

    def looked(count: int, **scheduled: int) -> bool:
        searches.clear()
        model.step(**(dict.fromkeys(model.requests, 1) | scheduled))
        assert model.runtime.step_notes[0].endswith(f"with {count} readers")
        return bool(searches)

    model = shares(FULL)
    forest_of(model)
    # The first decode of all looks, four follow it, and the fifth looks again.
    assert [looked(4) for _ in range(7)] == [True, *[False] * 4, True, False]
    # Any other step looks, and leaves what decodes know.
    assert [looked(4, first=2), looked(4)] == [True, False]
    model.remove("r1")
    assert [looked(3), looked(3)] == [True, False]
    model.batches.swap_states(0, 2)
    assert [looked(3), looked(3)] == [True, False]
    model.add("late", prefix=("first", 96))
    assert looked(4, late=3)
    assert [looked(4), looked(4)] == [True, False]
    name = next(iter(model.requests))
    # Decodes know the blocks of the tokens that were computed when they looked.
    model.rollback(**{name: 2})
    assert not looked(4)
    model.rollback(**{name: 2})
    assert [looked(4), looked(4)] == [True, False]


FIND = PrefixSharing._find


def test_profile_steps_of_any_number_of_decodes_follow_one_another() -> None:
    model = shares(FULL)
    for count in (4, 8, 1):
        model.runtime.begin_step(model.batches.profile_step(count, count))
        assert model.runtime.step_notes[0].startswith("KV group 0, TORCH: plain")


def test_a_request_that_gave_its_first_blocks_away_takes_nothing_from_the_others() -> None:
    model = shares(FULL)
    # Without specs a builder cannot know that a layer still attends these blocks, and GPUs check no table.
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 160}
    model.batches = StepBatchBuilder(**sizes, block_sizes=[16])
    forest_of(model)
    model.step(**dict.fromkeys(model.requests, 1))
    assert model.runtime.step_notes[0].endswith("with 4 readers")
    model.batches.free_blocks("first", 0, 2)
    batch = model.batches.step(1)
    ((_, forest),) = model.runtime.prefix_sharing.forests(batch)
    assert not isinstance(forest, str)
    (node,) = forest.nodes
    assert sorted(batch.req_ids[row] for row in node.readers) == ["r0", "r1", "r2"]


def test_sharing_that_does_not_pay_is_declined_and_the_note_says_so() -> None:
    dear = SharingPrices(bandwidth=1e9, reread=1.0, products=1e12, calls=1.0)
    model = shares(FULL, dear)
    forest_of(model)
    (note,) = model.runtime.step_notes
    assert "too little for further calls" in note
    never = shares(FULL, prices=False)
    forest_of(never)
    assert "plain, prefix_sharing=False" in never.runtime.step_notes[0]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (layer(dtype="float32", has_alibi=True), "ALiBi: pieces of a prefix have no positions"),
        (layer(dtype="float32", invariance=("batch",)), "a merge of parts has other bits"),
        (layer(dtype="float32", causal=False), "sees later tokens"),
    ],
    ids=["alibi", "invariance", "two-sided"],
)
def test_layers_that_cannot_share_run_plainly_and_say_why(spec: LayerSpec, reason: str) -> None:
    model = shares(spec)
    if spec.causal:
        forest_of(model)
    else:
        model.add("a")
        model.step(a=5)
    assert reason in model.runtime.step_notes[0]


def test_a_kernel_of_the_backends_own_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(TorchMetadataBuilder, "use_cascade_attention", lambda *_, **__: True)
    model = shares(FULL)
    model.add("a")
    model.step(a=49)
    model.add("b", prefix=("a", 48))
    model.step(a=1, b=1)
    assert counted.parts == []
    assert "by its own kernel" in model.runtime.step_notes[0]


class WithoutPieces(TorchBackend):
    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Any) -> str | None:
        return None if spec.causal else "no keys that all rows see"


def test_a_backend_without_cross_attention_shares_nothing() -> None:
    made = backend(
        "CAUSAL", get_impl_cls=TorchBackend.get_impl_cls, get_builder_cls=TorchBackend.get_builder_cls
    )
    made.supports_combination = WithoutPieces.__dict__["supports_combination"]
    with offered(made):
        model = shares(FULL, backend="CAUSAL")
    forest_of(model)
    assert "pieces of a prefix are refused" in model.runtime.step_notes[0]


class NeverAsked(TorchMetadataBuilder):
    use_cascade_attention = AttentionMetadataBuilder.use_cascade_attention


def test_the_prices_are_prices_or_a_bool() -> None:
    model = shares(FULL)
    with pytest.raises(SpecError, match="prefix_sharing"):
        AttentionRuntime(model.plan, model.tensors, prefix_sharing="yes")  # type: ignore[arg-type]


def test_a_batch_that_was_changed_by_hand_runs_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    model = shares(FULL)
    forest_of(model)
    del counted.parts[:]
    batch = model.begin(**dict.fromkeys(model.requests, 1))
    batch.common.max_seq_len += 1
    model.runtime.begin_step(batch)
    model.check("0", model.draw("0", dict.fromkeys(model.requests, 1)))
    assert counted.parts == []


def test_outputs_that_are_quantised_run_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    model = shares(FULL)
    forest_of(model)
    del counted.parts[:]
    counts = dict.fromkeys(model.requests, 1)
    model.begin(**counts)
    drawn = model.draw("0", counts)
    output = torch.empty(len(counts), 4, 8, dtype=torch.float8_e4m3fn)
    scale = torch.tensor([0.05])
    model.runtime.forward("0", drawn.query, drawn.key, drawn.value, output, output_scale=scale)
    assert counted.parts == []
    found = output.float() * 0.05
    assert (found - drawn.expected).abs().max() < 0.2


def test_draft_steps_and_graphs_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    config = BuilderConfig(max_num_seqs=8, max_num_batched_tokens=256, num_speculative_tokens=2)
    model = shares(FULL, config=config)
    forest_of(model)
    del counted.parts[:]
    model.draft(0, **dict.fromkeys(model.requests, 1))
    assert counted.parts == []


def test_the_lse_of_a_layer_that_asks_for_it_is_that_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    found = []
    for prices in (FREE, False):
        model = shares(layer(dtype="float32", needs_lse=True, has_sinks=True), prices)
        forest_of(model)
        counts = dict.fromkeys(model.requests, 1)
        model.begin(**counts)
        drawn = model.draw("0", counts)
        lse = torch.empty(len(counts) + 2, 4)
        output = model.runtime.forward("0", drawn.query, drawn.key, drawn.value, output_lse=lse)
        found.append((output, lse[: len(counts)]))
    assert counted.parts
    for shared, plain in zip(*found, strict=True):
        torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)


def test_mistakes_of_a_forest_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that a stranger reads too, a level that is lost, and own tokens that are left out."""
    Counted(monkeypatch)
    right = shared_step.merge_lists

    def lost(parts: Any, tokens: int) -> Any:
        starts, entries = right(parts, tokens)
        return starts, entries[::-1].copy()

    monkeypatch.setattr(shared_step, "merge_lists", lost)
    with pytest.raises(AssertionError):
        forest_of(shares(FULL))


def test_a_batch_without_its_builders_rows_is_plain() -> None:
    model = shares(FULL)
    forest_of(model)
    with pytest.raises(BatchError, match="metadata"):
        model.runtime.begin_step(model.batches.step(1, trees={"first": [-1]}), metadata={})


def test_halves_of_a_composite_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    with offered(backend("HALF", **PARTS)):
        model = shares(FULL, backend="TORCH+HALF")
    run_forest(model, 1)
    assert 2 in counted.parts


def test_a_composite_whose_last_range_is_anothers_has_the_prices_of_its_decodes() -> None:
    with offered(backend("HALF", **PARTS)):
        model = shares(FULL, True, backend="TORCH+TORCH[prefill query 9.. on HALF]")
    (group,) = model.runtime.prefix_sharing.layers
    assert group.prices == shares(FULL, True, backend="TORCH").runtime.prefix_sharing.layers[0].prices
    assert group.prices is not None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (FULL, None),
        (layer(dtype="float32", has_alibi=True), "ALiBi: pieces of a prefix have no positions"),
        (layer(attn_type="encoder_decoder"), "only decoder layers with pages have prefixes"),
    ],
)
def test_a_decision_says_whether_a_layer_can_share(spec: LayerSpec, reason: str | None) -> None:
    decision = attnplug.select(spec, "cpu")
    assert decision.prefix_refusal == reason
    assert decision.shares_prefixes is (reason is None)


def test_a_step_whose_layers_the_host_would_hold_up_is_plain() -> None:
    """Outside of graphs the host takes longer for shared prefixes than the device for plain ones."""
    free = SharingPrices.free()
    model = shares(FULL, dataclasses.replace(free, safety=1e-9, host=1e9))
    forest_of(model)
    assert "and the host more for shared prefixes" in model.runtime.step_notes[0]


def test_prefixes_below_the_one_that_all_requests_share_are_worth_more_than_a_kernel_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(TorchMetadataBuilder, "use_cascade_attention", lambda *_, **__: True)
    model = shares(FULL)
    model.add("stem")
    model.step(stem=17)
    for name in ("a", "b"):
        model.add(name, prefix=("stem", 16))
        model.step(**{name: 64})
        for each in ("1", "2"):
            model.add(name + each, prefix=(name, 80))
    model.step(**dict.fromkeys(model.requests, 1))
    assert counted.parts[-1] == 2
    assert "3 shared prefixes with" in model.runtime.step_notes[0]


@pytest.mark.parametrize("name", ["TRITON", "FLASH_ATTN_4+TRITON", "A+TRITON[prefill query ..384 on TRITON]"])
def test_the_prices_of_a_composite_are_those_of_its_decodes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert prices_of(torch.device("cuda"), name) == prices_of(torch.device("cuda"), "TRITON")
    assert prices_of(torch.device("cuda"), "TRITON+OTHER") is None
