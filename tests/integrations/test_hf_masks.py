"""The mask that carries a pattern, what is made of it, and attention called as models call it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hf_models import DECODERS, assert_same_logits, prompts
from transformers import masking_utils

from attnplug import LayerSpec, use
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import LayerTensors
from attnplug.errors import BatchError
from attnplug.integrations.attention.registration import attention, attention_mask
from attnplug.integrations.transformers import attention_decisions
from attnplug.testing import assert_close, request_oracle

pytestmark = pytest.mark.usefixtures("no_grad")


class Attention(torch.nn.Module):
    """An attention module as transformers calls it."""

    layer_idx = 3

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kw: Any
    ) -> Any:
        return attention(self, query, key, value, mask, **kw)[0]


def tensors(batch: int, q_length: int, kv_length: int, size_v: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((batch, 4, q_length, 16), (batch, 2, kv_length, 16), (batch, 2, kv_length, size_v))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


CASES = {
    "causal": (masking_utils.causal_mask_function, {}),
    "window": (masking_utils.sliding_window_causal_mask_function(6), {"sliding_window": 6}),
    "chunk": (masking_utils.chunked_causal_mask_function(6, torch.tensor([0, 4])), {"chunk_size": 6}),
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_the_last_keys_of_a_cache_stand_where_they_stood(case: str, sinks: bool) -> None:
    # 20 tokens, 3 of them new; the cache has kept 5 of the others; row 1 has 4 tokens of padding.
    function, fields = CASES[case]
    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[1, :4] = False
    mask = attention_mask(2, 3, 8, 17, 12, function, padding)
    query, key, value = tensors(2, 3, 8, size_v=24)
    logits = torch.linspace(-2, 2, 4) if sinks else None
    given = {"scaling": 0.4, "softcap": 1.5, "s_aux": logits, "sliding_window": fields.get("sliding_window")}
    found = Attention()(query, key, value, mask, **given)
    assert found.shape == (2, 3, 4, 24)
    assert found.is_contiguous()
    spec = LayerSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        head_size_v=24,
        dtype="float32",
        scale=0.4,
        logits_soft_cap=1.5,
        has_sinks=sinks,
        **fields,
    )
    for row, length in enumerate((20, 16)):
        parts = (tensor[row].transpose(0, 1) for tensor in (query, key, value))
        expected = request_oracle(spec, *parts, length, tensors=LayerTensors(sinks=logits))
        assert_close(found[row], expected.output, 1e-5)


def test_padded_queries_give_zeros_and_garbage_in_padding_reaches_nothing() -> None:
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[1, :4] = False
    query, key, value = tensors(2, 7, 7)
    for tensor in (query, key, value):
        tensor[1, :, :4] = torch.nan
    mask = attention_mask(2, 7, 7, 0, 0, masking_utils.causal_mask_function, padding)
    found = Attention()(query, key, value, mask)
    assert not found.isnan().any()
    assert (found[1, :4] == 0).all()
    assert (found[1, 4:] != 0).all()


def test_a_batch_of_padding_alone_gives_zeros() -> None:
    padding = torch.zeros(2, 7, dtype=torch.bool)
    mask = attention_mask(2, 7, 7, 0, 0, masking_utils.causal_mask_function, padding)
    found = Attention()(*tensors(2, 7, 7), mask)
    assert found.shape == (2, 7, 4, 16)
    assert (found == 0).all()


def test_the_inputs_are_not_modified() -> None:
    given = tensors(2, 7, 7)
    before = [tensor.clone() for tensor in given]
    Attention()(*given, attention_mask(2, 7, 7, mask_function=masking_utils.causal_mask_function))
    assert all(torch.equal(tensor, old) for tensor, old in zip(given, before, strict=True))


def make_mask() -> Any:
    return attention_mask(2, 3, 5, 2, 0, masking_utils.causal_mask_function)


def test_a_mask_looks_like_the_tensor_it_stands_for() -> None:
    mask = make_mask()
    assert (tuple(mask.shape), mask.ndim, mask.dtype, mask.size(-1)) == ((2, 1, 3, 5), 4, torch.bool, 5)
    assert (mask.device.type, mask.dim(), len(mask)) == ("cpu", 4, 2)


@pytest.mark.parametrize(
    "keep",
    [
        lambda mask: mask.to("cpu"),
        lambda mask: mask.contiguous(),
        lambda mask: mask[:, :, :, :5],
        lambda mask: mask[:, :, -3:],
        copy.deepcopy,
    ],
    ids=["to", "contiguous", "all keys", "all queries", "copied"],
)
def test_a_mask_passed_on_whole_keeps_its_pattern(keep: Any) -> None:
    mask = make_mask()
    assert keep(mask).step is mask.step


@pytest.mark.parametrize(
    "alter",
    [
        lambda mask: mask + torch.ones(1, 1, 3, 5),
        lambda mask: mask[:, :, :, :4],
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: mask.float(),
        lambda mask: ~mask,
        lambda mask: mask.masked_fill(mask, value=False),
        lambda mask: bool(mask.all()),
        lambda mask: torch.cat([mask, mask], dim=-1),
    ],
    ids=["bias", "slice", "where", "float", "invert", "fill", "read", "cat"],
)
def test_a_mask_that_a_model_alters_or_reads_is_refused(alter: Any) -> None:
    with pytest.raises(BatchError, match="attention_mask='changed by"):
        alter(make_mask())


def test_a_mask_of_other_tensors_is_refused() -> None:
    with pytest.raises(BatchError, match=r"attention_mask=\(2, 1, 3, 5\) must be \(2, 1, 3, 6\)"):
        Attention()(*tensors(2, 3, 6), make_mask())


def test_no_mask_where_causality_is_not_said_is_refused() -> None:
    with pytest.raises(BatchError, match=r"attention_mask=None in Attention\.3"):
        Attention()(*tensors(2, 3, 3), None)
    assert Attention()(*tensors(2, 3, 3), None, is_causal=False).shape == (2, 3, 4, 16)
    assert Attention()(*tensors(2, 1, 3), None).shape == (2, 1, 4, 16)


def test_a_window_beside_a_mask_without_it_is_refused() -> None:
    with pytest.raises(BatchError, match=r"sliding_window=2 in Attention\.3"):
        Attention()(*tensors(2, 3, 5), make_mask(), sliding_window=2)


def test_a_callers_own_mask_function_is_served_where_it_is_a_pattern() -> None:
    def three_keys(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - 3)

    mask = attention_mask(2, 7, 7, mask_function=three_keys)
    known = attention_mask(2, 7, 7, mask_function=masking_utils.sliding_window_causal_mask_function(3))
    given = tensors(2, 7, 7)
    assert torch.equal(Attention()(*given, mask), Attention()(*given, known))


def test_a_callers_mask_function_that_treats_rows_differently_is_refused() -> None:
    def second_row_sees_all(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) | (batch == 1)

    mask = attention_mask(2, 7, 7, mask_function=second_row_sees_all)
    with pytest.raises(BatchError, match=r"Attention\.3 .*neither full, causal, a window nor chunks"):
        Attention()(*tensors(2, 7, 7), mask)


@pytest.mark.parametrize(("spans", "blockwise"), [(-1, False), (0, True)], ids=["text", "images"])
def test_only_blocks_with_tokens_make_spans(spans: int, blockwise: bool) -> None:
    ids = torch.full((2, 7), spans)
    function = masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(ids)
    )
    step = attention_mask(2, 7, 7, mask_function=function).step
    assert (step.pattern.causal, step.pattern.blockwise) == (True, blockwise)


def test_a_mask_that_is_no_pattern_is_refused_only_where_a_layer_uses_it() -> None:
    ours, eager = DECODERS["gemma3"].pair(layer_types=["full_attention"] * 6, sliding_window=0)
    ids, mask = prompts()
    found, expected = (model(ids, attention_mask=mask).logits for model in (ours, eager))
    assert_same_logits(found, expected, mask)


def test_chunks_counted_from_elsewhere_than_the_first_token_are_refused() -> None:
    function = masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2]))
    mask = attention_mask(2, 7, 7, mask_function=function)
    with pytest.raises(BatchError, match=r"left_padding=\[0, 2\]"):
        Attention()(*tensors(2, 7, 7), mask)


def test_metadata_is_built_once_for_each_mask_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = TorchMetadataBuilder.build

    def counting(self: Any, prefix: int, common: Any, fast_build: bool = False) -> Any:
        built.append(common.num_actual_tokens)
        return build(self, prefix, common, fast_build)

    monkeypatch.setattr(TorchMetadataBuilder, "build", counting)
    ours, _ = DECODERS["gemma2"].pair()
    ids, mask = prompts()
    ours(ids, attention_mask=mask)
    assert built == [int(mask.sum())] * 2  # four layers, two masks


def test_impls_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnplug.backends.torch_native.impl import TorchImpl

    ours, _ = DECODERS["gpt_oss"].pair()
    ids, _ = prompts()
    ours(ids)
    monkeypatch.setattr(TorchImpl, "from_spec", None)
    ours(ids[:, :5])


def test_sinks_that_change_are_noticed() -> None:
    ours, eager = DECODERS["gpt_oss"].pair()
    ids, _ = prompts()
    ours(ids)
    for model in (ours, eager):
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(3.0)
    assert_same_logits(ours(ids).logits, eager(ids).logits)
    weights = {name: weight + 0.5 for name, weight in eager.state_dict().items() if "sinks" in name}
    for model in (ours, eager):
        model.load_state_dict(weights, strict=False, assign=True)
    assert_same_logits(ours(ids).logits, eager(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference_mode"])
def test_sinks_written_past_autograd_are_noticed(dtype: torch.dtype, inference: bool) -> None:
    ours, fresh = (DECODERS["gpt_oss"].pair()[0].to(dtype) for _ in range(2))
    ids, _ = prompts()
    modes = (torch.inference_mode, torch.no_grad) if inference else (torch.no_grad, torch.inference_mode)
    with modes[0]():
        before = ours(ids).logits
    for layer in ours.model.layers:
        layer.self_attn.sinks.data.fill_(3.0)
    fresh.load_state_dict(ours.state_dict())
    for mode in modes:
        with mode():
            found = ours(ids).logits
            assert not torch.equal(found, before)
            assert torch.equal(found, fresh(ids).logits)


def test_rules_by_layer_name_reach_the_layers_they_name() -> None:
    ours, _ = DECODERS["llama"].pair()
    with use({"model.layers.1.*": "TORCH"}):
        ours(prompts()[0])
    chosen = {name: d.chosen_by for name, d in attention_decisions(ours).items()}
    assert chosen.pop("model.layers.1.self_attn") == "attnplug.use"
    assert set(chosen.values()) == {"priority"}


def test_a_rule_in_the_environment_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", "TORCH")
    ours, _ = DECODERS["llama"].pair()
    ours(prompts()[0])
    assert {d.chosen_by for d in attention_decisions(ours).values()} == {"ATTNPLUG_BACKEND"}


def test_decisions_are_logged_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = DECODERS["llama"].pair()
    with caplog.at_level("INFO", logger="attnplug"):
        ours(prompts()[0])
        ours(prompts()[0])
    lines = [message for message in caplog.messages if "is served by" in message]
    assert lines == [f"model.layers.{i}.self_attn is served by TORCH" for i in range(4)]


def test_a_copied_or_pickled_model_starts_afresh() -> None:
    ours, _ = DECODERS["llama"].pair()
    ids, _ = prompts()
    expected = ours(ids).logits
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert attention_decisions(again) == {}
        assert torch.equal(again(ids).logits, expected)
