"""Plans with context parallelism: what is sharded, what is whole, what is refused, and what the memory holds."""

from __future__ import annotations

import pytest

import attnplug
from attnplug import Feature, LayerSpec
from attnplug.core import BuilderConfig, ContextParallel, MLADims, SparseSpec
from attnplug.core.reasons import REASON_CODES
from attnplug.errors import BatchError, LayoutError, NoBackendError, RankFailureError, SpecError
from attnplug.runtime import AttentionRuntime, ModelPlan, StepBatchBuilder
from attnplug.runtime.ranks.rank_groups import compare_digests

FULL = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
PLACE = ContextParallel(2, 1)
LATENT = LayerSpec(
    num_heads=4,
    num_kv_heads=1,
    head_size=40,
    dtype="float32",
    mla=MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
)


def test_layers_that_see_all_tokens_are_sharded_and_others_whole() -> None:
    specs = {
        "full": FULL,
        "sliding": FULL.replace(sliding_window=8),
        "chunked": FULL.replace(chunk_size=16),
        "cross": FULL.replace(attn_type="encoder_decoder", causal=None),
        "encoder": FULL.replace(attn_type="encoder", direct_kv=True),
    }
    plan = attnplug.plan(specs, "cpu", num_blocks=99, context_parallel=PLACE)
    assert plan.sharded_layers == ("full",)
    context, new = plan.specs["full"], plan.new_tokens["full"].spec
    assert Feature.LSE | Feature.NON_CAUSAL in context.required_features()
    assert Feature.LSE | Feature.DIRECT_KV in new.required_features()
    assert new.causal
    for name in ("sliding", "chunked", "cross", "encoder"):
        assert plan.specs[name] == specs[name]
    covered = dict(
        zip(
            (g.layer_names[0] for g in plan.kv_cache_config.kv_cache_groups),
            plan.tokens_per_block,
            strict=True,
        )
    )
    assert covered == {"full": 32, "sliding": 16, "chunked": 16, "cross": 16}


def test_latents_keep_their_mask_and_need_no_other_backend() -> None:
    plan = attnplug.plan({"a": LATENT}, "cpu", num_blocks=9, context_parallel=PLACE)
    assert plan.sharded_layers == ("a",)
    assert plan.new_tokens == {}
    assert plan.specs["a"] == LATENT.replace(needs_lse=True)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_memory_holds_the_tokens_of_all_ranks(size: int) -> None:
    alone = attnplug.plan({"a": FULL}, "cpu", memory="8MiB")
    shared = attnplug.plan({"a": FULL}, "cpu", memory="8MiB", context_parallel=ContextParallel(size, 0))
    assert alone.num_blocks == shared.num_blocks
    assert alone.budget is not None
    assert shared.budget is not None
    assert shared.budget.max_tokens == size * (alone.budget.max_tokens or 0)
    assert shared.budget.to_dict()["ranks"] == size
    assert f"{size} ranks share the tokens of all layers, {size}.00 x the" in " ".join(str(shared).split())


def test_one_rank_plans_as_without() -> None:
    alone = attnplug.plan({"a": FULL}, "cpu", num_blocks=9)
    assert attnplug.plan({"a": FULL}, "cpu", num_blocks=9, context_parallel=ContextParallel()) == alone
    assert alone.context_parallel is None


def test_a_runtime_takes_the_place_of_one_rank_as_its_plan_does() -> None:
    plan = attnplug.plan({"a": FULL}, "cpu", num_blocks=9, context_parallel=ContextParallel())
    runtime = AttentionRuntime(
        plan, config=BuilderConfig(max_model_len=32), context_parallel=ContextParallel()
    )
    assert runtime.step_batch_builder().context_parallel is None
    with pytest.raises(SpecError, match="context_parallel='cp' must be a ContextParallel or None"):
        AttentionRuntime(plan, context_parallel="cp")  # type: ignore[arg-type]


