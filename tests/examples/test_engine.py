"""The example engine gives the tokens that transformers generates, however requests are batched."""

from __future__ import annotations

import pytest
import torch
from engine import Engine
from model import pack_linears
from small_models import FAMILIES, WINDOW, check_greedy, generated, random_prompts, small_model
from tiny import load

from attnplug.backends.torch_native import builder as torch_builder
from attnplug.core.errors import AttnplugError, BatchError, ModelConfigError

# The family that asks for most, with windows and sinks; the others differ in less.
QUICK_FIRST = [
    family if family == "GptOss" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES
]


def serve(engine, prompts, **sampling):
    requests = [engine.add(prompt, **sampling) for prompt in prompts]
    for _ in engine.stream():
        pass
    return [request.output for request in requests]


@pytest.mark.parametrize("family", QUICK_FIRST)
def test_greedy_tokens_equal_generate(family):
    prompts = random_prompts(3, 2 * WINDOW + 5)

    outputs = serve(Engine(small_model(family), num_blocks=256), prompts, max_tokens=64)

    for prompt, output in zip(prompts, outputs, strict=True):
        check_greedy(family, prompt, output)


@pytest.mark.parametrize("family", QUICK_FIRST)
def test_mixed_preempted_shared_and_chunked_requests_equal_generate(family):
    prefix = random_prompts(40, seed=1)[0]
    prompts = random_prompts(1, 90, 17, 16, seed=2) + random_prompts(5, 60, 30, 1, prefix=prefix, seed=3)
    groups = len(Engine(small_model(family)).runtime.kv_cache_config.kv_cache_groups)
    engine = Engine(small_model(family), num_blocks=groups * 14, max_num_batched_tokens=24, max_num_seqs=6)

    outputs = serve(engine, prompts, max_tokens=64)

    assert engine.preemptions > 0
    assert engine.pages.shared > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check_greedy(family, prompt, output)


def test_layers_may_ask_for_equal_bits():
    prompts = random_prompts(3, 40, 9)
    engine = Engine(small_model("Llama"), invariance=("batch",))

    assert {each.spec.invariance for each in engine.runtime.plan.decisions.values()} == {("batch",)}
    for prompt, output in zip(prompts, serve(engine, prompts, max_tokens=16), strict=True):
        check_greedy("Llama", prompt, output, 16)
    with pytest.raises(AttnplugError, match=r"invariance rows not supported: kind rows is not batch"):
        Engine(small_model("Llama"), invariance=("rows",))


def test_a_window_that_is_dropped_would_be_seen():
    [prompt] = random_prompts(2 * WINDOW)
    windowed, wide = small_model("Mistral"), small_model("Mistral")
    wide.config.sliding_window = 4096

    assert serve(Engine(windowed), [prompt]) != serve(Engine(wide), [prompt])


@pytest.mark.parametrize("family", [pytest.param("Gemma2", marks=pytest.mark.slow), "GptOss"])
def test_a_soft_cap_or_sinks_that_are_dropped_would_be_seen(family):
    [prompt] = random_prompts(2 * WINDOW)
    without = small_model(family)
    if family == "Gemma2":
        without.config.attn_logit_softcapping = None
    else:
        for layer in without.model.layers:
            layer.self_attn.sinks.data.fill_(-1e4)

    assert serve(Engine(without), [prompt]) != [generated(family, prompt, 64)]


def test_prompts_longer_than_a_step_are_computed_in_chunks():
    [prompt] = random_prompts(100)
    engine = Engine(small_model("Llama"), max_num_batched_tokens=32)

    [output] = serve(engine, [prompt], max_tokens=8)

    assert engine.steps == 4 + 7
    check_greedy("Llama", prompt, output, 8)


def test_a_preempted_request_loses_nothing():
    prompts = random_prompts(20, 24, 28)
    few = Engine(small_model("Llama"), num_blocks=10)
    many = Engine(small_model("Llama"))

    outputs = serve(few, prompts, max_tokens=40)

    assert few.preemptions > 0
    assert many.preemptions == 0
    assert outputs == serve(many, prompts, max_tokens=40)


def test_no_block_is_kept_once_all_requests_are_done():
    engine = Engine(small_model("Gemma3"), num_blocks=100)

    serve(engine, random_prompts(20, 50, 70), max_tokens=30)

    assert engine.runtime.block_pool.num_free == 99
    assert engine.builder.num_reqs == 0


