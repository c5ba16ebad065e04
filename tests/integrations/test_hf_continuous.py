"""transformers' continuous batching on attnplug: the tokens of ordinary generation, from pages and rings."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hf_models import DECODERS, WINDOW
from packaging.version import Version
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, offloading_manager
from transformers.generation.continuous_batching import cache as paged_cache

import attnplug
from attnplug.core.errors import BatchError
from attnplug.integrations.attention import paged as continuous
from attnplug.integrations.attention import paged as paged_steps
from attnplug.integrations.attention.paged_cache import layer_cache
from attnplug.integrations.transformers import attention_decisions

PAGE = 8
SETTINGS = GenerationConfig(max_new_tokens=14, do_sample=False, eos_token_id=None, pad_token_id=0)

CAP = {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1}
"""Large logits and a low cap, so that the cap changes which token is the likeliest."""


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without psutil transformers finds no memory on a CPU.
    monkeypatch.setattr(paged_cache.PagedAttentionMemoryHandler, "get_available_memory", lambda self: 1 << 30)


def prompts() -> list[list[int]]:
    """Some longer than a step's tokens, so that they come in pieces; the last two begin with the same two pages."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(3, 96, (length,), generator=generator).tolist() for length in (5, 41, 21)]
    return [*made, made[1][: 2 * PAGE] + made[0]]


def batched(model: Any, **changes: Any) -> list[list[int]]:
    """The new tokens of each prompt by `generate_batch`, in pages of 8 tokens and steps of at most 32."""
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    size = "page_size" if "page_size" in fields else "block_size"
    config = ContinuousBatchingConfig(**{size: PAGE, "num_blocks": 64, "max_batch_tokens": 32, **changes})
    results = model.generate_batch(
        prompts(), generation_config=SETTINGS, continuous_batching_config=config
    ).values()
    errors = [result.error for result in results if result.error]
    if errors:
        raise RuntimeError(str(errors[0]))
    return [result.generated_tokens for result in results]


def one_by_one(model: Any) -> list[list[int]]:
    """The new tokens of each prompt by `generate`."""
    return [
        model.generate(torch.tensor([ids]), generation_config=SETTINGS)[0, len(ids) :].tolist()
        for ids in prompts()
    ]


@pytest.mark.parametrize(
    ("family", "changes", "reference"),
    [
        ("llama", {}, "sdpa"),
        ("gemma2", {"attn_logit_softcapping": None}, "sdpa"),
        ("gemma2", CAP, "eager"),
        ("gpt_oss", {}, "eager"),
    ],
    ids=["llama", "gemma2 without a cap", "gemma2", "gpt_oss"],
)
def test_tokens_are_those_of_ordinary_generation(family: str, changes: Any, reference: str) -> None:
    if family != "llama" and Version(transformers.__version__) < Version("5.16"):
        pytest.skip("transformers before 5.16 reads other tokens than those of the window")
    ours, other = DECODERS[family].pair(**changes)
    # Later versions (seen in 5.23) have no sdpa for Gemma-2.
    other.set_attn_implementation(reference if other._supports_sdpa else "eager")
    expected = one_by_one(other)
    assert batched(ours) == expected
    decisions = attention_decisions(ours).values()
    assert len(decisions) == ours.config.num_hidden_layers
    for spec in (decision.spec for decision in decisions):
        # Layers with a window keep a ring of tokens, the others keep pages.
        assert (spec.direct_kv, spec.block_size) == ((True, None) if spec.is_windowed else (False, PAGE))
        assert spec.logits_soft_cap == getattr(ours.config, "attn_logit_softcapping", None)
        assert spec.has_sinks == (family == "gpt_oss")
    # The same model still generates in the ordinary way.
    assert ours.config._attn_implementation == "attnplug"
    assert one_by_one(ours) == expected


@pytest.mark.slow
def test_transformers_own_paged_attention_drops_the_cap() -> None:
    """What the comparison above would show if the cap were dropped."""
    _, eager = DECODERS["gemma2"].pair(**CAP)
    expected = one_by_one(eager)
    eager.set_attn_implementation("paged|eager")
    assert batched(eager) != expected


