"""The model of shared decodes: the numbers of the documentation, and what a plan says from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import attnplug
from attnplug import Device, LayerSpec
from attnplug.core import ContextParallel, MLADims
from attnplug.runtime import ModelPlan
from attnplug.runtime.plan.sharding import SharingCost

H200 = Device("cuda", (9, 0))
LLAMA = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
MLA = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
PAGE = Path(__file__).parents[2] / "docs/concepts/context-parallel.md"


def cost(ranks: int, *specs: LayerSpec) -> SharingCost:
    found = SharingCost.of(ranks, specs, H200)
    assert found is not None
    return found


@pytest.mark.parametrize(("requests", "thousands"), [(8, 128), (64, 8), (1, 128), (8, 8)])
def test_the_page_has_the_numbers_of_the_model(requests: int, thousands: int) -> None:
    row = re.search(rf"^\| {requests} x {thousands}k \|(.*)$", PAGE.read_text(), re.M)
    assert row is not None
    tokens = requests * thousands * 1024
    alone = cost(2, LLAMA).attention_us(tokens)
    cells = [f"{alone:.0f} us"]
    for ranks in (2, 4, 8):
        shared = cost(ranks, LLAMA).shared_us(requests, tokens)
        cells.append(f"{shared:.0f} us, {alone / shared:.1f}x")
    assert [cell.strip() for cell in row[1].strip("|").split("|")] == cells


def test_sharing_pays_where_the_times_cross() -> None:
    for ranks in (2, 4):
        for requests in (1, 8, 64, 300):
            model = cost(ranks, LLAMA, LLAMA.replace(num_kv_heads=2))
            least = model.pays_from(requests)
            for tokens, pays in ((least, True), (least - 1, False)):
                all_tokens = requests * tokens
                assert (model.shared_us(requests, all_tokens) <= model.attention_us(all_tokens)) is pays


def test_a_latent_pays_later_for_its_bytes_and_sooner_for_its_products() -> None:
    few = LayerSpec(num_heads=16, num_kv_heads=1, head_size=576, dtype="bfloat16", mla=MLA)
    many = few.replace(num_heads=128)
    # 1,152 bytes a token take 0.27 ns, and the products of 128 heads 0.46.
    assert cost(2, few).attention_us(1_000_000) == pytest.approx(268, rel=0.01)
    assert cost(2, many).attention_us(1_000_000) == pytest.approx(464, rel=0.01)
    assert cost(2, few).pays_from(1) > cost(2, LLAMA).pays_from(1)


def test_a_plan_says_from_where_sharing_pays() -> None:
    specs = {"a": LLAMA, "b": LLAMA.replace(sliding_window=64)}
    plan = attnplug.plan(specs, H200, context_parallel=ContextParallel(2, 0), assume_installed="all")
    found = plan.sharing_cost
    assert found is not None
    # A window is whole on each rank, so it has no part in it.
    assert found.specs == (plan.specs["a"],)
    assert f"faster from {found.pays_from(1):,} tokens of one request" in " ".join(str(plan).split())
    assert plan.to_dict()["sharing_cost"]["pays_from"] == {
        str(requests): found.pays_from(requests) for requests in (1, 8, 64)
    }
    assert ModelPlan.from_json(plan.to_json()) == plan


def test_nothing_is_said_without_measured_times_or_without_ranks() -> None:
    shared = attnplug.plan(
        {"a": LLAMA.replace(dtype="float32")}, "cpu", context_parallel=ContextParallel(2, 0)
    )
    assert shared.sharing_cost is None
    assert "faster from" not in str(shared)
    alone = attnplug.plan({"a": LLAMA.replace(dtype="float32")}, "cpu")
    assert alone.to_dict()["sharing_cost"] is None
