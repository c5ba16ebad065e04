"""What vLLM's engine asks of backends, builders and layers besides numbers; run in a source tree as vllm_harness says."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core.composite import composite_backend
from attnplug.core.errors import AttnplugError, SpecError
from attnplug.core.metadata import AttentionCGSupport as OurSupport
from attnplug.core.metadata import AttentionMetadata as OurMetadata
from attnplug.core.spec import Phase
from attnplug.integrations.vllm import builder as builder_module
from attnplug.integrations.vllm import latent as latent_module
from attnplug.integrations.vllm import register
from attnplug.integrations.vllm.backends import backend_class
from attnplug.integrations.vllm.builder import Builder
from attnplug.integrations.vllm.impl import HAS_CACHE_SHAPE
from attnplug.integrations.vllm.latent_backends import latent_class
from attnplug.registry.default import get_registry

CPU = torch.device("cpu")
TORCH = backend_class("ATTNPLUG_TORCH")
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
PREFIX = 4096


def layer(backend: Any = TORCH, **arguments: Any) -> SimpleNamespace:
    with set_current_vllm_config(VllmConfig()):
        impl = backend.get_impl_cls()(8, 64, 0.125, 2, **arguments)
    impl.see(torch.bfloat16)
    return SimpleNamespace(impl=impl)


def builder(backend: Any = TORCH, **layers: Any) -> Any:
    config = VllmConfig()
    config.compilation_config.static_forward_context = layers
    return backend.get_builder_cls()(SPEC, [*layers], config, CPU)


def step() -> CommonAttentionMetadata:
    starts, lens = torch.arange(5).int(), torch.full((4,), PREFIX + 1).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=4,
        num_actual_tokens=4,
        max_query_len=1,
        max_seq_len=PREFIX + 1,
        block_table_tensor=torch.zeros(4, 400).int(),
        slot_mapping=torch.full((4,), -1),
        seq_lens_cpu_upper_bound=lens,
    )


class Built(OurMetadata):
    """Metadata of a builder that is only asked."""


def wants_prefix(made: Any, **changes: Any) -> bool:
    asked = {
        "common_prefix_len": PREFIX,
        "query_lens": np.ones(4, np.int32),
        "num_query_heads": 8,
        "num_kv_heads": 2,
        "use_alibi": False,
        "use_sliding_window": False,
        "use_local_attention": False,
        "num_sms": 132,
        "dcp_world_size": 1,
    }
    return bool(made.use_cascade_attention(**asked | changes))


def test_a_shared_prefix_reaches_the_builder_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = builder(a=layer())
    [bound] = made.kinds().values()
    inner, built = made.inner(bound), []
    monkeypatch.setattr(inner, "build", lambda *given: built.append(given[0]) or Built())
    for answer in (True, False):
        monkeypatch.setattr(inner, "use_cascade_attention", lambda answer=answer, **given: answer)
        assert wants_prefix(made) is answer
    monkeypatch.setattr(inner, "use_cascade_attention", lambda **given: True)
    assert not wants_prefix(made, use_sliding_window=True)
    assert not wants_prefix(made, use_local_attention=True)
    assert not wants_prefix(builder(a=layer(sliding_window=32)))
    made.build(PREFIX, step())
    made.build_for_cudagraph_capture(step())
    assert built == [PREFIX, 0]


def counted(made: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What vLLM's builder asks of attnplug's from here on."""
    [bound] = made.kinds().values()
    inner, asked = made.inner(bound), []
    for name in ("build", "update_block_table"):
        method = getattr(type(inner), name)

        def call(*given: Any, name: str = name, method: Any = method) -> Any:
            asked.append(name)
            return method(inner, *given)

        monkeypatch.setattr(inner, name, call)
    return asked


def group_step(given: CommonAttentionMetadata, page: int) -> CommonAttentionMetadata:
    """The same batch as another group's, with this group's pages, as vLLM gives it."""
    table = torch.full_like(given.block_table_tensor, page)
    return dataclasses.replace(given, block_table_tensor=table, slot_mapping=given.slot_mapping + page)


