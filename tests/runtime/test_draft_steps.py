"""Draft steps of speculative decoding: which hooks the runtime calls, and that no number changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fake_backends import backend, offered
from model_layers import layer
from served_model import ServedModel

from attnplug import plan
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import BuilderConfig
from attnplug.core.errors import BatchError
from attnplug.runtime import AttentionRuntime, build_attn_metadata
from attnplug.testing import direct_batch

FULL = layer(dtype="float32")
SLIDING = layer(dtype="float32", sliding_window=20)
HYBRID = {"layers.0": SLIDING, "layers.1": SLIDING, "layers.2": FULL}
DRAFTS = BuilderConfig(max_num_seqs=8, max_num_batched_tokens=256, num_speculative_tokens=3)


def table_of(common: Any) -> list[list[int]]:
    return common.block_table_tensor.tolist()


class Recording(TorchMetadataBuilder):
    """TORCH's builder, which notes every call of a hook and its first layer."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.calls: list[tuple[Any, ...]] = []

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        self.calls.append(("build", common_prefix_len, table_of(common_attn_metadata), fast_build))
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        self.calls.append(("draft", draft_index, table_of(common_attn_metadata)))
        return super().build(0, common_attn_metadata, True)

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        self.calls.append(("update", blk_table.tolist(), slot_mapping.tolist()))
        return super().update_block_table(metadata, blk_table, slot_mapping)


class CannotUpdate(Recording):
    supports_update_block_table = False


def served(specs: Any, builder: Any = Recording, rule: str = "RECORDS", **asked: Any) -> ServedModel:
    """A model on TORCH with this builder, and with 5 computed tokens of one request."""
    records = backend("RECORDS", get_builder_cls=lambda: builder)
    with offered(records):
        model = ServedModel(specs, backend=rule, config=DRAFTS, **asked)
    model.add("a")
    model.step(a=5)
    for group in model.runtime.attention_groups:
        for each in members(group.builder):
            each.calls.clear()
    return model


def members(builder: Any) -> list[Any]:
    halves = [getattr(builder, name, None) for name in ("decode", "prefill")]
    return [each for each in (builder, *halves) if isinstance(each, Recording)]


def hooks(model: ServedModel) -> list[list[str]]:
    """The names of the hooks that each group's builder was called by."""
    return [[call[0] for call in members(group.builder)[0].calls] for group in model.runtime.attention_groups]


def test_a_draft_step_builds_each_group_for_drafting_and_updates_its_twins():
    model = served(HYBRID)
    batch = model.draft(2, a=1)
    first, twin, full = (group.builder for group in model.runtime.attention_groups)
    tables = [batch.of_group(index)[0].tolist() for index in range(3)]
    assert first.calls == [("draft", 2, tables[0])]
    assert twin.calls == [("update", tables[1], batch.of_group(1)[1].tolist())]
    assert full.calls == [("draft", 2, tables[2])]
    model.rollback(a=1)
    model.step(a=1)
    assert hooks(model) == [["draft", "build"], ["update", "update"], ["draft", "build"]]
    assert first.calls[1][::3] == ("build", False)


def test_a_builder_that_cannot_update_builds_each_group():
    model = served(HYBRID, CannotUpdate)
    model.draft(0, a=3)
    model.step(a=1)
    assert hooks(model) == [["draft", "build"]] * 3


def test_the_halves_of_a_composite_build_for_drafting_their_part():
    model = served(HYBRID, CannotUpdate, "TORCH,decode=RECORDS")
    model.add("b")
    batch = model.draft(1, a=1, b=17)
    assert hooks(model) == [["draft"]] * 3
    for index, group in enumerate(model.runtime.attention_groups):
        assert members(group.builder)[0].calls == [("draft", 1, batch.block_tables[index, :1].tolist())]


def test_a_composite_updates_its_twin_group():
    model = served(HYBRID, rule="TORCH,decode=RECORDS")
    model.add("b")
    model.draft(1, a=1, b=17)
    assert hooks(model) == [["draft"], ["update"], ["draft"]]


def test_layers_with_direct_keys_are_built_for_drafting_too():
    records = backend("RECORDS", get_builder_cls=lambda: Recording)
    spec = layer(dtype="float32", direct_kv=True, causal=False, attn_type="encoder_only")
    with offered(records):
        planned = plan({"layers.0": spec}, "cpu", backend="RECORDS")
    with AttentionRuntime(planned, config=DRAFTS) as runtime:
        runtime.begin_step(direct=direct_batch(spec, [3], [3]).common, draft_index=1)
        [group] = runtime._direct_groups
        assert [call[:2] for call in group.builder.calls] == [("draft", 1)]


@pytest.mark.parametrize(
    "rule",
    [
        "TORCH",
        pytest.param("TRITON", marks=pytest.mark.slow),
        pytest.param("TRITON,decode=TORCH", marks=pytest.mark.slow),
        "TORCH,decode=TRITON",
    ],
)
def test_drafts_are_run_rolled_back_and_verified_with_the_oracles_numbers(rule):
    full = layer(dtype="float32", head_size=16)
    specs = {"sliding": full.replace(sliding_window=9, logits_soft_cap=5.0), "full": full}
    model = ServedModel(specs, backend=rule, config=DRAFTS)
    model.add("a")
    model.step(a=13)
    model.add("b", prefix=("a", 0))
    model.draft(0, a=1, b=6)
    for index in (1, 2):
        model.draft(index, a=1, b=1)
    model.rollback(a=3, b=2)
    model.step({"a": 2, "b": 1}, a=4, b=4)
    model.draft(0, a=2, b=1)
    model.rollback(a=2)
    model.step(a=4, b=2)
    assert {name: request.computed for name, request in model.requests.items()} == {"a": 19, "b": 10}