def test_a_stream_and_its_neighbours_keep_their_tokens_when_a_request_is_cancelled() -> None:
    ours, other = DECODERS["llama"].pair()
    expected = one_by_one(other)
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    size = "page_size" if "page_size" in fields else "block_size"
    config = ContinuousBatchingConfig(**{size: PAGE, "num_blocks": 64, "max_batch_tokens": 32})
    manager = ours.init_continuous_batching(SETTINGS, config)
    manager.start()
    try:
        for index, ids in enumerate(prompts()):
            # The second would draw tokens for long, and is cancelled while it does.
            count = 300 if index == 1 else SETTINGS.max_new_tokens
            manager.add_request(ids, str(index), max_new_tokens=count, streaming=index == 0)
        seen = []
        for result in manager.request_id_iter("0"):
            seen.append(list(result.generated_tokens))
            if len(seen) == 2:
                manager.cancel_request("1")
            if result.is_finished():
                break
        found = {index: manager.get_result(str(index), timeout=60) for index in (2, 3)}
    finally:
        manager.stop(block=True)
    assert len(seen) > 2, "tokens come one after another"
    assert all(expected[0][: len(tokens)] == tokens for tokens in seen)
    assert seen[-1] == expected[0]
    assert {index: result.generated_tokens for index, result in found.items()} == {
        index: expected[index] for index in (2, 3)
    }