def test_requests_in_flight_share_the_blocks_of_their_prefix():
    prefix = random_prompts(48)[0]
    first, second = random_prompts(3, 5, prefix=prefix)
    engine = Engine(small_model("Llama"))
    engine.add(first, max_tokens=20)
    engine.step()
    engine.add(second, max_tokens=20)
    engine.step()
    one, other = engine.running.values()

    assert one.pages[:3] == other.pages[:3]
    assert {engine.runtime.block_pool.users(block) for page in one.pages[:3] for block in page} == {2}
    assert one.pages[3] != other.pages[3]
    assert engine.pages.shared == 3

    for _ in engine.stream():
        pass
    check_greedy("Llama", first, one.output, 20)
    check_greedy("Llama", second, other.output, 20)


def test_a_prefix_in_flight_is_attended_once_and_no_token_changes(monkeypatch):
    # A prefix and a batch of this size would not be worth it.
    monkeypatch.setattr(torch_builder, "_SHARED_KEYS", 16)
    monkeypatch.setattr(torch_builder, "_SPARED_KEYS", 16)
    built: list[int] = []
    build = torch_builder.TorchMetadataBuilder.build

    def noted(self, common_prefix_len, *given, **named):
        built.append(common_prefix_len)
        return build(self, common_prefix_len, *given, **named)

    monkeypatch.setattr(torch_builder.TorchMetadataBuilder, "build", noted)
    prefix = random_prompts(48)[0]
    first, *others = random_prompts(3, 5, 9, prefix=prefix)
    engine = Engine(small_model("Llama"), block_size=16)
    requests = [engine.add(first, max_tokens=20)]
    engine.step()
    requests += [engine.add(prompt, max_tokens=12) for prompt in others]
    for _ in engine.stream():
        pass

    assert built.count(48) >= 10
    for prompt, request in zip((first, *others), requests, strict=True):
        check_greedy("Llama", prompt, request.output, len(request.output))


def test_pages_of_a_finished_request_are_found_until_they_are_reused():
    [prompt] = random_prompts(64)
    engine = Engine(small_model("Llama"), num_blocks=11)

    before = serve(engine, [prompt], max_tokens=8)
    again = serve(engine, [prompt], max_tokens=8)
    found = engine.pages.shared
    serve(engine, random_prompts(150, seed=9), max_tokens=8)
    afterwards = serve(engine, [prompt], max_tokens=8)

    assert found == 3, "the last page holds the last token, which is always computed"
    assert engine.pages.shared == found
    assert before == again == afterwards


def test_tokens_are_streamed_in_order_and_requests_interleaved():
    engine = Engine(small_model("Llama"))
    seen, order = {}, []
    for request in engine.stream(random_prompts(5, 9, 40), max_tokens=6):
        seen.setdefault(request.name, []).append(request.tokens[-1])
        order.append(request.name)
        assert seen[request.name] == request.output

    assert order == ["0", "1", "2"] * 6


def test_an_output_ends_with_a_stop_token():
    [prompt] = random_prompts(12)
    expected = generated("Llama", prompt, 20)
    stop = expected[7]

    [output] = serve(Engine(small_model("Llama")), [prompt], max_tokens=20, stop=frozenset({stop}))

    assert output == expected[: expected.index(stop) + 1]


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch():
    prompts = random_prompts(12, 30, 7)
    options = {"max_tokens": 16, "temperature": 0.8, "seed": 3}

    together = serve(Engine(small_model("Llama")), prompts, **options)
    alone = [serve(Engine(small_model("Llama"), num_blocks=8), [prompt], **options)[0] for prompt in prompts]
    other = serve(Engine(small_model("Llama")), prompts, **{**options, "seed": 4})

    assert together == alone
    assert together != other


def test_packed_projections_give_the_model_s_own_results():
    model = small_model("Llama")
    tokens = torch.randint(0, 64, (2, 9))
    with torch.inference_mode():
        expected = model(tokens).logits
        pack_linears(model)
        torch.testing.assert_close(model(tokens).logits, expected)


@pytest.mark.parametrize(("length", "limit"), [(0, "1 .. 80"), (81, "1 .. 80")])
def test_a_prompt_that_can_never_be_served_is_refused(length, limit):
    engine = Engine(small_model("Llama"), num_blocks=10)

    with pytest.raises(BatchError, match=limit):
        engine.add([1] * length, max_tokens=64)


def test_a_class_with_attention_of_its_own_is_refused():
    with pytest.raises(ModelConfigError, match="BloomForCausalLM never calls"):
        Engine(load_bloom())


def test_a_path_without_a_configuration_is_refused_by_name():
    with pytest.raises(ModelConfigError, match=r"nowhere\.json: no such file"):
        load("nowhere.json")


def load_bloom():
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64))
