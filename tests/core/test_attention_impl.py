"""AttentionImpl: how a layer's impl is made, and what forward does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from sample_batches import RecordingImpl, batch, builder
from spec_strategies import MLA_SIZES, SIZES

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import (
    AttentionBackend,
    AttentionImpl,
    AttentionType,
    ContextParallel,
    LayerSpec,
    LayerTensors,
    MLAAttentionImpl,
    composite_backend,
)
from attnplug.errors import BatchError, PluginError, SpecError

HEADS, KV_HEADS, SIZE = SIZES["num_heads"], SIZES["num_kv_heads"], SIZES["head_size"]


def impl_for(spec: LayerSpec, **arguments: Any) -> RecordingImpl:
    return RecordingImpl.from_spec(spec, backend=AttentionBackend, layer_name="layers.0", **arguments)


class TestTheConstructorAuthorsKnow:
    def test_it_takes_its_arguments_in_the_known_order(self) -> None:
        impl = RecordingImpl(8, 64, 0.5, 2, [0.5] * 8, 128, "fp8", 30.0, "decoder", "layers.0")
        assert impl.spec == LayerSpec(
            num_heads=8,
            num_kv_heads=2,
            head_size=64,
            scale=0.5,
            has_alibi=True,
            sliding_window=128,
            kv_cache_dtype="fp8",
            logits_soft_cap=30.0,
        )
        assert impl.tensors.alibi_slopes is not None
        assert impl.tensors.alibi_slopes.tolist() == [0.5] * 8
        assert (impl.kv_sharing_target_layer_name, impl.options, impl.layer_name) == ("layers.0", None, "")

    def test_three_arguments_are_enough(self) -> None:
        impl = RecordingImpl(8, 64, 0.125)
        assert impl.spec == LayerSpec(num_heads=8, num_kv_heads=8, head_size=64, scale=0.125)
        assert impl.tensors.alibi_slopes is None
        assert impl.kv_sharing_target_layer_name is None

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"num_kv_heads": 0}, "num_kv_heads"),
            ({"logits_soft_cap": 0.0}, "logits_soft_cap"),
            ({"sliding_window": 8, "attn_type": "encoder_only"}, "sliding_window"),
            ({"alibi_slopes": [0.5] * 7}, "alibi_slopes"),
            ({"alibi_slopes": []}, "alibi_slopes"),
        ],
    )
    def test_it_checks_like_a_spec(self, changes: dict[str, Any], field: str) -> None:
        with pytest.raises(SpecError) as caught:
            RecordingImpl(**{"num_heads": 8, "head_size": 64, "scale": 0.125, **changes})
        assert caught.value.field == field


class TestFromSpec:
    def test_everything_is_kept_as_it_was_given(self) -> None:
        spec = LayerSpec(**SIZES, has_sinks=True, chunk_size=8, dtype="float32")
        tensors = LayerTensors(sinks=torch.zeros(HEADS))
        options = object()
        impl = impl_for(spec, tensors=tensors, kv_sharing_target_layer_name="layers.1", options=options)
        assert (impl.spec, impl.tensors, impl.options) == (spec, tensors, options)
        assert (impl.layer_name, impl.kv_sharing_target_layer_name) == ("layers.0", "layers.1")

    def test_tensors_may_be_left_out_where_none_are_asked(self) -> None:
        assert impl_for(LayerSpec(**SIZES)).tensors.sinks is None

    @pytest.mark.parametrize("spec", [LayerSpec(**SIZES, has_sinks=True), LayerSpec(**SIZES, has_alibi=True)])
    def test_a_tensor_that_is_asked_must_be_there(self, spec: LayerSpec) -> None:
        with pytest.raises(SpecError, match="is required: the spec says has_"):
            impl_for(spec)

    def test_a_tensor_that_is_not_asked_must_not(self) -> None:
        with pytest.raises(SpecError, match="the spec says has_sinks=False"):
            impl_for(LayerSpec(**SIZES), tensors=LayerTensors(sinks=torch.zeros(HEADS)))

    @pytest.mark.parametrize(
        "spec",
        [
            LayerSpec(**SIZES, attn_type="encoder_only", window=(3, 5)),
            LayerSpec(**SIZES, attn_type="encoder_only", causal=True, window=(3, 0)),
            LayerSpec(**SIZES, causal=False, window=(3, 5)),
            LayerSpec(**SIZES, attn_type="encoder_decoder", head_size_v=32),
            LayerSpec(**SIZES, chunk_size=64),
            LayerSpec(**MLA_SIZES),
        ],
        ids=lambda spec: "-".join(spec.kinds),
    )
    def test_any_spec_can_be_bound_even_where_the_constructor_cannot_say_it(self, spec: LayerSpec) -> None:
        assert impl_for(spec).spec == spec

    def test_an_impl_keeps_the_backend_that_it_is_made_for(self) -> None:
        seen = []

        class Port(RecordingImpl):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                seen.append(self.backend)

        impl = Port.from_spec(LayerSpec(**SIZES), backend=TorchBackend, layer_name="layers.0")
        assert [impl.backend, *seen] == [TorchBackend, TorchBackend]
        assert RecordingImpl(8, 64, 0.125).backend is AttentionBackend

    def test_without_a_backend_it_is_the_one_of_its_package_that_gives_the_impl(self) -> None:
        impl = TorchBackend.get_impl_cls().from_spec(LayerSpec(**SIZES), layer_name="layers.0")
        assert impl.backend is TorchBackend

    def test_without_a_backend_that_gives_the_impl_it_says_what_to_write(self) -> None:
        said = r"RecordingImpl\.from_spec cannot know the backend: no backend .*; write from_spec\(spec, backend=backend"
        with pytest.raises(PluginError, match=said):
            RecordingImpl.from_spec(LayerSpec(**SIZES), layer_name="layers.0")

    def test_of_several_backends_that_give_the_impl_none_is_guessed(self) -> None:
        class Port(RecordingImpl):
            pass

        class One(TorchBackend):
            @classmethod
            def get_impl_cls(cls) -> Any:
                return Port

        class Other(One):
            pass

        with pytest.raises(
            PluginError, match=r"several backends give this impl \(.*One, .*Other\); write from_spec"
        ):
            Port.from_spec(LayerSpec(**SIZES), layer_name="layers.0")
        assert Port.from_spec(LayerSpec(**SIZES), backend=Other, layer_name="layers.0").backend is Other

    def test_a_port_whose_from_spec_passes_the_rest_on_is_given_the_backend(self) -> None:
        class Port(RecordingImpl):
            @classmethod
            def from_spec(cls, spec: LayerSpec, **rest: Any) -> Port:
                return super().from_spec(spec.replace(scale=0.5), **rest)

        impl = Port.from_spec(LayerSpec(**SIZES), backend=TorchBackend, layer_name="layers.0")
        assert (impl.backend, impl.spec.scale) == (TorchBackend, 0.5)

    def test_a_port_whose_from_spec_knows_no_backend_is_given_it_all_the_same(self) -> None:
        class Port(RecordingImpl):
            @classmethod
            def from_spec(cls, spec: LayerSpec, *, layer_name: str) -> Port:  # type: ignore[override]
                return super().from_spec(spec.replace(scale=0.5), layer_name=layer_name)

        class PortBackend(TorchBackend):
            @classmethod
            def get_impl_cls(cls) -> Any:
                return Port

        made: Any = Port
        for arguments in ({}, {"backend": PortBackend}):
            impl = made.from_spec(LayerSpec(**SIZES), layer_name="layers.0", **arguments)
            assert (impl.backend, impl.spec.scale, impl.layer_name) == (PortBackend, 0.5, "layers.0")

    def test_a_port_gets_the_arguments_it_knows_and_the_spec_beside_them(self) -> None:
        class Port(RecordingImpl):
            def __init__(
                self,
                num_heads: int,
                head_size: int,
                scale: float,
                num_kv_heads: int | None = None,
                alibi_slopes: list[float] | None = None,
                sliding_window: int | None = None,
                kv_cache_dtype: str = "auto",
                logits_soft_cap: float | None = None,
                attn_type: str = AttentionType.DECODER,
                kv_sharing_target_layer_name: str | None = None,
            ) -> None:
                self.seen = (num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window)
                self.also = (kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name)
                self.beside = (self.spec.dtype, self.tensors.sinks, self.layer_name)

        sinks = torch.zeros(HEADS)
        spec = LayerSpec(
            **SIZES,
            dtype="float16",
            has_sinks=True,
            has_alibi=True,
            sliding_window=128,
            logits_soft_cap=30.0,
            kv_cache_dtype="fp8",
        )
        tensors = LayerTensors(sinks=sinks, alibi_slopes=torch.full((HEADS,), 0.5))
        port = Port.from_spec(spec, backend=AttentionBackend, layer_name="layers.0", tensors=tensors)
        assert port.seen == (HEADS, SIZE, 64**-0.5, KV_HEADS, [0.5] * HEADS, 128)
        assert port.also == ("fp8", 30.0, "decoder", None)
        assert port.beside == ("float16", sinks, "layers.0")


class TestForward:
    @staticmethod
    def tokens(heads: int, size: int = SIZE) -> torch.Tensor:
        return torch.rand(3, heads, size)

    def run(self, impl: RecordingImpl, **changes: Any) -> torch.Tensor:
        arguments: dict[str, Any] = {
            "layer": None,
            "query": self.tokens(HEADS),
            "key": self.tokens(KV_HEADS),
            "value": self.tokens(KV_HEADS),
            "kv_cache": torch.zeros(4, 2, 4, KV_HEADS, SIZE),
            "attn_metadata": builder().build(0, batch([3], [3])),
        }
        return impl.forward(**{**arguments, **changes})

    def test_it_writes_and_then_attends(self) -> None:
        impl = impl_for(LayerSpec(**SIZES))
        key, value, output = self.tokens(KV_HEADS), self.tokens(KV_HEADS), self.tokens(HEADS)
        assert self.run(impl, key=key, value=value, output=output) is output
        (wrote, written), (attended, given) = impl.calls
        assert (wrote, attended) == ("update", "attend")
        assert written["key"] is key
        assert written["value"] is value
        assert written["slot_mapping"].tolist() == [4, 5, 6]
        assert given["key"] is key
        assert given["kv_cache"] is written["kv_cache"]

    def test_options_reach_attend(self) -> None:
        impl = impl_for(LayerSpec(**SIZES, needs_lse=True))
        lse, scale, block_scale = torch.zeros(3, HEADS), torch.ones(()), torch.ones(1)
        self.run(impl, output_lse=lse, use_sinks=False, output_scale=scale, output_block_scale=block_scale)
        assert impl.calls[-1][1]["options"] == {
            "output_lse": lse,
            "use_sinks": False,
            "output_scale": scale,
            "output_block_scale": block_scale,
        }

    def test_sinks_are_used_unless_said_otherwise(self) -> None:
        impl = impl_for(LayerSpec(**SIZES))
        self.run(impl)
        assert impl.calls[-1][1]["options"]["use_sinks"] is True
        assert impl.calls[-1][1]["options"]["output_lse"] is None

    def test_an_output_is_made_where_none_is_given(self) -> None:
        output = self.run(impl_for(LayerSpec(**SIZES, head_size_v=32)), query=self.tokens(HEADS).half())
        assert (output.shape, output.dtype) == ((3, HEADS, 32), torch.float16)

    def test_a_layer_that_shares_anothers_kv_writes_none(self) -> None:
        impl = impl_for(LayerSpec(**SIZES), kv_sharing_target_layer_name="layers.1")
        self.run(impl)
        assert [name for name, _ in impl.calls] == ["attend"]

    @pytest.mark.parametrize("changes", [{"kv_cache": None}, {"key": None, "value": None}])
    def test_without_pages_or_without_keys_there_is_nothing_to_write(self, changes: dict[str, None]) -> None:
        impl = impl_for(LayerSpec(**SIZES))
        self.run(impl, **changes)
        assert [name for name, _ in impl.calls] == ["attend"]

    def test_a_key_without_its_value_is_refused_and_not_dropped(self) -> None:
        impl = impl_for(LayerSpec(**SIZES))
        with pytest.raises(BatchError, match="value=None"):
            self.run(impl, value=None)
        assert impl.calls == []

    def test_the_latent_of_mla_is_written_with_the_value_it_holds(self) -> None:
        impl = impl_for(LayerSpec(**MLA_SIZES))
        latent = self.tokens(1, 576)
        self.run(impl, query=self.tokens(16, 576), key=latent, value=None, kv_cache=torch.zeros(4, 4, 576))
        (_, written), (_, given) = impl.calls
        assert written["key"] is latent
        assert torch.equal(written["value"], latent[..., :512])
        assert given["value"] is None


def ranks(impl: AttentionImpl[Any]) -> tuple[int, ...]:
    return (impl.dcp_rank, impl.dcp_world_size, impl.pcp_rank, impl.pcp_world_size)


class Shares(RecordingImpl):
    """Works in groups of both kinds."""

    can_return_lse_for_decode = True
    supports_pcp = True


class TestRanks:
    def test_without_a_group_there_is_one_rank_and_no_lse_is_wanted(self) -> None:
        for impl in (impl_for(LayerSpec(**SIZES)), Shares(8, 64, 0.125)):
            assert ranks(impl) == (0, 1, 0, 1)
            assert (impl.total_cp_rank, impl.total_cp_world_size) == (0, 1)
            assert impl.need_to_return_lse_for_decode is False

    def test_a_given_group_is_kept_even_if_the_constructor_of_the_base_is_not_called(self) -> None:
        class Port(Shares):
            def __init__(self, **kwargs: Any) -> None:
                """Forgets to call the constructor of its base."""
                self.seen = ranks(self)

        given: dict[str, Any] = {"dcp": ContextParallel(4, 3), "pcp": ContextParallel(2, 1)}
        impl = Port.from_spec(LayerSpec(**SIZES), backend=AttentionBackend, layer_name="layers.0", **given)
        assert impl.seen == ranks(impl) == (3, 4, 1, 2)
        assert (impl.total_cp_rank, impl.total_cp_world_size) == (7, 8)
        assert impl.need_to_return_lse_for_decode is True

    def test_only_decode_context_parallelism_wants_the_lse(self) -> None:
        keywords: dict[str, Any] = {"backend": AttentionBackend, "layer_name": "layers.0"}
        impl = Shares.from_spec(LayerSpec(**SIZES), **keywords, pcp=ContextParallel(2, 1))
        assert impl.need_to_return_lse_for_decode is False

    @pytest.mark.parametrize(
        ("field", "flag"), [("dcp", "can_return_lse_for_decode"), ("pcp", "supports_pcp")]
    )
    def test_a_group_that_the_impl_cannot_serve_is_refused(self, field: str, flag: str) -> None:
        with pytest.raises(
            SpecError, match=rf"^{field}=.*served by RecordingImpl, which does not set {flag}"
        ):
            impl_for(LayerSpec(**SIZES), **{field: ContextParallel(2, 0)})
        one = impl_for(LayerSpec(**SIZES), **{field: ContextParallel(1, 0)})
        assert ranks(one) == (0, 1, 0, 1)

    def test_members_of_a_composite_are_in_the_groups_of_the_composite(self) -> None:
        class Two(TorchBackend):
            @staticmethod
            def get_name() -> str:
                return "TWO"

        made = composite_backend(TorchBackend, Two)
        impl = made.get_impl_cls().from_spec(
            LayerSpec(**SIZES), backend=made, layer_name="layers.0", dcp=ContextParallel(2, 1)
        )
        assert [ranks(each) for each in (impl, *impl.members.values())] == [(1, 2, 0, 1)] * 3

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((0,), "size=0 must be an integer of at least 1"),
            ((2, 2), "rank=2 must be below 2"),
            ((2, -1), "rank=-1 must be an integer of at least 0"),
            ((2.0, 0), "size=2.0 must be an integer"),
        ],
    )
    def test_groups_that_mean_nothing_are_refused(self, arguments: tuple[Any, ...], message: str) -> None:
        with pytest.raises(SpecError, match=message):
            ContextParallel(*arguments)

    def test_a_default_process_group_is_not_read_and_a_given_one_is(self) -> None:
        # A fake backend makes a group of eight ranks in one process.
        code = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from sample_batches import RecordingImpl
from test_attention_impl import Shares, ranks
from attnplug.core import AttentionBackend, ContextParallel, LayerSpec
dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
alone = Shares(8, 64, 0.125)
print(*ranks(alone), alone.need_to_return_lse_for_decode)
group = dist.new_group([4, 5])
spec = LayerSpec(num_heads=8, num_kv_heads=8, head_size=64)
given = dict(backend=AttentionBackend, layer_name="layers.0")
impl = Shares.from_spec(spec, **given, dcp=ContextParallel.of(group))
print(*ranks(impl), impl.need_to_return_lse_for_decode)
plain = RecordingImpl.from_spec(spec, **given)
print(*ranks(plain), plain.need_to_return_lse_for_decode)
dist.destroy_process_group()
"""
        env_path = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"]
        done = subprocess.run(env_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["0 1 0 1 False", "1 2 0 1 True", "0 1 0 1 False"]


def test_what_an_author_must_write() -> None:
    assert AttentionImpl.__abstractmethods__ == {"update_kv_cache", "attend"}
    assert MLAAttentionImpl.__abstractmethods__ == {"update_kv_cache", "attend", "forward_mha", "forward_mqa"}
    with pytest.raises(TypeError, match="abstract"):
        AttentionImpl(8, 64, 0.125)  # type: ignore[abstract]


def test_what_an_author_may_leave() -> None:
    impl = impl_for(LayerSpec(**SIZES))
    assert impl.process_weights_after_loading(torch.float16) is None
    assert impl.fused_output_quant_supported("fp8") is False
    assert (impl.supports_pcp, impl.supports_quant_query_input) == (False, False)
    assert impl.can_return_lse_for_decode is False
