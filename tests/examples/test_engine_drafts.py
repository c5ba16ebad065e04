"""The example engine draws the same tokens with drafts as without, in fewer steps."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
from engine import Engine, Request
from small_models import FAMILIES, random_prompts, small_model

import attnplug
from attnplug.errors import BatchError

TOKENS = 16
"""Models with so few tokens repeat themselves: some drafts are right and some are wrong."""
QUICK = {("GptOss", 0.5)}
prompts_of = functools.partial(random_prompts, vocab_size=TOKENS)


def engine_of(family: str, draft_tokens: int = 4, **asked: int) -> Engine:
    return Engine(small_model(family, TOKENS), draft_tokens=draft_tokens, **asked)


def serve(engine: Engine, prompts: list[list[int]], **sampling) -> list[list[int]]:
    requests = [engine.add(prompt, **sampling) for prompt in prompts]
    for _ in engine.stream():
        pass
    assert engine.runtime.block_pool.num_free == engine.runtime.plan.num_blocks - 1
    return [request.output for request in requests]


@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        pytest.param(family, temperature, marks=() if (family, temperature) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for temperature in (0.0, 0.5)
    ],
)
def test_tokens_are_the_same_in_fewer_steps(family, temperature):
    prompts = prompts_of(1, 7, 50, 33)
    plain, drafting = engine_of(family, 0), engine_of(family)
    sampling = {"max_tokens": 64, "temperature": temperature, "seed": 5}

    assert serve(drafting, prompts, **sampling) == serve(plain, prompts, **sampling)

    assert plain.drafted == plain.accepted == 0
    assert 0 < drafting.accepted < drafting.drafted
    assert drafting.steps < plain.steps
    assert drafting.drawn == plain.drawn == 4 * 64


@pytest.mark.parametrize("temperature", [pytest.param(each, marks=pytest.mark.slow) for each in (0.0, 0.5)])
def test_preempted_shared_and_chunked_requests_draw_the_same_tokens(temperature):
    prefix = prompts_of(40, seed=1)[0]
    prompts = prompts_of(1, 90, 17, 16, seed=2) + prompts_of(5, 60, 30, 1, prefix=prefix, seed=3)
    sampling = {"max_tokens": 48, "temperature": temperature}
    groups = len(engine_of("Gemma2").runtime.kv_cache_config.kv_cache_groups)
    few = {"num_blocks": groups * 14, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    drafting = engine_of("Gemma2", **few)

    outputs = serve(drafting, prompts, **sampling)

    assert drafting.preemptions > 0
    assert drafting.pages.shared > 0
    assert 0 < drafting.accepted < drafting.drafted
    assert outputs == serve(engine_of("Gemma2", 0), prompts, **sampling)


def test_pages_that_are_found_again_hold_verified_tokens_only():
    prompts = prompts_of(9, 20)
    drafting, plain = engine_of("Gemma3"), engine_of("Gemma3", 0)
    outputs = serve(drafting, prompts, max_tokens=60)
    longer = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]

    again = serve(drafting, longer, max_tokens=16)

    assert drafting.accepted < drafting.drafted
    assert drafting.pages.shared == sum((len(tokens) - 1) // drafting.pages.size for tokens in longer)
    assert again == serve(plain, longer, max_tokens=16)


def test_a_stop_token_among_accepted_drafts_ends_the_output():
    [prompt] = prompts_of(12)
    [whole] = serve(engine_of("Llama", 0), [prompt], max_tokens=64)
    drafting, inside = engine_of("Llama"), 0

    # Each prompt goes on with what was drawn, so that a stop token can have come before.
    for start in range(20, 50, 3):
        given, rest = prompt + whole[:start], whole[start:]
        for stop in {rest[0], rest[1], rest[2]}:
            accepted = drafting.accepted
            [output] = serve(drafting, [given], max_tokens=14, stop=frozenset({stop}))
            assert output == rest[: rest.index(stop) + 1]
            inside += drafting.accepted > accepted

    assert inside > 0


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.slow), 2, 5, pytest.param(8, marks=pytest.mark.slow)]
)
def test_drafts_never_pass_the_last_token_wanted(count):
    prompt = (prompts_of(12)[0] * 3)[: 32 - count]
    groups = len(engine_of("Gemma3").runtime.kv_cache_config.kv_cache_groups)
    whole = serve(engine_of("Gemma3", 0), [prompt], max_tokens=count)

    # The pool has room for these tokens and no more.
    drafting = engine_of("Gemma3", 7, num_blocks=1 + 2 * groups, block_size=16)
    assert serve(drafting, [prompt], max_tokens=count) == whole


@pytest.mark.parametrize(("count", "drafts"), [(1, 0), (2, 1), (4, 3)])
def test_the_last_token_wanted_is_never_a_draft(count, drafts):
    engine = engine_of("Llama", 7)
    engine.add([1, 2] * 9, max_tokens=count)

    engine.step()

    assert engine.drafted == drafts


def test_drafts_take_no_token_of_a_step_from_other_requests():
    prompts = prompts_of(10, 11, 12)
    plain, drafting = (
        engine_of("Llama", drafts, max_num_seqs=3, max_num_batched_tokens=3) for drafts in (0, 4)
    )

    outputs = serve(drafting, prompts, max_tokens=40)

    assert drafting.drafted > 0, "a request that is left alone has room for drafts"
    assert outputs == serve(plain, prompts, max_tokens=40)
    assert drafting.steps < plain.steps


def test_drafts_cause_no_preemption():
    engine = engine_of("Llama", num_blocks=3, block_size=16)
    long, short = engine.add([1, 2] * 7, max_tokens=18), engine.add([3], max_tokens=2)

    engine.step()

    assert len(engine.running) == 2
    assert engine.drafted == 0, "the drafts would need a page, and the other request has the last"
    for _ in engine.stream():
        pass
    assert engine.preemptions == 0
    assert engine.drafted > 0
    assert [long.output, short.output] == [
        *serve(engine_of("Llama", 0), [[1, 2] * 7], max_tokens=18),
        *serve(engine_of("Llama", 0), [[3]], max_tokens=2),
    ]


@pytest.mark.slow
def test_one_backend_verifies_what_another_prefilled():
    prompts = [prompts_of(18)[0]]
    plain = serve(engine_of("Llama", 0), prompts, max_tokens=12)
    with attnplug.use("TORCH,decode=TRITON"):
        drafting = engine_of("Llama", 2)

    assert {group.backend.get_name() for group in drafting.runtime.attention_groups} == {"TORCH+TRITON"}
    assert serve(drafting, prompts, max_tokens=12) == plain
    assert drafting.accepted > 0


def test_a_step_streams_all_tokens_that_it_verified():
    engine = engine_of("Gemma3")

    lengths = [len(request.output) for request in engine.stream(prompts_of(12), max_tokens=64)]

    gained = [after - before for before, after in itertools.pairwise([0, *lengths])]
    assert min(gained) == 1
    assert max(gained) == 5, "a token, and all 4 drafts"
    assert sum(gained) - len(gained) == engine.accepted


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3]),
        ([1, 2, 7, 1, 2, 8, 9, 1, 2], [8, 9, 1, 2, 8]),
        ([5, 5, 5], [5, 5, 5, 5, 5]),
        ([2, 1, 3, 1], []),
        ([1, 1], []),
        ([1], []),
    ],
)
def test_drafts_are_what_followed_the_last_two_tokens(tokens, drafts):
    request = Request("0", [], 0)
    for token in tokens:
        request.tokens.append(token)
        found = request.look_up(5)

    assert found == drafts
    assert Request("0", tokens, 1).look_up(5) == drafts
    assert request.look_up(0) == []


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(
    "family",
    ["GptOss", *(pytest.param(each, marks=pytest.mark.slow) for each in ("Llama", "Gemma2", "Mistral"))],
)
def test_trees_draw_the_same_tokens_in_fewer_steps(family: str, temperature: float) -> None:
    prompts = prompts_of(1, 7, 50, 33)
    plain, chains = engine_of(family, 0), engine_of(family, 4)
    trees = engine_of(family, 12, draft_branches=3)
    sampling = {"max_tokens": 64, "temperature": temperature, "seed": 5}

    expected = serve(plain, prompts, **sampling)

    assert serve(trees, prompts, **sampling) == expected
    assert serve(chains, prompts, **sampling) == expected
    assert 0 < trees.accepted < trees.drafted
    # A tree accepts no fewer drafts than its chain in any one step, but may then stand where less repeats.
    assert trees.steps <= chains.steps + 1
    assert chains.steps < plain.steps


def test_a_tree_has_each_draft_once() -> None:
    request = Request("0", [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 7, 1, 2], 1)
    drafts, parents = request.branch(9, 3)
    assert drafts == [7, 1, 2, 3, 5, 1, 4, 1]
    assert parents == [-1, 0, 1, 2, 0, 4, 5, 4, 7]
    assert Request("0", [1, 2, 3], 1).branch(9, 3) == ([], [-1])


def test_trees_that_the_model_cannot_verify_are_refused() -> None:
    with pytest.raises(BatchError, match=r"draft_branches=2 cannot be verified: layer .*: latent attention"):
        engine_of("DeepseekV3", 4, draft_branches=2)
    with pytest.raises(BatchError, match="draft_branches"):
        engine_of("GptOss", 4, draft_branches=5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_trees_draw_the_tokens_of_no_drafts_for_a_hundred_prompts(family: str) -> None:
    draw = random.Random(4)
    prompts = prompts_of(*(draw.randint(1, 60) for _ in range(100)), seed=4)
    plain, trees = engine_of(family, 0), engine_of(family, 12, draft_branches=3)

    expected = serve(plain, prompts, max_tokens=32)

    assert serve(trees, prompts, max_tokens=32) == expected
    assert 100 * 32 == trees.drawn == plain.drawn
    assert trees.accepted > 300
    assert trees.steps < plain.steps