def test_the_same_seed_draws_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = GenerationConfig(
        **{**SETTINGS.to_diff_dict(), "do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
    )
    monkeypatch.setitem(globals(), "SETTINGS", drawing)
    ours, other = DECODERS["llama"].pair()
    other.set_attn_implementation("paged|eager")
    torch.manual_seed(5)
    expected = batched(other)
    torch.manual_seed(5)
    drawn = batched(ours)
    assert drawn == expected
    monkeypatch.undo()
    assert drawn != one_by_one(ours), "they are not the likeliest"


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_prompt_of_one_token_that_is_forked_has_no_query_in_its_first_step(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family != "llama" and Version(transformers.__version__) < Version("5.16"):
        pytest.skip("transformers before 5.16 reads other tokens than those of the window")
    several = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    monkeypatch.setitem(globals(), "SETTINGS", GenerationConfig(**{**SETTINGS.to_diff_dict(), **several}))
    monkeypatch.setitem(globals(), "prompts", lambda: [[5, 6, 7, 8], [7], [9, 10]])
    ours, other = DECODERS[family].pair()
    # Each fork is a result of its own since transformers 5.23, and draws what its prompt draws.
    drawn = list(dict.fromkeys(map(tuple, batched(ours))))
    assert drawn == list(map(tuple, one_by_one(other)))


def test_decodes_read_the_block_tables_that_transformers_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[bool, tuple[int, ...]]] = []
    original = paged_steps.PagedStep.paged

    def paged(self: Any, *args: Any) -> Any:
        common = original(self, *args)
        steps.append((self.arguments["block_table"] is not None, tuple(self.query_lens.tolist())))
        table, slots = common.block_table_tensor.long(), common.slot_mapping
        # The last token of each request is written to its place in the table.
        last = (common.seq_lens - 1).long()
        block = table.gather(1, (last // PAGE)[:, None])[:, 0]
        ends = common.query_start_loc[1:].long() - 1
        assert (block * PAGE + last % PAGE).tolist() == slots[ends].tolist()
        return common

    monkeypatch.setattr(paged_steps.PagedStep, "paged", paged)
    ours, _ = DECODERS["llama"].pair()
    tokens = batched(ours)
    assert (True, (1,) * len(prompts())) in steps
    assert any(not tables and max(lengths) > 1 for tables, lengths in steps)
    # Without block tables each step has indices, which give the same pages.
    steps.clear()
    assert batched(ours, max_blocks_per_request=0) == tokens
    assert not any(tables for tables, _ in steps)


def test_keys_and_values_are_joined_before_transformers_keeps_views_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    original = offloading_manager.OffloadingManager.__init__

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        cache = kwargs.get("cache", *args[:1])
        pairs = zip(getattr(cache, "key_cache", ()), getattr(cache, "value_cache", ()), strict=True)
        made.append((cache, [(key.data_ptr(), value.data_ptr()) for key, value in pairs]))
        original(self, *args, **kwargs)

    monkeypatch.setattr(offloading_manager.OffloadingManager, "__init__", note)
    ours, _ = DECODERS["llama"].pair()
    batched(ours)
    [(cache, before)] = made
    if not before:
        pytest.skip("this version has one allocation for all layers")
    pairs = list(zip(cache.key_cache, cache.value_cache, strict=True))
    assert [(key.data_ptr(), value.data_ptr()) for key, value in pairs] == before
    assert all(key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() for key, value in pairs)


def test_rules_of_the_caller_reach_the_thread_that_generates() -> None:
    ours, _ = DECODERS["llama"].pair()
    with attnplug.use("TORCH"):
        batched(ours)
    assert {decision.chosen_by for decision in attention_decisions(ours).values()} == {"attnplug.use"}


def test_a_cache_that_drops_tokens_which_a_layer_sees_is_refused() -> None:
    config = DECODERS["llama"].make_config()
    config.sliding_window = WINDOW  # transformers then keeps a ring for layers whose masks have no window
    model = DECODERS["llama"].build(config, "attnplug")
    with pytest.raises(RuntimeError, match=r"sliding_window=8 is all that the cache keeps.*sees all tokens"):
        batched(model)


def test_a_layer_that_runs_twice_in_a_step_is_refused() -> None:
    # As in DiffLlama and HRM, the second call would overwrite the keys and values of the first one.
    ours, _ = DECODERS["llama"].pair()
    ours.model.layers[1] = ours.model.layers[0]
    limit = r"calls of attention=2 must be 1 in a step: .* for model\.layers\.0\.self_attn .*; use generate"
    with pytest.raises(RuntimeError, match=limit):
        batched(ours)


def test_a_model_that_does_not_pass_the_cache_on_is_refused() -> None:
    # As StableLm and Nemotron; each token would see those of its own step alone.
    def drop(module: Any, args: Any, keywords: dict[str, Any]) -> Any:
        return args, {name: value for name, value in keywords.items() if name != "cache"}

    ours, eager = DECODERS["llama"].pair()
    ours.model.layers[2].register_forward_pre_hook(drop, with_kwargs=True)
    limit = r"cache='PagedAttentionCache' of continuous batching does not reach model\.layers\.2\.self_attn .*use generate"
    with pytest.raises(RuntimeError, match=limit):
        batched(ours)
    assert one_by_one(ours) == one_by_one(eager)


def test_rings_of_a_version_that_reads_other_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.15.0")
    cache = SimpleNamespace(
        layer_index_to_group_indices={0: (0, 0), 1: (1, 0)}, sliding_windows={0: 1, 1: WINDOW}
    )
    assert layer_cache(cache, 0).window is None
    with pytest.raises(BatchError, match=r"transformers='5.15.0' before 5.16 reads a token that has left"):
        layer_cache(cache, 1)


def test_a_backend_that_cannot_serve_a_layer_is_named_in_the_error() -> None:
    ours, _ = DECODERS["gemma2"].pair()
    with attnplug.use("FLASHINFER"), pytest.raises(RuntimeError, match="FLASHINFER"):
        batched(ours)


@pytest.mark.parametrize(
    ("whole", "text", "kept"),
    [("attnplug", "attnplug", True), ("sdpa", "attnplug", True), ("sdpa", "sdpa", False)],
)
def test_a_model_whose_text_part_runs_on_attnplug_keeps_it(whole: str, text: str, kept: bool) -> None:
    def switched(*_: object) -> str:
        raise LookupError("switched")

    part = SimpleNamespace(_attn_implementation=text)
    config = SimpleNamespace(_attn_implementation=whole, get_text_config=lambda: part)
    manager, model = ContinuousBatchingManager, SimpleNamespace(config=config)
    with contextlib.nullcontext() if kept else pytest.raises(LookupError):
        continuous._keep(switched, manager, model)


def test_another_object_named_cache_is_refused() -> None:
    ours, _ = DECODERS["llama"].pair()
    ids = torch.tensor(prompts()[:1])
    with torch.no_grad(), pytest.raises(BatchError, match=r"cache=.* continuous batching"):
        ours(ids, cache=copy.copy)
