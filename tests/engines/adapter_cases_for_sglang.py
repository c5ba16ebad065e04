"""The client beside SGLang's own classes: names, hooks, and that each field and attribute of this version is known.

Run as `kit_cases_for_sglang.py` is.
"""

from __future__ import annotations

import dataclasses
import json
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups import choices, model_hook
from sglang.srt.arg_groups import overrides as passes
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner as runners

import attnplug
from attnplug.core.errors import SpecError
from attnplug.integrations.sglang import decisions, layers, register
from attnplug.integrations.sglang import fields as each_field
from attnplug.integrations.sglang.backend import Backend
from attnplug.integrations.sglang.caches import check_pool, logical, pool_of
from attnplug.integrations.sglang.drafts import DraftBackend

ROOT = Path(__file__).parents[2]


def test_each_field_of_a_batch_is_known() -> None:
    fields = {field.name for field in dataclasses.fields(ForwardBatch) if not field.name.startswith("_")}
    known = each_field.READ | each_field.HARMLESS | set(each_field.REFUSED)
    assert fields - known == set()


def test_each_attribute_of_a_layer_is_known() -> None:
    layer = RadixAttention(4, 16, 0.25, 2, layer_id=0)
    found = set(vars(layer)) - set(vars(torch.nn.Module()))
    assert found - layers.READ - layers.HARMLESS == set()
    assert {each.value for each in AttentionType} == {"decoder", "decoder_bidirectional", "encoder_only"}


def test_names_are_in_sglangs_choices_once() -> None:
    register()
    names = {"attnplug"} | {f"attnplug_{name.lower()}" for name in attnplug.list_backends()}
    assert names <= set(ATTENTION_BACKENDS)
    for listed in (choices.ATTENTION_BACKEND_CHOICES, choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES):
        assert all(listed.count(name) == 1 for name in names)


def test_pages_have_64_tokens_unless_the_user_says_otherwise() -> None:
    HookRegistry.apply_hooks()
    view = SimpleNamespace(page_size=None, attention_backend="attnplug", decode_attention_backend=None)
    assert passes._page_size_default(view) == {"page_size": 64}
    view.attention_backend = "attnplug_flash_attn_2"
    assert passes._page_size_default(view) == {"page_size": 256}
    view.attention_backend = "triton"
    assert passes._page_size_default(view) == {"page_size": 1}
    view.decode_attention_backend = "attnplug_triton"
    assert passes._page_size_default(view) == {"page_size": 64}
    view.page_size = 16
    assert passes._page_size_default(view) == {}


@pytest.mark.parametrize(
    ("name", "refused"), [("attnplug", False), ("attnplug_torch", False), ("torch_native", True)]
)
def test_gpt_oss_takes_attnplugs_names_beside_those_of_its_closed_list(
    name: str, refused: bool, tmp_path: Path
) -> None:
    HookRegistry.apply_hooks()
    config = json.loads((ROOT / "examples" / "models" / "gpt-oss-20b.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ServerArgs(
        model_path=str(tmp_path), attention_backend=name, device="cpu", skip_tokenizer_init=True
    )
    reads = model_hook.attention_backends_of
    if refused:
        with pytest.raises(AssertionError, match="GptOssForCausalLM requires one of"):
            arguments.resolve_once()
    else:
        arguments.resolve_once()
        assert arguments.attention_backend == name
    assert model_hook.attention_backends_of is reads


def fixture(page: int = 16, **changes: Any) -> Any:
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "forward_mode": ForwardMode.EXTEND}
    case = dense.DenseAttentionCase(
        name="own",
        backend="attnplug",
        page_size=page,
        prefix_lens=(5, 18),
        extend_lens=(9, 4),
        **fields | changes,
    )
    built = dense.build_dense_attention_fixture(None, case, dtype=torch.float32, device="cpu")
    assert isinstance(built.backend, Backend)
    return built


def test_no_cache_is_copied() -> None:
    built = fixture()
    pool = built.runner.token_to_kv_pool
    view = logical(*pool.get_kv_buffer(0), 16)
    assert view.data_ptr() == pool.k_buffer[0].data_ptr()
    assert view[:, 1].data_ptr() == pool.v_buffer[0].data_ptr()
    assert decisions(built.backend) == {}
    dense.run_dense_fixture_eager(built)
    assert [each.backend for each in decisions(SimpleNamespace(full_attn_backend=built.backend)).values()]


