"""What tests of real models rest on: bounds that TORCH keeps in bfloat16, and that mistakes plainly exceed."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.15")

import torch
from changed_torch import NAME, offered, with_large_pages, without_sinks, wrong_backend
from logit_bounds import Found, Reference, check_logits, excesses
from model_families import FAMILIES, FEW, MANY, Sizes
from model_runs import RUNS, make_texts, references, refusal, whole_text

WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")
SHOWN_BY = {
    "no window": WINDOWED,
    "no window in decodes": WINDOWED,
    "a key too many": WINDOWED,
    "a key too few": WINDOWED,
    "no cap": ("gemma2",),
    "no sinks": ("gpt_oss",),
    "a larger scale": tuple(FAMILIES),
}
SIZES = [
    pytest.param(FEW, id="few"),
    pytest.param(MANY, id="many", marks=[pytest.mark.slow, pytest.mark.rare]),
]

by_family = pytest.mark.parametrize("family", FAMILIES)
by_hybrid = pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
by_run = pytest.mark.parametrize("run", RUNS)


@by_run
@by_family
@pytest.mark.parametrize("sizes", SIZES)
def test_torch_is_within_the_bounds(sizes: Sizes, family: str, run: str) -> None:
    check_logits(RUNS[run](family, sizes, "cpu", "TORCH"), references(family, sizes, "cpu"))


@by_family
def test_transformers_own_attention_is_within_the_bounds(family: str) -> None:
    model = FAMILIES[family].make_model(MANY, torch.bfloat16, "cpu")
    model.set_attn_implementation("eager")
    found = [Found(whole_text(model, text)) for text in make_texts(MANY)]
    check_logits(found, references(family, MANY, "cpu"))


@by_family
def test_the_exact_logits_are_those_of_transformers_own_attention(family: str) -> None:
    model = FAMILIES[family].make_model(MANY, torch.float32, "cpu")
    model.set_attn_implementation("eager")
    for text, reference in zip(make_texts(MANY), references(family, MANY, "cpu"), strict=True):
        torch.testing.assert_close(whole_text(model, text), reference.exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("mistake", "family", "run"),
    [
        (mistake, family, run)
        for mistake, families in SHOWN_BY.items()
        for family in families
        for run in RUNS
        # The cache of transformers has itself dropped the keys that a decode must not see.
        if (mistake, run) != ("no window in decodes", "transformers")
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_what_a_backend_drops_or_misreads_is_seen(sizes: Sizes, mistake: str, family: str, run: str) -> None:
    expected = references(family, sizes, "cpu")
    with offered(wrong_backend(mistake)):
        found = RUNS[run](family, sizes, "cpu", NAME)
    with pytest.raises(AssertionError, match="error over its bound"):
        check_logits(found, expected)
    # By far, so that no luck with roundings hides it.
    assert max(excesses(*pair)["text"] for pair in zip(found, expected, strict=True)) > 2


@by_hybrid
def test_the_engine_uses_pages_as_large_as_the_backend_asks(family: str) -> None:
    # No page is shared with fewer tokens.
    with offered(with_large_pages(256)):
        check_logits(RUNS["engine"](family, MANY, "cpu", NAME), references(family, MANY, "cpu"))


@by_hybrid
def test_the_engine_prefills_on_one_backend_and_decodes_on_another(family: str) -> None:
    with offered(with_large_pages(64)):
        assert refusal(family, FEW, "cpu", f"TORCH+{NAME}", "engine") is None
        check_logits(RUNS["engine"](family, MANY, "cpu", f"TORCH+{NAME}"), references(family, MANY, "cpu"))


@pytest.mark.slow
@pytest.mark.rare
@by_run
@by_family
def test_interpreted_triton_is_within_the_bounds(family: str, run: str) -> None:
    reason = refusal(family, FEW, "cpu", "TRITON", run)
    if reason is not None:
        pytest.skip(reason)
    check_logits(RUNS[run](family, FEW, "cpu", "TRITON"), references(family, FEW, "cpu"))


def test_one_wrong_token_is_seen() -> None:
    exact = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    reference = Reference(exact, exact.bfloat16().float(), 150)
    wrong = reference.rounded.clone()
    wrong[7] *= 1.05
    assert max(excesses(Found(reference.rounded), reference).values()) <= 0.5
    assert excesses(Found(wrong), reference)["row"] > 1
    assert max(excesses(Found(wrong, first=8), reference).values()) <= 0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_is_seen(value: float) -> None:
    exact = torch.ones(4, 8)
    wrong = exact.clone()
    wrong[3, 5] = value
    with pytest.raises(AssertionError, match="text 0: error over its bound"):
        check_logits([Found(wrong)], [Reference(exact, exact, 2)])


def test_a_backend_that_is_not_there_is_refused_by_name() -> None:
    assert str(refusal("llama", FEW, "cpu", "TORCH+NO_SUCH", "engine")).startswith("NO_SUCH: none of ")


def test_a_backend_that_does_not_serve_a_layer_is_refused_with_its_reasons() -> None:
    with offered(without_sinks()):
        assert refusal("mistral", FEW, "cpu", NAME, "engine") is None
        assert "CHANGED: sinks not supported" in str(refusal("gpt_oss", FEW, "cpu", NAME, "engine"))
