"""The engine draws all rows of a step together, and each as if its request were alone."""

from __future__ import annotations

import draws
import pytest
import torch
from draws import draw_tokens
from engine import Engine, Request
from small_models import random_prompts, small_model

TREE = [-1, 0, 1, 0, 3, 1]


def request_of(
    name: str, temperature: float = 0.0, drafts: int = 0, parents: list[int] | None = None
) -> Request:
    made = Request(name, [1, 2], 2, temperature=temperature, drafts=[0] * drafts, parents=parents or [])
    made.generator.manual_seed(int(name))
    return made


def one_by_one(requests: list[Request], logits: torch.Tensor) -> list[int]:
    """The tokens by their definition: row after row, with the number of its depth."""
    found = []
    for request in requests:
        generator = torch.Generator()
        generator.manual_seed(int(request.name))
        numbers = [torch.rand((), dtype=torch.float64, generator=generator) for _ in range(8)]
        for depth in depths_of(request):
            row = logits[len(found)]
            if request.temperature == 0:
                found.append(int(row.argmax()))
                continue
            ends = (row.double() / request.temperature).softmax(-1).cumsum(-1)
            found.append(int(torch.searchsorted(ends, numbers[depth] * ends[-1], right=True)))
    return found


def depths_of(request: Request) -> list[int]:
    return [0, 1, 2, 1, 2, 2] if request.parents else list(range(len(request.drafts) + 1))


def mixed() -> tuple[list[Request], torch.Tensor]:
    """Requests with and without a temperature, with chains and a tree, and their logits."""
    requests = [
        request_of("0", 0.7),
        request_of("1"),
        request_of("2", 1.0, drafts=3),
        request_of("3", drafts=2),
        request_of("4", 1.3, drafts=5, parents=TREE),
        request_of("5", 0.001),
    ]
    rows = sum(len(request.drafts) + 1 for request in requests)
    return requests, torch.randn(rows, 1000, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("most", [1 << 24, 3000, 1])
def test_each_row_draws_with_the_number_of_its_depth(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(draws._MOST, "cpu", most)
    requests, logits = mixed()
    assert draw_tokens(requests, logits) == one_by_one(requests, logits)


def test_a_request_draws_the_same_alone_and_with_others() -> None:
    requests, logits = mixed()
    together, row = draw_tokens(requests, logits), 0
    for request in requests:
        end = row + len(request.drafts) + 1
        assert draw_tokens([request], logits[row:end]) == together[row:end]
        row = end


def test_numbers_are_used_by_appended_tokens_only() -> None:
    request, other = request_of("7", 1.0), request_of("7", 1.0)
    expected = [torch.rand((), dtype=torch.float64, generator=other.generator).item() for _ in range(100)]
    used = 0
    for ahead, appended in ((4, 1), (1, 1), (60, 9), (70, 0), (30, 25)):
        assert request.numbers(ahead) == expected[used : used + ahead]
        for token in range(appended):
            request.append(token)
        used += appended


def test_only_the_request_of_a_bad_row_has_no_token() -> None:
    requests, logits = mixed()
    right = draw_tokens(requests, logits)
    bad = {2: torch.nan, 5: torch.inf}
    for row, value in bad.items():
        logits[row, 17] = value
    assert draw_tokens(requests, logits) == [-1 if row in bad else token for row, token in enumerate(right)]


@pytest.mark.parametrize("branches", [1, 2])
def test_tokens_are_the_same_alone_in_a_batch_and_with_drafts(branches: int) -> None:
    prompts = random_prompts(5, 20, 9, vocab_size=16)
    temperatures = [0.6, 0.0, 1.0]

    def outputs(engine: Engine, together: bool) -> list[list[int]]:
        requests = []
        for seed, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
            requests.append(engine.add(prompt, max_tokens=20, temperature=temperature, seed=seed))
            if not together:
                list(engine.stream())
        list(engine.stream())
        return [request.output for request in requests]

    plain = Engine(small_model("Llama", 16))
    alone = outputs(plain, together=False)
    assert outputs(plain, together=True) == alone
    drafting = Engine(small_model("Llama", 16), draft_tokens=4, draft_branches=branches)
    assert outputs(drafting, together=True) == alone
    assert 0 < drafting.accepted < drafting.drafted
