"""Plans, pages and steps of layers that keep a state, beside attention layers of the same model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from families import FAMILIES, draw
from state_serving import forward_inputs, runtime_of

import attnplug
from attnplug.core import BuilderConfig, ContextParallel, LayerSpec, LayerTensors
from attnplug.errors import BatchError, LayoutError, NoBackendError, SpecError
from attnplug.runtime import AttentionRuntime, ModelPlan, StateStep, serving_states
from attnplug.testing.state_oracle import reference_states

ATTENTION = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")
HYBRID = {"conv": FAMILIES["conv"], "gdn": FAMILIES["gdn"], "full": ATTENTION}
WEIGHT = LayerTensors(conv_weight=torch.ones(7, 4))
GIB = 2**30


def hybrid(num_states: int = 9, **more: Any) -> AttentionRuntime:
    made = attnplug.plan(HYBRID, "cpu", num_blocks=9, num_states=num_states)
    return AttentionRuntime(made, {"conv": WEIGHT}, config=BuilderConfig(max_model_len=64), **more)


def inputs(family: str, tokens: int, **more: Any) -> dict[str, Any]:
    return forward_inputs(draw(family, tokens, **more))


class TestPlan:
    def test_bytes_are_those_that_are_allocated(self) -> None:
        made = attnplug.plan(HYBRID, "cpu", num_blocks=9, num_states=9)
        runtime = hybrid()
        caches = runtime._states.caches.values()
        assert made.states.bytes == sum(cache.numel() * cache.element_size() for cache in caches)
        assert made.states.bytes == 9 * (7 * 3 * 4 + 4 * 8 * 5 * 4)
        assert [group.layer_names for group in made.kv_cache_config.kv_cache_groups] == [("full",)]
        assert "9 states of 724 bytes" in str(made)

    def test_the_default_is_for_256_requests_and_their_drafts(self) -> None:
        assert attnplug.plan(HYBRID, "cpu").num_states == 257
        assert attnplug.plan(serving_states(HYBRID, drafts=3), "cpu").num_states == 1025
        assert attnplug.plan({"full": ATTENTION}, "cpu").num_states is None

    def test_memory_is_given_to_states_first(self) -> None:
        made = attnplug.plan(HYBRID, "cpu", memory=2**20, num_states=65)
        block = 16 * 2 * 16 * 4
        assert made.num_blocks == (2**20 - 65 * 724) // block
        assert made.budget.states.bytes == 65 * 724

    def test_a_plan_without_a_block_for_each_request_is_refused_with_the_bytes_of_both(self) -> None:
        with pytest.raises(LayoutError) as caught:
            attnplug.plan(HYBRID, "cpu", memory=200_000, num_states=129)
        text = "must have room for 129 states of 724 bytes, and for 129 blocks of 2,048 bytes"
        assert text in str(caught.value)

    def test_256_requests_of_qwen3_next_take_18_gib(self) -> None:
        state = LayerSpec(num_heads=32, num_kv_heads=16, head_size=128, state=FAMILIES["gdn"].state)
        conv = LayerSpec(num_heads=8192, num_kv_heads=8192, head_size=1, state=FAMILIES["conv"].state)
        full = LayerSpec(num_heads=16, num_kv_heads=2, head_size=256)
        layers = {f"s{i}": state for i in range(36)} | {f"c{i}": conv for i in range(36)}
        made = attnplug.plan({**layers, **{f"f{i}": full for i in range(12)}}, "cpu", memory="40GiB")
        assert made.states.bytes / GIB == pytest.approx(18.4, rel=0.01)

    def test_layers_advance_together_so_drafts_and_checkpoints_are_one_for_all(self) -> None:
        mixed = {**serving_states({"gdn": FAMILIES["gdn"]}, block_size=64), "kda": FAMILIES["kda"]}
        with pytest.raises(
            LayoutError, match=r"must be one for all layers with a state.*64 of gdn, None of kda"
        ):
            attnplug.plan(mixed, "cpu")

    def test_json_keeps_the_pool(self) -> None:
        made = attnplug.plan(HYBRID, "cpu", num_blocks=9, num_states=9)
        again = ModelPlan.from_json(made.to_json())
        assert again.states == made.states
        assert again.digest() != attnplug.plan(HYBRID, "cpu", num_blocks=9, num_states=8).digest()

    def test_ranks_cannot_share_the_tokens_of_a_state(self) -> None:
        with pytest.raises(NoBackendError, match="a state not supported under context parallelism"):
            attnplug.plan(HYBRID, "cpu", num_blocks=9, context_parallel=ContextParallel(size=2, rank=0))

    def test_states_of_a_model_without_any_are_refused(self) -> None:
        with pytest.raises(LayoutError, match="num_states=9 must be None: no layer keeps a state"):
            attnplug.plan({"full": ATTENTION}, "cpu", num_states=9)
        with pytest.raises(SpecError, match="num_states"):
            attnplug.plan(HYBRID, "cpu", num_states=1)


def test_attention_and_states_of_one_model_run_in_one_step() -> None:
    runtime = hybrid()
    builder, table = runtime.step_batch_builder(), runtime.state_table()
    whole = {name: draw(name, 9) for name in ("conv", "gdn")}
    whole["conv"] = dataclasses.replace(whole["conv"], weight=torch.ones(7, 4), bias=None)
    right = {name: reference_states(HYBRID[name], each)[0] for name, each in whole.items()}
    builder.add_request("a", [[1]])
    table.add_request("a")
    at = 0
    for count in (5, 1, 3):
        batch = builder.step(count)
        runtime.begin_step(batch, states=table.step(batch))
        for name, each in whole.items():
            found = runtime.forward(name, **forward_inputs(each.rows(slice(at, at + count))))
            assert torch.allclose(found.double(), right[name][at : at + count], atol=1e-5)
        runtime.forward("full", torch.ones(count, 2, 16), torch.ones(count, 1, 16), torch.ones(count, 1, 16))
        builder.finish_step()
        table.finish_step()
        at += count


def test_heads_of_two_ranks_are_the_heads_of_one() -> None:
    spec = FAMILIES["gdn"]
    half = spec.replace(num_heads=2, num_kv_heads=1)
    whole, given = runtime_of("gdn"), draw("gdn", 11)
    plan = attnplug.plan({"s": half}, "cpu", num_states=5)
    outputs = []
    for runtime, heads, keys in (
        (whole, slice(None), slice(None)),
        (AttentionRuntime(plan), slice(0, 2), slice(0, 1)),
        (AttentionRuntime(plan), slice(2, 4), slice(1, 2)),
    ):
        table = runtime.state_table()
        table.add_request("a")
        runtime.begin_step(states=table.step({"a": 11}))
        rank = {
            name: each[:, keys if name in ("query", "key") else heads]
            for name, each in forward_inputs(given).items()
        }
        outputs.append(runtime.forward("s", **rank))
    assert torch.allclose(outputs[0], torch.cat(outputs[1:], 1), atol=1e-6)


class TestOneRun:
    def test_a_second_run_on_overwritten_states_is_refused(self) -> None:
        runtime = runtime_of("gdn")
        table = runtime.state_table()
        table.add_request("a")
        # A first chunk starts from zeros, so it can be repeated.
        runtime.begin_step(states=table.step({"a": 4}))
        first = runtime.forward("s", **inputs("gdn", 4))
        assert torch.equal(runtime.forward("s", **inputs("gdn", 4)), first)
        table.finish_step()
        runtime.begin_step(states=table.step({"a": 1}))
        runtime.forward("s", **inputs("gdn", 1))
        with pytest.raises(
            BatchError, match="ran in this step and overwrote the states that it started from"
        ):
            runtime.forward("s", **inputs("gdn", 1))
        with pytest.raises(BatchError, match="ran on the pages that it started from, and was not finished"):
            table.step({"a": 1})

    def test_a_layer_can_be_repeated_where_pages_differ(self) -> None:
        runtime = runtime_of("gdn")
        table = runtime.state_table(in_place=False)
        table.add_request("a")
        for _ in range(3):
            step = table.step({"a": 2})
            runtime.begin_step(states=step)
            first = runtime.forward("s", **inputs("gdn", 2))
            assert not step.overwrites
            assert torch.equal(runtime.forward("s", **inputs("gdn", 2)), first)
            table.finish_step()

    def test_a_call_that_is_refused_counts_as_no_run(self) -> None:
        runtime = runtime_of("gdn")
        table = runtime.state_table()
        table.add_request("a")
        runtime.begin_step(states=table.step({"a": 2}))
        table.finish_step()
        runtime.begin_step(states=table.step({"a": 1}))
        with pytest.raises(BatchError, match=r"decay=None of layer s must be a torch.Tensor"):
            runtime.forward("s", **{**inputs("gdn", 1), "decay": None})
        runtime.forward("s", **inputs("gdn", 1))

    def test_padding_changes_no_page(self) -> None:
        runtime = hybrid()
        batch = runtime.step_batch_builder().profile_step(2, 6)
        runtime.begin_step(batch, states=StateStep.padding(batch.common))
        runtime.forward("gdn", **inputs("gdn", 6))
        runtime.forward("gdn", **inputs("gdn", 6))
        assert all(not cache.any() for cache in runtime._states.caches.values())

    @pytest.mark.parametrize("call", ["step", "remove_request"])
    def test_a_step_whose_pages_were_given_away_is_refused(self, call: str) -> None:
        runtime = runtime_of("gdn")
        table = runtime.state_table(in_place=False)
        table.add_request("a")
        step = table.step({"a": 3})
        runtime.begin_step(states=step)
        if call == "remove_request":
            table.remove_request("a")
        else:
            table.add_request("b")
            # Its pages are those of the step before, which was not finished.
            table.step({"b": 2})
        text = f"is out of date: {call} was called after it was made"
        with pytest.raises(BatchError, match=text):
            runtime.forward("s", **inputs("gdn", 3))
        with pytest.raises(BatchError, match=text):
            runtime.begin_step(states=step)
        assert not any(cache.any() for cache in runtime._states.caches.values())

    def test_a_step_stays_where_the_next_one_is_refused(self) -> None:
        runtime = runtime_of("gdn", num_states=3)
        table = runtime.state_table()
        table.add_request("a")
        runtime.begin_step(states=table.step({"a": 3}))
        runtime.forward("s", **inputs("gdn", 3))
        for refused in ({"a": -1}, {"a": 2**40}, {"b": 1}):
            with pytest.raises(BatchError):
                table.step(refused)
        with pytest.raises(BatchError, match=r"new tokens must be in 0 \.\. 16777216"):
            table.step({"a": -1})
        table.add_request("b")
        table.add_request("c")
        with pytest.raises(BatchError, match="the free blocks of 3"):
            table.step({"a": 1, "b": 1, "c": 1})
        table.finish_step()
        assert table.step({"a": 1}).common.seq_lens.tolist() == [4]


class TestRefusals:
    def test_a_layer_with_a_state_needs_states(self) -> None:
        runtime = hybrid()
        builder, table = runtime.step_batch_builder(), runtime.state_table()
        builder.add_request("a", [[1]])
        table.add_request("a")
        batch = builder.step(2)
        runtime.begin_step(batch)
        with pytest.raises(BatchError, match="keeps a state and has no step; call begin_step with states"):
            runtime.forward("gdn", **inputs("gdn", 2))
        states = table.step(batch)
        with pytest.raises(BatchError, match="is of another batch"):
            runtime.begin_step(builder.step(2), states=states)

    def test_pages_of_another_runtimes_pool_are_refused(self) -> None:
        runtime, other = hybrid(), hybrid()
        table = other.state_table()
        table.add_request("a")
        states = table.step({"a": 2})
        with pytest.raises(BatchError, match="has pages of another pool; make it by the table of this"):
            runtime.begin_step(states=states)
        other.begin_step(states=states)

    def test_arguments_of_the_other_kind_are_refused(self) -> None:
        runtime = hybrid()
        table = runtime.state_table()
        table.add_request("a")
        runtime.begin_step(states=table.step({"a": 2}))
        with pytest.raises(BatchError, match="output_lse='given' must be None: layer gdn keeps a state"):
            runtime.forward("gdn", **inputs("gdn", 2), output_lse=torch.zeros(2, 4))
        with pytest.raises(BatchError, match="decay='given' must be None: layer full keeps no state"):
            runtime.forward("full", torch.ones(2, 2, 16), decay=torch.zeros(2, 2))
        with pytest.raises(
            BatchError, match=r"beta='given' of layer conv must be None: its rule is conv of 4 silu"
        ):
            runtime.forward("conv", torch.ones(2, 7), beta=torch.ones(2, 7))
        with pytest.raises(
            BatchError, match=r"value=\(2, 4, 8\) of layer gdn must have the shape \(at least 2, 4, 5\)"
        ):
            runtime.forward("gdn", **{**inputs("gdn", 2), "value": torch.zeros(2, 4, 8)})

    def test_debug_names_nan(self) -> None:
        runtime = hybrid(debug=True)
        table = runtime.state_table()
        table.add_request("a")
        runtime.begin_step(states=table.step({"a": 2}))
        given = inputs("gdn", 2)
        given["beta"][1] = torch.nan
        with pytest.raises(BatchError, match=r"beta\[1\]=nan of layer gdn must not be NaN"):
            runtime.forward("gdn", **given)

    def test_a_closed_runtime_has_no_states(self) -> None:
        runtime = hybrid()
        runtime.close()
        with pytest.raises(BatchError, match="cannot be used any more"):
            runtime.state_table()
        with pytest.raises(BatchError, match="layers keep no states"):
            _ = AttentionRuntime(attnplug.plan({"full": ATTENTION}, "cpu", num_blocks=9)).state_pool


class TestTable:
    def table(self, **more: Any) -> Any:
        return runtime_of("gdn", **{"drafts": 2, "block_size": 4, "num_states": 12, **more}).state_table()

    def test_drafts_have_a_page_each_and_the_accepted_one_stays(self) -> None:
        table = self.table()
        table.add_request("a")
        table.step({"a": 3})
        table.finish_step()
        step = table.step({"a": 3}, {"a": 2})
        assert (step.common.state_slots_cpu >= 0).all()
        table.finish_step({"a": 2})
        kept, own = table.checkpoints("a"), table.step({"a": 1}).common.state_pages_cpu.tolist()
        # Token 4, the first of the step, is a border; the page of token 5 is that of the request.
        assert list(kept) == [4]
        assert own[0] == step.common.state_slots_cpu[1]
        assert table.pool.num_free == 11 - 2

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (lambda t: t.step({"b": 1}), "req_id='b' has no states"),
            (lambda t: t.add_request("a"), "req_id='a' has states already"),
            (lambda t: t.add_request("b", 4), "page=None must be given with the tokens"),
            (lambda t: t.add_request("b", 4, 9), "page=9 has no user"),
            (
                lambda t: t.step({"a": 3}, {"a": 3}),
                "must be in 0 .. 2: the plan has 2, and one of 3 tokens is no draft",
            ),
            (lambda t: t.step({"a": 9}, {"a": 3}), "must be in 0 .. 2: the plan has 2"),
            (lambda t: t.step({"a": 3}, {"b": 1}), "drafts='b' is no request of the step"),
            (lambda t: t.step({"a": 3}, keep={"a": [3]}), "is no border of blocks of 4 tokens within 0 .. 3"),
            (lambda t: t.finish_step(), "is required before finish_step"),
            (lambda t: t.rollback("a", 3), "has no state of request a; there are those after 0 tokens"),
        ],
    )
    def test_what_has_no_state_is_refused(self, call: Any, text: str) -> None:
        table = self.table()
        table.add_request("a")
        with pytest.raises(BatchError) as caught:
            call(table)
        assert text in str(caught.value)

    def test_tokens_without_a_stored_state_cannot_be_accepted(self) -> None:
        table = self.table()
        table.add_request("a")
        table.step({"a": 6}, {"a": 1})
        with pytest.raises(BatchError, match="has no state; those after 4, 5, 6 tokens were stored"):
            table.finish_step({"a": 2})
        table.finish_step({"a": 5})
        table.step({"a": 1})
        with pytest.raises(BatchError, match="would need the state before the step, whose page was written"):
            table.finish_step({"a": 0})

    def test_rollback_goes_to_a_checkpoint(self) -> None:
        table = self.table()
        table.add_request("a")
        table.step({"a": 10})
        table.finish_step()
        page = table.checkpoints("a")[4]
        table.rollback("a", 4)
        assert table.step({"a": 1}).common.state_pages_cpu.tolist() == [page]
        assert list(table.checkpoints("a")) == [4]
        table.finish_step()
        table.rollback("a", 0)
        assert table.step({"a": 1}).common.state_pages_cpu.tolist() == [-1]

    def test_too_few_pages_change_nothing(self) -> None:
        table = self.table(num_states=3)
        table.add_request("a")
        with pytest.raises(BatchError, match="the free blocks of 3"):
            table.step({"a": 12})
        table.step({"a": 3})
        table.finish_step()
        table.remove_request("a")
        assert table.pool.num_free == 2

    def test_keep_chooses_the_borders(self) -> None:
        table = self.table()
        table.add_request("a")
        table.step({"a": 11}, keep={"a": [8]})
        table.finish_step()
        assert list(table.checkpoints("a")) == [8]

    def test_the_tokens_of_a_batch_must_be_those_of_the_table(self) -> None:
        runtime = hybrid()
        builder, table = runtime.step_batch_builder(), runtime.state_table()
        builder.add_request("a", [[1]])
        table.add_request("a")
        table.step(builder.step(2))
        builder.finish_step()
        table.finish_step({"a": 2})
        builder.rollback(1)
        with pytest.raises(
            BatchError, match="num_computed_tokens=1 of request a are not the 2 whose state there is"
        ):
            table.step(builder.step(1))