def test_a_cap_that_sglangs_torch_native_ignores_is_honoured() -> None:
    plain = dense.run_dense_fixture_eager(fixture())
    built = fixture()
    built.actual_module.attn.logit_cap = 0.05
    capped = dense.run_dense_fixture_eager(built)
    assert (capped - plain).abs().max() > 1e-3


def test_pools_by_head_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = dense.run_dense_fixture_eager(fixture())
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    built = fixture()
    assert built.runner.token_to_kv_pool.kv_cache_layout == "hnd"
    torch.testing.assert_close(dense.run_dense_fixture_eager(built), expected)


def test_values_of_another_size_are_refused() -> None:
    common: dict[str, Any] = {
        "layer_num": 1,
        "device": "cpu",
        "enable_memory_saver": False,
        "enable_alt_stream": False,
    }
    pool = MHATokenToKVPool(64, 16, torch.float32, 2, 16, v_head_dim=8, **common)
    with pytest.raises(SpecError, match="SGLang allocates such K and V apart"):
        logical(*pool.get_kv_buffer(0), 16)


@pytest.mark.parametrize("name", ["attnplug", "attnplug_torch"])
def test_a_draft_model_gets_attnplugs_backends(name: str) -> None:
    HookRegistry.apply_hooks()
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "page_size": 16, "backend": name}
    case = dense.DenseAttentionCase(
        name="draft", forward_mode=ForwardMode.DECODE, prefix_lens=(7, 14, 20), **fields
    )
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "vocab_size": 64,
        "max_context_len": 64,
        "atol": 0.0,
        "rtol": 0.0,
    }
    settings = runners.EagleDraftRunnerSettings(
        topk=1,
        speculative_num_steps=3,
        speculative_num_draft_tokens=4,
        capture_batch_size=4,
        dtype=torch.float32,
        device="cpu",
        **sizes,
    )
    adapter = SimpleNamespace(
        build_fixture=dense.build_dense_attention_fixture,
        make_model_forward=runners._make_dense_model_forward,
    )
    kwargs = {"dtype": torch.float32, "device": "cpu"}
    built, worker, drafts = runners._build_eagle_draft_fixture(
        unittest.TestCase(), case, adapter=adapter, build_kwargs=kwargs, settings=settings
    )
    assert isinstance(drafts, DraftBackend)
    assert len(drafts.attn_backends) == 2
    # The kit's own need the generator of a GPU.
    inputs = {
        "topk_p": torch.ones(3, 1),
        "topk_index": torch.tensor([[3], [9], [27]]),
        "hidden_states": torch.randn(3, 64),
    }
    runners._prepare_dense_draft_replay_state(built, case, inputs, settings)
    given = runners._make_dense_eagle_draft_forward_batch(case, inputs, settings)
    built.runner.kv_index_translator.bind_own_plan(given)
    found = runners._run_eagle_draft_eager(worker, given)
    assert all(torch.isfinite(each.float()).all() for each in found if isinstance(each, torch.Tensor))
    assert [each.backend for backend in drafts.attn_backends for each in backend.decisions().values()] == [
        "TORCH"
    ] * 2
    extends = DraftBackendFactory(built.runner, 1, 3).create_draft_extend_backend()
    assert isinstance(extends, Backend)


def test_the_pool_of_windows_is_two_pools() -> None:
    common: dict[str, Any] = {"enable_alt_stream": False}
    pool = SWAKVPool(64, 32, 16, torch.float32, 2, 16, [1], [0, 2], "cpu", **common)
    check_pool(pool)
    assert [pool_of(pool, layer).windowed for layer in range(3)] == [False, True, False]
    mapping = torch.arange(81) % 48
    pool.register_mapping(mapping)
    layer = RadixAttention(4, 16, 0.25, 2, layer_id=1)
    key = torch.randn(2, 2, 16)
    slots = torch.tensor([18, 65])
    pool.set_kv_buffer(layer, KVWriteLoc(slots, mapping[slots]), key, key)
    view = logical(*pool.get_kv_buffer(1), 16)
    assert torch.equal(view[1, 0, 2], key[0])
    assert torch.equal(view[1, 1, 1], key[1])