def speculate(model: ServedModel, draw: random.Random, turns: int = 12) -> None:
    """Requests come, share prefixes and go; each round drafts, takes the drafts back and verifies some of them."""
    for turn in range(turns):
        names = list(model.requests)
        if len(names) < 4 and turn % 2 == 0:
            # Pages that another request has computed in full, and whose window has not passed them.
            other = draw.choice([*names, None])
            blocks = model.requests[other].blocks if other else []
            pages = min((group.index(0) if 0 in group else len(group) for group in blocks), default=0)
            done = model.requests[other].computed // 16 if other else 0
            prefix = (other, 16 * min(pages, done)) if other and min(pages, done) else None
            model.add(f"r{turn}", prefix=prefix)
            model.step(**{f"r{turn}": draw.randint(1, 25)})
        names = list(model.requests)
        drafts = {name: draw.randint(0, 3) for name in names}
        for index in range(3):
            model.draft(index, **{name: 1 for name in names if drafts[name] > index})
        model.rollback(**drafts)
        kept = {name: draw.randint(1, 1 + drafts[name]) for name in names}
        model.step(kept, **{name: 1 + drafts[name] for name in names})
        if len(names) == 4:
            model.remove(draw.choice(names))


@pytest.mark.parametrize(
    ("rule", "seed"),
    [
        ("TORCH", 0),
        ("TRITON,decode=TORCH", 1),
        *(
            # CI has one seed, and interpreted decodes once: after TRITON's own prefills.
            pytest.param(
                rule,
                seed,
                marks=[pytest.mark.slow] + [pytest.mark.rare] * (seed == 3 or rule == "TORCH,decode=TRITON"),
            )
            for rule in ("TORCH", "TRITON", "TORCH,decode=TRITON", "TRITON,decode=TORCH")
            for seed in (2, 3)
        ),
    ],
)
def test_any_drafting_has_the_oracles_numbers(rule, seed):
    full = layer(dtype="float32", head_size=16)
    specs = {
        "0": full.replace(sliding_window=17),
        "1": full.replace(sliding_window=17),
        "2": full,
        "3": full.replace(logits_soft_cap=5.0),
        "4": full,
    }
    asked = {"kv_sharing": {"4": "2"}, "max_model_len": 128, "num_blocks": 400}
    model = ServedModel(specs, backend=rule, config=DRAFTS, seed=seed, **asked)
    # From the seventh turn on there are four requests, of which one goes. Interpreted decodes take half a minute.
    is_slow = rule in ("TRITON", "TORCH,decode=TRITON") and not torch.cuda.is_available()
    speculate(model, random.Random(seed), 8 if is_slow else 12)


def test_a_verification_of_all_drafts_is_a_decode_of_a_composite():
    model = served({"layers.0": FULL}, CannotUpdate, "TORCH,decode=RECORDS")
    model.step({"a": 2}, a=4)
    assert hooks(model) == [["build"]]
    model.step(a=5)
    assert hooks(model) == [["build"]], "5 tokens are more than one and its 3 drafts"


@pytest.mark.parametrize(
    ("drafts", "index", "said"),
    [
        (3, 3, "draft_index=3 must be in 0 .. 2, below config.num_speculative_tokens=3"),
        (3, -1, "draft_index=-1 must be in 0 .. 2"),
        (0, 0, "draft_index=0 needs a runtime that drafts, and config.num_speculative_tokens is 0"),
    ],
)
def test_a_draft_step_out_of_range_is_refused_and_no_step_is_active(drafts, index, said):
    config = BuilderConfig(max_num_seqs=8, max_num_batched_tokens=256, num_speculative_tokens=drafts)
    model = ServedModel({"layers.0": FULL}, config=config)
    model.add("a")
    model.begin(a=1)
    with pytest.raises(BatchError) as error:
        model.begin(index, a=1)
    assert said in str(error.value)
    with pytest.raises(BatchError, match="has no step"):
        model.runtime.forward("layers.0", torch.zeros(1, 4, 16))


def test_metadata_that_is_built_already_and_captures_are_not_draft_steps():
    model = ServedModel({"layers.0": FULL}, config=DRAFTS)
    model.add("a")
    batch = model.begin(a=1)
    built = build_attn_metadata(model.runtime.attention_groups, batch, model.runtime.kv_cache_config)
    with pytest.raises(BatchError, match="draft_index=0 has no effect on metadata that is already built"):
        model.runtime.begin_step(batch, metadata=built, draft_index=0)
    with pytest.raises(BatchError, match="draft_index=0 is not for captures"):
        build_attn_metadata(
            model.runtime.attention_groups,
            batch,
            model.runtime.kv_cache_config,
            for_capture=True,
            draft_index=0,
        )
