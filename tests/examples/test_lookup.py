"""With the weights of lookup.py a right model draws the tokens that `Plan.follow` says, and a wrong one others."""

from __future__ import annotations

import random
from types import SimpleNamespace

import lookup
import pytest
import torch
from lookup import Plan

HEADS, KV_HEADS, SIZE, LAYERS = 16, 4, 64, 5
CONFIG = SimpleNamespace(
    model_type="qwen3",
    vocab_size=2048,
    hidden_size=16 * (LAYERS + 2),
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    layer_types=[
        "full_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
)
WINDOW = 24


class VocabParallelEmbedding(torch.nn.Embedding):
    pass


class ParallelLMHead(torch.nn.Linear):
    pass


class RMSNorm(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given * (given.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Attention(torch.nn.Module):
    def __init__(self, has_norms: bool, ranks: int) -> None:
        super().__init__()
        self.head_dim = SIZE
        heads = (HEADS + 2 * KV_HEADS) // ranks
        self.qkv_proj = torch.nn.Linear(CONFIG.hidden_size, heads * SIZE, bias=False)
        self.o_proj = torch.nn.Linear(HEADS // ranks * SIZE, CONFIG.hidden_size, bias=False)
        if has_norms:
            self.q_norm, self.k_norm = RMSNorm(SIZE), RMSNorm(SIZE)

    def forward(self, given: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(given).unflatten(-1, (-1, SIZE)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        weights = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
        weights = weights.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


class Model(torch.nn.Module):
    """What vLLM calls the parts of a decoder, in torch; rotary embedding is left out, as it turns these dims little."""

    def __init__(self, has_norms: bool = False, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(CONFIG.vocab_size // ranks, CONFIG.hidden_size)
        self.norms = torch.nn.ModuleList(RMSNorm(CONFIG.hidden_size) for _ in range(LAYERS + 1))
        self.layers = torch.nn.ModuleList(Attention(has_norms, ranks) for _ in range(LAYERS))
        self.lm_head = ParallelLMHead(CONFIG.hidden_size, CONFIG.vocab_size // ranks, bias=False)
        lookup.fill(self, CONFIG, rank, ranks)

    @torch.no_grad()
    def draw(self, tokens: list[int], count: int, most: int = 1 << 30, lost: range = range(0)) -> list[int]:
        """Greedy tokens; no query sees keys `most` or more before it, or those of `lost`."""
        found = list(tokens)
        for _ in range(count):
            place = torch.arange(len(found))
            far = place[:, None] - place
            kept = torch.tensor([number not in lost for number in place.tolist()])
            row = self.embed_tokens(torch.tensor(found))
            for layer, norm, kind in zip(self.layers, self.norms, CONFIG.layer_types, strict=False):
                reach = min(most, WINDOW if kind == "sliding_attention" else most)
                row = row + layer(norm(row), (far >= 0) & (far < reach) & kept)
            found.append(int(self.lm_head(self.norms[-1](row[-1])).argmax()))
        return found[len(tokens) :]


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("length", [32, 100, pytest.param(700, marks=pytest.mark.slow)])
def test_a_right_model_draws_what_follows(length: int, has_norms: bool) -> None:
    plan, model = Plan.of(CONFIG), Model(has_norms)
    tokens = plan.prompt(length, random.Random(length))
    assert sorted(tokens) == list(range(length))
    assert model.draw(tokens, 12) == plan.follow(tokens, 12)
    assert model.to(torch.bfloat16).draw(tokens, 12) == plan.follow(tokens, 12)


def test_what_is_wrong_in_any_layer_or_head_gives_other_tokens() -> None:
    plan, model = Plan.of(CONFIG), Model()
    tokens = plan.prompt(300, random.Random(0))
    right = plan.follow(tokens, 8)
    assert model.draw(tokens, 8, most=200) != right, "far keys are not seen"
    for layer in model.layers:
        kept = layer.o_proj.weight.clone()
        layer.o_proj.weight.data[:, : 10 * SIZE] *= -1.0
        assert model.draw(tokens, 8) != right
        layer.o_proj.weight.data = kept
    assert model.draw(tokens, 8) == right


@pytest.mark.parametrize("order", ["neighbours", "halves", "ranks first"])
def test_heads_in_another_order_give_other_tokens(order: str) -> None:
    plan, model = Plan.of(CONFIG), Model()
    tokens = plan.prompt(64, random.Random(0))
    heads = torch.arange(HEADS)
    changed = {
        "neighbours": heads ^ 1,
        "halves": heads.roll(HEADS // 2),
        "ranks first": heads.view(2, -1).T.reshape(-1),
    }[order]
    for layer in model.layers:
        layer.o_proj.weight.data = layer.o_proj.weight.data.unflatten(1, (HEADS, SIZE))[:, changed].flatten(1)
    assert model.draw(tokens, 4) != plan.follow(tokens, 4)


def test_ranks_have_the_slices_of_the_whole_weights() -> None:
    whole, parts = Model(), [Model(rank=rank, ranks=2) for rank in range(2)]

    def close(name: str, dim: int, sizes: list[int]) -> None:
        expected = whole.get_parameter(name).split([size * 2 for size in sizes], dim)
        found = zip(*(part.get_parameter(name).split(sizes, dim) for part in parts), strict=True)
        for slices, right in zip(found, expected, strict=True):
            # The rest is noise.
            torch.testing.assert_close(torch.cat(slices, dim), right, atol=1e-3, rtol=0.0)

    for layer in range(LAYERS):
        close(
            f"layers.{layer}.qkv_proj.weight", 0, [each // 2 * SIZE for each in (HEADS, KV_HEADS, KV_HEADS)]
        )
        close(f"layers.{layer}.o_proj.weight", 1, [HEADS // 2 * SIZE])
    for name in ("embed_tokens", "lm_head"):
        close(f"{name}.weight", 0, [CONFIG.vocab_size // 2])


@pytest.mark.parametrize("length", [64, 300])
def test_a_page_that_is_lost_gives_other_tokens(length: int) -> None:
    plan, model = Plan.of(CONFIG), Model()
    tokens = plan.prompt(length, random.Random(length))
    right = plan.follow(tokens, 4)
    first = tokens.index(tokens[-1] ^ plan.masks[0])
    for page in (8, 16, 32):
        start = first // page * page
        lost = range(start, min(start + page, length - WINDOW))
        assert first in lost, "the window of the last token is whole"
        assert model.draw(tokens, 4, lost=lost)[0] != right[0]
    assert model.draw(tokens, 4) == right


def test_the_plan_has_masks_where_layers_see_all_and_bits_for_the_vocabulary() -> None:
    plan = Plan.of(CONFIG)
    assert plan.bits == 10
    assert [bool(mask) for mask in plan.masks] == [True, False, True, False, True]
    assert Plan.of(SimpleNamespace(vocab_size=151_936, num_hidden_layers=3)).bits == 14
    followed = plan.follow([5], 40)
    assert set(followed) <= set(range(1024, 1024 + lookup.BLOCK)), "a block's numbers follow each other"


def test_prompts_that_do_not_fit_and_small_models_are_refused() -> None:
    plan = Plan.of(CONFIG)
    with pytest.raises(ValueError, match="prompts need 32 to 1024 tokens here, not 31"):
        plan.prompt(31, random.Random(0))
    with pytest.raises(ValueError, match="prompts need 32 to 1024 tokens here, not 1025"):
        plan.prompt(1025, random.Random(0))
    small = SimpleNamespace(**{**vars(CONFIG), "hidden_size": 96})
    with pytest.raises(ValueError, match="hidden_size 96 has no place for the numbers of 5 layers"):
        lookup.fill(torch.nn.Module(), small)
