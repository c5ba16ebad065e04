"""Spans of image tokens, which see each other in both directions, through transformers and against eager attention."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
import transformers
from hf_models import WINDOW, assert_same_logits
from transformers import masking_utils

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Feature, LayerSpec
from attnplug.errors import BatchError, NoBackendError
from attnplug.integrations.attention.registration import attention, attention_mask
from attnplug.integrations.transformers import attention_decisions, set_attention
from attnplug.testing import assert_close, request_oracle

pytestmark = pytest.mark.usefixtures("no_grad")

IMAGE, IMAGE_TOKENS, LENGTH = 90, 4, 30
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
}


def pair(cls: Any, config: Any) -> tuple[Any, Any]:
    """The same model twice, with weights that make attention matter: on attnplug and on eager attention."""
    torch.manual_seed(0)
    eager = cls._from_config(config, attn_implementation="eager").eval()
    for weight in eager.parameters():
        if weight.ndim >= 2:
            weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    ours = copy.deepcopy(eager)
    set_attention(ours)
    return ours, eager


def gemma3(window: int = WINDOW) -> tuple[Any, Any]:
    kinds = ["sliding_attention", "full_attention"] * 2
    text = {**TEXT, "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": window}
    config = transformers.Gemma3Config(
        text_config={**text, "query_pre_attn_scalar": 16},
        vision_config={**VISION, "patch_size": 4},
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=IMAGE,
    )
    return pair(transformers.Gemma3ForConditionalGeneration, config)


def paligemma(window: int | None) -> tuple[Any, Any]:
    text = {**TEXT, "num_hidden_layers": 2, "model_type": "gemma2" if window else "gemma"}
    if window:
        text |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    config = transformers.PaliGemmaConfig(
        text_config=text,
        vision_config={**VISION, "patch_size": 8, "projection_dim": 64},
        image_token_index=IMAGE,
        projection_dim=64,
    )
    return pair(transformers.PaliGemmaForConditionalGeneration, config)


def prompt(
    side: str | None, first: tuple[int, ...] = (9, 17), others: tuple[int, ...] = (14,)
) -> dict[str, Any]:
    """Two rows with images at these places, and padding at one side of the second one."""
    ids = torch.randint(3, 80, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    for row, places in enumerate((first, others)):
        for place in places:
            ids[row, place : place + IMAGE_TOKENS] = IMAGE
    mask = torch.ones_like(ids)
    if side is not None:
        mask[1, slice(0, 6) if side == "left" else slice(LENGTH - 6, LENGTH)] = 0
    ids = ids.masked_fill(mask == 0, 0)
    images = int((ids == IMAGE).sum()) // IMAGE_TOKENS
    pixels = torch.randn(images, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    types = (ids == IMAGE).long()
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "token_type_ids": types}


def spans_of_layers(model: Any) -> set[bool]:
    return {d.spec.mm_prefix for name, d in attention_decisions(model).items() if "language_model" in name}


@pytest.mark.parametrize("side", [None, "left", "right"])
# A window smaller than an image hides the image's first tokens from its last ones in Gemma-3's windowed layers.
@pytest.mark.parametrize("window", [WINDOW, 3])
def test_gemma3_with_images_equals_eager(window: int, side: str | None) -> None:
    ours, eager = gemma3(window)
    given = prompt(side)
    found, expected = ours(**given).logits, eager(**given).logits
    assert_same_logits(found, expected, given["attention_mask"])
    assert spans_of_layers(ours) == {True}
    text = eager(**{**given, "token_type_ids": torch.zeros_like(given["token_type_ids"])}).logits
    assert (text - expected).abs().max() > 0.1


def test_images_side_by_side_and_at_the_beginning_equal_eager() -> None:
    ours, eager = gemma3()
    given = prompt(None, first=(0, 4, 12), others=(26,))
    assert_same_logits(ours(**given).logits, eager(**given).logits)


@pytest.mark.parametrize("cache", [None, "static"])
def test_gemma3_generates_the_same_tokens_after_images(cache: str | None) -> None:
    ours, eager = gemma3()
    more = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    given = prompt("left")
    assert ours.generate(**given, **more).tolist() == eager.generate(**given, **more).tolist()
    assert spans_of_layers(ours) == {False}  # the last step decoded text


@pytest.mark.parametrize("window", [None, 5], ids=["full", "windowed"])
def test_a_prefix_whose_tokens_see_each_other_equals_eager(window: int | None) -> None:
    ours, eager = paligemma(window)
    given = prompt(None, first=(0,), others=(0,))
    given["token_type_ids"] = (torch.arange(LENGTH) >= 19).long().expand(2, -1)
    more = {"labels": given["input_ids"]}
    found, expected = ours(**given, **more).logits, eager(**given, **more).logits
    assert_same_logits(found, expected)
    assert spans_of_layers(ours) == {True}


class Textual(TorchBackend):
    """TORCH for text only."""

    features: ClassVar[Feature] = TorchBackend.features & ~Feature.MM_PREFIX

    @staticmethod
    def get_name() -> str:
        return "TEXTUAL"


def test_a_backend_that_has_not_declared_spans_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchBackend, "features", Textual.features)
    ours, eager = gemma3()
    given = prompt(None)
    with attnplug.use("TORCH"), pytest.raises(NoBackendError, match="multimodal prefix spans not supported"):
        ours(**given)
    text = {name: given[name].clip(max=80) for name in ("input_ids", "attention_mask")}
    text["token_type_ids"] = torch.zeros_like(text["input_ids"])
    with attnplug.use("TORCH"):
        assert_same_logits(ours(**text).logits, eager(**text).logits)


# Masks as transformers makes them, given to a module.


class Attention(torch.nn.Module):
    layer_idx = 3

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> Any:
        return attention(self, query, key, value, mask)[0]


SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", mm_prefix=True)


def tensors(batch: int, q_length: int, kv_length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((batch, 4, q_length, 16), (batch, 2, kv_length, 16), (batch, 2, kv_length, 16))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def blocks(ids: list[list[int]], around: Any = masking_utils.causal_mask_function) -> Any:
    return masking_utils.or_masks(around, masking_utils.blockwise_overlay(torch.tensor(ids)))


@pytest.mark.parametrize(
    ("around", "fields"),
    [
        (masking_utils.causal_mask_function, {}),
        (masking_utils.sliding_window_causal_mask_function(2), {"sliding_window": 2}),
        (masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 0])), {"chunk_size": 4}),
    ],
    ids=["causal", "window", "chunk"],
)
def test_blocks_are_spans_past_windows_and_chunks(around: Any, fields: dict[str, int]) -> None:
    ids = [[-1, 0, 0, 0, 0, 1, 1, -1, -1], [0, -1, 1, 1, 1, 1, -1, 2, 2]]
    spans = [[(1, 5), (5, 7)], [(0, 1), (2, 6), (7, 9)]]
    query, key, value = tensors(2, 9, 9)
    found = Attention()(query, key, value, attention_mask(2, 9, 9, mask_function=blocks(ids, around)))
    for row in range(2):
        packed = (tensor[row].transpose(0, 1) for tensor in (query, key, value))
        expected = request_oracle(SPEC.replace(**fields), *packed, 9, spans=spans[row])
        assert_close(found[row], expected.output, 1e-5)


def test_a_span_whose_first_tokens_are_in_the_cache_is_seen_by_the_others() -> None:
    ids = [[-1, 0, 0, 0, 0, -1]]
    query, key, value = tensors(1, 3, 5)
    mask = attention_mask(1, 3, 5, q_offset=3, kv_offset=1, mask_function=blocks(ids))
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    expected = request_oracle(SPEC, *packed, 6, spans=[(1, 5)])
    assert_close(Attention()(query, key, value, mask)[0], expected.output, 1e-5)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([[0, 0, -1, 0, 0, -1, -1]], "keys that are not one range"),
        ([[0, 1, 0, 1, -1, -1, -1]], "keys that are not one range"),
    ],
)
def test_blocks_that_are_no_spans_are_refused(ids: list[list[int]], said: str) -> None:
    mask = attention_mask(1, 7, 7, mask_function=blocks(ids))
    with pytest.raises(BatchError, match=said):
        Attention()(*tensors(1, 7, 7), mask)


def test_a_mask_that_hides_keys_from_blocks_is_refused() -> None:
    def hides(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key > 0) | (query < 5)

    mask = attention_mask(
        1, 7, 7, mask_function=masking_utils.and_masks(blocks([[-1, 0, 0] + [-1] * 4]), hides)
    )
    with pytest.raises(BatchError, match=r"do not see all that the rest|neither full"):
        Attention()(*tensors(1, 7, 7), mask)
