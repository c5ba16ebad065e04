"""Classes in the form of vLLM: each name and signature of theirs is read, or refused with what to write."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_plugins import CPU, SPEC, Serves, plugin
from plugin_env import PLUGINS

import attnplug
from attnplug import LayerSpec, Registry
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend, AttentionCGSupport, BuilderConfig, FullAttentionSpec
from attnplug.core.interface.impl_and_builder import make_builder, make_impl, part_faults
from attnplug.errors import NoBackendError, PluginError
from attnplug.registry.plugins.discovery import Host
from attnplug.registry.plugins.records import PluginRecord, PluginStatus
from attnplug.registry.selection.gates import import_parts

TORCH_IMPL: Any = TorchBackend.get_impl_cls()
TORCH_BUILDER: Any = TorchBackend.get_builder_cls()
CACHE = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="float32")


def made(base: type = Serves, impl: type = TORCH_IMPL, builder: type = TORCH_BUILDER, **names: Any) -> Any:
    """A backend that runs as TORCH does, with these names in its class; bare functions are class methods."""
    parts = {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return type("Acme", (base,), {"get_name": staticmethod(lambda: "ACME"), **parts, **names})


def method(function: Callable[..., Any]) -> Any:
    return classmethod(function)


def refusal(backend: type[AttentionBackend]) -> str:
    """Why a registry does not take the plugin that offers this backend."""
    with pytest.raises(PluginError) as caught:
        Registry({"acme": plugin(backend)})
    return str(caught.value)


def old_validate(
    cls: Any, head_size: Any, dtype: Any, kv_cache_dtype: Any, block_size: Any, *more: Any
) -> Any:
    raise AssertionError("registration calls no method of a plugin but get_name")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding window": (
        {"supports_sliding_window": method(lambda cls: True)},
        "Acme.supports_sliding_window is not read by attnplug; declare Feature.SLIDING_WINDOW in features",
    ),
    "non-causal": ({"supports_non_causal": method(lambda cls: True)}, "declare Feature.NON_CAUSAL in features"),
    "batch invariance": ({"supports_batch_invariance": method(lambda cls: True)}, "declare Feature.INVARIANCE in features"),
    "one forward": ({"forward_includes_kv_cache_update": True}, "write update_kv_cache and attend on the impl"),
    "cascade": ({"use_cascade_attention": staticmethod(lambda *args: False)}, "a method of the builder"),
    "metadata class": ({"get_metadata_cls": staticmethod(lambda: dict)}, "build returns the metadata"),
    "dtypes method": ({"get_supported_dtypes": method(lambda cls: [])}, "set supported_dtypes"),
    "head size check": ({"validate_head_size": method(lambda cls, size: None)}, "get_supported_head_sizes"),
    "singular": ({"get_supported_kernel_block_size": staticmethod(lambda: [16])}, "get_supported_kernel_block_sizes("),
    "dcp": ({"supports_dcp": method(lambda cls: True)}, "set can_return_lse_for_decode on the impl"),
    "on the wrong class": ({"reorder_batch_threshold": 1}, "Acme.reorder_batch_threshold is not read"),
    "graphs on the wrong class": ({"_cudagraph_support": 3}, "set it on the builder"),
    "own buffer": ({"accept_output_buffer": False}, "attend always writes the output that it is given"),
    "misspelt attribute": ({"supported_dtype": ("float16",)}, "did you mean supported_dtypes?"),
    "misspelt method": ({"supports_sinks": method(lambda cls: True)}, "did you mean supports_sink?"),
    "misspelt door": ({"device_type": ("cpu",)}, "Acme.device_type is not read by attnplug; did you mean device_types?"),
    "misspelt foreign": ({"supports_sliding_windows": True}, "declare Feature.SLIDING_WINDOW in features"),
    "unknown claim": ({"supports_tree_attention": True}, "begin the name of a helper with an underscore"),
    "older validate": (
        {"validate_configuration": method(old_validate)},
        "has vLLM's arguments; write def validate_configuration(cls, spec, device, phase=None)",
    ),
    "older combination": ({"supports_combination": method(old_validate)}, "write def supports_combination(cls, spec, device)"),
    "keyword of vLLM": (
        {"supports_combination": method(lambda cls, spec, device_capability: None)},
        "has the parameter device_capability; read device.capability",
    ),
    "block sizes": (
        {"get_supported_kernel_block_sizes": staticmethod(lambda: [16])},
        "write def get_supported_kernel_block_sizes(cls, spec=None, device=None)",
    ),
    "cache shape": (
        {
            "get_kv_cache_shape": staticmethod(
                lambda num_blocks, block_size, heads, head_size, dtype="auto": ()
            )
        },
        "cache_dtype='auto', head_size_v=None)",
    ),
    "stride order": (
        {"get_kv_cache_stride_order": staticmethod(lambda include_num_layers_dimension=False: ())},
        "write def get_kv_cache_stride_order(cls, include_num_layers_dimension=False, *, layout=None, spec=None)",
    ),
    "preferred size": (
        {"get_preferred_block_size": method(lambda cls, default_block_size: 16)},
        "Acme.get_preferred_block_size does not take what attnplug gives",
    ),
    "no class method": ({"supports_head_size": lambda cls, size: True}, "write def supports_head_size(cls, head_size)"),
    "a value": ({"supports_sink": True}, "Acme.supports_sink is True; it must be a class method"),
    "a property": ({"is_mla": property(lambda self: True)}, "Acme.is_mla is a property; it must be a class method"),
    "a method": ({"supported_dtypes": method(lambda cls: [])}, "Acme.supported_dtypes is a method"),
    "features": ({"features": ["sinks"]}, "Acme.features is ['sinks']; it must be a Feature"),
    "no truth": ({"step_safe": "yes"}, "Acme.step_safe is 'yes'; it must be True or False"),
    "device objects": ({"device_types": [torch.device("cpu")]}, "which is not a device type; write names such as 'cpu'"),
    "one device": ({"device_types": 7}, "Acme.device_types is 7; it must be a sequence"),
    "phases": ({"supported_phases": ("extend",)}, "which is not a phase; phases are decode, prefill"),
    "dtype names": ({"supported_dtypes": ["bfloat-16"]}, "did you mean bfloat16?"),
    "one layout": ({"get_required_kv_cache_layout": method(lambda cls: "HND")}, "follows from supported_kv_cache_layouts; override that"),
}  # fmt: skip


class TestBackend:
    @pytest.mark.parametrize("trap", REFUSED)
    def test_a_trap_is_refused_at_registration_with_the_class_and_the_remedy(self, trap: str) -> None:
        names, sentence = REFUSED[trap]
        text = refusal(made(**names))
        assert text.startswith("acme offers Acme, which does not follow the interface: Acme")
        assert next(iter(names)) in text
        assert sentence in text

    @pytest.mark.parametrize("trap", ["sliding window", "older validate", "misspelt attribute"])
    def test_inherited_names_and_those_of_mixins_are_seen(self, trap: str) -> None:
        names, sentence = REFUSED[trap]
        assert sentence in refusal(type("Acme", (made(**names),), {}))
        mixin = type("Mixin", (), names)
        assert sentence in refusal(type("Acme", (mixin, made()), {}))

    def test_every_fault_is_told_at_once(self) -> None:
        traps = ("sliding window", "block sizes", "misspelt method")
        names = {name: value for trap in traps for name, value in REFUSED[trap][0].items()}
        text = refusal(made(**names))
        assert all(REFUSED[trap][1] in text for trap in traps)

    def test_a_broken_backend_leaves_the_others_of_the_registry(self) -> None:
        registry = Registry({"sound": plugin(made())})
        with pytest.raises(PluginError):
            registry.register(plugin(made(supports_non_causal=True)), "acme")
        assert set(registry.backends()) == {"ACME"}

    @pytest.mark.parametrize(
        "names",
        [
            {"forward_includes_kv_cache_update": False, "accept_output_buffer": True},
            {"_supported_tiles": (64,), "_supports_fast_path": method(lambda cls: True)},
            {"tile": 64, "pick_kernel": staticmethod(lambda: None), "KERNELS": ("a", "b"), "Settings": dict},
            {"compile_key": method(lambda cls, spec: None), "compile_keys": {"a": 1}},
            {"get_supported_kernel_block_sizes": staticmethod(lambda *asked, **more: (16,))},
            {
                "supported_dtypes": [torch.float16, torch.float32],
                "supported_kv_cache_dtypes": ["auto", "fp8"],
            },
            {"supports_dtype": method(lambda cls, dtype: True)},
            {"supported_kv_cache_layouts": method(lambda cls: ("HND",))},
        ],
        ids=lambda names: next(iter(names)),
    )
    def test_what_is_read_and_the_helpers_of_a_plugin_are_taken(self, names: dict[str, Any]) -> None:
        assert set(Registry({"acme": plugin(made(**names))}).backends()) == {"ACME"}

    def test_overrides_of_the_declaring_methods_decide_in_a_registry(self) -> None:
        backend = made(
            supports_dtype=method(lambda cls, dtype: dtype == torch.float32),
            supports_kv_cache_dtype=method(lambda cls, name: name == "auto"),
            supports_block_size=method(lambda cls, size: size == 32),
        )
        registry = Registry({"acme": plugin(backend)})
        assert registry.select(SPEC.replace(dtype="float32"), CPU).block_size == 32
        for changes in (
            {},
            {"dtype": "float32", "kv_cache_dtype": "float32"},
            {"dtype": "float32", "block_size": 16},
        ):
            with pytest.raises(NoBackendError, match=r"is not accepted by Acme\.supports_"):
                registry.select(SPEC.replace(**changes), CPU)

    @pytest.mark.parametrize("answer", [False, True, "", ["no"]], ids=str)
    def test_a_combination_is_refused_by_a_sentence_alone(self, answer: Any) -> None:
        backend = made(supports_combination=method(lambda cls, spec, device: answer))
        with pytest.raises(NoBackendError) as caught:
            Registry({"acme": plugin(backend)}).select(SPEC, CPU)
        assert f"Acme returned {answer!r} from supports_combination, which must be None, or why the" in str(
            caught.value
        )


IMPL_TRAPS: dict[str, tuple[dict[str, Any], str]] = {
    "update": ({"do_kv_cache_update": lambda self, *args: None}, "name it update_kv_cache("),
    "base of the LSE": ({"lse_base_on_e": False}, "write natural logarithms to output_lse"),
    "ranks": ({"dcp_world_size": 2}, "the groups dcp and pcp given to from_spec set it"),
    "wanted LSE": ({"need_to_return_lse_for_decode": True}, "set can_return_lse_for_decode"),
    "fusion": ({"fused_rope_kvcache_supported": lambda self: True}, "keys come rotated"),
    "sparse": ({"is_sparse": True}, "declare Feature.SPARSE in the backend's features"),
    "misspelt": ({"support_quant_query_input": True}, "did you mean supports_quant_query_input?"),
    "misspelt method": ({"process_weight_after_loading": lambda self, dtype: None}, "did you mean process_weights"),
    "unknown claim": ({"supports_rope": True}, "begin the name of a helper with an underscore"),
    "no LSE": (
        {"attend": lambda self, layer, query, key, value, kv_cache, attn_metadata, output: output},
        "Acme.attend does not take what attnplug gives (got an unexpected keyword argument 'output_lse')",
    ),
    "older forward": (
        {
            "forward": lambda self, layer, query, key, value, kv_cache, attn_metadata, output=None, output_scale=None, output_block_scale=None: (
                output
            )
        },
        "Acme.forward does not take what attnplug gives",
    ),
    "constructor": ({"__init__": lambda self, q_lora_rank, **rest: None}, "Acme.__init__ requires q_lora_rank, which attnplug does not give"),
    "short constructor": (
        {
            "__init__": lambda self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window: (
                None
            )
        },
        "Acme.__init__ does not take kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name",
    ),
}  # fmt: skip
BUILDER_TRAPS: dict[str, tuple[dict[str, Any], str]] = {
    "query lengths": ({"query_len_support": 2}, "_init_reorder_batch_threshold(supports_spec_as_decode=True)"),
    "reordering": ({"reorder_batch": lambda self, *args: False}, "set reorder_batch_threshold"),
    "older graphs": ({"full_cudagraph_supported": True}, "set cudagraph_support"),
    "drafts": ({"update_draft_decode_metadata": lambda self, metadata: None}, "override build_for_drafting"),
    "misspelt": ({"reorder_batch_treshold": 1}, "did you mean reorder_batch_threshold?"),
    "engine": (
        {"__init__": lambda self, kv_cache_spec, layer_names, vllm_config, device: None},
        "Acme.__init__ has the parameter vllm_config; name it config: it is attnplug's BuilderConfig",
    ),
    "engine's graphs": (
        {"get_cudagraph_support": classmethod(lambda cls, vllm_config, kv_cache_spec: None)},
        "Acme.get_cudagraph_support has the parameter vllm_config",
    ),
    "older build": ({"build": lambda self, common: None}, "Acme.build does not take what attnplug gives"),
    "graph level": ({"_cudagraph_support": 3}, "Acme.cudagraph_support is 3, which is not an AttentionCGSupport"),
    "two levels": (
        {
            "cudagraph_support": AttentionCGSupport.NEVER,
            "_cudagraph_support": AttentionCGSupport.ALWAYS,
        },
        "Acme._cudagraph_support is not its cudagraph_support; set that alone",
    ),
}  # fmt: skip


class TestParts:
    @pytest.mark.parametrize("trap", IMPL_TRAPS)
    def test_a_trap_of_an_impl_is_refused_by_selection_and_by_construction(self, trap: str) -> None:
        names, sentence = IMPL_TRAPS[trap]
        backend = made(impl=type("Acme", (TORCH_IMPL,), names))
        with pytest.raises(NoBackendError) as refused:
            Registry({"acme": plugin(backend)}).select(SPEC, CPU)
        assert "Acme does not follow the interface: Acme" in str(refused.value)
        assert sentence in str(refused.value)
        with pytest.raises(PluginError, match=r"ACME cannot run layer layers\.0: Acme") as caught:
            make_impl(backend, SPEC, layer_name="layers.0")
        assert sentence in str(caught.value)

    @pytest.mark.parametrize("trap", BUILDER_TRAPS)
    def test_a_trap_of_a_builder_is_refused_by_selection_and_by_construction(self, trap: str) -> None:
        names, sentence = BUILDER_TRAPS[trap]
        backend = made(builder=type("Acme", (TORCH_BUILDER,), names))
        with pytest.raises(NoBackendError) as refused:
            Registry({"acme": plugin(backend)}).select(SPEC, CPU)
        assert sentence in str(refused.value)
        with pytest.raises(PluginError, match="ACME cannot build metadata: Acme") as caught:
            make_builder(backend, CACHE, ["layers.0"], BuilderConfig(), torch.device("cpu"))
        assert sentence in str(caught.value)

    def test_a_member_of_a_composite_is_refused_as_it_is_alone(self) -> None:
        names, sentence = IMPL_TRAPS["base of the LSE"]
        backend = made(impl=type("Acme", (TORCH_IMPL,), names))
        registry = Registry({"acme": plugin(backend, made(get_name=staticmethod(lambda: "SOUND")))})
        for both in ("SOUND+ACME", "ACME+SOUND"):
            with pytest.raises(NoBackendError) as refused:
                registry.select(SPEC, CPU, backend=both)
            assert sentence in str(refused.value)

    def test_a_forward_of_its_own_is_refused_where_it_is_not_called(self) -> None:
        class Forward(TORCH_IMPL):  # type: ignore[misc, valid-type]
            def forward(self, *args: Any, **more: Any) -> Any:
                return super().forward(*args, **more)

        backend = made(impl=Forward)
        registry = Registry({"acme": plugin(backend, made(get_name=staticmethod(lambda: "SOUND")))})
        assert registry.select(SPEC, CPU, backend="ACME").backend == "ACME"
        with pytest.raises(
            NoBackendError, match=r"Forward\.forward is not called in a composite; override attend"
        ):
            registry.select(SPEC, CPU, backend="ACME+SOUND")

    def test_metadata_without_slots_is_charged_to_the_builder(self) -> None:
        impl: Any = make_impl(made(), SPEC, layer_name="l")
        rows = torch.zeros(1, 2, 64)
        with pytest.raises(
            PluginError, match="the builder of ACME gave a dict without slot_mapping; copy it from"
        ):
            impl.forward(None, torch.zeros(1, 4, 64), rows, rows, torch.zeros(1), {})

    def test_the_graph_level_of_older_builders_is_read(self) -> None:
        names = {"_cudagraph_support": AttentionCGSupport.ALWAYS}
        level = AttentionCGSupport.ALWAYS
        mixin = type("Mixin", (), names)
        for builder in (type("Acme", (TORCH_BUILDER,), names), type("Acme", (mixin, TORCH_BUILDER), {})):
            child = type("Child", (builder,), {})
            for each in (builder, child):
                assert each.cudagraph_support is each.get_cudagraph_support(BuilderConfig(), CACHE) is level
                assert import_parts(made(builder=each)) == ()
        over = type(
            "Over", (type("Acme", (TORCH_BUILDER,), names),), {"cudagraph_support": AttentionCGSupport.NEVER}
        )
        assert over.cudagraph_support is AttentionCGSupport.NEVER
        assert import_parts(made(builder=over)) == ()

    def test_a_graph_level_that_is_set_later_is_not_ignored(self) -> None:
        late: Any = type("Acme", (TORCH_BUILDER,), {})
        late._cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
        with pytest.raises(PluginError, match=r"Acme\._cudagraph_support is not its cudagraph_support"):
            make_builder(made(builder=late), CACHE, ["l"], BuilderConfig(), torch.device("cpu"))

    @pytest.mark.parametrize(
        ("base", "name", "value", "remedy"),
        [
            (TORCH_IMPL, "lse_base_on_e", False, "write natural logarithms to output_lse"),
            (TORCH_IMPL, "dcp_world_size", 8, "the groups dcp and pcp given to from_spec set it"),
            (TORCH_BUILDER, "cudagraph_support", AttentionCGSupport.ALWAYS, "set it on the class"),
            (TORCH_BUILDER, "_cudagraph_support", AttentionCGSupport.ALWAYS, "set it on the class"),
            (TORCH_BUILDER, "supports_uniform_spec_as_decode", True, "_init_reorder_batch_threshold("),
        ],
    )
    def test_what_a_constructor_sets_is_read_or_refused(
        self, base: Any, name: str, value: Any, remedy: str
    ) -> None:
        def construct(self: Any, *args: Any, **rest: Any) -> None:
            base.__init__(self, *args, **rest)
            setattr(self, name, value)

        part = type("Acme", (base,), {"__init__": construct})
        make = {
            TORCH_IMPL: lambda: make_impl(made(impl=part), SPEC, layer_name="l"),
            TORCH_BUILDER: lambda: make_builder(
                made(builder=part), CACHE, ["l"], BuilderConfig(), torch.device("cpu")
            ),
        }[base]
        with pytest.raises(PluginError) as caught:
            make()
        assert f"Acme.__init__ sets {name}, which is not read by attnplug; " in str(caught.value)
        assert remedy in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("reorder_batch_threshold", 0),
            ("reorder_batch_threshold", "1"),
            ("reorder_batch_threshold", True),
            ("supports_update_block_table", 1),
            ("needs_host_seq_lens", "always"),
        ],
    )
    def test_a_value_that_an_engine_cannot_read_is_refused(self, name: str, value: Any) -> None:
        builder = type("Acme", (TORCH_BUILDER,), {name: value})
        with pytest.raises(
            PluginError, match=rf"ACME cannot build metadata: Acme\.{name} is {value!r}; it must"
        ):
            make_builder(made(builder=builder), CACHE, ["l"], BuilderConfig(), torch.device("cpu"))

    def test_a_builder_that_reads_the_engines_configuration_is_named(self) -> None:
        class Builder(TORCH_BUILDER):  # type: ignore[misc, valid-type]
            def __init__(self, kv_cache_spec: Any, layer_names: Any, config: Any, device: Any) -> None:
                super().__init__(kv_cache_spec, layer_names, config, device)
                self.heads = config.model_config.get_num_attention_heads(config.parallel_config)

        message = (
            "ACME cannot build metadata: Builder raised AttributeError: 'BuilderConfig' object has no attribute "
            "'model_config'; its third argument is attnplug's BuilderConfig, with layers, "
        )
        with pytest.raises(PluginError, match=message):
            make_builder(made(builder=Builder), CACHE, ["layers.0"], BuilderConfig(), torch.device("cpu"))
        builder = TORCH_BUILDER(CACHE, ["layers.0"], BuilderConfig(), torch.device("cpu"))
        with pytest.raises(
            AttributeError, match=r"'vllm_config'; read self\.config, which is a BuilderConfig"
        ):
            builder.vllm_config.model_config  # noqa: B018

    @pytest.mark.parametrize("part", ["impl", "builder"])
    def test_a_part_of_another_framework_is_named(self, part: str) -> None:
        backend = made(**{part: type("Theirs", (), {})})
        base = {"impl": "AttentionImpl", "builder": "AttentionMetadataBuilder"}[part]
        make = {
            "impl": lambda: make_impl(backend, SPEC, layer_name="layers.0"),
            "builder": lambda: make_builder(backend, CACHE, ["l"], BuilderConfig(), torch.device("cpu")),
        }[part]
        with pytest.raises(
            PluginError, match=rf"ACME\.get_{part}_cls gives .*Theirs.*; subclass {base} of attnplug"
        ):
            make()

    def test_a_constructor_that_takes_sinks_gets_them(self) -> None:
        class Sinks(TORCH_IMPL):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, sinks: torch.Tensor | None = None, **rest: Any) -> None:
                super().__init__(*args, **rest)
                self.seen = sinks

        tensors = attnplug.core.LayerTensors(sinks=torch.ones(4))
        impl: Any = make_impl(
            made(impl=Sinks), SPEC.replace(has_sinks=True), layer_name="layers.0", tensors=tensors
        )
        assert impl.seen is tensors.sinks

    def test_the_built_in_parts_have_no_faults(self) -> None:
        assert part_faults(TORCH_IMPL, TORCH_BUILDER) == []


@pytest.fixture
def ported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of tests/plugins/attnplug-bad-ported."""
    monkeypatch.syspath_prepend(str(PLUGINS / "attnplug-bad-ported"))
    import attnplug_bad_ported.ported as module

    yield module
    for name in [each for each in sys.modules if each.startswith("attnplug_bad_ported")]:
        del sys.modules[name]