def test_groups_of_one_batch_share_a_build_and_have_pages_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = builder(a=layer()), builder(b=layer(sliding_window=32))
    asked = [counted(made, monkeypatch) for made in (first, second)]
    for _ in range(2):
        one = step()
        steps = [first.build(0, one), second.build(0, group_step(one, 3))]
        for made, page in zip(steps, (0, 3), strict=True):
            [metadata] = made.made.values()
            assert metadata.block_table.eq(page).all()
            assert metadata.slot_mapping.eq(page - 1).all()
            assert made.slot_mapping.eq(page - 1).all()
    assert asked == [["build"] * 2, ["update_block_table"] * 2]


def pages_of(made: Any) -> list[int]:
    """The page in each row of the block tables of a step's metadata."""
    return sorted({int(page) for metadata in made.made.values() for page in metadata.block_table.unique()})


def test_another_batch_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = builder(a=layer()), builder(b=layer())
    asked = [counted(made, monkeypatch) for made in (first, second)]
    one = step()
    other = dataclasses.replace(group_step(one, 3), max_seq_len=one.max_seq_len + 1)
    equal = step()  # in other tensors
    kept = [first.build(0, one), second.build(0, other), first.build(0, one), second.build(0, equal)]
    assert asked == [["build"] * 2] * 2
    assert [pages_of(made) for made in kept] == [[0], [3], [0], [0]]


def test_a_builder_never_takes_its_own_step_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    made = builder(a=layer())
    asked = counted(made, monkeypatch)
    one = step()
    kept = [made.build(0, one)]
    one.seq_lens.add_(1)  # vLLM writes the next step's values to the same memory
    kept.append(made.build(0, one))
    assert asked == ["build", "build"]
    assert [metadata.seq_lens[0] for each in kept for metadata in each.made.values()] == [
        PREFIX + 1,
        PREFIX + 2,
    ]


