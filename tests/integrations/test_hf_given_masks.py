"""Rows of packed sequences, and 4-D masks that a caller or a model makes: served as eager attention does, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_models import DECODERS, WINDOW, Family, assert_same_logits, prompts

from attnplug.errors import BatchError
from attnplug.integrations.attention import mask_functions
from attnplug.integrations.transformers import attention_decisions

pytestmark = pytest.mark.usefixtures("no_grad")

Pair = tuple[Any, Any]
LENGTHS = (WINDOW + 3, 1, 9)


@pytest.fixture(scope="module")
def llama() -> Pair:
    return DECODERS["llama"].pair()


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def separately(model: Any, ids: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_packed_rows_give_the_logits_of_each_sequence_alone(name: str, rows: int) -> None:
    ours, eager = DECODERS[name].pair()
    ids, _ = prompts(rows=rows)
    given = positions(*LENGTHS).expand(rows, -1)
    found = ours(ids, position_ids=given, use_cache=False).logits
    assert_same_logits(found, separately(eager, ids, LENGTHS))
    assert_same_logits(found, eager(ids, position_ids=given, use_cache=False).logits)


def test_rows_may_be_packed_differently(llama: Pair) -> None:
    ours, eager = llama
    ids, _ = prompts(rows=2)
    given = torch.cat([positions(5, 16), positions(21)])
    found = ours(ids, position_ids=given, use_cache=False).logits
    expected = torch.cat([separately(eager, ids[:1], (5, 16)), separately(eager, ids[1:], (21,))])
    assert_same_logits(found, expected)


def test_packed_sequences_that_begin_with_a_chunk_give_eagers_logits() -> None:
    ours, eager = DECODERS["llama4"].pair()
    ids, _ = prompts(rows=2)
    given = positions(2 * WINDOW, 3, 2).expand(2, -1)
    found, expected = (model(ids, position_ids=given, use_cache=False).logits for model in (ours, eager))
    assert_same_logits(found, expected)


def test_packed_sequences_that_begin_inside_a_chunk_are_refused() -> None:
    ours, _ = DECODERS["llama4"].pair()
    ids, _ = prompts(rows=1)
    with pytest.raises(BatchError, match=r"begins at token 9' must be a multiple of chunk_size=8"):
        ours(ids, position_ids=positions(9, 12), use_cache=False)


@pytest.mark.parametrize(
    "given",
    [{"use_cache": True}, {"attention_mask": torch.ones(1, 21), "use_cache": False}],
    ids=["cache", "mask"],
)
@pytest.mark.parametrize("lengths", [(9, 12), (1, 20)], ids=str)
def test_packed_rows_that_the_mask_does_not_separate_are_refused(
    llama: Pair, given: dict[str, Any], lengths: tuple[int, int]
) -> None:
    ids, _ = prompts(rows=1)
    with pytest.raises(
        BatchError, match=r"position_ids='positions that go back in row 0'.*pass use_cache=False"
    ):
        llama[0](ids, position_ids=positions(*lengths), **given)


def test_packed_rows_are_refused_where_a_model_makes_no_mask_for_them() -> None:
    ours, _ = DECODERS["gpt_oss"].pair()
    with pytest.raises(
        BatchError, match=r"mask of model\.layers\.0\.self_attn .* separates no packed sequences"
    ):
        ours(prompts(rows=1)[0], position_ids=positions(9, 12), use_cache=False)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("number", [0, 1, 7])
def test_positions_of_padding_are_not_read(llama: Pair, side: str, number: int) -> None:
    ids, mask = prompts(side=side)
    given = (mask.cumsum(1) - 1).masked_fill(mask == 0, number)
    found, expected = (model(ids, attention_mask=mask, position_ids=given).logits for model in llama)
    assert_same_logits(found, expected, mask)


def causal(padding: torch.Tensor, length: int) -> torch.Tensor:
    """Bool `[B, 1, length, L]` for the last queries of `padding [B, L]`."""
    whole = torch.ones(padding.shape[1], padding.shape[1], dtype=torch.bool).tril()[-length:]
    return whole & padding.bool()[:, None, None, :]


def added(seen: torch.Tensor, hidden: float = torch.finfo(torch.float32).min) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, hidden)


FORMS = {
    "bool": lambda seen: seen,
    "lowest": added,
    "-1e4": lambda seen: added(seen, -1e4),
    "-inf": lambda seen: added(seen, -torch.inf),
}


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_plain_causal_matrix_is_served(llama: Pair, form: str, side: str | None) -> None:
    ours, eager = llama
    ids, mask = prompts(side=side or "left")
    mask = mask if side else torch.ones_like(mask)
    seen = causal(mask, 21)
    found = ours(ids, attention_mask=FORMS[form](seen)).logits
    assert_same_logits(found, eager(ids, attention_mask=added(seen)).logits, mask)
    assert {str(d.spec.attn_type) for d in attention_decisions(ours).values()} == {"decoder"}


def test_one_matrix_for_all_rows_is_served(llama: Pair) -> None:
    ids, _ = prompts()
    seen = causal(torch.ones(1, 21), 21)
    found, expected = (model(ids, attention_mask=added(seen)).logits for model in llama)
    assert_same_logits(found, expected)


def test_a_causal_matrix_with_a_cache_is_served(llama: Pair) -> None:
    ids, mask = prompts()
    caches = [transformers.DynamicCache(config=model.config) for model in llama]
    for start, end in ((0, 17), (17, 20), (20, 21)):
        seen = added(causal(mask[:, :end], end - start))
        found, expected = (
            model(ids[:, start:end], attention_mask=seen, past_key_values=cache).logits
            for model, cache in zip(llama, caches, strict=True)
        )
        assert_same_logits(found, expected, mask[:, start:end])


def test_a_causal_matrix_over_a_longer_static_cache_is_served(llama: Pair) -> None:
    ids, mask = prompts()
    caches = [transformers.StaticCache(config=model.config, max_cache_len=32) for model in llama]
    for start, end in ((0, 17), (17, 20), (20, 21)):
        seen = torch.zeros(3, 1, end - start, 32, dtype=torch.bool)
        seen[..., :end] = causal(mask[:, :end], end - start)
        found, expected = (
            model(ids[:, start:end], attention_mask=added(seen), past_key_values=cache).logits
            for model, cache in zip(llama, caches, strict=True)
        )
        assert_same_logits(found, expected, mask[:, start:end])


def test_a_matrix_of_cross_attention_is_served() -> None:
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    ours, eager = Family("Bart", {"d_model": 64, **sizes}, auto="AutoModel").pair()
    _, mask = prompts(side="right")
    states = torch.randn(3, 21, 64)
    ids, _ = prompts(length=4)
    for count in (1, 4):
        seen = added(mask.bool()[:, None, None, :].expand(-1, -1, count, -1))
        found, expected = (
            m.decoder(
                ids[:, :count], encoder_hidden_states=states, encoder_attention_mask=seen
            ).last_hidden_state
            for m in (ours, eager)
        )
        assert_same_logits(found, expected)


def future(seen: torch.Tensor) -> torch.Tensor:
    seen[0, 0, 3, 4] = True
    return seen


def hole(seen: torch.Tensor) -> torch.Tensor:
    seen[0, 0, 9, 4] = False
    return seen


def hidden_key(seen: torch.Tensor) -> torch.Tensor:
    """The key of token 4 is hidden from all queries, and its own query sees the keys before it."""
    seen[0, 0, :, 4] = False
    return seen


REFUSED = {
    "future": (lambda seen: added(future(seen)), "neither plain causal nor full"),
    "hole": (lambda seen: added(hole(seen)), "neither plain causal nor full"),
    "hidden key": (lambda seen: added(hidden_key(seen)), "neither plain causal nor full"),
    "window": (lambda seen: added(seen & ~seen.tril(-4)), "neither plain causal nor full"),
    "full": (torch.ones_like, "it is full, and the layer is causal"),
    "bias": (lambda seen: added(seen) - 0.5 * seen, "adds values other than 0"),
    "heads": (lambda seen: added(seen).expand(-1, 4, -1, -1), r"not \[B, 1, Lq, Lk\]"),
    "rows": (lambda seen: added(seen)[:2], r"does not fit \(3, 1, 21, 21\)"),
    "int": (lambda seen: seen.long(), "its dtype is torch.int64"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_another_matrix_is_refused_with_a_reason(llama: Pair, case: str) -> None:
    make, words = REFUSED[case]
    ids, _ = prompts()
    with pytest.raises(BatchError, match=rf"attention_mask=.*model\.layers\.0\.self_attn.*{words}"):
        llama[0](ids, attention_mask=make(causal(torch.ones(3, 21), 21)))


def test_a_plain_matrix_is_refused_in_a_layer_with_a_window() -> None:
    ours, _ = DECODERS["mistral"].pair()
    ids, mask = prompts()
    with pytest.raises(
        BatchError, match=r"sliding_window=8 in model\.layers\.0\.self_attn .*contradicts its mask"
    ):
        ours(ids, attention_mask=causal(mask, 21))


def test_a_matrix_is_read_once_for_all_layers(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = mask_functions._read

    def counting(*args: Any) -> Any:
        read.append(1)
        return original(*args)

    monkeypatch.setattr(mask_functions, "_read", counting)
    ids, mask = prompts()
    seen = added(causal(mask, 21))
    first = llama[0](ids, attention_mask=seen).logits
    assert len(read) == 1
    # The same tensor with other values is another mask.
    seen.copy_(added(causal(torch.ones_like(mask), 21)))
    second = llama[0](ids, attention_mask=seen).logits
    assert len(read) == 2
    assert not torch.equal(first[2], second[2])


def test_masks_that_a_model_makes_itself_are_served() -> None:
    family = Family("LayoutLM", auto="AutoModel")
    ours, eager = family.pair()
    for side in ("left", "right"):
        ids, mask = prompts(side=side)
        found, expected = (model(ids, attention_mask=mask).last_hidden_state for model in (ours, eager))
        assert_same_logits(found, expected)
    assert len(attention_decisions(ours)) == 4


def test_a_models_own_overflow_check_is_no_obstacle() -> None:
    from attnplug.integrations.transformers import read_config

    fields = {"d_model": 64, "vocab_size": 96, "dtype": "float16"}
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    layers = read_config(transformers.BartConfig(**fields, **sizes)).layers
    assert len(layers) == 6
    assert {str(spec.dtype) for spec in layers.values()} == {"float16"}
