"""What is called read of vLLM's names decides something, and impls have the attributes of vLLM's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_plugins import CPU, plugin
from vllm_ports import (
    BUILDER,
    CACHE,
    CALLED,
    IMPL,
    LATENT,
    LATENT_IMPL,
    MLA,
    SPEC,
    VALUES,
    Read,
    everything,
    made,
    reads,
    runtime_of,
)

from attnplug import LayerSpec, Registry
from attnplug.core import AttentionCGSupport, BuilderConfig, ContextParallel, LayerTensors
from attnplug.core.interface.impl_and_builder import make_builder, make_impl
from attnplug.core.interface.ported_names import IMPL_INSTANCE_NAMES, IMPL_NAMES, SET_ON_INSTANCES
from attnplug.errors import AttnplugError, PluginError
from attnplug.runtime import GraphState

ALWAYS = {"cudagraph_support": AttentionCGSupport.ALWAYS, "supports_update_block_table": True}


class TestWhatIsRead:
    @pytest.mark.parametrize("name", sorted(CALLED["backend"] - {"get_name"}))
    def test_a_method_of_the_backend_is_called(self, name: str) -> None:
        backend = made(**{name: classmethod(reads)})
        assert "it is read" in everything(backend)
        assert "it is read" not in everything(made())

    def test_the_name_is_the_name(self) -> None:
        assert Registry({"acme": plugin(made())}).select(SPEC, CPU, backend="ACME").backend == "ACME"

    @pytest.mark.parametrize("name", sorted(VALUES["backend"]))
    def test_a_value_of_the_backend_decides(self, name: str) -> None:
        decision = Registry({"acme": plugin(made(**{name: ("float16",)}))}).explain(SPEC, CPU)
        assert decision.backend is None
        assert name.removeprefix("supported_")[:-1] in decision.explanation()

    @pytest.mark.parametrize(("name", "tokens"), [("forward_mha", 20), ("forward_mqa", 1)])
    def test_a_method_of_latent_attention_is_called(self, name: str, tokens: int) -> None:
        impl = type("Acme", (LATENT_IMPL,), {name: reads})
        backend = made(impl, LATENT.get_builder_cls(), LATENT)
        tensors = LayerTensors(w_uk=torch.zeros(4, 16, 32), w_uv=torch.zeros(4, 32, 16))
        runtime = runtime_of(backend, MLA, tensors)
        builder = runtime.step_batch_builder()
        builder.add_request("r", [[1, 2]])
        runtime.begin_step(builder.step({"r": tokens}))
        with pytest.raises(Read):
            runtime.forward("a", torch.zeros(tokens, 4, 32), torch.zeros(tokens, 1, 48), None)

    def test_weights_are_announced_to_the_impl(self) -> None:
        with pytest.raises(Read):
            runtime_of(made(type("Acme", (IMPL,), {"process_weights_after_loading": reads})))

    def test_a_forward_of_the_impl_is_called(self) -> None:
        runtime = runtime_of(made(type("Acme", (IMPL,), {"forward": reads})))
        builder = runtime.step_batch_builder()
        builder.add_request("r", [[1]])
        runtime.begin_step(builder.step({"r": 1}))
        rows = torch.zeros(1, 2, 16)
        with pytest.raises(Read):
            runtime.forward("a", torch.zeros(1, 4, 16), rows, rows)

    def test_the_impl_is_asked_for_quantised_outputs(self) -> None:
        runtime = runtime_of(made(type("Acme", (IMPL,), {"fused_output_quant_supported": reads})))
        builder = runtime.step_batch_builder()
        builder.add_request("r", [[1]])
        runtime.begin_step(builder.step({"r": 1}))
        rows, output = torch.zeros(1, 2, 16), torch.zeros(1, 4, 16, dtype=torch.float8_e4m3fn)
        with pytest.raises(Read):
            runtime.forward("a", torch.zeros(1, 4, 16), rows, rows, output, output_scale=torch.ones(1))

    @pytest.mark.parametrize(
        ("flag", "group"), [("can_return_lse_for_decode", "dcp"), ("supports_pcp", "pcp")]
    )
    def test_a_flag_of_the_impl_decides_about_ranks(self, flag: str, group: str) -> None:
        for value in (True, False):
            backend = made(type("Acme", (IMPL,), {flag: value}))
            groups: dict[str, Any] = {group: ContextParallel(2, 1)}
            if value:
                assert getattr(make_impl(backend, SPEC, layer_name="a", **groups), f"{group}_rank") == 1
            else:
                with pytest.raises(AttnplugError, match=f"which does not set {flag}"):
                    make_impl(backend, SPEC, layer_name="a", **groups)

    def test_a_flag_of_the_impl_decides_about_quantised_queries(self) -> None:
        for value in (False, True):
            runtime = runtime_of(made(type("Acme", (IMPL,), {"supports_quant_query_input": value})))
            builder = runtime.step_batch_builder()
            builder.add_request("r", [[1]])
            runtime.begin_step(builder.step({"r": 1}))
            rows, query = torch.zeros(1, 2, 16), torch.zeros(1, 4, 16, dtype=torch.float8_e4m3fn)
            # TORCH itself takes no such queries, so it is the one that refuses where the flag is set.
            with pytest.raises(AttnplugError) as refused:
                runtime.forward("a", query, rows, rows)
            assert ("of layer a" in str(refused.value)) is not value

    @pytest.mark.parametrize(
        "name",
        ["build", "build_for_cudagraph_capture", "build_for_drafting", "update_block_table"],
    )
    def test_a_method_of_the_builder_is_called(self, name: str) -> None:
        def work(**names: Any) -> None:
            builder = type("Acme", (BUILDER,), {"build_key": "all", **ALWAYS, **names})
            runtime = runtime_of(made(builder=builder), more=SPEC.replace(sliding_window=4))
            if name == "build_for_cudagraph_capture":
                with GraphState(runtime, max_model_len=64).capture(1):
                    return
            batches = runtime.step_batch_builder()
            batches.add_request("r", [[1]] * len(batches.block_sizes))
            draft = {"draft_index": 0} if name == "build_for_drafting" else {}
            runtime.begin_step(batches.step({"r": 1}), **draft)

        work()
        with pytest.raises(Read):
            work(**{name: reads})

    def test_the_builder_is_asked_about_cascades(self) -> None:
        runtime = runtime_of(made(builder=type("Acme", (BUILDER,), {"use_cascade_attention": reads})))
        batches = runtime.step_batch_builder()
        for name in "ab":
            batches.add_request(name, [[1, 2 if name == "a" else 3]], num_computed_tokens=16)
        with pytest.raises(Read):
            runtime.begin_step(batches.step({"a": 1, "b": 1}))

    def test_the_builder_is_asked_about_graphs(self) -> None:
        runtime = runtime_of(
            made(builder=type("Acme", (BUILDER,), {"get_cudagraph_support": classmethod(reads)}))
        )
        with pytest.raises(Read), GraphState(runtime, max_model_len=64).capture(1):
            pass

    @pytest.mark.parametrize("name", ["_cudagraph_support", "cudagraph_support"])
    def test_the_level_of_graphs_is_read(self, name: str) -> None:
        for level in (AttentionCGSupport.ALWAYS, AttentionCGSupport.NEVER):
            builder: Any = type("Acme", (BUILDER,), {name: level})
            assert builder.get_cudagraph_support(BuilderConfig(), CACHE) is level

    @pytest.mark.parametrize("threshold", [1, 4])
    def test_the_threshold_of_the_builder_sorts_decodes(self, threshold: int) -> None:
        runtime = runtime_of(made(builder=type("Acme", (BUILDER,), {"reorder_batch_threshold": threshold})))
        batches = runtime.step_batch_builder()
        for place, name in enumerate("ab"):
            batches.add_request(name, [[place + 1]], num_computed_tokens=1)
        batch = batches.step({"a": 5, "b": 3})
        # Decodes come first: up to the threshold a query is one.
        assert batch.req_ids == (("a", "b") if threshold == 1 else ("b", "a"))

    def test_the_threshold_follows_drafts_by_the_base_classes_function(self) -> None:
        def construct(self: Any, *given: Any) -> None:
            BUILDER.__init__(self, *given)
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

        builder = made(builder=type("Acme", (BUILDER,), {"__init__": construct}))
        config = BuilderConfig(num_speculative_tokens=3)
        assert make_builder(builder, CACHE, ["a"], config, torch.device("cpu")).reorder_batch_threshold == 4

    def test_updates_of_tables_are_made_only_where_the_builder_says_so(self) -> None:
        for value in (True, False):
            names = {"supports_update_block_table": value, "update_block_table": reads, "build_key": "all"}
            runtime = runtime_of(
                made(builder=type("Acme", (BUILDER,), names)), more=SPEC.replace(sliding_window=4)
            )
            batches = runtime.step_batch_builder()
            batches.add_request("r", [[1]] * len(batches.block_sizes))
            batch = batches.step({"r": 1})
            if value:
                with pytest.raises(Read):
                    runtime.begin_step(batch)
            else:
                runtime.begin_step(batch)


class TestAttributesOfImpls:
    """What vLLM's engine reads of any impl is there, and is the spec's."""

    @pytest.mark.parametrize("spec", [SPEC, SPEC.replace(scale=0.5, kv_cache_dtype="fp8")], ids=str)
    @pytest.mark.parametrize("calls_base", [True, False])
    def test_an_impl_has_them_whatever_its_constructor_does(self, spec: LayerSpec, calls_base: bool) -> None:
        def construct(self: Any, *given: Any, **named: Any) -> None:
            if calls_base:
                IMPL.__init__(self, *given, **named)
            self.scale, self.num_kv_heads = float(named["scale"]), named["num_kv_heads"]

        check(make_impl(made(type("Acme", (IMPL,), {"__init__": construct})), spec, layer_name="a"), spec)

    def test_latent_attention_and_composites_have_them(self) -> None:
        tensors = LayerTensors(w_uk=torch.zeros(4, 16, 32), w_uv=torch.zeros(4, 32, 16))
        check(make_impl(LATENT, MLA, layer_name="a", tensors=tensors), MLA)
        registry = Registry({"acme": plugin(made(), made(get_name=staticmethod(lambda: "OTHER")))})
        for named in ("ACME+OTHER", "OTHER+ACME"):
            both: Any = registry.select(SPEC, CPU, backend=named).get_backend_cls()
            impl: Any = make_impl(both, SPEC, layer_name="a")
            for each in (impl, *impl.members.values()):
                check(each, SPEC)

    def test_an_impl_made_without_a_backend_has_them(self) -> None:
        check(IMPL(4, 16, 0.25, 2, kv_cache_dtype="fp8"), SPEC.replace(kv_cache_dtype="fp8"))

    @pytest.mark.parametrize("name", sorted(SET_ON_INSTANCES & IMPL_NAMES.keys()))
    def test_a_constructor_cannot_give_them_another_value(self, name: str) -> None:
        def construct(self: Any, *given: Any, **named: Any) -> None:
            IMPL.__init__(self, *given, **named)
            setattr(self, name, 7)

        with pytest.raises(PluginError, match=rf"Acme\.__init__ sets {name}, .* under another name"):
            make_impl(made(type("Acme", (IMPL,), {"__init__": construct})), SPEC, layer_name="a")

    @pytest.mark.parametrize("name", sorted(IMPL_INSTANCE_NAMES.keys() - IMPL_NAMES.keys()))
    def test_what_a_class_can_do_is_not_changed_by_its_constructor(self, name: str) -> None:
        def construct(self: Any, *given: Any, **named: Any) -> None:
            IMPL.__init__(self, *given, **named)
            setattr(self, name, value)

        backend = made(type("Acme", (IMPL,), {"__init__": construct}))
        value = getattr(IMPL, name)
        make_impl(backend, SPEC, layer_name="a")
        value = not value
        with pytest.raises(PluginError, match=rf"Acme\.__init__ sets {name}, .*; set it on the class"):
            make_impl(backend, SPEC, layer_name="a")


def check(impl: Any, spec: LayerSpec) -> None:
    for name in SET_ON_INSTANCES & IMPL_NAMES.keys():
        assert getattr(impl, name) == getattr(spec, name)
        assert type(getattr(impl, name)) is type(getattr(spec, name))