@pytest.mark.parametrize(("one_prefix", "other_prefix"), [(16, 0), (0, 16)])
def test_a_prefix_is_of_its_own_group(
    one_prefix: int, other_prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = builder(a=layer()), builder(b=layer())
    asked = [counted(made, monkeypatch) for made in (first, second)]
    one = step()
    kept = [first.build(one_prefix, one), second.build(other_prefix, group_step(one, 3))]
    assert asked == [["build"], ["build"]]
    assert [pages_of(made) for made in kept] == [[0], [3]]


@pytest.mark.parametrize("drafts", [True, False])
def test_a_build_of_another_kind_is_not_shared(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = builder(a=layer()), builder(b=layer())
    first.exact = second.exact = not drafts
    asked = [counted(made, monkeypatch) for made in (first, second)]
    one = step()
    kept = [first.build(0, one), second.build(0, group_step(one, 3), fast_build=not drafts)]
    assert asked == [["build"], ["build"]]
    assert [pages_of(made) for made in kept] == [[0], [3]]


@pytest.mark.parametrize("differs", ["nothing", "backend", "options", "specs", "kind", "no update"])
def test_kinds_share_a_build_only_where_it_serves_both(
    differs: str, both: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"sliding_window": 32} if differs == "specs" else {}
    if differs == "kind":
        fields = {"attn_type": "encoder_only"}
    backend = backend_class("ATTNPLUG_DECODES") if differs == "backend" else TORCH
    first = builder(a=layer(**({} if differs == "specs" else fields)))
    second = builder(backend, b=layer(backend, **fields))
    [bound] = second.kinds().values()
    if differs == "options":
        bound.decision = dataclasses.replace(bound.decision, options=(("split", "none"),))
    if differs == "specs":
        monkeypatch.setattr(builder_module, "own_build_key", lambda inner: None)
    if differs == "no update":
        for made in (first, second):
            [only] = made.kinds().values()
            monkeypatch.setattr(made.inner(only), "supports_update_block_table", False)
    asked = [counted(made, monkeypatch) for made in (first, second)]
    one = step()
    kept = [first.build(0, one), second.build(0, group_step(one, 3))]
    assert len(kept) == 2
    assert asked == [["build"], ["update_block_table" if differs == "nothing" else "build"]]


def test_equal_specs_share_a_build_also_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "own_build_key", lambda inner: None)
    first, second = builder(a=layer(sliding_window=32)), builder(b=layer(sliding_window=32))
    asked = [counted(made, monkeypatch) for made in (first, second)]
    one = step()
    kept = [first.build(0, one), second.build(0, group_step(one, 3))]
    assert [pages_of(made) for made in kept] == [[0], [3]]
    assert asked == [["build"], ["update_block_table"]]


@pytest.mark.parametrize("together", [True, False])
def test_steps_are_built_by_the_builder_whose_metadata_a_graph_reads(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = builder(a=layer()), builder(b=layer())
    one = step()
    graphs = [first.build_for_cudagraph_capture(one)]
    graphs.append(second.build_for_cudagraph_capture(group_step(one if together else step(), 3)))
    asked = [counted(made, monkeypatch) for made in (first, second)]
    one = step()
    # The builder that a graph reads builds, whether it comes first or not.
    kept = [*graphs, second.build(0, group_step(one, 3)), first.build(0, one)]
    assert asked == [["build"], ["build"]]
    one = step()
    kept += [first.build(0, one), second.build(0, group_step(one, 3))]
    assert asked == [["build"] * 2, ["build", "update_block_table" if together else "build"]]
    assert [pages_of(made) for made in kept] == [[0], [3], [3], [0], [0], [3]]


def test_a_batch_lives_as_long_as_its_steps() -> None:
    made = builder(a=layer())
    kept = made.build(0, step())
    assert Builder.latest is not None
    assert Builder.latest() is kept.batch
    del kept
    gc.collect()
    assert Builder.latest() is None


@pytest.mark.parametrize("level", OurSupport)
def test_graphs_are_of_the_level_of_the_groups_backends(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = TORCH.theirs[0].get_builder_cls()
    # Another group's layer does not count, and the configuration decides.
    monkeypatch.setattr(inner, "get_cudagraph_support", classmethod(lambda cls, config, cache: level))
    config = VllmConfig()
    config.compilation_config.static_forward_context = {"a": layer()}
    found = TORCH.get_builder_cls().get_cudagraph_support(config, SPEC)
    assert found is AttentionCGSupport(min(int(level), AttentionCGSupport.UNIFORM_BATCH.value))


def test_encoders_have_no_graphs() -> None:
    config = VllmConfig()
    config.compilation_config.static_forward_context = {"a": layer(attn_type="encoder_only")}
    assert TORCH.get_builder_cls().get_cudagraph_support(config, SPEC) is AttentionCGSupport.NEVER


def test_sinks_that_are_loaded_anew_are_read_into_the_same_memory() -> None:
    sinks = torch.ones(8, dtype=torch.bfloat16)
    impl = layer(sinks=sinks).impl
    used = impl.bound(16, CPU).tensors.sinks
    sinks.fill_(3.0)
    impl.process_weights_after_loading(torch.bfloat16)
    assert used.eq(3.0).all()
    assert impl.bound(16, CPU).tensors.sinks is used


def test_a_cache_that_vllm_drops_is_not_kept() -> None:
    one = layer()
    cache = torch.zeros((4, 2, 16, 2, 64) if HAS_CACHE_SHAPE else (4, 2, 16, 128), dtype=torch.bfloat16)
    keys = torch.ones(2, 2, 64, dtype=torch.bfloat16)
    one.impl.do_kv_cache_update(one, keys, keys, cache, torch.tensor([0, 17]))
    assert cache.sum() == 2 * keys.numel()
    [kept] = one.impl._caches.values()
    view = weakref.ref(kept.view)
    del cache, kept
    gc.collect()
    assert view() is None
    assert not one.impl._caches


@pytest.mark.parametrize("shared", [None, "b"])
def test_new_prompts_are_attended_from_the_call_except_in_layers_that_share_kv(shared: str | None) -> None:
    config = VllmConfig()
    one = layer(kv_sharing_target_layer_name=shared)
    config.compilation_config.static_forward_context = {"a": one}
    made = TORCH.get_builder_cls()(SPEC, ["a"], config, CPU)
    lens, starts = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([0, 3, 8], dtype=torch.int32)
    given = dataclasses.replace(
        step(),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu_upper_bound=lens,
        num_reqs=2,
        num_actual_tokens=8,
        max_query_len=5,
        max_seq_len=5,
        block_table_tensor=torch.tensor([[1], [2]]).int(),
        slot_mapping=torch.tensor([*range(16, 19), *range(32, 37)]),
    )
    torch.manual_seed(0)
    query, key, value = (torch.randn(8, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    cache = torch.zeros((4, 2, 16, 2, 64) if HAS_CACHE_SHAPE else (4, 2, 16, 128), dtype=torch.bfloat16)
    one.impl.do_kv_cache_update(one, key, value, cache, given.slot_mapping)
    metadata, found = made.build(0, given), []
    for keys, values in ((key, value), (None, None), (key + 1, value + 1)):
        output = torch.empty_like(query)
        one.impl.forward(one, query, keys, values, cache, metadata, output)
        found.append(output)
    torch.testing.assert_close(found[0], found[1])
    if shared:
        assert torch.equal(found[2], found[1]), "the pages have another layer's keys"


def test_a_backend_of_one_layout_gets_it() -> None:
    class OneLayout(TORCH.theirs[0]):  # type: ignore[misc,name-defined]
        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[str, ...]:
            return ("HND",)

    heads_first = type("HeadsFirst", (TORCH,), {"theirs": (OneLayout,)})
    if HAS_CACHE_SHAPE:
        assert heads_first.get_kv_cache_stride_order() == (0, 1, 3, 2, 4)
        with pytest.raises(NotImplementedError):
            TORCH.get_kv_cache_stride_order()
    else:
        names = [layout.name for layout in heads_first.supported_kv_cache_layouts()]
        assert sorted(names) == ["BHLNC", "BLHNC", "LBHNC", "LHBNC"]
        assert TORCH.supported_kv_cache_layouts() is None


def test_a_layer_with_a_window_gets_no_pages_of_single_tokens() -> None:
    sizes = TORCH.get_supported_kernel_block_sizes()
    # vLLM 0.25 takes the smallest for such layers.
    assert min(getattr(size, "base", size) for size in sizes) == 16
    assert TORCH.supports_block_size(48)
    assert not TORCH.supports_block_size(8)


def asked(**changes: Any) -> dict[str, Any]:
    """What vLLM asks `validate_configuration`."""
    made = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": "decoder",
        **changes,
    }
    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    return {name: value for name, value in made.items() if name in known}


@pytest.mark.parametrize("kind", ["decoder", "encoder_only"])
def test_windows_of_layers_that_are_not_causal_are_not_refused(kind: str) -> None:
    changes = {"attn_type": kind, "use_non_causal": kind == "decoder", "has_sliding_window": True}
    assert TORCH.validate_configuration(**asked(**changes)) == []


@pytest.mark.parametrize("name", ["int8_token_head", "nvfp4", "rotated4"])
def test_formats_with_planes_are_refused_because_vllms_pages_have_other_bytes(name: str) -> None:
    triton = backend_class("ATTNPLUG_TRITON")
    for backend in (TORCH, triton, backend_class("ATTNPLUG")):
        assert name not in backend.supported_kv_cache_dtypes
        assert not backend.supports_kv_cache_dtype(name)
        [reason] = backend.validate_configuration(**asked(kv_cache_dtype=name))
        assert reason.startswith(f"kv_cache_dtype {name} is not served in vLLM")
    with pytest.raises(AttnplugError, match="not served in vLLM"):
        layer(kv_cache_dtype=name)


class Prefills(TorchBackend):
    """TORCH under another name, chosen for prefill alone."""

    @staticmethod
    def get_name() -> str:
        return "PREFILLS"

    @classmethod
    def get_priority(cls, spec: Any, device: Any, phase: Phase | None) -> int:
        return 300 if phase is Phase.PREFILL else 1


class Decodes(TorchBackend):
    """TORCH under another name, chosen for all else."""

    @staticmethod
    def get_name() -> str:
        return "DECODES"

    @classmethod
    def get_priority(cls, spec: Any, device: Any, phase: Phase | None) -> int:
        return 200


@pytest.fixture
def both() -> Iterator[None]:
    def offered() -> tuple[type[TorchBackend], ...]:
        return Prefills, Decodes

    plugin = SimpleNamespace(ATTNPLUG_API=(1, 1), attnplug_backends=attnplug.hookimpl(offered))
    attnplug.register(plugin, "both")
    yield
    get_registry().unregister("both")


def test_vllms_choice_is_left_to_attnplug_phase_by_phase(both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    automatic = backend_class("ATTNPLUG")

    def decided() -> str | None:
        with set_current_vllm_config(VllmConfig()):
            impl = automatic.get_impl_cls()(8, 64, 0.125, 2)
        impl.see(torch.bfloat16)
        impl._has_drafts = has_drafts
        return impl.decide(16).backend

    has_drafts = False
    assert decided() == "PREFILLS+DECODES"
    has_drafts = True
    assert decided() == "PREFILLS+DECODES"
    with monkeypatch.context() as patched:
        builder = composite_backend(Prefills, Decodes).get_builder_cls()
        patched.setattr(builder, "needs_host_seq_lens", "exact")
        assert decided() == "DECODES", "lengths of drafts are upper bounds"
    has_drafts = False
    monkeypatch.setenv("ATTNPLUG_BACKEND", "prefill=TORCH")
    assert decided() == "TORCH+DECODES"
    assert automatic.validate_configuration(**asked()) == []
    monkeypatch.setenv("ATTNPLUG_BACKEND", "A*=TORCH")
    assert decided() == "PREFILLS+DECODES", "a rule for layers by name"
    monkeypatch.setenv("ATTNPLUG_BACKEND", "decode=FLASH_ATTN_2")
    reasons = automatic.validate_configuration(**asked())
    assert "FLASH_ATTN_2: device type not supported: cpu is not cuda" in reasons
    assert automatic.validate_configuration(**asked(attn_type="encoder_only")) == [], "it has no decodes"


def test_a_step_that_is_not_causal_has_the_window_on_both_sides() -> None:
    impl = layer(sliding_window=32).impl
    assert impl.decide(16).spec.window == (31, 0)
    assert impl.decide(16, causal=False).spec.window == (31, 31)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SinkFullAttentionSpec(**vars(SPEC) | {"sink_len": 16}), "SinkFullAttentionSpec"),
        (dataclasses.replace(SPEC, head_size_v=32), "head_size_v=32"),
    ],
    ids=["static sinks", "two sizes"],
)
def test_caches_that_are_more_than_a_layers_keys_and_values_are_refused(spec: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        TORCH.get_builder_cls()(spec, [], VllmConfig(), CPU)


@torch.no_grad()
def test_latent_weights_that_vllm_makes_anew_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(latent_module, "get_current_vllm_config", lambda: model)
    backend = latent_class("ATTNPLUG_TORCH_MLA")
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192}
    impl = backend.get_impl_cls()(2, 576, 0.1, q_lora_rank=None, v_head_dim=128, kv_b_proj=None, **sizes)
    torch.manual_seed(0)
    w_uk, w_uv = torch.randn(2, 128, 512) * 0.05, torch.randn(2, 512, 128)
    owner = SimpleNamespace(impl=impl, W_UK_T=w_uk.clone(), W_UV=w_uv.clone())
    config = VllmConfig()
    config.compilation_config.static_forward_context = {"a": owner}
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)
    made = backend.get_builder_cls()(spec, ["a"], config, CPU)
    cache, query, kv_c, k_pe = (
        torch.randn(shape) for shape in ((1, 16, 576), (4, 2, 192), (4, 512), (4, 64))
    )

    def output() -> torch.Tensor:
        found = torch.empty(4, 256)
        impl.forward_mha(query, kv_c, k_pe, cache, made.build(0, step()), torch.ones(()), found)
        return found

    first = output()
    owner.W_UK_T, owner.W_UV = w_uk.clone(), 4 * w_uv
    torch.testing.assert_close(output(), 4 * first)


def test_layers_that_share_kv_can_skip_tokens() -> None:
    fast = utils.create_fast_prefill_custom_backend("Fast", TORCH)
    one = layer(kv_sharing_target_layer_name="b")
    made = builder(fast, a=one)
    given = dataclasses.replace(step(), logits_indices_padded=torch.arange(4), num_logits_indices=4)
    metadata, bound = made.build(0, given).of(one.impl)
    assert metadata is not None
    assert bound.backend.get_name() == "TORCH"


@pytest.mark.parametrize("arguments", [{"relative_bias": torch.zeros(1)}, {"chunk_size": 8}], ids=str)
def test_an_unknown_argument_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(
        SpecError, match="is an argument that attnplug does not know, and may change the result"
    ):
        layer(**arguments)


@pytest.mark.parametrize("latent", [False, True])
def test_an_option_of_a_later_version_is_refused_unless_it_is_off(
    latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(
        cls: Any, head_size: int, dtype: Any, use_mla: bool, attn_type: str, use_new: bool = False
    ) -> None: ...

    monkeypatch.setattr(AttentionBackend, "validate_configuration", classmethod(later))
    backend = latent_class("ATTNPLUG_MLA") if latent else TORCH
    given = {"head_size": 64, "dtype": torch.bfloat16, "use_mla": latent, "attn_type": "decoder"}
    assert backend.validate_configuration(**given) == []
    assert backend.validate_configuration(**given, use_new=True) == [
        "use_new is not known to attnplug, and may change the result"
    ]


def test_an_unknown_argument_without_effect_is_none() -> None:
    layer(relative_bias=None, is_special=False)


@pytest.mark.parametrize("latent", [False, True])
def test_vllms_batch_invariant_mode_is_asked_of_each_layer(
    latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "invariance batch+rows not supported"
    backend = latent_class("ATTNPLUG_TORCH_MLA") if latent else TORCH
    assert not backend.supports_batch_invariance()
    given: dict[str, Any] = dict.fromkeys(
        ("has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False
    )
    given |= {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    given |= {"use_mla": latent, "device_capability": None, "attn_type": "decoder"}
    asked = inspect.signature(AttentionBackend.validate_configuration).parameters
    given = {name: value for name, value in given.items() if name in asked}
    if not latent:
        if "use_batch_invariant" in asked:
            reasons = backend.validate_configuration(**given, use_batch_invariant=True)
            assert any(words in reason for reason in reasons)
        assert not any("invariance" in reason for reason in backend.validate_configuration(**given))
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        impl = layer().impl
        with pytest.raises(AttnplugError, match=re.escape(words)):
            impl.decide(16)


def test_a_backend_that_keeps_batch_and_rows_serves_the_invariant_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchBackend, "supported_invariances", ("batch",))
    assert not TORCH.supports_batch_invariance()
    assert backend_class("ATTNPLUG_TRITON").supports_batch_invariance()
    assert backend_class("ATTNPLUG").supports_batch_invariance()


def test_kinds_of_steps_run_once_on_vllms_pages_before_its_graphs_and_write_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchBackend, "compile_key", classmethod(lambda cls, spec: spec.head_size))
    one = layer()
    shape = (3, 2, 16, 2, 64) if HAS_CACHE_SHAPE else (3, 2, 16, 128)
    one.kv_cache = torch.randn(shape).bfloat16()
    before, ran = one.kv_cache.clone(), list[tuple[int, ...]]()
    made = builder(a=one, b=layer())
    [bound] = made.kinds().values()
    attend = bound.inner.attend

    def watched(given: Any, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        ran.append(tuple(query.shape))
        assert not rest[-1].isnan().any()
        return attend(given, query, *rest)

    monkeypatch.setattr(bound.inner, "attend", watched)
    made.build(0, step())
    assert not ran
    made.build_for_cudagraph_capture(step())
    rows = {count for count, *_ in ran}
    assert {1, 2, 1024} <= rows
    assert made.inner(bound).config.max_num_seqs in rows
    assert torch.equal(one.kv_cache, before)
    done = len(ran)
    made.build_for_cudagraph_capture(step())
    assert len(ran) == done


def test_a_layer_whose_pages_vllm_has_not_bound_waits_for_its_first_call() -> None:
    made = builder(a=layer())
    made.build_for_cudagraph_capture(step())
    assert made.is_warm


def image_layer(**arguments: Any) -> SimpleNamespace:
    """A layer of a model whose images see all of themselves."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(is_mm_prefix_lm=True, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        impl = TORCH.get_impl_cls()(8, 64, 0.125, 2, **arguments)
    return SimpleNamespace(impl=impl)


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_an_image_see_all_of_it(window: int | None) -> None:
    one = image_layer(sliding_window=window)
    made = builder(a=one)
    torch.manual_seed(0)
    tokens = 9
    query, key, value = (torch.randn(tokens, heads, 64).bfloat16() for heads in (8, 2, 2))
    given = dataclasses.replace(
        step(),
        query_start_loc=torch.tensor([0, tokens]).int(),
        query_start_loc_cpu=torch.tensor([0, tokens]).int(),
        seq_lens=torch.tensor([tokens]).int(),
        num_reqs=1,
        num_actual_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=tokens,
        block_table_tensor=torch.ones(1, 1).int(),
        slot_mapping=torch.arange(16, 16 + tokens),
        seq_lens_cpu_upper_bound=torch.tensor([tokens]).int(),
    )
    shape = (3, 2, 16, 2, 64) if HAS_CACHE_SHAPE else (3, 2, 16, 128)
    cache = torch.zeros(shape).bfloat16()
    places = torch.arange(tokens)
    seen = places[:, None] >= places[None, :]
    if window is not None:
        seen &= places[:, None] - places[None, :] < window
    inside = (places >= 2) & (places <= 6)
    for ranges, sees in (({0: []}, seen), ({0: [(2, 6)]}, seen | (inside[:, None] & inside[None, :]))):
        metadata = made.build(0, dataclasses.replace(given, mm_req_doc_ranges=ranges))
        one.impl.do_kv_cache_update(one, key, value, cache, given.slot_mapping)
        output = one.impl.forward(one, query, key, value, cache, metadata, torch.empty_like(query))
        heads = (each.float().transpose(0, 1) for each in (query, key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=sees, scale=0.125, enable_gqa=True
        )
        torch.testing.assert_close(output.float(), expected.transpose(0, 1), atol=2e-2, rtol=2e-2)


def test_images_that_a_window_cuts_are_refused() -> None:
    one = image_layer(sliding_window=32)
    one.mm_prefix_clamp_sliding_window = True
    with pytest.raises(SpecError, match="mm_prefix_clamp_sliding_window"):
        builder(a=one)


def head_scaled(k_scale: torch.Tensor, v_scale: torch.Tensor, strategy: str = "attn_head") -> SimpleNamespace:
    """A layer of a checkpoint of llm-compressor, with the attributes that vLLM gives it after loading."""
    config = VllmConfig()
    config.quant_config = SimpleNamespace(kv_cache_scheme={"strategy": strategy})
    with set_current_vllm_config(config):
        impl = TORCH.get_impl_cls()(8, 64, 0.125, 2, kv_cache_dtype="fp8")
    impl.see(torch.bfloat16)
    floats = {"_k_scale_float": k_scale.max().item(), "_v_scale_float": v_scale.max().item()}
    return SimpleNamespace(impl=impl, _k_scale=k_scale, _v_scale=v_scale, **floats)


def attended(
    one: SimpleNamespace, output_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored values, and the output of decodes after they are written."""
    fp8 = torch.float8_e4m3fn
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=fp8)
    config = VllmConfig()
    config.compilation_config.static_forward_context = {"a": one}
    made = TORCH.get_builder_cls()(spec, ["a"], config, CPU)
    given = dataclasses.replace(
        step(),
        seq_lens=torch.ones(4).int(),
        seq_lens_cpu_upper_bound=torch.ones(4).int(),
        max_seq_len=1,
        block_table_tensor=torch.arange(1, 5).int()[:, None],
        slot_mapping=torch.arange(1, 5) * 16,
    )
    torch.manual_seed(0)
    query, key, value = (torch.randn(4, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    cache = torch.zeros((5, 2, 16, 2, 64) if HAS_CACHE_SHAPE else (5, 2, 16, 128), dtype=torch.uint8)
    one.impl.do_kv_cache_update(one, key, value, cache, given.slot_mapping)
    output = torch.empty_like(query, dtype=torch.bfloat16 if output_scale is None else fp8)
    one.impl.forward(one, query, key, value, cache, made.build(0, given), output, output_scale)
    # A request of one token gives back its value.
    return value.repeat_interleave(4, 1), output


def test_scales_for_each_head_are_those_of_the_layers_tensors_and_not_the_largest() -> None:
    given, found = attended(head_scaled(torch.tensor([0.5, 0.01]), torch.tensor([3.0, 0.002])))
    # The values of the second head are beyond 448 times its scale.
    torch.testing.assert_close(found[:, :4], given[:, :4], rtol=0.07, atol=3 * 2.0**-10)
    torch.testing.assert_close(found[:, 4:], given[:, 4:].clamp(-0.896, 0.896), rtol=0.07, atol=1e-4)


def test_scales_for_each_head_that_vllm_did_not_say_are_refused() -> None:
    with pytest.raises(
        AttnplugError, match=r"layer._k_scale=\(2,\) must have one element; declare .*head_scales"
    ):
        attended(head_scaled(torch.tensor([0.5, 0.01]), torch.ones(2), "tensor"))


def test_backends_without_scales_for_each_head_refuse_them() -> None:
    if (
        "use_per_head_quant_scales"
        not in inspect.signature(AttentionBackend.validate_configuration).parameters
    ):
        pytest.skip("this version has none")
    given = asked(use_per_head_quant_scales=True, kv_cache_dtype="fp8")
    assert TORCH.supports_per_head_quant_scales()
    assert TORCH.validate_configuration(**given) == []
    other = backend_class("ATTNPLUG_FLASHINFER")
    assert not other.supports_per_head_quant_scales()
    assert any("head_scales not supported" in reason for reason in other.validate_configuration(**given))
    # Layers that keep 16 bits in such a checkpoint have no scales.
    assert TORCH.validate_configuration(**{**given, "kv_cache_dtype": "auto"}) == []


FP8_STATIC = kFp8StaticTensorSym
FP8_DYNAMIC = dataclasses.replace(FP8_STATIC, scale=dataclasses.replace(FP8_STATIC.scale, static=False))


def test_outputs_of_8_bits_are_offered_by_backends_that_write_them_and_written_with_the_scale() -> None:
    one = head_scaled(torch.tensor([0.5, 0.2]), torch.tensor([0.3, 0.2]))
    assert one.impl.fused_output_quant_supported(FP8_STATIC)
    assert not one.impl.fused_output_quant_supported(FP8_DYNAMIC)
    assert not one.impl.fused_output_quant_supported(kNvfp4Dynamic)
    _, right = attended(one)
    _, found = attended(one, torch.tensor(0.02))
    assert found.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(found.float() * 0.02, right.float(), rtol=0.07, atol=0.02 * 2.0**-9)
    assert (
        one.impl.forward(one, found, None, None, found, None, found, torch.tensor(0.02)).float().eq(0).all()
    )


def test_outputs_of_8_bits_are_refused_by_backends_that_do_not_write_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchImpl, "fused_output_quant_supported", lambda self, quant_key: False)
    one = head_scaled(torch.tensor([0.5, 0.2]), torch.tensor([0.3, 0.2]))
    assert not one.impl.fused_output_quant_supported(FP8_STATIC)
    with pytest.raises(
        AttnplugError, match=r"was not offered: TORCH writes no outputs of torch.float8_e4m3fn"
    ):
        attended(one, torch.tensor(0.02))


@pytest.mark.parametrize("name", ["ATTNPLUG", "ATTNPLUG_TORCH_MLA"])
def test_names_reach_processes_that_have_loaded_no_plugin(name: str) -> None:
    register()
    sent = pickle.dumps(AttentionBackendEnum[name])
    asked = (
        f"import pickle; found = pickle.loads({sent!r}); "
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as names; "
        f"print(found is names[{name!r}], found.get_path())"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    module = "latent_backends" if name.endswith("MLA") else "backends"
    assert done.stdout.split() == ["True", f"attnplug.integrations.vllm.{module}.{name}"]