class TestAWholePort:
    """A backend of vLLM 0.15, first as it is and then corrected by nothing but what the sentences say."""

    def test_all_faults_of_the_three_classes_are_told(self, ported: Any) -> None:
        text = refusal(ported.BadPorted)
        for name in (
            *("forward_includes_kv_cache_update", "supports_non_causal", "supports_combination"),
            *("get_supported_kernel_block_sizes", "get_kv_cache_shape", "get_kv_cache_stride_order"),
        ):
            assert f"BadPorted.{name} " in text
        faults = part_faults(ported.PortedImpl, ported.PortedBuilder)
        assert [fault.partition(" ")[0] for fault in faults] == [
            "PortedImpl.forward",
            "PortedBuilder.__init__",
        ]
        assert (
            "def attend(self, layer, query, key, value, kv_cache, attn_metadata, output, *, output_lse=None"
            in faults[0]
        )

    def test_they_are_told_in_one_round_a_line_each(self, ported: Any) -> None:
        first, *lines = refusal(ported.BadPorted).splitlines()
        assert first == "acme offers BadPorted, which does not follow the interface:"
        assert all(line.startswith("- ") for line in lines)
        found = [line.removeprefix("- ").partition(".")[0] for line in lines]
        assert found == ["BadPorted"] * 6 + ["PortedImpl", "PortedBuilder"]

    def test_faults_of_the_parts_alone_are_reasons_of_their_own(self, ported: Any) -> None:
        backend = made(impl=ported.PortedImpl, builder=ported.PortedBuilder)
        with pytest.raises(NoBackendError) as caught:
            Registry({"acme": plugin(backend)}).select(SPEC, CPU, backend="ACME")
        (candidate,) = [each for each in caught.value.decision.refused if each.name == "ACME"]
        head, *faults = candidate.reasons
        assert head.endswith("does not follow the interface; tell its author")
        assert [fault.partition(" ")[0] for fault in faults] == [
            "PortedImpl.forward",
            "PortedBuilder.__init__",
        ]
        assert set(candidate.codes) == {"plugin_error"}
        assert all(f"\n    {fault}" in str(caught.value) for fault in faults)

    def test_code_of_an_installed_plugin_that_is_refused_is_not_run(
        self, ported: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        for getter in ("get_impl_cls", "get_builder_cls"):
            monkeypatch.setattr(ported.BadPorted, getter, lambda name=getter: asked.append(name))
        record = PluginRecord("acme:ported", "acme", "1", PluginStatus.BLOCKED)
        for reads_parts, expected in ((False, []), (True, ["get_impl_cls", "get_builder_cls"])):
            loaded = Host(reads_parts=reads_parts).check_and_load(record, plugin(ported.BadPorted))
            assert loaded.record.status is PluginStatus.BROKEN
            assert asked == expected

    def test_each_call_into_it_names_the_backend(self, ported: Any) -> None:
        with pytest.raises(PluginError, match=r"BAD_PORTED cannot run layer l: PortedImpl\.forward writes"):
            make_impl(ported.BadPorted, SPEC, layer_name="l")
        with pytest.raises(
            PluginError, match=r"BAD_PORTED cannot build metadata: .* has the parameter vllm_config"
        ):
            make_builder(ported.BadPorted, CACHE, ["l"], BuilderConfig(), torch.device("cpu"))

    def test_corrected_as_told_it_gives_the_numbers_of_torch(self, ported: Any) -> None:
        class Impl(ported.PortedImpl):  # type: ignore[name-defined, misc]
            def update_kv_cache(
                self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
            ) -> None:
                blocks = kv_cache.shape[2]
                kv_cache[slot_mapping // blocks, 0, slot_mapping % blocks] = key
                kv_cache[slot_mapping // blocks, 1, slot_mapping % blocks] = value

            def attend(
                self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
                *, output_lse: Any = None, use_sinks: bool = True, output_scale: Any = None,
                output_block_scale: Any = None,
            ) -> Any:  # fmt: skip
                blocks, slots = kv_cache.shape[2], attn_metadata.slot_mapping
                held = kv_cache[slots // blocks, :, slots % blocks]
                old = ported.PortedImpl.forward
                return old(self, layer, query, held[:, 0], held[:, 1], kv_cache, attn_metadata, output)

            forward = attnplug.core.AttentionImpl.forward

        class Builder(ported.PortedBuilder):  # type: ignore[name-defined, misc]
            def __init__(self, kv_cache_spec: Any, layer_names: Any, config: Any, device: Any) -> None:
                attnplug.core.AttentionMetadataBuilder.__init__(
                    self, kv_cache_spec, layer_names, config, device
                )

        shape = AttentionBackend.__dict__["get_kv_cache_shape"]
        order = AttentionBackend.__dict__["get_kv_cache_stride_order"]
        corrected = type(
            "Ported",
            (ported.BadPorted,),
            {
                "forward_includes_kv_cache_update": False,
                "device_types": ("cpu",),
                "get_impl_cls": staticmethod(lambda: Impl),
                "get_builder_cls": staticmethod(lambda: Builder),
                "get_supported_kernel_block_sizes": staticmethod(lambda spec=None, device=None: [16]),
                "get_kv_cache_shape": shape,
                "get_kv_cache_stride_order": order,
                "supports_combination": classmethod(lambda cls, spec, device: None),
            },
        )
        assert "supports_non_causal" in refusal(corrected)
        del ported.BadPorted.supports_non_causal
        attnplug_registry = Registry({"acme": plugin(corrected)})
        spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32")
        assert attnplug_registry.select(spec, CPU).backend == "BAD_PORTED"
        outputs = [output_of(backend, spec) for backend in (corrected, TorchBackend)]
        assert torch.allclose(*outputs, atol=1e-5)


def output_of(backend: type[AttentionBackend], spec: LayerSpec) -> torch.Tensor:
    """One layer's output of a prefill of 20 tokens and one of 3."""
    registry = Registry({"one": plugin(backend)}) if backend is not TorchBackend else Registry()
    decisions = registry.select_layers({"l": spec}, CPU, backend=backend.get_name())
    assert decisions["l"].get_backend_cls() is backend
    generator = torch.Generator().manual_seed(7)
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    query, key, value = (torch.randn(23, each, spec.head_size, generator=generator) for each in heads)
    starts = torch.tensor([0, 20, 23], dtype=torch.int32)
    common = attnplug.core.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=starts.diff(),
        num_reqs=2,
        num_actual_tokens=23,
        max_query_len=20,
        max_seq_len=20,
        block_table_tensor=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32),
        slot_mapping=torch.cat([torch.arange(16, 36), torch.arange(48, 51)]),
    )
    impl = make_impl(backend, spec, layer_name="l")
    cache = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="float32")
    config = BuilderConfig(layers={"l": AnyLayer(impl)})
    builder = make_builder(backend, cache, ["l"], config, torch.device("cpu"))
    pages = torch.zeros(backend.get_kv_cache_shape(4, 16, 2, 64))
    return impl.forward(None, query, key, value, pages, builder.build(0, common))


class AnyLayer:
    """What a builder reads of a layer."""

    def __init__(self, impl: Any) -> None:
        self.impl = impl