def test_a_plan_keeps_its_place_in_json() -> None:
    plan = attnplug.plan({"a": FULL}, "cpu", num_blocks=9, context_parallel=ContextParallel(3, 2, 4))
    assert ModelPlan.from_json(plan.to_json()) == plan
    older = {
        name: value
        for name, value in plan.to_dict().items()
        if name not in ("context_parallel", "new_tokens")
    }
    assert ModelPlan.from_dict(older).context_parallel is None


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (FULL.replace(has_alibi=True), "has_alibi"),
        (LATENT.replace(sparse=SparseSpec("token_topk", 64)), "sparse"),
        (FULL.replace(mm_prefix=True), "mm_prefix"),
        (FULL.replace(causal=False, window=(4, 4)), "window"),
    ],
)
def test_a_layer_whose_tokens_ranks_cannot_share_is_refused(spec: LayerSpec, field: str) -> None:
    with pytest.raises(NoBackendError, match="under context parallelism") as raised:
        attnplug.plan({"a": FULL, "b": spec}, "cpu", num_blocks=9, context_parallel=PLACE)
    decision = raised.value.decision
    assert isinstance(decision, attnplug.Decision)
    assert not decision
    for candidate in decision.refused:
        assert candidate.reasons[-1].code == "context_parallel" in REASON_CODES
        assert candidate.reasons[-1].field == field
    assert len(decision.refused) == len(decision.candidates) > 0


def test_windows_with_alibi_are_whole_and_not_refused() -> None:
    spec = FULL.replace(has_alibi=True, sliding_window=8)
    assert (
        attnplug.plan({"a": FULL, "b": spec}, "cpu", num_blocks=9, context_parallel=PLACE).specs["b"] == spec
    )


def test_an_interleave_that_cuts_a_block_is_refused() -> None:
    with pytest.raises(LayoutError, match="must divide the block size 16 of layer a on TORCH"):
        attnplug.plan({"a": FULL}, "cpu", num_blocks=9, context_parallel=ContextParallel(2, 0, 3))
    with pytest.raises(BatchError, match=r"interleave=3 must divide block_sizes\[0\]=16"):
        builder(ContextParallel(2, 0, 3))


def builder(place: ContextParallel) -> StepBatchBuilder:
    specs = [
        group.kv_cache_spec
        for group in attnplug.plan({"a": FULL}, "cpu", num_blocks=9).kv_cache_config.kv_cache_groups
    ]
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64}
    return StepBatchBuilder(**sizes, block_sizes=[16], kv_cache_specs=specs, context_parallel=place)


def test_a_step_says_which_keys_are_here() -> None:
    made = builder(ContextParallel(2, 1, 4))
    made.add_request("x", [[3]], 0)
    made.add_request("y", [[5, 6]], 33)
    step = made.step({"x": 6, "y": 1}).sharded
    assert step is not None
    assert (step.is_decode, step.has_context, step.local_lens.tolist()) == (False, True, [0, 16])
    made.finish_step()
    step = made.step(1).sharded
    assert step is not None
    # The new tokens count, because a decode attends them in the pages.
    assert (step.is_decode, step.local_lens.tolist()) == (True, [3, 16])


def test_other_values_than_a_place_are_refused() -> None:
    with pytest.raises(SpecError, match="context_parallel=2 must be a ContextParallel or None"):
        attnplug.plan({"a": FULL}, "cpu", context_parallel=2)  # type: ignore[arg-type]
    plan = attnplug.plan({"a": FULL}, "cpu", num_blocks=9)
    with pytest.raises(LayoutError, match="is not what the plan was made for"):
        AttentionRuntime(plan, context_parallel=PLACE)


def test_most_ranks_are_right_and_the_first_layer_is_named() -> None:
    one, other = ("p", {"a": "1", "b": "1"}), ("q", {"a": "1", "b": "2"})
    compare_digests([one, one, one])
    with pytest.raises(RankFailureError, match=r"rank 0 of 3 planned otherwise.*layer b differs") as raised:
        compare_digests([other, one, one])
    assert raised.value.ranks == (0,)
    with pytest.raises(RankFailureError, match="rank 1 of 2"):
        compare_digests([other, one])


def test_uniform_plans_give_new_tokens_to_the_same_backend() -> None:
    plan = attnplug.plan({"a": FULL}, "cpu", num_blocks=9, uniform=True, context_parallel=PLACE)
    assert {plan.decisions["a"].backend, plan.new_tokens["a"].backend} == {"TORCH"}
